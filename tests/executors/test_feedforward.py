"""Feed-forward blocks in one pass against plain torch operations and the models' own blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executors.reference import tiny_pair
from tidegate.executors.torch.feedforward import OnePassFeedForward, gate_kernels
from tidegate.executors.torch.kernels import as_array
from tidegate.executors.torch.onepass import TOLERANCE


@given(
    rows=st.integers(0, 9),
    width=st.sampled_from([1, 16, 33]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    kernel=st.sampled_from([0, 1]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_gates_are_what_torch_makes_of_them(
    rows: int, width: int, dtype: torch.dtype, scale: float, kernel: int, seed: int
) -> None:
    both = (torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    out = torch.empty((rows, width), dtype=dtype)
    gate_kernels(dtype == torch.bfloat16)[kernel](as_array(out), as_array(both))
    gate, up = both.split(width, dim=-1)
    torch.testing.assert_close(out, F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "exchanged"),
    [
        ("llama", {}, 4),
        ("llama", {"mlp_bias": True}, 4),
        ("llama", {"hidden_act": "gelu"}, 0),
        ("gemma2", {}, 0),
        ("cohere2", {}, 4),
        ("phi3", {}, 0),
    ],
)
def test_only_blocks_that_agree_are_exchanged(kind: str, changes: dict[str, object], exchanged: int) -> None:
    """Other activations stay, and so does a block whose projections are one already."""
    _, loaded = tiny_pair(kind, **changes)
    assert sum(isinstance(m, OnePassFeedForward) for m in loaded.model.modules()) == exchanged
