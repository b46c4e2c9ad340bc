"""Which replicas there are to be."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wanted:
    """One replica as it was configured or found."""

    name: str
    url: str
    pool: str = ""
    seats: int | None = None
    kv_tokens: int | None = None
    kind: str = "auto"
    kv_events: str | None = None
    api_key: str | None = field(default=None, repr=False)
