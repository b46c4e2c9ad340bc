"""Who gives way. Candidates come first in the order first; ties go to the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, inf

from tidegate.core.policies.headroom import headroom
from tidegate.core.policy import PolicyContext
from tidegate.core.view import Candidate, Need


@dataclass(frozen=True, slots=True)
class Newest:
    """Whoever comes last in the order goes first, until the shortage is covered (vLLM's rule).

    Bad at wasted work: the newest may be the one with the longest prompt.
    """

    def choose(self, candidates: Sequence[Candidate], need: Need, ctx: PolicyContext) -> Sequence[Candidate]:
        chosen: list[Candidate] = []
        for c in reversed(candidates):
            if covers(chosen, need):
                break
            chosen.append(c)
        return needed(chosen, need) if covers(chosen, need) else ()


@dataclass(frozen=True, slots=True)
class LeastWorkLost:
    """Of the smallest sets that cover the shortage, the one that is brought back in the fewest seconds."""

    def choose(self, candidates: Sequence[Candidate], need: Need, ctx: PolicyContext) -> Sequence[Candidate]:
        return smallest_set(candidates, need, cost=lambda c: c.seconds)


@dataclass(frozen=True, slots=True)
class LowestPriority:
    """The least urgent class gives way first; within what is needed of it, least work lost."""

    def choose(self, candidates: Sequence[Candidate], need: Need, ctx: PolicyContext) -> Sequence[Candidate]:
        return group_by_group(by_tier(candidates), need, cost=lambda c: c.seconds)


@dataclass(frozen=True, slots=True)
class MostHeadroom:
    """Who loses least by a pause gives way first: those with no promise or a broken one, then whoever is furthest
    from breaking one.

    With `tiers` the least urgent class gives way before that is looked at, as in `LowestPriority`.
    """

    tiers: bool = False

    def choose(self, candidates: Sequence[Candidate], need: Need, ctx: PolicyContext) -> Sequence[Candidate]:
        rooms = {id(c): headroom(c.request, ctx) for c in candidates}
        groups: list[list[Candidate]] = []
        for tier in by_tier(candidates) if self.tiers else [list(candidates)]:
            groups.append([c for c in tier if not 0 <= rooms[id(c)] < inf])
            groups.append([c for c in tier if 0 <= rooms[id(c)] < inf])

        def cost(c: Candidate) -> float:
            return -rooms[id(c)] if 0 <= rooms[id(c)] < inf else c.seconds

        return group_by_group(groups, need, cost)


def by_tier(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """The candidates of each class, the least urgent class first."""
    tiers = sorted({c.request.tier for c in candidates}, reverse=True)
    return [[c for c in candidates if c.request.tier == tier] for tier in tiers]


def group_by_group(
    groups: Sequence[Sequence[Candidate]], need: Need, cost: Callable[[Candidate], float]
) -> Sequence[Candidate]:
    """Whole groups in turn until `need` is covered; of the last that is touched a smallest set, cheapest by `cost`."""
    given: list[Candidate] = []
    for group in groups:
        rest = Need(need.blocks - sum(c.blocks for c in given), need.seats - len(given))
        chosen = smallest_set(group, rest, cost)
        if chosen:
            return needed([*given, *chosen], need)
        given += group
    return ()


def covers(chosen: Sequence[Candidate], need: Need) -> bool:
    """Whether these together free what is short."""
    return len(chosen) >= need.seats and sum(c.blocks for c in chosen) >= need.blocks


def needed(chosen: Sequence[Candidate], need: Need) -> list[Candidate]:
    """`chosen` without those that the others cover for, the dearest let off first."""
    kept = list(chosen)
    for c in sorted(chosen, key=lambda c: c.seconds, reverse=True):
        rest = [k for k in kept if k is not c]
        if covers(rest, need):
            kept = rest
    return kept


# Sets of one size that are compared one by one; beyond it a good set is taken for the best.
_EXACT = 2_000


def smallest_set(candidates: Sequence[Candidate], need: Need, cost: Callable[[Candidate], float]) -> list[Candidate]:
    """A set of the smallest size that covers `need`, cheapest by `cost`; empty if nothing covers it.

    Where there are too many sets of that size to compare, one is bettered from those that free the most,
    exchanging one at a time for a cheaper one while the set still covers.
    """
    newest = sorted(candidates, key=lambda c: (cost(c), -c.request.seq))
    chosen: list[Candidate] = []
    for c in sorted(newest, key=lambda c: -c.blocks):
        if covers(chosen, need):
            break
        chosen.append(c)
    if not chosen or not covers(chosen, need):
        return []
    size = len(chosen)
    if comb(len(newest), size) <= _EXACT:
        return list(min((s for s in combinations(newest, size) if covers(s, need)), key=lambda s: sum(map(cost, s))))
    for dear in sorted(chosen, key=cost, reverse=True):
        rest = [c for c in chosen if c is not dear]
        for cheap in newest:
            if cost(cheap) >= cost(dear):
                break
            if cheap not in chosen and covers([*rest, cheap], need):
                chosen = [*rest, cheap]
                break
    return chosen
