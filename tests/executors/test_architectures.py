"""Every architecture on the allow-list is token-exact; everything else is refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.executors.driver import Driver
from tests.executors.reference import assert_greedy, tiny_config, tiny_pair
from tidegate.errors import UnsupportedModel
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.model import ARCHITECTURES, check_architecture

LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

SPREAD = {"tie_word_embeddings": False, "final_logit_softcapping": None}
"""Keeps random logits apart, so that a wrong window or soft-cap shows in the tokens."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}],
    "qwen3": [{}],
    "qwen3_moe": [{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 9}],
    "gemma2": [{"sliding_window": 9, "query_pre_attn_scalar": 2, "attn_logit_softcapping": 3.0, **SPREAD}],
    "gemma3_text": [{"sliding_window": 9, "query_pre_attn_scalar": 2, "layer_types": LAYERS, **SPREAD}],
    "phi3": [{"sliding_window": None}, {"sliding_window": 9}],
    "olmo2": [{}],
    "granite": [{"attention_multiplier": 0.3, "logits_scaling": 2.0}],
    "smollm3": [{}],
    "glm4": [{}],
    "cohere2": [{"sliding_window": 9, "layer_types": LAYERS, "logit_scale": 0.5}],
    "exaone4": [{"sliding_window": 9, "layer_types": LAYERS}],
}
CASES = [(kind, index) for kind, variants in VARIANTS.items() for index in range(len(variants))]


def test_each_allowed_architecture_has_a_case() -> None:
    assert set(VARIANTS) == ARCHITECTURES


@pytest.mark.parametrize(("kind", "index"), CASES, ids=[f"{kind}-{index}" for kind, index in CASES])
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "torch"])
def test_tokens_equal_plain_transformers(kind: str, index: int, numba: bool) -> None:
    """Chunks of seven, decodes beside prefills, contexts several sliding windows long."""
    plain, ours = tiny_pair(kind, **VARIANTS[kind][index])
    rng = random.Random(kind)
    executor = TorchExecutor(
        ours, block_size=8, num_blocks=40, max_num_seqs=4, max_model_len=96, threads=1, numba_attention=numba
    )
    try:
        free = rng.sample(range(40), 40)
        driver = Driver(executor, free, depth=2)
        prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (30, 3, 17)]
        works = []
        for number, prompt in enumerate(prompts):
            works.append(driver.add(str(number), prompt, 24))
            for _ in range(2):
                driver.step({w.id: 7 for w in works})
        driver.run(chunk=7)
        for prompt, work in zip(prompts, works, strict=True):
            assert len(work.outputs) == 24
            assert_greedy(plain, prompt, work.outputs)
    finally:
        executor.close()


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "gpt_oss", "mamba", "bamba", "llama4_text"])
def test_other_architectures_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        check_architecture(AutoConfig.for_model(kind))


def test_rotary_scaling_that_depends_on_the_batch_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        check_architecture(config)


def test_fused_and_prepacked_projections_change_nothing() -> None:
    """The same rows through the model's own projections give the same logits."""
    _, packed = tiny_pair("llama", attention_bias=True)
    _, own = tiny_pair("llama", attention_bias=True, pack=False)
    logits = []
    for loaded in (packed, own):
        layer = loaded.model.model.layers[0]
        x = torch.linspace(-1, 1, 5 * 64).reshape(1, 5, 64)
        attention = getattr(layer.self_attn, "own", layer.self_attn)
        parts = [getattr(attention, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
        parts += [layer.mlp(x), loaded.model.lm_head(x)]
        logits.append(torch.cat(parts, dim=-1))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-6, rtol=1e-5)
