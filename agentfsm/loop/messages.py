"""Messages, images, tool calls, tool results, model replies and token usage, as immutable values.

A ``Message`` is one entry of a transcript. A ``Reply`` is what a model call returns: one assistant message and the
finish reason. Usage is in tokens, cost in USD.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice
from typing import Any, Final, NoReturn, cast, overload

from agentfsm.loop.canonical_json import call_signature
from agentfsm.loop.failures import Failure
from agentfsm.loop.read_only import (
    MAX_NESTING,
    FrozenDict,
    RefusesListChanges,
    freeze_field,
    quick_constructor,
    read_only,
)

MEDIA_TYPES: Mapping[str, re.Pattern[bytes]] = {
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
"""The media types that every provider accepts, and how such files begin.

Sources: https://docs.anthropic.com/en/docs/build-with-claude/vision,
https://platform.openai.com/docs/guides/images-vision
"""


def image_media_type(content: bytes) -> str | None:
    """The media type of an image that models accept, as its contents show it; None if it is nothing of the kind."""
    return next((name for name, head in MEDIA_TYPES.items() if head.match(content)), None)


@read_only
@dataclass(frozen=True, slots=True)
class Image:
    """An image.

    Attributes:
        media_type: ``image/png``, ``image/jpeg``, ``image/gif`` or ``image/webp``.
        data: Its bytes as base64 text.

    Raises:
        ValueError: The media type is another one, or the data is empty or not base64.
    """

    media_type: str
    data: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.media_type not in MEDIA_TYPES:
            raise ValueError(f"models accept {', '.join(MEDIA_TYPES)}, not {self.media_type!r}")
        try:
            # As strict as the strictest provider.
            if not binascii.a2b_base64(self.data.encode("ascii"), strict_mode=True):
                raise ValueError("the image is empty")
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("the image's data is not base64") from None

    @classmethod
    def from_bytes(cls, content: bytes, media_type: str | None = None) -> Image:
        """An image from the contents of a file.

        Args:
            content: The file's bytes.
            media_type: Its media type; detected from the contents if None.

        Raises:
            ValueError: The file is empty, or not of a type that models accept.
        """
        if media_type is None:
            media_type = image_media_type(content)
        if media_type is None:
            raise ValueError(f"the file is not an image that models accept: {', '.join(MEDIA_TYPES)}")
        return cls(media_type, base64.b64encode(content).decode())

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.data) // 4 * 3 - self.data[-2:].count("=")

    @property
    def text_placeholder(self) -> str:
        """The text that represents the image where only text is possible."""
        return f"[image, {self.media_type}, {self.size:,} bytes]"


PDF = "application/pdf"
"""The media type of the files that some providers accept as they are; the text of a text file goes into the prompt."""

_TEXT_TYPE = re.compile(r"text/[\w.+-]+|application/(?:[\w.+-]+\+)?(?:json|xml|yaml|toml|javascript|sql)")


@read_only
@dataclass(frozen=True, slots=True)
class File:
    """A file of a prompt: a PDF, or a text.

    A text reaches every model, as part of the prompt. A PDF is sent as it is, to providers that accept one.

    Attributes:
        media_type: ``application/pdf``, or that of a text, such as ``text/csv`` or ``application/json``.
        data: Its bytes as base64 text.
        filename: Its name, for the model; may be empty.

    Raises:
        ValueError: The media type is another one, or the data is empty, not base64, or not what the type says.
    """

    media_type: str
    data: str = field(repr=False)
    filename: str = ""

    def __post_init__(self) -> None:
        try:
            content = binascii.a2b_base64(self.data.encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("the file's data is not base64") from None
        if not content:
            raise ValueError("the file is empty")
        if self.media_type == PDF:
            if not content.startswith(b"%PDF-"):
                raise ValueError("the file is not a PDF")
        elif not self.is_text:
            raise ValueError(f"a prompt takes a PDF or a text as a file (and images as Image), not {self.media_type!r}")
        elif _decoded(content) is None:
            raise ValueError(f"the file is {self.media_type}, and its content is not UTF-8")

    @classmethod
    def from_bytes(cls, content: bytes, filename: str = "", media_type: str | None = None) -> File:
        """A file from its contents.

        Args:
            content: The file's bytes.
            filename: Its name.
            media_type: Its media type; by default a PDF, if it begins like one, or ``text/plain``.

        Raises:
            ValueError: The file is empty, or neither a PDF nor a text.
        """
        if media_type is None:
            media_type = PDF if content.startswith(b"%PDF-") else "text/plain"
            if media_type != PDF and _decoded(content) is None:
                raise ValueError("the file is neither a PDF nor a text in UTF-8; give an image as Image")
        return cls(media_type, base64.b64encode(content).decode(), filename)

    @property
    def is_text(self) -> bool:
        """Whether it is a text, which is part of the prompt."""
        return _TEXT_TYPE.fullmatch(self.media_type) is not None

    @property
    def text(self) -> str:
        """The text of a text file; an empty string for a PDF."""
        return _decoded(base64.b64decode(self.data)) or "" if self.is_text else ""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.data) // 4 * 3 - self.data[-2:].count("=")

    @property
    def text_placeholder(self) -> str:
        """The text that represents the file where only text is possible."""
        name = f" {self.filename!r}" if self.filename else ""
        return f"[file{name}, {self.media_type}, {self.size:,} bytes]"


def _decoded(content: bytes) -> str | None:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


MISSING_RESULT_TEXT = "Not run: the conversation continued without this call."


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a model stopped; the same values for all providers."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"


class _SignatureSlot:
    """Keeps a call's signature beside its fields, which alone are compared and stored."""

    __slots__ = ("_signature",)
    _signature: str


@read_only
@dataclass(frozen=True, slots=True)
class ToolCall(_SignatureSlot):
    """A model's request to run a tool.

    Attributes:
        id: The call's id, unique in its message.
        name: The tool's name.
        arguments: The arguments, a JSON object; frozen, as the calls of a run cannot be changed. A call whose
            arguments are nested more than 100 deep is never run.
        malformed: Why the arguments that the model sent are not a JSON object, or None. If set, ``arguments`` is
            empty and the tool is never run.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=FrozenDict)
    malformed: str | None = None

    def __post_init__(self) -> None:
        freeze_field(self, "arguments", MAX_NESTING)

    @property
    def signature(self) -> str:
        """``tool:hash`` for loop detection. ``_ui_message`` is left out, so that rewording it does not hide a repeat.

        Raises:
            TypeError: The arguments are not JSON.
            ValueError: They contain NaN, an infinity or themselves, or are nested too deeply.
        """
        known: str | None = getattr(self, "_signature", None)  # computed on first use, as few copies of a call need it
        if known is not None:
            return known
        signature = call_signature(self.name, self.arguments)
        object.__setattr__(self, "_signature", signature)  # the fields are frozen; this is not one of them
        return signature


@read_only
@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a transcript.

    Attributes:
        role: The author.
        content: Its text; may be empty when an assistant only calls tools.
        tool_calls: The calls of an assistant message.
        tool_call_id: For a tool message, the call that it answers. None for a tool message that answers no
            native call (envelope mode, kept feedback); providers get it as a user message.
        name: For a tool message, the tool. ``memory`` for a user message that begins with recalled memory, ``summary``
            for one that is a summary of what was left out.
        is_error: For a tool message, whether the call failed.
        extra: What the provider must get back unchanged in later requests (reasoning, signatures); JSON.
        images: The images of a user or tool message.
        files: The files of a user message that are not texts: PDFs.
        layout: Where its images and files stand among its texts, in the order of the prompt: for each, how long the
            content before it is, and its index in ``attachments``. Empty if they have no place of their own.

    Raises:
        ValueError: There is no such role.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    extra: Mapping[str, Any] | None = None
    images: tuple[Image, ...] = ()
    files: tuple[File, ...] = ()
    layout: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.extra is not None:
            freeze_field(self, "extra")
        if self.role.__class__ is not Role:  # here and below, for untyped callers
            object.__setattr__(self, "role", Role(self.role))
        if self.tool_calls.__class__ is not tuple or self.images.__class__ is not tuple:
            object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
            object.__setattr__(self, "images", tuple(self.images))

    @property
    def attachments(self) -> tuple[Image | File, ...]:
        """Its images and files."""
        return (*self.images, *self.files)

    @property
    def is_laid_out(self) -> bool:
        """Whether it is known where its images and files stand: the layout still fits the text."""
        ends = [end for end, _ in self.layout]
        return (
            bool(ends)
            and sorted(index for _, index in self.layout) == list(range(len(self.attachments)))
            and ends == sorted(ends)
            and all(end == 0 or self._is_boundary(end) for end in ends)
        )

    def _is_boundary(self, end: int) -> bool:
        """Whether a text of the content ends there: not if what it says was changed, as a secret in a journal is."""
        return 0 < end <= len(self.content) and self.content[end : end + 2] in ("", "\n\n")

    @property
    def parts(self) -> tuple[str | Image | File, ...]:
        """Its texts, images and files in their order; the text first if that is not known."""
        attachments, places = self.attachments, self.layout
        if not self.is_laid_out:
            places = tuple((len(self.content), index) for index in range(len(attachments)))
        found: list[str | Image | File] = []
        start = 0
        for end, index in (*places, (len(self.content), None)):
            text = self.content[start:end]
            if text := text.removeprefix("\n\n") if start else text:
                found.append(text)
            if index is not None:
                found.append(attachments[index])
            start = end
        return tuple(found)

    @classmethod
    def system(cls, content: str) -> Message:
        """A system message: instructions."""
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: str, images: Iterable[Image] = (), files: Iterable[File] = ()) -> Message:
        """A user message."""
        return cls(Role.USER, content, images=tuple(images), files=tuple(files))

    @classmethod
    def assistant(cls, content: str = "", tool_calls: Iterable[ToolCall] = ()) -> Message:
        """An assistant message."""
        return cls(Role.ASSISTANT, content, tuple(tool_calls))


class _Unread:
    """Stands for a message of a stored run that was not read yet: nobody may take it for one."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("the older messages of this run are not read yet: they are when it ends or waits")


UNREAD: Final[Any] = _Unread()
"""In the transcript of a run that was loaded from a snapshot, each message that was not read yet."""


@read_only
@dataclass(frozen=True, slots=True)
class Compaction:
    """What a run leaves out of its requests from a moment on, though its transcript has it.

    Attributes:
        start: Messages before this index are left out, apart from the system prompt.
        kept: The indexes of messages before it that stay: those with which the current turn began.
        text: A summary of what is left out, or an empty string.
    """

    start: int
    kept: tuple[int, ...] = ()
    text: str = ""


class Transcript(RefusesListChanges, Sequence[Message]):
    """An immutable view of the first messages of an append-only list, followed by a few more.

    It needs no copy of the conversation, and later messages do not show in it.
    """

    __slots__ = ("_head", "_stop", "_tail")

    def __init__(self, head: list[Message], stop: int, tail: tuple[Message, ...] = ()) -> None:
        self._head, self._stop, self._tail = head, stop, tail

    @property
    def tail(self) -> tuple[Message, ...]:
        """The messages after those of the list, in this request only."""
        return self._tail

    @property
    def stable_count(self) -> int:
        """How many messages, from the first, are the same in every later request."""
        return self._stop

    def continues(self, earlier: Transcript) -> bool:
        """Whether it begins with the stable messages of an earlier one of the same conversation."""
        return self._head is earlier._head and self._stop >= earlier._stop

    def __len__(self) -> int:
        return self._stop + len(self._tail)

    def __iter__(self) -> Iterator[Message]:
        return chain(islice(self._head, self._stop), self._tail)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(index)
        return self._head[position] if position < self._stop else self._tail[position - self._stop]

    def __add__(self, more: list[Message]) -> list[Message]:
        return [*self, *more]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Transcript, list)):
            return NotImplemented
        return list(self) == list(cast("Sequence[Message]", other))

    __hash__ = None  # type: ignore[assignment]  # a view of a list, compared by content

    def __copy__(self) -> list[Message]:
        return list(self)

    def __deepcopy__(self, memo: object) -> list[Message]:
        return list(self)  # messages cannot be changed

    def __reduce__(self) -> tuple[Any, ...]:
        return Transcript, (list(self), len(self))

    def __repr__(self) -> str:
        return f"Transcript({list(self)!r})"


def with_missing_results(messages: Iterable[Message]) -> list[Message]:
    """The messages, with a result added for each call that has none.

    The transcript of a suspended run has such calls, and providers reject a request with an unanswered call.
    """
    complete: list[Message] = []
    due: dict[str, str] = {}

    def add_missing_results() -> None:
        complete.extend(
            Message(Role.TOOL, MISSING_RESULT_TEXT, tool_call_id=i, name=n, is_error=True) for i, n in due.items()
        )
        due.clear()

    for message in messages:
        if message.role is Role.TOOL and message.tool_call_id is not None:
            due.pop(message.tool_call_id, None)
        else:
            add_missing_results()
            due.update((call.id, call.name) for call in message.tool_calls)
        complete.append(message)
    add_missing_results()
    return complete


def round_usd(amount: float) -> float:
    """A sum or difference of USD, to a billionth: ten times 0.1 is 1, though the sum of ten floats is a little less."""
    return round(amount, 9)


@read_only
@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls consumed, in tokens and USD; sums and differences are exact to a billionth of a USD.

    Attributes:
        input_tokens: Tokens of the prompt, including cached ones.
        output_tokens: Tokens of the reply.
        cached_tokens: Part of ``input_tokens``: read from the provider's cache.
        cost_usd: The price in USD; 0 if it is not known.
        reasoning_tokens: Part of ``output_tokens``: spent on reasoning.
        written_tokens: Part of ``input_tokens``: written to the provider's cache.
        unpriced_tokens: Tokens without a known price, which ``cost_usd`` does not include.
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
        """Input plus output tokens."""
        return self.input_tokens + self.output_tokens

    @property
    def known_cost_usd(self) -> float | None:
        """The cost in USD; None if no price is known."""
        return None if self.unpriced_tokens and not self.cost_usd else self.cost_usd

    @property
    def is_plausible(self) -> bool:
        """Whether one reply can have consumed this; a store could not hold the sum of much larger numbers."""
        return (
            0 <= self.input_tokens <= MAX_COUNT
            and 0 <= self.output_tokens <= MAX_COUNT
            and 0 <= self.cost_usd <= MAX_COUNT
            and 0 <= self.cached_tokens <= MAX_COUNT
            and 0 <= self.reasoning_tokens <= MAX_COUNT
            and 0 <= self.written_tokens <= MAX_COUNT
            and 0 <= self.unpriced_tokens <= 2 * MAX_COUNT
        )

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            round_usd(self.cost_usd + other.cost_usd),
            self.reasoning_tokens + other.reasoning_tokens,
            self.written_tokens + other.written_tokens,
            self.unpriced_tokens + other.unpriced_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens - other.input_tokens,
            self.output_tokens - other.output_tokens,
            self.cached_tokens - other.cached_tokens,
            round_usd(self.cost_usd - other.cost_usd),
            self.reasoning_tokens - other.reasoning_tokens,
            self.written_tokens - other.written_tokens,
            self.unpriced_tokens - other.unpriced_tokens,
        )


MAX_COUNT = 10**12
"""The largest number of tokens, or cost in USD, of one reply that is believed."""

NO_USAGE = Usage()
"""The usage of a model that reports none."""


@read_only
@dataclass(frozen=True, slots=True)
class Reply:
    """One complete reply of a model.

    Attributes:
        message: The assistant's message.
        finish_reason: Why the model stopped.
        usage: What the call consumed.
        refusal: The text of the model's refusal, or None.
        model: The model name that the provider reported, or an empty string.
        repairs: How the response broke its API's rules, and how it was read nevertheless; a run warns of each.

    Raises:
        ValueError: There is no such reason.
    """

    message: Message
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = NO_USAGE
    refusal: str | None = None
    model: str = ""
    repairs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.finish_reason.__class__ is not FinishReason:  # for untyped callers
            object.__setattr__(self, "finish_reason", FinishReason(self.finish_reason))


@read_only
@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call.

    Attributes:
        call_id: The call that it answers.
        name: The tool.
        content: The text that the model gets.
        status: ``done``, ``failed`` (with ``failure``), ``denied``, ``skipped`` (an earlier call ended the
            batch, or a hook skipped it) or ``cut_off`` (cancelled).
        failure: How the call failed, or None.
        error_class: For a failed call, the name of the exception's class, or an empty string.
        ending: For a control tool or one that ends the run: ``done``, ``unable`` or ``ask``; else None.
        value: The data of an ending (an output, a question...); JSON.
        retryable: Whether the call may be run again unchanged (its tool is idempotent and retryable).
        run_id: For the call of a sub-agent, the last run that worked on it, or an empty string.
        usage: For the call of a sub-agent, usage of its model calls since the call began or was resumed; else None.
        model_calls: For the call of a sub-agent, how many model calls these were.
        images: Images that the model gets with ``content``, which has a placeholder for each.
        withheld: Texts and numbers that became known to be secret by the call; they are withheld from then on.
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
    model_calls: int = 0
    withheld: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.value is not None:
            freeze_field(self, "value")


new_message = quick_constructor(Message, checks=False)
new_tool_call = quick_constructor(ToolCall, checks=False)
new_tool_result = quick_constructor(ToolResult, checks=False)
