"""``FakeClock``: it only moves when a test advances it, and sleeping advances it at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentfsm.testing import FakeClock


def test_it_stands_still_until_it_is_told_to_move():
    clock = FakeClock(10.0)
    assert (clock.monotonic(), clock.time()) == (10.0, 10.0)
    assert (clock.monotonic(), clock.time()) == (10.0, 10.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.time()) == (12.5, 12.5)


@pytest.mark.parametrize("seconds", [5, -5])
def test_the_wall_clock_may_jump_and_durations_do_not_notice(seconds):
    clock = FakeClock(10.0)
    clock.jump(seconds)
    assert (clock.monotonic(), clock.time()) == (10.0, 10.0 + seconds)


def test_sleeping_takes_no_time_moves_both_clocks_and_is_written_down():
    clock = FakeClock(0.0)
    started = time.monotonic()
    asyncio.run(clock.sleep(86_400))
    asyncio.run(clock.sleep(0))
    assert time.monotonic() - started < 60
    assert (clock.monotonic(), clock.time(), clock.slept) == (86_400, 86_400, [86_400, 0])


def test_others_get_their_turn_while_it_sleeps():
    clock, turns = FakeClock(), []

    async def other() -> None:
        turns.append("other")

    async def scene() -> None:
        task = asyncio.create_task(other())
        await clock.sleep(1)
        turns.append("sleeper")
        await task

    asyncio.run(scene())
    assert turns == ["other", "sleeper"]


def test_a_sleep_can_be_cancelled():
    clock = FakeClock()

    async def scene() -> None:
        task = asyncio.create_task(clock.sleep(1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
