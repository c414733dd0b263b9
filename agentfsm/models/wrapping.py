"""What models that stand before other models share: their name and secrets, finding, asking and closing those."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from agentfsm.core.messages import Reply
from agentfsm.core.model import Model, ModelRequest, has_admission, secrets_of
from agentfsm.core.streaming import Piece, can_stream
from agentfsm.models.names import resolve

__all__ = ["InFront", "admitted", "close", "found", "pieces"]


class InFront:
    """What a model is that stands before one other: it goes by that one's name, and knows its secrets.

    Args:
        model: The model or its name.
    """

    def __init__(self, model: str | Model) -> None:
        self.model = found(model)

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
        await close(self.model)


def found(model: str | Model) -> Model:
    """A model, or the one that a name means.

    Raises:
        UnknownModelError: No provider claims the name.
        MissingKeyError: The provider needs a key and there is none.
    """
    return resolve(model) if isinstance(model, str) else model


@asynccontextmanager
async def admitted(model: Model, request: ModelRequest) -> AsyncGenerator[Model, None]:
    """The model to ask, once its limits, if it has any, let the call in."""
    if not has_admission(model):
        yield model
        return
    async with model.admission(request) as inner:
        yield inner


async def pieces(model: Model, request: ModelRequest) -> AsyncGenerator[Piece | Reply, None]:
    """A model's reply piece by piece, or all at once where it does not stream.

    To be closed (``aclosing``) by whoever passes them on: a loop that is left does not close what it went through.
    """
    if not can_stream(model):
        yield await model.reply(request)
        return
    stream: AsyncIterator[Piece | Reply] = model.stream(request)
    try:
        async for piece in stream:
            yield piece
    finally:
        await _aclose(stream)


async def close(model: Model) -> None:
    """Let go of a model's connections, if it has any."""
    await _aclose(model)


async def _aclose(thing: Any) -> None:
    aclose: Any = getattr(thing, "aclose", None)
    if aclose is not None:
        await aclose()
