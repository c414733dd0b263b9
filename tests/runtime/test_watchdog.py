"""One timer for a run's time limits: each limit acts as ``asyncio.timeout`` would, and no other block feels it."""

from __future__ import annotations

import asyncio

import pytest

from agentfsm.runtime.watchdog import Watchdog
from tests.runtime.scenes import drive


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_block_past_its_time_raises_and_the_task_is_not_cancelled_by_it():
    async def scene() -> int:
        watchdog = Watchdog()
        with pytest.raises(TimeoutError), watchdog.limit(0.01):
            await forever()
        assert watchdog.expired
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert drive(scene) == 0


def test_a_block_in_time_is_left_alone_and_so_is_the_next():
    async def scene() -> None:
        watchdog = Watchdog()
        for _ in range(3):
            with watchdog.limit(60):
                await asyncio.sleep(0)
            assert not watchdog.expired
        watchdog.close()

    drive(scene)


@pytest.mark.parametrize("limits", [(60, 0.01), (0.01, 60), (0.01, 0.01)])
def test_the_limit_of_one_block_says_nothing_of_the_next(limits):
    async def scene() -> list[bool]:
        watchdog = Watchdog()
        over = []
        for seconds in limits:
            try:
                with watchdog.limit(seconds):
                    await (forever() if seconds < 1 else asyncio.sleep(0.02))
            except TimeoutError:
                pass
            over.append(watchdog.expired)
        watchdog.close()
        return over

    assert drive(scene) == [seconds < 1 for seconds in limits]


def test_a_timer_that_goes_off_for_a_block_that_is_over_is_armed_again_for_the_one_at_hand():
    async def scene() -> None:
        watchdog = Watchdog()
        with watchdog.limit(0.01):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError), watchdog.limit(0.03):
            await forever()

    drive(scene)


def test_a_timer_that_goes_off_between_blocks_harms_nobody():
    async def scene() -> None:
        watchdog = Watchdog()
        with watchdog.limit(0.01):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        with watchdog.limit(60):
            await asyncio.sleep(0)
        watchdog.close()

    drive(scene)


def test_a_cancellation_from_outside_stays_what_it_is():
    async def scene() -> None:
        async def limited() -> None:
            with Watchdog().limit(60) as watchdog:
                try:
                    await forever()
                finally:
                    watchdog.close()

        task = asyncio.create_task(limited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    drive(scene)


def test_an_exception_of_the_block_stays_what_it_is():
    async def scene() -> None:
        watchdog = Watchdog()
        with pytest.raises(KeyError), watchdog.limit(60):
            raise KeyError
        watchdog.close()

    drive(scene)


def test_a_block_that_swallows_its_limit_goes_on():
    async def scene() -> bool:
        watchdog = Watchdog()
        with watchdog.limit(0.01):
            try:
                await forever()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
        return watchdog.expired

    assert drive(scene)


def test_a_limit_within_a_timeout_of_asyncio_leaves_it_be():
    async def scene() -> None:
        watchdog = Watchdog()

        async def limited() -> None:
            with watchdog.limit(60):
                await forever()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limited(), 0.01)
        assert not watchdog.expired
        watchdog.close()

    drive(scene)


def test_limits_cannot_be_nested_or_used_outside_a_task():
    watchdog = Watchdog()

    async def scene() -> None:
        with watchdog.limit(60), pytest.raises(RuntimeError, match="one await at a time"), watchdog.limit(60):
            pass
        watchdog.close()

    drive(scene)


def test_a_watchdog_serves_a_second_loop_too():
    watchdog = Watchdog()

    async def scene() -> None:
        with watchdog.limit(60):
            await asyncio.sleep(0)

    drive(scene)
    drive(scene)

    async def over() -> None:
        with pytest.raises(TimeoutError), watchdog.limit(0.01):
            await forever()

    drive(over)


def test_closing_twice_is_closing_once():
    watchdog = Watchdog()
    watchdog.close()
    watchdog.close()
