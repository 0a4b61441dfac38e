"""`emsjax distil --kind`: drafters that read the target's hidden states."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jsonl import TEXTS, assert_error
from test_cli_distil import arguments as arguments_of_draft_models

import emsjax
from emsjax import distillation
from emsjax.cli import distil as command
from emsjax.cli.main import main

LINES = [{"text": TEXTS[i % 5] * (1 + i % 4)} for i in range(14)]
KINDS = {
    "eagle3": (emsjax.Eagle3, ["--unroll", 2, "--draft-vocab-size", 90, "--taps", "0,1"]),
    "block": (
        emsjax.BlockDrafter,
        ["--block-size", 3, "--layers", 1, "--markov-rank", 4, "--confidence-head"],
    ),
}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def arguments(kind, target, data, output, *options):
    run = arguments_of_draft_models(target, data, output, "--kind", kind, *options)
    for option in ("--layers", "--width"):  # the first of each, which are those of draft models
        del run[run.index(option) : run.index(option) + 2]
    return run


class StoppedError(Exception):
    pass


FIGURES = {
    "acceptance_rate": 0.25,
    "by_position": [0.5, 0.125],
    "mean_acceptance_length": 1.5,
    "tokens_per_s": 8.0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_resumed_compared_and_saved(
    kind, tiny_model, data, tmp_path, monkeypatch, capsys
):
    load, options = KINDS[kind]
    folder, measured = tmp_path / "drafter", []

    def evaluate(target, draft, prompts, *, draft_tokens, new_tokens):
        measured.append(draft)
        if len(measured) == 2:
            raise StoppedError
        return FIGURES

    monkeypatch.setattr(distillation, "evaluate", evaluate)
    run = arguments(kind, tiny_model, data, folder, *options, "--compare-with", tiny_model)
    with pytest.raises(StoppedError):
        main(run)  # after the last checkpoint
    assert main(run) == 0
    assert [type(draft) for draft in measured[2:]] == [type(None), load, load, emsjax.OPT]
    target = emsjax.OPT.from_pretrained(tiny_model, dtype=jnp.float32)
    drafter = load.from_pretrained(folder, target)
    for one, other in zip(jax.tree.leaves(drafter), jax.tree.leaves(measured[4]), strict=True):
        np.testing.assert_array_equal(one, other)
    record = json.loads((folder / command.RECORD).read_bytes())
    settings, results = record["settings"], record["results"]
    assert (settings["kind"], settings["decay"], settings["width"]) == (kind, 0.8, None)
    assert len(results["losses"]) == 6
    card = (folder / "README.md").read_text()
    assert f"emsjax.{load.__name__}.from_pretrained(" in card
    assert f'"compared" the draft model {tiny_model}' in card
    for text in (card, capsys.readouterr().out):
        assert "| held-out texts | plain | before | after | compared |" in text
        assert "| at draft position 2 |  | 0.125 | 0.125 | 0.125 |" in text
    if kind == "block":
        assert drafter.network.confidence_head is not None
    else:
        assert (len(drafter.draft_ids), drafter.taps) == (90, (0, 1))


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("eagle3", ["--width", 8], "--width is for --kind draft-model, not for --kind eagle3"),
        ("eagle3", ["--layers", 2], "--layers is for --kind draft-model or --kind block, not"),
        ("eagle3", ["--anchors", 2], "--anchors is for --kind block, not for --kind eagle3"),
        ("eagle3", ["--start", "random"], "--start is for --kind draft-model, not"),
        ("draft-model", ["--taps", "1"], "--taps is for --kind eagle3 or --kind block, not"),
        ("eagle3", ["--taps", "0,2"], "--taps must lie in 0..1, the target's layers, not 2"),
        (
            "block",
            ["--draft-vocab-size", 301],
            "--draft-vocab-size must be at most 300, the target's vocabulary, not 301",
        ),
        (
            "eagle3",
            ["--share-head", "--draft-vocab-size", 90],
            "--share-head needs all 300 tokens to be drafted, not --draft-vocab-size 90",
        ),
        ("block", ["--share-head"], "--share-head is for --kind eagle3, not for --kind block"),
        ("eagle3", ["--decay", 0], "--decay must be above 0 and at most 1, not 0.0"),
        ("block", ["--block-size", 1], "--block-size must be in 2..1024, not 1"),
        (
            "block",
            ["--block-size", 4, "--draft-tokens", 4],
            "--draft-tokens must be at most 3, as a block of --block-size 4 drafts, not 4",
        ),
        ("block", ["--markov-head", "rnn"], "--markov-head needs --markov-rank"),
        ("block", ["--compare-with", "./none"], "--compare-with: none is not a folder"),
        ("block", ["--sequence-length", 65], "--sequence-length must be in 2..64, not 65"),
    ],
)
def test_what_does_not_suit_a_kind_is_named_before_any_work(
    tiny_model, data, tmp_path, capsys, kind, options, error
):
    run = arguments(kind, tiny_model, data, tmp_path / "drafter", *options)
    if "--width" in options or "--layers" in options:  # they were removed instead of the others
        run = [*arguments(kind, tiny_model, data, tmp_path / "drafter"), *map(str, options)]
    assert_error(capsys, main(run), error)
    assert not (tmp_path / "drafter").exists()
