"""Steps of a product in a Mosaic GPU kernel: one warpgroup fetches what others multiply.

Pallas has such a pipeline, whose steps are one loop. Here those that multiply go through the steps
in several loops, each with sums of its own, while blocks are fetched without a break.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_tiles import FETCHING_REGISTERS, MOST_REGISTERS, REGISTERS, Tiling

UNIT_OF_REGISTERS = 8


class Operand(NamedTuple):
    """What every step fetches a block of."""

    array: Any  # in global memory
    block: tuple[int, ...]  # sizes of a block
    place: Callable[..., tuple]  # of what `fetch` is given: a block's number along each axis
    transforms: tuple = ()  # of a block in shared memory
    axes: tuple[str, ...] = ()  # neighbours along these share what they fetch


class Fetched(NamedTuple):
    """How far the warpgroup is that fetches."""

    steps: Array  # number of steps
    slot: Array  # of the next one


class Announced(NamedTuple):
    """A number that the warpgroup that fetches announces to all others."""

    number: Any  # in shared memory
    arrived: Any  # barrier

    @staticmethod
    def allocations() -> tuple:
        """Shared memory and a barrier, for `pl.run_scoped`."""
        return plgpu.SMEM((1,), jnp.int32), plgpu.Barrier()

    def announce(self, number: Array) -> None:
        self.number[0] = number
        plgpu.barrier_arrive(self.arrived)

    def wait(self) -> Array:
        """The number; each of the others waits once."""
        plgpu.barrier_wait(self.arrived)
        return self.number[0]


class Steps(NamedTuple):
    """Blocks of operands in shared memory, used in turn, and who waits for whom."""

    operands: Sequence[Operand]
    tiling: Tiling
    buffers: Sequence[Any] = ()
    fetched: Any = None  # barriers
    used: Any = None

    def allocations(self) -> tuple:
        """Shared memory and barriers: what `with_memory` takes, for `pl.run_scoped`."""
        stages, warpgroups = self.tiling.stages, self.tiling.warpgroups
        axes = tuple({axis for operand in self.operands for axis in operand.axes})
        buffers = [
            plgpu.SMEM((stages, *of.block), of.array.dtype, transforms=of.transforms)
            for of in self.operands
        ]
        counts = {"num_arrivals": warpgroups, "num_barriers": stages}
        used = plgpu.ClusterBarrier(collective_axes=axes, **counts) if axes else None
        fetched = plgpu.Barrier(num_arrivals=len(self.operands), num_barriers=stages)
        return buffers, fetched, used or plgpu.Barrier(**counts)

    def with_memory(self, buffers, fetched, used) -> "Steps":
        """These steps in allocated memory."""
        return self._replace(buffers=buffers, fetched=fetched, used=used)

    def begin_fetching(self) -> Fetched:
        """What the last warpgroup does first: it fetches the blocks of all steps."""
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
        return Fetched(jnp.int32(0), jnp.int32(0))

    def fetch(self, fetched: Fetched, *which: Array | int) -> Fetched:
        """Fetches the blocks of one more step.

        Args:
            which: what the operands' `place` takes.
        """
        steps, slot = fetched
        # A slot is free at first.
        pl.when(steps >= self.tiling.stages)(lambda: plgpu.barrier_wait(self.used.at[slot]))
        for operand, buffer in zip(self.operands, self.buffers, strict=True):
            sizes = zip(operand.place(*which), operand.block, strict=True)
            place = tuple(pl.ds(number * size, size) for number, size in sizes)
            copied = operand.array.at[place], buffer.at[slot], self.fetched.at[slot]
            plgpu.copy_gmem_to_smem(*copied, collective_axes=operand.axes or None)
        return Fetched(steps + 1, self._next(slot))

    def end_fetching(self, fetched: Fetched) -> None:
        """Waits: blocks that share what they fetch must not end before all have used it."""
        stages = jnp.int32(self.tiling.stages)
        rest = lax.min(fetched.steps, stages)

        def wait(_, slot):
            plgpu.barrier_wait(self.used.at[slot])
            return self._next(slot)

        lax.fori_loop(0, rest, wait, lax.rem(fetched.slot - rest + stages, stages))

    def begin(self) -> Array:
        """What the other warpgroups do first; returns the slot of the first step."""
        every = (REGISTERS - FETCHING_REGISTERS) // self.tiling.warpgroups
        most = min(every, MOST_REGISTERS + 1) // UNIT_OF_REGISTERS * UNIT_OF_REGISTERS
        plgpu.set_max_registers(most, action="increase")
        return jnp.int32(0)

    def each(
        self, slot: Array, count: Array | int, body: Callable, carry: Any
    ) -> tuple[Array, Any]:
        """The next `count` steps: body(*blocks, carry) returns the next carry.

        Nothing reads the blocks when it has returned.

        Args:
            slot: of the first step.

        Returns:
            The slot after the last step, and the last carry.
        """

        def one(_, state):
            slot, carry = state
            plgpu.barrier_wait(self.fetched.at[slot])
            carry = body(*(buffer.at[slot] for buffer in self.buffers), carry)
            plgpu.barrier_arrive(self.used.at[slot])
            return self._next(slot), carry

        return lax.fori_loop(0, count, one, (slot, carry))

    def add_up(
        self, slot: Array, count: Array | int, sums: Any, multiply: Callable, instructions: int
    ) -> Array:
        """Adds the products of the next `count` steps to the sums of matrix instructions.

        A step's products may still be computed while those of the next begin.

        Args:
            slot: of the first step.
            sums: a reference to an accumulator.
            multiply: multiply(sums, *blocks) begins a step's products.
            instructions: matrix products that it begins.

        Returns:
            The slot after the last step.
        """

        def one(step, slot):
            plgpu.barrier_wait(self.fetched.at[slot])
            multiply(sums, *(buffer.at[slot] for buffer in self.buffers))
            plgpu.wgmma_wait(instructions)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.used.at[self._before(slot)]))
            return self._next(slot)

        slot = lax.fori_loop(0, count, one, slot)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.used.at[self._before(slot)]))
        return slot

    def _next(self, slot: Array) -> Array:
        return lax.select(slot == self.tiling.stages - 1, jnp.int32(0), slot + 1)

    def _before(self, slot: Array) -> Array:
        return lax.select(slot == 0, jnp.int32(self.tiling.stages - 1), slot - 1)
