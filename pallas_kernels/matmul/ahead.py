"""Weights of the product that follows, read into the L2 cache before it begins.

Memory is idle while small launches between two products run, and while a product's launch begins
and ends. The thread blocks of a product that have asked for their own weights ask for the first of
the next one's, and do not wait for them. Results are the same.
"""

import math
from typing import NamedTuple

from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MOST_BYTES = 2**24  # a third of an H200's cache
BLOCK = 128  # outputs, and bytes of their inputs, that are asked for together


class Blocks(NamedTuple):
    """The blocks of a weight that are read ahead, in the order in which its product needs them.

    Attributes:
        outputs, width: of the weight's values, in bytes.
        splits: of the product that will read it: each begins with its own first inputs.
    """

    outputs: int
    width: int
    splits: int

    @property
    def height(self) -> int:
        """Outputs of a block."""
        return math.gcd(self.outputs, BLOCK)

    @property
    def deep(self) -> int:
        """Blocks of a split along the inputs."""
        most = MOST_BYTES // self.outputs // self.splits
        return min(self.width // self.splits, most) // BLOCK

    @property
    def count(self) -> int:
        """Blocks altogether."""
        return self.outputs // self.height * self.deep * self.splits

    def place(self, number):
        """The first output and the first byte of a block; of integers or arrays."""
        high = self.outputs // self.height
        row, column = number % high, number // high
        split, of_split = column % self.splits, column // self.splits
        return row * self.height, split * (self.width // self.splits) + of_split * BLOCK


def read_ahead(values_ref, splits: int, program: Array, programs: int) -> None:
    """Asks for a program's part of a weight's blocks, in a Mosaic kernel.

    Args:
        values_ref: [outputs, bytes of the inputs].
        splits: see `Blocks`.
    """
    blocks = Blocks(*values_ref.shape, splits)

    def one(i, _):
        row, column = blocks.place(program + i * programs)
        plgpu.async_prefetch(values_ref.at[pl.ds(row, blocks.height), pl.ds(column, BLOCK)])

    lax.fori_loop(0, pl.cdiv(blocks.count - program, programs), one, None)
