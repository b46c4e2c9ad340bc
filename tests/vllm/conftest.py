"""These tests need vLLM, which has an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") is not None else ["*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # those of vLLM and of what it imports are not ours to mend
    config.addinivalue_line("markers", "expects(scenario, line): asserts one line of a scenario's `expect`")
