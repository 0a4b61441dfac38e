"""What the README and `emsjax demo` promise, on the embedded model."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

import emsjax
from emsjax.cli import main
from emsjax.demo import demo
from emsjax.packing import pack, row_buckets

README = Path(__file__).parents[1] / "README.md"


def test_the_example_gives_the_tokens_of_plain_decoding(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(example, names)
    assert capsys.readouterr().out.strip()
    plain = emsjax.generate(names["model"], names["prompts"], max_new_tokens=32)
    np.testing.assert_array_equal(names["out"].tokens, plain.tokens)


def test_the_step_in_the_figure_is_packed_as_drawn():
    assert row_buckets(4, max_rows_per_sample=8)[0] == 16
    rows = pack(jnp.array([5, 9, 4, 7]), jnp.array([4, 1, 2, 0]), 8)
    figure = README.read_text()
    for name, drawn in (("sample", rows.segment_ids), ("position", rows.positions)):
        (line,) = re.findall(rf"^{name} +([\d ]+)-", figure, re.MULTILINE)
        assert [int(number) for number in line.split()] == drawn[:7].tolist()


def test_the_demo_says_identical_and_saves_model_calls(capsys, monkeypatch):
    outputs = []

    def remember(*args, generate=emsjax.generate, **options):
        outputs.append(generate(*args, **options))
        return outputs[-1]

    monkeypatch.setattr(emsjax, "generate", remember)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "identical" in shown
    assert "prompt lookup" in shown
    plain, lookup = outputs[0].stats, outputs[-1].stats
    assert plain.mean_acceptance_length == 1
    assert lookup.mean_acceptance_length >= 1.5
    assert lookup.num_steps.sum() < plain.num_steps.sum() / 1.5


def test_the_demo_fails_if_one_token_differs(capsys, monkeypatch):
    generate = emsjax.generate

    def flip_last_token(*args, drafter, **options):
        out = generate(*args, drafter=drafter, **options)
        tokens = np.array(out.tokens)
        tokens[-1, 0] ^= drafter is not None
        return SimpleNamespace(tokens=tokens, lengths=out.lengths, stats=out.stats)

    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(emsjax, "generate", flip_last_token)
    assert main(["demo"]) == 1
    assert "identical" not in capsys.readouterr().out
