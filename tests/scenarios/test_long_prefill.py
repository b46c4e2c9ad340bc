"""Scenarios of the group "Long prefill, chunking, decode starvation"."""

from functools import partial
from itertools import pairwise

import pytest

from tidegate.errors import InputError

PLAIN = "vllm-v1"


@pytest.mark.expects("S10", 0)
def test_s10_tiny_prompts_pass_the_huge_one(play):
    run = play("S10")
    assert all(fate.first_token_step - fate.arrival_step <= 3 for fate in run.family("S").values())


@pytest.mark.expects("S10", 1)
def test_s10_huge_prompt_pays_little(play):
    assert play("S10")["BIG"].first_token_step < 66


def test_s10_plain_engine_hides_them(play):
    plain = partial(play, policy=PLAIN)
    assert all(fate.first_token_step >= 64 for fate in plain("S10").family("S").values())
    with pytest.raises(AssertionError):
        test_s10_tiny_prompts_pass_the_huge_one(plain)


@pytest.mark.parametrize(("budget", "huge", "tiny"), [(512, 30_000, 100), (1024, 60_000, 64), (4096, 131_072, 700)])
def test_s10_as_a_kind(play, budget, huge, tiny):
    run = play("S10", set={"cfg.budget": budget, "BIG.p": huge, "S.p": tiny})
    alone = -(-huge // budget)
    others = -(-8 * (tiny + 31) // budget)
    assert all(fate.first_token_step - fate.arrival_step <= 2 * others for fate in run.family("S").values())
    assert run["BIG"].first_token_step < alone + others + 1


AGEING = {"cfg.params.aging_window": 200.0, "cfg.params.aging_rate": 9.0}
"""BIG is 24 steps of service and S is 2, so a rate of 9 puts BIG ahead of every S from step 198 on."""


@pytest.mark.expects("S11", 0)
def test_s11_long_job_starts_by_the_ageing_bound(play):
    assert play("S11", set=AGEING)["BIG"].admitted_step <= 201


@pytest.mark.expects("S11", 1)
def test_s11_long_job_answers(play):
    assert play("S11", set=AGEING)["BIG"].first_token_step <= 240


@pytest.mark.expects("S11", 2)
def test_s11_pure_sjf_starves_it(play):
    run = play("S11", steps=5000)
    assert run["BIG"].admitted_step is None
    assert run.outcome.waits["0"].longest_now_id == "BIG"


@pytest.mark.parametrize("rate", [1.0, 4.0, 20.0])
def test_s11_as_a_kind(play, rate):
    """The bound follows from the rate: service differs by 22 steps, so it is 22 * rate."""
    run = play("S11", set={**AGEING, "cfg.params.aging_rate": rate}, steps=600)
    assert run["BIG"].admitted_step <= 22 * rate + 2


@pytest.mark.expects("S12", 0)
def test_s12_decodes_advance(play):
    run = play("S12")
    for name in (*run.family("D"), *run.family("P")):
        assert run[name].max_gap_steps <= 5


@pytest.mark.expects("S12", 1)
def test_s12_prompts_advance(play):
    run = play("S12")
    pending: set[str] = set()
    dry = 0
    for row in run.rows:
        pending |= {name for name, fate in run.outcome.requests.items() if fate.arrival_step == row.step}
        waits = bool(pending - set(row.emitted))
        dry = dry + 1 if waits and max(row.scheduled.values(), default=0) <= 1 else 0
        pending -= set(row.emitted)
        assert dry < 3


def test_s12_no_step_mixes(play):
    for row in play("S12").rows:
        assert len({tokens > 1 for tokens in row.scheduled.values()}) <= 1


@pytest.mark.parametrize("turns", [1, 2, 6])
def test_s12_as_a_kind(play, turns):
    """The bound on a gap is whatever number of prefill steps in a row is configured."""
    changes = {"cfg.params.max_prefill_steps": turns, "D.o": 120, "P.until": 80, "P.o": 8}
    run = play("S12", set=changes)
    assert max(fate.max_gap_steps for fate in run.family("D").values()) == turns + 1


ADAPTIVE = {"cfg.params.budget": "adaptive"}


@pytest.mark.expects("S13", 0)
def test_s13_no_step_breaks_the_promise(play):
    run = play("S13", set=ADAPTIVE)
    for row, following in pairwise(run.rows):
        if any(name.startswith("D[") for name in row.scheduled):
            assert following.time - row.time <= 0.050 + 1e-9


@pytest.mark.expects("S13", 1)
def test_s13_alone_the_budget_is_used(play):
    run = play("S13", set=ADAPTIVE, without=["D"])
    assert max(run.scheduled("P").values()) == 8192


@pytest.mark.expects("S13", 2)
def test_s13_long_prompt_ends_in_time(play):
    run = play("S13", set=ADAPTIVE)
    chunks = [step for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step and tokens]
    assert len(chunks) <= 31


def test_s13_without_a_margin_takes_all_that_fits(play):
    run = play("S13", set={**ADAPTIVE, "cfg.params.margin": 0.0})
    chunks = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert len(chunks) == 29
    assert max(chunks) == 2080


def test_s13_a_fixed_budget_breaks_the_promise(play):
    with pytest.raises(AssertionError):
        test_s13_no_step_breaks_the_promise(lambda name, set: play(name, policy="priority"))


@pytest.mark.parametrize(
    ("pace", "formula", "streams"), [(30, "5 + 0.01*tokens", 8), (80, "20 + 0.5*decodes + 0.03*prefill_tokens", 40)]
)
def test_s13_as_a_kind(play, pace, formula, streams):
    """Whatever the machine and the promise: no step is longer, and none is shorter than it need be."""
    run = play("S13", set={**ADAPTIVE, "cfg.step_ms": formula, "D.x": streams, "D.slo.tpot_ms": pace})
    lengths = [
        following.time - row.time
        for row, following in pairwise(run.rows)
        if "P" in row.scheduled and "D[0]" in row.scheduled
    ]
    assert max(lengths) <= pace / 1000
    assert max(lengths) >= 0.94 * pace / 1000


def test_s13_a_promise_that_leaves_no_room_lets_prompts_crawl(play):
    run = play("S13", set={**ADAPTIVE, "D.slo.tpot_ms": 8.3, "cfg.params.floor": 100, "P.p": 3000})
    chunks = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert chunks == [100] * 30


@pytest.mark.expects("S15", 0)
def test_s15_short_ones_join_the_first_steps(play):
    run = play("S15")
    assert run["B"].first_token_step <= 2
    assert run["C"].first_token_step <= 2


@pytest.mark.expects("S15", 1)
def test_s15_long_one_pays_little(play):
    assert play("S15")["A"].first_token_step <= 10


def test_s15_plain_engine_fills_by_one(play):
    plain = partial(play, policy=PLAIN)
    run = plain("S15")
    assert run["B"].first_token_step == run["C"].first_token_step == 9
    with pytest.raises(AssertionError):
        test_s15_short_ones_join_the_first_steps(plain)


@pytest.mark.parametrize(("budget", "seats"), [(256, 3), (512, 4), (1024, 3)])
def test_s15_as_a_kind(play, budget, seats):
    run = play("S15", set={"cfg.budget": budget, "cfg.max_seqs": seats, "B.x": seats - 2})
    assert all(fate.first_token_step <= 2 for name, fate in run.outcome.requests.items() if name != "A")
    assert run["A"].first_token_step <= -(-5000 // budget) + 1


@pytest.mark.expects("S16", 0)
def test_s16_draft_tokens_count(play):
    for row in play("S16").rows:
        assert 0 <= sum(row.scheduled.values()) <= 512


@pytest.mark.expects("S16", 1)
def test_s16_prompt_gets_the_rest(play):
    run = play("S16")
    chunks = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert min(chunks[:-1]) >= 192
    assert run["P"].first_token_step <= 70


def test_s16_the_whole_step_is_used_and_told(play):
    run = play("S16")
    shared = [row for row in run.rows[50:70] if "P" in row.scheduled]
    assert shared
    assert all(sum(row.scheduled.values()) == 512 and row.scheduled["D[0]"] == 5 for row in shared)
    assert {row.emitted["D[0]"] for row in shared} == {1}


@pytest.mark.parametrize(("draft", "streams", "budget"), [(1, 30, 256), (7, 10, 128), (3, 64, 400)])
def test_s16_as_a_kind(play, draft, streams, budget):
    changes = {"cfg.draft": draft, "cfg.budget": budget, "cfg.max_seqs": streams + 2, "D.x": streams}
    run = play("S16", set=changes)
    left = budget - streams * (1 + draft)
    chunks = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert set(chunks[:-1]) == {left}
    assert max(sum(row.scheduled.values()) for row in run.rows) == budget


@pytest.mark.parametrize(
    ("changes", "told"), [({"cfg.accept": 2}, "one token a decode"), ({"cfg.draft": None}, "says nothing")]
)
def test_s16_what_drafts_cannot_do_is_refused(play, changes, told):
    with pytest.raises(InputError, match=told):
        play("S16", set=changes)


@pytest.mark.expects("S16", 2)
def test_s16_a_budget_below_the_decodes_is_refused(play):
    with pytest.raises(InputError) as refusal:
        play("S16", set={"cfg.max_seqs": 256})
    assert all(knob in str(refusal.value) for knob in ("max_num_seqs", "draft", "max_num_batched_tokens"))
