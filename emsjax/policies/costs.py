"""Costs of a decoding step on a device, which `emsjax profile` measures and policies use."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from emsjax.checks import check_number, check_table, refuse
from emsjax.decode.row_counts import row_buckets
from emsjax.values import pytree

FORMAT = "emsjax profile 2"
COSTS = ("row_ms", "token_ms", "reread", "draft_ms")
TILE_ROWS = 16  # rows of a sample for which attention reads its cache once
# Fraction by which drafts must raise the expected tokens per second. Costs and estimates err, and
# some samples finish earlier than others while a batch takes as long as its last one.
LEAST_GAIN = 0.05
MOST_ROWS = 1 << 24  # float32 holds all integers up to it
MOST_MS = 1e30  # sums of products of costs stay far from float32's limit


@pytree
class StepCosts:
    """Milliseconds of a decoding step: step_ms(rows) + token_ms x cached tokens + draft steps.

    Attributes:
        rows: packed rows, ascending; the cost is interpolated between them.
        row_ms: ms of a step of that many rows whose samples have nothing cached.
        token_ms: ms for each cached token of an active sample.
        reread: cost of reading a sample's cache again for every `TILE_ROWS` rows after its
            first, relative to `token_ms`; about 0 if all of its rows read it at once.
        batches: slots, ascending.
        draft_ms: ms of one step of the draft model with that many slots; 0 without a draft model.
    """

    rows: Float[Array, "n"]
    row_ms: Float[Array, "n"]
    token_ms: Float[Array, ""]
    reread: Float[Array, ""]
    batches: Float[Array, "m"]
    draft_ms: Float[Array, "m"]

    @classmethod
    def of(
        cls,
        row_ms: Mapping[int, float],
        token_ms: float = 0.0,
        draft_ms: float | Mapping[int, float] = 0.0,
        reread: float = 0.0,
    ) -> "StepCosts":
        """Costs from plain numbers.

        Args:
            row_ms: ms of a step, by packed rows.
            token_ms: ms for each cached token.
            draft_ms: ms of a draft step, or a mapping from slots to ms.
            reread: fraction of `token_ms`, see above.

        Raises:
            ValueError: there are no rows, a number of rows or slots is below 1, a `row_ms` is
                not above 0, or another number is negative or not finite.
        """
        if not isinstance(draft_ms, Mapping):
            draft_ms = {1: _at_least_0("draft_ms", draft_ms)}
        row_ms = check_table("row_ms", row_ms, _above_0, MOST_ROWS)
        draft_ms = check_table("draft_ms", draft_ms, _at_least_0, MOST_ROWS)
        per_token = [_at_least_0("token_ms", token_ms), _at_least_0("reread", reread)]
        column = lambda values: np.array(list(values), np.float32)
        knots = lambda table: (column(table), column(table.values()))
        return cls(*knots(row_ms), *map(np.float32, per_token), *knots(draft_ms))

    @classmethod
    def from_profile(cls, profile: str | PathLike | Mapping[str, Any]) -> "StepCosts":
        """The costs that `emsjax profile` measured.

        Args:
            profile: its file, or the contents.

        Raises:
            ValueError: not such a profile, or one with impossible numbers.
        """
        costs = read_profile(profile)["costs"]
        with errors_of(profile):
            tables = {name: from_json(costs[name]) for name in ("row_ms", "draft_ms")}
            return cls.of(token_ms=costs["token_ms"], reread=costs["reread"], **tables)

    def without_drafting(self) -> "StepCosts":
        """The same costs with a drafting time of 0."""
        return dataclasses.replace(self, draft_ms=0 * self.draft_ms)

    def step_ms(self, rows: Float[Array, "*n"], cached_tokens: Float[Array, ""]):
        """Milliseconds of steps of `rows` packed rows, padding included, without drafting.

        >>> costs = StepCosts.of({16: 4.0, 128: 5.0}, token_ms=1e-4)
        >>> print(costs.step_ms(jnp.array([16.0, 72.0]), jnp.float32(5000)))
        [4.5 5. ]
        """
        return along(rows, self.rows, self.row_ms) + self.token_ms * cached_tokens

    def tokens_read(self, cached_tokens: Float[Array, "..."], rows: Int[Array, "..."]):
        """Cached tokens that attention reads for samples with `rows` rows each, rereads included.

        >>> costs = StepCosts.of({16: 4.0}, reread=0.5)
        >>> print(costs.tokens_read(jnp.array([900.0, 900.0]), jnp.array([16, 17])))
        [ 900. 1350.]
        """
        further = (jnp.maximum(rows - 1, 0) // TILE_ROWS).astype(jnp.float32)
        return cached_tokens * (1 + self.reread * further)

    def draft_step_ms(self, slots: float) -> Float[Array, ""]:
        """Milliseconds of one step of the draft model."""
        return along(jnp.float32(slots), self.batches, self.draft_ms)


def _above_0(name: str, value: Any) -> float:
    return check_number(name, value, "finite and above 0", lambda x: 0 < x <= MOST_MS)


def _at_least_0(name: str, value: Any) -> float:
    return check_number(name, value, "finite and at least 0", lambda x: 0 <= x <= MOST_MS)


def read_profile(profile: str | PathLike | Mapping[str, Any]) -> Mapping[str, Any]:
    """A profile, read from its file if a path is given; its numbers are not checked.

    Raises:
        ValueError: it is not a profile of this version.
        OSError: the file cannot be read.
    """
    if not isinstance(profile, str | PathLike | Mapping):
        refuse("profile", "a file or the contents of one", profile)
    name = _name_of(profile)
    if not isinstance(profile, Mapping):
        try:
            profile = json.loads(Path(profile).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: not written by emsjax profile") from error
    if not isinstance(profile, Mapping) or profile.get("format") != FORMAT:
        raise ValueError(f"{name} is not of the format {FORMAT!r} that emsjax profile writes")
    costs = profile.get("costs")
    missing = ["costs"]
    if isinstance(costs, Mapping):
        missing = [field for field in COSTS if field not in costs]
    if missing:
        raise ValueError(f"{name} holds no {', '.join(missing)}: not written by emsjax profile")
    return profile


def section(profile: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a profile that is a mapping.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(profile.get(name), Mapping):
        raise ValueError(f"it holds no {name}, and so no table of lengths by batch size")
    return profile[name]


def from_json(table: Any) -> Any:
    """A table of a profile, whose counts are the texts that JSON requires, with integers."""
    if not isinstance(table, Mapping):
        return table
    is_count = lambda at: isinstance(at, str) and at.isascii() and at.isdigit() and len(at) < 10
    return {int(at) if is_count(at) else at: value for at, value in table.items()}


@contextlib.contextmanager
def errors_of(profile: str | PathLike | Mapping[str, Any]) -> Iterator[None]:
    """Puts the profile's name before the messages of errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{_name_of(profile)}: {error}") from error


def _name_of(profile: str | PathLike | Mapping[str, Any]) -> str:
    return "profile" if isinstance(profile, Mapping) else str(profile)


def synergy_ms(
    costs: StepCosts,
    batch: int,
    context: float,
    accepted: Float[np.ndarray, "k1"],
    drafted: Float[np.ndarray, "k1"],
) -> Float[np.ndarray, "k1"]:
    """Milliseconds per token of a sample, by draft length s = 0..k, at batch size b.

    T(b, s) = (t_verify(b, s) + s t_draft(b)) / (accepted[s] + 1). A sample drafts all s tokens
    or none, as when a lookup finds no match. t_verify is the mean of the measured costs of the
    row buckets that the step's rows need.

    Args:
        context: mean cached tokens of a sample.
        accepted: mean tokens that a sample accepts in a step, by draft length 0..k.
        drafted: mean tokens that a sample drafts in a step, by draft length 0..k.

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """
    length = np.arange(len(accepted))
    buckets = np.array(row_buckets(batch, len(length)))
    bucket_ms = np.asarray(costs.step_ms(jnp.array(buckets, jnp.float32), jnp.float32(0)))
    drafting = np.arange(batch + 1)  # samples
    rows = batch + length[:, None] * drafting  # [k1, b + 1]
    share = np.clip(drafted / np.maximum(length, 1), 0, 1)
    weights = np.stack([binomial(batch, probability) for probability in share])
    rows_ms = (weights * bucket_ms[np.searchsorted(buckets, rows)]).sum(axis=1)
    cached = batch * context
    again = np.asarray(costs.tokens_read(jnp.float32(cached), jnp.array(length) + 1)) - cached
    # Only samples that draft have more than one row.
    verify_ms = rows_ms + float(costs.token_ms) * (cached + share * again)
    ms = verify_ms + length * float(costs.draft_step_ms(batch))
    return ms / (accepted + 1)


def synergy_lengths(
    costs: StepCosts,
    batches: Iterable[int],
    context: float,
    accepted: Float[np.ndarray, "k1"],
    drafted: Float[np.ndarray, "k1"],
) -> dict[int, int]:
    """The draft length with the most tokens per second, for each batch size: see `synergy_ms`.

    A length that makes a step longer must gain at least `LEAST_GAIN` over drafting nothing.
    """

    def best(batch: int) -> int:
        ms = synergy_ms(costs, batch, context, accepted, drafted)
        longer = ms * (accepted + 1) > ms[0] * (1 + 1e-6)
        return int(np.argmin(ms * np.where(longer, 1 + LEAST_GAIN, 1)))

    return {batch: best(batch) for batch in batches}


def binomial(trials: int, probability: float) -> Float[np.ndarray, "n1"]:
    """Probabilities of 0..trials successes in `trials` independent trials."""
    if probability in (0, 1):
        return np.eye(trials + 1)[round(probability) * trials]
    n = np.arange(trials + 1)
    ways = [math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1) for i in n]
    return np.exp(ways + n * np.log(probability) + (trials - n) * np.log1p(-probability))


def accepted_at_rate(rate: float, max_draft_tokens: int) -> Float[np.ndarray, "k1"]:
    """Mean accepted tokens by draft length 0..k if each token is accepted with this probability."""
    survival = rate ** np.arange(1, max_draft_tokens + 1)
    return np.concatenate([[0.0], np.cumsum(survival)])


def along(x: Float[Array, "*n"], at: Float[Array, "k"], values: Float[Array, "k"]):
    """Piecewise linear interpolation: constant before the first point, linear after the last."""
    widths = at[1:] - at[:-1]
    slopes = (values[1:] - values[:-1]) / widths
    last = jnp.arange(len(at) - 1) == len(at) - 2
    widths = jnp.where(last & (slopes > 0), jnp.inf, widths)
    # A search, as in jnp.interp, would launch a loop of kernels on a GPU.
    return values[0] + jnp.sum(slopes * jnp.clip(x[..., None] - at[:-1], 0, widths), axis=-1)
