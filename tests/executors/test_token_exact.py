"""Whatever the scheduler does to a request, its greedy tokens are those of plain transformers.

The real `Scheduler` plans for the real `TorchExecutor`; hypothesis chooses arrivals, prompts with shared
prefixes, chunk and block sizes, a pool small enough to force preemptions, cancellations, the policy and
the pipeline depth.
"""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tests.executors.driver import Handle
from tests.executors.reference import assert_greedy, tiny_pair
from tidegate.core.events import Computed, Emitted, Finished, Preempted
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import FinishReason, Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo
from tidegate.errors import RequestRefused
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.model import LoadedModel
from tidegate.executors.torch.swap import HostPool

MAX_STEPS = 5000


@dataclass(frozen=True)
class Ask:
    """One client: arrives at a step, maybe leaves again at another."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    leaves: int | None = None
    slo: Slo = NO_SLO


@dataclass
class Outcome:
    """What came of a run."""

    requests: list[Request]
    events: Counter[str]
    cached: int
    swapped: int


def run(
    asks: list[Ask], executor: TorchExecutor, limits: Limits, policy: str, depth: int, restore: str = "recompute"
) -> Outcome:
    """Serve `asks` in engine steps; a step is a second."""
    context = PolicyContext(HistoryPredictor(), StepTime(0.02, 0.5))
    scheduler = Scheduler(build_policy(policy, {"restore": restore}), limits, context)
    pipeline: deque[tuple[StepPlan, Future[StepResult]]] = deque()
    waiting = sorted(enumerate(asks), key=lambda pair: pair[1].step)
    requests: list[Request] = []
    events: list[object] = []
    step = 0
    while waiting or scheduler.has_work or pipeline:
        now = float(step)
        while waiting and waiting[0][1].step <= step:
            index, ask = waiting.pop(0)
            r = Request(
                str(index),
                token_ids=ask.prompt,
                max_tokens=ask.max_tokens,
                priority=ask.priority,
                slo=ask.slo,
                handle=Handle(),
                arrival=now,
            )
            try:
                scheduler.add(r, now)
                requests.append(r)
            except RequestRefused:
                assert len(ask.prompt) + ask.max_tokens > limits.pool_tokens
        for index, ask in enumerate(asks):
            if ask.leaves == step:
                scheduler.abort(str(index), now)
        plan = scheduler.plan(now)
        if plan:
            pipeline.append((plan, executor.submit(plan)))
        while pipeline and (len(pipeline) >= depth or not plan):
            oldest, future = pipeline.popleft()
            scheduler.apply(oldest, future.result(timeout=60), now)
        events += scheduler.take_events()
        step += 1
        assert step < MAX_STEPS, "the run does not end"
    scheduler.kv.check()
    assert scheduler.swap.pool.used == 0
    check_stream(requests, events)
    counts = Counter(type(e).__name__ for e in events)
    return Outcome(requests, counts, sum(r.cached_tokens for r in requests), sum(r.swapped_blocks for r in requests))


def check_stream(requests: list[Request], events: list[object]) -> None:
    """What clients were told is what the requests hold, and each request ended exactly once."""
    told: dict[str, list[int]] = {r.id: [] for r in requests}
    ended: Counter[str] = Counter()
    for e in events:
        if isinstance(e, Emitted):
            for r, token in zip(e.requests, e.tokens, strict=True):
                told[r.id].append(token)
        elif isinstance(e, Finished):
            ended[e.request.id] += 1
    for r in requests:
        assert ended[r.id] == 1
        assert r.token_ids is not None
        assert told[r.id] == r.token_ids[r.prompt_tokens :]


def check_tokens(plain: PreTrainedModel, requests: list[Request]) -> None:
    """Every request's outputs are plain greedy generation, complete unless its client left."""
    for r in requests:
        assert r.token_ids is not None
        outputs = r.token_ids[r.prompt_tokens :]
        assert r.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        if r.finish_reason is FinishReason.LENGTH:
            assert len(outputs) == r.max_tokens
        if outputs:
            assert_greedy(plain, r.token_ids[: r.prompt_tokens], outputs)


TOKENS = st.integers(3, 319)
STEMS = [tuple(3 + (7 * i * (k + 1)) % 300 for i in range(40)) for k in range(2)]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """A stem that others share, cut somewhere, and some tokens of its own."""
    stem = STEMS[draw(st.integers(0, 1))][: draw(st.sampled_from([0, 5, 16, 32, 40]))]
    return stem + tuple(draw(st.lists(TOKENS, min_size=1, max_size=12)))


asks = st.builds(
    Ask,
    step=st.integers(0, 30),
    prompt=prompts(),
    max_tokens=st.integers(1, 24),
    priority=st.integers(0, 2),
    leaves=st.none() | st.integers(0, 60),
    slo=st.sampled_from([NO_SLO, NO_SLO, Slo(ttft=5.0, tpot=1.0), Slo(e2e=40.0)]),
)


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, LoadedModel]:
    return tiny_pair("llama")


@given(
    asks=st.lists(asks, min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 4, 8, 16]),
    pool_tokens=st.integers(48, 160),
    seats=st.integers(1, 6),
    step_tokens=st.integers(6, 80),
    policy=st.sampled_from(list(PRESETS)),
    restore=st.sampled_from(["recompute", "swap", "auto"]),
    host=st.sampled_from([(0, 0), (6, 0), (4, 40)]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_tokens_equal_plain_transformers(
    tiny: tuple[PreTrainedModel, LoadedModel],
    asks: list[Ask],
    block_size: int,
    pool_tokens: int,
    seats: int,
    step_tokens: int,
    policy: str,
    restore: str,
    host: tuple[int, int],
    caching: bool,
    depth: int,
) -> None:
    plain, ours = tiny
    memory, disk = host
    limits = Limits(
        num_blocks=-(-pool_tokens // block_size),
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=step_tokens,
        max_model_len=128,
        headroom="none",
        prefix_caching=caching,
        resume_span=4,
        host_blocks=memory,
        disk_blocks=disk,
    )
    executor = TorchExecutor(
        ours,
        block_size=block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=seats,
        max_model_len=128,
        threads=1,
        host_blocks=memory,
        disk_blocks=disk,
    )
    try:
        outcome = run(asks, executor, limits, policy, depth, restore)
    finally:
        executor.close()
    event(f"preempted: {bool(outcome.events[Preempted.__name__])}")
    event(f"prefix hits: {bool(outcome.cached)}")
    event(f"swapped: {bool(outcome.swapped)}")
    check_tokens(plain, outcome.requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tight_pool_preempts_and_restores_without_a_trace(
    tiny: tuple[PreTrainedModel, LoadedModel], depth: int
) -> None:
    """The load above, fixed: preemptions, recomputation in chunks and shared prefixes all do happen."""
    plain, ours = tiny
    load = [Ask(2 * i, (*STEMS[i % 2][: 16 + i], 5 + i), 40, priority=i % 3) for i in range(8)]
    limits = Limits(
        num_blocks=40,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=128,
        headroom="none",
        resume_span=4,
    )
    executor = TorchExecutor(ours, block_size=4, num_blocks=40, max_num_seqs=6, max_model_len=128, threads=1)
    try:
        outcome = run(load, executor, limits, "priority", depth)
    finally:
        executor.close()
    assert outcome.events[Preempted.__name__] >= 2
    assert outcome.events[Computed.__name__] > len(load)
    assert outcome.cached > 0
    check_tokens(plain, outcome.requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host", [(64, 0), (2, 64)])
def test_swapped_requests_go_on_where_they_were(
    tiny: tuple[PreTrainedModel, LoadedModel], depth: int, host: tuple[int, int]
) -> None:
    """The load of the tight pool again: everybody who gives way is copied out, to memory or to a file, and back."""
    plain, ours = tiny
    load = [Ask(2 * i, (*STEMS[i % 2][: 16 + i], 5 + i), 40, priority=i % 3) for i in range(8)]
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "host_blocks": host[0], "disk_blocks": host[1]}
    limits = Limits(**sizes, max_num_batched_tokens=16, max_model_len=128, headroom="none", resume_span=4)
    executor = TorchExecutor(ours, **sizes, max_model_len=128, threads=1)
    try:
        outcome = run(load, executor, limits, "priority", depth, "swap")
    finally:
        executor.close()
    assert outcome.swapped > 0
    assert sum(r.recomputed_tokens for r in outcome.requests) == 0
    check_tokens(plain, outcome.requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("direction", ["_swap_out", "_swap_in"])
def test_whose_copy_failed_is_computed_again_token_for_token(
    tiny: tuple[PreTrainedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch, depth: int, direction: str
) -> None:
    """Every other copy to the host, or back from it, fails half-way."""
    plain, ours = tiny
    copy, calls = getattr(HostPool, direction), count()

    def failing(pool: HostPool, device: list[int], host: list[int]) -> None:
        if next(calls) % 2:
            copy(pool, device, host)
        else:
            copy(pool, device[: len(device) // 2], host[: len(host) // 2])
            raise OSError("the disk is gone")

    monkeypatch.setattr(HostPool, direction, failing)
    load = [Ask(2 * i, (*STEMS[i % 2][: 16 + i], 5 + i), 40, priority=i % 3) for i in range(8)]
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "host_blocks": 64}
    limits = Limits(**sizes, max_num_batched_tokens=16, max_model_len=128, headroom="none", resume_span=4)
    executor = TorchExecutor(ours, **sizes, max_model_len=128, threads=1)
    try:
        outcome = run(load, executor, limits, "priority", depth, "swap")
    finally:
        executor.close()
    assert next(calls) > 1
    assert sum(r.recomputed_tokens for r in outcome.requests) > 0
    check_tokens(plain, outcome.requests)


@pytest.fixture(scope="module")
def plain_smollm(smollm: LoadedModel, smollm_files: object) -> PreTrainedModel:
    """The real model as transformers alone runs it."""
    path = smollm_files.path  # type: ignore[attr-defined]
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager").eval()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_real_model_is_token_exact(smollm: LoadedModel, plain_smollm: PreTrainedModel, depth: int) -> None:
    """SmolLM2 on a pool that forces preemption: chat prompts with one system prompt, in chunks."""
    tokenizer = smollm.tokenizer
    assert tokenizer is not None
    questions = [
        "What is the capital of France?",
        "Count from one to ten.",
        "Name three colours.",
        "Why is the sky blue?",
    ]
    load = []
    for i, question in enumerate(questions):
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        load.append(Ask(3 * i, tuple(ids), 24, priority=-i))
    limits = Limits(
        num_blocks=14,
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=128,
        headroom="none",
        resume_span=4,
    )
    executor = TorchExecutor(smollm, block_size=8, num_blocks=14, max_num_seqs=3, max_model_len=128, threads=1)
    try:
        outcome = run(load, executor, limits, "priority", depth)
    finally:
        executor.close()
    assert outcome.events[Preempted.__name__] > 0
    assert len(outcome.requests) == len(questions)
    check_tokens(plain_smollm, outcome.requests)
