"""``OllamaChat``: Ollama's native chat API, ``/api/chat``.

Ollama's OpenAI-compatible API cannot set the context length: it ignores ``num_ctx``, and a prompt longer than the
default is truncated without an error (https://github.com/NousResearch/hermes-agent/issues/43900). Here it is an option
like any other::

    resolve("ollama:llama3.2", settings=ModelSettings(extra_body={"options": {"num_ctx": 32768}}))
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.http_model import HttpModel
from agentfsm.models.providers import ApiKey, Endpoint
from agentfsm.models.settings import ModelSettings, reject_prompt_cache
from agentfsm.models.stream_reader import NDJSONParser, StreamAccumulator, TextAccumulator
from agentfsm.models.wire_format import (
    MessageEncoder,
    PerMessageEncoder,
    final_finish_reason,
    function_spec,
    mark_unpriced,
    own_extra,
    parse_tool_calls,
    safe_tool_name,
    token_count,
)
from agentfsm.models.wire_json import as_list, as_object, as_text

EXTRA_KEY = "ollama"
"""The key in ``Message.extra`` of a reply's reasoning, which thinking models need back with their calls."""

_THINK_LEVELS: dict[str, object] = {"none": False, "minimal": "low", "xhigh": "high", "max": "high"}
"""Ollama's names for a reasoning effort, where they differ (https://docs.ollama.com/capabilities/thinking)."""


class OllamaChat(HttpModel):
    """A model in Ollama (``ollama:llama3.2``), at ``OLLAMA_HOST`` or on this machine.

    Arguments and errors are those of ``HttpModel``.
    """

    _default_provider = "ollama"
    _frame_parser = NDJSONParser
    _plain_body_starts = (b"<", b"[")
    _stream_start = re.compile(rb"\s*\{[^\r\n]*\}[ \t]*[\r\n]\s*\{")  # an object in the first line, and another one

    def _resolve_endpoint(self, provider: str, base_url: str | None, api_key: ApiKey | None) -> Endpoint:
        endpoint = super()._resolve_endpoint(provider, base_url, api_key)
        # The table has the address of the OpenAI-compatible API.
        return replace(endpoint, base_url=endpoint.base_url.removesuffix("/v1"))

    @staticmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        if settings.tool_choice not in (None, "auto"):
            raise ConfigurationError("Ollama's API has no tool_choice")
        if settings.files:
            raise ConfigurationError("Ollama's API has no files: give images of the pages")
        if not isinstance(settings.extra_body.get("options", {}), dict):
            raise ConfigurationError("extra_body: options must be an object")
        return reject_prompt_cache(settings, "Ollama's API")

    def _path(self) -> str:
        return "/api/chat"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        return {"stream": stream} | encode(request, self.model, self.settings, origin=self._origin)

    def _message_encoder(self) -> tuple[str, MessageEncoder]:
        return "messages", _new_encoder(self._origin, self.settings.images)

    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        return decode(body, used_ids=used_ids, origin=self._origin)

    def _accumulator(self) -> StreamAccumulator:
        return OllamaAccumulator()


def encode(
    request: ModelRequest, model: str, settings: ModelSettings | None = None, *, origin: str = ""
) -> dict[str, Any]:
    """The body of a request, without ``stream``."""
    settings = settings or ModelSettings()
    messages = _new_encoder(origin, settings.images).encode_all(request.messages)
    body: dict[str, Any] = {"model": model, "messages": messages}
    if request.tools:
        body["tools"] = [{"type": "function", "function": function_spec(tool)} for tool in request.tools]
    options: dict[str, Any] = settings.model_dump(include={"temperature", "top_p", "seed"}, exclude_none=True)
    if settings.stop:
        options["stop"] = list(settings.stop)
    if cap := request.max_output_tokens or settings.max_tokens:
        options["num_predict"] = cap
    if options := options | as_object(settings.extra_body.get("options")):
        body["options"] = options
    if request.output_schema is not None and not request.tools:  # with a format the model never calls a tool
        body["format"] = dict(request.output_schema)
    if (effort := settings.reasoning_effort) is not None:
        body["think"] = _THINK_LEVELS.get(effort, effort)
    return body | {k: v for k, v in settings.extra_body.items() if k != "options"}


def decode(body: object, *, used_ids: Collection[str] = (), origin: str = "") -> Reply:
    """The reply in a response body.

    Raises:
        ProviderError: The body has no message.
        TransientProviderError: It does not say that the reply has ended.
    """
    top = as_object(body)
    message = as_object(top.get("message"))
    if not message:
        raise ProviderError("the response has no message; is Ollama at base_url?")
    if top.get("done") is not True:
        raise TransientProviderError("the server does not say that the reply has ended (it is not done)")
    raw = [
        (call.get("id"), as_object(call.get("function"))) for call in map(as_object, as_list(message.get("tool_calls")))
    ]
    calls = parse_tool_calls([(id_, f.get("name"), f.get("arguments")) for id_, f in raw], used_ids)
    stated = FinishReason.LENGTH if top.get("done_reason") == "length" else FinishReason.STOP
    reasoning = as_text(message.get("thinking"))
    extra = {EXTRA_KEY: {"voice": origin, "thinking": reasoning}} if reasoning and calls else None
    return Reply(
        message=Message(Role.ASSISTANT, as_text(message.get("content")), calls, extra=extra),
        finish_reason=final_finish_reason(stated, calls),
        usage=mark_unpriced(
            Usage(input_tokens=token_count(top, "prompt_eval_count"), output_tokens=token_count(top, "eval_count"))
        ),
        model=as_text(top.get("model")),
    )


def _new_encoder(origin: str, images: bool) -> PerMessageEncoder:
    """An encoder for an empty transcript."""
    return PerMessageEncoder(partial(_encode_message, origin=origin), images)


def _labelled_text(message: Message) -> str:
    """The text of a user message; where images stand between its texts, each has a label in its place.

    The images themselves are a list of their own, in the same order.
    """
    if len([part for part in message.parts if isinstance(part, str)]) < 2:
        return message.content
    numbers = count(1)
    return "\n\n".join(part if isinstance(part, str) else f"[image {next(numbers)}]" for part in message.parts)


def _encode_message(message: Message, origin: str) -> list[dict[str, Any]]:
    # The server accepts images in any message (``msg.Images`` in its ``server/prompt.go``).
    images = {"images": [image.data for image in message.images]} if message.images else {}
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            # Older servers identify the tool by its name, newer ones by the id of the call.
            name = {"tool_name": safe_tool_name(message.name)} if message.name else {}
            result = {"role": "tool", "content": message.content, **name, "tool_call_id": message.tool_call_id}
            return [result | images]
        case Role.TOOL | Role.USER:
            return [{"role": "user", "content": _labelled_text(message), **images}]
        case Role.SYSTEM:
            return [{"role": "system", "content": message.content}]
        case Role.ASSISTANT:
            reply: dict[str, Any] = {"role": "assistant", "content": message.content}
            if stored := own_extra(message, EXTRA_KEY, origin):
                reply["thinking"] = stored.get("thinking", "")
            if message.tool_calls:
                reply["tool_calls"] = [
                    {"id": call.id, "function": {"name": safe_tool_name(call.name), "arguments": dict(call.arguments)}}
                    for call in message.tool_calls
                ]
            return [reply]


class OllamaAccumulator(StreamAccumulator):
    """Accumulates the lines of a stream into the one line of a response without streaming.

    Calls arrive complete, with an object as arguments, in any line (https://ollama.com/blog/streaming-tool).

    Attributes:
        closed: Whether the line with ``done`` has arrived.
    """

    def __init__(self) -> None:
        self._text, self._reasoning = TextAccumulator(), TextAccumulator()
        self._calls: list[Any] = []
        self._final_event: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Add one line; yields the parts of the reply in it."""
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
        """The complete response."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._reasoning:
            message["thinking"] = str(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return self._final_event | {"message": message}
