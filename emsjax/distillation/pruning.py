"""A small model made of parts of a large one: where distillation starts.

Kept are evenly spaced layers. Of their width those directions of the residual stream are left in
which it varies most, and the attention heads and neurons that write most in these; heads keep their
size. Each kept layer then follows others than before: what its heads and neurons read is scaled and
shifted until it varies as in the target, as many neurons would never fire otherwise.

Axis legend: see `emsjax.decode.pack`; n = tokens, w = the small model's width.

Reference: SliceGPT, arXiv 2401.15024, whose directions these are.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.distillation.training import forward
from emsjax.models.config import ACTIVATIONS, POSITION_OFFSET, OPTConfig
from emsjax.models.opt import LAYER_NORM_EPSILON, OPT, OPTLayer, affine, weights
from pallas_kernels.add_norm.xla import normalise

SEQUENCES, TOKENS = 64, 256  # of each, that directions and deviations are measured on
PROJECTED, SHARED = "projected", "shared"
EMBEDDINGS = (PROJECTED, SHARED)


def pruned_config(
    config: OPTConfig, layers: int, width: int, embeddings: str = PROJECTED
) -> OPTConfig:
    """The architecture of `prune`, whose arguments and errors these are."""
    if embeddings not in EMBEDDINGS:
        raise ValueError(f"embeddings must be one of {', '.join(EMBEDDINGS)}, not {embeddings!r}")
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
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // config.head_dim,
        ffn_dim=config.ffn_dim * width // config.hidden_size,
        word_embed_proj_dim=width if embeddings == PROJECTED else config.word_embed_proj_dim,
    )


@jax.default_matmul_precision("highest")  # TF32 would leave a basis that is not orthonormal
def prune(
    target: OPT,
    layers: int,
    width: int,
    embeddings: str = PROJECTED,
    documents: Sequence[np.ndarray] | None = None,
) -> OPT:
    """A float32 model of `layers` layers and hidden size `width`, cut out of the target.

    Args:
        target: the large model.
        layers: how many are kept, the first and, if more than one, the last among them.
        width: a multiple of the size of the target's heads; the target's own: layers alone are
            left out, and the rest stays as it is.
        embeddings: "projected": tables of the kept directions alone, quick to decode with;
            "shared": the target's own table, and projections between it and the layers.
        documents: token ids like those that the draft model is for, int32 [t] each; None:
            random ones, which say less of what is worth keeping.

    Raises:
        ValueError: a size that does not fit into the target, an unknown kind of embeddings, or no
            documents.
    """
    config = pruned_config(target.config, layers, width, embeddings)
    target = target.astype(jnp.float32)
    chosen = np.linspace(0, len(target.layers) - 1, layers).round().astype(int).tolist()
    if width == target.config.hidden_size:
        return of_layers(target, chosen)
    batch = calibration_batch(target.config, documents)
    streams = [residual_stream(target, i, batch, half) for i in chosen for half in (False, True)]
    streams.append(residual_stream(target, len(target.layers), batch))
    basis = principal_directions([*streams, embedded(target)], width)

    draft = OPT(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
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
        # In fewer directions each has a larger share of a length that is always the same.
        scale = draft.final_layer_norm.scale
        if scale is not None:
            scale[...] *= jnp.sqrt(jnp.mean((centred(streams[-1]) @ basis) ** 2))
            enlarge_stream(draft, by=jnp.mean(jnp.abs(scale[...])))
    return draft


def enlarge_stream(model: OPT, by: Float[Array, ""]) -> None:
    """What is written into the residual stream, and what reads it without a normalisation.

    Nothing else changes but for what normalisations add to a variance. A step of Adam
    changes all weights at one rate: tables of small numbers before a large scale would soon be
    overwritten.
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


def of_layers(model: OPT, chosen: Iterable[int]) -> OPT:
    """The model with these of its layers alone."""
    model = nnx.clone(model)
    model.layers = nnx.List([model.layers[i] for i in chosen])
    model.config = dataclasses.replace(model.config, num_hidden_layers=len(model.layers))
    return model


def calibration_batch(config: OPTConfig, documents: Sequence[np.ndarray] | None) -> Batch:
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
    model: OPT, index: int, batch: Batch, attended: bool = False
) -> Float[Array, "n e"]:
    """What layer `index` is given, or with `attended` what its feed-forward part is given."""
    if index == 0 and not attended:  # no model has no layers
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


def embedded(model: OPT) -> Float[Array, "v e"]:
    """Every token as it enters the residual stream."""
    table = model.embed_tokens.embedding[...]
    return table if model.project_in is None else model.project_in(table)


def centred(stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """As a normalisation without scale and bias leaves it."""
    return normalise(stream, None, None, LAYER_NORM_EPSILON)


def principal_directions(streams: Sequence[Float[Array, "n e"]], width: int) -> Float[Array, "e w"]:
    """An orthonormal basis of the directions in which normalised streams vary most.

    The last one counts as much as all others. Coordinates of centred streams add up to 0, so
    the smaller model's normalisation, which centres too, changes nothing about them.
    """
    covariances = [centred(stream).T @ centred(stream) / len(stream) for stream in streams]
    *others, last = covariances
    _, directions = jnp.linalg.eigh(sum(others) + len(others) * last)
    # Mixed, as otherwise the first coordinates would vary far more than the last.
    ones = jnp.ones((width, 1))
    mixed = jnp.concatenate([ones, jax.random.normal(jax.random.key(0), (width, width - 1))], 1)
    return directions[:, ::-1][:, : width - 1] @ jnp.linalg.qr(mixed)[0][:, 1:].T


def cut_embeddings(draft: OPT, target: OPT, basis: Float[Array, "e w"]) -> None:
    """Tables in the basis, or the target's own table projected to it and back."""
    draft.embed_positions.embedding[...] = target.embed_positions.embedding[...] @ basis
    table = target.embed_tokens.embedding[...]
    if draft.project_in is None:
        draft.embed_tokens.embedding[...] = table @ basis
        return
    draft.embed_tokens.embedding[...] = table
    linears = (target.project_in, target.project_out)
    # Where the target's table is as wide as its layers there are none.
    into, out = (jnp.eye(len(basis)) if one is None else one.kernel[...] for one in linears)
    draft.project_in.kernel[...] = into @ basis
    draft.project_out.kernel[...] = basis.T @ out


def cut_norm(small: nnx.LayerNorm, large: nnx.LayerNorm, basis: Float[Array, "e w"]) -> None:
    """The scale of each direction by itself: how it mixes them is left out."""
    if large.scale is not None:
        small.scale[...] = large.scale[...] @ basis**2 / jnp.sum(basis**2, axis=0)
        small.bias[...] = large.bias[...] @ basis


def cut_attention(small: OPTLayer, large: OPTLayer, basis, stream, own_stream) -> None:
    """Fill the attention of `small` with the heads of `large` that write most.

    Args:
        small, large: layers.
        basis: what is left of the residual stream, [e, w].
        stream: what `large` is given, [n, e].
        own_stream: what `small` is given, [n, w].
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
    """Fill the feed-forward part of `small` with the neurons that write most: as above."""
    wanted = outputs(large.fc1, read(large, large.final_layer_norm, stream))
    said = ACTIVATIONS[large.config.activation_function](wanted)
    neurons = largest(strength(said, large.fc2.kernel[...] @ basis), small.config.ffn_dim)
    fit(
        small.fc1,
        in_basis(large, large.final_layer_norm, large.fc1, basis)[:, neurons],
        read(small, small.final_layer_norm, own_stream),
        wanted[:, neurons],
    )
    write(small.fc2, large.fc2, basis, said, neurons)


def read(layer: OPTLayer, norm: nnx.LayerNorm, stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """What a part of the layer makes its first product of."""
    if not layer.config.do_layer_norm_before:
        return stream
    return normalise(stream, *affine(norm), LAYER_NORM_EPSILON)


def outputs(linear: nnx.Linear, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
    kernel, bias = weights(linear)
    return x @ kernel if bias is None else x @ kernel + bias


def in_basis(
    layer: OPTLayer, norm: nnx.LayerNorm, linear: nnx.Linear, basis
) -> Float[Array, "w o"]:
    """The kernel for coordinates in the basis, with the normalisation's scale in it."""
    scale = norm.scale if layer.config.do_layer_norm_before else None
    kernel = linear.kernel[...]
    return basis.T @ (kernel if scale is None else scale[...][:, None] * kernel)


def fit(linear: nnx.Linear, kernel, x: Float[Array, "n i"], wanted: Float[Array, "n o"]) -> None:
    """The kernel, scaled and shifted so that of x it makes the mean and deviation of `wanted`."""
    made = jnp.std(x @ kernel, axis=0)
    kernel = kernel * jnp.where(made > 0, jnp.std(wanted, axis=0) / jnp.where(made > 0, made, 1), 1)
    linear.kernel[...] = kernel
    if linear.bias is not None:
        linear.bias[...] = jnp.mean(wanted, axis=0) - jnp.mean(x @ kernel, axis=0)


def strength(said: Float[Array, "n i"], out: Float[Array, "i w"]) -> Float[Array, "i"]:
    """How much of what is written varies with each entry."""
    return jnp.var(said, axis=0) * jnp.sum(out**2, axis=1)


def write(small: nnx.Linear, large: nnx.Linear, basis, said: Float[Array, "n i"], kept) -> None:
    """The rows of what is kept; what the others write on average is in the bias."""
    out = large.kernel[...] @ basis
    small.kernel[...] = out[kept]
    if large.bias is not None:
        mean = jnp.mean(said, axis=0)
        small.bias[...] = large.bias[...] @ basis + mean @ out - mean[kept] @ out[kept]


def largest(values: Array, count: int) -> Array:
    """Indices of the `count` largest values, ascending; the first of equal ones."""
    return jnp.sort(jnp.argsort(-jnp.asarray(values), stable=True)[:count])


def num_parameters(model: OPT) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))
