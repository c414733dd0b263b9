"""Checks that a suspended run can continue with an agent and with a person's reply; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from agentfsm.errors import HumanReplyError, SuspensionGuardrailsError, SuspensionRulesError, SuspensionToolError
from agentfsm.loop.extension import check_extension
from agentfsm.loop.history import history_too_long
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import ToolCall
from agentfsm.loop.quorum import Approval
from agentfsm.loop.state import RunState
from agentfsm.loop.state_json import FORMER_BEHAVIOR
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import EffectSpec, Exhausted
from agentfsm.machine.graph import State
from agentfsm.runtime.approval import shown_arguments
from agentfsm.runtime.compaction import compact_history, summary_failed
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.event_filter import WITHHELD
from agentfsm.runtime.hooks import DenyCall, HookContext
from agentfsm.runtime.run_request import require_extension
from agentfsm.runtime.subruns import calling_run
from agentfsm.runtime.tools import Tool, describe_validation_error

_GRANTING_REPLIES = frozenset({"allow", "edit", "did_not_run"})
"""The kinds of replies after which a call runs."""


def check_agent(config: AgentConfig, state: RunState, pinned: Mapping[str, Any]) -> None:
    """Check that an agent has the rules and the limits of a run that it resumes.

    A sub-agent's limits are what its caller had left, and follow from the caller. What an earlier release did not
    write, and what follows from that (``FORMER_BEHAVIOR``), is not compared: such a run continues as it began.

    Raises:
        SuspensionRulesError: Its preset has other switches.
        SuspensionGuardrailsError: It has other limits.
    """
    pinned_rules = {
        name: value for name, value in pinned.get("rules", {}).items() if FORMER_BEHAVIOR.get(name) != value
    }
    rules = _differences(pinned_rules, config.behavior.model_dump(mode="json"))
    if rules:
        raise SuspensionRulesError(
            f"run {state.run_id!r} has another preset than this agent ({rules}): resume it with an agent that has the "
            "preset under which it was suspended; nothing was changed"
        )
    limits = {name: value for name, value in pinned.get("guardrails", {}).items() if name != "validity_s"}
    if state.parent is None and (other := _differences(limits, config.guardrails.model_dump(mode="json"))):
        raise SuspensionGuardrailsError(
            f"run {state.run_id!r} has other guardrails than this agent ({other}): resume it with an agent that has "
            "the guardrails under which it was suspended; nothing was changed"
        )


def _differences(pinned: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields with other values, as text; empty if there are none."""
    return ", ".join(
        f"{name}: {value!r} there, {now.get(name)!r} here" for name, value in pinned.items() if now.get(name) != value
    )


async def check_reply(config: AgentConfig, state: RunState, reply: HumanReply, deps: Any = None) -> None:
    """Check that a suspended run can continue with a person's reply; nothing is changed.

    Raises:
        SuspensionToolError: A call would run, and its tool is missing or is not the one that the person was shown.
        HumanReplyError: An edit is not valid for the tool, or a permission policy denies it; or a limit cannot be
            extended by the amount that the reply names, or where the run waits.
        SuspensionRecordError: It is for a sub-agent's run, which cannot continue.
    """
    request = state.pending_request
    if request is None:
        return
    require_extension(config.machine, state, reply)
    if request.asker:
        await _check_reply_to_subagent(config, state, request, reply, deps)
    elif reply.kind == "extend":
        check_extension(state, reply, config.guardrails)
    elif reply.kind in _GRANTING_REPLIES:
        tool = _tool_as_shown(config, state, request)
        if reply.kind == "edit":
            _check_edit(config, state, request, tool, reply)


async def _check_reply_to_subagent(
    config: AgentConfig, state: RunState, request: PendingRequest, reply: HumanReply, deps: Any
) -> None:
    call_state = next((each for each in state.batch if each.call.id == request.call_id), None)
    if call_state is None or call_state.held is None:
        return
    tool = config.tools.get(call_state.call.name)
    if tool is not None and tool.asks:
        _tool_as_shown(config, state, request)
        return
    if tool is None or tool.delegate is None:
        raise _missing_tool(config, state, call_state.call.name, "sub-agent")
    await tool.delegate.check_reply(replace(calling_run(config, state), deps=deps), call_state.held, reply)


def _tool_as_shown(config: AgentConfig, state: RunState, request: PendingRequest) -> Tool:
    tool = config.tools.get(request.tool)
    if tool is None:
        raise _missing_tool(config, state, request.tool, "tool")
    if request.tool_digest and request.tool_digest != tool.digest:
        raise SuspensionToolError(
            f"run {state.run_id!r} waits for a reply about the tool {tool.name!r} with the digest "
            f"{request.tool_digest[:12]}, and the agent's {tool.name!r} has the digest {tool.digest[:12]}: its "
            "description, its schema, its function or its server's definition is another. Resume the run with an agent "
            "that has the tool as it was shown, or reply with Deny(reason); nothing was changed"
        )
    return tool


def _missing_tool(config: AgentConfig, state: RunState, name: str, what: str) -> SuspensionToolError:
    has = ", ".join(sorted(config.tools)) or "none"
    return SuspensionToolError(
        f"run {state.run_id!r} waits for a reply about a call of the {what} {name!r}, which this agent does not have "
        f"(it has: {has}): resume the run with an agent that has it; nothing was changed"
    )


def _check_edit(config: AgentConfig, state: RunState, request: PendingRequest, tool: Tool, reply: HumanReply) -> None:
    """Refuse an edit that does not validate, or that a permission policy denies."""
    call = ToolCall(request.call_id or "", tool.name, reply.arguments)
    withholder = config.open_withholder().with_mask(WITHHELD)  # others may read why, too
    withholder.add_arguments(tool.name, call.arguments)
    try:
        shown = shown_arguments(tool, call, tool.arguments(call.arguments))
    except Exception as error:  # a validator of the tool's types may raise anything
        raise HumanReplyError(
            f"the edited arguments are not valid for {tool.name!r}, and the run still waits: "
            f"{withholder.clean_text(describe_validation_error(error))}"
        ) from error
    for policy in calling_run(config, state).permissions:
        decision = policy(HookContext(State.DISPATCH_TOOL, state.view(), call, tool, shown))
        if isinstance(decision, DenyCall):
            reason = withholder.clean_text(decision.reason)
            raise HumanReplyError(
                f"the edited arguments of {tool.name!r} are denied, and the run still waits: {reason}"
            )


def may_read_messages(config: AgentConfig) -> bool:
    """Whether user functions may look at the transcript of a run: then all of it has to be there."""
    graph = config.machine.graph
    return (
        not all(row.guard is None or _is_our_guard(row.guard) for row in graph)
        or not all(spec.effect is None or _is_ours(spec.effect) for spec in graph.states)
        or not type(config.policy).__module__.startswith("agentfsm.")
        or bool(config.hooks or config.toolsets or config.output_validators or config.memory)
        or any(map(_sees_messages, config.tools.values()))
    )


_GUARDS = BUILT_IN_GUARDS | {history_too_long, summary_failed}
"""Guards that read no messages but those that the next request needs."""


def _is_our_guard(guard: object) -> bool:
    """Whether a guard is one of the library's."""
    return guard in _GUARDS or (isinstance(guard, Exhausted) and guard.__module__.startswith("agentfsm."))


def _is_ours(effect: object) -> bool:
    """Whether an effect is one of the library's."""
    return isinstance(effect, EffectSpec) or (isinstance(effect, partial) and effect.func is compact_history)


def _sees_messages(tool: Tool) -> bool:
    """Whether a tool, or what decides about its calls, may look at the transcript."""
    decides = not isinstance(tool.requires_approval, bool | Approval)
    return decides or tool.takes_context or tool.asks or tool.has_secrets or tool.delegate is not None
