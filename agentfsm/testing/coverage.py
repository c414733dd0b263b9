"""Graph coverage of a test run, in all workers of pytest-xdist: transitions, pairs, triples, prime paths and guards."""

from __future__ import annotations

import ast
import html
import inspect
import json
import os
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import pytest

from agentfsm.loop.guardrails import Behavior
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.path_generation import Paths, paths, prime_paths

MAX_WINDOW = 3
"""The longest windows of consecutive rows that are counted: triples."""

MAX_TRACKED_RUNS = 10_000
"""The number of runs whose last rows are kept; the oldest are dropped first."""


@dataclass
class CoverageCounts:
    """What the runs of one graph covered.

    Attributes:
        windows: How often one, two or three rows were taken consecutively, by their ids.
        true: How often each guard was true, by row id.
        false: How often each guard was false, by row id.
        walks: How often states were visited consecutively, by their names; up to ``max_walk_length`` transitions.
        max_walk_length: The length of the longest walks that are counted, in transitions: 0 to count none, the number
            of states of the graph for prime paths.
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
        """Count one transition of a run."""
        row = decision.transition
        recent = self._recent.pop(run_id, ())
        if recent and not recent[-1].endswith(f">{row.source}"):
            recent = ()  # another run with the same id
        recent = (*recent, f"{row.id}>{row.target}")[-max(MAX_WINDOW, self.max_walk_length) :]
        self._recent[run_id] = recent
        if len(self._recent) > MAX_TRACKED_RUNS:
            self._recent.popitem(last=False)
        ids = tuple(each.partition(">")[0] for each in recent[-MAX_WINDOW:])
        for start in range(len(ids)):
            self.windows[ids[start:]] += 1
        if self.max_walk_length:
            states = (*(each.partition(".")[0] for each in recent), str(row.target))
            for start in range(len(states) - 1):
                self.walks[states[start:]] += 1
        for guard, answer in decision.tried:
            (self.true if answer else self.false)[f"{row.source}.{guard}"] += 1

    @property
    def rows(self) -> dict[str, int]:
        """How often each row was taken."""
        return {window[0]: n for window, n in self.windows.items() if len(window) == 1}

    def merge(self, other: CoverageCounts) -> None:
        """Add the counts of another process."""
        self.windows.update(other.windows)
        self.true.update(other.true)
        self.false.update(other.false)
        self.walks.update(other.walks)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON data, in a fixed order."""
        return {
            "windows": {" > ".join(window): n for window, n in sorted(self.windows.items())},
            "true": dict(sorted(self.true.items())),
            "false": dict(sorted(self.false.items())),
            "walks": {" > ".join(walk): n for walk, n in sorted(self.walks.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> CoverageCounts:
        """The counts that ``to_dict`` returned."""
        windows, walks = (
            Counter({tuple(text.split(" > ")): n for text, n in data[name].items()}) for name in ("windows", "walks")
        )
        return cls(windows, Counter(data["true"]), Counter(data["false"]), walks)


@dataclass(frozen=True, slots=True)
class CriterionCoverage:
    """How much of one criterion was covered.

    Attributes:
        what: ``transitions``, ``pairs``, ``triples``, ``prime`` or ``guards both ways``.
        covered: The number of covered items.
        of: The number of items that can be covered.
        missing: The items that were not covered, in table order.
        impossible: The items that no run can cover; they are not counted.
    """

    what: str
    covered: int
    of: int
    missing: tuple[str, ...]
    impossible: tuple[str, ...] = ()

    @property
    def percent(self) -> float:
        """The covered share, in percent."""
        return 100.0 * self.covered / self.of if self.of else 100.0


class GraphCoverage(list[CriterionCoverage]):
    """How much of a graph was covered, by criterion; a notebook shows it as a table and a picture.

    Args:
        results: The criteria, transitions first.
        graph: The graph.
        rows: How often each row was taken, by its id.
    """

    def __init__(self, results: Iterable[CriterionCoverage], graph: Graph, rows: Mapping[str, int]) -> None:
        super().__init__(results)
        self.graph, self.rows = graph, dict(rows)

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the usual name for it
        """The graph with how often each row was taken; rows that were never taken are tinted.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such format, or it cannot show coverage.
        """
        from agentfsm.diagrams import Coverage, diagram  # loads only if a diagram is drawn

        impossible = self[0].impossible if self else ()
        return diagram(self.graph, format, overlay=Coverage(self.rows, impossible))

    def _repr_html_(self) -> str:
        """What a notebook shows: the shares, and the picture."""
        rows = "".join(
            f"<tr><td>{html.escape(each.what)}<td>{each.covered} of {each.of}<td>{each.percent:.1f} %" for each in self
        )
        return f"<table><tr><th>criterion<th>covered<th>share{rows}</table>{self.diagram()}"

    def _repr_markdown_(self) -> str:
        """The shares, and the picture as Mermaid."""
        rows = "\n".join(f"| {each.what} | {each.covered} of {each.of} | {each.percent:.1f} % |" for each in self)
        picture = f"```mermaid\n{self.diagram('mermaid')}```\n"
        return f"| criterion | covered | share |\n| --- | --- | --- |\n{rows}\n\n{picture}"


def coverage_by_criterion(
    graph: Graph,
    counts: CoverageCounts,
    cover: str = "pairs",
    behavior: Behavior | None = None,
    structured: bool | None = None,
) -> GraphCoverage:
    """How much of what can be covered was covered: rows, the requirements of a criterion, and guards both ways.

    Args:
        graph: The graph.
        counts: The counts; for ``prime``, from a ``CoverageCounts`` that counts walks.
        cover: ``transitions``, ``pairs``, ``triples`` or ``prime``.
        behavior: The behavior of the runs; None allows any.
        structured: Whether the agent has an output type; None allows both.
    """
    results: list[CriterionCoverage] = []
    dead: set[str] = set()
    for what in dict.fromkeys(("transitions", cover)):
        possible = paths(graph, what, behavior=behavior, structured=structured)
        results.append(
            _prime_coverage(graph, counts, possible) if what == "prime" else _window_coverage(counts, what, possible)
        )
        if what == "transitions":
            dead = {i.rows[0] for i in possible.infeasible}
    guards = [t.id for t in graph if t.guard is not None and t.id not in dead]
    # the last guard of a waiting state is only false while no reply has arrived, and then no transition is taken
    never_false = {graph.rows(s.name)[-1].id for s in graph.states if s.waits}
    missing = [
        f"{i} (never {'true' if not counts.true[i] else 'false'})"
        for i in guards
        if not (counts.true[i] and (counts.false[i] or i in never_false))
    ]
    both = CriterionCoverage("guards both ways", len(guards) - len(missing), len(guards), tuple(missing))
    return GraphCoverage([*results, both], graph, counts.rows)


def _window_coverage(counts: CoverageCounts, what: str, possible: Paths) -> CriterionCoverage:
    length = {"transitions": 1, "pairs": 2, "triples": 3}[what]
    required: dict[tuple[str, ...], None] = {}
    for ids in (path.ids for path in possible):
        required.update((ids[i : i + length], None) for i in range(len(ids) - length + 1))
    missing = tuple(" > ".join(w) for w in required if not counts.windows[w])
    infeasible = tuple(" > ".join(i.rows) for i in possible.infeasible)
    return CriterionCoverage(what, len(required) - len(missing), len(required), missing, infeasible)


def _prime_coverage(graph: Graph, counts: CoverageCounts, possible: Paths) -> CriterionCoverage:
    """Coverage of prime paths, which are walks through states, by whichever rows."""
    never = {infeasible.rows for infeasible in possible.infeasible}
    every = prime_paths(graph)
    required = [states for states, rows in every if rows not in never]
    missing = tuple(" > ".join(w) for w in required if not counts.walks[w])
    impossible = tuple(" > ".join(states) for states, rows in every if rows in never)
    return CriterionCoverage("prime", len(required) - len(missing), len(required), missing, impossible)


def row_lines(graph: Graph, module: ModuleType | None = None) -> dict[str, tuple[str, int]]:
    """For each row id, the file and the line that declares the row; rows that are not found are left out.

    Args:
        graph: The graph.
        module: The module that builds it, if known. The modules of its guards and of ``LOOP`` are searched as well.
    """
    names = dict.fromkeys(
        name for t in graph if t.guard is not None and (name := getattr(t.guard, "__module__", None)) is not None
    )
    modules = [module, *(sys.modules.get(name) for name in names), sys.modules.get("agentfsm.loop.transition_table")]
    lines: dict[str, tuple[str, int]] = {}
    for each in dict.fromkeys(m for m in modules if m is not None):
        for matches, line in _row_calls(each):
            for transition in graph:
                if matches(transition):
                    lines.setdefault(transition.id, (str(each.__file__), line))
    return lines


def _row_calls(module: ModuleType) -> Iterator[tuple[Any, int]]:
    """Every call in a module that declares a row: a predicate for the row, and the line."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        args = [_resolve(a, module) for a in node.args]
        kwargs = {k.arg: _resolve(k.value, module) for k in node.keywords if k.arg}
        if _resolve(node.func, module) is Transition:
            yield _is_row(*(args[i] if i < len(args) else kwargs.get(n) for i, n in enumerate(_FIELDS))), node.lineno
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "with_detector":
            state, guard = (args[i] if i < len(args) else kwargs.get(n) for i, n in enumerate(("state", "detector")))
            yield _is_row(state, guard, None), node.lineno


_FIELDS = ("source", "guard", "target")
_UNKNOWN = object()


def _is_row(source: Any, guard: Any, target: Any) -> Any:
    def matches(row: Transition) -> bool:
        return row.source == source and row.guard is guard and (target is None or row.target == target)

    return matches


def _resolve(node: ast.expr, module: ModuleType) -> Any:
    """The value of a constant, a name or a dotted name in a module."""
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
    """Coverage as an LCOV tracefile: each row is a line, and each guard has one branch for true and one for false.

    ``pytest --fsm-report=lcov`` writes one. ``genhtml --branch-coverage``, editors and coverage services show it
    on the lines of the table.

    Args:
        graph: The graph.
        coverage: The counts.
        module: The module that builds it, if known.
        impossible: The ids of rows that no run can take; they are left out.
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
        taken: dict[int, int] = {}
        for line, row in rows:
            taken[line] = taken.get(line, 0) + counts.get(row.id, 0)
        branches = [
            (line, number, count[row.id] if taken[line] else "-")  # genhtml 2 refuses a branch on a line without hits
            for line, row in sorted(rows, key=lambda each: each[0])
            if row.guard is not None
            for number, count in enumerate((coverage.true, coverage.false))
        ]
        text += [f"BRDA:{line},0,{number},{count}" for line, number, count in branches]
        text += [f"BRF:{len(branches)}", f"BRH:{sum(count not in (0, '-') for _, _, count in branches)}"]
        text += [f"DA:{line},{count}" for line, count in sorted(taken.items())]
        text += [f"LF:{len(taken)}", f"LH:{sum(bool(n) for n in taken.values())}", "end_of_record"]
    return "\n".join(text) + "\n"


# -- the report of a pytest run ---------------------------------------------------------------------------

REPORT_FILES = {"term": "", "json": "fsm-coverage.json", "lcov": "fsm-coverage.lcov", "svg": "fsm-coverage.svg"}
MAX_SHOWN = 20


@dataclass
class CoveredGraph:
    """A graph whose coverage is reported.

    Attributes:
        graph: The graph.
        behavior: The behavior of its runs; None for any.
        structured: Whether its agent has an output type; None for both.
        module: The module that declares it or tests it, if known.
        results: What was covered, once the tests have run.
    """

    graph: Graph
    behavior: Behavior | None
    structured: bool | None
    module: ModuleType | None = None
    results: list[CriterionCoverage] = field(default_factory=list[CriterionCoverage])

    def dump(self) -> bytes:
        """The graph for another process, which can import its guards."""
        declared = {each.name: getattr(self.graph, each.name) for each in fields(self.graph) if each.init}
        return pickle.dumps((declared, self.behavior, self.structured))

    @classmethod
    def load(cls, dumped: bytes) -> CoveredGraph:
        """What ``dump`` returned, from a worker of this test run."""
        declared, behavior, structured = pickle.loads(dumped)  # noqa: S301  # our own worker's
        return cls(Graph(**declared), behavior, structured)


class GraphCoverageReporter:
    """Counts every transition that runs take in any graph, and writes the reports of those that are asked for.

    Args:
        config: The configuration of the pytest run.
        cover: The coverage criterion.
        covered: The graph to report, if an option names it. Otherwise it is each graph that a test is marked with.
        default: Returns the graph to report if there is none.

    Raises:
        pytest.UsageError: An option names a report format that does not exist.
    """

    def __init__(
        self, config: pytest.Config, cover: str, covered: CoveredGraph | None, default: Callable[[], CoveredGraph]
    ) -> None:
        self._config, self._cover, self._default = config, cover, default
        self._fixed = covered is not None
        self._covered: dict[str, CoveredGraph] = {}
        if covered is not None:
            self.add(covered)
        self._counts: dict[str, CoverageCounts] = {}
        self._problem = ""
        reports: list[str] = config.getoption("--fsm-report") or []
        self._reports: list[tuple[str, str]] = [(r.partition(":")[0], r.partition(":")[2]) for r in reports]
        for report_format, _ in self._reports:
            if report_format not in REPORT_FILES:
                available = ", ".join(REPORT_FILES)
                raise pytest.UsageError(f"--fsm-report={report_format}: unknown format; available: {available}")
        self._restore_machine = self._instrument_machine()

    def add(self, covered: CoveredGraph) -> None:
        """Report a graph that a test is marked with; nothing happens if an option names the graph to report."""
        if not self._fixed or not self._covered:
            self._covered.setdefault(covered.graph.fingerprint, covered)

    def _instrument_machine(self) -> Callable[[], None]:
        """Count each step that any machine makes, until pytest ends; returns a function that undoes it."""
        original, prime = Machine.step, self._cover == "prime"

        def step(machine: Machine, run: Steppable) -> Decision:
            decision = original(machine, run)
            graph = machine.graph
            counts = self._counts.get(graph.fingerprint)
            if counts is None:
                counts = CoverageCounts(max_walk_length=len(graph.states) if prime else 0)
                self._counts[graph.fingerprint] = counts
            counts.record(str(getattr(run, "run_id", id(run))), decision)
            return decision

        setattr(Machine, "step", step)  # noqa: B010  # type checkers reject an assignment to a method
        return lambda: setattr(Machine, "step", original)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a pytest-xdist worker counted."""
        data: dict[str, Any] = getattr(node, "workeroutput", {}).get("agentfsm", {})
        for fingerprint, counts in data.get("counts", {}).items():
            self._counts.setdefault(fingerprint, CoverageCounts()).merge(CoverageCounts.from_dict(counts))
        for dumped in () if self._fixed else data.get("graphs", ()):
            try:
                sys.path += [folder for folder in data["path"] if folder not in sys.path]
                self.add(CoveredGraph.load(dumped))
            except Exception as error:  # a guard that this process cannot import
                self._problem = f"{type(error).__name__}: {error}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker, send the counts; otherwise write the reports, and fail if coverage is too low."""
        self._restore_machine()
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["agentfsm"] = {
                "counts": {fingerprint: counts.to_dict() for fingerprint, counts in self._counts.items()},
                "graphs": () if self._fixed else tuple(_dumped(each) for each in self._covered.values()),
                "path": [folder for folder in sys.path if folder],
            }
            return
        if self._problem:
            raise pytest.UsageError(
                f"name the graph with --fsm-graph=MODULE:NAME: a worker's cannot be read: {self._problem}"
            )
        if not self._covered:
            self.add(self._default())
        for each in self._covered.values():
            each.results = coverage_by_criterion(
                each.graph, self._counts_of(each), self._cover, each.behavior, each.structured
            )
        for _, file, text in self._files():
            file.write_text(text, encoding="utf-8")
        if any(self._below_minimum(each) for each in self._covered.values()) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _counts_of(self, covered: CoveredGraph) -> CoverageCounts:
        return self._counts.get(covered.graph.fingerprint) or CoverageCounts()

    def _files(self) -> list[tuple[str, FilePath, str]]:
        """The graph, the path and the text of each file to write; with several graphs, they end in their names."""
        files: list[tuple[str, FilePath, str]] = []
        several = len({each.graph.name for each in self._covered.values()}) > 1
        for report_format, name in self._reports:
            for each in self._covered.values():
                text = self._render(report_format, each)
                file = FilePath(self._config.rootpath, name or REPORT_FILES[report_format])
                if text is not None:
                    file = file.with_stem(f"{file.stem}-{each.graph.name}") if several else file
                    files.append((each.graph.name, file, text))
        return files

    def _criterion_result(self, covered: CoveredGraph) -> CriterionCoverage:
        return next(s for s in covered.results if s.what == self._cover)

    def _below_minimum(self, covered: CoveredGraph) -> bool:
        minimum: float | None = self._config.getoption("--fsm-fail-under")
        return minimum is not None and self._criterion_result(covered).percent < minimum

    def _render(self, report_format: str, covered: CoveredGraph) -> str | None:
        graph, counts, results = covered.graph, self._counts_of(covered), covered.results
        if report_format == "json":
            shares = [{**asdict(s), "percent": s.percent} for s in results]
            data = {"graph": graph.name, "fingerprint": graph.fingerprint, "shares": shares}
            return json.dumps({**data, **counts.to_dict()}, indent=1) + "\n"
        if report_format == "lcov":
            return lcov(graph, counts, covered.module, results[0].impossible)
        if report_format == "svg":
            return GraphCoverage(results, graph, counts.rows).diagram()
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was covered and what was not."""
        write = terminalreporter.write_line
        for each in self._covered.values():
            if any(report_format == "term" for report_format, _ in self._reports):
                terminalreporter.write_sep("-", f"coverage of graph {each.graph.name!r}")
                _write_results(write, each.results)
            if self._below_minimum(each):
                minimum: Any = self._config.getoption("--fsm-fail-under")
                what = f"{self._cover} paths" if self._cover == "prime" else self._cover
                covered = f"{self._criterion_result(each).percent:.1f} % of the {what} were covered"
                write(f"FAIL: {covered}, less than {minimum:g} %", red=True)
        for graph, file, _ in self._files():
            write(f"coverage of graph {graph!r} written to {os.path.relpath(file, self._config.rootpath)}")


def _write_results(write: Callable[[str], None], results: Sequence[CriterionCoverage]) -> None:
    for each in results:
        write(f"{each.what:<17} {each.covered:>4} of {each.of:<4} {each.percent:5.1f} %")
        for missing in each.missing[:MAX_SHOWN]:
            write(f"    never: {missing}")
        if len(each.missing) > MAX_SHOWN:
            write(f"    ... and {len(each.missing) - MAX_SHOWN} more")


def _dumped(covered: CoveredGraph) -> bytes:
    try:
        return covered.dump()
    except Exception:  # a guard that is not importable; the other process says so
        return b""
