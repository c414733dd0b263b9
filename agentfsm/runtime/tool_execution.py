"""Executes one tool call: validation, timeout, threads, and turning its return value or error into a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import isasyncgen, isawaitable, isgenerator
from queue import Empty, SimpleQueue
from typing import Any, cast

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agentfsm.errors import JournalError, StoreError, ToolError
from agentfsm.loop import prompts
from agentfsm.loop.failures import TOOL_REPORTABLE_KINDS, Failure, FailureKind, describe_exception
from agentfsm.loop.human_input import SuspendedSubRun
from agentfsm.loop.messages import Image, ToolCall, ToolResult, new_tool_result
from agentfsm.loop.read_only import MAX_NESTING, FrozenDict
from agentfsm.loop.withholding import MASK, secret_values
from agentfsm.runtime.context import LongWait
from agentfsm.runtime.delegation import Delegation
from agentfsm.runtime.event_filter import EventFilter
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.timeout import CutOffError, TimeLimitError, Timeout, reraise_cancellation
from agentfsm.runtime.tools import Tool, call_secrets, problems


def to_model_content(value: Any) -> tuple[str, tuple[Image, ...]]:
    """The text and the images for a value that a tool returned.

    A string is used unchanged, and None becomes ``done``. An ``Image`` is sent as an image with a placeholder in the
    text; so is each ``Image`` in a list or tuple, between its other items. Anything else becomes JSON, or
    ``str(value)``.
    """
    if isinstance(value, Image):
        return value.text_placeholder, (value,)
    if isinstance(value, (list, tuple)):
        items = [item for item in cast("list[object]", value) if item is not None]
        if images := tuple(item for item in items if isinstance(item, Image)):
            return "\n".join(
                item.text_placeholder if isinstance(item, Image) else _as_text(item) for item in items
            ), images
    return _as_text(value), ()  # pyright: ignore[reportUnknownArgumentType]  # a ``cast`` is called at run time


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
    """The result of a failed call."""
    failure = Failure(kind=kind, explanation=f"{call.name}: {text}", metadata={"tool": call.name})
    return _failure_result(call, failure, text, error_class, tool)


def _failure_result(call: ToolCall, failure: Failure, text: str, error_class: str, tool: Tool | None) -> ToolResult:
    retryable = tool is not None and tool.idempotent and tool.retryable
    return ToolResult(call.id, call.name, text, "failed", failure, error_class, retryable=retryable)


def invalid_arguments(call: ToolCall, *reasons: str) -> ToolResult:
    """The result of a call whose arguments are invalid."""
    text = prompts.invalid_arguments_text(call.name, reasons)
    return failed_result(call, FailureKind.invalid_arguments, text)


def validate_call(call: ToolCall, tools: Any) -> tuple[Tool, dict[str, Any]] | ToolResult:
    """The tool of a call and its validated arguments, or a failed result that says why it cannot run."""
    tool: Tool | None = tools.get(call.name)
    if tool is None:
        return failed_result(call, FailureKind.unknown_tool, prompts.unknown_tool_text(call.name, tools))
    if call.malformed is not None:
        return invalid_arguments(call, call.malformed)
    if call.arguments.__class__ is not FrozenDict:  # too deeply nested to be frozen
        return invalid_arguments(call, f"they are nested more than {MAX_NESTING} deep")
    try:
        return tool, tool.arguments(call.arguments)
    except ValidationError as error:
        return invalid_arguments(call, *problems(error))
    except Exception as error:  # raised by a validator of the tool's types, or by a remote server's schema
        return _exception_result(call, tool, error)


async def run_call(
    call: ToolCall,
    tool: Tool,
    arguments: dict[str, Any],
    context: ToolContext[Any] | None,
    timer: Timeout,
    limit_s: float,
) -> ToolResult:
    """Run one call. Any exception of the tool becomes a failed result; only cancellation is raised.

    A tool that is still running at its time limit is cancelled. One that does not stop then is abandoned: a plain
    function continues in its thread, and its return value is discarded; an async one is closed where it is.

    Raises:
        asyncio.CancelledError: The run is being cancelled.
    """
    try:
        if tool.is_async:
            waiting = tool.function(context, **arguments) if context is not None else tool.function(**arguments)
            value = await timer.run(waiting, limit_s)
        elif tool.control is not None:
            value = tool.function(**arguments)
        else:
            value = await timer.run(_call_plain_function(tool.function, context, arguments), limit_s)
        result = _success_result(call, tool, value)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        reraise_cancellation(error)
        result = _exception_result(call, tool, error)
    if tool.has_secrets and (defaults := _secret_defaults(call, tool, arguments)):
        return dataclasses.replace(result, withheld=(*result.withheld, *defaults))
    return result


def _secret_defaults(call: ToolCall, tool: Tool, arguments: dict[str, Any]) -> list[Any]:
    """The secrets among a call's validated arguments that the call left to their defaults."""
    left = {name: value for name, value in arguments.items() if name not in call.arguments}
    given = call_secrets(tool, call.arguments)
    found = (*_secrets_in(arguments), *secret_values(left, tool.secret, {}))
    return [value for value in found if isinstance(value, str | int | float) and value not in given]


async def run_delegation(
    call: ToolCall, tool: Tool, arguments: dict[str, Any], delegation: Delegation, timer: Timeout, limit_s: float
) -> ToolResult | SuspendedSubRun:
    """Run one call that a sub-agent answers; its run is cancelled at the time limit, and awaited until it has ended.

    Returns:
        The result; or the sub-agent's suspended run, if it waits for a human.

    Raises:
        asyncio.CancelledError: The run is being cancelled.
        StoreError: A sub-agent's journal cannot be written.
        JournalError: A sub-agent's journal cannot be read.
        LongWait: The sub-agent's run is not to continue now.
    """
    try:
        return await timer.run(delegation.execute(arguments), limit_s)
    except (StoreError, JournalError, LongWait):
        raise  # the run must not continue
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        reraise_cancellation(error)
        return _exception_result(call, tool, error)


async def _call_plain_function(function: Callable[..., Any], context: ToolContext[Any] | None, arguments: Any) -> Any:
    value = await run_in_thread(function, context, arguments)
    if isawaitable(value):  # a plain wrapper around an async function
        return await value
    return [each async for each in value] if isasyncgen(value) else value


def _exception_result(call: ToolCall, tool: Tool, error: BaseException) -> ToolResult:
    if isinstance(error, ToolError):
        return _tool_error_result(call, tool, error)
    if isinstance(error, CutOffError):
        return ToolResult(call.id, call.name, prompts.cut_off_text(str(error)), "cut_off")
    if isinstance(error, TimeLimitError):
        return failed_result(call, FailureKind.tool_error, str(error), "TimeoutError", tool)
    environment = isinstance(error, OSError) and not isinstance(error, TimeoutError)  # a TimeoutError is an OSError
    kind = FailureKind.environment_error if environment else FailureKind.tool_error
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
    found = tuple(_secrets_in(value)) if MASK in content and not isinstance(value, str) else ()
    if ending is None:
        return new_tool_result(
            call.id, call.name, content, "done", None, "", None, None, False, "", None, images, 0, found
        )
    output = _ending_value(call, tool, value)
    return ToolResult(call.id, call.name, content, ending=ending, value=output, images=images, withheld=found)


def cut_result(result: ToolResult, limit: int, secrets: EventFilter) -> ToolResult:
    """A result of which the model gets a number of characters at most; no secret is split, so that all are withheld."""
    secrets.add(result.withheld)
    failure = result.failure
    if failure is not None:
        texts = [_cut_text(text, limit, secrets) for text in (failure.explanation, *failure.blockers)]
        failure = failure.model_copy(update={"explanation": texts[0], "blockers": tuple(texts[1:])})
    return dataclasses.replace(result, content=_cut_text(result.content, limit, secrets), failure=failure)


def _cut_text(text: str, limit: int, secrets: EventFilter) -> str:
    """The beginning and the end of a text that is too long, and how much is left out between them."""
    if len(text) <= limit:
        return text
    end, _ = secrets.secret_at(text, limit - limit // 2)
    _, start = secrets.secret_at(text, len(text) - limit // 2)
    return f"{text[:end]}{prompts.left_out_text(start - end, len(text))}{text[start:]}"


def _secrets_in(value: object, depth: int = 0) -> Iterator[str]:
    """The values of each ``SecretStr`` and ``SecretBytes`` in a value."""
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, SecretBytes):
        yield value.get_secret_value().decode(errors="replace")
    elif depth < MAX_NESTING:
        for each in _parts(value):
            yield from _secrets_in(each, depth + 1)


def _parts(value: object) -> Iterable[object]:
    """What a value consists of; nothing if it is not a container."""
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value).values()
    if isinstance(value, list | tuple | set | frozenset):
        return cast("Iterable[object]", value)
    if isinstance(value, BaseModel):
        return (*vars(value).values(), *(value.model_extra or {}).values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return ()


def _ending_value(call: ToolCall, tool: Tool, value: Any) -> Any:
    """The output of a call that ends the run, as JSON; for ``return_done``, its argument as the model gave it."""
    if tool.control == "done":
        return next(iter(call.arguments.values()))
    return to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="null")


async def run_in_thread(
    function: Callable[..., Any], context: ToolContext[Any] | None, arguments: dict[str, Any]
) -> Any:
    """Run a plain function in a daemon thread that does nothing else meanwhile, so that one that hangs blocks nothing.

    A thread pool of a fixed size would lose a thread to each function that never returns, and would keep the
    interpreter from exiting.
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
        raised: BaseException | None = None
        try:
            value = variables.run(function, *(() if context is None else (context,)), **arguments)
            if isgenerator(value):  # a generator's code has not run yet: run it here, not in the event loop's thread
                value = variables.run(list, value)
        except StopIteration as error:  # a future cannot hold it
            raised = RuntimeError(describe_exception(error))
        except BaseException as error:
            raised = error if isinstance(error, Exception) else RuntimeError(describe_exception(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the value is not needed any more
            loop.call_soon_threadsafe(set_outcome, value, raised)

    _start_in_thread(run_function)
    return await done


IDLE_S = 1.0
"""Seconds for which a thread that has run a function waits for another one: to start a thread takes 50 microseconds."""

_idle_threads: deque[SimpleQueue[Callable[[], None]]] = deque()
"""The queues of the threads that wait. Whoever takes one out gives it something to run."""


def _start_in_thread(work: Callable[[], None]) -> None:
    """Run something in a thread that waits, or else in a new one."""
    try:
        _idle_threads.pop().put(work)
    except IndexError:
        threading.Thread(target=_run_in_turn, args=([work],), name="agentfsm-tool", daemon=True).start()


def _run_in_turn(first: list[Callable[[], None]]) -> None:
    """Run one thing after another, until there has been none for a while."""
    work, given = first.pop(), SimpleQueue[Callable[[], None]]()
    while True:
        work()
        del work  # it holds arguments and the value
        _idle_threads.append(given)
        try:
            work = given.get(timeout=IDLE_S)
        except Empty:
            with contextlib.suppress(ValueError):  # somebody has taken it out just now
                _idle_threads.remove(given)
                return
            work = given.get()


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_idle_threads.clear)
