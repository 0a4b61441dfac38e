"""Which implementation of an operation runs."""

from collections.abc import Collection


def choose(implementation: str | None, available: Collection[str]) -> str:
    """The implementation to run: the one asked for, or the device's best.

    Raises:
        ValueError: `implementation` is not one of `available`.
    """
    if implementation is None:
        return "xla"
    if implementation not in available:
        known = ", ".join(repr(name) for name in sorted(available))
        raise ValueError(f"implementation must be None or one of {known}, not {implementation!r}")
    return implementation
