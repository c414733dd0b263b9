"""The state space of a graph under its assumptions: every configuration of state and counters, and its moves.

It can be built over some of the counters only (a *projection*). What these do not determine is left free, so a
projection over-approximates: it has every run of the full space and perhaps more. What never happens in it never
happens.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Generic, TypeVar

from agentfsm.analysis.analysis_limits import Meter
from agentfsm.analysis.assumptions import Assumptions, Condition, GuardAssumption, Update, Variable, parse_condition
from agentfsm.machine.graph import Graph, Transition

N = TypeVar("N")

Configuration = tuple[int, ...]
"""The place of a state among the graph's states, then the value of each counter."""

Move = tuple[int, Configuration]
"""The place of a row among the graph's transitions, and the configuration to which it leads."""

_OPS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
)

_Predicate = Callable[[Configuration], bool]
_CompiledUpdate = tuple[int, tuple[int, ...], _Predicate, bool]
"""What is added; the values to one of which it is set instead; the condition; whether the condition is exact."""


class CompiledRow:
    """One row with its compiled assumptions.

    Attributes:
        place: Its place among the graph's transitions.
        transition: The row itself.
        assumptions: The assumptions about its guard.
        target: The place of the state to which it leads.
        always: Whether it has no guard.
        reads: The counters that its guard depends on, by name.
        constraint_count: How many counters and assumptions mention it. Of rows with the same effect, the one with
            the fewest is preferred in counterexamples.
        updates: What it does to the counters.
    """

    def __init__(
        self,
        space: StateSpace,
        place: int,
        transition: Transition,
        assumptions: tuple[GuardAssumption, ...],
        changes: Sequence[tuple[Variable, Sequence[Update]]],
    ) -> None:
        self.place = place
        self.transition = transition
        self.assumptions = assumptions
        self.target = space.state_index[transition.target]
        mays = [parse_condition(k.may) for k in assumptions]
        musts = [parse_condition(k.must) for k in assumptions]
        self.reads = {test.counter for each in (*mays, *musts) for tests in each for test in tests}
        compiled = [(k, space.compile_condition(space.weaken(may))) for k, may in zip(assumptions, mays, strict=True)]
        self._predicate_of = dict(compiled)
        self._limiting = tuple((k, check) for k, check in compiled if check is not _always)
        decided = [(k, space.compile_condition(space.strengthen(m))) for k, m in zip(assumptions, musts, strict=True)]
        self._deciding = tuple((k, check) for k, check in decided if check is not _never)
        self.always = transition.guard is None
        self.constraint_count = len(changes) + len(assumptions)
        self.updates = tuple(space.compile_updates(changes))

    def may(self, config: Configuration) -> bool:
        """Whether its guard can hold in a configuration."""
        return self.ruled_out_by(config) is None

    def ruled_out_by(self, config: Configuration) -> GuardAssumption | None:
        """The first assumption by which its guard cannot hold in a configuration; None if it can."""
        for assumption, allows in self._limiting:
            if not allows(config):
                return assumption
        return None

    def decided_by(self, config: Configuration) -> GuardAssumption | None:
        """The first assumption by which its guard must hold in a configuration; None if there is none."""
        for assumption, decides in self._deciding:
            if decides(config):
                return assumption
        return None

    def allowed_by(self, assumption: GuardAssumption, config: Configuration) -> bool:
        """Whether one of its assumptions allows its guard to hold in a configuration."""
        return self._predicate_of[assumption](config)

    def must(self, config: Configuration) -> bool:
        """Whether its guard certainly holds in a configuration."""
        return self.always or self.decided_by(config) is not None


class StateSpace:
    """The configurations and moves of a graph under assumptions.

    Args:
        graph: The graph.
        assumptions: Its counters, and what is assumed about its guards.
        only: The names of the counters to follow; all of them by default.
        meter: Counts the configurations that are visited.
        dead: The variables that no longer matter (``liveness.dead_variables``), which are then set to 0.

    Raises:
        ConfigurationError: The assumptions mention a counter or a label that is not declared.

    Attributes:
        initial: The configuration in which a run starts.
        counters: The counters that it follows, in the order of a configuration.
        counter_names: Their names.
        state_index: The place of each state.
        rows: The compiled rows of each state, by its place, in order.
        constraint_counts: The ``constraint_count`` of each row, by its place.
        waits: The places of the states that wait.
        finals: The places of the final states.
    """

    def __init__(
        self,
        graph: Graph,
        assumptions: Assumptions,
        only: Iterable[str] | None = None,
        meter: Meter | None = None,
        dead: Mapping[Configuration, frozenset[str]] | None = None,
    ) -> None:
        assumptions.check()
        self.meter = meter or Meter()
        self._used: dict[int, GuardAssumption] = {}
        self.graph = graph
        self.assumptions = assumptions
        followed = {c.name for c in assumptions.counters} if only is None else set(only)
        self.counters = tuple(c for c in assumptions.counters if c.name in followed)
        self.counter_names = tuple(c.name for c in self.counters)
        self._slots = {name: i for i, name in enumerate(self.counter_names, 1)}
        self.state_index = {spec.name: i for i, spec in enumerate(graph.states)}
        self.waits = frozenset(i for i, spec in enumerate(graph.states) if spec.waits)
        self.finals = frozenset(i for i, spec in enumerate(graph.states) if spec.final)
        places = {id(t): i for i, t in enumerate(graph.transitions)}
        applying = assumptions.guards_by_row(graph)
        texts = {str(t): t for t in graph.transitions}
        changes: dict[str, list[tuple[Variable, Sequence[Update]]]] = {text: [] for text in texts}
        for counter in assumptions.counters:
            for text, updates in counter.updates_by_row(texts):
                changes[text].append((counter, updates))
        self.rows = tuple(
            tuple(CompiledRow(self, places[id(t)], t, applying[t.id], changes[str(t)]) for t in graph.rows(spec.name))
            for spec in graph.states
        )
        self.constraint_counts = {row.place: row.constraint_count for rows in self.rows for row in rows}
        self._mode_slots = tuple(i for i, c in enumerate(self.counters, 1) if c.labels)
        self._dead_slots = self._compile_dead(dead or {})
        self.initial: Configuration = self._forget_dead([0, *(c.start for c in self.counters)])
        self._moves: dict[Configuration, tuple[tuple[Move, ...], tuple[GuardAssumption, ...]]] = {}

    # -- compiling assumptions ------------------------------------------------------------------------

    def weaken(self, condition: Condition) -> Condition:
        """A condition without the counters that are not followed, which holds wherever the given one may hold."""
        return tuple(tuple(t for t in tests if t.counter in self._slots) for tests in condition)

    def strengthen(self, condition: Condition) -> Condition:
        """A condition without the counters that are not followed, which holds only where the given one must hold."""
        return tuple(tests for tests in condition if all(t.counter in self._slots for t in tests))

    def compile_condition(self, condition: Condition) -> _Predicate:
        """A condition as a function of a configuration."""
        if any(not tests for tests in condition):
            return _always
        compiled = tuple(
            tuple(
                (self._slots[t.counter], _OPS[t.op], self.assumptions.counter(t.counter).value(t.value)) for t in tests
            )
            for tests in condition
        )
        if not compiled:
            return _never
        if len(compiled) == 1 and len(compiled[0]) == 1:
            slot, compare, value = compiled[0][0]
            return lambda config: compare(config[slot], value)
        return lambda config: any(
            all(compare(config[slot], value) for slot, compare, value in tests) for tests in compiled
        )

    def compile_updates(
        self, changes: Iterable[tuple[Variable, Sequence[Update]]]
    ) -> Iterator[tuple[int, int, tuple[_CompiledUpdate, ...]]]:
        """For each followed counter that a row can change: its slot, its limit, and its updates in order."""
        for counter, listed in changes:
            if counter.name not in self._slots:
                continue
            updates: list[_CompiledUpdate] = []
            for change in listed:
                updates.append(self._compile_update(change, tuple(counter.value(v) for v in change.to)))
                if change.when == "always":
                    break
            if any(to or add for add, to, _, _ in updates):
                yield self._slots[counter.name], counter.limit, tuple(updates)

    def _compile_update(self, change: Update, to: tuple[int, ...]) -> _CompiledUpdate:
        when = parse_condition(change.when)
        return change.add, to, self.compile_condition(self.weaken(when)), self.strengthen(when) == when

    # -- moving ---------------------------------------------------------------------------------------

    def moves(self, config: Configuration) -> tuple[Move, ...]:
        """Every move out of a configuration, in the order of the table.

        Raises:
            AnalysisLimitError: The meter's limit is reached.
        """
        known = self._moves.get(config)
        self.meter.work()
        if known is None:
            moves, used = self._compute_moves(config)
            known = self._moves[config] = (tuple(moves), tuple(used))
            self.meter.count(1 + len(moves))
        for assumption in known[1]:
            self._used[id(assumption)] = assumption
        return known[0]

    def _compute_moves(self, config: Configuration) -> tuple[list[Move], list[GuardAssumption]]:
        moves: list[Move] = []
        used: list[GuardAssumption] = []
        for row in self.possible_rows(config, used):
            moves += [(row.place, after) for after in self.successors(row, config)]
        return moves, used

    def possible_rows(self, config: Configuration, used: list[GuardAssumption]) -> Iterator[CompiledRow]:
        """The rows that may be taken in a configuration; appends to ``used`` the assumptions that rule out others."""
        for row in self.rows[config[0]]:
            ruled_out_by = row.ruled_out_by(config)
            if ruled_out_by is None:
                yield row
            else:
                used.append(ruled_out_by)
            if row.always:
                return
            decided_by = row.decided_by(config)
            if decided_by is not None:
                used.append(decided_by)
                return

    def note_used(self, assumptions: Iterable[GuardAssumption]) -> None:
        """Add to the assumptions that ``take_used`` returns."""
        for assumption in assumptions:
            self._used[id(assumption)] = assumption

    def take_used(self) -> tuple[GuardAssumption, ...]:
        """The assumptions on which the moves asked for since the last call depend."""
        used = tuple(k for k in self.assumptions.guards if id(k) in self._used)
        self._used.clear()
        return used

    def forget(self) -> None:
        """Free the memory of all moves computed so far."""
        self._moves.clear()

    def successors(self, row: CompiledRow, config: Configuration) -> list[Configuration]:
        """The configurations to which a row leads, whether or not its guard can hold."""
        first = list(config)
        first[0] = row.target
        results = [first]
        for slot, limit, changes in row.updates:
            values = _updated_values(config, slot, limit, changes)
            if len(values) == 1:
                for each in results:
                    each[slot] = values[0]
            else:
                results = [[*r[:slot], value, *r[slot + 1 :]] for value in values for r in results]
        return [self._forget_dead(each) for each in results]

    def _forget_dead(self, config: list[int]) -> Configuration:
        if self._dead_slots:
            for slot in self._dead_slots.get((config[0], *(config[i] for i in self._mode_slots)), ()):
                config[slot] = 0
        return tuple(config)

    def _compile_dead(self, dead: Mapping[Configuration, frozenset[str]]) -> dict[Configuration, tuple[int, ...]]:
        """The slots of the dead variables, by state and the values of those labelled variables that are followed."""
        labelled = [c.name for c in self.assumptions.counters if c.labels]
        kept = [0, *(i for i, name in enumerate(labelled, 1) if name in self._slots)]
        names: dict[Configuration, frozenset[str]] = {}
        for config, each in dead.items():
            key = tuple(config[i] for i in kept)
            names[key] = names.get(key, each) & each
        return {key: tuple(self._slots[n] for n in sorted(each) if n in self._slots) for key, each in names.items()}

    def describe(self, config: Configuration) -> str:
        """A configuration as text: ``call_llm (steps=3, calls=0)``."""
        values = ", ".join(f"{c.name}={c.describe(v)}" for c, v in zip(self.counters, config[1:], strict=True))
        return self.graph.states[config[0]].name + (f" ({values})" if values else "")


def _updated_values(
    config: Configuration, slot: int, limit: int, updates: tuple[_CompiledUpdate, ...]
) -> tuple[int, ...]:
    """The values that a counter can have after a row."""
    old = config[slot]
    values: dict[int, None] = {}
    for add, to, when, exact in updates:
        if when(config):
            for value in to or (min(limit, max(0, old + add)),):
                values[value] = None
            if exact:
                return tuple(values)
    values[old] = None
    return tuple(values)


class BreadthFirstSearch(Generic[N]):
    """A breadth-first search over moves. Iterating it yields each node once, nearest first."""

    def __init__(self, start: N, moves: Callable[[N], Iterable[tuple[int, N]]], meter: Meter | None = None) -> None:
        self._start = start
        self._moves = moves
        self._meter = meter or Meter()
        self._predecessors: dict[N, tuple[N, int] | None] = {start: None}

    def __iter__(self) -> Iterator[N]:
        yield self._start
        todo = deque([self._start])
        while todo:
            node = todo.popleft()
            for row, after in self._moves(node):
                if after not in self._predecessors:
                    self._predecessors[after] = (node, row)
                    self._meter.count()
                    yield after
                    todo.append(after)

    def __len__(self) -> int:
        """The number of nodes found so far."""
        return len(self._predecessors)

    @property
    def nodes(self) -> Set[N]:
        """The nodes found so far."""
        return self._predecessors.keys()

    def rows_to(self, node: N) -> tuple[int, ...]:
        """The rows of a shortest path to a node that was found."""
        return reconstruct_path(self._predecessors, node)


def reconstruct_path(predecessors: Mapping[N, tuple[N, int] | None], node: N) -> tuple[int, ...]:
    """The rows that lead to a node of a search, from each node's predecessor and the row taken from it."""
    rows: list[int] = []
    while (step := predecessors[node]) is not None:
        node, row = step
        rows.append(row)
    return tuple(reversed(rows))


def _always(config: Configuration) -> bool:
    return True


def _never(config: Configuration) -> bool:
    return False
