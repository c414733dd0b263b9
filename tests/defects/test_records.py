"""Suspension records: resumed from JSON, in another process, unchanged, once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Edit,
    FileReplayGuard,
    Host,
    MemoryStore,
    SuspensionRecord,
    SuspensionRecordError,
    SuspensionRegistryError,
    SuspensionTamperedError,
    SuspensionUsedError,
)
from agentfsm.testing import call
from tests.helpers.scenarios import (
    await_run,
    check_run,
    dangerous,
    echo,
    make_host,
    run_until_suspended,
    scripted_model,
)

# -- a record that went through JSON resumes ---------------------------------------------------------


WAYS_TO_WAIT: dict[str, tuple[list[Any], str, Any, dict[str, Any]]] = {
    "a question": ([call("ask_user", question="which?", choices=["a", "b"])], "question", "a", {}),
    "an approval": ([call("dangerous", what="it")], "approval", Allow(), {}),
    "an approval with other arguments": ([call("dangerous", what="it")], "approval", Edit({"what": "less"}), {}),
    "a limit": ([call("echo", text="a")], "limit", "go on", {"max_iterations": 1}),
    "a loop": ([[call("echo", text="same")] * 6], "question", "stop that", {}),
    "odd texts": (
        [call("ask_user", question="\ud83d \x00 \u2028 <&> \"' é", context="\ud800")],
        "question",
        "\ud800",
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WAYS_TO_WAIT)
def test_a_record_that_went_through_json_resumes(case: str) -> None:
    entries, kind, reply, limits = WAYS_TO_WAIT[case]
    model = scripted_model(*entries, call("return_done", output="x"))
    agent = Agent(
        model, tools=[echo, dangerous], preset="funnel", guardrails=AgentGuardrails(**limits), host=make_host()
    )
    record = run_until_suspended(agent)
    text = record.to_json()
    assert json.loads(text)["kind"] == kind
    back = SuspensionRecord.from_json(text.encode())
    assert back == record
    result = asyncio.run(await_run(agent.resume(back, reply)))
    assert result.output == "x"
    check_run(model, result)


OTHER_PROCESS = """
import asyncio, sys
from agentfsm import Agent, AgentGuardrails, Allow, Host, FileReplayGuard, tool
from agentfsm.testing import ScriptedModel, call

@tool(requires_approval=True)
def dangerous(what: str) -> str:
    "Needs approval."
    return f"did {what}"

async def main(folder):
    guard = {"replay_guard": FileReplayGuard(folder + "/used")} if len(sys.argv) == 2 else {}
    host = Host(secret=b"shared", **guard)
    model = ScriptedModel([lambda messages: f"it {messages[-1].content}"])
    agent = Agent(model, tools=[dangerous], host=host, guardrails=AgentGuardrails(max_iterations=9))
    record = open(folder + "/record.json", encoding="utf-8").read()
    print("ready", flush=True)
    sys.stdin.readline()
    result = await agent.resume(record, Allow())
    print(result.output, len(result.messages), result.run_state.run_id)

asyncio.run(main(sys.argv[1]))
"""


def suspended_for_others(folder: Path, **host: Any) -> tuple[Agent, SuspensionRecord]:
    """An agent, and the record of its run, which ``OTHER_PROCESS`` can read."""
    guardrails = AgentGuardrails(max_iterations=9)
    model, shared = scripted_model(call("dangerous", what="it")), Host(secret=b"shared", **host)
    agent = Agent(model, tools=[dangerous], host=shared, guardrails=guardrails)
    record = run_until_suspended(agent)
    (folder / "record.json").write_text(record.to_json(), encoding="utf-8")
    return agent, record


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False], ids=["with a guard that all share", "with a secret alone"])
def test_of_many_processes_that_resume_one_record_at_the_same_time_exactly_one_does(
    tmp_path: Path, guarded: bool
) -> None:
    """Without a shared guard it is the process that made the record, and the others say what to configure."""
    host = {"replay_guard": FileReplayGuard(tmp_path / "used")} if guarded else {}
    agent, record = suspended_for_others(tmp_path, **host)
    words = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), *([] if guarded else ["unguarded"])]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    racers = [subprocess.Popen(words, text=True, cwd=Path(__file__).parent.parent.parent, **pipes) for _ in range(6)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=60) for racer in racers]
    won = [out for out, _ in outputs if "did it" in out]
    refusals = [err.splitlines()[-1] for out, err in outputs if "did it" not in out]
    if guarded:
        assert (len(won), len(refusals)) == (1, 5)
        assert all("SuspensionUsedError" in line for line in refusals), refusals
        return
    assert (len(won), len(refusals)) == (0, 6)
    assert all("SuspensionRegistryError" in line and "FileReplayGuard" in line for line in refusals), refusals
    here = Agent(scripted_model("done"), tools=[dangerous], host=Host(secret=b"shared"), guardrails=agent.guardrails)
    assert asyncio.run(await_run(here.resume(record, Allow()))).output == "done"
    with pytest.raises(SuspensionUsedError):
        asyncio.run(here.resume(record, Allow()).load())


def test_the_record_of_a_stored_run_is_resumed_only_where_the_store_is() -> None:
    """Two stores, or a store and a folder of used records, do not know of each other."""
    stored = Host(secret=b"shared", store=MemoryStore())
    record = run_until_suspended(Agent(scripted_model(call("dangerous", what="it")), tools=[dangerous], host=stored))
    for other in (Host(secret=b"shared"), Host(secret=b"shared", store=MemoryStore())):
        agent = Agent(scripted_model("done"), tools=[dangerous], host=other)
        with pytest.raises(SuspensionRegistryError, match="is in a store"):
            asyncio.run(agent.resume(record, Allow()).load())
    agent = Agent(scripted_model("done"), tools=[dangerous], host=stored)
    assert asyncio.run(await_run(agent.resume(record, Allow()))).output == "done"


def test_a_record_resumes_in_another_process_and_only_once(tmp_path: Path) -> None:
    agent, record = suspended_for_others(tmp_path, replay_guard=FileReplayGuard(tmp_path / "used"))

    def resume(seed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)],
            capture_output=True,
            input="go\n",
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent.parent,
            timeout=60,
            check=False,
        )

    first = resume("1")
    assert first.stdout.split() == ["ready", "it", "did", "it", "4", record.run_id], first.stderr
    second = resume("2")
    assert second.returncode != 0
    assert "SuspensionUsedError" in second.stderr
    with pytest.raises(SuspensionUsedError):
        asyncio.run(agent.resume(record, Allow()).load())


# -- a record with any one field changed is refused --------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value that could be changed: each leaf, each empty list and object."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list) and value:
        for place, each in enumerate(value):
            yield from leaves(each, (*path, place))
    else:
        yield path


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return "x"
        case list():
            return ["x"]
        case _:
            return {"x": 1}


@pytest.mark.slow
def test_a_record_with_any_one_field_changed_is_refused_and_the_right_one_still_resumes() -> None:
    model = scripted_model(
        "just talking", [call("echo", text="a"), call("dangerous", what="it")], call("return_done", output="x")
    )
    agent = Agent(model, tools=[echo, dangerous], preset="funnel", host=make_host())
    record = run_until_suspended(agent)
    data = json.loads(record.to_json())
    paths = list(leaves(data))
    assert {p[0] for p in paths} == set(SuspensionRecord.model_fields)
    assert len(paths) > 80
    for path in paths:
        copy = json.loads(record.to_json())
        place = copy
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = changed(place[path[-1]])
        with pytest.raises(SuspensionRecordError):
            asyncio.run(agent.resume(json.dumps(copy), Allow()).load())
    for path in paths:  # and with any one left out
        copy = json.loads(record.to_json())
        place = copy
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        with pytest.raises(SuspensionRecordError):
            asyncio.run(agent.resume(json.dumps(copy), Allow()).load())
    with pytest.raises(SuspensionRecordError):
        asyncio.run(agent.resume(json.dumps({**data, "more": 1}), Allow()).load())
    assert len(model.requests) == 2
    result = asyncio.run(await_run(agent.resume(record, Allow())))
    assert result.output == "x"


def test_a_record_signed_with_another_secret_is_refused() -> None:
    record = run_until_suspended(
        Agent(scripted_model(call("dangerous", what="it")), tools=[dangerous], host=make_host())
    )
    other = Agent(scripted_model(), tools=[dangerous], host=Host(secret=b"another"))
    with pytest.raises(SuspensionTamperedError):
        asyncio.run(other.resume(record, Allow()).load())


def test_a_record_that_was_used_is_refused_even_when_two_resume_it_at_once() -> None:
    agent = Agent(scripted_model(call("dangerous", what="it"), "x", "y"), tools=[dangerous], host=make_host())
    record = run_until_suspended(agent)

    async def scene() -> list[Any]:
        runs = [agent.resume(record, Allow()), agent.resume(record, Allow())]
        return await asyncio.gather(*map(await_run, runs), return_exceptions=True)

    one, other = asyncio.run(scene())
    assert one.output == "x"
    assert isinstance(other, SuspensionUsedError)
    with pytest.raises(SuspensionUsedError):
        asyncio.run(agent.resume(record, Allow()).load())
