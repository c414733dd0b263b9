"""Secrets never reach a journal: not its records, not its hidden values, not the file."""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from agentfsm import Agent, Allow, Edit, Host, ProviderError, SqliteStore, ToolDefinitionError, UserInputRequested, tool
from agentfsm.journal.outcome_codec import SecretScrubber
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.model import secrets_of
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, Priced, resolve
from agentfsm.testing import FakeClock, ScriptedModel, call

PASSWORD, PIN, KEY = "correct horse battery", "471108150", "sk-env-0123456789abcdef"
SEEN: list[object] = []


@tool(secret=["password", "pin"])
def login(user: str, password: str, pin: int) -> str:
    """Log in."""
    SEEN.append((password, pin))
    return f"logged in with {password}"


@tool
def unlock(code: SecretStr) -> str:
    """Unlock."""
    SEEN.append(code.get_secret_value())
    return "open"


@tool
def show_environment() -> str:
    """Say too much."""
    return f'the key is "{KEY}"'


@tool(secret=["password"], requires_approval=True)
def careful(user: str, password: str) -> str:
    """Log in, if allowed."""
    SEEN.append(password)
    return "in"


def files(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in folder.iterdir())


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", KEY)
    SEEN.clear()
    made = SqliteStore(tmp_path / "runs.db")
    yield made
    made.close()


def an_agent(store, script, *tools):
    return Agent(ScriptedModel(script), tools=tools, host=Host(clock=FakeClock(), store=store))


def test_secrets_are_not_written_and_tools_get_them(store, tmp_path):
    script = [
        call("login", user="ann", password=PASSWORD, pin=471108150),
        call("unlock", code="0000-hidden"),
        call("show_environment"),
        f"the password was {PASSWORD}",
    ]

    async def live():
        return await an_agent(store, script, login, unlock, show_environment).run(f"use {KEY}", run_id="r")

    result = asyncio.run(live())
    assert result.output == f"the password was {PASSWORD}"  # the run itself has them
    assert SEEN == [(PASSWORD, 471108150), "0000-hidden"]
    store.close()
    written = files(tmp_path)
    for secret in (PASSWORD, KEY, "0000-hidden", PIN):
        assert secret.encode() not in written, secret
    assert b"ann" in written
    rows = store.records("r")
    assert verify("r", rows, store.head("r")).code == GOOD


def test_a_run_without_a_store_keeps_its_secrets_out_of_its_journal(monkeypatch):
    async def live():
        return await an_agent(None, [call("login", user="ann", password=PASSWORD, pin=1), "x"], login).run("go")

    text = json.dumps([r.data for r in asyncio.run(live()).journal])
    assert PASSWORD not in text
    assert "[secret " in text


class Knowing(ScriptedModel):
    """A model that was given a key in code."""

    secrets = (SecretStr("sk-in-code-0123456789"), SecretStr("short"))


def through(model, how):
    """A model, alone or behind others that pass its calls on."""
    match how:
        case "alone":
            return model
        case "fallback":
            return FallbackModel(ScriptedModel([ProviderError("down")] * 9), model)
        case "limited":
            return Limited(model, ConcurrencyLimit(1))
        case _:
            return Priced(model, {})


@pytest.mark.parametrize("how", ["alone", "fallback", "limited", "priced"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_key_that_was_passed_to_a_model_in_code_is_not_written(store, tmp_path, how, kept):
    model = through(Knowing(["my key is sk-in-code-0123456789"]), how)
    host = Host(clock=FakeClock(), store=store if kept else None)

    async def live():
        return await Agent(model, host=host).run("what is sk-in-code-0123456789?", run_id="r")

    result = asyncio.run(live())
    assert result.output == "my key is sk-in-code-0123456789"
    text = json.dumps([r.data for r in result.journal])
    assert "sk-in-code" not in text
    assert "[secret " in text
    store.close()
    assert b"sk-in-code" not in files(tmp_path)


@pytest.mark.parametrize("name", ["openai:m", "openai-responses:m", "anthropic:m", "ollama:m"])
def test_every_wire_reports_its_key(name):
    model = resolve(name, base_url="http://127.0.0.1:1/v1", api_key="sk-of-the-wire-1")
    assert [s.get_secret_value() for s in secrets_of(model)] == ["sk-of-the-wire-1"]
    assert "sk-of-the-wire" not in repr(secrets_of(model))


def test_a_model_without_a_list_of_secrets_has_none():
    assert secrets_of(ScriptedModel(["x"])) == ()


def test_equal_secrets_have_equal_placeholders_only_within_a_run():
    one, other = SecretScrubber(), SecretScrubber()
    assert one.placeholder_for(PASSWORD) == one.placeholder_for(PASSWORD) != other.placeholder_for(PASSWORD)
    digest = hashlib.sha256(f"{one.salt}{PASSWORD}".encode()).hexdigest()
    assert one.placeholder_for(PASSWORD) == f"[secret {digest[:32]}]"


def test_a_resumed_run_asks_for_its_secrets_again(store, tmp_path):
    async def live():
        first = await an_agent(store, [call("careful", user="ann", password=PASSWORD)], careful).run("go", run_id="r")
        assert isinstance(first.outcome, UserInputRequested)
        again = an_agent(store, ["done"], careful)
        asked = await again.resume("r", Allow())
        assert isinstance(asked.outcome, UserInputRequested)
        assert "needs password, which is not stored in the journal" in asked.outcome.question
        assert SEEN == []
        return await again.resume("r", Edit({"user": "ann", "password": PASSWORD + "2"}))

    result = asyncio.run(live())
    assert result.output == "done"
    assert SEEN == [PASSWORD + "2"]
    store.close()
    assert PASSWORD.encode() not in files(tmp_path)  # what a person gave is not kept either


def test_secret_arguments_must_be_arguments():
    with pytest.raises(ToolDefinitionError, match="no argument pasword"):

        @tool(secret=["pasword"])
        def wrong(password: str) -> str:
            """No."""
            return ""
