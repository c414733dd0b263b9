"""Sends the pieces of a streamed reply as events, each with what others than the program may see of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.events import Event, ReasoningDelta, ReplyRestarted, TextDelta, ToolCallDelta
from agentfsm.loop.model import KeepAlive, ReasoningChunk, StreamChunk, StreamRestart, TextChunk, ToolCallChunk
from agentfsm.loop.secret_pieces import PieceFilter
from agentfsm.runtime.context import Context

__all__ = ["PieceSender"]


@dataclass(slots=True)
class _Piece:
    """An event that is to be sent.

    Attributes:
        event: Its class.
        fields: Its fields.
        text: The text in it, as the program sees it.
        shown: What others may see of it; None if that is not decided.
    """

    event: type[Event]
    fields: dict[str, Any]
    text: str = ""
    shown: str | None = None


@dataclass(slots=True)
class _Channel:
    """A text that comes in pieces: what withholds its secrets, and its pieces that wait."""

    waiting: deque[_Piece] = field(default_factory=deque[_Piece])
    filter: PieceFilter = field(init=False)

    def receive(self, shown: str) -> None:
        self.waiting.popleft().shown = shown


class PieceSender:
    """Sends the pieces of one reply, in order.

    A piece that ends in what may be the beginning of a secret, and all pieces after it, wait for the next ones.

    Args:
        context: The run.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channels: dict[object, _Channel] = {}
        self._pieces: deque[_Piece] = deque()

    def send(self, chunk: StreamChunk) -> None:
        """Send a chunk as an event."""
        match chunk:
            case TextChunk(text):
                self._add("text", _Piece(TextDelta, {}, text, "" if self._context.config.hides_text else None))
            case ReasoningChunk(text):
                self._add("reasoning", _Piece(ReasoningDelta, {}, text))
            case ToolCallChunk(index, name, arguments):
                self._add(index, _Piece(ToolCallDelta, {"index": index, "name": name}, arguments))
            case StreamRestart(reason):
                self.finish()
                self._context.emit(ReplyRestarted, reason=reason)
            case KeepAlive():
                pass

    def finish(self) -> None:
        """Send what has waited: the reply is complete, or starts again."""
        for channel in self._channels.values():
            channel.filter.finish()
        self._flush()

    def _add(self, name: object, piece: _Piece) -> None:
        self._pieces.append(piece)
        if piece.shown is None:
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = _Channel()
                channel.filter = self._context.secrets.filter_pieces(channel.receive)
            channel.waiting.append(piece)
            channel.filter.add(piece.text)
        self._flush()

    def _flush(self) -> None:
        while self._pieces and self._pieces[0].shown is not None:
            piece = self._pieces.popleft()
            name = "arguments" if piece.event is ToolCallDelta else "text"
            shown = None if piece.shown == piece.text else piece.shown
            self._context.emit(piece.event, **{name: piece.text}, **piece.fields, shown=shown)
