"""parsimony-agents, failure handling: detectors, the recovery funnel, its outcomes, and what the model is told.

Its loop is the preset ``funnel``. The page's code blocks run as they stand, but for their imports and
their remarks; the longest, which has a ``main``, is ``parsimony_example.py`` beside this file.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    DefaultPolicy,
    Failure,
    FailureKind,
    FinishReason,
    Handoff,
    Host,
    Message,
    ModelRequest,
    PartialRunSummary,
    Recovery,
    RecoveryPolicy,
    RecoveryStarted,
    Reply,
    RunCompleted,
    RunResult,
    RunState,
    RunWarning,
    SuspensionRecord,
    ToolError,
    TransientProviderError,
    UserInputRequested,
    tool,
)
from agentfsm.loop.prompts import render_messages
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.helpers.provider_rules import check_requests, check_transcript
from tests.helpers.scenarios import (
    await_run,
    collect_events,
    request_text,
    scripted_model,
    tool_result_texts,
    transitions_taken,
)

K = FailureKind
DONE = call("return_done", output="finished")


def search(query: str) -> str:
    """Finds things."""
    return f"found {query}"


def report(kind: str, text: str = "as it said") -> str:
    """Fails as it is told to."""
    raise ToolError(text, kind=kind)


def broken(text: str = "boom") -> str:
    """Raises."""
    raise RuntimeError(text)


def funnel(model: Any, clock: FakeClock | None = None, policy: Any = None, **limits: Any) -> Agent:
    return Agent(
        model,
        tools=[search, report, broken],
        preset="funnel",
        policy=policy,
        guardrails=AgentGuardrails(**limits),
        host=Host(clock=clock or FakeClock(), secret=b"of the tests"),
    )


def play(agent: Agent, *replies: str, prompt: str = "go") -> tuple[list[Any], RunResult]:
    """All events of a run and its resumptions, and the last result; no request has an unanswered call."""

    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run(prompt)
        events: list[Any] = await collect_events(run)
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
    return events, result


def said(events: list[Any]) -> list[tuple[FailureKind, Action]]:
    """What was recovered from, and how."""
    return [(e.failure.kind, e.action) for e in events if isinstance(e, RecoveryStarted)]


# -- where failures come from ------------------------------------------------------------------------


def truncated(*calls: Any) -> Reply:
    return Reply(Message.assistant("half", calls), FinishReason.LENGTH)


def refused(*calls: Any) -> Reply:
    return Reply(Message.assistant("I will not", calls), FinishReason.REFUSAL)


SAME = [call("search", query="same")] * 6

DETECTED: dict[FailureKind, tuple[str, list[Any], dict[str, Any]]] = {
    K.iteration_limit: ("pre_step", [call("search", query="a")], {"max_iterations": 1}),
    K.time_limit: ("pre_step", [call("wait", seconds=301.0)], {}),
    K.output_truncated: ("post_llm", [truncated()], {}),
    K.output_refused: ("post_llm", [refused()], {}),
    K.loop_detected: ("post_llm", [SAME], {}),
    K.no_progress: ("post_llm", ["just talking"], {}),
    K.tool_error: ("post_tool", [call("broken")], {}),
    K.ambiguous_input: ("post_tool", [call("report", kind="ambiguous_input")], {}),
    K.scope_too_large: ("post_tool", [call("report", kind="scope_too_large")], {}),
    K.capability_gap: ("post_tool", [call("report", kind="capability_gap")], {}),
    K.policy_violation: ("post_tool", [call("report", kind="policy_violation")], {}),
    K.kernel_invalidated: ("post_tool", [call("report", kind="kernel_invalidated")], {}),
    K.transient_provider: ("call_llm", [TransientProviderError("429 rate limited")], {}),
}


@pytest.mark.parametrize("kind", DETECTED)
def test_every_kind_is_found_where_the_page_says(kind: FailureKind) -> None:
    state, script, limits = DETECTED[kind]
    clock = FakeClock()

    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    agent = Agent(
        scripted_model(*script, DONE),
        tools=[search, report, broken, wait],
        preset="funnel",
        guardrails=AgentGuardrails(**limits),
        host=Host(clock=clock),
    )
    result = asyncio.run(_result(agent))
    first = next(d for d in result.decisions if d.target == "recover")
    assert (first.source, first.guard) == (state, kind)
    assert first.guard_result.kind is kind


async def _result(agent: Agent) -> RunResult:
    return await agent.run("go")


def test_a_stall_between_phases_is_no_progress_in_pre_step() -> None:
    from agentfsm import LOOP, Transition

    clock = FakeClock()

    def dawdle(run: RunState) -> bool:
        clock.advance(31 if run.iterations == 1 else 0)
        return False

    agent = Agent(
        scripted_model(call("search", query="a"), DONE),
        tools=[search],
        preset="funnel",
        graph=LOOP.with_transition(Transition("post_tool", dawdle, "recover"), before="declared_done"),
        host=Host(clock=clock),
    )
    events, result = play(agent)
    assert "pre_step: no_progress -> recover" in transitions_taken(result)
    assert said(events) == [(K.no_progress, Action.narrow_scope)]
    assert isinstance(result.outcome, RunCompleted)


def test_in_pre_step_the_iteration_limit_beats_the_time_limit_and_that_the_stall() -> None:
    clock = FakeClock()

    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    model = scripted_model(call("wait", seconds=400.0), call("wait", seconds=400.0), call("wait", seconds=1.0))
    agent = Agent(
        model,
        tools=[wait],
        preset="funnel",
        guardrails=AgentGuardrails(max_iterations=1, max_steps=99),
        host=Host(clock=clock),
    )
    events, _ = play(agent, "go on", "go on")
    asked = [e.originating_failure_kind for e in events if isinstance(e, UserInputRequested)]
    # The first reply renews the iterations and not the time, which then acts at once; the second the time.
    assert asked == [K.iteration_limit, K.time_limit, K.iteration_limit]
    guards = [d.name for d in agent.graph.rows("pre_step")]
    assert guards.index("iteration_limit") < guards.index("time_limit") < guards.index("no_progress")


@pytest.mark.parametrize(
    ("entry", "kind"), [(truncated(*SAME), K.output_truncated), (refused(*SAME), K.output_refused)]
)
def test_in_post_llm_truncation_and_refusal_beat_the_loop(entry: Reply, kind: FailureKind) -> None:
    _, result = play(funnel(scripted_model(entry, DONE)))
    assert next(d.guard for d in result.decisions if d.target == "recover") == kind


def test_the_first_match_wins_and_those_in_front_of_it_were_asked() -> None:
    _, result = play(funnel(scripted_model(call("search", query="a")), max_iterations=1))
    decision = result.decisions[-2]
    assert decision.tried == (("cancelled", False), ("aborted", False), ("runaway", False), ("iteration_limit", True))


def test_block_the_kinds() -> None:
    from agentfsm import FailureKind

    FailureKind.transient_provider  # noqa: B018

    FailureKind.output_truncated  # noqa: B018
    FailureKind.output_refused  # noqa: B018

    FailureKind.ambiguous_input  # noqa: B018
    FailureKind.scope_too_large  # noqa: B018
    FailureKind.capability_gap  # noqa: B018

    FailureKind.no_progress  # noqa: B018
    FailureKind.loop_detected  # noqa: B018

    FailureKind.tool_error  # noqa: B018
    FailureKind.policy_violation  # noqa: B018
    FailureKind.kernel_invalidated  # noqa: B018

    FailureKind.iteration_limit  # noqa: B018
    FailureKind.time_limit  # noqa: B018


def test_the_set_of_kinds_is_closed() -> None:
    with pytest.raises(ValueError, match="tool_timeout"):
        FailureKind("tool_timeout")
    assert str(K.no_progress) == "no_progress"
    # Those of the page, and those that this loop tells apart beside them.
    assert {k.value for k in FailureKind} == {k.value for k in DETECTED} | {
        "provider_error",
        "context_overflow",
        "output_malformed",
        "repeated_error",
        "unknown_tool",
        "invalid_arguments",
        "environment_error",
        "aborted",
        "token_limit",
        "cost_limit",
    }


def test_a_text_only_reply_is_no_progress() -> None:
    events, result = play(funnel(scripted_model("let me think about it", DONE)))
    assert said(events) == [(K.no_progress, Action.narrow_scope)]
    assert result.output == "finished"


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
def test_a_tool_that_takes_too_long_is_a_tool_error(is_async: bool) -> None:
    release = threading.Event()

    async def hang_async() -> str:
        """Hangs."""
        await asyncio.Event().wait()
        return ""

    def hang() -> str:
        """Hangs."""
        release.wait(5)
        return ""

    agent = Agent(
        scripted_model(call("slow"), DONE),
        tools=[tool(name="slow")(hang_async if is_async else hang)],
        preset="funnel",
        guardrails=AgentGuardrails(tool_timeout_s=0.05),
    )
    events, result = play(agent)
    release.set()
    assert said(events) == [(K.tool_error, Action.retry)]
    assert tool_result_texts(result.messages)[0] == "timed out after 0.05 s"


# -- the Failure object ------------------------------------------------------------------------------


def test_block_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    from agentfsm import Failure, FailureKind

    failure = Failure(
        kind=FailureKind.capability_gap,
        explanation="No connector available for SAP queries",
        blockers=("SAP connector not installed", "Authentication unavailable"),
    )

    print(failure.kind)
    print(failure.explanation)
    print(failure.blockers)
    print(failure.suggested_action)

    assert failure.kind is FailureKind.capability_gap
    assert failure.suggested_action is Action.handoff
    assert capsys.readouterr().out == (
        "capability_gap\n"
        "No connector available for SAP queries\n"
        "('SAP connector not installed', 'Authentication unavailable')\n"
        "handoff\n"
    )


def test_a_failure_never_changes() -> None:
    failure = Failure(kind=K.tool_error, explanation="x")
    with pytest.raises(AttributeError, match="read-only"):
        failure.explanation = "y"  # type: ignore[misc]


def test_the_suggested_action_is_always_there() -> None:
    assert Failure(kind=K.tool_error, explanation="x", suggested_action=None).suggested_action is Action.retry  # type: ignore[arg-type]
    assert Failure(kind=K.tool_error, explanation="x").suggested_action is Action.retry
    assert Failure(kind=K.tool_error, explanation="x", suggested_action=Action.stop).suggested_action is Action.stop


def test_equality_and_hash_look_at_kind_explanation_and_blockers_alone() -> None:
    one = Failure(kind=K.tool_error, explanation="x", blockers=("b",), metadata={"attempt": 1}, partial_data=[1])
    same = Failure(kind=K.tool_error, explanation="x", blockers=("b",), suggested_action=Action.stop)
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same}) == 1
    for other in (
        Failure(kind=K.loop_detected, explanation="x", blockers=("b",)),
        Failure(kind=K.tool_error, explanation="y", blockers=("b",)),
        Failure(kind=K.tool_error, explanation="x", blockers=("c",)),
    ):
        assert one != other


def test_a_list_of_blockers_becomes_a_tuple() -> None:
    failure = Failure(kind=K.capability_gap, explanation="x", blockers=["a", "b"])  # type: ignore[arg-type]
    assert failure.blockers == ("a", "b")
    assert isinstance(failure.blockers, tuple)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_failure_comes_back_from_json(kind: FailureKind) -> None:
    failure = Failure(
        kind=kind, explanation="ü <x> \" '", blockers=("a",), partial_data={"rows": [1, None]}, metadata={"n": 1.5}
    )
    back = Failure.model_validate_json(failure.model_dump_json())
    assert back == failure
    assert back.model_dump() == failure.model_dump()


def test_what_a_failure_brings_along_is_json_whatever_was_given() -> None:
    failure = Failure(
        kind=K.tool_error, explanation="x", metadata={"error": ValueError("x"), "n": float("nan"), "raw": b"\xff"}
    )
    assert json.loads(json.dumps(failure.metadata, allow_nan=False)) == failure.metadata
    assert Failure.model_validate_json(failure.model_dump_json()).metadata == failure.metadata


def test_a_failure_with_anything_in_it_can_be_put_aside() -> None:
    def vague() -> Any:
        """Does not know what is meant."""
        return Failure(kind=K.ambiguous_input, explanation="which one?", metadata={"seen": {1, 2}, "x": float("inf")})

    agent = Agent(scripted_model(call("vague"), "x"), tools=[vague], host=Host(clock=FakeClock()))
    events, result = play(agent, "the second")
    assert result.output == "x"
    [asked] = [e for e in events if isinstance(e, UserInputRequested)]
    assert "which one?" in asked.question


DEFAULT_ACTIONS = {
    "transient_provider": "retry",
    "output_truncated": "retry",
    "tool_error": "retry",
    "ambiguous_input": "ask_user",
    "loop_detected": "ask_user",
    "iteration_limit": "ask_user",
    "time_limit": "ask_user",
    "scope_too_large": "narrow_scope",
    "no_progress": "narrow_scope",
    "kernel_invalidated": "narrow_scope",
    "output_refused": "handoff",
    "capability_gap": "handoff",
    "policy_violation": "handoff",
}


@pytest.mark.parametrize(("kind", "action"), DEFAULT_ACTIONS.items())
def test_the_default_action_of_every_kind(kind: str, action: str) -> None:
    assert Failure(kind=FailureKind(kind), explanation="x").suggested_action == action


@pytest.mark.parametrize(("kind", "action"), DEFAULT_ACTIONS.items())
def test_the_default_action_is_what_the_loop_does(kind: str, action: str) -> None:
    _, script, limits = DETECTED[FailureKind(kind)]
    clock = FakeClock()

    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    agent = Agent(
        scripted_model(*script, DONE),
        tools=[search, report, broken, wait],
        preset="funnel",
        guardrails=AgentGuardrails(**limits),
        host=Host(clock=clock, secret=b"x"),
    )
    events, _ = play(agent)
    match action:
        case "retry" | "narrow_scope":
            assert said(events) == [(kind, action)]
            assert isinstance(events[-1], RunCompleted)
        case "ask_user":
            assert isinstance(events[-1], UserInputRequested)
            assert events[-1].originating_failure_kind == kind
        case _:
            assert isinstance(events[-1], Handoff)
            assert events[-1].failure is not None
            assert events[-1].failure.kind == kind


# -- the five actions --------------------------------------------------------------------------------


class Always(DefaultPolicy):
    """Decides the same about everything."""

    action = Action.stop

    def decide(self, failure: Failure, state: RunState) -> Action:
        return self.action


def always(action: Action) -> Any:
    return type("Always", (Always,), {"action": action})()


def test_action_retry_sleeps_the_back_off_and_attempts_again() -> None:
    clock = FakeClock()
    events, result = play(funnel(scripted_model(TransientProviderError("429"), DONE), clock))
    assert clock.slept == [2.0]
    [error] = [e for e in events if isinstance(e, RecoveryStarted)]
    assert (error.action, error.recoverable, error.attempt, error.backoff_s) == (Action.retry, True, 1, 2.0)
    assert isinstance(result.outcome, RunCompleted)


def test_action_narrow_scope_sets_a_pending_instruction() -> None:
    model = scripted_model("talk", DONE)
    events, result = play(funnel(model))
    [error] = [e for e in events if isinstance(e, RecoveryStarted)]
    assert (error.action, error.recoverable) == (Action.narrow_scope, True)
    assert "Choose one" not in request_text(model.requests[0])
    assert "Choose one" in request_text(model.requests[1])
    assert isinstance(result.outcome, RunCompleted)


def test_action_ask_user_writes_a_record_and_suspends() -> None:
    events, result = play(funnel(scripted_model(SAME)))
    assert isinstance(events[-1], UserInputRequested)
    assert isinstance(events[-1].suspension_record, SuspensionRecord)
    assert result.state == "suspended"
    assert not said(events)


def test_action_handoff_ends_with_structured_blockers() -> None:
    def query_sap() -> Failure:
        """Cannot."""
        return Failure(kind=K.capability_gap, explanation="no SAP connector", blockers=("not installed", "no login"))

    agent = Agent(scripted_model(call("query_sap")), tools=[query_sap], preset="funnel")
    events, result = play(agent)
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.blockers == ("not installed", "no login")
    assert result.outcome.rationale == "no SAP connector"
    assert result.run_state.done
    assert not said(events)


def test_action_stop_ends_without_a_question() -> None:
    events, result = play(funnel(scripted_model("talk"), policy=always(Action.stop)))
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.run_state.done
    assert not said(events)


@pytest.mark.parametrize("action", list(Action))
def test_whatever_the_action_the_failure_is_counted_and_learned(action: Action) -> None:
    agent = funnel(scripted_model(call("broken"), DONE), policy=always(action))
    events, result = play(agent)
    assert result.run_state.lessons_learned == [Failure(kind=K.tool_error, explanation="broken: RuntimeError: boom")]
    if action in (Action.retry, Action.narrow_scope):
        assert [e.attempt for e in events if isinstance(e, RecoveryStarted)] == [1]
        assert result.run_state.failure_attempts == {}  # the success behind it set it back
    else:
        assert result.run_state.failure_attempts == {K.tool_error: 1}


# -- the policy --------------------------------------------------------------------------------------


def test_block_the_protocol() -> None:
    from typing import Protocol, runtime_checkable

    @runtime_checkable
    class RecoveryPolicy(Protocol):
        def retry_budget(self, kind: FailureKind) -> int: ...
        def backoff(self, kind: FailureKind, attempt: int) -> float: ...
        def decide(self, failure: Failure, state: RunState) -> Action: ...

    assert isinstance(DefaultPolicy(), RecoveryPolicy)


def test_the_protocol_can_be_checked_at_run_time() -> None:
    assert isinstance(DefaultPolicy(), RecoveryPolicy)
    assert not isinstance(object(), RecoveryPolicy)


BUDGETS = {
    K.transient_provider: 3,
    K.tool_error: 2,
    K.unknown_tool: 2,
    K.invalid_arguments: 2,
    K.output_malformed: 2,
    K.environment_error: 2,
    K.output_truncated: 1,
}


@pytest.mark.parametrize("kind", list(FailureKind))
def test_the_retry_budget_of_every_kind(kind: FailureKind) -> None:
    assert DefaultPolicy().retry_budget(kind) == BUDGETS.get(kind, 0)


RETRIED: dict[FailureKind, Any] = {
    K.transient_provider: TransientProviderError("503"),
    K.tool_error: call("broken"),
    K.unknown_tool: call("nothing_like_it"),
    K.invalid_arguments: call("search", wrong=1),
    K.output_truncated: truncated(),
}


@pytest.mark.parametrize(("kind", "entry"), RETRIED.items())
def test_a_spent_retry_budget_becomes_a_handoff(kind: FailureKind, entry: Any) -> None:
    budget = BUDGETS[kind]
    events, result = play(funnel(scripted_model(*[entry] * budget, DONE)))
    assert said(events) == [(kind, Action.retry)] * budget
    assert isinstance(result.outcome, RunCompleted)

    model = scripted_model(*[entry] * 9)
    events, result = play(funnel(model))
    assert said(events) == [(kind, Action.retry)] * budget
    assert isinstance(result.outcome, Handoff)
    assert len(model.requests) == budget + 1


def test_back_off_doubles_up_to_thirty_seconds_and_only_for_the_provider() -> None:
    policy = DefaultPolicy()
    waits = [policy.backoff(K.transient_provider, attempt) for attempt in range(1, 8)]
    assert waits == [2, 4, 8, 16, 30, 30, 30]
    assert policy.backoff(K.transient_provider, 10_000) == 30
    for kind in FailureKind:
        if kind is not K.transient_provider:
            assert policy.backoff(kind, 3) == 0


def test_back_off_on_a_running_loop() -> None:
    clock = FakeClock()
    model = scripted_model(*[TransientProviderError("503")] * 4)
    _, result = play(funnel(model, clock))
    assert clock.slept == [2.0, 4.0, 8.0]
    assert isinstance(result.outcome, Handoff)


@pytest.mark.parametrize(("asked", "slept"), [(7.0, 7.0), (1.0, 2.0), (0.0, 2.0)])
def test_back_off_is_never_less_than_the_provider_asks(asked: float, slept: float) -> None:
    clock = FakeClock()
    play(funnel(scripted_model(TransientProviderError("429", retry_after_s=asked), DONE), clock))
    assert clock.slept == [slept]


def test_no_back_off_outlasts_the_run() -> None:
    clock = FakeClock()
    model = scripted_model(TransientProviderError("429", retry_after_s=1e9), DONE)
    _, result = play(funnel(model, clock))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.rationale == "429"
    assert len(model.requests) == 1  # never asked again before the provider's time
    assert clock.slept == []  # a wait that cannot end in time is not begun


def test_jitter_lengthens_the_back_off_and_comes_from_the_runs_own_seed() -> None:
    def waits(seed: int, run_id: str) -> list[float]:
        clock = FakeClock()
        agent = Agent(
            scripted_model(*[TransientProviderError("503")] * 3, "x"),
            policy=DefaultPolicy(jitter=0.5),
            host=Host(clock=clock, seed=seed),
        )
        asyncio.run(await_run(agent.run("go", run_id=run_id)))
        return clock.slept

    first = waits(1, "r")
    assert first == waits(1, "r")
    assert first != waits(2, "r")
    assert all(base <= wait <= base * 1.5 for base, wait in zip((2, 4, 8), first, strict=True))


def test_block_the_default_policy(capsys: pytest.CaptureFixture[str]) -> None:
    from agentfsm import Action, DefaultPolicy, Failure, FailureKind, RunState

    policy = DefaultPolicy()
    state = RunState(run_id="r1", session_id="s1")

    failure = Failure(kind=FailureKind.transient_provider, explanation="429 rate limited")
    print(policy.decide(failure, state))
    print(policy.backoff(FailureKind.transient_provider, attempt=1))

    assert policy.decide(failure, state) is Action.retry
    assert capsys.readouterr().out == "retry\n2.0\n"


def test_block_a_policy_of_ones_own(anthropic: Server) -> None:
    class MyCustomPolicy(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action:
            return Action.stop

    from agentfsm import Agent

    agent = Agent(model="claude-sonnet-4-6", policy=MyCustomPolicy())

    anthropic.replies = [(200, anthropic.says("I will not", "refusal"))]
    assert isinstance(agent.run_sync("go").outcome, PartialRunSummary)


# -- first strike, second strike ---------------------------------------------------------------------


def test_the_instruction_after_a_text_only_reply_offers_every_way_on() -> None:
    model = scripted_model("talk", DONE)
    play(funnel(model))
    for way in ("ask_user", "return_done", "return_unable", "next tool call"):
        assert way in request_text(model.requests[1])


@pytest.mark.parametrize("kind", ["scope_too_large", "kernel_invalidated"])
def test_the_instruction_after_too_large_a_step_asks_for_the_smallest_next_one(kind: str) -> None:
    model = scripted_model(call("report", kind=kind), DONE)
    events, _ = play(funnel(model))
    assert said(events) == [(kind, Action.narrow_scope)]
    assert "smallest next step" in model.requests[1].messages[-1].content


@pytest.mark.parametrize(
    "entry", ["talk", call("report", kind="scope_too_large"), call("report", kind="kernel_invalidated")]
)
def test_the_second_strike_is_a_handoff(entry: Any) -> None:
    events, result = play(funnel(scripted_model(entry, entry)))
    assert [action for _, action in said(events)] == [Action.narrow_scope]
    assert isinstance(result.outcome, Handoff)


def test_strikes_count_in_a_row_and_a_success_between_forgives_them() -> None:
    events, result = play(funnel(scripted_model("talk", call("search", query="a"), "talk", DONE)))
    assert said(events) == [(K.no_progress, Action.narrow_scope)] * 2
    assert isinstance(result.outcome, RunCompleted)


def test_block_first_and_second_strike(capsys: pytest.CaptureFixture[str]) -> None:
    from agentfsm import Action, DefaultPolicy, Failure, FailureKind, RunState

    policy = DefaultPolicy()
    state = RunState(run_id="r1", session_id="s1")

    first = Failure(kind=FailureKind.no_progress, explanation="text-only response")
    print(policy.decide(first, state))
    state.record_failure_attempt(FailureKind.no_progress)

    second = Failure(kind=FailureKind.no_progress, explanation="text-only again")
    print(policy.decide(second, state))

    assert capsys.readouterr().out == f"{Action.narrow_scope}\n{Action.handoff}\n"


def test_the_policy_sees_the_attempts_before_this_one() -> None:
    seen: list[tuple[FailureKind, int]] = []

    class Watching(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action | Recovery:
            seen.append((failure.kind, state.attempts(failure.kind)))
            return super().decide(failure, state)

    play(funnel(scripted_model("talk", "talk"), policy=Watching()))
    assert seen == [(K.no_progress, 0), (K.no_progress, 1)]


def test_attempts_and_repeats_are_counted_apart_and_both_survive_a_suspension() -> None:
    script = [call("search", query="a"), call("broken"), call("ask_user", question="which?"), DONE]
    agent = funnel(scripted_model(*script))
    _, before = play(agent)
    assert before.run_state.failure_attempts == {K.tool_error: 1}
    assert before.run_state.last_repeat_counts["search:" + _hash({"query": "a"})] == 1
    agent = funnel(scripted_model(*script))
    _, after = play(agent, "that one")
    assert after.run_state.failure_attempts == {}  # the last calls were successes
    assert after.run_state.last_repeat_counts["search:" + _hash({"query": "a"})] == 1


def test_progress_toward_a_budget_is_not_reset_by_suspending_on_another_question() -> None:
    script = [call("broken"), call("broken"), call("ask_user", question="which?"), call("broken"), DONE]
    policy = DefaultPolicy()
    agent = Agent(
        scripted_model(*script),
        tools=[broken],
        preset="funnel",
        policy=policy,
        host=Host(clock=FakeClock()),
    )
    _, result = play(agent, "that one")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.tool_error


# -- the three outcomes ------------------------------------------------------------------------------


def test_a_question_of_the_agents_own_has_no_failure_behind_it() -> None:
    ask = call("ask_user", question="Which series?", context="There are two.", choices=["monthly", "daily"])
    model = scripted_model(ask, lambda messages: call("return_done", output=f"took {messages[-1].content}"))
    events, result = play(funnel(model), "monthly")
    [asked] = [e for e in events if isinstance(e, UserInputRequested)]
    assert (asked.question, asked.context, asked.choices) == ("Which series?", "There are two.", ("monthly", "daily"))
    assert asked.originating_failure_kind is None
    assert asked.kind == "question"
    assert result.output == "took monthly"


@pytest.mark.parametrize(
    ("script", "limits", "kind"),
    [
        ([call("report", kind="ambiguous_input")], {}, K.ambiguous_input),
        ([SAME], {}, K.loop_detected),
        ([call("search", query="a")], {"max_iterations": 1}, K.iteration_limit),
    ],
)
def test_a_question_of_the_funnel_says_what_led_to_it(script: list[Any], limits: Any, kind: FailureKind) -> None:
    events, result = play(funnel(scripted_model(*script, DONE), max_steps=99, **limits), "go on")
    [asked] = [e for e in events if isinstance(e, UserInputRequested)]
    assert asked.originating_failure_kind is kind
    assert asked.question.strip()
    assert result.output == "finished"


def test_a_handoff_poses_no_question() -> None:
    unable = call("return_unable", rationale="no access", blockers=["no login"], suggested_next_steps=["ask IT"])
    _, result = play(funnel(scripted_model(unable)))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.rationale == "no access"
    assert result.outcome.blockers == ("no login",)
    assert result.outcome.suggested_next_steps == ("ask IT",)
    assert result.outcome.failure is None
    assert not hasattr(result.outcome, "suspension_record")
    assert not hasattr(result.outcome, "question")


def test_a_partial_summary_says_what_is_missing_what_was_learned_and_what_comes_next() -> None:
    model = scripted_model(call("broken", text="no route to host"), call("search", query="a"))
    _, result = play(funnel(model, max_iterations=2, on_limit="stop"))
    assert isinstance(result.outcome, PartialRunSummary)
    assert "final answer" in result.outcome.missing
    assert any("no route to host" in fact for fact in result.outcome.learned_facts)
    assert result.outcome.next_step_plan


@pytest.mark.parametrize(
    ("on_limit", "ending"), [("ask_user", UserInputRequested), ("stop", PartialRunSummary), ("handoff", Handoff)]
)
def test_what_a_spent_budget_does_can_be_chosen(on_limit: str, ending: type) -> None:
    _, result = play(funnel(scripted_model(call("search", query="a")), max_iterations=1, on_limit=on_limit))
    assert isinstance(result.outcome, ending)


def test_a_recoverable_action_is_no_ending_and_a_run_that_recovered_is_a_success() -> None:
    events, result = play(funnel(scripted_model(TransientProviderError("503"), "talk", call("broken"), DONE)))
    assert [a for _, a in said(events)] == [Action.retry, Action.narrow_scope, Action.retry]
    assert all(e.recoverable and e.failure.explanation for e in events if isinstance(e, RecoveryStarted))
    assert result.ok


# -- the example, on a wire --------------------------------------------------------------------------


class Server:
    """Enough of Anthropic's messages for a model by name: answers from a list, and keeps what it was sent."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, dict[str, Any]]] = []
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @staticmethod
    def says(text: str = "", stop_reason: str = "end_turn", uses: int = 0) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        blocks += [
            {"type": "tool_use", "id": f"toolu_{i}", "name": "look_up", "input": {"series": "FRED"}}
            for i in range(uses)
        ]
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-4-6",
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": {"input_tokens": 3, "output_tokens": 5},
        }

    @staticmethod
    def streamed(body: dict[str, Any]) -> bytes:
        """The same answer as the events of a stream."""
        start = {**body, "content": [], "stop_reason": None, "usage": {**body["usage"], "output_tokens": 0}}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        for i, block in enumerate(body["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                empty = {**block, "input": {}}
            events += [
                {"type": "content_block_start", "index": i, "content_block": empty},
                {"type": "content_block_delta", "index": i, "delta": delta},
                {"type": "content_block_stop", "index": i},
            ]
        end = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        events += [
            {"type": "message_delta", "delta": end, "usage": {"output_tokens": body["usage"]["output_tokens"]}},
            {"type": "message_stop"},
        ]
        return "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()


@pytest.fixture
def anthropic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.paths.append(self.path)
            server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = server.replies[len(server.requests) - 1]
            streamed = bool(server.requests[-1].get("stream")) and status == 200
            content = server.streamed(body) if streamed else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if streamed else "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Keeps quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-of-the-tests")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://127.0.0.1:{http.server_address[1]}")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield server
    http.shutdown()
    thread.join()
    http.server_close()


def run_example() -> None:
    runpy.run_path(str(Path(__file__).with_name("parsimony_example.py")), run_name="__main__")


def test_block_the_example_is_suspended_and_goes_on_with_the_reply(
    anthropic: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    anthropic.replies = [
        (200, anthropic.says("Let me look.", "tool_use", uses=6)),  # the same call six times: loop_detected
        (200, anthropic.says("Here is the monthly series.")),
    ]
    run_example()
    out = capsys.readouterr().out
    assert out.startswith("Question: ")
    assert "look_up" in out
    assert anthropic.paths == ["/v1/messages"] * 2
    assert anthropic.requests[0]["model"] == "claude-sonnet-4-6"
    assert anthropic.requests[0]["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Do something underspecified"}]}
    ]
    _, reply, answer = anthropic.requests[1]["messages"]
    uses = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
    answered = [block["tool_use_id"] for block in answer["content"] if block["type"] == "tool_result"]
    assert answered == uses
    assert len(uses) == 6
    assert any("use the monthly series from FRED" in b.get("text", "") for b in answer["content"])


def test_block_the_example_hands_the_task_back(anthropic: Server, capsys: pytest.CaptureFixture[str]) -> None:
    anthropic.replies = [(200, anthropic.says("I cannot help with that.", "refusal"))]
    run_example()
    assert capsys.readouterr().out == (
        "Handoff: the model refused to answer\n  - blocked by: I cannot help with that.\n"
    )


def test_block_the_example_needs_no_recovery(anthropic: Server, capsys: pytest.CaptureFixture[str]) -> None:
    anthropic.replies = [(200, anthropic.says("Done."))]
    run_example()
    assert capsys.readouterr().out == ""


def test_a_key_that_is_missing_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentfsm import MissingKeyError

    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(MissingKeyError, match="ANTHROPIC_API_KEY"):
        Agent(model="claude-sonnet-4-6")


# -- lessons -----------------------------------------------------------------------------------------


def test_block_the_lessons_as_the_model_sees_them() -> None:
    def fetch() -> Failure:
        """Has no network."""
        return Failure(kind=K.tool_error, explanation="Network timeout", blockers=("No internet connection",))

    model = scripted_model(call("fetch"), DONE)
    play(Agent(model, tools=[fetch], preset="funnel"))
    assert (
        model.requests[1]
        .messages[-1]
        .content.endswith(
            """\
<context_addendum>
<lessons_learned>
  <failure kind="tool_error" explanation="Network timeout" blockers="No internet connection" />
</lessons_learned>
</context_addendum>"""
        )
    )
    assert "context_addendum" not in request_text(model.requests[0])


def test_lessons_are_escaped() -> None:
    def fetch() -> Failure:
        """Fails in odd words."""
        return Failure(kind=K.tool_error, explanation="<b> & \"q\" 'q'", blockers=("</lessons_learned>", "\x00"))

    model = scripted_model(call("fetch"), DONE)
    play(Agent(model, tools=[fetch], preset="funnel"))
    from xml.etree import ElementTree

    block = model.requests[1].messages[-1].content
    root = ElementTree.fromstring(block[block.index("<context_addendum>") :])
    [failure] = root.iter("failure")
    assert failure.get("explanation") == "<b> & \"q\" 'q'"
    assert str(failure.get("blockers")).startswith("</lessons_learned>; ")


def test_the_newest_of_a_kind_wins_and_five_kinds_are_kept() -> None:
    state = RunState(run_id="r")
    kinds = [K.tool_error, K.no_progress, K.tool_error, K.unknown_tool, K.output_malformed, K.time_limit, K.cost_limit]
    for place, kind in enumerate(kinds):
        state.add_lesson(Failure(kind=kind, explanation=str(place)))
    assert [(f.kind, f.explanation) for f in state.lessons_learned] == [
        (K.tool_error, "2"),
        (K.unknown_tool, "3"),
        (K.output_malformed, "4"),
        (K.time_limit, "5"),
        (K.cost_limit, "6"),
    ]


def test_of_six_kinds_of_failure_those_that_teach_something_and_were_not_made_good_are_lessons() -> None:
    script = [
        "talk",
        call("broken"),
        TransientProviderError("503"),
        truncated(),
        call("nothing_like_it"),
        call("search", wrong=1),
        DONE,
    ]
    model = scripted_model(*script)
    _, result = play(funnel(model))
    assert result.ok
    last = request_text(model.requests[-1])
    assert [kind for kind in K if f'<failure kind="{kind}"' in last] == [
        K.unknown_tool,
        K.invalid_arguments,
        K.tool_error,
    ]
    assert last.count("<failure ") == 3


def test_lessons_stay_over_steps_where_an_instruction_stands_once() -> None:
    script = [call("broken"), "talk", call("search", query="a"), call("search", query="b"), DONE]
    model = scripted_model(*script)
    play(funnel(model))
    assert ['kind="tool_error"' in request_text(r) for r in model.requests] == [False, True, True, True, True]
    assert ["Choose one" in request_text(r) for r in model.requests] == [False, False, True, False, False]


def test_a_lesson_whose_matching_success_came_is_dropped() -> None:
    def flaky(n: int) -> str:
        """Works from 1 on."""
        return "fine" if n else broken()

    script = [
        "talk",
        call("flaky", n=0),
        call("search", query="a"),
        call("flaky", n=1),
        call("search", query="b"),
        DONE,
    ]
    model = scripted_model(*script)
    _, result = play(Agent(model, tools=[flaky, search], preset="funnel"))
    assert ['kind="no_progress"' in request_text(r) for r in model.requests] == [False, True, *[False] * 4]
    assert ['kind="tool_error"' in request_text(r) for r in model.requests] == [*[False] * 2, True, True, *[False] * 2]
    assert result.run_state.lessons_learned == []


def test_neither_a_provider_nor_a_limit_nor_a_url_or_header_is_a_lesson() -> None:
    def fetch() -> str:
        """Quotes its request."""
        raise RuntimeError("GET https://db.internal/v1?key=7: 401, Authorization: Bearer abc")

    busy = TransientProviderError("503 from https://api.internal, x-request-id: 7")
    model = scripted_model(call("fetch"), busy, call("search", query="a"), DONE)
    _, result = play(Agent(model, tools=[fetch, search], preset="funnel", host=Host(clock=FakeClock())))
    assert [f.kind for f in result.run_state.lessons_learned] == [K.tool_error]
    [block] = [t for t in request_text(model.requests[-1]).split("\n\n") if t.startswith("<context_addendum>")]
    assert "GET [URL]" in block
    assert not [word for word in ("internal", "Bearer", "503", "x-request-id") if word in block]


def test_lessons_are_carried_through_a_suspension() -> None:
    model = scripted_model(call("broken"), call("ask_user", question="which?"), DONE)
    events, _ = play(funnel(model), "that one")
    assert "boom" in request_text(model.requests[2])
    [asked] = [e for e in events if isinstance(e, UserInputRequested)]
    assert "boom" in asked.suspension_record.to_json()
    assert 'kind="tool_error"' in request_text(model.requests[2])


def test_the_renderer_is_pure_and_the_transcript_in_front_never_changes() -> None:
    model = scripted_model("talk", call("broken"), call("search", query="a"), DONE)
    _, result = play(funnel(model))
    assert list(render_messages(result.run_state)) == list(render_messages(result.run_state))

    def prefix(request: ModelRequest) -> int:
        """How many messages of a request stand in the final transcript as they were sent."""
        pairs = zip(request.messages, result.messages, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(request.messages))

    for request in model.requests:
        assert prefix(request) >= len(request.messages) - 1  # only the very last one may differ


# -- guardrails --------------------------------------------------------------------------------------


def test_block_the_guardrails(anthropic: Server) -> None:
    from agentfsm import Agent, AgentGuardrails

    agent = Agent(
        model="claude-sonnet-4-6",
        guardrails=AgentGuardrails(
            max_iterations=50,
            max_execution_time_s=300,
            tool_timeout_s=600,
            stall_threshold_s=30,
            loop_soft_threshold=2,
            loop_hard_threshold=6,
        ),
    )

    assert agent.guardrails == AgentGuardrails()  # the page's numbers are the defaults
    anthropic.replies = [(200, anthropic.says("Done."))]
    assert agent.run_sync("go").output == "Done."


@pytest.mark.parametrize("name", list(AgentGuardrails.model_fields))
@pytest.mark.parametrize("value", [-1, float("nan"), "many", float("inf")])
def test_a_guardrail_out_of_range_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        AgentGuardrails(**{name: value})


MAY_BE_ZERO = {"finalize_grace_s", "max_continues", "max_tool_retries"}


@pytest.mark.parametrize("name", sorted(set(AgentGuardrails.model_fields) - MAY_BE_ZERO))
def test_a_guardrail_of_zero_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AgentGuardrails(**{name: 0})  # type: ignore[arg-type]


def test_no_iteration_limit_is_only_for_runs_with_another_budget() -> None:
    with pytest.raises(ValueError, match="max_iterations"):
        AgentGuardrails(max_iterations=None, max_execution_time_s=None)
    assert AgentGuardrails(max_iterations=None, max_execution_time_s=None, max_tokens=9).max_iterations is None


def test_the_time_limit_is_met_exactly_and_suspends_the_run() -> None:
    clock = FakeClock()

    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    def agent(*script: Any) -> Agent:
        host = Host(clock=clock, secret=b"x")
        return Agent(scripted_model(*script), tools=[wait], preset="funnel", host=host)

    assert play(agent(call("wait", seconds=299.0), DONE))[1].ok
    _, result = play(agent(call("wait", seconds=300.0), DONE))
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.kind == "limit"
    assert result.outcome.originating_failure_kind is K.time_limit


@pytest.mark.parametrize("spent", ["tokens", "cost"])
def test_token_and_cost_limits_are_off_unless_set(spent: str) -> None:
    from agentfsm import Usage

    usage = Usage(input_tokens=600_000, output_tokens=400_000, cost_usd=99.5)
    entry = Reply(Message.assistant("", (call("search", "c1", query="a"),)), FinishReason.TOOL_CALLS, usage)
    assert play(funnel(scripted_model(entry, DONE)))[1].ok
    limits: dict[str, Any] = {"max_tokens": 1_000_000} if spent == "tokens" else {"max_cost_usd": 99.5}
    _, result = play(funnel(scripted_model(entry, DONE), on_limit="stop", **limits))
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is (K.token_limit if spent == "tokens" else K.cost_limit)


def _hash(arguments: dict[str, Any]) -> str:
    import hashlib

    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_the_signature_of_a_call() -> None:
    one = call("search", query="gold", limit=3)
    assert one.signature == f"search:{_hash({'limit': 3, 'query': 'gold'})}"
    assert call("search", limit=3, query="gold").signature == one.signature
    assert call("search", limit=3, query="gold", _ui_message="Looking…").signature == one.signature
    assert call("search", limit=4, query="gold").signature != one.signature
    assert call("find", limit=3, query="gold").signature != one.signature


def test_a_reworded_message_for_the_user_hides_no_repeat() -> None:
    ran: list[str] = []

    def look(query: str) -> str:
        """Keeps count."""
        ran.append(query)
        return "nothing"

    script = [call("look", query="same", _ui_message=f"try {i}") for i in range(9)]
    agent = Agent(scripted_model(*script), tools=[look], host=Host(clock=FakeClock()))
    _, result = play(agent)
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is K.loop_detected
    assert ran == ["same"] * 5


@pytest.mark.parametrize("threshold", [1, 2, 6])
def test_the_loop_is_caught_before_the_call_that_would_be_one_too_many(threshold: int) -> None:
    script = [call("search", query="same") for _ in range(9)]
    model = scripted_model(*script)
    _, result = play(funnel(model, loop_hard_threshold=threshold, loop_soft_threshold=9))
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is K.loop_detected
    assert tool_result_texts(result.messages) == ["found same"] * (threshold - 1)


def test_repeats_count_within_a_window_of_the_last_calls() -> None:
    apart: list[Any] = []
    for i in range(30):  # every fifth call is the same one: four among the last twenty, never six
        apart.append(call("search", query="same" if i % 5 == 0 else str(i)))
    assert play(funnel(scripted_model(*apart, DONE)))[1].ok
    closer = [call("search", query="same" if i % 3 == 0 else str(i)) for i in range(30)]
    assert isinstance(play(funnel(scripted_model(*closer, DONE)))[1].outcome, UserInputRequested)


def test_the_soft_threshold_only_logs_and_stops_nothing() -> None:
    script = [call("search", query="same") for _ in range(3)]
    events, result = play(funnel(scripted_model(*script, DONE)))
    assert result.ok
    assert tool_result_texts(result.messages)[:3] == ["found same"] * 3
    assert [e.text for e in events if isinstance(e, RunWarning)] == [
        "the same call was made 2 times: search",
        "the same call was made 3 times: search",
    ]


def test_after_the_user_answers_a_loop_the_counting_starts_anew() -> None:
    script = [call("search", query="same") for _ in range(6 + 5)]
    events, result = play(funnel(scripted_model(*script, DONE)), "once more, please")
    assert result.ok
    assert sum(isinstance(e, UserInputRequested) for e in events) == 1


# -- budgets over a suspension -----------------------------------------------------------------------


def test_an_unrelated_question_resets_no_budget() -> None:
    script = [call("search", query="a"), call("ask_user", question="which?"), call("search", query="b")]
    model = scripted_model(*script)
    _, result = play(funnel(model, max_iterations=3), "that one")
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is K.iteration_limit
    assert len(model.requests) == 3


def test_resuming_an_iteration_limit_resets_the_count_and_nothing_else() -> None:
    from agentfsm import Usage

    usage = Usage(input_tokens=10, output_tokens=5, cost_usd=0.5)
    entry = Reply(Message.assistant("", (call("search", "c1", query="a"),)), FinishReason.TOOL_CALLS, usage)
    clock = FakeClock()
    agent = funnel(
        scripted_model(entry, lambda messages: clock.advance(9) or call("broken")),
        clock,
        max_iterations=1,
        max_steps=99,
    )
    _, result = play(agent, "go on")
    run = result.run_state
    assert (run.iterations, run.model_calls, run.continues) == (1, 2, 1)
    assert run.usage == usage
    assert run.elapsed_s == 9
    assert len(run.recent_calls) == 2
    assert {f.kind for f in run.lessons_learned} == {K.tool_error}  # a spent budget teaches nothing


def test_resuming_a_time_limit_resets_the_elapsed_time_and_nothing_else() -> None:
    clock = FakeClock()

    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    agent = Agent(
        scripted_model(call("wait", seconds=300.0), call("wait", seconds=100.0), DONE),
        tools=[wait],
        preset="funnel",
        host=Host(clock=clock, secret=b"x"),
    )
    _, result = play(agent, "go on")
    assert result.ok
    assert result.run_state.elapsed_s == 100
    assert result.run_state.iterations == 3


def test_the_time_spent_suspended_is_never_charged() -> None:
    clock = FakeClock()
    agent = funnel(scripted_model(call("ask_user", question="which?"), DONE), clock)

    async def scene() -> RunResult:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        clock.advance(20 * 60 * 60)
        return await agent.resume(first.outcome.suspension_record, "that one")

    result = asyncio.run(scene())
    assert result.output == "finished"
    assert result.run_state.elapsed_s == 0


def test_a_person_may_extend_a_budget_only_so_often() -> None:
    model = scripted_model(*(call("search", query=str(i)) for i in range(99)))
    agent = funnel(model, max_iterations=1, max_continues=2, max_steps=99)
    _, result = play(agent, "go on", "go on")
    assert isinstance(result.outcome, PartialRunSummary)
    assert len(model.requests) == 3


# -- the last turn -----------------------------------------------------------------------------------


def waiting_agent(clock: FakeClock, *script: Any, **limits: Any) -> Agent:
    async def wait(seconds: float) -> str:
        """Lets time pass."""
        clock.advance(seconds)
        return "waited"

    return Agent(
        scripted_model(*script),
        tools=[wait],
        guardrails=AgentGuardrails(finalize_grace_s=10, max_steps=99, **limits),
        host=Host(clock=clock, secret=b"x"),
    )


def test_a_grace_period_gives_one_last_turn_that_is_told_to_wrap_up() -> None:
    agent = waiting_agent(FakeClock(), call("wait", seconds=300.0), "my best answer")
    _, result = play(agent)
    assert result.output == "my best answer"
    assert isinstance(agent.model, RecordingModel)
    assert "last turn" in request_text(agent.model.requests[1])
    assert agent.model.requests[1].timeout_s == 10


def test_the_last_turn_is_one_turn() -> None:
    agent = waiting_agent(FakeClock(), call("wait", seconds=300.0), call("wait", seconds=1.0), "x")
    _, result = play(agent)
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is K.time_limit


def test_a_last_turn_that_got_no_answer_leaves_nothing_behind() -> None:
    agent = waiting_agent(FakeClock(), call("wait", seconds=300.0), TransientProviderError("503"), "x")
    _, result = play(agent, "take your time")
    assert result.output == "x"
    assert isinstance(agent.model, RecordingModel)
    assert "last turn" in request_text(agent.model.requests[1])
    assert "last turn" not in request_text(agent.model.requests[2])


def test_a_last_turn_that_another_limit_put_off_is_still_granted() -> None:
    agent = waiting_agent(FakeClock(), call("wait", seconds=300.0), "my best answer", max_iterations=1)
    events, result = play(agent, "go on")
    [asked] = [e for e in events if isinstance(e, UserInputRequested)]
    assert asked.originating_failure_kind is K.iteration_limit
    assert result.output == "my best answer"


# -- no failure is swallowed -------------------------------------------------------------------------


def test_detectors_read_a_run_and_change_nothing_of_it() -> None:
    from agentfsm import LOOP
    from agentfsm.loop.state_json import dump_state

    for script in (["talk", call("broken"), DONE], [SAME], [truncated(*SAME), DONE], [refused()]):
        _, result = play(funnel(scripted_model(*script)))
        run = result.run_state
        for row in LOOP.transitions:
            run.state = row.source
            before = dump_state(run)
            if row.guard is not None:
                row.guard(run)
            assert dump_state(run) == before, row.id


def test_every_failure_that_is_found_is_told() -> None:
    script = ["talk", call("broken"), TransientProviderError("503"), truncated(), call("nothing_like_it"), refused()]
    events, result = play(funnel(scripted_model(*script)))
    found = [d.guard_result.kind for d in result.decisions if isinstance(d.guard_result, Failure)]
    assert len(found) == len(script)
    assert [kind for kind, _ in said(events)] == found[:-1]
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is found[-1]
