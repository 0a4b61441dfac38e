"""Folders of drafters that read hidden states, and their forward passes in numpy in float64.

The forward passes are written from the papers' equations over the names and the layout of the
published tensors: they compute the whole sequence each time, and keep nothing.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from toy import POSITIONS, VOCAB, tiny_model

import emsjax
from emsjax.decode.base import ObservedRows
from emsjax.decode.pack import pack

WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 32, 4, 2, 16, 40
DRAFTED = np.sort(np.random.default_rng(2).permutation(VOCAB)[:49])  # ids that can be drafted
THETA, EPSILON = 10000.0, 1e-6
LAYER_JSON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_act": "silu",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pause:
    """A policy that drafts nothing in every third step, and as much as it may in the others."""

    def init(self, batch, max_draft_tokens):
        return jnp.zeros((), jnp.int32)

    def lengths(self, state, view):
        return jnp.full(view.active.shape, jnp.where(state % 3 == 1, 0, 4), jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state + 1


@functools.cache
def llama_target() -> emsjax.Decoder:
    """A model whose next token depends on the last token above all, so that it can be drafted."""
    config = emsjax.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = emsjax.Decoder(config, rngs=nnx.Rngs(11), dtype=jnp.float32)
    table = model.embed_tokens.embedding
    table[...] = table[...] * 4
    for layer in model.layers:
        for product in (layer.out_proj, layer.down_proj):
            product.kernel[...] = product.kernel[...] * 0.04
    return model


@functools.cache
def opt_target() -> emsjax.OPT:
    return tiny_model(num_hidden_layers=3)


def hidden_states(model, tokens, taps) -> list[np.ndarray]:
    """The model's hidden states of one sequence in these layers."""
    (length,) = np.shape(tokens)
    rows = pack(jnp.zeros(1, jnp.int32), jnp.array([length], jnp.int32), length)
    out = _forward(model, jnp.asarray(tokens, jnp.int32), rows, taps=tuple(taps))
    return [np.asarray(tap, np.float64) for tap in out]


@functools.partial(jax.jit, static_argnames="taps")
def _forward(model, tokens, rows, taps):
    return model(tokens, rows, model.init_cache(1, 1), taps=taps).taps


def padded(tokens):
    """The tokens and others, so that the forward pass of the target is compiled once."""
    return np.pad(tokens, (0, POSITIONS - len(tokens)))


def write_folder(path, config, tensors):
    """A folder with this config and these tensors; returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(stored, path / "model.safetensors")
    return path


def layer_tensors(rng, inputs, start, head_norms):
    """The tensors of a decoder layer whose attention reads `inputs` numbers."""
    normal = lambda *shape: rng.normal(0, 0.2, shape).astype(np.float32)
    scale = lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "self_attn.q_proj.weight": normal(queries, inputs),
        "self_attn.k_proj.weight": normal(keys, inputs),
        "self_attn.v_proj.weight": normal(keys, inputs),
        "self_attn.o_proj.weight": normal(WIDTH, queries) / 4,
        "mlp.gate_proj.weight": normal(FFN, WIDTH),
        "mlp.up_proj.weight": normal(FFN, WIDTH),
        "mlp.down_proj.weight": normal(WIDTH, FFN) / 2,
        "input_layernorm.weight": scale(WIDTH),
        "post_attention_layernorm.weight": scale(WIDTH),
    }
    if head_norms:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        tensors |= {name: scale(HEAD_DIM) for name in norms}
    return {start + name: value for name, value in tensors.items()}


def observed_rows(states, sequences, spans, rejected):
    """The rows of a call that feeds sequences[s][spans[s]], and rows that were rejected.

    Args:
        states: the hidden states of each sequence, by tap.
        rejected: number of rejected rows behind each sample's first row, as in a tree of drafts.
    """
    batch = len(sequences)
    tokens, samples, places, taps = [], [], [], [[] for _ in states[0]]
    for sample, (start, stop) in enumerate(spans):
        kept = [(place, True) for place in range(start, stop)]
        for place, is_kept in [*kept[:1], *[(start + 1, False)] * rejected[sample], *kept[1:]]:
            tokens.append(sequences[sample][place] if is_kept else 7)
            samples.append(sample if is_kept else batch)
            places.append(place)
            for tap, state in zip(taps, states[sample], strict=True):
                tap.append(state[place] if is_kept else np.full(WIDTH, 1e3))
    as_ids = lambda ids: jnp.asarray(ids, jnp.int32)
    rows = ObservedRows(as_ids(tokens), as_ids(samples), as_ids(places))
    return rows, tuple(jnp.asarray(np.array(tap), jnp.float32) for tap in taps)


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def rotate(x, places):
    """Rotary positions of heads [n, h, d]."""
    half = x.shape[-1] // 2
    turns = places[:, None, None] / THETA ** (np.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    cos, sin = np.cos(turns), np.sin(turns)
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def heads_of(of, x, name, places):
    """Heads [n, h, d] of the product of this name, normalised and rotated unless they are values.

    Args:
        of: a function from the names of a layer's tensors to their values, or None.
    """
    weight = of(f"self_attn.{name}_proj.weight")
    heads = (x @ weight.T).reshape(len(x), len(weight) // HEAD_DIM, HEAD_DIM)
    if name == "v":
        return heads
    scale = of(f"self_attn.{name}_norm.weight")
    return rotate(heads if scale is None else rms_norm(heads, scale), places)


def attention(of, queries, keys, values, visible):
    """Attention [n, e] of heads [n, h, d] to keys and values [m, k, d], where visible [n, m]."""
    out = np.zeros_like(queries)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = queries[:, head] @ keys[:, shared].T / np.sqrt(HEAD_DIM)
        weights = np.where(visible, np.exp(scores - scores.max()), 0)
        out[:, head] = weights / weights.sum(1, keepdims=True) @ values[:, shared]
    return out.reshape(len(queries), -1) @ of("self_attn.o_proj.weight").T


def feed_forward(of, x):
    gate, up = (x @ of(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up @ of("mlp.down_proj.weight").T


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
