"""Time limits, idle time, and the limits that a human extends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Action,
    Agent,
    AgentGuardrails,
    DefaultPolicy,
    Extend,
    Failure,
    FailureKind,
    Handoff,
    Host,
    Message,
    PartialRunSummary,
    Reply,
    RunCancelled,
    RunResult,
    RunWarning,
    SqliteStore,
    TransientProviderError,
    Transition,
    Usage,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.loop.events import RecoveryStarted, ToolStarted
from agentfsm.loop.state import RunState
from agentfsm.machine.declaration import Counter
from agentfsm.models.model_wrappers import Limited
from agentfsm.runtime.host import SystemClock
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.scenarios import (
    check_result,
    look,
    recovered_kinds,
    run_agent,
    run_async,
    run_script,
    scripted_agent,
)
from tests.helpers.stepped_clock import SteppedClock

# -- time and silence ---------------------------------------------------------------------------------


def ticking(clock: FakeClock, seconds: float, then: Any) -> Callable[[Any], Any]:
    def entry(messages: Any) -> Any:
        clock.advance(seconds)
        return then

    return entry


def test_what_a_model_and_a_tool_take_is_active_time_and_not_idle_time():
    clock = FakeClock()

    @tool
    async def slow() -> str:
        clock.advance(40)
        return "slow"

    limits = AgentGuardrails(stall_threshold_s=30)
    result = run_script(ticking(clock, 50, call("slow")), "done", clock=clock, tools=[slow], guardrails=limits)
    assert result.ok
    assert result.run_state.elapsed_s == pytest.approx(90)
    assert result.run_state.lessons_learned == []


def test_idle_time_between_phases_is_a_stall_and_counts_once():
    """A guard that blocks the loop: what passes between two effects is nobody's time limit."""
    clock = FakeClock()

    def blocking(run: RunState) -> bool:
        if run.model_calls == 1:
            clock.advance(31)
        return False

    graph = LOOP.with_detector("post_tool", blocking)
    result = run_script(call("look"), "done", clock=clock, graph=graph, tools=[look])
    assert result.ok
    found = [d.guard_result for d in result.decisions if d.target == "recover"]
    assert [getattr(x, "explanation", None) for x in found] == ["nothing happened for 31.0 s between two phases"]
    assert result.run_state.elapsed_s == pytest.approx(31)


def test_a_backoff_is_not_idle_time():
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=1)
    result = run_script(TransientProviderError("busy"), "done", clock=clock, guardrails=limits)
    assert result.ok
    assert clock.slept == [2.0]
    assert recovered_kinds(result) == ["transient_provider"]


def test_an_observer_that_takes_its_time_is_not_idle_time():
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=30, max_execution_time_s=100_000)
    slow = observer(lambda e: clock.advance(100))
    result = run_script(call("look"), "done", clock=clock, guardrails=limits, tools=[look], hooks=[slow])
    assert result.ok
    assert result.run_state.lessons_learned == []


@pytest.mark.parametrize("turns", [0, 1, 5, 50])
def test_a_consumer_that_holds_an_event_is_not_idle_time(turns):
    """Whether or not the step behind the event has ended meanwhile."""
    clock = FakeClock()
    limits = AgentGuardrails(stall_threshold_s=30, max_execution_time_s=100_000)

    @tool
    async def wait() -> str:
        await asyncio.sleep(0)
        return "over"

    agent, _ = scripted_agent(call("wait"), "done", clock=clock, guardrails=limits, tools=[wait])

    async def scene() -> RunResult:
        run = agent.run("go")
        async for _ in run:
            for _ in range(turns):
                await asyncio.sleep(0)
            clock.advance(100)
        return run.result

    result = check_result(run_async(scene))
    assert result.ok
    assert result.run_state.lessons_learned == []


def test_a_paused_run_is_not_idle():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=100_000)
    agent, _ = scripted_agent(call("look"), "done", clock=clock, tools=[look], guardrails=limits)

    async def scene() -> RunResult:
        run = agent.run("go")
        async for event in run:
            if isinstance(event, ToolStarted):
                break
        clock.advance(10_000)
        return await run

    result = check_result(run_async(scene))
    assert result.ok
    assert result.run_state.lessons_learned == []


def test_a_run_that_waits_to_be_started_is_not_charged_for_it():
    clock = FakeClock()
    agent, _ = scripted_agent("done", clock=clock)

    async def scene() -> RunResult:
        run = agent.run("go")
        clock.advance(10_000)
        return await run

    assert run_async(scene).run_state.elapsed_s == 0


def test_the_wall_clock_may_jump_without_effect():
    clock = FakeClock()
    jump = observer(lambda e: clock.jump(-10_000))
    result = run_script(call("look"), "done", clock=clock, tools=[look], hooks=[jump])
    assert result.ok
    assert result.run_state.elapsed_s == 0


# -- limits that a person extends ---------------------------------------------------------------------


def extend(agent: Agent, *answers: str) -> list[RunResult]:
    """A run and what it came to after each answer of a person."""

    async def scene() -> list[RunResult]:
        came = [check_result(await agent.run("go"))]
        for answer in answers:
            came.append(check_result(await agent.resume(came[-1].outcome.suspension_record, answer)))
        return came

    return run_async(scene)


def test_spent_iterations_are_extended_by_as_many_and_exactly_so():
    limits = AgentGuardrails(max_iterations=3, loop_hard_threshold=20)
    agent, model = scripted_agent(*[call("look", where=str(n)) for n in range(20)], guardrails=limits, tools=[look])
    first, second, third = extend(agent, "go on", "and on")
    assert [r.outcome.kind for r in (first, second, third)] == ["limit"] * 3
    assert [r.outcome.originating_failure_kind for r in (first, second)] == [FailureKind.iteration_limit] * 2
    assert [r.run_state.model_calls for r in (first, second, third)] == [3, 6, 9]
    assert len(model.requests) == 9
    assert (third.run_state.continues, third.run_state.iterations) == (2, 3)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_human_may_extend_a_limit_only_so_often_and_then_the_run_stops(allowed):
    limits = AgentGuardrails(max_iterations=1, max_continues=allowed, max_steps=99)
    agent, _ = scripted_agent(*[call("look", where=str(n)) for n in range(9)], guardrails=limits, tools=[look])
    *waiting, last = extend(agent, *["go on"] * allowed)
    assert all(isinstance(r.outcome, UserInputRequested) for r in waiting)
    assert isinstance(last.outcome, PartialRunSummary)
    assert last.outcome.failure.kind is FailureKind.iteration_limit
    assert last.run_state.model_calls == allowed + 1
    assert last.outcome.learned_facts == ()


def test_spent_time_resets_the_count_and_waiting_was_never_charged():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=100)
    script = (ticking(clock, 100, call("look")), ticking(clock, 60, call("look", where="b")), "done")
    agent, _ = scripted_agent(*script, clock=clock, guardrails=limits, tools=[look])

    async def scene() -> tuple[RunResult, RunResult]:
        first = check_result(await agent.run("go"))
        clock.advance(5_000)
        return first, check_result(await agent.resume(first.outcome.suspension_record, "take your time"))

    first, second = run_async(scene)
    assert first.outcome.originating_failure_kind is FailureKind.time_limit
    assert second.output == "done"
    assert second.run_state.elapsed_s == pytest.approx(60)


@pytest.mark.parametrize(
    ("limits", "kind"), [({"max_tokens": 10}, FailureKind.token_limit), ({"max_cost_usd": 1}, FailureKind.cost_limit)]
)
def test_a_reply_to_spent_tokens_or_money_grants_the_same_amount_once_more(limits, kind):
    def answer(messages: Any) -> Reply:
        return Reply(Message.assistant("", (call("look", f"id{len(messages)}"),)), usage=Usage(10, 0, cost_usd=1))

    limits = AgentGuardrails(**limits, max_continues=2)
    agent, _ = scripted_agent(*[answer] * 9, guardrails=limits, tools=[look])
    first, second, last = extend(agent, "go on", "and on")
    assert [r.outcome.originating_failure_kind for r in (first, second)] == [kind] * 2
    assert [r.run_state.model_calls for r in (first, second, last)] == [1, 2, 3]
    assert isinstance(last.outcome, PartialRunSummary)
    assert last.outcome.failure.kind is kind
    assert last.run_state.usage.total_tokens == 30
    assert "and a reply grants" in str(first.outcome.limit)


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_person_granted_survives_another_process(stored, tmp_path):
    """A fresh agent continues from the record, or from the store alone, twice."""

    def answer(messages: Any) -> Reply:
        return Reply(Message.assistant("", (call("look", f"id{len(messages)}"),)), usage=Usage(10, 0))

    limits = AgentGuardrails(max_tokens=10)

    def fresh(store: Any) -> Agent:
        return Agent(
            ScriptedModel([answer] * 9), tools=[look], guardrails=limits, host=Host(secret=b"same", store=store)
        )

    async def scene() -> list[RunResult]:
        results: list[RunResult] = []
        for turn in range(3):
            store = SqliteStore(tmp_path / "runs.db") if stored else None
            agent = fresh(store)
            if not turn:
                results.append(await agent.run("go"))
            else:
                last = results[-1]
                record = last.run_state.run_id if stored else last.outcome.suspension_record.to_json()
                results.append(await agent.resume(record, "go on"))
            if store is not None:
                store.close()
        return results

    results = run_async(scene)
    assert [r.run_state.usage.total_tokens for r in results] == [10, 20, 30]
    assert [r.run_state.token_limit for r in results] == [10, 20, 30]


@pytest.mark.parametrize(("word", "ending"), [("stop", PartialRunSummary), ("handoff", Handoff)])
def test_an_unattended_run_stops_or_is_handed_off(word, ending):
    limits = AgentGuardrails(max_iterations=1, on_limit=word)
    result = run_script(call("look"), guardrails=limits, tools=[look])
    assert isinstance(result.outcome, ending)
    assert result.outcome.failure.kind is FailureKind.iteration_limit


def test_the_last_turn_asks_to_wrap_up_and_is_the_last():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5)
    agent, model = scripted_agent(
        ticking(clock, 11, call("look")), "final words", clock=clock, guardrails=limits, tools=[look]
    )
    result = check_result(run_async(lambda: run_agent(agent)), model)
    assert result.output == "final words"
    assert "last turn" in model.requests[1].messages[-1].content
    assert model.requests[1].timeout_s == 5


def test_a_last_turn_that_is_not_used_to_end_ends_the_run_all_the_same():
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5, on_limit="stop")
    result = run_script(
        ticking(clock, 11, call("look")), call("look", where="again"), clock=clock, guardrails=limits, tools=[look]
    )
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.run_state.model_calls == 2


@pytest.mark.parametrize(
    ("granted_s", "last_turns"),
    [(60, [False, True, False, False]), (5, [False, True, False, True])],
    ids=["more time than before", "less time than before"],
)
def test_the_last_turn_comes_when_the_time_that_a_person_granted_is_over(granted_s, last_turns):
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5)
    entries = [ticking(clock, 11, call("look")), call("look"), ticking(clock, 7, call("look")), "final words"]
    if granted_s > 10:
        entries[2] = ticking(clock, 15, call("look"))
    agent, model = scripted_agent(*entries, clock=clock, guardrails=limits, tools=[look])
    waiting = run_async(lambda: run_agent(agent))
    result = agent.resume_sync(waiting.outcome.suspension_record, Extend(seconds=granted_s))
    assert result.output == "final words"
    assert ["last turn" in request.messages[-1].content for request in model.requests] == last_turns


def test_a_policy_that_always_goes_on_is_stopped_by_the_number_of_steps():
    class Stubborn(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action:
            return Action.retry

    limits = AgentGuardrails(max_iterations=2, max_steps=7)
    result = run_script(
        *[call("look", where=str(n)) for n in range(9)], guardrails=limits, policy=Stubborn(), tools=[look]
    )
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.decisions[-1].transition.id == "pre_step.runaway"
    assert (result.run_state.steps, result.run_state.model_calls) == (8, 2)


# -- code that will not stop ----------------------------------------------------------------------------


async def swallow(started: list[str] | None = None) -> None:
    """Wait forever, whoever cancels it."""
    if started is not None:
        started.append("started")
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


IMPATIENT = AgentGuardrails(tool_timeout_s=0.01, hook_timeout_s=0.01, llm_timeout_s=0.01, cancel_grace_s=0.01)


@pytest.mark.parametrize("parallel", [False, True])
def test_an_async_tool_that_will_not_stop_is_abandoned_and_the_run_goes_on(parallel):
    @tool(parallel=parallel)
    async def stubborn(n: int) -> str:
        await swallow()
        return "never"

    result = run_script([call("stubborn", n=1), call("stubborn", n=2)], "done", tools=[stubborn], guardrails=IMPATIENT)
    assert result.output == "done"
    texts = [m.content for m in result.messages if m.role == "tool"]
    assert len(texts) == 2
    assert all(text.startswith("timed out after 0.01 s") and "abandoned" in text for text in texts)
    assert [x.kind for x in result.run_state.lessons_learned] == ["tool_error"]


def test_a_tool_that_is_cancelled_cleans_up_within_the_grace():
    cleaned: list[str] = []

    @tool
    async def careful() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.001)
            cleaned.append("cleaned")
        return "never"

    limits = AgentGuardrails(tool_timeout_s=0.01, cancel_grace_s=60)
    result = run_script(call("careful"), "done", tools=[careful], guardrails=limits)
    assert (result.output, cleaned) == ("done", ["cleaned"])
    assert [m.content for m in result.messages if m.role == "tool"] == ["timed out after 0.01 s"]


@pytest.mark.parametrize("how", ["cancel", "wait_for", "timeout", "task"])
@pytest.mark.parametrize("where", ["tool", "parallel tools", "hook", "memory", "model"])
def test_a_run_that_is_cancelled_ends_whatever_swallows_the_cancellation(how, where):
    started: list[str] = []

    @tool(parallel=where == "parallel tools")
    async def stubborn(n: int) -> str:
        await swallow(started)
        return "never"

    class Remembering:
        async def recall(self, prompt: str) -> str:
            await swallow(started)
            return ""

        async def remember(self, messages: Any) -> None: ...

    class Deaf:
        name = "deaf"

        async def reply(self, request: Any) -> Any:
            await swallow(started)

    script = [call("stubborn", n=1), call("stubborn", n=2)] if "tool" in where else call("look")
    agent, _ = scripted_agent(
        script,
        "done",
        tools=[stubborn, look],
        hooks=[hook("dispatch_tool")(lambda context: swallow(started))] if where == "hook" else [],
        memory=Remembering() if where == "memory" else None,
        guardrails=AgentGuardrails(cancel_grace_s=0.01),
    )
    if where == "model":
        agent = Agent(Deaf(), guardrails=AgentGuardrails(cancel_grace_s=0.01))

    clock, calls = SteppedClock(), 2 if where == "parallel tools" else 1

    async def until_started() -> None:
        while len(started) < calls:
            await asyncio.sleep(0)
        clock.advance(60)

    async def scene() -> Run:
        run, beginning = agent.run("go"), asyncio.ensure_future(until_started())
        if how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run, 60)
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60):
                    await run
        else:
            task = asyncio.ensure_future(run)
            await beginning
            if how == "cancel":
                run.cancel("enough")
                await task
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        return run

    run = run_async(scene, clock.run)
    assert run.finished
    assert isinstance(check_result(run.result).outcome, RunCancelled)
    assert started == ["started"] * calls


def test_a_run_that_is_cancelled_as_its_parallel_calls_begin_ends_whatever_swallows_the_cancellation(monkeypatch):
    @tool(parallel=True)
    async def stubborn(n: int) -> str:
        await swallow()
        return "never"

    script = [call("stubborn", n=1), call("stubborn", n=2)]
    guardrails = AgentGuardrails(cancel_grace_s=0.01)
    agent, _ = scripted_agent(script, "done", tools=[stubborn], guardrails=guardrails)
    begin = asyncio.TaskGroup.create_task

    async def scene() -> Run:
        run = agent.run("go")
        task = asyncio.ensure_future(run)

        def begin_and_cancel(group: asyncio.TaskGroup, *args: Any, **options: Any) -> Any:
            begun = begin(group, *args, **options)
            task.cancel()  # before the call has begun
            return begun

        monkeypatch.setattr(asyncio.TaskGroup, "create_task", begin_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        return run

    assert isinstance(check_result(run_async(scene).result).outcome, RunCancelled)


def test_an_effect_that_suppresses_the_cancellation_of_its_task_and_ends_does_not_keep_the_run_alive():
    started: list[str] = []

    @tool
    async def deaf() -> str:
        started.append("started")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "I was not listening"
        return ""

    agent, model = scripted_agent(call("deaf"), "done", tools=[deaf])

    async def scene() -> Run:
        run = agent.run("go")
        task = asyncio.ensure_future(run)
        while not started:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run

    result = check_result(run_async(scene).result)
    assert isinstance(result.outcome, RunCancelled)
    assert [m.content for m in result.messages if m.role == "tool"] == ["I was not listening"]
    assert len(model.requests) == 1


# -- hooks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_hook_that_does_not_return_in_time_counts_as_having_raised(state, swallows):
    async def gate(context: Any) -> None:
        await (swallow() if swallows else asyncio.Event().wait())

    closed = run_script(
        call("look"), "done", tools=[look], guardrails=IMPATIENT, hooks=[hook(state, fail_open=False)(gate)]
    )
    assert closed.outcome.failure.kind is FailureKind.aborted
    assert closed.outcome.failure.explanation.startswith("hook gate timed out after 0.01 s")

    warnings: list[str] = []
    note = observer(lambda e: warnings.append(e.text) if isinstance(e, RunWarning) else None)
    open_ = run_script(
        call("look"), "done", tools=[look], guardrails=IMPATIENT, hooks=[hook(state, once=True)(gate), note]
    )
    assert open_.output == "done"
    assert [text.partition(" s")[0] for text in warnings] == ["hook gate timed out after 0.01"]


def test_a_hook_at_the_end_of_a_run_has_its_time_limit_too():
    async def late(context: Any) -> None:
        await swallow()

    result = run_script("done", guardrails=IMPATIENT, hooks=[hook("terminal", fail_open=False)(late)])
    assert result.output == "done"


def test_a_hook_waits_at_most_until_the_runs_time_is_up():
    async def gate(context: Any) -> None:
        await asyncio.Event().wait()

    limits = AgentGuardrails(max_execution_time_s=0.02, hook_timeout_s=3600)
    result = run_script("done", guardrails=limits, hooks=[hook("post_llm", fail_open=False)(gate)])
    assert result.outcome.failure.explanation.startswith("hook gate timed out after 0.0")


def test_a_hook_for_the_end_of_a_run_whose_time_is_up_still_has_its_own_time():
    clock, seen = FakeClock(), []

    async def audit(context: Any) -> None:
        await asyncio.sleep(0)
        seen.append(context.state)

    limits = AgentGuardrails(max_execution_time_s=10, on_limit="stop")
    hooks = [hook("recover", fail_open=False)(audit), hook("terminal", fail_open=False)(audit)]
    result = run_script(ticking(clock, 11, call("look")), clock=clock, tools=[look], guardrails=limits, hooks=hooks)
    assert result.outcome.failure.kind is FailureKind.time_limit
    assert seen == ["recover", "terminal"]


# -- waits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["pre_step", "call_llm", "post_tool"])
def test_a_back_off_is_waited_exactly_once_wherever_recover_leads(target):
    """``recover`` itself waits, so the row that is taken after it makes no difference."""
    clock = FakeClock()
    graph = LOOP
    if target != "pre_step":
        row = Transition("recover", busy_once, target, spends="shortcuts")
        graph = LOOP.with_counter(Counter("shortcuts", 1)).with_transition(row)
    result = run_script(TransientProviderError("busy", retry_after_s=60), "done", clock=clock, graph=graph)
    assert result.output == "done"
    assert clock.slept == [60.0]
    assert result.run_state.elapsed_s == pytest.approx(60)
    assert f"recover.{'otherwise' if target == 'pre_step' else 'busy_once'}" in [
        d.transition.id for d in result.decisions
    ]


def busy_once(run: RunState) -> bool:
    """The first model call failed."""
    return run.action is Action.retry and run.model_calls == 1


def test_a_tool_that_is_run_again_waits_in_recover_first():
    clock, seen = FakeClock(), []

    @tool(idempotent=True, retryable=True)
    async def flaky() -> str:
        seen.append(list(clock.slept))
        if len(seen) == 1:
            raise OSError("not now")
        return "fine"

    class Patient(DefaultPolicy):
        def backoff(self, kind: FailureKind, attempt: int) -> float:
            return 7.0

    result = run_script(call("flaky"), "done", clock=clock, tools=[flaky], policy=Patient())
    assert result.output == "done"
    assert seen == [[], [7.0]]


def test_a_retry_after_that_does_not_fit_ends_the_run_at_once_and_quotes_the_provider():
    clock = FakeClock()
    result = run_script(TransientProviderError("429: quota of today is used", retry_after_s=86_400), clock=clock)
    assert isinstance(result.outcome, Handoff)
    assert "429: quota of today is used" in result.outcome.rationale
    assert result.outcome.failure.kind is FailureKind.transient_provider
    assert clock.slept == []


def test_the_wait_for_a_rate_limit_ends_with_the_runs_time_and_the_ending_says_so():
    class Full:
        """A limit that never admits a call."""

        @asynccontextmanager
        async def acquire(self) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield lambda usage: None

    class Never:
        name = "never"

        async def reply(self, request: Any) -> Reply:
            raise AssertionError("it was not admitted")

    agent = Agent(Limited(Never(), Full()), guardrails=AgentGuardrails(max_execution_time_s=0.03))
    result = check_result(run_async(lambda: run_agent(agent)))
    assert isinstance(result.outcome, Handoff)
    assert "the limits of never (Limited) admitted no call before the run's time was up" in result.outcome.rationale


def test_a_memory_waits_at_most_until_the_runs_time_is_up():
    class Slow:
        async def recall(self, prompt: str) -> str:
            await asyncio.Event().wait()
            return ""

        async def remember(self, messages: Any) -> None: ...

    limits = AgentGuardrails(max_execution_time_s=0.03, tool_timeout_s=3600, on_limit="stop")
    agent, model = scripted_agent("done", memory=Slow(), guardrails=limits, clock=SystemClock())
    result = check_result(run_async(lambda: run_agent(agent)))
    assert result.outcome.failure.kind is FailureKind.time_limit
    assert model.requests == []


def test_what_is_said_about_a_retry_is_said_before_the_wait():
    clock, said = FakeClock(), []
    note = observer(lambda e: said.append(list(clock.slept)) if isinstance(e, RecoveryStarted) else None)
    run_script(TransientProviderError("busy"), "done", clock=clock, hooks=[note])
    assert said == [[]]


@pytest.mark.parametrize(
    ("preset", "answer", "told"),
    [
        ("standard", "done", "give your best answer now, and do not call any more tools"),
        ("funnel", call("return_done", output="done"), "call return_done now"),
        ("feedback", '{"kind": "final", "content": "done"}', '{"kind": "final", ...}'),
    ],
)
def test_the_last_turn_says_how_this_runs_answer_is_given_and_then_it_is_taken(preset, answer, told):
    clock = FakeClock()
    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=5)

    @tool
    def wait() -> str:
        """Takes the whole time."""
        clock.advance(11)
        return "waited"

    first = '{"kind": "tool_call", "tool_name": "wait", "arguments": {}}' if preset == "feedback" else call("wait")
    agent, model = scripted_agent(first, answer, clock=clock, preset=preset, guardrails=limits, tools=[wait])
    result = check_result(run_async(lambda: run_agent(agent)), model)
    assert result.output == "done"
    last = model.requests[-1].messages[-1]
    assert "This is your last turn" in last.content
    assert told in last.content
    assert (last.role.value == "tool") is (preset != "feedback")  # its wires have no tool role without a call
