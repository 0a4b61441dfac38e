"""Benchmark of ragged attention: `python -m pallas_kernels.benchmark --output FILE.json`.

Decoding and prefill at the head shapes of OPT models, against cuDNN's attention
over a padded batch, and against the rate at which the device reads memory. All
outputs are compared before anything is timed.

A program is a chain of calls, each one's output the next one's query, over so many
caches that the GPU's L2 keeps none of them from one use to the next. Rates count
the committed keys and values, once each; they follow from median times.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from pallas_kernels import measure
from pallas_kernels.implementations import runs_triton
from pallas_kernels.measure import Case

MAX_ROWS = 8  # of a sample that decodes
TOLERANCE = 2e-2  # of the norm of a row's head, in bfloat16
REFERENCE_BATCH, REFERENCE_ROWS = 8, 64  # the dense reference gathers a cache for each row
PLAIN = ("xla", "reference")  # slow and long to compile
ERROR_CHARACTERS = 500


class MismatchError(Exception):
    """Implementations disagree."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and how long."""

    models: tuple[tuple[str, int, int], ...]  # name, heads, head_dim
    totals: tuple[tuple[int, int], ...]  # batch, committed tokens of its random lengths
    shortest: int  # random length
    max_len: int  # of caches with random lengths
    full_len: int  # of caches that MAX_ROWS fresh rows fill up
    prefill: tuple[int, int, int]  # samples, tokens of each, max_len of the empty caches
    calls: int  # in a chain of short ones
    rotated_bytes: int  # committed in all caches of a chain together
    read: tuple[int, int]  # buffers, bytes of each
    repetitions: int
    seconds: float  # of a repetition; two runs where they take longer


FULL = Settings(
    models=(("OPT-6.7B", 32, 128), ("OPT-2.7B", 32, 80)),
    totals=((1, 768), (8, 6700), (24, 18571), (64, 46742)),
    shortest=512,
    max_len=1024,
    full_len=2048,
    prefill=(8, 1919, 256),
    calls=32,
    rotated_bytes=2**28,
    read=(4, 2**30),
    repetitions=10,
    seconds=0.01,
)
QUICK = Settings(
    models=(("2x128", 2, 128), ("2x80", 2, 80)),
    totals=((3, 50),),
    shortest=8,
    max_len=32,
    full_len=40,
    prefill=(2, 24, 16),
    calls=8,
    rotated_bytes=0,
    read=(2, 2**16),
    repetitions=2,
    seconds=0.0,
)


def decode_cases(settings: Settings) -> list[Case]:
    """Every head shape x kind of lengths x batch x rows per sample."""
    longest, full = settings.max_len - MAX_ROWS, settings.full_len - MAX_ROWS
    drawn = f"random {settings.shortest}..{longest}"
    cases = []
    for model, kind in itertools.product(settings.models, (drawn, f"all {full}")):
        for batch, total in settings.totals:
            committed = (kind, settings.full_len, (full,) * batch)
            if kind == drawn:
                lengths = random_lengths(batch, total, settings.shortest, longest)
                committed = (kind, settings.max_len, lengths)
            ragged = np.random.default_rng(batch).integers(1, MAX_ROWS + 1, batch)
            cases += [
                Case(*model, "1", *committed, (1,) * batch, 1),
                Case(*model, str(MAX_ROWS), *committed, (MAX_ROWS,) * batch, MAX_ROWS),
                Case(*model, "ragged", *committed, tuple(ragged.tolist()), MAX_ROWS),
            ]
    return cases


def random_lengths(batch: int, total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Seeded by the batch; each within the bounds, and `total` together."""
    rng = np.random.default_rng(batch)
    lengths = rng.integers(shortest, longest + 1, batch)
    while missing := total - int(lengths.sum()):
        bound, step = (longest, 1) if missing > 0 else (shortest, -1)
        lengths[rng.choice(np.flatnonzero(lengths != bound))] += step
    return tuple(lengths.tolist())


def prefill_cases(settings: Settings) -> list[Case]:
    """Whole prompts over empty caches."""
    batch, tokens, max_len = settings.prefill
    rows = ("none", max_len, (0,) * batch, (tokens,) * batch, tokens)
    return [Case(*model, "prefill", *rows) for model in settings.models]


def count_caches(case: Case, settings: Settings) -> int:
    """As many as hold `rotated_bytes`; empty ones need no rotation."""
    if case.is_prefill:
        return 1
    return max(2, math.ceil(settings.rotated_bytes / case.committed_bytes))


def count_calls(name: str, case: Case, settings: Settings) -> int:
    """Calls in a chain: fewer of long ones; all caches take equal turns."""
    if case.is_prefill:
        return 1 if name in PLAIN else settings.calls // 8
    wanted = max(settings.calls // 4, min(settings.calls, 16 * settings.calls // case.batch))
    if name in PLAIN:
        wanted = settings.calls // 8
    caches = count_caches(case, settings)
    return caches * math.ceil(wanted / caches)


def implementations() -> tuple[str, ...]:
    """Those to time; the table is about the first."""
    return ("triton", "xla", "cudnn") if runs_triton() else PLAIN


def expected_from(case: Case) -> str:
    """The implementation whose output the others must match."""
    small = case.batch <= REFERENCE_BATCH and sum(case.counts) <= REFERENCE_ROWS
    return "reference" if small else "xla"


def build(cases: Sequence[Case], names: Sequence[str], settings: Settings):
    """Compile everything: for each case its inputs, and its programs by name."""
    jobs = {}
    for case in cases:
        jobs[case, "inputs"] = functools.partial(measure.build_inputs, case)
        for name in dict.fromkeys((*names, expected_from(case))):
            shape = (count_calls(name, case, settings), count_caches(case, settings))
            jobs[case, name] = functools.partial(measure.build_program, name, case, *shape)
    built = measure.compile_all(jobs)
    inputs = {case: built.pop((case, "inputs")) for case in cases}
    programs = {case: {} for case in cases}
    for (case, name), program in built.items():
        programs[case][name] = program
    return inputs, programs


def run_all(settings: Settings, profile: bool) -> dict[str, object]:
    """Compile, compare, time and profile every case.

    Raises:
        MismatchError: implementations disagree.
    """
    names = implementations()
    cases = [*decode_cases(settings), *prefill_cases(settings)]
    log(f"compiling {len(cases)} cases")
    inputs, programs = build(cases, names, settings)

    def bind(case: Case) -> dict:
        return measure.bind(inputs[case], programs[case], count_caches(case, settings))

    log("comparing outputs")
    errors = {}
    for case in cases:
        errors[case] = measure.compare(case, bind(case), programs[case], expected_from(case))
    check(errors)

    log("timing")
    read = measure.pure_read(*settings.read, settings.repetitions, settings.seconds)
    entries = []
    for case in cases:
        # What others were only compared with is not timed.
        programs[case] = {name: programs[case][name] for name in names}
        entries.append(time_case(case, programs[case], bind(case), errors[case], settings))

    log("profiling" if profile else "not profiling")
    # Last, lest the profiler disturb the timing.
    for case, entry in zip(cases, entries, strict=True) if profile else ():
        runs = bind(case)
        for name, seconds in zip(runs, measure.kernel_seconds(runs.values()) or (), strict=False):
            calls = programs[case][name].calls
            entry["implementations"][name]["kernel_us"] = 1e6 * seconds / calls
    for case, entry in zip(cases, entries, strict=True):
        add_rates(case, entry, read["gb_per_s"])
    decode = [entry for entry in entries if entry["rows"] != "prefill"]
    prefill = [entry for entry in entries if entry["rows"] == "prefill"]
    return {
        "implementations": names,
        "pure_read": read,
        "decode": decode,
        "prefill": prefill,
        "ratios": all_ratios(decode, prefill),
    }


def check(errors: Mapping[Case, Mapping[str, float]]) -> None:
    """Raise what `run_all` documents."""
    wrong = [
        f"{case.model}, committed {case.committed}, batch {case.batch}, rows {case.rows}: "
        f"{name} differs from {expected_from(case)} by {error:.3g} of the norm of a row's head"
        for case, case_errors in errors.items()
        for name, error in case_errors.items()
        if not error <= TOLERANCE  # NaN is wrong as well
    ]
    if wrong:
        raise MismatchError("\n".join(wrong))


def time_case(case: Case, programs, runs, errors, settings: Settings) -> dict[str, object]:
    """The case's entry in the results."""
    figures = {}
    for name, program in programs.items():
        if name in runs:
            seconds = measure.time_runs(runs[name], settings.repetitions, settings.seconds)
            how = {"calls": program.calls, "form": program.form, "max_error": errors[name]}
            figures[name] = {**measure.best_and_median_us(seconds, program.calls), **how}
        else:
            figures[name] = {"error": program.error[:ERROR_CHARACTERS]}
    return {**case.describe(), "implementations": figures}


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
    others = [name for name in ("head_dim", "committed", "batch", "rows") if name != field]
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
    columns = [f"{first} us", "kernel us", "GB/s", "% of read", *(f"{name} us" for name in others)]
    table = None
    for entry in results["decode"]:
        if table != (table := (entry["model"], entry["committed"])):
            print(
                f"\n{entry['model']}: {entry['heads']} heads x {entry['head_dim']}, committed "
                f"{entry['committed']}"
            )
            print_row("batch", "rows", *columns)
        figures = entry["implementations"]
        mine = figures[first]
        print_row(
            entry["batch"],
            entry["rows"],
            mine["median_us"],
            mine.get("kernel_us"),
            mine["gb_per_s"],
            100 * mine["share_of_pure_read"],
            *(figures[name].get("median_us") for name in others),
        )
    print("\nprefill")
    print_row(
        "model", "rows", *(f"{name} {unit}" for name in (first, *others) for unit in ("us", "TF/s"))
    )
    for entry in results["prefill"]:
        figures = [entry["implementations"][name] for name in (first, *others)]
        cells = [one.get(key) for one in figures for key in ("median_us", "tflop_per_s")]
        print_row(entry["model"], entry["packed_rows"], *cells)


def print_row(*cells) -> None:
    shown = (f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells)
    print(*(f"{'-' if cell is None else cell!s:>14}" for cell in shown))


def describe_run(arguments: Sequence[str], settings: Settings, commit: str | None) -> dict:
    """Everything but the figures."""
    device = jax.devices()[0]
    here = str(pathlib.Path(__file__).parent)
    return {
        "hardware": {
            "device_kind": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
        },
        "versions": {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
            "driver": output_of(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
        },
        "commit": commit or output_of("git", "-C", here, "rev-parse", "HEAD") or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "pallas_kernels.benchmark", *arguments]),
        "settings": dataclasses.asdict(settings),
    }


def output_of(*command: str) -> str | None:
    """The first line that a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0] or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if implementations disagree."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.benchmark")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--commit", metavar="HASH", help="to record; default: git's HEAD")
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=jax.default_backend() == "gpu",
        help="take kernel times too; default: on GPUs",
    )
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else FULL
    try:
        results = run_all(settings, options.profile)
    except MismatchError as mismatch:
        log(str(mismatch))
        return 1
    results = {**describe_run(arguments, settings, options.commit), **results}
    if options.output:
        options.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print_tables(results)
    return 0


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
