"""The engine for specdec_bench: concurrent requests share slots, and their steps are told apart."""

import asyncio
import itertools

import jax
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model

import emsjax
from emsjax.benchmarks import specdec_bench
from emsjax.benchmarks.specdec_bench import NO_END, SpecDecEngine
from emsjax.demo import DRAFT, EAGLE3, TARGET
from emsjax.ray.background import Background

GREEDY, LENGTHS, NEW = {"temperature": 0}, [5, 9, 20, 3, 14], [9, 4, 12, 7, 1]
WAIT = 120  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the toy model, whose slots compile quickly."""
    path = tmp_path_factory.mktemp("toy")
    shallow_model().save_pretrained(path)
    return path


@pytest.fixture
def make():
    """Makes engines, which are stopped after the test."""
    made = []

    def engine(model, slots=3, sampling=GREEDY, *arguments, **options):
        options = {"dtype": "float32", "max_seq_len": 60, **options}
        made.append(SpecDecEngine(str(model), slots, sampling, *arguments, **options))
        return made[-1]

    yield engine
    for one in made:
        one.stop()


def outputs_of(engine, prompts, new, end_id=NO_END):
    """What the engine returns for requests that are all awaited at the same time."""

    async def all_of_them():
        requests = zip(prompts, new, itertools.count())
        runs = [engine.run(list(map(int, p)), n, end_id, i, turn_id=0) for p, n, i in requests]
        return await asyncio.wait_for(asyncio.gather(*runs), WAIT)

    return asyncio.run(all_of_them())


def tokens_of(output):
    (chunks,) = output["output_ids"]
    return list(itertools.chain(*chunks))


def check_steps(output):
    """Each step has its tokens, their number and its time."""
    (chunks,), (lengths,), times = (
        output[n] for n in ("output_ids", "chunk_lengths", "token_times")
    )
    assert lengths == list(map(len, chunks))
    assert sum(lengths) == len(tokens_of(output))
    assert min(lengths) >= 1
    assert len(times) == len(chunks) + 1
    assert all(a <= b for a, b in itertools.pairwise(times))


def test_requests_of_the_embedded_pair_share_slots_and_have_the_tokens_of_plain_decoding(
    make, monkeypatch
):
    engine, calls = make(TARGET, 3, GREEDY, "DRAFT_TARGET", str(DRAFT), 4), []
    prompts = [np.arange(n) % 7 * 31 + 40 for n in LENGTHS]
    decode = emsjax.engine.slots.Slots.decode
    monkeypatch.setattr(
        "emsjax.engine.slots.Slots.decode",
        lambda slots, *given: (calls.append(slots), decode(slots, *given))[1],
    )
    outputs = outputs_of(engine, prompts, NEW)
    greedy = {"max_new_tokens": NEW, "eos_token_ids": ()}
    plain = emsjax.generate(engine.model, prompts, **greedy)
    drafted = emsjax.generate(engine.model, prompts, engine.drafter, **greedy)
    for i, output in enumerate(outputs):
        assert tokens_of(output) == plain.tokens[i][: NEW[i]].tolist()
        check_steps(output)
        assert len(output["chunk_lengths"][0]) == drafted.stats.num_steps[i]
    assert max(itertools.chain(*(one["chunk_lengths"][0] for one in outputs))) > 1
    # One by one, the sequences would need at least as many calls as they have steps.
    assert len(calls) < drafted.stats.num_steps.sum()
    assert len(set(calls)) == 1
    thread = engine.slots.thread
    assert thread.is_alive()
    engine.stop()
    assert not thread.is_alive()


@pytest.mark.parametrize("algorithm", ["NONE", None, "NGRAM"])
def test_steps_gain_one_token_or_what_prompt_lookup_finds(make, folder, algorithm):
    engine = make(folder, 2, GREEDY, algorithm, None, 5, max_matching_ngram_size=1)
    prompts = ragged_prompts([4, 9, 6])
    greedy = {"max_new_tokens": 44, "eos_token_ids": ()}
    outputs = outputs_of(engine, prompts, [44] * 3)
    plain = emsjax.generate(shallow_model(), prompts, **greedy)
    lookup = emsjax.PromptLookup(1, 5, search_generated=True) if algorithm == "NGRAM" else None
    accepted = emsjax.generate(shallow_model(), prompts, lookup, **greedy).stats.accepted_histogram
    for i, output in enumerate(outputs):
        assert tokens_of(output) == plain.tokens[i].tolist()
        check_steps(output)
        *lengths, last = output["chunk_lengths"][0]
        counts = np.bincount(lengths, minlength=accepted.shape[1] + 1)[1:]
        rest = accepted[i] - counts  # the last step may have accepted more than there was room for
        assert rest.sum() == rest.max() == 1
        assert rest.argmax() + 1 >= last
    longest = max(max(one["chunk_lengths"][0]) for one in outputs)
    assert (longest > 1) == (algorithm == "NGRAM")


def test_the_end_token_ends_a_request_and_is_left_out(make, folder):
    prompts = ragged_prompts([5, 9, 3])
    free = {"max_new_tokens": 16, "eos_token_ids": ()}
    whole = emsjax.generate(shallow_model(), prompts, **free).tokens
    end = int(whole[0][6])
    cut = [row[: np.flatnonzero(row == end)[0]] if end in row else row for row in whole]
    for algorithm in ("NONE", "NGRAM"):
        engine = make(folder, 3, GREEDY, algorithm, None, 5, max_matching_ngram_size=1)
        outputs = outputs_of(engine, prompts, [16] * 3, end)
        for output, expected in zip(outputs, cut, strict=True):
            assert tokens_of(output) == expected.tolist()
            check_steps(output)
        with pytest.raises(ValueError, match=f"end_id must be {end}.* not -1"):
            outputs_of(engine, prompts[:1], [4])


def test_sampled_requests_have_keys_of_their_own(make, folder):
    prompts = [np.array([5, 6, 7])] * 3
    engine = make(folder, 2, {"temperature": 0.9, "top_k": 40})
    outputs = outputs_of(engine, prompts, [12] * 3)
    options = {"sampling": emsjax.Sampling(0.9, top_k=40), "key": jax.random.key(0)}
    drawn = emsjax.generate(
        shallow_model(), prompts, max_new_tokens=12, eos_token_ids=(), **options
    )
    assert [tokens_of(one) for one in outputs] == drawn.tokens.tolist()
    assert len(set(map(tuple, drawn.tokens.tolist()))) == 3
    assert make(folder, 2, {}).get_serving_config()["sampling"] == {"temperature": 1.0}


def test_compilation_is_no_part_of_the_first_request(make, folder, monkeypatch):
    futures, submit = [], Background.submit

    def spy(slots, asks):
        assert all(future.done() for future in futures)  # what compiles has ended
        futures.append(submit(slots, asks))
        return futures[-1]

    monkeypatch.setattr(Background, "submit", spy)
    outputs_of(make(folder), [[5, 6, 7]], [4])
    assert len(futures) == 2


def test_errors_reach_those_who_wait(make, folder, monkeypatch):
    engine = make(folder)
    for prompt, new, message in (([], 4, "empty"), ([5] * 58, 4, "max_len"), ([5], 0, "max_new")):
        with pytest.raises(ValueError, match=message):
            outputs_of(engine, [prompt], [new])
    outputs_of(engine, [[5, 6]], [2])

    def broken(*arguments):
        raise FloatingPointError("broken")

    monkeypatch.setattr("emsjax.engine.slots.Slots.decode", broken)
    with pytest.raises(FloatingPointError, match="broken"):
        outputs_of(engine, [[5, 6], [7]], [4, 4])
    with pytest.raises(RuntimeError, match="no longer decode"):
        outputs_of(engine, [[5]], [4])
    engine.stop()
    assert not engine.slots.thread.is_alive()


def test_numbers_that_are_not_finite_are_an_error(make):
    engine = make(DRAFT)
    table = engine.model.embed_tokens.embedding
    table[...] = table[...].at[9].set(np.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        outputs_of(engine, [[9, 9]], [4])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("MEDUSA",), {}, "speculative_algorithm must be one of NONE, NGRAM"),
        (("DRAFT_TARGET",), {}, "needs draft_model_dir"),
        (("EAGLE3", str(DRAFT)), {}, "holds a model, which is not EAGLE3"),
        (("DRAFT_TARGET", str(EAGLE3)), {}, "holds a drafter of the kind Eagle3, which is not"),
        (("DFLASH", str(EAGLE3)), {}, "holds a drafter of the kind Eagle3, which is not DFLASH"),
        ((), {"mem_fraction_static": 0.8}, "engine_args: unknown mem_fraction_static"),
        ((), {"sampling": {"beam_width": 4}}, "sampling_kwargs: unknown beam_width"),
    ],
)
def test_what_cannot_be_measured_is_named_before_weights_are_read(
    make, monkeypatch, arguments, options, message
):
    monkeypatch.setattr("emsjax.benchmarks.specdec_bench.load", None)  # fails when it is called
    sampling = options.pop("sampling", GREEDY)
    with pytest.raises(ValueError, match=message):
        make(TARGET, 2, sampling, *arguments, **options)


def test_other_engines_arguments_are_ignored_and_eagle3_drafts(make):
    others = {"moe_expert_parallel_size": 2, "trust_remote_code": False, "tokenizer_path": "x"}
    others["speculative_num_draft_tokens"] = None  # as their runner gives it
    engine = make(TARGET, 2, GREEDY, "EAGLE3", str(EAGLE3), 2, 1, **others)
    assert type(engine.drafter).__name__ == "Eagle3"
    assert engine.drafter.max_draft_tokens == 2
    assert engine.get_serving_config()["draft_tokens"] == 2
    assert "moe_expert_parallel_size" not in engine.get_serving_config()


def test_a_block_has_one_token_more_than_are_drafted(make, monkeypatch):
    monkeypatch.setitem(specdec_bench.FOLDERS, "DFLASH", specdec_bench.FOLDERS["EAGLE3"])
    options = {"speculative_num_draft_tokens": 5}
    assert make(TARGET, 2, GREEDY, "DFLASH", str(EAGLE3), **options).drafter.max_draft_tokens == 4
    assert make(TARGET, 2, GREEDY, "EAGLE3", str(EAGLE3), **options).drafter.max_draft_tokens == 3
