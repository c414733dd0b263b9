"""A run that is read while its owner writes it is read as of one moment; tampering is still detected."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from agentfsm import Agent, Allow, Host, MemoryStore, StaleLease, tool
from agentfsm.journal.load import load_stored_run
from agentfsm.journal.store import consistent_read, owner_name
from agentfsm.journal.verification import OPEN, TAMPERED, verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.transition_table import LOOP
from agentfsm.testing import ScriptedModel, call
from tests.helpers.journal_scenarios import finished_run, with_own_macs

WHOLE = with_own_macs(asyncio.run(finished_run()[0].records("sample")))


class Growing(MemoryStore):
    """A store whose run has one more record, by its holder, each time that anything of it was read, up to a point."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.now, self.last = first, last
        self.whole, whole_head = WHOLE, asyncio.run(finished_run()[0].head("sample"))
        assert whole_head is not None
        self.whole_head = whole_head

    async def head(self, run_id):
        row = self.whole[self.now - 1]
        told = dataclasses.replace(self.whole_head, seq=row.seq, hash=row.hash, status="running")
        self.now = min(self.now + 1, self.last)
        return told

    async def records(self, run_id, after=0, limit=None):
        told = self.whole[after : self.now]
        self.now = min(self.now + 1, self.last)
        return told


@pytest.mark.parametrize("last", [4, 5, 6, 9, 20])
def test_records_appended_during_a_read_are_not_tampering(last):
    store = Growing(4, last)
    rows, head = asyncio.run(consistent_read(store, "sample"))
    assert (head.seq, head.hash) == (len(rows), rows[-1].hash)
    assert len(rows) >= 4
    assert verify("sample", rows, head).code == OPEN


def test_a_run_that_is_being_written_is_loaded_consistently():
    taken = asyncio.run(load_stored_run(Growing(4, 20), "sample", LOOP, Keyring(b"of the tests"))).resume_point
    assert taken.hash == WHOLE[taken.seq - 1].hash  # whoever holds it is found when it is to go on


@pytest.mark.parametrize("shown", [3, 5])
def test_records_after_the_head_are_tampering(shown):
    class Showing(Growing):
        async def records(self, run_id, after=0, limit=None):
            return WHOLE[after:shown]

    store = Showing(4, 4)
    assert verify("sample", *asyncio.run(consistent_read(store, "sample"))).code == TAMPERED


def test_a_reply_to_a_run_in_progress_names_the_owner():
    store = MemoryStore()
    told = []

    @tool
    async def meanwhile() -> str:
        """Answer the run that this is."""
        with pytest.raises(StaleLease, match="is being run") as refused:
            await agent.resume("r", Allow()).load()
        told.append(refused.value.owner)
        return "told"

    agent = Agent(ScriptedModel([call("meanwhile"), "done"]), tools=[meanwhile], host=Host(store=store))

    async def live():
        return await agent.run("go", run_id="r")

    assert asyncio.run(live()).output == "done"
    assert told == [owner_name()]
