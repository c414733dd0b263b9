"""``agentfsm run`` in a company: a private authority, a proxy with a password, keys that expire, accounts of clouds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.helpers.cloud_server import ANSWER, Call, cloud_server, signature_problem
from tests.helpers.company_network import (  # noqa: F401  # importing registers the fixtures
    PASSWORD,
    Authority,
    authenticating_proxy,
    certificate_authority,
)
from tests.helpers.recording_server import good_server

TOOLS = '''
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"
'''
RENEW = """
import pathlib
count = pathlib.Path("count")
count.write_text(str(int(count.read_text()) + 1))
print("key-" + count.read_text())
"""
RUN = ("run", "What is the weather in Paris?", "--no-store", "--tools", "tools.py", "--quiet", "--model")


@pytest.fixture(autouse=True)
def tools(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)


def test_a_server_of_a_private_authority_is_trusted_by_its_file(cli: Cli, authority: Authority) -> None:
    with good_server("openai", authority.context) as server:
        words = (*RUN, "openai:m", "--base-url", f"{server.url}/v1")
        assert cli(*words, "--ca-bundle", str(authority.file)).stdout.strip() == "hello"
        refused = cli(*words)
    assert refused.exit_code == 1
    assert "--ca-bundle" in refused.stderr
    assert len(server.calls) == 1


def test_calls_go_through_a_proxy_with_a_password(cli: Cli, proxy: str, authority: Authority) -> None:
    with good_server("openai", authority.context) as server:
        words = (*RUN, "openai:m", "--base-url", f"{server.url}/v1", "--ca-bundle", str(authority.file), "--proxy")
        assert cli(*words, f"http://ann:{PASSWORD}@{proxy}").stdout.strip() == "hello"
        refused = cli(*words, f"http://ann:wrong-word-4711@{proxy}")
    assert refused.exit_code == 1
    assert "407" in refused.stderr
    assert "word-4711" not in refused.output
    assert len(server.calls) == 1


def test_a_key_that_expires_in_the_middle_of_a_run_is_renewed(cli: Cli, tmp_path: Path) -> None:
    """The command of the key is run again; the second turn of the run gets the new key."""
    (tmp_path / "count").write_text("0")
    (tmp_path / "renew.py").write_text(RENEW)
    address = "/v1/projects/acme-1/locations/europe-west1/endpoints/openapi"
    with cloud_server() as server:
        server.refused_with = 401
        server.refuse = lambda call: "" if call.headers["authorization"] == _valid_key(server.calls) else "expired"
        command = shlex.join([sys.executable, "renew.py"])
        words = ("vertex:google/gemini-2.5-flash", "--base-url", f"{server.url}{address}", "--api-key-command", command)
        result = cli(*RUN, *words)
    assert result.stdout.strip() == ANSWER, result.stderr
    assert [call.headers["authorization"] for call in server.calls] == ["Bearer key-1", "Bearer key-1", "Bearer key-2"]


def _valid_key(calls: list[Call]) -> str:
    return f"Bearer key-{min(len(calls), 2)}"


@pytest.mark.parametrize("model", ["openai.gpt-oss-20b-1:0", "anthropic.claude-sonnet-4-6"])
def test_calls_of_bedrock_are_signed_with_the_credentials_of_the_environment(cli: Cli, model: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "ID", "AWS_SECRET_ACCESS_KEY": "secret-0123456789", "AWS_REGION": "eu-central-1"}
    with cloud_server() as server:
        server.refuse = lambda call: signature_problem(call, {"ID": "secret-0123456789"}, "eu-central-1")
        result = cli(*RUN, f"bedrock:{model}", **keys, AWS_ENDPOINT_URL_BEDROCK_RUNTIME=server.url)
    assert result.stdout.strip() == ANSWER, result.stderr
    assert len(server.calls) == 2
