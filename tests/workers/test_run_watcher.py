"""What is done about runs and activations whose worker died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentfsm.errors import StoreError
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Head
from agentfsm.workers import run_watcher
from agentfsm.workers.run_watcher import RunWatcher, attempts_without_progress, stale_action
from agentfsm.workers.waker import Activation, DeliveredActivation
from agentfsm.workers.worker_metrics import WorkerCounts
from agentfsm.workers.worker_settings import WorkerSettings

HEAD = Head("r", epoch=3, owner=None, seq=5, hash="0" * 64, status="running")
SUSPENDED = replace(HEAD, status="suspended")
SEEN = Activation("r", 3, "support@1")
NEW = Activation("r", 0, "support", request="sealed")


@pytest.mark.parametrize(
    ("why", "activation", "head", "expected"),
    [
        ("it died before the run was in the store", NEW, None, "redeliver"),
        ("it died before it acquired the run", NEW, replace(HEAD, seq=0, epoch=1), "redeliver"),
        ("it acquired the run, and died before the first record", NEW, replace(HEAD, seq=0, epoch=2), "redeliver"),
        ("it is about to write the first record", NEW, replace(HEAD, seq=0, owner="worker"), "leave"),
        ("it is at work", NEW, replace(HEAD, owner="worker"), "leave"),
        ("it died at work, and the run is woken in its new epoch", NEW, HEAD, "drop"),
        ("it died when the run had ended", NEW, replace(HEAD, status="finished"), "drop"),
        ("it died before it acquired the run", SEEN, HEAD, "redeliver"),
        ("it died before it expired the request", SEEN, SUSPENDED, "redeliver"),
        ("the run ended in that epoch", SEEN, replace(HEAD, status="finished"), "drop"),
        ("it is at work", SEEN, replace(HEAD, epoch=4, owner="worker"), "leave"),
        ("it died at work", SEEN, replace(HEAD, epoch=4), "drop"),
        ("it acquired the run, and died before it acted on an answer", SEEN, replace(SUSPENDED, epoch=4), "wake"),
        ("it died when the run began to wait", NEW, SUSPENDED, "wake"),
        ("it died, and another one is at work", SEEN, replace(HEAD, epoch=5, owner="worker"), "drop"),
    ],
)
def test_an_unfinished_activation_is_settled_by_what_the_store_says(
    why: str, activation: Activation, head: Head | None, expected: str
) -> None:
    assert stale_action(activation, head) == expected, why


def records(*kinds: tuple[str, int]) -> list[SealedRecord]:
    return [
        SealedRecord(seq, f'{{"epoch":{epoch},"kind":"{kind}","ts":{seq}}}', "0" * 64)
        for seq, (kind, epoch) in enumerate(kinds, start=1)
    ]


@pytest.mark.parametrize(
    ("journal", "epoch", "expected"),
    [
        ([("run.created", 1), ("transition", 1), ("effect.intent", 1)], 1, 1),
        ([("run.created", 1), ("transition", 1), ("effect.intent", 1)], 4, 4),  # three died before they wrote anything
        ([("run.created", 1), ("effect.intent", 1), ("run.resumed", 2), ("effect.intent", 2)], 2, 2),
        ([("run.created", 1), ("run.resumed", 2), ("effect.intent", 2), ("effect.result", 2)], 2, 1),
        ([("run.created", 1), ("effect.result", 2), ("run.resumed", 3), ("run.resumed", 4)], 4, 3),
    ],
)
def test_attempts_are_counted_since_the_journal_last_said_anything_new(
    journal: list[tuple[str, int]], epoch: int, expected: int
) -> None:
    assert attempts_without_progress(records(*journal), replace(HEAD, epoch=epoch)) == expected


@pytest.mark.parametrize(("below_at", "expected"), [(0, 4), (1, 4), (2, 4), (3, 3), (4, 3), (5, 2), (6, 1), (9, 1)])
def test_attempts_are_counted_since_a_run_below_came_further_if_that_was_later(below_at: int, expected: int) -> None:
    journal = records(("run.created", 1), ("effect.intent", 1), *(("run.resumed", 2), ("effect.intent", 2)))
    journal += records(*[("", 0)] * 4, ("run.resumed", 3), ("run.resumed", 4))[4:]
    assert attempts_without_progress(journal, replace(HEAD, epoch=4), below_at) == expected


class LeftRuns:
    """A store with the runs of a dead worker, and an engine that notes in which order a watcher wakes them."""

    def __init__(self, count: int, away: Collection[str] = (), error: Exception | None = None) -> None:
        self.away, self.error = set(away), error
        self.signals = self
        self.left = [replace(HEAD, run_id=f"r{number}") for number in range(count)]
        self.woken: list[str] = []
        self.queued: dict[str, float] = {}
        self.read: list[str] = []

    async def heads(self, which: str) -> list[Head]:
        return self.left if which == "cut off" else []

    async def records(self, run_id: str, *, limit: int) -> list[SealedRecord]:
        self.read.append(run_id)
        return [SealedRecord(1, "", "", "", "")]

    def _reach(self, what: str) -> None:
        """Fail once if that is away."""
        if what in self.away:
            self.away.remove(what)
            raise self.error or StoreError(f"{what} is away")

    async def head(self, run_id: str) -> Head:
        return replace(HEAD, run_id=run_id, seq=0)

    async def bring_forward(self, key: str) -> None:
        self._reach("the queue")
        self.woken.append(key)

    async def pending(self, run_id: str) -> list[Any]:
        return []

    async def listen(self) -> AsyncGenerator[str]:
        for number in range(2):
            yield f"r{number}"

    async def due(self, keys: Collection[str]) -> dict[str, float]:
        self._reach("the queue")
        return {key: due for key, due in self.queued.items() if key in keys}

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        self._reach(activation.run_id)
        self.woken.append(activation.run_id)
        return True


def test_each_worker_begins_with_another_one_of_the_runs_that_a_dead_worker_left() -> None:
    def for_run(head: Head, begun: SealedRecord) -> Any:
        return SimpleNamespace(queue="support@1")

    async def woken(count: int) -> list[str]:
        found: Any = LeftRuns(count)
        agents: Any = SimpleNamespace(for_run=for_run)
        watcher = RunWatcher(found, found, agents, WorkerSettings(), WorkerCounts())
        await watcher._wake_cut_off_runs()
        await watcher._wake_cut_off_runs()  # nobody has taken them yet, and they were woken
        return list(found.woken)

    of_each = [asyncio.run(woken(20)) for _ in range(20)]
    assert [sorted(each) for each in of_each] == [sorted(f"r{number}" for number in range(20))] * 20
    assert len({each[0] for each in of_each}) > 5


def test_a_run_that_another_worker_has_woken_is_left_alone_unless_it_is_still_cut_off_a_while_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        found: Any = LeftRuns(3)
        agents: Any = SimpleNamespace(for_run=lambda head, begun: SimpleNamespace(queue="support@1"))
        watcher = RunWatcher(found, found, agents, WorkerSettings(), WorkerCounts())
        found.queued = {Activation("r1", HEAD.epoch, "").key: 0.0}
        await watcher._wake_cut_off_runs()
        assert (sorted(found.woken), sorted(found.read)) == (["r0", "r2"], ["r0", "r2"])  # not even read
        monkeypatch.setattr(run_watcher, "WAKE_AGAIN_S", 0.0)
        await watcher._wake_cut_off_runs()  # nobody serves the queue that it is in: it is moved
        assert sorted(found.woken) == ["r0", "r0", "r1", "r2", "r2"]

    asyncio.run(scenario())


def test_why_runs_wait_for_another_worker_is_logged_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reason(head: Head, begun: SealedRecord) -> str:
        return {"r0": "", "r3": "it lacks the tool 'b'"}.get(head.run_id, "it lacks the tool 'a'")

    async def scenario() -> None:
        found: Any = LeftRuns(4)
        agents: Any = SimpleNamespace(for_run=lambda head, begun: None, reason_to_leave=reason)
        watcher = RunWatcher(found, found, agents, WorkerSettings(), WorkerCounts())
        for _ in range(3):
            await watcher._wake_cut_off_runs()
        assert (found.woken, len(found.read)) == ([], 12)

    monkeypatch.setattr(run_watcher, "WAKE_AGAIN_S", 0.0)
    asyncio.run(scenario())
    first, second = sorted(caplog.messages, key=lambda line: "'b'" in line)
    assert "run r1" in first or "run r2" in first
    assert "it lacks the tool 'a'; start a worker" in first
    assert "run r3" in second


@pytest.mark.parametrize("away", ["the queue", "r1"])
def test_a_run_that_could_not_be_woken_is_woken_by_the_next_sweep(away: str) -> None:
    async def scenario() -> None:
        found: Any = LeftRuns(3, away=[away])
        agents: Any = SimpleNamespace(for_run=lambda head, begun: SimpleNamespace(queue="support@1"))
        watcher = RunWatcher(found, found, agents, WorkerSettings(), WorkerCounts())
        with pytest.raises(StoreError, match=away):
            await watcher._wake_cut_off_runs()
        await watcher._wake_cut_off_runs()
        assert set(found.woken) == {"r0", "r1", "r2"}

    asyncio.run(scenario())


class BusyWorkers(LeftRuns):
    """What other workers are at: one has written records, and one is about to write the first."""

    def __init__(self) -> None:
        super().__init__(0)
        self.busy = {"begun": replace(HEAD, owner="worker"), "new": replace(HEAD, seq=0, owner="worker")}
        self.looked: list[str] = []
        self.dropped: list[str] = []

    async def head(self, run_id: str) -> Head:
        self.looked.append(run_id)
        return self.busy[run_id]

    async def unfinished(self, older_than_s: float) -> list[DeliveredActivation]:
        return [DeliveredActivation(Activation(run_id, 0, "support", request="sealed"), 1) for run_id in self.busy]

    async def drop(self, activation: Activation) -> None:
        self.dropped.append(activation.run_id)


def test_a_run_that_is_being_worked_on_is_not_looked_at_again_until_its_worker_may_have_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        found: Any = BusyWorkers()
        agents: Any = SimpleNamespace()
        watcher = RunWatcher(found, found, agents, WorkerSettings(), WorkerCounts())
        for _ in range(3):
            await watcher._settle_activations()
        assert found.looked == ["begun", "new", "new", "new"]
        found.busy["begun"] = replace(HEAD, epoch=2)  # it was cut off, and is taken over as such
        await watcher._settle_activations()
        assert found.looked.count("begun") == 1
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + run_watcher.AT_WORK_S)
        for _ in range(2):
            await watcher._settle_activations()
        assert (found.looked.count("begun"), found.dropped) == (3, ["begun"])

    asyncio.run(scenario())


ERRORS = [StoreError("the queue is away"), TypeError("Activation() got an unexpected keyword argument")]


@pytest.mark.parametrize("error", ERRORS, ids=["away", "of-a-newer-release"])
@pytest.mark.parametrize("watch", ["sweep", "listen"])
def test_a_watch_goes_on_after_any_error(error: Exception, watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watcher, "LISTEN_AGAIN_S", 0.0)

    async def scenario() -> None:
        found: Any = LeftRuns(2, away=["the queue"], error=error)
        agents: Any = SimpleNamespace(
            for_run=lambda head, begun: SimpleNamespace(queue="support@1"),
            keyring=SimpleNamespace(foreign_key_id=lambda mac: ""),
        )
        watcher = RunWatcher(found, found, agents, WorkerSettings(sweep_s=1e-6), WorkerCounts())
        watching = asyncio.ensure_future(watcher.sweep() if watch == "sweep" else watcher.listen())
        while len(found.woken) < 2 and not watching.done():
            await asyncio.sleep(0)
        assert not watching.done()
        watching.cancel()

    asyncio.run(scenario())
