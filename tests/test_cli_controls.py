"""`emsjax generate` with settings that change logits, stops, constraints and likeliest tokens."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jsonl import assert_error, command, read_lines, write_records
from transformers import AutoTokenizer

import emsjax
from emsjax.cli import sampling_arguments
from emsjax.cli.main import main

PROMPTS = ["abc", "def f(x):", "hello"]
RECORDS = [{"id": i, "prompt": text} for i, text in enumerate(PROMPTS)]
SETTINGS = ["--repetition-penalty", 1.4, "--presence-penalty", 0.5, "--frequency-penalty", 0.25]
SETTINGS += ["--min-new-tokens", 3, "--logit-bias", "7=1.5,9=-2", "--suppress-tokens", "12,11"]
EXPECTED = emsjax.Sampling(
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    min_new_tokens=3,
    logit_bias={7: 1.5, 9: -2.0},
    suppress_tokens=(11, 12),
)


@pytest.fixture(scope="module")
def generate(tiny_model):
    """`emsjax.generate` for the prompts of the records."""
    model = emsjax.from_pretrained(tiny_model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    fixed = {"max_new_tokens": 6, "tokenizer": tokenizer}
    return lambda **options: emsjax.generate(model, prompts, **fixed | options)


def test_every_setting_is_an_option():
    names = [field.name for field in dataclasses.fields(emsjax.Sampling)]
    assert list(sampling_arguments.FIELDS) == names


def test_the_options_are_settings(tiny_model, paths, fake):
    write_records(paths.input)
    drawn = ["--temperature", 1, "--min-p", 0.1]
    assert main(command(tiny_model, paths, *SETTINGS, *drawn)) == 0
    asked = {"temperature": 1.0, "min_p": 0.1}
    expected = emsjax.Sampling(**{**vars(EXPECTED), **asked})
    assert fake.calls[0].sampling == expected
    assert main(command(tiny_model, paths, *SETTINGS, *drawn)) == 0  # the same run


def test_lines_have_texts_up_to_a_stop_and_the_likeliest_tokens(tiny_model, paths, generate):
    write_records(paths.input, RECORDS)
    free = generate(sampling=EXPECTED)
    stop = next(letter for text in free.texts for letter in text[1:] if letter != "�")
    out = generate(sampling=EXPECTED, stop=stop, top_logprobs=2)
    assert "stop" in out.finish_reasons
    options = [*SETTINGS, "--stop", stop, "--stop", "never is", "--top-logprobs", 2]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = sorted(read_lines(paths.output), key=lambda line: line["id"])
    for i, line in enumerate(lines):
        length = out.lengths[i]
        assert line["text"] == out.texts[i]
        assert line["tokens"] == out.tokens[i, :length].tolist()
        assert line["finish_reason"] == out.finish_reasons[i]
        assert line["top_tokens"] == out.top_logprobs.tokens[i, :length].tolist()
        np.testing.assert_allclose(line["logprobs"], out.logprobs[i, :length], atol=6e-4)
        right = out.top_logprobs.logprobs[i, :length]
        np.testing.assert_allclose(line["top_logprobs"], right, atol=6e-4)


def test_records_have_settings_of_their_own(tiny_model, paths, generate):
    """Each is completed as in a run with these settings alone."""
    own = [
        {"temperature": 0, "repetition_penalty": 1.8},
        {"top_k": 5, "logit_bias": {"7": 4.0}, "stop": "a", "min_new_tokens": 2},
        {"stop": ["e", "o"]},
        None,
    ]
    records = [
        {"id": f"{i}-{j}", "prompt": text, "sampling": asked}
        for i, text in enumerate(PROMPTS)
        for j, asked in enumerate(own)
    ]
    write_records(paths.input, records)
    options = ["--temperature", 1.2, "--top-p", 0.9, "--stop", "x", "--drafter", "prompt-lookup"]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = {line["id"]: line for line in read_lines(paths.output)}
    key = jax.random.key(0)
    for j, asked in enumerate(own):
        asked = dict(asked or {})
        stop = asked.pop("stop", "x")
        if "logit_bias" in asked:
            asked["logit_bias"] = {7: 4.0}
        if asked.get("temperature") != 0:
            asked = {"temperature": 1.2, "top_p": 0.9} | asked
        keys = [jax.random.fold_in(key, i * len(own) + j) for i in range(len(PROMPTS))]
        out = generate(sampling=emsjax.Sampling(**asked), stop=stop, key=jax.numpy.stack(keys))
        for i in range(len(PROMPTS)):
            line = lines[f"{i}-{j}"]
            assert line["tokens"] == out.tokens[i, : out.lengths[i]].tolist()
            assert (line["text"], line["finish_reason"]) == (out.texts[i], out.finish_reasons[i])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (3, 'field "sampling" must be an object, not 3'),
        ({"heat": 1}, 'field "sampling": unknown setting heat'),
        ({"top_p": 2}, 'field "sampling": sampling.top_p must be in (0, 1]'),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stop": [""]}, "is an empty string"),
        ({"min_new_tokens": 7}, "more than its max_new_tokens 6"),
    ],
)
def test_records_with_bad_settings_are_named(tiny_model, paths, capsys, own, message):
    records = [*RECORDS, {"id": "bad", "prompt": "abc", "sampling": own}]
    write_records(paths.input, records)
    assert_error(capsys, main(command(tiny_model, paths)), message, "line 4")
    assert not paths.output.exists()
    assert main(command(tiny_model, paths, "--skip-invalid")) == 0
    lines = {line["id"]: line for line in read_lines(paths.output)}
    assert message in lines["bad"]["error"]
    assert sum("error" in line for line in lines.values()) == 1


def test_texts_are_confined(tiny_model, paths):
    write_records(paths.input, RECORDS)
    options = ["--temperature", 2, "--drafter", "prompt-lookup", "--choices", "ab", "def", "x:"]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = read_lines(paths.output)
    assert {line["text"] for line in lines} <= {"ab", "def", "x:"}
    assert {line["finish_reason"] for line in lines} == {"eos"}
    schema = paths.input.with_name("schema.json")
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    paths.output = paths.output.with_name("confined.jsonl")
    assert main(command(tiny_model, paths, "--json-schema", schema, "--max-new-tokens", 9)) == 0
    assert {json.loads(line["text"]) for line in read_lines(paths.output)} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-p", 0.2], "--min-p needs a --temperature above 0"),
        (["--repetition-penalty", 0], "--repetition-penalty must be finite and above 0"),
        (["--logit-bias", "5"], "must be like 5=2.5,17=-1"),
        (["--logit-bias", "999=1"], "--logit-bias must be at most"),
        (["--suppress-tokens", "999"], "--suppress-tokens holds the token id 999"),
        (["--min-new-tokens", 9], "--min-new-tokens 9 is more than --max-new-tokens 6"),
        (["--stop", ""], "--stop is empty"),
        (["--include-stop"], "--include-stop needs --stop"),
        (["--regex", "(a"], "is not a regular expression"),
        (["--choices", "a", "--ignore-eos"], "a constraint needs an end token"),
        (["--regex", "a", "--choices", "b"], "not allowed with"),
    ],
)
def test_bad_options_leave_no_output(tiny_model, paths, capsys, options, message):
    write_records(paths.input, RECORDS)
    try:
        code = main(command(tiny_model, paths, *options))
    except SystemExit as stopped:
        code = stopped.code
    assert_error(capsys, code, message)
    assert not paths.output.exists()
