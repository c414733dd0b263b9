"""Outcomes as JSON and back.

A reply's calls or text are not written again where an outcome only repeats them, and a tool's result stands in
its own record, to which the outcome points.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from agentfsm.core import outcomes as o
from agentfsm.core.failures import Failure
from agentfsm.core.messages import Message, Reply, ToolResult
from agentfsm.core.state import PersonReply, Waiting
from agentfsm.errors import JournalError
from agentfsm.journal.fields import fields
from agentfsm.journal.records import Hider

__all__ = ["OutcomeReader", "OutcomeWriter", "load_failure", "load_result"]

Data = dict[str, Any]

_KINDS: Mapping[str, Any] = {
    "checked": o.Checked,
    "replied": o.Replied,
    "call_failed": o.CallFailed,
    "read": o.Read,
    "ran": o.Ran,
    "parked": o.Parked,
    "judged": o.Judged,
    "recovered": o.Recovered,
    "answered": o.Answered,
    "expired": o.Expired,
    "noted": o.Noted,
    "cancelled": o.Cancelled,
    "aborted": o.Aborted,
}

_NAMES = {kind: name for name, kind in _KINDS.items()}


class OutcomeWriter:
    """Writes one run's outcomes; remembers what was written before, so nothing is written twice."""

    def __init__(self) -> None:
        self._asked = ""
        self._reply: Reply | None = None
        self._results: dict[int, tuple[str, ToolResult]] = {}  # by identity: the object is kept, so it stays its own

    def go_on(self, asked: str, results: Mapping[str, ToolResult]) -> None:
        """Know what was written before: the tool that a person is asked about, and results of effects."""
        self._asked = asked
        self._results = {id(result): (eid, result) for eid, result in results.items()}

    def waiting(self, waiting: Waiting, hider: Hider) -> str:
        """What a run waits for, as JSON."""
        self._asked = waiting.tool
        return fields(waiting, hider)

    def result(self, eid: str, result: ToolResult, hider: Hider) -> str:
        """The result of an effect, as JSON; an outcome that holds it will point to it."""
        self._results[id(result)] = (eid, result)
        return fields(result, hider)

    def repeated(self, outcome: o.Outcome) -> str | None:
        """The JSON of an outcome that says nothing, or only what was written before; None for any other."""
        if isinstance(outcome, o.Judged):
            return '{"judged":{}}'
        if isinstance(outcome, o.Checked):
            return None if outcome.recalled else '{"checked":{}}'
        if isinstance(outcome, o.Read):
            return '{"read":{"calls":"reply"}}' if self._repeats_calls(outcome) and outcome.malformed is None else None
        if isinstance(outcome, o.Ran) and outcome.results:
            known = [self._results.get(id(result)) for result in outcome.results]
            eids = [f'"{pair[0]}"' for pair in known if pair is not None]
            if len(eids) == len(known):
                self._results.clear()
                return f'{{"ran":{{"results":[{",".join(eids)}]}}}}'
        return None

    def _repeats_calls(self, read: o.Read) -> bool:
        reply = self._reply
        return reply is not None and bool(read.calls) and read.calls is reply.message.tool_calls and read.answer is None

    def write(self, outcome: o.Outcome, hider: Hider) -> str:
        """The JSON of an outcome: an object of one field, its kind."""
        if isinstance(outcome, o.Read):
            text = self._read(outcome, hider)
        elif isinstance(outcome, o.Answered):
            text = f'{{"reply":{self._person(outcome.reply, hider)}}}'
        elif (results := getattr(outcome, "results", None)) is not None:
            pointers = ",".join([self._pointer(result, hider) for result in results])
            text = fields(outcome, hider, {"results": f"[{pointers}]"})
            self._results.clear()
        else:
            if isinstance(outcome, o.Replied):
                self._reply = outcome.reply
            text = fields(outcome, hider)
        return f'{{"{_NAMES[type(outcome)]}":{text}}}'

    def _pointer(self, result: ToolResult, hider: Hider) -> str:
        known = self._results.get(id(result))
        return fields(result, hider) if known is None else f'"{known[0]}"'

    def _read(self, read: o.Read, hider: Hider) -> str:
        message = None if self._reply is None else self._reply.message
        if self._repeats_calls(read):
            return fields(read, hider, {"calls": '"reply"'})
        if message is not None and read.answer is message.content and not read.calls:
            return fields(read, hider, {"answer": '{"is":"text"}'})
        return fields(read, hider, {"answer": "" if read.answer is None else f'{{"value":{hider.put(read.answer)}}}'})

    def _person(self, reply: PersonReply, hider: Hider) -> str:
        arguments = hider.arguments(self._asked, reply.arguments) if reply.arguments else ""
        return fields(reply, hider, {"arguments": arguments})


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _load(shape: Any, data: Any) -> Any:
    try:
        return _adapter(shape).validate_python(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise JournalError(f"{shape.__name__} {where}: {problem['msg']}") from None


def load_result(data: Data) -> ToolResult:
    """The result of a tool call.

    Raises:
        JournalError: The data is none.
    """
    return cast("ToolResult", _load(ToolResult, data))


def load_failure(data: Data) -> Failure:
    """A failure.

    Raises:
        JournalError: The data is none.
    """
    return cast("Failure", _load(Failure, data))


class OutcomeReader:
    """Reads one run's outcomes back, in the order in which they were written."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.results: dict[str, ToolResult] = {}

    def result(self, eid: str, data: Data) -> ToolResult:
        """The result of an effect, kept for the outcome that points to it."""
        result = load_result(data)
        self.results[eid] = result
        return result

    def read(self, written: Data) -> o.Outcome:
        """The outcome that ``OutcomeWriter`` wrote.

        Raises:
            JournalError: The data is none.
        """
        if len(written) != 1 or next(iter(written)) not in _KINDS:
            raise JournalError(f"{', '.join(written) or 'nothing'} is no kind of outcome")
        ((kind, data),) = written.items()
        if "results" in data or kind == "ran":
            data = {**data, "results": [self._result(r) for r in data.get("results", ())]}
        if kind == "read":
            data = self._read(data)
        outcome = cast("o.Outcome", _load(_KINDS[kind], data))
        if isinstance(outcome, o.Replied):
            self.reply = outcome.reply
        return outcome

    def _result(self, written: Any) -> Any:
        if not isinstance(written, str):
            return written
        if written not in self.results:
            raise JournalError(f"the result of effect {written} is missing")
        return self.results[written]

    def _read(self, data: Data) -> Data:
        calls, answer = data.get("calls"), data.get("answer")
        if calls == "reply":
            return {**data, "calls": self._message().tool_calls}
        if answer is None:
            return data
        return {**data, "answer": answer["value"] if "value" in answer else self._message().content}

    def _message(self) -> Message:
        if self.reply is None:
            raise JournalError("it points to a reply, and there was none")
        return self.reply.message
