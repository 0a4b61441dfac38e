"""`emsjax bench peers`: both libraries output the same tokens, draft, and are timed alike."""

import dataclasses
import itertools
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jsonl import assert_error

import emsjax
from emsjax.benchmarks import peers, workloads
from emsjax.cli.main import main
from emsjax.demo import DRAFT, TARGET

NEW = 24


@pytest.fixture(autouse=True, scope="module")
def short():
    """Decode little, in a dtype without near-ties."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "PROMPT_TOKENS", (40, 60))
        patch.setattr(workloads.ScriptedModels, "dtype", jnp.float32)
        yield


@pytest.fixture(scope="module")
def subject(short):
    return peers.scripted_subject("tiny", "tiny", NEW)


def run(subject, generate, method, batch):
    prompts = subject.prompts(batch)
    np.testing.assert_array_equal(generate(method, prompts, NEW), subject.expected(prompts))


def test_this_library_outputs_the_text_and_drafts_most_of_it(subject, monkeypatch):
    outputs, generate = [], emsjax.generate

    def spy(*args, **options):
        outputs.append(generate(*args, **options))
        return outputs[-1]

    monkeypatch.setattr(peers, "generate", spy)
    for method in subject.methods:
        run(subject, peers.ours(subject), method, 3)
    plain, *drafted = (out.stats.mean_acceptance_length for out in outputs)
    assert plain == 1
    assert min(drafted) > 1.5


def test_transformers_outputs_the_text_and_drafts_most_of_it(subject, monkeypatch):
    pytest.importorskip("torch")
    made, to_torch = [], peers.to_torch
    monkeypatch.setattr(peers, "to_torch", lambda *args: made.append(to_torch(*args)) or made[-1])
    generate = peers.theirs(subject)
    target, draft = made
    calls = {"target": 0, "draft": 0}

    def count(name):
        calls[name] += 1

    target.register_forward_hook(lambda *_: count("target"))
    draft.register_forward_hook(lambda *_: count("draft"))
    run(subject, generate, "plain", 3)
    assert calls == {"target": NEW, "draft": 0}
    run(subject, generate, "prompt-lookup", 1)
    assert calls["target"] < NEW + NEW / 2
    calls["target"] = 0
    run(subject, generate, "draft-model", 1)
    assert calls["target"] < NEW / 2
    assert calls["draft"] <= peers.DRAFT_TOKENS * (calls["target"] + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_handed_over_unchanged(dtype):
    torch = pytest.importorskip("torch")
    model = emsjax.OPT.from_pretrained(DRAFT, dtype=dtype)
    peer = peers.to_torch(model, "cpu")
    from transformers import OPTForCausalLM

    expected = OPTForCausalLM.from_pretrained(DRAFT, dtype=getattr(torch, dtype)).state_dict()
    assert peer.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in peer.state_dict().items())


def bench(*options, model=("--shape", "tiny", "--draft-shape", "tiny"), sizes="1,2"):
    sizes = ("--max-new-tokens", 6, "--batch-sizes", sizes, "--repeats", 1)
    return main([str(a) for a in ("bench", "peers", *model, *sizes, *options)])


def runs_of(path):
    return {
        (entry["batch"], run["library"], run["method"]): run
        for entry in json.loads(path.read_bytes())["entries"]
        for run in entry["runs"]
    }


def test_the_command_compares_all_that_can_be_compared(tmp_path, capsys):
    pytest.importorskip("torch")
    output = tmp_path / "peers.json"
    assert bench("--output", output) == 0
    runs = runs_of(output)
    ours = set(itertools.product((1, 2), ("emsjax",), peers.METHODS))
    theirs = {(1, "transformers", method) for method in peers.METHODS}
    assert runs.keys() == ours | theirs | {(2, "transformers", "plain")}
    assert all(run["identical"] for run in runs.values())
    assert {"torch", "transformers"} <= json.loads(output.read_bytes())["versions"].keys()
    capsys.readouterr()
    before = output.read_bytes()
    assert bench("--output", output) == 0  # nothing is left to do
    assert output.read_bytes() == before
    assert capsys.readouterr().out.count("plain") == 2
    assert bench("--output", output, "--repeats", 2) == 2


def test_without_torch_only_this_library_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    output = tmp_path / "peers.json"
    assert bench("--output", output, sizes="1") == 0
    assert "transformers is left out: torch is not installed" in capsys.readouterr().err
    assert {library for _, library, _ in runs_of(output)} == {"emsjax"}


def test_a_gpu_that_torch_cannot_use_is_an_error(subject, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match="without support for this GPU"):
        peers.theirs(subject)


def test_a_trained_model_decodes_the_first_prompts_of_a_file(tmp_path):
    data, output = tmp_path / "articles.jsonl", tmp_path / "peers.json"
    texts = ["import os\nimport sys\n", "def f(x):\n    return f(x)\n", "class A:\n"]
    lines = [json.dumps({"id": i, "article": text}) for i, text in enumerate(texts)]
    data.write_text("\n".join(lines))
    trained = ("--model", DRAFT, "--data", data, "--dtype", "float32")
    assert bench("--draft-model", DRAFT, "--output", output, model=trained, sizes="1") == 0
    assert all(run["identical"] for run in runs_of(output).values())
    assert (1, "emsjax", "draft-model") in runs_of(output)
    output.unlink()
    assert bench("--output", output, model=trained, sizes="1") == 0
    assert (1, "emsjax", "draft-model") not in runs_of(output)


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (("--model", str(TARGET)), (), "--model needs --data"),
        (("--model", str(TARGET), "--data", "x"), ("--draft-shape", "tiny"), "needs --shape"),
        (("--shape", "small"), (), "--shape must be one of"),
        (("--shape", "tiny"), ("--draft-model", "x"), "--draft-model needs --model"),
        (("--shape", "tiny"), ("--dtype", "float32"), "--dtype needs --model"),
        (("--shape", "tiny"), ("--output", "none/x.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_named(model, options, error, capsys):
    assert_error(capsys, bench(*options, model=model), error)


def test_results_of_another_run_are_refused_before_weights_are_read(tmp_path, monkeypatch, capsys):
    data, output = tmp_path / "one.jsonl", tmp_path / "peers.json"
    data.write_text('{"id": 1, "article": "x = 1"}')
    output.write_text('{"settings": {}, "entries": []}')
    monkeypatch.setattr(emsjax.OPT, "from_pretrained", None)  # fails when it is called
    code = bench("--output", output, model=("--model", TARGET, "--data", data), sizes="1")
    assert_error(capsys, code, "holds results with other settings")


def test_too_few_prompts_are_named(tmp_path, capsys):
    data = tmp_path / "one.jsonl"
    data.write_text('{"id": 1, "article": "x = 1"}')
    code = bench(model=("--model", TARGET, "--data", data))
    assert_error(capsys, code, "--batch-sizes: 2 is more than the 1 prompts")


def test_a_speed_leaves_out_prefill_and_the_first_round(monkeypatch):
    """A call takes 3 s and 1/4 s per token; the first call of a kind takes a minute more."""
    clock, called = [0.0], set()
    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock[0])
    prompts = [np.arange(3), np.arange(5)]

    def generate(method, prompts, count):
        clock[0] += 3 + count / 4 + 60 * ((method, count) not in called)
        called.add((method, count))
        return [np.arange(count)] * len(prompts)

    model = peers.Subject(None, None, lambda batch: prompts, 9)
    entry = peers.measure(model, {"emsjax": generate}, 2, 3, lambda line: None)
    plain, lookup = entry["runs"]
    assert plain["tokens_per_s"] == lookup["tokens_per_s"] == 2 * 8 / (8 / 4)
    assert plain["prefill_s"] == 3.25
    assert len(plain["seconds"]["9"]) == 3
    assert entry["mean_prompt_tokens"] == 4


def test_wrong_tokens_are_noticed(subject):
    generate = peers.ours(subject)

    def wrong(method, prompts, count):
        return [tokens + (method == "prompt-lookup") for tokens in generate(method, prompts, count)]

    entry = peers.measure(subject, {"emsjax": wrong}, 3, 1, lambda line: None)
    assert {run["method"]: run["identical"] for run in entry["runs"]} == {
        "plain": True,
        "prompt-lookup": False,
        "draft-model": True,
    }
    assert not peers.all_identical({"entries": [entry]})


def test_sequences_end_with_their_end_token(subject):
    assert peers.up_to_end(np.array([5, 2, 1, 1]), (2,)).tolist() == [5, 2]
    assert peers.up_to_end(np.array([5, 4]), (2,)).tolist() == [5, 4]
    assert dataclasses.replace(subject, draft_model=None).methods == ("plain", "prompt-lookup")
