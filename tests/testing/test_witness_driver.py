"""``WitnessDriver``: the real loop takes every path, because its scenario provides what each guard needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from agentfsm import Agent, Failure, FailureKind, RunError, tool
from agentfsm.journal.verification import verify
from agentfsm.loop.detectors import Example, detector
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import StateSpec, Transition
from agentfsm.testing import (
    GuardExamples,
    NoExampleError,
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
from tests.helpers.graphs import reference_loop


def test_every_pair_of_the_loop_is_witnessed() -> None:
    """The paths come from the table that was typed in by hand; the runs from the real one."""
    found = paths(reference_loop())
    driver = WitnessDriver(LOOP)
    for path in found:
        driver.run(path).check()
    print(f"{len(found)} paths witnessed: {found}")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("cover", ["pairs", "prime"])
def test_every_pair_and_prime_path_of_the_presets_is_witnessed(name: str, cover: str) -> None:
    preset = PRESETS[name]
    driver = WitnessDriver(default_agent(preset.graph, preset.behavior))
    for path in paths(preset.graph, cover, behavior=preset.behavior):
        driver.run(path).check()


def test_every_triple_of_the_loop_is_witnessed() -> None:
    driver = WitnessDriver(LOOP)
    for path in paths(LOOP, "triples"):
        driver.run(path).check()


def test_on_every_path_the_journal_verifies_and_every_call_has_one_result() -> None:
    driver = WitnessDriver(LOOP)
    for path in paths(LOOP):
        path_run = driver.run(path).check()
        store = path_run.simulation_result.store
        told = verify("played", store.records("played"), store.head("played"))
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


def test_the_examples_of_the_loops_own_guards_are_checked() -> None:
    WitnessDriver(LOOP).check_examples()


def test_a_path_that_is_too_short_or_too_long_is_a_divergence() -> None:
    rows = [LOOP.transition(i) for i in ("pre_step.otherwise", "call_llm.otherwise", "post_llm.otherwise")]
    whole = Path(1, tuple(rows), 1, small_guardrails())
    assert WitnessDriver(LOOP).run(whole).divergence is None
    less = Path(2, tuple(rows[:2]), 1, small_guardrails())
    clash = WitnessDriver(LOOP).run(less).divergence
    assert clash is not None
    assert (clash.move_index, clash.expected) == (2, "the end")
    more = Path(3, (*rows, Transition("terminal", None, "pre_step")), 1, small_guardrails())
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
    [Transition("edit", too_long, "pre_step"), Transition("edit", None, "terminal")],
    entered_by="post_llm.otherwise",
)


def test_examples_of_the_other_rows_are_checked_where_a_guard_raises_without_its_effect() -> None:
    """A run that is aborted in ``edit`` has no result of it, so ``too_long`` cannot be asked there."""
    examples = {"too_long": GuardExamples((Example(state_result="too long"),), (Example(state_result="good"),))}
    assert WitnessDriver(EDITED, examples=examples).check_examples() > 50


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
