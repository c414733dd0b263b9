"""Tools from functions: their description, their arguments, and what cannot be described."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from agentfsm.errors import ConfigurationError, ToolDefinitionError
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.tools import Tool, as_tool, problems, tool, tools_by_name


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    city: str
    zip: int | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    day: datetime.date
    color: Color


SENTINEL: Any = object()


def weather(city: str, days: int = 3, unit: Literal["c", "f"] = "c") -> str:
    """Tell the weather of a city.

    It looks at the sky.

    Args:
        city: The city's name,
            in English.
        days (int): How many days ahead.
        unit: Celsius or Fahrenheit.

    Returns:
        The weather.
    """
    return f"{city} {days} {unit}"


# -- the schema ---------------------------------------------------------------------------------------


def test_hints_and_docstring_become_the_tool_description():
    made = as_tool(weather)
    assert made.name == "weather"
    assert made.spec.description == "Tell the weather of a city.\n\nIt looks at the sky."
    assert made.spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "The city's name, in English."},
            "days": {"type": "integer", "default": 3, "description": "How many days ahead."},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c", "description": "Celsius or Fahrenheit."},
        },
    }


def test_a_function_without_a_docstring_is_described_by_its_hints_alone():
    def bare(x: int) -> int:
        return x

    made = as_tool(bare)
    assert made.spec.description == ""
    assert made.spec.parameters["properties"] == {"x": {"type": "integer"}}


def test_a_function_without_parameters_takes_an_empty_object():
    def now() -> str:
        """Tell the time."""
        return ""

    made = as_tool(now)
    assert made.spec.parameters == {"type": "object", "additionalProperties": False, "properties": {}}
    assert made.arguments({}) == {}


@pytest.mark.parametrize("section", ["Returns", "Raises", "Yields", "Example", "Examples"])
def test_other_sections_of_a_docstring_are_left_out(section):
    def f(x: int) -> int:
        return x

    f.__doc__ = f"Do it.\n\n{section}:\n    something\n"
    assert as_tool(f).spec.description == "Do it."


def test_a_models_own_field_descriptions_and_limits_are_in_the_schema():
    def f(x: Annotated[int, Field(gt=3, description="more than three")], place: Place) -> None: ...

    made = as_tool(f)
    assert made.spec.parameters["properties"]["x"] == {
        "type": "integer", "exclusiveMinimum": 3, "description": "more than three",
    }  # fmt: skip
    assert "Place" in made.spec.parameters["$defs"]
    with pytest.raises(ValidationError):
        made.arguments({"x": 3, "place": {"city": "Rome"}})


def test_a_docstring_wins_over_an_annotation():
    def f(x: Annotated[int, Field(description="from the hint")]) -> None:
        """Do it.

        Args:
            x: From the docstring.
        """

    assert as_tool(f).spec.parameters["properties"]["x"]["description"] == "From the docstring."


def test_a_default_that_is_no_json_is_left_out_of_the_schema_and_still_used():
    def f(x: int = SENTINEL) -> None: ...

    made = as_tool(f)
    assert made.spec.parameters["properties"]["x"] == {"type": "integer"}
    assert made.arguments({}) == {"x": SENTINEL}


@pytest.mark.parametrize("name", ["_ui_message", "self", "cls", "json", "copy", "schema", "model_config", "x_1"])
def test_a_parameter_may_have_any_name(name):
    scope: dict[str, Any] = {}
    exec(f"def f({name}: str) -> str: return {name}", scope)
    made = as_tool(scope["f"])
    assert made.function(**made.arguments({name: "v"})) == "v"


# -- the arguments ------------------------------------------------------------------------------------


def test_arguments_are_validated_converted_and_filled_in():
    def f(place: Place, color: Color = Color.RED, day: datetime.date | None = None, n: int = 1) -> None: ...

    made = as_tool(f)
    assert made.arguments({"place": {"city": "Rome"}, "color": "blue", "day": "2024-02-29", "n": "7"}) == {
        "place": Place(city="Rome"),
        "color": Color.BLUE,
        "day": datetime.date(2024, 2, 29),
        "n": 7,
    }
    assert made.arguments({"place": {"city": "Rome"}})["color"] is Color.RED


def test_strict_types_take_what_json_can_say():
    def f(what: Strict) -> None: ...

    given = {"what": {"day": "2024-02-29", "color": "red"}}
    assert as_tool(f).arguments(given)["what"].color is Color.RED


def test_a_default_that_can_be_changed_is_not_shared_between_calls():
    def f(tags: list[str] = []) -> list[str]:  # noqa: B006
        tags.append("x")
        return tags

    made = as_tool(f)
    assert made(**made.arguments({})) == ["x"]
    assert made(**made.arguments({})) == ["x"]


def test_a_tool_that_changes_what_it_is_given_changes_no_transcript():
    def f(tags: list[str], where: dict[str, Any]) -> None:
        tags.append("x")
        where["y"] = 1

    given = {"tags": ["a"], "where": {}}
    made = as_tool(f)
    made(**made.arguments(given))
    assert given == {"tags": ["a"], "where": {}}


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({}, ["city: field required"]),
        ({"city": 3}, ["city: input should be a valid string"]),
        (
            {"city": "R", "days": "many"},
            ["days: input should be a valid integer, unable to parse string as an integer"],
        ),
        ({"city": "R", "unit": "k"}, ["unit: input should be 'c' or 'f'"]),
        ({"city": "R", "more": 1}, ["more: unexpected keyword argument"]),
        ({"days": None}, ["city: field required", "days: input should be a valid integer"]),
    ],
)
def test_each_bad_field_is_named(given, wrong):
    with pytest.raises(ValidationError) as caught:
        as_tool(weather).arguments(given)
    assert sorted(problems(caught.value)) == sorted(wrong)


def test_a_bad_field_deep_inside_is_named_with_its_path():
    def f(places: list[Place]) -> None: ...

    with pytest.raises(ValidationError) as caught:
        as_tool(f).arguments({"places": [{"city": "R"}, {}]})
    assert problems(caught.value) == ["places.1.city: field required"]


def test_text_for_the_user_is_passed_only_to_a_tool_that_declares_it():
    def with_words(x: int, _ui_message: str = "") -> None: ...

    def without(x: int) -> None: ...

    given = {"x": 1, "_ui_message": "Adding..."}
    assert as_tool(with_words).arguments(given) == given
    assert as_tool(without).arguments(given) == {"x": 1}
    assert given == {"x": 1, "_ui_message": "Adding..."}


def test_half_a_character_in_an_argument_is_passed_to_the_tool():
    assert as_tool(weather).arguments({"city": "a\ud800"})["city"] == "a\ud800"
    with pytest.raises(ValidationError):
        as_tool(weather).arguments({"city": "a\ud800", "days": "many"})


# -- the context --------------------------------------------------------------------------------------


def test_a_tool_context_comes_first_and_is_not_in_the_schema():
    def f(context: ToolContext, x: int) -> None: ...

    made = as_tool(f)
    assert made.takes_context
    assert list(made.spec.parameters["properties"]) == ["x"]


# -- what cannot be described -------------------------------------------------------------------------


def hintless(x): ...  # type: ignore[no-untyped-def]
def starred(*args: int) -> None: ...
def keywords(**more: int) -> None: ...
def positional(x: int, /) -> None: ...
def unresolved(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def calls_back(then: Callable[[int], int]) -> None: ...
def late_context(x: int, context: ToolContext) -> None: ...
def optional_context(context: ToolContext | None, x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (hintless, "parameter 'x': it needs a type hint"),
        (starred, "parameter 'args': a model passes arguments by name"),
        (keywords, "parameter 'more': a model passes arguments by name"),
        (positional, "parameter 'x': a model passes arguments by name"),
        (unresolved, "cannot read its signature: name 'Nowhere' is not defined"),
        (calls_back, "cannot be described as JSON"),
        (late_context, "a ToolContext must be the first parameter"),
        (optional_context, "a ToolContext must be the first parameter"),
        (functools.partial(weather, days=1), "'' is not a valid tool name"),
        (lambda x: x, "'<lambda>' is not a valid tool name"),
        (len, "tool 'len'"),
        ("weather", "a tool must be a function, not str"),
        (None, "a tool must be a function, not NoneType"),
    ],
)
def test_what_cannot_be_described_says_why(function, why):
    with pytest.raises(ToolDefinitionError, match=why.replace("(", r"\(")) as caught:
        as_tool(function)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize("name", ["", "two words", "a.b", "ü", "x" * 65])
def test_a_name_that_no_wire_takes_is_refused(name):
    with pytest.raises(ToolDefinitionError, match="is not a valid tool name"):
        tool(name=name)(weather)


# -- @tool --------------------------------------------------------------------------------------------


def test_a_tool_is_still_the_function_that_it_was():
    @tool
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert isinstance(add, Tool)
    assert (add(1, 2), add(1), add(a=1, b=3)) == (3, 2, 4)


def test_a_tool_does_nothing_special_by_default():
    made = tool(weather)
    assert (made.timeout, made.idempotent, made.retryable) == (None, False, False)
    assert (made.requires_approval, made.ends_run, made.parallel, made.control) == (False, False, False, None)


def test_the_options_of_a_tool():
    made = tool(
        name="sky",
        timeout=2,
        max_result_chars=9,
        idempotent=True,
        retryable=True,
        requires_approval=True,
        ends_run=True,
        parallel=True,
    )(weather)
    assert (made.name, made.spec.name) == ("sky", "sky")
    assert (made.timeout, made.max_result_chars, made.idempotent, made.retryable) == (2, 9, True, True)
    assert (made.requires_approval, made.ends_run, made.parallel) == (True, True, True)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ToolDefinitionError, match="timeout"):
        tool(timeout=timeout)(weather)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_results_is_positive(limit):
    with pytest.raises(ToolDefinitionError, match="max_result_chars must be greater than 0"):
        tool(max_result_chars=limit)(weather)


def test_only_an_idempotent_tool_may_be_retryable():
    with pytest.raises(ToolDefinitionError, match="idempotent"):
        tool(retryable=True)(weather)


def test_async_functions_are_detected():
    async def later(x: int) -> int:
        return x

    assert as_tool(later).is_async
    assert not as_tool(weather).is_async


def test_methods_can_be_tools():
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        def buy(self, what: str) -> str:
            """Buy something."""
            return f"{self.name}: {what}"

    made = as_tool(Shop("corner").buy)
    assert list(made.spec.parameters["properties"]) == ["what"]
    assert made(**made.arguments({"what": "milk"})) == "corner: milk"


def test_secret_arguments_are_those_of_a_secret_type_and_those_named():
    def login(user: str, password: SecretStr, pin: str) -> None: ...

    assert as_tool(login).secret == {"password"}
    assert tool(secret=["pin"])(login).secret == {"password", "pin"}
    with pytest.raises(ToolDefinitionError, match="no argument pen"):
        tool(secret=["pen"])(login)


# -- the registry -------------------------------------------------------------------------------------


def test_a_registry_holds_tools_and_plain_functions_by_name():
    made = tool(name="sky")(weather)
    found = tools_by_name([weather, made])
    assert list(found) == ["weather", "sky"]
    assert found["sky"] is made


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ToolDefinitionError, match="two tools have the name 'weather'"):
        tools_by_name([weather, tool(weather)])


def test_tools_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tool(weather).timeout = 3  # type: ignore[misc]


def test_a_result_type_that_only_type_checkers_see_is_allowed() -> None:
    def f(a: int) -> "OnlyForTypeCheckers":  # noqa: F821, UP037  # quoted, as where nothing is postponed
        """Do it."""
        return a

    assert tool(f).spec.parameters["required"] == ["a"]
