"""Whoever serves an engine makes the executor with the host pools of the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.config import resolve
from tidegate.executors.torch import executor, model, weights
from tidegate.server import assembly


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, {"host_blocks": 0, "host_kv_bytes": None, "disk_blocks": 0, "disk_kv_bytes": None, "disk_path": None}),
        ({"host_kv_memory": "1GiB"}, {"host_kv_bytes": 1 << 30}),
        ({"host_blocks": 7, "disk_blocks": 9}, {"host_blocks": 7, "disk_blocks": 9}),
        ({"disk_kv_memory": 5000, "disk_kv_path": "/x"}, {"disk_kv_bytes": 5000, "disk_path": Path("/x")}),
    ],
)
def test_host_pools_are_made_as_configured(
    options: dict[str, Any], made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ensure_model", lambda name, cache: SimpleNamespace(path=Path(name), name=name))
    monkeypatch.setattr(model, "load_model", lambda path, **given: None)
    monkeypatch.setattr(executor, "TorchExecutor", lambda loaded, **given: given)
    given: Any = assembly.build_executor(resolve({"scheduler": options}), Path("cache"))
    assert {name: given[name] for name in made} == made
