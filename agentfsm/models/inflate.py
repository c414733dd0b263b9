"""Unpacks a compressed answer a little at a time, so that a small one that grows huge never fills the memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

__all__ = ["ACCEPTED", "Inflate"]

ACCEPTED = "gzip, deflate"
"""What a request says it takes; other packings need other packages, and give no way to stop in time."""

_SLICE = 64 * 1024

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Inflate:
    """Unpacks one answer.

    Args:
        encoding: The answer's ``content-encoding``.

    Raises:
        ValueError: It is packed in a way that was not asked for.
    """

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", *_WINDOWS):
            raise ValueError("compressed in a way that was not asked for")
        self._packed = name in _WINDOWS
        self._name = name
        self._engine = zlib.decompressobj(_WINDOWS.get(name, 31))
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The bytes that these stand for, at most 64 KiB at a time.

        Raises:
            ValueError: They are not what the answer says they are.
        """
        if not self._packed:
            yield chunk
            return
        while chunk and not self._engine.eof:
            try:
                plain = self._engine.decompress(chunk, _SLICE)
            except zlib.error:
                if self._begun or self._name != "deflate":
                    raise ValueError("compressed and cannot be unpacked") from None
                self._begun = True  # "deflate" is zlib by the book (RFC 9110, 8.4.1.2), and bare from some servers
                self._engine = zlib.decompressobj(-15)
                continue
            self._begun = True
            chunk = self._engine.unconsumed_tail
            if plain:
                yield plain
