"""The chat completions wire, streamed: chunks fold into the body of a whole answer.

Servers agree on little here; what each rule is for stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.streaming import CallPiece, Piece, ReasoningPiece, TextPiece
from agentfsm.models.assembly import Letters
from agentfsm.models.wire import as_list, as_object, text_of

__all__ = ["ChatAssembly"]

_REASONING = ("reasoning_content", "reasoning")
"""Where servers put what the model thinks: DeepSeek and llama.cpp the first, OpenRouter and vLLM the second."""


@dataclass(slots=True)
class _Call:
    """One call, as far as it has come."""

    place: int
    index: int | None = None
    id: str = ""
    name: str = ""
    text: Letters = field(default_factory=Letters)
    value: object = None
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def complete(self) -> bool:
        """Whether the arguments are whole, so that more of them can only be another call's."""
        if self.value is not None:
            return True
        if not self.text.last.rstrip().endswith("}"):
            return False
        try:
            json.loads(str(self.text))
        except (ValueError, RecursionError):
            return False
        return True

    def body(self) -> dict[str, Any]:
        arguments = self.value if self.value is not None and not self.text else str(self.text)
        return {"id": self.id, "function": {"name": self.name, "arguments": arguments}, **self.more}


class _Calls:
    """Which call a piece belongs to.

    The index says so, where it is there and right. It is missing (Gemini,
    https://github.com/openai/openai-python/issues/2806), the same for all calls
    (https://github.com/ai-dynamo/dynamo/pull/4723), or counts from 1. Ids come once, with every piece
    (https://github.com/langchain4j/langchain4j/pull/4544), or new with every piece
    (https://github.com/NousResearch/hermes-agent/pull/106943); names come once or with every piece
    (https://github.com/NousResearch/hermes-agent/pull/11984). So:

    1. A piece goes on with the call that has its id, or else its index, or else with the last one.
    2. A piece with a name begins a call at an index that is new, or where rule 1 finds a call of another
       name, or one whose arguments are whole while there are more.
    3. A piece with an id, no name and an index that is new begins a call; its name comes later.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._of_index: dict[int, _Call] = {}
        self._of_id: dict[str, _Call] = {}

    def find(self, index: object, call_id: str, name: str, arguments: object) -> _Call:
        """The call that a piece belongs to; a new one where it begins one."""
        place = index if isinstance(index, int) else None
        call = self._earlier(place, call_id, name)
        if call is not None and name and call.name and (name != call.name or (call.complete and not _blank(arguments))):
            call = None
        if call is None:
            call = _Call(len(self.calls), place)
            self.calls.append(call)
        if place is not None:
            self._of_index[place] = call
        if call_id:
            self._of_id[call_id] = call
        call.id = call.id or call_id
        call.name = call.name or name
        return call

    def _earlier(self, place: int | None, call_id: str, name: str) -> _Call | None:
        fresh = place is not None and place not in self._of_index
        if fresh and name:
            return None
        if call_id in self._of_id:
            return self._of_id[call_id]
        if place is None:
            return None if not self.calls or (call_id and name) else self.calls[-1]
        if fresh:
            return None if not self.calls or call_id else self.calls[-1]
        return self._of_index[place]

    def in_order(self) -> list[_Call]:
        """The calls by their indexes, where each has its own, else in the order in which they began."""
        indexes = {call.index for call in self.calls}
        if None in indexes or len(indexes) < len(self.calls):
            return self.calls
        return sorted(self.calls, key=lambda call: call.index or 0)


@dataclass(slots=True)
class _Detail:
    """One of OpenRouter's reasoning blocks, as far as it has come; its texts are joined once, at the end.

    (https://openrouter.ai/docs/use-cases/reasoning-tokens)
    """

    said: dict[str, Any]
    texts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def goes_on(self, piece: dict[str, Any]) -> bool:
        """Whether a piece is of this block, and of its kind."""
        return all(self.said.get(key) == piece.get(key) for key in ("type", "index"))

    def add(self, piece: dict[str, Any]) -> None:
        for key, value in piece.items():
            begun = self.said.get(key)
            if key in ("text", "summary", "data") and isinstance(value, str) and isinstance(begun, str):
                self.texts.setdefault(key, [begun]).append(value)
            elif value is not None:
                self.said[key] = value
                self.texts.pop(key, None)

    def body(self) -> dict[str, Any]:
        return self.said | {key: "".join(pieces) for key, pieces in self.texts.items()}


class ChatAssembly:
    """Folds chat completion chunks into a chat completion.

    Attributes:
        closed: Whether ``[DONE]`` came. Servers leave it out, and send usage behind the finish reason, so a
            stream is whole with its finish reason and closed with its end
            (https://github.com/BerriAI/litellm/issues/40260).
    """

    def __init__(self) -> None:
        self.closed = False
        self._text, self._refusal = Letters(), Letters()
        self._reasoning = {key: Letters() for key in _REASONING}
        self._details: list[_Detail] = []
        self._calls = _Calls()
        self._first_form: _Call | None = None
        self._finish: str | None = None
        self._top: dict[str, Any] = {}

    @property
    def whole(self) -> bool:
        """Whether the finish reason came."""
        return self._finish is not None

    def add(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Fold a chunk in."""
        for key in ("model", "usage"):  # usage may come last, in a chunk without choices
            if event.get(key):
                self._top[key] = event[key]
        for choice in map(as_object, as_list(event.get("choices"))):
            if choice.get("index") in (None, 0):
                # a message where a delta should be: servers that stream one whole answer as a single chunk
                yield from self._delta(as_object(choice.get("delta")) or as_object(choice.get("message")))
                self._finish = text_of(choice.get("finish_reason")) or self._finish

    def body(self) -> object:
        """The chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._refusal:
            message["refusal"] = str(self._refusal)
        message |= {key: str(letters) for key, letters in self._reasoning.items() if letters}
        if self._details:
            message["reasoning_details"] = [detail.body() for detail in self._details]
        if self._calls.calls:
            message["tool_calls"] = [call.body() for call in self._calls.in_order()]
        elif self._first_form is not None:
            message["function_call"] = self._first_form.body()["function"]
        return {"choices": [{"message": message, "finish_reason": self._finish}], **self._top}

    def _delta(self, delta: dict[str, Any]) -> Iterator[Piece]:
        thought = [letters.add(delta.get(key)) for key, letters in self._reasoning.items()]
        if shown := next(filter(None, thought), ""):  # some send both, saying the same
            yield ReasoningPiece(shown)
        for detail in filter(None, map(as_object, as_list(delta.get("reasoning_details")))):
            if self._details and self._details[-1].goes_on(detail):
                self._details[-1].add(detail)
            else:
                self._details.append(_Detail(dict(detail)))
        content = delta.get("content")
        for part in [content] if isinstance(content, str) else map(as_object, as_list(content)):
            text = part if isinstance(part, str) else text_of(part.get("text"))
            if shown := self._text.add(text):
                yield TextPiece(shown)
            if isinstance(part, dict):
                self._refusal.add(part.get("refusal"))
        self._refusal.add(delta.get("refusal"))
        for piece in map(as_object, as_list(delta.get("tool_calls"))):
            function = as_object(piece.get("function"))
            name = text_of(function.get("name"))
            call = self._calls.find(piece.get("index"), text_of(piece.get("id")), name, function.get("arguments"))
            more = {k: v for k, v in piece.items() if k not in ("id", "index", "function", "type")}
            call.more |= {k: v for k, v in more.items() if v is not None}
            yield from _arguments(call, function.get("arguments"), bool(name))
        if first := as_object(delta.get("function_call")):
            self._first_form = self._first_form or _Call(0)
            self._first_form.name = self._first_form.name or text_of(first.get("name"))
            yield from _arguments(self._first_form, first.get("arguments"), "name" in first)


def _blank(arguments: object) -> bool:
    return not arguments.strip() if isinstance(arguments, str) else arguments is None


def _arguments(call: _Call, arguments: object, named: bool) -> Iterator[Piece]:
    """Add to a call's arguments: text, an object all at once (Ollama and others), or nothing."""
    shown = ""
    if isinstance(arguments, str):
        shown = call.text.add(arguments)
    elif arguments is not None:
        call.value = arguments
        shown = json.dumps(arguments)
    if shown or named:
        yield CallPiece(call.place, call.name, shown)
