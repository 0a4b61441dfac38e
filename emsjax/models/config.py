"""What the configs of all families share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from emsjax.models.architecture import ACTIVATIONS, Architecture, AttentionKind
from emsjax.models.quantised import scheme_of
from emsjax.models.schema import Config, Relation, choice, count, many, number, shown

MAX_LAYERS = 10_000  # a layer takes memory even before its weights are read
# See `DecoderConfig.sizes`.
OWN_HEADS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "ffn_size": "intermediate_size",
    "heads": "num_attention_heads",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # entries of `layer_types`


class DecoderConfig(Config):
    """Base of the configs of all families, frozen dataclasses with transformers' field names.

    Attributes:
        architecture: the model as data.
        sizes: the fields' names for the number of layers, the width of the residual stream, the
            size of feed-forward parts, and the numbers of heads and of K/V heads. A family in
            which each head has keys and values of its own has no name for the latter.
    """

    architecture: Architecture
    sizes: ClassVar[dict[str, str]] = OWN_HEADS | {"kv_heads": "num_key_value_heads"}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        ids = self.eos_token_id
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)

    def resized(self, **sizes: int) -> Self:
        """The config with other sizes, by the names in `sizes`; the layers are the first ones."""
        layers = sizes.pop("layers", None)
        named = {self.sizes[name]: size for name, size in sizes.items() if name in self.sizes}
        config = self.changed(**named)
        return config if layers is None else config.with_layers(range(layers))

    def with_layers(self, chosen: Iterable[int]) -> Self:
        """The config of a model that has only these layers of this one.

        Raises:
            ValueError: the attention of layers depends on their place.
        """
        kinds = tuple(self.architecture.layers[index] for index in chosen)
        fields = {self.sizes["layers"]: len(kinds)}
        if hasattr(self, "layer_types"):
            fields["layer_types"] = layer_types(kinds)
        config = self.changed(**fields)
        if config.architecture.layers != kinds:
            raise ValueError("layers depend on their place: only the first can be kept")
        return config


def layer_types(kinds: Iterable[AttentionKind]) -> tuple[str, ...]:
    """The layers' kinds as `layer_types` in config.json has them."""
    return tuple(FULL if kind.window is None else SLIDING for kind in kinds)


def windowed(
    kinds: Iterable[AttentionKind], types: Iterable[str], window: int | None
) -> tuple[AttentionKind, ...]:
    """The layers, with this window where `types` says so."""
    return tuple(
        dataclasses.replace(kind, window=window) if type == SLIDING else kind
        for kind, type in zip(kinds, types, strict=True)
    )


# Fields and relations of several families.


def layers(default: int):
    """A field for the number of layers."""
    return count(default, most=MAX_LAYERS)


def activation(default: str, **options):
    """A field for an activation."""
    return choice(default, ACTIVATIONS, **options)


def epsilon(default: float):
    """A field for what is added to a variance or mean square."""
    return number(default, least=0.0)


def kv_heads(default: int | None):
    """A field for the number of heads of keys and values; None: as many as query heads."""
    return count(default, null=lambda config: config.num_attention_heads)


def head_dim(default: int | None = None):
    """A field for the size of heads; None: hidden_size / num_attention_heads."""
    return count(default, null=lambda config: config.hidden_size // config.num_attention_heads)


def types_of_layers(is_full: Callable[[Any, int], bool]):
    """A field for the kind of every layer's attention.

    Args:
        is_full: whether a config's layer of this number has no window, if the field is None.
    """

    def default(config):
        layers = range(config.num_hidden_layers)
        return tuple(FULL if is_full(config, layer) else SLIDING for layer in layers)

    return many(None, choice(None, (FULL, SLIDING)), length="num_hidden_layers", null=default)


def even(name: str) -> Relation:
    """The field, a number of rotated numbers of a head, is even."""
    return Relation(
        lambda config: getattr(config, name) % 2 == 0,
        f"{name} ({{{name}}}) must be even: numbers are rotated in pairs",
    )


def check_supported(values: Mapping[str, Any], model_types: Iterable[str]) -> None:
    """Check what a config.json says about the model as a whole.

    Raises:
        ValueError: `model_type` is not one of these, or the weights are quantised by a method that
            is not read.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types:
        raise ValueError(
            f"model_type must be one of {', '.join(sorted(model_types))}, not {shown(model_type)}: "
            "other families, mixtures of experts and models of images are not supported"
        )
    scheme_of(values)
