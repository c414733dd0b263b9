"""A run is read as far as somebody asks, whoever writes it, and says what its journal says."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import agentfsm.viewer
from agentfsm import Actor, AgentGuardrails, Edit, MemoryStore, UnknownRunError
from agentfsm.journal.redact import redact
from agentfsm.loop.keys import Keyring
from agentfsm.report.ledger import read_ledger
from agentfsm.testing import RecordingModel, ScriptedModel
from agentfsm.viewer.followed_run import FollowedRun, FollowedRuns
from agentfsm.viewer.step_reader import move_json
from tests.helpers.journal_scenarios import SAMPLE_SCRIPT, finished_run, sample_agent, waiting_run
from tests.helpers.long_runs import long_run

SECRET = b"of the tests"


async def opened(store: Any, run_id: str) -> FollowedRun:
    return await FollowedRuns(store).get(run_id)


def test_the_path_and_the_moves_are_those_of_the_ledger() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def read() -> None:
        run = await opened(store, "sample")
        ledger = read_ledger("sample", await store.records("sample"))
        kinds = [run.path.kinds[move.kind] for move in run.path.moves]
        assert [kind.id for kind in kinds] == [row.transition for row in ledger.moves]
        assert [kind.did_not_hold for kind in kinds] == [row.did_not_hold for row in ledger.moves]
        assert [(k.source, k.guard, k.target, k.ends) for k in kinds] == [
            (r.source, r.guard, r.target, r.ends) for r in ledger.moves
        ]
        assert [move.seq for move in run.path.moves] == [row.seq for row in ledger.moves]
        assert tuple(await run.moves(0, 1000)) == ledger.moves
        assert await run.ledger() == ledger
        assert run.path.state == "terminal"

    asyncio.run(read())


@pytest.mark.slow
def test_moves_are_read_only_as_far_as_they_are_asked_for() -> None:
    store = long_run(200)

    async def read() -> None:
        run = await opened(store, "long")
        assert len(run.path.moves) == 998
        assert len(await run.moves(10, 20)) == 10
        assert len(run._steps.ledger.moves) < 100
        assert [move.number for move in await run.moves(990, 1200)] == list(range(991, 999))

    asyncio.run(read())


def test_what_is_read_ahead_keeps_nobody_waiting_who_wants_a_few_moves() -> None:
    store = long_run(200)

    async def read() -> None:
        run = await opened(store, "long")
        run.read_ahead()
        await asyncio.sleep(0)  # it has begun
        assert len(await run.moves(0, 10)) == 10
        assert 0 < len(run._steps.ledger.moves) < 998
        while len(run._steps.ledger.moves) < 998:
            await asyncio.sleep(0)
        run.stop_reading()

    asyncio.run(read())


def test_every_record_belongs_to_one_move() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def read() -> None:
        run = await opened(store, "sample")
        steps = [await run.step(number) for number in range(1, len(run.path.moves) + 1)]
        assert [record["seq"] for step in steps if step for record in step["records"]] == list(range(1, 51))
        assert await run.step(0) is None
        assert await run.step(len(steps) + 1) is None

    asyncio.run(read())


def test_a_step_shows_the_prompt_exactly_as_the_model_got_it() -> None:
    model = RecordingModel(ScriptedModel(SAMPLE_SCRIPT))
    store = MemoryStore()
    agent = sample_agent(store, secret=SECRET, guardrails=AgentGuardrails(tool_timeout_s=5))

    async def play() -> None:
        recording = agent.with_config(_with_model(agent, model))
        await recording.run("Do it all.", run_id="sample")
        await recording.resume("sample", Edit({"to": "Bob", "amount": 2.0}))
        run = await opened(store, "sample")
        prompts = [await run.prompt(number) for number in range(1, len(run.path.moves) + 1)]
        sent = [prompt for prompt in prompts if prompt is not None]
        assert [list(prompt.messages) for prompt in sent] == [list(each.messages) for each in model.requests]
        assert [prompt.before for prompt in sent] == [0, *(len(each.messages) for each in model.requests[:-1])]

    asyncio.run(play())


def _with_model(agent: Any, model: Any) -> Any:
    from dataclasses import replace

    return replace(agent.config, model=model)


def test_a_step_has_reply_calls_failure_back_off_answer_lessons_and_budgets() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def read() -> dict[int, dict[str, Any]]:
        run = await opened(store, "sample")
        found = {number: await run.step(number) for number in range(1, len(run.path.moves) + 1)}
        return {number: step for number, step in found.items() if step is not None}

    steps = asyncio.run(read())
    by_seq = {step["move"]["seq"]: step for step in steps.values()}
    assert by_seq[4]["reply"]["message"]["calls"] == [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    assert by_seq[8]["calls"][0] | {"usage": None} == {
        "seq": 6, "name": "add", "attempt": 1, "status": "done", "arguments": None, "result": "3", "error": None,
        "run_id": "", "images": 0, "usage": None,
    }  # fmt: skip
    assert by_seq[12]["failure"]["kind"] == "transient_provider"
    assert by_seq[13]["recovery"] == {"action": "retry", "backoff_s": 2.0}
    assert by_seq[23]["lessons"] == []
    assert by_seq[29]["lessons"] == [
        {"kind": "environment_error", "explanation": "look: FileNotFoundError: no such file"}
    ]
    assert by_seq[34]["request"]["arguments"] == {"to": "Ann", "amount": 1.0}
    assert by_seq[37]["answer"] == {"kind": "edit", "arguments": {"to": "Bob", "amount": 2.0}}
    budgets = {each["name"]: (each["used"], each["limit"]) for each in by_seq[12]["budgets"]}
    assert budgets["model calls"] == (2, 50)
    assert budgets["steps"] == (2, 800)
    assert by_seq[49]["records"][-1]["kind"] == "run.finished"


def test_a_run_that_goes_on_is_read_on() -> None:
    store, _ = waiting_run(MemoryStore(), "sample")

    async def play() -> None:
        run = await opened(store, "sample")
        before = len(run.path.moves)
        assert len(await run.moves(0, 1000)) == before
        assert run.path.state == "suspended"
        await sample_agent(store, ["all done"]).resume("sample", Edit({"to": "Bob", "amount": 2.0}))
        await run.refresh()
        assert len(run.path.moves) > before
        assert run.path.state == "terminal"
        assert [move.number for move in await run.moves(0, 1000)] == list(range(1, len(run.path.moves) + 1))

    asyncio.run(play())


def test_what_is_redacted_while_it_is_open_is_forgotten_and_marked() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def play() -> None:
        run = await opened(store, "sample")
        step = await run.step(2)
        assert step is not None
        assert step["prompt"]["messages"][-1]["content"] == "Do it all."
        await redact(store, "sample", "1.messages", Keyring(SECRET), by="ann")
        await run.refresh()
        step = await run.step(1)
        assert step is not None
        assert step["records"][0]["redacted"]
        assert step["records"][0]["data"]["messages"][-1]["content"] == {"redacted": True}
        assert step["budgets"] is None
        step = await run.step(2)
        assert step is not None
        assert step["prompt"] is None
        assert "Do it all." not in str(await run.ledger())

    asyncio.run(play())


def test_the_picture_has_the_path_and_no_style_sheet_of_its_own() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def read() -> None:
        run = await opened(store, "sample")
        wide, narrow = await run.picture("wide"), await run.picture("vertical")
        assert wide.startswith("<svg")
        assert "<style" not in wide + narrow
        assert "a run of 29 transitions, now in terminal" in wide
        assert wide != narrow

    asyncio.run(read())


def test_a_run_that_is_not_there_is_unknown_and_few_runs_are_kept() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)
    waiting_run(store, "waits")

    async def read() -> None:
        runs = FollowedRuns(store, most=1)
        with pytest.raises(UnknownRunError):
            await runs.get("nobody")
        first = await runs.get("sample")
        assert await runs.get("sample") is first
        await runs.get("waits")
        assert await runs.get("sample") is not first

    asyncio.run(read())


def test_a_move_shows_hidden_characters_by_their_codes() -> None:
    store, _ = finished_run(MemoryStore(), "sample", secret=SECRET)

    async def read() -> Any:
        return (await (await opened(store, "sample")).moves(0, 1))[0]

    row = asyncio.run(read())
    assert "\u202e" not in str(move_json(row.__class__(*(_spoilt(getattr(row, name)) for name in row.__slots__))))


def _spoilt(value: Any) -> Any:
    return f"{value}\u202e" if isinstance(value, str) else value


def test_a_run_is_shown_as_listed_also_if_the_ids_of_newer_runs_begin_with_its_own() -> None:
    store = MemoryStore()
    for run_id in ("r1", "r10", "r11", "r12", "r13", "r14"):
        finished_run(store, run_id, secret=SECRET)

    async def ask() -> Any:
        transport = httpx.ASGITransport(agentfsm.viewer.app(store, secret=SECRET, authenticate=lambda _: Actor("ann")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/api/run", params={"run": "r1"})).json()["run"]

    shown = asyncio.run(ask())
    assert (shown["id"], shown["status"]) == ("r1", "finished")
