"""Residual addition, over devices as well, and normalisation as one Pallas Triton kernel.

If a product with a narrow weight follows, the kernel rounds the rows for it as well.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.add_norm.exchange import INTEGERS, LEAST_NUMBERS, MULTIPLE, Exchange, arguments
from pallas_kernels.add_norm.xla import Norm
from pallas_kernels.common.implementations import MULTIPROCESSORS
from pallas_kernels.common.inboxes import Inboxes
from pallas_kernels.matmul.rounded import (
    RoundedRows,
    Rounding,
    array_types,
    places_in_groups,
    store_rounded,
)

WARPS = 8  # of a row
THREADS = 32  # of a warp
STATIC = ("norm", "rounding", "inboxes", "axis_name", "interpret")


def inboxes_for(x: Array, y: Array, rounding: Rounding | None, devices: int) -> Inboxes | None:
    """Through which the kernel exchanges rows of devices; None: it cannot, or not so many rows."""
    size, programs = x.shape[1], len(x) if rounding is None else rounding.padded
    if y.dtype.itemsize not in INTEGERS or size < THREADS * LEAST_NUMBERS or size % MULTIPLE:
        return None
    inboxes = Inboxes.of(devices, size * y.dtype.itemsize)
    return inboxes if inboxes is not None and programs <= inboxes.rows else None


@functools.partial(jax.jit, static_argnames=STATIC)
def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    *,
    norm: Norm,
    rounding: Rounding | None = None,
    inboxes: Inboxes | None = None,
    axis_name: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | RoundedRows]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`.

    Args:
        inboxes: of the devices on the axis, whose parts of y the kernel adds up; None: y is whole.
    """
    rows, size = x.shape
    if rounding is None:
        programs, normalised = rows, (jax.ShapeDtypeStruct(x.shape, norm.dtype),)
    else:
        programs = rounding.padded
        if rows > programs:
            raise ValueError(f"the rounding is for {programs} rows at most, not {rows}")
        normalised = array_types(rounding, size)
    name = "add_layer_norm" if norm.centred else "add_rms_norm"
    given, static = (), {"names": tuple(vectors), "norm": norm, "rounding": rounding}
    warps = WARPS
    if inboxes is not None:
        given, name = arguments(inboxes, axis_name), f"sum_{name}"
        warps = min(WARPS, pl.next_power_of_2(size) // (THREADS * LEAST_NUMBERS))
    total, *out = pl.pallas_call(
        functools.partial(_kernel, inboxes=inboxes, warps=warps, **static),
        grid=(programs,),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), *normalised),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(x, y, *vectors.values(), *given)
    if rounding is None:
        return total, *out
    return total, RoundedRows(*out, rows=rows, dtype=jnp.dtype(norm.dtype))


def _kernel(
    x_ref,  # [rows, size]
    y_ref,  # [rows, size], or [shares, rows, size]
    # vectors [size]; of devices, their `arguments`; total; the normalised rows, or the three arrays
    # of RoundedRows
    *refs,
    names: tuple[str, ...],
    norm: Norm,
    rounding: Rounding | None,
    inboxes: Inboxes | None,
    warps: int,
):
    vector_refs, refs = refs[: len(names)], refs[len(names) :]
    given, (total_ref, *out_refs) = (refs[:2], refs[2:]) if inboxes is not None else ((), refs)
    row, size = pl.program_id(0), x_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(size))
    # Rows that are added for a product are zero.
    mask = at < size if rounding is None else (at < size) & (row < x_ref.shape[0])
    load = lambda place: plgpu.load(place, mask=mask, other=0).astype(jnp.float32)

    def rest():
        vectors = dict(zip(names, (load(ref.at[at]) for ref in vector_refs), strict=True))
        return load(x_ref.at[row, at]), vectors

    def normalised(x, scale: str):
        if norm.centred:
            x = jnp.where(mask, x - jnp.sum(x) / size, 0)
        x = x * lax.rsqrt(jnp.sum(x * x) / size + norm.epsilon)
        return x * (vectors[scale] + norm.offset) if scale in vectors else x

    shares = range(y_ref.shape[0]) if len(y_ref.shape) == 3 else ()
    # Read in advance, unless programs share multiprocessors and have no registers left for it.
    in_advance = inboxes is None or pl.num_programs(0) <= MULTIPROCESSORS
    if in_advance:
        total, vectors = rest()
    y = sum(load(y_ref.at[i, row, at]) for i in shares) if shares else load(y_ref.at[row, at])
    if inboxes is not None:
        y = Exchange.of(inboxes, *given, row).sum(y.astype(y_ref.dtype), mask, THREADS * warps)
    if not in_advance:
        total, vectors = rest()
    if "y_scale" in vectors:
        total += normalised(y + vectors.get("y_bias", 0), "y_scale")
    else:
        total += y
        total += vectors.get("y_bias", 0)
    total = total.astype(x_ref.dtype)
    plgpu.store(total_ref.at[row, at], total, mask=mask)
    out = normalised(total.astype(jnp.float32), "scale") + vectors.get("bias", 0)
    out = out.astype(norm.dtype)
    if rounding is None:
        plgpu.store(out_refs[0].at[row, at], out, mask=mask)
        return
    numbers = jnp.where(mask, out.astype(jnp.float32), 0).reshape(places_in_groups(size)[0].shape)
    store_rounded(*out_refs, numbers, row, rounding.kind)
