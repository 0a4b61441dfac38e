"""What becomes of each packed row's drafted token: random draws around `verification`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.decode.pack import PackedRows
from emsjax.drafters import Draft
from emsjax.sampling import Purpose, Sampling, draw, position_keys, warp
from emsjax.verification import acceptance_probability, residual_distribution
from pallas_kernels.common.indexing import take, take_in_rows


class Verdict(NamedTuple):
    """What the target says after every row's token."""

    accepted: Bool[Array, "..."]  # whether the token drafted there stands, if those before it do
    tokens: Int32[Array, "..."]  # what is emitted there if those before it stand
    logprobs: Float[Array, "..."]  # of that token; the target's own


class RandomBits(NamedTuple):
    """Random bits for the places of a step's drafts, and for the one behind each."""

    keys: Key[Array, "b k1"]  # of the token that the target draws
    # A drafted token stands if this is below its probability of acceptance; None: if it is the one
    # that the target draws.
    uniforms: Float[Array, "b k1"] | None


def random_bits(
    keys: Key[Array, "b"], lengths: Int32[Array, "b"], draft: Draft, sampling: Sampling | None
) -> RandomBits | None:
    """What belongs to (key, position, purpose) alone, whatever else is in the batch.

    Args:
        lengths: tokens before each sample's draft.
        sampling: None: greedy, which needs none.
    """
    if sampling is None:
        return None
    index = jnp.arange(draft.tokens.shape[1] + 1)
    positions = lengths[:, None] + index  # [b, k1]

    def keys_for(purpose):
        of_column = lambda at, purpose: position_keys(keys, at, purpose)
        purposes = jnp.broadcast_to(jnp.asarray(purpose), positions.shape)
        return jax.vmap(of_column, in_axes=1, out_axes=1)(positions, purposes)

    if draft.probs is None:
        return RandomBits(keys_for(Purpose.TARGET), None)
    purposes = jnp.where(index < draft.counts[:, None], Purpose.RESIDUAL, Purpose.TARGET)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))
    return RandomBits(keys_for(purposes), uniform(keys_for(Purpose.ACCEPTANCE)))


def judge(
    logits: Float[Array, "r v"],
    rows: PackedRows,
    draft: Draft,
    bits: RandomBits | None,
    sampling: Sampling | None,
) -> Verdict:
    """The verdict on each row [r], from the target's logits there.

    Every token is the likeliest, or drawn from the row's `bits`.
    """
    # Where none was drafted the drafter may have left any number.
    drafted = jnp.clip(rows.gather(_with_one_more(draft.tokens)), 0, logits.shape[1] - 1)
    # From logits, as rounding in the log-softmax could merge two candidates.
    if sampling is None:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = tokens == drafted
    else:
        sampling = jax.tree.map(lambda x: take(x, rows.samples), sampling)
        logits = warp(logits, sampling)
        if draft.probs is None:
            tokens = draw(logits, sampling.temperature, rows.gather(bits.keys))
            accepted = tokens == drafted
        else:
            accepted, tokens = _reject(logits, rows, draft, drafted, bits, sampling)
    log_probs = jax.nn.log_softmax(logits)
    return Verdict(accepted, tokens, take_in_rows(log_probs, tokens[:, None])[:, 0])


def _reject(logits, rows, draft: Draft, drafted, bits: RandomBits, sampling):
    """Rejection sampling: whether each row's drafted token stands, and what is emitted there.

    Rows behind the last drafted token draw from the target's distribution itself.
    """
    has_draft = jnp.arange(draft.tokens.shape[1]) < draft.counts[:, None]  # [b, k]
    q = jnp.where(has_draft[..., None], draft.probs, 0)
    missing = logits.shape[1] - q.shape[2]
    q = rows.gather(jnp.pad(q, ((0, 0), (0, 1), (0, missing))))  # [r, v]
    has_draft = rows.gather(_with_one_more(has_draft))
    p = jax.nn.softmax(logits)
    of_drafted = take_in_rows(acceptance_probability(p, q), drafted[:, None])[:, 0]
    accepted = has_draft & (rows.gather(bits.uniforms) < of_drafted)

    instead = jnp.where(has_draft[:, None], jnp.log(residual_distribution(p, q)), logits)
    drawn = draw(instead, sampling.temperature, rows.gather(bits.keys))
    greedy = sampling.temperature <= 0
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.where(greedy, likeliest, jnp.where(accepted, drafted, drawn))
    return jnp.where(greedy, likeliest == drafted, accepted), tokens


def _with_one_more(blocks: Array) -> Array:
    """Values of a draft's tokens [b, k] with an arbitrary one for the place behind. [b, k1]"""
    return jnp.pad(blocks, ((0, 0), (0, 1)))
