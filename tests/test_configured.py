"""The library sets what it needs of JAX for itself, and leaves the user's settings as they are."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model

import emsjax
from emsjax import distillation
from emsjax.cli.main import main
from emsjax.configured import NEEDED
from emsjax.demo import DRAFT
from emsjax.testing import assert_lossless, assert_same_distribution

PROMPTS, NEW = ragged_prompts([5, 9, 3]), 6
LOOKUP = emsjax.PromptLookup(match_length=1)


def other_settings():
    """What users set: all of it at once, so that each entry is compiled once."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.default_prng_impl("rbg"))
    stack.enter_context(jax.numpy_rank_promotion("raise"))
    stack.enter_context(jax.debug_key_reuse(True))
    return stack


def told():
    return {name: getattr(jax.config, name) for name in NEEDED}


def generated():
    return emsjax.generate(shallow_model(), PROMPTS, LOOKUP, max_new_tokens=NEW).tokens


def streamed(prompts=PROMPTS, **options):
    found = emsjax.stream(
        shallow_model(), prompts, LOOKUP, max_new_tokens=NEW, batch_size=2, **options
    )
    return in_order(found)


def in_order(completions):
    tokens = {}
    for completion in completions:
        tokens[completion.prompt] = completion.tokens
        settings_seen.append(told())  # of the consumer's own code
    return np.stack([tokens[place] for place in sorted(tokens)])


settings_seen: list[dict] = []


def of_engine():
    engine = emsjax.Engine(shallow_model(), LOOKUP, batch_size=2)
    first = in_order(engine.stream(PROMPTS, max_new_tokens=NEW))
    np.testing.assert_array_equal(in_order(engine.stream(iter(PROMPTS), max_new_tokens=NEW)), first)
    return first


def stepped(jit):
    model = shallow_model()
    state = emsjax.init_state(model, LOOKUP, PROMPTS, max_new_tokens=NEW)
    step = lambda model, drafter, state: emsjax.step(model, drafter, state)[0]
    step = jax.jit(step) if jit else step
    while bool(state.active.any()):
        state = step(model, LOOKUP, state)
    rows = zip(np.asarray(state.tokens), np.asarray(state.prompt_lengths), strict=True)
    return np.stack([tokens[start : start + NEW] for tokens, start in rows])


def of_vanilla():
    return emsjax.vanilla.generate(shallow_model(), PROMPTS, LOOKUP, max_new_tokens=NEW).tokens


DECODED = {
    "generate": generated,
    "stream": streamed,
    "stream of an iterator": lambda: streamed(iter(PROMPTS)),
    "stream on devices": lambda: streamed(devices=jax.local_devices()[:1]),
    "engine": of_engine,
    "step": lambda: stepped(jit=False),
    "step in jit": lambda: stepped(jit=True),
    "vanilla": of_vanilla,
    "assert_lossless": lambda: (
        assert_lossless(shallow_model(), LOOKUP, PROMPTS, max_new_tokens=NEW).output.tokens
    ),
}


@pytest.fixture(scope="module")
def expected():
    return generated()


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("decode", DECODED.values(), ids=DECODED)
def test_decoding_is_the_same_under_any_settings_of_jax(decode, expected):
    with other_settings():
        settings_seen.clear()
        before = told()
        np.testing.assert_array_equal(decode(), expected)
        assert told() == before
        assert all(seen == before for seen in settings_seen)


def test_an_unread_stream_outlives_the_settings_it_was_made_under(expected):
    with jax.enable_x64(True):
        unread = emsjax.stream(shallow_model(), PROMPTS, LOOKUP, max_new_tokens=NEW, batch_size=2)
    np.testing.assert_array_equal(in_order(unread), expected)


def test_sampling_is_the_same_under_any_settings_of_jax():
    options = {"max_new_tokens": NEW, "sampling": emsjax.Sampling(0.9, 20, 0.9)}
    options |= {"key": jax.random.key(3), "num_sequences": 2}
    drafter = emsjax.DraftModel(shallow_model(ffn_dim=32), 3)
    plain = emsjax.generate(shallow_model(), PROMPTS, drafter, **options)
    with other_settings():
        again = emsjax.generate(shallow_model(), PROMPTS, drafter, **options)
    np.testing.assert_array_equal(again.tokens, plain.tokens)


def test_the_distribution_is_checked_under_any_settings_of_jax():
    model = shallow_model(vocab_size=8)
    drafter = emsjax.DraftModel(shallow_model(vocab_size=8, ffn_dim=32), 2)
    options = {"sampling": emsjax.Sampling(1.0), "key": jax.random.key(0), "samples": 256}
    with other_settings():
        out = assert_same_distribution(model, drafter, [3, 5], **options)
    assert out.tokens.shape == (256, 3)


def test_a_closed_stream_restores_the_settings():
    with other_settings():
        before = told()
        found = emsjax.stream(shallow_model(), PROMPTS, max_new_tokens=NEW, batch_size=2)
        next(found)
        found.close()
        assert told() == before


def test_distillation_is_the_same_under_any_settings_of_jax():
    target = shallow_model()
    documents = ragged_prompts([40] * 4, seed=3)

    def distilled():
        draft = distillation.prune(target, 1, 16, documents=documents)
        texts = distillation.continuations(target, documents, 2, new_tokens=4, batch_size=2)
        optimizer = distillation.make_optimizer(2, 1e-3, warm_up=1, weight_decay=0.1)
        losses = {"forward-kl": 1.0, "cross-entropy": 0.5}
        trainer = distillation.Trainer(
            draft, optimizer, losses, target=target, dtype=jnp.float32, devices=jax.devices()[:1]
        )
        sequences = distillation.PackedSequences(documents + texts, 16, 2)
        model, losses = distillation.train(trainer, sequences, 2)
        prompts = [document[:5] for document in documents[:2]]
        options = {"draft_tokens": 2, "new_tokens": 4, "batch_size": 2}
        found = distillation.evaluate(target, model, prompts, **options)
        return losses.tolist(), found["acceptance_rate"], [text.tolist() for text in texts]

    plain = distilled()
    with other_settings():
        assert distilled() == plain


ENVIRONMENT = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEBUG_KEY_REUSE": "1",
}


def test_a_command_is_the_same_under_any_settings_in_the_environment(tmp_path, monkeypatch):
    """As a process with these settings, and without them in this one."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"id": 1, "prompt": "def f(x):"}\n')
    arguments = ["generate", "--model", str(DRAFT), "--input", "in.jsonl", "--temperature", "0.8"]
    arguments += ["--max-new-tokens", "8", "--drafter", "prompt-lookup", "--batch-size", "1"]
    assert main([*arguments, "--output", "plain.jsonl"]) == 0
    run = subprocess.run(
        [sys.executable, "-m", "emsjax", *arguments, "--output", "other.jsonl"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert Path("plain.jsonl").read_text() == Path("other.jsonl").read_text()
