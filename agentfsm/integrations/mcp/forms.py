"""Elicitation as forms: what an MCP server asks a person while a call runs, and the answer, checked by its schema."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from agentfsm.errors import HumanReplyError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.read_only import thaw
from agentfsm.runtime.schema_check import SchemaCheck, schema_problem


class Answer(BaseModel):
    """What a person answered to a form.

    Attributes:
        action: ``accept``, ``decline`` or ``cancel``.
        content: The fields, if it was accepted.
    """

    model_config = ConfigDict(frozen=True)

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None


class Form(BaseModel):
    """What a server asks a person.

    Attributes:
        message: The question.
        fields: The JSON schema of the object to fill in; without properties if only consent is asked for.
        url: An address that the person should open, or an empty string.
    """

    model_config = ConfigDict(frozen=True)

    message: str
    fields: dict[str, Any] = Field(default_factory=dict)
    url: str = ""

    @classmethod
    def from_sdk(cls, params: Any) -> Form:
        """The form for a request of a server."""
        if params.mode == "url":
            return cls(message=params.message, url=params.url)
        return cls(message=params.message, fields=params.requested_schema)

    @property
    def key(self) -> str:
        """What makes it equal to another form."""
        return canonical_json(self.model_dump())

    @property
    def problem(self) -> str:
        """Why it cannot be shown to a person; an empty string if it can."""
        return schema_problem(self.fields) if self.fields else ""

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """The schema of each field."""
        own: Any = self.fields.get("properties")
        given = cast("dict[str, Any]", own) if isinstance(own, dict) else {}
        return {name: each for name, each in given.items() if isinstance(each, dict)}

    @property
    def choices(self) -> tuple[str, ...]:
        """The values to choose from, if there is only one field and it has few."""
        if len(self.properties) != 1:
            return ()
        (single,) = self.properties.values()
        if single.get("type") == "boolean":
            return ("true", "false")
        values = [str(value) for value, _ in _options(single)]
        return tuple(values) if single.get("type") == "string" else ()

    def describe(self, server: str) -> str:
        """Its fields as text for a person."""
        required: Any = self.fields.get("required") or ()
        lines = [f"The MCP server {server!r} asks this."]
        if self.url:
            lines.append(f"It wants you to open this address, which only you can judge: {self.url}")
        for name, schema in self.properties.items():
            what = [str(schema.get("format") or schema.get("type") or "any value")]
            if options := _options(schema.get("items", {}) if schema.get("type") == "array" else schema):
                what.append("one of " + ", ".join(f"{v} ({t})" if t != str(v) else str(v) for v, t in options))
            if "default" in schema:
                what.append(f"default {json.dumps(schema['default'], ensure_ascii=False)}")
            elif name in required:
                what.append("required")
            about = schema.get("description") or schema.get("title") or ""
            lines.append(f"{name} ({'; '.join(what)})" + (f": {about}" if about else ""))
        return "\n".join(lines)


def _options(schema: Any) -> list[tuple[Any, str]]:
    """The values that a field may have, with their titles."""
    if isinstance(schema.get("enum"), list):
        titles = schema.get("enumNames") or schema["enum"]
        return [(v, str(t)) for v, t in zip(schema["enum"], titles, strict=False)]
    titled = schema.get("oneOf") or schema.get("anyOf") or ()
    return [(each["const"], str(each.get("title", each["const"]))) for each in titled if "const" in each]


def read_reply(form: Form, reply: HumanReply) -> Answer:
    """A person's reply as the answer to a form, with the defaults of the fields that were left out.

    Raises:
        HumanReplyError: It does not fit the form; the error names each field.
    """
    if reply.kind in ("deny", "give_up"):
        return Answer(action="decline" if reply.kind == "deny" else "cancel")
    given = _parse(form, reply.text) if reply.kind == "text" else thaw(reply.arguments)
    fields = {name: schema["default"] for name, schema in form.properties.items() if "default" in schema} | given
    errors = [(".".join(map(str, path)), reason) for path, reason in SchemaCheck(form.fields).errors(fields)]
    errors += [(name, "there is no such field") for name in fields if name not in form.properties]
    errors += [
        (name, f"{fields[name]!r} is not a valid {schema['format']}")
        for name, schema in form.properties.items()
        if isinstance(fields.get(name), str) and not _has_format(str(schema.get("format")), fields[name])
    ]
    if errors:
        said = "; ".join(f"{name}: {reason}" if name else reason for name, reason in errors)
        raise HumanReplyError(f"the reply does not fit the form, and the run still waits: {said}")
    if form.url:
        return Answer(action="accept")
    return Answer(action="accept", content=fields)


def _parse(form: Form, text: str) -> dict[str, Any]:
    """The fields that a text gives: a JSON object, or the value of the only field."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if not form.properties:
        return {}
    names = ", ".join(form.properties)
    if len(form.properties) > 1:
        raise HumanReplyError(f"the form has several fields ({names}): reply with Fill({{...}}) or their JSON object")
    (schema,) = form.properties.values()
    return {names: text.strip() if schema.get("type") == "string" or value is None else value}


_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")

_FORMATS: Mapping[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "date-time": lambda text: datetime.datetime.fromisoformat(text) if len(text) > len("2026-01-01") else None,
    "email": _EMAIL.fullmatch,
    "uri": lambda text: urlsplit(text).scheme,
}
"""For each format of a text field, a function that returns something true for a valid text."""


def _has_format(name: str, text: str) -> bool:
    check = _FORMATS.get(name)
    try:
        return check is None or bool(check(text))
    except ValueError:
        return False
