"""Joins an answer that was truncated by its token limit with the reply that goes on with it."""

from __future__ import annotations

__all__ = ["continue_answer"]

MIN_OVERLAP = 8
"""Characters at the end of the beginning that a reply must repeat for them to count as repeated."""

MIN_COMMON_START = 12
"""Characters that two replies must share at their start for the second to be the first again."""

_APOLOGIES = ("sorry", "apolog", "my apolog", "i apolog", "i'm sorry", "i am sorry", "here is the complete")


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
    # A sentence that begins right after a letter, without a space, continues no word.
    return beginning[-1].isalnum() and not beginning[-1].isupper() and reply[:1].isupper()
