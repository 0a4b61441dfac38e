"""What the README and `emsjax demo` promise, on the embedded model."""

import json
import re

import examples
import jax.numpy as jnp
import numpy as np
import pytest
from examples import README

import emsjax
from emsjax.cli.main import main
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import row_buckets
from emsjax.demo import demo
from emsjax.engine.output import PaddingRatio
from emsjax.policies.costs import FORMAT

COMPARED = ["prompt lookup", "draft model", "lookup, 4 samples"]  # in the demo


@pytest.mark.usefixtures("few_row_counts", "two_row_counts")
def test_the_examples_give_the_tokens_of_plain_decoding(capsys, tmp_path, monkeypatch):
    costs = {"row_ms": {16: 1.0, 64: 1.5}, "token_ms": 0.0, "reread": 0.0, "draft_ms": {1: 0.1}}
    (tmp_path / "profile.json").write_text(json.dumps({"format": FORMAT, "costs": costs}))
    monkeypatch.chdir(tmp_path)
    shown = examples.python_examples(README)
    assert len(shown) == 4
    names = {}
    for example in shown:
        examples.run(example, names)
        out = names["out"]
        assert out.stats.num_accepted.sum() > 0
        new = out.tokens.shape[1]
        plain = emsjax.generate(names["model"], names["prompts"], max_new_tokens=new)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert names["found"].output.stats.num_accepted.sum() > 0
    printed = capsys.readouterr().out
    for _, output in examples.blocks(README, "text"):
        assert output in printed
    plain = emsjax.generate(names["model"], names["prompts"], max_new_tokens=8)
    for i, length in enumerate(plain.lengths):
        said = plain.tokens[i, :length].tolist()
        assert f"{i} {said} {plain.finish_reasons[i]}\n" in printed


def test_the_step_in_the_figure_is_packed_as_drawn():
    assert row_buckets(4, max_rows_per_sample=8)[0] == 16
    rows = pack(jnp.array([5, 9, 4, 7]), jnp.array([4, 1, 2, 0]), 8)
    figure = README.read_text()
    for name, drawn in (("sample", rows.segment_ids), ("position", rows.positions)):
        (line,) = re.findall(rf"^{name} +([\d ]+)-", figure, re.MULTILINE)
        assert [int(number) for number in line.split()] == drawn[:7].tolist()


def test_the_row_counts_are_those_of_the_library():
    *fewer, most = row_buckets(24, max_rows_per_sample=8)
    told = f"compiled sizes: {', '.join(map(str, fewer))} or {most} for 24 samples and drafts of 7"
    assert told in " ".join(README.read_text().split())


def test_the_demo_says_identical_and_saves_model_calls(tmp_path, capsys, monkeypatch):
    outputs = []

    def remember(*args, generate=emsjax.generate, **options):
        timed = len(outputs) % 2  # a second call with the same arguments
        outputs.append(outputs[-1] if timed else generate(*args, **options))
        return outputs[-1]

    monkeypatch.setattr(demo, "generate", remember)
    methods = [method for method in demo.METHODS if "samples" not in method.name]
    monkeypatch.setattr(demo, "METHODS", methods)  # sampling has tests of its own
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(json.loads(demo.PROMPTS.read_text())[:3]))
    monkeypatch.setattr(demo, "PROMPTS", prompts)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 40)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    for method in demo.METHODS:
        verdict = "identical" if method.name in COMPARED else "reference"
        assert re.search(rf"^{method.name} .* {verdict}$", shown, re.MULTILINE)

    plain, lookup, draft = outputs[::2]
    assert plain.stats.mean_acceptance_length == 1
    assert lookup.stats.mean_acceptance_length >= 1.5
    assert draft.stats.mean_acceptance_length >= 2.0
    for out in (lookup, draft):
        assert out.stats.num_steps.sum() < plain.stats.num_steps.sum() / 1.5
        np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("field", ["tokens", "lengths"])
@pytest.mark.parametrize("wrong", [None, *COMPARED])
def test_the_demo_fails_if_one_token_differs(capsys, monkeypatch, wrong, field):
    calls = []

    def constant(model, prompts, drafter, num_sequences=1, **options):
        method = demo.METHODS[len(calls) // 2].name
        calls.append(method)
        ones = np.ones(len(prompts) * num_sequences, np.int32)
        tokens = np.ones((len(ones), 4), np.int32)
        seconds = np.ones(len(ones), np.float32)
        stats = emsjax.Stats(ones, ones, ones, ones, tokens, seconds, 4, PaddingRatio(0.0, 0.0))
        fields = {"tokens": tokens, "lengths": 3 * ones}
        if method == wrong:
            fields[field] = fields[field].copy()
            fields[field].flat[-1] += 1
        logprobs = np.zeros(tokens.shape, np.float32)
        reasons = ["length"] * len(ones)
        return emsjax.GenerateOutput(
            **fields, logprobs=logprobs, finish_reasons=reasons, stats=stats
        )

    monkeypatch.setattr(demo, "generate", constant)
    assert main(["demo"]) == (0 if wrong is None else 1)
    shown = capsys.readouterr().out
    for name in COMPARED:
        verdict = "different" if name == wrong else "identical"
        assert re.search(rf"^{name} .* {verdict}$", shown, re.MULTILINE)
