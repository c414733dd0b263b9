"""Text of models and tools made safe for a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.cli.console import sanitize, shorten


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, grüße, 漢字 and 🙂", "plain, grüße, 漢字 and 🙂"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("back\x08space\rreturn\x7f\x9b", r"back\x08space\rreturn\x7f\x9b"),
        ("allow \u202eynolp\u202c", r"allow \u202eynolp\u202c"),
        ("half \ud83d", r"half \ud83d"),
        ("ex\u200bample\u00ad.org\ufeff\u2060", r"ex\u200bample\xad.org\ufeff\u2060"),
        ("a\u2028b\u2029c \U000e0041", r"a\u2028b\u2029c \U000e0041"),
        ("x\u200cy 👩\u200d🔬", "x\u200cy 👩\u200d🔬"),
    ],
)
def test_control_characters_are_shown_as_their_codes(text: str, shown: str) -> None:
    assert sanitize(text) == shown


@given(st.text(st.characters(codec=None)))
def test_sanitized_text_is_harmless_and_can_be_encoded(text: str) -> None:
    shown = sanitize(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    shown.encode()


def test_shorten_returns_one_line_of_limited_length() -> None:
    assert shorten("a\n  b\tc") == "a b c"
    assert shorten("x" * 50, 10) == "x" * 9 + "…"
    assert shorten(12) == "12"
