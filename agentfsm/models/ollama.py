"""``OllamaChat``: Ollama's own chat interface, ``/api/chat``.

Its compatible one cannot set how much of the prompt a model sees: ``num_ctx`` is ignored there, and what is
longer than the default is cut without a word (https://github.com/NousResearch/hermes-agent/issues/43900). Here
it is an option like any other::

    resolve("ollama:llama3.2", settings=ModelSettings(extra_body={"options": {"num_ctx": 32768}}))
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from pydantic import SecretStr

from agentfsm.core.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.core.model import ModelRequest
from agentfsm.core.streaming import CallPiece, Piece, ReasoningPiece, TextPiece
from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.models.assembly import Assembly, Letters
from agentfsm.models.base import HttpModel
from agentfsm.models.framing import Frames, JsonLines
from agentfsm.models.openai_chat import refuse_cache
from agentfsm.models.pictures import seen
from agentfsm.models.providers import Endpoint
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_list, as_object, text_of, token_count, tool_calls, unpriced, wire_name
from agentfsm.models.written import Items, Units

__all__ = ["OllamaAssembly", "OllamaChat", "decode", "encode"]

_EXTRA = "ollama"
"""Where ``Message.extra`` keeps what the model thought, which thinking models want back beside their calls."""

_THINK: dict[str, object] = {"none": False, "minimal": "low", "xhigh": "high", "max": "high"}
"""Its words for effort, where they are not ours (https://docs.ollama.com/capabilities/thinking)."""


class OllamaChat(HttpModel):
    """A model that runs in Ollama (``ollama:llama3.2``), where ``OLLAMA_HOST`` says or at its own address.

    Args and errors are those of ``HttpModel``.
    """

    _provider = "ollama"

    def _located(self, base_url: str | None, api_key: str | SecretStr | None) -> Endpoint:
        found = super()._located(base_url, api_key)
        return replace(found, base_url=found.base_url.removesuffix("/v1"))  # where its compatible interface is

    @staticmethod
    def _checked(settings: ModelSettings) -> ModelSettings:
        if settings.tool_choice not in (None, "auto"):
            raise ConfigurationError("Ollama's wire has no tool_choice")
        if not isinstance(settings.extra_body.get("options", {}), dict):
            raise ConfigurationError("extra_body: options must be an object")
        return refuse_cache(settings, "Ollama's wire")

    def _path(self) -> str:
        return "/api/chat"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        return {"stream": stream} | encode(request, self.model, self.settings, voice=self._voice)

    def _units(self, request: ModelRequest) -> tuple[str, Units]:
        return "messages", Items(self._messages)

    def _messages(self, message: Message) -> list[dict[str, Any]]:
        return [_message(seen(message, self.settings.images), self._voice)]

    def _decode(self, body: object, taken: Collection[str]) -> Reply:
        return decode(body, taken=taken, voice=self._voice)

    def _assembly(self) -> Assembly:
        return OllamaAssembly()

    def _frames(self, limit: int) -> Frames:
        return JsonLines(limit)

    def _is_no_stream(self, head: bytes) -> bool:
        return head[:1] in (b"<", b"[")


def encode(
    request: ModelRequest, model: str, settings: ModelSettings | None = None, *, voice: str = ""
) -> dict[str, Any]:
    """The body of a request, but for ``stream``.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer. ``options`` of ``extra_body`` are added to those that the
            other settings make.
        voice: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    messages = [_message(seen(m, settings.images), voice) for m in request.messages]
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
        body["think"] = _THINK.get(effort, effort)
    return body | {k: v for k, v in settings.extra_body.items() if k != "options"}


def decode(body: object, *, taken: Collection[str] = (), voice: str = "") -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        taken: Call ids that the transcript uses already; a reply that repeats one gets another. Most versions
            of the server give none at all.
        voice: Who answered.

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
    calls = tool_calls(raw, taken)
    finish = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    if top.get("done_reason") == "length":
        finish = FinishReason.LENGTH
    thought = text_of(message.get("thinking"))
    extra = {_EXTRA: {"voice": voice, "thinking": thought}} if thought and calls else None
    return Reply(
        message=Message(Role.ASSISTANT, text_of(message.get("content")), calls, extra=extra),
        finish_reason=finish,
        usage=unpriced(
            Usage(input_tokens=token_count(top, "prompt_eval_count"), output_tokens=token_count(top, "eval_count"))
        ),
        model=text_of(top.get("model")),
    )


class OllamaAssembly:
    """Folds a stream's lines into the one line that a whole answer would be.

    Calls come whole, with an object for arguments, in any line (https://ollama.com/blog/streaming-tool).

    Attributes:
        closed: Whether the line that is ``done`` came.
    """

    def __init__(self) -> None:
        self.closed = False
        self._text, self._thought = Letters(), Letters()
        self._calls: list[Any] = []
        self._last: dict[str, Any] = {}

    @property
    def whole(self) -> bool:
        """Whether the line that is ``done`` came."""
        return self.closed

    def add(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Fold a line in."""
        message = as_object(event.get("message"))
        if shown := self._thought.add(message.get("thinking")):
            yield ReasoningPiece(shown)
        if shown := self._text.add(message.get("content")):
            yield TextPiece(shown)
        for call in as_list(message.get("tool_calls")):
            function = as_object(as_object(call).get("function"))
            yield CallPiece(len(self._calls), text_of(function.get("name")), json.dumps(function.get("arguments")))
            self._calls.append(call)
        if event.get("done") is True:
            self._last, self.closed = event, True

    def body(self) -> object:
        """The one line."""
        message: dict[str, Any] = {"role": "assistant", "content": str(self._text)}
        if self._thought:
            message["thinking"] = str(self._thought)
        if self._calls:
            message["tool_calls"] = self._calls
        return self._last | {"message": message}


def _message(message: Message, voice: str) -> dict[str, Any]:
    # The server takes pictures beside any message (``msg.Images`` in its ``server/prompt.go``).
    pictures = {"images": [image.data for image in message.images]} if message.images else {}
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            # Older servers know the tool by its name alone, newer ones by the id of the call.
            named = {"tool_name": wire_name(message.name)} if message.name else {}
            told = {"role": "tool", "content": message.content, **named, "tool_call_id": message.tool_call_id}
            return told | pictures
        case Role.TOOL | Role.USER:
            return {"role": "user", "content": message.content, **pictures}
        case Role.SYSTEM:
            return {"role": "system", "content": message.content}
        case Role.ASSISTANT:
            said: dict[str, Any] = {"role": "assistant", "content": message.content}
            kept = as_object((message.extra or {}).get(_EXTRA))
            if kept.get("voice") == voice:
                said["thinking"] = kept.get("thinking", "")
            if message.tool_calls:
                said["tool_calls"] = [
                    {"id": call.id, "function": {"name": wire_name(call.name), "arguments": dict(call.arguments)}}
                    for call in message.tool_calls
                ]
            return said
