"""``from_langchain``: a LangChain chat model as a model of an agent here. It needs the extra ``langchain``.

::

    from langchain_google_genai import ChatGoogleGenerativeAI

    agent = Agent(from_langchain(ChatGoogleGenerativeAI(model="gemini-2.5-pro")), tools=[...])

Only the call of the model is LangChain's; tools, retries, limits and the journal are those of the agent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, cast

from pydantic import SecretStr

from agentfsm.errors import MissingExtraError, ProviderError, TransientProviderError
from agentfsm.integrations.foreign_models import ForeignModel, finish_reason, with_images_after_results
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import File, FinishReason, Image, Message, Reply, Role, Usage
from agentfsm.loop.model import ModelRequest, StreamChunk, StreamingModel, TextChunk, ToolCallChunk
from agentfsm.loop.prompts import as_user_message
from agentfsm.loop.read_only import thaw
from agentfsm.models.wire_format import (
    call_ids,
    data_url,
    function_spec,
    mark_unpriced,
    own_extra,
    parse_tool_calls,
    refuse_parts,
    safe_tool_name,
    token_count,
    visible_message,
)
from agentfsm.models.wire_json import as_list, as_object, as_text, repair_surrogates

try:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
    from langchain_core.messages.ai import add_ai_message_chunks
    from langchain_core.messages.tool import tool_call
except ImportError as error:
    raise MissingExtraError("a LangChain chat model", "langchain") from error

_EXTRA_KEY = "langchain"
"""The key in ``Message.extra`` of a reply's content blocks and additional fields: signed reasoning is sent back."""

_ENDS = ("finish_reason", "stop_reason", "done_reason")
"""The fields of the response metadata with a finish reason: OpenAI's and Google's, Anthropic's, Ollama's."""

_ORIGINS = ("model_provider", "output_version")
"""The fields of the response metadata that say in whose format the content blocks are."""


def from_langchain(model: BaseChatModel, *, output_limit: str = "max_tokens") -> StreamingModel:
    """A LangChain chat model, as a model of an agent here.

    Structured output is what the instructions ask for: LangChain has no common way to request it together with a reply.

    Args:
        model: The chat model. Let it make one attempt (``max_retries=0``), since the agent retries, and report the
            usage of streams (``stream_usage=True`` for OpenAI).
        output_limit: The name of its option that limits a reply, in tokens; it is sent only where a run sets a limit.
    """
    return _Adapter(model, output_limit)


class _Adapter(ForeignModel):
    """A LangChain chat model."""

    def __init__(self, model: BaseChatModel, output_limit: str) -> None:
        self._model: Any = model
        self._output_limit = output_limit

    @property
    def name(self) -> str:
        given: object = getattr(self._model, "model_name", None) or getattr(self._model, "model", None)
        kind = type(self._model).__name__
        return f"{kind}:{given}" if isinstance(given, str) else kind

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The keys among the fields of the model."""
        fields = cast("dict[str, object]", vars(self._model))
        return tuple(value for value in fields.values() if isinstance(value, SecretStr))

    def __repr__(self) -> str:
        return f"from_langchain({self.name!r})"

    async def _call(self, request: ModelRequest) -> Reply:
        message = await self._runnable(request).ainvoke(list(_encode(request.messages, self.name)))
        return self._decode(message, request)

    async def _open_stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        parts = list[Any]()
        numbers = dict[object, int]()
        async with aclosing(self._runnable(request).astream(list(_encode(request.messages, self.name)))) as stream:
            async for part in stream:
                parts.append(part)
                for chunk in _chunks(part, numbers):
                    yield chunk
        if not parts:
            raise TransientProviderError(f"{self.name}: the stream ended without a reply")
        yield self._decode(add_ai_message_chunks(*parts), request)

    def _runnable(self, request: ModelRequest) -> Any:
        refuse_parts(request.messages, images=True, files=False)
        runnable = self._model
        if request.tools:
            try:
                runnable = runnable.bind_tools([{"type": "function", "function": _tool(t)} for t in request.tools])
            except NotImplementedError:
                raise ProviderError(f"{self.name}: this LangChain model cannot call tools (bind_tools)") from None
        limit = request.max_output_tokens
        return runnable if limit is None else runnable.bind(**{self._output_limit: limit})

    def _decode(self, message: AIMessage, request: ModelRequest) -> Reply:
        text = str(repair_surrogates(_text(message)))
        calls = parse_tool_calls(_raw_calls(message), call_ids(request.messages))
        metadata = as_object(message.response_metadata)
        reason = finish_reason(next((metadata[k] for k in _ENDS if metadata.get(k)), ""), has_calls=bool(calls))
        refusal = as_text(as_object(message.additional_kwargs).get("refusal")) or None
        extra = _provider_extra(message, self.name)
        return Reply(
            Message(Role.ASSISTANT, text or refusal or "", calls, extra=extra),
            FinishReason.REFUSAL if refusal else reason,
            _usage(as_object(message.usage_metadata)),
            refusal=refusal,
            model=as_text(metadata.get("model_name") or metadata.get("model")),
        )


def _tool(tool: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", thaw(function_spec(tool)))


def _text(message: BaseMessage) -> str:
    """The text of a message, whose content is a text or a list of blocks."""
    content: object = message.content
    if isinstance(content, str):
        return content
    blocks = as_list(content)
    return "".join(block if isinstance(block, str) else as_text(as_object(block).get("text")) for block in blocks)


def _raw_calls(message: AIMessage) -> list[tuple[object, object, object]]:
    """The id, name and arguments of each call.

    Those of a stream are read from its text: LangChain itself completes arguments that are cut off.
    """
    chunks: Any = message.tool_call_chunks if isinstance(message, AIMessageChunk) else ()
    raw: Any = chunks or [*message.tool_calls, *message.invalid_tool_calls]
    return [(call.get("id"), call.get("name"), call.get("args")) for call in raw]


def _chunks(part: AIMessage, numbers: dict[object, int]) -> Iterator[StreamChunk]:
    """The chunks in a part of a stream."""
    if text := _text(part):
        yield TextChunk(text)
    deltas: Any = part.tool_call_chunks if isinstance(part, AIMessageChunk) else ()
    for delta in deltas:
        number = numbers.setdefault(delta.get("index"), len(numbers))
        yield ToolCallChunk(number, as_text(delta.get("name")), as_text(delta.get("args")))


def _usage(usage: dict[str, Any]) -> Usage:
    prompt, output = as_object(usage.get("input_token_details")), as_object(usage.get("output_token_details"))
    return mark_unpriced(
        Usage(
            input_tokens=token_count(usage, "input_tokens"),
            output_tokens=token_count(usage, "output_tokens"),
            cached_tokens=token_count(prompt, "cache_read"),
            written_tokens=token_count(prompt, "cache_creation"),
            reasoning_tokens=token_count(output, "reasoning"),
        )
    )


def _provider_extra(message: AIMessage, origin: str) -> dict[str, Any] | None:
    """The parts of a reply that must be sent back unchanged: blocks that are not text, and additional fields."""
    added = {k: v for k, v in as_object(message.additional_kwargs).items() if k != "tool_calls" and v is not None}
    blocks = [block for block in as_list(cast("object", message.content)) if not isinstance(block, str)]
    if not added and all(as_object(block).get("type") == "text" for block in blocks):
        return None
    metadata = {k: v for k, v in as_object(message.response_metadata).items() if k in _ORIGINS}
    stored = {"content": message.content, "additional_kwargs": added, "response_metadata": metadata}
    try:
        canonical_json(stored)
    except (TypeError, ValueError):  # not JSON, so it cannot be kept
        return None
    return {_EXTRA_KEY: {"voice": origin} | cast("dict[str, Any]", repair_surrogates(stored))}


def _encode(messages: Iterable[Message], origin: str) -> Iterator[BaseMessage]:
    """The transcript; the images that tools returned follow the last result of a batch, as a user message."""
    for each in with_images_after_results(messages):
        if isinstance(each, Message):
            shown = visible_message(each, images=True) if each.files else as_user_message(each)
            yield _encode_message(shown, origin)
            continue
        content: list[str | dict[Any, Any]] = []
        for label, image in each:
            content += [{"type": "text", "text": label}, _image_block(image)]
        yield HumanMessage(content=content)


def _image_block(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def _encode_message(message: Message, origin: str) -> BaseMessage:
    match message.role:
        case Role.SYSTEM:
            return SystemMessage(content=message.content)
        case Role.TOOL:
            return ToolMessage(
                content=message.content,
                tool_call_id=message.tool_call_id or "",
                name=message.name,
                status="error" if message.is_error else "success",
            )
        case Role.USER:
            if not message.images:
                return HumanMessage(content=message.content)
            parts = (part for part in message.parts if not isinstance(part, File))
            content: list[str | dict[Any, Any]] = [
                {"type": "text", "text": part} if isinstance(part, str) else _image_block(part) for part in parts
            ]
            return HumanMessage(content=content)
        case Role.ASSISTANT:
            return _encode_reply(message, origin)


def _encode_reply(message: Message, origin: str) -> AIMessage:
    """A reply: with its blocks and additional fields if they came from the model that is called and still match."""
    calls = [
        tool_call(name=safe_tool_name(call.name), args=thaw(call.arguments), id=call.id) for call in message.tool_calls
    ]
    stored = thaw(own_extra(message, _EXTRA_KEY, origin))
    if stored:
        again = AIMessage(
            content=stored["content"],
            additional_kwargs=stored["additional_kwargs"],
            response_metadata=stored["response_metadata"],
            tool_calls=calls,
        )
        if _text(again) == message.content:
            return again
    return AIMessage(content=message.content, tool_calls=calls)
