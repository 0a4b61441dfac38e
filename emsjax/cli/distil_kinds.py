"""The kinds of drafters that `emsjax distil` trains: their options, and how each begins."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from emsjax import distillation
from emsjax.distillation.draft_model import DraftModelStudent
from emsjax.distillation.fresh import has_plain_tables, layer_config
from emsjax.distillation.pruning import PROJECTED, num_parameters, pruned_config
from emsjax.distillation.student import Student
from emsjax.drafters.folders import check_is_no_drafter
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.pretrained import from_pretrained
from emsjax.terminal.models import load_config
from emsjax.terminal.options import flag

Documents = list[np.ndarray]
# What a few options are called in Python.
PARAMETERS = {"confidence_head": "enable_confidence_head", "markov_head": "markov_head_type"}


class Kind:
    """A kind of drafter.

    Attributes:
        options: the names of its own options, with their values if they are not given.
    """

    options: ClassVar[Mapping[str, Any]]

    def check(self, options: argparse.Namespace, config: DecoderConfig) -> int:
        """The most tokens of a sequence that it can be trained and evaluated on.

        Args:
            options: the command's.
            config: the target's architecture.

        Raises:
            ValueError: options do not suit the target or each other.
        """
        raise NotImplementedError

    def student(
        self,
        options: argparse.Namespace,
        target: Decoder,
        texts: Documents,
        documents: Callable[[], Documents],
    ) -> Student:
        """The drafter before training.

        Args:
            texts: the user's texts.
            documents: returns the texts and the target's continuations.
        """
        raise NotImplementedError


class DraftModelKind(Kind):
    """A small model."""

    options: ClassVar = {
        "layers": None,
        "width": None,
        "embeddings": None,
        "start": "pruned",
        "draft_model": None,
        "draft_revision": None,
    }

    def check(self, options: argparse.Namespace, config: DecoderConfig) -> int:
        draft = self._config(options, config)
        return min(config.max_position_embeddings, draft.max_position_embeddings)

    def _config(self, options: argparse.Namespace, config: DecoderConfig) -> DecoderConfig:
        """The draft model's architecture.

        Raises:
            ValueError: sizes that do not suit the target, another vocabulary, or a draft model that
                is not smaller than the target.
        """
        if options.draft_model is None:
            if options.layers is None or options.width is None:
                raise ValueError("--layers and --width are needed, or --draft-model")
            if options.draft_revision is not None:
                raise ValueError("--draft-revision needs --draft-model")
            options.embeddings = options.embeddings or PROJECTED
            try:
                return pruned_config(config, options.layers, options.width, options.embeddings)
            except ValueError as error:
                raise ValueError(f"--{error}") from error
        for name in ("layers", "width", "embeddings"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name}: --draft-model has its own")
        if options.start == "random":
            raise ValueError("--start random: training starts with --draft-model")
        check_is_no_drafter(options.draft_model, options.draft_revision)
        draft = load_config(options.draft_model, options.draft_revision)
        for name in ("vocab_size", "max_position_embeddings"):
            sizes = [getattr(one, name) for one in (draft, config)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"--draft-model has {name} {sizes[0]}, --target {sizes[1]}")
        sizes = [size_of(one) for one in (draft, config)]
        if sizes[0] >= sizes[1]:
            raise ValueError(
                f"--draft-model must be smaller than --target, and they have {sizes[0]:,} and "
                f"{sizes[1]:,} parameters"
            )
        return draft

    def student(self, options, target, texts, documents) -> Student:
        if options.draft_model is not None:
            revision = options.draft_revision
            start = from_pretrained(options.draft_model, dtype="float32", revision=revision)
        elif options.start == "random":
            config = self._config(options, target.config)
            start = Decoder(config, rngs=nnx.Rngs(options.seed), dtype=jnp.float32)
        else:
            sizes = (options.layers, options.width, options.embeddings)
            start = distillation.prune(target, *sizes, documents=texts)
        return DraftModelStudent(start)


class FeatureKind(Kind):
    """A drafter that reads the target's hidden states.

    Attributes:
        make: makes the student: a class of `emsjax.distillation` with `fresh`.
    """

    make: ClassVar[Any]

    def check(self, options: argparse.Namespace, config: DecoderConfig) -> int:
        layers, vocab_size = len(config.architecture.layers), config.vocab_size
        for tap in options.taps or ():
            if tap > layers:
                raise ValueError(f"--taps must lie in 0..{layers}, the target's layers, not {tap}")
        if (options.draft_vocab_size or 1) > vocab_size:
            raise ValueError(
                f"--draft-vocab-size must be at most {vocab_size}, the target's vocabulary, not "
                f"{options.draft_vocab_size}"
            )
        if not 0 < options.decay <= 1:
            raise ValueError(f"--decay must be above 0 and at most 1, not {options.decay}")
        try:
            layer_config(config.architecture, 1)
        except ValueError as error:
            raise ValueError(f"--kind {options.kind} does not suit the target: {error}") from error
        return config.max_position_embeddings

    def student(self, options, target, texts, documents) -> Student:
        settings = {name: getattr(options, name) for name in self.options}
        given = {PARAMETERS.get(name, name): x for name, x in settings.items() if x is not None}
        return self.make.fresh(target, documents(), seed=options.seed, **given)


class Eagle3Kind(FeatureKind):
    """EAGLE-3."""

    options: ClassVar = {
        "taps": None,
        "draft_vocab_size": None,
        "decay": 0.8,
        "share_head": False,
        "unroll": 7,
    }
    make = distillation.Eagle3Student

    def check(self, options: argparse.Namespace, config: DecoderConfig) -> int:
        if options.share_head and options.draft_vocab_size not in (None, config.vocab_size):
            raise ValueError(
                f"--share-head needs all {config.vocab_size} tokens to be drafted, not "
                f"--draft-vocab-size {options.draft_vocab_size}"
            )
        if options.share_head and not has_plain_tables(config.architecture):
            raise ValueError(
                "--share-head does not suit the target, which scales its embeddings, or caps, "
                "shifts or projects its logits"
            )
        return super().check(options, config)


class BlockKind(FeatureKind):
    """DFlash and DSpark."""

    options: ClassVar = {
        "taps": None,
        "draft_vocab_size": None,
        "decay": 0.8,
        "layers": 2,
        "block_size": 8,
        "anchors": None,
        "markov_rank": 0,
        "markov_head": None,
        "confidence_head": False,
    }
    make = distillation.BlockStudent

    def check(self, options: argparse.Namespace, config: DecoderConfig) -> int:
        if options.markov_head is not None and not options.markov_rank:
            raise ValueError("--markov-head needs --markov-rank, the numbers per token of the head")
        drafts = options.block_size - (not options.markov_rank)
        if not 2 <= options.block_size <= 1024:
            raise ValueError(f"--block-size must be in 2..1024, not {options.block_size}")
        if options.draft_tokens > drafts:
            raise ValueError(
                f"--draft-tokens must be at most {drafts}, as a block of --block-size "
                f"{options.block_size} drafts, not {options.draft_tokens}"
            )
        return super().check(options, config)


KINDS = {"draft-model": DraftModelKind(), "eagle3": Eagle3Kind(), "block": BlockKind()}


def kind_of(options: argparse.Namespace) -> Kind:
    """The kind of the options; its own options that are not given get their values.

    Raises:
        ValueError: an option of other kinds is given.
    """
    kind = KINDS[options.kind]
    for name in dict.fromkeys(name for one in KINDS.values() for name in one.options):
        if getattr(options, name) is None:
            setattr(options, name, kind.options.get(name))
        elif name not in kind.options:
            owners = " or ".join(f"--kind {n}" for n, one in KINDS.items() if name in one.options)
            raise ValueError(f"{flag(name)} is for {owners}, not for --kind {options.kind}")
    return kind


def size_of(config: DecoderConfig) -> int:
    """Number of parameters of a model with this architecture."""
    return num_parameters(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
