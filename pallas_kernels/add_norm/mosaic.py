"""Residual addition, over devices as well, and normalisation as one Pallas Mosaic GPU kernel.

Every device reads the parts of the others, over NVLink, adds all parts up in the devices' order and
normalises the sum. For few rows this takes one launch and one exchange of signals in place of a
collective operation between two launches.

A thread block owns one row, which its threads keep in their registers. It ends when the same block
of every other device has read this device's part of the row, which may be written again then.
"""

import functools
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
TAKES = f"at most {MOST_ROWS} rows of at most {MOST_SIZE} numbers, a multiple of {MULTIPLE},"


def takes(x: Array) -> bool:
    """Whether the kernel is made for rows of this size and so many of them."""
    rows, size = x.shape
    return size % MULTIPLE == 0 and size <= MOST_SIZE and rows <= MOST_ROWS


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

    Interpret mode knows no other device's memory: there, parts are gathered first.
    """
    static = {"norm": norm, "axis_name": None if interpret else axis_name}
    outputs = plgpu.kernel(
        functools.partial(_kernel, names=tuple(vectors), **static),
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (x.dtype, norm.dtype)],
        grid=x.shape[:1],
        grid_names=("row",),
        scratch_types=[] if interpret else [plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="sum_add_layer_norm" if norm.centred else "sum_add_rms_norm",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, lax.all_gather(y, axis_name) if interpret else y, *vectors.values())
    return tuple(outputs)


def _kernel(
    x_ref,  # [rows, size]
    y_ref,  # [rows, size], or [shares, rows, size]; [devices, ...] without the name of an axis
    *refs,  # vectors [size]; total and out [rows, size]; a semaphore
    names: tuple[str, ...],
    norm: Norm,
    axis_name: str | None,
):
    vectors, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    total_ref, out_ref = refs[:2]
    row, size = lax.axis_index("row"), x_ref.shape[1]
    length = next(n for n in LONGEST_LOADS if size % (THREADS * n) == 0)
    width = THREADS * length
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=length)
    pieces = [pl.ds(first, width) for first in range(0, size, width)]
    if axis_name is None:
        parts = [y_ref.at[device] for device in range(y_ref.shape[0])]
    else:
        devices = [jnp.int32(device) for device in range(lax.axis_size(axis_name))]
        parts = [plgpu.remote_ref(y_ref, (device,)) for device in devices]
    shares = range(parts[0].shape[0]) if len(parts[0].shape) == 3 else None
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

    def sum_of_parts(piece):
        at = [(row, piece)] if shares is None else [(share, row, piece) for share in shares]
        return add([add(wide(load(part, *place) for place in at)) for part in parts])

    # All that is read is asked for before anything is written.
    y = [sum_of_parts(piece) for piece in pieces]
    x = [load(x_ref, row, piece) for piece in pieces]
    loaded = {name: [load(ref, piece) for piece in pieces] for name, ref in vectors.items()}
    plus = lambda x, name: list(map(jnp.add, x, wide(loaded[name]))) if name in loaded else x
    if axis_name is not None:
        _signal(refs[2], axis_name, devices)
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
        pl.semaphore_wait(refs[2], len(devices) - 1)


def _signal(semaphore, axis_name: str, devices: list[Array]) -> None:
    """Tells the same block of every other device that this one has read its part."""
    own = lax.axis_index(axis_name)
    for device in devices:
        signal = functools.partial(pl.semaphore_signal, semaphore, 1, device_id=(device,))
        pl.when(own != device)(signal)
