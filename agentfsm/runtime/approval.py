"""Whether a tool call may run: its validation, hooks and approval, and what a person must decide before.

The check fails closed: if it cannot be evaluated, the call does not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from agentfsm.errors import GraphError, ReadOnlyError
from agentfsm.loop.approval_rows import check_undecided_rows, counts_votes
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import ToolCall, ToolResult
from agentfsm.loop.quorum import Approval, Quorum
from agentfsm.loop.read_only import contains_objects, freeze, user_code
from agentfsm.loop.state import CallState
from agentfsm.loop.withholding import lacks_values
from agentfsm.machine.graph import State
from agentfsm.runtime.context import Context
from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, Hook, HookContext, HookDecision, SkipCall
from agentfsm.runtime.host import Host
from agentfsm.runtime.timeout import TimeLimitError, reraise_cancellation
from agentfsm.runtime.tool_execution import validate_call
from agentfsm.runtime.tools import Tool

CheckedCall = tuple[Tool, dict[str, Any]] | ToolResult | PendingRequest
"""A call's tool and validated arguments if it may run; else its result, or what a human must decide."""


class HookAbortError(Exception):
    """A hook, or a function for ``requires_approval``, aborts the run; caught by the driver."""


async def run_hooks(
    context: Context, state: str, make_context: Callable[[], HookContext[Any]] | None = None, *, after_end: bool = False
) -> list[HookDecision]:
    """Run the hooks of a state, in order.

    Args:
        context: The run.
        state: The state.
        make_context: Makes what a hook sees; by default the state and the run.
        after_end: Whether it is too late to stop the run: then every hook runs, and an abort is only a warning.

    Returns:
        What each of them returned.

    Raises:
        HookAbortError: A hook aborted the run, tried to change it, or raised and has ``fail_open=False``.
    """
    decisions: list[HookDecision] = []
    for each in context.config.hooks.get(state, ()):
        if each.once:
            if id(each) in context.once_hooks_run or context.run.state in context.visited_before_resume:
                continue
            context.once_hooks_run.add(id(each))
        try:
            hook_context = (
                HookContext(state, context.view(), deps=context.deps) if make_context is None else make_context()
            )
            decisions.append(await _run_hook(context, each, hook_context))
        except HookAbortError as error:
            if not after_end:
                raise
            context.warn("a hook aborted the run, but it has already ended", str(error))
            context.run.change_attempts.clear()
    return decisions


async def _run_hook(context: Context, hook: Hook, hook_context: HookContext[Any]) -> HookDecision:
    try:
        with user_code("hook", hook.function, context.run.change_attempts):
            value = hook.function(hook_context)
            decision = await context.timeout.run(value, hook_limit_s(context)) if isawaitable(value) else value
        allowed = AbortRun if hook_context.call is None else HookDecision
        if decision is not None and not isinstance(decision, allowed):  # pyright: ignore[reportUnnecessaryIsInstance]
            where = "here" if hook_context.call is None else "for a call"
            raise TypeError(f"{decision!r} is not a valid hook decision {where}")
    except ReadOnlyError as error:
        raise HookAbortError(str(error)) from error
    except (Exception, asyncio.CancelledError) as error:
        reraise_cancellation(error)
        late = isinstance(error, TimeLimitError)
        text = f"hook {hook.name} {error if late else f'raised {describe_exception(error)}'}"
        if not hook.fail_open:
            raise HookAbortError(text) from error
        context.warn(text if late else f"hook {hook.name} raised {type(error).__name__}", text)
        return None
    if isinstance(decision, AbortRun):
        raise HookAbortError(f"hook {hook.name} aborted the run: {decision.reason}")
    return decision


def hook_limit_s(context: Context) -> float:
    """Seconds for one user function: until the run's time is up, unless it is up already and the run ends."""
    limit, left = context.run.guardrails.hook_timeout_s, context.time_left_s
    return limit if left is None or left <= 0 else min(limit, left)


async def check_call(context: Context, call_state: CallState) -> CheckedCall:
    """Whether a call may run.

    Returns:
        Its tool and validated arguments if it may; the result if it may not; or what a human must decide.
    """
    checked = check_without_approval(context, call_state)
    if isinstance(checked, (ToolResult, PendingRequest)):
        return checked
    if checked[0].requires_approval is False and not context.config.hooks:
        return checked
    return await check_approval(context, call_state, *checked) or checked


def check_without_approval(context: Context, call_state: CallState) -> CheckedCall:
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


async def check_approval(
    context: Context, call_state: CallState, tool: Tool, arguments: Mapping[str, Any]
) -> PendingRequest | ToolResult | None:
    """Whether a call may run, after its hooks and ``requires_approval``.

    Returns:
        None if it may run; its result if it was skipped or denied; or the approval request for a human.

    Raises:
        HookAbortError: A hook aborted the run, or tried to change it; or ``requires_approval`` raised.
        ReadOnlyError: ``requires_approval`` tried to change the run.
    """
    call, question = call_state.call, ""
    required = _required_approval(context, call, tool, arguments)
    needs_approval = required is not False
    if context.config.hooks.get(State.DISPATCH_TOOL):

        def make_context() -> HookContext[Any]:
            shown = shown_arguments(tool, call, arguments)
            return HookContext(context.run.state, context.view(), call, tool, shown, context.deps)

        for decision in await run_hooks(context, State.DISPATCH_TOOL, make_context):
            if isinstance(decision, SkipCall):
                return ToolResult(call.id, call.name, f"Not run: {decision.reason}", status="skipped")
            if isinstance(decision, DenyCall):
                return ToolResult(call.id, call.name, f"Denied: {decision.reason}", status="denied")
            if isinstance(decision, AskApproval):
                needs_approval, question = True, decision.question or question
    if not needs_approval:
        return None
    rule = required if isinstance(required, Approval) else None
    same_tool = call_state.approved_tool == tool.digest
    if call_state.approved and same_tool and _is_met(context.config.host, call_state.quorum, rule):
        return None
    question = question or f"May {call.name!r} run with these arguments?"
    if call_state.approved:
        what = "by those who must approve it now" if same_tool else "for this definition of the tool"
        question += f" It was approved, but not {what}."
    request = request_about(call, tool, "approval", question)
    if rule is None:
        return request
    return replace(request, quorum=Quorum(rule, context.run.requester, context.config.host.clock.time()))


def _is_met(host: Host, quorum: Quorum | None, rule: Approval | None) -> bool:
    """Whether those who approved a call are enough for its rule; a host that vouches for people believes no claims."""
    if rule is None or not rule.asks_who:
        return True
    if quorum is not None and host.authenticate is not None:
        quorum = quorum.as_vouched_for()
    return quorum is not None and quorum.is_met(rule)


def _required_approval(context: Context, call: ToolCall, tool: Tool, arguments: Mapping[str, Any]) -> bool | Approval:
    """What ``requires_approval`` says about a call.

    Raises:
        HookAbortError: It is a function that raised.
        ReadOnlyError: It is a function that tried to change the run.
    """
    rule = tool.requires_approval
    if isinstance(rule, (bool, Approval)):
        return rule
    shown = shown_arguments(tool, call, arguments)
    given: tuple[Any, ...] = (shown,)
    if tool.approval_takes_context:
        given = (shown, HookContext(State.DISPATCH_TOOL, context.view(), call, tool, shown, context.deps))
    try:
        with user_code("requires_approval", rule, context.run.change_attempts):
            required = rule(*given)
    except ReadOnlyError:
        raise
    except Exception as error:
        raise HookAbortError(f"requires_approval of {call.name!r} raised {describe_exception(error)}") from error
    return required if isinstance(required, Approval) else bool(required)


def request_about(call: ToolCall, tool: Tool, kind: str, question: str) -> PendingRequest:
    """What a person is asked about a call; the reply is bound to the tool as it is now."""
    return PendingRequest(
        kind, question, call_id=call.id, tool=call.name, arguments=call.arguments, tool_digest=tool.digest
    )


def shown_arguments(tool: Tool, call: ToolCall, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's validated arguments, as user code that decides about it sees them.

    They are frozen. Objects of other types than JSON's cannot be, so each function gets objects of its own: what it
    does to them shows neither in what the next one sees nor in what the tool gets.
    """
    shown: Mapping[str, Any] = freeze(arguments)
    return freeze(tool.arguments(call.arguments)) if contains_objects(shown) else shown


def require_row(context: Context, request: PendingRequest) -> None:
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
