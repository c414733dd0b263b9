"""``WitnessDriver``: the real loop takes every path, because its scenario provides what each guard needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Literal

import pytest

from agentfsm import (
    Action,
    Actor,
    Agent,
    Allow,
    ConfigurationError,
    Counter,
    Failure,
    FailureKind,
    HookContext,
    Message,
    RunError,
    RunState,
    State,
    StateContext,
    ToolContext,
    ask_user,
    came_back,
    hook,
    return_done,
    return_unable,
    tool,
)
from agentfsm.journal.verification import verify
from agentfsm.loop.detectors import Example, detector
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import StateSpec, Transition
from agentfsm.testing import (
    GuardExamples,
    ModelTurn,
    NoExampleError,
    PathDivergence,
    PathDivergenceError,
    Scenario,
    ScriptedModel,
    Simulator,
    WitnessDriver,
    call,
    check_priority,
    check_priority_async,
    default_agent,
    force,
    guard_conflicts,
    paths,
)
from agentfsm.testing.path_generation import Path, small_guardrails
from agentfsm.testing.simulation import RUN_TOOL
from tests.helpers.graphs import reference_loop


@pytest.mark.slow
def test_every_pair_of_the_loop_is_witnessed() -> None:
    """The paths come from the table that was typed in by hand; the runs from the real one."""
    found = paths(reference_loop())
    driver = WitnessDriver(LOOP)
    for path in found:
        driver.run(path).check()
    print(f"{len(found)} paths witnessed: {found}")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("cover", ["pairs", pytest.param("prime", marks=pytest.mark.soak)])
def test_every_pair_and_prime_path_of_the_presets_is_witnessed(name: str, cover: str) -> None:
    preset = PRESETS[name]
    driver = WitnessDriver(default_agent(preset.graph, preset.behavior))
    for path in paths(preset.graph, cover, behavior=preset.behavior):
        driver.run(path).check()


@pytest.mark.slow
def test_every_triple_of_the_loop_is_witnessed() -> None:
    driver = WitnessDriver(LOOP)
    for path in paths(LOOP, "triples"):
        driver.run(path).check()


@pytest.mark.slow
def test_on_every_path_the_journal_verifies_and_every_call_has_one_result() -> None:
    driver = WitnessDriver(LOOP)
    for path in paths(LOOP):
        path_run = driver.run(path).check()
        store = path_run.simulation_result.store
        told = verify("played", asyncio.run(store.records("played")), asyncio.run(store.head("played")))
        assert told.code == 0, f"{path.id}: {told}"
        calls = [c.id for m in path_run.run_result.messages for c in m.tool_calls]
        results = [m.tool_call_id for m in path_run.run_result.messages if m.tool_call_id is not None]
        assert sorted(calls) == sorted(results), path.id


def test_a_divergence_names_the_guard_that_decided_otherwise() -> None:
    """The example given for ``tool_error`` is an OSError, which another detector takes first."""
    (path,) = [p for p in paths(LOOP, "transitions") if "post_tool.tool_error" in p.ids][:1]
    path_run = WitnessDriver(LOOP, examples={"tool_error": Example(result=OSError("disk"))}).run(path)
    assert path_run.divergence is not None
    assert path_run.divergence.expected == "post_tool.tool_error -> recover"
    assert path_run.divergence.decided_by == "environment_error"
    with pytest.raises(
        PathDivergenceError, match=r"post_tool.tool_error -> recover, but it was post_tool.environment_error"
    ):
        path_run.check()


@pytest.mark.slow
def test_a_path_that_is_infeasible_for_the_agent_gives_a_hint() -> None:
    """An agent without an output type never finds an answer malformed; paths that leave the rules open may."""
    agent = Agent(ScriptedModel())
    (path,) = [p for p in paths(LOOP, "transitions") if "post_llm.output_malformed" in p.ids][:1]
    with pytest.raises(PathDivergenceError, match=r"no run of this agent can take that path.*paths\(agent\)"):
        WitnessDriver(agent).run(path).check()
    assert not [p for p in paths(agent, "transitions") if "post_llm.output_malformed" in p.ids]
    late = LOOP.with_detector("post_llm", too_much)
    (path,) = [p for p in paths(PAYING, "transitions") if "post_llm.too_much" in p.ids][:1]
    assert "no run of this agent" not in str(
        WitnessDriver(default_agent(late), examples={"too_much": PAY}).run(path).divergence
    )


# -- an agent with a detector of its own --------------------------------------------------------------


@tool
def pay(amount: int, to: str) -> str:
    """Pay somebody."""
    return "paid"


@detector(
    fires_on=[Example(call=call("pay", amount=900, to="anybody"))],
    silent_on=[Example(call=call("pay", amount=90, to="anybody")), Example(reply="done")],
)
def too_much(run):
    """More is to be paid than anybody may without asking."""
    if any(c.call.name == "pay" and c.call.arguments.get("amount", 0) > 500 for c in run.batch):
        return Failure(kind=FailureKind.policy_violation, explanation="too much")
    return None


def paying(graph=None) -> Agent:
    return Agent(ScriptedModel(), tools=[pay], graph=graph or PAYING)


PAY = Example(call=call("pay", amount=900, to="anybody"))
PAYING = LOOP.with_detector("post_llm", too_much, before="tool_calls")


@pytest.mark.slow
def test_examples_of_a_custom_detector_drive_its_paths() -> None:
    found = paths(PAYING, behavior=paying().behavior, structured=False)
    assert any("post_llm.too_much" in p.ids for p in found)
    driver = WitnessDriver(paying())
    for path in found:
        driver.run(path).check()


def test_its_examples_are_checked() -> None:
    WitnessDriver(paying()).check_examples()


def test_an_example_that_does_not_make_it_fire_is_found() -> None:
    wrong = GuardExamples(fires_on=(Example(call=call("pay", amount=50, to="me")),))
    with pytest.raises(AssertionError, match=r"post_llm.too_much does not fire on its example 1"):
        WitnessDriver(paying(), examples={too_much: wrong}).check_examples()
    wrong = GuardExamples(
        fires_on=(Example(call=call("pay", amount=900, to="me")),),
        silent_on=(Example(call=call("pay", amount=901, to="me")),),
    )
    with pytest.raises(AssertionError, match=r"post_llm.too_much fires on its silent example 1"):
        WitnessDriver(paying(), examples={too_much: wrong}).check_examples()


@pytest.mark.slow
def test_a_row_in_the_wrong_place_is_a_divergence() -> None:
    """The approval rule stands behind ``tool_calls``, which takes every call first."""
    late = LOOP.with_detector("post_llm", too_much)  # in front of the last row, so behind tool_calls
    (path,) = [p for p in paths(PAYING, "transitions") if "post_llm.too_much" in p.ids][:1]
    path_run = WitnessDriver(paying(late)).run(path)
    assert path_run.divergence is not None
    assert path_run.divergence.decided_by == "tool_calls"


def test_a_guard_without_examples_is_named() -> None:
    def silent(run):
        return None

    graph = LOOP.with_detector("post_llm", silent)
    (path,) = [p for p in paths(graph, "transitions") if "post_llm.silent" in p.ids][:1]
    with pytest.raises(NoExampleError, match=r"post_llm.silent has no example: declare @detector"):
        WitnessDriver(graph).run(path)


@pytest.mark.slow
def test_the_outcomes_of_a_state_are_driven_and_its_effect_is_not_run() -> None:
    ran: list[object] = []

    def review(context: StateContext) -> StateResult:
        ran.append(context.run.answer)
        return StateResult(outcome="good")

    rows = [
        Transition("review", came_back("good"), State.TERMINAL, ends="completed"),
        Transition("review", came_back("poor"), State.PRE_STEP, spends="reviews"),
        Transition("review", None, State.TERMINAL, ends="handed_off"),
    ]
    state = StateSpec("review", effect=review, outcomes=("good", "poor"))
    graph = LOOP.with_counter(Counter("reviews", 1)).with_state(state, rows, entered_by="post_llm.otherwise")
    driver = WitnessDriver(graph)
    wanted = [path for path in paths(graph) if not {"review.cancelled", "review.aborted"} & set(path.ids)]
    taken = {d.transition.id for path in wanted for d in driver.run(path).check().decisions}
    assert {"review.good", "review.poor", "review.otherwise"} <= taken
    assert ran == []
    driver.check_examples()


def test_every_row_is_driven_where_runs_start_in_a_state_of_ones_own() -> None:
    def plan(context: StateContext) -> StateResult:
        return StateResult(outcome="planned")

    graph = LOOP.with_state(
        StateSpec("plan", effect=plan, outcomes=("planned", "failed")),
        [
            Transition("plan", came_back("failed"), State.TERMINAL, ends="handed_off"),
            Transition("plan", came_back("planned"), State.PRE_STEP),
            Transition("plan", None, State.TERMINAL, ends="handed_off"),
        ],
        entered_by=None,
    )
    driver = WitnessDriver(graph)
    for path in paths(graph, "transitions"):
        driver.run(path).check()
    driver.check_examples()


def test_an_example_may_be_a_whole_result_of_a_state() -> None:
    def again(run: RunState) -> bool:
        return run.state_results.get("review") == "poor"

    spec = StateSpec("review", effect=lambda context: "never")
    rows = [Transition("review", again, State.PRE_STEP), Transition("review", None, State.TERMINAL, ends="completed")]
    graph = LOOP.with_state(spec, rows, entered_by="post_llm.otherwise")
    example = Example(state_result=StateResult("poor", (Message.user("Once more."),)))
    driver = WitnessDriver(graph, examples={"again": example})
    path = next(path for path in paths(graph, "transitions") if "review.again" in path.ids)
    run = driver.run(path).check()
    assert "Once more." in [message.content for message in run.simulation_result.requests[-1].messages]


def test_the_examples_of_the_loops_own_guards_are_checked() -> None:
    WitnessDriver(LOOP).check_examples()


def test_a_path_that_is_too_short_or_too_long_is_a_divergence() -> None:
    rows = [LOOP.transition(i) for i in ("pre_step.otherwise", "call_llm.otherwise", "post_llm.otherwise")]
    whole = Path(1, tuple(rows), small_guardrails())
    assert WitnessDriver(LOOP).run(whole).divergence is None
    less = Path(2, tuple(rows[:2]), small_guardrails())
    clash = WitnessDriver(LOOP).run(less).divergence
    assert clash is not None
    assert (clash.move_index, clash.expected) == (2, "the end")
    more = Path(3, (*rows, Transition("terminal", None, "pre_step")), small_guardrails())
    clash = WitnessDriver(LOOP).run(more).divergence
    assert clash is not None
    assert clash.actual == ""


# -- examples that raise, and async tests --------------------------------------------------------------


def edit(run):
    return StateResult("good")


def too_long(run):
    return run.state_results["edit"] == "too long"


EDITED = LOOP.with_state(
    StateSpec("edit", effect=edit),
    [Transition("edit", too_long, "pre_step"), Transition("edit", None, "terminal", ends="completed")],
    entered_by="post_llm.otherwise",
)


@pytest.mark.slow
def test_examples_of_the_other_rows_are_checked_where_a_guard_raises_without_its_effect() -> None:
    """A run that is aborted in ``edit`` has no result of it, so ``too_long`` cannot be asked there."""
    examples = {"too_long": GuardExamples((Example(state_result="too long"),), (Example(state_result="good"),))}
    assert WitnessDriver(EDITED, examples=examples).check_examples() > 50


@pytest.mark.slow
def test_an_example_on_which_its_guard_raises_is_found() -> None:
    examples = {"too_long": GuardExamples((Example(state_result="too long"),), (Example(abort=True),))}
    with pytest.raises(AssertionError, match=r"edit.too_long raises on example 1: Example\(.*abort=True") as found:
        WitnessDriver(EDITED, examples=examples).check_examples()
    assert isinstance(found.value.__cause__, KeyError)


def in_an_event_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """What a plugin for async tests does."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@pytest.mark.slow
@in_an_event_loop
async def test_paths_examples_and_priorities_run_in_an_async_test() -> None:
    driver = WitnessDriver(paying())
    path = paths(paying(), "transitions")[0]
    assert (await driver.run_async(path)).check().run_result.state == "terminal"
    assert await driver.check_examples_async() > 50
    path_run = await check_priority_async(driver, guard_conflicts(PAYING)[0])
    assert path_run is not None
    assert path_run.divergence is None


@in_an_event_loop
async def test_what_has_a_loop_of_its_own_says_what_to_await_in_an_async_test() -> None:
    driver = WitnessDriver(paying())
    path = paths(paying(), "transitions")[0]
    inside: list[tuple[Callable[[], object], str]] = [
        (lambda: driver.run(path), "await driver.run_async(path)"),
        (driver.check_examples, "await driver.check_examples_async()"),
        (lambda: force(paying(), path), "await force_async(agent, path)"),
        (lambda: check_priority(driver, guard_conflicts(PAYING)[0]), "await check_priority_async(driver, conflict)"),
        (lambda: Simulator(paying()).run_sync(Scenario()), "await simulator.run(...)"),
    ]
    for run, instead in inside:
        with pytest.raises(RunError, match=re.escape(instead)):
            run()


def test_two_guards_are_true_at_once_through_the_example_of_one_of_them() -> None:
    """A reply that wants to pay too much makes a call, so ``tool_calls`` is true as well."""
    (conflict,) = [c for c in guard_conflicts(PAYING) if c.id == "post_llm.too_much-before-tool_calls"]
    path_run = check_priority(WitnessDriver(paying()), conflict)
    assert path_run is not None
    assert path_run.divergence is None


# -- the agent's own tools ------------------------------------------------------------------------------


def refund(amount: int) -> str:
    """Give money back."""
    return "refunded"


def refusing(amount: int) -> str:
    """Give money back."""
    raise ValueError("the account is closed")


def large(arguments: Mapping[str, Any]) -> bool:
    return arguments["amount"] > 100


@detector(
    fires_on=[Example(call=call("refund", amount=501))],
    silent_on=[Example(call=call("refund", amount=500)), Example(reply="It is paid back.")],
)
def huge(run: RunState) -> Failure | None:
    """A reply wants to give back more than 500."""
    if all(c.call.arguments.get("amount", 0) <= 500 for c in run.batch):
        return None
    return Failure(kind=FailureKind.policy_violation, explanation="too much")


REFUNDS = LOOP.with_detector("post_llm", huge, before="tool_calls")


def refunding(
    function: Callable[..., Any] = refund, approval: bool | Callable[[Mapping[str, Any]], bool] = large
) -> Agent:
    return Agent(ScriptedModel(), tools=[tool(name="refund", requires_approval=approval)(function)], graph=REFUNDS)


def divergences(driver: WitnessDriver, agent: Agent, cover: str = "pairs") -> list[PathDivergence]:
    return [run.divergence for run in (driver.run(path) for path in paths(agent, cover)) if run.divergence is not None]


@pytest.mark.slow
@pytest.mark.parametrize("tools", ["checked", "real"])
def test_every_path_can_be_taken_with_the_agents_own_tools(tools: Literal["checked", "real"]) -> None:
    assert divergences(WitnessDriver(refunding(), tools=tools), refunding()) == []


@pytest.mark.slow
def test_own_tools_are_called_with_arguments_below_and_above_their_approval_rule() -> None:
    driver = WitnessDriver(refunding(), tools="checked")
    started = [s for path in paths(refunding()) for s in driver.run(path).simulation_result.started_tools]
    own = [s for s in started if s.tool == "refund"]
    assert {s.approved for s in own} == {True, False}
    assert all(s.approved == (s.arguments["amount"] > 100) for s in own)


@pytest.mark.slow
def test_a_removed_approval_rule_is_noticed() -> None:
    without = refunding(approval=False)
    with pytest.raises(
        NoExampleError, match=r"no call of the agent's own tools requires approval.*'approval_required'"
    ):
        divergences(WitnessDriver(without, tools="checked"), without)
    needed = {"approval_required": Example(call=call("refund", amount=101))}
    assert divergences(WitnessDriver(refunding(), tools="checked", examples=needed), refunding()) == []
    found = divergences(WitnessDriver(without, tools="checked", examples=needed), without)
    assert {(each.expected, each.decided_by) for each in found} == {
        ("dispatch_tool.approval_required -> suspended", "otherwise")
    }


@pytest.mark.slow
def test_an_approval_rule_that_asks_too_late_is_noticed() -> None:
    examples = {
        "approval_required": GuardExamples(
            (Example(call=call("refund", amount=101)),), (Example(call=call("refund", amount=100)),)
        )
    }
    WitnessDriver(refunding(), tools="checked", examples=examples).check_examples()
    late = refunding(approval=lambda arguments: arguments["amount"] > 101)
    with pytest.raises(AssertionError, match="approval_required does not fire on its example 1"):
        WitnessDriver(late, tools="checked", examples=examples).check_examples()
    early = refunding(approval=lambda arguments: arguments["amount"] > 99)
    with pytest.raises(AssertionError, match="approval_required fires on its silent example 1"):
        WitnessDriver(early, tools="checked", examples=examples).check_examples()


@pytest.mark.slow
def test_a_tool_that_always_raises_is_noticed_where_its_function_runs() -> None:
    broken = refunding(refusing)
    assert divergences(WitnessDriver(broken, tools="checked"), broken) == []
    found = divergences(WitnessDriver(broken, tools="real"), broken)
    assert {each.decided_by for each in found} == {"tool_error"}
    assert {each.hint for each in found} == {"refund: ValueError: the account is closed"}


@pytest.mark.slow
def test_arguments_that_a_tool_now_refuses_are_noticed() -> None:
    def strict(amount: int, order: str) -> str:
        """Give money back."""
        return "refunded"

    needed = {"tool_calls": Example(call=call("refund", amount=5))}
    assert divergences(WitnessDriver(refunding(), tools="checked", examples=needed), refunding()) == []
    found = divergences(WitnessDriver(refunding(strict), tools="checked", examples=needed), refunding())
    assert "invalid_arguments" in {each.decided_by for each in found}


@pytest.mark.slow
def test_a_guard_that_raises_on_invalid_arguments_is_noticed() -> None:
    def careless(run: RunState) -> bool:
        return any(c.call.arguments["amount"] > 500 for c in run.batch)

    graph = LOOP.with_detector("post_llm", careless, before="tool_calls")
    agent = Agent(ScriptedModel(), tools=[tool(name="refund", requires_approval=large)(refund)], graph=graph)
    driver = WitnessDriver(agent, tools="checked", examples={"careless": Example(call=call("refund", amount=501))})
    assert "post_llm.careless raised KeyError: 'amount'" in {each.hint for each in divergences(driver, agent)}


@pytest.mark.slow
def test_functions_of_own_tools_run_only_on_request_and_get_what_they_declare() -> None:
    ran: list[str] = []

    @tool(idempotent=True)
    async def look(context: ToolContext, place: str, deep: bool = False) -> str:
        """Look somewhere."""
        assert context.idempotency_key
        ran.append("look")
        return place

    @tool(idempotent=True, retryable=True, parallel=True)
    def fetch(url: str) -> list[str]:
        """Fetch something."""
        ran.append("fetch")
        return [url]

    @tool(requires_approval=True)
    def wipe(disk: Literal["a", "b"]) -> str:
        """Wipe a disk."""
        ran.append("wipe")
        return disk

    @tool(ends_run=True)
    def close(ticket: int) -> str:
        """Close a ticket."""
        ran.append("close")
        return "closed"

    modes: tuple[tuple[Literal["scripted", "checked", "real"], set[str]], ...] = (
        ("scripted", set()),
        ("checked", set()),
        ("real", {"look", "fetch", "wipe", "close"}),
    )
    for tools, expected in modes:
        for preset in PRESETS:
            ran.clear()
            agent = Agent(ScriptedModel(), tools=[look, fetch, wipe, close], preset=preset)
            driver = WitnessDriver(agent, tools=tools)
            assert divergences(driver, agent, "transitions") == [], (tools, preset)
            if tools != "scripted":  # two calls of each, or one if no argument can vary
                assert driver.check_tools() == 8, (tools, preset)
            assert set(ran) == expected, (tools, preset)


def test_each_tool_is_called_with_and_without_approval() -> None:
    assert WitnessDriver(refunding(), tools="real").check_tools() == 4
    with pytest.raises(AssertionError, match=r"refund\(amount=\d+\) failed: refund: ValueError: the account is closed"):
        WitnessDriver(refunding(refusing, approval=True), tools="real").check_tools()
    assert WitnessDriver(refunding(refusing), tools="checked").check_tools() == 4
    with pytest.raises(ConfigurationError, match="tools='checked' or tools='real'"):
        WitnessDriver(refunding()).check_tools()


def test_a_rule_that_the_table_does_not_follow_is_noticed() -> None:
    """No call waits: the row comes after one that always holds."""

    def waits(run: RunState) -> bool:
        return run.pending_request is not None

    graph = LOOP.with_transition(Transition("dispatch_tool", waits, "post_tool"), before="approval_required")
    agent = Agent(ScriptedModel(), tools=[tool(requires_approval=True)(refund)], graph=graph)
    with pytest.raises(AssertionError, match=r"refund\(amount=1\) needs approval, which was not requested"):
        WitnessDriver(agent, tools="checked").check_tools()


def test_a_sub_agent_is_never_run() -> None:
    inner = Agent(ScriptedModel())
    agent = Agent(ScriptedModel(), tools=[inner.as_tool("inner", "Ask."), refund])
    needed = {"approval_required": Example(needs_approval=True), "tool_calls": Example(call=call("inner", task="Hi"))}
    driver = WitnessDriver(agent, tools="real", examples=needed)
    path = next(p for p in paths(agent, "transitions") if "post_tool.otherwise" in p.ids)
    driver.run(path).check()


def test_an_unknown_way_to_use_tools_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tools='fake': choose 'scripted', 'checked' or 'real'"):
        WitnessDriver(LOOP, tools="fake")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tools", "missing"),
    [
        ((), {"post_tool.question_asked", "post_tool.declared_unable"}),
        ((ask_user,), {"post_tool.declared_unable"}),
        ((return_done, return_unable), {"post_tool.question_asked"}),
        ((ask_user, return_done, return_unable), set[str]()),
    ],
)
def test_paths_take_the_rows_of_the_control_tools_that_an_agent_is_given(tools: Any, missing: set[str]) -> None:
    agent = Agent(ScriptedModel(), tools=tools)
    every, driver = paths(agent, "transitions"), WitnessDriver(agent)
    control = {"post_tool.question_asked", "post_tool.declared_unable"}
    assert {row for each in every.infeasible for row in each.rows} & control == missing
    for path in every:
        if control & {row.id for row in path.rows}:
            driver.run(path).check()
    assert {row for each in driver.undriven_rows() for row in each.rows} & control == missing


def test_rules_hooks_and_tools_get_the_dependencies_of_simulated_runs() -> None:
    seen: list[str] = []

    def expensive(arguments: dict[str, Any], context: HookContext[str]) -> bool:
        seen.append(f"rule {context.deps}")
        return True

    @tool(requires_approval=expensive)
    def pay(context: ToolContext[str], usd: int) -> str:
        """Pay."""
        seen.append(f"tool {context.deps}")
        return "paid"

    @hook(State.CALL_LLM)
    def look(context: HookContext[str]) -> None:
        seen.append(f"hook {context.deps}")

    agent = Agent(ScriptedModel(), tools=[pay], hooks=[look], deps_type=str)
    scenario = Scenario(
        model_turns=[ModelTurn(call("pay", usd=7))], tool_results=[RUN_TOOL], human_replies=[{"approval": Allow()}]
    )
    for from_records in (False, True):
        seen.clear()
        result = Simulator(agent, deps="Ann", from_records=from_records).run_sync(scenario)
        assert "suspended.approval_decided" in result.ids
        assert set(seen) == {"rule Ann", "tool Ann", "hook Ann"}
    seen.clear()
    plain = Agent(ScriptedModel(), tools=[tool(requires_approval=True)(pay.function)], hooks=[look], deps_type=str)
    assert WitnessDriver(plain, tools="real", deps="Bob").check_tools()
    assert {"tool Bob", "hook Bob"} == set(seen)


# -- guards on how a run is started -----------------------------------------------------------------


def _denied(why: str) -> Failure:
    return Failure(kind=FailureKind.policy_violation, explanation=why)


@detector(fires_on=[Example(metadata={"plan": "free"})], silent_on=[Example(), Example(metadata={"plan": "pro"})])
def is_free(run: RunState) -> Failure | None:
    return _denied("it costs") if run.metadata.get("plan") == "free" else None


@detector(fires_on=[Example(metadata={"plan": "pro"})], silent_on=[Example(metadata={"plan": "free"})])
def is_pro(run: RunState) -> Failure | None:
    return _denied("call the pro desk") if run.metadata.get("plan") == "pro" else None


@detector(fires_on=[Example(tags=["beta"])], silent_on=[Example(tags=["alpha"])])
def is_beta(run: RunState) -> Failure | None:
    return _denied("not in the beta") if "beta" in run.tags else None


@detector(fires_on=[Example(actor=Actor("eve", roles=("guest",)))], silent_on=[Example(actor="eve"), Example()])
def is_guest(run: RunState) -> Failure | None:
    return _denied("guests only look") if run.requester is not None and "guest" in run.requester.roles else None


@detector(
    fires_on=[Example(metadata={"limit": 10}, call=call("fsm_act", n=11))],
    silent_on=[Example(metadata={"limit": 10}, call=call("fsm_act", n=9)), Example(call=call("fsm_act", n=99))],
)
def past_the_limit_of_its_run(run: RunState) -> Failure | None:
    limit = run.metadata.get("limit")
    over = limit is not None and any(each.call.arguments.get("n", 0) > limit for each in run.batch)
    return _denied("past the limit") if over else None


STARTED = (
    LOOP.with_detector("pre_step", is_free, before="time_limit")
    .with_detector("pre_step", is_guest, before="time_limit")
    .with_detector("post_llm", is_pro, before="tool_calls")
    .with_detector("post_tool", is_beta, before="tool_error")
)
OWN_ROWS = {"pre_step.is_free", "pre_step.is_guest", "post_llm.is_pro", "post_tool.is_beta"}


def test_guards_on_how_a_run_is_started_are_driven_on_every_path() -> None:
    driver = WitnessDriver(STARTED)
    driver.check_examples()
    found = paths(STARTED, "transitions")
    for path in found:
        driver.run(path).check()
    assert {row for path in found for row in path.ids} >= OWN_ROWS
    plans = [driver.scenario_for(path).metadata for path in found]
    assert {"plan": "free"} in plans
    assert {"plan": "pro"} in plans


def test_on_a_path_such_a_guard_holds_always_or_never_and_never_with_one_that_excludes_it() -> None:
    for path in paths(STARTED):
        for own in OWN_ROWS:
            rows = [row.id for row in STARTED.rows(own.partition(".")[0])]
            decided = {row for row in path.ids if row in rows[rows.index(own) :]}  # it was evaluated for each of these
            assert decided == {own} or own not in decided
        assert not {"pre_step.is_free", "post_llm.is_pro"} <= set(path.ids)


def test_a_guard_may_depend_on_the_start_of_its_run_and_on_an_event() -> None:
    graph = LOOP.with_detector("post_llm", past_the_limit_of_its_run, before="tool_calls")
    driver = WitnessDriver(graph)
    driver.check_examples()
    (path, *_) = (p for p in paths(graph, "transitions") if "post_llm.past_the_limit_of_its_run" in p.ids)
    path_run = driver.run(path).check()
    assert path_run.run_result.run_state.metadata == {"limit": 10}


def test_examples_that_need_two_actors_fit_no_run_and_the_error_says_so() -> None:
    path = next(p for p in paths(STARTED) if {"pre_step.is_guest", "recover.handoff"} <= set(p.ids))
    driver = WitnessDriver(STARTED, examples={"handoff": Example(action=Action.handoff, actor="ann")})
    with pytest.raises(NoExampleError, match=r"need different metadata, or different actors"):
        driver.run(path)


def test_two_guards_on_the_start_of_a_run_hold_at_once_unless_they_exclude_each_other() -> None:
    graph = LOOP
    for each in (is_free, is_beta, is_pro):
        graph = graph.with_detector("pre_step", each)
    driver = WitnessDriver(graph)
    conflicts = {c.id: c for c in guard_conflicts(graph)}
    path_run = check_priority(driver, conflicts["pre_step.is_free-before-is_beta"])
    assert path_run is not None
    state = path_run.check().run_result.run_state
    assert (dict(state.metadata), state.tags) == ({"plan": "free"}, ("beta",))
    assert check_priority(driver, conflicts["pre_step.is_free-before-is_pro"]) is None


def test_a_guard_on_the_result_of_a_state_holds_at_once_with_another() -> None:
    def poor(run: RunState) -> bool:
        return run.state_results.get("review") == "poor"

    @detector(fires_on=[Example(tags=["beta"])])
    def beta(run: RunState) -> bool:
        return "beta" in run.tags

    rows = [
        Transition("review", beta, State.TERMINAL, ends="partial"),
        Transition("review", poor, State.PRE_STEP),
        Transition("review", None, State.TERMINAL, ends="completed"),
    ]
    spec = StateSpec("review", effect=lambda context: "good")
    graph = LOOP.with_state(spec, rows, entered_by="post_llm.otherwise")
    driver = WitnessDriver(graph, examples={"poor": Example(state_result="poor")})
    (conflict,) = [c for c in guard_conflicts(graph) if c.id == "review.beta-before-poor"]
    path_run = check_priority(driver, conflict)
    assert path_run is not None
    assert path_run.check().run_result.run_state.state_results == {"review": "poor"}
