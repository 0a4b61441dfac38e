"""`emsjax bench all`: every benchmark whose results are committed, at one commit on one device.

Each runs in a process of its own, one after the other, and writes NAME.json into the folder; what
it prints goes to NAME.log. `manifest.json` has the command, hardware, versions and commit; the
device's power limit, clocks and temperature at the start and at the end (`device_states`); and
under `runs` each benchmark's command, seconds and exit code. Started again, it goes on with those
that have not ended with 0. A folder holds the results of one commit and one kind of device.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import write_results
from emsjax.records.writing import to_json

MANIFEST = "manifest.json"
DEVICE_STATE = "name,power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu"
LEFT_OUT = "left out"


class Run(NamedTuple):
    """One of the benchmarks.

    Attributes:
        arguments: of `python -m`, without the output and the commit.
        devices: as many are needed.
    """

    arguments: str
    devices: int = 1


STEP, EMS_SD = "emsjax bench step", "emsjax bench ems-sd --repeats 5"
NARROW = {
    "int8": "--quantize int8 --kv-dtype int8",
    "fp8": "--quantize fp8 --kv-dtype fp8",
    "int4": "--quantize int4",
}
SHAPES = "--shapes 1x1,1x8,8x1,8x8,24x1,24x8,64x8"
RUNS = {
    "kernels": Run("pallas_kernels.benchmark"),
    "step": Run(f"{STEP} {SHAPES} --profile-top 16"),
    **{f"step-{name}": Run(f"{STEP} {SHAPES} {options}") for name, options in NARROW.items()},
    "step-llama-3.1-8b": Run(f"{STEP} --model llama-3.1-8b"),
    "step-qwen3-8b": Run(f"{STEP} --model qwen3-8b"),
    "step-qwen3-8b-invariant": Run(f"{STEP} --model qwen3-8b --numerics invariant"),
    "step-opt-13b": Run(f"{STEP} --model opt-13b --profile-top 0"),
    "step-opt-13b-two-devices": Run(f"{STEP} --model opt-13b --tensor-parallel 2", devices=2),
    "ems-sd": Run(f"{EMS_SD} --shape opt-6.7b"),
    "ems-sd-int8": Run(f"{EMS_SD} --shape opt-6.7b --methods greedy,ems {NARROW['int8']}"),
    "ems-sd-qwen3-8b": Run(f"{EMS_SD} --shape qwen3-8b --methods greedy,ems"),
    "ems-sd-qwen3-8b-invariant": Run(
        f"{EMS_SD} --shape qwen3-8b --methods ems --numerics invariant"
    ),
    "ems-sd-opt-13b": Run(f"{EMS_SD} --shape opt-13b --methods ems --batch-sizes 24"),
    "ems-sd-opt-13b-two-devices": Run(
        f"{EMS_SD} --shape opt-13b --methods ems --batch-sizes 24 --tensor-parallel 2", devices=2
    ),
    "drafting": Run("emsjax bench drafting --model qwen3-8b --draft-model qwen3-0.6b"),
    "drafting-int8": Run(
        "emsjax bench drafting --model qwen3-8b --sources eagle3,block --draft-quantize int8"
    ),
    "draft-length": Run("emsjax bench draft-length --shape opt-6.7b"),
    "drafters": Run("emsjax bench drafters"),
    "peers": Run("emsjax bench peers --shape opt-6.7b"),
    "refill": Run("emsjax bench refill"),
    "buckets": Run("emsjax bench buckets"),
    "overheads": Run("emsjax bench overheads"),
    "first-call": Run("emsjax bench first-call"),
    "training": Run("emsjax bench training"),
    "quality": Run("emsjax bench quality"),
    "divergences": Run(
        "emsjax bench divergences --models opt-1.3b --batch-sizes 1,8,64 --max-new-tokens 690"
    ),
    "invariance": Run("emsjax bench invariance --layers 1 --skip-fast --processes 8"),
}
ASK = (
    "import jax; from emsjax.records.writing import to_json; "
    "from emsjax.terminal.surroundings import surroundings; "
    "print(to_json({'devices': jax.device_count(), **surroundings(None)}))"
)


def chosen_runs(names: tuple[str, ...] | None) -> dict[str, Run]:
    """The runs with these names, in the order of all; None: all.

    Raises:
        ValueError: a name is unknown.
    """
    if unknown := [name for name in names or () if name not in RUNS]:
        raise ValueError(f"--only: unknown {', '.join(unknown)}; known are {', '.join(RUNS)}")
    return {name: run for name, run in RUNS.items() if names is None or name in names}


def run(options: argparse.Namespace, command: str) -> int:
    runs = chosen_runs(options.only)
    options.output.mkdir(parents=True, exist_ok=True)
    # Other processes are asked, as one that holds a device would leave the benchmarks no memory.
    found = json.loads(_output_of([sys.executable, "-c", ASK]).splitlines()[-1])
    devices = found.pop("devices")
    manifest = begin(options, command, found)
    for name, one in runs.items():
        record = manifest["runs"].get(name, {})
        if record.get("exit_code") == 0:
            continue
        if one.devices > devices:
            record = {LEFT_OUT: f"{one.devices} devices are needed, and there are {devices}"}
        else:
            record = measure(name, one, options.output, manifest["commit"])
        manifest["runs"][name] = record
        write_results(manifest, options.output / MANIFEST)
        print(f"{name}: {shown(record)}", flush=True)
    manifest["device_states"].append(device_state())
    write_results(manifest, options.output / MANIFEST)
    return max((manifest["runs"][name].get("exit_code", 0) for name in runs), default=0)


def begin(options: argparse.Namespace, command: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a folder, new or that of an earlier run which is continued.

    Args:
        found: this machine's versions and hardware, and the checkout's commit.

    Raises:
        ValueError: the folder has results of another commit, of other versions or another device.
    """
    found = {**found, "commit": options.commit or found["commit"]}
    path = options.output / MANIFEST
    if not path.exists():
        return {"command": command, **found, "device_states": [device_state()], "runs": {}}
    manifest = json.loads(path.read_bytes())
    for name in ("commit", "hardware", "versions"):
        if manifest[name] != json.loads(to_json(found[name])):
            raise ValueError(
                f"{options.output} has results with {name} {manifest[name]}, and this is "
                f"{found[name]}: choose another folder"
            )
    manifest["device_states"].append(device_state())
    return manifest


def measure(name: str, run: Run, folder: Path, commit: str | None) -> dict[str, Any]:
    """Runs a benchmark; returns its command, exit code and seconds."""
    words = [*run.arguments.split(), "--output", str(folder / f"{name}.json")]
    words += [] if commit is None else ["--commit", commit]
    started = time.time()
    with (folder / f"{name}.log").open("ab") as log:
        ended = subprocess.run([sys.executable, "-m", *words], stdout=log, stderr=log, check=False)
    seconds = round(time.time() - started, 1)
    return {"command": shlex.join(words), "exit_code": ended.returncode, "seconds": seconds}


def check_one_commit(folder: Path) -> None:
    """Checks that all results in a folder of `emsjax bench all` are of its manifest's commit.

    A resumed benchmark names the commit of each of its entries, which are checked too.

    Raises:
        ValueError: the manifest names no commit, or a file names another one or none; the message
            has the names of all such files, each with its commits.
        OSError: the folder has no manifest.
    """
    commit = json.loads((folder / MANIFEST).read_bytes())["commit"]
    if commit is None:
        raise ValueError(f"{folder / MANIFEST} names no commit")
    found = {
        path.name: sorted(set(map(str, commits_of(json.loads(path.read_bytes())))))
        for path in sorted(folder.glob("*.json"))
        if path.name != MANIFEST
    }
    others = {name: of for name, of in found.items() if of != [commit]}
    if others:
        shown = "; ".join(f"{name}: {', '.join(of) or 'none'}" for name, of in others.items())
        raise ValueError(f"{folder} has results that are not of commit {commit}: {shown}")


def commits_of(results: Any) -> Iterator[str | None]:
    """The commits that a JSON value names at any depth."""
    if isinstance(results, dict):
        if "commit" in results:
            yield results["commit"]
        results = list(results.values())
    for value in results if isinstance(results, list) else ():
        yield from commits_of(value)


def device_state() -> list[str] | None:
    """Name, power limit, clocks and temperature of the GPUs now; None: they cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, f"--query-gpu={DEVICE_STATE}", "--format=csv,noheader"]
    return _output_of(asked).splitlines()


def shown(record: Mapping[str, Any]) -> str:
    """A line on how a benchmark ended."""
    if LEFT_OUT in record:
        return f"left out: {record[LEFT_OUT]}"
    how = "done" if record["exit_code"] == 0 else f"exit code {record['exit_code']}"
    return f"{how} in {record['seconds']:.0f} s"


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(BENCHMARKS["all"].main())
