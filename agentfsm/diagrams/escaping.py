"""Escape text and identifiers for the output formats (XML, DOT, ASCII-only languages)."""

from __future__ import annotations

import re

__all__ = ["ascii_identifier", "escape_xml", "quote_dot"]

_INVALID_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape_xml(text: str) -> str:
    """Text as XML holds it, in an element or an attribute."""
    text = _INVALID_XML.sub("\ufffd", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def quote_dot(text: str) -> str:
    """Text as DOT holds it, with its quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def ascii_identifier(name: str) -> str:
    """A name with letters outside ASCII written as numbers, for languages that know no others."""
    return "".join(char if char.isascii() else f"_{ord(char):x}" for char in name)
