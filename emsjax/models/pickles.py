"""A reader of pickles that builds containers, text and numbers, and runs nothing.

`pickle` imports and calls whatever a file names. This reader calls the functions that it is given,
and knows the few opcodes that a dictionary of tensors has. Time and memory are limited by the
number of operations: each makes at most one value, and what it copies counts as well.
"""

import dataclasses
import io
import pickletools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from emsjax.models.schema import shown
from emsjax.models.stored import MAX_OBJECTS, checked_name

MAX_IDENTITY = 8  # items of a persistent id


@dataclasses.dataclass(frozen=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str


def dictionary(pairs: Any = ()) -> dict:
    """`collections.OrderedDict`."""
    found: dict = {}
    for key, value in pairs:
        put(found, key, value)
    return found


def put(container: Any, key: Any, value: Any) -> None:
    """Set an item of a dict. Keys are text: nested tuples may take forever to be hashed."""
    if not isinstance(container, dict) or not isinstance(key, str):
        raise ValueError(f"it sets an item {type(key).__name__} of a {type(container).__name__}")
    container[key] = value


DICTIONARY = Name("collections", "OrderedDict")
CONSTANTS = {  # values by opcode; a function makes a new one each time
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
# Opcodes whose argument is the value itself.
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES"),
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME", "STOP"}


class Pickle:
    """The stack machine of a pickle, for the opcodes of state dicts.

    Args:
        file: the pickle; it is read up to its end, not further.
        functions: what it may call, besides the constructor of an ordered dictionary.
        classes: what else it may name.
        storage: the value of a persistent id ("storage", ...), from the items that follow;
            None: there are no such ids.

    Raises:
        ValueError: in `read`, the pickle does or names something else, or is too large. Other
            exceptions say that it is corrupt.
    """

    def __init__(
        self,
        file: io.BytesIO,
        functions: Mapping[Name, Callable] | None = None,
        classes: Collection[Name] = (),
        storage: Callable[..., Any] | None = None,
    ):
        self.file, self.storage, self.classes = file, storage, classes
        self.functions = {DICTIONARY: dictionary} | dict(functions or {})
        self.left = MAX_OBJECTS
        self.stack: list = []
        self.marked: list[list] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self.file):
            self.spend(1)
            self.run(opcode.name, argument)
        (value,) = self.stack
        return value

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ValueError(f"it takes more than {MAX_OBJECTS} operations")

    def run(self, opcode: str, argument: Any) -> None:
        """Run one operation."""
        if opcode in VALUES:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode]())
        elif opcode in TUPLES:
            self.stack.append(tuple(self.take(TUPLES[opcode])))
        elif opcode not in IGNORED:
            operation = getattr(self, f"do_{opcode.lower()}", None)
            if operation is None:
                raise ValueError(f"it has the operation {opcode}, which state dicts have not")
            operation(argument)

    def take(self, count: int) -> list:
        """Pop the last `count` values."""
        if len(self.stack) < count:
            raise ValueError("it takes a value that is not there")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def to_mark(self) -> list:
        """Pop the values since the last mark."""
        values, self.stack = self.stack, self.marked.pop()
        return values

    def do_mark(self, _: None) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def do_tuple(self, _: None) -> None:
        values = self.to_mark()
        self.stack.append(tuple(values))

    def do_append(self, _: None) -> None:
        self.extend(self.take(1))

    def do_appends(self, _: None) -> None:
        self.extend(self.to_mark())

    def extend(self, values: list) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(values)

    def do_setitem(self, _: None) -> None:
        key, value = self.take(2)
        put(self.stack[-1], key, value)

    def do_setitems(self, _: None) -> None:
        values = self.to_mark()
        for key, value in zip(values[::2], values[1::2], strict=True):
            put(self.stack[-1], key, value)

    def do_binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    do_long_binput = do_binput

    def do_memoize(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    do_long_binget = do_binget

    def do_global(self, names: str) -> None:
        self.name(*names.split(" ", 1))

    def do_stack_global(self, _: None) -> None:
        self.name(*self.take(2))

    def do_binpersid(self, _: None) -> None:
        (identity,) = self.take(1)
        is_identity = isinstance(identity, tuple) and 1 <= len(identity) <= MAX_IDENTITY
        if self.storage is None or not is_identity or identity[0] != "storage":
            raise ValueError(f"it refers to {shown(identity)}")
        self.stack.append(self.storage(*identity[1:]))

    def do_reduce(self, _: None) -> None:
        function, arguments = self.take(2)
        if not isinstance(function, Name) or function not in self.functions:
            raise ValueError(f"it calls {shown(function)}")
        self.spend(sum(len(one) for one in (arguments, *arguments) if hasattr(one, "__len__")))
        self.stack.append(self.functions[function](*arguments))

    def do_build(self, _: None) -> None:
        self.take(1)  # attributes of a dictionary, such as the versions of modules
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"it sets attributes of a {type(self.stack[-1]).__name__}")

    def name(self, module: Any, name: Any) -> None:
        """Push a class or function; those that tensors do not need may do harm."""
        found = Name(checked_name(module), checked_name(name))
        if found not in self.functions and found not in self.classes:
            raise ValueError(f"it names {shown(f'{module}.{name}')}, which is no part of tensors")
        self.stack.append(found)
