"""What the operator said: the same TOML as everywhere, and vLLM's own flags for what vLLM owns."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidegate.config import Config, load_config, refuse_written
from tidegate.core.limits import Limits
from tidegate.errors import ConfigError

_SWAP = "victims are recomputed inside vLLM"
OWNED = {
    "scheduler.num_blocks": "vLLM's --gpu-memory-utilization says it",
    "scheduler.kv_memory": "vLLM's --kv-cache-memory-bytes says it",
    "scheduler.block_size": "vLLM's --block-size says it",
    "scheduler.max_num_seqs": "vLLM's --max-num-seqs says it",
    "scheduler.max_num_batched_tokens": "vLLM's --max-num-batched-tokens says it",
    "scheduler.max_model_len": "vLLM's --max-model-len says it",
    "scheduler.prefix_caching": "vLLM's --enable-prefix-caching says it",
    "scheduler.pipeline_depth": "vLLM's --async-scheduling says it",
    **{f"scheduler.{tier}_{size}": _SWAP for tier in ("host", "disk") for size in ("blocks", "kv_memory")},
    "scheduler.disk_kv_path": _SWAP,
    "policy.*.max_stride": "everybody decodes in every step inside vLLM",
    "model.name": "vLLM's own argument says it",
    "model.dtype": "vLLM's --dtype says it",
    "model.threads": "vLLM's VLLM_CPU_OMP_THREADS_BIND says it",
    "server.host": "vLLM's --host says it",
    "server.port": "vLLM's --port says it",
    "server.api_keys": "vLLM's --api-key says who may come, and knows no tenants",
    "server.max_body_bytes": "vLLM takes the bodies",
    "server.max_connections": "vLLM takes the connections",
    "server.drain_seconds": "vLLM's --shutdown-timeout says it",
}
"""Options that are our own engine's alone, and what says it inside vLLM."""


def find_config(vllm_config: Any) -> Config:
    """The file of `--additional-config '{"tidegate": "FILE"}'`, or of TIDEGATE_CONFIG; the defaults without one.

    Raises ConfigError.
    """
    additional = vllm_config.additional_config
    named = additional.get("tidegate") if isinstance(additional, dict) else None
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"--additional-config: tidegate must be the path of a TOML file, not {named!r}")
    named = named or os.environ.get("TIDEGATE_CONFIG")
    path = Path(named) if named else None
    refuse_written(path, OWNED)
    return load_config(path)


def find_limits(config: Config, engine: Any) -> Limits:
    """What vLLM was started with, and the rules of thumb of `[scheduler]`.

    Seats, budget, blocks and the model's length are vLLM's; its watermark counts where it is the larger one. Raises
    ConfigError.
    """
    scheduling, said = engine.scheduler_config, config.scheduler
    pool = engine.kv_cache_manager.block_pool
    watermark = max(scheduling.watermark, said.watermark if said.headroom == "watermark" else 0.0)
    ours = replace(
        said,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_active_reqs,
        max_num_batched_tokens=min(engine.max_num_scheduled_tokens, scheduling.max_num_batched_tokens),
        prefix_caching=bool(engine.kv_cache_manager.enable_caching),
        headroom="watermark" if said.headroom == "none" and watermark else said.headroom,
        watermark=watermark,
    )
    limits = replace(config, scheduler=ours).limits(pool.num_gpu_blocks - 1, engine.max_model_len)
    lora = engine.lora_config
    return limits if lora is None else replace(limits, max_resources=lora.max_loras)
