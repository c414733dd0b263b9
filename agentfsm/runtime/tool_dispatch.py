"""Tool dispatch: the effect of ``dispatch_tool``, which decides which calls of a batch run, in order or in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from pydantic_core import to_json

from agentfsm.errors import AgentfsmError, GraphError
from agentfsm.loop import prompts
from agentfsm.loop.approval_rows import check_undecided_rows, counts_votes
from agentfsm.loop.detectors import cost_limit, time_limit, token_limit
from agentfsm.loop.events import ToolFinished, ToolStarted
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.human_input import PendingRequest, SuspendedSubRun
from agentfsm.loop.messages import ToolCall, ToolResult, Usage
from agentfsm.loop.outcomes import CallBlocked, Outcome, ToolsRan
from agentfsm.loop.quorum import Approval, Quorum
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.withholding import lacks_values
from agentfsm.runtime.approval import check_approval, request_about
from agentfsm.runtime.context import AgentConfig, Context
from agentfsm.runtime.delegation import BudgetShare, CallingRun, Delegation, run_id_for_call
from agentfsm.runtime.output_validators import AnswerRefusedError, validate_answer
from agentfsm.runtime.permissions import policies_of
from agentfsm.runtime.timeout import CancelRequests, Timeout
from agentfsm.runtime.tool_channel import CallChannel, ToolWaits
from agentfsm.runtime.tool_context import ToolContext
from agentfsm.runtime.tool_execution import failed_result, run_call, run_delegation, validate_call
from agentfsm.runtime.tools import Tool, call_secrets, describe_validation_error, run_secrets

T = TypeVar("T")

_FULL_SHARE = BudgetShare()
_NONE: frozenset[str] = frozenset()

_ReadyCall = tuple[str, CallState, Tool, dict[str, Any]]
"""The id of a call's effect, the call, its tool and its validated arguments."""

_Checked = tuple[Tool, dict[str, Any]] | ToolResult | PendingRequest
"""A call's tool and validated arguments if it may run; else its result, or what a human must decide."""


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
    several = len(due) > 1
    for index, call_state in due:
        if earlier and call_state.call.id in earlier:
            continue
        if several:  # before a single call the driver has yielded
            await context.yield_if_due()
        checked = _check_without_approval(context, call_state)
        if type(checked) is tuple and (checked[0].requires_approval is not False or config.hooks):
            checked = await check_approval(context, call_state, *checked) or checked
        if type(checked) is tuple:
            tool, arguments = checked
            effect_id = f"{run.turns}.{index}"  # the number of the model call that requested it, and its index there
            ready.append((effect_id, call_state, tool, arguments))
        elif isinstance(checked, PendingRequest):
            _require_row(context, checked)
            return CallBlocked(checked, tuple(context.completed_results))
        elif isinstance(checked, ToolResult):
            _complete_call(context, checked)
    attempts: list[int] = []
    sub_agents = 0
    for effect_id, _, tool, _ in ready:
        attempts.append(_record_intent(context, effect_id, tool))
        sub_agents += tool.delegate is not None
    if context.recorder.sink is not None:  # one commit for all calls that run together
        await context.recorder.commit()
    share = _budget_share(context, sub_agents) if sub_agents else _FULL_SHARE
    if len(ready) == 1:
        await _run_one(context, ready[0], attempts[0], share, context.timeout)
    elif ready:
        await _run_parallel(context, ready, attempts, share)
    results = tuple(context.completed_results)
    if several:
        results = _in_order({result.call_id: result for result in results}, due)
    if not context.suspended_subruns:
        return ToolsRan(results)
    suspended = _in_order(context.suspended_subruns, due)
    return CallBlocked(suspended[0].waiting, results, suspended)


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


def _require_row(context: Context, request: PendingRequest) -> None:
    """Check that the graph has a row for a call that must wait.

    Raises:
        GraphError: It has none, or its rows do not fit the rule of the approval.
    """
    graph, state = context.config.machine.graph, context.run.state
    outcome = "in_doubt" if request.kind == "in_doubt" else "approval_required"
    if not graph.takes(state, outcome):
        raise GraphError(
            f"the call of {request.tool!r} must wait for a person, and no row of the state takes {outcome!r}",
            state,
            f"add the row {outcome!r} that LOOP has",
        )
    require_rows_for_rule(context, request)


def require_rows_for_rule(context: Context, request: PendingRequest) -> None:
    """Check that the graph counts votes if an approval needs them, and that no row leads past those that are missing.

    For rules that are known when the agent is created, this was checked then.

    Raises:
        GraphError: It does not, or one does.
    """
    graph, quorum = context.config.machine.graph, request.quorum
    if quorum is None or request.asker:
        return
    if quorum.rule.needs_rows and not counts_votes(graph):
        raise GraphError(
            f"the call of {request.tool!r} needs several approvals or escalation, and the graph counts no votes",
            context.run.state,
            "give the agent graph=with_votes(LOOP), or annotate the function for requires_approval with '-> Approval'",
        )
    check_undecided_rows(graph, request.tool, quorum.rule)


async def check_call(context: Context, call_state: CallState) -> _Checked:
    """Whether a call may run.

    Returns:
        Its tool and validated arguments if it may; the result if it may not; or what a human must decide.
    """
    checked = _check_without_approval(context, call_state)
    if isinstance(checked, (ToolResult, PendingRequest)):
        return checked
    if checked[0].requires_approval is False and not context.config.hooks:
        return checked
    return await check_approval(context, call_state, *checked) or checked


def _check_without_approval(context: Context, call_state: CallState) -> _Checked:
    """Whether a call may run, but for its approval: for most calls there is nothing to await."""
    call, tools = call_state.call, context.config.tools
    if call_state.denied is not None:
        return ToolResult(call.id, call.name, call_state.denied, status="denied")
    if context.may_lack_values and (request := _missing_values_request(call, tools)) is not None:
        return request
    checked = validate_call(call, tools)
    if type(checked) is not tuple:
        return checked
    tool = checked[0]
    if call_state.started and not is_repeatable(context, tool):
        question = f"The call of {call.name!r} was interrupted, and it is not known whether it ran. Did it?"
        request = request_about(call, tool, "in_doubt", question)
        return replace(request, quorum=_who_settles_doubt(context, call_state.quorum))
    if call_state.held is not None and call_state.answer is None:
        return call_state.held.waiting
    return checked


def _who_settles_doubt(context: Context, approved: Quorum | None) -> Quorum | None:
    """Who may say whether a call ran: one of those who may approve it, because it runs again if it did not."""
    if approved is None or not approved.rule.asks_who:
        return None
    rule = Approval(roles=approved.roles, not_requester=approved.rule.not_requester)
    return Quorum(rule, approved.requester, context.config.host.clock.time()) if rule.asks_who else None


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


def _missing_values_request(call: ToolCall, tools: Mapping[str, Tool]) -> PendingRequest | None:
    """The request for arguments that were withheld when the run was stored, and that cannot be opened."""
    tool = tools.get(call.name)
    missing = sorted(name for name, value in call.arguments.items() if lacks_values(value))
    if tool is None or not missing:
        return None
    return request_about(
        call,
        tool,
        "approval",
        f"The call of {call.name!r} needs {', '.join(missing)}, which held a secret and is not stored (the extra "
        "'sealing' stores secrets encrypted). Reply with Edit(arguments), giving all of them, or with Deny(reason).",
    )


def is_repeatable(context: Context, tool: Tool) -> bool:
    """Whether an interrupted call may be repeated: with a store, a sub-agent continues where its own journal ends."""
    if tool.idempotent:
        return True
    return tool.delegate is not None and tool.delegate.is_agent and context.config.host.store is not None


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


def _budget_share(context: Context, shared_by: int) -> BudgetShare:
    """The share of the remaining budget for each of some sub-agents that are about to run."""
    ended = [r for r in context.completed_results if r.usage is not None]
    usage = sum((r.usage for r in ended if r.usage is not None), Usage())
    return BudgetShare(shared_by, usage, sum(r.model_calls for r in ended))


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


async def dismiss_subruns(context: Context, subruns: Iterable[tuple[Tool, str]]) -> None:
    """End the runs that a run called, because it ends. What cannot be ended is left, with a warning.

    Args:
        context: The calling run.
        subruns: The runs of sub-agents, each with the tool that is its agent.
    """
    caller, reason = calling_run(context.config, context.run), f"run {context.run.run_id!r}, which called it, has ended"
    for tool, run_id in subruns:
        if tool.delegate is None:
            continue
        try:
            await tool.delegate.dismiss(caller, run_id, reason)
        except AgentfsmError as error:
            context.warn(f"run {run_id!r} of the sub-agent {tool.name!r} was not ended: {error}")
    if context.visited_before_resume:  # else no process has died that was replying to a server
        await _dismiss_replies(context, caller, reason)


async def _dismiss_replies(context: Context, caller: CallingRun, reason: str) -> None:
    """End the runs that were replying to servers when they were cut off, and whose calls were not made again."""
    delegates = (tool.delegate for tool in context.config.tools.values())
    samplers = {id(each.sampler): each.sampler for each in delegates if each is not None}
    errors: dict[str, AgentfsmError] = {}
    for sampler in filter(None, samplers.values()):  # which of them began a run, its id does not say
        for run_id in await sampler.cut_off_replies(caller):
            try:
                await sampler.dismiss(caller, run_id, reason)
                errors.pop(run_id, None)
            except AgentfsmError as error:
                errors[run_id] = error
    for run_id, why in errors.items():
        context.warn(f"run {run_id!r}, which was replying to a server, was not ended: {why}")


def calling_run(config: AgentConfig, run: RunState) -> CallingRun:
    """A run as a sub-agent's caller, with the permission policies that bind the sub-agent, too."""
    return CallingRun(
        run, config.host, _FULL_SHARE, permissions=policies_of(config.hooks), secrets=run_secrets(run, config.tools)
    )


def _live_calling_run(context: Context, call: ToolCall, share: BudgetShare, channel: CallChannel | None) -> CallingRun:
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
        caller = _live_calling_run(context, call, share, channel)
        if timer is context.timeout:  # no other call of the batch runs, which would be cut off
            caller = replace(caller, longest_wait_s=context.longest_wait_s)
        delegation = tool.delegate(caller, call_state, attempt)
        answer = await _delegate(context, call_state, tool, arguments, limit, delegation, channel)
        if isinstance(answer, SuspendedSubRun):
            context.suspended_subruns[call.id] = answer
            return
        result = answer
    if call_state.edited:  # the transcript has the arguments that the model gave
        result = replace(result, withheld=(*result.withheld, *call_secrets(tool, call.arguments)))
    if result.ending == "done":
        result = _validate_output(context, call, result)
        if context.config.output_validators and result.ending == "done":
            result = await _validated_result(context, call, result)
    if tool.control is None:
        context.recorder.record_result(eid, result)
        if timer is not context.timeout:  # other calls of the batch still run: do not wait for them to store it
            context.recorder.push()
    _complete_call(context, result)


async def _delegate(
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


def _validate_output(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run, or a failed result if its value does not have the output type."""
    adapter = context.config.output_adapter
    if adapter is None:
        return result
    try:
        adapter.validate_json(to_json(result.value))
    except Exception as error:  # a validator of the type may raise anything
        text = f"its result does not have the required format ({describe_validation_error(error)})"
        return failed_result(call, FailureKind.tool_error, text, type(error).__name__)
    return result


async def _validated_result(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run, as the output validators leave it, or a failed one if they refuse it."""
    try:
        return replace(result, value=await validate_answer(context, result.value))
    except AnswerRefusedError as error:
        text = f"the answer was checked and refused: {error}"
        return failed_result(call, FailureKind.tool_error, text, type(error).__name__)


def tool_call_context(
    context: Context, call: ToolCall, effect_id: str, attempt: int, channel: CallChannel
) -> ToolContext[Any]:
    """What a tool that takes a context receives.

    Args:
        context: The run.
        call: The call.
        effect_id: The id of its effect.
        attempt: Which attempt at it this is, from 1.
        channel: What it tells the run by.
    """
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
