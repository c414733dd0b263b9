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
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import to_json, to_jsonable_python

from agentfsm.core import wording
from agentfsm.core.envelope import parse_json, read_envelope
from agentfsm.core.events import ToolFinished, ToolStarted
from agentfsm.core.failures import PROVIDER_KINDS, Failure, FailureKind
from agentfsm.core.messages import Reply, ToolCall, ToolResult
from agentfsm.core.model import ModelRequest
from agentfsm.core.outcomes import CallFailed, Checked, Judged, Noted, Outcome, Parked, Ran, Read, Replied
from agentfsm.core.policy import choose
from agentfsm.core.render import render
from agentfsm.core.state import CallState, Held, RunState, Waiting
from agentfsm.core.withheld import is_withheld
from agentfsm.errors import ModelError
from agentfsm.machine.graph import State
from agentfsm.runtime.asking import ask
from agentfsm.runtime.calls import being_cancelled, check_call, failed, run_call
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.gates import ask_gates
from agentfsm.runtime.tools import Delegation, Tool, ToolContext, problems
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["EFFECTS", "custom_effect"]

CHECKED, JUDGED = Checked(), Judged()

_MODEL_KINDS = {kind.value: kind for kind in PROVIDER_KINDS}
"""The kinds that a model's error may say of itself; any other word is a ``provider_error``."""


# -- pre_step -----------------------------------------------------------------------------------------


def check_budgets(context: Context) -> Outcome | Awaitable[Outcome]:
    """Wait out the back-off; on the first step, ask the memory. The guards check the budgets."""
    first = context.run.steps == 1 and context.parts.memory is not None
    return _back_off(context, first) if first or context.run.backoff_s else CHECKED


async def _back_off(context: Context, first: bool) -> Outcome:
    context.recorder.push()  # a process that dies while it sleeps has lost nothing
    if context.run.backoff_s:
        await context.parts.host.clock.sleep(context.run.backoff_s)
    return Checked(await _recall(context) if first else "")


async def _recall(context: Context) -> str:
    memory = context.parts.memory
    if memory is None:
        return ""
    try:
        return await memory.recall(context.prompt)
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        kind, text, then = type(error).__name__, "memory is unavailable", "going on without it"
        context.warn(f"{text} ({kind}); {then}", f"{text} ({kind}: {error}); {then}")
        return ""


# -- call_llm -----------------------------------------------------------------------------------------


async def call_model(context: Context) -> Outcome:
    """Make one model call, within its time limit."""
    run, parts, recorder = context.run, context.parts, context.recorder
    recorder.intend(str(run.model_calls + 1), parts.model.name, "again")
    if recorder.keeper is not None:
        await recorder.commit()
    limit = run.guardrails.llm_timeout_s
    if run.grace == "now":
        limit = min(limit, run.guardrails.finalize_grace_s)
    request = ModelRequest(
        render(run),
        parts.specs,
        run.output_cap or run.guardrails.max_output_tokens,
        limit,
        parts.output_schema,
        heartbeat_s=run.guardrails.stream_heartbeat_s,
    )
    try:
        reply = await ask(context, request)
        _mind_the_price(context, reply)
        return Replied(_with_sound_calls(reply, context.call_ids))
    except TimeoutError:
        return _call_failed(FailureKind.transient_provider, f"{parts.model.name} gave no reply within {limit:g} s")
    except ModelError as error:
        return _call_failed(_MODEL_KINDS.get(error.kind, FailureKind.provider_error), str(error), error)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {type(error).__name__}: {error}")
    except Exception as error:
        return _call_failed(FailureKind.provider_error, f"{parts.model.name}: {type(error).__name__}: {error}")


def _mind_the_price(context: Context, reply: Reply) -> None:
    """Say once that ``max_cost_usd`` cannot be held, where nobody knows what a reply costs."""
    run = context.run
    if reply.usage.unpriced_tokens and run.guardrails.max_cost_usd is not None and not run.usage.unpriced_tokens:
        context.warn(f"no price is known for {context.parts.model.name}: max_cost_usd does not count its tokens")


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
        value = parse_json(text)
        adapter.validate_json(to_json(value))
        return Read(answer=value)
    except ValidationError as error:
        return Read(malformed=f"the answer does not have the required form ({'; '.join(problems(error))})")
    except ValueError as error:
        return Read(malformed=f"the answer is not valid JSON ({error})")


# -- dispatch_tool ------------------------------------------------------------------------------------


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
    for entry in due:
        if entry.call.id in known:
            _finish(context, known[entry.call.id])
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
    attempts = await _write_down(context, ready)
    if len(ready) == 1:
        await _run_one(context, *ready[0], attempts[0], limiter=context.watchdog)
    elif ready:
        async with asyncio.TaskGroup() as group:
            for one, attempt in zip(ready, attempts, strict=True):
                group.create_task(_run_one(context, *one, attempt, limiter=Watchdog()))
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
    secret = tools[call.name].secret if call.name in tools else frozenset[str]()
    lost = sorted(name for name in secret if is_withheld(call.arguments.get(name)))
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
    place = next(i for i, c in enumerate(run.batch) if c is entry)
    return f"{run.model_calls}.{place}"


def _repeatable(context: Context, tool: Tool) -> bool:
    """Whether a call that was cut off may be made again: a sub-agent goes on where its own journal ends."""
    return tool.idempotent or (tool.delegate is not None and context.parts.host.store is not None)


async def _write_down(context: Context, ready: list[tuple[CallState, Tool, dict[str, Any]]]) -> list[int]:
    """Say which tools are about to run, and wait until that is durable: one commit for all that run together.

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
    if recorder.keeper is not None:
        await recorder.commit()
    return attempts


async def _run_one(
    context: Context, entry: CallState, tool: Tool, arguments: dict[str, Any], attempt: int, *, limiter: Watchdog
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
        came = await _delegate(context, entry, tool, arguments, limit, tool.delegate(context, entry, attempt))
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
    except ValidationError as error:
        text = f"its result does not have the required form ({'; '.join(problems(error))})"
        return failed(call, FailureKind.tool_error, text, type(error).__name__)
    return result


def _tool_context(run: RunState, entry: CallState, attempt: int) -> ToolContext:
    key = f"{run.run_id}:{_eid(run, entry)}"
    return ToolContext(run.run_id, run.session_id, entry.call.id, key, attempt)


def _finish(context: Context, result: ToolResult) -> None:
    context.finished.append(result)
    if context.heard:
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
        run, recorder = context.run, context.recorder
        recorder.intend(f"{run.state}:{run.steps}", run.state, "again")
        if recorder.keeper is not None:
            await recorder.commit()
        value = function(run)
        if isawaitable(value):
            value = await value
        noted = value if isinstance(value, Noted) else Noted(value)
        return Noted(to_jsonable_python(noted.value, inf_nan_mode="null"), noted.messages)

    return effect
