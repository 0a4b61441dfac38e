"""Sources of draft tokens."""

from emsjax.decode.base import Draft, Drafter
from emsjax.drafters.draft_model import DraftModel
from emsjax.drafters.prompt_lookup import PromptLookup

__all__ = ["Draft", "DraftModel", "Drafter", "PromptLookup"]
