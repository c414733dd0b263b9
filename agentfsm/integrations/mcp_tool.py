"""A tool of an MCP server as a tool of ours: its schema unchanged, its arguments checked against it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from agentfsm.core.messages import canonical_json
from agentfsm.core.model import ToolSpec
from agentfsm.errors import ToolDefinitionError
from agentfsm.integrations.mcp_settings import MCPSettings
from agentfsm.runtime.tools import UI_MESSAGE, Tool

if TYPE_CHECKING:
    from mcp.types import Tool as Listed

__all__ = ["RemoteTool", "pin", "remote_tool"]

MAX_NAME = 64

_ANYTHING: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class RemoteTool(Tool):
    """A tool of an MCP server."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they came, once they fit the server's schema.

        Raises:
            pydantic_core.ValidationError: They do not; the error names each bad field.
        """
        unresolvable = import_module("referencing.exceptions").Unresolvable
        own = self.spec.parameters.get("properties", {})
        data = {k: v for k, v in given.items() if k != UI_MESSAGE or k in own}
        try:
            found = [] if self._validator is None else list(self._validator.iter_errors(data))
        except unresolvable:  # the server knows what it means
            found = []
        if found:
            raise ValidationError.from_exception_data(
                self.name,
                [InitErrorDetails(type=_problem(e.message), loc=tuple(e.absolute_path), input=None) for e in found],
            )
        return data

    @cached_property
    def _validator(self) -> Any:
        """Checks arguments, with no look at any other address; None where the schema is none."""
        jsonschema, schema = import_module("jsonschema"), dict(self.spec.parameters)
        kind = jsonschema.validators.validator_for(schema)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError:
            return None
        return kind(schema, registry=import_module("referencing").Registry())


def _problem(message: str) -> PydanticCustomError:
    text = message if len(message) < 200 else message[:200] + "..."
    return PydanticCustomError("json_schema", "{text}", {"text": text})


def remote_tool(
    listed: Listed, call: Callable[[str, dict[str, Any]], Awaitable[object]], settings: MCPSettings
) -> RemoteTool:
    """A tool, as a server lists it.

    Args:
        listed: What the server says of it.
        call: Calls it, by its own name.
        settings: How it is used.

    Raises:
        ToolDefinitionError: With its prefix the name is too long.
    """
    own = listed.name
    name = settings.prefix + re.sub(r"[^A-Za-z0-9_-]", "_", own)
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}", name):
        raise ToolDefinitionError(
            f"{name!r} is no name for a tool: letters, digits, '_' and '-', {MAX_NAME} at most; choose another prefix, "
            "or take other tools of the server with only=..."
        )

    async def remote(**arguments: Any) -> object:
        return await call(own, arguments)

    return RemoteTool(
        ToolSpec(name, listed.description or listed.title or "", listed.input_schema),
        remote,
        _ANYTHING,
        is_async=True,
        timeout=settings.timeout,
        requires_approval=settings.requires_approval,
        parallel=settings.parallel,
    )


def pin(listed: Listed) -> str:
    """What must not change about a tool while an agent uses it, as one text."""
    notes = listed.annotations
    return canonical_json(
        {
            "annotations": None if notes is None else notes.model_dump(mode="json", exclude_none=True),
            "description": listed.description,
            "input_schema": listed.input_schema,
            "output_schema": listed.output_schema,
            "title": listed.title,
        }
    )
