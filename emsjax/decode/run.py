"""The parts of a run, as one frozen object that is passed whole."""

import dataclasses
from typing import Any

import jax

from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.kernels import Kernels
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.sampling.penalties import processors_for
from emsjax.sampling.processors import LogitsProcessor
from emsjax.sampling.settings import Controls
from emsjax.values import pytree


@pytree
class Run:
    """A model and everything that decides how it decodes; a pytree.

    Attributes:
        model: the target.
        drafter: the draft source; None: plain decoding.
        policy: limits draft lengths; None: as many as the drafter proposes.
        processors: what users add to the settings that change logits, before anything is drawn
            or compared.
        kernels: attention and cache update; static.
        layout: what is padded; static.
    """

    model: Model
    drafter: Drafter | None
    policy: DraftLength | None
    processors: tuple[LogitsProcessor, ...] = ()
    kernels: Kernels = dataclasses.field(default=None, metadata={"static": True})
    layout: Layout = dataclasses.field(default=UNPADDED, metadata={"static": True})

    @property
    def max_draft_tokens(self) -> int:
        """The drafter's limit; 0 without one."""
        return 0 if self.drafter is None else int(self.drafter.max_draft_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose hidden states the drafter wants."""
        return () if self.drafter is None else tuple(self.drafter.taps)

    def all_processors(self, controls: Controls | None) -> tuple[LogitsProcessor, ...]:
        """The processors of settings, then those of the user."""
        return (*processors_for(controls), *self.processors)

    @property
    def flat_drafter(self) -> Any:
        """The drafter in the form that `flat` uses."""
        return _Flat.of(self.drafter)

    def flat(self) -> "Run":
        """The run with its pytrees flattened once, for several calls of a compiled function.

        Each call flattens its arguments, and for a model's Python objects that takes
        milliseconds in which the device is idle.
        """
        return dataclasses.replace(self, model=_Flat.of(self.model), drafter=self.flat_drafter)

    def whole(self) -> "Run":
        """The inverse of `flat`; a run that is not flat stays as it is."""
        parts = {name: getattr(self, name) for name in ("model", "drafter")}
        whole = {n: part.whole() for n, part in parts.items() if isinstance(part, _Flat)}
        return dataclasses.replace(self, **whole) if whole else self


@pytree
class _Flat:
    """A flattened pytree."""

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> "_Flat":
        return tree if isinstance(tree, _Flat) else cls(*jax.tree.flatten(tree))

    def whole(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)
