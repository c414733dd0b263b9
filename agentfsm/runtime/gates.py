"""What stands between a checked call and its tool: hooks at ``dispatch_tool``, and approval. Gates fail closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from inspect import isawaitable
from typing import Any

from agentfsm.core import wording
from agentfsm.core.messages import ToolResult
from agentfsm.core.state import CallState, Waiting
from agentfsm.machine.graph import State
from agentfsm.runtime.calls import being_cancelled
from agentfsm.runtime.context import Context
from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, Hook, HookContext, SkipCall, Verdict
from agentfsm.runtime.tools import Tool

__all__ = ["HookAbortError", "ask_gates", "ask_hooks"]


class HookAbortError(Exception):
    """A hook aborts the run; never leaves the driver."""


async def ask_hooks(
    context: Context, state: str, seen: HookContext | None = None, *, late: bool = False
) -> list[Verdict]:
    """Ask the hooks at a state's door.

    Args:
        context: The run and its parts.
        state: The state.
        seen: What they see, where that is more than the state and the run.
        late: Whether it is too late to stop the run: then every hook is asked, and an abort is warned about.

    Raises:
        HookAbortError: One of them aborts the run, or failed and fails closed.
    """
    verdicts: list[Verdict] = []
    for each in context.parts.hooks.get(state, ()):
        if each.once:
            if id(each) in context.hooks_done or state in context.left:
                continue
            context.hooks_done.add(id(each))
        try:
            verdicts.append(await _ask(context, each, seen or HookContext(state, context.run)))
        except HookAbortError as error:
            if not late:
                raise
            context.warn("a hook would abort the run, which has ended", str(error))
    return verdicts


async def _ask(context: Context, each: Hook, seen: HookContext) -> Verdict:
    try:
        answer = each.function(seen)
        verdict = await answer if isawaitable(answer) else answer
        fitting = AbortRun if seen.call is None else Verdict
        if verdict is not None and not isinstance(verdict, fitting):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{verdict!r} is no verdict{'' if seen.call is None else ' on a call'}")
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        text = f"hook {each.name} raised {wording.raised(error)}"
        if not each.fail_open:
            raise HookAbortError(text) from error
        context.warn(f"hook {each.name} raised {type(error).__name__}", text)
        return None
    if isinstance(verdict, AbortRun):
        raise HookAbortError(f"hook {each.name} aborted the run: {verdict.reason}")
    return verdict


async def ask_gates(
    context: Context, entry: CallState, tool: Tool, arguments: Mapping[str, Any]
) -> Waiting | ToolResult | None:
    """Whether a call may run: None for yes, the result of one that may not, or what a person is asked.

    Raises:
        HookAbortError: A hook aborts the run.
    """
    call = entry.call
    question = ""
    must_ask = tool.requires_approval if isinstance(tool.requires_approval, bool) else tool.requires_approval(arguments)
    if context.parts.hooks.get(State.DISPATCH_TOOL):
        seen = HookContext(State.DISPATCH_TOOL, context.run, call, tool, arguments)
        for verdict in await ask_hooks(context, State.DISPATCH_TOOL, seen):
            if isinstance(verdict, SkipCall):
                return ToolResult(call.id, call.name, f"Not run: {verdict.reason}", status="skipped")
            if isinstance(verdict, DenyCall):
                return ToolResult(call.id, call.name, f"Denied: {verdict.reason}", status="denied")
            if isinstance(verdict, AskApproval):
                must_ask, question = True, verdict.question or question
    if must_ask and not entry.approved:
        return Waiting(
            "approval",
            question or f"May {call.name!r} run with these arguments?",
            call_id=call.id,
            tool=call.name,
            arguments=dict(call.arguments),
        )
    return None
