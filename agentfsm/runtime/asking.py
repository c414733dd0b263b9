"""The effect of ``call_llm``: how a run asks its model, for a whole reply or piece by piece while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from operator import is_
from typing import Any

from agentfsm.core.events import ReasoningDelta, ReplyRestarted, TextDelta, ToolCallDelta
from agentfsm.core.failures import PROVIDER_KINDS, Failure, FailureKind
from agentfsm.core.messages import Reply, ToolCall
from agentfsm.core.model import Model, ModelRequest, has_admission
from agentfsm.core.outcomes import CallFailed, Outcome, Replied
from agentfsm.core.render import render
from agentfsm.core.streaming import CallPiece, Piece, Pulse, ReasoningPiece, Restart, TextPiece, can_stream
from agentfsm.core.wording import raised
from agentfsm.errors import ModelError, TransientProviderError
from agentfsm.runtime.calls import being_cancelled
from agentfsm.runtime.context import Context
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["call_model"]

_MODEL_KINDS = {kind.value: kind for kind in PROVIDER_KINDS}
"""The kinds that a model's error may say of itself; any other word is a ``provider_error``."""


async def call_model(context: Context) -> Outcome:
    """Make one model call, within its time limit."""
    run, parts, recorder = context.run, context.parts, context.recorder
    recorder.intend(str(run.model_calls + 1), parts.model.name, "again")
    if recorder.keeper is not None:
        await recorder.commit()
    limit = run.guardrails.llm_timeout_s
    if run.grace == "now":
        limit = min(limit, run.guardrails.finalize_grace_s)
    request = ModelRequest(
        render(run),
        parts.specs,
        run.output_cap or run.guardrails.max_output_tokens,
        limit,
        parts.output_schema,
        heartbeat_s=run.guardrails.stream_heartbeat_s,
        memo=context.memo,
    )
    try:
        reply = await ask(context, request)
        _mind_the_price(context, reply)
        return Replied(_sound(reply, context.call_ids))
    except TimeoutError:
        return _call_failed(FailureKind.transient_provider, f"{parts.model.name} gave no reply within {limit:g} s")
    except ModelError as error:
        return _call_failed(_MODEL_KINDS.get(error.kind, FailureKind.provider_error), str(error), error)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {raised(error)}")
    except Exception as error:
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {raised(error)}")


def _mind_the_price(context: Context, reply: Reply) -> None:
    """Say once that ``max_cost_usd`` cannot be held, where nobody knows what a reply costs."""
    run = context.run
    if reply.usage.unpriced_tokens and run.guardrails.max_cost_usd is not None and not run.usage.unpriced_tokens:
        context.warn(f"no price is known for {context.parts.model.name}: max_cost_usd does not count its tokens")


def _call_failed(kind: FailureKind, text: str, error: ModelError | None = None) -> CallFailed:
    more = {} if error is None else {"retry_after_s": error.retry_after_s, "status": error.status}
    metadata = {k: v for k, v in more.items() if v is not None}
    return CallFailed(Failure(kind=kind, explanation=text, blockers=(text,), metadata=metadata))


def _sound(reply: Reply, taken: set[str]) -> Reply:
    """The reply as a transcript can hold it, whatever the model gave: a text, and calls that each get one result.

    Args:
        reply: The reply as the model gave it.
        taken: The ids of earlier calls; those of this reply are added.

    Raises:
        TypeError: Its content is no text, and not null either.
    """
    message = reply.message
    if not isinstance(message.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped models
        if message.content is not None:
            raise TypeError(f"the reply's content is no text but {type(message.content).__name__}")
        message = replace(message, content="")
    if message.tool_calls:
        calls = [_sound_call(call, place, taken) for place, call in enumerate(message.tool_calls, 1)]
        if not all(map(is_, calls, message.tool_calls)):
            message = replace(message, tool_calls=tuple(calls))
    return reply if message is reply.message else replace(reply, message=message)


def _sound_call(call: ToolCall, place: int, taken: set[str]) -> ToolCall:
    """A call with an id that no other call of the transcript has; arguments that no JSON can hold are none."""
    own, name = _text(call.id), _text(call.name)
    wanted, n = own, len(taken)
    while not wanted or wanted in taken:
        wanted, n = f"{own or 'call'}_{n}_{place}", n + 1
    taken.add(wanted)
    try:
        _ = call.signature
    except (TypeError, ValueError, RecursionError) as error:
        call = replace(call, arguments={}, malformed=f"the arguments are no JSON object: {error}")
    return call if wanted is call.id and name is call.name else replace(call, id=wanted, name=name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


async def ask(context: Context, request: ModelRequest) -> Reply:
    """The model's reply. The time for it counts from when the model's limits, if it has any, let the call in.

    Raises:
        TimeoutError: ``request.timeout_s`` is over.
        agentfsm.errors.ModelError: The call failed.
    """
    model = context.parts.model
    if has_admission(model):
        async with model.admission(request) as admitted:
            with context.watchdog.limit(request.timeout_s):
                return await _answer(context, admitted, request)
    with context.watchdog.limit(request.timeout_s):
        return await _answer(context, model, request)


def _answer(context: Context, model: Model, request: ModelRequest) -> Coroutine[Any, Any, Reply]:
    if context.watched and can_stream(model):
        return _watched(context, model.stream(request), model.name, request.heartbeat_s)
    return model.reply(request)


async def _watched(context: Context, pieces: AsyncIterator[Piece | Reply], name: str, heartbeat_s: float) -> Reply:
    """Tell the pieces, and give the reply that ends them.

    Silence counts from the first piece: until then a model reads the prompt, and its own deadline holds.
    """
    heart = Watchdog()
    close: Any = getattr(pieces, "aclose", None)
    try:
        piece = await anext(pieces, None)
        while piece is not None and not isinstance(piece, Reply):
            _tell(context, piece)
            with heart.limit(heartbeat_s):
                piece = await anext(pieces, None)
    except TimeoutError:
        if not heart.expired:
            raise
        raise TransientProviderError(f"{name}: the stream fell silent for {heartbeat_s:g} s") from None
    finally:
        heart.close()
        if close is not None:
            await close()
    if piece is None:
        raise TransientProviderError(f"{name}: the stream ended without its reply")
    return piece


def _tell(context: Context, piece: Piece) -> None:
    match piece:
        case TextPiece(text):
            context.emit(TextDelta, text=text)
        case ReasoningPiece(text):
            context.emit(ReasoningDelta, text=text)
        case CallPiece(place, name, arguments):
            context.emit(ToolCallDelta, place=place, name=name, arguments=arguments)
        case Restart(why):
            context.emit(ReplyRestarted, why=why)
        case Pulse():
            pass
