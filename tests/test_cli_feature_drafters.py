"""Commands take folders of drafters that read hidden states for --draft-model."""

import json
from types import SimpleNamespace

import pytest
from flax import nnx
from jsonl import assert_error, command, read_lines, save_random_model, write_records

import emsjax
from emsjax.cli.evaluate import load
from emsjax.cli.main import main
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.drafters.eagle3_network import Eagle3Config, Eagle3Network
from emsjax.drafters.feature_drafter import Shared
from emsjax.drafters.folders import feature_drafter

KINDS = {"eagle3": emsjax.Eagle3, "block": emsjax.BlockDrafter, "dspark": emsjax.BlockDrafter}
CONFIDENCE = ["--min-confidence", 0.5]


def save_drafters(folder, vocab_size, width):
    """Folders of untrained drafters, which use the target's embeddings and head."""
    layer = emsjax.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    table = nnx.Embed(vocab_size, width, rngs=nnx.Rngs(0)).embedding[...]
    common = {"layers": layer, "taps": (1,), "owns_embeddings": False, "owns_head": False}
    eagle3 = Eagle3Network(Eagle3Config(**common), rngs=nnx.Rngs(1), dtype="float32")
    block = BlockConfig(**common, block_size=4, mask_token_id=0)
    block = BlockNetwork(block, rngs=nnx.Rngs(2), dtype="float32")
    sure = BlockConfig(**common, block_size=4, mask_token_id=0, enable_confidence_head=True)
    sure = BlockNetwork(sure, rngs=nnx.Rngs(2), dtype="float32")
    for name, network in (("eagle3", eagle3), ("block", block), ("dspark", sure)):
        KINDS[name](network, shared=Shared(table, table)).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_drafters(tmp_path_factory.mktemp("drafters"), 300, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_tells_the_drafter(tiny_model, folders, paths, fake, capsys, kind):
    write_records(paths.input)
    own = {"eagle3": ["--branches", 2], "block": ["--min-confidence", 0], "dspark": CONFIDENCE}
    options = ["--draft-model", folders / kind, "--max-draft-tokens", 2, *own[kind]]
    options = ["--drafter", "model", *options]
    assert main(command(tiny_model, paths, *options)) == 0
    (drafter,) = {id(call.drafter): call.drafter for call in fake.calls}.values()
    assert type(drafter) is KINDS[kind]
    assert (drafter.max_draft_tokens, drafter.network.dtype) == (2, "float32")
    assert drafter.branches == (2 if kind == "eagle3" else 1)
    assert getattr(drafter, "min_confidence", 0) == (0.5 if kind == "dspark" else 0)
    told = capsys.readouterr().err
    assert "Draft lengths: BASS heuristic" in told
    assert "emsjax profile" not in told  # it measures no such drafter


def test_output_is_that_of_plain_decoding(tiny_model, folders, paths):
    write_records(paths.input)
    found = []
    mixed = ["--drafter", "auto", "--draft-model", folders / "eagle3", "--draft-length", 2]
    for options in ([], mixed):
        paths.output = paths.output.with_name(f"{len(found)}.jsonl")
        assert main(command(tiny_model, paths, *options)) == 0
        found.append([line["tokens"] for line in read_lines(paths.output)])
    assert found[0] == found[1]


def test_by_default_they_are_mixed_with_suffix_drafts(tiny_model, folders, paths, fake):
    write_records(paths.input)
    options = ["--drafter", "auto", "--draft-model", folders / "dspark", *CONFIDENCE]
    assert main(command(tiny_model, paths, *options)) == 0
    kinds = [type(source) for source in fake.calls[0].drafter.sources]
    assert kinds == [emsjax.SuffixDrafter, emsjax.BlockDrafter]
    assert fake.calls[0].drafter.sources[1].min_confidence == 0.5


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("block", ["--branches", 2], "--branches must be 1 for --draft-model"),
        ("block", CONFIDENCE, "--min-confidence needs a DSpark drafter with a confidence head"),
        ("eagle3", CONFIDENCE, "--min-confidence needs a DSpark drafter with a confidence head"),
        ("eagle3", ["--draft-length", "goodput"], "no profile measures --draft-model"),
        ("eagle3", ["--profile", "p.json"], "no profile measures --draft-model"),
    ],
)
def test_options_that_do_not_suit_them_are_refused(
    tiny_model, folders, paths, capsys, kind, options, error
):
    write_records(paths.input)
    paths.input.with_name("p.json").write_text("{}")
    options = [paths.input.with_name(x) if x == "p.json" else x for x in options]
    options = ["--drafter", "model", "--draft-model", folders / kind, *options]
    assert_error(capsys, main(command(tiny_model, paths, *options)), error)


def test_a_drafter_for_another_target_is_refused_before_any_is_loaded(
    tiny_model, tmp_path, paths, capsys, monkeypatch
):
    write_records(paths.input)
    monkeypatch.setattr("emsjax.models.pretrained.from_pretrained", None)
    for sizes, error in (
        ((299, 16), "for a vocabulary of 299 ids, and the target has 300"),
        ((300, 8), "reads hidden states of 8 numbers, and the target's have 16"),
    ):
        folder = save_drafters(tmp_path / str(sizes), *sizes) / "eagle3"
        options = ["--drafter", "model", "--draft-model", folder]
        assert_error(capsys, main(command(tiny_model, paths, *options)), str(folder), error)


def test_commands_that_need_a_model_name_the_drafter(tiny_model, folders, tmp_path, capsys):
    models = ["--model", str(tiny_model), "--draft-model", str(folders / "eagle3")]
    assert_error(capsys, main(["profile", *models]), "must be a draft model here", "(Eagle3)")


def test_a_confidence_that_no_draft_model_predicts_is_refused(tiny_model, paths, capsys):
    write_records(paths.input)
    drafter = ["--drafter", "model", "--draft-model", tiny_model, *CONFIDENCE]
    code = main(command(tiny_model, paths, *drafter))
    assert_error(capsys, code, "--min-confidence needs a DSpark drafter", str(tiny_model))
    code = main(command(tiny_model, paths, "--drafter", "auto", *CONFIDENCE))
    assert_error(capsys, code, "--min-confidence needs --draft-model")


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_benchmark_of_drafters_takes_them(tiny_model, folders, paths, monkeypatch, kind):
    write_records(paths.input)
    subjects = []

    def measure(subject, *others):
        subjects.append(subject)
        raise ValueError("seen")

    monkeypatch.setattr("emsjax.benchmarks.drafters.measure", measure)
    options = ["--model", tiny_model, "--draft-model", folders / kind, "--data", paths.input]
    options += ["--prompt-template", "{prompt}", "--max-prompt-tokens", 12, "--max-new-tokens", 8]
    options += ["--batch-sizes", 2, "--output", paths.output, "--dtype", "float32"]
    options += ["--draft-tokens", 2]
    assert main(["bench", "drafters", *map(str, options)]) == 2
    own, mixed = (subjects[0].drafters[name] for name in ("model", "mixed"))
    assert type(own) is KINDS[kind]
    assert own.max_draft_tokens == 2
    assert own in mixed.sources


def test_evaluation_takes_them(tiny_model, folders, monkeypatch):
    options = SimpleNamespace(
        model=str(tiny_model),
        revision=None,
        dtype="float32",
        quantize=None,
        drafter="model",
        draft_model=str(folders / "dspark"),
        draft_revision=None,
        max_draft_tokens=None,
        branches=None,
        min_confidence=0.5,
        tensor_parallel=None,
    )
    _, _, drafter = load(options)
    assert type(drafter) is emsjax.BlockDrafter
    assert drafter.min_confidence == 0.5


@pytest.mark.parametrize(
    ("contents", "kind"),
    [
        ({"speculators_model_type": "eagle3"}, emsjax.Eagle3),
        ({"speculators_model_type": "dspark"}, emsjax.BlockDrafter),
        ({"speculators_model_type": ["eagle3"]}, None),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9}, emsjax.Eagle3),
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({"architectures": ["Qwen3Eagle3Model"]}, emsjax.Eagle3),
        ({"architectures": ["DFlashDraftModel"]}, emsjax.BlockDrafter),
        ({"architectures": [["DFlashDraftModel"]]}, None),
        ({}, None),
    ],
)
def test_formats_are_told_from_those_of_models(tmp_path, contents, kind):
    (tmp_path / "config.json").write_text(json.dumps(contents))
    assert feature_drafter(tmp_path) is kind
    save_random_model(tmp_path / "model", 0)
    assert feature_drafter(tmp_path / "model") is None
