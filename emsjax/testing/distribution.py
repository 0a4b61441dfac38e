"""A check of the distribution of sampled tokens, for drafters that draw their tokens."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64
from scipy import optimize, stats

from emsjax.checks import (
    INT32_MAX,
    as_token_ids,
    check_at_least,
    check_instance,
    check_number,
)
from emsjax.configured import configured
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.engine.adapt import make_run
from emsjax.engine.memory import check_results_fit
from emsjax.engine.output import GenerateOutput, Stats
from emsjax.engine.requests import Requests, check_requests
from emsjax.generation import generate
from emsjax.sampling import LogitsProcessor, Sampling, warp
from emsjax.testing.divergence import check_exact, float32_logits, processed_logits
from emsjax.verification import SUM_TOLERANCE

EXPLAINED = 4  # tokens that a failure explains
LEVEL = 1e-6  # fraction of correct drafters that fail
POWER = 0.99  # fraction of wrong drafters that fail, if they are off by `detects`
LEAST_EXPECTED = 8  # expected count of a token that is compared by itself


@configured
def assert_same_distribution(
    model: Model,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    key: jax.Array,
    samples: int | None = None,
    detects: float = 0.05,
    new_tokens: int = 2,
    batch_size: int = 256,
    draft_length: DraftLength | None = None,
    attention_implementation: str | Callable | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> GenerateOutput:
    """Sample a prompt many times, and fail unless the tokens follow the target's distribution.

    This is for drafters that draw their tokens: if their `Draft.probs` are wrong, or drafts are cut
    because of the tokens that they lose, so is the distribution of the output, which a comparison
    of tokens cannot show. At each position the
    counts of tokens are compared with the target's float32 probabilities, summed over the sampled
    prefixes, by a chi-square test.

    One correct drafter in a million fails. Of drafters with which the first new token has a
    distribution at a total variation distance of `detects` from the target's (half the sum of the
    absolute differences; rare tokens count as one), 99 in 100 fail. Later positions have more
    prefixes, and the test is less sensitive there. A wrong drafter may change the output by less
    after this prompt, so check several.

    Args:
        model: the target, in float32; a small one is faster and suffices to check a drafter.
        drafter: your drafter.
        prompt: token ids; choose a prompt after which several tokens are likely and are drafted.
        sampling: settings with a temperature above 0.
        key: random key of the samples.
        samples: number of sequences; None: as many as `detects` needs.
        detects: the distance to be detected if `samples` is None; half of it needs at least four
            times as many samples.
        new_tokens: positions that are compared; one more token is sampled, so that all of them
            can be drafted.
        batch_size: sequences decoded at a time.
        draft_length: a policy, or None.
        attention_implementation: your attention, or None.
        processors: your logits processors.

    Returns:
        The samples; their `stats` have the acceptance of the drafts.

    Raises:
        AssertionError: the distribution differs, and the message has the tokens that differ most;
            or `Draft.probs` are not distributions.
        ValueError: no draft token was verified or none was accepted, so nothing can be said about
            the drafter; `emsjax.generate` rejects the arguments; the model is not in float32; the
            temperature is 0; or there are too few samples to count any token.
    """
    run = make_run(model, drafter, draft_length, processors=processors)
    check_exact(model)
    new_tokens = check_at_least("new_tokens", new_tokens, 1, model.config.max_position_embeddings)
    check_instance("sampling", sampling, Sampling, "emsjax.Sampling(...)")
    if sampling.expand(1).in_use() is None:
        raise ValueError("sampling must have a temperature above 0: see assert_lossless for greedy")
    prompt = as_token_ids("prompt", prompt, model.config.vocab_size)
    mask = [np.ones_like(prompt)]
    asked = {"sampling": sampling, "key": key, "max_new_tokens": new_tokens + 1}
    given = {"attention_mask": mask, "processors": run.processors}
    requests = check_requests(model.config, [prompt], **given, **asked)
    if samples is None:
        (probs,) = _target_probs(run, requests, prompt[None])
        samples = samples_to_detect(detects, probs, LEVEL / new_tokens)
    samples = check_at_least("samples", samples, 1, INT32_MAX)
    check_results_fit("samples", samples, samples, round_up_length(len(prompt) + new_tokens + 1))
    out = generate(
        model,
        [prompt],
        drafter,
        draft_length,
        num_sequences=samples,
        batch_size=batch_size,
        attention_implementation=attention_implementation,
        attention_mask=mask,
        processors=processors,
        **asked,
    )
    if drafter is not None:
        _check_drafts(out.stats)
    for position in range(new_tokens):
        drawn = out.tokens[out.lengths > position, : position + 1]
        if not len(drawn):
            break
        texts = np.concatenate([np.tile(prompt, (len(drawn), 1)), drawn], axis=1)
        prefixes, counts = np.unique(texts[:, :-1], axis=0, return_counts=True)
        expected = counts @ _target_probs(run, requests, prefixes)
        if len(drawn) == samples and expected.max() < LEAST_EXPECTED:
            raise ValueError(
                f"samples must be at least {int(samples * LEAST_EXPECTED / expected.max()) + 1}, "
                f"not {samples}: at position {position} of the new tokens no token is expected "
                f"{LEAST_EXPECTED} times"
            )
        observed = np.bincount(drawn[:, -1], minlength=len(expected))
        _check_counts(observed, expected, position, LEVEL / new_tokens)
    return out


def samples_to_detect(
    distance: float, probs: Float64[np.ndarray, "v"], level: float = LEVEL
) -> int:
    """Samples with which the chi-square test detects a total variation distance from `probs`.

    A distribution at distance d has a chi-square divergence of at least 4 d^2 (the inequality of
    Cauchy and Schwarz), and the statistic of n samples a noncentrality of n times as much.

    Args:
        distance: the distance to be detected in `POWER` of all cases.
        probs: the right distribution.
        level: fraction of right distributions that fail.

    Raises:
        ValueError: `distance` does not lie between 0 and 1.
    """
    distance = check_number("detects", distance, "between 0 and 1", lambda x: 0 < x < 1)
    samples = 0
    while True:  # more samples count more tokens by themselves, which needs more samples
        freedom = max(1, int((samples * probs >= LEAST_EXPECTED).sum()))
        bound = stats.chi2.isf(level, freedom)
        missed = lambda noncentrality: (
            stats.ncx2.cdf(bound, freedom, noncentrality) - (1 - POWER)  # noqa: B023
        )
        needed = int(np.ceil(optimize.brentq(missed, 1e-3, 1e9) / (4 * distance**2)))
        if needed <= samples:
            return samples
        samples = needed


def _target_probs(run: Run, requests: Requests, prefixes: np.ndarray) -> Float64[np.ndarray, "n v"]:
    """Distributions [n, v] of the target after prefixes [n, t] of equal length of one prompt."""
    each = jax.tree.map(functools.partial(np.repeat, repeats=len(prefixes)), requests.sampling)
    logits = float32_logits(run.model, list(prefixes))
    logits = processed_logits(run, requests, logits, prefixes, np.zeros(len(prefixes), int))
    return np.asarray(jax.nn.softmax(warp(jnp.asarray(logits), each)), np.float64)


def _check_drafts(of: Stats) -> None:
    """Raises an error if the drafts were no distributions, or too few to judge the drafter."""
    invalid, drafted = int(of.num_invalid.sum()), int(of.num_drafted.sum())
    if invalid:
        raise AssertionError(
            f"{invalid} of {invalid + drafted} draft tokens were dropped, as their Draft.probs are "
            "not distributions: each must be finite and at least 0, and sum to 1 within "
            f"{SUM_TOLERANCE:g}"
        )
    if not drafted or not of.num_accepted.sum():
        what = f"none of {drafted} draft tokens was accepted" if drafted else "nothing was drafted"
        raise ValueError(
            f"{what}, so the drafter cannot be judged: choose a prompt after which it drafts "
            "tokens that the target may sample"
        )


def _check_counts(observed: np.ndarray, expected: np.ndarray, position: int, level: float) -> None:
    """Raises an AssertionError unless the counts of tokens [v] agree with the expected ones."""
    often = expected >= LEAST_EXPECTED
    seen, hoped = (np.append(x[often], x[~often].sum()) for x in (observed, expected))
    if hoped[-1] < LEAST_EXPECTED and len(hoped) > 2:  # too few even together
        rarest = hoped[:-1].argmin()
        seen, hoped = (
            np.append(np.delete(x[:-1], rarest), x[rarest] + x[-1]) for x in (seen, hoped)
        )
    # The sum over prefixes has at most the variance of a single distribution.
    if hoped[-1] < LEAST_EXPECTED:  # one likely token and a rare rest: an exact test
        chance = stats.binom.sf(seen[-1] - 1, seen.sum(), hoped[-1] / hoped.sum())
    else:
        statistic = ((seen - hoped) ** 2 / hoped).sum()
        chance = stats.chi2.sf(statistic, max(len(hoped) - 1, 1))
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
                "draft tokens. Draft.counts may depend on the tokens that are kept, not on others.",
            ]
        )
    )
