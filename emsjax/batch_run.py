"""Completions of a JSONL file, group by group, for `emsjax generate`."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
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

from emsjax.batch_input import Record, read_records
from emsjax.batch_output import open_results, read_results

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Every option that changes results; kept beside the output (see `emsjax.batch_output`)."""

    model: str
    revision: str | None
    dtype: str
    drafter: str
    match_length: int | None
    max_draft_tokens: int | None
    search_generated: bool
    batch_size: int
    max_new_tokens: int
    prompt_template: str | None
    max_prompt_tokens: int | None
    keep: str
    seed: int


def run(options: RunOptions, input_path: Path, output_path: Path, console: Console) -> None:
    """Complete every record of the input that the output does not hold yet.

    Group g is always records g*batch_size onwards, whatever is done already: a
    resumed run feeds the same batches and so draws the same tokens.

    Raises:
        ValueError: bad input, or an output of another run. The output is untouched.
    """
    source = input_path.read_bytes()
    records = read_records(source, str(input_path), options.prompt_template)
    ids = {record.id for record in records}
    configuration = {
        **dataclasses.asdict(options),
        "input_sha256": hashlib.sha256(source).hexdigest(),
    }
    if not output_path.parent.is_dir():
        raise ValueError(f"--output: {output_path.parent} is no folder")
    done, _ = read_results(output_path, configuration, ids)
    if done == ids:
        console.print(f"{output_path} is complete: {len(done)} records.", highlight=False)
        return

    tokenizer, prompts = tokenize(records, options)
    import emsjax

    model = emsjax.OPT.from_pretrained(
        options.model, dtype=options.dtype, revision=options.revision
    )
    with open_results(output_path, configuration, ids) as results:
        if results.done:
            console.print(f"Going on after {len(results.done)} records.", highlight=False)
        groups = [
            range(start, min(start + options.batch_size, len(records)))
            for start in range(0, len(records), options.batch_size)
        ]
        pending = [
            group for group in groups if any(records[i].id not in results.done for i in group)
        ]
        missing = len(records) - len(results.done)
        tally = Tally()
        with make_progress(console) as progress:
            task = progress.add_task("", total=missing, speed="")
            for group in pending:
                started = time.perf_counter()
                out = complete_group(model, prompts, group, options)
                tally.add(out.stats, time.perf_counter() - started)
                lines = [
                    completion(records[place], out, row, tokenizer)
                    for row, place in enumerate(group)
                    if records[place].id not in results.done
                ]
                results.append(lines)
                progress.update(task, advance=len(lines), speed=tally.speed)
    console.print(
        f"{missing} records, {tally.emitted} tokens, {tally.speed}, "
        f"mean acceptance length {tally.emitted / max(tally.steps, 1):.2f}",
        highlight=False,
    )


@dataclasses.dataclass
class Tally:
    """What the groups took together; seconds include compilation."""

    emitted: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, stats, seconds: float) -> None:
        self.emitted += int(stats.num_emitted.sum())
        self.steps += int(stats.num_steps.sum())
        self.seconds += seconds

    @property
    def speed(self) -> str:
        return f"{self.emitted / self.seconds:.1f} tokens/s"


def make_progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
        speed_estimate_period=600,  # seconds: a group can take longer than rich's default of 30
    )


def tokenize(records: Sequence[Record], options: RunOptions):
    """The tokenizer and every record's token ids, cut to `max_prompt_tokens`.

    Raises:
        ValueError: a prompt without tokens, or beyond the model's position limit.
    """
    from transformers import AutoConfig, AutoTokenizer

    from emsjax.config import OPTConfig

    revision = {} if options.revision is None else {"revision": options.revision}
    config = OPTConfig.from_dict(AutoConfig.from_pretrained(options.model, **revision).to_dict())
    # The tokenizer cuts text only, so a start token stays whichever end is kept.
    tokenizer = AutoTokenizer.from_pretrained(
        options.model, truncation_side="left" if options.keep == "last" else "right", **revision
    )
    cut = options.max_prompt_tokens is not None
    length = {"truncation": True, "max_length": options.max_prompt_tokens} if cut else {}
    prompts = tokenizer([record.prompt for record in records], **length).input_ids
    for record, prompt in zip(records, prompts, strict=True):
        if not prompt:
            raise ValueError(f"record {record.id!r} (line {record.line}): no tokens in the prompt")
    check_positions(records, prompts, options.max_new_tokens, config.max_position_embeddings)
    return tokenizer, prompts


def check_positions(
    records: Sequence[Record], prompts: Sequence[list[int]], max_new_tokens: int, limit: int
) -> None:
    longest = limit - max_new_tokens + 1  # the last token is emitted, never fed
    too_long = [
        (record, len(prompt))
        for record, prompt in zip(records, prompts, strict=True)
        if len(prompt) > longest
    ]
    if not too_long:
        return
    record, tokens = too_long[0]
    advice = f"--max-prompt-tokens {longest} would fit" if longest > 0 else "lower --max-new-tokens"
    raise ValueError(
        f"{len(too_long)} of {len(records)} records are beyond the position limit {limit}; "
        f"the first is record {record.id!r} (line {record.line}): {tokens} prompt tokens + "
        f"--max-new-tokens {max_new_tokens} - 1 = {tokens + max_new_tokens - 1}; {advice}"
    )


def complete_group(model, prompts: Sequence[list[int]], group: range, options: RunOptions):
    """`emsjax.generate` for the records of one group, each with the key of its place."""
    import jax
    import numpy as np

    import emsjax

    drafter = None
    if options.drafter == "prompt-lookup":
        drafter = emsjax.PromptLookup(
            match_length=options.match_length,
            max_draft_tokens=options.max_draft_tokens,
            search_generated=options.search_generated,
        )
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return emsjax.generate(
        model,
        [np.asarray(prompts[place], np.int32) for place in group],
        drafter=drafter,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,  # a partial last group is filled up: no new shapes
        key=fold_in(jax.random.key(options.seed), np.asarray(group, np.uint32)),
    )


def completion(record: Record, out, row: int, tokenizer) -> dict:
    """An output line."""
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    return {
        "id": record.id,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "finish_reason": out.finish_reasons[row],
    }
