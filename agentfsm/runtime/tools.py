"""Tools from plain functions: type hints and docstring become the schema, pydantic checks the arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args, get_type_hints, overload

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, to_json

from agentfsm.core.messages import ToolResult, Usage
from agentfsm.core.model import ToolSpec
from agentfsm.core.state import CallState, Held
from agentfsm.errors import ToolDefinitionError

if TYPE_CHECKING:
    from agentfsm.runtime.context import Context

__all__ = ["Approval", "Delegation", "Tool", "ToolContext", "as_tool", "registry", "tool"]

Approval = bool | Callable[[Mapping[str, Any]], bool]
"""Whether a call needs a person's leave: always, never, or by its (validated) arguments."""

UI_MESSAGE = "_ui_message"
"""An argument that a model may add to any call: words for the user, which the tool only gets if it declares them."""

_NAME = re.compile(r"\A[A-Za-z0-9_-]{1,64}\Z")


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

    async def answer(self, arguments: Mapping[str, Any]) -> ToolResult | Held:
        """The call's result; or the run that works on it, where that waits for a person.

        Raises:
            agentfsm.errors.ToolError: The run did not finish its task.
        """
        ...


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
        delegate: For a sub-agent: hands a call over, given the run, the call and which attempt it is.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    adapter: TypeAdapter[Any]
    takes_context: bool = False
    timeout: float | None = None
    idempotent: bool = False
    retryable: bool = False
    requires_approval: Approval = False
    ends_run: bool = False
    parallel: bool = False
    control: str | None = None
    is_async: bool = field(default=False)
    secret: frozenset[str] = frozenset()
    delegate: Callable[[Context, CallState, int], Delegation] | None = None

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


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
    retryable: bool = False,
    requires_approval: Approval = False,
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
    requires_approval: Approval = False,
    ends_run: bool = False,
    parallel: bool = False,
    secret: Iterable[str] = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool, as ``@tool`` or ``@tool(...)``.

    Args:
        function: Plain (it then runs in a thread) or async.
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

    def make(function: Callable[..., Any]) -> Tool:
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

    return make if function is None else make(function)


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
    if not _NAME.match(label):
        raise ToolDefinitionError(f"{label!r} is no name for a tool: letters, digits, '_' and '-', 64 at most")
    summary, described = _docstring(function)
    takes_context, fields = _fields(function, label, described)
    from pydantic.dataclasses import dataclass as validated  # slow to import, and only needed here

    try:
        made = dataclasses.make_dataclass(label.replace("-", "_"), fields, kw_only=True)
        adapter: TypeAdapter[Any] = TypeAdapter(validated(made, config=ConfigDict(extra="forbid")))
        schema = adapter.json_schema(schema_generator=_Schema)
    except (pydantic.errors.PydanticUserError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ToolDefinitionError(f"tool {label!r} cannot be described as JSON: {text}") from error
    schema.pop("title", None)
    for prop in cast("dict[str, dict[str, Any]]", schema.get("properties", {})).values():
        prop.pop("title", None)
    return Tool(
        ToolSpec(label, summary, schema),
        function,
        adapter,
        takes_context,
        control=control,
        is_async=inspect.iscoroutinefunction(function),
        secret=frozenset(name for name, hint, _ in fields if "SecretStr" in str(hint)),
    )


class _Schema(GenerateJsonSchema):
    """A default that is no JSON (a sentinel) is left out of the schema, and there is no more to say about it."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters' type hints; that of the result is not read, so it may be there for type checkers alone."""

    def stub() -> None: ...

    source = function if hasattr(function, "__annotations__") else type(function).__call__
    stub.__annotations__ = {k: v for k, v in inspect.get_annotations(source).items() if k != "return"}
    names = getattr(inspect.unwrap(source), "__globals__", {})
    return get_type_hints(stub, globalns=names, include_extras=True)


def _fields(function: Callable[..., Any], label: str, described: Mapping[str, str]) -> tuple[bool, list[Any]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = _parameter_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise ToolDefinitionError(f"tool {label!r}: its signature cannot be read: {error}") from error
    takes_context = bool(parameters) and hints.get(parameters[0].name) is ToolContext
    fields: list[Any] = []
    for parameter in parameters[1:] if takes_context else parameters:
        where = f"tool {label!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"{where}: a model passes arguments by name, so it must be an ordinary one")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"{where}: it needs a type hint")
        hint = hints[parameter.name]
        if hint is ToolContext or ToolContext in get_args(hint):
            raise ToolDefinitionError(f"{where}: a ToolContext must be the first parameter, and just that")
        default = ... if parameter.default is parameter.empty else parameter.default
        words = described.get(parameter.name)  # None would hide what Annotated[..., Field(description=...)] says
        info: Any = Field(default) if words is None else Field(default, description=words)
        fields.append((parameter.name, hint, info))
    return takes_context, fields


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text in front of ``Args:`` and what stands there of each argument (Google style)."""
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        entry = re.match(r"\s{1,4}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if entry:
            last = entry.group(1)
            described[last] = entry.group(2)
        elif last and line.strip():
            described[last] += " " + line.strip()
    return re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", summary)[0].strip(), described


def registry(tools: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
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
