"""``agentfsm run`` with a tool, two turns, streamed and whole, against servers of local models and gateways.

``make servers`` runs these; each is skipped, with the reason, where its server cannot be had.
Ollama's own wire is driven against aimock only: LiteLLM's proxy has no route for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.helpers.local_servers import (  # noqa: F401  # importing registers the fixtures
    LocalServer,
    litellm_server,
    llama_server,
    transformers_server,
)
from tests.helpers.npm_servers import AiMock, aimock_server  # noqa: F401  # the same
from tests.helpers.tiny_model import ANSWER

pytestmark = [pytest.mark.servers, pytest.mark.timeout(7200)]  # the first time, a server is built

TOOLS = '''
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"{city}: sunny, 21 degrees"
'''
PROMPT = "What is the weather in Paris?"
MODES = pytest.mark.parametrize("mode", [(), ("--no-stream",)], ids=["streamed", "whole"])
WIRES = pytest.mark.parametrize(
    ("name", "path"),
    [("litellm:tiny", "/v1"), ("openai-responses:tiny", "/v1"), ("anthropic:tiny", "")],
    ids=["chat", "responses", "anthropic"],
)


def answer(cli: Cli, folder: Path, name: str, url: str, key: str, mode: tuple[str, ...]) -> str:
    (folder / "tools.py").write_text(TOOLS)
    words = ("--base-url", url, "--api-key-env", "MY_KEY", "--tools", "tools.py", "--quiet", "--no-store")
    result = cli("run", PROMPT, "--model", name, *words, *mode, MY_KEY=key)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@MODES
@WIRES
def test_llama_server(llama: LocalServer, cli: Cli, tmp_path: Path, name: str, path: str, mode: Any) -> None:
    assert answer(cli, tmp_path, name, llama.url + path, "k", mode) == ANSWER


@MODES
def test_transformers(transformers: LocalServer, cli: Cli, tmp_path: Path, mode: Any) -> None:
    url, _, model = transformers.url.partition("#")
    text = answer(cli, tmp_path, f"vllm:{model}", f"{url}/v1", "k", mode)
    assert text.endswith(ANSWER)  # it shows the token that says what is due


@MODES
@WIRES
def test_the_proxy_of_litellm(
    litellm: LocalServer, aimock: AiMock, cli: Cli, tmp_path: Path, name: str, path: str, mode: Any
) -> None:
    call = {"id": "call_1", "name": "weather", "arguments": {"city": "Paris"}}
    aimock.script(
        {"match": {"turnIndex": 0}, "response": {"toolCalls": [call]}},
        {"match": {"turnIndex": 1}, "response": {"content": ANSWER}},
    )
    assert answer(cli, tmp_path, name, litellm.url + path, litellm.key, mode) == ANSWER
    first, second = aimock.requests()
    assert [bool(each.get("stream")) for each in (first, second)] == [not mode] * 2
    assert "Paris: sunny" in str(second["messages"])
