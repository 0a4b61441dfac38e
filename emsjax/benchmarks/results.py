"""The JSON file of a benchmark: where, with what and how it was measured, and its entries."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emsjax.records.writing import is_stream, to_json, write_atomically
from emsjax.terminal.surroundings import surroundings


def begin(
    options: argparse.Namespace,
    command: str,
    settings: Mapping[str, Any],
    *,
    entries: str = "entries",
    packages: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The results of a run before its first entry, or those that it resumes.

    Args:
        options: `output`, the file or None; `commit`, of the measured code; `resumes`, whether
            the entries that the file has from an earlier run are kept.
        entries: the field that holds the entries.
        packages: further packages whose versions matter.

    Raises:
        ValueError: the file to resume belongs to another run.
        OSError: the file cannot be written.
    """
    if getattr(options, "numerics", None) == "invariant":
        settings = {**settings, "numerics": options.numerics}
    results = {"command": command, **surroundings(options.commit, *packages)}
    if options.resumes:
        resume(settings, results, options.output)
    else:
        results |= {"settings": dict(settings), entries: []}
        write_results(results, options.output)  # fails early if it cannot
    return results


def write_results(results: Mapping[str, Any], output: Path | None) -> None:
    """Write the results as JSON, if there is a file to write them to."""
    if output is not None:
        write_atomically(output, to_json(results, indent=1))


def add_entry(
    entry: Mapping[str, Any],
    results: dict[str, Any],
    output: Path | None,
    entries: str = "entries",
) -> None:
    """Append an entry, and write the results; a resumed run may be at another commit."""
    results[entries].append({**entry, "commit": results.get("commit")})
    write_results(results, output)


def resume(settings: Mapping[str, Any], results: dict[str, Any], output: Path | None) -> None:
    """Set the settings, and the entries that an earlier run with these settings has written.

    Raises:
        ValueError: the file belongs to another run.
    """
    results["settings"], results["entries"] = dict(settings), []
    if output is None or not output.exists() or is_stream(output):
        return
    try:
        before = json.loads(output.read_bytes())
    except ValueError as error:
        raise ValueError(f"{output} holds no results: {error}") from error
    if not (isinstance(before, dict) and isinstance(before.get("entries"), list)):
        raise ValueError(f"{output} holds no results")
    if before.get("settings") != json.loads(to_json(settings)):
        raise ValueError(f"{output} holds results with other settings")
    results["entries"] = before["entries"]
