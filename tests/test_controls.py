"""Settings and processors that change logits: defined as elsewhere, and exact under speculation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_families
from golden.tiny_families import MAX_NEW_TOKENS, VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import stepped
from toy import CARELESS, VOCAB, ragged_prompts, shallow_model

import emsjax
from emsjax.testing import assert_lossless, assert_same_distribution
from emsjax.testing.divergence import float32_logits
from pallas_kernels.common.indexing import take

END = 1
LENGTHS = [5, 1, 9, 20]
GOLDEN = {  # as in golden/make_controls.py, by the names of this library
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": {7: 3.0, 20: -2.5, 33: 4.0}},
    "min_new_tokens": {"logit_bias": {END: 6.0}, "min_new_tokens": 9},
    "suppress_tokens": {"suppress_tokens": [3, 12, 33, 48, 50]},
    "all": {
        "repetition_penalty": 0.8,
        "logit_bias": {7: 3.0, END: 5.0},
        "min_new_tokens": 5,
        "suppress_tokens": [7, 12],
    },
}
# What changes nothing, of the settings above.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_new_tokens": 0,
    "suppress_tokens": (),
}
# Every setting, with other values for each prompt.
MIXED = {
    "repetition_penalty": [1.0, 1.6, 0.7, 1.2],
    "presence_penalty": [0.9, 0.0, -0.4, 2.0],
    "frequency_penalty": [0.3, 1.1, -0.2, 0.0],
    "min_new_tokens": [0, 12, 3, 7],
    "logit_bias": [{END: 3.0}, None, {4: 2.0, 9: -3.0}, {END: 6.0, 30: 1.5}],
    "suppress_tokens": [(), [2, 5], [11], ()],
}
DRAFTERS = {
    "lookup": functools.partial(emsjax.PromptLookup, match_length=1, search_generated=True),
    "careless": lambda: CARELESS,
    "model": lambda: emsjax.DraftModel(shallow_model(), 3),
}


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(tiny_families.GOLDEN.with_name("controls.npz")) as values:
        return dict(values)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("llama"), VARIANTS["llama"]
    tiny_families.write_checkpoint(folder, config, tiny_families.tensors(config))
    return emsjax.from_pretrained(folder, dtype="float32")


def of_prompt(given: dict, index: int) -> dict:
    """The settings of one prompt."""
    return {name: values[index] for name, values in given.items()}


def expected_logits(logits, prompt, new, given: dict) -> np.ndarray:
    """The definitions, token by token. `given` holds one value for each setting."""
    logits = np.array(logits, np.float64)
    for token, bias in (given.get("logit_bias") or {}).items():
        logits[token] += bias
    for token in {*prompt, *new}:
        by = given.get("repetition_penalty", 1.0)
        logits[token] = logits[token] * by if logits[token] < 0 else logits[token] / by
    for token in set(new):
        logits[token] -= given.get("presence_penalty", 0.0)
        logits[token] -= given.get("frequency_penalty", 0.0) * list(new).count(token)
    if len(new) < given.get("min_new_tokens", 0):
        logits[END] = -np.inf
    logits[list(given.get("suppress_tokens", ()))] = -np.inf
    return logits


def expected_tokens(model, prompts, each: list[dict], count: int) -> list[list[int]]:
    """Greedy tokens, one at a time, from logits of whole prefixes."""
    new = [[] for _ in prompts]
    for _ in range(count):
        going = [i for i in range(len(prompts)) if END not in new[i]]
        if not going:
            break
        prefixes = [np.array([*prompts[i], *new[i]], np.int32) for i in going]
        for i, logits in zip(going, float32_logits(model, prefixes), strict=True):
            new[i].append(int(expected_logits(logits, prompts[i], new[i], each[i]).argmax()))
    return new


def tokens_of(out) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


@pytest.mark.parametrize("names", [["repetition_penalty"], list(GOLDEN)], ids=["one", "all"])
def test_greedy_tokens_equal_those_of_transformers(llama, names):
    """One setting by itself, and in one batch each of them and all together."""
    prompts, neutral = tiny_families.prompts(), NEUTRAL if len(names) > 1 else {}
    each = [neutral | GOLDEN[name] for name in names for _ in prompts]
    given = {setting: [one[setting] for one in each] for setting in each[0]}
    asked = {"sampling": emsjax.Sampling(**given), "max_new_tokens": MAX_NEW_TOKENS}
    out = emsjax.generate(llama, prompts * len(names), DRAFTERS["lookup"](), **asked)
    real = np.arange(MAX_NEW_TOKENS) < out.lengths[:, None]
    expected = np.concatenate([golden()[name] for name in names])
    np.testing.assert_array_equal(np.where(real, out.tokens, 0), expected)
    assert out.stats.num_drafted.sum() > 0


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tokens_are_those_of_transformers(name):
    pytest.importorskip("torch")
    from golden import make_controls, make_families

    model = make_families.torch_model(VARIANTS["llama"])
    found = make_controls.tokens(model, make_controls.SETTINGS[name])
    np.testing.assert_array_equal(golden()[name], found)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_setting_in_one_batch_has_its_definition(name):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    each = [of_prompt(MIXED, i) for i in range(len(prompts))]
    expected = expected_tokens(model, prompts, each, 20)
    options = {"max_new_tokens": 20, "eos_token_ids": END, "sampling": emsjax.Sampling(**MIXED)}
    plain = [[int(t) for t in row] for row in expected_tokens(model, prompts, [{}] * 4, 20)]
    assert sum(one != other for one, other in zip(plain, expected, strict=True)) == 4
    out = emsjax.generate(model, prompts, DRAFTERS[name](), **options)
    assert tokens_of(out) == expected
    if name == "model":
        assert out.stats.acceptance_rate == 1
    if name != "careless":
        refilled = emsjax.generate(model, prompts, DRAFTERS[name](), batch_size=2, **options)
        assert tokens_of(refilled) == expected
    # The log-probabilities are those of the changed logits.
    for i, new in enumerate(expected):
        prefix = np.array([*prompts[i], *new[:-1]], np.int32)
        (logits,) = float32_logits(model, [prefix])
        logits = expected_logits(logits, prompts[i], new[:-1], each[i])
        right = logits[new[-1]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert out.logprobs[i, len(new) - 1] == pytest.approx(right, abs=1e-4)


@settings(max_examples=6)
@given(st.data())
def test_all_settings_are_lossless(data):
    number = lambda low, high: st.floats(low, high)
    each = lambda one: data.draw(st.lists(one, min_size=4, max_size=4))
    token = st.integers(0, VOCAB - 1)
    sampling = {
        "temperature": [0.0, 0.9, 0.6, 1.4],
        "top_k": [0, 0, 5, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0],
        "min_p": [0.0, *data.draw(st.tuples(number(0.01, 0.5), number(0, 0.2), number(0, 0.1)))],
        "repetition_penalty": [1.5, *each(number(0.5, 2))[1:]],
        "presence_penalty": [0.5, *each(number(-2, 2))[1:]],
        "frequency_penalty": [0.5, *each(number(-1, 1))[1:]],
        "min_new_tokens": [1, *each(st.integers(0, 14))[1:]],
        "logit_bias": [
            {tokens[i]: biases[i] for i in range(2)}
            for tokens, biases in zip(
                each(st.lists(token, min_size=2, max_size=2, unique=True)),
                each(st.lists(number(-5, 5), min_size=2, max_size=2)),
                strict=True,
            )
        ],
        "suppress_tokens": each(st.lists(token, min_size=2, max_size=2, unique=True)),
    }
    options = {
        "max_new_tokens": 14,
        "eos_token_ids": END,
        "sampling": emsjax.Sampling(**sampling),
        "key": jax.random.key(data.draw(st.integers(0, 99))),
    }
    for name in ("lookup", "careless"):
        assert_lossless(shallow_model(), DRAFTERS[name](), ragged_prompts(LENGTHS), **options)


def test_sampled_tokens_follow_the_distribution_of_the_changed_logits():
    """With a draft model, whose own logits are changed in the same way."""
    sampling = emsjax.Sampling(
        1.2,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={4: 1.0},
        suppress_tokens=[8],
        min_new_tokens=1,
    )
    drafter = emsjax.DraftModel(shallow_model(ffn_dim=32), 2)
    options = {"sampling": sampling, "key": jax.random.key(1), "detects": 0.12}
    prompt = [5, 9, 9, 30]
    assert_same_distribution(shallow_model(), drafter, prompt, **options)


def test_a_draft_model_that_is_the_target_is_always_right():
    """Its logits pass through the same settings and the same processors with the same states. Of
    greedy decoding the tests of settings and of processors with each drafter show it.
    """
    sampling = emsjax.Sampling(1.1, min_p=0.05, **MIXED)
    options = {"sampling": sampling, "processors": [NoTokenTwice(4)]}
    options |= {"max_new_tokens": 16, "eos_token_ids": END, "key": jax.random.key(0)}
    out = emsjax.generate(shallow_model(), ragged_prompts(LENGTHS), DRAFTERS["model"](), **options)
    assert out.stats.acceptance_rate == 1
    assert out.stats.num_drafted.sum() > 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoTokenTwice(emsjax.LogitsProcessor):
    """Forbids the tokens of the last `width` places among new tokens; its state holds them."""

    width: int = dataclasses.field(metadata={"static": True})

    def init(self, prompts, prompt_lengths):
        return jnp.full((len(prompts), self.width), -1, jnp.int32)

    def __call__(self, state, logits, context):
        draft = jnp.pad(context.drafted, ((0, 0), (0, 1)))  # there may be no drafter
        for place in range(self.width):  # counted from the end
            at = context.num_drafted - 1 - place
            drafted = take(draft, context.samples, jnp.clip(at, 0))
            emitted = take(state, context.samples, jnp.clip(self.width + at, 0, self.width - 1))
            token = jnp.where(at >= 0, drafted, emitted)
            logits = jnp.where(jnp.arange(logits.shape[1]) == token[:, None], -jnp.inf, logits)
        return logits

    def advance(self, state, tokens, counts):
        joined = jnp.concatenate([state, tokens], axis=1)
        return jnp.take_along_axis(joined, counts[:, None] + jnp.arange(self.width), axis=1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_processor_with_a_state_is_lossless(name):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    options = {"max_new_tokens": 16, "processors": [NoTokenTwice(4)]}
    out = assert_lossless(model, DRAFTERS[name](), prompts, **options).output
    for new in tokens_of(out):
        for place in range(len(new)):
            assert new[place] not in new[max(0, place - 4) : place]
    usual = emsjax.generate(model, prompts, max_new_tokens=16)
    assert tokens_of(usual) != tokens_of(out)
    if name == "model":
        assert out.stats.acceptance_rate == 1
    if name != "careless":
        refilled = emsjax.generate(model, prompts, DRAFTERS[name](), batch_size=2, **options)
        assert tokens_of(refilled) == tokens_of(out)


def test_forks_and_single_steps_have_states_of_their_own():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    options = {"sampling": emsjax.Sampling(1.5, presence_penalty=1.0), "key": jax.random.key(3)}
    options |= {"max_new_tokens": 9, "processors": [NoTokenTwice(3)]}
    lookup = DRAFTERS["lookup"]()
    several = emsjax.generate(model, prompts, lookup, num_sequences=3, **options)
    refilled = emsjax.generate(model, prompts, lookup, num_sequences=3, batch_size=5, **options)
    assert tokens_of(refilled) == tokens_of(several)
    assert len({tuple(row) for row in tokens_of(several)}) == 12
    one = emsjax.generate(model, prompts, **options)
    assert one.top_logprobs is None  # unless they are asked for
    state = emsjax.init_state(model, lookup, prompts, **options)
    state = stepped(model, lookup, state, 9, processors=[NoTokenTwice(3)])
    for i, prompt in enumerate(prompts):
        new = np.asarray(state.tokens)[i, len(prompt) : int(state.lengths[i])]
        np.testing.assert_array_equal(new, one.tokens[i])


def test_settings_that_nobody_asks_for_are_not_compiled_in():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    neutral = emsjax.Sampling(
        min_p=[0.0] * 4,
        repetition_penalty=[1.0] * 4,
        logit_bias={},
        suppress_tokens=[[], (), [], []],
    )
    plain, asked = (
        emsjax.init_state(model, None, prompts, max_new_tokens=4, sampling=sampling)
        for sampling in (None, neutral)
    )
    assert jax.tree.structure(plain) == jax.tree.structure(asked)
    assert plain.settings.controls is None
    assert plain.processor_states == ()


def test_the_likeliest_tokens_are_those_of_the_distribution():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    min_p = [0.0, 0.0, 0.0, 0.9]
    sampling = emsjax.Sampling([0.0, 0.8, 0.0, 1.1], [0, 2, 0, 0], 1.0, min_p, suppress_tokens=[4])
    options = {"sampling": sampling, "key": jax.random.key(0), "max_new_tokens": 8}
    out = emsjax.generate(model, prompts, DRAFTERS["lookup"](), top_logprobs=3, **options)
    plain = emsjax.generate(model, prompts, top_logprobs=3, batch_size=2, **options)
    np.testing.assert_array_equal(out.top_logprobs.tokens, plain.top_logprobs.tokens)
    np.testing.assert_allclose(out.top_logprobs.logprobs, plain.top_logprobs.logprobs, atol=1e-5)
    (logits,) = float32_logits(model, [np.array([*prompts[3], *out.tokens[3, :7]], np.int32)])
    logits[4] = -np.inf
    logits = (logits - logits.max()) / 1.1
    logits[logits < np.log(0.9)] = -np.inf
    assert 1 <= np.isfinite(logits).sum() < 3
    right = np.array(jax.nn.log_softmax(jnp.asarray(logits)))
    likeliest = np.argsort(-right)[: np.isfinite(right).sum()]
    np.testing.assert_array_equal(out.top_logprobs.tokens[3, 7, : len(likeliest)], likeliest)
    np.testing.assert_allclose(out.top_logprobs.logprobs[3, 7], np.sort(right)[::-1][:3], atol=1e-4)
    assert (out.top_logprobs.tokens[0, :, 0] == out.tokens[0]).all()
    assert (out.top_logprobs.logprobs[1, :, 2] == -np.inf).all()  # top_k is 2
    whole = {
        done.prompt: done
        for done in emsjax.stream(model, prompts, batch_size=2, top_logprobs=3, **options)
    }
    for i, done in whole.items():
        np.testing.assert_array_equal(done.top_logprobs.tokens, out.top_logprobs.tokens[i])


BAD = {
    "min_p": ({"temperature": 1.0, "min_p": 1.5}, r"sampling.min_p must be in \[0, 1\]"),
    "idle min_p": ({"min_p": 0.5}, "sampling.min_p has no effect at temperature 0"),
    "repetition": ({"repetition_penalty": 0}, "repetition_penalty must be finite and above 0"),
    "presence": ({"presence_penalty": float("nan")}, "presence_penalty must be finite"),
    "frequency": ({"frequency_penalty": [0.0] * 3}, "got 3 for 4 prompts"),
    "least": ({"min_new_tokens": 9}, "min_new_tokens is 9 for .*more than its max_new_tokens 8"),
    "bias outside": ({"logit_bias": {VOCAB: 1.0}}, rf"logit_bias must be .*{VOCAB - 1}"),
    "bias": ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\] must be finite"),
    "biases": ({"logit_bias": [{}, {}]}, "got 2 for 4 prompts"),
    "no bias": ({"logit_bias": 3}, "logit_bias must be a mapping"),
    "text": ({"logit_bias": ["a", {}, {}, {}]}, r"logit_bias\[0\] must be a mapping"),
    "suppressed": ({"suppress_tokens": [VOCAB]}, f"token id {VOCAB}, outside"),
    "all suppressed": ({"suppress_tokens": range(VOCAB)}, "leaves no token"),
    "no end": (
        {"suppress_tokens": [i for i in range(VOCAB) if i != END], "min_new_tokens": 1},
        "leaves no token",
    ),
    "one number": ({"suppress_tokens": 3}, "suppress_tokens must be a sequence"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_errors_before_anything_runs(name):
    given, message = BAD[name]
    options = {"max_new_tokens": 8, "eos_token_ids": END, "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        emsjax.generate(
            shallow_model(), ragged_prompts(LENGTHS), sampling=emsjax.Sampling(**given), **options
        )


class Narrowing(emsjax.LogitsProcessor):
    def __call__(self, state, logits, context):
        return logits[:, :-1]


class Halving(emsjax.LogitsProcessor):
    def __call__(self, state, logits, context):
        return logits.astype(jnp.bfloat16)


class Growing(emsjax.LogitsProcessor):
    def init(self, prompts, prompt_lengths):
        return jnp.zeros((len(prompts), 1))

    def __call__(self, state, logits, context):
        return logits

    def advance(self, state, tokens, counts):
        return jnp.concatenate([state, state], axis=1)


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([Narrowing()], "processor Narrowing must return logits like those"),
        ([Halving()], "processor Halving must return logits .*not bfloat16"),
        ([Growing()], "processor Growing's state must keep its structure"),
        ([emsjax.LogitsProcessor()], "LogitsProcessor must define __call__"),
        ([3], r"processors\[0\] must be an emsjax.LogitsProcessor, not int"),
        ([Narrowing], r"processors\[0\] must be .*not the class Narrowing"),
        (Narrowing(), "processors must be a sequence"),
    ],
)
def test_bad_processors_are_errors(processors, message):
    error = NotImplementedError if "define" in message else ValueError
    with pytest.raises(error, match=message):
        emsjax.generate(shallow_model(), [[3]], max_new_tokens=2, processors=processors)
