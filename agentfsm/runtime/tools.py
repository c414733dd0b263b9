"""Tools: ``Tool``, the ``@tool`` decorator, and tools that are described by a JSON schema."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, overload

from pydantic import SecretStr, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticSerializationError, to_json

from agentfsm.errors import ToolDefinitionError
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.human_input import HumanReply, SuspendedSubRun
from agentfsm.loop.model import ToolSpec
from agentfsm.loop.quorum import Approval
from agentfsm.loop.read_only import thaw
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.withholding import SecretPaths, marks_secrets, secret_values
from agentfsm.runtime.delegation import CallingRun, Delegation
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.tool_schema import describe_function, has_context_parameter

if TYPE_CHECKING:
    from agentfsm.runtime.schema_check import SchemaCheck

ApprovalRequirement = (
    bool | Approval | Callable[[dict[str, Any]], bool | Approval] | Callable[[dict[str, Any], Any], bool | Approval]
)
"""Whether a human must approve a call: always, never, by whom, or a function that says so.

The function gets the validated arguments and, if it needs a second argument, the ``HookContext`` of the call.
"""

UI_MESSAGE = "_ui_message"
"""An argument that a model may add to any call, with text for the user; passed to the tool only if it declares it."""

_TOOL_NAME = re.compile(r"\A[A-Za-z0-9_-]{1,64}\Z")


class Delegate(Protocol):
    """What answers the calls of a tool: a sub-agent, or a server that may ask a person or a model during the call."""

    @property
    def is_agent(self) -> bool:
        """Whether it is a sub-agent, whose interrupted calls continue where its own journal ends."""
        ...

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools by name, as far as they are known before it runs."""
        ...

    @property
    def toolsets(self) -> tuple[Any, ...]:
        """What chooses the tools of its runs; empty if all of them are the same."""
        ...

    @property
    def hooks(self) -> Mapping[str, tuple[Any, ...]]:
        """Its hooks by state."""
        ...

    def __call__(self, caller: CallingRun, call_state: CallState, attempt: int) -> Delegation:
        """Start or resume its run for one call.

        Args:
            caller: The calling run.
            call_state: The call.
            attempt: Which attempt at the call this is, from 1.
        """
        ...

    async def left_runs(self, caller: CallingRun) -> Sequence[str]:
        """The ids of the runs below a calling run that may be its, and have not ended.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
            agentfsm.errors.JournalError: The first record of one cannot be read.
        """
        ...

    async def dismiss(self, caller: CallingRun, run_id: str, reason: str) -> None:
        """End a run that waits or was cut off, and that nobody continues.

        Args:
            caller: The calling run.
            run_id: The run.
            reason: Why it ends.

        Raises:
            agentfsm.errors.AgentfsmError: It cannot be ended.
        """
        ...

    async def check_reply(self, caller: CallingRun, held: SuspendedSubRun, reply: HumanReply) -> None:
        """Check that what is suspended can continue with a person's reply; nothing is changed.

        Raises:
            agentfsm.errors.SuspensionRecordError: It cannot.
        """
        ...


class _HasDict:
    """A base of classes with slots, which gives their cached properties a dict.

    Slots are quick to read in each step. So are fields in a dict, but not in CPython 3.11 once something asked for it.
    """


@dataclass(frozen=True, slots=True)
class Tool(_HasDict):
    """A function that a model may call, made by ``@tool``.

    Attributes:
        spec: Its name, description and JSON schema, as sent to the model.
        function: The function itself.
        adapter: Validates the arguments.
        takes_context: Whether the first parameter is a ``ToolContext``.
        timeout: Seconds for one call; None for the guardrails' ``tool_timeout_s``.
        max_result_chars: How many characters of a result the model gets; None for the guardrails'
            ``max_tool_result_chars``.
        idempotent: Whether calling it twice with the same idempotency key has the same effect as calling it once.
        retryable: Whether a failed call may be retried unchanged (idempotent tools only).
        requires_approval: Whether a human must approve a call.
        ends_run: Whether a successful call ends the run with its result as the output.
        parallel: Whether calls may run in parallel with other parallel calls.
        asks: Whether it may ask a person (``ToolContext.ask``); for an async function with a ``ToolContext``.
        control: For control tools: ``ask``, ``done`` or ``unable``.
        is_async: Whether the function is a coroutine function; a plain one runs in a thread.
        secret: Names of arguments that are never journaled.
        delegate: For a sub-agent: starts and resumes its runs.
        definition: What stands behind the function, if its own name does not say it: a server's definition, or what
            a sub-agent runs on.
        notes: What its author says about using it and others with the same text: stands once in the system prompt,
            fenced and labelled as data.
        known_secrets: What its provider was given as secret so far, which is withheld wherever it occurs.

    Raises:
        ToolDefinitionError: ``requires_approval`` is neither a bool nor an ``Approval`` nor a plain function, or
            several people would have to approve a call with secret arguments.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    adapter: TypeAdapter[Any]
    takes_context: bool = False
    timeout: float | None = None
    max_result_chars: int | None = None
    idempotent: bool = False
    retryable: bool = False
    requires_approval: ApprovalRequirement = False
    ends_run: bool = False
    parallel: bool = False
    asks: bool = False
    control: str | None = None
    is_async: bool = field(default=False)
    secret: frozenset[str] = frozenset()
    delegate: Delegate | None = None
    definition: str = ""
    notes: str = ""
    known_secrets: Sequence[SecretStr] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        rule: object = self.requires_approval
        if inspect.iscoroutinefunction(rule) or not (isinstance(rule, (bool, Approval)) or callable(rule)):
            raise ToolDefinitionError(
                f"tool {self.name!r}: requires_approval must be True, False, an Approval or a plain function of the "
                "arguments (a hook at dispatch_tool may be async)"
            )
        if self.secret and isinstance(rule, Approval) and rule.n > 1:
            raise ToolDefinitionError(
                f"tool {self.name!r}: its secret arguments are not stored and must be given again after a restart, so "
                "several people cannot approve the same call"
            )

    @property
    def may_need_votes(self) -> bool:
        """Whether a call may need several approvals or escalation: its rule does, or its function returns rules."""
        rule = self.requires_approval
        if isinstance(rule, Approval):
            return rule.needs_rows
        return "Approval" in str(getattr(rule, "__annotations__", {}).get("return", ""))

    @cached_property
    def approval_takes_context(self) -> bool:
        """Whether ``requires_approval`` needs two arguments: those of the call, and the context."""
        rule = self.requires_approval
        if isinstance(rule, (bool, Approval)):
            return False
        try:
            parameters = inspect.signature(rule).parameters.values()
        except ValueError:  # a built-in function
            return False
        by_place = (p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        return sum(p.default is p.empty for p in by_place) > 1

    @cached_property
    def has_secrets(self) -> bool:
        """Whether an argument, or a value inside one, is secret."""
        return bool(self.secret) or marks_secrets(self.spec.parameters)

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.spec.name

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what the tool is: name, description, schema, qualified name of the function, definition.

        An approval is for this tool and no other, and a journal pins it.
        """
        function = getattr(self.function, "func", self.function)  # of functools.partial
        data = {
            "definition": self.definition,
            "description": self.spec.description,
            "function": getattr(function, "__qualname__", type(function).__qualname__),
            "name": self.spec.name,
            "parameters": dict(self.spec.parameters),
        }
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for ``function``, validated and converted.

        Args:
            given: The arguments as the model gave them.

        Raises:
            pydantic.ValidationError: They are invalid; the error names each bad field.
        """
        if UI_MESSAGE in given and UI_MESSAGE not in self.spec.parameters.get("properties", ()):
            given = {k: v for k, v in given.items() if k != UI_MESSAGE}
        try:
            # Arguments are JSON, so validate them as JSON: strict types accept it, and a tool that modifies its
            # arguments does not modify the transcript.
            validated: object = self.adapter.validator.validate_json(to_json({**given}))
        except PydanticSerializationError:
            validated = self.adapter.validator.validate_python(dict(given))
        return vars(validated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self.function(*args, **kwargs)

    @staticmethod
    def from_schema(
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        function: Callable[..., Any],
        *,
        timeout: float | None = None,
        max_result_chars: int | None = None,
        idempotent: bool = False,
        retryable: bool = False,
        requires_approval: ApprovalRequirement = False,
        ends_run: bool = False,
        parallel: bool = False,
        asks: bool = False,
        secret: Iterable[str] = (),
    ) -> Tool:
        """A tool that is described by a JSON schema, for a function whose signature does not say what it takes.

        The model's arguments are validated by the schema, and passed to the function by name, unconverted: what the
        schema calls a ``date-time`` arrives as text. ``format``, ``unevaluatedProperties``, ``unevaluatedItems`` and
        regular expressions with look-around or backreferences are not checked.

        Args:
            name: The tool's name.
            description: What it does and when to call it, for the model.
            parameters: The JSON schema of its arguments, with ``"type": "object"``. References lead to ``$defs`` in it.
            function: Plain (it runs in a thread) or async. A first parameter of type ``ToolContext`` gets the context.
            timeout: As ``@tool`` takes it, and so are the others.
            max_result_chars: How many characters of a result the model gets.
            idempotent: Whether calling it twice with the same idempotency key has the same effect as calling it once.
            retryable: Whether a failed call may be retried unchanged (idempotent tools only).
            requires_approval: Whether a human must approve a call.
            ends_run: Whether a successful call ends the run with its result as the output.
            parallel: Whether calls may run in parallel with other parallel calls.
            asks: Whether it may ask a person in the middle of its work.
            secret: Names of arguments that are never journaled; so are those that the schema marks with
                ``"writeOnly": true`` or ``"format": "password"``.

        Raises:
            ToolDefinitionError: The schema is not valid, or the function does not take what it describes.
            MissingExtraError: The package ``jsonschema`` is not installed.
        """
        made = SchemaTool(
            ToolSpec(_valid_name(name), description, dict(parameters)),
            function,
            _ANY_ARGUMENTS,
            takes_context=_takes_context(function, name),
            is_async=inspect.iscoroutinefunction(function),
            timeout=timeout,
            max_result_chars=max_result_chars,
            idempotent=idempotent,
            retryable=retryable,
            requires_approval=requires_approval,
            ends_run=ends_run,
            parallel=parallel,
            asks=asks,
        )
        made.check_definition()
        return _checked(made, secret)


_ANY_ARGUMENTS: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, slots=True)
class SchemaTool(Tool):
    """A tool whose arguments are validated by the JSON schema in its spec alone."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, validated by the schema.

        Raises:
            pydantic_core.ValidationError: They are invalid; the error names each field.
        """
        own = self.spec.parameters.get("properties", {})
        data = {name: thaw(value) for name, value in given.items() if name != UI_MESSAGE or name in own}
        errors = self._schema_check.errors(data)
        if self._accepted is not None:
            errors += [((name,), "there is no such argument") for name in data if name not in self._accepted]
        if errors:
            raise ValidationError.from_exception_data(
                self.name, [InitErrorDetails(type=_schema_error(text), loc=path, input=None) for path, text in errors]
            )
        return data

    def check_definition(self) -> None:
        """Check the schema, and that the function takes the arguments that it describes.

        Raises:
            ToolDefinitionError: It does not.
            MissingExtraError: The package ``jsonschema`` is not installed.
        """
        from agentfsm.runtime.schema_check import definition_problem

        what, schema = f"tool {self.name!r}", self.spec.parameters
        if schema.get("type") != "object":
            raise ToolDefinitionError(f'{what}: the schema of its arguments must have "type": "object"')
        if problem := definition_problem(schema):
            raise ToolDefinitionError(f"{what}: its parameters are not a usable JSON schema: {problem}")
        if self._accepted is None:
            return
        described = set(schema.get("properties", {}))
        if unknown := described - self._accepted:
            raise ToolDefinitionError(f"{what}: its function does not take {', '.join(sorted(unknown))}")
        if missing := self._required - set(schema.get("required", ())):
            raise ToolDefinitionError(
                f"{what}: its function needs {', '.join(sorted(missing))}, which the schema does not require"
            )

    @cached_property
    def _schema_check(self) -> SchemaCheck:
        from agentfsm.runtime.schema_check import SchemaCheck  # jsonschema is an extra

        return SchemaCheck(self.spec.parameters)

    @cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        try:
            found = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # a built-in function
            return None
        return found[1:] if self.takes_context else found

    @cached_property
    def _accepted(self) -> frozenset[str] | None:
        """The names of the arguments that the function takes; None for any."""
        if self._parameters is None or any(p.kind is p.VAR_KEYWORD for p in self._parameters):
            return None
        return frozenset(p.name for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    @cached_property
    def _required(self) -> frozenset[str]:
        named = self._accepted or frozenset()
        return frozenset(p.name for p in self._parameters or () if p.default is p.empty and p.name in named)


def _takes_context(function: Callable[..., Any], name: str) -> bool:
    if not callable(function):
        raise ToolDefinitionError(f"tool {name!r}: it must be a function, not {type(function).__name__}")
    return has_context_parameter(function, name, ToolContext)


def _schema_error(message: str) -> PydanticCustomError:
    text = message if len(message) < 200 else message[:200] + "..."
    return PydanticCustomError("json_schema", "{text}", {"text": text})


def problems(error: ValidationError) -> list[str]:
    """Each invalid field and what is wrong with it."""
    return [
        f"{'.'.join(str(part) for part in e['loc']) or 'arguments'}: {e['msg'][:1].lower()}{e['msg'][1:]}"
        for e in error.errors(include_url=False, include_input=False)
    ]


def describe_validation_error(error: Exception) -> str:
    """Why a value is invalid: each invalid field, or the exception that a validator of the type raised."""
    return "; ".join(problems(error)) if isinstance(error, ValidationError) else describe_exception(error)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    max_result_chars: int | None = None,
    idempotent: bool = False,
    retryable: bool = False,
    requires_approval: ApprovalRequirement = False,
    ends_run: bool = False,
    parallel: bool = False,
    asks: bool = False,
    secret: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    max_result_chars: int | None = None,
    idempotent: bool = False,
    retryable: bool = False,
    requires_approval: ApprovalRequirement = False,
    ends_run: bool = False,
    parallel: bool = False,
    asks: bool = False,
    secret: Iterable[str] = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Decorator: make a function a tool, as ``@tool`` or ``@tool(...)``.

    Args:
        function: Plain (it runs in a thread) or async. The items of a generator are returned as a list.
        name: The tool's name; by default the function's.
        timeout: Seconds for one call; by default the guardrails' ``tool_timeout_s``.
        max_result_chars: How many characters of a result the model gets: of a longer one, its beginning and its end,
            and how much is left out. By default the guardrails' ``max_tool_result_chars``.
        idempotent: Whether calling it twice with the same idempotency key has the same effect as calling it once.
        retryable: Whether a failed call may be retried unchanged (idempotent tools only).
        requires_approval: Whether a human must approve a call: True; an ``Approval``, which says how many and who; or
            a function of the arguments, and if it takes two of the ``HookContext``, that returns one of these or False.
        ends_run: Whether a successful call ends the run with its result as the output.
        parallel: Whether calls may run in parallel with other parallel calls.
        asks: Whether it may ask a person in the middle of its work, by ``await context.ask(...)``. It must be async,
            and take a ``ToolContext``.
        secret: Names of arguments that are never journaled; arguments of type ``SecretStr`` always are secret.
            A run that is resumed by another process asks a human for them again.

    Raises:
        ToolDefinitionError: The function cannot be described to a model.
    """

    def decorate(function: Callable[..., Any]) -> Tool:
        made = dataclasses.replace(
            as_tool(function, name=name),
            timeout=timeout,
            max_result_chars=max_result_chars,
            idempotent=idempotent,
            retryable=retryable,
            requires_approval=requires_approval,
            ends_run=ends_run,
            parallel=parallel,
            asks=asks,
        )
        return _checked(made, secret)

    return decorate if function is None else decorate(function)


def _checked(made: Tool, secret: Iterable[str]) -> Tool:
    """A tool with more secret arguments, after checking its options."""
    if made.timeout is not None and not made.timeout > 0:
        raise ToolDefinitionError(f"tool {made.name!r}: timeout must be greater than 0 seconds, not {made.timeout}")
    if made.max_result_chars is not None and not made.max_result_chars > 0:
        raise ToolDefinitionError(
            f"tool {made.name!r}: max_result_chars must be greater than 0, not {made.max_result_chars}"
        )
    if made.retryable and not made.idempotent:
        raise ToolDefinitionError(f"tool {made.name!r}: only an idempotent tool can be retryable")
    if made.asks and not (made.is_async and made.takes_context):
        raise ToolDefinitionError(
            f"tool {made.name!r}: one that asks a person must be an async function with a ToolContext as its first "
            "parameter"
        )
    names, described = frozenset(secret), made.spec.parameters.get("properties", {})
    if unknown := names - described.keys():
        raise ToolDefinitionError(f"tool {made.name!r}: it has no argument {', '.join(sorted(unknown))}")
    made = dataclasses.replace(made, secret=made.secret | names)
    return _without_secret_defaults(made) if any("default" in described[name] for name in names) else made


def _without_secret_defaults(made: Tool) -> Tool:
    """A tool whose description does not say what its secret arguments are by default."""
    parameters = made.spec.parameters
    described = {
        name: {key: value for key, value in each.items() if key != "default"} if name in made.secret else each
        for name, each in parameters["properties"].items()
    }
    spec = dataclasses.replace(made.spec, parameters={**parameters, "properties": described})
    return dataclasses.replace(made, spec=spec)


def as_tool(function: Callable[..., Any], *, name: str | None = None, control: str | None = None) -> Tool:
    """A tool made from a function; a ``Tool`` is returned unchanged.

    Raises:
        ToolDefinitionError: The function cannot be described to a model; the message says why.
    """
    if isinstance(function, Tool):
        return function
    if not callable(function):
        raise ToolDefinitionError(f"a tool must be a function, not {type(function).__name__}")
    label = _valid_name(str(getattr(function, "__name__", "")) if name is None else name)
    schema = describe_function(function, label, ToolContext)
    return Tool(
        ToolSpec(label, schema.summary, schema.schema),
        function,
        schema.adapter,
        schema.takes_context,
        control=control,
        is_async=inspect.iscoroutinefunction(function),
        secret=schema.secret,
    )


def _valid_name(name: str) -> str:
    if not _TOOL_NAME.match(name):
        raise ToolDefinitionError(f"{name!r} is not a valid tool name: use letters, digits, '_' and '-', at most 64")
    return name


def tools_by_name(tools: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        ToolDefinitionError: Two tools have the same name, or a function cannot be described.
    """
    by_name: dict[str, Tool] = {}
    for function in tools:
        each = as_tool(function)
        if each.name in by_name:
            raise ToolDefinitionError(f"two tools have the name {each.name!r}")
        by_name[each.name] = each
    return by_name


def with_subagents(tools: Mapping[str, Tool]) -> Iterator[Tool]:
    """The tools of an agent and those of its sub-agents, at every depth."""
    for each in tools.values():
        yield each
        if each.delegate is not None:
            yield from with_subagents(each.delegate.tools)


def secret_arguments(tools: Iterable[Tool]) -> SecretPaths:
    """Where the arguments of each tool are secret, by the tool's name; tools without secret arguments are left out."""
    return {t.name: (t.secret, t.spec.parameters) for t in tools if t.has_secrets}


def call_secrets(tool: Tool, arguments: Mapping[str, Any]) -> list[Any]:
    """The secret values in the arguments of a call."""
    return secret_values(arguments, tool.secret, tool.spec.parameters) if tool.has_secrets else []


def run_secrets(run: RunState, tools: Mapping[str, Tool]) -> tuple[Any, ...]:
    """What a run knows to be secret: arguments of its calls, and what became known by them."""
    having = {name: tool for name, tool in tools.items() if tool.has_secrets}
    calls = [call for message in run.messages for call in message.tool_calls] if having else []
    calls += [each.call for each in run.batch] if having else []
    found = (value for c in calls if c.name in having for value in call_secrets(having[c.name], c.arguments))
    return tuple(dict.fromkeys(value for value in (*run.withheld, *found) if isinstance(value, str | int | float)))
