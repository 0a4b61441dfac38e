"""Constraints: logits processors that confine the new text to a pattern.

```python
answer = emsjax.constraints.choices(["yes", "no"], tokenizer)
out = emsjax.generate(model, prompts, drafter, tokenizer=tokenizer, processors=[answer])
```

The pattern becomes an automaton over tokens before the run. It is walked along every draft on the
device, so speculative output is that of plain decoding under the same constraint, and tokens that
are the only ones allowed are drafted for nothing. They need outlines-core, which is in the extra
`emsjax[constraints]`. `each` gives every prompt a constraint of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emsjax import text
from emsjax.checks import check_at_least, check_instance, check_list
from emsjax.sampling.automaton import REFUSED
from emsjax.sampling.constraint import FREE, Constraint

__all__ = ["Constraint", "choices", "each", "json_schema", "regex"]

LEAST_PROMPTS = 64  # of smaller calls too


def regex(pattern: str, tokenizer: Any, vocab_size: int | None = None) -> Constraint:
    """Confines the new text to what a regular expression matches as a whole.

    Args:
        pattern: a regular expression of Rust's crate `regex`, without look-around, references to
            groups and word boundaries.
        tokenizer: a tokenizer of transformers.
        vocab_size: number of token ids that the automaton has; None: the tokenizer's. Ids of a
            model beyond it are never chosen.

    Raises:
        ImportError: outlines-core is missing.
        ValueError: the pattern is no such expression, no sequence of tokens matches it, or its
            table is too large: the message has the numbers of states and of classes of tokens.
    """
    if not hasattr(tokenizer, "decode"):
        kind = type(tokenizer).__name__
        raise ValueError(f"tokenizer must be a tokenizer of transformers, not {kind}")
    size = len(tokenizer) if vocab_size is None else check_at_least("vocab_size", vocab_size, 1)
    return Constraint.of(text.from_regex(pattern, tokenizer, size, ()))


def choices(strings: Sequence[str], tokenizer: Any, vocab_size: int | None = None) -> Constraint:
    """Confines the new text to one of several strings.

    Args:
        strings: the strings.
        tokenizer, vocab_size: see `regex`.

    Raises:
        ImportError, ValueError: see `regex`; also if there are no strings.
    """
    return regex(text.choices(strings), tokenizer, vocab_size)


def json_schema(
    schema: Mapping[str, Any] | str, tokenizer: Any, vocab_size: int | None = None
) -> Constraint:
    """Confines the new text to JSON documents of a schema.

    Objects have their properties in the schema's order and no others. Between the parts of a
    document there is one space or none. Keywords that cannot be kept to are refused.

    Args:
        schema: a JSON schema, or its JSON text.
        tokenizer, vocab_size: see `regex`.

    Raises:
        ImportError, ValueError: see `regex`; also if the schema is not supported.
    """
    return regex(text.json_schema(schema), tokenizer, vocab_size)


def each(constraints: Sequence[Constraint | None]) -> Constraint:
    """Gives each prompt of a call a constraint of its own.

    All of them are held in one table, which has a row for each state of each constraint, and a
    column for each class of tokens that are alike in all of them. A constraint that is given for
    several prompts is held once.

    Args:
        constraints: one per prompt; None: that prompt is free.

    Raises:
        ValueError: there is none, one is no constraint or one of several prompts, or the table is
            too large: the message has the numbers of states and of classes of tokens.
    """
    constraints = check_list("constraints", constraints, "list of constraints, one per prompt")
    if not len(constraints):
        raise ValueError("constraints is empty: one is needed for each prompt")
    for i, one in enumerate(constraints):
        if one is None:
            continue
        check_instance(f"constraints[{i}]", one, Constraint, "one of emsjax.constraints, or None")
        if one.num_prompts is not None:
            raise ValueError(f"constraints[{i}] must be for one prompt, not for {one.num_prompts}")
    distinct = list({id(one): one for one in constraints if one is not None}.values())
    try:
        automaton, begins = text.joined([one.automaton for one in distinct])
    except text.TooLargeError as error:
        raise ValueError(f"constraints need {error}") from error
    start_of = {id(one): begin for one, begin in zip(distinct, begins, strict=True)}
    # Similar numbers of prompts share compiled programs.
    starts = np.full(text.rounded(len(constraints), LEAST_PROMPTS), REFUSED, np.int32)
    starts[: len(constraints)] = [start_of.get(id(one), FREE) for one in constraints]
    return Constraint.of(automaton, starts)
