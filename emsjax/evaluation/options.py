"""The options of generation requests of the lm-evaluation-harness."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from emsjax.checks import check_at_least, check_flag, check_number
from emsjax.sampling import Sampling, settings

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms
NEUTRAL = {"num_beams": 1}  # values that change nothing
DRAWN = {name: settings.FIELDS[name][2] for name in settings.DRAWN}  # without effect


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """How the answers to a group of requests are generated.

    Attributes:
        until: texts that end an answer, of which they are not a part.
        max_new_tokens: most tokens of an answer.
        temperature, top_k, top_p, min_p, repetition_penalty: as for `emsjax.Sampling`.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def sampling(self) -> Sampling:
        """The settings for `emsjax.generate`."""
        names = ("temperature", *DRAWN, "repetition_penalty")
        return Sampling(**{name: getattr(self, name) for name in names})


def read_options(given: Mapping[str, Any], max_new_tokens: int) -> GenerationOptions:
    """Reads a task's `generation_kwargs`.

    Args:
        max_new_tokens: the limit of a task that sets none.

    Raises:
        ValueError: an option is unknown or its value is out of range.
    """
    options = {name: value for name, value in given.items() if value is not None}
    until = options.pop("until", [])
    limits = [options.pop(name) for name in LIMITS if name in options]
    temperature = options.pop("temperature", 0.0)
    temperature = check_number("temperature", temperature, "at least 0", lambda x: x >= 0)
    do_sample = check_flag("do_sample", options.pop("do_sample", temperature > 0))
    if do_sample and temperature == 0:
        raise ValueError("do_sample needs a temperature above 0")
    drawn = {name: options.pop(name, default) for name, default in DRAWN.items()}
    penalty = options.pop("repetition_penalty", 1.0)
    for name, value in options.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            raise ValueError(f"the generation option {name}: {value!r} is not supported")
    return GenerationOptions(
        until=(until,) if isinstance(until, str) else tuple(until),
        max_new_tokens=check_at_least(LIMITS[0], limits[0] if limits else max_new_tokens, 1),
        repetition_penalty=penalty,
        **({"temperature": temperature, **drawn} if do_sample else {}),
    )


def cut_before(text: str, until: Sequence[str]) -> str:
    """Returns the text before the one of these that begins first; empty ones are ignored.

    That is the rule of the backend "hf". `emsjax.text.cut_at_stop` cuts at the one that ends first,
    as text must be that is shown while it grows; the two differ if one holds another.
    """
    found = [place for end in until if end and (place := text.find(end)) >= 0]
    return text[: min(found)] if found else text
