"""What the wires share: the request and response rules that do not depend on the wire.

Each function that reads a response accepts any value, since the response is untrusted input, and either returns a clean
one or says what is wrong with it.

A transcript only grows during a run, so the messages that have been encoded are cached in ``ModelRequest.cache`` and
each request encodes only the new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, cast

from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.loop.messages import MAX_COUNT, File, FinishReason, Image, Message, Role, ToolCall, Transcript, Usage
from agentfsm.loop.model import ModelRequest, ToolSpec
from agentfsm.loop.prompts import as_user_message
from agentfsm.models.wire_json import as_object, dumps, loads

# -- parts of a request -----------------------------------------------------------------------------------

TOOL_CHOICE_MODES = ("auto", "none", "required")
"""The values of ``ModelSettings.tool_choice`` that do not name a tool."""


def safe_tool_name(name: str) -> str:
    """A tool name that every provider accepts.

    A model may call ``"foo.bar"``. Every later request repeats that call, and a provider that validates names
    would reject the whole transcript because of it.
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unnamed"


def function_spec(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's APIs and Ollama describe a function."""
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def tool_choice(choice: str | None, tools: Iterable[ToolSpec]) -> str | None:
    """The tool choice to send: one of ``TOOL_CHOICE_MODES``, or the name of a tool of the request, or None."""
    return choice if choice in TOOL_CHOICE_MODES or choice in {tool.name for tool in tools} else None


def own_extra(message: Message, key: str, origin: str) -> dict[str, Any]:
    """What a wire stored in ``Message.extra``, if the message came from the model that is called now; else empty.

    Args:
        message: The message.
        key: The wire's key in ``extra``.
        origin: The server and model that is called. Reasoning and signatures are valid only for their origin.
    """
    extra = as_object((message.extra or {}).get(key))
    return extra if extra.get("voice") == origin else {}


IMAGES_OMITTED = "[Images are not shown here.]"


def visible_message(message: Message, images: bool, files: bool = False) -> Message:
    """The message as the model sees it.

    A tool message without a call id is for a model that was given no tools: it becomes a labelled user message.
    Images are replaced by a note in such a message, and where the model does not accept any. So are files.
    """
    shown = as_user_message(message)
    if shown.files and not files:
        notes = "\n".join(file.text_placeholder for file in shown.files)
        message = shown = replace(shown, files=(), content=f"{shown.content}\n{notes}".lstrip())
    if not shown.images or (images and shown is message):
        return shown
    return replace(shown, images=(), content=f"{shown.content}\n{IMAGES_OMITTED}".lstrip())


def refuse_parts(messages: Sequence[Message], images: bool, files: bool) -> None:
    """Refuse a prompt with a part that the model does not accept; what it has answered before was taken then.

    Raises:
        ProviderError: There is such a part in what the user said since the last reply.
    """
    for message in reversed(messages):
        if message.role is Role.ASSISTANT:
            return
        if message.role is not Role.USER:
            continue
        if message.files and not files:
            raise ProviderError(
                f"the model is not known to accept files, and the prompt has {message.files[0].text_placeholder}: give "
                "its text or images of its pages, or use another model; where chat completions take it all the same, "
                "set ModelSettings(files=True)"
            )
        if message.images and not images:
            raise ProviderError(
                f"the model accepts no images (ModelSettings(images=False)), and the prompt has "
                f"{message.images[0].text_placeholder}: use a model that does"
            )


def encode_parts(
    message: Message,
    text: Callable[[str], dict[str, Any]],
    image: Callable[[Image], dict[str, Any]],
    file: Callable[[File], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The texts, images and files of a message, in their order."""
    return [
        text(part) if isinstance(part, str) else image(part) if isinstance(part, Image) else file(part)
        for part in message.parts
    ]


def data_url(image: Image | File) -> str:
    """An image or a file as a ``data:`` URL."""
    return f"data:{image.media_type};base64,{image.data}"


def filename_of(file: File) -> str:
    """The name of a file, for an API that demands one."""
    return file.filename or "file.pdf"


def labelled_images(messages: Iterable[Message]) -> Iterable[tuple[str, Image]]:
    """Each image of consecutive tool messages, after a text that says which call it came from."""
    for message in messages:
        for number, image in enumerate(message.images, 1):
            which = f", image {number} of {len(message.images)}" if len(message.images) > 1 else ""
            yield f"From {message.name or 'a tool'} (call {message.tool_call_id}{which}):", image


# -- parts of a response ----------------------------------------------------------------------------------


NO_FINISH_REASON = "the server gave no finish reason; its reply is complete otherwise and was taken as finished"
"""The repair of a reply without a finish reason, in ``Reply.repairs``."""


def repairs_of_end(reason: str, text: str | None, calls: Collection[ToolCall]) -> tuple[str, ...]:
    """The repairs of a response that arrived as a whole, or was streamed to its last event.

    Servers omit the finish reason of complete replies (https://github.com/openai/openai-openapi/pull/20). Such a
    reply is taken if there is something in it and each of its calls has complete arguments, so nothing is lost.

    Raises:
        TransientProviderError: There is no finish reason, and nothing in the reply, or a call that is cut off.
    """
    if reason:
        return ()
    if (text or calls) and not any(call.malformed for call in calls):
        return (NO_FINISH_REASON,)
    raise TransientProviderError("the server does not say that the reply has ended, and there is no complete reply")


def final_finish_reason(stated: FinishReason, calls: Collection[ToolCall], refusal: object = None) -> FinishReason:
    """The finish reason of a reply, given what else is in it.

    Args:
        stated: The reason that the server gave. Servers disagree on the one for tool calls, so a normal stop
            with calls is ``TOOL_CALLS``.
        calls: The tool calls of the reply.
        refusal: The text of a refusal, if there is one; it overrides every other reason.
    """
    if refusal:
        return FinishReason.REFUSAL
    return FinishReason.TOOL_CALLS if stated is FinishReason.STOP and calls else stated


def token_count(usage: Mapping[str, Any], key: str) -> int:
    """A number of tokens; 0 where the field is missing, or is not a positive integer that a model can have counted."""
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else 0


def openai_usage(value: object, input_key: str, output_key: str, cost_usd: float = 0.0) -> Usage:
    """The usage that an OpenAI API reports.

    Args:
        value: The ``usage`` object of the response.
        input_key: The name of its prompt count; the details have the same name with ``_details``.
        output_key: The name of its completion count.
        cost_usd: The cost that the server reports, in USD; 0 if it reports none.
    """
    usage = as_object(value)
    prompt = as_object(usage.get(f"{input_key}_details"))
    return mark_unpriced(
        Usage(
            input_tokens=token_count(usage, input_key),
            output_tokens=token_count(usage, output_key),
            cached_tokens=token_count(prompt, "cached_tokens"),
            written_tokens=token_count(prompt, "cache_write_tokens"),
            reasoning_tokens=token_count(as_object(usage.get(f"{output_key}_details")), "reasoning_tokens"),
            cost_usd=cost_usd,
        )
    )


def mark_unpriced(usage: Usage) -> Usage:
    """The usage, with its tokens counted as unpriced if the server reported no cost."""
    return usage if usage.cost_usd else replace(usage, unpriced_tokens=usage.total_tokens)


def call_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all tool calls in a transcript."""
    return {call.id for message in messages for call in message.tool_calls}


def parse_tool_calls(
    raw: Iterable[tuple[object, object, object]], used_ids: Collection[str] = ()
) -> tuple[ToolCall, ...]:
    """The tool calls of a reply, from the id, name and arguments of each as they came over the wire.

    An id that is missing, repeated, or already used by an earlier reply (``used_ids``) is replaced by the first
    free one of ``call_1``, ``call_2``... So the same reply to the same transcript always gets the same ids, and
    a result cannot be taken for the answer to another call.
    """
    raw = list(raw)
    reserved = {*used_ids, *(id_ for id_, _, _ in raw if isinstance(id_, str))}
    fresh = (candidate for n in count(1) if (candidate := f"call_{n}") not in reserved)
    seen = set(used_ids)
    calls: list[ToolCall] = []
    for id_, name, arguments in raw:
        call_id = id_ if isinstance(id_, str) and id_ and id_ not in seen else next(fresh)
        seen.add(call_id)
        parsed, malformed = _parse_arguments(arguments)
        if not isinstance(name, str) or not name:
            name, parsed, malformed = "unnamed", {}, "the call names no tool"
        calls.append(ToolCall(call_id, name, parsed, malformed))
    return tuple(calls)


def _parse_arguments(value: object) -> tuple[dict[str, Any], str | None]:
    """The arguments of a call, and why they are invalid, if they are."""
    if isinstance(value, str):
        if not value.strip():
            return {}, None
        try:
            value = loads(value)
        except ValueError as error:
            return {}, f"they are not JSON: {error}"
    if value is None:
        return {}, None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value), None
    return {}, f"they are a JSON {type(value).__name__}, not an object"


# -- incremental encoding ---------------------------------------------------------------------------------


class MessageEncoder(Protocol):
    """Encodes a transcript for a wire as the transcript grows."""

    def add(self, message: Message) -> None:
        """Encode a message that every later request repeats."""
        ...

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON texts of all items, to be joined with commas; ``tail`` is encoded for this request only."""
        ...


class PerMessageEncoder:
    """Encodes each message into items that no later message changes.

    Args:
        encode_message: Encodes a message into items.
        images: Whether the model accepts images.
        files: Whether the model accepts PDFs.
        encode_after_results: Encodes what follows the last of several consecutive tool messages with images; by
            default nothing does.
    """

    def __init__(
        self,
        encode_message: Callable[[Message], list[dict[str, Any]]],
        images: bool,
        encode_after_results: Callable[[list[Message]], list[dict[str, Any]]] | None = None,
        files: bool = False,
    ) -> None:
        self._encode_message = encode_message
        self._images = images
        self._files = files
        self._encode_after_results = encode_after_results
        self._pending_results: list[Message] = []
        self._encoded: list[str] = []

    def add(self, message: Message) -> None:
        """Encode a message that every later request repeats."""
        self._encoded += map(dumps, self.next_items(message))

    def next_items(self, message: Message) -> list[dict[str, Any]]:
        """The items of a message that every later request repeats, after those that it completes."""
        return self._encode_one(message, self._pending_results)

    def rest(self, tail: Iterable[Message]) -> list[dict[str, Any]]:
        """The items of the messages of this request only, after those that they complete."""
        return self._encode_rest(tail, self._pending_results.copy())

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON texts of all items; ``tail`` is encoded for this request only."""
        new = list(map(dumps, self.rest(tail)))
        if len(self._encoded) > 1:
            self._encoded = [",".join(self._encoded)]
        return [*self._encoded, *new]

    def encode_all(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """The items of a whole transcript."""
        return self._encode_rest(messages, [])

    def _encode_one(self, message: Message, pending: list[Message]) -> list[dict[str, Any]]:
        """The items of a message, after those that were pending until the end of consecutive tool messages."""
        items = self._encode_message(visible_message(message, self._images, self._files))
        if self._encode_after_results is None:
            return items
        if message.role is Role.TOOL and message.tool_call_id is not None:
            if message.images:
                pending.append(message)
            return items
        due = self._encode_after_results(pending) if pending else []
        pending.clear()
        return [*due, *items]

    def _encode_rest(self, messages: Iterable[Message], pending: list[Message]) -> list[dict[str, Any]]:
        items = [item for message in messages for item in self._encode_one(message, pending)]
        if pending and self._encode_after_results is not None:
            items += self._encode_after_results(pending)
        return items


class RequestCache:
    """The encoded part of a transcript."""

    def __init__(self, transcript: Transcript, encoder: MessageEncoder) -> None:
        self.encoder = encoder
        self.system: list[Message] = []
        self.call_ids: set[str] = set()
        self._encoded = transcript
        self._encoded_count = 0

    def is_prefix_of(self, transcript: Transcript) -> bool:
        """Whether a transcript begins with the messages that are encoded here."""
        return transcript.continues(self._encoded)

    def extend(self, transcript: Transcript) -> None:
        """Encode the stable messages of a transcript that are not encoded yet."""
        for message in transcript[self._encoded_count : transcript.stable_count]:
            self.encoder.add(message)
            if message.role is Role.SYSTEM:
                self.system.append(message)
            self.call_ids.update(call.id for call in message.tool_calls)
        self._encoded, self._encoded_count = transcript, transcript.stable_count


def cached_encoding(
    request: ModelRequest, key: object, new_encoder: Callable[[], MessageEncoder]
) -> tuple[RequestCache, list[Message]]:
    """The encoded stable part of a request's transcript, and the messages after it."""
    messages = request.messages
    transcript = messages if isinstance(messages, Transcript) else Transcript(list(messages), len(messages))
    cached = request.cache.get(key)
    if not isinstance(cached, RequestCache) or not cached.is_prefix_of(transcript):
        cached = request.cache[key] = RequestCache(transcript, new_encoder())
    cached.extend(transcript)
    return cached, list(transcript.tail)


def join_body(body: dict[str, Any], key: str, encoded_items: list[str]) -> bytes:
    """The JSON text of a request body, with items that are already encoded as the list under ``key``."""
    at = list(body).index(key)
    items = list(body.items())
    before = "".join(f"{dumps(k)}:{dumps(v)}," for k, v in items[:at])
    after = "".join(f",{dumps(k)}:{dumps(v)}" for k, v in items[at + 1 :])
    text = "".join(("{", before, dumps(key), ":[", ",".join(encoded_items), "]", after, "}"))
    return text.encode(errors="replace")
