"""Scripted models and drafts, to measure speed without trained weights.

A scripted model has random weights and outputs a given text; its drafts are accepted as often as
an acceptance profile defines. Verification is real, and every output token is known: the text
after each prompt's end.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.acceptance import CandidateAcceptance, Profile, check_probability
from emsjax.checks import as_token_ids, check_at_least
from emsjax.drafters.replay import Replay, ReplayTrees
from emsjax.engine.adapt import as_drafter, unwrapped
from emsjax.models.architecture import AFTER, BOTH, Architecture
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import BFLOAT16, NumberFormats

SIGNAL = 4  # ratio of what decides the next token to everything that layers add to it
FIRST_TOKEN = 5  # of a script: the ids below have meanings of their own


def script(config: DecoderConfig, length: int, *, seed: int) -> np.ndarray:
    """A random text [length] that `scripted_model` can be made to output."""
    a, rng = config.architecture, np.random.default_rng(seed)
    if a.position_offset is not None:
        return rng.integers(FIRST_TOKEN, a.vocab_size, length)
    if a.tied_head:
        return np.full(length, rng.integers(FIRST_TOKEN, a.vocab_size))
    return np.resize(rng.permutation(np.arange(FIRST_TOKEN, a.vocab_size)), length)


def scripted_model(
    config: DecoderConfig,
    text: Sequence[int],
    *,
    numbers: NumberFormats = BFLOAT16,
    seed: int = 0,
) -> Decoder:
    """A model of random weights whose greedy output is `text` [t].

    A table of learned positions holds the embeddings of the text: the token after position p is
    text[p + 1], regardless of the input. Without such a table the token decides: the head's entry
    of text[p + 1] is the embedding of text[p], so that a prompt must end with the text's token at
    its place, and the same token must always have the same one after it. A head that is the table
    of embeddings predicts the token that it is fed, so that the text must be one token throughout.
    From position t - 1 on the output is arbitrary. The largest logit l exceeds the next one by
    about l (1 - sqrt(2 ln(vocab_size) / width)).

    Raises:
        ValueError: the embeddings' width differs from the layers', there is a norm after each
            layer, there are too few dimensions to distinguish the ids, `init_std` is not above 0,
            ids are outside the vocabulary, there are more than max_position_embeddings + 1
            tokens, or the model cannot output the text.
    """
    a = config.architecture
    _check_architecture(a)
    text = as_token_ids("text", text, a.vocab_size)
    limit = a.max_positions + 1  # the last token is never fed
    if len(text) > limit:
        raise ValueError(f"text must have at most {limit} tokens, not {len(text)}")
    # Not under jit: see `random_model`.
    model, dtype = numbers.model(config, seed=seed), numbers.dtype
    table, added = model.embed_tokens.embedding, _added(a) / a.init_std
    embedding = table[...]
    if model.embed_positions is not None:
        # The 1 is the fed token's own embedding.
        entries = _multiple(1 + added, dtype) * embedding[text[1:]]
        positions, first = model.embed_positions.embedding, a.position_offset
        assign(positions, positions[...].at[first : first + len(entries)].set(entries))
        return model
    _check_followed(text, a)
    assign(table, _multiple(added / a.embedding_scale, dtype) * embedding)
    if model.lm_head is not None:
        head = model.lm_head.embedding
        assign(head, head[...].at[text[1:]].set(embedding[text[:-1]]))
    return model


def assign(variable: Any, value: Any) -> None:
    """Gives a variable of a model a value, which lies where the old one does."""
    old = variable[...].sharding
    variable[...] = value if len(old.device_set) == 1 else jax.device_put(value, old)


def _check_architecture(a: Architecture) -> None:
    if a.is_projected:
        raise ValueError(
            f"embeddings must be as wide as the layers ({a.width}), not {a.embedding_width}: "
            "what decides the next token is an embedding in the residual stream"
        )
    if a.order == AFTER:
        raise ValueError(
            "layers must not end with a norm, which scales down what decides the next token"
        )
    least = math.ceil(4 * math.log(a.vocab_size))
    if a.width < least:
        raise ValueError(
            f"the layers' width must be at least {least}, not {a.width}: random embeddings "
            f"of {a.vocab_size} ids are too much alike"
        )
    if not a.init_std > 0:
        raise ValueError(f"init_std must be above 0, not {a.init_std}")


def _check_followed(text: np.ndarray, a: Architecture) -> None:
    """Raises ValueError unless each token of the text decides the next one."""
    following = dict(zip(text[:-1].tolist(), text[1:].tolist(), strict=True))
    if a.tied_head and len(set(text.tolist())) > 1:
        raise ValueError("text must be one token throughout: the head is the table of embeddings")
    one_to_one = len(set(following.values())) == len(following)
    if not one_to_one or any(following[t] != n for t, n in itertools.pairwise(text)):
        raise ValueError("text must have the same token after each occurrence of a token")


def _added(a: Architecture) -> float:
    """Root mean square of what the layers add to the residual stream."""
    # Layers have inputs of variance 1. With weights of variance w over e dimensions, values have a
    # variance of at most w e, and attention adds w times that for each of a row's heads' numbers.
    # Activations halve the mean square, so the feed-forward part adds w f (w e / 2), and where it
    # is gated w e times that. Weights are independent, so variances add up. Norms make each part's
    # variance 1.
    values = a.init_std**2 * a.width
    hidden = values / 2 * (values if a.gated else 1)
    layer = a.init_std**2 * (a.columns[0] * values + a.ffn_size * hidden)
    return math.sqrt(len(a.layers) * (2 if a.order == BOTH else layer))


def _multiple(noise: float, dtype) -> Any:
    """The multiple of embeddings that exceeds this noise, in units of theirs, by SIGNAL."""
    # Multiplying by a power of two rounds nothing.
    return jnp.asarray(2.0 ** math.ceil(math.log2(SIGNAL * noise)), dtype)


def miscopied(tokens: np.ndarray, wrong: float, vocab_size: int, *, seed: int) -> np.ndarray:
    """The tokens, each replaced by a random other one with probability `wrong`."""
    check_probability("wrong", wrong)
    rng = np.random.default_rng(seed)
    others = (tokens + rng.integers(1, vocab_size, tokens.shape)) % vocab_size
    return np.where(rng.random(tokens.shape) < wrong, others, tokens)


def replay(
    profile: Profile,
    text: Sequence[Any],
    batch: int,
    *,
    vocab_size: int,
    max_draft_tokens: int | None = None,
    seed: int,
    source: Any = None,
) -> Replay | ReplayTrees:
    """A drafter of `text` whose drafts are accepted as the profile defines.

    Args:
        text: the target's output: [t], the same for all samples, or [batch, t].
        max_draft_tokens: longer drafts are cut to this many tokens; None: the profile's limit.
        seed: seed of the random draws.
        source: a drafter that does its work in every step, for `max_draft_tokens` tokens if it has
            no limit of its own; None: drafting costs nothing.

    Raises:
        ValueError: ids outside the vocabulary, a wrong number of texts, a batch below 1, a
            vocabulary below 2, `max_draft_tokens` below 1, or a source with a smaller limit.
    """
    check_at_least("batch", batch, 1)
    check_at_least("vocab_size", vocab_size, 2)  # so that there are wrong tokens
    k = profile.max_draft_tokens if max_draft_tokens is None else max_draft_tokens
    check_at_least("max_draft_tokens", k, 1)
    texts = [text] if np.ndim(text) < 2 else text
    texts = np.stack([as_token_ids("text", one, vocab_size) for one in texts])
    if len(texts) not in (1, batch):
        raise ValueError(f"text must be one or {batch}, one per sample, not {len(texts)}")
    if source is not None:
        source = unwrapped(as_drafter(source).with_limit(k))
    if source is not None and source.max_draft_tokens < k:
        raise ValueError(
            f"the source drafts {source.max_draft_tokens} tokens at most, "
            f"less work than for max_draft_tokens={k}"
        )
    texts = np.broadcast_to(texts, (batch, texts.shape[1]))
    rng = np.random.default_rng(seed)
    if isinstance(profile, CandidateAcceptance):
        arrays = (texts, profile.candidates(rng, *texts.shape))
        return ReplayTrees(*map(jnp.asarray, arrays), profile.parents(k), vocab_size, source)
    counts, right = profile.draw(rng, *texts.shape)
    counts = np.minimum(counts, k)
    arrays = (texts, counts, np.minimum(right, counts))
    return Replay(*map(jnp.asarray, arrays), vocab_size, k, source)
