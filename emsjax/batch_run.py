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

from emsjax.arguments import RunOptions
from emsjax.batch_drafting import (
    draft_policy,
    load_drafter,
    read_config,
    resolve,
    revision_of,
)
from emsjax.batch_input import Record, read_records
from emsjax.batch_output import open_results, read_resolved, read_results


def run(
    options: RunOptions,
    input_path: Path,
    output_path: Path,
    profile_path: Path | None,
    console: Console,
) -> None:
    """Complete every record of the input that the output does not hold yet.

    Groups of records are cut from the whole input, whatever is done already: a
    resumed run feeds the same batches, with the same draft-length policy, and so draws the
    same tokens.

    Raises:
        ValueError: bad input, an output of another run, or a profile that does not suit. The
            output is untouched.
    """
    source = input_path.read_bytes()
    records = read_records(source, str(input_path), options.prompt_template)
    ids = {record.id for record in records}
    configuration = {
        **dataclasses.asdict(options),
        "input_sha256": hashlib.sha256(source).hexdigest(),
        "profile_sha256": profile_path and hashlib.sha256(profile_path.read_bytes()).hexdigest(),
    }
    if not output_path.parent.is_dir():
        raise ValueError(f"--output: {output_path.parent} is no folder")
    total = len(records) * options.num_sequences
    done, _ = read_results(output_path, configuration, ids, options.num_sequences)
    if len(done) == total:
        console.print(f"{output_path} is complete: {total} results.", highlight=False)
        return

    config = read_config(options.model, options.revision)
    tokenizer, prompts = tokenize(records, options)
    positions = check_positions(
        records, prompts, options.max_new_tokens, config.max_position_embeddings
    )
    resolved = read_resolved(output_path) if done else resolve(options, config, profile_path)
    import emsjax

    # The drafter first: it is small, and may not suit the model.
    drafter = load_drafter(options, config, len(tokenizer), positions)
    model = emsjax.OPT.from_pretrained(
        options.model, dtype=options.dtype, revision=options.revision
    )
    with open_results(output_path, configuration, ids, options.num_sequences, resolved) as results:
        policy = draft_policy(options, results.resolved, bool(results.done), console)
        if results.done:
            console.print(f"Going on after {len(results.done)} results.", highlight=False)
        tally = Tally()
        with make_progress(console) as progress:
            task = progress.add_task("", total=total - len(results.done), speed="")
            for group in record_groups(len(records), options):
                keys = [
                    (records[place].id, sequence)
                    for place in group
                    for sequence in range(options.num_sequences)
                ]
                if results.done.issuperset(keys):
                    continue
                started = time.perf_counter()
                out = complete_group(model, drafter, policy, prompts, group, options)
                tally.add(out.stats, time.perf_counter() - started)
                lines = [
                    completion(*key, out, row, tokenizer)
                    for row, key in enumerate(keys)
                    if key not in results.done
                ]
                results.append(lines)
                progress.update(task, advance=len(lines), speed=tally.speed)
    console.print(
        f"{total - len(results.done)} results, {tally.emitted} tokens, {tally.speed}, "
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
        ValueError: a prompt without tokens.
    """
    from transformers import AutoTokenizer

    # The tokenizer cuts text only, so a start token stays whichever end is kept.
    tokenizer = AutoTokenizer.from_pretrained(
        options.model,
        truncation_side="left" if options.keep == "last" else "right",
        **revision_of(options.revision),
    )
    cut = options.max_prompt_tokens is not None
    length = {"truncation": True, "max_length": options.max_prompt_tokens} if cut else {}
    prompts = tokenizer([record.prompt for record in records], **length).input_ids
    for record, prompt in zip(records, prompts, strict=True):
        if not prompt:
            raise ValueError(f"record {record.id!r} (line {record.line}): no tokens in the prompt")
    return tokenizer, prompts


def check_positions(
    records: Sequence[Record], prompts: Sequence[list[int]], max_new_tokens: int, limit: int
) -> int:
    """The positions that the longest record needs.

    Raises:
        ValueError: more than `limit`.
    """
    longest = limit - max_new_tokens + 1  # the last token is emitted, never fed
    too_long = [
        (record, len(prompt))
        for record, prompt in zip(records, prompts, strict=True)
        if len(prompt) > longest
    ]
    if not too_long:
        return max(map(len, prompts)) + max_new_tokens - 1
    record, tokens = too_long[0]
    advice = f"--max-prompt-tokens {longest} would fit" if longest > 0 else "lower --max-new-tokens"
    raise ValueError(
        f"{len(too_long)} of {len(records)} records are beyond the position limit {limit}; "
        f"the first is record {record.id!r} (line {record.line}): {tokens} prompt tokens + "
        f"--max-new-tokens {max_new_tokens} - 1 = {tokens + max_new_tokens - 1}; {advice}"
    )


def records_per_group(options: RunOptions) -> int:
    return max(1, options.batch_size // options.num_sequences)


def record_groups(count: int, options: RunOptions) -> list[range]:
    """Places of the records that are completed together: at most `batch_size` sequences, if it can.

    A record with more sequences is a group of its own, and `emsjax.generate` cuts it.
    """
    size = records_per_group(options)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def complete_group(model, drafter, policy, prompts, group: range, options: RunOptions):
    """`emsjax.generate` for one group; each sequence has the key of its place in the output."""
    import jax
    import numpy as np

    import emsjax

    num_sequences = options.num_sequences
    places = np.arange(group.start * num_sequences, group.stop * num_sequences, dtype=np.uint32)
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    slots = min(options.batch_size, records_per_group(options) * num_sequences)
    return emsjax.generate(
        model,
        [np.asarray(prompts[place], np.int32) for place in group],
        drafter=drafter,
        draft_length=policy,
        max_new_tokens=options.max_new_tokens,
        sampling=emsjax.Sampling(options.temperature, options.top_k, options.top_p),
        num_sequences=num_sequences,
        batch_size=slots,  # a partial last group is filled up: no new shapes
        key=fold_in(jax.random.key(options.seed), places),
    )


def completion(record_id: str | int, sequence: int, out, row: int, tokenizer) -> dict:
    """An output line."""
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    logprobs = out.logprobs[row, : out.lengths[row]]
    return {
        "id": record_id,
        **({"sequence": sequence} if out.num_sequences > 1 else {}),
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "mean_logprob": float(f"{logprobs.mean(dtype=float):.6g}"),
        "finish_reason": out.finish_reasons[row],
    }
