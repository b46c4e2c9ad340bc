"""Why a request waited, was chosen, or was evicted: a bounded diary per request, folded from events."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, TypeAlias

from tidegate.core.events import Admitted, Arrived, Finished, Preempted, Rejected, Restored
from tidegate.core.request import Request

Decision: TypeAlias = Admitted | Arrived | Finished | Preempted | Rejected | Restored
LINES = 64
ENDED = 1024


class Diary:
    """The last `LINES` decisions about each live request and about the last `ENDED` that ended."""

    def __init__(self) -> None:
        self._live: dict[str, deque[Decision]] = {}
        self._ended: OrderedDict[str, tuple[Request, deque[Decision]]] = OrderedDict()

    def fold(self, event: Decision) -> None:
        """Remember `event`; it is put into words only when somebody asks."""
        r = event.request
        lines = self._live.get(r.id)
        if lines is None:
            lines = self._live[r.id] = deque(maxlen=LINES)
        lines.append(event)
        if isinstance(event, Finished | Rejected):
            self._ended[r.id] = (r, self._live.pop(r.id))
            if len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    def lines(self, request_id: str) -> list[dict[str, Any]]:
        """The diary of a request, oldest first; empty if it is not known."""
        if request_id in self._live:
            lines = self._live[request_id]
        elif request_id in self._ended:
            lines = self._ended[request_id][1]
        else:
            return []
        return [{"time": event.now, **_line(event)} for event in lines]

    def ended(self, request_id: str) -> Request | None:
        """A request that ended not too long ago."""
        return self._ended[request_id][0] if request_id in self._ended else None


def _line(event: Decision) -> dict[str, Any]:
    match event:
        case Arrived():
            return {"event": "arrived"}
        case Rejected(reason=rejection, message=message):
            return {"event": "rejected", "reason": rejection.value, "message": message}
        case Admitted(step=step, cached=cached):
            return {"event": "admitted", "step": step, "cached_tokens": cached}
        case Restored(step=step, cached=cached, recompute=recompute):
            return {"event": "restored", "step": step, "cached_tokens": cached, "recomputed_tokens": recompute}
        case Preempted(step=step, mode=mode, reason=reason):
            return {"event": "preempted", "step": step, "mode": mode, "reason": reason}
        case Finished(reason=ended, missed=missed):
            return {"event": "finished", "reason": ended.value, "missed": list(missed)}
