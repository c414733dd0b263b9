"""``from_pydantic_ai``: a model of pydantic-ai as a model of an agent here. It needs the extra ``pydantic-ai``.

::

    from pydantic_ai.models.google import GoogleModel

    agent = Agent(from_pydantic_ai(GoogleModel("gemini-2.5-pro")), tools=[...])

Only the call of the model is pydantic-ai's; tools, retries, limits and the journal are those of the agent.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from pydantic import SecretStr, TypeAdapter

from agentfsm.errors import MissingExtraError, TransientProviderError
from agentfsm.integrations.foreign_models import ForeignModel, finish_reason, with_images_after_results
from agentfsm.loop.messages import File, Image, Message, Reply, Role, Usage
from agentfsm.loop.model import ModelRequest, ReasoningChunk, StreamChunk, StreamingModel, TextChunk, ToolCallChunk
from agentfsm.loop.prompts import as_user_message
from agentfsm.loop.read_only import thaw
from agentfsm.models.wire_format import call_ids, mark_unpriced, own_extra, parse_tool_calls, safe_tool_name
from agentfsm.models.wire_json import as_list, repair_surrogates

try:
    from pydantic_ai import messages as theirs
    from pydantic_ai.direct import model_request, model_request_stream
    from pydantic_ai.models import Model as PydanticAIModel
    from pydantic_ai.models import ModelRequestParameters, infer_model
    from pydantic_ai.output import OutputObjectDefinition
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition
except ImportError as error:
    raise MissingExtraError("a model of pydantic-ai", "pydantic-ai") from error

_EXTRA_KEY = "pydantic_ai"
"""The key in ``Message.extra`` of a reply's parts: signed reasoning must be sent back unchanged."""

_PARTS: TypeAdapter[list[theirs.ModelResponsePart]] = TypeAdapter(list[theirs.ModelResponsePart])


def from_pydantic_ai(model: PydanticAIModel | str) -> StreamingModel:
    """A model of pydantic-ai, as a model of an agent here.

    Args:
        model: The model, with settings of its own, or its name there (``"google:gemini-2.5-pro"``).
    """
    return _Adapter(infer_model(model))


class _Adapter(ForeignModel):
    """A model of pydantic-ai."""

    def __init__(self, model: PydanticAIModel) -> None:
        self._model = model

    @property
    def name(self) -> str:
        return f"{self._model.system}:{self._model.model_name}"

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The key of the provider's client, if it has one."""
        key: object = getattr(getattr(self._model.provider, "client", None), "api_key", None)
        return (SecretStr(key),) if isinstance(key, str) and key else ()

    def __repr__(self) -> str:
        return f"from_pydantic_ai({self.name!r})"

    async def _call(self, request: ModelRequest) -> Reply:
        response = await model_request(
            self._model,
            list(_encode(request.messages, self.name)),
            model_settings=_settings(request),
            model_request_parameters=self._parameters(request),
        )
        return self._decode(response, request)

    async def _open_stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        async with model_request_stream(
            self._model,
            list(_encode(request.messages, self.name)),
            model_settings=_settings(request),
            model_request_parameters=self._parameters(request),
        ) as stream:
            numbers = dict[int, int]()
            async for event in stream:
                if (chunk := _chunk(event, numbers)) is not None:
                    yield chunk
            reply = self._decode(stream.get(), request)
        yield reply

    def _parameters(self, request: ModelRequest) -> ModelRequestParameters:
        """The tools and the output schema; the schema only where the model is known to take one, without tools."""
        tools = [
            ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=thaw(tool.parameters))
            for tool in request.tools
        ]
        schema = request.output_schema
        if schema is None or tools or not self._model.profile.get("supports_json_schema_output", False):
            return ModelRequestParameters(function_tools=tools)
        wanted = OutputObjectDefinition(json_schema=thaw(schema), name=safe_tool_name(request.output_name))
        return ModelRequestParameters(function_tools=tools, output_mode="native", output_object=wanted)

    def _decode(self, response: theirs.ModelResponse, request: ModelRequest) -> Reply:
        if response.finish_reason == "error" or response.state == "interrupted":
            raise TransientProviderError(f"{self.name}: the provider interrupted the reply")
        text = "".join(part.content for part in response.parts if isinstance(part, theirs.TextPart))
        parts = [part for part in response.parts if isinstance(part, theirs.ToolCallPart)]
        calls = parse_tool_calls(
            [(part.tool_call_id, part.tool_name, part.args) for part in parts], call_ids(request.messages)
        )
        extra = None
        if any(not isinstance(part, theirs.TextPart | theirs.ToolCallPart) for part in response.parts):
            ids = iter(call.id for call in calls)
            for part in parts:
                part.tool_call_id = next(ids)
            stored = repair_surrogates(_PARTS.dump_python(list(response.parts), mode="json"))
            extra = {_EXTRA_KEY: {"voice": self.name, "parts": stored}}
        usage = response.usage
        return Reply(
            Message(Role.ASSISTANT, str(repair_surrogates(text)), calls, extra=extra),
            finish_reason(response.finish_reason, has_calls=bool(calls)),
            mark_unpriced(
                Usage(
                    input_tokens=usage.input_tokens,
                    output_tokens=usage.output_tokens,
                    cached_tokens=usage.cache_read_tokens,
                    written_tokens=usage.cache_write_tokens,
                    reasoning_tokens=usage.output_reasoning_tokens,
                )
            ),
            model=response.model_name or "",
        )


def _settings(request: ModelRequest) -> ModelSettings | None:
    """The settings of the request; the model's own apply besides, and the run itself limits its time."""
    limit = request.max_output_tokens
    return None if limit is None else ModelSettings(max_tokens=limit)


def _chunk(event: Any, numbers: dict[int, int]) -> StreamChunk | None:
    """The chunk in an event, or None."""
    part = event.part if isinstance(event, theirs.PartStartEvent) else getattr(event, "delta", None)
    match part:
        case theirs.TextPart(content=text) | theirs.TextPartDelta(content_delta=text) if text:
            return TextChunk(text)
        case theirs.ThinkingPart(content=text) | theirs.ThinkingPartDelta(content_delta=text) if text:
            return ReasoningChunk(text)
        case theirs.ToolCallPart():
            number = numbers.setdefault(event.index, len(numbers))
            return ToolCallChunk(number, part.tool_name, _arguments_text(part.args))
        case theirs.ToolCallPartDelta() if event.index in numbers:
            text = _arguments_text(part.args_delta)
            return ToolCallChunk(numbers[event.index], part.tool_name_delta or "", text)
        case _:
            return None


def _arguments_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments) if arguments else ""


def _encode(messages: Iterable[Message], origin: str) -> Iterator[theirs.ModelMessage]:
    """The transcript; all parts between two replies are one request.

    The images that tools returned are the user's: pydantic-ai would send a result that contains some as JSON.
    """
    parts = list[theirs.ModelRequestPart]()
    for each in with_images_after_results(messages):
        if not isinstance(each, Message):
            content = [part for label, image in each for part in (label, _encode_binary(image))]
            parts.append(theirs.UserPromptPart(content))
        elif each.role is Role.TOOL and each.tool_call_id is not None:
            parts.append(_encode_result(each, each.tool_call_id))
        elif each.role is Role.ASSISTANT:
            if parts:
                yield theirs.ModelRequest(parts)
            parts = []
            yield theirs.ModelResponse(_encode_reply(each, origin))
        elif each.role is Role.SYSTEM:
            parts.append(theirs.SystemPromptPart(each.content))
        else:
            shown = as_user_message(each)
            mixed = [part if isinstance(part, str) else _encode_binary(part) for part in shown.parts]
            parts.append(theirs.UserPromptPart(mixed if shown.attachments else shown.content))
    if parts:
        yield theirs.ModelRequest(parts)


def _encode_result(message: Message, call_id: str) -> theirs.ToolReturnPart[Any]:
    name = safe_tool_name(message.name or "tool")
    return theirs.ToolReturnPart(name, message.content, call_id, outcome="failed" if message.is_error else "success")


def _encode_binary(part: Image | File) -> theirs.BinaryContent:
    return theirs.BinaryContent(base64.b64decode(part.data), media_type=part.media_type)


def _encode_reply(message: Message, origin: str) -> Sequence[theirs.ModelResponsePart]:
    """The parts of a reply: unchanged if they came from the model that is called and still match the message."""
    stored = as_list(own_extra(message, _EXTRA_KEY, origin).get("parts"))
    parts = _PARTS.validate_python(thaw(stored)) if stored else []
    said = "".join(part.content for part in parts if isinstance(part, theirs.TextPart))
    called = [(part.tool_call_id, part.tool_name) for part in parts if isinstance(part, theirs.ToolCallPart)]
    if parts and (said, called) == (message.content, [(call.id, call.name) for call in message.tool_calls]):
        return parts
    text = [theirs.TextPart(message.content)] if message.content or not message.tool_calls else []
    calls = [
        theirs.ToolCallPart(safe_tool_name(call.name), thaw(call.arguments), call.id) for call in message.tool_calls
    ]
    return [*text, *calls]
