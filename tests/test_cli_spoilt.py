"""Spoilt model folders and run folders: one line that names them, and status 2."""

import json
import shutil

import pytest
from jsonl import TEXTS, assert_error, command, save_random_model, write_records
from transformers import AutoTokenizer

from emsjax.cli.main import main
from emsjax.records.reading import in_one_line

SPOILT = {  # file, and its content; None: it is missing
    "no configuration": ("config.json", None),
    "configuration that is not JSON": ("config.json", "{"),
    "configuration of another kind": ("config.json", "[1]"),
    "configuration in binary": ("config.json", "\xff\x00"),
    "configuration without a type": ("config.json", "{}"),
    "type that is a number": ("config.json", '{"model_type": 3}'),
    "unknown type": ("config.json", '{"model_type": "zzz"}'),
    "size that is text": ("config.json", '{"model_type": "opt", "hidden_size": "x"}'),
    "size that is null": ("config.json", '{"model_type": "opt", "vocab_size": null}'),
    "tokenizer that is not JSON": ("tokenizer.json", "{"),
    "empty tokenizer": ("tokenizer.json", "{}"),
    "tokenizer of another kind": ("tokenizer.json", "[]"),
    "tokenizer's settings that are not JSON": ("tokenizer_config.json", "{"),
    "tokenizer's settings of another kind": ("tokenizer_config.json", "[]"),
    "tokenizer's class that is a number": ("tokenizer_config.json", '{"tokenizer_class": 3}'),
    "truncated weights": ("model.safetensors", "\x10"),
    "no weights": ("model.safetensors", None),
}


def spoil(model, folder, kind):
    shutil.copytree(model, folder)
    name, content = SPOILT[kind]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="latin-1")
    return folder


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_model_folder_is_named_in_one_line(tiny_model, tmp_path, paths, capfd, kind):
    write_records(paths.input)
    folder = spoil(tiny_model, tmp_path / "spoilt", kind)
    assert_error(capfd, main(command(folder, paths)), str(folder))
    assert not paths.output.exists()


def distil(target, tmp_path, *options):
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text * 3}) for text in TEXTS))
    sizes = {"--layers": 1, "--width": 8, "--steps": 2, "--batch-size": 1}
    sizes |= {"--sequence-length": 8, "--max-new-tokens": 4, "--draft-tokens": 2}
    sizes |= {"--generations": 0, "--held-out": 2, "--target": target, "--data": data}
    sizes |= {"--output": tmp_path / "draft"}
    return ["distil", *(str(word) for pair in sizes.items() for word in pair), *options]


@pytest.mark.parametrize("kind", ["size that is text", "empty tokenizer"])
def test_distillation_names_a_spoilt_target(tiny_model, tmp_path, capfd, kind):
    folder = spoil(tiny_model, tmp_path / "spoilt", kind)
    assert_error(capfd, main(distil(folder, tmp_path)), str(folder))
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": 3}'])
def test_distillation_names_a_spoilt_record(tiny_model, tmp_path, capfd, text):
    record = tmp_path / "draft" / "distillation.json"
    record.parent.mkdir()
    record.write_text(text)
    assert_error(capfd, main(distil(tiny_model, tmp_path)), str(record))
    assert record.read_text() == text


def test_profiling_names_a_spoilt_configuration(tiny_model, tmp_path, capfd):
    folder = spoil(tiny_model, tmp_path / "spoilt", "size that is null")
    assert_error(capfd, main(["profile", "--model", str(folder)]), str(folder), "vocab_size")


def test_a_tokenizer_that_fails_on_prompts_names_their_lines(
    tiny_model, paths, fake, capsys, monkeypatch
):
    class PanicError(BaseException):  # as in the tokenizers' Rust
        pass

    def panic(self, texts, **options):
        raise PanicError("called `Option::unwrap()`\non a `None` value")

    monkeypatch.setattr(type(AutoTokenizer.from_pretrained(tiny_model)), "__call__", panic)
    write_records(paths.input)
    code = main(command(tiny_model, paths))
    assert_error(capsys, code, f"{paths.input}, lines 1 to 11", "PanicError: called")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_stays_as_it_is(kind):
    with pytest.raises(kind), in_one_line("reading fails"):
        raise kind


def test_an_unsupported_model_names_its_folder(tmp_path, paths, capsys):
    save_random_model(tmp_path / "model", 0)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | {"activation_function": "unheard-of"}
    path.write_text(json.dumps(config, allow_nan=False))
    write_records(paths.input)
    code = main(command(tmp_path / "model", paths))
    assert_error(capsys, code, str(tmp_path / "model"), "unheard-of")
