"""`stream` yields the completions of `generate` as they finish and reads prompts as needed."""

import dataclasses
import gc
import itertools
import threading
import time

import jax
import numpy as np
import pytest
from toy import NEARLY_GREEDY, VOCAB, ragged_prompts, shallow_model

import emsjax
from emsjax.decode.step import decode_loop
from emsjax.engine.adapt import make_run
from emsjax.ray.background import Ask, Background

PROMPT_SIXTEENTHS = (6, 16)  # of the row counts of steps that feed prompts
LENGTHS = [5, 9, 20, 3, 14, 1, 2, 33, 7, 11, 4]
SAMPLED = {"sampling": emsjax.Sampling(0.9), "key": jax.random.key(5)}


def assert_same(completions, whole, num_sequences=1):
    """Check that each sequence occurs once and equals what `generate` returns for it."""
    completions = sorted(completions, key=lambda c: (c.prompt, c.sequence))
    places = [c.prompt * num_sequences + c.sequence for c in completions]
    assert places == list(range(len(whole.lengths)))
    for i, completion in enumerate(completions):
        length = whole.lengths[i]
        np.testing.assert_array_equal(completion.tokens, whole.tokens[i, :length])
        np.testing.assert_allclose(completion.logprobs, whole.logprobs[i, :length], atol=2e-5)
        assert completion.finish_reason == whole.finish_reasons[i]
        assert completion.num_steps == whole.stats.num_steps[i]
        assert completion.num_drafted == whole.stats.num_drafted[i]
        assert completion.num_accepted == whole.stats.num_accepted[i]
        histogram = whole.stats.accepted_histogram[i]
        np.testing.assert_array_equal(completion.accepted_histogram, histogram)
        assert completion.error is None


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_completions_equal_those_of_generate(lazy, num_sequences):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.PromptLookup(match_length=1)
    options = {"max_new_tokens": 9, "num_sequences": num_sequences, **SAMPLED}
    whole = emsjax.generate(model, prompts, drafter, **options)
    source = iter(prompts) if lazy else prompts
    completions = emsjax.stream(model, source, drafter, batch_size=4, **options)
    assert_same(completions, whole, num_sequences)


def test_an_iterator_is_read_as_slots_become_free():
    model, read = shallow_model(), itertools.count()
    taken = 0

    def prompts():
        for _ in itertools.count():
            next(read)
            yield [3 + taken % (VOCAB - 3), 5]

    completions = emsjax.stream(model, prompts(), max_new_tokens=5, batch_size=3, max_len=16)
    for _ in range(30):
        next(completions)
        taken += 1
        # Prompts are decoding, staged or finished and not yet yielded; one more is read ahead.
        assert int(repr(read)[6:-1]) <= taken + 4 * 3 + 1
    completions.close()


def test_a_prompt_of_an_iterator_that_cannot_be_decoded_is_refused():
    model, good = shallow_model(), ragged_prompts([5, 9, 20])
    prompts = [good[0], [], good[1], [VOCAB], [4] * 40, good[2], [4] * 60]
    whole = emsjax.generate(model, good, max_new_tokens=9)
    given = emsjax.stream(model, iter(prompts), max_new_tokens=9, batch_size=2, max_len=40)
    refused, done = [], []
    for completion in given:
        (refused if completion.finish_reason == "refused" else done).append(completion)
    assert {c.prompt: c.error for c in refused} == {
        1: "prompts[1] is empty: at least one token id is needed",
        3: f"prompts[3] holds the token id {VOCAB}, outside 0..{VOCAB - 1}",
        4: "prompts[4] has 40 tokens and max_new_tokens is 9: together more than max_len 40",
        6: "prompts[6] has 60 tokens and max_new_tokens is 9: 68 positions are needed, but the "
        "model's limit max_position_embeddings is 64",
    }
    tokens = {c.prompt: c.tokens.tolist() for c in done}
    expected = [whole.tokens[i, : whole.lengths[i]].tolist() for i in range(3)]
    assert tokens == dict(zip((0, 2, 5), expected, strict=True))
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        emsjax.stream(model, prompts, max_new_tokens=9, batch_size=2)


def test_a_prompt_that_cannot_be_read_at_all_is_refused():
    class Deleted:
        def __array__(self, *args, **options):
            raise RuntimeError("deleted")

    model = shallow_model()
    found = list(emsjax.stream(model, iter([[3, 4], Deleted()]), max_new_tokens=3, batch_size=2))
    assert {c.prompt: c.error for c in found} == {
        0: None,
        1: "prompts[1] cannot be read as token ids: deleted",
    }


def test_caches_of_an_iterator_are_not_much_longer_than_the_model_allows(monkeypatch):
    found = []
    monkeypatch.setattr(
        emsjax.streaming,
        "make_slots",
        lambda run, requests, *_: found.append(requests),
    )
    model = shallow_model(max_position_embeddings=2048)
    emsjax.stream(model, iter([]), max_new_tokens=3, batch_size=2)
    assert 2049 <= found[0].max_len <= 2049 + 64


def test_refused_prompts_are_yielded_at_once():
    endless = ([VOCAB] for _ in itertools.count())
    options = {"max_new_tokens": 4, "batch_size": 2, "max_len": 16, "num_sequences": 2}
    options |= NEARLY_GREEDY
    refused = emsjax.stream(shallow_model(), endless, **options)
    found = [(c.prompt, c.sequence, c.finish_reason) for c in itertools.islice(refused, 4)]
    assert found == [(place, n, "refused") for place in (0, 1) for n in (0, 1)]


def test_prompts_read_before_the_iterator_raises_are_completed_first():
    model, good = shallow_model(), ragged_prompts([5, 9, 20, 4])

    def prompts():
        yield from good
        raise OSError("the disk is gone")

    whole = emsjax.generate(model, good, max_new_tokens=9)
    done = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        done.extend(emsjax.stream(model, prompts(), max_new_tokens=9, batch_size=3))
    assert caught.value.__notes__ == ["raised by the iterator of prompts after 4 of them"]
    # `extend` keeps the completions from before the error.
    assert_same(done, whole)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"max_len": 1}, "max_len must be at least 2, not 1"),
        ({"max_len": 5}, "max_new_tokens must be below 5, the tokens of a prompt and its"),
        ({"max_new_tokens": [3, 4]}, "max_new_tokens must be one value or one per prompt"),
        ({"sampling": emsjax.Sampling(0.9)}, "key is needed"),
        ({"attention_implementation": "own"}, "own"),
        ({"devices": []}, "devices must not be empty"),
        ({"devices": iter([])}, "devices must not be empty"),
        ({"devices": 3}, "devices must be a sequence of devices, not int"),
        ({"max_len": 5, "max_new_tokens": [6]}, "max_new_tokens must be below 5, .*, not 6"),
        *(
            (
                {"drafter": emsjax.PromptLookup(references=[[3, 4]] * count)},
                "a drafter that holds data for each prompt needs a sequence",
            )
            for count in (1, 3)
        ),
    ],
)
def test_invalid_arguments_are_rejected_before_any_prompt_is_read(options, error):
    def prompts():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match=error):
        emsjax.stream(
            shallow_model(), prompts(), **({"batch_size": 2, "max_new_tokens": 5} | options)
        )


@pytest.mark.parametrize("lazy", [True, False])
def test_a_stream_that_is_closed_early_leaves_no_threads(lazy):
    model = shallow_model()
    endless = ([3 + n % 50, 4] for n in itertools.count())
    prompts = endless if lazy else list(itertools.islice(endless, 500))
    before = threading.active_count()
    devices = jax.local_devices()[:1]
    completions = emsjax.stream(
        model, prompts, max_new_tokens=4, batch_size=2, max_len=16, devices=devices
    )
    next(completions)
    gc.disable()  # so that cleanup does not depend on the collector
    try:
        completions.close()
        end = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        gc.enable()
    assert threading.active_count() == before


def test_an_error_on_a_device_ends_the_stream():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)

    class Broken(emsjax.PromptLookup):
        def propose(self, *args):
            raise RuntimeError("broken drafter")

    jax.tree_util.register_pytree_node_class(Broken)
    completions = emsjax.stream(
        model,
        prompts,
        Broken(),
        max_new_tokens=5,
        batch_size=2,
        devices=jax.local_devices()[:1],
    )
    with pytest.raises(RuntimeError, match="broken drafter"):
        next(completions)


def test_every_call_of_an_engine_equals_stream():
    """Calls repeat prompts and differ in every option that a call may set."""
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.DraftModel(shallow_model(ffn_dim=32), 3)
    engine = emsjax.Engine(model, drafter, batch_size=2, max_len=64)
    sampled = {"sampling": emsjax.Sampling(0.9, 20), "key": jax.random.key(3)}
    calls = [
        (prompts, {"max_new_tokens": 9}),
        (prompts[::-1], {"max_new_tokens": 5, "num_sequences": 2, **sampled}),
        (prompts, {"max_new_tokens": 7, "eos_token_ids": (5, 9, 11)}),
        (prompts, {"max_new_tokens": 9}),
    ]
    found = []
    for asked, options in calls:
        of_engine = list(engine.stream(asked, **options))
        of_stream = list(emsjax.stream(model, asked, drafter, batch_size=2, **options))
        assert told(of_engine) == told(of_stream)
        found.append(told(of_engine))
        assert told(engine.stream(iter(asked), **options)) == told(of_stream)
    assert found[0] == found[3]
    assert len(found[1]) == 2 * len(prompts)


def told(completions):
    return {
        (c.prompt, c.sequence): (c.tokens.tolist(), c.finish_reason, c.num_accepted)
        for c in completions
    }


def test_an_engine_compiles_its_loop_once():
    engine = emsjax.Engine(shallow_model(), emsjax.PromptLookup(3), batch_size=3, max_len=64)
    list(engine.stream(ragged_prompts(LENGTHS), max_new_tokens=5))
    before = decode_loop._cache_size()
    list(engine.stream(ragged_prompts(LENGTHS[::-1], seed=1), max_new_tokens=6))
    assert decode_loop._cache_size() == before


def test_an_engine_serves_one_call_at_a_time_and_drops_a_closed_call():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    engine = emsjax.Engine(model, batch_size=2, max_len=64)
    unread = engine.stream(prompts, max_new_tokens=9)
    with pytest.raises(ValueError, match="serve another call"):
        engine.stream(prompts, max_new_tokens=9)
    unread.close()
    first = engine.stream(prompts, max_new_tokens=9)
    next(first)
    with pytest.raises(ValueError, match="serve another call"):
        engine.stream(prompts, max_new_tokens=9)
    first.close()
    whole = told(emsjax.stream(model, prompts, batch_size=2, max_new_tokens=9))
    assert told(engine.stream(prompts, max_new_tokens=9)) == whole


def test_an_engine_on_devices_waits_for_the_threads_of_a_closed_call():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    engine = emsjax.Engine(model, batch_size=2, max_len=64, devices=jax.local_devices()[:1])
    whole = told(emsjax.stream(model, prompts, batch_size=2, max_new_tokens=9))
    for _ in range(3):
        first = engine.stream(prompts, max_new_tokens=9)
        next(first)
        first.close()
        assert told(engine.stream(prompts, max_new_tokens=9)) == whole


def test_an_engine_rejects_a_drafter_that_holds_data_for_each_prompt():
    drafter = emsjax.PromptLookup(references=ragged_prompts(LENGTHS))
    with pytest.raises(ValueError, match=r"holds data for each prompt .* use emsjax\.stream"):
        emsjax.Engine(shallow_model(), drafter, batch_size=2)


def test_an_engine_rejects_prompts_that_do_not_fit_before_any_work():
    engine = emsjax.Engine(shallow_model(), batch_size=2, max_len=16)
    with pytest.raises(ValueError, match="more than max_len 16"):
        engine.stream(ragged_prompts([9]), max_new_tokens=8)
    assert len(list(engine.stream(ragged_prompts([9]), max_new_tokens=7))) == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_an_engine_and_slots_in_a_thread_yield_pieces(in_background):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS[:3])
    options = {"max_new_tokens": 20, "eos_token_ids": ()}
    whole = emsjax.generate(model, prompts, **options)
    joined, pieces = [[] for _ in prompts], []

    def add(piece):
        assert piece.finish_reason is None
        pieces.append(piece)
        joined[piece.prompt] += piece.tokens.tolist()

    if in_background:
        held = Background(make_run(model, None), batch_size=2, max_len=64, piece_steps=5, **options)
        asks = [Ask(prompt, on_piece=add) for prompt in prompts]
        found = [one for (one,) in held.submit(asks).result(60)]
        held.close()
    else:
        engine = emsjax.Engine(model, batch_size=2, max_len=64)
        every = list(engine.stream(prompts, partial=True, **options))
        found = [one for one in every if one.finish_reason is not None]
        for one in every:
            if one.finish_reason is None:
                add(one)
    assert_same(found if not in_background else numbered(found), whole)
    assert joined == whole.tokens.tolist()
    most = 5 if in_background else 8  # one token per step
    assert max(len(piece.tokens) for piece in pieces) == most


def numbered(found):
    """The completions of a batch, in whose slots prompts have other numbers."""
    return [dataclasses.replace(one, prompt=i) for i, one in enumerate(found)]
