"""How one case of the attention benchmark is set up, compiled and compared.

Axis legend: r = packed rows, b = batch, l = cache length, h = heads,
d = head_dim, q = rows of a padded sample.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import pallas_kernels
from pallas_kernels.benchmark.cases import DTYPE, Case

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled chain of calls, or why there is none."""

    calls: int = 0
    layout: str = "packed"
    form: str | None = None  # how cuDNN is told what a row sees
    run: Callable | None = None  # (query, caches, rest) -> first and last output
    error: str | None = None


def make_inputs(case: Case, index: Array) -> dict[str, tuple]:
    """The rows and cache `index` of a case: (query, cache, rest) for either layout of the rows.

    Packed caches hold NaN from the committed length on, which must not be read. Padded caches
    hold the fresh rows there, as a padded method writes them, and zeros after these.
    """
    lengths = np.array(case.lengths, np.int32)
    samples, within = case.row_places()
    rows, head_dim = (case.batch, case.padded_rows), case.head_dim
    key = jax.random.key(0)
    query = jax.random.normal(key, (*rows, case.heads, head_dim), DTYPE)
    key = jax.random.fold_in(key, 1)
    fresh = jax.random.normal(key, (2, *rows, case.kv_heads, head_dim), DTYPE)
    padded_len = case.padded_rows if case.is_prefill else case.max_len
    longest = max(padded_len, case.max_len)
    committed = (np.arange(longest) < lengths[:, None])[..., None, None]
    key = jax.random.fold_in(jax.random.key(1), index)
    caches = jax.random.normal(key, (2, case.batch, longest, case.kv_heads, head_dim), DTYPE)
    write = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))
    packed = [jnp.where(committed, cache, jnp.nan)[:, : case.max_len] for cache in caches]
    padded = [
        write(jnp.where(committed, cache, 0), new, lengths)[:, :padded_len]
        for cache, new in zip(caches, fresh, strict=True)
    ]
    ids = (samples, lengths[samples] + within, lengths)
    packed_rest = tuple(jnp.asarray(x) for x in (*(x[samples, within] for x in fresh), *ids))
    return {
        "packed": (query[samples, within], tuple(packed), packed_rest),
        "padded": (query, tuple(padded), () if case.is_prefill else _visible(case)),
    }


def _visible(case: Case) -> tuple[Array, Array]:
    """What rows of a padded batch see: entries of each sample, int32 [b]; a mask [b, 1, q, l]."""
    lengths = np.array(case.lengths, np.int32)
    last = lengths[:, None] + np.arange(case.padded_rows)  # position that a row sees last
    mask = np.arange(case.max_len) <= last[..., None]
    return jnp.asarray(lengths + np.int32(case.padded_rows)), jnp.asarray(mask[:, None])


@functools.cache
def _input_shapes(case: Case) -> dict[str, tuple]:
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(functools.partial(make_inputs, case), index)


def build_inputs(case: Case) -> Callable[[np.int32], dict[str, tuple]]:
    """Compile `make_inputs` as a function of the cache's index."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(functools.partial(make_inputs, case)).lower(index).compile()


def build_program(name: str, case: Case, calls: int, caches: int) -> Program:
    """Compile a chain of calls of one implementation, taking `caches` caches in turns."""
    if name != "cudnn":
        step = functools.partial(_ragged, name, case)
        run = _compile_chain(step, case, "packed", calls, caches)
        return Program(calls, run=run)
    if case.is_prefill:
        forms = ["causal"]
    else:
        # Lengths spare the padding's work. A single row sees all up to its length.
        forms = ["lengths" if case.padded_rows == 1 else "lengths and mask", "mask"]
    refusals = []
    for form in forms:
        step = functools.partial(_cudnn, form)
        try:
            run = _compile_chain(step, case, "padded", calls, caches)
        except Exception as error:  # cuDNN refuses shapes by errors of several types
            refusals.append(f"{form}: {error}")
        else:
            return Program(calls, "padded", form, run)
    return Program(error="; ".join(refusals))


def _ragged(name: str, case: Case, query, key_cache, value_cache, key, value, *ids):
    """One call over packed rows. [r, h, d]"""
    tensors = (query, key, value, key_cache, value_cache)
    return pallas_kernels.ragged_attention(
        *tensors, *ids, max_rows_per_sample=case.padded_rows, implementation=name
    )


def _cudnn(form: str, query, key, value, lengths=None, mask=None):
    """One call over a padded batch. [b, q, h, d]"""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask if "mask" in form else None,
        key_value_seq_lengths=lengths if "lengths" in form else None,
        is_causal=form == "causal",
        implementation="cudnn",
    )


def _compile_chain(step: Callable, case: Case, layout: str, calls: int, caches: int) -> Callable:
    call = jax.jit(step)  # traced and lowered once, not once a call

    def chain(query, caches, rest):
        outputs = [query]
        for i in range(calls):
            outputs.append(call(outputs[-1], *caches[i % len(caches)], *rest))
        return outputs[1], outputs[-1]

    query, cache, rest = _input_shapes(case)[layout]
    return jax.jit(chain).lower(query, (cache,) * caches, rest).compile()


def compile_all(jobs: Mapping[Hashable, Callable[[], Result]]) -> dict[Hashable, Result]:
    """Run compile jobs on all cores; none is left to disturb a timing."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as executor:
        futures = {name: executor.submit(job) for name, job in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


def bind(
    inputs: Callable[[np.int32], dict[str, tuple]], programs: Mapping[str, Program], caches: int
) -> dict[str, Callable]:
    """Fill the caches, and give them to the programs that there are."""
    made = [inputs(np.int32(index)) for index in range(caches)]

    def bound(program: Program) -> Callable:
        query, _, rest = made[0][program.layout]
        rotated = tuple(one[program.layout][1] for one in made)
        return functools.partial(program.run, query, rotated, rest)

    return {name: bound(program) for name, program in programs.items() if program.run}


def compare(case: Case, runs, programs: dict[str, Program], expected: str) -> dict[str, float]:
    """Largest error of each run's first output, relative to the norm of a row's head.

    A program that cuDNN refuses only now is replaced by its error.
    """
    outputs = {}
    for name, run in runs.items():
        try:
            first = np.asarray(run()[0]).astype(np.float32)
        except jax.errors.JaxRuntimeError as error:
            if name != "cudnn":
                raise
            programs[name] = Program(error=str(error))
        else:
            packed = programs[name].layout == "packed"
            outputs[name] = first if packed else first[case.row_places()]
    norm = lambda rows: np.linalg.norm(rows, axis=-1)
    wanted = outputs[expected]
    return {name: float(np.max(norm(x - wanted) / norm(wanted))) for name, x in outputs.items()}
