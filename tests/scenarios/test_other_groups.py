"""Scenarios of other groups that hold already: victims, continuity, a shared prompt."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.executors.scripted import Script, ScriptedExecutor

PLAIN = "vllm-v1"


@pytest.mark.expects("S32", 0)
def test_s32_victim_costs_least(play):
    assert play("S32").preemptions()[0] == (18, "C")


@pytest.mark.expects("S32", 1)
def test_s32_little_is_recomputed(play):
    assert play("S32").recomputed_tokens() <= 200


@pytest.mark.expects("S32", 2)
def test_s32_long_ones_are_never_stopped(play):
    run = play("S32")
    assert run["A"].preemptions == run["B"].preemptions == 0


def test_s32_plain_engine_throws_much_away(play):
    with pytest.raises(AssertionError):
        test_s32_little_is_recomputed(partial(play, policy=PLAIN, set={"cfg.prefix_caching": False}))


NO_CACHE = {"cfg.prefix_caching": False}  # so that a resume must compute everything again


@pytest.mark.expects("S35", 0)
def test_s35_every_index_once_and_in_order(play):
    run = play("S35")
    assert run.preemptions()
    assert run.outcome.streams == {"A": list(range(200)), "B": list(range(200))}


@pytest.mark.expects("S35", 1)
def test_s35_usage_counts_once(play):
    run = play("S35", set=NO_CACHE)
    for name in "AB":
        computed = sum(run.scheduled(name).values())
        assert run[name].outputs == 200
        assert computed - run[name].recomputed_tokens == 64 + 200 - 1  # the last token is never written


@pytest.mark.expects("S35", 2)
def test_s35_resume_recomputes_and_goes_on(play):
    run = play("S35", set=NO_CACHE)
    assert run.restorations()
    for step, name in run.restorations():
        before = sum(row.emitted.get(name, 0) for row in run.rows[:step])
        chunks = 0
        for row in run.rows[step:]:
            chunks += row.scheduled.get(name, 0)
            if name in row.emitted:
                break
        assert chunks == 64 + before
        assert run.outcome.streams[name][before] == before


class Replaying(ScriptedExecutor):
    """A broken engine: a request that comes back starts its output anew."""

    def _join(self, plan, join):
        script = join.handle
        if join.outputs:
            script = Script([*script.tokens[: join.outputs], *script.tokens[: len(script.tokens) - join.outputs]])
        super()._join(plan, join._replace(handle=script))


def test_s35_catches_a_replay(play):
    with pytest.raises(AssertionError):
        test_s35_every_index_once_and_in_order(partial(play, executor=Replaying))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pool=st.integers(20, 40), count=st.integers(2, 6), outputs=st.integers(90, 150))
def test_s35_as_a_kind(play, pool, count, outputs):
    run = play("S35", set={"cfg.kv": pool, "cfg.max_seqs": 8, "A.x": count, "A.o": outputs, "B.o": outputs})
    assert all(stream == list(range(outputs)) for stream in run.outcome.streams.values())


@pytest.mark.expects("S40", 0)
def test_s40_shared_prompt_is_computed_once(play):
    assert play("S40").prefill_tokens() <= 2304


@pytest.mark.expects("S40", 1)
def test_s40_followers_are_close(play):
    first = [fate.first_token_step for fate in play("S40").family("R").values()]
    assert max(first) - first[0] <= 2


def test_s40_plain_engine_computes_it_again(play):
    with pytest.raises(AssertionError):
        test_s40_shared_prompt_is_computed_once(partial(play, policy=PLAIN))


@pytest.mark.parametrize(("share", "budget"), [(2048, 512), (1024, 4096), (100, 256)])
def test_s40_as_a_kind(play, share, budget):
    run = play("S40", set={"R.share": share, "cfg.budget": budget})
    own = 2080 - share // 16 * 16
    assert run.prefill_tokens() <= 2080 + 7 * own + 7 * 8  # one-token chunks aside
