"""Building blocks of decoders: norms, attention and feed-forward parts.

The residual stream is passed from layer to layer as two terms x and y: the norm that follows adds
them in the same pass.

Axis legend: see `emsjax.decode.pack`; i = inputs of a linear layer, p = rotated pairs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from emsjax.decode.cache import LayerCache
from emsjax.decode.kernels import Visible
from emsjax.decode.pack import PackedRows
from emsjax.models.architecture import (
    ACTIVATIONS,
    AFTER,
    BOTH,
    PARALLEL,
    SHARED,
    Architecture,
    AttentionKind,
    NormKind,
)
from emsjax.models.attention import attend
from emsjax.models.linears import NarrowLinear, linear, new_linear, weight_and_bias
from pallas_kernels.add_norm import sum_over_devices
from pallas_kernels.add_norm import xla as plain
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.matmul.rounded import RoundedRows, Rounding

Angles = tuple[Float[Array, "r p"], Float[Array, "r p"]]  # cosines and sines


class Addend(NamedTuple):
    """A term that the following norm adds to the residual stream.

    Attributes:
        sums: as `pallas_kernels.linear_sums` returns them.
        bias: added to the sums.
        scale: of the normalisation of the term itself; None: it is added as it is.
    """

    sums: Float[Array, "... r e"]
    bias: Float[Array, "e"] | None = None
    scale: Float[Array, "e"] | None = None


class Norm(nnx.Module):
    """The parameters of one normalisation.

    Args:
        size: numbers that are normalised together.
        kind: see `NormKind`.
        dtype: the parameters' type and the result's.
    """

    def __init__(self, size: int, kind: NormKind, *, dtype):
        parameter = lambda value: nnx.Param(jnp.full(size, value, dtype)) if kind.affine else None
        self.kind, self.dtype = kind, dtype
        self.scale = parameter(1 - kind.offset)
        self.bias = parameter(0) if kind.centred else None

    def __call__(self, x: Float[Array, "r e"]) -> Float[Array, "r e"]:
        if is_invariant():
            return add_norm(self, x, Addend(jnp.zeros_like(x)))[1]
        return plain.normalise(x, *scale_and_bias(self), self.plain)

    @property
    def plain(self) -> plain.Norm:
        """The static part, as the kernels' plain form takes it."""
        return plain.Norm(self.kind.epsilon, self.dtype, self.kind.centred, self.kind.offset)


def scale_and_bias(norm: Norm) -> tuple[Array | None, Array | None]:
    """Returns a norm's scale and bias; each is None if the norm does not have it."""
    return tuple(
        None if parameter is None else parameter[...] for parameter in (norm.scale, norm.bias)
    )


def linear_addend(
    module: nnx.Linear | NarrowLinear, norm: Norm | None, x: Float[Array, "r i"]
) -> Addend:
    """Applies a linear layer to rows and returns the result as a term of the residual stream.

    Args:
        module: the linear layer.
        norm: normalises the result before it is added; None: nothing does.
        x: the rows.
    """
    weight, bias = weight_and_bias(module)
    scale = None if norm is None else norm.scale[...]
    return Addend(pallas_kernels.linear_sums(x, weight), bias, scale)


def add_norm(
    norm: Norm,
    x: Float[Array, "r e"],
    y: Addend | None,
    axis_name: str | None = None,
    rounding: Rounding | None = None,
):
    """Returns x + y and its normalisation. Without y, x is returned as it is.

    Args:
        axis_name: of the devices that have a part of y each; None: y is whole.
        rounding: how the product that follows takes its rows, if it rounds them: the normalised
            rows may be rounded already.
    """
    if y is None:
        return x, norm(x)
    scale, bias = scale_and_bias(norm)
    options = {"epsilon": norm.kind.epsilon, "dtype": norm.dtype, "axis_name": axis_name}
    options["rounding"] = rounding
    if norm.kind.centred:
        return pallas_kernels.add_layer_norm(x, y.sums, y.bias, scale, bias, **options)
    options["offset"] = norm.kind.offset
    return pallas_kernels.add_rms_norm(x, y.sums, y.bias, scale, y.scale, **options)


def residual_stream(
    norm: NormKind, x: Float[Array, "r e"], y: Addend | None, axis_name: str | None = None
):
    """Returns x + y; `norm` is the kind of the model's norms. For `axis_name` see `add_norm`."""
    if y is None:
        return x
    if axis_name is not None:
        y = y._replace(sums=sum_over_devices(y.sums, axis_name))
    if is_invariant():
        options = {"epsilon": norm.epsilon, "offset": norm.offset}
        return pallas_kernels.add_rms_norm(x, y.sums, y.bias, None, y.scale, **options)[0]
    vectors = {"y_bias": y.bias, "y_scale": y.scale}
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    return plain.add_norm(
        x, y.sums, vectors, norm=plain.Norm(norm.epsilon, x.dtype, False, norm.offset)
    )[0]


def add_addends(one: Addend, other: Addend) -> Addend:
    """Returns the sum of two terms that are not normalised."""
    sums = (term.sums.astype(jnp.float32) for term in (one, other))
    sums = (add_shares(term) if term.ndim == 3 else term for term in sums)
    biases = [term.bias for term in (one, other) if term.bias is not None]
    return Addend(sum(sums), sum(bias.astype(jnp.float32) for bias in biases) if biases else None)


def add_shares(shares: Float[Array, "s r e"]) -> Float[Array, "r e"]:
    """Returns the sum of a product's shares, in their order where numerics are invariant."""
    return functools.reduce(jnp.add, shares) if is_invariant() else shares.sum(axis=0)


class DecoderLayer(nnx.Module):
    """One decoder layer: attention and feed-forward part, with their norms.

    Args:
        architecture: the model's.
        kind: the layer's own attention.
        dtype: type of weights and products.
        rngs: random generators for the initial weights.
    """

    # Of the devices over which the layer is split, if it is; the architecture is that of a part.
    axis_name: str | None = None

    def __init__(self, architecture: Architecture, kind: AttentionKind, *, dtype, rngs: nnx.Rngs):
        a = self.architecture = architecture
        self.kind = kind
        init = nnx.initializers.normal(a.init_std)
        product = functools.partial(new_linear, init=init, dtype=dtype, rngs=rngs)
        norm = functools.partial(Norm, dtype=dtype)
        both = a.order == BOTH
        # One product instead of three, and one instead of two where it is gated.
        self.qkv_proj = product(a.width, sum(a.columns), bias=a.qkv_bias)
        self.out_proj = product(a.heads * a.head_dim, a.width, bias=a.out_bias)
        self.up_proj = product(a.width, (1 + a.gated) * a.ffn_size, bias=a.ffn_bias)
        self.down_proj = product(a.ffn_size, a.width, bias=a.ffn_bias)
        self.attention_norm = norm(a.width, a.norm)
        self.ffn_norm = norm(a.width, a.norm) if a.order != SHARED else None
        self.attention_out_norm = norm(a.width, a.norm) if both else None
        self.ffn_out_norm = norm(a.width, a.norm) if both else None
        self.query_norm = norm(a.head_dim, a.norm) if a.head_norm else None
        self.key_norm = norm(a.head_dim, a.norm) if a.head_norm else None

    def __call__(
        self,
        x: Float[Array, "r e"],
        y: Addend | None,
        angles: Angles | None,
        attention: Callable,
    ):
        """Runs the layer on the residual stream x + y: see `run_layer`.

        The stream is float32, since it is added to often and rounded each time. If norms come after
        each part, nothing is left to add: y is None, and x has the weights' dtype.

        Args:
            x, y: the stream's terms. If the layer is split, each device has a part of y.
            angles: of the rows, for rotary positions.
            attention: called with the rows' queries, keys and values as one array.
        """
        order, axis_name = self.architecture.order, self.axis_name
        if order == AFTER:
            y, qkv = self.attend(x, angles, attention)
            _, x = add_norm(self.attention_norm, x, y, axis_name)
            _, x = add_norm(self.ffn_norm, x, self.feed_forward(x), axis_name)
            return x, None, qkv
        is_shared = order == SHARED  # two products take the same rows
        sums = angles is not None
        rounding = None if is_shared else self.rounding(self.qkv_proj, x, sums=sums)
        x, h = add_norm(self.attention_norm, x, y, axis_name, rounding)
        y, qkv = self.attend(h, angles, attention)
        if order in (PARALLEL, SHARED):
            h = h if is_shared else self.ffn_norm(x)
            return x, add_addends(y, self.feed_forward(h)), qkv
        x, h = add_norm(self.ffn_norm, x, y, axis_name, self.rounding(self.up_proj, x))
        return x, self.feed_forward(h), qkv

    def rounding(self, module, x: Float[Array, "r e"], *, sums: bool = False) -> Rounding | None:
        """How a linear layer takes as many rows as x has, in the dtype of a norm."""
        dtype = self.attention_norm.dtype
        return pallas_kernels.rounding_for(len(x), dtype, weight_and_bias(module)[0], sums=sums)

    def attend(
        self, h: Float[Array, "r e"] | RoundedRows, angles: Angles | None, attention: Callable
    ):
        """The attention part: its term of the residual stream, and the rows' q, k and v."""
        a = self.architecture
        heads = (a.heads + 2 * a.kv_heads, a.head_dim)
        if angles is None:
            qkv = linear(self.qkv_proj, h).reshape(-1, *heads)
        else:
            weight, bias = weight_and_bias(self.qkv_proj)
            sums = pallas_kernels.linear_sums(h, weight)
            norms = (self.query_norm, self.key_norm) if a.head_norm else ()
            qkv = pallas_kernels.rotate_heads(
                sums.reshape(*sums.shape[:-1], *heads),
                None if bias is None else bias.reshape(heads),
                *angles,
                *(norm.scale[...] for norm in norms),
                kv_heads=a.kv_heads,
                epsilon=a.norm.epsilon,
                offset=a.norm.offset,
                dtype=h.dtype,
            )
        out = attention(qkv, self.kind).reshape(h.shape[0], -1)
        return linear_addend(self.out_proj, self.attention_out_norm, out), qkv

    def feed_forward(self, h: Float[Array, "r e"] | RoundedRows) -> Addend:
        """The feed-forward part, as a term of the residual stream."""
        a = self.architecture
        h = linear(self.up_proj, h, activation=ACTIVATIONS[a.activation], gated=a.gated)
        return linear_addend(self.down_proj, self.ffn_out_norm, h)


# It is compiled by itself, so that layers of the same shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("attention", "max_rows_per_sample"))
def run_layer(
    layer: nnx.Module,
    stream: tuple[Float[Array, "r e"], Addend | None],
    angles: Angles | None,
    cached: LayerCache,
    rows: PackedRows,
    visible: Visible,
    *,
    attention: Callable,
    max_rows_per_sample: int | None,
):
    """Runs one layer on the residual stream; its rows attend to the cache and themselves.

    Args:
        layer: the layer.
        stream: the stream's two terms x and y.
        angles: of the rows, for rotary positions.
        cached: the layer's committed keys and values.
        rows: where the rows belong.
        visible: what the rows see of the cache.
        attention: a callable with the signature of `pallas_kernels.ragged_attention`.
        max_rows_per_sample: static bound of rows per sample; None: all rows.

    Returns:
        The next x and y, and the rows' queries, keys and values [r, h, d].
    """

    def see(qkv, kind: AttentionKind):
        limits = {"max_rows_per_sample": max_rows_per_sample}
        if kind.window is not None:
            limits["window"] = kind.window
        if kind.scale != qkv.shape[-1] ** -0.5:
            limits["scale"] = kind.scale
        return attend(attention, qkv, cached, rows, visible, **limits)

    return layer(*stream, angles, see)
