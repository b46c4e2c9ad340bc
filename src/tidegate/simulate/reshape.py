"""Makes workloads of workloads: cut, thin, shift, label and merge them. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from tidegate.errors import InputError
from tidegate.simulate.seeds import Decides, SeedKey, stream
from tidegate.simulate.shipped import spread
from tidegate.simulate.workload import Workload, WorkloadRequest


def between(workload: Workload, start_s: float, end_s: float) -> Workload:
    """What arrives from `start_s` on and before `end_s`; `start_s` becomes 0."""
    workload.refuse_loops("cut")
    kept = (r for r in workload if start_s <= r.arrival_s < end_s)
    return replace(workload, requests=_shifted(kept, -start_s))


def rows(workload: Workload, start: int, end: int | None) -> Workload:
    """Requests number `start` (from 0) to `end` - 1; where the first ones are cut off, the rest begins at 0."""
    workload.refuse_loops("cut")
    kept = workload.requests[start:end]
    return replace(workload, requests=_shifted(kept, -kept[0].arrival_s) if start and kept else kept)


def thinned(workload: Workload, share: float, key: SeedKey) -> Workload:
    """Every request stays with probability `share`, by lot, and when it arrives.

    With the same key, what stays at a smaller share is part of what stays at a larger one.
    """
    if not 0 <= share <= 1:
        raise InputError(f"{share:g} is not a share between 0 and 1")
    workload.refuse_loops("thinned")
    lots = stream(key, Decides.THINNING).random(len(workload)).tolist()
    return replace(workload, requests=tuple(r for r, lot in zip(workload, lots, strict=True) if lot < share))


def unticked(workload: Workload, tick_s: float, key: SeedKey) -> Workload:
    """Arrivals that were recorded in ticks of `tick_s`, by lot and in their order all over their tick."""
    workload.refuse_loops("spread")
    ticks = np.array([r.arrival_s for r in workload], np.float64)
    arrivals = spread(ticks, tick_s, stream(key, Decides.SPREADING)).tolist()
    return replace(workload, requests=tuple(replace(r, arrival_s=t) for r, t in zip(workload, arrivals, strict=True)))


def delayed(workload: Workload, by_s: float) -> Workload:
    """The same, all of it `by_s` later."""
    loops = tuple(replace(loop, start_s=loop.start_s + by_s) for loop in workload.loops)
    return replace(workload, requests=_shifted(workload, by_s), loops=loops)


def labelled(workload: Workload, **labels: Any) -> Workload:
    """The same with these fields (slo_class, tenant, priority) of every request set."""
    return changed(workload, lambda request: replace(request, **labels))


def changed(workload: Workload, change: Callable[[WorkloadRequest], WorkloadRequest]) -> Workload:
    """The same with every request changed, those of closed loops included; arrivals must stay."""
    loops = tuple(loop.changed(change) for loop in workload.loops)
    return replace(workload, requests=tuple(map(change, workload)), loops=loops)


def merged(parts: Sequence[tuple[Hashable, Workload]]) -> Workload:
    """All parts as one, in order of arrival; of two that arrive at once, the earlier part's goes first.

    Each part comes with its source: parts of one source share what their `hash_ids` name, while equal ids of
    different sources are different blocks and are renumbered.
    """
    if len(parts) == 1:
        return parts[0][1]
    apart = _told_apart(parts)
    requests = sorted(chain.from_iterable(apart), key=attrgetter("arrival_s"))
    name = "+".join(dict.fromkeys(workload.name for workload in apart))
    return Workload(name, tuple(requests), tuple(loop for workload in apart for loop in workload.loops))


def _told_apart(parts: Sequence[tuple[Hashable, Workload]]) -> list[Workload]:
    """The parts with hash ids that are equal only where the source is."""
    ends: dict[Hashable, tuple[int, int]] = {}
    for source, workload in parts:
        ids = [i for r in _all_requests(workload) for i in r.hash_ids]
        if ids:
            ids += ends.get(source, ())
            ends[source] = (min(ids), max(ids))
    shifts: dict[Hashable, int] = {}
    free: int | None = None
    for source, (low, high) in ends.items():
        shifts[source] = 0 if free is None else free - low
        free = high + shifts[source] + 1
    return [_renumbered(workload, shifts.get(source, 0)) for source, workload in parts]


def _renumbered(workload: Workload, by: int) -> Workload:
    if by == 0:
        return workload
    return changed(workload, lambda r: replace(r, hash_ids=tuple(i + by for i in r.hash_ids)) if r.hash_ids else r)


def _all_requests(workload: Workload) -> Iterable[WorkloadRequest]:
    return chain(workload, *(loop.requests for loop in workload.loops))


def _shifted(requests: Iterable[WorkloadRequest], by_s: float) -> tuple[WorkloadRequest, ...]:
    if by_s == 0:
        return tuple(requests)
    return tuple(replace(r, arrival_s=r.arrival_s + by_s) for r in requests)
