"""Stop strings: what is shown does not depend on how the text was cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.stops import StopStrings

# Few letters, so that stop strings overlap, repeat and begin within each other.
letters = st.text(alphabet="abé", max_size=24)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The slow twin: the shortest beginning that ends with a stop string, without the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    borders = sorted(draw(st.sets(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@given(pieces(), stop_lists)
def test_shown_text_equals_the_naive_cut_of_the_full_text(texts: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = "".join(stream.feed(text) for text in texts)
    shown += stream.flush()
    assert (shown, stream.found) == cut("".join(texts), stops)


@given(pieces(), stop_lists)
def test_nothing_shown_could_be_the_beginning_of_a_stop_string(texts: list[str], stops: list[str]) -> None:
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    stream = StopStrings(stops)
    shown = fed = ""
    for text in texts:
        fed += text
        shown += stream.feed(text)
        if stream.found:
            break
        possible = [b for b in beginnings if fed.endswith(b)]
        assert len(fed) - len(shown) >= max(map(len, possible), default=0)


@given(pieces(), stop_lists)
def test_no_more_is_held_back_than_a_stop_string_could_need(texts: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = fed = ""
    for text in texts:
        fed += text
        shown += stream.feed(text)
        if stream.found:
            break
        held = fed[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_stop_string_that_is_complete_first_wins_and_of_those_the_longest() -> None:
    stream = StopStrings(["abc", "b"])
    assert stream.feed("xab") == "xa"
    assert stream.found
    stream = StopStrings(["b", "ab"])
    assert stream.feed("xa") == "x"
    assert stream.feed("b") == ""
    assert stream.found


def test_what_looked_like_a_stop_string_is_shown_when_the_text_ends() -> None:
    stream = StopStrings(["END."])
    assert stream.feed("the EN") == "the "
    assert stream.feed("D") == ""
    assert stream.flush() == "END"
    assert not stream.found
