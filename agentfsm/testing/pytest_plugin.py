"""The pytest plugin: tests over the paths of a graph, and how much of it a whole test suite covers.

A test that takes ``fsm_path`` runs once for each path of a graph (the loop's own, unless ``--fsm-graph`` or
``@pytest.mark.fsm(graph=...)`` names another). With ``--fsm-report`` or ``--fsm-fail-under``, every step of
that graph's runs is counted, in all tests and all workers; steps of forced runs are not::

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

# Nothing of agentfsm is imported before it is asked for: a plugin is loaded by every run of pytest.

REPORT_FILES = {"term": "", "json": "fsm-coverage.json", "lcov": "fsm-coverage.lcov", "svg": "fsm-coverage.svg"}
DEFAULT_GRAPH = "agentfsm.loop.table:LOOP"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("agentfsm", "paths over a graph, and its coverage")
    group.addoption(
        "--fsm-graph", metavar="MODULE:NAME", help=f"a graph, a preset or an agent; {DEFAULT_GRAPH} unless given"
    )
    group.addoption("--fsm-cover", choices=("transitions", "pairs", "triples", "prime"), help="pairs unless given")
    group.addoption(
        "--fsm-report",
        action="append",
        metavar="FORM[:FILE]",
        help=f"how much of the graph the tests took, as {', '.join(REPORT_FILES)}; more than once for several",
    )
    group.addoption(
        "--fsm-fail-under", type=float, metavar="PERCENT", help="fail where less of what --fsm-cover asks for is taken"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and count where a report is wanted."""
    config.addinivalue_line("markers", "fsm(graph, cover): the graph whose paths fsm_path takes, and the criterion")
    if config.getoption("--fsm-report") or config.getoption("--fsm-fail-under") is not None:
        config.pluginmanager.register(_CoverageReporter(config), "agentfsm-coverage")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``fsm_path`` once for each path."""
    if "fsm_path" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("fsm")
    given: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    if marker is not None and marker.args:
        given["graph"] = marker.args[0]
    cover: str = given.get("cover") or metafunc.config.getoption("--fsm-cover") or "pairs"
    graph = given.get("graph")
    if graph is None:
        graph = _load_graph(metafunc.config)[0]
    found = _generate_paths(graph, cover)
    metafunc.parametrize("fsm_path", list(found), ids=[path.id for path in found])


def _load_graph(config: pytest.Config) -> tuple[Any, ModuleType]:
    """What ``--fsm-graph`` names, and its module."""
    name: str = config.getoption("--fsm-graph") or DEFAULT_GRAPH
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise pytest.UsageError(f"--fsm-graph={name}: write it as MODULE:NAME")
    for folder in (config.rootpath, config.invocation_params.dir):  # what is named may lie in either
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

    graph, rules, structured = _graph_of(source)
    return paths(graph, cover, behavior=rules, structured=structured)


class _CoverageReporter:
    """Counts every step of one graph's runs, and reports."""

    def __init__(self, config: pytest.Config) -> None:
        from agentfsm.testing.coverage import CoverageCounts

        self._config = config
        named, self._module = _load_graph(config)
        self._graph, self._behavior, self._structured = _graph_of(named)
        self._counts = CoverageCounts(max_walk_length=len(self._graph.states) if self._cover == "prime" else 0)
        self._results: list[CriterionCoverage] = []
        asked: list[str] = config.getoption("--fsm-report") or []
        self._reports: list[tuple[str, str]] = [(r.partition(":")[0], r.partition(":")[2]) for r in asked]
        for form, _ in self._reports:
            if form not in REPORT_FILES:
                raise pytest.UsageError(f"--fsm-report={form}: there are {', '.join(REPORT_FILES)}")
        self._restore_machine = self._instrument_machine()

    def _instrument_machine(self) -> Any:
        """See every step that any machine makes of the graph, for as long as pytest runs."""
        from agentfsm.machine.engine import Decision, Machine, Steppable

        original, covered, wanted = Machine.step, self._counts, self._graph.fingerprint

        def step(machine: Machine, run: Steppable) -> Decision:
            decision = original(machine, run)
            if machine.graph.fingerprint == wanted:
                covered.record(str(getattr(run, "run_id", id(run))), decision)
            return decision

        setattr(Machine, "step", step)  # noqa: B010  # a plain assignment is one that type checkers refuse
        return lambda: setattr(Machine, "step", original)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist saw."""
        from agentfsm.testing.coverage import CoverageCounts

        data = getattr(node, "workeroutput", {}).get("agentfsm")
        if data is not None:
            self._counts.merge(CoverageCounts.from_dict(data))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what a worker saw; or write the reports, and fail where too little was taken."""
        from agentfsm.testing.coverage import coverage_by_criterion

        self._restore_machine()
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["agentfsm"] = self._counts.to_dict()
            return
        self._results = coverage_by_criterion(self._graph, self._counts, self._cover, self._behavior, self._structured)
        for form, file in self._reports:
            text = self._render(form)
            if text is not None:
                FilePath(self._config.rootpath, file or REPORT_FILES[form]).write_text(text, encoding="utf-8")
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
        least: float | None = self._config.getoption("--fsm-fail-under")
        return least is not None and self._criterion_result.percent < least

    def _render(self, form: str) -> str | None:
        if form == "json":
            told = [{**asdict(s), "percent": s.percent} for s in self._results]
            data = {"graph": self._graph.name, "fingerprint": self._graph.fingerprint, "shares": told}
            return json.dumps({**data, **self._counts.to_dict()}, indent=1) + "\n"
        if form == "lcov":
            from agentfsm.testing.coverage import lcov

            return lcov(self._graph, self._counts, self._module, self._results[0].impossible)
        if form == "svg":
            from agentfsm.diagrams import Coverage, diagram

            return diagram(self._graph, "svg", overlay=Coverage(self._counts.rows, self._results[0].impossible))
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was taken and what never was."""
        write = terminalreporter.write_line
        if any(form == "term" for form, _ in self._reports):
            terminalreporter.write_sep("-", f"coverage of graph {self._graph.name!r}")
            for share in self._results:
                write(f"{share.what:<17} {share.covered:>4} of {share.of:<4} {share.percent:5.1f} %")
                for missing in share.missing[:20]:
                    write(f"    never: {missing}")
                if len(share.missing) > 20:
                    write(f"    ... and {len(share.missing) - 20} more")
        for form, file in self._reports:
            if form != "term":
                write(f"coverage of graph {self._graph.name!r} written to {file or REPORT_FILES[form]}")
        if self._below_minimum:
            least: Any = self._config.getoption("--fsm-fail-under")
            what = f"{self._cover} paths" if self._cover == "prime" else self._cover
            write(
                f"FAIL: {self._criterion_result.percent:.1f} % of the {what} were taken, less than {least:g} %",
                red=True,
            )
