"""A small model made of parts of a large one: where distillation starts.

Kept are evenly spaced layers, and of their width what is read or written most: dimensions of the
residual stream, attention heads, feed-forward neurons. Heads keep their size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from emsjax.config import OPTConfig
from emsjax.opt import OPT, OPTLayer

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


def prune(target: OPT, layers: int, width: int, embeddings: str = PROJECTED) -> OPT:
    """A float32 model of `layers` layers and hidden size `width`, cut out of the target.

    Args:
        target: the large model.
        layers: how many are kept, the first and, if more than one, the last among them.
        width: a multiple of the size of the target's heads.
        embeddings: "projected": tables of the kept dimensions alone, quick to decode with;
            "shared": the target's own table, and projections between it and the layers.

    Raises:
        ValueError: a size that does not fit into the target, or an unknown kind of embeddings.
    """
    config = pruned_config(target.config, layers, width, embeddings)
    target = target.astype(jnp.float32)
    chosen = np.linspace(0, len(target.layers) - 1, layers).round().astype(int).tolist()
    kept = [target.layers[i] for i in chosen]
    dims = largest(sum(read_strength(layer) for layer in kept), width)

    draft = OPT(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    draft.embed_positions.embedding[...] = target.embed_positions.embedding[...][:, dims]
    if embeddings == PROJECTED:
        draft.embed_tokens.embedding[...] = target.embed_tokens.embedding[...][:, dims]
    else:
        share_embeddings(draft, target, dims)
    if draft.final_layer_norm is not None:
        copy(draft.final_layer_norm, target.final_layer_norm, dims)
    for small, large in zip(draft.layers, kept, strict=True):
        cut_layer(small, large, dims)
    return draft


def share_embeddings(draft: OPT, target: OPT, dims: Array) -> None:
    """The target's table, projected to the kept dimensions and back."""
    draft.embed_tokens.embedding[...] = target.embed_tokens.embedding[...]
    if not draft.config.has_projections:
        return
    size = target.config.hidden_size
    identity = jnp.eye(size)  # where the table is as wide as the layers
    project_in, project_out = (
        identity if linear is None else linear.kernel[...]
        for linear in (target.project_in, target.project_out)
    )
    draft.project_in.kernel[...] = project_in[:, dims]
    draft.project_out.kernel[...] = project_out[dims]


def read_strength(layer: OPTLayer) -> Array:
    """How much a layer's products depend on each dimension of the residual stream, [e]."""
    strength = 0
    for norm, linear in (
        (layer.self_attn_layer_norm, layer.qkv_proj),
        (layer.final_layer_norm, layer.fc1),
    ):
        scale = 1 if norm.scale is None else norm.scale[...][:, None]
        strength += jnp.sum((scale * linear.kernel[...]) ** 2, axis=1)
    return strength


def cut_layer(small: OPTLayer, large: OPTLayer, dims: Array) -> None:
    """Fill `small` with the dimensions, heads and neurons of `large` that weigh most."""
    config = large.config
    head_shape = (config.num_attention_heads, config.head_dim)
    query, key, value = jnp.split(large.qkv_proj.kernel[...], 3, axis=1)
    out = large.out_proj.kernel[...]
    of_heads = jnp.sum(value**2, axis=0).reshape(head_shape).sum(1)
    of_heads *= jnp.sum(out**2, axis=1).reshape(head_shape).sum(1)
    heads = largest(of_heads, small.config.num_attention_heads)
    columns = (heads[:, None] * config.head_dim + jnp.arange(config.head_dim)).reshape(-1)
    fc1, fc2 = large.fc1.kernel[...], large.fc2.kernel[...]
    neurons = largest(jnp.sum(fc1**2, axis=0) * jnp.sum(fc2**2, axis=1), small.config.ffn_dim)

    cut = lambda kernel, rows, columns: kernel[rows][:, columns]
    parts = [cut(part, dims, columns) for part in (query, key, value)]
    small.qkv_proj.kernel[...] = jnp.concatenate(parts, axis=1)
    small.out_proj.kernel[...] = cut(out, columns, dims)
    small.fc1.kernel[...] = cut(fc1, dims, neurons)
    small.fc2.kernel[...] = cut(fc2, neurons, dims)
    if config.enable_bias:
        parts = [part[columns] for part in jnp.split(large.qkv_proj.bias[...], 3)]
        small.qkv_proj.bias[...] = jnp.concatenate(parts)
        for name, kept in (("out_proj", dims), ("fc1", neurons), ("fc2", dims)):
            getattr(small, name).bias[...] = getattr(large, name).bias[...][kept]
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        copy(getattr(small, name), getattr(large, name), dims)


def copy(small: nnx.LayerNorm, large: nnx.LayerNorm, dims: Array) -> None:
    for name in ("scale", "bias"):
        if getattr(large, name) is not None:
            getattr(small, name)[...] = getattr(large, name)[...][dims]


def largest(values: Array, count: int) -> Array:
    """Indices of the `count` largest values, ascending; the first of equal ones."""
    return jnp.sort(jnp.argsort(-jnp.asarray(values), stable=True)[:count])


def num_parameters(model: OPT) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))
