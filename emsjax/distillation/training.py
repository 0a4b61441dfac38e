"""Training of drafters on packed sequences, with the text or a target's distribution as labels.

Weights and the optimizer's state are float32; products, attention and logits are computed in the
given dtype. Sequences are distributed over the devices, each of which holds all weights.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from emsjax.checks import INT32_MAX, check_at_least, check_number, check_seed
from emsjax.configured import configured
from emsjax.distillation.draft_model import DraftModelStudent
from emsjax.distillation.finite import all_finite
from emsjax.distillation.sequences import Batch
from emsjax.distillation.student import Student
from emsjax.models.decoder import Decoder


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
    """State of training: float32 weights, the optimizer's state, and the number of steps."""

    params: Any
    optimizer: Any
    step: Int32[Array, ""]


class Trainer:
    """Training steps, compiled once.

    Args:
        model: the drafter before training: a draft model, in any dtype, or another `Student`.
        optimizer: see `make_optimizer`.
        losses: weights by name; see `emsjax.distillation.losses`.
        target: the model whose distribution is learned; None if the losses need none.
        dtype: dtype of the computation.
        devices: devices over which sequences are distributed; None for all local ones.
        seed: seed of what a student draws at random in each step, in 0..2**32 - 1.

    Raises:
        ValueError: a loss is unknown or needs a target that is not given, the target has another
            vocabulary or does not suit the student otherwise, or `seed` is out of range.
    """

    @configured
    def __init__(
        self,
        model: Decoder | Student,
        optimizer: optax.GradientTransformation,
        losses: Mapping[str, float],
        *,
        target: Decoder | None = None,
        dtype=jnp.bfloat16,
        devices: Sequence[jax.Device] | None = None,
        seed: int = 0,
    ):
        student = model if isinstance(model, Student) else DraftModelStudent(model)
        seed = check_seed("seed", seed)
        target = student.check(losses, target)
        module = student.module
        mesh = Mesh(jax.local_devices() if devices is None else devices, ("data",))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.sharded = NamedSharding(mesh, PartitionSpec("data"))
        self.devices = mesh.size
        self.optimizer = optimizer
        self.master, params = nnx.split(module.astype(jnp.float32))
        self.params = jax.device_put(params, self.replicated)
        self.target = None
        if target is not None:
            self.target = jax.device_put(target.astype(dtype), self.replicated)
        graph = nnx.graphdef(module.astype(dtype))

        def loss_fn(params, target, batch, step):
            params = jax.tree.map(lambda x: x.astype(dtype), params)
            key = jax.random.fold_in(jax.random.key(seed), step)
            return student.loss(losses, nnx.merge(graph, params), target, batch, key)

        @functools.partial(jax.jit, donate_argnames=("state",))
        def step(state: TrainState, target, batch: Batch):
            loss, gradients = jax.value_and_grad(loss_fn)(state.params, target, batch, state.step)
            # One number tells of both, so that the host has to read nothing else.
            loss = jnp.where(all_finite(gradients), loss, jnp.nan)
            updates, inner = optimizer.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(params, inner, state.step + 1), loss

        self._step = step

    @configured
    def initial(self) -> TrainState:
        """The state before the first step."""
        # Copies, because a step reuses the memory of the given state.
        begin = (self.optimizer.init(self.params), jnp.zeros((), jnp.int32))
        inner, step = jax.device_put(begin, self.replicated)
        return TrainState(jax.tree.map(jnp.copy, self.params), inner, step)

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
    def model(self, state: TrainState) -> nnx.Module:
        """The trained model, or the student's trained module, in float32."""
        return nnx.merge(self.master, jax.tree.map(jnp.copy, state.params))
