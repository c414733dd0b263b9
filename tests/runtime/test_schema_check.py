"""Schemas of servers are checked within bounds: no pattern, reference or nesting stops the process."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("jsonschema", reason="the extra 'mcp' is not installed")

from agentfsm.runtime.schema_check import MAX_ERRORS, SchemaCheck, schema_problem


def reasons(schema: dict[str, Any], value: object) -> list[str]:
    return [reason for _, reason in SchemaCheck(schema).errors(value)]


TOO_MUCH = ["the schema takes too much work to evaluate, so nothing is accepted"]
ALMOST = "a" * 35 + "!"


def doubling(depth: int, leaf: object, word: str = "allOf") -> dict[str, Any]:
    """References that evaluate a leaf 2**depth times."""
    rules: dict[str, Any] = {f"d{n}": {word: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**rules, f"d{depth}": leaf}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "^(a|aa)+$", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_a_pattern_that_backtracks_is_evaluated_in_linear_time(pattern: str) -> None:
    pytest.importorskip("re2")
    assert reasons({"pattern": pattern}, ALMOST * 10)
    assert reasons({"patternProperties": {pattern: True}, "additionalProperties": False}, {ALMOST * 10: 1})
    assert reasons({"propertyNames": {"pattern": pattern}}, {ALMOST * 10: 1})
    assert not reasons({"patternProperties": {pattern: False}, "unevaluatedProperties": False}, {ALMOST: 1})


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"^(a)\1$", "(", "(?<!a)b", "[", "a{1,100000}", "\ud800"])
def test_a_value_is_checked_without_a_pattern_that_cannot_be_evaluated(pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    assert reasons(schema, {"a": "anything"}) == []
    assert reasons(schema, {"a": 1}) == ["1 is not of type 'string'"]
    assert reasons({"patternProperties": {pattern: False}, "additionalProperties": False}, {"a": 1}) == []


def test_no_pattern_is_evaluated_without_re2() -> None:
    with patch.dict(sys.modules, {"re2": None}):
        assert reasons({"pattern": "^(a+)+$", "maxLength": 3}, ALMOST) == [f"{ALMOST!r} is too long"]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#"}, 1),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, 1),
        (doubling(40, True), 1),
        (doubling(40, {"type": "string"}, "anyOf"), 1),
        (doubling(40, True, "oneOf"), 1),
        ({"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, [[]] * 100_000),
        ({"required": [x for n in range(20_000) for x in (n, str(n))]}, {}),
    ],
)
def test_a_schema_that_takes_too_much_work_accepts_nothing(schema: dict[str, Any], value: object) -> None:
    assert reasons(schema, value) in (TOO_MUCH, [])  # the last one is no valid schema
    if "required" not in schema:
        assert reasons(schema, value) == TOO_MUCH


@pytest.mark.parametrize("depth", range(0, 90, 3))
def test_a_reference_to_itself_is_bounded_however_deep_the_stack_is(depth: int) -> None:
    def check_below(frames: int) -> list[str]:
        return check_below(frames - 1) if frames else reasons({"$ref": "#"}, 1)

    assert check_below(depth) == TOO_MUCH


NAMES = [f"k{n}" for n in range(1_000)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"not": {"enum": list(range(15_000))}}}, [-1] * 2_000),
        ({"items": {"anyOf": [{"required": NAMES}]}}, [{}] * 1_000),
        ({"items": {"properties": dict.fromkeys(NAMES, True)}}, [{}] * 2_000),
        ({"anyOf": [{"type": "string"}] * 500}, [1] * 200_000),
        ({"anyOf": [{"uniqueItems": True}] * 500}, ["x" * 1_000] * 100),
        ({"anyOf": [{"items": True, "type": "string"}] * 500}, [1] * 200_000),
    ],
    ids=["enum", "required", "properties", "quoted in errors", "unique", "nothing to check"],
)
def test_work_that_grows_with_the_schema_and_the_value_is_bounded(schema: dict[str, Any], value: object) -> None:
    assert schema_problem(schema) == ""
    assert reasons(schema, value) == TOO_MUCH


@pytest.mark.parametrize("reference", ["#nowhere", "http://x/y", "#/$defs/k1/type", "#/$defs/k1/0", "other#/x", "#a"])
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_a_reference_that_is_not_a_pointer_to_a_schema_is_not_searched_for(keyword: str, reference: str) -> None:
    schema = {"items": {keyword: reference}, "$defs": {name: {"$anchor": name} for name in NAMES[:100]}}
    with patch("referencing.Registry.crawl", lambda *_: pytest.fail("a search through the schema")):
        assert reasons(schema, [1] * 500) == []


def test_pointers_are_followed_as_in_the_standard() -> None:
    text = {"type": "string"}
    schema = {"$defs": {"a/b": text, "e%f g": text}, "default": {"c~d": [text]}, "anyOf": [text, True]}
    for pointer in ("#/$defs/a~1b", "#/default/c~0d/0", "#/$defs/e%25f%20g", "#/anyOf/0"):
        assert reasons({**schema, "items": {"$ref": pointer}}, [1]) == ["1 is not of type 'string'"]


@pytest.mark.parametrize(
    "part", [{"required": 5}, {"properties": 3}, {"type": {"a": 1}}, {"minimum": "x"}, {"enum": 1}]
)
def test_a_reference_to_a_part_that_is_no_schema_ends_no_run(part: dict[str, Any]) -> None:
    (reason,) = reasons({"default": part, "items": {"$ref": "#/default"}}, [{"a": 1}, 1])[:1]
    assert reason


def test_a_pattern_is_not_matched_against_text_without_end() -> None:
    pytest.importorskip("re2")
    assert reasons({"pattern": "([a-z]?){200}Q"}, "a" * 5_000_000) == TOO_MUCH


def test_a_value_nested_too_deep_is_not_accepted() -> None:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    assert reasons({"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, value) == TOO_MUCH


def test_references_are_never_fetched_and_the_rest_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a connection"))
    for reference in ("http://127.0.0.1:9/a.json", "file:///etc/passwd", "#/nowhere", "urn:x:y"):
        schema = {"properties": {"a": {"$ref": reference}, "b": {"type": "string"}}}
        assert reasons(schema, {"a": 1, "b": 2}) == ["2 is not of type 'string'"]


@pytest.mark.parametrize(
    "schema", [{"type": "text"}, {"required": True}, {"$schema": 5}, {"$schema": "http://["}, {"properties": []}]
)
def test_a_schema_that_is_not_valid_finds_nothing_wrong(schema: dict[str, Any]) -> None:
    assert reasons(schema, {"a": 1}) == []


def test_numbers_that_cannot_be_compared_are_not_accepted() -> None:
    assert reasons({"multipleOf": 1e-300}, 10**400)[0].startswith("the schema cannot be evaluated")


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"uniqueItems": True}, [1, {"a": [1]}, {"a": [1]}], ["its items are not unique"]),
        ({"uniqueItems": True}, [1, "1", [1], True], []),
        ({"additionalProperties": {"type": "string"}}, {"a": 1}, ["1 is not of type 'string'"]),
        ({"additionalProperties": False}, {"a": 1}, ["Additional properties are not allowed ('a' was unexpected)"]),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, []),
        ({"format": "email"}, "nobody", []),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}, 1, [
            "1 is less than or equal to the minimum of 1"
        ]),
    ],
)  # fmt: skip
def test_ordinary_rules_are_checked(schema: dict[str, Any], value: object, expected: list[str]) -> None:
    assert reasons(schema, value) == expected


def test_the_number_of_errors_is_bounded() -> None:
    assert len(reasons({"items": {"type": "string"}}, list(range(1000)))) == MAX_ERRORS


def test_large_and_deep_schemas_are_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"not": deep}
    assert schema_problem(deep) == "it is nested more than 64 deep"
    assert schema_problem({"description": "x" * 100_000}) == "it has 100,018 characters, more than 100,000"
    assert schema_problem({"type": "object", "properties": {"a": {"type": "string"}}}) == ""
    assert schema_problem(None) == ""
