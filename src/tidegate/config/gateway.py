"""`[gateway]`: one front before many engines (docs/gateway.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from tidegate.config.values import SECTION, ApiKey, Count, Name, Seconds, Size, Switch, bare_keys

Kind: TypeAlias = Literal["auto", "vllm", "sglang", "llama-server", "tidegate"]
PassClass: TypeAlias = Literal["headers", "priority", "xargs", "nothing"]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]


def _base_url(url: str) -> str:
    """Where an engine listens, without a slash at its end."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("must name no user and no password, for it is logged; api_key_env names where a key is")
    try:
        wrong = not re.fullmatch(r"[!-~]+", url) or parts.scheme != "http" or not parts.hostname or parts.port == 0
    except ValueError:  # no port that there can be
        wrong = True
    if wrong or parts.query or parts.fragment:
        raise ValueError(f"must look like 'http://10.0.0.1:8000', not {url!r}")
    return url.rstrip("/")


def _zmq_address(address: str) -> str:
    found = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})|ipc://\S+", address, re.ASCII)
    if found is None or not 0 < int(found[1] or 1) < 2**16:
        raise ValueError(f"must look like 'tcp://10.0.0.1:5557', not {address!r}")
    return address


Address = Annotated[str, AfterValidator(_zmq_address)]


@dataclass(frozen=True, slots=True)
class GatewayKey(ApiKey):
    """`[[gateway.api_keys]]`: as those of the server, and how much may come with it, in all.

    requests_per_minute: a minute's worth may come at once; None is no end
    tokens_per_minute:   prompts and outputs: estimated when a request comes, and corrected when it has ended
    """

    __pydantic_config__ = SECTION

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


@dataclass(frozen=True, slots=True)
class RateConfig:
    """`[gateway.rates.CLASS]`: what each tenant may send of that class; see `GatewayKey`."""

    __pydantic_config__ = SECTION

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None

    def __post_init__(self) -> None:
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            raise ValueError("says neither requests_per_minute nor tokens_per_minute, and so does nothing")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """`[[gateway.replicas]]`: one engine.

    name:        of metrics and explanations; host and port of the url where absent
    url:         where it listens, such as "http://10.0.0.1:8000"
    pool:        see `[gateway.pools]`
    seats:       requests that it runs at once; absent means that nobody knows
    kind:        what it is; "auto" finds out by what its /metrics say
    pass_class:  how it is told of a request's class: "headers" (x-slo-class, x-tenant, x-slo-*-ms), the body's
                 "priority", "xargs" (the body's vllm_xargs), or "nothing"; absent is what suits its kind
    api_key_env: the environment variable that holds the key which it wants
    kv_events:   where it publishes what its cache holds, such as "tcp://10.0.0.1:5557" (vLLM's --kv-events-config)
    kv_replay:   where it tells missed ones again
    """

    __pydantic_config__ = SECTION

    url: Annotated[str, AfterValidator(_base_url)]
    name: Name | None = None
    pool: str = ""
    seats: Count | None = None
    kind: Kind = "auto"
    pass_class: PassClass | None = None
    api_key_env: Name | None = None
    kv_events: Address | None = None
    kv_replay: Address | None = None

    def __post_init__(self) -> None:
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError("names kv_replay without kv_events, so that nothing could ever be missed")

    @property
    def called(self) -> str:
        """Its name, or what stands for one."""
        return self.name or self.url.removeprefix("http://")


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """`[[gateway.discovery]]`: engines that come and go.

    source:  "dns" asks for all addresses of `host`; "file" reads a list of engines, each as in `[[gateway.replicas]]`
    host, port: of the engines; source "dns"
    path:    a .toml file with `[[replicas]]`, or a .json file with {"replicas": [...]}; source "file"
    seconds: between two looks
    pool, seats, kind, pass_class, api_key_env: of the engines found by "dns"
    """

    __pydantic_config__ = SECTION

    source: Literal["dns", "file"]
    host: Name | None = None
    port: Annotated[int, Strict(), Field(ge=1, le=65535)] | None = None
    path: Name | None = None
    seconds: Seconds = 5.0
    pool: str = ""
    seats: Count | None = None
    kind: Kind = "auto"
    pass_class: PassClass | None = None
    api_key_env: Name | None = None

    def __post_init__(self) -> None:
        if self.source == "dns" and (self.host is None or self.port is None or self.path is not None):
            raise ValueError('of source "dns" needs a host and a port, and no path')
        if self.source == "file" and self.path is None:
            raise ValueError('of source "file" needs a path')
        of_dns = (self.host, self.port, self.pool or None, self.seats, self.pass_class, self.api_key_env)
        if self.source == "file" and (any(value is not None for value in of_dns) or self.kind != "auto"):
            raise ValueError('of source "file" says only path and seconds: the file says the rest of each engine')


@dataclass(frozen=True, slots=True)
class PoolsConfig:
    """`[gateway.pools]`: which engines serve which classes.

    mode:    "shared": all serve all; "isolated": a class is served by its pool alone; "borrow": an idle pool also
             takes another's overflow, while its own classes keep their slack
    classes: pool by class; a class without one is served by all
    borrow:  mode "borrow": the part of a promised time to the first token that waiting may use up before a request
             overflows, and in the pool that takes it (`routing.pools.Pools`)
    """

    __pydantic_config__ = SECTION

    mode: Literal["shared", "isolated", "borrow"] = "shared"
    classes: dict[str, Name] = field(default_factory=dict)
    borrow: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.5


@dataclass(frozen=True, slots=True)
class DeadlineConfig:
    """`[gateway.deadlines.CLASS]`: those of `[gateway]`, for one class."""

    __pydantic_config__ = SECTION

    first_token_seconds: Seconds | None = None
    stall_seconds: Seconds | None = None

    def __post_init__(self) -> None:
        if self.first_token_seconds is None and self.stall_seconds is None:
            raise ValueError("says neither first_token_seconds nor stall_seconds, and so does nothing")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`[gateway]`.

    route:               who of the engines serves a request (docs/gateway.md)
    replicas, discovery: the engines
    in_flight:           requests that an engine gets at once, those that wait in it included; absent means its seats,
                         where anybody knows them. What is more waits in the gateway, in the order of the policy
    hold_seconds:        how long requests wait while no engine for them is up, before they are refused with 503
    fair, weights:       within a priority tenants share by the tokens that they were served, by weight (1 where absent)
    first_token_seconds: an engine that sends nothing for so long has failed, and another is tried
    answer_seconds:      the same for an answer that is not streamed, which comes whole
    stall_seconds:       the same between two parts of an answer; the stream ends with an error then
    connect_seconds:     the same for a connection
    retry_share:         second tries, as a share of all requests, at most
    max_body_bytes:      larger bodies are refused with 413
    max_connections:     of clients at once; further ones are refused with 503
    body_seconds:        a body of which nothing comes for so long is given up
    remembered_tokens:   tokens whose prefixes are remembered of each engine
    facts_seconds:       between two looks at an engine's /metrics
    explained:           ended requests that `/v1/gateway/explain` remembers
    traces:              "pass" passes the trace ids of clients on, "create" also begins a trace where there is none
    watch_config:        a changed file takes effect by itself; SIGHUP asks for it in any case
    drain_seconds:       how long a shutdown lets streams finish
    """

    __pydantic_config__ = SECTION

    host: Name = "127.0.0.1"
    port: Annotated[int, Strict(), Field(ge=0, le=65535)] = 8080
    route: Name = "joint"
    replicas: tuple[ReplicaConfig, ...] = ()
    discovery: tuple[DiscoveryConfig, ...] = ()
    pools: PoolsConfig = PoolsConfig()
    api_keys: Annotated[tuple[GatewayKey, ...], BeforeValidator(bare_keys)] = ()
    rates: dict[str, RateConfig] = field(default_factory=dict)
    in_flight: Count | None = None
    hold_seconds: Seconds = 10.0
    fair: Switch = True
    weights: dict[str, Positive] = field(default_factory=dict)
    first_token_seconds: Seconds = 60.0
    answer_seconds: Seconds = 600.0
    stall_seconds: Seconds = 30.0
    deadlines: dict[str, DeadlineConfig] = field(default_factory=dict)
    connect_seconds: Seconds = 2.0
    retry_share: Annotated[float, Strict(), Field(ge=0, le=1)] = 0.1
    max_body_bytes: Size = 4 * 2**20
    max_connections: Count = 4096
    body_seconds: Seconds = 30.0
    remembered_tokens: Count = 1_000_000
    facts_seconds: Seconds = 1.0
    explained: Count = 1000
    traces: Literal["pass", "create"] = "pass"
    watch_config: Switch = False
    drain_seconds: Seconds = 30.0

    def first_token_of(self, slo_class: str) -> float:
        """Seconds within which an answer to a request of `slo_class` has to begin."""
        own = self.deadlines.get(slo_class)
        return (own and own.first_token_seconds) or self.first_token_seconds

    def stall_of(self, slo_class: str) -> float:
        """Seconds within which an answer to a request of `slo_class` has to go on."""
        own = self.deadlines.get(slo_class)
        return (own and own.stall_seconds) or self.stall_seconds
