"""Compile, compare, time, profile and report every case; see the package."""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

import jax

from pallas_kernels.benchmark import measure
from pallas_kernels.benchmark.cases import (
    FULL,
    PLAIN,
    QUICK,
    Case,
    Settings,
    count_caches,
    count_calls,
    decode_cases,
    prefill_cases,
)
from pallas_kernels.benchmark.programs import (
    bind,
    build_inputs,
    build_program,
    compare,
    compile_all,
)
from pallas_kernels.benchmark.report import add_rates, all_ratios, describe_run, print_tables
from pallas_kernels.benchmark.updates import time_updates
from pallas_kernels.common.implementations import runs_triton

TOLERANCE = 2e-2  # in bfloat16, relative to the norm of a row's head
REFERENCE_BATCH, REFERENCE_ROWS = 8, 64  # the dense reference gathers a cache for each row
ERROR_CHARACTERS = 500


class MismatchError(Exception):
    """Implementations disagree."""


def implementations() -> tuple[str, ...]:
    """The implementations to time; the tables give more figures of the first one."""
    return ("triton", "xla", "cudnn") if runs_triton() else PLAIN


def expected_from(case: Case) -> str:
    """The implementation whose output the others must match."""
    small = case.batch <= REFERENCE_BATCH and sum(case.counts) <= REFERENCE_ROWS
    return "reference" if small else "xla"


def build(cases: Sequence[Case], names: Sequence[str], settings: Settings):
    """Compile everything: for each case its inputs, and its programs by name."""
    jobs = {}
    for case in cases:
        jobs[case, "inputs"] = functools.partial(build_inputs, case)
        for name in dict.fromkeys((*names, expected_from(case))):
            shape = (count_calls(name, case, settings), count_caches(case, settings))
            jobs[case, name] = functools.partial(build_program, name, case, *shape)
    built = compile_all(jobs)
    inputs = {case: built.pop((case, "inputs")) for case in cases}
    programs = {case: {} for case in cases}
    for (case, name), program in built.items():
        programs[case][name] = program
    return inputs, programs


def run_all(settings: Settings, profile: bool) -> dict[str, object]:
    """Compile, compare, time and profile every case.

    Raises:
        MismatchError: implementations disagree.
    """
    names = implementations()
    cases = [*decode_cases(settings), *prefill_cases(settings)]
    log(f"compiling {len(cases)} cases")
    inputs, programs = build(cases, names, settings)

    def runs_of(case: Case) -> dict:
        return bind(inputs[case], programs[case], count_caches(case, settings))

    log("comparing outputs")
    errors = {}
    for case in cases:
        errors[case] = compare(case, runs_of(case), programs[case], expected_from(case))
    check(errors)

    log("timing")
    read = measure.pure_read(*settings.read, settings.repetitions, settings.seconds)
    entries = []
    for case in cases:
        # The implementation that others were only compared with is not timed.
        programs[case] = {name: programs[case][name] for name in names}
        entries.append(time_case(case, programs[case], runs_of(case), errors[case], settings))

    updates = time_updates([name for name in names if name != "cudnn"], settings)

    log("profiling" if profile else "not profiling")
    # The profiler comes last because it disturbs the timing.
    for case, entry in zip(cases, entries, strict=True) if profile else ():
        runs = runs_of(case)
        for name, seconds in zip(runs, measure.kernel_seconds(runs.values()) or (), strict=False):
            calls = programs[case][name].calls
            entry["implementations"][name]["kernel_us"] = 1e6 * seconds / calls
    for case, entry in zip(cases, entries, strict=True):
        add_rates(case, entry, read["gb_per_s"])
    decode = [entry for entry in entries if entry["rows"] != "prefill"]
    prefill = [entry for entry in entries if entry["rows"] == "prefill"]
    return {
        "implementations": names,
        "pure_read": read,
        "decode": decode,
        "prefill": prefill,
        "updates": updates,
        "ratios": all_ratios(decode, prefill),
    }


def check(errors: Mapping[Case, Mapping[str, float]]) -> None:
    """Raises MismatchError unless all errors are within the tolerance."""
    wrong = [
        f"{case.model}, committed {case.committed}, batch {case.batch}, rows {case.rows}: "
        f"{name} differs from {expected_from(case)} by {error:.3g} of the norm of a row's head"
        for case, case_errors in errors.items()
        for name, error in case_errors.items()
        if not error <= TOLERANCE  # NaN is wrong as well
    ]
    if wrong:
        raise MismatchError("\n".join(wrong))


def time_case(case: Case, programs, runs, errors, settings: Settings) -> dict[str, object]:
    """The case's entry in the results."""
    figures = {}
    for name, program in programs.items():
        if name in runs:
            seconds = measure.time_runs(runs[name], settings.repetitions, settings.seconds)
            how = {"calls": program.calls, "form": program.form, "max_error": errors[name]}
            figures[name] = {**measure.best_and_median_us(seconds, program.calls), **how}
        else:
            figures[name] = {"error": program.error[:ERROR_CHARACTERS]}
    return {**case.describe(), "implementations": figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if implementations disagree."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.benchmark")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--commit", metavar="HASH", help="to record; default: git's HEAD")
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=jax.default_backend() == "gpu",
        help="take kernel times too; default: on GPUs",
    )
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else FULL
    try:
        results = run_all(settings, options.profile)
    except MismatchError as mismatch:
        log(str(mismatch))
        return 1
    results = {**describe_run(arguments, settings, options.commit), **results}
    if options.output:
        options.output.write_text(
            json.dumps(results, indent=1, sort_keys=True, allow_nan=False) + "\n"
        )
    print_tables(results)
    return 0


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
