"""Permission rules over tools and arguments: evaluated in order, the first match decides.

    Agent(model, tools=tools, hooks=[permissions(
        allow("read_*"),
        deny("shell", where={"command": ArgumentMatcher(regex=r".*rm .*")}, reason="nothing is deleted here"),
        ask("transfer", where={"amount": ArgumentMatcher(at_least=100)}),
        otherwise="deny",
    )])

Rules see the arguments the tool will get: validated and converted, with defaults filled in, including any edits
made by a human. Patterns are matched against the raw string; paths are not resolved and commands are not parsed. So
allow what is known to be safe, and let ``otherwise`` cover the rest: a deny list is never complete.
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
"""What a rule decides about a call; ``ask`` requires a human's approval."""


class ArgumentMatcher(BaseModel):
    """A condition on an argument. If several are given, all of them must hold.

    Attributes:
        equals: It equals this JSON value. ``True`` is not 1, and 1 is not 1.0.
        one_of: It equals one of these values.
        glob: It is a string that this pattern (``*``, ``?``, ``[...]``) matches completely, case-sensitively.
        regex: It is a string that this regular expression matches completely; a dot matches newlines too.
        at_least: It is a number not less than this.
        at_most: It is a number not greater than this.

    Raises:
        pydantic.ValidationError: No condition is given, or one is invalid.
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
                raise ValueError(f"this is not a valid regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _require_condition(self) -> ArgumentMatcher:
        if not self.model_fields_set:
            raise ValueError(f"give at least one condition: {', '.join(type(self).model_fields)}")
        return self

    def matches(self, value: Any) -> bool:
        """Whether a JSON value meets the condition."""
        return all(_MATCHERS[name](value, getattr(self, name)) for name in self.model_fields_set)


def _json_equal(value: Any, expected: Any) -> bool:
    return canonical_json(value) == canonical_json(expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MATCHERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "equals": _json_equal,
    "one_of": lambda value, allowed: any(_json_equal(value, one) for one in allowed),
    "glob": lambda value, pattern: isinstance(value, str) and fnmatchcase(value, pattern),
    "regex": lambda value, pattern: isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None,
    "at_least": lambda value, limit: _is_number(value) and value >= limit,
    "at_most": lambda value, limit: _is_number(value) and value <= limit,
}


class PermissionRule(BaseModel):
    """One rule; also accepted as JSON data: ``{"action": "deny", "tool": "shell", "where": {"command": "rm *"}}``.

    Attributes:
        action: ``allow``, ``deny`` or ``ask``.
        tool: The tool's name, or a pattern of names (``fs_*``).
        where: Conditions on arguments, by name (``options.force`` for a nested one). A string is short for
            ``ArgumentMatcher(glob=...)``, any other scalar for ``ArgumentMatcher(equals=...)``. A missing
            argument does not match. Of a list, every item must match for ``allow``, any item for ``deny`` and
            ``ask``.
        reason: The reason given to the model for a denial, or the question shown to the human.

    Raises:
        pydantic.ValidationError: The rule is invalid.
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
        conditions = cast("Mapping[str, Any]", value)
        return {name: _as_matcher(one) for name, one in conditions.items()}

    def matches(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the rule matches a call.

        Args:
            tool: The tool's name.
            arguments: Its arguments, as JSON data.
        """
        quantifier = all if self.action == "allow" else any
        return fnmatchcase(tool, self.tool) and all(
            bool(values := list(_values_at(arguments, name.split(".")))) and quantifier(map(condition.matches, values))
            for name, condition in self.where.items()
        )


def _as_matcher(value: Any) -> Any:
    if isinstance(value, str):
        return ArgumentMatcher(glob=value)
    return ArgumentMatcher(equals=value) if value is None or isinstance(value, bool | int | float) else value


def _values_at(value: Any, path: list[str]) -> Iterable[Any]:
    """The values at a path; of a list, those of each item."""
    if isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # JSON: anything
            yield from _values_at(item, path)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _values_at(cast("Mapping[str, Any]", value)[path[0]], path[1:])


@dataclass(frozen=True, slots=True)
class PermissionPolicy:
    """An agent's permission rules, in order; ``permissions`` makes a hook of them.

    Attributes:
        rules: The rules; the first that matches decides.
        otherwise: The action if none matches.
    """

    rules: tuple[PermissionRule, ...]
    otherwise: PermissionAction = "ask"

    def decide(self, tool: str, arguments: Mapping[str, Any]) -> PermissionRule:
        """The rule that decides about a call; if none matches, one with the action ``otherwise``.

        Args:
            tool: The tool's name.
            arguments: Its validated arguments.
        """
        data = to_jsonable_python(dict(arguments), fallback=str)
        for rule in self.rules:
            if rule.matches(tool, data):
                return rule
        return PermissionRule(action=self.otherwise, tool=tool)

    def __call__(self, context: HookContext) -> HookDecision:
        """The decision about the call that is about to run. Control tools (``return_done``...) are always allowed."""
        if context.call is None or (context.tool is not None and context.tool.control is not None):
            return None
        rule = self.decide(context.call.name, context.arguments)
        if rule.action == "deny":
            return DenyCall(
                rule.reason or f"the policy of this agent does not allow {context.call.name!r} with these arguments."
            )
        return AskApproval(rule.reason) if rule.action == "ask" else None


def permissions(*rules: PermissionRule | Mapping[str, Any], otherwise: PermissionAction = "ask") -> Hook:
    """A hook that applies permission rules to tool calls, for ``Agent(hooks=[...])``. It fails closed.

    The result of a denied call is the reason; ``max_denials`` (3) denials in a row are a ``policy_violation``.

    Args:
        rules: The rules in order, made by ``allow``, ``deny`` and ``ask`` or given as JSON data.
        otherwise: The action for a call that no rule matches.

    Raises:
        ConfigurationError: A rule is invalid; the message says which.
    """
    if otherwise not in ("allow", "deny", "ask"):
        raise ConfigurationError(f"otherwise must be 'allow', 'deny' or 'ask', not {otherwise!r}")
    parsed = tuple(_parse_rule(index, rule) for index, rule in enumerate(rules, 1))
    return Hook(State.DISPATCH_TOOL, PermissionPolicy(parsed, otherwise), fail_open=False, name="permissions")


def _parse_rule(index: int, rule: PermissionRule | Mapping[str, Any]) -> PermissionRule:
    try:
        return PermissionRule.model_validate(rule)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "rule"
        raise ConfigurationError(f"permission rule {index}: {where}: {problem['msg']}") from None


def allow(tool: str, *, where: Mapping[str, Any] | None = None) -> PermissionRule:
    """A rule that allows a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
    """
    return PermissionRule(action="allow", tool=tool, where=dict(where or {}))


def deny(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> PermissionRule:
    """A rule that denies a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
        reason: The reason given to the model.
    """
    return PermissionRule(action="deny", tool=tool, where=dict(where or {}), reason=reason)


def ask(tool: str, *, where: Mapping[str, Any] | None = None, reason: str = "") -> PermissionRule:
    """A rule that requires a human's approval of a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
        reason: The question shown to the human.
    """
    return PermissionRule(action="ask", tool=tool, where=dict(where or {}), reason=reason)
