"""The effect of ``dispatch_tool``: which calls run next, who must be asked first, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic_core import to_json

from agentfsm.core import wording
from agentfsm.core.events import ToolFinished, ToolStarted
from agentfsm.core.failures import FailureKind
from agentfsm.core.messages import ToolCall, ToolResult, Usage
from agentfsm.core.outcomes import Outcome, Parked, Ran
from agentfsm.core.state import CallState, Held, RunState, Waiting
from agentfsm.core.withheld import is_withheld
from agentfsm.runtime.calls import check_call, failed, run_call
from agentfsm.runtime.context import Context
from agentfsm.runtime.gates import ask_gates
from agentfsm.runtime.tools import Delegation, Share, Tool, ToolContext, unfit
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["run_calls"]

_WHOLE = Share()


async def run_calls(context: Context) -> Outcome:
    """Run the next call, or all that are left where all may run together; or say who must be asked."""
    due = _due(context)
    known = {r.call_id: r for r in context.finished}  # calls that had ended when another process was cut off
    context.finished.clear()
    context.held.clear()
    if context.run.backoff_s:
        context.recorder.push()
        await context.parts.host.clock.sleep(context.run.backoff_s)
    ready: list[tuple[CallState, Tool, dict[str, Any]]] = []
    for result in known.values():  # first of all: a call that must wait must not lose what others came to
        _finish(context, result)
    for entry in due:
        if entry.call.id in known:
            continue
        if entry.denied is not None:
            _finish(context, ToolResult(entry.call.id, entry.call.name, entry.denied, status="denied"))
            continue
        if (lost := _lost_secrets(entry.call, context.parts.tools)) is not None:
            return Parked(lost, tuple(context.finished))
        checked = check_call(entry.call, context.parts.tools)
        if isinstance(checked, ToolResult):
            _finish(context, checked)
            continue
        tool, arguments = checked
        if entry.started and not _repeatable(context, tool):
            return Parked(_doubt(entry.call), tuple(context.finished))
        if entry.held is not None:  # the gates were asked before it began
            if entry.answer is None:
                return Parked(entry.held.waiting, tuple(context.finished))
            ready.append((entry, tool, arguments))
            continue
        verdict = await ask_gates(context, entry, tool, arguments)
        if isinstance(verdict, Waiting):
            return Parked(verdict, tuple(context.finished))
        if isinstance(verdict, ToolResult):
            _finish(context, verdict)
        else:
            ready.append((entry, tool, arguments))
    attempts = _write_down(context, ready)
    if context.recorder.keeper is not None:  # one commit for all that run together
        await context.recorder.commit()
    if len(ready) == 1:
        await _run_one(context, *ready[0], attempts[0], _share(context, ready), limiter=context.watchdog)
    elif ready:
        await _run_together(context, ready, attempts)
    results = tuple(context.finished)
    if len(due) > 1:
        by_id = {r.call_id: r for r in results}
        results = tuple(by_id[e.call.id] for e in due if e.call.id in by_id)
    if not context.held:
        return Ran(results)
    held = tuple(context.held[e.call.id] for e in due if e.call.id in context.held)
    return Parked(held[0].waiting, results, held)


def _due(context: Context) -> list[CallState]:
    batch = context.run.batch
    pending = [c for c in batch if c.result is None]
    if len(pending) < 2:
        return pending
    tools = context.parts.tools
    together = all(c.call.name in tools and tools[c.call.name].parallel for c in pending)
    return pending if together else pending[:1]


def _lost_secrets(call: ToolCall, tools: Mapping[str, Tool]) -> Waiting | None:
    """What a person is asked where a run was taken up from a journal, which holds no secrets."""
    tool = tools.get(call.name)
    if tool is None or not tool.secret:
        return None
    lost = sorted(name for name in tool.secret if is_withheld(call.arguments.get(name)))
    if not lost:
        return None
    return Waiting(
        "approval",
        f"The call of {call.name!r} needs {', '.join(lost)}, which no journal keeps. Reply with Edit(arguments), "
        "all of them, or with Deny(reason).",
        call_id=call.id,
        tool=call.name,
        arguments=call.arguments,
    )


def _doubt(call: ToolCall) -> Waiting:
    return Waiting(
        "in_doubt",
        f"The call of {call.name!r} was cut off, and nobody knows whether it ran. Did it?",
        call_id=call.id,
        tool=call.name,
        arguments=call.arguments,
    )


def _eid(run: RunState, entry: CallState) -> str:
    """The id of a call's effect: which reply asked for it, and where it stands there."""
    batch = run.batch
    place = 0 if batch[0] is entry else next(i for i, c in enumerate(batch) if c is entry)
    return f"{run.model_calls}.{place}"


def _repeatable(context: Context, tool: Tool) -> bool:
    """Whether a call that was cut off may be made again: a sub-agent goes on where its own journal ends."""
    return tool.idempotent or (tool.delegate is not None and context.parts.host.store is not None)


def _write_down(context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]]) -> list[int]:
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
            attempts.append(recorder.intend(_eid(context.run, entry), tool.name, again))
    return attempts


def _share(context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]]) -> Share:
    """What each sub-agent of those that are about to run may have of what is left."""
    among = 0
    for _, tool, _ in ready:  # asked in every step: a generator costs more than the question
        among += tool.delegate is not None
    if not among:
        return _WHOLE
    return Share(among, sum((r.usage for r in context.finished if r.usage is not None), Usage()))


async def _run_together(
    context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]], attempts: list[int]
) -> None:
    """Run calls side by side, each with a time limit of its own.

    Raises:
        BaseException: What the first of them raised that is no result; the others were cut off then.
    """
    share = _share(context, ready)
    limiters = [Watchdog() for _ in ready]
    try:
        async with asyncio.TaskGroup() as group:
            for one, attempt, limiter in zip(ready, attempts, limiters, strict=True):
                group.create_task(_run_one(context, *one, attempt, share, limiter=limiter))
    except BaseExceptionGroup as errors:  # as one call alone would raise it
        raise errors.exceptions[0] from None
    finally:
        for limiter in limiters:
            limiter.close()


async def _run_one(
    context: Context,
    entry: CallState,
    tool: Tool,
    arguments: dict[str, Any],
    attempt: int,
    share: Share,
    *,
    limiter: Watchdog,
) -> None:
    run = context.run
    entry.started = True  # the one thing noted in front: cut off from here on, the call is in doubt
    if context.heard:
        context.emit(ToolStarted, call=entry.call)
    seen = _tool_context(run, entry, attempt) if tool.takes_context else None
    limit = limiter.limit(tool.timeout or run.guardrails.tool_timeout_s)
    if tool.delegate is None:
        result = cast("ToolResult", await run_call(entry.call, tool, arguments, seen, limit))
    else:
        came = await _delegate(context, entry, tool, arguments, limit, tool.delegate(context, entry, attempt, share))
        if isinstance(came, Held):
            context.held[entry.call.id] = came
            return
        result = came
    if result.ending == "done":
        result = _checked_output(context, entry.call, result)
    if tool.control is None:
        context.recorder.ended(_eid(run, entry), result)
        if limiter is not context.watchdog:  # others of the batch still run: do not wait for them to keep this one
            context.recorder.push()
    _finish(context, result)


async def _delegate(
    context: Context,
    entry: CallState,
    tool: Tool,
    arguments: dict[str, Any],
    limit: Watchdog,
    delegation: Delegation,
) -> ToolResult | Held:
    """What came of a call that another run answers, with what that run has used up; also where it is cut off."""
    call = entry.call
    try:
        came = await run_call(call, tool, arguments, None, limit, delegation)
    except asyncio.CancelledError:
        cut = ToolResult(call.id, call.name, wording.NOT_RUN["cancelled"], "cut_off")
        context.finished.append(replace(cut, run_id=delegation.run_id, usage=delegation.usage))
        raise
    return came if isinstance(came, Held) else replace(came, run_id=delegation.run_id, usage=delegation.usage)


def _checked_output(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run, or why its value is not the output that the agent promises."""
    adapter = context.parts.output
    if adapter is None:
        return result
    try:
        adapter.validate_json(to_json(result.value))
    except Exception as error:  # also out of a validator of the type's
        text = f"its result does not have the required form ({unfit(error)})"
        return failed(call, FailureKind.tool_error, text, type(error).__name__)
    return result


def _tool_context(run: RunState, entry: CallState, attempt: int) -> ToolContext:
    key = f"{run.run_id}:{_eid(run, entry)}"
    return ToolContext(run.run_id, run.session_id, entry.call.id, key, attempt)


def _finish(context: Context, result: ToolResult) -> None:
    context.finished.append(result)
    if context.heard:
        context.emit(ToolFinished, result=result)
