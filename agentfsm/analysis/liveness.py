"""Live variables: where the value of a variable can still matter, so that a search can forget it elsewhere.

A variable is *dead* where it is set again, whatever happens, before it is read. Configurations that differ only in dead
variables have the same future, so a search sets these to 0 and visits one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentfsm.analysis.assumptions import Assumptions, NumericCondition, Variable, comparisons
from agentfsm.analysis.state_space import Configuration, StateSpace
from agentfsm.machine.graph import Graph, Transition


def dead_variables(graph: Graph, assumptions: Assumptions) -> Mapping[Configuration, frozenset[str]]:
    """The names of the dead variables, by the place of a state and the values of the labelled variables."""
    modes = StateSpace(graph, assumptions, [v.name for v in assumptions.counters if v.labels])
    moves = {config: modes.moves(config) for config in _configurations(modes)}
    dead: dict[Configuration, set[str]] = {config: set() for config in moves}
    reads = _variables_read(graph, assumptions)
    for variable in assumptions.counters:
        live = _live(variable, moves, graph, reads)
        for config in moves.keys() - live:
            dead[config].add(variable.name)
    return {config: frozenset(names) for config, names in dead.items()}


def _configurations(space: StateSpace) -> list[Configuration]:
    found = {space.initial: None}
    for config in (todo := [space.initial]):
        for _, after in space.moves(config):
            if after not in found:
                found[after] = None
                todo.append(after)
    return list(found)


def _variables_read(graph: Graph, assumptions: Assumptions) -> list[set[str]]:
    """The variables that decide whether each row is taken, or what it sets."""
    known = assumptions.guards_by_row(graph)
    reads: list[set[str]] = []
    for row in graph.transitions:
        texts = [text for k in known[row.id] for text in (k.may, k.must)]
        texts += [update.when for each in assumptions.counters for update in each.updates_for(row)]
        reads.append({test.counter for text in texts for test in comparisons(text)})
    return reads


def _live(
    variable: Variable,
    moves: Mapping[Configuration, tuple[tuple[int, Configuration], ...]],
    graph: Graph,
    reads: list[set[str]],
) -> set[Configuration]:
    rows = graph.transitions
    read = {place for place, names in enumerate(reads) if variable.name in names}
    keeps = {place for place, row in enumerate(rows) if not _sets(variable, row)}
    if variable.labels:  # its value decides which rows are among the moves: also one that it rules out reads it
        sources = {rows[place].source for place in read}
        live = {config for config in moves if graph.states[config[0]].name in sources}
    else:
        live = {config for config, onward in moves.items() if any(place in read for place, _ in onward)}
    before: dict[Configuration, set[Configuration]] = {}
    for config, onward in moves.items():
        for place, after in onward:
            if place in keeps:
                before.setdefault(after, set()).add(config)
    todo = list(live)
    while todo:
        for config in before.get(todo.pop(), ()):
            if config not in live:
                live.add(config)
                todo.append(config)
    return live


def _sets(variable: Variable, row: Transition) -> bool:
    """Whether a row sets a variable whatever its value."""
    updates = variable.updates_for(row)
    return bool(updates) and bool(updates[0].to) and updates[0].when == "always"


class ExportedModel:
    """Assumptions for an export (``agentfsm.diagrams.promela``), without the values that do not matter."""

    def __init__(self, graph: Graph, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._dead: dict[str, list[tuple[Configuration, frozenset[str]]]] = {}
        for config, names in dead_variables(graph, assumptions).items():
            self._dead.setdefault(graph.states[config[0]].name, []).append((config[1:], names))
        self._labelled = [v.name for v in assumptions.counters if v.labels]
        self.initial_values = assumptions.initial_values
        self.may_conditions = assumptions.may_conditions
        self.must_conditions = assumptions.must_conditions
        self.counter_updates = assumptions.counter_updates

    def forgotten(self, row: Transition) -> Mapping[str, NumericCondition]:
        """The variables that no longer matter after a row, each with the condition under which they do not."""
        cases = self._dead.get(row.target, [])
        found: dict[str, NumericCondition] = {}
        for variable in self._assumptions.counters:
            values = [modes for modes, names in cases if variable.name in names]
            if not values or variable.labels:
                continue
            tests = tuple(
                tuple((name, "==", value) for name, value in zip(self._labelled, modes, strict=True))
                for modes in values
            )
            found[variable.name] = ((),) if len(values) == len(cases) else tests
        return found
