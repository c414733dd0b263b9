"""One MCP tool as an agent's tool: ``MCPSettings``, argument validation by its JSON schema, conversion of results."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentfsm.errors import ToolDefinitionError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import MEDIA_TYPES, Image
from agentfsm.loop.model import ToolSpec
from agentfsm.runtime.tools import ApprovalRequirement, SchemaTool

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

__all__ = ["MCPSettings", "RemoteTool", "definition_pin", "is_valid_name", "make_remote_tool", "result_content"]


class MCPSettings(BaseModel):
    """How the tools of an MCP server are used.

    Attributes:
        prefix: A prefix for each tool's name.
        only: Names of the server's tools to use; all by default.
        timeout: Seconds for one call; the guardrails' ``tool_timeout_s`` by default.
        requires_approval: Whether a person must approve a call, as ``@tool`` takes it.
        parallel: Whether calls may run concurrently with other parallel calls.
        recheck: Whether to read the list of tools before each call; if False, only after a restart and when the
            server reports a change of the list.
        results: What the model gets of a result that has both texts and structured content: the texts (``text``), or
            the structured content as JSON (``structured``). Images and other parts are passed on in both cases, and a
            result that has only one of the two is passed on as it is.
        start_timeout: Seconds for the server to start and respond; one that is installed on its first start takes long.
        files: A folder for results that a model cannot be shown (audio and other binary data); the model gets the
            path. Images are also stored there. Without it, the model only gets a note that there was such a result.

    Raises:
        pydantic.ValidationError: A setting is invalid; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,63}$")] = ""
    only: tuple[str, ...] | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    requires_approval: ApprovalRequirement = False
    parallel: bool = False
    recheck: bool = True
    results: Literal["text", "structured"] = "text"
    start_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    files: Path | None = None


MAX_NAME_CHARS = 64

_ANY_ARGUMENTS: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class RemoteTool(SchemaTool):
    """A tool of an MCP server."""


def make_remote_tool(
    listed: Listed, call: Callable[[str, dict[str, Any]], Awaitable[object]], settings: MCPSettings
) -> RemoteTool:
    """The tool for a definition in a server's list.

    Args:
        listed: The definition.
        call: Calls the tool by its name at the server.
        settings: How it is used.

    Raises:
        ToolDefinitionError: With the prefix its name is too long.
    """
    own = listed.name
    name = _model_name(own, settings.prefix)
    if not is_valid_name(own, settings.prefix):
        raise ToolDefinitionError(
            f"{name!r} is not a valid tool name (letters, digits, '_' and '-', {MAX_NAME_CHARS} at most): choose "
            "another prefix, or select other tools of the server with only=..."
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
        definition=definition_pin(listed),
    )


def _model_name(own: str, prefix: str) -> str:
    return prefix + re.sub(r"[^A-Za-z0-9_-]", "_", own)


def is_valid_name(own: str, prefix: str) -> bool:
    """Whether the name of a server's tool is valid for models, once it has the prefix."""
    return re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}", _model_name(own, prefix)) is not None


def definition_pin(listed: Listed) -> str:
    """The parts of a tool definition that must not change while an agent uses the tool, as canonical JSON."""
    annotations = listed.annotations
    return canonical_json(
        {
            "name": listed.name,
            "annotations": None if annotations is None else annotations.model_dump(mode="json", exclude_none=True),
            "description": listed.description,
            "input_schema": listed.input_schema,
            "output_schema": listed.output_schema,
            "title": listed.title,
        }
    )


MAX_IMAGE_CHARS = 5 * 1024 * 1024
"""Maximum length of an image in base64. The strictest provider rejects images above 5 MB
(https://docs.anthropic.com/en/docs/build-with-claude/vision), and then every later request with that image."""


async def result_content(
    result: CallToolResult, files: Path | None, prefer: Literal["text", "structured"] = "text"
) -> str | list[str | Image]:
    """The parts of a result in order: texts, and images that a model can be shown.

    Servers send structured content as text, too, often in other words, so only one of the two is passed on.

    Args:
        result: The result.
        files: The folder for binary parts, or None to store no files.
        prefer: Which one, where the result has both.

    Returns:
        One text if there are no images.
    """
    structured = result.structured_content
    items = result.content
    has_text = any(item.type == "text" for item in items)
    if structured is not None and prefer == "structured":
        items, has_text = [item for item in items if item.type != "text"], False
    parts = [part for item in items for part in await _convert_part(item, files)]
    if structured is not None and not has_text:
        parts.append(canonical_json(structured))
    texts = [part for part in parts if isinstance(part, str)]
    return parts if len(texts) < len(parts) else "\n".join(texts)


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
            description = f": {part.description}" if part.description else ""
            return [f"[resource {part.uri} ({part.name}){description}]"]
        case other:
            return [f"[{other}: not shown]"]


async def _convert_binary(label: str, mime_type: str | None, data: str, files: Path | None) -> list[str | Image]:
    kind = mime_type or "application/octet-stream"
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # binascii.Error, or ValueError for a character that is not ASCII
        return [f"[{label}, {kind}: its data cannot be read]"]
    notes: list[str | Image] = []
    if files is not None:
        path = files / (hashlib.sha256(content).hexdigest()[:16] + (mimetypes.guess_extension(kind) or ".bin"))
        await asyncio.to_thread(_write, path, content)
        notes.append(f"[{label}, {kind}, {len(content):,} bytes: saved as {path}]")
    if kind in MEDIA_TYPES and content and len(data) <= MAX_IMAGE_CHARS:
        return [*notes, Image.from_bytes(content, kind)]
    return notes or [f"[{label}, {kind}, {len(content):,} bytes: not shown]"]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
