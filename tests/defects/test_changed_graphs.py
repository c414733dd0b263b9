"""What a user changes in a graph is what runs: budgets, endings, waits and moves follow what is declared."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import transitions

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Example,
    Failure,
    FailureKind,
    FinishReason,
    Graph,
    GraphError,
    Handoff,
    Host,
    MemoryStore,
    Message,
    PartialRunSummary,
    Reply,
    RunAborted,
    RunResult,
    RunState,
    StateContext,
    StateResult,
    StateSpec,
    TransientProviderError,
    Transition,
    UserInputRequested,
    allow,
    deny,
    detector,
    permissions,
    tool,
)
from agentfsm.diagrams import FORMATS
from agentfsm.journal.records import open_record
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, verify_stored_run
from agentfsm.loop.guards import expired, replied
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.declaration import Counter
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, WitnessDriver, call, paths
from tests.helpers.graphs import written_from_scratch

LIMIT_ROWS = [f"pre_step.{name}" for name in ("iteration_limit", "time_limit", "token_limit", "cost_limit")]


@tool
def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


@tool
def pay(amount: int) -> str:
    """Pay."""
    raise RuntimeError("card declined")


# -- budgets ----------------------------------------------------------------------------------------------


def test_a_budget_that_is_not_declared_is_refused_where_it_is_spent():
    with pytest.raises(GraphError, match="'a review', which is not a declared counter"):
        LOOP.with_transition(Transition("recover", look_again, "recover", spends="a review"))


def look_again(run: RunState) -> bool:
    return True


def test_a_graph_without_the_rows_for_limits_makes_no_more_model_calls_than_they_allow():
    model = ScriptedModel([call("look", at=str(n)) for n in range(2000)])
    agent = Agent(model, tools=[look], graph=LOOP.without(*LIMIT_ROWS), guardrails=AgentGuardrails(max_iterations=3))
    result = agent.run_sync("go")
    assert result.run_state.model_calls == 3
    assert isinstance(result.outcome, RunAborted)
    assert "all 3 model calls that max_iterations allows are made" in result.outcome.reason


def test_a_cycle_of_your_own_ends_when_its_counter_is_empty():
    graph = LOOP.with_counter(Counter("looks", 4)).with_transition(
        Transition("recover", look_again, "dispatch_tool", spends="looks"), before="retry_tool"
    )
    result = Agent(ScriptedModel([call("pay", amount=1), "done"]), tools=[pay], graph=graph).run_sync("go")
    assert result.output == "done"
    taken = [d.transition.id for d in result.decisions]
    assert taken.count("recover.look_again") == 4
    assert result.run_state.counters["looks"] == 4


# -- endings ----------------------------------------------------------------------------------------------


def payment_failed(run: RunState) -> bool:
    return bool(run.call_failures)


def at_once(run: RunState) -> bool:
    return True


def test_a_row_into_the_end_that_does_not_say_how_the_run_ends_is_refused():
    with pytest.raises(GraphError, match="must say how the run ends"):
        LOOP.with_transition(Transition("post_tool", payment_failed, "terminal"), before="repeated_error")


@pytest.mark.parametrize(
    ("row", "before", "ending"),
    [
        (Transition("post_tool", payment_failed, "terminal", ends="handed_off"), "repeated_error", Handoff),
        (Transition("pre_step", at_once, "terminal", ends="partial"), "runaway", PartialRunSummary),
        (Transition("post_tool", payment_failed, "terminal", ends="aborted"), "repeated_error", RunAborted),
    ],
    ids=["after a failed payment", "before any model call", "as aborted"],
)
def test_a_run_ends_as_the_row_says_and_only_completed_is_a_success(row: Transition, before: str, ending: type):
    graph = LOOP.with_transition(row, before=before)
    result = Agent(ScriptedModel([call("pay", amount=1), "paid"]), tools=[pay], graph=graph).run_sync("Pay 1.")
    assert isinstance(result.outcome, ending)
    assert (result.ok, result.output) == (False, None)


def test_a_final_state_of_your_own_is_a_success_only_if_its_row_says_so():
    for ends, ok in (("completed", True), ("partial", False)):
        graph = LOOP.with_state(
            StateSpec("given_up", final=True),
            [],
            entered_by=Transition("post_tool", payment_failed, "given_up", ends=ends),
            before="repeated_error",
        )
        result = Agent(ScriptedModel([call("pay", amount=1)]), tools=[pay], graph=graph).run_sync("Pay 1.")
        assert (result.state, result.ok) == ("given_up", ok)


# -- waits ------------------------------------------------------------------------------------------------


def only_one_so_far(run: RunState) -> bool:
    """Somebody other than the boss has allowed it."""
    reply = run.human_reply
    return reply is not None and reply.kind == "allow" and reply.by != "boss"


@tool(requires_approval=True)
def transfer(amount: int) -> str:
    """Transfer."""
    return f"transferred {amount}"


def test_a_run_that_goes_on_waiting_still_asks_for_the_approval():
    graph = LOOP.with_transition(Transition("suspended", only_one_so_far, "suspended"), before="approval_decided")
    store = MemoryStore()
    agent = Agent(
        ScriptedModel([call("transfer", amount=5), "Done."]), tools=[transfer], graph=graph, host=Host(store=store)
    )

    async def scene() -> RunResult:
        await agent.run("go", run_id="r")
        again = await agent.resume("r", Allow(), by="ann")
        assert isinstance(again.outcome, UserInputRequested)
        assert (again.outcome.kind, again.outcome.tool, dict(again.outcome.arguments)) == (
            "approval", "transfer", {"amount": 5},
        )  # fmt: skip
        with pytest.raises(Exception, match="waits for an answer of kind 'approval'"):
            await agent.resume("r", "anything", by="eve")
        return await agent.resume("r", Allow(), by="boss")

    result = asyncio.run(scene())
    assert result.output == "Done."
    assert [m.content for m in result.messages if m.role == "tool"] == ["transferred 5"]
    assert asyncio.run(verify_stored_run(store, "r", {})).code == GOOD


# -- moves ------------------------------------------------------------------------------------------------


def test_no_run_moves_without_the_machine_of_transitions(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> None:
        raise NotImplementedError("set_state")

    agent = Agent(ScriptedModel(["hello"]))
    monkeypatch.setattr(transitions.Machine, "set_state", broken)
    run = agent.run("go")

    async def scene() -> None:
        await run

    with pytest.raises(NotImplementedError):
        asyncio.run(scene())
    assert (run.state, run.decisions) == ("pre_step", ())


def faulty(run: RunState) -> Failure | None:
    raise ZeroDivisionError("in a detector")


def test_the_journal_says_which_guards_were_asked_also_the_one_that_raised():
    store = MemoryStore()
    graph = LOOP.with_detector("post_llm", faulty, before="output_malformed")
    result = Agent(ScriptedModel(["hello"]), graph=graph, host=Host(store=store)).run_sync("go")
    assert isinstance(result.outcome, RunAborted)
    assert "post_llm.faulty raised ZeroDivisionError" in result.outcome.reason
    names = [t.name for t in graph.rows("post_llm")]
    place = names.index("faulty")
    asked = [(name, False) for name in names[:place]]
    assert result.decisions[-1].tried == (*asked, ("faulty", None), ("aborted", True))
    (record,) = [
        r
        for r in map(open_record, asyncio.run(store.records(result.run_state.run_id)))
        if r.get("transition") == "post_llm.aborted"
    ]
    assert record["tried"] == "0" * place + "e1"
    assert asyncio.run(verify_stored_run(store, result.run_state.run_id, {})).code == GOOD


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_comes_before_what_stops_a_run(name: str):
    graph = PRESETS[name].graph
    for spec in graph.states:
        if not spec.final:
            assert [t.name for t in graph.rows(spec.name)[:2]] == ["cancelled", "aborted"]
            with pytest.raises(GraphError, match="'cancelled' must be row 1 of every state"):
                graph.with_transition(Transition(spec.name, at_once, "pre_step"), before="cancelled")


def test_a_failure_of_a_kind_of_ours_from_your_own_detector_is_recovered_from_as_that_kind():
    def unpaid(run: RunState) -> Failure | None:
        if run.model_calls > 1 or not run.call_failures:
            return None
        return Failure(kind=FailureKind.tool_error, explanation="it is not paid")

    graph = LOOP.with_detector("post_tool", unpaid, before="repeated_error")
    result = Agent(ScriptedModel([call("pay", amount=1), "done"]), tools=[pay], graph=graph).run_sync("go")
    assert result.output == "done"
    assert [x.kind for x in result.run_state.lessons_learned] == [FailureKind.tool_error]


# -- a graph of your own ----------------------------------------------------------------------------------


def test_a_graph_written_from_scratch_is_proved_run_under_the_monitor_verified_and_replayed():
    graph = written_from_scratch()
    assert graph.analyse().ok

    async def scenario() -> None:
        store = MemoryStore()

        def file(context: StateContext) -> StateResult:
            return StateResult(outcome="unclear")

        unclear = replace(graph.spec("file"), effect=file)
        asking = replace(graph, states=tuple(unclear if s.name == "file" else s for s in graph.states))
        host = Host(store=store, secret=b"kept by the tests of graphs", monitor="raise")
        asked = await Agent(ScriptedModel(["Long."]), graph=asking, host=host).run("go", run_id="r")
        assert isinstance(asked.outcome, UserInputRequested)
        result = await Agent(ScriptedModel(["Short."]), graph=graph, host=host).resume("r", "shorter")
        assert [d.transition.id for d in result.decisions] == [
            "asking.replied", "check.otherwise", "talk.otherwise", "read.otherwise", "file.filed"
        ]  # fmt: skip
        assert (result.ok, result.output) == (True, "Short.")
        assert (await verify_stored_run(store, "r", {})).code == GOOD
        assert replay(await store.records("r"), graph).same

    asyncio.run(scenario())


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if not each.image])
def test_a_graph_written_from_scratch_is_drawn_in_every_format(name: str):
    assert "asking" in written_from_scratch().diagram(name)


DRIVEN = {
    "from scratch": written_from_scratch(),
    "no questions of the model": LOOP.without("post_tool.question_asked"),
    "no tool that ends a run": LOOP.without("post_tool.declared_done"),
    "no giving up": LOOP.without("post_tool.declared_unable"),
}


@pytest.mark.parametrize("name", DRIVEN)
def test_every_row_of_a_graph_without_some_rows_for_tools_is_witnessed(name: str):
    """From scratch, every step is a model call, and nothing extends their number: it never makes too many steps."""
    graph, driver = DRIVEN[name], WitnessDriver(DRIVEN[name])
    taken = {row for path in paths(graph, "transitions") for row in driver.run(path).check().path.ids}
    assert {row.id for row in graph} - taken == ({"check.runaway"} if name == "from scratch" else set())


TOO_MUCH = call("pay", amount=501)


@detector(fires_on=[Example(call=TOO_MUCH)], silent_on=[Example(call=call("pay", amount=500))])
def too_much(run: RunState) -> Failure | None:
    """A reply pays more than 500."""
    found = any(each.call.arguments.get("amount", 0) > 500 for each in run.batch)
    return Failure(kind=FailureKind.policy_violation, explanation="too much") if found else None


@pytest.mark.slow
def test_paths_through_a_wait_of_your_own_extend_no_limit_that_nobody_asks_about():
    rows = [Transition("desk", expired, "terminal", ends="cancelled"), Transition("desk", replied, "pre_step")]
    stopping = [replace(row, source="desk") for row in LOOP.rows("pre_step")[:2]]
    table = [*LOOP.transitions, *stopping, *rows]
    place = table.index(LOOP.transition("post_llm.tool_calls"))
    table.insert(place, Transition("post_llm", too_much, "desk"))
    graph = replace(LOOP, states=(*LOOP.states, StateSpec("desk", waits=True)), transitions=tuple(table))
    agent = Agent(ScriptedModel(), tools=[pay], graph=graph)
    driver = WitnessDriver(agent)
    for path in paths(agent, "triples"):
        if "desk.replied" in path.ids:
            driver.run(path).check()


def test_a_reply_after_a_failed_call_counts_where_a_row_of_yours_calls_the_model_again():
    """Without ``recover``, which a failure of the provider leads to in ``LOOP``."""

    def pause(context: StateContext) -> str:
        return "paused"

    rows = [Transition("pause", None, "pre_step")]
    spec = StateSpec("pause", effect=pause)
    graph = LOOP.with_state(spec, rows, entered_by="call_llm.transient_provider")
    result = Agent(ScriptedModel([TransientProviderError("busy"), "Hello."]), graph=graph).run_sync("go")
    assert (result.ok, result.output, result.run_state.failure) == (True, "Hello.", None)


def with_pause(row: str, graph: Graph = LOOP) -> Graph:
    """A graph with a state that does nothing on the way of one row."""

    def pause(context: StateContext) -> str:
        return "paused"

    rest = [Transition("pause", None, graph.transition(row).target)]
    return graph.with_state(StateSpec("pause", effect=pause), rest, entered_by=row)


BUSY, CUT = TransientProviderError("busy"), Reply(Message.assistant("The answer "), FinishReason.LENGTH)
FINDINGS: dict[str, list[Any]] = {
    "call_llm.transient_provider": [BUSY] * 9,
    "post_llm.output_truncated": [CUT] * 9,
    "post_llm.no_progress": [""] * 9,
    "post_tool.policy_violation": [call("look", at=str(n)) for n in range(9)],
    "post_tool.repeated_error": [call("pay", amount=1)] * 9,
    "post_tool.tool_error": [call("pay", amount=n) for n in range(9)],
}
"""By the row that a run then takes to ``recover``, what the model says."""


@pytest.mark.parametrize("row", FINDINGS)
def test_a_state_between_what_is_found_and_recovery_changes_no_budget_and_nothing_that_the_model_is_told(row: str):
    def play(graph: Graph) -> tuple[list[str], list[Any], object]:
        model = RecordingModel(ScriptedModel(FINDINGS[row]))
        rules = [deny("look"), allow("*")] if "violation" in row else [allow("*")]
        host = Host(clock=FakeClock())
        result = Agent(model, tools=[look, pay], graph=graph, hooks=[permissions(*rules)], host=host).run_sync("go")
        taken = [each.transition.id for each in result.decisions if each.transition.source != "pause"]
        return taken, [request.messages for request in model.requests], result.output

    assert row in play(LOOP)[0]
    assert play(with_pause(row)) == play(LOOP)


def test_calls_are_run_again_only_by_a_row_that_leads_straight_to_a_state_that_runs_them():
    tried: list[str] = []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        """Fetch."""
        tried.append("once more")
        raise OSError("busy")

    def tries(graph: Graph) -> int:
        tried.clear()
        Agent(ScriptedModel([call("fetch"), "Done."]), tools=[fetch], graph=graph).run_sync("go")
        return len(tried)

    assert tries(LOOP) == tries(with_pause("post_tool.environment_error")) == 2
    assert tries(with_pause("recover.retry_tool")) == 1


@pytest.mark.parametrize("row", ["call_llm.otherwise", "post_llm.tool_calls", "dispatch_tool.otherwise"])
def test_every_call_has_one_result_where_a_person_writes_before_it_has_run(row: str):
    """The message follows the results of the calls before it, so that none of them is left to run."""
    target = LOOP.transition(row).target
    rows = [Transition("desk", expired, "terminal", ends="cancelled"), Transition("desk", replied, target)]
    graph = LOOP.with_state(StateSpec("desk", waits=True), rows, entered_by=row)
    host = Host(secret=b"kept by the tests of graphs")
    result = Agent(ScriptedModel([call("look", "c1"), "Fine."] * 3), tools=[look], graph=graph, host=host).run_sync(
        "go"
    )
    while isinstance(result.outcome, UserInputRequested):
        record = result.outcome.suspension_record
        agent = Agent(ScriptedModel(["Fine."]), tools=[look], graph=graph, host=host)
        result = agent.resume_sync(record, "go on")
    assert [message.tool_call_id for message in result.messages if message.role == "tool"] == ["c1"]
    assert result.output == "Fine."


def test_a_run_does_not_start_in_a_state_that_waits():
    """It would wait for an answer to what nobody has asked."""
    graph = written_from_scratch()
    asking_first = replace(graph, states=(graph.spec("asking"), *(s for s in graph.states if s.name != "asking")))
    with pytest.raises(GraphError, match="a run cannot start in a state that waits"):
        Agent(ScriptedModel(), graph=asking_first)
