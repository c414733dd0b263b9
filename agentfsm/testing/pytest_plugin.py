"""The pytest plugin: tests that are parametrized with the paths of a graph, and a coverage report for the graph.

A test that takes ``fsm_path`` runs once for each path of a graph (by default ``LOOP``; ``--fsm-graph`` and
``@pytest.mark.fsm(graph=...)`` choose another). With ``--fsm-report`` or ``--fsm-fail-under``, every transition that a
run takes is counted, in all tests and all pytest-xdist workers, except those of ``force``. The report is about the
graph of ``--fsm-graph``, or else about each graph that a test is marked with::

    @pytest.mark.fsm(graph=my_agent)
    def test_every_path(fsm_path):
        WitnessDriver(my_agent).run(fsm_path).check()

    # pytest --fsm-graph=my_module:my_agent --fsm-report=term --fsm-fail-under=100

With ``@pytest.mark.fsm(graph=my_agent, paths="paths.json")``, or ``--fsm-paths``, the paths are those of a file that
``agentfsm paths --output`` wrote: a test fails for each that can no longer happen, and for whatever else changed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentfsm.loop.guardrails import Behavior
    from agentfsm.machine.graph import Graph
    from agentfsm.testing.coverage import CoveredGraph, GraphCoverageReporter
    from agentfsm.testing.path_generation import Path, Paths
    from agentfsm.testing.recorded_runs import RunRecorder
    from agentfsm.testing.reviewed_paths import BrokenPath

# agentfsm is only imported where it is used: every pytest run loads this plugin.

REPORT_FORMATS = "term, json, lcov, svg"
DEFAULT_GRAPH = "agentfsm.loop.transition_table:LOOP"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("agentfsm", "paths of a graph, and its coverage")
    group.addoption(
        "--fsm-graph", metavar="MODULE:NAME", help=f"a graph, a preset or an agent (default: {DEFAULT_GRAPH})"
    )
    group.addoption("--fsm-paths", metavar="FILE", help="take the paths from a file that agentfsm paths --output wrote")
    group.addoption("--fsm-record", action="store_true", help="write what fsm_record compares, instead of comparing")
    group.addoption(
        "--fsm-cover",
        choices=("transitions", "pairs", "triples", "prime"),
        help="the coverage criterion (default: pairs)",
    )
    group.addoption(
        "--fsm-report",
        action="append",
        metavar="FORMAT[:FILE]",
        help=f"report how much of the graph the tests covered: {REPORT_FORMATS}; may be repeated",
    )
    group.addoption(
        "--fsm-fail-under", type=float, metavar="PERCENT", help="fail if less of the --fsm-cover criterion is covered"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and count transitions if a report is requested."""
    config.addinivalue_line(
        "markers",
        "fsm(graph, cover, paths): the graph whose paths fsm_path takes, the criterion, or a file of paths",
    )
    if config.getoption("--fsm-report") or config.getoption("--fsm-fail-under") is not None:
        from agentfsm.testing.coverage import GraphCoverageReporter

        named = _covered_graph(*_load_graph(config)) if config.getoption("--fsm-graph") else None
        cover: str = config.getoption("--fsm-cover") or "pairs"
        reporter = GraphCoverageReporter(config, cover, named, lambda: _covered_graph(*_load_graph(config)))
        config.pluginmanager.register(reporter, "agentfsm-coverage")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Report the graphs that the tests to run are marked with."""
    reporter: GraphCoverageReporter | None = session.config.pluginmanager.get_plugin("agentfsm-coverage")
    for item in session.items if reporter is not None else ():
        marker = item.get_closest_marker("fsm")
        source = _marked_graph(marker) if marker is not None else None
        if reporter is not None and source is not None:
            reporter.add(_covered_graph(source, getattr(item, "module", None)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take ``fsm_path`` with the paths of the graph."""
    if "fsm_path" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("fsm")
    options: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    cover: str = options.get("cover") or metafunc.config.getoption("--fsm-cover") or "pairs"
    graph = _marked_graph(marker) if marker is not None else None
    if graph is None:
        graph = _load_graph(metafunc.config)[0]
    file = _paths_file(metafunc, options.get("paths"))
    found = list(_generate_paths(graph, cover)) if file is None else _read_paths(graph, file)
    metafunc.parametrize("fsm_path", found, ids=[path.id for path in found])


@pytest.fixture
def fsm_record(request: pytest.FixtureRequest) -> Iterator[RunRecorder]:
    """Call it with a ``PathRun``, ``SimulationResult`` or ``RunResult``, which must equal the recorded one.

    The runs of ``test_policy.py`` are in ``test_policy.runs.json``, next to it; ``--fsm-record`` writes them.
    """
    from agentfsm.errors import ConfigurationError
    from agentfsm.testing.recorded_runs import RecordedRuns, RunRecorder

    record = bool(request.config.getoption("--fsm-record"))
    if record and hasattr(request.config, "workerinput"):
        raise pytest.UsageError("--fsm-record writes one file from every test: run pytest without xdist (-n0)")
    file = request.path.with_suffix(".runs.json")
    advice = f"write {file.name} with pytest --fsm-record, and review it"
    try:
        recorded = RecordedRuns.read(file)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from error
    recorder = RunRecorder(request.node.name, recorded, advice, record=record)
    yield recorder
    if record:
        recorded.write(file)
    else:
        recorder.finish()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a test whose path comes from a file that no longer fits the graph."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    problem: str = getattr(params.get("fsm_path"), "problem", "")
    if problem:
        pytest.fail(problem, pytrace=False)


def _paths_file(metafunc: pytest.Metafunc, named: Any) -> FilePath | None:
    """The file of reviewed paths: the marker's, next to the test, or that of ``--fsm-paths``; None for neither."""
    if named is not None:
        return FilePath(metafunc.definition.path.parent, named)
    option: str | None = metafunc.config.getoption("--fsm-paths")
    return FilePath(metafunc.config.invocation_params.dir, option) if option else None


def _read_paths(source: Any, file: FilePath) -> list[Path | BrokenPath]:
    from agentfsm.errors import ConfigurationError
    from agentfsm.testing.reviewed_paths import ReviewedPaths

    _graph_of(source)
    try:
        return ReviewedPaths.read(file).resolve(source, file.name)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from error


def _marked_graph(marker: pytest.Mark) -> Any:
    """The graph, preset or agent of a marker; None if it names none."""
    return marker.args[0] if marker.args else marker.kwargs.get("graph")


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


def _covered_graph(source: Any, module: ModuleType | None) -> CoveredGraph:
    from agentfsm.testing.coverage import CoveredGraph

    return CoveredGraph(*_graph_of(source), module)


def _generate_paths(source: Any, cover: str) -> Paths:
    from agentfsm.testing.path_generation import paths

    _graph_of(source)  # or a usage error
    return paths(source, cover)
