"""`engine.executor.Executor` over a real model: one worker thread computes plans in order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tidegate.core.plan import StepPlan, StepResult
from tidegate.errors import ConfigError
from tidegate.executors.torch import attention, feedforward, norm, selfattention
from tidegate.executors.torch.grammar import GrammarCompiler
from tidegate.executors.torch.hardware import available_cores, one_thread
from tidegate.executors.torch.kvcache import KvShape, PagedKv
from tidegate.executors.torch.model import LoadedModel
from tidegate.executors.torch.sampler import Sampler
from tidegate.executors.torch.slots import Slots
from tidegate.executors.torch.swap import HostPool

NUMBA_DTYPES = (torch.float32, torch.bfloat16)


class TorchExecutor:
    """Computes plans with a real model.

    Give the KV pool's size as `num_blocks` or as `kv_bytes`. `max_model_len` is at most what the model
    can hold, and that by default. `threads` is the cores it may use, by default all this process has.
    `numba_attention=False` takes the decode attention of plain torch operations, as other devices do.

    KV can be swapped to `host_blocks` blocks of memory (or `host_kv_bytes`) and `disk_blocks` blocks of a file
    (or `disk_kv_bytes`) in `disk_path`, by default the system's directory for temporary files.

    forward_seconds, sampling_seconds: what steps so far spent in the model and in choosing tokens.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        threads: int | None = None,
        numba_attention: bool = True,
        host_blocks: int = 0,
        host_kv_bytes: int | None = None,
        disk_blocks: int = 0,
        disk_kv_bytes: int | None = None,
        disk_path: Path | None = None,
    ) -> None:
        shape = KvShape(loaded.layers, loaded.kv_heads, loaded.head_dim, block_size, loaded.dtype)
        if (num_blocks is None) == (kv_bytes is None):
            raise ConfigError("give the KV pool's size either as num_blocks or as kv_bytes")
        if max_model_len is not None and max_model_len > loaded.max_positions:
            raise ConfigError(
                f"max_model_len {max_model_len} is more than the model's {loaded.max_positions}: lower it"
            )
        self.num_blocks = num_blocks if num_blocks is not None else shape.blocks_in(kv_bytes or 0)
        self.block_size = block_size
        self.max_model_len = max_model_len or loaded.max_positions
        self.max_num_seqs = max_num_seqs
        self.model_name = loaded.name
        self.dtype_name = str(loaded.dtype).removeprefix("torch.")
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.threads = threads or available_cores()
        self.forward_seconds = 0.0
        self.sampling_seconds = 0.0
        self._loaded = loaded
        numba = numba_attention and loaded.device.type == "cpu" and loaded.dtype in NUMBA_DTYPES
        self.host_blocks = host_blocks if host_kv_bytes is None else shape.blocks_in(host_kv_bytes, "host_kv_memory")
        self.disk_blocks = disk_blocks if disk_kv_bytes is None else shape.blocks_in(disk_kv_bytes, "disk_kv_memory")
        self._host: HostPool | None = None
        with one_thread():
            kv = PagedKv(shape, self.num_blocks, loaded.device)
            if self.host_blocks or self.disk_blocks:
                self._host = HostPool(kv, self.host_blocks, self.disk_blocks, disk_path)
        self._slots = Slots(max_num_seqs, -(-self.max_model_len // block_size), kv, loaded.device, numba)
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size)
        self._sampler = Sampler(self._grammars, loaded.vocab_size, loaded.eos_token_ids, max_num_seqs, loaded.device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tidegate-step", initializer=self._start_worker)
        if numba:
            self._worker.submit(self._compile_kernels).result()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; ConfigError where the model was loaded without one."""
        if self._loaded.tokenizer is None:
            raise ConfigError(f"the model {self.model_name} has no tokenizer")
        return self._loaded.tokenizer

    def check_schema(self, schema: Mapping[str, object]) -> None:
        """Raise InputError unless `schema` can constrain an output. May be called from any thread."""
        self._grammars.check(schema)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a non-empty plan; see `engine.executor.Executor`."""
        swaps = plan.swapped_out or plan.swapped_in
        return self._worker.submit(self._step_with_copies if swaps else self._step, plan)

    def close(self) -> None:
        """Finish what was submitted, then stop the worker and give the swap file back. Idempotent."""
        self._worker.shutdown(wait=True)
        if self._host is not None:
            self._host.close()

    def _start_worker(self) -> None:
        """Thread counts belong to the calling thread in OpenMP, so the worker sets its own."""
        import numba

        torch.set_num_threads(self.threads)
        numba.set_num_threads(min(self.threads, numba.config.NUMBA_NUM_THREADS))

    def _compile_kernels(self) -> None:
        """Compile now rather than within somebody's first token."""
        loaded = self._loaded
        for kernels in (feedforward, norm, selfattention):
            kernels.warm_up(loaded.dtype)
        heads = loaded.model.config.num_attention_heads
        q = torch.zeros((1, heads, loaded.head_dim), dtype=loaded.dtype)
        keys, values = self._slots.kv.layer(0)
        attention.decode_numba(
            q, keys, values, self._slots.tables, self._slots.positions, np.zeros(1, np.int64), 1.0, 0, 0.0
        )

    @property
    def copied_bytes(self) -> int:
        """Bytes of KV that were copied to the host and back so far."""
        return 0 if self._host is None else self._host.copied_bytes

    @property
    def copy_seconds(self) -> float:
        """Seconds that those copies took, also where they ran beside compute."""
        return 0.0 if self._host is None else self._host.copy_seconds

    def _step_with_copies(self, plan: StepPlan) -> StepResult:
        """A step that moves KV blocks, and perhaps computes nothing."""
        if self._host is None:
            raise ValueError(f"step {plan.step} swaps, and there is no host pool")
        self._host.start(plan)
        if plan.decodes or plan.chunks:
            result = self._step(plan)
        else:
            self._apply_deltas(plan)
            result = StepResult(())
        copied = self._host.finish()
        result.failed_copies, result.copy_seconds = copied.failed, copied.seconds
        return result

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._apply_deltas(plan)
        packed = self._slots.pack(plan)
        started = time.perf_counter()
        output = self._loaded.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            logits_to_keep=packed.logit_rows,
            paged=packed.batch,
        )
        computed = time.perf_counter()
        self._slots.advance(plan)
        sampled = self._sampler.sample(output.logits[0], packed.emit_slots)
        self._slots.last_token.index_copy_(0, packed.emit_index, sampled.tokens)
        tokens = sampled.tokens.tolist()
        self.forward_seconds += computed - started
        ended = time.perf_counter()
        self.sampling_seconds += ended - computed
        return StepResult(tokens, sampled.finished, sampled.details, seconds=ended - began)

    def _apply_deltas(self, plan: StepPlan) -> None:
        for slot in plan.left:
            self._sampler.leave(slot)
        for join in plan.joined:
            self._slots.join(join)
            self._sampler.join(join)
        self._slots.grow(plan.growth)
