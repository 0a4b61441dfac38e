"""Paths of the embedded model pair, of the target's EAGLE-3 drafter, and of their texts.

HELD_OUT names the modules of Python's library that no model was trained on.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "demo"
TARGET, DRAFT, EAGLE3 = FOLDER / "target", FOLDER / "draft", FOLDER / "eagle3"
PROMPTS, HELD_OUT = FOLDER / "prompts.json", FOLDER / "held_out.json"
