"""Paths of the embedded model pair and of its prompts."""

from pathlib import Path

FOLDER = Path(__file__).parent / "demo"
TARGET, DRAFT, PROMPTS = FOLDER / "target", FOLDER / "draft", FOLDER / "prompts.json"
