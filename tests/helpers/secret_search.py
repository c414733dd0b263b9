"""Searches files for secrets: as they are, and in every form that can be decoded or decompressed without a key."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

__all__ = ["forms", "found_in"]

_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{12,}")
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){6,}")
_ESCAPED = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_SIMPLE = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}


def unescape(data: bytes) -> bytes:
    def plain(found: re.Match[bytes]) -> bytes:
        text = found[0][1:]
        if text[:1] in b"ux" and len(text) > 1:
            return chr(int(text[1:], 16)).encode("utf-8", "surrogatepass")
        return _SIMPLE.get(text, text)

    return _ESCAPED.sub(plain, data)


def from_base64(word: bytes) -> bytes:
    word = word if len(word) % 4 != 1 else word[:-1]
    return base64.b64decode(word + b"=" * (-len(word) % 4))


def decoded(data: bytes) -> Iterator[bytes]:
    """What data may stand for: unescaped, without URL quoting, decoded from base64 and hex, decompressed."""
    if b"\\" in data:
        yield unescape(data)
    if b"%" in data or b"+" in data:
        yield unquote_to_bytes(data)
        yield unquote_to_bytes(data.replace(b"+", b" "))
    words = {found[0].translate(bytes.maketrans(b"-_", b"+/")) for found in _BASE64.finditer(data)}
    pieces = [from_base64(word[at:]) for word in words for at in range(4)]
    if pieces:
        yield b"\0".join(pieces)
    if digits := [binascii.unhexlify(found[0]) for found in _HEX.finditer(data)]:
        yield b"\0".join(digits)
    for at in (found.start() for found in re.finditer(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]", data)):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj(47).decompress(data[at:])  # 47: gzip or zlib, by its header


def forms(data: bytes, depth: int = 3) -> Iterator[bytes]:
    """Data, and whatever it may stand for."""
    yield data
    if depth:
        for each in decoded(data):
            if each != data:
                yield from forms(each, depth - 1)


def found_in(files: Iterable[Path], search_for: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Which of the secrets are in which of the files; each secret is given as all that must not be found."""
    found: list[str] = []
    for file in files:
        hits = {
            place
            for data in forms(file.read_bytes())
            for place, all_of in search_for.items()
            if any(n in data for n in all_of)
        }
        found += [f"{place!r} in {file.name}" for place in sorted(hits)]
    return found
