"""Plans the memory of a run, in bytes, before anything is allocated.

The sizes come from tracing the model for its shapes.
"""

import bisect
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from emsjax.decode.base import Model
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import chunk_rows, prompt_row_counts, row_buckets
from emsjax.device import (
    available_bytes,
    available_host_bytes,
    device_bytes,
    is_of_one_process,
    readable,
    tree_bytes,
)
from pallas_kernels.attention.xla import MOST_SCORES


class Sizes(NamedTuple):
    """Sizes of a model's packed rows and cached tokens, each on one device.

    Attributes:
        row_bytes: bytes of one packed row: its queries, keys and values in all layers, and its
            activations.
        token_bytes: bytes of one cached token in all layers.
        layer_token_bytes: bytes of one cached token in one layer.
        query_heads: query heads of a layer.
    """

    row_bytes: int
    token_bytes: int
    layer_token_bytes: int
    query_heads: int


LOGIT_ROWS = 256  # most rows that get logits at a time where given tokens are scored
MOST_SLOTS = 1 << 16  # samples decoded at once; more are certain to be a mistake

_known: dict[Any, Sizes] = {}  # cached, as tracing takes longer than the rest of a plan


def sizes_of(model: Model) -> Sizes:
    """Traces one row, once per architecture, to find the sizes; nothing is computed."""
    formats = (getattr(model, name, None) for name in ("quantization", "kv_dtype", "parallel"))
    kind = (type(model), model.config, jnp.dtype(model.dtype), *formats)
    if kind in _known:
        return _known[kind]

    def trace(model: Model):
        cache, one = model.init_cache(1, 1), jnp.ones(1, jnp.int32)
        out = model(one, pack(cache.lengths, one, 1), cache, attention=_attend_to_nothing)
        return out.fresh, [jax.tree.leaves(layer) for layer in cache.layers]

    fresh, layers = jax.eval_shape(trace, model)
    parallel = getattr(model, "parallel", None)
    devices = 1 if parallel is None else parallel.size  # that have different heads
    query_heads = (fresh[0].shape[1] - 2 * layers[0][0].shape[2]) // devices
    row_bytes = tree_bytes(fresh) // devices + model.row_bytes
    of_layers = (tree_bytes(layers) // devices, tree_bytes(layers[0]) // devices)
    _known[kind] = Sizes(row_bytes, *of_layers, query_heads)
    return _known[kind]


def _attend_to_nothing(query, *rest, **options):
    """Stands in for attention while tracing; its output has the right shape."""
    return query


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run of `slots` samples of up to `max_len` tokens needs on each device.

    Attributes:
        weights: the target's weights; a draft model's weights are not counted.
        caches: keys and values of all slots.
        prefill_chunk: additional memory of one prefill chunk.
        logits: a step's logits, and everything else that is proportional to its rows.
        attention: buffers of one layer's attention.
        drafter: the drafter's state for all slots.
        processors: the states of logits processors for all slots, and a step's changed logits.
    """

    weights: int
    caches: int
    prefill_chunk: int
    logits: int
    attention: int
    drafter: int = 0
    processors: int = 0

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
        processor_bytes_per_slot: int | None = None,
        refilled: bool = False,
    ) -> "MemoryPlan":
        """Plans `slots` decode slots, filled from `prompt_slots` prefilled prompts.

        Args:
            model: the target; an abstract one from `nnx.eval_shape` is enough.
            slots: samples decoded at once.
            prompt_slots: prompts that the samples belong to; there are fewer prompts than slots
                with several sequences per prompt.
            max_len: tokens of the longest sample, including the prompt.
            max_draft_tokens: draft tokens per sample and step; 0: plain decoding.
            drafter_bytes_per_slot: the drafter's `state_bytes`.
            processor_bytes_per_slot: bytes of the processors' states; None: there are none.
            refilled: whether steps feed prompts as well as drafts.
        """
        sizes = sizes_of(model)
        # The prompts' caches and the copies for further sequences exist at the same time.
        cached = slots if prompt_slots == slots else slots + prompt_slots
        chunk = chunk_rows(prompt_slots, max_len)
        k1 = max_draft_tokens + 1
        rows = row_buckets(slots, k1)[-1]
        fed = prompt_row_counts(slots, k1, max_len)[-1] if refilled else rows
        scores = fed * sizes.query_heads * max_len * 4
        logits, processors = rows * model.config.vocab_size * 4, 0
        if processor_bytes_per_slot is not None:
            processors = logits + 2 * slots * processor_bytes_per_slot  # those of fresh slots too
        return cls(
            weights=device_bytes(model),
            caches=cached * max_len * sizes.token_bytes,
            prefill_chunk=chunk * sizes.row_bytes,
            # The logits and their log-softmax, then the step's fresh rows and activations.
            logits=2 * logits + fed * sizes.row_bytes,
            # The XLA implementation was observed to hold one layer's keys and values, masked
            # and transposed, and three copies of its scores.
            attention=2 * slots * max_len * sizes.layer_token_bytes + 3 * scores,
            drafter=cached * drafter_bytes_per_slot,
            processors=processors,
        )

    @property
    def total(self) -> int:
        """Total bytes; prefill and verification never overlap, so the larger one counts."""
        step = max(self.prefill_chunk, self.logits)
        state = self.caches + self.drafter + self.processors
        return self.weights + state + self.attention + step

    def describe(self) -> str:
        """Returns the total and its parts as text."""
        parts = [
            ("weights", self.weights),
            ("KV caches", self.caches),
            ("prefill chunk", self.prefill_chunk),
            ("logits", self.logits),
            ("attention", self.attention),
            ("drafter", self.drafter),
        ]
        if self.processors:
            parts.append(("logits processors", self.processors))
        listed = ", ".join(f"{name} {readable(size)}" for name, size in parts)
        return f"{readable(self.total)} ({listed})"


def check_fits(
    model: Model,
    *,
    slots: int,
    prompt_slots: int,
    refilled: bool = False,
    device: jax.Device | None = None,
    weights: Any = None,
    **sizes: int,
) -> MemoryPlan:
    """Plans a run for which the target's and the drafter's weights are loaded already.

    Args:
        model: the target.
        slots, prompt_slots, refilled, sizes: as for `MemoryPlan.for_run`.
        device: the device to run on; None: the default device.
        weights: the target's arrays, as flattening a model takes about a millisecond; None: they
            are those of `model`.

    Raises:
        ValueError: the run does not fit; the message gives the total and the largest batch size
            that fits. Or there are more than `MOST_SLOTS` slots.
    """
    if slots > MOST_SLOTS:
        raise ValueError(
            f"batch_size, or num_sequences without it, must be at most {MOST_SLOTS} sequences "
            f"that are decoded at once, not {slots}"
        )

    def plan(slots: int, prompt_slots: int, refilled: bool) -> MemoryPlan:
        counts = {"slots": slots, "prompt_slots": prompt_slots}
        return MemoryPlan.for_run(model, **counts, refilled=refilled, **sizes)

    available = _available(model if weights is None else weights, device)
    wanted = plan(slots, prompt_slots, refilled)
    fits = lambda plan: available is None or plan.total - plan.weights <= available
    if fits(wanted):
        return wanted
    # A smaller batch size has fewer slots than sequences, so its slots are refilled.
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


def forest_fits(model: Model, rows: int, device: jax.Device | None) -> bool:
    """Whether a call that feeds this many rows without a cache fits, all of them one bin."""
    sizes, available = sizes_of(model), _available(model, device)
    logits = 2 * LOGIT_ROWS * model.config.vocab_size * 4
    # Three copies of the scores of all heads: see `MemoryPlan`.
    attention = 3 * sizes.query_heads * min(rows * rows, MOST_SCORES) * 4
    needed = rows * sizes.row_bytes + logits + attention
    return available is None or needed <= available


def _available(weights: Any, device: jax.Device | None) -> int | None:
    """Free memory of the devices of these arrays, the least if several processes decide alike."""
    own = available_bytes(device)
    if own is None or is_of_one_process(weights):
        return own
    return int(process_allgather(np.float32(own)).min())


def check_results_fit(name: str, each: int, total_sequences: int, max_len: int) -> None:
    """Checks that the tokens and log-probabilities of all sequences fit into the host's memory.

    Args:
        name: the argument that gives their number, by prompt.
        each: its value.

    Raises:
        ValueError: they do not.
    """
    # Those in the slots' layout, their copy as one array, and the output.
    needed, available = 3 * total_sequences * max_len * 8, available_host_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"{name} {each}, {total_sequences} sequences in all, has results of "
            f"{readable(needed)}, but only {readable(available)} of the host's memory are free: "
            "emsjax.stream yields them one by one"
        )
