"""The recipe of the embedded pair: its data, its evaluation, and a short run."""

import dataclasses
import json
import platform
import re
import shlex
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from examples import ROOT

import emsjax
from emsjax.cli.main import make_parser
from emsjax.demo import corpus, recipe
from emsjax.embedded import HELD_OUT, PROMPTS

LENGTHS = [1, 7, 8, 9, 12, 13, 40]


@pytest.fixture
def library(tmp_path):
    """A small library folder, with a copy and a file that is not UTF-8."""
    folder = tmp_path / "library"
    (folder / "site-packages").mkdir(parents=True)
    for index in range(60):
        lines = (f"def f{index}_{line}(x):\n    return x + {line}\n" for line in range(700))
        (folder / f"module_{index}.py").write_text("".join(lines))
    (folder / "a_copy.py").write_bytes((folder / "module_0.py").read_bytes())
    (folder / "latin.py").write_bytes(b"# \xff\n")
    (folder / "site-packages" / "foreign.py").write_text("x = 1\n")
    return folder


def test_held_out_text_is_in_no_training_document(library, tmp_path):
    texts = corpus.read_library(library)
    assert len(texts) == 60
    assert len(set(texts.values())) == 60

    info = corpus.prepare(tmp_path / "out", vocab_size=300, library=library)
    data = corpus.load(tmp_path / "out")
    total = info["train_bytes"] + info["held_out_bytes"]
    assert info["held_out_files"] + info["train_files"] == 60
    assert 0.05 <= info["held_out_bytes"] / total < 0.07
    documents = {
        document.tobytes() for document in np.split(data.train, np.flatnonzero(data.train == 0) + 1)
    }
    assert len(documents) == info["train_files"] + 1  # and nothing after the last end token
    assert not documents & {ids.tobytes() for ids in data.held_out.values()}


@pytest.fixture
def held_out(tmp_path, monkeypatch):
    """Modules that were held out from the embedded target, one of which another Python has."""
    names = ["module_3.py", "module_7.py", "of_another_version.py"]
    (tmp_path / "held_out.json").write_text(json.dumps(names))
    monkeypatch.setattr(corpus, "HELD_OUT", tmp_path / "held_out.json")
    return names[:2]


@pytest.mark.parametrize("embedded", [True, False])
def test_texts_for_distillation_are_split_as_those_of_the_target(
    library, tmp_path, monkeypatch, held_out, embedded
):
    if embedded:
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
        recipe.main(["texts", "--output", str(tmp_path / "out")])
    else:
        corpus.write_texts(tmp_path / "out", library, embedded=False)
    train, prompts = (
        [json.loads(line)["text"] for line in (tmp_path / "out" / name).open()]
        for name in ("train.jsonl", "held-out.jsonl")
    )
    texts = corpus.read_library(library)
    if embedded:
        names = held_out
    else:
        names = corpus.choose_held_out({name: len(text.encode()) for name, text in texts.items()})
    assert "".join(prompts) == "".join(texts.pop(name) for name in sorted(names))
    assert len(prompts) > len(names)
    assert all(len(passage) >= 8000 and passage.endswith("\n") for passage in prompts)
    assert sorted(train) == sorted(texts.values())


def test_the_eagle3_drafter_is_trained_by_the_command_of_its_record(
    library, tmp_path, monkeypatch, held_out
):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    started = []
    monkeypatch.setattr(recipe.subprocess, "run", lambda command, check: started.append(command))
    recipe.main(["eagle3", "--output", str(tmp_path)])
    record = json.loads((ROOT / "benchmarks" / "h200-distil-eagle3.json").read_bytes())
    commands = started[0][3:], shlex.split(record["command"])[1:]
    ours, recorded = (vars(make_parser("").parse_args(arguments)) for arguments in commands)
    paths = {name for name, value in ours.items() if str(value).startswith("/")}
    assert paths == {"target", "data", "held_out_data", "compare_with", "output"}
    assert ours["data"].is_file()
    passages = [json.loads(line)["text"] for line in ours["held_out_data"].open()]
    assert "".join(passages) == "".join((library / name).read_text() for name in held_out)
    for name in ours.keys() - paths:
        assert ours[name] == recorded[name]
    for name in paths:
        assert Path(ours[name]).name == Path(recorded[name]).name


def test_a_text_shorter_than_a_passage_is_one():
    assert corpus.passages("ab\ncd", 8) == ["ab\ncd"]
    assert corpus.passages("ab\ncd\nef", 3) == ["ab\n", "cd\nef"]


def test_held_out_choice_does_not_depend_on_the_order_of_files():
    sizes = {f"package/module_{index}.py": 30_000 + index for index in range(50)}
    sizes["encodings/table.py"] = 30_000
    chosen = corpus.choose_held_out(sizes)
    assert chosen == corpus.choose_held_out(dict(reversed(sizes.items())))
    assert "encodings/table.py" not in chosen


def test_the_modules_that_no_model_was_trained_on_are_those_of_the_model_card():
    names = json.loads(HELD_OUT.read_text())
    card = (HELD_OUT.parent / "README.md").read_text()
    data = card[card.index("## Data") : card.index("## Tokenizer")]
    assert {*names} == {*re.findall(r"`([\w/]+\.py)`", data)}
    assert len(names) == 34
    assert {of["module"] for of in json.loads(PROMPTS.read_text())} <= {*names}
    if platform.python_version() == "3.11.7":
        texts = corpus.read_library()
        assert names == corpus.choose_held_out({x: len(texts[x].encode()) for x in texts})


def test_tokenizer_round_trips_any_text():
    tokenizer = corpus.train_tokenizer(["def f(x):\n    return x\n"] * 3, 280)
    text = "\tclass Ä:  # 漢字\n\n    x = [1 , 2]\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_windows_cover_the_stream_once_per_epoch():
    windows = recipe.TrainingWindows(np.arange(1000, dtype=np.uint16), window=8, batch=4)
    assert windows.per_epoch == 31
    epoch = np.concatenate([windows[step].tokens for step in range(windows.per_epoch)])
    assert (np.diff(epoch, axis=1) == 1).all()
    starts = epoch[:, 0]
    assert len(set(starts)) == 124
    assert len(set(starts % 8)) == 1
    later = windows[31].tokens
    assert set(later[:, 0] % 8) != set(starts % 8)
    np.testing.assert_array_equal(windows[0].tokens, epoch[:4])
    assert (windows[0].positions == np.arange(8)).all()
    assert (windows[0].segment_ids == 0).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_every_token_counts_once_in_evaluation(length):
    ids = np.arange(100, 100 + length)
    windows, counted = recipe.evaluation_windows(ids, window=8, stride=4)
    assert windows[:, 1:][counted].tolist() == ids.tolist()
    assert windows[0, 0] == corpus.END_ID
    assert (counted[1:, :4] == 0).all()


def test_held_out_bits_are_divided_by_bytes(library, tmp_path):
    corpus.prepare(tmp_path / "out", vocab_size=300, library=library)
    data = corpus.load(tmp_path / "out")
    model = recipe.build("draft", vocab_size=300, window=64)
    table = model.embed_tokens.embedding
    table[...] = jnp.zeros_like(table[...])  # every token is as likely
    tokens = sum(len(ids) for ids in data.held_out.values())
    bits = recipe.bits_per_byte(model, data, window=64)
    assert bits == pytest.approx(tokens * np.log2(300) / data.held_out_bytes, rel=1e-4)


def test_the_pair_is_trained_evaluated_and_stored(library, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "WINDOW", 32)
    monkeypatch.setattr(recipe, "BATCH", 2)
    build = recipe.build
    monkeypatch.setattr(recipe, "build", lambda name, **options: build(name, window=32, **options))
    corpus.prepare(tmp_path, vocab_size=300, library=library)
    data = corpus.load(tmp_path)
    held_out = {name: ids[:200] for name, ids in data.held_out.items()}
    data = dataclasses.replace(data, held_out=held_out)
    monkeypatch.setattr(corpus, "load", lambda folder: data)
    metrics = recipe.train_pair(tmp_path, {"target": 2, "draft": 3})
    for name, steps in (("target", 2), ("draft", 3)):
        assert metrics[name]["steps"] == steps
        assert 0 < metrics[name]["held_out_bits_per_byte"] < 10
        stored = emsjax.OPT.from_pretrained(tmp_path / name, dtype=jnp.float16)
        assert stored.config == build(name, vocab_size=300, window=32).config
