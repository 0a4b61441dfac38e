"""The lm-evaluation-harness: results equal those of its backend for transformers."""

import functools
import json
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the harness is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

import emsjax
from emsjax.cli.main import main
from emsjax.embedded import DRAFT

pytest.importorskip("lm_eval")

import lm_eval
from evaluation_tasks import TASKS, TEXTS, write_tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from emsjax.evaluation import EmsjaxLM, model
from emsjax.evaluation.options import GenerationOptions, cut_before, read_options

# transformers and the harness warn of what they do themselves.
pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
PLAIN_CHAT += "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Other libraries rely on JAX's and numpy's default promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def target():
    return emsjax.from_pretrained(DRAFT, dtype=jnp.float32)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DRAFT)


@pytest.fixture
def lm(target, tokenizer):
    return EmsjaxLM(target, tokenizer)


def requests(kind, *arguments):
    return [Instance(kind, {}, given, 0) for given in arguments]


def evaluate(tasks, name, arguments, **options):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=name,
        model_args=f"pretrained={DRAFT},dtype=float32,{arguments}",
        tasks=list(TASKS),
        task_manager=manager,
        bootstrap_iters=0,
        **options,
    )


@pytest.fixture(scope="module")
def own_results(tasks):
    return evaluate(tasks, "emsjax", "drafter=prompt-lookup")


def test_results_equal_those_of_transformers(tasks, own_results):
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    import lm_eval.models  # noqa: F401 - registers the other backends

    theirs = evaluate(tasks, "hf", "", device="cpu", batch_size=4)
    for task in TASKS:
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert own_results["results"][task][metric] == pytest.approx(value, rel=1e-5)
    pairs = {
        task: [
            (one["resps"], other["resps"])
            for one, other in zip(
                own_results["samples"][task], theirs["samples"][task], strict=True
            )
        ]
        for task in TASKS
    }
    for own, other in pairs["local_choices"]:
        for [one], [expected] in zip(own, other, strict=True):
            assert one[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-4)
            assert one[1] == expected[1]
    for [[own]], [[other]] in pairs["local_rolling"]:
        assert own == pytest.approx(other, rel=1e-6)
    for own, other in pairs["local_generation"]:
        assert own == other
    assert len({own[0][0] for own, _ in pairs["local_generation"]}) > 3


def test_every_task_has_results_of_every_document(own_results):
    counted = {task: len(own_results["samples"][task]) for task in TASKS}
    assert counted == {"local_choices": 8, "local_rolling": 9, "local_generation": 8}
    for task in TASKS:
        values = [x for x in own_results["results"][task].values() if isinstance(x, float)]
        assert values
        assert all(map(math.isfinite, values))


def test_scores_of_texts_are_those_of_their_tokens(lm, tokenizer):
    """Spaces at a context's end belong to the continuation; a context may be empty."""
    pairs = [(TEXTS[0], " x = 1"), (TEXTS[0] + "  ", "x"), ("", TEXTS[1]), (TEXTS[0], " y")]
    answers = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    ids = tokenizer(TEXTS[0]).input_ids
    whole = tokenizer([TEXTS[0] + end for end in (" x = 1", "  x", " y")]).input_ids
    continuations = [one[len(ids) :] for one in whole]
    start = [tokenizer.bos_token_id]
    contexts = [ids, ids, start, ids]
    continuations.insert(2, tokenizer(TEXTS[1]).input_ids)
    out = emsjax.score(lm.model, contexts, continuations)
    np.testing.assert_allclose([total for total, _ in answers], out.totals, rtol=1e-5)
    assert [greedy for _, greedy in answers] == out.is_greedy.tolist()


def test_long_contexts_lose_their_beginning(target, tokenizer):
    lm = EmsjaxLM(target, tokenizer, max_length=20)
    context, continuation = tokenizer(TEXTS[1]).input_ids, tokenizer(" x = 1").input_ids
    [(total, _)] = lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    kept = context[-(21 - len(continuation)) :]
    out = emsjax.score(target, [kept], [continuation])
    assert total == pytest.approx(out.totals[0], rel=1e-6)
    with pytest.raises(ValueError, match="a continuation has 21 tokens: it must have 1 to 20"):
        lm._loglikelihood_tokens([(None, context, [5] * 21)], disable_tqdm=True)
    with pytest.raises(ValueError, match="max_gen_toks 20 leaves no room for a context"):
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 20})))


def test_portions_and_batch_sizes_do_not_change_scores(target, tokenizer, lm, monkeypatch):
    pairs = [(text[: 40 + 9 * i], text[40 + 9 * i :][:30]) for i, text in enumerate(TEXTS)]
    expected = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    monkeypatch.setattr(model, "PORTION", 3)
    found = EmsjaxLM(target, tokenizer, batch_size=2).loglikelihood(
        requests("loglikelihood", *pairs), disable_tqdm=True
    )
    for (one, greedy), (other, expected_greedy) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
        assert greedy == expected_greedy


def test_a_text_that_starts_with_the_start_token_gets_no_second_one(lm, tokenizer):
    tokenizer.add_bos_token = True
    start = tokenizer.bos_token
    assert lm.tok_encode(start + "a") == tokenizer.encode(start + "a", add_special_tokens=False)
    assert EmsjaxLM(lm.model, tokenizer, prefix_token_id=7).prefix_token_id == 7
    assert lm.prefix_token_id == tokenizer.bos_token_id
    assert lm.tokenizer_name.endswith("draft")


def test_answers_end_before_until_and_at_special_tokens(lm, tokenizer):
    given = {"max_gen_toks": 24}
    [plain] = lm.generate_until(requests("generate_until", (TEXTS[2], given)), disable_tqdm=True)
    end = plain[10:14]
    cut = {**given, "until": [end, "never"]}
    [answer] = lm.generate_until(requests("generate_until", (TEXTS[2], cut)), disable_tqdm=True)
    assert answer == plain[: plain.index(end)]
    assert lm._end_token_ids([tokenizer.pad_token, "a"]) >= {tokenizer.pad_token_id}
    assert lm._end_token_ids(["a"]) == {tokenizer.eos_token_id}


def test_sampled_answers_differ_between_requests_and_calls(lm):
    given = (TEXTS[2], {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0})
    asked = requests("generate_until", given, given)
    answers = [
        *lm.generate_until(asked, disable_tqdm=True),
        *lm.generate_until(asked, disable_tqdm=True),
    ]
    assert len(set(answers)) == 4


def test_conversations_become_text(lm, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tokenizer.chat_template = PLAIN_CHAT
    assert lm.apply_chat_template(messages) == "system: s\nuser: u\nassistant:"
    tokenizer.chat_template = NO_SYSTEM + PLAIN_CHAT
    assert lm.apply_chat_template(messages) == "user: u\nassistant:"
    assert lm.chat_template(True) == NO_SYSTEM + PLAIN_CHAT


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GenerationOptions((), 256)),
        ({"until": "a", "max_new_tokens": 3}, GenerationOptions(("a",), 3)),
        ({"do_sample": False, "temperature": 0.7}, GenerationOptions((), 256)),
        ({"temperature": 0.7, "top_p": 0.9}, GenerationOptions((), 256, 0.7, 0, 0.9)),
        ({"num_beams": 1, "until": ["a", "b"]}, GenerationOptions(("a", "b"), 256)),
    ],
)
def test_generation_options_are_read(given, expected):
    assert read_options(given, 256) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 2}, "num_beams: 2 is not supported"),
        ({"length_penalty": 1}, "length_penalty: 1 is not supported"),
        ({"do_sample": True}, "do_sample needs a temperature above 0"),
        ({"do_sample": "yes"}, "do_sample must be True or False"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"max_gen_toks": 0}, "max_gen_toks must be at least 1"),
    ],
)
def test_generation_options_that_are_not_supported_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        read_options(given, 256)


def test_text_is_cut_before_the_first_end():
    assert cut_before("one two three", ["three", "", "two"]) == "one "
    assert cut_before("one", ["two"]) == "one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("dtype=float32", "must name a model"),
        (f"pretrained={DRAFT},parallelize=True", "parallelize is no argument"),
        (f"pretrained={DRAFT},drafter=model", "needs a draft_model"),
        (f"pretrained={DRAFT},drafter=other", "drafter must be one of none, prompt-lookup, model"),
        (f"pretrained={DRAFT},max_draft_tokens=3", "max_draft_tokens needs a drafter"),
    ],
)
def test_wrong_model_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_model("emsjax").create_from_arg_string(arguments, {"device": None})


def test_model_arguments_choose_the_drafter_and_the_batch_size():
    base = f"pretrained={DRAFT},dtype=float32,"
    load = get_model("emsjax").create_from_arg_string
    found = load(base + f"draft_model={DRAFT},max_draft_tokens=3", {"batch_size": "8"})
    assert isinstance(found.drafter, emsjax.DraftModel)
    assert (found.drafter.max_draft_tokens, found.batch_size) == (3, 8)
    found = load(base + "drafter=prompt-lookup", {"batch_size": "auto"})
    assert isinstance(found.drafter, emsjax.PromptLookup)
    assert found.batch_size is None


def test_the_command_prints_and_writes_results(tasks, tmp_path, capsys, own_results):
    output = tmp_path / "results.json"
    given = ["eval", "--model", str(DRAFT), "--dtype", "float32", "--include-path", str(tasks)]
    given += ["--tasks", "local_choices,local_generation", "--drafter", "prompt-lookup"]
    assert main([*given, "--batch-size", "8", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(output.read_bytes())
    for task, metric in (("local_choices", "acc,none"), ("local_generation", "exact_match,none")):
        assert written["results"][task][metric] == own_results["results"][task][metric]
        assert task in printed
    assert "emsjax eval" in written["command"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "no_such_task"], "--tasks: there is no task no_such_task"),
        (["--tasks", "a", "--include-path", "missing"], "--include-path: missing is not a folder"),
        (
            ["--tasks", "a", "--draft-model", str(DRAFT)],
            "--draft-model is an option of --drafter auto",
        ),
    ],
)
def test_errors_of_the_command_are_one_line(options, message, capsys, monkeypatch):
    no_defaults = functools.partial(TaskManager, include_defaults=False)  # they are many files
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", no_defaults)
    assert main(["eval", "--model", str(DRAFT), *options]) == 2
    assert message in capsys.readouterr().err
