"""The supported families of models. A new one needs a file beside this one and a line here."""

from emsjax.models import codegen, gemma, gpt2, gpt_neox, llama, mistral, opt, qwen
from emsjax.models.codegen import CodeGenConfig
from emsjax.models.config import DecoderConfig
from emsjax.models.family import Family
from emsjax.models.gemma import Gemma3Config
from emsjax.models.gpt2 import GPT2Config
from emsjax.models.gpt_neox import GPTNeoXConfig
from emsjax.models.llama import LlamaConfig
from emsjax.models.mistral import MistralConfig
from emsjax.models.opt import OPTConfig
from emsjax.models.qwen import Qwen2Config, Qwen3Config

_FAMILIES = (
    opt.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    codegen.FAMILY,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
__all__ = [
    "FAMILIES",
    "CodeGenConfig",
    "GPT2Config",
    "GPTNeoXConfig",
    "Gemma3Config",
    "LlamaConfig",
    "MistralConfig",
    "OPTConfig",
    "Qwen2Config",
    "Qwen3Config",
    "family_of",
    "register",
]


def register(family: Family) -> None:
    """Add a family from outside of the library, or replace the one of the same model type."""
    FAMILIES[family.model_type] = family


def family_of(config: DecoderConfig) -> Family:
    """The family that a config belongs to."""
    return next(family for family in FAMILIES.values() if type(config) is family.config)
