"""The model call: the effect of ``call_llm``, with its timeout, error handling and streaming.

The pieces of a streamed reply are sent as events, each with what others than the program may see of it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

from agentfsm.errors import ModelError, RunError, TransientProviderError
from agentfsm.loop.events import Event, ReasoningDelta, ReplyRestarted, TextDelta, ToolCallDelta
from agentfsm.loop.failures import PROVIDER_KINDS, Failure, FailureKind, describe_exception
from agentfsm.loop.messages import NO_USAGE, FinishReason, Message, Reply, ToolCall
from agentfsm.loop.model import (
    CallBudget,
    KeepAlive,
    LimitedModel,
    Model,
    ModelRequest,
    ReasoningChunk,
    StreamChunk,
    StreamRestart,
    TextChunk,
    ToolCallChunk,
    can_stream,
    has_admission,
    new_model_request,
)
from agentfsm.loop.outcomes import ModelCallFailed, ModelCallSucceeded, Outcome, new_model_call_succeeded
from agentfsm.loop.prompts import render_messages
from agentfsm.loop.read_only import MAX_NESTING, FrozenDict, plain_value
from agentfsm.loop.recovery_policy import TIME_UP
from agentfsm.loop.secret_pieces import PieceFilter
from agentfsm.runtime.context import Context, read_earlier_messages
from agentfsm.runtime.timeout import TimeLimitError, Timeout, being_cancelled

_PROVIDER_KINDS_BY_NAME = {kind.value: kind for kind in PROVIDER_KINDS}
"""The kinds that a model's error may say of itself; any other word is a ``provider_error``."""


async def call_model(context: Context) -> Outcome:
    """The effect of ``call_llm``: make one model call, within its timeout and the run's time."""
    run, config, recorder = context.run, context.config, context.recorder
    guardrails, made = run.guardrails, run.iterations
    allowed = guardrails.max_iterations
    if allowed is not None and made >= allowed:
        raise RunError(
            f"all {made} model calls that max_iterations allows are made, and no row of the graph acts on "
            "that before the next: add the row iteration_limit of LOOP to a state in front of it"
        )
    recorder.record_intent(str(run.turns + 1), config.model.name, "again")
    if recorder.sink is not None:
        await recorder.commit()
    limit, left = guardrails.llm_timeout_s, context.time_left_s
    if run.final_turn == "now":
        limit = min(limit, guardrails.finalize_grace_s)
    elif left is not None and left < limit:
        limit = max(left, 0.0)
    budget = CallBudget(None if allowed is None else allowed - made)
    if run.unread and (run.compaction is None or run.elided):  # the request has messages that are not read yet
        await read_earlier_messages(context)
    request = new_model_request(
        render_messages(run),
        config.tool_specs,
        run.output_cap or guardrails.max_output_tokens,
        limit,
        config.output_schema,
        "answer",
        guardrails.stream_heartbeat_s,
        budget,
        context.model_cache,
    )
    answer = await reply_or_failure(context, config.model, request, context.timeout, context.call_ids)
    if isinstance(answer, Failure):
        return ModelCallFailed(answer, budget.made)
    if config.reply_secrets is None:
        return new_model_call_succeeded(answer, budget.made)
    withheld = config.reply_secrets.find(answer.message.content, run.partial_answer)
    context.secrets.add(withheld)
    return ModelCallSucceeded(answer, budget.made, withheld)


async def reply_or_failure(
    context: Context, model: Model, request: ModelRequest, timer: Timeout, call_ids: set[str], *, stream: bool = True
) -> Reply | Failure:
    """A model's reply, or the failure that its call ended with.

    Args:
        context: The run.
        model: The model.
        request: The request.
        timer: Enforces ``request.timeout_s``.
        call_ids: The ids of earlier calls of the transcript; those of the reply are added.
        stream: Whether the reply may be streamed to whoever receives the run's events.

    Raises:
        asyncio.CancelledError: The run is being cancelled.
        JournalError: Messages of the run that were not read yet were tampered with, or cannot be read.
        StoreError: The store that has them cannot be read.
    """
    try:
        if has_admission(model):
            reply = await _admitted_reply(context, model, request, timer, stream)
        else:
            reply = await _limited_reply(context, model, request, timer, stream)
        if reply.usage is not NO_USAGE:
            reply = _check_usage(context, model, reply)
        for repair in reply.repairs:
            context.warn(f"{model.name}: {repair}")
        if request.max_output_tokens is not None:
            reply = _mark_truncated(reply, request.max_output_tokens)
        has_calls = bool(reply.message.tool_calls)
    except TimeoutError as error:
        if isinstance(error, TimeLimitError) and _time_is_up(context):
            return _time_up_failure(f"{model.name}: the run's time was up before it replied")
        text = f"{model.name} sent no reply within {request.timeout_s:g} s"
        return _model_failure(FailureKind.transient_provider, text)
    except _RunTimeUpError as error:
        return _time_up_failure(str(error))
    except ModelError as error:
        return _model_failure(_PROVIDER_KINDS_BY_NAME.get(error.kind, FailureKind.provider_error), str(error), error)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _model_failure(FailureKind.provider_error, f"{model.name}: {describe_exception(error)}")
    except Exception as error:
        return _model_failure(FailureKind.provider_error, f"{model.name}: {describe_exception(error)}")
    finally:
        context.model_requests += request.budget.made - 1  # the first was counted when it began
    if has_calls and context.run.unread:  # their ids must be unique in the transcript
        await read_earlier_messages(context)
    try:
        return _normalize_reply(reply, call_ids)
    except Exception as error:
        return _model_failure(FailureKind.provider_error, f"{model.name}: {describe_exception(error)}")


def _check_usage(context: Context, model: Model, reply: Reply) -> Reply:
    """The reply with a usage that can be counted; warns once if ``max_cost_usd`` cannot be enforced."""
    run, usage = context.run, reply.usage
    if not usage.is_plausible:
        context.warn(f"{model.name}: the reply has an impossible usage, which is not counted")
        return replace(reply, usage=NO_USAGE)
    if usage.unpriced_tokens and run.guardrails.max_cost_usd is not None and not run.usage.unpriced_tokens:
        context.warn(f"the price of {model.name} is unknown: max_cost_usd does not count its tokens")
    return reply


def _mark_truncated(reply: Reply, cap: int) -> Reply:
    """The reply, with finish reason ``LENGTH`` if it is an answer that used up its tokens, whatever the model says."""
    if reply.usage.output_tokens < cap or reply.finish_reason is not FinishReason.STOP:
        return reply
    return replace(reply, finish_reason=FinishReason.LENGTH)


class _NotAdmittedError(TransientProviderError):
    """The run's time was up before the limits of the model admitted the call."""


class _RunTimeUpError(TransientProviderError):
    """The run's time was up before a stream ended."""


def _time_is_up(context: Context) -> bool:
    left = context.time_left_s
    return left is not None and left <= 0


def _time_up_failure(text: str) -> Failure:
    """The failure of a call that was cut off by the run's time; the row for that limit decides what follows."""
    return Failure(kind=FailureKind.transient_provider, explanation=text, blockers=(text,), metadata={TIME_UP: True})


def _model_failure(kind: FailureKind, text: str, error: ModelError | None = None) -> Failure:
    details = {} if error is None else {"retry_after_s": error.retry_after_s, "status": error.status}
    metadata = {k: v for k, v in details.items() if v is not None}
    if isinstance(error, _NotAdmittedError):
        metadata["not_admitted"] = True
    return Failure(kind=kind, explanation=text, blockers=(text,), metadata=metadata)


def _normalize_reply(reply: Reply, used_ids: set[str]) -> Reply:
    """The reply with string content and with call ids that are unique in the transcript.

    Args:
        reply: The reply as the model gave it.
        used_ids: The ids of earlier calls; those of this reply are added.
    """
    if reply.__class__ is not Reply or reply.message.__class__ is not Message:  # a user's class, which might change
        reply = plain_value(Reply, reply)
        reply = replace(reply, message=plain_value(Message, reply.message))
    message = reply.message
    if not isinstance(message.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped models
        if message.content is not None:
            raise TypeError(f"the reply's content is not a string but {type(message.content).__name__}")
        message = replace(message, content="")
    if message.tool_calls:
        calls = [_normalize_call(call, index, used_ids) for index, call in enumerate(message.tool_calls, 1)]
        if not all(map(is_, calls, message.tool_calls)):
            message = replace(message, tool_calls=tuple(calls))
    return reply if message is reply.message else replace(reply, message=message)


def _normalize_call(call: ToolCall, index: int, used_ids: set[str]) -> ToolCall:
    """A call with an id that is unique in the transcript; marked as malformed if its arguments are not JSON."""
    call = plain_value(ToolCall, call)
    given_id, name = _as_text(call.id), _as_text(call.name)
    unique_id, n = given_id, len(used_ids)
    while not unique_id or unique_id in used_ids:
        unique_id, n = f"{given_id or 'call'}_{n}_{index}", n + 1
    used_ids.add(unique_id)
    try:
        _ = call.signature
        if call.arguments.__class__ is not FrozenDict:
            raise RecursionError(f"they are nested more than {MAX_NESTING} deep")
    except (TypeError, ValueError, RecursionError) as error:
        call = replace(call, arguments={}, malformed=f"they are not a JSON object: {error}")
    return call if unique_id is call.id and name is call.name else replace(call, id=unique_id, name=name)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


async def _admitted_reply(
    context: Context, model: LimitedModel, request: ModelRequest, timer: Timeout, stream: bool
) -> Reply:
    """The reply of a model with rate or concurrency limits: the timeout starts when they admit the call.

    Raises:
        TimeoutError: There was no reply within ``request.timeout_s``.
        agentfsm.errors.ModelError: The call failed, or was not admitted before the run's time was up.
    """
    left = context.time_left_s
    async with AsyncExitStack() as stack:
        try:
            waiting = stack.enter_async_context(model.admission(request))
            admitted = await timer.run(waiting, math.inf if left is None else max(left, 0.0))
        except TimeLimitError:
            raise _NotAdmittedError(
                f"the limits of {model.name} (Limited) admitted no call before the run's time was up"
            ) from None
        return await _limited_reply(context, admitted, request, timer, stream)


def _limited_reply(
    context: Context, model: Model, request: ModelRequest, timer: Timeout, stream: bool
) -> Awaitable[Reply]:
    """The reply: a whole one within the timeout of the request, a streamed one within the run's time."""
    context.model_requests += 1
    if not (stream and context.has_listeners):
        return timer.run(model.reply(request), request.timeout_s)
    if can_stream(model):
        return _stream_within_run(context, model.stream(request), model.name, request, timer)
    return _show_whole(context, timer.run(model.reply(request), request.timeout_s))


async def _show_whole(context: Context, whole: Awaitable[Reply]) -> Reply:
    """A reply that was not streamed; its text is one ``TextDelta``, so whoever shows deltas misses nothing."""
    reply = await whole
    _show_text(context, reply)
    return reply


def _show_text(context: Context, reply: Reply) -> None:
    if text := _as_text(reply.message.content):
        context.emit(TextDelta, text=text, shown="" if context.config.hides_text else None)


async def _stream_within_run(
    context: Context, chunks: AsyncIterator[StreamChunk | Reply], name: str, request: ModelRequest, timer: Timeout
) -> Reply:
    left = context.time_left_s
    if context.run.final_turn == "now":
        left = request.timeout_s
    try:
        limit = math.inf if left is None else max(left, 0.0)
        return await timer.run(_stream_reply(context, chunks, name, request), limit)
    except TimeLimitError:
        raise _RunTimeUpError(f"{name}: the run's time was up before the stream ended") from None


async def _stream_reply(
    context: Context, chunks: AsyncIterator[StreamChunk | Reply], name: str, request: ModelRequest
) -> Reply:
    """Emit the chunks of a stream, and return the reply that ends it.

    The request's timeout bounds the wait for the first piece, and its heartbeat the wait for each further one. A
    ``KeepAlive`` is not a piece.
    """
    heartbeat = Timeout(context.run.guardrails.cancel_grace_s / 2)  # before the whole call is
    close: Any = getattr(chunks, "aclose", None)
    now = asyncio.get_running_loop().time
    shown = False
    sender = _PieceSender(context)
    limit = request.timeout_s
    deadline = now() + limit
    try:
        while True:
            chunk = await heartbeat.run(anext(chunks, None), deadline - now())
            if chunk is None or isinstance(chunk, Reply):
                break
            shown = isinstance(chunk, TextChunk) or (shown and not isinstance(chunk, StreamRestart))
            sender.send(chunk)
            if not isinstance(chunk, KeepAlive):
                limit = request.timeout_s if isinstance(chunk, StreamRestart) else request.heartbeat_s
                deadline = now() + limit
    except TimeLimitError:
        raise TransientProviderError(f"{name}: the stream sent nothing for {limit:g} s") from None
    finally:
        heartbeat.close()
        if close is not None:
            await close()
    sender.finish()
    if chunk is None:
        raise TransientProviderError(f"{name}: the stream ended without a reply")
    if not shown:  # the server ignored that a stream was requested
        _show_text(context, chunk)
    return chunk


@dataclass(slots=True)
class _Piece:
    """An event to send.

    Attributes:
        event: Its class.
        fields: Its fields.
        text: The text in it, as the program sees it.
        shown: What others may see of it; None if that is not decided.
    """

    event: type[Event]
    fields: dict[str, Any]
    text: str = ""
    shown: str | None = None


@dataclass(slots=True)
class _Channel:
    """A text that comes in pieces: what withholds its secrets, and its pieces that wait."""

    waiting: deque[_Piece] = field(default_factory=deque[_Piece])
    filter: PieceFilter = field(init=False)

    def receive(self, shown: str) -> None:
        self.waiting.popleft().shown = shown


class _PieceSender:
    """Sends the pieces of one reply, in order.

    A piece that ends in what may be the beginning of a secret, and all pieces after it, wait for the next ones.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channels: dict[object, _Channel] = {}
        self._pieces: deque[_Piece] = deque()

    def send(self, chunk: StreamChunk) -> None:
        """Send a chunk as an event."""
        match chunk:
            case TextChunk(text):
                self._add("text", _Piece(TextDelta, {}, text, "" if self._context.config.hides_text else None))
            case ReasoningChunk(text):
                self._add("reasoning", _Piece(ReasoningDelta, {}, text))
            case ToolCallChunk(index, name, arguments):
                self._add(index, _Piece(ToolCallDelta, {"index": index, "name": name}, arguments))
            case StreamRestart(reason):
                self.finish()
                self._context.emit(ReplyRestarted, reason=reason)
            case KeepAlive():
                pass

    def finish(self) -> None:
        """Send what has waited: the reply is complete, or starts again."""
        for channel in self._channels.values():
            channel.filter.finish()
        self._flush()

    def _add(self, name: object, piece: _Piece) -> None:
        self._pieces.append(piece)
        if piece.shown is None:
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = _Channel()
                channel.filter = self._context.secrets.filter_pieces(channel.receive)
            channel.waiting.append(piece)
            channel.filter.add(piece.text)
        self._flush()

    def _flush(self) -> None:
        while self._pieces and self._pieces[0].shown is not None:
            piece = self._pieces.popleft()
            name = "arguments" if piece.event is ToolCallDelta else "text"
            shown = None if piece.shown == piece.text else piece.shown
            self._context.emit(piece.event, **{name: piece.text}, **piece.fields, shown=shown)
