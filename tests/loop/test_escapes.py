"""Texts are read as decoders read them, and what is found there is found again in the text itself."""

from __future__ import annotations

import base64
import html
import json
import re
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.loop.escapes import Reading, has_escapes, read_plain
from agentfsm.loop.keys import Keyring
from agentfsm.loop.withholding import SecretOpener, Withholder


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"h\u0075nter", "hunter"),
        (r"\\u0068unter", "hunter"),
        (r"\x68unter", "hunter"),
        (r"a\/b", "a/b"),
        ("%68unter", "hunter"),
        ("%2568unter", "hunter"),
        ("%c3%bc", "ü"),
        ("a&amp;b&lt;c&#39;d&#x27;e&amp;lt;f", "a&b<c'd'e<f"),
        (r"\ud83d\ude00", "\U0001f600"),
        ("100 % sure, a && b", "100 % sure, a && b"),
    ],
)
def test_what_a_decoder_reads(text: str, plain: str) -> None:
    assert read_plain(text) == plain.encode()
    assert has_escapes(text) == (text != plain)


@pytest.mark.parametrize("width", [64, 76])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("before", range(0, 120, 7))
def test_a_secret_in_base64_that_is_wrapped_in_lines_is_withheld_and_comes_back(
    before: int, end: str, width: int
) -> None:
    secret = "cn-3f9ab77d0e12c4"
    encoded = base64.b64encode(b"x" * before + secret.encode() + b"y" * 90).decode()
    text = f"file:{end}" + end.join(encoded[at : at + width] for at in range(0, len(encoded), width)) + f"{end}done"
    keyring = Keyring(b"of the tests")
    withholder = Withholder(keyring.current, [secret])
    for written in (text, json.dumps({"a": text})):
        assert withholder.may_occur(written)
    cleaned = withholder.clean_text(text)
    for part in re.split(r"\[sealed [^]]+\]", cleaned.removeprefix("file:").removesuffix("done")):
        letters = "".join(part.split())
        for at in range(4):  # wherever a group of four letters begins
            left = base64.b64decode(letters[at:][: (len(letters) - at) // 4 * 4])
            assert not any(secret[n : n + 5].encode() in left for n in range(len(secret) - 4))
    assert SecretOpener(keyring).open(cleaned) == text


def test_lines_of_an_ordinary_text_are_not_joined() -> None:
    text = "one two three\n" * 20 + "a" * 59 + "\n" + "b" * 20 + "\n"
    assert not has_escapes(text)
    assert read_plain(text) == text.encode()


def hidden(text: str, ways: list[int]) -> str:
    """A text with each character written in one of several ways that decoders understand."""
    written = ""
    for char, way in zip(text, ways, strict=True):
        code = f"{ord(char):04x}"
        written += [char, f"\\u{code}", f"\\\\u{code}", quote(char, safe=""), f"&#{ord(char)};", f"&#x{code};"][way]
    return written


@given(st.text("abcXYZ019./-_ü€", min_size=1, max_size=12), st.data())
def test_whatever_way_each_character_is_written_it_is_found_where_it_stands(word: str, data: st.DataObject) -> None:
    written = hidden(word, data.draw(st.lists(st.integers(0, 5), min_size=len(word), max_size=len(word))))
    text = f"<{written}>"
    reading = Reading(text)
    start = reading.plain.index(word.encode())
    found = reading.span(start, start + len(word.encode()))
    assert text[slice(*found)] == written


@given(st.text(st.characters(exclude_characters="\\%&", exclude_categories=["Cs"])))
def test_three_decoders_agree(word: str) -> None:
    assert read_plain(word).decode() == word
    assert read_plain(json.dumps(word)[1:-1]).decode() == json.loads(json.dumps(word))
    assert read_plain(quote(word)).decode() == unquote(quote(word))
    assert read_plain(html.escape(word)).decode() == html.unescape(html.escape(word))
