"""A pytest plugin for ``agentfsm mutate``: changes a table when the module that declares it is imported.

The module is recognised by its file, under whatever name tests import it, and the mutant is applied as soon as the
module has run, before anybody else sees it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["MUTANT_VARIABLE", "attribute_of"]

MUTANT_VARIABLE = "AGENTFSM_MUTANT"
"""The environment variable that says, as JSON, which file's attribute becomes which mutant, and where to report."""


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
            from agentfsm.testing.table_mutants import Mutant, apply_mutant

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
