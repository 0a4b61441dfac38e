"""Measure and store what `emsjax profile` stores: the costs of decoding steps on this device."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emsjax.benchmarks import step_costs
from emsjax.benchmarks.options import PROFILED_BATCH_SIZES, PROFILED_CONTEXT, PROFILED_DRAFT_TOKENS
from emsjax.benchmarks.results import write_results
from emsjax.benchmarks.runs import LONG, SHORT
from emsjax.models.config import DecoderConfig
from emsjax.models.numbers import NumberFormats
from emsjax.policies import profiles as profile_store
from emsjax.terminal.reporting import check_writable, own_version
from emsjax.terminal.surroundings import surroundings


def measure_and_store(
    measurement: step_costs.Measurement,
    acceptance_rate: float,
    *,
    output: Path | None = None,
    commit: str | None = None,
    command: str,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Path]:
    """A profile, and where it was stored.

    Args:
        acceptance_rate: probability that a draft token is accepted, for the table of lengths.
        output: a further file to write the profile to.
        commit: of the measured code; None: the checkout's.

    Raises:
        ValueError: models that cannot be measured, or a folder that cannot be written.
    """
    started = time.perf_counter()
    measured = (measurement.config, measurement.draft_config, measurement.numbers)
    subject = profile_store.subject(*measured)
    stored = profile_store.path_of(subject)
    stored.parent.mkdir(parents=True, exist_ok=True)
    check_writable("the store of profiles", stored)
    measured = {
        **step_costs.measure_profile(measurement, acceptance_rate, say),
        "subject": subject,
        "command": command,
        "emsjax": own_version(),
        **surroundings(commit),
        "seconds": time.perf_counter() - started,
    }
    write_results(measured, output)
    return measured, profile_store.store(measured)


def fitting_measurement(
    config: DecoderConfig,
    draft_config: DecoderConfig | None,
    numbers: NumberFormats,
    *,
    batch_sizes: Sequence[int] = PROFILED_BATCH_SIZES,
    context: int | None = None,
    max_draft_tokens: int = PROFILED_DRAFT_TOKENS,
) -> step_costs.Measurement:
    """The measurement of these models' steps.

    Args:
        context: mean cached tokens per sample; None: the default, or as many as fit.

    Raises:
        ValueError: the models have too few positions.
    """
    context = fitting_context(context, config, draft_config, max_draft_tokens)
    return step_costs.Measurement(
        config, draft_config, numbers, batch_sizes, context, max_draft_tokens
    )


def fitting_context(
    context: int | None,
    config: DecoderConfig,
    draft_config: DecoderConfig | None,
    max_draft_tokens: int,
) -> int:
    """The context to measure at, in mean cached tokens per sample.

    Args:
        context: None: the default, or as many tokens as fit.

    Raises:
        ValueError: the models have too few positions.
    """
    configs = [config] if draft_config is None else [config, draft_config]
    positions = min(one.max_position_embeddings for one in configs)
    least = (SHORT + LONG) // 2 - 1  # the shortest context of a `StepRun`
    most = positions - max_draft_tokens - LONG + least - 1  # its last row still has a position
    if most < least:
        raise ValueError(
            f"--max-draft-tokens {max_draft_tokens} leaves no room in {positions} positions: at "
            f"most {max_draft_tokens - (least - most)} would fit"
        )
    if context is None:
        return min(PROFILED_CONTEXT, most)
    if not least <= context <= most:
        raise ValueError(
            f"--context must be in {least}..{most}, not {context}: the models have {positions} "
            f"positions, and drafts of up to {max_draft_tokens} tokens are measured"
        )
    return context
