"""Drafting from the target's hidden states, a block at a time: DFlash and DSpark, arXiv 2607.05147.

In every layer of the network, the keys and values of a sample's tokens are products of the target's
hidden states at these tokens. The last token and masks behind it form a block, whose places see
those and each other. So one forward pass drafts all tokens of the block; DSpark then goes through
them in order, and adds logits that depend on the token before.

Axis legend: see `emsjax.decode.pack`; g = tokens of a block, w = draft vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import check_number
from emsjax.decode.base import Draft, ObservedRows
from emsjax.decode.cache import KVCache
from emsjax.drafters.block_network import BlockNetwork
from emsjax.drafters.feature_drafter import BlockRows, FeatureDrafter, Shared, append
from emsjax.drafters.feature_files import DrafterFormat, load_drafter, save
from emsjax.drafters.feature_formats import block_config, block_json
from emsjax.drafters.feature_network import embed, head_logits
from emsjax.drafters.growing import GrowingDraft, Randomness
from emsjax.models.layers import run_layer
from emsjax.verification import leading
from pallas_kernels.common.indexing import take

FORMAT = DrafterFormat(
    network=BlockNetwork,
    parse=block_config,
    modules={
        "hidden_norm": "hidden_norm",
        "markov_head.markov_w1": "markov_head.markov_w1",
        "markov_head.markov_w2": "markov_head.markov_w2",
        "markov_head.gate_proj": "markov_head.gate_proj",
        "markov_head.joint_proj": "markov_head.joint_proj",
        "confidence_head": "confidence_head.proj",
    },
)


@jax.tree_util.register_pytree_node_class
class BlockDrafter(FeatureDrafter):
    """Drafts a block of tokens in one forward pass over the target's hidden states.

    `from_pretrained` loads published drafters. Temperature, top-k, top-p and logits processors
    apply to the drafter's distribution as to the target's.

    Args:
        network: the weights.
        draft_ids: the target's id of each token that can be drafted, int32 [draft vocabulary];
            None: all tokens of the target can be.
        shared: the target's embeddings and head, if the network has none of its own.
        max_draft_tokens: limit per sample and step; None: as many as a block has, or the
            draft-length policy's limit if it is lower.
        min_confidence: a probability; a draft ends before the first token whose predicted
            probability of being accepted is lower. It depends on the tokens before alone, so the
            output keeps its distribution. 0: drafts do not end early.
        attention_implementation: as for `generate`.

    Raises:
        ValueError: `max_draft_tokens` is below 1 or above what a block drafts, `min_confidence` is
            not in 0..1 or the network has no head that predicts it, the arrays do not fit the
            network, or the attention is unknown.

    Reference: DSpark, arXiv 2607.05147, of which DFlash is the case without sequential head.
    """

    network: BlockNetwork

    def __init__(
        self,
        network: BlockNetwork,
        draft_ids: Any = None,
        shared: Shared | None = None,
        *,
        max_draft_tokens: int | None = None,
        min_confidence: float = 0.0,
        attention_implementation: str | Callable | None = None,
    ):
        most = network.config.drafts
        super().__init__(
            network,
            draft_ids,
            shared,
            max_draft_tokens=most if max_draft_tokens is None else max_draft_tokens,
            has_own_limit=max_draft_tokens is not None,
            attention_implementation=attention_implementation,
        )
        if self.max_draft_tokens > most:
            raise ValueError(
                f"max_draft_tokens must be at most {most}, as a block drafts, not "
                f"{self.max_draft_tokens}"
            )
        self.min_confidence = check_number(
            "min_confidence", min_confidence, "in 0..1", lambda x: 0 <= x <= 1
        )
        if self.min_confidence > 0 and network.confidence_head is None:
            raise ValueError(
                f"min_confidence must be 0, not {min_confidence}: the drafter has no head that "
                "predicts which tokens are accepted"
            )

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | PathLike,
        target: Any = None,
        *,
        dtype: DTypeLike | None = None,
        revision: str | None = None,
        quantize: str | None = None,
        max_draft_tokens: int | None = None,
        min_confidence: float = 0.0,
        attention_implementation: str | Callable | None = None,
    ) -> "BlockDrafter":
        """Loads a drafter in the format of DFlash, SpecForge, DeepSpec or speculators (vLLM).

        Args:
            path_or_repo_id: a folder, or an id on the Hugging Face hub.
            target: the model for which it drafts. It is needed if the folder has no embeddings or
                head of its own, whose arrays are then the target's, not copies, or if it does not
                name the layers that the drafter reads.
            dtype: bfloat16, float16 or float32; None: the target's, or without a target what suits
                the device. It must be the target's where arrays are shared.
            revision: a branch, tag or commit of the repository.
            quantize: the format to which the weights of the draft layers, of the product of hidden
                states and of the drafter's own head are rounded: see `emsjax.from_pretrained`.
                None: they have the dtype.
            max_draft_tokens, min_confidence, attention_implementation: see `BlockDrafter`.

        Raises:
            ValueError: see `emsjax.Eagle3.from_pretrained`.
        """
        return load_drafter(
            cls,
            FORMAT,
            path_or_repo_id,
            target,
            dtype=dtype,
            revision=revision,
            quantize=quantize,
            max_draft_tokens=max_draft_tokens,
            min_confidence=min_confidence,
            attention_implementation=attention_implementation,
        )

    def save_pretrained(self, path: str | PathLike) -> None:
        """Writes a folder in the format of speculators, without arrays of the target.

        Raises:
            ValueError: `path` is a file, or the weights are narrow.
        """
        save(FORMAT, self, path, block_json(self.network.config))

    def with_limit(self, max_draft_tokens: int) -> "BlockDrafter":
        """Returns the drafter with this limit, or a block's, unless it was created with its own."""
        return super().with_limit(min(max_draft_tokens, self.network.config.drafts))

    def init(self, prompts, prompt_lengths, max_len: int) -> KVCache:
        return self.network.init_cache(prompts.shape[0], max_len)

    def admit(self, state: KVCache, tokens, lengths, fresh: Bool[Array, "b"]) -> KVCache:
        """Clears fresh slots."""
        return dataclasses.replace(state, lengths=jnp.where(fresh, 0, state.lengths))

    def observe(
        self, state: KVCache, rows: ObservedRows, taps: tuple[Float[Array, "r e"], ...]
    ) -> KVCache:
        """Writes keys and values of the rows' hidden states in every layer."""
        fresh = self.network.context(taps, rows.positions)
        return append(state, fresh, rows.segment_ids, rows.positions, self.kernels.update)

    def propose(
        self,
        state: KVCache,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        draft_lengths: Int32[Array, "b"],
        keys,
        sampling,
    ) -> tuple[Draft, KVCache]:
        batch = tokens.shape[0]
        wanted = jnp.clip(draft_lengths, 0, self.max_draft_tokens)
        last = take(tokens, jnp.arange(batch), jnp.maximum(lengths - 1, 0))
        begun, randomness = self.begin(wanted, sampling), Randomness(keys, sampling)

        def draft():
            hidden = self._run(state, last, wanted > 0)
            return self._choose(begun, hidden, last, lengths, randomness)

        drafted = lax.cond(jnp.any(wanted > 0), draft, lambda: begun)
        return drafted.finished(self.max_draft_tokens), state

    def _run(
        self, state: KVCache, last: Int32[Array, "b"], active: Bool[Array, "b"]
    ) -> Float[Array, "b k e"]:
        """The network's normalised outputs from which the draft tokens of each sample follow."""
        network, config = self.network, self.network.config
        batch, size = last.shape[0], config.block_size
        rows, visible = BlockRows.behind(state.lengths, active, size)
        masks = jnp.full((batch, size - 1), config.mask_token_id, jnp.int32)
        token_ids = jnp.concatenate([last[:, None], masks], axis=1).reshape(-1)
        every = jnp.ones((batch * size, size), bool)  # a block's places see each other
        attention = functools.partial(self.kernels.attention, ancestors=every)
        options = {"attention": attention, "max_rows_per_sample": size}

        def through(index, layer, stream, turns):
            cached = state.layers[index]
            return run_layer(layer, stream, turns, cached, rows, visible, **options)[:2]

        hidden = network.run(embed(self.embeddings, token_ids), rows.positions, through)
        first = config.block_size - config.drafts
        return hidden.reshape(batch, size, -1)[:, first : first + self.max_draft_tokens]

    def _choose(
        self,
        draft: GrowingDraft,
        hidden: Float[Array, "b k e"],
        last: Int32[Array, "b"],
        lengths: Int32[Array, "b"],
        randomness: Randomness,
    ) -> GrowingDraft:
        """The draft with a token for each of the outputs.

        They are chosen one after the other if a sequential head or processors see the tokens
        before, otherwise at once.
        """
        network, (batch, count, width) = self.network, hidden.shape
        logits = head_logits(self.head, hidden.reshape(-1, width)).reshape(batch, count, -1)
        at = lambda values, step: lax.dynamic_index_in_dim(values, step, axis=1, keepdims=False)

        def advance(step, carry):
            draft, token, memory = carry
            out = network.at_place(at(logits, step), at(hidden, step), token, memory)
            draft, token = self._extend(draft, step, out.logits, lengths, randomness)
            return draft, token, out.memory

        if network.markov_head is None and self.process is None:
            columns, ids = self._columns(logits, randomness)
            draft = draft.filled(columns, lengths, randomness, ids)
        else:
            start = (draft, last, network.init_memory(batch))
            draft, _, _ = lax.fori_loop(0, count, advance, start)
        if self.min_confidence == 0:
            return draft
        before = jnp.concatenate([last[:, None], draft.tokens[:, :-1]], axis=1)
        sure = jax.nn.sigmoid(network.confidence_logits(hidden, before)) >= self.min_confidence
        return dataclasses.replace(draft, counts=jnp.minimum(draft.counts, leading(sure)))
