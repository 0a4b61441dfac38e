"""Errors for invalid drafters of users name what is wrong, with shapes and types."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model, tiny_model

import emsjax
from emsjax.drafters.replay import Replay

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # as for users
NEW = 8
PROMPTS = ragged_prompts([5, 9])
SAMPLED = {"sampling": emsjax.Sampling(0.9), "key": jax.random.key(0)}


class Own:
    """A drafter without `commit` that repeats the last token."""

    max_draft_tokens = 3

    def init(self, prompts, prompt_lengths, max_len):
        return {"steps": jnp.zeros((), jnp.int32)}

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        return self.made(jnp.repeat(last, 3, axis=1), draft_lengths, state)

    def made(self, tokens, counts, state):
        return emsjax.Draft(tokens, counts), state


def own(made=None, commit=None):
    """An `Own` with `made` or `commit` replaced."""
    drafter = Own()
    if made is not None:
        drafter.made = made
    if commit is not None:
        drafter.commit = commit
    return drafter


def made_of(change):
    return lambda tokens, counts, state: (change(tokens, counts), state)


probs_of = lambda *shape: jnp.ones(shape, jnp.float32)
BAD_DRAFTS = {
    "too wide": (lambda t, n: emsjax.Draft(t[:, [0, 1, 2, 2]], n), r"tokens .*\(2, 3\).*\[2, 4\]"),
    "too narrow": (lambda t, n: emsjax.Draft(t[:, :2], n), r"tokens .*\(2, 3\).*int32\[2, 2\]"),
    "floats": (lambda t, n: emsjax.Draft(t.astype(float), n), r"tokens .*integers.*got float32"),
    "a list": (lambda t, n: emsjax.Draft([1, 2], n), "tokens .*got list"),
    "one count": (lambda t, n: emsjax.Draft(t, n[0]), r"counts .*integers \[b\] = \(2,\).*\[\]"),
    "float counts": (lambda t, n: emsjax.Draft(t, n / 2), "counts .*got float32"),
    "masks": (lambda t, n: emsjax.Draft(t, n > 0), "counts .*got bool"),
    "integer probs": (lambda t, n: emsjax.Draft(t, n, t[..., None]), "probs .*floating"),
    "flat probs": (lambda t, n: emsjax.Draft(t, n, probs_of(2, 3)), r"probs .*\(2, 3, 61\)"),
    "ids too many": (lambda t, n: emsjax.Draft(t, n, probs_of(2, 3, 62)), r"probs .*\[2, 3, 62\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD_DRAFTS.values(), ids=BAD_DRAFTS)
def test_a_draft_of_the_wrong_shape_or_type_is_rejected(change, message):
    with pytest.raises(ValueError, match=rf"Draft\.{message}"):
        emsjax.generate(
            shallow_model(), PROMPTS, own(made_of(change)), max_new_tokens=NEW, **SAMPLED
        )


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda t, n, state: None, "NoneType"),
        (lambda t, n, state: emsjax.Draft(t, n), "Draft"),
        (lambda t, n, state: (t, n), r"\(array, array\)"),
        (lambda t, n, state: (t, n, state), r"\(array, array, dict\)"),
    ],
    ids=["nothing", "no state", "arrays", "three"],
)
def test_a_result_that_is_not_a_pair_of_draft_and_state_is_rejected(returned, kind):
    with pytest.raises(ValueError, match=rf"must return a pair \(Draft, state\), not {kind}(\n|$)"):
        emsjax.generate(shallow_model(), PROMPTS, own(returned), max_new_tokens=NEW)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32"])
def test_drafts_may_be_integers_of_any_type(dtype):
    plain = emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=NEW)
    change = lambda t, n: emsjax.Draft(t.astype(dtype), n.astype(dtype))
    drafter = own(made_of(change))
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.num_drafted.sum() > 0


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_negative_count_means_no_draft_tokens(batch_size):
    plain = emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=NEW)
    drafter = own(made_of(lambda t, n: emsjax.Draft(t, jnp.full_like(n, -5))))
    options = {"max_new_tokens": NEW, "batch_size": batch_size}
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.num_drafted.tolist() == [0, 0]


CHANGES = {
    "shape": (lambda s: {"steps": jnp.zeros(2, jnp.int32)}, r"int32\[2\] instead of int32\[\] at"),
    "type": (lambda s: {"steps": s["steps"] / 2}, r"float32\[\] instead of int32\[\] at"),
    "structure": (lambda s: {**s, "more": s["steps"]}, r"'more'.* instead of .*'steps'"),
    "forgotten": (lambda s: None, r"None.* instead of"),
}


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("method", ["propose", "commit", "observe", "admit"])
def test_the_error_for_a_changed_state_names_the_method(method, change, message, batch_size):
    if method == "propose":
        drafter = own(lambda tokens, counts, state: (emsjax.Draft(tokens, counts), change(state)))
    else:
        drafter = Own()
        setattr(drafter, method, lambda state, *rest: change(state))
        drafter.taps = (0,) if method == "observe" else ()
    if method == "admit":
        batch_size = 1  # only refilled slots admit sequences
    rule = "the drafter's state must keep its structure, shapes and types"
    options = {"max_new_tokens": NEW, "batch_size": batch_size}
    with pytest.raises(ValueError, match=f"^{rule}: {method} returned .*{message}"):
        emsjax.generate(shallow_model(), PROMPTS, drafter, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DataLimit(Own):
    max_draft_tokens: int = 3


def test_a_limit_that_is_a_data_field_is_rejected():
    message = r"^drafter\.max_draft_tokens must be static, .*metadata=.'static': True.\)$"
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), PROMPTS, DataLimit(), max_new_tokens=NEW)


def test_a_drafter_without_commit_behaves_as_if_commit_changed_nothing():
    plain = emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=NEW)
    zeros = np.zeros((2, 1), np.int32)
    over = Replay(zeros, zeros, zeros, 61, 3, source=Own())
    assert over.commit("state", None) == "state"  # this source has no `commit`
    for drafter in (Own(), own(commit=lambda state, lengths: state)):
        out = emsjax.generate(shallow_model(), PROMPTS, drafter, max_new_tokens=NEW)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.num_drafted.sum() > 0


class Half:
    max_draft_tokens = 3

    def init(self, *prompts):
        return ()


INVALID_DRAFTERS = {
    "a name": (lambda: "prompt-lookup", r"\(emsjax\.Drafter\); 'str' has none"),
    "a model": (tiny_model, "'OPT' has none"),
    "a class": (
        lambda: emsjax.PromptLookup,
        r"instance, .* class PromptLookup: pass P",
    ),
    "half of one": (Half, "'Half' has no propose$"),
}


@pytest.mark.parametrize(("drafter", "message"), INVALID_DRAFTERS.values(), ids=INVALID_DRAFTERS)
def test_an_object_that_is_not_a_drafter_is_rejected_before_any_work(drafter, message):
    options = {"max_new_tokens": NEW, "batch_size": 1}
    for decode in (emsjax.generate, emsjax.stream):
        for prompts in (PROMPTS, iter(PROMPTS)) if decode is emsjax.stream else (PROMPTS,):
            with pytest.raises(ValueError, match=f"^drafter must .*{message}"):
                decode(shallow_model(), prompts, drafter(), **options)


class Forking(Own):
    """A drafter that is not a pytree. With `fork` it sees each prompt once."""

    def __init__(self):
        self.seen = []

    def init(self, prompts, prompt_lengths, max_len):
        self.seen.append(len(prompts))
        return prompt_lengths

    def fork(self, state, samples):
        return state[samples]


@pytest.mark.parametrize("forks", [True, False])
def test_a_drafter_that_is_not_a_pytree_may_fork(forks, monkeypatch):
    if not forks:
        monkeypatch.delattr(Forking, "fork")
    drafter = Forking()
    emsjax.generate(
        shallow_model(), PROMPTS, drafter, max_new_tokens=NEW, num_sequences=3, **SAMPLED
    )
    assert set(drafter.seen) == {2 if forks else 6}
