"""Decodes that take turns, so that others decode faster (token-level scheduling).

While all may decode in every step there is one set, and nothing here costs anything. Once the step would be
too long for somebody's promise, those who may skip steps are dealt into cohorts, each with its own clock;
in every step the main set decodes and the cohort whose turn it is. A cohort yields only for its turn: with
n cohorts everybody decodes in every n-th step, and n is the least that suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidegate.core.decode_load import DecodeLoad, Pace
from tidegate.core.decodes import DecodeSet
from tidegate.core.limits import Limits
from tidegate.core.policy import Budget, PolicyContext
from tidegate.core.request import Request
from tidegate.core.view import StepView

# Steps after which it is asked again without anybody having come or gone: contexts grow, step models learn.
CHECK_EVERY = 16


class Together(NamedTuple):
    """The lists of two sets in one, the main one's members first, and the lists of slots they were made of."""

    slots: list[int]
    members: list[Request]
    outputs: list[list[int]]
    of: tuple[list[int], list[int]]


class Cohort:
    """A set that decodes in some steps only. `last`: the main clock when all of its members had decoded last."""

    __slots__ = ("_together", "decodes", "last")

    def __init__(self, block_size: int, last: int) -> None:
        self.decodes = DecodeSet(block_size)
        self.last = last
        self._together: Together | None = None

    def together(self, main: DecodeSet) -> Together:
        """The lists of `main` and this cohort in one: the very same while nobody joins or leaves either."""
        own = self.decodes
        both = self._together
        if both is None or both.of[0] is not main.slots or both.of[1] is not own.slots:
            slots, members = main.slots + own.slots, main.members + own.members
            both = self._together = Together(slots, members, main.lists + own.lists, (main.slots, own.slots))
        return both


class _Ahead:
    """Decodes as they will be: how many, and the KV tokens that one decode of each reads."""

    __slots__ = ("_decodes", "context")

    def __init__(self, decodes: int, context: int) -> None:
        self._decodes = decodes
        self.context = context

    def __len__(self) -> int:
        return self._decodes


class Cohorts:
    """Who decodes when. `move(request, set)` takes a decode from its set to another.

    main: the set that decodes in every step; its clock counts the steps that decode
    turns: the cohorts, whose turn it is first; empty while everybody is in `main`
    """

    def __init__(
        self,
        main: DecodeSet,
        load: DecodeLoad,
        budget: Budget,
        ctx: PolicyContext,
        limits: Limits,
        move: Callable[[Request, DecodeSet], None],
    ) -> None:
        self.main = main
        self.turns: list[Cohort] = []
        self._load = load
        self._budget = budget
        self._ctx = ctx
        self._limits = limits
        self._move = move
        self._per_decode = limits.tokens_per_decode
        self._seen = -1
        self._tightest: list[Pace] = []  # as it was when they were dealt: its tier says who yields
        self._check_at = 0
        self._sufficed = True
        # Decodes and context (KV tokens) for which one set sufficed, and `news` of the load then. Noted by quiet steps
        # alone, which there are none of where a step model learns.
        self._enough = (0, 0, -1)

    def home(self, r: Request) -> DecodeSet:
        """The set in which `r` shall decode: the smallest cohort, if there are any and `r` may skip steps."""
        if not self.turns or self._budget.stride(r, self._view(), self._ctx) == 1:
            return self.main
        return min((cohort.decodes for cohort in self.turns), key=len)

    def next_turn(self) -> Cohort | None:
        """Deal anew where that is called for, and tell whose turn it is beside the main set (None: everybody's)."""
        load, clock = self._load, self.main.clock
        if load.paces or self.turns:
            routine = clock >= self._check_at
            if routine or load.changes != self._seen:
                self._seen = load.changes
                if routine:
                    self._check_at = clock + CHECK_EVERY
                self._settle(routine)
        turn = next((cohort for cohort in self.turns if len(cohort.decodes)), None) if self.turns else None
        if turn is None and self.turns:
            self.turns, self._sufficed = [], True
        load.due = (self.main,) if turn is None else (self.main, turn.decodes)
        return turn

    def quiet_steps(self, steps: int) -> int:
        """In how many of the next `steps`, which everybody decodes and nobody joins or leaves, nobody is dealt.

        Contexts grow in them; a budget that lets all decode behind the longest lets them behind shorter ones.
        """
        load, main = self._load, self.main
        if self.turns:
            return 0
        if not load.paces:
            return steps
        unasked = max(0, self._check_at - main.clock) if load.changes == self._seen else 0
        if unasked >= steps or not self._sufficed:
            return min(unasked, steps)
        decodes = len(main.members)
        ahead = main.context + steps * decodes
        if self._known_to_suffice(decodes, ahead):
            return steps
        load.due = (_Ahead(decodes, ahead),)
        most = self._budget.decode_tokens(self._view(), self._ctx) // self._per_decode
        load.due = (main,)
        if decodes > most:
            return unasked
        self._enough = (decodes, ahead, load.news)
        return steps

    def pass_steps(self, steps: int) -> None:
        """So many steps are about to be planned of which `quiet_steps` said that nobody is dealt in them."""
        if self._load.paces:
            self._seen = self._load.changes
            clock = self.main.clock
            if self._check_at < clock + steps:
                due = max(self._check_at, clock)
                self._check_at = due + CHECK_EVERY * (1 + (clock + steps - 1 - due) // CHECK_EVERY)

    def advance(self, turn: Cohort) -> Together:
        """Plan one decode of every member of the main set and of `turn`, which then is last in turn."""
        self.main.advance()
        turn.decodes.advance()
        turn.last = self.main.clock
        self.turns.remove(turn)
        self.turns.append(turn)
        return turn.together(self.main)

    def ending_within(self, steps: int) -> Iterator[Request]:
        """Those whose last token comes within so many steps from now, by today's turns."""
        yield from self._ending(self.main, steps)
        n = len(self.turns)
        for at, cohort in enumerate(self.turns):
            yield from self._ending(cohort.decodes, -(-(steps - at) // n))

    @staticmethod
    def _ending(decodes: DecodeSet, advances: int) -> Iterator[Request]:
        for clock in range(decodes.clock + 1, decodes.clock + 1 + advances):
            yield from decodes.ending(clock)

    def ends(self) -> Iterator[Iterator[tuple[int, int]]]:
        """Of every set, (main clock of the last token at the fastest, blocks at the peak) of each, by clock."""
        for decodes in (self.main, *(cohort.decodes for cohort in self.turns)):
            ahead = self.main.clock - decodes.clock
            yield ((end + ahead, blocks) for end, blocks in decodes.ends())

    # How many turns

    def _view(self) -> StepView:
        decodes = len(self.main.members)
        if self.turns:
            decodes += sum(len(cohort.decodes) for cohort in self.turns)
        return StepView(self._ctx.now, self._limits.max_num_batched_tokens, decodes * self._per_decode, self._load)

    def _known_to_suffice(self, decodes: int, context: int) -> bool:
        """Whether all of so many may decode together, since more behind more context, with the same promises, may."""
        most, longest, news = self._enough
        return decodes <= most and context <= longest and news == self._load.news

    def _settle(self, routine: bool) -> None:
        """Deal into as many cohorts as the promises ask for; into fewer than now only in a `routine` check, unless
        there are no promises left."""
        main = self.main
        if not self.turns and self._known_to_suffice(len(main.members), main.context):
            self._sufficed = True
            return
        view, sizes = self._view(), [len(cohort.decodes) for cohort in self.turns]
        most = self._budget.decode_tokens(view, self._ctx) // self._per_decode
        if len(self.main) + sum(sizes) <= most:
            if sizes and (routine or not self._load.paces):
                self._deal(1, view)
            self._sufficed = True
        elif sizes:
            self._settle_turns(most, sizes, routine, view)
        elif self._sufficed or routine:
            self._sufficed = False
            yielding = sum(self._budget.stride(r, view, self._ctx) > 1 for r in self.main.members)
            self._deal(self._wanted(yielding, len(self.main) - yielding, most), view)

    def _settle_turns(self, most: int, sizes: list[int], routine: bool, view: StepView) -> None:
        n, everybody = len(sizes), sum(sizes)
        wanted = self._wanted(everybody, len(self.main), most)
        uneven = max(sizes) > -(-everybody // n) and len(self.main) + max(sizes) > most
        if wanted > n or (wanted < n and routine) or uneven or self._load.paces[:1] != self._tightest:
            self._deal(wanted, view)

    def _wanted(self, yielding: int, others: int, most: int) -> int:
        """Cohorts that so many who may skip steps are dealt into, beside the `others`."""
        return max(1, min(self._budget.max_stride, -(-yielding // max(1, most - others))))

    def _deal(self, n: int, view: StepView) -> None:
        """Deal those who may skip steps into `n` cohorts, whoever has waited longest first; one is the main set.

        Nobody's next turn comes later than `max_stride` steps after its last one.
        """
        self._tightest = self._load.paces[:1]
        old, clock, stride = self.turns, self.main.clock, self._budget.stride
        members = [(cohort.last, r) for cohort in old for r in cohort.decodes.members]
        members += [(clock, r) for r in self.main.members if n > 1]
        yielding = [(last, r) for last, r in members if n > 1 and stride(r, view, self._ctx) >= n]
        staying = {r for _, r in yielding}
        self.turns = [Cohort(self._limits.block_size, clock) for _ in range(n)] if yielding else []
        size = -(-len(yielding) // n)
        for _, r in members:
            if r not in staying and r.decode_set is not self.main:
                self._move(r, self.main)
        for at, (last, r) in enumerate(yielding):
            latest = max(0, self._budget.max_stride - 1 - (clock - last))
            cohort = self.turns[min(at // size, latest)]
            cohort.last = min(cohort.last, last)
            self._move(r, cohort.decodes)
