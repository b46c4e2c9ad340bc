"""Connections are open files, and systems often begin with few."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tidegate.api.listening import allow_open_files


@pytest.fixture
def few() -> Iterator[int]:
    """As a shell may leave it; what the system would allow."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield before[1] if before[1] != resource.RLIM_INFINITY else 2**16
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_as_many_files_may_be_open_as_the_system_lets(few: int, caplog: pytest.LogCaptureFixture) -> None:
    allow_open_files(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few
    assert not caplog.records


def test_too_few_are_told(few: int, caplog: pytest.LogCaptureFixture) -> None:
    allow_open_files(few)
    assert f"at most {few} files may be open" in caplog.text
    assert "max_connections" in caplog.text
