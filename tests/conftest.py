"""Fixtures and settings of all tests. Annotated shapes are checked at run time."""

import atexit
import gc
import os
import re
import subprocess
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

# Tests compile much and compute little. The CPU's newer fusion emitters, which use MLIR, take
# twice as long as the rest of compilation; without them a loop compiles in a third of the time.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        *Path(__file__).with_name("xla_flags.txt").read_text().split(),
    ]
)

# Compilation allocates and frees much. Processes that tests start, of which pytest-xdist's workers
# are some, keep freed memory rather than give it back to the system, which takes time.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(10**9))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**24))

# An interpreted Mosaic kernel has a thread for each warpgroup, and each that waits blocks one of
# the threads with which XLA computes on a CPU: by default there are as many as cores. Eight wait at
# most, and XLA needs others beside them.
os.environ.setdefault("NPROC", "12")

# Executables compiled by one process are loaded by the others and by commands that tests start,
# of which some are pytest itself.
if "emsjax-tests-" not in os.environ.get("JAX_COMPILATION_CACHE_DIR", ""):
    compiled = tempfile.TemporaryDirectory(prefix="emsjax-tests-")
    atexit.register(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import pytest

# Implicit promotion between dtypes is an error. The setting is the same in tests and in fixtures
# of a module, so that functions traced in the latter are not traced again.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# This list is used before the first import of emsjax. It leaves out modules that take users'
# values (checks, requests, generation), which must reach the library's own errors.
CHECKED = [
    "decode.base",
    "decode.cache",
    "decode.draft",
    "decode.layout",
    "decode.pack",
    "decode.prefill",
    "decode.row_counts",
    "decode.state",
    "decode.step",
    "decode.verify",
    "drafters",
    "engine.group",
    "engine.output",
    "engine.scores",
    "models.layers",
    "models.decoder",
    "returned",
    "verification",
]
COMMANDS = re.compile(
    "test_(cli|cli_.*|demo_recipe|docs|peers|peer_engines|plotting|ray|readme|specdec_bench|.*benchmarks?"
    "|argument_fuzz|hostile_folders|torch_files"
    "|distillation.*|draft_length|goodput|step_costs|testing|vanilla)"
)
# What these test changes between versions of jax: how kernels are lowered and interpreted, the
# loop, random bits, memory and devices, and which objects are pytrees.
DEPEND_ON_JAX = re.compile(
    "test_(cache_update|device|generation|implementations|indexing|invariant_products|kernels"
    "|linear|linear_mosaic|log_sum_exp|memory|narrow|narrow_mosaic|narrow_vector|own_drafter"
    "|own_policy|packing|prefill|rotary|rounded_rows|sampling|sampling_cutoff|step"
    "|tensor_parallel)"
)
# What these assert is about steps, their rows, batches or policies: their steps have several row
# counts.
SEVERAL_ROW_COUNTS = re.compile(
    "test_(acceptance|background|bad_drafts|block_verification|divergence|draft_length|generation"
    "|goodput|invarian.*|memory|mixed_trees|narrow_cache|own_.*|packing|prefill|refill|sampling"
    "|sampling_cutoff|self_draft|step|step_costs|stream|trees|values|vanilla|.*benchmarks?)"
)
EVERY = 8  # of the cases of a test beside its first; all of them would take half as long again
LONG = re.compile("test_(tensor_parallel|processes|demo_recipe|ray)")  # one test takes a minute
jaxtyping.install_import_hook([f"emsjax.{name}" for name in CHECKED], "beartype.beartype")

from hypothesis import HealthCheck, settings  # noqa: E402

from emsjax.decode import layout, row_counts  # noqa: E402
from emsjax.decode.step import decode_loop  # noqa: E402
from pallas_kernels.common.implementations import runs_triton  # noqa: E402

EVERY_ROW_COUNT = [
    (module, name, getattr(module, name))
    for module, name in (
        (row_counts, "PROMPT_SIXTEENTHS"),
        (layout, "row_buckets"),
        (layout, "MAX_WIDTHS"),
    )
]

# The row counts for which the loops that jax holds were traced.
traced: dict[str, tuple] = {"row counts": ()}

# The first example of a shape compiles; later ones do not.
settings.register_profile(
    "emsjax", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("emsjax")


def pytest_addoption(parser):
    parser.addoption(
        "--every",
        type=int,
        metavar="N",
        help="run the first case of each test, and about one in N of its other cases: by default "
        f"{EVERY} if neither files nor expressions select tests, otherwise 1",
    )
    parser.addoption(
        "--tests-every",
        type=int,
        default=1,
        metavar="N",
        help="run about one in N of the tests and cases that do not depend on the version of jax",
    )
    parser.addoption(
        "--turn",
        type=int,
        metavar="T",
        help="which one in N: by default the number of commits, so that all cases have their turn",
    )


def pytest_configure(config):
    if config.option.every is None:
        chosen = config.args_source is not config.ArgsSource.TESTPATHS
        chosen = chosen or config.option.keyword or config.option.markexpr
        config.option.every = 1 if chosen else EVERY
    if config.option.turn is None:
        config.option.turn = number_of_commits()
    if config.option.markexpr == "gpu" and not runs_triton():
        raise pytest.UsageError("-m gpu needs a GPU of compute capability 8.0 or newer")
    gc.disable()  # tracing makes many objects, but few cycles


def number_of_commits() -> int:
    """0 outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


def pytest_collection_finish():
    gc.freeze()  # what is imported stays; it is half of what a collection would look at


def pytest_collection_modifyitems(config, items):
    for item in items:
        if COMMANDS.fullmatch(item.path.stem):
            item.add_marker("commands")
    # Long tests first, which would end alone; otherwise so that row counts change rarely.
    is_short = lambda item: not LONG.fullmatch(item.path.stem)
    items.sort(key=lambda item: (is_short(item), row_counts_of(item.module)))
    seen, kept, left = set(), [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        # A checksum, as cases at regular places could all have the same value of one parameter.
        number = zlib.crc32(item.nodeid.encode()) + config.option.turn
        runs = test not in seen or number % config.option.every == 0
        if not DEPEND_ON_JAX.fullmatch(item.path.stem):
            runs = runs and number % config.option.tests_every == 0
        (kept if runs else left).append(item)
        seen.add(test)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(scope="module", autouse=True)
def forget_executables():
    """CPU executables hold memory and memory maps, of which Linux allows a process 65530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def unchecked_annotations():
    """Annotations are not checked, as lowering a function makes pytrees without arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


def row_counts_of(module) -> tuple[int, tuple[int, ...]]:
    """How many row counts a test module's steps have, and sixteenths of those that feed prompts."""
    several = SEVERAL_ROW_COUNTS.fullmatch(module.__name__.rpartition(".")[2])
    return 2 if several else 1, getattr(module, "PROMPT_SIXTEENTHS", (16,))


@pytest.fixture(scope="module", autouse=True)
def few_row_counts(request):
    """Steps have few row counts, to compile less: only the largest of the library's.

    Those of some modules have the smallest as well, and more than one if they feed prompts, which
    are the module's `PROMPT_SIXTEENTHS`. Loops and steps traced for other row counts are forgotten.
    """
    count, sixteenths = chosen = row_counts_of(request.module)
    every = row_counts.row_buckets
    few = lambda batch, k1: tuple(sorted({every(batch, k1)[0], batch * k1}))[-count:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_counts, "PROMPT_SIXTEENTHS", sixteenths)
        patch.setattr(layout, "row_buckets", few)
        # Row counts of padded steps, besides one row per sample.
        patch.setattr(layout, "MAX_WIDTHS", 1)
        if traced["row counts"] != chosen:
            jax.clear_caches()
            traced["row counts"] = chosen
        yield


@pytest.fixture
def fresh_loops():
    """Loops are traced again in a test and after it."""
    decode_loop.clear_cache()
    yield decode_loop.clear_cache
    decode_loop.clear_cache()


@pytest.fixture
def every_row_count(monkeypatch, fresh_loops):
    """Steps have all the row counts that users have."""
    for module, name, value in EVERY_ROW_COUNT:
        monkeypatch.setattr(module, name, value)


@pytest.fixture(autouse=True)
def profiles(tmp_path, monkeypatch):
    """An empty store of profiles that replaces the user's."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv("EMSJAX_PROFILES", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model folder with a tokenizer for the command line."""
    from jsonl import save_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def fake(monkeypatch):
    """Replaces the stream of `emsjax generate`."""
    from jsonl import FakeStream

    from emsjax import streaming

    stream = FakeStream()
    monkeypatch.setattr(streaming, "stream_numbered", stream)
    return stream


@pytest.fixture
def paths(tmp_path):
    """Paths of the input and output of `emsjax generate`."""
    return SimpleNamespace(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
