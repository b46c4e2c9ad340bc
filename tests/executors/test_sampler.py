"""Each sampling feature against a slow plain reference or a property."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executors.driver import Handle
from tidegate.core.plan import Join
from tidegate.engine.sampling import SamplingParams, TokenLogprobs
from tidegate.executors.torch.draw import Draw, draw, uniforms
from tidegate.executors.torch.grammar import GrammarCompiler
from tidegate.executors.torch.sampler import Sampler, best_tokens

CPU = torch.device("cpu")
VOCAB = 400
GREEDY = SamplingParams(temperature=0.0)


def sampler(
    params: Mapping[int, SamplingParams], tokens: Mapping[int, tuple[list[int], list[int]]] | None = None
) -> Sampler:
    """A sampler whose slots hold requests with `params`, each with (prompt, outputs)."""
    made = Sampler(GrammarCompiler(None, VOCAB), VOCAB, frozenset({2}), 8, CPU)
    for slot, p in params.items():
        prompt, outputs = (tokens or {}).get(slot, ([5], []))
        made.join(Join(slot, str(slot), Handle(p), prompt + outputs, 0, len(outputs), [0]))
    return made


def logits(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_greatest(dtype: torch.dtype) -> None:
    """Ties, NaN and infinities as torch's own argmax settles them."""
    rows = logits(5).to(dtype)
    rows[0, [9, 300]] = 50.0
    rows[1, 70] = float("nan")
    rows[2] = float("-inf")
    rows[3, [8, 399]] = float("inf")
    found = best_tokens(rows)
    assert found.dtype == torch.long
    assert found.tolist() == rows.argmax(-1).tolist()
    assert found.tolist()[:4] == [9, 70, 0, 8]


def kept_tokens(row: torch.Tensor, p: SamplingParams) -> dict[int, float]:
    """The slow twin: which tokens may be drawn, with their probabilities."""
    probabilities = torch.softmax(row.double() / p.temperature, -1).tolist()
    order = sorted(range(len(probabilities)), key=lambda t: -probabilities[t])
    if p.min_p > 0:
        order = [t for t in order if probabilities[t] >= p.min_p * probabilities[order[0]]]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = sum(probabilities[t] for t in order)
    kept: list[int] = []
    for token in order:
        kept.append(token)
        if p.top_p < 1 and sum(probabilities[t] for t in kept) >= p.top_p * mass:
            break
    total = sum(probabilities[t] for t in kept)
    return {t: probabilities[t] / total for t in kept}


@given(
    seed=st.integers(0, 50),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 5, 255, 256, 257, 399]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_drawn_token_is_where_its_uniform_says(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    """Over a grid of uniforms the draw walks the kept tokens in order, each as wide as its probability."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = logits(1, seed, spread)
    kept = kept_tokens(row[0], params)
    grid = torch.linspace(0, 1 - 1e-9, 101, dtype=torch.float64)
    tokens = draw(row.expand(101, -1), Draw.of([params] * 101, CPU), grid).tolist()
    upper = dict(zip(kept, np.cumsum(list(kept.values())), strict=True))
    allowed_slip = 1e-4  # float32 logits on one side, float64 on the other
    for u, token in zip(grid.tolist(), tokens, strict=True):
        if token not in kept:  # a cut that falls on a rounding error may keep one token more
            continue
        assert upper[token] - kept[token] - allowed_slip <= u <= upper[token] + allowed_slip
    assert len(set(tokens) - set(kept)) <= 1


def test_uniforms_are_uniform_and_depend_on_both_arguments() -> None:
    values = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100), 100))
    assert len(set(values.tolist())) == 10_000
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(counts - 500).max() < 5 * math.sqrt(500)


def test_a_seeded_request_does_not_depend_on_its_neighbours_or_on_preemption() -> None:
    seeded = SamplingParams(temperature=1.0, seed=-7)
    alone = sampler({3: seeded})
    first = [int(alone.sample(logits(1, i), np.array([3])).tokens[0]) for i in range(6)]
    crowd = sampler({3: seeded, 1: SamplingParams(temperature=2.0), 0: GREEDY})
    outputs: list[int] = []
    for i in range(6):
        if i == 3:  # preempted and seated elsewhere
            crowd.leave(3)
            crowd.join(Join(5, "x", Handle(seeded), [5, *outputs], 0, len(outputs), [0]))
        slot = 3 if i < 3 else 5
        rows = torch.cat([logits(1, 100 + i), logits(1, i), logits(1, 200 + i)])
        outputs.append(int(crowd.sample(rows, np.array([1, slot, 0])).tokens[1]))
    assert outputs == first


def test_unseeded_requests_differ() -> None:
    both = sampler({0: SamplingParams(temperature=5.0), 1: SamplingParams(temperature=5.0)})
    row = logits(1)
    drawn = [both.sample(row.repeat(2, 1), np.array([0, 1])).tokens.tolist() for _ in range(8)]
    assert [a for a, _ in drawn] != [b for _, b in drawn]


def test_greedy_rows_beside_random_ones_are_the_argmax() -> None:
    mixed = sampler({0: GREEDY, 1: SamplingParams(temperature=1.0), 2: GREEDY})
    rows = logits(3)
    tokens = mixed.sample(rows.clone(), np.array([0, 1, 2])).tokens
    assert tokens[[0, 2]].tolist() == rows[[0, 2]].argmax(-1).tolist()


@given(
    prompt=st.lists(st.integers(0, 30), max_size=10),
    outputs=st.lists(st.integers(0, 30), max_size=10),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.7, -0.5]),
    frequency=st.sampled_from([0.0, 0.4]),
)
@settings(max_examples=60, deadline=None)
def test_penalties_equal_their_definition(
    prompt: list[int], outputs: list[int], repetition: float, presence: float, frequency: float
) -> None:
    """Three greedy steps; what was sampled in one is penalised in the next."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    penalised = sampler({4: params, 6: GREEDY}, {4: (prompt, outputs)})
    history = list(outputs)
    for step in range(3):
        rows = logits(2, step)
        expected = rows[1].clone()
        for token in set(prompt) | set(history):
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        for token in set(history):
            expected[token] -= frequency * history.count(token) + presence
        taken = int(penalised.sample(rows.clone(), np.array([6, 4])).tokens[1])
        assert expected[taken] >= expected.max() - 1e-5
        history.append(taken)


def test_logit_bias_forces_and_forbids() -> None:
    biased = sampler({0: SamplingParams(temperature=0.0, logit_bias={17: 100.0}), 1: GREEDY})
    rows = logits(2)
    best = int(rows[1].argmax())
    assert biased.sample(rows.clone(), np.array([0, 1])).tokens.tolist() == [17, best]
    forbidding = sampler({0: SamplingParams(temperature=0.0, logit_bias={best: -100.0})})
    assert int(forbidding.sample(rows[1:].clone(), np.array([0])).tokens[0]) == int(rows[1].topk(2).indices[1])


def test_no_stop_token_before_min_tokens() -> None:
    """With two outputs emitted already, the third and fourth may not be a stop token, the fifth may."""
    params = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(9,))
    early = sampler({0: params}, {0: ([5], [6, 7])})
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 9], row[0, 33] = 9.0, 8.0, 7.0
    taken = [int(early.sample(row.clone(), np.array([0])).tokens[0]) for _ in range(3)]
    assert taken == [33, 33, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_model(temperature: float) -> None:
    """Before bias, penalties and temperature, for the token taken and the best ones."""
    params = SamplingParams(temperature=temperature, seed=1, logprobs=3, logit_bias={17: 100.0})
    rows = logits(2)
    sampled = sampler({0: GREEDY, 1: params}).sample(rows.clone(), np.array([0, 1]))
    expected = torch.log_softmax(rows[1], -1)
    told = sampled.details[1]
    assert set(sampled.details) == {1}
    assert isinstance(told, TokenLogprobs)
    assert told.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert [t for t, _ in told.top] == expected.topk(3).indices.tolist()
    assert [v for _, v in told.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_the_token_alone_where_no_alternatives_are_wanted() -> None:
    sampled = sampler({0: SamplingParams(temperature=0.0, logprobs=0)}).sample(logits(1), np.array([0]))
    told = sampled.details[0]
    assert isinstance(told, TokenLogprobs)
    assert told.top == ()


ANY = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e-320, 1e-300, 1e-38, 1e-6, 1.0, 1e300])


@given(
    temperature=ANY,
    top_p=ANY,
    min_p=ANY,
    repetition=ANY,
    presence=ANY,
    frequency=ANY,
    top_k=st.sampled_from([0, -1, 1, 300, 10**30, 10**400]),
    spread=st.sampled_from([0.0, 4.0, 1e38]),
)
@settings(max_examples=300, deadline=None)
def test_no_parameter_breaks_its_row_or_its_neighbours(
    temperature: float,
    top_p: float,
    min_p: float,
    repetition: float,
    presence: float,
    frequency: float,
    top_k: int,
    spread: float,
) -> None:
    """Two steps beside a greedy, a random and a penalised request, who say what they say without it."""
    wild = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={7: 100.0, 8: temperature},
        seed=1,
    )
    others = {0: GREEDY, 1: SamplingParams(seed=3), 2: SamplingParams(seed=4, repetition_penalty=1.2)}
    beside, alone = sampler({**others, 5: wild}), sampler(others)
    with_it, without = np.array([0, 1, 5, 2]), np.array([0, 1, 2])
    for step in range(2):
        rows = logits(4, step)
        rows[2] *= spread
        told = beside.sample(rows.clone(), with_it).tokens.tolist()
        assert 0 <= told.pop(2) < VOCAB
        assert told == alone.sample(rows[[0, 1, 3]].clone(), without).tokens.tolist()


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    rows = logits(3)
    cold = sampler({slot: SamplingParams(temperature=t) for slot, t in enumerate((1e-320, 1e-38, 1e-6))})
    assert cold.sample(rows.clone(), np.array([0, 1, 2])).tokens.tolist() == rows.argmax(-1).tolist()
    just_random = draw(rows, Draw.of([SamplingParams(temperature=1e-5)] * 3, CPU), torch.full((3,), 0.5).double())
    assert just_random.tolist() == rows.argmax(-1).tolist()


def test_logits_that_are_no_numbers_say_a_token_of_the_vocabulary() -> None:
    rows = logits(4)
    rows[0] = math.nan
    rows[1] = -math.inf
    rows[2, 9] = math.inf
    rows[3, 5] = math.nan
    tokens = draw(rows, Draw.of([SamplingParams(top_p=0.9)] * 4, CPU), torch.full((4,), 0.5).double()).tolist()
    assert tokens[:3] == [0, 0, 9]
    assert tokens[3] != 5
