"""What tests covered of a graph: rows, pairs and triples of rows, ways through the states, and each guard both ways."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.rules import Rules
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.testing.covers import prime_paths
from agentfsm.testing.pathfinder import Paths, paths

__all__ = ["Covered", "Share", "shares"]

LONGEST_WINDOW = 3
"""So many rows in a row are counted: the triples."""

RUNS_AT_ONCE = 10_000
"""Of so many runs, the last rows are remembered."""


@dataclass
class Covered:
    """Counts of what runs of one graph did.

    Attributes:
        windows: How often rows were taken in a row, one to three of them, by their ids.
        true: How often each guard held, by its row's id.
        false: How often each guard did not.
        walks: How often states were come to in a row, by their names; up to ``longest`` moves.
        longest: The moves of the longest walk that is counted: 0 where none is, and the number of the
            graph's states for prime paths.
    """

    windows: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    true: Counter[str] = field(default_factory=Counter[str])
    false: Counter[str] = field(default_factory=Counter[str])
    walks: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    longest: int = 0
    _last: OrderedDict[str, tuple[str, ...]] = field(
        default_factory=OrderedDict[str, tuple[str, ...]], repr=False, compare=False
    )

    def saw(self, run_id: str, decision: Decision) -> None:
        """Count one move of a run."""
        row = decision.transition
        last = self._last.pop(run_id, ())
        if last and not last[-1].endswith(f">{row.source}"):
            last = ()  # another run with the same name
        here = (*last, f"{row.id}>{row.target}")[-max(LONGEST_WINDOW, self.longest) :]
        self._last[run_id] = here
        if len(self._last) > RUNS_AT_ONCE:
            self._last.popitem(last=False)
        ids = tuple(each.partition(">")[0] for each in here[-LONGEST_WINDOW:])
        for start in range(len(ids)):
            self.windows[ids[start:]] += 1
        if self.longest:
            states = (*(each.partition(".")[0] for each in here), str(row.target))
            for start in range(len(states) - 1):
                self.walks[states[start:]] += 1
        for guard, answer in decision.tried:
            (self.true if answer else self.false)[f"{row.source}.{guard}"] += 1

    @property
    def rows(self) -> dict[str, int]:
        """How often each row was taken."""
        return {window[0]: n for window, n in self.windows.items() if len(window) == 1}

    def add(self, other: Covered) -> None:
        """Count what another process saw, too."""
        self.windows.update(other.windows)
        self.true.update(other.true)
        self.false.update(other.false)
        self.walks.update(other.walks)

    def to_dict(self) -> dict[str, Any]:
        """All counts as JSON data, in a fixed order."""
        return {
            "windows": {" > ".join(window): n for window, n in sorted(self.windows.items())},
            "true": dict(sorted(self.true.items())),
            "false": dict(sorted(self.false.items())),
            "walks": {" > ".join(walk): n for walk, n in sorted(self.walks.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> Covered:
        """The counts that ``to_dict`` wrote down."""
        windows, walks = (
            Counter({tuple(text.split(" > ")): n for text, n in data[name].items()}) for name in ("windows", "walks")
        )
        return cls(windows, Counter(data["true"]), Counter(data["false"]), walks)


@dataclass(frozen=True, slots=True)
class Share:
    """How much of one thing was covered.

    Attributes:
        what: ``transitions``, ``pairs``, ``triples``, ``prime`` or ``guards both ways``.
        covered: How many were.
        of: How many can be.
        missing: Those that were not, in the order of the table.
        impossible: Those that no run can take, and so are not asked for.
    """

    what: str
    covered: int
    of: int
    missing: tuple[str, ...]
    impossible: tuple[str, ...] = ()

    @property
    def percent(self) -> float:
        """The share in percent."""
        return 100.0 * self.covered / self.of if self.of else 100.0


def shares(
    graph: Graph,
    covered: Covered,
    cover: str = "pairs",
    rules: Rules | None = None,
    structured: bool | None = None,
) -> list[Share]:
    """How much of a graph was covered, of what can be: its rows, what ``cover`` asks for, and its guards.

    Args:
        graph: The graph.
        covered: The counts; for ``prime`` those of a ``Covered`` that counts walks.
        cover: ``transitions``, ``pairs``, ``triples`` or ``prime``.
        rules: The rules of the runs; None leaves open in what they differ.
        structured: Whether the agent has an output type; None leaves it open.
    """
    found: list[Share] = []
    dead: set[str] = set()
    for what in dict.fromkeys(("transitions", cover)):
        possible = paths(graph, what, rules=rules, structured=structured)
        found.append(_prime(graph, covered, possible) if what == "prime" else _share(covered, what, possible))
        if what == "transitions":
            dead = {i.rows[0] for i in possible.infeasible}
    guards = [t.id for t in graph if t.guard is not None and t.id not in dead]
    last = {graph.rows(s.name)[-1].id for s in graph.states if s.waits}  # where it is false, nothing has come
    half = [
        f"{i} (never {'true' if not covered.true[i] else 'false'})"
        for i in guards
        if not (covered.true[i] and (covered.false[i] or i in last))
    ]
    return [*found, Share("guards both ways", len(guards) - len(half), len(guards), tuple(half))]


def _share(covered: Covered, what: str, possible: Paths) -> Share:
    length = {"transitions": 1, "pairs": 2, "triples": 3}[what]
    wanted: dict[tuple[str, ...], None] = {}
    for ids in (path.ids for path in possible):
        wanted.update((ids[i : i + length], None) for i in range(len(ids) - length + 1))
    missing = tuple(" > ".join(w) for w in wanted if not covered.windows[w])
    never = tuple(" > ".join(i.rows) for i in possible.infeasible)
    return Share(what, len(wanted) - len(missing), len(wanted), missing, never)


def _prime(graph: Graph, covered: Covered, possible: Paths) -> Share:
    """Prime paths are walks through states: whichever rows are taken from one to the next."""
    never = {infeasible.rows for infeasible in possible.infeasible}
    every = prime_paths(graph)
    wanted = [states for states, rows in every if rows not in never]
    missing = tuple(" > ".join(w) for w in wanted if not covered.walks[w])
    impossible = tuple(" > ".join(states) for states, rows in every if rows in never)
    return Share("prime", len(wanted) - len(missing), len(wanted), missing, impossible)
