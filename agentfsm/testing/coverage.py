"""Graph coverage of a test run: transitions, pairs, triples, prime paths and guard outcomes; with an LCOV report."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from agentfsm.loop.guardrails import Behavior
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.path_generation import Paths, paths, prime_paths

__all__ = ["CoverageCounts", "CriterionCoverage", "coverage_by_criterion", "lcov", "row_lines"]


MAX_WINDOW = 3
"""So many rows in a row are counted: the triples."""

MAX_TRACKED_RUNS = 10_000
"""Of so many runs, the last rows are remembered."""


@dataclass
class CoverageCounts:
    """Counts of what runs of one graph did.

    Attributes:
        windows: How often rows were taken in a row, one to three of them, by their ids.
        true: How often each guard held, by its row's id.
        false: How often each guard did not.
        walks: How often states were come to in a row, by their names; up to ``max_walk_length`` moves.
        max_walk_length: The moves of the longest walk that is counted: 0 where none is, and the number of the
            graph's states for prime paths.
    """

    windows: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    true: Counter[str] = field(default_factory=Counter[str])
    false: Counter[str] = field(default_factory=Counter[str])
    walks: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    max_walk_length: int = 0
    _recent: OrderedDict[str, tuple[str, ...]] = field(
        default_factory=OrderedDict[str, tuple[str, ...]], repr=False, compare=False
    )

    def record(self, run_id: str, decision: Decision) -> None:
        """Count one move of a run."""
        row = decision.transition
        last = self._recent.pop(run_id, ())
        if last and not last[-1].endswith(f">{row.source}"):
            last = ()  # another run with the same name
        here = (*last, f"{row.id}>{row.target}")[-max(MAX_WINDOW, self.max_walk_length) :]
        self._recent[run_id] = here
        if len(self._recent) > MAX_TRACKED_RUNS:
            self._recent.popitem(last=False)
        ids = tuple(each.partition(">")[0] for each in here[-MAX_WINDOW:])
        for start in range(len(ids)):
            self.windows[ids[start:]] += 1
        if self.max_walk_length:
            states = (*(each.partition(".")[0] for each in here), str(row.target))
            for start in range(len(states) - 1):
                self.walks[states[start:]] += 1
        for guard, answer in decision.tried:
            (self.true if answer else self.false)[f"{row.source}.{guard}"] += 1

    @property
    def rows(self) -> dict[str, int]:
        """How often each row was taken."""
        return {window[0]: n for window, n in self.windows.items() if len(window) == 1}

    def merge(self, other: CoverageCounts) -> None:
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
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> CoverageCounts:
        """The counts that ``to_dict`` wrote down."""
        windows, walks = (
            Counter({tuple(text.split(" > ")): n for text, n in data[name].items()}) for name in ("windows", "walks")
        )
        return cls(windows, Counter(data["true"]), Counter(data["false"]), walks)


@dataclass(frozen=True, slots=True)
class CriterionCoverage:
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


def coverage_by_criterion(
    graph: Graph,
    counts: CoverageCounts,
    cover: str = "pairs",
    behavior: Behavior | None = None,
    structured: bool | None = None,
) -> list[CriterionCoverage]:
    """How much of a graph was covered, of what can be: its rows, what ``cover`` asks for, and its guards.

    Args:
        graph: The graph.
        counts: The counts; for ``prime`` those of a ``CoverageCounts`` that counts walks.
        cover: ``transitions``, ``pairs``, ``triples`` or ``prime``.
        behavior: The rules of the runs; None leaves open in what they differ.
        structured: Whether the agent has an output type; None leaves it open.
    """
    found: list[CriterionCoverage] = []
    dead: set[str] = set()
    for what in dict.fromkeys(("transitions", cover)):
        possible = paths(graph, what, behavior=behavior, structured=structured)
        found.append(
            _prime_coverage(graph, counts, possible) if what == "prime" else _window_coverage(counts, what, possible)
        )
        if what == "transitions":
            dead = {i.rows[0] for i in possible.infeasible}
    guards = [t.id for t in graph if t.guard is not None and t.id not in dead]
    last = {graph.rows(s.name)[-1].id for s in graph.states if s.waits}  # where it is false, nothing has come
    half = [
        f"{i} (never {'true' if not counts.true[i] else 'false'})"
        for i in guards
        if not (counts.true[i] and (counts.false[i] or i in last))
    ]
    return [*found, CriterionCoverage("guards both ways", len(guards) - len(half), len(guards), tuple(half))]


def _window_coverage(covered: CoverageCounts, what: str, possible: Paths) -> CriterionCoverage:
    length = {"transitions": 1, "pairs": 2, "triples": 3}[what]
    wanted: dict[tuple[str, ...], None] = {}
    for ids in (path.ids for path in possible):
        wanted.update((ids[i : i + length], None) for i in range(len(ids) - length + 1))
    missing = tuple(" > ".join(w) for w in wanted if not covered.windows[w])
    never = tuple(" > ".join(i.rows) for i in possible.infeasible)
    return CriterionCoverage(what, len(wanted) - len(missing), len(wanted), missing, never)


def _prime_coverage(graph: Graph, covered: CoverageCounts, possible: Paths) -> CriterionCoverage:
    """Prime paths are walks through states: whichever rows are taken from one to the next."""
    never = {infeasible.rows for infeasible in possible.infeasible}
    every = prime_paths(graph)
    wanted = [states for states, rows in every if rows not in never]
    missing = tuple(" > ".join(w) for w in wanted if not covered.walks[w])
    impossible = tuple(" > ".join(states) for states, rows in every if rows in never)
    return CriterionCoverage("prime", len(wanted) - len(missing), len(wanted), missing, impossible)


def row_lines(graph: Graph, module: ModuleType | None = None) -> dict[str, tuple[str, int]]:
    """For each row's id, the file and the line in which it stands; rows that are nowhere found are left out.

    Args:
        graph: The graph.
        module: The module that builds it, where it is known; the modules of its guards and the loop's own
            are looked through too.
    """
    names = dict.fromkeys(
        name for t in graph if t.guard is not None and (name := getattr(t.guard, "__module__", None)) is not None
    )
    modules = [module, *(sys.modules.get(name) for name in names), sys.modules.get("agentfsm.loop.table")]
    found: dict[str, tuple[str, int]] = {}
    for each in dict.fromkeys(m for m in modules if m is not None):
        for row, line in _row_calls(each):
            for transition in graph:
                if row(transition):
                    found.setdefault(transition.id, (str(each.__file__), line))
    return found


def _row_calls(module: ModuleType) -> Iterator[tuple[Any, int]]:
    """Every call in a module that writes down a row: a test for the row, and the line."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [_resolve(a, module) for a in node.args]
        named = {k.arg: _resolve(k.value, module) for k in node.keywords if k.arg}
        if _resolve(node.func, module) is Transition:
            yield _is_row(*(given[i] if i < len(given) else named.get(n) for i, n in enumerate(_FIELDS))), node.lineno
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "with_detector":
            state, guard = (given[i] if i < len(given) else named.get(n) for i, n in enumerate(("state", "detector")))
            yield _is_row(state, guard, None), node.lineno


_FIELDS = ("source", "guard", "target")
_UNKNOWN = object()


def _is_row(source: Any, guard: Any, target: Any) -> Any:
    def matches(row: Transition) -> bool:
        return row.source == source and row.guard is guard and (target is None or row.target == target)

    return matches


def _resolve(node: ast.expr, module: ModuleType) -> Any:
    """What a constant, a name or a dotted name stands for in a module."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(module, node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, module), node.attr, _UNKNOWN)
    return _UNKNOWN


def lcov(
    graph: Graph, coverage: CoverageCounts, module: ModuleType | None = None, impossible: Collection[str] = frozenset()
) -> str:
    """Coverage as an LCOV tracefile: each row a line, each guard a branch that was true and one that was false.

    ``pytest --fsm-report=lcov`` writes one. ``genhtml --branch-coverage``, editors and coverage services show it
    at the table's own lines.

    Args:
        graph: The graph.
        coverage: The counts.
        module: The module that builds it, where it is known.
        impossible: The ids of rows that no run can take: they are no lines to be covered.
    """
    lines = row_lines(graph, module)
    files: dict[str, list[tuple[int, Transition]]] = {}
    for row in graph:
        if row.id in lines and row.id not in impossible:
            file, line = lines[row.id]
            files.setdefault(file, []).append((line, row))
    counts = coverage.rows
    text: list[str] = []
    for file, rows in sorted(files.items()):
        text += ["TN:agentfsm", f"SF:{file}"]
        branches = [(line, r) for line, r in sorted(rows, key=lambda each: each[0]) if r.guard is not None]
        for line, row in branches:
            asked = coverage.true[row.id] + coverage.false[row.id]
            for number, count in enumerate((coverage.true[row.id], coverage.false[row.id])):
                text.append(f"BRDA:{line},0,{number},{count if asked else '-'}")
        hit = sum(bool(c[row.id]) for _, row in branches for c in (coverage.true, coverage.false))
        text += [f"BRF:{2 * len(branches)}", f"BRH:{hit}"]
        taken: dict[int, int] = {}
        for line, row in rows:
            taken[line] = taken.get(line, 0) + counts.get(row.id, 0)
        text += [f"DA:{line},{count}" for line, count in sorted(taken.items())]
        text += [f"LF:{len(taken)}", f"LH:{sum(bool(n) for n in taken.values())}", "end_of_record"]
    return "\n".join(text) + "\n"
