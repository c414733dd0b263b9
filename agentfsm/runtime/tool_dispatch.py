"""Tool dispatch: the effect of ``dispatch_tool``, which decides which calls of a batch run, in what order or in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic_core import to_json

from agentfsm.loop import prompts
from agentfsm.loop.events import ToolFinished, ToolStarted
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import ToolCall, ToolResult, Usage, is_secret_placeholder
from agentfsm.loop.outcomes import CallBlocked, Outcome, ToolsRan
from agentfsm.loop.state import CallState, PendingRequest, RunState, SuspendedSubRun
from agentfsm.runtime.approval import check_approval
from agentfsm.runtime.context import Context, Timeout
from agentfsm.runtime.tool_execution import failed_result, run_call, validate_call
from agentfsm.runtime.tools import BudgetShare, Delegation, Tool, ToolContext, describe_validation_error

__all__ = ["run_calls"]

_FULL_SHARE = BudgetShare()


async def run_calls(context: Context) -> Outcome:
    """Run the next call, or all that are left where all may run together; or say who must be asked."""
    due = _runnable_calls(context)
    known = {r.call_id: r for r in context.completed_results}  # calls that had ended when another process was cut off
    context.completed_results.clear()
    context.suspended_subruns.clear()
    if context.run.backoff_s:
        context.recorder.push()
        await context.config.host.clock.sleep(context.run.backoff_s)
    ready: list[tuple[CallState, Tool, dict[str, Any]]] = []
    for result in known.values():  # first of all: a call that must wait must not lose what others came to
        _complete_call(context, result)
    for entry in due:
        if entry.call.id in known:
            continue
        if entry.denied is not None:
            _complete_call(context, ToolResult(entry.call.id, entry.call.name, entry.denied, status="denied"))
            continue
        if (lost := _missing_secrets_request(entry.call, context.config.tools)) is not None:
            return CallBlocked(lost, tuple(context.completed_results))
        checked = validate_call(entry.call, context.config.tools)
        if isinstance(checked, ToolResult):
            _complete_call(context, checked)
            continue
        tool, arguments = checked
        if entry.started and not _repeatable(context, tool):
            return CallBlocked(_in_doubt_request(entry.call), tuple(context.completed_results))
        if entry.held is not None:  # the gates were asked before it began
            if entry.answer is None:
                return CallBlocked(entry.held.waiting, tuple(context.completed_results))
            ready.append((entry, tool, arguments))
            continue
        verdict = await check_approval(context, entry, tool, arguments)
        if isinstance(verdict, PendingRequest):
            return CallBlocked(verdict, tuple(context.completed_results))
        if isinstance(verdict, ToolResult):
            _complete_call(context, verdict)
        else:
            ready.append((entry, tool, arguments))
    attempts = _record_intents(context, ready)
    if context.recorder.sink is not None:  # one commit for all that run together
        await context.recorder.commit()
    if len(ready) == 1:
        await _run_one(context, *ready[0], attempts[0], _budget_share(context, ready), timeout=context.timeout)
    elif ready:
        await _run_parallel(context, ready, attempts)
    results = tuple(context.completed_results)
    if len(due) > 1:
        by_id = {r.call_id: r for r in results}
        results = tuple(by_id[e.call.id] for e in due if e.call.id in by_id)
    if not context.suspended_subruns:
        return ToolsRan(results)
    held = tuple(context.suspended_subruns[e.call.id] for e in due if e.call.id in context.suspended_subruns)
    return CallBlocked(held[0].waiting, results, held)


def _runnable_calls(context: Context) -> list[CallState]:
    batch = context.run.batch
    pending = [c for c in batch if c.result is None]
    if len(pending) < 2:
        return pending
    tools = context.config.tools
    together = all(c.call.name in tools and tools[c.call.name].parallel for c in pending)
    return pending if together else pending[:1]


def _missing_secrets_request(call: ToolCall, tools: Mapping[str, Tool]) -> PendingRequest | None:
    """What a person is asked where a run was taken up from a journal, which holds no secrets."""
    tool = tools.get(call.name)
    if tool is None or not tool.secret:
        return None
    lost = sorted(name for name in tool.secret if is_secret_placeholder(call.arguments.get(name)))
    if not lost:
        return None
    return PendingRequest(
        "approval",
        f"The call of {call.name!r} needs {', '.join(lost)}, which no journal keeps. Reply with Edit(arguments), "
        "all of them, or with Deny(reason).",
        call_id=call.id,
        tool=call.name,
        arguments=call.arguments,
    )


def _in_doubt_request(call: ToolCall) -> PendingRequest:
    return PendingRequest(
        "in_doubt",
        f"The call of {call.name!r} was cut off, and nobody knows whether it ran. Did it?",
        call_id=call.id,
        tool=call.name,
        arguments=call.arguments,
    )


def _effect_id(run: RunState, call_state: CallState) -> str:
    """The id of a call's effect: which reply asked for it, and where it stands there."""
    batch = run.batch
    place = 0 if batch[0] is call_state else next(i for i, c in enumerate(batch) if c is call_state)
    return f"{run.model_calls}.{place}"


def _repeatable(context: Context, tool: Tool) -> bool:
    """Whether a call that was cut off may be made again: a sub-agent goes on where its own journal ends."""
    return tool.idempotent or (tool.delegate is not None and context.config.host.store is not None)


def _record_intents(context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]]) -> list[int]:
    """Say which tools are about to run.

    Returns:
        Which attempt each of them is, from 1.
    """
    recorder = context.recorder
    attempts: list[int] = []
    for entry, tool, _ in ready:
        if tool.control is not None:  # the loop's own tools touch nothing
            attempts.append(1)
        else:
            again = "again" if _repeatable(context, tool) else "once"
            attempts.append(recorder.record_intent(_effect_id(context.run, entry), tool.name, again))
    return attempts


def _budget_share(context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]]) -> BudgetShare:
    """What each sub-agent of those that are about to run may have of what is left."""
    among = 0
    for _, tool, _ in ready:  # asked in every step: a generator costs more than the question
        among += tool.delegate is not None
    if not among:
        return _FULL_SHARE
    return BudgetShare(among, sum((r.usage for r in context.completed_results if r.usage is not None), Usage()))


async def _run_parallel(
    context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]], attempts: list[int]
) -> None:
    """Run calls side by side, each with a time limit of its own.

    Raises:
        BaseException: What the first of them raised that is no result; the others were cut off then.
    """
    share = _budget_share(context, ready)
    limiters = [Timeout() for _ in ready]
    try:
        async with asyncio.TaskGroup() as group:
            for one, attempt, limiter in zip(ready, attempts, limiters, strict=True):
                group.create_task(_run_one(context, *one, attempt, share, timeout=limiter))
    except BaseExceptionGroup as errors:  # as one call alone would raise it
        raise errors.exceptions[0] from None
    finally:
        for limiter in limiters:
            limiter.close()


async def _run_one(
    context: Context,
    call_state: CallState,
    tool: Tool,
    arguments: dict[str, Any],
    attempt: int,
    share: BudgetShare,
    *,
    timeout: Timeout,
) -> None:
    run = context.run
    call_state.started = True  # the one thing noted in front: cut off from here on, the call is in doubt
    if context.builds_events:
        context.emit(ToolStarted, call=call_state.call)
    seen = _tool_context(run, call_state, attempt) if tool.takes_context else None
    limit = timeout.start(tool.timeout or run.guardrails.tool_timeout_s)
    if tool.delegate is None:
        result = cast("ToolResult", await run_call(call_state.call, tool, arguments, seen, limit))
    else:
        came = await _delegate(
            context,
            call_state,
            tool,
            arguments,
            limit,
            tool.delegate(run, context.config.host, call_state, attempt, share),
        )
        if isinstance(came, SuspendedSubRun):
            context.suspended_subruns[call_state.call.id] = came
            return
        result = came
    if result.ending == "done":
        result = _validate_output(context, call_state.call, result)
    if tool.control is None:
        context.recorder.record_result(_effect_id(run, call_state), result)
        if timeout is not context.timeout:  # others of the batch still run: do not wait for them to keep this one
            context.recorder.push()
    _complete_call(context, result)


async def _delegate(
    context: Context,
    call_state: CallState,
    tool: Tool,
    arguments: dict[str, Any],
    timeout: Timeout,
    delegation: Delegation,
) -> ToolResult | SuspendedSubRun:
    """What came of a call that another run answers, with what that run has used up; also where it is cut off."""
    call = call_state.call
    try:
        came = await run_call(call, tool, arguments, None, timeout, delegation)
    except asyncio.CancelledError:
        cut = ToolResult(call.id, call.name, prompts.NOT_RUN_TEXTS["cancelled"], "cut_off")
        context.completed_results.append(replace(cut, run_id=delegation.run_id, usage=delegation.usage))
        raise
    return (
        came if isinstance(came, SuspendedSubRun) else replace(came, run_id=delegation.run_id, usage=delegation.usage)
    )


def _validate_output(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run, or why its value is not the output that the agent promises."""
    adapter = context.config.output_adapter
    if adapter is None:
        return result
    try:
        adapter.validate_json(to_json(result.value))
    except Exception as error:  # also out of a validator of the type's
        text = f"its result does not have the required form ({describe_validation_error(error)})"
        return failed_result(call, FailureKind.tool_error, text, type(error).__name__)
    return result


def _tool_context(run: RunState, call_state: CallState, attempt: int) -> ToolContext:
    key = f"{run.run_id}:{_effect_id(run, call_state)}"
    return ToolContext(run.run_id, run.session_id, call_state.call.id, key, attempt)


def _complete_call(context: Context, result: ToolResult) -> None:
    context.completed_results.append(result)
    if context.builds_events:
        context.emit(ToolFinished, result=result)
