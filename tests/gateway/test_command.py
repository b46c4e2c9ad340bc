"""`tidegate gateway`: one line when it is ready, a sentence when it cannot be, and two signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.gateway.backends import Backend, backends
from tidegate.api.listening import bind

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tidegate", "gateway"]
ASKED = {"prompt": "x", "stream": True}
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def config(tmp_path: Path, *urls: str, more: str = "") -> Path:
    path = tmp_path / "gateway.toml"
    replicas = "".join(f'[[gateway.replicas]]\nurl = "{url}"\n' for url in urls)
    path.write_text(f"[gateway]\nport = 0\n{more}\n{replicas}")
    return path


def ended(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def running(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the line that it said when it was ready."""
    with subprocess.Popen([*COMMAND, "--config", str(path)], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as p:
        try:
            assert p.stdout is not None
            yield p, p.stdout.readline()
        finally:
            p.kill()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[gateway]\nrute = "joint"\n', "rute"),
        ("[gateway]\n", "needs an engine"),
        ('[gateway]\n[[gateway.replicas]]\nurl = "10.0.0.1"\n', "http://"),
        ('[gateway]\nroute = "fastest"\n[[gateway.replicas]]\nurl = "http://10.0.0.1:8000"\n', "fastest"),
    ],
)
def test_a_configuration_that_is_wrong_is_told_in_a_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    code, out, err = ended("--config", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_missing_file_and_a_port_that_is_taken_are_told_in_a_line(tmp_path: Path) -> None:
    code, _, err = ended("--config", str(tmp_path / "none.toml"))
    assert (code, err.count("\n")) == (2, 1)
    assert "none.toml" in err
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        path = config(tmp_path, "http://127.0.0.1:1")
        code, _, err = ended("--config", str(path), "--port", str(sock.getsockname()[1]))
    assert (code, err.count("\n")) == (2, 1)
    assert "is taken" in err


async def test_a_signal_lets_streams_finish_and_a_second_one_does_not(tmp_path: Path) -> None:
    async with backends(1, events=3, gap=0.2) as behind:
        path = config(tmp_path, behind[0].url)
        await asyncio.to_thread(_stopped_once, path)
        behind[0].mode = "hang"
        await asyncio.to_thread(_stopped_twice, path, behind[0])


def _client(line: str) -> httpx.Client:
    return httpx.Client(base_url=line.split()[5], verify=False, timeout=30)  # noqa: S501 - no TLS at all


def _stopped_once(path: Path) -> None:
    with running(path) as (process, line):
        assert line.startswith("the gateway is ready at http://127.0.0.1:")
        with _client(line) as http, http.stream("POST", "/v1/completions", json=ASKED) as answer:
            parts = answer.iter_text()
            next(parts)
            process.send_signal(signal.SIGTERM)
            assert "".join(parts).endswith("data: [DONE]\n\n")
        assert process.wait(20) == 0


def _stopped_twice(path: Path, behind: Backend) -> None:
    before = len(behind.requests)
    with running(path) as (process, line), _client(line) as http, ThreadPoolExecutor() as pool:
        asking = pool.submit(_status, http)
        while len(behind.requests) == before:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        while http.get("/health").status_code == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert asking.result() in (None, 503)


def test_what_the_command_line_said_wins_when_the_file_is_read_again(tmp_path: Path) -> None:
    path = config(tmp_path, "http://127.0.0.1:9", more="drain_seconds = 1.0")
    path.write_text(path.read_text().replace("port = 0", "port = 1"))
    asked = [*COMMAND, "--config", str(path), "--port", "0"]
    with subprocess.Popen(asked, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        with _client(p.stdout.readline()) as http:
            path.write_text(path.read_text().replace("port = 1", "port = 1\nmax_body_bytes = 9"))
            p.send_signal(signal.SIGHUP)
            while http.post("/v1/audio", content=b"x" * 10, timeout=30).status_code != 413:
                time.sleep(0.05)
        p.send_signal(signal.SIGTERM)
        assert "restart" not in p.communicate(timeout=30)[1]


def _status(http: httpx.Client) -> int | None:
    """None where the connection ended first."""
    try:
        return http.post("/v1/completions", json=ASKED).status_code
    except httpx.HTTPError:
        return None
