"""``analyse``: check a graph's built-in and declared properties, with a shortest counterexample for each violation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product as combinations
from typing import Any

from agentfsm.analysis.analysis_limits import AnalysisLimitError, AnalysisLimits, Meter
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption
from agentfsm.analysis.bounds import (
    MAX_TRACE_ROWS,
    Bounds,
    bounds_within_limits,
    calls_per_move,
    with_enforced,
    with_unseen_calls,
)
from agentfsm.analysis.loop_assumptions import AgentTraits, graph_assumptions, makes_unseen_calls
from agentfsm.analysis.model_checker import ModelChecker, Trace, find_lasso, row_ids
from agentfsm.analysis.safety_properties import SafetyProperty
from agentfsm.analysis.state_space import BreadthFirstSearch, CompiledRow, Configuration, StateSpace
from agentfsm.loop.guardrails import AgentGuardrails, Behavior, check_counter_limits
from agentfsm.machine.graph import Graph


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one property.

    Attributes:
        text: The property.
        holds: Whether it holds; None if it could not be decided.
        detail: More about the result.
        path: If it does not hold, the ids of the rows of the shortest run that violates it.
        loop: The ids of rows that can then repeat forever.
        assumptions: If it holds, what it depends on beyond the table itself.
    """

    text: str
    holds: bool | None
    detail: str = ""
    path: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = {True: "holds", False: "BROKEN", None: "open"}[self.holds]
        lines = [f"{word:7} {self.text}" + (f" ({self.detail})" if self.detail else "")]
        lines += [f"        if {assumption}" for assumption in self.assumptions]
        if self.path:
            lines.append("        by: " + ", ".join(self.path))
        if self.loop:
            lines.append("        and then forever: " + ", ".join(self.loop))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DeadTransition:
    """A row that no run takes under the guardrails.

    Attributes:
        row: Its id.
        why: The reason.
    """

    row: str
    why: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is proved about a graph under given guardrails.

    Attributes:
        graph: The graph.
        verdicts: One for each property, the built-in ones first.
        bounds: How long a run can get.
        exact: Whether a run of that length is possible under all assumptions; otherwise the bounds may be too high.
        dead: The rows that no run takes under these guardrails.
        explored: How many configurations and moves were visited.
    """

    graph: Graph
    verdicts: tuple[Verdict, ...]
    bounds: Bounds
    exact: bool
    dead: tuple[DeadTransition, ...]
    explored: int = 0

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        return all(v.holds for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The analysis as JSON-compatible data."""
        numbers = {name: getattr(self.bounds, name) for name in (*BOUNDS, "from_counters", "limit")}
        assumed = {name: list(_texts(self.bounds.assumptions_of(name))) for name in BOUNDS}
        return {
            "graph": self.graph.name,
            "fingerprint": self.graph.fingerprint,
            "ok": self.ok,
            "verdicts": [asdict(v) for v in self.verdicts],
            "bounds": {**numbers, "exact": self.exact, "assumptions": assumed},
            "dead": [asdict(d) for d in self.dead],
            "explored": self.explored,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.graph.name}: {len(self.graph.states)} states, {len(self.graph.transitions)} transitions"
        for verdict in self.verdicts:
            yield f"  {verdict}".replace("\n", "\n  ")
        b, or_less = self.bounds, "" if self.exact else " (upper bounds; the exact ones may be lower)"
        if b.limit:
            calls = f"{_bound_text(b.model_calls, 'model calls')} between two waits"
            yield f"  {calls}, {_bound_text(b.model_calls_in_all, 'model calls')} in a whole run"
            yield f"  other and closer bounds: open ({b.limit})"
            return
        yield (
            f"  between two waits: {_bound_text(b.moves, 'moves')}, {_bound_text(b.model_calls, 'model calls')}, "
            f"{_bound_text(b.tool_calls, 'tool calls')}{or_less}"
        )
        yield (
            f"  in a whole run: {_bound_text(b.model_calls_in_all, 'model calls')}, "
            f"{_bound_text(b.tool_calls_in_all, 'tool calls')}"
        )
        if texts := _texts(b.assumptions):
            yield f"    the most {_listed([BOUNDS[name] for name in BOUNDS if b.assumptions_of(name)])}, if:"
            yield from (f"      {text}" for text in texts)
        if self.dead:
            yield "  never taken under these guardrails:"
            yield from (f"    {dead.row}: {dead.why}" for dead in self.dead)


BOUNDS = {
    "moves": "moves",
    "model_calls": "model calls between two waits",
    "tool_calls": "tool calls between two waits",
    "model_calls_in_all": "model calls in a whole run",
    "tool_calls_in_all": "tool calls in a whole run",
}
"""What each bound is about, by its name."""


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _bound_text(bound: int | None, what: str) -> str:
    return f"any number of {what}" if bound is None else f"at most {bound:,} {what}"


def analyse(
    graph: Graph,
    *properties: SafetyProperty,
    guardrails: AgentGuardrails | None = None,
    behavior: Behavior | None = None,
    assumptions: Assumptions | None = None,
    traits: AgentTraits | None = None,
    limits: AnalysisLimits | None = None,
) -> Analysis:
    """Model-check a graph, over its states and bounded counters.

    Guards without assumptions are free, and so is everything that the policy, tools and people do: what holds
    here holds for any of them. The analysis is about the table, not about the code of a guard, and it says
    nothing about how long a model or a tool takes.

    ::

        limits = AgentGuardrails(max_iterations=8)
        analysis = analyse(LOOP, must_pass("call_llm", through="pre_step"), guardrails=limits)
        assert analysis.ok
        print(analysis.bounds.model_calls)  # 8

    Args:
        graph: The graph.
        *properties: Your own properties, from ``must_pass``, ``never_after`` and ``needs_approvals``.
        guardrails: The limits; by default those of ``AgentGuardrails()``.
        behavior: The behavior of the preset; None proves what holds for every behavior.
        assumptions: Assumptions about your own guards and counters.
        traits: What is known about the agent; by default its behavior, and that no tool of it is a sub-agent or
            takes secret arguments.
        limits: How much it may explore; what it cannot decide within these limits is left open.

    Returns:
        A verdict for each property, the bounds, and the rows that no run takes.

    Raises:
        ConfigurationError: A property or an assumption names something that does not exist.
        GraphError: A counter's limit is a guardrail that does not exist, or is not a whole number.
    """
    check_counter_limits(graph.counters)
    limits_of_runs, of_agent = guardrails or AgentGuardrails(), traits or AgentTraits(behavior)
    known = graph_assumptions(graph, limits_of_runs, of_agent)
    calls = calls_per_move(graph, limits_of_runs, of_agent)
    all_assumptions = known + (assumptions or Assumptions())
    meter = Meter(limits or AnalysisLimits())
    checker = ModelChecker(graph, all_assumptions, meter)
    bounds = bounds_within_limits(graph, all_assumptions, meter, calls_per_move=calls)
    if bounds.limit or makes_unseen_calls(graph, of_agent):
        bounds = with_unseen_calls(bounds, graph, limits_of_runs)
    bounds = with_enforced(bounds, graph, limits_of_runs)
    dead = () if bounds.limit else tuple(_dead_transitions(checker.full, bounds.reachable_rows))
    checks: list[tuple[str, Callable[[str], Verdict]]] = [
        (ONE_ROW_TAKEN, lambda text: _check_one_row_taken(graph, text)),
        (NOT_SHADOWED, lambda text: _check_shadowing(checker, dead, text)),
        (TERMINATES, lambda text: _check_termination(checker, bounds, text)),
        (END_REACHABLE, lambda text: _check_end_reachable(checker, text)),
        *((each.text, partial(_check_property, checker, each)) for each in properties),
    ]
    verdicts = tuple(_decide(checker, meter, check, text) for text, check in checks)
    exact = calls == 1 and _is_exact(checker, bounds, meter)
    return Analysis(graph, verdicts, bounds, exact, dead, meter.visited)


ONE_ROW_TAKEN = "in every state, whatever the guards return, exactly one row is taken"
NOT_SHADOWED = "no row is shadowed by an earlier row"
TERMINATES = "every run ends, or waits for a person"
END_REACHABLE = "from everywhere, the end can still be reached"

VERDICT_SHARE = 0.5
"""The share of the remaining time that each verdict may take."""


def _decide(checker: ModelChecker, meter: Meter, check: Callable[[str], Verdict], text: str) -> Verdict:
    with meter.search(VERDICT_SHARE):
        try:
            return check(text)
        except AnalysisLimitError as error:
            checker.forget()
            return Verdict(text, None, str(error))


def _is_exact(checker: ModelChecker, bounds: Bounds, meter: Meter) -> bool:
    if not 0 < len(bounds.longest) <= MAX_TRACE_ROWS:
        return not bounds.longest
    with meter.search(VERDICT_SHARE):
        try:
            return checker.is_feasible(Trace(bounds.longest))
        except AnalysisLimitError:
            return False


def _texts(assumptions: Iterable[GuardAssumption]) -> tuple[str, ...]:
    """Assumptions in words, each once."""
    return tuple(dict.fromkeys(each.text for each in assumptions if not each.enforced))


# -- built-in properties ------------------------------------------------------------------------------


def _check_one_row_taken(graph: Graph, text: str) -> Verdict:
    """Each state needs a row without a guard. Rows are evaluated in order: each is one case, the first that holds."""
    cases = sum(len(graph.rows(s.name)) for s in graph.states)
    stuck = [
        s.name
        for s in graph.states
        if not (s.final or s.waits) and all(t.guard is not None for t in graph.rows(s.name))
    ]
    return Verdict(text, not stuck, f"{cases} cases" if not stuck else f"possibly none in {', '.join(stuck)}")


def _dead_transitions(space: StateSpace, reachable: frozenset[int]) -> Iterator[DeadTransition]:
    for row in (row for rows in space.rows for row in rows if row.place not in reachable):
        disabled = [k.why for k in row.assumptions if k.may == "never"]
        why = "; ".join(disabled or (k.why for k in row.assumptions if k.why))
        yield DeadTransition(row.transition.id, why or "an earlier row always holds first")


def _check_shadowing(checker: ModelChecker, dead: tuple[DeadTransition, ...], text: str) -> Verdict:
    """A row is shadowed if, whatever the counters, an earlier row must hold whenever it can hold."""
    suspects = {d.row for d in dead}
    shadowed = [
        row.transition.id
        for state in checker.full.rows
        for place, row in enumerate(state)
        if row.transition.id in suspects and _is_shadowed(checker.full, row, state[:place])
    ]
    return Verdict(text, not shadowed, f"shadowed: {', '.join(shadowed)}" if shadowed else "")


def _is_shadowed(space: StateSpace, row: CompiledRow, earlier: Iterable[CompiledRow]) -> bool:
    if any(k.may == "never" for k in row.assumptions):
        return False  # disabled, whatever the earlier rows
    earlier = tuple(earlier)
    reads = row.reads.union(*(each.reads for each in earlier))
    ranges = [range(c.limit + 1) if c.name in reads else (0,) for c in space.counters]
    state = space.state_index[row.transition.source]
    configs: Iterator[Configuration] = ((state, *values) for values in combinations(*ranges))
    possible = 0
    for config in configs:
        space.meter.count()
        if row.may(config):
            possible += 1
            if not any(each.must(config) for each in earlier):
                return False
    return possible > 0


def _check_termination(checker: ModelChecker, bounds: Bounds, text: str) -> Verdict:
    if bounds.from_counters is not None:
        return Verdict(text, True, f"after at most {bounds.from_counters:,} moves, by its counters alone")
    if bounds.moves is not None:
        return Verdict(text, True, assumptions=_texts(bounds.assumptions))
    trace = find_lasso(checker)
    if trace is None:
        return Verdict(text, True, assumptions=_texts(checker.used))
    verdict = _violated(checker.graph, text, trace)
    transitions = [checker.graph.transitions[row] for row in trace.loop]
    spent = {name for t in transitions for name in (*checker.graph.spec(t.target).spends, *t.spends)}
    hint = ", ".join(sorted(map(repr, spent)))
    return replace(verdict, detail=f"it spends {hint}, which does not bound it" if hint else "")


def _violated(graph: Graph, text: str, trace: Trace) -> Verdict:
    return Verdict(text, False, path=row_ids(graph, trace.rows), loop=row_ids(graph, trace.loop))


def _check_property(checker: ModelChecker, each: SafetyProperty, text: str) -> Verdict:
    trace = checker.find_violation(each)
    if trace is None:
        return Verdict(text, True, assumptions=(*each.assumptions, *_texts(checker.used)))
    return _violated(checker.graph, text, trace)


def _check_end_reachable(checker: ModelChecker, text: str = END_REACHABLE) -> Verdict:
    """Decided from rows that can always be taken, or else by visiting every configuration."""
    space = checker.full
    if not set(range(len(space.rows))) - _states_sure_to_end(space):
        return Verdict(text, True)
    space.take_used()
    search = BreadthFirstSearch(space.initial, space.moves, space.meter)
    predecessors: dict[Configuration, list[Configuration]] = {}
    for config in search:
        for _, after in space.moves(config):
            predecessors.setdefault(after, []).append(config)
    ending = {config for config in search.nodes if config[0] in space.finals}
    todo = list(ending)
    while todo:
        space.meter.work()
        for before in predecessors.get(todo.pop(), ()):
            if before not in ending:
                ending.add(before)
                todo.append(before)
    stuck = sorted(search.nodes - ending)
    if stuck:
        return Verdict(text, False, f"not from {space.describe(stuck[0])}")
    return Verdict(text, True, assumptions=_texts(space.take_used()))


def _states_sure_to_end(space: StateSpace) -> set[int]:
    """States from which a run can always take a row that leads on to a final state."""
    sure = set(space.finals)
    while True:
        more = {
            state
            for state, rows in enumerate(space.rows)
            if state not in sure and any(row.target in sure for row in _unconditional_rows(rows))
        }
        if not more:
            return sure
        sure |= more


def _unconditional_rows(rows: tuple[CompiledRow, ...]) -> Iterator[CompiledRow]:
    for row in rows:
        if all(k.may == "always" for k in row.assumptions):
            yield row
        if row.always or any(k.must != "never" for k in row.assumptions):
            return
