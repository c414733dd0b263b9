"""Messages, images, tool calls, tool results, model replies and token usage, as immutable values.

A ``Message`` is one entry of a transcript. A ``Reply`` is what a model call returns: one assistant message and the finish
reason. Sizes are in tokens, money is in USD.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import Failure

__all__ = [
    "MEDIA_TYPES",
    "FinishReason",
    "Image",
    "Message",
    "Reply",
    "Role",
    "ToolCall",
    "ToolResult",
    "Usage",
    "is_secret_placeholder",
    "secret_placeholder",
    "with_missing_results",
]


_SECRET_PLACEHOLDER = re.compile(r"\[secret [0-9a-f]{32}\]")


def secret_placeholder(digest: str) -> str:
    """What stands in place of a secret whose salted hash (hex) is this."""
    return f"[secret {digest[:32]}]"


def is_secret_placeholder(value: object) -> bool:
    """Whether a value stands in place of a secret that was not kept."""
    return isinstance(value, str) and _SECRET_PLACEHOLDER.fullmatch(value) is not None


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
    def from_bytes(cls, content: bytes, media_type: str | None = None) -> Image:
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
    def text_placeholder(self) -> str:
        """What stands for it in a text."""
        return f"[image, {self.media_type}, {self.size:,} bytes]"


MISSING_RESULT_TEXT = "Not run: the conversation went on without this call."


class Role(StrEnum):
    """Who said a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a model stopped, in one vocabulary for all wires."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's wish to run a tool.

    Attributes:
        id: The wire's id of the call, unique in its message.
        name: The tool's name.
        arguments: The arguments, a JSON object.
        malformed: Why the arguments that came over the wire are no JSON object, or None; ``arguments`` is
            then empty and the tool is never run.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    malformed: str | None = None

    @property
    def signature(self) -> str:
        """``tool:hash`` for loop detection; ``_ui_message`` is left out, so rewording hides no repeat.

        Raises:
            TypeError: The arguments are not JSON.
            ValueError: They contain NaN, an infinity or themselves.
            RecursionError: They are nested too deeply.
        """
        arguments: Mapping[str, Any] = self.arguments
        if "_ui_message" in arguments or arguments.__class__ is not dict:
            arguments = {k: v for k, v in arguments.items() if k != "_ui_message"}
        return f"{self.name}:{hashlib.sha256(canonical_json(arguments, ensure_ascii=True).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a transcript.

    Attributes:
        role: Who said it.
        content: Its text; may be empty where an assistant only calls tools.
        tool_calls: An assistant's calls.
        tool_call_id: For a tool's message, the call that it answers. None marks a tool message that
            answers no call of the wire (envelope mode, kept feedback); wires send it as a user message.
        name: For a tool's message, the tool.
        is_error: For a tool's message, whether the call failed.
        extra: What a wire needs back unchanged in later requests (reasoning, signatures); JSON.
        images: For a user's or a tool's message, the pictures that belong to it.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    extra: Mapping[str, Any] | None = None
    images: tuple[Image, ...] = ()

    @classmethod
    def system(cls, content: str) -> Message:
        """A message with instructions."""
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: str, images: Iterable[Image] = ()) -> Message:
        """A message of the person."""
        return cls(Role.USER, content, images=tuple(images))

    @classmethod
    def assistant(cls, content: str = "", tool_calls: tuple[ToolCall, ...] = ()) -> Message:
        """A message of the model."""
        return cls(Role.ASSISTANT, content, tuple(tool_calls))


def with_missing_results(messages: Iterable[Message]) -> list[Message]:
    """The messages with a result for each call that has none, as in the transcript of a suspended run.

    A provider refuses a request in which a call stands unanswered.
    """
    whole: list[Message] = []
    due: dict[str, str] = {}

    def add_missing_results() -> None:
        whole.extend(
            Message(Role.TOOL, MISSING_RESULT_TEXT, tool_call_id=i, name=n, is_error=True) for i, n in due.items()
        )
        due.clear()

    for message in messages:
        if message.role is Role.TOOL and message.tool_call_id is not None:
            due.pop(message.tool_call_id, None)
        else:
            add_missing_results()
            due.update((call.id, call.name) for call in message.tool_calls)
        whole.append(message)
    add_missing_results()
    return whole


@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls used up, in tokens and USD.

    Attributes:
        input_tokens: Tokens of the prompt, cached ones included.
        output_tokens: Tokens of the reply.
        cached_tokens: Those of ``input_tokens`` that came from the provider's cache.
        cost_usd: The price in USD; 0 where it is not known.
        reasoning_tokens: Those of ``output_tokens`` that the model spent on thinking.
        written_tokens: Those of ``input_tokens`` that were written to the provider's cache.
        unpriced_tokens: Those for which no price was known, so that ``cost_usd`` does not count them.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    reasoning_tokens: int = 0
    written_tokens: int = 0
    unpriced_tokens: int = field(default=0, compare=False)

    @property
    def total_tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost_usd + other.cost_usd,
            self.reasoning_tokens + other.reasoning_tokens,
            self.written_tokens + other.written_tokens,
            self.unpriced_tokens + other.unpriced_tokens,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole reply of a model.

    Attributes:
        message: The assistant's message.
        finish_reason: Why the model stopped.
        usage: What the call used up.
        refusal: The model's own words of refusal, or None.
        model: The name under which the provider answered, or an empty string.
    """

    message: Message
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = Usage()
    refusal: str | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one tool call.

    Attributes:
        call_id: The call that it answers.
        name: The tool.
        content: What the model is told.
        status: ``done``, ``failed`` (with ``failure``), ``denied``, ``skipped`` (an earlier call of the
            batch ended it, or a hook said so) or ``cut_off`` (by cancellation).
        failure: How the call failed, or None.
        error_class: For a failed call, the name of the exception's class, or an empty string.
        ending: For a control tool or one that ends the run: ``done``, ``unable`` or ``ask``, or None.
        value: What an ending brings along (an output, a question...); JSON.
        retryable: Whether the call may be run again as it stands (its tool is idempotent and retryable).
        run_id: For a sub-agent's call, the last run that worked on it, or an empty string.
        usage: For a sub-agent's call, what its model calls used up since the call began or went on, or None.
        images: Pictures that the model is shown beside ``content``, which has a note of each.
    """

    call_id: str
    name: str
    content: str
    status: str = "done"
    failure: Failure | None = None
    error_class: str = ""
    ending: str | None = None
    value: Any = None
    retryable: bool = False
    run_id: str = ""
    usage: Usage | None = None
    images: tuple[Image, ...] = ()
