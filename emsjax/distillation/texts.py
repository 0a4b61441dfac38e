"""Texts of a JSON Lines file as documents: token ids, with an end token after each."""

import codecs
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from emsjax.distillation.sequences import MIN_TOKENS
from emsjax.records.input import parse_json, template_fields, text_of
from emsjax.records.reading import in_one_line


def read_texts(path: Path, template: str) -> list[str]:
    """The text of every line, made of its fields; blank lines are skipped.

    Raises:
        ValueError: the first bad line with its number, a bad template, or no texts.
    """
    fields, texts = template_fields(template, "--text-template"), []
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append(text_of(parse_json(line.decode()), template, fields, "text"))
        except ValueError as error:  # bad UTF-8 included
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not texts:
        raise ValueError(f"{path} holds no texts")
    return texts


def tokenize(
    tokenizer, texts: Sequence[str], source: str, *, vocab_size: int, end_token_ids: Sequence[int]
) -> list[np.ndarray]:
    """The documents of the texts, int32 [t] each.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: the texts of one file.
        source: the name of that file, for messages.
        vocab_size: the model's vocabulary size.
        end_token_ids: the first of them ends every document; if empty, no end token is added.

    Raises:
        ValueError: a text of fewer than two tokens, or with tokens that the model does not know.
    """
    documents = []
    with in_one_line(f"the texts of {source} cannot be tokenized"):
        encoded = tokenizer(list(texts)).input_ids
    for number, ids in enumerate(encoded, start=1):
        if len(ids) < MIN_TOKENS:
            raise ValueError(
                f"{source}, text {number} is too short: it has {len(ids)} tokens, not at least "
                f"{MIN_TOKENS}"
            )
        if max(ids) >= vocab_size:
            raise ValueError(
                f"{source}, text {number} has token {max(ids)}, and the model a vocabulary of "
                f"{vocab_size} tokens: tokenizer and model do not belong together"
            )
        documents.append(np.array([*ids, *end_token_ids[:1]], np.int32))
    return documents


def hold_out(
    documents: Sequence[np.ndarray], count: int, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """`count` documents chosen at random, and all others.

    Raises:
        ValueError: there would be no others.
    """
    if len(documents) <= count:
        raise ValueError(
            f"of {len(documents)} texts, {count} cannot be held out: none is left to train on"
        )
    chosen = [documents[i] for i in np.random.default_rng(seed).permutation(len(documents))]
    return chosen[:count], chosen[count:]
