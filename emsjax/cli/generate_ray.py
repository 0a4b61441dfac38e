"""`emsjax generate --ray`: Ray Data deals out the files of an input, and then their parts."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from emsjax.checks import as_token_ids
from emsjax.cli.cluster import Cluster, connected, count_actors, failures_in_one_line
from emsjax.cli.drafting import draft_policy, resolve
from emsjax.cli.generate import Files, Log, make_progress, report_input
from emsjax.cli.generate_arguments import RunOptions
from emsjax.cli.generate_parts import (
    Job,
    PartCompleter,
    Row,
    check_file,
    find_first,
    finished_part,
    on_cpu,
    survey_file,
)
from emsjax.cli.sampling_arguments import check_values
from emsjax.cli.summary import Tally, report_errors
from emsjax.records import folders
from emsjax.records.digests import SIZE, Digests
from emsjax.records.output import check_configuration, configuration_path, read_resolved
from emsjax.records.prompts import Extent
from emsjax.records.writing import to_json, write_atomically
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.reporting import line

MOST_BLOCKS = 1000  # into which the parts are divided; a block is what an actor gets at a time


def run(options: RunOptions, paths: Files, console: Console, cluster: Cluster) -> int:
    """Complete every part of the input that the output folder does not hold yet.

    A sequence's random key depends on its record's place in the whole input only, so its tokens
    are those of a run without Ray. The memory of this process grows by 16 bytes for each record.

    Returns:
        The exit code: 1 if the output holds sequences that ended with an error, otherwise 0.

    Raises:
        ValueError: bad input, an output of another run, an unsuitable profile, or a failure of a
            worker.
        ImportError: Ray Data is not installed.
    """
    from emsjax.ray import check_installed

    check_installed()
    input_path, output_path, profile_path, _ = paths
    files = folders.input_files(input_path)
    if output_path.exists() and not output_path.is_dir():
        raise ValueError(f"--output: {output_path} is not a folder, as --ray needs")
    job = Job(options, str(output_path.resolve()), files[0].suffix, len(files) > 1)
    config = load_config(options.model, options.revision)
    if options.eos_token_ids:
        as_token_ids("--eos-token-ids", options.eos_token_ids, config.vocab_size)
    check_values(dataclasses.asdict(options), config.vocab_size)
    load_tokenizer(options.model, options.revision, options.keep)
    with connected(cluster.address), locked(output_path):
        job, rows = survey(job, files)
        count = sum(row["count"] for row in rows)
        configuration = configure(options, rows, profile_path)
        begun = configuration_path(output_path).exists()
        if begun:
            check_configuration(output_path, configuration)
            resolved = read_resolved(output_path)
        elif any(output_path.iterdir()):
            raise ValueError(f"--output: {output_path} holds files of something else")
        else:
            resolved = resolve(options, config, profile_path)
        checked = check(job, rows, count)
        parts, finished = divide(job, checked)
        total, earlier = count * options.num_sequences, Tally(0.0)
        done = sum(row["results"] for row in merged(finished, finished_part, job, earlier))
        if not parts:
            line(console, f"{output_path} is complete: {total} results.")
            return report_errors(console, earlier.errors.count)
        extent = extent_of(checked)
        report_input(console, extent, count, options)
        if not begun:
            record = to_json({**configuration, "resolved": resolved}, indent=2)
            write_atomically(configuration_path(output_path), record + "\n")
        folders.remove_unfinished(output_path)
        draft_policy(options, resolved, done > 0, console)  # says which it is
        if done:
            line(console, f"Going on after {done} results.")
        arguments = {
            "job": job,
            "policy": resolved.get("draft_length"),
            "longest": extent.longest,
            "samplings": list(dict.fromkeys(one for row in checked for one in row["samplings"])),
        }
        tally, log = Tally(time.perf_counter()), Log(console, total - done)
        with make_progress(console) as progress:
            task = progress.add_task("", total=total - done, speed="")
            for row in complete(parts, arguments, cluster.workers, options):
                if row["failure"] is not None:
                    raise ValueError(row["failure"])
                tally.merge(json.loads(row["tally"]))
                progress.update(task, advance=row["results"], speed=tally.speed)
                log.add(tally.speed, row["results"])
        lost = sum(not job.output(part["index"]).exists() for part in parts)
        if lost:
            raise ValueError(f"{lost} of {len(parts)} parts were lost: start the command again")
    tally.report(console, total - done)
    return report_errors(console, earlier.errors.count + tally.errors.count, tally.errors)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other run on this host writes the folder, which is made.

    Raises:
        ValueError: another run is writing it.
    """
    folder.mkdir(exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is writing {folder}") from error
        yield
    finally:
        os.close(held)


def mapped(rows: list[Row], function: Callable[..., Row], job: Job) -> Iterator[Row]:
    """The rows that a function makes of these on the hosts, in any order.

    Raises:
        ValueError: the function has failed.
    """
    import ray

    if rows:
        blocks = min(len(rows), MOST_BLOCKS)
        dataset = ray.data.from_items(rows, override_num_blocks=blocks)
        with failures_in_one_line():
            yield from dataset.map(on_cpu, fn_args=[function, job]).iter_rows()


def merged(rows: list[Row], function: Callable[..., Row], job: Job, tally: Tally) -> Iterator[Row]:
    """The summaries that a function makes of parts, whose tallies are added to this one."""
    for row in mapped(rows, function, job):
        tally.merge(json.loads(row["tally"]))
        yield row


def survey(job: Job, files: list[Path]) -> tuple[Job, list[Row]]:
    """The job with the ids that several records have, and a row for each file.

    The rows have `path`, `sha256`, `count`, and `index`, the number of records in earlier files.

    Raises:
        ValueError: there are no records.
    """
    asked = [{"path": str(path.absolute())} for path in files]  # links keep their names
    rows = sorted(mapped(asked, survey_file, job), key=lambda row: row["path"])
    known, index = Digests(), 0
    for row in rows:
        keys = row.pop("keys")
        known.added += keys
        row["count"], row["index"] = len(keys) // SIZE, index
        index += row["count"]
    if not index:
        raise ValueError(f"{files[0].parent if job.several else files[0]} holds no records")
    repeated = known.freeze()
    if repeated:
        first: dict[bytes, str] = {}
        marked = dataclasses.replace(job, repeated=dict.fromkeys(repeated, ""))
        for row in sorted(mapped(asked, find_first, marked), key=lambda row: row["path"]):
            for key, place in zip(row["digests"], row["places"], strict=True):
                first.setdefault(key, place)
        job = dataclasses.replace(job, repeated=first)
    return job, rows


def configure(options: RunOptions, rows: list[Row], profile_path: Path | None) -> dict[str, Any]:
    """What identifies a run, as JSON."""
    digests = [[Path(row["path"]).name, row["sha256"]] for row in rows]
    profile = profile_path and hashlib.sha256(profile_path.read_bytes()).hexdigest()
    configuration = dataclasses.asdict(options)
    configuration["input_sha256"] = hashlib.sha256(to_json(digests).encode()).hexdigest()
    configuration |= {"profile_sha256": profile, "ray": True}
    return json.loads(to_json(configuration))


def check(job: Job, rows: list[Row], count: int) -> list[Row]:
    """A row for each file, in their order: see `check_file`.

    Raises:
        ValueError: there are records that cannot be completed, and the options keep none.
    """
    size = folders.records_per_part(count)
    asked = [{"path": row["path"], "index": row["index"], "size": size} for row in rows]
    checked = sorted(mapped(asked, check_file, job), key=lambda row: row["index"])
    extent = extent_of(checked)
    if extent.invalid and not job.options.skip_invalid:
        raise ValueError(
            f"{extent.invalid} of {count} records cannot be completed; the first is {extent.first}"
        )
    return checked


def divide(job: Job, checked: list[Row]) -> tuple[list[Row], list[Row]]:
    """The parts of all files that are missing in the output, and those that it has."""
    parts, finished = [], []
    for row in checked:
        for offset, first, lines, index in row["parts"]:
            part = {"path": row["path"], "offset": offset, "line": first, "lines": lines}
            (finished if job.output(index).exists() else parts).append(part | {"index": index})
    return parts, finished


def extent_of(checked: list[Row]) -> Extent:
    """The facts about the prompts of all files."""
    add = lambda name: sum(row[name] for row in checked)
    first = next((row["first"] for row in checked if row["first"] is not None), None)
    longest = max(row["longest"] for row in checked)
    return Extent(longest, add("truncated"), add("invalid"), first)


def complete(
    parts: list[Row], arguments: dict[str, Any], workers: int | None, options: RunOptions
) -> Iterator[Row]:
    """The summaries of these parts, as actors complete them.

    Args:
        arguments: of `PartCompleter`.
        workers: see `Cluster`.
        options: the run's, among them the slots and the devices of an actor.

    Raises:
        ValueError: no host has room for an actor, or an actor has failed in Ray.
    """
    import ray

    own = options.tensor_parallel or 1  # GPUs
    count, has_gpus = count_actors(ray.nodes(), workers, own)
    blocks = min(len(parts), MOST_BLOCKS)
    # Enough parts for twice the slots, so that no slot waits for a part.
    at_a_time = 1 + -(-2 * options.batch_size // folders.LEAST_RECORDS)
    dataset = ray.data.from_items(parts, override_num_blocks=blocks).map_batches(
        PartCompleter,
        fn_constructor_kwargs=arguments,
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(
            size=min(count, blocks), max_concurrent_calls_per_actor=at_a_time
        ),
        num_gpus=own if has_gpus else None,
    )
    with failures_in_one_line():
        yield from dataset.iter_rows()
