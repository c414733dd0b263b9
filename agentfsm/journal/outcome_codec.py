"""Outcomes and other loop values as canonical JSON, and back.

Fields equal to their default are omitted. Texts and user-supplied JSON are hidden; names, ids, kinds and counts are
in the record itself. A reply's calls or text are not repeated by the outcome that parses them, and a tool result is
stored once, in its own record, which the outcome references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentfsm.errors import JournalError
from agentfsm.journal.records import CommitmentWriter
from agentfsm.loop import outcomes as o
from agentfsm.loop.canonical_json import MAX_INT, encode
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message, Reply, ToolResult
from agentfsm.loop.state import HumanReply, PendingRequest

__all__ = [
    "HIDDEN_FIELDS",
    "OutcomeReader",
    "OutcomeWriter",
    "fields_to_json",
    "load_failure",
    "load_result",
    "to_json",
]


HIDDEN_FIELDS = frozenset(
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
_EMPTY_JSON: Mapping[str, tuple[Any, ...]] = {"{}": ({},), "[]": ((), [])}  # and the defaults that it stands for
_NO_OVERRIDES: Mapping[str, str] = {}


class _Field(NamedTuple):
    name: str
    key: str  # its name as it stands in an object
    default: Any
    is_hidden: bool


class _ClassShape(NamedTuple):
    """What there is to write of a class.

    Attributes:
        fields: Its fields, in the order in which canonical JSON has them.
        get_values: Gives the fields of a value, all at once.
        single: Whether there is one field, which ``get_values`` gives as it is.
        is_failure: Whether it is a failure; to ask a class of pydantic's what is an instance of it takes long.
    """

    fields: tuple[_Field, ...]
    get_values: Callable[[Any], Any]
    single: bool
    is_failure: bool


@cache
def _class_shape(kind: type[object]) -> _ClassShape | None:
    """The shape of a dataclass or of a model of pydantic; None for any other class."""
    if issubclass(kind, BaseModel):
        defaults = {n: f.get_default(call_default_factory=False) for n, f in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        defaults = {f.name: _default_of(f) for f in dataclasses.fields(kind)}
    else:
        return None
    names = sorted(defaults)
    get = attrgetter(*names) if names else _no_values
    fields = tuple(_Field(name, f'"{name}":', defaults[name], name in HIDDEN_FIELDS) for name in names)
    return _ClassShape(fields, get, len(fields) == 1, issubclass(kind, Failure))


def _no_values(value: object) -> tuple[()]:
    return ()


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


def to_json(value: Any, commitments: CommitmentWriter) -> str:
    """The JSON of a value of the loop's, with what is to be hidden put aside."""
    kind = value.__class__
    if kind is str:
        return encode(value)
    if kind is tuple or kind is list:
        return f"[{','.join([to_json(item, commitments) for item in value])}]"
    shape = _class_shape(kind)
    if shape is not None:
        return fields_to_json(value, commitments, shape=shape)
    if isinstance(value, Enum):
        return encode(value.value)
    if kind is int and -MAX_INT <= value <= MAX_INT:
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return encode(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join([to_json(item, commitments) for item in cast('Sequence[Any]', value)])}]"
    return commitments.commitment_json(dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value)


def fields_to_json(
    value: Any,
    commitments: CommitmentWriter,
    overrides: Mapping[str, str] = _NO_OVERRIDES,
    shape: _ClassShape | None = None,
) -> str:
    """The JSON of a value's fields that are not what they are by default.

    Args:
        value: A dataclass or a model of pydantic.
        commitments: Takes what is to be hidden.
        overrides: What is written for some of the fields, where they are not what they are by default.
        shape: The shape of its class, where that is known.

    Raises:
        TypeError: It is something else.
    """
    shape = shape or _class_shape(value.__class__)
    if shape is None:
        raise TypeError(f"{type(value).__name__} has no fields to write")
    said: list[str] = []
    for (name, key, default, hidden), held in zip(
        shape.fields, (shape.get_values(value),) if shape.single else shape.get_values(value), strict=True
    ):
        if held is default:
            continue
        kind = held.__class__
        if name in overrides:
            text = overrides[name]
        elif kind in _SCALARS and held == default:
            continue
        elif not hidden:
            text = to_json(held, commitments)
        elif name == "arguments":
            text = commitments.arguments_json(str(getattr(value, "tool", "") or getattr(value, "name", "")), held)
        elif kind not in _SCALARS and isinstance(held, (BaseModel, HumanReply)):
            text = to_json(held, commitments)
        else:
            text = commitments.commitment_json(held)
        if text and (text not in _EMPTY_JSON or not _is_default_empty(text, default)):
            said.append(key + text)
    if shape.is_failure and value.suggested_action is value.kind.spec.action:
        said = [each for each in said if not each.startswith('"suggested_action":')]
    return f"{{{','.join(said)}}}"


_SCALARS = frozenset({type(None), bool, int, float, str})


def _is_default_empty(text: str, default: Any) -> bool:
    """Whether an empty value is what there is by default."""
    return default in _EMPTY_JSON[text] or (text == "{}" and dataclasses.is_dataclass(default))


Data = dict[str, Any]

_OUTCOME_TYPES: Mapping[str, Any] = {
    "checked": o.PreStepDone,
    "replied": o.ModelCallSucceeded,
    "call_failed": o.ModelCallFailed,
    "read": o.ReplyParsed,
    "ran": o.ToolsRan,
    "parked": o.CallBlocked,
    "judged": o.Judged,
    "recovered": o.RecoveryDecided,
    "answered": o.HumanAnswered,
    "expired": o.Expired,
    "noted": o.StateResult,
    "cancelled": o.Cancelled,
    "aborted": o.Aborted,
}

_OUTCOME_NAMES = {kind: name for name, kind in _OUTCOME_TYPES.items()}


class OutcomeWriter:
    """Writes one run's outcomes; remembers what was written before, so nothing is written twice."""

    def __init__(self) -> None:
        self._tool = ""
        self._reply: Reply | None = None
        self._results: dict[int, tuple[str, ToolResult]] = {}  # by identity: the object is kept, so it stays its own

    def resume_from(self, tool: str, results: Mapping[str, ToolResult]) -> None:
        """Know what was written before: the tool that a person is asked about, and results of effects."""
        self._tool = tool
        self._results = {id(result): (eid, result) for eid, result in results.items()}

    def write_request(self, request: PendingRequest, commitments: CommitmentWriter) -> str:
        """What a run waits for, as JSON."""
        self._tool = request.tool
        return fields_to_json(request, commitments)

    def write_result(self, eid: str, result: ToolResult, commitments: CommitmentWriter) -> str:
        """The result of an effect, as JSON; an outcome that holds it will point to it."""
        self._results[id(result)] = (eid, result)
        return fields_to_json(result, commitments)

    def write_if_repeated(self, outcome: o.Outcome) -> str | None:
        """The JSON of an outcome that says nothing, or only what was written before; None for any other."""
        if isinstance(outcome, o.Judged):
            return '{"judged":{}}'
        if isinstance(outcome, o.PreStepDone):
            return None if outcome.recalled else '{"checked":{}}'
        if isinstance(outcome, o.ReplyParsed):
            return '{"read":{"calls":"reply"}}' if self._repeats_calls(outcome) and outcome.malformed is None else None
        if isinstance(outcome, o.ToolsRan) and outcome.results:
            known = [self._results.get(id(result)) for result in outcome.results]
            eids = [f'"{pair[0]}"' for pair in known if pair is not None]
            if len(eids) == len(known):
                self._results.clear()
                return f'{{"ran":{{"results":[{",".join(eids)}]}}}}'
        return None

    def _repeats_calls(self, parsed: o.ReplyParsed) -> bool:
        reply = self._reply
        return (
            reply is not None
            and bool(parsed.calls)
            and parsed.calls is reply.message.tool_calls
            and parsed.answer is None
        )

    def write(self, outcome: o.Outcome, commitments: CommitmentWriter) -> str:
        """The JSON of an outcome: an object of one field, its kind."""
        if isinstance(outcome, o.ReplyParsed):
            text = self._write_parsed_reply(outcome, commitments)
        elif isinstance(outcome, o.HumanAnswered):
            text = f'{{"reply":{self._write_human_reply(outcome.reply, commitments)}}}'
        elif (results := getattr(outcome, "results", None)) is not None:
            pointers = ",".join([self._result_reference(result, commitments) for result in results])
            text = fields_to_json(outcome, commitments, {"results": f"[{pointers}]"})
            self._results.clear()
        else:
            if isinstance(outcome, o.ModelCallSucceeded):
                self._reply = outcome.reply
            text = fields_to_json(outcome, commitments)
        return f'{{"{_OUTCOME_NAMES[type(outcome)]}":{text}}}'

    def _result_reference(self, result: ToolResult, commitments: CommitmentWriter) -> str:
        known = self._results.get(id(result))
        return fields_to_json(result, commitments) if known is None else f'"{known[0]}"'

    def _write_parsed_reply(self, parsed: o.ReplyParsed, commitments: CommitmentWriter) -> str:
        message = None if self._reply is None else self._reply.message
        if self._repeats_calls(parsed):
            return fields_to_json(parsed, commitments, {"calls": '"reply"'})
        if message is not None and parsed.answer is message.content and not parsed.calls:
            return fields_to_json(parsed, commitments, {"answer": '{"is":"text"}'})
        return fields_to_json(
            parsed,
            commitments,
            {"answer": "" if parsed.answer is None else f'{{"value":{commitments.commitment_json(parsed.answer)}}}'},
        )

    def _write_human_reply(self, reply: HumanReply, commitments: CommitmentWriter) -> str:
        arguments = commitments.arguments_json(self._tool, reply.arguments) if reply.arguments else ""
        return fields_to_json(reply, commitments, {"arguments": arguments})


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _validate(shape: Any, data: Any) -> Any:
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
    return cast("ToolResult", _validate(ToolResult, data))


def load_failure(data: Data) -> Failure:
    """A failure.

    Raises:
        JournalError: The data is none.
    """
    return cast("Failure", _validate(Failure, data))


class OutcomeReader:
    """Reads one run's outcomes back, in the order in which they were written."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.results: dict[str, ToolResult] = {}

    def read_result(self, eid: str, data: Data) -> ToolResult:
        """The result of an effect, kept for the outcome that points to it."""
        result = load_result(data)
        self.results[eid] = result
        return result

    def read(self, encoded: Data) -> o.Outcome:
        """The outcome that ``OutcomeWriter`` wrote.

        Raises:
            JournalError: The data is none.
        """
        if len(encoded) != 1 or next(iter(encoded)) not in _OUTCOME_TYPES:
            raise JournalError(f"{', '.join(encoded) or 'nothing'} is no kind of outcome")
        ((kind, data),) = encoded.items()
        if "results" in data or kind == "ran":
            data = {**data, "results": [self._resolve_result(r) for r in data.get("results", ())]}
        if kind == "read":
            data = self._resolve_parsed_reply(data)
        outcome = cast("o.Outcome", _validate(_OUTCOME_TYPES[kind], data))
        if isinstance(outcome, o.ModelCallSucceeded):
            self.reply = outcome.reply
        return outcome

    def _resolve_result(self, encoded: Any) -> Any:
        if not isinstance(encoded, str):
            return encoded
        if encoded not in self.results:
            raise JournalError(f"the result of effect {encoded} is missing")
        return self.results[encoded]

    def _resolve_parsed_reply(self, data: Data) -> Data:
        calls, answer = data.get("calls"), data.get("answer")
        if calls == "reply":
            return {**data, "calls": self._last_message().tool_calls}
        if answer is None:
            return data
        return {**data, "answer": answer["value"] if "value" in answer else self._last_message().content}

    def _last_message(self) -> Message:
        if self.reply is None:
            raise JournalError("it points to a reply, and there was none")
        return self.reply.message
