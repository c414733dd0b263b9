"""A lock on a file that one process holds as long as it lives, and that says who holds it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from agentfsm.errors import StoreError, StoreLockedError

__all__ = ["FileLock"]

TRIES, ENOUGH, WAIT_S = 50, 3, 0.001
"""How often a lock is tried, how often it is where a name stands in the file, and the seconds in between."""

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # far behind the text, which others may then read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _ask = _lock

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _ask(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # any number may ask at once


class FileLock:
    """The lock; the operating system lets go of it when its process ends, however that ends.

    Args:
        path: A file of its own; locking a database itself would disturb SQLite's locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it.

        Raises:
            StoreLockedError: Somebody else has it; the message names them.
            StoreError: The file cannot be made.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error
        name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        holder = _locked(descriptor)
        if holder is not None:
            os.close(descriptor)
            raise StoreLockedError(
                f"{self._path.name.removesuffix('-lock')} is written by {holder or 'another process'}: one process at "
                "a time writes a SQLite store; use a store on a server for more"
            )
        os.write(descriptor, name)  # over what a dead process may have left; others read the first line
        os.ftruncate(descriptor, len(name))
        self._descriptor = descriptor

    def held(self) -> bool:
        """Whether somebody else has it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            _ask(descriptor)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # who comes next is not to be taken for us
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int) -> str | None:
    """Lock a file, or tell the name that stands in it.

    We try for a moment: somebody may only be asking whether it is held, and whoever has just got it is about to
    write its name over that of a dead process.
    """
    for attempt in range(1, TRIES + 1):
        try:
            _lock(descriptor)
        except OSError:
            holder = _holder(descriptor)
            if holder and attempt >= ENOUGH:
                return holder
            time.sleep(WAIT_S)
        else:
            return None
    return ""


def _holder(descriptor: int) -> str:
    if not hasattr(os, "pread"):
        return ""
    line, ended, _ = os.pread(descriptor, 200, 0).partition(b"\n")
    return line.decode(errors="replace") if ended else ""
