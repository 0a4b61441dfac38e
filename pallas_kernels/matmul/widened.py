"""Products with int4 values, which are widened in registers, in Pallas Mosaic GPU kernels."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.matmul.narrow import GROUP
from pallas_kernels.matmul.narrow_triton import NIBBLE_UNIT

FACTOR = plgpu.Layout.WGMMA_8BIT  # of the first factor of a matrix instruction, in registers


def multiply_widened(sums, bytes_ref, rows_ref, wide_ref) -> None:
    """Adds the product of NIBBLE_UNIT times the values in some bytes to sums.

    Args:
        sums: of a matrix instruction, [columns, rows].
        bytes_ref: [columns, GROUP / 2]: see `narrow.pack`.
        rows_ref: [GROUP, rows].
        wide_ref: [columns, GROUP] in shared memory for interpret mode, which knows no factor in
            registers; otherwise None.
    """
    if wide_ref is None:
        values = plgpu.ShapeDtypeStruct((bytes_ref.shape[0], GROUP), jnp.int8, layout=FACTOR)
        widened = plgpu.inline_mgpu(arg_types=(FACTOR,), return_type=values)(_widened)
        plgpu.wgmma(sums, widened(plgpu.load(bytes_ref, layout=FACTOR)), rows_ref)
    else:
        found = bytes_ref[...]
        wide_ref[...] = jnp.concatenate([found << 4, found & -NIBBLE_UNIT], axis=1)
        plgpu.wgmma(sums, wide_ref, rows_ref)


def _widened(_, packed):
    """Bytes in registers as the numbers in them, four bytes at a time."""
    word = ir.IntegerType.get_signless(32)
    words, bytes_ = ir.VectorType.get((1,), word), packed.registers.flat[0].type
    constant = lambda number: arith.constant(
        words, ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(word, number))
    )
    shift, upper = constant(4), constant(-0x0F0F0F10)  # 0xF0F0F0F0

    def of_halves(register, half):
        value = vector.bitcast(words, register)
        value = arith.shli(value, shift) if half == 0 else value
        return vector.bitcast(bytes_, arith.andi(value, upper))

    halves = []
    for half in range(2):
        registers = np.empty_like(packed.registers)
        for place, register in np.ndenumerate(packed.registers):
            registers[place] = of_halves(register, half)
        halves.append(registers)
    # The second axis of the registers counts pieces of a line.
    return type(packed)(
        _registers=np.concatenate(halves, axis=1), _layout=packed.layout, _is_signed=True
    )
