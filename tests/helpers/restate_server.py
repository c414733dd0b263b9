"""A Restate server, installed from npm, that tests start on the loopback interface; skipped where it cannot be had."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.helpers.npm_servers import install_package
from tests.helpers.ports import own_port

__all__ = ["RestateServer", "running_restate"]

VERSION = "1.7.12"
START_S = 60.0


@dataclass(frozen=True)
class RestateServer:
    """A running server: its addresses for requests and for administration."""

    ingress: str
    admin: str


@contextmanager
def running_restate(folder: Path) -> Generator[RestateServer]:
    """A server that keeps its data in a folder, until the block ends."""
    system = f"{platform.system().lower()}-{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'x64'}"
    program = install_package(f"@restatedev/restate-server-{system}", VERSION, "bin/restate-server")
    ingress, admin, node = own_port(), own_port(), own_port()
    environment = os.environ | {
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_BASE_DIR": str(folder),
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_DEFAULT_NUM_PARTITIONS": "2",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_LISTEN_MODE": "tcp",
    }
    log = folder / "log.txt"
    with log.open("wb") as out:
        server = subprocess.Popen([program, "--no-logo"], env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        found = RestateServer(f"http://127.0.0.1:{ingress}", f"http://127.0.0.1:{admin}")
        deadline = time.monotonic() + START_S
        while not _is_ready(found):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        yield found
    finally:
        server.terminate()
        server.wait(60)


def _is_ready(server: RestateServer) -> bool:
    """Whether it takes requests, and all of its partitions can be searched."""
    try:
        answered = httpx.get(f"{server.ingress}/restate/health", trust_env=False)
        query = {"query": "SELECT count(*) FROM sys_invocation"}
        searched = httpx.post(f"{server.admin}/query", json=query, trust_env=False)
    except httpx.HTTPError:
        return False
    return answered.is_success and searched.is_success
