"""The MCP server of ``mcp_sdk_server.py``, made with the official SDK, as tools over stdio and as a running server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm.integrations.mcp.toolset import MCPTools
from tests.helpers.ports import own_port

__all__ = ["SdkServer", "open_and_close", "sdk_http", "sdk_legacy_http", "sdk_stdio"]

SCRIPT = Path(__file__).parent / "mcp_sdk_server.py"
START_S = 30.0


def sdk_stdio(folder: Path, *flags: str, **options: Any) -> MCPTools:
    """The server's tools over stdio; the options are those of ``MCPTools.stdio``."""
    return MCPTools.stdio(sys.executable, [str(SCRIPT), "stdio", str(folder), *flags], **options)


class SdkServer:
    """The server over streamable HTTP; it can be stopped and restarted on the same port."""

    def __init__(self, folder: Path, *flags: str, script: Path = SCRIPT) -> None:
        self.port = own_port()
        self.folder, self.flags, self.script = folder, flags, script
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def done(self) -> list[str]:
        """What its tools have done."""
        path = self.folder / "done.txt"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, **env: str) -> None:
        """Start it, and wait until it listens."""
        with (self.folder / "server.txt").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(self.script), str(self.port), str(self.folder), *self.flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server did not start: {(self.folder / 'server.txt').read_text()}")

    def kill(self) -> None:
        """Stop it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(name="legacy_server", scope="module")
def sdk_legacy_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    """The server with the protocol of 2025-11-25 only."""
    server = SdkServer(tmp_path_factory.mktemp("mcp"), "legacy")
    server.start()
    yield server
    server.kill()


@pytest.fixture(name="sdk_server", scope="module")
def sdk_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    """The server, listening on the loopback interface."""
    server = SdkServer(tmp_path_factory.mktemp("mcp"))
    server.start()
    yield server
    server.kill()


def open_and_close(tools: MCPTools) -> None:
    """Connect to a server, and end the connection."""

    async def main() -> None:
        async with tools:
            pass

    asyncio.run(main())
