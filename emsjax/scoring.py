"""`score`: log-probabilities of given continuations of prompts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from emsjax.checks import NOT_TEXT, as_token_ids, check_at_least, check_list, is_per_prompt
from emsjax.configured import configured
from emsjax.decode.base import Model, ModelConfig
from emsjax.decode.kernels import OwnAttention
from emsjax.decode.run import Run
from emsjax.engine import forest
from emsjax.engine.adapt import make_run
from emsjax.engine.cached_scores import plan_groups, score_group
from emsjax.engine.forest import MOST_AT_ONCE, Continuation, Scored, Tree, grow, lay_out, plant
from emsjax.engine.memory import forest_fits
from emsjax.engine.preparation import device_of
from emsjax.engine.requests import read_prompts
from emsjax.engine.scores import Scores, score_forest
from emsjax.values import comparable
from pallas_kernels.common.numerics import is_invariant


@comparable
class ScoreOutput:
    """Scores of continuations in prompt-major order: s = continuations, p = prompts.

    Attributes:
        logprobs: for each continuation the log-probabilities of its tokens, float32 [tokens].
        totals: log-probability of each continuation, the sum of its tokens'.
        is_greedy: whether each token of the continuation is the likeliest one, so that greedy
            decoding would emit it.
        num_continuations: number of continuations of each prompt.
    """

    logprobs: list[Float32[np.ndarray, "n"]]
    totals: Float64[np.ndarray, "s"]
    is_greedy: Bool[np.ndarray, "s"]
    num_continuations: Int32[np.ndarray, "p"]


@configured
def score(
    model: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int] | Sequence[Sequence[int]]],
    *,
    batch_size: int | None = None,
    attention_implementation: str | Callable | None = None,
    numerics: str | None = None,
) -> ScoreOutput:
    """Computes log-probabilities of given continuations, unpadded.

    They are those of the model's softmax at temperature 1, which `emsjax.generate` reports for
    greedy decoding. Continuations of a prompt that are scored at the same time share its rows.

    Args:
        model: the model.
        prompts: 1-D integer token-id sequences of any lengths, or what a tokenizer returns, as
            for `emsjax.generate`. The first token of a continuation needs one before it, so no
            prompt is empty.
        continuations: for each prompt one token-id sequence, if its elements are integers, or
            several, if its elements are sequences.
        batch_size: number of continuations scored at a time; None: as many as fit into memory,
            at most 64.
        attention_implementation: as for `emsjax.generate`.
        numerics: as for `emsjax.generate`. With "invariant", continuations do not share the rows of
            a prompt, whose keys would lie at other places than in a cache.

    Returns:
        A `ScoreOutput` in prompt-major order. Continuations whose logits are not finite have
        log-probabilities that are not finite.

    Raises:
        ValueError: an argument is of the wrong kind or out of range; the message names it. There
            is not one entry of continuations for each prompt, a prompt or a continuation is empty
            or holds ids outside the vocabulary, both together need more positions than the model
            has, the batch size is below 1, or the run does not fit into memory. The error comes
            before any work.
    """
    run = make_run(model, None, attention_implementation=attention_implementation)
    ids = read_prompts(model.config, prompts)
    given = read_continuations(model.config, ids, continuations)
    if batch_size is not None:
        batch_size = check_at_least("batch_size", batch_size, 1)
    at_once = batch_size or MOST_AT_ONCE
    most = _most_rows(run)
    trees, long = [], []
    for prompt, own in zip(ids, given, strict=True):
        if len(prompt) + max(len(one.tokens) for one in own) - 1 <= most:
            trees += grow(prompt, own, most, at_once)
        else:
            long.append(own)
    plan = plan_groups(run, ids, long, batch_size) if long else None
    logprobs: list[Any] = [None] * sum(map(len, given))
    is_greedy = np.zeros(len(logprobs), bool)
    groups = plan.groups if plan else ()
    of_long = (one for group in groups for one in score_group(run, ids, group, plan))
    for place, of_tokens, greedy in itertools.chain(_score_trees(run, trees, at_once), of_long):
        logprobs[place], is_greedy[place] = of_tokens.copy(), greedy.all()
    return ScoreOutput(
        logprobs=logprobs,
        totals=np.array([one.sum(dtype=np.float64) for one in logprobs]),
        is_greedy=is_greedy,
        num_continuations=np.array([len(own) for own in given], np.int32),
    )


def read_continuations(
    config: ModelConfig, prompts: Sequence[np.ndarray], continuations: Any
) -> list[list[Continuation]]:
    """Reads the continuations of each prompt.

    Raises:
        ValueError: see `score`.
    """
    check_list("continuations", continuations, f"sequence with one entry per prompt: {NOT_TEXT}")
    if len(continuations) != len(prompts):
        raise ValueError(
            f"continuations must have one entry per prompt: got {len(continuations)} for "
            f"{len(prompts)} prompts"
        )
    places = itertools.count()
    read = []
    for i, (prompt, entry) in enumerate(zip(prompts, continuations, strict=True)):
        named = list(_sequences(f"continuations[{i}]", entry))
        own = [as_token_ids(name, tokens, config.vocab_size) for name, tokens in named]
        for (name, _), tokens in zip(named, own, strict=True):
            limit, needed = config.max_position_embeddings, len(prompt) + len(tokens) - 1
            if needed > limit:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens and {name} has {len(tokens)}: {needed} "
                    "positions are needed, but the model's limit max_position_embeddings is "
                    f"{limit}"
                )
        read.append([Continuation(next(places), i, tokens) for tokens in own])
    return read


def _sequences(name: str, entry: Any) -> Iterator[tuple[str, Any]]:
    """Yields the token-id sequences of one prompt's entry with their names; ids are unchecked."""
    check_list(name, entry, f"sequence of token ids or of such sequences: {NOT_TEXT}")
    nested = [is_per_prompt(one) for one in entry]
    if any(nested) and not all(nested):
        raise ValueError(f"{name} mixes token ids and sequences of token ids")
    if any(nested):
        yield from ((f"{name}[{j}]", tokens) for j, tokens in enumerate(entry))
    else:
        yield name, entry


def _most_rows(run: Run) -> int:
    """Most rows of a tree: as many as fit into memory in one call, or 0.

    Attention that is not this library's own may not know the mask of a tree, and in a tree keys do
    not lie at the places of their sequence.
    """
    if is_invariant():
        return 0
    rows, device = forest.MOST_ROWS, device_of(run.model)
    while rows >= forest.CALL_ROWS and isinstance(run.kernels.attention, OwnAttention):
        if forest_fits(run.model, rows, device):
            return rows
        rows //= 2
    return 0


def _score_trees(run: Run, trees: Sequence[Tree], at_once: int) -> Iterator[Scored]:
    """Scores trees; the next call is prepared while one runs."""
    waiting = None
    for shape, bins in plant(trees, at_once):
        scores = score_forest(run.model, lay_out(shape, bins), shape=shape, kernels=run.kernels)
        if waiting is not None:
            yield from _read(*waiting)
        waiting = bins, scores
    if waiting is not None:
        yield from _read(*waiting)


def _read(bins: Sequence[Sequence[Tree]], scores: Scores) -> Iterator[Scored]:
    """Fetches the scores of a call; yields those of each continuation."""
    logprobs, is_greedy = np.asarray(scores.logprobs), np.asarray(scores.is_greedy)
    first = 0
    for tree in itertools.chain(*bins):
        for one in tree.branches:
            own = slice(first, first + len(one.tokens))
            yield Scored(one.place, logprobs[own], is_greedy[own])
            first = own.stop
