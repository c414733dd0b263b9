"""``OpenAIResponses``: OpenAI's responses API, and servers that implement it.

Nothing is stored at the provider: each request contains the whole transcript, and with it the model's encrypted
reasoning, so that a run can be resumed anywhere and at any time. In a stream the last event contains the complete
response; some servers leave its output empty or omit it (https://github.com/QuantumNous/new-api/issues/4362), and then
the output is built from the earlier items.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.http_model import HttpModel
from agentfsm.models.output_schema import DEFAULT_SUPPORT, SchemaSupport, output_schema_block
from agentfsm.models.settings import ModelSettings, reject_prompt_cache
from agentfsm.models.stream_reader import StreamAccumulator, TextAccumulator
from agentfsm.models.wire_format import (
    TOOL_CHOICE_MODES,
    MessageEncoder,
    PerMessageEncoder,
    data_url,
    encode_parts,
    filename_of,
    final_finish_reason,
    function_spec,
    openai_usage,
    own_extra,
    parse_tool_calls,
    repairs_of_end,
    safe_tool_name,
    tool_choice,
)
from agentfsm.models.wire_json import as_list, as_object, as_text, dumps

EXTRA_KEY = "openai_responses"
"""The key in ``Message.extra`` of a reply's reasoning items, which must be sent back before its calls.

Without storage an item is identified by its encrypted content. An item with an id would be looked up and not found
(https://github.com/github/copilot-sdk/issues/615), so ids are removed.
"""


class OpenAIResponses(HttpModel):
    """A client of a responses API (``openai-responses:gpt-5-mini``); the API key is in ``OPENAI_API_KEY``.

    Arguments and errors are those of ``HttpModel``.
    """

    _default_provider = "openai-responses"
    _default_files = True

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        if settings.seed is not None:
            raise ConfigurationError("the responses API has no seed")
        if settings.stop:
            raise ConfigurationError("the responses API has no stop sequences")
        return reject_prompt_cache(settings, "the responses API")

    def _path(self) -> str:
        return "/responses"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = encode(
            request,
            self.model,
            self.settings,
            official=self._is_official,
            origin=self._origin,
            schemas=DEFAULT_SUPPORT if self._known_row is None else self._known_row.schemas,
        )
        return {"stream": True} | body if stream else body

    def _message_encoder(self) -> tuple[str, MessageEncoder]:
        return "input", _new_encoder(self._origin, self.settings)

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
    schemas: SchemaSupport = DEFAULT_SUPPORT,
) -> dict[str, Any]:
    """The body of a request."""
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "store": False}
    if official:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        # Strict is the default here, unlike in chat completions, and rejects most schemas.
        body["tools"] = [{"type": "function", **function_spec(tool), "strict": False} for tool in request.tools]
        if choice := tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice if choice in TOOL_CHOICE_MODES else {"type": "function", "name": choice}
    body["input"] = _new_encoder(origin, settings).encode_all(request.messages)
    if cap := request.max_output_tokens or settings.max_tokens:
        body["max_output_tokens"] = cap
    if schema := output_schema_block(request, schemas):
        body["text"] = {"format": {"type": "json_schema", **schema}}
    options = settings.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    if settings.reasoning_effort is not None:
        options["reasoning"] = {"effort": settings.reasoning_effort}
    return body | options | settings.extra_body


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply in a response body.

    Raises:
        ProviderError: The body has no output.
        TransientProviderError: The server interrupted the reply, or does not say that it has ended.
    """
    top = as_object(body)
    if not isinstance(top.get("output"), list):
        raise ProviderError("the response has no output; does base_url speak responses?")
    status = as_text(top.get("status"))
    if status in ("failed", "cancelled", "queued", "in_progress"):
        raise TransientProviderError(f"the server interrupted the reply ({status})")
    items = [as_object(item) for item in as_list(top["output"])]
    parts = [as_object(p) for item in items if item.get("type") == "message" for p in as_list(item.get("content"))]
    text = "".join(as_text(part.get("text")) for part in parts if part.get("type") == "output_text")
    refusal = "".join(as_text(part.get("refusal")) for part in parts if part.get("type") == "refusal") or None
    raw = [item for item in items if item.get("type") == "function_call"]
    calls = parse_tool_calls(
        [(call.get("call_id") or call.get("id"), call.get("name"), call.get("arguments")) for call in raw], used_ids
    )
    if not status and any(item.get("status") == "in_progress" for item in items):
        raise TransientProviderError("the server does not say that the reply has ended")
    stated = FinishReason.STOP
    if status == "incomplete":
        reason = as_object(top.get("incomplete_details")).get("reason")
        stated = FinishReason.CONTENT_FILTER if reason == "content_filter" else FinishReason.LENGTH
    elif any(call.get("status") == "incomplete" for call in raw):  # a truncated call in a completed response
        stated = FinishReason.LENGTH
    return Reply(
        message=Message(Role.ASSISTANT, text or refusal or "", calls, extra=_provider_extra(items, calls, origin)),
        finish_reason=final_finish_reason(stated, calls, refusal),
        usage=openai_usage(top.get("usage"), "input_tokens", "output_tokens"),
        refusal=refusal,
        model=as_text(top.get("model")),
        repairs=repairs_of_end(status, text or refusal, calls),
    )


def _provider_extra(items: list[dict[str, Any]], calls: tuple[ToolCall, ...], origin: str) -> dict[str, Any] | None:
    """The encrypted reasoning, which must be sent back before the calls."""
    encrypted = [item for item in items if item.get("type") == "reasoning" and item.get("encrypted_content")]
    stored = [{k: v for k, v in item.items() if k in ("type", "summary", "encrypted_content")} for item in encrypted]
    if not stored or not calls:
        return None
    return {EXTRA_KEY: {"voice": origin, "items": [{"summary": []} | item for item in stored]}}


def _new_encoder(origin: str, settings: ModelSettings) -> PerMessageEncoder:
    """An encoder for an empty transcript."""
    files = settings.files is not False
    return PerMessageEncoder(partial(_encode_message, origin=origin), settings.images, files=files)


def _encode_message(message: Message, origin: str) -> list[dict[str, Any]]:
    """A message as input items; reasoning comes before the calls that it led to.

    OpenAI takes a message without a type as one; other servers of the API reject it (llama-server, LiteLLM).
    """
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [
                {"type": "function_call_output", "call_id": message.tool_call_id, "output": _encode_content(message)}
            ]
        case Role.TOOL | Role.USER:
            return [{"type": "message", "role": "user", "content": _encode_content(message)}]
        case Role.SYSTEM:
            return [{"type": "message", "role": "system", "content": message.content}]
        case Role.ASSISTANT:
            text: list[dict[str, Any]] = []
            if message.content or not message.tool_calls:
                text = [{"type": "message", "role": "assistant", "content": message.content}]
            calls = [
                {
                    "type": "function_call",
                    "call_id": call.id,
                    "name": safe_tool_name(call.name),
                    "arguments": dumps(call.arguments),
                }
                for call in message.tool_calls
            ]
            reasoning = map(as_object, as_list(own_extra(message, EXTRA_KEY, origin).get("items")))
            return [*reasoning, *text, *calls]


def _encode_content(message: Message) -> str | list[dict[str, Any]]:
    """The content of a user or tool message: a text, or parts if there are images or files."""
    if not message.images and not message.files:
        return message.content
    return encode_parts(
        message,
        lambda text: {"type": "input_text", "text": text},
        lambda image: {"type": "input_image", "detail": "auto", "image_url": data_url(image)},
        lambda file: {"type": "input_file", "filename": filename_of(file), "file_data": data_url(file)},
    )


_FINAL_STATUSES = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
    "response.cancelled": "cancelled",
    "response.done": "completed",
}
"""The events that end a response, and the status that each implies."""


@dataclass(slots=True)
class _Item:
    """An output item, as far as it has arrived."""

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


class ResponsesAccumulator(StreamAccumulator):
    """Accumulates the events of a response into the complete response.

    Attributes:
        closed: Whether the last event has arrived; until then the reply is incomplete.
    """

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[object, _Item] = {}
        self._current: _Item | None = None
        self._call_count = 0

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Add one event; yields the parts of the reply in it."""
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
        """The complete response."""
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
    """What identifies an item: its index in the output, or its id if it has no index."""
    return index if isinstance(index, int) else as_text(item.get("id")) or None
