"""Whether and how Tidegate decides in one of vLLM's schedulers: configuration, obstacles, observers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import vllm

from tidegate.core.policy import PolicyContext
from tidegate.core.step_time import LearnedStepTime
from tidegate.errors import ConfigError
from tidegate.integrations.vllm.host import Host
from tidegate.integrations.vllm.observers import observers_of
from tidegate.integrations.vllm.settings import find_config, find_limits
from tidegate.integrations.vllm.shadow import ShadowHost
from tidegate.integrations.vllm.supported import obstacle
from tidegate.predictors.choice import build_predictor

_log = logging.getLogger("vllm.tidegate")  # under vLLM's, so that its lines look like vLLM's


def attach(engine: Any, clock: Callable[[], float], wall: Callable[[], float]) -> Host | None:
    """The host of our decisions in `engine`, vLLM's scheduler; None where vLLM is to schedule by itself.

    Raises ConfigError for a configuration that is wrong, and where an obstacle was found and the configuration says
    `fallback = "refuse"`.
    """
    config = find_config(engine.vllm_config)
    why = obstacle(engine, vllm.__version__)
    if why is not None:
        if config.vllm.fallback == "refuse":
            raise ConfigError(f'{why}; vllm.fallback = "refuse" asks not to start then')
        _log.warning("Tidegate does nothing here: %s. vLLM schedules by itself.", why)
        return None
    context = PolicyContext(build_predictor(config.predictor), LearnedStepTime())
    parts = (config, config.build_policy(), find_limits(config, engine), context, clock, wall)
    host = ShadowHost(engine, *parts) if config.vllm.mode == "shadow" else Host(engine, *parts)
    rank = engine.vllm_config.parallel_config.data_parallel_index
    host.observers = observers_of(config, host, engine.log_stats, rank)
    _log.info("Tidegate %s by policy %s", _DOES[config.vllm.mode], config.scheduler.policy)
    return host


_DOES = {"active": "schedules", "shadow": "decides, logs and does nothing"}
