"""Packages and servers from npm that serve as independent oracles; a test is skipped where they cannot be installed."""

from __future__ import annotations

import contextlib
import json
import os
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

__all__ = [
    "AiMock",
    "EverythingServer",
    "aimock_server",
    "everything_command",
    "everything_http",
    "install_package",
    "require_node",
]


INSTALL_S = 300


def require_node() -> str:
    """Where node is; the test is skipped where it is not."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed: no oracle from outside")
    return found


def install_package(name: str, version: str, only: str = "") -> Path:
    """The folder of a package, or one file of it, that needs no other package; the test is skipped without it."""
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    home = cache / f"{name}-{version}"
    if not home.exists():
        _unpack_package(name, version, only, cache, home)
    return home / "package" / only


def _unpack_package(name: str, version: str, only: str, cache: Path, home: Path) -> None:
    """Unpack it beside its home and move it there whole: several test processes may be at it at once."""
    npm, tar = shutil.which("npm"), shutil.which("tar")
    if npm is None or tar is None:
        pytest.skip(f"{name} needs npm and tar, and they are not on the path")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"{name} cannot be installed: {error}")
    try:
        for command in (
            [npm, "pack", "--silent", "--pack-destination", str(fresh), f"{name}@{version}"],
            [tar, "-xzf", f"{name}-{version}.tgz", f"package/{only}"],
        ):
            done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode != 0:
                pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
        (fresh / f"{name}-{version}.tgz").unlink()
        try:
            fresh.rename(home)
        except OSError:
            if not home.exists():
                raise
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} cannot be installed: npm took more than {INSTALL_S} s")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


AIMOCK_PACKAGE, AIMOCK_VERSION = "@copilotkit/aimock", "1.43.0"
OLDEST_NODE = (20, 15)
AIMOCK_START_S = 30.0


class AiMock:
    """A running server.

    Attributes:
        url: Its address; what ``AnthropicMessages`` takes as base_url.
        openai_url: What ``OpenAIChat`` takes as base_url.
        key: The one key that it lets in.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.openai_url = f"{url}/v1"
        self.key = key

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which ``resolve`` (in this process or another) finds it, for either wire."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def script(self, *fixtures: dict[str, Any]) -> None:
        """Forget all that was before, and answer by these from now on."""
        self._control("POST", "reset")
        self._control("POST", "fixtures", {"fixtures": list(fixtures)})

    def requests(self) -> list[dict[str, Any]]:
        """What it was asked since the last script: the bodies, in its own common form."""
        entries: list[dict[str, Any]] = self._control("GET", "journal")
        return [entry["body"] for entry in entries]

    def _control(self, method: str, path: str, body: object = None) -> Any:
        with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {self.key}"}) as client:
            response = client.request(method, f"{self.url}/__aimock/{path}", json=body)
        assert response.is_success, response.text
        return response.json()


@pytest.fixture(scope="session", name="aimock")
def aimock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AiMock]:
    """The server, for as long as the tests run; give it a ``script`` first thing in each test."""
    command = _installed_command()
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
    """Where it listens, once it says so."""
    give_up = time.monotonic() + AIMOCK_START_S
    while time.monotonic() < give_up and process.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise RuntimeError(f"aimock did not start: {log.read_text()}")


def _installed_command() -> list[str]:
    """The command that starts it, after installing it if need be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("aimock needs node and npm, and they are not on the path")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_NODE:
        pytest.skip(f"aimock needs node {'.'.join(map(str, OLDEST_NODE))}, and this is {version or 'broken'}")
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    home = cache / f"aimock-{AIMOCK_VERSION}"
    script = home / "node_modules" / AIMOCK_PACKAGE / "dist" / "cli.js"
    if not script.exists():
        _install_aimock(npm, cache, home)
    return [node, str(script)]


def _install_aimock(npm: str, cache: Path, home: Path) -> None:
    """Install it beside its home and move it there whole: several test processes may be at it at once."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"aimock cannot be installed: {error}")
    try:
        options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(fresh)]
        done = subprocess.run(
            [npm, "install", *options, f"{AIMOCK_PACKAGE}@{AIMOCK_VERSION}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"aimock cannot be installed: {done.stderr.strip()[-300:]}")
        try:
            fresh.rename(home)
        except OSError:
            if not home.exists():
                raise
    except subprocess.TimeoutExpired:
        pytest.skip("aimock cannot be installed: npm took more than 300 s")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


EVERYTHING_PACKAGE, EVERYTHING_VERSION = "@modelcontextprotocol/server-everything", "2026.8.31"
EVERYTHING_START_S = 30.0


class EverythingServer:
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
        give_up = time.monotonic() + EVERYTHING_START_S
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
    home = cache / f"server-everything-{EVERYTHING_VERSION}"
    script = home / "node_modules" / EVERYTHING_PACKAGE / "dist" / "index.js"
    if not script.exists():
        _install_everything(npm, cache, home)
    return [node, str(script)]


@pytest.fixture(name="everything_http")
def everything_http(everything: list[str], tmp_path: Path) -> Iterator[EverythingServer]:
    """The server, listening on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = EverythingServer(everything, port, tmp_path / "everything.txt")
    server.start()
    yield server
    server.kill()


def _install_everything(npm: str, cache: Path, home: Path) -> None:
    """Install it beside its home and move it there whole: several test processes may be at it at once."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"server-everything cannot be installed: {error}")
    try:
        options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(fresh)]
        command = [npm, "install", *options, f"{EVERYTHING_PACKAGE}@{EVERYTHING_VERSION}"]
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
