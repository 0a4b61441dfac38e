"""Checks of your own drafters, draft-length policies and attention."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.checks import as_token_ids, check_at_least
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.draft import checked_proposal
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.preparation import check, for_prompts
from emsjax.generation import generate, init_state
from emsjax.sampling import Sampling, warp
from emsjax.testing.divergence import NEAR_TIE, Divergence, first_divergences, float32_logits

EXPLAINED = 4  # sequences or tokens that a failure explains
LEVEL = 1e-6  # fraction of correct drafters that fail
LEAST_EXPECTED = 8  # expected count of a token that is compared by itself
UNDEFINED = (
    "The other run's log-probability is NaN there: it divides by zero, or reads undefined values, "
    "such as the cache beyond cache_lengths."
)
ASKED = ("max_new_tokens", "num_sequences", "sampling", "key", "eos_token_ids")  # per prompt


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Result of a check that passed.

    Attributes:
        output: output of the drafter's run; `output.stats` has its acceptance.
        near_ties: differences from plain decoding that 16-bit rounding explains; none in float32.
    """

    output: GenerateOutput
    near_ties: tuple[Divergence, ...]


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
    **options: Any,
) -> Lossless:
    """Decode plainly and with the drafter, and fail unless the tokens are the same.

    Plain decoding uses the library's own attention. In float32 all tokens must be equal; in
    16-bit types greedy sequences may differ from a near-tie on: see `Divergence.is_near_tie`.

    If no draft token is accepted, `output.stats.num_accepted` is 0, and the check says little.
    Tokens do not show the precision of attention: compare single calls with
    `pallas_kernels.reference.ragged_attention` as well.

    Args:
        model: the target.
        drafter: your drafter, or None to check only attention.
        prompts: ragged token ids; for these and the other arguments see `emsjax.generate`.
        attention_implementation: your attention, or None.
        sampling: with a temperature above 0, the model must be in float32 and the drafter must
            not draw its tokens, because then only the distribution is preserved.
        options: other arguments of `emsjax.generate`.

    Raises:
        AssertionError: tokens differ; the message has the positions and float32 margins.
        ValueError: `emsjax.generate` rejects the arguments, or samples cannot be compared.
    """
    check_at_least("num_sequences", num_sequences, 1)
    if options.get("time_budget_s") is not None:
        raise ValueError("time_budget_s cannot be used: no two runs stop at the same token")
    options |= {
        "max_new_tokens": max_new_tokens,
        "num_sequences": num_sequences,
        "sampling": sampling,
        "key": key,
    }
    asked = {name: options[name] for name in ASKED if name in options}
    run, requests = check(make_run(model, drafter, draft_length), prompts, **asked)
    greedy = requests.sampling is None
    if not greedy:
        _check_comparable(run, prompts)
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
        for i, one in enumerate(faults):
            if np.isnan(actual.logprobs[one.sequence, one.position]):
                told[i] += f"\n    {UNDEFINED}"
        more = ["..."] if len(told) > EXPLAINED else []
        count = f"{len(faults)} of {len(prompts)} sequences are not those of plain decoding:"
        raise AssertionError("\n".join([count, *told[:EXPLAINED], *more]))
    return Lossless(actual, tuple(found))


def assert_same_distribution(
    model: Model,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    key: jax.Array,
    samples: int = 2048,
    new_tokens: int = 2,
    batch_size: int = 256,
    draft_length: DraftLength | None = None,
    attention_implementation: str | Callable | None = None,
) -> GenerateOutput:
    """Sample a prompt many times, and fail unless the tokens follow the target's distribution.

    This is for drafters that draw their tokens: if their `Draft.probs` are wrong, so is the
    distribution of the output, which a comparison of tokens cannot show. At each position the
    counts of tokens are compared with the target's float32 probabilities, summed over the sampled
    prefixes. The chi-square test fails one correct drafter in a million.

    Args:
        model: the target, in float32; a small one is faster and suffices to check a drafter.
        drafter: your drafter.
        prompt: token ids; choose a prompt after which several tokens are likely and are drafted.
        sampling: settings with a temperature above 0.
        key: random key of the samples.
        samples: number of sequences; four times as many detect half the difference.
        new_tokens: positions that are compared; one more token is sampled, so that all of them
            can be drafted.
        batch_size: sequences decoded at a time.
        draft_length: a policy, or None.
        attention_implementation: your attention, or None.

    Returns:
        The samples; their `stats` have the acceptance of the drafts.

    Raises:
        AssertionError: the distribution differs; the message has the tokens that differ most.
        ValueError: `emsjax.generate` rejects the arguments, the model is not in float32, the
            temperature is 0, or there are too few samples to count any token.
    """
    _check_exact(model)
    for name, value in (("samples", samples), ("new_tokens", new_tokens)):
        check_at_least(name, value, 1)
    of_prompt = sampling.expand(1).in_use()
    if of_prompt is None:
        raise ValueError("sampling must have a temperature above 0: see assert_lossless for greedy")
    prompt = as_token_ids("prompt", prompt, model.config.vocab_size)
    out = generate(
        model,
        [prompt],
        drafter,
        draft_length,
        max_new_tokens=new_tokens + 1,
        sampling=sampling,
        num_sequences=samples,
        batch_size=batch_size,
        key=key,
        attention_implementation=attention_implementation,
    )
    for position in range(new_tokens):
        drawn = out.tokens[out.lengths > position, : position + 1]
        if not len(drawn):
            break
        texts = np.concatenate([np.tile(prompt, (len(drawn), 1)), drawn], axis=1)
        prefixes, counts = np.unique(texts[:, :-1], axis=0, return_counts=True)
        each = jax.tree.map(functools.partial(np.repeat, repeats=len(prefixes)), of_prompt)
        probs = jax.nn.softmax(warp(jnp.asarray(float32_logits(model, list(prefixes))), each))
        expected = counts @ np.asarray(probs, np.float64)
        if len(drawn) == samples and expected.max() < LEAST_EXPECTED:
            raise ValueError(
                f"samples must be at least {int(samples * LEAST_EXPECTED / expected.max()) + 1}, "
                f"not {samples}: at position {position} of the new tokens no token is expected "
                f"{LEAST_EXPECTED} times"
            )
        observed = np.bincount(drawn[:, -1], minlength=len(expected))
        _check_counts(observed, expected, position, LEVEL / new_tokens)
    return out


def _check_counts(observed: np.ndarray, expected: np.ndarray, position: int, level: float) -> None:
    """Raises an AssertionError unless the counts of tokens [v] agree with the expected ones."""
    often = expected >= LEAST_EXPECTED
    seen, hoped = (np.append(of[often], of[~often].sum()) for of in (observed, expected))
    if hoped[-1] < LEAST_EXPECTED and len(hoped) > 2:  # too few even together
        rarest = hoped[:-1].argmin()
        seen, hoped = (
            np.append(np.delete(of[:-1], rarest), of[rarest] + of[-1]) for of in (seen, hoped)
        )
    # The sum over prefixes has at most the variance of a single distribution.
    if hoped[-1] < LEAST_EXPECTED:  # one likely token and a rare rest: an exact test
        chance = chance_of_so_many(seen[-1], seen.sum(), hoped[-1] / hoped.sum())
    else:
        statistic = ((seen - hoped) ** 2 / hoped).sum()
        chance = float(jax.scipy.stats.chi2.sf(statistic, max(len(hoped) - 1, 1)))
    if chance >= level and not observed[expected == 0].any():
        return
    surprise = (observed - expected) ** 2 / np.maximum(expected, 1e-3)
    told = [
        f"  token {token}: {observed[token]} times, expected {expected[token]:.1f}"
        for token in np.argsort(-surprise)[:EXPLAINED]
    ]
    raise AssertionError(
        "\n".join(
            [
                f"position {position} of the new tokens has another distribution than the "
                f"target's; in {observed.sum()} samples:",
                *told,
                f"The probability of such counts is {chance:.2g}. Check Draft.probs: probs[s, i] "
                "must be the distribution that tokens[s, i] was drawn from, given the preceding "
                "draft tokens.",
            ]
        )
    )


def chance_of_so_many(count: int, total: int, probability: float) -> float:
    """Probability of at least `count` successes in `total` independent trials."""
    if count == 0:
        return 1.0
    shape = float(count), float(total - count + 1)
    return float(jax.scipy.special.betainc(*shape, float(probability)))


def _check_exact(model: Model) -> None:
    """Raises a ValueError unless the model is in float32."""
    if model.dtype != jnp.float32:
        raise ValueError(
            f"sampled tokens can be compared in float32 only, not {jnp.dtype(model.dtype).name}: "
            "rounding shifts the boundaries between draws"
        )


def _check_comparable(run: Run, prompts) -> None:
    """Raises a ValueError unless sampled tokens must be equal; one prompt is enough to check."""
    _check_exact(run.model)
    if run.drafter is None:
        return
    drafter = for_prompts(run, np.zeros(1, np.int64), len(prompts)).drafter
    sampled = {"sampling": Sampling(temperature=1.0), "key": jax.random.key(0)}
    state = init_state(run.model, drafter, prompts[:1], max_new_tokens=1, **sampled)
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
        draft, _ = checked_proposal(drafter, state.drafter_state, *arguments, vocab_size=vocab_size)
        found.append(draft.probs is not None)

    jax.eval_shape(propose, state)
    return found[0]


def _explain(of: Divergence, prompt_tokens: int, greedy: bool, exact: bool) -> str:
    """The position, the two tokens, and the run that float32 agrees with."""
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
