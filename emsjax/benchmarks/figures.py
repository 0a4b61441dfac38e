"""The figures of a folder of `emsjax bench all`, drawn of its results alone."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from emsjax import plotting

Results = Mapping[str, Any]
OTHER_STEPS = ("quantize", "kv_dtype", "numerics")  # settings that few steps have


def draw(folder: Path) -> list[Path]:
    """Draws each figure whose results are there, as PNG files in the folder; returns the files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: a file cannot be read or written.
    """
    results = {path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))}
    drawn = []
    for name, make in FIGURES.items():
        figure = make(results)
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path)
            drawn.append(path)
    return drawn


def _of_file(name: str, figure: Callable[[Results], Any]) -> Callable[[Mapping[str, Results]], Any]:
    """The figure of one file; None: there is no such file."""
    return lambda results: figure(results[name]) if name in results else None


def _over_devices(results: Mapping[str, Results]):
    """Steps of the models that were measured on several numbers of devices; None: there are none.

    Those with narrow numbers or invariant numerics are left out.
    """
    steps = [of for of in results.values() if "shapes" in of and _is_plain(of["settings"])]
    devices: dict[str, set[int]] = {}
    for of in steps:
        settings = of["settings"]
        devices.setdefault(settings["model"], set()).add(settings.get("tensor_parallel", 1))
    shown = [of for of in steps if len(devices[of["settings"]["model"]]) > 1]
    return plotting.devices_figure(shown) if shown else None


def _is_plain(settings: Mapping[str, Any]) -> bool:
    return not any(name in settings for name in OTHER_STEPS)


FIGURES = {
    "ems-sd": _of_file("ems-sd", plotting.ems_sd_figure),
    "draft-length": _of_file("draft-length", plotting.draft_length_figure),
    "step-over-devices": _over_devices,
}
