"""User-defined graphs: added detectors, states with effects, final and waiting states, and removed rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Action,
    Agent,
    AgentGuardrails,
    AskApproval,
    Counter,
    Failure,
    FailureKind,
    Graph,
    GraphError,
    Message,
    NoTransitionError,
    RunCancelled,
    RunResult,
    State,
    StateContext,
    StateResult,
    StateSpec,
    ToolContext,
    Transition,
    hook,
    tool,
)
from agentfsm.loop.guards import expired, replied
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import DefaultPolicy
from agentfsm.loop.state import RunState
from agentfsm.runtime.control_tools import ask_user
from agentfsm.testing import ScriptedModel, call
from tests.helpers.scenarios import (
    assert_aborted,
    check_result,
    dangerous,
    look,
    run_agent,
    run_async,
    run_script,
    scripted_agent,
    transcript_of,
)

# -- graphs of the user's: detectors ------------------------------------------------------------------


def test_an_added_detector_is_a_row_like_any_other():
    def too_short(run: RunState) -> Failure | None:
        words = run.reply.message.content if run.reply else ""
        if len(words) >= 10:
            return None
        return Failure(kind="output_malformed", explanation="the answer is too short")

    graph = LOOP.with_detector(State.POST_LLM, too_short, before="loop_detected")
    agent, model = scripted_agent("no", "long enough now", graph=graph)
    result = check_result(run_async(lambda: run_agent(agent)), model)
    assert result.output == "long enough now"
    assert "post_llm.too_short" in [d.transition.id for d in result.decisions]
    found = next(d for d in result.decisions if d.guard == "too_short")
    assert found.guard_result.explanation == "the answer is too short"
    assert found.tried[-1] == ("too_short", True)
    assert "too short" in model.requests[1].messages[-1].content


@pytest.mark.parametrize("kind", ["tool_error", "scope_too_large", "ambiguous_input", "output_refused", "no_progress"])
@pytest.mark.parametrize("action", [Action.retry, Action.narrow_scope])
def test_whatever_kind_an_added_detector_reports_the_model_gets_feedback(kind, action):
    def mine(run: RunState) -> Failure | None:
        if run.model_calls > 1:
            return None
        return Failure(kind=kind, explanation="NOT GOOD", suggested_action=action)

    policy = DefaultPolicy(budgets=dict.fromkeys(FailureKind, 3))
    agent, model = scripted_agent("first", "second", graph=LOOP.with_detector("post_llm", mine), policy=policy)
    result = check_result(run_async(lambda: run_agent(agent)), model)
    assert result.output == "second"
    last = model.requests[1].messages[-1]
    assert last.role == "user"
    assert "NOT GOOD" in last.content


def test_a_row_may_be_removed():
    graph = LOOP.without("post_tool.unknown_tool")
    result = run_script(call("nothing"), "done", graph=graph)
    assert result.ok
    assert result.run_state.lessons_learned == []
    assert any("no tool named 'nothing'" in text for _, text in transcript_of(result))


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ("call_llm.provider_error", "provider_error"),
        ("dispatch_tool.in_doubt", "in_doubt"),
        ("post_llm.output_malformed", "output_malformed"),
        ("recover.ask_user", "ask_user"),
        ("recover.stop", "stop"),
    ],
)
def test_a_graph_without_a_row_for_what_an_effect_may_come_back_with_is_refused(row, outcome):
    with pytest.raises(GraphError, match=f"may come back with '{outcome}', and no row of the state takes that"):
        LOOP.without(row)


@pytest.mark.parametrize(
    ("row", "parts", "outcome"),
    [
        ("dispatch_tool.approval_required", {"tools": [dangerous]}, "approval_required"),
        ("post_tool.question_asked", {"preset": "funnel"}, "question_asked"),
        ("post_tool.declared_done", {"preset": "funnel"}, "declared_done"),
        ("post_llm.tool_calls", {"tools": [look]}, "tool_calls"),
    ],
)
def test_a_tool_that_may_lead_where_the_graph_has_no_row_is_refused(row, parts, outcome):
    graph = LOOP.without(row)
    assert Agent(ScriptedModel(), graph=graph).graph is graph
    with pytest.raises(GraphError, match=f"may lead to '{outcome}' there, and no row of the state takes that"):
        Agent(ScriptedModel(), graph=graph, **parts)


def test_a_hook_that_asks_for_approval_where_no_row_takes_that_aborts_the_run_at_once():
    ask = hook("dispatch_tool")(lambda c: AskApproval("May it look?"))
    result = run_script(
        call("look"), "done", graph=LOOP.without("dispatch_tool.approval_required"), tools=[look], hooks=[ask]
    )
    assert_aborted(
        result, "the call of 'look' must wait for a person, and no row of the state takes 'approval_required'"
    )
    assert len(result.decisions) == 4


def in_first_step(run: RunState) -> bool:
    return run.counters["steps"] == 1


def test_an_approval_that_a_row_leads_past_is_not_asked_for_later():
    row = Transition("dispatch_tool", in_first_step, "pre_step")
    graph = LOOP.with_transition(row, before="approval_required")
    script = (call("dangerous", what="x"), call("look"), "done")
    assert run_script(*script, graph=graph, tools=[dangerous, look]).output == "done"


def test_a_question_that_a_row_leads_past_is_not_asked_later():
    row = Transition("post_tool", in_first_step, "pre_step")
    graph = PRESETS["funnel"].graph.with_transition(row, before="question_asked")
    script = (call("ask_user", question="Which?"), call("look"), call("return_done", output="done"))
    assert run_script(*script, graph=graph, preset="funnel", tools=[look]).output == "done"


# -- graphs of the user's: states ---------------------------------------------------------------------


def reviewing(effect: Callable[..., Any], *rows: Transition, entered_by: str = "post_llm.otherwise") -> Any:
    rows = rows or (Transition("review", None, "terminal", ends="completed"),)
    return LOOP.with_state(StateSpec("review", "review", effect=effect), rows, entered_by=entered_by)


def not_good_yet(run: RunState) -> bool:
    return run.state_results.get("review", {}).get("good") is False


@pytest.mark.parametrize("is_async", [False, True])
def test_a_custom_state_has_its_effect(is_async):
    def now(context: StateContext) -> dict[str, Any]:
        return {"good": context.run.answer == "better", "state": context.state}

    async def soon(context: StateContext) -> dict[str, Any]:
        await asyncio.sleep(0)
        return now(context)

    graph = reviewing(
        soon if is_async else now,
        Transition("review", not_good_yet, "pre_step"),
        Transition("review", None, "terminal", ends="completed"),
    )
    result = run_script("first", "better", graph=graph)
    assert result.output == "better"
    assert result.run_state.state_results == {"review": {"good": True, "state": "review"}}
    assert [d.transition.id for d in result.decisions if d.source == "review"] == [
        "review.not_good_yet", "review.otherwise",
    ]  # fmt: skip


def test_a_custom_state_may_add_messages():
    def review(context: StateContext) -> StateResult:
        good = context.run.model_calls > 1
        return StateResult({"good": good}, () if good else (Message.user("Say it better."),))

    graph = reviewing(
        review, Transition("review", not_good_yet, "pre_step"), Transition("review", None, "terminal", ends="completed")
    )
    agent, model = scripted_agent("first", "better", graph=graph)
    result = check_result(run_async(lambda: run_agent(agent)), model)
    assert [m.content for m in model.requests[1].messages] == ["go", "first", "Say it better."]
    assert result.output == "better"


def test_a_custom_state_between_a_call_and_its_result_does_not_come_between_them():
    def note(context: StateContext) -> StateResult:
        return StateResult(messages=(Message.user("Think about it."),))

    for entrance, back in [("post_tool.otherwise", "pre_step"), ("dispatch_tool.otherwise", "post_tool")]:
        graph = reviewing(note, Transition("review", None, back), entered_by=entrance)
        agent, model = scripted_agent(call("look"), "done", graph=graph, tools=[look])
        result = check_result(run_async(lambda agent=agent: run_agent(agent)), model)
        assert [m.role.value for m in result.messages] == ["user", "assistant", "tool", "user", "assistant"]
        assert result.messages[3].content == "Think about it."


@pytest.mark.parametrize("is_async", [False, True])
def test_a_custom_effect_that_raises_aborts_the_run(is_async):
    def now(context: StateContext) -> None:
        raise LookupError("no reviewer")

    async def soon(context: StateContext) -> None:
        await asyncio.sleep(0)
        now(context)

    result = run_script("first", graph=reviewing(soon if is_async else now))
    assert_aborted(result, "the effect of 'review' raised LookupError: no reviewer")
    assert result.decisions[-1].transition.id == "review.aborted"


def test_a_custom_effect_whose_value_is_no_json_aborts_the_run():
    class Odd:
        pass

    assert_aborted(run_script("first", graph=reviewing(lambda context: Odd())), "review")


@pytest.mark.parametrize("odd", [["Say it better."], "better", [None], [{"role": "user"}]])
def test_a_custom_effect_that_adds_what_is_no_message_aborts_the_run(odd):
    result = run_script("first", graph=reviewing(lambda context: StateResult(messages=odd)))
    assert_aborted(result, "StateResult(messages=...) takes messages (Message.user('...'))")
    assert transcript_of(result) == [("user", "go"), ("assistant", "first")]


def test_a_custom_effect_can_be_cancelled():
    started = asyncio.Event()

    async def hang(context: StateContext) -> None:
        started.set()
        await asyncio.Event().wait()

    agent, _ = scripted_agent("first", graph=reviewing(hang))

    async def scene() -> RunResult:
        run = agent.run("go")

        async def stop() -> None:
            await started.wait()
            run.cancel()

        result, _ = await asyncio.gather(run, stop())
        return result

    result = check_result(run_async(scene))
    assert isinstance(result.outcome, RunCancelled)
    assert result.decisions[-1].transition.id == "review.cancelled"


def test_a_hook_may_run_at_a_custom_state():
    seen: list[str] = []
    run_script("first", graph=reviewing(lambda context: None), hooks=[hook("review")(lambda c: seen.append(c.state))])
    assert seen == ["review"]


def test_a_custom_final_state_ends_a_run_with_open_calls_too():
    def calls_look(run: RunState) -> bool:
        return any(c.call.name == "look" for c in run.batch)

    graph = LOOP.with_state(
        StateSpec("done_looking", final=True),
        [],
        entered_by=Transition("post_llm", calls_look, "done_looking", ends="completed"),
        before="tool_calls",
    )

    class Diary:
        async def recall(self, prompt: str) -> str:
            return ""

        async def remember(self, messages: Any) -> None:
            seen.append(f"kept {len(messages)}")

    seen: list[str] = []
    ends = [hook("terminal")(lambda c: seen.append("terminal")), hook("done_looking")(lambda c: seen.append("own"))]
    result = run_script(call("look"), graph=graph, tools=[look], hooks=ends, memory=Diary())
    assert result.state == "done_looking"
    assert result.run_state.batch == []
    assert seen == ["own", "kept 3"]


def test_a_custom_waiting_state_asks_a_human_and_ends_with_the_reply():
    def wants_leave(run: RunState) -> bool:
        return run.state_results.get("asked") is None and run.model_calls == 1

    def answered(run: RunState) -> bool:
        return run.human_reply is not None

    graph = LOOP.with_state(
        StateSpec("leave", waits=True),
        [Transition("leave", answered, "pre_step")],
        entered_by=Transition("post_llm", wants_leave, "leave"),
        before="no_progress",
    )
    agent, model = scripted_agent("first", call("ask_user", question="Which?"), "third", graph=graph, preset="funnel")

    async def scene() -> list[RunResult]:
        first = check_result(await agent.run("go"), model)
        second = check_result(await agent.resume(first.outcome.suspension_record, "go on"), model)
        return [first, second]

    first, second = run_async(scene)
    assert (first.state, first.outcome.kind) == ("leave", "question")
    assert second.state == "suspended"
    assert second.outcome.question == "Which?"
    assert ("user", "go on") in transcript_of(second)

    async def drop() -> RunResult:
        return check_result(await agent.dismiss(second.outcome.suspension_record), model)

    assert isinstance(run_async(drop).outcome, RunCancelled)


def with_two_waits(entered_by: str) -> Graph:
    """A graph that waits for a payment, and then for a parcel."""
    rows = [Transition("parcel", replied, "terminal", ends="completed")]
    graph = LOOP.with_state(
        StateSpec("payment", waits=True), [Transition("payment", replied, "pre_step")], entered_by=entered_by
    )
    return graph.with_state(StateSpec("parcel", waits=True), rows, entered_by="payment.replied")


def test_a_wait_that_asks_nothing_names_its_state_also_after_another_wait():
    agent, model = scripted_agent("first", graph=with_two_waits("post_llm.otherwise"))

    async def scene() -> None:
        first = check_result(await agent.run("go"), model)
        assert (first.state, first.outcome.question) == ("payment", "The run waits in 'payment'.")
        second = check_result(await agent.resume(first.outcome.suspension_record, "paid"), model)
        assert (second.state, second.outcome.question) == ("parcel", "The run waits in 'parcel'.")
        last = check_result(await agent.resume(second.outcome.suspension_record, "it is here"), model)
        assert last.ok
        assert transcript_of(last)[-2:] == [("user", "paid"), ("user", "it is here")]

    run_async(scene)


def test_a_question_is_asked_in_the_next_wait_too_if_the_answer_leads_there():
    agent, _ = scripted_agent(
        call("look"),
        graph=with_two_waits("recover.ask_user"),
        tools=[look],
        guardrails=AgentGuardrails(max_iterations=1),
    )

    async def scene() -> None:
        first = await agent.run("go")
        second = await agent.resume(first.outcome.suspension_record, "go on")
        assert (first.state, second.state) == ("payment", "parcel")
        assert second.outcome.question == first.outcome.question
        assert second.outcome.kind == "limit"

    run_async(scene)


def test_a_question_that_a_row_leads_past_is_not_what_a_later_wait_asks():
    def not_worth_asking(run: RunState) -> bool:
        return run.action is Action.ask_user

    graph = with_two_waits("post_llm.otherwise").with_counter(Counter("times", 1))
    graph = graph.with_transition(
        Transition("recover", not_worth_asking, "pre_step", spends="times", refills="iterations"), before="ask_user"
    )

    def too_short(run: RunState) -> Failure | None:
        return Failure(kind="ambiguous_input", explanation="too short") if run.model_calls == 1 else None

    result = run_script("first", "second", graph=graph.with_detector("post_llm", too_short))
    assert [d.transition.id for d in result.decisions if d.transition.source == "recover"] == [
        "recover.not_worth_asking"
    ]
    assert (result.state, result.outcome.question) == ("payment", "The run waits in 'payment'.")


@tool(asks=True)
async def sure(context: ToolContext) -> str:
    """Ask in the middle of a call."""
    return await context.ask("Sure?")


@pytest.mark.parametrize(
    ("answer", "row", "tools"),
    [
        ("replied", "recover.ask_user", []),
        ("replied", "post_tool.question_asked", [ask_user]),
        ("approval_decided", "dispatch_tool.approval_required", [dangerous]),
        ("approval_decided", "post_tool.question_asked", [sure]),
        ("doubt_settled", "dispatch_tool.in_doubt", [look]),
    ],
)
def test_a_graph_that_asks_where_no_row_takes_the_answer_is_refused(answer, row, tools):
    def loop_with_desk(*rows: Transition) -> Graph:
        return LOOP.with_state(StateSpec("desk", waits=True), rows, entered_by=row)

    def answered(run: RunState) -> bool:
        return run.human_reply is not None

    ends = Transition("desk", expired, "terminal", ends="cancelled")
    takes = next(each for each in LOOP.rows("suspended") if each.name == answer)
    others = [replace(each, source="desk") for each in LOOP.rows("suspended") if each is not takes]
    message = f"^{row}: nobody can answer what it asks: no row of 'desk' takes the answer; add the row '{answer}'"
    elsewhere = [replace(each, target="suspended") for each in others if not each.ends]  # by answers that do not come
    for rows in ([ends], others, [ends, replace(others[-1], target="desk")], [ends, *elsewhere]):
        with pytest.raises(GraphError, match=message):
            Agent(ScriptedModel(), tools=tools, graph=loop_with_desk(*rows))
    for rows in ([replace(takes, source="desk")], [replace(takes, source="desk", guard=answered)]):
        Agent(ScriptedModel(), tools=tools, graph=loop_with_desk(*rows))
    Agent(ScriptedModel(), tools=tools, graph=loop_with_desk(replace(ends, target="suspended", ends="")))


def test_a_graph_that_has_no_row_for_an_answer_is_refused_before_anything_changes():
    def says_yes(run: RunState) -> bool:
        return run.human_reply is not None and run.human_reply.text == "yes"

    rows = (replace(each, guard=says_yes) if each.guard is replied else each for each in LOOP)
    graph = replace(LOOP, transitions=tuple(rows))
    limits = AgentGuardrails(max_iterations=1)
    agent, _ = scripted_agent(call("look"), "done", graph=graph, guardrails=limits, tools=[look])

    async def scene() -> None:
        first = await agent.run("go")
        with pytest.raises(NoTransitionError, match="'suspended', and no row of that state accepts 'text'"):
            await agent.resume(first.outcome.suspension_record, "go on")
        ended = await agent.dismiss(first.outcome.suspension_record)  # it was not used
        assert isinstance(ended.outcome, RunCancelled)

    run_async(scene)


def test_an_effect_that_raises_a_stray_cancellation_aborts_the_run():
    async def odd(run: RunState) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    assert_aborted(run_script("first", graph=reviewing(odd)), "the effect of 'review' raised CancelledError")


@pytest.mark.parametrize("limit", ["no_such_limit", "on_limit", "max_cost_usd", "max_execution_time_s"])
def test_a_counter_that_is_limited_by_what_is_no_whole_number_is_refused(limit: str):
    graph = LOOP.with_counter(Counter("rounds", limit))
    for use in (graph.analyse, lambda: Agent(ScriptedModel(), graph=graph)):
        with pytest.raises(GraphError, match=f"rounds: its limit '{limit}' is not a guardrail that is a whole number"):
            use()


@pytest.mark.parametrize("limit", ["max_tool_retries", "max_tokens", "step_limit"])
def test_a_counter_may_be_limited_by_any_guardrail_that_is_a_whole_number(limit: str):
    assert Agent(ScriptedModel(["done"]), graph=LOOP.with_counter(Counter("rounds", limit))).run_sync("go").ok
