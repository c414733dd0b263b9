"""What the tests of running agents share: agents on a script, and the checks that every run must pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agentfsm import Agent, FailureKind, Host, PartialRunSummary, RunCancelled, RunResult, tool
from agentfsm.core.events import Ending, Event
from agentfsm.core.model import ModelRequest
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.transcripts import check_requests, check_transcript

__all__ = [
    "SCRIPT",
    "aborted_by",
    "agent_on",
    "all_events",
    "cancelled",
    "checked",
    "drive",
    "finish",
    "lessons",
    "look",
    "play",
    "said",
    "scene_of",
    "tool_texts",
    "with_model",
]

T = TypeVar("T")


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


def agent_on(*script: Any, clock: FakeClock | None = None, **parts: Any) -> tuple[Agent, RecordingModel]:
    """An agent whose model follows a script, on a clock that stands still, and the model's recorder."""
    model = RecordingModel(ScriptedModel(script))
    host = parts.pop("host", None) or Host(clock=clock or FakeClock(), secret=b"secret")
    return Agent(model, host=host, **parts), model


def drive(scene: Callable[[], Awaitable[T]]) -> T:
    """Run a scene in a loop of its own, and make sure that no task is left behind."""

    async def watched() -> T:
        came = await scene()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return came

    return asyncio.run(watched())


def play(*script: Any, prompt: str = "go", **parts: Any) -> RunResult:
    """One run on a script, from its prompt to its end, with every check."""
    agent, model = agent_on(*script, **parts)

    async def scene() -> RunResult:
        return await agent.run(prompt)

    return checked(drive(scene), model)


SCRIPT = (call("look", where="here"), "done")


def scene_of(play: Callable[[Run], Awaitable[Any]], *script: Any, **parts: Any) -> Any:
    """Play with one run of a script, and check what the model was sent and what the run left."""
    agent, model = agent_on(*(script or SCRIPT), **{"tools": [look], **parts})

    async def scene() -> Any:
        run = agent.run("go")
        came = await play(run)
        check_requests(model.requests)
        if run.finished and run.state.state == "terminal":
            check_transcript(run.state.messages, request=False)
        return came

    return drive(scene)


def cancelled(result: RunResult, reason: str = "cancelled") -> None:
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == reason
    assert (result.run.cancelled, result.run.aborted) == (reason, None)
    assert result.decisions[-1].guard == "cancelled"
    checked(result)


def checked(result: RunResult, model: RecordingModel | None = None) -> RunResult:
    """A result, once what every run promises has been looked at."""
    if model is not None:
        check_requests(model.requests)
    assert isinstance(result.outcome, Ending)
    assert result.state == result.decisions[-1].target
    assert [d.source for d in result.decisions[1:]] == [d.target for d in result.decisions[:-1]]
    assert {d.transition.id for d in result.decisions} <= {t.id for t in result.graph}
    final = result.graph.spec(result.state).final
    assert sum(result.graph.spec(d.target).final for d in result.decisions) == final
    if final:
        check_transcript(result.messages, request=False)
        assert result.run.batch == []
    return result


async def all_events(run: Run) -> list[Event]:
    """Every event of a run; the last is its only ending, and they come in the order of their numbers."""
    events = [event async for event in run]
    assert [e for e in events if isinstance(e, Ending)] == events[-1:]
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    return events


def said(result: RunResult) -> list[tuple[str, str]]:
    """The transcript as pairs of role and text."""
    return [(m.role.value, m.content) for m in result.messages]


def tool_texts(result: RunResult) -> list[str]:
    """The texts of the tool messages."""
    return [text for role, text in said(result) if role == "tool"]


def lessons(result: RunResult) -> list[str]:
    """The kinds of the lessons that the run learned."""
    return [lesson.kind.value for lesson in result.run.lessons_learned]


async def finish(agent: Agent, prompt: str = "go") -> RunResult:
    """One run, awaited."""
    return await agent.run(prompt)


def with_model(*script: Any, **parts: Any) -> tuple[RunResult, list[ModelRequest]]:
    """One run on a script, with every check, and the requests that the model got."""
    agent, model = agent_on(*script, **parts)
    return checked(drive(lambda: finish(agent)), model), model.requests


def aborted_by(result: RunResult, words: str) -> None:
    """Assert that a run was aborted, and that its last event says by what."""
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.aborted
    assert words in result.outcome.failure.explanation
    assert result.decisions[-1].guard == "aborted"
