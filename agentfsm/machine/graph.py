"""Declared graphs: states, transitions, and the changed copies that are made of them.

A graph is data, and its order is behavior: in each state the transitions are tried in the order in which they are
declared, and the first whose guard holds is taken. ``graph_checks`` has the rules that every graph keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from agentfsm.errors import GraphError
from agentfsm.machine.declaration import (
    OTHERWISE,
    WAITING_OUTCOMES,
    Counter,
    Exhausted,
    GraphAnalysis,
    Guard,
    State,
    StateSpec,
    Transition,
    outcomes_taken,
)
from agentfsm.machine.graph_checks import check_graph, max_moves

__all__ = ["OTHERWISE", "Graph", "Guard", "State", "StateSpec", "Transition", "table_fingerprint"]


_READERS = {"diagram": "agentfsm.diagrams", "analyse": "agentfsm.analysis"}
"""The packages behind two methods of a graph: they import this module, so it names them and loads them on first use."""


def table_fingerprint(table: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a table as JSON data: ``Graph.table``, or what a journal pinned of it."""
    return hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()


def _reader(name: str) -> Callable[..., Any]:
    """A function of a package that reads graphs."""
    return cast("Callable[..., Any]", getattr(import_module(_READERS[name]), name))


@dataclass(frozen=True)
class Graph:
    """A checked table of transitions, in the order in which their guards are evaluated.

    Attributes:
        states: The declared states; the first is where a run starts.
        transitions: The rows. Their order within one source state is part of the behavior.
        name: Its name in diagrams and journals.
        counters: The counters that its states and rows may spend.
        first: The guards that come first, in this order, in every state that is not final.
        stored: Whether it was read from a stored table. It was checked when it was built, and its guards are names
            only, so what follows from their code is not checked again.

    Raises:
        GraphError: The table breaks a rule; the error names the edge and the rule.
    """

    states: tuple[StateSpec, ...]
    transitions: tuple[Transition, ...]
    name: str = "graph"
    counters: tuple[Counter, ...] = ()
    first: tuple[Guard, ...] = ()
    stored: bool = field(default=False, repr=False, compare=False)
    _specs: dict[str, StateSpec] = field(init=False, repr=False, compare=False, default_factory=dict[str, "StateSpec"])
    _rows: dict[str, tuple[Transition, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, tuple["Transition", ...]]
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "transitions", tuple(self.transitions))
        object.__setattr__(self, "counters", tuple(self.counters))
        object.__setattr__(self, "first", tuple(self.first))
        self._specs.update((spec.name, spec) for spec in self.states)
        for spec in self.states:
            self._rows[spec.name] = tuple(t for t in self.transitions if t.source == spec.name)
        check_graph(self)

    @property
    def initial(self) -> str:
        """The name of the state in which a run starts."""
        return self.states[0].name

    def rows(self, state: str) -> tuple[Transition, ...]:
        """The transitions that leave a state, in the order in which their guards are evaluated.

        Raises:
            GraphError: There is no such state.
        """
        self.spec(state)
        return self._rows[state]

    def spec(self, state: str) -> StateSpec:
        """The declaration of a state.

        Raises:
            GraphError: There is no such state.
        """
        if state in self._specs:
            return self._specs[state]
        raise GraphError("there is no such state", state, f"states: {', '.join(s.name for s in self.states)}")

    def transition(self, transition_id: str) -> Transition:
        """The transition with an id such as ``post_llm.tool_calls``.

        Raises:
            GraphError: There is no such transition.
        """
        for transition in self.transitions:
            if transition.id == transition_id:
                return transition
        raise GraphError("there is no such transition", transition_id)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.states)} states, {len(self.transitions)} transitions)"

    def __iter__(self) -> Iterator[Transition]:
        return iter(self.transitions)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the table: states, guard names, targets, order and counters, but not the guards' code."""
        return table_fingerprint(self.table)

    @cached_property
    def table(self) -> dict[str, list[list[Any]]]:
        """The table as JSON data, as each run's journal records it; ``fingerprint`` is its hash."""
        return {
            "states": [[s.name, s.waits, s.final, list(s.spends), s.effect_name] for s in self.states],
            "transitions": [
                [t.source, t.name, t.target, list(t.spends), list(t.refills), t.ends, t.extends]
                for s in self.states
                for t in self._rows[s.name]
            ],
            "counters": [[c.name, c.limit] for c in self.counters],
        }

    @property
    def specs(self) -> Mapping[str, StateSpec]:
        """The declared states by name."""
        return MappingProxyType(self._specs)

    def takes(self, state: str, outcome: str) -> bool:
        """Whether a guard of a state takes an outcome."""
        return outcome in outcomes_taken(self._rows[state])

    def max_moves(self, limit: Callable[[Counter], int | None]) -> int:
        """The most moves that any run can make between two waits, whatever its guards return.

        It follows from the counters alone and is an upper bound; ``analyse`` finds a closer one.

        Args:
            limit: The limit of each counter in the run; None for no limit.
        """
        return max_moves(self, limit)

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the usual name for it
        """The graph as a diagram or in another format; ``agentfsm.diagrams`` has themes, overlays and images.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text``, ``plantuml``, ``scxml``,
                ``xstate`` or ``promela``.

        Raises:
            ConfigurationError: There is no such format.
        """
        return cast("str", _reader("diagram")(self, format))

    _repr_svg_ = diagram
    """What a notebook shows."""

    def analyse(self, *properties: Any, guardrails: Any = None) -> GraphAnalysis:
        """What can be proved about the graph, as an ``agentfsm.analysis.Analysis``.

        ``agentfsm.analysis.analyse`` takes more options.

        Args:
            *properties: Properties to prove: ``must_pass(...)``, ``never_after(...)``.
            guardrails: The ``AgentGuardrails`` of its runs; defaults to ``AgentGuardrails()``.
        """
        analysis: GraphAnalysis = _reader("analyse")(self, *properties, guardrails=guardrails)
        return analysis

    # Each of the following returns a new, checked graph; this one never changes.

    def with_transition(self, transition: Transition, *, before: str | None = None) -> Graph:
        """A graph with one more row.

        Args:
            transition: The new row.
            before: The guard before which the new one is evaluated. By default it is the last one evaluated, just
                before the row without a guard. In a state whose effect is a function of yours, a row for a call that
                waits (``approval_required``, ``in_doubt``) is evaluated before the rows for what the effect returns.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return replace(self, transitions=self._insert_row(transition, before))

    def with_counter(self, counter: Counter) -> Graph:
        """A graph with one more counter, or with another limit for one that it has.

        Raises:
            GraphError: Its name is not an identifier.
        """
        others = (c for c in self.counters if c.name != counter.name)
        rows = (
            replace(t, guard=t.guard.of(counter))
            if isinstance(t.guard, Exhausted) and t.guard.counter.name == counter.name
            else t
            for t in self.transitions
        )
        return replace(self, counters=(*others, counter), transitions=tuple(rows))

    def with_detector(
        self, state: str, detector: Guard, *, before: str | None = None, target: str = State.RECOVER, ends: str = ""
    ) -> Graph:
        """A graph in which a state evaluates one more detector, and goes to ``recover`` when it finds a failure.

        Args:
            state: The state that evaluates it.
            detector: A pure function of the read-only ``RunView`` that returns a ``Failure`` or None.
            before: The guard before which it is evaluated; by default it is evaluated last.
            target: The state that a failure leads to.
            ends: How the run ends, if that state is final.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return self.with_transition(Transition(state, detector, target, ends=ends), before=before)

    def with_state(
        self,
        spec: StateSpec,
        transitions: Iterable[Transition],
        *,
        entered_by: Transition | str | None,
        before: str | None = None,
    ) -> Graph:
        """A graph with one more state.

        Args:
            spec: The new state; its ``effect`` is what it does.
            transitions: The rows that leave it. A state that is not final also gets the rows of ``first``
                (``cancelled`` and ``aborted``) in front, as the initial state has them, unless it has its own.
            entered_by: How it is entered: a new transition to it, or the id of an existing one
                (``"post_llm.otherwise"``), which then leads to the new state. With None, every run starts in it.
            before: For a new transition, the guard before which it is evaluated.

        Raises:
            GraphError: The new table breaks a rule.
        """
        rows = list(transitions)
        if not spec.final:
            inherited = {t.guard: replace(t, source=spec.name) for t in self.rows(self.initial)}
            stops = {**inherited, **{t.guard: t for t in rows}}
            rows = [*(stops[guard] for guard in self.first), *(t for t in rows if t.guard not in self.first)]
        if entered_by is None:
            return replace(self, states=(spec, *self.states), transitions=(*self.transitions, *rows))
        if isinstance(entered_by, str):
            old = self.transition(entered_by)
            entering = replace(old, target=spec.name, ends=old.ends if spec.final else "")
            table = tuple(entering if t is old else t for t in self.transitions)
        else:
            table = self._insert_row(entered_by, before)
        return replace(self, states=(*self.states, spec), transitions=(*table, *rows))

    def without(self, *names: str) -> Graph:
        """A graph without some transitions (by id) or states (by name, with every row that touches them).

        Raises:
            GraphError: A name is unknown, or the smaller table breaks a rule.
        """
        states = {s.name for s in self.states}
        removed_states = {n for n in names if n in states}
        removed_rows = {self.transition(n).id for n in names if n not in states}
        remaining = tuple(
            t
            for t in self.transitions
            if t.id not in removed_rows and t.source not in removed_states and t.target not in removed_states
        )
        return replace(
            self, states=tuple(s for s in self.states if s.name not in removed_states), transitions=remaining
        )

    def _insert_row(self, new: Transition, before: str | None) -> tuple[Transition, ...]:
        table = list(self.transitions)
        rows = [i for i, t in enumerate(table) if t.source == new.source]
        if before is None:
            last = rows[-1] if rows else len(table) - 1
            index = last if rows and table[last].guard is None and new.guard is not None else last + 1
            if _is_for_a_wait(self, new):
                index = next((i for i in rows if _is_for_a_result(self, table[i])), index)
        else:
            named = [i for i in rows if table[i].name == before]
            if not named:
                names = ", ".join(table[i].name for i in rows)
                raise GraphError(f"there is no row {before!r} to insert it before", new.id, f"rows: {names}")
            index = named[0]
        return (*table[:index], new, *table[index:])


def _is_for_a_wait(graph: Graph, row: Transition) -> bool:
    """Whether a row of a state with an effect of the user's is for a call that waits."""
    spec = graph.specs.get(row.source)
    return spec is not None and callable(spec.effect) and not WAITING_OUTCOMES.isdisjoint(outcomes_taken((row,)))


def _is_for_a_result(graph: Graph, row: Transition) -> bool:
    """Whether a row of such a state is for what its effect has returned: for no wait, no stop and no counter's end."""
    return not (_is_for_a_wait(graph, row) or row.guard in graph.first or isinstance(row.guard, Exhausted))
