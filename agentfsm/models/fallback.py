"""``FallbackModel``: several models, each asked where the one before it failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace

from pydantic import SecretStr

from agentfsm.core.failures import FailureKind
from agentfsm.core.messages import Reply
from agentfsm.core.model import Model, ModelRequest, secrets_of
from agentfsm.core.streaming import Piece, Pulse, Restart
from agentfsm.errors import (
    ConfigurationError,
    ContextOverflowError,
    ModelError,
    ProviderError,
    TransientProviderError,
)
from agentfsm.models.wrapping import admitted, close, found, pieces

__all__ = ["FallbackModel"]

log = logging.getLogger("agentfsm")

_HOPES = (TransientProviderError, ContextOverflowError, ProviderError)
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
        kinds = {error.kind for error in _HOPES}
        self._on = frozenset(str(kind) for kind in on)
        if strange := sorted(self._on - kinds):
            raise ConfigurationError(f"no model fails by {', '.join(strange)}; kinds are: {', '.join(sorted(kinds))}")
        self.models = tuple(found(model) for model in models)

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
        turns = _Turns(self.models, self._on, request)
        for model in self.models:
            own = turns.next_request()
            try:
                async with asyncio.timeout(own.timeout_s), admitted(model, own) as inner:
                    return _signed(await inner.reply(own), model)
            except Exception as error:
                turns.failed(model, error)
        raise turns.hopeless()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece | Reply, None]:
        """The same, piece by piece.

        Raises:
            agentfsm.errors.ModelError: As ``reply``.
        """
        turns = _Turns(self.models, self._on, request)
        for model in self.models:
            own = turns.next_request()
            until = asyncio.get_running_loop().time() + own.timeout_s
            attempt, told = _attempt(model, own), False
            try:
                while True:
                    async with asyncio.timeout_at(until):
                        piece = await anext(attempt, None)
                    if isinstance(piece, Reply):
                        yield _signed(piece, model)
                        return
                    if piece is None:
                        raise TransientProviderError(f"{model.name}: the stream ended without its reply")
                    told = told or not isinstance(piece, Pulse)
                    yield piece
            except Exception as error:
                turns.failed(model, error)
            finally:
                await attempt.aclose()
            if told and turns.left:
                yield Restart(turns.why)
        raise turns.hopeless()

    async def aclose(self) -> None:
        """Let go of every model's connections; they may be used after it."""
        for model in self.models:
            await close(model)


class _Turns:
    """One call's way through the models: how much time each has, and how those before it failed."""

    def __init__(self, models: tuple[Model, ...], on: frozenset[str], request: ModelRequest) -> None:
        self.left = len(models)
        self.why = ""
        self._on = on
        self._request = request
        self._now = asyncio.get_running_loop().time
        self._until = self._now() + request.timeout_s
        self._errors: list[ModelError] = []

    def next_request(self) -> ModelRequest:
        """The request for the next model, with its share of the time."""
        share = max(self._until - self._now(), 0.001) / self.left
        self.left -= 1
        return replace(self._request, timeout_s=share)

    def failed(self, model: Model, error: Exception) -> None:
        """Note a failure, if the next model may be asked after it; else raise it."""
        if isinstance(error, TimeoutError):
            error = TransientProviderError(f"{model.name} gave no reply within its share of the time")
        elif not isinstance(error, ModelError):
            error = ProviderError(f"{model.name}: {type(error).__name__}: {error}")
        if error.kind not in self._on:
            raise error
        self._errors.append(error)
        self.why = str(error)
        log.info("%s failed by %s; %s", model.name, error.kind, "asking the next" if self.left else "it was the last")

    def hopeless(self) -> ModelError:
        """The error for a call that no model answered; its kind is what another try mends soonest."""
        if len(self._errors) == 1:
            return self._errors[0]
        kind = next(kind for kind in _HOPES if any(isinstance(e, kind) for e in self._errors))
        best = [e for e in self._errors if isinstance(e, kind)]
        waits = [e.retry_after_s for e in best]
        wait = None if None in waits else min(w for w in waits if w is not None)
        text = f"no model answered: {'; '.join(map(str, self._errors))}"
        return kind(text, retry_after_s=wait, status=best[-1].status)


async def _attempt(model: Model, request: ModelRequest) -> AsyncGenerator[Piece | Reply, None]:
    async with admitted(model, request) as inner, aclosing(pieces(inner, request)) as told:
        async for piece in told:
            yield piece


def _signed(reply: Reply, model: Model) -> Reply:
    """The reply with the name of who gave it."""
    return replace(reply, model=model.name)
