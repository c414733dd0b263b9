"""Output validators: user functions that check an answer, change it, or refuse it with a lesson for the model.

An answer that is refused is malformed output: the row ``output_malformed`` leads to ``recover``, and the policy's
budget for it bounds how often the model may try again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from pydantic_core import to_json

from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import ToolCall, ToolResult
from agentfsm.loop.outcomes import ReplyParsed
from agentfsm.loop.prompts import REFUSED_ANSWER
from agentfsm.loop.read_only import code_name, thaw, user_code
from agentfsm.runtime.approval import hook_limit_s
from agentfsm.runtime.context import Context
from agentfsm.runtime.run_context import run_context
from agentfsm.runtime.tool_execution import failed_result
from agentfsm.runtime.tools import describe_validation_error


class AnswerRefusedError(Exception):
    """An output validator has refused the answer; the text says why, for the model."""


async def validate_reply(context: Context, parsed: ReplyParsed) -> ReplyParsed:
    """What a reply with an answer says after the agent's output validators."""
    try:
        answer = await _validate_answer(context, parsed.answer)
    except AnswerRefusedError as error:
        return ReplyParsed(malformed=f"{REFUSED_ANSWER}{error}")
    return parsed if answer is parsed.answer else ReplyParsed(answer=answer)


async def validate_ending(context: Context, call: ToolCall, result: ToolResult) -> ToolResult:
    """The result of a call that ends the run; a failed one if its value has another type, or a validator refuses it."""
    adapter = context.config.output_adapter
    if adapter is not None:
        try:
            adapter.validate_json(to_json(result.value))
        except Exception as error:  # a validator of the type may raise anything
            text = f"its result does not have the required format ({describe_validation_error(error)})"
            return failed_result(call, FailureKind.tool_error, text, type(error).__name__)
    if not context.config.output_validators:
        return result
    try:
        return replace(result, value=await _validate_answer(context, result.value))
    except AnswerRefusedError as error:
        text = f"the answer was checked and refused: {error}"
        return failed_result(call, FailureKind.tool_error, text, type(error).__name__)


async def _validate_answer(context: Context, answer: Any) -> Any:
    """An answer as JSON data, as the agent's output validators leave it; the same object if they change nothing.

    Raises:
        AnswerRefusedError: One of them refuses it.
        TypeError: One of them changed it into something that is not an answer of the agent's output type.
    """
    adapter = context.config.output_adapter
    value = thaw(answer) if adapter is None else adapter.validate_json(to_json(answer))
    before = _as_json(context, value)
    context.recorder.push()
    for each in context.config.output_validators:
        returned = await _call(context, each, value)
        value = value if returned is None else returned
    after = _as_json(context, value)
    if after == before:
        return answer
    if adapter is None and not isinstance(after, str):
        raise TypeError(f"the output validators left {type(after).__name__} as an answer, which must be a string")
    if adapter is not None:
        adapter.validate_json(to_json(after))
    return after


def _as_json(context: Context, value: Any) -> Any:
    adapter = context.config.output_adapter
    return value if adapter is None else adapter.dump_python(value, mode="json", by_alias=True)


async def _call(context: Context, validator: Callable[[Any, Any], Any], value: Any) -> Any:
    """What a validator returns."""
    try:
        with user_code("output validator", validator, context.run.change_attempts):
            returned = validator(run_context(context.run, context.deps), value)
            return await context.timeout.run(returned, hook_limit_s(context)) if isawaitable(returned) else returned
    except (ValueError, AssertionError) as error:
        text = describe_validation_error(error) if hasattr(error, "errors") else str(error)
        raise AnswerRefusedError(text or f"{code_name(validator)} refused it") from error
