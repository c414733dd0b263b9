"""Which conditions on an argument can hold at all, given the JSON schema of a tool's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from agentfsm.runtime.argument_matcher import ArgumentMatcher, parse_path

_Schema = dict[str, Any]

_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_MAX_DEPTH = 20
"""How deeply references and unions are resolved; beyond it, anything is taken to be possible."""


def is_declared(schema: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the arguments of a tool may have a value at a path.

    A name that is not among the declared properties does not exist, unless the schema says which additional ones may.
    """
    return bool(_at_path([dict(schema)], path, dict(schema)))


def why_impossible(schema: Mapping[str, Any], where: Mapping[str, ArgumentMatcher]) -> str | None:
    """Why no arguments of a tool can meet all conditions; None if some may."""
    root = dict(schema)
    return _impossible_where([root], where, root)


def _impossible_where(schemas: list[_Schema], where: Mapping[str, ArgumentMatcher], root: _Schema) -> str | None:
    for path, matcher in where.items():
        found = _at_path(schemas, parse_path(path), root)
        if not found and matcher.present is not False:
            return f"there is no {path!r}"
        problem = _impossible(found, matcher, root) if found else None
        if problem is not None:
            return f"{path!r} {problem}"
    return None


def _impossible(schemas: list[_Schema], matcher: ArgumentMatcher, root: _Schema) -> str | None:
    problems = [_impossible_for(schema, matcher, root) for schema in schemas]
    return None if None in problems else next(filter(None, problems), "has no possible value")


def _impossible_for(schema: _Schema, matcher: ArgumentMatcher, root: _Schema) -> str | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        shown = ", ".join(map(repr, values))
        return None if any(matcher.verdict(value) for value in values) else f"is one of {shown}"
    if schema.get("writeOnly"):
        return "is secret, and no rule sees it"
    for name, limit in matcher.conditions().items():
        problem = _impossible_condition(schema, name, limit, root)
        if problem is not None:
            return problem
    return None


def _impossible_condition(schema: _Schema, name: str, limit: Any, root: _Schema) -> str | None:
    types = _types(schema)
    what = f"is of type {' or '.join(sorted(types))}"
    if name in ("glob", "regex") and "string" not in types:
        hint = ": match the whole list with equals=, or its items with every= or any=" if "array" in types else ""
        return f"{what}, and {name}= matches text{hint}"
    if name in ("at_least", "at_most"):
        if types.isdisjoint({"number", "integer"}):
            return f"{what}, and {name}= compares numbers"
        return _outside_bounds(schema, name, limit)
    if name in ("equals", "one_of"):
        values: Iterable[Any] = (limit,) if name == "equals" else limit
        return None if any(_admits([schema], value, root) for value in values) else f"{what}, and never equal to it"
    if name in ("every", "any"):
        if "array" not in types:
            return f"{what}, and {name}= matches lists"
        items = _items(schema, root)
        problem = _impossible(items, limit, root) if items else None
        return None if problem is None else f"has items, each of which {problem}"
    if name == "where":
        return (
            f"{what}, and where= matches objects" if "object" not in types else _impossible_where([schema], limit, root)
        )
    return what if name == "present" and limit and types <= {"null"} else None


def _outside_bounds(schema: _Schema, name: str, limit: Any) -> str | None:
    if name == "at_least":
        highest, excluded = schema.get("maximum"), schema.get("exclusiveMaximum")
        beyond = (highest is not None and limit > highest) or (excluded is not None and limit >= excluded)
    else:
        lowest, excluded = schema.get("minimum"), schema.get("exclusiveMinimum")
        beyond = (lowest is not None and limit < lowest) or (excluded is not None and limit <= excluded)
    return f"has bounds that {name}={limit} is outside of" if beyond else None


def _admits(schemas: list[_Schema], value: Any, root: _Schema) -> bool:
    """Whether a value may have one of the schemas, going by types, enumerations, items and properties."""
    return any(_may_be(schema, value, root) for schema in schemas)


def _may_be(schema: _Schema, value: Any, root: _Schema) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return any(ArgumentMatcher(equals=value).verdict(each) for each in values)
    if _types(schema).isdisjoint(_types_of(value)):
        return False
    if isinstance(value, list | tuple):
        items = _items(schema, root)
        return all(_admits(items, item, root) for item in cast("list[Any]", value))
    if isinstance(value, Mapping):
        return all(
            _admits(_at_path([schema], (key,), root), v, root) for key, v in cast("dict[str, Any]", value).items()
        )
    return True


def _types_of(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            whole = isinstance(value, int) or value.is_integer()
            return frozenset({"number", "integer"} if whole else {"number"})
        case str():
            return frozenset({"string"})
        case list() | tuple():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def _types(schema: _Schema) -> frozenset[str]:
    named: Any = schema.get("type")
    if named is None:
        return _ALL_TYPES
    return frozenset({named} if isinstance(named, str) else named)


def _items(schema: _Schema, root: _Schema) -> list[_Schema]:
    return [{}] if "prefixItems" in schema else _alternatives(schema.get("items", {}), root)


def _at_path(schemas: list[_Schema], path: tuple[str, ...], root: _Schema) -> list[_Schema]:
    """The schemas that a value at a path may have; none if there can be no value."""
    for key in path:
        objects = [s for each in schemas for s in _alternatives(each, root) if "object" in _types(s)]
        schemas = [found for each in objects for found in _property(each, key, root)]
    return [found for each in schemas for found in _alternatives(each, root)]


def _property(schema: _Schema, key: str, root: _Schema) -> list[_Schema]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    if key in properties:
        return _alternatives(properties[key], root)
    if schema.get("patternProperties"):
        return [{}]
    return _alternatives(schema.get("additionalProperties", not properties), root)


def _alternatives(schema: Any, root: _Schema, depth: int = 0) -> list[_Schema]:
    """A schema without references and unions: one schema for each case."""
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    fields = cast("Mapping[str, Any]", schema)
    if depth > _MAX_DEPTH or "allOf" in fields or "not" in fields:
        return [{}]
    if "$ref" in fields:
        return _alternatives(_resolve(fields["$ref"], root), root, depth + 1)
    for union in ("anyOf", "oneOf"):
        if union in fields:
            rest = {name: value for name, value in fields.items() if name != union}
            cases = cast("list[Any]", fields[union])
            merged: list[Any] = [rest | case if isinstance(case, dict) else case for case in cases]
            return [found for case in merged for found in _alternatives(case, root, depth + 1)]
    return [dict(fields)]


def _resolve(reference: Any, root: _Schema) -> Any:
    found: Any = root
    for name in str(reference).removeprefix("#").strip("/").split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        found = cast("Mapping[str, Any]", found).get(key, True) if isinstance(found, Mapping) else True
    return found
