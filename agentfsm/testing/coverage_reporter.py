"""The coverage report of a pytest run: what its tests covered of each graph, in all workers of pytest-xdist."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import pytest

from agentfsm.loop.guardrails import Behavior
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph
from agentfsm.testing.coverage import CoverageCounts, CriterionCoverage, GraphCoverage, coverage_by_criterion, lcov

__all__ = ["REPORT_FILES", "CoveredGraph", "GraphCoverageReporter"]

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
