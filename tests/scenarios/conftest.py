"""What the scenario tests share: a way to play a file, readings of a run, and the list of awaiting lines.

A test marked `expects("S01", 0)` asserts line 0 of that file's `expect`. Lines in `awaiting.yaml` need a
mechanism that does not exist yet: their tests must fail, and the run prints how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate.errors import InputError
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import Fate, Outcome, Step, run

HERE = Path(__file__).parent
AWAITING = HERE / "awaiting.yaml"


def awaiting() -> dict[tuple[str, int], str]:
    """The mechanism that each awaiting line needs, by (scenario, index of the line)."""
    listed = yaml.safe_load(AWAITING.read_text()) or []
    return {(entry["scenario"], entry["line"]): entry["needs"] for entry in listed}


class Reading:
    """A run, with the questions that expectations ask."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.rows: Sequence[Step] = outcome.steps

    def __getitem__(self, name: str) -> Fate:
        return self.outcome.requests[name]

    def family(self, name: str) -> dict[str, Fate]:
        """The copies or members of a family, in order."""
        return {key: fate for key, fate in self.outcome.requests.items() if key.startswith(f"{name}[")}

    def preemptions(self) -> list[tuple[int, str]]:
        """(step, id) of every preemption."""
        return [(row.step, victim["id"]) for row in self.rows for victim in row.preempted]

    def restorations(self) -> list[tuple[int, str]]:
        """(step, id) of every return after a preemption."""
        return [(row.step, name) for row in self.rows for name in row.restored]

    def scheduled(self, name: str) -> dict[int, int]:
        """Tokens computed for a request, by step."""
        return {row.step: row.scheduled[name] for row in self.rows if name in row.scheduled}

    def computed_tokens(self) -> int:
        """Tokens computed in the run, recomputed ones included."""
        return sum(sum(row.scheduled.values()) for row in self.rows)

    def recomputed_tokens(self) -> int:
        """Tokens computed once more after a preemption."""
        return sum(fate.recomputed_tokens for fate in self.outcome.requests.values())

    def prefill_tokens(self) -> int:
        """Tokens of chunks in the run; a chunk of one token reads like a decode and is not counted."""
        return sum(tokens for row in self.rows for tokens in row.scheduled.values() if tokens > 1)

    def makespan(self) -> float:
        """When the last step began, in the run's time unit."""
        return self.rows[-1].time

    def blocks_in_use(self, step: int, block_size: int = 16) -> dict[str, int]:
        """Blocks that the tokens computed up to and including `step` fill, by request, without cached ones."""
        tokens: dict[str, int] = {}
        for row in self.rows[: step + 1]:
            for victim in row.preempted:
                tokens.pop(victim["id"], None)
            for name, count in row.scheduled.items():
                tokens[name] = tokens.get(name, 0) + count
            if row.step < step:
                for name in row.finished:
                    tokens.pop(name, None)
        return {name: -(-count // block_size) for name, count in tokens.items()}

    def parked(self) -> Iterator[set[str]]:
        """Who is preempted and waits, step by step."""
        out: set[str] = set()
        for row in self.rows:
            out |= {victim["id"] for victim in row.preempted}
            out -= {*row.restored}
            yield set(out)
            out -= {*row.finished}


@pytest.fixture
def awaiting_lines() -> dict[tuple[str, int], str]:
    """Lines that await a mechanism, and which."""
    return awaiting()


@pytest.fixture
def data() -> Path:
    """The scenario files."""
    return HERE / "data"


Play = Callable[..., Reading]


@pytest.fixture(scope="session")
def _played() -> dict[Any, Reading]:
    return {}


@pytest.fixture
def play(_played: dict[Any, Reading]) -> Play:
    """Run a scenario file: `play("S01", policy=..., set={"H.prio": 10}, extra=[...], without=["D"], steps=N)`.

    `scheduler` and `executor` take broken doubles. Runs without a double are kept for the next test.
    """

    def play(
        name: str,
        policy: Any = None,
        set: Mapping[str, Any] | None = None,
        extra: Sequence[Mapping[str, Any]] = (),
        without: Sequence[str] = (),
        steps: int | None = None,
        **doubles: Any,
    ) -> Reading:
        key = (name, repr(policy), repr(set), repr(extra), repr(without), steps)
        if doubles or key not in _played:
            outcome = run(parse(_text(name, extra, without), set, source=name), policy, max_steps=steps, **doubles)
            if doubles:
                return Reading(outcome)
            _played[key] = Reading(outcome)
        return _played[key]

    return play


def scenario_file(name: str) -> Path:
    """The copy of a scenario in the tests' data."""
    return next((HERE / "data").glob(f"{name}-*.yaml"))


def _text(name: str, extra: Sequence[Mapping[str, Any]], without: Sequence[str]) -> str:
    text = scenario_file(name).read_text()
    if not extra and not without:
        return text
    raw = deepcopy(yaml.safe_load(text))
    raw["reqs"] = [request for request in raw["reqs"] if request["id"] not in without] + list(extra)
    return yaml.safe_dump(raw)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects(scenario, line): asserts one line of a scenario's `expect`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An awaiting line must fail, by its assertion or because the scenario cannot be expressed yet."""
    needs = awaiting()
    for item in items:
        mark = item.get_closest_marker("expects")
        if mark is not None and mark.args in needs:
            reason = f"awaits {needs[mark.args]}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=(AssertionError, InputError)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = awaiting()
    terminalreporter.write_line(f"scenario lines that await a mechanism: {len(lines)}")
