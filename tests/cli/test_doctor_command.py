"""``agentfsm doctor``: each problem is found, named and answered with what to do, and sets the exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Host, SqliteStore
from agentfsm.testing import ScriptedModel
from tests.cli.conftest import Cli


def findings(result: Any, area: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [line for line in lines if line["area"] == area]


def one(result: Any, area: str) -> dict[str, str]:
    (found,) = findings(result, area)
    return found


def test_a_sound_machine_has_no_problem_and_every_area_is_named(cli: Cli) -> None:
    result = cli("doctor", "--offline")
    assert result.exit_code == 0, result.output
    areas = {line[9:].split("  ")[0] for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert areas >= {
        "python",
        "agentfsm",
        "packages",
        "extra cli",
        "sqlite",
        "graphviz",
        "store",
        "secret",
        "providers",
    }


def test_it_is_the_same_as_json(cli: Cli) -> None:
    result = cli("doctor", "--offline", "--json")
    assert one(result, "python")["text"].startswith(sys.version.split()[0])
    assert one(result, "agentfsm")["level"] == "ok"
    assert "pydantic" in one(result, "packages")["text"]


def test_a_package_that_is_too_old_is_a_problem_and_a_missing_extra_is_not(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "httpx":
            return "0.20.1"
        if name == "opentelemetry-api":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = cli("doctor", "--offline", "--json")
    assert result.exit_code == 1
    assert one(result, "packages")["level"] == "problem"
    assert one(result, "packages")["text"] == "httpx 0.20.1 is older than 0.27"
    assert one(result, "extra otel") == {
        "area": "extra otel",
        "level": "note",
        "text": "opentelemetry-api is not installed",
        "advice": "if you want it: pip install 'agentfsm[otel]'",
    }


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 51, 2), "warning"), ((3, 40, 1), "warning"), ((3, 51, 3), "ok"), ((3, 53, 0), "ok")],
)
def test_a_sqlite_with_the_bug_of_its_log_is_warned_about(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], level: str
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    assert one(cli("doctor", "--offline", "--json"), "sqlite")["level"] == level


def test_graphviz_is_needed_for_images_only(cli: Cli) -> None:
    found = one(cli("doctor", "--offline", "--json", PATH="/nowhere"), "graphviz")
    assert (found["level"], "png" in found["advice"]) == ("note", True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a finished run."""
    path = tmp_path / "runs.db"
    with SqliteStore(path) as opened:
        Agent(ScriptedModel(["done"]), host=Host(store=opened)).run_sync("go")
    return path


def test_a_store_is_opened_and_its_runs_are_counted(cli: Cli, store: Path) -> None:
    result = cli("doctor", "--offline", "--json", "--store", str(store), AGENTFSM_SECRET="a secret of 20 bytes")
    assert one(result, "store")["text"] == f"{store}: 1 runs, 0 waiting for a person"
    assert one(result, "secret")["text"] == "from AGENTFSM_SECRET"
    assert findings(result, "store mode") == []


def test_a_store_without_its_secret_is_warned_about(cli: Cli, store: Path) -> None:
    found = one(cli("doctor", "--offline", "--json", "--store", str(store)), "secret")
    assert (found["level"], "AGENTFSM_SECRET" in found["advice"]) == ("warning", True)


def test_a_file_that_is_no_store_is_a_problem(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "notes.db"
    file.write_text("these are notes\n" * 100)
    result = cli("doctor", "--offline", "--json", "--store", str(file))
    assert (result.exit_code, one(result, "store")["level"]) == (1, "problem")


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_files_that_others_may_read_are_reported(cli: Cli, store: Path) -> None:
    key = store.with_name("runs.db.key")
    key.write_text("a secret of 20 bytes")
    key.chmod(0o644)
    store.chmod(0o644)
    result = cli("doctor", "--offline", "--json", "--store", str(store))
    assert result.exit_code == 1
    assert one(result, "store mode")["advice"] == f"chmod 600 {store}"
    assert [found["level"] for found in findings(result, "secret")] == ["problem"]
    assert f"chmod 600 {key}" in json.dumps(one(result, "secret"))


def test_a_store_that_another_process_writes_is_named(cli: Cli, store: Path) -> None:
    program = f"from agentfsm import SqliteStore; s = SqliteStore({str(store)!r}); s.claim(); print('on'); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "on\n"
        found = one(cli("doctor", "--offline", "--json", "--store", str(store)), "store lock")
        other.communicate("\n")
    assert found["text"] == "another process writes to the store"


def test_providers_of_the_environment_are_connected_to_and_get_no_key(cli: Cli) -> None:
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(f"{self.path} {self.headers}")
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        result = cli("doctor", "--json", OPENAI_API_KEY="sk-very-secret", OPENAI_BASE_URL=url)
        server.shutdown()
    assert one(result, "openai")["text"] == f"OPENAI_API_KEY and OPENAI_BASE_URL: {url} answers"
    (request,) = received
    assert request.startswith("/v1 ")
    assert "sk-very-secret" not in request + result.output


def test_a_provider_that_cannot_be_reached_is_a_problem(cli: Cli) -> None:
    result = cli("doctor", "--json", OLLAMA_HOST="127.0.0.1:9")
    assert result.exit_code == 1
    assert one(result, "ollama")["text"].startswith("OLLAMA_HOST: http://127.0.0.1:9/v1 cannot be reached")


def test_offline_connects_to_nothing(cli: Cli) -> None:
    result = cli("doctor", "--offline", "--json", OLLAMA_HOST="127.0.0.1:9")
    assert (result.exit_code, one(result, "ollama")["level"]) == (0, "note")


def test_an_address_that_is_no_url_is_a_problem(cli: Cli) -> None:
    result = cli("doctor", "--json", OPENAI_API_KEY="k", OPENAI_BASE_URL="not a url")
    assert (result.exit_code, one(result, "openai")["level"]) == (1, "problem")
