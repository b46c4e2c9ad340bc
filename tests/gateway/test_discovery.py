"""Engines from a list, from a name and from a file; a source that breaks keeps what it said last."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tidegate.config import GatewayConfig, ReplicaConfig, resolve
from tidegate.errors import ConfigError, MissingExtra
from tidegate.gateway.discovery import Discovery, Wanted, listed, wanted


def gateway(**raw: Any) -> GatewayConfig:
    return resolve({"gateway": raw}).gateway


class Told:
    def __init__(self) -> None:
        self.all: list[list[Wanted]] = []

    def __call__(self, found: Sequence[Wanted]) -> None:
        self.all.append(list(found))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.all[-1]]


def rewrite(path: Path, text: str) -> None:
    """As whoever writes such a file should: whole, and then in its place."""
    aside = path.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_list_is_told_at_once_with_the_keys_of_the_environment() -> None:
    told = Told()
    replicas = [{"url": "http://a:1", "api_key_env": "ENGINE_KEY", "pool": "p", "seats": 3, "kind": "vllm"}]
    pools = {"mode": "isolated", "classes": {"batch": "p"}}
    Discovery(gateway(replicas=replicas, pools=pools), told, {"ENGINE_KEY": "sk-1"}).tell()
    assert told.all == [[Wanted("a:1", "http://a:1", "p", 3, kind="vllm", api_key="sk-1")]]
    assert "sk-1" not in repr(told.all)
    with pytest.raises(ConfigError, match="the engine a:1 wants the key in ENGINE_KEY, which is not set"):
        Discovery(gateway(replicas=replicas, pools=pools), told, {}).tell()


def test_a_key_comes_without_the_newline_that_secrets_end_with() -> None:
    one = ReplicaConfig(url="http://a:1", api_key_env="ENGINE_KEY")
    assert wanted(one, {"ENGINE_KEY": " sk-1\r\n"}).api_key == "sk-1"
    with pytest.raises(ConfigError, match="wants the key in ENGINE_KEY, which is not set"):
        wanted(one, {"ENGINE_KEY": "\n"})
    for key in ("sk-1\nx: y", "sk 1", "ключ", "sk-1\0"):
        with pytest.raises(ConfigError, match="wants the key in ENGINE_KEY, which must be visible ASCII") as fault:
            wanted(one, {"ENGINE_KEY": key})
        assert key not in str(fault.value)


@pytest.mark.parametrize(
    ("text", "suffix", "why"),
    [
        ("{", ".json", "not JSON"),
        ("[[replicas]", ".toml", "not TOML"),
        ("[]", ".json", 'must hold "replicas"'),
        ('{"replicas": [], "more": 1}', ".json", "unknown option more; there are: replicas"),
        ("{}", ".json", "replicas is missing"),
        ('{"replicas": [{"ulr": "http://a:1"}]}', ".json", "unknown option replicas.0.ulr; did you mean url"),
        ('{"replicas": [{"url": "a:1"}]}', ".json", "replicas.0.url must look like"),
        ('{"replicas": [{"url": "http://a:1"}, {"name": "a:1", "url": "http://b:1"}]}', ".json", "names 'a:1' twice"),
        (json.dumps({"replicas": [{"url": f"http://a:{i + 1}"} for i in range(1001)]}), ".json", "1000 are the most"),
    ],
)
def test_a_file_that_is_wrong_says_why(text: str, suffix: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("[", r"\[")):
        listed(text, suffix)


def test_both_forms_of_a_file_say_the_same() -> None:
    one = ReplicaConfig(url="http://a:1", seats=2)
    assert listed('[[replicas]]\nurl = "http://a:1"\nseats = 2\n', ".toml") == (one,)
    assert listed('{"replicas": [{"url": "http://a:1", "seats": 2}]}', ".json") == (one,)
    assert wanted(one, {}).name == "a:1"


@pytest.mark.parametrize("suffix", [".toml", ".json"])
async def test_a_file_is_followed_and_a_broken_one_keeps_the_last(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / f"engines{suffix}"

    def text(*ports: int) -> str:
        if suffix == ".json":
            return json.dumps({"replicas": [{"url": f"http://a:{port}"} for port in ports]})
        return "\n".join(f'[[replicas]]\nurl = "http://a:{port}"' for port in ports)

    told = Told()
    rewrite(path, text(1, 2))
    source = {"source": "file", "path": str(path), "seconds": 0.01}
    discovery = Discovery(gateway(discovery=[source], replicas=[{"url": "http://fixed:9"}]), told, {})
    task = asyncio.create_task(discovery.run())
    await until(lambda: told.all and told.names == ["fixed:9", "a:1", "a:2"])
    rewrite(path, text(2, 3))
    await until(lambda: told.names == ["fixed:9", "a:2", "a:3"])
    n = len(told.all)
    rewrite(path, "{ broken")
    await until(lambda: caplog.records)
    await asyncio.sleep(0.1)
    assert len(told.all) == n
    assert len(caplog.records) == 1
    assert "the 2 engines it named last are kept" in caplog.text
    path.unlink()
    await until(lambda: len(caplog.records) == 2)  # another reason
    await asyncio.sleep(0.05)
    assert len(caplog.records) == 2
    rewrite(path, text(3))
    await until(lambda: told.names == ["fixed:9", "a:3"])
    rewrite(path, "{ broken")
    await until(lambda: len(caplog.records) == 3)
    task.cancel()


async def test_engines_that_cannot_be_had_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One may want a package that is not installed: those from before stay, until the file says what can be had."""
    path = tmp_path / "engines.json"
    told = Told()

    def update(found: Sequence[Wanted]) -> None:
        if any(one.kv_events for one in found):
            raise MissingExtra("kv_events needs pyzmq")
        told(found)

    def names(*ports: int, **more: str) -> str:
        return json.dumps({"replicas": [{"url": f"http://a:{port}", **more} for port in ports]})

    rewrite(path, names(1))
    source = {"source": "file", "path": str(path), "seconds": 0.01}
    task = asyncio.create_task(Discovery(gateway(discovery=[source]), update, {}).run())
    await until(lambda: told.all)
    rewrite(path, names(2, kv_events="tcp://a:9"))
    await until(lambda: caplog.records)
    await asyncio.sleep(0.05)
    assert [record.message for record in caplog.records] == [
        "discovery: kv_events needs pyzmq; the engines stay as they were"
    ]
    assert told.names == ["a:1"]
    rewrite(path, names(3))
    await until(lambda: told.names == ["a:3"])
    task.cancel()


async def test_all_addresses_behind_a_name_are_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver answers; the event loop's call to it is where a test may put other answers."""
    answers: list[list[str] | OSError] = [["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"]]
    loop = asyncio.get_running_loop()

    async def resolver(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("vllm.local", 8000)
        found = answers[0]
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(loop, "getaddrinfo", resolver)
    told = Told()
    source = {"source": "dns", "host": "vllm.local", "port": 8000, "seconds": 0.01, "pool": "chat", "seats": 8}
    pools = {"mode": "isolated", "classes": {"interactive": "chat"}}
    discovery = Discovery(gateway(discovery=[source], pools=pools), told, {})
    task = asyncio.create_task(discovery.run())
    await until(lambda: told.all)
    assert told.names == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert told.all[-1][2] == Wanted("[fd00::1]:8000", "http://[fd00::1]:8000", "chat", 8)
    answers[0] = socket.gaierror("no answer")
    await asyncio.sleep(0.05)
    assert len(told.all) == 1
    answers[0] = ["10.0.0.3"]
    await until(lambda: len(told.all) == 2)
    assert told.names == ["10.0.0.3:8000"]
    task.cancel()


async def test_the_resolver_of_the_system_is_asked() -> None:
    told = Told()
    discovery = Discovery(gateway(discovery=[{"source": "dns", "host": "localhost", "port": 8000}]), told, os.environ)
    await discovery.look(0, discovery._gateway.discovery[0])
    discovery.tell()
    assert "127.0.0.1:8000" in told.names


@pytest.mark.parametrize(
    "said", [{"source": "dns", "host": "a..b", "port": 1}, {"source": "file", "path": "deep.json"}]
)
async def test_whatever_a_source_is_it_is_looked_at_again(
    said: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text("[" * 100_000, encoding="utf-8")
    discovery = Discovery(gateway(discovery=[said]), Told(), {})
    for _ in range(2):
        await discovery.look(0, discovery._gateway.discovery[0])
    assert len(caplog.records) == 1
    assert "the 0 engines it named last are kept" in caplog.text


@pytest.mark.parametrize("more", [{"seats": 9}, {"seconds": 7.0}, {"port": 8001}, {"pass_class": "xargs"}])
async def test_a_source_that_is_treated_otherwise_keeps_its_engines(more: dict[str, object]) -> None:
    """The engines found by name stay, as the new configuration wants them, before the name was asked for again."""
    source = {"source": "dns", "host": "localhost", "port": 8000, "seats": 8}
    told = Told()
    before = Discovery(gateway(discovery=[source]), told, {})
    await before.look(0, before._gateway.discovery[0])
    before.tell()
    there = told.all[-1]
    after = Discovery(gateway(discovery=[{**source, **more}]), told, {})
    after.keep(before)
    after.tell()
    assert [one.url.rpartition(":")[0] for one in told.all[-1]] == [one.url.rpartition(":")[0] for one in there] != []
    port, seats = more.get("port", 8000), more.get("seats", 8)
    assert {(one.url.rpartition(":")[2], one.seats) for one in told.all[-1]} == {(str(port), seats)}
    assert {one.pass_class for one in told.all[-1]} == {more.get("pass_class")}


async def test_another_source_begins_with_nothing() -> None:
    told = Told()
    before = Discovery(gateway(discovery=[{"source": "dns", "host": "localhost", "port": 8000}]), told, {})
    await before.look(0, before._gateway.discovery[0])
    after = Discovery(gateway(discovery=[{"source": "dns", "host": "other.local", "port": 8000}]), told, {})
    after.keep(before)
    after.tell()
    assert told.all[-1] == []
