"""Residual addition, over devices as well, and normalisation as one Pallas Mosaic GPU kernel.

Every device copies the parts of all devices into its shared memory, over NVLink, adds them up in
the devices' order and normalises the sum. For few rows this takes one launch and one exchange of
signals in place of a collective operation between two launches.

A thread block owns one row. All copies are on their way at once, however few threads there are.
The block ends when the same block of every other device has copied this device's part of the row,
which may be written again then.

With several devices and many rows, each device computes some of them only, and writes the
normalised ones into the others' memory: a row is then read once, not once by each device. The sum
stays where it was computed (see `OwnRows`). A barrier that comes before every kernel of this kind
makes sure that the others' memory may be written.
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

from pallas_kernels.add_norm.own_rows import owned
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
# Bytes per second that a device writes to others, and the seconds that pass until they know: not
# measured, but assumed.
WRITE_RATE, TELL_SECONDS = 3.5e11, 3.5e-6
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


def shares_rows(x: Array, devices: int) -> bool:
    """Whether each device is to compute some rows only, whatever the products' dtype is."""
    rows, size = x.shape
    others, row_bytes = devices - 1, 2 * size
    read_by_all = others * rows * row_bytes / READ_RATE
    once = others / devices * rows * row_bytes * (1 / READ_RATE + 1 / WRITE_RATE) + TELL_SECONDS
    wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return once < read_by_all and takes(x, wide, devices)


@functools.partial(jax.jit, static_argnames=("norm", "axis_name", "own_rows", "interpret"))
def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]: this device's part
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    *,
    norm: Norm,
    axis_name: str,
    own_rows: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`.

    Interpret mode knows no other device's memory: there, collective operations gather the parts,
    which are not copied, and distribute the rows.

    Args:
        own_rows: each device computes some rows, and has all of the normalised ones.
    """
    devices = lax.axis_size(axis_name)
    if y.ndim == 3 and adds_first(y, devices):
        y = y.astype(jnp.float32).sum(axis=0).astype(y.dtype)
    static = {"norm": norm, "axis_name": None if interpret else axis_name, "own_rows": own_rows}
    row_of_all = (devices, *y.shape[:-2], y.shape[-1])
    scratch = {
        "parts_ref": plgpu.SMEM(row_of_all, y.dtype),
        "came": plgpu.Barrier(num_arrivals=math.prod(row_of_all[:-1])),
        "told": plgpu.SemaphoreType.REGULAR,
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
    if own_rows and interpret:  # what is undefined on a GPU is not used here either
        (total, out), own = outputs, owned(len(x), axis_name)[:, None]
        outputs = jnp.where(own, total, jnp.nan), lax.psum(jnp.where(own, out, 0), axis_name)
    return tuple(outputs)


def _kernel(
    x_ref,  # [rows, size]
    y_ref,  # [rows, size], or [shares, rows, size]; [devices, ...] without the name of an axis
    *refs,  # vectors [size]; total and out [rows, size]
    parts_ref=None,  # [devices, size], or [devices, shares, size], in shared memory
    came=None,  # barrier of the copies
    told=None,  # semaphore: how many devices have told that they have what they need of this one
    names: tuple[str, ...],
    norm: Norm,
    axis_name: str | None,
    own_rows: bool,
):
    vectors, (total_ref, out_ref) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    row, size = lax.axis_index("row"), x_ref.shape[1]
    length = next(n for n in LONGEST_LOADS if size % (THREADS * n) == 0)
    layout = plgpu.Layout.WG_STRIDED((THREADS * length,), vec_size=length)
    pieces = [pl.ds(first, THREADS * length) for first in range(0, size, THREADS * length)]
    load = lambda ref, *at: [
        plgpu.load(ref.at[(*at, piece)], layout=layout, optimized=False) for piece in pieces
    ]

    def store(values, ref):
        for piece, numbers in zip(pieces, values, strict=True):
            ref[row, piece] = numbers.astype(ref.dtype)

    def added(parts, receive=lambda: None):
        """The row's sum and its normalisation, in pieces."""
        # What does not depend on the copies is read while they are on their way.
        x, loaded = load(x_ref, row), {name: load(ref) for name, ref in vectors.items()}
        receive()
        places = itertools.product(*map(range, parts.shape[:-1]))
        y = functools.reduce(_plus, (_wide(load(parts, *place)) for place in places))
        return _added(x, y, loaded, norm, total_ref.dtype)

    if axis_name is None:
        for values, ref in zip(added(y_ref.at[..., row, :]), (total_ref, out_ref), strict=True):
            store(values, ref)
        return
    own, devices = lax.axis_index(axis_name), range(lax.axis_size(axis_name))
    of_device = [functools.partial(plgpu.remote_ref, device_id=(jnp.int32(i),)) for i in devices]

    def tell_others():
        for device in devices:
            tell = functools.partial(pl.semaphore_signal, told, 1, device_id=(jnp.int32(device),))
            pl.when(own != device)(tell)

    def add(then=lambda: None):
        for device, remote in enumerate(of_device):
            _copy_row(remote(y_ref), row, parts_ref.at[device], came)

        def receive():
            plgpu.barrier_wait(came)
            then()

        return added(parts_ref, receive)

    if not own_rows:
        total, out = add(tell_others)
        store(total, total_ref)
        store(out, out_ref)
        pl.semaphore_wait(told, len(devices) - 1)
        return

    def add_for_all():
        total, out = add()
        store(total, total_ref)
        for remote in of_device:
            store(out, remote(out_ref))
        tell_others()

    is_own = lax.rem(row, jnp.int32(len(devices))) == own
    pl.when(is_own)(add_for_all)
    pl.when(~is_own)(lambda: pl.semaphore_wait(told, 1))


def _wide(pieces):
    return [piece.astype(jnp.float32) for piece in pieces]


def _plus(one, other):
    return list(map(jnp.add, one, other))


def _added(x, y, vectors: Mapping[str, list[Array]], norm: Norm, dtype):
    """x + y and its normalisation, of one row whose numbers are in pieces."""
    size = sum(len(piece) for piece in x)
    plus = lambda x, name: _plus(x, _wide(vectors[name])) if name in vectors else x
    # Of all threads once, not of each piece.
    total_of = lambda pieces: jnp.sum(functools.reduce(jnp.add, pieces))

    def normalised(x, scale: str):
        if norm.centred:
            mean = total_of(x) / size
            x = [piece - mean for piece in x]
        inverse = lax.rsqrt(total_of([piece * piece for piece in x]) / size + norm.epsilon)
        x = [piece * inverse for piece in x]
        if scale not in vectors:
            return x
        return [a * (b + norm.offset) for a, b in zip(x, _wide(vectors[scale]), strict=True)]

    y = plus(y, "y_bias")
    y = normalised(y, "y_scale") if "y_scale" in vectors else y
    total = [piece.astype(dtype) for piece in _plus(_wide(x), y)]
    return total, plus(normalised(_wide(total), "scale"), "bias")


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
