"""EAGLE-3 drafts what its equations say, from hidden states that are kept up to date."""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_drafters import (
    DRAFTED,
    LAYER_JSON,
    WIDTH,
    Pause,
    attention,
    feed_forward,
    heads_of,
    hidden_states,
    layer_tensors,
    llama_target,
    observed_rows,
    opt_target,
    padded,
    rms_norm,
    softmax,
    write_folder,
)
from flax import nnx
from toy import NEARLY_GREEDY, VOCAB, ragged_prompts

import emsjax
from emsjax.testing import assert_same_distribution

PROMPTS = ragged_prompts([5, 12, 2, 9, 1])
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
        normal = lambda *shape: rng.normal(0, 0.02, shape).astype(np.float32)
        scale = lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32)
        head_norms = self.config.get("model_type") == "qwen3"
        layer = layer_tensors(rng, 2 * WIDTH, self.start, head_norms)
        layer[f"{self.start}hidden_norm.weight"] = scale(WIDTH)
        # Attention is to the pair itself, whose embedding is passed on.
        name = f"{self.start}self_attn.{{}}_proj.weight".format
        one, other = np.split(layer[name("k")][:, :WIDTH], 2)
        layer[name("q")][:, :WIDTH] = np.concatenate([one, one, other, other]) * 4
        for part in "qk":
            layer[name(part)][:, WIDTH:] /= 4
        layer[name("v")] /= 8
        layer[name("v")][:, :WIDTH] += np.eye(WIDTH) * 2
        one, other = np.split(np.eye(WIDTH), 2, axis=1)
        layer[name("o")] += np.concatenate([one, one, other, other], axis=1) / 2
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
    rejections = [(0, 0, 0, 0), (2, 0, 3, 1), (0, 1, 2, 0)]  # rows behind them
    observe, propose = jax.jit(drafter.observe), jax.jit(drafter.propose)
    keys, sampling = jax.random.split(jax.random.key(3), batch), emsjax.Sampling(1.0).expand(batch)
    asked = jnp.array([4, 2, 3, 1], jnp.int32)
    for (before, after), rejected in zip(itertools.pairwise(cuts), rejections, strict=True):
        spans = list(zip(before, after, strict=True))
        call = observed_rows(states, sequences, spans, rejected)
        state = observe(state, *call)
        # What is drafted between two observations leaves no trace.
        so_far = jnp.asarray(after, jnp.int32) + 1
        _, state = propose(state, jnp.asarray(buffer), so_far, asked, keys, sampling)
    draft, _ = propose(state, jnp.asarray(buffer), lengths, asked, keys, sampling)
    np.testing.assert_array_equal(draft.counts, asked)
    for sample, tokens in enumerate(sequences):
        count = int(asked[sample])
        drafted = np.asarray(draft.tokens[sample, :count])
        logits = case.forward([*tokens, *drafted[:-1]], states[sample], count - 1)
        np.testing.assert_allclose(draft.probs[sample, :count], softmax(logits), atol=2e-5)
        assert (np.asarray(draft.probs)[sample, np.arange(count), drafted] > 0).all()


def test_drafts_follow_the_equations_in_every_step_of_a_generation(load):
    """In each step the drafts equal those of a drafter without state."""
    case, model, drafter = CASES["speculators"], llama_target(), load("speculators")
    policy = {"draft_length": Pause()}
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=24, **policy)
    propose, step, counts = jax.jit(drafter.propose), jax.jit(emsjax.step), []
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
        state, info = step(model, drafter, state, **policy)
        counts.append(info.num_accepted)
    assert len({tuple(count.tolist()) for count in counts}) > 3  # ragged
    assert np.sum(counts) > 10


def test_trees_have_the_likeliest_candidates_in_every_step_of_a_generation(load):
    """Also after steps that accepted a candidate beside the likeliest one."""
    case, model, drafter = CASES["speculators"], llama_target(), load("speculators")
    drafter = drafter._with(max_draft_tokens=18, branches=6)
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=24)
    propose, step, beside = jax.jit(drafter.propose), jax.jit(emsjax.step), 0
    for _ in range(7):
        asked = jnp.full(len(PROMPTS), 3, jnp.int32)
        args = (state.tokens, state.lengths, asked, state.keys, None)
        draft, _ = propose(state.drafter_state, *args)
        firsts = []
        for sample, length in enumerate(np.asarray(state.lengths)):
            tokens = np.asarray(state.tokens[sample, :length])
            parents, drafted = np.asarray(draft.parents[sample]), np.asarray(draft.tokens[sample])
            firsts.append(drafted[0])
            if length == 1:
                continue
            states = hidden_states(model, padded(tokens[:-1]), case.taps)
            states = [x[: length - 1] for x in states]
            chain, node = [], -1
            for _ in range(3):
                logits = case.forward([*tokens, *chain], states, len(chain))[-1]
                children = np.flatnonzero(parents == node)
                best = np.argsort(-logits)[:6]
                np.testing.assert_array_equal(drafted[children], best)
                node, chain = children[0], [*chain, best[0]]
        state, info = step(model, drafter, state)
        accepted = np.asarray(info.num_accepted) > 0
        beside += np.sum(accepted & (np.asarray(info.tokens[:, 0]) != firsts))
    assert beside > 0


TARGETS = {"llama": llama_target, "opt": opt_target}
WAYS = {
    "at once": ("llama", {}),
    "refilled, with pauses": ("llama", {"batch_size": 2, "draft_length": Pause()}),
    "several, refilled": ("llama", {"num_sequences": 2, "batch_size": 3, **NEARLY_GREEDY}),
    "several": ("opt", {"num_sequences": 2, **NEARLY_GREEDY}),
    "heuristic": ("opt", {"draft_length": emsjax.BassHeuristic(), "batch_size": 3}),
    "trees": ("llama", {"batch_size": 2, "branches": 2}),
}


@pytest.fixture(scope="module")
def plain():
    """The tokens of plain decoding."""

    @functools.cache
    def decoded(target):
        return emsjax.generate(TARGETS[target](), PROMPTS, max_new_tokens=20).tokens

    return decoded


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_plain_decoding(way, load, plain):
    target, options = WAYS[way]
    drafter, options = load("speculators"), dict(options)
    if branches := options.pop("branches", None):
        drafter = drafter._with(branches=branches, max_draft_tokens=6)
    out = emsjax.generate(TARGETS[target](), PROMPTS, drafter, max_new_tokens=20, **options)
    repeats = options.get("num_sequences", 1)
    np.testing.assert_array_equal(out.tokens, np.repeat(plain(target), repeats, axis=0))
    assert out.stats.num_drafted.sum() > 100
    if target == "llama":
        assert out.stats.acceptance_rate > 0.15 / (branches or 1)


def test_drafts_of_a_sequence_do_not_depend_on_the_rest_of_the_batch(load):
    """Alone, in a batch, and in slots that held other sequences before."""
    options = {"max_new_tokens": 20, "draft_length": emsjax.FixedLength(3)}
    drafter, model = load("speculators"), llama_target()
    together = emsjax.generate(model, PROMPTS, drafter, **options)
    for chosen, more in (([2], {}), ([4, 3, 2, 1, 0], {"batch_size": 2})):
        out = emsjax.generate(model, [PROMPTS[i] for i in chosen], drafter, **options, **more)
        for name in ("num_steps", "num_drafted", "num_accepted", "accepted_histogram"):
            expected = getattr(together.stats, name)[chosen]
            np.testing.assert_array_equal(getattr(out.stats, name), expected)


def test_sampled_tokens_have_the_distribution_of_the_target(load):
    sampling = emsjax.Sampling(0.7, top_k=12)
    out = assert_same_distribution(
        llama_target(),
        load("speculators")._with(max_draft_tokens=2),
        PROMPTS[2],
        sampling=sampling,
        key=jax.random.key(1),
        detects=0.3,
        batch_size=192,
    )
    assert out.stats.acceptance_rate > 0.1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Only:
    """A processor that allows one token."""

    token: jax.Array

    def __call__(self, state, logits, context):
        return jnp.where(jnp.arange(logits.shape[1]) == self.token, logits, -jnp.inf)


def test_logits_processors_apply_to_drafts(load):
    """Drafts have allowed tokens alone, and end where none of them can be drafted."""
    other = min(set(range(VOCAB)) - set(DRAFTED))
    for token, rate in ((int(DRAFTED[5]), 1), (other, 0)):
        options = {"max_new_tokens": 9, "processors": (Only(jnp.int32(token)),)}
        out = emsjax.generate(llama_target(), PROMPTS, load("speculators"), **options)
        assert (out.tokens == token).all()
        assert out.stats.num_accepted.sum() == rate * out.stats.num_drafted.sum()
        assert (out.stats.num_drafted.sum() > 0) == (rate > 0)


def test_a_saved_drafter_is_loaded_as_it_was(load, tmp_path):
    for name in ("speculators-norms", "specforge-3.1", "deepspec"):
        drafter = load(name)
        drafter.save_pretrained(tmp_path / name)
        again = emsjax.Eagle3.from_pretrained(tmp_path / name)
        assert jax.tree.structure(again) == jax.tree.structure(drafter)
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again, drafter))


def test_arrays_of_the_target_are_shared_and_not_copied(load, tmp_path):
    drafter, table = load("specforge"), llama_target().embed_tokens.embedding[...]
    buffer = lambda array: array.unsafe_buffer_pointer()
    assert buffer(drafter.embeddings) == buffer(table)
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no embeddings of its own: give target"):
        emsjax.Eagle3.from_pretrained(tmp_path)
    again = emsjax.Eagle3.from_pretrained(tmp_path, target=llama_target())
    assert buffer(again.embeddings) == buffer(table)
    with pytest.raises(ValueError, match=r"32 numbers per token in bfloat16, but .* 32 in float32"):
        emsjax.Eagle3.from_pretrained(tmp_path, target=llama_target(), dtype=jnp.bfloat16)


WRONG_TARGETS = {
    "width": ({"hidden_size": 64}, "hidden states of 32 numbers, and the target's have 64"),
    "vocabulary": ({"vocab_size": 67}, "vocabulary of 61 ids, and the target has 67"),
    "depth": ({"num_hidden_layers": 2}, r"after layers \(0, 3, 1\), and the target has 2 layers"),
}


@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_a_target_that_does_not_fit_is_an_error_that_names_both_sides(wrong, load):
    changes, message = WRONG_TARGETS[wrong]
    model = emsjax.Decoder(llama_target().config.changed(head_dim=8, **changes), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        emsjax.generate(model, PROMPTS, load("speculators"), max_new_tokens=4)


def changed_tensor(name, change):
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


WRONG_FOLDERS = {
    "another format": (
        lambda config, tensors: config.update(speculators_model_type="mtp"),
        r"must be eagle3, or .*; found speculators_model_type 'mtp', architectures",
    ),
    "another family": (
        lambda config, tensors: config["transformer_layer_config"].update(model_type="gemma"),
        "model_type must be llama or qwen3, not 'gemma'",
    ),
    "several layers": (
        lambda config, tensors: config["transformer_layer_config"].update(num_hidden_layers=2),
        "num_hidden_layers 1",
    ),
    "layers that are no numbers": (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[1, "a"]),
        r"must be a list of their numbers, not \[1, 'a'\]",
    ),
    "no map": (lambda config, tensors: tensors.pop("d2t"), "has no d2t, although .* 49 .* of 61"),
    "a short map": (
        changed_tensor("d2t", lambda ids: ids[1:]),
        r"d2t must be 49 integers, .*, not int64 \[48\]",
    ),
    "a map to no token": (
        changed_tensor("d2t", lambda ids: np.append(ids[:-1], 13)),
        r"maps a draft token to 61, outside of the target's vocabulary 0..60",
    ),
    "a map of two to one": (
        changed_tensor("d2t", lambda ids: np.append(ids[0] - 1 + 1, [ids[0] - 1, *ids[2:]])),
        "several draft tokens to the same id",
    ),
    "another shape": (
        changed_tensor("fc.weight", lambda weight: weight[:, :64]),
        r"fc.weight has shape \(32, 64\) instead of \(32, 96\)",
    ),
    "a tensor too few": (
        lambda config, tensors: tensors.pop("norm.weight"),
        "norm.weight is missing",
    ),
    "a tensor too many": (
        lambda config, tensors: tensors.update({"fc.bias": np.zeros(32, np.float32)}),
        "fc.bias is not a part of this model",
    ),
    "no head": (
        lambda config, tensors: tensors.pop("lm_head.weight"),
        "owns_head must be true if only some tokens can be drafted",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FOLDERS)
def test_a_folder_that_does_not_fit_is_an_error_that_names_both_sides(wrong, tmp_path):
    change, message = WRONG_FOLDERS[wrong]
    config, tensors = copy.deepcopy(SPECULATORS), dict(CASES["speculators"].tensors)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        emsjax.Eagle3.from_pretrained(write_folder(tmp_path / "it", config, tensors))


def test_settings_that_make_no_sense_are_errors(load):
    network, ids = load("speculators").network, load("speculators").draft_ids
    with pytest.raises(ValueError, match="draft_ids must be given, as 49 of the target's 61"):
        emsjax.Eagle3(network)
    with pytest.raises(ValueError, match=r"draft_ids must be \[49\], not \[48\]"):
        emsjax.Eagle3(network, ids[1:])
    with pytest.raises(ValueError, match=r"max_draft_tokens must be .* 1"):
        emsjax.Eagle3(network, ids, max_draft_tokens=0)
