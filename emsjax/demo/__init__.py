"""The embedded model pair and prompts: `emsjax.OPT.from_pretrained(emsjax.demo.TARGET)`."""

from emsjax.embedded import DRAFT, PROMPTS, TARGET

__all__ = ["DRAFT", "PROMPTS", "TARGET"]
