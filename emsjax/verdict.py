"""What becomes of each packed row's drafted token: random draws around `verification`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.drafting import Draft
from emsjax.packing import PackedRows
from emsjax.sampling import Purpose, Sampling, draw, position_keys, warp
from emsjax.verification import acceptance_probability, residual_distribution
from pallas_kernels.indexing import take, take_in_rows


class Verdict(NamedTuple):
    """What the target says after every row's token; log-probabilities are its own."""

    drafted: Int32[Array, "..."]  # the token that was drafted there; arbitrary if none was
    accepted: Bool[Array, "..."]  # whether it stands, if those before it do
    drafted_logprobs: Float[Array, "..."]
    tokens: Int32[Array, "..."]  # what is emitted in its place, or after the last one
    logprobs: Float[Array, "..."]


def judge(
    logits: Float[Array, "r v"],
    rows: PackedRows,
    draft: Draft,
    keys: Key[Array, "b"],
    sampling: Sampling | None,
) -> Verdict:
    """The verdict on each row [r], from the target's logits there.

    Every token is the likeliest or drawn from bits of (key, position, purpose) alone,
    whatever else is in the batch.
    """
    block = lambda x: jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))
    # Where none was drafted the drafter may have left any number.
    drafted = jnp.clip(rows.gather(block(draft.tokens)), 0, logits.shape[1] - 1)
    # From logits, as rounding in the log-softmax could merge two candidates.
    if sampling is None:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = tokens == drafted
    else:
        sampling = jax.tree.map(lambda x: take(x, rows.samples), sampling)
        logits = warp(logits, sampling)
        keys = take(keys, rows.samples)
        keys_for = lambda purpose: position_keys(keys, rows.positions + 1, purpose)
        if draft.probs is None:
            tokens = draw(logits, sampling.temperature, keys_for(Purpose.TARGET))
            accepted = tokens == drafted
        else:
            accepted, tokens = _reject(logits, rows, draft, drafted, sampling, keys_for)
    log_probs = jax.nn.log_softmax(logits)
    logprob_of = lambda token: take_in_rows(log_probs, token[:, None])[:, 0]
    return Verdict(drafted, accepted, logprob_of(drafted), tokens, logprob_of(tokens))


def _reject(logits, rows, draft: Draft, drafted, sampling, keys_for):
    """Rejection sampling: whether each row's drafted token stands, and what is drawn instead.

    Rows behind the last drafted token draw from the target's distribution itself.
    """
    has_draft = jnp.arange(draft.tokens.shape[1]) < draft.counts[:, None]  # [b, k]
    q = jnp.where(has_draft[..., None], draft.probs, 0)
    missing = logits.shape[1] - q.shape[2]
    q = rows.gather(jnp.pad(q, ((0, 0), (0, 1), (0, missing))))  # [r, v]
    has_draft = rows.gather(jnp.pad(has_draft, ((0, 0), (0, 1))))
    p = jax.nn.softmax(logits)
    of_drafted = lambda x: take_in_rows(x, drafted[:, None])[:, 0]
    uniform = jax.vmap(jax.random.uniform)(keys_for(Purpose.ACCEPTANCE))
    accepted = uniform < of_drafted(acceptance_probability(p, q))

    instead = jnp.where(has_draft[:, None], jnp.log(residual_distribution(p, q)), logits)
    pick = lambda a, b: jax.vmap(jnp.where)(has_draft, a, b)
    keys = pick(keys_for(Purpose.RESIDUAL), keys_for(Purpose.TARGET))
    greedy = sampling.temperature <= 0
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.where(greedy, likeliest, draw(instead, sampling.temperature, keys))
    return jnp.where(greedy, likeliest == drafted, accepted), tokens
