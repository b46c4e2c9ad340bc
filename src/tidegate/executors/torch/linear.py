"""Projections, made faster at load: neighbours that read the same input are fused, weights are prepacked.

The model's source is not touched: only `nn.Linear` modules are exchanged, and every output stays what
it was (up to the order of a sum).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

ROWS_PACKED_FOR = 16


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a fast product for `dtype` here, so that its weight layout pays."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """A projection whose weight lies in oneDNN's own layout, reordered once at load.

    A product of few rows then runs at the speed of the multipliers rather than of repacking:
    `[.., in] -> [.., out]`, no rows allowed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_PACKED_FOR)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class HeldProduct:
    """A fused product while its layer takes it apart; apart from the module, whose attributes are slow to set."""

    __slots__ = ("input", "parts")

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.parts: Sequence[torch.Tensor] = ()


class FusedFirst(nn.Module):
    """Stands in for the first of several projections of one input: computes all, returns its own part."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self.sizes = sizes
        self._last = len(sizes) - 1
        self._held = HeldProduct()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x, 0)

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Part `index` of the product with `x`, computed at the first call with this very tensor.

        The last part lets go of input and product, so that neither outlives its layer.
        """
        held = self._held
        if x is not held.input:
            held.input, held.parts = x, torch.split_with_sizes(self.linear(x), self.sizes, -1)
        part = held.parts[index]
        if index == self._last:
            held.input, held.parts = None, ()
        return part


class FusedPart(nn.Module):
    """Stands in for a later projection of the same input; the product lies at the first."""

    def __init__(self, first: FusedFirst, index: int) -> None:
        super().__init__()
        self._first = (first,)  # in a tuple, so that the module is registered once
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._first[0].part(x, self._index)


def fuse_projections(model: nn.Module) -> int:
    """Fuse query/key/value and gate/up projections in place; returns the number of groups fused."""
    fused = 0
    for module in model.modules():
        for names in FUSED_GROUPS:
            parts = [getattr(module, name, None) for name in names]
            if all(type(p) is nn.Linear for p in parts) and _joinable(parts):
                _fuse(module, names, parts)
                fused += 1
    return fused


def _joinable(parts: list[nn.Linear]) -> bool:
    return len({(p.in_features, p.bias is None) for p in parts}) == 1


def _fuse(module: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    sizes = [p.out_features for p in parts]
    joined = nn.Linear(parts[0].in_features, sum(sizes), bias=parts[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat([p.weight for p in parts]), requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([p.bias for p in parts]), requires_grad=False)
    first = FusedFirst(joined, sizes)
    setattr(module, names[0], first)
    for index, name in enumerate(names[1:], start=1):
        setattr(module, name, FusedPart(first, index))


def prepack_projections(model: nn.Module) -> int:
    """Exchange every `nn.Linear` by a `PackedLinear` in place; returns how many.

    One that hangs in two places stays one.
    """
    packed: dict[nn.Module, PackedLinear] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                if child not in packed:
                    packed[child] = PackedLinear(child.weight, child.bias)
                setattr(module, name, packed[child])
    return len(packed)
