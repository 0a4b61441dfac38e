"""Training that survives a kill at any moment, with orbax."""

import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from emsjax.distillation.sequences import PackedSequences
from emsjax.distillation.training import Trainer, TrainState
from emsjax.models.opt import OPT

REPORT_SECONDS = 5.0


class Checkpoints:
    """The newest states of a training run, each whole or not there.

    Args:
        folder: of its own; made if it is not there.
    """

    def __init__(self, folder: str | PathLike):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)

    def save(self, step: int, state: TrainState, losses: list[float]) -> None:
        """Keep the state after `step` steps, and their losses."""
        saved = {"state": state, "losses": np.asarray(losses, np.float32)}
        self.manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, like: TrainState) -> tuple[int, TrainState, list[float]]:
        """The newest step, its state and the losses so far; `like` and none at the start."""
        step = self.manager.latest_step()
        if step is None:
            return 0, like, []
        abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        wanted = {
            "state": jax.tree.map(abstract, like),
            "losses": jax.ShapeDtypeStruct((step,), np.float32),
        }
        saved = self.manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return step, saved["state"], np.asarray(saved["losses"]).tolist()

    def close(self) -> None:
        """Wait for what is being written."""
        self.manager.close()


def train(
    trainer: Trainer,
    sequences: PackedSequences,
    steps: int,
    *,
    checkpoints: Checkpoints | None = None,
    every: int = 500,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[OPT, np.ndarray]:
    """The trained model, float32, and the losses [steps] before each step.

    Args:
        trainer: what is trained, and how.
        sequences: anything that holds a `Batch` for each step.
        steps: of the whole training, those before the newest checkpoint included.
        checkpoints: training goes on from the newest, and its result is that of a run that was
            never stopped; None: nothing is kept.
        every: steps between two checkpoints.
        say: is told how far training has come, every few seconds.

    Raises:
        ValueError: the newest checkpoint has more steps.
    """
    state, losses, first = trainer.initial(), [], 0
    if checkpoints is not None:
        first, state, losses = checkpoints.restore(state)
        if first > steps:
            raise ValueError(f"steps must be at least {first}, those of the checkpoint: {steps}")
    # Not fetched one by one: the device need not wait.
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
            seconds = max(time.monotonic() - begin, 1e-9)
            say(
                f"step {done}/{steps}, loss {float(loss):.4f}, {tokens / seconds:.0f} tokens/s, "
                f"{seconds / max(step - first, 1) * (steps - done):.0f} s left"
            )
            reported = time.monotonic()
        if checkpoints is not None and (done % every == 0 or done == steps):
            losses, new = [*losses, *map(float, jax.device_get(new))], []
            checkpoints.save(done, state, losses)
    losses += map(float, jax.device_get(new))
    return trainer.model(state), np.array(losses, np.float32)
