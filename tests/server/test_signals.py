"""SIGTERM drains, then the process ends well; a second signal does not wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tidegate.api.listening import bind, is_exposed, url_of
from tidegate.errors import InputError

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "x", "max_tokens": 100, "stream": True}


@contextmanager
def process(step_seconds: float, drain_seconds: float) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "tests.server.drained_server", str(step_seconds), str(drain_seconds)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | paths, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            with httpx.Client(base_url=url, verify=False, timeout=30) as http:  # noqa: S501 - no TLS at all
                yield server, http
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_refuses_new_ones(number: signal.Signals) -> None:
    with process(step_seconds=0.02, drain_seconds=30) as (server, http):
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(number)
            while (health := http.get("/health")).status_code == 200:
                time.sleep(0.01)
            assert health.json()["status"] == "draining"
            refused = http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "draining"
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(10) == 0


def test_draining_is_bounded_and_ends_streams_with_an_error() -> None:
    with process(step_seconds=0.1, drain_seconds=0.3) as (server, http):
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1]
        assert "shut down" in rest[-1]
        assert server.wait(10) == 0


def test_a_second_signal_does_not_wait() -> None:
    with process(step_seconds=0.2, drain_seconds=600) as (server, http):
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            next(answer.iter_lines())
            server.send_signal(signal.SIGINT)
            while http.get("/health").status_code == 200:
                time.sleep(0.01)
            server.send_signal(signal.SIGINT)
            server.wait(15)
        assert server.returncode is not None


def test_a_port_that_is_taken_is_told_in_a_sentence() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)


def test_an_address_of_somebody_else_is_told_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_only_a_loopback_address_is_not_exposed() -> None:
    for host, exposed in (("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)):
        with bind(host, 0) as sock:
            assert is_exposed(sock) is exposed


def test_the_command_ends_with_2_and_one_line_before_it_loads_anything() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        command = [sys.executable, "-m", "tidegate", "serve", "--port", str(sock.getsockname()[1])]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "is taken" in ended.stderr


def test_one_connection_too_many_is_refused() -> None:
    with process(step_seconds=0.01, drain_seconds=1) as (_, http), contextlib.ExitStack() as held:
        address = http.base_url.host, http.base_url.port
        for _ in range(4):
            held.enter_context(socket.create_connection(address, timeout=10))
        assert http.get("/health").status_code == 503
        held.close()
        while http.get("/health").status_code != 200:
            time.sleep(0.01)
