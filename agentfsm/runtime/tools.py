"""Tools: the ``@tool`` decorator, ``Tool``, and the built-in control tools ask_user, return_done and return_unable."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, overload

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from agentfsm.errors import ToolDefinitionError
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.messages import ToolResult, Usage
from agentfsm.loop.model import ToolSpec
from agentfsm.loop.state import CallState, RunState, SuspendedSubRun
from agentfsm.runtime.host import Host
from agentfsm.runtime.tool_schema import describe_function

__all__ = [
    "ApprovalRequirement",
    "BudgetShare",
    "Delegation",
    "Tool",
    "ToolContext",
    "as_tool",
    "control_tools",
    "describe_validation_error",
    "problems",
    "secret_arguments",
    "tool",
    "tools_by_name",
]


ApprovalRequirement = bool | Callable[[Mapping[str, Any]], bool]
"""Whether a call needs a person's leave: always, never, or by its (validated) arguments."""

UI_MESSAGE = "_ui_message"
"""An argument that a model may add to any call: words for the user, which the tool only gets if it declares them."""

_TOOL_NAME = re.compile(r"\A[A-Za-z0-9_-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know of the call that it answers; declare it as the first parameter to get it.

    Attributes:
        run_id: The run.
        session_id: The conversation, where the caller has one.
        call_id: The wire's id of the call.
        idempotency_key: The same for every attempt at this call, and for no other call.
        attempt: Which attempt this is, from 1.
    """

    run_id: str
    session_id: str
    call_id: str
    idempotency_key: str
    attempt: int


class Delegation(Protocol):
    """One call that another run answers: a sub-agent's."""

    @property
    def run_id(self) -> str:
        """The run that works on it, or an empty string while there is none."""
        ...

    @property
    def usage(self) -> Usage:
        """What that run has used up since this call of it began."""
        ...

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The call's result; or the run that works on it, where that waits for a person.

        Raises:
            agentfsm.errors.ToolError: The run did not finish its task.
        """
        ...


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """What a sub-agent may have of a budget that is left.

    Attributes:
        shared_by: How many sub-agents begin together; each has an equal part.
        uncharged: What other calls of the batch have used up that the run has not been charged for yet.
    """

    shared_by: int = 1
    uncharged: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. Made by ``tool`` or ``as_tool``.

    Attributes:
        spec: What the model is told.
        function: What runs.
        adapter: Checks the arguments.
        takes_context: Whether the first parameter is a ``ToolContext``.
        timeout: Seconds for one call, or None for the guardrails' ``tool_timeout_s``.
        idempotent: Whether running it twice with one idempotency key does what running it once does.
        retryable: Whether a failed call may be run again as it stands, if it is idempotent too.
        requires_approval: Whether a person must allow a call.
        ends_run: Whether a successful call ends the run, its result being the output.
        parallel: Whether calls may run together with others that may.
        control: For the loop's own tools: ``ask``, ``done`` or ``unable``.
        secret: Names of arguments that no journal may hold.
        delegate: For a sub-agent: hands a call over, given the run, the call, which attempt it is, and its share.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    adapter: TypeAdapter[Any]
    takes_context: bool = False
    timeout: float | None = None
    idempotent: bool = False
    retryable: bool = False
    requires_approval: ApprovalRequirement = False
    ends_run: bool = False
    parallel: bool = False
    control: str | None = None
    is_async: bool = field(default=False)
    secret: frozenset[str] = frozenset()
    delegate: Callable[[RunState, Host, CallState, int, BudgetShare], Delegation] | None = None

    def __post_init__(self) -> None:
        rule: object = self.requires_approval
        if inspect.iscoroutinefunction(rule) or not (isinstance(rule, bool) or callable(rule)):
            raise ToolDefinitionError(
                f"tool {self.name!r}: requires_approval must be True, False or a plain function of the arguments "
                "(a hook at dispatch_tool may be async)"
            )

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.spec.name

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for ``function``, checked and converted.

        Raises:
            pydantic.ValidationError: They do not fit; the error names each bad field.
        """
        if UI_MESSAGE in given and UI_MESSAGE not in self.spec.parameters.get("properties", ()):
            given = {k: v for k, v in given.items() if k != UI_MESSAGE}
        try:
            # As JSON, which is what arguments are: strict types take it, and a tool that changes what it was
            # given changes no transcript.
            checked: object = self.adapter.validator.validate_json(to_json(given))
        except PydanticSerializationError:
            checked = self.adapter.validator.validate_python(dict(given))
        return vars(checked)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been made a tool."""
        return self.function(*args, **kwargs)


def problems(error: ValidationError) -> list[str]:
    """Each bad field and what is wrong with it."""
    return [
        f"{'.'.join(str(part) for part in e['loc']) or 'arguments'}: {e['msg'][:1].lower()}{e['msg'][1:]}"
        for e in error.errors(include_url=False, include_input=False)
    ]


def describe_validation_error(error: Exception) -> str:
    """Why a value is none of its type: each bad field, or what a validator of the type's raised."""
    return "; ".join(problems(error)) if isinstance(error, ValidationError) else describe_exception(error)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
    retryable: bool = False,
    requires_approval: ApprovalRequirement = False,
    ends_run: bool = False,
    parallel: bool = False,
    secret: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
    retryable: bool = False,
    requires_approval: ApprovalRequirement = False,
    ends_run: bool = False,
    parallel: bool = False,
    secret: Iterable[str] = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool, as ``@tool`` or ``@tool(...)``.

    Args:
        function: Plain (it then runs in a thread) or async; what a generator yields is its result, as a list.
        name: The tool's name; the function's by default.
        timeout: Seconds for one call.
        idempotent: Whether running it twice with one idempotency key does what running it once does.
        retryable: Whether a failed call may be run again as it stands (idempotent tools only).
        requires_approval: True, or a function of the arguments: whether a person must allow the call.
        ends_run: Whether a successful call ends the run with its result as the output.
        parallel: Whether calls may run together with others that may.
        secret: Names of arguments that no journal may hold; those of type ``SecretStr`` are secret anyway.
            A run that must be taken up by another process asks a person for them again.

    Raises:
        ToolDefinitionError: The function cannot be described to a model.
    """

    def decorate(function: Callable[..., Any]) -> Tool:
        made = as_tool(function, name=name)
        if timeout is not None and not timeout > 0:
            raise ToolDefinitionError(f"tool {made.name!r}: timeout must be more than 0 seconds, not {timeout}")
        if retryable and not idempotent:
            raise ToolDefinitionError(f"tool {made.name!r}: only an idempotent tool can be retryable")
        withheld = frozenset(secret)
        if unknown := withheld - made.spec.parameters.get("properties", {}).keys():
            raise ToolDefinitionError(f"tool {made.name!r}: it has no argument {', '.join(sorted(unknown))}")
        return dataclasses.replace(
            made,
            secret=made.secret | withheld,
            timeout=timeout,
            idempotent=idempotent,
            retryable=retryable,
            requires_approval=requires_approval,
            ends_run=ends_run,
            parallel=parallel,
        )

    return decorate if function is None else decorate(function)


def as_tool(function: Callable[..., Any], *, name: str | None = None, control: str | None = None) -> Tool:
    """A tool from a plain function (one that is a tool already stays as it is).

    Raises:
        ToolDefinitionError: The function cannot be described to a model; the message says why.
    """
    if isinstance(function, Tool):
        return function
    if not callable(function):
        raise ToolDefinitionError(f"a tool must be a function, not {type(function).__name__}")
    label = str(getattr(function, "__name__", "")) if name is None else name
    if not _TOOL_NAME.match(label):
        raise ToolDefinitionError(f"{label!r} is no name for a tool: letters, digits, '_' and '-', 64 at most")
    found = describe_function(function, label, ToolContext)
    return Tool(
        ToolSpec(label, found.summary, found.schema),
        function,
        found.adapter,
        found.takes_context,
        control=control,
        is_async=inspect.iscoroutinefunction(function),
        secret=found.secret,
    )


def tools_by_name(tools: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        ToolDefinitionError: Two tools have one name, or a function cannot be described.
    """
    found: dict[str, Tool] = {}
    for function in tools:
        each = as_tool(function)
        if each.name in found:
            raise ToolDefinitionError(f"two tools are named {each.name!r}")
        found[each.name] = each
    return found


def secret_arguments(tools: Mapping[str, Tool]) -> dict[str, frozenset[str]]:
    """The names of the secret arguments of each tool that has any, by the tool's name."""
    return {t.name: t.secret for t in tools.values() if t.secret}


def ask_user(question: str, context: str = "", choices: list[str] | None = None) -> dict[str, Any]:
    """Ask the user something that you need to know in order to go on. The answer is this call's result.

    Args:
        question: One clear question.
        context: Why you ask.
        choices: Answers to choose from, if there are only a few.
    """
    return {"question": question, "context": context, "choices": choices or []}


def return_done(output: str) -> Any:
    """Finish: the task is done.

    Args:
        output: The result, as the user should see it.
    """
    return output


def return_unable(
    rationale: str, blockers: list[str] | None = None, suggested_next_steps: list[str] | None = None
) -> dict[str, Any]:
    """Give up: the task cannot be done here. This is a good answer when it is true.

    Args:
        rationale: Why it cannot be done.
        blockers: What concretely stands in the way.
        suggested_next_steps: What a person could do about it.
    """
    return {
        "rationale": rationale,
        "blockers": blockers or [],
        "suggested_next_steps": suggested_next_steps or [],
    }


def control_tools(output_type: Any = None) -> Mapping[str, Tool]:
    """The three control tools by name; with an output type, ``return_done`` takes a value of it."""
    if output_type is None:
        return _default_control_tools()

    def typed_done(output: Any) -> Any:
        return output

    typed_done.__doc__ = return_done.__doc__
    typed_done.__annotations__["output"] = output_type
    return {**_default_control_tools(), "return_done": as_tool(typed_done, name="return_done", control="done")}


@cache
def _default_control_tools() -> Mapping[str, Tool]:
    """Made once: a schema takes milliseconds, and an agent may be made for each request of a server."""
    tools = (
        as_tool(ask_user, control="ask"),
        as_tool(return_done, control="done"),
        as_tool(return_unable, control="unable"),
    )
    return MappingProxyType({t.name: t for t in tools})
