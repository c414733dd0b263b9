"""Scripted agents and runs for tests, builders of states and replies, and the checks that every run must pass."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from agentfsm import (
    Agent,
    Host,
    Role,
    RunAborted,
    RunCancelled,
    RunResult,
    SuspensionRecord,
    UserInputRequested,
    tool,
)
from agentfsm.loop.events import Ending, Event
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall, ToolResult
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.reducer import on_transition
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision, spend_counters
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.provider_rules import check_requests, check_transcript

__all__ = [
    "LOOK_SCRIPT",
    "Booking",
    "Kind",
    "assert_aborted",
    "assert_cancelled",
    "await_run",
    "check_result",
    "check_run",
    "collect_events",
    "dangerous",
    "denied_result",
    "echo",
    "explode",
    "failed_result",
    "look",
    "make_call",
    "make_failure",
    "make_host",
    "make_reply",
    "make_run",
    "ok_result",
    "pending_calls",
    "recovered_kinds",
    "run_agent",
    "run_async",
    "run_script",
    "run_script_with_requests",
    "run_until_suspended",
    "run_with_replies",
    "scripted_agent",
    "take_transition",
    "tool_texts",
    "transcript_of",
    "truncated_reply",
    "with_scripted_run",
]


def make_run(
    state: str = "pre_step",
    *,
    limits: dict[str, Any] | None = None,
    behavior: dict[str, Any] | None = None,
    **fields: Any,
) -> RunState:
    """A run in a state, with some limits, behavior and fields set."""
    guardrails = AgentGuardrails(**(limits or {}))
    return RunState("run", state=state, guardrails=guardrails, behavior=Behavior(**(behavior or {})), **fields)


def make_call(id: str = "c1", name: str = "look", **arguments: Any) -> ToolCall:  # noqa: A002
    return ToolCall(id, name, arguments)


def make_reply(text: str = "", *calls: ToolCall, finish: str = "stop", refusal: str | None = None) -> Reply:
    return Reply(Message.assistant(text, calls), FinishReason(finish), refusal=refusal)


def pending_calls(*calls: ToolCall) -> list[CallState]:
    """A batch of calls without results."""
    return [CallState(c, c.signature) for c in calls]


def make_failure(kind: str = "tool_error", explanation: str = "it broke", **more: Any) -> Failure:
    return Failure(kind=FailureKind(kind), explanation=explanation, **more)


def failed_result(call: ToolCall, kind: str = "tool_error", text: str = "it broke", **more: Any) -> ToolResult:
    """The result of a call that failed."""
    return ToolResult(
        call.id, call.name, text, "failed", make_failure(kind, f"{call.name}: {text}"), "ValueError", **more
    )


def ok_result(call: ToolCall, text: str = "fine", **more: Any) -> ToolResult:
    """The result of a call that worked."""
    return ToolResult(call.id, call.name, text, **more)


def denied_result(call: ToolCall) -> ToolResult:
    """The result of a call that was denied."""
    return ToolResult(call.id, call.name, "no", "denied")


def take_transition(run: RunState, transition: str, detected: Any = None) -> None:
    """Take a row of the loop, as the machine does."""
    row = LOOP.transition(transition)
    assert run.state == row.source
    run.state = row.target
    spend_counters(run.counters, row, LOOP.spec(row.target))
    on_transition(run, Decision(row, (), detected), LOOP.specs)


T = TypeVar("T")


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


def scripted_agent(*script: Any, clock: FakeClock | None = None, **config: Any) -> tuple[Agent, RecordingModel]:
    """An agent with a scripted model and a fake clock, and the recorder of the model's requests."""
    model = RecordingModel(ScriptedModel(script))
    host = config.pop("host", None) or Host(clock=clock or FakeClock(), secret=b"secret")
    return Agent(model, host=host, **config), model


def run_async(work: Callable[[], Awaitable[T]], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run) -> T:
    """The result of async work in an event loop of its own, made by ``run``; no task may be left over."""

    async def watched() -> T:
        result = await work()
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        assert not leftover, leftover
        return result

    return run(watched())


def run_script(*script: Any, prompt: str = "go", **config: Any) -> RunResult:
    """The checked result of one scripted run."""
    agent, model = scripted_agent(*script, **config)

    async def scene() -> RunResult:
        return await agent.run(prompt)

    return check_result(run_async(scene), model)


LOOK_SCRIPT = (call("look", where="here"), "done")


def with_scripted_run(use: Callable[[Run], Awaitable[Any]], *script: Any, **config: Any) -> Any:
    """What ``use`` returns for a scripted run; the model's requests and the final transcript are checked."""
    options: dict[str, Any] = {"tools": [look], **config}
    agent, model = scripted_agent(*(script or LOOK_SCRIPT), **options)

    async def scene() -> Any:
        run = agent.run("go")
        result = await use(run)
        check_requests(model.requests)
        if run.finished and run.run_state.state == "terminal":
            check_transcript(run.run_state.messages, request=False)
        return result

    return run_async(scene)


def assert_cancelled(result: RunResult, reason: str = "cancelled") -> None:
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == reason
    assert (result.run_state.cancelled, result.run_state.aborted) == (reason, None)
    assert result.decisions[-1].guard == "cancelled"
    check_result(result)


def check_result(result: RunResult, model: RecordingModel | None = None) -> RunResult:
    """The result, after checking what is true of every run."""
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
        assert result.run_state.batch == []
    return result


async def collect_events(run: Run) -> list[Event]:
    """Every event of a run; checks that only the last one is an ending and that their numbers are consecutive."""
    events = [event async for event in run]
    assert [e for e in events if isinstance(e, Ending)] == events[-1:]
    assert [e.seq for e in events] == list(range(events[0].seq, events[0].seq + len(events)))
    return events


def transcript_of(result: RunResult) -> list[tuple[str, str]]:
    """The transcript as pairs of role and text."""
    return [(m.role.value, m.content) for m in result.messages]


def tool_texts(result: RunResult) -> list[str]:
    """The texts of the tool messages."""
    return tool_result_texts(result.messages)


def recovered_kinds(result: RunResult) -> list[str]:
    """The kinds of failure that the run recovered from, in order."""
    found = [d.guard_result for d in result.decisions if d.target == "recover"]
    return [failure.kind.value for failure in found if isinstance(failure, Failure)]


async def run_agent(agent: Agent, prompt: str = "go") -> RunResult:
    """The result of one run."""
    return await agent.run(prompt)


def run_script_with_requests(*script: Any, **config: Any) -> tuple[RunResult, list[ModelRequest]]:
    """The checked result of one scripted run, and the model's requests."""
    agent, model = scripted_agent(*script, **config)
    return check_result(run_async(lambda: run_agent(agent)), model), model.requests


def assert_aborted(result: RunResult, words: str) -> None:
    """Assert that a run was aborted, with an explanation that contains ``words``."""
    assert isinstance(result.outcome, RunAborted)
    assert not result.ok
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.aborted
    assert words in result.outcome.failure.explanation
    assert result.decisions[-1].guard == "aborted"


def scripted_model(*entries: Any) -> RecordingModel:
    """A scripted model that records every request."""
    return RecordingModel(ScriptedModel(entries))


def request_text(request: ModelRequest) -> str:
    """All messages of a request, as one text."""
    return "\n".join(m.content for m in request.messages)


def tool_result_texts(messages: Sequence[Message]) -> list[str]:
    """The texts of all tool messages, in order."""
    return [m.content for m in messages if m.role is Role.TOOL]


def transitions_taken(result: RunResult) -> list[str]:
    """The transitions of a result, each as ``state: guard -> state``."""
    return [f"{d.source}: {d.guard} -> {d.target}" for d in result.decisions]


Kind = FailureKind


def echo(text: str) -> str:
    """Gives back its text."""
    return text


def explode(text: str = "boom") -> str:
    """Raises."""
    raise ValueError(text)


def truncated_reply(*calls: ToolCall, text: str = "") -> Reply:
    """A reply that was truncated by the length limit."""
    return Reply(Message.assistant(text, calls), FinishReason.LENGTH)


class Booking(BaseModel):
    model_config = ConfigDict(strict=True)
    day: datetime.date
    seats: tuple[int, ...]


def make_host(**more: Any) -> Host:
    return Host(clock=FakeClock(), secret=b"a secret of the tests", **more)


async def run_with_replies(agent: Agent, prompt: str, *replies: Any) -> RunResult:
    """The result of a run after some human replies."""
    result = await agent.run(prompt)
    for reply in replies:
        assert isinstance(result.outcome, UserInputRequested), result.outcome
        result = await agent.resume(result.outcome.suspension_record, reply)
    return result


def check_run(model: RecordingModel, result: RunResult) -> None:
    check_requests(model.requests)
    check_transcript(result.messages, request=False)


@tool(requires_approval=True)
def dangerous(what: str) -> str:
    """Needs approval."""
    return f"did {what}"


def run_until_suspended(agent: Agent, prompt: str = "go") -> SuspensionRecord:
    result = agent.run_sync(prompt)
    assert isinstance(result.outcome, UserInputRequested), result.outcome
    return result.outcome.suspension_record


async def await_run(run: Any) -> Any:
    return await run


def resumed(agent: Agent, result: RunResult, answer: Any, by_id: bool = False) -> RunResult:
    """The result of a suspended run after an answer: resumed by its record, or by its id."""
    outcome = result.outcome
    assert isinstance(outcome, UserInputRequested)
    held: Any = outcome.run_id if by_id else outcome.suspension_record.to_json()
    return asyncio.run(await_run(agent.resume(held, answer)))
