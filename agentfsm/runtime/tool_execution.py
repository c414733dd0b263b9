"""Executes one tool call: validation, timeout, threads, and conversion of the return value or the error into a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agentfsm.errors import JournalError, StoreError, ToolError
from agentfsm.loop import prompts
from agentfsm.loop.failures import TOOL_REPORTABLE_KINDS, Failure, FailureKind, describe_exception
from agentfsm.loop.messages import Image, ToolCall, ToolResult
from agentfsm.loop.state import SuspendedSubRun
from agentfsm.runtime.context import Timeout, being_cancelled
from agentfsm.runtime.tools import Delegation, Tool, ToolContext, problems

__all__ = [
    "failed_result",
    "run_call",
    "run_in_thread",
    "to_model_content",
    "validate_call",
]


def to_model_content(value: Any) -> tuple[str, tuple[Image, ...]]:
    """The text and the pictures of a value.

    A text stands as it is and None says ``done``; an ``Image`` is shown and leaves a note in the text, and so
    does each one in a list or tuple, between its other parts; anything else is told as JSON, or by ``str``.
    """
    if isinstance(value, str):
        return value, ()
    if isinstance(value, Image):
        return value.text_placeholder, (value,)
    if isinstance(value, (list, tuple)):
        parts = [part for part in cast("list[object]", value) if part is not None]
        if images := tuple(part for part in parts if isinstance(part, Image)):
            return "\n".join(
                part.text_placeholder if isinstance(part, Image) else _as_text(part) for part in parts
            ), images
    return _as_text(cast("object", value)), ()


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "done"
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, UnicodeEncodeError, ValueError):
        return str(value)


def failed_result(
    call: ToolCall, kind: FailureKind, text: str, error_class: str = "", tool: Tool | None = None
) -> ToolResult:
    """The result of a call that failed."""
    failure = Failure(kind=kind, explanation=f"{call.name}: {text}", metadata={"tool": call.name})
    return _failure_result(call, failure, text, error_class, tool)


def _failure_result(call: ToolCall, failure: Failure, text: str, error_class: str, tool: Tool | None) -> ToolResult:
    retryable = tool is not None and tool.idempotent and tool.retryable
    return ToolResult(call.id, call.name, text, "failed", failure, error_class, retryable=retryable)


def validate_call(call: ToolCall, tools: Any) -> tuple[Tool, dict[str, Any]] | ToolResult:
    """The tool of a call and its checked arguments, or the result that says why it cannot run."""
    tool: Tool | None = tools.get(call.name)
    if tool is None:
        return failed_result(call, FailureKind.unknown_tool, prompts.unknown_tool_text(call.name, tools))
    if call.malformed is not None:
        text = prompts.invalid_arguments_text(call.name, [call.malformed])
        return failed_result(call, FailureKind.invalid_arguments, text)
    try:
        return tool, tool.arguments(call.arguments)
    except ValidationError as error:
        text = prompts.invalid_arguments_text(call.name, problems(error))
        return failed_result(call, FailureKind.invalid_arguments, text)
    except Exception as error:  # out of a validator of the tool's, or a schema that a server gave
        return _exception_result(call, tool, error)


async def run_call(
    call: ToolCall,
    tool: Tool,
    arguments: dict[str, Any],
    context: ToolContext | None,
    timeout: Timeout,
    delegation: Delegation | None = None,
) -> ToolResult | SuspendedSubRun:
    """Run one call. Whatever the tool does, there is a result; only cancellation passes through.

    Args:
        call: The call.
        tool: Its tool.
        arguments: Its checked arguments.
        context: What the tool may know, where it takes that.
        timeout: The time limit, set to the call's seconds. A plain function past its time is abandoned:
            its thread goes on, and what it returns is dropped.
        delegation: Who answers in the tool's place, for a sub-agent's call.

    Returns:
        The result; or the sub-agent's run, where that waits for a person.
    """
    try:
        with timeout:
            if delegation is not None:
                return await delegation.execute(arguments)
            if tool.is_async:
                value = await (
                    tool.function(context, **arguments) if context is not None else tool.function(**arguments)
                )
            elif tool.control is not None:
                value = tool.function(**arguments)
            else:
                value = await run_in_thread(tool.function, context, arguments)
                if isawaitable(value):  # a plain wrapper around an async function
                    value = await value
                elif isasyncgen(value):
                    value = [each async for each in value]
        return _success_result(call, tool, value)
    except TimeoutError as error:
        text = f"timed out after {timeout.seconds:g} s" if timeout.expired else describe_exception(error)
        return failed_result(call, FailureKind.tool_error, text, "TimeoutError", tool)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _exception_result(call, tool, error)
    except (Exception, SystemExit) as error:
        if delegation is not None and isinstance(error, (StoreError, JournalError)):
            raise  # a run that cannot be written down must not go on
        return _exception_result(call, tool, error)


def _exception_result(call: ToolCall, tool: Tool, error: BaseException) -> ToolResult:
    """The result of a call out of which an exception came."""
    if isinstance(error, ToolError):
        return _tool_error_result(call, tool, error)
    kind = FailureKind.environment_error if isinstance(error, OSError) else FailureKind.tool_error
    return failed_result(call, kind, describe_exception(error), type(error).__name__, tool)


def _tool_error_result(call: ToolCall, tool: Tool, error: ToolError) -> ToolResult:
    kind = next((kind for kind in TOOL_REPORTABLE_KINDS if kind == error.kind), FailureKind.tool_error)
    failure = Failure(
        kind=kind,
        explanation=f"{call.name}: {error}",
        blockers=tuple(map(str, error.blockers)),
        metadata={"tool": call.name},
    )
    return _failure_result(call, failure, str(error), type(error).__name__, tool)


def _success_result(call: ToolCall, tool: Tool, value: Any) -> ToolResult:
    if isinstance(value, Failure):
        kind = value.kind if value.kind in TOOL_REPORTABLE_KINDS else FailureKind.tool_error
        failure = value.model_copy(update={"kind": kind, "metadata": {"tool": call.name, **value.metadata}})
        return _failure_result(call, failure, value.explanation, "", tool)
    ending = tool.control or ("done" if tool.ends_run else None)
    content, images = to_model_content(value)
    kept = None if ending is None else _ending_value(call, tool, value)
    return ToolResult(call.id, call.name, content, ending=ending, value=kept, images=images)


def _ending_value(call: ToolCall, tool: Tool, value: Any) -> Any:
    """What an ending brings along, as JSON: for ``return_done`` the argument as it came, which fits its type."""
    if tool.control == "done" and "output" in call.arguments:
        return call.arguments["output"]
    return to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="null")


async def run_in_thread(function: Callable[..., Any], context: ToolContext | None, arguments: dict[str, Any]) -> Any:
    """Run a plain function in a daemon thread of its own, so that one that hangs holds up nobody.

    A shared pool would lose a worker to each function that never returns, and would keep the
    interpreter from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    variables = contextvars.copy_context()

    def set_outcome(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run_function() -> None:
        value: Any = None
        caught: BaseException | None = None
        try:
            value = variables.run(function, *(() if context is None else (context,)), **arguments)
            if isgenerator(value):  # its code has yet to run: here, and not where the loop is
                value = variables.run(list, value)
        except StopIteration as error:  # a future cannot carry it
            caught = RuntimeError(describe_exception(error))
        except BaseException as error:
            caught = error if isinstance(error, Exception) else RuntimeError(describe_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the value any more
            loop.call_soon_threadsafe(set_outcome, value, caught)

    threading.Thread(target=run_function, name=f"agentfsm-{getattr(function, '__name__', 'tool')}", daemon=True).start()
    return await done
