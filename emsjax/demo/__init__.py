"""The embedded model pair and prompts: `emsjax.OPT.from_pretrained(emsjax.demo.TARGET)`."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
PROMPTS = Path(__file__).parent / "prompts.json"
