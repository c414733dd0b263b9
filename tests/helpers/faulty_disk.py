"""A disk that remembers every write and flush, so that a power cut can be tried at any of them.

The store's writer runs on ``apsw`` with a file system that passes everything on and keeps a log. A cut is then
made from the log: what was flushed is there; of what was written since, any part may be, in any order, and the
last write may be torn between two sectors.
"""

# pyright: reportUnknownMemberType=false
# The types of apsw name collections.abc.Buffer, which is unknown before Python 3.12.

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest

from agentfsm import SqliteStore
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.records import SealedRecord
from agentfsm.testing.store_conformance import sealed_records as some_rows

SECTOR = 512
LOG_PAGES = 12
"""The size at which the write-ahead log is checkpointed; small, so that checkpoints are frequent."""


class RecordingDisk(apsw.VFS):
    """A file system that logs ``(file, what, where, data)``."""

    def __init__(self, name: str) -> None:
        self.log: list[tuple[str, str, int, bytes]] = []
        super().__init__(name, "")
        self.name = name

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.log.append((Path(filename).name, "delete", 0, b""))
        super().xDelete(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, disk: RecordingDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name)).name
        super().__init__("", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        self._disk.log.append((self._name, "write", offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._disk.log.append((self._name, "truncate", newsize, b""))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._disk.log.append((self._name, "sync", 0, b""))


class _Cursor(apsw.Cursor):
    """The attributes of a ``sqlite3`` cursor that the store uses, from ``apsw``."""

    @property
    def rowcount(self) -> int:
        return self.connection.changes()

    @property
    def lastrowid(self) -> int:
        return self.connection.last_insert_rowid()


class _Connection(apsw.Connection):
    """An ``apsw`` connection with the few methods of ``sqlite3`` that the store uses, and a short log."""

    def cursor(self) -> _Cursor:
        return _Cursor(self)

    def execute(self, statements: str, bindings: Any = None, **options: Any) -> apsw.Cursor:
        if statements.startswith("PRAGMA wal_autocheckpoint"):
            statements = f"PRAGMA wal_autocheckpoint = {LOG_PAGES}"
        return super().execute(statements, bindings, **options)

    def executescript(self, text: str) -> None:
        self.execute(text).fetchall()

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")


def store_on_disk(disk: RecordingDisk) -> Callable[..., Any]:
    """A replacement of ``sqlite3.connect`` that puts the writer of a store on a fake disk."""
    real = sqlite3.connect

    def connect(where: str, **options: Any) -> Any:
        if "mode=ro" in where:
            return real(where, **options)
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
        db = _Connection(where.split("?")[0].removeprefix("file://"), flags=flags, vfs=disk.name)
        db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()  # the fake file system has no shared memory
        db.execute("PRAGMA wal_autocheckpoint").fetchall()
        return db

    return connect


def run_on_disk(
    folder: Path, level: Literal["full", "normal"], batches: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[RecordingDisk, dict[str, list[SealedRecord]], list[tuple[int, str, int]]]:
    """A store with three runs: the disk's log, every record, and the log entry after which each was acknowledged."""
    disk = RecordingDisk(f"disk-{folder.name}-{level}-{seed}")
    monkeypatch.setattr(sqlite3, "connect", store_on_disk(disk))
    draw = random.Random(seed)
    truth: dict[str, list[SealedRecord]] = {}
    acked: list[tuple[int, str, int]] = []

    async def live() -> None:
        store = SqliteStore(folder / "runs.db", synchronous=level)
        leases = {name: await store.acquire(name, "me", new=True) for name in "abc"}
        truth.update({name: [] for name in "abc"})
        for _ in range(batches):
            name = draw.choice("abc")
            had = truth[name]
            last = had[-1] if had else None
            hidden = f'[["00","{"x" * draw.randrange(3000)}"]]' if draw.random() < 0.5 else ""
            more = some_rows(draw.randint(1, 4), last.seq if last else 0, last.hash if last else GENESIS_HASH, hidden)
            await store.append(leases[name], more, "running")
            truth[name] = [*had, *more]
            acked.append((len(disk.log), name, len(truth[name])))
        log = len(disk.log)
        store.close()
        del disk.log[log:]

    asyncio.run(live())
    monkeypatch.undo()
    brought_in = sum(entry[:2] == ("runs.db", "sync") for entry in disk.log)
    assert brought_in > batches / 10, "the log was hardly ever brought into the file"
    return disk, truth, acked


def cut_power(disk: RecordingDisk, at: int, draw: random.Random) -> dict[str, bytes]:
    """The files as a power cut after ``at`` entries of the log may leave them."""
    files: dict[str, bytearray] = {}
    loose: dict[str, list[tuple[str, int, bytes]]] = {}
    for name, what, where, data in disk.log[:at]:
        if what == "sync":
            for entry in loose.pop(name, ()):
                _apply_write(files.setdefault(name, bytearray()), *entry)
        elif what == "delete":
            files.pop(name, None)
            loose.pop(name, None)
        else:
            loose.setdefault(name, []).append((what, where, data))
    for name, entries in loose.items():
        kept = [entry for entry in entries if draw.random() < 0.6]
        for entry in kept:
            what, where, data = entry
            if what == "write" and draw.random() < 0.2:
                data = data[: draw.randrange(0, len(data) + 1) // SECTOR * SECTOR]
            _apply_write(files.setdefault(name, bytearray()), what, where, data)
    return {name: bytes(data) for name, data in files.items()}


def _apply_write(file: bytearray, what: str, where: int, data: bytes) -> None:
    if what == "truncate":
        del file[where:]
        return
    if len(file) < where:
        file.extend(bytes(where - len(file)))
    file[where : where + len(data)] = data
