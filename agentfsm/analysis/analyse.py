"""``analyse``: what is proved of a table, and what a broken property's shortest run looks like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product as combinations
from typing import Any

from agentfsm.analysis.bounds import Bounds, bounds
from agentfsm.analysis.facts import Facts
from agentfsm.analysis.known import CALLS_PER_REPLY, loop_facts
from agentfsm.analysis.loops import endless
from agentfsm.analysis.product import Config, Product, Row
from agentfsm.analysis.properties import Property
from agentfsm.analysis.search import Run, Searcher, names
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.rules import Rules
from agentfsm.machine.graph import Graph

__all__ = ["Analysis", "Dead", "Verdict", "analyse"]

MOST_CONFIGURATIONS = 300_000
"""Where only looking at every configuration decides, this many are looked at."""

MOST_ROWS_TRIED = 5_000
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
class Dead:
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
    dead: tuple[Dead, ...]
    calls_per_reply: int

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        return all(v.holds for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON data."""
        numbers = {k: v for k, v in asdict(self.bounds).items() if k not in ("longest", "taken")}
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
            f"  between two waits: {_most(b.moves, 'moves')}, {_most(b.model_calls, 'model calls')}, "
            f"{_most(b.tool_calls, 'tool calls')}{some}, where a reply makes at most {self.calls_per_reply}"
        )
        yield (
            f"  in a whole run: {_most(b.model_calls_in_all, 'model calls')}, "
            f"{_most(b.tool_calls_in_all, 'tool calls')}"
        )
        if self.dead:
            yield "  never taken under these guardrails:"
            yield from (f"    {dead.row}: {dead.why}" for dead in self.dead)


def _most(bound: int | None, what: str) -> str:
    return f"any number of {what}" if bound is None else f"at most {bound:,} {what}"


def analyse(
    graph: Graph,
    *properties: Property,
    guardrails: AgentGuardrails | None = None,
    rules: Rules | None = None,
    facts: Facts | None = None,
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
        rules: The rules of the run; None leaves open in what they differ.
        facts: What is known of guards and counters of your own.
        calls_per_reply: How many calls a reply makes at most; bounds on tool calls depend on it.

    Raises:
        ConfigurationError: A property or a fact names something that is not there.
    """
    known = loop_facts(guardrails or AgentGuardrails(), rules, calls_per_reply=calls_per_reply)
    known += facts or Facts()
    searcher = Searcher(graph, known)
    most = bounds(graph, known)
    ends = _endless(searcher, most)
    tried = 0 < len(most.longest) <= MOST_ROWS_TRIED
    exact = not tried or searcher.possible(Run(most.longest))
    dead = tuple(_dead(searcher.whole, most.taken))
    return Analysis(
        graph,
        (_cases(graph), _shadowed(searcher, dead), ends, _ending(searcher), *_declared(searcher, properties)),
        most,
        exact,
        dead,
        calls_per_reply,
    )


# -- built-in properties ------------------------------------------------------------------------------


def _cases(graph: Graph) -> Verdict:
    """Rows are asked in order and each tests one guard, so each state has one case for each first that holds."""
    cases = sum(len(graph.rows(s.name)) for s in graph.states)
    text = "in every state, whatever the guards answer, exactly one row is taken"
    stuck = [
        s.name
        for s in graph.states
        if not (s.final or s.waits) and all(t.guard is not None for t in graph.rows(s.name))
    ]
    return Verdict(text, not stuck, f"{cases} cases" if not stuck else f"none may be taken in {', '.join(stuck)}")


def _dead(product: Product, taken: frozenset[int]) -> Iterator[Dead]:
    for row in (row for rows in product.rows for row in rows if row.place not in taken):
        off = [k.why for k in row.known if k.may == "never"]
        why = "; ".join(off or (k.why for k in row.known if k.why))
        yield Dead(row.transition.id, why or "a row in front of it always holds first")


def _shadowed(searcher: Searcher, dead: tuple[Dead, ...]) -> Verdict:
    """A row is shadowed where, whatever the counters, a row in front must hold whenever it may."""
    suspects = {d.row for d in dead}
    found = [
        row.transition.id
        for state in searcher.whole.rows
        for place, row in enumerate(state)
        if row.transition.id in suspects and _always_behind(searcher.whole, row, state[:place])
    ]
    text = "no row stands behind one that always holds first"
    return Verdict(text, not found, f"shadowed: {', '.join(found)}" if found else "")


def _always_behind(product: Product, row: Row, front: Iterable[Row]) -> bool:
    if any(k.may == "never" for k in row.known):
        return False  # switched off, whatever stands in front
    front = tuple(front)
    reads = row.reads.union(*(each.reads for each in front))
    ranges = [range(c.limit + 1) if c.name in reads else (0,) for c in product.counters]
    state = product.index[row.transition.source]
    configs: Iterator[Config] = ((state, *values) for values in combinations(*ranges))
    possible = [c for c in configs if row.may(c)]
    return bool(possible) and all(any(each.must(c) for each in front) for c in possible)


def _endless(searcher: Searcher, most: Bounds) -> Verdict:
    text = "every run ends, or waits for a person"
    run = endless(searcher) if most.moves is None else None
    if run is None:
        return Verdict(text, True)
    verdict = _broken(searcher.graph, text, run)
    transitions = [searcher.graph.transitions[row] for row in run.loop]
    spent = {searcher.graph.spec(t.target).spends for t in transitions} | {t.spends for t in transitions}
    hint = ", ".join(sorted(repr(s) for s in spent if s))
    return replace(verdict, detail=f"it spends {hint}, but no counter bounds that" if hint else "")


def _broken(graph: Graph, text: str, run: Run) -> Verdict:
    return Verdict(text, False, path=names(graph, run.rows), loop=names(graph, run.loop))


def _declared(searcher: Searcher, properties: Iterable[Property]) -> Iterator[Verdict]:
    for each in properties:
        run = searcher.breaks(each)
        yield Verdict(each.text, True) if run is None else _broken(searcher.graph, each.text, run)


def _ending(searcher: Searcher) -> Verdict:
    """The end can be reached from everywhere: by rows that can always be taken, or by looking everywhere."""
    text = "from everywhere, the end can still be reached"
    product = searcher.whole
    if not set(range(len(product.rows))) - _surely_ending(product):
        return Verdict(text, True)
    back: dict[Config, list[Config]] = {product.start: []}
    todo = [product.start]
    while todo:
        config = todo.pop()
        for _, after in product.moves(config):
            if after not in back:
                if len(back) >= MOST_CONFIGURATIONS:
                    return Verdict(text, None, f"more than {MOST_CONFIGURATIONS:,} configurations")
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
    return Verdict(text, not lost, f"not from {product.text(lost[0])}" if lost else "")


def _surely_ending(product: Product) -> set[int]:
    """States from which a run can always take a row that leads on to the end."""
    sure = set(product.finals)
    while True:
        more = {
            state
            for state, rows in enumerate(product.rows)
            if state not in sure and any(row.target in sure for row in _always_possible(rows))
        }
        if not more:
            return sure
        sure |= more


def _always_possible(rows: tuple[Row, ...]) -> Iterator[Row]:
    for row in rows:
        if all(k.may == "always" for k in row.known):
            yield row
        if row.always or any(k.must != "never" for k in row.known):
            return
