"""What plain transformers would say, and tiny random models to ask."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tidegate.executors.torch.model import LoadedModel, prepare_model

NEAR_TIE = 1e-3


def tiny_config(kind: str, **changes: Any) -> Any:
    """A four-layer model of architecture `kind` with 16-wide heads in groups of two."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(kind, **{**sizes, **changes})


def tiny_pair(
    kind: str, *, pack: bool = True, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[PreTrainedModel, LoadedModel]:
    """The same random model twice: plain eager transformers in float32, and ours in `dtype`."""
    torch.manual_seed(7)
    config = tiny_config(kind, **changes)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    ours.load_state_dict(plain.state_dict())
    ours.to(dtype)
    return plain, prepare_model(ours, None, name=f"tiny-{kind}", pack=pack)


@torch.inference_mode()
def assert_greedy(plain: PreTrainedModel, prompt: list[int], outputs: list[int]) -> None:
    """Every output is what plain greedy generation says after the tokens before it.

    Where the reference's two best logits differ by less than `NEAR_TIE` either is right, and the
    comparison goes on from the one taken.
    """
    tokens = torch.tensor([prompt + outputs])
    logits = plain(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best, ids = logits.topk(2, dim=-1)
    for index, taken in enumerate(outputs):
        tie = best[index, 0] - best[index, 1] < NEAR_TIE
        right = ids[index].tolist() if tie else [int(ids[index, 0])]
        assert taken in right, (
            f"output {index} is {taken}, transformers says {right} (gap {best[index, 0] - best[index, 1]:.2e})"
        )
