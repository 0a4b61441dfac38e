"""What a family of models adds to the shared decoder: its config and its names on disk."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from emsjax.models.config import DecoderConfig

LAYER = "{}"  # the place of a layer's number in names


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
        model_type: the family's name in config.json.
        class_name: the class of transformers that loads its models.
        config: the class of its configs, whose `architecture` describes a model.
        modules: the stored names of every module of `Decoder`, with {} for a layer's number. Where
            a module's tensors are stored in several parts there are several names, in the order
            of the module's columns.
        prefix: a beginning of stored names that some files leave out.
        ignored: a regular expression of stored names, without the prefix, that are no weights.
        head: the stored name of the head.
        can_untie: whether there are models whose head is not the table of embeddings.
        transposed: whether kernels are stored as [outputs, inputs].
        columns: for a config, where each column of a layer's product of queries, keys and values
            is stored among the columns on disk; None: in the same order.
        has_flax: whether Flax checkpoints can be read, whose modules have the same names.
    """

    model_type: str
    class_name: str
    config: type[DecoderConfig]
    modules: Mapping[str, str | tuple[str, ...]]
    prefix: str = "model."
    ignored: str | None = None
    head: str = "lm_head"
    can_untie: bool = True
    transposed: bool = True
    columns: Callable[[DecoderConfig], np.ndarray] | None = None
    has_flax: bool = False

    def stored_modules(self, module: str) -> tuple[str, ...]:
        """The stored names of a module of `Decoder`, without the prefix."""
        names = self.modules[module]
        names = (names,) if isinstance(names, str) else names
        return tuple(name.removeprefix(self.prefix) for name in names)

    @property
    def layers_prefix(self) -> str:
        """What precedes the layer's number in the stored names, without the prefix."""
        return self.stored_modules("layers.{}.attention_norm")[0].partition(LAYER)[0]

    def full_name(self, name: str) -> str:
        """A stored name with the prefix, which the head's parameters do not have."""
        return name if name.partition(".")[0] == self.head else self.prefix + name
