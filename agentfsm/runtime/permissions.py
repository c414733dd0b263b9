"""Permission rules over tools and arguments: evaluated in order, the first that applies decides.

    Agent(model, tools=tools, hooks=[permissions(
        allow("read_*"),
        deny("shell", where={"command": "*rm *"}, reason="nothing is deleted here"),
        ask("transfer", where={"amount": ArgumentMatcher(at_least=100)}),
        allow("send", where={"recipients": ArgumentMatcher(every="*@example.org")}),
        otherwise="deny",
    )])

Rules see the arguments the tool will get: validated and converted, with defaults filled in, including any edits
made by a human. They fail closed: where a condition cannot be evaluated, ``deny`` and ``ask`` apply, and ``allow``
does not. Patterns are matched against the raw text; paths are not resolved and commands are not parsed. So allow what
is known to be safe, and let ``otherwise`` cover the rest: a deny list is never complete.

``unattended_calls`` says which calls can run without a person, going by these rules, approvals and hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentfsm.errors import ConfigurationError
from agentfsm.loop.failures import describe_exception
from agentfsm.machine.graph import State
from agentfsm.runtime.argument_matcher import (
    MISSING,
    UNDECLARED,
    Conditions,
    all_hold,
    parse_path,
    readable_value,
    value_at,
)
from agentfsm.runtime.argument_schema import is_declared, why_impossible
from agentfsm.runtime.hooks import AskApproval, DenyCall, Hook, HookContext, HookDecision
from agentfsm.runtime.tools import Tool
from agentfsm.runtime.toolsets import Toolset, is_open, toolset_name

PermissionAction = Literal["allow", "deny", "ask"]
"""What a rule decides about a call; ``ask`` requires a human's approval."""

Where = Mapping[Any, Any]
"""Conditions by path, as ``allow``, ``deny`` and ``ask`` take them."""

_ANYTHING: Mapping[str, Any] = {}
"""The schema of arguments about which nothing is known."""


class PermissionRule(BaseModel):
    """One rule; also accepted as JSON data: ``{"action": "deny", "tool": "shell", "where": {"command": "rm *"}}``.

    Attributes:
        action: ``allow``, ``deny`` or ``ask``.
        tool: The tool's name, or a pattern of names (``fs_*``). A pattern passes over tools that do not have the
            arguments in ``where``.
        where: Conditions on arguments by path, all of which must hold. A path is a text (``options.force``;
            ``"a.b".c`` for a name with dots) or a tuple of names (``("a.b", "c")``), and leads through objects only.
            A text is short for ``ArgumentMatcher(glob=...)``, another scalar for ``ArgumentMatcher(equals=...)``.
            If a condition cannot be evaluated, ``deny`` and ``ask`` apply, and ``allow`` does not.
        reason: The reason given to the model for a denial, or the question shown to the human.

    Raises:
        pydantic.ValidationError: The rule is invalid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: PermissionAction
    tool: str
    where: Conditions = {}
    reason: str = ""

    def names(self, tool: str) -> bool:
        """Whether a tool has the name, or matches the pattern, in the rule."""
        return fnmatchcase(tool, self.tool)

    @property
    def is_pattern(self) -> bool:
        """Whether the rule may name several tools."""
        return any(char in self.tool for char in "*?[")

    def concerns(self, tool: Tool) -> bool:
        """Whether the rule names a tool that has the arguments in its conditions."""
        return self.names(tool.name) and all(
            matcher.present is False or is_declared(tool.spec.parameters, parse_path(path))
            for path, matcher in self.where.items()
        )

    def applies(self, tool: str, arguments: Any, schema: Mapping[str, Any] = _ANYTHING) -> bool:
        """Whether the rule decides about a call.

        Args:
            tool: The tool's name.
            arguments: Its arguments as JSON data.
            schema: The JSON schema of its arguments, which tells an argument that is absent from one that the tool
                does not have.
        """
        if not self.names(tool):
            return False
        verdict = all_hold(
            condition.verdict(_find(arguments, parse_path(path), schema)) for path, condition in self.where.items()
        )
        return verdict is True or (verdict is None and self.action != "allow")

    @property
    def condition(self) -> str:
        """The conditions as text; empty if there are none."""
        return " and ".join(f"{path} {matcher}" for path, matcher in self.where.items())

    def __str__(self) -> str:
        return f"{self.action} {self.tool}" + (f" where {self.condition}" if self.where else "")


def _find(arguments: Any, path: tuple[str, ...], schema: Mapping[str, Any]) -> Any:
    value = value_at(arguments, path)
    return UNDECLARED if value is MISSING and not is_declared(schema, path) else value


@dataclass(frozen=True, slots=True)
class PermissionPolicy:
    """An agent's permission rules, in order; ``permissions`` makes a hook of them.

    Attributes:
        rules: The rules; the first that applies decides.
        otherwise: The action if none applies.
    """

    rules: tuple[PermissionRule, ...]
    otherwise: PermissionAction = "ask"

    def decide(self, tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any] = _ANYTHING) -> PermissionRule:
        """The rule that decides about a call; if none applies, one with the action ``otherwise``.

        A call whose arguments cannot be read as JSON (nested too deeply, a serializer that raises) is denied.
        """
        try:
            data = readable_value(arguments)
            for rule in self.rules:
                if rule.applies(tool, data, schema):
                    return rule
        except Exception as error:  # raised by the user's types, too: what cannot be evaluated is denied
            return PermissionRule(
                action="deny",
                tool=tool,
                reason=f"the arguments of {tool!r} cannot be checked: {describe_exception(error)}",
            )
        return PermissionRule(action=self.otherwise, tool=tool)

    def __str__(self) -> str:
        rows = [
            (str(number), rule.action, rule.tool, rule.condition or "always", rule.reason)
            for number, rule in enumerate(self.rules, 1)
        ]
        return table(("", "action", "tool", "when", "reason"), [*rows, ("", self.otherwise, "*", "otherwise", "")])

    def __call__(self, context: HookContext[Any]) -> HookDecision:
        """The decision about the call that is about to run. Control tools (``return_done``...) are always allowed."""
        if context.call is None or (context.tool is not None and context.tool.control is not None):
            return None
        schema = _ANYTHING if context.tool is None else context.tool.spec.parameters
        rule = self.decide(context.call.name, context.arguments, schema)
        if rule.action == "deny":
            return DenyCall(
                rule.reason or f"the policy of this agent does not allow {context.call.name!r} with these arguments."
            )
        return AskApproval(rule.reason) if rule.action == "ask" else None


@dataclass(frozen=True)
class PermissionHook(Hook):
    """The hook that applies a permission policy. It prints as the table of its rules."""

    def __str__(self) -> str:
        return str(self.function)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as aligned lines of text."""
    lines = [[" ".join(cell.split()) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def permissions(*rules: PermissionRule | Mapping[str, Any], otherwise: PermissionAction = "ask") -> PermissionHook:
    """A hook that applies permission rules to tool calls, for ``Agent(hooks=[...])``. It fails closed.

    Its text (``str``, ``print``) is the table of the rules. An agent refuses a rule that can never apply to a tool.

    The result of a denied call is the reason; ``max_denials`` (3) denials in a row are a ``policy_violation``.

    Args:
        rules: The rules in order, made by ``allow``, ``deny`` and ``ask`` or given as JSON data.
        otherwise: The action for a call to which no rule applies.

    Raises:
        ConfigurationError: A rule is invalid; the message says which.
    """
    if otherwise not in ("allow", "deny", "ask"):
        raise ConfigurationError(f"otherwise must be 'allow', 'deny' or 'ask', not {otherwise!r}")
    parsed = tuple(_parse_rule(index, rule) for index, rule in enumerate(rules, 1))
    return PermissionHook(State.DISPATCH_TOOL, PermissionPolicy(parsed, otherwise), fail_open=False, name="permissions")


def policies_of(hooks: Mapping[str, Iterable[Hook]]) -> tuple[PermissionPolicy, ...]:
    """The permission policies among an agent's hooks."""
    functions = (each.function for each in hooks.get(State.DISPATCH_TOOL, ()))
    return tuple(each for each in functions if isinstance(each, PermissionPolicy))


def check_rules(policies: Iterable[PermissionPolicy], tools: Iterable[Tool]) -> None:
    """Check that the rules of an agent can apply to its tools.

    A rule that names no tool is accepted: policies are shared, and tools of servers come and go.

    Raises:
        ConfigurationError: A rule names an argument that the tool, or each tool of its pattern, does not have; or the
            argument of a tool can never meet its condition, as its type is another one.
    """
    known = tuple(tools)
    for policy in policies:
        for index, rule in enumerate(policy.rules, 1):
            named = [each for each in known if rule.where and each.control is None and rule.names(each.name)]
            concerned = [each for each in named if rule.concerns(each)] if rule.is_pattern else named
            for each in concerned or named:
                problem = why_impossible(each.spec.parameters, rule.where)
                if problem is not None:
                    raise ConfigurationError(
                        f"permission rule {index} ({rule}) can never apply to the tool {each.name!r}: "
                        f"in its arguments, {problem}"
                    )


def _parse_rule(index: int, rule: PermissionRule | Mapping[str, Any]) -> PermissionRule:
    try:
        return PermissionRule.model_validate(rule)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "rule"
        raise ConfigurationError(f"permission rule {index}: {where}: {problem['msg']}") from None


def allow(tool: str, *, where: Where | None = None) -> PermissionRule:
    """A rule that allows a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
    """
    return PermissionRule(action="allow", tool=tool, where=where or {})


def deny(tool: str, *, where: Where | None = None, reason: str = "") -> PermissionRule:
    """A rule that denies a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
        reason: The reason given to the model.
    """
    return PermissionRule(action="deny", tool=tool, where=where or {}, reason=reason)


def ask(tool: str, *, where: Where | None = None, reason: str = "") -> PermissionRule:
    """A rule that requires a human's approval of a call.

    Args:
        tool: The tool's name, or a pattern of names.
        where: Conditions on its arguments; see ``PermissionRule``.
        reason: The question shown to the human.
    """
    return PermissionRule(action="ask", tool=tool, where=where or {}, reason=reason)


Unattended = Literal["always", "sometimes", "never", "unknown"]
"""Whether the calls of a tool can run without a person: all of them, those that the rules let pass, or none; of the
tools that a toolset returns it is not known before a run starts."""


@dataclass(frozen=True, slots=True)
class UnattendedCalls:
    """Whether the calls of one tool can run without a person.

    Attributes:
        tool: The tool's name, or that of a toolset; after those of the sub-agents that lead to it, as in
            ``helper/shell``.
        unattended: Which of its calls can.
        decided_by: What decides, in order: permission rules, approvals and hooks. Empty if nothing does.
    """

    tool: str
    unattended: Unattended
    decided_by: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON data."""
        return {**asdict(self), "decided_by": list(self.decided_by)}

    @staticmethod
    def table(calls: Sequence[UnattendedCalls]) -> str:
        """Tools as a table: one line for each."""
        rows = [(each.tool, each.unattended, "; ".join(each.decided_by)) for each in calls]
        return table(("tool", "without a person", "decided by"), rows)


def unattended_calls(
    tools: Mapping[str, Tool], hooks: Mapping[str, Sequence[Hook]], toolsets: Sequence[Toolset[Any]] = ()
) -> tuple[UnattendedCalls, ...]:
    """Which calls can run without a person, for each tool of an agent and of its sub-agents."""
    return tuple(_of_agent(tools, hooks, toolsets, "", ()))


def _of_agent(
    tools: Mapping[str, Tool],
    hooks: Mapping[str, Sequence[Hook]],
    toolsets: Sequence[Toolset[Any]],
    prefix: str,
    above: tuple[PermissionPolicy, ...],
) -> Iterator[UnattendedCalls]:
    policies = above + policies_of(hooks)
    others = [each for each in hooks.get(State.DISPATCH_TOOL, ()) if not isinstance(each.function, PermissionPolicy)]
    for tool in tools.values():
        if tool.control is not None:  # a question, or the end of the run: no effect on the world
            continue
        checks = [*(_by_policy(policy, tool) for policy in policies), *_by_approval(tool), *map(_by_hook, others)]
        verdicts = {verdict for verdict, _ in checks}
        verdict: Unattended = "never" if "never" in verdicts else "sometimes" if "sometimes" in verdicts else "always"
        yield UnattendedCalls(prefix + tool.name, verdict, tuple(text for _, text in checks))
        if tool.delegate is not None:
            inner = tool.delegate
            yield from _of_agent(inner.tools, inner.hooks, inner.toolsets, f"{prefix}{tool.name}/", policies)
    for each in filter(is_open, toolsets):
        yield UnattendedCalls(prefix + toolset_name(each), "unknown", ("a toolset: only a run knows its tools",))


def _by_policy(policy: PermissionPolicy, tool: Tool) -> tuple[Unattended, str]:
    """What the rules of a policy say about a tool: those up to the first that applies to all of its calls."""
    texts: list[str] = []
    actions: set[str] = set()
    for rule in policy.rules:
        if rule.concerns(tool):
            actions.add(rule.action)
            texts.append(f"{rule.action} if {rule.condition}" if rule.where else rule.action)
            if not rule.where:
                break
    else:
        actions.add(policy.otherwise)
        texts.append(policy.otherwise)
    verdict: Unattended = "never" if "allow" not in actions else "always" if actions == {"allow"} else "sometimes"
    return verdict, ", else ".join(texts)


def _by_approval(tool: Tool) -> Iterator[tuple[Unattended, str]]:
    if callable(tool.requires_approval):
        yield "sometimes", "requires_approval decides"
    elif tool.requires_approval:
        yield "never", "requires_approval"


def _by_hook(hook: Hook) -> tuple[Unattended, str]:
    return "sometimes", f"hook {hook.name or 'hook'} may deny or ask"
