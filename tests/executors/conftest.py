"""Models for the executor's tests: tiny random ones, and the real default model from the user's cache."""

from __future__ import annotations

import pytest
import torch

from tidegate.cli.environment import cache_dir
from tidegate.executors.torch.model import LoadedModel, load_model
from tidegate.executors.torch.weights import DEFAULT_MODEL, ModelFiles, ensure_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm_files() -> ModelFiles:
    return ensure_model(DEFAULT_MODEL, cache_dir())


@pytest.fixture(scope="session")
def smollm(smollm_files: ModelFiles) -> LoadedModel:
    """The real model in float32, ready for packed steps."""
    return load_model(smollm_files.path, name=smollm_files.name, dtype="float32")
