"""Model shapes by name. Benchmarks decode with random weights of these shapes."""

from emsjax.models.opt import OPTConfig


def opt_shape(size: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(
        hidden_size=size, ffn_dim=4 * size, num_hidden_layers=layers, num_attention_heads=heads
    )


MODELS = {
    "opt-125m": OPTConfig(),
    "opt-1.3b": opt_shape(2048, 24, 32),
    "opt-2.7b": opt_shape(2560, 32, 32),
    "opt-6.7b": opt_shape(4096, 32, 32),
    "opt-13b": opt_shape(5120, 40, 40),
    "opt-30b": opt_shape(7168, 48, 56),
    "tiny": OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4
    ),
}
