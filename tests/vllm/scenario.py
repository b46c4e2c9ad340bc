"""Plays a scenario file on the real vLLM scheduler, stock or ours, and reads the outcome from vLLM's own outputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tidegate.config import resolve
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.predict import OraclePredictor
from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.host import Host
from tidegate.integrations.vllm.scripted import STOP, Engine, make_config, make_scheduler
from tidegate.simulate.formula_time import FormulaTime
from tidegate.simulate.scenario import Scenario, ScenarioRequest
from tidegate.simulate.scenario_run import STUCK_AFTER, Fate, Outcome, Step, Wait, _limits, _policy, _predictor

REASONS = {"STOP": "stop", "LENGTH": "length", "ABORT": "cancelled", "ERROR": "error"}
STOCK = ("stock fcfs", "stock priority")


def run(scenario: Scenario, policy: str | Policy | None = None, *, max_steps: int | None = None) -> Outcome:
    """As `simulate.scenario_run.run`, in vLLM. A policy of `STOCK` is vLLM's own."""
    game = _Game(scenario, policy)
    game.warm()
    return game.play(max_steps)


class _Log:
    """The host's events and plans, for what vLLM's outputs do not say: why."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[float, str], tuple[str, str]] = {}
        self.held_back_by: str | None = None
        self.timing: dict[str, Any] = {}
        self.ends: dict[str, str] = {}

    def events(self, events: Any) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "Preempted":
                self.reasons[event.now, event.request.id] = (event.mode, event.reason)
            elif kind == "Finished":
                self.ends[event.request.id] = event.reason.value
                self.timing[event.request.id] = event
            elif kind == "Rejected":
                self.ends[event.request.id] = "refused"
                self.reasons[event.now, event.request.id] = (event.reason.value, event.message)

    def step(self, plan: Any, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class Counting(Engine):
    """Output n of every request is the token n + 2, so that what a client saw can be read as indices."""

    def _sample(self, name: str, index: int | None) -> list[int]:
        if index is None:
            return []
        return [STOP if index + 1 >= self.stops.get(name, index + 2) else index + 2]


class _Game:
    def __init__(self, scenario: Scenario, policy: str | Policy | None) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.index = 0
        self.log = _Log()
        self.prefixes: dict[str, list[int]] = {}
        self.fresh = iter(range(2, 10**9))
        self.parked: list[tuple[float, Any]] = []
        self.last: dict[str, int] = {}
        self.specs: dict[str, ScenarioRequest] = {}
        self.arrived: dict[str, float] = {}
        self.lost: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        name = str(policy if isinstance(policy, str) else policy.name if policy else scenario.config.policy)
        self.scheduler = self._scheduler(name, policy)
        self.engine = Counting(self.scheduler)
        self.outcome = Outcome(scenario, name, [], {}, {}, {}, False, {})

    def _scheduler(self, name: str, policy: Any) -> Any:
        config = self.scenario.config
        own: dict[str, Any] = {"policy": "priority"} if name == "stock priority" else {}
        vllm_config = make_config(
            num_blocks=config.num_blocks + 1,
            block_size=config.block_size,
            max_num_seqs=config.max_seqs,
            max_num_batched_tokens=max(config.budget, config.max_seqs),
            prefix_caching=config.prefix_caching,
            **({"max_model_len": config.max_model_len} if config.max_model_len else {}),
            **own,
        )
        vllm_config.scheduler_config.max_num_scheduled_tokens = config.budget
        if "max_resources" in config.limits:
            vllm_config.lora_config = LoRAConfig(max_loras=config.limits["max_resources"], max_lora_rank=8)
        if name in STOCK:
            return make_scheduler(Scheduler, vllm_config)
        game = self

        class Virtual(TidegateScheduler):
            """On the scenario's clock, with its policy and limits."""

            def _make_host(self) -> Host:
                chosen, preset = _policy(config, policy)
                step_time = FormulaTime.of(config.step_ms, config.budget, config.prefill_token_s)
                context = PolicyContext(OraclePredictor(), step_time)
                limits = _limits(config, preset)
                host = Host(self, game.plain(), chosen, limits, context, lambda: game.now, lambda: game.now)
                host.observers = (game.log,)
                return host

        return make_scheduler(Virtual, vllm_config)

    def plain(self) -> Any:
        """A configuration whose classes promise nothing: a scenario says all that matters."""
        names = {"interactive", "completion", "offline", "batch"} | {r.slo_class for r in self.scenario.requests}
        nothing = {"ttft": "none", "tpot": "none", "tbt": "none", "e2e": "none", "priority": 0}
        return resolve({"classes": dict.fromkeys(names, nothing)})

    def warm(self) -> None:
        for name, blocks in self.scenario.config.resident.items():
            tokens = self._prefix(name, blocks * self.scenario.config.block_size)
            self.engine.add(self.engine.request(f"prefix {name}", tokens, 1))
            while self.scheduler.has_requests():
                self.engine.step()
        if not self._stock:
            self.scheduler.tidegate.scheduler.ctx.predictor = _predictor(self.scenario.config)
        self.log.__init__()
        self.engine.streams.clear()

    @property
    def _stock(self) -> bool:
        return self.outcome.policy in STOCK

    def play(self, max_steps: int | None) -> Outcome:
        arrivals = list(reversed(self.scenario.requests))
        cancels = {}
        for spec in self.scenario.requests:
            if spec.cancel is not None:
                cancels.setdefault(spec.cancel, []).append(spec.id)
        empty = 0
        while arrivals or cancels or self.scheduler.requests:
            if max_steps is not None and self.index >= max_steps:
                break
            if not arrivals and not cancels and empty >= STUCK_AFTER and not self._time_helps():
                self.outcome.stuck = True
                break
            row = Step(self.index, self.now)
            self.outcome.steps.append(row)
            while arrivals and arrivals[-1].arrival == self.index:
                self._arrive(arrivals.pop())
            computed = self._step(row)
            for name in cancels.pop(self.index, ()):
                if name in self.scheduler.requests:
                    self.engine.abort(name)
                    self._end(name, "cancelled", row)
            self._note_ends(row)
            empty = 0 if computed or self._time_helps() else empty + 1
            self.index += 1
        self._close()
        return self.outcome

    def _time_helps(self) -> bool:
        if any(self.index < at < float("inf") for at, _ in self.parked):
            return True
        if self._stock:
            return False
        wake = self.scheduler.tidegate.scheduler.next_wake(self.now)
        return wake is not None and wake != float("inf")

    def _step(self, row: Step) -> bool:
        self._release_parked()
        seated = {r.request_id: r.num_preemptions for r in self.scheduler.running}
        if not self.scheduler.has_requests():
            self.now += 1.0 if self.scenario.config.step_ms is None else self.scenario.config.step_ms(0, 0) / 1000.0
            return False
        output = self.engine.schedule()
        row.scheduled = dict(output.num_scheduled_tokens)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        row.admitted = [r.req_id for r in output.scheduled_new_reqs]
        row.restored = [name for name in output.num_scheduled_tokens if name in resumed]
        for name in output.preempted_req_ids or ():
            mode, why = self.log.reasons.get((self.now, name), ("recompute", ""))
            row.preempted.append({"id": name, "mode": mode, "reason": why})
        row.running, row.waiting = self.scheduler.get_request_counts()
        pool = self.scheduler.kv_cache_manager.block_pool
        row.free_blocks = pool.get_num_free_blocks()
        if not self._stock:
            host = self.scheduler.tidegate
            row.free_blocks = host.scheduler.kv.available
            row.held_back_by = host._plan.held_back_by if host._plan is not None else None
        for name in row.admitted:
            self._admitted(name, output)
        for name in row.restored:
            fate, cached = self.outcome.requests[name], self._cached(name, output)
            fate.recomputed_tokens += max(0, self.lost.pop(name) - cached)
        self._note_losses(seated, row)
        decodes = sum(1 for name, n in row.scheduled.items() if self._decodes(name, n))
        prefill = sum(row.scheduled.values()) - decodes
        formula = self.scenario.config.step_ms
        self.now += 1.0 if formula is None else formula(decodes, prefill) / 1000.0
        before = {name: len(tokens) for name, tokens in self.engine.streams.items()}
        self.engine.update()
        for name, tokens in self.engine.streams.items():
            new = len(tokens) - before.get(name, 0)
            if new and name in self.outcome.requests:
                self._emitted(name, new, row)
        return bool(row.scheduled)

    # Counted from vLLM's outputs

    def _decodes(self, name: str, tokens: int) -> bool:
        return tokens == 1 and self.scheduler.requests[name].num_output_tokens > 0

    def _cached(self, name: str, output: Any) -> int:
        return self.scheduler.requests[name].num_computed_tokens - output.num_scheduled_tokens[name]

    def _admitted(self, name: str, output: Any) -> None:
        fate = self.outcome.requests[name]
        fate.admitted_step = self.index
        fate.cached_tokens = self._cached(name, output)
        self._end_of_wait(name, self.now - self.arrived[name])

    def _note_losses(self, seated: Mapping[str, int], row: Step) -> None:
        for victim in row.preempted:
            name = victim["id"]
            self.lost[name] = self.computed.get(name, 0)
            self.outcome.requests[name].preemptions += 1
        self.computed = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}

    def _emitted(self, name: str, new: int, row: Step) -> None:
        fate = self.outcome.requests[name]
        row.emitted[name] = new
        fate.outputs += new
        if fate.first_token_step is None:
            fate.first_token_step = self.index
        else:
            fate.max_gap_steps = max(fate.max_gap_steps or 0, self.index - self.last[name])
        self.last[name] = self.index

    def _note_ends(self, row: Step) -> None:
        for name, reason in list(self.engine.ends.items()):
            del self.engine.ends[name]
            if name in self.outcome.requests:
                self._end(name, REASONS[reason.name], row)

    def _end(self, name: str, reason: str, row: Step) -> None:
        fate = self.outcome.requests[name]
        if fate.finish_step is not None:
            return
        reason = self.log.ends.get(name, reason)
        fate.finish_step, fate.finish_reason = self.index, reason
        if reason == "refused":
            why, message = self.log.reasons.get((self.arrived[name], name), ("", ""))
            row.rejected.append({"id": name, "reason": why, "message": message})
            return
        row.finished.append(name)
        if fate.admitted_step is None:
            self._end_of_wait(name, self.now - self.arrived[name])
        if name in self.log.timing:
            told = self.log.timing[name]
            keys = ("queued", "ttft", "tpot", "max_gap", "p99_gap", "e2e", "preempted")
            self.outcome.timing[name] = {key: getattr(told.timing, key) for key in keys} | {"missed": list(told.missed)}

    # Requests

    def _prefix(self, name: str, tokens: int) -> list[int]:
        known = self.prefixes.setdefault(name, [])
        known += [next(self.fresh) % 990 + 2 for _ in range(tokens - len(known))]
        return known[:tokens]

    def _arrive(self, spec: ScenarioRequest) -> None:
        config = self.scenario.config
        whole = spec.prefix_tokens // config.block_size * config.block_size if spec.prefix else 0
        prompt = list(self._prefix(spec.prefix, whole)) if spec.prefix else []
        start = next(self.fresh)
        prompt += [2 + (start * 7919 + i * 31) % 990 for i in range(spec.prompt - len(prompt))]
        if len(prompt) > whole:
            prompt[whole] = 2 + start % 990
        promises = {"ttft": spec.slo.ttft, "tpot": spec.slo.tpot, "e2e": spec.slo.e2e}
        xargs: dict[str, Any] = {f"slo_{key}_ms": value * 1000 for key, value in promises.items() if value is not None}
        xargs |= {"slo_class": spec.slo_class, "tenant": spec.tenant}
        if spec.queue_ttl is not None:
            xargs["queue_ttl_ms"] = spec.queue_ttl * 1000
        request = self.engine.request(
            spec.id,
            prompt,
            spec.declared,
            stop_after=spec.outputs,
            priority=spec.priority,
            arrival=self.now,
            xargs=xargs,
        )
        if spec.resource is not None:
            number = 1 + sorted({r.resource for r in self.scenario.requests if r.resource}).index(spec.resource)
            request.lora_request = LoRARequest(spec.resource, number, "/nowhere")
        if spec.blocked_until > self.index:
            request.structured_output_request = SimpleNamespace(grammar=None)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.parked.append((spec.blocked_until, request))
        self.outcome.requests[spec.id] = Fate(arrival_step=self.index)
        self.specs[spec.id] = spec
        self.arrived[spec.id] = self.now
        self.engine.add(request)

    def _release_parked(self) -> None:
        for at, request in list(self.parked):
            if self.index >= at:
                self.parked.remove((at, request))
                request.structured_output_request.grammar = object()
        for request in self.scheduler.requests.values():
            ready = request.structured_output_request is not None and request.status == RequestStatus.WAITING
            if ready or request.status == RequestStatus.RUNNING:
                request.structured_output_request = None

    # Waits

    def _wait_of(self, name: str) -> Wait:
        return self.outcome.waits.setdefault(str(self.specs[name].priority), Wait())

    def _end_of_wait(self, name: str, waited: float) -> None:
        wait = self._wait_of(name)
        if waited >= wait.longest:
            wait.longest, wait.longest_id = waited, name

    def _close(self) -> None:
        for name, tokens in self.engine.streams.items():
            self.outcome.streams[name] = [i if t == STOP else t - 2 for i, t in enumerate(tokens)]
        for name, fate in self.outcome.requests.items():
            if name in self.scheduler.requests and fate.admitted_step is None:
                wait, waited = self._wait_of(name), self.now - self.arrived[name]
                wait.waiting_now += 1
                if waited > wait.longest_now:
                    wait.longest_now, wait.longest_now_id = waited, name
                self._end_of_wait(name, waited)
