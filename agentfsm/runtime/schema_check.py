"""Checks values by the JSON schema of a server or a user, within bounds that a hostile schema cannot exceed.

Regular expressions are evaluated by RE2 in linear time, never by ``re``, which can take exponential time and holds the
interpreter meanwhile. One that RE2 does not know (look-around, backreferences) is not evaluated: the value is checked
without it. Everything else counts against ``MAX_STEPS``. References are followed only within the schema, by JSON
pointer (``#/$defs/a``): to find any other would take time that grows with the schema, and none is ever fetched.
``format`` is not checked, and ``unevaluatedProperties`` and ``unevaluatedItems`` are ignored. A server has to check
its arguments itself; this check tells the model early what is wrong. It needs the extra ``schema``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from itertools import islice
from typing import Any
from urllib.parse import unquote

from agentfsm.errors import MissingExtraError
from agentfsm.loop.canonical_json import canonical_json

PATTERN_MEMORY = 1 << 20
"""Bytes that RE2 may use for one pattern; one that needs more is not valid."""

MAX_SCHEMA_CHARS = 100_000
"""Maximum length of a schema as JSON; the largest of the reference servers has 3,000."""

MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of a schema."""

MAX_STEPS = 20_000
"""Maximum steps of one check, of 10 to 70 µs each: keywords evaluated, ``ITEMS_PER_STEP`` of their members or of those
of the value, 1,000 characters of an error, and 10,000 characters times instructions of regular expressions."""

MAX_DEPTH = 220
"""Maximum nesting of the keywords that are being evaluated, of three frames each: enough for arguments of any depth
that a call may have, and less than Python's recursion limit. If that is reached in ``rpds``, Rust panics, and what it
raises is not an ``Exception``."""

ITEMS_PER_STEP = 32
"""Members of a list or object that one step may look at."""

CHARS_PER_STEP = 1_000
"""Characters of text that one step may write: an error quotes the value that it is about."""

MAX_ERRORS = 20
"""Maximum number of errors that one check reports."""

_IGNORED = ("unevaluatedProperties", "unevaluatedItems", "format")


def schema_problem(schema: object) -> str:
    """Why a schema cannot be used, or an empty string."""
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            break
    else:
        return f"it is nested more than {MAX_SCHEMA_DEPTH} deep"
    length = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    return "" if length <= MAX_SCHEMA_CHARS else f"it has {length:,} characters, more than {MAX_SCHEMA_CHARS:,}"


def definition_problem(schema: Mapping[str, Any]) -> str:
    """Why the user's own schema is wrong, or an empty string; that of a server need not be right to be used.

    Raises:
        MissingExtraError: The package ``jsonschema`` is not installed.
    """
    try:
        jsonschema = import_module("jsonschema")
    except ImportError as error:
        raise MissingExtraError("a tool from a JSON schema", "schema") from error
    try:
        if problem := schema_problem(schema):
            return problem
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        wrong = jsonschema.exceptions.best_match(kind(kind.META_SCHEMA).iter_errors(schema))
    except (TypeError, AttributeError, ValueError) as error:
        return f"it is not JSON: {error}"
    if wrong is not None:
        return f"{wrong.json_path}: {wrong.message}"
    lost = next((ref for ref in _references_in(schema) if not isinstance(_at_pointer(schema, ref), dict | bool)), None)
    return "" if lost is None else f"the reference {lost!r} leads nowhere in it"


def _references_in(node: object) -> Iterator[str]:
    for child in _children(node):
        yield from _references_in(child)
    match node:
        case {"$ref": str(reference)}:
            yield reference
        case _:
            return


def _children(node: object) -> list[object]:
    match node:
        case Mapping():
            return list(node.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case list():
            return node  # pyright: ignore[reportUnknownVariableType]
        case _:
            return []


class _TooMuchWorkError(Exception):
    """A check exceeded its steps. This error is not raised outside this module."""


class _Steps:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.left, self.depth = MAX_STEPS, 0

    def descend(self) -> None:
        if self.depth >= MAX_DEPTH:
            raise _TooMuchWorkError
        self.depth += 1

    def spend(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise _TooMuchWorkError


class SchemaCheck:
    """Checks values by one schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = dict(schema)
        self._steps = _Steps()
        self._patterns: dict[str, Any] = {}

    def errors(self, value: object) -> list[tuple[tuple[str | int, ...], str]]:
        """What is wrong with a value: the path and the reason of each error.

        A schema that is not valid JSON Schema finds nothing wrong. A value that cannot be checked within the bounds is
        an error.
        """
        validator = self._validator
        if validator is None:
            return []
        self._steps.reset()
        try:
            return [(tuple(e.absolute_path), e.message) for e in islice(validator.iter_errors(value), MAX_ERRORS)]
        except (_TooMuchWorkError, RecursionError):
            return [((), "the schema takes too much work to evaluate, so nothing is accepted")]
        except Exception as error:  # of a part that a reference leads to and that is not a schema, or of numbers
            return [((), f"the schema cannot be evaluated: {type(error).__name__}")]

    @cached_property
    def _validator(self) -> Any:
        """A validator of ``jsonschema``; None if the schema is not valid."""
        jsonschema, registry = import_module("jsonschema"), import_module("referencing").Registry()
        try:
            kind = jsonschema.validators.validator_for(self._schema, default=jsonschema.Draft202012Validator)
        except (TypeError, AttributeError, ValueError):  # ``$schema`` is not a URI
            return None

        def counted(checks: Mapping[str, Any]) -> Any:
            return jsonschema.validators.extend(kind, {name: self._counted(each) for name, each in checks.items()})

        bounded = counted({**kind.VALIDATORS, **self._own(), **self._references()})
        self._steps.reset()
        rules = counted({**kind.VALIDATORS, **self._own()})(
            kind.META_SCHEMA, registry=import_module("jsonschema_specifications").REGISTRY
        )
        try:
            if next(rules.iter_errors(self._schema), None) is not None:
                return None
        except (_TooMuchWorkError, RecursionError):
            return bounded({"not": {}})
        return bounded(self._schema, registry=registry)

    def _counted(self, check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def counted(validator: Any, keyword: Any, value: Any, schema: Any) -> Iterator[Any]:
            self._steps.spend(1 + (_members(keyword) + _members(value)) // ITEMS_PER_STEP)
            self._steps.descend()
            try:
                for error in check(validator, keyword, value, schema) or ():
                    self._steps.spend(1 + len(error.message) // CHARS_PER_STEP)
                    yield error
            finally:
                self._steps.depth -= 1

        return counted

    def _references(self) -> dict[str, Callable[..., Any]]:
        return dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), self._reference)

    def _reference(self, validator: Any, reference: Any, value: Any, schema: Any) -> Iterator[Any]:
        target = _at_pointer(self._schema, reference) if isinstance(reference, str) else None
        if isinstance(target, dict | bool):  # any other only the server can resolve
            yield from validator.descend(value, target)

    def _own(self) -> dict[str, Callable[..., Any]]:
        return {
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "uniqueItems": self._unique,
            **dict.fromkeys(_IGNORED, _accept),
        }

    def _matches(self, pattern: str, text: str) -> bool | None:
        """Whether a regular expression occurs in a text; None if it cannot be evaluated."""
        if pattern not in self._patterns:
            self._patterns[pattern] = _compile(pattern)
        compiled = self._patterns[pattern]
        if compiled is None:
            return None
        self._steps.spend(1 + len(text) * compiled.programsize // 10_000)
        return compiled.search(text.encode(errors="replace")) is not None

    def _pattern(self, validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(value, "string") and self._matches(pattern, value) is False:
            yield _error(f"{value!r} does not match {pattern!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any
    ) -> Iterator[Any]:
        if validator.is_type(value, "object"):
            for pattern, inner in patterns.items():
                for name, item in value.items():
                    if self._matches(pattern, name):
                        yield from validator.descend(item, inner, path=name, schema_path=pattern)

    def _additional_properties(self, validator: Any, inner: Any, value: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(value, "object"):
            return
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, item in value.items():
            if name in known or any(self._matches(pattern, name) is not False for pattern in patterns):
                continue
            if validator.is_type(inner, "object"):
                yield from validator.descend(item, inner, path=name)
            elif inner is False:
                yield _error(f"Additional properties are not allowed ({name!r} was unexpected)")

    def _unique(self, validator: Any, unique: Any, value: Any, schema: Any) -> Iterator[Any]:
        if unique and validator.is_type(value, "array"):
            texts = [canonical_json(item) for item in value]
            self._steps.spend(sum(map(len, texts)) // CHARS_PER_STEP)
            if len(set(texts)) < len(value):
                yield _error("its items are not unique")


def _members(value: object) -> int:
    return len(value) if isinstance(value, dict | list) else 0  # pyright: ignore[reportUnknownArgumentType]


def _at_pointer(schema: object, reference: str) -> object:
    """What a JSON pointer in a URI fragment leads to (https://www.rfc-editor.org/rfc/rfc6901#section-6), or None."""
    fragment = unquote(reference.removeprefix("#"))
    if not reference.startswith("#") or (fragment and not fragment.startswith("/")):
        return None
    found: Any = schema
    for token in fragment.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):  # pyright: ignore[reportUnknownArgumentType]
            found = found[int(name)]  # pyright: ignore[reportUnknownVariableType]
        else:
            return None
    return found  # pyright: ignore[reportUnknownVariableType]


def _accept(*_: object) -> tuple[()]:
    return ()


def _compile(pattern: str) -> Any:
    """A compiled RE2 pattern for bytes of UTF-8, or None if it cannot be evaluated."""
    try:
        return compile_linear(pattern)
    except (MissingExtraError, ValueError):
        return None


def _error(message: str) -> Any:
    return import_module("jsonschema").ValidationError(message)


def compile_linear(pattern: str, *, dot_matches_newline: bool = False, any_case: bool = False) -> Any:
    """A compiled RE2 pattern, for bytes of UTF-8.

    Raises:
        ValueError: It is not a valid pattern of RE2; the message says why.
        MissingExtraError: The package ``google-re2`` is not installed.
    """
    try:
        re2 = import_module("re2")
    except ImportError as error:
        raise MissingExtraError("regex=", "regex") from error
    options = re2.Options()
    options.log_errors, options.max_mem = False, PATTERN_MEMORY
    options.dot_nl, options.case_sensitive = dot_matches_newline, not any_case
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        problem: Any = error.args[0] if error.args else ""
        raise ValueError(problem.decode(errors="replace") if isinstance(problem, bytes) else str(problem)) from None
