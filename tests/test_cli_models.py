"""Model folders on the command line: what they lack is named, and their tokens count."""

import json
import shutil

import pytest
from jsonl import assert_error, command, read_lines, save_random_model, write_records

from emsjax.cli.main import main
from emsjax.terminal.models import load_config


def test_a_folder_without_a_tokenizer_is_named_and_not_the_users_records(tmp_path, paths, capsys):
    save_random_model(tmp_path / "model", 0)
    write_records(paths.input)
    code = main(command(tmp_path / "model", paths))
    assert_error(capsys, code, f"{tmp_path / 'model'} has no tokenizer, such as tokenizer.json")
    assert not paths.output.exists()


def test_a_target_without_a_tokenizer_is_named_when_a_draft_is_trained(tmp_path, capsys):
    save_random_model(tmp_path / "model", 0)
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": "a text"}) for _ in range(9)))
    options = ["--target", tmp_path / "model", "--data", data, "--output", tmp_path / "draft"]
    sizes = ["--layers", 1, "--width", 8, "--held-out", 3, "--sequence-length", 16]
    lengths = ["--max-new-tokens", 8, "--draft-tokens", 2]
    code = main(list(map(str, ["distil", *options, *sizes, *lengths])))
    assert_error(capsys, code, f"{tmp_path / 'model'} has no tokenizer")


def test_the_end_tokens_of_the_generation_config_end_sequences(tiny_model, tmp_path, paths):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    write_records(paths.input)
    assert main(command(folder, paths)) == 0
    (line, *_) = [line for line in read_lines(paths.output) if line["finish_reason"] == "length"]
    end = line["tokens"][2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert load_config(str(folder), None).eos_token_ids == (end,)
    for path in paths.output.parent.glob(f"{paths.output.name}*"):
        path.unlink()
    assert main(command(folder, paths)) == 0
    (again,) = [other for other in read_lines(paths.output) if other["id"] == line["id"]]
    assert again["finish_reason"] == "eos"
    assert again["tokens"] == line["tokens"][: line["tokens"].index(end) + 1]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_wrong_file_of_a_model_folder_is_named(tiny_model, tmp_path, paths, capsys, name):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / name).write_text("{")
    write_records(paths.input)
    code = main(command(tmp_path / "model", paths))
    assert_error(capsys, code, f"{name} is not valid JSON")
