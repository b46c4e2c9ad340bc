"""One-pass norms against the models' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.executors.reference import tiny_pair
from tidegate.executors.torch.norm import OnePassNorm, exchange_norms
from tidegate.executors.torch.onepass import ONE_THREAD_VALUES, TOLERANCE


class ShiftedNorm(nn.Module):
    """Adds one to its weight, as some architectures do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1.0 + self.weight)


@given(
    rows=st.integers(0, 5) | st.just(ONE_THREAD_VALUES // 16 + 3),
    width=st.sampled_from([1, 16, 17, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_one_pass_says_what_the_models_own_norm_says(
    rows: int, width: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = LlamaRMSNorm(width, eps=1e-5)
    own.weight = nn.Parameter(torch.randn(width, generator=generator), requires_grad=False)
    own = own.to(dtype)
    x = (torch.randn((1, rows, width), generator=generator) * scale).to(dtype)
    ours = OnePassNorm(own.weight, own.variance_epsilon)(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, own(x), atol=1e-6, rtol=TOLERANCE[dtype])


def test_a_strided_input_is_read_where_it_lies() -> None:
    x = torch.randn(3, 8, 16).transpose(0, 1)
    own = LlamaRMSNorm(16)
    torch.testing.assert_close(OnePassNorm(own.weight, own.variance_epsilon)(x), own(x))


def test_norms_of_another_kind_stay() -> None:
    model = nn.ModuleDict({"shifted": ShiftedNorm(16), "plain": LlamaRMSNorm(16), "layer": nn.LayerNorm(16)})
    assert exchange_norms(model) == 1
    assert [type(m) for m in model.values()] == [ShiftedNorm, OnePassNorm, nn.LayerNorm]


@pytest.mark.parametrize(("kind", "exchanged"), [("llama", 9), ("qwen3", 17), ("gemma2", 0)])
def test_which_norms_of_a_model_are_exchanged(kind: str, exchanged: int) -> None:
    """Query and key norms too; Gemma's add one to the weight."""
    _, loaded = tiny_pair(kind)
    assert sum(isinstance(m, OnePassNorm) for m in loaded.model.modules()) == exchanged
