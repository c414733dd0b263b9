r"""The forms in which a text may stand in another one: as encoders write it, and as decoders would read it back.

A secret is looked for as encoders usually write it. ``h\u0075nter2``, ``a\/b``, ``%68unter2`` and ``a&amp;b`` have more
escapes of JSON, Python, URLs or HTML than they need, but any decoder reads them, too, and a model may write them. The
same is true of base64 that is wrapped in lines.
"""

from __future__ import annotations

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Iterable

_UNUSUAL = re.compile(r"\\[ux/]|%[0-9A-Fa-f]{2}|&(?:amp|lt|gt|quot|apos|#)")
"""One of these is in every text that hides what it says from a search for the usual forms."""

_WRAPPED = re.compile(r"\n(?:(?<=[A-Za-z0-9+/]{60}\n)|(?<=[A-Za-z0-9+/]{60}\r\n))")
_WRAPPED_IN_JSON = re.compile(r"\\n(?:(?<=[A-Za-z0-9+/]{60}\\n)|(?<=[A-Za-z0-9+/]{60}\\r\\n))")
"""The end of a line of base64, which most encoders make 64 or 76 characters long."""

_ESCAPE = re.compile(
    rb"\n(?<=[A-Za-z0-9+/]{60}\n)|\r\n(?<=[A-Za-z0-9+/]{60}\r\n)"
    rb"|\\n(?<=[A-Za-z0-9+/]{60}\\n)|\\r\\n(?<=[A-Za-z0-9+/]{60}\\r\\n)"
    rb"|\\+u([dD][89abAB][0-9a-fA-F]{2})\\+u([dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|\\+u([0-9a-fA-F]{4})|\\+x([0-9a-fA-F]{2})|\\+(.?)"
    rb"|%(?:25)*([0-9a-fA-F]{2})"
    rb"|&(?:amp;)*(?:#0*([0-9]{1,7})|#[xX]0*([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos));",
    re.DOTALL,
)
_SIMPLE = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}
_ENTITIES = {b"amp": b"&", b"lt": b"<", b"gt": b">", b"quot": b'"', b"apos": b"'"}
_UNFINISHED = re.compile(rb"(?:\\+(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?|%(?:25)*[0-9a-fA-F]?|&[#0-9A-Za-z;]{0,12})\Z")
_LONGEST = 24  # characters of an escape that is not finished


def has_escapes(text: str) -> bool:
    """Whether a text may say something in an unusual form."""
    if _has_signs(text) and (_UNUSUAL.search(text) is not None or _WRAPPED_IN_JSON.search(text) is not None):
        return True
    return "\n" in text and _WRAPPED.search(text) is not None


def _has_signs(text: str) -> bool:
    return "\\" in text or "%" in text or "&" in text


def ends_in_escape(text: str) -> bool:
    """Whether a text may end within an escape."""
    end = text[-_LONGEST:]
    return _has_signs(end) and _UNFINISHED.search(end.encode("utf-8", "surrogatepass")) is not None


def read_plain(text: str) -> bytes:
    """What a text says, in UTF-8, however its characters are escaped and however often."""
    return _ESCAPE.sub(_plain, text.encode("utf-8", "surrogatepass"))


def _plain(found: re.Match[bytes]) -> bytes:
    high, low, unit, byte, other, quoted, decimal, number, entity = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)).encode()
    if byte or quoted:
        return bytes([int(byte or quoted, 16)])
    if entity:
        return _ENTITIES[entity]
    if unit or decimal or number:
        code = int(unit or number, 16) if unit or number else int(decimal)
        return chr(code).encode("utf-8", "surrogatepass") if code <= 0x10FFFF else found[0]
    return b"" if other is None else _SIMPLE.get(other, other)


class Reading:
    """What a text says, with where it says so.

    Attributes:
        plain: What it says, in UTF-8.
    """

    def __init__(self, text: str) -> None:
        self._raw = text.encode("utf-8", "surrogatepass")
        pieces: list[bytes] = []
        self._plain_ends, self._raw_ends = [0], [0]  # of each run without escapes, and of each escape
        done = 0
        for found in _ESCAPE.finditer(self._raw):
            for piece, end in ((self._raw[done : found.start()], found.start()), (_plain(found), found.end())):
                pieces.append(piece)
                self._plain_ends.append(self._plain_ends[-1] + len(piece))
                self._raw_ends.append(end)
            done = found.end()
        pieces.append(self._raw[done:])
        self.plain = b"".join(pieces)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where a part of ``plain`` that is not empty is in the text."""
        return self._in_text(self._raw_place(start, before=True)), self._in_text(self._raw_place(end - 1, before=False))

    @property
    def unfinished(self) -> int | None:
        """Where in ``plain`` an escape begins that the text ends in; None if there is none."""
        found = _UNFINISHED.search(self._raw)
        if found is None:
            return None
        return len(read_plain(self._raw[: found.start()].decode("utf-8", "surrogatepass")))

    def _raw_place(self, place: int, *, before: bool) -> int:
        index = bisect_right(self._plain_ends, place) - 1
        if index % 2:  # an escape: it stands for one character, which begins and ends with it
            return self._raw_ends[index] if before else self._raw_ends[index + 1]
        return self._raw_ends[index] + place - self._plain_ends[index] + (not before)

    def _in_text(self, place: int) -> int:
        return len(self._raw[:place].decode("utf-8", "ignore"))


# -- as encoders write it -----------------------------------------------------------------------------------

MIN_ENCODED_LENGTH = 5
"""Characters that a text must have to be looked for in base16 and base64."""


def text_forms(text: str) -> set[str]:
    """The forms in which a text may stand in another: as it is, escaped, and encoded."""
    plain = {text, text.replace("\n", "\r\n")}
    escaped = _escaped(plain)
    forms = plain | escaped
    for _ in range(2):  # JSON in JSON in JSON, or in what Python prints
        escaped = _escaped(escaped)
        forms |= escaped
    for each in plain | _escaped(plain):
        forms |= {_quote(each, ""), _quote(each, "/"), _quote(each, " ").replace(" ", "+")}
        if len(text) >= MIN_ENCODED_LENGTH:
            forms |= _as_digits(each.encode("utf-8", "surrogatepass"))
    return {form for form in forms if form}


def _escaped(texts: Iterable[str]) -> set[str]:
    """Texts as they stand in JSON and in what Python prints, which escapes one kind of quotes or none."""
    found: set[str] = set()
    for text in texts:
        printed = repr(text + '"')[1:-2]  # with a double quote in it, repr() uses single ones
        found |= {
            json.dumps(text)[1:-1],
            json.dumps(text, ensure_ascii=False)[1:-1],
            printed,
            printed.replace("\\'", "'"),
        }
    return found


def _as_digits(data: bytes) -> set[str]:
    """Data in base16, and in base64 wherever it begins in three bytes."""
    return {data.hex(), data.hex().upper()} | _base64_of(data)


def base64_forms(text: str) -> set[str]:
    """A text in base64, wherever it begins in three bytes."""
    return _base64_of(text.encode("utf-8", "surrogatepass"))


def _base64_of(data: bytes) -> set[str]:
    forms: set[str] = set()
    for shift, skipped in ((0, 0), (1, 2), (2, 3)):
        shifted = bytes(shift) + data
        whole = len(shifted) * 8 // 6
        forms |= {encoder(shifted).decode()[skipped:whole] for encoder in (base64.b64encode, base64.urlsafe_b64encode)}
    return forms


_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")  # RFC 3986, 2.3


def _quote(text: str, safe: str) -> str:
    """A text as it is written in a URL; ``urllib`` is for code that does I/O."""
    kept = _UNRESERVED | frozenset(safe)
    return "".join(
        char if char in kept else "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        for char in text
    )
