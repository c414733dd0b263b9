"""``GoogleAccount``: calls of Vertex AI, compared with its vendors' clients, and where their tokens come from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import google.auth
import openai
import openai.providers
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.oauth2.credentials import Credentials

from agentfsm import Agent
from agentfsm.errors import ConfigurationError, MissingExtraError, ProviderError
from agentfsm.models import GoogleAccount, resolve
from tests.helpers.cloud_server import ANSWER, Call, CloudServer, ask, cloud_server, weather

CLAUDE, GEMINI = "claude-sonnet-4-5@20250929", "google/gemini-2.5-flash"
PROJECT, LOCATION = "acme-1", "europe-west1"


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    format_, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, format_, none).decode()


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, private_key: str) -> Iterator[CloudServer]:
    """A server in place of Vertex AI and of Google's token server, and the file of a service account for it."""
    for name in ("GOOGLE_CLOUD_PROJECT", "ANTHROPIC_VERTEX_PROJECT_ID", "GOOGLE_CLOUD_LOCATION", "CLOUD_ML_REGION"):
        monkeypatch.delenv(name, raising=False)
    with cloud_server() as server:
        account = {
            "type": "service_account", "project_id": PROJECT, "private_key_id": "k", "private_key": private_key,
            "client_email": "agent@acme-1.iam.gserviceaccount.com", "client_id": "1",
            "token_uri": f"{server.url}/token",
        }  # fmt: skip
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
        monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", LOCATION)
        server.refused_with = 401
        server.refuse = lambda call: (
            "" if call.headers.get("authorization", "") == _bearer(server.tokens) else "expired"
        )
        yield server


def _bearer(n: int) -> str:
    return f"Bearer token-{n:010}"


def account(server: CloudServer, **more: Any) -> GoogleAccount:
    return GoogleAccount(endpoint=f"{server.url}/v1", **more)


# -- the same requests as the vendors' clients ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_for_claude_equal_those_of_its_vendors_client(stream: bool, vertex: CloudServer) -> None:
    ask(resolve(f"vertex:{CLAUDE}", api_key=account(vertex)), stream=stream)
    mine = vertex.calls[-1]
    body = {name: value for name, value in mine.data.items() if name not in ("anthropic_version", "stream")}
    client = anthropic.AnthropicVertex(
        region=LOCATION, project_id=PROJECT, base_url=f"{vertex.url}/v1", access_token=_bearer(vertex.tokens)[7:],
        max_retries=0,
    )  # fmt: skip
    call: Any = client.messages.create
    reply = call(model=CLAUDE, stream=stream, **body)
    if stream:
        assert [event.type for event in reply][-1] == "message_stop"
    theirs = vertex.calls[-1]
    assert mine.path == theirs.path
    assert {"stream": False, **mine.data, "anthropic_version": ""} == {**theirs.data, "anthropic_version": ""}
    assert mine.data["anthropic_version"] == "vertex-2023-10-16"  # the only one that Google documents
    assert mine.headers["authorization"] == theirs.headers["authorization"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_for_other_models_equal_those_of_openais_client(stream: bool, vertex: CloudServer) -> None:
    """Google documents this client with this address (.../endpoints/openapi) and a token as the key."""
    ask(resolve(f"vertex:{GEMINI}", api_key=account(vertex)), stream=stream)
    mine = vertex.calls[-1]
    address = f"{vertex.url}/v1/projects/{PROJECT}/locations/{LOCATION}/endpoints/openapi"
    token = _bearer(vertex.tokens)[7:]
    chat: Any = openai.OpenAI(base_url=address, api_key=token, max_retries=0).chat.completions.create
    chat(**mine.data)
    theirs = vertex.calls[-1]
    assert (mine.path, mine.data) == (theirs.path, theirs.data)
    assert mine.headers["authorization"] == theirs.headers["authorization"]


@pytest.mark.parametrize("location", ["global", "us", "eu", "europe-west1"])
def test_the_addresses_are_those_of_the_vendors_client(location: str) -> None:
    client = anthropic.AnthropicVertex(region=location, project_id=PROJECT, access_token="t")
    address = GoogleAccount(project=PROJECT, location=location).base_url("/x")
    assert address == f"{str(client.base_url).rstrip('/')}/projects/{PROJECT}/locations/{location}/x"


# -- runs and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"vertex:{CLAUDE}", f"vertex:{GEMINI}"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_run_calls_a_tool_and_answers(name: str, stream: bool, vertex: CloudServer) -> None:
    async def main() -> Any:
        run = Agent(resolve(name, api_key=account(vertex)), tools=[weather]).run("What is the weather in Paris?")
        if stream:
            async for _ in run:
                pass
        return (await run).output

    assert asyncio.run(main()) == ANSWER
    assert (len(vertex.calls), vertex.tokens) == (2, 1)
    assert b"Paris: sunny" in vertex.calls[1].body


def test_a_token_that_expires_in_the_middle_of_a_run_is_renewed_once(vertex: CloudServer) -> None:
    def refuse(call: Call) -> str:
        valid = _bearer(1 if len(vertex.calls) == 1 else 2)
        return "" if call.headers["authorization"] == valid else "Request had invalid authentication credentials"

    vertex.refuse = refuse
    model: Any = resolve(f"vertex:{CLAUDE}", api_key=account(vertex))
    assert Agent(model, tools=[weather]).run_sync("Paris?").output == ANSWER
    assert [call.headers["authorization"] for call in vertex.calls] == [_bearer(1), _bearer(1), _bearer(2)]
    assert [each.get_secret_value() for each in model.secrets] == [_bearer(1)[7:], _bearer(2)[7:]]


def test_a_token_that_is_always_rejected_is_renewed_no_more_than_once(vertex: CloudServer) -> None:
    vertex.refuse = lambda call: "expired"
    with pytest.raises(ProviderError, match="rejects the Google credentials"):
        ask(resolve(f"vertex:{GEMINI}", api_key=account(vertex)))
    assert len(vertex.calls) == vertex.tokens == 2


def test_credentials_of_the_app_are_used_while_they_are_valid(vertex: CloudServer) -> None:
    vertex.refuse = lambda call: "" if call.headers["authorization"] == "Bearer mine" else "no"
    given = Credentials(token="mine")  # type: ignore[no-untyped-call]
    ask(resolve(f"vertex:{GEMINI}", api_key=account(vertex, credentials=given, project="p")))
    assert vertex.tokens == 0
    assert vertex.calls[0].path.startswith("/v1/projects/p/")


def test_a_function_may_get_the_tokens_instead(vertex: CloudServer) -> None:
    async def token() -> str:
        return "mine"

    vertex.refuse = lambda call: "" if call.headers["authorization"] == "Bearer mine" else "no"
    address = f"{vertex.url}/v1/projects/p/locations/eu/publishers/anthropic/models"
    ask(resolve(f"vertex:{CLAUDE}", base_url=address, api_key=token))
    assert vertex.calls[0].path == f"/v1/projects/p/locations/eu/publishers/anthropic/models/{CLAUDE}:rawPredict"


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_missing_location_is_asked_for(vertex: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_CLOUD_LOCATION")
    with pytest.raises(
        ConfigurationError, match=r"set GOOGLE_CLOUD_LOCATION, or pass api_key=GoogleAccount\(location="
    ):
        resolve(f"vertex:{CLAUDE}")


def test_a_missing_project_is_asked_for() -> None:
    given = Credentials(token="mine")  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match=r"set GOOGLE_CLOUD_PROJECT, or pass api_key=GoogleAccount\(project="):
        GoogleAccount(location=LOCATION, credentials=given).base_url("")


@pytest.mark.parametrize("values", [{"project": "a/b"}, {"project": ".."}, {"location": "evil.example/"}])
def test_what_is_no_project_or_location_is_no_part_of_an_address(values: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="is not"):
        GoogleAccount(**{"project": PROJECT, "location": LOCATION, **values}).base_url("")


def test_missing_credentials_are_an_error_that_says_what_to_do(
    vertex: CloudServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(**_: Any) -> None:
        raise google.auth.exceptions.DefaultCredentialsError("secret words")

    monkeypatch.setattr(google.auth, "default", nothing)  # it would look for a machine of Google's
    with pytest.raises(ProviderError, match="gcloud auth application-default login") as caught:
        ask(resolve(f"vertex:{GEMINI}", api_key=account(vertex, project="p")))
    assert "secret words" not in str(caught.value)


def test_without_its_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.models.google.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"agentfsm\[vertex\]"):
        resolve(f"vertex:{CLAUDE}")
