"""A closed loop asks when it was answered, never more at a time than it has clients."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from tidegate.simulate.closed_loop import ClosedLoop
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import WorkloadRequest


def loop_of(text: str) -> ClosedLoop:
    return load_workload(text, closed_loops=True).loops[0]


def served(loop: ClosedLoop, service_s: float) -> tuple[list[WorkloadRequest], int]:
    """What is asked, in order, where every answer takes `service_s`; and the most that were out at a time."""
    clients = loop.start()
    out = [(r.arrival_s + service_s, n, r) for n, r in enumerate(clients.first())]
    heapq.heapify(out)
    asked, most = [r for _, _, r in sorted(out, key=lambda o: o[1])], len(out)
    while out:
        end_s, _, ended = heapq.heappop(out)
        request = clients.after(ended, end_s)
        if request is not None:
            assert request.arrival_s >= end_s
            heapq.heappush(out, (request.arrival_s + service_s, len(asked), request))
            asked.append(request)
            most = max(most, len(out))
    return asked, most


@given(st.integers(1, 9), st.integers(1, 40), st.floats(0, 100))
def test_all_is_asked_and_never_more_at_a_time_than_there_are_clients(clients: int, count: int, service: float) -> None:
    loop = loop_of(f"closed:clients={clients},count={count},think=exponential:2s,prompt=10..99,output=5")
    asked, most = served(loop, service)
    assert len(asked) == count
    assert most == min(clients, count)
    assert [r.prompt_tokens for r in sorted(asked, key=lambda r: r.prompt_tokens)] == sorted(
        r.prompt_tokens for r in loop.requests
    )


def test_equal_answers_make_equal_runs_and_think_time_passes_in_between() -> None:
    loop = loop_of("closed:clients=1,count=4,think=3s,prompt=10,output=5")
    assert [r.arrival_s for r in served(loop, 2.0)[0]] == [3.0, 8.0, 13.0, 18.0]
    assert served(loop, 2.0) == served(loop, 2.0)
    assert loop == loop_of("closed:clients=1,count=4,think=3s,prompt=10,output=5")


def test_slower_answers_do_not_change_what_is_asked() -> None:
    loop = loop_of("closed:clients=4,count=50,think=exponential:1s,prompt=10..999,output=5")
    quick, slow = ([r.prompt_tokens for r in served(loop, s)[0]] for s in (0.1, 50.0))
    assert sorted(quick[4:]) == sorted(slow[4:])


def test_a_client_keeps_its_tenant() -> None:
    loop = loop_of("closed:clients=4,count=100,tenants=2,prompt=10,output=5,batch")
    asked, _ = served(loop, 1.0)
    assert sum(r.tenant == "tenant-0" for r in asked) == 50
    assert {r.slo_class for r in asked} == {"batch"}


def test_who_is_answered_sooner_asks_more() -> None:
    """One client is answered again and again while the other waits: all that is asked next is the first one's."""
    clients = loop_of("closed:clients=2,count=9,tenants=2,prompt=10,output=5").start()
    waiting, request = clients.first()
    assert {waiting.tenant, request.tenant} == {"tenant-0", "tenant-1"}
    for _ in range(7):
        following = clients.after(request, request.arrival_s + 1.0)
        assert following is not None
        assert following.tenant == request.tenant
        request = following
    assert clients.after(request, 99.0) is None
