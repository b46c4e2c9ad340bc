"""Tidegate's policies inside vLLM: `--scheduler-cls tidegate.integrations.vllm.TidegateAsyncScheduler`.

TidegateScheduler       over vLLM's `Scheduler`
TidegateAsyncScheduler  over vLLM's `AsyncScheduler`
headers                 the ASGI middleware for `--middleware`

vLLM is imported when one of the schedulers is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"TidegateScheduler": "mixin", "TidegateAsyncScheduler": "mixin", "headers": "middleware"}

__all__ = ["TidegateAsyncScheduler", "TidegateScheduler", "headers"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
