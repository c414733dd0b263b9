"""Loading what a command line names: tools from a Python file, a graph from a module or by its fingerprint."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

if TYPE_CHECKING:
    from agentfsm.agent import Agent

_GRAPH_FORM = "MODULE:GRAPH; write agentfsm.loop.transition_table:LOOP, or my_graphs.py:GRAPH"
_OBJECT_FORM = "MODULE:NAME or FILE.py:NAME, such as shop:support"


def load_tools(path: str | Path) -> list[Callable[..., Any]]:
    """The tools of a Python file.

    These are the items of its list ``tools`` (or ``TOOLS``); without one, everything decorated with ``@tool``;
    without that, every public function that the file itself defines.
    """
    from agentfsm.runtime.tools import Tool  # not for the commands that run no tool

    module = _import_file(Path(path))
    listed: object = getattr(module, "tools", getattr(module, "TOOLS", None))
    if isinstance(listed, Iterable):
        tools = list(cast("Iterable[Callable[..., Any]]", listed))
    else:
        public = [value for name, value in vars(module).items() if not name.startswith("_")]
        tools = [value for value in public if isinstance(value, Tool)]
        tools = tools or [v for v in public if isfunction(v) and v.__module__ == module.__name__]
    if not tools:
        raise ConfigurationError(f"{path} defines no tool: define a function with type hints and a docstring")
    return tools


def load_graph(name: str) -> Graph:
    """The graph that ``MODULE:NAME`` or ``FILE.py:NAME`` names: a ``Graph``, or the ``graph`` of an object."""
    return load_graph_and_owner(name)[0]


def load_graph_and_owner(name: str) -> tuple[Graph, object]:
    """The graph that ``MODULE:NAME`` or ``FILE.py:NAME`` names, and the object with that name: an agent, a preset..."""
    module, value = _load(name, _GRAPH_FORM)
    is_class = isinstance(value, type)  # its attribute is what its objects have by default, and may be none of theirs
    graph = value if isinstance(value, Graph) or is_class else getattr(value, "graph", None)
    if not isinstance(graph, Graph):
        what = "class (name an object of it)" if is_class else type(value).__name__
        raise ConfigurationError(f"{name} is a {what}, not a graph{_available_graphs_hint(module)}")
    return graph, value


def load_object(name: str) -> object:
    """What ``MODULE:NAME`` or ``FILE.py:NAME`` names."""
    return _load(name, _OBJECT_FORM)[1]


def load_agent(name: str) -> Agent[Any, Any]:
    """The agent that ``MODULE:NAME`` or ``FILE.py:NAME`` names."""
    from agentfsm.agent import Agent  # only here: most commands load no agent

    value = load_object(name)
    if not isinstance(value, Agent):
        raise ConfigurationError(f"{name} is a {type(value).__name__}, not an agent")
    return value  # pyright: ignore[reportUnknownVariableType]


def _load(name: str, form: str) -> tuple[ModuleType, object]:
    """The module of ``MODULE:NAME``, and what it names there. A name of another form is refused with the right one."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise ConfigurationError(f"{name!r} is not of the form {form}")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigurationError(f"{source} has no {part!r}{_available_graphs_hint(module)}")
        value = getattr(value, part)
    return module, value


def _available_graphs_hint(module: ModuleType) -> str:
    graphs = [
        name
        for name, value in vars(module).items()
        if not isinstance(value, type) and isinstance(getattr(value, "graph", value), Graph)
    ]
    return f"; it has: {', '.join(sorted(graphs))}" if graphs else ""


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(f"there is no module {name!r} in this folder or installed") from None
        raise _user_code_error(name, error) from error
    except Exception as error:
        raise _user_code_error(name, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {str(path)!r}")
    name = f"agentfsm_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(path)!r} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import modules next to it, now and when a tool runs
    sys.modules[name] = module  # type hints are resolved through it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _user_code_error(str(path), error) from error
    return module


def _user_code_error(name: str, error: Exception) -> ConfigurationError:
    """The error for user code that raised, with the outermost line of that code."""
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    line = error.lineno if isinstance(error, SyntaxError) else frames[0].lineno if frames else None
    location = f"{name}, line {line}" if line else name
    return ConfigurationError(f"{location}: {type(error).__name__}: {error}")
