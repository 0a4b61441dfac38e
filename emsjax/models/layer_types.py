"""The kinds of attention that `layer_types` in config.json gives each layer."""

import dataclasses
from collections.abc import Sequence

from emsjax.models.architecture import AttentionKind

FULL, SLIDING = "full_attention", "sliding_attention"


def windowed(
    layers: Sequence[AttentionKind], types: Sequence[str], window: int | None
) -> tuple[AttentionKind, ...]:
    """The layers, with this window where their type is SLIDING."""
    return tuple(
        dataclasses.replace(kind, window=window) if type == SLIDING else kind
        for kind, type in zip(layers, types, strict=True)
    )
