"""Secrets never reach a journal: not its records, not its hidden values, not the file."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretBytes, SecretStr

from agentfsm import Agent, Allow, Edit, Host, ProviderError, SqliteStore, ToolDefinitionError, UserInputRequested, tool
from agentfsm.errors import StaleHumanReplyError
from agentfsm.journal.fork import fork
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop import withholding
from agentfsm.loop.model import secrets_of
from agentfsm.loop.transition_table import LOOP
from agentfsm.loop.withholding import Withholder
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, Priced, resolve
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call

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
    rows = asyncio.run(store.records("r"))
    assert verify("r", rows, asyncio.run(store.head("r"))).code == GOOD


def test_a_run_without_a_store_keeps_its_secrets_out_of_its_journal(monkeypatch):
    async def live():
        return await an_agent(None, [call("login", user="ann", password=PASSWORD, pin=1), "x"], login).run("go")

    text = json.dumps([r.data for r in asyncio.run(live()).journal])
    assert PASSWORD not in text
    assert "[sealed " in text


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


@pytest.mark.slow
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
    assert "[sealed " in text
    store.close()
    assert b"sk-in-code" not in files(tmp_path)


@pytest.mark.parametrize("name", ["openai:m", "openai-responses:m", "anthropic:m", "ollama:m"])
def test_every_wire_reports_its_key(name):
    model = resolve(name, base_url="http://127.0.0.1:1/v1", api_key="sk-of-the-wire-1")
    assert [s.get_secret_value() for s in secrets_of(model)] == ["sk-of-the-wire-1"]
    assert "sk-of-the-wire" not in repr(secrets_of(model))


def test_a_model_without_a_list_of_secrets_has_none():
    assert secrets_of(ScriptedModel(["x"])) == ()


@pytest.fixture(params=[True, False], ids=["sealed", "not sealed"])
def seals(request, monkeypatch):
    """Whether the package that encrypts is installed."""
    if not request.param:
        monkeypatch.setattr(withholding, "_cipher_class", lambda: None)
    return request.param


def test_an_approved_call_with_secrets_runs_after_a_restart_as_it_was_approved_or_is_asked_again(
    store, tmp_path, seals
):
    async def live():
        first = await an_agent(store, [call("careful", user="ann", password=PASSWORD)], careful).run("go", run_id="r")
        assert isinstance(first.outcome, UserInputRequested)
        again = an_agent(store, ["done"], careful)
        result = await again.resume("r", Allow())
        if seals:
            return result
        assert isinstance(result.outcome, UserInputRequested)
        assert "needs password, which held a secret and is not stored" in result.outcome.question
        assert SEEN == []
        return await again.resume("r", Edit({"user": "ann", "password": PASSWORD}))

    result = asyncio.run(live())
    assert result.output == "done"
    assert SEEN == [PASSWORD]
    rows = asyncio.run(store.records("r"))
    assert verify("r", rows, asyncio.run(store.head("r"))).code == GOOD
    store.close()
    assert PASSWORD.encode() not in files(tmp_path)


class Login(BaseModel):
    user: str
    passwords: dict[str, list[SecretStr]]


@tool(requires_approval=True)
def enter(login: Login, raw: SecretBytes | None = None) -> str:
    """Log in."""
    SEEN.append((login.passwords["a"][0].get_secret_value(), raw and raw.get_secret_value()))
    return f"used {SEEN[-1]!r}"


@tool(secret=["account"], requires_approval=True)
def connect(account: dict[str, object]) -> str:
    """Connect."""
    SEEN.append(account)
    return "connected with " + json.dumps(json.dumps(account))


@tool(requires_approval=True)
def restore(database: str) -> str:
    """Restore a database."""
    SEEN.append(database)
    return f"restored {database}"


INNER = {"login": {"user": "ann", "passwords": {"a": ["x~7"], "b": ['q"\\é\n9']}}, "raw": "bb-9"}
ACCOUNT = {"name": "svc", "pin": 47110815, "deep": [{"token": "t-99"}, None, True, ""]}


@pytest.mark.parametrize(
    ("name", "arguments", "seen", "hidden"),
    [
        ("enter", INNER, ("x~7", b"bb-9"), ["x~7", 'q"\\', "bb-9"]),
        ("connect", {"account": ACCOUNT}, ACCOUNT, ["47110815", "t-99", '"svc"']),
        ("restore", {"database": "pw-8d7f6a5b"}, "pw-8d7f6a5b", ["pw-8d7f6a5b"]),
    ],
)
def test_what_is_withheld_inside_arguments_is_what_runs_after_a_restart(
    store, tmp_path, monkeypatch, name, arguments, seen, hidden
):
    monkeypatch.setenv("DB_PASSWORD", "pw-8d7f6a5b")
    tools = (enter, connect, restore)

    async def live():
        await an_agent(store, [call(name, **arguments)], *tools).run("go", run_id="r")
        return await an_agent(store, ["done"], *tools).resume("r", Allow())

    assert asyncio.run(live()).output == "done"
    assert [seen] == SEEN
    hidden_rows = "".join(record.hidden + record.body for record in asyncio.run(store.records("r")))
    assert "ann" in hidden_rows or name != "enter"
    for secret in hidden:
        assert secret not in hidden_rows
    assert verify("r", asyncio.run(store.records("r")), asyncio.run(store.head("r"))).code == GOOD


HOSTILE = {
    "DB_PASSWORD": "postgres",
    "PARTITION_KEY": "assistant",
    "X_TOKEN": "transition",
    "STATE_SECRET": "call_llm",
    "RESULT_TOKEN": "effect.result",
    "TOOL_KEY": "restore",
    "ROLE_KEY": "UserInputRequested",
    "RUN_TOKEN": "run-4711-abcdef",
}


def test_variables_whose_values_are_words_of_ours_do_no_harm(store, monkeypatch, seals):
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    script = [call("restore", database="postgres"), "postgres is restored by the assistant of run-4711-abcdef"]

    async def live():
        await an_agent(store, script[:1], restore).run("restore postgres in transition", run_id="run-4711-abcdef")
        return await an_agent(store, script[1:], restore).resume("run-4711-abcdef", Allow())

    result = asyncio.run(live())
    assert SEEN == ["postgres"]
    assert result.output == script[1]
    rows = asyncio.run(store.records("run-4711-abcdef"))
    assert verify("run-4711-abcdef", rows, asyncio.run(store.head("run-4711-abcdef"))).code == GOOD
    assert replay(rows, LOOP).same


@pytest.mark.parametrize(
    "word", ["assistant", "transition", "restore", "r", "user", "id", "arguments", "call_llm", "#"]
)
def test_declared_words_of_ours_do_no_harm_either(store, word):
    script = [call("restore", database=word), f"{word} is restored"]

    def agent(replies):
        host = Host(clock=FakeClock(), store=store, secrets=[word])
        return Agent(ScriptedModel(replies), tools=[restore], host=host)

    async def live():
        await agent(script[:1]).run(f"restore {word}", run_id="r")
        return await agent(script[1:]).resume("r", Allow())

    result = asyncio.run(live())
    assert [word] == SEEN
    assert result.output == script[1]
    assert [m.content for m in result.messages][-1] == script[1]
    rows = asyncio.run(store.records("r"))
    assert verify("r", rows, asyncio.run(store.head("r"))).code == GOOD
    assert replay(rows, LOOP).same


def test_a_fork_and_a_sub_agent_go_on_with_the_values_that_were_withheld(store, tmp_path):
    def outer(inner_script, outer_script):
        host = Host(clock=FakeClock(), store=store)
        inner = Agent(ScriptedModel(inner_script), tools=[careful], host=host)
        return Agent(ScriptedModel(outer_script), tools=[inner.as_tool("helper", "Helps.")], host=host)

    async def live():
        first = outer([call("careful", user="ann", password=PASSWORD)], [call("helper", task="log in")])
        waiting = await first.run("go", run_id="r")
        assert isinstance(waiting.outcome, UserInputRequested)
        return await outer(["in"], ["done"]).resume("r", Allow())

    assert asyncio.run(live()).output == "done"
    assert SEEN == [PASSWORD]

    async def forked():
        keyring = Host().keyring
        await an_agent(store, [call("careful", user="ann", password=PASSWORD)], careful).run("go", run_id="a")
        await fork(store, "a", (await store.head("a")).seq, "b", keyring)
        return await an_agent(store, ["done"], careful).resume("b", Allow())

    assert asyncio.run(forked()).output == "done"
    assert SEEN == [PASSWORD] * 2
    store.close()
    assert PASSWORD.encode() not in files(tmp_path)


def test_a_suspension_record_holds_no_secrets_and_resumes_with_them(monkeypatch, seals):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", KEY)
    SEEN.clear()
    host = Host(clock=FakeClock())

    async def live():
        asks = call("careful", user="ann", password=PASSWORD)
        first = await Agent(ScriptedModel([asks]), tools=[careful], host=host).run(f"use {KEY}, not {PASSWORD}")
        record = first.outcome.suspension_record.to_json()
        assert "ann" in record
        assert PASSWORD not in record
        assert KEY not in record
        again = Agent(ScriptedModel(["done"]), tools=[careful], host=host)
        return await again.resume(record, Allow())

    result = asyncio.run(live())
    assert ([PASSWORD] if seals else []) == SEEN
    assert isinstance(result.outcome, UserInputRequested) is not seals
    if seals:
        assert f"use {KEY}, not {PASSWORD}" in [message.content for message in result.messages]


def test_a_placeholder_that_a_model_writes_opens_nothing(store):
    """Somebody shows a model the placeholder of a secret; the text stays that text, also after a restart."""
    host = Host(clock=FakeClock(), store=store)
    shown = Withholder(host.keyring.current).placeholder_for("the secret")

    async def live():
        await Agent(ScriptedModel([call("restore", database=shown)]), tools=[restore], host=host).run("go", run_id="r")
        return await Agent(ScriptedModel(["done"]), tools=[restore], host=host).resume("r", Allow())

    result = asyncio.run(live())
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.arguments == {"database": shown}
    assert SEEN == []


class Account(BaseModel):
    user: str
    password: SecretStr = SecretStr("model-default-771188")


DEFAULT_TOKEN = SecretStr("default-token-771188")


def test_a_secret_that_a_call_leaves_to_its_default_is_withheld_like_one_that_it_gives(store, tmp_path):
    @tool(secret=["pin"])
    def sign_in(account: Account, token: SecretStr = DEFAULT_TOKEN, pin: str = "default-pin-771188") -> str:
        """Sign in."""
        values = (account.password.get_secret_value(), token.get_secret_value(), pin)
        if account.user == "bob":
            raise ValueError(f"not with {values}")
        return f"signed in with {values}"

    model = RecordingModel(ScriptedModel([call("sign_in", account={"user": u}) for u in ("ann", "bob")] + ["Done."]))
    agent = Agent(model, tools=[sign_in], host=Host(clock=FakeClock(), store=store))
    result = agent.run_sync("Sign in.", run_id="r")
    assert "default-token-771188" in str(result.messages)  # the model has what the tool returned
    for secret in ("model-default-771188", "default-token-771188", "default-pin-771188"):
        assert secret not in str(model.requests[0])  # and is told no default of a secret argument
        assert secret not in str(asyncio.run(store.records("r")))
        assert secret.encode() not in files(tmp_path)
        assert secret not in repr(result)


def test_the_error_about_a_reply_to_an_earlier_request_shows_no_secret(store):
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")

    async def scene(*tools):
        await Agent(ScriptedModel([call("careful", user="ann", password=PASSWORD)]), tools=[careful], host=host).run(
            "go", run_id=f"r{len(tools)}"
        )
        with pytest.raises(StaleHumanReplyError, match="careful") as caught:
            await Agent(ScriptedModel([]), tools=tools, host=host).resume(f"r{len(tools)}", Allow(), to="0" * 64)
        return str(caught.value)

    for tools in ((careful,), ()):  # another agent does not know which arguments are secret
        text = asyncio.run(scene(*tools))
        assert '"user": "ann"' in text
        assert PASSWORD not in text


def test_secret_arguments_must_be_arguments():
    with pytest.raises(ToolDefinitionError, match="no argument pasword"):

        @tool(secret=["pasword"])
        def wrong(password: str) -> str:
            """No."""
            return ""


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("shown", range(1, 30))
def test_no_secret_is_split_where_a_long_result_is_cut(store, tmp_path, from_end, quoted, shown):
    """``shown`` characters of it would be on the side of the cut that is kept."""
    secret = 'the "gate" of 1789 \\ ä'
    written = json.dumps(secret) if quoted else secret

    @tool(max_result_chars=100)
    def look() -> str:
        """Look."""
        before = "." * (200 - 50 - len(written) + shown if from_end else 50 - shown)
        return (before + written).ljust(200, ".")

    agent = Agent(
        ScriptedModel([call("look"), "done"]), tools=[look], host=Host(store=store, secrets=[SecretStr(secret)])
    )
    content = agent.run_sync("go", run_id="r").messages[-2].content
    assert ("left out" in content, written in content) == (True, False) if shown < len(written) else (True, True)
    store.close()
    assert b"gate" not in files(tmp_path)
    assert b"1789" not in files(tmp_path)


def test_a_secret_in_a_long_result_is_still_what_the_tool_returned_for_the_model(store):
    @tool(max_result_chars=100)
    def look() -> str:
        """Look."""
        return KEY + "." * 200

    result = an_agent(store, [call("look"), "done"], look).run_sync("go")
    assert result.messages[-2].content.startswith(KEY + "....")
