"""`emsjax generate`: files, options, errors and exit codes."""

import json
import os
import shutil
import sys

import jax
import numpy as np
import pytest
from jsonl import (
    END,
    RECORDS,
    assert_error,
    command,
    read_lines,
    save_random_model,
    write_records,
)
from transformers import AutoTokenizer

import emsjax
from emsjax.cli import generate as batch_run
from emsjax.cli.main import main
from emsjax.models import checkpoint
from emsjax.records.input import Records


@pytest.fixture(scope="session")
def draft_models(tmp_path_factory):
    """Folders of suitable and of unsuitable draft models."""
    sizes = {
        "equal": {},
        "padded": {"vocab_size": 320},
        "small vocabulary": {"vocab_size": 100},
        "few positions": {"max_position_embeddings": 10},
    }
    folders = {name: tmp_path_factory.mktemp("draft") for name in sizes}
    for seed, (name, folder) in enumerate(folders.items(), start=1):
        save_random_model(folder, seed, **sizes[name])
    return folders


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
        assert line.keys() == {"id", "text", "tokens", "mean_logprob", "finish_reason"}
        assert line["tokens"][-1] == END
        assert line["text"] == tokenizer.decode(line["tokens"][:-1])
    (call,) = fake.calls
    assert call.batch_size == 3


def test_a_log_shows_the_progress_of_a_run(tiny_model, paths, fake, capsys, monkeypatch):
    write_records(paths.input)
    monkeypatch.setattr(batch_run, "LOG_SECONDS", 0)
    assert main(command(tiny_model, paths)) == 0
    count, said = len(RECORDS), capsys.readouterr().err
    assert all(f"{done} of {count} results, " in said for done in range(1, count + 1))
    monkeypatch.setattr(batch_run, "LOG_SECONDS", 60)
    paths.output.unlink()
    assert main(command(tiny_model, paths)) == 0
    assert f" of {count} results, " not in capsys.readouterr().err


def test_a_records_key_depends_on_its_position_and_the_seed(tiny_model, paths, fake):
    write_records(paths.input, [{"id": i, "prompt": "same"} for i in range(5)])
    assert main(command(tiny_model, paths)) == 0
    tokens = [tuple(line["tokens"]) for line in read_lines(paths.output)]
    assert len(set(tokens)) == 5
    paths.output = paths.output.with_name("other.jsonl")
    assert main(command(tiny_model, paths, "--seed", "1")) == 0
    assert {tuple(line["tokens"]) for line in read_lines(paths.output)}.isdisjoint(tokens)


def test_sequences_of_a_record_have_different_keys(tiny_model, paths, fake):
    write_records(paths.input)
    options = ["--temperature", "1", "--num-sequences", "3", "--batch-size", "7", "--seed", "5"]
    assert main(command(tiny_model, paths, *options)) == 0
    (call,) = fake.calls
    assert list(call.prompts) == list(range(11))
    assert (call.num_sequences, call.batch_size) == (3, 7)
    assert call.key == jax.random.key(5)
    wanted = [(record["id"], sequence) for record in RECORDS for sequence in range(3)]
    assert [(line["id"], line["sequence"]) for line in read_lines(paths.output)] == wanted


def test_mean_logprob_is_that_of_the_tokens(tiny_model, paths, fake):
    write_records(paths.input)
    assert main(command(tiny_model, paths, "--temperature", "1", "--num-sequences", "4")) == 0
    (call,) = fake.calls
    means = [line["mean_logprob"] for line in read_lines(paths.output)]
    expected = [completion.logprobs.mean(dtype=float) for completion in call.completions]
    np.testing.assert_allclose(means, expected, rtol=0, atol=5.01e-4)
    assert means == [round(mean, 3) for mean in means]


def attributes(drafter):
    """A drafter's settings, without the weights of a draft model."""
    settings = dict(vars(drafter))
    model = settings.pop("draft_model", None)
    return settings if model is None else settings | {"dtype": model.dtype.name}


LOOKUP = dict(vars(emsjax.PromptLookup()))
SUFFIX = dict(vars(emsjax.SuffixDrafter()))
MODEL = {
    "max_draft_tokens": 32,  # the BASS heuristic's limit
    "has_own_limit": False,
    "vocab_size": None,
    "attention_implementation": None,
    "branches": 1,
}
MODEL |= {"dtype": "float32"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["prompt-lookup"], LOOKUP),
        (
            ["prompt-lookup", "--match-length", 3, "--max-draft-tokens", 5, "--search-generated"],
            LOOKUP | {"match_length": 3, "max_draft_tokens": 5, "search_generated": True},
        ),
        (["model", "--draft-model", "equal"], MODEL),
        (
            ["model", "--draft-model", "equal", "--max-draft-tokens", "2"],
            MODEL | {"max_draft_tokens": 2, "has_own_limit": True},
        ),
        (
            ["model", "--draft-model", "equal", "--draft-length", "9"],
            MODEL | {"max_draft_tokens": 9, "has_own_limit": True},
        ),
        (["prompt-lookup", "--draft-length", "9"], LOOKUP | {"max_draft_tokens": 9}),
        (["prompt-lookup", "--draft-length", "0"], LOOKUP | {"max_draft_tokens": 1}),
        (
            ["prompt-lookup", "--draft-length", "9", "--max-draft-tokens", "5"],
            LOOKUP | {"max_draft_tokens": 5},
        ),
        (["prompt-lookup", "--draft-length", "bass"], LOOKUP),
        (["suffix"], SUFFIX),
        (["suffix", "--branches", "3"], SUFFIX | {"branches": 3}),
        (["prompt-lookup", "--branches", "2"], LOOKUP | {"branches": 2}),
        (["model", "--draft-model", "equal", "--branches", "2"], MODEL | {"branches": 2}),
        (["suffix", "--draft-length", "9"], SUFFIX | {"max_draft_tokens": 9}),
        (["model", "--draft-model", "padded"], MODEL | {"vocab_size": "the tokenizer's"}),
        (["model", "--draft-model", "small vocabulary"], MODEL | {"vocab_size": 100}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_the_options_configure_the_drafter(
    tiny_model, draft_models, paths, fake, options, expected
):
    write_records(paths.input)
    options = [draft_models.get(option, option) for option in options]
    assert main(command(tiny_model, paths, "--drafter", *options)) == 0
    if expected.get("vocab_size") == "the tokenizer's":
        expected = expected | {"vocab_size": len(AutoTokenizer.from_pretrained(tiny_model))}
    assert {id(call.drafter) for call in fake.calls} == {id(fake.calls[0].drafter)}
    assert attributes(fake.calls[0].drafter) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], emsjax.Sampling()),
        (["--temperature", "0.7"], emsjax.Sampling(0.7)),
        (
            ["--temperature", "2", "--top-k", "5", "--top-p", "0.9"],
            emsjax.Sampling(2.0, top_k=5, top_p=0.9),
        ),
    ],
    ids=["greedy", "temperature", "all"],
)
def test_the_options_configure_sampling(tiny_model, paths, fake, options, expected):
    write_records(paths.input)
    assert main(command(tiny_model, paths, *options)) == 0
    assert all(call.sampling == expected for call in fake.calls)
    assert fake.calls[0].drafter is None


def test_a_cpu_decodes_in_float32_by_default(tiny_model, paths, fake):
    write_records(paths.input)
    asked = command(tiny_model, paths)
    place = asked.index("--dtype")
    assert main(asked[:place] + asked[place + 2 :]) == 0
    assert main(asked) == 0  # the same run


def sampled_tokens(model, paths, batch_size, *drafter):
    paths.output = paths.output.with_name(f"{batch_size} {len(drafter)}.jsonl")
    options = ["--temperature", "0.8", "--top-p", "0.95", "--num-sequences", "3"]
    assert main(command(model, paths, *options, *drafter, "--batch-size", batch_size)) == 0
    return {(line["id"], line["sequence"]): line["tokens"] for line in read_lines(paths.output)}


def test_sampled_tokens_are_the_same_for_any_batch_size(tiny_model, draft_models, paths):
    write_records(paths.input, RECORDS[:6])
    plain = sampled_tokens(tiny_model, paths, 8)
    assert len({tuple(tokens) for tokens in plain.values()}) > 12
    assert sampled_tokens(tiny_model, paths, 7, "--drafter", "prompt-lookup") == plain

    # A policy's lengths depend on the whole batch, and a draft model's samples on the lengths.
    drafter = ["--drafter", "model", "--draft-model", draft_models["padded"], "--draft-length", 4]
    drafted = sampled_tokens(tiny_model, paths, 8, *drafter)
    assert drafted != plain  # of the same distribution
    assert sampled_tokens(tiny_model, paths, 5, *drafter) == drafted


def test_completions_enter_the_memory_of_the_next_run(tiny_model, paths, fake, tmp_path):
    write_records(paths.input)
    memory = tmp_path / "memory.npz"
    options = ["--drafter", "suffix", "--memory", memory]
    assert main(command(tiny_model, paths, *options)) == 0
    assert int(fake.calls[0].drafter.index.size) == 0
    first = [line["tokens"] for line in read_lines(paths.output)]
    held = [one.tolist() for one in emsjax.SuffixMemory.load(memory).sequences]
    assert held == [tokens for tokens in first if tokens]
    paths.output = paths.output.with_name("second.jsonl")
    assert main(command(tiny_model, paths, *options)) == 0
    assert int(fake.calls[1].drafter.index.size) == sum(len(tokens) - 1 for tokens in held)
    assert len(emsjax.SuffixMemory.load(memory).sequences) == 2 * len(held)


def test_a_damaged_memory_is_named_before_anything_is_loaded(
    tiny_model, paths, capsys, monkeypatch, tmp_path
):
    write_records(paths.input)
    memory = tmp_path / "memory.npz"
    memory.write_bytes(b"PK")
    monkeypatch.delattr(checkpoint, "load")
    code = main(command(tiny_model, paths, "--drafter", "suffix", "--memory", memory))
    assert_error(capsys, code, "memory.npz is damaged")
    assert not paths.output.exists()


BAD_LINES = {
    "malformed": ('{"id": 2, "prompt": "b"', "line 2: not JSON", "delimiter, column 24"),
    "not JSON": ("not json", "line 2: not JSON: 'not json' (Expecting value, column 1)"),
    "long and not JSON": ("x" * 99, f"line 2: not JSON: '{'x' * 40}...' ("),
    "nested": ("[" * 100_000, "line 2: JSON that is nested too deeply"),
    "byte-order mark": (b'\xef\xbb\xbf{"id": 2}', "line 2: not JSON"),
    "not an object": ("[1]", "line 2", "object"),
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


@pytest.mark.parametrize("first", [b"", b"\r\n"], ids=["at once", "blank line"])
def test_a_byte_order_mark_before_the_first_line_is_skipped(tmp_path, first):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + b'{"id": 1, "prompt": "a"}\r\n')
    (record,) = Records(path, None)
    assert (record.id, record.prompt) == (1, "a")


def test_an_input_that_can_be_read_only_once_is_refused(paths, fake, capsys):
    os.mkfifo(paths.input)
    code = main(command("no such model", paths))
    assert_error(capsys, code, f"{paths.input} is not a regular file")


def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n')
    records = Records(path, None)
    assert [record.id for record in records] == [1, 2]
    reading = iter(records)
    assert next(reading).id == 1
    with path.open("a") as file:
        file.write('{"id": 3, "prompt": "c"}\n')
    for going_through in (reading, iter(records)):
        with pytest.raises(ValueError, match=r"in\.jsonl has changed while it was in use"):
            next(going_through)


def test_a_token_outside_the_vocabulary_names_its_record(paths, fake, tiny_model, tmp_path, capsys):
    write_records(paths.input, [{"id": "one", "prompt": "a b c"}])
    folder = shutil.copytree(tiny_model, tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4}))
    code = main(command(folder, paths))
    assert_error(capsys, code, "record 'one' (line 1): the tokenizer's token", "vocabulary of 4")
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
        (["--num-sequences", "0"], ["--num-sequences", "at least 1"]),
        (["--temperature", "-0.5"], ["--temperature", ">= 0", "-0.5"]),
        (["--temperature", "nan"], ["--temperature", "finite"]),
        (["--temperature", "inf"], ["--temperature", "finite"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--top-k", "-1"], ["--top-k", "at least 0"]),
        (["--top-k", "1.5"], ["--top-k", "1.5"]),
        (["--top-p", "0"], ["--top-p", "(0, 1]"]),
        (["--top-p", "1.1"], ["--top-p", "(0, 1]", "1.1"]),
        (["--top-p", "nan"], ["--top-p", "(0, 1]"]),
        (["--top-k", "5"], ["--top-k", "--temperature above 0"]),
        (["--top-p", "0.9"], ["--top-p needs a --temperature above 0"]),
        (["--keep", "last"], ["--keep needs --max-prompt-tokens"]),
        (["--drafter", "model"], ["--drafter model", "--draft-model"]),
        (["--drafter", "tree"], ["--drafter", "prompt-lookup"]),
        (
            ["--drafter", "model", "--draft-model", "./none"],
            ["--draft-model", "none is not a folder"],
        ),
        (["--draft-model", "d"], ["--draft-model", "--drafter auto or model"]),
        (["--draft-model", "d", "--drafter", "prompt-lookup"], ["--draft-model", "model"]),
        (["--draft-revision", "main"], ["--draft-revision", "--drafter auto or model"]),
        (["--draft-revision", "main", "--drafter", "auto"], ["--draft-revision needs --draft-mo"]),
        (["--max-draft-tokens", "2"], ["--max-draft-tokens", "suffix, self or model"]),
        (["--draft-length", "auto"], ["--draft-length", "suffix, self or model"]),
        (["--draft-length", "0"], ["--draft-length", "suffix, self or model"]),
        (["--draft-length", "-1"], ["--draft-length", "at least 0", "'-1'"]),
        (["--draft-length", "1.5"], ["--draft-length", "'1.5'"]),
        (["--draft-length", "long", "--drafter", "model"], ["--draft-length", "auto", "'long'"]),
        (["--profile", "p.json"], ["--profile", "prompt-lookup, suffix or model"]),
        (["--memory", "m.npz"], ["--memory", "--drafter auto or suffix"]),
        (["--drafter", "suffix", "--memory", "no/m.npz"], ["--memory", "no is not a folder"]),
        (
            ["--drafter", "prompt-lookup", "--draft-length", "bass", "--profile", "p.json"],
            ["--profile", "--draft-length auto or goodput"],
        ),
        (
            ["--drafter", "prompt-lookup", "--draft-length", "3", "--profile", "p.json"],
            ["--profile", "--draft-length auto or goodput"],
        ),
        (["--drafter", "prompt-lookup", "--profile", "none.json"], ["none.json"]),
        (["--seed", "-1"], ["--seed", "0..4294967295", "-1"]),
        (["--seed", str(2**32)], ["--seed", "0..4294967295", "4294967296"]),
        (["--match-length", "2"], ["--match-length", "prompt-lookup"]),
        (["--branches", "2"], ["--branches", "prompt-lookup, suffix, self or model"]),
        (["--min-confidence", "1.5"], ["--min-confidence", "0..1", "1.5"]),
        (["--min-confidence", "0.5"], ["--min-confidence", "--drafter auto or model"]),
        (["--match-length", "2", "--drafter", "model"], ["--match-length", "prompt-lookup"]),
        (["--search-generated", "--drafter", "model"], ["--search-generated", "prompt-lookup"]),
        (["--output", "no/such/folder/out.jsonl"], ["--output", "no/such/folder"]),
        (["--model", "./no-such-folder"], ["--model", "no-such-folder"]),
        (["--input", "no-such-file.jsonl"], ["no-such-file.jsonl"]),
    ],
    ids=lambda value: " ".join(value[:5]),
)
def test_a_bad_option_is_named(tiny_model, paths, fake, capsys, monkeypatch, options, parts):
    write_records(paths.input)
    monkeypatch.delattr(checkpoint, "load")  # nothing is loaded
    try:
        code = main(command(tiny_model, paths, *options))
    except SystemExit as stop:  # argparse's way out
        code = stop.code
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()


def test_an_unsuitable_draft_model_is_refused_before_the_model_is_loaded(
    tiny_model, draft_models, paths, fake, capsys, monkeypatch
):
    write_records(paths.input)
    loaded = []

    def remember(make, folder, load=checkpoint.load, **options):
        loaded.append((folder, options["dtype"], options["revision"]))
        return load(make, folder, **options)

    monkeypatch.setattr(checkpoint, "load", remember)
    folder = draft_models["few positions"]
    drafter = ["--drafter", "model", "--draft-model", folder, "--draft-revision", "main"]
    assert_error(capsys, main(command(tiny_model, paths, *drafter)), "10 positions", "are needed")
    assert loaded == [(str(folder), "float32", "main")]
    assert not paths.output.exists()


def test_prompts_beyond_the_position_limit_are_counted(tiny_model, paths, fake, capsys):
    prompts = ["a" * n for n in (10, 58, 59, 80)]  # one token per letter, and the start token
    write_records(paths.input, [{"id": f"p{i}", "prompt": p} for i, p in enumerate(prompts)])
    code = main(command(tiny_model, paths))
    parts = ("2 of 4 records", "limit 64", "'p2' (line 3)", "60 prompt tokens", "65")
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()
    assert main(command(tiny_model, paths, "--max-prompt-tokens", "59")) == 0


def test_a_template_may_use_a_numeric_id(tiny_model, paths, fake):
    write_records(paths.input, [{"id": 17, "text": "x"}])
    assert main(command(tiny_model, paths, "--prompt-template", "{id}: {text}")) == 0
    (prompt,) = fake.calls[0].prompts.values()
    assert AutoTokenizer.from_pretrained(tiny_model).decode(prompt) == "</s>17: x"


@pytest.mark.parametrize(("keep", "kept"), [("first", "0123"), ("last", "789:")])
def test_a_cut_prompt_keeps_its_start_token_and_one_end(tiny_model, paths, fake, keep, kept):
    write_records(paths.input, [{"id": 1, "digits": "0123456", "more": "789"}])
    options = ["--prompt-template", "{digits}{more}:", "--max-prompt-tokens", "5", "--keep", keep]
    assert main(command(tiny_model, paths, *options)) == 0
    (prompt,) = fake.calls[0].prompts.values()
    assert AutoTokenizer.from_pretrained(tiny_model).decode(prompt) == f"</s>{kept}"


@pytest.mark.parametrize("is_fast", [True, False])
def test_cut_prompts_are_counted_and_their_lines_marked(
    tiny_model, paths, fake, capsys, monkeypatch, is_fast
):
    monkeypatch.setattr(type(AutoTokenizer.from_pretrained(tiny_model)), "is_fast", is_fast)
    texts = {"shorter": "01", "as long": "0123", "cut": "01234", "cut again": "0" * 99}
    write_records(paths.input, [{"id": name, "prompt": text} for name, text in texts.items()])
    options = ["--max-prompt-tokens", "5"]  # and the start token
    options += ["--temperature", "1", "--num-sequences", "2"]
    assert main(command(tiny_model, paths, *options)) == 0
    assert '2 of 4 prompts are cut to 5 tokens: their lines have "truncated"' in (
        " ".join(capsys.readouterr().err.split())
    )
    marked = {(line["id"], line.get("truncated")) for line in read_lines(paths.output)}
    assert marked == {("shorter", None), ("as long", None), ("cut", True), ("cut again", True)}


def test_an_evaluation_without_the_harness_says_how_to_install_it(tiny_model, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("emsjax.evaluation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code = main(["eval", "--model", str(tiny_model), "--tasks", "any"])
    assert_error(capsys, code, "pip install 'emsjax[eval]'")


@pytest.mark.parametrize("weights", [None, "int8"])
def test_narrow_weights_a_narrow_cache_and_a_model_that_drafts_for_itself(
    tiny_model, paths, fake, monkeypatch, weights
):
    write_records(paths.input)
    runs = []
    stream = emsjax.streaming.stream_numbered
    monkeypatch.setattr(
        "emsjax.streaming.stream_numbered",
        lambda run, *a, **o: runs.append(run) or stream(run, *a, **o),
    )
    options = ["--drafter", "self", "--draft-length", "2", "--kv-dtype", "fp8"]
    options += [] if weights is None else ["--quantize", weights]
    assert main(command(tiny_model, paths, *options)) == 0
    (run,) = runs
    assert type(run.drafter) is emsjax.SelfDraft
    assert run.drafter.max_draft_tokens == 2
    assert run.drafter.draft_model.quantization == "int4"
    assert (run.model.quantization, run.model.kv_dtype) == (weights, "fp8")
    assert len(read_lines(paths.output)) == len(RECORDS)


def test_a_model_that_drafts_for_itself_has_no_profile(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    options = ["--drafter", "self", "--draft-length", "goodput"]
    assert_error(capsys, main(command(tiny_model, paths, *options)), "none measures --drafter self")
