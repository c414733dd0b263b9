"""What drives a run: code of the user's that raises, graphs of the user's, time, limits that a person extends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Action,
    Agent,
    AgentGuardrails,
    Allow,
    Failure,
    FailureKind,
    GiveUp,
    Handoff,
    Host,
    ItDidNotRun,
    ItRan,
    Message,
    Noted,
    NoTransitionError,
    PartialRunSummary,
    Reply,
    ReplyError,
    RunCancelled,
    RunCompleted,
    RunResult,
    State,
    StateSpec,
    TransientProviderError,
    Transition,
    Transitioned,
    Usage,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.core.codec import dump_state, load_state
from agentfsm.core.events import AgentError, Event, RunResumed, ToolStarted
from agentfsm.core.messages import canonical_json
from agentfsm.core.policy import DefaultPolicy
from agentfsm.core.state import RunState
from agentfsm.errors import RecordUsedError
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, call
from tests.runtime.scenes import agent_on, checked, drive, play, said


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


def aborted_by(result: RunResult, words: str) -> None:
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure.kind is FailureKind.aborted
    assert words in result.outcome.failure.explanation
    assert result.decisions[-1].guard == "aborted"


# -- a plain run --------------------------------------------------------------------------------------


def test_a_run_moves_by_the_rows_of_the_table_and_nothing_else():
    result = play(call("look", where="here"), "done", tools=[look])
    assert [d.transition.id for d in result.decisions] == [
        "pre_step.otherwise",
        "call_llm.otherwise",
        "post_llm.tool_calls",
        "dispatch_tool.otherwise",
        "post_tool.otherwise",
        "pre_step.otherwise",
        "call_llm.otherwise",
        "post_llm.otherwise",
    ]
    assert said(result) == [("user", "go"), ("assistant", ""), ("tool", "seen here"), ("assistant", "done")]
    assert (result.run.steps, result.run.model_calls) == (2, 2)


# -- code of the user's that raises -------------------------------------------------------------------


class Broken:
    """A policy whose every question raises."""

    def __init__(self, where: str) -> None:
        self.where = where

    def retry_budget(self, kind: FailureKind) -> int:
        return 1

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        if self.where == "backoff":
            raise ZeroDivisionError("no patience")
        return 0.0

    def decide(self, failure: Failure, state: RunState) -> Action:
        if self.where == "decide":
            raise ZeroDivisionError("no idea")
        return "shrug" if self.where == "word" else Action.retry  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("where", "words"), [("decide", "no idea"), ("backoff", "no patience"), ("word", "'shrug' is not a valid Action")]
)
def test_a_policy_that_raises_aborts_the_run(where, words):
    result = play(call("nothing"), "done", policy=Broken(where))
    aborted_by(result, words)
    assert result.decisions[-1].source == "recover"


@pytest.mark.parametrize("state", ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover"])
def test_a_detector_that_raises_aborts_the_run_in_any_state(state):
    def mine(run: RunState) -> Failure | None:
        raise RuntimeError("blind")

    target = "terminal" if state == "recover" else "recover"
    script = (call("nothing"), "done") if state == "recover" else (call("look"), "done")
    result = play(*script, graph=LOOP.with_detector(state, mine, target=target), tools=[look])
    aborted_by(result, f"{state}.mine raised RuntimeError: blind")
    assert result.decisions[-1].source == state


def test_a_model_that_gives_what_is_no_reply_aborts_or_fails_in_order():
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return "just a text"

    result = checked(drive(lambda: _one(Agent(Odd()))))  # type: ignore[arg-type]
    assert isinstance(result.outcome, Handoff | PartialRunSummary)


async def _one(agent: Agent, prompt: str = "go") -> RunResult:
    return await agent.run(prompt)


def test_a_guardrail_that_is_spent_by_a_raising_tool_is_no_exception_of_the_run():
    @tool
    def fail() -> str:
        raise ValueError("broken")

    result = play(*[call("fail")] * 3, tools=[fail])
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is FailureKind.tool_error


@pytest.mark.parametrize("reply", [Reply(None), Reply(Message.assistant("x"), usage=None), Reply(Message.user("x"))])
def test_a_reply_that_cannot_be_folded_in_ends_the_run_in_order(reply):
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return reply

    result = drive(lambda: _one(Agent(Odd(), guardrails=AgentGuardrails(max_iterations=1, on_limit="stop"))))
    assert result.state == "terminal"


def test_an_effect_that_raises_a_cancellation_nobody_asked_for_aborts_the_run():
    async def odd(run: RunState) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    aborted_by(play("first", graph=reviewing(odd)), "the effect of 'review' raised CancelledError")


@pytest.mark.parametrize("where", ["recall", "remember"])
def test_a_cancellation_of_the_task_while_the_memory_works(where):
    started = asyncio.Event()

    class Slow:
        async def recall(self, prompt: str) -> str:
            return await self.hang("recall")

        async def remember(self, messages: Any) -> None:
            await self.hang("remember")

        async def hang(self, which: str) -> str:
            if which == where:
                started.set()
                await asyncio.Event().wait()
            return ""

    agent, _ = agent_on("done", memory=Slow())

    async def scene() -> RunResult:
        run = agent.run("go")

        async def use() -> None:
            await run

        task = asyncio.create_task(use())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run.result

    assert checked(drive(scene)).ok is (where == "remember")


# -- graphs of the user's: detectors ------------------------------------------------------------------


def test_an_added_detector_is_a_row_like_any_other():
    def too_short(run: RunState) -> Failure | None:
        words = run.reply.message.content if run.reply else ""
        if len(words) >= 10:
            return None
        return Failure(kind="output_malformed", explanation="the answer is too short")

    graph = LOOP.with_detector(State.POST_LLM, too_short, before="loop_detected")
    agent, model = agent_on("no", "long enough now", graph=graph)
    result = checked(drive(lambda: _one(agent)), model)
    assert result.output == "long enough now"
    assert "post_llm.too_short" in [d.transition.id for d in result.decisions]
    found = next(d for d in result.decisions if d.guard == "too_short")
    assert found.found.explanation == "the answer is too short"
    assert found.tried[-1] == ("too_short", True)
    assert "too short" in model.requests[1].messages[-1].content


@pytest.mark.parametrize("kind", ["tool_error", "scope_too_large", "ambiguous_input", "output_refused", "no_progress"])
@pytest.mark.parametrize("action", [Action.retry, Action.narrow_scope])
def test_whatever_kind_an_added_detector_finds_the_model_hears_of_it(kind, action):
    def mine(run: RunState) -> Failure | None:
        if run.model_calls > 1:
            return None
        return Failure(kind=kind, explanation="NOT GOOD", suggested_action=action)

    policy = DefaultPolicy(budgets=dict.fromkeys(FailureKind, 3))
    agent, model = agent_on("first", "second", graph=LOOP.with_detector("post_llm", mine), policy=policy)
    result = checked(drive(lambda: _one(agent)), model)
    assert result.output == "second"
    last = model.requests[1].messages[-1]
    assert last.role == "user"
    assert "NOT GOOD" in last.content


def test_a_row_may_be_taken_out():
    graph = LOOP.without("post_tool.unknown_tool")
    result = play(call("nothing"), "done", graph=graph)
    assert result.ok
    assert result.run.lessons_learned == []
    assert any("no tool named 'nothing'" in text for _, text in said(result))


def test_a_failed_call_that_a_graph_lets_pass_is_not_judged_by_the_last_reply():
    ran: list[int] = []

    @tool
    def count() -> str:
        ran.append(1)
        return "counted"

    graph = LOOP.without("call_llm.provider_error")
    result = play(call("count"), ValueError("broken"), graph=graph, tools=[count])
    assert ran == [1]
    assert isinstance(result.outcome, PartialRunSummary)
    assert "broken" in result.outcome.missing


# -- graphs of the user's: states ---------------------------------------------------------------------


def reviewing(effect: Callable[..., Any], *rows: Transition, entered_by: str = "post_llm.otherwise") -> Any:
    rows = rows or (Transition("review", None, "terminal"),)
    return LOOP.with_state(StateSpec("review", "review", effect=effect), rows, entered_by=entered_by)


def not_good_yet(run: RunState) -> bool:
    return run.notes.get("review", {}).get("good") is False


@pytest.mark.parametrize("is_async", [False, True])
def test_a_state_of_ones_own_brings_its_effect(is_async):
    def now(run: RunState) -> dict[str, Any]:
        return {"good": run.answer == "better", "state": run.state}

    async def soon(run: RunState) -> dict[str, Any]:
        await asyncio.sleep(0)
        return now(run)

    graph = reviewing(
        soon if is_async else now,
        Transition("review", not_good_yet, "pre_step"),
        Transition("review", None, "terminal"),
    )
    result = play("first", "better", graph=graph)
    assert result.output == "better"
    assert result.run.notes == {"review": {"good": True, "state": "review"}}
    assert [d.transition.id for d in result.decisions if d.source == "review"] == [
        "review.not_good_yet", "review.otherwise",
    ]  # fmt: skip


def test_a_state_of_ones_own_may_speak_to_the_model():
    def review(run: RunState) -> Noted:
        good = run.model_calls > 1
        return Noted({"good": good}, () if good else (Message.user("Say it better."),))

    graph = reviewing(review, Transition("review", not_good_yet, "pre_step"), Transition("review", None, "terminal"))
    agent, model = agent_on("first", "better", graph=graph)
    result = checked(drive(lambda: _one(agent)), model)
    assert [m.content for m in model.requests[1].messages] == ["go", "first", "Say it better."]
    assert result.output == "better"


def test_a_state_of_ones_own_between_a_call_and_its_result_does_not_come_between_them():
    def note(run: RunState) -> Noted:
        return Noted(messages=(Message.user("Think about it."),))

    for entrance, back in [("post_tool.otherwise", "pre_step"), ("dispatch_tool.otherwise", "post_tool")]:
        graph = reviewing(note, Transition("review", None, back), entered_by=entrance)
        agent, model = agent_on(call("look"), "done", graph=graph, tools=[look])
        result = checked(drive(lambda agent=agent: _one(agent)), model)
        assert [m.role.value for m in result.messages] == ["user", "assistant", "tool", "user", "assistant"]
        assert result.messages[3].content == "Think about it."


@pytest.mark.parametrize("is_async", [False, True])
def test_an_effect_of_ones_own_that_raises_aborts_the_run(is_async):
    def now(run: RunState) -> None:
        raise LookupError("no reviewer")

    async def soon(run: RunState) -> None:
        await asyncio.sleep(0)
        now(run)

    result = play("first", graph=reviewing(soon if is_async else now))
    aborted_by(result, "the effect of 'review' raised LookupError: no reviewer")
    assert result.decisions[-1].transition.id == "review.aborted"


def test_an_effect_of_ones_own_whose_value_is_no_json_aborts_the_run():
    class Odd:
        pass

    aborted_by(play("first", graph=reviewing(lambda run: Odd())), "review")


def test_an_effect_of_ones_own_can_be_cancelled():
    started = asyncio.Event()

    async def hang(run: RunState) -> None:
        started.set()
        await asyncio.Event().wait()

    agent, _ = agent_on("first", graph=reviewing(hang))

    async def scene() -> RunResult:
        run = agent.run("go")

        async def stop() -> None:
            await started.wait()
            run.cancel()

        result, _ = await asyncio.gather(run, stop())
        return result

    result = checked(drive(scene))
    assert isinstance(result.outcome, RunCancelled)
    assert result.decisions[-1].transition.id == "review.cancelled"


def test_a_hook_stands_at_the_door_of_a_state_of_ones_own_too():
    seen: list[str] = []
    play("first", graph=reviewing(lambda run: None), hooks=[hook("review")(lambda c: seen.append(c.state))])
    assert seen == ["review"]


def test_an_end_of_ones_own_is_an_end_with_open_calls_too():
    def calls_look(run: RunState) -> bool:
        return any(c.call.name == "look" for c in run.batch)

    graph = LOOP.with_state(
        StateSpec("done_looking", final=True),
        [],
        entered_by=Transition("post_llm", calls_look, "done_looking"),
        before="tool_calls",
    )
    class Diary:
        async def recall(self, prompt: str) -> str:
            return ""

        async def remember(self, messages: Any) -> None:
            seen.append(f"kept {len(messages)}")

    seen: list[str] = []
    ends = [hook("terminal")(lambda c: seen.append("terminal")), hook("done_looking")(lambda c: seen.append("own"))]
    result = play(call("look"), graph=graph, tools=[look], hooks=ends, memory=Diary())
    assert result.state == "done_looking"
    assert result.run.batch == []
    assert seen == ["own", "kept 3"]


def test_a_wait_of_ones_own_asks_a_person_and_is_over_once_answered():
    def wants_leave(run: RunState) -> bool:
        return run.notes.get("asked") is None and run.model_calls == 1

    def answered(run: RunState) -> bool:
        return run.person is not None

    def dropped(run: RunState) -> bool:
        return run.cancelled is not None or run.expired

    graph = LOOP.with_state(
        StateSpec("leave", waits=True),
        [Transition("leave", dropped, "terminal"), Transition("leave", answered, "pre_step")],
        entered_by=Transition("post_llm", wants_leave, "leave"),
        before="no_progress",
    )
    agent, model = agent_on("first", call("ask_user", question="Which?"), "third", graph=graph, preset="funnel")

    async def scene() -> list[RunResult]:
        first = checked(await agent.run("go"), model)
        second = checked(await agent.resume(first.outcome.suspension_record, "go on"), model)
        return [first, second]

    first, second = drive(scene)
    assert (first.state, first.outcome.kind) == ("leave", "question")
    assert second.state == "suspended"
    assert second.outcome.question == "Which?"
    assert ("user", "go on") in said(second)

    async def drop() -> RunResult:
        return checked(await agent.dismiss(second.outcome.suspension_record), model)

    assert isinstance(drive(drop).outcome, RunCancelled)


def test_a_graph_that_has_no_row_for_an_answer_says_so():
    graph = LOOP.without("suspended.replied")
    limits = AgentGuardrails(max_iterations=1)
    agent, _ = agent_on(call("look"), "done", graph=graph, guardrails=limits, tools=[look])

    async def scene() -> None:
        first = await agent.run("go")
        with pytest.raises(NoTransitionError, match="suspended"):
            await agent.resume(first.outcome.suspension_record, "go on")

    drive(scene)


# -- time and silence ---------------------------------------------------------------------------------


def ticking(clock: FakeClock, seconds: float, then: Any) -> Callable[[Any], Any]:
    def entry(messages: Any) -> Any:
        clock.advance(seconds)
        return then

    return entry


def test_what_a_model_and_a_tool_take_is_active_time_and_no_silence():
    clock = FakeClock()

    @tool
    async def slow() -> str:
        clock.advance(40)
        return "slow"

    limits = AgentGuardrails(stall_threshold_s=30)
    result = play(ticking(clock, 50, call("slow")), "done", clock=clock, tools=[slow], guardrails=limits)
    assert result.ok
    assert result.run.elapsed_s == pytest.approx(90)
    assert result.run.lessons_learned == []


def test_silence_between_phases_is_a_stall_and_strikes_once():
    """A guard that blocks the loop: what passes between two effects is nobody's time limit."""
    clock = FakeClock()

    def blocking(run: RunState) -> bool:
        if run.model_calls == 1:
            clock.advance(31)
        return False

    graph = LOOP.with_detector("post_tool", blocking)
    result = play(call("look"), "done", clock=clock, graph=graph, tools=[look])
    assert result.ok
    assert [x.explanation for x in result.run.lessons_learned] == ["nothing happened for 31.0 s between two phases"]
    assert result.run.elapsed_s == pytest.approx(31)


def test_a_back_off_is_no_silence():
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=1)
    result = play(TransientProviderError("busy"), "done", clock=clock, guardrails=limits)
    assert result.ok
    assert clock.slept == [2.0]
    assert [x.kind for x in result.run.lessons_learned] == ["transient_provider"]


def test_an_observer_that_takes_its_time_is_no_silence():
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=30, max_execution_time_s=100_000)
    slow = observer(lambda e: clock.advance(100))
    result = play(call("look"), "done", clock=clock, guardrails=limits, tools=[look], hooks=[slow])
    assert result.ok
    assert result.run.lessons_learned == []


@pytest.mark.parametrize("turns", [0, 1, 5, 50])
def test_a_consumer_that_holds_an_event_is_no_silence(turns):
    """Whether or not the step behind the event has ended meanwhile."""
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=30, max_execution_time_s=100_000)

    @tool
    async def wait() -> str:
        await asyncio.sleep(0)
        return "over"

    agent, _ = agent_on(call("wait"), "done", clock=clock, guardrails=limits, tools=[wait])

    async def scene() -> RunResult:
        run = agent.run("go")
        async for _ in run:
            for _ in range(turns):
                await asyncio.sleep(0)
            clock.advance(100)
        return run.result

    result = checked(drive(scene))
    assert result.ok
    assert result.run.lessons_learned == []


def test_a_run_that_was_left_alone_was_not_silent():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=100_000)
    agent, _ = agent_on(call("look"), "done", clock=clock, tools=[look], guardrails=limits)

    async def scene() -> RunResult:
        run = agent.run("go")
        async for event in run:
            if isinstance(event, ToolStarted):
                break
        clock.advance(10_000)
        return await run

    result = checked(drive(scene))
    assert result.ok
    assert result.run.lessons_learned == []


def test_a_run_that_waits_to_be_started_is_not_charged_for_it():
    clock = FakeClock()
    agent, _ = agent_on("done", clock=clock)

    async def scene() -> RunResult:
        run = agent.run("go")
        clock.advance(10_000)
        return await run

    assert drive(scene).run.elapsed_s == 0


def test_the_wall_clock_may_jump_without_anybody_minding():
    clock = FakeClock()
    jump = observer(lambda e: clock.jump(-10_000))
    result = play(call("look"), "done", clock=clock, tools=[look], hooks=[jump])
    assert result.ok
    assert result.run.elapsed_s == 0


# -- limits that a person extends ---------------------------------------------------------------------


def extend(agent: Agent, *answers: str) -> list[RunResult]:
    """A run and what it came to after each answer of a person."""

    async def scene() -> list[RunResult]:
        came = [checked(await agent.run("go"))]
        for answer in answers:
            came.append(checked(await agent.resume(came[-1].outcome.suspension_record, answer)))
        return came

    return drive(scene)


def test_spent_iterations_are_extended_by_as_many_and_exactly_so():
    limits = AgentGuardrails(max_iterations=3, loop_hard_threshold=20)
    agent, model = agent_on(*[call("look", where=str(n)) for n in range(20)], guardrails=limits, tools=[look])
    first, second, third = extend(agent, "go on", "and on")
    assert [r.outcome.kind for r in (first, second, third)] == ["limit"] * 3
    assert [r.outcome.originating_failure_kind for r in (first, second)] == [FailureKind.iteration_limit] * 2
    assert [r.run.model_calls for r in (first, second, third)] == [3, 6, 9]
    assert len(model.requests) == 9
    assert (third.run.continues, third.run.iterations) == (2, 3)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_person_may_extend_a_limit_only_so_often_and_then_the_run_stops(allowed):
    limits = AgentGuardrails(max_iterations=1, max_continues=allowed, max_steps=99)
    agent, _ = agent_on(*[call("look", where=str(n)) for n in range(9)], guardrails=limits, tools=[look])
    *waiting, last = extend(agent, *["go on"] * allowed)
    assert all(isinstance(r.outcome, UserInputRequested) for r in waiting)
    assert isinstance(last.outcome, PartialRunSummary)
    assert last.outcome.failure.kind is FailureKind.iteration_limit
    assert last.run.model_calls == allowed + 1
    assert last.outcome.learned_facts[0].startswith("iteration_limit: ")


def test_spent_time_starts_anew_and_waiting_was_never_charged():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=100)
    script = (ticking(clock, 100, call("look")), ticking(clock, 60, call("look", where="b")), "done")
    agent, _ = agent_on(*script, clock=clock, guardrails=limits, tools=[look])

    async def scene() -> tuple[RunResult, RunResult]:
        first = checked(await agent.run("go"))
        clock.advance(5_000)
        return first, checked(await agent.resume(first.outcome.suspension_record, "take your time"))

    first, second = drive(scene)
    assert first.outcome.originating_failure_kind is FailureKind.time_limit
    assert second.output == "done"
    assert second.run.elapsed_s == pytest.approx(60)


@pytest.mark.parametrize(
    ("limits", "kind"), [({"max_tokens": 10}, FailureKind.token_limit), ({"max_cost_usd": 1}, FailureKind.cost_limit)]
)
def test_spent_tokens_and_money_are_not_reset(limits, kind):
    def answer(messages: Any) -> Reply:
        return Reply(Message.assistant("", (call("look", f"id{len(messages)}"),)), usage=Usage(10, 0, cost_usd=1))

    limits = AgentGuardrails(**limits, max_continues=1)
    agent, _ = agent_on(answer, answer, answer, guardrails=limits, tools=[look])
    first, second = extend(agent, "go on")
    assert first.outcome.originating_failure_kind is kind
    assert isinstance(second.outcome, PartialRunSummary)
    assert second.run.model_calls == 1


@pytest.mark.parametrize(("word", "ending"), [("stop", PartialRunSummary), ("handoff", Handoff)])
def test_a_run_that_nobody_watches_stops_or_is_handed_off(word, ending):
    limits = AgentGuardrails(max_iterations=1, on_limit=word)
    result = play(call("look"), guardrails=limits, tools=[look])
    assert isinstance(result.outcome, ending)
    assert result.outcome.failure.kind is FailureKind.iteration_limit


def test_the_last_turn_is_told_to_wrap_up_and_is_the_last():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5)
    agent, model = agent_on(
        ticking(clock, 11, call("look")), "final words", clock=clock, guardrails=limits, tools=[look]
    )
    result = checked(drive(lambda: _one(agent)), model)
    assert result.output == "final words"
    assert "last turn" in model.requests[1].messages[-1].content
    assert model.requests[1].timeout_s == 5


def test_a_last_turn_that_is_not_used_to_end_is_over_all_the_same():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5, on_limit="stop")
    result = play(
        ticking(clock, 11, call("look")), call("look", where="again"), clock=clock, guardrails=limits, tools=[look]
    )
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.run.model_calls == 2


def test_a_policy_that_always_goes_on_is_stopped_by_the_number_of_steps():
    class Stubborn(Broken):
        def decide(self, failure: Failure, state: RunState) -> Action:
            return Action.retry

    limits = AgentGuardrails(max_iterations=2, max_steps=7)
    result = play(*[call("look", where=str(n)) for n in range(9)], guardrails=limits, policy=Stubborn(""), tools=[look])
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.decisions[-1].transition.id == "pre_step.runaway"
    assert (result.run.steps, result.run.model_calls) == (8, 2)


# -- resuming -----------------------------------------------------------------------------------------


@tool(requires_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


def test_a_record_that_somebody_else_took_first_changes_nothing():
    agent, _ = agent_on(call("pay"), "done", tools=[pay])

    async def scene() -> None:
        record = (await agent.run("go")).outcome.suspension_record
        one, other = agent.resume(record, Allow()), agent.resume(record, Allow())
        assert (await one).output == "done"
        with pytest.raises(RecordUsedError):
            await other
        assert not other.finished
        assert other.state.state == "suspended"
        with pytest.raises(RecordUsedError):
            agent.resume(record, Allow())

    drive(scene)


def test_a_resumed_run_says_what_it_had_waited_for():
    events: list[Event] = []
    agent, _ = agent_on(call("pay"), "done", tools=[pay], hooks=[observer(events.append)])

    async def scene() -> None:
        await agent.resume((await agent.run("go")).outcome.suspension_record, Allow())

    drive(scene)
    assert [e.kind for e in events if isinstance(e, RunResumed)] == ["approval"]


@pytest.mark.parametrize(("late", "reason"), [(False, "no longer wanted"), (True, "nobody answered in time")])
def test_a_run_may_be_dismissed_in_time_or_late(late, reason):
    clock = FakeClock()
    agent, model = agent_on(call("pay"), "done", tools=[pay], clock=clock)

    async def scene() -> RunResult:
        record = (await agent.run("go")).outcome.suspension_record
        if late:
            clock.advance(24 * 3600 + 1)
        return checked(await agent.dismiss(record.to_json(), "no longer wanted"), model)

    result = drive(scene)
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == reason
    assert result.decisions[-1].transition.id == ("suspended.expired" if late else "suspended.cancelled")
    assert [m.role.value for m in result.messages] == ["user", "assistant", "tool"]


# -- calls in doubt -----------------------------------------------------------------------------------


def cut_off(name: str, ran: list[str], *, idempotent: bool = False) -> tuple[Agent, RunState]:
    """The state of a run that a process left while its first call was running, and an agent of another process."""

    @tool(name=name, idempotent=idempotent)
    def work(n: int) -> str:
        ran.append(f"{name} {n}")
        return f"result {n}"

    calls = [call(name, n=1), call(name, n=2)]
    left, _ = agent_on(calls, tools=[work])

    async def scene() -> RunState:
        run = left.run("go")
        async for event in run:
            if isinstance(event, Transitioned) and event.target == "dispatch_tool":
                break
        run.state.batch[0].started = True
        return load_state(json.loads(canonical_json(dump_state(run.state))))

    return agent_on("done", tools=[work])[0], drive(scene)


def go_on(agent: Agent, state: RunState) -> RunResult:
    """Take a run up where its state says that it is."""

    async def scene() -> RunResult:
        return checked(await Run(agent._parts, state, Errand("go")))

    return drive(scene)


def test_a_call_that_had_started_is_not_run_again_but_asked_about():
    ran: list[str] = []
    result = go_on(*cut_off("pay_out", ran))
    assert ran == []
    assert (result.outcome.kind, result.outcome.tool, result.outcome.arguments) == ("in_doubt", "pay_out", {"n": 1})
    assert "whether it ran" in result.outcome.question


@pytest.mark.parametrize(
    ("answer", "wanted_runs", "first_result"),
    [
        (ItRan("it paid 1"), ["pay_out 2"], "it paid 1"),
        (ItDidNotRun(), ["pay_out 1", "pay_out 2"], "result 1"),
        (GiveUp(), ["pay_out 2"], "It is not known whether this call ran, and it was given up. Do not repeat it."),
    ],
)
def test_what_a_person_says_of_a_call_in_doubt_is_done(answer, wanted_runs, first_result):
    ran: list[str] = []
    agent, state = cut_off("pay_out", ran)
    record = go_on(agent, state).outcome.suspension_record

    async def scene() -> RunResult:
        return checked(await agent.resume(record, answer))

    result = drive(scene)
    assert ran == wanted_runs
    assert [text for role, text in said(result) if role == "tool"] == [first_result, "result 2"]
    assert result.output == "done"


@pytest.mark.parametrize("answer", ["it ran", Allow()])
def test_a_doubt_is_settled_by_its_own_answers_alone(answer):
    agent, state = cut_off("pay_out", [])
    record = go_on(agent, state).outcome.suspension_record
    with pytest.raises(ReplyError, match="ItRan"):
        agent.resume(record, answer)


def test_an_idempotent_call_that_had_started_is_run_again():
    ran: list[str] = []
    result = go_on(*cut_off("fetch", ran, idempotent=True))
    assert ran == ["fetch 1", "fetch 2"]
    assert result.output == "done"


# -- elsewhere, and what is told ----------------------------------------------------------------------


def test_a_record_goes_on_in_another_process():
    """Another agent, another host with the same secret, and nothing but the text of the record."""
    agent, _ = agent_on(call("pay"), "never", tools=[pay])

    async def first() -> str:
        return (await agent.run("go")).outcome.suspension_record.to_json()

    text = drive(first)
    other, model = agent_on("done elsewhere", tools=[pay], host=Host(clock=FakeClock(), secret=b"secret"))

    async def second() -> RunResult:
        return checked(await other.resume(text, Allow()), model)

    result = drive(second)
    assert result.output == "done elsewhere"
    assert [text for role, text in said(result) if role == "tool"] == ["paid"]


def test_recoveries_are_told_while_they_happen():
    events: list[Event] = []
    play(TransientProviderError("busy"), call("nothing"), "done", hooks=[observer(events.append)])
    told = [
        (e.failure.kind, e.action, e.attempt, e.backoff_s, e.recoverable) for e in events if isinstance(e, AgentError)
    ]
    assert told == [
        (FailureKind.transient_provider, Action.retry, 1, 2.0, True),
        (FailureKind.unknown_tool, Action.retry, 1, 0.0, True),
    ]
    assert isinstance(events[-1], RunCompleted)


def test_a_run_that_waits_for_nothing_it_can_name_still_says_that_it_waits():
    def pause(run: RunState) -> bool:
        return run.steps == 1

    graph = LOOP.with_transition(Transition("post_llm", pause, "suspended"), before="tool_calls")
    result = play("first", graph=graph)
    assert (result.outcome.kind, result.outcome.question) == ("question", "The run waits in 'suspended'.")
