"""Arguments are read by kind: what is sensible is accepted, everything else is named."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import NEARLY_GREEDY, ragged_prompts, shallow_model
from transformers import BatchEncoding

import emsjax
from emsjax import distillation
from emsjax.engine import memory
from emsjax.testing import assert_lossless

PAD, NEW = 1, 4
PROMPTS = ragged_prompts([5, 9, 3])
LOOKUP = emsjax.PromptLookup(match_length=1)


def padded(side, pad=PAD):
    """The prompts and their mask in rectangular arrays, padded on one side or on both."""
    width = max(map(len, PROMPTS))
    ids, mask = np.full((len(PROMPTS), width), pad), np.zeros((len(PROMPTS), width), int)
    for row, prompt in enumerate(PROMPTS):
        room = width - len(prompt)
        start = {"left": room, "right": 0, "both": room // 2}[side]
        ids[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = 1
    return ids, mask


def tokens_of(prompts, **options):
    return emsjax.generate(shallow_model(), prompts, max_new_tokens=NEW, **options).tokens.tolist()


@pytest.fixture(scope="module")
def expected():
    return tokens_of(PROMPTS)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist, jnp.asarray, bool])
def test_masked_tokens_are_left_out(side, kind, expected):
    ids, mask = padded(side)
    mask = mask.astype(bool).tolist() if kind is bool else kind(mask)
    assert tokens_of(ids, attention_mask=mask) == expected


def test_padding_may_be_outside_the_vocabulary(expected):
    ids, mask = padded("left", pad=2**20)
    assert tokens_of(ids, attention_mask=mask) == expected


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_the_output_of_a_tokenizer_is_a_list_of_prompts(kind, expected):
    ids, mask = padded("right")
    encoded = kind({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})
    assert tokens_of(encoded) == expected
    assert tokens_of(kind({"input_ids": [prompt.tolist() for prompt in PROMPTS]})) == expected
    model, options = shallow_model(), {"max_new_tokens": NEW}
    for found in (
        emsjax.stream(model, encoded, batch_size=2, **options),
        emsjax.Engine(model, batch_size=2).stream(encoded, **options),
    ):
        assert {c.prompt: c.tokens.tolist() for c in found} == dict(enumerate(expected))
    assert emsjax.vanilla.generate(model, encoded, **options).tokens.tolist() == expected
    assert assert_lossless(model, LOOKUP, encoded, **options).output.tokens.tolist() == expected
    state = emsjax.init_state(model, None, encoded, **options)
    assert state.prompt_lengths.tolist() == [len(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prompts", "place", "end"),
    [
        ([[PAD, 5, 6], [7, 8, 9]], 0, "begins"),
        ([[5, 6, 7], [7, 8, PAD]], 1, "ends"),
        ([[PAD]], 0, "begins"),
    ],
)
def test_a_padded_prompt_without_a_mask_is_refused(prompts, place, end):
    message = (
        rf"^prompts\[{place}\] {end} with the padding token 1, .*tokenizer\(texts\)\.input_ids"
    )
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), prompts, max_new_tokens=NEW)
    # A mask that keeps it says that it is text.
    mask = [[1] * len(prompt) for prompt in prompts]
    assert len(tokens_of(prompts, attention_mask=mask)) == len(prompts)
    refused = emsjax.stream(shallow_model(), iter(prompts), max_new_tokens=NEW, batch_size=1)
    assert end in {c.prompt: c.error for c in refused}[place]


@pytest.mark.parametrize("pad", [None, 2, 7])
def test_a_token_that_also_begins_or_ends_texts_is_no_padding(pad):
    model = shallow_model(pad_token_id=pad, eos_token_id=7)  # the start token is 2
    out = emsjax.generate(model, [[PAD, 5], [2, 5], [5, 7]], max_new_tokens=1, eos_token_ids=())
    assert out.lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1], [1, 1, 1]], r"attention_mask\[0\] has a hole"),
        ([[0, 0, 0], [1, 1, 1]], r"attention_mask\[0\] leaves out all tokens"),
        ([[1, 1, 1], [1, 1]], r"attention_mask\[1\] must be 3 zeros and ones"),
        ([[1, 1, 1], [1, 2, 1]], r"attention_mask\[1\] must be 3 zeros and ones"),
        ([[1, 1, 1], "111"], r"attention_mask\[1\] must be 3 zeros and ones"),
        ([[1, 1, 1], [1.0, 1, 1]], r"attention_mask\[1\] must be 3 zeros and ones"),
        ([[1, 1, 1]], "attention_mask must have the shape of the prompts: got 1 for 2"),
        (5, "attention_mask must be a sequence like the prompts, not int"),
    ],
)
def test_a_mask_that_is_none_is_named(mask, message):
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), [[5, 6, 7], [7, 8, 9]], attention_mask=mask)


def test_an_iterator_of_prompts_has_no_mask():
    with pytest.raises(ValueError, match="attention_mask needs a sequence of prompts"):
        emsjax.stream(shallow_model(), iter(PROMPTS), batch_size=1, attention_mask=[[1]])


HUGE = [2**31, 2**63, 10**30]
SAMPLED = {"sampling": emsjax.Sampling(1.0), "key": jax.random.key(0)}


def call(function, *arguments, **options):
    return lambda: function(*arguments, **options)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("huge", HUGE)
def test_counts_that_nothing_can_use_are_named_at_once(huge):
    model, none = shallow_model(), iter(())
    sequences = {"num_sequences": huge, **SAMPLED}
    calls = {
        "batch_size": [
            call(emsjax.stream, model, none, batch_size=huge, max_new_tokens=NEW),
            call(emsjax.Engine, model, batch_size=huge),
        ],
        "num_sequences": [
            call(emsjax.generate, model, PROMPTS, max_new_tokens=NEW, **sequences),
            call(emsjax.generate, model, PROMPTS, max_new_tokens=NEW, batch_size=8, **sequences),
            call(emsjax.stream, model, PROMPTS, max_new_tokens=NEW, batch_size=8, **sequences),
            call(emsjax.init_state, model, None, PROMPTS, max_new_tokens=NEW, **sequences),
        ],
        "max_new_tokens": [call(emsjax.generate, model, PROMPTS, max_new_tokens=huge)],
        "match_length": [call(emsjax.PromptLookup, huge)],
        "max_draft_tokens": [
            call(emsjax.PromptLookup, max_draft_tokens=huge),
            call(emsjax.DraftModel, model, huge),
        ],
        "vocab_size": [call(emsjax.DraftModel, model, vocab_size=huge)],
        "limit": [call(emsjax.BassHeuristic, limit=huge)],
    }
    for name, makers in calls.items():
        for make in makers:
            begin = time.monotonic()
            with pytest.raises(ValueError, match=name):
                make()
            assert time.monotonic() - begin < 5


def test_many_sequences_are_refused_before_an_array_is_made(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2**30)
    options = {"max_new_tokens": NEW, "num_sequences": 10**6, "batch_size": 8, **SAMPLED}
    with pytest.raises(
        ValueError, match=r"^num_sequences 1000000, 3000000 sequences in all, .*GiB"
    ):
        emsjax.generate(shallow_model(), PROMPTS, **options)
    options.pop("batch_size")
    with pytest.raises(ValueError, match=r"num_sequences .* must be at most 65536 sequences"):
        emsjax.init_state(shallow_model(), None, PROMPTS, **options)


@pytest.mark.parametrize("huge", [2**31, 10**30])
def test_a_batch_that_is_larger_than_the_prompts_is_as_large_as_they_are(huge, expected):
    assert tokens_of(PROMPTS, batch_size=huge) == expected
    found = emsjax.stream(shallow_model(), PROMPTS, batch_size=huge, max_new_tokens=NEW)
    assert {c.prompt: c.tokens.tolist() for c in found} == dict(enumerate(expected))
    out = emsjax.vanilla.generate(shallow_model(), PROMPTS, max_new_tokens=NEW, batch_size=huge)
    assert out.tokens.tolist() == expected


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (emsjax.PromptLookup(2**20), "match_length"),
        (emsjax.PromptLookup(max_draft_tokens=2**20), r"drafter\.max_draft_tokens"),
    ],
)
def test_lengths_beyond_the_models_positions_are_named_when_decoding_begins(drafter, name):
    for prompts in (PROMPTS, iter(PROMPTS)):
        with pytest.raises(ValueError, match=f"^{name} must be at most 64, not 1048576"):
            emsjax.stream(shallow_model(), prompts, drafter, batch_size=1, max_new_tokens=NEW)


def test_a_draft_model_takes_no_more_of_a_policys_limit_than_the_model_has_positions(expected):
    policy = emsjax.BassHeuristic(limit=2**30)
    drafter = emsjax.DraftModel(shallow_model(ffn_dim=32))
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, policy, max_new_tokens=NEW)
    assert out.tokens.tolist() == expected
    assert out.stats.accepted_histogram.shape[1] == 65


NUMBERS = [np.int8, np.uint8, np.int16, np.int64, np.uint64, np.array, jnp.int8, jnp.uint32]


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.__name__)
def test_integers_of_any_type_are_counts(kind):
    four, model = kind(4), shallow_model()
    whole = emsjax.generate(
        model, PROMPTS, emsjax.PromptLookup(1, 4), emsjax.FixedLength(4), max_new_tokens=4
    )
    drafter = emsjax.PromptLookup(kind(1), four)
    options = {"max_new_tokens": four, "batch_size": four, "time_budget_s": kind(60)}
    out = emsjax.generate(model, PROMPTS, drafter, emsjax.FixedLength(four), **options)
    assert out.tokens.tolist() == whole.tokens.tolist()
    limits = [kind(2), kind(4), 3]
    assert emsjax.generate(model, PROMPTS, max_new_tokens=limits).lengths.tolist() == [2, 4, 3]
    assert emsjax.BassHeuristic(four, four, four, four) == emsjax.BassHeuristic(4, 4, 4, 4)
    size = 4 if isinstance(four, np.ndarray | jax.Array) else four  # arrays cannot be keys
    assert emsjax.BatchSizeTable({size: four}).draft_lengths.tolist() == [4]
    sampled = [
        emsjax.generate(
            model,
            PROMPTS,
            max_new_tokens=2,
            sampling=emsjax.Sampling(one, one, 0.9),
            key=jax.random.key(0),
        )
        for one in (four, 4)
    ]
    assert sampled[0].tokens.tolist() == sampled[1].tokens.tolist()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, jnp.bfloat16, jnp.float16])
def test_real_numbers_of_any_type_are_settings(kind):
    half = kind(0.5)
    assert emsjax.Sampling(half, 0, half).expand(2) == emsjax.Sampling(0.5, 0, 0.5).expand(2)
    costs = emsjax.StepCosts.of({1: half}, half, half, half)
    assert costs == emsjax.StepCosts.of({1: 0.5}, 0.5, 0.5, 0.5)
    emsjax.Goodput(costs, half, half, half, least_gain=half).check_settings()


@pytest.mark.parametrize(
    "ids",
    [{7, 9}, frozenset({7, 9}), (9, 7), [7, 7, 9], np.array([7, 9], np.uint8), jnp.array([7, 9]),
     [np.int8(7), jnp.int32(9)], dict.fromkeys([7, 9]).keys()],
    ids=lambda ids: type(ids).__name__,
)  # fmt: skip
def test_end_tokens_are_any_iterable_of_ids(ids):
    model = shallow_model()
    free = emsjax.generate(model, PROMPTS, max_new_tokens=30)
    out = emsjax.generate(model, PROMPTS, max_new_tokens=30, eos_token_ids=ids)
    again = emsjax.generate(model, PROMPTS, max_new_tokens=30, eos_token_ids=iter(ids))
    for row, tokens in enumerate(free.tokens):
        ends = np.flatnonzero(np.isin(tokens, [7, 9]))
        length = ends[0] + 1 if ends.size else 30
        assert out.lengths[row] == again.lengths[row] == length


@pytest.mark.parametrize("ids", [{7, 200}, "7", b"7", {7: 9}, [7.0], [True], [[7]], -1, None])
def test_other_end_tokens_are_named(ids, monkeypatch):
    if ids is None:  # those of the model's own configuration
        model, name = shallow_model(), r"model\.config\.eos_token_ids"
        config = model.config.changed()
        object.__setattr__(config, "eos_token_id", (5, 200))  # as another library's may have
        monkeypatch.setattr(model, "config", config)
    else:
        model, name = shallow_model(), "eos_token_ids"
    with pytest.raises(ValueError, match=rf"(^| ){name} must be"):
        emsjax.generate(model, PROMPTS, max_new_tokens=NEW, eos_token_ids=ids)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, 1.0, "0", True, None])
def test_a_seed_that_jax_would_shorten_is_refused(seed):
    with pytest.raises(ValueError, match=r"^seed must be"):
        distillation.continuations(shallow_model(), PROMPTS, 1, new_tokens=2, seed=seed)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (emsjax.Sampling(top_k=50), r"sampling\.top_k has no effect .* set sampling\.temperature"),
        (emsjax.Sampling(top_p=0.9), r"sampling\.top_p has no effect"),
        (emsjax.Sampling([0, 1, 1], [5, 5, 0]), r"sampling\.top_k of prompts\[0\] has no effect"),
        (emsjax.Sampling([1, 1, 0], 0, [1, 1, 0.5]), r"sampling\.top_p of prompts\[2\] has no"),
    ],
)
def test_settings_without_effect_are_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        tokens_of(PROMPTS, sampling=sampling, key=jax.random.key(0))


def test_one_setting_for_all_prompts_applies_to_those_that_sample(expected):
    options = {"max_new_tokens": NEW, "key": jax.random.key(0), "num_sequences": 2}
    mixed = emsjax.Sampling([0, 1.0, 0], top_k=5, top_p=0.9)
    each = emsjax.Sampling([0, 1.0, 0], [0, 5, 0], [1, 0.9, 1])
    found = [
        emsjax.generate(shallow_model(), PROMPTS, sampling=sampling, **options).tokens.tolist()
        for sampling in (mixed, each)
    ]
    assert found[0] == found[1]
    assert found[0][:2] + found[0][4:] == [expected[0]] * 2 + [expected[2]] * 2


def test_greedy_copies_of_a_sequence_are_refused():
    with pytest.raises(ValueError, match=r"^num_sequences is 2, .*Sampling\(temperature=0\.8\)"):
        tokens_of(PROMPTS, num_sequences=2)
    with pytest.raises(ValueError, match=r"^num_sequences is 2, "):
        emsjax.stream(
            shallow_model(), iter(PROMPTS), None, None, NEW, num_sequences=2, batch_size=1
        )
    out = emsjax.generate(
        shallow_model(), PROMPTS, max_new_tokens=1, num_sequences=2, **NEARLY_GREEDY
    )
    assert len(out.tokens) == 2 * len(PROMPTS)


@pytest.mark.usefixtures("unchecked_annotations")
def test_text_is_no_boolean():
    model = shallow_model()
    calls = {
        "search_generated": call(emsjax.PromptLookup, search_generated=[0.5]),
        "unpad_inputs": call(emsjax.vanilla.generate, model, PROMPTS, unpad_inputs="no"),
        "unpad_kv_cache": call(emsjax.vanilla.generate, model, PROMPTS, unpad_kv_cache=0),
        "layout": call(emsjax.init_state, model, None, PROMPTS, max_new_tokens=NEW, layout=False),
        "pad_inputs": call(emsjax.decode.layout.Layout, "false"),
        "free": call(emsjax.BatchSizeTable.from_profile, {}, free="false"),
    }
    for name, make in calls.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            make()


PROFILE = {
    "format": "emsjax profile 2",
    "costs": {"row_ms": {"1": 1.0}, "token_ms": 0.0, "reread": 0.0, "draft_ms": {"1": 0.5}},
    "table": {"acceptance_rate": 0.8, "lengths": {"1": 4}},
    "settings": {"max_draft_tokens": 4, "context": 9},
}


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("costs", "row_ms", {"1": "fast"}, r"row_ms\[1\] must be finite and above 0"),
        ("costs", "row_ms", {"one": 1.0}, "a key of row_ms must be an integer"),
        ("costs", "row_ms", [1.0], "row_ms must be a mapping, not list"),
        ("costs", "token_ms", None, "token_ms must be finite and at least 0, not None"),
        ("costs", "reread", "0.5", "reread must be finite"),
        ("costs", "draft_ms", {"1": float("inf")}, r"draft_ms\[1\] must be finite"),
        ("table", "lengths", {"1": 2.5}, r"table\.lengths\[1\] must be an integer"),
        ("table", "lengths", {}, r"table\.lengths is empty"),
        ("table", "acceptance_rate", 80, r"table\.acceptance_rate must be in 0\.\.1"),
        ("settings", "max_draft_tokens", 10**30, r"settings\.max_draft_tokens must be at most"),
        ("settings", "context", "9", r"settings\.context must be at least 0"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_profile_is_read_by_kind(part, name, value, message, in_file, tmp_path):
    def changed(**values):
        profile = PROFILE | {part: PROFILE[part] | values}
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(profile))
        return path if in_file else profile

    assert emsjax.BatchSizeTable.from_profile(changed(), free=True).sizes.tolist() == [1]
    readers = [lambda profile: emsjax.BatchSizeTable.from_profile(profile, free=True)]
    if part == "costs":
        readers += [emsjax.StepCosts.from_profile, emsjax.Goodput.from_profile]
    for read in readers:
        with pytest.raises(ValueError, match=rf"profile(\.json)?: {message}"):
            read(changed(**{name: value}))


def test_what_is_no_profile_is_named():
    for other in (3, None, b"profile.json", [PROFILE]):
        with pytest.raises(ValueError, match=r"^profile must be a file or the contents of one"):
            emsjax.StepCosts.from_profile(other)
    with pytest.raises(ValueError, match=r"^acceptance must be in 0\.\.1"):
        emsjax.BatchSizeTable.from_profile(PROFILE, "most")


@pytest.mark.parametrize("vocab_size", [None, 50, 200])
def test_a_command_uses_the_vocabulary_that_the_models_share(monkeypatch, vocab_size):
    from emsjax.cli import drafting
    from emsjax.cli.main import make_parser

    draft = shallow_model(vocab_size=vocab_size or 61, ffn_dim=32)
    monkeypatch.setattr("emsjax.models.checkpoint.load", lambda *args, **options: draft)
    monkeypatch.setattr(drafting, "feature_drafter_of", lambda options: None)
    given = ["--model", "t", "--input", "i", "--output", "o", "--dtype", "float32"]
    given += ["--drafter", "model", "--draft-model", "d", "--max-draft-tokens", "2"]
    given += ["--branches", "1"]
    options = make_parser("0").parse_args(["generate", *given])
    drafter = drafting.load_models(options, shallow_model().config, 58, 20)[1]
    assert drafter.vocab_size == {None: None, 50: 50, 200: 58}[vocab_size]


@pytest.mark.parametrize("devices", [["cpu"], "cpu", {0: 1}, [None], jax.local_devices()[:1] * 2])
def test_other_devices_are_named(devices):
    with pytest.raises(ValueError, match=r"^devices"):
        emsjax.stream(shallow_model(), PROMPTS, None, None, NEW, batch_size=1, devices=devices)
