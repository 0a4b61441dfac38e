"""What figures say: rates, ratios, tables, and where and how they were taken."""

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence

import jax

from pallas_kernels.benchmark.cases import MAX_ROWS, PLAIN, Case, Settings


def add_rates(case: Case, entry: dict, read_gb_per_s: float) -> None:
    """What each implementation achieves in its median time, and in its kernels' alone."""
    for figures in entry["implementations"].values():
        for prefix, time in (("", "median_us"), ("kernel_", "kernel_us")):
            us = figures.get(time)
            if us is None:
                continue
            if case.is_prefill:
                figures[f"{prefix}tflop_per_s"] = case.causal_flops / us / 1e6
            else:
                rate = case.committed_bytes / us / 1e3
                figures[f"{prefix}gb_per_s"] = rate
                figures[f"{prefix}share_of_pure_read"] = rate / read_gb_per_s


def quotients(entries: Sequence[dict], field: str, over, under, figure: str) -> list[dict]:
    """`figure` of cases with `over` in `field` / that of those with `under`, all else equal."""
    names = ("heads", "kv_heads", "head_dim", "committed", "batch", "rows")
    others = [name for name in names if name != field]
    same = lambda entry: tuple(entry[name] for name in others)
    below = {same(entry): entry["implementations"] for entry in entries if entry[field] == under}
    found = []
    for entry in entries:
        if entry[field] == over:
            divisors = below[same(entry)]
            ratios = {
                name: figures[figure] / divisors[name][figure]
                for name, figures in entry["implementations"].items()
                if figure in figures and figure in divisors[name]
            }
            found.append({**{name: entry[name] for name in others}, **ratios})
    return found


def all_ratios(decode: Sequence[dict], prefill: Sequence[dict]) -> dict[str, object]:
    """From wall times, and from kernel times (no ratios where those were not taken)."""
    rows = functools.partial(quotients, decode, "rows", str(MAX_ROWS), "1")
    dims = functools.partial(quotients, decode, "head_dim", 80, 128)

    def against_cudnn(figure: str) -> dict[str, float]:
        found = {}
        for entry in prefill:
            ours, cudnn = (entry["implementations"].get(name, {}) for name in ("triton", "cudnn"))
            if figure in ours and figure in cudnn:
                found[entry["model"]] = ours[figure] / cudnn[figure]
        return found

    return {
        "time_of_8_rows_over_1": {"wall": rows("median_us"), "kernel": rows("kernel_us")},
        "rate_of_head_dim_80_over_128": {
            "wall": dims("gb_per_s"),
            "kernel": dims("kernel_gb_per_s"),
        },
        "prefill_rate_of_triton_over_cudnn": {
            "wall": against_cudnn("tflop_per_s"),
            "kernel": against_cudnn("kernel_tflop_per_s"),
        },
    }


def print_tables(results: Mapping) -> None:
    """Rates of decoding are those of the first implementation, in its median time."""
    first, *others = results["implementations"]
    print(f"pure read: {results['pure_read']['gb_per_s']:.0f} GB/s")
    timed = [(name, "median") for name in others]
    timed += [(name, "kernel") for name in others if name not in PLAIN]
    columns = [f"{first} best us", "median us", "kernel us", "GB/s", "% of pure read"]
    columns += [f"{name} {time} us" for name, time in timed]
    table = None
    for entry in results["decode"]:
        if table != (table := (entry["model"], entry["committed"])):
            heads = f"{entry['heads']} heads, {entry['kv_heads']} K/V heads x {entry['head_dim']}"
            print(f"\n{entry['model']}: {heads}, committed {entry['committed']}")
            print_row("batch", "rows", *columns)
        figures = entry["implementations"]
        mine = figures[first]
        print_row(
            entry["batch"],
            entry["rows"],
            mine["best_us"],
            mine["median_us"],
            mine.get("kernel_us"),
            mine["gb_per_s"],
            100 * mine["share_of_pure_read"],
            *(figures[name].get(f"{time}_us") for name, time in timed),
        )
    print("\nprefill")
    print_row(
        "model", "rows", *(f"{name} {unit}" for name in (first, *others) for unit in ("us", "TF/s"))
    )
    for entry in results["prefill"]:
        figures = [entry["implementations"][name] for name in (first, *others)]
        cells = [one.get(key) for one in figures for key in ("median_us", "tflop_per_s")]
        print_row(entry["model"], entry["packed_rows"], *cells)
    names = results["updates"][0]["implementations"]
    print("\nupdate of the caches of all layers")
    print_row("layers", "batch", "rows", *(f"{name} us" for name in names))
    for entry in results["updates"]:
        times = (figures["median_us"] for figures in entry["implementations"].values())
        print_row(entry["layers"], entry["batch"], entry["rows"], *times)


def print_row(*cells) -> None:
    shown = (f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells)
    print(*(f"{'-' if cell is None else cell!s:>15}" for cell in shown))


def describe_run(arguments: Sequence[str], settings: Settings, commit: str | None) -> dict:
    """Everything but the figures."""
    return {
        **surroundings("jax", "jaxlib"),
        "commit": commit or checkout_commit() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "pallas_kernels.benchmark", *arguments]),
        "settings": dataclasses.asdict(settings),
    }


def surroundings(*packages: str) -> dict[str, object]:
    """What any figure depends on beside the code and its settings."""
    device = jax.devices()[0]
    return {
        "hardware": {
            "device_kind": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
            "platform": device.platform,
            "runtime": device.client.platform_version,
        },
        "versions": {
            "python": platform.python_version(),
            "driver": output_of(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            **{package: importlib.metadata.version(package) for package in packages},
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def checkout_commit() -> str | None:
    """HEAD of the checkout this package lies in, "-dirty" if files differ; None outside one."""
    here = str(pathlib.Path(__file__).parent)
    describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    return output_of("git", "-C", here, *describe)


def output_of(*command: str) -> str | None:
    """The first line that a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0] or None
