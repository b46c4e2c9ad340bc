"""An engine as a replica of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from tidegate.cli.environment import cache_dir
from tidegate.config import Config
from tidegate.errors import EngineDead
from tidegate.integrations.ray.call import Call
from tidegate.integrations.ray.inprocess import Part, answer
from tidegate.server.assembly import assemble

REPLICA_HEADER = b"x-tidegate-replica"
"""In every answer: who gave it. In a GET: who shall."""


class EngineReplica:
    """The server of `tidegate serve` without its socket: the front calls its application through Ray.

    Ray stops a replica when its calls have ended, or after `server.drain_seconds`.
    """

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Ray awaits it
        self._served = assemble(config, cache_dir())
        await self._served.begin()
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(self, call: Call) -> AsyncGenerator[Part, None]:
        """The application's answer. Raises EngineDead before its first part where the engine is dead."""
        if self._served.engine.death is not None:
            raise self._served.engine.death
        parts = answer(self._served.app, call)
        try:
            async for part in parts:
                if isinstance(part, tuple):
                    status, headers = part
                    yield status, [*headers, (REPLICA_HEADER, self._name)]
                else:
                    yield part
        finally:
            await parts.aclose()

    def check_health(self) -> None:
        """Ray replaces a replica whose engine is dead."""
        if self._served.engine.health == "dead":
            raise EngineDead(str(self._served.engine.death or "the engine was stopped"))

    def record_replica_metadata(self) -> dict[str, Any]:
        """What a route wants to know once: seats, and KV tokens."""
        limits = self._served.scheduler.limits
        return {"seats": limits.max_num_seqs, "kv_tokens": limits.pool_tokens}

    async def record_routing_stats(self) -> dict[str, Any]:
        """What a route wants to know again and again."""
        now = await self._served.engine.snapshot()
        used = 1.0 - now.available_blocks / now.num_blocks
        return {"running": now.running, "waiting": now.waiting, "kv_usage": round(used, 3)}

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.close()
