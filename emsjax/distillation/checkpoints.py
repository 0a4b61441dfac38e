"""Training that can be killed at any moment and resumed, with orbax checkpoints."""

import math
import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from emsjax.checks import INT32_MAX, check_at_least
from emsjax.configured import configured
from emsjax.distillation.finite import NonFiniteError, check_finite
from emsjax.distillation.sequences import PackedSequences
from emsjax.distillation.training import Trainer, TrainState
from emsjax.records.reading import in_one_line

REPORT_SECONDS = 5.0


class Checkpoints:
    """The newest states of a training run, each of which is written atomically.

    Args:
        folder: a folder for the checkpoints only, created if it does not exist.
    """

    def __init__(self, folder: str | PathLike):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)

    def save(self, step: int, state: TrainState, losses: list[float]) -> None:
        """Save the state after `step` steps and the losses of these steps."""
        saved = {"state": state, "losses": np.asarray(losses, np.float32)}
        self.manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, like: TrainState) -> tuple[int, TrainState, list[float]]:
        """The newest step, its state and the losses so far; (0, `like`, []) if there is none.

        Raises:
            ValueError: the newest checkpoint cannot be read, or is one of another model.
        """
        step = self.manager.latest_step()
        if step is None:
            return 0, like, []
        abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        wanted = {
            "state": jax.tree.map(abstract, like),
            "losses": jax.ShapeDtypeStruct((step,), np.float32),
        }
        with in_one_line(f"the checkpoint {self.manager.directory / str(step)} cannot be used"):
            saved = self.manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return step, saved["state"], np.asarray(saved["losses"]).tolist()

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        self.manager.close()


@configured
def train(
    trainer: Trainer,
    sequences: PackedSequences,
    steps: int,
    *,
    checkpoints: Checkpoints | None = None,
    every: int = 500,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[nnx.Module, np.ndarray]:
    """Train; return the model or the student's module, in float32, and the loss [steps] by step.

    Args:
        trainer: what is trained, and how.
        sequences: `sequences[step]` is the `Batch` of a step.
        steps: steps of the whole training, including those before the newest checkpoint.
        checkpoints: training resumes from the newest one, with the result of a run that was never
            interrupted; None to save nothing.
        every: steps between two checkpoints.
        say: called with a line about the progress every few seconds.

    Raises:
        ValueError: the newest checkpoint has more steps, or a number is out of range.
        NonFiniteError: a loss, a gradient or a parameter is not finite, as at too high a learning
            rate. Losses are checked when they are reported and everything before it is saved, so
            the newest checkpoint is from before that step.
    """
    steps = check_at_least("steps", steps, 0, INT32_MAX)
    every = check_at_least("every", every, 1)
    state, losses, first = trainer.initial(), [], 0
    if checkpoints is not None:
        first, state, losses = checkpoints.restore(state)
        if first > steps:
            raise ValueError(f"steps must be at least {first}, as in the checkpoint, not {steps}")
    # Losses are not fetched one by one, so that the device does not have to wait.
    new, reported, begin, tokens = [], time.monotonic(), time.monotonic(), 0
    for step in range(first, steps):
        batch = sequences[step]
        state, loss = trainer.step(state, batch)
        new.append(loss)
        if step == first:
            jax.block_until_ready(loss)
            begin = time.monotonic()  # compilation is not training
        else:
            tokens += batch.tokens.size
        done = step + 1
        if done == steps or time.monotonic() - reported > REPORT_SECONDS:
            if not math.isfinite(loss):
                fetch(new, done)
            seconds = max(time.monotonic() - begin, 1e-9)
            say(
                f"step {done}/{steps}, loss {float(loss):.4f}, {tokens / seconds:.0f} tokens/s, "
                f"{seconds / max(step - first, 1) * (steps - done):.0f} s left"
            )
            reported = time.monotonic()
        if checkpoints is not None and (done % every == 0 or done == steps):
            losses, new = [*losses, *fetch(new, done)], []
            check_finite(f"the parameters after step {done}", state)
            checkpoints.save(done, state, losses)
    losses += fetch(new, steps)
    check_finite(f"the parameters after step {steps}", state)
    return trainer.model(state), np.array(losses, np.float32)


def fetch(losses: Sequence[jax.Array], done: int) -> list[float]:
    """The values of the losses of the last steps.

    Args:
        done: number of the last of these steps, from 1.

    Raises:
        NonFiniteError: one of them is not finite.
    """
    values = list(map(float, jax.device_get(losses)))
    for step, loss in enumerate(values, start=done - len(values) + 1):
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss of step {step} or its gradient is not finite: {loss}")
    return values
