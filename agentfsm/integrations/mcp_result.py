"""What an MCP tool answers, as the text that a model is told."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import mimetypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfsm.core.messages import canonical_json

if TYPE_CHECKING:
    from mcp.types import CallToolResult

__all__ = ["result_text"]


async def result_text(result: CallToolResult, files: Path | None) -> str:
    """The parts of a result in their order, each as text.

    Structured content is told as JSON, unless a part of text says the same already.

    Args:
        result: The result.
        files: Where images and other binary parts go; None leaves them out, and says so.
    """
    parts = [await _part(part, files) for part in result.content]
    structured = result.structured_content
    if structured is not None and not any(_same(text, structured) for text in parts):
        parts.append(canonical_json(structured))
    return "\n".join(parts)


def _same(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


async def _part(part: Any, files: Path | None) -> str:
    match part.type:
        case "text":
            return str(part.text)
        case "image" | "audio":
            return await _binary(part.type, part.mime_type, part.data, files)
        case "resource":
            resource = part.resource
            if hasattr(resource, "text"):
                return f"[resource {resource.uri}]\n{resource.text}"
            return await _binary(f"resource {resource.uri}", resource.mime_type, resource.blob, files)
        case "resource_link":
            about = f": {part.description}" if part.description else ""
            return f"[resource {part.uri} ({part.name}){about}]"
        case other:
            return f"[{other}: not shown]"


async def _binary(what: str, mime_type: str | None, data: str, files: Path | None) -> str:
    kind = mime_type or "application/octet-stream"
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        return f"[{what}, {kind}: its data cannot be read]"
    size = f"{kind}, {len(content):,} bytes"
    if files is None:
        return f"[{what}, {size}: not shown]"
    name = hashlib.sha256(content).hexdigest()[:16] + (mimetypes.guess_extension(kind) or ".bin")
    await asyncio.to_thread(_write, files / name, content)
    return f"[{what}, {size}: saved as {files / name}]"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
