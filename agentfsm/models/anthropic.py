"""``AnthropicMessages``: the messages wire of Anthropic, and of servers that speak it.

``encode`` and ``decode`` are the mapping, pure and complete; the class adds address, key and call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from agentfsm.core.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.core.model import ModelRequest, ToolSpec
from agentfsm.errors import ConfigurationError, ProviderError
from agentfsm.models.anthropic_stream import MessageAssembly
from agentfsm.models.anthropic_turns import EXTRA, Turns, mark_of, tool_use, turns
from agentfsm.models.assembly import Assembly
from agentfsm.models.base import HttpModel
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_list, as_object, ended, token_count, tool_calls, unpriced
from agentfsm.models.written import Units

__all__ = ["DEFAULT_MAX_TOKENS", "AnthropicMessages", "decode", "encode"]

DEFAULT_MAX_TOKENS = 4096
"""The cap on a reply, in tokens, where the request names none; this wire takes no request without one."""

_ROOM_AT_HOME = 16_384
"""The same for Anthropic's own models: what they think counts, and all that are left write as much and more
(https://docs.anthropic.com/en/docs/about-claude/models/overview)."""

_FINISH = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "pause_turn": FinishReason.LENGTH,  # the server's own tools took long: it goes on when asked to
    "refusal": FinishReason.REFUSAL,
}
"""Why a model stopped; ``tool_use`` is read from the calls themselves."""


class AnthropicMessages(HttpModel):
    """A model behind Anthropic's messages interface; the key is in ``ANTHROPIC_API_KEY`` unless it is given.

    Args and errors are those of ``HttpModel``.
    """

    _provider = "anthropic"
    _headers = MappingProxyType({"anthropic-version": "2023-06-01"})
    _key_header, _key_scheme = "x-api-key", ""

    @staticmethod
    def _checked(settings: ModelSettings) -> ModelSettings:
        if settings.seed is not None:
            raise ConfigurationError("Anthropic's wire has no seed")
        if settings.temperature is not None and settings.temperature > 1:
            raise ConfigurationError("Anthropic's wire takes a temperature of 0 to 1")
        if (effort := settings.reasoning_effort) in ("none", "minimal"):
            raise ConfigurationError(f"Anthropic's wire has no reasoning_effort {effort!r}: low or more")
        return settings

    @property
    def _cache(self) -> str:
        return self.settings.prompt_cache or ("5m" if self._endpoint.at_home else "off")

    def _path(self) -> str:
        return "/messages" if self._endpoint.base_url.endswith("/v1") else "/v1/messages"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        roomy = replace(request, max_output_tokens=self._cap(request))
        body = encode(roomy, self.model, self.settings, cache=self._cache, voice=self._voice)
        return {"stream": True} | body if stream else body

    def _units(self, request: ModelRequest) -> tuple[str, Units]:
        return "messages", Turns(mark_of(self._cache), self._voice, self.settings.images)

    def _decode(self, body: object, taken: Collection[str]) -> Reply:
        return decode(body, taken=taken, voice=self._voice)

    def _assembly(self) -> Assembly:
        return MessageAssembly()

    def _cap(self, request: ModelRequest) -> int:
        room = _ROOM_AT_HOME if self._endpoint.at_home else DEFAULT_MAX_TOKENS
        return request.max_output_tokens or self.settings.max_tokens or room


def encode(
    request: ModelRequest,
    model: str,
    settings: ModelSettings | None = None,
    *,
    cache: str = "off",
    voice: str = "",
) -> dict[str, Any]:
    """The body of a request.

    An output schema adds nothing to it: the instructions name the schema already.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer.
        cache: How long the server is to keep the unchanging beginning: ``5m``, ``1h`` or ``off``.
        voice: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    mark = mark_of(cache)
    cap = request.max_output_tokens or settings.max_tokens or DEFAULT_MAX_TOKENS
    body: dict[str, Any] = {"model": model, "max_tokens": cap}
    if request.tools:
        body["tools"] = [
            {"name": t.name, "description": t.description, "input_schema": dict(t.parameters)} for t in request.tools
        ]
        if choice := _tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    if system := "\n\n".join(m.content for m in request.messages if m.role is Role.SYSTEM and m.content.strip()):
        body["system"] = system
        if mark is not None:
            body["system"] = [{"type": "text", "text": system, "cache_control": mark}]
    elif mark is not None and request.tools:
        body["tools"][-1]["cache_control"] = mark
    body["messages"] = turns(request.messages, mark, voice=voice, images=settings.images)
    wanted = settings.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    if settings.stop:
        wanted["stop_sequences"] = list(settings.stop)
    if settings.reasoning_effort is not None:
        wanted["output_config"] = {"effort": settings.reasoning_effort}
    return body | wanted | settings.extra_body


def decode(body: object, *, taken: Collection[str] = (), voice: str = "") -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        taken: Call ids that the transcript uses already; a reply that repeats one gets another.
        voice: Who answered.

    Raises:
        ProviderError: The body lacks what a reply must hold.
        TransientProviderError: It does not say that the reply has ended.
    """
    top = as_object(body)
    if not isinstance(top.get("content"), list):
        raise ProviderError("the answer holds no content; does base_url speak Anthropic's messages?")
    blocks = [block for block in map(as_object, as_list(top["content"])) if not _is_blank(block)]
    text = "".join(str(block["text"]) for block in blocks if block.get("type") == "text")
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    calls = tool_calls([(use.get("id"), use.get("name"), use.get("input")) for use in uses], taken)
    finish = _FINISH.get(ended(top, "stop_reason"), FinishReason.STOP)
    if finish is FinishReason.STOP and calls:
        finish = FinishReason.TOOL_CALLS
    refusal = None
    if finish is FinishReason.REFUSAL:
        why = as_object(top.get("stop_details")).get("explanation")
        refusal = text or (why if isinstance(why, str) and why else "the model refused, without a word")
    extra = None
    if any(block.get("type") not in ("text", "tool_use") for block in blocks):
        fresh = iter(calls)
        said = [tool_use(next(fresh)) if b.get("type") == "tool_use" else b for b in blocks]
        extra = {EXTRA: {"voice": voice, "blocks": said}}
    usage = as_object(top.get("usage"))
    cached = token_count(usage, "cache_read_input_tokens")
    written = token_count(usage, "cache_creation_input_tokens")
    return Reply(
        message=Message(Role.ASSISTANT, text, calls, extra=extra),
        finish_reason=finish,
        # This wire counts the cached parts of the prompt beside the rest of it, not within.
        usage=unpriced(
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
    )


def _is_blank(block: dict[str, Any]) -> bool:
    """Whether a block says nothing: no object, or blank text, which the wire would refuse later."""
    return not block or (block.get("type") == "text" and not str(block.get("text") or "").strip())


def _tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> dict[str, str] | None:
    if choice in ("auto", "none"):
        return {"type": choice}
    if choice == "required":
        return {"type": "any"}
    return {"type": "tool", "name": choice} if choice in {tool.name for tool in tools} and choice else None
