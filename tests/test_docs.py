"""Examples of the documentation run, its commands parse, and it covers every public name."""

import doctest
import importlib
import json
import re
import shutil
from unittest import mock

import examples
import pytest

import emsjax
import pallas_kernels
from emsjax import distillation
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.models.families import FAMILIES

DOCS = examples.ROOT / "docs"
REFERENCE = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
WITH_PYTHON = [path for path in examples.PAGES if examples.blocks(path, "python")]
WITH_COMMANDS = [
    path for path in (examples.README, *examples.PAGES) if examples.blocks(path, "bash")
]
MODULES = sorted(  # those whose docstrings have examples
    ".".join(path.relative_to(examples.ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("emsjax", "pallas_kernels")
    for path in (examples.ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)
RESULTS = examples.ROOT / "benchmarks" / "h200"

name_of = lambda path: str(path.relative_to(examples.ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_every_example_of_a_page_runs(page, tmp_path, monkeypatch, request):
    if page.stem in ("padding", "step"):  # these pages show row counts
        request.getfixturevalue("every_row_count")
    profile = json.loads((examples.ROOT / "benchmarks" / "h200-profile.json").read_bytes())
    lengths = profile["table"]["lengths"]  # only two, to save time
    profile["table"]["lengths"] = {size: lengths[size] for size in ("1", "8")}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with mock.patch.dict(FAMILIES):  # a page adds a family, which other tests do not know
        for example in examples.python_examples(page):
            examples.run(example, names)


@pytest.mark.parametrize("name", MODULES)
def test_every_example_of_a_docstring_gives_the_output_shown(name):
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module):
        examples.run(test, test.globs)


def test_docstrings_have_examples():
    found = [
        example
        for name in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
        for example in test.examples
    ]
    assert len(found) >= 8


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_every_command_of_a_page_parses(page):
    assert examples.commands(page)
    for command in examples.commands(page):
        examples.check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "emsjax generate --model a --input b",
        "emsjax bench ems-sd --shape opt-6.7b --model a",
        "emsjax generate --model a --input b --output c --drafter none --match-length 3",
        "python -m emsjax.benchmarks.step --shapes 1",
        "pip install -e '.[other]'",
        "python docs/missing.py",
        "rm -rf build",
    ],
)
def test_an_invalid_command_is_detected(command, capsys):
    with pytest.raises((SystemExit, ValueError, AssertionError)):
        examples.check_command(command)


def test_a_wrong_output_is_detected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n```python\n>>> 1 + 1\n3\n```\n")
    (example,) = examples.python_examples(page)
    with pytest.raises(AssertionError, match="line 3"):
        examples.run(example, {})


def documented(text: str) -> set[str]:
    """Full names of all entries of the reference."""
    names = set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", text, re.MULTILINE))
    for module, members in re.findall(
        r"^\.\. automodule:: ([\w.]+)\n((?: +:.*\n)*)", text, re.MULTILINE
    ):
        if found := re.search(r":members: (\S.*)", members):
            names |= {f"{module}.{member}" for member in found[1].split(", ")}
    return names


@pytest.mark.parametrize("module", [emsjax, pallas_kernels, distillation], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module):
    public = {f"{module.__name__}.{name}" for name in module.__all__}
    assert public <= documented(REFERENCE)


def test_every_name_of_the_reference_exists():
    for name in documented(REFERENCE):
        parts = name.split(".")
        found = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], start=2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:i]))
            found = getattr(found, part)


def test_every_page_is_in_the_index():
    listed = re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in examples.PAGES}
    assert set(listed) == pages - {"index"}


def test_included_files_have_the_lines_that_are_included():
    for page in examples.PAGES:
        for source, options in re.findall(
            r"^```{literalinclude} (\S+)\n((?::.*\n)*)", page.read_text(), re.MULTILINE
        ):
            lines = (page.parent / source).read_text().splitlines()
            wanted = re.findall(r'^:(?:start|end)-at: "(.*)"$', options, re.MULTILINE)
            assert len(wanted) == 2
            first, last = (
                next(i for i, line in enumerate(lines) if text in line) for text in wanted
            )
            assert first < last


def test_what_narrow_numbers_cost_is_in_their_file_and_within_bounds():
    results = json.loads((examples.ROOT / "benchmarks" / "cpu-quality.json").read_bytes())
    ratios = {of["format"]: of["ratio"] for of in results["entries"] if "format" in of}
    page = (DOCS / "how-to" / "narrow.md").read_text()
    shown = dict(re.findall(r"^\| `\"([\w-]+)\"` \|.*\| (\S+) % \|$", page, re.MULTILINE))
    assert results["settings"]["modules"] == 34  # all: of Python 3.11.7
    bounds = {"int8": 1.005, "fp8": 1.005, "int8-weights": 1.005, "int4": 1.03}
    assert shown.keys() == bounds.keys()
    for name, bound in bounds.items():
        ratio = ratios[f"weights in {name}"]
        assert shown[name] == f"{100 * (ratio - 1):+.2f}"
        assert ratio <= bound
    of_caches = [f"{100 * (ratios[f'caches in {name}'] - 1):.2f} %" for name in ("int8", "fp8")]
    assert "a cache in int8 costs {} and one in fp8 {}".format(*of_caches) in page.replace(
        "\n", " "
    )


# Figures in pages


def test_every_figure_is_made_of_the_results(measured):
    pages = {path: path.read_text() for path in measured.PAGES}
    named = [match[2] for page in pages.values() for match in measured.BLOCK.finditer(page)]
    assert len(named) == len(set(named)) > 5
    assert all(measured.measured(page) == page for page in pages.values())


def test_a_figure_of_other_results_is_another(measured, results):
    page = (DOCS / "how-to" / "narrow.md").read_text()
    assert measured.measured(page, [(results, "")]) == page
    path = results / "step-int8.json"
    steps = json.loads(path.read_bytes())
    steps["shapes"][0]["best_ms"] *= 2
    path.write_text(json.dumps(steps))
    other = measured.measured(page, [(results, "")])
    assert other != page
    assert len(other.splitlines()) == len(page.splitlines())


def test_a_figure_is_made_of_the_first_folder_that_has_all_of_its_results(
    measured, results, tmp_path
):
    page = (DOCS / "how-to" / "narrow.md").read_text()
    some = tmp_path / "some"
    some.mkdir()
    steps = json.loads((results / "step.json").read_bytes()) | {"commit": "of another measurement"}
    (some / "step.json").write_text(json.dumps(steps))
    with pytest.raises(FileNotFoundError, match=r"'narrow' needs one of .*step-int8"):
        measured.measured(page, [(some, "")])
    assert measured.measured(page, [(some, ""), (results, "")]) == page
    for path in results.glob("*.json"):
        path.rename(tmp_path / f"named-{path.name}")
    assert measured.measured(page, [(some, ""), (tmp_path, "named-")]) == page


def test_a_figure_of_results_that_were_resumed_at_another_commit_is_refused(measured, results):
    path = results / "step.json"
    steps = json.loads(path.read_bytes())
    steps["shapes"][-1]["commit"] = "abc"
    path.write_text(json.dumps(steps))
    page = (DOCS / "how-to" / "narrow.md").read_text()
    with pytest.raises(ValueError, match="do not belong"):
        measured.measured(page, [(results, "")])


STAND_INS = {  # for results that are not of the folder's commit yet, each with its file
    "ems-sd-qwen3-8b": "h200-ems-sd-qwen3-8b",
    "ems-sd-qwen3-8b-invariant": "h200-ems-sd-qwen3-8b-invariant",
    "invariance": "h200-invariance",
    "step-opt-13b": "h200-two-devices/step-opt-13b",
    "step-llama-3.1-8b": "h200-two-devices/step-opt-13b",
    "step-qwen3-8b": "h200-two-devices/step-opt-13b",
    "step-again": "h200-two-devices/step",
    "refill": "h200-refill",
    "training": "h200-training",
    "first-call": "h200-first-call",
}


@pytest.fixture
def whole_results(results):
    """A folder with all results, those that are not there yet of other commits."""
    step = json.loads((results / "step.json").read_bytes())
    here = {name: step[name] for name in ("hardware", "versions", "commit")}
    for name, source in STAND_INS.items():
        text = (examples.ROOT / "benchmarks" / f"{source}.json").read_text()
        text = re.sub(r'"commit": "\w+"', f'"commit": "{here["commit"]}"', text)
        (results / f"{name}.json").write_text(json.dumps(json.loads(text) | here))
    of_groups, _ = NOT_YET["emsjax bench groups"]
    added = {"entries": [{"source": "block", "ratio": ratio} for ratio in (1.07, 1.04)]}
    for name, of in {"groups-opt-13b-two-devices": of_groups, "drafting": added}.items():
        (results / f"{name}.json").write_text(json.dumps(of | here))
    set_gpus(results, {"step": "one", "step-again": "other"} | dict.fromkeys(IN_ONE_LEASE, "one"))
    return results


IN_ONE_LEASE = ("ems-sd", "ems-sd-int8")


def set_gpus(results, gpus):
    path = results / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["runs"] |= {name: {"gpus": [gpu]} for name, gpu in gpus.items()}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("narrow-decoding", "| 24 | 10,683 | 14,042 | 1.31 |"),
        ("groups", "| 2 x 2 | 32 | 100 |"),
        ("invariant", "| batch | fast | invariant | cost | cost of prefill |"),
        ("rows-apart", "Of 676,230 rows 0 had other keys"),
        ("floors", "| opt-6.7b | 1.21 |"),
        ("summary", "`block` 4.0 % to 7.0 %"),
    ],
)
def test_figures_whose_results_are_not_there_yet(measured, whole_results, name, shown):
    page = f"<!-- measured: {name} -->\n<!-- end -->\n"
    found = measured.measured(page, [(whole_results, "")])
    assert shown in found
    assert measured.measured(found, [(whole_results, "")]) == found


def test_a_step_that_was_measured_again_on_the_same_gpu_is_refused(measured, whole_results):
    set_gpus(whole_results, {"step": "one", "step-again": "one"})
    with pytest.raises(ValueError, match="on the same GPU"):
        measured.measured("<!-- measured: summary -->\n<!-- end -->\n", [(whole_results, "")])


@pytest.mark.parametrize(
    ("figure", "name"), [("narrow", "step-fp8"), ("narrow-decoding", "ems-sd")]
)
def test_a_ratio_of_results_of_several_gpus_is_refused(measured, whole_results, figure, name):
    set_gpus(whole_results, {name: "another"})
    with pytest.raises(ValueError, match="on several GPUs"):
        measured.measured(f"<!-- measured: {figure} -->\n<!-- end -->\n", [(whole_results, "")])


@pytest.mark.parametrize("changed", [{"commit": "abc"}, {"hardware": {"device": "another"}}])
def test_a_figure_of_results_that_do_not_belong_together_is_refused(measured, results, changed):
    path = results / "step-int8.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))
    page = (DOCS / "how-to" / "narrow.md").read_text()
    with pytest.raises(ValueError, match="step, step-int8, step-fp8, step-int4 do not belong"):
        measured.measured(page, [(results, "")])


def test_paragraphs_and_items_are_wrapped_and_tables_are_not(measured):
    words = " ".join(["word"] * 40)
    assert max(map(len, measured.wrapped(words).splitlines())) <= measured.WIDTH
    assert [line[:2] for line in measured.wrapped(f"- {words}").splitlines()] == ["- ", "  "]
    assert measured.wrapped(f"| {words} |") == f"| {words} |"


@pytest.fixture
def results(measured, tmp_path):
    """A copy of the results that may be changed."""
    return shutil.copytree(RESULTS, tmp_path / "results")


@pytest.fixture(scope="module")
def measured(modules_of_the_pages):
    """The module that writes figures into pages."""
    return importlib.import_module("measured")


# The benchmarks page


@pytest.fixture(scope="module")
def modules_of_the_pages():
    """Makes the modules beside the pages importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield


@pytest.fixture(scope="module")
def tables(modules_of_the_pages):
    """The module that writes the page."""
    return importlib.import_module("benchmark_tables")


def test_every_committed_file_has_its_device_commit_and_figures(tables):
    page = tables.page()
    assert "Other results" not in page
    for path in tables.FOLDER.rglob("*.json"):
        if path.name == tables.MANIFEST:
            continue
        results, name = json.loads(path.read_bytes()), path.relative_to(tables.FOLDER).as_posix()
        hardware = results["hardware"]
        device = hardware.get("device") or hardware["device_kind"]
        assert f"`benchmarks/{name}`: {device}; " in page
        assert f"jax {results['versions']['jax']}, " in page
        commits = {entry.get("commit") for entry in results.get("entries", [])} - {None}
        for commit in commits or {results["commit"]}:
            assert re.search(rf"`benchmarks/{name}`: .*; commit .*`{commit}`", page)
    step = json.loads((RESULTS / "step.json").read_bytes())
    for entry in step["shapes"]:
        shape = f"| {entry['batch']} x {entry['rows_per_sample']} "
        runs = entry["runs_ms"]
        each = [(long - short) / 10 for short, long in zip(runs["3"], runs["13"], strict=True)]
        times = f"{entry['best_ms']:.2f} | {entry['median_ms']:.2f}"
        assert f"{shape}| {times} | {min(each):.2f} to {max(each):.2f} |" in page


def test_a_distilled_drafter_is_shown_beside_the_draft_model_that_it_was_compared_with(tables):
    page = tables.page()
    results = json.loads((examples.ROOT / "benchmarks" / "h200-distil-eagle3.json").read_bytes())
    for name, label in (("after", "after"), ("compared", "compared: `emsjax/demo/draft`")):
        of = results["results"][name]
        positions = " | ".join(f"{share:.3f}" for share in of["by_position"])
        figures = f"{positions} | {of['mean_acceptance_length']:.2f} | {of['tokens_per_s']:.0f}"
        assert f"| {label} | {of['acceptance_rate']:.3f} | {figures} |" in page
    assert "`--kind eagle3`: 1 layer of width 320, 2,255,040 parameters, for a target" in page


def test_tables_are_rectangular(tables):
    for block in tables.page().split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("| ")]
        assert len({line.count(" |") for line in rows}) <= 1


def test_files_that_are_not_there_have_no_section(tables, tmp_path):
    assert tables.page(tmp_path) == ""
    source = RESULTS / "step.json"
    shutil.copy(source, tmp_path / "b.json")
    page = tables.page(tmp_path)
    assert re.findall("^## (.*)", page, re.MULTILINE) == ["Decoding steps"]
    shutil.copy(source, tmp_path / "a.json")
    assert page.count("| 24 x 8 |") == 1
    assert tables.page(tmp_path).count("| 24 x 8 |") == 2


def test_a_figure_is_shown_with_its_results(tables, tmp_path):
    shutil.copy(RESULTS / "step.json", tmp_path / "a.json")
    assert "![" not in tables.page(tmp_path)
    (tmp_path / "a.png").touch()
    assert "![a](../benchmarks/a.png)" in tables.page(tmp_path)
    (tmp_path / "gpu").mkdir()
    for name in ("a.json", "a.png"):
        (tmp_path / name).rename(tmp_path / "gpu" / name)
    (tmp_path / "gpu" / tables.MANIFEST).write_text("{}")
    assert "![a](../benchmarks/gpu/a.png)" in tables.page(tmp_path)
    assert tables.page(tmp_path).count("`benchmarks/gpu/") == 1
    shown = re.findall(r"!\[.*\]\((.*)\)", tables.page())
    assert shown
    assert all((DOCS / path).exists() for path in shown)


def test_a_file_of_another_kind_is_listed_without_figures(tables, tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({"command": "make it", "commit": "abc"}))
    page = tables.page(tmp_path)
    assert page.startswith("## Other results")
    assert "make it" in page


COMMON = {"hardware": {"device": "a GPU"}, "versions": {"jax": "0.11"}, "commit": "abc"}
SUBJECT = {"shape": "opt-6.7b", "draft_shape": "opt-125m", "dtype": "bfloat16"}
SPEED = {"min": 90.0, "median": 100.0, "max": 110.0}


def of_method(speed_up: float) -> dict:
    speed = SPEED | {"speed_up": speed_up}
    return {
        "tokens_per_s": speed,
        "live_tokens_per_s": speed,
        "mean_acceptance_length": 3.25,
        "padding_ratio": {"inputs": 0.5, "kv": 1.5},
        "step_ms": 4.5,
        "of_floor": 1.25,
        "memory_bytes": None,
        "compile_s": 20.0,
    }


def of_drafters() -> dict:
    of = {"tokens_per_step": 2.5, "acceptance_rate": 0.61, "first_token_ms": 12.34}
    return {"suffix": {**of, "tokens_per_s": 210.0, "speed": 2.0}}


SOURCE = {"of_best": 0.987, "tokens_per_step": 8.9, "acceptance_rate": 0.819, "step_ms": 36.5}
SPLIT = {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8", "tensor_parallel": 2}
NOT_YET = {  # results of kinds that may have no committed file, as their writers format them
    "emsjax bench ems-sd --shape opt-6.7b": (
        {
            "settings": SUBJECT
            | {
                "acceptance": {"miss": 0.3},
                "draft": "llma",
                "max_new_tokens": 128,
                "methods": ["greedy", "ems"],
                "repeats": 3,
            },
            "entries": [
                {
                    "batch": 8,
                    "mean_prompt_tokens": 900.0,
                    "methods": {"greedy": of_method(1.0), "ems": of_method(3.21)},
                }
            ],
        },
        [
            "| 8 | 900 | 100 [90, 110] (1.00) | 100 [90, 110] (3.21) |",
            "| 8 | ems | 3.25 | 0.50 | 1.50 | 4.50 | 1.25 |  | 20 |",
        ],
    ),
    "emsjax bench peers --model m": (
        {
            "settings": {
                "model": "m",
                "draft_model": None,
                "dtype": "float32",
                "max_new_tokens": 128,
                "repeats": 3,
                "libraries": ["emsjax", "transformers"],
            },
            "entries": [
                {
                    "batch": 8,
                    "mean_prompt_tokens": 900.0,
                    "runs": [
                        {"library": "emsjax", "method": "plain", "tokens_per_s": 99.0},
                        {"library": "emsjax", "method": "prompt-lookup", "tokens_per_s": 299.0},
                        {"library": "transformers", "method": "plain", "tokens_per_s": None},
                    ],
                }
            ],
        },
        ["| 8 | 900 | plain | 99 |  |", "| 8 | 900 | prompt-lookup | 299 |  |"],
    ),
    "emsjax bench prompts --data a --model m": (
        {
            "settings": {
                "model": "m",
                "draft_model": "d",
                "dtype": "float32",
                "temperature": 0.0,
                "max_new_tokens": 128,
                "repeats": 3,
            },
            "entries": [
                {"batch": 8, "category": "coding", "prompts": 9, "drafters": of_drafters()}
            ],
            "overall": [{"batch": 8, "prompts": 12, "drafters": of_drafters()}],
        },
        [
            "`m`, draft model `d`, float32, greedy, at most 128 new tokens of each turn",
            "| 8 | coding | 9 | suffix | 2.50 | 61.0% | 12.3 | 210 | 2.00 |",
            "| 8 | overall | 12 | suffix | 2.50 | 61.0% | 12.3 | 210 | 2.00 |",
        ],
    ),
    "emsjax bench drafters": (
        {
            "settings": {
                "shape": "embedded",
                "dtype": "float32",
                "max_new_tokens": 256,
                "draft_tokens": 4,
                "repeats": 5,
            },
            "entries": [{"batch": 8, "drafters": {"mixed": SOURCE | {"tokens_per_s": 1527.0}}}],
        },
        [
            "The embedded pair, float32, 256 new tokens",
            "| 8 | mixed | 1527 | 0.987 | 8.90 | 81.9% | 36.50 |",
        ],
    ),
    "emsjax bench drafting": (
        {
            "settings": SPLIT
            | {
                "model": "qwen3-8b",
                "draft_model": "qwen3-0.6b",
                "context": 900,
                "repetitions": 7,
                "draft_quantize": "int8",
            },
            "entries": [
                {
                    "source": "block",
                    "batch": 8,
                    "rows_per_sample": 8,
                    "times": {"given": {"best_ms": 4.0}, "drafted": {"best_ms": 4.2}},
                    "ratio": 1.05,
                }
            ],
        },
        [
            "bfloat16, weights in int8, keys and values in int8, split over 2 devices; draft model",
            "drafters' weights in int8; mean context 900",
            "| `block` | 8 x 8 | 4.000 | 4.200 | +5.0% |",
        ],
    ),
    "emsjax bench groups": (
        {
            "settings": {
                "shape": "opt-13b",
                "dtype": "bfloat16",
                "batch_size": 64,
                "prompts": 256,
                "max_new_tokens": 128,
                "repeats": 5,
                "devices": 4,
            },
            "entries": [{"size": 2, "groups": 2, "slots": 32, "tokens_per_s": SPEED}],
        },
        ["64 slots altogether on 4 devices, 5 runs", "| 2 x 2 | 32 | 90 | 100 | 110 |"],
    ),
    "python -m emsjax.benchmarks.buckets": (
        {
            "settings": {
                "model": "opt-6.7b",
                "dtype": "bfloat16",
                "context": 900,
                "repetitions": 7,
            },
            "batches": [
                {
                    "batch": 24,
                    "ratio": 1.0234,
                    "points": [
                        {
                            "rows": 140,
                            "share": 0.2,
                            "bucket": 144,
                            "times": {"bucketed": {"best_ms": 5.125}, "exact": {"best_ms": 5.0}},
                        }
                    ],
                }
            ],
        },
        ["| 24 | 1.023 |", "| 24 | 140 | 20% | 144 | 5.12 | 5.00 |"],
    ),
    "python -m pallas_kernels.benchmark.products": (
        {
            "products": [
                {
                    "product": "fc1",
                    "inputs": 4096,
                    "outputs": 16384,
                    "rows": 192,
                    "implementations": {
                        "xla": {"median_us": 47.52},
                        "triton": {"error": "at most 128 rows"},
                    },
                }
            ]
        },
        ["| product | rows | `xla` | `triton` |", "| fc1, 4096 x 16384 | 192 | 47.5 |  |"],
    ),
    "python -m emsjax.benchmarks.first_call": (
        {
            "settings": {
                "model": "opt-6.7b",
                "draft_model": "opt-125m",
                "drafter": "model",
                "batch_size": 24,
            },
            "cold": {"calls_s": [61.0, 1.25]},
            "warm": {"calls_s": [9.0, 1.25]},
        },
        ["| empty | 61.0 | 1.2 |", "| as the first process left it | 9.0 | 1.2 |"],
    ),
    "python -m emsjax.benchmarks.refill": (
        {
            "settings": {
                "model": "opt-6.7b",
                "dtype": "bfloat16",
                "prompts": 480,
                "shortest": 500,
                "longest": 1500,
                "max_new_tokens": 128,
                "batch_size": 24,
            },
            "runs": [
                {"side": "static", "seconds": 9.0, "tokens_per_s": 99.0, "model_calls": 880},
                {
                    "side": "refilled",
                    "seconds": 8.0,
                    "tokens_per_s": 119.0,
                    "model_calls": 700,
                    "idle_share": 0.03,
                },
            ],
            "speedup": 1.2021,
            "prompt_share": 0.641,
        },
        [
            "| static | 9.00 | 99 | 880 |  |",
            "| refilled | 8.00 | 119 | 700 | 3.0% |",
            "are 1.202 times as fast",
            "take 64% of static batches",
        ],
    ),
    "python -m emsjax.benchmarks.divergences": (
        {
            "settings": {"dtype": "bfloat16", "max_new_tokens": 128},
            "entries": [
                {
                    "model": "embedded",
                    "batch": 8,
                    "drafter": name,
                    "mean_acceptance_length": 2.5,
                    "near_ties_alone": True,
                    "divergences": [{"share": share} for share in shares],
                }
                for name, shares in (("draft-model", ()), ("own-tokens", (0.125, 0.5)))
            ],
        },
        ["| embedded | fast | 8 | draft-model | 2.50 | 0 |  |", "own-tokens | 2.50 | 2 | 0.50 |"],
    ),
    "python -m emsjax.benchmarks.training": (
        {
            "settings": {
                "model": "opt-125m",
                "target": "opt-1.3b",
                "dtype": "bfloat16",
                "batch_size": 32,
                "sequence_length": 1024,
            },
            "entries": [
                {
                    "losses": {"forward-kl": 0.9, "cross-entropy": 0.1},
                    "steps_s": [0.5, 0.25, 0.125],
                    "tokens_per_s": 1234.0,
                    "tflop_per_s": 150.0,
                    "share": 0.2,
                }
            ],
        },
        ["| forward-kl 0.9, cross-entropy 0.1 | 250.0 | 1234 | 150.0 | 20.0% |"],
    ),
    "emsjax distil --target a": (
        {
            "settings": {
                "target": "a",
                "draft_model": None,
                "start": "random",
                "steps": 7,
                "batch_size": 32,
                "sequence_length": 1024,
                "losses": {"forward-kl": 0.9},
                "generations": 5,
                "temperature": 0.5,
                "held_out": 16,
                "max_new_tokens": 128,
                "draft_tokens": 2,
            },
            "results": {
                "config": {"num_hidden_layers": 2, "hidden_size": 128},
                "parameters": {"draft": 1000, "target": 9000},
                **{
                    name: {
                        "acceptance_rate": rate,
                        "by_position": positions,
                        "mean_acceptance_length": length,
                        "tokens_per_s": 100 * length,
                    }
                    for name, rate, positions, length in (
                        ("plain", 0.0, [], 1.0),
                        ("before", 0.25, [0.5, 0.25], 1.5),
                        ("after", 0.75, [0.875, 0.75], 2.5),
                    )
                },
            },
        },
        [
            "1,000 parameters, for a target of 9,000 (`a`). Start: random. 7 steps",
            "5 continuations by the target, at temperature 0.5.",
            "| plain |  |  |  | 1.00 | 100 |",
            "| after | 0.750 | 0.875 | 0.750 | 2.50 | 250 |",
        ],
    ),
}


@pytest.mark.parametrize("command", NOT_YET)
def test_results_that_are_added_are_shown(tables, tmp_path, command):
    results, expected = NOT_YET[command]
    (tmp_path / "new.json").write_text(json.dumps({"command": command, **COMMON, **results}))
    page = tables.page(tmp_path)
    for row in expected:
        assert row in page
    assert f"a GPU; jax 0.11; commit `abc`.\n```bash\n{command}\n```" in page


@pytest.mark.parametrize("command", [name for name in NOT_YET if "emsjax.benchmarks." in name])
def test_both_forms_of_a_benchmarks_command_have_its_table(tables, tmp_path, command):
    results, expected = NOT_YET[command]
    name = command.rpartition(".")[2].replace("_", "-")
    other = {"command": f"emsjax bench {name} --commit abc", **COMMON, **results}
    (tmp_path / "new.json").write_text(json.dumps(other))
    page = tables.page(tmp_path)
    for row in expected:
        assert row in page


@pytest.mark.parametrize("empty", ["entries", "batches", "shapes", "comparisons", "runs"])
def test_an_interrupted_run_without_results_is_listed(tables, tmp_path, empty):
    committed = [json.loads(path.read_bytes()) for path in tables.FOLDER.rglob("*.json")]
    added = [{"command": name, **COMMON, **results} for name, (results, _) in NOT_YET.items()]
    for i, results in enumerate([*committed, *added]):
        if empty in results:
            results[empty] = []
            (tmp_path / f"{i}.json").write_text(json.dumps(results))
    assert tables.page(tmp_path).count("```bash") == len(list(tmp_path.glob("*.json"))) > 0


def test_the_page_names_the_benchmarks_that_continue():
    page = (DOCS / "benchmarks.md").read_text()
    (named,) = re.findall(r"(`emsjax bench [^.;]*?) continue from the\s+results", page)
    resuming = {name for name, one in BENCHMARKS.items() if one.resumes} - {"all"}
    assert set(re.findall(r"`(?:emsjax bench )?([\w-]+)`", named)) == resuming


def test_the_tables_replace_the_mark(tables):
    source = [(DOCS / "benchmarks.md").read_text()]
    assert source[0].count(tables.MARK) == 1
    tables.fill_in(None, "limits", source)
    assert tables.MARK in source[0]
    tables.fill_in(None, "benchmarks", source)
    assert tables.MARK not in source[0]
    assert tables.page() in source[0]
