"""The benchmarks page: tables of the JSON files in and below `benchmarks/`.

It is written when the site is built.

A file's command tells its kind. A kind without files has no section, and a file of an unknown kind
is listed without a table.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import device_tables
import result_tables
from markdown_tables import Results

FOLDER = Path(__file__).parents[1] / "benchmarks"
MANIFEST = "manifest.json"  # of a folder that `emsjax bench all` wrote; it has no figures
DOCUMENT, MARK = "benchmarks", "<!-- results -->"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of results.

    Attributes:
        title: the title of its section.
        commands: a file is of this kind if its command contains one of these.
        about: a description of the measurement, in Markdown.
        body: makes the settings and tables of a file, in Markdown.
    """

    title: str
    commands: tuple[str, ...]
    about: str
    body: Callable[[Results], Sequence[str]]


def benchmark(module: str) -> tuple[str, ...]:
    """Both forms of the command that runs a benchmark."""
    return f"emsjax.benchmarks.{module}", f"emsjax bench {module.replace('_', '-')}"


KINDS = (
    Kind(
        "EMS-SD beside padding",
        benchmark("ems_sd"),
        "Plain decoding, batched speculation with padding (`vanilla`), with either half of it "
        "(`unpad-kv`, `unpad-inputs`) and without (`ems`), with the same prompts and drafts: see "
        "[padding](concepts/padding.md).",
        result_tables.ems_sd,
    ),
    Kind(
        "Beside transformers",
        benchmark("peers"),
        "The same weights and prompts through `emsjax.generate` and through `generate` of "
        "transformers, which drafts for batches of one sample only.",
        result_tables.peers,
    ),
    Kind(
        "Prompt files of the field",
        benchmark("prompts"),
        "Draft sources on prompts by category, each turn a prompt: see [how they are "
        "measured](how-to/evaluation.md#spec-bench-speed-bench-and-deepspec).",
        result_tables.prompts,
    ),
    Kind(
        "Draft lengths",
        benchmark("draft_length"),
        "Policies beside every fixed length. The target is scripted to output a known text, and "
        "drafts are that text with some wrong tokens. `llma`: prompt lookup that drafts nothing "
        "with probability 0.3 and otherwise 7 tokens, which are all right with probability 0.5. "
        "`draft-model`: a draft model whose tokens are right with probability 0.8; `poor` and "
        "`poor-draft-model`: 0.2. `mixed`: copies whose tokens are right with probability 0.95 in "
        "half of the samples and 0.1 in the others, timed while all samples are live. "
        "`candidates`: trees with three candidates for a token, right with probabilities 0.6, 0.2 "
        "and 0.08; `first-candidates`: chains of the first ones.",
        result_tables.draft_length,
    ),
    Kind(
        "Draft sources",
        benchmark("drafters"),
        "Draft sources alone and mixed, on the same prompts; whole calls, prefill included.",
        result_tables.drafters,
    ),
    Kind(
        "What drafters add to a step",
        benchmark("drafting"),
        "Steps in which a drafter does all its work, beside steps of as many rows whose drafts "
        "cost nothing. `observed`: hidden states are read and nobody drafts from them. `tree`: "
        "rejected trees beside rejected chains.",
        device_tables.drafting,
    ),
    Kind(
        "Groups of devices",
        benchmark("groups"),
        "All devices as groups, over each of which a replica is split: see [several "
        "devices](how-to/several-devices.md). Prefill is included.",
        result_tables.groups,
    ),
    Kind(
        "Slots that refill",
        benchmark("refill"),
        "A set of prompts in batches that end with their last sequence, and in as many slots that "
        "take the next prompt when a sequence has finished; whole calls, prefill included.",
        result_tables.refill,
    ),
    Kind(
        "Decoding steps",
        benchmark("step"),
        "One step of the device loop (draft, pack, forward, verify, commit), all drafts rejected. "
        "The floor reads every weight and every committed key and value once, or computes where "
        "that takes longer.",
        device_tables.step,
    ),
    Kind(
        "Costs of a step",
        ("emsjax profile",),
        "The measurements of `emsjax profile` for [draft-length "
        "policies](concepts/draft-lengths.md).",
        device_tables.profile,
    ),
    Kind(
        "Row buckets",
        benchmark("buckets"),
        "Steps whose rows are rounded up to a compiled row count, beside the same steps compiled "
        "for exactly their rows.",
        device_tables.buckets,
    ),
    Kind(
        "Costs of sampling, drafting and the loop",
        benchmark("overheads"),
        "`plain`: the loop with `drafter=None` beside one without speculation in it. `drafting`: "
        "a draft model's tokens beside given ones. `sampling`: sampled steps beside greedy ones. "
        "`calls`: a call for each step, of one state or of two in turns, beside one call.",
        device_tables.overheads,
    ),
    Kind(
        "Products",
        ("pallas_kernels.benchmark.products",),
        "Packed rows times the weights of a layer, by each implementation that supports the number "
        "of rows. "
        "`default` is what a model uses.",
        device_tables.products,
    ),
    Kind(
        "Kernels",
        ("pallas_kernels.benchmark",),
        "Attention of packed rows and the commit of keys and values. `cudnn` is the padded "
        "attention of cuDNN through `jax.nn.dot_product_attention`.",
        device_tables.kernels,
    ),
    Kind(
        "The first call",
        benchmark("first_call"),
        "Seconds of two calls of `emsjax.generate` in a new process: the first one compiles.",
        device_tables.first_call,
    ),
    Kind(
        "Where 16-bit decoding differs",
        benchmark("divergences"),
        "Greedy sequences that differ from plain decoding, and the margin between the two tokens "
        "in float32: see [losslessness](concepts/losslessness.md).",
        result_tables.divergences,
    ),
    Kind(
        "Whether a row's bits depend on other rows",
        benchmark("invariance"),
        "Rows of one sequence that have other bits when they are computed beside others: see "
        "[numerics](concepts/numerics.md).",
        result_tables.invariance,
    ),
    Kind(
        "What narrow weights and caches cost",
        benchmark("quality"),
        "Bits per byte of the embedded target on texts that it was not trained on, and draft "
        "tokens of its narrow copies that it accepts: see [narrow numbers](how-to/narrow.md).",
        result_tables.quality,
    ),
    Kind(
        "Training steps",
        benchmark("training"),
        "A step of distillation beside the rate of a large matrix product.",
        device_tables.training,
    ),
    Kind(
        "Distilled drafters",
        ("emsjax distil",),
        "Decoding plainly, with the drafter before training, and with the trained one. "
        "Position: the share of draft tokens at that position that were accepted, if all "
        "before them were.",
        result_tables.distillation,
    ),
)


def surroundings(name: str, results: Results) -> str:
    """Hardware, versions, commit and command of a file."""
    hardware, versions = results.get("hardware", {}), results.get("versions", {})
    device = hardware.get("device") or hardware.get("device_kind") or "an unknown device"
    packages = ", ".join(f"{package} {of}" for package, of in versions.items() if of)
    last = results.get("commit") or "unknown"
    # A resumed run may have continued at another commit.
    commits = {entry.get("commit") or last for entry in results.get("entries", [])} or {last}
    commits = ", ".join(f"`{commit}`" for commit in sorted(commits))
    where = f"`benchmarks/{name}`: {device}; {packages}; commit {commits}."
    commands = str(results.get("command", "unknown")).split("; ")
    return "\n".join([where, "```bash", *commands, "```"])


def picture(folder: Path, name: str) -> list[str]:
    """The figure beside a file of results, if it exists."""
    image = Path(name).with_suffix(".png")
    exists = (folder / image).exists()
    return [f"![{image.stem}](../benchmarks/{image.as_posix()})"] if exists else []


def page(folder: Path = FOLDER) -> str:
    """The sections of all files, in Markdown."""
    files = {
        path.relative_to(folder).as_posix(): json.loads(path.read_bytes())
        for path in sorted(folder.rglob("*.json"))
        if path.name != MANIFEST
    }
    parts: list[str] = []
    for kind in KINDS:
        mine = {name: of for name, of in files.items() if kind_of(of) is kind}
        parts += [f"## {kind.title}", kind.about] if mine else []
        for name, results in mine.items():
            parts += [*kind.body(results), *picture(folder, name), surroundings(name, results)]
    others = {name: of for name, of in files.items() if kind_of(of) is None}
    parts += ["## Other results"] if others else []
    parts += [surroundings(name, results) for name, results in others.items()]
    return "\n\n".join(parts)


def kind_of(results: Results) -> Kind | None:
    """The first kind that the file's command belongs to."""
    command = results.get("command", "")
    return next((kind for kind in KINDS if any(of in command for of in kind.commands)), None)


def fill_in(app, docname: str, source: list[str]) -> None:
    """Replace the mark in the page's source by the tables."""
    if docname == DOCUMENT:
        source[0] = source[0].replace(MARK, page())


def setup(app) -> dict[str, bool]:
    app.connect("source-read", fill_in)
    app.connect("env-get-outdated", lambda *_: [DOCUMENT])  # files may have been added or removed
    return {"parallel_read_safe": True, "parallel_write_safe": True}
