"""Who gives way: smallest sets that cover the shortage, whom the choice spares."""

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.policies.headroom import headroom
from tidegate.core.policies.victims import (
    LeastWorkLost,
    LowestPriority,
    MostHeadroom,
    Newest,
    covers,
    smallest_set,
)
from tidegate.core.policy import PolicyContext, Victim
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import VICTIMS
from tidegate.core.request import Request
from tidegate.core.slo import Slo
from tidegate.core.view import Candidate, Need


def context(now: float = 0.0) -> PolicyContext:
    return PolicyContext(HistoryPredictor(), StepTime(0.01, 0.1), now)


candidates = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20), st.integers(0, 2)), max_size=7)


def built(spec: list[tuple[int, int, int]]) -> list[Candidate]:
    found = []
    for seq, (blocks, lost, tier) in enumerate(spec):
        r = Request(f"r{seq}", prompt_tokens=1)
        r.seq, r.tier = seq, tier
        found.append(Candidate(r, blocks, lost, seconds=lost * 1e-4))
    return found


@given(candidates, st.integers(0, 12), st.integers(0, 2))
def test_victims_are_a_smallest_cover_or_nobody(spec: list[tuple[int, int, int]], blocks: int, seats: int) -> None:
    offered, need = built(spec), Need(blocks, seats)
    if not blocks and not seats:
        return
    chosen = smallest_set(offered, need, cost=lambda c: c.seconds)
    sizes = [n for n in range(1, len(offered) + 1) for s in itertools.combinations(offered, n) if covers(s, need)]
    if not sizes:
        assert chosen == []
        return
    assert covers(chosen, need)
    assert len(chosen) == min(sizes)
    assert len({c.request.id for c in chosen}) == len(chosen)
    if len(chosen) == 1:
        assert chosen[0].lost == min(c.lost for c in offered if covers([c], need))


@given(candidates, st.integers(1, 12), st.sampled_from([make() for make in VICTIMS.values()]))
def test_every_victim_policy_covers_or_evicts_nobody(
    spec: list[tuple[int, int, int]], blocks: int, policy: Victim
) -> None:
    offered, need = built(spec), Need(blocks, 0)
    chosen = policy.choose(offered, need, context())
    assert covers(chosen, need) == covers(offered, need)
    assert not chosen or covers(chosen, need)
    if isinstance(policy, LowestPriority) and chosen:
        spared = [c for c in offered if c not in chosen]
        worst_spared = max((c.request.tier for c in spared if c.blocks >= blocks), default=-1)
        assert min(c.request.tier for c in chosen) >= min(worst_spared, max(c.request.tier for c in chosen))


def test_ties_go_to_the_newest() -> None:
    offered = built([(3, 5, 0), (3, 5, 0), (3, 5, 0)])
    assert LeastWorkLost().choose(offered, Need(1, 0), context())[0].request.id == "r2"
    assert Newest().choose(offered, Need(1, 0), context())[0].request.id == "r2"


def streaming(id: str, slo: Slo, *, first: float = 0.0, emitted: int = 1, tier: int = 0) -> Candidate:
    """A request that arrived at 0, got its first token at `first` and has `emitted` of 20 outputs."""
    r = Request(id, prompt_tokens=10, max_tokens=20, slo=slo)
    r.first_token_at, r.tier = first, tier
    r.count(planned=10 + emitted - 1, computed=10 + emitted - 1, emitted=emitted)
    return Candidate(r, 1, 10, seconds=1.0)


def test_headroom_is_the_pause_that_breaks_no_promise() -> None:
    assert headroom(streaming("r", Slo()).request, context()) == inf
    # A stream at exactly 0.5 s a token brings its fifth token at 1 + 4 * 0.5.
    assert headroom(streaming("r", Slo(tpot=0.5), first=1.0, emitted=4).request, context(2.0)) == pytest.approx(1.0)
    assert headroom(streaming("r", Slo(tbt=0.3)).request, context(9.0)) == 0.3
    # 16 outputs to come at 0.1 s each.
    assert headroom(streaming("r", Slo(e2e=9.0), emitted=4).request, context(3.0)) == pytest.approx(9 - 3 - 1.6)
    waiting = Request("w", prompt_tokens=100, slo=Slo(ttft=2.0))
    assert headroom(waiting, context(0.5)) == pytest.approx(2.0 - 0.5 - 1.0)


def chosen(policy: Victim, offered: list[Candidate], blocks: int = 1) -> list[str]:
    return [c.request.id for c in policy.choose(offered, Need(blocks, 0), context(2.0))]


def test_who_can_pause_longest_gives_way() -> None:
    free = streaming("free", Slo())
    broken = streaming("broken", Slo(e2e=1.0))
    near = streaming("near", Slo(tpot=0.5), first=1.0, emitted=3)
    far = streaming("far", Slo(tpot=0.5), first=1.0, emitted=9)
    assert chosen(MostHeadroom(), [near, far]) == ["far"]
    assert chosen(MostHeadroom(), [near, broken, far]) == ["broken"]
    assert sorted(chosen(MostHeadroom(), [free, near, broken, far], blocks=3)) == ["broken", "far", "free"]


def test_class_goes_before_headroom_where_it_is_asked_to() -> None:
    urgent = streaming("urgent", Slo(), tier=0)
    batch = streaming("batch", Slo(tpot=0.5), first=1.0, emitted=3, tier=10)
    assert chosen(MostHeadroom(), [urgent, batch]) == ["urgent"]
    assert chosen(MostHeadroom(tiers=True), [urgent, batch]) == ["batch"]


def short(**given: object) -> Run:
    """Three equals of 8 + 60 tokens that outgrow 22 blocks of 8 together."""
    return Run.of("fcfs", limits(num_blocks=22, block_size=8, resume_span=8, prefix_caching=False), **given)


def test_whoever_is_about_to_end_is_not_evicted_while_another_can_be() -> None:
    evicted = {}
    for spare in (True, False):
        run = short(victim="newest", spare=spare)
        run.add(request("a", 8, 60), request("b", 8, 60), request("c", 8, 53))  # the first shortage is at output 49
        run.until_idle()
        evicted[spare] = run.preemptions()[0][1]
    assert evicted == {True: "b", False: "c"}


def test_nobody_gives_way_twice_in_a_row_while_an_equal_runs() -> None:
    again = {}
    for spare in (True, False):
        room = limits(num_blocks=20, block_size=4, resume_span=0, nearly_done=0, prefix_caching=False)
        run = Run.of("fcfs", room, victim="least-work", spare=spare)
        run.add(*(request(f"r{i}", 4 + i, 40) for i in range(6)))
        run.until_idle()
        victims = [who for _, who, _ in run.preemptions()]
        again[spare] = sum(a == b for a, b in itertools.pairwise(victims))
    assert again[False] > 0 == again[True]
