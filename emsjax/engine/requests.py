"""The requests of a `generate` call, checked as a whole before any work starts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.checks import (
    INT32_MAX,
    NOT_TEXT,
    as_end_token_ids,
    as_token_ids,
    check_at_least,
    check_instance,
    check_list,
    is_kind,
    per_prompt,
)
from emsjax.decode.base import ModelConfig
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.state import Common
from emsjax.engine.texts import Texts, check_stops
from emsjax.sampling import LogitsProcessor, Sampling, Settings
from emsjax.sampling.processors import prompt_numbers

KEY_IMPL = "threefry2x32"  # implementation of random keys
KEYS_AT_ONCE = 256
# Stands for prompts that are not known yet; with a mask it may be the padding token.
PLACEHOLDER = {"prompts": [[0]], "attention_mask": [[1]]}


class SequenceKeys:
    """The random keys of numbered sequences, computed as they are needed.

    Args:
        key: one typed key, of which sequence i has fold_in(key, i), or one per sequence. Beyond 32
            bits it is fold_in(fold_in(key, i >> 32), i % 2**32), for i modulo 2**64.
    """

    def __init__(self, key: jax.Array):
        self.key, self.impl = key, jax.random.key_impl(key)
        self.given = np.asarray(jax.random.key_data(key)) if key.ndim else None
        self.block: tuple[int, np.ndarray | None] = (0, None)  # the last one and its first number

    def data(self, sequence: int) -> np.ndarray:
        """Returns the data of a sequence's key."""
        if self.given is not None:
            return self.given[sequence]
        first, keys = self.block  # read at once, as other threads may replace it
        if keys is None or not 0 <= sequence - first < KEYS_AT_ONCE:
            first = sequence - sequence % KEYS_AT_ONCE
            high, low = divmod(first % 2**64, 2**32)
            key = jax.random.fold_in(self.key, np.uint32(high)) if high else self.key
            keys = np.asarray(_keys_from(key, np.uint32(low)))
            self.block = first, keys
        return keys[sequence - first]

    def at(self, sequences: Sequence[int]) -> jax.Array:
        """Returns the typed keys of these sequences."""
        return self.wrap(np.stack([self.data(int(sequence)) for sequence in sequences]))

    def wrap(self, data: np.ndarray) -> jax.Array:
        """Returns typed keys with this data."""
        return jax.random.wrap_key_data(data, impl=self.impl)


@jax.jit
def _keys_from(key: jax.Array, first: jax.Array) -> jax.Array:
    numbers = first + jnp.arange(KEYS_AT_ONCE, dtype=jnp.uint32)
    return jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers))


@dataclasses.dataclass(frozen=True)
class Requests:
    """Checked requests; sequence i continues prompt i // num_sequences.

    Attributes:
        prompts: token ids, one array per prompt.
        max_new_tokens: int32 [prompts].
        settings: one row per prompt, as host arrays.
        num_sequences: sequences per prompt.
        common: what all sequences share, as host arrays.
        keys: the random keys of the sequences.
        max_len: static width that holds every prompt and its continuation.
        texts: turns tokens into text; None: there is no tokenizer.
    """

    prompts: list[np.ndarray]
    max_new_tokens: np.ndarray
    settings: Settings
    num_sequences: int
    common: Common
    keys: SequenceKeys
    max_len: int
    texts: Texts | None = None

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn, or None if all prompts decode greedily."""
        return self.settings.sampling

    @property
    def end_token_ids(self) -> np.ndarray:
        """Tokens that end a sequence, int32 [m]."""
        return self.common.end_token_ids

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def positions(self) -> int:
        """Positions that the longest sample needs; the last token is never fed."""
        lengths = [len(prompt) for prompt in self.prompts]
        return int((lengths + self.max_new_tokens).max()) - 1

    @property
    def total_sequences(self) -> int:
        return self.num_prompts * self.num_sequences


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user asks for beside the prompts: see `generate`."""

    attention_mask: Any = None
    max_new_tokens: Any = 128
    sampling: Any = None
    num_sequences: Any = 1
    eos_token_ids: Any = None
    key: Any = None
    stop: Any = None
    tokenizer: Any = None
    include_stop: Any = False
    top_logprobs: Any = 0


ASKED = tuple(field.name for field in dataclasses.fields(Asked))


def check_requests(
    config: ModelConfig,
    prompts: Any,
    *,
    processors: Sequence[LogitsProcessor] = (),
    **asked: Any,
) -> Requests:
    """Checks everything that a user passed in.

    Args:
        processors: the user's logits processors, which may need an end token, or have values for
            each prompt.
        asked: fields of `Asked`.

    Raises:
        ValueError: see `generate`.
    """
    asked = Asked(**asked)
    ids = read_prompts(config, prompts, asked.attention_mask)
    at_least_1 = lambda name, value: check_at_least(name, value, 1)
    new = per_prompt("max_new_tokens", asked.max_new_tokens, len(ids), at_least_1)
    for i, (prompt, extra) in enumerate(zip(ids, new, strict=True)):
        check_positions(config, i, prompt, extra)
    most = INT32_MAX // len(ids)
    num_sequences = check_at_least("num_sequences", asked.num_sequences, 1, most)
    ends = _end_token_ids(config, asked.eos_token_ids)
    for processor in processors:
        processor.check_requests(ends)
    request_ids = prompt_numbers(processors, len(ids))
    settings = check_sampling(asked.sampling, config.vocab_size, new, ends)
    sampling = settings.sampling
    if num_sequences > 1 and sampling is None:
        raise ValueError(
            f"num_sequences is {num_sequences}, and greedy decoding has one sequence per prompt: "
            "set a temperature above 0, as in sampling=emsjax.Sampling(temperature=0.8)"
        )
    texts, stops, stop_states = check_stops(asked, len(ids), config.vocab_size)
    top = check_at_least("top_logprobs", asked.top_logprobs, 0, config.vocab_size)
    return Requests(
        prompts=ids,
        max_new_tokens=np.array(new, np.int32),
        settings=dataclasses.replace(settings, stop_states=stop_states, request_ids=request_ids),
        num_sequences=num_sequences,
        common=Common(ends, stops, top),
        keys=_sequence_keys(asked.key, len(ids) * num_sequences, needed=sampling is not None),
        max_len=round_up_length(max(len(p) + extra for p, extra in zip(ids, new, strict=True))),
        texts=texts,
    )


def check_sampling(
    sampling: Any, vocab_size: int, max_new_tokens: Sequence[int], end_token_ids: np.ndarray
) -> Settings:
    """The settings of `Sampling` that are in use, one row for each value of `max_new_tokens`.

    Raises:
        ValueError: see `generate`.
    """
    if sampling is not None:
        check_instance("sampling", sampling, Sampling, "emsjax.Sampling(...)")
    sampling = Sampling() if sampling is None else sampling
    each = sampling.expand(len(max_new_tokens), vocab_size)
    for i, (least, most) in enumerate(zip(each.min_new_tokens, max_new_tokens, strict=True)):
        if least > most:
            raise ValueError(
                f"sampling.min_new_tokens is {least} for prompts[{i}], more than its "
                f"max_new_tokens {most}"
            )
        refused = set(each.suppress_tokens[i]) | (set(end_token_ids.tolist()) if least else set())
        if len(refused) == vocab_size:
            raise ValueError(
                f"sampling.suppress_tokens of prompts[{i}] leaves no token of the model's "
                f"{vocab_size} to choose"
            )
    return Settings(each.in_use(), each.controls(vocab_size))


def read_prompts(config: ModelConfig, prompts: Any, attention_mask: Any = None) -> list[np.ndarray]:
    """The prompts' token ids, int32 [n] each.

    Args:
        prompts: a sequence of token-id sequences, or what a tokenizer returns: a mapping with
            `input_ids` and, if it holds one, the `attention_mask`.
        attention_mask: as in `generate`.

    Raises:
        ValueError: see `generate`.
    """
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise ValueError(f"prompts is a {kind} without input_ids: {NOT_TEXT}")
        if attention_mask is None:
            attention_mask = prompts.get("attention_mask")
        prompts = prompts["input_ids"]
    check_list("prompts", prompts, "sequence of token-id sequences")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: at least one prompt is needed")
    masks = [None] * len(prompts)
    if attention_mask is not None:
        masks = check_list("attention_mask", attention_mask, "sequence like the prompts")
        if len(masks) != len(prompts):
            raise ValueError(
                f"attention_mask must have the shape of the prompts: got {len(masks)} for "
                f"{len(prompts)} prompts"
            )
    each = enumerate(zip(prompts, masks, strict=True))
    return [read_prompt(config, place, prompt, mask) for place, (prompt, mask) in each]


def read_prompt(config: ModelConfig, place: int, prompt: Any, mask: Any = None) -> np.ndarray:
    """The token ids of prompts[place], int32 [n], without those that the mask leaves out.

    Raises:
        ValueError: see `generate`.
    """
    name = f"prompts[{place}]"
    if mask is None:
        ids = as_token_ids(name, prompt, config.vocab_size)
        _check_not_padded(config, name, ids)
        return ids
    ids = as_token_ids(name, prompt)
    # The padding token may lie outside of the model's vocabulary.
    real = _real(f"attention_mask[{place}]", mask, len(ids))
    return as_token_ids(name, ids[real], config.vocab_size)


def _real(name: str, mask: Any, length: int) -> slice:
    """The tokens that a mask of zeros and ones keeps, which are contiguous."""
    try:
        mask = np.asarray(mask)
        kept = mask.astype(bool)
        known = is_kind(mask.dtype, np.bool_) or is_kind(mask.dtype, np.integer)
        known = known and mask.shape == (length,) and bool((kept == mask).all())
    except Exception:  # an object's __array__ may raise anything
        known = False
    if not known:
        raise ValueError(f"{name} must be {length} zeros and ones, one for each token")
    (places,) = kept.nonzero()
    if not len(places):
        raise ValueError(f"{name} leaves out all tokens: at least one is needed")
    first, end = int(places[0]), int(places[-1]) + 1
    if end - first != len(places):
        raise ValueError(f"{name} has a hole: zeros may only come before or after all ones")
    return slice(first, end)


def _check_not_padded(config: ModelConfig, name: str, ids: np.ndarray) -> None:
    """Raises ValueError if a prompt begins or ends with a token that is for padding alone."""
    pad = config.pad_token_id
    if pad is None or pad in (*config.eos_token_ids, getattr(config, "bos_token_id", None)):
        return
    for end, token in (("begins", ids[0]), ("ends", ids[-1])):
        if token == pad:
            raise ValueError(
                f"{name} {end} with the padding token {pad}, which would be read as text: pass "
                "ragged prompts, as in tokenizer(texts).input_ids, or the attention_mask too"
            )


def check_positions(config: ModelConfig, place: int, prompt: np.ndarray, extra: int) -> None:
    """Raises ValueError unless prompts[place] and `extra` new tokens fit the model's positions."""
    limit, needed = config.max_position_embeddings, len(prompt) + extra - 1
    if needed > limit:
        raise ValueError(
            f"prompts[{place}] has {len(prompt)} tokens and max_new_tokens is {extra}: "
            f"{needed} positions are needed, but the model's limit max_position_embeddings is "
            f"{limit}"
        )


def _end_token_ids(config: ModelConfig, eos_token_ids: Any) -> np.ndarray:
    name = "eos_token_ids"
    if eos_token_ids is None:
        name, eos_token_ids = "model.config.eos_token_ids", config.eos_token_ids
    return as_end_token_ids(name, eos_token_ids, config.vocab_size)


def _sequence_keys(key: jax.Array | None, count: int, *, needed: bool) -> SequenceKeys:
    if key is None:
        if needed:
            raise ValueError("key is needed when a temperature is above 0: pass jax.random.key(n)")
        key = jax.random.key(0, impl=KEY_IMPL)
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(
            "key must be a typed key from jax.random.key(seed), not a legacy uint32 key "
            f"or {type(key).__name__}"
        )
    if str(jax.random.key_impl(key)) != KEY_IMPL:
        # Random bits of other implementations depend on the sample's index in the batch.
        raise ValueError(
            f"key must be of jax.random.key(seed, impl={KEY_IMPL!r}), not of "
            f"{jax.random.key_impl(key)}"
        )
    if key.shape not in ((), (count,)):
        raise ValueError(
            f"key must be one key or one per sequence: got shape {key.shape} for {count} sequences"
        )
    return SequenceKeys(key)
