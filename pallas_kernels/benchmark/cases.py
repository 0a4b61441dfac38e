"""The cases of the attention benchmark: shapes of work, and how often each is repeated."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np

DTYPE = jnp.bfloat16
MAX_ROWS = 8  # of a sample that decodes
PLAIN = ("xla", "reference")  # slow and long to compile


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of work; lengths and counts are those of the samples, in order."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: str  # of each sample: "1", "8" or "ragged"; "prefill"
    committed: str  # how the lengths were chosen
    max_len: int
    lengths: tuple[int, ...]  # committed tokens
    counts: tuple[int, ...]  # fresh rows
    padded_rows: int  # of each sample in a padded batch

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def is_prefill(self) -> bool:
        return self.rows == "prefill"

    @property
    def committed_bytes(self) -> int:
        """Bytes of one layer's committed keys and values."""
        token = self.kv_heads * self.head_dim * jnp.dtype(DTYPE).itemsize
        return 2 * sum(self.lengths) * token

    @property
    def causal_flops(self) -> float:
        """Operations of the fresh rows' attention among themselves: half of each square."""
        return sum(4 * self.heads * self.head_dim * count**2 / 2 for count in self.counts)

    def describe(self) -> dict[str, object]:
        return {
            "model": self.model,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "batch": self.batch,
            "rows": self.rows,
            "packed_rows": sum(self.counts),
            "committed": self.committed,
            "committed_tokens": sum(self.lengths),
            "committed_bytes": self.committed_bytes,
            "max_len": self.max_len,
        }

    def row_places(self) -> tuple[np.ndarray, np.ndarray]:
        """Sample of each packed row, and its place among the sample's rows. int32 [r], [r]"""
        samples = np.repeat(np.arange(self.batch, dtype=np.int32), self.counts)
        within = [np.arange(count, dtype=np.int32) for count in self.counts]
        return samples, np.concatenate(within)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of the cases, and how long each is measured."""

    models: tuple[tuple[str, int, int, int], ...]  # name, heads, kv_heads, head_dim
    totals: tuple[tuple[int, int], ...]  # batch, committed tokens of its random lengths
    shortest: int  # random length
    max_len: int  # of caches with random lengths
    full_len: int  # of caches that MAX_ROWS fresh rows fill up
    prefill: tuple[int, int, int]  # samples, tokens of each, max_len of the empty caches
    calls: int  # in a chain that decodes, at least
    rotated_bytes: int  # committed in all caches of a chain together
    read: tuple[int, int]  # buffers, bytes of each
    layers: int  # whose caches one update writes
    repetitions: int
    seconds: float  # of a repetition; two runs where they take longer


FULL = Settings(
    models=(("OPT-6.7B", 32, 32, 128), ("OPT-2.7B", 32, 32, 80), ("Llama-3.1-8B", 32, 8, 128)),
    totals=((1, 768), (8, 6700), (24, 18571), (64, 46742)),
    shortest=512,
    max_len=1024,
    full_len=2048,
    prefill=(8, 1919, 256),
    calls=32,  # one for each layer of OPT-6.7B
    rotated_bytes=2**28,
    read=(4, 2**30),
    layers=32,
    repetitions=7,
    seconds=0.06,  # a queue's start and the wait for its end take half a millisecond
)


QUICK = Settings(
    models=(("2x128", 2, 2, 128), ("2x80", 2, 2, 80), ("8:2x128", 8, 2, 128)),
    totals=((3, 50),),
    shortest=8,
    max_len=32,
    full_len=40,
    prefill=(2, 24, 16),
    calls=8,
    rotated_bytes=0,
    read=(2, 2**16),
    layers=2,
    repetitions=2,
    seconds=0.0,
)


def decode_cases(settings: Settings) -> list[Case]:
    """Every head shape x kind of lengths x batch x rows per sample."""
    longest, full = settings.max_len - MAX_ROWS, settings.full_len - MAX_ROWS
    drawn = f"random {settings.shortest}..{longest}"
    cases = []
    for model, kind in itertools.product(settings.models, (drawn, f"all {full}")):
        for batch, total in settings.totals:
            committed = (kind, settings.full_len, (full,) * batch)
            if kind == drawn:
                lengths = random_lengths(batch, total, settings.shortest, longest)
                committed = (kind, settings.max_len, lengths)
            ragged = np.random.default_rng(batch).integers(1, MAX_ROWS + 1, batch)
            cases += [
                Case(*model, "1", *committed, (1,) * batch, 1),
                Case(*model, str(MAX_ROWS), *committed, (MAX_ROWS,) * batch, MAX_ROWS),
                Case(*model, "ragged", *committed, tuple(ragged.tolist()), MAX_ROWS),
            ]
    return cases


def random_lengths(batch: int, total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Seeded by the batch; each within the bounds, and `total` together."""
    rng = np.random.default_rng(batch)
    lengths = rng.integers(shortest, longest + 1, batch)
    while missing := total - int(lengths.sum()):
        bound, step = (longest, 1) if missing > 0 else (shortest, -1)
        lengths[rng.choice(np.flatnonzero(lengths != bound))] += step
    return tuple(lengths.tolist())


def prefill_cases(settings: Settings) -> list[Case]:
    """Whole prompts over empty caches."""
    batch, tokens, max_len = settings.prefill
    rows = ("none", max_len, (0,) * batch, (tokens,) * batch, tokens)
    return [Case(*model, "prefill", *rows) for model in settings.models]


def count_caches(case: Case, settings: Settings) -> int:
    """As many caches as hold `rotated_bytes`; one where caches are empty."""
    if case.is_prefill:
        return 1
    return max(2, math.ceil(settings.rotated_bytes / case.committed_bytes))


def count_calls(name: str, case: Case, settings: Settings) -> int:
    """Calls in a chain: fewer if they are slow; all caches take equal turns.

    A chain that decodes has as many as a model has layers, whatever the batch: they share one plan.
    """
    if case.is_prefill:
        return 1 if name in PLAIN else settings.calls // 8
    wanted = settings.calls // 8 if name in PLAIN else settings.calls
    caches = count_caches(case, settings)
    return caches * math.ceil(wanted / caches)
