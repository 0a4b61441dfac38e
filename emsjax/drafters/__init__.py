"""Sources of draft tokens; the protocol is in `emsjax.decode.base`."""

from emsjax.drafters.draft_model import DraftModel
from emsjax.drafters.prompt_lookup import PromptLookup
from emsjax.drafters.self_draft import SelfDraft

__all__ = ["DraftModel", "PromptLookup", "SelfDraft"]
