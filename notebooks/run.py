"""Run the notebooks from top to bottom, each in a fresh kernel, by default on the CPU.

    python notebooks/run.py           # fails on an error, where one takes too long, or where what
                                      # it prints is not what is stored: times are not compared
    python notebooks/run.py --write   # also stores outputs, badges and install cells
    python notebooks/run.py 02 05     # those whose names start so
    python notebooks/run.py --platform cuda --output FOLDER  # on a GPU: see what comes out there

The address of the repository is in this file alone: `--stamp` writes badges and install cells
anew without running anything.
"""

import argparse
import copy
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY, BRANCH = "emsjax/emsjax", "main"
LIMIT_S = 180
FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
INSTALL = f"""\
# Does nothing where emsjax is installed. If Colab asks for a restart, restart and go on below.
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("emsjax") is None:
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    driver = subprocess.getoutput(query).partition(".")[0]  # no number without a GPU
    extra = ("cuda" if int(driver) >= 580 else "cuda12") if driver.isdecimal() else "plots"
    if (Path.cwd().parent / "emsjax" / "__init__.py").exists():  # in notebooks/ of a checkout
        %pip install --quiet --editable "..[plots,{{extra}}]"
        sys.path.append(str(Path.cwd().parent))  # a running kernel does not see it otherwise
    else:
        %pip install --quiet "emsjax[plots,{{extra}}] @ git+https://github.com/{REPOSITORY}@{BRANCH}"
"""
TIMED = ("seconds", "measure.")  # in the source of cells that print times
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
TOLERANCE = 0.02  # of a fraction, and beside that: other processors round sums otherwise
# Nothing of the machine is to show in outputs; what a library advises is not about the notebook.
SURROUNDINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def badge(path: Path) -> str:
    """The first line of a notebook: opens it in Colab."""
    site = "https://colab.research.google.com"
    page = f"{site}/github/{REPOSITORY}/blob/{BRANCH}/notebooks/{path.name}"
    return f"[![Open in Colab]({site}/assets/colab-badge.svg)]({page})"


def stamp(notebook: dict, path: Path) -> dict:
    """The notebook with the badge as its first line and the install cell as its second cell."""
    notebook = copy.deepcopy(notebook)
    title, install = notebook["cells"][:2]
    _, *rest = "".join(title["source"]).splitlines(keepends=True)
    title["source"] = [badge(path) + "\n", *rest]
    install["source"] = INSTALL.rstrip("\n").splitlines(keepends=True)
    return notebook


def normalise(notebook: dict) -> dict:
    """Without what differs from one machine or run to the next, but for what is measured."""
    notebook = copy.deepcopy(notebook)
    notebook["metadata"] = METADATA
    for number, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"cell-{number:02}", {}
        if "outputs" in cell:
            cell["outputs"] = merge(cell["outputs"])
    return notebook


def merge(outputs: list[dict]) -> list[dict]:
    """What a cell printed in one piece, however it came."""
    merged = []
    for output in outputs:
        if "metadata" in output:
            output["metadata"] = {}
        last = merged[-1] if merged else {}
        if output["output_type"] == "stream" and output["name"] == last.get("name"):
            last["text"] = "".join([*last["text"], *output["text"]]).splitlines(keepends=True)
        else:
            merged.append(output)
    return merged


def stale(stored: dict, executed: dict) -> list[str]:
    """Where what a notebook printed is not what is stored."""
    found = []
    for number, (old, new) in enumerate(zip(stored["cells"], executed["cells"], strict=True)):
        texts = [printed(cell) for cell in (old, new)]
        if not any(word in "".join(new["source"]) for word in TIMED) and not alike(*texts):
            found.append(f"cell {number}: stored is {texts[0]!r}, and now it is {texts[1]!r}")
    return found


def printed(cell: dict) -> str:
    """Of a cell, without pictures."""
    texts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        of_text = () if "image/png" in data else data.get("text/plain", ())
        texts += [*output.get("text", ()), *of_text]
    return "".join(texts)


def alike(one: str, other: str) -> bool:
    """The same but for the last digits of fractions."""
    if NUMBER.split(one) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    near = lambda a, b: abs(float(a) - float(b)) <= TOLERANCE * (1 + abs(float(a)))
    return all(a == b or ("." in a and "." in b and near(a, b)) for a, b in pairs)


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def save(notebook: dict, path: Path) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def run(path: Path, write: bool, limit: int, platform: str, output: Path | None) -> float:
    """Seconds that the notebook takes.

    Args:
        write: store what it prints; otherwise it is compared with what is stored, on a CPU.
        limit: in seconds.
        platform: what JAX is to run on.
        output: a folder for the executed notebook, beside that; None: it is dropped.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        TimeoutError: it takes longer than the limit.
        ValueError: it prints other things than are stored.
    """
    import nbclient
    import nbformat

    os.environ |= {**SURROUNDINGS, "JAX_PLATFORMS": platform}
    stored = normalise(stamp(load(path), path))
    notebook = nbformat.reads(json.dumps(stored), as_version=4)
    begin = time.monotonic()
    client = nbclient.NotebookClient(
        notebook,
        timeout=limit,
        record_timing=False,
        resources={"metadata": {"path": FOLDER}},
    )
    client.execute()
    seconds = time.monotonic() - begin
    executed = normalise(json.loads(nbformat.writes(notebook)))
    if output is not None:
        save(executed, output / path.name)
    if write:
        save(executed, path)
    elif platform == "cpu" and (differences := stale(stored, executed)):
        raise ValueError("\n".join([*differences, "To store this: --write"]))
    if seconds > limit:
        raise TimeoutError(f"{path.name} takes {seconds:.0f} s, more than {limit}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--write", action="store_true", help="store what comes out")
    parser.add_argument("--platform", default="cpu", help="of JAX (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a folder for the executed notebooks")
    parser.add_argument("--stamp", action="store_true", help="only badges and install cells")
    parser.add_argument("--jobs", type=int, default=1, help="at a time (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    chosen = [p for p in paths() if p.name.startswith(tuple(options.names or [""]))]
    if options.stamp:
        for path in chosen:
            save(normalise(stamp(load(path), path)), path)
        return 0
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    failures, how = 0, (options.write, options.limit, options.platform, options.output)
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = {path: pool.submit(run, path, *how) for path in chosen}
        for path, job in jobs.items():
            try:
                print(f"{path.name}: {job.result():.0f} s", flush=True)
            except (
                Exception
            ) as error:  # whatever a notebook raises: the others are run all the same
                failures += 1
                print(f"{path.name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
