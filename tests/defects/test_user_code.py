"""User code that raises ends the run in an orderly way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from agentfsm import (
    LOOP,
    AbortRun,
    Agent,
    DefaultPolicy,
    Failure,
    Handoff,
    HookContext,
    Host,
    Message,
    RunAborted,
    RunCompleted,
    RunResult,
    RunState,
    RunWarning,
    State,
    StateContext,
    StateResult,
    StateSpec,
    TransientProviderError,
    Transition,
    hook,
    observer,
    tool,
)
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.helpers.provider_rules import check_transcript
from tests.helpers.scenarios import Kind, check_run, collect_events, echo, explode, scripted_model

# -- code of the user's that raises ------------------------------------------------------------------


class Boom(Exception):
    """What the user's code raises."""


class Seen:
    """Counts the hooks that ran at the end."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def hooks(self) -> list[Any]:
        @hook(State.TERMINAL)
        def close(context: HookContext) -> None:
            self.closed.append("first")

        @hook(State.TERMINAL)
        async def close_too(context: HookContext) -> None:
            self.closed.append("second")

        return [close, close_too]


def aborted_by(agent: Agent, model: RecordingModel, closed: Seen) -> RunAborted:
    """Run, and check that the run ended in order: aborted, whole, its hooks closed, one last event."""

    async def scene() -> RunResult:
        run = agent.run("go")
        await collect_events(run)
        return run.result

    result = asyncio.run(scene())
    assert isinstance(result.outcome, RunAborted), result.outcome
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is Kind.aborted
    assert "Boom" in result.outcome.failure.explanation
    assert result.state == State.TERMINAL
    assert result.decisions[-1].guard == "aborted"
    assert closed.closed == ["first", "second"]
    check_run(model, result)
    return result.outcome


STATES_WITH_DOORS = [
    State.PRE_STEP,
    State.CALL_LLM,
    State.POST_LLM,
    State.DISPATCH_TOOL,
    State.POST_TOOL,
    State.RECOVER,
]
EVERYWHERE = ([call("echo", text="a"), call("explode"), call("echo", text="b")], "x")


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_hook_that_raises_and_fails_closed_ends_the_run_in_order(at: State, is_async: bool) -> None:
    closed = Seen()

    def raises(context: HookContext) -> None:
        raise Boom("in a hook")

    async def raises_later(context: HookContext) -> None:
        await asyncio.sleep(0)
        raise Boom("in a hook")

    model = scripted_model(*EVERYWHERE)
    bad = hook(at, fail_open=False)(raises_later if is_async else raises)
    outcome = aborted_by(Agent(model, tools=[echo, explode], hooks=[bad, *closed.hooks()]), model, closed)
    assert outcome.failure is not None
    assert "raises" in outcome.failure.explanation


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
def test_a_hook_that_raises_and_fails_open_is_warned_about(at: State) -> None:
    @hook(at)
    def raises(context: HookContext) -> None:
        raise Boom("in a hook")

    seen: list[Any] = []
    model = scripted_model(*EVERYWHERE)
    result = Agent(model, tools=[echo, explode], hooks=[raises, observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
def test_a_hook_that_aborts_the_run_is_named(at: State) -> None:
    @hook(at)
    def gatekeeper(context: HookContext) -> AbortRun:
        return AbortRun("Boom: not today")

    closed = Seen()
    model = scripted_model(*EVERYWHERE)
    outcome = aborted_by(Agent(model, tools=[echo, explode], hooks=[gatekeeper, *closed.hooks()]), model, closed)
    assert outcome.failure is not None
    assert "gatekeeper" in outcome.failure.explanation


@pytest.mark.parametrize("fail_open", [True, False])
def test_a_hook_at_the_end_that_raises_keeps_no_other_from_running_and_changes_no_outcome(fail_open: bool) -> None:
    @hook(State.TERMINAL, fail_open=fail_open)
    def raises(context: HookContext) -> None:
        raise Boom("at the end")

    closed, seen = Seen(), []
    result = Agent(scripted_model("x"), hooks=[raises, *closed.hooks(), observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert closed.closed == ["first", "second"]
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


def test_a_task_cancelled_while_a_hook_at_the_end_runs_still_has_its_outcome() -> None:
    async def scene() -> RunResult:
        at_the_end = asyncio.Event()

        @hook(State.TERMINAL)
        async def hang(context: HookContext) -> None:
            at_the_end.set()
            await asyncio.Event().wait()

        run = Agent(scripted_model("x"), hooks=[hang]).run("go")
        task = asyncio.ensure_future(run)
        await at_the_end.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run.result

    result = asyncio.run(scene())
    assert result.output == "x"
    assert isinstance(result.outcome, RunCompleted)


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
@pytest.mark.parametrize("first", [True, False], ids=["asked first", "asked last"])
def test_a_detector_that_raises_ends_the_run_in_order(at: State, first: bool) -> None:
    def faulty(run: RunState) -> Failure | None:
        raise Boom("in a detector")

    closed = Seen()
    place = 3 if at is State.PRE_STEP else 2  # after those that every state evaluates, and what ends the step budget
    if at is State.RECOVER:
        graph = LOOP.with_transition(
            Transition(at, faulty, State.PRE_STEP), before=LOOP.rows(at)[place].name if first else None
        )
    else:
        graph = LOOP.with_detector(at, faulty, before=LOOP.rows(at)[place].name if first else None)
    model = scripted_model(*(EVERYWHERE if first or at is State.RECOVER else [call("echo", text="a"), "x"]))
    outcome = aborted_by(Agent(model, tools=[echo, explode], graph=graph, hooks=closed.hooks()), model, closed)
    assert outcome.failure is not None
    assert "faulty" in outcome.failure.explanation


class Faulty(DefaultPolicy):
    """A policy that raises in one of its methods."""


def faulty_policy(method: str) -> Any:
    def raises(self: Any, *args: Any) -> Any:
        raise Boom("in a policy")

    return type("Faulty", (DefaultPolicy,), {method: raises})()


@pytest.mark.parametrize("method", ["decide", "backoff", "retry_budget"])
def test_a_policy_that_raises_ends_the_run_in_order(method: str) -> None:
    closed = Seen()
    model = scripted_model(*EVERYWHERE)
    agent = Agent(model, tools=[echo, explode], policy=faulty_policy(method), hooks=closed.hooks())
    assert aborted_by(agent, model, closed).reason == "policy Faulty raised Boom: in a policy"


@pytest.mark.parametrize("answer", ["no such action", None, 7, float("nan")])
def test_a_policy_that_returns_nonsense_ends_the_run_in_order(answer: Any) -> None:
    policy = type("Odd", (DefaultPolicy,), {"decide": lambda self, failure, state: answer})()
    result = Agent(scripted_model(*EVERYWHERE), tools=[echo, explode], policy=policy).run_sync("go")
    assert isinstance(result.outcome, RunAborted)
    assert result.outcome.reason.startswith("policy Odd raised ")
    assert result.decisions[-1].guard == "aborted"
    check_transcript(result.messages, request=False)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "soon", None])
def test_a_back_off_that_is_no_time_ends_the_run_in_order(seconds: Any) -> None:
    policy = type("Odd", (DefaultPolicy,), {"backoff": lambda self, kind, attempt: seconds})()
    clock = FakeClock()
    model = scripted_model(TransientProviderError("503"), "x")
    result = Agent(model, policy=policy, host=Host(clock=clock)).run_sync("go")
    if result.ok:
        assert clock.slept in ([], [0.0])
    else:
        assert isinstance(result.outcome, RunAborted)
        assert result.decisions[-1].guard == "aborted"


def test_a_custom_effect_that_raises_ends_the_run_in_order() -> None:
    def effect(context: StateContext) -> StateResult:
        raise Boom("in an effect")

    graph = LOOP.with_state(
        StateSpec("review", "look at it", effect=effect),
        [Transition("review", None, State.TERMINAL, ends="completed")],
        entered_by="post_llm.otherwise",
    )
    closed = Seen()
    model = scripted_model("x")
    aborted_by(Agent(model, graph=graph, hooks=closed.hooks()), model, closed)


def test_an_approval_rule_that_raises_never_lets_the_call_run() -> None:
    ran: list[str] = []

    def rule(arguments: Any) -> bool:
        raise Boom("in an approval rule")

    @tool(requires_approval=rule)
    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    closed = Seen()
    model = scripted_model([call("echo", text="a"), call("note", text="b")], "x")
    aborted_by(Agent(model, tools=[echo, note], hooks=closed.hooks()), model, closed)
    assert not ran


@pytest.mark.parametrize("raising", ["recall", "remember"])
def test_a_memory_that_raises_is_done_without(raising: str) -> None:
    class Memory:
        async def recall(self, prompt: str) -> str:
            if raising == "recall":
                raise Boom("in a memory")
            return "you like tea"

        async def remember(self, messages: Any) -> None:
            if raising == "remember":
                raise Boom("in a memory")

    seen: list[Any] = []
    result = Agent(scripted_model("x"), memory=Memory(), hooks=[observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


def test_an_observer_that_raises_harms_neither_the_run_nor_the_order_of_its_events() -> None:
    def bad(event: Any) -> None:
        raise Boom("in an observer")

    seen: list[Any] = []
    agent = Agent(
        scripted_model(call("echo", text="a"), "x"), tools=[echo], hooks=[observer(bad), observer(seen.append)]
    )

    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run("go")
        return await collect_events(run), run.result

    events, result = asyncio.run(scene())
    assert result.output == "x"
    assert seen == events
    assert any("bad" in e.text for e in events if isinstance(e, RunWarning))


@pytest.mark.parametrize("how", [Boom("x"), ValueError("x"), KeyError("x"), asyncio.CancelledError("x")])
def test_a_model_that_raises_anything_hands_the_task_back(how: BaseException) -> None:
    model = scripted_model(how)
    result = Agent(model).run_sync("go")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is Kind.provider_error
    assert type(how).__name__ in result.outcome.rationale


@pytest.mark.parametrize("reply", [None, "text", 7, Message.assistant("no Reply")])
def test_a_model_that_returns_no_reply_hands_the_task_back(reply: Any) -> None:
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return reply

    result = Agent(Odd()).run_sync("go")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is Kind.provider_error


class SpeechlessError(Exception):
    """What it says cannot even be asked."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def speechless(*args: object) -> Any:
    raise SpeechlessError


async def speechless_later(*args: object) -> Any:
    raise SpeechlessError


class SpeechlessPolicy(DefaultPolicy):
    decide = speechless


class SpeechlessMemory:
    recall = remember = speechless_later


class SpeechlessModel:
    name = "speechless"
    reply = speechless_later


@tool
def say_nothing() -> str:
    return speechless()


SPEECHLESS: dict[str, tuple[dict[str, Any], str]] = {
    "a detector": ({"graph": LOOP.with_detector("post_llm", speechless)}, "RunAborted"),
    "a policy": ({"policy": SpeechlessPolicy()}, "RunAborted"),
    "a memory": ({"memory": SpeechlessMemory()}, "RunCompleted"),
    "a model": ({"model": SpeechlessModel()}, "Handoff"),
    "a hook": ({"hooks": [hook("pre_step", fail_open=False)(speechless)]}, "RunAborted"),
    "a forgiving hook": ({"hooks": [hook("pre_step")(speechless)]}, "RunCompleted"),
    "an observer": ({"hooks": [observer(speechless)]}, "RunCompleted"),
    "a tool": ({"tools": [say_nothing]}, "RunCompleted"),
}


@pytest.mark.parametrize("who", SPEECHLESS)
def test_an_exception_whose_str_raises_ends_the_run_in_order(who: str) -> None:
    parts, ending = SPEECHLESS[who]
    result = Agent(**{"model": scripted_model(call("say_nothing"), "x"), **parts}).run_sync("go")
    assert type(result.outcome).__name__ == ending
    check_transcript(result.messages, request=False)


def test_an_answer_whose_type_has_other_names_in_json_comes_through() -> None:
    class Answer(BaseModel):
        model_config = ConfigDict(extra="forbid")
        total: int = Field(alias="Total")

        @computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> int:
            return 2 * self.total

    for preset, entry in (("standard", '{"Total": 7}'), ("funnel", call("return_done", output={"Total": 7}))):
        result = Agent(scripted_model(entry), output_type=Answer, preset=preset).run_sync("how much?")
        assert result.output == Answer(Total=7), preset
