"""Imports run one way (machine, loop, runtime, adapters, agent), form no cycle, and load only what is used."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys

import pytest

import agentfsm
from agentfsm.errors import MissingExtraError
from agentfsm.machine import graph
from tests.helpers.import_graph import PACKAGE, Import, imports, modules, tree_of

MODULES = modules()


def own_imports() -> list[Import]:
    return [i for i in imports() if i.imported.split(".")[0] == "agentfsm"]


LAYERS = {
    "errors": set(),
    "lazy_imports": set(),
    "machine": {"errors"},
    "loop": {"errors", "machine"},
    "runtime": {"errors", "machine", "loop"},
    "analysis": {"errors", "machine", "loop"},
    "diagrams": {"errors", "machine", "loop", "analysis"},
    "journal": {"errors", "lazy_imports", "machine", "loop", "runtime"},
    "report": {"errors", "machine", "loop", "runtime", "analysis", "diagrams", "journal"},
    "models": {"errors", "lazy_imports", "machine", "loop", "runtime"},
    "integrations": {"errors", "machine", "loop", "runtime", "models"},
    "agent": {"errors", "machine", "loop", "runtime", "journal", "models", "diagrams", "analysis"},
    "workers": {"errors", "machine", "loop", "runtime", "journal", "agent"},
}
"""What each layer may import beside itself: when it loads, inside functions, and for types. The layers that are not
here put the others together for somebody, and may import all of them."""

PUBLIC = {"agentfsm", "__main__", "cli", "runs", "testing", "viewer"}

LAZY_IN_AGENT = {"journal", "models", "diagrams"}
"""What the agent puts together but loads only when it is used: a run in a store, a model by name, a diagram."""

UPWARD = {
    ("agentfsm.runtime.result", "agentfsm.diagrams"): "RunResult.diagram is where users look for a run's path",
    ("agentfsm.runtime.result", "agentfsm.journal.records"): "names the type of RunResult.journal",
    ("agentfsm.runtime.run", "agentfsm.journal.records"): "names the type of Run.journal",
    ("agentfsm.runtime.recorder", "agentfsm.journal.records"): "names the type of JournalSink.records",
    ("agentfsm.runtime.host", "agentfsm.journal.store"): "names the type of Host.store",
    ("agentfsm.runtime.context", "agentfsm.journal.records"): "names what AgentConfig.read_journal returns",
    ("agentfsm.runtime.context", "agentfsm.journal.migration"): "names the type of AgentConfig.migrations",
}
"""Every import against the order of the layers, lazy or for types only, with its reason."""


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "agentfsm"


def test_the_sources_are_found():
    assert {"agentfsm", "agentfsm.agent", "agentfsm.machine.graph", "agentfsm.loop.reducer"} <= set(MODULES)
    assert len(own_imports()) > 100
    assert {layer(m) for m in MODULES} <= set(LAYERS) | PUBLIC


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_imports_only_layers_below_it(name):
    wrong = [
        (i.importer, i.imported) for i in own_imports()
        if layer(i.importer) == name and layer(i.imported) not in LAYERS[name] | {name}
        and (i.when == "now" or (i.importer, i.imported) not in UPWARD)
    ]  # fmt: skip
    assert wrong == []


def test_contributing_lists_each_package_after_those_that_it_imports():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^agentfsm/(\w+)(?:/|[.]py) ", text, re.MULTILINE)
    assert sorted(listed) == sorted({"runs", *(folder.parent.name for folder in PACKAGE.glob("*/__init__.py"))})
    for at, name in enumerate(listed):
        assert LAYERS.get(name, set()) & set(listed) <= set(listed[:at]), name


def test_every_import_against_the_order_still_exists():
    assert UPWARD.keys() <= {(i.importer, i.imported) for i in own_imports() if i.when != "now"}


def test_the_agent_loads_adapters_only_when_they_are_used():
    early = [(i.importer, i.imported) for i in own_imports() if i.when == "now" and layer(i.importer) == "agent"]
    assert [each for each in early if layer(each[1]) in LAZY_IN_AGENT] == []


def test_nothing_imports_the_command_line():
    wrong = [
        (i.importer, i.imported) for i in own_imports()
        if layer(i.imported) == "cli" and layer(i.importer) not in (layer(i.imported), "__main__")
    ]  # fmt: skip
    assert wrong == []


def test_imports_form_no_cycle_lazy_and_type_only_ones_included():
    order = graphlib.TopologicalSorter({m: set() for m in MODULES})
    for i in own_imports():
        if i.imported in MODULES and i.imported != i.importer:
            order.add(i.importer, i.imported)
    list(order.static_order())  # raises CycleError, which names the cycle


def test_a_graph_names_the_packages_that_read_it_and_imports_none():
    assert {i.imported for i in own_imports() if i.importer == "agentfsm.machine.graph"} == {
        "agentfsm.errors",
        "agentfsm.machine.declaration",
        "agentfsm.machine.graph_checks",
    }
    assert sorted(graph._READERS) == ["analyse", "diagram"]
    for name, package in graph._READERS.items():
        assert callable(getattr(importlib.import_module(package), name))


# -- machine and loop do no I/O -------------------------------------------------------------------

OUTSIDE = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "graphviz", "http", "httpx", "io", "logging",
    "mmap", "multiprocessing", "os", "pathlib", "platform", "queue", "random", "sched", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
    "urllib", "uuid",
}  # fmt: skip
PURE = [m for m in MODULES if layer(m) in ("machine", "loop")]


def tree(module: str) -> ast.Module:
    return tree_of(MODULES[module])


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_nothing_that_does_io(module):
    found = {i.imported.split(".")[0] for i in imports() if i.importer == module}
    assert found & OUTSIDE <= ({"random"} if module == "agentfsm.loop.recovery_policy" else set())
    third_party = found - set(sys.stdlib_module_names) - {"agentfsm"}
    encrypts = {"cryptography"} if module == "agentfsm.loop.withholding" else set()
    assert third_party <= {"pydantic", "pydantic_core", "transitions"} | encrypts


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_awaits_nothing_and_opens_nothing(module):
    for node in ast.walk(tree(module)):
        assert not isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)), (module, node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input", "exec", "eval"), (module, node.lineno)


def test_the_only_randomness_in_the_loop_has_a_seed():
    drawn = [
        node for node in ast.walk(tree("agentfsm.loop.recovery_policy"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("random.")
    ]  # fmt: skip
    assert [ast.unparse(node.func) for node in drawn] == ["random.Random"]
    assert all(node.args for node in drawn)


# -- what is loaded when ------------------------------------------------------------------------------


def loaded(code: str) -> set[str]:
    """The modules that are there once some code has run in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}  # it loads what it needs
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        env=environment,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return set(done.stdout.split())


def test_importing_the_package_loads_only_the_package():
    found = loaded("import agentfsm")
    heavy = {"httpx", "graphviz", "click", "rich", "sqlite3", "transitions", "pydantic", "asyncio"}
    assert not found & heavy
    assert {m for m in found if m.startswith("agentfsm")} == {"agentfsm", "agentfsm.lazy_imports"}


def test_the_package_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "agentfsm", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert agentfsm.__version__ in done.stdout


def test_importing_the_agent_loads_neither_the_loop_nor_pydantic():
    found = loaded("from agentfsm import Agent")
    assert not found & {"httpx", "graphviz", "click", "rich", "sqlite3", "transitions", "pydantic", "asyncio"}
    assert {m for m in found if m.startswith("agentfsm.")} == {
        "agentfsm.agent", "agentfsm.agent.agent", "agentfsm.lazy_imports"
    }  # fmt: skip


def test_a_run_with_a_custom_model_loads_no_adapter():
    code = (
        "from agentfsm import Agent, Message, Reply\n"
        "class Model:\n"
        "    name = 'mine'\n"
        "    async def reply(self, request): return Reply(Message.assistant('hi'))\n"
        "assert Agent(Model()).run_sync('go').output == 'hi'\n"
    )
    found = loaded(code)
    assert not found & {"httpx", "graphviz", "click", "rich", "sqlite3", "agentfsm.models", "agentfsm.journal"}


# -- the names of the package -------------------------------------------------------------------------


def test_every_public_name_is_there_once():
    assert len(set(agentfsm.__all__)) == len(agentfsm.__all__)
    for name in agentfsm.__all__:
        assert getattr(agentfsm, name) is not None
    assert set(agentfsm.__all__) <= set(dir(agentfsm))
    everything: dict[str, object] = {}
    exec("from agentfsm import *", everything)
    assert set(agentfsm.__all__) <= set(everything)


def test_the_names_for_type_checkers_are_the_public_ones():
    named: set[str] = set()
    for node in tree("agentfsm").body:
        if isinstance(node, ast.If):
            named |= {alias.name for each in node.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert named == set(agentfsm.__all__)


def test_type_checkers_report_a_misspelt_name():
    """A ``__getattr__`` in sight of them would make every name one that is there."""
    hidden = [n for n in tree("agentfsm").body if isinstance(n, ast.If) and ast.unparse(n.test) == "not TYPE_CHECKING"]
    assigned = [ast.unparse(n.targets[0]) for each in hidden for n in each.body if isinstance(n, ast.Assign)]
    assert assigned == ["(__getattr__, __dir__)"]
    assert "__getattr__" not in {n.name for n in tree("agentfsm").body if isinstance(n, ast.FunctionDef)}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nobody'"):
        _ = agentfsm.Nobody


NEED_AN_EXTRA = {"cli", "integrations", "viewer"}


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) not in NEED_AN_EXTRA])
def test_every_name_in_all_exists(module):
    try:
        loaded = importlib.import_module(module)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert loaded.__doc__
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), name
