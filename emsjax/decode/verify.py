"""Verification: which draft tokens are accepted, and which token follows them.

`emsjax.verification` has the mathematics; this module adds the random draws, for packed rows.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from emsjax.decode.base import Draft
from emsjax.decode.pack import AcceptedPath, PackedRows
from emsjax.decode.run import Run
from emsjax.sampling import RandomBits, Sampling, draw, log_softmax, residual, softmax, warp
from emsjax.sampling.processors import Processing
from emsjax.trees import Tree
from emsjax.verification import accepted_counts, block_counts, first_end, prefix_probabilities
from pallas_kernels.common.indexing import take, take_in_rows


class End(enum.IntEnum):
    """Why a sequence ended before its limit."""

    NONE = 0
    TOKEN = 1  # it emitted an end token
    ERROR = 2  # the target's logits are not finite, so there is no next token
    STOP = 3  # it completed a stop


class Verdict(NamedTuple):
    """The tokens that a step adds to each sample.

    Attributes:
        tokens: sample s emits the first num_emitted[s] of its row; the others are arbitrary.
        logprobs: log-probabilities of the tokens under the target's own sampling distribution.
        top_tokens, top_logprobs: the n likeliest tokens of that distribution.
        num_accepted: draft tokens that were accepted.
        num_emitted: accepted tokens and the target's own, cut after an end token and before
            logits that are not finite; 0 for samples that did not take part.
        end: whether and why each sample ended: see `End`.
        stop_states: the state of each sample in the automaton of stops.
        ranks: for trees, the place on the accepted path of each row; -1: it is rejected.
    """

    tokens: Int32[Array, "b k1"]
    logprobs: Float[Array, "b k1"]
    top_tokens: Int32[Array, "b k1 n"]
    top_logprobs: Float[Array, "b k1 n"]
    num_accepted: Int32[Array, "b"]
    num_emitted: Int32[Array, "b"]
    end: Int32[Array, "b"]
    stop_states: Int32[Array, "b"] | None
    ranks: Int32[Array, "b k1"] | None = None

    def path(self, rows: PackedRows, prompt_counts: Int32[Array, "b"]) -> AcceptedPath:
        """The rows to commit: as many as were emitted, and all rows of prompts."""
        ranks = None  # a chain is accepted up to its first rejected token
        if self.ranks is not None:
            is_prompt = take(prompt_counts, rows.samples) > 0
            ranks = jnp.where(is_prompt, rows.within, rows.gather(self.ranks))
        return AcceptedPath.prefix(rows, self.num_emitted + prompt_counts, ranks)


class RowVerdict(NamedTuple):
    """The target's verdict on every row, independent of the other rows."""

    accepted: Bool[Array, "..."]  # whether the row's draft token is, given all before it
    tokens: Int32[Array, "..."]  # the row's emitted token if all draft tokens before are accepted
    # Of the emitted token; finite exactly if the target's logits make a distribution.
    logprobs: Float[Array, "..."]
    top_tokens: Int32[Array, "..."]
    top_logprobs: Float[Array, "..."]


def verify(
    run: Run,
    state: Any,
    draft: Draft,
    bits: RandomBits | None,
    hidden: Float[Array, "r e"],
    rows: PackedRows,
    process: Processing,
    tree: Tree | None = None,
) -> Verdict:
    """Compare the drafts with the target, by equality or as blocks.

    Args:
        state: the `DecodeState`.
        draft: the step's draft; samples without rows take no part.
        bits: see `random_bits`.
        hidden: the target's final hidden states.
        rows: the packed rows; row i of a sample follows its first i draft tokens, or a tree's path.
        process: the function through which logits pass before anything else.
        tree: the draft's tree, unless it is a chain.
    """
    logits, k, top = run.model.logits(hidden), draft.tokens.shape[1], state.common.top_logprobs
    logits = process.of_rows(logits, draft.tokens, rows, tree)
    verdict = rows.scatter(judge(logits, rows, draft, bits, state.sampling, top), k + 1)
    num_accepted, ranks = accepted_counts(verdict.accepted[:, :k], draft.counts), None
    if tree is not None:
        verdict, num_accepted, ranks = tree.accepted(draft, verdict)
    finite = jnp.isfinite(take_in_rows(verdict.logprobs, num_accepted[:, None])[:, 0])
    num_emitted = jnp.where(rows.counts > 0, num_accepted + finite.astype(jnp.int32), 0)
    num_emitted, ended = first_end(verdict.tokens, num_emitted, state.end_token_ids)
    end = jnp.where(finite | (rows.counts == 0), End.NONE, End.ERROR)
    end = jnp.where(ended, End.TOKEN, end).astype(jnp.int32)
    stop_states, stops = state.stop_states, state.common.stops
    if stops is not None:
        least = state.settings.min_new_tokens - (state.lengths - state.prompt_lengths)
        walked, through = stops.search(stop_states, verdict.tokens, least)
        stopped = (through < num_emitted) | ((through == num_emitted) & ~ended)
        num_emitted = jnp.where(stopped, through, num_emitted)
        num_accepted = jnp.minimum(num_accepted, num_emitted)
        end = jnp.where(stopped, End.STOP, end)
        stop_states = take_in_rows(walked, num_emitted[:, None])[:, 0]
    return Verdict(*verdict[1:], num_accepted, num_emitted, end, stop_states, ranks)


def judge(
    logits: Float[Array, "r v"],
    rows: PackedRows,
    draft: Draft,
    bits: RandomBits | None,
    sampling: Sampling | None,
    top: int = 0,
) -> RowVerdict:
    """Returns the verdict on each row [r], from the target's logits of that row.

    Every token is the most likely one, or is drawn with the row's `bits`.

    Args:
        top: number of likeliest tokens to return.
    """
    # After the last draft token a drafter may leave any number.
    drafted = jnp.clip(rows.gather(jnp.pad(draft.tokens, ((0, 0), (0, 1)))), 0, logits.shape[1] - 1)
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
            accepted, tokens = _verify_blocks(logits, rows, draft, drafted, bits, sampling)
    scores = log_softmax(logits)
    log_probs = take_in_rows(scores, tokens[:, None])[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(scores, top)
    accepted &= jnp.isfinite(log_probs)
    return RowVerdict(accepted, tokens, log_probs, top_tokens, top_logprobs)


def _verify_blocks(logits, rows, draft: Draft, drafted, bits: RandomBits, sampling):
    """Block verification: whether each row's draft token is accepted, and the token to emit.

    Rows after the last draft token draw from the target's distribution itself.
    """
    has_draft = (rows.within < take(draft.counts, rows.samples))[:, None]
    missing = logits.shape[1] - draft.probs.shape[2]
    q = jnp.pad(rows.gather(draft.probs), ((0, 0), (0, missing)))  # [r, v]
    # Greedy tokens are certain.
    greedy, likeliest = sampling.temperature[:, None] <= 0, jnp.argmax(logits, axis=-1)
    certain = lambda tokens: jax.nn.one_hot(tokens, logits.shape[1])
    p = jnp.where(greedy, certain(likeliest), softmax(logits))
    q = jnp.where(has_draft, jnp.where(greedy, certain(drafted), q), 0)

    of_drafts = [take_in_rows(probs, drafted[:, None])[:, 0] for probs in (p, q)]
    prefix_probs = prefix_probabilities(*rows.scatter(of_drafts, draft.tokens.shape[1]))
    left, masses = residual(rows.gather(prefix_probs)[:, None] * p, q)
    masses = rows.scatter(masses, prefix_probs.shape[1])
    num_accepted = block_counts(prefix_probs, masses, bits.uniforms, draft.counts)
    accepted = rows.within < take(num_accepted, rows.samples)
    instead = jnp.where(has_draft, left, logits)
    drawn = draw(instead, sampling.temperature, rows.gather(bits.keys))
    return accepted, jnp.where(accepted, drafted, drawn)
