"""The options of each benchmark, without heavy imports."""

import argparse
from pathlib import Path

from emsjax.benchmarks.rates import MEASURED_RATES
from emsjax.benchmarks.shapes import MODELS
from emsjax.terminal.options import (
    add_number_formats,
    add_numerics,
    add_quantize,
    count,
    names,
    positive_float,
    positive_int,
    positive_ints,
    shapes,
)

# What `emsjax profile` measures by default.
PROFILED_BATCH_SIZES, PROFILED_DRAFT_TOKENS, ACCEPTANCE_RATE = (1, 8, 64), 16, 0.8
PROFILED_CONTEXT = 900  # tokens, or as many as the models have positions for
SHAPES = (  # for help texts
    "opt-125m, opt-1.3b, opt-2.7b, opt-6.7b, opt-13b, opt-30b, opt-66b, llama-3.1-8b, "
    "llama-3.1-70b, llama-3.2-1b, qwen3-0.6b, qwen3-8b, mistral-7b, gemma-3-4b, pythia-6.9b, "
    "gpt2-xl or codegen-6b"
)
DRAFT_SHAPE = "qwen3-0.6b for qwen3-8b, llama-3.2-1b for llama-3.1-8b, otherwise opt-125m"
EMBEDDED = "embedded"  # the models that come with the library
DRAFTERS = ("none", "prompt-lookup", "model")
H200 = MEASURED_RATES["NVIDIA H200"]
NUMBER = {"type": positive_int, "metavar": "N"}
SHOWN = "default: %(default)s"


def add_model(parser: argparse.ArgumentParser, default: str, option: str = "--model") -> None:
    parser.add_argument(option, choices=MODELS, default=default, help=f"model shape ({SHOWN})")


def add_number(parser: argparse.ArgumentParser, option: str, default: int, what: str = "") -> None:
    shown = f"{what} ({SHOWN})" if what else SHOWN
    parser.add_argument(option, **NUMBER, default=default, help=shown)


def add_context(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--context", 900, "mean cached tokens per sample")


def add_attention(parser: argparse.ArgumentParser) -> None:
    choices = ("triton", "xla")
    parser.add_argument("--attention", choices=choices, help="default: the device's")


def add_batch_sizes(parser, default: tuple[int, ...] | None = None, shown: str = "") -> None:
    sizes = shown or ",".join(map(str, default or ()))
    parser.add_argument(
        "--batch-sizes",
        type=positive_ints,
        default=default,
        metavar="N,N,...",
        help=f"default: {sizes}",
    )


def add_result_options(parser: argparse.ArgumentParser, resumes: bool, plot: bool = False) -> None:
    """Where the results are written, and the commit that they name."""
    written = "JSON file, written after each result"
    written += "; an interrupted run continues with it" if resumes else ""
    parser.add_argument("--output", type=Path, metavar="FILE", help=written)
    if plot:
        shown = "figure, as PNG, PDF or SVG; needs matplotlib"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=shown)
    parser.add_argument("--commit", help="commit of the measured code (default: the checkout's)")


def add_draft_length_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--shape",
        default=EMBEDDED,
        help="models to decode with: embedded, which come with the library, or a model shape "
        f"({SHAPES}) with random weights and scripted drafts ({SHOWN})",
    )
    add("--draft-shape", help=f"draft model beside a model shape (default: {DRAFT_SHAPE})")
    add_number_formats(parser)
    add_batch_sizes(parser, shown="depends on the shape")
    add("--workloads", type=names, metavar="NAME,NAME,...", help="default: all that the shape has")
    add(
        "--max-draft-tokens",
        type=positive_int,
        default=PROFILED_DRAFT_TOKENS,
        metavar="N",
        help=f"longest fixed length ({SHOWN})",
    )
    add("--max-new-tokens", type=positive_int, metavar="N", help="default: depends on the workload")
    add(
        "--draws",
        type=positive_int,
        metavar="N",
        help="batches per figure, each with acceptance drawn anew (default: 2 to 16, enough for "
        "64 sequences)",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="written by `emsjax profile` (default: the stored one, measured first if missing)",
    )
    add_result_options(parser, resumes=True, plot=True)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", type=shapes, default="1x1,1x8,8x1,8x8,24x1,24x8", help=SHOWN)
    add_model(parser, "opt-6.7b")
    add("--layers", **NUMBER, help="another depth; the floor is that model's")
    add_context(parser)
    add_attention(parser)
    add_number_formats(parser)
    add_numerics(parser)
    rate = "for the floor (default: an H200's, %(default)g)"
    add("--read-rate", type=positive_float, default=H200.read / 1e12, help=f"TB/s {rate}")
    add("--matmul-rate", type=positive_float, default=H200.matmul / 1e12, help=f"TFLOP/s {rate}")
    listed = "kernels to list (default: %(default)s; 0: no profile)"
    add("--profile-top", type=count, default=25, metavar="N", help=listed)
    add_result_options(parser, resumes=False)


def add_buckets_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-6.7b")
    add_batch_sizes(parser, (1, 8, 24, 64))
    add_context(parser)
    add_result_options(parser, resumes=False)


def add_overheads_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-6.7b")
    add_model(parser, "opt-125m", "--draft-model")
    add_context(parser)
    add_attention(parser)
    add_result_options(parser, resumes=False)


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-6.7b")
    add_model(parser, "opt-125m", "--draft-model")
    kinds = {"type": lambda text: text.split(","), "metavar": "NAME,...", "help": SHOWN}
    parser.add_argument("--sources", default="suffix,model,eagle3,block,observed,tree", **kinds)
    add_batch_sizes(parser, (1, 8, 24, 64))
    add_context(parser)
    parser.add_argument("--layers", **NUMBER, help="another depth of the target")
    add_attention(parser)
    add_number_formats(parser)
    add_quantize(parser, "--draft-quantize", "the drafter")
    add_result_options(parser, resumes=True)


def add_refill_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-6.7b")
    add_number(parser, "--prompts", 480)
    add_number(parser, "--shortest", 500, "tokens of the shortest prompt")
    add_number(parser, "--longest", 1500, "tokens of the longest prompt")
    add_number(parser, "--max-new-tokens", 128)
    add_number(parser, "--batch-size", 24)
    add_number(parser, "--repeats", 2)
    add_result_options(parser, resumes=False)


def add_groups_options(parser: argparse.ArgumentParser) -> None:
    shown = f"{SHAPES}: random weights, scripted to output a known text ({SHOWN})"
    parser.add_argument("--shape", default="opt-13b", help=shown)
    shown = "devices of a group (default: all that are possible)"
    parser.add_argument("--sizes", type=positive_ints, metavar="N,N,...", help=shown)
    add_number(parser, "--batch-size", 64, "slots of all groups together")
    add_number(parser, "--prompts", 256)
    add_number(parser, "--max-new-tokens", 128)
    add_number(parser, "--repeats", 5)
    add_result_options(parser, resumes=True)


def add_first_call_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-6.7b")
    add_model(parser, "opt-125m", "--draft-model")
    parser.add_argument("--drafter", choices=DRAFTERS, default="prompt-lookup", help=SHOWN)
    add_number(parser, "--batch-size", 24)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    add_result_options(parser, resumes=False)


def add_divergences_options(parser: argparse.ArgumentParser) -> None:
    known, both = [EMBEDDED, *MODELS], [EMBEDDED, "opt-6.7b"]
    parser.add_argument("--models", nargs="+", choices=known, default=both, metavar="NAME")
    add_model(parser, "opt-125m", "--draft-shape")
    add_batch_sizes(parser, (8, 24))
    add_number(parser, "--max-new-tokens", 128)
    add_result_options(parser, resumes=True)


def add_invariance_options(parser: argparse.ArgumentParser) -> None:
    shown = ["opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "qwen3-8b"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=shown, metavar="NAME")
    add_number(parser, "--layers", 2)
    add_number(parser, "--context", 2048, "tokens of the sequence")
    parser.add_argument(
        "--row-counts",
        default="1-512",
        metavar="N-N,N,...",
        help=f"numbers of rows of the calls ({SHOWN})",
    )
    add_number(parser, "--batches", 10, "random batches")
    add_number(parser, "--processes", 1, "processes that trace and compile, on one device")
    parser.add_argument("--skip-fast", action="store_true", help="invariant numerics only")
    add_result_options(parser, resumes=True)


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--passages", 40, "passages of held-out modules")
    add_number(parser, "--tokens", 1024, "most tokens of a passage")
    add_result_options(parser, resumes=False)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "opt-125m")
    add_model(parser, "opt-1.3b", "--target")
    add_number(parser, "--batch-size", 32)
    add_number(parser, "--sequence-length", 1024)
    add_result_options(parser, resumes=False)
