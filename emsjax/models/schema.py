"""What the fields of a model's config may hold: one vocabulary and one check for every family.

A config is a frozen dataclass. Each field is made by the function that is named after its kind,
and relations between fields are a tuple:

    @dataclasses.dataclass(frozen=True)
    class SomeConfig(Config):
        relations = (multiple("hidden_size", "num_heads"),)

        vocab_size: int = count(32000)
        hidden_size: int = count(4096, key="n_embd")
        num_heads: int = count(32, key="n_head")
        head_dim: int = count(None, null=lambda config: config.hidden_size // config.num_heads)
        tie_word_embeddings: bool = flag(True)
        rope_scaling: RopeScaling | None = nested(RopeScaling)
        eos_token_id: TokenIds = token_ids(None)

`key` is the field's name in config.json, if it is another one. `null` is what None means: a value
that a function computes from the fields above, or None itself. Without it None is an error.
"""

import dataclasses
import functools
import json
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

MAX_COUNT = 2**31 - 1  # sizes and token ids are int32
MAX_SHOWN = 80  # characters of a value in a message
REQUIRED = object()  # the `null` of a field that must not be None
TokenIds = int | tuple[int, ...] | None
Accept = Callable[[Any, Any], Any]  # from a value and a config with the fields above it

abbreviation = reprlib.Repr()
abbreviation.maxstring = abbreviation.maxother = abbreviation.maxlong = MAX_SHOWN
abbreviation.maxlevel = 2


def shown(value: Any) -> str:
    """A value from an untrusted file as a message shows it, on one line and short."""
    try:
        text = abbreviation.repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= 2 * MAX_SHOWN else text[: 2 * MAX_SHOWN] + "..."


def must_be(expected: str, value: Any) -> ValueError:
    """The end of a message, to be preceded by the name of a field."""
    return ValueError(f" must be {expected}, not {shown(value)}")


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether a value is an integer in this range; booleans are not."""
    return type(value) is int and least <= value <= most


def is_ids(value: Any, most: int) -> bool:
    return isinstance(value, tuple) and all(is_whole(one, 0, most) for one in value)


# Kinds of fields.


def count(default: int | None, *, least: int = 1, most: int = MAX_COUNT, **options) -> Any:
    """A field for an integer in least..most."""

    def accept(value, config):
        if not is_whole(value, least, most):
            raise must_be(f"an integer in {least}..{most}", value)
        return value

    return field(default, accept, **options)


def number(default: float | None, *, least: float, most: float = sys.float_info.max, **options):
    """A field for a finite number in least..most."""
    limits = f">= {least}" if most == sys.float_info.max else f"in {least}..{most}"

    def accept(value, config):
        if type(value) not in (int, float) or not least <= value <= most:  # NaN is not
            raise must_be(f"a finite number {limits}", value)
        return float(value)

    return field(default, accept, **options)


def flag(default: bool, **options) -> Any:
    """A field for true or false."""

    def accept(value, config):
        if not isinstance(value, bool):
            raise must_be("true or false", value)
        return value

    return field(default, accept, **options)


def choice(default: str | None, names: Collection[str], **options) -> Any:
    """A field for one of some names."""

    def accept(value, config):
        if not isinstance(value, str) or value not in names:
            raise must_be(f"one of {', '.join(sorted(names))}", value)
        return value

    return field(default, accept, **options)


def token_id(default: int | None, *, vocab: str = "vocab_size", **options) -> Any:
    """A field for a token of the vocabulary whose size is the field `vocab`; None: no token."""

    def accept(value, config):
        most = getattr(config, vocab) - 1
        if not is_whole(value, 0, most):
            raise must_be(f"a token id in 0..{most}, the vocabulary, or null", value)
        return value

    return field(default, accept, null=None, **options)


def token_ids(default: TokenIds, *, vocab: str = "vocab_size", **options) -> Any:
    """A field for one token of the vocabulary, a list of them, or None; a list becomes a tuple."""

    def accept(value, config):
        most = getattr(config, vocab) - 1
        ids = tuple(value) if isinstance(value, list) else value
        if not is_whole(ids, 0, most) and not is_ids(ids, most):
            expected = f"a token id in 0..{most}, the vocabulary, a list of them, or null"
            raise must_be(expected, value)
        return ids

    return field(default, accept, null=None, **options)


def many(default: Collection | None, item: Any, *, length: str | None = None, **options) -> Any:
    """A field for a list of values of a kind, kept as a tuple.

    Args:
        item: a field of the items' kind, such as `choice(None, names)`.
        length: the field that holds the number of items; None: any number.
    """

    def accept(value, config):
        if not isinstance(value, list | tuple):
            raise must_be("a list", value)
        if length is not None and len(value) != getattr(config, length):
            expected = f"a list of {length} ({getattr(config, length)}) values"
            raise ValueError(f" must be {expected}, not of {len(value)}")
        items = []
        for place, one in enumerate(value):
            try:
                items.append(accepted(item, one, config))
            except ValueError as error:
                raise ValueError(f"[{place}]{error}") from error
        return tuple(items)

    return field(default, accept, **options)


def nested(cls: type["Config"], default: Any = None, *, null: Any = None, **options) -> Any:
    """A field for an object with fields of its own, those of a `Config`."""

    def accept(value, config):
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise must_be("an object", value)
        try:
            return cls.from_json(value)
        except ValueError as error:
            raise ValueError(f".{error}") from error

    return field(default, accept, null=null, **options)


def field(default: Any, accept: Accept, *, null: Any = REQUIRED, key: str | None = None) -> Any:
    """A dataclass field whose values `accept` checks and converts."""
    return dataclasses.field(default=default, metadata={"accept": accept, "null": null, "key": key})


def accepted(field: dataclasses.Field, value: Any, config: Any) -> Any:
    """The value that a field has if it is given this one.

    Raises:
        ValueError: the field cannot hold it; the message lacks the field's name.
    """
    null = field.metadata["null"]
    if value is not None or null is REQUIRED:
        return field.metadata["accept"](value, config)
    return null(config) if callable(null) else null


# Relations between fields.


@dataclasses.dataclass(frozen=True)
class Relation:
    """A property of several fields.

    Attributes:
        holds: whether a config has it.
        message: the error otherwise, with fields in braces.
    """

    holds: Callable[[Any], bool]
    message: str


def multiple(whole: str, part: str) -> Relation:
    """The field `whole` is a multiple of the field `part`."""
    return Relation(
        lambda config: getattr(config, whole) % getattr(config, part) == 0,
        f"{whole} ({{{whole}}}) must be a multiple of {part} ({{{part}}})",
    )


def only(name: str, value: Any, reason: str) -> Relation:
    """The field has one value that is supported."""
    return Relation(
        lambda config: getattr(config, name) == value,
        f"{name} must be {json.dumps(value, allow_nan=False)}, not {{{name}}}: {reason}",
    )


# Configs.


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass whose fields are checked when one is made.

    Attributes:
        relations: what must hold between fields.
        folder: where the config was read from, or None. It is not a field: models of the same
            architecture share compiled programs, whatever their folders.

    Raises:
        ValueError: a field cannot hold its value, or a relation does not hold.
    """

    relations: ClassVar[tuple[Relation, ...]] = ()
    folder: ClassVar[Path | None] = None

    def __post_init__(self):
        for name, field in own_fields(type(self)).items():
            try:
                value = accepted(field, getattr(self, name), self)
            except ValueError as error:
                raise ValueError(f"{key_of(field)}{error}") from error
            object.__setattr__(self, name, value)
        for relation in self.relations:
            if not relation.holds(self):
                raise ValueError(relation.message.format_map(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config in an object of a JSON file, whose other keys are ignored."""
        fields = {name: key_of(field) for name, field in own_fields(cls).items()}
        return cls(**{name: values[key] for name, key in fields.items() if key in values})

    def changed(self, folder: Path | None = None, **changes: Any) -> Self:
        """A copy with other fields, and with this folder, or else the same one."""
        copy = dataclasses.replace(self, **changes)
        object.__setattr__(copy, "folder", folder or self.folder)
        return copy

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        plain = lambda value: value.to_json() if isinstance(value, Config) else value
        return {
            key_of(field): plain(getattr(self, name))
            for name, field in own_fields(type(self)).items()
        }


@functools.cache
def own_fields(cls: type[Config]) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def key_of(field: dataclasses.Field) -> str:
    """The field's name in config.json."""
    return field.metadata["key"] or field.name
