"""Sources of draft tokens; the protocol is in `emsjax.decode.base`."""

from emsjax.drafters.block_drafter import BlockDrafter
from emsjax.drafters.draft_model import DraftModel
from emsjax.drafters.eagle3 import Eagle3
from emsjax.drafters.mixed import Mixed
from emsjax.drafters.prompt_lookup import PromptLookup
from emsjax.drafters.self_draft import SelfDraft
from emsjax.drafters.suffix import SuffixDrafter
from emsjax.drafters.suffix_memory import SuffixMemory

__all__ = [
    "BlockDrafter",
    "DraftModel",
    "Eagle3",
    "Mixed",
    "PromptLookup",
    "SelfDraft",
    "SuffixDrafter",
    "SuffixMemory",
]
