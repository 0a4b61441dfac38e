"""The requests of a `generate` call, checked as a whole before any work starts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from emsjax.checks import as_token_ids, check_at_least, per_prompt
from emsjax.decode.base import ModelConfig
from emsjax.decode.row_counts import round_up_length
from emsjax.sampling import Sampling

KEY_IMPL = "threefry2x32"  # implementation of random keys


@dataclasses.dataclass(frozen=True)
class Requests:
    """Checked requests; sequence i continues prompt i // num_sequences.

    Attributes:
        prompts: token ids, one array per prompt.
        max_new_tokens: int32 [prompts].
        sampling: one value per prompt as host arrays, or None if all prompts decode greedily.
        num_sequences: sequences per prompt.
        end_token_ids: int32 [m].
        keys: typed keys [sequences].
        max_len: static width that holds every prompt and its continuation.
    """

    prompts: list[np.ndarray]
    max_new_tokens: np.ndarray
    sampling: Sampling | None
    num_sequences: int
    end_token_ids: np.ndarray
    keys: jax.Array
    max_len: int

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


def check_requests(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    eos_token_ids: Sequence[int] | int | None = None,
    key: jax.Array | None = None,
) -> Requests:
    """Checks everything that a user passed in.

    Raises:
        ValueError: see `generate`.
    """
    if jax.config.jax_enable_x64:
        raise ValueError(
            "jax_enable_x64 is set, and decoding counts in 32 bits: call it within "
            "jax.enable_x64(False)"
        )
    kind = type(prompts).__name__
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be a sequence of token-id sequences, not {kind}")
    if isinstance(prompts, Mapping):
        raise ValueError(f"prompts is a {kind}: pass token ids, such as tokenizer(texts).input_ids")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: at least one prompt is needed")
    ids = [as_token_ids(f"prompts[{i}]", p, config.vocab_size) for i, p in enumerate(prompts)]
    new = per_prompt("max_new_tokens", max_new_tokens, len(ids))
    new = [check_at_least("max_new_tokens", value, 1) for value in new]
    for i, (prompt, extra) in enumerate(zip(ids, new, strict=True)):
        check_positions(config, i, prompt, extra)
    num_sequences = check_at_least("num_sequences", num_sequences, 1)
    if not isinstance(sampling, Sampling | None):
        raise ValueError(f"sampling must be emsjax.Sampling(...), not {type(sampling).__name__}")
    sampling = (Sampling() if sampling is None else sampling).expand(len(ids)).in_use()
    return Requests(
        prompts=ids,
        max_new_tokens=np.array(new, np.int32),
        sampling=sampling,
        num_sequences=num_sequences,
        end_token_ids=_end_token_ids(config, eos_token_ids),
        keys=_sequence_keys(key, len(ids) * num_sequences, needed=sampling is not None),
        max_len=round_up_length(max(len(p) + extra for p, extra in zip(ids, new, strict=True))),
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
    ids = config.eos_token_ids if eos_token_ids is None else eos_token_ids
    ids = [ids] if np.ndim(ids) == 0 else list(ids)
    if not ids:
        return np.zeros(0, np.int32)
    return as_token_ids("eos_token_ids", ids, config.vocab_size)


def _sequence_keys(key: jax.Array | None, count: int, *, needed: bool) -> jax.Array:
    """One typed key per sequence."""
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
    if key.ndim == 0:
        numbers = np.arange(count, dtype=np.uint32)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    if key.shape != (count,):
        raise ValueError(
            f"key must be one key or one per sequence: got shape {key.shape} for {count} sequences"
        )
    return key


def keys_at(keys: jax.Array, rows: int | np.ndarray) -> jax.Array:
    """Selects typed keys on the host, as a device would compile a program for each shape."""
    data = np.asarray(jax.random.key_data(keys))[rows]
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
