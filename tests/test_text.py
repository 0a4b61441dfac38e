"""Bytes of tokens are those of decoded texts, and text that grows is never taken back."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, TEXTS

from emsjax.text import TextStream, cut_at_stop, decode, token_bytes
from emsjax.text.vocabulary import fallback_tokens, special_tokens

PADDING = 7  # ids that models have and tokenizers do not


@functools.cache
def tokenizer_of(kind):
    return KINDS[kind]()


def bytes_of(kind):
    return token_bytes(tokenizer_of(kind), len(tokenizer_of(kind)) + PADDING)


def whole_text(kind, tokens):
    """What a decoder makes of the joined bytes."""
    found, fallback = bytes_of(kind), fallback_tokens(tokenizer_of(kind))
    tokens = [token for token in tokens if found[token]]
    text = ""
    for is_run, run in itertools.groupby(tokens, lambda token: token in fallback):
        spelled = b"".join(found[token] for token in run)
        try:
            text += spelled.decode()
        except UnicodeDecodeError:
            # Byte fallback replaces all bytes of a run, and byte-level decoders only wrong ones.
            text += "\ufffd" * len(spelled) if is_run else spelled.decode("utf-8", "replace")
    strips = kind in ("byte_fallback", "metaspace", "word_piece")
    return text.removeprefix(" ") if strips else text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS, "".join(TEXTS), "unseen: ß ∀ 漢字 \u200b"])
def test_joined_bytes_are_the_decoded_text(kind, text):
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert whole_text(kind, tokens) == decode(tokenizer, tokens)
    if kind in ("byte_level", "slow_bytes", "byte_fallback"):
        assert whole_text(kind, tokens) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_joined_bytes_of_any_tokens_are_the_decoded_text(kind, data):
    """Also of special and added tokens, and of bytes that are not UTF-8."""
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    if kind == "word_piece" and "##" in decode(tokenizer, tokens):
        return  # a first token in the middle of a word keeps its mark
    assert whole_text(kind, tokens) == decode(tokenizer, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_unknown_ids_add_nothing(kind):
    tokenizer, found = tokenizer_of(kind), bytes_of(kind)
    assert found[tokenizer.eos_token_id] == b""
    assert found[-PADDING:] == [b""] * PADDING
    if tokenizer.is_fast:
        assert found[tokenizer.convert_tokens_to_ids("<tool>")].strip() == b"<tool>"
    assert token_bytes(tokenizer, 5) == found[:5]


def test_a_special_token_that_is_decoded_after_all_is_text():
    """Its normalizer writes it in another way than the special token that decoding leaves out."""
    tokenizer, found = tokenizer_of("byte_fallback"), bytes_of("byte_fallback")
    odd = tokenizer.get_vocab()["<odd>"]
    first = tokenizer("a", add_special_tokens=False).input_ids
    assert decode(tokenizer, [*first, odd]) == "a" + found[odd].decode()
    assert bytes_of("byte_level")[tokenizer_of("byte_level").get_vocab()["<odd>"]] == b""


def test_parts_of_characters_are_bytes():
    for kind in ("byte_level", "byte_fallback", "gemma", "slow_bytes"):
        found = set(bytes_of(kind))
        assert {bytes([byte]) for byte in range(128, 256)} <= found, kind
    assert len(fallback_tokens(tokenizer_of("gemma"))) == 256
    assert not fallback_tokens(tokenizer_of("byte_level"))


def test_tokens_added_later_are_found():
    tokenizer = KINDS["byte_level"]()
    size = len(tokenizer) + 1
    assert token_bytes(tokenizer, size)[-1] == b""
    tokenizer.add_tokens(["<new>"])
    assert token_bytes(tokenizer, size)[-1] == b"<new>"
    token_bytes(tokenizer, size)[0] = b"changed by a caller"
    assert token_bytes(tokenizer, size)[0] != b"changed by a caller"


@settings(max_examples=300)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    searched_from=st.integers(0, 8),
    keep=st.booleans(),
)
def test_text_is_cut_at_the_stop_that_ends_first(text, stops, searched_from, keep):
    expected = text
    for end in range(searched_from + 1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            expected = text[:end] if keep else text[: min(begins)]
            break
    assert cut_at_stop(text, stops, searched_from, keep) == expected


def chunks_of(data, tokens):
    """The tokens in pieces of random lengths."""
    pieces = []
    while tokens:
        length = data.draw(st.integers(1, 4))
        pieces.append(tokens[:length])
        tokens = tokens[length:]
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(data=st.data())
def test_a_stream_of_any_tokens_joins_to_the_whole_text(kind, data):
    tokenizer = tokenizer_of(kind)
    some = st.integers(0, len(tokenizer) - 1)
    if fallback := sorted(fallback_tokens(tokenizer)):
        some = some | st.sampled_from(fallback)
    tokens = data.draw(st.lists(some, max_size=60))
    whole, stream, returned = decode(tokenizer, tokens), TextStream(tokenizer), ""
    for piece in chunks_of(data, tokens):
        returned += stream.add(piece)
        assert whole.startswith(returned)
    assert returned + stream.finish(whole) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma", "slow_bytes"])
@settings(max_examples=80)
@given(data=st.data(), text=st.text("aé🙂 \ufffd", max_size=20))
def test_a_stream_holds_no_more_than_it_must(kind, data, text):
    """After each token, all characters have come that are complete."""
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    special, fallback, found = special_tokens(tokenizer), fallback_tokens(tokenizer), bytes_of(kind)
    stream, returned, certain = TextStream(tokenizer), "", 0
    for place, token in enumerate(tokens):
        returned += stream.add([token])
        assert token not in special
        spelled = b"".join(found[one] for one in tokens[: place + 1])
        complete = spelled.decode("utf-8", "ignore")
        complete = complete.removeprefix(" ") if kind == "byte_fallback" else complete
        if token not in fallback:
            certain = len(complete) - complete.endswith("\ufffd")
        assert len(returned) >= certain
    whole = decode(tokenizer, tokens)
    assert returned + stream.finish(whole) == whole


@settings(max_examples=300)
@given(
    data=st.data(),
    text=st.text("ab🙂", max_size=16),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_a_stream_returns_nothing_of_a_stop(data, text, stops, keep):
    """Whichever stop ends the text, what has been returned is before it, or joins to it."""
    tokenizer = tokenizer_of("slow_bytes")
    stream, returned, read = TextStream(tokenizer, stops), "", []
    for piece in chunks_of(data, tokenizer(text).input_ids):
        before = len(decode(tokenizer, read).rstrip("\ufffd"))
        returned += stream.add(piece)
        read += piece
        so_far = decode(tokenizer, read)
        cut = cut_at_stop(so_far, stops, before, keep)
        assert cut.startswith(returned)
        if cut != so_far and data.draw(st.booleans()):
            break  # it was not ignored
    else:
        cut = text
    assert returned + stream.finish(cut) == cut


def test_what_cannot_become_a_stop_is_returned_at_once():
    tokenizer = tokenizer_of("slow_bytes")
    stream = TextStream(tokenizer, ["stop!", "end"])
    add = lambda text: stream.add(tokenizer(text).input_ids)
    assert add("a st") == "a "
    assert add("op") == ""
    assert add("s e") == "stops "
    assert add("nd") == ""
    assert add(" of it") == "end of it"  # ignored
    assert stream.finish("a stops end of it all") == " all"


@pytest.mark.parametrize("name", ["text", "no UTF-8", "split", "special"])
@pytest.mark.parametrize("kind", ["byte_level", "gemma"])
def test_a_tokens_cost_does_not_grow(kind, name, monkeypatch):
    """The stream decodes few tokens at once, however long the sequence is."""
    tokenizer, found = tokenizer_of(kind), bytes_of(kind)
    at = lambda spelled: found.index(spelled)
    tokens = {
        "text": [at(b"a"), at(b"b")],
        "no UTF-8": [at(b"\xff")],
        "split": [at(b"\xe2"), at(b"\x82")],
        "special": [tokenizer.eos_token_id],
    }[name]
    lengths = [0]
    count = lambda tokenizer, tokens: lengths.append(len(tokens)) or decode(tokenizer, tokens)
    monkeypatch.setattr("emsjax.text.incremental.decode", count)
    stream = TextStream(tokenizer)
    sequence = (tokens * 500)[:500]
    returned = "".join(stream.add([token]) for token in sequence)
    assert max(lengths) <= 20
    whole = decode(tokenizer, sequence)
    assert returned + stream.finish(whole) == whole
    if kind == "byte_level":
        assert len(whole) - len(returned) <= 1


def test_arrays_are_tokens():
    tokenizer = tokenizer_of("byte_level")
    tokens = np.array(tokenizer("print").input_ids, np.int32)
    assert decode(tokenizer, tokens) == "print"
    assert TextStream(tokenizer).add(tokens) == "print"
