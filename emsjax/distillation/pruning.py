"""Pruning of a large model to a small one, with which distillation starts.

Evenly spaced layers are kept. The residual stream is projected to the directions in which it varies
most, and the attention heads and neurons that write most in these are kept; heads keep their
size, and those that share keys and values are kept together. Because each kept layer follows other
layers than before, the inputs of its heads and neurons are scaled and shifted to vary as in the
target; otherwise many neurons would never be active.

Axis legend: see `emsjax.decode.pack`; n = tokens, w = the small model's width.

Reference: SliceGPT, arXiv 2401.15024, for the directions.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from emsjax.checks import check_at_least, check_choice
from emsjax.configured import configured
from emsjax.distillation.cutting import (
    cut_attention,
    cut_embeddings,
    cut_feed_forward,
    cut_norm,
    cut_norms,
    multiply,
    scale_of,
    table_factor,
)
from emsjax.distillation.finite import check_finite
from emsjax.distillation.passes import forward
from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.models import layers as blocks
from emsjax.models.architecture import PARALLEL, SHARED
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from pallas_kernels.add_norm.xla import Norm, normalise

SEQUENCES, TOKENS = 64, 256  # sequences, and tokens of each, that statistics are measured on
PROJECTED, OWN_TABLE = "projected", "shared"
EMBEDDINGS = (PROJECTED, OWN_TABLE)


def pruned_config(
    config: DecoderConfig, layers: int, width: int, embeddings: str = PROJECTED
) -> DecoderConfig:
    """The architecture that `prune` creates, with the same arguments and errors."""
    a = config.architecture
    embeddings = check_choice("embeddings", embeddings, EMBEDDINGS)
    layers, width = check_at_least("layers", layers, 0), check_at_least("width", width, 0)
    if not 1 <= layers <= len(a.layers):
        raise ValueError(f"layers must be in 1..{len(a.layers)}, those of the target, not {layers}")
    unit = a.width // a.kv_heads
    if not 0 < width <= a.width or width * a.kv_heads % a.width:
        raise ValueError(
            f"width must be a multiple of {unit}, the target's width for each of its "
            f"{a.kv_heads} K/V heads, and at most {a.width}, its own width, not {width}"
        )
    if (layers, width) == (len(a.layers), a.width):
        raise ValueError("layers and width are the target's: the draft must be smaller")
    part = lambda size: size * width // a.width
    sizes = {"width": width, "ffn_size": part(a.ffn_size)}
    sizes |= {"heads": part(a.heads), "kv_heads": part(a.kv_heads)}
    draft = config.with_layers(evenly_spaced(len(a.layers), layers)).resized(**sizes)
    if a.embedding_width is None and embeddings == OWN_TABLE:
        raise ValueError("embeddings must be 'projected': this family has no narrower embeddings")
    if a.is_projected and embeddings == PROJECTED:
        raise ValueError(
            "embeddings must be 'shared': those of the target are narrower than its layers already"
        )
    if embeddings == OWN_TABLE or a.embedding_width is None:
        return draft
    return draft.with_embeddings(width)


def evenly_spaced(layers: int, kept: int) -> list[int]:
    """Numbers of the layers to keep: the first and, if more than one, the last among them."""
    return np.linspace(0, layers - 1, kept).round().astype(int).tolist()


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
        width: a multiple of the target's width for each K/V head; with the target's own width only
            layers are removed, and the others are unchanged.
        embeddings: "projected" for tables of the kept directions only, which decode fast;
            "shared" for the target's own table and projections between it and the layers, which
            only OPT has.
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
    chosen = evenly_spaced(len(target.layers), len(config.architecture.layers))
    if config.architecture.width == target.architecture.width:
        return with_layers(target, chosen)
    batch = calibration_batch(target.config, documents)
    streams = [residual_stream(target, i, batch, half) for i in chosen for half in (False, True)]
    streams.append(residual_stream(target, len(target.layers), batch))
    basis = principal_directions(target, streams, config.architecture.width)

    draft = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    cut_embeddings(draft, target, basis)
    for place, (small, i) in enumerate(zip(draft.layers, chosen, strict=True)):
        large, (before, between) = target.layers[i], streams[2 * place : 2 * place + 2]
        cut_norms(small, large, basis)
        cut_attention(small, large, basis, before, residual_stream(draft, place, batch))
        own = residual_stream(draft, place, batch, attended=True)
        cut_feed_forward(small, large, basis, between, own)
    if draft.final_norm is not None:
        cut_norm(draft.final_norm, target.final_norm, basis)
        if draft.final_norm.scale is not None:
            # The normalised length is constant, so each of fewer directions has a larger share.
            rms = jnp.sqrt(jnp.mean((normalised(target, streams[-1]) @ basis) ** 2))
            multiply(draft.final_norm, rms, bias=False)
            multiply(draft.final_norm, 1 / table_factor(draft, target))
            enlarge_stream(draft, by=jnp.mean(jnp.abs(scale_of(draft.final_norm))))
    return draft


def enlarge_stream(model: Decoder, by: Float[Array, ""]) -> None:
    """Scale everything that is written to the residual stream, and divide the final norm's scale.

    The function is unchanged, except for the epsilon that normalisations add to a variance. A step
    of Adam changes all weights at the same rate, so tables of small numbers before a large
    scale would soon be overwritten.
    """
    linears = [model.project_in, model.project_out]
    tables = [model.embed_positions, model.lm_head]
    if model.project_in is None:
        tables.append(model.embed_tokens)
    for layer in model.layers:
        linears += [layer.out_proj, layer.down_proj]
    parameters = [table.embedding for table in tables if table is not None]
    parameters += [one for linear in linears if linear for one in (linear.kernel, linear.bias)]
    for parameter in filter(None, parameters):
        parameter[...] *= by
    for layer in model.layers:
        for norm in filter(None, (layer.attention_out_norm, layer.ffn_out_norm)):
            multiply(norm, by)
    multiply(model.final_norm, 1 / by)


def with_layers(model: Decoder, chosen: Iterable[int]) -> Decoder:
    """The model with only the chosen layers."""
    chosen = list(chosen)
    model = nnx.clone(model)
    model.layers = nnx.List([model.layers[i] for i in chosen])
    model.config = model.config.with_layers(chosen)
    model.architecture = model.config.architecture
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
    a = model.architecture
    if a.order in (PARALLEL, SHARED):
        attended = False  # both parts have the same input
    if index == 0 and not attended:  # a model without layers cannot be built
        tokens, positions = (jnp.asarray(x).reshape(-1) for x in (batch.tokens, batch.positions))
        stream = blocks.residual_stream(a.norm, *model.embed(tokens, positions))
        return stream.astype(jnp.float32)
    first = with_layers(model, range(index + attended))
    if attended:
        product = first.layers[index].down_proj
        for parameter in filter(None, (product.kernel, product.bias)):
            parameter[...] = jnp.zeros_like(parameter[...])
    stream = forward(first, jax.tree.map(jnp.asarray, batch))
    stream = stream.reshape(-1, stream.shape[-1])
    check_finite("the target's hidden states", stream)
    return stream


def embedded(model: Decoder) -> Float[Array, "v e"]:
    """The embedding of every token in the residual stream, without its position."""
    table = model.embed_tokens.embedding[...] * model.architecture.embedding_scale
    return table if model.project_in is None else model.project_in(table)


def normalised(model: Decoder, stream: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """The stream after normalisation without scale and bias."""
    kind = model.architecture.norm
    return normalise(stream, None, None, Norm(kind.epsilon, jnp.float32, kind.centred))


def principal_directions(
    model: Decoder, streams: Sequence[Float[Array, "n e"]], width: int
) -> Float[Array, "e w"]:
    """An orthonormal basis of the directions in which normalised streams vary most.

    The last stream weighs as much as all others and the embeddings together. If norms subtract the
    mean, coordinates of normalised streams add up to 0, so that of the smaller model changes
    nothing.
    """
    streams = [normalised(model, stream) for stream in (embedded(model), *streams)]
    *others, last = [stream.T @ stream / len(stream) for stream in streams]
    _, directions = jnp.linalg.eigh(sum(others) + len(others) * last)
    # Directions are mixed, because the first ones would vary far more than the last.
    centred = int(model.architecture.norm.centred)
    mixed = jax.random.normal(jax.random.key(0), (width, width - centred))
    mixed = jnp.concatenate([jnp.ones((width, centred)), mixed], axis=1)
    mixed = jnp.linalg.qr(mixed)[0][:, centred:]
    return directions[:, ::-1][:, : width - centred] @ mixed.T


def num_parameters(model: Decoder) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))
