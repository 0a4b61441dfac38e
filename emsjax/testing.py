"""A check for drafters, draft-length policies and attention of your own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from emsjax.checks import check_at_least
from emsjax.decoding import DecodeState
from emsjax.divergence import NEAR_TIE, Divergence, first_divergences
from emsjax.draft_length import DraftLength
from emsjax.drafting import Drafter
from emsjax.drafting.drafter import proposed
from emsjax.generation import generate, init_state
from emsjax.opt import OPT
from emsjax.output import GenerateOutput
from emsjax.preparation import check
from emsjax.sampling import Sampling

EXPLAINED = 4  # sequences of a failure
ASKED = ("max_new_tokens", "num_sequences", "sampling", "key", "eos_token_ids")  # of prompts


@dataclasses.dataclass(frozen=True)
class Lossless:
    """What a check that passed has found.

    Attributes:
        output: of the drafter's run; `output.stats` tells whether its drafts are any good.
        near_ties: where the run left plain decoding, as 16-bit rounding may; none in float32.
    """

    output: GenerateOutput
    near_ties: tuple[Divergence, ...]


def assert_lossless(
    model: OPT,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    attention_implementation: str | Callable | None = None,
    *,
    draft_length: DraftLength | None = None,
    max_new_tokens: int = 64,
    num_sequences: int = 1,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    **options: Any,
) -> Lossless:
    """Decode plainly and with the drafter, and fail unless the tokens are the same.

    Plain decoding uses the library's own attention. In float32 every token must be equal; in
    16-bit types greedy sequences may part at a near-tie: see `Divergence.is_near_tie`.

    Args:
        model: the target.
        drafter: yours, or None where attention alone is to be checked.
        prompts: token ids, ragged; as for all that follows, see `emsjax.generate`.
        attention_implementation: yours, or None.
        sampling: above temperature 0 the model must be in float32, and the drafter one that does
            not draw its tokens: one that does keeps the distribution, not the tokens.
        options: more of `emsjax.generate`.

    Where no draft token stood, `output.stats.num_accepted` is 0, and the check says little.

    Raises:
        AssertionError: tokens differ; the message tells where, and by what margins float32
            decides there.
        ValueError: what `emsjax.generate` refuses, or sampling that cannot be compared.
    """
    check_at_least("num_sequences", num_sequences, 1)
    options |= {
        "max_new_tokens": max_new_tokens,
        "num_sequences": num_sequences,
        "sampling": sampling,
        "key": key,
    }
    asked = {name: options[name] for name in ASKED if name in options}
    greedy = check(model, drafter, draft_length, prompts, **asked)[0].sampling is None
    if not greedy:
        _check_comparable(model, drafter, prompts, asked)
    expected = generate(model, prompts, **options)
    actual = generate(
        model,
        prompts,
        drafter,
        draft_length=draft_length,
        attention_implementation=attention_implementation,
        **options,
    )
    prompts = [prompt for prompt in prompts for _ in range(num_sequences)]
    found = first_divergences(model, prompts, expected, actual)
    exact = model.dtype == jnp.float32
    faults = [one for one in found if exact or not one.is_near_tie]
    if faults:
        lengths = [len(prompts[one.sequence]) for one in faults]
        told = [_explain(one, n, greedy, exact) for one, n in zip(faults, lengths, strict=True)]
        more = ["..."] if len(told) > EXPLAINED else []
        count = f"{len(faults)} of {len(prompts)} sequences are not those of plain decoding:"
        raise AssertionError("\n".join([count, *told[:EXPLAINED], *more]))
    return Lossless(actual, tuple(found))


def _check_comparable(model: OPT, drafter: Drafter | None, prompts, asked) -> None:
    """Whether sampled tokens must be equal."""
    if model.dtype != jnp.float32:
        raise ValueError(
            f"sampled tokens can be compared in float32 alone, not {jnp.dtype(model.dtype).name}: "
            "rounding moves the borders between draws"
        )
    if drafter is None:
        return
    state = init_state(model, drafter, prompts, **asked)
    if _draws(drafter, state, model.config.vocab_size):
        raise ValueError(
            "the drafter draws its tokens (Draft.probs), so sampled output has plain decoding's "
            "distribution and not its tokens: compare greedily, or distributions"
        )


def _draws(drafter: Drafter, state: DecodeState, vocab_size: int) -> bool:
    """Whether what it proposes has probabilities; nothing is computed."""
    found = []

    def propose(state: DecodeState):
        lengths = jnp.full_like(state.lengths, drafter.max_draft_tokens)
        arguments = (state.tokens, state.lengths, lengths, state.keys, state.sampling)
        draft, _ = proposed(drafter, state.drafter_state, *arguments, vocab_size=vocab_size)
        found.append(draft.probs is not None)

    jax.eval_shape(propose, state)
    return found[0]


def _explain(of: Divergence, prompt_tokens: int, greedy: bool, exact: bool) -> str:
    """Where, what, and which of both runs float32 agrees with."""
    where = (
        f"  sequence {of.sequence}, position {of.position} of the new tokens "
        f"({prompt_tokens + of.position} with the prompt's): {of.token} instead of {of.expected}"
    )
    if not greedy:
        return f"{where}, drawn under the same key"
    allowed = f"Up to {NEAR_TIE:.2%} is a near-tie, which 16-bit rounding may decide."
    if exact:
        allowed = "In float32 no difference is allowed: this is a defect and not rounding."
    first, second = of.likeliest
    verdicts = {
        of.expected: "float32 agrees with plain decoding: check what the other run's attention "
        "reads.",
        of.token: "float32 agrees with the other run: plain decoding is the one that is wrong.",
    }
    return "\n    ".join(
        [
            where,
            f"The two tokens' float32 logits differ by {of.margin:.4g} "
            f"({of.margin / of.largest:.2%} of the largest). {allowed}",
            f"The likeliest tokens in float32 are {first} and {second}, {of.lead:.4g} apart: "
            + verdicts.get(first, "neither run is right."),
        ]
    )
