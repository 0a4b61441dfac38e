"""The commit of a decoding step: rows are written to the caches of all layers."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels.benchmark import measure
from pallas_kernels.benchmark.cases import DTYPE, Settings

CALLS = 20  # updates in one compiled loop
MAX_LEN = 64  # entries that are not written cost nothing


def time_updates(names: Sequence[str], settings: Settings) -> list[dict]:
    """Microseconds of writing 8 rows per sample to the keys and values of every layer.

    One entry per batch; the caches are carried through a loop, in place.
    """
    _, _, heads, head_dim = settings.models[0]
    entries = []
    for batch, _ in settings.totals:
        figures = {}
        for name in names:
            seconds = _time(name, settings.layers, batch, heads, head_dim, settings)
            figures[name] = measure.best_and_median_us(seconds, CALLS)
        shape = {"layers": settings.layers, "batch": batch, "rows": 8 * batch}
        entries.append({**shape, "heads": heads, "head_dim": head_dim, "implementations": figures})
    return entries


def _time(name: str, layers: int, batch: int, heads: int, head_dim: int, settings: Settings):
    zeros = lambda: [jnp.zeros((batch, MAX_LEN, heads, head_dim), DTYPE) for _ in range(layers)]
    caches = (zeros(), zeros())
    rows = [jnp.ones((8 * batch, heads, head_dim), DTYPE)] * layers
    segment_ids = jnp.asarray(np.repeat(np.arange(batch, dtype=np.int32), 8))
    positions = jnp.asarray(np.tile(np.arange(8, dtype=np.int32), batch))
    update = functools.partial(pallas_kernels.update_kv_caches, implementation=name)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(caches):
        def step(_, caches):
            keys, values = update(*caches, rows, rows, segment_ids, positions)
            return list(keys), list(values)

        return lax.fori_loop(0, CALLS, step, caches)

    def run():
        nonlocal caches
        caches = loop(caches)
        return caches

    return measure.time_runs(run, settings.repetitions, settings.seconds)
