"""``OwnerSocket``: the writer of a SQLite store does for other processes what only the writer may do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

from agentfsm.errors import AgentfsmError, StoreError
from agentfsm.journal.maintenance import Hold, Tombstone
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.sqlite.owner_protocol import (
    Message,
    PresealedRows,
    dump_error,
    has_unix_sockets,
    is_same_user,
    listen,
    load_info,
    read_message,
    stop_listening,
    write_message,
)
from agentfsm.journal.sqlite.store_file import FileLock, after_fork
from agentfsm.journal.store import Lease, SealedSnapshot, Store
from agentfsm.loop.keys import Keyring


class OwnerSocket:
    """Serves one file, in a thread of its own, while this process writes it.

    Where there are no Unix sockets it does nothing: other processes then wait until the file is free.
    """

    def __init__(self, lock: FileLock, store: Callable[[], Store | None]) -> None:
        self._lock = lock
        self._store = store
        self._address = ""
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        after_fork(self)

    def start(self) -> None:
        """Listen, if that is possible, and say where in the lock file, which this process has locked."""
        if not has_unix_sockets():
            return
        try:
            self._socket, self._address = listen()
        except OSError:
            return
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="agentfsm-owner", daemon=True)
        self._thread.start()
        ready.wait()
        self._lock.announce(self._address)

    def close(self) -> None:
        """Finish what was asked, and stop."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._end is None:
            return
        stop_listening(self._address)
        self._loop.call_soon_threadsafe(self._end.set)
        thread.join()
        self._socket = None

    def inherited(self) -> None:
        """In a forked child: do not keep the parent's socket open."""
        if self._socket is not None:
            self._socket.close()
        self._thread = None

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101  # a coroutine runs in a task
            connections.add(task)
            try:
                await self._converse(reader, writer)
            finally:
                connections.discard(task)

        server = await asyncio.start_unix_server(connected, sock=self._socket)
        ready.set()
        await self._end.wait()
        server.close()
        for task in tuple(connections):
            task.cancel()
        if connections:
            await asyncio.wait(connections)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leases: dict[int, tuple[Lease, PresealedRows]] = {}  # they end with the connection
        try:
            if not is_same_user(writer.get_extra_info("socket")):
                return
            while (message := await read_message(reader)) is not None:
                await write_message(writer, await self._answer(message, leases))
        except (ValueError, ConnectionError):  # not one of ours, or it is gone
            pass
        finally:
            writer.close()

    async def _answer(self, message: Message, leases: dict[int, tuple[Lease, PresealedRows]]) -> Message:
        store = self._store()
        try:
            if store is None:
                raise StoreError("the store is closed")
            command = _COMMANDS.get(message.get("command", ""))
            if command is None:
                raise StoreError(f"the process that writes the store does not know {message.get('command')!r}")
            work = asyncio.ensure_future(command(store, message, leases))
            try:
                return {"value": await asyncio.shield(work)}
            except asyncio.CancelledError:  # the store is being closed: what was begun is finished
                await asyncio.wait([work])
                raise
        except StoreError as error:
            return dump_error(error)
        except (KeyError, TypeError, ValueError, AgentfsmError) as error:
            return dump_error(StoreError(f"the process that writes the store refuses: {error}"))


Leases = dict[int, tuple[Lease, PresealedRows]]


async def _acquire(store: Store, message: Message, leases: Leases) -> Any:
    seals = PresealedRows()
    seals.add(message["seals"])
    lease = await store.acquire(message["run"], message["owner"], new=message["new"], keyring=cast("Keyring", seals))
    number = max(leases, default=0) + 1
    leases[number] = (lease, seals)
    return [number, lease.epoch, lease.seq, lease.hash]


async def _append(store: Store, message: Message, leases: Leases) -> None:
    lease, seals = leases[message["lease"]]
    seals.add(message["seals"])
    records = [SealedRecord(*record) for record in message["records"]]
    if message["status"] != "running":
        del leases[message["lease"]]
    snapshot = message.get("snapshot")
    snapshot = None if snapshot is None else SealedSnapshot(*snapshot)
    await store.append(lease, records, message["status"], load_info(message["info"]), snapshot)


async def _release(store: Store, message: Message, leases: Leases) -> None:
    lease, seals = leases.pop(message["lease"])
    seals.add(message["seals"])
    await store.release(lease)


async def _redact(store: Store, message: Message, leases: Leases) -> None:
    lease, _ = leases[message["lease"]]
    await store.redact(lease, message["seq"], message["hidden"], load_info(message["listed"]))


async def _send(store: Store, message: Message, leases: Leases) -> bool:
    return await store.signals.send(SealedSignal(*message["signal"]))


async def _remove(store: Store, message: Message, leases: Leases) -> None:
    await store.signals.remove(message["id"])


async def _set_hold(store: Store, message: Message, leases: Leases) -> None:
    hold = message["hold"]
    await store.maintenance.set_hold(message["run"], None if hold is None else Hold(**hold))


async def _purge(store: Store, message: Message, leases: Leases) -> list[str]:
    return await store.maintenance.purge([Tombstone(**each) for each in message["tombstones"]])


async def _reindex(store: Store, message: Message, leases: Leases) -> list[str]:
    return await store.maintenance.reindex()


async def _compact(store: Store, message: Message, leases: Leases) -> str:
    return await store.maintenance.compact()


_COMMANDS: dict[str, Callable[[Store, Message, Leases], Awaitable[Any]]] = {
    "acquire": _acquire,
    "append": _append,
    "release": _release,
    "redact": _redact,
    "send_signal": _send,
    "remove_signal": _remove,
    "set_hold": _set_hold,
    "purge": _purge,
    "reindex": _reindex,
    "compact": _compact,
}
"""What other processes may ask for."""
