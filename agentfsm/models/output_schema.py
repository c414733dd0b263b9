"""How a wire asks for structured output: in the provider's strict mode, where the schema allows it without loss.

A strict mode takes few keywords, closed objects and, at OpenAI, no optional properties. ``strict_schema`` makes such a
schema of an ordinary one if every value that it admits is also one of the original, and the values that it rules out
can be said otherwise. What it leaves out (limits, defaults, descriptions next to references) is in the instructions,
which contain the whole schema, and the answer is validated against the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentfsm.loop.model import ModelRequest
from agentfsm.loop.read_only import thaw
from agentfsm.models.wire_format import safe_tool_name
from agentfsm.models.wire_json import as_list, as_object


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaSupport:
    """What a server accepts of an output schema.

    Attributes:
        mode: ``json_schema``; or ``json_object``, which asks for JSON of any form; or ``none``.
        beside_tools: Whether it handles tools and an output format in one request. Otherwise the format is left out of
            requests with tools.
        limits: Whether its strict mode takes patterns, formats, and limits on numbers and arrays.
    """

    mode: Literal["json_schema", "json_object", "none"] = "json_schema"
    beside_tools: bool = False
    limits: bool = False


DEFAULT_SUPPORT = SchemaSupport()
"""What an unknown server is taken to accept: Ollama never calls a tool if a format is set, and llama.cpp rejects
the combination."""

OPENAI_SUPPORT = SchemaSupport(beside_tools=True, limits=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRules:
    """The rules of a strict mode.

    Attributes:
        optional: Maximum number of properties that need not be there; 0 if each must be.
        unions: Maximum number of properties that are a union.
        recursive: Whether a schema may contain itself.
        limits: The keywords that limit strings, numbers and arrays.
        formats: The values of ``format`` that are accepted.
    """

    optional: int = 0
    unions: int = 5000
    recursive: bool = True
    limits: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()


_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_LIMITS = frozenset(
    {
        *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems"),
    }
)

OPENAI_RULES = SchemaRules()
"""What every server with OpenAI's strict mode takes."""

OPENAI_OWN_RULES = SchemaRules(limits=_LIMITS, formats=_FORMATS)
"""The same for OpenAI itself (https://platform.openai.com/docs/guides/structured-outputs#supported-schemas)."""

ANTHROPIC_RULES = SchemaRules(
    optional=24, unions=16, recursive=False, limits=frozenset({"format", "minItems"}), formats=_FORMATS | {"uri"}
)
"""Those of Anthropic (https://platform.claude.com/docs/en/build-with-claude/structured-outputs)."""

_MAX_DEPTH = 10
_MAX_PROPERTIES = 5000
_MAX_ENUM_VALUES = 1000
"""OpenAI's limits on the size of a schema, which are the highest."""

_KEPT = frozenset({"title", "description", "enum", "const", "type"})
_STRUCTURE = frozenset({"$ref", "$defs", "properties", "required", "additionalProperties", "items", "anyOf"})
_LEFT_OUT = frozenset(
    {
        *("$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated", "discriminator"),
        *("examples", "maxLength", "maxProperties", "minLength", "minProperties", "readOnly", "uniqueItems"),
        *("writeOnly", *_LIMITS),
    }
)


class _NotStrictError(Exception):
    """A schema that a strict mode does not take."""


def output_schema_block(request: ModelRequest, support: SchemaSupport) -> dict[str, Any] | None:
    """The name, schema and strictness of a request's structured output, or None if no schema should be sent."""
    schema = request.output_schema
    if schema is None or support.mode != "json_schema" or (request.tools and not support.beside_tools):
        return None
    strict = strict_schema(schema, OPENAI_OWN_RULES if support.limits else OPENAI_RULES)
    sent = dict(schema) if strict is None else strict
    return {"name": safe_tool_name(request.output_name), "schema": sent, "strict": strict is not None}


def wants_json_object(request: ModelRequest, support: SchemaSupport) -> bool:
    """Whether a request is to ask for JSON of any form; servers reject that unless the prompt says the word."""
    if request.output_schema is None or request.tools or support.mode != "json_object":
        return False
    return any("json" in message.content.lower() for message in request.messages)


def strict_schema(schema: Mapping[str, Any], rules: SchemaRules) -> dict[str, Any] | None:
    """A schema as a strict mode takes it, or None if that loses something."""
    root = cast("dict[str, Any]", thaw(dict(schema)))
    named = _target(root, root.get("$ref"))
    if named is not None:  # a type that contains itself
        root = {**named, "$defs": root["$defs"]}
    if root.get("type") != "object":
        return None
    try:
        return _StrictSchema(root, rules).convert(root, 1)
    except _NotStrictError:
        return None


def _target(root: dict[str, Any], reference: object) -> dict[str, Any] | None:
    """The definition that a reference names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/$defs/"):
        return None
    return as_object(as_object(root.get("$defs")).get(reference.removeprefix("#/$defs/"))) or None


class _StrictSchema:
    """Converts one schema, and counts what is limited."""

    def __init__(self, root: dict[str, Any], rules: SchemaRules) -> None:
        self._root, self._rules = root, rules
        self._properties = self._optional = self._unions = self._enum_values = 0
        if not rules.recursive:
            self._refuse_recursion(root, ())

    def convert(self, node: object, depth: int) -> dict[str, Any]:
        """A schema within the whole, in the strict form."""
        given = as_object(node)
        if "oneOf" in given and "discriminator" in given:  # one of them holds at most, so any of them says the same
            given = {k: v for k, v in given.items() if k != "oneOf"} | {"anyOf": given["oneOf"]}
        if "allOf" in given and len(as_list(given["allOf"])) == 1:
            given = {**as_object(given["allOf"][0]), **{k: v for k, v in given.items() if k != "allOf"}}
        if depth > _MAX_DEPTH or not given.keys() <= _KEPT | _STRUCTURE | _LEFT_OUT:
            raise _NotStrictError
        definitions = {k: self.convert(v, 1) for k, v in as_object(given.get("$defs")).items()}
        kept: dict[str, Any] = {"$defs": definitions} if definitions else {}
        if "$ref" in given:
            if _target(self._root, given["$ref"]) is None:
                raise _NotStrictError
            return {**kept, "$ref": given["$ref"]}
        kept |= {k: v for k, v in given.items() if k in _KEPT or self._is_kept_limit(k, v)}
        self._enum_values += len(as_list(given.get("enum")))
        if "anyOf" in given:
            kept["anyOf"] = [self.convert(each, depth) for each in as_list(given["anyOf"])]
        elif not ({"enum", "const"} & given.keys() or isinstance(given.get("type"), str)):
            raise _NotStrictError
        if given.get("type") == "object":
            kept |= self._object(given, depth)
        elif given.get("type") == "array":
            kept["items"] = self.convert(given.get("items"), depth + 1)
        elif {"properties", "items"} & given.keys():
            raise _NotStrictError
        if self._enum_values > _MAX_ENUM_VALUES:
            raise _NotStrictError
        return kept

    def _object(self, given: dict[str, Any], depth: int) -> dict[str, Any]:
        """The strict form of an object: nothing but its properties, and all of them unless some may be left out."""
        properties, required = as_object(given.get("properties")), as_list(given.get("required"))
        if "properties" not in given or given.get("additionalProperties", False) is not False:
            raise _NotStrictError
        optional = [name for name in properties if name not in required]
        self._properties += len(properties)
        self._optional += len(optional)
        self._unions += sum("anyOf" in as_object(value) for value in properties.values())
        if self._properties > _MAX_PROPERTIES or self._unions > self._rules.unions:
            raise _NotStrictError
        if self._rules.optional == 0:
            if any("default" not in as_object(properties[name]) for name in optional):
                raise _NotStrictError  # what is left out may mean something else than any value
            required = list(properties)
        elif self._optional > self._rules.optional:
            raise _NotStrictError
        return {
            "properties": {name: self.convert(value, depth + 1) for name, value in properties.items()},
            "required": required,
            "additionalProperties": False,
        }

    def _is_kept_limit(self, key: str, value: object) -> bool:
        if key not in self._rules.limits:
            return False
        if key == "format":
            return value in self._rules.formats
        if key == "minItems" and "maxItems" not in self._rules.limits:
            return value in (0, 1)
        return key != "pattern" or "(?" not in str(value)  # no groups that look ahead

    def _refuse_recursion(self, node: object, path: tuple[str, ...]) -> None:
        """Refuse a schema that contains itself."""
        if isinstance(node, list):
            for item in cast("list[object]", node):
                self._refuse_recursion(item, path)
            return
        given = as_object(node)
        reference = given.get("$ref")
        if isinstance(reference, str):
            if reference in path or len(path) > _MAX_DEPTH:
                raise _NotStrictError
            self._refuse_recursion(_target(self._root, reference), (*path, reference))
        for key, value in given.items():
            if key != "$defs":
                self._refuse_recursion(value, path)
