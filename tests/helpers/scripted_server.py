"""The turns of a conformance check as responses of the loopback server."""

from __future__ import annotations

from agentfsm.errors import ContextOverflowError, ModelError
from agentfsm.loop.messages import FinishReason, Reply
from agentfsm.testing.model_conformance import CutOff, Silence, Turn
from tests.helpers.fake_model_server import BrokenResponse, ModelOutput, NoResponse, ServerError, ServerReply

__all__ = ["server_reply"]

FINISH = {FinishReason.LENGTH: "length", FinishReason.CONTENT_FILTER: "filter"}


def server_reply(turn: Turn) -> ServerReply:
    """What the server sends for a turn."""
    match turn:
        case Silence():
            return NoResponse(turn.receive)
        case CutOff():
            return BrokenResponse(ModelOutput(turn.text * 10))
        case ModelError():
            code = "context_length_exceeded" if isinstance(turn, ContextOverflowError) else "some_code"
            headers = {} if turn.retry_after_s is None else {"retry-after": str(turn.retry_after_s)}
            return ServerError(turn.status or 500, {"message": str(turn), "code": code}, headers)
        case Reply():
            calls = tuple((call.id, call.name, dict(call.arguments)) for call in turn.message.tool_calls)
            finish, usage = FINISH.get(turn.finish_reason, "stop"), turn.usage
            tokens = {"prompt_tokens": usage.input_tokens, "reply_tokens": usage.output_tokens}
            return ModelOutput(turn.message.content, "", calls, finish, **tokens)
