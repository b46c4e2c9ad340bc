"""The request router of Ray Serve: which replica gets a request is the `Route`'s decision.

Ray makes one router for each handle, in the process that holds the handle, and moves this module there by value:
nothing in it may be changed at run time and be expected elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from random import Random
from time import monotonic
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tidegate.api.errors import ApiError
from tidegate.gateway.lookin import look_in
from tidegate.integrations.ray.call import Call
from tidegate.routing.health import Failure
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import build_route
from tidegate.routing.speed import Speed
from tidegate.routing.text_blocks import BytesPerToken, text_blocks
from tidegate.routing.view import Facts, ReplicaView, RouteView


class TidegateRouter(RequestRouter):
    """Routes by `Route.choose`. `request_router_kwargs={"route": NAME}` takes any of the gateway's; default "joint".

    A request's prompt is found where its first argument is a `Call`, or an OpenAI body as a mapping or a pydantic
    model. Of calls the front tells first tokens, ends and failures; of others Ray tells no more than that they ended.

    Without FIFOMixin: with it Ray gives the replica that was chosen for one request to the one that waits longest.
    """

    def initialize_state(self, route: str = "joint") -> None:
        self.random = Random()
        self.route = build_route(route, random=self.random)
        self.ledger = Ledger(lost=lambda view: self.route.forget(view.name))
        self.views: dict[str, ReplicaView] = {}
        self._density = BytesPerToken()
        self._typical = Speed()
        self._stats: dict[str, Mapping[str, Any]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that the route chooses. Called again for a request that was not sent, or that a replica refused."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise Ray asks again at once, without end
        call = pending_request.args[0] if pending_request.args else None
        open_to_all = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_name = {r.replica_id.unique_id: r for r in open_to_all}
        if isinstance(call, Call) and call.replica:
            return [[by_name[call.replica]]] if call.replica in by_name else [open_to_all]
        chosen = self._send(pending_request, call, by_name)
        return [[by_name[chosen]]]

    def _send(self, pending: PendingRequest, call: Any, by_name: Mapping[str, RunningReplica]) -> str:
        """Choose, and count the request as being there: those routed in the same moment see each other."""
        now = monotonic()
        view = call.view if isinstance(call, Call) else self._look_at(pending, call)
        self.ledger.ended(view.id, now, complete=False)  # an attempt before this one
        self.ledger.presume(now)
        views = [self.views[name] for name in by_name]
        choice = self.route.choose(view, [v for v in views if v.health.allows(now)] or views, now)
        self.ledger.sent(view, choice, now)
        if isinstance(call, Call):
            call.told = _Told(self.ledger, view.id)
            if call.over:  # the front left meanwhile, in another thread
                self.ledger.ended(view.id, now, complete=False)
        else:
            pending.future.add_done_callback(lambda future: self._left(future, view.id))
        return choice.replica.name

    def _look_at(self, pending: PendingRequest, payload: Any) -> RouteView:
        """What routes may know of a request that is no `Call`; nothing of its prompt where it is no OpenAI body."""
        id = pending.metadata.internal_request_id
        try:
            asked = look_in(_json(payload))
        except (ApiError, TypeError):
            return RouteView(id, "", 1, streams=False)
        text = asked.text
        blocks = text_blocks(text, asked.model or "", asked.cache_salt or "")
        tokens = self._density.tokens(sum(map(len, text)))
        return RouteView(
            id,
            "",
            tokens,
            blocks,
            self._density.block_tokens,
            sticky=asked.user or "",
            streams=False,
        )

    def _left(self, future: asyncio.Future[Any], id: str) -> None:
        """Nobody waits for it any more, and it was not sent: Ray tells no end of it."""
        if future.cancelled():
            self.ledger.ended(id, monotonic(), complete=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Of a `Call` its front tells more, by the call's own id."""
        self.ledger.ended(internal_request_id, monotonic())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        now = monotonic()
        there = {r.replica_id.unique_id: r for r in replicas}
        for name in self.views.keys() - there.keys():
            self._forget(name)
        for name, replica in there.items():
            view = self.views.get(name)
            if view is None:
                facts = replica.replica_metadata
                speed = Speed(self._typical)
                view = ReplicaView(name, seats=facts.get("seats"), kv_tokens=facts.get("kv_tokens"), speed=speed)
                self.views[name] = view
            stats = replica.routing_stats
            if stats and stats != self._stats.get(name):
                self._stats[name] = stats
                view.told(Facts(now, stats.get("running"), stats.get("waiting"), stats.get("kv_usage")))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _forget(self, name: str) -> None:
        self.route.forget(name)
        self.views.pop(name, None)
        self._stats.pop(name, None)


class _Told:
    """Carries what the front sees of one call into the loop of the router, which may be another thread's."""

    def __init__(self, ledger: Ledger, id: str) -> None:
        self._ledger = ledger
        self._id = id
        self._loop = asyncio.get_running_loop()

    def tokens(self, n: int) -> None:
        self._loop.call_soon_threadsafe(self._ledger.tokens, self._id, monotonic(), n)

    def ended(self, complete: bool) -> None:
        self._loop.call_soon_threadsafe(self._ledger.ended, self._id, monotonic(), complete)

    def failed(self, kind: Failure) -> None:
        self._loop.call_soon_threadsafe(self._ledger.failed, self._id, monotonic(), kind)

    def turned_away(self, retry_after: float | None) -> None:
        self._loop.call_soon_threadsafe(self._ledger.turned_away, self._id, monotonic(), retry_after)


def _json(payload: Any) -> bytes:
    """An OpenAI body, whatever a deployment makes of it before it calls the next one."""
    if hasattr(payload, "model_dump_json"):
        return str(payload.model_dump_json(exclude_none=True)).encode()
    return json.dumps(payload).encode()
