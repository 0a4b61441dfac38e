"""Training of drafters that read the target's hidden states."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from feature_drafters import hidden_states, llama_target, padded
from flax import nnx
from toy import VOCAB
from transformers import AutoTokenizer

import emsjax
from emsjax import distillation
from emsjax.decode.base import ObservedRows
from emsjax.demo import DRAFT
from emsjax.distillation import BlockStudent, Eagle3Student, PackedSequences
from emsjax.distillation.block import Anchors
from emsjax.distillation.fresh import frequent_tokens
from emsjax.distillation.passes import forward_with_taps
from emsjax.distillation.sequences import Batch

WEIGHTS = {"forward-kl": 0.9, "cross-entropy": 0.1}
RNG = np.random.default_rng(0)
# The tokens 3 to 12 are frequent, and the last ones do not occur.
DOCUMENTS = [
    np.where(RNG.random(n) < 0.5, RNG.integers(3, 13, n), RNG.integers(3, 58, n)).astype(np.int32)
    for n in (5, 40, 17, 23, 9, 31)
]
BLOCK = {"block_size": 4, "layers": 2}
KINDS = {
    "eagle3": lambda target, **options: Eagle3Student.fresh(
        target, DOCUMENTS, unroll=3, draft_vocab_size=25, **options
    ),
    "dflash": lambda target, **options: BlockStudent.fresh(target, DOCUMENTS, **BLOCK, **options),
    "dspark": lambda target, **options: BlockStudent.fresh(
        target,
        DOCUMENTS,
        **BLOCK,
        markov_rank=6,
        markov_head_type="rnn",
        enable_confidence_head=True,
        draft_vocab_size=25,
        **options,
    ),
}


@functools.cache
def student_of(kind):
    """A student whose random weights are large enough for every part to matter."""
    student = KINDS[kind](llama_target(), taps=(1, 3), seed=4)
    for path, value in nnx.to_flat_state(nnx.state(student.module)):
        if path[-1] == "kernel":
            value[...] = 5 * value[...]
    return student


def trainer_of(kind, devices=None):
    optimizer = distillation.make_optimizer(40, 1e-2, warm_up=2, weight_decay=0.1)
    options = {"target": llama_target(), "dtype": "float32", "devices": devices}
    return distillation.Trainer(student_of(kind), optimizer, WEIGHTS, **options)


@functools.cache
def shared_trainer(kind):
    """Trainers have no state, and compile once."""
    return trainer_of(kind, jax.devices()[:1])


def batch_of(*texts):
    """One sequence of these texts as segments."""
    number = lambda i, text: np.full(len(text), i)
    parts = (
        texts,
        [number(i, text) for i, text in enumerate(texts)],
        [np.arange(len(text)) for text in texts],
    )
    return Batch(*(jnp.asarray(np.concatenate(part)[None], jnp.int32) for part in parts))


# Training is the same network as drafting


def drafted(drafter, prompts):
    """The drafts behind prompts, and the probabilities that they were drawn from."""
    target, taps = llama_target(), drafter.taps
    lengths = np.array([len(prompt) for prompt in prompts])
    states = [hidden_states(target, padded(prompt), taps) for prompt in prompts]
    seen = lengths - 1
    samples = np.repeat(np.arange(len(prompts)), seen)
    as_ids = lambda ids: jnp.asarray(np.concatenate(ids), jnp.int32)
    rows = ObservedRows(
        as_ids([prompt[:-1] for prompt in prompts]),
        jnp.asarray(samples, jnp.int32),
        as_ids([np.arange(n) for n in seen]),
    )
    read = [
        jnp.asarray(np.concatenate([state[i][:n] for state, n in zip(states, seen, strict=True)]))
        for i in range(len(taps))
    ]
    tokens = jnp.asarray(np.stack([padded(prompt) for prompt in prompts]), jnp.int32)
    count = jnp.asarray(lengths, jnp.int32)

    @jax.jit
    def propose(drafter, rows, read, tokens, count):
        state = drafter.observe(drafter.init(tokens, count, 64), rows, tuple(read))
        wanted = jnp.full_like(count, drafter.max_draft_tokens)
        keys = jax.random.split(jax.random.key(1), len(prompts))
        sampling = emsjax.Sampling(temperature=1.0).expand(len(prompts))
        return drafter.propose(state, tokens, count, wanted, keys, sampling)[0]

    read = [x.astype(jnp.float32) for x in read]
    draft = propose(drafter, rows, read, tokens, count)
    return np.asarray(draft.tokens), np.asarray(draft.probs)


PROMPTS = [DOCUMENTS[3], DOCUMENTS[1][:7], DOCUMENTS[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_the_logits_of_drafting(kind):
    """The texts are prompts with their own drafts, and more behind them, packed side by side."""
    student = student_of(kind)
    drafter = student.drafter(student.module, llama_target(), 3)
    tokens, expected = drafted(drafter, PROMPTS)
    texts = [[*p, *d, 5, 9, 7] for p, d in zip(PROMPTS, tokens, strict=True)]
    batch = batch_of(*texts)
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    ends = starts + [len(prompt) for prompt in PROMPTS]  # behind each prompt
    _, taps = forward_with_taps(llama_target(), batch, drafter.taps)
    if kind == "eagle3":
        hidden = jnp.stack(student.outputs(drafter, taps, batch), axis=2)[:, ends - 2]
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
    else:
        anchors = jnp.asarray(ends[None] - 1, jnp.int32)
        hidden = student.outputs(drafter, taps, batch, Anchors(anchors, anchors >= 0))[:, :, :3]
    before = jnp.asarray(
        [
            [
                [text[n - 1 + i] for i in range(3)]
                for text, n in zip(texts, map(len, PROMPTS), strict=True)
            ]
        ],
        jnp.int32,
    )
    logits, _ = student.head(drafter, hidden, before)
    found = np.asarray(jax.nn.log_softmax(logits)).reshape(len(PROMPTS), 3, -1)
    ids = np.arange(VOCAB) if drafter.draft_ids is None else np.asarray(drafter.draft_ids)
    np.testing.assert_allclose(found, np.log(expected[:, :, ids]), atol=2e-4)
    assert found.std(axis=(0, 1)).max() > 0.1  # places and steps differ


# The loss


def loss_by_place(student, batch, key):
    """The mean loss of a batch, from each draft's own logits."""
    target, drafter = llama_target(), student.drafter(student.module, llama_target())
    ids = np.arange(VOCAB) if student.draft_ids is None else np.asarray(student.draft_ids)
    tokens, segments, _ = map(np.asarray, batch)
    count, length = tokens.shape
    final, taps = forward_with_taps(target, batch, drafter.taps)
    of_target = np.asarray(target.logits(final.reshape(-1, final.shape[-1])), np.float64)
    of_target = of_target.reshape(count, length, -1)
    if isinstance(student, Eagle3Student):
        # The first draft from place p follows the token behind it.
        hidden = jnp.stack(jax.jit(student.outputs)(drafter, taps, batch), axis=2)
        origins = np.tile(np.arange(length), (count, 1))
        follows = origins + 1
    else:
        anchors = student.draw(batch, key)
        hidden = jax.jit(student.outputs)(drafter, taps, batch, anchors)
        follows = origins = np.asarray(anchors.places)
    at = follows[:, :, None] + np.arange(hidden.shape[2])  # the tokens that drafts follow
    before = tokens[np.arange(count)[:, None, None], np.minimum(at, length - 1)]
    logits, log_odds = jax.jit(student.head)(drafter, hidden, jnp.asarray(before))
    logits = np.asarray(logits, np.float64).reshape(*at.shape, -1)
    total = weights = 0.0
    for s, i in np.ndindex(at.shape[:2]):
        for step, place in enumerate(at[s, i]):
            if place + 1 >= length or segments[s, place + 1] != segments[s, origins[s, i]]:
                break
            label = tokens[s, place + 1]
            if label not in ids:
                break
            log_q = logits[s, i, step] - np.logaddexp.reduce(logits[s, i, step])
            log_p = of_target[s, place] - np.logaddexp.reduce(of_target[s, place])
            known = log_p[ids] - np.logaddexp.reduce(log_p[ids])
            loss = 0.9 * (np.exp(known) * (known - log_q)).sum() - 0.1 * log_q[ids == label][0]
            if log_odds is not None:
                accepted = np.minimum(np.exp(log_p[ids]), np.exp(log_q)).sum()
                sure = 1 / (
                    1 + np.exp(-np.asarray(log_odds, np.float64).reshape(at.shape)[s, i, step])
                )
                loss -= accepted * np.log(sure) + (1 - accepted) * np.log(1 - sure)
            total += 0.8**step * loss
            weights += 0.8**step
    return total / weights, weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_a_weighted_mean_over_drafts_within_texts(kind):
    student = student_of(kind)
    batch = jax.tree.map(jnp.asarray, PackedSequences(DOCUMENTS, 16, 2)[0])
    assert batch.segment_ids.any()
    key = jax.random.key(3)
    with jax.numpy_dtype_promotion("standard"):
        expected, weights = loss_by_place(student, batch, key)
        loss = jax.jit(functools.partial(student.loss, WEIGHTS))
        found = loss(student.module, llama_target(), batch, key)
    assert weights > 10
    assert float(found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient_and_the_target_has_none(kind):
    student, target = student_of(kind), llama_target()
    batch = jax.tree.map(jnp.asarray, PackedSequences(DOCUMENTS, 16, 2)[0])
    graphs, states = zip(*map(nnx.split, (student.module, target)), strict=True)

    def loss(*states):
        merged = map(nnx.merge, graphs, states)
        return student.loss(WEIGHTS, *merged, batch, jax.random.key(0))

    with jax.numpy_dtype_promotion("standard"):
        of_module, of_target = jax.jit(jax.grad(loss, argnums=(0, 1)))(*states)
    for path, value in nnx.to_flat_state(of_module):
        assert np.abs(value[...]).max() > 0, path
    assert not any(np.any(x) for x in jax.tree.leaves(of_target))


def test_anchors_are_different_places_that_text_follows_and_change_with_the_key():
    student = student_of("dflash")
    batch = PackedSequences(DOCUMENTS, 16, 2)[0]
    first, again, other = (student.draw(batch, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first.places, again.places)
    assert not np.array_equal(first.places, other.places)
    assert first.places.shape == (2, 16 // 4)
    assert np.all(first.valid)
    for places, segments in zip(np.asarray(first.places), batch.segment_ids, strict=True):
        assert len(set(places)) == len(places)
        assert np.all(segments[places] == segments[places + 1])


def test_the_most_frequent_tokens_can_be_drafted():
    counts = np.bincount(np.concatenate(DOCUMENTS), minlength=VOCAB)
    ids = frequent_tokens(DOCUMENTS, 20, VOCAB)
    assert np.all(np.diff(ids) > 0)
    assert counts[ids].min() >= np.delete(counts, ids).max()
    assert set(ids) > set(range(3, 13))
    student = student_of("dspark")
    assert student.module.config.mask_token_id == VOCAB - 1  # it does not occur
    np.testing.assert_array_equal(student.draft_ids, frequent_tokens(DOCUMENTS, 25, VOCAB))


# The loop


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_an_interrupted_run_ends_with_the_same_bits(kind, tmp_path):
    class KilledError(Exception):
        pass

    class Until:
        def __getitem__(self, step):
            if step == 3:
                raise KilledError
            return packed[step]

    packed, trainer = PackedSequences(DOCUMENTS, 16, 2), shared_trainer(kind)
    whole, expected = distillation.train(trainer, packed, 5)
    folder = tmp_path / "checkpoints"
    for sequences in (Until(), packed):
        checkpoints = distillation.Checkpoints(folder)
        try:
            options = {"checkpoints": checkpoints, "every": 2}
            module, found = distillation.train(trainer, sequences, 5, **options)
        except KilledError:
            pass
        finally:
            checkpoints.close()
    np.testing.assert_array_equal(found, expected)
    for one, other in zip(jax.tree.leaves(module), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_step_draws_other_anchors():
    trainer, batch = shared_trainer("dspark"), PackedSequences(DOCUMENTS, 16, 2)[0]
    states = [dataclasses.replace(trainer.initial(), step=jnp.int32(n)) for n in (0, 0, 1)]
    first, again, other = (float(trainer.step(state, batch)[1]) for state in states)
    assert first == again != other


DATA_PARALLEL = """
import jax
from test_distillation_features import DOCUMENTS, PackedSequences, trainer_of, distillation
for kind in ("eagle3", "dspark"):
    trainer = trainer_of(kind, jax.devices())
    assert trainer.devices == 2
    print(distillation.train(trainer, PackedSequences(DOCUMENTS, 16, 2), 3)[1].tolist())
"""


def test_two_devices_train_as_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    folder = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(folder.parent), str(folder)]),
    }
    command = [sys.executable, "-c", DATA_PARALLEL]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for kind, losses in zip(("eagle3", "dspark"), found.stdout.splitlines(), strict=True):
        packed = PackedSequences(DOCUMENTS, 16, 2)
        _, expected = distillation.train(shared_trainer(kind), packed, 3)
        np.testing.assert_allclose(json.loads(losses), expected, rtol=1e-4)


@functools.cache
def embedded_model():
    """The smaller embedded model, and its continuations of four texts."""
    target = emsjax.from_pretrained(DRAFT, dtype="float32")
    texts = ["import os", "for name in names:", "def __init__(self", "class Error(Exception):"]
    texts = AutoTokenizer.from_pretrained(DRAFT)(texts).input_ids
    options = {"new_tokens": 24, "temperature": 0.0}
    return target, distillation.continuations(target, texts, 4, **options)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_training_raises_the_acceptance_rate(kind, tmp_path):
    """The saved folder is as good, and decodes losslessly."""
    target, documents = embedded_model()
    prompts = [document[:-24] for document in documents]
    make, settings = Eagle3Student, {"unroll": 2}
    if kind == "dspark":
        make, settings = BlockStudent, {"block_size": 3, "markov_rank": 16, "layers": 1}
    student = make.fresh(target, documents, draft_vocab_size=40, **settings)
    optimizer = distillation.make_optimizer(100, 3e-3, warm_up=2, weight_decay=0.1)
    trainer = distillation.Trainer(student, optimizer, WEIGHTS, target=target, dtype="float32")
    module, losses = distillation.train(trainer, PackedSequences(documents, 24, 2), 100)
    assert losses[-5:].mean() < 0.5 * losses[:2].mean()
    student.save(student.drafter(module, target), tmp_path)
    load = emsjax.Eagle3 if kind == "eagle3" else emsjax.BlockDrafter
    loaded = load.from_pretrained(tmp_path, target, max_draft_tokens=3)
    np.testing.assert_array_equal(loaded.draft_ids, student.draft_ids)
    evaluate = functools.partial(distillation.evaluate, target, prompts=prompts, new_tokens=16)
    before, after = (
        evaluate(draft) for draft in (student.drafter(student.module, target, 3), loaded)
    )
    assert after["acceptance_rate"] > before["acceptance_rate"] + 0.3
    assert len(after["by_position"]) == 3
    out = emsjax.generate(target, prompts, loaded, max_new_tokens=16)
    plain = emsjax.generate(target, prompts, max_new_tokens=16)
    np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.parametrize(
    ("make", "options", "error"),
    [
        (Eagle3Student, {"taps": (4,)}, r"taps must lie in 0..3 for this model, not 4"),
        (Eagle3Student, {"draft_vocab_size": 62}, "at most 61, the target's vocabulary, not 62"),
        (Eagle3Student, {"unroll": 0}, "unroll must be at least 1, not 0"),
        (Eagle3Student, {"decay": 1.5}, "decay must be above 0 and at most 1, not 1.5"),
        (BlockStudent, {"anchors": 0}, "anchors must be at least 1, not 0"),
        (BlockStudent, {"layers": 0}, "layers must be at least 1, not 0"),
        (BlockStudent, {"block_size": 1}, "block_size"),
    ],
)
def test_wrong_arguments_are_named(make, options, error):
    with pytest.raises(ValueError, match=error):
        make.fresh(llama_target(), DOCUMENTS, **options)


def test_targets_that_do_not_fit_are_named():
    student = KINDS["dflash"](llama_target())
    start = functools.partial(distillation.Trainer, student, None, WEIGHTS)
    with pytest.raises(ValueError, match="needs a target"):
        start(target=None)
    other = emsjax.LlamaConfig(
        vocab_size=VOCAB + 1,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    wider = emsjax.Decoder(other, rngs=nnx.Rngs(0), dtype=jnp.float32)
    with pytest.raises(ValueError, match="vocabulary of 61 ids, and the target has 62"):
        start(target=wider)


def test_a_shared_head_is_neither_trained_nor_saved(tmp_path):
    target = llama_target()
    student = Eagle3Student.fresh(target, DOCUMENTS, unroll=2, share_head=True)
    assert student.module.lm_head is None
    assert student.draft_ids is None
    optimizer = distillation.make_optimizer(40, 1e-2, warm_up=2, weight_decay=0.1)
    options = {"target": target, "dtype": "float32", "devices": jax.devices()[:1]}
    trainer = distillation.Trainer(student, optimizer, WEIGHTS, **options)
    packed = PackedSequences(DOCUMENTS, 16, 2)
    module, losses = distillation.train(trainer, [packed[0]] * 8, 8)
    assert losses[-1] < losses[0]
    drafter = student.drafter(module, target)
    student.save(drafter, tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t"} & set(stored)
    again = emsjax.Eagle3.from_pretrained(tmp_path, target)
    assert jax.tree.structure(again) == jax.tree.structure(drafter)
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again, drafter))
    pointer = lambda array: array.unsafe_buffer_pointer()
    assert pointer(again.head) == pointer(target.lm_head.embedding[...])
    with pytest.raises(ValueError, match="no embeddings and head of its own: give target"):
        emsjax.Eagle3.from_pretrained(tmp_path)


def test_a_head_that_cannot_be_shared_is_an_error():
    target = llama_target()
    with pytest.raises(ValueError, match=r"share_head needs all 61 tokens .* is 25"):
        Eagle3Student.fresh(target, DOCUMENTS, share_head=True, draft_vocab_size=25)
    capped = dataclasses.replace(target.architecture, logit_cap=30.0)
    capped = SimpleNamespace(architecture=capped, parallel=None)
    with pytest.raises(ValueError, match=r"share_head needs a target .* nor caps"):
        Eagle3Student.fresh(capped, DOCUMENTS, share_head=True)
