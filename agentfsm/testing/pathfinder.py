"""``paths``: a small list of runs that covers a graph, the same on every machine.

The runs are found in the product of the graph's states and what is known of its guards, so each can
happen; what no run can cover is listed with the reason. Budgets are short (``SHORT``), so that runs up to
a limit are short too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from agentfsm.agent import Agent
from agentfsm.analysis import Facts
from agentfsm.analysis.product import Config, Product
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.presets import Preset
from agentfsm.core.rules import Rules
from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.covers import COVERS, Goal, Infeasible, feasible, goals, named, why_not
from agentfsm.testing.ways import product_of

__all__ = ["SHORT", "Path", "Paths", "parts_of", "paths", "short"]

SHORT = AgentGuardrails(
    max_iterations=2,
    max_steps=4,
    max_continues=1,
    max_tokens=1_000,
    max_cost_usd=1.0,
    max_denials=1_000,
    repeated_error_threshold=2,
)
"""Budgets under which every row can be reached in a few moves."""

SHORT_SINGLE = SHORT.model_copy(update={"loop_hard_threshold": 2})
"""The same where a reply makes one call at most, so that it takes two replies to repeat one."""


def short(rules: Rules | None = None) -> AgentGuardrails:
    """Budgets under which every row can be reached in a few moves, for some rules."""
    return SHORT_SINGLE if rules is not None and rules.envelope else SHORT


LONGEST = 40
"""A run that is this long goes on to its end, unless the next thing to cover is where it stands."""


@dataclass(frozen=True, slots=True)
class Path:
    """One run, as the rows that it takes, from the first state to the end.

    Attributes:
        number: Its place in the list, from 1.
        rows: The rows.
        covers: How many things it is the first to cover.
        guardrails: The limits under which it can happen.
        rules: The rules of the run for which it was found, or None for any.
    """

    number: int
    rows: tuple[Transition, ...]
    covers: int
    guardrails: AgentGuardrails
    rules: Rules | None = None

    @property
    def id(self) -> str:
        """A name for tests: its number, its length, and the row with which it ends."""
        return f"{self.number:03d}-{len(self.rows)}moves-{self.rows[-1].id}"

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its rows."""
        return tuple(row.id for row in self.rows)

    def __str__(self) -> str:
        return f"{self.id}: {' > '.join(self.ids)}"


@dataclass(frozen=True, slots=True)
class Paths(Sequence[Path]):
    """The runs, and what they leave out.

    Attributes:
        graph: The graph.
        cover: The criterion.
        found: The runs.
        wanted: How many things the criterion asks for, infeasible ones among them.
        infeasible: Those that no run can cover, with the reasons.
    """

    graph: Graph
    cover: str
    found: tuple[Path, ...]
    wanted: int
    infeasible: tuple[Infeasible, ...]

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Path, ...]: ...
    def __getitem__(self, index: int | slice) -> Path | tuple[Path, ...]:
        return self.found[index]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.found)

    def __str__(self) -> str:
        moves = sum(len(p.rows) for p in self.found)
        covered = self.wanted - len(self.infeasible)
        return (
            f"{self.graph.name}: {len(self.found)} runs of {moves} moves cover {covered} of {self.wanted} {self.cover};"
            f" {len(self.infeasible)} cannot happen"
        )


def parts_of(named: Graph | Preset | Agent) -> tuple[Graph, Rules | None, bool | None]:
    """The graph of a graph, a preset or an agent; with its rules, and whether it has an output type.

    Raises:
        ConfigurationError: It is none of these.
    """
    match named:
        case Graph():
            return named, None, None
        case Preset():
            return named.graph, named.rules, None
        case Agent():
            return named.graph, named.rules, named.parts.output is not None
        case _:  # pyright: ignore[reportUnnecessaryComparison]  # callers may be untyped
            raise ConfigurationError(f"this is neither a graph nor a preset nor an agent: {named!r}")


def paths(
    graph: Graph | Preset | Agent,
    cover: str = "pairs",
    *,
    guardrails: AgentGuardrails | None = None,
    rules: Rules | None = None,
    structured: bool | None = None,
    facts: Facts | None = None,
) -> Paths:
    """A list of runs that covers a graph.

    ::

        print(paths(LOOP))  # loop: 132 runs of 933 moves cover 235 of 265 pairs; 30 cannot happen
        for path in paths(my_agent, "transitions"):
            print(path)

    Args:
        graph: The graph; or a preset or an agent, which bring their rules.
        cover: ``transitions``; ``pairs`` of rows that follow each other; ``triples``; or ``prime``: every
            path of states that comes to none twice, unless it ends where it began, and is no part of a
            longer one. Each round trip is one of these.
        guardrails: The limits of the runs; short ones unless given.
        rules: The rules of the runs, for a graph; None leaves open in what they differ.
        structured: Whether the agent has an output type, for a graph or a preset; None leaves it open.
        facts: What is known of guards of your own.

    Raises:
        ConfigurationError: There is no such criterion, the facts name something that is not there, or it is no
            graph, preset or agent.
    """
    if cover not in COVERS:
        raise ConfigurationError(f"there is no criterion {cover!r}; there are: {', '.join(COVERS)}")
    graph, own_rules, own_structured = parts_of(graph)
    rules = own_rules if rules is None else rules
    structured = own_structured if structured is None else structured
    limits = guardrails or short(rules)
    product = product_of(graph, limits, rules, structured, facts)
    wanted = goals(graph, cover)
    found = feasible(product, wanted)
    possible = [goal for goal in wanted if found[goal]]
    runs = _Finder(product, possible).all()
    return Paths(
        graph,
        cover,
        tuple(
            Path(i, tuple(graph.transitions[r] for r in rows), covers, limits, rules)
            for i, (rows, covers) in enumerate(runs, 1)
        ),
        len(wanted),
        tuple(
            Infeasible(named(graph, goal), why)
            for goal in wanted
            if not found[goal]
            for why in (why_not(product, goal, found),)
        ),
    )


_Node = tuple[Config, Goal]
"""A configuration, and as much of the last moves as is the beginning of some goal."""


class _Finder:
    """Finds runs one after the other, each going from one uncovered goal to the nearest next.

    Goals that end a run are left for last, since each takes a run of its own anyway.
    """

    def __init__(self, product: Product, possible: list[Goal]) -> None:
        self._product = product
        self._open = dict.fromkeys(possible)
        self._beginnings = {goal[:n] for goal in possible for n in range(len(goal) + 1)}
        labels = {row: label for goal in possible for label in goal for row in label}
        self._labels = [labels.get(i, (i,)) for i in range(len(product.graph.transitions))]
        finals = {spec.name for spec in product.graph.states if spec.final}
        self._ending = {i for i, t in enumerate(product.graph.transitions) if t.target in finals}
        self._nexts: dict[tuple[Goal, int], Goal] = {}
        self._reached: dict[Goal, tuple[Goal, ...]] = {}

    def all(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Every run, with how many goals it is the first to cover."""
        while self._open:
            before = len(self._open)
            rows = self._one()
            yield rows, before - len(self._open)

    def _one(self) -> tuple[int, ...]:
        here: _Node = (self._product.start, ())
        rows: list[int] = []
        while here[0][0] not in self._product.finals:
            middle = len(rows) < LONGEST and any(goal[-1][0] not in self._ending for goal in self._open)
            part = self._search(here, ending=False) if middle else None
            for row, node in part or self._search(here, ending=True) or self._search(here, home=True) or ():
                rows.append(row)
                here = node
                for goal in self._goals(node[1]):
                    self._open.pop(goal, None)
        return tuple(rows)

    def _then(self, seen: Goal, row: int) -> Goal:
        """What is remembered behind a move: the longest ending of the moves that begins a goal."""
        if (seen, row) not in self._nexts:
            ending = (*seen, self._labels[row])
            while ending not in self._beginnings:
                ending = ending[1:]
            self._nexts[seen, row] = ending
        return self._nexts[seen, row]

    def _goals(self, seen: Goal) -> tuple[Goal, ...]:
        """The goals that have just been reached."""
        if seen not in self._reached:
            endings = (seen[i:] for i in range(len(seen)))
            self._reached[seen] = tuple(e for e in endings if e in self._open)
        return self._reached[seen]

    def _search(self, start: _Node, *, ending: bool = True, home: bool = False) -> list[tuple[int, _Node]] | None:
        """The shortest way to a goal that is still open, or home, to the end; None where there is none.

        Args:
            start: Where the run stands.
            ending: Whether the way may end the run.
            home: Whether to look for the end in place of a goal.
        """
        back: dict[_Node, tuple[_Node, int] | None] = {start: None}
        todo = deque([start])
        while todo:
            node = todo.popleft()
            for row, config in self._product.moves(node[0]):
                if row in self._ending and not ending:
                    continue
                then = (config, self._then(node[1], row))
                if then in back:
                    continue
                back[then] = (node, row)
                found = (
                    config[0] in self._product.finals if home else any(g in self._open for g in self._goals(then[1]))
                )
                if found:
                    return _way(back, then)
                todo.append(then)
        return None


def _way(back: dict[_Node, tuple[_Node, int] | None], node: _Node) -> list[tuple[int, _Node]]:
    steps: list[tuple[int, _Node]] = []
    while (step := back[node]) is not None:
        steps.append((step[1], node))
        node = step[0]
    return steps[::-1]
