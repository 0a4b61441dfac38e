"""The values of stored tensors: moved to the device, checked there, and compared."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from emsjax.models.parameters import Parameter
from emsjax.models.stored import StoredTensor, readable_name

BLOCK = 1 << 22  # numbers that the host converts at a time


def read(weight: Parameter, stored: Mapping[str, StoredTensor], *, dtype, finite: bool) -> Array:
    """A parameter's value on the device; the host holds one tensor at a time.

    Args:
        weight: the parameter.
        stored: tensors by name, among them the parameter's.
        dtype: the result's.
        finite: whether every number must be finite.

    Raises:
        ValueError: `finite`, and a number is not, in the file or in the dtype.
    """
    parts = []
    for name in weight.names:
        values = as_jax_has_it(stored[name].read())
        # A copy, because the CPU backend would otherwise keep the file mapped. Wait for it,
        # because pending transfers keep their source in host memory.
        parts.append(jnp.array(values, copy=True).block_until_ready())
    value, are_finite = weight.join(parts, dtype)
    if finite:
        for name, is_finite in zip(weight.names, np.asarray(are_finite), strict=True):
            if not is_finite:
                raise nonfinite(name, stored[name], jnp.dtype(dtype))
    return value.block_until_ready()


def as_jax_has_it(values: np.ndarray) -> np.ndarray:
    """float32 in place of float64, which JAX does not have by default."""
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore"):  # the check for finite values finds it
        return values.astype(np.float32)


def nonfinite(name: str, tensor: StoredTensor, dtype: np.dtype) -> ValueError:
    """The error for a tensor that is not finite in this dtype."""
    in_file = in_dtype = 0
    for block in blocks(tensor):
        with np.errstate(over="ignore"):
            in_file += np.count_nonzero(~np.isfinite(block))
            in_dtype += np.count_nonzero(~np.isfinite(block.astype(dtype)))
    where = f"{tensor.file}: {readable_name(name)}"
    if in_file:
        return ValueError(
            f"{where} has {in_file} values that are not finite; allow_nonfinite=True loads them"
        )
    return ValueError(
        f"{where} has {in_dtype} values that overflow in {dtype.name}: load the model in a dtype "
        "of a larger range, such as bfloat16"
    )


def blocks(tensor: StoredTensor):
    """Yields a tensor's numbers in pieces, as arrays of one axis."""
    values = tensor.read()
    rows = values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)
    step = max(1, BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        yield rows[start : start + step].ravel()


def same_values(one: StoredTensor, other: StoredTensor, dtype) -> bool:
    """Whether two tensors have the same shape and, in this dtype, the same numbers."""
    if one.shape != other.shape:
        return False
    for ours, theirs in zip(blocks(one), blocks(other), strict=True):
        with np.errstate(over="ignore"):
            ours, theirs = ours.astype(dtype), theirs.astype(dtype)
        equal = (ours == theirs) | ((ours != ours) & (theirs != theirs))  # NaN
        if not equal.all():
            return False
    return True
