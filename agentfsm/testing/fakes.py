"""Fakes for tests: a scripted model, a model that records its requests, and a clock that tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from agentfsm.errors import ProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.model import Model, ModelRequest


class FakeClock:
    """A clock that only moves when a test advances it; ``sleep`` advances it and returns at once.

    Args:
        start: The initial value of the monotonic and of the wall clock, in seconds.

    Attributes:
        slept: The duration of every sleep, in seconds.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._monotonic = start
        self._time = start
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """The monotonic time, in seconds."""
        return self._monotonic

    def time(self) -> float:
        """The wall-clock time, in seconds since the epoch."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Advance both clocks."""
        self._monotonic += seconds
        self._time += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator might; the monotonic clock does not change."""
        self._time += seconds

    async def sleep(self, seconds: float) -> None:
        """Advance both clocks without waiting; other tasks get a chance to run."""
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


class ScriptExhaustedError(ProviderError):
    """A scripted model was called more often than its script has entries."""


def call(tool: str, _id: str = "", /, **arguments: Any) -> ToolCall:
    """A tool call for a script: ``call("add", a=1, b=2)``; an optional second argument is the id of the call."""
    return ToolCall(_id, tool, arguments)


ScriptEntry = (
    str | ToolCall | Sequence[ToolCall] | Message | Reply | BaseException | type[BaseException] | Callable[..., Any]
)
"""An entry of a script."""


class ScriptedModel:
    """A model that replies from a script, one entry per call, without a network.

    Args:
        script: The entries: a string; a tool call or a list of them; a ``Message`` or a ``Reply``; an exception, which
            is raised; or a function of the request's messages (plain or async) that returns one of these. See
            ``ScriptEntry``; a list of several kinds of entries is a ``list[object]`` for mypy.
        name: The model's name in events.

    Attributes:
        calls: The number of calls so far.
    """

    def __init__(self, script: Iterable[object] = (), *, name: str = "scripted") -> None:
        self._script = list(script)
        self._name = name
        self.calls = 0

    @property
    def name(self) -> str:
        """The model's name in events."""
        return self._name

    @property
    def remaining(self) -> int:
        """The number of entries left."""
        return max(0, len(self._script) - self.calls)

    async def reply(self, request: ModelRequest) -> Reply:
        """The next entry of the script, as a reply.

        Raises:
            ScriptExhaustedError: No entry is left.
        """
        index = self.calls
        self.calls += 1
        if index >= len(self._script):
            raise ScriptExhaustedError(
                f"the script of {self._name!r} has {len(self._script)} entries, and this is call {index + 1}"
            )
        entry: Any = self._script[index]
        if not isinstance(entry, type) and callable(entry):
            entry = entry(request.messages)
            if isawaitable(entry):
                entry = await entry
        return self._as_reply(entry, index + 1)

    def _as_reply(self, entry: Any, number: int) -> Reply:
        match entry:
            case BaseException():
                raise entry
            case type() if issubclass(entry, BaseException):
                raise entry("scripted")
            case Reply():
                return entry
            case Message():
                reason = FinishReason.TOOL_CALLS if entry.tool_calls else FinishReason.STOP
                return Reply(entry, reason)
            case str():
                return Reply(Message.assistant(entry))
            case ToolCall():
                return self._as_reply([entry], number)
            case [*calls] if all(isinstance(c, ToolCall) for c in calls):
                own = tuple(
                    ToolCall(c.id or f"call_{number}_{i}", c.name, c.arguments, c.malformed)
                    for i, c in enumerate(calls, 1)
                )
                return Reply(Message.assistant("", own), FinishReason.TOOL_CALLS)
            case Mapping():
                raise TypeError("a script entry cannot be a mapping: use a Reply, a Message or call(...)")
            case _:
                raise TypeError(f"a script entry cannot be a {type(entry).__name__}")


class RecordingModel:
    """A model that records every request and passes it on to another model.

    Args:
        model: The model that replies.

    Attributes:
        requests: Every request, in order.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.requests: list[ModelRequest] = []

    @property
    def name(self) -> str:
        """The name of the other model."""
        return self._model.name

    async def reply(self, request: ModelRequest) -> Reply:
        """The other model's reply."""
        self.requests.append(request)
        return await self._model.reply(request)
