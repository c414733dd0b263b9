"""Workers: processes that start submitted runs and continue those that were cut off, on an existing engine."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from agentfsm.errors import ConfigurationError
from agentfsm.journal.store import Head
from agentfsm.journal.store_url import is_pooled, locate_store
from agentfsm.workers.notices import Notice, NoticeError, Notify, Webhook
from agentfsm.workers.spend_limits import SpendLimit
from agentfsm.workers.submission import Submission, submit
from agentfsm.workers.waker import Activation, QueueSettings, SetAside, StartRate, Waker, timer_key
from agentfsm.workers.worker import Worker
from agentfsm.workers.worker_metrics import WorkerMetrics
from agentfsm.workers.worker_settings import WorkerSettings

__all__ = [
    "Activation",
    "Notice",
    "NoticeError",
    "Notify",
    "SetAside",
    "SpendLimit",
    "StartRate",
    "Submission",
    "Waker",
    "Webhook",
    "Worker",
    "WorkerMetrics",
    "WorkerSettings",
    "find_set_aside",
    "open_waker",
    "submit",
]

KEYS_AT_ONCE = 1000
"""How many activations the engine is asked for at a time."""


def open_waker(
    url: str | Path,
    *,
    concurrency: int = 10,
    tenant_concurrency: int | None = None,
    rate: StartRate | None = None,
    poll_s: float = 0.2,
) -> Waker:
    """The engine for a store: DBOS, in the same PostgreSQL database, or in a file beside a SQLite store.

    Args:
        url: The URL of the store, or the path of a SQLite file.
        concurrency: How many activations of a queue a process handles at a time.
        tenant_concurrency: How many of a queue are handled at a time for one tenant, by all processes together.
        rate: How many new runs of an agent are started in how many seconds, by all processes together.
        poll_s: Seconds between two polls of a queue by a process, while at most two processes are at work; more of them
            share the polling.

    Raises:
        ConfigurationError: A number is too small; it is not the URL of a store that other processes can reach; or it is
            a SQLite file, and the SQLite of this Python is too old for DBOS.
        agentfsm.errors.MissingExtraError: The package is not installed.
    """
    settings = QueueSettings(concurrency=concurrency, tenant_concurrency=tenant_concurrency, rate=rate, poll_s=poll_s)
    queue = _queue_file(url)
    if queue is not None:
        _require_subseconds()
        queue.touch(mode=0o600)  # it says who runs what
    return _waker(url, queue, settings)


async def find_set_aside(queues: str | Path | Waker, heads: Iterable[Head]) -> dict[str, SetAside]:
    """Which of some runs are set aside, by run. Where there are no queues, there are none afterwards.

    Args:
        queues: The URL of the store, or the path of a SQLite file; or the engine, if it is open.
        heads: The heads of the runs.

    Raises:
        ConfigurationError: It is not the URL of a store that other processes can reach.
        agentfsm.errors.MissingExtraError: There may be queues, and the package that reads them is not installed.
        agentfsm.errors.StoreError: The queues cannot be read.
    """
    keys = [key for head in heads for key in _activation_keys(head)]
    if not isinstance(queues, str | Path):
        return await _set_aside_by_run(queues, keys)
    waker = await find_waker(queues) if keys else None
    if waker is None:
        return {}
    try:
        return await _set_aside_by_run(waker, keys)
    finally:
        await waker.aclose()


async def find_waker(url: str | Path) -> Waker | None:
    """The engine for a store, to look at its queues and not to make any; None beside a file that has none.

    Args:
        url: The URL of the store, or the path of a SQLite file.

    Raises:
        ConfigurationError: It is not the URL of a store that other processes can reach.
        agentfsm.errors.MissingExtraError: There may be queues, and the package that reads them is not installed.
    """
    queue = _queue_file(url)
    if queue is not None and not queue.exists():
        return None
    await asyncio.to_thread(import_module, "agentfsm.workers.dbos_waker")  # loading it takes a second
    return _waker(url, queue, QueueSettings(), create=False)


def _waker(url: str | Path, queue: Path | None, settings: QueueSettings, *, create: bool = True) -> Waker:
    from agentfsm.workers.dbos_database import queue_database, unprepared_engine  # an extra
    from agentfsm.workers.dbos_waker import DbosWaker  # an extra

    database = queue_database(url, queue)
    return DbosWaker(database, settings, create=create, engine=unprepared_engine(database) if is_pooled(url) else None)


async def _set_aside_by_run(waker: Waker, keys: Sequence[str]) -> dict[str, SetAside]:
    found: list[SetAside] = []
    for first in range(0, len(keys), KEYS_AT_ONCE):
        found += await waker.list_set_aside(keys[first : first + KEYS_AT_ONCE])
    return {each.activation.run_id: each for each in found}


def _activation_keys(head: Head) -> tuple[str, ...]:
    """The keys of the activations that continue a run as it is now."""
    if not head.seq:
        return (Activation(head.run_id, 0, "").key,)
    return Activation(head.run_id, head.epoch, "").key, timer_key(head.run_id, head.epoch)


def _queue_file(url: str | Path) -> Path | None:
    """The file with the queues beside a SQLite store; None for a store on a server."""
    file = locate_store(url).file
    return None if file is None else file.absolute().with_name(f"{file.name}.queue")


def _require_subseconds() -> None:
    """Refuse a SQLite that DBOS cannot use: from Python 3.12 on, it takes for granted what came with SQLite 3.42."""
    if sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42):
        raise ConfigurationError(
            f"DBOS needs SQLite 3.42 or newer, and this Python has {sqlite3.sqlite_version}: use a Python with a newer "
            "SQLite (that of python.org or uv has one), or a store on PostgreSQL"
        )
