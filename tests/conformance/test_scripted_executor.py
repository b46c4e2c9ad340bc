"""The scripted executor is the judge of every scheduler test, so each of its verdicts is tried here."""

import pytest

from tidegate.core.plan import Chunk, Copy, Join, StepPlan
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


# A request of 5 prompt tokens that emitted one and holds 5 KV tokens in blocks 0 and 1 leaves for host blocks 2 and 3.
OUT = {"left": [0], "swapped_out": [Copy("r0", [0, 1], [2, 3])]}


def _back(blocks=(4, 5), cached=5, device=(4, 5), host=(2, 3), slot=1, tokens=RESUMED, outputs=1, id="r0", **more):
    joined = [Join(slot, id, Script([7, 8, 9]), list(tokens), cached, outputs, list(blocks))]
    return {"joined": joined, "swapped_in": [Copy(id, list(device), list(host))], **more}


GOES_ON = {"chunks": [Chunk(1, 5, 1, True)]}

SWAP_BREACHES = {
    "computes in the same step": ([PROMPT, OUT, _back(**GOES_ON)], "computes in the step that swaps it in"),
    "decodes in the same step": ([PROMPT, OUT, _back(decodes=[1])], "computes in the step that swaps it in"),
    "still there": ([PROMPT, {"swapped_out": OUT["swapped_out"]}], "did not leave a slot in this step"),
    "left before": ([PROMPT, OUT, OUT | {"left": []}], "did not leave a slot in this step"),
    "never joined": ([PROMPT, OUT, {"swapped_in": [Copy("r0", [4], [2])]}], "did not join in this step"),
    "another's block": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [0, 2], [0, 1])]}], "not in its table"),
    "into another's block": ([PROMPT, OUT, _back(device=(4, 6))], "not in its table"),
    "uneven": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [0, 1], [0])]}], "copies 2 blocks to or from 1"),
    "nothing": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [], [])]}], "copies 0 blocks"),
    "device block twice": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [0, 0], [0, 1])]}], "a block twice"),
    "host block twice": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [0, 1], [0, 0])]}], "a block twice"),
    "no such host block": ([PROMPT, {"left": [0], "swapped_out": [Copy("r0", [0], [6])]}], "host block 6; there are 6"),
    "negative host block": ([PROMPT, OUT, _back(host=(2, -1))], "host block -1"),
    "never written": ([PROMPT, OUT, _back(host=(2, 4))], "host block 4, which holds nothing"),
    "blocks mixed up": ([PROMPT, OUT, _back(host=(3, 2))], "not its own 4 of block 0"),
    "more than went out": ([PROMPT, OUT, _back(cached=6, tokens=[*RESUMED, 8], outputs=2)], "not its own 2 of block 1"),
    "other tokens": ([PROMPT, OUT, _back(tokens=[1, 2, 3, 4, 6, 7])], "not its own 1 of block 1"),
    "other tokens before": ([PROMPT, OUT, _back(tokens=[1, 2, 9, 4, 5, 7])], "not its own 4 of block 0"),
    "half of it": ([PROMPT, OUT, _back(device=(4,), host=(2,))], "5 cached tokens"),
    "the end alone": ([PROMPT, OUT, _back(device=(5,), host=(3,))], "reuses block 4, of which 0 tokens are computed"),
    "the same tokens after another prefix": (
        [PROMPT, {"joined": [_join(1, (9, 9, 9, 9, 5), (2, 3))], "chunks": [Chunk(1, 0, 5, True)]},
         OUT | {"left": [0, 1]},
         _back(id="r1", tokens=[9, 9, 9, 9, 5, 7], blocks=(2, 5), device=(5,), host=(3,))],
        "not its own 1 of block 1",
    ),
    "nothing to do": ([PROMPT, OUT, _back(tokens=RESUMED[:5], outputs=0)], "nothing left to compute"),
    "outputs lost": ([PROMPT, OUT, _back(tokens=[1, 2, 3, 4, 5, 6])], "other outputs"),
    "a block that others hold": (
        [PROMPT, {"joined": [_join(1, blocks=(0, 2), cached=4)], "chunks": [Chunk(1, 4, 1, True)]},
         OUT, _back(slot=0, blocks=(0, 5), device=(0, 5))],
        "block 0, which another slot holds",
    ),
    "overwritten on the host": (
        [PROMPT, OUT, {"joined": [_join(1, (11, 12, 13, 14, 15))], "chunks": [Chunk(1, 0, 5, True)]},
         {"left": [1], "swapped_out": [Copy("r1", [0], [2])]}, _back()],
        "4 tokens of block 0 of r1 in host block 2",
    ),
    "two to one host block": (
        [PROMPT, {"joined": [_join(1, blocks=(2, 3))], "chunks": [Chunk(1, 0, 5, True)]},
         {"left": [0, 1], "swapped_out": [Copy("r0", [0], [2]), Copy("r1", [2], [2])]}],
        "another copy writes",
    ),
    "read and written in one step": (
        [PROMPT, OUT, {"joined": [_join(1)], "chunks": [Chunk(1, 0, 5, True)]},
         {"left": [1], "swapped_out": [Copy("r1", [0], [2])], **_back(slot=0)}],
        "that this step writes",
    ),
    "in and out in one step": ([PROMPT, {**OUT, **_back()}], "that this step writes"),
}  # fmt: skip


@pytest.mark.parametrize("breach", SWAP_BREACHES)
def test_a_breach_of_swapping_is_named(breach):
    plans, message = SWAP_BREACHES[breach]
    with pytest.raises(PlanError, match=message):
        _run(_executor(host_blocks=4, disk_blocks=2), *plans)


def test_what_was_swapped_goes_on_in_other_blocks():
    """Others write into the blocks that it left; it goes on in the middle of a block, and from both tiers."""
    out = {"left": [0], "swapped_out": [Copy("r0", [0, 1], [3, 4])]}
    other = {"joined": [_join(0, (9, 9, 9, 9, 9))], "chunks": [Chunk(0, 0, 5, True)]}
    results = _run(_executor(host_blocks=4, disk_blocks=2), PROMPT, out | other, _back(host=(3, 4)), GOES_ON)
    assert list(results[3].tokens) == [8]
    assert not any(result.failed_copies for result in results)


def test_less_may_come_back_than_went_out():
    back = _back(cached=4, blocks=(4, 5), device=(4,), host=(2,))
    assert list(_run(_executor(host_blocks=4), PROMPT, OUT, back, {"chunks": [Chunk(1, 4, 2, True)]})[3].tokens) == [8]


def test_what_came_back_serves_others_as_a_prefix():
    follower = {"joined": [_join(0, blocks=(4, 6), cached=4)], "chunks": [Chunk(0, 4, 1, True)]}
    assert list(_run(_executor(host_blocks=4), PROMPT, OUT, _back(), follower)[3].tokens) == [7]


def _anonymous(slot=0, id="r0", blocks=(0, 1), cached=0, outputs=0):
    return Join(slot, id, Script([7, 8, 9]), (), cached, outputs, list(blocks))


def test_without_token_ids_only_its_own_request_gets_it_back():
    prompt = {"joined": [_anonymous()], "chunks": [Chunk(0, 0, 5, True)]}
    back = {"joined": [_anonymous(1, "r0", (4, 5), 5, 1)], "swapped_in": [Copy("r0", [4, 5], [2, 3])]}
    assert list(_run(_executor(host_blocks=4), prompt, OUT, back, GOES_ON)[3].tokens) == [8]
    thief = {"joined": [_anonymous(1, "r1", (4, 5), 5, 1)], "swapped_in": [Copy("r1", [4, 5], [2, 3])]}
    with pytest.raises(PlanError, match="of r0 in host block 2"):
        _run(_executor(host_blocks=4), prompt, OUT, thief)


@pytest.mark.parametrize("out", [True, False])
def test_a_failed_copy_is_reported_and_must_not_be_relied_on(out):
    def fails(copy, outward):
        return copy.request_id == "r0" and outward is out

    executor = _executor(host_blocks=4, fail_copies=fails)
    results = _run(executor, PROMPT, OUT) if out else _run(executor, PROMPT, OUT, _back())
    assert list(results[-1].failed_copies) == ["r0"]
    relying = _back() if out else GOES_ON
    with pytest.raises(PlanError, match="which holds nothing" if out else "but 0 tokens are computed"):
        executor.submit(StepPlan(len(results), 0.0, **relying)).result()


def test_a_request_whose_copy_failed_may_start_over():
    again = {"left": [1], "joined": [_join(0, RESUMED, (4, 5), outputs=1)], "chunks": [Chunk(0, 0, 6, True)]}
    executor = _executor(host_blocks=4, fail_copies=lambda copy, out: not out)
    assert list(_run(executor, PROMPT, OUT, _back(), again)[3].tokens) == [8]


def test_a_request_whose_copy_failed_may_be_computed_again_where_it_is():
    again = {"chunks": [Chunk(1, 0, 6, True)]}
    executor = _executor(host_blocks=4, fail_copies=lambda copy, out: not out)
    assert list(_run(executor, PROMPT, OUT, _back(), again)[3].tokens) == [8]


def test_kv_that_never_came_neither_goes_out_again_nor_serves_others():
    out_again = {"left": [1], "swapped_out": [Copy("r0", [4, 5], [0, 1])]}
    with pytest.raises(PlanError, match="nothing is computed in block 4"):
        _run(_executor(host_blocks=4, fail_copies=lambda copy, out: not out), PROMPT, OUT, _back(), out_again)
    back = _back(blocks=(0, 1), device=(0, 1))  # where the same once lay: the copy may have got half-way
    follower = {"joined": [_join(0, blocks=(0, 6), cached=4)], "chunks": [Chunk(0, 4, 1, True)]}
    with pytest.raises(PlanError, match="0 tokens are computed"):
        _run(_executor(host_blocks=4, fail_copies=lambda copy, out: not out), PROMPT, OUT, back, follower)


def test_a_failure_that_could_not_be_known_yet_is_a_failed_copy_as_well():
    """At depth 2 the way back may be planned before the result of the way out; one step later it is a breach."""
    executor = _executor(host_blocks=4, depth=2, fail_copies=lambda copy, out: out)
    assert list(_run(executor, PROMPT, OUT, _back())[2].failed_copies) == ["r0"]
    other = {"joined": [_join(0)], "chunks": [Chunk(0, 0, 5, True)]}
    with pytest.raises(PlanError, match="which holds nothing"):
        _run(_executor(host_blocks=4, depth=2, fail_copies=lambda copy, out: out), PROMPT, OUT, other, _back())


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
