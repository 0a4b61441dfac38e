"""Where two greedy runs part, and whether that is a near-tie.

In 16-bit types a row's logits depend, in their last digits, on how many rows are computed
beside it. Where two tokens are nearly tied that decides which one is the likelier.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import pack
from emsjax.decode.prefill import prefill
from emsjax.decode.row_counts import round_up_length
from emsjax.engine.output import GenerateOutput
from emsjax.models.opt import OPT
from pallas_kernels.common.indexing import take_in_rows

NEAR_TIE = 1 / 64  # of the largest absolute logit
PREFIXES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token in which a sequence is another one.

    Attributes:
        sequence: its index.
        position: of the token among the new ones, from 0: the prompt's are not counted.
        expected: the token of plain decoding.
        token: the token instead.
        margin: by how much their logits differ when computed in float32 from the same weights.
        largest: the largest absolute one of these logits.
        likeliest: the two tokens with the largest of these logits.
        lead: by how much theirs differ.
    """

    sequence: int
    position: int
    expected: int
    token: int
    margin: float
    largest: float
    likeliest: tuple[int, int]
    lead: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide, as the margin is within 1/64 of the largest logit."""
        return self.margin <= NEAR_TIE * self.largest


def first_divergences(
    model: OPT,
    prompts: Sequence[Sequence[int]],
    expected: GenerateOutput,
    actual: GenerateOutput,
) -> list[Divergence]:
    """Where each sequence of `actual` leaves that of `expected`, if it does.

    Args:
        model: the target of both; a float32 copy of it is made if there is anything to score.
        prompts: one for each sequence.
        expected: what plain greedy decoding says.
        actual: of the same prompts, with the same limits and end tokens.
    """
    differs = np.asarray(expected.tokens) != np.asarray(actual.tokens)
    parted = np.flatnonzero(differs.any(axis=1))
    positions = differs.argmax(axis=1)
    prefixes = [
        np.concatenate([np.asarray(prompts[i], np.int32), expected.tokens[i, : positions[i]]])
        for i in parted
    ]
    if not prefixes:
        return []
    logits = float32_logits(model, prefixes)
    found = []
    for i, scores in zip(parted, logits, strict=True):
        pair = expected.tokens[i, positions[i]], actual.tokens[i, positions[i]]
        margin = abs(float(scores[pair[0]]) - float(scores[pair[1]]))
        of = (int(i), int(positions[i]), *map(int, pair))
        best = np.argsort(-scores, kind="stable")[:2]
        largest, lead = float(np.abs(scores).max()), float(scores[best[0]] - scores[best[1]])
        found.append(Divergence(*of, margin, largest, tuple(best.tolist()), lead))
    return found


def float32_logits(model: OPT, prefixes: Sequence[np.ndarray]) -> np.ndarray:
    """Logits [n, v] behind each prefix, from the model's weights, computed in float32."""
    model = model.astype(jnp.float32)
    width = round_up_length(max(map(len, prefixes)))
    logits = []
    for first in range(0, len(prefixes), PREFIXES_AT_ONCE):
        group = prefixes[first : first + PREFIXES_AT_ONCE]
        tokens = np.zeros((PREFIXES_AT_ONCE, width), np.int32)
        lengths = np.ones(PREFIXES_AT_ONCE, np.int32)
        for row, prefix in enumerate(group):
            tokens[row, : len(prefix)], lengths[row] = prefix, len(prefix)
        logits.append(np.asarray(last_logits(model, tokens, lengths))[: len(group)])
    return np.concatenate(logits)


@jax.jit
def last_logits(
    model: OPT, tokens: Int32[Array, "b t"], lengths: Int32[Array, "b"]
) -> Float[Array, "b v"]:
    """Logits of each sample's last token."""
    kernels = resolve_kernels(None)
    cache = model.init_cache(*tokens.shape)
    cache = prefill(model, cache, tokens, lengths - 1, kernels=kernels)
    rows = pack(lengths - 1, jnp.ones_like(lengths), len(lengths))
    last = take_in_rows(tokens, lengths[:, None] - 1)[:, 0]
    hidden, _ = model(last, rows, cache, attention=kernels.attention, max_rows_per_sample=1)
    return model.logits(hidden)
