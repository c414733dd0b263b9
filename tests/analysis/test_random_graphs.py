"""Random graphs that users might write, in random worlds: each is refused with a reason, or no run leaves its model.

For each accepted graph, every run stays inside the model that proofs are based on (the monitor raises otherwise) and
inside the bounds, and no run contradicts a verdict.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from agentfsm import Agent
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import Analysis, AnalysisLimits, Property, analyse, must_pass, never_after
from agentfsm.analysis.safety_properties import VIOLATED
from agentfsm.loop.outcomes import CALL_MODEL
from agentfsm.machine.graph import Graph
from tests.helpers.random_agents import FEATURES, Stretch, draw_agent, run_in_world
from tests.helpers.random_graphs import World
from tests.test_docs import ROOT

LIMITS = AnalysisLimits(max_configurations=40_000, max_seconds=60)

PROPERTIES = 4
"""How many random properties of each graph are decided, besides those that hold for every graph."""


@dataclass
class Counts:
    """What a number of seeds came to."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    moves: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)

    @property
    def decided(self) -> float:
        """The share of the verdicts that were decided."""
        return 1 - self.verdicts["None"] / max(1, self.verdicts.total())

    def __str__(self) -> str:
        features = ", ".join(f"{name} {self.features[name]}" for name in FEATURES)
        return (
            f"{self.accepted} random graphs accepted and {self.refused.total()} refused; {self.runs} runs of"
            f" {self.moves:,} moves inside the model and the bounds; {self.verdicts['True']} verdicts hold,"
            f" {self.verdicts['False']} are broken, {self.verdicts['None']} open ({self.decided:.0%} decided);"
            f" accepted graphs by feature: {features}"
        )


def random_properties(graph: Graph, seed: int) -> list[Property]:
    dice = random.Random(seed)
    names = [s.name for s in graph.states] + [t.id for t in graph]
    made: list[Property] = []
    for _ in range(PROPERTIES):
        a, b, c = (dice.choice(names) for _ in range(3))
        made.append(must_pass(a, through=b, when=c) if dice.random() < 0.5 else never_after(a, b, until=c))
    return made


def check_run(analysis: Analysis, properties: Sequence[Property], stretches: Sequence[Stretch]) -> None:
    """Compare a run with what was proved: its bounds, the rows that are never taken, and each property that holds."""
    graph, bounds = analysis.graph, analysis.bounds
    calling = [row for row in graph if graph.spec(row.source).effect is CALL_MODEL and row.ends != "aborted"]
    model_calls = [sum(row in calling for row in each.rows) for each in stretches]  # with none left, it is aborted
    for each, calls in zip(stretches, model_calls, strict=True):
        for bound in (bounds.moves, bounds.from_counters):
            assert_at_most(bound, len(each.rows), "moves between two waits")
        assert_at_most(bounds.model_calls, calls, "model calls between two waits")
        assert_at_most(bounds.tool_calls, each.tool_calls, "tool calls between two waits")
    assert_at_most(bounds.model_calls_in_all, sum(model_calls), "model calls")
    assert_at_most(bounds.tool_calls_in_all, sum(each.tool_calls for each in stretches), "tool calls")
    taken = [row.id for each in stretches for row in each.rows]
    never = {dead.row for dead in analysis.dead}
    assert not never & set(taken), f"proved never to be taken: {never & set(taken)}"
    places = {row.id: place for place, row in enumerate(graph.transitions)}
    holding = {verdict.text for verdict in analysis.verdicts if verdict.holds}
    for each in properties:
        state, step = each.automaton(graph)
        for row in taken:
            state = step(state, places[row])
            assert state != VIOLATED or each.text not in holding, f"{each.text} was proved, and a run does it: {taken}"


def assert_at_most(bound: int | None, made: int, what: str) -> None:
    assert bound is None or made <= bound, f"{made} {what}, proved: {bound}"


def explore_seed(seed: int, worlds: int, counts: Counts) -> None:
    """Draw the agent of a seed, analyse it, and run it in some worlds."""
    world = World(seed)
    drawn = draw_agent(seed, world)
    if drawn.agent is None:
        assert drawn.refusal
        counts.refused[drawn.refusal.partition(": ")[2]] += 1
        return
    counts.accepted += 1
    counts.features.update(drawn.features)
    agent = drawn.agent
    properties = random_properties(agent.graph, seed)
    analysis = analyse_agent(agent, properties)
    counts.verdicts.update(str(verdict.holds) for verdict in analysis.verdicts)
    assert {v.text for v in analysis.verdicts if v.text.startswith(("every run", "from everywhere")) and v.holds}
    for number in range(worlds):
        stretches = asyncio.run(run_in_world(agent, world, 1_000 * seed + number))
        check_run(analysis, properties, stretches)
        counts.runs += 1
        counts.moves += sum(len(each.rows) for each in stretches)


def analyse_agent(agent: Agent, properties: Sequence[Property]) -> Analysis:
    traits = proof_traits(agent.config)
    return analyse(agent.graph, *properties, guardrails=agent.guardrails, traits=traits, limits=LIMITS)


@pytest.mark.slow
def test_a_sample_of_random_graphs_in_random_worlds(counted: Callable[[str], None]) -> None:
    counts = Counts()
    for seed in range(20):
        explore_seed(seed, 6, counts)
    assert counts.accepted >= 13
    assert counts.decided >= 0.9
    counted(str(counts))


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_300_random_graphs_in_50_worlds_each(counted: Callable[[str], None]) -> None:
    counts = Counts()
    for seed in range(1_000, 1_300):
        explore_seed(seed, 50, counts)
    assert counts.accepted >= 200
    assert {name: n for name in FEATURES if (n := counts.features[name]) < 30} == {}
    assert counts.decided >= 0.9
    counted(str(counts))
    page = " ".join((ROOT / "docs" / "proofs.md").read_text(encoding="utf-8").split())
    verdicts = counts.verdicts
    for published in (
        f"{counts.refused.total()} were refused, each with a reason, and {counts.accepted} were accepted",
        f"all {counts.runs:,} runs ({counts.moves:,} moves)",
        f"Of {verdicts.total():,} verdicts {verdicts['True']:,} hold, {verdicts['False']} are broken and"
        f" {verdicts['None']} are open",
        f"in at least {min(counts.features[name] for name in FEATURES)} accepted graphs",
    ):
        assert published in page
