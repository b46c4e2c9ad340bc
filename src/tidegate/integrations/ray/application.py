"""Engines and their front as one application of Ray Serve."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from tidegate.cli.environment import config_path
from tidegate.config import Config, load_config, refuse_written
from tidegate.integrations.ray.front import Front
from tidegate.integrations.ray.replica import EngineReplica

ROUTER = "tidegate.integrations.ray.router.TidegateRouter"
STATS_SECONDS = 2.0  # a route believes what an engine says of itself for 5 s
HEALTH_SECONDS = 5.0
_OF_ONE = "replicas would write over one another's; name one engine's with `tidegate serve`"
OWNED = {
    "server.host": "the address is Serve's: http_options in its config file, or serve.start",
    "server.port": "the address is Serve's: http_options in its config file, or serve.start",
    "server.max_connections": "Serve's proxy takes the connections",
    "observe.decisions": _OF_ONE,
    "observe.records": _OF_ONE,
    "observe.steps": _OF_ONE,
}
"""Options that do nothing in Ray Serve, and why."""


class Arguments(BaseModel):
    """What `serve run tidegate.integrations.ray:build NAME=VALUE...` takes.

    config:   TOML as for `tidegate serve`, read where the application is built; TIDEGATE_CONFIG without it
    replicas: engines. Serve's config file may make them more, fewer or automatic
    fronts:   processes that take requests, route and pass on; each learns for itself
    cpus, gpus: of each engine
    route:    how the fronts choose an engine
    """

    model_config = ConfigDict(extra="forbid")

    config: Path | None = None
    replicas: int = Field(1, ge=1)
    fronts: int = Field(1, ge=1)
    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0)
    route: Literal["random", "round-robin", "least-loaded", "prefix", "consistent-hash", "joint"] = "joint"


# Serve looks at the annotation itself.
def build(args: Arguments) -> Application:
    """The application. Raises ConfigError for a wrong file, ValueError for wrong arguments."""
    path = config_path(args.config)
    refuse_written(path, OWNED)
    config = _for_replica(load_config(path), args)
    # The queue is the engine's, which orders it by its policy: Ray must not hold requests back.
    at_once = config.scheduler.max_waiting + config.scheduler.max_num_seqs
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        num_replicas=args.replicas,
        max_ongoing_requests=at_once,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        graceful_shutdown_timeout_s=config.server.drain_seconds,
        graceful_shutdown_wait_loop_s=min(1.0, config.server.drain_seconds),
        health_check_period_s=HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"route": args.route},
            request_routing_stats_period_s=STATS_SECONDS,
        ),
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="front",
        num_replicas=args.fronts,
        max_ongoing_requests=ceil(at_once * args.replicas / args.fronts),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.server.drain_seconds,
    )
    return front.bind(engines.bind(config), config)


def _for_replica(config: Config, args: Arguments) -> Config:
    """As many threads as Ray gives the replica: it does not know of the others on its machine."""
    threads = config.model.threads or max(1, int(args.cpus))
    return replace(config, model=replace(config.model, threads=threads))
