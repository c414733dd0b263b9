"""The requests of a run, put together from a report's parts, are those that the model got."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agentfsm import Edit, MemoryStore
from agentfsm.journal.redact import redact
from agentfsm.loop.keys import Keyring
from agentfsm.report.reported_run import sent_requests
from agentfsm.testing import RecordingModel, ScriptedModel
from tests.helpers.journal_scenarios import SAMPLE_SCRIPT, finished_run, sample_agent


def test_each_request_is_what_the_model_got() -> None:
    model, store = RecordingModel(ScriptedModel(SAMPLE_SCRIPT)), MemoryStore()
    agent = sample_agent(store)
    recording = agent.with_config(replace(agent.config, model=model))

    async def live() -> list[list[Any]]:
        await recording.run("Do it all.", run_id="sample")
        await recording.resume("sample", Edit({"to": "Bob", "amount": 2.0}))
        sent: list[list[Any]] = []
        for request in sent_requests(await store.records("sample")):
            sent.append([*(sent[-1][: request.same] if sent else []), *request.added])
        return sent

    assert asyncio.run(live()) == [list(request.messages) for request in model.requests]


def test_requests_end_where_a_value_was_redacted() -> None:
    store, _ = finished_run(MemoryStore(), "sample")
    assert len(list(sent_requests(asyncio.run(store.records("sample"))))) == 5
    asyncio.run(redact(store, "sample", "1.messages", Keyring(b"of the tests"), by="ann"))
    assert list(sent_requests(asyncio.run(store.records("sample")))) == []
