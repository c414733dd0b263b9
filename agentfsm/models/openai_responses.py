"""``OpenAIResponses``: OpenAI's responses API, and servers that implement it.

Nothing is stored at the provider: each request carries the whole transcript, and with it the model's encrypted
reasoning, so that a run can be resumed anywhere and years later. In a stream the last event brings the whole response;
some servers leave its output empty or out (https://github.com/QuantumNous/new-api/issues/4362), and then it is built
from the items before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk, ToolSpec
from agentfsm.models.http_model import HttpModel
from agentfsm.models.openai_chat import is_strict_schema, reject_prompt_cache
from agentfsm.models.settings import ModelSettings
from agentfsm.models.stream_reader import StreamAccumulator, TextAccumulator
from agentfsm.models.wire_format import (
    MessageEncoder,
    PerMessageEncoder,
    as_list,
    as_object,
    as_text,
    data_url,
    dumps,
    finish_reason,
    mark_unpriced,
    parse_tool_calls,
    safe_tool_name,
    token_count,
    visible_message,
)

__all__ = ["OpenAIResponses", "ResponsesAccumulator", "decode", "encode"]


EXTRA_KEY = "openai_responses"
"""Where ``Message.extra`` keeps a reply's reasoning items, which must come back before its calls.

Without storage an item is known by its sealed content alone, and one that carries an id is looked up and not
found (https://github.com/github/copilot-sdk/issues/615), so ids are taken off.
"""


class OpenAIResponses(HttpModel):
    """A model behind a responses interface (``openai-responses:gpt-5-mini``); the key is in ``OPENAI_API_KEY``.

    Args and errors are those of ``HttpModel``.
    """

    _provider = "openai-responses"

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        if settings.seed is not None:
            raise ConfigurationError("the responses wire has no seed")
        if settings.stop:
            raise ConfigurationError("the responses wire has no stop texts")
        return reject_prompt_cache(settings, "the responses wire")

    def _path(self) -> str:
        return "/responses"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = encode(request, self.model, self.settings, official=self._endpoint.is_official, origin=self._origin)
        return {"stream": True} | body if stream else body

    def _message_encoder(self, request: ModelRequest) -> tuple[str, MessageEncoder]:
        return "input", PerMessageEncoder(self._encode_visible)

    def _encode_visible(self, message: Message) -> list[dict[str, Any]]:
        return _encode_message(visible_message(message, self.settings.images), self._origin)

    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        return decode(body, used_ids=used_ids, origin=self._origin)

    def _accumulator(self) -> StreamAccumulator:
        return ResponsesAccumulator()


def encode(
    request: ModelRequest,
    model: str,
    settings: ModelSettings | None = None,
    *,
    official: bool = False,
    origin: str = "",
) -> dict[str, Any]:
    """The body of a request.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer.
        official: Whether the server is OpenAI's own; it alone is asked for sealed reasoning, and to weigh tools
            against a text format.
        origin: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "store": False}
    if official:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if choice := _encode_tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    body["input"] = [
        item
        for message in request.messages
        for item in _encode_message(visible_message(message, settings.images), origin)
    ]
    if cap := request.max_output_tokens or settings.max_tokens:
        body["max_output_tokens"] = cap
    if request.output_schema is not None and (official or not request.tools):
        body["text"] = {
            "format": {
                "type": "json_schema",
                "name": safe_tool_name(request.output_name),
                "schema": dict(request.output_schema),
                "strict": is_strict_schema(request.output_schema),
            }
        }
    wanted = settings.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    if settings.reasoning_effort is not None:
        wanted["reasoning"] = {"effort": settings.reasoning_effort}
    return body | wanted | settings.extra_body


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        used_ids: Call ids that the transcript uses already; a reply that repeats one gets another.
        origin: Who answered.

    Raises:
        ProviderError: The body lacks what a reply must hold.
        TransientProviderError: The server says that it gave up on the reply, or does not say that it has ended.
    """
    top = as_object(body)
    if not isinstance(top.get("output"), list):
        raise ProviderError("the answer holds no output; does base_url speak responses?")
    status = finish_reason(top, "status")
    if status in ("failed", "cancelled", "queued", "in_progress"):
        raise TransientProviderError(f"the server gave up on the reply ({status})")
    items = [as_object(item) for item in as_list(top["output"])]
    parts = [as_object(p) for item in items if item.get("type") == "message" for p in as_list(item.get("content"))]
    text = "".join(as_text(part.get("text")) for part in parts if part.get("type") == "output_text")
    refusal = "".join(as_text(part.get("refusal")) for part in parts if part.get("type") == "refusal") or None
    wishes = [item for item in items if item.get("type") == "function_call"]
    calls = parse_tool_calls(
        [(w.get("call_id") or w.get("id"), w.get("name"), w.get("arguments")) for w in wishes], used_ids
    )
    finish = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    if any(wish.get("status") == "incomplete" for wish in wishes):  # a call cut off, in an answer called complete
        finish = FinishReason.LENGTH
    if status == "incomplete":
        why = as_object(top.get("incomplete_details")).get("reason")
        finish = FinishReason.CONTENT_FILTER if why == "content_filter" else FinishReason.LENGTH
    if refusal:
        finish = FinishReason.REFUSAL
    usage = as_object(top.get("usage"))
    prompt = as_object(usage.get("input_tokens_details"))
    return Reply(
        message=Message(Role.ASSISTANT, text or refusal or "", calls, extra=_provider_extra(items, calls, origin)),
        finish_reason=finish,
        usage=mark_unpriced(
            Usage(
                input_tokens=token_count(usage, "input_tokens"),
                output_tokens=token_count(usage, "output_tokens"),
                cached_tokens=token_count(prompt, "cached_tokens"),
                written_tokens=token_count(prompt, "cache_write_tokens"),
                reasoning_tokens=token_count(as_object(usage.get("output_tokens_details")), "reasoning_tokens"),
            )
        ),
        refusal=refusal,
        model=as_text(top.get("model")),
    )


def _encode_message(message: Message, origin: str) -> list[dict[str, Any]]:
    """A message as input items; reasoning stands before the calls that it led to."""
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [
                {"type": "function_call_output", "call_id": message.tool_call_id, "output": _encode_content(message)}
            ]
        case Role.TOOL | Role.USER:
            return [{"role": "user", "content": _encode_content(message)}]
        case Role.SYSTEM:
            return [{"role": "system", "content": message.content}]
        case Role.ASSISTANT:
            said: list[dict[str, Any]] = []
            if message.content or not message.tool_calls:
                said = [{"role": "assistant", "content": message.content}]
            calls = [
                {
                    "type": "function_call",
                    "call_id": call.id,
                    "name": safe_tool_name(call.name),
                    "arguments": dumps(call.arguments),
                }
                for call in message.tool_calls
            ]
            kept = as_object((message.extra or {}).get(EXTRA_KEY))
            thoughts = map(as_object, as_list(kept.get("items"))) if kept.get("voice") == origin else ()
            return [*thoughts, *said, *calls]


def _encode_content(message: Message) -> str | list[dict[str, Any]]:
    """What a person or a tool said: a text, or parts where there are pictures."""
    if not message.images:
        return message.content
    text = [{"type": "input_text", "text": message.content}] if message.content else []
    pictures = [{"type": "input_image", "detail": "auto", "image_url": data_url(i)} for i in message.images]
    return [*text, *pictures]


def _provider_extra(items: list[dict[str, Any]], calls: tuple[ToolCall, ...], origin: str) -> dict[str, Any] | None:
    """The reasoning that must come back: what is sealed, before calls."""
    sealed = [item for item in items if item.get("type") == "reasoning" and item.get("encrypted_content")]
    kept = [{k: v for k, v in item.items() if k in ("type", "summary", "encrypted_content")} for item in sealed]
    if not kept or not calls:
        return None
    return {EXTRA_KEY: {"voice": origin, "items": [{"summary": []} | item for item in kept]}}


def _encode_tool(tool: ToolSpec) -> dict[str, Any]:
    # Strict is the default here, unlike in chat completions, and refuses most schemas.
    spec = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", **spec, "strict": False}


def _encode_tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> object:
    if choice in (None, "auto", "none", "required"):
        return choice
    return {"type": "function", "name": choice} if choice in {t.name for t in tools} else None


_FINAL_STATUSES = {
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
    call_index: int = 0
    text: TextAccumulator = field(default_factory=TextAccumulator)
    refusal: TextAccumulator = field(default_factory=TextAccumulator)
    arguments: TextAccumulator = field(default_factory=TextAccumulator)
    reasoning: TextAccumulator = field(default_factory=TextAccumulator)
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


class ResponsesAccumulator:
    """Folds a response's events into the response.

    Attributes:
        closed: Whether the last event came; until then nothing is whole.
    """

    def __init__(self) -> None:
        self.closed = False
        self._response: dict[str, Any] = {}
        self._items: dict[object, _Item] = {}
        self._current: _Item | None = None
        self._call_count = 0

    @property
    def complete(self) -> bool:
        """Whether the last event came."""
        return self.closed

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Fold an event in."""
        kind = as_text(event.get("type"))
        if kind in _FINAL_STATUSES:
            self._response = {"status": _FINAL_STATUSES[kind]} | as_object(event.get("response"))
            self.closed = True
        elif kind == "response.output_item.added":
            yield from self._start_item(event.get("output_index"), as_object(event.get("item")))
        elif kind == "response.output_item.done":
            item = as_object(event.get("item"))
            known = self._items.get(_item_key(event.get("output_index"), item))
            if known is None:
                yield from self._start_item(event.get("output_index"), item)
                known = self._current
            if known is not None and item:
                known.start, known.done = item, True
        elif kind.endswith(".delta"):
            yield from self._apply_delta(kind, event)

    def body(self) -> object:
        """The response."""
        if as_list(self._response.get("output")):
            return self._response
        return self._response | {"output": [item.body() for item in self._items.values()]}

    def _start_item(self, index: object, start: dict[str, Any]) -> Iterator[StreamChunk]:
        item = self._current = self._items[_item_key(index, start)] = _Item(start, self._call_count)
        if start.get("type") == "function_call":
            self._call_count += 1
            yield ToolCallChunk(item.call_index, as_text(start.get("name")), "")

    def _apply_delta(self, kind: str, event: dict[str, Any]) -> Iterator[StreamChunk]:
        item = self._items.get(_item_key(event.get("output_index"), {"id": event.get("item_id")})) or self._current
        if item is None:
            item = self._current = self._items[None] = _Item({"type": "message"})
        delta = event.get("delta")
        match kind:
            case "response.output_text.delta":
                if shown := item.text.add(delta):
                    yield TextChunk(shown)
            case "response.refusal.delta":
                item.refusal.add(delta)
            case "response.function_call_arguments.delta":
                if shown := item.arguments.add(delta):
                    yield ToolCallChunk(item.call_index, as_text(item.start.get("name")), shown)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                if shown := item.reasoning.add(delta):
                    yield ReasoningChunk(shown)
            case _:
                pass


def _item_key(index: object, item: dict[str, Any]) -> object:
    """By what an item is known: its place in the output, or its id where there is none."""
    return index if isinstance(index, int) else as_text(item.get("id")) or None
