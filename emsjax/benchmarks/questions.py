"""Prompt files of speculative decoding: questions with one or several turns, in JSON Lines.

Spec-Bench, SPEED-Bench and DeepSpec write an object per line with `turns`, a list of texts. The
field that `--group-by` names puts a question into a category: `category` in the first two; a line
without it belongs to "all". Other fields are ignored.

Every turn is a prompt: what was asked before, with the model's own answers, and the turn.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from emsjax.records.input import Record, Records
from emsjax.records.prompts import Limits, Prompts, check_prompts

ALL = "all"  # the category of lines without one
Answer = Callable[[list[list[int]]], list[str]]


@dataclasses.dataclass(frozen=True)
class Question(Record):
    """A line of the file.

    Attributes:
        turns: the texts of its turns.
        category: what it is reported under.
    """

    turns: tuple[str, ...] = ()
    category: str = ALL


class Questions(Records):
    """The questions of a file; see `emsjax.records.input.Records`.

    Args:
        path: the file.
        group_by: the field that holds a question's category.
    """

    def __init__(self, path: Path, group_by: str):
        super().__init__(path, None)
        self.group_by = group_by

    def record(self, read: Callable[[], Any], number: int) -> Record:
        try:
            value = read()
            turns = turns_of(value)
            category = category_of(value, self.group_by)
        except ValueError as error:  # bad UTF-8 included
            return Record(None, "", number, error=str(error))
        return Question(None, "", number, turns=turns, category=category)


def turns_of(value: Any) -> tuple[str, ...]:
    """The turns of a line's JSON value.

    Raises:
        ValueError: not an object, or no list of texts.
    """
    if not isinstance(value, dict):
        raise ValueError("a record must be a JSON object")
    if "turns" not in value:
        raise ValueError('missing field "turns"')
    turns = value["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError('field "turns" must be a list of texts that is not empty')
    for place, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn:
            raise ValueError(f"turns[{place}] must be a text that is not empty")
        turn.encode()  # lone surrogates have no UTF-8: fail here, not later
    return tuple(turns)


def category_of(value: dict[str, Any], field: str) -> str:
    """The category of a line's JSON value; "all" without one.

    Raises:
        ValueError: it is no text or number.
    """
    found = value.get(field)
    if found is None:
        return ALL
    if isinstance(found, bool | list | dict):
        raise ValueError(f'field "{field}" must be a text or a number')
    return str(found)


def chosen(questions: Questions, per_category: int | None) -> list[Question]:
    """The first questions of each category, in the order of the file; None: all."""
    seen: Counter[str] = Counter()
    found = []
    for one in questions:
        seen[one.category] += 1
        if per_category is None or seen[one.category] <= per_category:
            found.append(one)
    return found


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A turn of a question, as the model reads it.

    Attributes:
        question: where it comes from.
        turn: the number of the turn, from 0.
        tokens: its tokens, with those of earlier turns and answers.
        truncated: whether its first tokens were cut off.
    """

    question: Question
    turn: int
    tokens: list[int]
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Asked:
    """The turns that are asked at a time, as `Prompts` reads them."""

    path: Path
    records: Sequence[Record]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)


@dataclasses.dataclass(frozen=True)
class Conversations:
    """What makes prompts of questions.

    Attributes:
        path: the file, for messages.
        tokenizer: a tokenizer of transformers. If it has a chat template, turns and answers are
            its messages; otherwise their texts are joined by newlines.
        max_tokens: longer prompts lose their first tokens.
        limits: what every prompt must keep to.
    """

    path: Path
    tokenizer: Any
    max_tokens: int
    limits: Limits

    def prompts(self, questions: Sequence[Question], answer: Answer) -> list[Prompt]:
        """The prompts of all turns, those of a question one after the other.

        Args:
            answer: the model's answers to the prompts of one turn, which further turns follow.

        Raises:
            ValueError: a prompt does not fit; the message names the file and the line.
        """
        texts: list[list[str]] = [[] for _ in questions]  # turns and answers in turn
        found: list[list[Prompt]] = [[] for _ in questions]
        waiting = list(range(len(questions)))
        for turn in range(max(len(of.turns) for of in questions)):
            for i in waiting:
                texts[i].append(questions[i].turns[turn])
            asked = [self.asked(questions[i], texts[i]) for i in waiting]
            for i, (record, tokens) in zip(waiting, self.tokenized(asked), strict=True):
                found[i].append(Prompt(questions[i], turn, tokens, record.truncated))
            waiting = [i for i in waiting if len(questions[i].turns) > turn + 1]
            answers = answer([found[i][-1].tokens for i in waiting]) if waiting else []
            for i, text in zip(waiting, answers, strict=True):
                texts[i].append(text)
        return [prompt for of in found for prompt in of]

    def asked(self, question: Question, texts: Sequence[str]) -> Record:
        """The record of a turn; roles alternate, and the user begins."""
        if self.tokenizer.chat_template is None:
            return Record(None, "\n".join(texts), question.line)
        roles = ("user", "assistant")
        messages = tuple({"role": roles[i % 2], "content": of} for i, of in enumerate(texts))
        return Record(None, "", question.line, messages=messages)

    def tokenized(self, asked: Sequence[Record]) -> list[tuple[Record, list[int]]]:
        """The turns with their tokens."""
        prompts = Prompts(Asked(self.path, asked), self.tokenizer, self.max_tokens, self.limits)
        found = list(prompts)
        try:
            check_prompts(found)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        return found
