"""``OllamaChat``: Ollama's native chat API, ``/api/chat``.

Ollama's OpenAI-compatible API cannot set the context length: ``num_ctx`` is ignored there, and a prompt longer than
the default is silently truncated (https://github.com/NousResearch/hermes-agent/issues/43900). Here it is an option like
any other::

    resolve("ollama:llama3.2", settings=ModelSettings(extra_body={"options": {"num_ctx": 32768}}))
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.http_model import HttpModel
from agentfsm.models.openai_chat import reject_prompt_cache
from agentfsm.models.providers import Endpoint
from agentfsm.models.settings import ModelSettings
from agentfsm.models.stream_reader import FrameParser, NDJSONParser, StreamAccumulator, TextAccumulator
from agentfsm.models.wire_format import (
    MessageEncoder,
    PerMessageEncoder,
    as_list,
    as_object,
    as_text,
    mark_unpriced,
    parse_tool_calls,
    safe_tool_name,
    token_count,
    visible_message,
)

__all__ = ["OllamaAccumulator", "OllamaChat", "decode", "encode"]

EXTRA_KEY = "ollama"
"""Where ``Message.extra`` keeps what the model thought, which thinking models want back beside their calls."""

_THINK_LEVELS: dict[str, object] = {"none": False, "minimal": "low", "xhigh": "high", "max": "high"}
"""Its words for effort, where they are not ours (https://docs.ollama.com/capabilities/thinking)."""


class OllamaChat(HttpModel):
    """A model that runs in Ollama (``ollama:llama3.2``), where ``OLLAMA_HOST`` says or at its own address.

    Args and errors are those of ``HttpModel``.
    """

    _provider = "ollama"

    def _resolve_endpoint(self, base_url: str | None, api_key: str | SecretStr | None) -> Endpoint:
        found = super()._resolve_endpoint(base_url, api_key)
        return replace(found, base_url=found.base_url.removesuffix("/v1"))  # where its compatible interface is

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        if settings.tool_choice not in (None, "auto"):
            raise ConfigurationError("Ollama's wire has no tool_choice")
        if not isinstance(settings.extra_body.get("options", {}), dict):
            raise ConfigurationError("extra_body: options must be an object")
        return reject_prompt_cache(settings, "Ollama's wire")

    def _path(self) -> str:
        return "/api/chat"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        return {"stream": stream} | encode(request, self.model, self.settings, origin=self._origin)

    def _message_encoder(self, request: ModelRequest) -> tuple[str, MessageEncoder]:
        return "messages", PerMessageEncoder(self._encode_visible)

    def _encode_visible(self, message: Message) -> list[dict[str, Any]]:
        return [_encode_message(visible_message(message, self.settings.images), self._origin)]

    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        return decode(body, used_ids=used_ids, origin=self._origin)

    def _accumulator(self) -> StreamAccumulator:
        return OllamaAccumulator()

    def _frame_parser(self, limit: int) -> FrameParser:
        return NDJSONParser(limit)

    def _is_not_stream(self, head: bytes) -> bool:
        return head[:1] in (b"<", b"[")


def encode(
    request: ModelRequest, model: str, settings: ModelSettings | None = None, *, origin: str = ""
) -> dict[str, Any]:
    """The body of a request, but for ``stream``.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer. ``options`` of ``extra_body`` are added to those that the
            other settings make.
        origin: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    messages = [_encode_message(visible_message(m, settings.images), origin) for m in request.messages]
    body: dict[str, Any] = {"model": model, "messages": messages}
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
            }
            for t in request.tools
        ]
    options: dict[str, Any] = settings.model_dump(include={"temperature", "top_p", "seed"}, exclude_none=True)
    if settings.stop:
        options["stop"] = list(settings.stop)
    if cap := request.max_output_tokens or settings.max_tokens:
        options["num_predict"] = cap
    if options := options | as_object(settings.extra_body.get("options")):
        body["options"] = options
    if request.output_schema is not None and not request.tools:  # with a format it calls no tool
        body["format"] = dict(request.output_schema)
    if (effort := settings.reasoning_effort) is not None:
        body["think"] = _THINK_LEVELS.get(effort, effort)
    return body | {k: v for k, v in settings.extra_body.items() if k != "options"}


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        used_ids: Call ids that the transcript uses already; a reply that repeats one gets another. Most versions
            of the server give none at all.
        origin: Who answered.

    Raises:
        ProviderError: The body lacks what a reply must hold.
        TransientProviderError: It does not say that the reply has ended.
    """
    top = as_object(body)
    message = as_object(top.get("message"))
    if not message:
        raise ProviderError("the answer holds no message; is Ollama at base_url?")
    if top.get("done") is not True:
        raise TransientProviderError("the server does not say that the reply has ended (it is not done)")
    wishes = [as_object(call) for call in as_list(message.get("tool_calls"))]
    functions = [as_object(wish.get("function")) for wish in wishes]
    raw = [(w.get("id"), f.get("name"), f.get("arguments")) for w, f in zip(wishes, functions, strict=True)]
    calls = parse_tool_calls(raw, used_ids)
    finish = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    if top.get("done_reason") == "length":
        finish = FinishReason.LENGTH
    thought = as_text(message.get("thinking"))
    extra = {EXTRA_KEY: {"voice": origin, "thinking": thought}} if thought and calls else None
    return Reply(
        message=Message(Role.ASSISTANT, as_text(message.get("content")), calls, extra=extra),
        finish_reason=finish,
        usage=mark_unpriced(
            Usage(input_tokens=token_count(top, "prompt_eval_count"), output_tokens=token_count(top, "eval_count"))
        ),
        model=as_text(top.get("model")),
    )


class OllamaAccumulator:
    """Folds a stream's lines into the one line that a whole answer would be.

    Calls come whole, with an object for arguments, in any line (https://ollama.com/blog/streaming-tool).

    Attributes:
        closed: Whether the line that is ``done`` came.
    """

    def __init__(self) -> None:
        self.closed = False
        self._text, self._reasoning = TextAccumulator(), TextAccumulator()
        self._calls: list[Any] = []
        self._final_event: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether the line that is ``done`` came."""
        return self.closed

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Fold a line in."""
        message = as_object(event.get("message"))
        if shown := self._reasoning.add(message.get("thinking")):
            yield ReasoningChunk(shown)
        if shown := self._text.add(message.get("content")):
            yield TextChunk(shown)
        for call in as_list(message.get("tool_calls")):
            function = as_object(as_object(call).get("function"))
            yield ToolCallChunk(len(self._calls), as_text(function.get("name")), json.dumps(function.get("arguments")))
            self._calls.append(call)
        if event.get("done") is True:
            self._final_event, self.closed = event, True

    def body(self) -> object:
        """The one line."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._reasoning:
            message["thinking"] = str(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return self._final_event | {"message": message}


def _encode_message(message: Message, origin: str) -> dict[str, Any]:
    # The server takes pictures beside any message (``msg.Images`` in its ``server/prompt.go``).
    pictures = {"images": [image.data for image in message.images]} if message.images else {}
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            # Older servers know the tool by its name alone, newer ones by the id of the call.
            named = {"tool_name": safe_tool_name(message.name)} if message.name else {}
            told = {"role": "tool", "content": message.content, **named, "tool_call_id": message.tool_call_id}
            return told | pictures
        case Role.TOOL | Role.USER:
            return {"role": "user", "content": message.content, **pictures}
        case Role.SYSTEM:
            return {"role": "system", "content": message.content}
        case Role.ASSISTANT:
            said: dict[str, Any] = {"role": "assistant", "content": message.content}
            kept = as_object((message.extra or {}).get(EXTRA_KEY))
            if kept.get("voice") == origin:
                said["thinking"] = kept.get("thinking", "")
            if message.tool_calls:
                said["tool_calls"] = [
                    {"id": call.id, "function": {"name": safe_tool_name(call.name), "arguments": dict(call.arguments)}}
                    for call in message.tool_calls
                ]
            return said
