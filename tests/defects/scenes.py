"""What the tests of known defects share: small tools, replies, and the life of a run with a person in it."""

from __future__ import annotations

import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentfsm import (
    Agent,
    FailureKind,
    FinishReason,
    Host,
    Message,
    Reply,
    RunResult,
    SuspensionRecord,
    ToolCall,
    UserInputRequested,
    tool,
)
from agentfsm.testing import FakeClock, RecordingModel
from tests.transcripts import check_requests, check_transcript

__all__ = ["Booking", "K", "awaited", "check", "cut", "dangerous", "echo", "explode", "host", "resumed", "suspended"]

K = FailureKind


def echo(text: str) -> str:
    """Gives back its text."""
    return text


def explode(text: str = "boom") -> str:
    """Raises."""
    raise ValueError(text)


def cut(*calls: ToolCall, text: str = "") -> Reply:
    """A reply that its length limit cut off."""
    return Reply(Message.assistant(text, calls), FinishReason.LENGTH)


class Booking(BaseModel):
    model_config = ConfigDict(strict=True)
    day: datetime.date
    seats: tuple[int, ...]


def host(**more: Any) -> Host:
    return Host(clock=FakeClock(), secret=b"a secret of the tests", **more)


async def resumed(agent: Agent, prompt: str, *replies: Any) -> RunResult:
    """The result of a run after some replies of a person."""
    result = await agent.run(prompt)
    for reply in replies:
        assert isinstance(result.outcome, UserInputRequested), result.outcome
        result = await agent.resume(result.outcome.suspension_record, reply)
    return result


def check(model: RecordingModel, result: RunResult) -> None:
    check_requests(model.requests)
    check_transcript(result.messages, request=False)


@tool(requires_approval=True)
def dangerous(what: str) -> str:
    """Needs a person's leave."""
    return f"did {what}"


def suspended(agent: Agent, prompt: str = "go") -> SuspensionRecord:
    result = agent.run_sync(prompt)
    assert isinstance(result.outcome, UserInputRequested), result.outcome
    return result.outcome.suspension_record


async def awaited(run: Any) -> Any:
    return await run
