"""The first requests, which nobody waits for: they compile kernels and touch memory."""

from __future__ import annotations

from tidegate.core.request import Request
from tidegate.engine.loop import Engine
from tidegate.engine.output import OutputState
from tidegate.engine.sampling import SamplingParams
from tidegate.server.text import Vocabulary

_PROMPT_TOKENS = 48
_OUTPUT_TOKENS = 4
_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, seed=0),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logprobs=2),
    SamplingParams(json_schema={"type": "object"}),
)


async def warm_up(engine: Engine, vocabulary: Vocabulary, pool_tokens: int) -> None:
    """Run one short request for every way of sampling, so that the first client's is not slow.

    They are cut to what the model and a KV pool of `pool_tokens` tokens take, and never refused for their size.
    Observers that should not count them are added afterwards.
    """
    room = min(vocabulary.max_model_len, pool_tokens)
    outputs = max(1, min(_OUTPUT_TOKENS, room - 1))
    length = max(1, min(_PROMPT_TOKENS, room - outputs))
    prompt = [token % vocabulary.vocab_size for token in range(100, 100 + length)]
    for number, params in enumerate(_WAYS):
        request = Request(
            f"warm-up-{number}",
            token_ids=prompt,
            max_tokens=outputs,
            arrival=engine.clock.now(),
            cache_salt=f"warm-up-{number}",
            handle=OutputState(params, vocabulary.backend),
        )
        async for _ in await engine.submit([request]):
            pass
