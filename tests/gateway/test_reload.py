"""A changed configuration takes effect; a broken one changes nothing and says why."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tidegate.config import Config
from tidegate.errors import ConfigError
from tidegate.gateway.reload import Reload, changed
from tidegate.gateway.settings import load


def write(path: Path, **gateway: Any) -> None:
    raw = {"gateway": {"replicas": [{"url": "http://127.0.0.1:1"}], **gateway}}
    aside = path.with_suffix(".new")
    aside.write_text(tomli_w.dumps(raw), encoding="utf-8")
    aside.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.toml"
    write(path)
    return path


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_what_differs_is_named(path: Path) -> None:
    before = load(path)
    write(path, api_keys=["sk-secret"], drain_seconds=5.0)
    assert changed(before, load(path)) == ["gateway.api_keys", "gateway.drain_seconds"]


async def test_a_signal_has_the_file_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    applied: list[Config] = []
    task = asyncio.create_task(Reload(path, load(path), load, applied.append).run())
    await asyncio.sleep(0)
    write(path, in_flight=7, api_keys=["sk-secret"])
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: applied)
    assert applied[0].gateway.in_flight == 7
    assert "changed: gateway.api_keys, gateway.in_flight" in caplog.text
    assert "sk-secret" not in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_broken_file_changes_nothing_and_says_why(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    applied: list[Config] = []
    reload = Reload(path, load(path), load, applied.append)
    path.write_text("[gateway\n", encoding="utf-8")
    assert not reload.again()
    write(path, prot=3)
    assert not reload.again()
    assert applied == []
    assert "the configuration stays as it was" in caplog.text
    assert "unknown option gateway.prot; did you mean port?" in caplog.text
    write(path, in_flight=3)
    assert reload.again()
    assert len(applied) == 1


async def test_what_cannot_be_applied_leaves_the_old_one_as_the_one_to_compare_with(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(config: Config) -> None:
        raise ConfigError("the engine a wants the key in KEY, which is not set")

    now = load(path)
    reload = Reload(path, now, load, refuse)
    write(path, in_flight=3)
    assert not reload.again()
    assert "KEY, which is not set" in caplog.text
    assert reload._now is now


async def test_a_mistake_of_ours_is_told_and_does_not_end_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(config: Config) -> None:
        raise RuntimeError("oh")

    assert not Reload(path, load(path), load, fail).again()
    assert "could not be read again" in caplog.text
    assert "RuntimeError: oh" in caplog.text


async def test_what_only_a_restart_changes_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reload = Reload(path, load(path), load, lambda config: None)
    write(path, port=9999, host="::1")
    assert reload.again()
    assert "gateway.host, gateway.port: takes effect only with a restart" in caplog.text


async def test_a_changed_file_takes_effect_by_itself_where_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.reload.LOOK_S", 0.01)
    write(path, watch_config=True)
    applied: list[Config] = []
    task = asyncio.create_task(Reload(path, load(path), load, applied.append).run())
    await asyncio.sleep(0.05)
    assert applied == []
    write(path, watch_config=True, in_flight=4)
    await until(lambda: applied)
    path.unlink()
    await asyncio.sleep(0.05)
    assert len(applied) == 1
    write(path, watch_config=False, in_flight=5)
    await until(lambda: len(applied) == 2)
    write(path, in_flight=6)
    await asyncio.sleep(0.1)
    assert len(applied) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
