"""What a family of models adds to the shared decoder: its config and its names on disk."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


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
        ignored: regular expressions of stored tensors that are no weights.
        transposed: whether kernels are stored as [outputs, inputs].
        columns: for a config, where each column of a layer's product of queries, keys and values
            is stored among the columns on disk; None: in the same order.
    """

    model_type: str
    class_name: str
    config: type
    modules: Mapping[str, str | tuple[str, ...]]
    prefix: str = "model."
    ignored: tuple[str, ...] = ()
    transposed: bool = True
    columns: Callable[[Any], np.ndarray] | None = None
