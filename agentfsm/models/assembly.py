"""What a stream's events add up to: the body that the whole answer would have had, and pieces on the way.

A wire folds its events into that body and reads it with the ``decode`` that reads whole answers, so a
streamed reply equals the whole one because there is one reader, not two. Every fold costs time linear in
what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from agentfsm.core.streaming import Piece

__all__ = ["Assembly", "Letters"]


class Assembly(Protocol):
    """Folds a stream's events into the body of a whole answer.

    Attributes:
        closed: Whether the stream has said its last word; what follows is not read.
    """

    closed: bool

    def add(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Fold one event in, and say what of it people may see."""
        ...

    @property
    def whole(self) -> bool:
        """Whether nothing of the reply is missing, should the stream end here."""
        ...

    def body(self) -> object:
        """The body of the whole answer, as ``decode`` takes it."""
        ...


_BLOCK = 500
"""How many pieces of a text become one."""


class Letters:
    """A text that comes in pieces, each of which may be cut inside a letter.

    Servers that count in UTF-16 cut letters outside the basic plane (most emoji) in two. In the whole text
    the halves meet again; what is shown on the way waits for the second.

    Attributes:
        last: The last piece.
    """

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._pieces: list[str] = []
        self._held = ""
        self.last = ""

    def add(self, piece: object) -> str:
        """Add a piece; gives what may be shown now. Anything but a text adds nothing."""
        if not isinstance(piece, str) or not piece:
            return ""
        self.last = piece
        self._pieces.append(piece)
        if len(self._pieces) == _BLOCK:  # a short text of its own takes ten times its letters
            self._blocks.append("".join(self._pieces))
            self._pieces.clear()
        if piece.isascii() and not self._held:
            return piece
        shown, self._held = self._held + piece, ""
        if "\ud800" <= shown[-1] <= "\udbff":
            shown, self._held = shown[:-1], shown[-1]
        return shown.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def __bool__(self) -> bool:
        return bool(self.last)

    def __str__(self) -> str:
        return "".join((*self._blocks, *self._pieces))
