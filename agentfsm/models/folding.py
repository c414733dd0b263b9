"""``Folding``: a stream's events, one by one, into what they add up to, and which of them mean that it failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from agentfsm.core.streaming import Piece
from agentfsm.errors import ModelError, ProviderError
from agentfsm.models.assembly import Assembly
from agentfsm.models.faults import Caller, error_in
from agentfsm.models.wire import as_object, loads_as_it_is

__all__ = ["BROKE_DOWN", "Folding"]

BROKE_DOWN = 500
"""The status that an error in mid-stream stands for, where it names none."""


class Folding:
    """Folds the events of one stream.

    An event that is no JSON is the end of all trust in a stream: what else is missing, nobody knows. An error that
    names no status is the server's: it had taken the request, and broke down over it.

    Args:
        assembly: What they are folded into.
        caller: Who calls, for the texts of errors.
        refused: The error that an event stands for which tells of one.
    """

    def __init__(self, assembly: Assembly, caller: Caller, refused: Callable[[dict[str, Any]], ModelError]) -> None:
        self._assembly, self._caller, self._refused = assembly, caller, refused

    def add(self, frames: Iterator[tuple[str, bytes]], *, last: bool = False) -> Iterator[Piece]:
        """Fold events in, until the stream has said its last word.

        Args:
            frames: Names and data of events.
            last: Whether no more bytes will come.

        Raises:
            ModelError: The stream broke off, tells of an error, or cannot be read.
        """
        assembly = self._assembly
        for name, data in self._guarded(frames):
            if data.strip() == b"[DONE]":
                assembly.closed = True
                return
            try:
                value = loads_as_it_is(data)
            except ValueError as error:
                if name == "error":
                    text = data.decode(errors="replace")
                    raise self._refused({"error": {"message": text}}) from None
                where = "broke off" if last else "is broken"
                raise self._caller.broken(f"the stream {where}: an event is no whole JSON ({error})") from None
            event = as_object(value)
            if error_in(event):
                raise self._refused(event)
            if name == "error":
                raise self._refused({"error": event or str(value)})
            yield from assembly.add(event)
            if assembly.closed:
                return

    def _guarded(self, frames: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        try:
            yield from frames
        except ProviderError as error:
            raise self._caller.unusable(str(error)) from None
