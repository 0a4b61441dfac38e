"""`emsjax generate`: complete the prompts of a JSON Lines file, writing each result at once."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from emsjax.checks import as_token_ids
from emsjax.cli.drafting import draft_policy, load_models, open_memory, resolve
from emsjax.cli.generate_arguments import RunOptions
from emsjax.cli.sampling_arguments import check_values
from emsjax.cli.summary import Tally, output_line, report_errors
from emsjax.records.input import Records, survey
from emsjax.records.output import open_results, read_resolved, read_results
from emsjax.records.prompts import Extent, Limits, Missing, Prompts, check_prompts
from emsjax.records.writing import to_json
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.reporting import line

LOG_SECONDS = 60  # between lines


class Files(NamedTuple):
    """The paths of a run's files.

    Attributes:
        input: the records.
        output: the results.
        profile: a profile to use instead of the stored one; None: the stored one.
        memory: a `SuffixMemory`, to which the completions are added; None: there is none.
    """

    input: Path
    output: Path
    profile: Path | None
    memory: Path | None


def run(options: RunOptions, files: Files, console: Console) -> int:
    """Complete every record of the input that the output does not hold yet.

    The input is read twice to check it and once to complete it; memory grows by 16 bytes for each
    record and result, and by each different "sampling" and constraint of records. A sequence's
    random key depends on its position in the input only, so a resumed run draws the same tokens.

    Returns:
        The exit code: 1 if the output holds sequences that ended with an error, otherwise 0.

    Raises:
        ValueError: bad input, an output of another run, an unsuitable profile, or a damaged memory.
            The output is untouched.
    """
    input_path, output_path, profile_path, memory_path = files
    records = Records(input_path, options.prompt_template, keep_invalid=options.skip_invalid)
    known = survey(records)
    profile = profile_path and hashlib.sha256(profile_path.read_bytes()).hexdigest()
    configuration = dataclasses.asdict(options)
    configuration |= {"input_sha256": known.sha256, "profile_sha256": profile}
    configuration = json.loads(to_json(configuration))  # as it will be read again
    if output_path.is_dir() or not output_path.parent.is_dir():
        wrong = f"{output_path} is" if output_path.is_dir() else f"{output_path.parent} is not"
        raise ValueError(f"--output: {wrong} a folder")
    total = known.count * options.num_sequences
    earlier = read_results(output_path, configuration, known.keys, options.num_sequences)
    if len(earlier.done) == total:
        line(console, f"{output_path} is complete: {total} results.")
        return report_errors(console, earlier.errors)

    memory = open_memory(memory_path)
    config = load_config(options.model, options.revision)
    if options.eos_token_ids:
        as_token_ids("--eos-token-ids", options.eos_token_ids, config.vocab_size)
    check_values(dataclasses.asdict(options), config.vocab_size)
    tokenizer = load_tokenizer(options.model, options.revision, options.keep)
    from emsjax.cli.requested import Requested

    requested = Requested(options, config, tokenizer)
    limits = Limits(options.max_new_tokens, config.max_position_embeddings, config.vocab_size)
    sizes = (options.max_prompt_tokens, limits)
    prompts = Prompts(records, tokenizer, *sizes, fault_of=requested.fault)
    extent = check_prompts(prompts, keep_invalid=options.skip_invalid)
    processors = requested.processors
    report_input(console, extent, known.count, options)
    longest = extent.longest + options.max_new_tokens
    if len(earlier.done):
        resolved = read_resolved(output_path)
    else:
        resolved = resolve(options, config, profile_path)
    import pallas_kernels

    model, drafter = load_models(
        options,
        config,
        len(tokenizer),
        longest - 1,
        chosen=resolved.get("draft_length"),
        memory=memory,
    )
    with open_results(
        output_path, configuration, known.keys, options.num_sequences, resolved
    ) as results:
        done = results.earlier.done
        policy = draft_policy(options, results.resolved, len(done) > 0, console)
        if len(done):
            line(console, f"Going on after {len(done)} results.")
        tally, left = Tally(time.perf_counter()), total - len(done)
        log = Log(console, left)
        missing = Missing(prompts, done, options.num_sequences)
        with make_progress(console) as progress:
            task = progress.add_task("", total=left, speed="")
            run = model, drafter, policy, processors
            requests = requested.arguments(missing)
            with pallas_kernels.numerics(options.numerics):
                found = completions(run, missing, longest, options, requests)
            for completion in found:
                record = missing.record_of(completion)
                error = record.error or completion.error
                if error is not None and not options.skip_invalid:
                    raise ValueError(f"record {record.id!r}: {error}")
                if (record.key, completion.sequence) not in done:
                    tally.add(record, completion)
                    if memory is not None:
                        memory.add([completion.tokens])
                    results.append(output_line(record, completion, tokenizer, options))
                    progress.update(task, advance=1, speed=tally.speed)
                    log.add(tally.speed)
    if memory is not None:
        memory.save(memory_path)
    tally.report(console, left)
    return report_errors(console, results.earlier.errors + tally.errors.count, tally.errors)


def report_input(console: Console, extent: Extent, count: int, options: RunOptions) -> None:
    """Say how many records are cut, and how many are invalid."""
    if extent.truncated:
        line(
            console,
            f"{extent.truncated} of {count} prompts are cut to {options.max_prompt_tokens} tokens: "
            'their lines have "truncated".',
        )
    if extent.invalid:
        line(
            console,
            f'{extent.invalid} of {count} records are invalid: their lines have an "error".',
        )


class Log:
    """Prints a progress line now and then where no bar can be drawn, as in a batch system's log.

    Args:
        console: if it is a terminal, nothing is printed.
        total: number of results to come.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total, self.count = console, total, 0
        self.last = time.monotonic()

    def add(self, speed: str, results: int = 1) -> None:
        """Count more results."""
        self.count += results
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last >= LOG_SECONDS:
            self.last = now
            line(self.console, f"{self.count} of {self.total} results, {speed}")


def make_progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
        speed_estimate_period=600,  # seconds: compilation can take longer than rich's default of 30
    )


def completions(run: tuple, missing: Missing, longest: int, options: RunOptions, requests):
    """The missing `emsjax.Completion`s, from all local devices, or from groups of them.

    Args:
        run: model, drafter, draft-length policy and logits processors.
        requests: the other arguments of `emsjax.stream`.
    """
    from emsjax import streaming
    from emsjax.engine.adapt import make_run
    from emsjax.tensor_parallel import places

    *parts, processors = run
    return streaming.stream_numbered(
        make_run(*parts, processors=processors, kv_dtype=options.kv_dtype),
        iter(missing),
        batch_size=options.batch_size,
        max_len=longest,
        devices=places(options.tensor_parallel),
        **requests,
    )
