"""A pgbouncer in transaction mode before a PostgreSQL server of the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.helpers.ports import own_port

SERVER_CONNECTIONS = 3


@contextlib.contextmanager
def transaction_pooler(url: str) -> Generator[str]:
    """The URL of a database through a pooler, whose clients share three connections to the server.

    Args:
        url: The URL of the database, reached through a Unix socket.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    parts = urlsplit(url)
    (folder_of_socket,) = parse_qs(parts.query)["host"]
    port = own_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        users, settings = Path(folder) / "users.txt", Path(folder) / "pgbouncer.ini"
        users.write_text('"postgres" ""\n')
        settings.write_text(
            f"[databases]\n* = host={folder_of_socket} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
            f"auth_file = {users}\npool_mode = transaction\ndefault_pool_size = {SERVER_CONNECTIONS}\n"
            "max_client_conn = 200\nadmin_users = postgres\n"
        )
        owner = Path(folder_of_socket).stat().st_uid if os.name == "posix" and os.geteuid() == 0 else None
        child = subprocess.Popen(  # it refuses to run as root
            [program, "-q", str(settings)], user=owner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for_port(port)
            yield f"postgresql://postgres@127.0.0.1:{port}{parts.path}?sslmode=disable&gssencmode=disable"
        finally:
            child.terminate()
            child.wait(30)


def wait_for_port(port: int) -> None:
    """Wait until a process listens."""
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("pgbouncer does not listen")
