"""A store's file: its real path, the lock of its only writer, and whether it was moved or the process forked."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sqlite3
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from agentfsm.errors import StoreError, StoreFullError, StoreLockedError, StoreMovedError

FileId = tuple[int, int]
"""Device and inode of a file."""

LOCK_ATTEMPTS, ATTEMPTS_ONCE_NAMED, ATTEMPTS_IF_BRIEF, RETRY_DELAY_S = 50, 3, 400, 0.001
"""Attempts to lock a file, attempts if the file names an owner or one for a moment, and seconds between attempts."""

SETTLED_NS = 100_000_000
"""A folder that has not changed for so many nanoseconds gets another time when it changes again: the clocks of file
systems tick every few milliseconds. Those that tick once a second show it by times without a fraction."""

BRIEFLY = ", for a moment"
"""What the name of an owner ends with that will release the lock soon: it sends an answer, or redacts a run."""

if sys.platform == "win32":
    import msvcrt

    def _try_exclusive(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # far after the text, so that other processes can read that
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _try_shared = _try_exclusive

else:
    import fcntl

    def _try_exclusive(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _try_shared(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # any number of processes may check at once


class FileLock:
    """An exclusive lock on a file; the operating system releases it when the process ends, however it ends.

    Args:
        path: A separate lock file; a lock on the database itself would interfere with SQLite's locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, *, briefly: bool = False) -> None:
        """Acquire the lock.

        Args:
            briefly: Whether it will be released in a moment, so that others wait for it a little longer.

        Raises:
            StoreLockedError: Another process holds it; the message names the process.
            StoreError: The lock file cannot be created or written; a ``StoreFullError`` if there is no space left.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            what = "is a symbolic link" if self.path.is_symlink() else f"cannot be written: {error.strerror}"
            raise StoreError(f"{self.path} {what}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # what is written to it would overwrite that
            os.close(descriptor)
            raise StoreError(f"{self.path} is not a file of its own: delete it")
        name = f"process {os.getpid()} on {socket.gethostname()}{BRIEFLY if briefly else ''}\n".encode()
        owner = _lock_or_owner(descriptor)
        if owner is not None:
            os.close(descriptor)
            advice = (
                "it is open in this process as another store; share that one, or close it first"
                if owner == name.decode().rstrip()
                else "only one process at a time can write a SQLite store; for more, use a store on a PostgreSQL "
                "server (PostgresStore)"
            )
            used_by = owner or "another process"
            raise StoreLockedError(f"{self.path.name.removesuffix('-lock')} is in use by {used_by}: {advice}")
        try:
            os.write(descriptor, name)  # overwrites the name of a dead process; other processes read the first line
            os.ftruncate(descriptor, len(name))
        except OSError as error:
            os.close(descriptor)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (StoreFullError if is_full else StoreError)(
                f"{self.path} cannot be written: {error.strerror}{': make room, and try again' * is_full}"
            ) from error
        self._descriptor = descriptor

    def announce(self, address: str) -> None:
        """Say in the file where this process listens to others. It does not if the lock is not held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, f"{address}\n".encode())  # after the name

    def announced(self) -> str:
        """Where the process that holds the lock listens, or an empty string if it does not say."""
        try:
            lines = self.path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return lines[1] if len(lines) > 1 else ""

    def held_by_other(self) -> bool:
        """Whether another process holds the lock."""
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError:
            return False
        try:
            _try_shared(descriptor)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # our name must not be read as the next owner's
        self.close()

    def file_id(self) -> FileId | None:
        """The file that is locked, or None if this process does not hold the lock."""
        if self._descriptor is None:
            return None
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Close the descriptor; the lock is held until every process that inherited it has done so."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _lock_or_owner(descriptor: int) -> str | None:
    """Lock a file, or return the name of its owner, empty if the file has none; None if it is locked now.

    It tries for up to 50 ms: another process may only be checking whether the file is locked, and a new owner may not
    have written its name over that of a dead process yet. For one that owns the file for a moment it tries longer.
    """
    owner = ""
    for attempt in range(1, ATTEMPTS_IF_BRIEF + 1):
        try:
            _try_exclusive(descriptor)
        except OSError:
            owner = _owner_name(descriptor)
            enough = ATTEMPTS_ONCE_NAMED if owner else LOCK_ATTEMPTS
            if attempt >= enough and not owner.endswith(BRIEFLY):
                return owner
            time.sleep(RETRY_DELAY_S)
        else:
            return None
    return owner


def _owner_name(descriptor: int) -> str:
    if not hasattr(os, "pread"):
        return ""
    line, ended, _ = os.pread(descriptor, 200, 0).partition(b"\n")
    return line.decode(errors="replace") if ended else ""


_inherited: set[FileId] = set()
"""Files that the parent process had open when it forked this one."""


class StoreFile:
    """The file of an open store: where it really is, and whether it is still there.

    A relative path is made absolute at once, and symbolic links are resolved, so that every way to the file leads to
    the same lock.

    Attributes:
        given: The path, made absolute.
        path: The real path.
        lock: The lock of the process that writes the file.
        opening: Held while a connection is opened: a new file cannot be set up while it is read.
    """

    def __init__(self, path: Path) -> None:
        self.given = path.absolute()
        self.path = Path(os.path.realpath(self.given))
        self.lock = FileLock(self.path.with_name(self.path.name + "-lock"))
        self.opening = threading.Lock()
        self._process = os.getpid()
        self._opened: FileId | None = None
        self._beside: list[tuple[Path, FileId | None]] = []  # the lock and the log of the file that is written
        self._folder = str(self.path.parent) if self.path == self.given else None  # None: a link may lead elsewhere
        self._checked_folder: tuple[int, int, int] | None = None  # what it was when all was in its place
        _open_files.add(self)

    def check_process(self) -> None:
        """Check that this is the process that opened the store.

        Raises:
            StoreError: It is a child that was forked later.
        """
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.given} was opened by process {self._process}, and process {os.getpid()} was forked from it: a "
                "store does not work in a forked child; open one there, before the parent does, or start the child "
                "with the method 'spawn'"
            )

    def check_openable(self) -> None:
        """Check that the file has one name and is not open in the parent of a forked process.

        Raises:
            StoreError: It has hard links, or is open in the parent.
        """
        try:
            status = self.path.stat()
        except OSError:  # it does not exist yet, or opening it says why not
            return
        if status.st_nlink > 1:
            raise StoreError(
                f"{self.given} has {status.st_nlink} names (hard links), and its lock and log can lie beside one of "
                "them only: delete the other names, or copy the file and open the copy"
            )
        if (status.st_dev, status.st_ino) in _inherited:
            raise StoreError(
                f"{self.given} was open in the process that forked this one, and SQLite cannot open it here: close the "
                "store before the fork, or start the child with the method 'spawn'"
            )

    def opened(self, *, to_write: bool = False) -> None:
        """Remember which file was opened, or check that it is the one that was opened before.

        Raises:
            StoreMovedError: It is another one.
        """
        if self._opened is None:
            self._opened = _file_id(self.path)
        self.check_unmoved()
        if to_write:
            log = self.path.with_name(self.path.name + "-wal")
            self._beside = [(self.lock.path, self.lock.file_id()), (log, _file_id(log))]
            self._checked_folder = None

    def check_unmoved(self) -> None:
        """Check that the path still leads to the file that was opened, and to its log and lock.

        As long as nothing in their folder was, it does not look at each of them: this is done after every commit.

        Raises:
            StoreMovedError: The file was moved, deleted or replaced.
        """
        if self._opened is None:
            return
        folder = None if self._folder is None else _folder_state(self._folder)
        if folder is not None and folder == self._checked_folder:
            return
        if (found := _file_id(self.given)) != self._opened:
            happened = "moved or deleted" if found is None else "replaced by another file"
            raise _moved_error(self.given, self.given, happened)
        for path, expected in self._beside:
            if (found := _file_id(path)) != expected:
                raise _moved_error(self.given, path, "deleted" if found is None else "replaced")
        self._checked_folder = folder if folder is not None and _is_settled(folder[2]) else None

    def unwritten(self) -> None:
        """Forget the lock and the log, which this process writes no longer; SQLite may delete the log."""
        self._beside = []

    def closed(self) -> None:
        """Forget which file was opened."""
        self._opened, self._beside, self._checked_folder = None, [], None

    def inherited(self) -> None:
        """In a forked child: give up the lock's descriptor, so that the child does not keep the parent's lock."""
        if self._opened is not None:
            _inherited.add(self._opened)
        self.lock.close()


def _file_id(path: Path) -> FileId | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # half the time of ``Path.stat``, once per commit
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _folder_state(folder: str) -> tuple[int, int, int] | None:
    """Which folder it is, and when a file was last created, deleted or renamed in it, in nanoseconds."""
    try:
        status = os.stat(folder)  # noqa: PTH116  # as above
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _is_settled(changed_ns: int) -> bool:
    """Whether a folder that changed then gets another time when it changes again."""
    return changed_ns % 1_000_000_000 != 0 and time.time_ns() - changed_ns > SETTLED_NS


def _moved_error(store: Path, path: Path, happened: str) -> StoreMovedError:
    return StoreMovedError(
        f"{path} was {happened} while the store was open: what was written last may be lost, and nothing more is "
        f"written. Put the files of the store back together ({store.name} with its -wal), or choose another file; then "
        "open the store again, and resume its runs"
    )


class _HasFork(Protocol):
    def inherited(self) -> None:
        """Called in a forked child."""


_open_files: WeakSet[_HasFork] = WeakSet()


def after_fork(owner: _HasFork) -> None:
    """Call ``owner.inherited()`` in every child that is forked from now on."""
    _open_files.add(owner)


def leak(db: sqlite3.Connection | None) -> None:
    """Keep a connection from ever being closed: SQLite forbids to close one in a forked child."""
    if db is not None:
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


def _on_fork() -> None:
    for owner in list(_open_files):
        owner.inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_on_fork)
