"""Loads a decoder model whose attention we can serve exactly, and refuses every other by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tidegate.errors import ConfigError, InputError, UnsupportedModel
from tidegate.executors.torch import attention
from tidegate.executors.torch.feedforward import exchange_feed_forward
from tidegate.executors.torch.hardware import native_dtype, one_thread, read_cpu_info
from tidegate.executors.torch.kvcache import KvShape
from tidegate.executors.torch.linear import can_prepack, fuse_projections, prepack_projections
from tidegate.executors.torch.norm import exchange_norms
from tidegate.executors.torch.selfattention import exchange_self_attention

ARCHITECTURES = frozenset(
    {
        "cohere2",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "glm4",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""Values of `model_type` that tests hold against plain transformers, sliding windows and soft-caps included."""

BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary scalings that look at the longest position of the batch: a request's output would depend on its neighbours."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to compute packed steps. Sizes are tokens unless named otherwise."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    dtype: torch.dtype
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]


def load_model(path: Path, *, name: str, dtype: str = "bfloat16", device: str = "cpu") -> LoadedModel:
    """Load the Hugging Face directory at `path`.

    dtype: "bfloat16", "float32", or "auto" for the one this CPU has instructions for.
    Raises UnsupportedModel for an architecture outside `ARCHITECTURES`, InputError for a directory
    that holds no usable model.
    """
    config = read_config(path)
    check_architecture(config)
    torch_device = torch.device(device)
    chosen = choose_dtype(dtype, torch_device)
    try:
        with quiet_transformers(), one_thread():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=chosen, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{path} holds no usable model: {first_line(error)}") from error
    return prepare_model(model.to(torch_device), tokenizer, name=name)


def prepare_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name: str, pack: bool = True
) -> LoadedModel:
    """Make a transformers model ready for packed steps: our attention, fused and prepacked projections, one-pass norms.

    Changes `model` in place. `pack=False` keeps its own projections and norms (the tests' slow twin).
    """
    config = model.config
    check_architecture(config)
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model.set_attn_implementation(attention.NAME)
    model.eval().requires_grad_(False)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if pack:
        with one_thread():
            fuse_projections(model)
            exchange_self_attention(model, KvShape(config.num_hidden_layers, kv_heads, head_dim, 16, model.dtype))
            exchange_feed_forward(model)
            exchange_norms(model)
            if can_prepack(model.dtype, model.device):
                prepack_projections(model)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        dtype=model.dtype,
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def read_config(path: Path) -> PreTrainedConfig:
    """The model's configuration; InputError if the directory has none that transformers knows."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} holds no model that transformers knows: {first_line(error)}") from error


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel, naming what is in the way, unless the model can be served exactly."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture '{kind}' is not supported; use one of: {', '.join(sorted(ARCHITECTURES))}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "quantised weights are not supported; use the model's bfloat16 or float32 weights, or a GGUF file"
        )
    bad = _rope_types(getattr(config, "rope_parameters", None)) & BATCH_DEPENDENT_ROPE
    if bad:
        raise UnsupportedModel(
            f"rotary scaling '{min(bad)}' depends on the other requests of a batch; use a model or config without it"
        )


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number format by its name; "auto" is bfloat16, but float32 on a CPU without bfloat16 instructions."""
    if dtype == "auto":
        return native_dtype(read_cpu_info()) if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype '{dtype}' is unknown; use auto, {' or '.join(sorted(DTYPES))}")
    return DTYPES[dtype]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal; errors still show."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    gguf_bar = modeling_gguf_pytorch_utils.tqdm
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm  # its own bar does not ask whether bars are on
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """An exception's first line, for a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rope_types(parameters: Any) -> set[str]:
    """Every `rope_type` in a config's rotary parameters, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    found = {str(v) for k, v in parameters.items() if k in ("rope_type", "type")}
    for value in parameters.values():
        found |= _rope_types(value)
    return found


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
