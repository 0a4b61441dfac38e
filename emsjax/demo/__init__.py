"""The embedded models and prompts: `emsjax.OPT.from_pretrained(emsjax.demo.TARGET)`.

`DRAFT` is a draft model for that target, and `EAGLE3` a drafter that reads its hidden states:
`emsjax.Eagle3.from_pretrained(emsjax.demo.EAGLE3, target)`.
"""

from emsjax.embedded import DRAFT, EAGLE3, PROMPTS, TARGET

__all__ = ["DRAFT", "EAGLE3", "PROMPTS", "TARGET"]
