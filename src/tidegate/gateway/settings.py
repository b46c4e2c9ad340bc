"""What the operator said: the same TOML as everywhere, without what only an engine does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tidegate.config import (
    DOOR,
    Config,
    GatewayConfig,
    ModelConfig,
    ObserveConfig,
    SchedulerConfig,
    ServerConfig,
    VllmConfig,
    load_config,
    refuse_written,
)
from tidegate.config.resolve import Overrides
from tidegate.config.sentences import nearest
from tidegate.core.presets import Composition
from tidegate.errors import ConfigError
from tidegate.routing.route import ROUTES

_ENGINES = "the engines decide it, each for itself"
_FRONTS = {f.name for f in fields(ServerConfig)} & {f.name for f in fields(GatewayConfig)}
_QUEUE = ("aging_window", "aging_rate", "class_limits", *DOOR)
OWNED = {
    **{f"scheduler.{f.name}": _ENGINES for f in fields(SchedulerConfig) if f.name not in ("policy", *DOOR)},
    **{f"policy.*.{f.name}": _ENGINES for f in fields(Composition) if f.name not in _QUEUE},
    **{f"model.{f.name}": "the engines have the models" for f in fields(ModelConfig)},
    **{f"vllm.{f.name}": "it is about Tidegate inside vLLM" for f in fields(VllmConfig)},
    **{
        f"observe.{f.name}": "a gateway writes no files; it has /metrics and explanations"
        for f in fields(ObserveConfig)
    },
    **{f"server.{name}": f"gateway.{name} says it" for name in _FRONTS},
}
"""Options that do nothing in a gateway, and what says it there."""


def load(path: Path | None, overrides: Overrides | None = None) -> Config:
    """The configuration of a gateway. Raises ConfigError, also where there is no engine that it could send to."""
    refuse_written(path, OWNED)
    config = load_config(path, overrides)
    if config.predictor.kind == "oracle":
        raise ConfigError('predictor.kind "oracle" knows lengths only in a simulation; use "history" or "learned"')
    if config.gateway.route not in ROUTES:
        known = dict.fromkeys(ROUTES)
        raise ConfigError(
            f"gateway.route: unknown route {config.gateway.route!r}{nearest(config.gateway.route, known)}"
        )
    unsendable = next((name for name in config.classes if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", name)), None)
    if unsendable is not None:
        raise ConfigError(
            f"classes.{unsendable!r}: a gateway names classes in a header, which carries only printable ASCII"
        )
    if not config.gateway.replicas and not config.gateway.discovery:
        where = path or "no configuration"
        raise ConfigError(
            f"{where}: a gateway needs an engine: [[gateway.replicas]] with a url, or [[gateway.discovery]]"
        )
    return config
