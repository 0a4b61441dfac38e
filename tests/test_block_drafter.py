"""DFlash and DSpark draft what their equations say, from hidden states that are kept up to date."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_drafters import (
    LAYER_JSON,
    WIDTH,
    attention,
    feed_forward,
    heads_of,
    hidden_states,
    layer_tensors,
    llama_target,
    observed_rows,
    rms_norm,
    softmax,
    write_folder,
)
from toy import VOCAB, ragged_prompts

import emsjax

PROMPTS = ragged_prompts([5, 12, 2, 9, 1])
DRAFTED = np.sort(np.random.default_rng(2).permutation(VOCAB)[:49])  # ids that can be drafted
BLOCK, MASK, RANK = 4, 60, 12
SIGMOID = lambda x: 1 / (1 + np.exp(-x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter in one of the published formats.

    Attributes:
        config: contents of config.json.
        taps: the hidden states that the format means, as `hidden_states` of transformers.
        head_type: the sequential head; None: there is none.
        from_anchor: whether the output at the last token is the first draft.
        is_confident: whether there is a head that predicts which tokens are accepted.
        is_full: whether all tokens can be drafted.
        own_tables: whether the folder has embeddings and a head.
    """

    config: dict
    taps: tuple[int, ...]
    head_type: str | None = None
    from_anchor: bool = False
    is_confident: bool = False
    is_full: bool = True
    own_tables: bool = True
    num_layers: int = 2

    @property
    def count(self):
        return BLOCK - (not self.from_anchor)

    @functools.cached_property
    def tensors(self):
        """The folder's tensors; what they draft resembles what `llama_target` continues with."""
        rng = np.random.default_rng(5)
        normal = lambda *shape: rng.normal(0, 0.2, shape).astype(np.float32)
        scale = lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32)
        tensors = {}
        for i in range(self.num_layers):
            tensors |= layer_tensors(rng, WIDTH, f"layers.{i}.", True)
        ids = list(range(VOCAB) if self.is_full else DRAFTED)
        head = np.asarray(llama_target().lm_head.embedding[...])
        table = np.asarray(llama_target().embed_tokens.embedding[...])
        tensors |= {
            "fc.weight": normal(WIDTH, len(self.taps) * WIDTH),
            "hidden_norm.weight": scale(WIDTH),
            "norm.weight": scale(WIDTH),
        }
        if self.own_tables:
            tensors |= {"embed_tokens.weight": table, "lm_head.weight": head[ids]}
        if self.head_type:
            # What the target continues a token with, as far as so few numbers can tell.
            scores = rms_norm(table, 1) @ head.T
            left, sizes, right = np.linalg.svd(scores)
            tensors |= {
                "markov_head.markov_w1.weight": left[:, :RANK] * np.sqrt(sizes[:RANK]) * 2,
                "markov_head.markov_w2.weight": (right[:RANK].T * np.sqrt(sizes[:RANK]))[ids],
            }
        if self.head_type == "gated":
            tensors["markov_head.gate_proj.weight"] = normal(RANK, WIDTH + RANK)
            tensors["markov_head.gate_proj.bias"] = normal(RANK)
        if self.head_type == "rnn":
            tensors["markov_head.joint_proj.weight"] = normal(3 * RANK, WIDTH + 2 * RANK)
            tensors["markov_head.joint_proj.bias"] = normal(3 * RANK)
        if self.is_confident:
            tensors["confidence_head.proj.weight"] = normal(1, WIDTH + RANK)
            tensors["confidence_head.proj.bias"] = normal(1)
        if not self.is_full:
            tensors["d2t"] = DRAFTED - np.arange(len(DRAFTED))
            tensors["t2d"] = np.isin(np.arange(VOCAB), DRAFTED)
        return {
            name: value.astype(np.float32) if value.dtype == float else value
            for name, value in tensors.items()
        }

    def forward(self, tokens, states, drafted):
        """Logits of every place of the block behind `tokens`, given what is drafted there, and the
        predicted probabilities of being accepted.

        Args:
            states: the target's hidden states of the tokens but the last, for each tap.
        """
        get = self.tensors.get
        table = np.asarray(llama_target().embed_tokens.embedding[...], np.float64)
        head = np.asarray(llama_target().lm_head.embedding[...], np.float64)
        head = head if self.is_full else head[DRAFTED]
        context = np.concatenate(states, axis=1) @ get("fc.weight").T.astype(np.float64)
        context = rms_norm(context, get("hidden_norm.weight"))
        length = len(tokens)
        past, block = np.arange(length - 1), np.arange(length - 1, length - 1 + BLOCK)
        x = table[[tokens[-1]] + [MASK] * (BLOCK - 1)]
        for i in range(self.num_layers):
            of = lambda name, i=i: get(f"layers.{i}.{name}")
            normed = rms_norm(x, of("input_layernorm.weight"))
            keys, values = (
                np.concatenate(
                    [heads_of(of, context, part, past), heads_of(of, normed, part, block)]
                )
                for part in "kv"
            )
            visible = np.ones((BLOCK, length - 1 + BLOCK), bool)
            x = x + attention(of, heads_of(of, normed, "q", block), keys, values, visible)
            x = x + feed_forward(of, rms_norm(x, of("post_attention_layernorm.weight")))
        outputs = rms_norm(x, get("norm.weight"))[0 if self.from_anchor else 1 :]
        found, sure, memory = [], [], np.zeros(RANK)
        for output, before in zip(outputs, [tokens[-1], *drafted], strict=False):
            logits = head @ output
            if self.head_type:
                low = previous = get("markov_head.markov_w1.weight")[before].astype(np.float64)
                if self.head_type == "gated":
                    joint = get("markov_head.gate_proj.weight") @ [*output, *previous]
                    low = SIGMOID(joint + get("markov_head.gate_proj.bias")) * previous
                if self.head_type == "rnn":
                    joint = get("markov_head.joint_proj.weight") @ [*memory, *previous, *output]
                    gate, new, out = np.split(joint + get("markov_head.joint_proj.bias"), 3)
                    memory = SIGMOID(gate) * memory + (1 - SIGMOID(gate)) * np.tanh(new)
                    low = np.tanh(out)
                logits = logits + get("markov_head.markov_w2.weight") @ low
            if self.is_confident:
                joint = get("confidence_head.proj.weight")[0] @ [*output, *previous]
                sure.append(SIGMOID(joint + get("confidence_head.proj.bias")[0]))
            full = np.full(VOCAB, -np.inf)
            full[slice(None) if self.is_full else DRAFTED] = logits
            found.append(full)
        return np.array(found), np.array(sure)


DRAFT_JSON = LAYER_JSON | {"num_hidden_layers": 2, "model_type": "qwen3"}
SPECULATORS = {
    "transformer_layer_config": DRAFT_JSON,
    "draft_vocab_size": len(DRAFTED),
    "aux_hidden_state_layer_ids": [0, 3, 1],
    "block_size": BLOCK,
    "mask_token_id": MASK,
}
DSPARK = {
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 1],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ZLAB = DRAFT_JSON | {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
HEADS = {"head_type": "vanilla", "from_anchor": True, "is_confident": True}
CASES = {
    "dflash": Case(ZLAB, (1, 3), own_tables=False),
    "deepspec": Case(
        DRAFT_JSON | DSPARK | {"architectures": ["Qwen3DSparkModel"]}, (0, 2), **HEADS
    ),
    "specforge": Case(
        DRAFT_JSON
        | {"architectures": ["DSparkDraftModel"], "dflash_config": DSPARK}
        | {"block_size": BLOCK},
        (0, 2),
        own_tables=False,
        **HEADS,
    ),
    "speculators-dflash": Case(
        SPECULATORS | {"speculators_model_type": "dflash"}, (0, 3, 1), is_full=False
    ),
    "speculators-gated": Case(
        SPECULATORS
        | {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated"}
        | {"sample_from_anchor": False},
        (0, 3, 1),
        "gated",
        is_confident=True,
        is_full=False,
    ),
    "speculators-rnn": Case(
        SPECULATORS
        | {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": "rnn"},
        (0, 3, 1),
        "rnn",
        from_anchor=True,
        is_confident=True,
        is_full=False,
    ),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a case's drafter."""
    home = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def loaded(name, **options):
        folder = write_folder(home / name, CASES[name].config, CASES[name].tensors)
        return emsjax.BlockDrafter.from_pretrained(folder, llama_target(), **options)

    return loaded


@pytest.mark.parametrize("name", CASES)
def test_drafts_follow_the_equations_in_every_published_format(name, load):
    case, drafter = CASES[name], load(name)
    assert (drafter.taps, drafter.max_draft_tokens) == (case.taps, case.count)
    sequences = ragged_prompts([6, 14, 1, 9], seed=8)
    states = [hidden_states(llama_target(), tokens, case.taps) for tokens in sequences]
    states = [[x[:-1] for x in of_sample] for of_sample in states]
    batch = len(sequences)
    buffer = np.zeros((batch, 24), np.int32)
    lengths = jnp.array([len(tokens) for tokens in sequences], jnp.int32)
    for row, tokens in zip(buffer, sequences, strict=True):
        row[: len(tokens)] = tokens
    state = drafter.init(jnp.asarray(buffer), lengths, buffer.shape[1])
    observe, propose = jax.jit(drafter.observe), jax.jit(drafter.propose)
    keys, sampling = jax.random.split(jax.random.key(3), batch), emsjax.Sampling(1.0).expand(batch)
    asked = jnp.array([4, 2, 3, 0], jnp.int32)
    spans = [[(0, 4), (0, 1), (0, 0), (0, 8)], [(4, 5), (1, 13), (0, 0), (8, 8)]]
    for call, rejected in zip(spans, [(2, 0, 3, 1), (0, 1, 2, 0)], strict=True):
        state = observe(state, *observed_rows(states, sequences, call, rejected))
    draft, _ = propose(state, jnp.asarray(buffer), lengths, asked, keys, sampling)
    np.testing.assert_array_equal(draft.counts, np.minimum(asked, case.count))
    sure = None
    for sample, tokens in enumerate(sequences):
        count = int(draft.counts[sample])
        drafted = np.asarray(draft.tokens[sample])
        logits, sure = case.forward(tokens, states[sample], drafted)
        np.testing.assert_allclose(draft.probs[sample, :count], softmax(logits)[:count], atol=3e-5)
        if case.is_confident and sample == 0:  # a draft ends where confidence first drops
            drops = int(np.argmin(sure))
            limited = drafter._with(min_confidence=float(sure.min() + 1e-4))
            short, _ = jax.jit(limited.propose)(
                state, jnp.asarray(buffer), lengths, asked, keys, sampling
            )
            first = np.flatnonzero(sure < sure.min() + 1e-4)[0]
            assert short.counts[0] == first == drops
            np.testing.assert_array_equal(short.tokens[0], draft.tokens[0])
