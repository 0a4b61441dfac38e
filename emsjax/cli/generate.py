"""Completions of a JSON Lines file, each as it finishes, for `emsjax generate`."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Container, Iterable, Iterator
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

from emsjax.cli.arguments import RunOptions
from emsjax.cli.drafting import (
    draft_policy,
    load_drafter,
    read_config,
    resolve,
    revision_of,
)
from emsjax.models.config import OPTConfig
from emsjax.records.input import Record, Records, survey
from emsjax.records.output import open_results, read_resolved, read_results

LOG_SECONDS = 60  # between lines
TOKENIZED_AT_ONCE = 256  # records


def run(
    options: RunOptions,
    input_path: Path,
    output_path: Path,
    profile_path: Path | None,
    console: Console,
) -> None:
    """Complete every record of the input that the output does not hold yet.

    The input is gone through twice to check it and once to complete it; what is kept of it does
    not grow with it, but for 16 bytes for each record and result. A sequence's key is that of its
    place in the input, whatever is done already.

    Raises:
        ValueError: bad input, an output of another run, or a profile that does not suit. The
            output is untouched.
    """
    records = Records(input_path, options.prompt_template)
    known = survey(records)
    configuration = {
        **dataclasses.asdict(options),
        "input_sha256": known.sha256,
        "profile_sha256": profile_path and hashlib.sha256(profile_path.read_bytes()).hexdigest(),
    }
    if not output_path.parent.is_dir():
        raise ValueError(f"--output: {output_path.parent} is no folder")
    total = known.count * options.num_sequences
    done, _ = read_results(output_path, configuration, known.ids, options.num_sequences)
    if len(done) == total:
        console.print(f"{output_path} is complete: {total} results.", highlight=False)
        return

    config = read_config(options.model, options.revision)
    prompts = Prompts(records, options)
    longest, truncated = check_prompts(prompts, options.max_new_tokens, config)
    if truncated:
        console.print(
            f"{truncated} of {known.count} prompts are cut to {options.max_prompt_tokens} tokens: "
            'their lines have "truncated".',
            highlight=False,
        )
    resolved = read_resolved(output_path) if len(done) else resolve(options, config, profile_path)
    import emsjax

    # The drafter first: it is small, and may not suit the model.
    drafter = load_drafter(options, config, len(prompts.tokenizer), longest - 1)
    model = emsjax.OPT.from_pretrained(
        options.model, dtype=options.dtype, revision=options.revision
    )
    with open_results(
        output_path, configuration, known.ids, options.num_sequences, resolved
    ) as results:
        done = results.done
        policy = draft_policy(options, results.resolved, len(done) > 0, console)
        if len(done):
            console.print(f"Going on after {len(done)} results.", highlight=False)
        tally, left = Tally(time.perf_counter()), total - len(done)
        log = Log(console, left)
        missing = Missing(prompts, done, options.num_sequences)
        with make_progress(console) as progress:
            task = progress.add_task("", total=left, speed="")
            for completion in completions(model, drafter, policy, missing, longest, options):
                tally.add(completion)
                record = missing.take(completion)
                if completion.error is not None:
                    raise ValueError(f"record {record.id!r}: {completion.error}")
                if (record.id, completion.sequence) not in done:
                    results.append(output_line(record, completion, prompts.tokenizer, options))
                    progress.update(task, advance=1, speed=tally.speed)
                    log.add(tally.speed)
    console.print(
        f"{left} results, {tally.emitted} tokens, {tally.speed}, "
        f"mean acceptance length {tally.emitted / max(tally.steps, 1):.2f}",
        highlight=False,
    )


@dataclasses.dataclass
class Tally:
    """What has been completed since `start`; seconds include compilation."""

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
    """A line now and then where no bar can be drawn, as in the log of a batch system.

    Args:
        console: nothing is said on a terminal.
        total: results that are to come.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total, self.count = console, total, 0
        self.last = time.monotonic()

    def add(self, speed: str) -> None:
        """One more result is there."""
        self.count += 1
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last >= LOG_SECONDS:
            self.last = now
            self.console.print(f"{self.count} of {self.total} results, {speed}", highlight=False)


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


class Prompts:
    """Every record, `truncated` or not, and its ids, cut to `max_prompt_tokens`: made each time.

    Raises:
        ValueError: while going through, a prompt without tokens.
    """

    def __init__(self, records: Records, options: RunOptions):
        from transformers import AutoTokenizer

        # The tokenizer cuts text only, so a start token stays whichever end is kept.
        self.tokenizer = AutoTokenizer.from_pretrained(
            options.model,
            truncation_side="left" if options.keep == "last" else "right",
            **revision_of(options.revision),
        )
        cut = options.max_prompt_tokens is not None
        self.length = {"truncation": True, "max_length": options.max_prompt_tokens} if cut else {}
        self.records = records

    def __iter__(self) -> Iterator[tuple[Record, list[int]]]:
        records = iter(self.records)
        while group := list(itertools.islice(records, TOKENIZED_AT_ONCE)):
            texts = [record.prompt for record in group]
            encoded = self.tokenizer(texts, **self.length)
            cut = self._cut(texts, encoded)
            for record, prompt, truncated in zip(group, encoded.input_ids, cut, strict=True):
                if not prompt:
                    where = f"record {record.id!r} (line {record.line})"
                    raise ValueError(f"{where}: no tokens in the prompt")
                yield dataclasses.replace(record, truncated=truncated), prompt

    def _cut(self, texts: list[str], encoded) -> list[bool]:
        """Whether each text has more tokens than were encoded of it."""
        if not self.length:
            return [False] * len(texts)
        if self.tokenizer.is_fast:
            return [bool(encoding.overflowing) for encoding in encoded.encodings]
        whole = self.tokenizer(texts).input_ids
        return [len(ids) > self.length["max_length"] for ids in whole]


def check_prompts(
    prompts: Iterable[tuple[Record, list[int]]], max_new_tokens: int, config: OPTConfig
) -> tuple[int, int]:
    """Tokens of the longest record with its continuation, and how many records are truncated.

    Raises:
        ValueError: it needs more positions than the model has, or a token is not the model's.
    """
    limit = config.max_position_embeddings
    fits = limit - max_new_tokens + 1  # the last token is emitted, never fed
    count, longest, truncated, too_long, first = 0, 0, 0, 0, None
    for record, prompt in prompts:
        count, longest = count + 1, max(longest, len(prompt))
        truncated += record.truncated
        if max(prompt) >= config.vocab_size:
            raise ValueError(
                f"record {record.id!r} (line {record.line}): the tokenizer's token {max(prompt)} "
                f"is none of the model's {config.vocab_size}"
            )
        if len(prompt) > fits:
            too_long += 1
            first = first or (record, len(prompt))
    if first is None:
        return longest + max_new_tokens, truncated
    record, tokens = first
    advice = f"--max-prompt-tokens {fits} would fit" if fits > 0 else "lower --max-new-tokens"
    raise ValueError(
        f"{too_long} of {count} records are beyond the position limit {limit}; "
        f"the first is record {record.id!r} (line {record.line}): {tokens} prompt tokens + "
        f"--max-new-tokens {max_new_tokens} - 1 = {tokens + max_new_tokens - 1}; {advice}"
    )


class Missing:
    """The prompts that are not done, and of which record each is until its sequences are."""

    def __init__(self, prompts: Prompts, done: Container, num_sequences: int):
        self.prompts, self.done, self.num_sequences = prompts, done, num_sequences
        self.records: dict[int, tuple[Record, int]] = {}  # and sequences that are to come

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Place and prompt of each record with a sequence that is missing."""
        for place, (record, prompt) in enumerate(self.prompts):
            keys = ((record.id, sequence) for sequence in range(self.num_sequences))
            if not all(key in self.done for key in keys):
                self.records[place] = record, self.num_sequences
                yield place, prompt

    def take(self, completion) -> Record:
        """The completion's record."""
        record, left = self.records.pop(completion.prompt)
        if left > 1:
            self.records[completion.prompt] = record, left - 1
        return record


def completions(model, drafter, policy, missing: Missing, longest: int, options: RunOptions):
    """`emsjax.Completion`s of what is missing, on all local devices."""
    import jax

    import emsjax
    from emsjax import streaming

    devices = jax.local_devices()
    return streaming.stream_numbered(
        model,
        iter(missing),
        drafter,
        policy,
        max_new_tokens=options.max_new_tokens,
        sampling=emsjax.Sampling(options.temperature, options.top_k, options.top_p),
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
