"""What the model is shown: ``render(run)``, a pure function of the run's state.

The transcript comes first and never changes; all that changes from step to step (feedback, an
instruction, lessons) stands in one user message at the very end, so a provider's prompt cache keeps its
prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import cast, overload

from agentfsm.core.failures import Failure
from agentfsm.core.messages import Message, Role
from agentfsm.core.state import RunState
from agentfsm.core.wording import GO_ON, WRAP_UP

__all__ = ["Transcript", "render"]

ELIDED = "[An older tool result, left out because the conversation had grown too long.]"


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
    def settled(self) -> int:
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


def render(run: RunState) -> Transcript:
    """The messages of the next request. The same state gives the same messages, to the byte."""
    head = _elided(run) if run.elided else run.messages
    parts = [part for part in (run.feedback, run.pending_instruction) if part]
    if run.grace == "now":
        parts.append(WRAP_UP)
    if run.lessons_learned:
        parts.append(addendum(run.lessons_learned))
    if not parts and head and head[-1].role is Role.ASSISTANT:  # a state of the user's led here without a word
        parts.append(GO_ON)
    if not parts:
        return Transcript(head, len(head))
    text = "\n\n".join(parts)
    if head and head[-1].role is Role.USER:
        last = replace(head[-1], content=f"{head[-1].content}\n\n{text}")
        return Transcript(head, len(head) - 1, (last,))
    return Transcript(head, len(head), (Message.user(text),))


def addendum(lessons: Sequence[Failure]) -> str:
    """Lessons as the ``<context_addendum>`` block of a request, escaped as XML."""
    lines = "\n".join(
        f"  <failure kind={_attribute(lesson.kind)} explanation={_attribute(lesson.explanation)}"
        f" blockers={_attribute('; '.join(lesson.blockers))} />"
        for lesson in lessons
    )
    return f"<context_addendum>\n<lessons_learned>\n{lines}\n</lessons_learned>\n</context_addendum>"


def _attribute(text: str) -> str:
    """A quoted attribute; characters that XML has no way to write are replaced."""
    from xml.sax.saxutils import quoteattr  # it loads urllib, which a run without lessons does not need

    legal = (
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "�" for c in text
    )
    return quoteattr("".join(legal), {'"': "&quot;"})


def _elided(run: RunState) -> list[Message]:
    old = [replace(m, content=ELIDED, images=()) if m.role is Role.TOOL else m for m in run.messages[: run.elided]]
    return [*old, *run.messages[run.elided :]]
