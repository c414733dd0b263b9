"""The runs of sub-agents that a run calls: what they are given, what it is charged for, and how they end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from agentfsm.errors import AgentfsmError
from agentfsm.loop import prompts
from agentfsm.loop.human_input import SuspendedSubRun
from agentfsm.loop.messages import ToolCall, ToolResult, Usage
from agentfsm.loop.state import CallState, RunState
from agentfsm.runtime.context import AgentConfig, Context
from agentfsm.runtime.delegation import BudgetShare, CallingRun, Delegation, run_id_for_call
from agentfsm.runtime.permissions import policies_of
from agentfsm.runtime.timeout import Timeout
from agentfsm.runtime.tool_channel import CallChannel
from agentfsm.runtime.tool_execution import run_delegation
from agentfsm.runtime.tools import Tool, run_secrets

FULL_SHARE = BudgetShare()
"""The share of a sub-agent that runs alone, while no other call of the batch has used anything."""


def open_subruns(context: Context) -> list[tuple[Tool, str]]:
    """The runs of sub-agents that may not have ended, and that nobody continues if the calling run ends now.

    They are those of calls without a result that wait for a person, or that a crash has cut off.
    """
    run, config = context.run, context.config
    if config.host.store is None:  # they are in the calling run's record
        return []
    calls = ((config.tools.get(each.call.name), each) for each in run.batch if each.result is None)
    return [
        (tool, each.held.run_id if each.held is not None else run_id_for_call(run, each))
        for tool, each in calls
        if tool is not None and tool.delegate is not None and tool.delegate.is_agent
    ]


async def dismiss_subruns(context: Context, subruns: Iterable[tuple[Tool, str]], *, resumed: bool) -> None:
    """End the runs that a run called, because it ends. What cannot be ended is left, with a warning.

    ``resumed`` is whether other processes have run it, too, and may have left more of them.
    """
    caller, reason = calling_run(context.config, context.run), f"run {context.run.run_id!r}, which called it, has ended"
    for tool, run_id in subruns:
        if tool.delegate is None:
            continue
        try:
            await tool.delegate.dismiss(caller, run_id, reason)
        except AgentfsmError as error:
            context.warn(f"run {run_id!r} of the sub-agent {tool.name!r} was not ended: {error}")
    if resumed:
        await _dismiss_left(context, caller, reason)


async def _dismiss_left(context: Context, caller: CallingRun, reason: str) -> None:
    """End the runs of a process that died, whose calls were denied or settled since, or not asked for again."""
    errors: dict[str, AgentfsmError] = {}
    for tool in context.config.tools.values():
        if tool.delegate is None:
            continue
        for run_id in await tool.delegate.left_runs(caller):
            try:
                await tool.delegate.dismiss(caller, run_id, reason)
                errors.pop(run_id, None)
            except AgentfsmError as error:  # another tool may have begun it
                errors[run_id] = error
    for run_id, why in errors.items():
        context.warn(f"run {run_id!r} was not ended: {why}")


def calling_run(config: AgentConfig, run: RunState) -> CallingRun:
    """A run as a sub-agent's caller, with the permission policies that bind the sub-agent, too."""
    return CallingRun(
        run, config.host, FULL_SHARE, permissions=policies_of(config.hooks), secrets=run_secrets(run, config.tools)
    )


def live_calling_run(context: Context, call: ToolCall, share: BudgetShare, channel: CallChannel | None) -> CallingRun:
    """A run as a sub-agent's caller, while it makes a call."""
    caller = calling_run(context.config, context.run)
    if channel is not None:
        caller = replace(caller, progress=channel.progress)
    on_event = partial(context.emit_subagent, call) if context.has_listeners else None
    uncharged_s, deps = context.uncharged_s, context.deps
    on_run = partial(_add_subrun, context)
    return replace(caller, share=share, uncharged_s=uncharged_s, on_event=on_event, on_run=on_run, deps=deps)


def _add_subrun(context: Context, subrun: Any) -> None:
    """Note the run of a sub-agent that is about to begin: it is handed over with the run that calls it.

    Raises:
        StoreError: The calling run was handed over, or its journal cannot be written.
        JournalError: An entry of its journal cannot be written as JSON.
    """
    sink = context.recorder.sink
    if sink is not None and (error := sink.error) is not None:
        raise error
    if context.subruns is None:
        context.subruns = WeakSet()
    context.subruns.add(subrun)


def budget_share(context: Context, shared_by: int) -> BudgetShare:
    """The share of the remaining budget for each of some sub-agents that are about to run."""
    ended = [r for r in context.completed_results if r.usage is not None]
    usage = sum((r.usage for r in ended if r.usage is not None), Usage())
    return BudgetShare(shared_by, usage, sum(r.model_calls for r in ended))


async def delegate_call(
    context: Context,
    call_state: CallState,
    tool: Tool,
    arguments: dict[str, Any],
    limit_s: float,
    delegation: Delegation,
    channel: CallChannel | None,
) -> ToolResult | SuspendedSubRun:
    """The result of a call that a sub-agent's run answers, with that run's usage, even if it is cancelled."""
    call = call_state.call
    timer = Timeout(grace_s=None)  # everything that its run awaits has a limit and a grace of its own
    context.running_calls[call.id] = timer
    try:
        answer = await run_delegation(call, tool, arguments, delegation, timer, limit_s)
    except asyncio.CancelledError:
        cancelled = ToolResult(call.id, call.name, prompts.NOT_RUN_TEXTS["cancelled"], "cut_off")
        context.completed_results.append(_charged(context, cancelled, delegation))
        raise
    finally:
        del context.running_calls[call.id]
        timer.close()
        if channel is not None:
            channel.close()
    if isinstance(answer, SuspendedSubRun):
        context.model_requests += answer.model_calls
        return answer
    return _charged(context, answer, delegation)


def _charged(context: Context, result: ToolResult, delegation: Delegation) -> ToolResult:
    """A sub-agent's result with what its run used."""
    context.model_requests += delegation.model_calls
    return replace(
        result,
        run_id=delegation.run_id,
        usage=delegation.usage,
        model_calls=delegation.model_calls,
        withheld=delegation.secrets,
    )
