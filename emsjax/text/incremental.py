"""The text of new tokens: all of it, up to a stop, and as it grows."""

import weakref
from collections.abc import Sequence
from typing import Any

from emsjax.text.vocabulary import NOT_TEXT, fallback_tokens, special_tokens

CONTEXT = 8  # tokens, of more bytes than a character
_kinds: weakref.WeakKeyDictionary[Any, tuple[int, set[int], set[int]]] = weakref.WeakKeyDictionary()


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return tokenizer.decode([int(token) for token in tokens], **options)


def cut_at_stop(text: str, stops: Sequence[str], searched_from: int = 0, keep: bool = False) -> str:
    """The text before the stop that ends first; all of it if there is none.

    Of several stops that end at one place, the longest counts.

    Args:
        stops: stop strings.
        searched_from: characters that a stop must end behind; one that ends there or before is
            part of the text.
        keep: also keep the stop.
    """
    found = _first_stop(text, stops, searched_from)
    return text if found is None else text[: found[keep]]


def _first_stop(text: str, stops: Sequence[str], searched_from: int) -> tuple[int, int] | None:
    """Where the stop begins and ends that ends first behind `searched_from` characters."""
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, searched_from - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), begin))
    return None if not found else min(found)[::-1]


def _token_kinds(tokenizer: Any) -> tuple[set[int], set[int]]:
    """The special tokens, and those that byte fallback reads as bytes."""
    if tokenizer not in _kinds or _kinds[tokenizer][0] != len(tokenizer):
        kinds = special_tokens(tokenizer), fallback_tokens(tokenizer)
        _kinds[tokenizer] = len(tokenizer), *kinds
    return _kinds[tokenizer][1:]


class TextStream:
    """The text of one sequence as it grows.

    Text is held back while later tokens could change it: a character of which bytes are missing,
    a run of bytes of byte fallback, which become text together, and what could be the beginning
    of a stop. A whole stop is held back until further tokens show that it was ignored.

    Only the last few tokens are decoded again, so a token's cost does not depend on the length of
    the sequence, except in a run of bytes, which is decoded once, when it ends.

    Args:
        tokenizer: a tokenizer of transformers.
        stops: stop strings.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.special, self.fallback = _token_kinds(tokenizer)
        self.context: list[int] = []  # read tokens, which the new ones are decoded behind
        self.context_text = ""
        self.unread: list[int] = []
        self.num_read = 0  # characters of the unread tokens' text that have been read
        self.held = ""  # read, but not returned
        self.num_returned = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain.

        Args:
            tokens: the next tokens of the sequence.
        """
        self.unread += [int(token) for token in tokens if int(token) not in self.special]
        gained = self._read()
        before, self.held = len(self.held), self.held + gained
        certain = self._certain(before)
        returned, self.held = self.held[:certain], self.held[certain:]
        self.num_returned += len(returned)
        return returned

    def finish(self, whole: str) -> str:
        """The rest of the text.

        Args:
            whole: the sequence's whole text, which begins with all that `add` has returned.
        """
        rest = whole[self.num_returned :]
        self.held, self.num_returned = "", max(self.num_returned, len(whole))
        return rest

    def _read(self) -> str:
        """The text that the unread tokens add and that later tokens do not change."""
        if not self.unread or self.unread[-1] in self.fallback:
            return ""
        text = decode(self.tokenizer, self.context + self.unread)[len(self.context_text) :]
        # Byte-level decoders write one sign for the bytes of an incomplete character.
        certain = text.removesuffix(NOT_TEXT)
        new = certain[self.num_read :]
        self.num_read += len(new)
        # Bytes that are not UTF-8 may never end: what is left of a character at the beginning of
        # the context is replaced in both of its decodings.
        if text and (certain == text or len(self.unread) > CONTEXT):
            self.context, self.unread, self.num_read = self.unread[-CONTEXT:], [], 0
            self.context_text = decode(self.tokenizer, self.context)
            if certain != text:
                self.context_text = self.context_text.removesuffix(NOT_TEXT)
        return new

    def _certain(self, before: int) -> int:
        """How many of the held characters can be returned.

        Args:
            before: characters that were already held; a stop that ends among them was ignored.
        """
        text = self.held
        begins = [len(text)]
        for stop in self.stops:
            begin = text.find(stop, max(0, before - len(stop) + 1))
            if begin >= 0:
                begins.append(begin)
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    begins.append(len(text) - length)
                    break
        return min(begins)
