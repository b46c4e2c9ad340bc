"""Trace ids: a valid one passes as it came, a wrong one does not pass, and one begins where that was asked for."""

from __future__ import annotations

from random import Random

import pytest

from tidegate.gateway.trace import trace_id, traced, valid

GOOD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = (b"accept", b"*/*")


def test_a_valid_trace_passes_untouched() -> None:
    headers = [OTHER, (b"traceparent", GOOD), (b"tracestate", b"vendor=1")]
    assert traced(headers) is headers
    assert traced(headers, Random(1)) is headers
    assert trace_id(headers) == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_later_version_may_be_longer() -> None:
    assert valid(b"01" + GOOD[2:] + b"-more")
    assert not valid(GOOD + b"-more")


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"hello",
        b"ff" + GOOD[2:],
        GOOD.upper(),
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-" + b"0" * 16 + b"-01",
        GOOD[:-1],
        GOOD + b"\xff" * 5000,
    ],
)
def test_a_wrong_one_does_not_pass(wrong: bytes) -> None:
    headers = [OTHER, (b"traceparent", wrong), (b"tracestate", b"vendor=1")]
    assert traced(headers) == [OTHER]
    begun = dict(traced(headers, Random(1)))[b"traceparent"]
    assert valid(begun)
    assert begun != wrong


def test_two_parents_are_none() -> None:
    assert traced([(b"traceparent", GOOD), (b"traceparent", GOOD)]) == []


def test_a_state_without_end_does_not_pass() -> None:
    assert traced([(b"traceparent", GOOD), (b"tracestate", b"x" * 513)]) == [(b"traceparent", GOOD)]


def test_one_begins_only_where_asked_for_and_each_is_another() -> None:
    assert traced([OTHER]) == [OTHER]
    random = Random(1)
    ids = {trace_id(traced([OTHER], random)) for _ in range(100)}
    assert len(ids) == 100
    assert None not in ids
    assert trace_id([OTHER]) is None
