"""The network of EAGLE-3: a layer over pairs of an embedding and a feature.

Axis legend: see `emsjax.decode.pack`.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from emsjax.drafters.feature_network import FeatureConfig, FeatureNetwork
from emsjax.models.architecture import Architecture
from emsjax.models.layers import Angles, DecoderLayer, Norm, add_norm, residual_stream
from emsjax.models.linears import linear, new_linear
from emsjax.models.rotary import angles
from emsjax.models.schema import Relation, flag
from pallas_kernels.add_norm import xla as plain
from pallas_kernels.common.numerics import is_invariant


@dataclasses.dataclass(frozen=True)
class Eagle3Config(FeatureConfig):
    """The sizes and switches of an EAGLE-3 drafter.

    Attributes:
        norm_before_residual: whether the residual stream begins with the normalised feature.
        norm_before_fc: whether the hidden states are normalised before their product, as one
            vector.
        fc_norm: whether each is, by itself.
        norm_output: whether the drafter's normalised output is fed back as the next feature
            (EAGLE 3.1), and not the output itself.
    """

    relations: ClassVar = (
        *FeatureConfig.relations,
        Relation(
            lambda config: config.layers.num_hidden_layers == 1,
            "layers must have num_hidden_layers 1: EAGLE-3 drafters of several layers are not "
            "supported",
        ),
        Relation(
            lambda config: not (config.norm_before_fc and config.fc_norm),
            "norm_before_fc and fc_norm must not both be true",
        ),
    )

    norm_before_residual: bool = flag(False)
    norm_before_fc: bool = flag(False)
    fc_norm: bool = flag(False)
    norm_output: bool = flag(False)


class Eagle3Layer(DecoderLayer):
    """A decoder layer over pairs of an embedding and a feature.

    Args:
        architecture: of the drafter.
        norm_before_residual: see `Eagle3Config`.
        dtype: type of weights and products.
        rngs: random generators for the initial weights.
    """

    def __init__(
        self, architecture: Architecture, norm_before_residual: bool, *, dtype, rngs: nnx.Rngs
    ):
        a = architecture
        super().__init__(a, a.layers[0], dtype=dtype, rngs=rngs)
        init = nnx.initializers.normal(a.init_std)
        self.qkv_proj = new_linear(
            2 * a.width, sum(a.columns), bias=a.qkv_bias, init=init, dtype=dtype, rngs=rngs
        )
        self.feature_norm = Norm(a.width, a.norm, dtype=dtype)
        self.norm_before_residual = norm_before_residual

    def __call__(
        self,
        features: Float[Array, "r e"],
        embeddings: Float[Array, "r e"],
        angles: Angles,
        attention: Callable,
    ) -> tuple[Float[Array, "r e"], Float[Array, "r h d"]]:
        """The layer's output in float32, and the rows' queries, keys and values."""
        normed, pair = self._normalised(features, embeddings)
        y, qkv = self.attend(pair, angles, attention)
        x = (normed if self.norm_before_residual else features).astype(jnp.float32)
        x, h = add_norm(self.ffn_norm, x, y)
        return residual_stream(self.architecture.norm, x, self.feed_forward(h)), qkv

    def context(
        self, features: Float[Array, "r e"], embeddings: Float[Array, "r e"], angles: Angles
    ) -> Float[Array, "r h d"]:
        """The rows' queries, keys and values, which do not depend on what they attend to."""
        _, pair = self._normalised(features, embeddings)
        queries = lambda qkv, kind: qkv[:, : self.architecture.heads]  # nothing is attended to
        return self.attend(pair, angles, queries)[1]

    def _normalised(self, features, embeddings):
        norms = (self.attention_norm, self.feature_norm)
        both = normalised_together(norms, (embeddings, features))
        return both[:, 1], both.reshape(len(both), -1)


def normalised_together(
    norms: tuple[Norm, Norm], vectors: tuple[Float[Array, "r e"], Float[Array, "r e"]]
) -> Float[Array, "r 2 e"]:
    """Each row's vectors, normalised in one pass where numerics allow it."""
    if is_invariant():
        return jnp.stack([norm(x) for norm, x in zip(norms, vectors, strict=True)], axis=1)
    scales = jnp.stack([norm.scale[...] for norm in norms])
    return plain.normalise(jnp.stack(vectors, axis=1), scales, None, norms[0].plain)


class PairOutput(NamedTuple):
    """What follows from pairs of a token's embedding and a feature.

    Attributes:
        normed: the normalised output, the input of the head.
        feature: what is fed back: the feature of the next pair.
        qkv: the pairs' queries, keys and values.
    """

    normed: Float[Array, "r e"]
    feature: Float[Array, "r e"]
    qkv: Float[Array, "r h d"]


class Eagle3Network(FeatureNetwork):
    """The weights of an EAGLE-3 drafter: see `FeatureNetwork`."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        super().__init__(config, rngs=rngs, dtype=dtype)
        a, width = self.architecture, config.target_width
        norm = lambda size: Norm(size, a.norm, dtype=self.dtype)
        self.input_norm = norm(len(config.taps) * width) if config.norm_before_fc else None
        norms = [norm(width) for _ in config.taps] if config.fc_norm else []
        self.tap_norms = nnx.List(norms)
        residual = config.norm_before_residual
        self.layers = nnx.List([Eagle3Layer(a, residual, dtype=self.dtype, rngs=rngs)])

    def feature(self, taps: tuple[Float[Array, "r e"], ...]) -> Float[Array, "r f"]:
        """The features of rows, from the target's hidden states."""
        if self.config.fc_norm:
            taps = tuple(norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True))
        if self.input_norm is None:
            return self.project(taps)
        return linear(self.fc, self.input_norm(jnp.concatenate(taps, axis=-1)))

    def run(
        self,
        features: Float[Array, "r e"],
        embeddings: Float[Array, "r e"],
        places: Int32[Array, "r"],
        attention: Callable,
    ) -> PairOutput:
        """One step of drafting: the layer over pairs at these places of their samples.

        Args:
            attention: called with the pairs' queries, keys and values, and the kind of attention.
        """
        (layer,), (turn,) = self.layers, self.architecture.rotaries
        hidden, qkv = layer(features, embeddings, angles(turn, places), attention)
        normed = self.final_norm(hidden)
        feature = normed if self.config.norm_output else hidden.astype(self.dtype)
        return PairOutput(normed, feature, qkv)
