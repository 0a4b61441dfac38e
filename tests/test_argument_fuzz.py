"""Random arguments of the public functions: each call is right, or an error names an argument.

What a value means is stated here as data, apart from the library's checks: `np.int8(3)` is the
integer 3 and the number 3.0, `"3"` is nothing. A call whose arguments all mean something must equal
the call with plain Python values; otherwise it must raise a ValueError that names one of those
that do not.
"""

import dataclasses
import decimal
import fractions
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import tiny_model

import emsjax
import pallas_kernels
from emsjax import distillation
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.distillation.losses import check_losses
from emsjax.distillation.pruning import pruned_config
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.drafters.eagle3_network import Eagle3Config, Eagle3Network
from emsjax.testing import assert_lossless, assert_same_distribution

SETS = 72  # of each of the functions
INFINITY, NAN = float("inf"), float("nan")


class Value:
    """A value that is passed in, and what it means as an argument of each kind, if anything.

    Args:
        make: makes the value anew, as a generator can be read only once.
        meanings: the plain value by kind: `int`, `real`, `flag`, `text`, `ids` (end tokens),
            `each` (one value per prompt), `prompts`, `texts` (references), `table`, `json`.
    """

    def __init__(self, make: Callable[[], Any], **meanings: Any):
        self.make, self.meanings = make, meanings


def value(it: Any, **meanings: Any) -> Value:
    return Value(lambda: it, **meanings)


def integer(it: Any, number: int) -> Value:
    return value(it, int=number, real=float(number), ids={number})


def number(it: Any, real: float) -> Value:
    return value(it, real=real)


def texts(it: Any, plain: list[list[int]]) -> Value:
    return value(it, prompts=plain, texts=plain)


INTEGERS = [
    integer(kind(n), n)
    for n in (0, 1, 2, 3)
    for kind in (
        *(int, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
        *(np.array, jnp.array, jnp.int8, lambda n: np.array(n, np.uint8)),
    )
]
EDGES = [integer(n, n) for n in (-1, -(2**63), 60, 61, 2**31 - 1, 2**31, 2**32, 2**63, 10**30)]
EDGES += [integer(np.int8(-1), -1), integer(np.uint64(2**63), 2**63)]
REALS = [
    number(kind(x), x)
    for x in (0.5, 1.0, -0.5)
    for kind in (
        *(float, np.float16, np.float32, np.float64, np.longdouble, np.array, jnp.array),
        *(jnp.bfloat16, jnp.float16),
    )
]
REALS += [number(x, x) for x in (1.5, 1e30, -INFINITY, INFINITY, 5e-324)]
REALS += [number(fractions.Fraction(1, 2), 0.5), number(np.float32(INFINITY), INFINITY)]
FLAGS = [
    value(kind(flag), flag=flag) for flag in (True, False) for kind in (bool, np.bool_, np.array)
]
MEANINGLESS = [
    *map(value, (NAN, np.float32(NAN), np.array(NAN), 1j, np.complex64(1), decimal.Decimal(1))),
    *map(value, ("3", "true", "", b"3", bytearray(b"3"), np.str_("3"), np.bytes_(b"3"))),
    *map(value, (object(), int, ..., NotImplemented, np.array("a"), np.array(None), slice(3))),
    *map(value, (np.timedelta64(3, "s"), np.datetime64(3, "s"), {"a": 3}, [None, 3], [[[3]]])),
    *map(value, (["3", "4"], [3.5, "a"], np.ones((2, 2)), np.ones((2, 0)), [NAN, 1.0], memoryview)),
    *map(value, ([True, 3], {(3, 4), (5,)}, [[3, 4], "ab"], SimpleNamespace(a=3))),
    value({}, table={}),
    value([[3, 4], []]),
    value([[3, 4], [5.5]]),
    value([[3, 4], [10**30]]),
    Value(lambda: (text for text in "ab")),
]
SEVERAL = [
    value([], ids=set(), texts=[]),
    value((), ids=set(), texts=[]),
    value(set(), ids=set()),
    value([3, 2], each=[3, 2], ids={2, 3}),
    value((3, 2), each=[3, 2], ids={2, 3}),
    value(range(2, 4), each=[2, 3], ids={2, 3}),
    value(np.array([3, 2], np.int8), each=[3, 2], ids={2, 3}),
    value(jnp.array([3, 2]), each=[3, 2], ids={2, 3}),
    value([np.uint8(3), jnp.array(2)], each=[3, 2], ids={2, 3}),
    value([3, 2, 1], each=[3, 2, 1], ids={1, 2, 3}),
    value([3, -1], each=[3, -1], ids={-1, 3}),
    value([0.5, 1.0], each=[0.5, 1.0]),
    value(np.array([0.5, 1.0], np.float16), each=[0.5, 1.0]),
    value([np.float32(0.5), 1], each=[0.5, 1]),
    value({3, 2}, ids={2, 3}),
    value(frozenset([3]), ids={3}),
    Value(lambda: (n for n in (3, 2)), ids={2, 3}),
    Value(lambda: iter([3, 2]), ids={2, 3}),
    value({3: 2}, table={3: 2}),
    value({np.int8(3): np.float32(0.5), 1: 1}, table={3: 0.5, 1: 1}),
    value({1: NAN}),
    value({"3": 2}, json={3: 2}),
    value({2.0: 2}),
    texts([[5, 6], [7]], [[5, 6], [7]]),
    texts(([5, 6], (7, 8)), [[5, 6], [7, 8]]),
    texts(np.array([[5, 6], [7, 8]], np.uint8), [[5, 6], [7, 8]]),
    texts(jnp.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    value({"input_ids": [[5, 6], [7]]}, prompts=[[5, 6], [7]]),
    value([[5, 6], [1]], texts=[[5, 6], [1]]),  # padding
    value([[5, 6], [61]], texts=[[5, 6], [61]]),  # outside the vocabulary
    value([[5, 6], [5] * 65], texts=[[5, 6], [5] * 65]),  # longer than the model allows
]
NONE = value(None)
POOL = [*INTEGERS, *EDGES, *REALS, *FLAGS, *MEANINGLESS, *SEVERAL, NONE]
BAD = object()  # what a value means that means nothing
Kind = Callable[[Value], Any]


def meaning(kind: str, fits: Callable[[Any], bool] = lambda plain: True) -> Kind:
    def read(given: Value) -> Any:
        plain = given.meanings.get(kind, BAD)
        return plain if plain is not BAD and fits(plain) else BAD

    return read


def count(least: int, most: float = INFINITY) -> Kind:
    return meaning("int", lambda n: least <= n <= most)


def real(fits: Callable[[float], bool]) -> Kind:
    return meaning("real", fits)


def per_prompt(fits: Callable[[float], bool], *, whole: bool) -> Kind:
    one = meaning("int" if whole else "real", fits)

    def read(given: Value) -> Any:
        each = given.meanings.get("each", ())
        right = len(each) == 2 and all(map(fits, each))
        right = right and not (whole and any(isinstance(x, float) for x in each))
        return list(each) if right else one(given)

    return read


def optional(kind: Kind) -> Kind:
    return lambda given: None if given is NONE else kind(given)


def table(key_fits: Callable[[int], bool], fits: Callable[[float], bool], *, whole: bool) -> Kind:
    def right(plain: dict) -> bool:
        whole_ones = not whole or not any(isinstance(x, float) for x in plain.values())
        return (
            bool(plain)
            and all(map(key_fits, plain))
            and whole_ones
            and all(map(fits, plain.values()))
        )

    return meaning("table", right)


def of_json(kind: Kind) -> Kind:
    """A table of a profile, whose counts may be texts."""

    def read(given: Value) -> Any:
        plain = given.meanings.get("json")
        return kind(given if plain is None else value(plain, table=plain))

    return read


def exactly(*objects: Any) -> Kind:
    """One of these objects, which the general pool lacks."""
    return lambda given: given.make() if any(given.make() is x for x in objects) else BAD


def empty_or(plain: Any) -> Kind:
    """Nothing, as an empty list or tuple or as the plain value, which the general pool lacks."""

    def read(given: Value) -> Any:
        made = given.make()
        is_empty = isinstance(made, list | tuple) and len(made) == 0
        return plain if is_empty or (made is None and plain is None) else BAD

    return read


def text_or_none(given: Value) -> Any:
    return made if isinstance(made := given.make(), str | None) else BAD


flag = meaning("flag")
end_tokens = optional(meaning("ids", lambda ids: all(0 <= n < 61 for n in ids)))
prompts_kind = meaning("prompts")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument: its plain value, what else it may be, and values that only it is given.

    Attributes:
        name: as an error names it.
        compared: whether the result depends on nothing but the plain value.
    """

    plain: Any
    kind: Kind
    own: tuple = ()
    name: str = ""
    compared: bool = True


@dataclasses.dataclass(frozen=True)
class Function:
    """A function to call.

    Attributes:
        wrong_together: names of arguments that are wrong beside the others, given plain values.
    """

    call: Callable[..., Any]
    arguments: dict[str, Argument]
    wrong_together: Callable[[dict[str, Any]], list[str]] = lambda plain: []


MODEL = tiny_model(num_hidden_layers=1)
LOOKUP = emsjax.PromptLookup(1, 2)
FIXED, SAMPLING, KEY = emsjax.FixedLength(2), emsjax.Sampling(0.5), jax.random.key(1)
COSTS = emsjax.StepCosts.of({1: 1.0, 16: 1.5})
MEMORY = emsjax.SuffixMemory()
DEVICES = jax.local_devices()[:1]
PROMPTS = [[5, 6], [7]]


def one_of(*objects: Any) -> dict[str, Any]:
    return {"kind": exactly(*objects), "own": tuple(map(value, objects))}


# One layer, short prompts and few batch sizes: there are few shapes to compile.
DECODING = {
    "prompts": Argument(PROMPTS, prompts_kind),
    "drafter": Argument(None, **one_of(None, LOOKUP)),
    "draft_length": Argument(None, **one_of(None, FIXED)),
    "max_new_tokens": Argument(2, per_prompt(lambda n: 1 <= n <= 63, whole=True)),
    "eos_token_ids": Argument(None, end_tokens),
}
SAMPLED = {
    "sampling": Argument(SAMPLING, **one_of(None, SAMPLING)),
    "key": Argument(KEY, **one_of(KEY)),
    "num_sequences": Argument(1, count(1, 61)),
}
MORE = {
    "top_logprobs": Argument(0, count(0, 61)),
    "include_stop": Argument(False, flag),
    "tokenizer": Argument(None, **one_of(None)),
    "processors": Argument((), empty_or(())),
    "stop": Argument(None, empty_or(None)),
}
BATCH = {"batch_size": Argument(2, optional(count(1)))}
ATTENTION = {
    "attention_implementation": Argument("xla", exactly(None, "xla"), (value(None), value("xla")))
}
MASK = {
    "attention_mask": Argument(
        None, lambda given: None if given is NONE else BAD, (value([[1, 0, 1]]), value([[1]]))
    )
}


def several_need_sampling(plain):
    return ["num_sequences"] if plain["num_sequences"] > 1 and plain["sampling"] is None else []


def generate(**options):
    out = emsjax.generate(MODEL, **options)
    return [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]


def in_order(completions):
    return sorted((c.prompt, c.sequence, c.tokens.tolist()) for c in completions)


def stream(**options):
    if isinstance(options["prompts"], Iterator):
        raise ValueError("iterators of prompts are tested by themselves")
    return in_order(emsjax.stream(MODEL, **options))


def stream_iterator(**options):
    return in_order(emsjax.stream(MODEL, iter(PROMPTS), **options))


def vanilla(**options):
    return emsjax.vanilla.generate(MODEL, **options).tokens.tolist()


def init_state(**options):
    state = emsjax.init_state(MODEL, **options)
    return [np.asarray(x).tolist() for x in (state.lengths, state.length_limits)]


def engine(**options):
    emsjax.Engine(MODEL, **options)


@functools.cache
def served():
    return emsjax.Engine(MODEL, LOOKUP, batch_size=2, max_len=64)


def engine_stream(**options):
    return in_order(served().stream(**options))


def step(num_sequences, layout):
    one = emsjax.init_state(MODEL, None, PROMPTS, max_new_tokens=2)
    make = lambda: emsjax.step(MODEL, None, one, num_sequences=num_sequences, layout=layout)
    return jax.eval_shape(make)[1].tokens.shape


def attributes(made):
    plain = lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") else x
    return {name: plain(x) for name, x in vars(made).items() if name != "draft_model"}


def more_branches_than_tokens(plain):
    tokens = plain["max_draft_tokens"] or 4
    return ["branches"] if plain["branches"] > tokens else []


def mixed(**options):
    made = emsjax.Mixed(LOOKUP, emsjax.DraftModel(MODEL), **options)
    return made.costs, made.draft_cost and list(made.draft_cost)


@functools.cache
def network_of(kind):
    """A network of a drafter that has all arrays of its own."""
    layer = emsjax.LlamaConfig(
        vocab_size=61,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    common, options = {"layers": layer, "taps": (1,)}, {"rngs": nnx.Rngs(0), "dtype": "float32"}
    if kind == "Eagle3":
        return Eagle3Network(Eagle3Config(**common), **options)
    block = BlockConfig(**common, block_size=4, mask_token_id=0, enable_confidence_head=True)
    return BlockNetwork(block, **options)


@functools.cache
def folder_of(kind):
    folder = tempfile.TemporaryDirectory()
    getattr(emsjax, kind)(network_of(kind)).save_pretrained(folder.name)
    return folder


def drafter_of_states(kind, **options):
    return settings_of(getattr(emsjax, kind)(network_of(kind), **options))


def loaded(kind, **options):
    return settings_of(getattr(emsjax, kind).from_pretrained(folder_of(kind).name, **options))


def settings_of(made):
    return {name: x for name, x in attributes(made).items() if name not in made.children}


def checked_goodput(**options):
    made = emsjax.Goodput(**options)
    made.check_settings()
    return [float(getattr(made, name)) for name in options if name != "costs"]


def checked_cap(**options):
    made = emsjax.CostCapped(FIXED, **options)
    made.check_settings()
    return [float(getattr(made, name)) for name in options if name != "costs"]


def costs_of(**options):
    made = emsjax.StepCosts.of(**options)
    return [np.asarray(x).tolist() for x in dataclasses.astuple(made)]


def profile(kind: type, row_ms, token_ms, lengths, context, max_draft_tokens, **options):
    """A reader of profiles, given numbers of the profile."""
    text = lambda table: table if not isinstance(table, dict) else dict(table)
    contents = {
        "format": "emsjax profile 2",
        "costs": {"row_ms": text(row_ms), "token_ms": token_ms, "reread": 0.5, "draft_ms": {1: 1}},
        "table": {"lengths": text(lengths), "acceptance_rate": 0.8},
        "settings": {"context": context, "max_draft_tokens": max_draft_tokens},
    }
    return attributes(kind.from_profile(contents, **options))


def expanded(**options):
    made = emsjax.Sampling(**options).expand(2)
    columns = (getattr(made, field.name) for field in dataclasses.fields(made))
    return [np.asarray(x).tolist() for x in columns]


def lossless(**options):
    return assert_lossless(MODEL, LOOKUP, **options).output.tokens.tolist()


def same_distribution(**options):
    options = {"sampling": SAMPLING, "key": KEY} | options
    assert_same_distribution(MODEL, None, [5, 6], batch_size=16, **options)


def continuations(**options):
    found = distillation.continuations(MODEL, [np.array(prompt) for prompt in PROMPTS], **options)
    return [tokens.tolist() for tokens in found]


def evaluate(**options):
    found = distillation.evaluate(MODEL, None, [np.array([5, 6])] * 2, **options)
    return found["acceptance_rate"]


def optimizer(**options):
    distillation.make_optimizer(**options)


def packed(**options):
    made = distillation.PackedSequences([np.arange(3, 40)], **options)
    return made[0].tokens.tolist()


def pruned(**options):
    return pruned_config(MODEL_CONFIG, **options)


MODEL_CONFIG = tiny_model().config


def losses(weights):
    check_losses({"cross-entropy": weights})


def attention(**options):
    x = jnp.ones((2, 2, 4))
    cache, ids = jnp.zeros((1, 4, 2, 4)), jnp.zeros(2, jnp.int32)
    places = (ids, jnp.arange(2, dtype=jnp.int32), jnp.zeros(1, jnp.int32))
    out = pallas_kernels.ragged_attention(x, x, x, cache, cache, *places, **options)
    return np.asarray(out).tolist()


positive = lambda x: 0 < x < INFINITY
not_negative = lambda x: 0 <= x < INFINITY
COST = lambda x: 0 <= x <= 1e30
ROWS = table(lambda n: 1 <= n <= 2**24, lambda x: 0 < x <= 1e30, whole=False)
ESTIMATES = {
    "prior_rate": Argument(0.7, real(lambda x: 0 < x < 1)),
    "prior_weight": Argument(16.0, real(positive)),
    "memory": Argument(0.9, real(lambda x: 0 <= x <= 1)),
    "least_gain": Argument(0.05, real(not_negative)),
    "costs": Argument(COSTS, **one_of(COSTS)),
}
FEATURES = {
    "max_draft_tokens": Argument(None, optional(count(1, 2**30))),
    "draft_ids": Argument(None, **one_of(None)),
    "shared": Argument(None, **one_of(None)),
} | ATTENTION
LOADED = {
    "target": Argument(None, **one_of(None)),
    "dtype": Argument("float32", exactly(None, "float32"), (value("float32"),)),
    "revision": Argument(None, text_or_none, compared=False),  # of a folder there is only one
    "quantize": Argument(None, **one_of(None, "int4"), compared=False),
    "max_draft_tokens": Argument(None, optional(count(1, 2**30))),
} | ATTENTION
CONFIDENCE = {"min_confidence": Argument(0.5, real(lambda x: 0 <= x <= 1))}
PROFILE = {
    "row_ms": Argument({1: 1.0}, of_json(ROWS)),
    "token_ms": Argument(0.0, real(COST)),
    "lengths": Argument(
        {1: 2}, of_json(table(lambda n: 1 <= n <= 2**16, lambda n: n >= 0, whole=True))
    ),
    "context": Argument(9, real(lambda x: 0 <= x < 2**30)),
    "max_draft_tokens": Argument(3, count(1, 1024)),
}
FUNCTIONS = {
    "generate": Function(
        generate,
        DECODING
        | SAMPLED
        | BATCH
        | ATTENTION
        | MASK
        | MORE
        | {"time_budget_s": Argument(60.0, optional(real(lambda x: x > 0)), compared=False)},
        several_need_sampling,
    ),
    "generate greedily": Function(generate, DECODING | BATCH | MASK),
    "stream": Function(
        stream,
        DECODING
        | MASK
        | {
            "batch_size": Argument(2, count(1)),
            "devices": Argument(None, **one_of(None, DEVICES)),
            "max_len": Argument(None, optional(count(2))),
        },
    ),
    "stream of an iterator": Function(
        stream_iterator,
        {name: DECODING[name] for name in ("drafter", "draft_length", "eos_token_ids")}
        | {
            "max_new_tokens": Argument(2, count(1, 61)),
            "batch_size": Argument(2, count(1, 2**16), compared=False),
            "max_len": Argument(63, optional(count(2))),
        },
        lambda plain: ["max_len"] if plain["max_new_tokens"] >= (plain["max_len"] or 99) else [],
    ),
    "vanilla": Function(
        vanilla,
        DECODING | {"unpad_kv_cache": Argument(True, flag), "unpad_inputs": Argument(True, flag)},
    ),
    "init_state": Function(init_state, DECODING | SAMPLED | MASK, several_need_sampling),
    "Engine": Function(
        engine,
        {name: DECODING[name] for name in ("drafter", "draft_length")}
        | {"batch_size": Argument(2, count(1, 2**16)), "max_len": Argument(8, optional(count(2)))}
        | ATTENTION,
    ),
    "Engine.stream": Function(
        engine_stream,
        {name: DECODING[name] for name in ("prompts", "max_new_tokens", "eos_token_ids")} | MASK,
    ),
    "step": Function(
        step,
        {
            "num_sequences": Argument(None, optional(count(1, 2**31 - 1))),
            "layout": Argument(UNPADDED, **one_of(UNPADDED)),
        },
    ),
    "PromptLookup": Function(
        lambda **options: attributes(emsjax.PromptLookup(**options)),
        {
            "match_length": Argument(2, count(1, 2**30)),
            "max_draft_tokens": Argument(7, count(1, 2**30)),
            "search_generated": Argument(False, flag),
            "references": Argument(None, optional(meaning("texts"))),
        },
    ),
    "SuffixDrafter": Function(
        lambda **options: attributes(emsjax.SuffixDrafter(**options)),
        {
            "max_draft_tokens": Argument(7, count(1, 2**30)),
            "min_match_length": Argument(2, count(1, 16)),
            "length_factor": Argument(2.0, real(lambda x: 0 <= x <= 2**30)),
            "length_offset": Argument(1.0, real(lambda x: 0 <= x <= 2**30)),
            "min_probability": Argument(0.5, real(lambda x: 0 <= x <= 1)),
            "memory": Argument(None, **one_of(None, MEMORY), compared=False),
            "branches": Argument(1, count(1, 2**30)),
        },
        more_branches_than_tokens,
    ),
    "Mixed": Function(
        mixed,
        {
            "costs": Argument(None, **one_of(None, COSTS)),
            "draft_cost": Argument(
                None,
                optional(per_prompt(lambda x: 0 <= x <= 2**30, whole=False)),
                (value(np.array([0.5, 1.0]), each=[0.5, 1.0]), value([0.5], each=[0.5])),
            ),
        },
    ),
    "Eagle3": Function(
        functools.partial(drafter_of_states, "Eagle3"),
        FEATURES | {"branches": Argument(1, count(1, 61))},
        more_branches_than_tokens,
    ),
    "Eagle3.from_pretrained": Function(
        functools.partial(loaded, "Eagle3"),
        LOADED | {"branches": Argument(1, count(1, 61))},
        more_branches_than_tokens,
    ),
    "BlockDrafter": Function(
        functools.partial(drafter_of_states, "BlockDrafter"),
        FEATURES | CONFIDENCE | {"max_draft_tokens": Argument(None, optional(count(1, 3)))},
    ),
    "BlockDrafter.from_pretrained": Function(
        functools.partial(loaded, "BlockDrafter"),
        LOADED | CONFIDENCE | {"max_draft_tokens": Argument(None, optional(count(1, 3)))},
    ),
    "SuffixMemory": Function(
        lambda **options: emsjax.SuffixMemory(**options).max_bytes,
        {"max_bytes": Argument(2**20, count(2**10, 2**30))},
    ),
    "DraftModel": Function(
        lambda **options: attributes(emsjax.DraftModel(MODEL, **options)),
        {
            "max_draft_tokens": Argument(None, optional(count(1, 2**30))),
            "vocab_size": Argument(None, optional(count(1, 61))),
            "branches": Argument(1, count(1, 61)),
        }
        | ATTENTION,
        more_branches_than_tokens,
    ),
    "FixedLength": Function(
        lambda **options: attributes(emsjax.FixedLength(**options)), {"k": Argument(2, count(0))}
    ),
    "BassHeuristic": Function(
        lambda **options: attributes(emsjax.BassHeuristic(**options)),
        {
            "initial": Argument(2, count(1, 2**30)),
            "increment": Argument(2, count(1, 2**30)),
            "divisor": Argument(2, count(1, 2**30)),
            "limit": Argument(60, count(1, 2**30)),
        },
        lambda plain: ["initial"] if plain["initial"] > plain["limit"] else [],
    ),
    "BatchSizeTable": Function(
        lambda **options: attributes(emsjax.BatchSizeTable(**options)),
        {"table": Argument({1: 2}, table(lambda n: n >= 1, lambda n: n >= 0, whole=True))},
    ),
    "BatchSizeTable.from_profile": Function(
        functools.partial(profile, emsjax.BatchSizeTable),
        PROFILE
        | {
            "free": Argument(True, flag),
            "acceptance": Argument(0.5, optional(real(lambda x: 0 <= x <= 1))),
        },
    ),
    "StepCosts": Function(
        costs_of,
        {
            "row_ms": Argument({1: 1.0}, ROWS),
            "token_ms": Argument(0.0, real(COST)),
            "draft_ms": Argument(0.0, real(COST)),
            "reread": Argument(0.0, real(COST)),
        },
    ),
    "Goodput": Function(checked_goodput, ESTIMATES | {"limit": Argument(15, count(1, 2**30))}),
    "CostCapped": Function(checked_cap, ESTIMATES),
    "Sampling": Function(
        expanded,
        {
            "temperature": Argument(1.0, per_prompt(lambda x: 0 < x < 3e38, whole=False)),
            "top_k": Argument(3, per_prompt(lambda n: n >= 0, whole=True)),
            "top_p": Argument(0.5, per_prompt(lambda x: 0 < x <= 1, whole=False)),
            "min_p": Argument(0.1, per_prompt(lambda x: 0 <= x <= 1, whole=False)),
            "repetition_penalty": Argument(
                1.2, per_prompt(lambda x: 1e-37 < x < 3e38, whole=False)
            ),
            "presence_penalty": Argument(0.5, per_prompt(lambda x: abs(x) < 3e38, whole=False)),
            "frequency_penalty": Argument(0.5, per_prompt(lambda x: abs(x) < 3e38, whole=False)),
            "min_new_tokens": Argument(2, per_prompt(lambda n: 0 <= n <= 2**30, whole=True)),
        },
    ),
    "Layout": Function(
        Layout, {"pad_inputs": Argument(True, flag), "pad_kv_cache": Argument(True, flag)}
    ),
    "assert_lossless": Function(
        lossless,
        {name: DECODING[name] for name in ("prompts", "max_new_tokens", "eos_token_ids")} | MASK,
    ),
    "assert_same_distribution": Function(
        same_distribution,
        {
            "samples": Argument(64, optional(count(60, 64))),
            "new_tokens": Argument(1, count(1, 61)),
            "sampling": Argument(SAMPLING, **one_of(SAMPLING)),
        },
    ),
    "continuations": Function(
        continuations,
        {
            "count": Argument(2, count(0, 3)),
            "prompt_tokens": Argument(2, count(1)),
            "new_tokens": Argument(2, count(1, 63)),
            "batch_size": Argument(2, count(1)),
            "temperature": Argument(1.0, real(lambda x: 0 <= x < 3e38)),
            "seed": Argument(0, count(0, 2**32 - 1)),
        },
    ),
    "evaluate": Function(
        evaluate,
        {
            "draft_tokens": Argument(1, count(1, 1)),
            "new_tokens": Argument(2, count(2, 63)),
            "batch_size": Argument(2, count(1)),
        },
    ),
    "make_optimizer": Function(
        optimizer,
        {
            "steps": Argument(3, count(0, 2**31 - 2)),
            "peak": Argument(0.1, real(not_negative)),
            "warm_up": Argument(1, count(0, 2**31 - 2)),
            "weight_decay": Argument(0.1, real(not_negative)),
        },
    ),
    "PackedSequences": Function(
        packed,
        {
            "length": Argument(4, count(2, 37)),
            "batch": Argument(2, count(1, 61)),
            "seed": Argument(0, count(0)),
        },
    ),
    "pruned_config": Function(
        pruned,
        {
            "layers": Argument(1, count(1, 2)),
            "width": Argument(16, lambda given: BAD),
            "embeddings": Argument(
                "shared", exactly("shared", "projected"), (value("shared"), value("projected"))
            ),
        },
    ),
    "losses": Function(losses, {"weights": Argument(1.0, real(positive), name="cross-entropy")}),
    "ragged_attention": Function(
        attention,
        {
            "max_rows_per_sample": Argument(2, optional(count(1)), compared=False),  # a promise
            "scale": Argument(0.5, optional(real(positive))),
            "window": Argument(2, optional(count(1))),
            "implementation": Argument("xla", exactly(None, "xla"), (value("xla"),)),
            "interpret": Argument(False, flag),
        },
    ),
}


@functools.cache
def right_results(name: str) -> dict:
    return {}


def expected(name: str, function: Function, plain: dict[str, Any]) -> Any:
    known, key = right_results(name), repr(sorted(plain.items(), key=lambda item: item[0]))
    if key not in known:
        known[key] = function.call(**plain)
    return known[key]


def draw(rng: np.random.Generator, function: Function) -> dict[str, Value]:
    """Up to three arguments with other values; mostly one, or few sets would be right."""
    names = sorted(function.arguments)
    number = min(len(names), int(rng.choice([1, 1, 1, 2, 3])))
    drawn = {}
    for name in rng.choice(names, number, replace=False):
        own = [*function.arguments[name].own, NONE]
        pool = own if rng.random() < 0.2 else POOL
        drawn[str(name)] = pool[rng.integers(len(pool))]
    return drawn


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_right_or_named(name):
    function, faults = FUNCTIONS[name], []
    rng = np.random.default_rng(sorted(FUNCTIONS).index(name))
    for _ in range(SETS // 3 if name.endswith(".from_pretrained") else SETS):  # folders are read
        drawn = draw(rng, function)
        arguments = function.arguments
        plain = {name: argument.plain for name, argument in arguments.items()}
        means = {name: arguments[name].kind(given) for name, given in drawn.items()}
        wrong = [name for name, meant in means.items() if meant is BAD]
        if not wrong:
            wrong = function.wrong_together(plain | means)
        given = plain | {name: given.make() for name, given in drawn.items()}
        told = {name: repr(given[name])[:60] for name in drawn}
        try:
            result = function.call(**given)
        except ValueError as error:
            names = [re.escape(arguments[name].name or name) for name in wrong]
            if not wrong:
                faults.append(f"{told} is refused: {error}")
            elif not re.search(rf"\b({'|'.join(names)})\b", str(error)):
                faults.append(f"{told} is not named: {error}")
        except Exception as error:
            faults.append(f"{told} raises {error!r}"[:400])
        else:
            if wrong:
                faults.append(f"{told} is accepted")
            elif all(arguments[name].compared for name in drawn):
                right = expected(name, function, plain | means)
                if result != right:
                    faults.append(f"{told} gives {result}, not {right}"[:400])
    assert not faults, "\n".join(faults)
