"""``Timeout``: one timer for all time limits of a run, each of which holds even against code that will not stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from agentfsm.runtime.timeout import CLOSE_ATTEMPTS, TimeLimitError, Timeout
from tests.helpers.scenarios import run_async


async def forever() -> None:
    await asyncio.Event().wait()


async def value_of(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def limited(scene: Callable[[Timeout], Awaitable[Any]], grace_s: float | None = 0.01) -> Any:
    """Run a scene with a ``Timeout``; afterwards its task must not count as being cancelled."""

    async def play() -> Any:
        timeout = Timeout(grace_s)
        try:
            result = await scene(timeout)
        finally:
            timeout.close()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return result

    return run_async(play)


# -- limits -------------------------------------------------------------------------------------------


def test_an_await_that_times_out_raises_and_the_task_is_not_cancelled_by_it():
    async def scene(timeout: Timeout) -> None:
        with pytest.raises(TimeLimitError, match=r"^timed out after 0\.01 s$"):
            await timeout.run(forever(), 0.01)

    limited(scene)


def test_an_await_in_time_has_its_value_and_so_has_the_next():
    async def scene(timeout: Timeout) -> list[int]:
        return [await timeout.run(value_of(n), 60) for n in range(3)]

    assert limited(scene) == [0, 1, 2]


def test_what_never_waits_has_its_value_and_needs_no_timer():
    async def at_once() -> str:
        return "here"

    async def scene(timeout: Timeout) -> str:
        return await timeout.run(at_once(), 1e-9)

    assert limited(scene) == "here"


def test_anything_that_can_be_awaited_can_be_limited():
    class Custom:
        def __await__(self) -> Any:
            return value_of("custom").__await__()

    async def scene(timeout: Timeout) -> list[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "future")
        task = asyncio.create_task(value_of("task"))
        both = asyncio.gather(value_of("gathered"))
        shielded = asyncio.shield(asyncio.create_task(value_of("shielded")))
        return [await timeout.run(each, 60) for each in (Custom(), future, task, both, shielded)]

    assert limited(scene) == ["custom", "future", "task", ["gathered"], "shielded"]


@pytest.mark.parametrize("limits", [(60, 0.01), (0.01, 60), (0.01, 0.01)])
def test_the_limit_of_one_await_does_not_apply_to_the_next(limits):
    async def scene(timeout: Timeout) -> list[bool]:
        over = []
        for seconds in limits:
            try:
                await timeout.run(forever() if seconds < 1 else asyncio.sleep(0.02), seconds)
                over.append(False)
            except TimeoutError:
                over.append(True)
        return over

    assert limited(scene) == [seconds < 1 for seconds in limits]


def test_a_timer_that_fires_for_an_earlier_await_is_rescheduled_for_the_current_one():
    async def scene(timeout: Timeout) -> None:
        await timeout.run(asyncio.sleep(0), 0.01)
        with pytest.raises(TimeLimitError):
            await timeout.run(forever(), 0.03)

    limited(scene)


def test_a_timer_that_fires_between_awaits_has_no_effect():
    async def scene(timeout: Timeout) -> None:
        await timeout.run(asyncio.sleep(0), 0.01)
        await asyncio.sleep(0.02)
        await timeout.run(asyncio.sleep(0), 60)

    limited(scene)


@pytest.mark.parametrize("waits", [False, True])
def test_an_exception_stays_what_it_is(waits):
    async def fail() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError

    async def scene(timeout: Timeout) -> None:
        with pytest.raises(KeyError):
            await timeout.run(fail(), 60)

    limited(scene)


@pytest.mark.parametrize("wrong", [42, "text"])
def test_what_cannot_be_awaited_is_told_to_the_code_that_awaits_it(wrong):
    class Odd:
        def __await__(self) -> Any:
            yield wrong

    async def tries() -> str:
        try:
            await Odd()
        except RuntimeError as error:
            return str(error)
        return ""

    async def scene(timeout: Timeout) -> str:
        return await timeout.run(tries(), 60)

    assert repr(wrong) in limited(scene)


def test_limits_cannot_be_nested():
    async def scene(timeout: Timeout) -> None:
        async def nested() -> None:
            await timeout.run(forever(), 60)

        with pytest.raises(RuntimeError, match="one await at a time"):
            await timeout.run(nested(), 60)

    limited(scene)


def test_a_timeout_works_in_a_second_event_loop():
    timeout = Timeout()

    async def scene() -> None:
        await timeout.run(asyncio.sleep(0), 60)

    run_async(scene)
    run_async(scene)

    async def over() -> None:
        with pytest.raises(TimeLimitError):
            await timeout.run(forever(), 0.01)

    run_async(over)


def test_closing_twice_is_closing_once():
    timeout = Timeout()
    timeout.close()
    timeout.close()


# -- cancellation -------------------------------------------------------------------------------------


async def cancel_once_waiting(task: asyncio.Task[Any]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize("awaited", ["event", "task", "gather", "shield"])
def test_a_cancellation_from_outside_stays_what_it_is_and_reaches_what_is_awaited(awaited):
    cancelled: list[str] = []
    shielded: asyncio.Future[None]

    async def inner() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append("inner")
            raise

    async def outer() -> None:
        try:
            match awaited:
                case "task":
                    await asyncio.create_task(inner())
                case "gather":
                    await asyncio.gather(inner(), inner())
                case "shield":
                    await asyncio.shield(shielded)
                case _:
                    await inner()
        except asyncio.CancelledError:
            cancelled.append("outer")
            raise

    async def scene(timeout: Timeout) -> None:
        nonlocal shielded
        shielded = asyncio.get_running_loop().create_future()

        async def body() -> None:
            await timeout.run(outer(), 60)

        task = asyncio.create_task(body())
        await cancel_once_waiting(task)
        with pytest.raises(asyncio.CancelledError):
            await task

    limited(scene)
    inner_calls = {"event": 1, "task": 1, "gather": 2, "shield": 0}[awaited]
    assert cancelled == ["inner"] * inner_calls + ["outer"]


def test_a_limit_within_a_timeout_of_asyncio_leaves_it_be():
    async def scene(timeout: Timeout) -> None:
        async def body() -> None:
            await timeout.run(forever(), 60)

        with pytest.raises(TimeoutError) as raised:
            await asyncio.wait_for(body(), 0.01)
        assert not isinstance(raised.value, TimeLimitError)

    limited(scene)


def test_a_timeout_of_asyncio_within_a_limit_is_handled_where_it_is_and_starts_no_grace():
    """The coroutine goes on for much longer than the grace after its own timeout has cancelled it."""

    async def body() -> str:
        for _ in range(3):
            try:
                async with asyncio.timeout(0.001):
                    await forever()
            except TimeoutError:
                await asyncio.sleep(0.02)
        return "went on"

    async def scene(timeout: Timeout) -> str:
        return await timeout.run(body(), 60)

    assert limited(scene, grace_s=0.005) == "went on"


# -- grace --------------------------------------------------------------------------------------------


def test_a_cleanup_that_waits_runs_to_its_end_within_the_grace():
    steps: list[str] = []

    async def tidy() -> None:
        try:
            await forever()
        finally:
            for step in "abc":
                await asyncio.sleep(0.001)
                steps.append(step)

    async def scene(timeout: Timeout) -> None:
        with pytest.raises(TimeLimitError, match=r"s$"):
            await timeout.run(tidy(), 0.01)

    limited(scene, grace_s=60)
    assert steps == ["a", "b", "c"]


def test_what_suppresses_its_timeout_and_ends_within_the_grace_has_its_value():
    async def stubborn() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "anyway"

    async def scene(timeout: Timeout) -> str:
        return await timeout.run(stubborn(), 0.01)

    assert limited(scene, grace_s=60) == "anyway"


class Stubborn:
    """Swallows every cancellation, in one of several ways, until it is set free."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.free = asyncio.Event()
        self.closed = False

    async def __call__(self) -> None:
        if self.how == "task":
            await asyncio.create_task(self.loop())
        elif self.how == "gather":
            await asyncio.gather(self.loop(), self.loop())
        else:
            await self.loop()

    async def loop(self) -> None:
        try:
            while not self.free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await (asyncio.sleep(0) if self.how == "spins" else self.free.wait())
        finally:
            self.closed = True

    async def release(self) -> None:
        self.free.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


SWALLOWS = ("waits", "spins", "task", "gather")


@pytest.mark.parametrize("how", SWALLOWS)
def test_what_swallows_its_timeout_is_abandoned_after_the_grace(how):
    async def scene(timeout: Timeout) -> None:
        stubborn = Stubborn(how)
        text = r"^timed out after 0\.01 s: it did not stop within 0\.01 s of being cancelled, and was abandoned$"
        with pytest.raises(TimeLimitError, match=text):
            await timeout.run(stubborn(), 0.01)
        assert stubborn.closed is (how in ("waits", "spins"))
        assert await timeout.run(value_of("and on"), 60) == "and on"
        await stubborn.release()

    limited(scene)


def test_an_asynchronous_generator_in_what_is_abandoned_is_ended() -> None:
    async def pieces() -> AsyncGenerator[None]:
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                yield
        finally:
            await asyncio.Event().wait()  # its cleanup does not end either

    async def read(given: AsyncGenerator[None]) -> None:
        async for _ in given:
            pass

    async def scene(timeout: Timeout) -> None:
        given = pieces()
        with pytest.raises(TimeLimitError, match="abandoned"):
            await timeout.run(read(given), 0.01)
        await given.aclose()  # it would say that it is running

    limited(scene)


@pytest.mark.parametrize("how", SWALLOWS)
def test_what_swallows_a_cancellation_from_outside_is_abandoned_after_the_grace(how):
    async def scene(timeout: Timeout) -> None:
        stubborn = Stubborn(how)

        async def body() -> None:
            await timeout.run(stubborn(), 60)

        task = asyncio.create_task(body())
        await cancel_once_waiting(task)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await stubborn.release()

    limited(scene)


def test_a_timeout_that_is_patient_waits_however_long_it_takes():
    async def slow() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.03)
        return "at last"

    async def scene(timeout: Timeout) -> str:
        return await timeout.run(slow(), 0.001)

    assert limited(scene, grace_s=None) == "at last"


def test_a_cleanup_that_outlasts_the_grace_is_closed_wherever_it_waits():
    steps: list[str] = []

    async def endless() -> None:
        try:
            try:
                await forever()
            finally:
                steps.append("first")
                await forever()
        finally:
            steps.append("second")
            try:
                await forever()
            finally:
                steps.append("third")

    async def scene(timeout: Timeout) -> None:
        with pytest.raises(TimeLimitError, match="abandoned"):
            await timeout.run(endless(), 0.01)

    limited(scene)
    assert steps == ["first", "second", "third"]


IMMORTAL = """
import asyncio, gc
from agentfsm.runtime import timeout

async def immortal():
    while True:
        try:
            await asyncio.sleep(0.001)
        except BaseException:
            pass

async def scene():
    try:
        await timeout.Timeout(0.01).run(immortal(), 0.01)
    except Exception as error:
        print(type(error).__name__)

asyncio.run(scene())
vars(timeout).clear()  # as at the interpreter's end, in an order that depends on what else was imported
gc.collect()
"""


def test_a_process_ends_although_something_refused_to_be_closed():
    done = subprocess.run([sys.executable, "-c", IMMORTAL], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "TimeLimitError\n"


def test_what_refuses_even_to_be_closed_is_left_and_never_runs_again(caplog):
    woken = 0

    async def immortal() -> None:
        nonlocal woken
        while True:
            try:
                await asyncio.sleep(0.001)
            except BaseException:  # that is the point
                woken += 1

    async def scene(timeout: Timeout) -> int:
        with pytest.raises(TimeLimitError, match="abandoned"):
            await timeout.run(immortal(), 0.01)
        count = woken
        await asyncio.sleep(0.02)
        assert woken == count
        return count

    with caplog.at_level(logging.WARNING):
        assert limited(scene) >= CLOSE_ATTEMPTS
    assert "immortal cannot be closed" in caplog.text
