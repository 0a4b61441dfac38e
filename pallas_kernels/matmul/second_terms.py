"""Where rounded rows have second terms, as the Mosaic GPU kernel takes it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LISTED_FLAGS, LISTING_WARPS = 16384, 8  # read at once, so that few are waited for in turn


def list_second(second: Array, splits: int, *, interpret: bool) -> tuple[Array, Array]:
    """Which groups of a share's inputs have second terms in any row.

    Args:
        second: where they are, int32 [rows, groups].
        splits: number of shares.

    Returns:
        The numbers of those groups within each share, int32 [splits, groups of a share], of which
        the first are set, and how many there are, int32 [splits].
    """
    groups = second.shape[1] // splits
    return pl.pallas_call(
        functools.partial(_list_kernel, groups=groups),
        grid=(splits,),
        out_shape=(
            jax.ShapeDtypeStruct((splits, groups), jnp.int32),
            jax.ShapeDtypeStruct((splits,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=LISTING_WARPS, num_stages=1),
        interpret=interpret,
        name="list_second_terms",
    )(second)


def _list_kernel(second_ref, numbers_ref, counts_ref, *, groups: int):
    split, rows = pl.program_id(0), second_ref.shape[0]
    number = jnp.arange(pl.next_power_of_2(groups))
    at_once = min(pl.next_power_of_2(rows), max(1, LISTED_FLAGS // len(number)))

    def more(chunk, flag):
        row = chunk * at_once + jnp.arange(at_once)
        place = second_ref.at[row[:, None], (split * groups + number)[None, :]]
        mask = (row < rows)[:, None] & (number < groups)[None, :]
        return jnp.maximum(flag, jnp.max(plgpu.load(place, mask=mask, other=0), axis=0))

    none = jnp.zeros(number.shape, jnp.int32)
    flag = lax.fori_loop(0, pl.cdiv(rows, at_once), more, none)
    before = (number[None, :] < number[:, None]) & (flag > 0)[None, :]
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    plgpu.store(numbers_ref.at[split, rank], number, mask=flag > 0)
    counts_ref[split] = jnp.sum(flag)
