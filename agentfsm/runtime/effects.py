"""The one thing that each state does to the world, found in a dict by the state's name.

An effect reads the run and returns an outcome; ``fold`` changes the run. It may be async or, where it has
nothing to wait for, plain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from inspect import isawaitable
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from agentfsm.core.envelope import parse_json, read_envelope
from agentfsm.core.events import ToolFinished, ToolStarted
from agentfsm.core.failures import Failure, FailureKind
from agentfsm.core.messages import Reply, ToolCall, ToolResult
from agentfsm.core.model import ModelRequest
from agentfsm.core.outcomes import CallFailed, Checked, Judged, Noted, Outcome, Parked, Ran, Read, Replied
from agentfsm.core.policy import choose
from agentfsm.core.render import render
from agentfsm.core.state import CallState, RunState, Waiting
from agentfsm.errors import ModelError
from agentfsm.machine.graph import State
from agentfsm.runtime.calls import being_cancelled, check_call, failed, run_call
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.gates import ask_gates
from agentfsm.runtime.tools import Tool, ToolContext, problems
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["EFFECTS", "custom_effect"]

CHECKED, JUDGED = Checked(), Judged()


# -- pre_step -----------------------------------------------------------------------------------------


def check_budgets(context: Context) -> Outcome | Awaitable[Outcome]:
    """Wait out the back-off; on the first step, ask the memory. The guards check the budgets."""
    first = context.run.steps == 1 and context.parts.memory is not None
    return _back_off(context, first) if first or context.run.backoff_s else CHECKED


async def _back_off(context: Context, first: bool) -> Outcome:
    if context.run.backoff_s:
        await context.parts.host.clock.sleep(context.run.backoff_s)
    return Checked(await _recall(context) if first else "")


async def _recall(context: Context) -> str:
    memory = context.parts.memory
    if memory is None:
        return ""
    try:
        return await memory.recall(context.prompt)
    except Exception as error:
        context.warn(f"memory is unavailable ({type(error).__name__}: {error}); going on without it")
        return ""


# -- call_llm -----------------------------------------------------------------------------------------


async def call_model(context: Context) -> Outcome:
    """Make one model call, within its time limit."""
    run, parts = context.run, context.parts
    limit = run.guardrails.llm_timeout_s
    if run.grace == "now":
        limit = min(limit, run.guardrails.finalize_grace_s)
    request = ModelRequest(
        render(run),
        parts.specs,
        run.output_cap or run.guardrails.max_output_tokens,
        limit,
        parts.output_schema,
    )
    try:
        with context.watchdog.limit(limit):
            return Replied(_with_sound_calls(await parts.model.reply(request), context.call_ids))
    except TimeoutError:
        return _call_failed(FailureKind.transient_provider, f"{parts.model.name} gave no reply within {limit:g} s")
    except ModelError as error:
        return _call_failed(FailureKind(error.kind), str(error), error)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {type(error).__name__}: {error}")
    except Exception as error:
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {type(error).__name__}: {error}")


def _call_failed(kind: FailureKind, text: str, error: ModelError | None = None) -> CallFailed:
    more = {} if error is None else {"retry_after_s": error.retry_after_s, "status": error.status}
    metadata = {k: v for k, v in more.items() if v is not None}
    return CallFailed(Failure(kind=kind, explanation=text, blockers=(text,), metadata=metadata))


def _with_sound_calls(reply: Reply, taken: set[str]) -> Reply:
    """The reply with calls that a transcript can hold, whatever the model gave.

    Each gets an id that no other call of the transcript has, since each gets one result; arguments that no
    JSON can hold (NaN, objects of Python) are none.

    Args:
        reply: The reply as the model gave it.
        taken: The ids of earlier calls; those of this reply are added.
    """
    calls = reply.message.tool_calls
    if not calls:
        return reply
    own: list[ToolCall] = []
    for place, call in enumerate(calls, 1):
        wanted, n = call.id, len(taken)
        while not wanted or wanted in taken:
            wanted, n = f"{call.id or 'call'}_{n}_{place}", n + 1
        taken.add(wanted)
        try:
            _ = call.signature
        except (TypeError, ValueError, RecursionError) as error:
            call = replace(call, arguments={}, malformed=f"the arguments are no JSON object: {error}")
        own.append(call if wanted == call.id else replace(call, id=wanted))
    return replace(reply, message=replace(reply.message, tool_calls=tuple(own)))


# -- post_llm -----------------------------------------------------------------------------------------


def read_reply(context: Context) -> Outcome:
    """Read the reply: calls, or an answer, or why it cannot be read."""
    run = context.run
    reply = run.reply
    if reply is None:
        return Read()
    if reply.message.tool_calls:
        return Read(calls=reply.message.tool_calls)
    if run.rules.envelope:
        read = read_envelope(reply.message.content, f"call_{run.model_calls}")
        if read.calls or read.malformed is not None or context.parts.output is None:
            return read
        return _structured(context, str(read.answer))
    if not run.rules.text_is_answer:
        return Read()
    if context.parts.output is None or not reply.message.content.strip():
        return Read(answer=reply.message.content)
    return _structured(context, reply.message.content)


def _structured(context: Context, text: str) -> Read:
    adapter = context.parts.output
    if adapter is None:
        return Read(answer=text)
    try:
        value = adapter.validate_python(parse_json(text))
        return Read(answer=adapter.dump_python(value, mode="json"))
    except ValidationError as error:
        return Read(malformed=f"the answer does not have the required form ({'; '.join(problems(error))})")
    except ValueError as error:
        return Read(malformed=f"the answer is not valid JSON ({error})")


# -- dispatch_tool ------------------------------------------------------------------------------------


async def run_calls(context: Context) -> Outcome:
    """Run the next call, or all that are left where all may run together; or say who must be asked."""
    due = _due(context)
    context.finished.clear()
    if context.run.backoff_s:
        await context.parts.host.clock.sleep(context.run.backoff_s)
    ready: list[tuple[CallState, Tool, dict[str, Any]]] = []
    for entry in due:
        checked = check_call(entry.call, context.parts.tools)
        if isinstance(checked, ToolResult):
            _finish(context, checked)
            continue
        tool, arguments = checked
        if entry.started and not tool.idempotent:
            return Parked(_doubt(entry.call), tuple(context.finished))
        verdict = await ask_gates(context, entry, tool, arguments)
        if isinstance(verdict, Waiting):
            return Parked(verdict, tuple(context.finished))
        if isinstance(verdict, ToolResult):
            _finish(context, verdict)
        else:
            ready.append((entry, tool, arguments))
    if len(ready) == 1:
        await _run_one(context, *ready[0], limiter=context.watchdog)
    elif ready:
        async with asyncio.TaskGroup() as group:
            for one in ready:
                group.create_task(_run_one(context, *one, limiter=Watchdog()))
    if len(due) == 1:
        return Ran(tuple(context.finished))
    by_id = {r.call_id: r for r in context.finished}
    return Ran(tuple(by_id[e.call.id] for e in due if e.call.id in by_id))


def _due(context: Context) -> list[CallState]:
    batch = context.run.batch
    pending = [c for c in batch if c.result is None]
    if len(pending) < 2:
        return pending
    tools = context.parts.tools
    together = all(c.call.name in tools and tools[c.call.name].parallel for c in pending)
    return pending if together else pending[:1]


def _doubt(call: ToolCall) -> Waiting:
    return Waiting(
        "in_doubt",
        f"The call of {call.name!r} was cut off, and nobody knows whether it ran. Did it?",
        call_id=call.id,
        tool=call.name,
        arguments=call.arguments,
    )


async def _run_one(
    context: Context, entry: CallState, tool: Tool, arguments: dict[str, Any], *, limiter: Watchdog
) -> None:
    run = context.run
    entry.started = True  # the one thing noted in front: cut off from here on, the call is in doubt
    if context.watched:
        context.emit(ToolStarted, call=entry.call)
    seen = _tool_context(run, entry) if tool.takes_context else None
    result = await run_call(
        entry.call, tool, arguments, seen, limiter.limit(tool.timeout or run.guardrails.tool_timeout_s)
    )
    _finish(context, result if result.ending != "done" else _checked_output(context, entry.call, result))


def _checked_output(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run, or why its value is not the output that the agent promises."""
    adapter = context.parts.output
    if adapter is None:
        return result
    try:
        adapter.validate_python(result.value)
    except ValidationError as error:
        text = f"its result does not have the required form ({'; '.join(problems(error))})"
        return failed(call, FailureKind.tool_error, text, type(error).__name__)
    return result


def _tool_context(run: RunState, entry: CallState) -> ToolContext:
    place = next(i for i, c in enumerate(run.batch) if c is entry)
    key = f"{run.run_id}:{run.model_calls}.{place}"
    return ToolContext(run.run_id, run.session_id, entry.call.id, key, entry.retries + 1)


def _finish(context: Context, result: ToolResult) -> None:
    context.finished.append(result)
    if context.watched:
        context.emit(ToolFinished, result=result)


# -- post_tool, recover -------------------------------------------------------------------------------


def judge(context: Context) -> Outcome:
    """Nothing to do: the results are there, and the guards judge them."""
    return JUDGED


def recover(context: Context) -> Outcome:
    """Ask the policy what to do about the failure."""
    return choose(context.parts.policy, context.run, context.parts.host.seed)


EFFECTS: Mapping[str, Effect] = MappingProxyType(
    {
        State.PRE_STEP: check_budgets,
        State.CALL_LLM: call_model,
        State.POST_LLM: read_reply,
        State.DISPATCH_TOOL: run_calls,
        State.POST_TOOL: judge,
        State.RECOVER: recover,
    }
)
"""The effects of the declared states; ``suspended`` waits outside, and ``terminal`` does nothing."""


def custom_effect(function: Callable[[RunState], Any]) -> Effect:
    """The effect of a state of the user's: its JSON value becomes ``run.notes[state]``.

    Args:
        function: Plain or async; takes the ``RunState`` (to read, not to change) and returns None, a JSON
            value, or ``Noted(value, messages)`` to add to the transcript.
    """

    async def effect(context: Context) -> Outcome:
        value = function(context.run)
        if isawaitable(value):
            value = await value
        return value if isinstance(value, Noted) else Noted(to_jsonable_python(value))

    return effect
