"""The pytest plugin: tests that are parametrized with the paths of a graph, and a coverage report for the graph.

A test that takes ``fsm_path`` runs once for each path of a graph (by default ``LOOP``; ``--fsm-graph`` and
``@pytest.mark.fsm(graph=...)`` choose another). With ``--fsm-report`` or ``--fsm-fail-under``, every transition that a
run takes in that graph is counted, in all tests and all pytest-xdist workers, except those of ``force``::

    @pytest.mark.fsm(graph=my_agent)
    def test_every_path(fsm_path):
        WitnessDriver(my_agent).run(fsm_path).check()

    # pytest --fsm-graph=my_module:my_agent --fsm-report=term --fsm-fail-under=100
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path as FilePath
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentfsm.loop.guardrails import Behavior
    from agentfsm.machine.graph import Graph
    from agentfsm.testing.coverage import CriterionCoverage
    from agentfsm.testing.path_generation import Paths

# agentfsm is only imported where it is used: every pytest run loads this plugin.

REPORT_FILES = {"term": "", "json": "fsm-coverage.json", "lcov": "fsm-coverage.lcov", "svg": "fsm-coverage.svg"}
DEFAULT_GRAPH = "agentfsm.loop.transition_table:LOOP"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("agentfsm", "paths of a graph, and its coverage")
    group.addoption(
        "--fsm-graph", metavar="MODULE:NAME", help=f"a graph, a preset or an agent (default: {DEFAULT_GRAPH})"
    )
    group.addoption(
        "--fsm-cover",
        choices=("transitions", "pairs", "triples", "prime"),
        help="the coverage criterion (default: pairs)",
    )
    group.addoption(
        "--fsm-report",
        action="append",
        metavar="FORMAT[:FILE]",
        help=f"report how much of the graph the tests covered: {', '.join(REPORT_FILES)}; may be repeated",
    )
    group.addoption(
        "--fsm-fail-under", type=float, metavar="PERCENT", help="fail if less of the --fsm-cover criterion is covered"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and count transitions if a report is requested."""
    config.addinivalue_line(
        "markers", "fsm(graph, cover): the graph whose paths fsm_path takes, and the coverage criterion"
    )
    if config.getoption("--fsm-report") or config.getoption("--fsm-fail-under") is not None:
        config.pluginmanager.register(_CoverageReporter(config), "agentfsm-coverage")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take ``fsm_path`` with the paths of the graph."""
    if "fsm_path" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("fsm")
    options: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    if marker is not None and marker.args:
        options["graph"] = marker.args[0]
    cover: str = options.get("cover") or metafunc.config.getoption("--fsm-cover") or "pairs"
    graph = options.get("graph")
    if graph is None:
        graph = _load_graph(metafunc.config)[0]
    generated = _generate_paths(graph, cover)
    metafunc.parametrize("fsm_path", list(generated), ids=[path.id for path in generated])


def _load_graph(config: pytest.Config) -> tuple[Any, ModuleType]:
    """The object that ``--fsm-graph`` names, and its module."""
    name: str = config.getoption("--fsm-graph") or DEFAULT_GRAPH
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise pytest.UsageError(f"--fsm-graph={name}: write it as MODULE:NAME")
    for folder in (config.rootpath, config.invocation_params.dir):  # the module may be in either folder
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute), module
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--fsm-graph={name}: {error}") from error


def _graph_of(source: Any) -> tuple[Graph, Behavior | None, bool | None]:
    from agentfsm.errors import ConfigurationError
    from agentfsm.testing.path_generation import graph_of

    try:
        return graph_of(source)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from error


def _generate_paths(source: Any, cover: str) -> Paths:
    from agentfsm.testing.path_generation import paths

    graph, behavior, structured = _graph_of(source)
    return paths(graph, cover, behavior=behavior, structured=structured)


class _CoverageReporter:
    """Counts every transition that runs take in one graph, and writes the reports."""

    def __init__(self, config: pytest.Config) -> None:
        from agentfsm.testing.coverage import CoverageCounts

        self._config = config
        source, self._module = _load_graph(config)
        self._graph, self._behavior, self._structured = _graph_of(source)
        self._counts = CoverageCounts(max_walk_length=len(self._graph.states) if self._cover == "prime" else 0)
        self._results: list[CriterionCoverage] = []
        reports: list[str] = config.getoption("--fsm-report") or []
        self._reports: list[tuple[str, str]] = [(r.partition(":")[0], r.partition(":")[2]) for r in reports]
        for report_format, _ in self._reports:
            if report_format not in REPORT_FILES:
                available = ", ".join(REPORT_FILES)
                raise pytest.UsageError(f"--fsm-report={report_format}: unknown format; available: {available}")
        self._restore_machine = self._instrument_machine()

    def _instrument_machine(self) -> Any:
        """Count each step that any machine makes in the graph, until pytest ends; returns a function that undoes it."""
        from agentfsm.machine.engine import Decision, Machine, Steppable

        original, counts, fingerprint = Machine.step, self._counts, self._graph.fingerprint

        def step(machine: Machine, run: Steppable) -> Decision:
            decision = original(machine, run)
            if machine.graph.fingerprint == fingerprint:
                counts.record(str(getattr(run, "run_id", id(run))), decision)
            return decision

        setattr(Machine, "step", step)  # noqa: B010  # type checkers reject an assignment to a method
        return lambda: setattr(Machine, "step", original)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the counts of a pytest-xdist worker."""
        from agentfsm.testing.coverage import CoverageCounts

        data = getattr(node, "workeroutput", {}).get("agentfsm")
        if data is not None:
            self._counts.merge(CoverageCounts.from_dict(data))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker, send the counts; otherwise write the reports, and fail if coverage is too low."""
        from agentfsm.testing.coverage import coverage_by_criterion

        self._restore_machine()
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["agentfsm"] = self._counts.to_dict()
            return
        self._results = coverage_by_criterion(self._graph, self._counts, self._cover, self._behavior, self._structured)
        for report_format, file in self._reports:
            text = self._render(report_format)
            if text is not None:
                FilePath(self._config.rootpath, file or REPORT_FILES[report_format]).write_text(text, encoding="utf-8")
        if self._below_minimum and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _cover(self) -> str:
        cover: str = self._config.getoption("--fsm-cover") or "pairs"
        return cover

    @property
    def _criterion_result(self) -> CriterionCoverage:
        return next(s for s in self._results if s.what == self._cover)

    @property
    def _below_minimum(self) -> bool:
        minimum: float | None = self._config.getoption("--fsm-fail-under")
        return minimum is not None and self._criterion_result.percent < minimum

    def _render(self, report_format: str) -> str | None:
        if report_format == "json":
            shares = [{**asdict(s), "percent": s.percent} for s in self._results]
            data = {"graph": self._graph.name, "fingerprint": self._graph.fingerprint, "shares": shares}
            return json.dumps({**data, **self._counts.to_dict()}, indent=1) + "\n"
        if report_format == "lcov":
            from agentfsm.testing.coverage import lcov

            return lcov(self._graph, self._counts, self._module, self._results[0].impossible)
        if report_format == "svg":
            from agentfsm.diagrams import Coverage, diagram

            return diagram(self._graph, "svg", overlay=Coverage(self._counts.rows, self._results[0].impossible))
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was covered and what was not."""
        write = terminalreporter.write_line
        if any(report_format == "term" for report_format, _ in self._reports):
            terminalreporter.write_sep("-", f"coverage of graph {self._graph.name!r}")
            for each in self._results:
                write(f"{each.what:<17} {each.covered:>4} of {each.of:<4} {each.percent:5.1f} %")
                for missing in each.missing[:20]:
                    write(f"    never: {missing}")
                if len(each.missing) > 20:
                    write(f"    ... and {len(each.missing) - 20} more")
        for report_format, file in self._reports:
            if report_format != "term":
                write(f"coverage of graph {self._graph.name!r} written to {file or REPORT_FILES[report_format]}")
        if self._below_minimum:
            minimum: Any = self._config.getoption("--fsm-fail-under")
            what = f"{self._cover} paths" if self._cover == "prime" else self._cover
            write(
                f"FAIL: {self._criterion_result.percent:.1f} % of the {what} were covered, less than {minimum:g} %",
                red=True,
            )
