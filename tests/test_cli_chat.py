"""`emsjax generate` with messages: the tokenizer's chat template, and tokenizers without one."""

import json
import shutil

import numpy as np
import pytest
from jsonl import assert_error, command, read_lines, write_records
from transformers import AutoTokenizer

import emsjax
from emsjax.cli.main import main

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role[0] }}]{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "abc"}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "go"},
    ],
]


@pytest.fixture(scope="module")
def chat_model(tiny_model, tmp_path_factory):
    """The tiny model, whose tokenizer has a chat template."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_messages_are_completed_after_the_templates_generation_prompt(chat_model, paths):
    records = [{"id": f"c{i}", "messages": messages} for i, messages in enumerate(CHATS)]
    write_records(paths.input, [*records, {"id": "p", "prompt": "abc"}])
    assert main(command(chat_model, paths, "--ignore-eos")) == 0
    lines = {line["id"]: line["tokens"] for line in read_lines(paths.output)}

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    texts = ["</s>[u]abc;[a]", "</s>[s]be;[u]é?;[a]no;[u]go;[a]"]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert prompts[0][0] == prompts[1][0] == tokenizer.bos_token_id
    assert prompts[0][1] != tokenizer.bos_token_id  # the start token is there once
    prompts.append(tokenizer("abc").input_ids)
    model = emsjax.from_pretrained(chat_model, dtype="float32")
    out = emsjax.generate(model, prompts, max_new_tokens=6, eos_token_ids=())
    np.testing.assert_array_equal([lines[name] for name in ("c0", "c1", "p")], out.tokens)
    assert len(np.unique(out.tokens, axis=0)) > 1


def test_a_tokenizer_without_a_template_is_named(tiny_model, paths, capsys):
    write_records(paths.input, [{"id": 1, "messages": CHATS[0]}])
    code = main(command(tiny_model, paths, "--skip-invalid"))
    assert_error(capsys, code, str(tiny_model), "has no chat template", "line 1")
    assert not paths.output.exists()


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"messages": [], "id": 2}, 'field "messages" must be a list of messages, not []'),
        ({"messages": "hello", "id": 2}, "must be a list of messages, not 'hello'"),
        ({"messages": ["hello"], "id": 2}, 'messages[0] must have a "role", a string'),
        ({"messages": [*CHATS[0], {"role": "user"}], "id": 2}, 'messages[1] must have a "content"'),
        ({"messages": CHATS[0], "prompt": "a", "id": 2}, "not both"),
        ({"messages": [{"role": "tool", "content": "x"}], "id": 2}, "no tools here"),
    ],
)
def test_invalid_messages_are_refused_or_skipped(chat_model, paths, capsys, record, error):
    write_records(paths.input, [{"id": 1, "messages": CHATS[0]}, record])
    assert_error(capsys, main(command(chat_model, paths)), error, "line 2")
    assert main(command(chat_model, paths, "--skip-invalid")) == 0
    valid, invalid = sorted(read_lines(paths.output), key=lambda line: line["id"])
    assert valid["tokens"]
    assert invalid["finish_reason"] == "refused"
    assert error in invalid["error"]


def test_a_template_of_the_users_own_reads_other_fields(chat_model, paths):
    record = {"id": 1, "messages": CHATS[0], "question": "abc"}
    paths.input.write_text(json.dumps(record))
    assert main(command(chat_model, paths, "--prompt-template", "{question}")) == 0
    (line,) = read_lines(paths.output)
    assert line["tokens"]
