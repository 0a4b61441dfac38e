"""Errors for invalid draft-length policies of users."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model

import emsjax
from emsjax.policies.costs import StepCosts

NEW = 8
PROMPTS = ragged_prompts([5, 9])
LOOKUP = emsjax.PromptLookup(match_length=1)
COSTS = StepCosts.of({16: 4.0, 128: 5.0})


class Plain:
    """A policy that drafts two tokens in each step. It is not registered as a pytree."""

    def init(self, batch, max_draft_tokens):
        return ()

    def lengths(self, state, view):
        return jnp.full(view.active.shape, 2, jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Halving(Plain):
    """A policy that changes the lengths or their type."""

    change: str = "halves"

    def lengths(self, state, view):
        kinds = {
            "halves": lambda n: n / 2,
            "rows": lambda n: n[:, None],
            "bytes": lambda n: n.astype(jnp.int8),
            "one": lambda n: n[0],
            "a number": lambda n: 2,
        }
        return kinds[self.change](super().lengths(state, view))


@jax.tree_util.register_static
class Forgotten:
    init, lengths = Plain.init, Plain.lengths


INVALID_POLICIES = {
    "a number": (3, r"such as emsjax\.FixedLength\(3\), not int$"),
    "a name": ("goodput", "not str$"),
    "a class": (emsjax.BassHeuristic, "not the class BassHeuristic$"),
    "without a method": (Forgotten(), "not Forgotten, which has no update$"),
    "unregistered": (Plain(), "pytree, and Plain is not: .*register_static.*register_dataclass"),
}


@pytest.mark.parametrize("drafter", [None, LOOKUP], ids=["plain", "lookup"])
@pytest.mark.parametrize(("policy", "message"), INVALID_POLICIES.values(), ids=INVALID_POLICIES)
def test_an_object_that_is_not_a_policy_is_rejected_before_any_work(policy, message, drafter):
    for prompts in (PROMPTS, iter(PROMPTS)):
        with pytest.raises(ValueError, match=f"^draft_length must be a .*{message}"):
            emsjax.stream(shallow_model(), prompts, drafter, policy, NEW, batch_size=1)
    with pytest.raises(ValueError, match=f"^draft_length must be a .*{message}"):
        emsjax.generate(shallow_model(), PROMPTS, drafter, policy, max_new_tokens=NEW)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    ("change", "got"), [("halves", r"float32\[2\]"), ("rows", r"int32\[2, 1\]")]
)
def test_lengths_that_are_not_one_integer_per_sample_are_rejected(change, got, capped):
    policy = Halving(change)
    if capped:
        policy = emsjax.CostCapped(policy, COSTS)
    message = rf"Halving\.lengths must return integers \[b\] = \(2,\), not {got}"
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), PROMPTS, LOOKUP, policy, max_new_tokens=NEW)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Counting(Plain):
    """A policy whose state changes from an integer to a fraction."""

    def init(self, batch, max_draft_tokens):
        return jnp.zeros(batch, jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return (state + num_accepted) / 2


@pytest.mark.parametrize("capped", [False, True])
def test_an_update_that_changes_the_type_of_the_state_is_rejected(capped):
    policy = emsjax.CostCapped(Counting(), COSTS) if capped else Counting()
    rule = "the policy's state must keep its structure, shapes and types: update returned"
    with pytest.raises(ValueError, match=rf"^{rule} float32\[2\] instead of int32\[2\]"):
        emsjax.generate(shallow_model(), PROMPTS, LOOKUP, policy, max_new_tokens=NEW)


@pytest.mark.parametrize("change", ["bytes", "one", "a number"])
def test_lengths_may_be_integers_of_any_type(change):
    plain = emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=NEW)
    out = emsjax.generate(shallow_model(), PROMPTS, LOOKUP, Halving(change), max_new_tokens=NEW)
    np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("profile", ["profile.json", Path("profile.json"), {"costs": {}}])
def test_a_profile_instead_of_costs_is_rejected_when_the_policy_is_created(profile):
    with pytest.raises(ValueError, match=r"^costs must be StepCosts.*Goodput\.from_profile"):
        emsjax.Goodput(profile)
    with pytest.raises(ValueError, match=r"^costs must be StepCosts.*StepCosts\.from_profile"):
        emsjax.CostCapped(emsjax.FixedLength(2), profile)
