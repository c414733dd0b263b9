"""What the effect of a user-defined state may use: the run's model, tools and clock, under the run's limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    BudgetSpentError,
    Counter,
    DefaultPolicy,
    Deny,
    Edit,
    FailureKind,
    Graph,
    HookContext,
    Host,
    Message,
    ModelError,
    ProviderError,
    Reply,
    RunCancelled,
    RunResult,
    RunState,
    RunView,
    StateContext,
    StateEffectError,
    StateResult,
    StateSpec,
    TransientProviderError,
    Transition,
    Usage,
    UserInputRequested,
    came_back,
    deny,
    hook,
    permissions,
    tool,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.guards import approval_decided, approval_required, doubt_settled, expired, in_doubt
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.models import FallbackModel
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel
from tests.helpers.child_process import child_environment
from tests.helpers.journal_scenarios import with_own_macs
from tests.helpers.scenarios import await_run, resumed

SECRET = b"shared by all processes of these tests"

Effect = Callable[[StateContext], Any]

done: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


@tool(idempotent=True)
def look(at: str) -> str:
    """Look at something."""
    done.append(at)
    return f"seen {at}"


@tool(idempotent=True, requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    done.append(amount)
    return f"paid {amount}"


@tool
def send(text: str) -> str:
    """Send, which cannot be taken back."""
    done.append(text)
    return f"sent {text}"


def reviewing(effect: Effect) -> Graph:
    """The loop with a state of the user's between the model's answer and the end."""
    spec, rows = StateSpec("review", effect=effect), [Transition("review", None, "terminal", ends="completed")]
    return LOOP.with_state(spec, rows, entered_by="post_llm.otherwise")


def waiting(effect: Effect) -> Graph:
    """The same, with a waiting state for the calls that a person must decide about."""
    return with_wait(reviewing(effect))


def with_wait(graph: Graph) -> Graph:
    """A graph with a waiting state for the calls of its state ``review``."""
    rows = [
        Transition("asking", expired, "terminal", ends="cancelled"),
        Transition("asking", approval_decided, "review"),
        Transition("asking", doubt_settled, "review"),
    ]
    entrance = Transition("review", approval_required, "asking")
    graph = graph.with_state(StateSpec("asking", waits=True), rows, entered_by=entrance)
    return graph.with_transition(Transition("review", in_doubt, "asking"))


def said(text: str, tokens: int = 0, usd: float = 0.0) -> Reply:
    return Reply(Message.assistant(text), usage=Usage(tokens, 0, 0, usd))


def run(effect: Effect, *script: Any, **options: Any) -> RunResult:
    options.setdefault("graph", reviewing(effect))
    return Agent(ScriptedModel(["draft", *script]), **options).run_sync("go")


def noted(result: RunResult) -> Any:
    return result.run_state.state_results["review"]


def assert_aborted(result: RunResult, *parts: str) -> None:
    assert not result.ok
    assert result.run_state.aborted is not None
    for part in parts:
        assert part in result.run_state.aborted.explanation


# -- the model -----------------------------------------------------------------------------------------


def test_an_effect_asks_the_runs_model_and_its_answer_is_no_part_of_the_transcript() -> None:
    async def review(context: StateContext) -> str:
        reply = await context.ask_model(f"Is this good? {context.run.answer}")
        return reply.message.content

    model = RecordingModel(ScriptedModel(["draft", "yes"]))
    result = Agent(model, graph=reviewing(review), instructions="Be brief.").run_sync("go")
    assert noted(result) == "yes"
    assert [m.content for m in model.requests[1].messages] == ["Is this good? draft"]
    assert [m.content for m in result.messages] == ["Be brief.", "go", "draft"]


def test_it_may_ask_another_model_with_messages_of_its_own() -> None:
    critic = RecordingModel(ScriptedModel(["no"]))

    async def review(context: StateContext) -> str:
        messages = [Message.system("You judge."), Message.user("Is it?")]
        reply = await context.ask_model(messages, model=critic, max_output_tokens=7, output_schema={"type": "string"})
        return reply.message.content

    assert noted(run(review)) == "no"
    (request,) = critic.requests
    assert [m.content for m in request.messages] == ["You judge.", "Is it?"]
    assert (request.max_output_tokens, request.output_schema, request.tools) == (7, {"type": "string"}, ())


def test_its_model_calls_are_charged_to_the_run() -> None:
    critic = ScriptedModel([said("a", 10, 0.5), said("b", 100, 0.25)])

    async def review(context: StateContext) -> None:
        await context.ask_model("one", model=critic)
        await context.ask_model("two", model=critic)

    result = run(review)
    assert result.usage == Usage(110, 0, 0, 0.75)
    assert (result.run_state.model_calls, result.run_state.iterations) == (3, 3)


@pytest.mark.parametrize("limit", [2, 3, 4, 7])
def test_max_iterations_bounds_the_model_calls_of_the_loop_and_of_the_effect_together(limit: int) -> None:
    critic = ScriptedModel(["again"] * 50)

    async def review(context: StateContext) -> None:
        await context.ask_model("Is it good?", model=critic)

    spec, rows = StateSpec("review", effect=review), [Transition("review", None, "pre_step")]
    graph = LOOP.with_state(spec, rows, entered_by="post_llm.otherwise")
    model = ScriptedModel(["draft"] * 50)
    limits = AgentGuardrails(max_iterations=limit, on_limit="stop")
    result = Agent(model, graph=graph, guardrails=limits).run_sync("go")
    assert model.calls + critic.calls == limit
    assert result.run_state.model_calls == limit


def test_each_model_that_a_fallback_tries_is_a_model_call() -> None:
    async def review(context: StateContext) -> str:
        critic = FallbackModel(ScriptedModel([ProviderError("down")] * 9), ScriptedModel(["yes"] * 9))
        await context.ask_model("?", model=critic)
        try:
            return (await context.ask_model("?", model=critic)).message.content
        except ProviderError:
            return "no call was left for the second model"

    result = run(review, guardrails=AgentGuardrails(max_iterations=4))
    assert noted(result) == "no call was left for the second model"
    assert result.run_state.model_calls == 4


SPENT: list[tuple[dict[str, Any], FailureKind, str]] = [
    ({"max_iterations": 1}, FailureKind.iteration_limit, "1 of 1 model calls are used up"),
    ({"max_tokens": 100}, FailureKind.token_limit, "100 of 100 tokens are used up"),
    ({"max_cost_usd": 0.5}, FailureKind.cost_limit, "0.5 of 0.5 USD are used up"),
    ({"max_execution_time_s": 40}, FailureKind.time_limit, "s of 40 s are used up"),
]


@pytest.mark.parametrize(("limits", "kind", "text"), SPENT, ids=lambda value: str(value))
def test_with_a_budget_used_up_the_model_is_not_asked_and_the_effect_is_told(
    limits: dict[str, Any], kind: FailureKind, text: str
) -> None:
    critic, clock = ScriptedModel(["never"]), FakeClock()

    async def review(context: StateContext) -> str:
        clock.advance(41)
        try:
            await context.ask_model("Is it good?", model=critic)
        except BudgetSpentError as error:
            return f"{error.kind}: {error}"
        return "asked"

    model = ScriptedModel([said("draft", 100, 0.5)])
    agent = Agent(model, graph=reviewing(review), guardrails=AgentGuardrails(**limits), host=Host(clock=clock))
    result = agent.run_sync("go")
    assert noted(result).startswith(f"{kind.value}: the effect of 'review' cannot call a model: ")
    assert text in noted(result)
    assert result.ok
    assert critic.calls == 0


def test_an_effect_that_does_not_handle_that_ends_the_run_as_aborted_by_name() -> None:
    async def review(context: StateContext) -> None:
        await context.ask_model("Is it good?")

    result = run(review, guardrails=AgentGuardrails(max_iterations=1))
    assert_aborted(result, "the effect of 'review'", "BudgetSpentError", "1 of 1 model calls are used up")


def test_what_the_effect_itself_has_spent_counts_too() -> None:
    critic = ScriptedModel([said("a", 60)] * 9)

    async def review(context: StateContext) -> int:
        for number in range(9):
            try:
                await context.ask_model("?", model=critic)
            except BudgetSpentError:
                return number
        return 9

    assert noted(run(review, guardrails=AgentGuardrails(max_tokens=100))) == 2  # at 60 tokens 40 are left, at 120 none


def hanging(reached: asyncio.Event | None = None) -> Any:
    async def hang(_: Any) -> str:
        if reached is not None:
            reached.set()
        await asyncio.Event().wait()
        return "never"

    return hang


def test_a_model_call_has_llm_timeout_s() -> None:
    async def review(context: StateContext) -> str:
        try:
            await context.ask_model("?", model=ScriptedModel([hanging()]))
        except TransientProviderError as error:
            return str(error)
        return "answered"

    policy = DefaultPolicy(budgets={})
    result = run(review, guardrails=AgentGuardrails(llm_timeout_s=0.02), policy=policy)
    assert "sent no reply within 0.02 s" in noted(result)
    assert result.run_state.model_calls == 2


@pytest.mark.parametrize("by", ["itself", "a model"])
def test_an_effect_that_is_not_done_when_the_runs_time_is_up_is_cut_off_and_named(by: str) -> None:
    async def review(context: StateContext) -> None:
        if by == "itself":
            await asyncio.Event().wait()
        await context.ask_model("?", model=ScriptedModel([hanging()] * 9))

    result = run(review, guardrails=AgentGuardrails(max_execution_time_s=0.2))
    assert_aborted(result, "the effect of 'review'", "time")


def test_a_transient_failure_is_retried_as_the_policy_says_on_the_hosts_clock() -> None:
    clock = FakeClock()
    critic = ScriptedModel([TransientProviderError("busy"), TransientProviderError("busy"), said("good", 5)])

    async def review(context: StateContext) -> str:
        return (await context.ask_model("?", model=critic)).message.content

    result = run(review, host=Host(clock=clock))
    assert noted(result) == "good"
    assert clock.slept == [2.0, 4.0]
    assert (result.run_state.model_calls, result.usage.total_tokens) == (4, 5)


@pytest.mark.parametrize(
    ("error", "made"), [(TransientProviderError("busy"), 4), (ProviderError("no such model"), 1)], ids=["busy", "wrong"]
)
def test_a_failure_that_the_policy_does_not_retry_any_more_is_raised(error: ModelError, made: int) -> None:
    critic = ScriptedModel([error] * 9)

    async def review(context: StateContext) -> str:
        try:
            await context.ask_model("?", model=critic)
        except ModelError as raised:
            return f"{type(raised).__name__}: {raised}"
        return "answered"

    result = run(review, host=Host(clock=FakeClock()))
    assert noted(result) == f"{type(error).__name__}: {error}"
    assert critic.calls == made
    assert result.run_state.model_calls == 1 + made


def test_a_back_off_that_outlasts_the_runs_time_is_not_begun_and_names_its_cause() -> None:
    clock = FakeClock()
    critic = ScriptedModel([TransientProviderError("come back tomorrow", retry_after_s=86_400)])

    async def review(context: StateContext) -> None:
        await context.ask_model("?", model=critic)

    result = run(review, host=Host(clock=clock))
    assert_aborted(result, "'review'", "come back tomorrow")
    assert clock.slept == []


def test_cancelling_a_run_cancels_its_effects_model_call_which_is_charged_all_the_same() -> None:
    async def scene() -> RunResult:
        reached = asyncio.Event()
        critic = ScriptedModel([said("one", 7), hanging(reached)])

        async def review(context: StateContext) -> None:
            await context.ask_model("?", model=critic)
            await context.ask_model("?", model=critic)

        going = Agent(ScriptedModel(["draft"]), graph=reviewing(review)).run("go")
        task = asyncio.create_task(await_run(going))
        await reached.wait()
        going.cancel()
        return await task

    result = asyncio.run(scene())
    assert isinstance(result.outcome, RunCancelled)
    assert (result.usage.total_tokens, result.run_state.model_calls) == (7, 3)


# -- the clock -------------------------------------------------------------------------------------------


def test_an_effect_reads_the_hosts_clock_and_waits_on_it() -> None:
    clock = FakeClock()

    async def review(context: StateContext) -> float:
        before = context.now()
        await context.sleep(20)
        assert context.clock is clock
        return context.now() - before

    assert noted(run(review, host=Host(clock=clock))) == 20
    assert clock.slept == [20]


def test_a_wait_that_the_runs_time_does_not_allow_is_not_begun() -> None:
    clock = FakeClock()

    async def review(context: StateContext) -> None:
        await context.sleep(60)

    result = run(review, host=Host(clock=clock), guardrails=AgentGuardrails(max_execution_time_s=60))
    assert_aborted(result, "'review'", "wait 60 s: 60.0 s of the run's time are left")
    assert clock.slept == []


# -- tools ------------------------------------------------------------------------------------------------


def test_an_effect_calls_the_agents_tools() -> None:
    async def review(context: StateContext) -> list[str]:
        result = await context.call_tool("look", {"at": "draft"})
        return [result.status, result.content]

    result = run(review, tools=[look])
    assert noted(result) == ["done", "seen draft"]
    assert [m.role.value for m in result.messages] == ["user", "assistant"]


CALLS: list[tuple[str, dict[str, Any], str, str]] = [
    ("look", {"to": 1}, "failed", "at"),
    ("nothing", {}, "failed", "look"),
    ("send", {"text": "x"}, "denied", "nothing is sent"),
]


@pytest.mark.parametrize(("name", "arguments", "status", "part"), CALLS)
def test_its_calls_are_validated_and_under_the_agents_permissions(
    name: str, arguments: dict[str, Any], status: str, part: str
) -> None:
    async def review(context: StateContext) -> list[str]:
        result = await context.call_tool(name, arguments)
        return [result.status, result.content]

    rules = permissions(deny("send", reason="nothing is sent"), otherwise="allow")
    found = noted(run(review, tools=[look, send], hooks=[rules]))
    assert found[0] == status
    assert part in found[1]
    assert done == []


def test_its_tool_calls_have_a_time_limit() -> None:
    @tool(timeout=0.02)
    async def slow() -> str:
        """Take forever."""
        await asyncio.Event().wait()
        return "never"

    async def review(context: StateContext) -> str:
        return (await context.call_tool("slow", {})).content

    assert noted(run(review, tools=[slow])) == "timed out after 0.02 s"


@pytest.mark.parametrize("name", ["return_done", "helper"])
def test_what_only_a_reply_can_call_is_refused(name: str) -> None:
    async def review(context: StateContext) -> None:
        await context.call_tool(name, {"output": "x", "task": "x"})

    helper = Agent(ScriptedModel(["x"])).as_tool("helper", "Helps.")
    graph = LOOP.with_state(
        StateSpec("review", effect=review), [Transition("review", None, "call_llm")], entered_by="pre_step.otherwise"
    )
    result = Agent(ScriptedModel(["x"]), preset="funnel", graph=graph, tools=[helper]).run_sync("go")
    assert_aborted(result, f"the effect of 'review' cannot call {name!r}")


# -- waiting for a person -----------------------------------------------------------------------------------


def test_a_call_that_needs_approval_is_refused_where_the_state_has_no_rows_for_it() -> None:
    async def review(context: StateContext) -> None:
        await context.call_tool("pay", {"amount": 5})

    result = run(review, tools=[pay])
    assert_aborted(
        result, "cannot call 'pay': it needs a person's approval", "'approval_required'", "'approval_decided'"
    )
    assert done == []


def test_a_call_that_a_crash_would_leave_in_doubt_is_refused_where_the_state_has_no_rows_for_it() -> None:
    async def review(context: StateContext) -> None:
        await context.call_tool("send", {"text": "x"})

    stored = run(review, tools=[send], host=Host(store=MemoryStore()))
    assert_aborted(stored, "cannot call 'send': it is not idempotent", "'in_doubt'", "'doubt_settled'")
    assert done == []
    assert run(review, tools=[send]).ok  # without a store no run outlives its process
    assert done == ["x"]


@pytest.fixture(params=["record", "store"])
def host(request: pytest.FixtureRequest) -> Host:
    return Host(secret=SECRET, store=MemoryStore() if request.param == "store" else None)


def paying(answers: list[str], critic: ScriptedModel) -> Effect:
    async def review(context: StateContext) -> list[str]:
        await context.ask_model("May I pay?", model=critic)
        await context.call_tool("look", {"at": "purse"})
        paid = await context.call_tool("pay", {"amount": 5})
        answers.append(context.idempotency_key)
        last = await context.ask_model("Well?", model=critic)
        return [paid.status, paid.content, last.message.content]

    return review


@pytest.mark.parametrize(
    ("answer", "expected", "acted"),
    [
        (Allow(), ["done", "paid 5"], ["purse", 5]),
        (Deny("too much"), ["denied", "Denied by the user: too much"], ["purse"]),
        (Edit({"amount": 2}), ["done", "paid 2"], ["purse", 2]),
    ],
    ids=["allow", "deny", "edit"],
)
def test_a_call_that_needs_approval_waits_and_what_was_done_before_is_not_repeated(
    host: Host, answer: Any, expected: list[str], acted: list[Any]
) -> None:
    critic, keys = ScriptedModel([said("yes", 3), said("fine", 4)]), list[str]()
    agent = Agent(ScriptedModel(["draft"]), graph=waiting(paying(keys, critic)), tools=[look, pay], host=host)
    first = asyncio.run(await_run(agent.run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.kind, first.outcome.tool, first.outcome.arguments) == ("approval", "pay", {"amount": 5})
    assert (first.state, first.run_state.model_calls, first.usage.total_tokens) == ("asking", 2, 3)
    result = resumed(agent, first, answer, by_id=host.store is not None)
    assert noted(result) == [*expected, "fine"]
    assert done == acted
    assert critic.calls == 2
    assert (result.run_state.model_calls, result.usage.total_tokens) == (3, 7)
    assert result.ok
    assert keys == [f"{result.run_state.run_id}:review:1"]


def test_the_journal_gives_the_state_and_the_moves_back() -> None:
    store = MemoryStore()
    critic = ScriptedModel(["yes", "fine"])
    graph = waiting(paying([], critic))
    agent = Agent(ScriptedModel(["draft"]), graph=graph, tools=[look, pay], host=Host(secret=SECRET, store=store))
    result = asyncio.run(await_run(agent.run("go", run_id="one")))
    for code in (OPEN, GOOD):
        rows = asyncio.run(store.records("one"))
        assert dump_state(rehydrate(rows).run) == dump_state(result.run_state)
        assert verify("one", rows, asyncio.run(store.head("one"))).code == code
        assert replay(rows, graph).same
        if code == OPEN:
            result = resumed(agent, result, Allow(), by_id=True)


def test_what_its_calls_were_given_and_gave_is_in_the_journal() -> None:
    critic = ScriptedModel([ProviderError("no such model"), said("yes", 3)])

    async def review(context: StateContext) -> None:
        with pytest.raises(ModelError):
            await context.ask_model("One?", model=critic)
        await context.ask_model("Two?", model=critic)
        await context.call_tool("look", {"at": "draft"})

    result = run(review, tools=[look])
    effects = [r.data for r in result.journal if r.kind.startswith("effect.")]
    asked = [each["request"] for each in effects if "request" in each]
    assert [a["messages"][0]["content"] for a in asked[:2]] == ["One?", "Two?"]
    assert asked[2] == {"arguments": {"at": "draft"}}
    ended = [each["out"] for each in effects if "out" in each]
    assert ended[0]["failure"]["explanation"] == "no such model"
    assert ended[1]["reply"]["message"]["content"] == "yes"
    assert ended[2]["content"] == "seen draft"


def test_each_visit_of_a_state_has_a_key_of_its_own() -> None:
    keys: list[str] = []

    def again(state: Any) -> bool:
        return len(state.state_results["review"]) < 2

    def review(context: StateContext) -> list[str]:
        keys.append(context.idempotency_key)
        return keys

    rows = [Transition("review", again, "pre_step"), Transition("review", None, "terminal", ends="completed")]
    graph = LOOP.with_state(StateSpec("review", effect=review), rows, entered_by="post_llm.otherwise")
    Agent(ScriptedModel(["a", "b"]), graph=graph).run_sync("go")
    assert len(keys) == 2
    assert len(set(keys)) == 2


def changing(second: Effect) -> Effect:
    """An effect that does something else when it is run again."""
    visits: list[int] = []

    async def review(context: StateContext) -> Any:
        visits.append(1)
        if len(visits) > 1:
            return await second(context)
        await context.call_tool("look", {"at": "a"})
        await context.call_tool("pay", {"amount": 5})
        return None

    return review


async def _looks_elsewhere(context: StateContext) -> None:
    await context.call_tool("look", {"at": "b"})


async def _asks_first(context: StateContext) -> None:
    await context.ask_model("?")


async def _calls_nothing(context: StateContext) -> None:
    pass


async def _hides_the_error(context: StateContext) -> None:
    try:
        await context.call_tool("look", {"at": "b"})
    except StateEffectError:
        return


@pytest.mark.parametrize("second", [_looks_elsewhere, _asks_first, _calls_nothing, _hides_the_error])
def test_an_effect_that_makes_other_calls_when_it_is_run_again_is_refused_by_name(host: Host, second: Effect) -> None:
    agent = Agent(ScriptedModel(["draft"] * 3), graph=waiting(changing(second)), tools=[look, pay], host=host)
    first = asyncio.run(await_run(agent.run("go")))
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert_aborted(result, "the effect of 'review' was run again")
    assert done == ["a"]


def test_a_visit_that_a_person_sends_elsewhere_has_ended_and_the_next_one_makes_its_calls_anew(host: Host) -> None:
    keys: list[str] = []

    async def review(context: StateContext) -> list[str]:
        keys.append(context.idempotency_key)
        await context.call_tool("look", {"at": str(context.run.answer)})
        return [(await context.call_tool("pay", {"amount": 5})).content]

    def rejected(run: RunView) -> bool:
        return run.human_reply is not None and run.human_reply.kind == "deny"

    graph = waiting(review).with_transition(Transition("asking", rejected, "pre_step"), before="approval_decided")
    agent = Agent(ScriptedModel(["draft", "better"]), graph=graph, tools=[look, pay], host=host)
    by_id = host.store is not None
    first = asyncio.run(await_run(agent.run("go", run_id="one")))
    second = resumed(agent, first, Deny("try again"), by_id)
    assert isinstance(second.outcome, UserInputRequested)
    result = resumed(agent, second, Allow(), by_id)
    assert noted(result) == ["paid 5"]
    assert done == ["draft", "better", 5]
    assert keys == ["one:review:1", "one:review:2", "one:review:2"]


@pytest.mark.parametrize("last", [True, False], ids=["the wait is added last", "the guard is added last"])
def test_a_guard_that_holds_without_a_result_leads_past_no_wait_unless_it_is_put_before_it(
    host: Host, last: bool
) -> None:
    async def review(context: StateContext) -> str:
        return (await context.call_tool("pay", {"amount": 5})).content

    def not_paid(run: RunState) -> bool:
        return run.state_results.get("review") != "paid 5"

    def paid_too_much(run: RunState) -> bool:
        return run.state_results["review"] == "paid 500"

    graph = reviewing(review)
    graph = graph if last else with_wait(graph)
    for guard in (not_paid, paid_too_much):
        graph = graph.with_transition(Transition("review", guard, "terminal", ends="handed_off"))
    graph = with_wait(graph) if last else graph
    agent = Agent(ScriptedModel(["draft"]), graph=graph, tools=[pay], host=host)
    first = asyncio.run(await_run(agent.run("go", run_id="one")))
    assert isinstance(first.outcome, UserInputRequested)
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert (result.ok, noted(result), done) == (True, "paid 5", [5])


def test_a_visit_that_a_row_leads_past_its_wait_has_ended_too(host: Host) -> None:
    keys: list[str] = []

    async def review(context: StateContext) -> list[str]:
        keys.append(context.idempotency_key)
        await context.call_tool("look", {"at": str(context.run.answer)})
        return [(await context.call_tool("pay", {"amount": 5})).content]

    def not_worth_asking(run: RunView) -> bool:
        return run.pending_request is not None and run.answer == "draft"

    past = Transition("review", not_worth_asking, "pre_step")
    graph = waiting(review).with_transition(past, before="approval_required")
    agent = Agent(ScriptedModel(["draft", "better"]), graph=graph, tools=[look, pay], host=host)
    first = asyncio.run(await_run(agent.run("go", run_id="one")))
    assert isinstance(first.outcome, UserInputRequested)
    assert done == ["draft", "better"]
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert noted(result) == ["paid 5"]
    assert done == ["draft", "better", 5]
    assert keys == ["one:review:1", "one:review:2", "one:review:2"]


@pytest.mark.parametrize("at", ["an earlier visit", "another state"])
def test_an_outcome_from_before_does_not_lead_past_a_call_that_waits(host: Host, at: str) -> None:
    def check(context: StateContext) -> StateResult:
        return StateResult(outcome="good")

    async def review(context: StateContext) -> StateResult:
        if at == "an earlier visit" and context.run.answer == "draft":
            return StateResult(outcome="poor")
        return StateResult((await context.call_tool("pay", {"amount": 5})).content, outcome="good")

    graph = LOOP.with_counter(Counter("reviews", 2)).with_state(
        StateSpec("review", effect=review, outcomes=("good", "poor")),
        [
            Transition("review", came_back("good"), "terminal", ends="completed"),
            Transition("review", came_back("poor"), "pre_step", spends="reviews"),
            Transition("review", None, "terminal", ends="handed_off"),
        ],
        entered_by="post_llm.otherwise",
    )
    graph = with_wait(graph)
    if at == "another state":
        rows = [Transition("check", came_back("good"), "review"), Transition("check", None, "review")]
        graph = graph.with_state(
            StateSpec("check", effect=check, outcomes=("good",)), rows, entered_by="post_llm.otherwise"
        )
    agent = Agent(ScriptedModel(["draft", "better"]), graph=graph, tools=[pay], host=host)
    first = asyncio.run(await_run(agent.run("go", run_id="one")))
    assert isinstance(first.outcome, UserInputRequested)
    assert done == []
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert (result.ok, noted(result), done) == (True, "paid 5", [5])


@pytest.mark.parametrize("at", ["the state", "the waiting state"])
def test_guards_find_no_result_of_a_state_while_its_call_waits_and_its_effect_does(host: Host, at: str) -> None:
    found: list[Any] = []

    async def review(context: StateContext) -> str:
        found.append(context.run.state_results.get("review"))
        if context.run.answer == "draft":
            return "poor"
        await context.call_tool("pay", {"amount": 5})
        return "good"

    def reviewed(run: RunState) -> bool:
        return "review" in run.state_results and run.answer != "draft"

    graph = LOOP.with_state(
        StateSpec("review", effect=review),
        [Transition("review", reviewed, "terminal", ends="completed"), Transition("review", None, "pre_step")],
        entered_by="post_llm.otherwise",
    )
    graph = with_wait(graph)
    if at == "the waiting state":
        graph = graph.with_transition(Transition("asking", reviewed, "terminal", ends="completed"))
    agent = Agent(ScriptedModel(["draft", "better"]), graph=graph, tools=[pay], host=host)
    first = asyncio.run(await_run(agent.run("go", run_id="one")))
    assert isinstance(first.outcome, UserInputRequested)
    assert done == []
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert (result.ok, noted(result), done) == (True, "good", [5])
    assert found == [None, "poor", "poor"]


@pytest.mark.parametrize("swallow", [Exception, BaseException])
def test_an_effect_cannot_go_on_past_a_call_that_waits(swallow: type[BaseException]) -> None:
    async def review(context: StateContext) -> str:
        with contextlib.suppress(swallow):
            await context.call_tool("pay", {"amount": 5})
        await context.call_tool("look", {"at": "b"})
        return "went on"

    agent = Agent(ScriptedModel(["draft"]), graph=waiting(review), tools=[look, pay], host=Host(secret=SECRET))
    first = asyncio.run(await_run(agent.run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert done == []
    assert noted(resumed(agent, first, Allow())) == "went on"
    assert done == [5, "b"]


async def cut_off_after(records: list[Any], count: int) -> MemoryStore:
    """A store that has the first records of a run alone, as after a crash."""
    store = MemoryStore()
    lease = await store.acquire("one", "a process that died", new=True, keyring=Keyring(SECRET))
    await store.append(lease, with_own_macs(records[:count], Keyring(SECRET)), "running")
    await store.release(lease)
    return store


def test_cut_off_after_any_record_a_run_repeats_no_call_that_had_its_result() -> None:
    calls: list[str] = []

    def answer(messages: Any) -> Any:
        text = messages[-1].content
        calls.append(text)
        return ProviderError("gone") if text == "b" else said(f"re {text}", 10)

    @tool(idempotent=True)
    def note(text: str) -> str:
        """Take a note."""
        calls.append(text)
        return f"noted {text}"

    async def review(context: StateContext) -> list[str]:
        told = [(await context.ask_model("a")).message.content]
        told.append((await context.call_tool("note", {"text": "n"})).content)
        with contextlib.suppress(ModelError):
            await context.ask_model("b")
        told.append((await context.ask_model("c")).message.content)
        return told

    def agent(store: MemoryStore) -> Agent:
        model = ScriptedModel([answer] * 9)
        return Agent(model, graph=reviewing(review), tools=[note], host=Host(secret=SECRET, store=store))

    whole = MemoryStore()
    expected = asyncio.run(await_run(agent(whole).run("go", run_id="one")))
    assert calls == ["go", "a", "n", "b", "c"]
    records = asyncio.run(whole.records("one"))
    for count in range(1, len(records)):
        ended = {r.data["eid"] for r in expected.journal[:count] if r.kind == "effect.result"}
        made = [text for number, text in enumerate(["a", "n", "b", "c"], 1) if f"review:1:{number}" in ended]
        calls.clear()
        (unfinished,) = asyncio.run(agent(asyncio.run(cut_off_after(records, count))).unfinished_runs())
        result = asyncio.run(await_run(unfinished))
        replied = any(
            r.kind == "transition" and r.data["transition"] == "call_llm.otherwise" for r in expected.journal[:count]
        )
        assert calls == [each for each in ["go", "a", "n", "b", "c"] if each not in [*made, *(["go"] * replied)]]
        assert noted(result) == ["re a", "noted n", "re c"]
        assert (result.usage, result.run_state.model_calls) == (expected.usage, 4)
        assert dump_state(result.run_state)["state_visits"] == {"review": 1}


# -- what an effect cannot do -------------------------------------------------------------------------------


def test_an_effect_makes_one_call_at_a_time() -> None:
    async def slowly(_: Any) -> str:
        await asyncio.sleep(0)
        return "yes"

    async def review(context: StateContext) -> None:
        critic = ScriptedModel([slowly, slowly])
        await asyncio.gather(context.ask_model("one", model=critic), context.ask_model("two", model=critic))

    assert_aborted(run(review), "the effect of 'review' makes one call at a time")


def test_its_context_ends_with_the_effect() -> None:
    kept: list[StateContext] = []
    run(kept.append, "late")

    async def later() -> None:
        await kept[0].ask_model("too late?")

    with pytest.raises(StateEffectError, match="the effect of 'review' has ended"):
        asyncio.run(later())


def test_an_effect_that_does_not_await_its_call_is_refused() -> None:
    async def review(context: StateContext) -> None:
        task = asyncio.create_task(context.ask_model("?", model=ScriptedModel([hanging()])))
        done.append(task)
        await asyncio.sleep(0)

    assert_aborted(run(review), "the effect of 'review' ended while it was still in a call")


def test_an_effect_cannot_change_the_run() -> None:
    def review(context: StateContext) -> None:
        with contextlib.suppress(TypeError):
            context.run.messages.append(Message.user("forged"))

    result = run(review)
    assert_aborted(result, "review tried to change the run")
    assert [m.content for m in result.messages] == ["go", "draft"]


def test_the_record_of_a_call_that_waits_is_not_in_what_user_code_sees() -> None:
    """It says whether a person has approved the call, and can be changed."""
    seen: list[Any] = []

    @hook("asking")
    def look_closely(context: HookContext) -> None:
        seen.append(dict(context.run.state_calls))

    async def review(context: StateContext) -> None:
        seen.append(dict(context.run.state_calls))
        await context.call_tool("pay", {"amount": 5})

    host = Host(secret=SECRET)
    agent = Agent(ScriptedModel(["draft"]), graph=waiting(review), tools=[pay], host=host, hooks=[look_closely])
    assert resumed(agent, asyncio.run(await_run(agent.run("go"))), Allow()).ok
    assert seen == [{}] * len(seen)
    assert len(seen) >= 3


# -- a process that dies ------------------------------------------------------------------------------------


def step(folder: Path, where: str, number: int, code: int = 0) -> dict[str, Any]:
    """One step of ``state_effect_crash``, in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.helpers.state_effect_crash", str(folder), where, str(number)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=child_environment(),
    )
    assert child.returncode == code, child.stderr
    told: dict[str, Any] = json.loads(child.stdout or "{}")
    return told


def check_store(folder: Path) -> None:
    store = SqliteStore(folder / "runs.db")
    (head,) = asyncio.run(store.heads())
    assert verify(head.run_id, asyncio.run(store.records(head.run_id)), head).code == GOOD
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "asked", "looked"),
    [("after the first question", 2, 1), ("in look", 2, 2), ("after send", 2, 1), ("second question", 3, 1)],
)
def test_after_a_crash_what_was_completed_is_not_repeated(tmp_path: Path, where: str, asked: int, looked: int) -> None:
    step(tmp_path, where, 1, code=9)
    told = step(tmp_path, where, 2)
    assert told["noted"] == ["first", "seen", "sent", "second"]
    assert (told["asked"], told["looked"], told["sent"]) == (asked, looked, 1)
    assert told["model_calls"] == 3  # one of the loop, and the two of the effect that were completed
    assert len(set(told["keys"])) == 1  # an idempotent tool that is run again gets the same key
    check_store(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "noted_as", "sent"), [("ran", "it was sent", 1), ("did_not_run", "sent", 2)])
def test_after_a_crash_in_a_tool_that_is_not_idempotent_the_run_waits_for_a_person(
    tmp_path: Path, answer: str, noted_as: str, sent: int
) -> None:
    step(tmp_path, "in send", 1, code=9)
    waits = step(tmp_path, "in send", 2)
    assert (waits["kind"], waits["tool"], waits["sent"]) == ("in_doubt", "send", 1)
    told = step(tmp_path, answer, 3)
    assert told["noted"] == ["first", "seen", noted_as, "second"]
    assert (told["asked"], told["looked"], told["sent"]) == (2, 1, sent)
    check_store(tmp_path)


@pytest.mark.parametrize("depth", [100, 300, 1000, 100_000])
def test_arguments_that_are_nested_too_deeply_are_a_failed_call(depth: int) -> None:
    @tool
    def take(thing: Any) -> str:
        """Take a thing."""
        done.append("taken")
        return "taken"

    thing: Any = "x"
    for _ in range(depth):
        thing = [thing]
    results: list[Any] = []

    async def effect(context: StateContext) -> None:
        results.append(await context.call_tool("take", {"thing": thing}))

    result = Agent(ScriptedModel(["ok"]), tools=[take], graph=reviewing(effect)).run_sync("go")
    assert result.output == "ok"
    assert (results[0].status, done) == ("failed", [])
    assert "nested more than 100 deep" in results[0].content
