"""Tidegate in Ray Serve: engines as replicas on many machines, and the gateway's routes between them.

build           the application: `serve run tidegate.integrations.ray:build config=FILE replicas=2`
TidegateRouter  the request router alone, for any deployment whose requests are OpenAI bodies

Ray is imported when one of them is asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tidegate.errors import MissingExtra

_HOMES = {"TidegateRouter": "router", "build": "application"}

__all__ = ["TidegateRouter", "build"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is None:
        raise MissingExtra("Ray Serve is not installed: pip install 'tidegate[ray]'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
