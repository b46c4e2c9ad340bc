"""These tests need Ray Serve, in an environment of its own: `make test-ray`. Elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("ray") is not None else ["*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # those of Ray and of what it imports are not ours to mend
