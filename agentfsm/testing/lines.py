"""The line of a source file in which each row of a table is written, for coverage viewers."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.coverage import Covered

__all__ = ["lcov", "row_lines"]


def row_lines(graph: Graph, module: ModuleType | None = None) -> dict[str, tuple[str, int]]:
    """For each row's id, the file and the line in which it stands; rows that are nowhere found are left out.

    Args:
        graph: The graph.
        module: The module that builds it, where it is known; the modules of its guards and the loop's own
            are looked through too.
    """
    names = dict.fromkeys(
        name for t in graph if t.guard is not None and (name := getattr(t.guard, "__module__", None)) is not None
    )
    modules = [module, *(sys.modules.get(name) for name in names), sys.modules.get("agentfsm.core.loop")]
    found: dict[str, tuple[str, int]] = {}
    for each in dict.fromkeys(m for m in modules if m is not None):
        for row, line in _rows(each):
            for transition in graph:
                if row(transition):
                    found.setdefault(transition.id, (str(each.__file__), line))
    return found


def _rows(module: ModuleType) -> Iterator[tuple[Any, int]]:
    """Every call in a module that writes down a row: a test for the row, and the line."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [_value(a, module) for a in node.args]
        named = {k.arg: _value(k.value, module) for k in node.keywords if k.arg}
        if _value(node.func, module) is Transition:
            yield _is_row(*(given[i] if i < len(given) else named.get(n) for i, n in enumerate(_FIELDS))), node.lineno
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "with_detector":
            state, guard = (given[i] if i < len(given) else named.get(n) for i, n in enumerate(("state", "detector")))
            yield _is_row(state, guard, None), node.lineno


_FIELDS = ("source", "guard", "target")
_UNKNOWN = object()


def _is_row(source: Any, guard: Any, target: Any) -> Any:
    def matches(row: Transition) -> bool:
        return row.source == source and row.guard is guard and (target is None or row.target == target)

    return matches


def _value(node: ast.expr, module: ModuleType) -> Any:
    """What a constant, a name or a dotted name stands for in a module."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(module, node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, module), node.attr, _UNKNOWN)
    return _UNKNOWN


def lcov(
    graph: Graph, covered: Covered, module: ModuleType | None = None, impossible: Collection[str] = frozenset()
) -> str:
    """Coverage as an LCOV tracefile: each row a line, each guard a branch that was true and one that was false.

    ``pytest --fsm-report=lcov`` writes one. ``genhtml --branch-coverage``, editors and coverage services show it
    at the table's own lines.

    Args:
        graph: The graph.
        covered: The counts.
        module: The module that builds it, where it is known.
        impossible: The ids of rows that no run can take: they are no lines to be covered.
    """
    lines = row_lines(graph, module)
    files: dict[str, list[tuple[int, Transition]]] = {}
    for row in graph:
        if row.id in lines and row.id not in impossible:
            file, line = lines[row.id]
            files.setdefault(file, []).append((line, row))
    counts = covered.rows
    text: list[str] = []
    for file, rows in sorted(files.items()):
        text += ["TN:agentfsm", f"SF:{file}"]
        branches = [(line, r) for line, r in sorted(rows, key=lambda each: each[0]) if r.guard is not None]
        for line, row in branches:
            asked = covered.true[row.id] + covered.false[row.id]
            for number, count in enumerate((covered.true[row.id], covered.false[row.id])):
                text.append(f"BRDA:{line},0,{number},{count if asked else '-'}")
        hit = sum(bool(c[row.id]) for _, row in branches for c in (covered.true, covered.false))
        text += [f"BRF:{2 * len(branches)}", f"BRH:{hit}"]
        taken: dict[int, int] = {}
        for line, row in rows:
            taken[line] = taken.get(line, 0) + counts.get(row.id, 0)
        text += [f"DA:{line},{count}" for line, count in sorted(taken.items())]
        text += [f"LF:{len(taken)}", f"LH:{sum(bool(n) for n in taken.values())}", "end_of_record"]
    return "\n".join(text) + "\n"
