"""Text of others is shown so that nothing in it is markup, is hidden, or reorders what is read."""

from __future__ import annotations

import unicodedata

import pytest

from agentfsm.report.visible_text import clip, code_span, escape, format_time, visible
from tests.helpers.hostile_texts import HOSTILE_TEXTS


def test_what_can_be_seen_stays_as_it_is() -> None:
    for text in ("plain, with\ttab and\nline", "naïve 漢字 עברית العربية", "👩‍👩‍👧 ✓ é e\u0301", ""):
        assert visible(text) == text


def test_what_cannot_be_seen_is_shown_by_its_code() -> None:
    assert visible("a\x1b[31mb") == "a⟨U+001B⟩[31mb"
    assert visible("pay \u202e001") == "pay ⟨U+202E⟩001"
    assert visible("\u200b\ufeff\ud800\x85\u2028") == "⟨U+200B⟩⟨U+FEFF⟩⟨U+D800⟩⟨U+0085⟩⟨U+2028⟩"
    assert visible("\U000e0041") == "⟨U+E0041⟩"


def test_a_pile_of_combining_characters_is_cut() -> None:
    shown = visible("Z" + "\u0351" * 40)
    assert shown.startswith("Z" + "\u0351" * 4 + "⟨U+0351⟩")
    assert sum(unicodedata.combining(char) > 0 for char in shown) == 4


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_no_hostile_text_keeps_markup_or_hidden_characters(text: str) -> None:
    shown = escape(text)
    assert not set(shown) & set("<>\"'")
    shown.encode()
    hidden = [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]
    assert hidden == []


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_a_code_span_holds_all_of_its_text(text: str) -> None:
    span = code_span(text)
    fence = span[: len(span) - len(span.lstrip("`"))]
    inside = span[len(fence) : -len(fence)]
    assert span.endswith(fence)
    assert "\n" not in span
    assert fence not in {run for run in inside.replace("\\|", "").split(" ") if set(run) == {"`"}}
    assert "|" not in inside.replace("\\|", "")
    assert " ".join(inside.replace("\\|", "|").split()) == " ".join(visible(text).split())


def test_a_clipped_text_is_one_line_that_says_so() -> None:
    assert clip("one\ntwo", 20) == "one two"
    assert clip("one two three", 8) == "one two…"
    assert len(clip("x" * 20_000, 160)) == 160
    assert clip("\n" * 2_000 + "x", 10).endswith("…")


def test_times_are_in_utc_and_no_number_breaks_them() -> None:
    assert format_time(0) == "1970-01-01 00:00:00 UTC"
    assert format_time(1e300) == "1e+300 s"
