"""The README's claims, and the demo with the embedded models."""

import json
import re
import tomllib

import examples
import jax.numpy as jnp
import numpy as np
import pytest
from examples import README, ROOT

import emsjax
from emsjax.cli.main import main
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import row_buckets
from emsjax.demo import EAGLE3, demo
from emsjax.engine.output import PaddingRatio

COMPARED = ["prompt lookup", "draft model", "EAGLE-3", "lookup, 4 samples"]  # in the demo
MAX_WORDS = 1000
MAX_DATA_BYTES = 32_000_000  # of an installed package


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= MAX_WORDS


def test_every_file_that_the_readme_names_exists():
    text = README.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    paths = re.findall(r"`((?:emsjax|pallas_kernels)/[\w/.]*)`", text)
    (decode,) = re.findall(r"^\| `emsjax/decode/` \|.*", text, re.MULTILINE)
    stages = [f"emsjax/decode/{name}" for name in re.findall(r"`(\w+\.py)`", decode)]
    assert links
    assert paths
    assert stages
    assert [path for path in (*links, *paths, *stages) if not (ROOT / path).exists()] == []


def test_the_example_gives_the_tokens_of_plain_decoding_in_fewer_calls(capsys):
    (example,) = examples.python_examples(README)
    names = {}
    examples.run(example, names)
    out, new = names["out"], names["out"].tokens.shape[1]
    plain = emsjax.generate(names["model"], names["prompts"], max_new_tokens=new)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    calls = (out.stats.model_calls, plain.stats.model_calls)
    assert f"model calls: {calls[0]}\n" in capsys.readouterr().out
    assert f"# {calls[0]}; plain decoding takes {calls[1]}\n" in README.read_text()


def test_the_step_in_the_figure_is_packed_as_drawn():
    assert row_buckets(4, max_rows_per_sample=8)[0] == 16
    rows = pack(jnp.array([5, 9, 4, 7]), jnp.array([4, 1, 2, 0]), 8)
    figure = README.read_text()
    for name, drawn in (("sample", rows.segment_ids), ("position", rows.positions)):
        (line,) = re.findall(rf"^{name} +([\d ]+)-", figure, re.MULTILINE)
        assert [int(number) for number in line.split()] == drawn[:7].tolist()


def test_the_package_data_is_small():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
        if path.suffix != ".pyc"
    }
    assert EAGLE3 / "model.safetensors" in files
    assert sum(path.stat().st_size for path in files) <= MAX_DATA_BYTES


def test_the_demo_reports_identical_tokens_and_saves_model_calls(tmp_path, capsys, monkeypatch):
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

    plain, lookup, draft, eagle3 = outputs[::2]
    assert plain.stats.mean_acceptance_length == 1
    assert lookup.stats.mean_acceptance_length >= 1.5
    assert draft.stats.mean_acceptance_length >= 2.0
    assert eagle3.stats.mean_acceptance_length >= draft.stats.mean_acceptance_length
    for out in (lookup, draft, eagle3):
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
        padding = PaddingRatio(0.0, 0.0)
        stats = emsjax.Stats(ones, ones, ones, ones, ones, tokens, seconds, 4, padding)
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
