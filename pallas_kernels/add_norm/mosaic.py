"""Residual addition, over devices as well, and normalisation as one Pallas Mosaic GPU kernel.

Every device puts its part of a row where the others can read it, tells them so, waits until they
have done the same, reads their parts over NVLink, adds all of them up in the devices' order and
normalises the sum. For few rows this takes one launch in place of a collective operation between
two.

There are two slots, which calls use in turn, and parts that are there are counted. So nothing has
to be cleared and no device has to wait for another one's reading: a device fills the slot again in
the call after the next, when it has been told of the next call's parts, and the others told it so
after they had read this call's.

A thread block owns one row, which its threads keep in their registers.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.xla import Norm

THREADS = 128  # of a block
MOST_NUMBERS = 128  # of a row, for each thread
LONGEST_LOADS = (8, 4, 2, 1)  # numbers that a thread reads at once
MOST_ROWS = 256
# Most rows whose parts are sent in float32: products of few rows come in shares, whose sum has not
# been rounded. Products of more rows are numbers in 16 bits.
MOST_WIDE_ROWS = 64
MULTIPLE, MOST_SIZE = THREADS, THREADS * MOST_NUMBERS  # of a row
TAKES = f"at most {MOST_ROWS} rows of at most {MOST_SIZE} numbers, a multiple of {MULTIPLE},"
LANES = plgpu.LoweringSemantics.Lane


def takes(rows: int, size: int) -> bool:
    """Whether the kernel is made for so many rows of this size."""
    return size % MULTIPLE == 0 and size <= MOST_SIZE and rows <= MOST_ROWS


class Buffers(NamedTuple):
    """A device's memory that the calls of a program share.

    Attributes:
        parts: this device's parts, [2, rows, size].
        ready: how many parts of each row others had ready, int32 [rows].
        calls: how many calls there were for each row, int32 [rows].
    """

    parts: Any
    ready: Any
    calls: Any

    @classmethod
    def meet(cls, axis_name: str, shape: tuple[int, int], dtype) -> "Buffers":
        """Buffers for terms of a shape, which all devices have when the program goes on."""
        dtype = jnp.float32 if shape[0] <= MOST_WIDE_ROWS else dtype
        none = jnp.zeros(shape[:1], jnp.int32)
        buffers = cls(*map(jax.new_ref, (jnp.zeros((2, *shape), dtype), none, none)))
        # A kernel that uses the memory of others begins when all devices are ready to.
        plgpu.kernel(
            functools.partial(_touch, axis_name=axis_name),
            out_type=[],
            grid=(1,),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=LANES),
            kernel_name="meet_devices",
        )(*buffers)
        return buffers


def _touch(parts_ref, ready_ref, calls_ref, *, axis_name: str):
    numbers = jnp.zeros(MULTIPLE, parts_ref.dtype)
    numbers = plgpu.layout_cast(numbers, plgpu.Layout.WG_STRIDED((MULTIPLE,), vec_size=1))
    for device in range(lax.axis_size(axis_name)):
        parts = plgpu.remote_ref(parts_ref, (jnp.int32(device),))
        parts[0, 0, pl.ds(0, MULTIPLE)] = numbers


@functools.partial(jax.jit, static_argnames=("norm", "axis_name", "interpret"))
def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]: this device's part
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    buffers: Buffers | tuple,
    *,
    norm: Norm,
    axis_name: str,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`.

    Interpret mode knows no other device's memory: there, parts are gathered first, and there are no
    buffers.
    """
    static = {"norm": norm, "axis_name": None if interpret else axis_name}
    outputs = plgpu.kernel(
        functools.partial(_kernel, names=tuple(vectors), **static),
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (x.dtype, norm.dtype)],
        grid=x.shape[:1],
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANES, skip_device_barrier=True),
        kernel_name="sum_add_layer_norm" if norm.centred else "sum_add_rms_norm",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, lax.all_gather(y, axis_name) if interpret else y, *vectors.values(), *buffers)
    return tuple(outputs)


def _kernel(
    x_ref,  # [rows, size]
    y_ref,  # [rows, size], or [shares, rows, size]; [devices, ...] without the name of an axis
    *refs,  # vectors [size]; with the name of an axis, buffers; total and out [rows, size]
    names: tuple[str, ...],
    norm: Norm,
    axis_name: str | None,
):
    vectors, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    total_ref, out_ref = refs[-2:]
    row, size = lax.axis_index("row"), x_ref.shape[1]
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

    def part_of(ref):
        shares = range(ref.shape[0]) if len(ref.shape) == 3 else None
        at = lambda piece: [(row, piece)] if shares is None else [(n, row, piece) for n in shares]
        return [add(wide(load(ref, *place) for place in at(piece))) for piece in pieces]

    if axis_name is None:
        parts = [part_of(y_ref.at[device]) for device in range(y_ref.shape[0])]
        receive = lambda: parts
    else:
        receive = _share(part_of(y_ref), Buffers(*refs[:3]), row, pieces, load, axis_name)
    # All that is read is asked for before the others' parts are waited for.
    x = [load(x_ref, row, piece) for piece in pieces]
    loaded = {name: [load(ref, piece) for piece in pieces] for name, ref in vectors.items()}
    plus = lambda x, name: list(map(jnp.add, x, wide(loaded[name]))) if name in loaded else x
    y = [add(parts) for parts in zip(*receive(), strict=True)]
    if "y_scale" in loaded:
        y = normalised(plus(y, "y_bias"), loaded["y_scale"])
    total = list(map(jnp.add, wide(x), y))
    total = total if "y_scale" in loaded else plus(total, "y_bias")
    total = [piece.astype(total_ref.dtype) for piece in total]
    out = plus(normalised(wide(total), loaded.get("scale")), "bias")
    for piece, one, other in zip(pieces, total, out, strict=True):
        total_ref[row, piece] = one
        out_ref[row, piece] = other.astype(out_ref.dtype)


def _share(part, buffers: Buffers, row, pieces, load, axis_name: str):
    """Puts this device's part of a row, in pieces, where the others can read it.

    Returns:
        A function that waits for the others' parts and returns those of all devices, in float32.
    """
    own, devices = lax.axis_index(axis_name), range(lax.axis_size(axis_name))
    call = buffers.calls[row]
    # As the others read it.
    part = [piece.astype(buffers.parts.dtype) for piece in part]
    for piece, numbers in zip(pieces, part, strict=True):
        buffers.parts[call % 2, row, piece] = numbers

    def tell(device):
        _signal(plgpu.remote_ref(buffers.ready, (device,)).at[pl.ds(row, 1)])

    for device in devices:
        pl.when(own != device)(functools.partial(tell, jnp.int32(device)))

    def receive():
        _wait(buffers.ready.at[pl.ds(row, 1)], (call + 1) * (len(devices) - 1))
        buffers.calls[row] = call + 1
        of_devices = [plgpu.remote_ref(buffers.parts, (jnp.int32(device),)) for device in devices]
        return [
            [load(parts, call % 2, row, piece).astype(jnp.float32) for piece in pieces]
            for parts in of_devices
        ]

    return receive


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def _signal(ctx, ref):
    """Counts one, when all threads of the block have written."""
    utils.warpgroup_barrier()
    utils.SemaphoreRef(utils.memref_ptr(ref)).signal(1)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
def _wait(ctx, ref, count):
    """Waits until so many have been counted in all; what was written before is seen then."""
    semaphore, (count,) = utils.SemaphoreRef(utils.memref_ptr(ref)), count.registers.flat
    semaphore.wait(count, decrement=False)
