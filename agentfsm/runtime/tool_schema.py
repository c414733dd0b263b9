"""Derives a tool's JSON schema and description from a function's signature and docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from agentfsm.errors import ToolDefinitionError
from agentfsm.runtime.run_context import RunContext


class FunctionSchema(NamedTuple):
    """A function's description for a model, and the validator of its arguments.

    Attributes:
        summary: What it does, from its docstring.
        schema: The JSON schema of its arguments.
        adapter: Validates arguments.
        takes_context: Whether its first parameter is a ``ToolContext``.
        secret: The names of its secret arguments (of type ``SecretStr`` or ``SecretBytes``).
    """

    summary: str
    schema: dict[str, Any]
    adapter: TypeAdapter[Any]
    takes_context: bool
    secret: frozenset[str]


def describe_function(function: Callable[..., Any], label: str, context_type: type[object]) -> FunctionSchema:
    """A function's description and schema, from its signature and docstring.

    Raises:
        ToolDefinitionError: It cannot be described to a model; the message says why.
    """
    summary, descriptions = _parse_docstring(function)
    takes_context, fields = _argument_fields(function, label, descriptions, context_type)
    from pydantic.dataclasses import dataclass as validated  # slow to import, only needed here

    try:
        made = dataclasses.make_dataclass(label.replace("-", "_"), fields, kw_only=True)
        adapter: TypeAdapter[Any] = TypeAdapter(validated(made, config=ConfigDict(extra="forbid")))
        schema = adapter.json_schema(schema_generator=_SchemaGenerator)
    except (pydantic.errors.PydanticUserError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ToolDefinitionError(f"tool {label!r} cannot be described as JSON: {text}") from error
    schema.pop("title", None)
    for prop in cast("dict[str, dict[str, Any]]", schema.get("properties", {})).values():
        prop.pop("title", None)
    secret = frozenset(name for name, hint, _ in fields if _SECRET_TYPE.search(str(hint)))
    return FunctionSchema(summary, schema, adapter, takes_context, secret)


def has_context_parameter(function: Callable[..., Any], label: str, context_type: type[object]) -> bool:
    """Whether a function's first parameter receives the context; the others need no type hints.

    Raises:
        ToolDefinitionError: Its type hints cannot be read.
    """
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in function
        return False
    try:
        return bool(parameters) and _is_context(_parameter_hints(function).get(parameters[0]), context_type)
    except NameError as error:
        raise ToolDefinitionError(f"tool {label!r}: cannot read its signature: {error}") from error


_SECRET_TYPE = re.compile(r"\bpydantic\.types\.Secret(?:Str|Bytes)?\b")


class _SchemaGenerator(GenerateJsonSchema):
    """Leaves a default that is not JSON (a sentinel) out of the schema without a warning."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters' type hints. The return type is not evaluated, so it may be imported for type checkers only."""

    def stub() -> None: ...

    source = function if hasattr(function, "__annotations__") else type(function).__call__
    stub.__annotations__ = {k: v for k, v in inspect.get_annotations(source).items() if k != "return"}
    names = getattr(inspect.unwrap(source), "__globals__", {})
    return get_type_hints(stub, globalns=names, include_extras=True)


def _argument_fields(
    function: Callable[..., Any], label: str, descriptions: Mapping[str, str], context_type: type[object]
) -> tuple[bool, list[Any]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = _parameter_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise ToolDefinitionError(f"tool {label!r}: cannot read its signature: {error}") from error
    takes_context = bool(parameters) and _is_context(hints.get(parameters[0].name), context_type)
    fields: list[Any] = []
    for parameter in parameters[1:] if takes_context else parameters:
        where = f"tool {label!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"{where}: a model passes arguments by name, so it must be an ordinary parameter")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"{where}: it needs a type hint")
        hint = hints[parameter.name]
        if any(_is_context(each, context_type) for each in (hint, *get_args(hint))):
            raise ToolDefinitionError(f"{where}: a ToolContext must be the first parameter, without a union or default")
        default = ... if parameter.default is parameter.empty else parameter.default
        text = descriptions.get(parameter.name)  # None would hide that of Annotated[..., Field(description=...)]
        info: Any = Field(default) if text is None else Field(default, description=text)
        fields.append((parameter.name, hint, info))
    return takes_context, fields


def _is_context(hint: object, context_type: type[object]) -> bool:
    """Whether a type hint is the type of a context or of its base, with or without that of its dependencies."""
    plain = get_origin(hint) or hint
    return plain is context_type or plain is RunContext


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The summary and the description of each argument, from a Google-style docstring."""
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
