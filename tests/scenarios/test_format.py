"""The scenario format and the command that runs it."""

import json
from collections import Counter

import pytest

from tidegate.cli.main import main
from tidegate.errors import InputError
from tidegate.simulate.scenario import parse, parse_override
from tidegate.simulate.scenario_run import run

SMALL = """
id: T1
title: a small one
cfg: {kv: 16, budget: 64, max_seqs: 2}
reqs:
  - {id: A, x: 2, t: 1, p: 40, o: 3, prio: 4}
  - {id: B, every: 2, from: 0, until: 5, p: 8, o: 1}
expect: [it works]
"""


def test_copies_and_streams_are_named_and_ordered():
    scenario = parse(SMALL)
    assert [request.id for request in scenario.requests] == ["B[0]", "A[0]", "A[1]", "B[1]", "B[2]"]
    assert [request.arrival for request in scenario.requests] == [0, 1, 1, 2, 4]
    assert scenario.config.headroom == "none"
    assert scenario.expect == ("it works",)


def test_overrides_change_add_and_remove():
    scenario = parse(
        SMALL, {"cfg.kv": 99, "A.prio": 1, "A.slo.ttft_ms": 250, "B.every": None, "B.from": None, "B.until": None}
    )
    assert scenario.config.num_blocks == 99
    assert {request.id: request.priority for request in scenario.requests} == {"A[0]": 1, "A[1]": 1, "B": 0}
    assert scenario.requests[1].slo.ttft == 0.25


@pytest.mark.parametrize(
    ("text", "expected"), [("H.prio=10", ("H.prio", 10)), ("cfg.policy=sjf", ("cfg.policy", "sjf"))]
)
def test_an_override_is_read_as_yaml(text, expected):
    assert parse_override(text) == expected


MISTAKES = {
    "not yaml": (SMALL + "x: [", "is not YAML"),
    "a list": ("- 1", "not a scenario"),
    "unknown key": (SMALL + "reqst: []", "did you mean 'reqs'"),
    "unknown cfg": (SMALL.replace("budget:", "budgit: 3, budget:"), "unknown cfg key 'budgit'; did you mean 'budget'"),
    "unknown request key": (SMALL.replace("prio:", "proi: 3, prio:"), "A: request key 'proi'; did you mean 'prio'"),
    "no rate": (SMALL.replace("kv: 16", "kv: 16, prefill_rate: fast"), 'cfg.prefill_rate is such as "10000 tok/s"'),
    "two lengths": (SMALL.replace("kv: 16", "kv: 16, step_ms: 1, prefill_rate: 9 tok/s"), "give one of them"),
    "no time": (SMALL.replace("kv: 16", "kv: 16, queue_ttl: 0"), "cfg.queue_ttl is above 0"),
    "no adapters": (
        SMALL.replace("kv: 16", "kv: 16, limits: {resource_patience: 3}"),
        "does nothing without cfg.max_loras",
    ),
    "unknown cost": (SMALL.replace("kv: 16", "kv: 16, cost: {copy_us: 4}"), "did you mean 'copy_block_us'"),
    "copies for nothing": (SMALL.replace("kv: 16", "kv: 16, cost: {copy_block_us: 4}"), "without cfg.host_blocks"),
    "copies of no length": (
        SMALL.replace("kv: 16", "kv: 16, host_blocks: 4, cost: {copy_block_us: 0}"),
        "cfg.cost.copy_block_us is microseconds above 0, not 0",
    ),
    "unknown headroom": (SMALL.replace("kv: 16", "kv: 16, headroom: watermerk"), "did you mean 'watermark'"),
    "prose": ("id: S43\nload: 20 req/s for 600 s\ncfg: {kv: 1}", "describes its arrivals in words"),
    "no pool": (SMALL.replace("kv: 16, ", ""), "cfg.kv is missing"),
    "no requests": ("cfg: {kv: 1}", "`reqs` is missing"),
    "same id": (SMALL.replace("id: B", "id: A"), "used twice"),
    "id cfg": (SMALL.replace("id: B", "id: cfg"), "means the configuration"),
    "no prompt": (SMALL.replace("p: 40, ", ""), "A.p is missing"),
    "text for a number": (SMALL.replace("p: 40", "p: many"), "A.p must be a whole number, not 'many'"),
    "zero outputs": (SMALL.replace("o: 3", "o: 0"), "A.o must be at least 1"),
    "declared too little": (SMALL.replace("o: 3", "o: 3, max_o: 2"), "A.max_o must be at least 3"),
    "both kinds of arrival": (SMALL.replace("every: 2", "every: 2, t: 3"), "takes neither"),
    "empty stream": (SMALL.replace("until: 5", "until: 0"), "without a member"),
    "cancelled too early": (SMALL.replace("o: 3", "o: 3, cancel: 0"), "before it arrives"),
    "hit and share": (SMALL.replace("p: 8", "p: 8, hit: 2, share: 2"), "both `hit`"),
    "unknown prefix": (SMALL.replace("p: 8", 'p: 8, hit: "X=2"'), "B.hit names prefix 'X'"),
    "unknown promise": (SMALL.replace("p: 8", "p: 8, slo: {tttf_ms: 2}"), "did you mean 'ttft_ms'"),
    "bad formula": (SMALL.replace("kv: 16", 'kv: 16, step_ms: "8 + prefil"'), "'prefil' is not understood"),
    "blocked in steps of a length": (
        SMALL.replace("kv: 16", 'kv: 16, step_ms: "8"').replace("o: 3", "o: 3, blocked_until: 9"),
        "no time known in advance",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_sentence(mistake):
    text, message = MISTAKES[mistake]
    with pytest.raises(InputError) as complaint:
        parse(text)
    assert message in str(complaint.value)
    assert "\n" not in str(complaint.value)


@pytest.mark.parametrize("name", ["", "H", "Hx.prio", "cfg.x.y"])
def test_an_override_of_nothing_is_refused(name):
    with pytest.raises(InputError):
        parse(SMALL, dict([parse_override(f"{name}=3")]))


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="max_num_batched_tokens"):
        run(parse(SMALL, {"cfg.max_seqs": 100}))


def test_a_resident_prefix_is_a_hit_for_everybody():
    text = """
    id: T2
    cfg: {kv: 64, budget: 256, max_seqs: 4, cached: {X: 4}}
    reqs: [{id: HOT, x: 3, t: 0, p: 100, hit: 70, o: 2}, {id: WARM, t: 0, p: 64, hit: "X=64", o: 2}]
    """
    outcome = run(parse(text))
    assert [fate.cached_tokens for fate in outcome.requests.values()] == [64, 64, 64, 48]  # whole blocks, at most p-1
    assert all(sum(row.scheduled.values()) <= 256 for row in outcome.steps)


def test_steps_may_have_a_length():
    outcome = run(parse(SMALL, {"cfg.step_ms": "10 + decodes"}))
    assert [row.time for row in outcome.steps[:3]] == pytest.approx([0, 0.010, 0.020])
    assert outcome.timing["B[0]"]["ttft"] == pytest.approx(0.010)


def test_a_run_that_cannot_end_says_so():
    outcome = run(parse(SMALL, {"A.blocked_until": "never"}))
    assert outcome.stuck
    assert outcome.requests["A[0]"].finish_reason is None
    assert outcome.waits["4"].waiting_now == 2


def test_a_run_may_be_cut_short():
    outcome = run(parse(SMALL), max_steps=2)
    assert len(outcome.steps) == 2
    assert outcome.waits["4"].longest_now_id in (None, "A[0]", "A[1]")


REQUEST_KEYS = [
    "arrival_step", "admitted_step", "first_token_step", "finish_step", "finish_reason", "outputs", "preemptions",
    "recomputed_tokens", "swapped_blocks", "cached_tokens", "max_gap_steps",
]  # fmt: skip
STEP_KEYS = [
    "step", "time", "scheduled", "emitted", "admitted", "preempted", "restored", "why", "rejected", "finished",
    "free_blocks", "waiting", "running", "held_back_by",
]  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `tidegate scenario` on SMALL (or another text); its exit code, output and complaint."""

    def command(*arguments, text=SMALL):
        file = tmp_path / "small.yaml"
        file.write_text(text)
        monkeypatch.setattr("sys.argv", ["tidegate", "scenario", str(file), *arguments])
        with pytest.raises(SystemExit) as leave:
            main()
        out, err = capsys.readouterr()
        return leave.value.code, out, err

    return command


def test_json_has_the_documented_shape(command):
    code, out, _ = command("--json")
    told = json.loads(out)
    assert code == 0
    assert list(told) == ["scenario", "policy", "steps_run", "requests", "steps", "timing", "waits", "stuck"]
    assert (told["scenario"], told["policy"], told["steps_run"]) == ("T1", "joint", len(told["steps"]))
    assert all(list(fate) == REQUEST_KEYS for fate in told["requests"].values())
    assert all(list(step) == STEP_KEYS for step in told["steps"])
    timing = ["queued", "ttft", "tpot", "max_gap", "p99_gap", "e2e", "preempted", "missed"]
    assert told["timing"]
    assert all(list(seen) == timing for seen in told["timing"].values())
    assert [step["step"] for step in told["steps"]] == list(range(told["steps_run"]))
    emitted = Counter(name for step in told["steps"] for name in step["emitted"])
    assert emitted == {name: fate["outputs"] for name, fate in told["requests"].items()}


def test_every_file_gets_a_document(tmp_path, monkeypatch, capsys):
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    monkeypatch.setattr("sys.argv", ["tidegate", "scenario", str(file), str(file), "--json", "--policy", "fcfs"])
    with pytest.raises(SystemExit):
        main()
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["policy"] for document in documents] == ["fcfs", "fcfs"]


def test_a_file_that_cannot_be_run_stops_no_other(tmp_path, monkeypatch, capsys):
    texts = {
        "good": SMALL,
        "deep": "id: " + "[" * 5000 + "]" * 5000,
        "delayed": SMALL.replace("cfg: {", "cfg: {free_delay: 5, "),
        "good too": SMALL,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [str(tmp_path / f"{name}.yaml") for name in texts]
    monkeypatch.setattr("sys.argv", ["tidegate", "scenario", *files, "--json"])
    with pytest.raises(SystemExit) as leave:
        main()
    out, err = capsys.readouterr()
    assert leave.value.code == 2
    assert [json.loads(line)["scenario"] for line in out.splitlines()] == ["T1", "T1"]
    deep, delayed = err.splitlines()
    assert deep == "tidegate: deep.yaml is nested too deeply"
    assert delayed.startswith("tidegate: T1: ")
    assert "free_delay" in delayed


def test_the_table_is_bounded_and_tells_the_ends(command):
    code, out, _ = command("--rows", "4", "--set", "B.until=400")
    assert code == 0
    assert "more" in out
    assert "ends B[199]" in out
    assert "expected: it works" in out
    assert len(out.splitlines()) < 50


def test_the_table_names_who_gave_way(command):
    changes = ["--set", "cfg.max_seqs=1", "--set", "B.x=1", "--set", "B.p=99", "--set", "A.x=1", "--set", "A.t=0"]
    _, out, _ = command(*changes, text=SMALL.replace("every: 2, from: 0, until: 5", "t: 2"))
    assert "out A[0] (recompute: seat wanted by B[0]" in out
    assert "back A[0]" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "prioritty"], "unknown policy 'prioritty'; did you mean 'priority'?"),
        (["--set", "C.prio=3"], "neither cfg nor a request"),
        (["--set", "cfg.kv"], "not of the form"),
        (["--set", "cfg.params.windw=3"], "no parameter 'windw'"),
        (["--set", "cfg.params.share=half"], "cfg.params.share is a valid number, not 'half'"),
        (["/nonexistent/file.yaml"], "cannot read /nonexistent/file.yaml"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command, arguments, complaint):
    code, _, err = command(*arguments)
    assert code == 2
    assert complaint in err
    assert err.count("\n") == 1
