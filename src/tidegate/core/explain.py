"""Why a request waited, was chosen, or was evicted: a bounded diary per request, folded from events."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from tidegate.core.events import Admitted, Arrived, Event, Finished, Preempted, Rejected, Restored
from tidegate.core.request import Request

LINES = 64
ENDED = 1024


class Diary:
    """The last `LINES` decisions about each live request and about the last `ENDED` that ended."""

    def __init__(self) -> None:
        self._live: dict[str, deque[dict[str, Any]]] = {}
        self._ended: OrderedDict[str, tuple[Request, deque[dict[str, Any]]]] = OrderedDict()

    def fold(self, event: Event) -> None:
        """Write down what `event` decided; steps that only compute are not decisions."""
        line = _line(event)
        if line is None:
            return
        r: Request = event.request  # type: ignore[union-attr]
        lines = self._live.setdefault(r.id, deque(maxlen=LINES))
        lines.append({"time": event.now, **line})
        if isinstance(event, Finished | Rejected):
            self._ended[r.id] = (r, self._live.pop(r.id))
            if len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    def lines(self, request_id: str) -> list[dict[str, Any]]:
        """The diary of a request, oldest first; empty if it is not known."""
        if request_id in self._live:
            return list(self._live[request_id])
        return list(self._ended[request_id][1]) if request_id in self._ended else []

    def ended(self, request_id: str) -> Request | None:
        """A request that ended not too long ago."""
        return self._ended[request_id][0] if request_id in self._ended else None


def _line(event: Event) -> dict[str, Any] | None:
    match event:
        case Arrived():
            return {"event": "arrived"}
        case Rejected(reason=reason, message=message):
            return {"event": "rejected", "reason": reason.value, "message": message}
        case Admitted(step=step, cached=cached):
            return {"event": "admitted", "step": step, "cached_tokens": cached}
        case Restored(step=step, cached=cached, recompute=recompute):
            return {"event": "restored", "step": step, "cached_tokens": cached, "recomputed_tokens": recompute}
        case Preempted(step=step, mode=mode, reason=reason):
            return {"event": "preempted", "step": step, "mode": mode, "reason": reason}
        case Finished(reason=reason, missed=missed):
            return {"event": "finished", "reason": reason.value, "missed": list(missed)}
    return None
