"""``Timeout``: one timer for all time limits of a run, each of which acts as ``asyncio.timeout`` does."""

from __future__ import annotations

import asyncio

import pytest

from agentfsm.runtime.context import Timeout
from tests.helpers.scenarios import run_async


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_block_that_times_out_raises_and_the_task_is_not_cancelled_by_it():
    async def scene() -> int:
        watchdog = Timeout()
        with pytest.raises(TimeoutError), watchdog.start(0.01):
            await forever()
        assert watchdog.expired
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run_async(scene) == 0


def test_a_block_in_time_is_unaffected_and_so_is_the_next():
    async def scene() -> None:
        watchdog = Timeout()
        for _ in range(3):
            with watchdog.start(60):
                await asyncio.sleep(0)
            assert not watchdog.expired
        watchdog.close()

    run_async(scene)


@pytest.mark.parametrize("limits", [(60, 0.01), (0.01, 60), (0.01, 0.01)])
def test_the_limit_of_one_block_does_not_apply_to_the_next(limits):
    async def scene() -> list[bool]:
        watchdog = Timeout()
        over = []
        for seconds in limits:
            try:
                with watchdog.start(seconds):
                    await (forever() if seconds < 1 else asyncio.sleep(0.02))
            except TimeoutError:
                pass
            over.append(watchdog.expired)
        watchdog.close()
        return over

    assert run_async(scene) == [seconds < 1 for seconds in limits]


def test_a_timer_that_fires_for_an_earlier_block_is_rescheduled_for_the_current_one():
    async def scene() -> None:
        watchdog = Timeout()
        with watchdog.start(0.01):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError), watchdog.start(0.03):
            await forever()

    run_async(scene)


def test_a_timer_that_fires_between_blocks_has_no_effect():
    async def scene() -> None:
        watchdog = Timeout()
        with watchdog.start(0.01):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        with watchdog.start(60):
            await asyncio.sleep(0)
        watchdog.close()

    run_async(scene)


def test_a_cancellation_from_outside_stays_what_it_is():
    async def scene() -> None:
        async def limited() -> None:
            with Timeout().start(60) as watchdog:
                try:
                    await forever()
                finally:
                    watchdog.close()

        task = asyncio.create_task(limited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(scene)


def test_an_exception_of_the_block_stays_what_it_is():
    async def scene() -> None:
        watchdog = Timeout()
        with pytest.raises(KeyError), watchdog.start(60):
            raise KeyError
        watchdog.close()

    run_async(scene)


def test_a_block_that_suppresses_its_timeout_continues():
    async def scene() -> bool:
        watchdog = Timeout()
        with watchdog.start(0.01):
            try:
                await forever()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
        return watchdog.expired

    assert run_async(scene)


def test_a_limit_within_a_timeout_of_asyncio_leaves_it_be():
    async def scene() -> None:
        watchdog = Timeout()

        async def limited() -> None:
            with watchdog.start(60):
                await forever()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limited(), 0.01)
        assert not watchdog.expired
        watchdog.close()

    run_async(scene)


def test_limits_cannot_be_nested_or_used_outside_a_task():
    watchdog = Timeout()

    async def scene() -> None:
        with watchdog.start(60), pytest.raises(RuntimeError, match="one await at a time"), watchdog.start(60):
            pass
        watchdog.close()

    run_async(scene)


def test_a_timeout_works_in_a_second_event_loop():
    watchdog = Timeout()

    async def scene() -> None:
        with watchdog.start(60):
            await asyncio.sleep(0)

    run_async(scene)
    run_async(scene)

    async def over() -> None:
        with pytest.raises(TimeoutError), watchdog.start(0.01):
            await forever()

    run_async(over)


def test_closing_twice_is_closing_once():
    watchdog = Timeout()
    watchdog.close()
    watchdog.close()
