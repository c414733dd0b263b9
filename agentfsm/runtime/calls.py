"""How one tool call runs: checked, timed, in a thread where it is plain, and always with a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from agentfsm.core import wording
from agentfsm.core.failures import Failure, FailureKind
from agentfsm.core.messages import ToolCall, ToolResult
from agentfsm.core.state import Held
from agentfsm.errors import JournalError, StoreError, ToolError
from agentfsm.runtime.telling import told
from agentfsm.runtime.tools import Delegation, Tool, ToolContext, problems
from agentfsm.runtime.watchdog import Watchdog

__all__ = ["REPORTABLE", "being_cancelled", "check_call", "failed", "in_thread", "run_call"]

REPORTABLE = frozenset(
    {
        FailureKind.tool_error,
        FailureKind.environment_error,
        FailureKind.ambiguous_input,
        FailureKind.scope_too_large,
        FailureKind.capability_gap,
        FailureKind.kernel_invalidated,
        FailureKind.policy_violation,
    }
)
"""The kinds that a tool may report of itself."""


def failed(call: ToolCall, kind: FailureKind, text: str, error_class: str = "", tool: Tool | None = None) -> ToolResult:
    """The result of a call that failed."""
    failure = Failure(kind=kind, explanation=f"{call.name}: {text}", metadata={"tool": call.name})
    return _with(call, failure, text, error_class, tool)


def _with(call: ToolCall, failure: Failure, text: str, error_class: str, tool: Tool | None) -> ToolResult:
    retryable = tool is not None and tool.idempotent and tool.retryable
    return ToolResult(call.id, call.name, text, "failed", failure, error_class, retryable=retryable)


def check_call(call: ToolCall, tools: Any) -> tuple[Tool, dict[str, Any]] | ToolResult:
    """The tool of a call and its checked arguments, or the result that says why it cannot run."""
    tool: Tool | None = tools.get(call.name)
    if tool is None:
        return failed(call, FailureKind.unknown_tool, wording.unknown_tool(call.name, tools))
    if call.malformed is not None:
        text = wording.invalid_arguments(call.name, [call.malformed])
        return failed(call, FailureKind.invalid_arguments, text)
    try:
        return tool, tool.arguments(call.arguments)
    except ValidationError as error:
        text = wording.invalid_arguments(call.name, problems(error))
        return failed(call, FailureKind.invalid_arguments, text)
    except Exception as error:  # out of a validator of the tool's, or a schema that a server gave
        return _fell(call, tool, error)


async def run_call(
    call: ToolCall,
    tool: Tool,
    arguments: dict[str, Any],
    context: ToolContext | None,
    limit: Watchdog,
    delegation: Delegation | None = None,
) -> ToolResult | Held:
    """Run one call. Whatever the tool does, there is a result; only cancellation passes through.

    Args:
        call: The call.
        tool: Its tool.
        arguments: Its checked arguments.
        context: What the tool may know, where it takes that.
        limit: The time limit, set to the call's seconds. A plain function past its time is abandoned:
            its thread goes on, and what it returns is dropped.
        delegation: Who answers in the tool's place, for a sub-agent's call.

    Returns:
        The result; or the sub-agent's run, where that waits for a person.
    """
    try:
        with limit:
            if delegation is not None:
                return await delegation.answer(arguments)
            if tool.is_async:
                value = await (
                    tool.function(context, **arguments) if context is not None else tool.function(**arguments)
                )
            elif tool.control is not None:
                value = tool.function(**arguments)
            else:
                value = await in_thread(tool.function, context, arguments)
                if isawaitable(value):  # a plain wrapper around an async function
                    value = await value
                elif isasyncgen(value):
                    value = [each async for each in value]
        return _done(call, tool, value)
    except TimeoutError as error:
        text = f"timed out after {limit.seconds:g} s" if limit.expired else wording.raised(error)
        return failed(call, FailureKind.tool_error, text, "TimeoutError", tool)
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        return _fell(call, tool, error)
    except (Exception, SystemExit) as error:
        if delegation is not None and isinstance(error, (StoreError, JournalError)):
            raise  # a run that cannot be written down must not go on
        return _fell(call, tool, error)


def being_cancelled() -> bool:
    """Whether somebody cancels this task; else a CancelledError came out of what it awaited, as any error may."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _fell(call: ToolCall, tool: Tool, error: BaseException) -> ToolResult:
    """The result of a call out of which an exception came."""
    if isinstance(error, ToolError):
        return _reported(call, tool, error)
    kind = FailureKind.environment_error if isinstance(error, OSError) else FailureKind.tool_error
    return failed(call, kind, wording.raised(error), type(error).__name__, tool)


def _reported(call: ToolCall, tool: Tool, error: ToolError) -> ToolResult:
    kind = next((kind for kind in REPORTABLE if kind == error.kind), FailureKind.tool_error)
    failure = Failure(
        kind=kind,
        explanation=f"{call.name}: {error}",
        blockers=tuple(map(str, error.blockers)),
        metadata={"tool": call.name},
    )
    return _with(call, failure, str(error), type(error).__name__, tool)


def _done(call: ToolCall, tool: Tool, value: Any) -> ToolResult:
    if isinstance(value, Failure):
        kind = value.kind if value.kind in REPORTABLE else FailureKind.tool_error
        failure = value.model_copy(update={"kind": kind, "metadata": {"tool": call.name, **value.metadata}})
        return _with(call, failure, value.explanation, "", tool)
    ending = tool.control or ("done" if tool.ends_run else None)
    content, images = told(value)
    kept = None if ending is None else _ending_value(call, tool, value)
    return ToolResult(call.id, call.name, content, ending=ending, value=kept, images=images)


def _ending_value(call: ToolCall, tool: Tool, value: Any) -> Any:
    """What an ending brings along, as JSON: for ``return_done`` the argument as it came, which fits its type."""
    if tool.control == "done" and "output" in call.arguments:
        return call.arguments["output"]
    return to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="null")


async def in_thread(function: Callable[..., Any], context: ToolContext | None, arguments: dict[str, Any]) -> Any:
    """Run a plain function in a daemon thread of its own, so that one that hangs holds up nobody.

    A shared pool would lose a worker to each function that never returns, and would keep the
    interpreter from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    variables = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value: Any = None
        caught: BaseException | None = None
        try:
            value = variables.run(function, *(() if context is None else (context,)), **arguments)
            if isgenerator(value):  # its code has yet to run: here, and not where the loop is
                value = variables.run(list, value)
        except StopIteration as error:  # a future cannot carry it
            caught = RuntimeError(wording.raised(error))
        except BaseException as error:
            caught = error if isinstance(error, Exception) else RuntimeError(wording.raised(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the value any more
            loop.call_soon_threadsafe(settle, value, caught)

    threading.Thread(target=work, name=f"agentfsm-{getattr(function, '__name__', 'tool')}", daemon=True).start()
    return await done
