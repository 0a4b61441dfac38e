"""The time of the parts of a step that chooses among several draft sources.

Axis legend: b = samples, n = sources.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from emsjax.decode.row_counts import chunk_rows

DRAFT_COST = 0.1  # of a step of the target: a draft model has about a tenth of its weights


@runtime_checkable
class Costs(Protocol):
    """Measured costs, as `emsjax.StepCosts` has them."""

    def step_ms(self, rows: Any, cached_tokens: Any) -> Any: ...

    def draft_step_ms(self, slots: Any) -> Any: ...


class Prices(NamedTuple):
    """The time of a step's parts, in any unit.

    Attributes:
        step: a step of the target without drafts.
        row: a draft token that the target verifies.
        draft: a draft step of each source, whatever the number of samples.
        catch_up: reading a token of a sample that a source has not read yet.
    """

    step: Float[Array, ""]
    row: Float[Array, ""]
    draft: Float[Array, "n"]
    catch_up: Float[Array, "n"]


def prices_of_step(
    costs: Costs | None,
    draft_cost: Sequence[float] | None,
    free: Sequence[bool],
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    draft_lengths: Int32[Array, "b"],
    drafted: Int32[Array, "b n"],
) -> Prices:
    """The time of the parts of a step, in ms with `costs`, otherwise in target steps.

    Args:
        costs, draft_cost: see `emsjax.Mixed`.
        free: whether drafting costs nothing, of each source.
        tokens, lengths, draft_lengths: those of the step.
        drafted: rows that each source offers.
    """
    batch, as_float = len(lengths), lambda x: x.astype(jnp.float32)
    step, row = jnp.float32(1), jnp.float32(0)
    if costs is not None:
        active = draft_lengths > 0
        cached = as_float(jnp.sum(jnp.where(active, lengths - 1, 0)))
        rows = as_float(jnp.maximum(jnp.sum(active), 1))
        more = as_float(jnp.maximum(jnp.sum(jnp.max(drafted, axis=1)), 1))
        both = costs.step_ms(jnp.stack([rows, rows + more]), cached)
        step, row = both[0], jnp.maximum(both[1] - both[0], 0) / more
    chunk_size = chunk_rows(*tokens.shape)
    if costs is not None and draft_cost is None:
        draft = costs.draft_step_ms(batch)
        # A chunk of prefill costs as much as a draft step of that many samples.
        chunk = costs.draft_step_ms(chunk_size)
    else:
        draft = chunk = step * (DRAFT_COST if draft_cost is None else np.float32(draft_cost))
    of_models = lambda time: jnp.where(np.array(free), 0.0, time).astype(jnp.float32)
    return Prices(step, row, of_models(draft), of_models(chunk / chunk_size))
