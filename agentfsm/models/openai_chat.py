"""``OpenAIChat``: the chat completions API, as implemented by OpenAI, llama.cpp, vLLM, OpenRouter and many others.

``encode`` and ``decode`` map requests and responses, ``ChatAccumulator`` reads streams. Servers differ most in their
streams; the reason for each rule is next to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.loop.messages import MAX_COUNT, FinishReason, Message, Reply, Role, ToolCall
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.http_model import HttpModel, takes_files
from agentfsm.models.output_schema import DEFAULT_SUPPORT, SchemaSupport, output_schema_block, wants_json_object
from agentfsm.models.role_rules import TEMPLATE_ROLES, AlternatingEncoder, RoleRules, short_call_id
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
    labelled_images,
    openai_usage,
    own_extra,
    parse_tool_calls,
    repairs_of_end,
    safe_tool_name,
    tool_choice,
)
from agentfsm.models.wire_json import as_list, as_object, as_text, dumps

EXTRA_KEY = "openai_chat"
"""The key in ``Message.extra`` of what must be sent back to the model that sent it.

DeepSeek rejects a transcript with a call but without the reasoning before it
(https://api-docs.deepseek.com/guides/thinking_mode), Gemini one without the signature of the call
(https://ai.google.dev/gemini-api/docs/thought-signatures), and OpenRouter passes both on
(https://openrouter.ai/docs/use-cases/reasoning-tokens). It is stored only for replies with calls: others do not need
it, and DeepSeek's older models reject it.
"""

REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details")
"""The fields of a message that hold reasoning."""

_STREAMED_REASONING_KEYS = ("reasoning_content", "reasoning")
"""The fields with reasoning as text: DeepSeek and llama.cpp use the first, OpenRouter and vLLM the second."""

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Finish reasons; whether the model calls tools is read from the calls, since servers disagree."""

_REASONING_MODEL_PATTERN = re.compile(r"(.*[/.])?(gpt-5|o[1-9](-|$))")
"""OpenAI's models that reject ``max_tokens``, wherever they run; other servers may know that name alone.

(https://platform.openai.com/docs/api-reference/chat/create, https://github.com/mnfst/llm-gateway/issues/1878)
"""

_MODELS_WITHOUT_SCHEMAS = re.compile(r"gpt-3\.5|gpt-4(-|$)|gpt-4o-2024-05-13|chatgpt-|o1-(mini|preview)")
"""OpenAI's models from before structured outputs (https://platform.openai.com/docs/guides/structured-outputs)."""

_ABORTED_REASONS = ("abort", "error")
"""The finish reasons of vLLM and OpenRouter for a reply that the server interrupted."""


_REUSED_INDEX = "the server streamed several calls at one index; each new id or name began another call"
"""The repair of such a stream, in ``Reply.repairs``."""


class OpenAIChat(HttpModel):
    """A client of a chat completions API.

    ::

        OpenAIChat("gpt-5-mini")
        OpenAIChat("llama3.2", provider="ollama")
        OpenAIChat("my-model", base_url="http://127.0.0.1:8000/v1", api_key="...")

    Arguments and errors are those of ``HttpModel``; a ``base_url`` includes its ``/v1``.
    """

    _default_provider = "openai"

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        return reject_prompt_cache(settings, "the chat completions API")

    def _path(self) -> str:
        return "/chat/completions"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        row = self._endpoint.provider
        body = encode(
            request,
            self.model,
            self.settings,
            official=self._is_official,
            origin=self._origin,
            schemas=self._schema_support(),
            roles=self._role_rules(),
        )
        if row.renamed:
            body = {row.renamed.get(name, name): value for name, value in body.items()}
        if not stream:
            return body
        # Without the option there is no usage at all (https://platform.openai.com/docs/api-reference/chat/create).
        return {"stream": True} | ({"stream_options": {"include_usage": True}} if row.stream_usage else {}) | body

    def _role_rules(self) -> RoleRules:
        return TEMPLATE_ROLES if self._known_row is None else self._known_row.roles

    def _schema_support(self) -> SchemaSupport:
        if self._is_official and _MODELS_WITHOUT_SCHEMAS.match(self.model):
            return SchemaSupport(mode="none")
        return DEFAULT_SUPPORT if self._known_row is None else self._known_row.schemas

    def _message_encoder(self) -> tuple[str, MessageEncoder]:
        return "messages", _new_encoder(
            self._origin, self.settings.images, takes_files(self.settings, self._sends_files), self._role_rules()
        )

    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        return decode(body, used_ids=used_ids, origin=self._origin)

    def _accumulator(self) -> StreamAccumulator:
        return ChatAccumulator()


def encode(
    request: ModelRequest,
    model: str,
    settings: ModelSettings | None = None,
    *,
    official: bool = False,
    origin: str = "",
    schemas: SchemaSupport = DEFAULT_SUPPORT,
    roles: RoleRules = TEMPLATE_ROLES,
) -> dict[str, Any]:
    """The body of a request."""
    settings = settings or ModelSettings()
    messages = _new_encoder(origin, settings.images, bool(settings.files), roles).encode_all(request.messages)
    body: dict[str, Any] = {"model": model, "messages": messages}
    if request.tools:
        body["tools"] = [{"type": "function", "function": function_spec(tool)} for tool in request.tools]
        if choice := tool_choice(settings.tool_choice, request.tools):
            named = {"type": "function", "function": {"name": choice}}
            body["tool_choice"] = choice if choice in TOOL_CHOICE_MODES else named
    if cap := request.max_output_tokens or settings.max_tokens:
        reasoning = _REASONING_MODEL_PATTERN.match(model) is not None
        body["max_completion_tokens" if official or reasoning else "max_tokens"] = cap
    if schema := output_schema_block(request, schemas):
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wants_json_object(request, schemas):
        body["response_format"] = {"type": "json_object"}
    sampling = settings.model_dump(include={"temperature", "top_p", "seed", "reasoning_effort"}, exclude_none=True)
    stop = {"stop": list(settings.stop)} if settings.stop else {}
    return body | sampling | stop | settings.extra_body


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply in a response body.

    Raises:
        ProviderError: The body has no message.
        TransientProviderError: The server interrupted the reply, or does not say that it has ended.
    """
    choice = as_object(next(iter(as_list(as_object(body).get("choices"))), None))
    message = as_object(choice.get("message"))
    if not message:
        raise ProviderError("the response has no choices[0].message; does base_url speak chat completions?")
    text, refusal = _decode_content(message.get("content"))
    refusal = message.get("refusal") if isinstance(message.get("refusal"), str) else refusal
    raw = [as_object(call) for call in _items(message.get("tool_calls"))]
    functions = [(call.get("id"), as_object(call.get("function"))) for call in raw]
    if message.get("function_call") and not functions:  # the deprecated format of a call, without an id
        functions = [(None, as_object(message["function_call"]))]
    calls = parse_tool_calls([(id_, f.get("name"), f.get("arguments")) for id_, f in functions], used_ids)
    reason = as_text(choice.get("finish_reason")).lower()  # some gateways pass on MAX_TOKENS
    if reason in _ABORTED_REASONS:
        raise TransientProviderError(f"the server interrupted the reply ({reason})")
    usage = as_object(as_object(body).get("usage"))
    return Reply(
        message=Message(
            Role.ASSISTANT, text or refusal or "", calls, extra=_provider_extra(message, raw, calls, origin)
        ),
        finish_reason=final_finish_reason(_FINISH_REASONS.get(reason, FinishReason.STOP), calls, refusal),
        usage=openai_usage(usage, "prompt_tokens", "completion_tokens", _reported_cost_usd(usage)),
        refusal=refusal or None,
        model=str(as_object(body).get("model") or ""),
        repairs=repairs_of_end(reason, text or refusal, calls),
    )


def _provider_extra(
    message: dict[str, Any], raw: list[dict[str, Any]], calls: tuple[ToolCall, ...], origin: str
) -> dict[str, Any] | None:
    """The parts of a reply that must be sent back unchanged."""
    stored = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    signatures = [{"extra_content": call["extra_content"]} if call.get("extra_content") else None for call in raw]
    if any(signatures):
        stored["calls"] = signatures
    return {EXTRA_KEY: {"voice": origin} | stored} if stored and calls else None


def _reported_cost_usd(usage: dict[str, Any]) -> float:
    """The cost that OpenRouter reports, in USD (https://openrouter.ai/docs/use-cases/usage-accounting)."""
    cost = usage.get("cost")
    if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 < cost <= MAX_COUNT:
        return float(cost)
    return 0.0


def _decode_content(content: object) -> tuple[str, str | None]:
    """The text of a message and its refusal; content is null, a text, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", None
    if not isinstance(content, list):
        raise ProviderError(f"the content of the message is {type(content).__name__}, neither text nor parts")
    texts = [{"text": part} if isinstance(part, str) else part for part in cast("list[object]", content)]
    parts = [as_object(part) for part in texts]
    text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    refusal = "".join(part["refusal"] for part in parts if isinstance(part.get("refusal"), str))
    return text, refusal or None


def _items(value: object) -> list[Any]:
    """The value if it is a list, or a list of it if it is one object, so that no call is lost."""
    return [value] if isinstance(value, dict) else as_list(value)


def _new_encoder(origin: str, images: bool, files: bool, roles: RoleRules) -> PerMessageEncoder | AlternatingEncoder:
    """An encoder for an empty transcript.

    Images go into a user message after the last result of a batch: a tool message accepts text alone
    (https://github.com/OpenHands/OpenHands/issues/7700), and nothing may come between the results of one batch.
    """
    encode_message = partial(_encode_message, origin=origin, call_id=short_call_id if roles.short_call_ids else str)
    items = PerMessageEncoder(encode_message, images, _encode_images if images else None, files)
    return AlternatingEncoder(items, one_call=roles.one_call) if roles.alternate else items


def _encode_images(results: list[Message]) -> list[dict[str, Any]]:
    """The images that tools returned, as a user message."""
    parts: list[dict[str, Any]] = []
    for label, image in labelled_images(results):
        parts += [{"type": "text", "text": label}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    return [{"role": "user", "content": parts}] if parts else []


def _encode_user(message: Message) -> dict[str, Any]:
    if not message.images and not message.files:
        return {"role": "user", "content": message.content}
    content = encode_parts(
        message,
        lambda text: {"type": "text", "text": text},
        lambda image: {"type": "image_url", "image_url": {"url": data_url(image)}},
        lambda file: {"type": "file", "file": {"filename": filename_of(file), "file_data": data_url(file)}},
    )
    return {"role": "user", "content": content}


def _encode_message(message: Message, origin: str, call_id: Callable[[str], str]) -> list[dict[str, Any]]:
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [{"role": "tool", "tool_call_id": call_id(message.tool_call_id), "content": message.content}]
        case Role.TOOL | Role.USER:
            return [_encode_user(message)]
        case Role.SYSTEM:
            return [{"role": "system", "content": message.content}]
        case Role.ASSISTANT if not message.tool_calls:
            return [{"role": "assistant", "content": message.content}]
        case Role.ASSISTANT:
            return [_encode_tool_calls(message, origin, call_id)]


def _encode_tool_calls(message: Message, origin: str, call_id: Callable[[str], str]) -> dict[str, Any]:
    """A reply with calls, with its reasoning and signatures if they came from the model that is called."""
    stored = own_extra(message, EXTRA_KEY, origin)
    signatures = as_list(stored.get("calls"))
    signatures = signatures if len(signatures) == len(message.tool_calls) else [None] * len(message.tool_calls)
    calls = [
        {
            "id": call_id(call.id),
            "type": "function",
            "function": {"name": safe_tool_name(call.name), "arguments": dumps(call.arguments)},
        }
        | as_object(signature)
        for call, signature in zip(message.tool_calls, signatures, strict=True)
    ]
    reasoning = {key: stored[key] for key in REASONING_KEYS if key in stored}
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls} | reasoning


@dataclass(slots=True)
class _Call:
    """A tool call, as far as it has arrived."""

    position: int
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments_text: TextAccumulator = field(default_factory=TextAccumulator)
    arguments_value: object = None
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def has_arguments(self) -> bool:
        """Whether any part of the arguments has arrived."""
        return bool(self.arguments_text) or self.arguments_value is not None

    @property
    def complete(self) -> bool:
        """Whether the arguments are complete, so that further arguments belong to another call."""
        if self.arguments_value is not None:
            return True
        if not self.arguments_text.last_chunk.rstrip().endswith("}"):
            return False
        try:
            json.loads(str(self.arguments_text))
        except (ValueError, RecursionError):
            return False
        return True

    def body(self) -> dict[str, Any]:
        arguments = (
            self.arguments_value
            if self.arguments_value is not None and not self.arguments_text
            else str(self.arguments_text)
        )
        return {"id": self.id, "function": {"name": self.name, "arguments": arguments}, **self.extra_fields}


class _CallTable:
    """Finds the call that a delta belongs to.

    The index identifies the call where it is present and right. It may be missing (Gemini,
    https://github.com/openai/openai-python/issues/2806), the same for all calls
    (https://github.com/ai-dynamo/dynamo/pull/4723), or count from 1. Ids come once, with every delta
    (https://github.com/langchain4j/langchain4j/pull/4544), or new with every delta
    (https://github.com/NousResearch/hermes-agent/pull/106943); names come once or with every delta
    (https://github.com/NousResearch/hermes-agent/pull/11984). So:

    1. A delta continues the call that has its id, else the one at its index, else the last one.
    2. A delta with a name starts a call at a new index, or if rule 1 finds a call with another name, or one whose
       arguments are complete while the delta has more.
    3. A delta with a name and another id than the call that rule 1 finds starts a call if that one's arguments are
       complete or neither has any, unless ids have changed within a call of this stream.
    4. A delta with an id, no name and a new index starts a call; its name comes later.

    Attributes:
        calls: The calls, in the order in which they started.
        index_reused: Whether a call has started at the index of another.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.index_reused = False
        self._ids_change = False
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def call_for(self, index: object, call_id: str, name: str, arguments: object) -> _Call:
        """The call that a delta belongs to, which may be a new one."""
        position = index if isinstance(index, int) else None
        call = self._existing_call(position, call_id, name)
        if call is not None and self._starts_another(call, call_id, name, arguments):
            self.index_reused = self.index_reused or position is not None
            call = None
        if call is None:
            call = _Call(len(self.calls), position)
            self.calls.append(call)
        elif call_id and call.id and call_id != call.id:
            self._ids_change = True
        if position is not None:
            self._by_index[position] = call
        if call_id:
            self._by_id[call_id] = call
        call.id = call.id or call_id
        call.name = call.name or name
        return call

    def _starts_another(self, call: _Call, call_id: str, name: str, arguments: object) -> bool:
        """Whether a delta that would continue a call starts another one."""
        if not (name and call.name):
            return False
        complete, blank = call.complete, _is_blank(arguments)
        if name != call.name or (complete and not blank):
            return True
        if not call_id or not call.id or call_id == call.id or self._ids_change:
            return False
        return complete or (blank and not call.has_arguments)

    def _existing_call(self, position: int | None, call_id: str, name: str) -> _Call | None:
        fresh = position is not None and position not in self._by_index
        if fresh and name:
            return None
        if call_id in self._by_id:
            return self._by_id[call_id]
        if position is None:
            return None if not self.calls or (call_id and name) else self.calls[-1]
        if fresh:
            return None if not self.calls or call_id else self.calls[-1]
        return self._by_index[position]

    def ordered(self) -> list[_Call]:
        """The calls by their indexes if each has its own, else in the order in which they started."""
        indexes = {call.index for call in self.calls}
        if None in indexes or len(indexes) < len(self.calls):
            return self.calls
        return sorted(self.calls, key=lambda call: call.index or 0)


@dataclass(slots=True)
class _ReasoningDetail:
    """One of OpenRouter's reasoning blocks, as far as it has arrived; its texts are joined once, at the end.

    (https://openrouter.ai/docs/use-cases/reasoning-tokens)
    """

    values: dict[str, Any]
    texts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def continues_with(self, delta: dict[str, Any]) -> bool:
        """Whether a delta belongs to this block."""
        return all(self.values.get(key) == delta.get(key) for key in ("type", "index"))

    def add(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            start = self.values.get(key)
            if key in ("text", "summary", "data") and isinstance(value, str) and isinstance(start, str):
                self.texts.setdefault(key, [start]).append(value)
            elif value is not None:
                self.values[key] = value
                self.texts.pop(key, None)

    def body(self) -> dict[str, Any]:
        return self.values | {key: "".join(chunks) for key, chunks in self.texts.items()}


class ChatAccumulator(StreamAccumulator):
    """Accumulates the chunks of a chat completion into a complete one.

    Attributes:
        closed: Whether ``[DONE]`` has arrived. Some servers omit it, and some send usage after the finish reason, so a
            stream is complete with either of them (https://github.com/BerriAI/litellm/issues/40260).
    """

    def __init__(self) -> None:
        self._text, self._refusal = TextAccumulator(), TextAccumulator()
        self._reasoning = {key: TextAccumulator() for key in _STREAMED_REASONING_KEYS}
        self._details: list[_ReasoningDetail] = []
        self._calls = _CallTable()
        self._legacy_call: _Call | None = None
        self._finish_reason: str | None = None
        self._top: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether the finish reason or ``[DONE]`` has arrived."""
        return self.closed or self._finish_reason is not None

    @property
    def repairs(self) -> tuple[str, ...]:
        """How the stream broke the API's rules, and how it was read nevertheless."""
        return (_REUSED_INDEX,) if self._calls.index_reused else ()

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Add one chunk; yields the parts of the reply in it."""
        for key in ("model", "usage"):  # usage may come last, in a chunk without choices
            if event.get(key):
                self._top[key] = event[key]
        for choice in map(as_object, as_list(event.get("choices"))):
            if choice.get("index") in (None, 0):
                # Some servers stream one complete response as a single chunk, with a message in place of a delta;
                # others repeat in the last chunk what they have streamed.
                whole = {} if self._text or self._calls.calls else as_object(choice.get("message"))
                yield from self._apply_delta(as_object(choice.get("delta")) or whole)
                self._finish_reason = as_text(choice.get("finish_reason")) or self._finish_reason

    def body(self) -> object:
        """The complete chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._refusal:
            message["refusal"] = str(self._refusal)
        message |= {key: str(text) for key, text in self._reasoning.items() if text}
        if self._details:
            message["reasoning_details"] = [detail.body() for detail in self._details]
        if self._calls.calls:
            message["tool_calls"] = [call.body() for call in self._calls.ordered()]
        elif self._legacy_call is not None:
            message["function_call"] = self._legacy_call.body()["function"]
        return {"choices": [{"message": message, "finish_reason": self._finish_reason}], **self._top}

    def _apply_delta(self, delta: dict[str, Any]) -> Iterator[StreamChunk]:
        reasoning = [text.add(delta.get(key)) for key, text in self._reasoning.items()]
        if shown := next(filter(None, reasoning), ""):  # some servers send the same text in both
            yield ReasoningChunk(shown)
        for detail in filter(None, map(as_object, as_list(delta.get("reasoning_details")))):
            if self._details and self._details[-1].continues_with(detail):
                self._details[-1].add(detail)
            else:
                self._details.append(_ReasoningDetail(dict(detail)))
        content = delta.get("content")
        for part in [content] if isinstance(content, str) else as_list(content):
            if shown := self._text.add(part if isinstance(part, str) else as_object(part).get("text")):
                yield TextChunk(shown)
            self._refusal.add(as_object(part).get("refusal"))
        self._refusal.add(delta.get("refusal"))
        for part in map(as_object, _items(delta.get("tool_calls"))):
            function = as_object(part.get("function"))
            name = as_text(function.get("name"))
            call = self._calls.call_for(part.get("index"), as_text(part.get("id")), name, function.get("arguments"))
            more = {k: v for k, v in part.items() if k not in ("id", "index", "function", "type")}
            call.extra_fields |= {k: v for k, v in more.items() if v is not None}
            yield from _append_arguments(call, function.get("arguments"), bool(name))
        if function := as_object(delta.get("function_call")):
            self._legacy_call = self._legacy_call or _Call(0)
            self._legacy_call.name = self._legacy_call.name or as_text(function.get("name"))
            yield from _append_arguments(self._legacy_call, function.get("arguments"), "name" in function)


def _is_blank(arguments: object) -> bool:
    return not arguments.strip() if isinstance(arguments, str) else arguments is None


def _append_arguments(call: _Call, arguments: object, named: bool) -> Iterator[StreamChunk]:
    """Append to the arguments of a call: text, a complete object (Ollama and others), or nothing."""
    shown = ""
    if isinstance(arguments, str):
        shown = call.arguments_text.add(arguments)
    elif arguments is not None:
        call.arguments_value = arguments
        shown = json.dumps(arguments)
    if shown or named:
        yield ToolCallChunk(call.position, call.name, shown)
