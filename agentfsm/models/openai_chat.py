"""``OpenAIChat``: the chat completions API, as OpenAI, llama.cpp, vLLM, OpenRouter and many others implement it.

``encode`` and ``decode`` are the pure and complete mapping, ``ChatAccumulator`` reads streams. Servers agree on little
in streams; the reason for each rule stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk, ToolSpec
from agentfsm.models.http_client import HttpOptions
from agentfsm.models.http_model import HttpModel
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
    labelled_images,
    mark_unpriced,
    parse_tool_calls,
    safe_tool_name,
    token_count,
    visible_message,
)

__all__ = [
    "EXTRA_KEY",
    "REASONING_KEYS",
    "ChatAccumulator",
    "ChatMessageEncoder",
    "OpenAIChat",
    "decode",
    "encode",
    "encode_messages",
    "is_strict_schema",
    "reject_prompt_cache",
]


_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Words for why a model stopped; whether it calls tools is read from the calls, since servers disagree."""

_ABORTED_REASONS = ("abort", "error")
"""What vLLM and OpenRouter say where a reply was cut off on their side."""

_STRICT_KEYWORDS = frozenset(
    {
        *("$defs", "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "items"),
        *("properties", "required", "title", "type"),
    }
)
"""The keywords that a strict schema may use (OpenAI, structured outputs), less those with small print."""


class OpenAIChat(HttpModel):
    """A model behind a chat completions interface.

    ::

        OpenAIChat("gpt-5-mini")
        OpenAIChat("llama3.2", provider="ollama")
        OpenAIChat("my-model", base_url="http://127.0.0.1:8000/v1", api_key="...")

    Args:
        model: The model's name at its provider.
        provider: The row of ``providers.PROVIDERS`` to take the address and the key's variable from.
        base_url: Another address, with its ``/v1``. It gets no key but ``api_key``.
        api_key: The key; else the one in the provider's variable.
        settings: How the model is asked to answer.
        http: How calls travel.

    Raises:
        MissingKeyError: The provider needs a key and there is none.
        ConfigurationError: The provider, the address or the key cannot be one, or the wire has no word for a
            setting.
    """

    def __init__(
        self,
        model: str,
        *,
        provider: str = "openai",
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        settings: ModelSettings | None = None,
        http: HttpOptions | None = None,
    ) -> None:
        self._provider = provider
        super().__init__(model, base_url=base_url, api_key=api_key, settings=settings, http=http)

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        return reject_prompt_cache(settings)

    @property
    def _is_official(self) -> bool:
        return self._endpoint.provider.name == "openai" and self._endpoint.is_official

    def _path(self) -> str:
        return "/chat/completions"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = encode(request, self.model, self.settings, official=self._is_official, origin=self._origin)
        # Without the option, no usage comes at all (https://platform.openai.com/docs/api-reference/chat/create).
        return {"stream": True, "stream_options": {"include_usage": True}} | body if stream else body

    def _message_encoder(self, request: ModelRequest) -> tuple[str, MessageEncoder]:
        return "messages", ChatMessageEncoder(self._origin, self.settings.images)

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
) -> dict[str, Any]:
    """The body of a request.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer.
        official: Whether the server is OpenAI's own. It alone wants ``max_completion_tokens``, and it alone
            is sure to weigh tools against a response format: Ollama never calls a tool beside one, and
            llama.cpp refuses the two together. The instructions name the schema anyway.
        origin: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "messages": encode_messages(request.messages, origin, settings.images)}
    if request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if choice := _encode_tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    if cap := request.max_output_tokens or settings.max_tokens:
        body["max_completion_tokens" if official else "max_tokens"] = cap
    if request.output_schema is not None and (official or not request.tools):
        schema = {
            "name": safe_tool_name(request.output_name),
            "schema": dict(request.output_schema),
            "strict": is_strict_schema(request.output_schema),
        }
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    wanted = settings.model_dump(include={"temperature", "top_p", "seed", "reasoning_effort"}, exclude_none=True)
    stop = {"stop": list(settings.stop)} if settings.stop else {}
    return body | wanted | stop | settings.extra_body


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
    choice = as_object(next(iter(as_list(as_object(body).get("choices"))), None))
    message = as_object(choice.get("message"))
    if not message:
        raise ProviderError("the answer holds no choices[0].message; does base_url speak chat completions?")
    text, refusal = _decode_content(message.get("content"))
    refusal = message.get("refusal") if isinstance(message.get("refusal"), str) else refusal
    raw = [as_object(call) for call in as_list(message.get("tool_calls"))]
    wishes = [(call.get("id"), as_object(call.get("function"))) for call in raw]
    if message.get("function_call") and not wishes:  # the wire's first form of a call, without an id
        wishes = [(None, as_object(message["function_call"]))]
    calls = parse_tool_calls([(id_, f.get("name"), f.get("arguments")) for id_, f in wishes], used_ids)
    why = finish_reason(choice, "finish_reason")
    if why in _ABORTED_REASONS:
        raise TransientProviderError(f"the server gave up on the reply ({why})")
    finish = _FINISH_REASONS.get(why, FinishReason.STOP)
    if finish is FinishReason.STOP and calls:
        finish = FinishReason.TOOL_CALLS
    if refusal:
        finish = FinishReason.REFUSAL
    usage = as_object(as_object(body).get("usage"))
    prompt = as_object(usage.get("prompt_tokens_details"))
    return Reply(
        message=Message(
            Role.ASSISTANT, text or refusal or "", calls, extra=_provider_extra(message, raw, calls, origin)
        ),
        finish_reason=finish,
        usage=mark_unpriced(
            Usage(
                input_tokens=token_count(usage, "prompt_tokens"),
                output_tokens=token_count(usage, "completion_tokens"),
                cached_tokens=token_count(prompt, "cached_tokens"),
                written_tokens=token_count(prompt, "cache_write_tokens"),
                reasoning_tokens=token_count(as_object(usage.get("completion_tokens_details")), "reasoning_tokens"),
                cost_usd=_reported_cost_usd(usage),
            )
        ),
        refusal=refusal or None,
        model=str(as_object(body).get("model") or ""),
    )


def _provider_extra(
    message: dict[str, Any], raw: list[dict[str, Any]], calls: tuple[ToolCall, ...], origin: str
) -> dict[str, Any] | None:
    """What of a reply must come back, in the words in which it came."""
    kept = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    beside = [{"extra_content": call["extra_content"]} if call.get("extra_content") else None for call in raw]
    if any(beside):
        kept["calls"] = beside
    return {EXTRA_KEY: {"voice": origin} | kept} if kept and calls else None


def _reported_cost_usd(usage: dict[str, Any]) -> float:
    """What OpenRouter says that the call cost, in USD (https://openrouter.ai/docs/use-cases/usage-accounting)."""
    cost = usage.get("cost")
    return float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) and cost > 0 else 0.0


def _encode_tool(tool: ToolSpec) -> dict[str, Any]:
    spec = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": spec}


def _encode_tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> object:
    if choice in (None, "auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}} if choice in {t.name for t in tools} else None


def _decode_content(content: object) -> tuple[str, str | None]:
    """The text of a message and its refusal; content is null, a text, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", None
    if not isinstance(content, list):
        raise ProviderError(f"the message's content is {type(content).__name__}, neither text nor parts")
    parts = [as_object(part) for part in cast("list[object]", content)]
    text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    refusal = "".join(part["refusal"] for part in parts if isinstance(part.get("refusal"), str))
    return text, refusal or None


def reject_prompt_cache(settings: ModelSettings, wire: str = "the chat completions wire") -> ModelSettings:
    """The settings, for a wire whose servers keep prompts by themselves.

    Raises:
        ConfigurationError: They say how long a prompt is to be kept.
    """
    if settings.prompt_cache not in (None, "off"):
        raise ConfigurationError(f"{wire} has no prompt_cache: its servers keep prompts by themselves")
    return settings


def is_strict_schema(schema: object, *, root: bool = True) -> bool:
    """Whether OpenAI takes a schema as strict: closed objects, all properties required, plain keywords."""
    if not isinstance(schema, Mapping):
        return True
    node = cast("Mapping[str, Any]", schema)
    if not _STRICT_KEYWORDS.issuperset(node) or (root and node.get("type") != "object"):
        return False
    if node.get("type") == "object" or "properties" in node:
        properties = as_object(node.get("properties"))
        if node.get("additionalProperties") is not False or set(as_list(node.get("required"))) != set(properties):
            return False
    named = (*as_object(node.get("properties")).values(), *as_object(node.get("$defs")).values())
    return all(is_strict_schema(s, root=False) for s in (*named, *as_list(node.get("anyOf")), node.get("items")))


EXTRA_KEY = "openai_chat"
"""Where ``Message.extra`` keeps what must come back to whoever said it.

DeepSeek refuses a call's transcript without the reasoning before it
(https://api-docs.deepseek.com/guides/thinking_mode), Gemini one without the signature beside the call
(https://ai.google.dev/gemini-api/docs/thought-signatures), and OpenRouter passes both on
(https://openrouter.ai/docs/use-cases/reasoning-tokens). It is kept for replies with calls alone: elsewhere
none needs it, and DeepSeek's older models refuse it.
"""

REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details")


class ChatMessageEncoder(PerMessageEncoder):
    """A transcript, written as it grows.

    Pictures stand in a user's message behind the last result of a batch: a tool's message takes text alone
    (https://github.com/OpenHands/OpenHands/issues/7700), and nothing may stand between the results of one batch.

    Args:
        origin: Who is asked.
        images: Whether they take pictures.
    """

    def __init__(self, origin: str, images: bool) -> None:
        super().__init__(
            lambda message: _encode_message(visible_message(message, images), origin),
            _encode_images if images else None,
        )


def encode_messages(messages: Iterable[Message], origin: str, images: bool) -> list[dict[str, Any]]:
    """All of a transcript. Arguments as for ``ChatMessageEncoder``."""
    return ChatMessageEncoder(origin, images).encode_all(messages)


def _encode_images(results: list[Message]) -> list[dict[str, Any]]:
    """What tools showed, as a user's message."""
    parts: list[dict[str, Any]] = []
    for words, image in labelled_images(results):
        parts += [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    return [{"role": "user", "content": parts}] if parts else []


def _encode_user(message: Message) -> dict[str, Any]:
    if not message.images:
        return {"role": "user", "content": message.content}
    text = [{"type": "text", "text": message.content}] if message.content else []
    pictures = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in message.images]
    return {"role": "user", "content": [*text, *pictures]}


def _encode_message(message: Message, origin: str) -> list[dict[str, Any]]:
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [{"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}]
        case Role.TOOL | Role.USER:
            return [_encode_user(message)]
        case Role.SYSTEM:
            return [{"role": "system", "content": message.content}]
        case Role.ASSISTANT if not message.tool_calls:
            return [{"role": "assistant", "content": message.content}]
        case Role.ASSISTANT:
            return [_encode_tool_calls(message, origin)]


def _encode_tool_calls(message: Message, origin: str) -> dict[str, Any]:
    """A reply with calls, and what it brought along if they who said it are asked again."""
    kept = as_object((message.extra or {}).get(EXTRA_KEY))
    kept = kept if kept.get("voice") == origin else {}
    beside = as_list(kept.get("calls"))
    beside = beside if len(beside) == len(message.tool_calls) else [None] * len(message.tool_calls)
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": safe_tool_name(call.name), "arguments": dumps(call.arguments)},
        }
        | as_object(more)
        for call, more in zip(message.tool_calls, beside, strict=True)
    ]
    thoughts = {key: kept[key] for key in REASONING_KEYS if key in kept}
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls} | thoughts


_STREAMED_REASONING_KEYS = ("reasoning_content", "reasoning")
"""Where servers put what the model thinks: DeepSeek and llama.cpp the first, OpenRouter and vLLM the second."""


@dataclass(slots=True)
class _Call:
    """One call, as far as it has come."""

    position: int
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments_text: TextAccumulator = field(default_factory=TextAccumulator)
    arguments_value: object = None
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def complete(self) -> bool:
        """Whether the arguments are whole, so that more of them can only be another call's."""
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
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def call_for(self, index: object, call_id: str, name: str, arguments: object) -> _Call:
        """The call that a piece belongs to; a new one where it begins one."""
        place = index if isinstance(index, int) else None
        call = self._existing_call(place, call_id, name)
        if (
            call is not None
            and name
            and call.name
            and (name != call.name or (call.complete and not _is_blank(arguments)))
        ):
            call = None
        if call is None:
            call = _Call(len(self.calls), place)
            self.calls.append(call)
        if place is not None:
            self._by_index[place] = call
        if call_id:
            self._by_id[call_id] = call
        call.id = call.id or call_id
        call.name = call.name or name
        return call

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
        """The calls by their indexes, where each has its own, else in the order in which they began."""
        indexes = {call.index for call in self.calls}
        if None in indexes or len(indexes) < len(self.calls):
            return self.calls
        return sorted(self.calls, key=lambda call: call.index or 0)


@dataclass(slots=True)
class _ReasoningDetail:
    """One of OpenRouter's reasoning blocks, as far as it has come; its texts are joined once, at the end.

    (https://openrouter.ai/docs/use-cases/reasoning-tokens)
    """

    values: dict[str, Any]
    texts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def continues_with(self, piece: dict[str, Any]) -> bool:
        """Whether a piece is of this block, and of its kind."""
        return all(self.values.get(key) == piece.get(key) for key in ("type", "index"))

    def add(self, piece: dict[str, Any]) -> None:
        for key, value in piece.items():
            begun = self.values.get(key)
            if key in ("text", "summary", "data") and isinstance(value, str) and isinstance(begun, str):
                self.texts.setdefault(key, [begun]).append(value)
            elif value is not None:
                self.values[key] = value
                self.texts.pop(key, None)

    def body(self) -> dict[str, Any]:
        return self.values | {key: "".join(pieces) for key, pieces in self.texts.items()}


class ChatAccumulator:
    """Folds chat completion chunks into a chat completion.

    Attributes:
        closed: Whether ``[DONE]`` came. Servers leave it out, and send usage behind the finish reason, so a
            stream is whole with its finish reason and closed with its end
            (https://github.com/BerriAI/litellm/issues/40260).
    """

    def __init__(self) -> None:
        self.closed = False
        self._text, self._refusal = TextAccumulator(), TextAccumulator()
        self._reasoning = {key: TextAccumulator() for key in _STREAMED_REASONING_KEYS}
        self._details: list[_ReasoningDetail] = []
        self._calls = _CallTable()
        self._legacy_call: _Call | None = None
        self._finish_reason: str | None = None
        self._top: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether the finish reason came."""
        return self._finish_reason is not None

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Fold a chunk in."""
        for key in ("model", "usage"):  # usage may come last, in a chunk without choices
            if event.get(key):
                self._top[key] = event[key]
        for choice in map(as_object, as_list(event.get("choices"))):
            if choice.get("index") in (None, 0):
                # a message where a delta should be: servers that stream one whole answer as a single chunk
                yield from self._apply_delta(as_object(choice.get("delta")) or as_object(choice.get("message")))
                self._finish_reason = as_text(choice.get("finish_reason")) or self._finish_reason

    def body(self) -> object:
        """The chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._refusal:
            message["refusal"] = str(self._refusal)
        message |= {key: str(letters) for key, letters in self._reasoning.items() if letters}
        if self._details:
            message["reasoning_details"] = [detail.body() for detail in self._details]
        if self._calls.calls:
            message["tool_calls"] = [call.body() for call in self._calls.ordered()]
        elif self._legacy_call is not None:
            message["function_call"] = self._legacy_call.body()["function"]
        return {"choices": [{"message": message, "finish_reason": self._finish_reason}], **self._top}

    def _apply_delta(self, delta: dict[str, Any]) -> Iterator[StreamChunk]:
        thought = [letters.add(delta.get(key)) for key, letters in self._reasoning.items()]
        if shown := next(filter(None, thought), ""):  # some send both, saying the same
            yield ReasoningChunk(shown)
        for detail in filter(None, map(as_object, as_list(delta.get("reasoning_details")))):
            if self._details and self._details[-1].continues_with(detail):
                self._details[-1].add(detail)
            else:
                self._details.append(_ReasoningDetail(dict(detail)))
        content = delta.get("content")
        for part in [content] if isinstance(content, str) else map(as_object, as_list(content)):
            text = part if isinstance(part, str) else as_text(part.get("text"))
            if shown := self._text.add(text):
                yield TextChunk(shown)
            if isinstance(part, dict):
                self._refusal.add(part.get("refusal"))
        self._refusal.add(delta.get("refusal"))
        for piece in map(as_object, as_list(delta.get("tool_calls"))):
            function = as_object(piece.get("function"))
            name = as_text(function.get("name"))
            call = self._calls.call_for(piece.get("index"), as_text(piece.get("id")), name, function.get("arguments"))
            more = {k: v for k, v in piece.items() if k not in ("id", "index", "function", "type")}
            call.extra_fields |= {k: v for k, v in more.items() if v is not None}
            yield from _append_arguments(call, function.get("arguments"), bool(name))
        if first := as_object(delta.get("function_call")):
            self._legacy_call = self._legacy_call or _Call(0)
            self._legacy_call.name = self._legacy_call.name or as_text(first.get("name"))
            yield from _append_arguments(self._legacy_call, first.get("arguments"), "name" in first)


def _is_blank(arguments: object) -> bool:
    return not arguments.strip() if isinstance(arguments, str) else arguments is None


def _append_arguments(call: _Call, arguments: object, named: bool) -> Iterator[StreamChunk]:
    """Add to a call's arguments: text, an object all at once (Ollama and others), or nothing."""
    shown = ""
    if isinstance(arguments, str):
        shown = call.arguments_text.add(arguments)
    elif arguments is not None:
        call.arguments_value = arguments
        shown = json.dumps(arguments)
    if shown or named:
        yield ToolCallChunk(call.position, call.name, shown)
