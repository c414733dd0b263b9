"""The monitor: whether a run stays within the model that proofs about its graph are based on.

A proof is about the model: the declared graph, its counters, and what is assumed about guards. The monitor follows a
real run through it. The model may leave several things open, so it keeps the set of all configurations in which the run
can be; a move that is possible in none of them, or a counter with a value that none of them has, is outside the model.
Then a proof may be wrong about this run, and the report says what the model ruled out, and why. A run that exceeds a
bound that follows from the model is reported, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from agentfsm.analysis.analysis_limits import AnalysisLimits, Meter
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption
from agentfsm.analysis.bounds import (
    Bounds,
    bounds_within_limits,
    calls_per_move,
    row_cost,
    runs_one_by_one,
    with_enforced,
    with_unseen_calls,
)
from agentfsm.analysis.layered_graph import Cost
from agentfsm.analysis.loop_assumptions import AgentTraits, graph_assumptions, makes_unseen_calls
from agentfsm.analysis.state_space import Configuration, StateSpace
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import Graph, Transition

MAX_CONFIGURATIONS = 2_000
"""If a run can be in more configurations than this, only its state and its counters are followed from there on."""

BOUNDS_AFTER_MOVES = 200
"""The bounds are computed once a run has made so many moves without waiting, or more calls than its rows stand for.

Until then its calls are those of a path of the model, and no path of the model exceeds the bounds.
"""

BOUNDS_LIMITS = AnalysisLimits(max_configurations=100_000, max_seconds=3.0)
"""How much may be explored for the bounds: the run waits meanwhile. Past that, those of the counters remain."""

NO_BOUNDS = Bounds(None, None, None, None, None)

MAX_SUSPENDED = 1_000
"""How many suspended runs are remembered, so that what was known about them is known when they are resumed."""


@dataclass(frozen=True, slots=True)
class ModelMismatch:
    """A move of a run that the model does not allow.

    Attributes:
        row: The id of the row that was taken.
        reason: What the model ruled out, and why.
        configurations: The configurations in which the run could be before the move, as text; at most three.
    """

    row: str
    reason: str
    configurations: tuple[str, ...]

    def __str__(self) -> str:
        where = "; ".join(self.configurations)
        return f"the run took {self.row}, which the model of its proofs does not allow: {self.reason} (in {where})"


class ProofModel:
    """The models of one graph, for runs with any limits.

    Attributes:
        unseen_calls: Whether more model calls may be made than rows show.
        batch_counters: The counters that bound the calls of one reply.
        runs_one_by_one: Whether calls that run in parallel might as well run one after another.
    """

    def __init__(self, graph: Graph, traits: AgentTraits, assumptions: Assumptions | None = None) -> None:
        self.graph = graph
        self._traits = traits
        self._own = assumptions or Assumptions()
        self._spaces: dict[AgentGuardrails, StateSpace] = {}
        self._bounds: dict[AgentGuardrails, Bounds] = {}
        self._computing = threading.Lock()
        self.unseen_calls = makes_unseen_calls(graph, traits)
        self.batch_counters = frozenset(c.name for c in graph.counters if c.limit == "max_calls_per_reply")
        self.runs_one_by_one = runs_one_by_one(graph)
        self._suspended: dict[str, RunMonitor] = {}

    def space(self, guardrails: AgentGuardrails) -> StateSpace:
        """The model under given limits."""
        if guardrails not in self._spaces:
            try:
                space = _cached_space(self.graph, guardrails, self._traits, self._own)
            except TypeError:  # a guard that cannot be hashed
                space = _make_space(self.graph, guardrails, self._traits, self._own)
            self._spaces[guardrails] = space
        return self._spaces[guardrails]

    def calls_per_move(self, guardrails: AgentGuardrails) -> int:
        """How many tool calls the bounds count for one move."""
        return calls_per_move(self.graph, guardrails, self._traits)

    def known_bounds(self, guardrails: AgentGuardrails) -> Bounds | None:
        """The bounds under given limits, if they have been computed."""
        return self._bounds.get(guardrails)

    def bounds(self, guardrails: AgentGuardrails) -> Bounds:
        """The bounds under given limits, as ``check`` prints them; only that of the counters if they take too long.

        May be called from any thread; a second one waits for the first.
        """
        with self._computing:
            if guardrails not in self._bounds:
                self._bounds[guardrails] = self._compute_bounds(guardrails)
            return self._bounds[guardrails]

    def _compute_bounds(self, guardrails: AgentGuardrails) -> Bounds:
        full = self.space(guardrails)
        calls = self.calls_per_move(guardrails)
        bounds = bounds_within_limits(self.graph, full.assumptions, Meter(BOUNDS_LIMITS), calls_per_move=calls)
        if bounds.limit or self.unseen_calls:
            bounds = with_unseen_calls(bounds, self.graph, guardrails)
        return with_enforced(bounds, self.graph, guardrails)

    def monitor(self, run: RunState) -> RunMonitor:
        """The monitor of a run; if the run was suspended under this model, its monitor continues."""
        known = self._suspended.pop(run.run_id, None)
        if known is not None and known.guardrails == run.guardrails and known.fits(run.state, run.counters):
            return known
        run_id = run.run_id
        return RunMonitor(self, run, lambda monitor: self._suspend(run_id, monitor))

    def _suspend(self, run_id: str, monitor: RunMonitor) -> None:
        self._suspended[run_id] = monitor
        while len(self._suspended) > MAX_SUSPENDED:
            self._suspended.pop(next(iter(self._suspended)))


def _make_space(graph: Graph, guardrails: AgentGuardrails, traits: AgentTraits, own: Assumptions) -> StateSpace:
    return StateSpace(graph, graph_assumptions(graph, guardrails, traits) + own)


_cached_space = lru_cache(maxsize=32)(_make_space)
"""A program has few graphs and limits, and perhaps many agents."""


@lru_cache(maxsize=32)
def _projection(full: StateSpace) -> StateSpace:
    """A model by the counters alone that the engine keeps."""
    kept = {c.name for c in full.graph.counters}
    return StateSpace(full.graph, full.assumptions, kept.intersection(full.counter_names))


@dataclass(slots=True)
class _Made:
    """What a run has made, in all or since it last waited; and how many calls the rows that it took stand for."""

    moves: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    model_rows: int = 0
    tool_rows: int = 0

    def add(self, model_calls: int, tool_calls: int, cost: Cost) -> None:
        """Count a move, and the calls that were made before it."""
        self.moves += 1
        self.model_calls += model_calls
        self.tool_calls += tool_calls
        self.model_rows += cost[1]
        self.tool_rows += cost[2]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What a run had made after a move, to compare with the bounds."""

    row: str
    stretch: _Made
    whole: _Made
    space: StateSpace
    here: Set[Configuration]

    def exceeds(self, bounds: Bounds, *, in_all: bool) -> ModelMismatch | None:
        """The first bound that is exceeded, as a mismatch."""
        compared = [
            (self.stretch.moves, bounds.moves, "moves without waiting"),
            (self.stretch.moves, bounds.from_counters, "moves without waiting, by its counters alone"),
            (self.stretch.model_calls, bounds.model_calls, "model calls without waiting"),
            (self.stretch.tool_calls, bounds.tool_calls, "tool calls without waiting"),
        ]
        if in_all:
            compared.append((self.whole.model_calls, bounds.model_calls_in_all, "model calls in all"))
            compared.append((self.whole.tool_calls, bounds.tool_calls_in_all, "tool calls in all"))
        for made, most, what in compared:
            if most is not None and made > most:
                text = f"at most {most:,} {what}, and the run has made {made:,}"
                return ModelMismatch(self.row, text, tuple(map(self.space.describe, sorted(self.here)[:3])))
        return None


class RunMonitor:
    """Follows one run.

    Args:
        model: The models of its graph.
        run: The run as it is now. If its past is not known, it is followed by the engine's counters alone.
        on_wait: Called each time the run has reached a state that waits.
    """

    def __init__(self, model: ProofModel, run: RunState, on_wait: Callable[[RunMonitor], None] | None = None) -> None:
        state, counters = run.state, run.counters
        full = model.space(run.guardrails)
        self._model, self._on_wait = model, on_wait
        self.state, self.guardrails = state, run.guardrails
        self._full = full
        self._is_subagent = run.parent is not None
        self._calls_per_move = model.calls_per_move(run.guardrails)
        unseen = model.unseen_calls
        self._limits_of_unseen = with_unseen_calls(NO_BOUNDS, full.graph, run.guardrails) if unseen else None
        self._model_calls, self._batch_left = run.model_calls, run.guardrails.max_calls_per_reply
        self._stretch, self._whole = _Made(), _Made(model_calls=run.model_calls, model_rows=run.model_calls)
        self._places = {row.id: place for place, row in enumerate(full.graph.transitions)}
        self._lower_bounds = frozenset(c.name for c in full.counters if c.lower_bound)
        known = _has(full, full.initial, state, counters, self._lower_bounds)
        self._space = full if known else _projection(full)
        self._here: set[Configuration] = {full.initial if known else _observed(self._space, state, counters)}
        self._lost = False
        self._uncompared: list[_Comparison] = []

    @property
    def lacks_bounds(self) -> bool:
        """Whether moves have to be compared with bounds that are not computed yet; ``compare_bounds`` does so."""
        return bool(self._uncompared)

    def fits(self, state: str, counters: Mapping[str, int]) -> bool:
        """Whether a run that is in a state, with these counters, can be the one that was followed."""
        return any(_has(self._space, c, state, counters, self._lower_bounds) for c in self._here)

    def record_move(self, row: Transition, run: RunState, tool_calls: int = 0) -> ModelMismatch | None:
        """Follow one move of the run; what is wrong with it, if the model or its bounds do not allow it.

        Args:
            row: The row that the run has taken.
            run: The run after the move.
            tool_calls: How many tool calls of the batch have run before it, since the move before.
        """
        counters = run.counters
        self.state = row.target
        if self._lost:
            return None
        space, before = self._space, self._here
        place = self._places[row.id]
        possible = {after for config in before for taken, after in space.moves(config) if taken == place}
        final = space.graph.spec(row.target).final
        self._here = {c for c in possible if final or _has(space, c, row.target, counters, self._lower_bounds)}
        if not self._here:
            self._lost = True
            return self._mismatch(row, before, possible, counters)
        if len(self._here) > MAX_CONFIGURATIONS:
            self._space = _projection(self._full)
            self._here = {_observed(self._space, row.target, counters)}
        exceeded = self._check_bounds(row, run, tool_calls)
        if space.graph.spec(row.target).waits:
            self._stretch = _Made()
            if self._on_wait is not None:
                self._on_wait(self)
        return exceeded

    def _check_bounds(self, row: Transition, run: RunState, tool_calls: int) -> ModelMismatch | None:
        """Count a move, and compare what the run has made with the bounds if these are not sure to hold."""
        model_calls, self._model_calls = run.model_calls - self._model_calls, run.model_calls
        moves, model_rows, tool_rows = row_cost(self._full.graph, row, self._calls_per_move)
        if self._model.runs_one_by_one:
            together = min(tool_calls, self._batch_left)
            self._batch_left -= together
            tool_rows = max(tool_rows, together)
        if not self._model.batch_counters.isdisjoint(row.refills):
            self._batch_left = self.guardrails.max_calls_per_reply
        stretch, whole = self._stretch, self._whole
        for made in (stretch, whole):
            made.add(model_calls, tool_calls, (moves, model_rows, tool_rows))
        if stretch.moves <= BOUNDS_AFTER_MOVES and self._is_as_rows_say():
            return None
        self._uncompared.append(_Comparison(row.id, replace(stretch), replace(whole), self._space, self._here))
        return None if self._model.known_bounds(self.guardrails) is None else self.compare_bounds()

    def compare_bounds(self) -> ModelMismatch | None:
        """Compare what the run has made with the bounds; what exceeds them, if anything does.

        Computes the bounds if they are not known, which takes seconds for large limits. May be called in another
        thread while the run makes no move.
        """
        bounds = self._model.bounds(self.guardrails)
        uncompared, self._uncompared = self._uncompared, []
        for each in uncompared:
            exceeded = each.exceeds(bounds, in_all=not self._is_subagent)  # whose limits change when it continues
            if exceeded is not None:
                self._lost = True
                return exceeded
        return None

    def _is_as_rows_say(self) -> bool:
        """Whether a path of the model has as many calls as the run; then no bound is exceeded."""
        stretch, whole = self._stretch, self._whole
        if stretch.tool_calls > stretch.tool_rows or whole.tool_calls > whole.tool_rows:
            return False
        limits = self._limits_of_unseen
        if limits is None:
            return stretch.model_calls <= stretch.model_rows and whole.model_calls <= whole.model_rows
        return (limits.model_calls is None or stretch.model_calls <= limits.model_calls) and (
            self._is_subagent or limits.model_calls_in_all is None or whole.model_calls <= limits.model_calls_in_all
        )

    def _mismatch(
        self,
        row: Transition,
        before: Iterable[Configuration],
        possible: Iterable[Configuration],
        counters: Mapping[str, int],
    ) -> ModelMismatch:
        space = self._space
        shown = tuple(space.describe(c) for c in sorted(before)[:3])
        if possible:
            expected = " or ".join(sorted({space.describe(c) for c in possible})[:3])
            values = ", ".join(f"{name}={value}" for name, value in sorted(counters.items()))
            return ModelMismatch(row.id, f"it leads to {expected}, and the run has {values}", shown)
        return ModelMismatch(row.id, _why_not(space, self._places[row.id], before), shown)


def _observed(space: StateSpace, state: str, counters: Mapping[str, int]) -> Configuration:
    """The configuration of a run whose past is not known; ``space`` follows counters of the engine alone."""
    values = (min(c.limit, counters.get(c.name, 0)) for c in space.counters)
    return (space.state_index[state], *values)


def _has(
    space: StateSpace, config: Configuration, state: str, counters: Mapping[str, int], lower_bounds: frozenset[str]
) -> bool:
    """Whether a run in a state, with these counters, can be in a configuration."""
    if space.graph.states[config[0]].name != state:
        return False
    declared = {c.name for c in space.graph.counters}
    for variable, value in zip(space.counters, config[1:], strict=True):
        if variable.name not in declared:
            continue
        real = min(variable.limit, counters.get(variable.name, 0))
        if not (value <= real if variable.name in lower_bounds else value == real):
            return False
    return True


def _why_not(space: StateSpace, place: int, configurations: Iterable[Configuration]) -> str:
    """Why a row cannot be taken in any of the configurations."""
    reasons: dict[str, None] = {}
    source = space.graph.transitions[place].source
    for config in sorted(configurations):
        state = space.graph.states[config[0]].name
        if state != source:
            reasons[f"the run is in {state}"] = None
            continue
        for row in space.rows[config[0]]:
            ruled_out_by = row.ruled_out_by(config)
            if row.place == place:
                reasons[_text(ruled_out_by)] = None
                break
            if row.must(config):
                reasons[f"{row.transition.id} holds first, {_text(row.decided_by(config))}"] = None
                break
    return "; ".join(reasons)


def _text(assumption: GuardAssumption | None) -> str:
    return "as it has no guard" if assumption is None else f"as {assumption.text}"
