"""The import graph of the package, read from the source with ``ast``: immediate, lazy and type-only imports."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PACKAGE", "Import", "imports", "modules", "tree_of"]

PACKAGE = Path(__file__).parents[2] / "agentfsm"


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        importer: The module in which it stands (``agentfsm.loop.reducer``).
        imported: The module that it names; for ``from a import b`` with a module ``a.b``, that one.
        when: ``now`` (at import), ``later`` (inside a function) or ``types`` (under ``TYPE_CHECKING``).
    """

    importer: str
    imported: str
    when: str


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module. It is parsed for the first test that reads it, not while tests are collected."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports() -> list[Import]:
    """Every import of every module of the package."""
    known = modules()
    return [
        Import(name, target, when)
        for name, path in known.items()
        for target, when in _imports_of(tree_of(path), name, path, known)
    ]


def _imports_of(tree: ast.AST, name: str, path: Path, known: dict[str, Path]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                found.append((deeper if deeper in known else base, when))
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                walk(child, "types")
            for child in node.orelse:
                walk(child, when)
        else:
            inner = "later" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else when
            for part in ast.iter_child_nodes(node):
                walk(part, inner if when == "now" else when)

    walk(tree, "now")
    return found
