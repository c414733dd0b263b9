"""What a run may be given beside its prompt: it is validated, journaled, and there when the run is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    ConfigurationError,
    Handoff,
    Host,
    MissingModelError,
    PartialRunSummary,
    RunError,
    RunOptions,
    SqliteStore,
    SuspensionGuardrailsError,
    UserInputRequested,
    hand_over,
    tool,
)
from agentfsm.journal.fork import fork
from agentfsm.models import FallbackModel, Limited, ModelSettings, OpenAIChat
from agentfsm.testing import ScriptedModel, call
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output

SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tags": "billing"}, "tags must be a list of strings, as in tags=['billing'], not 'billing'"),
        ({"tags": 7}, "tags must be a list of strings"),
        ({"tags": ["a", 7]}, "a tag must be a string that is not blank, not 7"),
        ({"tags": [" "]}, "a tag must be a string that is not blank, not ' '"),
        ({"metadata": ["a"]}, "metadata must be a JSON object, as in metadata={'tenant': 7}, not list"),
        ({"metadata": {7: 1}}, "the names in metadata must be strings, not 7"),
        ({"metadata": {"a": object()}}, "metadata is not JSON: Object of type object is not JSON serializable"),
        ({"metadata": {"a": float("nan")}}, "metadata is not JSON: Out of range float values"),
        ({"metadata": {"a": SELF}}, "metadata is not JSON"),
        ({"options": {"model": "x"}}, "options must be a RunOptions, as in options=RunOptions(model=...), not dict"),
        ({"session_id": 7}, "session_id must be a string, not int"),
        ({"run_id": 7}, "run_id must be a string, or None for a random one, not int"),
        ({"run_id": ' {"a"'}, "begins like a suspension record"),
        ({"run_id": "half \ud800"}, "half of a surrogate pair"),
        ({"run_id": "a\0b"}, "NUL"),
    ],
)
def test_what_is_no_such_thing_is_refused(given: dict[str, Any], words: str):
    with pytest.raises(RunError) as raised:
        Agent(ScriptedModel(["ok"])).run("go", **given)
    assert words in str(raised.value)


@tool(requires_approval=True)
def pay(usd: int) -> str:
    """Pay."""
    return "paid"


def look() -> str:
    """Look."""
    return "nothing yet"


def payer(host: Host, *script: Any) -> Agent[None, str]:
    return Agent(ScriptedModel(list(script)), tools=[pay], host=host)


GIVEN: dict[str, Any] = {
    "session_id": "s1",
    "run_id": "order-7",
    "actor": "kim",
    "tags": ("billing", "eu", "billing"),
    "metadata": {"tenant": 7, "path": {"Größe": [1, None, True, 0.5]}},
}


def test_the_first_record_has_tags_and_metadata_as_plain_json():
    result = Agent(ScriptedModel(["ok"])).run_sync("go", **GIVEN)
    created = result.journal[0].data
    assert created["tags"] == ["billing", "eu"]
    assert created["metadata"] == {"tenant": 7, "path": {"Größe": [1, None, True, 0.5]}}
    assert (created["session"], created["run"]) == ("s1", "order-7")
    assert "deps" not in created


def test_a_run_that_is_given_neither_has_neither_in_its_journal():
    created = Agent(ScriptedModel(["ok"])).run_sync("go").journal[0].data
    assert not {"tags", "metadata", "deps"} & created.keys()


def test_the_journal_of_a_run_says_that_it_has_dependencies_and_not_which():
    agent: Agent[Any, str] = Agent(ScriptedModel(["ok"]))
    result = agent.run_sync("go", deps="a connection")
    assert result.journal[0].data["deps"] is True
    assert "a connection" not in str([record.data for record in result.journal])


def test_metadata_is_copied_and_cannot_be_changed():
    given = {"list": [1]}
    run = Agent(ScriptedModel(["ok"])).run("go", metadata=given)
    given["list"].append(2)
    assert run.run_state.metadata == {"list": [1]}
    with pytest.raises(TypeError):
        run.run_state.metadata["list"].append(2)


@pytest.mark.parametrize("stored", [False, True])
def test_a_resumed_run_has_what_it_was_given(stored: bool, tmp_path: Any):
    host = Host(store=SqliteStore(tmp_path / "runs.db")) if stored else Host()
    waiting = payer(host, call("pay", usd=1)).run_sync("go", **GIVEN)
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)
    record: Any = "order-7" if stored else request.suspension_record.to_json()
    state = payer(host, "ok").resume_sync(record, Allow()).run_state
    assert (state.tags, state.metadata) == (("billing", "eu"), GIVEN["metadata"])
    assert (state.session_id, state.requester.id if state.requester else "") == ("s1", "kim")


def test_a_fork_has_what_the_run_was_given(tmp_path: Any):
    store = SqliteStore(tmp_path / "runs.db")
    host = Host(store=store)
    payer(host, call("pay", usd=1)).run_sync("go", **GIVEN)
    forked = asyncio.run(fork(store, "order-7", 3, "order-8", host.keyring))
    assert (forked.run.tags, forked.run.metadata) == (("billing", "eu"), GIVEN["metadata"])
    assert forked.created["tags"] == ["billing", "eu"]
    assert forked.created["metadata"] == GIVEN["metadata"]


# -- a model, settings and limits of its own -------------------------------------------------------------------


def options_of(**given: Any) -> dict[str, Any]:
    return {"options": RunOptions(**given), "run_id": "own"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"settings": {"temperature": 1}}, "settings must be a ModelSettings, not dict"),
        ({"guardrails": 5}, "guardrails must be an AgentGuardrails, not int"),
        ({"model": 7}, "a model must be a name, or an object with reply"),
    ],
)
def test_options_that_are_something_else_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(RunError, match=words):
        RunOptions(**given)


def test_a_model_that_nobody_knows_is_refused_before_the_run():
    agent = Agent(ScriptedModel(["ok"]))
    with pytest.raises(ConfigurationError, match="no provider is known"):
        agent.run("go", options=RunOptions(model="nobody/knows"))
    with pytest.raises(ConfigurationError, match="the model 'scripted' takes no settings"):
        agent.run("go", options=RunOptions(settings=ModelSettings(temperature=0)))


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_with_a_model_by_name_goes_on_with_it_and_its_settings(
    stored: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    host = Host(store=SqliteStore(tmp_path / "runs.db")) if stored else Host()
    settings = ModelSettings(temperature=0.25, extra_body={"keep_alive": "5m"})
    with fake_model_server(tool_call_output(("pay", {"usd": 1})), text_output("ok")) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.host)
        given = options_of(model="ollama:other", settings=settings)
        waiting = payer(host).run_sync("go", **given)
        request = waiting.outcome
        assert isinstance(request, UserInputRequested)
        record: Any = "own" if stored else request.suspension_record.to_json()
        assert payer(host).resume_sync(record, Allow()).output == "ok"
    sent = [(body["model"], body["options"]["temperature"], body["keep_alive"]) for body in server.requests]
    assert sent == [("other", 0.25, "5m")] * 2


def test_a_run_whose_model_cannot_be_had_again_is_refused(monkeypatch: pytest.MonkeyPatch):
    with fake_model_server(tool_call_output(("pay", {"usd": 1}))) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.host)
        waiting = payer(Host()).run_sync("go", **options_of(model="ollama:other"))
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)
    monkeypatch.setenv("OLLAMA_HOST", "ftp://nowhere")
    with pytest.raises(MissingModelError, match=r"a model that is not available here: .*; nothing was changed"):
        payer(Host()).resume_sync(request.suspension_record, Allow())


def test_a_model_that_was_given_as_an_object_must_be_given_again():
    agent = payer(Host(), "never asked")
    own = ScriptedModel([call("pay", usd=1)], name="mine")
    request = agent.run_sync("go", **options_of(model=own)).outcome
    assert isinstance(request, UserInputRequested)
    record = request.suspension_record
    with pytest.raises(MissingModelError, match=r"model 'mine', given as an object, .* agent.resume\(..., model=...\)"):
        agent.resume_sync(record, Allow())
    with pytest.raises(MissingModelError, match="has the model 'mine', and model='other' is another"):
        agent.resume_sync(record, Allow(), model=ScriptedModel([], name="other"))
    assert agent.resume_sync(record, Allow(), model=ScriptedModel(["yes"], name="mine")).output == "yes"


def test_a_run_with_the_model_of_its_agent_takes_no_other():
    request = payer(Host(), call("pay", usd=1)).run_sync("go").outcome
    assert isinstance(request, UserInputRequested)
    with pytest.raises(MissingModelError, match="has the model that of its agent, 'scripted'"):
        payer(Host()).resume_sync(request.suspension_record, Allow(), model=ScriptedModel(name="mine"))


@pytest.mark.parametrize("stored", [False, True])
def test_limits_of_its_own_hold_after_a_restart(stored: bool, tmp_path: Any):
    host = Host(store=SqliteStore(tmp_path / "runs.db")) if stored else Host()
    two_calls = AgentGuardrails(max_iterations=2, on_limit="handoff")
    waiting = payer(host, call("pay", usd=1)).run_sync("go", **options_of(guardrails=two_calls))
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)
    record: Any = "own" if stored else request.suspension_record.to_json()
    result = payer(host, call("pay", usd=2)).resume_sync(record, Allow())
    assert isinstance(result.outcome, UserInputRequested)
    result = payer(host, "never asked").resume_sync("own" if stored else result.outcome.suspension_record, Allow())
    assert isinstance(result.outcome, Handoff)
    assert result.run_state.model_calls == 2


def test_an_agent_with_other_limits_still_cannot_go_on_with_a_run_that_has_none_of_its_own():
    request = payer(Host(), call("pay", usd=1)).run_sync("go", tags=["x"]).outcome
    assert isinstance(request, UserInputRequested)
    other = Agent(ScriptedModel(), tools=[pay], guardrails=AgentGuardrails(max_iterations=7))
    with pytest.raises(SuspensionGuardrailsError):
        other.resume_sync(request.suspension_record, Allow())


def test_an_interrupted_run_keeps_the_limits_that_it_began_with_under_an_agent_with_others(tmp_path: Any):
    def agent(store: SqliteStore, iterations: int, *script: Any) -> Agent:
        limits = AgentGuardrails(max_iterations=iterations, on_limit="stop")
        return Agent(ScriptedModel(script), tools=[look], guardrails=limits, host=Host(store=store))

    async def main() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            run = agent(store, 2, call("look")).run("go", run_id="own")
            await run.step()
            await hand_over(run)
            (resumed,) = await agent(store, 9, call("look"), call("look")).unfinished_runs()
            result = await resumed
            assert isinstance(result.outcome, PartialRunSummary)
            assert result.run_state.model_calls == result.run_state.guardrails.max_iterations == 2

    asyncio.run(main())


def test_a_secret_in_the_settings_is_withheld_and_there_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROUTER_TOKEN", secret := "tk-4711-very-secret-value")
    store = SqliteStore(tmp_path / "runs.db")
    host = Host(store=store)
    with fake_model_server(tool_call_output(("pay", {"usd": 1})), text_output("ok")) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.host)
        settings = ModelSettings(extra_body={"route": secret})
        waiting = payer(host).run_sync("go", **options_of(model="ollama:other", settings=settings))
        assert isinstance(waiting.outcome, UserInputRequested)
        written = str([(record.body, record.hidden) for record in asyncio.run(store.records("own"))])
        assert secret not in written + waiting.outcome.suspension_record.to_json()
        assert payer(host).resume_sync("own", Allow()).output == "ok"
    assert [body["route"] for body in server.requests] == [secret] * 2


def test_a_fork_has_the_options_of_the_run(tmp_path: Any):
    store = SqliteStore(tmp_path / "runs.db")
    host = Host(store=store)
    own = ScriptedModel([call("pay", usd=1)], name="mine")
    payer(host).run_sync("go", **options_of(model=own, guardrails=AgentGuardrails(max_iterations=3)))
    forked = asyncio.run(fork(store, "own", 3, "order-8", host.keyring))
    assert (forked.run.details.model, forked.run.details.own_guardrails) == ("mine", True)
    agent = payer(host)
    with pytest.raises(MissingModelError):
        agent.resume_sync("order-8")
    assert asyncio.run(agent.unfinished_runs()) == []
    assert agent.resume_sync("order-8", model=ScriptedModel([call("pay", usd=1)], name="mine")).state == "suspended"


# -- settings of a model ---------------------------------------------------------------------------------------


def test_settings_that_are_set_replace_those_of_the_model_also_inside_wrappers():
    chat = OpenAIChat("m", base_url="http://127.0.0.1:1/v1", settings=ModelSettings(temperature=0.5, seed=7))
    wrapped = FallbackModel(Limited(chat), chat)
    changed = wrapped.with_settings(ModelSettings(temperature=0, max_tokens=9))
    inner = [getattr(changed.models[0], "model"), changed.models[1]]  # noqa: B009
    assert [each.settings for each in inner] == [ModelSettings(temperature=0, seed=7, max_tokens=9)] * 2
    assert chat.settings == ModelSettings(temperature=0.5, seed=7)
    with pytest.raises(ConfigurationError, match="takes no settings"):
        FallbackModel(ScriptedModel(["ok"])).with_settings(ModelSettings(seed=1))
