"""Every outcome is read back from its JSON as it was, with all fields of its classes, present and future."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentfsm.journal.outcome_codec import CommitmentWriter, OutcomeReader, OutcomeWriter
from agentfsm.journal.records import hidden_restorer
from agentfsm.loop import outcomes as o
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import MEDIA_TYPES, File, Image, Message, Reply, Role, ToolCall, ToolResult
from agentfsm.loop.quorum import Actor, Approval

KINDS = (*typing.get_args(o.Outcome), types.NoneType)

texts = st.sampled_from(["", "x", "ü \x00 \ud800", "$ref", "[secret]"])
leaves = st.none() | st.booleans() | texts | st.sampled_from([0, 1, 2**60, 1.0, 0.5, 1e-9])
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
)


def any_of(shape: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any value of a type, by the type alone, so a field that is added later is drawn too."""
    origin, inside = typing.get_origin(shape), typing.get_args(shape)
    if name in ("partial_data", "metadata"):
        return st.dictionaries(st.sampled_from(["tool", "n"]), st.integers(0, 9), max_size=2)
    if shape is Any:
        return json_values
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(any_of, inside))
    if origin is tuple and inside[-1] is not Ellipsis:
        return st.tuples(*map(any_of, inside))
    if origin is tuple:
        return st.lists(any_of(inside[0]), max_size=2).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(texts, json_values, max_size=2)
    if shape is type(None):
        return st.none()
    if shape is str:
        return texts
    if shape is bool:
        return st.booleans()
    if shape is int:
        return st.integers(0, 2**40)
    if shape is float:
        return st.sampled_from([0.0, 1.0, 0.25, 1e-7])
    if isinstance(shape, type) and issubclass(shape, Enum):
        return st.sampled_from(list(shape))
    if isinstance(shape, type) and issubclass(shape, Failure):
        return st.builds(Failure, **{n: any_of(f.annotation, n) for n, f in Failure.model_fields.items()})
    if shape is Actor:
        return st.builds(Actor, st.sampled_from(["ann", "ü"]), st.just(("manager",)), verified=st.booleans())
    if shape is Approval:
        return st.sampled_from([Approval(), Approval(2, ("a", "b"), True, 9.5, ("c",), 2.5)])
    if shape is Image:
        return st.builds(Image.from_bytes, st.binary(min_size=1, max_size=9), st.sampled_from(list(MEDIA_TYPES)))
    if shape is File:
        return st.builds(
            File.from_bytes,
            st.sampled_from([b"a,b", "ü".encode()]),
            st.sampled_from(["", "a.csv"]),
            st.just("text/csv"),
        )
    assert dataclasses.is_dataclass(shape), shape
    hints = typing.get_type_hints(shape)
    return st.builds(shape, **{f.name: any_of(hints[f.name], f.name) for f in dataclasses.fields(shape)})


def fields(value: Any) -> Any:
    """A value with every field, those that do not count for equality too."""
    if isinstance(value, BaseModel):
        return {name: fields(getattr(value, name)) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value):
        return {f.name: fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [fields(v) for v in value]
    if isinstance(value, Mapping):
        return {k: fields(v) for k, v in value.items()}
    return value


def trip(writer: OutcomeWriter, reader: OutcomeReader, outcome: Any) -> Any:
    hider = CommitmentWriter()
    body = writer.write(outcome, hider)
    kept = hider.dump()
    return reader.read(decode(body, hidden_restorer(json.loads(kept))) if kept else decode(body))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_outcome_round_trips(kind):
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(any_of(kind))
    def check(outcome):
        back = trip(OutcomeWriter(), OutcomeReader(), outcome)
        assert type(back) is kind
        if isinstance(outcome, o.CallBlocked):  # the calls of an effect have records of their own
            outcome = dataclasses.replace(outcome, calls={})
        assert fields(back) == fields(outcome)

    check()


def test_an_outcome_does_not_repeat_what_is_written_already():
    calls = (ToolCall("1", "pay", {"to": "long" * 100}),)
    writer, reader = OutcomeWriter(), OutcomeReader()
    reply = Reply(Message(Role.ASSISTANT, "", calls))
    trip(writer, reader, o.ModelCallSucceeded(reply))
    hider = CommitmentWriter()
    assert writer.write(o.ReplyParsed(calls=reply.message.tool_calls), hider) == '{"read":{"calls":"reply"}}'
    assert hider.dump() == ""
    assert trip(writer, reader, o.ReplyParsed(calls=reply.message.tool_calls)) == o.ReplyParsed(calls=calls)
    said = Reply(Message.assistant("an answer"))
    assert trip(writer, reader, o.ModelCallSucceeded(said)) == o.ModelCallSucceeded(said)
    assert writer.write(o.ReplyParsed(answer=said.message.content), hider) == '{"read":{"answer":{"is":"text"}}}'
    assert trip(writer, reader, o.ReplyParsed(answer=said.message.content)) == o.ReplyParsed(answer="an answer")


def test_a_result_with_its_own_record_is_referenced():
    writer, reader = OutcomeWriter(), OutcomeReader()
    result = ToolResult("1", "pay", "paid")
    reader.read_result("1.0", json.loads(writer.write_result("1.0", result, CommitmentWriter())) | {"content": "paid"})
    hider = CommitmentWriter()
    assert writer.write(o.ToolsRan((result,)), hider) == '{"ran":{"results":["1.0"]}}'
    assert reader.read({"ran": {"results": ["1.0"]}}) == o.ToolsRan((result,))


def test_texts_of_people_and_tools_are_hidden():
    said = [
        o.ModelCallSucceeded(
            Reply(Message(Role.ASSISTANT, "SAID", (ToolCall("1", "pay", {"to": "SAID"}, "SAID"),)), refusal="SAID")
        ),
        o.ToolsRan(
            (ToolResult("1", "pay", "SAID", failure=Failure(kind="tool_error", explanation="SAID"), value="SAID"),)
        ),
        o.ReplyParsed(answer={"x": "SAID"}),
        o.StateResult({"x": "SAID"}, (Message.user("SAID"),)),
        o.PreStepDone("SAID"),
    ]
    for outcome in said:
        hider = CommitmentWriter()
        assert "SAID" not in OutcomeWriter().write(outcome, hider)
        assert "SAID" in hider.dump()
