"""What a decoder consists of, as data: `emsjax.models.decoder` builds any model from it."""

import dataclasses
from typing import Literal

# The order of normalisation, attention (A) and feed-forward part (F) in a layer of input x:
BEFORE = "before"  # x += A(norm(x)); x += F(norm(x))
AFTER = "after"  # x = norm(x + A(x)); x = norm(x + F(x))
BOTH = "both"  # x += norm(A(norm(x))); x += norm(F(norm(x)))
PARALLEL = "parallel"  # x += A(norm(x)) + F(other_norm(x))
SHARED = "shared"  # x += A(norm(x)) + F(the same norm(x))
Order = Literal["before", "after", "both", "parallel", "shared"]

# The activations of config files, by the names of `pallas_kernels.linear`.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclasses.dataclass(frozen=True)
class NormKind:
    """The normalisation that all layers use.

    Attributes:
        epsilon: added to the variance or mean square.
        centred: whether the mean is subtracted and a bias added: layer normalisation. Otherwise
            RMS normalisation.
        offset: added to the stored scales.
        affine: whether there are a scale and a bias.
    """

    epsilon: float
    centred: bool = False
    offset: float = 0.0
    affine: bool = True


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions: number i of a head is rotated with number pairs + i.

    Attributes:
        frequencies: the angle per position of each pair, in radians.
        amplitude: a factor of sines and cosines.
    """

    frequencies: tuple[float, ...]
    amplitude: float = 1.0


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """What may differ between the attention of one layer and another's.

    Attributes:
        scale: the factor of scores.
        window: tokens that a token sees, itself included; None: all.
        rotary: index into `Architecture.rotaries`; None: no rotary positions.
    """

    scale: float
    window: int | None = None
    rotary: int | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer.

    Attributes:
        vocab_size: tokens.
        width: numbers per token of the residual stream.
        ffn_size: numbers per token within a feed-forward part.
        heads, kv_heads: heads of queries, and of keys and values.
        head_dim: numbers per head.
        max_positions: the most tokens of a sequence.
        layers: the attention of each layer.
        norm: the normalisation.
        activation: of the feed-forward parts, one of ACTIVATIONS.
        order: where layers normalise: see the constants of this module.
        gated: whether feed-forward parts multiply the activation by another product.
        rotaries: the rotary positions that layers choose from.
        position_offset: unused entries at the start of a table of learned positions; None: there
            is no such table.
        qkv_bias, out_bias, ffn_bias: whether these products add a bias.
        head_norm: whether the heads of queries and of keys are normalised.
        final_norm: whether the last layer's output is normalised.
        embedding_width: numbers per token in the embedding table. If it is not `width`, there are
            projections between the two.
        embedding_scale: a factor of embeddings.
        tied_head: whether logits are products with the embedding table.
        head_bias: whether an untied head adds a bias.
        logit_cap: c in c * tanh(logits / c); None: logits are not capped.
        init_std: standard deviation of random weights.
    """

    vocab_size: int
    width: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[AttentionKind, ...]
    norm: NormKind
    activation: str
    order: Order = BEFORE
    gated: bool = False
    rotaries: tuple[Rotary, ...] = ()
    position_offset: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_norm: bool = False
    final_norm: bool = True
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    tied_head: bool = True
    head_bias: bool = False
    logit_cap: float | None = None
    init_std: float = 0.02

    @property
    def columns(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in a layer's product of all three."""
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys

    @property
    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every product with weights of a forward pass and its logits."""
        up = (1 + self.gated) * self.ffn_size
        layer = [
            (self.width, sum(self.columns)),
            (self.columns[0], self.width),
            (self.width, up),
            (self.ffn_size, self.width),
        ]
        table = self.embedding_width or self.width
        projections = [(table, self.width), (self.width, table)] if self.is_projected else []
        return [*layer * len(self.layers), *projections, (table, self.vocab_size)]

    @property
    def products_of_layers(self) -> int:
        """How many of the `products`, the first ones, belong to layers."""
        return 4 * len(self.layers)

    def attended(self, context: float) -> float:
        """Tokens that a token sees among `context` earlier ones, over all layers."""
        windows = (kind.window for kind in self.layers)
        return sum(context if window is None else min(context, window) for window in windows)

    @property
    def is_projected(self) -> bool:
        """Whether there are projections between embeddings and layers."""
        return self.embedding_width not in (None, self.width)

    def part(self, devices: int) -> "Architecture":
        """What each of several devices has of every layer, and of the vocabulary.

        Where there are fewer K/V heads than devices, several devices have the same.

        Raises:
            ValueError: the heads or the intermediate size cannot be divided so; the message names
                the numbers of devices that are possible.
        """
        if not self._divides(devices):
            possible = ", ".join(str(n) for n in range(1, self.heads + 1) if self._divides(n))
            raise ValueError(
                f"{self.heads} query heads, {self.kv_heads} K/V heads and an intermediate size of "
                f"{self.ffn_size} cannot be divided by the {devices} devices of the mesh: it must "
                f"have {possible} of them"
            )
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // devices),
            ffn_size=self.ffn_size // devices,
            heads=self.heads // devices,
            kv_heads=max(1, self.kv_heads // devices),
        )

    def _divides(self, devices: int) -> bool:
        more, less = max(self.kv_heads, devices), min(self.kv_heads, devices)
        return self.heads % devices == self.ffn_size % devices == more % less == 0
