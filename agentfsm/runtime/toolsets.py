"""Toolsets: tools that depend on the context of a run, chosen once when the run starts, and again when it continues."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, cast, runtime_checkable

from typing_extensions import TypeIs, TypeVar

from agentfsm.errors import ConfigurationError, ToolDefinitionError
from agentfsm.loop.read_only import code_name
from agentfsm.runtime.run_context import AgentDeps, RunContext
from agentfsm.runtime.tools import Tool, as_tool, tools_by_name

ContextDeps = TypeVar("ContextDeps", default=Any, contravariant=True)
"""The type of the dependencies that a toolset needs."""


@runtime_checkable
class Toolset(Protocol[ContextDeps]):
    """Tools that depend on what a run was given: anything that has this method."""

    def get_tools(
        self, context: RunContext[ContextDeps]
    ) -> Iterable[Callable[..., Any]] | Awaitable[Iterable[Callable[..., Any]]]:
        """The tools of one run: functions, or what ``@tool`` and ``Tool.from_schema`` make. Plain or async.

        It is called once when the run starts, before anything is written, and once whenever the run continues in
        another process or after a wait.

        Args:
            context: What the run was given.
        """
        ...


@dataclass(frozen=True, init=False)
class FilteredToolset(Generic[ContextDeps]):
    """Tools of which a run has those that are meant for it.

    All of them are known before any run starts: proofs, paths and ``agentfsm check`` count with each of them.

    Attributes:
        tools: The tools.
        keep: Whether a run has a tool: a function of its ``RunContext`` and the ``Tool``, plain or async.

    Raises:
        ToolDefinitionError: A tool cannot be described to a model, or two have the same name.
        ConfigurationError: ``keep`` is not a function.
    """

    tools: tuple[Tool, ...]
    keep: Callable[[RunContext[ContextDeps], Tool], bool | Awaitable[bool]]

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]],
        keep: Callable[[RunContext[ContextDeps], Tool], bool | Awaitable[bool]],
    ) -> None:
        if not callable(keep):
            raise ConfigurationError(f"keep must be a function of the context and the tool, not {keep!r}")
        object.__setattr__(self, "tools", tuple(tools_by_name(tools).values()))
        object.__setattr__(self, "keep", keep)

    async def get_tools(self, context: RunContext[ContextDeps]) -> list[Tool]:
        """Those of its tools that a run has.

        Args:
            context: What the run was given.
        """
        kept: list[Tool] = []
        for each in self.tools:
            answer = self.keep(context, each)
            if await answer if inspect.isawaitable(answer) else answer:
                kept.append(each)
        return kept


@dataclass(frozen=True)
class _FunctionToolset:
    """What ``tools=`` has as a function of the context."""

    function: Callable[[RunContext[Any]], Any]

    def get_tools(self, context: RunContext[Any]) -> Any:
        return self.function(context)


AgentTools = (
    Iterable[Callable[..., Any] | Toolset[Any]]
    | Toolset[Any]
    | Callable[[RunContext[AgentDeps]], Iterable[Callable[..., Any]] | Awaitable[Iterable[Callable[..., Any]]]]
)
"""What an agent takes as its tools."""


def _is_toolset(value: object) -> TypeIs[Toolset[Any]]:
    return isinstance(value, Toolset)


def split_tools(given: Any) -> tuple[list[Callable[..., Any]], tuple[Toolset[Any], ...]]:
    """What an agent's ``tools`` are: tools that every run has, and toolsets.

    Raises:
        ToolDefinitionError: A toolset is given as a class.
    """
    if _is_toolset(given):
        given = [given]
    elif not isinstance(given, Iterable):
        given = [_FunctionToolset(given)]
    plain: list[Callable[..., Any]] = []
    toolsets: list[Toolset[Any]] = []
    for each in cast("Iterable[Any]", given):
        if not _is_toolset(each):
            plain.append(each)
        elif isinstance(each, type):
            raise ToolDefinitionError(
                f"{each.__name__} is a class: give a toolset of it, as in tools=[{each.__name__}()]"
            )
        else:
            toolsets.append(each)
    return plain, tuple(toolsets)


def takes_run_context(function: object) -> bool:
    """Whether a function may be one of the context: it takes one argument, which is not declared as something else."""
    if not callable(function) or isinstance(function, Tool):
        return False
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in function
        return False
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if len(required) != 1 or required[0].kind is required[0].KEYWORD_ONLY:
        return False
    return required[0].annotation is required[0].empty or "RunContext" in str(required[0].annotation)


def is_open(toolset: Toolset[Any]) -> bool:
    """Whether it is known only when a run starts which tools a toolset may have."""
    return not isinstance(toolset, FilteredToolset)


def declared_tools(toolsets: Iterable[Toolset[Any]]) -> list[Tool]:
    """The tools of toolsets that are known before any run starts."""
    return [tool for each in toolsets if isinstance(each, FilteredToolset) for tool in each.tools]


def chooser_of(toolset: Toolset[Any]) -> Callable[..., Any]:
    """The code that chooses: the function that stands for the toolset, or its class."""
    return toolset.function if isinstance(toolset, _FunctionToolset) else type(toolset)


def toolset_name(toolset: Toolset[Any]) -> str:
    """What errors and reports call a toolset."""
    return code_name(toolset.function) if isinstance(toolset, _FunctionToolset) else type(toolset).__name__


def choose_tools(toolset: Toolset[Any], returned: Any) -> list[Tool]:
    """What a toolset returned, as tools.

    Raises:
        ToolDefinitionError: It is not a list of tools, or one of them cannot be described to a model, or is for the
            list ``tools`` alone, as ``ask_user`` is.
    """
    name = toolset_name(toolset)
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Iterable):
        raise ToolDefinitionError(
            f"{name} returned {type(returned).__name__}, and not a list of tools (a tool itself stands in a list: "
            "tools=[look])"
        )
    tools = [as_tool(each) for each in cast("Sequence[Any]", returned)]
    if control := [each.name for each in tools if each.control is not None]:
        raise ToolDefinitionError(f"{name} returned {', '.join(control)}, which is given to an agent in tools=[...]")
    return tools
