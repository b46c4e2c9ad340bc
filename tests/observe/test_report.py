"""What the comparison page says is what the records hold, whoever wrote them and however many they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.runs import as_a_client_sees, made_up, write_run
from tidegate.core.slo import DEFAULT_CLASSES
from tidegate.errors import InputError
from tidegate.observe.columns import Columns
from tidegate.observe.comparison.fairness import jain, tenants_of
from tidegate.observe.comparison.latency import cdf
from tidegate.observe.comparison.preemptions import causes, nameless
from tidegate.observe.comparison.run import is_companion
from tidegate.observe.comparison.timeline import SPANS, mean_level
from tidegate.observe.comparison.words import percent, seconds
from tidegate.observe.comparison.worst import MAX_ROWS
from tidegate.observe.records import records_table, write_records
from tidegate.observe.report import MAX_RUNS, Run, write_report
from tidegate.observe.summary import summarise

SRC = Path(__file__).resolve().parents[2] / "src"
UPLOT = "aa60ebf5acb7c4856e5c920d6ebde0209356c11c5b6abb775e290e6adaf4b1b1"


def data_of(page: Path) -> dict[str, Any]:
    """What the page carries for its scripts."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def words_of(page: Path) -> str:
    """The page as a reader sees it, without its scripts and styles."""
    html = re.sub(r"<(script|style).*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\u00a0", " ").split())


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Two simulated runs and a measured one."""
    runs = [
        Run.of_file(write_run(tmp_path, name, made_up(400, slow))) for name, slow in (("vllm-v1", 3.0), ("joint", 1.0))
    ]
    write_records(as_a_client_sees(made_up(400, 1.1, seed=2)), tmp_path / "real.jsonl")
    runs.append(Run.of_file(tmp_path / "real.jsonl", name="joint", measured=True))
    write_report(runs, tmp_path / "page.html", promises=DEFAULT_CLASSES, title="Two policies")
    return tmp_path / "page.html"


def test_headlines_say_the_numbers_of_the_summary(page: Path) -> None:
    words = words_of(page)
    shares = {
        name: percent(summarise(made_up(400, slow, seed))["interactive"].attainment).replace("\u00a0", " ")
        for name, slow, seed in (("vllm-v1", 3.0, 0), ("joint", 1.0, 0), ("joint (measured)", 1.1, 2))
    }
    best, *others = sorted(shares, key=lambda name: -float(shares[name].split()[0]))
    rest = ", ".join(f"{name} {shares[name]}" for name in others)
    assert f"interactive: {best} keeps {shares[best]} of the promises, {rest}." in words
    assert "batch nothing promised: completed" in words
    assert "A client cannot see those of joint (measured)." in words
    assert "seat wanted by a more urgent request 2 2" in words
    assert "TTFT ≤ 500 ms and TPOT ≤ 50 ms" in words


def test_curves_of_one_policy_share_a_colour_and_the_measured_one_is_dashed(page: Path) -> None:
    for chart in data_of(page)["charts"].values():
        told = {s["run"]: (s["colour"], s["dash"]) for s in chart["series"]}
        assert told["vllm-v1"] == (0, False)
        assert told["joint"] == (1, False)
        assert told.get("joint (measured)", (1, True)) == (1, True)
        assert all(len(s["y"]) == len(chart["x"]["values"]) for s in chart["series"])
    assert "joint (measured)" not in {s["run"] for s in data_of(page)["charts"]["kv"]["series"]}


def test_the_file_is_whole_and_asks_for_nothing(page: Path) -> None:
    text = page.read_text("utf-8")
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", outside)
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc=", outside)
    assert "default-src 'none'" in text


HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=1">&\u2028\'"'


class Tags(HTMLParser):
    """Collects the elements of a page and the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


def hostile_runs(folder: Path) -> list[Run]:
    """Runs whose every name tries to become a tag."""
    records = [
        r._replace(
            request_id=f"{HOSTILE}{i}", tenant=HOSTILE + r.tenant, slo_class=HOSTILE + r.slo_class, replica=HOSTILE
        )
        for i, r in enumerate(made_up(60))
    ]
    path = write_run(folder, "run", records)
    decisions = folder / "run.decisions.jsonl"
    line = {"event": "preempted", "mode": HOSTILE, "reason": f"seat {HOSTILE}", "class": HOSTILE}
    decisions.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return [Run.of_file(path, name=HOSTILE), replace(Run.of_file(path), name="other")]


def test_names_never_become_tags(tmp_path: Path) -> None:
    runs = hostile_runs(tmp_path)
    write_report(runs, tmp_path / "page.html", title=HOSTILE)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "window.hit=1</script>" not in text
    assert "<img" not in text
    tags = Tags()
    tags.feed(text)
    assert sum(tag == "script" for tag, _ in tags.seen) == 3
    assert not [names for _, names in tags.seen if any(name.startswith("on") for name in names)]
    assert data_of(tmp_path / "page.html")["worst"][0][2].startswith("</script>"), "the data keep what was said"


def test_a_large_run_makes_a_page_of_the_size_of_a_small_one(tmp_path: Path) -> None:
    for name, copies in (("small", 1), ("large", 25)):
        rows = made_up(2_000)
        many = [
            r._replace(request_id=f"{r.request_id}-{n}", arrival_s=r.arrival_s + n) for n in range(copies) for r in rows
        ]
        write_report([Run(name, records_table(many))], tmp_path / f"{name}.html")
    small, large = ((tmp_path / f"{name}.html").stat().st_size for name in ("small", "large"))
    assert large < 1.1 * small < 400_000


def test_hundreds_of_classes_and_tenants_stay_readable(tmp_path: Path) -> None:
    rows = [r._replace(slo_class=f"c{i % 300}", tenant=f"t{i % 400}") for i, r in enumerate(made_up(3_000))]
    write_report([Run("many", rows)], tmp_path / "page.html")
    words = words_of(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 600_000
    assert "292 smaller classes beyond the 8 largest" in words
    assert "388 smaller tenants beyond the 12 largest" in words


def test_many_runs_of_many_classes_share_one_bounded_table(tmp_path: Path) -> None:
    rows = [r._replace(slo_class=f"c{i % 12}") for i, r in enumerate(made_up(1_200))]
    write_report([Run(f"run {n}", rows) for n in range(MAX_RUNS)], tmp_path / "page.html")
    worst = data_of(tmp_path / "page.html")["worst"]
    assert len({row[0] for row in worst}) == MAX_RUNS
    assert len(worst) <= MAX_ROWS
    assert (tmp_path / "page.html").stat().st_size < 600_000


def test_the_step_log_tells_queue_and_memory(tmp_path: Path) -> None:
    run = Run.of_file(write_run(tmp_path, "run", made_up(400)))
    assert (run.steps, run.decisions) == (tmp_path / "run.steps.parquet", tmp_path / "run.decisions.jsonl")
    write_report([replace(run, pool_blocks=2000)], tmp_path / "page.html")
    charts = data_of(tmp_path / "page.html")["charts"]
    assert len(charts["kv"]["series"][0]["y"]) == SPANS
    assert max(charts["queue"]["series"][0]["y"]) <= 8
    assert 50 <= min(charts["kv"]["series"][0]["y"][:200]) <= max(charts["kv"]["series"][0]["y"]) <= 100
    write_report([Run("bare", made_up(400))], tmp_path / "bare.html")
    assert "kv" not in data_of(tmp_path / "bare.html")["charts"]
    assert "KV in use needs a step log" in words_of(tmp_path / "bare.html")


def test_levels_are_averaged_over_spans() -> None:
    times, levels, edges = np.array([1.0, 2.0, 4.0]), np.array([4.0, 2.0, 0.0]), np.array([0.0, 2.0, 3.0, 8.0])
    assert mean_level(times, levels, edges).tolist() == [2.0, 2.0, 0.4]
    assert mean_level(np.array([]), np.array([]), edges).tolist() == [0.0, 0.0, 0.0]


def test_curves_count_exactly_and_those_never_served_hold_them_down() -> None:
    assert cdf(np.array([1.0, 2.0, 2.0]), np.array([0.5, 1.0, 1.9, 2.0, 9.0]), 4).tolist() == [
        0.0,
        25.0,
        25.0,
        75.0,
        75.0,
    ]


def test_jain_and_the_service_of_tenants() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == 1.0
    assert jain(np.array([9.0, 0.0, 0.0, np.nan])) == pytest.approx(1 / 3)
    assert jain(np.array([np.nan, 0.0])) is None
    rows = made_up(200)
    tenants = tenants_of(Columns(records_table(rows)))
    assert tenants.names == ["acme", "globex", "initech"]
    mine = [r for r in rows if r.tenant == "globex" and r.first_token_s is not None]
    assert tenants.served[1] == sum(r.prompt_tokens - r.cached_tokens + r.output_tokens for r in mine)
    assert tenants.speed[1] == pytest.approx(sum(r.output_tokens for r in mine) / sum(r.e2e_s for r in mine))


def test_reasons_are_told_without_names_and_numbers(tmp_path: Path) -> None:
    assert nameless("seat wanted by a; b (priority 0 < 10)") == "seat wanted by a more urgent request"
    assert nameless("KV blocks wanted by x (priority -1 < 10); swap 1 ms < recompute 2 ms") == (
        "KV blocks wanted by a more urgent request"
    )
    assert nameless("my own reason 17") == "my own reason n"
    path = write_run(tmp_path, "run", made_up(20)).with_name("run.decisions.jsonl")
    assert causes(path) == {
        ("batch", "recompute", "seat wanted by a more urgent request"): 2,
        ("batch", "swap", "KV blocks wanted by running requests"): 1,
    }
    path.write_text('{"event": "preempted"', encoding="utf-8")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        causes(path)


def test_numbers_in_words() -> None:
    told = [percent(share).replace("\u00a0", " ") for share in (0.0, 0.0004, 0.61, 0.9951, 0.99999, 1.0, None)]
    assert told == ["0 %", "0.1 %", "61 %", "99.5 %", "99.9 %", "100 %", "–"]
    assert [seconds(v).replace("\u00a0", " ") for v in (0.0123, 0.34, 1.25, 75.2)] == [
        "12.3 ms",
        "340 ms",
        "1.2 s",
        "75 s",
    ]


def test_companions_are_found_by_name(tmp_path: Path) -> None:
    for name in ("records.jsonl", "steps.jsonl", "decisions.jsonl", "a.records.parquet", "a.steps.jsonl"):
        (tmp_path / name).touch()
    server, named = Run.of_file(tmp_path / "records.jsonl"), Run.of_file(tmp_path / "a.records.parquet")
    assert (server.name, server.steps) == (tmp_path.name, tmp_path / "steps.jsonl")
    assert server.decisions == tmp_path / "decisions.jsonl"
    assert (named.name, named.steps, named.decisions) == ("a", tmp_path / "a.steps.jsonl", None)
    told = [is_companion(Path(n)) for n in ("a.steps.parquet", "steps.jsonl", "a.decisions.jsonl", "steps-a.parquet")]
    assert told == [True, True, True, False]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    run = Run("a", made_up(5))
    for runs, complaint in (
        ([], "at least one run"),
        ([run, run], "two runs are called 'a'"),
        ([replace(run, name=str(i)) for i in range(MAX_RUNS + 1)], f"at most {MAX_RUNS} runs"),
        ([Run("empty", [])], "run empty: there is no record"),
    ):
        with pytest.raises(InputError, match=complaint):
            write_report(runs, tmp_path / "page.html")
    with pytest.raises(InputError, match="cannot write"):
        write_report([run], tmp_path / "none" / "page.html")


@pytest.mark.parametrize("rows", [1, 2])
def test_runs_of_next_to_nothing_still_make_a_page(tmp_path: Path, rows: int) -> None:
    refused = [r for r in made_up(60) if r.finish_reason == "refused"]
    cancelled = [r._replace(finish_reason="cancelled", slo_met=False) for r in refused]
    for name, records in (("one", made_up(rows)), ("refused", refused[:rows]), ("cancelled", cancelled[:rows])):
        write_report([Run(name, records)], tmp_path / f"{name}.html", promises=DEFAULT_CLASSES)
        assert data_of(tmp_path / f"{name}.html")["runs"][0]["name"] == name


def test_the_library_of_charts_is_the_published_one_with_its_licence() -> None:
    assets = files("tidegate.observe") / "assets"
    banner, code = (assets / "uPlot.iife.min.js").read_bytes().split(b"\n", 1)
    assert b"MIT licence" in banner
    assert sha256(code).hexdigest() == UPLOT
    assert "Permission is hereby granted" in (assets / "uPlot.LICENSE").read_text("utf-8")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "tidegate", "report", *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)})


def test_the_command_writes_the_page_and_prints_the_table(tmp_path: Path) -> None:
    for name, slow in (("vllm-v1", 3.0), ("joint", 1.0)):
        write_run(tmp_path, name, made_up(100, slow))
    (tmp_path / "real").mkdir()
    write_records(as_a_client_sees(made_up(100)), tmp_path / "real" / "a=b.jsonl")
    done = command(tmp_path, "--measured", f"joint={tmp_path}/real/a=b.jsonl", "--out", tmp_path / "r.html", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told["runs"]) == ["joint", "vllm-v1", "joint (measured)"]
    assert told["runs"]["joint"]["all"]["requests"] == 100
    assert [run["name"] for run in data_of(tmp_path / "r.html")["runs"]] == list(told["runs"])
    table = command(*tmp_path.glob("*.parquet"))
    assert max(map(len, table.stdout.splitlines())) <= 120
    assert table.stdout.count("vllm-v1") == 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.parquet",), "there is no such file"),
        (("none.csv",), ".parquet or .jsonl"),
        (("--out", "page.pdf", "x.parquet"), "name it FILE.html"),
        ((), "at least one run"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stderr.count("\n"), complaint in done.stderr) == (2, 1, True), done.stderr


def test_headlines_of_many_runs_stay_short(tmp_path: Path) -> None:
    runs = [Run(f"policy-{n}", made_up(300, 1.0 + n)) for n in range(MAX_RUNS)]
    write_report(runs, tmp_path / "page.html")
    words = words_of(tmp_path / "page.html")
    assert re.search(
        r"In all, policy-0 keeps [^.]+\([\d.]+ requests a second\), (policy-\d \d+ % \([\d.]+\), ){2}…, policy", words
    )
    assert "(no name)" not in words


def test_names_of_any_length_do_not_make_a_page_longer(tmp_path: Path) -> None:
    long = "x" * 50_000
    rows = [
        r._replace(slo_class=f"{long}{i % 3}", tenant=f"{long}{i % 4}", request_id=f"{long}{i}")
        for i, r in enumerate(made_up(200))
    ]
    write_report([Run("long", rows)], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 300_000
