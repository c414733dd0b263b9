"""Which calls of an agent's tools can run without a person, going by its permission rules, approvals and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentfsm.machine.graph import State
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.permissions import PermissionPolicy, policies_of, table
from agentfsm.runtime.tools import Tool
from agentfsm.runtime.toolsets import Toolset, is_open, toolset_name

__all__ = ["Unattended", "UnattendedCalls", "unattended_calls"]

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
    """Which calls can run without a person, for each tool of an agent and of its sub-agents.

    Args:
        tools: The agent's tools by name.
        hooks: Its hooks by state.
        toolsets: Its toolsets.
    """
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
