"""SPIN and our model checker agree: on LOOP, on the presets, and on random tables with random assumptions."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from agentfsm.agent.config import proof_traits
from agentfsm.analysis import (
    AgentTraits,
    Assumptions,
    Property,
    Update,
    Variable,
    analyse,
    counter_acceleration,
    exported_model,
    graph_assumptions,
    iff,
    must_pass,
    needs_approvals,
    never_after,
)
from agentfsm.analysis.analyse import _check_end_reachable
from agentfsm.analysis.analysis_limits import AnalysisLimitError, AnalysisLimits, Meter
from agentfsm.analysis.bounds import compute_bounds
from agentfsm.analysis.model_checker import ModelChecker, find_lasso
from agentfsm.analysis.state_space import BreadthFirstSearch, StateSpace
from agentfsm.diagrams.promela import promela_model
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, StateSpec, Transition
from agentfsm.testing import paths
from agentfsm.testing.path_generation import small_guardrails, state_space_for
from tests.helpers.graphs import endless_retry, random_graph_with_assumptions, retry_bypassing_budget, unasked_guard
from tests.helpers.random_agents import draw_agent
from tests.helpers.random_graphs import World
from tests.helpers.spin import (
    MAX_CALLS,
    MAX_COUNTER,
    Exploration,
    SpinCase,
    SpinResult,
    explore,
    require_spin,
    run_spin,
)

BATCHES = 10
"""Of 20 random tables each. The first is always checked, the others in soak runs."""


def compare(case: SpinCase, found: SpinResult) -> int:
    """Compare every verdict on a case with SPIN's; returns how many were compared."""
    checker = ModelChecker(case.graph, case.assumptions)
    name = case.graph.name
    assert (find_lasso(checker) is not None) == found.endless, name
    taken = {
        i
        for i, t in enumerate(case.graph.transitions)
        if checker.find_violation(Property("never taken", forbidden=t.id)) is not None
    }
    assert taken == found.rows, name
    product = StateSpace(case.graph, case.assumptions)
    assert pairs(product) == found.pairs, name
    most = compute_bounds(case.graph, case.assumptions)
    longest = most.moves
    assert (longest is None) == found.endless, name
    if longest is not None and longest < MAX_COUNTER:
        assert longest == found.longest, name
    for large in (1, 100):  # almost every counter is folded, or none: the result is the same
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counter_acceleration, "FOLDING_THRESHOLD", large)
            other = compute_bounds(case.graph, case.assumptions)
            assert replace(other, longest=(), assumptions=()) == replace(most, longest=(), assumptions=()), name
    properties = [must_pass(a, through=b, when=c) for a, b, c in case.passes]
    properties += [never_after(a, b, until=c) for a, b, c in case.nevers]
    broken = {i for i, p in enumerate(properties) if checker.find_violation(p) is not None}
    assert broken == found.broken, name
    return 4 + len(case.graph.transitions) + len(properties)


def compare_exploration(case: SpinCase, found: Exploration) -> int:
    """Compare our verdicts with an exploration of the full model; returns how many were compared."""
    checker = ModelChecker(case.graph, case.assumptions)
    name = case.graph.name
    ending = _check_end_reachable(checker)
    assert ending.holds is found.ends, f"{name}: {ending}"
    most = compute_bounds(case.graph, case.assumptions)
    ours = (most.model_calls_in_all, most.tool_calls_in_all, most.model_calls, most.tool_calls)
    if most.moves is None:
        return 1
    for one, other in zip(ours, found.most, strict=True):
        assert (None if one is None or one >= MAX_CALLS else one) == other, f"{name}: {ours} against {found.most}"
    return 5


def pairs(product: StateSpace) -> set[tuple[int, int]]:
    seen = {(product.initial, -1)}
    todo = list(seen)
    while todo:
        config, _ = todo.pop()
        for row, after in product.moves(config):
            if (after, row) not in seen:
                seen.add((after, row))
                todo.append((after, row))
    return {(last, row) for config, last in seen if last >= 0 for row, _ in product.moves(config)}


def with_questions(seed: int) -> SpinCase:
    graph, assumptions = random_graph_with_assumptions(seed)
    dice = random.Random(-seed)
    names = [s.name for s in graph.states] + [t.id for t in graph]
    pick = lambda: dice.choice(names)  # noqa: E731
    return SpinCase(
        graph,
        assumptions,
        [(pick(), pick(), ""), (pick(), pick(), pick())],
        [(pick(), pick(), ""), (pick(), pick(), pick())],
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, BATCHES))])
def test_random_tables(batch: int, tmp_path: Path) -> None:
    cases = [with_questions(seed) for seed in range(20 * batch, 20 * batch + 20)]
    found = run_spin(cases, tmp_path)
    compared = sum(compare(case, each) for case, each in zip(cases, found, strict=True))
    kinds = f"{sum(f.endless for f in found)} endless, {sum(len(f.broken) for f in found)} broken properties"
    print(f"spin agrees on {len(cases)} random tables: {compared} verdicts ({kinds})")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, BATCHES))])
def test_random_tables_explored(batch: int, tmp_path: Path) -> None:
    cases = [SpinCase(*random_graph_with_assumptions(seed)) for seed in range(20 * batch, 20 * batch + 20)]
    found = explore(cases, tmp_path)
    compared = sum(compare_exploration(case, each) for case, each in zip(cases, found, strict=True))
    lost = sum(not each.ends for each in found)
    print(f"spin walked {len(cases)} random tables: {compared} verdicts, {lost} from which the end can be lost")


PASSES = [
    ("call_llm", "pre_step", ""),
    ("dispatch_tool", "approval_decided", "approval_required"),
    ("post_tool", "suspended", "approval_required"),
    ("terminal", "call_llm", ""),
    ("pre_step", "recover", "output_malformed"),
]
NEVERS = [
    ("dispatch_tool", "output_malformed", "pre_step"),
    ("call_llm", "runaway", ""),
    ("suspended", "post_llm.otherwise", ""),
    ("recover", "suspended", ""),
]
SMALL = {"max_iterations": 2, "max_steps": 4, "max_continues": 1, "max_tokens": 10, "max_cost_usd": 1.0}
SMALL_BATCHES = {**SMALL, "max_calls_per_reply": 2}


def of_the_loop(graph: Graph, rules: Behavior | None) -> SpinCase:
    assumptions = graph_assumptions(graph, AgentGuardrails(**SMALL_BATCHES), AgentTraits(rules))
    return SpinCase(graph, assumptions, PASSES, NEVERS)


THE_LOOP_AND_PRESETS = [(), pytest.param(tuple(PRESETS), marks=pytest.mark.soak)]


@pytest.mark.slow
@pytest.mark.parametrize("presets", THE_LOOP_AND_PRESETS)
def test_the_loop_and_every_preset(presets: tuple[str, ...], tmp_path: Path) -> None:
    cases = [of_the_loop(LOOP, None), *(of_the_loop(PRESETS[n].graph, PRESETS[n].behavior) for n in presets)]
    found = run_spin(cases, tmp_path)
    compared = sum(compare(case, each) for case, each in zip(cases, found, strict=True))
    assert not any(f.endless for f in found)
    print(f"spin agrees on LOOP and {len(presets)} presets: {compared} verdicts")


@pytest.mark.slow
@pytest.mark.parametrize("presets", THE_LOOP_AND_PRESETS)
def test_the_loop_and_every_preset_explored(presets: tuple[str, ...], tmp_path: Path) -> None:
    """The end can be reached from every configuration, and no run makes more calls than the bounds say."""
    cases = [of_the_loop(LOOP, None), *(of_the_loop(PRESETS[n].graph, PRESETS[n].behavior) for n in presets)]
    found = explore(cases, tmp_path)
    compared = sum(compare_exploration(case, each) for case, each in zip(cases, found, strict=True))
    assert all(each.ends for each in found)
    print(f"spin walked {sum(each.configurations for each in found):,} configurations: {compared} verdicts")


@pytest.mark.slow
def test_both_find_states_from_which_the_end_cannot_be_reached(tmp_path: Path) -> None:
    """By hand: the end opens after the third use of a row that closes for good after the second."""
    door, ring = unasked_guard("door"), unasked_guard("ring")
    graph = Graph(
        (StateSpec("house"), StateSpec("yard", waits=True), StateSpec("end", final=True)),
        (
            Transition("house", ring, "end", ends="completed"),
            Transition("house", None, "yard"),
            Transition("yard", door, "house"),
            Transition("yard", None, "yard"),
        ),
        "yard",
    )
    used = Variable("used", 3, (Update("yard.door", 1),))
    assumptions = Assumptions((used,), (iff(door, "used < 2"), iff(ring, "used >= 3")))
    open_forever = Assumptions((used,), (iff(ring, "used >= 3"),))
    found = explore([SpinCase(graph, assumptions), SpinCase(graph, open_forever)], tmp_path)
    assert [each.ends for each in found] == [False, True]
    for each, result in zip((assumptions, open_forever), found, strict=True):
        assert compare_exploration(SpinCase(graph, each), result) >= 1
    (verdict,) = [v for v in analyse(graph, assumptions=assumptions).verdicts if v.text.startswith("from everywhere")]
    assert verdict.holds is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", *PRESETS])
def test_pairs_that_no_path_covers_are_those_that_spin_never_takes(name: str, tmp_path: Path) -> None:
    """Of all pairs of consecutive rows, the generated paths cover exactly those that SPIN takes."""
    graph, rules = (LOOP, None) if name == "loop" else (PRESETS[name].graph, PRESETS[name].behavior)
    assumptions = state_space_for(graph, small_guardrails(rules), AgentTraits(rules)).assumptions
    (found,) = run_spin([SpinCase(graph, assumptions)], tmp_path)
    ids = [t.id for t in graph]
    listed = paths(graph, behavior=rules)
    taken = {pair for path in listed for pair in pairwise(path.ids)}
    assert taken == {(ids[a], ids[b]) for a, b in found.pairs}
    assert len(taken) + len(listed.infeasible) == listed.required
    print(f"{name}: {len(taken)} of {len(taken)} feasible pairs are taken by {len(listed)} runs, as spin has it")


@pytest.mark.soak  # the quick suite has SPIN search the public export of the same graphs
def test_graphs_that_are_endless_for_one_are_endless_for_the_other(tmp_path: Path) -> None:
    faults = (endless_retry(resets=True), endless_retry(resets=False), retry_bypassing_budget())
    faulty = [SpinCase(*each) for each in faults]
    found = run_spin(faulty, tmp_path)
    assert [f.endless for f in found] == [True, False, True]
    for each, seen in zip(faulty, found, strict=True):
        compare(each, seen)


MOST_VISITED = 300_000
"""A graph of a user's whose model has more configurations and moves than this is left out."""


def users_cases(seeds: range) -> list[SpinCase]:
    """Graphs that users might write, with what is known about the agents that run them."""
    cases: list[SpinCase] = []
    for seed in seeds:
        drawn = draw_agent(seed, World(seed))
        if drawn.agent is not None:
            traits = proof_traits(drawn.agent.config)
            graph = replace(drawn.agent.graph, name=f"user {seed}")
            cases.append(SpinCase(graph, graph_assumptions(graph, ONE, traits), PASSES[:2], NEVERS[:2]))
    return [case for case in cases if _has_names(case) and _is_small(case)]


def _is_small(case: SpinCase) -> bool:
    """Whether SPIN can search the whole model in minutes, and count the moves of a longest stretch."""
    most = compute_bounds(case.graph, case.assumptions).moves
    if most is not None and most >= MAX_COUNTER:
        return False
    space = StateSpace(case.graph, case.assumptions, meter=Meter(AnalysisLimits(MOST_VISITED, max_seconds=600)))
    try:
        for _ in BreadthFirstSearch(space.initial, space.moves):
            pass
    except AnalysisLimitError:
        return False
    return True


def _has_names(case: SpinCase) -> bool:
    names = {name for t in case.graph for name in (t.id, t.name, t.target)}
    return all(not name or name in names for rule in (*case.passes, *case.nevers) for name in rule)


ONE = AgentGuardrails(max_iterations=1, max_steps=2, max_continues=1, max_calls_per_reply=2)


# In batch 2 a variable matters only by ruling out the one row that reads it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "least"), [([2], 3), *(pytest.param(range(n, 60, 4), 50, marks=pytest.mark.soak) for n in range(4))]
)
@pytest.mark.timeout(3600)
def test_random_graphs_of_users(
    batches: Sequence[int], least: int, tmp_path: Path, counted: Callable[[str], None]
) -> None:
    """That they end, the rows that are ever taken, and the properties that do not hold, as SPIN has them.

    The four soak tests compare at least 200 graphs between them.
    """
    graphs = compared = 0
    for batch in batches:
        cases = users_cases(range(5 * batch, 5 * batch + 5))
        found = run_spin(cases, tmp_path)
        compared += sum(compare_user_graph(case, each) for case, each in zip(cases, found, strict=True))
        graphs += len(cases)
    assert graphs >= least
    counted(f"SPIN agrees on {graphs} random graphs of users (batches {batches}): {compared} verdicts")


def compare_user_graph(case: SpinCase, found: SpinResult) -> int:
    """Compare the verdicts on a graph of a user's with SPIN's; returns how many were compared."""
    checker, name = ModelChecker(case.graph, case.assumptions), case.graph.name
    properties = [must_pass(a, through=b, when=c) for a, b, c in case.passes]
    properties += [never_after(a, b, until=c) for a, b, c in case.nevers]
    assert {i for i, p in enumerate(properties) if checker.find_violation(p) is not None} == found.broken, name
    taken = {
        i
        for i, t in enumerate(case.graph.transitions)
        if checker.find_violation(Property("never taken", forbidden=t.id)) is not None
    }
    assert taken == found.rows, name
    assert not found.endless, name
    most = compute_bounds(case.graph, case.assumptions).moves
    assert most is not None, name
    assert most >= found.longest, name
    return 2 + len(case.graph.transitions) + len(properties)


def errors_by_spin(model: str, folder: Path, formula: str = "ends_or_waits") -> int:
    """How many errors SPIN finds in a model, run as a user would run it."""
    (folder / "model.pml").write_text(model, encoding="utf-8")
    command = [require_spin(), "-search", "-O1", "-a", "-m1000000", "-ltl", formula, "model.pml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return int(done.stdout.partition("errors: ")[2].split()[0])


TWO = AgentGuardrails(max_iterations=2, max_steps=3, max_continues=1, max_calls_per_reply=2)


@pytest.mark.parametrize("name", ["loop", *(pytest.param(name, marks=pytest.mark.soak) for name in PRESETS)])
def test_the_public_export_of_every_preset_ends_or_waits(name: str, tmp_path: Path) -> None:
    graph, rules = (LOOP, None) if name == "loop" else (PRESETS[name].graph, PRESETS[name].behavior)
    assert errors_by_spin(promela_model(graph, exported_model(graph, TWO, AgentTraits(rules))), tmp_path) == 0


@pytest.mark.slow
def test_the_public_export_of_an_endless_graph_does_not_end(tmp_path: Path) -> None:
    """A retry that goes past the budget check, and one whose budget each success resets."""
    dodging, _ = retry_bypassing_budget()
    assert errors_by_spin(promela_model(dodging, exported_model(dodging, TWO)), tmp_path) == 1
    assert find_lasso(ModelChecker(dodging, graph_assumptions(dodging, TWO))) is not None
    for resets in (True, False):
        graph, assumptions = endless_retry(resets=resets)
        model = promela_model(graph, exported_model(graph, TWO, assumptions=assumptions))
        assert errors_by_spin(model, tmp_path) == int(resets)


def past_the_votes(name: str, target: str = "dispatch_tool") -> Graph:
    return with_votes(LOOP).with_transition(Transition("suspended", unasked_guard(name), target))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "approvals", "holds"),
    [
        (with_votes(LOOP), 2, True),
        (past_the_votes("hurry"), 2, False),
        (past_the_votes("skip", "post_tool"), 2, False),
        (past_the_votes("give_up", "pre_step"), 2, True),
        (LOOP, 2, False),
        (LOOP, 1, True),
    ],
    ids=["votes", "a way past them", "a longer one", "a way back to the start", "no votes", "one approval"],
)
def test_no_effect_before_the_approvals_is_what_spin_finds(
    graph: Graph, approvals: int, holds: bool, tmp_path: Path
) -> None:
    small = AgentGuardrails(max_iterations=1, max_steps=2, max_continues=1, max_calls_per_reply=2)
    wanted = needs_approvals("pay", approvals)
    model = promela_model(graph, exported_model(graph, small), [wanted])
    assert errors_by_spin(model, tmp_path, "property_1") == int(not holds)
    assert analyse(graph, wanted, guardrails=small).verdicts[-1].holds is holds


@pytest.mark.slow
def test_other_properties_are_exported_too(tmp_path: Path) -> None:
    dodging, _ = retry_bypassing_budget()
    wanted = [must_pass("call_llm", through="pre_step"), never_after("call_llm", "runaway")]
    model = promela_model(dodging, exported_model(dodging, ONE), wanted)
    assert errors_by_spin(model, tmp_path, "property_1") == 1
    assert errors_by_spin(model, tmp_path, "property_2") == 0
    assert "ltl property_1 { [](p_1 != 2) } /* call_llm only after pre_step */" in model


def test_the_diagram_format_is_the_same_export() -> None:
    assert LOOP.diagram("promela") == promela_model(LOOP, exported_model(LOOP))
