"""The step: no cache is copied, branching paths are committed, and the two hooks are called."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import NEARLY_GREEDY, VOCAB, ragged_prompts, shallow_model, tiny_model

import emsjax
from emsjax import vanilla
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.layout import Layout
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.step import decode_loop
from emsjax.engine import slots
from emsjax.engine.adapt import make_run
from emsjax.engine.preparation import check
from emsjax.generation import complete
from pallas_kernels.common.indexing import take

PROMPT_SIXTEENTHS = (6, 16)  # of the row counts of steps that feed prompts
LENGTHS = [5, 9, 20, 3, 14, 1]
RUNS = {
    "ems": emsjax.generate,
    "vanilla": vanilla.generate,
    "refilled": lambda *args, **options: emsjax.generate(*args, batch_size=4, **options),
}
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.mark.parametrize("name", RUNS)
def test_no_loop_copies_a_cache(monkeypatch, name):
    compiled = []

    def watched(run, state, *rest):
        if not compiled:  # a refilled run calls the loop several times
            text = decode_loop.lower(run, state, *rest).compile().as_text()
            compiled.append((text, state.cache.layers[0].keys.shape))
        return decode_loop(run, state, *rest)

    monkeypatch.setattr(slots, "decode_loop", watched)
    RUNS[name](shallow_model(), ragged_prompts(LENGTHS), emsjax.PromptLookup(), max_new_tokens=12)
    ((text, shape),) = compiled
    cache = re.escape(f"f32[{','.join(map(str, shape))}]")
    assert re.search(rf"{cache}\S* parameter\(", text)
    copies = re.findall(rf"= {cache}\S* copy\(.*", text)
    # On a CPU, jax 0.10 copies a cache that branches write: see docs/limits.md.
    assert (copies == []) == (jax.__version_info__ >= (0, 11))


def test_a_branching_path_is_committed_in_order():
    """One sample keeps the path 0, 2, 3 of a tree 0 -> (1, 2 -> 3), another only its root."""
    model = tiny_model()
    update = resolve_kernels(None).update
    cache = model.init_cache(2, 16)
    old = jnp.array([4, 2], jnp.int32)
    cache = dataclasses.replace(cache, lengths=old)
    rows = pack(old, jnp.array([4, 3], jnp.int32), 9)
    config = model.config
    shape = (9, 3 * config.num_attention_heads, config.head_dim)
    fresh = tuple(
        jax.random.normal(jax.random.key(i), shape) for i in range(config.num_hidden_layers)
    )
    ranks = jnp.array([0, -1, 1, 2, 0, -1, -1, 5, 7], jnp.int32)  # padding rows may hold any rank
    after = cache.commit(fresh, rows, AcceptedPath(ranks, jnp.array([3, 1], jnp.int32)), update)
    assert after.lengths.tolist() == [7, 3]
    heads = config.num_attention_heads
    for layer, before, qkv in zip(after.layers, cache.layers, fresh, strict=True):
        for name, part in (("keys", qkv[:, heads : 2 * heads]), ("values", qkv[:, 2 * heads :])):
            expected = np.array(getattr(before, name))
            expected[0, 4:7], expected[1, 2] = part[jnp.array([0, 2, 3])], part[4]
            np.testing.assert_array_equal(getattr(layer, name), expected)


def test_attention_after_a_branching_path_equals_that_of_a_chain():
    """A tree's rows attend to their ancestors. After its path is committed, decoding continues
    as if the path had been fed as a chain.
    """
    model, kernels = tiny_model(), resolve_kernels("reference")
    prompt = jnp.asarray(ragged_prompts([6])[0], jnp.int32)
    tree, parents = jnp.array([7, 8, 9, 10], jnp.int32), {0: [0], 1: [0, 1], 2: [0, 2]}
    parents[3] = [0, 2, 3]
    ancestors = np.zeros((4, 4), bool)
    for row, line in parents.items():
        ancestors[row, line] = True

    def feed(cache, tokens, rows, path, **options):
        attention = lambda *args, **more: kernels.attention(*args, **more, **options)
        out = model(tokens, rows, cache, attention=attention)
        return out.hidden, cache.commit(out.fresh, rows, path, kernels.update)

    def chain(cache, tokens):
        counts = jnp.array([len(tokens)], jnp.int32)
        rows = pack(cache.lengths, counts, len(tokens))
        return feed(cache, tokens, rows, AcceptedPath.prefix(rows, counts))

    _, cache = chain(model.init_cache(1, 32), prompt)
    expected, as_chain = chain(cache, jnp.array([7, 9, 10], jnp.int32))
    rows = pack(cache.lengths, jnp.array([4], jnp.int32), 4)
    depths = cache.lengths[0] + jnp.array([0, 1, 1, 2], jnp.int32)
    rows = dataclasses.replace(rows, positions=depths)
    path = AcceptedPath(jnp.array([0, -1, 1, 2], jnp.int32), jnp.array([3], jnp.int32))
    hidden, as_tree = feed(cache, tree, rows, path, ancestors=jnp.asarray(ancestors))
    np.testing.assert_allclose(hidden[jnp.array([0, 2, 3])], expected, atol=1e-5)
    assert as_tree.lengths.tolist() == as_chain.lengths.tolist() == [9]
    for mine, theirs in zip(as_tree.layers, as_chain.layers, strict=True):
        np.testing.assert_allclose(mine.keys[0, :9], theirs.keys[0, :9], atol=1e-5)
        np.testing.assert_allclose(mine.values[0, :9], theirs.values[0, :9], atol=1e-5)
    then = jnp.array([11], jnp.int32)
    np.testing.assert_allclose(chain(as_tree, then)[0], chain(as_chain, then)[0], atol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watching(emsjax.Drafter):
    """Keeps the observed hidden states of every committed token. It recomputes the target's last
    token from the last hidden state and proposes its successor.
    """

    model: emsjax.OPT
    successor: jax.Array  # int32 [v]: the token that follows each token
    taps: tuple[int, ...] = dataclasses.field(default=(2,), metadata={"static": True})
    max_draft_tokens: int = dataclasses.field(default=1, metadata={"static": True})

    def init(self, prompts, prompt_lengths, max_len):
        size = (prompts.shape[0], max_len)
        wide = (*size, len(self.taps), self.model.config.hidden_size)
        times = jnp.zeros(size, jnp.int32)  # how often each position was observed
        return jnp.full(size, -1, jnp.int32), jnp.full(wide, jnp.nan), times

    def observe(self, state, rows, taps):
        tokens, hidden, times = state
        at = (rows.segment_ids, rows.positions)
        return (
            tokens.at[at].set(rows.token_ids, mode="drop"),
            hidden.at[at].set(jnp.stack(taps, axis=1).astype(hidden.dtype), mode="drop"),
            times.at[at].add(1, mode="drop"),
        )

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        last = take(state[1], jnp.arange(len(lengths)), jnp.maximum(lengths - 2, 0))
        current = jnp.argmax(self.model.logits(last[:, -1]), axis=1).astype(jnp.int32)
        return emsjax.Draft(take(self.successor, current)[:, None], draft_lengths), state


def markov_model():
    """A target whose next token depends only on the last one, and the successor of each token."""
    model = jax.tree.map(jnp.copy, tiny_model())
    for layer in model.layers:
        layer.out_proj.kernel[...] = jnp.zeros_like(layer.out_proj.kernel[...])
        layer.out_proj.bias[...] = jnp.zeros_like(layer.out_proj.bias[...])
    positions = model.embed_positions.embedding
    positions[...] = jnp.zeros_like(positions[...])
    ids = jnp.arange(VOCAB, dtype=jnp.int32)
    zeros = jnp.zeros(VOCAB, jnp.int32)
    rows = pack(zeros, zeros + 1, VOCAB)
    out = model(ids, rows, model.init_cache(VOCAB, 1), max_rows_per_sample=1)
    return model, jnp.argmax(model.logits(out.hidden), axis=1).astype(jnp.int32)


@pytest.mark.parametrize("name", RUNS)
def test_drafts_from_the_targets_hidden_states_are_always_accepted(name):
    model, successor = markov_model()
    prompts = [np.array([3 + i]) for i in range(6)]
    # Every prompt's second token is the target's own, so hidden states determine all tokens.
    prompts = [np.append(prompt, successor[prompt]) for prompt in prompts]
    plain = RUNS[name](model, prompts, max_new_tokens=12)
    out = RUNS[name](model, prompts, Watching(model, successor), max_new_tokens=12)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.acceptance_rate == 1
    assert out.stats.num_drafted.sum() > 20


@pytest.mark.parametrize(("taps", "num_sequences"), [((0, 1, 2), 1), ((2,), 2)], ids=str)
@pytest.mark.parametrize("refilled", [False, True])
def test_observed_hidden_states_equal_those_of_a_fresh_forward(taps, num_sequences, refilled):
    """States are observed in prefill, in refill and after verification, of accepted rows only.

    Sequences of one prompt do not share its cache, as each slot's prompt has to be observed.
    """
    model, prompts, kernels = tiny_model(), ragged_prompts(LENGTHS), resolve_kernels(None)
    right = emsjax.generate(model, prompts, max_new_tokens=9)
    drafter = Watching(model, jnp.arange(VOCAB, dtype=jnp.int32), taps=taps)
    asked = {"max_new_tokens": 9, "num_sequences": num_sequences, **NEARLY_GREEDY}
    run, requests = check(make_run(model, drafter), prompts, **asked)
    count = num_sequences * len(LENGTHS)
    if refilled:
        held = slots.Slots(run, requests, 4)
        rows = list(held.serve(slots.sequences_of(requests)))
    else:
        held = slots.Slots.filled(run, requests, np.arange(count), count, requests.max_len)
        rows = held.finish(None)
    assert len(rows) == count
    for row in rows:
        new = row["tokens"][row["prompt_lengths"] : row["lengths"]]
        prompt = row["sequence_ids"] // num_sequences
        np.testing.assert_array_equal(new, right.tokens[prompt, : len(new)])
    state = held.state
    seen_tokens, seen_hidden, times = state.drafter_state
    lengths = state.lengths - 1
    for slot in range(len(lengths)):
        length = int(lengths[slot])
        tokens = state.tokens[slot, :length]
        np.testing.assert_array_equal(seen_tokens[slot, :length], tokens)
        assert (times[slot, :length] == 1).all()  # rejected rows are never observed
        rows = pack(jnp.zeros(1, jnp.int32), jnp.array([length], jnp.int32), length)
        out = model(tokens, rows, model.init_cache(1, 64), attention=kernels.attention, taps=taps)
        for at, hidden in enumerate(out.taps):
            np.testing.assert_allclose(seen_hidden[slot, :length, at], hidden, atol=1e-4)
        if not refilled:
            assert (seen_tokens[slot, length:] == -1).all()


def without(token: int):
    """A logits processor that forbids a token."""

    def forbid(state, logits, context):
        return logits.at[:, token].set(-jnp.inf)

    return forbid


@pytest.mark.parametrize(
    ("drafter", "batch_size", "sampled"),
    [
        ("none", 4, False),
        ("lookup", None, False),
        ("model", 4, False),
        ("lookup", 4, True),
        ("model", None, True),
    ],
)
def test_a_processor_that_forbids_a_token_keeps_decoding_lossless(drafter, batch_size, sampled):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    asked = {"max_new_tokens": 12}
    if sampled:
        asked |= {"sampling": emsjax.Sampling(1.3), "key": jax.random.key(5)}
    usual = emsjax.generate(model, prompts, **asked)
    token = int(np.bincount(usual.tokens.ravel()).argmax())
    processors = (without(token),)
    drafters = {
        "none": None,
        "lookup": emsjax.PromptLookup(match_length=1),
        "model": emsjax.DraftModel(model, 3),
    }

    def decode(drafter, batch_size=None):
        run, requests = check(make_run(model, drafter, processors=processors), prompts, **asked)
        return complete(run, requests, batch_size=batch_size)

    plain = decode(None)
    assert token in usual.tokens
    assert token not in plain.tokens
    out = decode(drafters[drafter], batch_size)
    assert token not in out.tokens
    assert np.isfinite(out.logprobs).all()
    if drafter != "model" or not sampled:
        np.testing.assert_array_equal(out.tokens, plain.tokens)
    if drafter == "model":  # drafts come from the target under the same processor
        assert out.stats.acceptance_rate == 1 or sampled
        assert out.stats.acceptance_rate > 0.9


def test_a_processor_sees_the_tokens_before_each_row():
    """The processor forbids the last token of the row's context, emitted or drafted."""

    def no_repeat(state, logits, context):
        (last,) = context.last(1).T
        return jnp.where(jnp.arange(logits.shape[1]) == last[:, None], -jnp.inf, logits)

    model, prompts = shallow_model(), ragged_prompts(LENGTHS)

    def decode(drafter):
        run = make_run(model, drafter, processors=(no_repeat,))
        run, requests = check(run, prompts, max_new_tokens=20)
        return complete(run, requests)

    usual = emsjax.generate(model, prompts, max_new_tokens=20)
    plain = decode(None)
    assert not np.array_equal(plain.tokens, usual.tokens)
    assert (plain.tokens[:, 1:] != plain.tokens[:, :-1]).all()
    lookup = emsjax.PromptLookup(match_length=1, search_generated=True)
    for drafter in (lookup, emsjax.DraftModel(model, 3)):
        out = decode(drafter)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.num_accepted.sum() > 0


def test_prompts_cannot_be_fed_in_a_padded_layout():
    state = emsjax.init_state(tiny_model(), None, ragged_prompts([3]), max_new_tokens=2)
    with pytest.raises(ValueError, match="num_sequences must be None in a padded layout"):
        emsjax.step(
            tiny_model(), None, state, layout=Layout(pad_inputs=True), num_sequences=jnp.int32(1)
        )


def test_a_tap_that_the_model_does_not_have_is_named():
    model = tiny_model()
    drafter = Watching(model, jnp.arange(VOCAB, dtype=jnp.int32), taps=(3,))
    with pytest.raises(ValueError, match=r"taps must lie in 0..2 for this model, not 3"):
        emsjax.generate(model, ragged_prompts([3]), drafter, max_new_tokens=2)
