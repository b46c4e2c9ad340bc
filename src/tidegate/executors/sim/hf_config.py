"""A model's shape from its Hugging Face config.json, and a clear no for models that the formula does not describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.errors import InputError
from tidegate.executors.sim.models import ModelShape

# Keys of models whose cost has another form: priced as a dense decoder they would come out wrong, not rough.
_OTHER_FORMS = {
    "num_experts": "it has experts",
    "num_local_experts": "it has experts",
    "n_routed_experts": "it has experts",
    "kv_lora_rank": "its attention keeps latents instead of keys and values",
    "linear_num_key_heads": "its attention is partly linear",
    "mamba_d_state": "it is partly recurrent",
    "quantization_config": "its weights are quantised",
}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a parsed config.json describes; `name` is what messages and output call it.

    Raises InputError for a missing or malformed field, and for models that are no dense decoder.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):  # the language part of a model that also sees or hears
        config = {**config, **text}
    for key, reason in _OTHER_FORMS.items():
        if config.get(key):
            raise InputError(f"{name}: the cost model is for dense decoders, and {reason} ({key})")
    hidden, heads = _whole(config, name, "hidden_size"), _whole(config, name, "num_attention_heads")
    return ModelShape(
        name,
        layers=_whole(config, name, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, name, "num_key_value_heads", heads),
        head_dim=_whole(config, name, "head_dim", hidden // heads),
        intermediate=_whole(config, name, "intermediate_size"),
        vocab=_whole(config, name, "vocab_size"),
        dtype_bytes=_dtype_bytes(config, name),
        tied=config.get("tie_word_embeddings") is True,
    )


def _whole(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise InputError(f"{name}: no {key}; give the shape by options instead (--layers, --hidden, ...)")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}: {key} must be a whole number above 0, not {value!r}")
    return value


def _dtype_bytes(config: Mapping[str, Any], name: str) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _DTYPE_BYTES:
        raise InputError(f"{name}: dtype {dtype!r} is none of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype.removeprefix("torch.")]
