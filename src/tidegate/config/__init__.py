"""Configuration: TOML in, one frozen `Config` out, which knows how to make what the engine needs.

Whatever a file says that no option reads is an error that names the nearest one that does, and so is an option
that would do nothing beside the others.

options.py    the options, section by section
gateway.py    those of `[gateway]`
values.py     what an option may hold
resolve.py    a file, validated and filled in; and back to TOML
idle.py       options that do nothing because of others
sentences.py  mistakes in one sentence
"""

from tidegate.config.gateway import (
    DeadlineConfig,
    DiscoveryConfig,
    GatewayConfig,
    GatewayKey,
    PoolsConfig,
    RateConfig,
    ReplicaConfig,
)
from tidegate.config.idle import idle
from tidegate.config.options import (
    DOOR,
    PER_ENGINE,
    SAID_ELSEWHERE,
    AgingConfig,
    ClassConfig,
    Config,
    ModelConfig,
    ObserveConfig,
    PredictorConfig,
    SchedulerConfig,
    ServerConfig,
    VllmConfig,
)
from tidegate.config.resolve import load_config, load_configs, refuse_written, resolve, resolve_each, to_toml
from tidegate.config.values import ApiKey

__all__ = [
    "DOOR",
    "PER_ENGINE",
    "SAID_ELSEWHERE",
    "AgingConfig",
    "ApiKey",
    "ClassConfig",
    "Config",
    "DeadlineConfig",
    "DiscoveryConfig",
    "GatewayConfig",
    "GatewayKey",
    "ModelConfig",
    "ObserveConfig",
    "PoolsConfig",
    "PredictorConfig",
    "RateConfig",
    "ReplicaConfig",
    "SchedulerConfig",
    "ServerConfig",
    "VllmConfig",
    "idle",
    "load_config",
    "load_configs",
    "refuse_written",
    "resolve",
    "resolve_each",
    "to_toml",
]
