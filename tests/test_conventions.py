"""The size and naming rules of the package, read from its source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.import_graph import PACKAGE, tree_of

FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_MODULES = 305
MAX_FUNCTION_LINES = 70
MAX_METHODS = 20
MAX_PARAMETERS = 9
MANY_PARAMETERS = {"agent/agent.py:Agent.__init__", "runtime/tools.py:Tool.from_schema", "runtime/tools.py:tool"}

FORMER_MODULES = words(
    """
    follow fold batch answers rules withheld wording encoding codec asking calls dispatch gates telling described
    control ending errand logs replies assembly going_on left_behind lending scribe keeper course chain
    fields loose moment names forks audit restore sqlite_file sqlite_rows folding framing exchange clients faults
    inflate pictures written wrapping anthropic_turns chat_messages wire facts known loop_counters laps longest
    loops product search doors heights ways wiring routing uml quoting batches plan slots compose contest covers
    forced lines pathfinder playing stage scripts witness witnesses mcp_link mcp_connect otel_content otel_span
    keeping fitting telling pinned standin unfinished watch screen picture loading
    """
)

FORMER_CLASSES = words(
    """
    Held Waiting PersonReply Rules Checked Replied CallFailed Read Ran Parked Judged Recovered Answered Noted
    Errand Parts Keeper StoreKeeper Beginning TakenUp Resumable Entry Scribe Hider Missing Secrets Past Chain
    Course BadError CannotError Asked Names Holder Lender UsedRecords UsedInProcess UsedInFolder Is
    Letters Assembly Folding Caller InFront Exchange Clients Units Items Written Turns Pulse Piece Facts Known
    Laps Lap Searcher Dead Product Doors Heights Net Pin Way Contest Clash Walk Stage Show Playing Played Moment
    Said Witness Examples Cell Slot Plan Story Person StandIn Watcher AgentError Share
    """
)

FORMER_FUNCTIONS = words(
    """
    close_batch take_result unanswered follow apply choose learn so_far excuse to_the_end whatever_comes intend
    tried moved refuse_what_moves_nothing beginning ask_gates ask_hooks told unfit each_of_its_kind told_first
    said_before every_tool keep_in_store fitting made_of store_of taken_up left_behind go_on loose wipe
    as_it_stands still_open taken kept reveal stand_in is_withheld works_for_another elsewhere found admitted
    pieces mended hopeless seen shown_by at_home blank ended tell settle exactly contests hold parts_of bench
    short workshop see_through watch_through say_how_to_go_on recover
    """
)
"""What NAMES of the first version became standard terms; none of these may come back."""

ROW_FUNCTIONS = {"loop/guards.py", "loop/detectors.py"}
"""Functions there are named after the rows of the table."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def test_there_are_few_modules_and_each_name_is_used_once():
    assert 100 < len(FILES) <= MAX_MODULES
    counts = Counter(path.name for path in FILES if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_and_classes_stay_small(path: Path):
    long, wide = [], []
    for name, function in functions(tree_of(path)):
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES:
            long.append(name)
        arguments = function.args
        given = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len([a for a in given if a not in ("self", "cls")]) > MAX_PARAMETERS:
            wide.append(f"{name_of(path)}:{name}")
    crowded = [
        node.name
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and sum(isinstance(n, Function) for n in node.body) > MAX_METHODS
    ]
    assert (long, crowded, set(wide) - MANY_PARAMETERS) == ([], [], set())


def test_no_two_modules_export_a_class_of_the_same_name():
    exported = Counter(
        node.name for path in FILES for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )  # fmt: skip
    assert [name for name, count in exported.items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_former_name_is_left(path: Path):
    assert path.stem not in FORMER_MODULES
    classes = {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
    assert classes & FORMER_CLASSES == set()
    if name_of(path) not in ROW_FUNCTIONS:
        public = {name.rsplit(".", 1)[-1] for name, _ in functions(tree_of(path))}
        assert public & FORMER_FUNCTIONS == set()


def test_every_module_says_what_it_is_for():
    assert [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


PUBLIC_MODULES = words(
    """
    workers/restate_waker.py testing/invariants.py testing/strategies.py testing/model_conformance.py
    testing/store_conformance.py
    """
)
"""Modules with public names that are no packages; docs/stability.md lists them."""

WITH_NAMES_OF_OTHERS = words("machine/graph.py journal/store.py")
"""Modules that export types of a neighbor for everybody who uses theirs."""


def assigned(path: Path) -> set[str]:
    targets = [target for node in tree_of(path).body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_only_public_packages_list_what_they_export():
    listing = {name_of(path) for path in FILES if path.name != "__init__.py" and "__all__" in assigned(path)}
    assert listing == PUBLIC_MODULES | WITH_NAMES_OF_OTHERS


def test_the_adapter_of_the_engine_stays_under_300_lines():
    assert len((PACKAGE / "workers" / "dbos_waker.py").read_text(encoding="utf-8").splitlines()) < 300


def test_a_file_of_tests_says_itself_which_of_them_are_slow():
    """``make slow`` imports only the files that say so."""
    own = Path(__file__).parent
    marked = {
        str(f.relative_to(own))
        for f in own.rglob("*.py")
        if re.search(r"mark\.(slow|soak|servers)\b", f.read_text("utf-8"))
    }
    assert {f for f in marked if not Path(f).name.startswith("test_")} == {"conftest.py"}  # which leaves out the others
