"""Residual addition, over devices as well, and normalisation as one Pallas Mosaic GPU kernel.

Every device reads the parts of the others, over NVLink, adds all parts up in the devices' order and
normalises the sum. For few rows this takes one launch and one exchange of signals in place of a
collective operation between two launches.

A thread block owns some rows, and keeps one of them in its threads' registers. It ends when its
neighbours on the other devices have read the rows that they share: what the part is in may then
be written again.
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
BLOCKS = 128  # at most: all of them must run at the same time
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
    blocks = min(x.shape[0], BLOCKS)
    static = {"names": tuple(vectors), "norm": norm, "blocks": blocks}
    static |= {"axis_name": None if interpret else axis_name}
    outputs = plgpu.kernel(
        functools.partial(_kernel, **static),
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (x.dtype, norm.dtype)],
        grid=(blocks,),
        grid_names=("block",),
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
    blocks: int,
):
    vectors, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    total_ref, out_ref = refs[:2]
    rows, size = x_ref.shape
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

    def load(ref, *at):
        return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(jnp.float32)

    def vector(name, piece):
        return load(vectors[name], piece) if name in vectors else 0

    def normalised(x, scale: str):
        if norm.centred:
            mean = add([jnp.sum(part) for part in x]) / size
            x = [part - mean for part in x]
        factor = lax.rsqrt(add([jnp.sum(part * part) for part in x]) / size + norm.epsilon)
        scales = (vector(scale, piece) + norm.offset for piece in pieces)
        x = [part * factor for part in x]
        return [a * b for a, b in zip(x, scales, strict=True)] if scale in vectors else x

    def sum_of_parts(row, piece):
        of = lambda part: (
            load(part, row, piece)
            if shares is None
            else add([load(part, share, row, piece) for share in shares])
        )
        return add([of(part) for part in parts])

    def of_row(row):
        y = [sum_of_parts(row, piece) for piece in pieces]
        if "y_scale" in vectors:
            y = [part + vector("y_bias", piece) for part, piece in zip(y, pieces, strict=True)]
            y = normalised(y, "y_scale")
        totals = []
        for part, piece in zip(y, pieces, strict=True):
            total = load(x_ref, row, piece) + part
            total = total if "y_scale" in vectors else total + vector("y_bias", piece)
            total_ref[row, piece] = total.astype(total_ref.dtype)
            totals.append(total.astype(total_ref.dtype).astype(jnp.float32))
        for out, piece in zip(normalised(totals, "scale"), pieces, strict=True):
            out_ref[row, piece] = (out + vector("bias", piece)).astype(out_ref.dtype)

    block = lax.axis_index("block")

    def step(i, carry):
        row = block + i * blocks
        pl.when(row < rows)(lambda: of_row(row))
        return carry

    lax.fori_loop(0, pl.cdiv(rows, blocks), step, None)
    if axis_name is not None:
        _wait_for_readers(refs[2], axis_name, devices)


def _wait_for_readers(semaphore, axis_name: str, devices: list[Array]) -> None:
    """Tells the same block of every other device that it has read, and waits for their word."""
    own = lax.axis_index(axis_name)
    for device in devices:
        signal = functools.partial(pl.semaphore_signal, semaphore, 1, device_id=(device,))
        pl.when(own != device)(signal)
    pl.semaphore_wait(semaphore, len(devices) - 1)
