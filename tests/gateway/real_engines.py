"""`tidegate serve` with a real model, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Engine:
    name: str
    url: str
    process: subprocess.Popen[str]


@contextmanager
def real_engines(n: int) -> Iterator[Sequence[Engine]]:
    """So many engines with one thread each, started side by side and ready."""
    command = [sys.executable, "-m", "tidegate", "serve", "--port", "0", "--threads", "1", "--kv-memory", "64MiB"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for _ in range(n):
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            stack.enter_context(process)
            stack.callback(process.kill)
        yield [Engine(f"engine-{i}", _url(p), p) for i, p in enumerate(processes)]


def _url(process: subprocess.Popen[str]) -> str:
    """Where it is, once it has said so."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " is ready at " in line, line
    return line.split(" is ready at ")[1].split()[0]
