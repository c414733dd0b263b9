"""The model port: the ``Model`` and ``StreamingModel`` protocols, the request, and the stream chunks.

Chunks are for people who watch. A run acts only on the one complete ``Reply`` at the end; a stream that ends without it is
a failed call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from agentfsm.loop.messages import Message, Reply

if TYPE_CHECKING:
    from pydantic import SecretStr

__all__ = [
    "KeepAlive",
    "KeyedModel",
    "LimitedModel",
    "Model",
    "ModelRequest",
    "ReasoningChunk",
    "StreamChunk",
    "StreamRestart",
    "StreamingModel",
    "TextChunk",
    "ToolCallChunk",
    "ToolSpec",
    "can_stream",
    "has_admission",
    "secrets_of",
]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a model is told of a tool.

    Attributes:
        name: The tool's name, ``[A-Za-z0-9_-]{1,64}`` on every wire.
        description: What it does.
        parameters: The JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """All that a model gets for one call.

    Attributes:
        messages: The rendered transcript; it never changes after the request was made.
        tools: The tools that the model may call; empty in envelope mode, where the instructions list them.
        max_output_tokens: The cap on the reply, in tokens, or None.
        timeout_s: Seconds that the caller will wait; the loop enforces them too.
        heartbeat_s: Seconds of silence inside a streamed reply after which it counts as dropped.
        cache: Where a model may keep, under a key of its own, what helps with the run's next request; every
            request of a run brings the same.
        output_schema: JSON schema of the wanted answer, or None for plain text.
        output_name: A name for that schema.
    """

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int | None = None
    timeout_s: float = 60.0
    output_schema: Mapping[str, Any] | None = None
    output_name: str = field(default="answer")
    heartbeat_s: float = 20.0
    cache: MutableMapping[object, object] = field(default_factory=dict[object, object], compare=False, repr=False)


class Model(Protocol):
    """Anything that answers a request with one whole reply.

    A failed call raises ``ModelError`` in one of its three kinds; any other exception is read as
    ``provider_error``.
    """

    @property
    def name(self) -> str:
        """What events and logs call it (``"openai:gpt-5-mini"``); never holds a secret."""
        ...

    async def reply(self, request: ModelRequest) -> Reply:
        """Answer one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        ...


class LimitedModel(Model, Protocol):
    """A model whose calls wait for their turn; the wait is not part of a call's time."""

    def admission(self, request: ModelRequest) -> AbstractAsyncContextManager[Model]:
        """Wait for a turn, and hold it; gives the model to ask, which does not wait again."""
        ...


def has_admission(model: Model) -> TypeGuard[LimitedModel]:
    """Whether a model's calls wait for their turn."""
    return callable(getattr(model, "admission", None))


class KeyedModel(Model, Protocol):
    """A model that knows secrets, such as the key that it was given."""

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """What no journal may hold."""
        ...


def secrets_of(*models: Model) -> tuple[SecretStr, ...]:
    """What no journal may hold of all that some models know; a model that says nothing of it knows nothing."""
    return tuple(secret for model in models for secret in getattr(model, "secrets", ()))


@dataclass(frozen=True, slots=True)
class TextChunk:
    """More of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningChunk:
    """More of what the model thinks, where its provider shows that."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """More of a tool call.

    Attributes:
        index: Which call of the reply, from 0.
        name: The tool; known from a call's first piece on, as a rule.
        arguments: More of the JSON text of its arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """A sign of life with nothing to show: bytes came, and none of them were the reply's."""


@dataclass(frozen=True, slots=True)
class StreamRestart:
    """What was told so far is void, and the reply begins anew (another model took over).

    Attributes:
        reason: What happened, for people.
    """

    reason: str


StreamChunk = TextChunk | ReasoningChunk | ToolCallChunk | KeepAlive | StreamRestart
"""Any of them."""


class StreamingModel(Model, Protocol):
    """A model that can also tell its reply piece by piece."""

    def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        """Answer one request: any number of pieces, then the one whole reply that ``reply`` would give.

        Silence longer than ``request.heartbeat_s`` between two pieces counts as a dropped connection; a
        model that has nothing to show for so long sends a ``KeepAlive``. Who stops early closes the iterator
        (``aclose``, where it has one).

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        ...


def can_stream(model: Model) -> TypeGuard[StreamingModel]:
    """Whether a model tells its reply piece by piece."""
    return callable(getattr(model, "stream", None))
