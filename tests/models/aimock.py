"""A scripted model server outside this process: ``@copilotkit/aimock`` from npm, on loopback.

It is code that nobody here wrote, so a test against it does not share our reading of the wires. It speaks
both on one port, and wants a key as real providers do. It is installed once into a cache directory
(``AGENTFSM_TEST_CACHE``, else ``~/.cache/agentfsm-tests``); without node, npm or a way to install it, its
tests are skipped and say why.

In a test module::

    from tests.models.aimock import AiMock, aimock_server  # the import makes the fixture known

    def test_something(aimock: AiMock) -> None:
        aimock.script(
            {"match": {"userMessage": "weather", "hasToolResult": False},
             "response": {"toolCalls": [{"id": "c1", "name": "weather", "arguments": {"city": "Paris"}}]}},
            {"match": {"hasToolResult": True}, "response": {"content": "It is sunny."}},
        )
        ...  # call a model at aimock.openai_url or aimock.url (Anthropic), with aimock.key;
        ...  # a program in another process finds both through aimock.environ

Each script is a list of fixtures; the first whose ``match`` fits answers. What ``match`` may hold:
``userMessage`` (part of the last user message), ``systemMessage``, ``hasToolResult``, ``toolCallId``,
``turnIndex`` (how many assistant messages there are), ``sequenceIndex`` (how often this one matched),
``model``; ``{}`` fits all. What ``response`` may hold: ``content``, ``toolCalls``, ``finishReason``,
``usage``, or ``error`` with ``status`` and ``retryAfter`` (seconds). No fit is a 404.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

__all__ = ["AiMock", "aimock_server"]

PACKAGE, VERSION = "@copilotkit/aimock", "1.43.0"
OLDEST_NODE = (20, 15)
START_S = 30.0


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
    command = _installed()
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
        yield AiMock(_address(process, log), key)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, once it says so."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise RuntimeError(f"aimock did not start: {log.read_text()}")


def _installed() -> list[str]:
    """The command that starts it, after installing it if need be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("aimock needs node and npm, and they are not on the path")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_NODE:
        pytest.skip(f"aimock needs node {'.'.join(map(str, OLDEST_NODE))}, and this is {version or 'broken'}")
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    home = cache / f"aimock-{VERSION}"
    script = home / "node_modules" / PACKAGE / "dist" / "cli.js"
    if not script.exists():
        _install(npm, cache, home)
    return [node, str(script)]


def _install(npm: str, cache: Path, home: Path) -> None:
    """Install it beside its home and move it there whole: several test processes may be at it at once."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"aimock cannot be installed: {error}")
    try:
        options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(fresh)]
        done = subprocess.run(
            [npm, "install", *options, f"{PACKAGE}@{VERSION}"], capture_output=True, text=True, timeout=300, check=False
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
