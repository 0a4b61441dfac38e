"""Draft lengths on the command line: `emsjax profile`, and its use by `emsjax generate`."""

import json
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jsonl import (
    FakeStream,
    InterruptedStream,
    assert_error,
    command,
    profile_of,
    read_lines,
    save_random_model,
    write_records,
)

import emsjax
from emsjax import streaming
from emsjax.benchmarks.shapes import MODELS
from emsjax.cli.main import main, make_parser
from emsjax.models.numbers import NumberFormats
from emsjax.policies import profiles as profile_store
from emsjax.policies.costs import COSTS, FORMAT
from emsjax.records import output as batch_output

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

SIZES = ["--batch-sizes", "1,2", "--max-draft-tokens", "2"]
NO_DRAFT_PAYS = {"draft_ms": 1e9}


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    save_random_model(folder, 1, hidden_size=8)
    return folder


@pytest.fixture
def drafting(tiny_model, draft_model, paths):
    """A command whose tokens depend on the draft lengths."""
    write_records(paths.input)

    def make(*options):
        sampling = ["--temperature", "0.8", "--drafter", "model", "--draft-model", draft_model]
        return command(tiny_model, paths, *sampling, *options)

    return make


def policies(fake):
    """The policy that all calls so far had; the calls are then forgotten."""
    (policy,) = {id(call.draft_length): call.draft_length for call in fake.calls}.values()
    fake.calls.clear()
    return policy


def start_afresh(paths):
    paths.output = paths.output.with_name("also " + paths.output.name)


def test_auto_is_bass_without_a_profile_and_goodput_with_one(
    tiny_model, draft_model, paths, drafting, fake, capsys
):
    assert main(drafting()) == 0
    assert policies(fake) == emsjax.BassHeuristic()
    advised = f"emsjax profile --model {tiny_model} --draft-model {draft_model} --dtype float32"
    assert f"Draft lengths: BASS heuristic; `{advised}`" in capsys.readouterr().err

    start_afresh(paths)
    profile = profile_of(tiny_model, draft_model, draft_ms=0.25)
    stored = profile_store.store(profile)
    assert main(drafting("--draft-length", "auto")) == 0
    policy = policies(fake)
    assert isinstance(policy, emsjax.Goodput)
    assert policy.costs.draft_ms == [0.25]
    assert f"Draft lengths: Goodput, from the stored profile {stored}\n" in capsys.readouterr().err


def test_by_default_suffix_drafts_and_a_draft_model_are_mixed_by_costs(
    tiny_model, draft_model, paths, fake, capsys
):
    write_records(paths.input)

    def run(*options):
        """The drafter, the policy and what is told of it, with the default drafter."""
        start_afresh(paths)
        default = command(tiny_model, paths, *options)
        place = default.index("--drafter")
        assert main(default[:place] + default[place + 2 :]) == 0
        drafter, policy = fake.calls[0].drafter, policies(fake)
        return drafter, policy, capsys.readouterr().err

    drafter, policy, told = run()
    assert isinstance(drafter, emsjax.SuffixDrafter)
    assert policy == emsjax.BassHeuristic()
    assert "Draft lengths: BASS heuristic" in told

    mixed, policy, told = run("--draft-model", draft_model)
    assert isinstance(mixed, emsjax.Mixed)
    suffix, model = mixed.sources
    assert isinstance(suffix, emsjax.SuffixDrafter)
    assert isinstance(model, emsjax.DraftModel)
    assert (suffix.max_draft_tokens, mixed.costs, policy) == (16, None, emsjax.BassHeuristic())

    stored = profile_store.store(profile_of(tiny_model, draft_model, draft_ms=0.25))
    assert isinstance(run()[1], emsjax.Goodput)
    mixed, policy, told = run("--draft-model", draft_model)
    assert mixed.costs.draft_ms == [0.25]
    assert policy is None
    assert f"Draft lengths: as the drafter chooses, from the stored profile {stored}\n" in told


@pytest.mark.parametrize("which", ["another dtype", "another model", "another draft model"])
def test_a_stored_profile_of_other_models_is_not_used(
    tiny_model, draft_model, drafting, fake, which
):
    profile = {
        "another dtype": lambda: profile_of(tiny_model, draft_model, "bfloat16"),
        "another model": lambda: profile_of(draft_model, draft_model),
        "another draft model": lambda: profile_of(tiny_model, tiny_model),
    }[which]()
    profile_store.store(profile)
    assert main(drafting()) == 0
    assert policies(fake) == emsjax.BassHeuristic()


def test_prompt_lookup_uses_a_profile_with_any_draft_model(tiny_model, draft_model, paths, fake):
    write_records(paths.input)
    profile_store.store(profile_of(tiny_model, draft_model))
    assert main(command(tiny_model, paths, "--drafter", "prompt-lookup")) == 0
    assert isinstance(policies(fake), emsjax.Goodput)


def test_narrow_weights_have_profiles_of_their_own(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    options = ["--drafter", "prompt-lookup", "--quantize", "int8"]
    profile_store.store(profile_of(tiny_model))
    assert main(command(tiny_model, paths, *options)) == 0
    assert policies(fake) == emsjax.BassHeuristic()
    advised = f"emsjax profile --model {tiny_model} --dtype float32 --quantize int8"
    assert f"`{advised}`" in capsys.readouterr().err
    start_afresh(paths)
    profile_store.store(profile_of(tiny_model, quantize="int8"))
    assert main(command(tiny_model, paths, *options)) == 0
    assert isinstance(policies(fake), emsjax.Goodput)


def test_plain_decoding_has_no_policy(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    profile_store.store(profile_of(tiny_model))
    assert main(command(tiny_model, paths)) == 0
    assert policies(fake) is None
    assert "Draft lengths" not in capsys.readouterr().err


def test_a_given_policy_is_used_regardless_of_stored_profiles(
    tiny_model, draft_model, paths, drafting, fake, capsys
):
    profile_store.store(profile_of(tiny_model, draft_model))
    assert main(drafting("--draft-length", "bass")) == 0
    assert policies(fake) == emsjax.BassHeuristic()
    for number in (0, 3):
        start_afresh(paths)
        assert main(drafting("--draft-length", number)) == 0
        policy = policies(fake)
        assert isinstance(policy, emsjax.FixedLength)
        assert policy.k == number
        assert f"Draft lengths: fixed at {number}\n" in capsys.readouterr().err


@pytest.mark.parametrize("request_", ["auto", "goodput"])
def test_a_given_profile_is_preferred_to_the_stored_one(
    tiny_model, draft_model, drafting, fake, tmp_path, capsys, request_
):
    profile_store.store(profile_of(tiny_model, draft_model, draft_ms=1.0))
    given = tmp_path / "[given].json"
    given.write_text(json.dumps(profile_of(tiny_model, draft_model, draft_ms=2.0)))
    assert main(drafting("--draft-length", request_, "--profile", given)) == 0
    assert policies(fake).costs.draft_ms == [2.0]
    assert f"Goodput, from the profile {given}\n" in capsys.readouterr().err


BAD_PROFILES = {
    "model": (lambda model, draft: profile_of(draft, draft), "model: hidden_size=8 word"),
    "draft model": (lambda model, draft: profile_of(model, model), "draft_model: hidden_size=16 "),
    "no draft model": (
        lambda model, draft: profile_of(model),
        "model: none, not model_type=opt hidden_size=8",
    ),
    "dtype": (lambda model, draft: profile_of(model, draft, "bfloat16"), "dtype: bfloat16, not"),
    "format": (lambda model, draft: {"format": "emsjax profile 0"}, "format"),
    "subject": (
        lambda model, draft: {"format": FORMAT, "costs": dict.fromkeys(COSTS)},
        "does not say what",
    ),
    "object": (lambda model, draft: [], "format"),
}


@pytest.mark.parametrize(("make", "part"), BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_an_unsuitable_profile_is_named_before_anything_is_loaded(
    tiny_model, draft_model, paths, drafting, fake, tmp_path, capsys, monkeypatch, make, part
):
    monkeypatch.delattr("emsjax.models.checkpoint.load")
    given = tmp_path / "given.json"
    given.write_text(json.dumps(make(tiny_model, draft_model)))
    assert_error(capsys, main(drafting("--profile", given)), str(given), part)
    assert not paths.output.exists()


def test_a_profile_of_another_device_is_refused(
    tiny_model, draft_model, drafting, fake, tmp_path, capsys
):
    profile = profile_of(tiny_model, draft_model)
    profile["subject"]["device"] = "gpu NVIDIA H200"
    given = tmp_path / "given.json"
    given.write_text(json.dumps(profile))
    parts = (str(given), "another device: gpu NVIDIA H200, not cpu")
    assert_error(capsys, main(drafting("--profile", given)), *parts)


def tokens(paths):
    return [line["tokens"] for line in read_lines(paths.output)]


def policies_of_parts(monkeypatch, arguments, between):
    """Policies of a run that is interrupted after five completions, and of its resumption."""
    parts = InterruptedStream(5), InterruptedStream(None)
    for stream, code in zip(parts, (130, 0), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "stream_numbered", stream)
            assert main(arguments) == code
        between()
    return [policy for part in parts for policy in part.policies]


@pytest.mark.parametrize("before", ["bass", "goodput"])
def test_a_resumed_run_keeps_its_policy(
    tiny_model, draft_model, paths, drafting, profiles, monkeypatch, capsys, before
):
    """Also if a profile is stored or removed in between."""
    profile = profile_of(tiny_model, draft_model, **NO_DRAFT_PAYS)
    change = lambda: profile_store.store(profile)
    other = lambda: shutil.rmtree(profiles, ignore_errors=True)
    start, between = (other, change) if before == "bass" else (change, other)
    between()
    start_afresh(paths)
    assert main(drafting()) == 0
    of_other = tokens(paths)
    start_afresh(paths)
    start()
    assert main(drafting()) == 0
    whole = tokens(paths)
    assert whole != of_other  # it matters which policy goes on

    start_afresh(paths)
    capsys.readouterr()
    first, second = policies_of_parts(monkeypatch, drafting(), between)
    assert len(tokens(paths)) == len(whole)
    kind = emsjax.BassHeuristic if before == "bass" else emsjax.Goodput
    assert {type(first), type(second)} == {kind}
    same = jax.tree.map(np.array_equal, first, second)
    assert all(jax.tree.leaves(same))
    shown = capsys.readouterr().err
    assert shown.count("Draft lengths: ") == 2
    assert shown.count("as when the run began\n") == 1


def test_a_run_resumes_without_the_profile_that_it_began_with(
    tiny_model, draft_model, drafting, profiles, monkeypatch
):
    profile_store.store(profile_of(tiny_model, draft_model, draft_ms=0.5))
    arguments = drafting("--draft-length", "goodput")
    for interrupt_after, code in ((5, 130), (None, 0)):
        stream = FakeStream(interrupt_after)
        monkeypatch.setattr(streaming, "stream_numbered", stream)
        assert main(arguments) == code
        assert policies(stream).costs.draft_ms == [0.5]
        shutil.rmtree(profiles, ignore_errors=True)


def break_off(monkeypatch, arguments):
    monkeypatch.setattr(streaming, "stream_numbered", InterruptedStream(5))
    assert main(arguments) == 130
    nothing_more = InterruptedStream(0)
    monkeypatch.setattr(streaming, "stream_numbered", nothing_more)


@pytest.mark.parametrize("asked", ["bass", "goodput", "7"])
def test_another_policy_is_another_run(
    tiny_model, draft_model, paths, drafting, monkeypatch, capsys, asked
):
    profile_store.store(profile_of(tiny_model, draft_model))
    break_off(monkeypatch, drafting("--max-draft-tokens", "4"))
    before = paths.output.read_bytes()
    capsys.readouterr()
    code = main(drafting("--max-draft-tokens", "4", "--draft-length", asked))
    assert_error(capsys, code, f"draft_length was 'auto', is now '{asked}'")
    assert paths.output.read_bytes() == before


def test_the_content_of_a_given_profile_identifies_the_run(
    tiny_model, draft_model, paths, drafting, monkeypatch, tmp_path, capsys
):
    given, same = tmp_path / "given.json", tmp_path / "same.json"
    given.write_text(json.dumps(profile_of(tiny_model, draft_model)))
    shutil.copy(given, same)
    break_off(monkeypatch, drafting("--profile", given))
    assert main(drafting("--profile", same)) == 130  # would have gone on
    capsys.readouterr()
    assert_error(capsys, main(drafting()), "profile_sha256 was")
    given.write_text(json.dumps(profile_of(tiny_model, draft_model, draft_ms=3.0)))
    assert_error(capsys, main(drafting("--profile", given)), "profile_sha256 was")


def test_the_recorded_choices_of_an_output_take_precedence(tmp_path):
    path = tmp_path / "out.jsonl"
    with batch_output.open_results(path, {}, {1}, 1, {"value": "first"}) as results:
        assert results.resolved == {"value": "first"}
        results.append({"id": 1})
    with batch_output.open_results(path, {}, {1}, 1, {"value": "second"}) as results:
        assert results.resolved == {"value": "first"}


@pytest.fixture(scope="module")
def bare_models(tiny_model, draft_model, tmp_path_factory):
    """Folders with only the configurations."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    for source, folder in zip((tiny_model, draft_model), folders, strict=True):
        shutil.copy(source / "config.json", folder)
    return folders


def test_the_command_that_goodput_suggests_makes_it_work(
    tiny_model, draft_model, bare_models, paths, drafting, fake, profiles, tmp_path, capsys
):
    code = main(drafting("--draft-length", "goodput"))
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("emsjax: error: --draft-length goodput: no profile")
    assert not paths.output.exists()
    (advice,) = re.findall("`emsjax (.+)`", error)
    # Weights are not needed.
    for folder, bare in zip((tiny_model, draft_model), bare_models, strict=True):
        advice = advice.replace(str(folder), str(bare))
    copy = tmp_path / "copy.json"
    advised = [*shlex.split(advice), *SIZES, "--output", str(copy)]
    assert main(advised) == 0

    shown = capsys.readouterr()
    assert "batch 2: 6 rows" in shown.err
    assert f"Stored in {profiles}/" in shown.out
    assert re.search(r"Best draft length by batch size at that rate: 1(\.\.2)?: \d", shown.out)
    profile = json.loads(copy.read_bytes())
    assert profile["command"] == shlex.join(["emsjax", *advised])
    assert profile["settings"]["context"] == 64 - 2 - 7  # all that there is room for
    assert profile["hardware"]["platform"] == jax.default_backend()
    assert profile["seconds"] > 0
    (stored,) = profiles.iterdir()
    assert json.loads(stored.read_bytes()) == profile
    assert emsjax.BatchSizeTable.from_profile(copy).sizes.tolist() == [1, 2]

    assert main(drafting("--draft-length", "goodput")) == 0
    costs = policies(fake).costs
    assert costs.rows.tolist() == [3, 6]
    assert (costs.row_ms > 0).all()
    assert costs.batches.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--batch-sizes", "1,0"], ["--batch-sizes", "'1,0'"]),
        (["--batch-sizes", ""], ["--batch-sizes", "1,8,64"]),
        (["--max-draft-tokens", "0"], ["--max-draft-tokens", "at least 1"]),
        (["--max-draft-tokens", "51"], ["--max-draft-tokens 51", "64 positions", "at most 50"]),
        (["--context", "56"], ["--context", "7..55", "64 positions"]),
        (["--context", "6"], ["--context", "7..55"]),
        (["--acceptance-rate", "1"], ["--acceptance-rate", "between 0 and 1"]),
        (["--acceptance-rate", "often"], ["--acceptance-rate", "often"]),
        (["--draft-revision", "main"], ["--draft-revision", "--draft-model"]),
        (["--draft-model", "./none"], ["--draft-model", "none is not a folder"]),
        (["--model", "./none"], ["--model", "none is not a folder"]),
        (["--output", "no/such/folder/p.json"], ["--output", "no/such/folder/p.json"]),
        (["--output", "."], ["--output", "directory"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_profiled_is_named_before_the_work(
    bare_models, profiles, capsys, monkeypatch, options, parts
):
    monkeypatch.delattr("emsjax.benchmarks.step_costs.Measurement.run")
    try:
        code = main(["profile", "--model", str(bare_models[0]), *SIZES, *options])
    except SystemExit as stop:
        code = stop.code
    assert_error(capsys, code, *parts)
    assert not list(profiles.glob("*"))


def test_shapes_are_profiled_by_their_names(profiles, monkeypatch):
    measured = {"seconds": 0.0, "costs": {}}
    monkeypatch.setattr("emsjax.benchmarks.step_costs.measure_profile", lambda *_: measured)
    monkeypatch.setattr(profile_store, "store", lambda profile: measured.update(profile) or "here")
    monkeypatch.setattr("emsjax.cli.profile.report", lambda *_: None)
    shapes = ["--model", "opt-6.7b", "--draft-model", "opt-125m", "--dtype", "bfloat16"]
    assert main(["profile", *shapes, "--commit", "abc"]) == 0
    configs = (MODELS["opt-6.7b"], MODELS["opt-125m"], NumberFormats(jnp.bfloat16))
    assert measured["subject"] == profile_store.subject(*configs)
    assert measured["commit"] == "abc"


@pytest.mark.parametrize("blocked", ["folder", "file"])
def test_a_store_that_cannot_be_written_is_named_before_the_work(
    bare_models, profiles, capsys, monkeypatch, blocked
):
    monkeypatch.delattr("emsjax.benchmarks.step_costs.Measurement.run")
    if blocked == "folder":
        profiles.write_text("no folder")
    else:
        profile_store.path_of(profile_of(bare_models[0])["subject"]).mkdir(parents=True)
    code = main(["profile", "--model", str(bare_models[0]), *SIZES])
    assert_error(capsys, code, str(profiles))


@pytest.mark.parametrize(("command", "takes"), [("generate", True), ("profile", False)])
def test_help_offers_drafters_that_read_hidden_states_where_they_are_taken(command, takes, capsys):
    with pytest.raises(SystemExit):
        make_parser("").parse_args([command, "--help"])
    assert ("EAGLE-3" in capsys.readouterr().out) == takes
