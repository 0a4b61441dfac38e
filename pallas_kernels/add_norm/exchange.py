"""A sum over devices inside a Pallas Triton kernel, in one exchange of rows.

Each device writes its row into the inboxes of all others, and adds up what comes into its own. A
program does so with one row, which all devices' programs of that number exchange; the others' rows
do not matter to it. A word has come when it differs from `NOTHING`, which nobody sends and which
replaces it once it has been read. Memory that JAX has no arrays for is read and written in PTX;
these operations are ordered only where one depends on another's result.

Exchanges are counted, and rows of even and odd ones have places of their own. Launches of a device
follow one another, and each has a row at least that waits for all devices: one begins only when
the last but one has ended on all of them, and has read what came. Programs begin in the order of
their rows, so the first row that a device waits for is on its way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.inboxes import NOTHING, SLOTS, WORD, Inboxes

LEAST_NUMBERS = 4  # of a thread, side by side: Triton gives every thread as many where it has them
ACCESS_BYTES = 16  # that one instruction reads or writes
MOST_AT_ONCE = 16  # numbers of a thread that are waited for at once
MULTIPLE = ACCESS_BYTES // 2  # of numbers in a row, so that those of an access all exist or none
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

    def sum(self, part: Array, mask: Array, threads: int) -> Array:
        """The sum over all devices in the mesh's order, float32 [n].

        Args:
            part: this device's part of the row, [n] in 16 or 32 bits.
            mask: which of the numbers there are, [n].
            threads: of the program.
        """
        boxes, count = self.inboxes, self.inboxes.place_of_count(self.row)
        own_box, *others = self.addresses
        size, index = part.dtype.itemsize, jnp.arange(part.shape[0])
        at_once = min(MOST_AT_ONCE, part.shape[0] // threads)
        number = _read_count(*own_box, count)
        # So that the new count is written.
        slot = number % SLOTS + _write_count(*own_box, count, number + 1)

        def places(device, mask: Array) -> Array:
            first = boxes.place_of_row(slot, device, self.row)
            return jnp.where(mask, first + size * index, -1)

        sent = lax.bitcast_convert_type(part, INTEGERS[size])
        for box in others:
            sent = _send(*box, places(self.own, mask), sent, at_once)
        part = lax.bitcast_convert_type(sent, part.dtype)  # so that it is sent

        def received(device, mask: Array) -> Array:
            found = _receive(*own_box, places(device, mask), sent, at_once)
            return lax.bitcast_convert_type(found, part.dtype).astype(jnp.float32)

        if len(others) == 1:  # its sum is the same in either order
            return part.astype(jnp.float32) + received(1 - self.own, mask)
        total = jnp.zeros(part.shape, jnp.float32)
        for device in range(len(self.addresses)):
            is_own = self.own == device
            total += jnp.where(is_own, part.astype(jnp.float32), received(device, mask & ~is_own))
        return total


def arguments(inboxes: Inboxes, axis_name: str) -> tuple[Array, Array]:
    """What a kernel is given: the device's place in the mesh, [1], and `Inboxes.addresses`."""
    return lax.axis_index(axis_name)[None], jnp.asarray(inboxes.addresses)


_NUMBER = jax.ShapeDtypeStruct((1,), jnp.int32)  # operations have results of at least one axis


def _read_count(low: Array, high: Array, place: Array) -> Array:
    """A number in an inbox's head, which all threads have read then."""
    code = f"{_address(1, 2, 3)} ld.volatile.global.b32 $0, [address]; bar.sync 0;"
    return _assembly(code, [low, high, place], _NUMBER)


def _write_count(low: Array, high: Array, place: Array, number: Array) -> Array:
    """Writes a number to an inbox's head; returns 0."""
    code = f"{_address(1, 2, 3)} st.volatile.global.b32 [address], $4; mov.b32 $0, 0;"
    return _assembly(code, [low, high, place, number], _NUMBER)


def _send(low: Array, high: Array, places: Array, numbers: Array, at_once: int) -> Array:
    """Writes numbers to places of another inbox that are not negative; returns the numbers."""
    accesses = _Accesses(at_once, numbers.dtype.itemsize)
    code = accesses.addresses()
    for i, word in enumerate(accesses.words):
        code += f"""
    mov.b32 {word}, ${accesses.inputs + i};
    setp.eq.b32 condition, {word}, {NOTHING};
    selp.b32 {word}, 0, {word}, condition;"""
    code += accesses.each("st.relaxed.sys.global.{kind} [{address}], {{{words}}};")
    return _assembly(code + accesses.results(), [low, high, places, numbers], numbers, at_once)


def _receive(low: Array, high: Array, places: Array, sent: Array, at_once: int) -> Array:
    """The numbers that come to places of the own inbox; 0 where those are negative.

    Args:
        sent: what `_send` has returned: the others wait for it.
    """
    accesses = _Accesses(at_once, sent.dtype.itemsize)
    code = accesses.addresses()
    code += "".join(f"\n    mov.b32 {word}, 0;" for word in accesses.words)
    code += "\n    again:"
    code += accesses.each("ld.relaxed.sys.global.{kind} {{{words}}}, [{address}];")
    first, *rest = accesses.words
    code += f"\n    setp.eq.b32 condition, {first}, {NOTHING};"
    for word in rest:
        code += f"\n    setp.eq.or.b32 condition, {word}, {NOTHING}, condition;"
    code += "\n    @condition bra again;"
    code += f"\n    mov.b32 nothing, {NOTHING};"
    code += accesses.each("st.relaxed.sys.global.{kind} [{address}], {{{nothing}}};")
    return _assembly(code + accesses.results(), [low, high, places, sent], sent, at_once)


class _Accesses:
    """The code of a thread's accesses to an inbox, of several numbers each.

    Those must lie side by side, or all have negative places.

    Args:
        numbers: of the thread.
        size: bytes of a number.

    Attributes:
        words: the registers of all numbers.
        inputs: the first operand after the results and the addresses. Of the latter all lower
            halves, all upper ones and all places follow one another.
    """

    def __init__(self, numbers: int, size: int):
        self.numbers, self.size = numbers, size
        self.together = min(numbers, ACCESS_BYTES // size)
        self.count = numbers // self.together
        self.words = [f"word_{i}" for i in range(numbers * size // WORD)]
        self.inputs = len(self.words) + 3 * numbers

    def addresses(self) -> str:
        """Declares registers, and computes the accesses' addresses and which of them there are."""
        low = len(self.words)
        places = [low + 2 * self.numbers + i for i in range(self.numbers)]
        code = f"""
    .reg .b32 {", ".join(self.words)}, distance, nothing;
    .reg .pred condition, {", ".join(f"exists_{i}" for i in range(self.count))};"""
        for i in range(self.count):
            first, last = places[i * self.together], places[(i + 1) * self.together - 1]
            code += f"""{_address(low, low + self.numbers, first, f"_{i}")}
    setp.ge.s32 exists_{i}, ${first}, 0;
    sub.s32 distance, ${last}, ${first};
    setp.ne.and.s32 condition, distance, {(self.together - 1) * self.size}, exists_{i};
    @condition trap;"""
        return code

    def each(self, instruction: str) -> str:
        """An instruction of every access that there is."""
        words = len(self.words) // self.count
        code = ""
        for i in range(self.count):
            named = {
                "kind": f"v{words}.b32",
                "address": f"address_{i}",
                "words": ", ".join(self.words[i * words : (i + 1) * words]),
                "nothing": ", ".join(["nothing"] * words),
            }
            code += f"\n    @exists_{i} {instruction.format(**named)}"
        return code

    def results(self) -> str:
        """Returns the words."""
        return "".join(f"\n    mov.b32 ${i}, {word};" for i, word in enumerate(self.words))


def _address(low: int, high: int, place: int, name: str = "") -> str:
    """Code for an address, of these operands: the halves of an inbox's, and a place in it."""
    return f"""
    .reg .b64 address{name}, place{name};
    mov.b64 address{name}, {{${low}, ${high}}};
    cvt.s64.s32 place{name}, ${place};
    add.s64 address{name}, address{name}, place{name};"""


def _assembly(code: str, args: list[Array], result, at_once: int = 1) -> Array:
    """Runs code for each element of the arguments, or for so many of them."""
    registers = lambda x: max(1, at_once * jnp.dtype(x.dtype).itemsize // WORD)
    args = [jnp.broadcast_to(arg, result.shape) for arg in args]
    inputs = ["r"] * sum(map(registers, args))
    (found,) = plgpu.elementwise_inline_asm(
        f"{{{code}\n}}",
        args=args,
        constraints=",".join(["=r"] * registers(result) + inputs),
        pack=at_once,
        result_shape_dtypes=[jax.ShapeDtypeStruct(result.shape, result.dtype)],
    )
    return found
