"""Stop strings against the slow obvious reference: cut the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from nanoserve.stopping import StopStrings

LETTERS = st.text(alphabet="ab", max_size=12)


def cut(text, stops):
    hits = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(hits)] if hits else text


@given(pieces=st.lists(LETTERS, max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_cut_text(pieces, stops):
    stopping = StopStrings(tuple(stops))
    shown = "".join([*map(stopping.push, pieces), stopping.flush()])
    whole = "".join(pieces)
    if not stopping.was_hit:
        assert shown == whole == cut(whole, stops)
    else:
        seen = next(
            "".join(pieces[: i + 1])
            for i in range(len(pieces))
            if cut("".join(pieces[: i + 1]), stops) != "".join(pieces[: i + 1])
        )
        assert shown == cut(seen, stops)


def test_only_what_may_become_a_stop_string_is_held_back():
    stopping = StopStrings(("###",))
    assert [stopping.push(piece) for piece in ("a", "#", "#", "b", "##")] == ["a", "", "", "##b", ""]
    assert stopping.flush() == "##"
