"""Stop strings in a stream of text: found across token borders, never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first (of those, the longest).

    Text that may be the beginning of a stop string is held back until it is known not to be. What has
    been fed in which pieces makes no difference to what comes out.
    """

    __slots__ = ("_held", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Take more text and return what is safe to show. After `found` there is nothing more to show."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is at its end: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
