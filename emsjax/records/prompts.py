"""Token ids of the records' prompts, and the prompts whose results are still missing."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from emsjax.records.input import Key, Record, Records
from emsjax.records.reading import in_one_line

TOKENIZED_AT_ONCE = 256  # records


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a prompt must keep to.

    Attributes:
        max_new_tokens: new tokens that have to fit after it.
        positions: tokens that the model has positions for.
        vocab_size: the model's vocabulary size.
    """

    max_new_tokens: int
    positions: int
    vocab_size: int

    def fault(self, tokens: list[int]) -> str | None:
        """Why the model cannot complete a prompt of these tokens; None: it can."""
        if not tokens:
            return "no tokens in the prompt"
        if max(tokens) >= self.vocab_size:
            return (
                f"the tokenizer's token {max(tokens)} is outside the model's vocabulary of "
                f"{self.vocab_size}"
            )
        new = self.max_new_tokens
        fits = self.positions - new + 1  # the last token is emitted, never fed
        if len(tokens) <= fits:
            return None
        advice = f"--max-prompt-tokens {fits} would fit" if fits > 0 else "lower --max-new-tokens"
        return (
            f"{len(tokens)} prompt tokens + --max-new-tokens {new} - 1 = {len(tokens) + new - 1} "
            f"are beyond the position limit {self.positions}; {advice}"
        )


class Prompts:
    """Every record with its token ids, tokenized anew in each iteration.

    A record whose prompt the model cannot complete has an `error`, and its tokens are arbitrary.

    Args:
        records: `truncated` is set on those whose prompts are cut.
        tokenizer: a tokenizer of transformers; its `truncation_side` is the end that is cut off.
        max_tokens: longer prompts are cut to this many tokens; None: no prompt is cut.
        limits: what every prompt must keep to; None: nothing.
        fault_of: tells what is wrong with a record's own settings; None: nothing.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Any,
        max_tokens: int | None,
        limits: Limits | None,
        fault_of: Callable[[str], str | None] = lambda sampling: None,
    ):
        self.records, self.tokenizer = records, tokenizer
        self.max_tokens, self.limits, self.fault_of = max_tokens, limits, fault_of

    def __iter__(self) -> Iterator[tuple[Record, list[int]]]:
        records = map(self._rendered, self.records)
        while group := list(itertools.islice(records, TOKENIZED_AT_ONCE)):
            where = f"{self.records.path}, lines {group[0].line} to {group[-1].line}"
            valid = [one for one in group if one.error is None]
            with in_one_line(f"{where}: the prompts cannot be tokenized"):
                # A chat template writes the special tokens itself.
                encoded = {
                    special: self._encode(
                        [one.prompt for one in valid if (one.messages is None) == special],
                        add_special_tokens=special,
                    )
                    for special in (True, False)
                }
            for record in group:
                if record.error is not None:
                    yield record, []
                    continue
                tokens, truncated = next(encoded[record.messages is None])
                fault = self.limits and self.limits.fault(tokens)
                if fault is None and record.sampling is not None:
                    fault = self.fault_of(record.sampling)
                yield dataclasses.replace(record, truncated=truncated, error=fault), tokens

    def _rendered(self, record: Record) -> Record:
        """The record with the text of its messages, in the tokenizer's chat template.

        Raises:
            ValueError: there are messages, and the tokenizer has no template.
        """
        if record.messages is None or record.error is not None:
            return record
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{record}: the tokenizer of {self.tokenizer.name_or_path} has no chat template, "
                'which "messages" need: write a "prompt"'
            )
        options = {"tokenize": False, "add_generation_prompt": True}
        try:
            with in_one_line("the chat template refuses the messages"):
                text = self.tokenizer.apply_chat_template(list(record.messages), **options)
        except ValueError as error:
            return dataclasses.replace(record, error=str(error))
        return dataclasses.replace(record, prompt=text)

    def _encode(self, texts: list[str], **options: bool) -> Iterator[tuple[list[int], bool]]:
        """The tokens of each text, and whether they are cut."""
        if not texts:
            return iter(())
        tokenize = functools.partial(self.tokenizer, **options)
        if self.max_tokens is None:
            return zip(tokenize(texts).input_ids, [False] * len(texts), strict=True)
        encoded = tokenize(texts, truncation=True, max_length=self.max_tokens)
        if self.tokenizer.is_fast:
            cut = [bool(encoding.overflowing) for encoding in encoded.encodings]
        else:
            cut = [len(ids) > self.max_tokens for ids in tokenize(texts).input_ids]
        return zip(encoded.input_ids, cut, strict=True)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Facts about all prompts.

    Attributes:
        longest: tokens of the longest valid prompt; 1 if there is none.
        truncated: number of valid prompts that are cut.
        invalid: number of records that cannot be completed.
        first: the first of these and why; None if there are none.
    """

    longest: int
    truncated: int
    invalid: int
    first: str | None = None


def check_prompts(
    prompts: Iterable[tuple[Record, list[int]]], *, keep_invalid: bool = False
) -> Extent:
    """Check that all prompts can be completed, unless invalid records are kept.

    Raises:
        ValueError: the number of records that cannot be, and the first of them.
    """
    count, longest, truncated, invalid, first = 0, 1, 0, 0, None
    for record, prompt in prompts:
        count += 1
        if record.error is None:
            longest = max(longest, len(prompt))
            truncated += record.truncated
        else:
            invalid += 1
            first = first or f"{record}: {record.error}"
    if invalid and not keep_invalid:
        raise ValueError(f"{invalid} of {count} records cannot be completed; the first is {first}")
    return Extent(longest, truncated, invalid, first)


class Missing:
    """The prompts with missing results, and their records until all results have come.

    Args:
        done: the (key, sequence) pairs that have results.
    """

    def __init__(self, prompts: Prompts, done: Container[tuple[Key, int]], num_sequences: int):
        self.prompts, self.done, self.num_sequences = prompts, done, num_sequences
        self.records: dict[int, tuple[Record, int]] = {}  # those with results to come, by index

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Index and prompt of each record with a missing sequence.

        An invalid record has no tokens, so that the stream refuses it in its turn.
        """
        for index, (record, prompt) in enumerate(self.prompts):
            keys = ((record.key, sequence) for sequence in range(self.num_sequences))
            if not all(key in self.done for key in keys):
                self.records[index] = record, self.num_sequences
                yield index, [] if record.error is not None else prompt

    def sampling_of(self, index: int) -> str | None:
        """The own settings of a record with results to come."""
        return self.records[index][0].sampling

    def record_of(self, completion) -> Record:
        """The completion's record, which is forgotten after its last sequence."""
        record, left = self.records.pop(completion.prompt)
        if left > 1:
            self.records[completion.prompt] = record, left - 1
        return record
