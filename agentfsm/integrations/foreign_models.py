"""What the adapters of other libraries' models share: their exceptions become our errors, their reasons ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import cast

from pydantic import SecretStr

from agentfsm.errors import ModelError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message
from agentfsm.models.error_mapping import ErrorObject, error_class, extract_error, retry_after_s, scrub
from agentfsm.models.wire_format import as_object

__all__ = ["finish_reason", "model_error"]

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

    Args:
        name: The model's name.
        error: The exception.
        prompt: The messages of the request, which are removed from the error text.
        secrets: The model's keys, likewise.
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
