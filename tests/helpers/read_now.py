"""Reads a store from a function that cannot await, also while an event loop runs in its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def read_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, from an event loop in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def read_at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as those of a ``MemoryStore`` that read."""
    try:
        work.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    work.close()
    raise AssertionError("it waits for something")
