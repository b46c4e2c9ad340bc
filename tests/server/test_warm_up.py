"""The first requests fit whatever pool and model there are."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import assemble
from tidegate.server.service import Service
from tidegate.server.warmup import warm_up


@pytest.mark.parametrize(("blocks", "longest"), [(1, 512), (2, 512), (256, 2), (256, 512)])
def test_the_warm_up_runs_in_any_pool_and_model(blocks: int, longest: int) -> None:
    model = ScriptedModel(goes_on, num_blocks=blocks, max_model_len=longest)
    _, engine, scheduler = assemble(model, {"scheduler": {"max_num_seqs": model.max_num_seqs}})
    engine.start()
    try:
        asyncio.run(warm_up(engine, Service(engine, model).vocabulary, scheduler.limits.pool_tokens))
        assert engine.death is None
    finally:
        engine.stop()
