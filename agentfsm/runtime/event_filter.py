"""Withholds the secrets of a run from what its events tell others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, cast

from agentfsm.errors import RunError
from agentfsm.loop.event_json import EVENT_TEXTS
from agentfsm.loop.secret_pieces import PieceFilter
from agentfsm.loop.state import RunState
from agentfsm.loop.withholding import Withholder

WITHHELD = "[withheld]"
"""What an event says instead of a secret: unlike a journal's placeholder, nothing can be got out of it."""

_LONGEST_SECRET = 10_000  # characters of a secret, as it is encoded in a text, that is looked for around a place


class EventFilter:
    """The secrets of one run, looked for when an event is first turned into JSON."""

    __slots__ = ("__dict__", "_added", "_open_withholder", "_read", "_run")

    def __init__(self, open_withholder: Callable[[], Withholder], run: RunState) -> None:
        self._open_withholder = open_withholder
        self._run = run
        self._read = 0
        self._added: list[Any] = []

    def add(self, values: Iterable[Any]) -> None:
        """Withhold further values from now on."""
        self._added += values

    @cached_property
    def _withholder(self) -> Withholder:
        return self._open_withholder().with_mask(WITHHELD)

    def clean(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data of an event with ``[withheld]`` for each secret."""
        self._learn()
        return self._clean_message(self._withholder.clean_fields(data, EVENT_TEXTS))

    def _clean_message(self, event: dict[str, Any]) -> dict[str, Any]:
        """The same for what a tool says about its progress: a ``message`` that is a text, not a reply's object."""
        if isinstance(message := event.get("message"), str):
            return {**event, "message": self._withholder.clean_text(message)}
        inner = event.get("event")
        return {**event, "event": self._clean_message(cast("Any", inner))} if isinstance(inner, dict) else event

    def filter_pieces(self, receive: Callable[[str], None]) -> PieceFilter:
        """What withholds the secrets that are known now from a text that comes in pieces."""
        self._learn()
        return self._withholder.filter_pieces(receive)

    def secret_at(self, text: str, place: int) -> tuple[int, int]:
        """Where a secret begins and ends that a place in a text is inside of; twice the place if there is none."""
        first = max(0, place - _LONGEST_SECRET)
        spans, _ = self.filter_pieces(lambda _: None).search(text[first : place + _LONGEST_SECRET], complete=True)
        return next(((first + s, first + e) for s, e in spans if first + s < place < first + e), (place, place))

    def _learn(self) -> None:
        withholder, run = self._withholder, self._run
        if withholder.knows_tools:
            messages = run.messages
            self._read = self._read if self._read <= len(messages) else 0
            for call in (call for message in messages[self._read :] for call in message.tool_calls):
                withholder.add_arguments(call.name, call.arguments)
            self._read = len(messages)
            for state in run.batch:  # a person may have edited the arguments
                withholder.add_arguments(state.call.name, state.call.arguments)
        for value in (*run.withheld, *self._added):
            withholder.add(value)

    def mask(self, text: str, data: dict[str, Any]) -> str:
        """A text with ``[withheld]`` for each secret.

        Args:
            text: The text.
            data: The event that it is about, as JSON data, which may have secret arguments itself.
        """
        self.clean(data)  # its arguments become known
        return self._withholder.clean_text(text)

    def has_secrets(self, tool: str) -> bool:
        """Whether a tool has secret arguments."""
        return self._withholder.has_secrets(tool)

    def __deepcopy__(self, memo: object) -> EventFilter:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoFilter, ()


class _NoFilter:
    """The filter of an event that was pickled: what it would have to withhold stayed in the other process."""

    def clean(self, data: dict[str, Any]) -> dict[str, Any]:
        raise RunError(
            "an event that was pickled does not know what its run withholds: send event.to_dict(), not the event"
        )

    def mask(self, text: str, data: dict[str, Any]) -> str:
        return f"{text.partition('(')[0]}(pickled: its fields are not shown)"

    def has_secrets(self, tool: str) -> bool:
        return True
