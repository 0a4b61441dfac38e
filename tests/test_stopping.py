"""Stops, constraints and pieces of streams: exact wherever drafts and tokens begin and end."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_families
from golden.tiny_families import VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import stepped
from text_tokenizers import byte_level
from toy import CARELESS

import emsjax
from emsjax.engine import texts
from emsjax.engine.adapt import make_run
from emsjax.engine.preparation import check
from emsjax.engine.requests import Asked
from emsjax.sampling.processors import Processing
from emsjax.testing import assert_lossless, assert_same_distribution
from emsjax.testing.divergence import processed_logits
from emsjax.text import decode

NEW = 24
tokenizer = functools.cache(byte_level)
end = lambda: tokenizer().eos_token_id
DRAFTERS = {
    "none": lambda model: None,
    "lookup": lambda model: emsjax.PromptLookup(match_length=1, search_generated=True),
    "careless": lambda model: CARELESS,
    "model": lambda model: emsjax.DraftModel(model, 3),  # every draft is right
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of the tokenizer's vocabulary, padded as many are."""
    config = VARIANTS["llama"] | {"vocab_size": len(tokenizer()) + 3, "eos_token_id": end()}
    config["num_hidden_layers"] = 1  # to compile less
    folder, shapes = tmp_path_factory.mktemp("llama"), tiny_families.tensors(config)
    rng = np.random.default_rng(39)
    table = rng.standard_normal((config["vocab_size"], config["hidden_size"])).astype(np.float32)
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), table)
    tiny_families.write_checkpoint(folder, config, shapes)
    return emsjax.from_pretrained(folder, dtype="float32")


def prompts():
    texts = ["aab aaab", "def f(x):\n    return", "x", "hello, world 🙂 hello"]
    return [tokenizer()(text).input_ids for text in texts]


@functools.cache
def options(**sampling):
    """Sampling that prefers tokens of several letters, and goes on where nothing stops it."""
    spelled = emsjax.text.token_bytes(tokenizer(), len(tokenizer()))
    bias = {i: 9.0 for i, one in enumerate(spelled) if len(one) > 1 and one.isascii()}
    chosen = emsjax.Sampling(0.7, logit_bias=bias, **sampling)
    return {
        "max_new_tokens": NEW,
        "eos_token_ids": (),
        "sampling": chosen,
        "key": jax.random.key(8),
        "tokenizer": tokenizer(),
    }


@functools.cache
def whole(model) -> tuple[tuple[int, ...], ...]:
    """Tokens that nothing stops."""
    return tuple(map(tuple, emsjax.generate(model, prompts(), **options()).tokens.tolist()))


def text_bytes(tokens) -> bytes:
    return b"".join(spelled()[token] for token in tokens)


@functools.cache
def spelled() -> list[bytes]:
    return emsjax.text.token_bytes(tokenizer(), len(tokenizer()) + 3)


def first_stop(tokens, stops, least=0) -> int | None:
    """Tokens up to the first that completes a stop, found by looking at each prefix as a whole."""
    for count in range(least + 1, len(tokens) + 1):
        before, now = text_bytes(tokens[: count - 1]), text_bytes(tokens[:count])
        for stop in stops:
            if isinstance(stop, str):
                at = now.find(stop.encode(), max(0, len(before) - len(stop.encode()) + 1))
                if at >= 0:
                    return count
            elif tuple(tokens[max(0, count - len(stop)) : count]) == tuple(stop):
                return count
    return None


def substrings(model) -> st.SearchStrategy[str]:
    """Parts of the texts that the model writes, which begin and end anywhere within tokens."""
    texts = [decode(tokenizer(), tokens) for tokens in whole(model)]
    texts = [text for text in texts if text.replace("�", "")]
    part = lambda text: st.tuples(st.integers(0, len(text) - 1), st.integers(1, 12)).map(
        lambda place: text[place[0] : place[0] + place[1]]
    )
    return st.sampled_from(texts).flatmap(part).filter(lambda one: one and "�" not in one)


@settings(max_examples=20)
@given(data=st.data())
def test_nothing_behind_a_stop_is_emitted_counted_or_shown(model, data):
    tokens, first = whole(model), data.draw(st.integers(0, NEW - 2))
    least = (0, 5, 0, 0)  # new tokens of each prompt before which no stop counts
    sequence = st.integers(1, 3).map(lambda n: tokens[1][first : first + n])
    one = st.one_of(substrings(model), sequence)
    stops = [data.draw(st.lists(one, max_size=3)) for _ in tokens]
    asked = options(min_new_tokens=least) | {"stop": stops}
    drafter = DRAFTERS["lookup"](model)
    out = emsjax.generate(model, prompts(), drafter, batch_size=3, **asked)
    for i, all_tokens in enumerate(tokens):
        through = first_stop(all_tokens, stops[i], least[i])
        assert out.finish_reasons[i] == ("length" if through is None else "stop")
        assert out.lengths[i] == (through or NEW) == out.stats.num_emitted[i]
        assert out.stats.num_accepted[i] <= out.stats.num_emitted[i]
        np.testing.assert_array_equal(out.tokens[i, : out.lengths[i]], all_tokens[: out.lengths[i]])
        assert not out.logprobs[i, out.lengths[i] :].any()
        written = decode(tokenizer(), all_tokens[: out.lengths[i]])
        if "�" in written:  # an incomplete character looks different when it is complete
            continue
        assert written.startswith(out.texts[i])
        strings = [stop for stop in stops[i] if isinstance(stop, str)]
        if through is not None and not least[i]:
            assert not any(stop in out.texts[i] for stop in strings)
            assert out.texts[i] != written


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stop_within_a_draft_or_completed_by_the_bonus_token_ends_the_sequence(model, name):
    """Every place of one greedy text in turn, so that stops fall anywhere in a step."""
    (tokens,) = emsjax.generate(model, prompts()[:1], max_new_tokens=NEW, eos_token_ids=()).tokens
    stops = [[list(tokens[place : place + 3])] for place in range(NEW - 3)]
    asked = {"max_new_tokens": NEW, "eos_token_ids": (), "stop": stops}
    out = emsjax.generate(model, prompts()[:1] * len(stops), DRAFTERS[name](model), **asked)
    for place, ((stop,), length) in enumerate(zip(stops, out.lengths, strict=True)):
        assert length == first_stop(tokens.tolist(), [stop]) <= place + 3
    assert set(out.finish_reasons) == {"stop"}


class FailsAfter(emsjax.LogitsProcessor):
    """Spoils the logits of all tokens after the first `count`."""

    def __init__(self, count):
        self.count = count

    def __call__(self, state, logits, context):
        new = context.lengths - context.prompt_lengths
        spoilt = new[context.samples] + context.num_drafted >= self.count
        return jnp.where(spoilt[:, None], jnp.nan, logits)


@pytest.mark.parametrize("name", ["none", "model"])
def test_a_stop_before_an_error_ends_the_sequence(model, name):
    asked = {"max_new_tokens": NEW, "eos_token_ids": (), "processors": [FailsAfter(6)]}
    drafter = DRAFTERS[name](model)
    free = emsjax.generate(model, prompts(), drafter, **asked)
    assert set(free.finish_reasons) == {"error"}
    assert (free.lengths == 6).all()
    stops = [[tokens[3:6].tolist()] for tokens in free.tokens[:2]] + [[], []]
    out = emsjax.generate(model, prompts(), drafter, stop=stops, **asked)
    assert out.finish_reasons == ["stop", "stop", "error", "error"]
    np.testing.assert_array_equal(out.tokens, free.tokens)


def test_a_stop_string_needs_not_begin_or_end_with_a_token(model):
    """It spans three tokens, and the text is cut within the first and the last of them."""
    spans = [
        (tokens, place)
        for tokens in whole(model)
        for place in range(NEW - 3)
        if all(len(spelled()[t]) > 1 for t in (tokens[place], tokens[place + 2]))
        and text_bytes(tokens[place : place + 3]).isascii()
    ]
    tokens, place = spans[0]
    first, last = (text_bytes(tokens[at : at + 1]).decode() for at in (place, place + 2))
    middle = text_bytes(tokens[place + 1 : place + 2]).decode()
    stop = first[1:] + middle + last[:-1]
    row = whole(model).index(tokens)
    asked = options() | {"stop": stop}
    for name in ("none", "lookup"):
        out = emsjax.generate(model, prompts(), DRAFTERS[name](model), **asked)
        assert out.lengths[row] == place + 3
        assert out.finish_reasons[row] == "stop"
        before = decode(tokenizer(), tokens[:place])
        assert out.texts[row] == before + first[:1]
        asked |= {"include_stop": True}
        kept = emsjax.generate(model, prompts(), DRAFTERS[name](model), **asked)
        asked |= {"include_stop": False}
        assert kept.texts[row] == before + first[:1] + stop


@pytest.mark.parametrize(("name", "as_iterator"), [("none", False), ("lookup", True)])
def test_joined_pieces_are_the_whole(model, name, as_iterator):
    text = decode(tokenizer(), whole(model)[0])
    stop = [text[7:10]]
    asked = options() | {"stop": stop, "top_logprobs": 2}
    right = emsjax.generate(model, prompts(), **asked)
    given = iter(prompts()) if as_iterator else prompts()
    joined, ended, count = {}, {}, 0
    for one in emsjax.stream(
        model, given, DRAFTERS[name](model), batch_size=3, partial=True, **asked
    ):
        if one.finish_reason is not None:
            assert one.prompt not in ended
            ended[one.prompt] = one
            continue
        assert one.prompt not in ended
        count += 1
        tokens, logprobs, text, top = joined.get(one.prompt, ([], [], "", []))
        joined[one.prompt] = (
            [*tokens, *one.tokens],
            [*logprobs, *one.logprobs],
            text + one.text,
            [*top, *one.top_logprobs.tokens.tolist()],
        )
        # What is shown may not be taken back.
        assert right.texts[one.prompt].startswith(joined[one.prompt][2])
    assert count > len(ended) == 4
    for i, (tokens, logprobs, text, top) in joined.items():
        assert tokens == ended[i].tokens.tolist() == right.tokens[i, : right.lengths[i]].tolist()
        assert logprobs == ended[i].logprobs.tolist()
        assert text == ended[i].text == right.texts[i]
        assert top == ended[i].top_logprobs.tokens.tolist()


def test_an_automaton_is_made_once_for_several_calls(monkeypatch):
    """For a large vocabulary it takes as long as many steps."""
    made = []
    real = texts.stop_automaton
    monkeypatch.setattr(texts, "stop_automaton", lambda *args: made.append(args) or real(*args))
    ask = lambda stop: texts.check_stops(Asked(stop=stop, tokenizer=tokenizer()), 2, 340)
    first, again, other = ask("once"), ask(["once"]), ask([["once"], ["twice"]])
    assert len(made) == 2
    np.testing.assert_array_equal(first[1].table, again[1].table)
    assert first[2].tolist() == again[2].tolist() == [0, 0]
    assert len(set(other[2].tolist())) == 2


def test_nothing_of_an_earlier_sequence_is_left_behind_a_stop(model):
    """The slot has served a longer sequence, which had likeliest tokens at the same places."""
    asked = {"max_new_tokens": NEW, "eos_token_ids": (), "top_logprobs": 2, "batch_size": 1}
    given = [prompts()[0], prompts()[2]]
    free = emsjax.generate(model, given, **asked)
    out = emsjax.generate(model, given, stop=[[], [free.tokens[1, :3].tolist()]], **asked)
    assert out.lengths[0] == NEW
    end_of = int(out.lengths[1])
    assert end_of <= 3
    top = out.top_logprobs
    np.testing.assert_array_equal(top.tokens[1, :end_of], free.top_logprobs.tokens[1, :end_of])
    assert not top.tokens[1, end_of:].any()
    assert not top.logprobs[1, end_of:].any()
    assert not out.logprobs[1, end_of:].any()


@pytest.mark.parametrize("stop", ["é", "🙂", "xé", "x🙂"])
def test_a_stop_may_begin_within_a_character_of_several_tokens(stop):
    """What comes before its last token ends within the character."""
    tokens = [spelled().index(bytes([byte])) for byte in f"ax{stop[-1]}".encode()]
    kept = texts.Texts(tokenizer(), [(stop,)], include_stop=True)
    cut = texts.Texts(tokenizer(), [(stop,)])
    assert decode(tokenizer(), tokens[:-1]) == "ax�"
    assert cut.of(0, tokens, "stop") == f"ax{stop[-1]}".removesuffix(stop)
    assert kept.of(0, tokens, "stop") == f"ax{stop[-1]}"


PATTERN = r"(yes|no|maybe: [a-z]{2,9}), because hello, world\.( x = [0-9]{1,3};){0,2}"


@pytest.mark.parametrize(
    ("name", "sampled"), [("lookup", True), ("careless", True), ("model", False)]
)
def test_constrained_text_matches_and_is_that_of_plain_decoding(model, name, sampled):
    constraint = emsjax.constraints.regex(PATTERN, tokenizer())
    asked = {"max_new_tokens": 40, "eos_token_ids": end(), "processors": [constraint]}
    if sampled:
        asked |= {"sampling": emsjax.Sampling(1.5), "key": jax.random.key(2)}
    drafter = DRAFTERS[name](model)
    out = emsjax.generate(model, prompts(), drafter, tokenizer=tokenizer(), **asked)
    for text, reason in zip(out.texts, out.finish_reasons, strict=True):
        assert reason == "length" or re.fullmatch(PATTERN, text)
    assert "eos" in out.finish_reasons
    assert_lossless(model, drafter, prompts(), **asked)
    if name == "careless":  # it is never right, so only tokens without a choice were accepted
        assert out.stats.num_accepted.sum() > 8
        free = emsjax.generate(model, prompts(), drafter, **asked | {"processors": []})
        assert free.stats.num_accepted.sum() < 4
    if name == "lookup":
        refilled = emsjax.generate(model, prompts(), drafter, batch_size=2, **asked)
        np.testing.assert_array_equal(refilled.tokens, out.tokens)


def test_tokens_without_a_choice_are_drafted_where_a_drafter_finds_none(model):
    constraint = emsjax.constraints.regex(PATTERN, tokenizer())
    asked = {"max_new_tokens": 40, "eos_token_ids": end(), "processors": [constraint]}
    drafter = emsjax.PromptLookup(match_length=50, max_draft_tokens=3)  # it never finds a match
    out = assert_lossless(model, drafter, prompts(), **asked).output
    assert out.stats.num_accepted.sum() == out.stats.num_drafted.sum() > 8


def test_tokens_without_a_choice_are_drafted_by_a_draft_model_of_fewer_tokens(model):
    """A letter that is in one token alone is the only choice, though the draft model lacks it."""
    holds = lambda letter: [token for token, one in enumerate(spelled()) if letter in one]
    token = max(found[0] for letter in b"QXYZ" if len(found := holds(bytes([letter]))) == 1)
    text = spelled()[token].decode() * 8
    drafter = emsjax.DraftModel(model, 3, vocab_size=token)
    asked = {"max_new_tokens": 12, "eos_token_ids": end(), "tokenizer": tokenizer()}
    asked |= {"sampling": emsjax.Sampling(1.5), "key": jax.random.key(2)}
    confined = [emsjax.constraints.regex(re.escape(text), tokenizer())]
    out = emsjax.generate(model, prompts(), drafter, processors=confined, **asked)
    assert set(out.texts) == {text}
    assert not out.stats.num_invalid.any()
    assert out.stats.num_accepted.sum() > 4 * 4


class Forcing(emsjax.LogitsProcessor):
    """Allows only the token 7 at some places of a draft."""

    def __init__(self, *places):
        self.places = places

    def force(self, state, tokens):
        forced = jnp.zeros(tokens.shape, bool).at[:, self.places].set(True)
        return jnp.where(forced, 7, tokens), forced


@pytest.mark.parametrize(
    ("places", "draft", "count", "limit", "verified"),
    [
        ((1,), [1, 2, 3, 4], 4, 4, 2),  # what follows was drafted behind another token
        ((1,), [1, 7, 3, 4], 4, 4, 4),
        ((1,), [1, 2, 3, 4], 1, 4, 2),
        ((1,), [1, 7, 3, 4], 1, 4, 2),  # it was not drafted, and is behind the draft
        ((1,), [1, 2, 3, 4], 0, 4, 0),
        ((1, 2), [1, 2, 3, 4], 4, 4, 3),
        ((1, 3), [1, 2, 3, 7], 4, 4, 2),
        ((1, 3), [1, 7, 3, 4], 3, 4, 4),
        ((0, 1, 2, 3), [1, 2, 3, 4], 0, 3, 3),
    ],
)
def test_what_was_drafted_behind_a_replaced_token_is_dropped(places, draft, count, limit, verified):
    process = Processing((Forcing(*places),), ((),), context=None, vocab_size=9)
    arguments = (jnp.array([one], jnp.int32) for one in (draft, count, limit))
    tokens, forced, counts = process.force(*arguments)
    assert counts.tolist() == [verified]
    assert np.flatnonzero(forced[0]).tolist() == list(places)
    assert tokens[0].tolist() == [7 if i in places else one for i, one in enumerate(draft)]


def test_choices_and_schemas(model):
    asked = {"max_new_tokens": 40, "eos_token_ids": end(), "tokenizer": tokenizer()}
    asked |= {"sampling": emsjax.Sampling(2.0), "key": jax.random.key(1), "num_sequences": 4}
    drafter = DRAFTERS["lookup"](model)
    choices = ["yes", "no", "naïve 🙂", "yes and no"]
    one = emsjax.constraints.choices(choices, tokenizer())
    out = emsjax.generate(model, prompts(), drafter, processors=[one], **asked)
    assert set(out.texts) <= set(choices)
    assert len(set(out.texts)) > 1
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
    }
    del schema["properties"]["n"]["minimum"]
    one = emsjax.constraints.json_schema(schema, tokenizer())
    out = emsjax.generate(model, prompts(), drafter, processors=[one], **asked)
    for text, reason in zip(out.texts, out.finish_reasons, strict=True):
        if reason == "eos":
            found = json.loads(text)
            assert isinstance(found["n"], int)
            assert found["kind"] in ("a", "b")
    assert out.finish_reasons.count("eos") > 3


# Of each prompt; the second is free.
OWN = [PATTERN, None, "(yes|no|not at all)", PATTERN]


@functools.cache
def constraint(pattern):
    return None if pattern is None else emsjax.constraints.regex(pattern, tokenizer())


def of_each(patterns):
    return [emsjax.constraints.each([constraint(one) for one in patterns])]


@functools.cache
def drawn_or_greedy(drawn):
    """Settings with which a free prompt chooses ids that the tokenizer lacks, and ends."""
    bias = {end(): 8.0, len(tokenizer()): 8.0, len(tokenizer()) + 2: 8.0}
    asked = {"max_new_tokens": NEW, "eos_token_ids": end()}
    if drawn:
        return asked | {
            "sampling": emsjax.Sampling(1.5, logit_bias=bias),
            "key": jax.random.key(4),
        }
    bias = {token: 16.0 if token == end() else 40.0 for token in bias}
    free = {"logit_bias": [None, bias, None, None], "frequency_penalty": [0, 9, 0, 0]}
    return asked | {"sampling": emsjax.Sampling(**free)}


@functools.cache
def alone(model, drawn, num_sequences=1) -> list[list[int]]:
    """Each prompt's tokens under its own constraint for all, or under none, by plain decoding."""
    # With so few slots any number of sequences has the same program.
    asked = drawn_or_greedy(drawn) | {"num_sequences": num_sequences, "batch_size": 2}
    runs = {}
    for pattern in dict.fromkeys(OWN):
        confined = [] if pattern is None else [constraint(pattern)]
        runs[pattern] = emsjax.generate(model, prompts(), processors=confined, **asked)
    found = []
    for sequence in range(len(OWN) * num_sequences):
        out = runs[OWN[sequence // num_sequences]]
        found.append(out.tokens[sequence, : out.lengths[sequence]].tolist())
    return found


def tokens_of(out) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


def streamed(*args, **options) -> list[list[int]]:
    done = list(emsjax.stream(*args, **options))
    done.sort(key=lambda one: (one.prompt, one.sequence))
    return [one.tokens.tolist() for one in done]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [("lookup", False), ("lookup", True), ("careless", True), ("model", False), ("model", True)],
)
def test_each_prompt_is_completed_as_if_its_constraint_were_that_of_all(model, name, drawn):
    asked = drawn_or_greedy(drawn) | {"processors": of_each(OWN)}
    drafter = DRAFTERS[name](model)
    expected = alone(model, drawn)
    padding = [token >= len(tokenizer()) for token in expected[1]]  # ids of the model alone
    assert any(padding)
    assert not all(padding)
    assert expected[1][-1] == end()
    assert len({tuple(one) for one in expected}) == 4
    if (name, drawn) in (("lookup", True), ("model", False)):  # all at once
        out = assert_lossless(model, drafter, prompts(), **asked).output
        assert tokens_of(out) == expected
    out = emsjax.generate(model, prompts(), drafter, tokenizer=tokenizer(), batch_size=2, **asked)
    if name != "model" or not drawn:  # otherwise the tokens are others of the same distribution
        assert tokens_of(out) == expected
        assert streamed(model, prompts(), drafter, batch_size=2, **asked) == expected
    for i, (pattern, reason) in enumerate(zip(OWN, out.finish_reasons, strict=True)):
        if pattern is not None:
            assert reason == "length" or re.fullmatch(pattern, out.texts[i])
    if name == "careless":  # it is never right, so only tokens without a choice were accepted
        accepted = out.stats.num_accepted
        assert accepted[1] <= 1
        assert accepted[[0, 3]].min() > 4
    if name == "model":
        assert out.stats.acceptance_rate == 1  # its logits are confined in the same way


def test_every_sequence_of_a_prompt_has_its_constraint(model):
    asked = drawn_or_greedy(True) | {"processors": of_each(OWN), "num_sequences": 3}
    expected = alone(model, True, 3)
    drafter = DRAFTERS["lookup"](model)
    assert tokens_of(emsjax.generate(model, prompts(), drafter, **asked)) == expected
    assert streamed(model, prompts(), drafter, batch_size=2, **asked) == expected


def test_single_steps_and_forks_have_the_constraints_of_their_prompts(model):
    asked = drawn_or_greedy(True) | {"processors": of_each(OWN), "num_sequences": 3}
    drafter = DRAFTERS["lookup"](model)
    state = emsjax.init_state(model, drafter, prompts(), **asked)
    assert state.settings.request_ids.tolist() == [i // 3 for i in range(12)]
    state = stepped(model, drafter, state, NEW, processors=asked["processors"])
    for i, expected in enumerate(alone(model, True, 3)):
        start = int(state.prompt_lengths[i])
        new = np.asarray(state.tokens)[i, start : int(state.lengths[i])]
        assert new.tolist() == expected


def test_free_prompts_are_completed_as_without_constraints(model):
    """Also where every prompt is free, and in an engine, whose calls have as many prompts."""
    asked = drawn_or_greedy(True)
    expected = tokens_of(emsjax.generate(model, prompts(), **asked))
    drafter = DRAFTERS["lookup"](model)
    nothing = asked | {"processors": of_each([None] * 4)}
    assert tokens_of(emsjax.generate(model, prompts(), drafter, **nothing)) == expected
    endless = nothing | {"eos_token_ids": ()}  # nothing has to end
    assert (emsjax.generate(model, prompts(), drafter, **endless).lengths == NEW).all()
    engine = emsjax.Engine(model, drafter, batch_size=2, max_len=96, processors=of_each(OWN))
    for _ in range(2):
        assert streamed_by(engine, prompts(), **asked) == alone(model, True)
    with pytest.raises(ValueError, match="must have values for each prompt: got 4 for 3 prompts"):
        engine.stream(prompts()[:3], **asked)


def streamed_by(engine, *args, **options) -> list[list[int]]:
    return [one.tokens.tolist() for one in sorted(engine.stream(*args, **options), key=place_of)]


def place_of(completion) -> tuple[int, int]:
    return completion.prompt, completion.sequence


def test_the_place_of_a_prompt_is_not_compiled_in_unless_asked_for(model):
    asked = drawn_or_greedy(False)
    for processors in ([], [constraint(PATTERN)]):
        state = emsjax.init_state(model, None, prompts(), processors=processors, **asked)
        assert state.settings.request_ids is None
    # Programs are shared by other constraints, and by other numbers of prompts.
    shapes = lambda one: jax.tree.map(np.shape, one)
    assert shapes(of_each(OWN)) == shapes(of_each([PATTERN, *OWN[1:3], None, None]))


class SuppressesOne:
    """Forbids one token for each prompt; it has just the methods that it needs."""

    def __init__(self, tokens):
        self.tokens, self.num_prompts = tokens, len(tokens)

    def init_for(self, prompts, prompt_lengths, requests):
        return jnp.asarray(self.tokens, jnp.int32)[requests]

    def __call__(self, state, logits, context):
        token = state[context.samples]
        return jnp.where(jnp.arange(logits.shape[1]) == token[:, None], -jnp.inf, logits)


def test_processors_of_users_may_have_values_for_each_prompt(model):
    asked = {"max_new_tokens": 8, "eos_token_ids": ()}
    usual = emsjax.generate(model, prompts(), **asked).tokens
    tokens = [int(row[at]) for at, row in enumerate(usual)]
    asked |= {"batch_size": 2}
    sampling = emsjax.Sampling(suppress_tokens=[[one] for one in tokens])
    expected = emsjax.generate(model, prompts(), sampling=sampling, **asked)
    drafter = DRAFTERS["lookup"](model)
    out = emsjax.generate(model, prompts(), drafter, processors=[SuppressesOne(tokens)], **asked)
    assert tokens_of(out) == tokens_of(expected)
    assert (out.tokens != usual).any(axis=1).all()
    with pytest.raises(ValueError, match=r"processor SuppressesOne must have .* got 3 for 4"):
        emsjax.generate(model, prompts(), processors=[SuppressesOne(tokens[:3])], **asked)


def test_logits_of_a_difference_are_confined_as_their_prompts_are(model):
    """What explains a difference knows whose sequence it belongs to."""
    asked = drawn_or_greedy(True) | {"num_sequences": 2}
    run = make_run(model, None, processors=of_each(OWN))
    run, requests = check(run, prompts(), **asked)
    sequences = [5, 0, 3, 6]
    prefixes = [np.array(prompts()[one // 2], np.int32) for one in sequences]
    logits = np.zeros((4, model.config.vocab_size), np.float32)
    found = np.isfinite(processed_logits(run, requests, logits, prefixes, sequences))
    first = [{one[:1] for one, kept in zip(spelled(), row, strict=True) if kept} for row in found]
    assert first[0] == {b"y", b"n"}
    assert first[1] == first[3] == {b"y", b"n", b"m"}
    assert found[2].all()
    # The states have moved on by the new tokens.
    prefixes[0] = np.append(prefixes[0], spelled().index(b"y")).astype(np.int32)
    found = np.isfinite(processed_logits(run, requests, logits, prefixes, sequences))
    assert {one[:1] for one, kept in zip(spelled(), found[0], strict=True) if kept} == {b"e"}


def test_a_distribution_may_be_confined_for_its_one_prompt(model):
    sampling = emsjax.Sampling(1.5)
    out = assert_same_distribution(
        model,
        DRAFTERS["lookup"](model),
        prompts()[0] * 2,
        sampling=sampling,
        key=jax.random.key(1),
        samples=400,
        processors=of_each(["(a|b)*"]),
    )
    assert set(b"".join(spelled()[token] for token in out.tokens[0])) <= set(b"ab")


def test_wrong_constraints_of_each_are_errors(model, monkeypatch):
    confined = [constraint(PATTERN), None]
    each = emsjax.constraints.each
    asked = {"max_new_tokens": 2, "processors": [each(confined)]}
    wrong = "the processor Constraint must have values for each prompt: got 2 for 1 prompts"
    with pytest.raises(ValueError, match=wrong):
        emsjax.generate(model, [[3]], **asked)
    with pytest.raises(ValueError, match="values for each prompt needs a sequence of prompts"):
        emsjax.stream(model, iter([[3], [4]]), batch_size=2, **asked)
    with pytest.raises(ValueError, match="a constraint needs an end token"):
        emsjax.generate(model, [[3], [4]], eos_token_ids=(), **asked)
    for wrong, message in (
        ([], "^constraints is empty"),
        ("ab", "^constraints must be a list of constraints, one per prompt, not str"),
        (confined[0], "^constraints must be a list of constraints, .*not Constraint"),
        ([None, "ab"], r"^constraints\[1\] must be one of emsjax.constraints, or None, not str"),
        ([each(confined)], r"^constraints\[0\] must be for one prompt, not for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            each(wrong)
    monkeypatch.setattr("emsjax.text.composition.MAX_BYTES", 1 << 10)
    with pytest.raises(
        ValueError, match=r"^constraints need a table of \d+ states and at least \d+ cl"
    ):
        each(confined)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "stop is an empty string"),
        ({"stop": [[]]}, None),
        ({"stop": ["a", []]}, "empty"),
        ({"stop": "a"}, "stop needs tokenizer="),
        ({"stop": [400]}, "token id 400, outside"),
        ({"stop": [["a"], ["b"]]}, "got 2 lists for 1 prompts"),
        ({"stop": 3}, "stop must be a string"),
        ({"tokenizer": 3}, "tokenizer must be a tokenizer"),
        ({"include_stop": 2}, "include_stop must be"),
        ({"top_logprobs": -1}, "top_logprobs must be"),
        ({"eos_token_ids": (), "constrained": True}, "a constraint needs an end token"),
    ],
)
def test_bad_stops_are_errors(model, options, message):
    options = dict(options)
    if options.pop("constrained", False):
        options["processors"] = [emsjax.constraints.choices(["yes"], tokenizer())]
    if message is None:  # one prompt without stops
        assert emsjax.generate(model, [[3]], max_new_tokens=1, **options).lengths == 1
        return
    with pytest.raises(ValueError, match=message):
        emsjax.generate(model, [[3]], max_new_tokens=1, **options)
