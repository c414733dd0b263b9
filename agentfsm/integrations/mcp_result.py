"""What an MCP tool answers, as texts that a model is told and pictures that it is shown."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import mimetypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfsm.core.images import MEDIA_TYPES, Image
from agentfsm.core.messages import canonical_json

if TYPE_CHECKING:
    from mcp.types import CallToolResult

__all__ = ["result_parts"]

MAX_SHOWN = 5 * 1024 * 1024
"""Letters of base64 that a picture may have: the least that a provider refuses is more than 5 MB
(https://docs.anthropic.com/en/docs/build-with-claude/vision), and refuses it in every request from then on."""


async def result_parts(result: CallToolResult, files: Path | None) -> str | list[str | Image]:
    """The parts of a result in their order: texts, and pictures that a model can be shown.

    Structured content is told as JSON, unless a part of text says the same already.

    Args:
        result: The result.
        files: Where binary parts go too; None keeps no files.

    Returns:
        One text where there are no pictures.
    """
    parts = [part for given in result.content for part in await _parts(given, files)]
    structured = result.structured_content
    if structured is not None and not any(_same(part, structured) for part in parts):
        parts.append(canonical_json(structured))
    texts = [part for part in parts if isinstance(part, str)]
    return parts if len(texts) < len(parts) else "\n".join(texts)


def _same(part: str | Image, value: Any) -> bool:
    try:
        return isinstance(part, str) and bool(json.loads(part) == value)
    except ValueError:
        return False


async def _parts(part: Any, files: Path | None) -> list[str | Image]:
    match part.type:
        case "text":
            return [str(part.text)]
        case "image" | "audio":
            return await _binary(part.type, part.mime_type, part.data, files)
        case "resource":
            resource = part.resource
            if hasattr(resource, "text"):
                return [f"[resource {resource.uri}]\n{resource.text}"]
            return await _binary(f"resource {resource.uri}", resource.mime_type, resource.blob, files)
        case "resource_link":
            about = f": {part.description}" if part.description else ""
            return [f"[resource {part.uri} ({part.name}){about}]"]
        case other:
            return [f"[{other}: not shown]"]


async def _binary(what: str, mime_type: str | None, data: str, files: Path | None) -> list[str | Image]:
    kind = mime_type or "application/octet-stream"
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # a letter that is not ASCII is no binascii.Error
        return [f"[{what}, {kind}: its data cannot be read]"]
    kept: list[str | Image] = []
    if files is not None:
        path = files / (hashlib.sha256(content).hexdigest()[:16] + (mimetypes.guess_extension(kind) or ".bin"))
        await asyncio.to_thread(_write, path, content)
        kept.append(f"[{what}, {kind}, {len(content):,} bytes: saved as {path}]")
    if kind in MEDIA_TYPES and content and len(data) <= MAX_SHOWN:
        return [*kept, Image.of(content, kind)]
    return kept or [f"[{what}, {kind}, {len(content):,} bytes: not shown]"]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
