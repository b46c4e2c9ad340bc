"""Self-attention in one pass against the models' own. Tokens of all architectures: test_architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.executors.reference import tiny_pair
from tidegate.executors.torch.attention import ChunkSpan, StepBatch
from tidegate.executors.torch.kvcache import KvShape, PagedKv
from tidegate.executors.torch.linear import PackedLinear
from tidegate.executors.torch.model import LoadedModel
from tidegate.executors.torch.onepass import TOLERANCE
from tidegate.executors.torch.selfattention import Asked, OnePassSelfAttention


def one_pass_layers(loaded: LoadedModel) -> list[OnePassSelfAttention]:
    return [m for m in loaded.model.modules() if isinstance(m, OnePassSelfAttention)]


@pytest.mark.parametrize(
    ("kind", "exchanged"),
    [("llama", 4), ("mistral", 4), ("qwen2", 4), ("granite", 4), ("gemma2", 4), ("smollm3", 3)]
    + [(kind, 0) for kind in ("cohere2", "glm4", "olmo2", "qwen3", "exaone4", "phi3")],
)
def test_only_layers_that_agree_are_exchanged(kind: str, exchanged: int) -> None:
    """Others rotate neighbours, norm queries and keys, or have one projection; one layer of smollm3 does not rotate."""
    _, loaded = tiny_pair(kind)
    assert len(one_pass_layers(loaded)) == exchanged


def test_what_a_layer_asks_of_attention_is_noted() -> None:
    _, mistral = tiny_pair("mistral", sliding_window=7)
    assert {layer._asked for layer in one_pass_layers(mistral)} == {Asked(16**-0.5, 7, 0.0)}
    _, gemma = tiny_pair("gemma2", sliding_window=9, attn_logit_softcapping=5.0, query_pre_attn_scalar=4)
    assert [layer._asked for layer in one_pass_layers(gemma)] == [Asked(0.5, 9, 5.0), Asked(0.5, 0, 5.0)] * 2


class Own(nn.Module):
    """Notes that it was asked."""

    def forward(self, **arguments: Any) -> dict[str, Any]:
        return arguments


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (16, torch.bfloat16)])
def test_a_rotation_it_cannot_do_is_left_to_the_models_own(width: int, dtype: torch.dtype) -> None:
    _, loaded = tiny_pair("llama")
    layer = one_pass_layers(loaded)[0]
    layer.own = Own()
    angles = (torch.zeros((1, 3, width), dtype=dtype),) * 2
    paged: Any = type("Paged", (), {"kv": type("Kv", (), {"shape": type("Shape", (), {})})})
    paged.kv.shape.head_dim, paged.kv.shape.dtype = 16, torch.float32
    hidden = torch.zeros((1, 3, 64))
    asked: Any = layer(hidden_states=hidden, position_embeddings=angles, paged=paged, attention_mask=None)
    assert asked["position_embeddings"] is angles
    assert asked["hidden_states"] is hidden


def test_projections_that_hang_in_two_places_are_packed_once() -> None:
    _, loaded = tiny_pair("llama")
    for layer in one_pass_layers(loaded):
        assert isinstance(layer.qkv, PackedLinear)
        assert layer.own.q_proj.linear is layer.qkv
        assert layer.own.o_proj is layer.o_proj


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_many_rows_by_all_threads_are_what_few_rows_by_one_are(dtype: torch.dtype) -> None:
    """A long chunk crosses the limit from which all threads work; its logits equal those of the model's own layers."""
    logits = []
    for pack in (True, False):
        _, loaded = tiny_pair("llama", dtype=dtype, pack=pack)
        logits.append(chunk_logits(loaded, 300))
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(logits[0], logits[1], rtol=tolerance, atol=tolerance * float(logits[1].abs().max()))


@torch.inference_mode()
def chunk_logits(loaded: LoadedModel, rows: int) -> torch.Tensor:
    """Logits of one chunk of `rows` tokens from an empty KV pool."""
    kv = PagedKv(KvShape(loaded.layers, loaded.kv_heads, loaded.head_dim, 16, loaded.dtype), 32, loaded.device)
    none = np.zeros(0, np.int64)
    chunk = ChunkSpan(0, rows, 0, torch.arange(-(-rows // 16)))
    batch = StepBatch(kv, none, np.zeros((0, 1), np.int32), none, torch.arange(rows), [chunk], numba=True)
    ids = torch.arange(rows)[None] % 300 + 3
    output = loaded.model(input_ids=ids, position_ids=torch.arange(rows)[None], use_cache=False, paged=batch)
    return output.logits[0].float()
