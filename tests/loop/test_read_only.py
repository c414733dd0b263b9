"""Frozen JSON: it reads like dicts and lists, refuses every change, and its copies may be changed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json

from agentfsm.errors import AgentfsmError, ReadOnlyError
from agentfsm.loop.canonical_json import canonical_json, encode
from agentfsm.loop.failures import Failure
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import (
    Message,
    Reply,
    Role,
    ToolCall,
    ToolResult,
    new_message,
    new_tool_call,
    new_tool_result,
)
from agentfsm.loop.model import ModelRequest, ToolSpec, new_model_request
from agentfsm.loop.outcomes import (
    ModelCallSucceeded,
    ReplyParsed,
    StateResult,
    new_model_call_succeeded,
    new_reply_parsed,
)
from agentfsm.loop.read_only import code_name, freeze, refuse_change, thaw, user_code

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)

NESTED = {"to": ["ann", {"cc": []}], "amount": 5}


@given(JSON)
def test_a_frozen_value_reads_as_the_value_that_it_was_made_of(value: Any):
    frozen = freeze(value)
    assert frozen == value
    assert json.dumps(frozen) == json.dumps(value)
    assert canonical_json(frozen) == canonical_json(value)
    assert encode(frozen) == encode(value)
    assert to_json(frozen) == to_json(value)
    assert TypeAdapter(Any).dump_python(frozen, mode="json") == value
    assert repr(frozen) == repr(value)
    assert pickle.loads(pickle.dumps(frozen)) == value


def test_frozen_values_are_dicts_and_lists_for_whoever_asks():
    class Order(BaseModel):
        to: list[Any]
        amount: int

    frozen = freeze(NESTED)
    assert isinstance(frozen, dict)
    assert isinstance(frozen["to"], list)
    assert Order.model_validate(frozen).amount == 5


DICT_CHANGES = [
    lambda d: d.__setitem__("x", 1),
    lambda d: d.__delitem__("amount"),
    lambda d: d.__ior__({}),
    lambda d: d.clear(),
    lambda d: d.pop("amount"),
    lambda d: d.popitem(),
    lambda d: d.setdefault("x", 1),
    lambda d: d.update(x=1),
]
LIST_CHANGES = [
    lambda x: x.__setitem__(0, 1),
    lambda x: x.__delitem__(0),
    lambda x: x.__iadd__([1]),
    lambda x: x.__imul__(2),
    lambda x: x.append(1),
    lambda x: x.clear(),
    lambda x: x.extend([1]),
    lambda x: x.insert(0, 1),
    lambda x: x.pop(),
    lambda x: x.remove("ann"),
    lambda x: x.reverse(),
    lambda x: x.sort(),
]


@pytest.mark.parametrize("change", DICT_CHANGES)
def test_every_change_of_a_frozen_dict_is_refused(change):
    frozen = freeze(NESTED)
    with pytest.raises(ReadOnlyError, match="cannot change a dict"):
        change(frozen)
    with pytest.raises(ReadOnlyError, match="cannot change a dict"):
        change(freeze([{"amount": 1}])[0])
    assert frozen == NESTED


@pytest.mark.parametrize("change", LIST_CHANGES)
def test_every_change_of_a_frozen_list_is_refused(change):
    frozen = freeze(NESTED)
    with pytest.raises(ReadOnlyError, match="cannot change a list"):
        change(frozen["to"])
    assert frozen == NESTED


def test_no_method_that_changes_a_dict_or_a_list_is_forgotten():
    reading = {"copy", "fromkeys", "get", "items", "keys", "values", "count", "index"}
    for kind in (dict, list):
        frozen = type(freeze(kind()))
        public = {name for name in vars(kind) if not name.startswith("_")} - reading
        in_place = {
            name for name in vars(kind) if name in ("__setitem__", "__delitem__", "__ior__", "__iadd__", "__imul__")
        }
        for name in public | in_place:
            assert getattr(frozen, name) is not getattr(kind, name), (kind, name)


def test_what_was_frozen_is_a_copy():
    given = copy.deepcopy(NESTED)
    frozen = freeze(given)
    given["to"].append("eve")
    given["amount"] = 1000
    assert frozen == NESTED


@pytest.mark.parametrize("make", [copy.deepcopy, thaw, lambda v: json.loads(json.dumps(v))])
def test_a_copy_may_be_changed_at_every_depth(make):
    frozen = freeze(NESTED)
    changed = make(frozen)
    changed["to"][1]["cc"].append("eve")
    changed["amount"] = 1
    assert frozen == NESTED


def test_the_error_is_one_of_ours_and_one_of_pythons_and_says_what_to_do():
    with pytest.raises(ReadOnlyError, match=r"user code cannot change a run\. Change a copy") as raised:
        freeze({})["x"] = 1
    assert isinstance(raised.value, (AgentfsmError, AttributeError, TypeError))
    assert issubclass(ReadOnlyError, AttributeError)
    assert issubclass(ReadOnlyError, TypeError)


VALUES = [
    (ToolCall("1", "pay", NESTED), lambda v: v.arguments),
    (HumanReply("edit", arguments=NESTED), lambda v: v.arguments),
    (PendingRequest("approval", "?", arguments=NESTED), lambda v: v.arguments),
    (ToolResult("1", "pay", "x", value=NESTED), lambda v: v.value),
    (Message(Role.ASSISTANT, extra=NESTED), lambda v: v.extra),
    (ReplyParsed(answer=NESTED), lambda v: v.answer),
    (StateResult(NESTED), lambda v: v.value),
    (ToolSpec("pay", "", NESTED), lambda v: v.parameters),
    (Failure(kind="tool_error", explanation="x", metadata=NESTED), lambda v: v.metadata),
    (Failure(kind="tool_error", explanation="x", partial_data=NESTED), lambda v: v.partial_data),
    (Failure(kind="tool_error", explanation="x").model_copy(update={"metadata": NESTED}), lambda v: v.metadata),
]


@pytest.mark.parametrize(("value", "part"), VALUES)
def test_what_a_run_is_made_of_is_frozen_when_it_is_made(value, part):
    for each in (value, pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert part(each) == NESTED
        with pytest.raises(ReadOnlyError):
            part(each)["to"][1]["cc"].append("eve")
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("kind", [ToolCall, HumanReply, PendingRequest, ToolResult, Message])
def test_frozen_values_come_back_from_json(kind):
    value, part = next((v, p) for v, p in VALUES if type(v) is kind)
    adapter = TypeAdapter(kind)
    back = adapter.validate_python(adapter.dump_python(value, mode="json"))
    assert back == value
    with pytest.raises(ReadOnlyError):
        part(back)["to"].clear()


def test_the_default_of_a_failures_metadata_is_frozen_too():
    with pytest.raises(ReadOnlyError):
        Failure(kind="tool_error", explanation="x").metadata["seen"] = True


def test_lists_in_the_place_of_tuples_are_copied():
    calls = [ToolCall("1", "pay")]
    message = Message(Role.ASSISTANT, tool_calls=calls)  # type: ignore[arg-type]  # from an untyped model
    calls.clear()
    assert message.tool_calls == (ToolCall("1", "pay"),)


def test_a_value_that_contains_itself_is_left_as_it_is():
    endless: dict[str, Any] = {}
    endless["x"] = endless
    assert ToolCall("1", "pay", endless).arguments is endless


def test_a_reply_is_its_own_deep_copy():
    reply = Reply(Message.assistant("hi", (ToolCall("1", "pay", NESTED),)))
    assert copy.deepcopy(reply) is reply


# -- who tried ----------------------------------------------------------------------------------------


def swallow() -> None:
    with contextlib.suppress(Exception):
        freeze({})["x"] = 1


def test_an_attempt_that_the_code_swallows_is_raised_when_the_code_has_returned():
    attempts: list[str] = []
    said = r"hook .*test_read_only\.swallow tried to change the run: change a dict"
    with pytest.raises(ReadOnlyError, match=said), user_code("hook", swallow, attempts):
        swallow()
    assert len(attempts) == 1


def test_code_that_only_reads_raises_nothing():
    attempts: list[str] = []
    with user_code("hook", swallow, attempts):
        assert freeze(NESTED)["amount"] == 5
    assert attempts == []


def test_an_error_of_the_code_itself_stays_that_error():
    with pytest.raises(KeyError), user_code("hook", swallow, []):
        freeze({})["x"]


def test_a_cancellation_is_not_replaced():
    def swallow_and_cancel() -> None:
        swallow()
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError), user_code("hook", swallow, []):
        swallow_and_cancel()


def test_after_the_block_nothing_is_noted():
    attempts: list[str] = []
    with user_code("hook", swallow, attempts):
        pass
    swallow()
    assert attempts == []


def test_the_inner_code_is_the_one_that_is_named():
    outer: list[str] = []
    inner: list[str] = []
    with user_code("hook", code_name, outer), pytest.raises(ReadOnlyError), user_code("policy", swallow, inner):
        swallow()
    assert (len(outer), len(inner)) == (0, 1)


def test_a_task_that_the_code_started_is_named_as_the_code_is():
    async def scene() -> list[str]:
        attempts: list[str] = []
        go = asyncio.Event()

        async def later() -> None:
            await go.wait()
            swallow()

        with user_code("hook", scene, attempts):
            task = asyncio.create_task(later())
        go.set()
        await task
        return attempts

    (attempt,) = asyncio.run(scene())
    assert "scene tried to change the run" in attempt


def test_in_a_thread_the_attempt_is_noted_without_a_name():
    attempts: list[str] = []
    with pytest.raises(ReadOnlyError):
        refuse_change("set 'state'", attempts)
    assert attempts == ["user code tried to change the run: set 'state'"]


class Auditor:
    def check(self) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("code", "name"),
    [(swallow, "swallow"), (Auditor().check, "Auditor.check"), (Auditor(), "Auditor"), (Auditor, "Auditor")],
)
def test_code_is_called_by_its_qualified_name(code, name):
    assert code_name(code) == f"{__name__}.{name}"


# -- quick constructors ---------------------------------------------------------------------------------

USUAL = ToolCall("c1", "add", {"a": 1})
QUICK: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (new_message, Message, (Role.TOOL, "3", (), "c1", "add", True, freeze({"kept": [1]}), ())),
    (new_model_call_succeeded, ModelCallSucceeded, (Reply(Message.assistant("Hi.")), 2)),
    (new_model_request, ModelRequest, ([Message.user("go")], (), 5)),
    (new_reply_parsed, ReplyParsed, ((USUAL,), freeze({"an": ["answer"]}))),
    (new_tool_call, ToolCall, ("c1", "add", freeze(NESTED))),
    (new_tool_result, ToolResult, ("c1", "add", "3", "done", None, "", "done", freeze(NESTED))),
]
each_quick_one = pytest.mark.parametrize(("make", "cls", "arguments"), QUICK, ids=[cls.__name__ for _, cls, _ in QUICK])


@each_quick_one
def test_a_quick_constructor_makes_what_the_class_makes(make: Any, cls: Any, arguments: tuple[Any, ...]):
    made, usual = make(*arguments), cls(*arguments)
    assert type(made) is cls
    assert (made, repr(made)) == (usual, repr(usual))
    for field in fields(cls):
        assert type(getattr(made, field.name)) is type(getattr(usual, field.name))
    assert dataclasses.replace(made) == usual


@each_quick_one
def test_what_a_quick_constructor_makes_is_as_frozen_as_any(make: Any, cls: Any, arguments: tuple[Any, ...]):
    made = make(*arguments)
    for field in fields(cls):
        with pytest.raises((ReadOnlyError, FrozenInstanceError)):
            setattr(made, field.name, None)
    assert not hasattr(made, "__dict__")


@each_quick_one
def test_a_quick_constructor_refuses_what_the_class_refuses(make: Any, cls: Any, arguments: tuple[Any, ...]):
    for constructor in (cls, make):
        with pytest.raises(TypeError):
            constructor(*arguments, *range(20))


def test_objects_of_a_quick_constructor_have_defaults_of_their_own():
    first, second = new_model_request(()), new_model_request(())
    assert first.cache is not second.cache
    assert first.budget is not second.budget
