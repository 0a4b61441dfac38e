"""Bytes of a run, computed before anything is allocated.

Sizes come from the model itself, by tracing it for shapes.
"""

import bisect
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from emsjax.decode.base import Model
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import chunk_rows, prompt_row_counts, row_buckets
from emsjax.device import available_bytes, readable, tree_bytes


class Sizes(NamedTuple):
    """Sizes of a model and of what it keeps of its tokens.

    Attributes:
        weight_bytes: all weights.
        row_bytes: one packed row's queries, keys and values in all layers, and its activations.
        token_bytes: one cached token in all layers.
        layer_token_bytes: one cached token in one layer.
        query_heads: heads of a layer's queries.
    """

    weight_bytes: int
    row_bytes: int
    token_bytes: int
    layer_token_bytes: int
    query_heads: int


_known: dict[Any, Sizes] = {}  # by kind of model: tracing takes longer than the rest of a plan


def sizes_of(model: Model) -> Sizes:
    """The sizes, found by tracing one row once for each architecture; nothing is computed."""
    kind = (type(model), model.config, jnp.dtype(model.dtype))
    if kind in _known:
        return _known[kind]

    def trace(model: Model):
        cache, one = model.init_cache(1, 1), jnp.ones(1, jnp.int32)
        out = model(one, pack(cache.lengths, one, 1), cache, attention=_attend_to_nothing)
        return out.fresh, [jax.tree.leaves(layer) for layer in cache.layers]

    fresh, layers = jax.eval_shape(trace, model)
    query_heads = fresh[0].shape[1] - 2 * layers[0][0].shape[2]
    row_bytes = tree_bytes(fresh) + model.row_bytes
    of_layers = (tree_bytes(layers), tree_bytes(layers[0]))
    _known[kind] = Sizes(tree_bytes(model), row_bytes, *of_layers, query_heads)
    return _known[kind]


def _attend_to_nothing(query, *rest, **options):
    """An attention for tracing: its output has the right shape."""
    return query


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a run of `slots` samples of up to `max_len` tokens needs, in bytes.

    Attributes:
        weights: the target's; a draft model's are not counted.
        caches: keys and values of all slots.
        prefill_chunk: what one call of prefill holds beside them.
        logits: those of a step, and what else it holds in proportion to its rows.
        attention: what the attention of one layer holds.
        drafter: its state, for all slots.
    """

    weights: int
    caches: int
    prefill_chunk: int
    logits: int
    attention: int
    drafter: int = 0

    @classmethod
    def for_run(
        cls,
        model: Model,
        *,
        slots: int,
        prompt_slots: int,
        max_len: int,
        max_draft_tokens: int,
        drafter_bytes_per_slot: int = 0,
        refilled: bool = False,
    ) -> "MemoryPlan":
        """Plan `slots` decode slots, filled from `prompt_slots` prefilled prompts.

        Args:
            model: the target, which may be abstract: `nnx.eval_shape` makes one.
            slots: samples decoded at once.
            prompt_slots: prompts that they belong to; fewer with several sequences per prompt.
            max_len: tokens of the longest sample, prompt included.
            max_draft_tokens: per sample and step; 0: plain decoding.
            drafter_bytes_per_slot: the drafter's `state_bytes`.
            refilled: steps feed prompts beside drafts.
        """
        sizes = sizes_of(model)
        # The prompts' caches and their fork to more sequences exist side by side.
        cached = slots if prompt_slots == slots else slots + prompt_slots
        chunk = chunk_rows(prompt_slots, max_len)
        k1 = max_draft_tokens + 1
        rows = row_buckets(slots, k1)[-1]
        fed = prompt_row_counts(slots, k1, max_len)[-1] if refilled else rows
        scores = fed * sizes.query_heads * max_len * 4
        return cls(
            weights=sizes.weight_bytes,
            caches=cached * max_len * sizes.token_bytes,
            prefill_chunk=chunk * sizes.row_bytes,
            # Logits, their log-softmax, the step's fresh rows and activations.
            logits=rows * 2 * model.config.vocab_size * 4 + fed * sizes.row_bytes,
            # One layer's keys and values, masked and transposed, and its scores, three
            # times over: what the XLA implementation was seen to hold.
            attention=2 * slots * max_len * sizes.layer_token_bytes + 3 * scores,
            drafter=cached * drafter_bytes_per_slot,
        )

    @property
    def total(self) -> int:
        """Bytes of all; prefill and verification follow one another, so the larger counts."""
        step = max(self.prefill_chunk, self.logits)
        return self.weights + self.caches + self.drafter + self.attention + step

    def describe(self) -> str:
        """The sum and its parts, as text."""
        parts = [
            ("weights", self.weights),
            ("KV caches", self.caches),
            ("prefill chunk", self.prefill_chunk),
            ("logits", self.logits),
            ("attention", self.attention),
            ("drafter", self.drafter),
        ]
        listed = ", ".join(f"{name} {readable(size)}" for name, size in parts)
        return f"{readable(self.total)} ({listed})"


def check_fits(
    model: Model,
    *,
    slots: int,
    prompt_slots: int,
    refilled: bool = False,
    device: jax.Device | None = None,
    **sizes: int,
) -> MemoryPlan:
    """The plan of a run whose weights are loaded already; the drafter's own are too.

    Args:
        model: the target.
        slots, prompt_slots, refilled, sizes: as for `MemoryPlan.for_run`.
        device: that it is to run on; None: the default device.

    Raises:
        ValueError: it does not fit; names the sum and the largest batch that does.
    """

    def plan(slots: int, prompt_slots: int, refilled: bool) -> MemoryPlan:
        counts = {"slots": slots, "prompt_slots": prompt_slots}
        return MemoryPlan.for_run(model, **counts, refilled=refilled, **sizes)

    wanted, available = plan(slots, prompt_slots, refilled), available_bytes(device)
    fits = lambda plan: available is None or plan.total - plan.weights <= available
    if fits(wanted):
        return wanted
    # With fewer slots than sequences these are refilled.
    too_many = lambda slots: not fits(plan(slots, slots, refilled=True))
    largest = bisect.bisect_left(range(1, slots), True, key=too_many)
    raise ValueError(
        f"batch_size {slots} with max_len {sizes['max_len']} needs {wanted.describe()}, but only "
        f"{readable(available)} are free beside the weights; "
        + (
            f"the largest batch_size that fits is {largest}"
            if largest
            else "not even batch_size 1 fits"
        )
    )
