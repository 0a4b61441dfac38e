"""Block drafters in training.

In every step, places of the text are drawn at random, the anchors. The block behind an anchor is
the anchor's token and masks, as in drafting: it sees keys and values of the hidden states before
the anchor, and itself. So one pass trains the drafts of all blocks at once.

Axis legend: see `emsjax.decode.pack`; a = anchors of a sequence, g = tokens of a block.

Reference: DFlash and DSpark, arXiv 2607.05147, whose weights decay by exp(-1/4) from place to
place, and whose confidence head learns the probability of acceptance.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.checks import check_at_least
from emsjax.distillation.features import DECAY, FeatureStudent, Predictions
from emsjax.distillation.fresh import (
    common_fields,
    evenly_spaced_taps,
    frequencies,
    fresh_network,
    shares_tables,
)
from emsjax.distillation.passes import attend_to_context
from emsjax.distillation.sequences import Batch
from emsjax.drafters.block_drafter import BlockDrafter
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.drafters.feature_formats import block_json
from emsjax.drafters.feature_network import embed, head_logits
from emsjax.models.decoder import Decoder
from pallas_kernels.common.indexing import take_in_rows

LAYERS = 2


class Anchors(NamedTuple):
    """The places of the last tokens before drafts.

    Attributes:
        places: the places within their sequences, in any order.
        valid: whether the text goes on behind them; others are ignored.
    """

    places: Int32[Array, "b a"]
    valid: Bool[Array, "b a"]


class BlockStudent(FeatureStudent):
    """A block drafter in training, with random anchors.

    Args:
        network: the weights before training, in any dtype.
        draft_ids: the target's id of each token that can be drafted; None: all, in order.
        anchors: blocks of each sequence and step, at different places; None: as many as its tokens
            fill.
        decay: weight of each place's loss relative to the place before, above 0 and at most 1.

    Raises:
        ValueError: a number is out of range.

    Reference: DSpark, arXiv 2607.05147.
    """

    make = BlockDrafter

    def __init__(
        self,
        network: BlockNetwork,
        draft_ids: Any = None,
        *,
        anchors: int | None = None,
        decay: float = DECAY,
    ):
        super().__init__(network, draft_ids, decay=decay)
        self.anchors = None if anchors is None else check_at_least("anchors", anchors, 1)

    @classmethod
    def fresh(
        cls,
        target: Decoder,
        documents: Sequence[np.ndarray],
        *,
        layers: int = LAYERS,
        draft_vocab_size: int | None = None,
        taps: Sequence[int] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> "BlockStudent":
        """A drafter with random weights, whose masks are the documents' rarest token.

        Args:
            target: the model for which it drafts. Its embeddings and, unless only some tokens can
                be drafted, its head are shared if it neither scales nor caps nor projects them.
            documents: token ids to train on, int32 [t] each.
            layers: draft layers.
            draft_vocab_size: tokens that can be drafted, the most frequent ones of the documents;
                None: all.
            taps: the target's layers whose hidden states are read, 0 (the embeddings) to their
                number; None: up to five, from low to high.
            seed: seed of the weights.
            settings: `anchors` and `decay`, and fields of a block: `block_size`, `markov_rank`,
                `markov_head_type`, `enable_confidence_head`. With a sequential head, the output at
                the last token is the first draft, as in DSpark.

        Raises:
            ValueError: a number is out of range.
        """
        a = target.architecture
        of_student = {name: settings.pop(name) for name in ("anchors", "decay") if name in settings}
        taps = evenly_spaced_taps(len(a.layers), 5) if taps is None else taps
        options = {"layers": layers, "draft_vocab_size": draft_vocab_size}
        fields, ids = common_fields(target, documents, taps, **options)
        is_sequential = bool(settings.get("markov_rank", 0))
        is_confident = bool(settings.get("enable_confidence_head", False))
        rarest = np.lexsort((-np.arange(a.vocab_size), frequencies(documents, a.vocab_size)))[0]
        config = BlockConfig(
            **fields,
            owns_head=ids is not None or not shares_tables(target),
            mask_token_id=int(rarest),
            sample_from_anchor=is_sequential,
            confidence_head_with_markov=is_sequential and is_confident,
            **settings,
        )
        return cls(fresh_network(BlockNetwork, config, target, ids, seed), ids, **of_student)

    def predictions(self, drafter: BlockDrafter, hidden, taps, batch: Batch, key) -> Predictions:
        anchors = self.draw(batch, key)
        outputs = self.outputs(drafter, taps, batch, anchors)
        tokens, segments, _ = batch
        # Draft i follows token i of the block.
        before = anchors.places[:, :, None] + jnp.arange(outputs.shape[2])
        inside = (before + 1 < tokens.shape[1]) & anchors.valid[:, :, None]
        own = take_in_rows(segments, anchors.places)
        inside &= _at(segments, before + 1) == own[:, :, None]
        labels = _at(tokens, before + 1)
        return Predictions(
            outputs,
            _at(hidden, before),
            _at(tokens, before),
            labels,
            self.weights_of(inside, labels),
        )

    def draw(self, batch: Batch, key: Key[Array, ""]) -> Anchors:
        """Anchors, all of different places of their sequences."""
        segments, (count, length) = batch.segment_ids, batch.tokens.shape
        wanted = self.anchors or length // self.module.config.block_size
        follows = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
        order = jnp.where(follows, jax.random.uniform(key, (count, length)), -1.0)
        chosen, places = lax.top_k(order, max(1, min(wanted, length)))
        return Anchors(places.astype(jnp.int32), chosen >= 0)

    def outputs(
        self,
        drafter: BlockDrafter,
        taps: tuple[Float[Array, "r e"], ...],
        batch: Batch,
        anchors: Anchors,
    ) -> Float[Array, "b a k e"]:
        """The normalised outputs from which the drafts behind each anchor follow."""
        network, (tokens, segments, positions) = drafter.network, batch
        a, config, (count, length) = network.architecture, network.config, tokens.shape
        blocks = (*anchors.places.shape, config.block_size)
        places = take_in_rows(positions, anchors.places)[:, :, None] + jnp.arange(blocks[2])
        same = take_in_rows(segments, anchors.places)[:, :, None] == segments[:, None, :]
        visible = same & (jnp.arange(length) < anchors.places[:, :, None])
        last = take_in_rows(tokens, anchors.places)[:, :, None]
        token_ids = jnp.where(jnp.arange(blocks[2]) > 0, config.mask_token_id, last)
        contexts = network.context(taps, positions.reshape(-1))

        def through(index, layer, stream, turns):
            context = contexts[index][:, a.heads :].reshape(count, length, -1, a.head_dim)

            def see(qkv, kind):
                query, own = jnp.split(qkv.reshape(*blocks, *qkv.shape[1:]), [a.heads], axis=3)
                seen = attend_to_context(query, context, own, visible, scale=kind.scale)
                return seen.reshape(-1, a.heads, a.head_dim)

            return layer(*stream, turns, see)[:2]

        embeddings = embed(drafter.embeddings, token_ids.reshape(-1))
        hidden = network.run(embeddings, places.reshape(-1), through)
        return hidden.reshape(*blocks, -1)[:, :, config.block_size - config.drafts :]

    def head(self, drafter: BlockDrafter, hidden, before):
        network, (*_, count, width) = drafter.network, hidden.shape
        hidden, before = hidden.reshape(-1, count, width), before.reshape(-1, count)
        start = head_logits(drafter.head, hidden.reshape(-1, width))
        start = start.reshape(*hidden.shape[:2], -1)
        log_odds = None
        if network.confidence_head is not None:
            log_odds = network.confidence_logits(hidden, before).reshape(-1)
        memory, logits = network.init_memory(len(hidden)), []
        for i in range(count if network.markov_head is not None else 0):
            out = network.at_place(start[:, i], hidden[:, i], before[:, i], memory)
            memory = out.memory
            logits.append(out.logits)
        logits = jnp.stack(logits, axis=1) if logits else start
        return logits.reshape(-1, logits.shape[-1]), log_odds

    def contents(self, drafter: BlockDrafter) -> dict[str, Any]:
        return block_json(drafter.network.config)


def _at(x: Array, places: Int32[Array, "b a k"]) -> Array:
    """The entries of sequences [b, t, ...] at places; beyond the end, the last ones."""
    places = jnp.minimum(places, x.shape[1] - 1)
    return x[jnp.arange(len(x))[:, None, None], places]
