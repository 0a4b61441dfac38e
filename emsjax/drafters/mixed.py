"""A drafter that chooses among other drafters, in each step and for each sample."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from emsjax.checks import MOST, check_at_least, check_number, is_per_prompt
from emsjax.decode.base import Draft, Drafter, ModelConfig
from emsjax.drafters.choice import Choice, Records
from emsjax.drafters.draft_model import CATCH_UP_ROWS
from emsjax.drafters.growing import probs_bytes
from emsjax.drafters.offers import (
    agreement,
    expected_offer,
    merged_draft,
    no_draft,
    unused_draft,
    usable_draft,
)
from emsjax.drafters.prices import Costs, prices_of_step
from emsjax.engine.adapt import as_drafter, unwrapped
from emsjax.returned import check_state, checked_proposal
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

MOST_MODELS = 4  # every set of them is compared in each step


@pytree
class MixedState:
    """State of a `Mixed` drafter.

    Attributes:
        sources: the state of each source.
        records: what the sources have brought so far.
        choice: the choice of the last `propose`.
        lengths: tokens of each sample before that step.
        read: those of them that each source has read, as far as is known.
        depths: tokens on the longest path of what each source offered in it.
        unused: what the step could have used of the drafts of free sources, with parents, for
            samples that used others; None for the other sources.
    """

    sources: tuple[Any, ...]
    records: Records
    choice: Choice
    lengths: Int32[Array, "b"]
    read: Int32[Array, "b n"]
    depths: Int32[Array, "b n"]
    unused: tuple[Draft | None, ...]


class _Held(NamedTuple):
    """The part of a `DecodeState` that `checked_proposal` reads."""

    drafter_state: Any
    cache: None = None


@jax.tree_util.register_pytree_node_class
class Mixed(Drafter):
    """Chooses, in each step and for each sample, among several draft sources by what they bring.

    Sources that are `free`, such as `SuffixDrafter` and `PromptLookup`, draft in every step, and
    the length of what they have found counts for their choice. A source that is not, such as
    `DraftModel`, drafts for the samples for which it is chosen only. For the others it is fed
    nothing, not even their prompts, and it catches up when it is chosen. Before that, a sample has
    to have missed as many tokens as could be emitted in the time of catching up.

    A sample's source is the one with the most expected tokens. They are estimated from the tokens
    that it brought in earlier steps: to the sample itself, to the whole batch while the sample has
    seen little of it, and by the length of the offer, as a long match is a good one. Drafts of free
    sources that were not used are compared with what was emitted, and count as well. Old counts
    decay towards a hopeful guess, so that every source is tried now and then. A draft model reads
    its weights once for all samples, so it runs if what it adds over the batch is worth its draft
    steps. Choices use past tokens and no random numbers: a token that is drawn in a step never
    decides whether its own source is used.

    Sources may draft trees. Each of their tokens is a row, while only a path is accepted, and a
    draft model takes a draft step for each token of it.

    Greedy output is identical to plain decoding. So is sampled output under the same keys, if no
    source draws its tokens; otherwise it has the target's distribution. As choices look at the
    whole batch, a sequence that is sampled with one that does depends on the batch then.

    A draft-length policy is asked before the drafts unless all sources are free. `Goodput` takes
    every draft token for one of a draft model then: give `costs` here instead.

    Args:
        drafters: two or more drafters, also of your own; of equal ones the first is preferred.
        costs: an `emsjax.StepCosts` of this device, which prices rows and draft steps. None: rows
            cost nothing, as on a GPU with few samples, and draft steps `draft_cost`.
        draft_cost: time of a draft step of the sources that are not free, as a fraction of a
            target's step without drafts: one number, or one for each of `drafters`. None: that of
            `costs`, or 0.1 without.

    Raises:
        ValueError: there are fewer than two drafters, an argument is not a drafter, a drafter
            shares the target's cache, more than four are not free, or the costs are wrong. When
            decoding begins: a source cannot draft for the target, or one draws its tokens and
            another one drafts trees.
    """

    def __init__(
        self,
        *drafters: Any,
        costs: Costs | None = None,
        draft_cost: float | Sequence[float] | None = None,
    ):
        if len(drafters) < 2:
            raise ValueError(f"Mixed needs two or more drafters, not {len(drafters)}")
        if None in drafters:
            raise ValueError("Mixed needs drafters, not None: it drafts nothing where none pays")
        self.sources = tuple(map(as_drafter, drafters))
        for i, source in enumerate(self.sources):
            if source.shares_cache:
                kind = type(unwrapped(source)).__name__
                raise ValueError(
                    f"drafters[{i}] must not share the target's cache, as {kind} does: what it "
                    "writes there is lost in steps without it"
                )
        models = sum(not source.free for source in self.sources)
        if models > MOST_MODELS:
            raise ValueError(f"at most {MOST_MODELS} drafters may be other than free, not {models}")
        if costs is not None and not isinstance(costs, Costs):
            raise ValueError(
                f"costs must be emsjax.StepCosts, not {type(costs).__name__}: for a profile, use "
                "emsjax.StepCosts.from_profile(profile)"
            )
        self.costs, self.draft_cost = costs, None
        if draft_cost is not None:
            each = list(draft_cost) if is_per_prompt(draft_cost) else [draft_cost] * len(drafters)
            if len(each) != len(drafters):
                raise ValueError(
                    f"draft_cost must be a number or one for each of {len(drafters)} drafters, "
                    f"not {len(each)}"
                )
            check = lambda x: check_number("draft_cost", x, "at least 0", lambda x: 0 <= x <= MOST)
            self.draft_cost = tuple(map(check, each))

    def tree_flatten(self):
        return (self.sources, self.costs), self.draft_cost

    @classmethod
    def tree_unflatten(cls, draft_cost, children) -> "Mixed":
        self = object.__new__(cls)
        (self.sources, self.costs), self.draft_cost = children, draft_cost
        return self

    def _with_sources(self, sources: Sequence[Drafter]) -> "Mixed":
        if all(new is old for new, old in zip(sources, self.sources, strict=True)):
            return self
        changed = copy.copy(self)
        changed.sources = tuple(sources)
        return changed

    @property
    def max_draft_tokens(self) -> int:
        """The largest limit of the sources."""
        return max(source.max_draft_tokens for source in self.sources)

    @property
    def max_depth(self) -> int | None:
        """The most tokens on a path of any source; None: as many as `max_draft_tokens`."""
        deepest = max(source.max_depth or source.max_draft_tokens for source in self.sources)
        return None if deepest == self.max_draft_tokens else deepest

    @property
    def free(self) -> bool:
        """Whether all sources are free."""
        return all(self._are_free)

    @property
    def _are_free(self) -> tuple[bool, ...]:
        return tuple(bool(source.free) for source in self.sources)

    @property
    def _can_be_behind(self) -> Bool[np.ndarray, "n"]:
        """Whether each source is fed nothing for samples that use others."""
        return np.array([not (source.free or source.taps) for source in self.sources])

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that any source observes, ascending."""
        return tuple(sorted({layer for source in self.sources for layer in source.taps}))

    @property
    def drawn_vocab_size(self) -> int:
        """The largest one of the sources."""
        return max(source.drawn_vocab_size for source in self.sources)

    @property
    def fork(self):
        """Sources without `fork` repeat their state's arrays whose first axis is the slots'."""
        return None if all(source.fork is None for source in self.sources) else self._fork

    def for_prompts(self, prompt_indices: np.ndarray, num_prompts: int) -> "Mixed":
        return self._with_sources(
            [s.for_prompts(prompt_indices, num_prompts) for s in self.sources]
        )

    def with_limit(self, max_draft_tokens: int) -> "Mixed":
        return self._with_sources([s.with_limit(max_draft_tokens) for s in self.sources])

    def with_processing(self, process) -> "Mixed":
        return self._with_sources([s.with_processing(process) for s in self.sources])

    def check_target(self, config: ModelConfig, positions: int) -> None:
        for i, source in enumerate(self.sources):
            most, name = config.max_position_embeddings, f"drafters[{i}].max_draft_tokens"
            check_at_least(name, source.max_draft_tokens, 1, most)
            source.check_target(config, positions)

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the states of the sources, and their merged distributions."""
        k = self.max_draft_tokens
        merged = probs_bytes(k, self.drawn_vocab_size)
        records = 8 * len(self.sources) * (k.bit_length() + 1)
        return sum(source.state_bytes(max_len) for source in self.sources) + merged + records

    def init(self, prompts, prompt_lengths, max_len) -> MixedState:
        def begin(source: Drafter) -> Any:
            if _reads_late(source):
                return source.init_unread(len(prompts), max_len)
            return source.init(prompts, prompt_lengths, max_len)

        read = self._read_at_first(prompt_lengths)
        return self._begun(tuple(map(begin, self.sources)), prompt_lengths, read)

    def _read_at_first(self, lengths: Int32[Array, "b"]) -> Int32[Array, "b n"]:
        """Tokens that each source has read of sequences that begin, of these lengths."""
        late = np.array([_reads_late(source) for source in self.sources])
        return jnp.where(late, 0, lengths[:, None])

    def _begun(self, states: tuple[Any, ...], lengths, read: Int32[Array, "b n"]) -> MixedState:
        """The state before the first step."""
        batch, n = len(lengths), len(self.sources)
        records = Records.init(batch, n, self.max_draft_tokens)
        unused = tuple(
            no_draft(batch, s.max_draft_tokens) if s.free else None for s in self.sources
        )
        depths = jnp.zeros((batch, n), jnp.int32)
        return MixedState(states, records, Choice.none(batch, n), lengths, read, depths, unused)

    def _fork(self, state: MixedState, samples: Int32[Array, "n"]) -> MixedState:
        def repeated(source: Drafter, held: Any) -> Any:
            if source.fork is not None:
                return source.fork(held, samples)
            leads = lambda x: jnp.shape(x)[:1] == state.lengths.shape
            return jax.tree.map(lambda x: take(x, samples) if leads(x) else x, held)

        states = tuple(map(repeated, self.sources, state.sources))
        return self._begun(states, take(state.lengths, samples), take(state.read, samples))

    def admit(self, state: MixedState, tokens, lengths, fresh: Bool[Array, "b"]) -> MixedState:
        states = self._of_each("admit", state.sources, tokens, lengths, fresh)
        begun = jnp.where(fresh, lengths, state.lengths)  # nothing was emitted since then
        read = jnp.where(fresh[:, None], self._read_at_first(lengths), state.read)
        state = dataclasses.replace(state, sources=states, lengths=begun, read=read)
        return dataclasses.replace(state, records=state.records.admit(fresh))

    def observe(self, state: MixedState, rows, taps) -> MixedState:
        hidden, states = dict(zip(self.taps, taps, strict=True)), []
        for source, held in zip(self.sources, state.sources, strict=True):
            if source.taps:
                held = source.observe(held, rows, tuple(hidden[layer] for layer in source.taps))
            states.append(held)
        return dataclasses.replace(state, sources=tuple(states))

    def commit(self, state: MixedState, lengths: Int32[Array, "b"]) -> MixedState:
        states = self._of_each("commit", state.sources, lengths)
        records = state.records.update(state.choice, lengths - state.lengths)
        read = jnp.where(state.choice.asked, state.lengths[:, None], state.read)
        return dataclasses.replace(state, sources=states, records=records, read=read)

    def _of_each(self, method: str, states: tuple[Any, ...], *arguments) -> tuple[Any, ...]:
        """The state of each source after one of its methods."""
        found = []
        for i, (source, held) in enumerate(zip(self.sources, states, strict=True)):
            found.append(getattr(source, method)(held, *arguments))
            check_state(f"drafters[{i}]'s", method, held, found[-1])
        return tuple(found)

    def propose(self, state: MixedState, tokens, lengths, draft_lengths, keys, sampling):
        states, drafts, found = list(state.sources), [None] * len(self.sources), []

        def ask(i: int, limits: Int32[Array, "b"]) -> Draft:
            held, rules = _Held(states[i]), {"kind": Draft, "vocab_size": MOST}
            arguments = (tokens, lengths, limits, keys, sampling)
            draft, states[i], _ = checked_proposal(self.sources[i], held, *arguments, **rules)
            return draft

        for i, source in enumerate(self.sources):
            if not source.free:
                found.append(expected_offer(source, draft_lengths))
                continue
            # A free source is asked for all it has: the length of what it finds tells its worth.
            draft = ask(i, jnp.where(draft_lengths > 0, source.max_draft_tokens, 0))
            if draft.probs is not None:
                raise ValueError(
                    f"drafters[{i}] draws its tokens (Draft.probs) and so cannot be `free`"
                )
            drafts[i], sizes = usable_draft(draft, draft_lengths, of_depth=not self.free)
            found.append(sizes)
        # From here on nothing is known of the tokens that a source draws in this step.
        offers = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *found)
        terms = (self.costs, self.draft_cost, self._are_free)
        prices = prices_of_step(*terms, tokens, lengths, draft_lengths, offers.rows)
        records = self._learnt(state, drafts, tokens, lengths)
        behind = jnp.maximum(lengths[:, None] - CATCH_UP_ROWS - state.read, 0)
        behind = jnp.where(self._can_be_behind, behind, 0)
        choice = records.choose(offers, draft_lengths > 0, prices, self._are_free, behind)
        unused = tuple(
            unused_draft(draft, old, choice.source == i) if draft is not None else None
            for i, (draft, old) in enumerate(zip(drafts, state.unused, strict=True))
        )
        for i, source in enumerate(self.sources):
            if not source.free:
                drafts[i] = ask(i, jnp.where(choice.source == i, choice.depths, 0))
        draft = merged_draft(drafts, choice, self.max_draft_tokens)
        of_step = (choice, lengths, state.read, offers.depths, unused)
        return draft, MixedState(tuple(states), records, *of_step)

    def _learnt(self, state: MixedState, drafts: Sequence[Any], tokens, lengths) -> Records:
        """The records with the last step's unused drafts, compared with the tokens that followed.

        They are past tokens by now: this is not known in `commit`.

        Args:
            drafts: those of free sources in this step, trees or chains as those of the last one.
        """
        records, emitted = state.records, lengths - state.lengths
        for i, (unused, draft) in enumerate(zip(state.unused, drafts, strict=True)):
            if unused is not None:
                is_tree = draft.parents is not None
                right, most = agreement(unused, is_tree, tokens, state.lengths, emitted)
                records = records.learn(i, state.depths[:, i], most, right, emitted)
        return records


def _reads_late(source: Drafter) -> bool:
    """Whether a source can begin without having read the prompts."""
    return hasattr(source, "init_unread")
