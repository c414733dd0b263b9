"""Tool dispatch: the effect of ``dispatch_tool``, which decides which calls of a batch run, in order or in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from agentfsm.loop import prompts
from agentfsm.loop.detectors import cost_limit, time_limit, token_limit
from agentfsm.loop.events import ToolFinished, ToolStarted
from agentfsm.loop.failures import Failure
from agentfsm.loop.human_input import PendingRequest, SuspendedSubRun
from agentfsm.loop.messages import NO_USAGE, ToolCall, ToolResult
from agentfsm.loop.outcomes import CallBlocked, Outcome, ToolsRan
from agentfsm.loop.state import CallState
from agentfsm.runtime.approval import check_approval, check_without_approval, is_repeatable, require_row
from agentfsm.runtime.context import Context
from agentfsm.runtime.delegation import BudgetShare
from agentfsm.runtime.output_validators import validate_ending
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.subruns import FULL_SHARE, budget_share, delegate_call, live_calling_run
from agentfsm.runtime.timeout import CancelRequests, Timeout
from agentfsm.runtime.tool_channel import CallChannel, ToolWaits
from agentfsm.runtime.tool_execution import cut_result, run_call
from agentfsm.runtime.tools import Tool, call_secrets

T = TypeVar("T")

_NONE: frozenset[str] = frozenset()

_ReadyCall = tuple[str, CallState, Tool, dict[str, Any]]
"""The id of a call's effect, the call, its tool and its validated arguments."""


CALLS_STARTED_TOGETHER = 32
"""How many parallel calls are started before the event loop may run anything else."""


async def run_calls(context: Context) -> Outcome:
    """Run the next call, or all remaining calls if they may run in parallel; or say what a human must decide first."""
    run, config = context.run, context.config
    due = _runnable_calls(context)
    if run.first_pending and (limit := _limit_between_calls(context, due)) is not None:
        return _skip_rest(context, limit)
    earlier = _repeat_results(context) if context.completed_results else _NONE
    if context.suspended_subruns:
        context.suspended_subruns.clear()
    ready: list[_ReadyCall] = []
    several, began = len(due) > 1, config.host.clock.time()
    for index, call_state in due:
        if earlier and call_state.call.id in earlier:
            continue
        if several:  # before a single call the driver has yielded
            await context.yield_if_due()
        checked = check_without_approval(context, call_state)
        if type(checked) is tuple and (checked[0].requires_approval is not False or config.hooks):
            checked = await check_approval(context, call_state, *checked) or checked
        if type(checked) is tuple:
            tool, arguments = checked
            effect_id = f"{run.turns}.{index}"  # the number of the model call that requested it, and its index there
            ready.append((effect_id, call_state, tool, arguments))
        elif isinstance(checked, PendingRequest):
            require_row(context, checked)
            results = tuple(context.completed_results)
            if call_state.held is None or not several:
                return CallBlocked(checked, results)
            held = _shown_now(context, call_state.held, began)  # until now, another call was asked about
            return CallBlocked(held.waiting, results, (replace(held, usage=NO_USAGE, model_calls=0),))  # charged before
        elif isinstance(checked, ToolResult):
            _complete_call(context, checked)
    attempts: list[int] = []
    sub_agents = 0
    for effect_id, _, tool, _ in ready:
        attempts.append(_record_intent(context, effect_id, tool))
        sub_agents += tool.delegate is not None
    if context.recorder.sink is not None:  # one commit for all calls that run together
        await context.recorder.commit()
    share = budget_share(context, sub_agents) if sub_agents else FULL_SHARE
    if len(ready) == 1:
        await _run_one(context, ready[0], attempts[0], share, context.timeout)
    elif ready:
        await _run_parallel(context, ready, attempts, share)
    results = tuple(context.completed_results)
    if several:
        results = _in_order({result.call_id: result for result in results}, due)
    if not context.suspended_subruns:
        return ToolsRan(results)
    first, *others = _in_order(context.suspended_subruns, due)
    if several:
        first = _shown_now(context, first, began)
        others = [_shown_now(context, each, began) if each.shown_at else each for each in others]
    return CallBlocked(first.waiting, results, (first, *others))


def _shown_now(context: Context, held: SuspendedSubRun, began: float) -> SuspendedSubRun:
    """What waits for a person, as shown until now: its time stood still while people were asked about other calls.

    It also did while these ran, since ``began``, once all were answered.
    """
    now, quorum = context.config.host.clock.time(), held.waiting.quorum
    if quorum is not None:
        others = [each.held for each in context.run.batch if each.held is not None and each.held.run_id != held.run_id]
        hidden_since = min((each.shown_at for each in others if each.shown_at >= held.shown_at), default=began)
        asked_at = quorum.asked_at + now - hidden_since if held.shown_at else now
        held = replace(held, waiting=replace(held.waiting, quorum=replace(quorum, asked_at=asked_at)))
    return replace(held, shown_at=now)


def _in_order(by_id: Mapping[str, T], due: list[tuple[int, CallState]]) -> tuple[T, ...]:
    """What some of the calls have, in the order of the calls."""
    return tuple(by_id[each.call.id] for _, each in due if each.call.id in by_id)


def _repeat_results(context: Context) -> frozenset[str]:
    """Complete the calls that ended before the run was interrupted, and return their ids.

    They come before anything else: a call that must wait must not lose the results of others.
    """
    earlier = {r.call_id: r for r in context.completed_results}
    context.completed_results.clear()
    for result in earlier.values():
        _complete_call(context, result)
    return frozenset(earlier)


def _runnable_calls(context: Context) -> list[tuple[int, CallState]]:
    """The next call, or every call without a result if all of them may run in parallel; each with its index."""
    run = context.run
    batch, first = run.batch, run.first_pending
    if first < len(batch) and batch[first].result is not None:
        first = run.next_call
    if first == len(batch):
        return []
    is_last = first == len(batch) - 1
    if is_last or not _is_parallel(context, batch[first]) or _last_sequential(context, first) > first:
        return [(first, batch[first])]
    return [(index, batch[index]) for index in range(first, len(batch)) if batch[index].result is None]


def _is_parallel(context: Context, call_state: CallState) -> bool:
    tool = context.config.tools.get(call_state.call.name)
    return tool is not None and tool.parallel


def _last_sequential(context: Context, first: int) -> int:
    """The index of the last pending call that cannot run in parallel; one before ``first`` if there is none.

    It only ever moves towards the front of a batch, until failed calls are run again from the first: so the whole
    batch is searched once, and not once for each of its calls.
    """
    batch = context.run.batch
    searched, previous, index = context.sequential_search
    if searched is not batch or first < previous:
        index = len(batch) - 1
    while index >= first and (batch[index].result is not None or _is_parallel(context, batch[index])):
        index -= 1
    context.sequential_search = (batch, first, index)
    return index


def _limit_between_calls(context: Context, due: list[tuple[int, CallState]]) -> Failure | None:
    """The limit of the run that was reached since the first call of the batch, if a row of the graph acts on it."""
    run = context.run
    if not due or _is_decided(due[0][1]):
        return None
    left = context.time_left_s
    limits = (token_limit, cost_limit) if left is None or left > 0 else (token_limit, cost_limit, time_limit)
    for limit in limits:
        failure = limit(run)
        if failure is not None and any(row.guard is limit for row in context.config.machine.graph):
            return failure
    return None


def _is_decided(call_state: CallState) -> bool:
    """Whether a call was begun or a person has decided about it: then no limit stops it."""
    decided = call_state.approved or call_state.denied is not None or call_state.answer is not None
    return decided or call_state.started


def _skip_rest(context: Context, limit: Failure) -> ToolsRan:
    """Give every call of the batch that has no result one that says which limit was reached."""
    text = prompts.limit_reached_text(limit)
    for call_state in context.run.batch[context.run.next_call :]:
        if call_state.result is None:
            _complete_call(context, ToolResult(call_state.call.id, call_state.call.name, text, status="skipped"))
    return ToolsRan(tuple(context.completed_results))


def _record_intent(context: Context, effect_id: str, tool: Tool) -> int:
    """Record that a tool is about to run.

    Returns:
        The number of the attempt, from 1.
    """
    if tool.control is not None:  # control tools have no side effects
        return 1
    return context.recorder.record_intent(
        effect_id, tool.spec.name, "again" if is_repeatable(context, tool) else "once"
    )


async def _run_parallel(context: Context, ready: list[_ReadyCall], attempts: list[int], share: BudgetShare) -> None:
    """Run calls in parallel, each with its own timeout.

    Raises:
        BaseException: The first exception that is not a result (cancellation, a store that fails); it cancels the
            other calls.
    """
    run_task = asyncio.current_task()
    try:
        async with asyncio.TaskGroup() as group:
            for number, (call, attempt) in enumerate(zip(ready, attempts, strict=True), 1):
                requests = CancelRequests(run_task)  # now: a cancellation may come before the call begins
                group.create_task(_run_beside_others(context, call, attempt, share, requests))
                if number % CALLS_STARTED_TOGETHER == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as errors:  # as a single call would raise it
        raise errors.exceptions[0] from None


async def _run_beside_others(
    context: Context, call: _ReadyCall, attempt: int, share: BudgetShare, requests: CancelRequests
) -> None:
    timer, task = Timeout(context.timeout.grace_s), asyncio.current_task()
    requests.apply_to(task)
    try:
        await _run_one(context, call, attempt, share, timer)
    finally:
        requests.forget(task)
        timer.close()


async def _run_one(context: Context, ready: _ReadyCall, attempt: int, share: BudgetShare, timer: Timeout) -> None:
    eid, call_state, tool, arguments = ready
    run, call = context.run, call_state.call
    context.seen = None
    if run.batch_snapshot is not None:
        run.keep_views()
    call_state.started = True  # set before it runs: if it is interrupted from here on, it is in doubt
    if context.builds_events:
        context.emit(ToolStarted, call=call)
    channel = CallChannel(context, call_state, tool) if tool.takes_context else None
    tool_context = None if channel is None else tool_call_context(context, call, eid, attempt, channel)
    limit = tool.timeout or run.guardrails.tool_timeout_s
    if tool.delegate is None:
        context.running_calls[call.id] = timer
        try:
            result = await run_call(call, tool, arguments, tool_context, timer, limit)
        except (ToolWaits, BaseExceptionGroup):  # the latter of a task group in which the tool has asked
            if channel is None or channel.request is None:
                raise
            result = ToolResult(call.id, call.name, "", "skipped")  # it waits instead
        finally:
            del context.running_calls[call.id]
            if channel is not None:
                channel.close()
        if channel is not None and channel.request is not None:
            context.suspended_subruns[call.id] = channel.suspended(channel.request)
            return
    else:
        caller = live_calling_run(context, call, share, channel)
        if timer is context.timeout:  # no other call of the batch runs, which would be cut off
            caller = replace(caller, longest_wait_s=context.longest_wait_s)
        delegation = tool.delegate(caller, call_state, attempt)
        answer = await delegate_call(context, call_state, tool, arguments, limit, delegation, channel)
        if isinstance(answer, SuspendedSubRun):
            context.suspended_subruns[call.id] = answer
            return
        result = answer
    if call_state.edited:  # the transcript has the arguments that the model gave
        result = replace(result, withheld=(*result.withheld, *call_secrets(tool, call.arguments)))
    if result.ending == "done":
        result = await validate_ending(context, call, result)
    longest = tool.max_result_chars or run.guardrails.max_tool_result_chars
    if longest is not None and (len(result.content) > longest or result.failure is not None):
        result = cut_result(result, longest, context.secrets)
    if tool.control is None:
        context.recorder.record_result(eid, result)
        if timer is not context.timeout:  # other calls of the batch still run: do not wait for them to store it
            context.recorder.push()
    _complete_call(context, result)


def tool_call_context(
    context: Context, call: ToolCall, effect_id: str, attempt: int, channel: CallChannel
) -> ToolContext[Any]:
    """What a tool that takes a context receives."""
    run = context.run
    return ToolContext(
        run.run_id,
        run.session_id,
        call.id,
        f"{run.run_id}:{effect_id}",
        attempt,
        actor=run.requester,
        tags=run.tags,
        metadata=run.metadata,
        deps=context.deps,
        channel=channel,
    )


def _complete_call(context: Context, result: ToolResult) -> None:
    context.completed_results.append(result)
    if context.builds_events:
        context.secrets.add(result.withheld)
        context.emit(ToolFinished, result=result)
