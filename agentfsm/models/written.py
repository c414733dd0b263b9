"""What a run's earlier requests have written down already, so that the next one writes only what is new.

A transcript only grows. Without this, each step would write all of it again: a thousand steps would cost half
a million messages. What is kept lives with the run (``ModelRequest.memo``) and dies with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from agentfsm.core.messages import Message, Role
from agentfsm.core.model import ModelRequest
from agentfsm.core.render import Transcript
from agentfsm.models.wire import dumps

__all__ = ["Items", "Units", "Written", "joined", "written"]


class Units(Protocol):
    """A wire's form of a transcript, written as it grows."""

    def add(self, message: Message) -> None:
        """Write a message that stands in every later request."""
        ...

    def text(self, tail: Iterable[Message]) -> list[str]:
        """The JSON of all units, in pieces without a comma between, with more messages behind for this once."""
        ...


class Items:
    """Units that no later message changes: each message is so many of them.

    Args:
        form: The units of a message.
        behind: The units that stand behind the last of several tools' messages in a row; none unless given.
    """

    def __init__(
        self,
        form: Callable[[Message], list[dict[str, Any]]],
        behind: Callable[[list[Message]], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._form = form
        self._behind = behind
        self._row: list[Message] = []
        self._old: list[str] = []

    def add(self, message: Message) -> None:
        """Write a message that stands in every later request."""
        self._old += map(dumps, self._units(message, self._row))

    def text(self, tail: Iterable[Message]) -> list[str]:
        """The JSON of all units."""
        new = [dumps(unit) for unit in self._rest(tail, self._row.copy())]
        if len(self._old) > 1:
            self._old = [",".join(self._old)]
        return [*self._old, *new]

    def all(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """The units of a whole transcript."""
        return self._rest(messages, [])

    def _units(self, message: Message, row: list[Message]) -> list[dict[str, Any]]:
        """The units of a message, and before it what was due behind a row of tools' messages, if it ends one."""
        if self._behind is None:
            return self._form(message)
        if message.role is Role.TOOL and message.tool_call_id is not None:
            if message.images:
                row.append(message)
            return self._form(message)
        due = self._behind(row) if row else []
        row.clear()
        return [*due, *self._form(message)]

    def _rest(self, messages: Iterable[Message], row: list[Message]) -> list[dict[str, Any]]:
        units = [unit for message in messages for unit in self._units(message, row)]
        return [*units, *self._behind(row)] if row and self._behind is not None else units


class Written:
    """A transcript as far as it is written.

    Attributes:
        units: Its messages in the wire's form.
        system: Those of them that are instructions.
        ids: The ids of its calls.
    """

    def __init__(self, messages: list[Message], units: Units) -> None:
        self.units = units
        self.system: list[Message] = []
        self.ids: set[str] = set()
        self._messages = messages
        self._count = 0

    def reaches(self, transcript: Transcript) -> bool:
        """Whether a transcript goes on where this one is."""
        return transcript.head is self._messages and transcript.settled >= self._count

    def go_on(self, transcript: Transcript) -> None:
        """Write what is new."""
        for message in self._messages[self._count : transcript.settled]:
            self.units.add(message)
            if message.role is Role.SYSTEM:
                self.system.append(message)
            self.ids.update(call.id for call in message.tool_calls)
        self._count = transcript.settled


def written(request: ModelRequest, key: object, units: Callable[[], Units]) -> tuple[Written, list[Message]]:
    """A request's transcript, written as far as it is settled, and the messages behind that.

    Args:
        request: The request.
        key: Who writes; what is kept in the request's memo is theirs.
        units: The wire's form of an empty transcript.
    """
    messages = request.messages
    transcript = messages if isinstance(messages, Transcript) else Transcript(list(messages), len(messages))
    kept = request.memo.get(key)
    if not isinstance(kept, Written) or not kept.reaches(transcript):
        kept = request.memo[key] = Written(transcript.head, units())
    kept.go_on(transcript)
    return kept, list(transcript.tail)


def joined(body: dict[str, Any], key: str, units: list[str]) -> bytes:
    """The JSON text of a body, with units that are written already as the list under a key."""
    at = list(body).index(key)
    items = list(body.items())
    before = "".join(f"{dumps(k)}:{dumps(v)}," for k, v in items[:at])
    after = "".join(f",{dumps(k)}:{dumps(v)}" for k, v in items[at + 1 :])
    text = "".join(("{", before, dumps(key), ":[", ",".join(units), "]", after, "}"))
    return text.encode(errors="replace")
