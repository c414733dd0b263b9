"""Fakes for tests: a scripted model, a model that records its requests, and a clock that tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from agentfsm.errors import ProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.model import Model, ModelRequest

__all__ = ["FakeClock", "RecordingModel", "ScriptExhaustedError", "ScriptedModel", "call"]


class FakeClock:
    """A clock that stands still until it is told to move; sleeping moves it at once.

    Args:
        start: Where both clocks begin, in seconds.

    Attributes:
        slept: Every sleep that was asked for, in seconds.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._monotonic = start
        self._time = start
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """Seconds that only go up."""
        return self._monotonic

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._monotonic += seconds
        self._time += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator might; durations do not notice."""
        self._time += seconds

    async def sleep(self, seconds: float) -> None:
        """Let time pass without waiting; other tasks get their turn."""
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


class ScriptExhaustedError(ProviderError):
    """A scripted model was asked more often than its script has entries."""


def call(tool: str, _id: str = "", /, **arguments: Any) -> ToolCall:
    """A tool call for a script: ``call("add", a=1, b=2)``; the id may stand second."""
    return ToolCall(_id, tool, arguments)


ScriptEntry = (
    str | ToolCall | Sequence[ToolCall] | Message | Reply | BaseException | type[BaseException] | Callable[..., Any]
)


class ScriptedModel:
    """A model that answers from a script, one entry a call, with no network.

    Args:
        script: Entries: a text; a tool call or a list of them; a whole ``Message`` or ``Reply``; an
            exception, which is raised; or a function of the request's messages (plain or async) that
            returns one of these.
        name: What events call it.

    Attributes:
        calls: How many requests it has answered or failed.
    """

    def __init__(self, script: Iterable[ScriptEntry] = (), *, name: str = "scripted") -> None:
        self._script = list(script)
        self._name = name
        self.calls = 0

    @property
    def name(self) -> str:
        """What events call it."""
        return self._name

    @property
    def remaining(self) -> int:
        """How many entries have not been used."""
        return max(0, len(self._script) - self.calls)

    async def reply(self, request: ModelRequest) -> Reply:
        """The next entry of the script.

        Raises:
            ScriptExhaustedError: There is none left.
        """
        place = self.calls
        self.calls += 1
        if place >= len(self._script):
            raise ScriptExhaustedError(
                f"the script of {self._name!r} is out: it has {len(self._script)} entries, and this is call {place + 1}"
            )
        entry: Any = self._script[place]
        if not isinstance(entry, type) and callable(entry):
            entry = entry(request.messages)
            if isawaitable(entry):
                entry = await entry
        return self._as_reply(entry, place + 1)

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
                raise TypeError("a script's entry is no mapping: give a Reply, a Message or call(...)")
            case _:
                raise TypeError(f"a script's entry cannot be a {type(entry).__name__}")


class RecordingModel:
    """A model that passes every request on and keeps it.

    Args:
        model: Who answers.

    Attributes:
        requests: Every request, in order, as it was sent.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.requests: list[ModelRequest] = []

    @property
    def name(self) -> str:
        """The name of the model behind it."""
        return self._model.name

    async def reply(self, request: ModelRequest) -> Reply:
        """Keep the request and pass it on."""
        self.requests.append(request)
        return await self._model.reply(request)
