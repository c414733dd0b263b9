"""The port to a model that tells its reply piece by piece: the pieces, and the ``StreamingModel`` protocol.

Pieces are for people who watch. What a run goes by is the one whole ``Reply`` at the end, and a stream
without it is a failed call: half a reply is never taken for a whole one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from agentfsm.core.messages import Reply
from agentfsm.core.model import Model, ModelRequest

__all__ = [
    "CallPiece",
    "Piece",
    "Pulse",
    "ReasoningPiece",
    "Restart",
    "StreamingModel",
    "TextPiece",
    "can_stream",
]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thinks, where its provider shows that."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a tool call.

    Attributes:
        place: Which call of the reply, from 0.
        name: The tool; known from a call's first piece on, as a rule.
        arguments: More of the JSON text of its arguments.
    """

    place: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life with nothing to show: bytes came, and none of them were the reply's."""


@dataclass(frozen=True, slots=True)
class Restart:
    """What was told so far is void, and the reply begins anew (another model took over).

    Attributes:
        why: What happened, for people.
    """

    why: str


Piece = TextPiece | ReasoningPiece | CallPiece | Pulse | Restart
"""Any of them."""


class StreamingModel(Model, Protocol):
    """A model that can also tell its reply piece by piece."""

    def stream(self, request: ModelRequest) -> AsyncIterator[Piece | Reply]:
        """Answer one request: any number of pieces, then the one whole reply that ``reply`` would give.

        Silence longer than ``request.heartbeat_s`` between two pieces counts as a dropped connection; a
        model that has nothing to show for so long sends a ``Pulse``. Who stops early closes the iterator
        (``aclose``, where it has one).

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        ...


def can_stream(model: Model) -> TypeGuard[StreamingModel]:
    """Whether a model tells its reply piece by piece."""
    return callable(getattr(model, "stream", None))
