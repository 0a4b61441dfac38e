"""Figures of measurements and of a step's arrays; matplotlib is imported when one is drawn."""

from emsjax.plotting.arrays import cache_figure, packed_rows_figure
from emsjax.plotting.canvas import check_format
from emsjax.plotting.measurements import (
    devices_figure,
    distillation_figure,
    draft_length_figure,
    ems_sd_figure,
    prompts_figure,
    synergy_figure,
)

__all__ = [
    "cache_figure",
    "check_format",
    "devices_figure",
    "distillation_figure",
    "draft_length_figure",
    "ems_sd_figure",
    "packed_rows_figure",
    "prompts_figure",
    "synergy_figure",
]
