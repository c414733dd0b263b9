"""Bounds on the length of a run: the longest stretch between two waits, and the most model and tool calls.

The result is the same as over the full state space; see ``counter_acceleration`` for how that is kept small.

Calls that may run in parallel run in one move. In a table such as ``LOOP``, they might as well run one after another:
for each of them, ``calls_pending`` leads back, until the budget for the calls of a reply is spent. There, a bound that
counts one call for each move is right. In other tables, each such move may stand for all calls of a reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod

from agentfsm.analysis.analysis_limits import AnalysisLimitError, Meter
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption
from agentfsm.analysis.counter_acceleration import (
    AcceleratedGraph,
    CounterShift,
    PathSummary,
    flatten_rows,
    is_foldable,
    max_summary,
    shift_values,
)
from agentfsm.analysis.layered_graph import (
    NO_COST,
    Cost,
    LayeredEdge,
    LayeredGraph,
    LongestPaths,
    UnboundedError,
)
from agentfsm.analysis.liveness import dead_variables
from agentfsm.analysis.loop_assumptions import AgentTraits
from agentfsm.analysis.state_space import BreadthFirstSearch, Configuration, StateSpace
from agentfsm.errors import GraphError
from agentfsm.loop import guards
from agentfsm.loop.detectors import CONTINUES, ITERATIONS
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.outcomes import CALL_MODEL, CHOOSE_RECOVERY, CLOSES_BATCH, JUDGE_RESULTS, PARSE_REPLY, RUN_CALLS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Exhausted, StateSpec
from agentfsm.machine.graph import Graph, Transition

MAX_LAYER_VALUES = 200
"""How many combinations of values of large counters there may be in a layer before counters are left free."""

BOUNDS_SHARE = 0.5
"""The share of the remaining time that each attempt at the bounds may take."""

COUNTERS_OF_LOOP = frozenset(counter.name for counter in LOOP.counters)

MAX_TRACE_ROWS = 5_000
"""A longest run with more moves than this is cut off, and not replayed under all assumptions."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a run can get, for any behavior of model, tools and people. None means unbounded.

    Attributes:
        moves: Moves between two waits (or from the start, or to the end).
        model_calls: Model calls between two waits, whoever makes them.
        tool_calls: Tool calls of replies between two waits; not those of sub-agents and of states of your own.
        model_calls_in_all: Model calls of a whole run, including all extensions by a person.
        tool_calls_in_all: Tool calls of replies in a whole run.
        longest: The places of the rows of a run that ends with a longest stretch between two waits; those after the
            first ``MAX_TRACE_ROWS + 1`` are left out.
        reachable_rows: The places of the rows that some run takes, judged by the budget counters alone.
        assumptions: What the bounds depend on that are not ``enforced``.
        enforced: The names of the bounds that the engine enforces, whatever guards do: they depend on nothing.
        from_counters: A bound on the moves between two waits that follows from the declared counters alone.
        limit: If they could not be computed, the limit of the analysis that was reached.
    """

    moves: int | None
    model_calls: int | None
    tool_calls: int | None
    model_calls_in_all: int | None
    tool_calls_in_all: int | None
    longest: tuple[int, ...] = field(default=(), repr=False)
    reachable_rows: frozenset[int] = frozenset()
    assumptions: tuple[GuardAssumption, ...] = ()
    limit: str = ""
    from_counters: int | None = None
    enforced: frozenset[str] = frozenset({"from_counters"})

    def assumptions_of(self, name: str) -> tuple[GuardAssumption, ...]:
        """What one bound depends on.

        Args:
            name: The bound, such as ``tool_calls``.
        """
        return () if name in self.enforced or getattr(self, name) is None else self.assumptions


def bounds_within_limits(graph: Graph, assumptions: Assumptions, meter: Meter, *, calls_per_move: int = 1) -> Bounds:
    """The bounds of a graph's runs, less close if a limit is reached, or none (see ``Bounds.limit``).

    Args:
        graph: The graph.
        assumptions: Its counters, and what is assumed about its guards.
        meter: Its limits.
        calls_per_move: As for ``compute_bounds``.
    """
    followed = _followed(graph, assumptions)
    limit = ""
    for names in dict.fromkeys((followed, _fewer(graph, followed))):
        with meter.search(BOUNDS_SHARE):
            try:
                return compute_bounds(graph, assumptions, meter, calls_per_move=calls_per_move, followed=names)
            except AnalysisLimitError as error:
                limit = str(error)
    return Bounds(None, None, None, None, None, limit=limit)


def compute_bounds(
    graph: Graph,
    assumptions: Assumptions,
    meter: Meter | None = None,
    *,
    calls_per_move: int = 1,
    followed: tuple[str, ...] | None = None,
) -> Bounds:
    """The bounds of a graph's runs, computed over the counters that are declared as budgets.

    If moves are unbounded, these counters do not bound the run.

    Args:
        graph: The graph.
        assumptions: Its counters, and what is assumed about its guards.
        meter: Counts the configurations that are visited.
        calls_per_move: How many tool calls each move stands for that may run some; see the function of that name.
        followed: The counters to follow; by default all that it takes for close bounds.

    Raises:
        AnalysisLimitError: The meter's limit is reached.
    """
    dead = dead_variables(graph, assumptions)
    space = StateSpace(graph, assumptions, _followed(graph, assumptions) if followed is None else followed, meter, dead)
    try:
        bounds = _BoundsComputation(space, calls_per_move, count_model_calls=True).result()
    except UnboundedError:
        rows = _reachable_rows(StateSpace(graph, assumptions, (), meter))
        return Bounds(None, None, None, None, None, reachable_rows=rows, assumptions=space.take_used())
    bounds = replace(bounds, assumptions=space.take_used())
    if bounds.model_calls_in_all is not None:
        return bounds
    # one of the two may be bounded
    model = _BoundsComputation(space, 0, count_model_calls=True).result()
    tools = _BoundsComputation(space, calls_per_move, count_model_calls=False).result()
    return replace(bounds, model_calls_in_all=model.model_calls_in_all, tool_calls_in_all=tools.tool_calls_in_all)


def _followed(graph: Graph, assumptions: Assumptions) -> tuple[str, ...]:
    """The counters to follow: the budgets.

    Large ones multiply the state space. If they are too many, those of your own are left free whose limits are not
    needed for a bound, because other counters bound the moves. The bounds hold all the same, but may be less close.
    """
    budgets = [c for c in assumptions.counters if c.budget]
    large = sorted((c for c in budgets if is_foldable(c)), key=lambda c: c.limit)
    left_out: set[str] = set()
    for each in (c for c in reversed(large) if c.name not in COUNTERS_OF_LOOP):
        left = [c for c in large if c.name not in left_out]
        if prod(c.limit + 1 for c in left[:-1]) <= MAX_LAYER_VALUES:  # the largest of them orders the layers
            break
        if _is_bounded_without(graph, left_out | {each.name}):
            left_out.add(each.name)
    return tuple(c.name for c in budgets if c.name not in left_out)


def _fewer(graph: Graph, followed: tuple[str, ...]) -> tuple[str, ...]:
    """Without the counters of your own that no bound needs: each of them multiplies the work."""
    left_out: set[str] = set()
    for name in (counter.name for counter in graph.counters):
        if name not in COUNTERS_OF_LOOP and _is_bounded_without(graph, left_out | {name}):
            left_out.add(name)
    return tuple(name for name in followed if name not in left_out)


def _is_bounded_without(graph: Graph, names: Set[str]) -> bool:
    try:
        graph.max_moves(lambda counter: None if counter.name in names else 1)
    except GraphError:
        return False
    return True


def with_unseen_calls(bounds: Bounds, graph: Graph, guardrails: AgentGuardrails) -> Bounds:
    """The bounds of a graph whose runs make model calls that no row shows; ``max_iterations`` bounds these, too."""
    most = guardrails.max_iterations
    if any(ITERATIONS.name in row.refills for row in graph):
        most = None
    extensions: int | None = guardrails.max_continues if any(row.extends for row in graph) else 0
    if extensions and any(CONTINUES.name in row.refills for row in graph):
        extensions = None
    in_all = None if most is None or extensions is None else most * (1 + extensions)
    return replace(bounds, model_calls=most, model_calls_in_all=in_all)


def with_enforced(bounds: Bounds, graph: Graph, guardrails: AgentGuardrails) -> Bounds:
    """The bounds, with the one that follows from the counters alone, and with the names of those that are enforced."""
    by_counters = moves_by_counters(graph, guardrails)
    limits = replace(with_unseen_calls(bounds, graph, guardrails), moves=by_counters)
    same = {
        name
        for name in ("moves", "model_calls", "model_calls_in_all")
        if getattr(bounds, name) == getattr(limits, name)
    }
    return replace(bounds, from_counters=by_counters, enforced=bounds.enforced | same)


def moves_by_counters(graph: Graph, guardrails: AgentGuardrails) -> int | None:
    """The most moves between two waits, as far as the declared counters alone tell; None if they do not."""
    try:
        return graph.max_moves(lambda c: c.limit if isinstance(c.limit, int) else getattr(guardrails, c.limit))
    except GraphError:  # a counter that bounds a cycle has no limit under these guardrails
        return None


def _reachable_rows(space: StateSpace) -> frozenset[int]:
    """The rows that some run takes in a state space."""
    search = BreadthFirstSearch(space.initial, space.moves, space.meter)
    return frozenset(row for config in search for row, _ in space.moves(config))


def row_cost(graph: Graph, row: Transition, calls_per_move: int = 1) -> Cost:
    """What taking a row costs: one move, and a model call or tool calls.

    Args:
        graph: The graph.
        row: The row.
        calls_per_move: How many tool calls a move stands for that may run some. With more than one, some may run
            although others are blocked.
    """
    effect = graph.spec(row.source).effect
    none_runs = calls_per_move == 1 and row.guard in (guards.approval_required, guards.in_doubt)
    return (1, int(effect is CALL_MODEL), calls_per_move if effect is RUN_CALLS and not none_runs else 0)


def calls_per_move(graph: Graph, guardrails: AgentGuardrails, traits: AgentTraits) -> int:
    """The most tool calls that a bound counts for one move."""
    return 1 if not traits.parallel or runs_one_by_one(graph) else guardrails.max_calls_per_reply


def runs_one_by_one(graph: Graph) -> bool:
    """Whether calls that run in parallel might as well run one after another, as far as the table tells."""
    budgets = [counter.name for counter in graph.counters if counter.limit == "max_calls_per_reply"]
    if len(budgets) != 1 or any(budgets[0] in spec.spends for spec in graph.states):
        return False
    (budget,) = budgets
    back = [row for row in graph if _leads_back(graph, row, budget)]
    begin = [row for row in graph if budget in row.spends and row not in back]
    if not all(row.spends.count(budget) == 1 and budget in row.refills and _runs(graph, row.target) for row in begin):
        return False
    if not all(row in begin for row in _rows_that_begin(graph)):
        return False
    judging = {row.source for row in back if _is_free_before(graph, row)}
    running = [spec for spec in graph.states if spec.effect is RUN_CALLS]
    return all(_comes_back(graph, spec, judging) for spec in running)


def _runs(graph: Graph, state: str) -> bool:
    return graph.spec(state).effect is RUN_CALLS


def _rows_that_begin(graph: Graph) -> Iterator[Transition]:
    """The rows that lead on to run the calls of a new reply, or to run failed ones again."""
    todo = [spec.name for spec in graph.states if spec.effect in (CALL_MODEL, PARSE_REPLY)]
    found = set(todo)
    while todo:
        for row in graph.rows(todo.pop()):
            target = graph.spec(row.target)
            if target.effect is RUN_CALLS:
                yield row
            elif row.target not in found and not _closes_batch(graph, row, target):
                found.add(row.target)
                todo.append(row.target)
    for spec in graph.states:
        if spec.effect is CHOOSE_RECOVERY:
            yield from (row for row in graph.rows(spec.name) if _runs(graph, row.target))


def _closes_batch(graph: Graph, row: Transition, target: StateSpec) -> bool:
    """Whether no call of the reply runs after a row, even if recovery asks, since an answer to it ends the batch."""
    if target.final or target.effect in CLOSES_BATCH:
        return True
    asks = graph.spec(row.source).effect is CHOOSE_RECOVERY and row.guard is guards.ask_user and target.waits
    answers = (guards.approval_decided, guards.doubt_settled, guards.replied, guards.escalated, guards.vote_recorded)
    return asks and all(each.guard in answers or graph.spec(each.target).final for each in graph.rows(row.target))


def _leads_back(graph: Graph, row: Transition, budget: str) -> bool:
    """Whether a row leads back to run the next call, and spends one of the calls of a reply and nothing else."""
    judges = graph.spec(row.source).effect is JUDGE_RESULTS
    pending = row.guard is guards.calls_pending
    return judges and pending and _runs(graph, row.target) and tuple(row.spends) == (budget,) and not row.refills


def _is_free_before(graph: Graph, row: Transition) -> bool:
    """Whether no counter decides that a row before one in the same state is taken, and visits of the state are free."""
    rows = graph.rows(row.source)
    return not graph.spec(row.source).spends and not _has_counters(rows[: rows.index(row)])


def _has_counters(rows: tuple[Transition, ...]) -> bool:
    return any(isinstance(row.guard, Exhausted) for row in rows)


def _comes_back(graph: Graph, spec: StateSpec, judging: set[str]) -> bool:
    """Whether each call that a state runs is followed by a state that leads back, or the calls wait or are over."""
    rows = graph.rows(spec.name)
    if spec.spends or _has_counters(rows):
        return False
    for row in rows:
        target = graph.spec(row.target)
        if row.guard in (guards.approval_required, guards.in_doubt) and target.waits:
            if not _goes_on(graph, target):
                return False
        elif not target.final and (row.target not in judging or row.spends):
            return False
    return True


def _goes_on(graph: Graph, waiting: StateSpec) -> bool:
    """Whether calls that wait are run next, or their batch is closed, or the run ends or waits on."""
    targets = [graph.spec(row.target) for row in graph.rows(waiting.name)]
    return all(
        target.final or target == waiting or target.effect in CLOSES_BATCH or target.effect is RUN_CALLS
        for target in targets
    )


_HubConfiguration = tuple[int, ...]
"""The index of a hub, then the values of the large counters but the one that orders the layers."""


@dataclass(slots=True)
class _HubSuccessor:
    """A hub that can follow another, with one shift of the large counters.

    Attributes:
        hub: The index of the hub, or -1 for an end.
        shift: What happens to the large counters.
        without_wait: The costliest segment that passes through no wait.
        with_waits: The costliest path, waits passed through.
        after_wait: The costliest segment that starts at a wait.
    """

    hub: int
    shift: CounterShift
    without_wait: PathSummary | None = None
    with_waits: PathSummary | None = None
    after_wait: PathSummary | None = None


_Edge = LayeredEdge[_HubConfiguration, _HubSuccessor]


@dataclass(slots=True)
class _Hub:
    node: Configuration
    successors: dict[tuple[int, ...], list[_HubSuccessor]] = field(
        default_factory=dict[tuple[int, ...], list[_HubSuccessor]]
    )


class _BoundsComputation:
    """One computation: find every reachable configuration of a hub, then the maximum cost from each.

    The configurations lie in layers, one for each value of the largest counter that is only increased, if there is one.
    """

    def __init__(self, space: StateSpace, calls_per_move: int, *, count_model_calls: bool) -> None:
        costs = [row_cost(space.graph, row, calls_per_move) for row in space.graph.transitions]
        costs = [(moves, model * count_model_calls, tool) for moves, model, tool in costs]
        self._accelerated = graph = AcceleratedGraph(space, costs.__getitem__)
        self._hubs: list[_Hub] = []
        self._hub_numbers: dict[Configuration, int] = {}
        self._axis = max(graph.increased, key=graph.limits.__getitem__, default=None)

    def result(self) -> Bounds:
        """The bounds.

        Raises:
            UnboundedError: A run can continue forever without waiting.
        """
        graph = self._accelerated
        node, values = graph.fold(graph.space.initial)
        start = self._split((self._hub(node), *values))  # treated as a hub, whether or not it is one
        last = 0 if self._axis is None else graph.limits[self._axis]
        changes = [] if self._axis is None else graph.case_changes(self._axis)
        layered = LayeredGraph(start, self._edges, last, changes, graph.space.meter)
        paths = LongestPaths(layered, lambda s: _cost(s.without_wait), lambda s: _cost(s.after_wait))
        in_all: tuple[int | None, int | None] = (None, None)
        if not graph.unbounded:
            with suppress(UnboundedError):
                in_all = LongestPaths(layered, lambda s: _calls(s.with_waits)).from_start[1:]
        rows = tuple(islice(_longest(layered, paths), MAX_TRACE_ROWS + 1))
        return Bounds(*paths.most, *in_all, rows, frozenset(graph.rows_seen))

    def _hub(self, node: Configuration) -> int:
        if node not in self._hub_numbers:
            self._hub_numbers[node] = len(self._hubs)
            self._hubs.append(_Hub(node))
        return self._hub_numbers[node]

    def _split(self, here: tuple[int, ...]) -> tuple[int, _HubConfiguration]:
        """The layer of a hub with the values of all large counters, and the rest."""
        return (0, here) if self._axis is None else (here[self._axis + 1], _without(here, self._axis + 1))

    def _edges(self, layer: int, node: _HubConfiguration) -> list[_Edge]:
        """The edges of a hub in a layer."""
        hub, values = node[0], node[1:]
        if self._axis is not None:
            values = (*values[: self._axis], layer, *values[self._axis :])
        limits = self._accelerated.limits
        edges: list[_Edge] = []
        for successor in self._successors(hub, values):
            ahead, after = self._split((successor.hub, *shift_values(values, successor.shift, limits)))
            end = successor.hub < 0
            ahead = 0 if end or self._axis is None else successor.shift[self._axis]
            edges.append(LayeredEdge(ahead, None if end else after, successor, successor.with_waits is not None))
        return edges

    # -- the successors of a hub ----------------------------------------------------------------------

    def _successors(self, number: int, values: Configuration) -> list[_HubSuccessor]:
        graph, hub = self._accelerated, self._hubs[number]
        case = graph.case_of(hub.node[0], values)
        successors = hub.successors.get(case)
        if successors is None:
            successors = hub.successors[case] = self._compute_successors(graph.unfold(hub.node, values))
        return successors

    def _compute_successors(self, config: Configuration) -> list[_HubSuccessor]:
        graph = self._accelerated
        successors: dict[tuple[Configuration | None, CounterShift], _HubSuccessor] = {}
        for step in graph.moves(config):
            first = PathSummary(step.node, step.shift, step.cost, (step.row,))
            for rest in self._continuations(step.node):
                successor = self._successor(successors, first, rest)
                successor.without_wait = max_summary(successor.without_wait, graph.join(first, rest))
                if config[0] in graph.space.waits:
                    successor.after_wait = successor.without_wait
            for (node, shift), reached in graph.reachable_from(step.node).items():
                lead = PathSummary(node, shift, reached.cost, reached.rows)
                if not graph.is_hub(node):  # an end, or a wait that nothing may ever end
                    lead = replace(lead, node=None)
                successor = self._successor(successors, first, lead)
                successor.with_waits = max_summary(successor.with_waits, graph.join(first, lead))
                if reached.cost_after_wait is not None:
                    composed = graph.compose_shifts(step.shift, shift)
                    before = PathSummary(node, composed, reached.cost_after_wait, (step.row, reached.rows))
                    for rest in self._continuations(node):
                        successor = self._successor(successors, before, rest)
                        tail = graph.join(before, rest)
                        successor.after_wait = max_summary(successor.after_wait, tail)
        return list(successors.values())

    def _successor(
        self,
        successors: dict[tuple[Configuration | None, CounterShift], _HubSuccessor],
        first: PathSummary,
        rest: PathSummary,
    ) -> _HubSuccessor:
        graph = self._accelerated
        graph.space.meter.work()
        shift = graph.no_shift if rest.node is None else graph.compose_shifts(first.shift, rest.shift)
        if (rest.node, shift) not in successors:
            hub = -1 if rest.node is None else self._hub(rest.node)
            successors[rest.node, shift] = _HubSuccessor(hub, shift)
        return successors[rest.node, shift]

    def _continuations(self, node: Configuration) -> tuple[PathSummary, ...]:
        """The segments that continue from a node without passing through a wait."""
        graph = self._accelerated
        if graph.is_end(node):
            return (PathSummary(None, graph.no_shift, NO_COST, ()),)
        return (PathSummary(node, graph.no_shift, NO_COST, ()),) if graph.is_hub(node) else graph.summaries(node)


def _longest(
    layered: LayeredGraph[_HubConfiguration, _HubSuccessor], paths: LongestPaths[_HubConfiguration, _HubSuccessor]
) -> Iterator[int]:
    """The rows of a run that ends with a longest stretch between two waits."""
    layer, node = layered.start
    if paths.entry is not None:
        layer, node, entry = paths.entry
        for edge in layered.path_to(layer, node):
            yield from _rows(edge.label.with_waits)
        yield from _rows(entry.label.after_wait)
        if entry.node is None:
            return
        layer, node = min(layer + entry.ahead, layered.last), entry.node
    for edge in paths.path_from(layer, node):
        yield from _rows(edge.label.without_wait)


def _rows(summary: PathSummary | None) -> Iterator[int]:
    return iter(()) if summary is None else flatten_rows(summary.rows)


def _cost(summary: PathSummary | None) -> Cost | None:
    return None if summary is None else summary.cost


def _calls(summary: PathSummary | None) -> Cost | None:
    return None if summary is None else (0, *summary.cost[1:])


def _without(values: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])
