"""A policy over tools and arguments: rules as data, asked in order, of which the first that matches decides.

    Agent(model, tools=tools, hooks=[permissions(
        allow("read_*"),
        deny("shell", where={"command": Is(regex=r".*rm .*")}, reason="nothing is deleted here"),
        ask("transfer", where={"amount": Is(at_least=100)}),
        otherwise="deny",
    )])

Rules see what the tool will get: arguments checked and converted, defaults filled in, and those that a person
has edited. They see texts as they stand: a path is not resolved, a command is not parsed. So allow what is
known to be good and leave the rest to ``otherwise``; a list of what is bad is never complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from agentfsm.core.messages import canonical_json
from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import State
from agentfsm.runtime.hooks import AskApproval, DenyCall, Hook, HookContext, Verdict

__all__ = ["Is", "Permission", "Permissions", "Rule", "allow", "ask", "deny", "permissions"]

Permission = Literal["allow", "deny", "ask"]
"""What a rule says about a call; ``ask`` leaves it to a person."""


class Is(BaseModel):
    """What an argument must be for a rule to match. Every condition that is given must hold.

    Attributes:
        equals: This JSON value. ``True`` is not 1, and 1 is not 1.0.
        one_of: One of these.
        glob: A text that this pattern (``*``, ``?``, ``[...]``) matches as a whole, letter case included.
        regex: A text that this regular expression matches as a whole; a dot matches line ends too.
        at_least: A number not below this.
        at_most: A number not above this.

    Raises:
        pydantic.ValidationError: No condition is given, or one cannot be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    equals: Any = None
    one_of: tuple[Any, ...] | None = None
    glob: str | None = None
    regex: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @field_validator("regex")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"this is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Is:
        if not self.model_fields_set:
            raise ValueError(f"a condition must say something: {', '.join(type(self).model_fields)}")
        return self

    def holds(self, value: Any) -> bool:
        """Whether a JSON value is so."""
        return all(_HOLDS[name](value, getattr(self, name)) for name in self.model_fields_set)


def _equals(value: Any, wanted: Any) -> bool:
    return canonical_json(value) == canonical_json(wanted)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "equals": _equals,
    "one_of": lambda value, wanted: any(_equals(value, one) for one in wanted),
    "glob": lambda value, wanted: isinstance(value, str) and fnmatchcase(value, wanted),
    "regex": lambda value, wanted: isinstance(value, str) and re.fullmatch(wanted, value, re.DOTALL) is not None,
    "at_least": lambda value, wanted: _number(value) and value >= wanted,
    "at_most": lambda value, wanted: _number(value) and value <= wanted,
}


class Rule(BaseModel):
    """One rule. JSON data will do too: ``{"action": "deny", "tool": "shell", "where": {"command": "rm *"}}``.

    Attributes:
        action: ``allow``, ``deny`` or ``ask``.
        tool: The tool's name, or a pattern of names (``fs_*``).
        where: What arguments must be, by name (``options.force`` for one inside another); a text stands for
            ``Is(glob=...)``, any other scalar for ``Is(equals=...)``. One that is absent is not so. Of a
            list's items all must be so for ``allow``, one is enough for ``deny`` and ``ask``.
        reason: What the model is told of a denial, or a person is asked.

    Raises:
        pydantic.ValidationError: The rule cannot be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Permission
    tool: str
    where: dict[str, Is] = {}
    reason: str = ""

    @field_validator("where", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = cast("Mapping[str, Any]", value)
        return {name: _condition(one) for name, one in given.items()}

    def matches(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the rule is about a call.

        Args:
            tool: The tool's name.
            arguments: Its arguments, as JSON data.
        """
        enough = all if self.action == "allow" else any
        return fnmatchcase(tool, self.tool) and all(
            bool(values := list(_values(arguments, name.split(".")))) and enough(map(condition.holds, values))
            for name, condition in self.where.items()
        )


def _condition(given: Any) -> Any:
    if isinstance(given, str):
        return Is(glob=given)
    return Is(equals=given) if given is None or isinstance(given, bool | int | float) else given


def _values(value: Any, path: list[str]) -> Iterable[Any]:
    """What stands at a path; of a list, each item."""
    if isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # JSON: anything
            yield from _values(item, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _values(cast("Mapping[str, Any]", value)[path[0]], path[1:])


@dataclass(frozen=True, slots=True)
class Permissions:
    """The rules of an agent, in order; made a hook by ``permissions``.

    Attributes:
        rules: The rules; the first that matches decides.
        otherwise: What is done where none matches.
    """

    rules: tuple[Rule, ...]
    otherwise: Permission = "ask"

    def decide(self, tool: str, arguments: Mapping[str, Any]) -> Rule:
        """The rule that decides about a call; where none matches, one that says ``otherwise``.

        Args:
            tool: The tool's name.
            arguments: What it would get.
        """
        data = to_jsonable_python(dict(arguments), fallback=str)
        for rule in self.rules:
            if rule.matches(tool, data):
                return rule
        return Rule(action=self.otherwise, tool=tool)

    def __call__(self, seen: HookContext) -> Verdict:
        """The verdict on the call that is about to run. The loop's own tools (``return_done``...) always may."""
        if seen.call is None or (seen.tool is not None and seen.tool.control is not None):
            return None
        rule = self.decide(seen.call.name, seen.arguments)
        if rule.action == "deny":
            return DenyCall(rule.reason or f"the policy of this agent does not allow {seen.call.name!r} like this.")
        return AskApproval(rule.reason) if rule.action == "ask" else None


def permissions(*rules: Rule | Mapping[str, Any], otherwise: Permission = "ask") -> Hook:
    """A policy as a hook, for ``Agent(hooks=[...])``. It fails closed.

    A denied call is answered with the reason; ``max_denials`` (3) in a row are a ``policy_violation``.

    Args:
        rules: The rules in order, made by ``allow``, ``deny`` and ``ask`` or as JSON data.
        otherwise: What is done with a call that no rule is about.

    Raises:
        ConfigurationError: A rule cannot be read; the message says which.
    """
    if otherwise not in ("allow", "deny", "ask"):
        raise ConfigurationError(f"otherwise is 'allow', 'deny' or 'ask', not {otherwise!r}")
    read = tuple(_read(place, rule) for place, rule in enumerate(rules, 1))
    return Hook(State.DISPATCH_TOOL, Permissions(read, otherwise), fail_open=False, name="permissions")


def _read(place: int, rule: Rule | Mapping[str, Any]) -> Rule:
    try:
        return Rule.model_validate(rule)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "it"
        raise ConfigurationError(f"permission rule {place}: {where}: {problem['msg']}") from None


def allow(tool: str, *, where: Mapping[str, Any] | None = None) -> Rule:
    """A rule that lets a call run.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``Rule``.
    """
    return Rule(action="allow", tool=tool, where=dict(where or {}))


def deny(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> Rule:
    """A rule that forbids a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``Rule``.
        reason: What the model is told.
    """
    return Rule(action="deny", tool=tool, where=dict(where or {}), reason=reason)


def ask(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> Rule:
    """A rule by which a person must allow a call first.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``Rule``.
        reason: What the person is asked.
    """
    return Rule(action="ask", tool=tool, where=dict(where or {}), reason=reason)
