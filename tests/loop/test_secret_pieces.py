"""A secret is withheld from a text that comes in pieces, wherever the pieces begin and end."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.loop.keys import Keyring
from agentfsm.loop.withholding import Withholder

MASK = "[withheld]"
SECRET = "tr0ub4dor/3&Zq<9"
RING = Keyring(b"the host's secret")


def shown(pieces: list[str], *secrets: str, finish: bool = True) -> list[str]:
    told: list[str] = []
    pieced = Withholder(RING.current, secrets).with_mask(MASK).filter_pieces(told.append)
    for piece in pieces:
        pieced.add(piece)
    if finish:
        pieced.finish()
        assert len(told) == len(pieces)
        assert not pieced.waits
    return told


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def test_a_secret_over_two_pieces_is_withheld() -> None:
    assert shown(["it is tr0ub4d", "or/3&Zq<9, yes"], SECRET) == [f"it is {MASK}", ", yes"]


def test_a_piece_that_ends_in_no_beginning_of_a_secret_does_not_wait() -> None:
    assert shown(["it is ", "nothing", " at"], SECRET, finish=False) == ["it is ", "nothing", " at"]
    assert shown(["it is ", "tr0ub", "le"], SECRET, finish=False) == ["it is ", "tr0ub", "le"]


def test_a_piece_waits_until_it_is_decided_and_no_longer() -> None:
    assert shown(["it is tr0ub"], SECRET, finish=False) == []
    assert shown(["it is tr0ub", "4"], SECRET, finish=False) == []
    assert shown(["it is tr0ub", "4x"], SECRET, finish=False) == ["it is tr0ub", "4x"]
    assert shown(["it is tr0ub"], SECRET) == ["it is tr0ub"]


def test_of_a_secret_in_single_characters_at_most_three_are_shown_and_of_a_short_one_fewer() -> None:
    assert "".join(shown(list(f"<{SECRET}>"), SECRET)) == f"<tr0{MASK}>"
    assert "".join(shown(list("<k3y-0f-1>"), "k3y-0f-1")) == f"<k{MASK}>"
    assert "".join(shown(list("<9941>"), "9941")) == f"<{MASK}>"


def test_a_short_secret_is_withheld_where_it_stands_alone() -> None:
    assert "".join(shown(list("a 12, 123 and 12"), "12")) == f"a {MASK}, 123 and {MASK}"


def test_the_longer_of_two_secrets_counts() -> None:
    assert "".join(shown(["abcdefgh", "ijkl"], "abcdefgh", "abcdefghijkl")) == MASK


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(SECRET),
        r"\u0074\u0072\u0030ub4dor\/3&Zq<9",
        r"\\u0074r0ub4dor\\/3\\u0026Zq<9",
        "tr0ub4dor%2f3%26Zq%3c9",
        "tr0ub4dor/3&amp;Zq&lt;9",
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=40))
def test_however_a_secret_is_written_and_cut_most_of_it_is_withheld(written: str, cuts: list[int]) -> None:
    text = "".join(shown(split(f"it is {written} indeed", cuts), SECRET))
    assert MASK in text
    assert "ub4dor" not in text
    assert "Zq" not in text
    assert text.startswith("it is ")
    assert text.endswith(" indeed")


@given(st.text("abc /\\%&u0;", max_size=40), st.lists(st.integers(0, 60), max_size=20))
def test_a_text_without_secrets_stays_as_it_is_in_every_piece(text: str, cuts: list[int]) -> None:
    pieces = split(text, cuts)
    assert shown(pieces, SECRET) == pieces


@given(
    st.lists(st.sampled_from(["xk3y", "xk3yxk3yab", "ab", " ", "k3y", "x", "-"]), max_size=12),
    st.lists(st.integers(0, 60), max_size=20),
)
def test_no_whole_secret_is_shown_whatever_is_around_it(words: list[str], cuts: list[int]) -> None:
    secrets = ["xk3yxk3yab", "k3yxk3y-"]
    text = "".join(shown(split("".join(words), cuts), *secrets))
    assert not any(secret in text for secret in secrets)
