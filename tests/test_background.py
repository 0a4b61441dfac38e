"""Slots in a thread stay busy over batches, and a prompt's tokens do not depend on its batch."""

import concurrent.futures
import math
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy import VOCAB, ragged_prompts, shallow_model

import emsjax
from emsjax.engine.adapt import make_run
from emsjax.ray import background, check_installed
from emsjax.ray.background import Ask, Background
from emsjax.ray.rows import asks_of, key_number, refused, with_completions

SAMPLED = {"sampling": emsjax.Sampling(0.9), "key": jax.random.key(5)}
WAIT = 60  # seconds
LENGTHS = [5, 9, 20, 3, 14, 1, 2, 7]


@pytest.fixture
def slots():
    """Makes `Background`s, which are closed after the test."""
    made = []

    def make(drafter=None, **options):
        defaults = {"batch_size": 3, "max_len": 62, "max_new_tokens": 9, "eos_token_ids": ()}
        made.append(Background(make_run(shallow_model(), drafter), **(defaults | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_batches_have_the_tokens_of_generate_whatever_their_order(slots, num_sequences):
    prompts, lookup = ragged_prompts(LENGTHS), emsjax.PromptLookup(match_length=1)
    options = {**SAMPLED, "num_sequences": num_sequences}
    whole = emsjax.generate(
        shallow_model(), prompts, lookup, max_new_tokens=9, eos_token_ids=(), **options
    )
    held = slots(lookup, **options)
    asked = [Ask(prompt, key_number=i) for i, prompt in enumerate(prompts)]
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    futures = [(held.submit([asked[i] for i in part]), part) for part in (order[:3], order[3:])]
    for future, part in futures:
        for i, sequences in zip(part, future.result(WAIT), strict=True):
            assert [one.sequence for one in sequences] == list(range(num_sequences))
            for one in sequences:
                place = i * num_sequences + one.sequence
                np.testing.assert_array_equal(one.tokens, whole.tokens[place])
                assert one.num_steps == whole.stats.num_steps[place]


def test_slots_that_become_free_take_prompts_of_the_next_batch(slots):
    held = slots(max_new_tokens=2)
    first = held.submit([Ask([5, 6], 60), Ask([7], 2)])
    later = [held.submit([Ask([5 + n], 2)] * 2) for n in range(5)]
    done = concurrent.futures.wait([first, *later], WAIT, concurrent.futures.FIRST_COMPLETED).done
    assert first not in done
    for one in later:
        one.result(WAIT)
    # The long sequence takes at least as many steps as are left after its neighbours' batches.
    assert len(first.result(WAIT)[0][0].tokens) == 60


def test_a_batch_that_arrives_while_others_decode_does_not_wait_for_their_end(slots, monkeypatch):
    """Without `NOT_YET` the stream would wait for this batch, or end before it."""
    monkeypatch.setattr("emsjax.engine.slots.WAITING_STEPS", 1)
    held, seen = slots(), []
    first = held.submit([Ask([5, 6], 60)])
    finish = background.Batch.finish_prompt
    monkeypatch.setattr(
        background.Batch, "finish_prompt", lambda batch: (seen.append(batch), finish(batch))
    )
    while not held.arrived.empty():  # it has been taken
        time.sleep(0.001)
    second = held.submit([Ask([7], 1)])
    second.result(WAIT)
    first.result(WAIT)
    assert [batch.future for batch in seen] == [second, first]


def test_idle_slots_complete_what_arrives_later_once(slots):
    held = slots()
    for n in range(3):
        (sequences,) = held.submit([Ask([5 + n, 6], 4)]).result(WAIT)
        assert [len(one.tokens) for one in sequences] == [4]
        time.sleep(0.5)  # several looks for the next prompt
    assert held.submit([]).result(WAIT) == []
    assert not held.waiting


def test_a_cancellation_does_not_end_the_slots(slots):
    held = slots()
    for asks in ([Ask([5, 6], 4)], []):
        assert not held.submit(asks).cancel()
    (sequences,) = held.submit([Ask([7], 3)]).result(WAIT)
    assert [len(one.tokens) for one in sequences] == [3]


def test_malformed_prompts_are_refused_and_the_others_continue(slots):
    held = slots(sampling=emsjax.Sampling(min_new_tokens=3))
    asks = [Ask([]), Ask([5, 6]), Ask([VOCAB]), Ask([5] * 54, 9), Ask([5], 0), Ask([5], 2)]
    rows = [sequences[0] for sequences in held.submit([*asks, Ask([5], 4)]).result(WAIT)]
    assert [one.finish_reason for one in rows] == ["refused", "length"] + ["refused"] * 4 + [
        "length"
    ]
    assert [len(one.tokens) for one in rows] == [0, 9, 0, 0, 0, 0, 4]
    assert all(rows[i].error.startswith("the prompt") for i in (0, 2, 3))
    assert "max_len" in rows[3].error
    assert "max_new_tokens" in rows[4].error
    assert "at least 3" in rows[5].error


def test_an_error_of_decoding_fails_all_batches_and_later_ones(slots, monkeypatch):
    held = slots()

    def broken(*arguments):
        raise FloatingPointError("broken")

    monkeypatch.setattr("emsjax.engine.slots.Slots.decode", broken)
    with pytest.raises(FloatingPointError, match="broken"):
        held.submit([Ask([5])]).result(WAIT)
    with pytest.raises(RuntimeError, match="no longer"):
        held.submit([Ask([5])])


def test_impossible_options_are_errors_before_any_prompt():
    with pytest.raises(ValueError, match="num_sequences"):
        Background(make_run(shallow_model(), None), 2, batch_size=2, max_len=64, max_new_tokens=4)


def test_keys_come_from_the_index_or_else_from_a_digest_of_the_id():
    assert key_number({"index": 7, "id": "a"}, drawn=True) == 7
    numbers = {key_number({"id": one}, drawn=True) for one in ("a", "b", 1, "1")}
    assert len(numbers) == 4
    # Stable over versions: results of a run that is resumed depend on it.
    assert key_number({"id": "a"}, drawn=True) == 12989651798172117775
    for index in (-1, 1.5, 2**64, "x"):
        with pytest.raises(ValueError, match="index"):
            key_number({"index": index}, drawn=True)


def test_large_key_numbers_have_keys_of_their_own(slots):
    held = slots(**SAMPLED)
    numbers = [3, 2**32 + 3, 2**33 + 3, 2**64 - 1, 3]
    rows = held.submit([Ask([5, 6], key_number=n) for n in numbers]).result(WAIT)
    tokens = [tuple(sequences[0].tokens.tolist()) for sequences in rows]
    assert tokens[0] == tokens[4]
    assert len(set(tokens)) == 4


def test_rows_are_prompts_messages_or_tokens():
    class Tokenizer:
        chat_template, name_or_path = "x", "y"

        def __call__(self, texts, add_special_tokens):
            ids = [[len(text), int(add_special_tokens)] for text in texts]
            return type("Encoded", (), {"input_ids": ids})

        def apply_chat_template(self, messages, **options):
            return "".join(message["content"] for message in messages)

    rows = [
        {"prompt": "abc", "messages": None, "max_new_tokens": 5},
        {"messages": [{"role": "user", "content": "ab"}], "index": 9},
        {"tokens": [4, 5], "id": "a"},
        {"prompt": "", "tokens": None},
        {"prompt": "abc", "tokens": [4]},
        {"prompt": "abc", "messages": [{"role": "user", "content": "ab"}]},
        {"prompt": None},
        {"prompt": "abc", "index": -1},
    ]
    asks = asks_of(rows, Tokenizer(), drawn=False)
    assert asks[0] == Ask([3, 1], 5)
    assert asks[1] == Ask([2, 0], key_number=9)
    assert asks[2] == Ask([4, 5], key_number=key_number({"id": "a"}, drawn=True))
    for ask, part in zip(
        asks[3:], ["empty", "or else", "not both", "string", "index"], strict=True
    ):
        assert part in ask


def test_integers_that_nulls_made_floats_are_integers_again():
    rows = [
        {"tokens": [4], "index": 5.0, "max_new_tokens": 3.0},
        {"tokens": [4], "index": math.nan, "id": 1.0, "max_new_tokens": math.nan},
        {"tokens": [4], "index": 2.0**53 - 1},
        {"tokens": [4], "index": 2.0**53},
        {"tokens": [4], "index": 2.0**53, "max_new_tokens": math.inf},
        {"tokens": [4], "id": -(2.0**60)},
        {"tokens": [4], "index": 1, "max_new_tokens": math.inf},
        {"tokens": [4], "index": 0.5},
    ]
    asks = asks_of(rows, None, drawn=True)
    number = key_number({"id": 1}, drawn=True)
    assert asks[:3] == [Ask([4], 3, 5), Ask([4], None, number), Ask([4], None, 2**53 - 1)]
    assert type(asks[0].max_new_tokens) is type(asks[0].key_number) is int
    for ask, name in zip(asks[3:7], ["index", "index", "id", "max_new_tokens"], strict=True):
        assert ask.startswith(f"{name} ")
        assert "lost digits" in ask
    assert asks[7].startswith("index must be an integer")


def test_rows_without_a_number_are_refused_only_where_tokens_are_drawn():
    rows = [{"tokens": [4], "index": None, "id": None}, {"tokens": [4], "index": math.nan}]
    rows += [{"tokens": [4]}, {"tokens": [4], "index": None, "id": 0}]
    assert asks_of(rows, None, drawn=False)[:3] == [Ask([4])] * 3
    asks = asks_of(rows, None, drawn=True)
    assert all("neither an index nor an id" in ask for ask in asks[:3])
    assert asks[3] == Ask([4], key_number=key_number({"id": 0}, drawn=True))


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_the_columns_do_not_depend_on_the_rows_of_a_batch(num_sequences):
    pa = pytest.importorskip("pyarrow")
    rows = [refused("why", num_sequences) for _ in range(3)]
    tables = [
        with_completions(pa.table({"id": pa.array(range(n), pa.int64())}), rows[:n], num_sequences)
        for n in (0, 3)
    ]
    assert tables[0].schema == tables[1].schema
    assert [table.num_rows for table in tables] == [0, 3 * num_sequences]
    assert ("sequence" in tables[0].column_names) == (num_sequences > 1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, None])
def test_an_impossible_tensor_parallelism_is_an_error_before_any_file_is_read(number):
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="tensor_parallel must be"):
        emsjax.ray.Completer("no folder", batch_size=2, tensor_parallel=number)


def test_importing_emsjax_imports_no_ray():
    code = "import sys, emsjax; print(sorted({'ray', 'pyarrow'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"emsjax\[ray\]"):
        emsjax.ray.Completer  # noqa: B018
    with pytest.raises(ImportError, match=r"emsjax\[ray\]"):
        check_installed()
    with pytest.raises(AttributeError, match="Other"):
        emsjax.ray.Other  # noqa: B018
