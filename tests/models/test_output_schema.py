"""Structured output is asked for in strict mode, as the vendors' own helpers do, where nothing is lost."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired

import anthropic
import httpx
import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from openai.lib._parsing._responses import type_to_text_format_param
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from agentfsm import Agent, Message, ModelRequest
from agentfsm.models import HttpOptions, resolve
from agentfsm.models.output_schema import (
    ANTHROPIC_RULES,
    OPENAI_OWN_RULES,
    OPENAI_RULES,
    OPENAI_SUPPORT,
    SchemaRules,
    output_schema_block,
    strict_schema,
)
from tests.helpers.fake_model_server import ModelOutput, whole_body


class Address(BaseModel):
    street: str = Field(description="With the number.")
    floor: int = 0
    kind: Literal["home", "work"] = "home"


class Person(BaseModel):
    """Somebody."""

    name: str
    address: Address
    nick: str | None = None
    towns: list[Address] = []
    born: float = Field(1900.5, ge=1800, lt=2100)


class Node(BaseModel):
    value: int
    left: Node | None = None
    right: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Pets(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


def without_defaults(node: Any) -> Any:
    """A schema without the defaults, which say nothing once every property is required."""
    if isinstance(node, list):
        return [without_defaults(item) for item in node]
    if isinstance(node, dict):
        return {
            k: without_defaults(v)
            for k, v in node.items()
            if k != "default" or not isinstance(v, str | int | float | list)
        }
    return node


def schema_of(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()


@pytest.mark.parametrize("kind", [Address, Person], ids=lambda kind: kind.__name__)
def test_openai_gets_what_its_own_helper_makes_of_a_type(kind: type[BaseModel]) -> None:
    request = ModelRequest((Message.user("x"),), output_schema=schema_of(kind), output_name=kind.__name__)
    ours = output_schema_block(request, OPENAI_SUPPORT)
    theirs: Any = type_to_response_format_param(kind)
    assert ours == without_defaults(theirs["json_schema"])
    assert {"type": "json_schema", **(ours or {})} == without_defaults(type_to_text_format_param(kind))


def test_a_type_that_contains_itself_has_a_strict_form_at_openai_only() -> None:
    made = strict_schema(schema_of(Node), OPENAI_RULES)
    assert made is not None
    assert made["type"] == "object"
    assert made["properties"]["left"] == {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    assert made["$defs"]["Node"]["required"] == ["value", "left", "right"]
    assert strict_schema(schema_of(Node), ANTHROPIC_RULES) is None


def test_one_of_several_types_becomes_any_of_them() -> None:
    made = strict_schema(schema_of(Pets), OPENAI_RULES)
    assert made is not None
    assert made["properties"]["pets"]["items"] == {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}


class Plain(BaseModel):
    name: str = Field(description="The name.")
    age: int | None
    tags: list[str]
    when: Annotated[str, Field(json_schema_extra={"format": "date"})]


class Nested(BaseModel):
    plain: Plain
    more: list[Plain]


@pytest.mark.parametrize("kind", [Plain, Nested], ids=lambda kind: kind.__name__)
def test_anthropic_gets_what_its_own_helper_makes_of_a_type(kind: type[BaseModel]) -> None:
    assert strict_schema(schema_of(kind), ANTHROPIC_RULES) == anthropic.transform_schema(kind)


def test_limits_that_a_mode_does_not_take_are_left_out() -> None:
    given: dict[str, Any] = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1},
            "s": {"type": "string", "minLength": 2, "pattern": "^a", "format": "color"},
            "p": {"type": "string", "pattern": "^(?!b)"},
            "l": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 3},
        },
        "required": ["n", "s", "p", "l"],
    }

    def properties(rules: SchemaRules) -> Any:
        made = strict_schema(given, rules)
        assert made is not None
        return made["properties"]

    bare = {"n": {"type": "integer"}, "s": {"type": "string"}, "p": {"type": "string"}}
    assert properties(OPENAI_RULES) == bare | {"l": {"type": "array", "items": {"type": "string"}}}
    assert properties(OPENAI_OWN_RULES) == {
        "n": {"type": "integer", "minimum": 1},
        "s": {"type": "string", "pattern": "^a"},
        "p": {"type": "string"},
        "l": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 3},
    }
    assert properties(ANTHROPIC_RULES) == bare | {"l": {"type": "array", "items": {"type": "string", "format": "date"}}}


class Partial(TypedDict):
    a: int
    b: NotRequired[int]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class ByName(BaseModel):
    counts: dict[str, int]


class Made(BaseModel):
    tags: list[str] = Field(default_factory=list)


class Anything(BaseModel):
    value: Any


class Pair(BaseModel):
    pair: tuple[int, str]


@pytest.mark.parametrize("kind", [Partial, Open, ByName, Made, Anything, Pair, list[int], int | str, Decimal])
def test_what_a_strict_mode_could_not_say_is_sent_as_it_is(kind: Any) -> None:
    schema = schema_of(kind)
    request = ModelRequest((Message.user("x"),), output_schema=schema)
    assert output_schema_block(request, OPENAI_SUPPORT) == {"name": "answer", "schema": schema, "strict": False}


def test_anthropic_takes_properties_that_may_be_left_out_up_to_its_limit() -> None:
    made = strict_schema(schema_of(Partial), ANTHROPIC_RULES)
    assert made is not None
    assert made["required"] == ["a"]
    many: dict[str, Any] = {f"p{n}": {"type": "string"} for n in range(25)}
    assert strict_schema({"type": "object", "properties": many}, ANTHROPIC_RULES) is None
    unions: dict[str, Any] = {f"p{n}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for n in range(17)}
    assert strict_schema({"type": "object", "properties": unions, "required": [*unions]}, ANTHROPIC_RULES) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}, "required": ["a"]},
        {"type": "object", "properties": {}, "patternProperties": {"^x": {}}},
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}]}}, "required": ["a"]},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"enum": [*range(1001)]}}, "required": ["a"]},
        {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(5001)}, "required": []},
    ],
)
def test_no_strict_form_is_made_up(schema: dict[str, Any]) -> None:
    assert strict_schema(schema, OPENAI_OWN_RULES) is None
    assert strict_schema(schema, ANTHROPIC_RULES) is None


def test_a_schema_that_is_nested_too_deeply_has_no_strict_form() -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return schema

    assert strict_schema(nested(9), OPENAI_RULES) is not None
    assert strict_schema(nested(10), OPENAI_RULES) is None


# -- what is sent ----------------------------------------------------------------------------------------------


def sent(name: str, wire: str, answer: str, *, tools: tuple[Any, ...] = (), **more: Any) -> dict[str, Any]:
    """The body of the first request of a run with structured output."""
    bodies = list[dict[str, Any]]()

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=whole_body(wire, ModelOutput(answer)))

    model = resolve(name, api_key="k" * 20, http=HttpOptions(transport=httpx.MockTransport(handle)), **more)
    result = asyncio.run(_run(Agent(model, tools=tools, output_type=Address)))
    assert result.output == Address(street="Main St 1", floor=2)
    return bodies[0]


async def _run(agent: Agent) -> Any:
    return await agent.run("Where?")


def look() -> str:
    """Look."""
    return ""


ANSWER = '{"street": "Main St 1", "floor": 2, "kind": "home"}'
REQUIRED = ["street", "floor", "kind"]


@pytest.mark.parametrize("tools", [(), (look,)], ids=["alone", "beside tools"])
def test_the_strict_mode_is_used_also_beside_tools(tools: tuple[Any, ...]) -> None:
    chat = sent("openai:gpt-5-mini", "openai", ANSWER, tools=tools)["response_format"]["json_schema"]
    assert (chat["strict"], chat["schema"]["required"]) == (True, REQUIRED)
    azure = sent("azure:my-4o", "openai", ANSWER, tools=tools, base_url="https://acme.openai.azure.com/openai/v1")
    assert azure["response_format"]["json_schema"]["strict"]
    responses = sent("openai-responses:gpt-5-mini", "responses", ANSWER, tools=tools)["text"]["format"]
    assert (responses["strict"], responses["schema"]["required"]) == (True, REQUIRED)
    claude = sent("claude-sonnet-4-6", "anthropic", ANSWER, tools=tools)["output_config"]["format"]
    assert (claude["type"], claude["schema"]["required"]) == ("json_schema", ["street"])


def test_gemini_and_ollama_get_the_schema_where_no_tools_are_offered() -> None:
    gemini = sent("gemini:gemini-2.5-flash", "openai", ANSWER)["response_format"]["json_schema"]
    assert (gemini["strict"], gemini["schema"]["required"]) == (True, REQUIRED)
    assert "response_format" not in sent("gemini:gemini-2.5-flash", "openai", ANSWER, tools=(look,))
    assert sent("ollama:llama3.2", "ollama", ANSWER)["format"] == schema_of(Address)
    assert "format" not in sent("ollama:llama3.2", "ollama", ANSWER, tools=(look,))


def test_deepseek_is_asked_for_json_since_it_takes_no_schema() -> None:
    assert sent("deepseek:deepseek-chat", "openai", ANSWER)["response_format"] == {"type": "json_object"}
    assert "response_format" not in sent("deepseek:deepseek-chat", "openai", ANSWER, tools=(look,))


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("openai:gpt-4-turbo", "openai"),
        ("openai:gpt-3.5-turbo", "openai"),
        ("claude-3-5-sonnet-20241022", "anthropic"),
        ("claude-sonnet-4-20250514", "anthropic"),
        ("claude-opus-4-0", "anthropic"),
    ],
)
def test_models_from_before_structured_outputs_get_no_schema(name: str, wire: str) -> None:
    body = sent(name, wire, ANSWER)
    assert not {"response_format", "output_config"} & body.keys()
    assert "this JSON schema" in json.dumps(body)


def test_a_server_that_speaks_like_anthropic_gets_no_schema() -> None:
    body = sent("anthropic:claude-sonnet-4-6", "anthropic", ANSWER, base_url="http://127.0.0.1:9")
    assert "output_config" not in body
