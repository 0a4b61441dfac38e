"""Pruning of a large model to a small one, with which distillation starts.

Evenly spaced layers are kept. The residual stream is projected to the directions in which it varies
most, and the attention heads and neurons that write most in these are kept; heads keep their
size. Because each kept layer follows other layers than before, the inputs of its heads and neurons
are scaled and shifted to vary as in the target; otherwise many neurons would never be active.

Axis legend: see `emsjax.decode.pack`; n = tokens, w = the small model's width.

Reference: SliceGPT, arXiv 2401.15024, for the directions.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from emsjax.checks import check_at_least, check_choice
from emsjax.configured import configured
from emsjax.distillation.finite import check_finite
from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.distillation.training import forward
from emsjax.models.config import ACTIVATIONS, POSITION_OFFSET, DecoderConfig
from emsjax.models.layers import scale_and_bias, weight_and_bias
from emsjax.models.opt import PLAIN_NORM, Decoder, OPTLayer
from pallas_kernels.add_norm.xla import normalise

SEQUENCES, TOKENS = 64, 256  # sequences, and tokens of each, that statistics are measured on
PROJECTED, SHARED = "projected", "shared"
EMBEDDINGS = (PROJECTED, SHARED)


def pruned_config(
    config: DecoderConfig, layers: int, width: int, embeddings: str = PROJECTED
) -> DecoderConfig:
    """The architecture that `prune` creates, with the same arguments and errors."""
    check_choice("embeddings", embeddings, EMBEDDINGS)
    layers, width = check_at_least("layers", layers, 0), check_at_least("width", width, 0)
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(
            f"layers must be in 1..{config.num_hidden_layers}, those of the target, not {layers}"
        )
    if not 0 < width <= config.hidden_size or width % config.head_dim:
        raise ValueError(
            f"width must be a multiple of {config.head_dim}, the size of the target's heads, and "
            f"at most {config.hidden_size}, its own width, not {width}"
        )
    if (layers, width) == (config.num_hidden_layers, config.hidden_size):
        raise ValueError("layers and width are the target's: the draft must be smaller")
    if config.has_projections and embeddings == PROJECTED:
        raise ValueError(
            "embeddings must be 'shared': those of the target are narrower than its layers already"
        )
    return config.changed(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // config.head_dim,
        ffn_dim=config.ffn_dim * width // config.hidden_size,
        word_embed_proj_dim=width if embeddings == PROJECTED else config.word_embed_proj_dim,
    )


@configured
@jax.default_matmul_precision("highest")  # in TF32 the basis would not be orthonormal
def prune(
    target: Decoder,
    layers: int,
    width: int,
    embeddings: str = PROJECTED,
    documents: Sequence[np.ndarray] | None = None,
) -> Decoder:
    """A float32 model of `layers` layers and hidden size `width`, pruned from the target.

    Args:
        target: the large model.
        layers: number of layers that are kept, including the first and, if more than one, the
            last.
        width: a multiple of the target's head size; with the target's own width only layers are
            removed, and the others are unchanged.
        embeddings: "projected" for tables of the kept directions only, which decode fast;
            "shared" for the target's own table and projections between it and the layers.
        documents: token ids like those that the draft model will decode, int32 [t] each; None for
            random ones, which are less informative.

    Raises:
        ValueError: a size does not fit the target, the kind of embeddings is unknown, or there are
            no documents.
        NonFiniteError: the target's parameters or hidden states are not finite.
    """
    config = pruned_config(target.config, layers, width, embeddings)
    check_finite("the target's parameters", nnx.state(target))
    target = target.astype(jnp.float32)
    chosen = np.linspace(0, len(target.layers) - 1, layers).round().astype(int).tolist()
    if width == target.config.hidden_size:
        return of_layers(target, chosen)
    batch = calibration_batch(target.config, documents)
    streams = [residual_stream(target, i, batch, half) for i in chosen for half in (False, True)]
    streams.append(residual_stream(target, len(target.layers), batch))
    basis = principal_directions([*streams, embedded(target)], width)

    draft = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    cut_embeddings(draft, target, basis)
    for place, (small, i) in enumerate(zip(draft.layers, chosen, strict=True)):
        large, (before, between) = target.layers[i], streams[2 * place : 2 * place + 2]
        if not config.do_layer_norm_before:
            cut_norm(small.self_attn_layer_norm, large.self_attn_layer_norm, basis)
            cut_norm(small.final_layer_norm, large.final_layer_norm, basis)
        cut_attention(small, large, basis, before, residual_stream(draft, place, batch))
        own = residual_stream(draft, place, batch, attended=True)
        cut_feed_forward(small, large, basis, between, own)
    if draft.final_layer_norm is not None:
        cut_norm(draft.final_layer_norm, target.final_layer_norm, basis)
        # The normalised length is constant, so each of fewer directions has a larger share of it.
        scale = draft.final_layer_norm.scale
        if scale is not None:
            scale[...] *= jnp.sqrt(jnp.mean((centred(streams[-1]) @ basis) ** 2))
            enlarge_stream(draft, by=jnp.mean(jnp.abs(scale[...])))
    check_finite("the target's hidden states", nnx.state(draft))
    return draft


def enlarge_stream(model: Decoder, by: Float[Array, ""]) -> None:
    """Scale everything that is written to the residual stream, and divide the final norm's scale.

    The function is unchanged, except for the epsilon that normalisations add to a variance. A step
    of Adam changes all weights at the same rate, so tables of small numbers before a large
    scale would soon be overwritten.
    """
    tables = [model.embed_positions.embedding]
    if model.project_in is None:
        tables.append(model.embed_tokens.embedding)
    else:
        tables += [model.project_in.kernel, model.project_out.kernel]
    for linear in (of for layer in model.layers for of in (layer.out_proj, layer.fc2)):
        tables += [linear.kernel, linear.bias]
    for table in filter(None, tables):
        table[...] *= by
    for parameter in (model.final_layer_norm.scale, model.final_layer_norm.bias):
        parameter[...] /= by


def of_layers(model: Decoder, chosen: Iterable[int]) -> Decoder:
    """The model with only the chosen layers."""
    model = nnx.clone(model)
    model.layers = nnx.List([model.layers[i] for i in chosen])
    model.config = dataclasses.replace(model.config, num_hidden_layers=len(model.layers))
    return model


def calibration_batch(config: DecoderConfig, documents: Sequence[np.ndarray] | None) -> Batch:
    """Sequences of the documents, or of random tokens."""
    length = min(TOKENS, config.max_position_embeddings)
    if documents is None:
        shape = (SEQUENCES, length)
        documents = list(np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32))
    if not documents:
        raise ValueError("documents must not be empty; None takes random tokens")
    total = sum(map(len, documents))
    length = min(length, total)
    return PackedSequences(documents, length, min(SEQUENCES, total // length))[0]


def residual_stream(
    model: Decoder, index: int, batch: Batch, attended: bool = False
) -> Float[Array, "n e"]:
    """Input of layer `index`, or with `attended` the input of its feed-forward part."""
    if index == 0 and not attended:  # a model without layers cannot be built
        positions = model.embed_positions.embedding[...][batch.positions + POSITION_OFFSET]
        return (embedded(model)[batch.tokens] + positions).reshape(-1, positions.shape[-1])
    first = of_layers(model, range(index + attended))
    if attended:
        for parameter in filter(
            None, (first.layers[index].fc2.kernel, first.layers[index].fc2.bias)
        ):
            parameter[...] = jnp.zeros_like(parameter[...])
    stream = forward(first, jax.tree.map(jnp.asarray, batch))
    return stream.reshape(-1, stream.shape[-1])


def embedded(model: Decoder) -> Float[Array, "v e"]:
    """The embedding of every token in the residual stream, without its position."""
    table = model.embed_tokens.embedding[...]
    return table if model.project_in is None else model.project_in(table)


def centred(stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """The stream after normalisation without scale and bias."""
    return normalise(stream, None, None, PLAIN_NORM)


def principal_directions(streams: Sequence[Float[Array, "n e"]], width: int) -> Float[Array, "e w"]:
    """An orthonormal basis of the directions in which normalised streams vary most.

    The last stream weighs as much as all others together. Coordinates of centred streams add up
    to 0, so the centring of the smaller model's normalisation does not change them.
    """
    covariances = [centred(stream).T @ centred(stream) / len(stream) for stream in streams]
    *others, last = covariances
    _, directions = jnp.linalg.eigh(sum(others) + len(others) * last)
    # Directions are mixed, because the first ones would vary far more than the last.
    ones = jnp.ones((width, 1))
    mixed = jnp.concatenate([ones, jax.random.normal(jax.random.key(0), (width, width - 1))], 1)
    return directions[:, ::-1][:, : width - 1] @ jnp.linalg.qr(mixed)[0][:, 1:].T


def cut_embeddings(draft: Decoder, target: Decoder, basis: Float[Array, "e w"]) -> None:
    """Fill the embeddings with tables in the basis, or the target's table and projections."""
    draft.embed_positions.embedding[...] = target.embed_positions.embedding[...] @ basis
    table = target.embed_tokens.embedding[...]
    if draft.project_in is None:
        draft.embed_tokens.embedding[...] = table @ basis
        return
    draft.embed_tokens.embedding[...] = table
    linears = (target.project_in, target.project_out)
    # A target whose table is as wide as its layers has no projections.
    into, out = (jnp.eye(len(basis)) if one is None else one.kernel[...] for one in linears)
    draft.project_in.kernel[...] = into @ basis
    draft.project_out.kernel[...] = basis.T @ out


def cut_norm(small: nnx.LayerNorm, large: nnx.LayerNorm, basis: Float[Array, "e w"]) -> None:
    """Fill a norm with the scale of each direction; the mixing of directions is ignored."""
    if large.scale is not None:
        small.scale[...] = large.scale[...] @ basis**2 / jnp.sum(basis**2, axis=0)
        small.bias[...] = large.bias[...] @ basis


def cut_attention(small: OPTLayer, large: OPTLayer, basis, stream, own_stream) -> None:
    """Fill the attention of `small` with the heads of `large` that write most.

    Args:
        small, large: layers.
        basis: the kept directions of the residual stream, [e, w].
        stream: input of `large`, [n, e].
        own_stream: input of `small`, [n, w].
    """
    config = large.config
    wanted = outputs(large.qkv_proj, read(large, large.self_attn_layer_norm, stream))
    values = wanted[:, 2 * config.hidden_size :]
    out = large.out_proj.kernel[...] @ basis
    heads = strength(values, out).reshape(config.num_attention_heads, config.head_dim).sum(axis=1)
    heads = largest(heads, small.config.num_attention_heads)
    columns = (heads[:, None] * config.head_dim + jnp.arange(config.head_dim)).reshape(-1)
    of_parts = (columns + part * config.hidden_size for part in range(3))
    columns_of_qkv = jnp.concatenate(list(of_parts))
    fit(
        small.qkv_proj,
        in_basis(large, large.self_attn_layer_norm, large.qkv_proj, basis)[:, columns_of_qkv],
        read(small, small.self_attn_layer_norm, own_stream),
        wanted[:, columns_of_qkv],
    )
    write(small.out_proj, large.out_proj, basis, values, columns)


def cut_feed_forward(small: OPTLayer, large: OPTLayer, basis, stream, own_stream) -> None:
    """Fill the feed-forward part of `small` with the neurons that write most.

    The arguments are those of `cut_attention`.
    """
    wanted = outputs(large.fc1, read(large, large.final_layer_norm, stream))
    activations = ACTIVATIONS[large.config.activation_function](wanted)
    neurons = largest(strength(activations, large.fc2.kernel[...] @ basis), small.config.ffn_dim)
    fit(
        small.fc1,
        in_basis(large, large.final_layer_norm, large.fc1, basis)[:, neurons],
        read(small, small.final_layer_norm, own_stream),
        wanted[:, neurons],
    )
    write(small.fc2, large.fc2, basis, activations, neurons)


def read(layer: OPTLayer, norm: nnx.LayerNorm, stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """Input of the first product of a part of the layer."""
    if not layer.config.do_layer_norm_before:
        return stream
    return normalise(stream, *scale_and_bias(norm), PLAIN_NORM)


def outputs(linear: nnx.Linear, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
    weight, bias = weight_and_bias(linear)
    y = x @ weight.values
    return y if bias is None else y + bias


def in_basis(
    layer: OPTLayer, norm: nnx.LayerNorm, linear: nnx.Linear, basis
) -> Float[Array, "w o"]:
    """The kernel for coordinates in the basis, which includes the normalisation's scale."""
    scale = norm.scale if layer.config.do_layer_norm_before else None
    kernel = linear.kernel[...]
    return basis.T @ (kernel if scale is None else scale[...][:, None] * kernel)


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
    out = large.kernel[...] @ basis
    small.kernel[...] = out[kept]
    if large.bias is not None:
        mean = jnp.mean(x, axis=0)
        small.bias[...] = large.bias[...] @ basis + mean @ out - mean[kept] @ out[kept]


def largest(values: Array, count: int) -> Array:
    """Ascending indices of the `count` largest values; of equal ones the first are taken."""
    return jnp.sort(jnp.argsort(-jnp.asarray(values), stable=True)[:count])


def num_parameters(model: Decoder) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))
