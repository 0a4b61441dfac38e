"""Batch inference on many hosts: Ray Data deals out the prompts, and actors complete them.

`Completer` is the class for `ray.data.Dataset.map_batches`. It needs the extra `ray`.
"""

import importlib.util
from typing import Any

__all__ = ["Completer"]


def check_installed() -> None:
    """Raises an ImportError unless Ray Data is installed."""
    # Without this package's own folder, which has the same last name, on the path.
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise ImportError("emsjax.ray needs Ray Data: pip install 'emsjax[ray]'")


def __getattr__(name: str) -> Any:  # so that importing emsjax does not import ray
    if name != "Completer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    from emsjax.ray.completer import Completer

    return Completer
