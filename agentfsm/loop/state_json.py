"""The JSON format of ``RunState``, in which a run is suspended and resumed in another process."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.read_only import freeze
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import State

TEXT_FIELDS = frozenset(
    {
        "answer",
        "approvals",
        "arguments",
        "blockers",
        "cancelled",
        "choices",
        "content",
        "context",
        "data",
        "denied",
        "ending_value",
        "error_key",
        "explanation",
        "extra",
        "filename",
        "feedback",
        "form",
        "instruction",
        "malformed",
        "metadata",
        "notes",
        "partial_data",
        "pending_instruction",
        "question",
        "reason",
        "recent_calls",
        "recent_results",
        "refusal",
        "settings",
        "signature",
        "so_far",
        "tags",
        "text",
        "value",
        "withheld",
    }
)
"""The fields in the JSON of a run's state that hold the user's texts or data; others are names, ids and counts."""

KEPT_FIELDS = frozenset({"by", "record"})
"""The fields with texts in which nothing is withheld: who answered, and signed records, which withhold their own."""

_STORED_NAMES = {
    "behavior": "rules",
    "deferred_messages": "behind",
    "final_turn": "grace",
    "human_reply": "person",
    "partial_answer": "so_far",
    "pending_request": "waiting",
    "state_results": "notes",
}
"""Fields that suspension records and journals store under an earlier name."""

_FIELD_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}

FORMER_BEHAVIOR = {"breaker_counts": "calls"}
"""How runs behaved before their journals said so: switches that were added since."""

_FORMER_COUNTERS = ("steps", "iterations", "continues")
"""Counters that version 0.1.0 stored as fields of their own."""


@cache
def _state_adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def dump_state(run: RunState) -> dict[str, Any]:
    """A run's state as JSON data. Lone surrogates become ``?``; NaN and the infinities become null.

    Raises:
        RuntimeError: Messages of the run are not read yet.
    """
    if run.unread:
        raise RuntimeError("the older messages of this run are not read yet")
    try:
        data: dict[str, Any] = _state_adapter().dump_python(run, mode="json")
        canonical_json(data).encode()
    except ValueError:  # NaN, an infinity or a lone surrogate: JSON cannot represent them
        loose = json.dumps(_state_adapter().dump_python(run), ensure_ascii=False, default=_to_jsonable)
        data = json.loads(loose.encode("utf-8", "replace"), parse_constant=lambda _: None)
    return _with_stored_names(data)


def exact_state_json(run: RunState) -> str:
    """What ``dump_state`` returns, as JSON text, if that says all of the run.

    Raises:
        ValueError: JSON cannot represent a value of it.
    """
    text = canonical_json(_with_stored_names(_state_adapter().dump_python(run, mode="json")))
    text.encode()
    return text


def _with_stored_names(data: dict[str, Any]) -> dict[str, Any]:
    return {_STORED_NAMES.get(name, name): value for name, value in data.items()}


def _to_jsonable(value: Any) -> Any:
    return to_jsonable_python(value, fallback=repr)


def load_state(data: dict[str, Any]) -> RunState:
    """The run that ``dump_state`` serialized.

    Raises:
        pydantic.ValidationError: The data is not the state of a run.
    """
    fields = {_FIELD_NAMES.get(name, name): value for name, value in data.items() if name not in _FORMER_COUNTERS}
    if former := {name: data[name] for name in _FORMER_COUNTERS if name in data}:
        fields["counters"] = {**fields.get("counters", {}), **former}
    if "reply_judged" not in fields:  # earlier releases went by the state's name
        fields["reply_judged"] = fields.get("reply") is not None and fields.get("state") != State.POST_LLM
    fields.setdefault("turns", fields.get("model_calls", 0))  # earlier releases counted only these
    if "behavior" in fields:
        fields["behavior"] = {**FORMER_BEHAVIOR, **fields["behavior"]}
    run = _state_adapter().validate_python(fields)
    run.answer, run.ending_value = freeze(run.answer), freeze(run.ending_value)
    run.state_results = {name: freeze(value) for name, value in run.state_results.items()}
    return run
