"""Events as JSON: the parts that several of them have, their version, and the JSON schema of them all.

Each object lists exactly what it has, so that what a later field of a class holds never gets out by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic_core import to_jsonable_python

from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.human_input import ReachedLimit
from agentfsm.loop.messages import MEDIA_TYPES, FinishReason, Image, Message, Role, ToolCall, ToolResult, Usage
from agentfsm.loop.quorum import Quorum

EVENT_VERSION = 1
"""The version of the schema. It changes when a field is taken away or gets another meaning, not when one is added."""

EVENT_TEXTS = frozenset(
    {
        "arguments",
        "blockers",
        "choices",
        "content",
        "context",
        "explanation",
        "form",
        "learned_facts",
        "malformed",
        "missing",
        "next_step_plan",
        "output",
        "partial_data",
        "prompt",
        "question",
        "rationale",
        "reason",
        "suggested_next_steps",
        "text",
        "value",
    }
)
"""The fields that hold texts or data of users, models and tools, in which secrets are withheld."""


def plain_json(value: Any) -> Any:
    """A user value as JSON data; what JSON cannot represent becomes a text."""
    return to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="null")


def event_fields(event: object, /, **own: Any) -> dict[str, Any]:
    """The fields of an event that the schema lists, as JSON data.

    Args:
        event: The event.
        own: Fields that are not as the event has them, as JSON data.
    """
    names = _EVENTS.get(type(event).__name__, ())
    return {name: own[name] if name in own else as_field(getattr(event, name), name) for name in names}


def as_field(value: Any, name: str = "") -> Any:
    """A field of an event as JSON data; of an object, what the schema lists."""
    if name in _USER_VALUES:
        return plain_json(value)
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return str(value)
        case tuple():
            return [as_field(each) for each in cast("tuple[object, ...]", value)]
        case Quorum():
            return _quorum_json(value)
        case _:
            part = next(part for kind, part in _PART_OF.items() if isinstance(value, kind))
            return {name: as_field(getattr(value, name), name) for name in _PARTS[part]["properties"]}


_USER_VALUES = frozenset({"arguments", "form", "output", "partial_data", "value"})

_PART_OF: Mapping[type[Any], str] = {
    Failure: "failure",
    Image: "image",
    Message: "message",
    ReachedLimit: "limit",
    ToolCall: "call",
    ToolResult: "result",
    Usage: "usage",
}
"""The part of the schema that lists what is shown of an object: no metadata, and nothing for its provider alone."""


def _quorum_json(quorum: Quorum) -> dict[str, Any]:
    rule = quorum.rule
    return {
        "needed": rule.n,
        "approved_by": [actor.id for actor in quorum.votes],
        "roles": list(quorum.roles),
        "not_requester": rule.not_requester,
        "requester": None if quorum.requester is None else quorum.requester.id,
    }


# -- the schema -------------------------------------------------------------------------------------------------

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_NUMBER: _Schema = {"type": "number", "minimum": 0}
_FLAG: _Schema = {"type": "boolean"}
_ANYTHING: _Schema = {}
_TEXTS: _Schema = {"type": "array", "items": _TEXT}
_MAP: _Schema = {"type": "object"}


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/$defs/{name}"}


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(values: Any) -> _Schema:
    return {"enum": [str(value) for value in values]}


def _object(**fields: _Schema) -> _Schema:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


_FAILURE = _or_null(_ref("failure"))

_PARTS: Mapping[str, _Schema] = {
    "call": _object(id=_TEXT, name=_TEXT, arguments=_MAP, malformed=_or_null(_TEXT)),
    "failure": _object(
        kind=_one_of(FailureKind),
        explanation=_TEXT,
        blockers=_TEXTS,
        suggested_action=_one_of(Action),
        partial_data=_ANYTHING,
    ),
    "image": _object(media_type=_one_of(MEDIA_TYPES), data={"type": "string", "contentEncoding": "base64"}),
    "limit": _object(
        unit=_one_of(("model_calls", "seconds", "tokens", "usd")), spent=_NUMBER, limit=_NUMBER, default=_NUMBER
    ),
    "message": _object(
        role=_one_of(Role),
        content=_TEXT,
        tool_calls={"type": "array", "items": _ref("call")},
        images={"type": "array", "items": _ref("image")},
    ),
    "parent": _object(run_id=_TEXT, call_id=_TEXT),
    "quorum": _object(
        needed={"type": "integer", "minimum": 1},
        approved_by=_TEXTS,
        roles=_TEXTS,
        not_requester=_FLAG,
        requester=_or_null(_TEXT),
    ),
    "result": _object(
        call_id=_TEXT,
        name=_TEXT,
        content=_TEXT,
        status=_one_of(("done", "failed", "denied", "skipped", "cut_off")),
        failure=_FAILURE,
        error_class=_TEXT,
        ending=_or_null(_one_of(("done", "unable", "ask"))),
        value=_ANYTHING,
        images={"type": "array", "items": _ref("image")},
        run_id=_TEXT,
        usage=_or_null(_ref("usage")),
        model_calls=_COUNT,
    ),
    "usage": _object(
        input_tokens=_COUNT,
        output_tokens=_COUNT,
        cached_tokens=_COUNT,
        written_tokens=_COUNT,
        reasoning_tokens=_COUNT,
        unpriced_tokens=_COUNT,
        cost_usd=_NUMBER,
    ),
}

_ABOUT_RUN: Mapping[str, _Schema] = {"model": _TEXT, "session_id": _TEXT, "parent": _or_null(_ref("parent"))}

_TRIED: _Schema = {
    "type": "array",
    "items": {"type": "array", "prefixItems": [_TEXT, {"type": ["boolean", "null"]}], "minItems": 2, "maxItems": 2},
}

_EVENTS: Mapping[str, Mapping[str, _Schema]] = {
    "RunStarted": {"prompt": _TEXT, **_ABOUT_RUN},
    "RunResumed": {"kind": _TEXT, **_ABOUT_RUN},
    "Transitioned": {
        "transition": _TEXT,
        "source": _TEXT,
        "target": _TEXT,
        "guard": _TEXT,
        "tried": _TRIED,
        "failure": _FAILURE,
    },
    "TextDelta": {"text": _TEXT},
    "ReasoningDelta": {"text": _TEXT},
    "ToolCallDelta": {"index": _COUNT, "name": _TEXT, "arguments": _TEXT},
    "ReplyRestarted": {"reason": _TEXT},
    "ModelReplied": {
        "message": _ref("message"),
        "usage": _ref("usage"),
        "finish_reason": _one_of(FinishReason),
        "model": _TEXT,
    },
    "ToolStarted": {"call": _ref("call")},
    "ToolProgress": {
        "call_id": _TEXT,
        "name": _TEXT,
        "message": _TEXT,
        "fraction": _or_null({"type": "number", "minimum": 0, "maximum": 1}),
    },
    "ToolFinished": {"result": _ref("result")},
    "RecoveryStarted": {
        "failure": _ref("failure"),
        "action": _one_of(Action),
        "attempt": {"type": "integer", "minimum": 1},
        "backoff_s": _NUMBER,
        "recoverable": _FLAG,
    },
    "RunWarning": {"text": _TEXT},
    "SubagentEvent": {"path": _TEXTS, "tools": _TEXTS, "event": {"$ref": "#"}},
    "RunCompleted": {"output": _ANYTHING},
    "Handoff": {"rationale": _TEXT, "blockers": _TEXTS, "suggested_next_steps": _TEXTS, "failure": _FAILURE},
    "PartialRunSummary": {"missing": _TEXT, "learned_facts": _TEXTS, "next_step_plan": _TEXT, "failure": _FAILURE},
    "RunCancelled": {"reason": _TEXT},
    "RunAborted": {"reason": _TEXT, "failure": _FAILURE},
    "UserInputRequested": {
        "kind": _one_of(("question", "form", "approval", "limit", "in_doubt")),
        "question": _TEXT,
        "context": _TEXT,
        "choices": _TEXTS,
        "tool": _TEXT,
        "arguments": _MAP,
        "asker": _TEXT,
        "quorum": _or_null(_ref("quorum")),
        "limit": _or_null(_ref("limit")),
        "form": _MAP,
        "digest": _TEXT,
        "expires_at": _or_null({"type": "number"}),
        "originating_failure_kind": _or_null(_one_of(FailureKind)),
    },
}
"""The fields of each event, besides those that all have."""


def event_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what ``Event.to_dict`` returns, for every event of this release.

    Within a version a later release may add fields and events, so a reader should ignore what it does not know.
    """
    common = {
        "version": {"const": EVENT_VERSION},
        "run_id": _TEXT,
        "seq": {"type": "integer", "minimum": 1},
        "time": {"type": "number"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An event of an agentfsm run",
        "oneOf": [_ref(name) for name in _EVENTS],
        "$defs": {
            **{name: _object(type={"const": name}, **common, **fields) for name, fields in _EVENTS.items()},
            **_PARTS,
        },
    }
