"""What the tests of the source pages share: models on a script, and what a run said and did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfsm import Message, Role, Run, RunResult
from agentfsm.core.events import Ending, Event
from agentfsm.core.model import ModelRequest
from agentfsm.testing import RecordingModel, ScriptedModel


def scripted(*entries: Any) -> RecordingModel:
    """A model that follows a script and keeps every request."""
    return RecordingModel(ScriptedModel(entries))


def text_of(request: ModelRequest) -> str:
    """All that a request says, as one text."""
    return "\n".join(m.content for m in request.messages)


def results(messages: Sequence[Message]) -> list[str]:
    """The texts of all tool messages, in order."""
    return [m.content for m in messages if m.role is Role.TOOL]


async def events_of(run: Run) -> list[Event]:
    """Every event of a run; the last is its only ending, and they come in the order of their numbers."""
    events = [event async for event in run]
    endings = [event for event in events if isinstance(event, Ending)]
    assert endings == events[-1:]
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    return events


def moves(result: RunResult) -> list[str]:
    """The moves of a result, each as ``state: guard -> state``."""
    return [f"{d.source}: {d.guard} -> {d.target}" for d in result.decisions]
