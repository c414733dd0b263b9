"""The model port: the ``Model`` and ``StreamingModel`` protocols, the request, and the stream chunks.

Chunks are for display. A run acts only on the one complete ``Reply`` at the end of the stream; a stream that ends
without it is a failed call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from agentfsm.loop.messages import Message, Reply
from agentfsm.loop.read_only import freeze_field, quick_constructor, read_only

if TYPE_CHECKING:
    from pydantic import SecretStr


@read_only
@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for a model.

    Attributes:
        name: The tool's name, ``[A-Za-z0-9_-]{1,64}`` on every wire.
        description: What it does.
        parameters: The JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        freeze_field(self, "parameters")


class CallBudget:
    """How many model calls one request may make. A model that makes one call needs not look at it.

    Args:
        limit: What is left of the run's ``max_iterations``; None for no limit.

    Attributes:
        made: How many calls were made; the first is counted already.
    """

    __slots__ = ("_limit", "made")

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.made = 1

    def spend(self) -> bool:
        """Count one more call; False if none is left, and then nothing is counted."""
        if self._limit is not None and self.made >= self._limit:
            return False
        self.made += 1
        return True


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The input of one model call.

    Attributes:
        messages: The rendered transcript; it never changes once the request is made.
        tools: The tools that the model may call; empty in envelope mode, where the instructions list them.
        max_output_tokens: Maximum tokens of the reply, or None.
        timeout_s: Timeout in seconds of a whole reply, and of the first piece of a streamed one; the loop enforces
            it too.
        output_schema: JSON schema of the answer, or None for plain text.
        output_name: A name for that schema.
        heartbeat_s: Seconds of silence between two pieces of a streamed reply after which it counts as dropped.
        budget: A model that calls several models, as ``FallbackModel`` does, asks it before each call but the first.
        cache: Shared by all requests of a run. A model may store data for the next request there, under its own key.
    """

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int | None = None
    timeout_s: float = 60.0
    output_schema: Mapping[str, Any] | None = None
    output_name: str = field(default="answer")
    heartbeat_s: float = 20.0
    budget: CallBudget = field(default_factory=CallBudget, compare=False, repr=False)
    cache: MutableMapping[object, object] = field(default_factory=dict[object, object], compare=False, repr=False)


new_model_request = quick_constructor(ModelRequest)


class Model(Protocol):
    """Anything that answers a request with one complete reply.

    A failed call raises a ``ModelError`` of one of its three kinds; any other exception counts as
    ``provider_error``.
    """

    @property
    def name(self) -> str:
        """Its name in events and logs (``"openai:gpt-5-mini"``); must not contain a secret."""
        ...

    async def reply(self, request: ModelRequest) -> Reply:
        """Answer one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        ...


class LimitedModel(Model, Protocol):
    """A model that limits its calls; waiting for admission does not count against a call's timeout."""

    def admission(self, request: ModelRequest) -> AbstractAsyncContextManager[Model]:
        """Wait for admission and hold it; the context's value is the model to call, which does not wait again."""
        ...


def has_admission(model: Model) -> TypeGuard[LimitedModel]:
    """Whether a model limits its calls."""
    return callable(getattr(model, "admission", None))


def secrets_of(*models: Model) -> tuple[SecretStr, ...]:
    """The secrets of some models, to redact from journals; a model without ``secrets`` has none."""
    return tuple(secret for model in models for secret in getattr(model, "secrets", ()))


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The next part of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningChunk:
    """The next part of the model's reasoning, if its provider shows that."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """The next part of a tool call.

    Attributes:
        index: The number of the call in the reply, from 0.
        name: The tool; usually known from the first chunk of the call on.
        arguments: The next part of the JSON text of its arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The connection is alive: data arrived, but nothing of the reply."""


@dataclass(frozen=True, slots=True)
class StreamRestart:
    """The reply starts again, from another model: discard the chunks so far.

    Attributes:
        reason: Why, for people.
    """

    reason: str


StreamChunk = TextChunk | ReasoningChunk | ToolCallChunk | KeepAlive | StreamRestart
"""Any chunk of a stream."""


class StreamingModel(Model, Protocol):
    """A model that can also stream its reply."""

    def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        """Answer one request: any number of chunks, then the complete reply that ``reply`` would return.

        Silence longer than ``request.heartbeat_s`` between two chunks counts as a dropped connection, a
        ``KeepAlive`` included. A caller that stops early closes the iterator (``aclose``, if it has one).

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        ...


def can_stream(model: Model) -> TypeGuard[StreamingModel]:
    """Whether a model can stream its reply."""
    return callable(getattr(model, "stream", None))
