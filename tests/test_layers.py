"""Imports run one way: machine, core, runtime, then the adapters; and what is not used is not loaded."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import subprocess
import sys

import pytest

import agentfsm
from tests.helpers.import_graph import imports, modules

MODULES = modules()
IMPORTS = imports()
OURS = [i for i in IMPORTS if i.imported.split(".")[0] == "agentfsm"]

LAYERS = {
    "errors": set(),
    "lazy_imports": set(),
    "machine": {"errors"},
    "loop": {"errors", "machine"},
    "runtime": {"errors", "machine", "loop"},
    "agent": {"errors", "machine", "loop", "runtime"},
    "agentfsm": {"lazy_imports"},
}
"""What each layer may load when it is imported, beside itself."""

FOR_ADAPTERS = {"errors", "lazy_imports", "machine", "loop", "runtime"}
FREE = {"__main__", "cli", "testing", "viewer"}
"""Where the parts are put together for somebody: these may import what they need."""

LATER = {
    ("agentfsm.machine.graph", "analysis"),
    ("agentfsm.machine.graph", "diagrams"),
    ("agentfsm.runtime.result", "diagrams"),
    ("agentfsm.runtime.run", "journal"),
    ("agentfsm.agent.agent", "diagrams"),
    ("agentfsm.agent.subagent", "journal"),
    ("agentfsm.agent.config", "journal"),
    ("agentfsm.agent.config", "models"),
    ("agentfsm.agent.resume", "journal"),
}
"""The doors to adapters: inside a function, opened when somebody asks for a proof, a picture, a journal or a
model by name."""

FOR_TYPES = {"agentfsm.agent": {"journal"}, "agentfsm.runtime": {"journal"}}
"""Who may name an adapter's types."""


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "agentfsm"


def crossings(when: str) -> list[tuple[str, str, str, str]]:
    """Importer, its layer, imported, its layer, for each import that leaves its layer."""
    found = [(i.importer, layer(i.importer), i.imported, layer(i.imported)) for i in OURS if i.when == when]
    return [c for c in found if c[1] != c[3]]


def test_the_sources_are_found():
    assert {"agentfsm", "agentfsm.agent", "agentfsm.machine.graph", "agentfsm.loop.reducer"} <= set(MODULES)
    assert len(OURS) > 100


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_imports_nothing_above_it(name):
    wrong = [(a, b) for a, own, b, other in crossings("now") if own == name and other not in LAYERS[name]]
    assert wrong == []


def test_adapters_never_import_each_other_or_the_agent():
    adapters = {layer(m) for m in MODULES} - set(LAYERS) - FREE
    assert {"models", "journal", "diagrams"} <= adapters
    wrong = [
        (a, b) for when in ("now", "later", "types") for a, own, b, other in crossings(when)
        if own in adapters and other not in FOR_ADAPTERS
    ]  # fmt: skip
    assert wrong == []


def test_nothing_imports_the_command_line():
    wrong = [
        (a, b)
        for when in ("now", "later", "types")
        for a, own, b, other in crossings(when)
        if other in ("cli", "viewer") and own != "__main__"
    ]
    assert wrong == []


def test_only_the_known_doors_lead_from_a_layer_to_an_adapter():
    opened = {(a, other) for a, own, _, other in crossings("later") if own in LAYERS and other not in FOR_ADAPTERS}
    assert opened <= LATER
    upward = [
        (a, b) for a, own, b, other in crossings("later") if other in FOR_ADAPTERS - LAYERS.get(own, FOR_ADAPTERS)
    ]
    assert upward == []


def test_types_are_named_downward_but_for_the_journals():
    for importer, own, imported, other in crossings("types"):
        if own in LAYERS and importer != "agentfsm" and other not in LAYERS[own]:
            allowed = FOR_TYPES.get(f"agentfsm.{own}", set())
            assert other in allowed, (importer, imported)


def test_no_module_imports_itself_in_a_circle():
    order = graphlib.TopologicalSorter({m: set() for m in MODULES})
    for i in OURS:
        if i.when == "now" and i.imported in MODULES:
            order.add(i.importer, i.imported)
    list(order.static_order())  # raises CycleError, which names the circle


# -- machine and core touch nothing -------------------------------------------------------------------

OUTSIDE = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "graphviz", "http", "httpx", "io", "logging",
    "mmap", "multiprocessing", "os", "pathlib", "platform", "queue", "random", "sched", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
    "urllib", "uuid",
}  # fmt: skip
PURE = [m for m in MODULES if layer(m) in ("machine", "loop")]


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_nothing_that_touches_the_world(module):
    found = {i.imported.split(".")[0] for i in IMPORTS if i.importer == module}
    assert found & OUTSIDE <= ({"random"} if module == "agentfsm.loop.policy" else set())
    third_party = found - set(sys.stdlib_module_names) - {"agentfsm"}
    assert third_party <= {"pydantic", "pydantic_core", "transitions"}


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_awaits_nothing_and_opens_nothing(module):
    for node in ast.walk(tree(module)):
        assert not isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)), (module, node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input", "exec", "eval"), (module, node.lineno)


def test_the_only_chance_in_the_core_has_a_seed():
    drawn = [
        node for node in ast.walk(tree("agentfsm.loop.policy"))
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


def test_importing_the_package_loads_next_to_nothing():
    found = loaded("import agentfsm")
    heavy = {"httpx", "graphviz", "click", "rich", "sqlite3", "transitions", "pydantic", "asyncio"}
    assert not found & heavy
    assert {m for m in found if m.startswith("agentfsm")} == {"agentfsm", "agentfsm.lazy_imports"}


def test_the_package_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "agentfsm", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert agentfsm.__version__ in done.stdout


def test_importing_the_agent_loads_no_adapter():
    found = loaded("from agentfsm import Agent")
    assert not found & {"httpx", "graphviz", "click", "rich", "sqlite3"}
    adapters = {layer(m) for m in MODULES} - set(LAYERS)
    assert {layer(m) for m in found if m.startswith("agentfsm.")} & adapters == set()


def test_a_run_with_a_model_of_ones_own_loads_no_adapter():
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


def test_type_checkers_see_that_a_misspelt_name_is_not_there():
    """A ``__getattr__`` in sight of them would make every name one that is there."""
    hidden = [n for n in tree("agentfsm").body if isinstance(n, ast.If) and ast.unparse(n.test) == "not TYPE_CHECKING"]
    assigned = [ast.unparse(n.targets[0]) for each in hidden for n in each.body if isinstance(n, ast.Assign)]
    assert assigned == ["(__getattr__, __dir__)"]
    assert "__getattr__" not in {n.name for n in tree("agentfsm").body if isinstance(n, ast.FunctionDef)}


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nobody'"):
        _ = agentfsm.Nobody


NEED_AN_EXTRA = {"cli", "integrations", "viewer"}


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) not in NEED_AN_EXTRA])
def test_what_a_module_says_it_offers_is_there(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), name
