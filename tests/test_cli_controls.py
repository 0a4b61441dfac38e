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
from emsjax.text import TooLargeError, joining

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


SCHEMA = {
    "type": "object",
    "properties": {"b": {"enum": [1, 2]}, "a": {"type": "boolean"}},
    "required": ["b", "a"],
}


def test_records_have_constraints_of_their_own(tiny_model, paths, generate):
    """Each is completed as in a run with this constraint alone."""
    own = [
        None,
        {"regex": "[a-c]{2,3}"},
        {"choices": ["yes", "no"], "temperature": 0},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA), "stop": "a"},
        {"regex": None},
        {"regex": None, "choices": ["yes", "no"]},
    ]
    asked = {"max_new_tokens": 24}
    confined = [
        ("choices", ["ab", "def"]),
        ("regex", "[a-c]{2,3}"),
        ("choices", ["yes", "no"]),
        ("json_schema", SCHEMA),
        ("json_schema", SCHEMA),
        None,
        ("choices", ["yes", "no"]),
    ]
    records = [
        {"id": f"{i}-{j}", "prompt": text, "sampling": settings}
        for i, text in enumerate(PROMPTS)
        for j, settings in enumerate(own)
    ]
    write_records(paths.input, records)
    options = ["--temperature", 1.2, "--drafter", "prompt-lookup", "--max-new-tokens", 24]
    options += ["--choices", "ab", "def"]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = {line["id"]: line for line in read_lines(paths.output)}
    tokenizer, key = AutoTokenizer.from_pretrained(tiny_model), jax.random.key(0)
    for j, settings in enumerate(own):
        processors = []
        if confined[j] is not None:
            kind, value = confined[j]
            processors = [getattr(emsjax.constraints, kind)(value, tokenizer)]
        keys = [jax.random.fold_in(key, i * len(own) + j) for i in range(len(PROMPTS))]
        out = generate(
            sampling=emsjax.Sampling((settings or {}).get("temperature", 1.2)),
            stop=(settings or {}).get("stop"),
            key=jax.numpy.stack(keys),
            processors=processors,
            **asked,
        )
        for i in range(len(PROMPTS)):
            line = lines[f"{i}-{j}"]
            assert line["tokens"] == out.tokens[i, : out.lengths[i]].tolist()
            assert (line["text"], line["finish_reason"]) == (out.texts[i], out.finish_reasons[i])
    documents = [json.loads(lines[f"{i}-3"]["text"]) for i in range(len(PROMPTS))]
    assert all(list(one) == ["b", "a"] for one in documents)  # in the schema's order


def test_constraints_are_made_once_and_joined_only_if_they_differ(tiny_model, paths, fake):
    same = [{"temperature": 1}, {"regex": "ab+", "temperature": 1}, {"regex": "ab+"}, None]
    records = [{"id": i, "prompt": "a", "sampling": own} for i, own in enumerate(same)]
    write_records(paths.input, records)
    assert main(command(tiny_model, paths, "--regex", "ab+")) == 0
    (one,) = fake.calls[0].processors
    assert one.num_prompts is None
    assert one == emsjax.constraints.regex("ab+", AutoTokenizer.from_pretrained(tiny_model))
    own = [{"regex": "ab+"}, {"choices": ["c"]}, {"regex": "ab+"}, {"choices": ["c"]}, {}]
    records = [{"id": i, "prompt": "a", "sampling": settings} for i, settings in enumerate(own)]
    write_records(paths.input, records)
    paths.output = paths.output.with_name("other.jsonl")
    assert main(command(tiny_model, paths)) == 0
    variants = fake.calls[1].variants
    assert variants.count == 4  # the options', and one for each different "sampling"
    (one,) = fake.calls[1].processors
    assert one.num_prompts == 4
    assert len(set(one.starts[:4].tolist())) == 3  # two constraints, and none


def test_constraints_that_are_too_large_together_leave_no_output(
    tiny_model, paths, capsys, monkeypatch
):
    own = [{"regex": "(ab|c){1,9}"}, {"regex": "(a|bc){1,9}"}]
    records = [{"id": i, "prompt": "a", "sampling": settings} for i, settings in enumerate(own)]
    write_records(paths.input, records)
    monkeypatch.setattr(joining, "check_size", refuse_size)
    message = "constraints need a table of 9 states"
    assert_error(capsys, main(command(tiny_model, paths)), message)
    assert not paths.output.exists()


def refuse_size(num_states, num_classes):
    raise TooLargeError("a table of 9 states")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"regex": "(a"}, 'field "sampling": regex: pattern'),
        ({"regex": 3}, 'field "sampling": regex: pattern must be a regular expression'),
        ({"choices": []}, 'field "sampling": choices is empty'),
        ({"choices": "ab"}, 'field "sampling": choices must be a list of strings'),
        ({"json_schema": {"type": "integer", "minimum": 3}}, "json_schema: the JSON schema"),
        ({"json_schema": "{"}, "json_schema: the JSON schema is not JSON"),
        ({"regex": "a", "choices": ["b"]}, "only one of regex and choices can be kept to"),
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


def test_a_record_with_a_constraint_needs_an_end_token(tiny_model, paths, capsys):
    write_records(paths.input, [*RECORDS, {"id": 9, "prompt": "a", "sampling": {"regex": "a"}}])
    message = 'field "sampling": a constraint needs an end token'
    assert_error(capsys, main(command(tiny_model, paths, "--ignore-eos")), message, "line 4")


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
