"""Models that wrap other models: ``FallbackModel``, ``Limited``, ``Priced``, and their base class.

::

    PRICES = {"openai:gpt-5-mini": Price(input=0.25, cached=0.025, output=2.00), "ollama:*": Price()}
    agent = Agent(Priced("openai:gpt-5-mini", PRICES), guardrails=AgentGuardrails(max_cost_usd=0.50))
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Self

from pydantic import SecretStr

from agentfsm.errors import (
    ConfigurationError,
    ContextOverflowError,
    ModelError,
    ProviderError,
    TransientProviderError,
)
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import Reply, Usage
from agentfsm.loop.model import (
    KeepAlive,
    Model,
    ModelRequest,
    StreamChunk,
    StreamRestart,
    can_stream,
    has_admission,
    secrets_of,
)
from agentfsm.models.limits import Limit, ReportUsage
from agentfsm.models.model_registry import resolve
from agentfsm.models.settings import ModelSettings, with_settings

log = logging.getLogger("agentfsm")

_ERRORS_BY_RETRYABILITY = (TransientProviderError, ContextOverflowError, ProviderError)
"""The errors in order of priority when several models failed: the one that a retry fixes soonest comes first."""


class ModelWrapper:
    """The base class of a wrapper around one model; it has the name and the secrets of that model.

    Args:
        model: The model or its name.

    Raises:
        UnknownModelError: No provider is known for the name.
        MissingKeyError: The provider needs an API key and there is none.
    """

    def __init__(self, model: str | Model) -> None:
        self.model = as_model(model)

    def with_settings(self, settings: ModelSettings) -> Self:
        """The same around the model with other settings.

        Args:
            settings: The settings.

        Raises:
            ConfigurationError: The model takes no settings, or does not support one of them.
        """
        wrapper = copy.copy(self)
        wrapper.model = with_settings(self.model, settings)
        return wrapper

    @property
    def name(self) -> str:
        """The name of the wrapped model."""
        return self.model.name

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """What must not appear in a journal."""
        return secrets_of(self.model)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    async def aclose(self) -> None:
        """Close the connections of the model."""
        await close_if_supported(self.model)


def as_model(model: str | Model) -> Model:
    """The model, or the model for a name.

    Raises:
        UnknownModelError: No provider is known for the name.
        MissingKeyError: The provider needs an API key and there is none.
    """
    return resolve(model) if isinstance(model, str) else model


@asynccontextmanager
async def acquire_turn(model: Model, request: ModelRequest) -> AsyncGenerator[Model, None]:
    """Wait for the limits of a model, if it has any; yields the model to call."""
    if not has_admission(model):
        yield model
        return
    async with model.admission(request) as inner:
        yield inner


async def stream_or_reply(model: Model, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
    """The chunks of a model's reply and last the reply, or only the reply if the model does not stream.

    The caller must close it (``aclosing``): leaving a loop early does not close the generator it iterates over.
    """
    if not can_stream(model):
        yield await model.reply(request)
        return
    stream: AsyncIterator[StreamChunk | Reply] = model.stream(request)
    try:
        async for part in stream:
            yield part
    finally:
        await close_if_supported(stream)


async def close_if_supported(resource: Any) -> None:
    """Close a model or a stream if it has an ``aclose`` method."""
    aclose: Any = getattr(resource, "aclose", None)
    if aclose is not None:
        await aclose()


class FallbackModel:
    """Several models as one: each is called if the one before it failed.

    ::

        FallbackModel("anthropic:claude-sonnet-4-6", "openai:gpt-5-mini", "ollama:llama3.2")

    ``Reply.model``, and so the journal, names the model that replied. Each model gets an equal share of the
    remaining time, so that one that hangs leaves time for the others. Each call counts towards the run's
    ``max_iterations``; with none left, the next model is not called. If a stream is interrupted, the next model
    starts from the beginning, and the run emits ``ReplyRestarted``.

    Args:
        models: The models or their names, in the order in which they are called; at least one.
        on: The kinds of failure after which the next model is called; others are raised at once.

    Raises:
        ConfigurationError: There is no model, or a kind is not one of a model's failures.
        UnknownModelError: No provider is known for a name.
        MissingKeyError: A provider needs an API key and there is none.
    """

    def __init__(
        self,
        *models: str | Model,
        on: Iterable[FailureKind | str] = (FailureKind.transient_provider, FailureKind.provider_error),
    ) -> None:
        if not models:
            raise ConfigurationError("a FallbackModel needs a model to call, and one to fall back to")
        kinds = {error.kind for error in _ERRORS_BY_RETRYABILITY}
        self._on = frozenset(str(kind) for kind in on)
        if unknown := sorted(self._on - kinds):
            raise ConfigurationError(f"not a failure of a model: {', '.join(unknown)}; use {', '.join(sorted(kinds))}")
        self.models = tuple(as_model(model) for model in models)

    def with_settings(self, settings: ModelSettings) -> Self:
        """The same models with other settings.

        Args:
            settings: The settings.

        Raises:
            ConfigurationError: One of the models takes no settings, or does not support one of them.
        """
        fallback = copy.copy(self)
        fallback.models = tuple(with_settings(model, settings) for model in self.models)
        return fallback

    @property
    def name(self) -> str:
        """The names of the models, in order."""
        return " | ".join(model.name for model in self.models)

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """What must not appear in a journal."""
        return secrets_of(*self.models)

    def __repr__(self) -> str:
        return f"FallbackModel({', '.join(map(repr, self.models))})"

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply of the first model that does not fail.

        Raises:
            agentfsm.errors.ModelError: All models failed, or one failed with a kind that is not in ``on``.
        """
        attempts = _Attempts(self.models, self._on, request)
        for model in self.models:
            if not attempts.may_call_next():
                break
            share = attempts.request_with_share()
            try:
                async with asyncio.timeout(share.timeout_s), acquire_turn(model, share) as inner:
                    return _with_model_name(await inner.reply(share), model)
            except Exception as error:
                attempts.record_failure(model, error)
        raise attempts.combined_error()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The chunks of the reply as it is generated, and last the reply.

        Raises:
            agentfsm.errors.ModelError: As for ``reply``.
        """
        attempts = _Attempts(self.models, self._on, request)
        for model in self.models:
            if not attempts.may_call_next():
                break
            share = attempts.request_with_share()
            until = asyncio.get_running_loop().time() + share.timeout_s
            stream, produced, started_at = _stream_model(model, share), False, math.inf
            try:
                while True:
                    async with asyncio.timeout_at(until):
                        part = await anext(stream, None)
                    if isinstance(part, Reply):
                        yield _with_model_name(part, model)
                        return
                    if part is None:
                        raise TransientProviderError(f"{model.name}: the stream ended without a reply")
                    if not isinstance(part, KeepAlive):
                        produced, now = True, asyncio.get_running_loop().time()
                        started_at = min(started_at, now)
                        until = now + request.heartbeat_s
                    yield part
            except Exception as error:
                attempts.record_failure(model, error)
            finally:
                await stream.aclose()
            if produced and attempts.remaining:
                attempts.extend_deadline(asyncio.get_running_loop().time() - started_at)
                yield StreamRestart(attempts.last_error)
        raise attempts.combined_error()

    async def aclose(self) -> None:
        """Close the connections of all models; they can still be used."""
        for model in self.models:
            await close_if_supported(model)


class _Attempts:
    """The attempts of one call: how much time each model gets, and how the earlier ones failed."""

    def __init__(self, models: tuple[Model, ...], on: frozenset[str], request: ModelRequest) -> None:
        self.remaining = len(models)
        self.last_error = ""
        self._on = on
        self._request = request
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + request.timeout_s
        self._errors: list[ModelError] = []

    def may_call_next(self) -> bool:
        """Whether the run has a model call left for the next model; the first one's is counted already."""
        return not self._errors or self._request.budget.spend()

    def request_with_share(self) -> ModelRequest:
        """The request for the next model, with its share of the time."""
        share = max(self._deadline - self._now(), 0.001) / self.remaining
        self.remaining -= 1
        return replace(self._request, timeout_s=share)

    def extend_deadline(self, seconds: float) -> None:
        """Do not charge the time in which a stream flowed: the timeout is for the wait for a first piece."""
        self._deadline += seconds

    def record_failure(self, model: Model, error: Exception) -> None:
        """Record a failure if the next model may be called after it; else raise it."""
        if isinstance(error, TimeoutError):
            error = TransientProviderError(f"{model.name} did not reply within its share of the time")
        elif not isinstance(error, ModelError):
            error = ProviderError(f"{model.name}: {type(error).__name__}: {error}")
        if error.kind not in self._on:
            raise error
        self._errors.append(error)
        self.last_error = str(error)
        log.info(
            "%s failed (%s); %s", model.name, error.kind, "calling the next" if self.remaining else "it was the last"
        )

    def combined_error(self) -> ModelError:
        """The error if all models failed; of their kinds it has the one that a retry fixes soonest."""
        if len(self._errors) == 1:
            return self._errors[0]
        kind = next(kind for kind in _ERRORS_BY_RETRYABILITY if any(isinstance(e, kind) for e in self._errors))
        best = [e for e in self._errors if isinstance(e, kind)]
        waits = [e.retry_after_s for e in best]
        wait = None if None in waits else min(w for w in waits if w is not None)
        text = f"all models failed: {'; '.join(map(str, self._errors))}"
        return kind(text, retry_after_s=wait, status=best[-1].status)


async def _stream_model(model: Model, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
    async with acquire_turn(model, request) as inner, aclosing(stream_or_reply(inner, request)) as stream:
        async for part in stream:
            yield part


def _with_model_name(reply: Reply, model: Model) -> Reply:
    """The reply with the name of the model that gave it."""
    return replace(reply, model=model.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a model, in USD per million tokens.

    Attributes:
        input: Input tokens.
        output: Output tokens, reasoning included.
        cached: Input tokens read from the provider's cache; ``input`` if None.
        written: Input tokens written to the provider's cache; ``input`` if None.

    Raises:
        ConfigurationError: A price is negative or not a finite number.
    """

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None
    written: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "written"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigurationError(f"the price of {name} tokens must be zero or more")

    def cost_of(self, usage: Usage) -> float:
        """The cost of a usage, in USD."""
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.written is None else self.written
        rest = max(0, usage.input_tokens - usage.cached_tokens - usage.written_tokens)
        spent = rest * self.input + usage.cached_tokens * cached + usage.written_tokens * written
        return (spent + usage.output_tokens * self.output) / 1_000_000


class Priced(ModelWrapper):
    """A model whose replies include their cost.

    A reply whose price is not in the table has cost 0 and counts its tokens in ``usage.unpriced_tokens``; a run with a
    ``max_cost_usd`` then warns that it cannot enforce it. A cost that the provider reports is kept.

    Args:
        model: The model or its name.
        prices: Prices by name: ``provider:model``, or a pattern of such names (``ollama:*``). An exact name
            has priority, then the longest pattern.
    """

    def __init__(self, model: str | Model, prices: Mapping[str, Price]) -> None:
        super().__init__(model)
        self._prices = dict(prices)

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait for the limits of the wrapped model; yields the model to call."""
        async with acquire_turn(self.model, request) as inner:
            yield self if inner is self.model else Priced(inner, self._prices)

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply of the model, with its cost.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        return self._with_cost(await self.model.reply(request))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The chunks of the reply as it is generated, and last the reply.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with aclosing(stream_or_reply(self.model, request)) as stream:
            async for part in stream:
                yield self._with_cost(part) if isinstance(part, Reply) else part

    def _with_cost(self, reply: Reply) -> Reply:
        usage = reply.usage
        if usage.cost_usd:
            return reply
        price = self._find_price(reply)
        if price is None:
            return replace(reply, usage=replace(usage, unpriced_tokens=usage.total_tokens))
        return replace(reply, usage=replace(usage, cost_usd=price.cost_of(usage), unpriced_tokens=0))

    def _find_price(self, reply: Reply) -> Price | None:
        """By the model that replied (a fallback names it), then by the wrapped model."""
        names = (reply.model, self.model.name)
        for name in names:
            if name in self._prices:
                return self._prices[name]
        for pattern in sorted(self._prices, key=len, reverse=True):
            if any(fnmatchcase(name, pattern) for name in names if name):
                return self._prices[pattern]
        return None


class Limited(ModelWrapper):
    """A model whose calls wait for limits, which it may share with other models.

    Args:
        model: The model or its name.
        limits: The limits, in the order in which a call waits for them; with a rate limit before a concurrency
            limit, a call does not hold a permit while it waits.
    """

    def __init__(self, model: str | Model, *limits: Limit) -> None:
        super().__init__(model)
        self._limits = limits

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait for each limit; yields the model to call."""
        async with AsyncExitStack() as stack:
            reporters = [await stack.enter_async_context(limit.acquire()) for limit in self._limits]
            yield _UsageReportingModel(await stack.enter_async_context(acquire_turn(self.model, request)), reporters)

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply of the model, after waiting for the limits.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with self.admission(request) as model:
            return await model.reply(request)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The chunks of the reply as it is generated, and last the reply.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with self.admission(request) as model, aclosing(stream_or_reply(model, request)) as stream:
            async for part in stream:
                yield part


class Unstreamed(ModelWrapper):
    """A model that is asked for whole replies only, for servers that do not stream well.

    Args:
        model: The model or its name.
    """

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait for the limits of the model, if it has any; yields the model to call."""
        async with acquire_turn(self.model, request) as model:
            yield Unstreamed(model)

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply of the model.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        return await self.model.reply(request)


class _UsageReportingModel:
    """A model that reports the usage of its calls to limits."""

    def __init__(self, model: Model, reporters: list[ReportUsage]) -> None:
        self._model = model
        self._reporters = reporters

    @property
    def name(self) -> str:
        return self._model.name

    async def reply(self, request: ModelRequest) -> Reply:
        return self._report(await self._model.reply(request))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        async with aclosing(stream_or_reply(self._model, request)) as stream:
            async for part in stream:
                yield self._report(part) if isinstance(part, Reply) else part

    def _report(self, reply: Reply) -> Reply:
        for report in self._reporters:
            report(reply.usage)
        return reply
