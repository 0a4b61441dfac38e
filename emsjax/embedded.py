"""Paths of the embedded model pair, of the target's EAGLE-3 drafter, and of the prompts."""

from pathlib import Path

FOLDER = Path(__file__).parent / "demo"
TARGET, DRAFT, EAGLE3 = FOLDER / "target", FOLDER / "draft", FOLDER / "eagle3"
PROMPTS = FOLDER / "prompts.json"
