"""``PartialOutput``: a structured answer as far as it has been streamed, from the events of a run."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import from_json

from agentfsm.loop.events import Event, ModelReplied, RecoveryStarted, ReplyRestarted, TextDelta, ToolCallDelta


class PartialOutput:
    """What a run with an ``output_type`` has written of its answer so far: give it each event of the run.

    ::

        partial = PartialOutput()
        async for event in run:
            if (town := partial.add(event)) is not None:
                show(town.get("name", "..."))

    It is JSON data and not validated: fields are missing, and the last text may be cut off. The answer itself is
    ``run.result.output``. A reply that was cut off and is continued by another one is shown up to the cut.
    """

    def __init__(self) -> None:
        self._text = ""
        self._call: int | None = None  # which call of the reply is the answer; None for its text
        self._read_at = 0
        self._replied = False
        self._last: Any = None

    def add(self, event: Event) -> Any:
        """Take in one event.

        It costs little however long the answer is: a long one is not read again for each of its pieces.

        Args:
            event: The event.

        Returns:
            The answer so far, as a dict or a list, if there is more of it than before; else None.
        """
        match event:
            case TextDelta(text=piece):
                return self._extend(piece, None)
            case ToolCallDelta(name="return_done", index=index, arguments=piece):
                return self._extend(piece, index)
            case ReplyRestarted() | RecoveryStarted():
                self._begin(None)
            case ModelReplied():
                self._replied = True
                return self._read()
            case _:
                pass
        return None

    def _begin(self, call: int | None) -> None:
        self._text, self._call, self._read_at, self._replied, self._last = "", call, 0, False, None

    def _extend(self, piece: str, call: int | None) -> Any:
        if self._replied or call != self._call:
            self._begin(call)
        self._text += piece
        if len(self._text) < self._read_at:
            return None
        self._read_at = len(self._text) + len(self._text) // 50
        return self._read()

    def _read(self) -> Any:
        """The answer in the text so far, if it is another one than the last."""
        begins = [place for place in (self._text.find("{"), self._text.find("[")) if place >= 0]
        if not begins:
            return None
        text = self._text[min(begins) :].rstrip().removesuffix("```")
        try:
            found: Any = from_json(text, allow_partial="trailing-strings")
        except ValueError:  # no JSON: an answer in words
            return None
        if self._call is not None:
            arguments = cast("dict[str, Any]", found if isinstance(found, dict) else {})
            found = next(iter(arguments.values()), None)
        if not isinstance(found, (dict, list)) or found == self._last:
            return None
        self._last = cast("Any", found)
        return self._last
