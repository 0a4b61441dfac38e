"""A sum over devices inside a Pallas Triton kernel, in one exchange of rows.

Each device writes its row into the inboxes of all others, then tells them that it has, and adds up
what has come into its own. A program does so with one row, which all devices' programs of that
number exchange; the others' rows do not matter to it. Memory that JAX has no arrays for is read and
written in PTX. Its operations depend on one another's results, as nothing else orders them.

An exchange has a number, and rows of even and odd numbers have places of their own. A device sends
the next but one only after all others have sent the next, before which they have read this one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.inboxes import SLOTS, WORD, Inboxes

TOGETHER = 4  # numbers that are written by one instruction, where they lie side by side
INTEGERS = {2: jnp.int16, 4: jnp.int32}  # by bytes


class Exchange(NamedTuple):
    """The row that this program exchanges.

    Attributes:
        inboxes: static.
        own: this device's place in the mesh.
        addresses: of the inboxes, by the number of places from this device's on: pairs of halves.
        row: the program's.
    """

    inboxes: Inboxes
    own: Array
    addresses: list[tuple[Array, Array]]
    row: Array

    @classmethod
    def of(cls, inboxes: Inboxes, own_ref, addresses_ref, row: Array) -> "Exchange":
        """Reads the arguments of the kernel: see `arguments`."""
        own, count = own_ref[0], len(inboxes.devices)
        places = [(own + i) % count for i in range(count)]
        halves = [tuple(addresses_ref[place, half] for half in range(2)) for place in places]
        return cls(inboxes, own, halves, row)

    def sum(self, part: Array, mask: Array) -> Array:
        """The sum over all devices in the mesh's order, float32 [n].

        Args:
            part: this device's part of the row, [n] in 16 or 32 bits.
            mask: which of the numbers there are, [n].
        """
        boxes, others = self.inboxes, self.addresses[1:]
        size, index = part.dtype.itemsize, jnp.arange(part.shape[0])
        integers = lax.bitcast_convert_type(part, INTEGERS[size])
        own_box, count = self.addresses[0], boxes.place_of_count(self.row)
        number = _read(*own_box, count) + 1

        def places(device, mask: Array) -> Array:
            first = boxes.place_of_row(number % SLOTS, device, self.row)
            return jnp.where(mask, first + size * index, -1)

        sent = integers
        for box in others:
            sent = _write_all(*box, places(self.own, mask), sent)
        done = jnp.sum(sent.astype(jnp.int32))  # known when all threads have written
        for box in others:
            number = _tell(*box, boxes.place_of_arrival(self.own, self.row), number, done)
        for i in range(1, len(self.addresses)):
            device = (self.own + i) % len(self.addresses)
            number = _wait(*own_box, boxes.place_of_arrival(device, self.row), number)
        zero = _write(*own_box, count, number)
        total = jnp.zeros(part.shape, jnp.float32)
        for device in range(len(self.addresses)):
            other = places(device, mask & (self.own != device)) + zero
            other = lax.bitcast_convert_type(_read_all(*own_box, other, integers.dtype), part.dtype)
            total += jnp.where(self.own == device, part, other).astype(jnp.float32)
        return total


def arguments(inboxes: Inboxes, axis_name: str) -> tuple[Array, Array]:
    """What a kernel is given: the device's place in the mesh, [1], and `Inboxes.addresses`."""
    return lax.axis_index(axis_name)[None], jnp.asarray(inboxes.addresses)


_NUMBER = jax.ShapeDtypeStruct((1,), jnp.int32)  # operations have results of at least one axis
_FIRST_THREAD = """
    .reg .b32 thread;
    .reg .pred is_first;
    mov.u32 thread, %tid.x;
    setp.eq.u32 is_first, thread, 0;"""


def _read(low: Array, high: Array, place: Array) -> Array:
    """A number of an inbox."""
    code = f"{_address(1, 2, 3)} ld.volatile.global.b32 $0, [address];"
    return _assembly(code, [low, high, place], _NUMBER)


def _write(low: Array, high: Array, place: Array, number: Array) -> Array:
    """Writes a number to the own inbox; returns 0."""
    store = "@is_first st.volatile.global.b32 [address], $4;"
    code = f"{_address(1, 2, 3)} {_FIRST_THREAD} {store} mov.b32 $0, 0;"
    return _assembly(code, [low, high, place, number], _NUMBER)


def _tell(low: Array, high: Array, place: Array, number: Array, done: Array) -> Array:
    """Writes a number to another inbox, whose readers then find there what this block wrote before.

    Returns:
        The number.
    """
    store = "@is_first st.release.sys.global.b32 [address], $4;"
    code = f"{_address(1, 2, 3)} {_FIRST_THREAD} {store} mov.b32 $0, $4;"
    return _assembly(code, [low, high, place, number, done], _NUMBER)


def _wait(low: Array, high: Array, place: Array, number: Array) -> Array:
    """Waits until a number of the own inbox is at least this one; returns the latter."""
    code = f"""{_address(1, 2, 3)}
    .reg .b32 found;
    .reg .pred is_less;
    again:
    ld.acquire.sys.global.b32 found, [address];
    sub.s32 found, found, $4;
    setp.lt.s32 is_less, found, 0;
    @is_less bra again;
    mov.b32 $0, $4;"""
    return _assembly(code, [low, high, place, number], _NUMBER)


def _write_all(low: Array, high: Array, places: Array, numbers: Array) -> Array:
    """Writes numbers to places of another inbox that are not negative; returns the numbers."""
    words = [f"word_{i}" for i in range(TOGETHER * numbers.dtype.itemsize // WORD)]
    first = len(words)
    given = [f"mov.b32 {word}, ${first + 3 * TOGETHER + i};" for i, word in enumerate(words)]
    store = f"st.global.v{len(words)}.b32 [address], {{{', '.join(words)}}};"
    code = _memory_code(store, words, given, first, numbers.dtype.itemsize)
    return _assembly(code, [low, high, places, numbers], numbers, TOGETHER)


def _read_all(low: Array, high: Array, places: Array, dtype) -> Array:
    """The numbers at places of the own inbox; 0 where those are negative."""
    result = jax.ShapeDtypeStruct(places.shape, dtype)
    words = [f"word_{i}" for i in range(TOGETHER * result.dtype.itemsize // WORD)]
    given = [f"mov.b32 {word}, 0;" for word in words]
    load = f"ld.global.v{len(words)}.b32 {{{', '.join(words)}}}, [address];"
    code = _memory_code(load, words, given, len(words), result.dtype.itemsize)
    return _assembly(code, [low, high, places], result, TOGETHER)


def _memory_code(access: str, words: list[str], given: list[str], first: int, size: int) -> str:
    """Code that stores or loads `TOGETHER` numbers of this many bytes, and returns them.

    They must lie side by side, or all have negative places.

    Args:
        access: the instruction.
        words: registers of the numbers, and the results' operands in their order.
        given: code that sets them.
        first: number of the first operand of the addresses: all lower halves, all upper ones and
            all places follow one another.
    """
    begin, end = (f"${first + 2 * TOGETHER + i}" for i in (0, TOGETHER - 1))
    return f"""{_address(first, first + TOGETHER, first + 2 * TOGETHER)}
    .reg .b32 {", ".join(words)}, distance;
    .reg .pred exist, are_apart;
    {" ".join(given)}
    setp.ge.s32 exist, {begin}, 0;
    sub.s32 distance, {end}, {begin};
    setp.ne.and.s32 are_apart, distance, {(TOGETHER - 1) * size}, exist;
    @are_apart trap;
    @exist {access}
    {" ".join(f"mov.b32 ${i}, {word};" for i, word in enumerate(words))}"""


def _address(low: int, high: int, place: int) -> str:
    """Code for an address, of these operands: the halves of an inbox's, and a place in it."""
    return f"""
    .reg .b64 address, place;
    mov.b64 address, {{${low}, ${high}}};
    cvt.s64.s32 place, ${place};
    add.s64 address, address, place;"""


def _assembly(code: str, args: list[Array], result, together: int = 1) -> Array:
    """Runs code for each element of the arguments, or for `together` of them."""
    registers = lambda x: max(1, together * jnp.dtype(x.dtype).itemsize // WORD)
    args = [jnp.broadcast_to(arg, result.shape) for arg in args]
    inputs = ["r"] * sum(map(registers, args))
    (found,) = plgpu.elementwise_inline_asm(
        f"{{{code}\n}}",
        args=args,
        constraints=",".join(["=r"] * registers(result) + inputs),
        pack=together,
        result_shape_dtypes=[jax.ShapeDtypeStruct(result.shape, result.dtype)],
    )
    return found
