"""Sources of draft tokens."""

from emsjax.drafting.draft_model import DraftModel
from emsjax.drafting.drafter import Draft, Drafter
from emsjax.drafting.prompt_lookup import PromptLookup

__all__ = ["Draft", "DraftModel", "Drafter", "PromptLookup"]
