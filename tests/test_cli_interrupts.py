"""Commands end soon after a signal, whatever they are doing, with one line and a known status."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from jsonl import TEXTS, command, read_lines, write_records

from emsjax.cli.main import main
from emsjax.interrupts import SIGNALS, Interruptible
from emsjax.terminal import reporting

# A command whose process signals itself when it looks a module up or enters a function for the nth
# time, and then does something else.
SCRIPT = """
import hashlib, importlib, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may have it ignored
sys.modules["torch"] = None  # transformers would import it, which takes longest
moment, count, then, number = sys.argv[1:5]
sys.argv[1:] = sys.argv[5:]

def send():
    with open("sent", "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), int(number))

def compute():  # in C, where no exception is raised
    threading.Timer(0.2, send).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def swallow():
    try:
        send()
        time.sleep(1)
    except BaseException:
        time.sleep(60)

def replace():  # as bindings do that call Python
    try:
        send()
        time.sleep(1)
    except BaseException:
        raise ValueError("something else") from None

class Destroyed:
    def __del__(self):
        send()
        for _ in range(100):
            pass

def destroy():
    Destroyed()
    time.sleep(60)

def act():
    global count
    count = int(count) - 1
    if not count:
        {"go on": send, "compute": compute, "swallow": swallow, "replace": replace,
         "destroy": destroy}[then]()

class Finder:
    def find_spec(self, name, path, target=None):
        if name == moment:
            act()

if ":" not in moment:
    sys.meta_path.insert(0, Finder())
from emsjax.cli.main import main
if ":" in moment:
    module, _, name = moment.partition(":")
    *owner, name = name.split(".")
    owner = getattr(importlib.import_module(module), *owner) if owner else sys.modules.get(
        module) or importlib.import_module(module)
    original = getattr(owner, name)
    def spied(*args, **options):
        act()
        return original(*args, **options)
    setattr(owner, name, spied)
sys.exit(main())
"""
AGAIN = "; start it again to go on"
MOMENTS = {  # a module, or a function's module and name; how often; and what follows the signal
    "imports": ("flax", 1, "go on"),
    "imports that swallow it": ("jax", 1, "swallow"),
    "later imports that swallow it": ("transformers", 1, "swallow"),
    "reading": ("emsjax.records.input:text_of", 5, "go on"),
    "loading": ("emsjax.models.checkpoint:load", 1, "compute"),
    "compilation": ("jax._src.compiler:compile_or_get_cached", 3, "compute"),
    "compilation that fails then": ("jax._src.compiler:compile_or_get_cached", 3, "replace"),
    "first steps": ("emsjax.engine.slots:Slots.decode", 1, "swallow"),
    "decoding": ("emsjax.engine.slots:Slots.read_back", 2, "go on"),
    "a destructor": ("emsjax.engine.slots:Slots.read_back", 2, "destroy"),
}
WRITING = ("emsjax.records.output:Results.append", 3, "go on")


@pytest.fixture
def start(tmp_path):
    """Runs a command that signals itself; its status, lines on stderr, and seconds it took."""
    script = tmp_path / "emsjax"
    script.write_text(SCRIPT)

    def start(moment, arguments, number=signal.SIGINT, **environment):
        run = [sys.executable, script, *map(str, moment), str(int(number)), *arguments]
        done = subprocess.run(
            run,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        ended = time.time()
        return done.returncode, done.stderr, ended - float((tmp_path / "sent").read_text())

    return start


def check_end(found, number=signal.SIGINT, hint=AGAIN):
    status, stderr, seconds = found
    assert "Traceback" not in stderr
    own = [line for line in stderr.splitlines() if line.startswith("emsjax:")]
    assert own == [f"emsjax: {SIGNALS[number]}{hint}"]
    assert stderr.splitlines()[-1] == own[0]
    assert status == 128 + number
    assert seconds < 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_command_ends_soon_with_one_line(tiny_model, paths, start, moment):
    write_records(paths.input)
    run = command(tiny_model, paths)
    while_importing = moment in ("imports", "imports that swallow it")
    check_end(
        start(MOMENTS[moment], run), hint="" if while_importing else check_end.__defaults__[1]
    )
    if paths.output.exists():
        text = paths.output.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            assert "id" in json.loads(line)


@pytest.mark.parametrize("moment", ["imports", "first steps"])
def test_a_terminated_command_ends_as_an_interrupted_one(tiny_model, paths, start, moment):
    write_records(paths.input)
    hint = "" if moment == "imports" else AGAIN
    found = start(MOMENTS[moment], command(tiny_model, paths), signal.SIGTERM)
    check_end(found, signal.SIGTERM, hint)


def test_worker_threads_do_not_delay_the_end(tiny_model, paths, start):
    write_records(paths.input)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    moment = ("emsjax.engine.completions:completion", 2, "go on")
    check_end(start(moment, command(tiny_model, paths), XLA_FLAGS=flags))


def test_a_run_goes_on_after_an_interrupt(tiny_model, paths, start):
    write_records(paths.input)
    run = command(tiny_model, paths)
    check_end(start(WRITING, run))
    before = paths.output.read_text()
    assert before.count("\n") == 2
    assert main(run) == 0
    assert paths.output.read_text().startswith(before)
    assert len(read_lines(paths.output)) == 11


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        ("emsjax.distillation.training:Trainer.step", 3),
        ("emsjax.distillation.checkpoints:Checkpoints.save", 1),
    ],
)
def test_training_ends_soon(tiny_model, tmp_path, start, moment, count):
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text * 3}) for text in TEXTS))
    sizes = {"--layers": 1, "--width": 8, "--steps": 50, "--batch-size": 1, "--held-out": 2}
    sizes |= {"--sequence-length": 8, "--max-new-tokens": 4, "--draft-tokens": 2}
    sizes |= {"--generations": 0, "--target": tiny_model, "--data": data, "--start": "random"}
    sizes |= {"--output": tmp_path / "draft", "--checkpoint-every": 5}
    run = ["distil", *(str(word) for pair in sizes.items() for word in pair)]
    check_end(start((moment, count, "go on"), run))


def test_commands_that_do_not_resume_say_so(start):
    moment = ("emsjax.generation:check", 1, "swallow")
    check_end(start(moment, ["demo"]), hint="")


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruptible() as interruptible:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        assert interruptible.received is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_that_runs_a_command_goes_on_after_it(number, capsys, request):
    """Only a process that is a command is ended; a program's handlers are as they were."""
    # Shells start what runs in the background with SIGINT ignored.
    before = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, before))
    handlers = {one: signal.getsignal(one) for one in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)

    def work():
        os.kill(os.getpid(), number)
        time.sleep(1)

    assert reporting.exit_code(work, resumes=False) == 128 + number
    assert capsys.readouterr().err == f"emsjax: {SIGNALS[number]}\n"
    assert {one: signal.getsignal(one) for one in SIGNALS} == handlers
    found = signal.set_wakeup_fd(wakeup)
    assert found == wakeup
    time.sleep(1.2)  # it is not ended later either


def test_importing_the_library_leaves_signals_alone(tmp_path):
    code = (
        "import signal; before = list(map(signal.getsignal, (2, 15))); import emsjax\n"
        "assert list(map(signal.getsignal, (2, 15))) == before"
    )
    path = tmp_path / "program.py"
    path.write_text(code)
    for run in (["-c", code], [str(path)], [str(path), "-m", "emsjax"]):
        subprocess.run([sys.executable, *run], check=True)
