"""The supported families of models."""

from emsjax.models import codegen, gemma, gpt2, gpt_neox, llama, mistral, opt, qwen
from emsjax.models.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
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
}


def family_of(config) -> Family:
    """The family that a config belongs to."""
    return next(family for family in FAMILIES.values() if type(config) is family.config)
