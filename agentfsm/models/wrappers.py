"""Models that wrap other models: ``FallbackModel``, ``Priced``, and the base class that wrappers share.

::

    PRICES = {"openai:gpt-5-mini": Price(input=0.25, cached=0.025, output=2.00), "ollama:*": Price()}
    agent = Agent(Priced("openai:gpt-5-mini", PRICES), guardrails=AgentGuardrails(max_cost_usd=0.50))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

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
from agentfsm.models.model_registry import resolve

__all__ = [
    "FallbackModel",
    "ModelWrapper",
    "Price",
    "Priced",
    "acquire_turn",
    "as_model",
    "close_model",
    "stream_or_reply",
]


class ModelWrapper:
    """What a model is that stands before one other: it goes by that one's name, and knows its secrets.

    Args:
        model: The model or its name.
    """

    def __init__(self, model: str | Model) -> None:
        self.model = as_model(model)

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.model.name

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """What no journal may hold."""
        return secrets_of(self.model)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    async def aclose(self) -> None:
        """Let go of the model's connections."""
        await close_model(self.model)


def as_model(model: str | Model) -> Model:
    """A model, or the one that a name means.

    Raises:
        UnknownModelError: No provider claims the name.
        MissingKeyError: The provider needs a key and there is none.
    """
    return resolve(model) if isinstance(model, str) else model


@asynccontextmanager
async def acquire_turn(model: Model, request: ModelRequest) -> AsyncGenerator[Model, None]:
    """The model to ask, once its limits, if it has any, let the call in."""
    if not has_admission(model):
        yield model
        return
    async with model.admission(request) as inner:
        yield inner


async def stream_or_reply(model: Model, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
    """A model's reply piece by piece, or all at once where it does not stream.

    To be closed (``aclosing``) by whoever passes them on: a loop that is left does not close what it went through.
    """
    if not can_stream(model):
        yield await model.reply(request)
        return
    stream: AsyncIterator[StreamChunk | Reply] = model.stream(request)
    try:
        async for piece in stream:
            yield piece
    finally:
        await _aclose_if_supported(stream)


async def close_model(model: Model) -> None:
    """Let go of a model's connections, if it has any."""
    await _aclose_if_supported(model)


async def _aclose_if_supported(resource: Any) -> None:
    aclose: Any = getattr(resource, "aclose", None)
    if aclose is not None:
        await aclose()


log = logging.getLogger("agentfsm")

_ERRORS_BY_RETRYABILITY = (TransientProviderError, ContextOverflowError, ProviderError)
"""What the whole fails with, where several failed in several ways: what another try mends soonest comes first."""


class FallbackModel:
    """Several models as one: the first answers, and where it fails, the next does.

    ::

        FallbackModel("anthropic:claude-sonnet-4-6", "openai:gpt-5-mini", "ollama:llama3.2")

    ``Reply.model``, and so the journal, names the one that answered. Each gets an equal share of the time that
    is left, so that one that hangs leaves some for the others. Where a stream breaks off in the middle, the next
    begins anew, and who watches is told by ``ReplyRestarted``.

    Args:
        models: The models or their names, in the order in which they are asked; at least one.
        on: The kinds of failure after which the next is asked; others fail at once.

    Raises:
        ConfigurationError: There is no model, a name means none, or a kind is none of a model's.
    """

    def __init__(
        self,
        *models: str | Model,
        on: Iterable[FailureKind | str] = (FailureKind.transient_provider, FailureKind.provider_error),
    ) -> None:
        if not models:
            raise ConfigurationError("a FallbackModel needs a model to ask first, and one to ask next")
        kinds = {error.kind for error in _ERRORS_BY_RETRYABILITY}
        self._on = frozenset(str(kind) for kind in on)
        if strange := sorted(self._on - kinds):
            raise ConfigurationError(f"no model fails by {', '.join(strange)}; kinds are: {', '.join(sorted(kinds))}")
        self.models = tuple(as_model(model) for model in models)

    @property
    def name(self) -> str:
        """The names of the models, in order."""
        return " | ".join(model.name for model in self.models)

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """What no journal may hold."""
        return secrets_of(*self.models)

    def __repr__(self) -> str:
        return f"FallbackModel({', '.join(map(repr, self.models))})"

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply of the first model that does not fail.

        Raises:
            agentfsm.errors.ModelError: All failed, or one failed in a way that the next is not asked for.
        """
        turns = _Attempts(self.models, self._on, request)
        for model in self.models:
            own = turns.request_with_share()
            try:
                async with asyncio.timeout(own.timeout_s), acquire_turn(model, own) as inner:
                    return _with_model_name(await inner.reply(own), model)
            except Exception as error:
                turns.record_failure(model, error)
        raise turns.combined_error()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The same, piece by piece.

        Raises:
            agentfsm.errors.ModelError: As ``reply``.
        """
        turns = _Attempts(self.models, self._on, request)
        for model in self.models:
            own = turns.request_with_share()
            until = asyncio.get_running_loop().time() + own.timeout_s
            attempt, told = _stream_model(model, own), False
            try:
                while True:
                    async with asyncio.timeout_at(until):
                        piece = await anext(attempt, None)
                    if isinstance(piece, Reply):
                        yield _with_model_name(piece, model)
                        return
                    if piece is None:
                        raise TransientProviderError(f"{model.name}: the stream ended without its reply")
                    told = told or not isinstance(piece, KeepAlive)
                    yield piece
            except Exception as error:
                turns.record_failure(model, error)
            finally:
                await attempt.aclose()
            if told and turns.remaining:
                yield StreamRestart(turns.last_error)
        raise turns.combined_error()

    async def aclose(self) -> None:
        """Let go of every model's connections; they may be used after it."""
        for model in self.models:
            await close_model(model)


class _Attempts:
    """One call's way through the models: how much time each has, and how those before it failed."""

    def __init__(self, models: tuple[Model, ...], on: frozenset[str], request: ModelRequest) -> None:
        self.remaining = len(models)
        self.last_error = ""
        self._on = on
        self._request = request
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + request.timeout_s
        self._errors: list[ModelError] = []

    def request_with_share(self) -> ModelRequest:
        """The request for the next model, with its share of the time."""
        share = max(self._deadline - self._now(), 0.001) / self.remaining
        self.remaining -= 1
        return replace(self._request, timeout_s=share)

    def record_failure(self, model: Model, error: Exception) -> None:
        """Note a failure, if the next model may be asked after it; else raise it."""
        if isinstance(error, TimeoutError):
            error = TransientProviderError(f"{model.name} gave no reply within its share of the time")
        elif not isinstance(error, ModelError):
            error = ProviderError(f"{model.name}: {type(error).__name__}: {error}")
        if error.kind not in self._on:
            raise error
        self._errors.append(error)
        self.last_error = str(error)
        log.info(
            "%s failed by %s; %s", model.name, error.kind, "asking the next" if self.remaining else "it was the last"
        )

    def combined_error(self) -> ModelError:
        """The error for a call that no model answered; its kind is what another try mends soonest."""
        if len(self._errors) == 1:
            return self._errors[0]
        kind = next(kind for kind in _ERRORS_BY_RETRYABILITY if any(isinstance(e, kind) for e in self._errors))
        best = [e for e in self._errors if isinstance(e, kind)]
        waits = [e.retry_after_s for e in best]
        wait = None if None in waits else min(w for w in waits if w is not None)
        text = f"no model answered: {'; '.join(map(str, self._errors))}"
        return kind(text, retry_after_s=wait, status=best[-1].status)


async def _stream_model(model: Model, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
    async with acquire_turn(model, request) as inner, aclosing(stream_or_reply(inner, request)) as told:
        async for piece in told:
            yield piece


def _with_model_name(reply: Reply, model: Model) -> Reply:
    """The reply with the name of who gave it."""
    return replace(reply, model=model.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs, in USD for a million tokens.

    Attributes:
        input: Of the prompt.
        output: Of the reply, thinking included.
        cached: Of the prompt, read from the provider's cache; as ``input`` where None.
        written: Of the prompt, written to the provider's cache; as ``input`` where None.

    Raises:
        ConfigurationError: A price is below zero or no number.
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
        """What this usage costs, in USD."""
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.written is None else self.written
        rest = max(0, usage.input_tokens - usage.cached_tokens - usage.written_tokens)
        spent = rest * self.input + usage.cached_tokens * cached + usage.written_tokens * written
        return (spent + usage.output_tokens * self.output) / 1_000_000


class Priced(ModelWrapper):
    """A model whose replies say what they cost.

    A reply whose price the table does not know costs 0 and says so in ``usage.unpriced_tokens``; a run that has a
    ``max_cost_usd`` then warns that it cannot hold it. Where a provider itself says what a call cost, that stands.

    Args:
        model: The model or its name.
        prices: Prices by name: ``provider:model``, or a pattern of such names (``ollama:*``). An exact name
            comes first, then the longest pattern.
    """

    def __init__(self, model: str | Model, prices: Mapping[str, Price]) -> None:
        super().__init__(model)
        self._prices = dict(prices)

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait where the model behind this one waits."""
        async with acquire_turn(self.model, request) as inner:
            yield self if inner is self.model else Priced(inner, self._prices)

    async def reply(self, request: ModelRequest) -> Reply:
        """The model's reply, priced.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        return self._with_cost(await self.model.reply(request))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The same, piece by piece.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with aclosing(stream_or_reply(self.model, request)) as told:
            async for piece in told:
                yield self._with_cost(piece) if isinstance(piece, Reply) else piece

    def _with_cost(self, reply: Reply) -> Reply:
        usage = reply.usage
        if usage.cost_usd:
            return reply
        price = self._find_price(reply)
        if price is None:
            return replace(reply, usage=replace(usage, unpriced_tokens=usage.total_tokens))
        return replace(reply, usage=replace(usage, cost_usd=price.cost_of(usage), unpriced_tokens=0))

    def _find_price(self, reply: Reply) -> Price | None:
        """By who answered (a fallback names it so), then by who was asked."""
        names = (reply.model, self.model.name)
        for name in names:
            if name in self._prices:
                return self._prices[name]
        for pattern in sorted(self._prices, key=len, reverse=True):
            if any(fnmatchcase(name, pattern) for name in names if name):
                return self._prices[pattern]
        return None
