"""DFlash and DSpark draft what their equations say, from hidden states that are kept up to date."""

import copy
import dataclasses
import functools

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
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.sampling.processors import LogitsContext, Processing
from emsjax.testing import assert_same_distribution

PROMPTS = ragged_prompts([5, 12, 2, 9, 1])
BLOCK, MASK, RANK = 4, 60, 12
SIGMOID = lambda x: 1 / (1 + np.exp(-x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter in one of the published formats.

    Attributes:
        config: contents of config.json.
        taps: the hidden states that the format means, as `hidden_states` of transformers.
        head_type: the sequential head; None: there is none.
        from_anchor: whether the output at the last token is the first draft.
        is_confident: whether there is a head that predicts which tokens are accepted.
        is_full: whether all tokens can be drafted.
        own_tables: whether the folder has embeddings and a head.
    """

    config: dict
    taps: tuple[int, ...]
    head_type: str | None = None
    from_anchor: bool = False
    is_confident: bool = False
    is_full: bool = True
    own_tables: bool = True
    num_layers: int = 2

    @property
    def count(self):
        return BLOCK - (not self.from_anchor)

    @functools.cached_property
    def tensors(self):
        """The folder's tensors; what they draft resembles what `llama_target` continues with."""
        rng = np.random.default_rng(5)
        normal = lambda *shape: rng.normal(0, 0.2, shape).astype(np.float32)
        scale = lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32)
        tensors = {}
        for i in range(self.num_layers):
            tensors |= layer_tensors(rng, WIDTH, f"layers.{i}.", True)
        ids = list(range(VOCAB) if self.is_full else DRAFTED)
        head = np.asarray(llama_target().lm_head.embedding[...])
        table = np.asarray(llama_target().embed_tokens.embedding[...])
        tensors |= {
            "fc.weight": normal(WIDTH, len(self.taps) * WIDTH),
            "hidden_norm.weight": scale(WIDTH),
            "norm.weight": scale(WIDTH),
        }
        if self.own_tables:
            tensors |= {"embed_tokens.weight": table, "lm_head.weight": head[ids]}
        if self.head_type:
            # What the target continues a token with, as far as so few numbers can tell.
            scores = rms_norm(table, 1) @ head.T
            left, sizes, right = np.linalg.svd(scores)
            tensors |= {
                "markov_head.markov_w1.weight": left[:, :RANK] * np.sqrt(sizes[:RANK]) * 2,
                "markov_head.markov_w2.weight": (right[:RANK].T * np.sqrt(sizes[:RANK]))[ids],
            }
        if self.head_type == "gated":
            tensors["markov_head.gate_proj.weight"] = normal(RANK, WIDTH + RANK)
            tensors["markov_head.gate_proj.bias"] = normal(RANK)
        if self.head_type == "rnn":
            tensors["markov_head.joint_proj.weight"] = normal(3 * RANK, WIDTH + 2 * RANK)
            tensors["markov_head.joint_proj.bias"] = normal(3 * RANK)
        if self.is_confident:
            tensors["confidence_head.proj.weight"] = normal(1, WIDTH + RANK)
            tensors["confidence_head.proj.bias"] = normal(1)
        if not self.is_full:
            tensors["d2t"] = DRAFTED - np.arange(len(DRAFTED))
            tensors["t2d"] = np.isin(np.arange(VOCAB), DRAFTED)
        return {
            name: value.astype(np.float32) if value.dtype == float else value
            for name, value in tensors.items()
        }

    def forward(self, tokens, states, drafted):
        """Logits of every place of the block behind `tokens`, given what is drafted there, and the
        predicted probabilities of being accepted.

        Args:
            states: the target's hidden states of the tokens but the last, for each tap.
        """
        get = self.tensors.get
        table = np.asarray(llama_target().embed_tokens.embedding[...], np.float64)
        head = np.asarray(llama_target().lm_head.embedding[...], np.float64)
        head = head if self.is_full else head[DRAFTED]
        context = np.concatenate(states, axis=1) @ get("fc.weight").T.astype(np.float64)
        context = rms_norm(context, get("hidden_norm.weight"))
        length = len(tokens)
        past, block = np.arange(length - 1), np.arange(length - 1, length - 1 + BLOCK)
        x = table[[tokens[-1]] + [MASK] * (BLOCK - 1)]
        for i in range(self.num_layers):
            of = lambda name, i=i: get(f"layers.{i}.{name}")
            normed = rms_norm(x, of("input_layernorm.weight"))
            keys, values = (
                np.concatenate(
                    [heads_of(of, context, part, past), heads_of(of, normed, part, block)]
                )
                for part in "kv"
            )
            visible = np.ones((BLOCK, length - 1 + BLOCK), bool)
            x = x + attention(of, heads_of(of, normed, "q", block), keys, values, visible)
            x = x + feed_forward(of, rms_norm(x, of("post_attention_layernorm.weight")))
        outputs = rms_norm(x, get("norm.weight"))[0 if self.from_anchor else 1 :]
        found, sure, memory = [], [], np.zeros(RANK)
        for output, before in zip(outputs, [tokens[-1], *drafted], strict=False):
            logits = head @ output
            if self.head_type:
                low = previous = get("markov_head.markov_w1.weight")[before].astype(np.float64)
                if self.head_type == "gated":
                    joint = get("markov_head.gate_proj.weight") @ [*output, *previous]
                    low = SIGMOID(joint + get("markov_head.gate_proj.bias")) * previous
                if self.head_type == "rnn":
                    joint = get("markov_head.joint_proj.weight") @ [*memory, *previous, *output]
                    gate, new, out = np.split(joint + get("markov_head.joint_proj.bias"), 3)
                    memory = SIGMOID(gate) * memory + (1 - SIGMOID(gate)) * np.tanh(new)
                    low = np.tanh(out)
                logits = logits + get("markov_head.markov_w2.weight") @ low
            if self.is_confident:
                joint = get("confidence_head.proj.weight")[0] @ [*output, *previous]
                sure.append(SIGMOID(joint + get("confidence_head.proj.bias")[0]))
            full = np.full(VOCAB, -np.inf)
            full[slice(None) if self.is_full else DRAFTED] = logits
            found.append(full)
        return np.array(found), np.array(sure)


DRAFT_JSON = LAYER_JSON | {"num_hidden_layers": 2, "model_type": "qwen3"}
SPECULATORS = {
    "transformer_layer_config": DRAFT_JSON,
    "draft_vocab_size": len(DRAFTED),
    "aux_hidden_state_layer_ids": [0, 3, 1],
    "block_size": BLOCK,
    "mask_token_id": MASK,
}
DSPARK = {
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 1],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ZLAB = DRAFT_JSON | {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
HEADS = {"head_type": "vanilla", "from_anchor": True, "is_confident": True}
CASES = {
    "dflash": Case(ZLAB, (1, 3), own_tables=False),
    "deepspec": Case(
        DRAFT_JSON | DSPARK | {"architectures": ["Qwen3DSparkModel"]}, (0, 2), **HEADS
    ),
    "specforge": Case(
        DRAFT_JSON
        | {"architectures": ["DSparkDraftModel"], "dflash_config": DSPARK}
        | {"block_size": BLOCK},
        (0, 2),
        own_tables=False,
        **HEADS,
    ),
    "speculators-dflash": Case(
        SPECULATORS | {"speculators_model_type": "dflash"}, (0, 3, 1), is_full=False
    ),
    "speculators-gated": Case(
        SPECULATORS
        | {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated"}
        | {"sample_from_anchor": False},
        (0, 3, 1),
        "gated",
        is_confident=True,
        is_full=False,
    ),
    "speculators-rnn": Case(
        SPECULATORS
        | {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": "rnn"},
        (0, 3, 1),
        "rnn",
        from_anchor=True,
        is_confident=True,
        is_full=False,
    ),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a case's drafter."""
    home = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def loaded(name, **options):
        folder = write_folder(home / name, CASES[name].config, CASES[name].tensors)
        return emsjax.BlockDrafter.from_pretrained(folder, llama_target(), **options)

    return loaded


@pytest.mark.parametrize("name", CASES)
def test_drafts_follow_the_equations_in_every_published_format(name, load):
    case, drafter = CASES[name], load(name)
    assert (drafter.taps, drafter.max_draft_tokens) == (case.taps, case.count)
    sequences = ragged_prompts([6, 14, 1, 9], seed=8)
    states = [hidden_states(llama_target(), tokens, case.taps) for tokens in sequences]
    states = [[x[:-1] for x in of_sample] for of_sample in states]
    batch = len(sequences)
    buffer = np.zeros((batch, 24), np.int32)
    lengths = jnp.array([len(tokens) for tokens in sequences], jnp.int32)
    for row, tokens in zip(buffer, sequences, strict=True):
        row[: len(tokens)] = tokens
    state = drafter.init(jnp.asarray(buffer), lengths, buffer.shape[1])
    observe, propose = jax.jit(drafter.observe), jax.jit(drafter.propose)
    keys, sampling = jax.random.split(jax.random.key(3), batch), emsjax.Sampling(1.0).expand(batch)
    asked = jnp.array([4, 2, 3, 1], jnp.int32)
    spans = [[(0, 4), (0, 1), (0, 0), (0, 8)], [(4, 5), (1, 13), (0, 0), (8, 8)]]
    for call, rejected in zip(spans, [(2, 0, 3, 1), (0, 1, 2, 0)], strict=True):
        state = observe(state, *observed_rows(states, sequences, call, rejected))
    draft, _ = propose(state, jnp.asarray(buffer), lengths, asked, keys, sampling)
    np.testing.assert_array_equal(draft.counts, np.minimum(asked, case.count))
    sure = None
    for sample, tokens in enumerate(sequences):
        count = int(draft.counts[sample])
        drafted = np.asarray(draft.tokens[sample])
        logits, sure = case.forward(tokens, states[sample], drafted)
        np.testing.assert_allclose(draft.probs[sample, :count], softmax(logits)[:count], atol=3e-5)
        if case.is_confident and sample == 0:  # a draft ends where confidence first drops
            drops = int(np.argmin(sure))
            limited = drafter._with(min_confidence=float(sure.min() + 1e-4))
            short, _ = jax.jit(limited.propose)(
                state, jnp.asarray(buffer), lengths, asked, keys, sampling
            )
            first = np.flatnonzero(sure < sure.min() + 1e-4)[0]
            assert short.counts[0] == first == drops
            np.testing.assert_array_equal(short.tokens[0], draft.tokens[0])


def test_drafts_follow_the_equations_in_every_step_of_a_generation(load):
    """In each step the drafts equal those of a drafter without state."""
    case, model, drafter = CASES["deepspec"], llama_target(), load("deepspec")
    policy = {"draft_length": Pause()}
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=24, **policy)
    propose, step, counts = jax.jit(drafter.propose), jax.jit(emsjax.step), []
    for _ in range(8):
        asked = jnp.full(len(PROMPTS), BLOCK, jnp.int32)
        args = (state.tokens, state.lengths, asked, state.keys, None)
        draft, _ = propose(state.drafter_state, *args)
        for sample, length in enumerate(np.asarray(state.lengths)):
            tokens = np.asarray(state.tokens[sample, :length])
            states = hidden_states(model, padded(tokens), case.taps)
            drafted = np.asarray(draft.tokens[sample])
            logits, _ = case.forward(tokens, [x[: length - 1] for x in states], drafted)
            np.testing.assert_array_equal(drafted, logits.argmax(1))
        state, info = step(model, drafter, state, **policy)
        counts.append(info.num_accepted)
    assert len({tuple(count.tolist()) for count in counts}) > 3  # ragged
    assert np.sum(counts) > 10


TARGETS = {"llama": llama_target, "opt": opt_target}
WAYS = {
    "refilled": ("llama", {"batch_size": 2, "draft_length": Pause()}),
    "several, refilled": ("llama", {"num_sequences": 2, "batch_size": 3, **NEARLY_GREEDY}),
    "several": ("opt", {"num_sequences": 2, **NEARLY_GREEDY}),
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_plain_decoding(way, load):
    target, options = WAYS[way]
    model, drafter = TARGETS[target](), load("deepspec")
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=20).tokens
    out = emsjax.generate(model, PROMPTS, drafter, max_new_tokens=20, **options)
    repeats = options.get("num_sequences", 1)
    np.testing.assert_array_equal(out.tokens, np.repeat(plain, repeats, axis=0))
    assert out.stats.num_drafted.sum() > 100
    if target == "llama":
        assert out.stats.acceptance_rate > 0.15


def test_drafts_of_a_sequence_do_not_depend_on_the_rest_of_the_batch(load):
    """Alone, in a batch, and in slots that held other sequences before."""
    options = {"max_new_tokens": 20, "draft_length": emsjax.FixedLength(3)}
    drafter, model = load("deepspec"), llama_target()
    together = emsjax.generate(model, PROMPTS, drafter, **options)
    for chosen, more in (([2], {}), ([4, 3, 2, 1, 0], {"batch_size": 2})):
        out = emsjax.generate(model, [PROMPTS[i] for i in chosen], drafter, **options, **more)
        for name in ("num_steps", "num_drafted", "num_accepted", "accepted_histogram"):
            expected = getattr(together.stats, name)[chosen]
            np.testing.assert_array_equal(getattr(out.stats, name), expected)


@pytest.mark.parametrize("min_confidence", [0.0, 0.45])
def test_sampled_tokens_have_the_distribution_of_the_target(load, min_confidence):
    """Also if drafts end where confidence drops."""
    out = assert_same_distribution(
        llama_target(),
        load("deepspec", max_draft_tokens=2, min_confidence=min_confidence),
        PROMPTS[4],
        sampling=emsjax.Sampling(1.0),
        key=jax.random.key(1),
        samples=512,
        batch_size=512,
    )
    assert 0 < out.stats.num_accepted.sum() < out.stats.num_drafted.sum()


def test_a_saved_drafter_is_loaded_as_it_was(load, tmp_path):
    for name in ("deepspec", "speculators-rnn", "speculators-gated", "speculators-dflash"):
        drafter = load(name)
        drafter.save_pretrained(tmp_path / name)
        again = emsjax.BlockDrafter.from_pretrained(tmp_path / name)
        assert jax.tree.structure(again) == jax.tree.structure(drafter)
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again, drafter))


def test_arrays_of_the_target_are_shared_and_not_copied(load, tmp_path):
    drafter, target = load("dflash"), llama_target()
    drafter.save_pretrained(tmp_path)
    again = emsjax.BlockDrafter.from_pretrained(tmp_path, target=target)
    buffer = lambda array: array.unsafe_buffer_pointer()
    for one in (drafter, again):
        assert buffer(one.embeddings) == buffer(target.embed_tokens.embedding[...])
        assert buffer(one.head) == buffer(target.lm_head.embedding[...])
    with pytest.raises(ValueError, match="no embeddings and head of its own: give target"):
        emsjax.BlockDrafter.from_pretrained(tmp_path)


WRONG_FOLDERS = {
    "another format": (
        lambda config, tensors: config.update(architectures=["DominoDraftModel"]),
        r"\[Qwen3DSparkModel\] \(DeepSpec\); found architectures \['DominoDraftModel'\]",
    ),
    "a window": (
        lambda config, tensors: config.update(layer_types=["sliding_attention"] * 2),
        "sliding windows and causal blocks are not supported",
    ),
    "no mask": (
        lambda config, tensors: config.pop("mask_token_id"),
        "mask_token_id must be given",
    ),
    "a mask that is no token": (
        lambda config, tensors: config.update(mask_token_id=61),
        r"mask_token_id must be a token id in 0..60",
    ),
    "another rank": (
        lambda config, tensors: config.update(markov_rank=8),
        r"markov_head.markov_w1.weight has shape \(61, 12\) instead of \(61, 8\)",
    ),
    "another head": (
        lambda config, tensors: config.update(markov_head_type="deep"),
        "markov_head_type must be one of gated, rnn, vanilla, not 'deep'",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FOLDERS)
def test_a_folder_that_does_not_fit_is_an_error_that_names_both_sides(wrong, tmp_path):
    change, message = WRONG_FOLDERS[wrong]
    config, tensors = copy.deepcopy(CASES["deepspec"].config), dict(CASES["deepspec"].tensors)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        emsjax.BlockDrafter.from_pretrained(write_folder(tmp_path / "it", config, tensors))


def test_settings_that_make_no_sense_are_errors(load):
    network = load("deepspec").network
    with pytest.raises(ValueError, match="max_draft_tokens must be at most 4, as a block drafts"):
        emsjax.BlockDrafter(network, max_draft_tokens=5)
    with pytest.raises(ValueError, match=r"min_confidence must be in 0\.\.1, not 2"):
        emsjax.BlockDrafter(network, min_confidence=2.0)
    dflash = load("dflash")
    with pytest.raises(ValueError, match="the drafter has no head that predicts"):
        emsjax.BlockDrafter(dflash.network, None, dflash.shared, min_confidence=0.5)


def test_tokens_that_are_chosen_at_once_are_those_of_place_by_place():
    """Greedy and drawn, with drafts that end where confidence drops, and with processors."""
    layers = emsjax.LlamaConfig.from_json(LAYER_JSON)
    sizes = {"draft_vocab_size": len(DRAFTED), "block_size": 6, "mask_token_id": MASK}
    config = BlockConfig(layers=layers, taps=(1,), enable_confidence_head=True, **sizes)
    network, rng = BlockNetwork(config, rngs=nnx.Rngs(3)), np.random.default_rng(1)
    for path, value in nnx.to_flat_state(nnx.state(network)):
        if path[-1] in ("kernel", "embedding"):  # places are to differ
            value[...] = 15 * value[...]
    # Not in order: the place of a token in the draft vocabulary is not its rank.
    ids = jnp.asarray(rng.permutation(DRAFTED), jnp.int32)
    drafter = emsjax.BlockDrafter(network, ids)
    batch, lengths = 4, jnp.array([3, 5, 2, 4], jnp.int32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (batch, 8)), jnp.int32)
    state = drafter.init(tokens, lengths, 16)
    wanted, keys = jnp.array([5, 5, 0, 3], jnp.int32), jax.random.split(jax.random.key(2), batch)
    drawn = emsjax.Sampling(0.8, top_k=9).expand(batch).in_use()

    def propose(drafter, sampling):
        arguments = (state, tokens, lengths, wanted, keys, sampling)
        return jax.jit(lambda: drafter.propose(*arguments)[0])()

    def processed(change):
        context = LogitsContext(tokens, lengths, lengths, jnp.zeros(0, jnp.int32), None)
        return drafter.with_processing(Processing((change,), ((),), context, VOCAB))

    def once(state, logits, context):  # no token twice
        before = jnp.arange(context.drafted.shape[1]) < context.num_drafted[:, None]
        seen = (context.drafted[..., None] == jnp.arange(VOCAB)) & before[..., None]
        return jnp.where(jnp.any(seen, axis=1), -jnp.inf, logits)

    hidden = drafter._run(state, tokens[jnp.arange(batch), lengths - 1], wanted > 0)
    odds = hidden @ network.confidence_head.kernel[...] + network.confidence_head.bias[...]
    sure = SIGMOID(np.asarray(odds))[..., 0]
    least = float(np.median(sure[0]) - 1e-4)
    drafter = drafter._with(min_confidence=least)
    logits = np.full((batch, 5, VOCAB), -np.inf)
    logits[..., ids] = np.asarray(hidden) @ np.asarray(network.lm_head.embedding[...]).T
    greedy, sampled = propose(drafter, None), propose(drafter, drawn)
    slow = processed(lambda state, logits, context: logits)
    slow_greedy, slow_sampled = propose(slow, None), propose(slow, drawn)
    for fast, other in ((greedy, slow_greedy), (sampled, slow_sampled)):
        np.testing.assert_array_equal(fast.tokens, other.tokens)
        np.testing.assert_array_equal(fast.counts, other.counts)
    np.testing.assert_allclose(sampled.probs, slow_sampled.probs, atol=1e-6)
    np.testing.assert_array_equal(greedy.tokens, logits.argmax(-1))
    assert np.any(greedy.tokens != sampled.tokens)
    sure = np.cumprod(sure >= least, axis=1).sum(axis=1)
    np.testing.assert_array_equal(greedy.counts, np.minimum(wanted, sure))
    assert 0 < np.sum(greedy.counts) < np.sum(wanted)
    different = propose(processed(once), None)
    for sample, drafted in enumerate(np.asarray(different.tokens)):
        for step, token in enumerate(drafted):
            allowed = logits[sample, step].copy()
            allowed[drafted[:step]] = -np.inf
            assert token == allowed.argmax()
    assert np.any(different.tokens != greedy.tokens)
