"""One MCP tool as a tool of an agent: ``MCPSettings``, argument validation by its schema, result conversion."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import mimetypes
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from agentfsm.errors import ToolDefinitionError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import MEDIA_TYPES, Image
from agentfsm.loop.model import ToolSpec
from agentfsm.runtime.tools import UI_MESSAGE, Tool

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

__all__ = ["MCPSettings", "RemoteTool", "definition_pin", "make_remote_tool", "result_content"]


class MCPSettings(BaseModel):
    """How the tools of an MCP server are used.

    Attributes:
        prefix: What stands in front of each tool's name.
        only: Names of the server's tools to take; all unless given.
        timeout: Seconds for one call; the guardrails' ``tool_timeout_s`` unless given.
        requires_approval: True, or a function of the arguments: whether a person must allow a call.
        parallel: Whether calls may run together with others that may.
        recheck: Whether the list of tools is read again before each call; without it only after a restart, and
            when the server says that the list has changed.
        files: A folder for what a model cannot be shown (sound, other binary results), of which it is told the
            path; pictures are kept there too. Without it, the model is told only that there was something.

    Raises:
        pydantic.ValidationError: A setting cannot be one; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,63}$")] = ""
    only: tuple[str, ...] | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    requires_approval: bool | Callable[[Mapping[str, Any]], bool] = False
    parallel: bool = False
    recheck: bool = True
    files: Path | None = None


MAX_NAME_CHARS = 64

_ANY_ARGUMENTS: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


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
                [
                    InitErrorDetails(type=_schema_error(e.message), loc=tuple(e.absolute_path), input=None)
                    for e in found
                ],
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


def _schema_error(message: str) -> PydanticCustomError:
    text = message if len(message) < 200 else message[:200] + "..."
    return PydanticCustomError("json_schema", "{text}", {"text": text})


def make_remote_tool(
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
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}", name):
        raise ToolDefinitionError(
            f"{name!r} is no name for a tool: letters, digits, '_' and '-', {MAX_NAME_CHARS} at most; choose another prefix, "
            "or take other tools of the server with only=..."
        )

    async def remote(**arguments: Any) -> object:
        return await call(own, arguments)

    return RemoteTool(
        ToolSpec(name, listed.description or listed.title or "", listed.input_schema),
        remote,
        _ANY_ARGUMENTS,
        is_async=True,
        timeout=settings.timeout,
        requires_approval=settings.requires_approval,
        parallel=settings.parallel,
    )


def definition_pin(listed: Listed) -> str:
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


MAX_IMAGE_CHARS = 5 * 1024 * 1024
"""Letters of base64 that a picture may have: the least that a provider refuses is more than 5 MB
(https://docs.anthropic.com/en/docs/build-with-claude/vision), and refuses it in every request from then on."""


async def result_content(result: CallToolResult, files: Path | None) -> str | list[str | Image]:
    """The parts of a result in their order: texts, and pictures that a model can be shown.

    Structured content is told as JSON, unless a part of text says the same already.

    Args:
        result: The result.
        files: Where binary parts go too; None keeps no files.

    Returns:
        One text where there are no pictures.
    """
    parts = [part for given in result.content for part in await _convert_part(given, files)]
    structured = result.structured_content
    if structured is not None and not any(_is_same_json(part, structured) for part in parts):
        parts.append(canonical_json(structured))
    texts = [part for part in parts if isinstance(part, str)]
    return parts if len(texts) < len(parts) else "\n".join(texts)


def _is_same_json(part: str | Image, value: Any) -> bool:
    try:
        return isinstance(part, str) and bool(json.loads(part) == value)
    except ValueError:
        return False


async def _convert_part(part: Any, files: Path | None) -> list[str | Image]:
    match part.type:
        case "text":
            return [str(part.text)]
        case "image" | "audio":
            return await _convert_binary(part.type, part.mime_type, part.data, files)
        case "resource":
            resource = part.resource
            if hasattr(resource, "text"):
                return [f"[resource {resource.uri}]\n{resource.text}"]
            return await _convert_binary(f"resource {resource.uri}", resource.mime_type, resource.blob, files)
        case "resource_link":
            about = f": {part.description}" if part.description else ""
            return [f"[resource {part.uri} ({part.name}){about}]"]
        case other:
            return [f"[{other}: not shown]"]


async def _convert_binary(label: str, mime_type: str | None, data: str, files: Path | None) -> list[str | Image]:
    kind = mime_type or "application/octet-stream"
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # a letter that is not ASCII is no binascii.Error
        return [f"[{label}, {kind}: its data cannot be read]"]
    kept: list[str | Image] = []
    if files is not None:
        path = files / (hashlib.sha256(content).hexdigest()[:16] + (mimetypes.guess_extension(kind) or ".bin"))
        await asyncio.to_thread(_write, path, content)
        kept.append(f"[{label}, {kind}, {len(content):,} bytes: saved as {path}]")
    if kind in MEDIA_TYPES and content and len(data) <= MAX_IMAGE_CHARS:
        return [*kept, Image.from_bytes(content, kind)]
    return kept or [f"[{label}, {kind}, {len(content):,} bytes: not shown]"]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
