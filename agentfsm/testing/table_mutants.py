"""Mutants of a table: each with one deliberate fault, to see whether a test suite notices it.

A row is dropped, swapped with the next one or led elsewhere, a guard is negated, or a tool's approval rule is removed.
``agentfsm mutate`` runs a test suite against each. A mutant is applied to the objects themselves, so that whoever has
imported them, and every agent made from them, has the mutant.

This is also the pytest plugin of that command. It recognises the module that declares the table by its file, under
whatever name tests import it, and applies the mutant as soon as that module has run, before anybody else sees it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import update_wrapper
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from agentfsm.agent import Agent
from agentfsm.agent.agent_options import check_agent_graph
from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.presets import Preset
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import guard_name
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph, Transition
from agentfsm.runtime.tools import Tool
from agentfsm.testing.path_assumptions import loop_guard
from agentfsm.testing.path_generation import graph_of

KINDS = ("drop", "swap", "retarget", "negate", "approval")
"""The kinds of mutants."""

MUTANT_VARIABLE = "AGENTFSM_MUTANT"
"""The environment variable that says, as JSON, which file's attribute becomes which mutant, and where to report."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        kind: One of ``KINDS``.
        subject: The id of the row, or the name of the tool.
        other: For a swap, the id of the other row; for a row led elsewhere, its new target.
    """

    kind: str
    subject: str
    other: str = ""

    @property
    def id(self) -> str:
        """A name that stays the same as long as its rows do."""
        return f"{self.kind}:{self.subject}" + (f",{self.other}" if self.kind == "swap" else "")

    def __str__(self) -> str:
        match self.kind:
            case "drop":
                return f"the row {self.subject} is gone"
            case "swap":
                return f"{self.other} is evaluated before {self.subject}"
            case "retarget":
                return f"{self.subject} leads to {self.other}" if self.other else f"{self.subject} leads elsewhere"
            case "negate":
                return f"{self.subject} holds where it should not, and the reverse"
            case _:
                return f"no call of {self.subject} needs approval"


def table_mutants(source: Graph | Preset | Agent[Any, Any]) -> list[Mutant]:
    """Every mutant of a graph, a preset or an agent; in the order of the table, and of the agent's tools.

    Raises:
        ConfigurationError: The source is not one of these.
    """
    return list(_mutants(source))


def _mutants(source: Graph | Preset | Agent[Any, Any]) -> Iterator[Mutant]:
    graph = graph_of(source)[0]
    for spec in graph.states:
        rows = graph.rows(spec.name)
        for row, following in [*pairwise(rows), *((row, None) for row in rows[-1:])]:
            yield Mutant("drop", row.id)
            if following is not None:
                yield Mutant("swap", row.id, following.id)
            yield Mutant("retarget", row.id, _other_target(source, row))
            if row.guard is not None:
                yield Mutant("negate", row.id)
    if isinstance(source, Agent):
        ruled = (tool.name for tool in source.config.tools.values() if tool.requires_approval is not False)
        yield from (Mutant("approval", name) for name in ruled)


def mutant_graph(graph: Graph, mutant: Mutant) -> Graph:
    """The graph of a mutant.

    Raises:
        GraphError: The library refuses such a graph.
    """
    if mutant.kind == "approval":
        return graph
    row = graph.transition(mutant.subject)
    match mutant.kind:
        case "drop":
            table = [t for t in graph if t is not row]
        case "swap":
            other = graph.transition(mutant.other)
            table = [other if t is row else row if t is other else t for t in graph]
        case "retarget":
            if not mutant.other:
                raise GraphError("the row can lead to no other state", row.id)
            table = [_led_to(graph, row, mutant.other) if t is row else t for t in graph]
        case _:
            table = [replace(row, guard=_negated(row)) if t is row else t for t in graph]
    return replace(graph, transitions=tuple(table))


def refusal_of(source: Graph | Preset | Agent[Any, Any], mutant: Mutant) -> str:
    """Why the library refuses a mutant, when its graph or an agent with it is built; empty if it accepts it."""
    graph = graph_of(source)[0]
    try:
        changed = mutant_graph(graph, mutant)
        if isinstance(source, Agent):
            check_agent_graph(changed, source.config.tools)
        elif _is_accepted(graph):
            check_agent_graph(changed, {})
    except GraphError as error:
        return str(error)
    return ""


def _is_accepted(graph: Graph) -> bool:
    """Whether an agent without tools may have a graph; a graph may also be run by something other than an agent."""
    try:
        check_agent_graph(graph, {})
    except GraphError:
        return False
    return True


def _other_target(source: Graph | Preset | Agent[Any, Any], row: Transition) -> str:
    """The next state, in the order of the declaration, that the row may lead to instead; empty if there is none."""
    names = [str(spec.name) for spec in graph_of(source)[0].states]
    here = names.index(row.target)
    others = names[here + 1 :] + names[:here]
    return next((name for name in others if not refusal_of(source, Mutant("retarget", row.id, name))), "")


def _led_to(graph: Graph, row: Transition, target: str) -> Transition:
    """A row with another target; a row into a final state says how the run ends, and only such a row."""
    changes: dict[str, Any] = {"target": next(spec.name for spec in graph.states if spec.name == target)}
    if any(each.name == "ends" for each in fields(row)):
        final = graph.spec(target).final
        changes["ends"] = (getattr(row, "ends", "") or "completed") if final else ""
    return replace(row, **changes)


def _negated(row: Transition) -> Callable[[Any], object]:
    """The opposite of a row's guard; where a detector finds nothing, it finds a failure of its kind."""
    guard = row.guard
    assert guard is not None  # noqa: S101  # only rows with a guard have such a mutant
    detects = "Failure" in str(getattr(guard, "__annotations__", {}).get("return", ""))
    kind = FailureKind.__members__.get(guard_name(loop_guard(row) or guard), FailureKind.tool_error)

    def negated(run: Any) -> object:
        if guard(run):
            return None if detects else False
        return Failure(kind=kind, explanation=f"not {row.name}") if detects else True

    return update_wrapper(negated, guard)


def apply_mutant(source: object, mutant: Mutant) -> None:
    """Change a graph, a preset or an agent, and everything that shares its graph or its tools, into a mutant.

    Raises:
        ConfigurationError: The source is not one of these, or has no such row or tool.
        GraphError: The library refuses such a graph.
    """
    if not isinstance(source, (Graph, Preset, Agent)):
        source = getattr(source, "graph", source)
    graph = graph_of(cast("Graph", source))[0]
    if mutant.kind == "approval":
        tool = source.config.tools.get(mutant.subject) if isinstance(source, Agent) else None
        if tool is None:
            raise ConfigurationError(f"there is no tool {mutant.subject!r}")
        for each in _every(Tool):
            if each.spec is tool.spec:
                object.__setattr__(each, "requires_approval", False)
        return
    changed = mutant_graph(graph, mutant)
    vars(graph).clear()
    vars(graph).update(vars(changed))
    for machine in _every(Machine):
        if machine.graph is graph:
            Machine.__init__(machine, graph, BUILT_IN_GUARDS)


def _every(kind: type[Any]) -> list[Any]:
    """Every object of a type, wherever it is kept."""
    return [each for each in gc.get_objects() if isinstance(each, kind)]


# -- in the process of the tests --------------------------------------------------------------------------


def attribute_of(module: ModuleType, path: str) -> Any:
    """The attribute of a module at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


class MutationReporter:
    """Applies the mutant, and reports that it did, and the first test that failed.

    Args:
        task: ``file`` and ``attribute`` name the object, ``mutant`` has the fields of a ``Mutant`` (None to change
            nothing), ``report`` is the file for the report.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._file = Path(task["file"]).resolve()
        self._failed = False
        for module in list(sys.modules.values()):
            self.on_import(module)

    def on_import(self, module: ModuleType) -> None:
        """Apply the mutant to a module that has just been imported, if it is the one."""
        file = getattr(module, "__file__", None)
        if not file or Path(file).resolve() != self._file:
            return
        try:
            source = attribute_of(module, self._task["attribute"])
        except AttributeError:  # it is still being imported
            return
        if self._task["mutant"] is not None:
            apply_mutant(source, Mutant(**self._task["mutant"]))
        self._report("applied")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report the first test that failed."""
        if report.failed and not self._failed:
            self._failed = True
            self._report(f"failed {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that could not be collected."""
        if report.failed and not self._failed:
            self._failed = True
            self._report(f"failed {report.nodeid}")

    def _report(self, line: str) -> None:
        with Path(self._task["report"]).open("a", encoding="utf-8") as report:
            report.write(f"{line}\n")


def _patch_imports(reporter: MutationReporter) -> None:
    """Tell a reporter of every module that is imported from now on. Test modules have a loader of their own."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    for loader in (SourceFileLoader, AssertionRewritingHook):
        original: Any = loader.exec_module

        def exec_module(self: Any, module: ModuleType, original: Any = original) -> None:
            original(self, module)
            reporter.on_import(module)

        setattr(loader, "exec_module", exec_module)  # noqa: B010  # type checkers reject an assignment to a method


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start before the first ``conftest.py`` imports anything."""
    _start(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Start in a worker of pytest-xdist, which loads plugins later."""
    _start(config)


def _start(config: pytest.Config) -> None:
    task = os.environ.get(MUTANT_VARIABLE)
    if task is not None and not config.pluginmanager.has_plugin("agentfsm-mutation-reporter"):
        reporter = MutationReporter(json.loads(task))
        config.pluginmanager.register(reporter, "agentfsm-mutation-reporter")
        _patch_imports(reporter)
