"""The testing kit goes by what states do and by guards' functions: other names change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentfsm import Agent
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter, exhausted
from agentfsm.machine.graph import Graph, StateSpec, Transition
from agentfsm.runtime.state_context import StateContext
from agentfsm.testing import (
    Example,
    ScriptedModel,
    WitnessDriver,
    check_priority,
    force,
    guard_conflicts,
    paths,
)
from agentfsm.testing.path_runner import default_agent, scenarios_along_paths, scenarios_through_rows
from tests.helpers.graphs import renamed, with_wrapped_guards

PREFIX = "my_"
OTHERS = {"states renamed": renamed(LOOP, PREFIX), "guards wrapped": with_wrapped_guards(LOOP)}


def plain(ids: tuple[str, ...]) -> tuple[str, ...]:
    """The ids that these rows have in ``LOOP``."""
    return tuple(each.replace(PREFIX, "").replace(".logged_", ".") for each in ids)


@pytest.mark.slow
@pytest.mark.parametrize("graph", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("cover", ["transitions", "pairs", "prime"])
def test_a_renamed_loop_has_exactly_the_paths_of_the_loop(graph: Graph, cover: str) -> None:
    found, expected = paths(graph, cover), paths(LOOP, cover)
    assert [plain(path.ids) for path in found] == [path.ids for path in expected]
    assert [plain(each.rows) for each in found.infeasible] == [each.rows for each in expected.infeasible]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_renamed_preset_has_exactly_the_paths_of_the_preset(name: str) -> None:
    preset = PRESETS[name]
    found = paths(replace(preset, graph=renamed(preset.graph, PREFIX)))
    assert [plain(path.ids) for path in found] == [path.ids for path in paths(preset)]


@pytest.mark.slow
@pytest.mark.parametrize("graph", OTHERS.values(), ids=OTHERS)
def test_every_pair_of_a_renamed_loop_is_witnessed_and_its_examples_hold(graph: Graph) -> None:
    driver = WitnessDriver(graph)
    moves = sum(len(driver.run(path).check().decisions) for path in paths(graph))
    assert moves == sum(len(path.rows) for path in paths(LOOP))
    assert driver.check_examples() == WitnessDriver(LOOP).check_examples()
    assert driver.undriven_rows() == []


@pytest.mark.slow
def test_the_first_of_two_true_guards_of_a_renamed_loop_wins_wherever_it_does_in_the_loop() -> None:
    held: dict[str, list[str]] = {}
    for graph in (LOOP, renamed(LOOP, PREFIX)):
        driver = WitnessDriver(graph)
        held[graph.name] = [
            conflict.id.removeprefix(PREFIX)
            for conflict in guard_conflicts(graph)[::4]
            if check_priority(driver, conflict) is not None
        ]
    assert held["my_loop"] == held["loop"] != []


def test_a_renamed_loop_is_forced_along_every_row_and_ends_in_the_same_ways() -> None:
    def endings(graph: Graph) -> list[str]:
        agent = default_agent(graph)
        return [type(force(agent, path).run_result.outcome).__name__ for path in paths(graph, "transitions")]

    assert endings(renamed(LOOP, PREFIX)) == endings(LOOP)


def test_random_scenarios_of_a_renamed_loop_follow_the_same_paths() -> None:
    mine, usual = default_agent(renamed(LOOP, PREFIX)), default_agent(LOOP)
    for scenarios in (scenarios_through_rows, scenarios_along_paths):  # as text: equal exceptions are not equal
        assert repr(list(scenarios(mine))) == repr(list(scenarios(usual)))


def test_a_guard_of_ones_own_that_is_made_from_a_counter_stays_what_it_is() -> None:
    reviews = Counter("reviews", 2)

    @exhausted(reviews, past=True)
    def reviewed_too_often(run: RunState) -> bool:
        return True

    graph = LOOP.with_counter(reviews).with_state(
        StateSpec("review", effect=review, spends="reviews"),
        [
            Transition("review", reviewed_too_often, "terminal", ends="partial"),
            Transition("review", None, "pre_step"),
        ],
        entered_by="post_llm.otherwise",
    )
    (path,) = (p for p in paths(with_wrapped_guards(graph), "transitions") if "review.reviewed_too_often" in p.ids)
    assert path.ids.count("post_llm.otherwise") == 3


def approved(run: RunState) -> bool:
    """A review approved the answer."""
    return run.state_results.get("review") == "approved"


def review(context: StateContext) -> None:
    """Review nothing; examples say what it came back with."""


REVIEW = LOOP.with_state(
    StateSpec("review", effect=review),
    [Transition("review", approved, "terminal", ends="completed"), Transition("review", None, "pre_step")],
    entered_by="post_llm.otherwise",
)


def test_rows_that_the_kit_cannot_drive_are_listed_with_the_reason() -> None:
    (row,) = WitnessDriver(REVIEW).undriven_rows()
    assert row.rows == ("review.approved",)
    assert "review.approved has no example: declare @detector(fires_on=[Example(...)])" in row.reason
    examples = {"approved": Example(state_result="approved")}
    assert WitnessDriver(REVIEW, examples=examples).undriven_rows() == []


def test_rows_that_no_run_of_the_agent_can_take_are_listed_with_the_reason() -> None:
    rows = {each.rows[0]: each.reason for each in WitnessDriver(Agent(ScriptedModel())).undriven_rows()}
    assert rows["post_tool.question_asked"] == "question_asked: the control tools are not registered"
