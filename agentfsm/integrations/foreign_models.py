"""What the adapters of other libraries' models share: ``ForeignModel``, and their exceptions and reasons in our words.

An adapter is a subclass of ``ForeignModel`` with a call, a stream and a name.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import cast

from pydantic import SecretStr

from agentfsm.errors import ModelError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Image, Message, Reply, Role
from agentfsm.loop.model import ModelRequest, StreamChunk
from agentfsm.models.error_mapping import ErrorObject, error_class, extract_error, retry_after_s, scrub
from agentfsm.models.wire_format import labelled_images
from agentfsm.models.wire_json import as_object

_CONNECTION_ERRORS = frozenset(
    {"APIConnectionError", "ConnectionError", "ModelConnectionError", "OSError", "TimeoutError", "TransportError"}
)
"""Names of exception classes for a connection that failed; each library and its HTTP client has its own."""

_FINISH_REASONS = {
    FinishReason.LENGTH: ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"),
    FinishReason.CONTENT_FILTER: ("content_filter", "safety", "recitation", "guardrail_intervened"),
    FinishReason.REFUSAL: ("refusal",),
}
_REASONS_BY_WORD = {word: reason for reason, words in _FINISH_REASONS.items() for word in words}


class ForeignModel(ABC):
    """A model of another library. It holds no connection of its own, and every exception becomes a ``ModelError``."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the model."""

    @property
    @abstractmethod
    def secrets(self) -> tuple[SecretStr, ...]:
        """The keys of the model, as far as they are known; they stand in no error and in no journal."""

    @abstractmethod
    async def _call(self, request: ModelRequest) -> Reply:
        """The reply to one request; any exception may be raised."""

    @abstractmethod
    def _open_stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        """The chunks of the reply, and last the reply; any exception may be raised."""

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply to one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        try:
            return await self._call(request)
        except Exception as error:
            raise model_error(self.name, error, request.messages, self.secrets) from None

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        """The chunks of the reply as it is generated, and last the reply.

        Raises:
            agentfsm.errors.ModelError: The call failed, or the stream ended early.
        """
        try:
            async with aclosing(self._open_stream(request)) as parts:
                async for part in parts:
                    yield part
        except Exception as error:
            raise model_error(self.name, error, request.messages, self.secrets) from None


LabelledImages = tuple[tuple[str, Image], ...]
"""The images that tools returned, each with its label."""


def with_images_after_results(messages: Iterable[Message]) -> Iterator[Message | LabelledImages]:
    """A transcript in which the images that tools returned follow the last result of each batch, for a user message.

    Most providers take nothing but text as a result.
    """
    results = list[Message]()
    for message in messages:
        if message.role is Role.TOOL and message.tool_call_id is not None:
            results.append(message)
        elif results:
            if images := tuple(labelled_images(results)):
                yield images
            results = []
        yield message
    if images := tuple(labelled_images(results)):
        yield images


def finish_reason(word: object, *, has_calls: bool) -> FinishReason:
    """The finish reason that a provider's word means; whether tools are called is read from the calls."""
    stated = _REASONS_BY_WORD.get(str(word).lower(), FinishReason.STOP)
    return FinishReason.TOOL_CALLS if stated is FinishReason.STOP and has_calls else stated


def model_error(
    name: str, error: Exception, prompt: Sequence[Message], secrets: Iterable[SecretStr] = ()
) -> ModelError:
    """The error of ours for an exception of another library.

    Its HTTP status, body and headers decide as for our own models, wherever in the chain of its causes they are. An
    exception without them is transient if the connection failed.
    """
    if isinstance(error, ModelError):
        return error
    chain = list(_causes(error))
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    keys = [secret.get_secret_value() for secret in secrets]
    text = f"{name}: {scrub(f'{type(error).__name__}: {error}', keys, prompt)}"
    for each in chain:
        if (status := _status(each)) is None:
            continue
        headers = _headers(each)
        body = getattr(each, "body", None)
        said = extract_error(body) or extract_error({"error": body}) or ErrorObject(str(error), (), None)
        if "ContextWindowExceededError" in kinds or "ModelContextWindowExceededError" in kinds:
            said = ErrorObject(said.message, (*said.codes, "context_length_exceeded"), said.status)
        wait = getattr(error, "retry_after", None)
        wait = float(wait) if isinstance(wait, int | float) else retry_after_s(headers, time.time())
        kind = error_class(status, said, headers)
        return kind(text, status=status, retry_after_s=wait if kind is TransientProviderError else None)
    if kinds & _CONNECTION_ERRORS or isinstance(error, asyncio.IncompleteReadError):
        return TransientProviderError(text)
    return error_class(400, ErrorObject(str(error), (), None), {})(text)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that one..."""
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status of an exception, under the names that OpenAI, Anthropic, Google and botocore give it."""
    response = getattr(error, "response", None)
    metadata = as_object(as_object(response).get("ResponseMetadata"))
    places = (
        getattr(error, "status_code", None),
        getattr(response, "status_code", None),
        getattr(error, "code", None),
        metadata.get("HTTPStatusCode"),
    )
    return next((int(p) for p in places if isinstance(p, int | HTTPStatus) and 400 <= int(p) < 600), None)


def _headers(error: BaseException) -> Mapping[str, str]:
    """The headers of the response that an exception is about, by their lower-case names; empty if it has none."""
    places = (getattr(error, "response", None), error)
    given = [getattr(error, "litellm_response_headers", None), *(getattr(place, "headers", None) for place in places)]
    for headers in given:
        if isinstance(headers, Mapping):
            return {str(key).lower(): str(value) for key, value in cast("Mapping[object, object]", headers).items()}
    return {}
