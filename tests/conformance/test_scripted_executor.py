"""The scripted executor is the judge of every scheduler test, so each of its verdicts is tried here."""

import pytest

from tidegate.core.plan import Chunk, Join, StepPlan
from tidegate.core.request import FinishReason
from tidegate.errors import InputError
from tidegate.executors.scripted import PAST_THE_STOP, PlanError, Script, ScriptedExecutor, StepFormula


def _executor(**options):
    return ScriptedExecutor(**{"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, **options})


def _join(slot=0, tokens=(1, 2, 3, 4, 5), blocks=(0, 1), cached=0, outputs=0, script=None):
    return Join(slot, f"r{slot}", script or Script([7, 8, 9]), list(tokens), cached, outputs, list(blocks))


def _run(executor, *plans):
    """Results of plans that are numbered as they come."""
    return [
        executor.submit(StepPlan(step=step, now=float(step), **plan)).result()
        for step, plan in enumerate(plans, start=0)
    ]


PROMPT = {"joined": [_join()], "chunks": [Chunk(0, 0, 5, True)]}


def test_a_script_is_emitted_in_order():
    results = _run(_executor(), PROMPT, {"decodes": [0]}, {"decodes": [0]})
    assert [list(result.tokens) for result in results] == [[7], [8], [9]]
    assert not any(result.finished for result in results)


def test_a_stop_ends_and_one_step_in_flight_is_forgiven():
    stops = {"joined": [_join(script=Script([7, 8], stops=True))], "chunks": [Chunk(0, 0, 5, True)]}
    executor = _executor(depth=2)
    _, last, late = _run(executor, stops, {"decodes": [0]}, {"decodes": [0]})
    assert list(last.finished) == [(0, FinishReason.STOP)]
    assert list(late.tokens) == [PAST_THE_STOP]
    with pytest.raises(PlanError, match="output 3 of a script of 2"):
        executor.submit(StepPlan(3, 3.0, decodes=[0])).result()


def test_tokens_follow_the_order_of_the_plan():
    both = {
        "joined": [_join(1, script=Script([5]), blocks=(2, 3))],
        "chunks": [Chunk(1, 0, 5, True)],
        "decodes": [0],
    }
    assert list(_run(_executor(), PROMPT, both)[1].tokens) == [8, 5]


def test_a_shared_prefix_is_accepted_where_it_is_computed():
    follower = {"joined": [_join(1, blocks=(0, 2), cached=4)], "chunks": [Chunk(1, 4, 1, True)]}
    assert list(_run(_executor(), PROMPT, follower)[1].tokens) == [7]


RESUMED = [1, 2, 3, 4, 5, 7]

BREACHES = {
    "joined twice": ([PROMPT, {"joined": [_join()], "chunks": [Chunk(0, 0, 5, True)]}], "while it is held"),
    "no such slot": ([{"joined": [_join(2)], "chunks": [Chunk(2, 0, 5, True)]}], "does not exist"),
    "no such block": ([{"joined": [_join(blocks=(0, 8))], "chunks": [Chunk(0, 0, 5, True)]}], "got block 8"),
    "no script": ([{"joined": [Join(0, "r0", None, [1], 0, 0, [0])], "chunks": [Chunk(0, 0, 1, True)]}], "Script"),
    "block twice": ([{"joined": [_join(blocks=(1, 1))], "chunks": [Chunk(0, 0, 5, True)]}], "block twice"),
    "table too short": ([{"joined": [_join(blocks=(0,))], "chunks": [Chunk(0, 0, 5, True)]}], "are too few"),
    "decode without its block": ([PROMPT, *[{"decodes": [0]}] * 4], "are too few"),
    "decode in prefill": ([PROMPT | {"chunks": [Chunk(0, 0, 2, False)]}, {"decodes": [0]}], "before its prompt"),
    "chunk in decode": ([PROMPT, {"chunks": [Chunk(0, 5, 1, True)]}], "after it began to decode"),
    "gap between chunks": ([PROMPT | {"chunks": [Chunk(0, 1, 4, True)]}], "got a chunk from 1"),
    "empty chunk": ([PROMPT | {"chunks": [Chunk(0, 0, 0, False)]}], "chunk of 0"),
    "emits too early": ([PROMPT | {"chunks": [Chunk(0, 0, 4, True)]}], "emits=True"),
    "twice in a step": ([PROMPT, {"decodes": [0, 0]}], "scheduled twice"),
    "nobody there": ([PROMPT, {"decodes": [1]}], "nobody joined it"),
    "left twice": ([PROMPT, {"decodes": [0], "left": [1]}], "nobody holds it"),
    "grown into a held block": ([PROMPT, {"decodes": [0], "growth": [(0, 1)]}], "held already"),
    "wrong block for a prefix": (
        [PROMPT, {"joined": [_join(1, (1, 2, 3, 9, 5), (0, 2), cached=4)], "chunks": [Chunk(1, 4, 1, True)]}],
        "another prefix",
    ),
    "prefix not computed": (
        [{"joined": [_join(blocks=(0, 1), cached=4)], "chunks": [Chunk(0, 4, 1, True)]}],
        "0 tokens are computed",
    ),
    "half a block cached": ([{"joined": [_join(cached=3)], "chunks": [Chunk(0, 3, 2, True)]}], "3 cached tokens"),
    "everything cached": (
        [PROMPT, {"joined": [_join(1, (1, 2, 3, 4), (0,), cached=4)], "chunks": [Chunk(1, 4, 1, True)]}],
        "nothing left to compute",
    ),
    "another's block to write": (
        [PROMPT, {"joined": [_join(1, blocks=(2, 1))], "chunks": [Chunk(1, 0, 5, True)]}],
        "another slot holds",
    ),
    "outputs lost": (
        [{"joined": [_join(tokens=RESUMED[:5], outputs=1)], "chunks": [Chunk(0, 0, 5, True)]}],
        "other outputs",
    ),
    "past the end": ([PROMPT, *[{"decodes": [0]}] * 3], "output 3 of a script of 3"),
    "beyond the model": ([PROMPT], "the model ends at 4"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_named(breach):
    plans, message = BREACHES[breach]
    executor = _executor(max_model_len=4 if breach == "beyond the model" else 1 << 30)
    if breach == "decode without its block":
        plans = [PROMPT | {"joined": [_join(script=Script(range(9)))]}, *plans[1:]]
    with pytest.raises(PlanError, match=message):
        _run(executor, *plans)


def test_a_resume_with_its_outputs_goes_on():
    resumed = {"left": [0], "joined": [_join(0, RESUMED, outputs=1)], "chunks": [Chunk(0, 0, 6, True)]}
    assert list(_run(_executor(), PROMPT, resumed)[1].tokens) == [8]


def test_steps_come_in_order_and_empty_ones_not_at_all():
    executor = _executor()
    _run(executor, PROMPT)
    with pytest.raises(PlanError, match="step 2 was submitted after step 0"):
        executor.submit(StepPlan(2, 2.0, decodes=[0])).result()
    with pytest.raises(PlanError, match="empty plan"):
        executor.submit(StepPlan(-1, 2.0)).result()


def test_a_formula_is_arithmetic():
    formula = StepFormula("10 + 0.5*decodes + 0.02*(tokens - decodes) / 1")
    assert formula(decodes=4, prefill_tokens=100) == 10 + 2 + 2
    assert StepFormula("prefill_tokens - 5")(0, 0) == 0


@pytest.mark.parametrize(
    "text", ["", "8 +", "decode * 2", "__import__('os')", "1 / 0", "tokens ** 2", "'a'", "True and 1"]
)
def test_other_formulas_are_refused(text):
    with pytest.raises(InputError):
        StepFormula(text)
