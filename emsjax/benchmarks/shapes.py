"""Model shapes by name. Benchmarks decode with random weights of these shapes."""

from emsjax.models.config import DecoderConfig
from emsjax.models.families import (
    CodeGenConfig,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)
from emsjax.models.rotary import RopeScaling


def opt_shape(size: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(
        hidden_size=size, ffn_dim=4 * size, num_hidden_layers=layers, num_attention_heads=heads
    )


def llama_shape(scaling: float, **sizes: int) -> LlamaConfig:
    """A model of Llama 3; `scaling` is the factor of its rotary frequencies."""
    return LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            "llama3", scaling, 8192, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        bos_token_id=128000,
        eos_token_id=(128001, 128008, 128009),
        **sizes,
    )


MODELS: dict[str, DecoderConfig] = {
    "opt-125m": OPTConfig(),
    "opt-1.3b": opt_shape(2048, 24, 32),
    "opt-2.7b": opt_shape(2560, 32, 32),
    "opt-6.7b": opt_shape(4096, 32, 32),
    "opt-13b": opt_shape(5120, 40, 40),
    "opt-30b": opt_shape(7168, 48, 56),
    "opt-66b": opt_shape(9216, 64, 72),
    "llama-3.1-8b": llama_shape(intermediate_size=14336, scaling=8.0),
    "llama-3.1-70b": llama_shape(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        scaling=8.0,
    ),
    "llama-3.2-1b": llama_shape(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        tie_word_embeddings=True,
        scaling=32.0,
    ),
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "mistral-7b": MistralConfig(max_position_embeddings=32768),
    "gemma-3-4b": Gemma3Config(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        sliding_window=1024,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "pythia-6.9b": GPTNeoXConfig(
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=32,
        num_attention_heads=32,
        eos_token_id=0,
    ),
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "codegen-6b": CodeGenConfig(vocab_size=51200, n_layer=33),
    "tiny": OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4
    ),
}
