"""Drafting with a copy of the target in a narrow format, which reads the target's own cache."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int32

from emsjax.decode.base import ModelConfig
from emsjax.decode.cache import KVCache
from emsjax.drafters.draft_model import DraftModel

SELF_FORMAT = "int4"  # of the weights, in commands


def narrow_copy(model: Any, load: Callable[[str], Any]) -> Any:
    """A model's copy with weights in SELF_FORMAT, for commands.

    Args:
        model: the target, with which the copy shares the rest if its weights are not narrow.
        load: loads it anew with weights in a format, which is rounded from the wide ones.
    """
    return model.quantize(SELF_FORMAT) if model.quantization is None else load(SELF_FORMAT)


@jax.tree_util.register_pytree_node_class
class SelfDraft(DraftModel):
    """Drafts tokens with another form of the target, which shares the target's cache.

    The draft model continues from the keys and values that the target has committed, and writes
    those of its draft tokens behind them, where the target's will be written: it needs no cache,
    reads no prompt and never has to catch up. It suits a target's copy whose layers are the
    same but for rounding, such as `model.quantize("int4")`, which needs no training.

    Args:
        draft_model: the model, of the target's architecture and dtype.
        max_draft_tokens, attention_implementation, branches: as for `DraftModel`.

    Raises:
        ValueError: as for `DraftModel`.

    Reference: the cache and the target's narrow weights as in QuantSpec, arXiv 2502.10424.
    """

    shares_cache = True
    first_rows = 1  # the target has read all tokens but the last one
    fork = None  # there is no state

    def __init__(
        self, draft_model, max_draft_tokens=None, attention_implementation=None, branches=1
    ):
        options = {"attention_implementation": attention_implementation, "branches": branches}
        super().__init__(draft_model, max_draft_tokens, **options)

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """Raises ValueError if the target has another architecture."""
        if self.draft_model.config != config:
            raise ValueError(
                "the draft model of a SelfDraft must have the target's config: it reads the "
                "target's cache"
            )

    def init(self, prompts, prompt_lengths, max_len) -> tuple[()]:
        return ()

    def admit(self, state: tuple[()], tokens, lengths, fresh) -> tuple[()]:
        return state

    def commit(self, state: tuple[()], lengths: Int32[Array, "b"]) -> tuple[()]:
        return state

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the distributions of one step's drafts."""
        return self.probs_bytes

    def _prefill(self, cache: KVCache, tokens, lengths) -> KVCache:
        return cache  # which is the target's
