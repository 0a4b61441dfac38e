"""`emsjax distil`: what it leaves behind, how it goes on, and what it refuses."""

import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jsonl import END, TEXTS, assert_error, save_random_model
from transformers import AutoTokenizer

import emsjax
from emsjax import distillation
from emsjax.cli import distil as command
from emsjax.cli.main import main, make_parser
from emsjax.distillation.texts import read_texts

LINES = [{"text": TEXTS[i % 5] * (1 + i % 4)} for i in range(14)]
FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *(command.RECORD, command.FIGURE),
}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def arguments(target, data, output, *options):
    sizes = ["--layers", 1, "--width", 8, "--steps", 6, "--batch-size", 2]
    lengths = ["--sequence-length", 16, "--max-new-tokens", 8, "--draft-tokens", 2]
    counts = ["--generations", 5, "--held-out", 3, "--warm-up-steps", 2, "--checkpoint-every", 2]
    fixed = ["--target", target, "--data", data, "--output", output]
    return list(map(str, ["distil", *fixed, *sizes, *lengths, *counts, *options]))


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The output folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    data = folder / "texts.jsonl"
    data.write_text("\n".join(map(json.dumps, LINES)))
    assert main(arguments(tiny_model, data, folder / "draft")) == 0
    return folder / "draft"


def record_of(folder):
    return json.loads((folder / command.RECORD).read_bytes())


def test_the_folder_is_a_model_with_its_card_figure_and_record(whole, tiny_model):
    names = {path.name for path in whole.iterdir()}
    assert names - {"special_tokens_map.json"} == FILES | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    target = emsjax.OPT.from_pretrained(tiny_model, dtype=jnp.float32)
    draft = emsjax.OPT.from_pretrained(whole, dtype=jnp.float32)
    assert (draft.config.hidden_size, draft.config.num_hidden_layers) == (8, 1)
    out = emsjax.generate(target, [[3, 4]], emsjax.DraftModel(draft), max_new_tokens=4)
    plain = emsjax.generate(target, [[3, 4]], max_new_tokens=4)
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert (whole / command.FIGURE).read_bytes().startswith(b"\x89PNG")
    record = record_of(whole)
    assert record["settings"]["dtype"] == "float32"  # the default on a CPU
    results = record["results"]
    assert len(results["losses"]) == 6
    assert results["parameters"]["draft"] < results["parameters"]["target"]
    card = (whole / "README.md").read_text()
    for part in (
        str(tiny_model),
        "1 layers of width 8",
        "forward-kl 0.9",
        "emsjax distil --target",
    ):
        assert part in card
    for name in ("before", "after"):
        assert len(results[name]["by_position"]) == 2
        assert f"{results[name]['by_position'][1]:.3f}" in card
    assert f"{results['plain']['tokens_per_s']:.0f}" in card


def test_torch_loads_the_model(whole):
    pytest.importorskip("torch")
    from transformers import OPTForCausalLM

    assert OPTForCausalLM.from_pretrained(whole).config.hidden_size == 8
    assert AutoTokenizer.from_pretrained(whole)("x = 1").input_ids[0] == END


class StoppedError(BaseException):
    pass


@pytest.mark.parametrize(
    "moment", ["continuations", "Checkpoints", "train", "evaluate", "model_card", "clean_up"]
)
def test_an_interrupted_run_ends_with_the_same_bits(
    whole, tiny_model, data, tmp_path, monkeypatch, moment
):
    run = arguments(tiny_model, data, tmp_path / "draft")

    def stop(*args, **options):
        raise StoppedError

    with monkeypatch.context() as patch:
        owner = command if hasattr(command, moment) and moment != "train" else distillation
        patch.setattr(owner, moment, stop)
        with pytest.raises(StoppedError):
            main(run)
    assert main(run) == 0
    assert {path.name for path in (tmp_path / "draft").iterdir()} == {
        path.name for path in whole.iterdir()
    }
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (whole, tmp_path / "draft")
    ]
    assert weights[0] == weights[1]
    assert (
        record_of(tmp_path / "draft")["results"]["losses"] == record_of(whole)["results"]["losses"]
    )


def test_a_killed_run_resumes_and_ends_with_the_same_bits(whole, tiny_model, data, tmp_path):
    output = tmp_path / "draft"
    run = arguments(tiny_model, data, output)
    process = subprocess.Popen([sys.executable, "-m", "emsjax", *run], stderr=subprocess.DEVNULL)
    checkpoints = output / command.CHECKPOINTS
    while process.poll() is None and not (checkpoints.exists() and any(checkpoints.iterdir())):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "results" not in record_of(output)
    assert main(run) == 0
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_finished_run_is_left_unchanged_and_another_is_refused(
    whole, tiny_model, data, capsys, monkeypatch
):
    monkeypatch.setattr(command, "run", None)  # nothing is done
    before = {path: path.read_bytes() for path in whole.iterdir()}
    assert main(arguments(tiny_model, data, whole)) == 0
    captured = capsys.readouterr()
    assert "is finished" in captured.err
    assert "acceptance rate" in captured.out
    assert {path: path.read_bytes() for path in whole.iterdir()} == before
    code = main(arguments(tiny_model, data, whole, "--steps", 7))
    assert_error(capsys, code, "from another run", "steps was 6, is now 7")
    data.write_text(data.read_text() + '\n{"text": "more"}')
    assert_error(capsys, main(arguments(tiny_model, data, whole)), "data_sha256")


def poisoned_target(tiny_model, folder):
    """The target with finite positions that overflow in its first norm."""
    shutil.copytree(tiny_model, folder)
    model = emsjax.OPT.from_pretrained(folder, dtype=jnp.float32)
    table = model.embed_positions.embedding
    table[...] = jnp.full_like(table[...], 3e38)
    model.save_pretrained(folder)
    return folder


RATE = ["--learning-rate", 1e18, "--steps", 12]
DIVERGING = {  # options, error, and the step of the newest checkpoint
    "rate too high": (RATE, "the loss of step 3 or its gradient is not finite", 2),
    "target": ([], "the target's hidden states are not finite", None),
    "continuations": (["--start", "random"], "the target's logits are not finite", None),
    "loss": (
        ["--start", "random", "--generations", 0],
        "the loss of step 1 or its gradient is not finite: nan; no checkpoint yet",
        None,
    ),
    "evaluation": (
        ["--start", "random", "--generations", 0, "--losses", "cross-entropy"],
        "the target's logits are not finite for 3 of 3 prompts",
        6,
    ),
}


@pytest.mark.parametrize("case", DIVERGING)
def test_a_run_whose_numbers_are_not_finite_leaves_no_draft_model(
    tiny_model, data, tmp_path, capsys, case
):
    options, error, step = DIVERGING[case]
    target = tiny_model
    if case != "rate too high":
        target = poisoned_target(tiny_model, tmp_path / "target")
    run = arguments(target, data, tmp_path / "draft", *options)
    for _ in range(2):  # started again, it ends as it did
        assert main(run) == 1
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith("emsjax: error: ")
        assert error in said[-1]
        assert not any(line.startswith("emsjax: ") for line in said[:-1])
        folder = tmp_path / "draft"
        left = {path.name for path in folder.iterdir()}
        assert left <= {command.RECORD, command.GENERATIONS, command.CHECKPOINTS}
        assert "results" not in record_of(folder)
        checkpoints = distillation.Checkpoints(folder / command.CHECKPOINTS)
        assert checkpoints.manager.latest_step() == step
        checkpoints.close()


def test_a_given_draft_model_is_trained_further(tmp_path, tiny_model, data):
    save_random_model(tmp_path / "start", 1, hidden_size=8, ffn_dim=16, num_attention_heads=1)
    run = arguments(tiny_model, data, tmp_path / "draft", "--draft-model", tmp_path / "start")
    for option in ("--layers", "--width"):
        del run[run.index(option) : run.index(option) + 2]
    assert main(run) == 0
    assert record_of(tmp_path / "draft")["results"]["config"]["hidden_size"] == 8
    assert str(tmp_path / "start") in (tmp_path / "draft" / "README.md").read_text()


def test_texts_of_another_file_may_be_held_out(tiny_model, data, tmp_path, monkeypatch, capsys):
    found = {}

    def run(options, draft_config, held_out, training, say):
        found.update(held_out=held_out, training=training)
        raise StoppedError

    monkeypatch.setattr(command, "run", run)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    arguments_of = lambda *options: arguments(tiny_model, data, tmp_path / "draft", *options)
    with pytest.raises(StoppedError):
        main(arguments_of("--held-out-data", other, "--generations", 0))
    assert len(found["training"]) == len(LINES)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.batch_decode(found["held_out"], skip_special_tokens=True) == TEXTS[:3]
    many = arguments_of("--held-out-data", other, "--held-out", len(TEXTS) + 1)
    assert_error(capsys, main(many), f"{other} has {len(TEXTS)} texts")
    assert_error(capsys, main(arguments_of("--held-out-data", data)), "would be trained on")
    again = arguments_of("--held-out-data", other, "--generations", 0)
    other.write_text(other.read_text().replace("hello", "other"))
    assert_error(capsys, main(again), "held_out_data_sha256")


def test_without_matplotlib_everything_else_is_written(tmp_path, whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said, record = [], record_of(whole)
    command.finish(tmp_path, record, said.append)
    assert "no figure: plots need matplotlib" in said[0]
    assert record_of(tmp_path) == record


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "holds no texts"),
        (['{"text": ""}'], "line 1: the text is empty"),
        (['{"text": "a"}', "{"], "line 2"),
        (['{"title": "a", "id": null}'], 'missing field "text"'),
        (["[1]"], "line 1: a record must be a JSON object"),
        (['{"text": "a"}'] * 4, "fewer than one sequence of 16"),
        (['{"text": "a"}'] * 3, "3 cannot be held out"),
    ],
)
def test_texts_that_cannot_be_trained_on_are_named(
    tiny_model, data, tmp_path, capsys, lines, error
):
    data.write_text("\n".join(lines))
    assert_error(capsys, main(arguments(tiny_model, data, tmp_path / "draft")), error)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--width", 12], "--width must be a multiple of 8"),
        (["--width", 16], "--layers and width are the target's"),
        (["--layers", 2], "--layers must be in 1..1"),
        (["--sequence-length", 65], "--sequence-length must be in 2..64, not 65"),
        (["--max-new-tokens", 64], "--max-new-tokens must be in 1..63"),
        (["--losses", "kl"], "losses must be of cross-entropy"),
        (["--losses", "forward-kl=-1"], "must be above 0"),
        (["--draft-model", "x"], "--layers: --draft-model has its own"),
        (["--draft-revision", "x"], "--draft-revision needs --draft-model"),
        (["--draft-tokens", "8"], "--draft-tokens must be below --max-new-tokens 8, not 8"),
        (["--temperature", "-1"], "--temperature must be finite and >= 0, not -1.0"),
        (["--learning-rate", "0"], "--learning-rate must be finite and > 0, not 0.0"),
        (["--weight-decay", "inf"], "--weight-decay must be finite and >= 0, not inf"),
        (["--target", "./none"], "--target: none is not a folder"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--text-template", "{"], "--text-template '{'"),
    ],
)
def test_what_cannot_be_trained_is_named_before_any_work(
    tiny_model, data, tmp_path, capsys, options, error
):
    code = main(arguments(tiny_model, data, tmp_path / "draft", *options))
    assert_error(capsys, code, error)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"vocab_size": 301}, "has vocab_size 301, --target 300"),
        ({"max_position_embeddings": 32}, "has max_position_embeddings 32"),
        ({"num_hidden_layers": 2}, "must be smaller than --target"),
        ({}, "must be smaller than --target"),
    ],
)
def test_an_unsuitable_draft_model_is_named(tiny_model, data, tmp_path, capsys, config, error):
    save_random_model(tmp_path / "start", 1, **config)
    run = arguments(tiny_model, data, tmp_path / "draft", "--draft-model", tmp_path / "start")
    for option in ("--layers", "--width"):
        del run[run.index(option) : run.index(option) + 2]
    assert_error(capsys, main(run), error)
    assert_error(capsys, main([*run, "--start", "random"]), "--start random: training starts with")


def test_training_may_start_with_random_weights(tiny_model, data, tmp_path):
    options = ["--start", "random", "--steps", 1, "--learning-rate", 1e-9, "--generations", 0]
    assert main(arguments(tiny_model, data, tmp_path / "draft", *options, "--seed", 3)) == 0
    draft = emsjax.OPT.from_pretrained(tmp_path / "draft", dtype=jnp.float32)
    start = emsjax.OPT(draft.config, rngs=nnx.Rngs(3), dtype=jnp.float32)
    leaves = [jax.tree.leaves(nnx.state(model)) for model in (draft, start)]
    for found, expected in zip(*leaves, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-7)
    assert "random weights (embeddings projected)" in (tmp_path / "draft/README.md").read_text()


def test_continuations_have_the_given_temperature(tiny_model, data, tmp_path, monkeypatch):
    def asked(*_, temperature, **__):
        raise StoppedError(temperature)

    monkeypatch.setattr(distillation, "continuations", asked)
    with pytest.raises(StoppedError, match=r"^0\.25$"):
        main(arguments(tiny_model, data, tmp_path / "draft", "--temperature", 0.25))


def test_an_output_folder_with_other_content_is_left_unchanged(tiny_model, data, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert_error(capsys, main(arguments(tiny_model, data, tmp_path)), "holds something else")
    file = tmp_path / "mine.txt"
    assert_error(capsys, main(arguments(tiny_model, data, file)), "is not a folder")
    assert file.read_text() == "mine"


def test_a_batch_that_does_not_divide_among_devices_is_named_before_any_work(
    tiny_model, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command.jax, "local_devices", lambda: [None] * 3)
    code = main(arguments(tiny_model, data, tmp_path / "draft"))
    assert_error(capsys, code, "--batch-size must be a multiple of 3")
    assert not (tmp_path / "draft").exists()


def test_a_tokenizer_of_another_model_is_noticed(tiny_model, data, tmp_path, capsys):
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_random_model(tmp_path, 0, vocab_size=90)
    code = main(arguments(tmp_path, data, tmp_path / "draft"))
    assert_error(capsys, code, "do not belong together")


def test_losses_have_weights_and_defaults():
    parse = make_parser("").parse_args
    needed = ["distil", "--target", "t", "--data", "d", "--output", "o"]
    assert parse(needed).losses == {"forward-kl": 0.9, "cross-entropy": 0.1}
    found = parse([*needed, "--losses", "total-variation,cross-entropy=0.25"]).losses
    assert found == {"total-variation": 1.0, "cross-entropy": 0.25}
    with pytest.raises(SystemExit):
        parse([*needed, "--losses", "forward-kl=much"])


def test_a_byte_order_mark_before_the_texts_is_skipped(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a b"}\r\n{"text": "c"}\r\n')
    assert read_texts(path, "{text}") == ["a b", "c"]
