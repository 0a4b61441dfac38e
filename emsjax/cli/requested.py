"""What a run of `emsjax generate` asks for: its options, and the settings of single records."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from emsjax import constraints
from emsjax.cli.generate_arguments import RunOptions
from emsjax.cli.sampling_arguments import CONSTRAINTS, FIELDS, NEED_TEMPERATURE
from emsjax.engine.requests import PLACEHOLDER, check_requests
from emsjax.records.writing import to_json
from emsjax.sampling import LogitsProcessor, Sampling
from emsjax.streaming import Variants

Own = dict[str, Any]  # values by field of `Sampling`, "stop", and "constraint": one or None


class Requested:
    """The arguments of `emsjax.stream` that concern the prompts.

    Records with the same settings share a variant; variant 0 has those of the options.

    Args:
        options: the run's options.
        config: the model's configuration.
        tokenizer: the model's tokenizer.

    Raises:
        ValueError: a setting, a stop or a constraint of the options is impossible.
    """

    def __init__(self, options: RunOptions, config: Any, tokenizer: Any):
        self.options, self.config, self.tokenizer = options, config, tokenizer
        given = {name: getattr(options, name) for name in FIELDS}
        self.known: dict[str, constraints.Constraint] = {}  # by what asks for them
        confined = self._constraint({name: getattr(options, name) for name in CONSTRAINTS})
        self.variants: list[Own] = [given | {"stop": list(options.stop), "constraint": confined}]
        self.rows: dict[str | None, int] = {None: 0}  # variants by a record's settings
        self.faults: dict[str, str] = {}
        self._check(self.variants[0])

    @property
    def processors(self) -> list[LogitsProcessor]:
        """The logits processors of all variants.

        Raises:
            ValueError: the constraints together are too large.
        """
        confined = [own["constraint"] for own in self.variants]
        if any(one is not confined[0] for one in confined):
            return [constraints.each(confined)]
        return [] if confined[0] is None else confined[:1]

    def fault(self, sampling: str) -> str | None:
        """Why a record's settings are impossible; None: they are not, and have a variant."""
        if sampling not in self.rows and sampling not in self.faults:
            try:
                own = self._merged(json.loads(sampling))
                self._check(own)
            except ValueError as error:
                self.faults[sampling] = f'field "sampling": {error}'
            else:
                self.rows[sampling] = len(self.variants)
                self.variants.append(own)
        return self.faults.get(sampling)

    def arguments(self, missing: Any) -> dict[str, Any]:
        """The arguments of `stream_numbered`, for records whose settings have been checked."""
        variant_of = lambda index: self.rows[missing.sampling_of(index)]
        return self.common_arguments | {"variants": Variants(len(self.variants), variant_of)}

    @property
    def common_arguments(self) -> dict[str, Any]:
        """These arguments without the variant of each prompt."""
        return self._arguments(self.variants)

    def _merged(self, own: Own) -> Own:
        """The options' settings with a record's own in their places."""
        if unknown := sorted(own.keys() - {*FIELDS, *CONSTRAINTS, "stop"}):
            raise ValueError(f"unknown setting {unknown[0]}")
        confined = {name: own[name] for name in CONSTRAINTS if name in own}
        own = {name: value for name, value in own.items() if name not in confined}
        if confined:
            own |= {"constraint": self._constraint(confined)}
        if own.get("logit_bias"):  # in JSON, names are strings
            own = own | {"logit_bias": _by_token(own["logit_bias"])}
        if isinstance(own.get("stop"), str):
            own = own | {"stop": [own["stop"]]}
        merged = self.variants[0] | own
        if own.get("temperature") == 0:  # without what only the options ask for
            merged |= {name: off for name, off in NEED_TEMPERATURE.items() if name not in own}
            merged.pop("num_sequences", None)
        return merged

    def _constraint(self, asked: Mapping[str, Any]) -> constraints.Constraint | None:
        """The constraint with one of these values, which is made once; None: all are None.

        Raises:
            ValueError: there are several, or it is impossible.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        if len(asked) > 1:
            raise ValueError(f"only one of {' and '.join(asked)} can be kept to")
        for name, value in asked.items():
            key = to_json([name, value])
            if key not in self.known:
                try:
                    self.known[key] = getattr(constraints, name)(value, self.tokenizer)
                except ValueError as error:
                    named = str(error).startswith(name)
                    raise ValueError(str(error) if named else f"{name}: {error}") from error
            return self.known[key]
        return None

    def _check(self, own: Own) -> None:
        """Check the settings of one variant.

        Raises:
            ValueError: they are impossible.
        """
        confined = [] if own["constraint"] is None else [own["constraint"]]
        arguments = self._arguments([own])
        check_requests(self.config, processors=confined, **arguments, **PLACEHOLDER)

    def _arguments(self, variants: list[Own]) -> dict[str, Any]:
        options = self.options
        columns = {name: [own[name] for own in variants] for name in FIELDS}
        if len(variants) == 1:
            columns = {name: column[0] for name, column in columns.items()}
        stop = [own["stop"] for own in variants]
        return {
            "max_new_tokens": options.max_new_tokens,
            "sampling": Sampling(**columns),
            "num_sequences": options.num_sequences,
            "eos_token_ids": options.eos_token_ids,
            "key": jax.random.key(options.seed),
            "stop": stop if any(stop) else None,
            "tokenizer": self.tokenizer,
            "include_stop": options.include_stop,
            "top_logprobs": options.top_logprobs,
        }


def _by_token(biases: Any) -> Any:
    """Biases by token id; anything else stays for the checks to refuse."""
    try:
        return {int(token): bias for token, bias in biases.items()}
    except (AttributeError, ValueError):
        return biases
