"""Everything the model and people are shown: feedback, instructions, questions, and the messages of a request.

The transcript comes first and never changes; all that changes from step to step (feedback, an instruction, lessons) is in
one user message at the very end, so a provider's prompt cache keeps its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from types import MappingProxyType
from typing import cast, overload

from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message, Role
from agentfsm.loop.state import RunState

__all__ = [
    "CONTINUE",
    "FINAL_TURN",
    "NOT_RUN_TEXTS",
    "Transcript",
    "feedback_text",
    "invalid_arguments_text",
    "narrow_scope_instruction",
    "recovery_question",
    "render_messages",
    "repeated_call_note",
    "truncation_feedback",
    "unknown_tool_text",
]


CONTINUE = "Go on."
"""What a request says that would end with the model's own words: a server takes those for a beginning to finish."""

FINAL_TURN = (
    "The time for this task is over. This is your last turn: give your best answer now, and call no more tools."
)

_TRUNCATION = MappingProxyType(
    {
        "answer": "Go on exactly where it stopped, without repeating anything.",
        "call": "Make the call again, with less in it.",
        "more_room": "There is more room now: send it again, whole.",
    }
)

NOT_RUN_TEXTS = MappingProxyType(
    {
        "ask": "Not run: the user was asked a question first.",
        "done": "Not run: an earlier call of the same message ended the run.",
        "unable": "Not run: an earlier call of the same message ended the run.",
        "cancelled": "Cut off: the run was cancelled before this call had a result.",
        "aborted": "Cut off: the run was aborted before this call had a result.",
        "truncated": "Not run: the message was cut off before this call was complete.",
        "": "Not run: the message was set aside before this call was reached.",
    }
)
"""Why a call of a batch has no result of its own."""


def feedback_text(failure: Failure) -> str:
    """What the next request says about a reply that no tool result answers."""
    return failure.kind.spec.feedback.format(explanation=failure.explanation)


def truncation_feedback(remedy: str) -> str:
    """What the next request says about a message that was cut off by its length.

    Args:
        remedy: ``answer`` to go on with one, ``call`` to make one again, ``more_room`` to say all of it again.
    """
    return f"Your last message was cut off by its length limit and no call in it was run. {_TRUNCATION[remedy]}"


def narrow_scope_instruction(failure: Failure) -> str:
    """What the next request says after ``narrow_scope``, worded for the failure's kind."""
    return failure.kind.spec.instruction.format(explanation=failure.explanation)


def recovery_question(failure: Failure) -> str:
    """What a person is asked about a failure."""
    return failure.kind.spec.question.format(explanation=failure.explanation)


def unknown_tool_text(name: str, known: Iterable[str]) -> str:
    """The result of a call to a tool that is not registered; the registered ones stand sorted."""
    names = ", ".join(sorted(known))
    others = f"Call one of the registered tools: {names}." if names else "No tool is registered: answer in words."
    return f"There is no tool named {name!r}. {others}"


def invalid_arguments_text(tool: str, problems: Iterable[str]) -> str:
    """The result of a call whose arguments do not fit, naming each bad field."""
    return f"The arguments of {tool!r} are not valid: {'; '.join(problems)}. Correct them and call again."


def repeated_call_note(count: int) -> str:
    """What is added to the result of a call that was made before."""
    return f"[Note: this exact call has now been made {count} times. Its result will not change by repeating it.]"


ELIDED_RESULT_TEXT = "[An older tool result, left out because the conversation had grown too long.]"


class Transcript(Sequence[Message]):
    """An unchanging view of the first messages of a list that only grows, with a few more behind.

    A request costs no copy of the conversation, and one that was kept still shows what was sent.
    """

    __slots__ = ("_head", "_stop", "_tail")

    def __init__(self, head: list[Message], stop: int, tail: tuple[Message, ...] = ()) -> None:
        self._head, self._stop, self._tail = head, stop, tail

    @property
    def head(self) -> list[Message]:
        """The list that grows; read it up to ``settled``, and do not change it."""
        return self._head

    @property
    def tail(self) -> tuple[Message, ...]:
        """What stands behind it in this request alone."""
        return self._tail

    @property
    def stable_count(self) -> int:
        """How many messages, from the first, stand in every later request as they stand here."""
        return self._stop

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
            return list(self)[index]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        return self._head[place] if place < self._stop else self._tail[place - self._stop]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Transcript, list)):
            return NotImplemented
        return list(self) == list(cast("Sequence[Message]", other))

    __hash__ = None  # type: ignore[assignment]  # a view of a list, compared by content

    def __repr__(self) -> str:
        return f"Transcript({list(self)!r})"


def render_messages(run: RunState) -> Transcript:
    """The messages of the next request. The same state gives the same messages, to the byte."""
    head = _elide_tool_results(run) if run.elided else run.messages
    parts = [part for part in (run.feedback, run.pending_instruction) if part]
    if run.final_turn == "now":
        parts.append(FINAL_TURN)
    if run.lessons_learned:
        parts.append(lessons_block(run.lessons_learned))
    if not parts and head and head[-1].role is Role.ASSISTANT:  # a state of the user's led here without a word
        parts.append(CONTINUE)
    if not parts:
        return Transcript(head, len(head))
    text = "\n\n".join(parts)
    if head and head[-1].role is Role.USER:
        last = replace(head[-1], content=f"{head[-1].content}\n\n{text}")
        return Transcript(head, len(head) - 1, (last,))
    return Transcript(head, len(head), (Message.user(text),))


def lessons_block(lessons: Sequence[Failure]) -> str:
    """Lessons as the ``<context_addendum>`` block of a request, escaped as XML."""
    lines = "\n".join(
        f"  <failure kind={_xml_attribute(lesson.kind)} explanation={_xml_attribute(lesson.explanation)}"
        f" blockers={_xml_attribute('; '.join(lesson.blockers))} />"
        for lesson in lessons
    )
    return f"<context_addendum>\n<lessons_learned>\n{lines}\n</lessons_learned>\n</context_addendum>"


def _xml_attribute(text: str) -> str:
    """A quoted attribute; characters that XML has no way to write are replaced."""
    from xml.sax.saxutils import quoteattr  # it loads urllib, which a run without lessons does not need

    legal = (
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "�" for c in text
    )
    return quoteattr("".join(legal), {'"': "&quot;"})


def _elide_tool_results(run: RunState) -> list[Message]:
    old = [
        replace(m, content=ELIDED_RESULT_TEXT, images=()) if m.role is Role.TOOL else m
        for m in run.messages[: run.elided]
    ]
    return [*old, *run.messages[run.elided :]]
