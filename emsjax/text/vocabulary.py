"""The bytes of text that each token of a vocabulary adds."""

import json
import re
import string
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

DECODED_AT_ONCE = 4096  # tokens in the search for an anchor
NOT_TEXT = "\ufffd"  # a decoder's sign for bytes that are not UTF-8
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a token of byte fallback
_found: weakref.WeakKeyDictionary[Any, tuple[tuple, list[bytes]]] = weakref.WeakKeyDictionary()


def _alphabet() -> dict[int, int]:
    """The byte behind each character of byte-level BPE; 0xFFFF for other characters below 256.

    Bytes that print are their own character, and the others are the characters from 256 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    known = dict(zip(printed, printed, strict=True))
    moved = {256 + place: byte for place, byte in enumerate(others)}
    return dict.fromkeys(others, 0xFFFF) | known | moved


ALPHABET = _alphabet()


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes of text that each token adds to a decoded sequence, behind other text.

    Joined over a sequence they are the UTF-8 of what `tokenizer.decode` returns with
    `skip_special_tokens=True` and `clean_up_tokenization_spaces=False`, with two exceptions at
    the ends: decoders that strip the first space of a sequence, and bytes that are not UTF-8,
    which a decoder replaces. Special tokens and ids that the tokenizer does not know add nothing.

    The rule is read from the decoder of a fast tokenizer: the alphabet of byte-level BPE, or the
    replaced spaces and bytes of SentencePiece-like BPE. Any other tokenizer decodes each token
    behind a fixed one.

    Args:
        tokenizer: a tokenizer of transformers.
        vocab_size: the model's vocabulary size, which may exceed the tokenizer's.

    Returns:
        The bytes of the token ids 0 to `vocab_size - 1`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = None if backend is None else decoder_steps(backend)
    version = vocab_size, len(tokenizer), json.dumps(steps, allow_nan=False)
    if tokenizer in _found and _found[tokenizer][0] == version:
        return list(_found[tokenizer][1])
    names = token_names(tokenizer)
    spell = None if steps is None else _speller(steps)
    if spell is None:
        spelled = _decoded_behind_anchor(tokenizer, names)
    else:
        spelled = {token: spell(name) for token, name in names.items()}
    found = [spelled.get(token, b"") for token in range(vocab_size)]
    for token in special_tokens(tokenizer):
        if 0 <= token < vocab_size:
            found[token] = b""
    _found[tokenizer] = version, found
    return list(found)


def token_names(tokenizer: Any) -> dict[int, str]:
    """The tokenizer's own writing of each token that it knows, added ones included."""
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    # A fast tokenizer decodes an added token as its normalizer writes it.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    write = (lambda token: str(added[token])) if backend is None else backend.id_to_token
    return names | {token: write(token) for token in added}


def special_tokens(tokenizer: Any) -> set[int]:
    """The ids that `skip_special_tokens=True` leaves out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set(tokenizer.all_special_ids)
    added = backend.get_added_tokens_decoder()
    special = [token for token, content in added.items() if content.special]
    # A special token that its normalizer changes is decoded after all.
    texts = _decode(tokenizer, ([token] for token in special))
    return {token for token, text in zip(special, texts, strict=True) if not text}


def decoder_steps(backend: Any) -> list[Mapping[str, Any]]:
    """The steps of a fast tokenizer's decoder in their order, as its JSON describes them."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return []
    # A copy without the vocabulary: only its decoder is written as JSON.
    described = json.loads(decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def fallback_tokens(tokenizer: Any) -> set[int]:
    """The tokens such as `<0x0A>` that a fast tokenizer's decoder reads as bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [] if backend is None else decoder_steps(backend)
    if not any(step["type"] == "ByteFallback" for step in steps):
        return set()
    return {token for token, name in token_names(tokenizer).items() if BYTE.fullmatch(name)}


def _speller(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes] | None:
    """The bytes of a token's name under these steps; None: they do not treat tokens one by one."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level
    replaced = [_replacement(step) for step in steps if step["type"] == "Replace"]
    if None in replaced or "Fuse" not in kinds:
        return None
    # What follows Fuse treats the whole text, where Strip only takes the first or last character.
    kinds, behind = kinds[: kinds.index("Fuse")], kinds[kinds.index("Fuse") + 1 :]
    rest = kinds[len(replaced) :]
    if kinds[: len(replaced)] != ["Replace"] * len(replaced) or set(behind) - {"Strip"}:
        return None
    if rest not in ([], ["ByteFallback"]):
        return None

    def spell(name: str) -> bytes:
        for pattern, content in replaced:
            name = name.replace(pattern, content)
        if rest and BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return _utf8(name)

    return spell


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """The text that a step replaces and its replacement; None: it replaces an expression."""
    pattern = step["pattern"].get("String")
    return None if pattern is None else (pattern, step["content"])


def byte_level(name: str) -> bytes:
    """A byte-level token's bytes; a name with characters outside the alphabet is plain text."""
    try:
        return name.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return _utf8(name)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _decoded_behind_anchor(tokenizer: Any, names: Mapping[int, str]) -> dict[int, bytes]:
    """Each token's text behind a token of a letter or digit, as UTF-8.

    Parts of characters have no text of their own. They are read as bytes of byte fallback or of
    byte-level BPE, whichever their name follows.
    """
    tokens = sorted(set(names) - special_tokens(tokenizer))
    anchor = _anchor(tokenizer, tokens)
    before = _decode(tokenizer, [anchor])[0] if anchor else ""
    spelled = {}
    pairs = _decode(tokenizer, ([*anchor, token] for token in tokens))
    for token, text in zip(tokens, pairs, strict=True):
        name, text = names[token], text.removeprefix(before)
        if NOT_TEXT in text and NOT_TEXT not in name:
            spelled[token] = (
                bytes([int(name[3:5], 16)]) if BYTE.fullmatch(name) else byte_level(name)
            )
        else:
            spelled[token] = _utf8(text)
    return spelled


def _anchor(tokenizer: Any, tokens: list[int]) -> list[int]:
    """A token that remains itself in front of others; empty: there is none."""
    plain = set(string.ascii_letters + string.digits)
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        some = tokens[start : start + DECODED_AT_ONCE]
        for token, text in zip(some, _decode(tokenizer, ([one] for one in some)), strict=True):
            twice = text and set(text) <= plain and _decode(tokenizer, [[token, token]])[0]
            if twice and twice.startswith(text) and twice != text:
                return [token]
    return []


def _decode(tokenizer: Any, sequences: Iterable[list[int]]) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.decode_batch(list(sequences), skip_special_tokens=True)
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return [tokenizer.decode(sequence, **options) for sequence in sequences]
