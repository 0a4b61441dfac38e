"""How parts of a large model become those of a small one whose residual stream is narrower.

Axis legend: see `emsjax.distillation.pruning`.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from emsjax.models.architecture import ACTIVATIONS, AFTER, SHARED, Architecture
from emsjax.models.decoder import Decoder
from emsjax.models.layers import DecoderLayer, Norm
from emsjax.models.linears import dense_weight
from pallas_kernels.matmul.xla import activate


def table_factor(draft: Decoder, target: Decoder) -> float:
    """By how much the draft's table of embeddings is multiplied, which are also its logits."""
    if not draft.architecture.tied_head:
        return 1.0
    return target.architecture.embedding_scale / draft.architecture.embedding_scale


def cut_embeddings(draft: Decoder, target: Decoder, basis: Float[Array, "e w"]) -> None:
    """Fill the embeddings with tables in the basis, or the target's table and projections."""
    if draft.embed_positions is not None:
        draft.embed_positions.embedding[...] = target.embed_positions.embedding[...] @ basis
    if draft.lm_head is not None:
        draft.lm_head.embedding[...] = target.lm_head.embedding[...] @ basis
    if draft.lm_head_bias is not None:
        draft.lm_head_bias[...] = target.lm_head_bias[...]
    table = target.embed_tokens.embedding[...]
    if draft.project_in is None:
        scales = [model.architecture.embedding_scale for model in (target, draft)]
        draft.embed_tokens.embedding[...] = table @ basis * (scales[0] / scales[1])
        return
    draft.embed_tokens.embedding[...] = table
    linears = (target.project_in, target.project_out)
    # A target whose table is as wide as its layers has no projections.
    into, out = (jnp.eye(len(basis)) if one is None else one.kernel[...] for one in linears)
    draft.project_in.kernel[...] = into @ basis
    draft.project_out.kernel[...] = basis.T @ out


def cut_norms(small: DecoderLayer, large: DecoderLayer, basis: Float[Array, "e w"]) -> None:
    """Fill a layer's norms, except those whose scale becomes a part of the following product."""
    if small.architecture.order == AFTER:
        cut_norm(small.attention_norm, large.attention_norm, basis)
        cut_norm(small.ffn_norm, large.ffn_norm, basis)
    for name in ("attention_out_norm", "ffn_out_norm"):
        if getattr(small, name) is not None:
            cut_norm(getattr(small, name), getattr(large, name), basis)
            # The normalised length grows with the square root of the size.
            multiply(getattr(small, name), (len(basis) / basis.shape[1]) ** 0.5)
    if small.query_norm is not None:
        small.query_norm.scale[...] = large.query_norm.scale[...]
        small.key_norm.scale[...] = large.key_norm.scale[...]


def cut_norm(small: Norm, large: Norm, basis: Float[Array, "e w"]) -> None:
    """Fill a norm with the scale of each direction; the mixing of directions is ignored."""
    if large.scale is not None:
        factors = scale_of(large) @ basis**2 / jnp.sum(basis**2, axis=0)
        small.scale[...] = factors - small.kind.offset
    if large.bias is not None:
        small.bias[...] = large.bias[...] @ basis


def cut_attention(small: DecoderLayer, large: DecoderLayer, basis, stream, own_stream) -> None:
    """Fill the attention of `small` with the heads of `large` that write most.

    Args:
        small, large: layers.
        basis: the kept directions of the residual stream, [e, w].
        stream: input of `large`, [n, e].
        own_stream: input of `small`, [n, w].
    """
    a = large.architecture
    group = a.heads // a.kv_heads
    wanted = outputs(large.qkv_proj, read(large, large.attention_norm, stream))
    values = wanted[:, -a.columns[2] :].reshape(-1, a.kv_heads, 1, a.head_dim)
    # Each of a group's query heads passes on the same values.
    values = jnp.repeat(values, group, axis=2).reshape(len(wanted), -1)
    out = dense_weight(large.out_proj) @ basis
    groups = strength(values, out).reshape(a.kv_heads, -1).sum(axis=1)
    groups = largest(groups, small.architecture.kv_heads)
    columns = columns_of(groups, a)
    fit(
        small.qkv_proj,
        in_basis(large, large.attention_norm, large.qkv_proj, basis)[:, columns],
        read(small, small.attention_norm, own_stream),
        wanted[:, columns],
    )
    write(small.out_proj, large.out_proj, basis, values, columns[: small.architecture.columns[0]])


def columns_of(groups: Array, a: Architecture) -> Array:
    """The columns of queries, keys and values of these groups of heads."""
    sizes = (a.heads // a.kv_heads * a.head_dim, a.head_dim, a.head_dim)
    starts = (0, a.columns[0], a.columns[0] + a.columns[1])
    parts = [
        start + (groups[:, None] * size + jnp.arange(size)).reshape(-1)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return jnp.concatenate(parts)


def cut_feed_forward(small: DecoderLayer, large: DecoderLayer, basis, stream, own_stream) -> None:
    """Fill the feed-forward part of `small` with the neurons that write most.

    The arguments are those of `cut_attention`.
    """
    a = large.architecture
    large_norm, small_norm = (
        layer.attention_norm if a.order == SHARED else layer.ffn_norm for layer in (large, small)
    )
    wanted = outputs(large.up_proj, read(large, large_norm, stream))
    activations = activate(wanted, ACTIVATIONS[a.activation], a.gated)
    neurons = strength(activations, dense_weight(large.down_proj) @ basis)
    neurons = largest(neurons, small.architecture.ffn_size)
    columns = jnp.concatenate([neurons + half * a.ffn_size for half in range(1 + a.gated)])
    fit(
        small.up_proj,
        in_basis(large, large_norm, large.up_proj, basis)[:, columns],
        read(small, small_norm, own_stream),
        wanted[:, columns],
    )
    write(small.down_proj, large.down_proj, basis, activations, neurons)


def read(layer: DecoderLayer, norm: Norm, stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """Input of the first product of a part of the layer."""
    return stream if layer.architecture.order == AFTER else norm(stream)


def outputs(linear: nnx.Linear, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
    y = x @ dense_weight(linear)
    return y if linear.bias is None else y + linear.bias[...]


def in_basis(layer: DecoderLayer, norm: Norm, linear: nnx.Linear, basis) -> Float[Array, "w o"]:
    """The kernel for coordinates in the basis, which includes the normalisation's scale."""
    kernel = dense_weight(linear)
    if layer.architecture.order == AFTER or norm.scale is None:
        return basis.T @ kernel
    return basis.T @ (scale_of(norm)[:, None] * kernel)


def fit(linear: nnx.Linear, kernel, x: Float[Array, "n i"], wanted: Float[Array, "n o"]) -> None:
    """Set a kernel and bias so that outputs for x have the mean and deviation of `wanted`."""
    made = jnp.std(x @ kernel, axis=0)
    kernel = kernel * jnp.where(made > 0, jnp.std(wanted, axis=0) / jnp.where(made > 0, made, 1), 1)
    linear.kernel[...] = kernel
    if linear.bias is not None:
        linear.bias[...] = jnp.mean(wanted, axis=0) - jnp.mean(x @ kernel, axis=0)


def strength(x: Float[Array, "n i"], out: Float[Array, "i w"]) -> Float[Array, "i"]:
    """Variance that each entry of x contributes to the output x @ out."""
    return jnp.var(x, axis=0) * jnp.sum(out**2, axis=1)


def write(small: nnx.Linear, large: nnx.Linear, basis, x: Float[Array, "n i"], kept) -> None:
    """Copy the kept rows of the kernel, and add the mean output of the others to the bias."""
    out = dense_weight(large) @ basis
    small.kernel[...] = out[kept]
    if large.bias is not None:
        mean = jnp.mean(x, axis=0)
        small.bias[...] = large.bias[...] @ basis + mean @ out - mean[kept] @ out[kept]


def largest(values: Array, count: int) -> Array:
    """Ascending indices of the `count` largest values; of equal ones the first are taken."""
    return jnp.sort(jnp.argsort(-jnp.asarray(values), stable=True)[:count])


def scale_of(norm: Norm) -> Float[Array, "e"]:
    """The factors of a norm that has a scale."""
    return norm.scale[...] + norm.kind.offset


def multiply(norm: Norm, factor: float | Float[Array, ""], *, bias: bool = True) -> None:
    """Multiply the results of a norm, or with `bias` false only what it adds its bias to."""
    norm.scale[...] = scale_of(norm) * factor - norm.kind.offset
    if bias and norm.bias is not None:
        norm.bias[...] *= factor
