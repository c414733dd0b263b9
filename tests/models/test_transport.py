"""How calls reach a server: keys that are renewed, private authorities, proxies, headers, your own client."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from agentfsm import Agent
from agentfsm.errors import ConfigurationError, ModelError, ProviderError, TransientProviderError
from agentfsm.loop.model import Model
from agentfsm.models import HttpOptions, resolve
from tests.helpers.company_network import (  # noqa: F401  # importing registers the fixtures
    Authority,
    authenticating_proxy,
    certificate_authority,
)
from tests.helpers.model_clients import GOOD_BODIES, REQUEST, WIRES, build_model
from tests.helpers.recording_server import Call, good_server

PROVIDER = {"openai": "openai", "responses": "openai-responses", "anthropic": "anthropic", "ollama": "ollama"}


def ask(model: Model) -> str:
    return asyncio.run(model.reply(REQUEST)).message.content


def failure(model: Model) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(model)
    return caught.value


# -- keys that expire --------------------------------------------------------------------------------------


class Tokens:
    """Tokens that expire: each call returns the next one."""

    def __init__(self, *tokens: str) -> None:
        self.left = list(tokens)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        return self.left.pop(0)

    async def later(self) -> str:
        return self()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_a_key_that_is_rejected_is_renewed_once_and_the_call_repeated(wire: str, is_async: bool) -> None:
    tokens = Tokens("token-first-1111", "token-second-2222", "token-third-3333")
    with good_server(wire) as server:
        server.refuse = lambda call: "" if call.key == "token-second-2222" else "expired"
        function = tokens.later if is_async else tokens
        model = resolve(f"{PROVIDER[wire]}:m", base_url=f"{server.url}/v1", api_key=function)
        assert [ask(model), ask(model)] == ["hello", "hello"]
        assert [call.key for call in server.calls] == ["token-first-1111", *["token-second-2222"] * 2]
        assert tokens.calls == 2
        assert "token-second-2222" in [secret.get_secret_value() for secret in model.secrets]  # type: ignore[attr-defined]
        server.refuse = lambda call: "expired"
        error = failure(model)
        assert type(error) is ProviderError
        assert error.status == 401
        assert "token" not in str(error)
        assert tokens.calls == 3


def test_a_key_expires_in_the_middle_of_a_run_that_goes_on() -> None:
    tokens = Tokens("old-key", "new-key")
    with good_server("openai") as server:
        server.refuse = lambda call: "" if len(server.calls) == 1 or call.key == "new-key" else "expired"
        agent = Agent(resolve("openai:m", base_url=f"{server.url}/v1", api_key=tokens))
        assert [agent.run_sync("a").output, agent.run_sync("b").output] == ["hello", "hello"]
    assert [call.key for call in server.calls] == ["old-key", "old-key", "new-key"]


def test_calls_at_once_that_find_a_key_expired_renew_it_once() -> None:
    tokens = Tokens("old-key", "new-key")
    together = threading.Barrier(3, timeout=10)

    def refuse(call: Call) -> str:
        if call.key == "new-key":
            return ""
        if len(server.calls) > 1:
            together.wait()
        return "" if len(server.calls) == 1 else "expired"

    async def several(model: Model) -> list[str]:
        await model.reply(REQUEST)
        return [reply.message.content for reply in await asyncio.gather(*(model.reply(REQUEST) for _ in range(3)))]

    with good_server("openai") as server:
        server.refuse = refuse
        assert asyncio.run(several(resolve("openai:m", base_url=f"{server.url}/v1", api_key=tokens))) == ["hello"] * 3
    assert tokens.calls == 2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: "", "returned no key"),
        (lambda: "a\nb", "not allowed in an HTTP header"),
    ],
)
def test_a_key_function_that_fails_is_named(function: Any, says: str) -> None:
    with good_server("openai") as server:
        error = failure(resolve("openai:m", base_url=f"{server.url}/v1", api_key=function))
    assert type(error) is ProviderError
    assert says in str(error)
    assert server.calls == []


# -- headers, query parameters, and a client of your own ---------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_headers_and_query_parameters_are_sent_with_every_call(wire: str) -> None:
    http = HttpOptions(
        headers={"OpenAI-Organization": "org-1", "X-Tenant": SecretStr("tenant-secret-77")},
        query={"api-version": "2024-10-21", "q": "a b&c", "key": SecretStr("query-secret-77")},
    )
    with good_server(wire) as server:
        model = resolve(f"{PROVIDER[wire]}:m", base_url=f"{server.url}/v1", http=http)
        assert ask(model) == "hello"
        call = server.calls[0]
    assert call.path.endswith("?api-version=2024-10-21&q=a%20b%26c&key=query-secret-77")
    assert (call.headers["openai-organization"], call.headers["x-tenant"]) == ("org-1", "tenant-secret-77")
    secrets = ["tenant-secret-77", "query-secret-77"]
    assert not any(secret in repr(http) + repr(model) for secret in secrets)
    assert [secret.get_secret_value() for secret in model.secrets] == secrets  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"headers": {"a b": "x"}}, "is not the name of an HTTP header"),
        ({"headers": {"x": "a\r\nb: c"}}, "not allowed in one"),
        ({"headers": {"Content-Type": "text/plain"}}, "set by agentfsm itself"),
        ({"proxy": "127.0.0.1:3128"}, "proxy is not a URL"),
        ({"verify": "/no/such/file.pem"}, "cannot read the certificates in /no/such/file.pem"),
        ({"verify": __file__}, "not a file of certificates"),
        ({"client": httpx.AsyncClient(), "proxy": "http://127.0.0.1:1"}, "settings of the client"),
    ],
)
def test_each_wrong_option_has_its_error(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        HttpOptions(**wrong)


def test_a_client_of_yours_makes_the_calls_and_stays_open() -> None:
    async def call() -> tuple[list[str], bool]:
        paths: list[str] = []

        def answer(request: httpx.Request) -> httpx.Response:
            paths.append(f"{request.headers['user-agent']} {request.headers['x-from']} {request.url.path}")
            return httpx.Response(200, json=GOOD_BODIES["openai"])

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), headers={"x-from": "mine"}) as client:
            model = resolve("openai:m", base_url="http://models.example/v1", http=HttpOptions(client=client))
            await model.reply(REQUEST)
            await model.aclose()  # type: ignore[attr-defined]
            await model.reply(REQUEST)
            return paths, client.is_closed

    assert asyncio.run(call()) == (["agentfsm mine /v1/chat/completions"] * 2, False)


# -- certificates and proxies --------------------------------------------------------------------------------


def test_a_server_of_a_private_authority_is_trusted_by_its_file_or_a_context(authority: Authority) -> None:
    with good_server("openai", authority.context) as server:
        error = failure(resolve("openai:m", base_url=f"{server.url}/v1"))
        assert type(error) is ProviderError
        assert "cannot be verified" in str(error)
        assert "verify=" in str(error)
        for verify in (authority.file, str(authority.file), ssl.create_default_context(cafile=authority.file)):
            assert ask(resolve("openai:m", base_url=f"{server.url}/v1", http=HttpOptions(verify=verify))) == "hello"


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_calls_go_through_a_proxy_that_asks_for_a_password(proxy: str, authority: Authority, tls: bool) -> None:
    with good_server("openai", authority.context if tls else None) as server:
        name = {"base_url": f"{server.url}/v1", "api_key": "sk-through-the-proxy"}
        good = HttpOptions(proxy=SecretStr(f"http://ann:pass-word-4711@{proxy}"), verify=authority.file)
        assert ask(resolve("openai:m", **name, http=good)) == "hello"  # type: ignore[arg-type]
        bad = HttpOptions(proxy=SecretStr(f"http://ann:wrong-word-4711@{proxy}"), verify=authority.file)
        error = failure(resolve("openai:m", **name, http=bad))  # type: ignore[arg-type]
    assert type(error) is ProviderError
    assert "407" in str(error)
    assert "word-4711" not in str(error) + repr(good) + repr(bad)
    assert len(server.calls) == 1


def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    options = HttpOptions(proxy="http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for http in (options, None):
        error = failure(resolve("ollama:m", base_url="http://models.example/v1", http=http))
        assert type(error) is TransientProviderError
        assert "the proxy does not connect to http://models.example" in str(error)
        assert "ollama serve" not in str(error)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert "ollama serve" in str(failure(resolve("ollama:m", base_url="http://127.0.0.1:9/v1")))


# -- cookies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_cookie_that_a_server_sets_is_not_sent_with_another_call(wire: str) -> None:
    """The calls of a model are those of many runs, perhaps of several people."""
    sent: list[str | None] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("cookie"))
        return httpx.Response(200, json=GOOD_BODIES[wire], headers={"set-cookie": "session=ann; Path=/"})

    model = build_model(wire, respond)

    async def twice() -> None:
        await model.reply(REQUEST)
        await model.reply(REQUEST)

    asyncio.run(twice())
    assert sent == [None, None]


def test_your_own_client_sends_the_cookies_that_it_keeps() -> None:
    sent: list[str | None] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("cookie"))
        return httpx.Response(200, json=GOOD_BODIES["openai"], headers={"set-cookie": "session=ann; Path=/"})

    async def twice() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
            model = resolve("openai:m", api_key="k", http=HttpOptions(client=client))
            await model.reply(REQUEST)
            await model.reply(REQUEST)

    asyncio.run(twice())
    assert sent == [None, "session=ann"]
