"""What is asked of vLLM's insides, and when that is not there.

vLLM's scheduler is no public interface, and minors change it. A minor that was not tested, a name that is missing, or
a way to run that was not thought through is told in one sentence, and vLLM then schedules by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

MINORS = ("0.31", "0.32")
"""Minors of vLLM that the adapter's tests are run with."""

_ATTRIBUTES = (
    "current_step", "kv_cache_manager", "kv_holding_waiting", "max_num_active_reqs", "max_num_scheduled_tokens",
    "num_waiting_for_streaming_input", "pause_state", "policy", "prev_step_scheduled_req_ids", "requests", "running",
    "scheduler_config", "waiting",
)  # fmt: skip
_METHODS = {
    "_handle_blocked_waiting_request": ("request",),
    "_is_blocked_waiting_status": ("status",),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "schedule": ("throttle_prefills",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
}


def obstacle(scheduler: Any, version: str) -> str | None:
    """Why Tidegate does not schedule in this vLLM, in a sentence; None where it does."""
    return next(_obstacles(scheduler, version), None)


def _obstacles(scheduler: Any, version: str) -> Iterator[str]:
    minor = ".".join(version.split(".")[:2])
    if minor not in MINORS:
        yield f"vLLM {version} is none of the supported minors ({', '.join(MINORS)})"
    for name in _ATTRIBUTES:
        if not hasattr(scheduler, name):
            yield f"this vLLM's scheduler has no {name}"
    stock = next(c for c in type(scheduler).__mro__ if c.__module__.startswith("vllm."))
    for name, parameters in _METHODS.items():
        method = getattr(stock, name, None)
        if method is None:
            yield f"this vLLM's scheduler has no {name}()"
        elif [p for p in inspect.signature(method).parameters if p != "self"][: len(parameters)] != list(parameters):
            yield f"{name}() of this vLLM's scheduler does not take {', '.join(parameters)}"
    yield from _ways_to_run(scheduler)


def _ways_to_run(scheduler: Any) -> Iterator[str]:
    config = scheduler.vllm_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    kinds = {
        "a KV connector": config.kv_transfer_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "a pooling model": config.model_config.runner_type == "pooling",
        "a diffusion model": bool(getattr(config.model_config, "is_diffusion", False)),
        "an encoder-decoder model": scheduler.is_encoder_decoder,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "context parallelism": config.parallel_config.decode_context_parallel_size > 1
        or config.parallel_config.prefill_context_parallel_size > 1,
        "a model whose layers keep KV in several ways": len(groups) != 1,
        "a model whose layers do not keep all KV": len(groups) == 1
        and type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec",
        "prefill without chunks": not scheduler.scheduler_config.enable_chunked_prefill,
    }
    for kind, there in kinds.items():
        if there:
            yield f"Tidegate does not schedule {kind} inside vLLM yet"
