"""The examples of models (``streaming.py``, ``hosted_models.py``) run and print the expected output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{example}.py"), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["openai:m", "openai-responses:m", "anthropic:m", "ollama:m"])
def test_streaming_prints_text_as_it_arrives(model: str, tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("clock", {})), text_output("A haiku.")) as server:
        keys = {"OPENAI_API_KEY": "k" * 20, "ANTHROPIC_API_KEY": "k" * 20}
        homes = {"OPENAI_BASE_URL": server.url, "ANTHROPIC_BASE_URL": server.host, "OLLAMA_HOST": server.host}
        done = run("streaming", tmp_path, "-m", model, "Write a haiku.", **keys, **homes)
    assert (done.stderr, done.returncode) == ("", 0)
    assert "[clock]" in done.stdout
    assert done.stdout.endswith("A haiku.\n")
    assert all(request["stream"] is True for request in server.requests)


@pytest.mark.slow
def test_hosted_models_falls_back_and_prints_its_cost(tmp_path: Path) -> None:
    with fake_model_server(529) as busy, fake_model_server(text_output("For a lot.")) as server:
        done = run(
            "hosted_models",
            tmp_path,
            "Paris",
            "Rome",
            ANTHROPIC_API_KEY="k" * 20,
            ANTHROPIC_BASE_URL=busy.host,
            OPENAI_API_KEY="k" * 20,
            OPENAI_BASE_URL=server.url,
        )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        line
        for town in ("Paris", "Rome")
        for line in (f"{town}: For a lot.", "  10 + 5 tokens, 0.000013 USD")  # 10 x 0.25 + 5 x 2.00 per million
    ]
