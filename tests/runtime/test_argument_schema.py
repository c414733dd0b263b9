"""Which conditions can hold for the arguments of a tool, going by its schema."""

from __future__ import annotations

from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr
from typing_extensions import TypedDict

from agentfsm import tool
from agentfsm.runtime.argument_schema import is_declared, why_impossible
from agentfsm.runtime.permissions import deny


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Edit(BaseModel):
    path: str
    lines: list[int] = []
    then: Edit | None = None


class Options(TypedDict, total=False):
    force: bool


@tool
def work(
    text: str,
    maybe: str | None,
    number: Annotated[int, Field(ge=0, le=10)],
    price: Decimal,
    flag: bool,
    size: Size,
    kind: Literal["a", 1],
    names: list[str],
    grid: list[list[int]],
    edit: Edit,
    edits: list[Edit],
    options: Options,
    labels: dict[str, int],
    free: dict[str, Any],
    anything: Any,
    file: Path,
    pair: tuple[int, str],
    password: SecretStr,
    mixed: int | list[str],
) -> str:
    """Work."""
    return "done"


SCHEMA = work.spec.parameters


def problem(where: dict[Any, Any]) -> str | None:
    return why_impossible(SCHEMA, deny("work", where=where).where)


@pytest.mark.parametrize(
    "where",
    [
        {"text": "x*"},
        {"text": {"equals": "x"}},
        {"text": {"present": True}},
        {"maybe": "x*"},
        {"maybe": None},
        {"maybe": {"present": False}},
        {"number": 3},
        {"number": 3.0},
        {"number": {"at_least": 10}},
        {"number": {"at_most": 0}},
        {"price": {"at_least": 100}},
        {"flag": True},
        {"size": "sm*"},
        {"size": {"one_of": ["huge", "large"]}},
        {"kind": 1},
        {"kind": "a"},
        {"names": {"every": "x*"}},
        {"names": {"any": {"one_of": ["a", "b"]}}},
        {"names": {"equals": ["a"]}},
        {"names": {"equals": []}},
        {"grid": {"any": {"every": 1}}},
        {"grid": {"equals": [[1], []]}},
        {"edit.path": "x*"},
        {"edit.then.then.path": "x*"},
        {"edits": {"every": {"where": {"path": "x*", "lines": {"any": 3}}}}},
        {"edit": {"equals": {"path": "x"}}},
        {"options.force": True},
        {"labels.anything": 3},
        {("free", "any.thing"): {"every": "x"}},
        {"anything": "x"},
        {"anything.at.all": 1},
        {"file": "/etc/*"},
        {"pair": {"any": "x"}},
        {"mixed": 1},
        {"mixed": {"any": "x"}},
        {"absent": {"present": False}},
    ],
)
def test_what_can_hold_is_accepted(where: dict[Any, Any]) -> None:
    assert problem(where) is None


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ({"txt": "x"}, "there is no 'txt'"),
        ({"txt": {"present": True}}, "there is no 'txt'"),
        ({"text": 1}, "is of type string, and never equal"),
        ({"text": {"at_least": 1}}, "at_least= compares numbers"),
        ({"text": {"every": "x"}}, "every= matches lists"),
        ({"text.x": 1}, "there is no 'text.x'"),
        ({"text": None}, "never equal"),
        ({"text": {"equals": ["x"]}}, "never equal"),
        ({"maybe": 1}, "never equal"),
        ({"number": "1*"}, "glob= matches text"),
        ({"number": 1.5}, "never equal"),
        ({"number": True}, "never equal"),
        ({"number": {"at_least": 11}}, "bounds"),
        ({"number": {"at_most": -1}}, "bounds"),
        ({"flag": 1}, "never equal"),
        ({"flag": "true"}, "matches text"),
        ({"size": "x*"}, "is one of 'small', 'large'"),
        ({"size": {"at_least": 1}}, "is one of"),
        ({"kind": "b"}, "is one of"),
        ({"kind": {"regex": "[b-z]"}}, "is one of"),
        ({"names": "x*"}, "match the whole list with equals=, or its items with every= or any="),
        ({"names": {"regex": "x"}}, "every= or any="),
        ({"names": {"any": 1}}, "has items, each of which is of type string"),
        ({"names": {"equals": [1]}}, "never equal"),
        ({"grid": {"any": "x*"}}, "has items, each of which is of type array"),
        ({"grid": {"equals": [1]}}, "never equal"),
        ({"edit": "x*"}, "is of type object"),
        ({"edit.pth": "x*"}, "there is no 'edit.pth'"),
        ({"edit.path": {"any": "x*"}}, "any= matches lists"),
        ({"edits.path": "x*"}, "there is no 'edits.path'"),
        ({"edits": {"every": {"where": {"pth": 1}}}}, "there is no 'pth'"),
        ({"edits": {"where": {"path": "x"}}}, "where= matches objects"),
        ({"edit": {"equals": {"path": 1}}}, "never equal"),
        ({"options.forced": True}, "there is no"),
        ({"labels.x": "x"}, "matches text"),
        ({"password": "*"}, "secret"),
        ({"mixed": "x*"}, "matches text"),
        ({"text": "x", "number": "x"}, "'number'"),
    ],
)
def test_what_can_never_hold_is_named(where: dict[Any, Any], part: str) -> None:
    assert part in (problem(where) or "")


@pytest.mark.parametrize(
    ("schema", "path", "declared"),
    [
        ({"type": "object"}, "a", True),
        ({}, "a.b", True),
        ({"properties": {"a": {}}}, "a.b.c", True),
        ({"properties": {"a": {}}}, "b", False),
        ({"properties": {"a": {}}, "additionalProperties": True}, "b", True),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, "b", True),
        ({"additionalProperties": False}, "a", False),
        ({"properties": {"a": False}}, "a", False),
        ({"properties": {"a": {"type": "string"}}}, "a.b", False),
        ({"properties": {"a": {"type": ["string", "object"]}}}, "a.b", True),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"properties": {"b": {}}}]}}}, "a.b", True),
        ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "a.b", True),
        ({"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"properties": {"b": {}}}}}, "a.b", True),
        ({"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"properties": {"b": {}}}}}, "a.c", False),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "a.b", True),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "a.b", True),
    ],
)
def test_what_a_schema_declares(schema: dict[str, Any], path: str, declared: bool) -> None:
    assert is_declared(schema, tuple(path.split("."))) is declared


CONDITIONS = st.sampled_from(
    [
        {"text": "x*"}, {"text": 1}, {"number": 3}, {"number": {"at_least": 9}}, {"number": "3"}, {"flag": True},
        {"flag": 1}, {"size": "small"}, {"kind": 1}, {"kind": True}, {"names": {"any": "x"}}, {"names": "x"},
        {"names": {"equals": ["x"]}}, {"edit.path": "x"}, {"edit.lines": {"any": 3}},
        {"edits": {"any": {"where": {"path": "x"}}}},
        {"options.force": True}, {"labels.k": 3}, {"mixed": 3}, {"mixed": {"any": "x"}}, {"grid": {"any": {"any": 3}}},
    ]
)  # fmt: skip

CALLS = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["", "x"]),
        "maybe": st.sampled_from([None, "x"]),
        "number": st.integers(0, 10),
        "price": st.just("1.5"),
        "flag": st.booleans(),
        "size": st.sampled_from(["small", "large"]),
        "kind": st.sampled_from(["a", 1]),
        "names": st.lists(st.sampled_from(["x", "y"]), max_size=2),
        "grid": st.lists(st.lists(st.integers(2, 3), max_size=2), max_size=2),
        "edit": st.just({"path": "x", "lines": [3]}),
        "edits": st.lists(st.just({"path": "x"}), max_size=1),
        "options": st.sampled_from([{}, {"force": True}]),
        "labels": st.just({"k": 3}),
        "free": st.just({}),
        "anything": st.none(),
        "file": st.just("x"),
        "pair": st.just([1, "x"]),
        "password": st.just("x"),
        "mixed": st.sampled_from([3, ["x"]]),
    }
)


@given(CONDITIONS, CALLS)
def test_a_condition_that_holds_for_a_valid_call_is_never_called_impossible(where: Any, given_arguments: Any) -> None:
    from agentfsm.runtime.argument_matcher import readable_value
    from agentfsm.runtime.permissions import allow

    if allow("work", where=where).applies("work", readable_value(work.arguments(given_arguments))):
        assert problem(where) is None
