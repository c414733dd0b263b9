"""Reads a model's reply: its tool calls, its answer, or why it is neither. Pure, so that a replay reads it the same."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentfsm.loop.json_envelope import parse_envelope
from agentfsm.loop.outcomes import ReplyParsed
from agentfsm.loop.state import RunState

__all__ = ["AnswerParser", "continue_answer", "read_reply"]


AnswerParser = Callable[[str], ReplyParsed]
"""Turns the text of an answer into a value of the agent's output type, or says why it is none."""

MIN_OVERLAP = 8
"""Characters at the end of the beginning that a reply must repeat for them to count as repeated."""

MIN_COMMON_START = 12
"""Characters that two replies must share at their start for the second to be the first again."""

MAX_ABANDONED = 200
"""Characters of a beginning that one capital letter can show to be abandoned: more of it is too much to lose."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?(?=[\s,;:!?]|\.(?:\s|\Z)|\Z)")
"""A word of a sentence. What follows ``Me`` in ``Me.md`` and ``Equal`` in ``Equal(a, b)`` ends no word."""

_APOLOGIES = ("sorry", "apolog", "my apolog", "i apolog", "i'm sorry", "i am sorry", "here is the complete")


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
    behavior, answer = run.behavior, text
    if behavior.envelope:
        read = parse_envelope(text, f"call_{run.turns}")
        if read.calls or read.malformed is not None:
            return read
        answer = read.answer
    if not behavior.text_is_answer:
        return ReplyParsed(malformed="it contains no tool call" if behavior.missing_call == "malformed" else None)
    return ReplyParsed(answer=answer) if parse_answer is None or not text.strip() else parse_answer(answer)


def continue_answer(beginning: str, reply: str) -> str:
    """The answer so far: both texts joined if the model really continued, else the reply alone.

    A model that was asked to continue may do so, may repeat a few words first, or may start again, in the same words
    or in others.

    Args:
        beginning: The truncated answer.
        reply: The text of the next reply.
    """
    repeated = _overlap(beginning, reply)
    if repeated:
        return beginning + reply[repeated:]
    return reply if _starts_again(beginning, reply) else beginning + reply


def _overlap(beginning: str, reply: str) -> int:
    """How many characters at the end of the beginning the reply repeats at its start."""
    for size in range(min(len(beginning) - 1, len(reply), 200), MIN_OVERLAP - 1, -1):
        if beginning.endswith(reply[:size]):
            return size
    return 0


def _starts_again(beginning: str, reply: str) -> bool:
    if not beginning or reply.lstrip().lower().startswith(_APOLOGIES):
        return True
    common = next((i for i, (a, b) in enumerate(zip(beginning, reply, strict=False)) if a != b), None)
    if common is None:  # one is the start of the other
        return len(reply) >= len(beginning)
    if common >= MIN_COMMON_START or (common >= 3 and 2 * common >= len(beginning)):
        return True
    # A sentence that begins right after a letter, without a space, continues no word: but "Java" goes on with "Script",
    # and a single word is hardly the whole of an answer that was too long before.
    within_word = beginning[-1].isalnum() and not beginning[-1].isupper()
    return within_word and len(beginning) <= MAX_ABANDONED and _begins_sentence(reply) and " " in reply.strip()


def _begins_sentence(reply: str) -> bool:
    word = _WORD.match(reply)
    return word is not None and word[0][0].isupper() and not any(map(str.isupper, word[0][1:]))
