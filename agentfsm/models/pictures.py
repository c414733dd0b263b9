"""Which pictures of a message a wire sends, and what it says in place of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentfsm.core.images import Image
from agentfsm.core.messages import Message, Role

__all__ = ["data_url", "seen"]

NOT_SHOWN = "[Pictures are not shown here.]"


def seen(message: Message, images: bool) -> Message:
    """The message as the model sees it.

    Pictures are left out, with a word that they are, where the model takes none, and where a tool's message
    answers no call of the wire: those are for models that were given no tools, and are all text.

    Args:
        message: The message.
        images: Whether the model takes pictures.
    """
    if not message.images or (images and (message.role is not Role.TOOL or message.tool_call_id is not None)):
        return message
    return replace(message, images=(), content=f"{message.content}\n{NOT_SHOWN}".lstrip())


def data_url(image: Image) -> str:
    """A picture as a ``data:`` address."""
    return f"data:{image.media_type};base64,{image.data}"


def shown_by(messages: Iterable[Message]) -> Iterable[tuple[str, Image]]:
    """Each picture of a run of tools' messages, and the words that say whose it is."""
    for message in messages:
        for place, image in enumerate(message.images, 1):
            which = f", image {place} of {len(message.images)}" if len(message.images) > 1 else ""
            yield f"From {message.name or 'a tool'} (call {message.tool_call_id}{which}):", image
