"""JSON schemas constrain the real model's output, at both depths and across a preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.executors.driver import Driver, Handle, Work
from tidegate.core.request import FinishReason
from tidegate.engine.sampling import SamplingParams
from tidegate.errors import InputError
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.grammar import GrammarCompiler
from tidegate.executors.torch.model import LoadedModel

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
PROMPT = "Describe Paris as JSON: "


@pytest.fixture(scope="module")
def executor(smollm: LoadedModel) -> Iterator[TorchExecutor]:
    made = TorchExecutor(smollm, num_blocks=64, max_num_seqs=4, max_model_len=256, threads=1)
    yield made
    made.close()


def until_end(work: Work) -> tuple[list[int], FinishReason] | None:
    """Outputs up to the first that ended the request, if one did."""
    for count, (index, result) in enumerate(zip(work.indices, work.results, strict=True), start=1):
        for finished, reason in result.finished:
            if finished == index:
                return work.outputs[:count], reason
    return None


@pytest.mark.parametrize("depth", [1, 2])
def test_output_is_valid_and_ends_with_the_grammar(executor: TorchExecutor, depth: int) -> None:
    """Greedy and random requests side by side with an unconstrained one; each object ends with its last brace."""
    tokenizer = executor.tokenizer
    prompt = tokenizer(PROMPT)["input_ids"]
    driver = Driver(executor, list(range(64)), depth)
    greedy = driver.add("g", prompt, 48, Handle(SamplingParams(temperature=0.0, json_schema=SCHEMA)))
    random = driver.add("r", prompt, 48, Handle(SamplingParams(temperature=1.0, seed=3, json_schema=SCHEMA)))
    free = driver.add("f", prompt, 48)
    driver.run()
    for work in (greedy, random):
        ended = until_end(work)
        assert ended is not None
        outputs, reason = ended
        assert reason is FinishReason.STOP
        told = json.loads(tokenizer.decode(outputs))
        assert set(told) == {"city", "large"}
        assert isinstance(told["large"], bool)
    assert until_end(free) is None


def test_a_resumed_request_goes_on_in_its_grammar(executor: TorchExecutor) -> None:
    """The matcher sees every emitted token exactly once: the text is the same as without a preemption."""
    tokenizer = executor.tokenizer
    prompt = tokenizer(PROMPT)["input_ids"]
    handle = Handle(SamplingParams(temperature=0.8, seed=11, json_schema=SCHEMA))
    one = Driver(executor, list(range(64)))
    whole = one.add("a", prompt, 40, handle)
    one.run()
    two = Driver(executor, list(range(63, -1, -1)))
    broken = two.add("a", prompt, 40, handle)
    for _ in range(6):
        two.step({"a": 100})
    two.drain()
    two.preempt(broken)
    two.resume(broken)
    two.run(chunk=9)
    first, second = until_end(whole), until_end(broken)
    assert first is not None
    assert first == second


def test_a_schema_that_cannot_be_used_is_told_in_one_line(executor: TorchExecutor) -> None:
    executor.check_schema(SCHEMA)
    executor.check_schema({"type": "object"})
    with pytest.raises(InputError, match="schema") as told:
        executor.check_schema({"type": "no-such-type"})
    assert "\n" not in str(told.value)


def test_a_bad_schema_in_the_engine_ends_its_request_alone(executor: TorchExecutor) -> None:
    driver = Driver(executor, list(range(64)))
    bad = driver.add("b", [5, 6], 2, Handle(SamplingParams(temperature=0.0, json_schema={"type": "no-such-type"})))
    good = driver.add("g", [5, 6], 2)
    driver.run()
    ended = until_end(bad)
    assert ended is not None
    assert ended[1] is FinishReason.ERROR
    assert until_end(good) is None


def test_an_ended_grammar_lets_anything_pass(smollm: LoadedModel) -> None:
    """At depth 2 one more token is sampled after the end; it is dropped, so it must not fail either."""
    compiler = GrammarCompiler(smollm.tokenizer, smollm.vocab_size)
    tokenizer = smollm.tokenizer
    assert tokenizer is not None
    ids = tokenizer('{"city": "Paris", "large": true}', add_special_tokens=False)["input_ids"]
    grammar = compiler.grammar(SCHEMA, ids[:-1])
    assert grammar.open
    assert grammar.advance(ids[-1]) is FinishReason.STOP
    assert not compiler.forbidden([grammar], smollm.vocab_size).any()
    assert grammar.advance(77) is FinishReason.STOP
