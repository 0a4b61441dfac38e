"""EAGLE-3 in training.

While drafting, the network reads its own outputs: the target's hidden states are known up to the
last token only. So does training: from every place of a text, the network is unrolled over several
steps, in each of which it reads what it has put out in the step before ("training-time test").

Step j at place p sees the pair of token p + j + 1 and the feature that step j - 1 put out, or the
target's feature of place p if j is 0. It attends to the pairs of places 0 to p with the target's
features, and to those of steps 1 to j from the same place p. It predicts token p + j + 2.

Axis legend: see `emsjax.decode.pack`.

Reference: arXiv 2503.01840. The authors' code unrolls 7 steps, with weights 0.8^j.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from emsjax.checks import check_at_least
from emsjax.distillation.features import DECAY, FeatureStudent, Predictions
from emsjax.distillation.fresh import (
    common_fields,
    evenly_spaced_taps,
    fresh_network,
    shares_tables,
)
from emsjax.distillation.passes import attend_to_context
from emsjax.distillation.sequences import Batch
from emsjax.drafters.eagle3 import Eagle3
from emsjax.drafters.eagle3_network import Eagle3Config, Eagle3Network
from emsjax.drafters.feature_formats import eagle3_json
from emsjax.drafters.feature_network import embed, head_logits
from emsjax.models.decoder import Decoder

STEPS = 7
DRAFT_VOCABULARY = 32_000


class Eagle3Student(FeatureStudent):
    """An EAGLE-3 drafter in training, with steps that are unrolled.

    Args:
        network: the weights before training, in any dtype.
        draft_ids: the target's id of each token that can be drafted; None: all, in order.
        unroll: steps, which feed back what the network puts out.
        decay: weight of each step's loss relative to the step before, above 0 and at most 1.

    Raises:
        ValueError: a number is out of range.

    Reference: arXiv 2503.01840.
    """

    make = Eagle3

    def __init__(
        self,
        network: Eagle3Network,
        draft_ids: Any = None,
        *,
        unroll: int = STEPS,
        decay: float = DECAY,
    ):
        super().__init__(network, draft_ids, decay=decay)
        self.unroll = check_at_least("unroll", unroll, 1)

    @classmethod
    def fresh(
        cls,
        target: Decoder,
        documents: Sequence[np.ndarray],
        *,
        draft_vocab_size: int | None = None,
        taps: Sequence[int] | None = None,
        share_head: bool = False,
        seed: int = 0,
        **settings: Any,
    ) -> "Eagle3Student":
        """A drafter with random weights, and a head that is or begins as the target's.

        Args:
            target: the model for which it drafts. Its embeddings are shared, unless it scales them
                or they have another width.
            documents: token ids to train on, int32 [t] each.
            draft_vocab_size: tokens that can be drafted, the most frequent ones of the documents;
                None: 32,000, or all if there are fewer or the head is shared.
            taps: the target's layers whose hidden states are read, 0 (the embeddings) to their
                number; None: three, from low to high.
            share_head: whether the head is the target's, which is not trained and not saved: all
                tokens can be drafted, and the target must neither scale its embeddings nor cap,
                shift or project its logits.
            seed: seed of the weights.
            settings: `unroll`, `decay`.

        Raises:
            ValueError: a number is out of range, or the head cannot be shared.
        """
        a = target.architecture
        if share_head:
            check_shared_head(target, draft_vocab_size)
        if draft_vocab_size is None:
            draft_vocab_size = a.vocab_size if share_head else min(DRAFT_VOCABULARY, a.vocab_size)
        taps = evenly_spaced_taps(len(a.layers), 3) if taps is None else taps
        options = {"layers": 1, "draft_vocab_size": draft_vocab_size}
        fields, ids = common_fields(target, documents, taps, **options)
        # The norms of EAGLE 3.1, as layers may differ in scale.
        switches = {"fc_norm": True, "norm_output": True, "owns_head": not share_head}
        config = Eagle3Config(**fields, **switches)
        return cls(fresh_network(Eagle3Network, config, target, ids, seed), ids, **settings)

    def predictions(self, drafter: Eagle3, hidden, taps, batch: Batch, key) -> Predictions:
        outputs = self.outputs(drafter, taps, batch)
        steps = range(self.unroll)
        tokens, segments, _ = batch
        later = lambda x, n: jnp.stack([_shifted(x, n + j) for j in steps], axis=2)
        # No token follows behind the end of a sequence, and zeros are no segment's number there.
        inside = later(segments + 1, 2) == (segments + 1)[:, :, None]
        labels = later(tokens, 2)
        found = Predictions(
            jnp.stack(outputs, axis=2),
            later(hidden, 1),
            later(tokens, 1),
            labels,
            self.weights_of(inside, labels),
        )
        return Predictions(*(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in found))

    def outputs(
        self, drafter: Eagle3, taps: tuple[Float[Array, "r e"], ...], batch: Batch
    ) -> list[Float[Array, "b t e"]]:
        """The normalised outputs of every step at every place."""
        network, (tokens, segments, positions) = drafter.network, batch
        a, (count, length) = network.architecture, tokens.shape
        at = jnp.arange(length)
        visible = (segments[:, :, None] == segments[:, None, :]) & (at <= at[:, None])
        context, own, outputs = None, [], []

        def see(qkv, kind):
            nonlocal context
            query, fresh = jnp.split(qkv.reshape(count, length, *qkv.shape[1:]), [a.heads], axis=2)
            if context is None:
                context = fresh
            else:
                own.append(fresh)
            chain = jnp.stack(own, axis=2) if own else None
            seen = attend_to_context(query[:, :, None], context, chain, visible, scale=kind.scale)
            return seen.reshape(-1, a.heads, a.head_dim)

        feature = network.feature(taps)
        for step in range(self.unroll):
            token_ids = _shifted(tokens, step + 1).reshape(-1)
            embeddings = embed(drafter.embeddings, token_ids)
            out = network.run(feature, embeddings, positions.reshape(-1) + step, see)
            outputs.append(out.normed.reshape(count, length, -1))
            feature = out.feature
        return outputs

    def head(self, drafter: Eagle3, hidden, before):
        return head_logits(drafter.head, hidden.reshape(-1, hidden.shape[-1])), None

    def contents(self, drafter: Eagle3) -> dict[str, Any]:
        return eagle3_json(drafter.network.config, drafter.max_draft_tokens)


def check_shared_head(target: Decoder, draft_vocab_size: int | None) -> None:
    """Raises ValueError unless a drafter of so many tokens can use the target's head."""
    vocab_size = target.architecture.vocab_size
    if draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            f"share_head needs all {vocab_size} tokens to be drafted, as the target's head has "
            f"them, and draft_vocab_size is {draft_vocab_size}"
        )
    if not shares_tables(target):
        raise ValueError(
            "share_head needs a target on one device that neither scales its embeddings nor caps, "
            "shifts or projects its logits"
        )


def _shifted(x: Float[Array, "b t ..."] | Int32[Array, "b t"], n: int):
    """x[:, n:], with zeros at the end."""
    return jnp.pad(x[:, n:], [(0, 0), (0, min(n, x.shape[1])), *[(0, 0)] * (x.ndim - 2)])
