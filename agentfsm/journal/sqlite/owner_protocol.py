"""What another process and the writer of a SQLite store say to each other: JSON messages over a Unix socket.

The lock file beside the store, which only its owner can read, says where the socket is. The socket itself does not lie
there, because not every program can copy a folder with a socket in it. Each side checks that the other is of the same
user. No secret passes over it: whoever asks seals what the store is to keep about a run, and the writer only compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentfsm.errors import (
    RunExistsError,
    RunHeldError,
    StaleLease,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreMovedError,
    UnknownRunError,
)
from agentfsm.journal.run_info import RunInfo, WaitingFor
from agentfsm.loop.keys import KeyPurpose

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 28

MAX_CONNECTIONS = 64
"""Processes that can wait to be connected."""

ABSTRACT = "@"
"""What an address begins with that is not a file: Linux has sockets that end with their process."""

_LENGTH = struct.Struct(">I")

_ERRORS: Mapping[str, type[StoreError]] = {
    each.__name__: each
    for each in (RunExistsError, StoreError, StoreFullError, StoreLockedError, StoreMovedError, UnknownRunError)
}


def has_unix_sockets() -> bool:
    """Whether processes of this system can talk over Unix sockets."""
    return hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def listen() -> tuple[socket.socket, str]:
    """A socket that listens, and its address. It is in no folder where the system allows that.

    Raises:
        OSError: There can be none.
    """
    name = f"agentfsm-{secrets.token_hex(16)}"
    address = f"{ABSTRACT}{name}" if platform.system() == "Linux" else str(_private_folder() / name)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_as_bound(address))
        if not address.startswith(ABSTRACT):
            Path(address).chmod(0o600)
        listening.listen(MAX_CONNECTIONS)
    except OSError:
        listening.close()
        raise
    return listening, address


def stop_listening(address: str) -> None:
    """Remove a socket that is in a folder."""
    if not address.startswith(ABSTRACT):
        with contextlib.suppress(OSError):
            Path(address).unlink()


async def connect(address: str) -> socket.socket:
    """A socket that is connected to an address.

    Raises:
        OSError: Nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, _as_bound(address))
    except BaseException:
        connection.close()
        raise
    return connection


def _as_bound(address: str) -> str:
    return "\0" + address[1:] if address.startswith(ABSTRACT) else address


def _private_folder() -> Path:
    """A folder for sockets that only its owner can use."""
    folder = Path(tempfile.gettempdir()) / f"agentfsm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def is_same_user(connection: Any) -> bool:
    """Whether the process at the other end is of the same user, or of root; True where nobody can tell.

    Args:
        connection: The connected socket. Its mode keeps others out where the system does not say who they are.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user in (os.getuid(), 0)


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message."""
    data = json.dumps(message).encode()
    writer.write(_LENGTH.pack(len(data)) + data)
    await writer.drain()


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None if there is none.

    Raises:
        ValueError: What arrived is not a message.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes is too long")
        message: Any = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message  # pyright: ignore[reportUnknownVariableType]  # JSON


def dump_error(error: StoreError) -> Message:
    """An error of a store as a message."""
    if isinstance(error, StaleLease):
        return {"error": "StaleLease", "run": error.run_id, "owner": error.owner, "why": error.why}
    if isinstance(error, RunHeldError):
        return {"error": "RunHeldError", "run": error.run_id, "why": error.reason}
    return {"error": type(error).__name__, "text": str(error)}


def load_error(message: Message) -> StoreError:
    """The error that a message says."""
    if message["error"] == "StaleLease":
        return StaleLease(message["run"], message["owner"], message["why"])
    if message["error"] == "RunHeldError":
        return RunHeldError(message["run"], message["why"])
    return _ERRORS.get(message["error"], StoreError)(message["text"])


def dump_info(info: RunInfo | None) -> Message | None:
    """What a run is listed by, as part of a message."""
    return None if info is None else dataclasses.asdict(info)


def load_info(data: Message | None) -> RunInfo | None:
    """What a run is listed by, from a message."""
    if data is None:
        return None
    waiting = data["waiting_for"]
    listed: dict[str, Any] = {**data, "tags": tuple(data["tags"])}
    if waiting is not None:
        listed["waiting_for"] = WaitingFor(waiting["kind"], waiting["tool"], tuple(waiting["roles"]))
    return RunInfo(**listed)


class PresealedRows:
    """Stands for the keys of another process: its seals of the rows that the store may come to keep for it."""

    def __init__(self) -> None:
        self._seals: dict[str, str] = {}

    @property
    def current(self) -> PresealedRows:
        """These seals."""
        return self

    def add(self, seals: Mapping[str, str]) -> None:
        """Add seals."""
        self._seals |= seals

    def seal(self, purpose: KeyPurpose, message: bytes) -> str:
        """The seal of a row.

        Raises:
            StaleLease: It is another row than the other process expected.
        """
        text = message.decode()
        if text not in self._seals:
            raise StaleLease(str(json.loads(text)[1]), None, "has changed in the meantime")
        return self._seals[text]

    def check_seal(self, purpose: KeyPurpose, message: bytes, seal: str) -> bool:
        """Whether the other process knows a row with this seal."""
        return self._seals.get(message.decode()) == seal
