"""The one thing that each state does to the world, found in a dict by the state's name.

An effect reads the run and returns an outcome; ``fold`` changes the run. It may be async or, where it has
nothing to wait for, plain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from types import MappingProxyType
from typing import Any

from pydantic_core import to_json, to_jsonable_python

from agentfsm.core.envelope import parse_json, read_envelope
from agentfsm.core.messages import Message
from agentfsm.core.outcomes import Checked, Judged, Noted, Outcome, Read
from agentfsm.core.policy import choose
from agentfsm.core.state import RunState
from agentfsm.core.wording import raised
from agentfsm.machine.graph import State
from agentfsm.runtime.asking import call_model
from agentfsm.runtime.calls import being_cancelled
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.dispatch import run_calls
from agentfsm.runtime.tools import unfit

__all__ = ["EFFECTS", "custom_effect"]

CHECKED, JUDGED = Checked(), Judged()


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
        with context.watchdog.limit(context.run.guardrails.tool_timeout_s):
            return _text(await memory.recall(context.prompt))
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        kind, text, then = type(error).__name__, "memory is unavailable", "going on without it"
        context.warn(f"{text} ({kind}); {then}", f"{text} ({raised(error)}); {then}")
        return ""


def _text(recalled: object) -> str:
    if recalled is not None and not isinstance(recalled, str):
        raise TypeError(f"recall() gave no text but {type(recalled).__name__}")
    return recalled or ""


def read_reply(context: Context) -> Outcome:
    """Read the reply: calls, or an answer, or why it cannot be read."""
    run = context.run
    reply = run.reply
    if reply is None:
        return Read()
    if reply.message.tool_calls:
        return Read(calls=reply.message.tool_calls)
    text = reply.message.content
    if not run.so_far or text.startswith(run.so_far):
        return _said(context, text)
    whole = _said(context, run.so_far + text)  # the rest of an answer that was cut off
    return whole if whole.malformed is None else _said(context, text)  # or all of it, once more


def _said(context: Context, text: str) -> Read:
    run = context.run
    if run.rules.envelope:
        read = read_envelope(text, f"call_{run.model_calls}")
        if read.calls or read.malformed is not None or context.parts.output is None:
            return read
        return _structured(context, str(read.answer))
    if not run.rules.text_is_answer:
        return Read()
    if context.parts.output is None or not text.strip():
        return Read(answer=text)
    return _structured(context, text)


def _structured(context: Context, text: str) -> Read:
    adapter = context.parts.output
    if adapter is None:
        return Read(answer=text)
    try:
        value = parse_json(text)
    except ValueError as error:
        return Read(malformed=f"the answer is not valid JSON ({error})")
    try:
        adapter.validate_json(to_json(value))
    except Exception as error:  # also out of a validator of the type's
        return Read(malformed=f"the answer does not have the required form ({unfit(error)})")
    return Read(answer=value)


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
        messages = tuple(noted.messages)
        for each in messages:
            if not isinstance(each, Message):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
                raise TypeError(f"Noted(messages=...) takes messages (Message.user('...')), not {type(each).__name__}")
        return Noted(to_jsonable_python(noted.value, inf_nan_mode="null"), messages)

    return effect
