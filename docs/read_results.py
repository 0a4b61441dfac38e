"""Results of `emsjax bench all` that belong together, and what is in them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import Results, number

from emsjax.benchmarks.every import commits_of


class Read(Mapping[str, Results]):
    """Results by name, and those that were read, which must belong together.

    Args:
        folder: of `emsjax bench all`.
        prefix: what the names of files begin with.
    """

    def __init__(self, folder: Path, prefix: str = ""):
        self.folder, self.prefix, self.read = folder, prefix, {}

    def __getitem__(self, name: str) -> Results:
        if name not in self.read:
            path = self.folder / f"{self.prefix}{name}.json"
            self.read[name] = json.loads(path.read_bytes())
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)

    def where(self, devices: str = "one") -> str:
        """The devices, versions and commit of all that was read.

        Raises:
            ValueError: there are several of these.
        """
        described = {
            f"{of['hardware']['device']}{'' if devices == 'one' else 's'}, "
            f"jax {of['versions']['jax']}, driver {of['versions']['driver']}, commit {commit[:7]}"
            for of in self.read.values()
            for commit in commits_of(of)  # a resumed measurement may have several
        }
        if len(described) != 1:
            raise ValueError(f"{', '.join(self)} do not belong together: {sorted(described)}")
        return f"{devices} {described.pop()}"

    def check_one_gpu(self) -> None:
        """Raises ValueError if the manifest has other GPUs for some of what was read."""
        runs = json.loads((self.folder / f"{self.prefix}manifest.json").read_bytes())["runs"]
        if len({tuple(runs[name].get("gpus") or ()) for name in self}) != 1:
            raise ValueError(f"{', '.join(self)} were measured on several GPUs")

    def command(self) -> str:
        """The command that measures what was read again, in Markdown."""
        return f"```bash\nemsjax bench all --output results --only {','.join(self)}\n```"


def shapes(results: Results) -> dict[str, Mapping[str, Any]]:
    """Entries of `emsjax bench step` by their shape, as `8 x 1`."""
    return {f"{of['batch']} x {of['rows_per_sample']}": of for of in results["shapes"]}


def batches(results: Results, method: str = "ems") -> dict[int, Mapping[str, Any]]:
    """What `emsjax bench ems-sd` measured of a method, by batch size."""
    return {of["batch"]: of["methods"][method] for of in results["entries"]}


def median(of: Mapping[str, Any], which: str = "tokens_per_s") -> float:
    return of[which]["median"]


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def listed(items: Sequence[str]) -> str:
    """Items of a sentence."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def ratio_of(some: Mapping, others: Mapping, shape: str) -> str:
    return number(some[shape]["best_ms"] / others[shape]["best_ms"])


def acceptance_length(entry: Mapping[str, Any]) -> str:
    return number(entry["methods"]["ems"]["mean_acceptance_length"], 1)


def ms_of(kernels: Sequence[Mapping[str, Any]], begin: str) -> float:
    """Milliseconds of the kernels whose names begin so."""
    return sum(of["ms"] for of in kernels if of["name"].startswith(begin))
