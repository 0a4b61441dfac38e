"""Where the parameters of a model are stored: names, shapes and layouts, from a table per family.

A linear layer's kernel is [inputs, outputs] here. Checkpoints store it transposed, in parts, or
with its columns in another order.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from emsjax.models.architecture import Architecture
from emsjax.models.family import Family

TORCH_LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight"}


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter of the model and the stored tensors that it consists of.

    Attributes:
        path: path in the model's state.
        names: names of the stored tensors, without the family's prefix.
        sizes: sizes of the stored tensors on the parameter's last axis.
        shape: the parameter's shape.
        transposed: whether they are stored with their axes swapped.
        columns: where each entry of the last axis is stored; None: in the same order.
    """

    path: tuple
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    columns: np.ndarray | None = None

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor, by name."""
        shapes = ((*self.shape[:-1], size) for size in self.sizes)
        turned = (shape[::-1] if self.transposed else shape for shape in shapes)
        return dict(zip(self.names, turned, strict=True))

    def join(self, parts: Sequence[Array], dtype) -> Array:
        """The parameter from its stored tensors."""
        return _join(parts, self.columns, transposed=self.transposed, dtype=jnp.dtype(dtype))

    def split(self, value: Array) -> list[Array]:
        """Inverse of `join`, in the parameter's dtype."""
        order = None if self.columns is None else np.argsort(self.columns)
        return _split(value, order, ends=self.sizes[:-1], transposed=self.transposed)


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def _join(parts, columns, *, transposed: bool, dtype) -> Array:
    parts = [(part.T if transposed else part).astype(dtype) for part in parts]
    value = jnp.concatenate(parts, axis=-1)
    return value if columns is None else jnp.take(value, columns, axis=-1)


@functools.partial(jax.jit, static_argnames=("ends", "transposed"))
def _split(value, order, *, ends: tuple[int, ...], transposed: bool) -> list[Array]:
    value = value if order is None else jnp.take(value, order, axis=-1)
    parts = jnp.split(value, np.cumsum(ends), axis=-1)
    return [part.T if transposed else part for part in parts]


def parameters(model: nnx.Module, family: Family, *, torch_layout: bool = True) -> list[Parameter]:
    """Where each parameter of a (possibly abstract) model is stored.

    Args:
        model: the model.
        family: the model's family.
        torch_layout: whether leaves are named as in PyTorch and kernels stored as the family's
            models in PyTorch do; otherwise they are Flax's.
    """
    columns = None if family.columns is None else family.columns(model.config)
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        module, leaf = _module_and_leaf(path, family)
        names = family.modules[module]
        names = (names,) if isinstance(names, str) else names
        layer = next((str(step) for step in path if isinstance(step, int)), "")
        stored_leaf = TORCH_LEAVES.get(leaf, leaf) if torch_layout else leaf
        stored = (f"{name.format(layer)}.{stored_leaf}" if leaf else name for name in names)
        found.append(
            Parameter(
                path=path,
                names=tuple(name.removeprefix(family.prefix) for name in stored),
                sizes=part_sizes(model.architecture, len(names), variable.shape[-1]),
                shape=variable.shape,
                transposed=leaf == "kernel" and torch_layout and family.transposed,
                columns=columns if module.endswith("qkv_proj") else None,
            )
        )
    return found


def _module_and_leaf(path: tuple, family: Family) -> tuple[str, str]:
    """The name of a parameter's module in the family's table and of the leaf within the module."""
    steps = ["{}" if isinstance(step, int) else str(step) for step in path]
    whole = ".".join(steps)
    return (whole, "") if whole in family.modules else (".".join(steps[:-1]), steps[-1])


def part_sizes(architecture: Architecture, parts: int, size: int) -> tuple[int, ...]:
    """Columns of each of the parts that are stored: q, k and v, gate and up, or one of all."""
    return architecture.columns if parts == 3 else (size // parts,) * parts
