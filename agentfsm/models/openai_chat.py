"""``OpenAIChat``: the chat completions wire, as OpenAI, Ollama, llama.cpp, vLLM and many others speak it.

``encode`` and ``decode`` are the mapping, pure and complete; the class adds address, key and call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from pydantic import SecretStr

from agentfsm.core.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.core.model import ModelRequest, ToolSpec
from agentfsm.errors import ProviderError
from agentfsm.models.faults import Caller
from agentfsm.models.http import HttpOptions, HttpWire
from agentfsm.models.providers import locate
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_list, as_object, call_ids, dumps, token_count, tool_calls, wire_name

__all__ = ["OpenAIChat", "decode", "encode"]

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Words for why a model stopped; whether it calls tools is read from the calls, since servers disagree."""

_STRICT_KEYWORDS = frozenset(
    {
        *("$defs", "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "items"),
        *("properties", "required", "title", "type"),
    }
)
"""The keywords that a strict schema may use (OpenAI, structured outputs), less those with small print."""


class OpenAIChat:
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
        ConfigurationError: The provider, the address or the key cannot be one.
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
        self.model = model
        self.settings = settings or ModelSettings()
        self._endpoint = locate(provider, base_url, api_key)
        self._caller = Caller(model, self._endpoint)
        self._http = HttpWire(self._caller, headers={}, key_header="authorization", key_scheme="Bearer ", options=http)

    @property
    def name(self) -> str:
        """``provider:model``."""
        return self._caller.name

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, base_url={self._endpoint.base_url!r})"

    async def reply(self, request: ModelRequest) -> Reply:
        """Answer one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        official = self._endpoint.provider.name == "openai" and self._endpoint.at_home
        body = encode(request, self.model, self.settings, official=official)
        answer = await self._http.post("/chat/completions", body, timeout_s=request.timeout_s, prompt=request.messages)
        try:
            return decode(answer, taken=call_ids(request.messages))
        except ProviderError as error:
            raise self._caller.unusable(str(error)) from None

    async def aclose(self) -> None:
        """Let go of connections; may be called more than once, and the model may be used after it."""
        await self._http.aclose()


def encode(
    request: ModelRequest, model: str, settings: ModelSettings | None = None, *, official: bool = False
) -> dict[str, Any]:
    """The body of a request.

    Args:
        request: What to ask.
        model: The model's name.
        settings: How the model is asked to answer.
        official: Whether the server is OpenAI's own. It alone wants ``max_completion_tokens``, and it alone
            is sure to weigh tools against a response format: Ollama never calls a tool beside one, and
            llama.cpp refuses the two together. The instructions name the schema anyway.
    """
    settings = settings or ModelSettings()
    body: dict[str, Any] = {"model": model, "messages": [_message(m) for m in request.messages]}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        if choice := _tool_choice(settings.tool_choice, request.tools):
            body["tool_choice"] = choice
    if request.max_output_tokens is not None:
        body["max_completion_tokens" if official else "max_tokens"] = request.max_output_tokens
    if request.output_schema is not None and (official or not request.tools):
        schema = {
            "name": wire_name(request.output_name),
            "schema": dict(request.output_schema),
            "strict": _is_strict(request.output_schema),
        }
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    wanted = settings.model_dump(include={"temperature", "top_p", "seed", "reasoning_effort"}, exclude_none=True)
    stop = {"stop": list(settings.stop)} if settings.stop else {}
    return body | wanted | stop | settings.extra_body


def decode(body: object, *, taken: Collection[str] = ()) -> Reply:
    """The reply that an answer's body holds.

    Args:
        body: The answer, JSON.
        taken: Call ids that the transcript uses already; a reply that repeats one gets another.

    Raises:
        ProviderError: The body lacks what a reply must hold.
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
    finish = _FINISH.get(str(choice.get("finish_reason")), FinishReason.STOP)
    if finish is FinishReason.STOP and calls:
        finish = FinishReason.TOOL_CALLS
    if refusal:
        finish = FinishReason.REFUSAL
    usage = as_object(as_object(body).get("usage"))
    return Reply(
        message=Message.assistant(text or refusal or "", calls),
        finish_reason=finish,
        usage=Usage(
            input_tokens=token_count(usage, "prompt_tokens"),
            output_tokens=token_count(usage, "completion_tokens"),
            cached_tokens=token_count(as_object(usage.get("prompt_tokens_details")), "cached_tokens"),
        ),
        refusal=refusal or None,
        model=str(as_object(body).get("model") or ""),
    )


def _message(message: Message) -> dict[str, Any]:
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
        case Role.TOOL | Role.USER:
            return {"role": "user", "content": message.content}
        case Role.SYSTEM:
            return {"role": "system", "content": message.content}
        case Role.ASSISTANT if not message.tool_calls:
            return {"role": "assistant", "content": message.content}
        case Role.ASSISTANT:
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": wire_name(call.name), "arguments": dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
            return {"role": "assistant", "content": message.content or None, "tool_calls": calls}


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


def _is_strict(schema: object, *, root: bool = True) -> bool:
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
    return all(_is_strict(s, root=False) for s in (*named, *as_list(node.get("anyOf")), node.get("items")))
