"""Sources of draft tokens."""

from emsjax.drafting.drafter import Draft, Drafter
from emsjax.drafting.prompt_lookup import PromptLookup

__all__ = ["Draft", "Drafter", "PromptLookup"]
