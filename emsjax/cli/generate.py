"""`emsjax generate`: complete the prompts of a JSON Lines file, writing each result at once."""

import dataclasses
import hashlib
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from emsjax.cli.drafting import draft_policy, load_drafter, resolve
from emsjax.cli.generate_arguments import RunOptions
from emsjax.records.input import Record, Records, survey
from emsjax.records.output import open_results, read_resolved, read_results
from emsjax.records.prompts import Missing, Prompts, check_prompts
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.reporting import line

LOG_SECONDS = 60  # between lines


def run(
    options: RunOptions,
    input_path: Path,
    output_path: Path,
    profile_path: Path | None,
    console: Console,
) -> None:
    """Complete every record of the input that the output does not hold yet.

    The input is read twice to check it and once to complete it; memory grows by 16 bytes for each
    record and result. A sequence's random key depends on its position in the input only, so a
    resumed run draws the same tokens.

    Raises:
        ValueError: bad input, an output of another run, or an unsuitable profile. The output is
            untouched.
    """
    records = Records(input_path, options.prompt_template)
    known = survey(records)
    configuration = {
        **dataclasses.asdict(options),
        "input_sha256": known.sha256,
        "profile_sha256": profile_path and hashlib.sha256(profile_path.read_bytes()).hexdigest(),
    }
    if not output_path.parent.is_dir():
        raise ValueError(f"--output: {output_path.parent} is not a folder")
    total = known.count * options.num_sequences
    done, _ = read_results(output_path, configuration, known.ids, options.num_sequences)
    if len(done) == total:
        line(console, f"{output_path} is complete: {total} results.")
        return

    config = load_config(options.model, options.revision)
    tokenizer = load_tokenizer(options.model, options.revision, options.keep)
    prompts = Prompts(records, tokenizer, options.max_prompt_tokens)
    limits = (config.max_position_embeddings, config.vocab_size)
    longest, truncated = check_prompts(prompts, options.max_new_tokens, *limits)
    if truncated:
        line(
            console,
            f"{truncated} of {known.count} prompts are cut to {options.max_prompt_tokens} tokens: "
            'their lines have "truncated".',
        )
    resolved = read_resolved(output_path) if len(done) else resolve(options, config, profile_path)
    from emsjax.models.pretrained import from_pretrained

    # The drafter is loaded first: it is small, and may turn out not to suit the model.
    drafter = load_drafter(options, config, len(tokenizer), longest - 1)
    model = from_pretrained(options.model, dtype=options.dtype, revision=options.revision)
    with open_results(
        output_path, configuration, known.ids, options.num_sequences, resolved
    ) as results:
        done = results.done
        policy = draft_policy(options, results.resolved, len(done) > 0, console)
        if len(done):
            line(console, f"Going on after {len(done)} results.")
        tally, left = Tally(time.perf_counter()), total - len(done)
        log = Log(console, left)
        missing = Missing(prompts, done, options.num_sequences)
        with make_progress(console) as progress:
            task = progress.add_task("", total=left, speed="")
            for completion in completions(model, drafter, policy, missing, longest, options):
                tally.add(completion)
                record = missing.record_of(completion)
                if completion.error is not None:
                    raise ValueError(f"record {record.id!r}: {completion.error}")
                if (record.id, completion.sequence) not in done:
                    results.append(output_line(record, completion, tokenizer, options))
                    progress.update(task, advance=1, speed=tally.speed)
                    log.add(tally.speed)
    line(
        console,
        f"{left} results, {tally.emitted} tokens, {tally.speed}, "
        f"mean acceptance length {tally.emitted / max(tally.steps, 1):.2f}",
    )


@dataclasses.dataclass
class Tally:
    """Tokens and steps since `start`; the speed includes compilation."""

    start: float
    emitted: int = 0
    steps: int = 0

    def add(self, completion) -> None:
        self.emitted += len(completion.tokens)
        self.steps += completion.num_steps

    @property
    def speed(self) -> str:
        return f"{self.emitted / (time.perf_counter() - self.start):.1f} tokens/s"


class Log:
    """Prints a progress line now and then where no bar can be drawn, as in a batch system's log.

    Args:
        console: if it is a terminal, nothing is printed.
        total: number of results to come.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total, self.count = console, total, 0
        self.last = time.monotonic()

    def add(self, speed: str) -> None:
        """Count one more result."""
        self.count += 1
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


def completions(model, drafter, policy, missing: Missing, longest: int, options: RunOptions):
    """The missing `emsjax.Completion`s, from all local devices."""
    import jax

    from emsjax import streaming
    from emsjax.engine.adapt import make_run
    from emsjax.sampling import Sampling

    devices = jax.local_devices()
    return streaming.stream_numbered(
        make_run(model, drafter, policy),
        iter(missing),
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(options.temperature, options.top_k, options.top_p),
        num_sequences=options.num_sequences,
        batch_size=options.batch_size,
        max_len=longest,
        key=jax.random.key(options.seed),
        devices=devices if len(devices) > 1 else None,
    )


def output_line(record: Record, completion, tokenizer, options: RunOptions) -> dict:
    tokens = completion.tokens.tolist()
    sequence = {"sequence": completion.sequence} if options.num_sequences > 1 else {}
    return {
        "id": record.id,
        **sequence,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "mean_logprob": float(f"{completion.logprobs.mean(dtype=float):.6g}"),
        "finish_reason": completion.finish_reason,
        **({"truncated": True} if record.truncated else {}),
    }
