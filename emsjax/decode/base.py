"""The protocols of a model, a drafter and a draft-length policy.

`Drafter` and `DraftLength` are base classes with defaults. Objects that merely have the right
methods work too: `emsjax.engine.adapt` wraps them, and no other module inspects objects.

Axis legend: see `emsjax.decode.pack`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.returned import available_lengths
from emsjax.sampling import Sampling
from emsjax.sampling.processors import Processing
from emsjax.trees import Tree
from emsjax.values import merge_fresh, pytree


@runtime_checkable
class ModelConfig(Protocol):
    """The part of a model's configuration that decoding reads."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@pytree
class ModelOutput:
    """The outputs of one model call.

    Attributes:
        hidden: final hidden states of the rows, the input of `logits`.
        fresh: queries, keys and values of the rows in every layer, side by side on the head axis.
        taps: hidden states of the layers that were asked for, in the order asked.
    """

    hidden: Float[Array, "r e"]
    fresh: tuple[Float[Array, "r h d"], ...]
    taps: tuple[Float[Array, "r e"], ...] = ()


@runtime_checkable
class Model(Protocol):
    """A decoder-only language model, as a pytree.

    Attributes:
        config: vocabulary size, number of positions, end tokens and padding token; hashable.
        dtype: the type of weights, products and cache.
        row_bytes: bytes of activations that one packed row needs within a layer.
    """

    config: ModelConfig
    dtype: Any
    row_bytes: int

    def __call__(
        self,
        token_ids: Int32[Array, "r"],
        rows: Any,
        cache: Any,
        *,
        attention: Callable,
        max_rows_per_sample: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Run packed rows.

        Args:
            token_ids: the rows' tokens; padding rows may hold any.
            rows: the `PackedRows`.
            cache: a cache from `init_cache`, read only.
            attention: a callable with the signature of `pallas_kernels.ragged_attention`.
            max_rows_per_sample: static bound of rows per sample; None: all rows.
            taps: layers whose hidden states are returned. 0 is the embeddings, i the residual
                stream after i layers: the `hidden_states[i]` of transformers, except that the
                last one is not normalised.
        """
        ...

    def logits(self, hidden: Float[Array, "r e"]) -> Float[Array, "r v"]:
        """float32 logits of final hidden states."""
        ...

    def init_cache(self, batch: int, max_len: int) -> Any:
        """An empty `KVCache` of `max_len` tokens for each of `batch` samples."""
        ...


@pytree
class Draft:
    """Proposed continuations, each sample with its own number of tokens.

    Attributes:
        tokens: the proposals; entries at or beyond `counts` are ignored.
        counts: proposed tokens per sample, 0 allowed.
        probs: the distributions the tokens were drawn from, each conditioned on the
            preceding draft tokens, v at most the target's vocabulary. None if the tokens were
            not drawn: decoding is greedy, or the drafter is deterministic.
        parents: for drafts that are trees, the draft token that each one follows, by an index
            below its own; -1: the sample's last token. None: each follows the one before it.
            Candidates for the same place differ, and a tree has no `probs`.
    """

    tokens: Int32[Array, "b k"]
    counts: Int32[Array, "b"]
    probs: Float[Array, "b k v"] | None = None
    parents: Int32[Array, "b k"] | None = None


class ObservedRows(NamedTuple):
    """The rows of one call of the target, as `Drafter.observe` sees them.

    Attributes:
        token_ids: the rows' tokens.
        segment_ids: sample of each row that was committed; `batch` for padding and for
            rejected rows, whose values are to be ignored.
        positions: place of each committed row's token in its sample.
    """

    token_ids: Int32[Array, "r"]
    segment_ids: Int32[Array, "r"]
    positions: Int32[Array, "r"]


class Drafter:
    """Proposes draft tokens inside the device loop.

    All methods except those marked *host* are pure functions on arrays, traced once into the loop.
    The drafter may be a pytree (its arrays are then arguments of the compiled loop) or any other
    object (then it is a constant of it). Greedy output is identical to plain decoding for any
    drafter. Sampled output is identical under the same keys if `Draft.probs` is None; otherwise
    `probs` must be the distributions that the tokens were really drawn from, and `counts` may
    depend on the tokens that are kept alone, or sampled output has the wrong distribution, which
    no comparison of tokens can show. Proposals beyond a sample's limit, outside the vocabulary,
    or after an end token are cut off before verification.

    `init` and `propose` have to be written; everything else has a default.

    Attributes:
        max_draft_tokens: static upper limit k of tokens per sample and step.
        max_depth: static; the most tokens on a path of its trees; None: `max_draft_tokens`.
        drawn_vocab_size: static; numbers per token in its `Draft.probs`; 0: it draws no tokens.
        free: whether proposing costs next to nothing and draws no tokens. A draft-length policy
            is then asked after `propose` and chooses among the tokens that were found.
        taps: static; the layers of the target whose hidden states `observe` wants: see `Model`.
        shares_cache: static; `propose` gets the target's cache as its state, to write behind it.
        fork: for an expensive `init`, a method fork(state, samples) that returns the state in
            which slot i starts from samples[i]'s state. None: `init` sees the prompt of every
            slot, including prompts that several sequences share.
    """

    max_draft_tokens: int
    max_depth: int | None = None
    drawn_vocab_size: int = 0
    free = False
    taps: tuple[int, ...] = ()
    shares_cache = False
    fork: Callable[[Any, Int32[Array, "n"]], Any] | None = None

    def init(
        self, prompts: Int32[Array, "b t"], prompt_lengths: Int32[Array, "b"], max_len: int
    ) -> Any:
        """State for a batch; `prompts` is padded, `max_len` bounds every sample's length."""
        raise NotImplementedError(f"{type(self).__name__} must define init")

    def propose(
        self,
        state: Any,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        draft_lengths: Int32[Array, "b"],
        keys: Key[Array, "b"],
        sampling: Sampling | None,
    ) -> tuple[Draft, Any]:
        """Continue tokens[s, :lengths[s]] by up to draft_lengths[s] <= k tokens, 0 allowed.

        Args:
            keys: random keys of the sequences, different in each step: derive bits with
                `emsjax.sampling.position_keys`.
            sampling: None for greedy decoding, otherwise one value per sample.
        """
        raise NotImplementedError(f"{type(self).__name__} must define propose")

    def observe(self, state: Any, rows: ObservedRows, taps: tuple[Float[Array, "r e"], ...]) -> Any:
        """The state after a call of the target; never called while `taps` is empty.

        Called in prefill, in refill and after verification, before `commit`, with the hidden
        states of the rows of that call in the layers of `self.taps`.
        """
        return state

    def commit(self, state: Any, lengths: Int32[Array, "b"]) -> Any:
        """The state after verification; sample s now has lengths[s] tokens."""
        return state

    def admit(
        self,
        state: Any,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        fresh: Bool[Array, "b"],
    ) -> Any:
        """The state in which slots with `fresh` begin the prompts tokens[s, :lengths[s]].

        By default `init` is called for all slots, and fresh slots take their entries of arrays
        whose first axis is the slots'.
        """
        return merge_fresh(fresh, self.init(tokens, lengths, tokens.shape[1]), state)

    def for_prompts(self, prompt_indices: np.ndarray, num_prompts: int) -> "Drafter":
        """*Host.* The drafter for a batch whose slot i serves prompt prompt_indices[i]."""
        return self

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """*Host.* Raises ValueError for a target that this drafter cannot draft for."""

    def state_bytes(self, max_len: int) -> int:
        """*Host.* Bytes of the state per sample, for the memory plan."""
        return 0

    def with_limit(self, max_draft_tokens: int) -> "Drafter":
        """*Host.* The drafter with a policy's limit, unless its user has set one."""
        return self

    def with_processing(self, process: Processing) -> "Drafter":
        """The drafter for one step, whose own logits [r, v] pass through `process` first."""
        return self


class StepView(NamedTuple):
    """What a policy sees of a step before the step runs.

    Attributes:
        active: samples that still decode.
        lengths: tokens of each sample so far, prompt included.
        available: the most draft tokens that each sample could use; if tokens are drafted
            already, their number.
        drafted: whether tokens are drafted already, so that using fewer saves no drafting. Static.
        tree: the drafts, if they are trees; None: they are chains, or there are none yet.
        on_path: in `update`, the rows of trees that were accepted; row 0 is the last token.
    """

    active: Bool[Array, "b"]
    lengths: Int32[Array, "b"]
    available: Int32[Array, "b"]
    drafted: bool
    tree: Tree | None = None
    on_path: Bool[Array, "b k1"] | None = None


class DraftLength:
    """A draft-length policy: a pytree with pure functions, run inside the device loop.

    The effective limit is the smaller of the policy's and the drafter's. `lengths` has to be
    written; everything else has a default.

    Attributes:
        max_draft_tokens: the largest length the policy asks for, if it may exceed the drafters'
            own limits: a drafter whose limit the user has not set adopts it.
    """

    max_draft_tokens: int | None = None

    @property
    def name(self) -> str:
        """The policy's name in messages."""
        return type(self).__name__

    def init(self, batch: int, max_draft_tokens: int) -> Any:
        """State for `batch` samples, each with up to `max_draft_tokens` in a step."""
        return ()

    def lengths(self, state: Any, view: StepView) -> Int32[Array, "b"]:
        """Returns how many draft tokens of each sample to verify in this step; 0: none."""
        raise NotImplementedError(f"{type(self).__name__} must define lengths")

    def nodes(self, state: Any, view: StepView) -> Bool[Array, "b k"]:
        """Returns which draft tokens of trees to verify, parents included: up to `lengths` deep."""
        return view.tree.depths[:, 1:] <= available_lengths(self, state, view)[:, None]

    def update(
        self,
        state: Any,
        view: StepView,
        num_drafted: Int32[Array, "b"],
        num_accepted: Int32[Array, "b"],
    ) -> Any:
        """The state after the step of `view`, which fed and accepted this many tokens."""
        return state

    def admit(self, state: Any, fresh: Bool[Array, "b"]) -> Any:
        """The state in which slots with `fresh` begin new sequences.

        None, the default, means that fresh slots take their entries of a new state from `init`,
        in arrays whose first axis is the slots'.
        """
        return None

    def check_settings(self) -> None:
        """*Host.* Raises ValueError for wrong settings; called before any work."""
