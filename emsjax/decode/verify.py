"""Verification: which draft tokens are accepted, and which token follows them.

`emsjax.verification` has the mathematics; this module adds the random draws, for packed rows.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.decode.base import Draft
from emsjax.decode.pack import AcceptedPath, PackedRows
from emsjax.decode.run import LogitsContext, Run, process
from emsjax.sampling import Purpose, Sampling, draw, position_keys, warp
from emsjax.verification import (
    acceptance_probability,
    accepted_counts,
    first_end,
    residual_distribution,
)
from pallas_kernels.common.indexing import take, take_in_rows


class End(enum.IntEnum):
    """Why a sequence ended before its limit."""

    NONE = 0
    TOKEN = 1  # it emitted an end token
    ERROR = 2  # the target's logits are not finite, so there is no next token


class Verdict(NamedTuple):
    """The tokens that a step adds to each sample.

    Attributes:
        tokens: sample s emits the first num_emitted[s] of its row; the others are arbitrary.
        logprobs: log-probabilities of the tokens under the target's own sampling distribution.
        num_accepted: draft tokens that were accepted.
        num_emitted: accepted tokens and the target's own, cut after an end token and before
            logits that are not finite; 0 for samples that did not take part.
        end: whether and why each sample ended: see `End`.
    """

    tokens: Int32[Array, "b k1"]
    logprobs: Float[Array, "b k1"]
    num_accepted: Int32[Array, "b"]
    num_emitted: Int32[Array, "b"]
    end: Int32[Array, "b"]

    def path(self, rows: PackedRows, prompt_counts: Int32[Array, "b"]) -> AcceptedPath:
        """The rows to commit: as many as were emitted, and all rows of prompts.

        A chain of draft tokens is accepted up to its first rejected one.
        """
        return AcceptedPath.prefix(rows, self.num_emitted + prompt_counts)


class RowVerdict(NamedTuple):
    """The target's verdict on every row, independent of the other rows."""

    accepted: Bool[Array, "..."]  # whether the row's draft token is, given all before it
    tokens: Int32[Array, "..."]  # the row's emitted token if all draft tokens before are accepted
    # Of the emitted token, under the target's distribution. Finite exactly if that is one: NaN,
    # infinity or no token at all among the logits makes it NaN or infinite.
    logprobs: Float[Array, "..."]


class RandomBits(NamedTuple):
    """Random bits for each position of a step's drafts, and for the position after each draft."""

    keys: Key[Array, "b k1"]  # keys of the tokens that the target draws
    # A draft token is accepted if this is below its probability of acceptance. None: it is
    # accepted if the target draws the same token.
    uniforms: Float[Array, "b k1"] | None


def random_bits(
    keys: Key[Array, "b"], lengths: Int32[Array, "b"], draft: Draft, sampling: Sampling | None
) -> RandomBits | None:
    """Random bits that depend only on (key, position, purpose), not on the rest of the batch.

    Args:
        lengths: tokens before each sample's draft.
        sampling: None: greedy decoding, which needs no random bits.
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


def verify(
    run: Run,
    state: Any,
    draft: Draft,
    bits: RandomBits | None,
    hidden: Float[Array, "r e"],
    rows: PackedRows,
) -> Verdict:
    """Compare the drafts with the target, by equality or by rejection sampling.

    Args:
        state: the `DecodeState`.
        draft: the step's draft; samples without rows take no part.
        bits: see `random_bits`.
        hidden: the target's final hidden states.
        rows: the packed rows; row i of a sample follows the sample's first i draft tokens.
    """
    logits = run.model.logits(hidden)
    if run.processors:
        place = (rows.samples, rows.within)
        context = LogitsContext(state.tokens, state.lengths, draft.tokens, *place)
        logits = process(run.processors, logits, context)
    k = draft.tokens.shape[1]
    verdict = rows.scatter(judge(logits, rows, draft, bits, state.sampling), k + 1)
    num_accepted = accepted_counts(verdict.accepted[:, :k], draft.counts)
    finite = jnp.isfinite(take_in_rows(verdict.logprobs, num_accepted[:, None])[:, 0])
    num_emitted = jnp.where(rows.counts > 0, num_accepted + finite.astype(jnp.int32), 0)
    num_emitted, ended = first_end(verdict.tokens, num_emitted, state.end_token_ids)
    end = jnp.where(finite | (rows.counts == 0), End.NONE, End.ERROR)
    end = jnp.where(ended, End.TOKEN, end).astype(jnp.int32)
    return Verdict(verdict.tokens, verdict.logprobs, num_accepted, num_emitted, end)


def judge(
    logits: Float[Array, "r v"],
    rows: PackedRows,
    draft: Draft,
    bits: RandomBits | None,
    sampling: Sampling | None,
) -> RowVerdict:
    """Returns the verdict on each row [r], from the target's logits of that row.

    Every token is the most likely one, or is drawn with the row's `bits`.
    """
    # After the last draft token a drafter may leave any number.
    drafted = jnp.clip(rows.gather(_with_one_more(draft.tokens)), 0, logits.shape[1] - 1)
    # Tokens are chosen from logits, as rounding in the log-softmax could merge two candidates.
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
    log_probs = take_in_rows(jax.nn.log_softmax(logits), tokens[:, None])[:, 0]
    return RowVerdict(accepted & jnp.isfinite(log_probs), tokens, log_probs)


def _reject(logits, rows, draft: Draft, drafted, bits: RandomBits, sampling):
    """Rejection sampling: whether each row's draft token is accepted, and the token to emit.

    Rows after the last draft token draw from the target's distribution itself.
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
    """Pads values of a draft's tokens [b, k] with an arbitrary one for the place after. [b, k1]"""
    return jnp.pad(blocks, ((0, 0), (0, 1)))
