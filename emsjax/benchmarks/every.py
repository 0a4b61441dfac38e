"""`emsjax bench all`: every benchmark whose results are committed, at one commit on one machine.

Each runs in a process of its own and writes NAME.json into the folder; what it prints goes to
NAME.log. Where there are several GPUs, as many benchmarks run at once as there are GPUs for them,
those that need most of them first. At the end figures are drawn of the results, if matplotlib is
installed. `manifest.json` has the command, hardware, versions and commit; the devices' power limit,
clocks and temperature at the start and at the end (`device_states`); and under `runs` each
benchmark's command, environment variables (the devices that it saw, if not all, and its share of
their memory), the GPUs that it ran on, seconds and exit code. Started again, it goes on with those
that have not ended with 0, whose earlier attempts are kept: the results of one that was interrupted
may be of several. A folder holds the results of one commit and one kind of device.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from emsjax.benchmarks import figures
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import write_results
from emsjax.records.writing import to_json

MANIFEST = "manifest.json"
DEVICE_STATE = "name,power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu"
LEFT_OUT, EARLIER = "left out", "earlier"
VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"


class Run(NamedTuple):
    """One of the benchmarks.

    Attributes:
        arguments: of `python -m`, without the output and the commit.
        devices: as many are needed.
        memory: the share of the devices' memory that JAX takes; None: JAX's default.
    """

    arguments: str
    devices: int = 1
    memory: float | None = None


STEP, EMS_SD = "emsjax bench step", "emsjax bench ems-sd --repeats 5"
NARROW = {
    "int8": "--quantize int8 --kv-dtype int8",
    "fp8": "--quantize fp8 --kv-dtype fp8",
    "int4": "--quantize int4",
}
SHAPES = "--shapes 1x1,1x8,8x1,8x8,24x1,24x8,64x8"
TWO, FOUR = (f"--tensor-parallel {n}" for n in (2, 4))
EMS_ALONE = f"{EMS_SD} --methods ems"
LARGE = "--shapes 1x1,8x8,24x1,24x8 --profile-top 0"
# By the number of devices that they need.
ON_ONE = {
    "kernels": "pallas_kernels.benchmark",
    "profile": "emsjax profile --model opt-6.7b --draft-model opt-125m",
    "step": f"{STEP} {SHAPES} --profile-top 16",
    "step-again": f"{STEP} {SHAPES} --profile-top 0",  # for another GPU of this kind
    **{f"step-{name}": f"{STEP} {SHAPES} {options}" for name, options in NARROW.items()},
    "step-llama-3.1-8b": f"{STEP} --model llama-3.1-8b",
    "step-qwen3-8b": f"{STEP} --model qwen3-8b",
    "step-qwen3-8b-invariant": f"{STEP} --model qwen3-8b --numerics invariant",
    "step-opt-13b": f"{STEP} --model opt-13b --profile-top 0",
    "step-opt-66b": f"{STEP} --model opt-66b --shapes 1x1 --profile-top 0",
    "step-opt-66b-int8": f"{STEP} --model opt-66b {LARGE} {NARROW['int8']}",
    "ems-sd": f"{EMS_SD} --shape opt-6.7b --batch-sizes 1,4,8,16,24,32,64",
    "ems-sd-int8": f"{EMS_SD} --shape opt-6.7b --methods greedy,ems --batch-sizes 1,8,24,64 "
    f"{NARROW['int8']}",
    "ems-sd-qwen3-8b": f"{EMS_SD} --shape qwen3-8b --methods greedy,ems --batch-sizes 1,8,24,64",
    "ems-sd-qwen3-8b-invariant": f"{EMS_ALONE} --shape qwen3-8b --batch-sizes 1,8,24,64 "
    "--numerics invariant",
    "self-draft": f"{EMS_SD} --shape opt-6.7b --draft self --methods greedy,ems --batch-sizes 1,8",
    "ems-sd-opt-13b": f"{EMS_ALONE} --shape opt-13b --batch-sizes 24",
    "drafting": "emsjax bench drafting --model qwen3-8b --draft-model qwen3-0.6b",
    "drafting-int4": "emsjax bench drafting --model qwen3-8b --sources eagle3,block,observed "
    "--draft-quantize int4",
    "drafting-opt-6.7b": "emsjax bench drafting --sources suffix,tree --kv-dtype int8 "
    "--context 1850 --batch-sizes 64",
    "draft-length": "emsjax bench draft-length --shape opt-6.7b --draws 2 "
    "--workloads llma,mixed,draft-model,candidates,first-candidates",
    "draft-length-int8": "emsjax bench draft-length --shape opt-6.7b --draws 2 --workloads llma "
    f"{NARROW['int8']}",
    "drafters": "emsjax bench drafters --draft-tokens 8",
    "peers": "emsjax bench peers --shape opt-6.7b --repeats 5",
    "refill": "emsjax bench refill --repeats 5",
    "buckets": "emsjax bench buckets",
    "overheads": "emsjax bench overheads",
    "first-call": "emsjax bench first-call",
    "training": "emsjax bench training",
    "quality": "emsjax bench quality",
    "divergences": "emsjax bench divergences --models opt-1.3b --batch-sizes 1,8,64 "
    "--max-new-tokens 690",
    "invariance": "emsjax bench invariance --layers 1 --skip-fast --processes 8",
}
ON_TWO = {
    "step-opt-13b-two-devices": f"{STEP} --model opt-13b {TWO}",
    "step-opt-66b-two-devices": f"{STEP} --model opt-66b {LARGE} {TWO}",
    "step-llama-3.1-70b-two-devices": f"{STEP} --model llama-3.1-70b {LARGE} {TWO}",
    "ems-sd-opt-13b-two-devices": f"{EMS_ALONE} --shape opt-13b --batch-sizes 24 {TWO}",
    "ems-sd-opt-66b-two-devices": f"{EMS_ALONE} --shape opt-66b --batch-sizes 8,24 {TWO}",
    "groups-opt-13b-two-devices": "emsjax bench groups --shape opt-13b --sizes 1,2",
}
ON_FOUR = {
    "step-opt-13b-four-devices": f"{STEP} --model opt-13b {FOUR}",
    "step-opt-66b-four-devices": f"{STEP} --model opt-66b {LARGE} {FOUR}",
    "step-llama-3.1-70b-four-devices": f"{STEP} --model llama-3.1-70b {LARGE} {FOUR}",
    "ems-sd-opt-66b-four-devices": f"{EMS_ALONE} --shape opt-66b --batch-sizes 8,24 {FOUR}",
    "groups-opt-13b-four-devices": "emsjax bench groups --shape opt-13b --sizes 1,2,4",
}
LARGE_MODELS, MOST_MEMORY = ("opt-66b", "llama-3.1-70b"), 0.94


def memory_of(arguments: str) -> float | None:
    """The memory of a run with these arguments: see `Run`."""
    return MOST_MEMORY if any(model in arguments for model in LARGE_MODELS) else None


RUNS = {
    name: Run(arguments, devices, memory_of(arguments))
    for devices, runs in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR))
    for name, arguments in runs.items()
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
    devices = visible_devices(found.pop("devices"))
    manifest = begin(options, command, found)

    def add(name: str, record: dict[str, Any]) -> None:
        manifest["runs"][name] = behind(manifest["runs"].get(name), record)
        write_results(manifest, options.output / MANIFEST)
        print(f"{name}: {shown(record)}", flush=True)

    missing = {
        name: one
        for name, one in runs.items()
        if manifest["runs"].get(name, {}).get("exit_code") != 0
    }
    for name, one in list(missing.items()):
        if one.devices > len(devices):
            needed = f"{one.devices} devices are needed, and there are {len(devices)}"
            add(name, {LEFT_OUT: needed})
            del missing[name]
    for name, record in measured(missing, devices, options.output, manifest["commit"]):
        add(name, record)
    manifest["device_states"].append(device_state())
    write_results(manifest, options.output / MANIFEST)
    try:
        for path in figures.draw(options.output):
            print(path)
    except ImportError as error:
        print(f"no figures: {error}")
    return max((manifest["runs"][name].get("exit_code", 0) for name in runs), default=0)


def behind(before: Mapping[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """The record of a benchmark with the attempts before it, of which the last one is `before`."""
    if before is None or LEFT_OUT in before:
        return record
    attempt = {name: before[name] for name in ("gpus", "exit_code", "seconds")}
    return record | {EARLIER: [*before.get(EARLIER, []), attempt]}


def visible_devices(count: int) -> list[str]:
    """The numbers of this machine's devices by which other processes see some of them."""
    chosen = os.environ.get(VISIBLE)
    return [str(i) for i in range(count)] if chosen is None else chosen.split(",")[:count]


def measured(
    runs: Mapping[str, Run], devices: list[str], folder: Path, commit: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures all benchmarks, and yields the name and the record of each as it ends.

    Args:
        devices: the numbers of the devices, which are enough for each of the benchmarks.

    Raises:
        KeyboardInterrupt: after the records of those that were interrupted with it.
    """
    interrupted = False
    # A stable order, so that those that need one device do not keep the others waiting.
    waiting = sorted(runs, key=lambda name: -runs[name].devices)
    free = list(devices)
    at_work: dict[Future, tuple[str, list[str]]] = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        while waiting or at_work:
            for name in list(waiting):
                if (needed := runs[name].devices) <= len(free):
                    waiting.remove(name)
                    own, free = free[:needed], free[needed:]
                    seen = None if needed == len(devices) else own
                    begun = pool.submit(measure, name, runs[name], folder, commit, seen)
                    at_work[begun] = (name, own)
            try:
                done = wait(at_work, return_when=FIRST_COMPLETED).done
            except KeyboardInterrupt:
                done, interrupted, waiting = wait(at_work).done, True, []
            for ended in done:
                name, own = at_work.pop(ended)
                free = sorted(free + own, key=devices.index)
                yield name, ended.result()
    if interrupted:
        raise KeyboardInterrupt


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


def measure(
    name: str, run: Run, folder: Path, commit: str | None, devices: list[str] | None
) -> dict[str, Any]:
    """Runs a benchmark; returns its command, environment variables, GPUs, exit code and seconds.

    Args:
        devices: the only devices that it sees; None: all.
    """
    words = [*run.arguments.split(), "--output", str(folder / f"{name}.json")]
    words += [] if commit is None else ["--commit", commit]
    given = {} if devices is None else {VISIBLE: ",".join(devices)}
    given |= {} if run.memory is None else {MEMORY: str(run.memory)}
    program, environment, started = [sys.executable, "-m", *words], os.environ | given, time.time()
    with (folder / f"{name}.log").open("ab") as log:
        ended = subprocess.run(program, stdout=log, stderr=log, check=False, env=environment)
    return {
        "command": shlex.join(words),
        "environment": given,
        "gpus": asked_of_gpus("uuid", environment.get(VISIBLE)),
        "exit_code": ended.returncode,
        "seconds": round(time.time() - started, 1),
    }


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
    """The commits that a JSON value names at any depth; a profile has kernels of that name."""
    if isinstance(results, dict):
        if not isinstance(results.get("commit", {}), dict):
            yield results["commit"]
        results = list(results.values())
    for value in results if isinstance(results, list) else ():
        yield from commits_of(value)


def device_state() -> list[str] | None:
    """Name, power limit, clocks and temperature of the GPUs now; None: they cannot be asked."""
    return asked_of_gpus(DEVICE_STATE)


def asked_of_gpus(names: str, visible: str | None = None) -> list[str] | None:
    """A line for each GPU, or for the visible ones; None: they cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None or visible == "":
        return None
    chosen = [] if visible is None else [f"--id={visible}"]
    asked = [program, f"--query-gpu={names}", "--format=csv,noheader", *chosen]
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
