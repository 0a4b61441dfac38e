"""The network of DFlash and DSpark: layers over a block of tokens that are not known yet.

Axis legend: see `emsjax.decode.pack`; m = rank of the sequential head.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from emsjax.drafters.feature_network import FeatureConfig, FeatureNetwork, embed, whole_logits
from emsjax.models.layers import Angles, DecoderLayer, Norm, residual_stream
from emsjax.models.linears import linear, new_linear, weight_and_bias
from emsjax.models.rotary import angles
from emsjax.models.schema import Relation, choice, count, flag, token_id

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"  # sequential heads


@dataclasses.dataclass(frozen=True)
class BlockConfig(FeatureConfig):
    """The sizes and switches of a DFlash or DSpark drafter.

    Attributes:
        block_size: tokens of a block: the last token and masks behind it.
        mask_token_id: the token that stands for unknown ones.
        sample_from_anchor: whether the output at the last token is the first draft (DSpark), so
            that a block drafts `block_size` tokens; otherwise that at the first mask is (DFlash).
        markov_rank: numbers per token of the sequential head; 0: there is none.
        markov_head_type: "vanilla": a bias that depends on the token before; "gated": which the
            output gates; "rnn": a state over the block's tokens makes it.
        enable_confidence_head: whether there is a head that predicts which drafts are accepted.
        confidence_head_with_markov: whether it also sees the token before.
    """

    relations: ClassVar = (
        *FeatureConfig.relations,
        Relation(lambda config: config.mask_token_id is not None, "mask_token_id must be given"),
        Relation(
            lambda config: config.markov_rank > 0 or not config.confidence_head_with_markov,
            "confidence_head_with_markov needs a markov_rank above 0",
        ),
    )

    block_size: int = count(8, least=2, most=1024)
    mask_token_id: int | None = token_id(None, vocab="target_vocab_size")
    sample_from_anchor: bool = flag(False)
    markov_rank: int = count(0, least=0)
    markov_head_type: str = choice(VANILLA, (VANILLA, GATED, RNN))
    enable_confidence_head: bool = flag(False)
    confidence_head_with_markov: bool = flag(False)

    @property
    def target_vocab_size(self) -> int:
        """The target's vocabulary size."""
        return self.layers.vocab_size

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - (not self.sample_from_anchor)


class MarkovHead(nnx.Module):
    """The sequential head: logits that depend on the tokens before, of low rank.

    Args:
        config: see `BlockConfig`.
        dtype: type of weights and products.
        rngs: random generators for the initial weights.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        a, rank = config.architecture, config.markov_rank
        init = nnx.initializers.normal(a.init_std)
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.kind = config.markov_head_type
        self.markov_w1 = nnx.Embed(
            a.vocab_size, rank, embedding_init=init, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.markov_w2 = new_linear(rank, config.draft_vocab_size, bias=False, **options)
        gate = new_linear(a.width + rank, rank, bias=True, **options)
        joint = new_linear(a.width + 2 * rank, 3 * rank, bias=True, **options)
        self.gate_proj = gate if self.kind == GATED else None
        self.joint_proj = joint if self.kind == RNN else None

    def previous(self, token_ids: Int32[Array, "b"]) -> Float[Array, "b m"]:
        """What the head sees of the tokens before."""
        return embed(self.markov_w1.embedding[...], token_ids)

    def __call__(
        self,
        previous: Float[Array, "b m"],
        hidden: Float[Array, "b e"],
        state: Float[Array, "b m"],
    ) -> tuple[Float[Array, "b w"], Float[Array, "b m"]]:
        """float32 logits to add at one place of a block, and the next state.

        Args:
            previous: the tokens before, from `previous`.
            hidden: the network's normalised output at this place.
            state: zeros at the first place.
        """
        if self.kind == GATED:
            gate = linear(self.gate_proj, jnp.concatenate([hidden, previous], axis=-1))
            previous = jax.nn.sigmoid(gate) * previous
        elif self.kind == RNN:
            joint = linear(self.joint_proj, jnp.concatenate([state, previous, hidden], axis=-1))
            gate, candidate, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            previous = jnp.tanh(out)
        weight, _ = weight_and_bias(self.markov_w2)
        return whole_logits(pallas_kernels.linear_sums(previous, weight)), state


class PlaceOutput(NamedTuple):
    """What follows at one place of blocks from the token before.

    Attributes:
        logits: float32 logits of the place's token.
        memory: the sequential head's next state.
    """

    logits: Float[Array, "b w"]
    memory: Float[Array, "b m"]


class BlockNetwork(FeatureNetwork):
    """The weights of a DFlash or DSpark drafter: see `FeatureNetwork`."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        super().__init__(config, rngs=rngs, dtype=dtype)
        a = self.architecture
        options = {"dtype": self.dtype, "rngs": rngs}
        self.hidden_norm = Norm(a.width, a.norm, dtype=self.dtype)
        self.layers = nnx.List([DecoderLayer(a, kind, **options) for kind in a.layers])
        self.markov_head = MarkovHead(config, **options) if config.markov_rank else None
        inputs = a.width + config.markov_rank * config.confidence_head_with_markov
        init = nnx.initializers.normal(a.init_std)
        confidence = new_linear(inputs, 1, bias=True, init=init, **options)
        self.confidence_head = confidence if config.enable_confidence_head else None

    def context(
        self, taps: tuple[Float[Array, "r e"], ...], places: Int32[Array, "r"]
    ) -> tuple[Float[Array, "r h d"], ...]:
        """Keys and values of the target's rows in every layer, side by side behind queries.

        They are products of the hidden states, whatever the layer before has put out.
        """
        hidden = self.hidden_norm(self.project(taps))
        queries = lambda qkv, kind: qkv[:, : self.architecture.heads]  # nothing is attended to
        turns = self._angles(places)
        return tuple(layer.attend(hidden, turns, queries)[1] for layer in self.layers)

    def run(
        self, embeddings: Float[Array, "r e"], places: Int32[Array, "r"], through: Callable
    ) -> Float[Array, "r e"]:
        """The normalised outputs of blocks' tokens at these places of their samples.

        Args:
            through: runs one layer: through(index, layer, stream, angles) returns the next stream,
                where streams are the two terms of `run_layer`.
        """
        turns, stream = self._angles(places), (embeddings.astype(jnp.float32), None)
        for index, layer in enumerate(self.layers):
            stream = through(index, layer, stream, turns)
        return self.final_norm(residual_stream(self.architecture.norm, *stream))

    def _angles(self, places: Int32[Array, "r"]) -> Angles:
        (turn,) = self.architecture.rotaries
        return angles(turn, places)

    def init_memory(self, batch: int) -> Float[Array, "b m"]:
        """The sequential head's state at the first place of blocks."""
        return jnp.zeros((batch, self.config.markov_rank), self.dtype)

    def at_place(
        self,
        logits: Float[Array, "b w"],
        hidden: Float[Array, "b e"],
        token_ids: Int32[Array, "b"],
        memory: Float[Array, "b m"],
    ) -> PlaceOutput:
        """The logits at one place of blocks, once the tokens before are known.

        Args:
            logits: the head's logits at this place.
            hidden: the normalised outputs at this place.
            token_ids: the tokens before.
            memory: the state after the place before, or `init_memory`.
        """
        if self.markov_head is None:
            return PlaceOutput(logits, memory)
        more, memory = self.markov_head(self.markov_head.previous(token_ids), hidden, memory)
        return PlaceOutput(logits + more, memory)

    def confidence_logits(
        self, hidden: Float[Array, "b k e"], token_ids: Int32[Array, "b k"]
    ) -> Float[Array, "b k"]:
        """Log-odds, in float32, of the predicted probability that each draft is accepted.

        Args:
            hidden: the normalised outputs at all places.
            token_ids: the tokens before each.
        """
        shape, rows = token_ids.shape, hidden.reshape(-1, hidden.shape[-1])
        if self.config.confidence_head_with_markov:
            previous = self.markov_head.previous(token_ids.reshape(-1))
            rows = jnp.concatenate([rows, previous], axis=-1)
        return linear(self.confidence_head, rows)[:, 0].astype(jnp.float32).reshape(shape)
