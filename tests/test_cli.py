"""`emsjax generate`: files, errors and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import emsjax
from emsjax import batch_output
from emsjax.cli import main

END, POSITIONS = 2, 64
TEXTS = ["def f(x):\n    return x", "for i in range(3):", "a", "print('hello, world')", "x = 1"]
RECORDS = [{"id": f"r{i}" if i % 2 else i, "prompt": TEXTS[i % 5] * (i % 3 + 1)} for i in range(11)]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder: a random model of 64 positions, a byte-level tokenizer with a start token."""
    folder = tmp_path_factory.mktemp("tiny")
    config = emsjax.OPTConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=32,
        max_position_embeddings=POSITIONS,
        num_attention_heads=2,
    )
    emsjax.OPT(config, rngs=nnx.Rngs(0), dtype="float32").save_pretrained(folder)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


class FakeGenerate:
    """Tokens that depend on a sequence's prompt and key alone; remembers its calls."""

    def __init__(self, interrupt_at=None):
        self.calls = []
        self.interrupt_at = interrupt_at

    def __call__(self, model, prompts, *, drafter, max_new_tokens, batch_size, key):
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        self.calls.append(SimpleNamespace(prompts=prompts, drafter=drafter, batch_size=batch_size))
        tokens = np.ones((len(prompts), max_new_tokens), np.int32)
        lengths = np.zeros(len(prompts), np.int32)
        for row, (prompt, bits) in enumerate(zip(prompts, jax.random.key_data(key), strict=True)):
            draw = np.random.default_rng([*prompt.tolist(), *np.asarray(bits).tolist()])
            lengths[row] = draw.integers(1, max_new_tokens + 1)
            tokens[row, : lengths[row]] = draw.integers(3, 300, lengths[row])
            tokens[row, lengths[row] - 1] = END
        stats = SimpleNamespace(num_emitted=lengths, num_steps=lengths)
        return SimpleNamespace(
            tokens=tokens, lengths=lengths, finish_reasons=["eos"] * len(prompts), stats=stats
        )


@pytest.fixture
def fake(monkeypatch):
    generate = FakeGenerate()
    monkeypatch.setattr(emsjax, "generate", generate, raising=False)
    return generate


@pytest.fixture
def paths(tmp_path):
    return SimpleNamespace(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")


def write_records(path, records=RECORDS):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model, paths, *options):
    fixed = ["--input", paths.input, "--output", paths.output, "--dtype", "float32"]
    sizes = ["--batch-size", "3", "--max-new-tokens", "6"]
    return [str(a) for a in ["generate", "--model", model, *fixed, *sizes, *options]]


def assert_error(capsys, code, *parts):
    """One line on stderr, exit code 2."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("emsjax: error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_an_output_line_holds_the_emitted_tokens_and_their_text(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tokens/s" in captured.err
    assert "mean acceptance length" in captured.err

    lines = read_lines(paths.output)
    assert [line["id"] for line in lines] == [record["id"] for record in RECORDS]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for line in lines:
        assert line.keys() == {"id", "text", "tokens", "finish_reason"}
        assert line["tokens"][-1] == END
        assert line["text"] == tokenizer.decode(line["tokens"][:-1])
    assert [call.batch_size for call in fake.calls] == [3] * 4  # the last has two records


def test_records_have_keys_of_their_place_and_the_seed(tiny_model, paths, fake):
    write_records(paths.input, [{"id": i, "prompt": "same"} for i in range(5)])
    assert main(command(tiny_model, paths)) == 0
    tokens = [tuple(line["tokens"]) for line in read_lines(paths.output)]
    assert len(set(tokens)) == 5
    paths.output = paths.output.with_name("other.jsonl")
    assert main(command(tiny_model, paths, "--seed", "1")) == 0
    assert {tuple(line["tokens"]) for line in read_lines(paths.output)}.isdisjoint(tokens)


@pytest.mark.parametrize("finished_groups", [0, 1, 3])
@pytest.mark.parametrize("cut_bytes", [0, 1, 25, 200], ids=lambda n: f"minus{n}bytes")
def test_an_interrupted_run_ends_with_the_results_of_an_uninterrupted_one(
    tiny_model, paths, monkeypatch, finished_groups, cut_bytes
):
    write_records(paths.input)
    monkeypatch.setattr(emsjax, "generate", FakeGenerate(), raising=False)
    assert main(command(tiny_model, paths)) == 0
    whole = paths.output.read_bytes()

    paths.output = paths.output.with_name("resumed.jsonl")
    generate = FakeGenerate(interrupt_at=finished_groups)
    monkeypatch.setattr(emsjax, "generate", generate, raising=False)
    assert main(command(tiny_model, paths)) == 130
    size = paths.output.stat().st_size
    os.truncate(paths.output, max(size - cut_bytes, 0))

    kept = paths.output.read_bytes().count(b"\n")
    generate = FakeGenerate()
    monkeypatch.setattr(emsjax, "generate", generate, raising=False)
    assert main(command(tiny_model, paths)) == 0
    assert paths.output.read_bytes() == whole
    assert len(generate.calls) == 4 - kept // 3
    ids = [record["id"] for record in RECORDS]
    assert [line["id"] for line in read_lines(paths.output)] == ids


def test_an_unfinished_last_line_with_an_end_is_cut_off_too(tiny_model, paths, fake):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    whole = paths.output.read_bytes()
    paths.output.write_bytes(whole[:-20] + b"\n")
    assert main(command(tiny_model, paths)) == 0
    assert paths.output.read_bytes() == whole


def test_a_killed_process_goes_on_and_ends_with_the_plain_results(tiny_model, paths):
    records = [{"id": i, "prompt": TEXTS[i % 5]} for i in range(32)]
    write_records(paths.input, records)
    options = ["--drafter", "prompt-lookup", "--batch-size", "1"]
    arguments = command(tiny_model, paths, *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "emsjax", *arguments], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (paths.output.exists() and paths.output.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = paths.output.read_bytes()
    assert before
    assert main(arguments) == 0
    assert paths.output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    resumed = read_lines(paths.output)

    assert [line["id"] for line in resumed] == list(range(32))
    paths.output = paths.output.with_name("plain.jsonl")
    assert main(command(tiny_model, paths)) == 0
    assert resumed == read_lines(paths.output)


def test_a_complete_output_is_left_alone_and_no_model_loaded(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    before = paths.output.read_bytes()
    capsys.readouterr()
    fake.calls.clear()
    assert main(command(tiny_model, paths)) == 0
    assert "complete" in capsys.readouterr().err
    assert not fake.calls
    assert paths.output.read_bytes() == before


BAD_LINES = {
    "malformed": ('{"id": 2, "prompt": "b"', "line 2", "delimiter"),
    "no object": ("[1]", "line 2", "object"),
    "not UTF-8": (b'{"id": 2, "prompt": "\xff"}', "line 2", "utf-8"),
    "lone surrogate": (r'{"id": 2, "prompt": "\ud800"}', "line 2", "surrogates"),
    "no id": ('{"prompt": "b"}', "line 2", '"id"'),
    "no prompt": ('{"id": 2}', "line 2", '"prompt"'),
    "number as prompt": ('{"id": 2, "prompt": 3}', "line 2", '"prompt"', "3"),
    "boolean as id": ('{"id": true, "prompt": "b"}', "line 2", '"id"'),
    "empty prompt": ('{"id": 2, "prompt": ""}', "line 2", "empty"),
    "duplicate id": ('\n{"id": 1, "prompt": "b"}', "line 3", "duplicate id 1", "line 1"),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_before_any_work_starts(paths, fake, capsys, bad):
    line, *parts = bad
    line = line if isinstance(line, bytes) else line.encode()
    paths.input.write_bytes(b'{"id": 1, "prompt": "a"}\n' + line + b"\n")
    code = main(command("no such model", paths))  # so the model is not looked at either
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt-template", "{article} {title}"], ["line 1", '"article"']),
        (["--prompt-template", "no field"], ["--prompt-template"]),
        (["--prompt-template", "{prompt"], ["--prompt-template"]),
        (["--prompt-template", "{prompt.real}"], ["--prompt-template"]),
        (["--batch-size", "0"], ["--batch-size", "at least 1"]),
        (["--max-new-tokens", "many"], ["--max-new-tokens", "many"]),
        (["--match-length", "2"], ["--match-length", "prompt-lookup"]),
        (["--output", "no/such/folder/out.jsonl"], ["--output", "no/such/folder"]),
        (["--model", "./no-such-folder"], ["--model", "no-such-folder"]),
        (["--input", "no-such-file.jsonl"], ["no-such-file.jsonl"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_a_bad_option_is_named(tiny_model, paths, fake, capsys, options, parts):
    write_records(paths.input)
    try:
        code = main(command(tiny_model, paths, *options))
    except SystemExit as stop:  # argparse's way out
        code = stop.code
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()


def test_prompts_beyond_the_position_limit_are_counted(tiny_model, paths, fake, capsys):
    prompts = ["a" * n for n in (10, 58, 59, 80)]  # one token per letter, and the start token
    write_records(paths.input, [{"id": f"p{i}", "prompt": p} for i, p in enumerate(prompts)])
    code = main(command(tiny_model, paths))
    parts = ("2 of 4 records", "limit 64", "'p2' (line 3)", "60 prompt tokens", "65")
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()
    assert main(command(tiny_model, paths, "--max-prompt-tokens", "59")) == 0


@pytest.mark.parametrize(("keep", "kept"), [("first", "0123"), ("last", "789:")])
def test_a_cut_prompt_keeps_its_start_token_and_one_end(tiny_model, paths, fake, keep, kept):
    write_records(paths.input, [{"id": 1, "digits": "0123456", "more": "789"}])
    options = ["--prompt-template", "{digits}{more}:", "--max-prompt-tokens", "5", "--keep", keep]
    assert main(command(tiny_model, paths, *options)) == 0
    (prompt,) = fake.calls[0].prompts
    assert AutoTokenizer.from_pretrained(tiny_model).decode(prompt) == f"</s>{kept}"


CHANGES = {
    "seed": ["--seed", "1"],
    "batch_size": ["--batch-size", "4"],
    "drafter": ["--drafter", "prompt-lookup"],
    "max_prompt_tokens": ["--max-prompt-tokens", "9"],
}


@pytest.mark.parametrize(("name", "options"), CHANGES.items(), ids=CHANGES)
def test_results_of_another_configuration_stay(
    tiny_model, paths, fake, capsys, monkeypatch, name, options
):
    write_records(paths.input)
    monkeypatch.setattr(emsjax, "generate", FakeGenerate(interrupt_at=1), raising=False)
    assert main(command(tiny_model, paths)) == 130
    before = paths.output.read_bytes()
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths, *options)), name, "is now")
    assert paths.output.read_bytes() == before


def test_results_of_another_input_stay(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    before = paths.output.read_bytes()
    write_records(paths.input, RECORDS[:-1])
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths)), "input_sha256")
    assert paths.output.read_bytes() == before


@pytest.mark.parametrize(
    ("tamper", "part"),
    [
        (lambda lines: ["{}\n", *lines], "line 1"),
        (lambda lines: [*lines, lines[0]], "twice"),
        (lambda lines: ['{"id": "stranger"}\n', *lines], "'stranger'"),
        (lambda lines: ["notes\n", *lines], "line 1"),
    ],
    ids=["no id", "repeated id", "unknown id", "no JSON"],
)
def test_an_output_changed_by_hand_stays(tiny_model, paths, fake, capsys, tamper, part):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    lines = paths.output.read_text().splitlines(keepends=True)[:4]
    paths.output.write_text("".join(tamper(lines)))
    before = paths.output.read_bytes()
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths)), part)
    assert paths.output.read_bytes() == before


def test_an_output_without_its_sidecar_stays(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    paths.output.write_text("precious\n")
    assert_error(capsys, main(command(tiny_model, paths)), "out.jsonl.run.json")
    assert paths.output.read_text() == "precious\n"


def test_two_runs_never_write_the_same_output(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        batch_output.open_results(path, {}, set()),
        pytest.raises(ValueError, match="another run"),
        batch_output.open_results(path, {}, set()),
    ):
        pass
