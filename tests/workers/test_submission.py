"""What is submitted: checked, encrypted for the queue, listed, and started once."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import SecretStr

from agentfsm import (
    Actor,
    Agent,
    ConfigurationError,
    Host,
    JournalError,
    MemoryStore,
    RunEndedError,
    RunError,
    RunQuery,
    Runs,
    SessionBusyError,
    SqliteStore,
    StaleLease,
    StoreError,
    open_store,
)
from agentfsm.cli.app import app
from agentfsm.journal.run_info import WaitingFor
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel
from agentfsm.workers import Worker, open_waker
from agentfsm.workers.submission import Submission, open_submission, seal_submission, submit
from agentfsm.workers.waker import Activation, SetAside
from tests.helpers.postgres import empty_database

SECRET = b"the secret of these tests, long enough"
KEYS = Keyring(SECRET)
GIVEN = Submission(
    agent="support",
    prompt="Ship order 7 for token-of-ann.",
    session_id="s",
    actor=Actor("ann", ("buyer",)),
    tags=("billing", "tenant:acme"),
    metadata={"order": 7},
)


class Recorded:
    """Records what is to be delivered."""

    def __init__(self) -> None:
        self.woken: list[tuple[Activation, float]] = []

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        known = any(each.key == activation.key for each, _ in self.woken)
        if not known:
            self.woken.append((activation, delay_s))
        return not known

    async def due(self, keys: Collection[str]) -> dict[str, float]:
        return {key: 0.0 for key in keys if any(each.key == key for each, _ in self.woken)}

    async def list_set_aside(self, keys: Collection[str] = ()) -> list[SetAside]:
        return []


class Away:
    """An engine that cannot be reached."""

    async def due(self, keys: Collection[str]) -> dict[str, float]:
        raise StoreError("the queues cannot be used")


def test_a_sealed_submission_is_what_it_was_and_shows_nothing() -> None:
    sealed = seal_submission(GIVEN, "r", KEYS)
    assert open_submission(sealed, "r", KEYS) == GIVEN
    for text in ("token", "ann", "billing", "acme", "order"):
        assert text not in sealed


@pytest.mark.parametrize("odd", ["\0", "\ud800", "$str"])
def test_whatever_a_run_may_be_asked_may_be_submitted(odd: str) -> None:
    given = replace(GIVEN, prompt=f"Ship {odd}.", metadata={odd: odd, "list": [odd, None, 1.5, {"a": odd}]})
    assert open_submission(seal_submission(given, "r", KEYS), "r", KEYS) == given


def test_a_replaced_secret_still_opens_what_was_submitted_before() -> None:
    sealed = seal_submission(GIVEN, "r", KEYS)
    after = Keyring(b"a newer secret of these tests, long enough", [b"the secret of these tests, long enough"])
    assert open_submission(sealed, "r", after) == GIVEN


def test_a_submission_is_refused_under_another_secret_for_another_run_or_changed() -> None:
    sealed = seal_submission(GIVEN, "r", KEYS)
    with pytest.raises(JournalError, match="under another secret"):
        open_submission(sealed, "r", Keyring(b"somebody else's secret, long enough too"))
    with pytest.raises(JournalError, match="changed"):
        open_submission(sealed, "another", KEYS)
    with pytest.raises(JournalError, match="changed"):
        open_submission(sealed[:-8] + "AAAAAAA=", "r", KEYS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent": " "},
        {"agent": "a:b"},
        {"agent": "a@b"},
        {"agent": "a" * 101},
        {"prompt": ""},
        {"tags": ("",)},
        {"tags": ("agent:billing",)},
        {"metadata": {"when": object()}},
    ],
)
def test_what_cannot_be_submitted_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RunError):
        Submission(**({"agent": "support", "prompt": "Ship."} | wrong))  # type: ignore[arg-type]


def test_a_submitted_run_is_listed_until_it_begins() -> None:
    async def scenario() -> None:
        store, waker = MemoryStore(), Recorded()
        run_id = await submit(store, waker, KEYS, GIVEN, priority=3, delay_s=60)  # type: ignore[arg-type]
        (info,) = (await store.find_runs(RunQuery(tag="tenant:acme"))).runs
        assert (info.run_id, info.status, info.waiting_for) == (run_id, "suspended", WaitingFor("worker"))
        assert (info.actor, info.session_id, info.tags) == ("ann", "s", ("billing", "tenant:acme", "agent:support"))
        assert (await store.find_runs(RunQuery(metadata={"order": 7}))).runs == (info,)
        ((activation, delay_s),) = waker.woken
        assert (activation.key, activation.queue, activation.tenant) == (
            f"{run_id}:0",
            f"support:{KEYS.current.key_id}",
            "acme",
        )
        assert (activation.priority, delay_s) == (3, 60)
        assert open_submission(activation.request, run_id, KEYS) == GIVEN

    asyncio.run(scenario())


def test_a_session_is_busy_while_a_run_of_it_waits_for_a_worker() -> None:
    async def main() -> None:
        store = MemoryStore()
        host = Host(store=store, secret=b"the secret of these tests, long enough")
        session = Agent(ScriptedModel(["Hello.", "Done."]), host=host).session("s")
        await session.run("Hi.", tags=["tenant:acme"])
        run_id = await submit(store, Recorded(), KEYS, GIVEN)  # type: ignore[arg-type]
        for call in (lambda: session.run("And?"), session.run, lambda: session.resume("x"), session.dismiss):
            with pytest.raises(SessionBusyError, match="waits for a worker") as raised:
                await call()
            assert raised.value.run_id == run_id
        assert await session.waiting() is None
        assert [message.content for message in await session.messages()] == ["Hi.", "Hello."]

    asyncio.run(main())


def test_a_process_that_submits_to_a_file_does_not_stay_its_writer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with SqliteStore(tmp_path / "runs.db") as web:
            await submit(web, Recorded(), KEYS, GIVEN)  # type: ignore[arg-type]
            async with SqliteStore(tmp_path / "runs.db") as worker:
                assert await worker.acquire("r", "a worker", new=True)

    asyncio.run(scenario())


def test_the_command_line_says_that_a_submitted_run_waits_for_a_worker(tmp_path: Path) -> None:
    async def scenario() -> str:
        async with SqliteStore(tmp_path / "runs.db") as store:
            return await submit(store, Recorded(), KEYS, GIVEN)  # type: ignore[arg-type]

    run_id = asyncio.run(scenario())
    (line,) = CliRunner().invoke(app, ["runs", "--store", str(tmp_path / "runs.db")]).output.splitlines()
    assert line.startswith(f"{run_id}  suspended  ")
    assert line.endswith("  waits for a worker")


@pytest.mark.parametrize("forged", [False, True])
def test_a_run_that_waits_for_a_worker_verifies_as_one_that_has_not_begun(forged: bool) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        run_id = await submit(store, Recorded(), KEYS, GIVEN)  # type: ignore[arg-type]
        head = await store.head(run_id)
        if forged:  # by somebody without the secret, of a run whose process died before its first record
            await store.release(await store.acquire("cut off", "a process", new=True, keyring=KEYS))
            head = await store.head("cut off")
            assert head is not None
            head = replace(head, status="suspended", row=head.row.replace("running", "suspended"))
        report = verify(run_id, [], head, keyring=KEYS)
        assert report.code == (TAMPERED if forged else OPEN)
        assert report.open == (() if forged else ("waits for a worker to start it",))

    asyncio.run(scenario())


def test_a_store_with_runs_that_wait_for_a_worker_gets_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", "the secret of these tests, long enough")
    file, key = tmp_path / "runs.db", tmp_path / "key.pem"
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    async def scenario() -> str:
        async with SqliteStore(file) as store:
            return await submit(store, Recorded(), KEYS, GIVEN)  # type: ignore[arg-type]

    run_id = asyncio.run(scenario())
    signed = CliRunner().invoke(app, ["checkpoint", "--key", str(key), "--store", str(file)])
    assert (signed.exit_code, "date" in signed.stdout) == (0, True)
    verified = CliRunner().invoke(app, ["verify", "--store", str(file)])
    assert (verified.exit_code, verified.stdout) == (
        4,
        f"{run_id}  good, open (0 records); waits for a worker to start it\n",
    )


def test_the_same_idempotency_key_is_the_same_run_of_that_agent() -> None:
    async def scenario() -> None:
        runs, waker = MemoryStore(), Recorded()
        submitted = Runs(runs, secret=b"the secret of these tests, long enough", waker=waker)  # type: ignore[arg-type]
        first, second = [await submitted.submit("support", "Ship.", idempotency_key="7") for _ in range(2)]
        other = await submitted.submit("billing", "Ship.", idempotency_key="7")
        assert first == second != other
        assert [each.run_id for each, _ in waker.woken] == [first, other]
        assert await submitted.count() == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["memory", "file", "server"])
def test_a_run_in_no_queue_ends_when_it_is_cancelled_and_is_not_begun_later(
    where: str, tmp_path: Path, database: str
) -> None:
    """As after the loss of the engine's database."""
    empty_database(database)
    urls = {"file": f"sqlite:///{tmp_path}/runs.db", "server": database}

    async def scenario() -> None:
        waker = Recorded()
        async with open_store(urls[where]) if where in urls else nullcontext(MemoryStore()) as store:
            runs = Runs(store, secret=SECRET, waker=waker)  # type: ignore[arg-type]
            queued = await runs.submit("support", "Ship.")
            await runs.cancel(queued)
            assert (await runs.get(queued)).info.status == "suspended"  # a worker acts on it
            run_id = await runs.submit("support", "Ship.", idempotency_key="7")
            late, _ = waker.woken.pop()
            await runs.cancel(run_id, "no longer needed", by="ann")
            info = (await runs.get(run_id)).info
            assert (info.status, info.ending, info.waiting_for) == ("finished", "cancelled", None)
            assert [each.run_id for each in (await runs.list(RunQuery(ending="cancelled"))).runs] == [run_id]
            assert (await runs.verify(run_id)).code == GOOD
            assert [each.run_id for each in await store.signals.pending()] == [queued]
            agent = Agent(ScriptedModel([]), host=Host(store=store, secret=SECRET))
            for late_call in (runs.cancel(run_id), runs.answer(run_id, "Go."), agent.resume(run_id).load()):
                with pytest.raises(RunEndedError, match="has ended"):
                    await late_call
            assert await runs.submit("support", "Ship.", idempotency_key="7") == run_id
            assert [each.run_id for each, _ in waker.woken] == [queued]
            worker = Worker({"support": Agent(ScriptedModel([]))}, store, waker, secret=SECRET)  # type: ignore[arg-type]
            assert await worker._deliver(late) == "outdated"  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(StaleLease, match="finished"):
                await Agent(ScriptedModel([]), host=Host(store=store, secret=SECRET)).run("Ship.", run_id=run_id)
            with pytest.raises(JournalError, match="empty"):
                await runs.diagram(run_id)
            assert (await Runs(store, secret=SECRET).purge([run_id])).purged == (run_id,)

    asyncio.run(scenario())


def test_a_run_is_not_listed_if_the_engine_cannot_be_reached_that_would_start_it() -> None:
    async def scenario() -> int:
        runs = Runs(MemoryStore(), secret=b"the secret of these tests, long enough", waker=Away())  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="queues"):
            await runs.submit("support", "Ship.")
        return await runs.count()

    assert asyncio.run(scenario()) == 0


@pytest.mark.parametrize("wrong", [{"priority": 1001}, {"delay_s": -1.0}, {"delay_s": float("inf")}])
def test_a_wrong_priority_or_delay_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RunError, match="priority"):
        asyncio.run(submit(MemoryStore(), Recorded(), KEYS, GIVEN, **wrong))  # type: ignore[arg-type]


def test_runs_without_a_waker_or_a_secret_submit_nothing() -> None:
    with pytest.raises(ConfigurationError, match="waker"):
        asyncio.run(Runs(MemoryStore(), secret=b"s" * 32).submit("support", "Ship."))
    with pytest.raises(ConfigurationError, match="secret"):
        asyncio.run(Runs(MemoryStore(), waker=Recorded()).submit("support", "Ship."))  # type: ignore[arg-type]


def test_a_run_that_waits_for_a_worker_is_listed_without_the_secrets_of_the_host() -> None:
    async def scenario() -> None:
        async with MemoryStore() as store:
            runs = Runs(
                store,
                secret=b"the secret of these tests, long enough",
                waker=Recorded(),  # type: ignore[arg-type]  # as much of it as is used
                secrets=[SecretStr("the code is 4711")],
            )
            await runs.submit("support", "Open it: the code is 4711.", metadata={"note": "the code is 4711", "n": 7})
            (info,) = (await runs.list()).runs
            assert info.prompt == "Open it: **********."
            assert info.metadata == {"note": "**********", "n": "7"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("python", "sqlite", "refused"),
    [((3, 12), (3, 41, 9), True), ((3, 12), (3, 42, 0), False), ((3, 11), (3, 40, 1), False)],
)
def test_a_sqlite_that_the_queue_cannot_use_is_refused_before_a_file_is_made(
    python: tuple[int, ...],
    sqlite: tuple[int, ...],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("dbos", reason="dbos is not installed")
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", sqlite)
    monkeypatch.setattr(sqlite3, "sqlite_version", ".".join(map(str, sqlite)))
    if refused:
        with pytest.raises(ConfigurationError, match=r"SQLite 3\.42 or newer, and this Python has 3\.41\.9"):
            open_waker(tmp_path / "runs.db")
    else:
        asyncio.run(open_waker(tmp_path / "runs.db").aclose())
    assert list(tmp_path.iterdir()) == ([] if refused else [tmp_path / "runs.db.queue"])
