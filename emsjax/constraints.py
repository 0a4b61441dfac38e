"""Constraints: logits processors that confine the new text to a pattern.

```python
answer = emsjax.constraints.choices(["yes", "no"], tokenizer)
out = emsjax.generate(model, prompts, drafter, tokenizer=tokenizer, processors=[answer])
```

The pattern becomes an automaton over tokens before the run. It is walked along every draft on the
device, so speculative output is that of plain decoding under the same constraint, and tokens that
are the only ones allowed are drafted for nothing. They need outlines-core, which is in the extra
`emsjax[constraints]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from emsjax import text
from emsjax.checks import check_at_least
from emsjax.sampling.constraint import Constraint

__all__ = ["Constraint", "choices", "json_schema", "regex"]


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
