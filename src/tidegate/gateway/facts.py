"""What engines say of themselves."""

from __future__ import annotations

from typing import NamedTuple


class EngineFacts(NamedTuple):
    """Facts of one engine; None: it does not say."""

    kind: str
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    seats: int | None = None
    kv_tokens: int | None = None
