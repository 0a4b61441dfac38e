"""EAGLE-3 drafts what its equations say, from hidden states that are kept up to date."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_drafters import (
    LAYER_JSON,
    WIDTH,
    attention,
    feed_forward,
    heads_of,
    hidden_states,
    layer_tensors,
    llama_target,
    opt_target,
    rms_norm,
    softmax,
    write_folder,
)
from toy import NEARLY_GREEDY, POSITIONS, VOCAB, ragged_prompts

import emsjax
from emsjax.decode.base import ObservedRows
from emsjax.testing import assert_same_distribution

PROMPTS = ragged_prompts([5, 12, 2, 9, 1])
DRAFTED = np.sort(np.random.default_rng(2).permutation(VOCAB)[:49])  # ids that can be drafted
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter in one of the published formats.

    Attributes:
        config: contents of config.json.
        taps: the hidden states that the format means, as `hidden_states` of transformers.
        start: what names of the layer's tensors begin with.
        own_embeddings: whether the folder has them.
    """

    config: dict
    taps: tuple[int, ...]
    start: str = "layers.0."
    own_embeddings: bool = True

    @property
    def is_full(self):
        return "draft_vocab_size" not in self.config

    @property
    def switches(self):
        return [name for name in SWITCHES if self.config.get(name)]

    @functools.cached_property
    def tensors(self):
        """The folder's tensors; what they draft resembles what `llama_target` continues with."""
        rng = np.random.default_rng(4)
        normal = lambda *shape: rng.normal(0, 0.1, shape).astype(np.float32)
        scale = lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32)
        head_norms = self.config.get("model_type") == "qwen3"
        layer = layer_tensors(rng, 2 * WIDTH, self.start, head_norms)
        layer[f"{self.start}hidden_norm.weight"] = scale(WIDTH)
        # Attention to the pair itself, whose embedding is passed on as it is.
        name = f"{self.start}self_attn.{{}}_proj.weight".format
        for part in "qk":
            layer[name(part)][:, :WIDTH] *= 6
        keys = np.eye(WIDTH)[:16]
        layer[name("v")][:, :WIDTH] += keys
        layer[name("o")] += np.concatenate([keys[:8], keys[:8], keys[8:], keys[8:]]).T / 2
        ids = range(VOCAB) if self.is_full else DRAFTED
        head = np.asarray(llama_target().lm_head.embedding[...])[list(ids)]
        tensors = layer | {
            "fc.weight": normal(WIDTH, len(self.taps) * WIDTH),
            "norm.weight": np.ones(WIDTH, np.float32),
            "lm_head.weight": head,
        }
        if self.own_embeddings:
            tensors["embed_tokens.weight"] = np.asarray(llama_target().embed_tokens.embedding[...])
        if "norm_before_fc" in self.switches:
            tensors["input_norm.weight"] = scale(len(self.taps) * WIDTH)
        if "fc_norm" in self.switches:
            tensors |= {f"fc_norm.{i}.weight": scale(WIDTH) for i in range(len(self.taps))}
        if not self.is_full:
            tensors["d2t"] = DRAFTED - np.arange(len(DRAFTED))
            tensors["t2d"] = np.isin(np.arange(VOCAB), DRAFTED)
        return tensors

    def forward(self, tokens, states, count):
        """Logits of all tokens after the first `len(tokens) - count` ones, and after each of the
        rest, which are drafts.

        Args:
            tokens: a sample's tokens, and drafts.
            states: the target's hidden states of the sample's tokens but its last, for each tap.
            count: number of drafts.
        """
        of = lambda name: self.tensors.get(self.start + name)
        get = self.tensors.get
        if "fc_norm" in self.switches:
            states = [rms_norm(x, get(f"fc_norm.{i}.weight")) for i, x in enumerate(states)]
        joined = np.concatenate(states, axis=1)
        if "norm_before_fc" in self.switches:
            joined = rms_norm(joined, get("input_norm.weight"))
        features = joined @ get("fc.weight").T.astype(np.float64)
        table = get("embed_tokens.weight", llama_target().embed_tokens.embedding[...])
        embeddings = np.asarray(table, np.float64)[tokens[1:]]
        found = []
        for _ in range(count + 1):
            size = len(features)
            normed = rms_norm(features, of("hidden_norm.weight"))
            x = normed if "norm_before_residual" in self.switches else features
            pair = [rms_norm(embeddings[:size], of("input_layernorm.weight")), normed]
            pair = np.concatenate(pair, axis=1)
            queries, keys, values = (heads_of(of, pair, part, np.arange(size)) for part in "qkv")
            x = x + attention(of, queries, keys, values, np.tri(size, dtype=bool))
            x = x + feed_forward(of, rms_norm(x, of("post_attention_layernorm.weight")))
            normed = rms_norm(x, get("norm.weight"))
            logits = np.full(VOCAB, -np.inf)
            ids = slice(None) if self.is_full else DRAFTED
            logits[ids] = normed[-1] @ get("lm_head.weight").T
            found.append(logits)
            # What follows is a draft: its feature is the layer's own output.
            fed_back = normed if "norm_output" in self.switches else x
            features = np.concatenate([features, fed_back[-1:]])
        return np.array(found)


SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": LAYER_JSON | {"model_type": "llama"},
    "draft_vocab_size": len(DRAFTED),
    "eagle_aux_hidden_state_layer_ids": [0, 3, 1],
}
SPECFORGE = LAYER_JSON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": len(DRAFTED),
}
DEEPSPEC = LAYER_JSON | {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "num_target_layers": 3,
    "target_layer_ids": [0, 2],
}
CASES = {
    "speculators": Case(SPECULATORS, (0, 3, 1)),
    "speculators-norms": Case(
        SPECULATORS | dict.fromkeys(("norm_before_residual", "norm_before_fc"), True), (0, 3, 1)
    ),
    "specforge": Case(SPECFORGE, (2, 1, 0), "midlayer.", own_embeddings=False),
    "specforge-3.1": Case(
        SPECFORGE
        | dict.fromkeys(("fc_norm", "norm_output"), True)
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
        (1, 2, 3),
        "midlayer.",
    ),
    "deepspec": Case(DEEPSPEC, (1, 3)),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a case's drafter."""
    home = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def loaded(name, **options):
        folder = write_folder(home / name, CASES[name].config, CASES[name].tensors)
        return emsjax.Eagle3.from_pretrained(folder, llama_target(), **options)

    return loaded


def observed_rows(states, sequences, spans, rejected):
    """The rows of a call that feeds sequences[s][spans[s]], and rows that were rejected.

    Args:
        states: the hidden states of each sequence, by tap.
        rejected: number of rejected rows behind each sample's.
    """
    batch = len(sequences)
    tokens, samples, places, taps = [], [], [], [[] for _ in states[0]]
    for sample, (start, stop) in enumerate(spans):
        for place in range(start, stop + rejected[sample]):
            kept = place < stop
            tokens.append(sequences[sample][place] if kept else 7)
            samples.append(sample if kept else batch)
            places.append(place)
            for tap, state in zip(taps, states[sample], strict=True):
                tap.append(state[place] if kept else np.full(WIDTH, 1e3))
    as_ids = lambda ids: jnp.asarray(ids, jnp.int32)
    rows = ObservedRows(as_ids(tokens), as_ids(samples), as_ids(places))
    return rows, tuple(jnp.asarray(np.array(tap), jnp.float32) for tap in taps)


@pytest.mark.parametrize("name", CASES)
def test_drafts_follow_the_equations_in_every_published_format(name, load):
    case, drafter = CASES[name], load(name)
    assert drafter.taps == case.taps
    sequences = ragged_prompts([6, 14, 3, 9], seed=8)
    states = [hidden_states(llama_target(), tokens[:-1], case.taps) for tokens in sequences]
    batch = len(sequences)
    buffer = np.zeros((batch, 24), np.int32)
    lengths = jnp.array([len(tokens) for tokens in sequences], jnp.int32)
    for row, tokens in zip(buffer, sequences, strict=True):
        row[: len(tokens)] = tokens
    state = drafter.init(jnp.asarray(buffer), lengths, buffer.shape[1])
    cuts = [(0, 0, 0, 0), (4, 1, 0, 8), (4, 9, 0, 8), (5, 13, 2, 8)]  # what has been observed
    observe, propose = jax.jit(drafter.observe), jax.jit(drafter.propose)
    keys, sampling = jax.random.split(jax.random.key(3), batch), emsjax.Sampling(1.0).expand(batch)
    asked = jnp.array([4, 2, 3, 0], jnp.int32)
    for before, after, rejected in zip(cuts, cuts[1:], [(0, 0, 0, 0), (2, 0, 3, 1), (0, 1, 2, 0)]):
        call = observed_rows(states, sequences, list(zip(before, after)), rejected)
        state = observe(state, *call)
        # What is drafted between two observations leaves no trace.
        so_far = jnp.asarray(after, jnp.int32) + 1
        _, state = propose(state, jnp.asarray(buffer), so_far, asked, keys, sampling)
    draft, _ = propose(state, jnp.asarray(buffer), lengths, asked, keys, sampling)
    np.testing.assert_array_equal(draft.counts, asked)
    for sample, tokens in enumerate(sequences):
        count = int(asked[sample])
        drafted = np.asarray(draft.tokens[sample, :count])
        if not count:
            continue
        logits = case.forward([*tokens, *drafted[:-1]], states[sample], count - 1)
        np.testing.assert_allclose(draft.probs[sample, :count], softmax(logits), atol=2e-5)
        assert (np.asarray(draft.probs)[sample, np.arange(count), drafted] > 0).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pause:
    """A policy that drafts nothing in every third step, and as much as it may in the others."""

    def init(self, batch, max_draft_tokens):
        return jnp.zeros((), jnp.int32)

    def lengths(self, state, view):
        return jnp.full(view.active.shape, jnp.where(state % 3 == 1, 0, 4), jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state + 1


def test_drafts_follow_the_equations_in_every_step_of_a_generation(load):
    """In each step the drafts equal those of a drafter without state."""
    case, model, drafter = CASES["speculators"], llama_target(), load("speculators")
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=24)
    propose, counts = jax.jit(drafter.propose), []
    for _ in range(9):
        asked = jnp.full(len(PROMPTS), 3, jnp.int32)
        args = (state.tokens, state.lengths, asked, state.keys, None)
        draft, _ = propose(state.drafter_state, *args)
        for sample, length in enumerate(np.asarray(state.lengths)):
            tokens = np.asarray(state.tokens[sample, :length])
            if length == 1:  # nothing has been observed yet
                assert draft.counts[sample] == 0
                continue
            states = hidden_states(model, padded(tokens[:-1]), case.taps)
            states = [x[: length - 1] for x in states]
            drafted = np.asarray(draft.tokens[sample])[:3]
            logits = case.forward([*tokens, *drafted[:-1]], states, 2)
            np.testing.assert_array_equal(drafted, logits.argmax(1))
        state, info = emsjax.step(model, drafter, state, draft_length=Pause())
        counts.append(info.num_accepted)
    assert len({tuple(count.tolist()) for count in counts}) > 3  # ragged
    assert np.sum(counts) > 20


def padded(tokens):
    """The tokens and others, so that the forward pass of the target is compiled once."""
    return np.pad(tokens, (0, POSITIONS - len(tokens)))


TARGETS = {"llama": llama_target, "opt": opt_target}
WAYS = {
    "at once": {},
    "refilled": {"batch_size": 2},
    "pauses": {"draft_length": Pause()},
    "heuristic": {"draft_length": emsjax.BassHeuristic(), "batch_size": 3},
    "several": {"num_sequences": 2, **NEARLY_GREEDY},
    "several, refilled": {"num_sequences": 2, "batch_size": 3, **NEARLY_GREEDY},
    "none": {"draft_length": emsjax.FixedLength(0)},
}


@pytest.fixture(scope="module")
def plain():
    """The tokens of plain decoding."""

    @functools.cache
    def decoded(target):
        return emsjax.generate(TARGETS[target](), PROMPTS, max_new_tokens=20).tokens

    return decoded


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_tokens_equal_plain_decoding(target, way, load, plain):
    if target == "opt" and way not in ("refilled", "several"):
        pytest.skip("one target for each way")
    model, drafter = TARGETS[target](), load("speculators")
    out = emsjax.generate(model, PROMPTS, drafter, max_new_tokens=20, **WAYS[way])
    repeats = WAYS[way].get("num_sequences", 1)
    np.testing.assert_array_equal(out.tokens, np.repeat(plain(target), repeats, axis=0))
    if way == "none":
        assert out.stats.num_drafted.sum() == 0
    elif target == "llama":
        assert out.stats.acceptance_rate > 0.3
