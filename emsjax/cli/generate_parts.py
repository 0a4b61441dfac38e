"""What the workers of `emsjax generate --ray` do: they check files, and complete parts of them.

Rows of datasets describe files and parts; the records themselves never leave the worker that reads
them. Each part of the input becomes one file of the output, which is written at once.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from emsjax.cli.drafting import load_models, run_policy
from emsjax.cli.generate_arguments import RunOptions
from emsjax.cli.summary import Named, Tally, output_line
from emsjax.ray.background import Ask, Background
from emsjax.records import folders
from emsjax.records.digests import digest
from emsjax.records.input import WHOLE, Part, Record
from emsjax.records.prompts import Limits, Prompts, check_prompts
from emsjax.records.writing import to_json
from emsjax.terminal.models import load_config, load_tokenizer

Row = dict[str, Any]
HASHED_BYTES = 1 << 16  # of a file that are hashed at a time


@dataclasses.dataclass(frozen=True)
class Job:
    """What all workers know about a run.

    Attributes:
        options: the run's options.
        folder: the output.
        suffix: of the files of input and output.
        several: whether the input has several files.
        repeated: where ids that several records have were seen first, by their digests.
    """

    options: RunOptions
    folder: str
    suffix: str
    several: bool
    repeated: Mapping[bytes, str] = dataclasses.field(default_factory=dict)

    def records(self, path: str, part: Part = WHOLE) -> Any:
        """The records of a part of a file."""
        template = self.options.prompt_template
        records = folders.open_records(Path(path), template, part, name=self.several)
        records.repeated, records.first = self.repeated.keys(), dict(self.repeated)
        return records

    def output(self, index: int) -> Path:
        """The file of the part before which the input has `index` records."""
        return folders.part_path(Path(self.folder), index, self.suffix)


def on_cpu(row: Row, function: Callable[[Row, Job], Row], job: Job) -> Row:
    """What a function makes of a row, in a task: tasks have no GPU, and actors no tasks."""
    jax.config.update("jax_platforms", "cpu")
    return function(row, job)


def survey_file(row: Row, job: Job) -> Row:
    """Adds to the row of a file its digest, and the digests of its records' keys in order."""
    path, keys = Path(row["path"]), []
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASHED_BYTES):
            sha256.update(chunk)
    for record in job.records(row["path"]):
        keys.append(digest(record.key if record.id is not None else (row["path"], record.line)))
    return row | {"sha256": sha256.hexdigest(), "keys": b"".join(keys)}


def find_first(row: Row, job: Job) -> Row:
    """Adds to the row of a file where each of the job's repeated ids is first seen in it."""
    first: dict[bytes, str] = {}
    records = job.records(row["path"])
    records.repeated, records.first = job.repeated.keys(), first
    for _ in records:
        pass
    return row | {"digests": list(first), "places": list(first.values())}


def check_file(row: Row, job: Job) -> Row:
    """Adds to the row of a file its `Extent`, its own settings of records, and its parts."""
    options = job.options
    config = load_config(options.model, options.revision)
    tokenizer = load_tokenizer(options.model, options.revision, options.keep)
    from emsjax.cli.requested import Requested

    requested = Requested(options, config, tokenizer)
    limits = Limits(options.max_new_tokens, config.max_position_embeddings, config.vocab_size)
    records = job.records(row["path"])
    prompts = Prompts(
        records, tokenizer, options.max_prompt_tokens, limits, fault_of=requested.fault
    )
    extent = check_prompts(prompts, keep_invalid=True)
    parts = folders.parts_of(job.records(row["path"]), row["size"], row["index"])
    return {
        **{name: row[name] for name in ("path", "index")},
        **dataclasses.asdict(extent),
        "samplings": [sampling for sampling in requested.rows if sampling is not None],
        "parts": [list(dataclasses.astuple(part)) for part in parts],
    }


def finished_part(row: Row, job: Job) -> Row:
    """The summary of a part that the output has, without the steps that it took."""
    lines = folders.read_part(job.output(int(row["index"])))
    tally = Tally(0.0, emitted=sum(len(line["tokens"]) for line in lines))
    tally.invalid = sum(line["finish_reason"] == "refused" for line in lines)
    for line in lines:
        if line["finish_reason"] == "error":
            tally.errors.merge(Named(1, [f"record {line['id']!r}"]))
    return summary(len(lines), tally)


def summary(results: int, tally: Tally, failure: str | None = None) -> Row:
    """What the driver is told of a part: number of results, their tally, and what went wrong."""
    return {"results": results, "tally": to_json(dataclasses.asdict(tally)), "failure": failure}


class PartCompleter:
    """An actor that completes parts of the input: its batches are rows that each describe a part.

    Parts that are under way together share slots, as the batches of `emsjax.ray.Completer` do.
    An error of the constructor is told as the `failure` of every part: Ray would try again, and
    then tell of an actor that died.

    Args:
        job: the run.
        policy: the choice of `emsjax.policies.profiles.choose`; None: no policy.
        longest: tokens of the longest prompt.
        samplings: the different settings that records have of their own.
    """

    def __init__(self, job: Job, policy: Mapping | None, longest: int, samplings: list[str]):
        self.job = job
        self.failure: Exception | None = None
        try:
            self.start(policy, longest, samplings)
        except Exception as error:
            self.failure = error

    def start(self, policy: Mapping | None, longest: int, samplings: list[str]) -> None:
        """Loads the model and starts the slots."""
        import pallas_kernels
        from emsjax.cli.requested import Requested
        from emsjax.engine.adapt import make_run
        from emsjax.tensor_parallel import places

        options = self.job.options
        config = load_config(options.model, options.revision)
        self.tokenizer = load_tokenizer(options.model, options.revision, options.keep)
        self.limits = Limits(
            options.max_new_tokens, config.max_position_embeddings, config.vocab_size
        )
        self.requested = Requested(options, config, self.tokenizer)
        for sampling in samplings:  # all of them are known before the first prompt is decoded
            self.requested.fault(sampling)
        longest += options.max_new_tokens
        sizes = (len(self.tokenizer), longest - 1)
        model, drafter = load_models(options, config, *sizes, chosen=policy)
        with pallas_kernels.numerics(options.numerics):
            run = make_run(
                model,
                drafter,
                run_policy(options, policy),
                processors=self.requested.processors,
                kv_dtype=options.kv_dtype,
            )
            self.slots = Background(
                run,
                variants=len(self.requested.variants),
                batch_size=options.batch_size,
                max_len=longest,
                devices=places(options.tensor_parallel),
                **self.requested.common_arguments,
            )

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, list]:
        """Completes the part of a batch of one row, unless the output has it; its summary.

        Errors are returned as `failure`.
        """
        numbers = {name: int(values[0]) for name, values in batch.items() if name != "path"}
        try:
            if self.failure is not None:
                raise self.failure
            found = await self.complete(str(batch["path"][0]), Part(**numbers))
        except Exception as error:
            failure = str(error) if isinstance(error, ValueError) else repr(error)
            found = summary(0, Tally(0.0), failure)
        return {name: [value] for name, value in found.items()}

    async def complete(self, path: str, part: Part) -> Row:
        """Completes a part and writes its file."""
        output = self.job.output(part.index)
        if output.exists():  # written by a worker that was lost before it could tell
            return finished_part({"index": part.index}, self.job)
        options = self.job.options
        prompts = list(
            Prompts(
                self.job.records(path, part),
                self.tokenizer,
                options.max_prompt_tokens,
                self.limits,
                fault_of=self.requested.fault,
            )
        )
        asks = [
            Ask(
                [] if record.error is not None else tokens,
                key_number=index,
                variant=self.requested.rows.get(record.sampling, 0),
            )
            for index, (record, tokens) in enumerate(prompts, start=part.index)
        ]
        rows = await asyncio.wrap_future(self.slots.submit(asks))
        lines, tally = [], Tally(0.0)
        for (record, _), completions in zip(prompts, rows, strict=True):
            for one in completions:
                lines.append(self.line(record, one, path))
                tally.add(record, one)
        folders.write_part(output, lines)
        return summary(len(lines), tally)

    def line(self, record: Record, completion: Any, path: str) -> Row:
        """The result of a sequence.

        Raises:
            ValueError: the prompt was refused, and `--skip-invalid` was not given.
        """
        options, error = self.job.options, record.error or completion.error
        if error is not None and not options.skip_invalid:
            raise ValueError(f"{record}: {error}")
        line = output_line(record, completion, self.tokenizer, options)
        if record.id is None and self.job.several:
            line["file"] = Path(path).name
        return line
