"""The monitor: a run inside the model of its proofs is not reported, any other is, with what the model ruled out."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Counter,
    Failure,
    FinishReason,
    Graph,
    Host,
    Message,
    ModelRequest,
    Reply,
    RunResult,
    RunState,
    RunWarning,
    StateContext,
    StateSpec,
    Transition,
    UserInputRequested,
    tool,
)
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import (
    AgentTraits,
    Analysis,
    AnalysisLimits,
    Assumptions,
    GuardAssumption,
    analyse,
    run_monitor,
)
from agentfsm.analysis.bounds import Bounds
from agentfsm.analysis.run_monitor import ModelMismatch, ProofModel
from agentfsm.errors import ModelMismatchError, TransientProviderError
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import CallState
from agentfsm.machine.declaration import exhausted
from agentfsm.testing import FakeClock, ScriptedModel, call

LIMITS = AgentGuardrails(max_iterations=2)
SECRET = b"of the tests"


@tool
async def fragile(text: str) -> str:
    """It always fails."""
    raise ValueError("broken")


@tool
async def sound(text: str) -> str:
    """It never fails."""
    return text


@tool(requires_approval=True)
async def gated(text: str) -> str:
    """It needs approval."""
    return text


def asking_agent(monitor: str) -> Agent:
    script = [call("ask_user", question="which?"), call("return_done", output="done")]
    return Agent(ScriptedModel(script), preset="funnel", host=Host(secret=SECRET, monitor=monitor))


def wrong_traits(*_: Any) -> AgentTraits:
    """What is not true of an agent whose tools ask the user."""
    return AgentTraits(asks=False, certain=True)


def test_a_run_inside_the_model_is_not_reported() -> None:
    script = [[call("fragile", text="a"), call("fragile", text="b")], "done"]
    agent = Agent(ScriptedModel(script), tools=[fragile], host=Host(monitor="raise"))
    assert agent.run_sync("go").ok


def test_a_run_outside_the_model_is_an_error_that_names_row_fact_and_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentfsm.agent.config.proof_traits", wrong_traits)
    with pytest.raises(ModelMismatchError) as caught:
        asking_agent("raise").run_sync("go")
    text = str(caught.value)
    assert "the run took post_tool.question_asked, which the model of its proofs does not allow" in text
    assert "the control tools are not registered" in text
    assert "(in post_tool (steps=1, iterations=1" in text


def test_a_warning_is_logged_and_emitted_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentfsm.agent.config.proof_traits", wrong_traits)
    agent = asking_agent("warn")

    async def events() -> list[Any]:
        return [event async for event in agent.run("go")]

    with caplog.at_level(logging.WARNING):
        found = asyncio.run(events())
    (warning,) = [event for event in found if isinstance(event, RunWarning)]
    assert "post_tool.question_asked" in warning.text
    assert "post_tool.question_asked" in caplog.text
    assert type(found[-1]).__name__ == "UserInputRequested"


def test_runs_are_not_monitored_unless_the_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTFSM_MONITOR", raising=False)
    assert Agent(ScriptedModel([])).config.open_monitor is None
    monkeypatch.setenv("AGENTFSM_MONITOR", "warn")
    assert Agent(ScriptedModel([])).config.open_monitor is not None
    with pytest.raises(ValueError, match="monitor is 'loud'; it must be one of off, warn, raise"):
        Host(monitor="loud")


@pytest.mark.parametrize("same_agent", [True, False])
def test_a_resumed_run_is_followed_on(same_agent: bool) -> None:
    """Another agent object knows nothing of the run's past, and follows its counters alone."""

    script = [[call("gated", text="a"), call("gated", text="b")], "done"]
    agent = Agent(ScriptedModel(script), tools=[gated], host=Host(secret=SECRET, monitor="raise"))
    result = agent.run_sync("go")
    moves = len(result.decisions)

    async def approve(record: Any, by: Agent) -> Any:
        return await by.resume(record, Allow())

    while isinstance(result.outcome, UserInputRequested):
        by = agent if same_agent else Agent(ScriptedModel(["done"]), tools=[gated], host=agent.config.host)
        result = asyncio.run(approve(result.outcome.suspension_record, by))
        moves += len(result.decisions)
    assert result.ok
    assert moves > 10


def test_a_counter_with_another_value_than_the_model_has_is_reported() -> None:
    run = RunState("run", guardrails=LIMITS, counters={"steps": 1})
    monitor = ProofModel(LOOP, AgentTraits()).monitor(run)
    run.counters["steps"] = 7
    mismatch = monitor.record_move(LOOP.transition("pre_step.otherwise"), run)
    assert mismatch is not None
    assert "it leads to call_llm (steps=1, " in str(mismatch)
    assert "and the run has steps=7" in str(mismatch)


def follow_rows(model: ProofModel, rows: list[str]) -> ModelMismatch | None:
    """What the monitor says of a run that takes these rows of LOOP, and spends and refills what they declare."""
    run = RunState("run", guardrails=LIMITS)
    monitor = model.monitor(run)
    for row in map(LOOP.transition, rows):
        run.counters |= dict.fromkeys(row.refills, 0)
        called = ("iterations",) if row.source == "call_llm" else ()
        for counter in (*row.spends, *LOOP.spec(row.target).spends, *called):
            run.counters[counter] = run.counters.get(counter, 0) + 1
        if mismatch := monitor.record_move(row, run):
            return mismatch
    return None


def test_assumptions_of_your_own_are_checked_too() -> None:
    never = Assumptions(guards=(GuardAssumption("tool_error", may="never", why="tools here never fail"),))
    rows = ["pre_step.otherwise", "call_llm.otherwise", "post_llm.tool_calls", "dispatch_tool.otherwise"]
    model = ProofModel(LOOP, AgentTraits(), never)
    assert follow_rows(model, rows) is None
    mismatch = follow_rows(model, [*rows, "post_tool.tool_error"])
    assert mismatch is not None
    assert mismatch.row == "post_tool.tool_error"
    assert mismatch.reason == "as tool_error: tools here never fail"


def test_rows_that_cannot_follow_each_other_are_reported() -> None:
    model = ProofModel(LOOP, AgentTraits())
    mismatch = follow_rows(model, ["pre_step.otherwise", "post_llm.otherwise"])
    assert mismatch is not None
    assert mismatch.reason == "the run is in call_llm"


def test_a_users_guard_with_the_name_of_a_built_in_one_may_hold_at_any_time() -> None:
    """It has the name of a guard that never holds a second time for one call, and it always holds."""

    def question_asked(run: object) -> bool:
        return bool(run)

    graph = LOOP.without("post_tool.question_asked").with_transition(
        Transition("post_tool", question_asked, "recover"), before="calls_pending"
    )
    host = Host(monitor="raise")
    agent = Agent(ScriptedModel([call("fragile", text="a"), "done"] * 4), tools=[fragile], graph=graph, host=host)
    ids = [d.transition.id for d in agent.run_sync("go").decisions]
    assert "post_tool.question_asked" in ids


REPLY_REFILLS = {
    "continues": ({"refills": ("continues",)}, 1),
    "iterations, which it spends, too": ({"refills": ("iterations",), "spends": ("iterations",)}, 2),
    "both, which it spends, too": ({"refills": ("iterations", "continues"), "spends": ("iterations", "continues")}, 2),
}


@pytest.mark.parametrize(("changes", "continues"), REPLY_REFILLS.values(), ids=REPLY_REFILLS)
def test_a_reply_that_extends_a_limit_may_refill_and_spend_counters(changes: dict[str, Any], continues: int) -> None:
    """By hand: a row refills and spends first; then the reply fills up the model calls, and is one more extension."""
    replied = LOOP.transition("suspended.replied")
    graph = replace(LOOP, transitions=tuple(replace(r, **changes) if r is replied else r for r in LOOP))
    result, replies = extend_often(graph, [], 2)
    assert result.run_state.model_calls == 2 * (1 + replies)
    assert result.run_state.counters["iterations"] == 2
    assert result.run_state.counters["continues"] == continues


def test_a_row_that_refills_the_extensions_leaves_no_bound_on_the_model_calls_of_a_whole_run() -> None:
    """Of an agent with a sub-agent: nothing but the number of extensions bounds the model calls in all."""
    helper = Agent(ScriptedModel(), host=Host(monitor="off")).as_tool("helper", "Helps.")
    each = LOOP.transition("post_llm.tool_calls")
    refilling = replace(each, refills=(*each.refills, "continues"))
    graph = replace(LOOP, transitions=tuple(refilling if row is each else row for row in LOOP))
    result, replies = extend_often(graph, [helper], 3)
    assert (replies, result.run_state.model_calls) == (3, 2 + 3 * 2)
    few = AnalysisLimits(max_configurations=10)
    bounds = analyse(graph, guardrails=LIMITS, traits=AgentTraits(sub_agents=True), limits=few).bounds
    assert (bounds.model_calls, bounds.model_calls_in_all) == (2, None)


def test_a_first_step_after_a_refill_is_none_that_can_stall_as_in_the_model() -> None:
    """The steps are counted from one again."""
    clock = FakeClock()

    def again(run: RunState) -> bool:
        clock.advance(60)
        return True

    row = Transition("post_tool", again, "pre_step", spends="rounds", refills="steps")
    graph = LOOP.with_counter(Counter("rounds", 2)).with_transition(row)
    script = [call("sound", text="a"), "done"]
    agent = Agent(ScriptedModel(script), tools=[sound], graph=graph, host=Host(monitor="raise", clock=clock))
    rows = [d.transition.id for d in agent.run_sync("go").decisions]
    assert rows[rows.index("post_tool.again") + 1] == "pre_step.otherwise"


def test_a_run_that_starts_where_replies_are_read_is_as_in_the_model() -> None:
    """It has no reply yet, so there is no text that is not an answer."""
    graph = PRESETS["funnel"].graph
    first = graph.spec("post_llm")
    graph = replace(graph, states=(first, *(spec for spec in graph.states if spec is not first)))
    agent = Agent(ScriptedModel([]), preset="funnel", graph=graph, host=Host(monitor="raise"))
    result = agent.run_sync("go")
    assert [d.transition.id for d in result.decisions] == ["post_llm.otherwise"]
    assert "post_llm.otherwise" not in {dead.row for dead in analyse(graph, traits=proof_traits(agent.config)).dead}


@pytest.mark.parametrize("spends", ["", "iterations"])
def test_a_row_that_refills_model_calls_after_one_refills_that_one_too_as_in_the_model(spends: str) -> None:
    row = LOOP.transition("call_llm.transient_provider")
    refilling = replace(row, refills="iterations", spends=spends)
    graph = replace(LOOP, transitions=tuple(refilling if each is row else each for each in LOOP))
    model = ScriptedModel([TransientProviderError("busy"), "done"])
    agent = Agent(model, graph=graph, host=Host(monitor="raise", clock=FakeClock()))
    result = agent.run_sync("go")
    assert (result.output, result.run_state.iterations) == ("done", 2 if spends else 1)


def test_an_earlier_row_whose_counter_is_empty_leaves_its_failure_to_later_ones_as_in_the_model() -> None:
    """Without a row that takes it, a truncated reply is malformed, although replies have no required format here."""
    graph = PRESETS["strict"].graph
    row = graph.transition("post_llm.output_truncated")
    spending = replace(row, spends="continues")
    graph = replace(graph, transitions=tuple(spending if each is row else each for each in graph))
    script = [Reply(Message.assistant("half an ans"), FinishReason.LENGTH), "done"]
    agent = Agent(
        ScriptedModel(script),
        preset="strict",
        graph=graph,
        guardrails=AgentGuardrails(max_continues=0),
        host=Host(monitor="raise"),
    )
    taken = [d.transition.id for d in agent.run_sync("go").decisions]
    assert "post_llm.output_malformed" in taken


def through_a_note(graph: Graph, target: str) -> Graph:
    """A graph in which recovery that asks leads through an own state to another, once."""
    notes = Counter("notes", 1)

    @exhausted(notes, past=True)
    def noted(run: RunState) -> bool:
        return True

    async def take_note(context: StateContext[None]) -> None:
        pass

    rows = (Transition("note", noted, "terminal", ends="partial"), Transition("note", None, target))
    spec = StateSpec("note", effect=take_note, spends="notes")
    return graph.with_counter(notes).with_state(spec, rows, entered_by="recover.ask_user")


def test_a_question_of_recovery_replaces_that_of_a_call_as_in_the_model() -> None:
    """The call is asked about only when it has run again."""

    def late(run: RunState) -> Failure | None:
        return None if run.counters.get("notes") else Failure(kind="time_limit", explanation="late")

    graph = through_a_note(PRESETS["funnel"].graph, "post_tool").with_detector(
        "post_tool", late, before="question_asked"
    )
    script = [call("ask_user", question="Which?"), call("return_done", output="x")]
    agent = Agent(ScriptedModel(script), preset="funnel", graph=graph, host=Host(secret=SECRET, monitor="raise"))
    result = agent.run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    assert (result.outcome.kind, result.outcome.question) == ("question", "Which?")
    result = agent.resume_sync(result.outcome.suspension_record, "this")
    assert (result.output, result.run_state.continues) == ("x", 0)


def test_a_limit_is_still_extended_where_a_row_has_spent_an_extension_meanwhile_as_in_the_model() -> None:
    graph = through_a_note(LOOP, "suspended")
    asking = graph.transition("recover.ask_user")
    rows = tuple(replace(row, spends="continues") if row is asking else row for row in graph)
    agent = Agent(
        ScriptedModel([call("sound", text="a"), "done"]),
        tools=[sound],
        graph=replace(graph, transitions=rows),
        guardrails=AgentGuardrails(max_iterations=1, max_continues=1),
        host=Host(secret=SECRET, monitor="raise"),
    )
    result = agent.run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    result = agent.resume_sync(result.outcome.suspension_record, "go on")
    assert (result.output, result.run_state.continues) == ("done", 2)


def test_a_reply_about_a_sub_agents_limit_extends_no_limit_of_its_caller() -> None:
    """Whose row for replies comes first here; it is not for this reply."""
    helper = Agent(ScriptedModel([call("sound", text="a")] * 2), tools=[sound], guardrails=LIMITS)
    first = LOOP.transition("suspended.replied")
    graph = LOOP.without(first.id).with_transition(first, before="approval_decided")
    agent = Agent(
        ScriptedModel([call("helper", task="x"), "done"]),
        tools=[helper.as_tool("helper", "Helps.")],
        graph=graph,
        guardrails=AgentGuardrails(max_iterations=4, max_continues=0),
        host=Host(secret=SECRET, monitor="raise"),
    )

    async def scene() -> RunResult:
        result = await agent.run("go")
        assert isinstance(result.outcome, UserInputRequested)
        assert result.outcome.kind == "limit"
        return await agent.resume(result.outcome.suspension_record, "go on")

    result = asyncio.run(scene())
    assert result.decisions[0].transition.id == "suspended.approval_decided"
    assert (result.run_state.continues, result.run_state.iterations) == (0, 4)


def extend_often(graph: Graph, tools: list[Any], replies: int) -> tuple[RunResult, int]:
    """A monitored run of an agent that may make two model calls, and is granted two more by each reply."""
    guardrails = LIMITS.model_copy(update={"max_continues": 2, "max_steps": 100})
    script = [call("sound", text=str(n)) for n in range(100)]
    host = Host(secret=SECRET, monitor="raise")
    agent = Agent(ScriptedModel(script), tools=[sound, *tools], graph=graph, guardrails=guardrails, host=host)

    async def scene() -> tuple[RunResult, int]:
        result, granted = await agent.run("go"), 0
        while isinstance(result.outcome, UserInputRequested) and granted < replies:
            result, granted = await agent.resume(result.outcome.suspension_record, "go on"), granted + 1
        return result, granted

    return asyncio.run(scene())


# -- bounds ---------------------------------------------------------------------------------------------


class Spendthrift:
    """A model that makes ten calls for one reply, whatever it may make."""

    name = "spendthrift"

    async def reply(self, request: ModelRequest) -> Reply:
        request.budget.made = 10
        return Reply(Message.assistant("done"))


@pytest.mark.slow
def test_more_model_calls_than_are_printed_are_reported() -> None:
    agent = Agent(Spendthrift(), guardrails=AgentGuardrails(max_iterations=3), host=Host(monitor="raise"))
    assert agent_bounds(agent).bounds.model_calls == 3
    with pytest.raises(ModelMismatchError, match="at most 3 model calls without waiting, and the run has made 10"):
        agent.run_sync("go")


def test_bounds_that_take_too_long_are_those_of_counters_and_max_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_monitor, "BOUNDS_LIMITS", AnalysisLimits(max_configurations=10))
    bounds = ProofModel(LOOP, AgentTraits()).bounds(LIMITS)
    assert bounds.limit == "explored 10 configurations until max_configurations was reached"
    assert (bounds.moves, bounds.model_calls, bounds.tool_calls) == (None, LIMITS.max_iterations, None)
    assert bounds.from_counters == analyse(LOOP, guardrails=LIMITS).bounds.from_counters
    agent = Agent(Spendthrift(), guardrails=AgentGuardrails(max_iterations=3), host=Host(monitor="raise"))
    with pytest.raises(ModelMismatchError, match="at most 3 model calls without waiting, and the run has made 10"):
        agent.run_sync("go")


def agent_bounds(agent: Agent) -> Analysis:
    return analyse(agent.graph, guardrails=agent.guardrails, traits=proof_traits(agent.config))


class SlowProof:
    """Bounds that take until they are released, and say that a run makes two moves at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        monkeypatch.setattr(run_monitor, "BOUNDS_AFTER_MOVES", 1)
        monkeypatch.setattr(ProofModel, "bounds", self.bounds)

    def bounds(self, _: AgentGuardrails) -> Bounds:
        self.begun.set()
        assert self.released.wait(20), "the event loop was held up meanwhile"
        return replace(run_monitor.NO_BOUNDS, moves=2)

    async def wait_until_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0)


def test_the_event_loop_goes_on_while_the_bounds_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SlowProof(monkeypatch)

    async def main() -> None:
        run = asyncio.ensure_future(collect(Agent(ScriptedModel(["done"]), host=Host(monitor="raise"))))
        await proof.wait_until_begun()
        proof.released.set()
        await run

    with pytest.raises(ModelMismatchError, match="at most 2 moves without waiting, and the run has made"):
        asyncio.run(main())


async def collect(agent: Agent) -> list[Any]:
    return [event async for event in agent.run("go")]


def test_bounds_that_are_known_only_after_the_last_move_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SlowProof(monkeypatch)
    monkeypatch.setattr(run_monitor, "BOUNDS_AFTER_MOVES", 2)
    proof.released.set()
    events = asyncio.run(collect(Agent(ScriptedModel(["done"]), host=Host(monitor="warn"))))
    (warning,) = [event for event in events if isinstance(event, RunWarning)]
    assert "post_llm.otherwise" in warning.text
    assert "at most 2 moves without waiting, and the run has made 3" in warning.text
    assert type(events[-1]).__name__ == "RunCompleted"


def test_a_run_can_be_cancelled_while_its_bounds_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SlowProof(monkeypatch)

    async def main() -> tuple[Any, BaseException]:
        agent = Agent(ScriptedModel(["done", "done"]), host=Host(monitor="raise"))
        run = agent.run("go")
        ending = asyncio.ensure_future(run)
        await proof.wait_until_begun()
        run.cancel("not today")
        result = await ending
        proof.begun.clear()
        task = asyncio.ensure_future(agent.run("go"))
        await proof.wait_until_begun()
        task.cancel()
        (raised,) = await asyncio.gather(task, return_exceptions=True)
        proof.released.set()
        return result.outcome, raised

    outcome, raised = asyncio.run(main())
    assert (type(outcome).__name__, outcome.reason) == ("RunCancelled", "not today")
    assert isinstance(raised, asyncio.CancelledError)


def test_more_tool_calls_than_are_printed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a reply is printed, and the loop is broken: it runs three."""

    @tool(parallel=True)
    async def look(n: int) -> int:
        """Look."""
        return n

    calls = [call("look", n=n) for n in range(3)]
    limits = AgentGuardrails(max_iterations=1, max_calls_per_reply=1, max_tool_retries=0, on_limit="stop")
    monkeypatch.setattr("agentfsm.loop.reducer.open_batch", open_all)
    agent = Agent(ScriptedModel([calls]), tools=[look], guardrails=limits, host=Host(monitor="raise"))
    with pytest.raises(ModelMismatchError, match="at most 1 tool calls without waiting, and the run has made 3"):
        agent.run_sync("go")


def open_all(run: RunState, calls: Any) -> None:
    """``open_batch`` without the limit on the calls of one reply."""
    run.batch = [CallState(each, each.signature) for each in calls]
    run.first_pending = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"moves": 250}, "at most 250 moves without waiting, and the run has made 251"),
        ({"from_counters": 260}, "at most 260 moves without waiting, by its counters alone"),
        ({"model_calls": 60}, "at most 60 model calls without waiting, and the run has made 61"),
        ({"tool_calls": 70}, "at most 70 tool calls without waiting, and the run has made 71"),
        ({"model_calls_in_all": 80}, "at most 80 model calls in all, and the run has made 81"),
        ({"tool_calls_in_all": 90}, "at most 90 tool calls in all, and the run has made 91"),
        ({}, ""),
    ],
    ids=str,
)
def test_each_bound_that_is_printed_is_compared_with_a_real_run(
    broken: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 100 steps, under a proof that is wrong about one bound."""
    compute = ProofModel.bounds
    monkeypatch.setattr(ProofModel, "bounds", lambda model, limits: replace(compute(model, limits), **broken))

    @tool
    async def look(n: int) -> int:
        """Look."""
        return n

    script = [call("look", n=n) for n in range(99)]
    limits = AgentGuardrails(max_iterations=100, max_calls_per_reply=1, max_tool_retries=0)
    agent = Agent(ScriptedModel([*script, "done"]), tools=[look], guardrails=limits, host=Host(monitor="raise"))
    if not why:
        assert agent.run_sync("go").ok
        return
    with pytest.raises(ModelMismatchError, match=why):
        agent.run_sync("go")


@pytest.mark.slow
def test_a_run_whose_limits_allow_very_long_paths_is_compared_with_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply may lead to 100 calls, each run ten times: more moves than Python may recurse."""
    found: list[Bounds] = []
    compute = ProofModel.bounds

    def bounds(model: ProofModel, limits: AgentGuardrails) -> Bounds:
        found.append(compute(model, limits))
        return found[-1]

    monkeypatch.setattr(ProofModel, "bounds", bounds)
    monkeypatch.setattr(run_monitor, "BOUNDS_LIMITS", AnalysisLimits(run_monitor.BOUNDS_LIMITS.max_configurations, 300))

    @tool
    async def look(n: int) -> int:
        """Look."""
        return n

    limits = AgentGuardrails(max_iterations=2, max_steps=2, max_calls_per_reply=100, max_tool_retries=9)
    script = [[call("look", n=n) for n in range(100)], "done"]
    agent = Agent(ScriptedModel(script), tools=[look], guardrails=limits, host=Host(monitor="raise"))
    assert agent.run_sync("go").ok
    assert found[-1].moves == 2 * (3 + 10 * (2 * 100 + 1)) + 1


def test_the_printed_bound_on_model_calls_counts_those_of_a_state_of_your_own() -> None:
    """Its row shows one call of the model, and its effect makes two more."""

    async def review(context: StateContext) -> None:
        await context.ask_model("one")
        await context.ask_model("two")

    rows = [replace(row, target="review", ends="") if row.id == "post_llm.otherwise" else row for row in LOOP]
    rows += [replace(row, source="review") for row in LOOP.rows("call_llm") if row.guard in LOOP.first]
    rows += [Transition("review", None, "terminal", ends="completed")]
    states = (*LOOP.states, StateSpec("review", effect=review))
    graph = replace(LOOP, states=states, transitions=tuple(rows))
    limits = AgentGuardrails(max_iterations=4, on_limit="stop")
    script = ["answer", "first", "second"]
    agent = Agent(ScriptedModel(script), graph=graph, guardrails=limits, host=Host(monitor="raise"))
    result = agent.run_sync("go")
    assert result.ok
    assert result.run_state.model_calls == 3
    bounds = agent_bounds(agent).bounds
    assert (bounds.model_calls, bounds.model_calls_in_all) == (4, 16)
