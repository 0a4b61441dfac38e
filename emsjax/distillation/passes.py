"""Forward passes over packed sequences, and sums of losses whose logits exist in parts.

Axis legend: see `emsjax.decode.pack`; u = groups of g rows that see the same, m = their own keys.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from emsjax.decode.pack import PackedRows
from emsjax.distillation.sequences import Batch
from emsjax.models.decoder import Decoder
from pallas_kernels.common.implementations import matmul_precision

LOGIT_BYTES = 1 << 30  # limit on the logits of a model that exist at once


def packed_attention(
    query, key, value, *cached, max_rows_per_sample: int, window: int | None = None, scale=None
):
    """`pallas_kernels.ragged_attention` for an empty cache and rows that are whole sequences.

    Each sequence has `max_rows_per_sample` rows, and may have several segments.
    """
    _, _, segment_ids, _, _ = cached
    blocks = [x.reshape(-1, max_rows_per_sample, *x.shape[1:]) for x in (query, key, value)]
    segments = segment_ids.reshape(-1, max_rows_per_sample)
    mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    if window is not None:
        at = jnp.arange(max_rows_per_sample)
        mask &= at[:, None] - at < window
    on_gpu = jax.default_backend() == "gpu" and query.dtype.itemsize == 2
    # It promotes 16-bit scores to float32 itself, and multiplies in the context's precision.
    precision = jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default")
    with jax.numpy_dtype_promotion("standard"), precision:
        out = jax.nn.dot_product_attention(
            *blocks,
            mask=mask,
            scale=scale,
            is_causal=True,
            implementation="cudnn" if on_gpu else "xla",
        )
    return out.reshape(query.shape)


def attend_to_context(
    query: Float[Array, "b u g h d"],
    context: Float[Array, "b t kv d"],
    own: Float[Array, "b u m kv d"] | None,
    visible: Bool[Array, "b u t"],
    *,
    scale: float,
) -> Float[Array, "b u g h d"]:
    """Attention of groups of rows to tokens of their sequence and to keys of their own.

    Args:
        query: query heads of g rows of each of u groups.
        context: heads of keys, then of values, of a sequence's tokens.
        own: the same of what every row of the group sees, and no other; None: nothing.
        visible: the tokens that a group sees.
        scale: the factor of scores.
    """
    sources = [context] if own is None else [context, own]
    keys, values = zip(*(jnp.split(x, 2, axis=-2) for x in sources), strict=True)
    shape, kv_heads = query.shape, keys[0].shape[-2]
    query = query.reshape(*shape[:3], kv_heads, -1, shape[-1])
    product = functools.partial(jnp.einsum, precision=matmul_precision(query.dtype))
    equations = ("bugkhd,btkd->bkhugt", "bugkhd,bumkd->bkhugm")

    @jax.checkpoint  # scores are as large as all other activations of a step together
    def attend(query, keys, values, visible):
        scores = [
            product(equation, query, key, preferred_element_type=jnp.float32) * scale
            for equation, key in zip(equations, keys, strict=False)
        ]
        scores[0] = jnp.where(visible[:, None, None, :, None], scores[0], -jnp.inf)
        sizes = np.cumsum([x.shape[-1] for x in scores])[:-1]
        probs = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(query.dtype)
        backwards = ("bkhugt,btkd->bugkhd", "bkhugm,bumkd->bugkhd")
        parts = zip(backwards, jnp.split(probs, sizes, axis=-1), values, strict=False)
        return sum(product(equation, share, value) for equation, share, value in parts)

    return attend(query, keys, values, visible).reshape(shape)


def forward(model: Decoder, batch: Batch) -> Float[Array, "b t e"]:
    """Final hidden states of packed sequences; no segment attends to another."""
    return forward_with_taps(model, batch, ())[0]


def forward_with_taps(
    model: Decoder, batch: Batch, taps: tuple[int, ...]
) -> tuple[Float[Array, "b t e"], tuple[Float[Array, "r e"], ...]]:
    """Final hidden states as from `forward`, and those of all tokens in the layers `taps`."""
    tokens, segment_ids, positions = batch
    count, length = tokens.shape
    starts = length * jnp.arange(count, dtype=jnp.int32)
    rows = PackedRows(
        segment_ids.reshape(-1), positions.reshape(-1), starts, jnp.full_like(starts, length)
    )
    out = model(
        tokens.reshape(-1),
        rows,
        model.init_cache(count, 0),
        attention=packed_attention,
        max_rows_per_sample=length,
        taps=taps,
    )
    return out.hidden.reshape(count, length, -1), out.taps


def sum_of_losses(
    model: nnx.Module, loss: Callable, rows: Sequence[Any], target: Any, vocab_size: int
) -> Float[Array, ""]:
    """The sum of loss(model, hidden, target, *others) over parts of the rows.

    Args:
        model: what the loss reads of it lies outside of its layers, such as the head.
        loss: makes logits of every vector in `hidden`, its first array.
        rows: `hidden`, [b, n, ..., e], and the others, [b, n, ...] or None, that are cut into equal
            parts along n.
        target: passed on as it is; neither it nor the others have gradients.
        vocab_size: logits of each vector.
    """
    graph, layers, head = nnx.split(model, nnx.PathContains("layers"), ...)
    count, length, *inner, _ = rows[0].shape
    num = parts(length, 4 * count * math.prod(inner) * vocab_size)
    split = lambda x: x.reshape(count, num, -1, *x.shape[2:]).swapaxes(0, 1)
    hidden, *others = jax.tree.map(split, rows)
    of_part = lambda head, *arguments: loss(nnx.merge(graph, layers, head), *arguments)
    return _sum_over_parts(of_part)(head, hidden, target, others)


def _sum_over_parts(loss: Callable) -> Callable:
    """A function total(params, x, fixed, others), the sum of loss(params, x[i], fixed, *others[i]).

    Gradients with respect to `params` and `x` are computed together with the values, so
    intermediate values of `loss` are neither stored nor recomputed.
    """

    def forward(params, x, fixed, others):
        def add(sums, part):
            x, others = part
            value_and_gradients = jax.value_and_grad(loss, argnums=(0, 1))
            value, (of_params, of_x) = value_and_gradients(params, x, fixed, *others)
            of_params = jax.tree.map(lambda x: x.astype(jnp.float32), of_params)
            return jax.tree.map(jnp.add, sums, (value, of_params)), of_x

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        (value, of_params), of_x = lax.scan(add, (jnp.zeros(()), zeros), (x, others))
        of_params = jax.tree.map(lambda sum, x: sum.astype(x.dtype), of_params, params)
        return value, (of_params, of_x)

    def backward(gradients, cotangent):
        return (*jax.tree.map(lambda x: cotangent.astype(x.dtype) * x, gradients), None, None)

    total = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    total.defvjp(forward, backward)
    return total


def parts(length: int, bytes_per_token: int) -> int:
    """Number of equal parts into which the tokens of a sequence are split."""
    fitting = (n for n in range(1, length) if length * bytes_per_token <= n * LOGIT_BYTES)
    return next((n for n in fitting if length % n == 0), length)
