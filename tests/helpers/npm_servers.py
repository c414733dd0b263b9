"""Packages and servers from npm that serve as independent oracles; a test is skipped where they cannot be installed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.ports import own_port

__all__ = [
    "AiMock",
    "EverythingServer",
    "aimock_server",
    "conformance_command",
    "everything_command",
    "everything_http",
    "install_once",
    "install_package",
    "require_new_node",
    "require_node",
    "require_program",
]


INSTALL_S = 300


def require_node() -> str:
    """The path of node; skips the test where node is not installed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed, and it is the oracle of this test")
    return node


def require_new_node() -> str:
    """The path of a node of version 22 or later, installed from npm if the one here is older."""
    node = require_node()
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:1])) >= (22,):
        return node
    name = f"node-{platform.system().lower()}-{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'x64'}"
    return str(install_package(name, "22.23.3", "bin/node"))


def conformance_command() -> list[str]:
    """The command that runs the official conformance suite of MCP."""
    node = require_new_node()
    return [node, *_install_program("@modelcontextprotocol/conformance", "0.1.16", "dist/index.js")[1:]]


def install_package(name: str, version: str, only: str = "") -> Path:
    """The folder of an npm package without dependencies, or one file of it; skips the test if that fails."""
    npm, tar = require_program("npm", name), require_program("tar", name)
    packed = f"{name.removeprefix('@').replace('/', '-')}-{version}"
    commands = [
        [npm, "pack", "--silent", "--pack-destination", ".", f"{name}@{version}"],
        [tar, "-xzf", f"{packed}.tgz", f"package/{only}"],
    ]
    return install_once(packed, commands) / "package" / only


def _install_program(package: str, version: str, script: str) -> list[str]:
    """The command that runs a script of an npm package, installed with its dependencies."""
    name = package.rpartition("/")[2]
    node, npm = require_program("node", name), require_program("npm", name)
    options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
    folder = install_once(f"{name}-{version}", [[npm, "install", *options, f"{package}@{version}"]])
    return [node, str(folder / "node_modules" / package / script)]


def require_program(program: str, needed_by: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{needed_by} needs {program}, which is not installed")
    return path


def install_once(name: str, commands: list[list[str]], limit_s: float = INSTALL_S) -> Path:
    """The cache folder of a package, filled by commands that run in it if it does not exist; or skips the test.

    The commands run in a temporary folder that is renamed at the end: other test processes may install the same
    package.
    """
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    folder = cache / name
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"{name} cannot be installed: {error}")
    try:
        for command in commands:
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=limit_s, check=False)
            if done.returncode != 0:
                pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} cannot be installed: that took more than {limit_s:g} s")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


AIMOCK_PACKAGE, AIMOCK_VERSION = "@copilotkit/aimock", "1.43.0"
OLDEST_NODE = (20, 15)
AIMOCK_START_S = 30.0


class AiMock:
    """A running aimock server.

    Attributes:
        url: Its address, as the ``base_url`` of ``AnthropicMessages``.
        openai_url: The ``base_url`` of ``OpenAIChat``.
        key: The only API key that it accepts.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.openai_url = f"{url}/v1"
        self.key = key

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that make a model of either wire use this server."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def script(self, *fixtures: dict[str, Any]) -> None:
        """Reset the server, and answer with these fixtures from now on."""
        self._control("POST", "reset")
        self._control("POST", "fixtures", {"fixtures": list(fixtures)})

    def requests(self) -> list[dict[str, Any]]:
        """The bodies of the requests since the last ``script``, in aimock's common format."""
        entries: list[dict[str, Any]] = self._control("GET", "journal")
        return [entry["body"] for entry in entries]

    def _control(self, method: str, path: str, body: object = None) -> Any:
        with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {self.key}"}) as client:
            response = client.request(method, f"{self.url}/__aimock/{path}", json=body)
        assert response.is_success, response.text
        return response.json()


@pytest.fixture(scope="session", name="aimock")
def aimock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AiMock]:
    """The server, one for the whole test session; each test begins with ``script``."""
    command = _aimock_command()
    folder = tmp_path_factory.mktemp("aimock")
    (folder / "empty.json").write_text(json.dumps({"fixtures": []}))
    key = f"sk-aimock-{secrets.token_hex(12)}"
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", "0", "--fixtures", str(folder / "empty.json")],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"AIMOCK_API_KEYS": key},
        )
    try:
        yield AiMock(_wait_for_address(process, log), key)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server logs once it listens."""
    deadline = time.monotonic() + AIMOCK_START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise RuntimeError(f"aimock did not start: {log.read_text()}")


def _aimock_command() -> list[str]:
    """The command that starts the server."""
    version = subprocess.run([require_node(), "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_NODE:
        pytest.skip(f"aimock needs node {'.'.join(map(str, OLDEST_NODE))}, and this is {version or 'broken'}")
    return _install_program(AIMOCK_PACKAGE, AIMOCK_VERSION, "dist/cli.js")


EVERYTHING_PACKAGE, EVERYTHING_VERSION = "@modelcontextprotocol/server-everything", "2026.8.31"
EVERYTHING_START_S = 30.0


class EverythingServer:
    """The MCP server "everything" over streamable HTTP; it can be stopped and restarted on the same port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command, self.port, self._log = command, port, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
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
        deadline = time.monotonic() + EVERYTHING_START_S
        while time.monotonic() < deadline and self._process.poll() is None:
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
    """The command that starts the server; its argument is the transport."""
    return _install_program(EVERYTHING_PACKAGE, EVERYTHING_VERSION, "dist/index.js")


@pytest.fixture(name="everything_http")
def everything_http(everything: list[str], tmp_path: Path) -> Iterator[EverythingServer]:
    """The server, listening on the loopback interface."""
    server = EverythingServer(everything, own_port(), tmp_path / "everything.txt")
    server.start()
    yield server
    server.kill()
