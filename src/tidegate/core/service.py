"""Tokens served to each tenant, for orders that share by them.

Inputs are counted when a request is admitted, outputs as they are planned: while requests decode,
their tenant's outputs are derived from the decode clock (members times advances), so that a step
counts nothing. Only what is computed counts: cached prompt tokens are nobody's service, and neither
is what a preempted request computes again, because it did not choose to go.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol


class Clock(Protocol):
    """A decode set, as far as service is concerned: one advance is one output of every member."""

    @property
    def clock(self) -> int: ...


class Account:
    """One tenant. `lift` is service it is taken to have had (its order's unit), so that idling banks nothing."""

    __slots__ = ("decoding", "inputs", "joined", "lift", "seated", "settled", "waits")

    def __init__(self) -> None:
        self.inputs = 0
        self.settled = 0
        self.lift = 0.0
        self.decoding: dict[Clock, int] = {}
        self.joined = 0
        self.seated = 0
        self.waits = 0  # queues that it waits in

    @property
    def outputs(self) -> int:
        """Output tokens planned so far."""
        return self.settled + sum(n * d.clock for d, n in self.decoding.items()) - self.joined


class Service:
    """An account a tenant. The number of tenants is the clients' choice, so the idle are forgotten.

    An order forgets those whom it would lift anyway (`tidy`), which loses nothing; beyond `remember` idle
    ones the longest idle goes, whatever it had.
    """

    def __init__(self, remember: int = 10_000) -> None:
        self.remember = remember
        self.last: str | None = None  # the tenant that was last to stop waiting
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, tenant: str) -> Account:
        """The account of `tenant`, opened if it is not known (any more)."""
        found = self._accounts.get(tenant)
        if found is None:
            found = self._accounts[tenant] = Account()
            self._idle[tenant] = None
        return found

    # Who waits, told by the order

    def enter(self, tenant: str) -> Account:
        """`tenant` begins to wait in a queue."""
        account = self.account(tenant)
        account.waits += 1
        self._idle.pop(tenant, None)
        return account

    def leave(self, tenant: str) -> None:
        """`tenant` waits no more in that queue."""
        account = self.account(tenant)
        account.waits -= 1
        self.last = tenant
        self._rest(tenant, account)

    def tidy(self, floor: float, score: Callable[[str], float]) -> None:
        """Forget idle tenants at or below `floor`, whom a return would lift to it; two are looked at."""
        for tenant in list(islice(self._idle, 2)):
            del self._idle[tenant]
            if score(tenant) <= floor and tenant != self.last:
                del self._accounts[tenant]
            else:
                self._idle[tenant] = None
        while len(self._idle) > self.remember:
            tenant = next(iter(self._idle))
            del self._idle[tenant], self._accounts[tenant]

    # Who computes, told by core/running.py

    def seat(self, tenant: str, inputs: int) -> None:
        """A request of `tenant` takes a seat and will compute `inputs` tokens of its prompt for the first time."""
        account = self.account(tenant)
        account.inputs += inputs
        account.seated += 1
        self._idle.pop(tenant, None)

    def emit(self, tenant: str, outputs: int = 1) -> None:
        """A chunk that ends a prompt emits one output; a host that sees outputs only at their end tells them all."""
        self.account(tenant).settled += outputs

    def join(self, tenant: str, decodes: Clock) -> None:
        """A request of `tenant` decodes with every advance of `decodes` from now on."""
        account = self.account(tenant)
        account.decoding[decodes] = account.decoding.get(decodes, 0) + 1
        account.joined += decodes.clock

    def part(self, tenant: str, decodes: Clock, joined: int) -> None:
        """A request that joined `decodes` at its clock `joined` decodes no more."""
        account = self.account(tenant)
        account.settled += decodes.clock - joined
        account.joined -= joined
        account.decoding[decodes] -= 1
        if not account.decoding[decodes]:
            del account.decoding[decodes]

    def vacate(self, tenant: str) -> None:
        """A request of `tenant` gives its seat up."""
        account = self.account(tenant)
        account.seated -= 1
        self._rest(tenant, account)

    def _rest(self, tenant: str, account: Account) -> None:
        if not account.seated and not account.waits:
            self._idle[tenant] = None
