"""``AnthropicMessages``: Anthropic's messages API, and servers that implement it.

``encode`` and ``decode`` map requests and responses, ``AnthropicAccumulator`` reads streams
(https://docs.anthropic.com/en/api/messages-streaming; it requires unknown event and delta types to be ignored).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from agentfsm.errors import ConfigurationError, ProviderError
from agentfsm.loop.messages import File, FinishReason, Image, Message, Reply, Role, ToolCall, Transcript, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.http_model import HttpModel
from agentfsm.models.output_schema import ANTHROPIC_RULES, strict_schema
from agentfsm.models.settings import ModelSettings
from agentfsm.models.stream_reader import StreamAccumulator, TextAccumulator
from agentfsm.models.wire_format import (
    MessageEncoder,
    encode_parts,
    final_finish_reason,
    mark_unpriced,
    own_extra,
    parse_tool_calls,
    repairs_of_end,
    safe_tool_name,
    token_count,
    tool_choice,
    visible_message,
)
from agentfsm.models.wire_json import as_list, as_object, as_text, dumps

DEFAULT_MAX_TOKENS = 4096
"""The limit on a reply, in tokens, for requests without one; the API requires a limit."""

_OFFICIAL_MAX_TOKENS = 16_384
"""The same for Anthropic's own models: their thinking counts, and all current ones support this much and more
(https://docs.anthropic.com/en/docs/about-claude/models/overview)."""

_MUTABLE_TURNS = 4
"""How many of the last turns may still change: by messages merged into the last one, and by cache breakpoints."""

EXTRA_KEY = "anthropic"
"""The key in ``Message.extra`` of a reply's content blocks: thinking is signed, and must be sent back unchanged."""

CacheControl = dict[str, str]
"""The value of ``cache_control``."""

_FINISH_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "pause_turn": FinishReason.LENGTH,  # server-side tools took long; the server continues on the next request
    "refusal": FinishReason.REFUSAL,
}
"""Stop reasons; whether the model calls tools is read from the calls themselves."""


_MODELS_WITHOUT_SCHEMAS = re.compile(r"claude-([23]|instant|(opus|sonnet)-4(-0|-2025\d{4})?$)")
"""Claude models from before structured outputs.

(https://platform.claude.com/docs/en/build-with-claude/structured-outputs)
"""


class AnthropicMessages(HttpModel):
    """A client of Anthropic's messages API (``anthropic:...``); the API key is in ``ANTHROPIC_API_KEY``.

    Arguments and errors are those of ``HttpModel``.
    """

    _default_provider = "anthropic"
    _default_files = True
    _headers = MappingProxyType({"anthropic-version": "2023-06-01"})
    _key_header, _key_scheme = "x-api-key", ""

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        if settings.seed is not None:
            raise ConfigurationError("Anthropic's API has no seed")
        if settings.temperature is not None and settings.temperature > 1:
            raise ConfigurationError("Anthropic's API accepts a temperature of 0 to 1")
        if (effort := settings.reasoning_effort) in ("none", "minimal"):
            raise ConfigurationError(f"Anthropic's API has no reasoning_effort {effort!r}: use low or higher")
        return settings

    @property
    def _cache_ttl(self) -> str:
        return self.settings.prompt_cache or ("5m" if self._is_official else "off")

    def _path(self) -> str:
        return "/messages" if self._endpoint.base_url.endswith("/v1") else "/v1/messages"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        capped = replace(request, max_output_tokens=self._max_output_tokens(request))
        takes_schemas = self._is_official and not _MODELS_WITHOUT_SCHEMAS.match(self.model)
        body = encode(
            capped,
            self.model,
            self.settings,
            cache_ttl=self._cache_ttl,
            origin=self._origin,
            takes_schemas=takes_schemas,
        )
        return {"stream": True} | body if stream else body

    def _message_encoder(self) -> tuple[str, MessageEncoder]:
        recipient = _Recipient(self._origin, self.settings.images, self.settings.files is not False)
        return "messages", _TurnEncoder(_cache_control_for(self._cache_ttl), recipient)

    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        return decode(body, used_ids=used_ids, origin=self._origin)

    def _accumulator(self) -> StreamAccumulator:
        return AnthropicAccumulator()

    def _max_output_tokens(self, request: ModelRequest) -> int:
        default = _OFFICIAL_MAX_TOKENS if self._is_official else DEFAULT_MAX_TOKENS
        return request.max_output_tokens or self.settings.max_tokens or default


def encode(
    request: ModelRequest,
    model: str,
    settings: ModelSettings | None = None,
    *,
    cache_ttl: str = "off",
    origin: str = "",
    takes_schemas: bool = False,
) -> dict[str, Any]:
    """The body of a request."""
    settings = settings or ModelSettings()
    cache_control = _cache_control_for(cache_ttl)
    cap = request.max_output_tokens or settings.max_tokens or DEFAULT_MAX_TOKENS
    body: dict[str, Any] = {"model": model, "max_tokens": cap}
    if request.tools:
        body["tools"] = [
            {"name": t.name, "description": t.description, "input_schema": dict(t.parameters)} for t in request.tools
        ]
        if choice := tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = _TOOL_CHOICES.get(choice) or {"type": "tool", "name": choice}
    if system := "\n\n".join(m.content for m in request.messages if m.role is Role.SYSTEM and m.content.strip()):
        body["system"] = system
        if cache_control is not None:
            body["system"] = [{"type": "text", "text": system, "cache_control": cache_control}]
    elif cache_control is not None and request.tools:
        body["tools"][-1]["cache_control"] = cache_control
    recipient = _Recipient(origin, settings.images, settings.files is not False)
    body["messages"] = _encode_turns(request.messages, cache_control, recipient)
    options = settings.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    if settings.stop:
        options["stop_sequences"] = list(settings.stop)
    output: dict[str, Any] = {}
    if settings.reasoning_effort is not None:
        output["effort"] = settings.reasoning_effort
    if takes_schemas and request.output_schema is not None:
        schema = strict_schema(request.output_schema, ANTHROPIC_RULES)
        output |= {} if schema is None else {"format": {"type": "json_schema", "schema": schema}}
    if output:
        options["output_config"] = output
    return body | options | settings.extra_body


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply in a response body.

    Raises:
        ProviderError: The body has no content.
        TransientProviderError: It does not say that the reply has ended.
    """
    top = as_object(body)
    if not isinstance(top.get("content"), list):
        raise ProviderError("the response has no content; does base_url speak Anthropic's messages?")
    blocks = [block for block in map(as_object, as_list(top["content"])) if not _is_blank_block(block)]
    text = "".join(str(block["text"]) for block in blocks if block.get("type") == "text")
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    calls = parse_tool_calls([(use.get("id"), use.get("name"), use.get("input")) for use in uses], used_ids)
    reason = as_text(top.get("stop_reason")).lower()
    stated = _FINISH_REASONS.get(reason, FinishReason.STOP)
    refusal = None
    if stated is FinishReason.REFUSAL:
        explanation = as_text(as_object(top.get("stop_details")).get("explanation"))
        refusal = text or explanation or "the model refused and gave no reason"
    extra = None
    if any(block.get("type") not in ("text", "tool_use") for block in blocks):
        remaining = iter(calls)
        stored = [_tool_use_block(next(remaining)) if b.get("type") == "tool_use" else b for b in blocks]
        extra = {EXTRA_KEY: {"voice": origin, "blocks": stored}}
    usage = as_object(top.get("usage"))
    cached = token_count(usage, "cache_read_input_tokens")
    written = token_count(usage, "cache_creation_input_tokens")
    return Reply(
        message=Message(Role.ASSISTANT, text, calls, extra=extra),
        finish_reason=final_finish_reason(stated, calls, refusal),
        # The input tokens of this API do not include the cached parts of the prompt.
        usage=mark_unpriced(
            Usage(
                input_tokens=token_count(usage, "input_tokens") + cached + written,
                output_tokens=token_count(usage, "output_tokens"),
                cached_tokens=cached,
                written_tokens=written,
                reasoning_tokens=token_count(as_object(usage.get("output_tokens_details")), "thinking_tokens"),
            )
        ),
        refusal=refusal,
        model=str(top.get("model") or ""),
        repairs=repairs_of_end(reason, text or refusal, calls),
    )


def _is_blank_block(block: dict[str, Any]) -> bool:
    """Whether a block is not an object, or is blank text, which the API would reject in a later request."""
    return not block or (block.get("type") == "text" and not str(block.get("text") or "").strip())


_TOOL_CHOICES = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
"""The tool choices that do not name a tool."""


def _cache_control_for(cache_ttl: str) -> CacheControl | None:
    """The cache breakpoint for a lifetime of ``5m`` or ``1h``; None for ``off``."""
    return None if cache_ttl == "off" else {"type": "ephemeral"} | ({"ttl": cache_ttl} if cache_ttl != "5m" else {})


class _Recipient(NamedTuple):
    """The model that is called: its origin, and whether it accepts images and PDFs."""

    origin: str
    images: bool
    files: bool


class _TurnEncoder:
    """Encodes a transcript into turns as it grows."""

    def __init__(self, cache_control: CacheControl | None, recipient: _Recipient) -> None:
        self._cache_control = cache_control
        self._recipient = recipient
        self._encoded: list[str] = []
        self._open_turns: list[dict[str, Any]] = []

    def add(self, message: Message) -> None:
        """Encode a message that every later request repeats."""
        _append_messages(self._open_turns, (message,), self._recipient)
        if len(self._open_turns) > _MUTABLE_TURNS:
            self._encoded.append(dumps(self._open_turns.pop(0)))

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON texts of all turns; ``tail`` is encoded for this request only."""
        last = [{"role": turn["role"], "content": list(turn["content"])} for turn in self._open_turns]
        if len(self._encoded) > 1:
            self._encoded = [",".join(self._encoded)]
        return [*self._encoded, *map(dumps, _with_cache_control(last, tail, self._cache_control, self._recipient))]


def _encode_turns(
    messages: Sequence[Message], cache_control: CacheControl | None, recipient: _Recipient
) -> list[dict[str, Any]]:
    """The transcript as alternating turns; in a user turn, tool results come before text.

    At a cache breakpoint, the server caches the prompt up to there (tools and system come first; four breakpoints
    are allowed, https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching). One is set after the last
    message that no later request changes, and one where the previous request had it, since the server looks back
    only 20 blocks from a breakpoint.
    """
    stable_count = messages.stable_count if isinstance(messages, Transcript) else len(messages)
    turns: list[dict[str, Any]] = []
    _append_messages(turns, islice(messages, stable_count), recipient)
    return _with_cache_control(turns, islice(messages, stable_count, None), cache_control, recipient)


def _with_cache_control(
    turns: list[dict[str, Any]], tail: Iterable[Message], cache_control: CacheControl | None, recipient: _Recipient
) -> list[dict[str, Any]]:
    """The turns with cache breakpoints, followed by the messages of this request only."""
    if cache_control is not None:
        for blocks in _cacheable_contents(turns):
            blocks[-1] = blocks[-1] | {"cache_control": cache_control}
    _append_messages(turns, tail, recipient)
    return turns


def _append_messages(turns: list[dict[str, Any]], messages: Iterable[Message], recipient: _Recipient) -> None:
    for message in messages:
        if message.role is Role.SYSTEM:
            continue
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        if role == "assistant":
            blocks = _encode_assistant(message, recipient.origin)
        else:  # the result of a failed call may contain text only (https://github.com/vellum-ai/vellum-assistant/pull/18387)
            blocks = _encode_user(visible_message(message, recipient.images and not message.is_error, recipient.files))
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
            if role == "user":
                turns[-1]["content"].sort(key=_is_not_tool_result)
        else:
            turns.append({"role": role, "content": blocks})


def _cacheable_contents(turns: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The content of the last turn and of the user turn before it; thinking cannot have a breakpoint."""
    users: list[list[dict[str, Any]]] = [turn["content"] for turn in turns[-3:] if turn["role"] == "user"]
    last: list[dict[str, Any]] = turns[-1]["content"] if turns else []
    if not last or any(last is content for content in users[-1:]):
        return users[-2:]
    thinking = last[-1]["type"] in ("thinking", "redacted_thinking")
    return users[-1:] if thinking else [*users[-1:], last]


def _encode_user(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL and message.tool_call_id is not None:
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        result["content"] = message.content if message.content.strip() else "(empty)"
        if message.images:
            result["content"] = [*_text_blocks(message.content), *_image_blocks(message)]
        return [result | {"is_error": True} if message.is_error else result]
    if message.is_laid_out:
        blocks = encode_parts(message, lambda text: {"type": "text", "text": text}, _image_block, _document_block)
        return [each for each in blocks if each.get("text", "-").strip()]  # the API rejects a blank text
    return [*map(_document_block, message.files), *_image_blocks(message), *_text_blocks(message.content)]


def _document_block(file: File) -> dict[str, Any]:
    source = {"type": "base64", "media_type": file.media_type, "data": file.data}
    return {"type": "document", "source": source} | ({"title": file.filename} if file.filename else {})


def _image_blocks(message: Message) -> list[dict[str, Any]]:
    return list(map(_image_block, message.images))


def _image_block(image: Image) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": image.media_type, "data": image.data}}


def _encode_assistant(message: Message, origin: str) -> list[dict[str, Any]]:
    """The blocks of a reply: unchanged if they came from the model that is called and still match the message."""
    plain = _text_blocks(message.content) + [_tool_use_block(call) for call in message.tool_calls]
    stored = [dict(as_object(block)) for block in as_list(own_extra(message, EXTRA_KEY, origin).get("blocks"))]
    if not stored:
        return plain
    text = "".join(str(block.get("text")) for block in stored if block.get("type") == "text")
    uses = [block for block in stored if block.get("type") == "tool_use"]
    if text == message.content and uses == [_tool_use_block(call) for call in message.tool_calls]:
        return stored
    return [block for block in stored if block.get("type") in ("thinking", "redacted_thinking")] + plain


def _is_not_tool_result(block: dict[str, Any]) -> bool:
    return str(block["type"]) != "tool_result"


def _text_blocks(text: str) -> list[dict[str, Any]]:
    """A text block; none for blank text, which the API rejects."""
    return [{"type": "text", "text": text}] if text.strip() else []


def _tool_use_block(call: ToolCall) -> dict[str, Any]:
    """A tool call as a block."""
    return {"type": "tool_use", "id": call.id, "name": safe_tool_name(call.name), "input": dict(call.arguments)}


_TEXT_FIELDS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The types of delta that extend a text, and the field with the text."""


@dataclass(slots=True)
class _Block:
    start: dict[str, Any]
    call_index: int
    texts: dict[str, TextAccumulator] = field(default_factory=dict[str, TextAccumulator])
    citations: list[object] = field(default_factory=list[object])

    def body(self) -> dict[str, Any]:
        block = dict(self.start)
        for key, text in self.texts.items():
            if key == "partial_json":  # gateways send the complete input at the start, and then an empty delta
                block["input"] = str(text) or block.get("input")
            else:
                block[key] = as_text(block.get(key)) + str(text)
        if self.citations:
            block["citations"] = [*as_list(block.get("citations")), *self.citations]
        return block


class AnthropicAccumulator(StreamAccumulator):
    """Accumulates the events of a message into the complete message.

    Attributes:
        closed: Whether ``message_stop`` has arrived. Gateways omit it after a stop reason
            (https://github.com/esengine/DeepSeek-Reasonix/pull/8756), so a stream is complete with either of them.
    """

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        self._by_index: dict[object, _Block] = {}
        self._call_count = 0

    @property
    def complete(self) -> bool:
        """Whether the stop reason or ``message_stop`` has arrived."""
        return self.closed or bool(self._top.get("stop_reason"))

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Add one event; yields the parts of the reply in it."""
        match event.get("type"):
            case "message_start":
                message = as_object(event.get("message"))
                self._merge_top_level(message)
                for block in map(as_object, as_list(message.get("content"))):
                    yield from self._start_block(None, block)
            case "content_block_start":
                yield from self._start_block(event.get("index"), as_object(event.get("content_block")))
            case "content_block_delta":
                yield from self._apply_delta(event.get("index"), as_object(event.get("delta")))
            case "message_delta":
                self._merge_top_level(as_object(event.get("delta")) | {"usage": event.get("usage")})
            case "message_stop":
                self.closed = True
            case _:  # ping, content_block_stop, and unknown events
                pass

    def body(self) -> object:
        """The complete message."""
        return self._top | {"content": [block.body() for block in self._blocks], "usage": self._usage}

    def _merge_top_level(self, message: dict[str, Any]) -> None:
        """Merge the top-level fields of a message; later token counts are totals, and replace earlier ones."""
        self._usage |= {k: v for k, v in as_object(message.get("usage")).items() if v is not None}
        self._top |= {k: v for k, v in message.items() if k not in ("usage", "content") and v is not None}

    def _start_block(self, index: object, start: dict[str, Any]) -> Iterator[StreamChunk]:
        block = _Block(start, self._call_count)
        self._blocks.append(block)
        if isinstance(index, int):
            self._by_index[index] = block
        if start.get("type") == "tool_use":
            self._call_count += 1
            yield ToolCallChunk(block.call_index, as_text(start.get("name")), "")
        elif text := as_text(start.get("text")):
            yield TextChunk(text)

    def _apply_delta(self, index: object, delta: dict[str, Any]) -> Iterator[StreamChunk]:
        block = self._by_index.get(index) if isinstance(index, int) else None
        if block is None and self._blocks and not isinstance(index, int):
            block = self._blocks[-1]
        if block is None:
            block = _Block({"type": "text", "text": ""}, self._call_count)  # a gateway that does not start blocks
            self._blocks.append(block)
            if isinstance(index, int):
                self._by_index[index] = block
        kind = as_text(delta.get("type"))
        if kind == "citations_delta":
            block.citations.append(delta.get("citation"))
        key = _TEXT_FIELDS.get(kind)
        if key is None:
            return
        shown = block.texts.setdefault(key, TextAccumulator()).add(delta.get(key))
        if not shown:
            return
        if key == "text":
            yield TextChunk(shown)
        elif key == "thinking":
            yield ReasoningChunk(shown)
        elif key == "partial_json" and block.start.get("type") == "tool_use":
            yield ToolCallChunk(block.call_index, as_text(block.start.get("name")), shown)
