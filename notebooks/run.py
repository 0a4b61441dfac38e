"""Run the notebooks from top to bottom, each in a fresh kernel, by default on the CPU.

    python notebooks/run.py           # fails if a notebook raises, hangs or prints other output
                                      # than is stored; times are not compared
    python notebooks/run.py --write   # also stores outputs, badges and install cells
    python notebooks/run.py 02 05     # only notebooks whose names start with 02 or 05
    python notebooks/run.py --platform cuda --output FOLDER  # on a GPU, for outputs from there

The repository's address is only in this file: `--stamp` rewrites badges and install cells
without running anything.
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
# Far more than a notebook takes, even on a slow processor beside other work: beyond it one hangs.
LIMIT_S = 1200
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
TIMED = ("seconds", "measure.")  # these occur in the source of cells that print times
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Relative and absolute tolerance of fractions, as processors differ in how they round sums.
TOLERANCE = 0.02
# Outputs must not show the machine, and libraries' advice has nothing to do with the notebook.
SURROUNDINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def badge(path: Path) -> str:
    """Returns the first line of a notebook, a badge that opens it in Colab."""
    site = "https://colab.research.google.com"
    page = f"{site}/github/{REPOSITORY}/blob/{BRANCH}/notebooks/{path.name}"
    return f"[![Open in Colab]({site}/assets/colab-badge.svg)]({page})"


def stamp(notebook: dict, path: Path) -> dict:
    """Sets the badge as the notebook's first line and the install cell as its second cell."""
    notebook = copy.deepcopy(notebook)
    title, install = notebook["cells"][:2]
    _, *rest = "".join(title["source"]).splitlines(keepends=True)
    title["source"] = [badge(path) + "\n", *rest]
    install["source"] = INSTALL.rstrip("\n").splitlines(keepends=True)
    return notebook


def normalise(notebook: dict) -> dict:
    """Removes what differs between machines or runs, except measured values."""
    notebook = copy.deepcopy(notebook)
    notebook["metadata"] = METADATA
    for number, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"cell-{number:02}", {}
        if "outputs" in cell:
            cell["outputs"] = merge(cell["outputs"])
    return notebook


def merge(outputs: list[dict]) -> list[dict]:
    """Joins consecutive pieces of a cell's printed output into one."""
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
    """Lists the cells whose printed output differs from the stored output."""
    found = []
    for number, (old, new) in enumerate(zip(stored["cells"], executed["cells"], strict=True)):
        texts = [printed(cell) for cell in (old, new)]
        if not any(word in "".join(new["source"]) for word in TIMED) and not alike(*texts):
            found.append(f"cell {number}: stored is {texts[0]!r}, and now it is {texts[1]!r}")
    return found


def printed(cell: dict) -> str:
    """Returns the text that a cell printed, without pictures."""
    texts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        of_text = () if "image/png" in data else data.get("text/plain", ())
        texts += [*output.get("text", ()), *of_text]
    return "".join(texts)


def alike(one: str, other: str) -> bool:
    """Returns whether two texts are the same except for the last digits of fractions."""
    if NUMBER.split(one) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    near = lambda a, b: abs(float(a) - float(b)) <= TOLERANCE * (1 + abs(float(a)))
    return all(a == b or ("." in a and "." in b and near(a, b)) for a, b in pairs)


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def save(notebook: dict, path: Path) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def run(path: Path, write: bool, limit: int, platform: str, output: Path | None) -> float:
    """Runs a notebook and returns how many seconds it took.

    Args:
        write: store the outputs; otherwise, on a CPU, compare them with the stored ones.
        limit: time limit in seconds.
        platform: the platform that JAX runs on.
        output: a folder in which to save the executed notebook as well; None: it is not saved.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        TimeoutError: the notebook takes longer than the limit.
        ValueError: the outputs differ from the stored ones.
    """
    import nbclient
    import nbformat

    os.environ |= {**SURROUNDINGS, "JAX_PLATFORMS": platform}
    stored = normalise(stamp(load(path), path))
    notebook = nbformat.reads(json.dumps(stored, allow_nan=False), as_version=4)
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
            except Exception as error:  # any error: the other notebooks still run
                failures += 1
                print(f"{path.name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
