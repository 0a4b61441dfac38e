"""Distillation stops at numbers that are not finite, and neither saves nor measures them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import emsjax
from emsjax import distillation
from emsjax.distillation import NonFiniteError, losses
from emsjax.models.opt import OPTConfig

CONFIG = OPTConfig(
    vocab_size=60,
    hidden_size=16,
    ffn_dim=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    init_std=0.2,
    eos_token_id=2,
)
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(3, 60, length).astype(np.int32) for length in (5, 40, 17, 23, 9, 31)]
SEQUENCES = distillation.PackedSequences(DOCUMENTS, length=16, batch=2)
STEPS, EVERY = 9, 2


def make(seed=0):
    return emsjax.OPT(CONFIG, rngs=nnx.Rngs(seed), dtype=jnp.float32)


def poisoned(number=np.nan):
    model = make()
    kernel = model.layers[1].down_proj.kernel
    kernel[...] = kernel[...].at[0, 0].set(number)
    return model


def trainer(optimizer=None, target=None, weights=None):
    weights = weights or {"cross-entropy": 1.0}
    optimizer = optimizer or optax.sgd(1e-3)
    return distillation.Trainer(make(1), optimizer, weights, target=target, dtype="float32")


def exploding(after):
    """An optimizer whose parameters are finite up to step `after`, and infinite then."""
    return optax.sgd(lambda step: jnp.where(step < after, 1e-3, jnp.inf))


def train(run, folder, steps=STEPS):
    """The error of the training, and its newest checkpoint."""
    checkpoints = distillation.Checkpoints(folder)
    try:
        with pytest.raises(NonFiniteError) as raised:
            distillation.train(run, SEQUENCES, steps, checkpoints=checkpoints, every=EVERY)
        return str(raised.value), checkpoints.restore(run.initial())
    finally:
        checkpoints.close()


@pytest.mark.parametrize("after", [0, 1, 4, 5])
def test_training_stops_at_the_step_and_keeps_the_checkpoint_before_it(tmp_path, after):
    run = trainer(exploding(after))
    error, (step, state, kept) = train(run, tmp_path)
    bad = after + 1  # the step that makes the parameters infinite
    if bad % EVERY:  # the next loss tells
        assert error == f"the loss of step {bad + 1} or its gradient is not finite: nan"
    else:  # the parameters are looked at before they are saved
        assert error == f"the parameters after step {bad} are not finite"
    assert step == len(kept) == after // EVERY * EVERY
    assert all(np.isfinite(x).all() for x in [*jax.tree.leaves(state), kept])


def test_parameters_after_the_last_step_are_checked_too():
    with pytest.raises(NonFiniteError, match="parameters after step 3 are not finite"):
        distillation.train(trainer(exploding(2)), SEQUENCES, 3)


def test_a_loss_that_is_reported_stops_the_training_at_once(monkeypatch):
    monkeypatch.setattr("emsjax.distillation.checkpoints.REPORT_SECONDS", -1.0)
    said = []
    with pytest.raises(NonFiniteError, match="the loss of step 4 or"):
        distillation.train(trainer(exploding(2)), SEQUENCES, 1000, say=said.append)
    assert len(said) == 3
    assert not any("nan" in line for line in said)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_target_that_is_not_finite_is_noticed_in_the_first_step(tmp_path, number):
    run = trainer(target=poisoned(number), weights={"forward-kl": 1.0})
    error, (step, *_) = train(run, tmp_path)
    assert error == "the loss of step 1 or its gradient is not finite: nan"
    assert step == 0


def test_a_gradient_that_is_not_finite_counts_as_a_loss_that_is_not(monkeypatch):
    def root(logits, labels, target_logits):
        return jnp.sqrt(0 * jnp.sum(jnp.abs(logits), axis=1))

    monkeypatch.setitem(losses.LOSSES, "cross-entropy", root)
    with pytest.raises(NonFiniteError, match="the loss of step 1 or its gradient"):
        distillation.train(trainer(), SEQUENCES, 2)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("width", [8, 16])
def test_a_target_that_is_not_finite_is_not_pruned(number, width):
    with pytest.raises(NonFiniteError, match="the target's parameters are not finite"):
        distillation.prune(poisoned(number), layers=1, width=width, documents=DOCUMENTS)


def test_a_target_whose_hidden_states_are_not_finite_is_not_pruned():
    model = make()
    kernel = model.layers[0].up_proj.kernel
    kernel[...] = kernel[...] * 1e38
    with pytest.raises(NonFiniteError, match="the target's hidden states are not finite"):
        distillation.prune(model, layers=2, width=8, documents=DOCUMENTS)


def test_a_target_that_is_not_finite_has_no_continuations_and_is_not_measured():
    error = "the target's logits are not finite for 3 of 3"
    with pytest.raises(NonFiniteError, match=rf"{error} excerpts; the first is excerpts\[0\]"):
        distillation.continuations(poisoned(), DOCUMENTS, 3, new_tokens=4)
    prompts = [document[:5] for document in DOCUMENTS[:3]]
    for draft in (None, make(1)):
        with pytest.raises(NonFiniteError, match=rf"{error} prompts; the first is prompts\[0\]"):
            distillation.evaluate(poisoned(), draft, prompts, draft_tokens=2, new_tokens=4)


def test_a_draft_model_that_is_not_finite_is_not_measured():
    with pytest.raises(NonFiniteError, match="the draft model's parameters are not finite"):
        distillation.evaluate(make(), poisoned(), [[3, 4]], draft_tokens=2, new_tokens=4)
