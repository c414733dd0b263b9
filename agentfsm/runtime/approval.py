"""Human in the loop: runs the hooks and checks for approval before a tool call, and the replies a human may give.

The check fails closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

from agentfsm.errors import HumanReplyError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.messages import ToolResult
from agentfsm.loop.state import CallState, HumanReply, PendingRequest
from agentfsm.machine.graph import State
from agentfsm.runtime.context import Context, being_cancelled
from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, Hook, HookContext, HookDecision, SkipCall
from agentfsm.runtime.tools import Tool

__all__ = [
    "Allow",
    "Deny",
    "Edit",
    "GiveUp",
    "HookAbortError",
    "HumanInput",
    "ItDidNotRun",
    "ItRan",
    "check_approval",
    "run_hooks",
    "to_human_reply",
]


@dataclass(frozen=True, slots=True)
class Allow:
    """Approval: let the call run as it stands."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Approval: do not run the call; the model is told why."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Approval: run the call with other arguments; the model is told that they were changed."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ItRan:
    """Doubt: the call did run, and this was its result."""

    result: str = "done"


@dataclass(frozen=True, slots=True)
class ItDidNotRun:
    """Doubt: the call did not run; run it now."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Doubt: nobody can tell; go on without the call."""


HumanInput = str | Allow | Deny | Edit | ItRan | ItDidNotRun | GiveUp


def to_human_reply(human_input: HumanInput) -> HumanReply:
    """A person's answer as the loop keeps it.

    Raises:
        HumanReplyError: The answer is none that a run can take.
    """
    match human_input:
        case str():
            return HumanReply("text", human_input)
        case Allow():
            return HumanReply("allow")
        case Deny(str(reason)):
            return HumanReply("deny", reason)
        case Edit(arguments):
            return HumanReply("edit", arguments=_json_object(arguments))
        case ItRan(str(result)):
            return HumanReply("ran", result)
        case ItDidNotRun():
            return HumanReply("did_not_run")
        case GiveUp():
            return HumanReply("give_up")
        case _:
            raise HumanReplyError(
                f"a reply is a text, Allow(), Deny(), Edit(), ItRan(), ItDidNotRun() or GiveUp(), not {human_input!r}"
            )


def _json_object(arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(canonical_json(dict(arguments)))
    except (TypeError, ValueError) as error:
        raise HumanReplyError(f"the arguments of Edit() are no JSON object: {error}") from None
    return copy


class HookAbortError(Exception):
    """A hook aborts the run; never leaves the driver."""


async def run_hooks(
    context: Context, state: str, hook_context: HookContext | None = None, *, after_end: bool = False
) -> list[HookDecision]:
    """Ask the hooks at a state's door.

    Args:
        context: The run and its parts.
        state: The state.
        hook_context: What they see, where that is more than the state and the run.
        after_end: Whether it is too late to stop the run: then every hook is asked, and an abort is warned about.

    Raises:
        HookAbortError: One of them aborts the run, or failed and fails closed.
    """
    verdicts: list[HookDecision] = []
    for each in context.config.hooks.get(state, ()):
        if each.once:
            if id(each) in context.once_hooks_run or state in context.visited_before_resume:
                continue
            context.once_hooks_run.add(id(each))
        try:
            verdicts.append(await _run_hook(context, each, hook_context or HookContext(state, context.run)))
        except HookAbortError as error:
            if not after_end:
                raise
            context.warn("a hook would abort the run, which has ended", str(error))
    return verdicts


async def _run_hook(context: Context, hook: Hook, hook_context: HookContext) -> HookDecision:
    try:
        answer = hook.function(hook_context)
        verdict = await answer if isawaitable(answer) else answer
        fitting = AbortRun if hook_context.call is None else HookDecision
        if verdict is not None and not isinstance(verdict, fitting):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{verdict!r} is no verdict{'' if hook_context.call is None else ' on a call'}")
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        text = f"hook {hook.name} raised {describe_exception(error)}"
        if not hook.fail_open:
            raise HookAbortError(text) from error
        context.warn(f"hook {hook.name} raised {type(error).__name__}", text)
        return None
    if isinstance(verdict, AbortRun):
        raise HookAbortError(f"hook {hook.name} aborted the run: {verdict.reason}")
    return verdict


async def check_approval(
    context: Context, call_state: CallState, tool: Tool, arguments: Mapping[str, Any]
) -> PendingRequest | ToolResult | None:
    """Whether a call may run: None for yes, the result of one that may not, or what a person is asked.

    Raises:
        HookAbortError: A hook aborts the run.
    """
    call = call_state.call
    question = ""
    must_ask = tool.requires_approval if isinstance(tool.requires_approval, bool) else tool.requires_approval(arguments)
    if context.config.hooks.get(State.DISPATCH_TOOL):
        seen = HookContext(State.DISPATCH_TOOL, context.run, call, tool, arguments)
        for verdict in await run_hooks(context, State.DISPATCH_TOOL, seen):
            if isinstance(verdict, SkipCall):
                return ToolResult(call.id, call.name, f"Not run: {verdict.reason}", status="skipped")
            if isinstance(verdict, DenyCall):
                return ToolResult(call.id, call.name, f"Denied: {verdict.reason}", status="denied")
            if isinstance(verdict, AskApproval):
                must_ask, question = True, verdict.question or question
    if must_ask and not call_state.approved:
        return PendingRequest(
            "approval",
            question or f"May {call.name!r} run with these arguments?",
            call_id=call.id,
            tool=call.name,
            arguments=dict(call.arguments),
        )
    return None
