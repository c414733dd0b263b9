"""The port to a model: the ``Model`` protocol and the request that it answers."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from agentfsm.core.messages import Message, Reply

if TYPE_CHECKING:
    from pydantic import SecretStr

__all__ = ["KeyedModel", "LimitedModel", "Model", "ModelRequest", "ToolSpec", "has_admission", "secrets_of"]


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
        memo: Where a model may keep, under a key of its own, what helps with the run's next request; every
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
    memo: MutableMapping[object, object] = field(default_factory=dict[object, object], compare=False, repr=False)


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
