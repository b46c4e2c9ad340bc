"""Model shapes: what a model's weights, KV cache and arithmetic amount to, from the numbers of its config.json.

The shape is that of the Llama family: a gated MLP (three matrices a layer), query, key, value and output
projections, no experts. Norms and biases, under 0.1 % of the parameters, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.errors import InputError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One dense decoder.

    hidden, intermediate: widths of the residual stream and of the MLP
    heads, kv_heads:      query heads, and key/value heads (equal without grouped-query attention)
    head_dim:             width of one head
    dtype_bytes:          bytes of one parameter and of one KV number
    tied:                 input embedding and output head are one matrix

    Raises InputError for numbers that no model can have.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "dtype_bytes"):
            if getattr(self, field) < 1:
                raise InputError(f"{self.name}: {field} must be at least 1, not {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.name}: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly")

    @property
    def linear_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but the embedding and the output head."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters, without norms and biases."""
        return self.linear_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def attention_flops(self) -> int:
        """FLOPs of one query token over one key: its product with the key, and the value weighed by it."""
        return 4 * self.layers * self.heads * self.head_dim


# From each model's published config.json.
MODELS = {
    m.name: m
    for m in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    )
}
ALIASES = {"llama-70b": "llama-3.1-70b"}


def find_model(name: str) -> ModelShape:
    """The preset of that name or alias, in any case. Raises InputError that lists the known names."""
    lower = name.lower()
    known = MODELS.get(ALIASES.get(lower, lower))
    if known is None:
        raise InputError(f"no model shape {name!r}: known are {', '.join([*MODELS, *ALIASES])}")
    return known
