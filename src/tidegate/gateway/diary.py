"""What became of each request, and why: `/v1/gateway/explain/{id}`. Bounded, and without any text of prompts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.attempt import How
from tidegate.gateway.job import Job
from tidegate.gateway.proxy import End
from tidegate.routing.choice import Candidate, Choice

CANDIDATES = 16
"""Engines whose costs are told of each choice: the chosen one and the cheapest others."""


@dataclass(slots=True)
class Tried:
    """A choice of an engine for the request. `at` is seconds on the event loop's clock."""

    choice: Choice
    at: float
    failure: str = ""


@dataclass(slots=True)
class Entry:
    """One request."""

    tenant: str
    slo_class: str
    priority: int
    prompt_tokens: int
    arrival: float
    tried: list[Tried] = field(default_factory=list)
    first_token_at: float | None = None
    end: End | None = None
    ended_at: float | None = None


class Diary:
    """The last `limit` requests that came, ended or not. An `Observer` of the proxy."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def sent(self, job: Job, choice: Choice, attempt: int, now: float) -> None:
        """`job` goes to an engine, for the `attempt`-th time."""
        self._entry(job).tried.append(Tried(choice, now))

    def failed(self, job: Job, replica: str, how: How, reason: str, now: float) -> None:
        """The engine that has `job` failed it; another may be tried."""
        tried = self._entry(job).tried
        if tried:
            tried[-1].failure = reason or how.value

    def first_token(self, job: Job, now: float) -> None:
        """The first token of `job` came."""
        self._entry(job).first_token_at = now

    def ended(self, job: Job, end: End, now: float) -> None:
        """`job` has ended."""
        entry = self._entry(job)
        entry.end, entry.ended_at = end, now

    def tenant_of(self, job_id: str) -> str | None:
        """Whose request that was; None if it is not known (any more)."""
        entry = self._entries.get(job_id)
        return None if entry is None else entry.tenant

    def tell(self, job_id: str) -> dict[str, Any] | None:
        """All that is known of a request, ready for JSON; times are seconds since it came. None if it is not known."""
        entry = self._entries.get(job_id)
        if entry is None:
            return None
        told: dict[str, Any] = {
            "request_id": job_id,
            "tenant": entry.tenant,
            "class": entry.slo_class,
            "priority": entry.priority,
            "prompt_tokens": entry.prompt_tokens,
            "attempts": [_told(tried, entry) for tried in entry.tried],
        }
        if entry.tried:
            told["held_s"] = entry.tried[0].at - entry.arrival
            told["ttft"] = _ttft(entry)
        if entry.end is not None and entry.ended_at is not None:
            told["end"] = {
                "at_s": entry.ended_at - entry.arrival,
                "how": entry.end.how.value,
                "status": entry.end.status,
                "outputs": entry.end.outputs,
                "reason": entry.end.reason,
            }
        return told

    def _entry(self, job: Job) -> Entry:
        entry = self._entries.get(job.id)
        if entry is None:
            claim = job.claim
            entry = self._entries[job.id] = Entry(
                claim.tenant, claim.slo_class, claim.priority, job.view.prompt_tokens, job.arrival
            )
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)
        return entry


def _kept(choice: Choice) -> list[Candidate]:
    """The chosen one, then the others, the cheapest first."""
    candidates, chosen = choice.candidates, choice.replica.name
    return sorted(candidates, key=lambda c: (c.name != chosen, c.cost))[:CANDIDATES]


def _told(tried: Tried, entry: Entry) -> dict[str, Any]:
    kept = _kept(tried.choice)
    told: dict[str, Any] = {
        "replica": tried.choice.replica.name,
        "at_s": tried.at - entry.arrival,
        "candidates": [{**c._asdict(), "parts": dict(c.parts)} for c in kept],
    }
    left_out = len(tried.choice.considered) - len(kept)
    if left_out:
        told["candidates_left_out"] = left_out
    if tried.failure:
        told["failure"] = tried.failure
    return told


def _ttft(entry: Entry) -> dict[str, float | None]:
    """From the last engine that had it: as predicted, and as it was."""
    last = entry.tried[-1]
    seen = None if entry.first_token_at is None else entry.first_token_at - last.at
    return {"predicted_s": last.choice.expected_s, "actual_s": seen}
