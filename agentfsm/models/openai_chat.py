"""``OpenAIChat``: the chat completions wire, as OpenAI, Ollama, llama.cpp, vLLM and many others speak it.

``encode`` and ``decode`` are the mapping, pure and complete; the class adds address, key and call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from pydantic import SecretStr

from agentfsm.core.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.core.model import ModelRequest, ToolSpec
from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.models.assembly import Assembly
from agentfsm.models.base import HttpModel
from agentfsm.models.chat_messages import EXTRA, THOUGHTS, ChatMessages, chat_messages
from agentfsm.models.chat_stream import ChatAssembly
from agentfsm.models.http import HttpOptions
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_list, as_object, ended, token_count, tool_calls, unpriced, wire_name
from agentfsm.models.written import Units

__all__ = ["OpenAIChat", "decode", "encode", "is_strict", "refuse_cache"]

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Words for why a model stopped; whether it calls tools is read from the calls, since servers disagree."""

_GAVE_UP = ("abort", "error")
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
    def _checked(settings: ModelSettings) -> ModelSettings:
        return refuse_cache(settings)

    @property
    def _official(self) -> bool:
        return self._endpoint.provider.name == "openai" and self._endpoint.at_home

    def _path(self) -> str:
        return "/chat/completions"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = encode(request, self.model, self.settings, official=self._official, voice=self._voice)
        # Without the option, no usage comes at all (https://platform.openai.com/docs/api-reference/chat/create).
        return {"stream": True, "stream_options": {"include_usage": True}} | body if stream else body

    def _units(self, request: ModelRequest) -> tuple[str, Units]:
        return "messages", ChatMessages(self._voice, self.settings.images)

    def _decode(self, body: object, taken: Collection[str]) -> Reply:
        return decode(body, taken=taken, voice=self._voice)

    def _assembly(self) -> Assembly:
        return ChatAssembly()


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
        official: Whether the server is OpenAI's own. It alone wants ``max_completion_tokens``, and it alone
            is sure to weigh tools against a response format: Ollama never calls a tool beside one, and
            llama.cpp refuses the two together. The instructions name the schema anyway.
        voice: Who is asked; they get back what they said they thought, and what others said is left out.
    """
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "messages": chat_messages(request.messages, voice, settings.images)}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        if choice := _tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    if cap := request.max_output_tokens or settings.max_tokens:
        body["max_completion_tokens" if official else "max_tokens"] = cap
    if request.output_schema is not None and (official or not request.tools):
        schema = {
            "name": wire_name(request.output_name),
            "schema": dict(request.output_schema),
            "strict": is_strict(request.output_schema),
        }
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    wanted = settings.model_dump(include={"temperature", "top_p", "seed", "reasoning_effort"}, exclude_none=True)
    stop = {"stop": list(settings.stop)} if settings.stop else {}
    return body | wanted | stop | settings.extra_body


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
    choice = as_object(next(iter(as_list(as_object(body).get("choices"))), None))
    message = as_object(choice.get("message"))
    if not message:
        raise ProviderError("the answer holds no choices[0].message; does base_url speak chat completions?")
    text, refusal = _content(message.get("content"))
    refusal = message.get("refusal") if isinstance(message.get("refusal"), str) else refusal
    raw = [as_object(call) for call in as_list(message.get("tool_calls"))]
    wishes = [(call.get("id"), as_object(call.get("function"))) for call in raw]
    if message.get("function_call") and not wishes:  # the wire's first form of a call, without an id
        wishes = [(None, as_object(message["function_call"]))]
    calls = tool_calls([(id_, f.get("name"), f.get("arguments")) for id_, f in wishes], taken)
    why = ended(choice, "finish_reason")
    if why in _GAVE_UP:
        raise TransientProviderError(f"the server gave up on the reply ({why})")
    finish = _FINISH.get(why, FinishReason.STOP)
    if finish is FinishReason.STOP and calls:
        finish = FinishReason.TOOL_CALLS
    if refusal:
        finish = FinishReason.REFUSAL
    usage = as_object(as_object(body).get("usage"))
    prompt = as_object(usage.get("prompt_tokens_details"))
    return Reply(
        message=Message(Role.ASSISTANT, text or refusal or "", calls, extra=_kept(message, raw, calls, voice)),
        finish_reason=finish,
        usage=unpriced(
            Usage(
                input_tokens=token_count(usage, "prompt_tokens"),
                output_tokens=token_count(usage, "completion_tokens"),
                cached_tokens=token_count(prompt, "cached_tokens"),
                written_tokens=token_count(prompt, "cache_write_tokens"),
                reasoning_tokens=token_count(as_object(usage.get("completion_tokens_details")), "reasoning_tokens"),
                cost_usd=_cost(usage),
            )
        ),
        refusal=refusal or None,
        model=str(as_object(body).get("model") or ""),
    )


def _kept(
    message: dict[str, Any], raw: list[dict[str, Any]], calls: tuple[ToolCall, ...], voice: str
) -> dict[str, Any] | None:
    """What of a reply must come back, in the words in which it came."""
    kept = {key: message[key] for key in THOUGHTS if message.get(key)}
    beside = [{"extra_content": call["extra_content"]} if call.get("extra_content") else None for call in raw]
    if any(beside):
        kept["calls"] = beside
    return {EXTRA: {"voice": voice} | kept} if kept and calls else None


def _cost(usage: dict[str, Any]) -> float:
    """What OpenRouter says that the call cost, in USD (https://openrouter.ai/docs/use-cases/usage-accounting)."""
    cost = usage.get("cost")
    return float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) and cost > 0 else 0.0


def _tool(tool: ToolSpec) -> dict[str, Any]:
    spec = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": spec}


def _tool_choice(choice: str | None, tools: tuple[ToolSpec, ...]) -> object:
    if choice in (None, "auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}} if choice in {t.name for t in tools} else None


def _content(content: object) -> tuple[str, str | None]:
    """The text of a message and its refusal; content is null, a text, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", None
    if not isinstance(content, list):
        raise ProviderError(f"the message's content is {type(content).__name__}, neither text nor parts")
    parts = [as_object(part) for part in cast("list[object]", content)]
    text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    refusal = "".join(part["refusal"] for part in parts if isinstance(part.get("refusal"), str))
    return text, refusal or None


def refuse_cache(settings: ModelSettings, wire: str = "the chat completions wire") -> ModelSettings:
    """The settings, for a wire whose servers keep prompts by themselves.

    Raises:
        ConfigurationError: They say how long a prompt is to be kept.
    """
    if settings.prompt_cache not in (None, "off"):
        raise ConfigurationError(f"{wire} has no prompt_cache: its servers keep prompts by themselves")
    return settings


def is_strict(schema: object, *, root: bool = True) -> bool:
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
    return all(is_strict(s, root=False) for s in (*named, *as_list(node.get("anyOf")), node.get("items")))
