"""Permission rules over tools and arguments: evaluated in order, the first match decides.

    Agent(model, tools=tools, hooks=[permissions(
        allow("read_*"),
        deny("shell", where={"command": ArgumentMatcher(regex=r".*rm .*")}, reason="nothing is deleted here"),
        ask("transfer", where={"amount": ArgumentMatcher(at_least=100)}),
        otherwise="deny",
    )])

Rules see the arguments the tool will get: validated and converted, with defaults filled in, including any edits
made by a human. Strings are matched as they are: a path is not resolved, a command is not parsed. So allow what is
known to be good and leave the rest to ``otherwise``; a deny list is never complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from agentfsm.errors import ConfigurationError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.machine.graph import State
from agentfsm.runtime.hooks import AskApproval, DenyCall, Hook, HookContext, HookDecision

__all__ = [
    "ArgumentMatcher",
    "PermissionAction",
    "PermissionPolicy",
    "PermissionRule",
    "allow",
    "ask",
    "deny",
    "permissions",
]

PermissionAction = Literal["allow", "deny", "ask"]
"""What a rule says about a call; ``ask`` leaves it to a person."""


class ArgumentMatcher(BaseModel):
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
    def _check_regex(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"this is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _require_condition(self) -> ArgumentMatcher:
        if not self.model_fields_set:
            raise ValueError(f"a condition must say something: {', '.join(type(self).model_fields)}")
        return self

    def matches(self, value: Any) -> bool:
        """Whether a JSON value is so."""
        return all(_MATCHERS[name](value, getattr(self, name)) for name in self.model_fields_set)


def _json_equal(value: Any, expected: Any) -> bool:
    return canonical_json(value) == canonical_json(expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MATCHERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "equals": _json_equal,
    "one_of": lambda value, wanted: any(_json_equal(value, one) for one in wanted),
    "glob": lambda value, wanted: isinstance(value, str) and fnmatchcase(value, wanted),
    "regex": lambda value, wanted: isinstance(value, str) and re.fullmatch(wanted, value, re.DOTALL) is not None,
    "at_least": lambda value, wanted: _is_number(value) and value >= wanted,
    "at_most": lambda value, wanted: _is_number(value) and value <= wanted,
}


class PermissionRule(BaseModel):
    """One rule. JSON data will do too: ``{"action": "deny", "tool": "shell", "where": {"command": "rm *"}}``.

    Attributes:
        action: ``allow``, ``deny`` or ``ask``.
        tool: The tool's name, or a pattern of names (``fs_*``).
        where: What arguments must be, by name (``options.force`` for one inside another); a text stands for
            ``ArgumentMatcher(glob=...)``, any other scalar for ``ArgumentMatcher(equals=...)``. One that is absent is not so. Of a
            list's items all must be so for ``allow``, one is enough for ``deny`` and ``ask``.
        reason: What the model is told of a denial, or a person is asked.

    Raises:
        pydantic.ValidationError: The rule cannot be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: PermissionAction
    tool: str
    where: dict[str, ArgumentMatcher] = {}
    reason: str = ""

    @field_validator("where", mode="before")
    @classmethod
    def _expand_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = cast("Mapping[str, Any]", value)
        return {name: _as_matcher(one) for name, one in given.items()}

    def matches(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the rule is about a call.

        Args:
            tool: The tool's name.
            arguments: Its arguments, as JSON data.
        """
        enough = all if self.action == "allow" else any
        return fnmatchcase(tool, self.tool) and all(
            bool(values := list(_values_at(arguments, name.split(".")))) and enough(map(condition.matches, values))
            for name, condition in self.where.items()
        )


def _as_matcher(given: Any) -> Any:
    if isinstance(given, str):
        return ArgumentMatcher(glob=given)
    return ArgumentMatcher(equals=given) if given is None or isinstance(given, bool | int | float) else given


def _values_at(value: Any, path: list[str]) -> Iterable[Any]:
    """What stands at a path; of a list, each item."""
    if isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # JSON: anything
            yield from _values_at(item, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _values_at(cast("Mapping[str, Any]", value)[path[0]], path[1:])


@dataclass(frozen=True, slots=True)
class PermissionPolicy:
    """The rules of an agent, in order; made a hook by ``permissions``.

    Attributes:
        rules: The rules; the first that matches decides.
        otherwise: What is done where none matches.
    """

    rules: tuple[PermissionRule, ...]
    otherwise: PermissionAction = "ask"

    def decide(self, tool: str, arguments: Mapping[str, Any]) -> PermissionRule:
        """The rule that decides about a call; where none matches, one that says ``otherwise``.

        Args:
            tool: The tool's name.
            arguments: What it would get.
        """
        data = to_jsonable_python(dict(arguments), fallback=str)
        for rule in self.rules:
            if rule.matches(tool, data):
                return rule
        return PermissionRule(action=self.otherwise, tool=tool)

    def __call__(self, context: HookContext) -> HookDecision:
        """The verdict on the call that is about to run. The loop's own tools (``return_done``...) always may."""
        if context.call is None or (context.tool is not None and context.tool.control is not None):
            return None
        rule = self.decide(context.call.name, context.arguments)
        if rule.action == "deny":
            return DenyCall(rule.reason or f"the policy of this agent does not allow {context.call.name!r} like this.")
        return AskApproval(rule.reason) if rule.action == "ask" else None


def permissions(*rules: PermissionRule | Mapping[str, Any], otherwise: PermissionAction = "ask") -> Hook:
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
    read = tuple(_parse_rule(place, rule) for place, rule in enumerate(rules, 1))
    return Hook(State.DISPATCH_TOOL, PermissionPolicy(read, otherwise), fail_open=False, name="permissions")


def _parse_rule(index: int, rule: PermissionRule | Mapping[str, Any]) -> PermissionRule:
    try:
        return PermissionRule.model_validate(rule)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "it"
        raise ConfigurationError(f"permission rule {index}: {where}: {problem['msg']}") from None


def allow(tool: str, *, where: Mapping[str, Any] | None = None) -> PermissionRule:
    """A rule that lets a call run.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``PermissionRule``.
    """
    return PermissionRule(action="allow", tool=tool, where=dict(where or {}))


def deny(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> PermissionRule:
    """A rule that forbids a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``PermissionRule``.
        reason: What the model is told.
    """
    return PermissionRule(action="deny", tool=tool, where=dict(where or {}), reason=reason)


def ask(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> PermissionRule:
    """A rule by which a person must allow a call first.

    Args:
        tool: The tool's name, or a pattern of names.
        where: What its arguments must be; see ``PermissionRule``.
        reason: What the person is asked.
    """
    return PermissionRule(action="ask", tool=tool, where=dict(where or {}), reason=reason)
