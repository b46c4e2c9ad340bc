"""The real vLLM scheduler without a model: its own classes, a pool of a given size, outputs made up.

`Engine` stands for vLLM's engine core: it hands requests in, schedules, and returns a fabricated
`ModelRunnerOutput`. Token n of a request is a function of its name and n, so that streams can be compared.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

STOP = 1
"""The token that ends a request before its declared length."""

_ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 20,
}


@cache
def model_dir() -> str:
    """A folder that describes a tiny model, without weights."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-vllm-"))
    (folder / "config.json").write_text(json.dumps(_ARCHITECTURE))
    init_none_hash(sha256)
    return str(folder)


def make_config(
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 1 << 20,
    prefix_caching: bool = True,
    asynchronous: bool = False,
    additional: dict[str, Any] | None = None,
    **scheduling: Any,
) -> VllmConfig:
    """What vLLM would be started with."""
    model = ModelConfig(model=model_dir(), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len)
    cache_config = CacheConfig(block_size=block_size, gpu_memory_utilization=0.9, enable_prefix_caching=prefix_caching)
    cache_config.num_gpu_blocks = num_blocks
    return VllmConfig(
        model_config=model,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            **scheduling,
        ),
        device_config=DeviceConfig("cpu"),
        additional_config=additional or {},
    )


def make_scheduler(cls: type, config: VllmConfig, log_stats: bool = False) -> Any:
    """A scheduler of `cls` over a pool of `num_gpu_blocks` blocks; one of them is vLLM's null block."""
    block_size = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=log_stats,
    )


def token(name: str, index: int) -> int:
    """Output `index` of request `name`; never the stop token."""
    return 2 + crc32(f"{name}/{index}".encode()) % 900


class Engine:
    """Steps a scheduler as vLLM's engine core does. `depth` 2 schedules a step while the one before it runs."""

    def __init__(self, scheduler: Any, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.streams: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.stops: dict[str, int] = {}  # after so many outputs the request emits the stop token
        self.told: dict[str, Any] = {}  # the last EngineCoreOutput of each
        self._flight: deque[Any] = deque()
        block_size = scheduler.cache_config.block_size
        self._hasher = get_request_block_hasher(block_size, sha256)

    def request(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        stop_after: int | None = None,
        priority: int = 0,
        arrival: float | None = None,
        xargs: dict[str, Any] | None = None,
        salt: str | None = None,
        **sampling: Any,
    ) -> Request:
        """A request that ends after `stop_after` outputs, or `max_tokens`."""
        if stop_after is not None and stop_after < max_tokens:
            self.stops[name] = stop_after
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=[STOP], extra_args=xargs, **sampling
        )
        params.update_from_generation_config({}, None)
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
        )

    def add(self, request: Request) -> None:
        """The request comes to the scheduler."""
        self.streams[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, *names: str) -> None:
        """The clients are gone."""
        self.scheduler.finish_requests(set(names), RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule and compute; returns the `SchedulerOutput` of the step that was scheduled (None at an empty one)."""
        output = self.schedule()
        while len(self._flight) >= self.depth or (self._flight and not self.scheduler.has_requests()):
            self.update()
        return output

    def schedule(self) -> Any:
        """Schedule one step and put it in flight."""
        if not self.scheduler.has_requests():
            return None
        output = self.scheduler.schedule()
        scheduled = {name: self._computes(self.scheduler.requests[name]) for name in output.num_scheduled_tokens}
        self._flight.append((output, scheduled))
        return output

    def update(self) -> None:
        """The oldest step in flight was computed."""
        result = self.compute()
        self.apply(self._flight[0][0], result)

    def compute(self) -> ModelRunnerOutput:
        """The outputs of the oldest step in flight."""
        scheduled = self._flight[0][1]
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: i for i, name in enumerate(scheduled)},
            sampled_token_ids=[self._sample(name, index) for name, index in scheduled.items()],
        )

    def apply(self, output: Any, result: ModelRunnerOutput) -> None:
        """Hand a result to the scheduler, and its outputs to the clients."""
        self._flight.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for told in outputs.outputs:
                self.told[told.request_id] = told
                self.streams[told.request_id] += told.new_token_ids
                if told.finish_reason is not None:
                    self.ends[told.request_id] = told.finish_reason

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def _computes(self, request: Request) -> int | None:
        """The index of the output that the step samples for it; None in the middle of a prompt."""
        if request.is_prefill_chunk:
            return None
        return request.num_output_tokens + max(0, request.num_output_placeholders - 1)

    def _sample(self, name: str, index: int | None) -> list[int]:
        if index is None:
            return []
        stop = self.stops.get(name)
        return [STOP if stop is not None and index + 1 >= stop else token(name, index)]


def run(engine: Engine, limit: int = 100_000) -> int:
    """Step until everything has ended; returns the steps. Raises where that takes more than `limit`."""
    for steps in range(limit):
        if not engine.scheduler.has_requests() and not engine.in_flight:
            return steps
        if engine.scheduler.has_requests():
            engine.step()
        else:
            engine.update()
    raise AssertionError(f"requests are left after {limit} steps")


def whole(scheduler: Any) -> bool:
    """Whether every block of the pool is free again."""
    pool = scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
