"""User code: the tools of a file, the graph that a name means, and errors of broken code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentfsm import LOOP, ConfigurationError
from agentfsm.cli.user_code import load_graph, load_object, load_tools
from agentfsm.loop.presets import STRICT


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)


def names(code: str) -> list[str]:
    Path("tools.py").write_text(code)
    return [getattr(each, "name", None) or each.__name__ for each in load_tools("tools.py")]


def test_public_functions_of_a_file_are_its_tools() -> None:
    assert names(
        "from math import sqrt\nfrom os.path import join\ndef a(): ...\ndef _b(): ...\nasync def c(): ..."
    ) == [
        "a",
        "c",
    ]


def test_decorated_functions_exclude_the_others() -> None:
    assert names("from agentfsm import tool\n@tool\ndef a(): ...\ndef helper(): ...") == ["a"]


def test_a_list_named_tools_takes_precedence() -> None:
    assert names("def a(): ...\ndef b(): ...\ntools = [b]") == ["b"]
    assert names("def a(): ...\ndef b(): ...\nTOOLS = (a,)") == ["a"]


def test_a_tool_can_import_modules_next_to_it() -> None:
    Path("deep").mkdir()
    Path("deep/neighbour.py").write_text("ONE = 1")
    Path("deep/late.py").write_text("TWO = 2")
    Path("deep/tools.py").write_text(
        "from neighbour import ONE\ndef a() -> int:\n    from late import TWO\n    return ONE + TWO"
    )
    assert load_tools("deep/tools.py")[0]() == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "tools.py defines no tool"),
        ("def a(:", "tools.py, line 1: SyntaxError"),
        ("x = 1\n\nraise ValueError('no luck')", "tools.py, line 3: ValueError: no luck"),
        ("import no_such_module", "tools.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_an_error_in_user_code_names_file_and_line(code: str, message: str) -> None:
    Path("tools.py").write_text(code)
    with pytest.raises(ConfigurationError) as caught:
        load_tools("tools.py")
    assert message in str(caught.value)


@pytest.mark.parametrize("path", ["none.py", "."])
def test_a_missing_file_is_reported(path: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        load_tools(path)


def test_a_file_that_is_not_python_is_refused() -> None:
    Path("tools.txt").write_text("def a(): ...")
    with pytest.raises(ConfigurationError, match=r"must end in \.py"):
        load_tools("tools.txt")


# -- graphs -----------------------------------------------------------------------------------------------


def test_a_graph_is_loaded_from_a_module_a_file_or_its_owner() -> None:
    Path("mine.py").write_text("from agentfsm import LOOP as MINE\nclass Holder:\n    inner = MINE")
    assert load_graph("agentfsm.loop.transition_table:LOOP") is LOOP
    assert load_graph("agentfsm.loop.presets:STRICT") is STRICT.graph
    assert load_graph("mine:MINE") is LOOP
    assert load_graph("mine.py:MINE") is LOOP
    assert load_graph("mine.py:Holder.inner") is LOOP


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LOOP", "not of the form MODULE:GRAPH"),
        (":LOOP", "not of the form MODULE:GRAPH"),
        ("agentfsm:", "not of the form MODULE:GRAPH"),
        ("no_such.module:G", "no module 'no_such.module'"),
        ("agentfsm.loop.transition_table:POOL", "has no 'POOL'; it has: LOOP"),
        ("agentfsm.loop.transition_table:State", "not a graph; it has: LOOP"),
        ("own.py:Own", "own.py:Own is a class (name an object of it), not a graph; it has: OWN"),
        ("agentfsm:Preset", "agentfsm:Preset is a class (name an object of it), not a graph"),
        ("broken.py:G", "broken.py, line 2: GraphError: a.never"),
        ("needs:G", "No module named 'no_such_module'"),
    ],
)
def test_something_that_is_not_a_graph_is_refused(name: str, message: str) -> None:
    Path("broken.py").write_text(
        "from agentfsm import Graph, StateSpec, Transition\n"
        "G = Graph((StateSpec('a'), StateSpec('b', final=True)), (Transition('a', 'never', 'b'),))"
    )
    Path("needs.py").write_text("import no_such_module")
    Path("own.py").write_text(
        "from agentfsm import Preset\nclass Own(Preset):\n    'Ours.'\nOWN = Own('own', graph=Preset('x').graph)"
    )
    with pytest.raises(ConfigurationError) as caught:
        load_graph(name)
    assert message in str(caught.value)


def test_an_error_in_a_module_is_reported_with_the_line_of_the_module() -> None:
    Path("broken_module.py").write_text("x = 1\n\nraise ValueError('no luck')")
    with pytest.raises(ConfigurationError, match=r"^broken_module, line 3: ValueError: no luck$"):
        load_object("broken_module:agent")


@pytest.mark.parametrize("name", ["shop", ":agent", "shop:"])
def test_what_names_no_object_is_refused_with_the_form_of_a_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"not of the form MODULE:NAME or FILE\.py:NAME, such as"):
        load_object(name)
