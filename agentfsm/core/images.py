"""A picture that is shown to a model: base64 text, so that it goes through JSON as it is."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MEDIA_TYPES", "Image"]

MEDIA_TYPES: Mapping[str, re.Pattern[bytes]] = {
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
"""What every provider takes, and how such a file begins (https://docs.anthropic.com/en/docs/build-with-claude/vision,
https://platform.openai.com/docs/guides/images-vision)."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture.

    Attributes:
        media_type: ``image/png``, ``image/jpeg``, ``image/gif`` or ``image/webp``.
        data: Its bytes as base64 text.

    Raises:
        ValueError: It is of another type, or the data is empty or no base64.
    """

    media_type: str
    data: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.media_type not in MEDIA_TYPES:
            raise ValueError(f"models see {', '.join(MEDIA_TYPES)}, and not {self.media_type!r}")
        try:
            # As strict as the strictest of those who read it later.
            if not binascii.a2b_base64(self.data.encode("ascii"), strict_mode=True):
                raise ValueError("the image is empty")
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("the image's data is no base64") from None

    @classmethod
    def of(cls, content: bytes, media_type: str | None = None) -> Image:
        """The picture that a file holds.

        Args:
            content: The file's bytes.
            media_type: Its type; else how it begins tells.

        Raises:
            ValueError: It is empty, or none of the types that models see.
        """
        if media_type is None:
            begins = (name for name, head in MEDIA_TYPES.items() if head.match(content))
            media_type = next(begins, None)
        if media_type is None:
            raise ValueError(f"the file is no picture that models see: {', '.join(MEDIA_TYPES)}")
        return cls(media_type, base64.b64encode(content).decode())

    @property
    def size(self) -> int:
        """How many bytes its file has."""
        return len(self.data) // 4 * 3 - self.data[-2:].count("=")

    @property
    def note(self) -> str:
        """What stands for it in a text."""
        return f"[image, {self.media_type}, {self.size:,} bytes]"
