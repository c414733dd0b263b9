"""Importing the user's code that a command names: tools from a file, a graph from a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph
from agentfsm.runtime.tools import Tool

__all__ = ["load_graph", "load_graph_and_owner", "load_tools"]


def load_tools(path: str | Path) -> list[Callable[..., Any]]:
    """The tools of a Python file.

    They are what its list ``tools`` (or ``TOOLS``) holds; without one, everything made with ``@tool``; without
    any of that, every public function that the file itself defines.

    Raises:
        ConfigurationError: The file cannot be read, raises, or holds no tool.
    """
    module = _import_file(Path(path))
    listed: object = getattr(module, "tools", getattr(module, "TOOLS", None))
    if isinstance(listed, Iterable):
        found = list(cast("Iterable[Callable[..., Any]]", listed))
    else:
        public = [value for name, value in vars(module).items() if not name.startswith("_")]
        found = [value for value in public if isinstance(value, Tool)]
        found = found or [v for v in public if isfunction(v) and v.__module__ == module.__name__]
    if not found:
        raise ConfigurationError(f"{path} holds no tool: define a function with type hints and a docstring")
    return found


def load_graph(name: str) -> Graph:
    """The graph that ``MODULE:NAME`` or ``FILE.py:NAME`` means: a ``Graph``, or something that has one.

    Raises:
        ConfigurationError: There is no such module or name, it raises, or it is no graph.
    """
    return load_graph_and_owner(name)[0]


def load_graph_and_owner(name: str) -> tuple[Graph, object]:
    """The graph that ``MODULE:NAME`` or ``FILE.py:NAME`` means, and what it is the graph of: a preset, an agent...

    Raises:
        ConfigurationError: There is no such module or name, it raises, or it is no graph.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigurationError(f"{name!r} is no MODULE:GRAPH; write agentfsm.loop.table:LOOP, or my_graphs.py:GRAPH")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigurationError(f"{where} has no {part!r}{_available_graphs_hint(module)}")
        value = getattr(value, part)
    graph = value if isinstance(value, Graph) else getattr(value, "graph", None)
    if not isinstance(graph, Graph):
        raise ConfigurationError(f"{name} is a {type(value).__name__}, no graph{_available_graphs_hint(module)}")
    return graph, value


def _available_graphs_hint(module: ModuleType) -> str:
    graphs = [
        n for n, v in vars(module).items() if isinstance(v, Graph) or isinstance(getattr(v, "graph", None), Graph)
    ]
    return f"; there is: {', '.join(sorted(graphs))}" if graphs else ""


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(f"there is no module {name!r} here or among the installed ones") from None
        raise _user_code_error(name, error) from error
    except Exception as error:
        raise _user_code_error(name, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {str(path)!r}")
    name = f"agentfsm_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(path)!r} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import its neighbours, then and when a tool runs
    sys.modules[name] = module  # type hints are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _user_code_error(str(path), error) from error
    return module


def _user_code_error(name: str, error: Exception) -> ConfigurationError:
    """The error of a user's file that raised, with its line: the outermost one that is not the import itself."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"]
    line = error.lineno if isinstance(error, SyntaxError) else frames[0].lineno if frames else None
    where = f"{name}, line {line}" if line else name
    return ConfigurationError(f"{where}: {type(error).__name__}: {error}")
