"""A steady load on a gateway while some of its engines fail, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.gateway.backends import Backend, backends
from tests.gateway.gateways import Answer, Running, gateway

FAULTS = ("cut", "hang", "slow", "reset", "503", "restart")
SETTLED = 2.0
"""Seconds after which a fault has to be known."""


@dataclass
class Outcome:
    """What became of all requests.

    answers:  of all requests that got one; `seconds` are those that each took
    lost:     why others got none
    settled:  requests that came when the fault was `SETTLED` seconds old, until it ended
    to_bad:   times that engines which fail were sent one, in that time
    attempts: the most that one request took
    """

    fault: str
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    settled: int = 0
    to_bad: int = 0
    attempts: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.complete]

    @property
    def unended(self) -> int:
        """Requests without an answer that ends as answers may."""
        return len(self.lost) + sum(not answer.terminal for answer in self.answers)

    @property
    def repeated(self) -> int:
        """Streams in which something came twice, or out of order."""
        return sum(not answer.begins() for answer in self.answers if answer.status == 200)


async def fault_load(fault: str, *, rate: float, seconds: float, first_token_seconds: float, seed: int = 0) -> Outcome:
    """`rate` requests a second for `seconds`; from a quarter of that to three quarters the fault is on.

    One of four engines has it. "mixed": of nine engines six have one each.
    """
    faults = FAULTS if fault == "mixed" else (fault,)
    n = 9 if fault == "mixed" else 4
    options = {
        "route": "joint",
        "first_token_seconds": first_token_seconds,
        "stall_seconds": 5.0,
        "connect_seconds": 1.0,
    }
    async with (
        backends(n, events=8, first=0.02, gap=0.005) as behind,
        gateway(behind, **options) as running,
    ):
        load = _Load(Outcome(fault), running, behind[: len(faults)], rate, seconds, Random(seed))
        await asyncio.gather(load.run(), *(_fail(b, f, seconds) for b, f in zip(behind, faults, strict=False)))
        return load.outcome


async def _fail(backend: Backend, fault: str, seconds: float) -> None:
    await asyncio.sleep(seconds / 4)
    if fault == "restart":
        await backend.stop()
        await asyncio.sleep(seconds / 2)
        await backend.start()
        return
    backend.mode = fault
    await asyncio.sleep(seconds / 2)
    backend.mode = "ok"


class _Load:
    def __init__(
        self, outcome: Outcome, running: Running, bad: Sequence[Backend], rate: float, seconds: float, random: Random
    ) -> None:
        self.outcome = outcome
        self._running = running
        self._bad = {backend.name for backend in bad}
        self._rate = rate
        self._seconds = seconds
        self._random = random
        self._prompts = [f"{i} " + "Everybody asks about tides. " * 40 for i in range(20)]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        begin = due = loop.time()
        known, over = begin + self._seconds / 4 + SETTLED, begin + self._seconds * 3 / 4
        seen: list[int] = []  # how many choices there were, at each request of that time
        async with asyncio.TaskGroup() as group:
            while (due := due + self._random.expovariate(self._rate)) < begin + self._seconds:
                await asyncio.sleep(max(0.0, due - loop.time()))
                if known <= loop.time() < over:
                    seen.append(len(self._running.ends.choices))
                group.create_task(self._one())
        outcome, ends = self.outcome, self._running.ends
        outcome.settled = len(seen)
        outcome.to_bad = sum(name in self._bad for name in ends.sent_to[seen[0] : seen[-1]]) if seen else 0
        outcome.attempts = max(end.attempts for end in ends.ends)

    async def _one(self) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            answer = await self._running.stream(prompt=self._random.choice(self._prompts))
        except OSError as error:
            self.outcome.lost.append(str(error))
        else:
            self.outcome.answers.append(answer)
            self.outcome.seconds.append(loop.time() - begin)
