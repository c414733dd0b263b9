"""The requests of each provider of the table, compared with those that the vendor's own client sends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any, cast

import anthropic
import httpx
import httpx2  # what the vendors' clients are built on
import ollama
import openai
import pytest

from agentfsm.loop.messages import Message
from agentfsm.loop.model import ModelRequest
from agentfsm.models import HttpOptions, ModelSettings, resolve
from agentfsm.models.providers import PROVIDERS, Provider

KEY = "sk-test-0123456789"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
REQUEST = ModelRequest((Message.system("Be brief."), Message.user("Hello.")))
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
    """A request that a client sent."""

    def __init__(self, request: Any) -> None:
        self.url = str(request.url)
        headers = request.headers
        self.key = {n: headers[n] for n in ("authorization", "x-api-key", "api-key") if n in headers}
        self.version = headers.get("anthropic-version")
        self.body: dict[str, Any] = json.loads(request.content)


def catch(requests: list[Sent]) -> httpx.MockTransport:
    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(Sent(request))
        return httpx.Response(400, json={"error": {"message": "caught"}})

    return httpx.MockTransport(handle)


def sdk_client(requests: list[Sent]) -> httpx2.Client:
    """The HTTP client of a vendor's client; it keeps the requests and sends none."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        requests.append(Sent(request))
        return httpx2.Response(400, json={"error": {"message": "caught"}})

    return httpx2.Client(transport=httpx2.MockTransport(handle))


def ours(name: str, settings: ModelSettings = SETTINGS, *, stream: bool = False) -> Sent:
    caught: list[Sent] = []
    model: Any = resolve(name, settings=settings, http=HttpOptions(transport=catch(caught)))

    async def call() -> None:
        try:
            if stream:
                async for _ in model.stream(REQUEST):
                    pass
            else:
                await model.reply(REQUEST)
        except Exception:
            assert caught

    asyncio.run(call())
    return caught[0]


def theirs(call: Any, *, caught: list[Sent]) -> Sent:
    with pytest.raises(Exception, match="caught"):
        call()
    return caught[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("row", CHAT, ids=[row.name for row in CHAT])
def test_chat_requests_equal_those_of_the_openai_client(row: Provider, stream: bool) -> None:
    """Each of these providers documents OpenAI's client with its base URL as a way to call it."""
    mine = ours(f"{row.name}:{row.example}", stream=stream)
    base = {"azure": "https://acme.openai.azure.com/openai/v1/"}.get(row.name, row.base_url)
    base = base.replace("us-east-1", "eu-central-1")
    caught: list[Sent] = []
    client = openai.OpenAI(base_url=base, api_key=KEY, http_client=sdk_client(caught), max_retries=0)
    reasoning = row.example.startswith(("gpt-5", "openai/gpt-5"))
    cap = {"max_completion_tokens" if row.name == "openai" or reasoning else "max_tokens": 100}
    more: dict[str, Any] = {"stream": True} if stream else {}
    if stream and row.name != "mistral":
        more["stream_options"] = {"include_usage": True}
    call: Any = client.chat.completions.create
    expected = theirs(lambda: call(model=row.example, messages=MESSAGES, temperature=0.5, **cap, **more), caught=caught)
    assert (mine.url, mine.body) == (expected.url, expected.body)
    if row.name == "azure":
        assert mine.key == {"api-key": KEY}  # https://learn.microsoft.com/azure/ai-foundry/openai/api-version-lifecycle
    elif row.key_env:
        assert mine.key == expected.key == {"authorization": f"Bearer {KEY}"}
    else:
        assert mine.key == {}


def test_responses_requests_equal_those_of_the_openai_client() -> None:
    mine = ours("openai-responses:gpt-4.1")
    caught: list[Sent] = []
    client = openai.OpenAI(api_key=KEY, http_client=sdk_client(caught), max_retries=0)
    call: Any = client.responses.create
    expected = theirs(
        lambda: call(
            model="gpt-4.1",
            input=[{"type": "message", **message} for message in MESSAGES],
            temperature=0.5,
            max_output_tokens=100,
            store=False,
            include=["reasoning.encrypted_content"],
        ),
        caught=caught,
    )
    assert (mine.url, mine.body, mine.key) == (expected.url, expected.body, expected.key)


def test_messages_requests_equal_those_of_the_anthropic_client() -> None:
    mine = ours("anthropic:claude-sonnet-4-6", ModelSettings(max_tokens=100, prompt_cache="off"))
    caught: list[Sent] = []
    client = anthropic.Anthropic(api_key=KEY, http_client=sdk_client(caught), max_retries=0)
    call: Any = client.messages.create
    expected = theirs(
        lambda: call(
            model="claude-sonnet-4-6", system=mine.body["system"], messages=mine.body["messages"], max_tokens=100,
        ),
        caught=caught,
    )  # fmt: skip
    assert (mine.url, mine.body) == (expected.url, expected.body)
    # The client asks for a newer version of the API, which takes the key as a bearer token.
    assert (mine.key, mine.version) == ({"x-api-key": KEY}, "2023-06-01")
    assert "Be brief." in json.dumps(mine.body["system"])
    assert "Hello." in json.dumps(mine.body["messages"])


def test_ollama_requests_equal_those_of_the_ollama_client() -> None:
    mine = ours("ollama:llama3.2")
    caught: list[Sent] = []
    client = ollama.Client(host=ENVIRONMENT["OLLAMA_HOST"], transport=catch(caught))
    call = cast("Any", client).chat
    options = {"temperature": 0.5, "num_predict": 100}
    expected = theirs(lambda: call(model="llama3.2", messages=MESSAGES, options=options), caught=caught)
    filled = {name: value for name, value in expected.body.items() if value not in (None, [])}
    assert (mine.url, mine.body) == (expected.url, filled)


def test_an_azure_token_is_sent_as_its_client_sends_one() -> None:
    caught: list[Sent] = []
    model: Any = resolve("azure:gpt-4o", api_key=lambda: "entra-token", http=HttpOptions(transport=catch(caught)))
    with pytest.raises(Exception, match="caught"):
        asyncio.run(model.reply(REQUEST))
    client = openai.AzureOpenAI(
        azure_endpoint=ENVIRONMENT["AZURE_OPENAI_ENDPOINT"], azure_ad_token_provider=lambda: "entra-token",
        api_version="2024-10-21", http_client=sdk_client(caught), max_retries=0,
    )  # fmt: skip
    call: Any = client.chat.completions.create
    with pytest.raises(Exception, match="caught"):
        call(model="gpt-4o", messages=MESSAGES)
    assert caught[0].key == caught[-1].key == {"authorization": "Bearer entra-token"}


def test_an_azure_deployment_with_an_api_version_is_called_as_its_client_calls_it() -> None:
    address = "https://acme.openai.azure.com/openai/deployments/my-4o"
    caught: list[Sent] = []
    http = HttpOptions(query={"api-version": "2024-10-21"}, transport=catch(caught))
    model: Any = resolve("azure:my-4o", base_url=address, api_key=KEY, http=http)
    with pytest.raises(Exception, match="caught"):
        asyncio.run(model.reply(REQUEST))
    client = openai.AzureOpenAI(
        azure_endpoint="https://acme.openai.azure.com", api_key=KEY, api_version="2024-10-21",
        http_client=sdk_client(caught), max_retries=0,
    )  # fmt: skip
    call: Any = client.chat.completions.create
    with pytest.raises(Exception, match="caught"):
        call(model="my-4o", messages=MESSAGES)
    assert (caught[0].url, caught[0].key, caught[0].body) == (caught[-1].url, caught[-1].key, caught[-1].body)


def test_mistral_gets_a_seed_by_its_own_name() -> None:
    assert ours("mistral:mistral-large-latest", ModelSettings(seed=7)).body["random_seed"] == 7


@pytest.mark.parametrize(
    ("model", "field"),
    [("gpt-5-mini", "max_completion_tokens"), ("openai/o3", "max_completion_tokens"), ("gpt-4o", "max_tokens")],
)
def test_reasoning_models_behind_a_gateway_get_the_limit_that_they_take(model: str, field: str) -> None:
    assert ours(f"litellm:{model}").body[field] == 100


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
