"""Only the step's worker has a pool of threads: a second one would slow every operation of a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidegate.executors.torch.hardware import one_thread
from tidegate.executors.torch.weights import ModelFiles

THREADS = Path("/proc/self/task")

LOAD = """
import pathlib, sys, torch
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.model import load_model

torch.set_num_threads(2)
threads = pathlib.Path("/proc/self/task")
before = len(list(threads.iterdir()))
loaded = load_model(pathlib.Path(sys.argv[1]), name="tiny", dtype="bfloat16")
TorchExecutor(loaded, num_blocks=1024, numba_attention=False)
after_loading = len(list(threads.iterdir())) - before
torch.ones(1 << 22).add_(1.0)
print(after_loading, len(list(threads.iterdir())) - before, torch.get_num_threads())
"""


def test_one_thread_computes_and_the_count_comes_back() -> None:
    torch.set_num_threads(2)
    try:
        with one_thread():
            within = torch.get_num_threads()
        assert (within, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not THREADS.exists(), reason="this system does not tell which threads a process has")
def test_loading_a_model_leaves_no_threads_behind(smollm_files: ModelFiles) -> None:
    """The real model in a process of its own; the sum afterwards shows that two threads would have been taken."""
    command = [sys.executable, "-c", LOAD, str(smollm_files.path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["0", "1", "2"]
