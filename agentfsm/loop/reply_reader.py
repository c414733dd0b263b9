"""Reads a model's reply: its tool calls, its answer, or why it is neither. Pure, so that a replay reads it the same."""

from __future__ import annotations

from collections.abc import Callable

from agentfsm.loop.json_envelope import parse_envelope
from agentfsm.loop.outcomes import ReplyParsed
from agentfsm.loop.state import RunState
from agentfsm.loop.truncation import continue_answer

__all__ = ["AnswerParser", "read_reply"]


AnswerParser = Callable[[str], ReplyParsed]
"""Turns the text of an answer into a value of the agent's output type, or says why it is none."""


def read_reply(run: RunState, parse_answer: AnswerParser | None) -> ReplyParsed:
    """What the run's last reply says under the run's behavior.

    Args:
        run: The run, with the reply.
        parse_answer: For an agent with an output type, what its answers are parsed by.
    """
    reply = run.reply
    if reply is None:
        return ReplyParsed()
    if reply.message.tool_calls:
        return ReplyParsed(calls=reply.message.tool_calls)
    text = reply.message.content
    if not run.partial_answer:
        return _read_text(run, text, parse_answer)
    answer = continue_answer(run.partial_answer, text)
    joined = _read_text(run, answer, parse_answer)
    return joined if joined.malformed is None or answer == text else _read_text(run, text, parse_answer)


def _read_text(run: RunState, text: str, parse_answer: AnswerParser | None) -> ReplyParsed:
    if run.behavior.envelope:
        parsed = parse_envelope(text, f"call_{run.turns}")
        if parsed.calls or parsed.malformed is not None or parse_answer is None:
            return parsed
        return parse_answer(str(parsed.answer))
    if not run.behavior.text_is_answer:
        missing = run.behavior.missing_call == "malformed"
        return ReplyParsed(malformed="it contains no tool call" if missing else None)
    return ReplyParsed(answer=text) if parse_answer is None or not text.strip() else parse_answer(text)
