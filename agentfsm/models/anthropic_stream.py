"""The messages wire, streamed: events fold into the message that a whole answer would be.

(https://docs.anthropic.com/en/api/messages-streaming; event and delta types that are not known here are to
be passed over, as it says.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.streaming import CallPiece, Piece, ReasoningPiece, TextPiece
from agentfsm.models.assembly import Letters
from agentfsm.models.wire import as_list, as_object, text_of

__all__ = ["MessageAssembly"]

_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The deltas that add to a text, and where they keep it."""


@dataclass(slots=True)
class _Block:
    start: dict[str, Any]
    place: int
    texts: dict[str, Letters] = field(default_factory=dict[str, Letters])
    citations: list[object] = field(default_factory=list[object])

    def body(self) -> dict[str, Any]:
        block = dict(self.start)
        for key, letters in self.texts.items():
            if key == "partial_json":  # gateways send the whole input at the start, and then an empty piece
                block["input"] = str(letters) or block.get("input")
            else:
                block[key] = text_of(block.get(key)) + str(letters)
        if self.citations:
            block["citations"] = [*as_list(block.get("citations")), *self.citations]
        return block


class MessageAssembly:
    """Folds a message's events into the message.

    Attributes:
        closed: Whether ``message_stop`` came. Gateways leave it out behind a stop reason
            (https://github.com/esengine/DeepSeek-Reasonix/pull/8756), so a stream is whole with that.
    """

    def __init__(self) -> None:
        self.closed = False
        self._top: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        self._of_index: dict[object, _Block] = {}
        self._calls = 0

    @property
    def whole(self) -> bool:
        """Whether the stop reason came."""
        return bool(self._top.get("stop_reason"))

    def add(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Fold an event in."""
        match event.get("type"):
            case "message_start":
                message = as_object(event.get("message"))
                self._take(message)
                for block in map(as_object, as_list(message.get("content"))):
                    yield from self._begin(None, block)
            case "content_block_start":
                yield from self._begin(event.get("index"), as_object(event.get("content_block")))
            case "content_block_delta":
                yield from self._delta(event.get("index"), as_object(event.get("delta")))
            case "message_delta":
                self._take(as_object(event.get("delta")) | {"usage": event.get("usage")})
            case "message_stop":
                self.closed = True
            case _:  # ping, content_block_stop, and what is yet to come
                pass

    def body(self) -> object:
        """The message."""
        return self._top | {"content": [block.body() for block in self._blocks], "usage": self._usage}

    def _take(self, message: dict[str, Any]) -> None:
        """What stands at the top of a message; counts of later events are of all so far, and win."""
        self._usage |= {k: v for k, v in as_object(message.get("usage")).items() if v is not None}
        self._top |= {k: v for k, v in message.items() if k not in ("usage", "content") and v is not None}

    def _begin(self, index: object, start: dict[str, Any]) -> Iterator[Piece]:
        block = _Block(start, self._calls)
        self._blocks.append(block)
        if isinstance(index, int):
            self._of_index[index] = block
        if start.get("type") == "tool_use":
            self._calls += 1
            yield CallPiece(block.place, text_of(start.get("name")), "")
        elif text := text_of(start.get("text")):
            yield TextPiece(text)

    def _delta(self, index: object, delta: dict[str, Any]) -> Iterator[Piece]:
        block = self._of_index.get(index) if isinstance(index, int) else None
        if block is None and self._blocks and not isinstance(index, int):
            block = self._blocks[-1]
        if block is None:
            block = _Block({"type": "text", "text": ""}, self._calls)  # a gateway that begins no blocks
            self._blocks.append(block)
            if isinstance(index, int):
                self._of_index[index] = block
        kind = text_of(delta.get("type"))
        if kind == "citations_delta":
            block.citations.append(delta.get("citation"))
        key = _TEXTS.get(kind)
        if key is None:
            return
        shown = block.texts.setdefault(key, Letters()).add(delta.get(key))
        if not shown:
            return
        if key == "text":
            yield TextPiece(shown)
        elif key == "thinking":
            yield ReasoningPiece(shown)
        elif key == "partial_json" and block.start.get("type") == "tool_use":
            yield CallPiece(block.place, text_of(block.start.get("name")), shown)
