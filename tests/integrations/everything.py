"""MCP's own reference server, ``@modelcontextprotocol/server-everything`` from npm: code that nobody here wrote.

It is installed once into a cache directory (``AGENTFSM_TEST_CACHE``, else ``~/.cache/agentfsm-tests``); without
node, npm or a way to install it, its tests are skipped and say why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Everything", "everything_command", "everything_http"]

PACKAGE, VERSION = "@modelcontextprotocol/server-everything", "2026.8.31"
START_S = 30.0


class Everything:
    """The server over streamable HTTP; it can be stopped and started again on its port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command, self.port, self._log = command, port, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._command, "streamableHttp"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PORT": str(self.port)},
            )
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server did not start: {self._log.read_text()}")

    def kill(self) -> None:
        """Stop it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="session", name="everything")
def everything_command() -> list[str]:
    """The command that starts it, without the word for its transport."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("server-everything needs node and npm, and they are not on the path")
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    home = cache / f"server-everything-{VERSION}"
    script = home / "node_modules" / PACKAGE / "dist" / "index.js"
    if not script.exists():
        _install(npm, cache, home)
    return [node, str(script)]


@pytest.fixture(name="everything_http")
def everything_http(everything: list[str], tmp_path: Path) -> Iterator[Everything]:
    """The server, listening on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Everything(everything, port, tmp_path / "everything.txt")
    server.start()
    yield server
    server.kill()


def _install(npm: str, cache: Path, home: Path) -> None:
    """Install it beside its home and move it there whole: several test processes may be at it at once."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"server-everything cannot be installed: {error}")
    try:
        options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(fresh)]
        command = [npm, "install", *options, f"{PACKAGE}@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            pytest.skip(f"server-everything cannot be installed: {done.stderr.strip()[-300:]}")
        try:
            fresh.rename(home)
        except OSError:
            if not home.exists():
                raise
    except subprocess.TimeoutExpired:
        pytest.skip("server-everything cannot be installed: npm took more than 300 s")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
