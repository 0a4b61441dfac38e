"""`emsjax bench peers` beside vLLM and SGLang, for which modules of the same interface stand in."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jsonl import assert_error

import emsjax
from emsjax.benchmarks import engine_process, engines, peers, peers_command, workloads
from emsjax.cli.main import main, make_parser
from emsjax.demo import DRAFT

NEW, SHAPE = 6, ("--shape", "tiny", "--draft-shape", "tiny")
BOTH = ("--libraries", "vllm,sglang")
ALL = set(itertools.product((1, 2), ("vllm", "sglang", "emsjax"), peers.METHODS))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Decode little, in a dtype without near-ties, and prepare in this, patched process."""
    monkeypatch.setattr(workloads, "PROMPT_TOKENS", (40, 60))
    monkeypatch.setattr(workloads.ScriptedModels, "dtype", jnp.float32)
    monkeypatch.setattr(engines, "apart", lambda function, *given: function(*given))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs the stand-ins, with this behaviour; returns their folder."""

    def write(**behaviour):
        text = workloads.ScriptedModels("tiny", "tiny").text
        found, torch = fake_engines.write(tmp_path / "installed", text, **behaviour)
        monkeypatch.syspath_prepend(found)
        # Only the engines' processes have the torch that stands in.
        paths = [str(found), str(torch), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return found

    return write


def bench(*options, model=SHAPE, sizes="1,2"):
    sizes = ("--max-new-tokens", NEW, "--batch-sizes", sizes, "--repeats", 1)
    return main([str(a) for a in ("bench", "peers", *model, *sizes, *options)])


def results_of(path):
    return json.loads(path.read_bytes())


def runs_of(path):
    return {
        (entry["batch"], run["library"], run["method"]): run
        for entry in results_of(path)["entries"]
        for run in entry["runs"]
    }


def test_engines_decode_the_same_prompts_each_with_its_own_speculation(install, tmp_path, capsys):
    folder, output = install(), tmp_path / "peers.json"
    assert bench("--output", output, *BOTH) == 0
    found = results_of(output)
    runs = runs_of(output)
    assert runs.keys() == ALL
    assert all(run["identical"] and len(run["seconds"]["6"]) == 1 for run in runs.values())
    assert found["settings"]["libraries"] == ["emsjax", "vllm", "sglang"]
    assert found["settings"]["ignore_eos"]
    assert found["versions"].items() >= {"vllm": "0.20.0", "sglang": "0.5.10"}.items()
    assert "left_out" not in found
    assert "vllm" in capsys.readouterr().out

    given = fake_engines.given(folder)
    processes = [one["pid"] for one in given if one["what"] == "made"]
    assert len({*processes, os.getpid()}) == 7  # three of each engine, and this one
    subject = peers.scripted_subject("tiny", "tiny", NEW)
    asked = [[prompt.tolist() for prompt in subject.prompts(size)] for size in (1, 2)]
    for pid in processes:
        calls = [one for one in given if one["pid"] == pid and one["what"] == "generate"]
        read = [
            [one["prompt_token_ids"] if isinstance(one, dict) else one for one in call["prompts"]]
            for call in calls
        ]
        assert read == [asked[0]] * 4 + [asked[1]] * 4
        counts = [one.get("max_tokens", one.get("max_new_tokens")) for one in calls]
        assert counts == [1, NEW] * 4
        assert all(one["temperature"] == 0 and one["ignore_eos"] for one in calls)
    of_sglang = [one["what"] for one in given if one["engine"] == "sglang"]
    assert of_sglang == ["made", *["flush", "generate"] * 8] * 3

    before, started = output.read_bytes(), len(given)
    assert bench("--output", output, *BOTH) == 0  # nothing is left to do
    assert (output.read_bytes(), len(fake_engines.given(folder))) == (before, started)


def test_the_arguments_are_those_of_the_engines(install):
    folder = install()
    assert bench(*BOTH, sizes="2") == 0
    made = [one for one in fake_engines.given(folder) if one["what"] == "made"]
    for one in made:
        assert one.pop("dtype") == "float32"
        assert one.pop("skip_tokenizer_init") is True
        path = one.pop("model" if one["engine"] == "vllm" else "model_path")
        assert Path(path).name == "model"
        for name in ("engine", "what", "pid", "log_level"):
            one.pop(name, None)
    longest = max(len(p) for p in peers.scripted_subject("tiny", "tiny", NEW).prompts(2)) + NEW
    most = min(longest + engines.SPARE, workloads.MODELS["tiny"].max_position_embeddings)
    assert Path(made[2]["speculative_config"].pop("model")).name == "draft_model"
    assert Path(made[5].pop("speculative_draft_model_path")).name == "draft_model"
    common = {"max_model_len": most, "max_num_seqs": 2, "enable_prefix_caching": False}
    ngram = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2}
    ngram["prompt_lookup_min"] = 2
    draft = {"method": "draft_model", "num_speculative_tokens": 4}
    assert made[:3] == [{**common, "speculative_config": of} for of in (None, ngram, draft)]
    common = {"context_length": most, "max_running_requests": 2, "disable_radix_cache": True}
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    draft = {"speculative_algorithm": "STANDALONE", "speculative_num_draft_tokens": 5}
    draft |= {"speculative_num_steps": 4, "speculative_eagle_topk": 1}
    assert made[3:] == [{**common, **of} for of in ({}, ngram, draft)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_folders_have_the_models_weights(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(workloads.ScriptedModels, "dtype", dtype)
    subject = peers.scripted_subject("tiny", "tiny", NEW)
    engines.write_inputs(subject, [1], 1, tmp_path)
    inputs = json.loads((tmp_path / engines.INPUTS).read_text())
    assert (inputs["dtype"], inputs["device"]) == (jnp.dtype(dtype).name, "cpu")
    for name, model in {"model": subject.model, "draft_model": subject.draft_model}.items():
        read = emsjax.from_pretrained(inputs[name], dtype=inputs["dtype"])
        leaves = [jax.tree.leaves(nnx.state(one)) for one in (read, model)]
        assert len(leaves[0]) > 8
        assert all(np.array_equal(one, other) for one, other in zip(*leaves, strict=True))


def test_an_engine_that_is_not_installed_is_left_out_unless_it_is_asked_for(
    tmp_path, monkeypatch, capsys
):
    for name in ("vllm", "sglang", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    output = tmp_path / "peers.json"
    assert bench("--output", output, sizes="1") == 0
    found, shown = results_of(output), capsys.readouterr().err
    reasons = {name: f"{name} is not installed" for name in ("transformers", "vllm", "sglang")}
    reasons["transformers"] = "torch is not installed"
    assert found["left_out"] == reasons
    assert found["settings"]["libraries"] == ["emsjax"]
    assert "ignore_eos" not in found["settings"]
    for name, reason in reasons.items():
        assert f"{name} is left out: {reason}" in shown
    for name in ("sglang", "transformers,sglang"):
        assert_error(capsys, bench("--libraries", name), "sglang is not installed")
    assert_error(capsys, bench("--libraries", "transformers"), "torch is not installed")
    assert_error(capsys, bench("--libraries", "vlm"), "'vlm' is none of transformers, vllm")
    own = tmp_path / "own.json"
    assert bench("--output", own, "--libraries", "emsjax", sizes="1") == 0
    assert "left_out" not in results_of(own)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"vllm": {"too_few": 2}}, "vllm, plain cannot be compared: batch 1 has [4] new tokens"),
        ({"sglang": {"cut": 3}}, "sglang, plain cannot be compared: batch 1 has prompts of [47]"),
        ({"vllm": {"dtype": "float16"}}, "dtype is float16, not float32"),
        ({"device": "NVIDIA H200"}, "device is NVIDIA H200, not cpu"),
    ],
)
def test_what_an_engine_does_otherwise_is_refused(install, tmp_path, capsys, behaviour, message):
    install(**behaviour)
    output, (name,) = tmp_path / "peers.json", behaviour.keys()
    only = "vllm" if name == "device" else name
    code = bench("--output", output, "--libraries", only, sizes="1")
    assert code == 2
    assert message in capsys.readouterr().err
    assert not output.exists()  # nothing else was measured


def test_all_that_differs_is_told():
    prompts = [[5, 6, 7], [8, 9]]
    inputs = {"dtype": "float32", "device": "cpu", "new_tokens": 2, "batches": [[[5]], prompts]}
    good = {"prompts": prompts, "prompt_lengths": [3, 2], "tokens": [[1, 2], [3, 4]]}
    first = {"prompts": [[5]], "prompt_lengths": [1], "tokens": [[1, 2]]}
    outputs = {"dtype": "float32", "device": "cpu", "batches": [first, good]}
    engines.check_comparable("one", inputs, outputs)
    silent = good | {"prompts": None}
    engines.check_comparable("one", inputs, {**outputs, "batches": [first, silent]})
    for changes, message in (
        ({"prompts": [[5, 6, 7], [8, 1]]}, "batch 2 has other prompts"),
        ({"prompt_lengths": [3, 3]}, r"batch 2 has prompts of \[3, 3\], not \[3, 2\]"),
        ({"tokens": [[1, 2], [3]]}, r"batch 2 has \[2, 1\] new tokens, not 2 in each of 2"),
        ({"tokens": [[1, 2]]}, r"batch 2 has \[2\] new tokens, not 2 in each of 2"),
    ):
        with pytest.raises(ValueError, match=f"^one cannot be compared: {message}"):
            engines.check_comparable("one", inputs, {**outputs, "batches": [first, good | changes]})
    wrong = {"dtype": "half", "device": "gpu", "batches": [first | {"tokens": [[1]]}]}
    with pytest.raises(ValueError, match=r"dtype is half.*; device is gpu.*; 1 batches.*; batch 1"):
        engines.check_comparable("one", inputs, wrong)


def test_other_tokens_and_engines_that_fail_are_told(install, tmp_path, capsys):
    install(vllm={"fails_with": "ngram"}, sglang={"off_by": 1})
    output = tmp_path / "peers.json"
    assert bench("--output", output, *BOTH, sizes="1") == 1
    runs, shown = runs_of(output), capsys.readouterr()
    assert runs.keys() == {one for one in ALL if one[0] == 1} - {(1, "vllm", "prompt-lookup")}
    assert {name[1]: run["identical"] for name, run in runs.items()} == {
        "emsjax": True,
        "vllm": True,
        "sglang": False,
    }
    reason = "exit code 1: RuntimeError: no such method"
    assert results_of(output)["left_out"] == {"vllm, prompt-lookup": reason}
    assert f"vllm, prompt-lookup is left out: {reason}" in shown.err
    assert "Not all tokens are identical." in shown.out


def test_an_engine_that_fails_is_no_success(install, tmp_path):
    install(vllm={"fails_with": "draft_model"})
    output = tmp_path / "peers.json"
    for _ in range(2):  # the second time nothing is left to do
        assert bench("--output", output, "--libraries", "vllm", sizes="1") == 1
    assert all(run["identical"] for run in runs_of(output).values())


def test_sequences_go_on_after_their_end_tokens_beside_engines(install, tmp_path):
    install()
    data = tmp_path / "one.jsonl"
    data.write_text('{"id": 1, "article": "x = 1"}')
    words = ["bench", "peers", "--model", str(DRAFT), "--data", str(data), "--batch-sizes", "1"]
    words += ["--dtype", "float32", "--commit", "abc"]
    for libraries, ends in (("vllm", ()), ("emsjax", None)):
        options = make_parser("").parse_args([*words, "--libraries", libraries])
        options.resumes = True
        comparison = peers_command.set_up(options, "")
        assert comparison.make().end_token_ids == ends
        assert ("ignore_eos" in comparison.results["settings"]) == (libraries == "vllm")


def test_a_call_is_timed_without_the_first_round(monkeypatch):
    """A call takes 3 s and 1/4 s per token, and a minute more at first; to forget, an hour."""
    clock, called = [0.0], set()
    monkeypatch.setattr(engine_process.time, "perf_counter", lambda: clock[0])

    class Engine:
        def forget(self):
            clock[0] += 3600

        def generate(self, prompts, count):
            clock[0] += 3 + count / 4 + 60 * (count not in called)
            called.add(count)
            return engine_process.Generated(None, [1], [[7] * count])

    found = engine_process.measure(Engine(), [[5]], 9, 3)
    assert found["seconds"] == {"1": [3.25] * 3, "9": [5.25] * 3}
    assert found["tokens"] == [[7] * 9]


def test_a_speed_of_other_processes_leaves_out_prefill():
    prompts = [np.arange(3), np.arange(5)]
    subject = peers.Subject(None, None, lambda batch: prompts, 9)
    decode = lambda method, prompts, count: [np.arange(count)] * len(prompts)
    seconds = {1: [3.25, 3.0, 9.0], 9: [5.25, 5.25, 5.25]}
    calls = [
        peers.Calls("vllm", "plain", seconds, [list(range(9))] * 2),
        peers.Calls("sglang", "plain", seconds, [list(range(9)), [*range(8), 0]]),
    ]
    entry = peers.measure(subject, {"emsjax": decode}, 2, 1, lambda line: None, calls)
    *_, vllm, sglang = entry["runs"]
    assert (vllm["library"], vllm["tokens_per_s"], vllm["prefill_s"]) == ("vllm", 8.0, 3.25)
    assert (vllm["identical"], sglang["identical"]) == (True, False)


def test_what_runs_apart_has_a_process_of_its_own_and_its_errors_arrive(monkeypatch):
    monkeypatch.undo()
    assert engines.apart(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="'vlm' is none"):
        engines.apart(peers_command.check_libraries, ("vlm",))


def test_the_device_is_free_while_engines_run(install):
    """Any use of the device fails in this process, and not in those that it starts."""
    install()
    code = (
        "import sys, jax\n"
        "from emsjax.benchmarks import engines\n"
        "from emsjax.cli.main import main\n"
        "def reached(folder, names, say):\n"
        "    sys.exit(f'{names} {(folder / engines.INPUTS).exists()}')\n"
        "if __name__ == '__main__':\n"
        "    jax.config.update('jax_platforms', 'nowhere')\n"
        "    engines.decode_all = reached\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["bench", "peers", *SHAPE, "--max-new-tokens", "6", "--batch-sizes", "1", *BOTH]
    words += ["--commit", "abc"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1:] == ["['vllm', 'sglang'] True"], done.stderr
