"""Servers of local models and gateways, installed or built once: llama-server, transformers and LiteLLM's proxy.

A test is skipped, with the reason, where a server cannot be had. Each is found by a variable, or installed into the
cache of the tests; llama-server is built from its source, which takes some minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.npm_servers import AiMock, install_once, require_program
from tests.helpers.ports import own_port
from tests.helpers.tiny_model import write_gguf, write_transformers

__all__ = [
    "LocalServer",
    "litellm_server",
    "llama_server",
    "llama_server_program",
    "python_with",
    "run_llama_server",
    "shipped_templates",
    "transformers_server",
]

LLAMA_CPP_PYTHON = "0.3.36"
"""The release of llama-cpp-python whose sdist has the source of llama.cpp."""

LITELLM, TRANSFORMERS, TORCH = "1.106.2", "5.23.0", "2.13.0+cpu"
BUILD_S, INSTALL_S, START_S = 5400.0, 1800.0, 180.0


class LocalServer:
    """A running server.

    Attributes:
        url: Its address.
        key: Its API key.
    """

    def __init__(self, url: str, key: str = "no-key") -> None:
        self.url, self.key = url, key


@contextmanager
def _running(command: list[str], port: int, health: str, log: Path, **env: str) -> Generator[str]:
    """Run a server until the block ends; yields its address once it is healthy."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        with httpx.Client(trust_env=False) as client:
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{url}{health}").is_success:
                        break
                time.sleep(0.1)
            else:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def python_with(name: str, *requirements: str) -> str:
    """The Python of a virtual environment with these packages."""
    python = "venv/bin/python"
    commands = [
        [sys.executable, "-m", "venv", "venv"],
        [python, "-m", "pip", "install", "--quiet", *requirements],
    ]
    return str(install_once(name, commands, INSTALL_S) / python)


# -- llama-server ---------------------------------------------------------------------------------------------------


def _built() -> Path:
    """The folder with llama-server and the chat templates of its source."""
    for program in ("cmake", "c++", "tar"):
        require_program(program, "llama-server")
    package = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    source = f"{package}/vendor/llama.cpp"
    options = ["BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=OFF", "GGML_OPENMP=OFF", "LLAMA_BUILD_TESTS=OFF"]
    options += ["LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF", "CMAKE_BUILD_TYPE=Release"]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    commands = [
        [*fetch, "--dest", ".", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"],
        ["tar", "-xzf", f"{package}.tar.gz"],
        ["cmake", "-S", source, "-B", "build", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", *(f"-D{each}" for each in options)],
        ["cmake", "--build", "build", "--target", "llama-server", "--parallel", "2"],
        ["cp", "-r", "build/bin/llama-server", f"{source}/models/templates", "."],
        ["rm", "-r", "build", package, f"{package}.tar.gz"],
    ]
    return install_once(f"llama-server-{LLAMA_CPP_PYTHON}", commands, BUILD_S)


def llama_server_program() -> Path:
    """llama-server: that of ``AGENTFSM_LLAMA_SERVER``, the installed one, or one that is built."""
    found = os.environ.get("AGENTFSM_LLAMA_SERVER") or shutil.which("llama-server")
    return Path(found) if found else _built() / "llama-server"


def shipped_templates() -> list[Path]:
    """The chat templates that llama.cpp ships."""
    return sorted((_built() / "templates").glob("*.jinja"))


@contextmanager
def run_llama_server(folder: Path, template: Path | None = None) -> Generator[LocalServer]:
    """llama-server with a tiny model, which calls a tool once and then answers.

    Args:
        folder: For the model and the log.
        template: Another chat template than that of the model.
    """
    program, port, model = llama_server_program(), own_port(), folder / "tiny.gguf"
    if not model.exists():
        write_gguf(model)
    command = [str(program), "--model", str(model), "--port", str(port), "--ctx-size", "8192", "--parallel", "1"]
    command += ["--threads", "1", *(["--chat-template-file", str(template)] if template is not None else [])]
    with _running(command, port, "/health", folder / "llama-server.txt") as url:
        yield LocalServer(url)


@pytest.fixture(scope="module", name="llama")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """llama-server, with a tiny model."""
    with run_llama_server(tmp_path_factory.mktemp("llama")) as server:
        yield server


# -- transformers and LiteLLM ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="transformers")
def transformers_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """``transformers serve``, with a tiny model; the name of the model is its folder, which ``url`` ends with."""
    python = os.environ.get("AGENTFSM_TRANSFORMERS_PYTHON") or python_with(
        f"transformers-{TRANSFORMERS}", f"torch=={TORCH}", f"transformers[serving]=={TRANSFORMERS}"
    )
    folder, port = tmp_path_factory.mktemp("transformers"), own_port()
    model = folder / "tiny"
    model.mkdir()
    write_transformers(model)
    command = [python, "-c", "from transformers.cli.transformers import main; main()", "serve", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    with _running(command, port, "/health", folder / "log.txt", HF_HUB_OFFLINE="1") as url:
        yield LocalServer(f"{url}#{model}")


@pytest.fixture(scope="module", name="litellm")
def litellm_server(tmp_path_factory: pytest.TempPathFactory, aimock: AiMock) -> Iterator[LocalServer]:
    """LiteLLM's proxy in front of aimock, whose model is called ``tiny``."""
    python = python_with(f"litellm-{LITELLM}", f"litellm[proxy]=={LITELLM}")
    folder, port, key = tmp_path_factory.mktemp("litellm"), own_port(), f"sk-{secrets.token_hex(8)}"
    behind = {"model": "openai/gpt-4o", "api_base": aimock.openai_url, "api_key": aimock.key}
    config = {
        "model_list": [{"model_name": "tiny", "litellm_params": behind}],
        "general_settings": {"master_key": key},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    command = [python, "-c", "from litellm import run_server; run_server()", "--config", str(folder / "config.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    with _running(command, port, "/health/liveliness", folder / "log.txt") as url:
        yield LocalServer(url, key)
