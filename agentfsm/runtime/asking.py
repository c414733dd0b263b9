"""How a run asks its model: for a whole reply, or piece by piece while somebody watches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agentfsm.core.events import ReasoningDelta, ReplyRestarted, TextDelta, ToolCallDelta
from agentfsm.core.messages import Reply
from agentfsm.core.model import Model, ModelRequest, has_admission
from agentfsm.core.streaming import CallPiece, Piece, Pulse, ReasoningPiece, Restart, TextPiece, can_stream
from agentfsm.errors import TransientProviderError
from agentfsm.runtime.context import Context
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["ask"]


async def ask(context: Context, request: ModelRequest) -> Reply:
    """The model's reply. The time for it counts from when the model's limits, if it has any, let the call in.

    Raises:
        TimeoutError: ``request.timeout_s`` is over.
        agentfsm.errors.ModelError: The call failed.
    """
    model = context.parts.model
    if not has_admission(model):
        return await _within(context, model, request)
    async with model.admission(request) as admitted:
        return await _within(context, admitted, request)


async def _within(context: Context, model: Model, request: ModelRequest) -> Reply:
    with context.watchdog.limit(request.timeout_s):
        if context.watched and can_stream(model):
            return await _watched(context, model.stream(request), model.name, request.heartbeat_s)
        return await model.reply(request)


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
