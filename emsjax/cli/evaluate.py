"""`emsjax eval`: tasks of the lm-evaluation-harness."""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from emsjax.cli.drafting import load_models
from emsjax.cli.generate_arguments import complete_drafter_options
from emsjax.device import dtype_name
from emsjax.records.writing import to_json, write_atomically
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.reporting import check_writable, line, make_console, make_table
from emsjax.terminal.surroundings import surroundings

REPORTED = ("results", "groups", "versions", "n-shot", "n-samples", "configs")


def run(options: argparse.Namespace, command: str) -> None:
    """Evaluate a model on tasks; print the results and write them to a file.

    Raises:
        ImportError: the harness is not installed.
        ValueError: a task is unknown, a model cannot be loaded, or a file cannot be written.
    """
    check_writable("--output", options.output)
    if options.include_path is not None and not options.include_path.is_dir():
        raise ValueError(f"--include-path: {options.include_path} is not a folder")
    from emsjax.evaluation import EmsjaxLM  # first: the error says how to install the harness

    options = completed(options)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.include_path and str(options.include_path))
    tasks = {name: manager.match_tasks([name]) for name in options.tasks}
    if unknown := [name for name, found in tasks.items() if not found]:
        raise ValueError(f"--tasks: there is no task {', '.join(unknown)}")
    model, tokenizer, drafter = load(options)
    evaluated = lm_eval.simple_evaluate(
        EmsjaxLM(
            model,
            tokenizer,
            drafter,
            batch_size=options.batch_size,
            numerics=options.numerics,
        ),
        tasks=list(itertools.chain(*tasks.values())),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=manager,
        apply_chat_template=options.apply_chat_template,
        log_samples=False,
    )
    report(evaluated["results"], make_console())
    if options.output is not None:
        parts = {name: evaluated[name] for name in REPORTED if name in evaluated}
        found = surroundings(None, "lm-eval", "transformers")
        # Configurations hold functions, for which JSON has no text.
        text = to_json({"command": command, **found, **parts}, indent=1, default=str)
        write_atomically(options.output, text + "\n")


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with the drafter's defaults and the device's dtype.

    Raises:
        ValueError: an option of another drafter, or a missing draft model.
    """
    given = {**vars(options), "draft_length": None, "profile": None, "memory": None}
    given["tensor_parallel"] = None
    given |= {"match_length": None, "search_generated": False, "branches": None}
    complete_drafter_options(given)
    return argparse.Namespace(**given | {"dtype": dtype_name(given["dtype"])})


def load(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Loads the model, its tokenizer and the drafter.

    Raises:
        ValueError: one of them cannot be loaded, or the drafter does not suit the model.
    """
    tokenizer = load_tokenizer(options.model, options.revision)
    config = load_config(options.model, options.revision)
    sizes = len(tokenizer), config.max_position_embeddings
    model, drafter = load_models(options, config, *sizes)
    return model, tokenizer, drafter


def report(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print one line per task and metric."""
    table = make_table(None, ["task", "metric", "value", "standard\nerror"])
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, of = name.partition(",")
            if not of or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{of}")
            label = metric if of == "none" else f"{metric} ({of})"
            table.add_row(task, label, *map(_number, (value, error)))
    console.print(table)
    if not table.row_count:
        line(console, "No task has a metric.")


def _number(value: Any) -> str:
    try:
        return f"{float(value):.4f}"
    except (TypeError, ValueError):  # "N/A", or missing
        return "-"
