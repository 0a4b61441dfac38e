"""Residual addition, over devices as well, and normalisation as one Pallas Mosaic GPU kernel.

Every device copies the parts of all devices into its shared memory, over NVLink, adds them up in
the devices' order and normalises the sum. For few rows this takes one launch and one exchange of
signals in place of a collective operation between two launches.

A thread block owns one row. All copies are on their way at once, however few threads there are.
The block ends when the same block of every other device has copied this device's part of the row,
which may be written again then.
"""

import functools
import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.xla import Norm

THREADS = 128  # of a block
MOST_NUMBERS = 128  # of a row, for each thread
LONGEST_LOADS = (8, 4, 2, 1)  # numbers that a thread reads at once
MOST_ROWS = 256
MULTIPLE, MOST_SIZE = THREADS, THREADS * MOST_NUMBERS  # of a row
SHARED_BYTES = 200 * 1024  # of a block's shared memory, for one row of all parts
# Bytes per second that a device and one of its blocks read of others, and the seconds of a launch
# that adds shares up, as the times of this kernel in steps of OPT-13b on two and four H200s (jax
# 0.11.2) give them, to one or two digits.
READ_RATE, BLOCK_READ_RATE, ADD_SECONDS = 2.0e11, 1.3e10, 1.8e-6
TAKES = (
    f"at most {MOST_ROWS} rows of at most {MOST_SIZE} numbers, a multiple of {MULTIPLE}, of which "
    f"one of all devices has at most {SHARED_BYTES // 1024} KiB,"
)


def takes(x: Array, y: Array, devices: int) -> bool:
    """Whether the kernel is made for rows of this size, so many of them and so many devices."""
    rows, size = x.shape
    fits = devices * size * y.dtype.itemsize <= SHARED_BYTES
    return size % MULTIPLE == 0 and size <= MOST_SIZE and rows <= MOST_ROWS and fits


def adds_first(y: Array, devices: int) -> bool:
    """Whether shares, [shares, rows, size], are to be added up before others read them.

    The sum is rounded to their dtype, which costs no more than rounding each of them does.
    """
    shares, rows, size = y.shape
    row_bytes = size * y.dtype.itemsize
    saved = (shares - 1) * (devices - 1) * row_bytes  # of a row
    seconds = saved * max(rows / READ_RATE, 1 / BLOCK_READ_RATE)
    return seconds > ADD_SECONDS or devices * shares * row_bytes > SHARED_BYTES


@functools.partial(jax.jit, static_argnames=("norm", "axis_name", "interpret"))
def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]: this device's part
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    *,
    norm: Norm,
    axis_name: str,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`.

    Interpret mode knows no other device's memory: there, parts are gathered first, and not copied.
    """
    devices = lax.axis_size(axis_name)
    if y.ndim == 3 and adds_first(y, devices):
        y = y.astype(jnp.float32).sum(axis=0).astype(y.dtype)
    static = {"norm": norm, "axis_name": None if interpret else axis_name}
    row_of_all = (devices, *y.shape[:-2], y.shape[-1])
    scratch = {
        "parts_ref": plgpu.SMEM(row_of_all, y.dtype),
        "came": plgpu.Barrier(num_arrivals=math.prod(row_of_all[:-1])),
        "read": plgpu.SemaphoreType.REGULAR,
    }
    outputs = plgpu.kernel(
        functools.partial(_kernel, names=tuple(vectors), **static),
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (x.dtype, norm.dtype)],
        grid=x.shape[:1],
        grid_names=("row",),
        scratch_types={} if interpret else scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="sum_add_layer_norm" if norm.centred else "sum_add_rms_norm",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, lax.all_gather(y, axis_name) if interpret else y, *vectors.values())
    return tuple(outputs)


def _kernel(
    x_ref,  # [rows, size]
    y_ref,  # [rows, size], or [shares, rows, size]; [devices, ...] without the name of an axis
    *refs,  # vectors [size]; total and out [rows, size]
    parts_ref=None,  # [devices, size], or [devices, shares, size], in shared memory
    came=None,  # barrier of the copies
    read=None,  # semaphore: how many devices have copied this device's part
    names: tuple[str, ...],
    norm: Norm,
    axis_name: str | None,
):
    vectors, (total_ref, out_ref) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    row, size = lax.axis_index("row"), x_ref.shape[1]
    if axis_name is None:
        parts_ref = y_ref.at[..., row, :]
    else:
        devices = [jnp.int32(device) for device in range(lax.axis_size(axis_name))]
        for place, device in enumerate(devices):
            _copy_row(plgpu.remote_ref(y_ref, (device,)), row, parts_ref.at[place], came)
    length = next(n for n in LONGEST_LOADS if size % (THREADS * n) == 0)
    width = THREADS * length
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=length)
    pieces = [pl.ds(first, width) for first in range(0, size, width)]
    add = functools.partial(functools.reduce, jnp.add)
    load = lambda ref, *at: plgpu.load(ref.at[at], layout=layout, optimized=False)
    wide = lambda pieces: [piece.astype(jnp.float32) for piece in pieces]
    total_of = lambda pieces: jnp.sum(add(pieces))  # of all threads once, not of each piece

    def normalised(x, factors):
        if norm.centred:
            mean = total_of(x) / size
            x = [piece - mean for piece in x]
        inverse = lax.rsqrt(total_of([piece * piece for piece in x]) / size + norm.epsilon)
        x = [piece * inverse for piece in x]
        if factors is None:
            return x
        return [a * (b + norm.offset) for a, b in zip(x, wide(factors), strict=True)]

    # What does not depend on the copies is read while they are on their way.
    x = [load(x_ref, row, piece) for piece in pieces]
    loaded = {name: [load(ref, piece) for piece in pieces] for name, ref in vectors.items()}
    plus = lambda x, name: list(map(jnp.add, x, wide(loaded[name]))) if name in loaded else x
    if axis_name is not None:
        plgpu.barrier_wait(came)
        _signal(read, axis_name, devices)
    every = list(itertools.product(*map(range, parts_ref.shape[:-1])))
    y = [add(wide(load(parts_ref, *place, piece) for place in every)) for piece in pieces]
    if "y_scale" in loaded:
        y = normalised(plus(y, "y_bias"), loaded["y_scale"])
    total = list(map(jnp.add, wide(x), y))
    total = total if "y_scale" in loaded else plus(total, "y_bias")
    total = [piece.astype(total_ref.dtype) for piece in total]
    out = plus(normalised(wide(total), loaded.get("scale")), "bias")
    for piece, one, other in zip(pieces, total, out, strict=True):
        total_ref[row, piece] = one
        out_ref[row, piece] = other.astype(out_ref.dtype)
    if axis_name is not None:
        pl.semaphore_wait(read, len(devices) - 1)


def _copy_row(
    part,  # [rows, size], or [shares, rows, size]
    row,
    to_ref,  # [size], or [shares, size], in shared memory
    came,  # barrier
) -> None:
    """Begins to copy a row, with all its shares, into shared memory."""
    # In bounds a row is copied in one piece, whatever its length.
    options = {"barrier": came, "oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}
    if len(part.shape) == 2:
        plgpu.copy_gmem_to_smem(part.at[row], to_ref, **options)
    else:
        for share in range(part.shape[0]):
            plgpu.copy_gmem_to_smem(part.at[share, row], to_ref.at[share], **options)


def _signal(semaphore, axis_name: str, devices: list[Array]) -> None:
    """Tells the same block of every other device that this one has read its part."""
    own = lax.axis_index(axis_name)
    for device in devices:
        signal = functools.partial(pl.semaphore_signal, semaphore, 1, device_id=(device,))
        pl.when(own != device)(signal)
