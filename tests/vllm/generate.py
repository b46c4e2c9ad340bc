"""Runs a fixed mixture of requests on vLLM's real engine and prints what every client got, as JSON.

usage: python tests/vllm/generate.py MODEL [SCHEDULER CONFIG]

Prompts share prefixes, are cut into chunks, and are too many for the KV pool, so that some are preempted; some are
structured, some are several samples of one prompt, some leave half-way. Everything is greedy in float32.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

SCHEMA = {"type": "object", "properties": {"sea": {"type": "string", "maxLength": 8}}, "required": ["sea"]}
WORDS = ["tide", "moon", "sea", "wave", "shore", "gravity", "water", "salt", "wind", "storm", "harbour", "boat"]


def requests() -> list[dict[str, Any]]:
    """The mixture: prompt, sampling, priority, after how many tokens its client leaves."""
    rng = random.Random(5)
    shared = " ".join(rng.choice(WORDS) for _ in range(70))
    found: list[dict[str, Any]] = []
    for n in range(28):
        own = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5, 90)))
        kind = 2 if n < 12 else 1 if n < 18 else 0
        found.append(
            {
                "prompt": f"{shared if n % 3 == 0 else ''} {own}. And so",
                "max_tokens": rng.randrange(8, 60) + 60 * (kind == 2),
                "n": 2 if n % 9 == 4 else 1,
                "structured": n % 7 == 5,
                "priority": (0, 5, 10)[kind],
                "class": ("interactive", "offline", "batch")[kind],
                "leaves": 6 if n % 10 == 8 else None,
                "after": (1.5 + 0.3 * (n - 18), 0.8, 0.0)[kind],
            }
        )
    return found


async def client(engine: AsyncLLM, name: str, told: dict[str, Any]) -> list[Any]:
    """The tokens of each sample with the gap of its two best log-probabilities, and how it ended."""
    await asyncio.sleep(told["after"])
    params = SamplingParams(
        temperature=0.0 if told["n"] == 1 else 1.0,  # vLLM takes several greedy samples only in this disguise
        top_k=1,
        max_tokens=told["max_tokens"],
        n=told["n"],
        logprobs=2,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if told["structured"] else None,
        extra_args={"slo_class": told["class"]},
    )
    samples: list[list[Any]] = [[] for _ in range(told["n"])]
    ends: list[Any] = [None] * told["n"]
    stream = engine.generate(told["prompt"], params, name, priority=told["priority"])
    async for output in stream:
        for sample in output.outputs:
            for token, logprobs in zip(sample.token_ids, sample.logprobs or (), strict=False):
                best = sorted((p.logprob for p in logprobs.values()), reverse=True)
                samples[sample.index].append((token, best[0] - best[1] if len(best) > 1 else 9.0))
            ends[sample.index] = sample.finish_reason or ends[sample.index]
        if told["leaves"] is not None and len(samples[0]) >= told["leaves"]:
            await stream.aclose()
            break
    return [samples, ends]


async def main(model: str, scheduler: str | None, config: str | None) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=96,
            block_size=32,
            num_gpu_blocks_override=20,
            enforce_eager=True,
            scheduler_cls=scheduler,
            additional_config={"tidegate": config} if config else {},
            disable_log_stats=False,
        )
    )
    told = requests()
    got = await asyncio.gather(*(client(engine, f"r{n}", r) for n, r in enumerate(told)))
    from prometheus_client import REGISTRY

    counted = {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    }
    print("RESULT" + json.dumps({"clients": got, "preemptions": sum(counted.values())}))
    engine.shutdown()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(main(arguments[0], *(arguments[1:] or (None, None))))
