"""Checks of your own drafters, draft-length policies and attention."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.configured import configured
from emsjax.decode.base import Draft, Drafter, DraftLength, Model
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.preparation import check, for_prompts
from emsjax.engine.requests import ASKED
from emsjax.generation import generate, init_state
from emsjax.returned import checked_proposal
from emsjax.sampling import Sampling
from emsjax.testing.divergence import (
    NEAR_TIE,
    Divergence,
    check_exact,
    first_divergences,
    processed_logits,
)
from emsjax.values import comparable
from pallas_kernels.common.numerics import is_invariant

EXPLAINED = 4  # sequences or tokens that a failure explains
UNDEFINED = (
    "The other run's logits are not finite there: it divides by zero, or reads undefined values, "
    "such as the cache beyond cache_lengths."
)


@comparable
class Lossless:
    """Result of a check that passed.

    Attributes:
        output: output of the drafter's run; `output.stats` has its acceptance.
        near_ties: differences from plain decoding that 16-bit rounding explains; none in float32
            and with invariant numerics.
    """

    output: GenerateOutput
    near_ties: tuple[Divergence, ...]


@configured
def assert_lossless(
    model: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    attention_implementation: str | Callable | None = None,
    *,
    draft_length: DraftLength | None = None,
    max_new_tokens: int = 64,
    num_sequences: int = 1,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    numerics: str | None = None,
    **options: Any,
) -> Lossless:
    """Decode plainly and with the drafter, and fail unless the tokens are the same.

    Plain decoding uses the library's own attention. In float32, and with invariant numerics, all
    tokens must be equal; in 16-bit types greedy sequences may otherwise differ from a near-tie on:
    see `Divergence.is_near_tie`.

    If no draft token is accepted, `output.stats.num_accepted` is 0, and the check says little.
    Tokens do not show the precision of attention: compare single calls with
    `pallas_kernels.reference.ragged_attention` as well.

    Args:
        model: the target.
        drafter: your drafter, or None to check only attention.
        prompts: ragged token ids; for these and the other arguments see `emsjax.generate`.
        attention_implementation: your attention, or None.
        sampling: with a temperature above 0, the model must be in float32 or numerics invariant,
            and the drafter must not draw its tokens, because then only the distribution is
            preserved.
        numerics: as for `emsjax.generate`.
        options: other arguments of `emsjax.generate`.

    Raises:
        AssertionError: tokens differ; the message has the positions and float32 margins.
        ValueError: `emsjax.generate` rejects the arguments, or samples cannot be compared.
    """
    if options.get("time_budget_s") is not None:
        raise ValueError("time_budget_s cannot be used: no two runs stop at the same token")
    options |= {
        "max_new_tokens": max_new_tokens,
        "num_sequences": num_sequences,
        "sampling": sampling,
        "key": key,
    }
    asked = {name: options[name] for name in ASKED if name in options}
    processors = options.get("processors", ())
    run = make_run(model, drafter, draft_length, processors=processors)
    run, requests = check(run, prompts, **asked)
    greedy, prompts = requests.sampling is None, requests.prompts
    options["attention_mask"] = [np.ones_like(prompt) for prompt in prompts]
    options["eos_token_ids"] = requests.end_token_ids.tolist()  # an iterator is read once
    if not greedy:
        check_comparable(run, prompts)
    expected = generate(model, prompts, **options)
    actual = generate(
        model,
        prompts,
        drafter,
        draft_length=draft_length,
        attention_implementation=attention_implementation,
        **options,
    )
    prompts = [prompt for prompt in prompts for _ in range(requests.num_sequences)]
    change = functools.partial(processed_logits, run, requests)
    found = first_divergences(model, prompts, expected, actual, change)
    exact = model.dtype == jnp.float32 or is_invariant()
    faults = [one for one in found if exact or not one.is_near_tie]
    if faults:
        lengths = [len(prompts[one.sequence]) for one in faults]
        told = [_explain(one, n, greedy, exact) for one, n in zip(faults, lengths, strict=True)]
        for i, one in enumerate(faults):
            if one.position == actual.lengths[one.sequence]:
                reason = actual.finish_reasons[one.sequence]
                told[i] = f"{_place(one, lengths[i])} instead of {one.expected} the run ends"
                told[i] += f"\n    {UNDEFINED}" if reason == "error" else f' ("{reason}")'
        more = ["..."] if len(told) > EXPLAINED else []
        count = f"{len(faults)} of {len(prompts)} sequences are not those of plain decoding:"
        raise AssertionError("\n".join([count, *told[:EXPLAINED], *more]))
    return Lossless(actual, tuple(found))


def check_comparable(run: Run, prompts) -> None:
    """Raises a ValueError unless sampled tokens must be equal; one prompt is enough to check."""
    if not is_invariant():
        check_exact(run.model)
    if run.drafter is None:
        return
    drafter = for_prompts(run, np.zeros(1, np.int64), len(prompts)).drafter
    sampled = {"sampling": Sampling(temperature=1.0), "key": jax.random.key(0)}
    one = {"prompts": prompts[:1], "attention_mask": [np.ones_like(prompts[0])]}
    state = init_state(run.model, drafter, **one, max_new_tokens=1, **sampled)
    if _draws(drafter, state, run.model.config.vocab_size):
        raise ValueError(
            "the drafter draws its tokens (Draft.probs), so sampled output has plain decoding's "
            "distribution and not its tokens: compare greedily, or with assert_same_distribution"
        )


def _draws(drafter: Drafter, state: DecodeState, vocab_size: int) -> bool:
    """Whether the drafter returns probabilities; found by tracing, without any computation."""
    found = []

    def propose(state: DecodeState):
        lengths = jnp.full_like(state.lengths, drafter.max_draft_tokens)
        arguments = (state.tokens, state.lengths, lengths, state.keys, state.sampling)
        rules = {"kind": Draft, "vocab_size": vocab_size}
        draft, *_ = checked_proposal(drafter, state, *arguments, **rules)
        found.append(draft.probs is not None)

    jax.eval_shape(propose, state)
    return found[0]


def _explain(of: Divergence, prompt_tokens: int, greedy: bool, exact: bool) -> str:
    """The position, the two tokens, and the run that float32 agrees with."""
    where = f"{_place(of, prompt_tokens)} {of.token} instead of {of.expected}"
    if not greedy:
        return f"{where}, drawn under the same key"
    allowed = f"Up to {NEAR_TIE:.2%} is a near-tie, which 16-bit rounding may decide."
    if exact:
        where_exact = "With invariant numerics" if is_invariant() else "In float32"
        allowed = f"{where_exact} no difference is allowed: this is a defect and not rounding."
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


def _place(of: Divergence, prompt_tokens: int) -> str:
    return (
        f"  sequence {of.sequence}, position {of.position} of the new tokens "
        f"({prompt_tokens + of.position} with the prompt's):"
    )
