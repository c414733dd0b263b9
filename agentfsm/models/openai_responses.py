"""``OpenAIResponses``: the responses wire of OpenAI, and of servers that speak it.

Nothing is stored at the provider: each request carries the whole transcript, and with it the model's sealed
reasoning, so that a run can be resumed anywhere and years later.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentfsm.core.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.core.model import ModelRequest, ToolSpec
from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.models.assembly import Assembly
from agentfsm.models.base import HttpModel
from agentfsm.models.openai_chat import is_strict, refuse_cache
from agentfsm.models.pictures import data_url, seen
from agentfsm.models.responses_stream import ResponseAssembly
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_list, as_object, dumps, ended, text_of, token_count, tool_calls, unpriced, wire_name
from agentfsm.models.written import Items, Units

__all__ = ["OpenAIResponses", "decode", "encode"]

_EXTRA = "openai_responses"
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
    def _checked(settings: ModelSettings) -> ModelSettings:
        if settings.seed is not None:
            raise ConfigurationError("the responses wire has no seed")
        if settings.stop:
            raise ConfigurationError("the responses wire has no stop texts")
        return refuse_cache(settings, "the responses wire")

    def _path(self) -> str:
        return "/responses"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = encode(request, self.model, self.settings, official=self._endpoint.at_home, voice=self._voice)
        return {"stream": True} | body if stream else body

    def _units(self, request: ModelRequest) -> tuple[str, Units]:
        return "input", Items(self._items)

    def _items(self, message: Message) -> list[dict[str, Any]]:
        return _items(seen(message, self.settings.images), self._voice)

    def _decode(self, body: object, taken: Collection[str]) -> Reply:
        return decode(body, taken=taken, voice=self._voice)

    def _assembly(self) -> Assembly:
        return ResponseAssembly()


def encode(
    request: ModelRequest,
    model: str,
    settings: ModelSettings | None = None,
    *,
    official: bool = False,
    voice: str = "",
) -> dict[str, Any]:
    """The body of a request.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer.
        official: Whether the server is OpenAI's own; it alone is asked for sealed reasoning, and to weigh tools
            against a text format.
        voice: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "store": False}
    if official:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        if choice := _tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    body["input"] = [item for message in request.messages for item in _items(seen(message, settings.images), voice)]
    if cap := request.max_output_tokens or settings.max_tokens:
        body["max_output_tokens"] = cap
    if request.output_schema is not None and (official or not request.tools):
        body["text"] = {
            "format": {
                "type": "json_schema",
                "name": wire_name(request.output_name),
                "schema": dict(request.output_schema),
                "strict": is_strict(request.output_schema),
            }
        }
    wanted = settings.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    if settings.reasoning_effort is not None:
        wanted["reasoning"] = {"effort": settings.reasoning_effort}
    return body | wanted | settings.extra_body


def decode(body: object, *, taken: Collection[str] = (), voice: str = "") -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        taken: Call ids that the transcript uses already; a reply that repeats one gets another.
        voice: Who answered.

    Raises:
        ProviderError: The body lacks what a reply must hold.
        TransientProviderError: The server says that it gave up on the reply, or does not say that it has ended.
    """
    top = as_object(body)
    if not isinstance(top.get("output"), list):
        raise ProviderError("the answer holds no output; does base_url speak responses?")
    status = ended(top, "status")
    if status in ("failed", "cancelled", "queued", "in_progress"):
        raise TransientProviderError(f"the server gave up on the reply ({status})")
    items = [as_object(item) for item in as_list(top["output"])]
    parts = [as_object(p) for item in items if item.get("type") == "message" for p in as_list(item.get("content"))]
    text = "".join(text_of(part.get("text")) for part in parts if part.get("type") == "output_text")
    refusal = "".join(text_of(part.get("refusal")) for part in parts if part.get("type") == "refusal") or None
    wishes = [item for item in items if item.get("type") == "function_call"]
    calls = tool_calls([(w.get("call_id") or w.get("id"), w.get("name"), w.get("arguments")) for w in wishes], taken)
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
        message=Message(Role.ASSISTANT, text or refusal or "", calls, extra=_kept(items, calls, voice)),
        finish_reason=finish,
        usage=unpriced(
            Usage(
                input_tokens=token_count(usage, "input_tokens"),
                output_tokens=token_count(usage, "output_tokens"),
                cached_tokens=token_count(prompt, "cached_tokens"),
                written_tokens=token_count(prompt, "cache_write_tokens"),
                reasoning_tokens=token_count(as_object(usage.get("output_tokens_details")), "reasoning_tokens"),
            )
        ),
        refusal=refusal,
        model=text_of(top.get("model")),
    )


def _items(message: Message, voice: str) -> list[dict[str, Any]]:
    """A message as input items; reasoning stands before the calls that it led to."""
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": _content(message)}]
        case Role.TOOL | Role.USER:
            return [{"role": "user", "content": _content(message)}]
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
                    "name": wire_name(call.name),
                    "arguments": dumps(call.arguments),
                }
                for call in message.tool_calls
            ]
            kept = as_object((message.extra or {}).get(_EXTRA))
            thoughts = map(as_object, as_list(kept.get("items"))) if kept.get("voice") == voice else ()
            return [*thoughts, *said, *calls]


def _content(message: Message) -> str | list[dict[str, Any]]:
    """What a person or a tool said: a text, or parts where there are pictures."""
    if not message.images:
        return message.content
    text = [{"type": "input_text", "text": message.content}] if message.content else []
    pictures = [{"type": "input_image", "detail": "auto", "image_url": data_url(i)} for i in message.images]
    return [*text, *pictures]


def _kept(items: list[dict[str, Any]], calls: tuple[ToolCall, ...], voice: str) -> dict[str, Any] | None:
    """The reasoning that must come back: what is sealed, before calls."""
    sealed = [item for item in items if item.get("type") == "reasoning" and item.get("encrypted_content")]
    kept = [{k: v for k, v in item.items() if k in ("type", "summary", "encrypted_content")} for item in sealed]
    if not kept or not calls:
        return None
    return {_EXTRA: {"voice": voice, "items": [{"summary": []} | item for item in kept]}}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    # Strict is the default here, unlike in chat completions, and refuses most schemas.
    spec = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", **spec, "strict": False}


def _tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> object:
    if choice in (None, "auto", "none", "required"):
        return choice
    return {"type": "function", "name": choice} if choice in {t.name for t in tools} else None
