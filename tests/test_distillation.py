"""Distillation: packing, losses, pruning, training and checkpoints."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import emsjax
from emsjax import distillation
from emsjax.decode.pack import PackedRows, pack
from emsjax.distillation import losses, passes, pruning
from emsjax.distillation.draft_model import mean_loss
from emsjax.distillation.evaluation import acceptance_by_position
from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.models.opt import OPTConfig

CONFIG = OPTConfig(
    vocab_size=60,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    init_std=0.2,
    eos_token_id=2,
)
SHALLOW = dataclasses.replace(CONFIG, num_hidden_layers=1)  # for what surrounds the layers

# Sums on a GPU differ in their last bits from run to run.
REPRODUCIBLE = (
    jax.default_backend() == "cpu" or "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
)
OPTIMIZER = distillation.make_optimizer(2, 1e-2, warm_up=1, weight_decay=0.0)


def make(config=CONFIG, seed=0) -> emsjax.OPT:
    return emsjax.OPT(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)


def documents(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, length).astype(np.int32) for length in lengths]


@pytest.fixture(scope="module")
def target():
    return make()


@pytest.fixture(scope="module")
def packed():
    return PackedSequences(documents(5, 40, 3, 17, 23, 9, 2, 31), length=16, batch=2)


# Sequences


def test_an_epoch_holds_every_piece_of_every_document_once():
    texts = documents(5, 40, 3, 17, 2, 9, seed=1)
    packed = PackedSequences(texts, length=4, batch=1, seed=3)
    assert packed.per_epoch == 76 // 4
    pieces = []
    for step in range(packed.per_epoch):
        (tokens,), (segments,), (positions,) = packed[step]
        for _, group in itertools.groupby(range(4), key=lambda i, s=segments: s[i]):
            places = list(group)
            pieces.append(tokens[places].tolist())
            assert positions[places].tolist() == list(range(len(places)))
    joined = sorted(itertools.chain(*pieces))
    assert joined == sorted(np.concatenate(texts).tolist())
    text_of = [text.tolist() for text in texts]
    inside = lambda piece, text: any(
        text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1)
    )
    assert all(any(inside(piece, text) for text in text_of) for piece in pieces)


def test_batches_depend_only_on_their_number_and_the_seed(packed):
    again = PackedSequences(packed.documents, 16, 2)
    for step in (20, 3, 0, 20):  # of different epochs, and in reverse
        for one, other in zip(packed[step], again[step], strict=True):
            np.testing.assert_array_equal(one, other)
    other = PackedSequences(packed.documents, 16, 2, seed=1)
    assert any((packed[step].tokens != other[step].tokens).any() for step in range(3))
    epochs = [np.concatenate([packed[s].tokens for s in range(e * 4, e * 4 + 4)]) for e in (0, 1)]
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize(
    ("lengths", "error"),
    [((), "no texts"), ((5, 1, 9), "text 1 is too short: 1"), ((5, 6), "11 tokens together")],
)
def test_texts_too_short_for_a_sequence_are_rejected(lengths, error):
    with pytest.raises(ValueError, match=error):
        PackedSequences(documents(*lengths), 16, 2)


# Losses


def test_losses_equal_their_formulas_in_numpy():
    rng = np.random.default_rng(0)
    logits, of_target = rng.normal(size=(2, 7, 11)).astype(np.float32)
    labels = rng.integers(0, 11, 7).astype(np.int32)
    softmax = lambda x: np.exp(np.float64(x)) / np.exp(np.float64(x)).sum(-1, keepdims=True)
    q, p = softmax(logits), softmax(of_target)
    expected = {
        "cross-entropy": -np.log(q[np.arange(7), labels]),
        "forward-kl": (p * np.log(p / q)).sum(-1),
        "reverse-kl": (q * np.log(q / p)).sum(-1),
        "total-variation": np.maximum(p - q, 0).sum(-1),
    }
    assert expected.keys() == losses.LOSSES.keys()
    arguments = tuple(map(jnp.asarray, (logits, labels, of_target)))
    for name, values in expected.items():
        found = losses.combined({name: 1.0}, *arguments)
        np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-6)
    mixed = losses.combined({"cross-entropy": 0.1, "forward-kl": 2.0}, *arguments)
    both = 0.1 * expected["cross-entropy"] + 2 * expected["forward-kl"]
    np.testing.assert_allclose(mixed, both, rtol=1e-4)


def test_total_variation_is_the_probability_of_a_rejection():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(2, 5, 9)), jnp.float32)
    probs = jax.nn.softmax(logits)
    # The probability that a token drawn from q is accepted against p.
    accepted = emsjax.verification.acceptance_probability(probs[1], probs[0])
    expected = 1 - jnp.sum(probs[0] * accepted, axis=-1)
    found = losses.total_variation(logits[0], None, logits[1])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({}, "empty"),
        ({"kl": 1.0}, "'kl'"),
        ({"forward-kl": 0.0}, "above 0"),
        ({"forward-kl": np.inf}, "above 0 and finite"),
    ],
)
def test_invalid_losses_are_rejected(target, weights, error):
    with pytest.raises(ValueError, match=error):
        distillation.Trainer(target, OPTIMIZER, weights)


# Pruning


@pytest.mark.parametrize("embeddings", pruning.EMBEDDINGS)
def test_a_pruned_model_has_the_requested_size(target, embeddings):
    draft = distillation.prune(target, 2, 16, embeddings)
    assert draft.config.num_hidden_layers == len(draft.layers) == 2
    assert draft.config.num_attention_heads == 2
    assert draft.config.head_dim == target.config.head_dim
    assert draft.config.ffn_dim == 32
    assert draft.config.word_embed_proj_dim == (16 if embeddings == "projected" else 32)
    out = emsjax.generate(draft, [[3, 4, 5]], max_new_tokens=3)
    assert out.lengths.tolist() == [3]


SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 64}
GPT2_SIZES |= {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
FAMILIES = {
    "llama": emsjax.LlamaConfig(num_key_value_heads=4, mlp_bias=True, **SIZES),
    "mistral": emsjax.MistralConfig(num_key_value_heads=2, sliding_window=5, **SIZES),
    "qwen3, tied": emsjax.Qwen3Config(
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, **SIZES
    ),
    "gemma3": emsjax.Gemma3Config(
        num_key_value_heads=4, head_dim=16, sliding_window=5, sliding_window_pattern=2, **SIZES
    ),
    "gpt2": emsjax.GPT2Config(**GPT2_SIZES),
    "pythia": emsjax.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "codegen": emsjax.CodeGenConfig(**GPT2_SIZES, rotary_dim=4),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_pruning_what_a_family_does_not_use_is_exact(config):
    """The target writes in half of the directions; half of its heads and neurons write nothing."""
    model = emsjax.Decoder(config, rngs=nnx.Rngs(3), dtype=jnp.float32)
    rng, a = np.random.default_rng(0), model.architecture
    centred = int(a.norm.centred)  # then nothing is written along the ones
    directions = rng.normal(size=(64, 32 - centred))
    directions = np.concatenate([np.ones((64, centred)), directions], axis=1)
    used = np.linalg.qr(directions)[0][:, centred:]
    onto = jnp.asarray(used @ used.T, jnp.float32)
    for table in filter(None, (model.embed_tokens, model.embed_positions)):
        table.embedding[...] = table.embedding[...] @ onto
    for layer in model.layers:
        idle = rng.permutation(a.kv_heads)[: a.kv_heads // 2]
        values = layer.qkv_proj.kernel[...]
        for head in idle:
            start = values.shape[1] - a.columns[2] + head * a.head_dim
            values = values.at[:, start : start + a.head_dim].set(0)
        layer.qkv_proj.kernel[...] = values
        neurons = rng.permutation(a.ffn_size)[: a.ffn_size // 2]
        layer.up_proj.kernel[...] = layer.up_proj.kernel[...].at[:, neurons].set(0)
        for linear in (layer.out_proj, layer.down_proj):
            linear.kernel[...] = linear.kernel[...] @ onto
    small = distillation.prune(model, 3, 32, documents=documents(*[40] * 40))
    kept = small.architecture
    assert (kept.width, kept.heads, kept.ffn_size) == (32, a.heads // 2, a.ffn_size // 2)
    assert (kept.kv_heads, kept.head_dim) == (a.kv_heads // 2, a.head_dim)
    batch = jax.tree.map(jnp.asarray, PackedSequences(documents(30, 50, 20, seed=9), 25, 4)[0])
    logits = [m.logits(passes.forward(m, batch).reshape(100, -1)) for m in (small, model)]
    np.testing.assert_allclose(*logits, atol=2e-3 * float(jnp.abs(logits[1]).max()))
    fewer = distillation.prune(model, 1, 64)  # the first layer, unchanged
    assert len(fewer.layers) == 1
    hidden = passes.forward(fewer, batch)
    assert np.isfinite(fewer.logits(hidden.reshape(100, -1))).all()


@pytest.mark.parametrize("embeddings", pruning.EMBEDDINGS)
def test_pruning_unused_directions_heads_and_neurons_is_exact(embeddings):
    """The target writes in 15 directions, and half of its heads and neurons are constant."""
    model, rng = make(), np.random.default_rng(0)
    ones_first = np.concatenate([np.ones((32, 1)), rng.normal(size=(32, 15))], axis=1)
    used = np.linalg.qr(ones_first)[0][:, 1:]
    onto = jnp.asarray(used @ used.T, jnp.float32)
    for table in (model.embed_tokens, model.embed_positions):
        table.embedding[...] = table.embedding[...] @ onto
    for layer in model.layers:
        constant = (
            (layer.qkv_proj, np.r_[64:72, 80:88]),
            (layer.up_proj, rng.permutation(64)[:32]),
        )
        for linear, columns in constant:
            linear.kernel[...] = linear.kernel[...].at[:, columns].set(0)
            linear.bias[...] = jnp.asarray(rng.uniform(0.5, 2, linear.bias.shape), jnp.float32)
        for linear in (layer.out_proj, layer.down_proj):
            linear.kernel[...] = linear.kernel[...] @ onto
            linear.bias[...] = rng.normal(size=32).astype(np.float32) @ onto
        for norm in (layer.attention_norm, layer.ffn_norm):
            norm.scale[...] = jnp.asarray(rng.uniform(0.5, 2, 32), jnp.float32)
            norm.bias[...] = jnp.asarray(rng.normal(size=32), jnp.float32)
    model.final_norm.scale[...] = jnp.full(32, 1.5)
    model.final_norm.bias[...] = jnp.asarray(rng.normal(size=32), jnp.float32)
    small = distillation.prune(model, 3, 16, embeddings, documents(*[40] * 40))
    batch = PackedSequences(documents(30, 50, 20, seed=9), 25, 4)[0]
    batch = jax.tree.map(jnp.asarray, batch)
    logits = [m.logits(passes.forward(m, batch).reshape(100, -1)) for m in (small, model)]
    np.testing.assert_allclose(*logits, atol=2e-3)
    assert jnp.std(logits[1]) > 0.5
    assert jnp.mean(small.final_norm.scale[...]) == pytest.approx(1)  # as in a new model


@pytest.mark.parametrize("seed", [0, 1])
def test_inputs_of_heads_vary_as_in_the_target(target, seed):
    """Keys keep their mean and deviation in a layer that follows other layers than before."""
    texts = documents(*[64] * 40, seed=seed)
    draft = distillation.prune(target, 2, 16, documents=texts)
    batch = jax.tree.map(jnp.asarray, pruning.calibration_batch(target.config, texts))

    def moments(model, layer):
        count, length = batch.tokens.shape
        rows = PackedRows(
            batch.segment_ids.reshape(-1),
            batch.positions.reshape(-1),
            length * jnp.arange(count, dtype=jnp.int32),
            jnp.full(count, length, jnp.int32),
        )
        attention = passes.packed_attention
        options = {"attention": attention, "max_rows_per_sample": length}
        out = model(batch.tokens.reshape(-1), rows, model.init_cache(count, 0), **options)
        heads = model.config.num_attention_heads
        keys = np.asarray(out.fresh[layer][:, heads : 2 * heads])
        return np.stack([keys.mean(0), keys.std(0)])

    found, whole = moments(draft, 1), moments(target, 2)  # [2, h, d]
    for head in range(2):
        differences = np.abs(whole - found[:, head : head + 1]).max(axis=(0, 2))
        assert differences.min() < 1e-4


def test_products_in_pruning_are_full_float32(target, monkeypatch):
    products, directions = [], pruning.principal_directions

    def watched(model, streams, width):
        make = lambda streams: directions(model, streams, width)
        products.extend(
            equation.params["precision"]
            for equation in jax.make_jaxpr(make)(streams).eqns
            if equation.primitive.name == "dot_general"
        )
        return make(streams)

    monkeypatch.setattr(pruning, "principal_directions", watched)
    distillation.prune(target, 2, 16)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert products
    assert set(products) == {highest}


def test_other_texts_give_other_directions(target):
    one, other = (
        distillation.prune(target, 2, 16, documents=documents(*[64] * 20, seed=seed))
        for seed in (0, 1)
    )
    tables = [np.asarray(draft.embed_tokens.embedding[...]) for draft in (one, other)]
    assert np.abs(tables[0] - tables[1]).max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"do_layer_norm_before": False},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"activation_function": "gelu"},
        {"word_embed_proj_dim": 24},
    ],
    ids=str,
)
def test_any_target_can_be_pruned(changes):
    model = make(OPTConfig(**{**vars(CONFIG), **changes}))
    shared = "word_embed_proj_dim" in changes
    draft = distillation.prune(model, 2, 16, "shared" if shared else "projected")
    batch = jax.tree.map(jnp.asarray, PackedSequences(documents(40, 40), 16, 2)[0])
    hidden = passes.forward(draft, batch)
    assert np.isfinite(draft.logits(hidden.reshape(32, -1))).all()


def test_removing_layers_only_leaves_the_others_unchanged(target):
    draft = distillation.prune(target, 2, 32)
    for name in ("embed_tokens", "embed_positions"):
        np.testing.assert_array_equal(
            getattr(draft, name).embedding[...], getattr(target, name).embedding[...]
        )
    for small, large in ((0, 0), (1, 2)):
        one, other = (
            jax.tree.leaves(nnx.state(m.layers[i])) for m, i in ((draft, small), (target, large))
        )
        assert all(map(np.array_equal, one, other))


def test_kept_layers_keep_their_windows():
    """The first and last of three layers have windows; of two layers, only the first would."""
    model = emsjax.Decoder(FAMILIES["gemma3"], rngs=nnx.Rngs(0), dtype=jnp.float32)
    first, middle, last = model.architecture.layers
    assert first == last != middle
    draft = distillation.prune(model, 2, 64)
    assert draft.architecture.layers == (first, last)
    assert [layer.kind for layer in draft.layers] == [first, last]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 16), "layers must be in 1..3"),
        ((4, 16), "layers must be in 1..3"),
        ((2, 12), "width must be a multiple of 8"),
        ((2, 40), "at most 32"),
        ((3, 32), "must be smaller"),
        ((2, 16, "tied"), "embeddings must be one of"),
        ((2, 16, "shared", [np.array([3])]), "text 0 is too short"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(target, arguments, error):
    with pytest.raises(ValueError, match=error):
        distillation.prune(target, *arguments)


# Training


@pytest.mark.parametrize("family", ["opt", "mistral", "gemma3"])
def test_packed_documents_do_not_affect_each_other(target, packed, family):
    """The hidden states of each piece equal those of a forward pass with only that piece.

    The windows of Mistral and Gemma 3 are shorter than the pieces.
    """
    if family != "opt":
        target = emsjax.Decoder(FAMILIES[family], rngs=nnx.Rngs(0), dtype=jnp.float32)
    batch = packed[5]
    hidden = np.asarray(jax.jit(passes.forward)(target, jax.tree.map(jnp.asarray, batch)))
    assert batch.segment_ids.any()
    scale = 1.0 if family == "opt" else hidden.std()  # the others' are not normalised

    @jax.jit
    def of_one(tokens, count):
        rows = pack(jnp.zeros(1, jnp.int32), count, len(tokens))
        return target(tokens, rows, target.init_cache(1, 16)).hidden

    for row, (tokens, segments) in enumerate(zip(batch.tokens, batch.segment_ids, strict=True)):
        for segment in set(segments):
            (piece,) = np.nonzero(segments == segment)
            alone = of_one(np.resize(tokens[piece], 16), np.full(1, len(piece), np.int32))
            np.testing.assert_allclose(hidden[row][piece], alone[: len(piece)], atol=2e-5 * scale)


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_the_loss_is_a_mean_over_predictions_within_documents(target, packed, monkeypatch, parts):
    draft = make(seed=1)
    batch = jax.tree.map(jnp.asarray, packed[0])
    monkeypatch.setattr(passes, "LOGIT_BYTES", 4 * 2 * 60 * 16 // parts)
    assert passes.parts(16, 4 * 2 * 60) == parts
    weights = {"cross-entropy": 0.3, "reverse-kl": 1.0}
    found = mean_loss(weights, draft, target, batch)
    logits = [m.logits(passes.forward(m, batch).reshape(32, -1)) for m in (draft, target)]
    labels = jnp.roll(batch.tokens, -1, axis=1).reshape(-1)
    each = np.asarray(losses.combined(weights, logits[0], labels, logits[1])).reshape(2, 16)
    counted = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    assert not counted.all()
    assert float(found) == pytest.approx(each[:, :-1][np.asarray(counted)].mean(), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_gradient_is_that_of_all_logits_at_once(target, packed, monkeypatch, parts):
    """Logits and their gradient are computed in parts; jax's own gradient is expected."""
    monkeypatch.setattr(passes, "LOGIT_BYTES", 4 * 2 * 60 * 16 // parts)
    weights = {"cross-entropy": 0.3, "total-variation": 1.0}
    batch = jax.tree.map(jnp.asarray, packed[0])
    graph, params = nnx.split(make(seed=1))

    def plain(params):
        logits = lambda model: model.logits(passes.forward(model, batch).reshape(32, -1))
        labels = jnp.roll(batch.tokens, -1, axis=1).reshape(-1)
        draft = nnx.merge(graph, params)
        each = losses.combined(weights, logits(draft), labels, logits(target)).reshape(2, 16)
        counted = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
        return jnp.mean(each[:, :-1], where=counted)

    ours = lambda params: mean_loss(weights, nnx.merge(graph, params), target, batch)
    expected, found = (jax.jit(jax.grad(loss))(params) for loss in (plain, ours))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
        assert np.abs(other).max() > 1e-5


def trainer(target, steps=8, layers=2, **options):
    draft = distillation.prune(target, layers, 16)
    optimizer = distillation.make_optimizer(steps, 1e-2, warm_up=2, weight_decay=0.1)
    weights = {"forward-kl": 0.9, "cross-entropy": 0.1}
    options = {"target": target, "dtype": jnp.float32} | options
    return distillation.Trainer(draft, optimizer, weights, **options)


def test_training_raises_the_acceptance_rate(target):
    prompts = documents(*[8] * 24)
    generated = distillation.continuations(target, prompts, 24, new_tokens=24, temperature=0.0)
    sequences = PackedSequences(generated, 32, 4)
    training_run = trainer(target, 150)
    before = training_run.model(training_run.initial())
    after, found = distillation.train(training_run, sequences, 150)
    assert found.shape == (150,)
    assert found[-20:].mean() < 0.6 * found[0]
    rates = [
        distillation.evaluate(target, draft, prompts[:6], new_tokens=16)
        for draft in (before, after)
    ]
    assert rates[1]["acceptance_rate"] > rates[0]["acceptance_rate"] + 0.1


def test_a_draft_equal_to_the_target_has_nothing_to_learn(target, packed):
    weights = {"forward-kl": 1.0}
    same = distillation.Trainer(target, OPTIMIZER, weights, target=target, dtype=jnp.float32)
    _, loss = same.step(same.initial(), packed[0])
    assert abs(float(loss)) < 1e-5


def dots(jaxpr):
    """All matrix products in a jaxpr and those that it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from dots(inner)


def test_masters_are_float32_and_arithmetic_is_not(target, packed):
    narrow = trainer(target, dtype=jnp.bfloat16)
    state = narrow.initial()
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(narrow._step)(state, narrow.target, packed[0]).jaxpr
    text = str(jaxpr)
    products = [line for line in text.splitlines() if "dot_general" in line and ":bf16" in line]
    assert len(products) > 10
    # Including the products of logits and of their gradients.
    kinds = {x.aval.dtype.name for eqn in dots(jaxpr) for x in eqn.invars if 60 in x.aval.shape}
    assert kinds == {"bfloat16"}
    state, loss = narrow.step(state, packed[0])
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    _, exact = (wide := trainer(target)).step(wide.initial(), packed[0])
    assert 0 < abs(float(loss) - float(exact)) < 0.1


@pytest.fixture(scope="module")
def whole_run(target, packed):
    """A trainer, which has no state, and the result of six steps."""
    compiled = trainer(target)
    return compiled, *distillation.train(compiled, packed, 6)


@pytest.mark.parametrize("killed_after", [1, 3, 4])
def test_an_interrupted_run_ends_with_the_same_bits(whole_run, packed, tmp_path, killed_after):
    class KilledError(Exception):
        pass

    class Until:
        def __getitem__(self, step):
            if step == killed_after:
                raise KilledError
            return packed[step]

    compiled, whole, expected = whole_run
    checkpoints = distillation.Checkpoints(str(tmp_path / "checkpoints"))
    with pytest.raises(KilledError):
        distillation.train(compiled, Until(), 6, checkpoints=checkpoints, every=2)
    checkpoints.close()
    checkpoints, steps = distillation.Checkpoints(tmp_path / "checkpoints"), []
    spied = SpiedSequences(packed, steps)
    model, found = distillation.train(compiled, spied, 6, checkpoints=checkpoints, every=2)
    checkpoints.close()
    assert steps == list(range(killed_after // 2 * 2, 6))
    if not REPRODUCIBLE:
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        return
    np.testing.assert_array_equal(found, expected)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


class SpiedSequences:
    def __init__(self, sequences, steps):
        self.sequences, self.steps = sequences, steps

    def __getitem__(self, step):
        self.steps.append(step)
        return self.sequences[step]


def test_other_vocabularies_and_missing_targets_are_rejected(target):
    other = make(OPTConfig(**{**vars(CONFIG), "vocab_size": 61}))
    start = functools.partial(distillation.Trainer, target, OPTIMIZER, {"forward-kl": 1.0})
    with pytest.raises(ValueError, match="vocabulary has 61 tokens, the draft's 60"):
        start(target=other)
    with pytest.raises(ValueError, match="need a target"):
        start(target=None)


# Evaluation


def test_continuations_are_those_of_the_target():
    target = make(SHALLOW)
    texts = documents(20, 7, 2, seed=4)
    lengths = (4, 3, 1)  # of excerpts, which are at most half of the text
    found = distillation.continuations(
        target, texts, 9, prompt_tokens=4, new_tokens=6, batch_size=2, temperature=0.0
    )
    assert len(found) == 9
    places = []
    for document in map(np.ndarray.tolist, found):
        (place,) = (
            (i, at)
            for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
            for at in range(len(text) - length)
            if document[:length] == text[at : at + length].tolist()
        )
        places.append(place)
        prompt, continuation = document[: lengths[place[0]]], document[lengths[place[0]] :]
        out = emsjax.generate(target, [prompt], max_new_tokens=6)
        assert continuation == out.tokens[0, : out.lengths[0]].tolist()
    for first in (0, 3, 6):  # each document once before any is used twice
        assert {i for i, _ in places[first : first + 3]} == {0, 1, 2}
    assert all(at == 0 for _, at in places[:3])
    assert any(at > 0 for _, at in places[3:])
    sampled = distillation.continuations(target, texts, 5, new_tokens=6, seed=1)
    again = distillation.continuations(target, texts, 5, new_tokens=6, seed=1)
    assert all(map(np.array_equal, sampled, again))


def test_a_perfect_draft_is_always_accepted():
    target = make(SHALLOW)
    found = distillation.evaluate(target, target, documents(4, 6, 5), new_tokens=11, batch_size=2)
    assert found["acceptance_rate"] == 1
    assert found["tokens_per_s"] > 0
    assert found["by_position"] == [1.0] * 4
    plain = distillation.evaluate(target, None, documents(4, 6, 5), new_tokens=11, batch_size=2)
    assert (plain["by_position"], plain["mean_acceptance_length"]) == ([], 1.0)


def test_ends_of_texts_do_not_count_at_any_position():
    prompts = [np.array([i, i + 1]) for i in range(2, 60, 8)]
    free = emsjax.generate(make(SHALLOW), prompts, max_new_tokens=20, eos_token_ids=())
    end = int(free.tokens[0, 9])
    ending = make(dataclasses.replace(SHALLOW, eos_token_id=end))
    out = emsjax.generate(ending, prompts, max_new_tokens=20)
    assert "eos" in out.finish_reasons
    assert distillation.evaluate(ending, ending, prompts, new_tokens=20)["by_position"] == [1.0] * 4


def test_drafts_longer_than_the_new_tokens_are_rejected(target):
    with pytest.raises(ValueError, match="draft_tokens must be below new_tokens 3, not 3"):
        distillation.evaluate(target, target, [[3]], draft_tokens=3, new_tokens=3)


def test_empty_inputs_are_rejected(target):
    with pytest.raises(ValueError, match="prompts must not be empty"):
        distillation.evaluate(target, None, [])
    with pytest.raises(ValueError, match="documents must not be empty"):
        distillation.continuations(target, [], 4)
    with pytest.raises(ValueError, match="documents must not be empty; None takes random tokens"):
        distillation.prune(target, 2, 16, documents=[])


def test_continuations_need_positions_and_may_be_none(target):
    assert distillation.continuations(target, documents(5), 0) == []
    positions = target.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"new_tokens must be below {positions}"):
        distillation.continuations(target, documents(5), 1, new_tokens=positions)


def test_acceptance_by_position_is_conditional():
    # Ten steps: two accepted nothing, three one token, one two, four three.
    assert acceptance_by_position(np.array([2, 3, 1, 4])) == [8 / 10, 5 / 8, 4 / 5]
    assert acceptance_by_position(np.array([3, 0, 0])) == [0.0, 0.0]


def test_a_batch_is_a_pytree_of_whole_sequences(packed):
    assert isinstance(packed[0], Batch)
    assert {x.shape for x in packed[0]} == {(2, 16)}
    assert {x.dtype for x in packed[0]} == {np.dtype(np.int32)}


def test_a_checkpoint_of_more_steps_is_rejected(whole_run, packed, tmp_path):
    compiled, *_ = whole_run
    checkpoints = distillation.Checkpoints(tmp_path)
    distillation.train(compiled, packed, 3, checkpoints=checkpoints)
    with pytest.raises(ValueError, match="steps must be at least 3, as in the checkpoint, not 2"):
        distillation.train(compiled, packed, 2, checkpoints=checkpoints)
    checkpoints.close()
