"""What an MCP server returns, as what a model can be shown: texts, images, and notes about everything else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import Image, image_media_type

if TYPE_CHECKING:
    from mcp.types import CallToolResult

MAX_IMAGE_CHARS = 5 * 1024 * 1024
"""Maximum length of an image in base64. The strictest provider rejects images above 5 MB
(https://docs.anthropic.com/en/docs/build-with-claude/vision), and then every later request with that image."""


async def result_content(
    result: CallToolResult, files: Path | None, prefer: Literal["text", "structured"] = "text"
) -> str | list[str | Image]:
    """The parts of a result in order: texts, and images that a model can be shown.

    Servers send structured content as text, too, often in other words, so only one of the two is passed on.

    Returns:
        One text if there are no images.
    """
    structured = result.structured_content
    items = result.content
    has_text = any(item.type == "text" for item in items)
    if structured is not None and prefer == "structured":
        items, has_text = [item for item in items if item.type != "text"], False
    parts = [part for item in items for part in await part_content(item, files)]
    if structured is not None and not has_text:
        parts.append(canonical_json(structured))
    return joined(parts)


def joined(parts: list[str | Image]) -> str | list[str | Image]:
    """The parts as one text, if there are no images."""
    texts = [part for part in parts if isinstance(part, str)]
    return parts if len(texts) < len(parts) else "\n".join(texts)


async def part_content(part: Any, files: Path | None) -> list[str | Image]:
    """The texts and images for one part of what a server returns."""
    match part.type:
        case "text":
            return [str(part.text)]
        case "image" | "audio":
            return await binary_content(part.type, part.mime_type, part.data, files)
        case "resource":
            resource = part.resource
            if hasattr(resource, "text"):
                return [f"[resource {resource.uri}]\n{resource.text}"]
            return await binary_content(f"resource {resource.uri}", resource.mime_type, resource.blob, files)
        case "resource_link":
            description = f": {part.description}" if part.description else ""
            return [f"[resource {part.uri} ({part.name}){description}]"]
        case other:
            return [f"[{other}: not shown]"]


async def binary_content(label: str, mime_type: str | None, data: str, files: Path | None) -> list[str | Image]:
    """The image for binary data if a model can be shown it, and a note if it is stored or cannot be shown."""
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
    # Providers reject an image whose type is not the one that it has, and servers often say another.
    if kind.lower().startswith("image/") and image_media_type(content) and len(data) <= MAX_IMAGE_CHARS:
        return [*notes, Image.from_bytes(content)]
    return notes or [f"[{label}, {kind}, {len(content):,} bytes: not shown]"]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:  # Path.open has no opener
        file.write(content)
