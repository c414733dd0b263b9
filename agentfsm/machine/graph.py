"""Declared graphs: states, transitions, and the checks that every graph must pass.

A graph is data, and its order is behavior: in each state the transitions are tried in the order in which they are
declared, and the first whose guard holds is taken. ``check_graph`` runs when a graph is built and reads nothing else:

1. State and guard names are identifiers; no state is declared twice, no guard is used twice in one state.
2. Every transition joins declared states, and none leaves a final state.
3. A guard is a plain function: a coroutine function or a generator would always be truthy.
4. Every state except a waiting or final one ends with a transition without a guard, so no run is ever stuck;
   no transition follows it, because it could never be tried.
5. Every state is reachable, and a final state is reachable from every state.
6. Every cycle spends something or waits for an external event, so every run ends or waits.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

from agentfsm.errors import GraphError

__all__ = ["OTHERWISE", "Graph", "Guard", "State", "StateSpec", "Transition", "check_graph", "table_fingerprint"]


Guard = Callable[[Any], object]
"""A pure, synchronous function of a run; its return value is tested for truth."""

OTHERWISE = "otherwise"
"""The name of a transition that has no guard."""

_READERS = {"diagram": "agentfsm.diagrams", "analyse": "agentfsm.analysis"}
"""The packages behind two methods of a graph: they import this module, so it names them and loads them on first use."""


def table_fingerprint(table: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a table as JSON data: ``Graph.table``, or what a journal pinned of it."""
    return hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()


def _reader(name: str) -> Callable[..., Any]:
    """A function of a package that reads graphs."""
    return cast("Callable[..., Any]", getattr(import_module(_READERS[name]), name))


class State(StrEnum):
    """The eight declared phases of an agent's loop."""

    PRE_STEP = "pre_step"
    CALL_LLM = "call_llm"
    POST_LLM = "post_llm"
    DISPATCH_TOOL = "dispatch_tool"
    POST_TOOL = "post_tool"
    RECOVER = "recover"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One declared state.

    Attributes:
        name: Its name; a ``State`` or any identifier.
        note: Its effect in a few words, shown in diagrams.
        spends: The budget that each visit consumes ("a step"), so that a cycle through the state must end.
        waits: Whether it waits for an external event; such a state needs no transition without a guard.
        final: Whether a run ends in it.
        lane: Its column in diagrams: ``main``, ``left`` (recovery) or ``right`` (waiting).
        effect: What a user-defined state does: an async or plain function that takes a ``StateContext``
            (``agentfsm.runtime.state_context``). The eight states of ``State`` have built-in effects.
    """

    name: str
    note: str = ""
    spends: str = ""
    waits: bool = False
    final: bool = False
    lane: str = "main"
    effect: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: from ``source``, if ``guard`` holds, to ``target``.

    Attributes:
        source: The state that it leaves.
        guard: The guard, or None for the last row of a state, which always holds.
        target: The state that it enters.
        spends: The budget that taking it consumes, in addition to what its states spend ("a pending call").
    """

    source: str
    guard: Guard | None
    target: str
    spends: str = ""

    @property
    def name(self) -> str:
        """The guard's name, or ``otherwise``."""
        return OTHERWISE if self.guard is None else str(getattr(self.guard, "__name__", self.guard))

    @property
    def id(self) -> str:
        """Its identifier in journals, errors and tests: ``source.guard``."""
        return f"{self.source}.{self.name}"

    def __str__(self) -> str:
        return f"{self.id} -> {self.target}"

    def __repr__(self) -> str:
        guard = None if self.guard is None else self.name
        spends = f", spends={self.spends!r}" if self.spends else ""
        return f"Transition({str(self.source)!r}, {guard}, {str(self.target)!r}{spends})"


@dataclass(frozen=True)
class Graph:
    """A checked table of transitions, in the order in which their guards are evaluated.

    Attributes:
        states: The declared states; the first is where a run starts.
        transitions: The rows. Their order within one source state is part of the behavior.
        name: Its name in diagrams and journals.

    Raises:
        GraphError: The table breaks a rule; the error names the edge and the rule.
    """

    states: tuple[StateSpec, ...]
    transitions: tuple[Transition, ...]
    name: str = "graph"
    _rows: dict[str, tuple[Transition, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, tuple["Transition", ...]]
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "transitions", tuple(self.transitions))
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
        for spec in self.states:
            if spec.name == state:
                return spec
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
        """SHA-256 (hex) of the table: states, guard names, targets and order, but not the guards' code."""
        return table_fingerprint(self.table)

    @cached_property
    def table(self) -> dict[str, list[list[Any]]]:
        """The table as JSON data, as each run's journal records it; ``fingerprint`` is its hash."""
        return {
            "states": [[s.name, s.waits, s.final, s.spends] for s in self.states],
            "transitions": [[t.source, t.name, t.target, t.spends] for s in self.states for t in self._rows[s.name]],
        }

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the usual name for it
        """The graph as a diagram or in another format; ``agentfsm.diagrams`` has themes, overlays and images.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text``, ``plantuml``, ``scxml``,
                ``xstate`` or ``promela``.

        Raises:
            ConfigurationError: There is no such format.
        """
        return cast("str", _reader("diagram")(self, format))

    def analyse(self, *properties: Any, guardrails: Any = None) -> Any:
        """What can be proved about the graph, as an ``agentfsm.analysis.Analysis``.

        ``agentfsm.analysis.analyse`` takes more options.

        Args:
            *properties: Properties to prove: ``must_pass(...)``, ``never_after(...)``.
            guardrails: The ``AgentGuardrails`` of its runs; defaults to ``AgentGuardrails()``.
        """
        return _reader("analyse")(self, *properties, guardrails=guardrails)

    # Each of the following returns a new, checked graph; this one never changes.

    def with_transition(self, transition: Transition, *, before: str | None = None) -> Graph:
        """A graph with one more row.

        Args:
            transition: The new row.
            before: The guard before which the new one is evaluated. By default it is the last one evaluated, just
                before the row without a guard.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return replace(self, transitions=self._insert_row(transition, before))

    def with_detector(
        self, state: str, detector: Guard, *, before: str | None = None, target: str = State.RECOVER
    ) -> Graph:
        """A graph in which a state evaluates one more detector, and goes to ``recover`` when it finds a failure.

        Args:
            state: The state that evaluates it.
            detector: A pure function of the ``RunState`` that returns a ``Failure`` or None.
            before: The guard before which it is evaluated; by default it is evaluated last.
            target: The state that a failure leads to.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return self.with_transition(Transition(state, detector, target), before=before)

    def with_state(
        self,
        spec: StateSpec,
        transitions: Iterable[Transition],
        *,
        entered_by: Transition | str,
        before: str | None = None,
    ) -> Graph:
        """A graph with one more state.

        Args:
            spec: The new state; its ``effect`` is what it does.
            transitions: The rows that leave it. A state that neither waits nor ends also gets the initial
                state's rows ``cancelled`` and ``aborted`` first, unless it has its own.
            entered_by: How it is entered: a new transition to it, or the id of an existing one
                (``"post_llm.otherwise"``), which then leads to the new state.
            before: For a new transition, the guard before which it is evaluated.

        Raises:
            GraphError: The new table breaks a rule.
        """
        rows = list(transitions)
        if not (spec.waits or spec.final):
            own = {t.name for t in rows}
            stops = [t for t in self.rows(self.initial) if t.name in ("cancelled", "aborted") and t.name not in own]
            rows = [replace(t, source=spec.name) for t in stops] + rows
        if isinstance(entered_by, str):
            old = self.transition(entered_by)
            table = tuple(replace(t, target=spec.name) if t is old else t for t in self.transitions)
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
        else:
            named = [i for i in rows if table[i].name == before]
            if not named:
                names = ", ".join(table[i].name for i in rows)
                raise GraphError(f"there is no row {before!r} to insert it before", new.id, f"rows: {names}")
            index = named[0]
        return (*table[:index], new, *table[index:])


def check_graph(graph: Graph) -> None:
    """Check every rule of the module's docstring.

    Raises:
        GraphError: A rule is broken; it names the first such rule and the edge.
    """
    for rule in (
        _check_names,
        _check_endpoints,
        _check_guards,
        _check_default_rows,
        _check_reachability,
        _check_cycles,
    ):
        rule(graph)


def _check_names(graph: Graph) -> None:
    if not graph.states:
        raise GraphError("a graph needs at least one state", graph.name)
    _check_unique((s.name for s in graph.states), "the state is declared twice")
    for spec in graph.states:
        if not spec.name.isidentifier():
            raise GraphError("a state's name must be an identifier", repr(spec.name))
    for transition in graph.transitions:
        if not transition.name.isidentifier():
            raise GraphError(
                "a guard's name must be an identifier", transition.id, "name the function: a lambda has no name"
            )
    _check_unique((t.id for t in graph.transitions), "the guard is used twice in one state")


def _check_unique(names: Iterable[str], rule: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(rule, name)
        seen.add(name)


def _check_endpoints(graph: Graph) -> None:
    specs = {s.name: s for s in graph.states}
    for transition in graph.transitions:
        for end in (transition.source, transition.target):
            if end not in specs:
                known = ", ".join(specs)
                raise GraphError(f"{end!r} is not a declared state", transition.id, f"declared: {known}")
        if specs[transition.source].final:
            raise GraphError("no transition may leave a final state", transition.id)


def _check_guards(graph: Graph) -> None:
    for transition in graph.transitions:
        guard = transition.guard
        if guard is None:
            continue
        if not callable(guard):
            raise GraphError("a guard must be a function of the run", transition.id)
        if _returns_unawaited(guard) or _returns_unawaited(type(guard).__call__):
            raise GraphError(
                "a guard must be a plain function, not a coroutine function or a generator",
                transition.id,
                "await in an effect",
            )


def _returns_unawaited(function: object) -> bool:
    """Whether calling the function returns a coroutine or a generator, which is always truthy."""
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )


def _check_default_rows(graph: Graph) -> None:
    for spec in graph.states:
        rows = graph.rows(spec.name)
        if spec.final:
            continue
        if not rows:
            raise GraphError("no transition leaves the state", spec.name, "declare it final, or add a row")
        for earlier, later in pairwise(rows):
            if earlier.guard is None:
                raise GraphError(f"can never be evaluated: {earlier.id} comes before it and has no guard", later.id)
        if rows[-1].guard is not None and not spec.waits:
            raise GraphError(
                "the last transition of a state that does not wait must have no guard",
                rows[-1].id,
                f"add Transition({str(spec.name)!r}, None, ...) after it",
            )


def _check_reachability(graph: Graph) -> None:
    reached = _reachable({graph.initial}, graph.transitions, lambda t: (t.source, t.target))
    finals = {s.name for s in graph.states if s.final}
    if not finals:
        raise GraphError("a graph needs a final state", graph.name)
    ending = _reachable(finals, graph.transitions, lambda t: (t.target, t.source))
    for spec in graph.states:
        if spec.name not in reached:
            raise GraphError(f"the state cannot be reached from {graph.initial!r}", spec.name)
        if spec.name not in ending:
            raise GraphError("no final state can be reached from the state", spec.name)


def _reachable(
    start: set[str], transitions: Iterable[Transition], ends: Callable[[Transition], tuple[str, str]]
) -> set[str]:
    pairs = [ends(t) for t in transitions]
    reached = set(start)
    while more := {b for a, b in pairs if a in reached} - reached:
        reached |= more
    return reached


def _check_cycles(graph: Graph) -> None:
    """Reject a cycle that neither spends anything nor waits: one in the graph without what spends or waits."""
    bounded = {s.name for s in graph.states if s.spends or s.waits}
    free = [t for t in graph.transitions if not t.spends and t.source not in bounded and t.target not in bounded]
    on_path: list[Transition] = []
    done: set[str] = set()

    def walk(state: str) -> None:
        for transition in (t for t in free if t.source == state):
            path = [t.source for t in on_path] + [state]
            if transition.target in path:
                loop = [*path[path.index(transition.target) :], transition.target]
                raise GraphError(
                    f"closes a cycle that spends nothing and never waits: {' -> '.join(loop)}",
                    transition.id,
                    "declare it with spends=..., or route it through a state that spends",
                )
            if transition.target not in done:
                on_path.append(transition)
                walk(transition.target)
                on_path.pop()
        done.add(state)

    for spec in graph.states:
        if spec.name not in done:
            walk(spec.name)
