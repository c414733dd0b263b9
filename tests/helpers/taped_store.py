"""A store that remembers its commits, and what another store had after some of them, as if processes had died then."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from agentfsm import MemoryStore
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Lease, SealedSnapshot, Status
from agentfsm.loop.keys import Keyring
from tests.helpers.journal_scenarios import with_own_macs


class Commit(NamedTuple):
    """One commit of a run, and the outside world at that time."""

    run_id: str
    records: tuple[SealedRecord, ...]
    status: Status
    info: RunInfo | None
    world: Any


class TapedStore(MemoryStore):
    """A store that remembers its commits in their order.

    Args:
        world: The outside world, of which each commit keeps a copy.
    """

    def __init__(self, world: Any = None) -> None:
        super().__init__()
        self.world, self.tape = world, list[Commit]()

    def _append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None,
        snapshot: SealedSnapshot | None,
    ) -> None:
        super()._append(lease, records, status, info, snapshot)
        self.tape.append(Commit(lease.run_id, tuple(records), status, info, copy.deepcopy(self.world)))


async def restore(tape: Sequence[Commit], store: Any, keyring: Keyring) -> None:
    """Write what a store had after some commits, as processes that have died since left it."""
    for run_id in dict.fromkeys(each.run_id for each in tape):
        commits = [each for each in tape if each.run_id == run_id and each.records]
        by_epoch = groupby(commits, lambda each: json.loads(each.records[0].body)["epoch"])
        lease = await store.acquire(run_id, "a process that died", new=True, keyring=keyring)
        for epoch, made in [(epoch, list(made)) for epoch, made in by_epoch]:
            while lease.epoch < epoch:
                await store.release(lease)
                lease = await store.acquire(run_id, "another that died", keyring=keyring)
            for each in made:
                await store.append(lease, with_own_macs(each.records, keyring), each.status, each.info)
        if commits[-1].status == "running":
            await store.release(lease)
