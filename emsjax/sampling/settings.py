"""Settings by which the next token is chosen, as users give them and as the device loop reads them.

The order is that of transformers: logit bias, penalties, tokens that are not allowed, logits
processors of users, and then, in sampled sequences, temperature, top-k, top-p and min-p.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int32

from emsjax.checks import (
    INT32_MAX,
    MOST,
    as_token_ids,
    check_at_least,
    check_number,
    is_per_prompt,
    per_prompt,
    refuse,
)
from emsjax.values import pytree


@pytree
class Sampling:
    """Settings by which the next token is chosen; greedy by default.

    Each field is one value for all prompts or one per prompt. Temperature, top-k, top-p and min-p
    concern prompts that are sampled: one top_k, top_p or min_p for all prompts applies to those
    with a temperature above 0, of which there must be one; with one value per prompt, prompts with
    temperature 0 must have the default. The other settings change the logits before that, so they
    concern greedy decoding too. A token's context is the prompt, the emitted tokens and, while
    drafts are verified, the draft tokens before it.

    Attributes:
        temperature: divides the logits; 0, the default, is greedy decoding.
        top_k: only the k likeliest tokens are kept, ties with the k-th included;
            0 keeps all.
        top_p: only the smallest set of likeliest tokens with at least this
            probability is kept, ties included; 1 keeps all.
        min_p: only tokens with at least this share of the likeliest token's probability are kept;
            0 keeps all. It comes after top-p, as in transformers (in vLLM it comes before top-k).
        repetition_penalty: logits of tokens of the prompt and of emitted tokens are divided by it
            if they are positive, and multiplied otherwise: above 1 such tokens become less likely.
        presence_penalty: is subtracted from the logits of tokens that were emitted. As in vLLM,
            the prompt does not count; transformers has no such setting.
        frequency_penalty: is subtracted once for each time that a token was emitted; as before.
        min_new_tokens: no end token can be chosen, and no stop counts, before so many new tokens.
        logit_bias: a mapping from token ids to numbers that are added to their logits; or one
            mapping, or None, per prompt.
        suppress_tokens: token ids that are never chosen; or one sequence of ids per prompt.

    Inside the device loop, `temperature`, `top_k`, `top_p` and `min_p` are arrays [b], or None if
    no sample uses them, and the other fields are None: see `Controls`.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    min_new_tokens: Any = 0
    logit_bias: Any = None
    suppress_tokens: Any = ()

    def expand(self, num_prompts: int, vocab_size: int | None = None) -> "Sampling":
        """One checked value per prompt: host arrays, and lists of mappings and of id arrays.

        Args:
            vocab_size: ids must be below it; None: the vocabulary is not known yet.

        Raises:
            ValueError: there is a wrong number of values, one is not in its field's range, a token
                id is outside the vocabulary, or a top_k, top_p or min_p comes without a
                temperature.
        """
        columns = {
            name: np.array(
                per_prompt(f"sampling.{name}", getattr(self, name), num_prompts, check), dtype
            )
            for name, (check, dtype, _) in FIELDS.items()
        }
        greedy = columns["temperature"] == 0
        for name in DRAWN:
            default = FIELDS[name][2]
            idle = greedy & (columns[name] != default)
            given = getattr(self, name)
            if idle.any() if is_per_prompt(given) else idle.all():
                prompt = f" of prompts[{idle.argmax()}]" if is_per_prompt(given) else ""
                raise ValueError(
                    f"sampling.{name}{prompt} has no effect at temperature 0, which is greedy "
                    f"decoding: set sampling.temperature above 0, or leave {name} at {default}"
                )
        return Sampling(
            **columns,
            logit_bias=_biases(self.logit_bias, num_prompts, vocab_size),
            suppress_tokens=_suppressed(self.suppress_tokens, num_prompts, vocab_size),
        )

    def in_use(self) -> "Sampling | None":
        """How tokens are drawn, without settings that have no effect; None: all are greedy."""
        sampled = self.temperature > 0
        if not sampled.any():
            return None
        kept = dict.fromkeys(FIELDS) | {"temperature": self.temperature}
        for name in DRAWN:
            column = getattr(self, name)
            if (sampled & (column != FIELDS[name][2])).any():
                kept[name] = column
        return Sampling(**kept, suppress_tokens=None)

    def controls(self, vocab_size: int) -> "Controls | None":
        """The settings that change logits, without those that no prompt uses; None: no such one."""
        kept = {}
        for name in CONTROLS:
            column = getattr(self, name)
            kept[name] = column if (column != FIELDS[name][2]).any() else None
        biases = [list(bias.items()) for bias in self.logit_bias]
        if most := _rounded(max(map(len, biases))):
            padded = [bias + [(INT32_MAX, 0.0)] * (most - len(bias)) for bias in biases]
            tokens, values = zip(*(zip(*bias, strict=True) for bias in padded), strict=True)
            kept |= {
                "bias_tokens": np.array(tokens, np.int32),
                "bias_values": np.array(values, np.float32),
            }
        if most := _rounded(max(map(len, self.suppress_tokens))):
            padded = [(*ids, *[INT32_MAX] * (most - len(ids))) for ids in self.suppress_tokens]
            kept["suppressed"] = np.array(padded, np.int32)
        if all(column is None for column in kept.values()):
            return None
        return Controls(**kept, vocab_size=vocab_size)


@pytree
class Controls:
    """Settings that change logits before a token is chosen: one row per sequence.

    None: no sequence uses it. Places of `bias_tokens` and `suppressed` that a sequence does not
    need hold an id outside the vocabulary.

    Attributes:
        repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens: see `Sampling`.
        bias_tokens: tokens with a bias.
        bias_values: their biases.
        suppressed: tokens that are never chosen.
        vocab_size: the target's vocabulary size; static.
    """

    repetition_penalty: Float[Array | np.ndarray, "b"] | None = None
    presence_penalty: Float[Array | np.ndarray, "b"] | None = None
    frequency_penalty: Float[Array | np.ndarray, "b"] | None = None
    min_new_tokens: Int32[Array | np.ndarray, "b"] | None = None
    bias_tokens: Int32[Array | np.ndarray, "b n"] | None = None
    bias_values: Float[Array | np.ndarray, "b n"] | None = None
    suppressed: Int32[Array | np.ndarray, "b m"] | None = None
    vocab_size: int = dataclasses.field(default=0, metadata={"static": True})


@pytree
class Settings:
    """What each sequence asks for beyond its prompt and its length: one row per sequence.

    Attributes:
        sampling: how tokens are drawn, or None if all sequences decode greedily.
        controls: what changes logits before that; None: nothing.
        stop_states: the state in which each sequence enters the automaton of stops; None: there
            are no stops.
        request_ids: the place of each sequence's prompt among those of the call; None: no logits
            processor has values for each prompt.
    """

    sampling: Sampling | None = None
    controls: Controls | None = None
    stop_states: Int32[Array | np.ndarray, "b"] | None = None
    request_ids: Int32[Array | np.ndarray, "b"] | None = None

    @property
    def min_new_tokens(self) -> Int32[Array | np.ndarray, "b"] | int:
        """New tokens before which no end token and no stop may end a sequence; 0: none."""
        least = None if self.controls is None else self.controls.min_new_tokens
        return 0 if least is None else least


def _rounded(count: int) -> int:
    """The next power of two, so that lists of similar lengths share compiled programs; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def _biases(given: Any, num_prompts: int, vocab_size: int | None) -> list[dict[int, float]]:
    name = "sampling.logit_bias"
    if given is None or isinstance(given, Mapping):
        return [_bias(name, given, vocab_size)] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        refuse(name, "a mapping from token ids to numbers, or one per prompt", given)
    check = lambda name, one: _bias(name, one, vocab_size)
    return per_prompt(name, given, num_prompts, check)


def _bias(name: str, given: Any, vocab_size: int | None) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        refuse(name, "a mapping from token ids to numbers, or None", given)
    most = None if vocab_size is None else vocab_size - 1
    return {
        check_at_least(f"a token id of {name}", token, 0, most): _finite(f"{name}[{token}]", bias)
        for token, bias in given.items()
    }


def _suppressed(given: Any, num_prompts: int, vocab_size: int | None) -> list[tuple[int, ...]]:
    name = "sampling.suppress_tokens"
    if given is None or (is_per_prompt(given) and len(given) == 0):
        return [()] * num_prompts
    if not is_per_prompt(given):
        refuse(name, "a sequence of token ids, or one sequence per prompt", given)
    several = any(one is None or is_per_prompt(one) for one in given)
    if not several:
        return [_ids(name, given, vocab_size)] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(
            f"{name} must be one sequence of token ids or one per prompt: got {len(given)} for "
            f"{num_prompts} prompts"
        )
    return [_ids(f"{name}[{i}]", one, vocab_size) for i, one in enumerate(given)]


def _ids(name: str, given: Any, vocab_size: int | None) -> tuple[int, ...]:
    if given is None or (is_per_prompt(given) and len(given) == 0):
        return ()
    return tuple(sorted(set(as_token_ids(name, given, vocab_size).tolist())))


def _temperature(name: str, value: Any) -> float:
    most = float(np.finfo(np.float32).max)
    return check_number(name, value, "finite and >= 0", lambda x: 0 <= x <= most)


def _top_k(name: str, value: Any) -> int:
    return min(check_at_least(name, value, 0), INT32_MAX)


def _top_p(name: str, value: Any) -> float:
    return check_number(name, value, "in (0, 1]", lambda x: 0 < x <= 1)


def _min_p(name: str, value: Any) -> float:
    return check_number(name, value, "in [0, 1]", lambda x: 0 <= x <= 1)


def _repetition_penalty(name: str, value: Any) -> float:
    tiny, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return check_number(name, value, "finite and above 0", lambda x: tiny <= x <= most)


def _finite(name: str, value: Any) -> float:
    most = float(np.finfo(np.float32).max)
    return check_number(name, value, "finite", lambda x: -most <= x <= most)


def _min_new_tokens(name: str, value: Any) -> int:
    return check_at_least(name, value, 0, MOST)


# The check, the dtype on the device and the value without effect of each field of numbers.
FIELDS = {
    "temperature": (_temperature, np.float32, 0.0),
    "top_k": (_top_k, np.int32, 0),
    "top_p": (_top_p, np.float32, 1.0),
    "min_p": (_min_p, np.float32, 0.0),
    "repetition_penalty": (_repetition_penalty, np.float32, 1.0),
    "presence_penalty": (_finite, np.float32, 0.0),
    "frequency_penalty": (_finite, np.float32, 0.0),
    "min_new_tokens": (_min_new_tokens, np.int32, 0),
}
DRAWN = ("top_k", "top_p", "min_p")  # fields that need a temperature
CONTROLS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")
