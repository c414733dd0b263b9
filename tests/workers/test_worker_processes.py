"""Real ``agentfsm worker`` processes on a real PostgreSQL server: submitted, killed, stopped, deployed, answered."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentfsm import Agent, Allow, ConfigurationError, Host, Runs, StoreError, open_store
from agentfsm.cli.app import run_app
from agentfsm.journal.run_info import WaitingFor
from agentfsm.journal.store_url import store_url
from agentfsm.journal.verification import GOOD
from agentfsm.runtime.run import advance, hand_over
from agentfsm.testing import ScriptedModel
from agentfsm.viewer.viewer_context import SetAsideRuns
from agentfsm.workers import Activation, Waker, Worker, open_waker
from tests.helpers.child_process import child_environment
from tests.helpers.postgres import CuttingProxy, new_database, shared_server
from tests.helpers.webhook_receiver import Receiver, receiving
from tests.helpers.worker_app import support

pytest.importorskip("dbos", reason="dbos is not installed")
psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

SECRET = b"the secret of all of these processes"
APP = "tests.helpers.worker_app"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with shared_server() as server:
        yield new_database(server)


class Processes:
    """Worker processes that share a store."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.calls = folder / "calls"
        self.hold = folder / "hold"
        self.calls.touch()
        self._children: list[subprocess.Popen[str]] = []

    def start(self, *agents: str, **environment: str) -> subprocess.Popen[str]:
        """A worker that serves agents of the app."""
        env = child_environment() | {
            "AGENTFSM_SECRET": SECRET.decode(),
            "WORKER_FOLDER": str(self.folder),
            **environment,
        }
        command = [sys.executable, "-m", "agentfsm", "worker", "--store", self.url, "--grace", "20", *agents]
        child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self._children.append(child)
        return child

    def inside(self) -> list[int]:
        """The processes that called the tool, in the order of the calls."""
        return [int(line) for line in self.calls.read_text().split()]

    def close(self) -> None:
        """Kill those that are left."""
        self.hold.unlink(missing_ok=True)
        for child in self._children:
            child.kill()
            child.communicate(timeout=30)


@pytest.fixture
def processes(url: str, tmp_path: Path) -> Iterator[Processes]:
    started = Processes(url, tmp_path)
    yield started
    started.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Runs, Waker]]:
    """The runs of a store, for a process that only submits and looks."""
    waker = open_waker(url)
    try:
        async with open_store(url) as store:
            yield Runs(store, secret=SECRET, waker=waker), waker
    finally:
        await waker.aclose()


async def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What a condition returns as soon as that is true."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        found = await found if asyncio.iscoroutine(found) else found
        if found:
            return found
        assert time.monotonic() < end, "nothing happened"
        await asyncio.sleep(0.05)


async def until_status(runs: Runs, run_id: str, status: str) -> None:
    async def reached() -> bool:
        return (await runs.get(run_id)).info.status == status

    await until(reached)


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_is_finished_by_another_one(processes: Processes) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, waker):
            processes.hold.touch()
            children = {child.pid: child for child in (processes.start(f"{APP}:support") for _ in range(2))}
            run_id = await runs.submit("support", "Ship three orders.", idempotency_key="three", tags=["tenant:acme"])
            again = await runs.submit("support", "Ship three orders.", idempotency_key="three", tags=["tenant:acme"])
            assert again == run_id
            (first,) = await until(processes.inside)
            children[first].kill()
            children[first].wait()
            processes.hold.unlink()
            await until_status(runs, run_id, "finished")
            assert (await runs.verify(run_id)).code == GOOD
            info = (await runs.get(run_id)).info
            assert (info.ending, info.tags) == ("completed", ("tenant:acme", "agent:support"))
            others = processes.inside()[1:]
            assert len(others) == 3  # the call that was cut off is repeated: it is idempotent
            assert first not in others

            async def settled() -> bool:
                return await waker.unfinished(0) == []

            await until(settled)  # the activation of the dead worker, too

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_whose_connections_are_cut_ends_its_run_and_takes_the_next_one(processes: Processes) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, waker):
            processes.hold.touch()
            processes.start(f"{APP}:support")
            first = await runs.submit("support", "Ship three orders.")
            await until(processes.inside)
            with psycopg.connect(processes.url, autocommit=True) as db:
                cut = db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dbos_transact'"
                ).fetchall()
            assert cut
            processes.hold.unlink()
            for run_id in (first, await runs.submit("support", "Ship three more.")):
                await until_status(runs, run_id, "finished")
                assert (await runs.verify(run_id)).code == GOOD

            async def settled() -> bool:
                return await waker.unfinished(0) == []

            await until(settled)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_with_a_wrong_secret_or_none_ends_with_an_error_that_says_which_one_it_needs(
    tmp_path: Path,
) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as (runs, waker):
            run_id = await runs.submit("support", "Ship three orders.")
            for secret, said in (("of another system entirely", "could continue none"), ("", "no secret here")):
                child = started.start(f"{APP}:support", AGENTFSM_SECRET=secret, XDG_DATA_HOME=str(tmp_path / "data"))
                _, error = child.communicate(timeout=60)
                assert (child.returncode, said in error, "AGENTFSM_SECRET" in error) == (2, True, True), error
            assert (await waker.list_set_aside(), await waker.unfinished(0)) == ([], [])
            assert (await runs.get(run_id)).info.status == "suspended"

    with shared_server() as server:
        started = Processes(new_database(server), tmp_path)
        try:
            asyncio.run(scenario(started.url))
        finally:
            started.close()


@pytest.mark.parametrize("ahead_s", [-100.0, 100.0])
def test_a_worker_whose_clock_is_wrong_starts_no_delayed_run_and_lets_no_request_expire_early(
    ahead_s: float, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time

    async def scenario() -> None:
        async with opened(url) as (runs, waker):
            run_id = await runs.submit("support", "Ship three orders.", delay_s=50)
            monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
            async with open_store(url) as store:
                with pytest.raises(
                    ConfigurationError,
                    match=rf"^clock: .* is \{'-' if ahead_s > 0 else '+'}(99|100)\.\d s from the one here: set",
                ):
                    await Worker({"support": support}, store, waker, secret=SECRET).run()
            monkeypatch.undo()
            assert (await runs.get(run_id)).info.status == "suspended"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_finishes_its_call_and_hands_the_run_over(processes: Processes) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.hold.touch()
            first = processes.start(f"{APP}:support")
            run_id = await runs.submit("support", "Ship three orders.")
            await until(processes.inside)
            first.send_signal(signal.SIGTERM)
            assert first.stderr is not None
            await until(lambda: "stopping" in first.stderr.readline())
            processes.hold.unlink()
            assert await asyncio.to_thread(first.wait, 30) == 0
            info = (await runs.get(run_id)).info
            assert (info.status, info.owner) == ("running", None)
            second = processes.start(f"{APP}:support")
            await until_status(runs, run_id, "finished")
            assert processes.inside() == [first.pid, second.pid, second.pid]  # no call was repeated
            assert (await runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_call_that_outlasts_the_grace_period_is_cut_off_as_by_a_crash_and_does_not_end_its_run(
    processes: Processes,
) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.hold.touch()
            first = processes.start(f"{APP}:support", "--grace", "1")
            run_id = await runs.submit("support", "Ship three orders.")
            await until(processes.inside)
            first.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(first.wait, 30) == 1
            info = (await runs.get(run_id)).info
            assert (info.status, info.ending) == ("running", "")
            processes.hold.unlink()
            second = processes.start(f"{APP}:support")
            await until_status(runs, run_id, "finished")
            assert (await runs.get(run_id)).info.ending == "completed"
            assert processes.inside() == [first.pid, *[second.pid] * 3]  # the call that was cut off is repeated
            assert (await runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_ends_with_an_error_when_a_later_release_migrates_its_store_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    async def scenario(started: Processes) -> None:
        started.hold.touch()
        async with opened(started.url) as (runs, _):
            run_id = await runs.submit("support", "Ship three orders.")
            earlier = started.start(f"{APP}:support")
            await until(started.inside)
            with psycopg.connect(started.url, autocommit=True) as db:
                db.execute("UPDATE agentfsm.version SET number = number + 1")
                started.hold.unlink()
                _, said = await asyncio.to_thread(earlier.communicate, timeout=60)
                assert (earlier.returncode, "install a newer one" in said.splitlines()[-1]) == (2, True), said
                assert db.execute("SELECT run_id, owner FROM agentfsm.run").fetchall() == [(run_id, None)]
                db.execute("UPDATE agentfsm.version SET number = number - 1")  # so that this release is the later one
            started.start(f"{APP}:support")
            await until_status(runs, run_id, "finished")
            assert (await runs.verify(run_id)).code == GOOD

    with shared_server() as server:
        started = Processes(new_database(server), tmp_path)
        try:
            asyncio.run(scenario(started))
        finally:
            started.close()


@pytest.fixture
def proxy(processes: Processes) -> Iterator[CuttingProxy]:
    """What stands between the server and the workers of ``cut_off``."""
    proxy = CuttingProxy(processes.url)
    yield proxy
    proxy.is_frozen = False
    proxy.close()


@pytest.fixture
def cut_off(processes: Processes, proxy: CuttingProxy) -> Iterator[Processes]:
    """Workers that reach the server through a proxy only."""
    cut_off = Processes(f"{proxy.url}&wait_s=3600", processes.folder)
    yield cut_off
    cut_off.close()


@pytest.mark.slow
def test_a_worker_ends_after_its_grace_period_while_the_server_is_away_and_another_one_goes_on(
    processes: Processes, proxy: CuttingProxy, cut_off: Processes
) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.hold.touch()
            first = cut_off.start(f"{APP}:support", "--grace", "0")
            run_ids = [await runs.submit("support", "Ship three orders.") for _ in range(3)]
            await until(lambda: len(processes.inside()) == 3)
            proxy.is_away = True
            processes.hold.unlink()  # so the runs wait for the server
            assert first.stderr is not None
            await until(lambda: "cannot be reached" in first.stderr.readline())
            first.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(first.communicate, timeout=60)
            assert (first.returncode, "(3 in all) were not handed over in time" in said) == (1, True), said
            processes.start(f"{APP}:support")
            for run_id in run_ids:
                await until_status(runs, run_id, "finished")
                assert (await runs.get(run_id)).info.ending == "completed"
                assert (await runs.verify(run_id)).code == GOOD
            assert processes.inside()[:3] == [first.pid] * 3
            assert len(processes.inside()) == 12  # the calls whose results were not stored are repeated

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_ends_after_its_grace_period_while_the_server_does_not_answer(
    processes: Processes, proxy: CuttingProxy, cut_off: Processes
) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.hold.touch()
            busy = cut_off.start(f"{APP}:support", "--grace", "0")
            run_ids = [await runs.submit("support", "Ship three orders.") for _ in range(2)]
            await until(lambda: len(processes.inside()) == 2)
            proxy.is_frozen = True
            starts = cut_off.start(f"{APP}:support", "--grace", "0", "--health-port", "0")
            processes.hold.unlink()
            assert starts.stderr is not None
            await until(lambda: "health" in starts.stderr.readline())  # so it can be told to stop
            for child in (busy, starts):
                child.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(busy.communicate, timeout=20)
            assert (busy.returncode, "(2 in all) were not handed over in time" in said) == (1, True), said
            assert await asyncio.to_thread(starts.wait, 20) == 1
            proxy.is_frozen = False  # what the dead worker had sent arrives, and its sessions end
            processes.start(f"{APP}:support")
            for run_id in run_ids:
                await until_status(runs, run_id, "finished")
                assert (await runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_run_of_a_newer_version_waits_for_a_worker_that_has_its_tools(processes: Processes) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.hold.touch()
            newer = processes.start(f"support={APP}:support_by_air")
            run_id = await runs.submit("support", "Ship three orders.")
            await until(processes.inside)
            older = processes.start(f"{APP}:support")
            newer.kill()
            newer.wait()
            processes.hold.unlink()
            other = await runs.submit("support", "Ship three more.")
            await until_status(runs, other, "finished")  # so the older one works
            assert older.stderr is not None
            waits = f"run {run_id}, and others like it, waits for a worker"
            await until(lambda: waits in (said := older.stderr.readline()) and "lacks the tool 'ship_by_air'" in said)
            assert (await runs.get(run_id)).info.status == "running"
            newest = processes.start(f"support={APP}:support_by_air")
            await until_status(runs, run_id, "finished")
            assert processes.inside() == [newer.pid, *[older.pid] * 3, *[newest.pid] * 3]

    asyncio.run(scenario())


@pytest.mark.slow
def test_answers_cancellations_and_expiries_need_no_process_that_holds_the_run(processes: Processes) -> None:
    async def scenario() -> None:
        async with opened(processes.url) as (runs, _):
            processes.start(f"{APP}:cashier", f"{APP}:hasty")
            answered = await runs.submit("cashier", "Refund order 0.")
            expired = await runs.submit("hasty", "Refund order 0.")
            queued = await runs.submit("cashier", "Refund order 1.", delay_s=3600)
            assert (await runs.get(queued)).info.waiting_for == WaitingFor("worker")
            await runs.cancel(queued, "no longer needed")

            async def asked() -> Any:
                return (await runs.get(answered)).request

            request = await until(asked)
            await runs.answer(answered, Allow(), by="Ann", to=request.digest)
            for run_id, ending in ((answered, "completed"), (queued, "cancelled"), (expired, "cancelled")):
                await until_status(runs, run_id, "finished")
                assert (await runs.get(run_id)).info.ending == ending
                assert (await runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_run_that_kills_its_workers_is_set_aside_and_can_be_put_back(
    processes: Processes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> str:
        async with opened(processes.url) as (runs, waker):
            run_id = await runs.submit("crasher", "Crash.")
            command = (f"{APP}:crasher", "--max-attempts", "2")
            for attempt in (1, 2):
                child = processes.start(*command)
                assert await asyncio.to_thread(child.wait, 60) == 9, attempt
            processes.start(*command)
            (aside,) = await until(waker.list_set_aside)
            assert (aside.activation.run_id, len(processes.inside())) == (run_id, 2)
            assert "cut off 2 times" in aside.reason
            return run_id

    run_id = asyncio.run(scenario())
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    for arguments in (["--set-aside"], ["--put-back", run_id[:8]], ["--set-aside"]):
        assert run_app(["worker", *arguments, "--store", processes.url]) == 0
    listed, _, empty = capsys.readouterr().out.partition("\n")
    assert (run_id in listed, "cut off 2 times" in listed, empty) == (True, True, "")
    assert run_app(["worker", "--put-back", run_id, "--store", processes.url]) == 2
    assert f"no run that is set aside begins with {run_id!r}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_role_without_rights_to_the_queues_is_told_how_it_gets_them(url: str) -> None:
    role = f"agent_role_{uuid.uuid4().hex[:8]}"
    database = url.replace("postgres:@", f"{role}@")
    asyncio.run(due(url))  # creates the tables, as whoever owns them does
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(StoreError, match=r"permission denied.*dbos migrate -s URL --schema agentfsm_dbos -r ROLE$"):
        asyncio.run(due(database))
    command = [Path(sys.executable).with_name("dbos"), "migrate", "-s", url, "--schema", "agentfsm_dbos", "-r", role]
    subprocess.run(command, check=True, capture_output=True)
    assert asyncio.run(due(database)) == {}


def test_whoever_gets_no_connection_is_told_what_to_do(url: str) -> None:
    role = f"crowded_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
    crowded = url.replace("postgres:@", f"{role}@")
    with pytest.raises(StoreError, match=r"too many connections.*; raise max_connections, or put a pooler in between$"):
        asyncio.run(due(crowded))

    async def reads() -> None:
        async with open_store(crowded) as store:
            await store.heads()

    with pytest.raises(StoreError, match=r"too many connections.*; raise max_connections, or put a pooler in between$"):
        asyncio.run(reads())


@pytest.mark.parametrize("form", ["{url}&password=hunter22", "{server}&password=hunter22&dbname={name}"])
def test_the_queues_are_found_however_a_url_names_their_database_and_no_log_has_its_password(
    form: str, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG", logger="dbos")  # a worker in this process made it quiet
    monkeypatch.setattr(logging.getLogger("dbos"), "propagate", True)
    name = urlsplit(url).path.removeprefix("/")
    asyncio.run(due(form.format(url=url, server=url.replace(f"/{name}?", "/?"), name=name)))
    assert "Initializing DBOS" in caplog.text
    assert "hunter22" not in caplog.text


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("postgres://ann@a:1,b:2/shop?wait_s=3", "postgresql://ann@/shop?host=a%2Cb&port=1%2C2&client_encoding=UTF8"),
        ("postgresql://ann@a,b/s?port=5", "postgresql://ann@/s?host=a%2Cb&port=5%2C5&client_encoding=UTF8"),
        ("postgresql://ann:p%40w@db", "postgresql://ann:p%40w@/ann?host=db&client_encoding=UTF8"),
    ],
)
def test_the_engine_gets_each_part_of_a_url_where_it_looks_for_it(
    url: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentfsm.workers.dbos_database import queue_database

    monkeypatch.delenv("PGDATABASE", raising=False)
    assert queue_database(url, None) == f"{database}&plugin=agentfsm"
    monkeypatch.setenv("PGDATABASE", "usual")
    assert queue_database("postgresql://ann@db", None).startswith("postgresql://ann@/usual?")


@pytest.mark.slow
def test_the_commands_find_what_is_set_aside_on_a_server_and_make_no_queues_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shared_server() as server:
        database = new_database(server)
    role = f"agent_role_{uuid.uuid4().hex[:8]}"
    other = database.replace("postgres:@", f"{role}@")

    async def cut_off() -> None:
        async with open_store(database) as store:
            run = Agent(ScriptedModel(["Hello."]), host=Host(store=store, secret=SECRET)).run("Hello?", run_id="r")
            await advance(run)
            await hand_over(run)

    async def set_aside() -> None:
        async with opened(database) as (_, waker):
            await waker.wake(Activation("r", 1, "support@1"))
            await waker.set_aside(Activation("r", 1, "support@1"), "it kills its workers")

    async def seen_by_viewer() -> str:
        async with open_store(database) as store:
            found = await SetAsideRuns(store_url(store), store).find((await Runs(store).list()).runs)
        return found["r"].reason

    def listed(at: str) -> tuple[str, str]:
        assert run_app(["runs", "--store", at]) == 0
        printed = capsys.readouterr()
        return printed.out.rstrip().rpartition("  ")[2], printed.err

    asyncio.run(cut_off())
    assert listed(database) == ("interrupted", "")
    with psycopg.connect(database, autocommit=True) as db:
        assert db.execute("SELECT to_regnamespace('agentfsm_dbos')").fetchone() == (None,)
        asyncio.run(set_aside())
        expected = "set aside: it kills its workers; to try it again: agentfsm worker --put-back r"
        assert listed(database) == (expected, "")
        assert asyncio.run(seen_by_viewer()) == "it kills its workers"
        db.execute(f"CREATE ROLE {role} LOGIN")
        db.execute(f"GRANT USAGE ON SCHEMA agentfsm TO {role}")
        db.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA agentfsm TO {role}")
    doing, said = listed(other)
    assert doing == "interrupted"
    assert said.startswith("agentfsm: it is not known which runs are set aside: ")
    assert "permission denied" in said


async def due(url: str) -> dict[str, float]:
    waker = open_waker(url)
    try:
        return await waker.due(["no run"])
    finally:
        await waker.aclose()


@pytest.mark.slow
def test_a_notice_that_a_killed_worker_could_not_send_is_sent_by_another_one(processes: Processes) -> None:
    async def scenario(receiver: Receiver) -> None:
        receiver.answers = [(503, {})]
        command = (f"{APP}:cashier", "--notify-url", receiver.url)
        async with opened(processes.url) as (runs, waker):
            first = processes.start(*command)
            run_id = await runs.submit("cashier", "Refund order 0.")
            await until(lambda: waker.due([f"{run_id}:2:notice-2"]))
            first.kill()
            said = first.communicate()[1]
            assert "answered 503" in said
            assert "key=abc" not in said  # of the URL
            processes.start(*command)
            await until(lambda: len(receiver.got) > 1)
            (refused, sent) = receiver.got
            assert refused[0]["webhook-id"] == sent[0]["webhook-id"]
            assert json.loads(sent[1])["run_id"] == run_id

    with receiving() as receiver:
        asyncio.run(scenario(receiver))
