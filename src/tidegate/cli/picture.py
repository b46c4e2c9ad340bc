"""Pictures in text: a bar chart that stands and one that lies, for any terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

_EIGHTHS, _HALF = " ▁▂▃▄▅▆▇█", "▌"
_PLAIN = " ....####"  # for a terminal that cannot show block characters


def standing(values: Sequence[float], height: int = 6) -> list[str]:
    """One column a value, the largest `height` lines high; a value above 0 never looks like none."""
    eighths = _EIGHTHS if _shows_blocks() else _PLAIN
    most = max(values, default=0) or 1
    filled = [max(round(value / most * height * 8), 1 if value else 0) for value in values]
    return ["".join(eighths[min(8, max(0, fill - 8 * line))] for fill in filled) for line in reversed(range(height))]


def lying(values: Mapping[str, float], width: int = 40) -> list[str]:
    """One line a value: its name, a bar, and the value; the largest bar is `width` characters long."""
    full, half = ("█", _HALF) if _shows_blocks() else ("#", "#")
    most = max(values.values(), default=0) or 1
    column = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        halves = round(value / most * width * 2)
        bar = full * (halves // 2) + (half if halves % 2 or (value and not halves) else "")
        lines.append(f"{name:>{column}} {bar} {value:g}")
    return lines


def _shows_blocks() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")
