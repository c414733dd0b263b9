"""Human in the loop: checks hooks and approval before a tool call runs, and defines the replies a human may give.

The check fails closed: if it cannot be evaluated, the call does not run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any

from agentfsm.errors import HumanReplyError, ReadOnlyError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.extension import GUARDRAIL_OF_UNIT
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import ToolCall, ToolResult
from agentfsm.loop.quorum import Approval, Quorum
from agentfsm.loop.read_only import contains_objects, freeze, user_code
from agentfsm.loop.state import CallState
from agentfsm.machine.graph import State
from agentfsm.runtime.context import Context
from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, Hook, HookContext, HookDecision, SkipCall
from agentfsm.runtime.host import Host
from agentfsm.runtime.timeout import TimeLimitError, reraise_cancellation
from agentfsm.runtime.tools import Tool


@dataclass(frozen=True, slots=True)
class Allow:
    """Reply to an approval request: run the call."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Reply to an approval request: do not run the call, and give the model the reason. To a form: decline it."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Reply to an approval request: run the call with other arguments; the model is told that they were changed."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ItRan:
    """Reply about an interrupted call: it did run, with this result."""

    result: str = "done"


@dataclass(frozen=True, slots=True)
class ItDidNotRun:
    """Reply about an interrupted call: it did not run; run it now."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Reply about an interrupted call: it is not known whether it ran; continue without it. To a form: cancel it."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Reply to a form: its fields. Those that have a default may be left out."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Extend:
    """Reply to a request about a limit: continue with another amount than the default. Give one, of what ran out.

    Attributes:
        tokens: So many tokens beyond those that the run might use.
        usd: So many USD beyond those that the run might use.
        seconds: So many seconds of active time from now on.
        model_calls: So many model calls from now on; at most ``max_iterations``.
        message: What the model is told, as a string reply would; empty for nothing.
    """

    tokens: int | None = None
    usd: float | None = None
    seconds: float | None = None
    model_calls: int | None = None
    message: str = ""


HumanInput = str | Extend | Fill | Allow | Deny | Edit | ItRan | ItDidNotRun | GiveUp
"""What a human may reply: a string answers a question."""


def to_human_reply(human_input: HumanInput) -> HumanReply:
    """A human's reply in the form that the run state stores.

    Raises:
        HumanReplyError: It is not a valid reply.
    """
    match human_input:
        case str():
            return HumanReply("text", human_input)
        case Extend():
            return _to_extension(human_input)
        case Allow():
            return HumanReply("allow")
        case Deny(str(reason)):
            return HumanReply("deny", reason)
        case Edit(arguments):
            return HumanReply("edit", arguments=_json_object(arguments, "the arguments of Edit()"))
        case Fill(fields):
            return HumanReply("fill", arguments=_json_object(fields, "the fields of Fill()"))
        case ItRan(str(result)):
            return HumanReply("ran", result)
        case ItDidNotRun():
            return HumanReply("did_not_run")
        case GiveUp():
            return HumanReply("give_up")
        case _:
            raise HumanReplyError(
                "a reply must be a string, Extend(), Fill(), Allow(), Deny(), Edit(), ItRan(), ItDidNotRun() or "
                f"GiveUp(), not {human_input!r}"
            )


_MAX_AMOUNT = 10**12


def _to_extension(extend: Extend) -> HumanReply:
    named: dict[str, Any] = {unit: getattr(extend, unit) for unit in GUARDRAIL_OF_UNIT}
    named = {unit: amount for unit, amount in named.items() if amount is not None}
    if len(named) > 1:
        raise HumanReplyError(f"Extend() takes one amount, of what ran out, not {' and '.join(named)}")
    message: Any = extend.message
    if not isinstance(message, str):
        raise HumanReplyError(f"Extend(message=...) must be a string, not {message!r}")
    for unit, amount in named.items():
        whole = unit in ("tokens", "model_calls")
        if isinstance(amount, bool) or not isinstance(amount, int if whole else (int, float)):
            raise HumanReplyError(f"Extend({unit}=...) is {'a whole number' if whole else 'a number'}, not {amount!r}")
        if not 0 < amount <= _MAX_AMOUNT:  # not NaN either
            raise HumanReplyError(f"Extend({unit}={amount!r}): an amount is more than 0 and at most {_MAX_AMOUNT:,}")
        return HumanReply("extend", message, unit=unit, amount=float(amount))
    return HumanReply("extend", message)


def _json_object(arguments: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(canonical_json(dict(arguments)))
    except (TypeError, ValueError) as error:
        raise HumanReplyError(f"{what} are not a JSON object: {error}") from None
    return copy


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
    """What a person is asked about a call; the reply is bound to the tool as it is now.

    Args:
        call: The call.
        tool: Its tool.
        kind: ``approval`` or ``in_doubt``.
        question: The question.
    """
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
