"""Shapes in annotations are checked at run time: the library promises what it documents."""

import atexit
import gc
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

# Tests compile much and compute little. Above all the CPU's newer fusion emitters, which go through
# MLIR, take twice as long as all the rest; without them a decoding loop compiles in a third.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        *Path(__file__).with_name("xla_flags.txt").read_text().split(),
    ]
)

# What one process of a run has compiled the others, and the commands that tests start, load.
if "PYTEST_XDIST_WORKER" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="emsjax-tests-")
    atexit.register(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import pytest

# Implicit promotion between dtypes is a mistake. Set once: in tests as in the fixtures of a module,
# so that what these have traced is not traced again.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Before the first import of emsjax. What users pass in (checks, requests,
# generation) must get past the annotations to the library's own errors.
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
    "models.layers",
    "models.opt",
    "verification",
]
COMMANDS = re.compile("test_(cli|cli_.*|demo_recipe|docs|peers|plotting|readme|.*benchmarks?)")
jaxtyping.install_import_hook([f"emsjax.{name}" for name in CHECKED], "beartype.beartype")

from hypothesis import HealthCheck, settings  # noqa: E402

from pallas_kernels.common.implementations import runs_triton  # noqa: E402

# The first example of a shape compiles; later ones do not.
settings.register_profile(
    "emsjax", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("emsjax")


def pytest_configure(config):
    if config.option.markexpr == "gpu" and not runs_triton():
        raise pytest.UsageError("-m gpu needs a GPU of compute capability 8.0 or newer")
    gc.disable()  # tracing makes many objects, few of them in cycles


def pytest_collection_modifyitems(items):
    for item in items:
        if COMMANDS.fullmatch(item.path.stem):
            item.add_marker("commands")


@pytest.fixture(scope="module", autouse=True)
def forget_executables():
    """CPU executables hold memory, and maps of which Linux gives a process 65530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def unchecked_annotations():
    """For what lowers functions itself: JAX then makes pytrees that hold no arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture
def few_row_counts(monkeypatch):
    """Steps that feed prompts have two row counts instead of four: less to compile."""
    from emsjax.decode import row_counts

    monkeypatch.setattr(row_counts, "PROMPT_SIXTEENTHS", (6, 16))


@pytest.fixture
def fresh_loops():
    """Loops are traced anew in a test, and after it."""
    from emsjax.decode.step import decode_loop

    decode_loop.clear_cache()
    yield decode_loop.clear_cache
    decode_loop.clear_cache()


@pytest.fixture
def two_row_counts(monkeypatch, fresh_loops):
    """Steps have one row of each sample, or all: less to compile where a batch is large."""
    two = lambda batch, k1: tuple(sorted({batch, batch * k1}))
    monkeypatch.setattr("emsjax.decode.layout.row_buckets", two)
    monkeypatch.setattr(
        "emsjax.decode.layout.MAX_WIDTHS", 1
    )  # of padded steps, beside that of one row


@pytest.fixture(autouse=True)
def profiles(tmp_path, monkeypatch):
    """The store of profiles: empty, and not the user's."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv("EMSJAX_PROFILES", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model folder with a tokenizer, for the command line."""
    from jsonl import save_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def fake(monkeypatch):
    """Stands in for what `emsjax generate` streams."""
    from jsonl import FakeStream

    from emsjax import streaming

    stream = FakeStream()
    monkeypatch.setattr(streaming, "stream_numbered", stream)
    return stream


@pytest.fixture
def paths(tmp_path):
    """Input and output of `emsjax generate`."""
    return SimpleNamespace(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
