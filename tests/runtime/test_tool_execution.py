"""Executing one tool call: whatever the tool does, there is one result, of the right kind, in time."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from agentfsm.errors import ToolError
from agentfsm.loop.failures import TOOL_REPORTABLE_KINDS, Failure, FailureKind
from agentfsm.loop.messages import ToolCall, ToolResult
from agentfsm.runtime import tool_execution
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.timeout import Timeout
from agentfsm.runtime.tool_execution import run_call, run_in_thread, validate_call
from agentfsm.runtime.tools import Tool, as_tool, tool
from tests.helpers.scenarios import run_async

K = FailureKind
CALL = ToolCall("c1", "work", {})


def result_of(function: Any, *, limit: float = 5.0, context: ToolContext | None = None, **arguments: Any) -> ToolResult:
    made: Tool = as_tool(function, name="work")

    async def scene() -> ToolResult:
        return await run_call(CALL, made, arguments, context, Timeout(), limit)

    return run_async(scene)


def raising(error: BaseException, *, later: bool = False) -> Any:
    def now() -> None:
        raise error

    async def soon() -> None:
        await asyncio.sleep(0)
        raise error

    return soon if later else now


# -- results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        ("", ""),
        (None, "done"),
        (42, "42"),
        (True, "true"),
        ([1, "a", None], '[1,"a",null]'),
        ({"a": {"b": 1.5}}, '{"a":{"b":1.5}}'),
        (("x",), '["x"]'),
        (b"raw", '"raw"'),
        (b"\xff\xfe", "b'\\xff\\xfe'"),
        ("half \ud800", "half \ud800"),
        (complex(1, 2), '"1+2j"'),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_what_a_tool_returns_is_sent_as_text(value, content, later):
    def now() -> Any:
        return value

    async def soon() -> Any:
        return value

    result = result_of(soon if later else now)
    assert (result.call_id, result.name, result.status, result.failure) == ("c1", "work", "done", None)
    assert result.content == content


def test_a_value_that_is_not_json_is_sent_as_its_str():
    class Odd:
        def __str__(self) -> str:
            return "an odd thing"

    assert result_of(lambda: Odd()).content == "an odd thing"


def test_a_result_that_has_no_str_is_a_failure():
    class Worse:
        def __str__(self) -> str:
            raise ValueError("no words")

    result = result_of(lambda: Worse())
    assert (result.status, result.failure.kind) == ("failed", K.tool_error)


def test_a_plain_function_that_returns_a_coroutine_is_awaited():
    """A decorator around an async function hides that it is one."""

    async def inner() -> str:
        await asyncio.sleep(0)
        return "awaited"

    assert result_of(lambda: inner()).content == "awaited"


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("bad"), K.tool_error, "ValueError: bad"),
        (KeyError("k"), K.tool_error, "KeyError: 'k'"),
        (RuntimeError(), K.tool_error, "RuntimeError"),
        (AssertionError("no"), K.tool_error, "AssertionError: no"),
        (ExceptionGroup("many", [ValueError("x")]), K.tool_error, "ExceptionGroup: many (1 sub-exception)"),
        (OSError("disk"), K.environment_error, "OSError: disk"),
        (FileNotFoundError(2, "no file", "x"), K.environment_error, "FileNotFoundError: [Errno 2] no file: 'x'"),
        (PermissionError("no"), K.environment_error, "PermissionError: no"),
        (ConnectionRefusedError("x"), K.environment_error, "ConnectionRefusedError: x"),
        (BlockingIOError("x"), K.environment_error, "BlockingIOError: x"),
        (TimeoutError("its own"), K.tool_error, "TimeoutError: its own"),
    ],
)  # fmt: skip
def test_each_exception_has_its_kind(error, kind, words, later):
    result = result_of(raising(error, later=later))
    assert (result.status, result.content, result.error_class) == ("failed", words, type(error).__name__)
    assert result.failure == Failure(kind=kind, explanation=f"work: {words}")
    assert result.failure.metadata == {"tool": "work"}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("x")])
def test_what_would_end_a_program_or_an_iteration_is_a_failure_of_the_tool(error, later):
    result = result_of(raising(error, later=later))
    assert (result.status, result.failure.kind) == ("failed", K.tool_error)


def test_an_undecodable_file_name_in_an_error_is_escaped():
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    result = result_of(raising(FileNotFoundError(2, "No such file", name)))
    assert result.failure.kind is K.environment_error
    assert "caf" in result.failure.explanation


@pytest.mark.parametrize("kind", sorted(K))
def test_a_tool_may_report_the_kinds_that_are_its_own_to_report(kind):
    result = result_of(raising(ToolError("too much", kind=kind.value, blockers=("a", "b"))))
    wanted = kind if kind in TOOL_REPORTABLE_KINDS else K.tool_error
    assert (result.content, result.error_class) == ("too much", "ToolError")
    assert result.failure == Failure(kind=wanted, explanation="work: too much", blockers=("a", "b"))


def test_the_kinds_that_a_tool_may_report():
    assert {k.value for k in TOOL_REPORTABLE_KINDS} == {
        "tool_error", "environment_error", "ambiguous_input", "scope_too_large", "capability_gap",
        "kernel_invalidated", "policy_violation",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["bad_luck", None, 7, ["tool_error"]])
def test_a_kind_that_is_none_is_a_tool_error(kind):
    assert result_of(raising(ToolError("x", kind=kind))).failure.kind is K.tool_error


def test_a_single_blocker_may_be_a_string():
    assert result_of(raising(ToolError("x", blockers="no printer"))).failure.blockers == ("no printer",)


def test_blockers_that_are_not_strings_are_converted():
    reasons: Any = (1, ValueError("two"))
    assert result_of(raising(ToolError("x", blockers=reasons))).failure.blockers == ("1", "two")


@pytest.mark.parametrize(("kind", "wanted"), [("scope_too_large", "scope_too_large"), ("time_limit", "tool_error")])
def test_a_tool_may_return_a_failure(kind, wanted):
    returned = Failure(kind=kind, explanation="too big", metadata={"rows": 9}, partial_data=[1])
    result = result_of(lambda: returned)
    assert (result.status, result.content, result.failure.kind) == ("failed", "too big", K(wanted))
    assert result.failure.metadata == {"tool": "work", "rows": 9}
    assert result.failure.partial_data == [1]


def test_only_an_idempotent_and_retryable_tools_failure_may_be_retried_unchanged():
    def fail() -> None:
        raise ValueError

    async def scene(made: Tool) -> ToolResult:
        return await run_call(CALL, made, {}, None, Timeout(), 5)

    assert not run_async(lambda: scene(as_tool(fail))).retryable
    assert not run_async(lambda: scene(tool(idempotent=True)(fail))).retryable
    assert run_async(lambda: scene(tool(idempotent=True, retryable=True)(fail))).retryable


# -- endings ------------------------------------------------------------------------------------------


def test_a_tool_that_ends_the_run_says_so_and_has_its_value():
    async def scene() -> ToolResult:
        made = tool(ends_run=True)(lambda_named_work)
        return await run_call(CALL, made, {}, None, Timeout(), 5)

    def lambda_named_work() -> dict[str, Any]:
        return {"a": (1, 2)}

    result = run_async(scene)
    assert (result.ending, result.value, result.content) == ("done", {"a": [1, 2]}, '{"a":[1,2]}')


def test_a_tool_that_fails_ends_nothing():
    def fail() -> None:
        raise ValueError("x")

    async def scene() -> ToolResult:
        return await run_call(CALL, tool(ends_run=True)(fail), {}, None, Timeout(), 5)

    assert run_async(scene).ending is None


# -- time ---------------------------------------------------------------------------------------------


def test_an_async_tool_that_times_out_is_cancelled():
    async def hang() -> None:
        await asyncio.Event().wait()

    result = result_of(hang, limit=0.02)
    assert (result.status, result.content) == ("failed", "timed out after 0.02 s")
    assert (result.failure.kind, result.error_class) == (K.tool_error, "TimeoutError")


def test_a_plain_tool_that_times_out_is_abandoned_and_its_result_dropped():
    free, over = threading.Event(), threading.Event()

    def hang() -> str:
        free.wait(10)
        over.set()
        return "too late"

    try:
        result = result_of(hang, limit=0.02)
    finally:
        free.set()
    assert result.content == "timed out after 0.02 s"
    assert over.wait(10)


def test_a_tool_that_suppresses_its_timeout_has_its_result():
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "I would not stop"
        return ""

    assert result_of(stubborn, limit=0.02).content == "I would not stop"


def test_a_stray_cancellation_is_a_failure_of_the_tool():
    async def odd() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    result = result_of(odd)
    assert (result.status, result.error_class) == ("failed", "CancelledError")


def test_a_cancellation_from_outside_passes_through():
    async def hang() -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        timer = Timeout()
        task = asyncio.create_task(run_call(CALL, as_tool(hang), {}, None, timer, 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        timer.close()

    run_async(scene)


# -- threads ------------------------------------------------------------------------------------------


def test_a_plain_function_runs_in_a_thread_of_its_own_and_sees_its_callers_variables():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[Any] = []

    def look() -> None:
        seen.append((threading.current_thread() is threading.main_thread(), variable.get()))

    async def scene() -> None:
        variable.set("mine")
        await run_in_thread(look, None, {})

    run_async(scene)
    assert seen == [(False, "mine")]


def test_a_generator_runs_in_its_thread_too_and_its_items_are_its_result():
    seen: list[bool] = []

    def count() -> Iterator[int]:
        seen.append(threading.current_thread() is threading.main_thread())
        yield 1
        yield 2

    def fail() -> Iterator[int]:
        yield 1
        raise FileNotFoundError("the rest")

    assert result_of(count).content == "[1,2]"
    assert seen == [False]
    assert result_of(fail).failure.kind is K.environment_error


def test_an_asynchronous_generators_items_are_its_result():
    async def count() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)
        yield 2

    async def hang() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    assert result_of(count).content == "[1,2]"
    assert result_of(hang, limit=0.02).content == "timed out after 0.02 s"


def test_plain_tools_do_not_wait_for_each_other():
    """Two that each wait for the other end only if both run at once; so do more than a pool would hold."""
    count = 40
    barrier = threading.Barrier(count, timeout=10)

    def meet() -> int:
        return barrier.wait()

    async def scene() -> list[int]:
        return await asyncio.gather(*(run_in_thread(meet, None, {}) for _ in range(count)))

    assert sorted(run_async(scene)) == list(range(count))


def test_a_thread_that_is_free_runs_the_next_function_and_one_that_hangs_runs_nothing_else(monkeypatch):
    free, threads, started = threading.Event(), list[int](), list[threading.Thread]()

    class Counted(threading.Thread):
        def start(self) -> None:
            started.append(self)
            super().start()

    def note() -> None:
        threads.append(threading.get_ident())

    def hang() -> None:
        note()
        free.wait(10)

    async def scene() -> None:
        for _ in range(3):
            await run_in_thread(note, None, {})
            await waits_for_work()
        hanging = asyncio.create_task(run_in_thread(hang, None, {}))
        while len(threads) < 4:
            await asyncio.sleep(0.001)
        await run_in_thread(note, None, {})
        free.set()
        await hanging

    async def waits_for_work() -> None:
        while not tool_execution._idle_threads:
            await asyncio.sleep(0.001)

    tool_execution._idle_threads.clear()  # threads of other tests, which may become free meanwhile
    monkeypatch.setattr(tool_execution.threading, "Thread", Counted)
    run_async(scene)
    assert [each.name for each in started].count("agentfsm-tool") <= 2  # the first, and one beside it when it hangs
    assert len(set(threads[:4])) < 4
    assert threads[4] != threads[3]


def test_a_thread_keeps_nothing_of_the_function_that_it_has_run():
    class Value:
        pass

    async def scene() -> weakref.ref[Value]:
        argument = Value()
        assert await run_in_thread(lambda it: it, None, {"it": argument}) is argument
        while not tool_execution._idle_threads:
            await asyncio.sleep(0.001)
        return weakref.ref(argument)

    tool_execution._idle_threads.clear()
    kept = run_async(scene)
    gc.collect()
    assert kept() is None


def test_a_thread_ends_that_has_had_nothing_to_do_for_a_while(monkeypatch):
    monkeypatch.setattr(tool_execution, "IDLE_S", 0.01)
    tool_execution._idle_threads.clear()

    async def scene() -> threading.Thread:
        thread = await run_in_thread(threading.current_thread, None, {})
        await asyncio.to_thread(thread.join, 10)
        return thread

    assert not run_async(scene).is_alive()
    assert not tool_execution._idle_threads


FORKING = """
import asyncio, os
from agentfsm.runtime.tool_execution import run_in_thread

def answer():
    return 42

asyncio.run(run_in_thread(answer, None, {}))
child = os.fork()
value = asyncio.run(asyncio.wait_for(run_in_thread(answer, None, {}), 10))
os._exit(value) if child == 0 else print(value, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    """Those of its parent do not run in it."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    assert subprocess.check_output(command, text=True) == "42 42\n"


def test_a_tools_context_is_its_first_argument():
    context = ToolContext("run", "session", "c1", "key", 1)

    async def later(context: ToolContext, x: int) -> str:
        return f"{context.call_id} {x}"

    def now(context: ToolContext, x: int) -> str:
        return f"{context.call_id} {x}"

    assert result_of(later, context=context, x=3).content == "c1 3"
    assert result_of(now, context=context, x=3).content == "c1 3"


# -- before it runs -----------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    return a + b


TOOLS = {"zip": as_tool(add), "add": as_tool(add)}


def test_a_good_call_is_its_tool_and_its_arguments():
    assert validate_call(ToolCall("1", "add", {"a": "1", "b": 2}), TOOLS) == (TOOLS["add"], {"a": 1, "b": 2})


def test_a_call_of_an_unknown_tool_lists_the_known_ones_sorted():
    result = validate_call(ToolCall("1", "fetch", {}), TOOLS)
    assert result.failure.kind is K.unknown_tool
    assert "add, zip" in result.content


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("1", "add", {"a": 1}), "b: field required"),
        (ToolCall("1", "add", {}, malformed="no JSON"), "no JSON"),
    ],
)
def test_bad_arguments_never_run_the_tool_and_name_the_field(call, words):
    result = validate_call(call, TOOLS)
    assert (result.status, result.failure.kind) == ("failed", K.invalid_arguments)
    assert words in result.content


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("unit"), K.tool_error),
        (FileNotFoundError("rates"), K.environment_error),
        (ToolError("no"), K.tool_error),
    ],
)
def test_a_check_of_arguments_that_raises_is_a_failure_of_its_tool(error, kind):
    def check(value: int) -> int:
        raise error

    def convert(n: int) -> str:
        raise AssertionError("never runs")

    convert.__annotations__["n"] = Annotated[int, AfterValidator(check)]
    result = validate_call(ToolCall("1", "convert", {"n": 1}), {"convert": as_tool(convert)})
    assert (result.status, result.failure.kind, result.error_class) == ("failed", kind, type(error).__name__)
    assert str(error) in result.content
