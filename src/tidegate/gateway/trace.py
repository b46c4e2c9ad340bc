"""Trace ids of W3C Trace Context (Level 1), which OpenTelemetry follows: passed on, and begun where nobody did. Pure.

The gateway records no spans: an engine's span is a child of the client's, whose header passes as it came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

Headers = Sequence[tuple[bytes, bytes]]

_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_LONGEST_STATE = 512  # characters that everybody has to be able to carry


def valid(parent: bytes) -> bool:
    """Whether `parent` is a `traceparent`. Later versions than 00 may be longer."""
    found = _PARENT.fullmatch(parent) is not None
    return found and (not parent.startswith(b"00") or len(parent) == 55)


def traced(headers: Headers, create: Random | None = None) -> Headers:
    """`headers` with at most one `traceparent`, a valid one, and its `tracestate`; what is wrong does not pass.

    create: begins a trace where there is none, with ids of this generator; None leaves it at that
    """
    parents, said = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.strip())
        elif name == b"tracestate":
            said.append(value)
    states = b",".join(said)
    if len(parents) == 1 and valid(parents[0]):
        if len(states) <= _LONGEST_STATE:
            return headers
        return [header for header in headers if header[0] != b"tracestate"]
    if not parents and not states and create is None:
        return headers
    kept = [header for header in headers if header[0] not in (b"traceparent", b"tracestate")]
    if create is not None:
        kept.append((b"traceparent", _begun(create)))
    return kept


def trace_id(headers: Headers) -> str | None:
    """The trace that a request is part of, for whoever looks for it; None where there is none."""
    found = next((value for name, value in headers if name == b"traceparent"), b"")
    return found[3:35].decode() if valid(found) else None


def _begun(random: Random) -> bytes:
    """A new trace, not sampled: whoever records spans decides that."""
    trace, span = random.randrange(1, 2**128), random.randrange(1, 2**64)
    return f"00-{trace:032x}-{span:016x}-00".encode()
