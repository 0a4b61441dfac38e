"""Invariant numerics: verdicts on rows do not depend on the batch, and XLA adds up no row."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_invariant_rows import CALLERS, SIZE
from test_linear import device_runs_triton, random

import emsjax
import pallas_kernels
from emsjax.decode.base import Draft
from emsjax.decode.pack import pack
from emsjax.decode.verify import judge
from emsjax.sampling import random_bits

pytestmark = pytest.mark.gpu
LIMITS = {"top_k": np.int32(40), "top_p": np.float32(0.9), "min_p": np.float32(0.01)}
NAMES = [field.name for field in dataclasses.fields(emsjax.Sampling)]
SAMPLES = 100
SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "dot_general")


def samples(limits, drawn):
    """Likely logits of two draft tokens each, of which some are missing, and of what follows."""
    logits = 3 * random(SAMPLES, 3, SIZE)
    draft_logits = logits[:, :2] + random(SAMPLES, 2, SIZE, seed=1)
    sampling = {"temperature": np.float32(np.arange(SAMPLES) % 4 / 2)}
    sampling |= {name: np.full(SAMPLES, limit) for name, limit in limits.items()}
    tokens = jnp.argmax(draft_logits, axis=2).astype(jnp.int32)
    probs = jax.nn.softmax(draft_logits) if drawn else None
    draft = Draft(tokens, jnp.arange(SAMPLES, dtype=jnp.int32) % 3, probs)
    sampling = emsjax.Sampling(**(dict.fromkeys(NAMES) | sampling))
    return logits, draft, sampling, jax.random.split(jax.random.key(0), SAMPLES)


@jax.jit
def verdicts(logits, draft, sampling, keys):
    """The verdicts on three rows of each sample, [samples, 3, ...]."""
    batch = len(logits)
    rows = pack(jnp.zeros(batch, jnp.int32), jnp.full(batch, 3, jnp.int32), 3 * batch)
    positions = jnp.tile(jnp.arange(3, dtype=jnp.int32), (batch, 1))
    bits = random_bits(keys, positions, draft.counts, drawn=draft.probs is not None)
    return rows.scatter(judge(logits.reshape(-1, SIZE), rows, draft, bits, sampling, top=3), 3)


@pytest.mark.parametrize("drawn", [False, True], ids=["deterministic", "drawn"])
@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["unlimited", "limited"])
def test_the_verdict_on_a_row_does_not_depend_on_the_batch(limits, drawn):
    arguments = samples(limits, drawn)
    with pallas_kernels.numerics("invariant"):
        all_of_them = verdicts(*arguments)
        assert 40 < np.sum(all_of_them.accepted[:, :2]) < 160
        for places in (np.s_[:1], np.s_[31:33], np.s_[50:67]):
            part = functools.partial(jax.tree.map, operator.itemgetter(places))
            found = verdicts(*part(arguments))
            jax.tree.map(np.testing.assert_array_equal, found, part(all_of_them))


def float_sums(jaxpr):
    """The sums of floats in a program, except inside kernels."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in SUMS and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
            yield name
        if name != "pallas_call":
            for value in jax.tree.leaves(equation.params):
                if inner := jaxpr_of(value):
                    yield from float_sums(inner)


def jaxpr_of(value):
    """The program that a parameter of an operation is, if it is one."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


PROGRAMS = {
    "verdicts": lambda: (verdicts.__wrapped__, *samples(LIMITS, False)),
    "rejection": lambda: (verdicts.__wrapped__, *samples(LIMITS, True)),
}
for name, caller in zip(("layer_norm", "rms_norm", "log_softmax", "softmax"), CALLERS, strict=True):
    PROGRAMS[name] = lambda caller=caller: (caller, random(3, SIZE), random(3, SIZE))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_xla_adds_up_no_row_where_kernels_run(program, monkeypatch):
    device_runs_triton(monkeypatch, True)
    function, *arguments = program()
    traced = lambda: jax.make_jaxpr(lambda *args: function(*args))(*arguments).jaxpr
    assert list(float_sums(traced()))
    with pallas_kernels.numerics("invariant"):
        assert not list(float_sums(traced()))
