"""Tools from a JSON schema and a function: what is checked when one is made, and when it is called."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from agentfsm import Agent, Approval, Host, MemoryStore, MissingExtraError, Tool, ToolContext, ToolDefinitionError
from agentfsm.runtime.tools import problems
from agentfsm.testing import ScriptedModel, call
from tests.helpers.scenarios import await_run

pytest.importorskip("jsonschema")

FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "at": {"$ref": "#/$defs/point"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}


def forecast(**arguments: Any) -> dict[str, Any]:
    return arguments


def made(function: Any = forecast, schema: Any = FORECAST, **options: Any) -> Tool:
    return Tool.from_schema("forecast", "The weather of the next days.", schema, function, **options)


def answer(tool: Tool, **arguments: Any) -> str:
    result = Agent(ScriptedModel([call(tool.name, **arguments), "Done."]), tools=[tool]).run_sync("Go.")
    return next(m.content for m in result.messages if m.role == "tool")


def test_the_model_gets_name_description_and_schema_as_they_were_given():
    spec = made().spec
    assert (spec.name, spec.description) == ("forecast", "The weather of the next days.")
    assert spec.parameters == FORECAST


def test_plain_and_async_functions_get_the_arguments_by_name():
    async def later(city: str, days: int = 3) -> str:
        await asyncio.sleep(0)
        return f"{city} {days}"

    def now(city: str, days: int = 3) -> str:
        return f"{city} {days}"

    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
              "required": ["city"]}  # fmt: skip
    for function in (later, now):
        assert answer(made(function, schema), city="Rome") == "Rome 3"
        assert answer(made(function, schema), city="Rome", days=5) == "Rome 5"


def test_a_function_may_take_the_context_first():
    def where(context: ToolContext, city: str) -> str:
        return f"{city} in {context.run_id}, attempt {context.attempt}"

    tool = Tool.from_schema("where", "", {"type": "object", "properties": {"city": {}}, "required": ["city"]}, where)
    agent = Agent(ScriptedModel([call("where", city="Rome"), "Done."]), tools=[tool])
    result = agent.run_sync("Go.", run_id="r1")
    assert [m.content for m in result.messages if m.role == "tool"] == ["Rome in r1, attempt 1"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "arguments: 'city' is a required property"),
        ({"city": ""}, "city: '' should be non-empty"),
        ({"city": "Rome", "days": 9}, "days: 9 is greater than the maximum of 7"),
        ({"city": "Rome", "days": "3"}, "days: '3' is not of type 'integer'"),
        ({"city": "Rome", "at": {}}, "at: 'lat' is a required property"),
        ({"city": "Rome", "code": "rom"}, "code: 'rom' does not match '^[A-Z]{3}$'"),
        ({"city": "Rome", "town": 1}, "arguments: additional properties are not allowed ('town' was unexpected)"),
    ],
)
def test_each_invalid_argument_is_named_and_the_function_is_not_called(arguments, reason):
    def never(**_: Any) -> None:
        raise AssertionError("called")

    with pytest.raises(ValidationError) as refused:
        made(never).arguments(arguments)
    assert problems(refused.value) == [reason]
    assert reason in answer(made(never), **arguments)


def test_what_an_open_schema_lets_through_and_the_function_does_not_take_is_invalid_too():
    def exact(city: str) -> str:
        return city

    tool = made(exact, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    with pytest.raises(ValidationError) as refused:
        tool.arguments({"city": "Rome", "town": 1})
    assert problems(refused.value) == ["town: there is no such argument"]


def test_a_tool_that_changes_its_arguments_does_not_change_the_transcript():
    def change(tags: list[str]) -> str:
        tags.append("mine")
        return ",".join(tags)

    schema = {"type": "object", "properties": {"tags": {"type": "array"}}, "required": ["tags"]}
    tool = Tool.from_schema("change", "", schema, change)
    result = Agent(ScriptedModel([call("change", tags=["a"]), "Done."]), tools=[tool]).run_sync("Go.")
    assert [dict(c.arguments) for m in result.messages for c in m.tool_calls] == [{"tags": ["a"]}]
    assert next(m.content for m in result.messages if m.role == "tool") == "a,mine"


def test_the_options_are_those_of_the_decorator():
    tool = made(
        timeout=3, idempotent=True, retryable=True, requires_approval=Approval(n=1), ends_run=True, parallel=True,
        secret=["code"], max_result_chars=9,
    )  # fmt: skip
    assert (tool.timeout, tool.idempotent, tool.retryable, tool.ends_run, tool.parallel) == (3, True, True, True, True)
    assert (tool.requires_approval, tool.secret, tool.max_result_chars) == (Approval(n=1), {"code"}, 9)


def test_an_argument_that_the_schema_marks_as_secret_is_not_journaled():
    schema = {"type": "object", "properties": {"pin": {"type": "string", "writeOnly": True}}, "required": ["pin"]}
    tool = Tool.from_schema("unlock", "", schema, lambda pin: f"tried {len(pin)}")
    store = MemoryStore()
    model = ScriptedModel([call("unlock", pin="tr0ub4dor&3"), "Done."])
    run = Agent(model, tools=[tool], host=Host(store=store, secret=b"k")).run("Go.")
    asyncio.run(await_run(run))
    text = "".join(row.body + row.hidden for row in asyncio.run(store.records(run.run_id)))
    assert "tried 11" in text
    assert "tr0ub4dor" not in text


def two(a: str, b: str) -> str:
    return a + b


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a b", "", FORECAST, forecast), "'a b' is not a valid tool name"),
        (("t", "", {"type": "string"}, forecast), 'must have "type": "object"'),
        (("t", "", {}, forecast), 'must have "type": "object"'),
        (("t", "", {"type": "object", "properties": {"a": {"type": "text"}}}, forecast), r"\$.properties.a.type: "),
        (("t", "", {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, forecast), "leads nowhere"),
        (("t", "", {"type": "object", "default": {1}}, forecast), "it is not JSON"),
        (("t", "", {"type": "object", "properties": {"c": {}}}, two), "its function does not take c"),
        (("t", "", {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}, two), "function needs b"),
        (("t", "", FORECAST, "forecast"), "it must be a function, not str"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_when_it_is_made(arguments, words):
    with pytest.raises(ToolDefinitionError, match=words):
        Tool.from_schema(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout must be greater than 0"),
        ({"retryable": True}, "only an idempotent tool can be retryable"),
        ({"secret": ["pin"]}, "it has no argument pin"),
    ],
)
def test_its_options_are_checked_as_the_decorator_checks_them(options, words):
    with pytest.raises(ToolDefinitionError, match=words):
        made(**options)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingExtraError, match=r"agentfsm\[schema\]"):
        made()
