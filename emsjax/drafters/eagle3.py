"""Drafting from the target's hidden states, a token at a time: EAGLE-3, arXiv 2503.01840.

For every place p of a sample but the last, the drafter's layer sees the pair (embedding of token
p + 1, feature of place p), where the feature is a product of the target's hidden states at p, and
predicts token p + 2. The pair's keys and values are kept at place p.

Axis legend: see `emsjax.decode.pack`.
"""

import dataclasses
from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import check_at_least
from emsjax.decode.base import Draft, ObservedRows
from emsjax.decode.cache import KVCache
from emsjax.drafters.eagle3_network import Eagle3Network, PairOutput
from emsjax.drafters.feature_drafter import BlockRows, FeatureDrafter, Shared, append
from emsjax.drafters.feature_files import DrafterFormat, load_drafter, save
from emsjax.drafters.feature_formats import eagle3_config, eagle3_json
from emsjax.drafters.feature_network import embed, head_logits
from emsjax.drafters.growing import Randomness, put
from emsjax.models.attention import attend
from emsjax.models.rotary import angles
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

DEFAULT_DRAFT_TOKENS = 4
FORMAT = DrafterFormat(
    network=Eagle3Network,
    parse=eagle3_config,
    modules={
        "tap_norms.{}": "fc_norm.{}",
        "input_norm": "input_norm",
        "layers.{}.feature_norm": "layers.{}.hidden_norm",
    },
    renamed={"midlayer.": "layers.0."},
)


@pytree
class Eagle3State:
    """What is kept of every sample.

    Attributes:
        cache: keys and values of all pairs of which both parts are known.
        feature: the feature of the last place that was observed, whose next token was not.
    """

    cache: KVCache
    feature: Float[Array, "b e"]


@jax.tree_util.register_pytree_node_class
class Eagle3(FeatureDrafter):
    """Drafts tokens with one layer that reads the target's hidden states.

    Keys and values of all tokens are computed in every call of the target, so that the state is up
    to date whether or not a sample drafts. Temperature, top-k, top-p and logits processors apply to
    the drafter's distribution as to the target's.

    `from_pretrained` loads published drafters.

    Args:
        network: the weights.
        draft_ids: the target's id of each token that can be drafted, int32 [draft vocabulary];
            None: all tokens of the target can be.
        shared: the target's embeddings and head, if the network has none of its own.
        max_draft_tokens: limit per sample and step; None: the draft-length policy's limit, or
            4 if the policy has none.
        attention_implementation: as for `generate`.
        branches: candidates for each token; 1: the draft is a chain. In a tree the likeliest tokens
            go on, as in that of a `DraftModel`.

    Raises:
        ValueError: `max_draft_tokens` is below 1, there are more branches than tokens, the arrays
            do not fit the network, or the attention is unknown.

    Reference: arXiv 2503.01840; the norms of EAGLE 3.1, arXiv 2605.09992.
    """

    network: Eagle3Network

    def __init__(
        self,
        network: Eagle3Network,
        draft_ids: Any = None,
        shared: Shared | None = None,
        *,
        max_draft_tokens: int | None = None,
        attention_implementation: str | Callable | None = None,
        branches: int = 1,
    ):
        super().__init__(
            network,
            draft_ids,
            shared,
            max_draft_tokens=DEFAULT_DRAFT_TOKENS if max_draft_tokens is None else max_draft_tokens,
            has_own_limit=max_draft_tokens is not None,
            attention_implementation=attention_implementation,
        )
        self.branches = check_at_least("branches", branches, 1, self.max_draft_tokens)

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
        branches: int = 1,
        attention_implementation: str | Callable | None = None,
    ) -> "Eagle3":
        """Loads a drafter in the format of speculators (vLLM), SpecForge (SGLang) or DeepSpec.

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
            max_draft_tokens, branches, attention_implementation: see `Eagle3`.

        Raises:
            ValueError: the format is another one or has parts that are not supported; `quantize`
                is unknown; there is no config.json or there are no weights; a file is malformed, or
                does not fit the config; weights are not finite; draft tokens are mapped to ids
                outside of the target's vocabulary, or several to one; the target is needed, or does
                not fit.
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
            branches=branches,
            attention_implementation=attention_implementation,
        )

    def save_pretrained(self, path: str | PathLike) -> None:
        """Writes a folder in the format of speculators, without arrays of the target.

        Raises:
            ValueError: `path` is a file, or the weights are narrow.
        """
        config = eagle3_json(self.network.config, self.max_draft_tokens)
        save(FORMAT, self, path, config)

    def init(self, prompts, prompt_lengths, max_len: int) -> Eagle3State:
        batch, width = prompts.shape[0], self.network.architecture.width
        cache = self.network.init_cache(batch, max_len)
        return Eagle3State(cache, jnp.zeros((batch, width), self.network.dtype))

    def admit(self, state: Eagle3State, tokens, lengths, fresh: Bool[Array, "b"]) -> Eagle3State:
        """Clears fresh slots; a sample's first observed row has no pair, and sets its feature."""
        lengths = jnp.where(fresh, 0, state.cache.lengths)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths))

    def observe(
        self, state: Eagle3State, rows: ObservedRows, taps: tuple[Float[Array, "r e"], ...]
    ) -> Eagle3State:
        """Writes keys and values of the pairs that rows complete, and keeps the last features."""
        features, ids = self.network.feature(taps), rows.segment_ids
        batch, count = state.feature.shape[0], ids.shape[0]
        index = jnp.arange(count, dtype=jnp.int32)
        # A row's pair has the feature of the committed row before, which may be of an earlier call.
        # Rejected rows may lie between them.
        latest = lax.cummax(jnp.where(ids < batch, index, -1))
        before = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
        is_here = (before >= 0) & (take(ids, jnp.maximum(before, 0)) == ids)
        pending = take(state.feature, jnp.minimum(ids, batch - 1))
        here = take(features, jnp.maximum(before, 0))
        # The keys and values of a single layer depend on the pairs alone.
        (layer,), (turn,) = self.network.layers, self.network.architecture.rotaries
        places = jnp.maximum(rows.positions - 1, 0)
        qkv = layer.context(
            jnp.where(is_here[:, None], here, pending),
            embed(self.embeddings, rows.token_ids),
            angles(turn, places),
        )
        pairs = jnp.where(rows.positions > 0, ids, batch)  # a sample's first row completes none
        cache = append(state.cache, (qkv,), pairs, places, self.kernels.update)
        of_sample = ids == jnp.arange(batch, dtype=jnp.int32)[:, None]
        last = jnp.max(jnp.where(of_sample, index, -1), axis=1)
        new = take(features, jnp.maximum(last, 0))
        return Eagle3State(cache, jnp.where(last[:, None] < 0, state.feature, new))

    def propose(
        self,
        state: Eagle3State,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        draft_lengths: Int32[Array, "b"],
        keys,
        sampling,
    ) -> tuple[Draft, Eagle3State]:
        batch = tokens.shape[0]
        # A sample of one token has no feature yet.
        wanted = jnp.where(lengths > 1, jnp.minimum(draft_lengths, self.max_depth), 0)
        last = take(tokens, jnp.arange(batch), jnp.maximum(lengths - 1, 0))
        randomness = Randomness(keys, sampling)

        # The cache is read alone. Pairs of drafts lie beside it, in rows that have a place from the
        # first step on: what attention needs to know of the rows is the same in all steps.
        a, depth = self.network.architecture, self.max_depth
        seen = BlockRows.behind(state.cache.lengths, wanted > 0, depth)
        fresh = jnp.zeros((batch, depth, a.heads + 2 * a.kv_heads, a.head_dim), self.network.dtype)

        def unfinished(carry):
            step, draft, *_ = carry
            return step < jnp.max(draft.counts)

        def advance(carry):
            step, draft, token, feature, fresh = carry
            out = self._run(state.cache, seen, fresh, step, (feature, token))
            logits = head_logits(self.head, out.normed)
            draft, token = self._extend(draft, step, logits, lengths, randomness)
            return step + 1, draft, token, out.feature, put(fresh, out.qkv, step)

        begun = self.begin(wanted, sampling)
        start = (jnp.zeros((), jnp.int32), begun, last, state.feature, fresh)
        _, draft, *_ = lax.while_loop(unfinished, advance, start)
        return draft.finished(self.max_draft_tokens), state

    def _run(
        self,
        cache: KVCache,
        seen: BlockRows,
        fresh: Float[Array, "b k h d"],
        step: Int32[Array, ""],
        pairs: tuple[Float[Array, "b e"], Int32[Array, "b"]],
    ) -> PairOutput:
        """The output for the pair at place `step` of every sample's draft.

        Args:
            seen: the rows of all pairs of the draft.
            fresh: the queries, keys and values of the pairs before.
            pairs: features and tokens.
        """
        features, token_ids = pairs
        batch, depth = fresh.shape[:2]

        def see(qkv, kind):
            packed = put(fresh, qkv, step).reshape(batch * depth, *qkv.shape[1:])
            options = {"max_rows_per_sample": depth}
            (cached,), attention = cache.layers, self.kernels.attention
            out = attend(attention, packed, cached, seen.rows, seen.visible, **options)
            out = out.reshape(batch, depth, *out.shape[1:])
            return lax.dynamic_index_in_dim(out, step, axis=1, keepdims=False)

        embeddings = embed(self.embeddings, token_ids)
        return self.network.run(features, embeddings, seen.visible.lengths + step, see)
