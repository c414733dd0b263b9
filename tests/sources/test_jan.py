"""Jan, error strategy: each layer fails in its own way, and only the model and a hook can end a turn.

The loop is the preset ``strict``. Its error-flow diagram is the last part, a test for each of its arrows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from agentfsm import (
    AbortRun,
    Agent,
    AgentGuardrails,
    Allow,
    ContextOverflowError,
    Deny,
    DenyCall,
    FailureKind,
    Handoff,
    HookContext,
    Host,
    Message,
    ProviderError,
    RecoveryStarted,
    Role,
    RunAborted,
    RunCompleted,
    RunError,
    RunResult,
    RunWarning,
    SkipCall,
    State,
    ToolCall,
    ToolError,
    ToolFinished,
    TransientProviderError,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.helpers.provider_rules import check_requests, check_transcript
from tests.helpers.scenarios import collect_events, request_text, scripted_model, tool_result_texts, transitions_taken

K = FailureKind
ANSWER = "Here is what I found."


def search(query: str) -> str:
    """Searches the web."""
    return f"found {query}"


def fetch(url: str) -> str:
    """Fetches a page, and never can."""
    raise ConnectionRefusedError(111, "connection refused")


def parse(text: str) -> int:
    """Reads a number."""
    return int(text)


def strict(model: Any, *, tools: Sequence[Any] = (), hooks: Sequence[Any] = (), **more: Any) -> Agent:
    host = Host(clock=FakeClock(), secret=b"of the tests")
    return Agent(model, tools=[search, fetch, parse, *tools], preset="strict", hooks=hooks, host=host, **more)


def play(agent: Agent, *replies: Any) -> tuple[list[Any], RunResult]:
    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run("what is new?")
        events = await collect_events(run)
        for reply in replies:
            assert isinstance(events[-1], UserInputRequested), events[-1]
            run = agent.resume(events[-1].suspension_record, reply)
            events += await collect_events(run)
        return events, run.result

    events, result = asyncio.run(scene())
    assert isinstance(agent.model, RecordingModel)
    check_requests(agent.model.requests)
    if result.state == "terminal":
        check_transcript(result.messages, request=False)
    return list(events), result


class FaultyMemory:
    """A memory that fails where it is told to."""

    def __init__(self, recall: bool = True, remember: bool = True) -> None:
        self.recall_works, self.remember_works = recall, remember
        self.kept: list[Message] = []

    async def recall(self, prompt: str) -> str:
        if not self.recall_works:
            raise OSError("database is locked")
        return f"the user asked {prompt!r} before"

    async def remember(self, messages: Sequence[Message]) -> None:
        if not self.remember_works:
            raise OSError("disk full")
        self.kept = list(messages)


# -- what can fail a turn: five variants -------------------------------------------------------------

MODEL_FAILURES: dict[str, tuple[Any, FailureKind]] = {
    "401": (ProviderError("401 Unauthorized"), K.provider_error),
    "503": (TransientProviderError("503"), K.transient_provider),
    "429": (TransientProviderError("429", retry_after_s=1), K.transient_provider),
    "anything": (RuntimeError("no route to host"), K.provider_error),
}


@pytest.mark.parametrize("case", MODEL_FAILURES)
def test_llm_a_failed_call_of_the_model_is_fatal_and_has_no_fallback(case: str) -> None:
    failing, kind = MODEL_FAILURES[case]
    model = scripted_model(failing, ANSWER)
    events, result = play(strict(model))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is kind
    assert len(model.requests) == 1
    assert not any(isinstance(e, RecoveryStarted) for e in events)


def test_llm_a_prompt_that_is_too_long_is_fatal_too() -> None:
    model = scripted_model(ContextOverflowError("too long"), ANSWER)
    _, result = play(strict(model))
    assert len(model.requests) == 1
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.context_overflow


def test_aborted_names_the_hook_and_its_reason() -> None:
    @hook(State.PRE_STEP)
    def quota(context: HookContext) -> AbortRun:
        return AbortRun("the tenant is over its quota")

    model = scripted_model(ANSWER)
    _, result = play(strict(model, hooks=[quota]))
    assert isinstance(result.outcome, RunAborted)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.aborted
    assert "quota" in result.outcome.failure.explanation
    assert "the tenant is over its quota" in result.outcome.failure.explanation
    assert not model.requests


@pytest.mark.parametrize("prompt", [None, 7, b"bytes", ["a", 7]])
def test_input_validation_happens_before_anything_starts(prompt: Any) -> None:
    model = scripted_model(ANSWER)
    with pytest.raises(RunError, match="prompt"):
        strict(model).run(prompt)
    assert not model.requests


def test_output_that_does_not_fit_its_schema_is_fatal() -> None:
    class Answer(BaseModel):
        total: int

    _, result = play(strict(scripted_model('{"total": 7}'), output_type=Answer))
    assert result.output == Answer(total=7)

    model = scripted_model('{"total": "many"}', '{"total": 7}')
    _, result = play(strict(model, output_type=Answer))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.output_malformed
    assert "total" in result.outcome.failure.explanation
    assert len(model.requests) == 1


def test_output_that_cannot_be_serialized_is_fatal() -> None:
    model = scripted_model("half a character: \ud83d", ANSWER)
    _, result = play(strict(model))
    assert isinstance(result.outcome, Handoff)
    assert "cannot be serialized" in result.outcome.rationale
    assert transitions_taken(result)[-2:] == [
        "post_llm: answer_not_serializable -> recover",
        "recover: handoff -> terminal",
    ]
    assert len(model.requests) == 1
    assert play(strict(scripted_model("a whole one: \U0001f600 \u00e4")))[1].output == "a whole one: \U0001f600 \u00e4"


def test_internal_whatever_else_raises_ends_the_run_with_its_name() -> None:
    from agentfsm import LOOP
    from agentfsm.loop.presets import STRICT

    def faulty(run: Any) -> bool:
        raise ZeroDivisionError("in a detector")

    graph = STRICT.graph.with_detector(State.POST_LLM, faulty)
    _, result = play(strict(scripted_model(ANSWER), graph=graph))
    assert isinstance(result.outcome, RunAborted)
    assert result.outcome.failure is not None
    assert "ZeroDivisionError" in result.outcome.failure.explanation
    assert graph != LOOP


# -- what cannot: tool errors are conversation data --------------------------------------------------


def test_the_table_has_no_row_on_which_a_tools_failure_could_end_a_turn() -> None:
    agent = strict(scripted_model())
    guards = {row.name for row in agent.graph.rows("post_tool")}
    assert not guards & {
        "tool_error",
        "environment_error",
        "unknown_tool",
        "invalid_arguments",
        "repeated_error",
        "policy_violation",
        "ambiguous_input",
        "scope_too_large",
        "capability_gap",
        "kernel_invalidated",
    }


FAILED_EXECUTIONS: dict[str, tuple[ToolCall, tuple[str, ...]]] = {
    "tool not found": (call("web_search2", query="x"), ("'web_search2'", "fetch, parse, search")),
    "execution failure": (call("fetch", url="http://x"), ("connection refused",)),
    "bad arguments": (call("search", wrong=1), ("query",)),
    "an exception": (call("parse", text="seven"), ("invalid literal", "seven")),
    "no JSON": (ToolCall("c", "search", {}, malformed="no valid JSON"), ("no valid JSON",)),
}


@pytest.mark.parametrize("case", FAILED_EXECUTIONS)
def test_a_failed_tool_is_a_result_that_says_so_and_nothing_more(case: str) -> None:
    entry, words = FAILED_EXECUTIONS[case]
    model = scripted_model(entry, ANSWER)
    events, result = play(strict(model))
    [message] = [m for m in model.requests[1].messages if m.role is Role.TOOL]
    assert message.is_error
    for word in words:
        assert word in message.content
    [finished] = [e for e in events if isinstance(e, ToolFinished)]
    assert finished.result.status == "failed"
    assert result.output == ANSWER
    assert not any(isinstance(e, RecoveryStarted) for e in events)
    assert "recover" not in {d.target for d in result.decisions}


def test_the_permission_that_a_tool_lacks_is_a_result_too() -> None:
    @hook(State.DISPATCH_TOOL, fail_open=False)
    def permissions(context: HookContext) -> DenyCall | None:
        assert context.call is not None
        if context.call.name == "search":
            return DenyCall("tool 'search' requires 'network'")
        return None

    model = scripted_model(call("search", query="x"), ANSWER)
    _, result = play(strict(model, hooks=[permissions]))
    [told] = tool_result_texts(model.requests[1].messages)
    assert "requires 'network'" in told
    assert result.output == ANSWER


@pytest.mark.parametrize("case", FAILED_EXECUTIONS)
def test_tools_may_fail_again_and_again(case: str) -> None:
    entry, _ = FAILED_EXECUTIONS[case]
    model = scripted_model(*[entry] * 12, ANSWER)
    limits = AgentGuardrails(loop_hard_threshold=20)
    _, result = play(strict(model, guardrails=limits))
    assert result.output == ANSWER
    assert len(model.requests) == 13


def test_nobody_counts_calls_or_silence() -> None:
    rows = {row.id for row in strict(scripted_model()).graph}
    assert not rows & {"post_llm.loop_detected", "post_llm.no_progress", "pre_step.no_progress"}
    model = scripted_model(*[call("search", query="same")] * 30, ANSWER)
    assert play(strict(model))[1].output == ANSWER


def test_a_result_is_the_tools_own_however_often_it_was_returned_before() -> None:
    model = scripted_model(*[call("search", query="same")] * 3, *[call("parse", text="x")] * 3, ANSWER)
    play(strict(model))
    error = "ValueError: invalid literal for int() with base 10: 'x'"
    assert tool_result_texts(model.requests[-1].messages) == ["found same"] * 3 + [error] * 3


@pytest.mark.parametrize("kind", ["ambiguous_input", "scope_too_large", "capability_gap", "kernel_invalidated"])
def test_what_a_tool_reports_about_the_task_is_conversation_too(kind: str) -> None:
    @tool
    def vague() -> str:
        """Reports a failure of another kind."""
        raise ToolError("which one?", kind=kind)

    model = scripted_model(call("vague"), ANSWER)
    _, result = play(strict(model, tools=[vague]))
    assert tool_result_texts(model.requests[1].messages) == ["which one?"]
    assert result.output == ANSWER


def test_denials_end_no_turn_however_many() -> None:
    @hook(State.DISPATCH_TOOL)
    def permissions(context: HookContext) -> DenyCall:
        return DenyCall("not allowed")

    model = scripted_model(*(call("search", query=str(i)) for i in range(9)), ANSWER)
    _, result = play(strict(model, hooks=[permissions]))
    assert result.output == ANSWER


def test_the_model_heals_itself() -> None:
    def other_arguments(messages: Any) -> ToolCall:
        assert "seven" in tool_result_texts(messages)[-1]
        return call("parse", text="7")

    def another_tool(messages: Any) -> ToolCall:
        assert "connection refused" in tool_result_texts(messages)[-1]
        return call("search", query="the same")

    def explains(messages: Any) -> str:
        return f"It cannot be reached: {tool_result_texts(messages)[-1]}"

    assert play(strict(scripted_model(call("parse", text="seven"), other_arguments, ANSWER)))[1].output == ANSWER
    assert play(strict(scripted_model(call("fetch", url="x"), another_tool, ANSWER)))[1].output == ANSWER
    _, result = play(strict(scripted_model(call("fetch", url="x"), explains)))
    assert "connection refused" in result.output


# -- memory, events, hooks ---------------------------------------------------------------------------


def test_memory_that_works_reaches_the_model_and_gets_the_transcript() -> None:
    memory = FaultyMemory()
    model = scripted_model(ANSWER)
    _, result = play(strict(model, memory=memory))
    assert "before" in request_text(model.requests[0])
    assert memory.kept == [Message.user("what is new?"), *result.messages[1:]]


def test_events_nobody_receives_change_nothing() -> None:
    script = [call("search", query="a"), call("fetch", url="x"), ANSWER]
    alone = strict(scripted_model(*script)).run_sync("what is new?")
    seen: list[Any] = []
    _, watched = play(strict(scripted_model(*script), hooks=[observer(seen.append)]))
    assert transitions_taken(alone) == transitions_taken(watched)
    assert alone.messages == watched.messages
    assert alone.output == watched.output
    assert seen


def test_hooks_fail_open_unless_they_say_otherwise() -> None:
    @hook(State.CALL_LLM)
    def open_by_default(context: HookContext) -> None:
        raise RuntimeError("x")

    assert open_by_default.fail_open


# -- the error-flow diagram --------------------------------------------------------------------------


def session_start(verdict: Any, fail_open: bool = True) -> Any:
    @hook(State.PRE_STEP, once=True, fail_open=fail_open)
    def start(context: HookContext) -> Any:
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    return start


def test_diagram_hook_session_start_abort() -> None:
    model = scripted_model(ANSWER)
    _, result = play(strict(model, hooks=[session_start(AbortRun("no"))]))
    assert transitions_taken(result) == ["pre_step: aborted -> terminal"]
    assert not model.requests
    assert not result.ok


def test_diagram_hook_session_start_continue() -> None:
    assert play(strict(scripted_model(ANSWER), hooks=[session_start(None)]))[1].output == ANSWER


def test_diagram_the_session_starts_once() -> None:
    starts: list[str] = []

    @hook(State.PRE_STEP, once=True)
    def start(context: HookContext) -> None:
        starts.append(context.run.run_id)

    _, result = play(strict(scripted_model(call("search", query="a"), ANSWER), hooks=[start]))
    assert starts == [result.run_state.run_id]


@pytest.mark.parametrize("fail_open", [True, False])
def test_diagram_hook_session_start_error(fail_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(ANSWER)
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        _, result = play(strict(model, hooks=[session_start(RuntimeError("hook broke"), fail_open)]))
    if fail_open:
        assert result.output == ANSWER
        assert any("RuntimeError" in record.getMessage() for record in caplog.records)  # logs quote nobody
    else:
        assert isinstance(result.outcome, RunAborted)
        assert "hook broke" in result.outcome.reason
        assert not model.requests


def test_diagram_memory_read_error(caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(ANSWER)
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        events, result = play(strict(model, memory=FaultyMemory(recall=False)))
    assert result.output == ANSWER
    assert any("memory is unavailable" in record.getMessage() for record in caplog.records)
    assert any("database is locked" in e.text for e in events if isinstance(e, RunWarning))
    assert list(model.requests[0].messages) == [Message.user("what is new?")]  # the context is empty


def test_diagram_llm_error() -> None:
    _, result = play(strict(scripted_model(call("search", query="a"), ProviderError("500 for good"))))
    assert transitions_taken(result)[-2:] == ["call_llm: provider_error -> recover", "recover: handoff -> terminal"]


def test_diagram_hook_aborts_one_tool() -> None:
    ran: list[str] = []

    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    @hook(State.DISPATCH_TOOL)
    def choosy(context: HookContext) -> SkipCall | None:
        assert context.call is not None
        return SkipCall("not this one") if context.call.arguments.get("text") == "b" else None

    model = scripted_model([call("note", text="a"), call("note", text="b"), call("note", text="c")], ANSWER)
    _, result = play(strict(model, tools=[note], hooks=[choosy]))
    assert ran == ["a", "c"]
    assert tool_result_texts(model.requests[1].messages) == ["a", "Not run: not this one", "c"]
    assert result.output == ANSWER


@pytest.mark.parametrize("how", ["a hook", "a person"])
def test_diagram_policy_denies(how: str) -> None:
    @hook(State.DISPATCH_TOOL, fail_open=False)
    def permissions(context: HookContext) -> DenyCall | None:
        return DenyCall("too dangerous") if how == "a hook" else None

    @tool(requires_approval=how == "a person")
    def execute(code: str) -> str:
        """Runs code."""
        return "ran"

    model = scripted_model(call("execute", code="rm"), ANSWER)
    replies = [Deny("too dangerous")] if how == "a person" else []
    _, result = play(strict(model, tools=[execute], hooks=[permissions]), *replies)
    [message] = [m for m in model.requests[1].messages if m.role is Role.TOOL]
    assert message.is_error
    assert "too dangerous" in message.content
    assert result.output == ANSWER


def test_diagram_policy_allows() -> None:
    @tool(requires_approval=True)
    def execute(code: str) -> str:
        """Runs code."""
        return "ran"

    model = scripted_model(call("execute", code="ls"), ANSWER)
    _, result = play(strict(model, tools=[execute]), Allow())
    assert tool_result_texts(result.messages) == ["ran"]
    assert result.output == ANSWER


def test_diagram_execute_fails() -> None:
    events, result = play(strict(scripted_model(call("fetch", url="x"), ANSWER)))
    assert [e.result.status for e in events if isinstance(e, ToolFinished)] == ["failed"]
    assert result.output == ANSWER


def test_diagram_execute_works() -> None:
    events, result = play(strict(scripted_model(call("search", query="a"), ANSWER)))
    assert [e.result.status for e in events if isinstance(e, ToolFinished)] == ["done"]
    [message] = [m for m in result.messages if m.role is Role.TOOL]
    assert not message.is_error
    assert result.output == ANSWER


def test_diagram_memory_write_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        _, result = play(strict(scripted_model(ANSWER), memory=FaultyMemory(remember=False)))
    assert result.output == ANSWER
    assert any("memory could not store" in record.getMessage() for record in caplog.records)


def test_diagram_an_event_that_cannot_be_delivered() -> None:
    def broken_pipe(event: Any) -> None:
        raise BrokenPipeError("nobody listens")

    _, result = play(strict(scripted_model(call("search", query="a"), ANSWER), hooks=[observer(broken_pipe)]))
    assert result.output == ANSWER


def test_diagram_the_turn_returns_its_output() -> None:
    _, result = play(strict(scripted_model(ANSWER)))
    assert isinstance(result.outcome, RunCompleted)
    assert result.outcome.output == result.output == ANSWER
    assert transitions_taken(result)[-1] == "post_llm: otherwise -> terminal"


def broken(event: Any) -> None:
    raise RuntimeError("an observer broke")


@hook(State.PRE_STEP)
def open_and_broken(context: HookContext) -> None:
    raise RuntimeError("a hook broke")


@hook(State.POST_TOOL, fail_open=False)
def closed_and_broken(context: HookContext) -> None:
    raise RuntimeError("a hook broke")


EVERYTHING: dict[str, tuple[dict[str, Any], list[Any], bool]] = {
    "nothing": ({}, [], True),
    "memory, reading": ({"memory": FaultyMemory(recall=False)}, [], True),
    "memory, writing": ({"memory": FaultyMemory(remember=False)}, [], True),
    "a tool": ({}, [call("fetch", url="x")], True),
    "a tool that is not there": ({}, [call("nothing_like_it")], True),
    "arguments": ({}, [call("search", wrong=1)], True),
    "events": ({"hooks": [observer(broken)]}, [], True),
    "a hook that fails open": ({"hooks": [open_and_broken]}, [], True),
    "a hook that fails closed": ({"hooks": [closed_and_broken]}, [], False),
    "a hook that aborts": ({"hooks": [session_start(AbortRun("no"))]}, [], False),
    "the model": ({}, [ProviderError("401")], False),
}


@pytest.mark.parametrize("failing", EVERYTHING)
def test_diagram_only_two_paths_lead_to_an_error(failing: str) -> None:
    more, script, fine = EVERYTHING[failing]
    _, result = play(strict(scripted_model(*script, call("search", query="a"), ANSWER), **more))
    assert result.ok is fine
    assert isinstance(result.outcome, RunCompleted if fine else (Handoff, RunAborted))


def test_diagram_everything_that_may_fail_fails_at_once() -> None:
    agent = strict(
        scripted_model([call("fetch", url="x"), call("nothing_like_it"), call("search", wrong=1)], ANSWER),
        memory=FaultyMemory(recall=False, remember=False),
        hooks=[open_and_broken, observer(broken)],
    )
    _, result = play(agent)
    assert result.output == ANSWER
