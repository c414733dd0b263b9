"""Conformance checks for models: what every ``Model`` and ``StreamingModel`` must do, as functions that take any model.

::

    @asynccontextmanager
    async def open_model(*turns):
        with my_fake_provider(turns) as address:
            yield MyModel(address)

    @pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
    def test_my_model(check):
        asyncio.run(check(open_model))

A check takes a function that opens the model. The provider behind it takes the given turns, one per call, and repeats
the last one: it replies, fails, stays silent or breaks off. What a model or its provider cannot do is left out by name,
``checks(without=["usage"])``. ``checks(live=True)`` are those that pass whatever is replied: a model whose provider
follows no script ignores the turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, cast, get_args

from agentfsm.errors import ConfigurationError, ContextOverflowError, ModelError, ProviderError, TransientProviderError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import FinishReason, Image, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import (
    Model,
    ModelRequest,
    StreamChunk,
    StreamingModel,
    StreamRestart,
    TextChunk,
    ToolCallChunk,
    ToolSpec,
    can_stream,
    secrets_of,
)

__all__ = ["CutOff", "Feature", "ModelCheck", "OpenModel", "Silence", "Turn", "checks"]

Feature = Literal[
    "content_filter", "cut_off", "error_details", "event_loops", "images", "streaming", "tools", "truncation", "usage"
]
"""What a model, or the provider behind it, may lack.

``content_filter`` and ``truncation`` are finish reasons, ``cut_off`` is a reply that breaks off, ``error_details`` are
an error's status and its time to wait, ``event_loops`` is work in more than one event loop.
"""


class Silence:
    """A turn of a provider that receives the request and never answers; it calls ``receive`` when it has it."""

    def __init__(self) -> None:
        self._received = Future[None]()

    def receive(self) -> None:
        """Note that the provider has the request; may be called from any thread."""
        if not self._received.done():
            self._received.set_result(None)

    async def wait_for(self, task: asyncio.Task[object]) -> None:
        """Wait until the provider has the request, or the call that should make it has ended."""
        either: set[asyncio.Future[Any]] = {task, asyncio.wrap_future(self._received)}
        await asyncio.wait(either, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True)
class CutOff:
    """A turn of a provider whose connection breaks in the middle of a reply.

    Attributes:
        text: How the reply begins, as far as it is sent.
    """

    text: str


Turn = Reply | ModelError | Silence | CutOff
"""What a provider does about one call: the reply, or the error, with which the call is to end; or ``Silence``..."""

OpenModel = Callable[..., AbstractAsyncContextManager[Model]]
"""Called with ``Turn`` objects, opens a model whose provider takes these turns."""

ModelCheck = Callable[[OpenModel], Coroutine[Any, Any, None]]

_PATIENCE_S = 20.0
"""Seconds after which a check fails that waits; no check is that slow unless the model hangs."""

_HELLO = Reply(Message.assistant("Hello, world."), usage=Usage(11, 7))
_REQUEST = ModelRequest((Message.system("Be brief."), Message.user("Say hello.")))
_TOOLS = (
    ToolSpec("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}}),
    ToolSpec("now", "The time.", {"type": "object", "properties": {}}),
)
_TOOL_REQUEST = replace(_REQUEST, tools=_TOOLS)
_TEXTS = (
    "Hello.",
    "naïve 漢字 עברית 👩‍👩‍👧 \U0001f600 e\u0301 \u2028 \ufeff",
    'A "quoted" line,\nanother\tone, a \\ and { "json": [1, 2] }.',
    "# Title\n\n- one\n- two\n\n```python\nprint('hi')\n```",
    "long " * 5000 + "end",
)


def _require(condition: object, problem: str) -> None:
    """Like ``assert``, also under ``python -O``."""
    if not condition:
        raise AssertionError(problem)


@asynccontextmanager
async def _leaving_no_task() -> AsyncGenerator[None]:
    """Require that all tasks that the block starts end with it, or soon after."""
    before = asyncio.all_tasks()
    yield
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while left := asyncio.all_tasks() - before:
        _require(asyncio.get_running_loop().time() < deadline, f"the model left tasks behind: {left}")
        await asyncio.sleep(0.001)


def _streaming(model: Model) -> StreamingModel:
    _require(can_stream(model), "the model has no method `stream`; if it cannot stream: checks(without=['streaming'])")
    return cast("StreamingModel", model)


async def _aclose(stream: AsyncIterator[object]) -> None:
    if isinstance(stream, AsyncGenerator):
        await cast("AsyncGenerator[object]", stream).aclose()


async def _stream(model: Model, request: ModelRequest) -> tuple[list[StreamChunk], Reply]:
    """The chunks of a stream and its reply; requires that the reply comes last, once."""
    chunks, reply = list[StreamChunk](), None
    async with asyncio.timeout(_PATIENCE_S):
        async for part in _streaming(model).stream(request):
            _require(reply is None, "the stream goes on after its reply")
            if isinstance(part, Reply):
                reply = part
                continue
            known = isinstance(cast("object", part), StreamChunk)
            _require(known, f"a stream yields chunks and a Reply, not {type(part).__name__}")
            chunks.append(part)
    if reply is None:
        raise AssertionError("the stream ended without a Reply")
    return chunks, _valid(reply)


async def _reply(model: Model, request: ModelRequest) -> Reply:
    async with asyncio.timeout(_PATIENCE_S):
        return _valid(await model.reply(request))


def _valid(reply: Any) -> Reply:
    """A reply, if it is one that a run can use and a journal can store; untyped models return anything."""
    if not isinstance(reply, Reply):
        raise AssertionError(f"a model returns a Reply, not {type(reply).__name__}")
    message: Any = reply.message
    usage, reason = reply.usage, cast("Any", reply.finish_reason)
    _require(message.role is Role.ASSISTANT, f"the message of a reply is the assistant's, not of {message.role!r}")
    _require(isinstance(message.content, str), f"the content is a string, not {message.content!r}")
    _require(isinstance(reason, FinishReason), f"no FinishReason: {reason!r}")
    ids = [call.id for call in message.tool_calls]
    _require(all(ids) and len({*ids}) == len(ids), f"each call of a reply has an id of its own, not {ids}")
    for call in message.tool_calls:
        _require(call.name and isinstance(call.name, str), f"a call names its tool, not {call.name!r}")
        _require(isinstance(call.arguments, Mapping), f"the arguments of a call are an object, not {call.arguments!r}")
    counts = {name: getattr(usage, name) for name in ("input_tokens", "output_tokens", "cached_tokens")}
    _require(all(isinstance(n, int) and n >= 0 for n in counts.values()), f"the usage is not in tokens: {counts}")
    _require(isfinite(usage.cost_usd) and usage.cost_usd >= 0, f"the cost is not an amount: {usage.cost_usd!r}")
    stored = [message.content, message.extra, [call.arguments for call in message.tool_calls]]
    canonical_json(cast("Any", stored)).encode()
    return reply


def _calls(reply: Reply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(canonical_json(cast("Any", call.arguments)))) for call in reply.message.tool_calls]


def _require_equal(reply: Reply, expected: Reply) -> None:
    """Require the text, calls and finish reason of the expected reply; ids are the provider's own."""
    text, calls = expected.message.content, _calls(expected)
    _require(reply.message.content == text, f"the text is {reply.message.content!r}, not {text!r}"[:400])
    _require(_calls(reply) == calls, f"the calls are {_calls(reply)}, not {calls}")
    reason = expected.finish_reason
    _require(reply.finish_reason is reason, f"the finish reason is {reply.finish_reason!r}, not {reason!r}")


def _require_chunks_of(chunks: list[StreamChunk], reply: Reply) -> None:
    """Require that the chunks since the last restart add up to the reply, if there are any of their kind."""
    restarts = [place for place, chunk in enumerate(chunks) if isinstance(chunk, StreamRestart)]
    last = chunks[restarts[-1] + 1 :] if restarts else chunks
    texts = [chunk.text for chunk in last if isinstance(chunk, TextChunk)]
    text = reply.message.content
    if reply.refusal is None and texts:
        _require("".join(texts) == text, f"the chunks add up to {''.join(texts)!r}, the reply is {text!r}"[:400])
    arguments = dict[int, str]()
    for chunk in last:
        if isinstance(chunk, ToolCallChunk):
            arguments[chunk.index] = arguments.get(chunk.index, "") + chunk.arguments
    if arguments:
        streamed = [json.loads(arguments[index] or "{}") for index in sorted(arguments)]
        given = [value for _, value in _calls(reply)]
        _require(streamed == given, f"the chunks of the calls add up to {streamed}, the reply has {given}")


def _with_calls(*calls: ToolCall, text: str = "") -> Reply:
    return Reply(Message.assistant(text, calls), FinishReason.TOOL_CALLS, Usage(11, 7))


# -- whatever is replied -------------------------------------------------------------------------------------


async def has_a_name(open_model: OpenModel) -> None:
    """The name is a line of text, always the same, and neither it nor the ``repr`` contains a secret."""
    async with open_model(_HELLO) as model:
        name: Any = model.name
        _require(isinstance(name, str) and name.strip() and name.isprintable(), f"{name!r} is not a name")
        await _reply(model, _REQUEST)
        _require(model.name == name, f"the name has changed to {model.name!r}")
        hidden = [secret.get_secret_value() for secret in secrets_of(model)]
        _require(not any(secret in name + repr(model) for secret in hidden), "the name or repr shows a secret")


async def replies(open_model: OpenModel) -> None:
    """A reply is one that a run can use and a journal can store; the request is not changed."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        request = replace(_TOOL_REQUEST, max_output_tokens=500)
        before = deepcopy(request)
        await _reply(model, request)
        _require(request == before, "the model has changed the request")


async def accepts_every_message(open_model: OpenModel) -> None:
    """A transcript may have calls, results, failed and empty results, blank texts and any language."""
    calls = (ToolCall("call_a", "weather", {"city": "Łódź"}), ToolCall("call_b", "now"))
    messages = (
        Message.system("Be brief."),
        Message.user("How is the weather? 👋"),
        Message.assistant("", calls),
        Message(Role.TOOL, "", tool_call_id="call_a", name="weather"),
        Message(Role.TOOL, "no clock", tool_call_id="call_b", name="now", is_error=True),
        Message.assistant("I do not know. " + _TEXTS[1]),
        Message.user("Try again."),
        Message.assistant("Once more.", (ToolCall("call_c", "now", {"zone": {"hours": [1, None, 1.5, True]}}),)),
        Message(Role.TOOL, "12:00", tool_call_id="call_c", name="now"),
        Message(Role.TOOL, "A note that answers no call.", name="now"),
        Message.user("And?"),
    )
    async with open_model(_HELLO) as model:
        await _reply(model, ModelRequest(messages, _TOOLS))
        await _reply(model, ModelRequest(messages[-1:]))


async def accepts_an_output_schema(open_model: OpenModel) -> None:
    """A request may ask for JSON of a schema; a model that cannot be told so ignores it."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    messages = (Message.system(f"Answer with JSON of this schema: {json.dumps(schema)}"), Message.user("One."))
    async with open_model(Reply(Message.assistant('{"n":1}'))) as model:
        await _reply(model, ModelRequest(messages, output_schema=schema))
        await _reply(model, ModelRequest(messages, _TOOLS, output_schema=schema, output_name="a number"))


async def streams(open_model: OpenModel) -> None:
    """A stream is any number of chunks and then the reply, once; text and arguments add up to the reply's."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        for request in (_REQUEST, _TOOL_REQUEST):
            _require_chunks_of(*await _stream(model, request))


async def can_be_left_in_the_middle(open_model: OpenModel) -> None:
    """A stream may be closed after its first part; the next call is not affected."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        stream = _streaming(model).stream(_REQUEST)
        async with asyncio.timeout(_PATIENCE_S):
            async for _ in stream:
                break
            await _aclose(stream)
        await _stream(model, _REQUEST)


async def can_be_cancelled_at_any_time(open_model: OpenModel) -> None:
    """A call that is cancelled ends as cancelled, unless it has just ended; the next call is not affected."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        for steps in (0, 1, 2, 5, 20):
            task = asyncio.ensure_future(model.reply(_REQUEST))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=_PATIENCE_S)
            _require(task.done(), "a call goes on although it was cancelled")
            if not task.cancelled():
                _valid(task.result())
        await _reply(model, _REQUEST)


async def makes_calls_at_once(open_model: OpenModel) -> None:
    """Several calls may be made at the same time."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        await asyncio.gather(*(_reply(model, _REQUEST) for _ in range(8)))


async def can_be_closed(open_model: OpenModel) -> None:
    """A model with ``aclose`` may be closed more than once, and called again."""
    async with open_model(_HELLO) as model, _leaving_no_task():
        await _reply(model, _REQUEST)
        aclose: Callable[[], Awaitable[None]] | None = getattr(model, "aclose", None)
        if aclose is not None:
            await aclose()
            await aclose()
        await _reply(model, _REQUEST)


async def works_in_any_event_loop(open_model: OpenModel) -> None:
    """A model may be called in several event loops: each ``Agent.run_sync`` has its own."""
    async with open_model(_HELLO) as model:
        await _reply(model, _REQUEST)
        for _ in range(2):
            await asyncio.to_thread(asyncio.run, _reply(model, _REQUEST))
        await _reply(model, _REQUEST)


# -- replies of a script -------------------------------------------------------------------------------------


async def returns_the_text(open_model: OpenModel) -> None:
    """The text arrives as it was sent, in any language, with its blanks and line breaks."""
    expected = [Reply(Message.assistant(text)) for text in _TEXTS]
    async with open_model(*expected) as model:
        for reply in expected:
            _require_equal(await _reply(model, _REQUEST), reply)


async def returns_an_empty_text(open_model: OpenModel) -> None:
    """A reply of no text is one, and no error: what to do about it is the loop's to decide."""
    async with open_model(Reply(Message.assistant(""))) as model:
        _require_equal(await _reply(model, _REQUEST), Reply(Message.assistant("")))


async def returns_the_usage(open_model: OpenModel) -> None:
    """The tokens of prompt and reply are counted."""
    async with open_model(_HELLO) as model:
        usage = (await _reply(model, _REQUEST)).usage
        _require((usage.input_tokens, usage.output_tokens) == (11, 7), f"the usage is {usage}, not 11 and 7 tokens")


_CALL = _with_calls(ToolCall("call_1", "weather", {"city": "Łódź 😀", "days": [1, {"hours": None}], "far": False}))
_CALLS = _with_calls(
    ToolCall("call_1", "weather", {"city": "Paris"}),
    ToolCall("call_2", "weather", {"city": "Rome"}),
    ToolCall("call_3", "now", {}),
    text="Let me see.",
)


async def returns_a_call(open_model: OpenModel) -> None:
    """A call has its tool and its arguments, nested or not."""
    async with open_model(_CALL) as model:
        _require_equal(await _reply(model, _TOOL_REQUEST), _CALL)


async def returns_several_calls(open_model: OpenModel) -> None:
    """Calls keep their order, including those of one tool, one without arguments, and with a text beside them."""
    async with open_model(_CALLS) as model:
        _require_equal(await _reply(model, _TOOL_REQUEST), _CALLS)


async def says_that_a_reply_was_truncated(open_model: OpenModel) -> None:
    """A reply that reached its limit has the finish reason ``LENGTH``, streamed or not."""
    expected = replace(_HELLO, finish_reason=FinishReason.LENGTH)
    async with open_model(expected) as model:
        _require_equal(await _reply(model, _REQUEST), expected)
        if can_stream(model):
            _require_equal((await _stream(model, _REQUEST))[1], expected)


async def says_that_a_filter_has_cut_in(open_model: OpenModel) -> None:
    """A reply that the provider's filter stopped has the finish reason ``CONTENT_FILTER``."""
    async with open_model(replace(_HELLO, finish_reason=FinishReason.CONTENT_FILTER)) as model:
        reason = (await _reply(model, _REQUEST)).finish_reason
        _require(reason is FinishReason.CONTENT_FILTER, f"the finish reason is {reason!r}")


async def accepts_images(open_model: OpenModel) -> None:
    """A user and a tool may show images."""
    image = Image.from_bytes(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;")
    messages = (
        Message.user("What is this?", [image]),
        Message.assistant("", (ToolCall("call_1", "now"),)),
        Message(Role.TOOL, "A picture.", tool_call_id="call_1", name="now", images=(image,)),
    )
    async with open_model(_HELLO) as model:
        _require_equal(await _reply(model, ModelRequest(messages, _TOOLS)), _HELLO)


async def streams_what_it_replies(open_model: OpenModel) -> None:
    """A streamed reply is the same as a whole one, and its text comes in chunks."""
    expected = [Reply(Message.assistant(text)) for text in _TEXTS[:-1]]
    async with open_model(*expected) as model:
        for reply in expected:
            chunks, streamed = await _stream(model, _REQUEST)
            _require_equal(streamed, reply)
            _require(any(isinstance(chunk, TextChunk) for chunk in chunks), "the stream has no chunk of text")
            _require_chunks_of(chunks, streamed)


async def streams_calls(open_model: OpenModel) -> None:
    """The calls of a streamed reply are complete."""
    async with open_model(_CALL, _CALLS) as model:
        for expected in (_CALL, _CALLS):
            chunks, streamed = await _stream(model, _TOOL_REQUEST)
            _require_equal(streamed, expected)
            _require_chunks_of(chunks, streamed)


async def streams_the_usage(open_model: OpenModel) -> None:
    """The tokens of a streamed reply are counted."""
    async with open_model(_HELLO) as model:
        usage = (await _stream(model, _REQUEST))[1].usage
        _require((usage.input_tokens, usage.output_tokens) == (11, 7), f"the usage is {usage}, not 11 and 7 tokens")


# -- failures and waits --------------------------------------------------------------------------------------

_FAILURES = (
    TransientProviderError("overloaded", status=503),
    TransientProviderError("too many requests", status=429, retry_after_s=7.0),
    ProviderError("this key is not valid", status=401),
    ProviderError("this request is not valid", status=400),
    ContextOverflowError("the prompt is too long", status=400),
)


async def _failure(call: Awaitable[object]) -> ModelError:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await call
    except ModelError as error:
        return error
    except Exception as error:
        raise AssertionError(f"a failed call raises a ModelError, not {error!r}") from error
    raise AssertionError("the provider failed, and the call did not")


async def reports_failures(open_model: OpenModel) -> None:
    """A failure is an error of its kind: whether a retry may help decides what the loop does."""
    async with open_model(*_FAILURES) as model, _leaving_no_task():
        for failure in _FAILURES:
            error = await _failure(model.reply(_REQUEST))
            _require(type(error) is type(failure), f"{failure!r} is reported as {error!r}")


async def reports_failures_of_streams(open_model: OpenModel) -> None:
    """The same for a stream."""
    async with open_model(*_FAILURES) as model, _leaving_no_task():
        for failure in _FAILURES:
            error = await _failure(_stream(model, _REQUEST))
            _require(type(error) is type(failure), f"{failure!r} is reported as {error!r}")


async def reports_status_and_time_to_wait(open_model: OpenModel) -> None:
    """An error has the HTTP status, and the seconds that the provider asks to wait before a retry."""
    async with open_model(*_FAILURES) as model:
        for failure in _FAILURES:
            error = await _failure(model.reply(_REQUEST))
            _require(error.status == failure.status, f"{failure!r} has status {error.status!r}, not {failure.status}")
            _require(error.retry_after_s == failure.retry_after_s, f"{failure!r} waits {error.retry_after_s!r} s")


async def can_be_called_after_a_failure(open_model: OpenModel) -> None:
    """The call after a failed one is not affected."""
    async with open_model(_FAILURES[0], _HELLO) as model:
        await _failure(model.reply(_REQUEST))
        _require_equal(await _reply(model, _REQUEST), _HELLO)


async def takes_no_part_for_the_whole(open_model: OpenModel) -> None:
    """A reply that breaks off is a ``TransientProviderError``, and never a reply."""
    async with open_model(CutOff("The launch code is"), _HELLO) as model, _leaving_no_task():
        call = _stream(model, _REQUEST) if can_stream(model) else model.reply(_REQUEST)
        error = await _failure(call)
        _require(isinstance(error, TransientProviderError), f"a reply that broke off is reported as {error!r}")
        _require_equal(await _reply(model, _REQUEST), _HELLO)


async def can_be_cancelled_while_it_waits(open_model: OpenModel) -> None:
    """A call that waits for its provider ends at once when it is cancelled, and nothing of it continues."""
    silence = Silence()
    async with open_model(silence) as model, _leaving_no_task():
        await _cancel_when_received(model.reply(_REQUEST), silence)


async def streams_can_be_cancelled_while_they_wait(open_model: OpenModel) -> None:
    """The same for a stream."""
    silence = Silence()
    async with open_model(silence) as model, _leaving_no_task():
        await _cancel_when_received(_stream(model, _REQUEST), silence)


async def _cancel_when_received(call: Coroutine[Any, Any, object], silence: Silence) -> None:
    task = asyncio.ensure_future(call)
    await silence.wait_for(task)
    _require(not task.done(), "the call ended although its provider is silent")
    task.cancel()
    await asyncio.wait({task}, timeout=_PATIENCE_S)
    _require(task.done(), "the call goes on although it was cancelled")
    _require(task.cancelled(), "the call swallowed its cancellation")


_NEEDS: dict[ModelCheck, tuple[Feature, ...]] = {
    has_a_name: (),
    replies: (),
    accepts_every_message: (),
    accepts_an_output_schema: (),
    streams: ("streaming",),
    can_be_left_in_the_middle: ("streaming",),
    can_be_cancelled_at_any_time: (),
    makes_calls_at_once: (),
    can_be_closed: (),
    works_in_any_event_loop: ("event_loops",),
    returns_the_text: (),
    returns_an_empty_text: (),
    returns_the_usage: ("usage",),
    returns_a_call: ("tools",),
    returns_several_calls: ("tools",),
    says_that_a_reply_was_truncated: ("truncation",),
    says_that_a_filter_has_cut_in: ("content_filter",),
    accepts_images: ("images",),
    streams_what_it_replies: ("streaming",),
    streams_calls: ("streaming", "tools"),
    streams_the_usage: ("streaming", "usage"),
    reports_failures: (),
    reports_failures_of_streams: ("streaming",),
    reports_status_and_time_to_wait: ("error_details",),
    can_be_called_after_a_failure: (),
    takes_no_part_for_the_whole: ("cut_off",),
    can_be_cancelled_while_it_waits: (),
    streams_can_be_cancelled_while_they_wait: ("streaming",),
}
"""Every check, and what it needs."""

_LIVE = tuple(_NEEDS)[:10]
"""The checks that pass whatever is replied."""


def checks(*, without: Collection[Feature] = (), live: bool = False) -> tuple[ModelCheck, ...]:
    """The checks that a model must pass.

    Args:
        without: What it, or the provider that it is tested with, lacks.
        live: Whether its provider follows no script; then only those checks that pass whatever is replied.

    Raises:
        ConfigurationError: There is no feature of a name in ``without``.
    """
    if unknown := sorted({*without} - {*get_args(Feature)}):
        raise ConfigurationError(f"no feature of a model: {', '.join(unknown)}; use {', '.join(get_args(Feature))}")
    return tuple(check for check in (_LIVE if live else _NEEDS) if not {*_NEEDS[check]} & {*without})
