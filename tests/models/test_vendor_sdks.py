"""The requests of each provider of the table, compared with those that the vendor's own client sends.

Both arrive at a server of the tests, which they reach instead of the provider's own address.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import anthropic
import httpx
import httpx2  # what the vendors' clients are built on
import ollama
import openai
import pytest

from agentfsm import ProviderError
from agentfsm.loop.messages import Message, Role, ToolCall
from agentfsm.loop.model import ModelRequest
from agentfsm.models import HttpOptions, ModelSettings, resolve
from agentfsm.models.providers import PROVIDERS, Provider
from tests.helpers import vendor_client
from tests.helpers.local_servers import python_with
from tests.helpers.model_clients import WEATHER
from tests.helpers.recording_server import Call, RecordingServer, Response, running

KEY = "sk-test-0123456789"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Grüße, 世界 👋 "quoted".'}]
REQUEST = ModelRequest((Message.system("Be brief."), Message.user(MESSAGES[1]["content"])))
SETTINGS = ModelSettings(temperature=0.5, max_tokens=100)
ENVIRONMENT = {
    "AZURE_OPENAI_ENDPOINT": "https://acme.openai.azure.com",
    "AWS_REGION": "eu-central-1",
    "OLLAMA_HOST": "http://127.0.0.1:11434",
}
CHAT = [row for row in PROVIDERS.values() if row.wire == "openai" and row.account != "google"]
"""The providers that take a key; ``test_google`` has the other one."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in PROVIDERS.values():
        for name in filter(None, (row.url_env, row.key_env)):
            monkeypatch.delenv(name, raising=False)
        if row.key_env:
            monkeypatch.setenv(row.key_env, KEY)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


class Sent:
    """A request as a server got it."""

    def __init__(self, call: Call) -> None:
        headers = call.headers
        self.url = f"{headers['x-scheme']}://{headers['host']}{call.path}"
        self.key = {n: headers[n] for n in ("authorization", "x-api-key", "api-key") if n in headers}
        self.version = headers.get("anthropic-version")
        self.kind = headers["content-type"]
        self.body = call.data
        self.size = len(call.body)
        """Bytes: two equal bodies of one size are written in the same way, but for the order of their fields."""

    @property
    def whole(self) -> tuple[object, ...]:
        """What two clients must agree about."""
        return self.url, self.kind, self.body, self.size


@pytest.fixture(scope="module")
def server() -> Iterator[RecordingServer]:
    """It rejects every call."""
    rejection = Response(json.dumps({"error": {"message": "caught"}}).encode(), status=400)
    with running(RecordingServer(lambda call: rejection)) as recording:
        yield recording


def rerouted(request: Any, server: RecordingServer) -> Any:
    """The request to the server of the tests; the host that it was meant for stays in its header."""
    request.headers["x-scheme"] = request.url.scheme
    request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=int(server.url.rpartition(":")[2]))
    return request


class OurTransport(httpx.AsyncHTTPTransport):
    """The connections of our models."""

    def __init__(self, server: RecordingServer) -> None:
        super().__init__()
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await super().handle_async_request(rerouted(request, self._server))


class OllamaTransport(httpx.HTTPTransport):
    """The connections of Ollama's client."""

    def __init__(self, server: RecordingServer) -> None:
        super().__init__()
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return super().handle_request(rerouted(request, self._server))


class SdkTransport(httpx2.HTTPTransport):
    """The connections of the other vendors' clients."""

    def __init__(self, server: RecordingServer) -> None:
        super().__init__()
        self._server = server

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return super().handle_request(rerouted(request, self._server))


def ours(
    server: RecordingServer,
    name: str,
    settings: ModelSettings = SETTINGS,
    *,
    request: ModelRequest = REQUEST,
    stream: bool = False,
    **more: Any,
) -> Sent:
    """What our model sends."""
    http = HttpOptions(transport=OurTransport(server), query=more.pop("query", {}))
    model: Any = resolve(name, settings=settings, http=http, **more)

    async def ask() -> None:
        if not stream:
            await model.reply(request)
        async for _ in model.stream(request):
            pass

    async def call() -> None:
        with pytest.raises(ProviderError, match="caught"):
            await ask()
        await model.aclose()

    asyncio.run(call())
    return Sent(server.calls[-1])


def theirs(server: RecordingServer, call: Callable[[httpx2.Client], object]) -> Sent:
    """What a vendor's client sends through a client for HTTP."""
    with httpx2.Client(transport=SdkTransport(server)) as http, pytest.raises(Exception, match="caught"):
        call(http)
    return Sent(server.calls[-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("row", CHAT, ids=[row.name for row in CHAT])
def test_chat_requests_equal_those_of_the_openai_client(row: Provider, stream: bool, server: RecordingServer) -> None:
    """Each of these providers documents OpenAI's client with its base URL as a way to call it."""
    mine = ours(server, f"{row.name}:{row.example}", stream=stream)
    base = {"azure": "https://acme.openai.azure.com/openai/v1/"}.get(row.name, row.base_url)
    base = base.replace("us-east-1", "eu-central-1")
    reasoning = row.example.startswith(("gpt-5", "openai/gpt-5"))
    cap = {"max_completion_tokens" if row.name == "openai" or reasoning else "max_tokens": 100}
    more: dict[str, Any] = {"stream": True} if stream else {}
    if stream and row.name != "mistral":
        more["stream_options"] = {"include_usage": True}

    def call(http: httpx2.Client) -> object:
        create: Any = openai.OpenAI(base_url=base, api_key=KEY, http_client=http, max_retries=0).chat.completions.create
        return create(model=row.example, messages=MESSAGES, temperature=0.5, **cap, **more)

    expected = theirs(server, call)
    assert mine.whole == expected.whole
    if row.name == "azure":
        assert mine.key == {"api-key": KEY}  # https://learn.microsoft.com/azure/ai-foundry/openai/api-version-lifecycle
    elif row.key_env:
        assert mine.key == expected.key == {"authorization": f"Bearer {KEY}"}
    else:
        assert mine.key == {}


TURNS = ModelRequest(
    (
        *REQUEST.messages,
        Message.assistant("", (ToolCall("abcdefghi", "weather", {"city": "Paris"}),)),
        Message(Role.TOOL, "sunny", tool_call_id="abcdefghi", name="weather"),
    ),
    tools=(WEATHER,),
)
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
}
SPEC = {"name": "weather", "description": WEATHER.description, "parameters": WEATHER.parameters}
SENT_TURNS: dict[str, Any] = {
    "messages": [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": SPEC}],
    "temperature": 0.5,
    "max_tokens": 100,
}


@pytest.mark.servers
@pytest.mark.timeout(900)  # the first time, the clients are installed
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("provider", vendor_client.CLIENTS)
def test_requests_equal_those_of_the_providers_own_client(provider: str, stream: bool, server: RecordingServer) -> None:
    """Providers that speak chat completions and have a client of their own; ``make servers`` installs these."""
    python = python_with("vendor-clients", *vendor_client.CLIENTS.values())
    model = {"openrouter": "openai/gpt-4o"}.get(provider, PROVIDERS[provider].example)
    mine = ours(server, f"{provider}:{model}", request=TURNS, stream=stream)
    request = SENT_TURNS | {"model": model} | ({"stream": True} if stream else {})
    default = subprocess.run(
        [python, vendor_client.__file__, provider, server.url, KEY],
        input=json.dumps(request), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    call = server.calls[-1]
    expected = Sent(replace(call, headers=call.headers | {"x-scheme": "https"}))
    for message in expected.body["messages"]:  # what Mistral's client fills in
        message.pop("prefix", None)
        for each in message.get("tool_calls") or ():
            each.pop("index", None)
    if not stream:
        expected.body.pop("stream", None)
    mine.body.pop("stream_options", None)  # a field that these clients leave to their callers
    assert mine.url == default.rstrip("/") + call.path
    assert (mine.key, mine.kind, mine.body) == (expected.key, expected.kind, expected.body)


def test_responses_requests_equal_those_of_the_openai_client(server: RecordingServer) -> None:
    mine = ours(server, "openai-responses:gpt-4.1")

    def call(http: httpx2.Client) -> object:
        create: Any = openai.OpenAI(api_key=KEY, http_client=http, max_retries=0).responses.create
        return create(
            model="gpt-4.1",
            input=[{"type": "message", **message} for message in MESSAGES],
            temperature=0.5,
            max_output_tokens=100,
            store=False,
            include=["reasoning.encrypted_content"],
        )

    expected = theirs(server, call)
    assert (mine.whole, mine.key) == (expected.whole, expected.key)


def test_messages_requests_equal_those_of_the_anthropic_client(server: RecordingServer) -> None:
    mine = ours(server, "anthropic:claude-sonnet-4-6", ModelSettings(max_tokens=100, prompt_cache="off"))

    def call(http: httpx2.Client) -> object:
        create: Any = anthropic.Anthropic(api_key=KEY, http_client=http, max_retries=0).messages.create
        return create(
            model="claude-sonnet-4-6", system=mine.body["system"], messages=mine.body["messages"], max_tokens=100
        )

    assert mine.whole == theirs(server, call).whole
    # The client asks for a newer version of the API, which takes the key as a bearer token.
    assert (mine.key, mine.version) == ({"x-api-key": KEY}, "2023-06-01")
    assert "Be brief." in json.dumps(mine.body["system"])
    assert "Grüße" in json.dumps(mine.body["messages"], ensure_ascii=False)


def test_ollama_requests_equal_those_of_the_ollama_client(server: RecordingServer) -> None:
    mine = ours(server, "ollama:llama3.2")
    call = cast("Any", ollama.Client(host=ENVIRONMENT["OLLAMA_HOST"], transport=OllamaTransport(server))).chat
    with pytest.raises(ollama.ResponseError, match="caught"):
        call(model="llama3.2", messages=MESSAGES, options={"temperature": 0.5, "num_predict": 100})
    expected = Sent(server.calls[-1])
    filled = {name: value for name, value in expected.body.items() if value not in (None, [])}
    assert (mine.url, mine.body) == (expected.url, filled)


def test_an_azure_token_is_sent_as_its_client_sends_one(server: RecordingServer) -> None:
    mine = ours(server, "azure:gpt-4o", api_key=lambda: "entra-token")

    def call(http: httpx2.Client) -> object:
        client = openai.AzureOpenAI(
            azure_endpoint=ENVIRONMENT["AZURE_OPENAI_ENDPOINT"], azure_ad_token_provider=lambda: "entra-token",
            api_version="2024-10-21", http_client=http, max_retries=0,
        )  # fmt: skip
        create: Any = client.chat.completions.create
        return create(model="gpt-4o", messages=MESSAGES)

    assert mine.key == theirs(server, call).key == {"authorization": "Bearer entra-token"}


def test_an_azure_deployment_with_an_api_version_is_called_as_its_client_calls_it(server: RecordingServer) -> None:
    address = "https://acme.openai.azure.com/openai/deployments/my-4o"
    mine = ours(
        server, "azure:my-4o", ModelSettings(), base_url=address, api_key=KEY, query={"api-version": "2024-10-21"}
    )

    def call(http: httpx2.Client) -> object:
        client = openai.AzureOpenAI(
            azure_endpoint="https://acme.openai.azure.com", api_key=KEY, api_version="2024-10-21",
            http_client=http, max_retries=0,
        )  # fmt: skip
        create: Any = client.chat.completions.create
        return create(model="my-4o", messages=MESSAGES)

    expected = theirs(server, call)
    assert (mine.whole, mine.key) == (expected.whole, expected.key)


def test_mistral_gets_a_seed_by_its_own_name(server: RecordingServer) -> None:
    assert ours(server, "mistral:mistral-large-latest", ModelSettings(seed=7)).body["random_seed"] == 7


@pytest.mark.parametrize(
    ("model", "field"),
    [("gpt-5-mini", "max_completion_tokens"), ("openai/o3", "max_completion_tokens"), ("gpt-4o", "max_tokens")],
)
def test_reasoning_models_behind_a_gateway_get_the_limit_that_they_take(
    model: str, field: str, server: RecordingServer
) -> None:
    assert ours(server, f"litellm:{model}").body[field] == 100


def test_no_vendors_package_is_imported_to_call_a_provider() -> None:
    """Those of the clouds are imported by the first call, which is not made here."""
    names = [f"{row.name}:{row.example}" for row in PROVIDERS.values()]
    code = (
        "import sys; from agentfsm import Agent; from agentfsm.models import resolve\n"
        f"for name in {names!r}: Agent(resolve(name))\n"
        "vendors = 'anthropic boto3 botocore google.auth litellm mcp ollama openai requests'.split()\n"
        "print([name for name in vendors if name in sys.modules])"
    )
    settings = {"GOOGLE_CLOUD_PROJECT": "acme-1", "GOOGLE_CLOUD_LOCATION": "europe-west1", "AWS_REGION": "eu-central-1"}
    keys = {row.key_env: KEY for row in PROVIDERS.values() if row.key_env}
    env = os.environ | settings | keys | {"AZURE_OPENAI_ENDPOINT": "https://acme.openai.azure.com"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"
