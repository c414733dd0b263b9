"""Other state machine engines execute the exported graphs as ours does, for every row of the truth tables."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agentfsm.diagrams import diagram
from agentfsm.diagrams.interchange import SCXML_NAMESPACE
from agentfsm.errors import NoTransitionError
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import Graph, Machine
from tests.helpers.graphs import SMALL_GRAPH, extended_loop, unchecked_graph
from tests.helpers.npm_servers import install_package, require_node

GRAPHS = {
    "loop": LOOP,
    **{n: p.graph for n, p in PRESETS.items()},
    "votes": with_votes(LOOP),
    "more": extended_loop(),
    "small": SMALL_GRAPH,
}
XSTATE = "5.33.3"

TakenRow = tuple[int, str]
"""The number of the row taken, from 1 (0 for none), and the state to which it led."""


@dataclass
class Run:
    """A run that consists of its state and the guards that hold."""

    state: str
    holds: frozenset[str]
    counters: dict[str, int] = field(default_factory=dict[str, int])
    guardrails: AgentGuardrails = field(default_factory=AgentGuardrails)

    def view(self) -> Run:
        return self

    def call(self, role: str, function: Callable[..., Any]) -> Any:
        return function(self)

    def abort(self, by: str, error: BaseException) -> None:
        raise AssertionError(f"{by}: {error}")


def reading(name: str) -> Callable[[Run], bool]:
    def guard(run: Run) -> bool:
        return name in run.holds

    guard.__name__ = name
    return guard


def ours(graph: Graph, cases: Callable[[int], Iterator[int]]) -> dict[str, list[TakenRow]]:
    """The rows that our engine takes, for each state and each combination of guard results, as bits."""
    guards = {t.name: reading(t.name) for t in graph if t.guard is not None}
    rows = tuple(replace(t, guard=guards.get(t.name)) for t in graph)
    machine = Machine(unchecked_graph(graph.states, rows, graph.name, graph.counters))
    taken: dict[str, list[TakenRow]] = {}
    for spec in graph.states:
        names = [t.name for t in graph.rows(spec.name) if t.guard is not None]
        places = {t.name: place for place, t in enumerate(graph.rows(spec.name), 1)}
        taken[str(spec.name)] = []
        for bits in cases(len(names)) if not spec.final else (0,):
            run = Run(spec.name, frozenset(n for i, n in enumerate(names) if bits >> i & 1))
            try:
                row = machine.step(run).transition if not spec.final else None
            except NoTransitionError:  # it keeps waiting
                row = None
            taken[str(spec.name)].append((0 if row is None else places[row.name], str(run.state)))
    return taken


def all_combinations(guards: int) -> Iterator[int]:
    yield from range(2**guards)


def selected_combinations(guards: int) -> Iterator[int]:
    """For each guard: only it holds, and it and all later ones hold."""
    yield 0
    for place in range(guards):
        yield 1 << place
        yield (1 << guards) - (1 << place)


@pytest.mark.slow
def test_xstate_agrees_on_every_row_of_the_truth_tables() -> None:
    """All combinations; ``post_tool`` of the default loop alone has 32,768."""
    program, folder = require_node(), install_package("xstate", XSTATE)
    graphs = {graph.fingerprint: graph for graph in GRAPHS.values()}  # some presets share a table
    given = {
        "xstate": str(folder / "dist" / "xstate.cjs.js"),
        "machines": [json.loads(diagram(graph, "xstate")) for graph in graphs.values()],
    }
    done = subprocess.run(
        [program, str(Path(__file__).with_name("xstate.mjs"))],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compared = 0
    for graph, theirs in zip(graphs.values(), json.loads(done.stdout), strict=True):
        expected = ours(graph, all_combinations)
        assert theirs.keys() == expected.keys(), graph.name
        for state, rows in expected.items():
            assert [tuple(row) for row in theirs[state]] == rows, f"{graph.name}: {state}"
            compared += len(rows)
    assert compared > 33_000
    print(f"xstate {XSTATE} agrees on {compared:,} of {compared:,} rows of {len(graphs)} graphs")


@pytest.mark.slow
def test_python_statemachine_agrees_on_the_rows_taken() -> None:
    """It loads the SCXML unchanged; guards are looked up in the model."""
    load: Any = pytest.importorskip("statemachine.io", reason="python-statemachine is not installed").load
    compared = 0
    for name, graph in GRAPHS.items():
        chart = load(diagram(graph, "scxml"), format="scxml")
        guards = {t.name for t in graph if t.guard is not None}
        for state, rows in ours(graph, selected_combinations).items():
            if graph.spec(state).final:
                continue
            names = [t.name for t in graph.rows(state) if t.guard is not None]
            for bits, (_, target) in zip(selected_combinations(len(names)), rows, strict=True):
                model = type("Model", (), dict.fromkeys(guards, False))()
                for place, guard in enumerate(names):
                    setattr(model, guard, bool(bits >> place & 1))
                machine = chart(model=model, start_value=state)
                machine.send("step")
                assert list(machine.configuration_values) == [target], f"{name}: {state} with {bits:b}"
                compared += 1
    print(f"python-statemachine agrees on {compared} of {compared} cases of {len(GRAPHS)} graphs")


def test_a_wait_that_counts_votes_is_exported_as_it_is_in_the_table() -> None:
    graph = with_votes(LOOP)
    limits = {each.name: each.limit for each in graph.counters}
    rows = [
        (t.name, t.source, t.target, " ".join(t.spends), " ".join(t.refills)) for t in graph if t.spends or t.refills
    ]
    assert ("vote_recorded", "suspended", "suspended", "votes", "") in rows
    assert limits["votes"] == 15

    machine = json.loads(diagram(graph, "xstate"))
    told = [
        (
            row.get("guard", "otherwise"),
            source,
            row["target"],
            row["meta"].get("spends", ""),
            row["meta"].get("refills", ""),
        )
        for source, state in machine["states"].items()
        for row in state.get("on", {}).get("step", [])
        if {"spends", "refills"} & row["meta"].keys()
    ]
    assert (machine["meta"]["counters"], told) == (limits, rows)

    root = ElementTree.fromstring(diagram(graph, "scxml"))
    ours = f"{{{SCXML_NAMESPACE}}}"
    told = [
        (
            row.get("cond", "otherwise"),
            state.get("id"),
            row.get("target"),
            row.get(f"{ours}spends", ""),
            row.get(f"{ours}refills", ""),
        )
        for state in root
        for row in state
        if row.get(f"{ours}spends") or row.get(f"{ours}refills")
    ]
    counters = dict(each.split("=") for each in root.get(f"{ours}counters", "").split())
    assert (counters, told) == ({name: str(limit) for name, limit in limits.items()}, rows)
