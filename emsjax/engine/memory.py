"""Bytes of a run, computed before anything is allocated."""

import bisect
import dataclasses
import os

import jax
import jax.numpy as jnp

from emsjax.decode.cache import BRANCHES_COMMIT
from emsjax.decode.row_counts import chunk_rows, prompt_row_counts, row_buckets
from emsjax.models.config import POSITION_OFFSET, OPTConfig


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a run of `slots` samples of up to `max_len` tokens needs, in bytes.

    Attributes:
        weights: of the target; a draft model's are not counted.
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
        config: OPTConfig,
        dtype,
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
            config: of the target.
            dtype: of its weights, activations and caches.
            slots: samples decoded at once.
            prompt_slots: prompts that they belong to; fewer with several sequences per prompt.
            max_len: tokens of the longest sample, prompt included.
            max_draft_tokens: of a sample and step; 0: plain decoding.
            drafter_bytes_per_slot: what the drafter's `state_bytes` says.
            refilled: steps feed prompts beside drafts.
        """
        item, size = jnp.dtype(dtype).itemsize, config.hidden_size
        per_token = 2 * config.num_hidden_layers * size * item
        fresh = 3 * per_token // 2  # queries as well
        copied = 0 if BRANCHES_COMMIT else per_token
        # The prompts' caches and their fork to more sequences exist side by side.
        cached = slots if prompt_slots == slots else slots + prompt_slots
        chunk = chunk_rows(prompt_slots, max_len)
        residual_stream = 3 * size * 4  # float32: before and after an addition, what is added
        activations = residual_stream + (3 * size + config.ffn_dim) * item
        k1 = max_draft_tokens + 1
        rows = row_buckets(slots, k1)[-1]
        fed = prompt_row_counts(slots, k1, max_len)[-1] if refilled else rows
        layer = slots * max_len * 2 * size * item
        scores = fed * config.num_attention_heads * max_len * 4
        return cls(
            weights=weight_bytes(config, dtype),
            caches=cached * max_len * per_token,
            prefill_chunk=chunk * (fresh + activations),
            # Logits, their log-softmax, the step's fresh rows, any copy of their K/V, activations.
            logits=rows * 2 * config.vocab_size * 4 + fed * (fresh + copied + activations),
            # One layer's keys and values, masked and transposed, and its scores, three
            # times over: what the XLA implementation was seen to hold.
            attention=2 * layer + 3 * scores,
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
    config: OPTConfig,
    dtype,
    *,
    slots: int,
    prompt_slots: int,
    max_len: int,
    max_draft_tokens: int,
    drafter_bytes_per_slot: int = 0,
    refilled: bool = False,
    device: jax.Device | None = None,
) -> MemoryPlan:
    """The plan of a run whose weights are loaded already; the drafter's own are too.

    Args:
        device: that it is to run on; None: the default device.

    Raises:
        ValueError: it does not fit; names the sum and the largest batch that does.
    """

    def plan(slots: int, prompt_slots: int, refilled: bool) -> MemoryPlan:
        return MemoryPlan.for_run(
            config,
            dtype,
            slots=slots,
            prompt_slots=prompt_slots,
            max_len=max_len,
            max_draft_tokens=max_draft_tokens,
            drafter_bytes_per_slot=drafter_bytes_per_slot,
            refilled=refilled,
        )

    wanted, available = plan(slots, prompt_slots, refilled), available_bytes(device)
    fits = lambda plan: available is None or plan.total - plan.weights <= available
    if fits(wanted):
        return wanted
    # With fewer slots than sequences these are refilled.
    too_many = lambda slots: not fits(plan(slots, slots, refilled=True))
    largest = bisect.bisect_left(range(1, slots), True, key=too_many)
    raise ValueError(
        f"batch_size {slots} with max_len {max_len} needs {wanted.describe()}, but only "
        f"{readable(available)} are free beside the weights; "
        + (
            f"the largest batch_size that fits is {largest}"
            if largest
            else "not even batch_size 1 fits"
        )
    )


def check_weights_fit(config: OPTConfig, dtype) -> None:
    """To be called before weights are loaded.

    Raises:
        ValueError: the device has no room for them.
    """
    needed, available = weight_bytes(config, dtype), available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"the model's weights need {readable(needed)} in {jnp.dtype(dtype).name}, but only "
            f"{readable(available)} are free"
        )


def weight_bytes(config: OPTConfig, dtype) -> int:
    """Bytes of the model's weights."""
    size, ffn, width = config.hidden_size, config.ffn_dim, config.word_embed_proj_dim
    biases, affine = int(config.enable_bias), int(config.layer_norm_elementwise_affine)
    layer = 4 * size * (size + biases) + 2 * size * ffn + biases * (size + ffn) + affine * 4 * size
    count = config.num_hidden_layers * layer + config.vocab_size * width
    count += (config.max_position_embeddings + POSITION_OFFSET) * size
    count += 2 * width * size if config.has_projections else 0
    count += affine * 2 * size if config.has_final_layer_norm else 0
    return count * jnp.dtype(dtype).itemsize


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Free memory of a device, or of the default one; None where it cannot be told."""
    device = device or jax.config.jax_default_device
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.local_devices(backend=device)[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        # A reserve for fragmentation and for the libraries' own workspaces.
        return int(0.98 * stats["bytes_limit"]) - stats["bytes_in_use"]
    if device.platform == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return _available_host_bytes()
    return None


def _available_host_bytes() -> int:
    """What the system can hand out, file caches included where it says so."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def readable(size: int) -> str:
    """Bytes with a binary unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
