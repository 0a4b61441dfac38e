"""Training of a model on packed sequences, with the text or a target's distribution as labels.

Weights and the optimizer's state are float32; products, attention and logits are computed in the
given dtype. Sequences are distributed over the devices, each of which holds all weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from emsjax.checks import INT32_MAX, check_at_least, check_number
from emsjax.configured import configured
from emsjax.decode.pack import PackedRows
from emsjax.distillation.finite import all_finite
from emsjax.distillation.losses import check_losses, combined, needs_target
from emsjax.distillation.sequences import Batch
from emsjax.models.decoder import Decoder

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


def forward(model: Decoder, batch: Batch) -> Float[Array, "b t e"]:
    """Final hidden states of packed sequences; no segment attends to another."""
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
    )
    return out.hidden.reshape(count, length, -1)


def mean_loss(
    weights: Mapping[str, float], model: Decoder, target: Decoder | None, batch: Batch
) -> Float[Array, ""]:
    """The weighted losses, averaged over the predictions within segments.

    Logits are computed for a part of the sequences' tokens at a time.
    """
    tokens, segment_ids, _ = batch
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    predicts = jnp.pad(same, ((0, 0), (0, 1)))
    labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    hidden = forward(model, batch)
    of_target = None if target is None else forward(target, batch)
    graph, layers, head = nnx.split(model, nnx.PathContains("layers"), ...)

    def loss_of_part(head, hidden, target, of_target, labels, predicts):
        flat = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
        losses = combined(
            weights,
            nnx.merge(graph, layers, head).logits(flat(hidden)),
            labels.reshape(-1),
            None if target is None else target.logits(flat(of_target)),
        )
        return jnp.sum(jnp.where(predicts.reshape(-1), losses, 0))

    count, length = tokens.shape
    parts = _parts(length, 4 * count * model.config.vocab_size)
    split = lambda x: x.reshape(count, parts, -1, *x.shape[2:]).swapaxes(0, 1)
    hidden, *others = jax.tree.map(split, (hidden, of_target, labels, predicts))
    total = _sum_over_parts(loss_of_part)(head, hidden, target, others)
    return total / jnp.sum(predicts).astype(jnp.float32)


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


def _parts(length: int, bytes_per_token: int) -> int:
    """Number of equal parts into which the tokens of a sequence are split."""
    fitting = (n for n in range(1, length) if length * bytes_per_token <= n * LOGIT_BYTES)
    return next((n for n in fitting if length % n == 0), length)


def make_optimizer(
    steps: int, peak: float, *, warm_up: int, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipped gradients.

    Only matrices and tables have weight decay.

    Args:
        steps: steps of the whole training, after which the learning rate is a fiftieth of the peak.
        peak: the largest learning rate.
        warm_up: steps until the peak.
        weight_decay: per step, relative to the learning rate.

    Raises:
        ValueError: a number is out of range.
    """
    steps = check_at_least("steps", steps, 0, INT32_MAX - 1)
    warm_up = check_at_least("warm_up", warm_up, 0, INT32_MAX - 1)
    finite = lambda x: 0 <= x < math.inf
    peak = check_number("peak", peak, "finite and at least 0", finite)
    weight_decay = check_number("weight_decay", weight_decay, "finite and at least 0", finite)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup_steps=warm_up, decay_steps=max(steps, warm_up + 1), end_value=peak / 50
    )
    decayed = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=decayed),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training: float32 weights and the optimizer's state."""

    params: Any
    optimizer: Any


class Trainer:
    """Training steps, compiled once.

    Args:
        model: the model before training, in any dtype.
        optimizer: see `make_optimizer`.
        losses: weights by name; see `emsjax.distillation.losses`.
        target: the model whose distribution is learned; None if the losses need none.
        dtype: dtype of the computation.
        devices: devices over which sequences are distributed; None for all local ones.

    Raises:
        ValueError: a loss is unknown or needs a target that is not given, or the target has
            another vocabulary.
    """

    @configured
    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        losses: Mapping[str, float],
        *,
        target: Decoder | None = None,
        dtype=jnp.bfloat16,
        devices: Sequence[jax.Device] | None = None,
    ):
        check_losses(losses)
        if not needs_target(losses):
            target = None
        elif target is None:
            raise ValueError(f"losses {', '.join(losses)} need a target")
        elif target.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the target's vocabulary has {target.config.vocab_size} tokens, the draft's "
                f"{model.config.vocab_size}: they must be the same"
            )
        mesh = Mesh(jax.local_devices() if devices is None else devices, ("data",))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.sharded = NamedSharding(mesh, PartitionSpec("data"))
        self.devices = mesh.size
        self.optimizer = optimizer
        self.master, params = nnx.split(model.astype(jnp.float32))
        self.params = jax.device_put(params, self.replicated)
        self.target = None
        if target is not None:
            self.target = jax.device_put(target.astype(dtype), self.replicated)
        graph, loss_of = nnx.graphdef(model.astype(dtype)), functools.partial(mean_loss, losses)

        def loss_fn(params, target, batch):
            params = jax.tree.map(lambda x: x.astype(dtype), params)
            return loss_of(nnx.merge(graph, params), target, batch)

        @functools.partial(jax.jit, donate_argnames=("state",))
        def step(state: TrainState, target, batch: Batch):
            loss, gradients = jax.value_and_grad(loss_fn)(state.params, target, batch)
            # One number tells of both, so that the host has to read nothing else.
            loss = jnp.where(all_finite(gradients), loss, jnp.nan)
            updates, inner = optimizer.update(gradients, state.optimizer, state.params)
            return TrainState(optax.apply_updates(state.params, updates), inner), loss

        self._step = step

    @configured
    def initial(self) -> TrainState:
        """The state before the first step."""
        # Copies, because a step reuses the memory of the given state.
        inner = jax.device_put(self.optimizer.init(self.params), self.replicated)
        return TrainState(jax.tree.map(jnp.copy, self.params), inner)

    @configured
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Float[Array, ""]]:
        """The next state and the loss before the step; the given state's memory is reused.

        The loss is NaN if a gradient is not finite. Such steps raise no error by themselves,
        because that would make the device wait for the host.

        Raises:
            ValueError: the batch cannot be distributed equally.
        """
        if len(batch.tokens) % self.devices:
            raise ValueError(
                f"a batch of {len(batch.tokens)} sequences cannot be distributed equally over "
                f"{self.devices} devices"
            )
        with jax.numpy_dtype_promotion("standard"):  # optax and jax.nn need it
            return self._step(state, self.target, jax.device_put(batch, self.sharded))

    @configured
    def model(self, state: TrainState) -> Decoder:
        """The trained model, in float32."""
        return nnx.merge(self.master, jax.tree.map(jnp.copy, state.params))
