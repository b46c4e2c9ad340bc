"""What is written of each request is what its client saw, and says why; report and simulation read it."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from tests.vllm.test_shadow import shadowed
from tidegate.cli.main import app
from tidegate.core.events import Finished
from tidegate.integrations.vllm import TidegateAsyncScheduler, TidegateScheduler
from tidegate.integrations.vllm.attach import attach
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run

SIZES = {"num_blocks": 41, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def written(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Ends:
    """Keeps what is told of each end."""

    def __init__(self) -> None:
        self.told: dict[str, Finished] = {}

    def events(self, events) -> None:
        self.told |= {event.request.id: event for event in events if isinstance(event, Finished)}

    def step(self, plan, seconds) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_gaps_are_those_that_the_client_saw(asynchronous):
    clock, ends, rng = [0.0], Ends(), random.Random(4)

    class Clocked(TidegateAsyncScheduler if asynchronous else TidegateScheduler):
        def _make_host(self):
            return attach(self, lambda: clock[0], lambda: clock[0])

    config = make_config(asynchronous=asynchronous, **SIZES | {"num_blocks": 26})
    engine = Engine(make_scheduler(Clocked, config), depth=2 if asynchronous else 1)
    engine.scheduler.tidegate.observers = [ends]
    seen: dict[str, list[float]] = {}
    for index in range(1200):
        if index < 200 and rng.random() < 0.4:
            prompt = [rng.randrange(2, 900) for _ in range(rng.randrange(1, 90))]
            outputs = rng.randrange(1, 60)
            priority = rng.choice((0, 10))
            engine.add(engine.request(f"r{index}", prompt, outputs, priority=priority, arrival=clock[0]))
        if rng.random() < 0.02 and engine.scheduler.requests:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        clock[0] += rng.uniform(0.01, 0.1)
        engine.step()
        for name, stream in engine.streams.items():
            times = seen.setdefault(name, [])
            times += [clock[0]] * (len(stream) - len(times))
    assert not engine.scheduler.requests
    assert ends.told.keys() == seen.keys()
    assert sum(end.request.preemptions for end in ends.told.values()) > 2
    for name, times in seen.items():
        timing = ends.told[name].timing
        assert timing.gaps.tolist() == pytest.approx([later - earlier for earlier, later in pairwise(times)])
        assert (timing.ttft is None) == (not times)
        assert ends.told[name].request.first_token_at == (times[0] if times else None)


def test_every_request_is_explained_when_it_has_ended(tmp_path):
    """Also one that kept every promise: nobody can ask a scheduler in vLLM's process."""
    file = tmp_path / "t.toml"
    file.write_text(f'[scheduler]\nmax_waiting = 6\n[observe]\ndecisions = "{tmp_path}/decisions.jsonl"\n')
    engine = Engine(make_scheduler(TidegateScheduler, make_config(additional={"tidegate": str(file)}, **SIZES)))
    for n in range(8):
        engine.add(engine.request(f"r{n}", list(range(2, 60)), 30, priority=10))
    for _ in range(6):
        engine.step()
    engine.add(engine.request("gold", list(range(2, 60)), 3, xargs={"slo_class": "gold"}))
    engine.add(engine.request("urgent", list(range(2, 60)), 3, xargs={"slo_class": "interactive"}))
    run(engine)
    engine.scheduler.tidegate.close()
    lines = written(tmp_path / "decisions.jsonl")
    explained = {line["request_id"]: line for line in lines if line["event"] == "explained"}
    finished = {line["request_id"] for line in lines if line["event"] == "finished"}
    refused = {line["request_id"] for line in lines if line["event"] == "rejected"}
    assert explained.keys() == finished
    assert finished | refused == {*(f"r{n}" for n in range(8)), "urgent", "gold"}
    assert refused
    assert explained["urgent"]["missed"] == []
    assert [d["event"] for d in explained["urgent"]["decisions"]] == ["arrived", "admitted", "finished"]
    victim = next(line for line in explained.values() if line["preemptions"])
    assert any("wanted by urgent" in d.get("reason", "") for d in victim["decisions"])


def test_each_rank_writes_files_of_its_own(tmp_path):
    toml = shadowed(tmp_path, "").replace("shadow", "active")
    config = make_config(additional={"tidegate": toml}, **SIZES)
    config.parallel_config.data_parallel_index = 1
    engine = Engine(make_scheduler(TidegateScheduler, config))
    engine.add(engine.request("r", list(range(2, 60)), 3))
    run(engine)
    engine.scheduler.tidegate.close()
    assert [r["replica"] for r in written(tmp_path / "records.1.jsonl")] == ["1"]
    assert written(tmp_path / "decisions.1.jsonl")
    assert not (tmp_path / "records.jsonl").exists()


def test_report_and_simulation_read_the_records_of_a_shadow_run(tmp_path):
    config = make_config(additional={"tidegate": shadowed(tmp_path, "max_waiting = 3\n")}, **SIZES)
    engine = Engine(make_scheduler(TidegateScheduler, config))
    for n in range(12):
        kind = "batch" if n % 2 else "interactive"
        engine.add(engine.request(f"r{n}", list(range(2, 60)), 10, xargs={"slo_class": kind}))
    engine.step()
    engine.abort("r11")  # before its first token
    run(engine)
    engine.scheduler.tidegate.close()
    records = str(tmp_path / "records.jsonl")
    told = CliRunner().invoke(app, ["report", records, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)
    told = CliRunner().invoke(app, ["simulate", records, "--policy", "fcfs", "--policy", "joint", "--json"])
    assert told.exit_code == 0, told.output
    simulated = json.loads(told.stdout)
    assert "joint" in told.stdout
    assert simulated
