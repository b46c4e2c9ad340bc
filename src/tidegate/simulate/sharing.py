"""Synthetic workloads whose prompts share prefixes: families of prompts, and conversations of several turns.

Their `hash_ids` name what is shared in blocks of `block` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Annotated

import numpy as np
from pydantic import Field, PlainValidator

from tidegate.simulate.arrivals import refuse_too_many
from tidegate.simulate.lengths import LengthDraw, Lengths, parse_count, parse_prompt
from tidegate.simulate.seeds import Decides, SeedKey, stream
from tidegate.simulate.synthetic import Count, OpenLoop, Seconds, Times
from tidegate.simulate.workload import Workload, WorkloadRequest

BLOCK_TOKENS = 16


class Families(OpenLoop):
    """Poisson arrivals in `families` of prompts; those of a family begin with the same `prefix` tokens.

    prompt:  tokens after the prefix, each request's own
    zipf:    the family of rank k is asked in proportion to k**-zipf; 0 asks all alike
    block:   a prefix is shared by whole blocks of so many tokens; what is left of it counts as own
    """

    kind = "families"
    families: Count
    prefix: Annotated[LengthDraw, PlainValidator(parse_prompt)]
    zipf: Annotated[float, Field(ge=0, le=10)] = 1.0
    block: Count = BLOCK_TOKENS

    def workload(self, key: SeedKey) -> Workload:
        base = super().workload(key)
        rng = stream(key, Decides.SHARING)
        prefixes = self.prefix.sample(rng, self.families)
        weights = np.arange(1, self.families + 1) ** -self.zipf
        members = rng.choice(self.families, len(base), p=weights / weights.sum())
        blocks = prefixes // self.block
        ends = np.cumsum(blocks).tolist()
        ids = [tuple(range(end - n, end)) for end, n in zip(ends, blocks.tolist(), strict=True)]
        return replace(
            base,
            requests=tuple(
                replace(
                    request,
                    prompt_tokens=request.prompt_tokens + int(prefixes[family]),
                    hash_ids=ids[family],
                    hash_block_tokens=self.block,
                )
                for request, family in zip(base, members.tolist(), strict=True)
            ),
        )


class Sessions(OpenLoop):
    """Conversations that begin as a Poisson process; each turn's prompt is all that was said, and a new question.

    rate, count, duration: of conversations, not of requests
    turns:   how many a conversation has
    prompt:  tokens of each new question
    output:  tokens of each answer, which the next prompt holds too
    system:  tokens with which every conversation begins, the same for all
    think:   seconds from an answer's end to the next question
    tpot:    an answer is taken to last so many seconds a token. The load is open: the next question comes
             then, whether or not the answer really took as long
    context: a conversation ends before a turn whose prompt and answer would exceed so many tokens
    """

    kind = "sessions"
    turns: Annotated[Lengths, PlainValidator(parse_count)]
    think: Times
    tpot: Seconds = 0.0
    system: Annotated[int, Field(ge=0)] = 0
    context: Count = 1 << 20
    block: Count = BLOCK_TOKENS

    def workload(self, key: SeedKey) -> Workload:
        starts = self.arrivals(key)
        turns = self.turns.sample(stream(key, Decides.TURNS), len(starts))
        tenants = self.draw_tenants(key, len(starts))
        total = int(turns.sum())
        refuse_too_many(total)
        questions, answers = self.draw_lengths(key, total)
        thinking = self.think.sample(stream(key, Decides.THINKING), total)
        requests: list[WorkloadRequest] = []
        done, fresh = 0, self.system // self.block
        for start, n, tenant in zip(starts.tolist(), turns.tolist(), tenants, strict=True):
            own = slice(done, done + n)
            steps = zip(questions[own].tolist(), answers[own].tolist(), thinking[own].tolist(), strict=True)
            said = list(self._conversation(start, fresh, steps))
            requests += (replace(r, tenant=tenant) for r in said)
            fresh += len(said[-1].hash_ids) if said else 0
            done += n
        return Workload(self.kind, tuple(sorted(requests, key=attrgetter("arrival_s"))))

    def _conversation(
        self, start_s: float, fresh: int, steps: Iterator[tuple[int, int, float]]
    ) -> Iterator[WorkloadRequest]:
        """One conversation's turns; ids from `fresh` on name its own blocks, those below the system prompt's."""
        now, said, shared = start_s, self.system, self.system // self.block
        for question, answer, think_s in steps:
            prompt = said + question
            if prompt + answer > self.context:
                return
            blocks = -(-prompt // self.block)
            ids = (*range(shared), *range(fresh, fresh + blocks - shared))
            yield WorkloadRequest(now, prompt, answer, hash_ids=ids, hash_block_tokens=self.block)
            said = prompt + answer
            now += answer * self.tpot + think_s
