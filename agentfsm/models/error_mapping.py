"""How a failed model call becomes one of three errors, by its HTTP status, response body or connection error.

The first rule that applies wins:

1. status 413, or an error text for a prompt that is too long (except with 401, 403, 404 and 429):
   ``ContextOverflowError``
2. an account without credit, whatever the status, or ``x-should-retry: false``: ``ProviderError``
3. status 408, 409, 425, 429 or 5xx, or ``x-should-retry: true``: ``TransientProviderError``
4. everything else: ``ProviderError``

``agentfsm.runtime.model_call`` turns the error into the ``Failure`` of the error's ``kind``.

Error texts are shown to people and stored in journals. They say what failed and what to do, and quote the provider's
message without the API key and without any part of the prompt, because servers echo both.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from agentfsm.errors import ContextOverflowError, ModelError, ProviderError, TransientProviderError
from agentfsm.loop.messages import Message
from agentfsm.loop.prompts import without_provider_lessons
from agentfsm.models.providers import Endpoint
from agentfsm.models.wire_json import as_list, as_object, as_text, dumps, loads

_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})

_NEVER_OVERFLOW_STATUSES = frozenset({401, 403, 404, 429})  # "too many tokens per minute" does not mean a long prompt

_OVERFLOW_PATTERN = re.compile(
    "|".join(
        (
            r"context_length_exceeded|string_above_max_length",  # OpenAI, and most that speak like it
            r"maximum context length|context length is only",  # OpenAI, vLLM before and since 0.16, Mistral
            r"prompt is too long|exceed context limit",  # Anthropic
            r"input is too long for requested model",  # Anthropic's models in Bedrock
            r"exceed_context_size_error|exceeds the available context size",  # llama.cpp
            r"prompt too long|exceeds? (the )?(max(imum)? )?context (length|window|size)",  # Ollama, others
            r"exceeded max context length",  # Ollama
            r"input token count.{0,40}exceeds",  # Gemini
            r"maximum prompt length",  # xAI
            r"too much media|too many images|for many-image requests",  # Anthropic, OpenAI
            r"at most \d+ image|\d+ images, exceeding the maximum",  # vLLM, others
        )
    )
)
"""Each vendor's error text for a prompt that is too long or has too many images, as returned when this was written.

Both have the same remedy: removing old tool results and their images. Otherwise every later request would be rejected
(https://github.com/anthropics/claude-code/issues/3397).
"""

_NO_IMAGE_SUPPORT_PATTERN = re.compile(
    r"not support (image|vision|multimodal)|not a multimodal model|image input is not supported"
)
"""Error texts of models that do not accept images (https://github.com/ollama/ollama/issues/17301, vLLM, llama.cpp)."""

_BASE64_PATTERN = re.compile(r"[A-Za-z0-9+/]{32,}={0,2}")
"""Base64, the encoding of images."""

_STATUS_BY_ERROR_CODE = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "api_error": 500,
    "internal_server_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status for the type or code of an error object in a response with status 200."""

_REASON_KEYS = ("message", "Message", "detail", "msg", "status_msg", "title")
"""The fields that hold the reason in bodies without an error object.

In their order: AWS, FastAPI and RFC 9457, gateways, MiniMax (in ``base_resp``), RFC 9457 without a detail.
"""

_PAGE_REASON = re.compile(r"<(title|message)\b[^<>]*>([^<]+)<", re.IGNORECASE)
"""The title of a web page, or the message in an error of a server that speaks XML."""


_NO_CREDIT_CODES = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "billing_error"}
)
"""The codes of OpenAI and Anthropic for an account without credit, which no retry helps.

(https://platform.openai.com/docs/guides/error-codes, https://docs.anthropic.com/en/api/errors)
"""

_MAX_QUOTED_CHARS = 300
"""How many characters of a provider's message an error text quotes."""

_MIN_PROMPT_MATCH = 16
"""A substring of this length that is also in the prompt counts as part of the prompt."""

_MIN_KEY_MATCH = 8
"""The same for the API key: providers show its first and last characters."""


@dataclass(frozen=True, slots=True)
class ErrorObject:
    """The error in a response body: its message, its codes, and the HTTP status it names, if any."""

    message: str
    codes: tuple[str, ...]
    status: int | None


def extract_error(body: object) -> ErrorObject | None:
    """The error in a response body or stream event, or None; a response with status 200 may contain one too."""
    top = _top(body)
    choice = as_object(next(iter(as_list(top.get("choices"))), None))
    top_level = top if top.get("object") == "error" or top.get("type") == "error" else None
    inner = as_object(top.get("response")).get("error")  # a response that failed during the stream
    value = top.get("error") or choice.get("error") or inner or top_level
    error = as_object(value)
    if not value or (error and not any(error.values())):  # some servers send an empty error with each reply
        return None
    if not error:
        texts = as_list(value)
        return ErrorObject(str(texts[0] if texts else value), (), None)
    codes = tuple(str(error[k]) for k in ("code", "type", "status") if error.get(k))
    status = next((int(c) for c in codes if re.fullmatch(r"[45]\d\d", c)), None)
    if status is None:
        status = next((_STATUS_BY_ERROR_CODE[c] for c in codes if c in _STATUS_BY_ERROR_CODE), None)
    return ErrorObject(_message(error), codes, status)


def stated_reason(body: object) -> str:
    """The reason in a body without an error object; empty if there is none."""
    if isinstance(body, str):
        found = _PAGE_REASON.search(body)
        return html.unescape(found[2]) if found else "" if body.lstrip()[:1] in ("<", "{", "[") else body
    top = _top(body)
    first = next(iter(as_list(top.get("errors"))), None)
    holders = (top, as_object(first), as_object(top.get("base_resp")))
    stated = [(key, holder.get(key)) for holder in holders for key in _REASON_KEYS]
    # A message that is an object is not a reason, but perhaps the reply of another API.
    reasons = [str(value) for key, value in stated if value and (key == "detail" or not as_object(value))]
    return reasons[0] if reasons else as_text(first)


def _top(body: object) -> dict[str, Any]:
    """The body if it is an object, or the first one in a list, in which Google's servers send an error.

    (https://github.com/FuzzAnything/PromptFuzz/issues/42)
    """
    return as_object(next(iter(as_list(body)), body))


def _message(error: dict[str, Any]) -> str:
    """The message of an error object, with what the provider behind a gateway said.

    OpenRouter's own message is always the same then (https://openrouter.ai/docs/api-reference/errors).
    """
    raw: object = as_object(error.get("metadata")).get("raw") or ""
    if isinstance(raw, str):
        with suppress(ValueError):
            raw = loads(raw)
    behind = extract_error(raw)
    said = behind.message if behind else raw if isinstance(raw, str) else stated_reason(raw)
    return ": ".join(filter(None, (str(error.get("message") or ""), said)))


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """How long the provider asks to wait before a retry, in seconds, or None if it does not say.

    ``retry-after-ms`` is more precise and wins; ``retry-after`` is in seconds or an HTTP date
    (RFC 9110, 10.2.3). A date in the past means 0.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        try:
            wait = float(text) * unit
        except ValueError:
            continue
        if isfinite(wait) and wait >= 0:
            return wait
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def error_class(status: int, error: ErrorObject, headers: Mapping[str, str]) -> type[ModelError]:
    """The class of the error that a response is, by the rules above."""
    text = " ".join((error.message, *error.codes)).lower()
    if status == 413 or (status not in _NEVER_OVERFLOW_STATUSES and _OVERFLOW_PATTERN.search(text)):
        return ContextOverflowError
    should_retry = headers.get("x-should-retry", "").strip().lower()  # as the SDKs of OpenAI and Anthropic read it
    retryable = should_retry != "false" and (status in _RETRYABLE_STATUSES or status >= 500)
    if (retryable or should_retry == "true") and not lacks_credit(status, error):
        return TransientProviderError
    return ProviderError


def lacks_credit(status: int, error: ErrorObject) -> bool:
    """Whether the account has no credit, which no retry helps."""
    return status == 402 or not _NO_CREDIT_CODES.isdisjoint(error.codes)


def scrub(text: str, secrets: Iterable[str], prompt: Sequence[Message] = ()) -> str:
    """A server's text on one line, shortened, without secrets and without any part of the prompt."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())[: 2 * _MAX_QUOTED_CHARS]
    hidden = set[int]()
    for secret in secrets:
        hidden |= _overlap(line, secret, _MIN_KEY_MATCH)
    for text_of_prompt in _prompt_texts(prompt):
        hidden |= _overlap(line, text_of_prompt, _MIN_PROMPT_MATCH)
    if any(message.attachments for message in prompt):
        hidden.update(i for match in _BASE64_PATTERN.finditer(line) for i in range(*match.span()))
    marked = "".join("\0" if i in hidden else c for i, c in enumerate(line))
    shown = re.sub("\0+", "[...]", marked)
    return shown if len(shown) <= _MAX_QUOTED_CHARS else shown[:_MAX_QUOTED_CHARS] + "..."


@dataclass(frozen=True, slots=True)
class CallErrors:
    """Makes the errors of calls to one model.

    Attributes:
        model: The model's name at its provider.
        endpoint: The base URL and the API key of the calls.
        secrets: The keys, tokens and passwords of the calls, which no error text quotes; keys that are renewed
            are added.
    """

    model: str
    endpoint: Endpoint
    secrets: list[SecretStr] = field(default_factory=list[SecretStr], repr=False, compare=False)

    @property
    def name(self) -> str:
        """``provider:model``."""
        return f"{self.endpoint.provider.name}:{self.model}"

    def from_response(
        self,
        status: int,
        body: object,
        headers: Mapping[str, str],
        now: float,
        prompt: Sequence[Message],
        *,
        default_status: int = 200,
    ) -> ModelError:
        """The error for an error response.

        Args:
            status: The HTTP status; 200 if only the body is an error.
            body: The parsed body, or its text if it is not JSON.
            headers: The response headers.
            now: The wall clock, in seconds since 1970.
            prompt: The messages of the request, which are removed from the error text.
            default_status: What a status of 200 means if the body names no other status.
        """
        error = extract_error(body) or ErrorObject(stated_reason(body), (), None)
        if status < 300:
            status = error.status or default_status
        kind = error_class(status, error, headers)
        server_message = self._quote(error.message or " ".join(error.codes), prompt)
        if kind is ContextOverflowError:
            text = f"{self.name}: the prompt is too long for the model{_status_suffix(status)}{server_message}"
            return ContextOverflowError(text, status=status)
        if kind is TransientProviderError:
            what = "the server is called too often" if status == 429 else "the server is temporarily unavailable"
            wait = retry_after_s(headers, now)
            asked = f"; it asks to wait {wait:g} s" if wait else ""
            text = f"{self.name}: {what}{_status_suffix(status)}{server_message}{asked}"
            return TransientProviderError(text, retry_after_s=wait, status=status)
        no_credit, error_text = lacks_credit(status, error), error.message.lower()
        what, to_do = ("the account has no credit", "check its billing") if no_credit else self._advice(status)
        if not to_do and _NO_IMAGE_SUPPORT_PATTERN.search(error_text) and any(message.images for message in prompt):
            to_do = "does the model accept images? if not, use ModelSettings(images=False)"
        text = f"{self.name}: {what}{_status_suffix(status)}{to_do and f': {to_do}'}{server_message}"
        return ProviderError(text, status=status)

    def unreachable(self, why: str) -> TransientProviderError:
        """The error for a server that cannot be reached."""
        where, hint = self.endpoint.base_url, self.endpoint.provider.hint
        return TransientProviderError(f"{self.name}: cannot connect to {where}: {hint} ({self.scrub(why)})")

    def proxy_failed(self, why: str) -> ModelError:
        """The error for a proxy that cannot be reached, or that rejects the call (4xx, which no retry helps)."""
        kind = ProviderError if re.match(r"4\d\d\b", why) else TransientProviderError
        return kind(
            f"{self.name}: the proxy does not connect to {self.endpoint.base_url}: "
            f"is it running, and are proxy= or HTTPS_PROXY, HTTP_PROXY and NO_PROXY right? ({self.scrub(why)})"
        )

    def no_key(self, why: str) -> ProviderError:
        """The error for an API key that cannot be obtained."""
        return ProviderError(f"{self.name}: there is no API key to call {self.endpoint.base_url} with: {why}")

    def unknown_host(self) -> ProviderError:
        """The error for an address whose host no name server knows."""
        return ProviderError(
            f"{self.name}: there is no host {urlsplit(self.endpoint.base_url).hostname!r}: "
            f"is the address {self.endpoint.base_url} right?"
        )

    def untrusted_certificate(self, why: str) -> ProviderError:
        """The error for a server whose certificate cannot be verified."""
        return ProviderError(
            f"{self.name}: the certificate of {self.endpoint.base_url} cannot be verified ({self.scrub(why)}): "
            "pass the certificate of its authority as HttpOptions(verify=...), or --ca-bundle to agentfsm run"
        )

    def no_tls(self) -> ProviderError:
        """The error for a server that answers a TLS handshake with something else."""
        return ProviderError(
            f"{self.name}: the server at {self.endpoint.base_url} does not speak TLS: "
            "should its address begin with http:// instead?"
        )

    def transient(self, what: str) -> TransientProviderError:
        """The error for a missing or incomplete response; a retry may succeed."""
        return TransientProviderError(f"{self.name}: {what} ({self.endpoint.base_url})")

    def invalid_response(
        self, what: str, status: int | None = None, *, body: object = None, prompt: Sequence[Message] = ()
    ) -> ProviderError:
        """The error for a complete response that cannot be used."""
        quoted = self._quote(stated_reason(body), prompt)
        return ProviderError(f"{self.name}: {what} ({self.endpoint.base_url}){quoted}", status=status)

    def scrub(self, text: str, prompt: Sequence[Message] = ()) -> str:
        """A server's text on one line, shortened, without secrets and without any part of the prompt."""
        return scrub(text, [secret.get_secret_value() for secret in self.secrets], prompt)

    def _quote(self, reason: str, prompt: Sequence[Message]) -> str:
        quoted = self.scrub(reason, prompt)
        return f"; the server says: {quoted}" if quoted else ""

    def _advice(self, status: int) -> tuple[str, str]:
        """What happened, and what to do about it (may be empty)."""
        url, row, source = self.endpoint.base_url, self.endpoint.provider, self.endpoint.key_source
        account = self.endpoint.account is not None
        credentials, have = (source, "have") if account else (f"the API key from {source}", "has")
        match status:
            case 401 if not source:
                variable = f" ({row.key_env} is sent only to {row.name}'s own address)" if row.key_env else ""
                return (
                    f"{url} requires an API key, and none was sent",
                    f"pass api_key, or --api-key-env to agentfsm run{variable}",
                )
            case 401:
                return f"{url} rejects {credentials}", "is it the right one, and still valid?"
            case 403:
                who = f"{credentials} {have}" if source else "a call without an API key has"
                return f"{who} no permission for this at {url}", "may it use the model?"
            case 404:
                return (
                    f"{url} did not find the resource",
                    f"does it have a model {self.model!r}, and is the address right?",
                )
            case 407:
                return (
                    f"a proxy on the way to {url} wants a password",
                    "is the one in proxy= or HTTP_PROXY right?",
                )
            case _ if 300 <= status < 400:
                return (
                    f"{url} redirects to another address, to which no API key is sent",
                    "is base_url the final address?",
                )
            case _:
                return f"{url} rejects the request", ""


def _status_suffix(status: int) -> str:
    try:
        return f" ({status} {HTTPStatus(status).phrase})" if status != HTTPStatus.OK else ""
    except ValueError:
        return f" ({status})"


def _prompt_texts(prompt: Iterable[Message]) -> Iterator[str]:
    """Every text and all call arguments of a prompt, each on one line, as ``scrub`` compares them."""
    for message in prompt:
        arguments = (dumps(call.arguments) for call in message.tool_calls if call.arguments)
        texts = (without_provider_lessons(message.content), *arguments)
        yield from (" ".join(text.split()) for text in texts)


def _overlap(text: str, secret: str, size: int) -> set[int]:
    """The positions in ``text`` of every substring of ``size`` characters (fewer for a shorter secret) of a secret."""
    size = min(size, len(secret))
    if size < 4:  # removing a prompt such as "hi" would make the text unreadable
        return set()
    half = size // 2  # each such substring contains one of these blocks: few searches in a long prompt
    blocks = [b for b in range(0, len(text) - half + 1, half) if text[b : b + half] in secret]
    near = (i for b in blocks for i in range(max(0, b - half + 1), min(b, len(text) - size) + 1))
    return {i + n for i in near if text[i : i + size] in secret for n in range(size)}
