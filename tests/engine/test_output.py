"""A sequence's output: stop tokens, stop strings over token borders, log-probabilities."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.server.scripted_model import small_tokenizer
from tidegate.core.plan import Chunk, Join, StepPlan, StepResult
from tidegate.core.request import FinishReason
from tidegate.engine.output import Delta, OutputProcessor, OutputState, Usage
from tidegate.engine.sampling import SamplingParams, TokenLogprobs

TOKENIZER = small_tokenizer().backend_tokenizer
EOS = small_tokenizer().eos_token_id
USAGE = Usage(1, 1, 0)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def state_for(**params: object) -> OutputState:
    return OutputState(SamplingParams(**params), TOKENIZER, [EOS])  # type: ignore[arg-type]


def run(state: OutputState, ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> Delta:
    """Everything the client sees of `ids`."""
    seen = Delta()
    for token in ids:
        ended = state.push(token)
        seen.absorb(state.take())
        if ended:
            reason = FinishReason.STOP
            break
    state.close(reason, USAGE)
    seen.absorb(state.take())
    return seen


@given(st.text(alphabet="abc é", max_size=20), st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), max_size=3))
def test_text_before_the_stop_string_and_nothing_after(text: str, stops: list[str]) -> None:
    seen = run(state_for(stop=tuple(stops)), ids_of(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (seen.text, seen.finish_reason) == (text, FinishReason.LENGTH)
    else:
        longest = max(len(stop) for stop in stops if text[: min(ends)].endswith(stop))
        assert (seen.text, seen.finish_reason) == (text[: min(ends) - longest], FinishReason.STOP)


def test_a_stop_token_ends_the_sequence_and_shows_no_text() -> None:
    seen = run(state_for(), [*ids_of("done"), EOS, *ids_of("never")])
    assert (seen.text, seen.finish_reason, seen.token_ids[-1]) == ("done", FinishReason.STOP, EOS)


def test_ignore_eos_goes_on_past_the_end_of_sequence_but_not_past_named_stop_tokens() -> None:
    stop = ids_of("x")[0]
    ids = [*ids_of("a"), EOS, *ids_of("b"), stop, *ids_of("c")]
    assert run(state_for(ignore_eos=True, stop_token_ids=(stop,)), ids).text == "ab"


def test_before_min_tokens_nothing_stops() -> None:
    seen = run(state_for(min_tokens=3, stop=("b",)), [*ids_of("b"), EOS, *ids_of("b"), *ids_of("b"), *ids_of("c")])
    assert (seen.text, len(seen.token_ids)) == ("bb", 4)


def test_logprobs_belong_to_the_tokens_of_the_text() -> None:
    state = state_for(logprobs=1)
    ids = ids_of("tide")
    for token in [*ids, EOS]:
        state.push(token, TokenLogprobs(-1.0, ((token, -1.0),)))
    assert [token for token, _ in state.take().logprobs] == ids


def test_the_processor_finds_ends_and_ignores_tokens_past_them() -> None:
    processor = OutputProcessor(2)
    one, two = state_for(), state_for(stop=("zz",))
    joins = [Join(0, "one", one, [5], 0, 0, [0]), Join(1, "two", two, [5], 0, 0, [1])]
    first = StepPlan(0, 0.0, chunks=[Chunk(0, 0, 1, True), Chunk(1, 0, 1, True)], joined=joins)
    z = ids_of("z")[0]
    assert processor.process(first, StepResult([EOS, z])).finished == ((0, FinishReason.STOP),)
    ahead = StepPlan(1, 0.0, decodes=[0, 1])
    assert processor.process(ahead, StepResult([z, z])).finished == ((1, FinishReason.STOP),)
    assert one.take().token_ids == [EOS]
    assert two.take().text == ""


def test_an_end_that_the_executor_found_is_kept() -> None:
    processor = OutputProcessor(1)
    state = state_for()
    plan = StepPlan(0, 0.0, chunks=[Chunk(0, 0, 1, True)], joined=[Join(0, "one", state, [5], 0, 0, [0])])
    result = StepResult(ids_of("}"), ((0, FinishReason.STOP),))
    assert processor.process(plan, result).finished == ((0, FinishReason.STOP),)
    assert state.ended


def test_a_slot_that_changed_hands_feeds_its_new_holder() -> None:
    processor = OutputProcessor(1)
    old, new = state_for(), state_for()
    processor.process(
        StepPlan(0, 0.0, chunks=[Chunk(0, 0, 1, True)], joined=[Join(0, "old", old, [5], 0, 0, [0])]),
        StepResult(ids_of("a")),
    )
    processor.process(
        StepPlan(1, 0.0, chunks=[Chunk(0, 0, 1, True)], joined=[Join(0, "new", new, [5], 0, 0, [0])], left=[0]),
        StepResult(ids_of("b")),
    )
    assert (old.take().text, new.take().text) == ("a", "b")


def test_what_was_said_of_copies_reaches_the_scheduler() -> None:
    processor = OutputProcessor(1)
    plan = StepPlan(0, 0.0, chunks=[Chunk(0, 0, 1, False)], joined=[Join(0, "a", state_for(), [1, 2], 0, 0, [0])])
    result = processor.process(plan, StepResult([], failed_copies=["b"], copy_seconds=0.5))
    assert (result.failed_copies, result.copy_seconds) == (["b"], 0.5)
