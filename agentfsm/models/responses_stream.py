"""The responses wire, streamed: events fold into the response that a whole answer would be.

The last event brings the whole response. Some servers leave its output empty, or out
(https://github.com/QuantumNous/new-api/issues/4362); then it is made of the items that came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.streaming import CallPiece, Piece, ReasoningPiece, TextPiece
from agentfsm.models.assembly import Letters
from agentfsm.models.wire import as_list, as_object, text_of

__all__ = ["ResponseAssembly"]

_LAST = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
    "response.cancelled": "cancelled",
    "response.done": "completed",
}
"""The events that end a response, and the status that each stands for."""


@dataclass(slots=True)
class _Item:
    """An output item, as far as it has come."""

    start: dict[str, Any]
    place: int = 0
    text: Letters = field(default_factory=Letters)
    refusal: Letters = field(default_factory=Letters)
    arguments: Letters = field(default_factory=Letters)
    thought: Letters = field(default_factory=Letters)
    done: bool = False

    def body(self) -> dict[str, Any]:
        if self.done:
            return self.start
        if self.start.get("type") == "function_call":
            return self.start | {"arguments": str(self.arguments) or self.start.get("arguments")}
        if self.start.get("type") != "message":
            return self.start
        parts = [{"type": "output_text", "text": str(self.text)}] if self.text else []
        parts += [{"type": "refusal", "refusal": str(self.refusal)}] if self.refusal else []
        return self.start | {"content": parts or as_list(self.start.get("content"))}


class ResponseAssembly:
    """Folds a response's events into the response.

    Attributes:
        closed: Whether the last event came; until then nothing is whole.
    """

    def __init__(self) -> None:
        self.closed = False
        self._response: dict[str, Any] = {}
        self._items: dict[object, _Item] = {}
        self._last: _Item | None = None
        self._calls = 0

    @property
    def whole(self) -> bool:
        """Whether the last event came."""
        return self.closed

    def add(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Fold an event in."""
        kind = text_of(event.get("type"))
        if kind in _LAST:
            self._response = {"status": _LAST[kind]} | as_object(event.get("response"))
            self.closed = True
        elif kind == "response.output_item.added":
            yield from self._begin(event.get("output_index"), as_object(event.get("item")))
        elif kind == "response.output_item.done":
            item = as_object(event.get("item"))
            known = self._items.get(_key(event.get("output_index"), item))
            if known is None:
                yield from self._begin(event.get("output_index"), item)
                known = self._last
            if known is not None and item:
                known.start, known.done = item, True
        elif kind.endswith(".delta"):
            yield from self._delta(kind, event)

    def body(self) -> object:
        """The response."""
        if as_list(self._response.get("output")):
            return self._response
        return self._response | {"output": [item.body() for item in self._items.values()]}

    def _begin(self, index: object, start: dict[str, Any]) -> Iterator[Piece]:
        item = self._last = self._items[_key(index, start)] = _Item(start, self._calls)
        if start.get("type") == "function_call":
            self._calls += 1
            yield CallPiece(item.place, text_of(start.get("name")), "")

    def _delta(self, kind: str, event: dict[str, Any]) -> Iterator[Piece]:
        item = self._items.get(_key(event.get("output_index"), {"id": event.get("item_id")})) or self._last
        if item is None:
            item = self._last = self._items[None] = _Item({"type": "message"})
        delta = event.get("delta")
        match kind:
            case "response.output_text.delta":
                if shown := item.text.add(delta):
                    yield TextPiece(shown)
            case "response.refusal.delta":
                item.refusal.add(delta)
            case "response.function_call_arguments.delta":
                if shown := item.arguments.add(delta):
                    yield CallPiece(item.place, text_of(item.start.get("name")), shown)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                if shown := item.thought.add(delta):
                    yield ReasoningPiece(shown)
            case _:
                pass


def _key(index: object, item: dict[str, Any]) -> object:
    """By what an item is known: its place in the output, or its id where there is none."""
    return index if isinstance(index, int) else text_of(item.get("id")) or None
