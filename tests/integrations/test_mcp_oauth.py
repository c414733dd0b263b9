"""OAuth for MCP servers over HTTP, against the authorization server that the official SDK has."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import Agent, ConfigurationError, Host, MemoryStore
from agentfsm.integrations.mcp import MCPTools, OAuth
from agentfsm.testing import ScriptedModel, call
from tests.helpers.mcp_servers import SdkServer
from tests.helpers.stepped_clock import SteppedClock

SCRIPT = Path(__file__).parents[1] / "helpers" / "mcp_oauth_server.py"
CALLBACK = "http://localhost:3000/callback"


class Keyring:
    """A storage in memory."""

    def __init__(self) -> None:
        self.secret: str | None = None

    async def load(self) -> str | None:
        return self.secret

    async def save(self, secret: str) -> None:
        self.secret = secret


async def agree(url: str) -> str:
    """What the browser of a user does who agrees."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(url)).headers["location"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    server = SdkServer(tmp_path_factory.mktemp("oauth"), script=SCRIPT)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def vault(running: SdkServer) -> SdkServer:
    (running.folder / "done.txt").unlink(missing_ok=True)
    return running


def use(server: SdkServer, oauth: OAuth, clock: SteppedClock | None = None) -> str:
    """What is in the vault, for an app that is authorized."""

    async def main() -> str:
        async with MCPTools.http(server.url, auth=oauth) as tools:
            agent = Agent(ScriptedModel([call("open_vault"), "ok"]), tools=tools)
            result = await agent.run("go", run_id="r")
            return next(m.content for m in result.messages if m.role == "tool")

    return clock.run(main()) if clock else asyncio.run(main())


@pytest.mark.slow
def test_the_user_is_asked_once_and_the_tokens_stay_in_the_storage_of_the_app(vault: SdkServer) -> None:
    keyring = Keyring()
    assert use(vault, OAuth(keyring, agree, CALLBACK)) == "gold"
    assert keyring.secret is not None
    assert "access-" in keyring.secret
    assert use(vault, OAuth(keyring, agree, CALLBACK)) == "gold"
    assert vault.done == ["registered", "authorized"]


def test_a_token_that_expired_is_refreshed_without_the_user(vault: SdkServer) -> None:
    keyring = Keyring()
    use(vault, OAuth(keyring, agree, CALLBACK))
    saved = json.loads(keyring.secret or "")
    saved["tokens"]["access_token"], saved["expires_at"] = "expired", time.time() - 1
    keyring.secret = json.dumps(saved)
    assert use(vault, OAuth(keyring, agree, CALLBACK)) == "gold"
    assert vault.done == ["registered", "authorized", "refreshed"]
    assert json.loads(keyring.secret)["tokens"]["access_token"] != "expired"


def test_a_user_may_take_longer_than_the_start_timeout(vault: SdkServer) -> None:
    clock = SteppedClock()

    async def slowly(url: str) -> str:
        for _ in range(3):
            clock.advance(60)
            await asyncio.sleep(0.01)
        return await agree(url)

    assert use(vault, OAuth(Keyring(), slowly, CALLBACK), clock) == "gold"


def test_a_user_who_refuses_is_named(vault: SdkServer) -> None:
    async def refuse(url: str) -> str:
        return f"{CALLBACK}?error=access_denied&error_description=not+today"

    with pytest.raises(ConfigurationError, match=r"the authorization was refused \(access_denied\): not today"):
        use(vault, OAuth(Keyring(), refuse, CALLBACK))


def test_what_authorize_returns_must_be_the_redirect(vault: SdkServer) -> None:
    async def wrong(url: str) -> str:
        return "http://localhost:3000/callback"

    with pytest.raises(ConfigurationError, match=r"authorize\(url\) must return the URL of the redirect"):
        use(vault, OAuth(Keyring(), wrong, CALLBACK))


def test_a_storage_that_returns_something_else_is_named(vault: SdkServer) -> None:
    keyring = Keyring()
    keyring.secret = "no JSON"
    with pytest.raises(ConfigurationError, match="the token storage returns something other"):
        use(vault, OAuth(keyring, agree, CALLBACK))


def test_an_id_that_is_no_https_url_with_a_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="client_metadata_url must be an https URL"):
        OAuth(Keyring(), agree, CALLBACK, client_metadata_url="https://example.com")


def test_tokens_are_withheld_from_journals(vault: SdkServer) -> None:
    keyring, store = Keyring(), MemoryStore()
    use(vault, OAuth(keyring, agree, CALLBACK))
    token = json.loads(keyring.secret or "")["tokens"]["access_token"]

    async def main() -> str:
        async with MCPTools.http(vault.url, auth=OAuth(keyring, agree, CALLBACK)) as tools:
            agent = Agent(ScriptedModel([f"the token is {token}"]), tools=tools, host=Host(store=store))
            await agent.run("go", run_id="r")
            return repr(await store.records("r"))

    assert token not in asyncio.run(main())
