"""Events as JSON: every class, by the schema, and nothing in them that only the program may know."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import agentfsm
from agentfsm import Actor, Approval, Failure, FailureKind, FinishReason, Image, Message, ToolCall, ToolResult, Usage
from agentfsm.loop import events as e
from agentfsm.loop.failures import Action
from agentfsm.loop.human_input import ReachedLimit
from agentfsm.loop.messages import Role
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision

jsonschema = pytest.importorskip("jsonschema")

BASE: dict[str, Any] = {"run_id": "r1", "seq": 3, "time": 1700000000.5}
HEADER = {"version": 1, **BASE}
PIXEL = Image("image/gif", "R0lGODdhAQABAAAAACw=")
FAILURE = Failure(
    kind=FailureKind.tool_error, explanation="it broke", blockers=("a", "b"), metadata={"header": "x"}, partial_data=[1]
)
FAILURE_JSON = {
    "kind": "tool_error", "explanation": "it broke", "blockers": ["a", "b"], "suggested_action": "retry",
    "partial_data": [1],
}  # fmt: skip
CALL = ToolCall("c1", "pay", {"to": "Ann", "amounts": [1, 2]})
CALL_JSON = {"id": "c1", "name": "pay", "arguments": {"to": "Ann", "amounts": [1, 2]}, "malformed": None}
USAGE = Usage(10, 5, 4, 0.25, 3, 2, 1)
USAGE_JSON = {
    "input_tokens": 10, "output_tokens": 5, "cached_tokens": 4, "written_tokens": 2, "reasoning_tokens": 3,
    "unpriced_tokens": 1, "cost_usd": 0.25,
}  # fmt: skip
RECORD = SuspensionRecord(
    version=2, record_id="rec", run_id="r1", kind="approval", question="Pay?", context="", choices=(), tool="pay",
    arguments={"to": "Ann"}, originating_failure_kind=None, created_at=1.0, expires_at=99.0, graph="g",
    state={"messages": ["the whole conversation"]}, signature="5167",
)  # fmt: skip


class Place(BaseModel):
    city: str


CASES: list[tuple[e.Event, dict[str, Any]]] = [
    (
        e.RunStarted(**BASE, prompt="Hi.", model="m", session_id="s", parent=("r0", "c0")),
        {"prompt": "Hi.", "model": "m", "session_id": "s", "parent": {"run_id": "r0", "call_id": "c0"}},
    ),
    (
        e.RunResumed(**BASE, kind="approval", model="m"),
        {"kind": "approval", "model": "m", "session_id": "", "parent": None},
    ),
    (
        e.Transitioned(
            **BASE,
            decision=Decision(LOOP.transition("post_tool.tool_error"), (("x", False), ("y", None)), FAILURE),
        ),
        {
            "transition": "post_tool.tool_error", "source": "post_tool", "target": "recover", "guard": "tool_error",
            "tried": [["x", False], ["y", None]], "failure": FAILURE_JSON,
        },
    ),
    (e.TextDelta(**BASE, text="Hel"), {"text": "Hel"}),
    (e.ReasoningDelta(**BASE, text="Hm"), {"text": "Hm"}),
    (e.ToolCallDelta(**BASE, index=0, name="pay", arguments='{"to'), {"index": 0, "name": "pay", "arguments": '{"to'}),
    (e.ReplyRestarted(**BASE, reason="overloaded"), {"reason": "overloaded"}),
    (
        e.ModelReplied(
            **BASE,
            message=Message(Role.ASSISTANT, "Paying.", (CALL,), extra={"signature": "of the provider"}),
            usage=USAGE,
            finish_reason=FinishReason.TOOL_CALLS,
            model="m-2",
        ),
        {
            "message": {"role": "assistant", "content": "Paying.", "tool_calls": [CALL_JSON], "images": []},
            "usage": USAGE_JSON, "finish_reason": "tool_calls", "model": "m-2",
        },
    ),
    (
        e.ToolStarted(**BASE, call=ToolCall("c2", "pay", malformed="no object")),
        {"call": {"id": "c2", "name": "pay", "arguments": {}, "malformed": "no object"}},
    ),
    (
        e.ToolProgress(**BASE, call_id="c1", name="pay", message="halfway", fraction=0.5),
        {"call_id": "c1", "name": "pay", "message": "halfway", "fraction": 0.5},
    ),
    (
        e.ToolFinished(
            **BASE,
            result=ToolResult(
                "c1", "pay", "paid", failure=FAILURE, status="failed", error_class="ValueError", run_id="r9",
                usage=USAGE, model_calls=2, images=(PIXEL,),
            ),
        ),
        {
            "result": {
                "call_id": "c1", "name": "pay", "content": "paid", "status": "failed", "failure": FAILURE_JSON,
                "error_class": "ValueError", "ending": None, "value": None, "run_id": "r9", "usage": USAGE_JSON,
                "model_calls": 2, "images": [{"media_type": "image/gif", "data": "R0lGODdhAQABAAAAACw="}],
            }
        },
    ),
    (
        e.RecoveryStarted(**BASE, failure=FAILURE, action=Action.retry, attempt=2, backoff_s=4.0),
        {"failure": FAILURE_JSON, "action": "retry", "attempt": 2, "backoff_s": 4.0, "recoverable": True},
    ),
    (e.RunWarning(**BASE, text="memory failed"), {"text": "memory failed"}),
    (
        e.SubagentEvent(
            **BASE, path=("c1", "c7"), tools=("desk", "reader"),
            event=e.TextDelta(run_id="r5", seq=1, time=2.0, text="Hm"),
        ),
        {
            "path": ["c1", "c7"], "tools": ["desk", "reader"],
            "event": {"version": 1, "type": "TextDelta", "run_id": "r5", "seq": 1, "time": 2.0, "text": "Hm"},
        },
    ),
    (e.RunCompleted(**BASE, output=Place(city="Rome")), {"output": {"city": "Rome"}}),
    (
        e.Handoff(**BASE, rationale="no key", blockers=("x",), suggested_next_steps=("y",), failure=None),
        {"rationale": "no key", "blockers": ["x"], "suggested_next_steps": ["y"], "failure": None},
    ),
    (
        e.PartialRunSummary(**BASE, missing="all", learned_facts=("f",), next_step_plan="p", failure=FAILURE),
        {"missing": "all", "learned_facts": ["f"], "next_step_plan": "p", "failure": FAILURE_JSON},
    ),
    (e.RunCancelled(**BASE, reason="by Ann"), {"reason": "by Ann"}),
    (e.RunAborted(**BASE, reason="it raised", failure=FAILURE), {"reason": "it raised", "failure": FAILURE_JSON}),
    (
        e.UserInputRequested(
            **BASE, kind="approval", question="Pay?", tool="pay", arguments={"to": "Ann"}, choices=("yes",),
            quorum=Quorum(Approval(n=2, roles=("boss",), not_requester=True), Actor("ann"), votes=(Actor("bob"),)),
            suspension_record=RECORD, digest="ab12", originating_failure_kind=FailureKind.loop_detected,
            limit=ReachedLimit("tokens", 900, 800, 800),
        ),
        {
            "kind": "approval", "question": "Pay?", "context": "", "choices": ["yes"], "tool": "pay",
            "arguments": {"to": "Ann"}, "asker": "", "digest": "ab12", "expires_at": 99.0,
            "originating_failure_kind": "loop_detected",
            "limit": {"unit": "tokens", "spent": 900, "limit": 800, "default": 800},
            "form": {},
            "quorum": {
                "needed": 2, "approved_by": ["bob"], "roles": ["boss"], "not_requester": True, "requester": "ann",
            },
        },
    ),
]  # fmt: skip


def event_classes() -> set[type[e.Event]]:
    found = {value for value in vars(e).values() if isinstance(value, type) and issubclass(value, e.Event)}
    return found - {e.Event, e.Ending}


def test_every_last_event_is_one_that_a_type_checker_knows():
    assert set(get_args(e.LastEvent)) == {each for each in event_classes() if issubclass(each, e.Ending)}


@pytest.mark.parametrize(("event", "fields"), CASES, ids=lambda each: type(each).__name__)
def test_each_event_is_json_that_the_schema_describes(event, fields):
    data = event.to_dict()
    assert data == {"type": type(event).__name__, **HEADER, **fields}
    assert json.loads(json.dumps(data)) == data
    jsonschema.Draft202012Validator(agentfsm.event_schema()).validate(data)


NOT_SHOWN = {"secrets", "suspension_record", "decision", "shown"}
"""Fields that are not told to others; a decision is told in parts, and ``shown`` in place of a text."""


def test_no_field_of_an_event_is_forgotten():
    for event, _ in CASES:
        names = {each.name for each in dataclasses.fields(event)} - NOT_SHOWN
        assert names <= event.to_dict().keys()


def test_no_event_is_left_out():
    assert {type(event) for event, _ in CASES} == event_classes()
    assert set(agentfsm.event_schema()["$defs"]) >= {kind.__name__ for kind in event_classes()}
    assert [each["$ref"] for each in agentfsm.event_schema()["oneOf"]] == [
        f"#/$defs/{type(event).__name__}" for event, _ in CASES
    ]


@pytest.mark.parametrize(("event", "fields"), CASES, ids=lambda each: type(each).__name__)
def test_a_field_that_is_taken_away_or_added_is_not_by_the_schema(event, fields):
    validator = jsonschema.Draft202012Validator(agentfsm.event_schema())
    data = event.to_dict()
    for name in data:
        assert not validator.is_valid({key: value for key, value in data.items() if key != name})
    assert not validator.is_valid({**data, "extra": 1})


def test_the_schema_is_valid_and_stands_in_the_documentation():
    schema = agentfsm.event_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    path = Path(__file__).parents[2] / "docs" / "event-schema.json"
    assert path.read_text(encoding="utf-8") == json.dumps(schema, indent=1) + "\n", (
        f"{path.name} is out of date: python -m tests.helpers.generated_docs"
    )


def test_the_suspension_record_signatures_and_metadata_stay_where_they_are():
    text = json.dumps([event.to_dict() for event, _ in CASES])
    for hidden in ("the whole conversation", "5167", "of the provider", "header"):
        assert hidden not in text


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (math.nan, None),
        (b"\xff", "_w=="),
        ({1: {2}}, {"1": [2]}),
        (dataclasses.make_dataclass("Point", ["x"])(4), {"x": 4}),
        (object, "<class 'object'>"),
    ],
)
def test_an_output_of_any_type_becomes_json(output, shown):
    assert e.RunCompleted(**BASE, output=output).to_dict()["output"] == shown


def test_each_call_returns_data_of_its_own():
    event = e.ToolStarted(**BASE, call=CALL)
    event.to_dict()["call"]["arguments"]["amounts"].append(3)
    agentfsm.event_schema()["$defs"].clear()
    assert event.to_dict()["call"] == CALL_JSON
    assert agentfsm.event_schema()["$defs"]
