"""Which engine holds which prefix: remembered, told by engines, and what a gateway makes of text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.views import replicas, request, route
from tidegate.core.hashing import block_hashes
from tidegate.routing import text_blocks as blocks_of_text
from tidegate.routing.kv_events import EngineBlocks, TokenBlocks
from tidegate.routing.prefix_index import PrefixIndex
from tidegate.routing.prefixes import PrefixMemory
from tidegate.routing.text_blocks import BLOCK_BYTES, BytesPerToken, text_blocks
from tidegate.routing.view import RouteView

SIZE = 4  # tokens of an engine's block here


def test_prefix_memory_is_bounded_and_forgets_tails_first() -> None:
    memory = PrefixMemory(tokens=4)
    memory.sent("x", (1, 2, 3))
    memory.sent("x", (1, 8, 9))
    assert len(memory) == 4
    assert memory.matches((1, 2, 3)) == {"x": 2}  # 3, the tail longest unused, went
    assert memory.matches((1, 8, 9)) == {"x": 3}
    for i in range(100):
        memory.sent("y", (1000 + i, 2000 + i))
    assert len(memory) == 8
    assert len(memory._holders) == 8
    memory.sent("y", range(50), tokens=20)  # of which it is known how many it holds
    assert memory.matches(range(50)) == {"y": 20}


def test_blocks_count_for_what_they_hold() -> None:
    memory = PrefixMemory(tokens=1000)
    memory.sent("x", range(20), block_tokens=100)
    assert memory.matches(range(20)) == {"x": 10}


def test_prefix_memory_tells_the_depth_of_each_and_forgets_a_replica() -> None:
    memory = PrefixMemory(tokens=100)
    memory.sent("x", (1, 2, 3))
    memory.sent("y", (1, 5))
    assert memory.matches((1, 2, 3, 4)) == {"x": 3, "y": 1}
    assert memory.matches((2, 3)) == {"x": 2}
    assert memory.matches((6,)) == {}
    memory.forget("x")
    assert memory.matches((1, 2, 3)) == {"y": 1}
    assert len(memory._holders) == 2


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 3), st.integers(1, 4))), st.integers(0, 3))
def test_depths_are_those_of_the_longest_beginnings_held(sent: list[tuple[str, int, int]], asked: int) -> None:
    memory, held = PrefixMemory(tokens=100), {name: set[int]() for name in "xyz"}
    for name, family, depth in sent:
        blocks = [10 * (family if d else 0) + d for d in range(depth)]  # all begin alike
        memory.sent(name, blocks)
        held[name] |= set(blocks)
    blocks = [10 * (asked if d else 0) + d for d in range(4)]
    depths = {name: len([*takewhile(own.__contains__, blocks)]) for name, own in held.items()}
    assert memory.matches(blocks) == {name: depth for name, depth in depths.items() if depth}


# Text


def test_blocks_of_text_are_chained_and_kept_apart_by_salt() -> None:
    head, tail = b"h" * BLOCK_BYTES, b"t" * BLOCK_BYTES
    both = text_blocks([head, tail], "model", "tenant")
    assert len(both) == 2
    assert text_blocks([head[:100], head[100:] + tail + b"rest"], "model", "tenant") == both  # cuts do not matter
    assert text_blocks([head, b"x" * BLOCK_BYTES], "model", "tenant")[0] == both[0]
    assert text_blocks([tail, tail], "model", "tenant")[1] != both[1]  # the same text behind another start
    for salts in (("model", "other"), ("modelt", "enant"), ("model",), ("model", "tenant", "")):
        assert not set(text_blocks([head, tail], *salts)) & set(both)
    assert text_blocks([head[1:]], "model") == []
    assert text_blocks([head], "model", "tenant") == both[:1] == [1777386116701463314]  # in every process


def test_bytes_a_token_are_learned() -> None:
    ratio = BytesPerToken()
    assert (ratio.tokens(4000), ratio.tokens(1)) == (1000, 1)
    ratio.observe(10, 9)  # template
    assert ratio.ratio == 4.0
    for _ in range(300):
        ratio.observe(3000, 1500)
    assert ratio.tokens(3000) == pytest.approx(1500, rel=0.02)
    assert ratio.block_tokens == pytest.approx(BLOCK_BYTES / 2, rel=0.02)
    for _ in range(1000):
        ratio.observe(1 << 30, 1)  # a lie goes only so far
    assert ratio.ratio <= 16


# Events


def told(
    index: PrefixIndex | EngineBlocks, replica: str, ids: list[int], parent: object = None, salt: str = ""
) -> None:
    """`replica` stores the blocks of `ids`, which it calls by their first token."""
    index.stored(replica, [f"{replica}{i}" for i in ids[::SIZE]], parent, ids, SIZE, salt)


def test_an_engine_that_tells_its_blocks_is_known_exactly() -> None:
    blocks, ids = EngineBlocks(), list(range(16))
    names = block_hashes(ids, SIZE)
    told(blocks, "x", ids[:8])
    told(blocks, "x", ids[8:], parent="x4")
    told(blocks, "y", ids[:4])
    assert blocks.matches(names, SIZE) == {"x": 4, "y": 1}
    blocks.removed("x", ["x12", "never"])
    assert blocks.matches(names, SIZE) == {"x": 3, "y": 1}
    blocks.removed("x", ["x0"])
    assert blocks.matches(names, SIZE) == {"y": 1}  # the rest hangs in the air
    blocks.cleared("y")
    assert (blocks.matches(names, SIZE), "y" in blocks) == ({}, True)
    blocks.lost("x")
    assert "x" not in blocks
    assert not blocks._holders


def test_events_that_cannot_be_understood_are_counted_or_refused() -> None:
    blocks = EngineBlocks()
    told(blocks, "x", [0, 1, 2, 3])
    told(blocks, "x", [4, 5, 6, 7, 8, 9, 10, 11], parent="never told")
    assert (blocks.orphans, blocks.blocks("x")) == (2, 1)
    with pytest.raises(ValueError, match="2 blocks of 4 tokens were told with 7 token ids"):
        blocks.stored("x", ["a", "b"], None, list(range(7)), SIZE)
    with pytest.raises(ValueError, match="x told of blocks of 4 tokens and now of 8"):
        blocks.stored("x", ["a"], None, list(range(8)), 8)


def test_salts_keep_blocks_apart_and_copies_are_counted() -> None:
    blocks, ids = EngineBlocks(), [1, 2, 3, 4]
    told(blocks, "x", ids, salt="secret")
    assert blocks.matches(block_hashes(ids, SIZE), SIZE) == {}
    assert blocks.matches(block_hashes(ids, SIZE, "secret"), SIZE) == {"x": 1}
    blocks.stored("x", ["again"], None, ids, SIZE, "secret")  # the engine computed it twice
    blocks.removed("x", ["x1"])
    assert blocks.matches(block_hashes(ids, SIZE, "secret"), SIZE) == {"x": 1}
    blocks.removed("x", ["again"])
    assert not blocks._holders


@given(st.lists(st.tuples(st.sampled_from("srcl"), st.sampled_from("xy"), st.integers(0, 6)), max_size=60))
def test_the_index_holds_what_the_events_leave(events: list[tuple[str, str, int]]) -> None:
    """Against a plain set for each engine; a chain is told from its start."""
    blocks, ids = EngineBlocks(), list(range(28))
    names, there = block_hashes(ids, SIZE), {"x": set[int](), "y": set[int]()}
    for kind, name, n in events:
        if kind == "s":
            told(blocks, name, ids[: SIZE * n])
            there[name] |= set(range(n))
        elif kind == "r":
            blocks.removed(name, [f"{name}{SIZE * n}"])
            there[name].discard(n)
        else:
            (blocks.cleared if kind == "c" else blocks.lost)(name)
            there[name].clear()
    depths = {name: next(d for d in range(9) if d not in held) for name, held in there.items()}
    assert blocks.matches(names, SIZE) == {name: depth for name, depth in depths.items() if depth}
    assert sum(map(len, blocks._holders.values())) == sum(map(len, there.values()))


def test_text_is_translated_in_proportion_and_its_memory_is_bounded() -> None:
    texts, ids = TokenBlocks(SIZE, most=5), list(range(40))
    names = block_hashes(ids, SIZE)
    texts.learn((1, 2), ids, text_bytes=1600, block_bytes=512)  # 40 bytes a token: 12.8 tokens a text block
    assert texts.known((1, 2)) == (2, names[:6])
    assert texts.known((1, 7)) == (1, names[:3])
    assert texts.known((7, 2)) == (0, [])
    for n in range(10):
        texts.learn((100 + n,), ids, 1600, 512)
    assert len(texts) == 5


def indexed() -> tuple[PrefixIndex, RouteView, list[int]]:
    """An index of engines x, which tells, and y, which does not; and a prompt of three text blocks, 96 tokens."""
    index, ids = PrefixIndex(1_000_000), list(range(96))
    r = RouteView("r", "interactive", 96, (1, 2, 3), 32)
    told(index, "x", [900, 901, 902, 903])
    index.sent(r, "x", None)
    index.sent(r, "y", None)
    return index, r, ids


def test_the_index_says_which_engines_it_knows_exactly() -> None:
    index, r, ids = indexed()
    assert (index.mode("x"), index.mode("y"), index.untranslated(r)) == ("exact", "estimated", True)
    assert index.held(r) == ({"x": 96, "y": 96}, frozenset())  # what the text means is not known yet
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    assert not index.untranslated(r)
    assert index.held(r) == ({"y": 96}, frozenset({"x"}))  # x never stored it
    told(index, "x", ids[:64])
    assert index.held(r).tokens == {"x": 64, "y": 96}
    index.removed("x", ["x60"])
    assert index.held(r).tokens == {"x": 60, "y": 96}
    longer = r._replace(prompt_tokens=128, blocks=(1, 2, 3, 4))
    assert index.untranslated(longer)
    index.cleared("x")
    assert index.held(longer) == ({"y": 96}, frozenset({"x"}))


def test_beyond_what_is_translated_an_exact_engine_is_estimated() -> None:
    index, r, ids = indexed()
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    told(index, "x", ids)
    longer = r._replace(prompt_tokens=160, blocks=(1, 2, 3, 4, 5))
    assert index.held(longer).tokens == {"x": 96, "y": 96}
    index.sent(longer, "x", None)
    assert index.held(longer).tokens == {"x": 160, "y": 96}


@pytest.mark.parametrize("lose", [PrefixIndex.lost, PrefixIndex.forget])
def test_an_engine_whose_events_are_lost_is_estimated_again(lose: Callable[[PrefixIndex, str], None]) -> None:
    index, r, ids = indexed()
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    lose(index, "x")
    assert index.mode("x") == "estimated"
    assert ("x" in index.held(r).tokens) == (lose is PrefixIndex.lost)


def test_another_block_size_is_estimated() -> None:
    index, r, ids = indexed()
    index.stored("z", ["z"], None, list(range(8)), 8)
    index.sent(r, "z", None)
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    assert index.mode("z") == "estimated"
    assert index.held(r).tokens["z"] == 96


def test_a_size_that_nobody_tells_any_more_makes_way_for_another() -> None:
    """An engine that began anew with larger blocks is known exactly again, whoever noticed that it ended."""
    index, r, ids = indexed()
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    index.cleared("x")
    index.stored("x", range(12), None, ids, 8)
    assert index.mode("x") == "exact"
    assert index.untranslated(r)
    index.tokenised(r, ids, 3 * BLOCK_BYTES)
    assert index.held(r) == ({"x": 96, "y": 96}, frozenset({"x"}))
    index.lost("x")
    index.stored("z", range(6), None, ids, 16)
    assert index.mode("z") == "exact"


def test_a_choice_says_how_each_candidate_is_known_and_exact_knowledge_decides() -> None:
    chooser, there, ids = route("joint"), replicas(2), list(range(96))
    r = request(96, (1, 2, 3))._replace(block_tokens=32)
    first = chooser.choose(r, there, 0.0).replica
    other = there[1] if first is there[0] else there[0]
    told(chooser.prefixes, first.name, [900, 901, 902, 903])
    told(chooser.prefixes, other.name, ids)
    chooser.prefixes.tokenised(r, ids, 3 * BLOCK_BYTES)
    choice = chooser.choose(r, there, 0.0)
    assert (choice.replica, choice.cached_tokens) == (other, 96)
    assert {c.known for c in choice.candidates} == {"exact"}
    chooser.forget(other.name)
    assert {c.name: c.known for c in chooser.choose(r, there, 0.0).candidates} == {
        first.name: "exact",
        other.name: "estimated",
    }


def test_long_salts_are_not_remembered() -> None:
    """They are the clients', and must not fill the memory; their prompts are named as others are."""
    long = "s" * (blocks_of_text.LONGEST_REMEMBERED + 1)
    before = blocks_of_text._remembered.cache_info()
    one, two = (text_blocks([b"x" * BLOCK_BYTES], long) for _ in range(2))
    assert one == two != text_blocks([b"x" * BLOCK_BYTES], long + "s")
    assert blocks_of_text._remembered.cache_info() == before
