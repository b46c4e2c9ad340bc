"""Why a request waited, was chosen, or was evicted: a bounded diary per request, folded from events.

Nothing here keeps a request alive: of those that ended only plain facts remain.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

from tidegate.core.events import Admitted, Arrived, Finished, Preempted, Rejected, Restored
from tidegate.core.request import Request

Decision: TypeAlias = Admitted | Arrived | Finished | Preempted | Rejected | Restored
Line: TypeAlias = tuple[float, type[Decision], tuple[Any, ...]]

LINES = 64
ENDED = 512


class Diary:
    """The last `LINES` decisions about each live request and about the last `ENDED` that ended."""

    def __init__(self) -> None:
        self._live: dict[str, list[Line]] = {}
        self._ended: OrderedDict[str, tuple[tuple[Any, ...], list[Line]]] = OrderedDict()

    def open(self, event: Arrived) -> None:
        """A request begins."""
        self._live[event.request.id] = [remembered(event)]

    def note(self, event: Admitted | Restored | Preempted) -> None:
        """Remember what was decided; it is put into words only when somebody asks."""
        lines = self._live[event.request.id]
        lines.append(remembered(event))
        if len(lines) > LINES:
            del lines[0]

    def close(self, event: Finished | Rejected) -> None:
        """A request ended, or never began; the one that ended longest ago is forgotten for it."""
        r = event.request
        lines = self._live.pop(r.id, None) or []
        lines.append(remembered(event))
        self._ended[r.id] = (_facts(r), lines)
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def tell(self, request_id: str, live: Request | None) -> dict[str, Any] | None:
        """What is known of a request and every decision about it, oldest first; None if it is not known."""
        if live is not None:
            facts, lines = _facts(live), self._live[request_id]
        elif request_id in self._ended:
            facts, lines = self._ended[request_id]
        else:
            return None
        told = dict(zip(_FACTS, facts, strict=True))
        told["status"] = told["status"].value
        told["decisions"] = [{"time": line[0], **words(line)} for line in lines]
        return told


_FACTS = (
    "request_id",
    "status",
    "class",
    "tenant",
    "priority",
    "tier",
    "score",
    "prompt_tokens",
    "computed_tokens",
    "output_tokens",
    "max_tokens",
    "cached_tokens",
    "preemptions",
)


def _facts(r: Request) -> tuple[Any, ...]:
    key = r.key
    return (
        r.id,
        r.status,
        r.slo_class,
        r.tenant,
        r.priority,
        None if key is None else key.tier,
        None if key is None else key.score,
        r.prompt_tokens,
        r.computed,
        r.emitted,
        r.target or r.max_tokens,
        r.cached_tokens,
        r.preemptions,
    )


def seated(kind: type[Decision], why: object) -> str:
    """The reason of a decision about a seat, in one sentence."""
    return f"back after preemption, {why}" if kind is Restored else str(why)


def remembered(event: Decision) -> Line:
    """A decision without its request, and an end without its timing, whose gaps are many."""
    rest = (event.reason, event.missed) if isinstance(event, Finished) else event[2:]
    return event.now, type(event), rest


def words(line: Line) -> dict[str, Any]:
    """A decision in words."""
    _, kind, rest = line
    if kind is Arrived:
        return {"event": "arrived"}
    if kind is Rejected:
        return {"event": "rejected", "reason": rest[0].value, "message": rest[1]}
    if kind is Finished:
        return {"event": "finished", "reason": rest[0].value, "missed": list(rest[1])}
    names = {
        Admitted: ("step", "cached_tokens", "reason"),
        Restored: ("step", "kept_tokens", "recomputed_tokens", "reason"),
        Preempted: ("step", "mode", "reason"),
    }[kind]
    rest = (*rest[:-1], seated(kind, rest[-1]))
    return {"event": kind.__name__.lower(), **dict(zip(names, rest, strict=True))}
