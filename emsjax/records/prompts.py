"""Token ids of the records' prompts, and the prompts whose results are still missing."""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any

from emsjax.records.input import Record, Records

TOKENIZED_AT_ONCE = 256  # records


class Prompts:
    """Every record with its token ids, tokenized anew in each iteration.

    Args:
        records: `truncated` is set on those whose prompts are cut.
        tokenizer: a tokenizer of transformers; its `truncation_side` is the end that is cut off.
        max_tokens: longer prompts are cut to this many tokens; None: no prompt is cut.

    Raises:
        ValueError: in an iteration, a prompt without tokens.
    """

    def __init__(self, records: Records, tokenizer: Any, max_tokens: int | None):
        self.records, self.tokenizer, self.max_tokens = records, tokenizer, max_tokens

    def __iter__(self) -> Iterator[tuple[Record, list[int]]]:
        limit: dict[str, Any] = {}
        if self.max_tokens is not None:
            limit = {"truncation": True, "max_length": self.max_tokens}
        records = iter(self.records)
        while group := list(itertools.islice(records, TOKENIZED_AT_ONCE)):
            texts = [record.prompt for record in group]
            encoded = self.tokenizer(texts, **limit)
            cut = self._are_cut(texts, encoded)
            for record, prompt, truncated in zip(group, encoded.input_ids, cut, strict=True):
                if not prompt:
                    where = f"record {record.id!r} (line {record.line})"
                    raise ValueError(f"{where}: no tokens in the prompt")
                yield dataclasses.replace(record, truncated=truncated), prompt

    def _are_cut(self, texts: list[str], encoded) -> list[bool]:
        """Whether each text has more tokens than its encoding."""
        if self.max_tokens is None:
            return [False] * len(texts)
        if self.tokenizer.is_fast:
            return [bool(encoding.overflowing) for encoding in encoded.encodings]
        whole = self.tokenizer(texts).input_ids
        return [len(ids) > self.max_tokens for ids in whole]


def check_prompts(
    prompts: Iterable[tuple[Record, list[int]]], max_new_tokens: int, positions: int, vocab: int
) -> tuple[int, int]:
    """Check that the model can complete all prompts.

    Args:
        positions: tokens that the model has positions for.
        vocab: its vocabulary size.

    Returns:
        Tokens of the longest record with its completion, and the number of truncated records.

    Raises:
        ValueError: a prompt needs more positions, or has a token outside the vocabulary.
    """
    fits = positions - max_new_tokens + 1  # the last token is emitted, never fed
    count, longest, truncated, too_long, first = 0, 0, 0, 0, None
    for record, prompt in prompts:
        count, longest = count + 1, max(longest, len(prompt))
        truncated += record.truncated
        if max(prompt) >= vocab:
            raise ValueError(
                f"record {record.id!r} (line {record.line}): the tokenizer's token {max(prompt)} "
                f"is outside the model's vocabulary of {vocab}"
            )
        if len(prompt) > fits:
            too_long += 1
            first = first or (record, len(prompt))
    if first is None:
        return longest + max_new_tokens, truncated
    record, tokens = first
    advice = f"--max-prompt-tokens {fits} would fit" if fits > 0 else "lower --max-new-tokens"
    raise ValueError(
        f"{too_long} of {count} records are beyond the position limit {positions}; "
        f"the first is record {record.id!r} (line {record.line}): {tokens} prompt tokens + "
        f"--max-new-tokens {max_new_tokens} - 1 = {tokens + max_new_tokens - 1}; {advice}"
    )


class Missing:
    """The prompts with missing results, and their records until all results have come.

    Args:
        done: the (id, sequence) pairs that have results.
    """

    def __init__(self, prompts: Prompts, done: Container, num_sequences: int):
        self.prompts, self.done, self.num_sequences = prompts, done, num_sequences
        self.records: dict[int, tuple[Record, int]] = {}  # those with results to come, by index

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Index and prompt of each record with a missing sequence."""
        for index, (record, prompt) in enumerate(self.prompts):
            keys = ((record.id, sequence) for sequence in range(self.num_sequences))
            if not all(key in self.done for key in keys):
                self.records[index] = record, self.num_sequences
                yield index, prompt

    def record_of(self, completion) -> Record:
        """The completion's record, which is forgotten after its last sequence."""
        record, left = self.records.pop(completion.prompt)
        if left > 1:
            self.records[completion.prompt] = record, left - 1
        return record
