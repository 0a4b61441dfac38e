"""Checks the drafters and policies that users pass in, and wraps those without the base class.

Only this module looks at which methods an object has. Everything else works with `Drafter` and
`DraftLength`, which have defaults for all optional parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from emsjax.checks import check_at_least, check_instance
from emsjax.decode.base import Drafter, DraftLength, ModelConfig
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.decode.run import Run
from emsjax.sampling import LogitsProcessor
from pallas_kernels.common.narrow_rows import FORMATS
from pallas_kernels.common.numerics import is_invariant

MODEL_PARTS = ("config", "dtype", "row_bytes", "logits", "init_cache")
DRAFTER_PARTS = ("max_draft_tokens", "init", "propose")
POLICY_PARTS = ("init", "lengths", "update")
KV_DTYPES = tuple(FORMATS)


def check_is_model(name: str, model: Any) -> None:
    """Raises ValueError unless `model` has the parts of `emsjax.decode.base.Model`."""
    missing = [part for part in MODEL_PARTS if not hasattr(model, part)]
    if isinstance(model, type) or missing or not callable(model):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ValueError(f"{name} must be a model, as emsjax.from_pretrained loads it, not {kind}")


class _Adapted:
    """A pytree around a user's object, which becomes static data if it is not a pytree itself.

    Methods and attributes that the object lacks fall back to the protocol's defaults.
    """

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped

    def tree_flatten(self):
        if _is_leaf(self.wrapped):
            return (), self.wrapped
        return (self.wrapped,), None

    @classmethod
    def tree_unflatten(cls, constant, children):
        return cls(children[0] if children else constant)


def _delegate(protocol: type, name: str):
    default = getattr(protocol, name, None)
    if not callable(default):
        return property(lambda self: getattr(self.wrapped, name, default))

    def method(self, *args):
        own = getattr(self.wrapped, name, None)
        return default(self, *args) if own is None else own(*args)

    method.__name__ = name
    return method


@jax.tree_util.register_pytree_node_class
class _AdaptedDrafter(_Adapted, Drafter):
    for name in ("init", "propose", "observe", "commit", "admit", "check_target"):
        vars()[name] = _delegate(Drafter, name)
    for name in (
        "state_bytes",
        "max_depth",
        "drawn_vocab_size",
        "free",
        "taps",
        "shares_cache",
        "fork",
        "max_draft_tokens",
    ):
        vars()[name] = _delegate(Drafter, name)
    del name

    def _replaced(self, method: str, *args) -> Drafter:
        own = getattr(self.wrapped, method, None)
        found = self.wrapped if own is None else own(*args)
        return self if found is self.wrapped else as_drafter(found)

    def for_prompts(self, prompt_indices, num_prompts) -> Drafter:
        return self._replaced("for_prompts", prompt_indices, num_prompts)

    def with_limit(self, max_draft_tokens) -> Drafter:
        return self._replaced("with_limit", max_draft_tokens)

    def with_processing(self, process) -> Drafter:
        return self._replaced("with_processing", process)


@jax.tree_util.register_pytree_node_class
class _AdaptedPolicy(_Adapted, DraftLength):
    for name in ("init", "lengths", "nodes", "update", "admit", "check_settings"):
        vars()[name] = _delegate(DraftLength, name)
    max_draft_tokens = _delegate(DraftLength, "max_draft_tokens")

    @property
    def name(self) -> str:
        return type(self.wrapped).__name__


@jax.tree_util.register_pytree_node_class
class _AdaptedProcessor(_Adapted, LogitsProcessor):
    for name in ("init", "init_for", "advance", "force", "check_requests", "num_prompts"):
        vars()[name] = _delegate(LogitsProcessor, name)
    del name

    def __call__(self, state, logits, context):
        return self.wrapped(state, logits, context)


def unwrapped(adapted: Any) -> Any:
    """Returns the object that the user passed in."""
    return adapted.wrapped if isinstance(adapted, _Adapted) else adapted


def as_drafter(drafter: Any) -> Drafter | None:
    """Returns the drafter as a `Drafter` that is a pytree; None stays None.

    Raises:
        ValueError: `drafter` is a class, or lacks a part that every drafter must have.
    """
    if drafter is None:
        return None
    if isinstance(drafter, type):
        name = drafter.__name__
        raise ValueError(f"drafter must be an instance, not the class {name}: pass {name}(...)")
    missing = [name for name in DRAFTER_PARTS if not hasattr(drafter, name)]
    if missing:
        lacks = "none" if len(missing) == len(DRAFTER_PARTS) else f"no {' and no '.join(missing)}"
        raise ValueError(
            "drafter must have max_draft_tokens, init and propose (emsjax.Drafter); "
            f"{type(drafter).__name__!r} has {lacks}"
        )
    is_ready = isinstance(drafter, Drafter) and not _is_leaf(drafter)
    return drafter if is_ready else _AdaptedDrafter(drafter)


def as_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    """Returns logits processors as pytrees.

    Raises:
        ValueError: `processors` is not a sequence of them.
    """
    if not isinstance(processors, Sequence) or isinstance(processors, str | bytes):
        kind = type(processors).__name__
        raise ValueError(f"processors must be a sequence of emsjax.LogitsProcessor, not {kind}")
    for i, one in enumerate(processors):
        if isinstance(one, type) or not callable(one):
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise ValueError(f"processors[{i}] must be an emsjax.LogitsProcessor, not {what}")
    is_ready = lambda one: isinstance(one, LogitsProcessor) and not _is_leaf(one)
    return tuple(one if is_ready(one) else _AdaptedProcessor(one) for one in processors)


def _is_leaf(value: Any) -> bool:
    """Whether JAX would take it for an array, as it is not registered as a pytree."""
    return jax.tree_util.all_leaves([value])


def as_policy(draft_length: Any) -> DraftLength | None:
    """Returns the policy as a `DraftLength`; None stays None. Its settings are not checked.

    Raises:
        ValueError: `draft_length` is not a policy.
    """
    if draft_length is None or isinstance(draft_length, _AdaptedPolicy):
        return draft_length
    is_class = isinstance(draft_length, type)
    missing = [name for name in POLICY_PARTS if not callable(getattr(draft_length, name, None))]
    if is_class or missing:
        what = f"the class {draft_length.__name__}" if is_class else type(draft_length).__name__
        if not is_class and len(missing) < len(POLICY_PARTS):
            what += f", which has no {' and no '.join(missing)}"
        raise ValueError(f"draft_length must be a policy such as emsjax.FixedLength(3), not {what}")
    return draft_length if isinstance(draft_length, DraftLength) else _AdaptedPolicy(draft_length)


def check_policy(draft_length: Any) -> None:
    """Raises ValueError unless `draft_length` is None or a pytree policy with valid settings."""
    policy = as_policy(draft_length)
    if policy is None:
        return
    if _is_leaf(unwrapped(policy)):
        raise ValueError(
            f"draft_length must be a pytree, and {policy.name} is not: register the class with "
            "jax.tree_util.register_static, or with register_dataclass if it holds arrays"
        )
    policy.check_settings()


def check_drafter(
    drafter: Any, draft_length: Any, config: ModelConfig, positions: int
) -> Drafter | None:
    """Returns the drafter, ready to be traced, with the policy's limit.

    Args:
        drafter: the object that the user passed in; None: plain decoding.
        draft_length: the policy, or None.
        config: the target's configuration.
        positions: the largest number of positions that a sample needs.

    Raises:
        ValueError: `drafter` is not a drafter, `draft_length` is not a policy, the drafter's
            limit is not static, or the drafter cannot draft for this target.
    """
    check_policy(draft_length)
    drafter = with_policy_limit(as_drafter(drafter), as_policy(draft_length), config)
    if drafter is None:
        return None
    most = config.max_position_embeddings
    check_at_least("drafter.max_draft_tokens", drafter.max_draft_tokens, 1, most)
    given = unwrapped(drafter)
    parts = jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda x: x is not given)
    paths = [path for path, _ in parts]
    if any(getattr(path[0], "name", None) == "max_draft_tokens" for path in paths if path):
        raise ValueError(
            "drafter.max_draft_tokens must be static, as it shapes the program, and is data of the "
            "pytree: declare it as dataclasses.field(metadata={'static': True})"
        )
    drafter.check_target(config, positions)
    return drafter


def with_policy_limit(
    drafter: Drafter | None, policy: DraftLength | None, config: ModelConfig
) -> Drafter | None:
    """Returns the drafter with the policy's limit, unless the user has set the drafter's own.

    The limit is at most the model's positions.
    """
    if drafter is None or policy is None or policy.max_draft_tokens is None:
        return drafter
    return drafter.with_limit(min(policy.max_draft_tokens, config.max_position_embeddings))


def make_run(
    model: Any,
    drafter: Any,
    draft_length: Any = None,
    *,
    processors: Sequence[LogitsProcessor] = (),
    attention_implementation: str | Callable | None = None,
    layout: Layout = UNPADDED,
    kv_dtype: str | None = None,
) -> Run:
    """Builds the `Run` from the objects that a user passes in.

    Raises:
        ValueError: an argument is not a model, drafter, policy or sequence of logits processors, or
            the attention does not exist or cannot run on this device; the layout pads the cache, or
            the attention is the reference, with invariant numerics; or `kv_dtype` is unknown, or
            the model has no such cache.
    """
    check_is_model("model", model)
    if kv_dtype is not None:
        model = _with_kv_dtype(model, kv_dtype)
    check_instance("layout", layout, Layout, "an emsjax.decode.layout.Layout")
    if layout.pad_kv_cache and is_invariant():
        raise ValueError(
            "numerics 'invariant' needs unpad_kv_cache=True, a layout without pad_kv_cache: gaps "
            "in the cache move keys to places that depend on other samples"
        )
    if is_invariant() and attention_implementation == "reference":
        raise ValueError("numerics 'invariant' needs attention_implementation 'triton' or 'xla'")
    kernels, policy = resolve_kernels(attention_implementation), as_policy(draft_length)
    drafter = with_policy_limit(as_drafter(drafter), policy, model.config)
    return Run(model, drafter, policy, as_processors(processors), kernels, layout)


def _with_kv_dtype(model: Any, kv_dtype: str) -> Any:
    """The model with caches in this format.

    Raises:
        ValueError: the format is unknown, or the model has no method `with_kv_dtype`.
    """
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        known = " or ".join(map(repr, KV_DTYPES))
        raise ValueError(f"kv_dtype must be None, {known}, not {kv_dtype!r}")
    if not hasattr(model, "with_kv_dtype"):
        raise ValueError(f"kv_dtype must be None, as {type(model).__name__} has no with_kv_dtype")
    return model.with_kv_dtype(kv_dtype)
