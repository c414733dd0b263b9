"""Workers: processes that start submitted runs and go on with those that were cut off, on an existing engine."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

from agentfsm.errors import ConfigurationError
from agentfsm.journal.store_url import locate_store, server_database
from agentfsm.workers.notices import Notice, NoticeError, Notify
from agentfsm.workers.spend_limits import SpendLimit
from agentfsm.workers.submission import Submission, submit
from agentfsm.workers.waker import Activation, QueueSettings, SetAside, StartRate, Waker
from agentfsm.workers.webhook import Webhook
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
    "open_waker",
    "submit",
]


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
        poll_s: Seconds between two looks of a process at each of its queues.

    Raises:
        ConfigurationError: A number is too small; it is no URL of a store that other processes can reach; or it is a
            SQLite file, and the SQLite of this Python is too old for DBOS.
        agentfsm.errors.MissingExtraError: The package is not installed.
    """
    from agentfsm.workers.dbos_waker import DbosWaker  # an extra

    settings = QueueSettings(concurrency=concurrency, tenant_concurrency=tenant_concurrency, rate=rate, poll_s=poll_s)
    file = locate_store(url).file
    if file is None:
        database = server_database(url)
    else:
        _require_subseconds()
        queue = file.absolute().with_name(f"{file.name}.queue")
        queue.touch(mode=0o600)  # it says who runs what
        database = f"sqlite:///{queue}"
    return DbosWaker(database, settings)


def _require_subseconds() -> None:
    """Refuse a SQLite that DBOS cannot use: from Python 3.12 on, it takes for granted what came with SQLite 3.42."""
    if sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42):
        raise ConfigurationError(
            f"DBOS needs SQLite 3.42 or newer, and this Python has {sqlite3.sqlite_version}: use a Python with a newer "
            "SQLite (that of python.org or uv has one), or a store on PostgreSQL"
        )
