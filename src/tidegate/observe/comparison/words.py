"""Numbers in words, and text that is safe on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import Any

from tidegate.observe.columns import Floats

NAME_LENGTH = 80

# Control characters, spaces and what breaks lines, but not the space that keeps a number and its unit together.
_BREAKS = re.compile("[\x00-\x20\x7f-\x9f\u2028\u2029]+")


def short(text: object) -> str:
    """Text on one line, no longer than anybody reads."""
    told = _BREAKS.sub(" ", str(text)).strip(" ") or "(no name)"
    return told if len(told) <= NAME_LENGTH else f"{told[: NAME_LENGTH - 1]}…"


def safe(text: object) -> str:
    """Text of whatever origin for a page: short and escaped."""
    return escape(short(text))


def percent(share: float | None) -> str:
    """97 %, and a digit more near the ends: 99.4 %. Never 100 % of what is less."""
    if share is None:
        return "–"
    value = 100 * share
    if 0 < value < 1 or 99 < value < 100:
        value = min(99.9, max(0.1, round(value, 1)))
        return f"{value:.1f}\u00a0%"
    return f"{value:.0f}\u00a0%"


def seconds(value: float | None) -> str:
    """A duration with its unit: 340 ms, 1.2 s, 75 s."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.3g}\u00a0ms"
    return f"{value:.2g}\u00a0s" if value < 10 else f"{value:.0f}\u00a0s"


def count(value: float | None) -> str:
    """A whole number with separators."""
    return "–" if value is None else f"{value:,.0f}"


def plural(number: float, one: str, many: str | None = None) -> str:
    """1 request, 2 requests."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def ranked(parts: Sequence[str]) -> str:
    """Best first, joined by commas; of more than four the first three and the last."""
    return ", ".join(parts if len(parts) <= 4 else [*parts[:3], "…", parts[-1]])


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def rounded(values: Iterable[float] | Floats, digits: int = 4) -> list[float | None]:
    """Numbers for a chart, cut to what can be seen; None for what is none."""
    return [float(f"{v:.{digits}g}") if isfinite(v) else None for v in map(float, values)]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], text_columns: int, label: str) -> str:
    """A table whose first columns are text and whose others are numbers, in a box that scrolls by itself."""
    kinds = ["t"] * text_columns + ["n"] * (len(head) - text_columns)
    top = "".join(f'<th scope="col" class="{kind}">{safe(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{safe(c)}</td>' for c, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(label)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
