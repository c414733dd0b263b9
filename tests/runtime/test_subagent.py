"""Sub-agents as tools: their cost, budget, cancellation, and how they wait for a human."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm import (
    Action,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    ContextOverflowError,
    DefaultPolicy,
    Deny,
    Edit,
    Event,
    FailureKind,
    Handoff,
    HookContext,
    Host,
    Message,
    ModelRequest,
    PartialRunSummary,
    ProviderError,
    Reply,
    Role,
    RunCancelled,
    RunError,
    RunResult,
    Runs,
    RunState,
    RunWarning,
    StaleLease,
    StateContext,
    StateSpec,
    ToolCall,
    ToolDefinitionError,
    ToolError,
    ToolFinished,
    Transition,
    Usage,
    UserInputRequested,
    allow,
    deny,
    hand_over,
    hook,
    observer,
    permissions,
    tool,
)
from agentfsm import ask as ask_first
from agentfsm.agent.subagent import cap_guardrails
from agentfsm.errors import HumanReplyError, JournalGraphError, StoreError, SuspensionGraphError, SuspensionToolError
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.purge import purge_runs
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.journal.store import Lease
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.loop.tool_batch import charge
from agentfsm.loop.transition_table import LOOP
from agentfsm.runtime.delegation import BudgetShare, CallingRun
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.provider_rules import check_transcript
from tests.helpers.scenarios import await_run, resumed
from tests.helpers.stepped_clock import SteppedClock
from tests.helpers.taped_store import TapedStore, restore

SECRET = b"shared by all processes of these tests"


def said(text: str, tokens: int = 0, usd: float = 0.0) -> Reply:
    return Reply(Message.assistant(text), usage=Usage(tokens, 0, 0, usd))


def calling(*calls: Any, tokens: int = 0) -> Reply:
    own = tuple(replace(c, id=c.id or f"c{i}_{c.name}") for i, c in enumerate(calls))
    return Reply(Message.assistant("", own), usage=Usage(tokens))


def last(messages: Any) -> str:
    return messages[-1].content


def ask(question: str) -> str:
    """Ask the user."""
    raise AssertionError(question)


done: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    done.append(amount)
    return f"paid {amount}"


def note(text: str) -> str:
    """Take a note."""
    done.append(text)
    return f"noted {text}"


class Seen:
    """Every event of the runs that it watches."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.watch = observer(self.events.append)

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def check_end(result: RunResult) -> None:
    check_transcript(result.messages, request=False)


# -- a call and its result --------------------------------------------------------------------------------


def test_a_call_is_answered_by_a_run_of_its_own() -> None:
    model = RecordingModel(ScriptedModel(["Paris"]))
    helper = Agent(model, instructions="You know capitals.")
    agent = Agent(
        ScriptedModel([call("geo", task="capital of France?"), last]), tools=[helper.as_tool("geo", "Knows capitals.")]
    )
    result = agent.run_sync("go")
    assert result.output == "Paris"
    assert [m.content for m in model.requests[0].messages] == ["You know capitals.", "capital of France?"]
    check_end(result)


def test_a_sub_agent_is_described_like_any_tool() -> None:
    model = RecordingModel(ScriptedModel(["ok"]))
    helper = Agent(ScriptedModel([]))
    Agent(model, tools=[helper.as_tool("geo", "Knows capitals.")]).run_sync("go")
    (spec,) = model.requests[0].tools
    assert (spec.name, spec.description) == ("geo", "Knows capitals.")
    assert list(spec.parameters["properties"]) == ["task"]
    assert spec.parameters["required"] == ["task"]


def test_a_typed_answer_is_sent_as_json() -> None:
    helper = Agent(ScriptedModel(["[1, 2]"]), output_type=list[int])
    agent = Agent(ScriptedModel([call("count", task="x"), last]), tools=[helper.as_tool("count", "Counts.")])
    assert agent.run_sync("go").output == "[1,2]"


def test_both_runs_know_each_other() -> None:
    above, below = Seen(), Seen()
    helper = Agent(ScriptedModel(["x", "y"]), hooks=[below.watch])
    agent = Agent(
        ScriptedModel([calling(call("h", "first", task="a"), call("h", "second", task="b")), "ok"]),
        tools=[helper.as_tool("h", "Helps.")],
        hooks=[above.watch],
    )
    result = asyncio.run(await_run(agent.run("go", session_id="talk", run_id="top")))
    told = [e.result.run_id for e in above.of(ToolFinished)]
    assert len(set(told)) == 2
    assert sorted(told) == sorted({e.run_id for e in below.events})
    created = [r.data for r in result.journal if r.kind == "effect.result"]
    assert [c["out"]["run_id"] for c in created] == told


def test_a_sub_agents_journal_names_the_run_and_the_call_that_it_works_for() -> None:
    store = MemoryStore()
    helper = Agent(ScriptedModel(["x"]))
    agent = Agent(
        ScriptedModel([call("h", "one", task="a"), "ok"]),
        tools=[helper.as_tool("h", "Helps.")],
        host=Host(store=store),
    )
    asyncio.run(await_run(agent.run("go", session_id="talk", run_id="top")))
    ids = [h.run_id for h in asyncio.run(store.heads())]
    assert len(ids) == 2
    (child,) = [i for i in ids if i != "top"]
    run = rehydrate(asyncio.run(store.records(child))).run
    assert (run.parent, run.session_id) == (("top", "one"), "talk")
    assert rehydrate(asyncio.run(store.records("top"))).run.parent is None


@pytest.mark.parametrize(
    ("ending", "part"),
    [
        ([call("return_unable", rationale="no map", suggested_next_steps=["buy one"])], "no map"),
        ([ContextOverflowError("long")] * 3, "stopped early|hands the task back"),
    ],
)
def test_a_sub_agent_that_fails_is_a_failing_tool(ending: list[Any], part: str) -> None:
    helper = Agent(ScriptedModel(ending), preset="funnel")
    agent = Agent(ScriptedModel([call("h", task="x"), last]), tools=[helper.as_tool("h", "Helps.")])
    result = agent.run_sync("go")
    assert result.ok
    assert re.search(part, result.output)
    check_end(result)


def test_failing_again_and_again_is_handed_back_with_the_sub_agents_reasons() -> None:
    unable = [call("return_unable", rationale=f"no map {i}", blockers=["map lost"]) for i in range(9)]
    helper = Agent(ScriptedModel(unable), preset="funnel")
    agent = Agent(ScriptedModel([call("h", task=str(i)) for i in range(9)]), tools=[helper.as_tool("h", "Helps.")])
    result = agent.run_sync("go")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.tool_error
    assert "map lost" in result.outcome.blockers


def test_calling_it_outside_a_run_is_an_error() -> None:
    geo = Agent(ScriptedModel([])).as_tool("geo", "Knows.")
    with pytest.raises(ToolError, match="sub-agent"):
        asyncio.run(geo(task="x"))


@pytest.mark.parametrize("name", ["", "a b", "x" * 65])
def test_a_name_that_no_wire_takes_is_refused(name: str) -> None:
    with pytest.raises(ToolDefinitionError, match="name"):
        Agent(ScriptedModel([])).as_tool(name, "x")


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ToolDefinitionError, match="timeout"):
        Agent(ScriptedModel([])).as_tool("x", "x", timeout=0)


# -- budgets ------------------------------------------------------------------------------------------------


def test_what_a_sub_agent_uses_up_is_charged_to_the_calling_run() -> None:
    helper = Agent(ScriptedModel([calling(call("note", text="a"), tokens=10), said("x", 5, 0.25)]), tools=[note])
    agent = Agent(
        ScriptedModel([calling(call("h", task="a"), tokens=100), said("ok", 1000, 0.5)]),
        tools=[helper.as_tool("h", "Helps.")],
    )
    assert agent.run_sync("go").usage == Usage(1115, 0, 0, 0.75)


def test_tokens_that_a_sub_agent_spends_end_the_calling_run_when_they_are_too_many() -> None:
    helper = Agent(ScriptedModel([said("x", 90)]))
    agent = Agent(
        ScriptedModel([calling(call("h", task="a"), tokens=20), "never said"]),
        tools=[helper.as_tool("h", "Helps.")],
        guardrails=AgentGuardrails(max_tokens=100, on_limit="stop"),
    )
    result = agent.run_sync("go")
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.token_limit
    check_end(result)


def test_a_sub_agent_stops_at_what_is_left_of_the_budget_above() -> None:
    calls = [calling(call("note", text=str(i)), tokens=10) for i in range(50)]
    helper = Agent(ScriptedModel(calls), tools=[note], guardrails=AgentGuardrails(on_limit="stop"))
    agent = Agent(
        ScriptedModel([calling(call("h", task="a"), tokens=20), last]),
        tools=[helper.as_tool("h", "Helps.")],
        guardrails=AgentGuardrails(max_tokens=65, on_limit="stop"),
    )
    result = agent.run_sync("go")
    assert len(done) == 5  # 65 - 20 = 45 tokens: the fifth call of ten is the one that goes over
    assert result.usage.total_tokens == 70


def test_with_nothing_left_no_sub_agent_is_begun() -> None:
    model = ScriptedModel(["never said"])
    agent = Agent(
        ScriptedModel([calling(call("h", task="a"), tokens=100)]),
        tools=[Agent(model).as_tool("h", "Helps.")],
        guardrails=AgentGuardrails(max_tokens=100, on_limit="stop"),
    )
    result = agent.run_sync("go")
    assert model.calls == 0
    assert result.messages[-1].content.startswith("Not run: ")
    check_end(result)


@pytest.mark.slow
@given(
    together=st.integers(1, 6),
    limit=st.integers(1, 120),
    spent=st.integers(0, 50),
    each=st.lists(st.integers(3, 40), min_size=6, max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_those_that_run_together_spend_no_more_than_is_left_but_for_one_reply_each(
    together: int, limit: int, spent: int, each: list[int]
) -> None:
    """Sub-agents that would go on forever, side by side, each with replies of its own size."""

    def endless(tokens: int) -> Agent:
        steps = iter(range(10_000))

        def again(_: Any) -> Reply:
            return calling(call("note", text=str(next(steps))), tokens=tokens)

        rest = AgentGuardrails(max_iterations=1000, on_limit="stop")
        return Agent(ScriptedModel([again] * 500), tools=[note], guardrails=rest)

    helpers = [endless(each[i]).as_tool(f"h{i}", "Helps.", parallel=True) for i in range(together)]
    agent = Agent(
        ScriptedModel([calling(*(call(f"h{i}", task="x") for i in range(together)), tokens=spent)]),
        tools=helpers,
        guardrails=AgentGuardrails(max_tokens=limit, on_limit="stop"),
    )
    result = agent.run_sync("go")
    most = max(limit - spent, 0) + sum(each[:together])
    assert result.usage.total_tokens - spent < most or limit <= spent
    check_end(result)


def test_each_of_those_that_run_together_has_an_equal_share() -> None:
    seen = Seen()
    models = [ScriptedModel([calling(call("note", text=f"{i} {n}"), tokens=10) for n in range(9)]) for i in range(3)]
    rest = AgentGuardrails(on_limit="stop")
    helpers = [
        Agent(m, tools=[note], hooks=[seen.watch], guardrails=rest).as_tool(f"h{i}", "Helps.", parallel=True)
        for i, m in enumerate(models)
    ]
    agent = Agent(
        ScriptedModel([calling(*(call(f"h{i}", task="x") for i in range(3)), tokens=10)]),
        tools=helpers,
        guardrails=AgentGuardrails(max_tokens=100, on_limit="stop"),
    )
    result = agent.run_sync("go")
    assert [m.calls for m in models] == [3, 3, 3]  # 90 are left: 30 for each
    assert result.usage.total_tokens == 100


def calling_run(share: BudgetShare | None = None, iterations: int = 0, **fields: Any) -> CallingRun:
    run = RunState("r", **fields)
    charge(run, None, iterations)
    return CallingRun(run, Host(), share or BudgetShare())


def test_results_that_came_before_the_process_died_are_counted_among_what_is_spent() -> None:
    limits = AgentGuardrails(max_iterations=30, max_tokens=100, max_cost_usd=1.0)
    share = BudgetShare(2, Usage(50, cost_usd=0.5), 9)
    caller = calling_run(share, 1, guardrails=limits, usage=Usage(10, cost_usd=0.1))
    given_limits = cap_guardrails(AgentGuardrails(), caller)
    assert given_limits is not None
    assert given_limits.max_tokens == 20
    assert given_limits.max_cost_usd == pytest.approx(0.2)
    assert given_limits.max_iterations == 10  # 30 - 1 - 9, for two
    assert given_limits.max_execution_time_s == 300  # time passes for both at once


def test_too_little_for_all_is_nothing_for_each() -> None:
    caller = calling_run(BudgetShare(3), guardrails=AgentGuardrails(max_tokens=12), usage=Usage(10))
    assert cap_guardrails(AgentGuardrails(), caller) is None


@pytest.mark.parametrize(("callers", "expected"), [(None, 20), (100, 20), (15, 15)])
def test_a_reply_grants_a_sub_agent_its_own_tokens_once_more_within_what_its_caller_has_left(
    callers: int | None, expected: int
) -> None:
    """Its own limit is 10 tokens, and it has used them; its caller has been charged for them."""
    own = AgentGuardrails(max_tokens=10)
    caller = calling_run(BudgetShare(), guardrails=AgentGuardrails(max_tokens=callers), usage=Usage(10))
    request = PendingRequest("limit", "And now?", failure_kind=FailureKind.token_limit)
    state = RunState("child", parent=("run", "call"), guardrails=own, usage=Usage(10), pending_request=request)
    given_limits = cap_guardrails(own, caller, state, None, HumanReply("text", "go on"))
    assert given_limits is not None
    assert given_limits.max_tokens == expected


def test_a_reply_grants_a_sub_agent_nothing_of_a_budget_that_its_caller_has_used_up() -> None:
    own = AgentGuardrails(max_tokens=10)
    caller = calling_run(BudgetShare(), guardrails=AgentGuardrails(max_tokens=10), usage=Usage(10))
    request = PendingRequest("limit", "And now?", failure_kind=FailureKind.token_limit)
    state = RunState("child", parent=("run", "call"), guardrails=own, usage=Usage(10), pending_request=request)
    assert cap_guardrails(own, caller, state, None, HumanReply("text", "go on")) is None


def test_a_sub_agents_run_that_cannot_be_extended_ends_and_the_calling_run_goes_on() -> None:
    async def scenario() -> None:
        host, limits = Host(secret=SECRET, store=MemoryStore()), AgentGuardrails(max_tokens=10)
        helper = Agent(ScriptedModel([calling(call("note", text="a"), tokens=10)] * 2), tools=[note], guardrails=limits)
        script = [calling(call("h", task="x")), last]
        agent = Agent(ScriptedModel(script), tools=[helper.as_tool("h", "Helps.")], guardrails=limits, host=host)
        first = await agent.run("go", run_id="top")
        assert isinstance(first.outcome, UserInputRequested)
        assert (first.outcome.kind, first.outcome.asker) == ("limit", "h")
        result = await agent.resume("top", "go on")
        assert "nothing is left of the budget" in str(result.messages[-1].content) + str(result.output)
        assert host.store is not None
        assert [head.status for head in await host.store.heads() if head.run_id != "top"] == ["finished"]

    asyncio.run(scenario())


optional = st.one_of(st.none(), st.integers(1, 50))


@given(
    own=st.tuples(st.integers(1, 50), optional, optional, optional, st.integers(1, 300)),
    limits=st.tuples(st.integers(1, 50), optional, optional, optional, st.integers(1, 300)),
    spent=st.tuples(*[st.integers(0, 60)] * 5),
)
def test_each_limit_is_the_smaller_of_its_own_and_what_is_left(own: Any, limits: Any, spent: Any) -> None:
    names = ("max_iterations", "max_execution_time_s", "max_tokens", "max_cost_usd", "max_steps")
    caller = calling_run(
        None,
        spent[0],
        guardrails=AgentGuardrails(**dict(zip(names, limits, strict=True))),
        elapsed_s=spent[1],
        usage=Usage(spent[2], 0, 0, spent[3]),
        counters={"steps": spent[4]},
    )
    given_limits = cap_guardrails(AgentGuardrails(**dict(zip(names, own, strict=True))), caller)
    left = [None if limit is None else limit - gone for limit, gone in zip(limits, spent, strict=True)]
    if any(x is not None and x <= 0 for x in left):
        assert given_limits is None
        return
    assert given_limits is not None
    for name, mine, theirs in zip(names, own, left, strict=True):
        expected = min((x for x in (mine, theirs) if x is not None), default=None)
        assert getattr(given_limits, name) == expected


def chatting(tools: Any = (), **limits: Any) -> Agent:
    """A sub-agent that calls its tool again and again, with an argument of its own each time."""
    steps = iter(range(10_000))

    def again(_: Any) -> Reply:
        return calling(call("note", text=str(next(steps))))

    return Agent(ScriptedModel([again] * 500), tools=[note, *tools], guardrails=AgentGuardrails(**limits))


def delegating(times: int) -> ScriptedModel:
    """The model of a run that calls a sub-agent again and again."""
    return ScriptedModel([call("h", task=str(n)) for n in range(times)])


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_every_model_call_of_a_sub_agent_counts_towards_max_iterations(limit: int) -> None:
    helper, model = chatting(on_limit="stop"), delegating(20)
    rest = AgentGuardrails(max_iterations=limit, on_limit="stop")
    result = Agent(model, tools=[helper.as_tool("h", "Helps.")], guardrails=rest).run_sync("go")
    made = model.calls + helper.model.calls  # type: ignore[attr-defined]
    assert made == limit
    assert (result.run_state.model_calls, result.run_state.iterations) == (limit, limit)
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.iteration_limit
    check_end(result)


@pytest.mark.parametrize(
    ("above", "below", "ending"),
    [
        ("stop", "ask_user", PartialRunSummary),
        ("handoff", "ask_user", Handoff),
        ("ask_user", "ask_user", UserInputRequested),
        ("ask_user", "stop", UserInputRequested),
    ],
)
def test_a_sub_agent_asks_nobody_about_a_limit_if_its_caller_does_not(above: Any, below: Any, ending: type) -> None:
    """Nobody watches the calling run; one whose sub-agent stops reaches its own limit next, and asks there."""
    helper, model = chatting(on_limit=below), delegating(20)
    rest = AgentGuardrails(max_iterations=5, on_limit=above)
    result = Agent(model, tools=[helper.as_tool("h", "Helps.")], guardrails=rest).run_sync("go")
    assert isinstance(result.outcome, ending)
    asks = isinstance(result.outcome, UserInputRequested)
    assert (asks and bool(result.outcome.asker)) is (above == below)  # type: ignore[union-attr]
    assert result.run_state.model_calls == 5


def test_the_sub_agent_of_a_sub_agent_asks_nobody_about_a_limit_either() -> None:
    middle = Agent(delegating(20), tools=[chatting().as_tool("h", "Helps.")])
    rest = AgentGuardrails(max_iterations=6, on_limit="stop")
    result = Agent(delegating(20), tools=[middle.as_tool("h", "Helps.")], guardrails=rest).run_sync("go")
    assert isinstance(result.outcome, PartialRunSummary)


def test_sub_agents_that_run_together_share_the_model_calls_that_are_left() -> None:
    """Five of them, each of which would make a hundred: of ten calls one is made above, so each may make one."""
    helpers = [chatting(on_limit="stop", max_iterations=100) for _ in range(5)]
    tools = [each.as_tool(f"h{i}", "Helps.", parallel=True) for i, each in enumerate(helpers)]
    model = ScriptedModel([calling(*(call(f"h{i}", task="x") for i in range(5))), "ok"])
    result = Agent(model, tools=tools, guardrails=AgentGuardrails(max_iterations=10, on_limit="stop")).run_sync("go")
    assert [each.model.calls for each in helpers] == [1] * 5  # type: ignore[attr-defined]
    assert result.run_state.model_calls == 7
    assert result.output == "ok"


def test_the_model_calls_of_a_sub_agents_sub_agent_count_too() -> None:
    low, middle, top = chatting(on_limit="stop"), delegating(20), delegating(20)
    rest = AgentGuardrails(on_limit="stop")
    mid = Agent(middle, tools=[low.as_tool("h", "Helps.")], guardrails=rest)
    limits = AgentGuardrails(max_iterations=10, on_limit="stop")
    result = Agent(top, tools=[mid.as_tool("h", "Passes on.")], guardrails=limits).run_sync("go")
    assert top.calls + middle.calls + low.model.calls == 10  # type: ignore[attr-defined]
    assert result.run_state.model_calls == 10


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2, 3, 4, 9])
def test_the_model_calls_of_a_sub_agents_own_state_count_too(limit: int) -> None:
    critic = ScriptedModel(["again"] * 50)

    async def review(context: StateContext) -> None:
        await context.ask_model("Is it good?", model=critic)

    spec, rows = StateSpec("review", effect=review), [Transition("review", None, "pre_step")]
    below = ScriptedModel(["draft"] * 50)
    graph = LOOP.with_state(spec, rows, entered_by="post_llm.otherwise")
    helper = Agent(below, graph=graph, guardrails=AgentGuardrails(on_limit="stop"))
    above = delegating(20)
    limits = AgentGuardrails(max_iterations=limit, on_limit="stop")
    result = Agent(above, tools=[helper.as_tool("h", "Helps.")], guardrails=limits).run_sync("go")
    assert above.calls + below.calls + critic.calls == limit
    assert result.run_state.model_calls == limit


class TreeModel:
    """Replies with some rounds of calls of all sub-agents below it, then fails or answers; counts every reply."""

    name = "tree"

    def __init__(self, made: list[int], below: list[str], rounds: int, together: bool, fails: bool) -> None:
        self._made, self._below, self._rounds, self._together, self._fails = made, below, rounds, together, fails

    async def reply(self, request: Any) -> Reply:
        self._made.append(1)
        done_so_far = sum(m.role == "tool" for m in request.messages)
        wanted = [call(name, f"c{done_so_far}_{name}", task=f"{done_so_far}") for name in self._below]
        wanted = wanted if self._together else wanted[:1]
        if wanted and done_so_far < self._rounds * len(wanted):
            return Reply(Message.assistant("", tuple(wanted)))
        if self._fails:
            raise ProviderError("no")
        return said("ok")


def tree(draw: Any, made: list[int], depth: int, host: Host | None = None, limit: int | None = None) -> Agent:
    """An agent with a random tree of sub-agents below it."""
    count = draw(st.integers(0, 3)) if depth else 0
    parallel, own = draw(st.booleans()), limit or draw(st.integers(1, 12))
    tools = [tree(draw, made, depth - 1).as_tool(f"h{i}", "Helps.", parallel=parallel) for i in range(count)]
    rounds, together, fails = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.integers(0, 4)) == 0
    model = TreeModel(made, [f"h{i}" for i in range(count)], rounds, together, fails and limit is None)
    limits = AgentGuardrails(max_iterations=own, on_limit=draw(st.sampled_from(["stop", "handoff"])))
    return Agent(model, tools=tools, guardrails=limits, host=host)


@pytest.mark.slow
@given(data=st.data(), limit=st.integers(1, 30), stored=st.booleans())
@settings(max_examples=60, deadline=None)
def test_however_sub_agents_are_nested_they_make_no_more_model_calls_than_are_left(
    data: st.DataObject, limit: int, stored: bool
) -> None:
    made: list[int] = []
    store = MemoryStore() if stored else None
    agent = tree(data.draw, made, 3, Host(store=store), limit)
    result = asyncio.run(await_run(agent.run("go", run_id="top")))
    assert len(made) <= limit
    assert result.run_state.model_calls == len(made)
    check_end(result)
    if store is not None:
        assert dump_state(rehydrate(asyncio.run(store.records("top"))).run) == dump_state(result.run_state)


def test_a_sub_agents_own_limit_applies_where_it_is_lower() -> None:
    helper = chatting(on_limit="stop", max_iterations=3)
    agent = Agent(ScriptedModel([call("h", task="x"), "ok"]), tools=[helper.as_tool("h", "Helps.")])
    assert agent.run_sync("go").run_state.model_calls == 5
    assert helper.model.calls == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["fails", "times out"])
def test_the_model_calls_of_a_sub_agent_that_did_not_finish_are_charged(end: str) -> None:
    clock = SteppedClock()

    async def past_the_timeout(_: Any) -> str:
        clock.advance(100)
        await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        then: Any = ContextOverflowError("long") if end == "fails" else past_the_timeout
        policy = DefaultPolicy(actions={FailureKind.context_overflow: Action.handoff})
        helper = Agent(ScriptedModel([call("note", text="a"), then]), tools=[note], policy=policy)
        model = ScriptedModel([call("h", task="x"), "ok"])
        agent = Agent(model, tools=[helper.as_tool("h", "Helps.", timeout=60)], host=Host(clock=clock))
        result = await agent.run("go")
        assert result.ok
        assert result.run_state.model_calls == 4  # two of its own, and two below, the one that was cut off included

    clock.run(main())


def test_a_cancelled_sub_agents_model_calls_are_charged() -> None:
    async def main() -> None:
        reached = asyncio.Event()
        helper = Agent(ScriptedModel([call("note", text="a"), hanging(reached)]), tools=[note])
        run = Agent(ScriptedModel([call("h", task="x")]), tools=[helper.as_tool("h", "Helps.")]).run("go")
        task = asyncio.create_task(await_run(run))
        await reached.wait()
        run.cancel()
        assert (await task).run_state.model_calls == 3

    asyncio.run(main())


def test_a_persons_yes_to_a_sub_agent_extends_it_only_by_what_the_calling_run_has_left(host: Host) -> None:
    """Of 8 model calls 1 is made above and 3 below; then 3 more, and the last one is left for the calling run."""
    helper_model = chatting().model
    above = ScriptedModel([call("h", task="x"), last])

    def make() -> Agent:
        helper = Agent(helper_model, tools=[note], guardrails=AgentGuardrails(max_iterations=3))
        limits = AgentGuardrails(max_iterations=8)
        return Agent(above, tools=[helper.as_tool("h", "Helps.")], host=host, guardrails=limits)

    by_id = host.store is not None
    first = asyncio.run(await_run(make().run("go")))
    assert first.run_state.iterations == 4
    second = resumed(make(), first, "go on", by_id)
    assert second.run_state.iterations == 7
    third = resumed(make(), second, "go on", by_id)
    assert third.run_state.iterations == 8
    assert helper_model.calls == 7  # type: ignore[attr-defined]
    assert isinstance(third.outcome, UserInputRequested)
    assert third.outcome.asker == "h"
    fourth = resumed(make(), third, "go on", by_id)  # nothing is left: the calling run asks for itself
    assert helper_model.calls == 7  # type: ignore[attr-defined]
    assert isinstance(fourth.outcome, UserInputRequested)
    assert fourth.outcome.asker == ""
    assert fourth.outcome.originating_failure_kind is FailureKind.iteration_limit
    assert resumed(make(), fourth, "go on", by_id).ok


def test_the_journal_of_a_sub_agent_that_was_extended_gives_its_state_and_its_moves_back() -> None:
    store = MemoryStore()
    model = chatting().model
    above = ScriptedModel([call("h", task="x"), last])

    def make() -> Agent:
        helper = Agent(model, tools=[note], guardrails=AgentGuardrails(max_iterations=3))
        limits = AgentGuardrails(max_iterations=6)
        host = Host(secret=SECRET, store=store)
        return Agent(above, tools=[helper.as_tool("h", "Helps.")], host=host, guardrails=limits)

    first = asyncio.run(await_run(make().run("go", run_id="top")))
    second = resumed(make(), first, "go on", by_id=True)
    assert dump_state(rehydrate(asyncio.run(store.records("top"))).run) == dump_state(second.run_state)
    for head in asyncio.run(store.heads()):
        rows = asyncio.run(store.records(head.run_id))
        assert verify(head.run_id, rows, head).code in (GOOD, OPEN)
        assert replay(rows, LOOP).same
    (below,) = [h.run_id for h in asyncio.run(store.heads()) if h.run_id != "top"]
    assert (
        rehydrate(asyncio.run(store.records(below))).run.guardrails.max_iterations == 2
    )  # 6 - 4: what was left at the reply


def test_a_sub_agents_run_cannot_be_resumed_past_its_calling_run() -> None:
    store = MemoryStore()
    host = Host(secret=SECRET, store=store)
    helper = Agent(asking(answered), preset="funnel", host=host)
    agent = Agent(ScriptedModel([call("h", task="x")]), tools=[helper.as_tool("h", "Helps.")], host=host)
    asyncio.run(await_run(agent.run("go", run_id="top")))
    (below,) = [h.run_id for h in asyncio.run(store.heads()) if h.run_id != "top"]
    with pytest.raises(RunError, match="'top'"):
        asyncio.run(helper.resume(below, "a").load())
    with pytest.raises(RunError, match="'top'"):
        asyncio.run(helper.dismiss(below).load())


# -- permissions --------------------------------------------------------------------------------------------


def shell(command: str) -> str:
    """Run a command."""
    done.append(command)
    return f"ran {command}"


def helped(depth: int, rules: Any, below: Any = (), host: Host | None = None, make_model: Any = None) -> Agent:
    """An agent with permission rules whose sub-agent, at some depth, has a shell."""
    script = make_model or ScriptedModel([call("shell", command="rm"), last])
    agent = Agent(script, tools=[shell], hooks=[permissions(*below, otherwise="allow")] if below else [])
    for level in range(depth):
        tools, hooks = [agent.as_tool("h", "Helps.")], [permissions(*rules, otherwise="allow")]
        top = level == depth - 1
        model = ScriptedModel([call("h", task="x"), last])
        agent = Agent(model, tools=tools, hooks=hooks if top else [], host=host if top else None)
    return agent


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_the_calling_runs_permissions_deny_is_denied_to_sub_agents_at_every_depth(depth: int) -> None:
    result = helped(depth, [deny("shell", reason="no shell here")], below=[allow("shell")]).run_sync("go")
    assert done == []
    assert result.output == "Denied: no shell here"
    check_end(result)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_the_calling_runs_permissions_ask_about_is_asked_for_sub_agents_too(host: Host, depth: int) -> None:
    agent = helped(depth, [ask_first("shell", reason="May it?")], below=[allow("shell")], host=host)
    first = asyncio.run(await_run(agent.run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.kind, first.outcome.tool, first.outcome.question) == ("approval", "shell", "May it?")
    assert done == []
    result = resumed(agent, first, Allow(), by_id=host.store is not None)
    assert done == ["rm"]
    assert result.output == "ran rm"


@pytest.mark.parametrize("depth", [1, 2])
def test_an_edit_that_the_calling_runs_permissions_deny_is_refused_and_the_run_waits_on(host: Host, depth: int) -> None:
    rules = [deny("shell", where={"command": "sudo *"}, reason="no sudo"), ask_first("shell")]
    agent = helped(depth, rules, host=host)
    first = asyncio.run(await_run(agent.run("go")))
    for refused in ({"command": "sudo rm"}, {"order": "rm"}):
        with pytest.raises(HumanReplyError, match="still waits"):
            resumed(agent, first, Edit(refused), by_id=host.store is not None)
    assert done == []
    resumed(agent, first, Edit({"command": "ls"}), by_id=host.store is not None)
    assert done == ["ls"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rules_on_arguments_bind_sub_agents_at_every_depth(depth: int) -> None:
    """Also where they cannot be evaluated, and whatever the agents in between allow."""
    scripts = {"rm": "Denied: no rm", "RM": "Denied: no rm", "ls": "ran ls"}
    for command, answer in scripts.items():
        rules = [deny("shell", where={"command": "rm*"}, reason="no rm")]
        model = ScriptedModel([call("shell", command=command), last])
        assert helped(depth, rules, below=[allow("*")], make_model=model).run_sync("go").output == answer
    assert done == ["ls"]


def test_the_rules_of_every_agent_on_the_way_bind_the_last() -> None:
    inner = Agent(ScriptedModel([call("shell", command="rm x"), last]), tools=[shell])
    middle_rules = permissions(deny("shell", where={"command": "rm*"}, reason="not in the middle"), otherwise="allow")
    middle = Agent(
        ScriptedModel([call("h", task="x"), last]), tools=[inner.as_tool("h", "Helps.")], hooks=[middle_rules]
    )
    outer = Agent(
        ScriptedModel([call("m", task="x"), last]),
        tools=[middle.as_tool("m", "Helps.")],
        hooks=[permissions(otherwise="allow")],
    )
    assert outer.run_sync("go").output == "Denied: not in the middle"
    assert done == []


def test_the_sub_agents_own_permissions_apply_too() -> None:
    result = helped(1, [allow("shell")], below=[deny("shell", reason="not here")]).run_sync("go")
    assert done == []
    assert result.output == "Denied: not here"


def test_time_that_has_passed_since_the_batch_began_is_not_left_for_a_sub_agent() -> None:
    clock = FakeClock()

    @hook("dispatch_tool")
    def think(_: Any) -> None:
        clock.advance(20)

    seen: list[float | None] = []

    def look(_: Any) -> str:
        return "x"

    @hook("call_llm")
    def note_limit(context: HookContext) -> None:
        seen.append(context.run.guardrails.max_execution_time_s)

    helper = Agent(ScriptedModel([look]), hooks=[note_limit])
    agent = Agent(
        ScriptedModel([call("h", task="a"), "ok"]),
        tools=[helper.as_tool("h", "Helps.")],
        hooks=[think],
        host=Host(clock=clock),
        guardrails=AgentGuardrails(max_execution_time_s=30),
    )
    assert agent.run_sync("go").ok
    assert seen == [10]


def test_time_that_a_sub_agent_takes_is_time_of_the_calling_run() -> None:
    clock = FakeClock()

    def slow(_: Any) -> str:
        clock.advance(40)
        return "x"

    helper = Agent(ScriptedModel([slow]))
    agent = Agent(
        ScriptedModel([call("h", task="a"), "never said"]),
        tools=[helper.as_tool("h", "Helps.")],
        host=Host(clock=clock),
        guardrails=AgentGuardrails(max_execution_time_s=30, on_limit="stop"),
    )
    result = agent.run_sync("go")
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.time_limit


# -- cancellation -------------------------------------------------------------------------------------------


def hanging(reached: asyncio.Event) -> Callable[[Any], Awaitable[str]]:
    async def hang(_: Any) -> str:
        reached.set()
        await asyncio.Event().wait()
        return "never"

    return hang


@pytest.mark.parametrize("by", ["cancel", "task"])
def test_cancelling_a_run_cancels_its_sub_agent(by: str) -> None:
    async def main() -> None:
        seen, reached = Seen(), asyncio.Event()
        model = ScriptedModel([calling(call("note", text="a"), tokens=7), hanging(reached)])
        helper = Agent(model, tools=[note], hooks=[seen.watch])
        agent = Agent(ScriptedModel([call("h", task="x")]), tools=[helper.as_tool("h", "Helps.")])
        run = agent.run("go")
        task = asyncio.create_task(await_run(run))
        await reached.wait()
        if by == "cancel":
            run.cancel("enough")
            result = await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            result = run.result
        assert isinstance(result.outcome, RunCancelled)
        assert len(seen.of(RunCancelled)) == 1
        assert result.usage.total_tokens == 7  # what was spent is charged all the same
        check_end(result)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_sub_agent_that_times_out_is_cancelled_and_the_run_continues() -> None:
    async def main() -> None:
        seen = Seen()
        helper = Agent(ScriptedModel([hanging(asyncio.Event())]), hooks=[seen.watch])
        agent = Agent(ScriptedModel([call("h", task="x"), last]), tools=[helper.as_tool("h", "Helps.", timeout=0.05)])
        result = await agent.run("go")
        assert [m.content for m in result.messages if m.role == "tool"] == ["timed out after 0.05 s"]
        assert len(seen.of(RunCancelled)) == 1
        check_end(result)

    asyncio.run(main())


# -- waiting for a person -------------------------------------------------------------------------------------


def asking(*then: Any) -> ScriptedModel:
    return ScriptedModel([call("ask_user", question="Which one?", choices=["a", "b"]), *then])


def answered(messages: Any) -> Any:
    return call("return_done", output=f"person said: {messages[-1].content}")


def two(
    below: Callable[[], ScriptedModel], above: list[Any], host: Host, tools: Any = (), preset: str = "funnel"
) -> Callable[[], Agent]:
    """Makes both agents anew each time, as another process would; models go on with their scripts."""
    below_model, above_model = below(), ScriptedModel(above)

    def make() -> Agent:
        helper = Agent(below_model, preset=preset, tools=tools)  # its own host, with a secret of its own
        return Agent(above_model, tools=[helper.as_tool("h", "Helps."), note], host=host)

    return make


@pytest.fixture(params=["record", "store"])
def host(request: pytest.FixtureRequest) -> Host:
    return Host(secret=SECRET, store=MemoryStore() if request.param == "store" else None)


def test_a_sub_agents_question_is_the_question_of_the_calling_run(host: Host) -> None:
    make = two(lambda: asking(answered), [call("h", task="x"), last], host)
    first = asyncio.run(await_run(make().run("go")))
    outcome = first.outcome
    assert isinstance(outcome, UserInputRequested)
    assert (outcome.kind, outcome.question, outcome.choices) == ("question", "Which one?", ("a", "b"))
    assert outcome.asker == "h"
    assert first.decisions[-1].transition.id == "post_tool.question_asked"

    result = resumed(make(), first, "b", by_id=host.store is not None)
    assert result.output == "person said: b"
    assert [d.transition.id for d in result.decisions][:2] == ["suspended.approval_decided", "dispatch_tool.otherwise"]
    check_end(result)


def test_an_answer_for_a_sub_agent_reaches_it_where_the_row_for_replies_comes_first() -> None:
    replied = LOOP.transition("suspended.replied")
    graph = LOOP.without(replied.id).with_transition(replied, before="approval_decided")
    helper = Agent(asking(answered), preset="funnel").as_tool("h", "Helps.")
    agent = Agent(ScriptedModel([call("h", task="x"), last]), tools=[helper], graph=graph, host=Host(secret=SECRET))
    result = resumed(agent, asyncio.run(await_run(agent.run("go"))), "b", by_id=False)
    assert result.output == "person said: b"
    assert [d.transition.id for d in result.decisions][:2] == ["suspended.approval_decided", "dispatch_tool.otherwise"]


@pytest.mark.parametrize(
    ("answer", "told", "paid"),
    [(Allow(), "paid 5", [5]), (Deny("too much"), "Denied by the user: too much", []), (Edit({"amount": 2}), "2", [2])],
)
def test_a_sub_agents_approval_is_that_of_the_calling_run(host: Host, answer: Any, told: str, paid: list[int]) -> None:
    make = two(
        lambda: ScriptedModel([call("pay", amount=5), last]), [call("h", task="x"), last], host, [pay], "standard"
    )
    first = asyncio.run(await_run(make().run("go")))
    outcome = first.outcome
    assert isinstance(outcome, UserInputRequested)
    assert (outcome.kind, outcome.tool, outcome.arguments) == ("approval", "pay", {"amount": 5})
    assert done == []
    result = resumed(make(), first, answer, by_id=host.store is not None)
    assert told in result.output
    assert done == paid
    check_end(result)


def test_a_sub_agents_denial_is_not_the_calling_runs() -> None:
    host = Host(secret=SECRET)
    make = two(
        lambda: ScriptedModel([call("pay", amount=5), last]), [call("h", task="x"), last], host, [pay], "standard"
    )
    first = asyncio.run(await_run(make().run("go")))
    result = resumed(make(), first, Deny("no"))
    assert result.run_state.denials == 0
    assert result.ok


def test_a_sub_agents_spent_budget_is_asked_about_as_such(host: Host) -> None:
    model = ScriptedModel([call("note", text="1"), call("note", text="2"), "x"])

    def make() -> Agent:
        helper = Agent(model, tools=[note], guardrails=AgentGuardrails(max_iterations=2))
        return Agent(above, tools=[helper.as_tool("h", "Helps.")], host=host)

    above = ScriptedModel([call("h", task="x"), last])
    first = asyncio.run(await_run(make().run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.kind, first.outcome.originating_failure_kind) == ("limit", FailureKind.iteration_limit)
    result = resumed(make(), first, "go on", by_id=host.store is not None)
    assert result.output == "x"
    assert result.run_state.continues == 0  # it was the sub-agent's budget


def test_a_sub_agent_may_ask_more_than_once(host: Host) -> None:
    make = two(lambda: asking(call("ask_user", question="Sure?"), answered), [call("h", task="x"), last], host)
    by_id = host.store is not None
    second = resumed(make(), asyncio.run(await_run(make().run("go"))), "b", by_id)
    assert isinstance(second.outcome, UserInputRequested)
    assert second.outcome.question == "Sure?"
    assert resumed(make(), second, "yes", by_id).output == "person said: yes"


def test_the_other_calls_of_the_batch_run_in_their_turn(host: Host) -> None:
    batch = [call("note", text="before"), call("h", task="x"), call("note", text="after")]
    make = two(lambda: asking(answered), [calling(*batch), "ok"], host)
    first = asyncio.run(await_run(make().run("go")))
    assert done == ["before"]
    result = resumed(make(), first, "b", by_id=host.store is not None)
    assert done == ["before", "after"]
    assert [m.content for m in result.messages if m.role == "tool"] == [
        "noted before",
        "person said: b",
        "noted after",
    ]
    check_end(result)


def test_a_question_passes_through_two_sub_agents(host: Host) -> None:
    lowest, middle, top = asking(answered), ScriptedModel([call("low", task="x"), last]), [call("mid", task="x"), last]
    model = ScriptedModel(top)

    def make() -> Agent:
        low = Agent(lowest, preset="funnel").as_tool("low", "Asks.")
        return Agent(model, tools=[Agent(middle, tools=[low]).as_tool("mid", "Passes on.")], host=host)

    first = asyncio.run(await_run(make().run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.question, first.outcome.asker) == ("Which one?", "mid/low")
    result = resumed(make(), first, "a", by_id=host.store is not None)
    assert result.output == "person said: a"
    check_end(result)


def test_two_that_run_together_ask_one_after_the_other_and_then_both_continue(host: Host) -> None:
    models = [asking(answered), asking(answered)]
    above = ScriptedModel([calling(call("h0", task="x"), call("h1", task="x"), call("quick", text="q")), "ok"])
    quick = tool(name="quick", parallel=True)(note)

    def make() -> Agent:
        helpers = [Agent(m, preset="funnel").as_tool(f"h{i}", "Helps.", parallel=True) for i, m in enumerate(models)]
        return Agent(above, tools=[*helpers, quick], host=host)

    by_id = host.store is not None
    first = asyncio.run(await_run(make().run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert first.outcome.asker == "h0"
    assert done == ["q"]
    second = resumed(make(), first, "a", by_id)
    assert isinstance(second.outcome, UserInputRequested)
    assert second.outcome.asker == "h1"
    third = resumed(make(), second, "b", by_id)
    assert third.output == "ok"
    assert [m.content for m in third.messages if m.role == "tool"] == ["person said: a", "person said: b", "noted q"]
    assert done == ["q"]
    check_end(third)


def test_one_that_waited_continues_within_the_share_that_it_had(host: Host) -> None:
    """Of 100 tokens each has 50: the first spends its own at once, the second asks, and then spends no more either."""

    def spending(first: Any) -> ScriptedModel:
        return ScriptedModel([first, *(calling(call("note", text=f"n{n}"), tokens=10) for n in range(20))])

    asks = calling(call("ask_user", "q", question="Which?"), tokens=10)
    models = [spending(calling(call("note", text="a"), tokens=10)), spending(asks)]
    above = ScriptedModel([calling(call("h0", task="x"), call("h1", task="x"))])
    own, limit = AgentGuardrails(on_limit="stop"), AgentGuardrails(max_tokens=100, on_limit="stop")

    def make() -> Agent:
        helpers = [
            Agent(m, preset="funnel", tools=[note], guardrails=own).as_tool(f"h{i}", "Helps.", parallel=True)
            for i, m in enumerate(models)
        ]
        return Agent(above, tools=helpers, host=host, guardrails=limit)

    first = asyncio.run(await_run(make().run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    assert first.usage.total_tokens == 60
    result = resumed(make(), first, "a", by_id=host.store is not None)
    assert [m.calls for m in models] == [5, 5]
    assert result.usage.total_tokens == 100
    check_end(result)


def test_usage_is_charged_once_however_often_a_sub_agent_waits(host: Host) -> None:
    script = [
        calling(call("ask_user", "q1", question="A?"), tokens=1),
        calling(call("ask_user", "q2", question="B?"), tokens=10),
        calling(call("return_done", "d", output="x"), tokens=100),
    ]
    make = two(lambda: ScriptedModel(script), [calling(call("h", task="x"), tokens=1000), said("ok", 10_000)], host)
    by_id = host.store is not None
    first = asyncio.run(await_run(make().run("go")))
    assert first.usage.total_tokens == 1001
    second = resumed(make(), first, "a", by_id)
    assert second.usage.total_tokens == 1011
    assert resumed(make(), second, "b", by_id).usage.total_tokens == 11_111


def test_the_calling_run_can_be_dismissed_while_its_sub_agent_waits(host: Host) -> None:
    make = two(lambda: asking(), [call("h", task="x")], host)
    first = asyncio.run(await_run(make().run("go")))
    assert isinstance(first.outcome, UserInputRequested)
    result = asyncio.run(await_run(make().dismiss(first.outcome.suspension_record)))
    assert isinstance(result.outcome, RunCancelled)
    check_end(result)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_sub_agents_runs_end_with_the_calling_run_so_that_all_can_be_purged(lost: int, depth: int) -> None:
    """They wait, or a process died before the last commits, so that some of the runs were interrupted."""

    def make(store: Any) -> Agent:
        agent = Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay])
        for _ in range(depth):
            tools = [agent.as_tool("h", "Helps.")]
            agent = Agent(ScriptedModel([call("h", task="x")]), tools=tools, host=Host(secret=SECRET, store=store))
        return agent

    async def begin_and_dismiss() -> tuple[MemoryStore, RunResult]:
        before, store = TapedStore(), MemoryStore()
        await make(before).run("go", run_id="top")
        await restore(before.tape[: len(before.tape) - lost], store, Keyring(SECRET))
        return store, await make(store).dismiss("top", "enough")

    store, result = asyncio.run(begin_and_dismiss())
    assert isinstance(result.outcome, RunCancelled)
    heads = asyncio.run(store.heads())
    assert {head.status for head in heads} == {"finished"}
    for head in heads:
        assert verify(head.run_id, asyncio.run(store.records(head.run_id)), head).code == GOOD
    purged = asyncio.run(purge_runs(store, ["top"], Keyring(SECRET))).purged
    assert set(purged) == {head.run_id for head in heads}


def test_a_sub_agents_run_that_cannot_be_loaded_is_left_with_a_warning_when_its_caller_ends() -> None:
    async def scenario() -> None:
        def make(**more: Any) -> Agent:
            helper = Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay], **more)
            tools = [helper.as_tool("h", "Helps.")]
            return Agent(ScriptedModel([call("h", task="x")]), tools=tools, host=Host(secret=SECRET, store=store))

        store = MemoryStore()
        await make().run("go", run_id="top")
        other = make(graph=LOOP.without("pre_step.cost_limit"))
        events = [event async for event in other.dismiss("top", "enough")]
        (warning,) = [event.text for event in events if isinstance(event, RunWarning)]
        assert warning.startswith("run 'top-1.0' of the sub-agent 'h' was not ended: ")
        assert isinstance(events[-1], RunCancelled)
        assert {head.run_id: head.status for head in await store.heads()} == {"top": "finished", "top-1.0": "suspended"}

    asyncio.run(scenario())


class FromTranscript:
    """A model without a memory: it makes some calls, and answers once it has their results."""

    name = "from the transcript"

    def __init__(self, calls: list[ToolCall], answer: str) -> None:
        self.calls, self.answer = tuple(calls), answer

    async def reply(self, request: ModelRequest) -> Reply:
        has_results = request.messages[-1].role is Role.TOOL
        return Reply(Message.assistant(self.answer)) if has_results else Reply(Message.assistant("", self.calls))


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_runs_of_sub_agents_are_handed_over_with_their_caller(
    depth: int, number: int, is_cancelled: bool, tmp_path: Path
) -> None:
    """Otherwise the end of the call would end them as cancelled, and another process could not continue them."""
    begun: list[str] = []
    held = asyncio.Event()

    @tool(idempotent=True)
    async def look() -> str:
        """Look."""
        begun.append("look")
        await held.wait()
        return "seen"

    def make(store: Any) -> Agent:
        agent = Agent(FromTranscript([ToolCall("l", "look")], "helped"), tools=[look])
        for level in range(depth):
            calls = [ToolCall(f"c{n}", "h", {"task": str(n)}) for n in range(number if level == depth - 1 else 1)]
            tools = [agent.as_tool("h", "Helps.", parallel=True)]
            agent = Agent(FromTranscript(calls, "done"), tools=tools, host=Host(secret=SECRET, store=store))
        return agent

    async def scenario() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            run = make(store).run("go", run_id="top")
            awaiting = asyncio.create_task(await_run(run))
            while len(begun) < number:
                await asyncio.sleep(0)
            await hand_over(run)
            if is_cancelled:
                awaiting.cancel()
            heads = await store.heads()
            assert len(heads) == 1 + depth * number
            assert {(head.status, head.owner) for head in heads} == {("running", None)}
            held.set()
            with pytest.raises(asyncio.CancelledError if is_cancelled else StaleLease):
                await awaiting
            assert {head.status for head in await store.heads()} == {"running"}
            (again,) = await make(store).unfinished_runs()
            assert (await again).output == "done"
            assert len(begun) == 2 * number
            for head in await store.heads():
                assert (head.status, head.owner) == ("finished", None)
                assert (await Runs(store).get(head.run_id)).info.ending == "completed"
                assert verify(head.run_id, await store.records(head.run_id), head).code == GOOD

    asyncio.run(scenario())


@pytest.mark.parametrize("rule", [deny("h"), ask_first("h")], ids=["denied", "asked and denied"])
def test_a_sub_agents_run_that_was_cut_off_ends_with_its_caller_if_the_call_is_denied_since(rule: Any) -> None:
    begun, held, store = asyncio.Event(), asyncio.Event(), MemoryStore()

    @tool(idempotent=True)
    async def look() -> str:
        """Look."""
        begun.set()
        await held.wait()
        return "seen"

    def make(**more: Any) -> Agent:
        helper = Agent(FromTranscript([ToolCall("l", "look")], "helped"), tools=[look])
        tools, host = [helper.as_tool("h", "Helps.")], Host(secret=SECRET, store=store)
        return Agent(FromTranscript([ToolCall("c", "h", {"task": "x"})], "done"), tools=tools, host=host, **more)

    async def scenario() -> None:
        run = make().run("go", run_id="top")
        awaiting = asyncio.create_task(await_run(run))
        await begun.wait()
        await hand_over(run)
        held.set()
        with pytest.raises(StaleLease):
            await awaiting
        result = await make(hooks=[permissions(rule)]).resume("top")
        if isinstance(result.outcome, UserInputRequested):
            result = await make(hooks=[permissions(rule)]).resume("top", Deny("no"))
        assert result.output == "done"
        assert {(head.status, head.owner) for head in await store.heads()} == {("finished", None)}
        assert (await Runs(store).get("top-1.0")).info.ending == "cancelled"
        assert (await purge_runs(store, ["top"], Keyring(SECRET))).kept == ()

    asyncio.run(scenario())


class SlowlyReleased(MemoryStore):
    """A store on a server: to release a run takes a while, in which the others go on, and so does to acquire one."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.acquiring = asyncio.Event(), asyncio.Event()

    async def release(self, lease: Lease) -> None:
        await asyncio.sleep(0)
        self.go_on.set()
        for _ in range(50):
            await asyncio.sleep(0)
        await super().release(lease)

    async def acquire(self, run_id: str, *arguments: Any, **options: Any) -> Lease:
        if not options.get("new") or "-" not in run_id:
            return await super().acquire(run_id, *arguments, **options)
        self.acquiring.set()
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().acquire(run_id, *arguments, **options)


@pytest.mark.parametrize("when", ["in a call", "as the others begin"])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_run_of_a_sub_agent_ends_as_cancelled_while_it_is_handed_over_with_others(depth: int, when: str) -> None:
    """Each of them that notices first stops the calls beside it, which are handed over, too."""

    async def scenario() -> None:
        store, begun = SlowlyReleased(), list[str]()

        @tool(idempotent=True)
        async def look() -> str:
            """Look."""
            begun.append("look")
            await store.go_on.wait()
            return "seen"

        def make() -> Agent:
            agent = Agent(FromTranscript([ToolCall("l", "look")], "helped"), tools=[look])
            for level in range(depth):
                calls = [ToolCall(f"c{n}", "h", {"task": str(n)}) for n in range(3 if level == depth - 1 else 1)]
                tools = [agent.as_tool("h", "Helps.", parallel=True)]
                agent = Agent(FromTranscript(calls, "done"), tools=tools, host=Host(secret=SECRET, store=store))
            return agent

        run = make().run("go", run_id="top")
        awaiting = asyncio.create_task(await_run(run))
        while not (store.acquiring.is_set() if when == "as the others begin" else len(begun) == 3):
            await asyncio.sleep(0)
        await hand_over(run)
        with pytest.raises(StaleLease):
            await awaiting
        assert {(head.status, head.owner) for head in await store.heads()} == {("running", None)}
        begun_here = len(begun)
        (again,) = await make().unfinished_runs()
        assert (await again).output == "done"
        assert len(begun) == begun_here + 3
        for head in await store.heads():
            assert (head.status, head.owner) == ("finished", None)
            assert (await Runs(store).get(head.run_id)).info.ending == "completed"
            assert verify(head.run_id, await store.records(head.run_id), head).code == GOOD

    asyncio.run(scenario())


def test_a_run_whose_task_is_cancelled_while_its_sub_agents_runs_end_is_recorded_to_its_end() -> None:
    class SlowStore(MemoryStore):
        async def acquire(self, run_id: str, *arguments: Any, **options: Any) -> Any:
            lease = await super().acquire(run_id, *arguments, **options)
            if run_id != "top" and self.is_slow:
                reached.set()
                await held.wait()
            return lease

        is_slow = False

    def make(store: Any) -> Agent:
        helper = Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay])
        tools = [helper.as_tool("h", "Helps.")]
        return Agent(ScriptedModel([call("h", task="x")]), tools=tools, host=Host(secret=SECRET, store=store))

    async def scenario() -> None:
        store = SlowStore()
        await make(store).run("go", run_id="top")
        store.is_slow = True
        ending = asyncio.create_task(await_run(make(store).dismiss("top", "enough")))
        await reached.wait()
        ending.cancel()
        await asyncio.sleep(0)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
        heads = await store.heads()
        assert [(head.status, head.owner) for head in heads] == [("finished", None)] * 2
        for head in heads:
            assert verify(head.run_id, await store.records(head.run_id), head).code == GOOD

    reached, held = asyncio.Event(), asyncio.Event()
    asyncio.run(scenario())


def test_a_run_waits_on_while_its_sub_agent_is_missing_or_has_another_graph(host: Host) -> None:
    models = asking(answered), ScriptedModel([call("h", task="x"), last])

    def make(**more: Any) -> Agent:
        helper = Agent(models[0], preset="funnel", **more)
        return Agent(models[1], tools=[helper.as_tool("h", "Helps.")], host=host)

    first, stored = asyncio.run(await_run(make().run("go"))), host.store is not None
    other = make(graph=LOOP.without("pre_step.cost_limit"))
    with pytest.raises(JournalGraphError if stored else SuspensionGraphError):
        resumed(other, first, "b", by_id=stored)
    with pytest.raises(SuspensionToolError, match="sub-agent 'h'"):
        resumed(Agent(models[1], host=host), first, "b", by_id=stored)
    result = resumed(make(), first, "b", by_id=stored)
    assert result.ok
    check_end(result)


def test_a_run_whose_interrupted_sub_agent_has_another_graph_is_free_for_an_agent_that_has_the_right_one() -> None:
    """Also while somebody keeps the error, and the run with it."""

    async def scenario() -> None:
        before, store = TapedStore(), MemoryStore()
        models = asking(answered), ScriptedModel([call("h", task="x"), last])

        def make(on: MemoryStore, **more: Any) -> Agent:
            helper = Agent(models[0], preset="funnel", **more)
            return Agent(models[1], tools=[helper.as_tool("h", "Helps.")], host=Host(secret=SECRET, store=on))

        await make(before).run("go", run_id="top")
        await restore(before.tape[:-1], store, Keyring(SECRET))  # it died before it waited
        failed = make(store, graph=LOOP.without("pre_step.cost_limit")).resume("top")
        for _ in range(2):
            with pytest.raises(JournalGraphError):
                await failed
        assert isinstance((await make(store).resume("top")).outcome, UserInputRequested)
        assert (await make(store).resume("top", "b")).ok

    asyncio.run(scenario())


def test_a_record_is_good_for_one_answer() -> None:
    host = Host(secret=SECRET)
    make = two(lambda: asking(answered), [call("h", task="x"), last], host)
    first = asyncio.run(await_run(make().run("go")))
    resumed(make(), first, "b")
    with pytest.raises(Exception, match="already"):
        resumed(make(), first, "b")


def test_a_sub_agents_secret_arguments_are_not_shown_above() -> None:
    @tool(requires_approval=True, secret=["pin"])
    def open_safe(pin: str) -> str:
        """Open the safe."""
        return "open"

    store = MemoryStore()
    host = Host(secret=SECRET, store=store)
    make = two(
        lambda: ScriptedModel([call("open_safe", pin="canary-4711"), last]),
        [call("h", task="x"), last],
        host,
        [open_safe],
        "standard",
    )
    first = asyncio.run(await_run(make().run("go", run_id="top")))
    assert isinstance(first.outcome, UserInputRequested)
    assert first.outcome.arguments == {"pin": "(secret)"}
    written = "".join(
        r.body + r.hidden for h in asyncio.run(store.heads()) for r in asyncio.run(store.records(h.run_id))
    )
    assert "canary-4711" not in written


# -- the journal ------------------------------------------------------------------------------------------------


def test_the_journal_gives_the_live_state_back_at_every_stop() -> None:
    store = MemoryStore()
    host = Host(secret=SECRET, store=store)
    batch = [call("note", text="before"), call("h", task="x"), call("note", text="after")]
    make = two(lambda: asking(call("ask_user", question="Sure?"), answered), [calling(*batch), last], host)
    result = asyncio.run(await_run(make().run("go", run_id="top")))
    for answer in ("a", "b"):
        assert dump_state(rehydrate(asyncio.run(store.records("top"))).run) == dump_state(result.run_state)
        result = resumed(make(), result, answer, by_id=True)
    assert result.ok
    assert dump_state(rehydrate(asyncio.run(store.records("top"))).run) == dump_state(result.run_state)
    for head in asyncio.run(store.heads()):
        rows = asyncio.run(store.records(head.run_id))
        assert verify(head.run_id, rows, head).code == GOOD
        assert replay(rows, LOOP).same


class LockedBelow(MemoryStore):
    """A store that lets nobody but the run on top in."""

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        if run_id != "top":
            raise StoreError(f"{run_id} is locked")
        return await super().acquire(run_id, owner, new=new, keyring=keyring)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_sub_agent_whose_journal_fails_stops_the_calling_run_alone_or_among_others(calls: int) -> None:
    helper = Agent(ScriptedModel(["never"]))
    batch = [call("h", str(n), task="x") for n in range(calls)]
    agent = Agent(
        ScriptedModel([calling(*batch), "done"]),
        tools=[helper.as_tool("h", "Helps.", parallel=True)],
        host=Host(store=LockedBelow()),
    )
    with pytest.raises(StoreError, match="is locked"):
        asyncio.run(await_run(agent.run("go", run_id="top")))


# -- a process that dies ------------------------------------------------------------------------------------


def step(folder: Path, where: str, number: int, code: int = 0) -> dict[str, Any]:
    """One step of ``subagent_crash``, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.subagent_crash", str(folder), where, str(number)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout or "{}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "acted", "thought"),
    [
        ("model", 1, 2),  # the model is asked again, the tool has run
        ("end", 1, 1),  # its result was there, and only the run above did not know
    ],
)
def test_an_interrupted_sub_agent_continues_where_its_own_journal_ends(
    tmp_path: Path, where: str, acted: int, thought: int
) -> None:
    step(tmp_path, where, 1, code=9)
    told = step(tmp_path, where, 2)
    assert told["output"] == "above: below: done 1"
    assert (told["acted"], told["thought"]) == (acted, thought)
    assert told["model_calls"] == 4  # two above, and two below that have ended
    store = SqliteStore(tmp_path / "runs.db")
    reports = [
        verify(head.run_id, asyncio.run(store.records(head.run_id)), head) for head in asyncio.run(store.heads())
    ]
    store.close()
    assert [r.code for r in reports] == [GOOD, GOOD], reports


@pytest.mark.slow
def test_interrupted_in_a_tool_of_a_sub_agent_the_call_is_in_doubt_for_the_calling_run(tmp_path: Path) -> None:
    step(tmp_path, "tool", 1, code=9)
    assert step(tmp_path, "tool", 2)["asked"] == ["in_doubt", "h", "act"]
    told = step(tmp_path, "tool", 3)
    assert told["output"] == "above: below: it was done"
    assert told["acted"] == 1


@pytest.mark.slow
def test_interrupted_after_a_reply_a_sub_agent_does_not_get_it_twice(tmp_path: Path) -> None:
    step(tmp_path, "answered", 1, code=9)
    told = step(tmp_path, "answered", 2)
    assert told["output"] == "above: below: the left one"
    assert told["thought"] == 2


def test_what_a_sub_agent_asks_again_does_not_expire_while_another_one_works() -> None:
    clock, store = FakeClock(), MemoryStore()

    @tool(requires_approval=Approval(2, roles=("clerk",), validity_s=100))
    def pay() -> str:
        """Pay."""
        return "paid"

    @tool(requires_approval=True)
    def build() -> str:
        """Build."""
        clock.advance(200)
        return "built"

    def agent() -> Agent:
        below = [
            Agent(FromTranscript([ToolCall("p", each.name, {})], "done"), tools=[each]).as_tool(
                f"helps_{each.name}", "Helps.", parallel=True
            )
            for each in (build, pay)
        ]
        calls = [ToolCall(each.name, each.name, {"task": "x"}) for each in below]
        return Agent(FromTranscript(calls, "done"), tools=below, host=Host(store=store, secret=SECRET, clock=clock))

    async def scenario() -> None:
        await agent().run("go", run_id="r")
        for voter in ("ann", "bob"):
            clock.advance(1)
            result = await agent().resume("r", Allow(), by=Actor(voter, ("clerk",)))
        assert isinstance(result.outcome, UserInputRequested)
        assert result.outcome.quorum is not None
        assert (len(result.outcome.quorum.votes), clock.time() - result.outcome.quorum.asked_at) == (1, 1)
        assert (await agent().resume("r", Allow(), by=Actor("cy", ("clerk",)))).output == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("denied", [None, 0, 1, 2])
def test_what_each_of_some_sub_agents_asks_has_its_whole_time_and_no_more_while_people_are_asked(
    n: int, depth: int, denied: int | None
) -> None:
    """While they are asked about another one, its time stands still; votes extend no deadline."""
    rule = Approval(n, roles=("clerk",), validity_s=600, escalate_to=("boss",), escalate_after_s=60)
    paid: list[str] = []

    @tool(requires_approval=rule)
    def pay(text: str) -> str:
        """Pay."""
        paid.append(text)
        return "paid"

    async def scenario() -> None:
        clock, store = FakeClock(), MemoryStore()
        host = Host(store=store, secret=SECRET, clock=clock)

        def agent() -> Agent:
            made = Agent(FromTranscript([ToolCall("p", "pay", {"text": "x"})], "paid"), tools=[pay])
            for level in range(depth):
                calls = [ToolCall(f"h{i}", "helper", {"task": str(i)}) for i in range(3 if level == depth - 1 else 1)]
                made = Agent(
                    FromTranscript(calls, "done"), tools=[made.as_tool("helper", "H.", parallel=True)], host=host
                )
            return made

        result = await agent().run("go", run_id="r")
        shown_s, asked = [0.0, 0.0, 0.0], [(vote, number) for vote in range(n) for number in range(3)]
        for vote, number in [each for each in asked if each[1] != denied or not each[0]]:
            assert isinstance(result.outcome, UserInputRequested)
            quorum = result.outcome.quorum
            assert quorum is not None
            assert (quorum.asked_at, len(quorum.votes)) == (clock.time() - shown_s[number], vote)
            assert result.outcome.suspension_record.expires_at == quorum.asked_at + 600
            waits_s = 600 - shown_s[number] if vote == n - 1 else 1 + number  # at the very end it can still be answered
            clock.advance(waits_s)
            shown_s[number] += waits_s
            reply = Deny() if number == denied else Allow()
            result = await agent().resume("r", reply, by=Actor(f"person {vote}", ("clerk",)))
        assert (result.output, paid) == ("done", ["x"] * (3 if denied is None else 2))
        for head in await store.heads():
            records = await store.records(head.run_id)
            assert verify(head.run_id, records, head, keyring=Keyring(SECRET)).code == GOOD
            assert replay(records, agent().graph).same

    asyncio.run(scenario())
