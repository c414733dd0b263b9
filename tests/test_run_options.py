"""What a run may be given beside its prompt: it is validated, journaled, and there when the run is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import Agent, Allow, Host, RunError, SqliteStore, UserInputRequested, tool
from agentfsm.journal.fork import fork
from agentfsm.testing import ScriptedModel, call

SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tags": "billing"}, "tags are a list of texts, as in tags=['billing'], not 'billing'"),
        ({"tags": 7}, "tags are a list of texts"),
        ({"tags": ["a", 7]}, "a tag is a text that is not blank, not 7"),
        ({"tags": [" "]}, "a tag is a text that is not blank, not ' '"),
        ({"metadata": ["a"]}, "metadata is a JSON object, as in metadata={'tenant': 7}, not list"),
        ({"metadata": {7: 1}}, "the names in metadata are strings, not 7"),
        ({"metadata": {"a": object()}}, "metadata is not JSON: Object of type object is not JSON serializable"),
        ({"metadata": {"a": float("nan")}}, "metadata is not JSON: Out of range float values"),
        ({"metadata": {"a": SELF}}, "metadata is not JSON"),
        ({"session_id": 7}, "session_id is a string, not int"),
        ({"run_id": 7}, "run_id is a string, or None for a random one, not int"),
        ({"run_id": ' {"a"'}, "begins like a suspension record"),
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
