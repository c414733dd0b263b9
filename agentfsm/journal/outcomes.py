"""Outcomes as JSON and back, field by field, whatever their classes hold.

A field that has its default is left out. What somebody said, and all JSON of the user's, is hidden; names,
ids, kinds and counts stand in the record itself. A reply's calls or text are not written again where an
outcome only repeats them, and a tool's result stands in its own record, to which the outcome points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentfsm.core import outcomes as o
from agentfsm.core.failures import DEFAULT_ACTIONS, Failure
from agentfsm.core.messages import Message, Reply, ToolResult
from agentfsm.core.state import PersonReply, Waiting
from agentfsm.errors import JournalError
from agentfsm.journal.records import Hider

__all__ = ["OutcomeReader", "OutcomeWriter", "load_failure", "load_result", "written"]

Data = dict[str, Any]

HIDDEN = frozenset(
    {
        "answer",
        "arguments",
        "blockers",
        "by",
        "choices",
        "content",
        "context",
        "data",
        "denied",
        "ending_value",
        "explanation",
        "extra",
        "malformed",
        "metadata",
        "partial_data",
        "question",
        "recalled",
        "record",
        "refusal",
        "text",
        "value",
    }
)
"""The fields that hold what somebody said, or JSON of the user's; mappings are hidden wherever they stand."""

_NO_DEFAULT = object()


class _Shape(NamedTuple):
    """What there is to write of a class.

    Attributes:
        fields: Each field's name, its default and whether it is hidden.
        get: Gives the fields of a value, all at once.
        single: Whether there is one field, which ``get`` gives as it is.
        failure: Whether it is a failure; to ask a class of pydantic's what is an instance of it takes long.
    """

    fields: tuple[tuple[str, Any, bool], ...]
    get: Callable[[Any], Any]
    single: bool
    failure: bool


@cache
def _shape(kind: type[object]) -> _Shape | None:
    """The shape of a dataclass or of a model of pydantic; None for any other class."""
    if issubclass(kind, BaseModel):
        defaults = {n: f.get_default(call_default_factory=False) for n, f in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        defaults = {f.name: _default(f) for f in dataclasses.fields(kind)}
    else:
        return None
    get = attrgetter(*defaults) if defaults else _nothing
    fields = tuple((name, default, name in HIDDEN) for name, default in defaults.items())
    return _Shape(fields, get, len(fields) == 1, issubclass(kind, Failure))


def _nothing(value: object) -> tuple[()]:
    return ()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


def written(value: Any, hider: Hider) -> Any:
    """A value of the loop's as JSON data, with what is to be hidden put aside."""
    kind = value.__class__
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is list:
        return [written(item, hider) for item in value]
    shape = _shape(kind)
    if shape is not None:
        return _object(value, hider, shape)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [written(item, hider) for item in cast("Sequence[Any]", value)]
    return hider.hide(dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value)


def _object(value: Any, hider: Hider, shape: _Shape | None = None, without: str = "") -> Data:
    """A value's fields that are not what they are by default.

    Args:
        value: A dataclass or a model of pydantic.
        hider: Takes what is to be hidden.
        shape: The shape of its class, where that is known.
        without: A field to leave out.

    Raises:
        TypeError: It is something else.
    """
    shape = shape or _shape(value.__class__)
    if shape is None:
        raise TypeError(f"{type(value).__name__} has no fields to write")
    fields, get, single, failure = shape
    data: Data = {}
    for (name, default, hidden), held in zip(fields, (get(value),) if single else get(value), strict=True):
        if held is default or name == without:
            continue
        kind = held.__class__
        if not hidden:
            if kind not in _AS_IT_IS:
                held = written(held, hider)
        elif name == "arguments":
            held = hider.arguments(str(getattr(value, "tool", "") or getattr(value, "name", "")), held)
        elif kind not in _AS_IT_IS and isinstance(held, (BaseModel, PersonReply)):
            held = written(held, hider)
        else:
            held = hider.hide(held)
        if not _is_default(held, default):
            data[name] = held
    if failure and value.suggested_action is DEFAULT_ACTIONS[value.kind]:
        del data["suggested_action"]
    return data


_AS_IT_IS = frozenset({type(None), bool, int, float, str})


def _is_default(held: Any, default: Any) -> bool:
    if held:
        return bool(held == default)
    if held == {}:
        return default == {} or dataclasses.is_dataclass(default)
    if held == []:
        return default in ((), [])
    return bool(held == default)


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

    def waiting(self, waiting: Waiting, hider: Hider) -> Data:
        """What a run waits for."""
        self._asked = waiting.tool
        return _object(waiting, hider)

    def result(self, eid: str, result: ToolResult, hider: Hider) -> Data:
        """The result of an effect; an outcome that holds it will point to it."""
        self._results[id(result)] = (eid, result)
        return _object(result, hider)

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

    def write(self, outcome: o.Outcome, hider: Hider) -> Data:
        """An outcome as an object of one field: its kind."""
        kind = _NAMES[type(outcome)]
        if isinstance(outcome, o.Read):
            return {kind: self._read(outcome, hider)}
        if isinstance(outcome, o.Answered):
            return {kind: {"reply": self._person(outcome.reply, hider)}}
        results: Sequence[ToolResult] = getattr(outcome, "results", ())
        if isinstance(outcome, o.Replied):
            self._reply = outcome.reply
        data = _object(outcome, hider, without="results" if results else "")
        if results:
            data["results"] = [self._pointer(result, hider) for result in results]
        if hasattr(outcome, "results"):
            self._results.clear()
        return {kind: data}

    def _pointer(self, result: ToolResult, hider: Hider) -> Any:
        known = self._results.get(id(result))
        return _object(result, hider) if known is None else known[0]

    def _read(self, read: o.Read, hider: Hider) -> Data:
        message = None if self._reply is None else self._reply.message
        if self._repeats_calls(read):
            return {**_object(read, hider, without="calls"), "calls": "reply"}
        if message is not None and read.answer is message.content and not read.calls:
            return {**_object(read, hider, without="answer"), "answer": {"is": "text"}}
        data = _object(read, hider, without="answer")
        if read.answer is not None:
            data["answer"] = {"value": hider.hide(read.answer)}
        return data

    def _person(self, reply: PersonReply, hider: Hider) -> Data:
        data = _object(reply, hider, without="arguments")
        if reply.arguments:
            data["arguments"] = hider.arguments(self._asked, reply.arguments)
        return data


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
