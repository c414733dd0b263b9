"""Outcomes and other loop values as canonical JSON, and back: commitments, withheld secrets, field encoding.

Fields equal to their default are omitted. Texts and user-supplied JSON are hidden: the body holds a commitment, and
the value is stored beside it. Names, ids, kinds and counts are in the body itself. Secrets are replaced before
anything is hashed. A reply's calls or text are not repeated by the outcome that parses them, and a tool result is
stored once, in its own record, which the outcome references.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from agentfsm.errors import JournalError
from agentfsm.journal.hash_chain import commitment
from agentfsm.loop import outcomes as o
from agentfsm.loop.canonical_json import MAX_INT, encode
from agentfsm.loop.failures import Failure
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult
from agentfsm.loop.state_json import KEPT_FIELDS, TEXT_FIELDS
from agentfsm.loop.withholding import Withholder


class CommitmentWriter:
    """Collects the hidden values of one record and returns the commitments that go into its body."""

    def __init__(self, withholder: Withholder | None = None) -> None:
        self._withholder = withholder
        self._hidden: list[str] = []
        self._salts = b""

    def _next_salt(self) -> bytes:
        """16 random bytes, drawn 32 salts at a time because a system call is slow."""
        if not self._salts:
            self._salts = os.urandom(16 * 32)
        salt, self._salts = self._salts[:16], self._salts[16:]
        return salt

    def commitment_json(self, value: Any) -> str:
        """The JSON that the body holds for a hidden value; an empty value is written as it is."""
        if value is None or value == "" or value == [] or value == {}:
            return encode(value)
        try:
            text = encode(value)
        except TypeError:  # a user-supplied value that JSON cannot represent: the closest JSON
            value = to_jsonable_python(value, fallback=str, inf_nan_mode="constants")
            text = encode(value)
        if self._withholder is not None and self._withholder.may_occur(text):
            text = encode(self._withholder.clean(value))
        return self._commit(text)

    def own_json(self, data: Any) -> str:
        """The JSON that the body holds for data of ours (a state, messages), in which some fields are the user's."""
        withholder = self._withholder
        return self._commit(
            encode(data if withholder is None else withholder.clean_fields(data, TEXT_FIELDS, KEPT_FIELDS))
        )

    def add_secrets(self, values: Iterable[Any]) -> None:
        """Withhold values from now on."""
        if self._withholder is not None:
            for value in values:
                self._withholder.add(value)

    def name_json(self, name: str) -> str:
        """The JSON that the body holds for who answered; a name is never withheld."""
        return self._commit(encode(name)) if name else '""'

    def _commit(self, text: str) -> str:
        salt = self._next_salt()
        self._hidden.append(f'["{salt.hex()}",{text}]')
        return f'{{"#":[{len(self._hidden) - 1},"{commitment(salt, text)}"]}}'

    def commitment_value(self, value: Any) -> Any:
        """``commitment_json``, decoded, for a body that is encoded later."""
        return json.loads(self.commitment_json(value))

    def arguments_json(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The JSON that the body holds for a call's arguments, with the secret ones replaced."""
        if self._withholder is None or not arguments:
            return self.commitment_json(dict(arguments))
        self._withholder.add_arguments(tool, arguments)
        text = encode(arguments)
        has_secrets = self._withholder.has_secret_arguments(tool)
        if has_secrets or self._withholder.may_occur(text):
            text = encode(self._withholder.clean_arguments(tool, arguments))
        return self._commit(text)

    def dump(self) -> str:
        """The hidden values so far, as ``SealedRecord.hidden``."""
        return f"[{','.join(self._hidden)}]" if self._hidden else ""

    def drain(self) -> str:
        """``dump``, at the end of a record: the next record starts with no hidden values."""
        if not self._hidden:
            return ""
        hidden = self.dump()
        self._hidden.clear()
        return hidden


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
        "filename",
        "instruction",
        "malformed",
        "metadata",
        "partial_data",
        "question",
        "reason",
        "recalled",
        "record",
        "refusal",
        "text",
        "value",
        "withheld",
    }
)
"""The fields that hold texts or user-supplied JSON; they are hidden. Mappings are hidden in every field."""

_NO_DEFAULT = object()
_EMPTY_JSON: Mapping[str, tuple[Any, ...]] = {"{}": ({},), "[]": ((), [])}  # by text, the defaults equal to it
_NO_OVERRIDES: Mapping[str, str] = {}
_SCALARS = frozenset({type(None), bool, int, float, str})


class _Field(NamedTuple):
    name: str
    key: str  # its name as the key of a JSON object, with the colon
    write: Callable[[Any, CommitmentWriter], str] | None  # None: the arguments of a call, which depend on its tool


class _ClassShape(NamedTuple):
    """The fields of a class, prepared for writing.

    Attributes:
        fields: Its fields, in the order of canonical JSON.
        defaults: Their defaults.
        get_values: Returns the values of all fields of an object.
        single: Whether there is only one field; ``get_values`` then returns its value, not a tuple.
        is_failure: Whether it is a ``Failure``; cached because ``isinstance`` with a pydantic class is slow.
    """

    fields: tuple[_Field, ...]
    defaults: tuple[Any, ...]
    get_values: Callable[[Any], Any]
    single: bool
    is_failure: bool


@cache
def _class_shape(kind: type[object]) -> _ClassShape | None:
    """The shape of a dataclass or a pydantic model; None for any other class."""
    if issubclass(kind, BaseModel):
        defaults = {n: f.get_default(call_default_factory=False) for n, f in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        defaults = {f.name: _default_of(f) for f in dataclasses.fields(kind)}
    else:
        return None
    names = sorted(defaults)
    get = attrgetter(*names) if names else _no_values
    fields = tuple(_Field(name, f'"{name}":', _writer_of_field(name)) for name in names)
    return _ClassShape(fields, tuple(map(defaults.get, names)), get, len(fields) == 1, issubclass(kind, Failure))


def _no_values(value: object) -> tuple[()]:
    return ()


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


def _writer_of_field(name: str) -> Callable[[Any, CommitmentWriter], str] | None:
    if name not in HIDDEN_FIELDS:
        return to_json
    return {"by": _write_name, "arguments": None}.get(name, _write_hidden)


def _write_name(value: Any, commitments: CommitmentWriter) -> str:
    return commitments.name_json(value)


def _write_hidden(value: Any, commitments: CommitmentWriter) -> str:
    if value.__class__ not in _SCALARS and isinstance(value, (BaseModel, HumanReply)):
        return to_json(value, commitments)
    return commitments.commitment_json(value)


def to_json(value: Any, commitments: CommitmentWriter) -> str:
    """A loop value as canonical JSON, with commitments for what is hidden."""
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
    """The fields of a value that differ from their defaults, as a JSON object.

    Args:
        value: A dataclass or a pydantic model.
        commitments: Collects the hidden values.
        overrides: JSON to write for some of the fields, if they differ from their defaults.
        shape: The shape of its class, if the caller has it.

    Raises:
        TypeError: The value is neither.
    """
    shape = shape or _class_shape(value.__class__)
    if shape is None:
        raise TypeError(f"{type(value).__name__} has no fields to write")
    fields, defaults, get_values, single, is_failure = shape
    values = (get_values(value),) if single else get_values(value)
    entries: list[str] = []
    for field, field_value, default in zip(fields, values, defaults, strict=True):
        if field_value is default:
            continue
        name, key, write = field
        if name in overrides:
            text = overrides[name]
        elif field_value.__class__ in _SCALARS and field_value == default:
            continue
        elif write is not None:
            text = write(field_value, commitments)
        else:
            tool = str(value.name if value.__class__ is ToolCall else getattr(value, "tool", ""))
            text = commitments.arguments_json(tool, field_value)
        if len(text) > 2 or (text and not _is_default_empty(text, default)):
            entries.append(key + text)
    if is_failure and value.suggested_action is value.kind.spec.action:
        entries = [each for each in entries if not each.startswith('"suggested_action":')]
    return f"{{{','.join(entries)}}}"


def _is_default_empty(text: str, default: Any) -> bool:
    """Whether the JSON of a field is that of an empty value, which is its default."""
    return text in _EMPTY_JSON and (
        default in _EMPTY_JSON[text] or (text == "{}" and dataclasses.is_dataclass(default))
    )


Data = dict[str, Any]

Loaded = TypeVar("Loaded")

_OUTCOME_TYPES: Mapping[str, Any] = {
    "checked": o.PreStepDone,
    "replied": o.ModelCallSucceeded,
    "call_failed": o.ModelCallFailed,
    "read": o.ReplyParsed,
    "ran": o.ToolsRan,
    "parked": o.CallBlocked,
    "recovered": o.RecoveryDecided,
    "answered": o.HumanAnswered,
    "escalated": o.Escalated,
    "expired": o.Expired,
    "noted": o.StateResult,
    "cancelled": o.Cancelled,
    "aborted": o.Aborted,
}

_NO_OUTCOME: Data = {"judged": {}}
_NO_OUTCOME_JSON = encode(_NO_OUTCOME)
"""What a journal says of an effect that returned None (that of ``post_tool``)."""

_OUTCOME_NAMES = {kind: name for name, kind in _OUTCOME_TYPES.items()}


class OutcomeWriter:
    """Writes one run's outcomes, and references what an earlier record already holds instead of repeating it."""

    def __init__(self) -> None:
        self._tool = ""
        self._reply: Reply | None = None
        self._results: dict[
            int, tuple[str, ToolResult]
        ] = {}  # by id(); the object is kept alive, so its id stays unique

    def resume_from(self, tool: str, results: Mapping[str, ToolResult]) -> None:
        """Continue after earlier records: the tool of the pending request, and results that have a record."""
        self._tool = tool
        self._results = {id(result): (eid, result) for eid, result in results.items()}

    def write_request(self, request: PendingRequest, commitments: CommitmentWriter) -> str:
        """The request that a run waits for, as JSON."""
        self._tool = request.tool
        return fields_to_json(request, commitments)

    def write_result(
        self, eid: str, result: ToolResult | tuple[Reply | Failure, int], commitments: CommitmentWriter
    ) -> str:
        """The result of an effect, as JSON; the outcome that contains it will reference it by the effect's id."""
        if isinstance(result, tuple):  # a model's answer, and how many model calls it took
            answer, calls = result
            text = fields_to_json(answer, commitments)
            if isinstance(answer, Reply):
                return f'{{"model_calls":{calls},"reply":{text}}}'
            return f'{{"failure":{text},"model_calls":{calls}}}'
        self._results[id(result)] = (eid, result)
        return self._write_tool_result(result, commitments)

    def write_if_repeated(self, outcome: o.Outcome | None) -> str | None:
        """The JSON of an outcome that is empty or repeats what is written already; None for any other."""
        if outcome is None:
            return _NO_OUTCOME_JSON
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

    def write(self, outcome: o.Outcome | None, commitments: CommitmentWriter) -> str:
        """An outcome as JSON: an object with one field, its kind."""
        if outcome is None:
            return _NO_OUTCOME_JSON
        if isinstance(outcome, o.ReplyParsed):
            text = self._write_parsed_reply(outcome, commitments)
        elif isinstance(outcome, o.HumanAnswered):
            text = f'{{"reply":{self._write_human_reply(outcome.reply, commitments)}}}'
        elif (results := getattr(outcome, "results", None)) is not None:
            references = ",".join([self._result_reference(result, commitments) for result in results])
            text = fields_to_json(outcome, commitments, {"results": f"[{references}]", "calls": ""})
            self._results.clear()
        else:
            if isinstance(outcome, o.ModelCallSucceeded):
                self._reply = outcome.reply
                commitments.add_secrets(outcome.withheld)  # known before the first field is written
            text = fields_to_json(outcome, commitments)
        return f'{{"{_OUTCOME_NAMES[type(outcome)]}":{text}}}'

    def _result_reference(self, result: ToolResult, commitments: CommitmentWriter) -> str:
        known = self._results.get(id(result))
        return self._write_tool_result(result, commitments) if known is None else f'"{known[0]}"'

    @staticmethod
    def _write_tool_result(result: ToolResult, commitments: CommitmentWriter) -> str:
        if result.withheld:  # known before the first field is written
            commitments.add_secrets(result.withheld)
        return fields_to_json(result, commitments)

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
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def load_value(kind: type[Loaded], data: Data) -> Loaded:
    """A reply, a failure or another loop value, from its data in a record.

    Raises:
        JournalError: The data is not valid.
    """
    try:
        return cast("Loaded", _adapter(cast("Any", kind)).validate_python(data))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise JournalError(f"{kind.__name__} {where}: {problem['msg']}") from None


class OutcomeReader:
    """Reads one run's outcomes, in the order in which they were written.

    Attributes:
        reply: The model's last reply, or None.
        results: Results that no outcome has referenced yet, by effect id.
    """

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.results: dict[str, ToolResult] = {}

    def read_result(self, eid: str, data: Data) -> ToolResult:
        """The result of an effect; it is kept for the outcome that references it.

        Raises:
            JournalError: The data is not valid.
        """
        result = load_value(ToolResult, data)
        self.results[eid] = result
        return result

    def read(self, encoded: Data) -> o.Outcome | None:
        """The outcome that ``OutcomeWriter`` wrote.

        Raises:
            JournalError: The data is not valid, or references a reply or a result that is missing.
        """
        if encoded == _NO_OUTCOME:
            return None
        if len(encoded) != 1 or next(iter(encoded)) not in _OUTCOME_TYPES:
            raise JournalError(f"unknown kind of outcome: {', '.join(encoded) or 'none'}")
        ((kind, data),) = encoded.items()
        if "results" in data or kind == "ran":
            data = {**data, "results": [self._resolve_result(r) for r in data.get("results", ())]}
        if kind == "read":
            data = self._resolve_parsed_reply(data)
        outcome = cast("o.Outcome", load_value(_OUTCOME_TYPES[kind], data))
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
            raise JournalError("it references a reply, and there is no reply before it")
        return self.reply.message
