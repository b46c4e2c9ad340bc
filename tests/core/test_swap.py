"""Swap or recompute: what victims keep on the host, what comes back, what failing copies cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.copy_time import CopyTime
from tidegate.core.host import HostPool
from tidegate.core.plan import Copy
from tidegate.core.policies.restores import Cheaper, SwapOut
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.view import Candidate, HostView
from tidegate.errors import KvError


def tight(restore: str, depth: int = 1, *, host: int = 64, disk: int = 0, **given: object) -> Run:
    """Two requests of some 65 tokens in a pool that holds one of them and a half."""
    room = limits(num_blocks=12, block_size=8, host_blocks=host, disk_blocks=disk, resume_span=8, **given)
    run = Run.of("fcfs", room, depth, restore=restore)
    run.add(request("a", 7, 60), request("b", 4, 60))
    return run


def copies(run: Run) -> tuple[list[Copy], list[Copy]]:
    return [c for p in run.plans for c in p.swapped_out], [c for p in run.plans for c in p.swapped_in]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swapped_victim_computes_nothing_again(depth: int) -> None:
    run = tight("swap", depth, prefix_caching=False)
    run.until_idle()
    out, back = copies(run)
    assert out
    assert [(c.request_id, c.host) for c in out] == [(c.request_id, c.host) for c in back]
    b = run.ended["b"].request
    assert b.preemptions >= 1
    assert b.recomputed_tokens == 0
    assert b.swapped_blocks == sum(len(c.device) for c in out)
    assert run.received == {"a": list(range(60)), "b": list(range(60))}


def test_what_the_prefix_cache_still_holds_is_not_copied_back() -> None:
    run = tight("swap")
    run.until_idle()
    out, back = copies(run)
    assert sum(len(c.device) for c in back) < sum(len(c.device) for c in out)


def test_nothing_is_computed_in_the_step_that_brings_it_back() -> None:
    run = tight("swap", prefix_caching=False)
    run.until_idle()
    at = next(i for i, plan in enumerate(run.plans) if plan.swapped_in)
    slot = run.plans[at].joined[0].slot
    assert run.plans[at].joined[0].cached % 8, "the test must bring back a half-filled block"
    assert slot not in run.plans[at].emitting()
    assert run.plans[at + 1].chunks[0].slot == slot
    assert run.plans[at + 1].chunks[0].length == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("direction", ["swapped_out", "swapped_in"])
def test_a_failed_copy_costs_a_recompute_and_no_token(depth: int, direction: str) -> None:
    run = tight("swap", depth, prefix_caching=False)
    run.fails = lambda copy: any(copy in getattr(plan, direction) for plan in run.plans)
    run.until_idle()
    assert run.received == {"a": list(range(60)), "b": list(range(60))}
    assert run.ended["b"].request.recomputed_tokens > 0
    assert run.scheduler.swap.pool.used == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("later", range(4))
@pytest.mark.parametrize("direction", ["swapped_out", "swapped_in"])
def test_a_client_may_go_while_its_kv_is_under_way(depth: int, direction: str, later: int) -> None:
    run = tight("swap", depth)
    while not any(getattr(plan, direction) for plan in run.plans):
        run.step()
    run.steps(later)
    run.abort("b")
    run.until_idle()
    assert run.received["a"] == list(range(60))
    assert run.scheduler.swap.pool.used == 0
    assert run.scheduler.kv.available == 12


def test_a_full_host_means_recompute_and_the_event_says_so() -> None:
    run = tight("swap", host=1)
    run.until_idle()
    assert copies(run) == ([], [])
    assert "no host room for" in run.preemptions()[0][2]


def test_the_second_tier_takes_what_memory_cannot() -> None:
    run = tight("swap", host=2, disk=64)
    run.until_idle()
    out, _ = copies(run)
    assert out
    assert all(block >= 2 for c in out for block in c.host)


def price(restore: Cheaper | SwapOut, lost: int, held: int, host: HostView) -> tuple[str, float, str]:
    return restore.price(Candidate(request("r", 1, 1), 0, lost, held), host, context())


def context() -> PolicyContext:
    return PolicyContext(HistoryPredictor(), StepTime(50e-6, 0.02))


def test_the_cheaper_way_is_taken_and_the_numbers_are_told() -> None:
    host = HostView(60, 0, 0.0, 1e-4, 1e-3)
    assert price(Cheaper(), 208, 13, host) == ("swap", pytest.approx(2.6e-3), "swap 2.6 ms < recompute 10.4 ms")
    slow = host._replace(memory_seconds=1e-3)
    assert price(Cheaper(), 208, 13, slow) == (
        "recompute",
        pytest.approx(10.4e-3),
        "swap 26 ms >= recompute 10.4 ms",
    )


def test_copies_that_wait_before_it_count() -> None:
    busy = HostView(60, 0, 0.02, 1e-4, 1e-3)
    assert price(Cheaper(), 208, 13, busy)[0] == "recompute"


def test_a_prefix_that_stays_cached_makes_recompute_cheap() -> None:
    assert price(Cheaper(), 16, 13, HostView(60, 0, 0.0, 1e-4, 1e-3))[0] == "recompute"


def test_the_tier_that_has_room_sets_the_price() -> None:
    host = HostView(8, 60, 0.0, 1e-4, 1e-3)
    assert price(SwapOut(), 208, 13, host) == ("swap", pytest.approx(26e-3), "")
    assert price(Cheaper(), 208, 13, host)[0] == "recompute"
    assert price(Cheaper(), 208, 13, HostView(8, 8, 0.0, 1e-4, 1e-3))[2] == "no host room for 13 blocks"


def test_copy_times_follow_what_was_measured() -> None:
    times = CopyTime(memory=1e-4)
    for _ in range(50):
        times.observe(10, 0.01, disk=False)
    assert times.memory == pytest.approx(1e-3, rel=1e-3)
    assert times.disk == CopyTime().disk
    times.observe(0, 1.0, disk=False)
    times.observe(5, 0.0, disk=False)
    assert times.memory == pytest.approx(1e-3, rel=1e-3)


def test_a_host_block_cannot_be_given_back_twice() -> None:
    pool = HostPool(2, 1)
    taken = pool.take(2)
    pool.give_back(taken)
    with pytest.raises(KvError, match="twice"):
        pool.give_back(taken)
    with pytest.raises(KvError, match="2 in memory and 1 on disk"):
        pool.take(3)


@given(
    jobs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2)), max_size=9),
    blocks=st.integers(8, 20),
    host=st.integers(0, 20),
    disk=st.integers(0, 20),
    depth=st.integers(1, 2),
    restore=st.sampled_from(["auto", "swap"]),
    caching=st.booleans(),
    unlucky=st.sets(st.integers(0, 30)),
    gone=st.dictionaries(st.integers(0, 8), st.integers(0, 60)),
)
def test_no_mix_of_copies_failures_and_departures_loses_a_token_or_a_block(
    jobs: list[tuple[int, int, int, int]],
    blocks: int,
    host: int,
    disk: int,
    depth: int,
    restore: str,
    caching: bool,
    unlucky: set[int],
    gone: dict[int, int],
) -> None:
    room = limits(
        num_blocks=blocks,
        block_size=4,
        host_blocks=host,
        disk_blocks=disk,
        prefix_caching=caching,
        resume_span=4,
        max_num_batched_tokens=32,
    )
    run = Run.of("priority", room, depth, restore=restore)
    seen: dict[int, int] = {}

    def fails(copy: Copy) -> bool:
        return seen.setdefault(id(copy), len(seen)) in unlucky

    run.fails = fails
    arrivals = {i: request(f"r{i}", p, o, priority=priority) for i, (_, p, o, priority) in enumerate(jobs)}
    for now in range(61):
        for i, (at, *_) in enumerate(jobs):
            if at == now:
                run.add(arrivals[i])
            if gone.get(i) == now and i < len(jobs):
                run.abort(f"r{i}")
        run.step()
    run.until_idle()
    assert run.scheduler.swap.pool.used == 0
    assert run.scheduler.kv.available == blocks
    for i, (_, prompt, outputs, _) in enumerate(jobs):
        got = run.received.get(f"r{i}", [])
        assert got == list(range(len(got)))
        if i not in gone and -(-(prompt + outputs - 1) // 4) <= blocks:
            assert len(got) == outputs
