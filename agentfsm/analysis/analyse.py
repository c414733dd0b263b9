"""``analyse``: check a graph's built-in and declared properties, with a shortest counterexample for each violation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product as combinations
from typing import Any

from agentfsm.analysis.assumptions import Assumptions
from agentfsm.analysis.bounds import Bounds, compute_bounds
from agentfsm.analysis.loop_assumptions import CALLS_PER_REPLY, loop_assumptions
from agentfsm.analysis.model_checker import ModelChecker, Trace, find_lasso, row_ids
from agentfsm.analysis.properties import Property
from agentfsm.analysis.state_space import CompiledRow, Configuration, StateSpace
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.machine.graph import Graph

__all__ = ["Analysis", "DeadTransition", "Verdict", "analyse"]

MAX_CONFIGURATIONS = 300_000
"""Where only looking at every configuration decides, this many are looked at."""

MAX_TRACE_ROWS = 5_000
"""A longest run of more moves than this is not tried on everything that is known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out about one property.

    Attributes:
        text: The property.
        holds: Whether it holds; None where it could not be decided.
        detail: More about it.
        path: Where it does not hold, the ids of the rows of the shortest run that breaks it.
        loop: Rows that can follow that path again and again for ever.
    """

    text: str
    holds: bool | None
    detail: str = ""
    path: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = {True: "holds", False: "BROKEN", None: "open"}[self.holds]
        lines = [f"{word:7} {self.text}" + (f" ({self.detail})" if self.detail else "")]
        if self.path:
            lines.append("        by: " + ", ".join(self.path))
        if self.loop:
            lines.append("        and then for ever: " + ", ".join(self.loop))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DeadTransition:
    """A row that no run takes under these guardrails, and why."""

    row: str
    why: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is proved of a graph under some guardrails.

    Attributes:
        graph: The graph.
        verdicts: One for each property, the built-in ones first.
        bounds: How long a run can get.
        exact: Whether a run that long is possible under all that is known; else it may be less.
        dead: The rows that no run takes under these guardrails.
        calls_per_reply: How many calls a reply was taken to make at most.
    """

    graph: Graph
    verdicts: tuple[Verdict, ...]
    bounds: Bounds
    exact: bool
    dead: tuple[DeadTransition, ...]
    calls_per_reply: int

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        return all(v.holds for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON data."""
        numbers = {k: v for k, v in asdict(self.bounds).items() if k not in ("longest", "reachable_rows")}
        return {
            "graph": self.graph.name,
            "fingerprint": self.graph.fingerprint,
            "ok": self.ok,
            "verdicts": [asdict(v) for v in self.verdicts],
            "bounds": {**numbers, "exact": self.exact, "calls_per_reply": self.calls_per_reply},
            "dead": [asdict(d) for d in self.dead],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.graph.name}: {len(self.graph.states)} states, {len(self.graph.transitions)} transitions"
        for verdict in self.verdicts:
            yield f"  {verdict}".replace("\n", "\n  ")
        b, some = self.bounds, "" if self.exact else " (or less)"
        yield (
            f"  between two waits: {_bound_text(b.moves, 'moves')}, {_bound_text(b.model_calls, 'model calls')}, "
            f"{_bound_text(b.tool_calls, 'tool calls')}{some}, where a reply makes at most {self.calls_per_reply}"
        )
        yield (
            f"  in a whole run: {_bound_text(b.model_calls_in_all, 'model calls')}, "
            f"{_bound_text(b.tool_calls_in_all, 'tool calls')}"
        )
        if self.dead:
            yield "  never taken under these guardrails:"
            yield from (f"    {dead.row}: {dead.why}" for dead in self.dead)


def _bound_text(bound: int | None, what: str) -> str:
    return f"any number of {what}" if bound is None else f"at most {bound:,} {what}"


def analyse(
    graph: Graph,
    *properties: Property,
    guardrails: AgentGuardrails | None = None,
    behavior: Behavior | None = None,
    assumptions: Assumptions | None = None,
    calls_per_reply: int = CALLS_PER_REPLY,
) -> Analysis:
    """Prove what can be proved of a graph: exactly, over its states and bounded counters.

    Guards of which nothing is known are free, and so is all that the policy, tools and people do: what
    holds here holds for any of them. What never happens is proved of the table, not of the code of a
    guard, and says nothing about how long a model or a tool takes.

    ::

        found = analyse(LOOP, must_pass("call_llm", through="pre_step"), guardrails=AgentGuardrails(max_iterations=8))
        assert found.ok
        print(found.bounds.model_calls)  # 8

    Args:
        graph: The graph.
        *properties: What you declare of it, by ``must_pass`` and ``never_after``.
        guardrails: The limits; the defaults unless given.
        behavior: The rules of the run; None leaves open in what they differ.
        assumptions: What is known of guards and counters of your own.
        calls_per_reply: How many calls a reply makes at most; bounds on tool calls depend on it.

    Raises:
        ConfigurationError: A property or a fact names something that is not there.
    """
    known = loop_assumptions(guardrails or AgentGuardrails(), behavior, calls_per_reply=calls_per_reply)
    known += assumptions or Assumptions()
    searcher = ModelChecker(graph, known)
    most = compute_bounds(graph, known)
    ends = _check_termination(searcher, most)
    tried = 0 < len(most.longest) <= MAX_TRACE_ROWS
    exact = not tried or searcher.is_feasible(Trace(most.longest))
    dead = tuple(_dead_transitions(searcher.full, most.reachable_rows))
    return Analysis(
        graph,
        (
            _check_one_row_taken(graph),
            _check_shadowing(searcher, dead),
            ends,
            _check_end_reachable(searcher),
            *_check_properties(searcher, properties),
        ),
        most,
        exact,
        dead,
        calls_per_reply,
    )


# -- built-in properties ------------------------------------------------------------------------------


def _check_one_row_taken(graph: Graph) -> Verdict:
    """Rows are asked in order and each tests one guard, so each state has one case for each first that holds."""
    cases = sum(len(graph.rows(s.name)) for s in graph.states)
    text = "in every state, whatever the guards answer, exactly one row is taken"
    stuck = [
        s.name
        for s in graph.states
        if not (s.final or s.waits) and all(t.guard is not None for t in graph.rows(s.name))
    ]
    return Verdict(text, not stuck, f"{cases} cases" if not stuck else f"none may be taken in {', '.join(stuck)}")


def _dead_transitions(space: StateSpace, reachable: frozenset[int]) -> Iterator[DeadTransition]:
    for row in (row for rows in space.rows for row in rows if row.place not in reachable):
        off = [k.why for k in row.assumptions if k.may == "never"]
        why = "; ".join(off or (k.why for k in row.assumptions if k.why))
        yield DeadTransition(row.transition.id, why or "a row in front of it always holds first")


def _check_shadowing(checker: ModelChecker, dead: tuple[DeadTransition, ...]) -> Verdict:
    """A row is shadowed where, whatever the counters, a row in front must hold whenever it may."""
    suspects = {d.row for d in dead}
    found = [
        row.transition.id
        for state in checker.full.rows
        for place, row in enumerate(state)
        if row.transition.id in suspects and _is_shadowed(checker.full, row, state[:place])
    ]
    text = "no row stands behind one that always holds first"
    return Verdict(text, not found, f"shadowed: {', '.join(found)}" if found else "")


def _is_shadowed(space: StateSpace, row: CompiledRow, earlier: Iterable[CompiledRow]) -> bool:
    if any(k.may == "never" for k in row.assumptions):
        return False  # switched off, whatever stands in front
    earlier = tuple(earlier)
    reads = row.reads.union(*(each.reads for each in earlier))
    ranges = [range(c.limit + 1) if c.name in reads else (0,) for c in space.counters]
    state = space.state_index[row.transition.source]
    configs: Iterator[Configuration] = ((state, *values) for values in combinations(*ranges))
    possible = [c for c in configs if row.may(c)]
    return bool(possible) and all(any(each.must(c) for each in earlier) for c in possible)


def _check_termination(checker: ModelChecker, bounds: Bounds) -> Verdict:
    text = "every run ends, or waits for a person"
    run = find_lasso(checker) if bounds.moves is None else None
    if run is None:
        return Verdict(text, True)
    verdict = _violated(checker.graph, text, run)
    transitions = [checker.graph.transitions[row] for row in run.loop]
    spent = {checker.graph.spec(t.target).spends for t in transitions} | {t.spends for t in transitions}
    hint = ", ".join(sorted(repr(s) for s in spent if s))
    return replace(verdict, detail=f"it spends {hint}, but no counter bounds that" if hint else "")


def _violated(graph: Graph, text: str, trace: Trace) -> Verdict:
    return Verdict(text, False, path=row_ids(graph, trace.rows), loop=row_ids(graph, trace.loop))


def _check_properties(checker: ModelChecker, properties: Iterable[Property]) -> Iterator[Verdict]:
    for each in properties:
        run = checker.find_violation(each)
        yield Verdict(each.text, True) if run is None else _violated(checker.graph, each.text, run)


def _check_end_reachable(checker: ModelChecker) -> Verdict:
    """The end can be reached from everywhere: by rows that can always be taken, or by looking everywhere."""
    text = "from everywhere, the end can still be reached"
    product = checker.full
    if not set(range(len(product.rows))) - _states_sure_to_end(product):
        return Verdict(text, True)
    back: dict[Configuration, list[Configuration]] = {product.initial: []}
    todo = [product.initial]
    while todo:
        config = todo.pop()
        for _, after in product.moves(config):
            if after not in back:
                if len(back) >= MAX_CONFIGURATIONS:
                    return Verdict(text, None, f"more than {MAX_CONFIGURATIONS:,} configurations")
                back[after] = []
                todo.append(after)
            back[after].append(config)
    good = {c for c in back if c[0] in product.finals}
    todo = list(good)
    while todo:
        for before in back[todo.pop()]:
            if before not in good:
                good.add(before)
                todo.append(before)
    lost = sorted(back.keys() - good)
    return Verdict(text, not lost, f"not from {product.describe(lost[0])}" if lost else "")


def _states_sure_to_end(space: StateSpace) -> set[int]:
    """States from which a run can always take a row that leads on to the end."""
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
