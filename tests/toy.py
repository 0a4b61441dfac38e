"""A tiny random model, and drafters and a policy of known behaviour."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import emsjax
from emsjax.trees import Tree

VOCAB = 61
POSITIONS = 64
# Sampling that emits the greedy tokens, for several sequences of a prompt.
NEARLY_GREEDY = {"sampling": emsjax.Sampling(1e-30), "key": jax.random.key(0)}


@functools.cache
def tiny_model(**overrides) -> emsjax.OPT:
    """A model with random weights, large enough that greedy output varies with the prompt."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "init_std": 0.3,
        "eos_token_id": None,
    }
    config = emsjax.OPTConfig(**(sizes | overrides))
    return emsjax.OPT(config, rngs=nnx.Rngs(7), dtype=jnp.float32)


def shallow_model(**overrides) -> emsjax.OPT:
    """The tiny model with one layer, which compiles in half the time: for tests of what surrounds
    the layers.
    """
    return tiny_model(num_hidden_layers=1, **overrides)


@jax.jit
def compiled_step(model, drafter, state, policy=None):
    """`emsjax.step` as one function: by itself, each of its operations is compiled alone."""
    return emsjax.step(model, drafter, state, draft_length=policy)


def ragged_prompts(lengths, seed=0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length) for length in lengths]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes script[s, position] (+ offset): always the correct token, or always a wrong one."""

    script: jax.Array  # [b, t]
    max_draft_tokens: int = dataclasses.field(default=3, metadata={"static": True})
    offset: int = dataclasses.field(default=0, metadata={"static": True})

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        at = lengths[:, None] + jnp.arange(self.max_draft_tokens)
        at = jnp.minimum(at, self.script.shape[1] - 1)
        proposed = (jnp.take_along_axis(self.script, at, axis=1) + self.offset) % VOCAB
        return emsjax.Draft(proposed, draft_lengths), state

    def commit(self, state, lengths):
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedTrees:
    """Proposes trees that depend on a sample's length: some tokens are those of script[s, position]
    at their depth, also twice after the same token, and the others are wrong."""

    script: jax.Array  # [b, t]
    max_draft_tokens: int = dataclasses.field(default=6, metadata={"static": True})
    free: bool = dataclasses.field(default=True, metadata={"static": True})

    def for_prompts(self, prompt_indices, num_prompts):
        return dataclasses.replace(self, script=self.script[prompt_indices])

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        node = jnp.arange(self.max_draft_tokens)
        mixed = lambda odd: (lengths[:, None] * 7919 + node * 104729 + odd * 31) % 1009
        parents = jnp.where(mixed(1) % 3 > 0, node - 1, mixed(2) % (node + 1) - 1)
        depth = Tree.of(parents).depths[:, 1:]
        at = jnp.minimum(lengths[:, None] + depth - 1, self.script.shape[1] - 1)
        right = jnp.take_along_axis(self.script, at, axis=1)
        wrong = (right + 1 + mixed(3) % 5) % VOCAB
        counts = jnp.minimum(draft_lengths, mixed(4)[:, 0] % (self.max_draft_tokens + 2))
        drafted = jnp.where(mixed(5) % 4 > 0, right, wrong)
        return emsjax.Draft(drafted, counts, parents=parents), state


def script_of(prompts, out) -> jax.Array:
    """Each prompt followed by its completion, padded. [b, t]"""
    script = np.zeros((len(prompts), POSITIONS + 1), np.int32)
    for row, prompt, tokens in zip(script, prompts, out.tokens, strict=True):
        row[: len(prompt)] = prompt
        end = min(len(prompt) + len(tokens), len(row))
        row[len(prompt) : end] = tokens[: end - len(prompt)]
    return jnp.asarray(script)


class CarelessDrafter:
    """A drafter that is not a pytree, counts steps, and drafts too many tokens and invalid ids."""

    max_draft_tokens = 5

    def init(self, prompts, prompt_lengths, max_len):
        return jnp.zeros((), jnp.int32)

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        noise = (tokens[:, :5] * 31 + lengths[:, None] * 17 + state) % (VOCAB + 9) - 4
        counts = jnp.full(lengths.shape, 99, jnp.int32)
        return emsjax.Draft(noise, counts), state + 1

    def commit(self, state, lengths):
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asking:
    """A user's policy with constant lengths, which may be out of range."""

    wanted: jax.Array  # [b]

    def init(self, batch, max_draft_tokens):
        return ()

    def lengths(self, state, view):
        return self.wanted

    def update(self, state, view, num_drafted, num_accepted):
        return state


# Tests share one instance, as a drafter that is not a pytree is a constant of the compiled loop.
CARELESS = CarelessDrafter()
