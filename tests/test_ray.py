"""Ray Data on real processes: tokens are those of one process, and deaths lose nothing."""

import asyncio
import builtins
import compileall
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jsonl import TEXTS, command, read_lines
from transformers import AutoTokenizer

import emsjax
from emsjax.cli.main import main

os.environ["RAY_AUTH_MODE"] = "disabled"  # all is on this machine
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TQDM_PATCH_PRINT"] = "0"  # Ray would replace `print` in this process for good
ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
psutil = pytest.importorskip("psutil")
pyarrow = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS, NODES, NEW = 1400, 3, 4
PATIENCE = 400  # seconds
# Processes of Ray import the library from where this one has it.
PLACES = [os.path.dirname(emsjax.__path__[0]), *sys.path]
# They do without torch, which transformers would import: it takes longest.
WITHOUT_TORCH = "import sys\n\nsys.modules['torch'] = None\n"
SAMPLED = ["--temperature", "0.9"]


def whole(model_folder, prompts, **options):
    """What `generate` returns for these texts, and their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = emsjax.from_pretrained(model_folder, dtype="float32")
    out = emsjax.generate(model, tokenizer(prompts).input_ids, **options)
    return [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]


def actors(node):
    """The processes of a node's actors that complete parts."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for process in psutil.Process(raylet).children(recursive=True):
        try:
            if "PartCompleter" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes of one CPU each. `DIED` names the file in which an actor notes its death."""
    # A node gives up after 15 seconds without its agents, which would compile what they import.
    compileall.compile_dir(Path(ray.__file__).parent, quiet=2)
    folder = tmp_path_factory.mktemp("ray")
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    own = {"PYTHONPATH": os.pathsep.join([str(folder), *PLACES]), "DIED": str(folder / "died")}
    # A dead node is noticed after 1.5 seconds, not 15.
    checks = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    size = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_log_monitor": False}
    options = size | {"include_dashboard": False, "_system_config": checks}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=options)
        for _ in range(NODES - 1):
            cluster.add_node(**size)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


class Run:
    """The command in a process of its own."""

    def __init__(self, model, paths, address):
        # Few slots make parts take so long that deaths are in the middle. Every actor compiles,
        # which takes less without a drafter.
        fixed = ["--dtype", "float32", "--batch-size", "8", "--drafter", "none", *SAMPLED]
        fixed += ["--max-new-tokens", str(NEW)]
        places = ["--input", paths.input, "--output", paths.output, "--ray", address]
        arguments = ["generate", "--model", model, *places, *fixed]
        self.stderr = paths.output.with_name("stderr.txt")
        with self.stderr.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "emsjax", *map(str, arguments)], stderr=file
            )
        self.memory, self.sizes = psutil.Process(self.process.pid), []
        self.output, self.until = paths.output, time.monotonic() + PATIENCE

    def wait_for(self, reached):
        """Waits until `reached` is true, or the run has ended; measures the process's memory."""
        while self.process.poll() is None and not reached():
            assert time.monotonic() < self.until, self.stderr.read_text()
            if self.parts:
                self.sizes.append(self.memory.memory_info().rss)
            time.sleep(0.05)

    @property
    def parts(self):
        return sorted(self.output.glob("part-*.jsonl")) if self.output.exists() else []


@pytest.fixture(autouse=True)
def own_print():
    """Ray leaves Python's own `print` alone, which tests that run later rely on."""
    before = builtins.print
    yield
    assert builtins.print is before


class Dying(emsjax.ray.Completer):
    """Kills its process at one row, the first time."""

    async def __call__(self, batch):
        if 60 in batch["index"] and not os.path.exists(os.environ["DIED"]):
            open(os.environ["DIED"], "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().__call__(batch)


@pytest.fixture
def connected(cluster):
    """A connection of this process to the cluster."""
    ray.init(cluster.address)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_rows_are_completed_wherever_they_are(tiny_model, connected):
    """In two actors, of which one dies; all kinds of rows, in batches of two formats."""
    texts = [TEXTS[i % 5][: 3 + i % 11] for i in range(120)]
    rows = [
        {"index": i, "id": f"r{i}", "prompt": text, "max_new_tokens": 1 + i % NEW}
        for i, text in enumerate(texts)
    ]
    rows[7]["prompt"], rows[9]["max_new_tokens"] = "", 0
    options = {"dtype": "float32", "batch_size": 8, "max_len": 40, "max_new_tokens": NEW}
    options |= {"model": str(tiny_model), "sampling": emsjax.Sampling(0.9), "num_sequences": 2}
    # Short drafts make few row counts, all of which every actor compiles.
    options["drafter"] = lambda model: emsjax.PromptLookup(match_length=1, max_draft_tokens=2)
    mapped = ray.data.from_items(rows, override_num_blocks=6).map_batches(
        Dying,
        fn_constructor_kwargs=options,
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
    )
    out = mapped.take_all()
    assert os.path.exists(os.environ["DIED"])
    out.sort(key=lambda row: (row["index"], row["sequence"]))
    assert [(row["id"], row["sequence"]) for row in out] == [
        (row["id"], n) for row in rows for n in range(2)
    ]
    refused = [row for row in out if row["finish_reason"] == "refused"]
    assert [row["index"] for row in refused] == [7, 7, 9, 9]
    assert "empty" in refused[0]["error"]
    assert "max_new_tokens" in refused[2]["error"]
    new = [max(row["max_new_tokens"], 1) for row in rows]
    texts[7] = "x"
    expected = whole(
        tiny_model,
        texts,
        max_new_tokens=new,
        sampling=emsjax.Sampling(0.9),
        num_sequences=2,
        key=jax.random.key(0),
        batch_size=64,
    )
    for row, tokens in zip(out, expected, strict=True):
        if row["finish_reason"] != "refused":
            assert list(row["tokens"]) == tokens
            assert row["error"] is None
            assert len(row["logprobs"]) == len(tokens) <= row["num_steps"]
            assert np.isfinite(row["logprobs"]).all()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert out[0]["text"] == tokenizer.decode(out[0]["tokens"], skip_special_tokens=True)


@pytest.fixture
def complete(tiny_model):
    """Makes a completer in this process, and calls it with the rows of a pyarrow table."""
    made = []

    def complete(rows, **options):
        fixed = {"dtype": "float32", "batch_size": 8, "max_len": 40, "max_new_tokens": NEW}
        made.append(emsjax.ray.Completer(str(tiny_model), **fixed, **options))
        return asyncio.run(made[0](pyarrow.Table.from_pylist(rows)))

    yield complete
    made[0].slots.close()


def test_tokens_are_completed_without_a_number_and_kept(tiny_model, complete):
    """Greedy tokens need no number; the prompt's tokens are kept under another name."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = [TEXTS[i % 5][: 3 + i % 11] for i in range(20)]
    prompts = tokenizer(texts).input_ids
    drafter = lambda model: emsjax.PromptLookup(match_length=1)
    found = complete([{"tokens": one} for one in prompts], drafter=drafter).to_pylist()
    out = {tuple(row["prompt_tokens"]): row for row in found}
    expected = whole(tiny_model, texts, max_new_tokens=NEW)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert out[tuple(prompt)]["tokens"] == tokens
        assert out[tuple(prompt)]["num_drafted"] >= out[tuple(prompt)]["num_accepted"]


def test_a_file_that_a_host_cannot_read_is_one_line(tiny_model, paths, connected, capfd):
    paths.input = paths.input.with_suffix(".parquet")
    paths.input.write_text("junk")
    paths.output = paths.output.with_name("out")
    assert main(command(tiny_model, paths, "--ray")) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith(f"emsjax: error: {paths.input} cannot be read: ArrowInvalid: Parquet")


@pytest.mark.parametrize(
    ("row", "part"),
    [({"text": "a"}, "no column holds prompts"), ({"prompt": "a"}, '"index" or "id"')],
)
def test_a_dataset_without_what_is_needed_is_an_error(complete, row, part):
    with pytest.raises(ValueError, match=part):
        complete([row], sampling=emsjax.Sampling(0.9))


def test_killed_actors_and_nodes_lose_nothing(tiny_model, paths, cluster):
    texts = [TEXTS[i % 5][: 3 + i % 11] for i in range(PROMPTS)]
    lines = [json.dumps({"id": f"r{i}", "prompt": text}) for i, text in enumerate(texts)]
    paths.input.write_text("\n".join(lines))
    paths.output = paths.output.with_name("out")
    run = Run(tiny_model, paths, cluster.address)
    run.wait_for(lambda: len(run.parts) >= 2)
    busy = lambda: [node for node in cluster.list_all_nodes() if actors(node)]
    run.wait_for(lambda: len(busy()) > 1)
    *_, first, second = sorted(busy(), key=lambda node: node is not cluster.head_node)
    actors(first)[0].send_signal(signal.SIGKILL)
    killed_at = len(run.parts)
    run.wait_for(lambda: len(run.parts) >= killed_at + 3)
    early = list(run.sizes)  # most parts are still to come
    running = run.process.poll() is None and bool(actors(second))
    cluster.remove_node(second, allow_graceful=False)
    assert running
    assert len(run.parts) < PROMPTS // 64
    run.wait_for(lambda: False)
    assert run.process.returncode == 0, run.stderr.read_text()
    assert f"{PROMPTS} results" in run.stderr.read_text()

    results = [line for part in run.parts for line in read_lines(part)]
    assert [line["id"] for line in results] == [f"r{i}" for i in range(PROMPTS)]
    options = {"sampling": emsjax.Sampling(0.9), "key": jax.random.key(0), "batch_size": 64}
    expected = whole(tiny_model, texts, max_new_tokens=NEW, **options)
    assert [line["tokens"] for line in results] == expected
    assert max(run.sizes) < max(early) + (32 << 20)
    print(f"driver: {run.sizes[0] >> 20} to {max(run.sizes) >> 20} MiB")
