"""The effect of each state: the one thing the state does to the outside world.

An effect reads the run and returns an outcome; the reducer changes the run. An effect may be async or,
where it has nothing to await, a plain function.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from agentfsm.loop.events import RecoveryStarted
from agentfsm.loop.failures import Action
from agentfsm.loop.messages import FinishReason, Reply, ToolCall
from agentfsm.loop.outcomes import (
    CALL_MODEL,
    CHECK_BUDGETS,
    CHOOSE_RECOVERY,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
    Outcome,
    PreStepDone,
    RecoveryDecided,
    ReplyParsed,
)
from agentfsm.loop.recovery_policy import decide_recovery
from agentfsm.loop.reply_reader import parse_json, read_reply
from agentfsm.machine.declaration import EffectSpec
from agentfsm.runtime.context import Context, Effect, require_short_wait, rest_of_wait_s
from agentfsm.runtime.host import Memory
from agentfsm.runtime.model_call import call_model
from agentfsm.runtime.output_validators import validate_reply
from agentfsm.runtime.timeout import reraise_cancellation
from agentfsm.runtime.tool_dispatch import run_calls
from agentfsm.runtime.tools import describe_validation_error

PRE_STEP_DONE = PreStepDone()


def check_budgets(context: Context) -> Outcome | Awaitable[Outcome]:
    """The effect of ``pre_step``: on the first step, recall memories. The budgets are checked by the guards."""
    memory = context.config.memory
    return PRE_STEP_DONE if memory is None or context.run.steps != 1 else _recall(context, memory)


async def _recall(context: Context, memory: Memory) -> Outcome:
    context.recorder.push()
    limit, left = context.run.guardrails.tool_timeout_s, context.time_left_s
    try:
        recalled = memory.recall(context.prompt)
        text = await context.timeout.run(recalled, limit if left is None else min(limit, left))
        return PreStepDone(_require_text(text))
    except (Exception, asyncio.CancelledError) as error:
        reraise_cancellation(error)
        context.warn_memory_failed("memory is unavailable", error, "; continuing without it")
        return PRE_STEP_DONE


def _require_text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"recall() must return a string, not {type(value).__name__}")
    return value or ""


def parse_reply(context: Context) -> Outcome | Awaitable[Outcome]:
    """The effect of ``post_llm``: parse the reply into tool calls, an answer, or the reason why it is malformed."""
    run, adapter = context.run, context.config.output_adapter
    if run.reply is not None and run.behavior.repeats == "calls":
        _log_repeats(context, run.reply.message.tool_calls)
    parsed = read_reply(run, None if adapter is None else partial(_parse_structured, adapter))
    if context.config.output_validators and _is_whole_answer(run.reply, parsed):
        return validate_reply(context, parsed)
    return parsed


def _is_whole_answer(reply: Reply | None, parsed: ReplyParsed) -> bool:
    """Whether a reply has an answer to validate: one that is neither blank nor cut off nor a refusal."""
    if parsed.answer is None or reply is None or reply.finish_reason is not FinishReason.STOP:
        return False
    return not isinstance(parsed.answer, str) or bool(parsed.answer.strip())


def _log_repeats(context: Context, calls: Sequence[ToolCall]) -> None:
    """Warn about a call that was made ``loop_soft_threshold`` times, where the model is not warned itself."""
    run = context.run
    signatures = [*run.recent_calls, *(call.signature for call in calls)][-run.guardrails.loop_window :]
    for signature, count in Counter(signatures).items():
        if count >= run.guardrails.loop_soft_threshold and any(call.signature == signature for call in calls):
            text = f"the same call was made {count} times"
            context.warn(text, f"{text}: {signature.rpartition(':')[0]}")


def _parse_structured(adapter: TypeAdapter[Any], text: str) -> ReplyParsed:
    try:
        value = parse_json(text)
    except ValueError as error:
        return ReplyParsed(malformed=f"the answer is not valid JSON ({error})")
    try:
        adapter.validate_json(to_json(value))
    except Exception as error:  # a validator of the type may raise anything
        return ReplyParsed(
            malformed=f"the answer does not have the required format ({describe_validation_error(error)})"
        )
    return ReplyParsed(answer=value)


def no_effect(context: Context) -> None:
    """``post_tool``: the results of the batch are in the run already, and the guards read them there."""


def choose_recovery(context: Context) -> Outcome | Awaitable[Outcome]:
    """The effect of ``recover``: let the policy decide what to do about the failure, and wait as long as it says.

    A run that was interrupted while it waited waits for the rest only.
    """
    run = context.run
    since, context.waits_since = context.waits_since, None
    decided = decide_recovery(context.config.policy, run, context.config.host.seed)
    if run.failure is not None and decided.action in (Action.retry, Action.narrow_scope):
        context.emit(
            RecoveryStarted,
            failure=run.failure,
            action=decided.action,
            attempt=run.attempts(run.failure.kind) + 1,
            backoff_s=decided.backoff_s,
        )
    return _back_off(context, decided, since) if decided.backoff_s else decided


async def _back_off(context: Context, decided: RecoveryDecided, since: float | None) -> Outcome:
    context.recorder.push()  # so that nothing is lost if the process dies while it sleeps
    rest_s = rest_of_wait_s(context.config.host.clock, decided.backoff_s, since)
    require_short_wait(context, rest_s)
    if rest_s:
        await context.config.host.clock.sleep(rest_s)
    return decided


EFFECTS: Mapping[EffectSpec, Effect] = MappingProxyType(
    {
        CHECK_BUDGETS: check_budgets,
        CALL_MODEL: call_model,
        PARSE_REPLY: parse_reply,
        RUN_CALLS: run_calls,
        JUDGE_RESULTS: no_effect,
        CHOOSE_RECOVERY: choose_recovery,
    }
)
"""What runs for each declared effect."""
