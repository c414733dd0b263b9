"""A lock on a file that one process holds as long as it lives, and that says who holds it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

from agentfsm.errors import StoreError, StoreLockedError

__all__ = ["FileLock"]

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # far behind the text, which others may then read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
        try:
            _lock(descriptor)
        except OSError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
            os.close(descriptor)
            raise StoreLockedError(
                f"{self._path.name.removesuffix('-lock')} is written by {holder or 'another process'}: one process at "
                "a time writes a SQLite store; use a store on a server for more"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor

    def held(self) -> bool:
        """Whether somebody else has it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            _lock(descriptor)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
