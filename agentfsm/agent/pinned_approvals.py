"""Which calls of a run a person has to approve, as its first record has it, and whether an agent is as strict.

A run may continue with an agent that asks people at least as often as the one that it began with.
``requires_approval`` and hooks with ``fail_open=False`` are compared, and a weaker agent is refused; permission
policies are data, so those of the run apply in addition to the agent's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap
from typing import Any, cast
from weakref import ref

from pydantic import TypeAdapter, ValidationError

from agentfsm.errors import ConfigurationError, SuspensionApprovalError
from agentfsm.loop.quorum import Approval
from agentfsm.loop.read_only import code_name, thaw
from agentfsm.loop.state import RunState
from agentfsm.loop.withholding import lacks_values
from agentfsm.machine.graph import State
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.permissions import PermissionHook, PermissionPolicy, PermissionRule, policies_of
from agentfsm.runtime.tools import ApprovalRequirement, Tool
from agentfsm.runtime.toolsets import Toolset, chooser_of, is_open

Pinned = Mapping[str, Any]
_APPROVAL: TypeAdapter[Approval] = TypeAdapter(Approval)


def pin_approvals(config: AgentConfig) -> dict[str, Any]:
    """What has to allow the calls of an agent before they are executed, as JSON data; empty if nothing has to."""
    return _pin(config.tools, config.hooks)  # its toolsets have chosen tools when a run begins


def _pin(
    tools: Mapping[str, Tool], hooks: Mapping[str, tuple[Hook, ...]], toolsets: Iterable[Toolset[Any]] = ()
) -> dict[str, Any]:
    pinned: dict[str, Any] = {
        "tools": {
            name: _pin_rule(tool.requires_approval)
            for name, tool in tools.items()
            if tool.requires_approval is not False
        },
        "hooks": dict(_closed_hooks(hooks)),
        "permissions": [_pin_policy(policy) for policy in policies_of(hooks)],
        "agents": {
            name: below
            for name, tool in tools.items()
            if (delegate := tool.delegate) is not None
            and (below := _pin(delegate.tools, delegate.hooks, delegate.toolsets))
        },
        "toolsets": [_pin_toolset(each) for each in toolsets if is_open(each)],
    }
    return {name: value for name, value in pinned.items() if value}


def _pin_rule(rule: ApprovalRequirement) -> Any:
    if isinstance(rule, bool):
        return rule
    if isinstance(rule, Approval):
        return _APPROVAL.dump_python(rule, mode="json", exclude_defaults=True)
    returns = getattr(unwrap(rule), "__annotations__", {}).get("return")
    pinned = {"function": _name_of(rule), "code": _code_of(rule)}
    return {**pinned, "returns": "bool"} if returns in (bool, "bool") else pinned


def _pin_toolset(toolset: Toolset[Any]) -> dict[str, Any]:
    """What says which tools a sub-agent's toolset will choose when its run begins: its code, and the tools it holds."""
    chooser = chooser_of(toolset)
    return {"name": code_name(chooser), "code": _code_of(chooser), **_pin(_tools_held_by(toolset), {})}


def _tools_held_by(toolset: Toolset[Any]) -> dict[str, Tool]:
    """The tools that an object has in its attributes, including lists and dicts there."""
    held: dict[str, Tool] = {}
    for value in vars(toolset).values() if hasattr(toolset, "__dict__") else ():
        several = value.values() if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        for each in several if isinstance(several, Collection) else (several,):  # pyright: ignore[reportUnknownVariableType]
            if isinstance(each, Tool):
                held[each.name] = each
    return held


def _pin_policy(policy: PermissionPolicy) -> dict[str, Any]:
    rules = [rule.model_dump(mode="json", exclude_unset=True) for rule in policy.rules]
    return {"rules": rules, "otherwise": policy.otherwise}


def _closed_hooks(hooks: Mapping[str, tuple[Hook, ...]]) -> Iterator[tuple[str, str]]:
    """Name and code of each hook that checks calls and fails closed, but for permission policies."""
    for each in hooks.get(State.DISPATCH_TOOL, ()):
        if not each.fail_open and not isinstance(each.function, PermissionPolicy):
            yield each.name or _name_of(each.function), _code_of(each.function)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _code_of(function: Any) -> str:
    """A digest of a function's code: of its source, or, if it has none of its own, of what this Python runs."""
    owner = getattr(function, "__self__", function)  # each access makes a new bound method
    key = id(owner)
    if key not in _DIGESTS:
        try:
            _DIGESTS[key] = ref(owner, lambda _: _DIGESTS.pop(key, None)), {}
        except TypeError:  # it cannot be referred to weakly
            return _digest_code(function)
    _, digests = _DIGESTS[key]
    method = getattr(function, "__func__", None)
    if method not in digests:
        digests[method] = _digest_code(function)
    return digests[method]


_DIGESTS: dict[int, tuple[ref[Any], dict[Any, str]]] = {}
"""By the identity of a function or of the object it is a method of (two rules may be equal and yet not the same), and
by method: describing code takes milliseconds, and each run begins with it."""


def _digest_code(function: Any) -> str:
    from agentfsm.analysis.code_comparison import code_digest, code_key  # only for agents with such functions

    major, minor = sys.version_info[:2]
    return code_digest(function) or f"{major}.{minor}:{code_key(function, sources=False)}"


# -- comparing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weaker:
    """Something that the run's own agent asks for, and another one does not.

    Attributes:
        name: The tool or the hook, after the names of the tools that are the sub-agents it belongs to.
        text: What differs.
    """

    name: str
    text: str


def is_as_strict(config: AgentConfig, pinned: Pinned, graph: str) -> bool:
    """Whether an agent asks people at least as often as a run's own, or whether its toolsets will tell."""
    admitted = _admitted(config, graph)
    return bool(config.toolsets) or all(each.name in admitted for each in _weaker(pinned, config.tools, config.hooks))


def as_strict_as_pinned(config: AgentConfig, state: RunState, graph: str) -> tuple[AgentConfig, tuple[str, ...]]:
    """The configuration with which a run continues, and which tools and hooks a migration admits to ask people less.

    The permission policies that the run began with apply in addition to the agent's.

    Raises:
        SuspensionApprovalError: The agent would run calls that the run's own agent puts to people.
    """
    pinned: Pinned = thaw(state.details.approvals)
    if not pinned:
        return config, ()
    weaker = [] if config.toolsets else list(_weaker(pinned, config.tools, config.hooks))  # a sub-agent's are not known
    admitted = _admitted(config, graph)
    if refused := [each for each in weaker if each.name not in admitted]:
        names = ", ".join(repr(each.name) for each in refused)
        raise SuspensionApprovalError(
            f"run {state.run_id!r} began with an agent that asks people more than this one does: "
            f"{'; '.join(each.text for each in refused)}. Go on with an agent that asks at least as much, or admit the "
            f"change with Agent(..., migrations=[Migration({graph[:12]!r}, approvals=({names},))]); nothing was changed"
        )
    own = [_pin_policy(policy) for policy in policies_of(config.hooks)]
    missing = [each for each in pinned.get("permissions", ()) if each not in own]
    if missing:
        at = str(State.DISPATCH_TOOL)
        hooks = tuple(_permission_hook(state, each) for each in missing)
        config = replace(config, hooks={**config.hooks, at: (*config.hooks.get(at, ()), *hooks)})
    return config, tuple(each.name for each in weaker)


def _permission_hook(state: RunState, pinned: Pinned) -> PermissionHook:
    try:
        if lacks_values(pinned):
            raise ValueError("they hold a secret, which is not stored (the extra 'sealing' stores secrets encrypted)")
        policy = PermissionPolicy(tuple(map(PermissionRule.model_validate, pinned["rules"])), pinned["otherwise"])
    except (ValueError, ValidationError, LookupError, TypeError) as error:
        raise SuspensionApprovalError(
            f"the permission rules with which run {state.run_id!r} began are not those of this agent, and cannot be "
            f"applied from its journal: {error}; nothing was changed"
        ) from error
    return PermissionHook(State.DISPATCH_TOOL, policy, fail_open=False, name="permissions")


def _admitted(config: AgentConfig, graph: str) -> frozenset[str]:
    return frozenset(name for each in config.migrations if each.matches(graph) for name in each.approvals)


def _weaker(
    pinned: Pinned,
    tools: Mapping[str, Tool],
    hooks: Mapping[str, tuple[Hook, ...]],
    above: str = "",
    *,
    may_have_more: bool = False,
) -> Iterator[_Weaker]:
    """What is asked less of people than pinned. A tool that is not there any more, and cannot come, runs nothing."""
    for name, rule in pinned.get("tools", {}).items():
        tool = tools.get(name)
        if tool is None and may_have_more:
            now = "a toolset may return one here that asks less"
            yield _Weaker(above + name, f"the tool {above + name!r} needs {_rule_text(rule)} there, and {now}")
        if tool is not None and not _is_as_strict_rule(rule, tool.requires_approval):
            yield _Weaker(above + name, f"the tool {above + name!r} {_text(rule, _pin_rule(tool.requires_approval))}")
    has = set(_closed_hooks(hooks))
    for name, code in pinned.get("hooks", {}).items():
        if (name, code) not in has:
            changed = "has other code here" if any(each == name for each, _ in has) else "is missing here"
            yield _Weaker(above + name, f"the hook {above + name!r} {changed}")
    for name, below in pinned.get("agents", {}).items():
        if (tool := tools.get(name)) is None:
            if may_have_more:
                yield _Weaker(above + name, f"the sub-agent {above + name!r} may come from a toolset here")
            continue
        if (delegate := tool.delegate) is None:
            yield _Weaker(
                above + name, f"the tool {above + name!r} is not a sub-agent here, whose calls would be asked about"
            )
            continue
        own = [_pin_policy(policy) for policy in policies_of(delegate.hooks)]
        if any(each not in own for each in below.get("permissions", ())):
            yield _Weaker(above + name, f"the sub-agent {above + name!r} has other permission rules here")
        toolsets = tuple(filter(is_open, delegate.toolsets))
        yield from _weaker(below, delegate.tools, delegate.hooks, f"{above}{name}/", may_have_more=bool(toolsets))
        for each in toolsets if "toolsets" in below else ():
            if not any(map(partial(_chooses_as_pinned, each), below["toolsets"])):
                path = f"{above}{name}/{code_name(chooser_of(each))}"
                yield _Weaker(path, f"the toolset {path!r} is new here, or has other code or tools")


def _chooses_as_pinned(toolset: Toolset[Any], pinned: Pinned) -> bool:
    """Whether a toolset has the code of a pinned one, and holds tools that ask as much."""
    now = _pin_toolset(toolset)
    same = (now["name"], now["code"]) == (pinned.get("name"), pinned.get("code"))
    return same and not any(_weaker(pinned, _tools_held_by(toolset), {}))


def _is_as_strict_rule(pinned: Any, rule: ApprovalRequirement) -> bool:
    """Whether a rule asks for all that a pinned one asks for; a function that is not the pinned one is not known to."""
    code = cast("dict[str, Any]", pinned).get("code") if isinstance(pinned, dict) else None
    if not isinstance(rule, (bool, Approval)):
        return code == _code_of(rule)
    if rule is False:
        return False
    return pinned is True or (_covers(rule, pinned) if code is None else "returns" in pinned)


def _covers(rule: bool | Approval, pinned: Any) -> bool:
    try:
        wanted = _APPROVAL.validate_python(pinned)
    except (ValidationError, ConfigurationError):  # written by a later release: what it asks for is not known
        return False
    if not isinstance(rule, Approval):
        return not wanted.asks_who
    may_answer = {*wanted.roles, *wanted.escalate_to}
    later_only = set(rule.escalate_to) - set(wanted.roles)
    return (
        rule.n >= wanted.n
        and rule.not_requester >= wanted.not_requester
        and (not wanted.roles or (bool(rule.roles) and set(rule.roles) <= set(wanted.roles)))
        and (not wanted.roles or set(rule.escalate_to) <= may_answer)
        and (not later_only or not wanted.roles or (rule.escalate_after_s or 0) >= (wanted.escalate_after_s or 0))
    )


def _text(pinned: Any, now: Any) -> str:
    return f"needs {_rule_text(pinned)} there, and {_rule_text(now)} here"


def _rule_text(rule: Any) -> str:
    if isinstance(rule, bool):
        return "an approval" if rule else "none"
    if "function" in rule:
        return f"an approval where {rule['function']} ({rule['code'][:12]}) says so"
    return f"Approval({', '.join(f'{name}={value!r}' for name, value in rule.items())})"
