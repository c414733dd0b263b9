"""A worker in this process, on SQLite and DBOS: its health, what it sets aside, delays and settings."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import SecretStr

import agentfsm.workers
from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    ConfigurationError,
    Host,
    MemoryStore,
    RunContext,
    Runs,
    SqliteStore,
    UserInputRequested,
    open_store,
    tool,
)
from agentfsm.agent.config import with_host
from agentfsm.cli.app import app, run_app
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.verification import GOOD
from agentfsm.loop.keys import Keyring
from agentfsm.runtime.run import advance, hand_over
from agentfsm.testing import FakeClock, ScriptedModel, call
from agentfsm.workers import StartRate, Worker, WorkerMetrics, WorkerSettings, open_waker, run_watcher
from agentfsm.workers.health import serve_health
from agentfsm.workers.spend_limits import SpendLimits
from agentfsm.workers.waker import Activation, QueueSettings, Waker
from tests.helpers.child_process import child_environment
from tests.helpers.set_aside_runs import SECRET, cut_off_often, set_aside

pytest.importorskip("dbos", reason="dbos is not installed")
pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42), reason="DBOS needs SQLite 3.42 or newer"
)

OTHER_SECRET = b"the secret of another process, long enough"
START_OF_2100 = 4_102_444_800.0


@asynccontextmanager
async def working(
    folder: Path, secret: bytes = SECRET, old_secrets: tuple[bytes, ...] = (), **agents: Agent[Any, Any]
) -> AsyncIterator[tuple[Runs, Worker, Waker]]:
    """A worker at work, and the runs of its store for a process that has the secret of all."""
    file = folder / "runs.db"
    waker = open_waker(file)
    async with open_store(file) as store:
        worker = Worker(agents, store, waker, secret=secret, old_secrets=old_secrets)
        task = asyncio.create_task(worker.run())
        try:
            yield Runs(store, secret=SECRET, waker=waker), worker, waker
        finally:
            worker.stop()
            await task
            await waker.aclose()


async def until(condition: Callable[[], Any]) -> Any:
    """What an async condition returns as soon as that is true."""
    async with asyncio.timeout(60):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found


async def get(port: int, request: str) -> tuple[str, Any]:
    """The status line and the JSON of a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.splitlines()[0], json.loads(body) if body else None


def test_a_worker_says_whether_it_is_healthy_and_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            working(tmp_path, support=Agent(ScriptedModel(["Hello."]))) as (runs, worker, _),
            serve_health(worker, "127.0.0.1", 0) as port,
        ):

            async def is_ready() -> bool:
                return "200 OK" in (await get(port, "GET /ready HTTP/1.1\r\n\r\n"))[0]

            await until(is_ready)
            run_id = await runs.submit("support", "Say hello.")

            async def is_handled() -> bool:
                return "finished" in worker.counts.handled

            await until(is_handled)
            assert (await runs.get(run_id)).info.ending == "completed"
            status, said = await get(port, "GET /health HTTP/1.1\r\n\r\n")
            assert status == "HTTP/1.1 200 OK"
            assert (said["active"], said["handled"]) == (0, {"finished": 1})
            assert said["queues"][0] == f"support:{Keyring(SECRET).current.key_id}"
            assert (await get(port, "GET /other HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
            assert (await get(port, "POST /health HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 405 Method Not Allowed"
            assert (await get(port, "HEAD /health HTTP/1.1\r\n\r\n")) == ("HTTP/1.1 200 OK", None)
            many_headers = "x: y\r\n" * 200_000  # which are still on their way when the path is known
            assert (await get(port, f"GET /health HTTP/1.1\r\n{many_headers}\r\n"))[0] == "HTTP/1.1 200 OK"
            worker.stop()
            status, said = await get(port, "GET /ready HTTP/1.1\r\n\r\n")
            assert (status, said["ready"]) == ("HTTP/1.1 503 Service Unavailable", False)

    asyncio.run(scenario())


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_a_worker_that_is_cancelled_as_by_ctrl_c_hands_its_runs_over_like_one_that_is_stopped(
    grace_s: float, tmp_path: Path
) -> None:
    begun, held = asyncio.Event(), asyncio.Event()

    @tool(idempotent=True)
    async def ship() -> str:
        """Ship it."""
        begun.set()
        await held.wait()
        return "shipped"

    agent = Agent(ScriptedModel([call("ship"), "Shipped."]), tools=[ship])

    async def scenario() -> str:
        waker = open_waker(tmp_path / "runs.db")
        async with open_store(tmp_path / "runs.db") as store:
            runs = Runs(store, secret=SECRET, waker=waker)
            settings = WorkerSettings(grace_s=grace_s)
            task = asyncio.create_task(Worker({"support": agent}, store, waker, secret=SECRET, settings=settings).run())
            run_id = await runs.submit("support", "Ship it.")
            await begun.wait()
            task.cancel()  # as asyncio.run does to its coroutine at Ctrl-C
            if grace_s:
                held.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await waker.aclose()
            return run_id

    async def place(run_id: str) -> tuple[str, str | None]:
        async with open_store(tmp_path / "runs.db") as store:
            info = (await Runs(store).get(run_id)).info
            return info.status, info.owner

    run_id = asyncio.run(scenario())  # what is left in its event loop is cancelled with it
    assert asyncio.run(place(run_id)) == ("running", None)


async def finished(runs: Runs, run_id: str) -> bool:
    return (await runs.get(run_id)).info.status == "finished"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def test_the_command_line_says_that_edited_arguments_were_refused_by_the_worker(tmp_path: Path) -> None:
    file, script = tmp_path / "runs.db", [call("pay", amount=5), "Paid."]
    environment = child_environment() | {"AGENTFSM_SECRET": SECRET.decode()}

    def answer(reply: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "agentfsm", "answer", run_id, reply, "--by", "Ann", "--store", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    async def scenario() -> None:
        nonlocal run_id
        async with working(tmp_path, support=Agent(ScriptedModel(script), tools=[pay])) as (runs, _, _):
            run_id = await runs.submit("support", "Pay.")

            async def asks() -> bool:
                return (await runs.get(run_id)).request is not None

            await until(asks)
            code, said = await asyncio.to_thread(answer, '{"amount": "much"}')
            assert (code, "the last answer (edit) by Ann" in said, "not valid for 'pay'" in said) == (2, True, True)
            assert "not valid for 'pay'" in (await runs.get(run_id)).refused
            code, said = await asyncio.to_thread(answer, '{"amount": 7}')
            assert (code, "was answered" in said) == (0, True), said
            await until(lambda: finished(runs, run_id))

    run_id = ""
    asyncio.run(scenario())


def test_a_run_that_another_process_submits_to_the_worker_of_a_file_is_listed_and_can_be_cancelled(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "agentfsm", "submit", "support", "Later.", "--delay", "3600", "--key", "k"]
    environment = child_environment() | {"AGENTFSM_SECRET": SECRET.decode()}

    def submit() -> str:
        given = [*command, "--store", str(tmp_path / "runs.db")]
        return subprocess.run(given, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    async def scenario() -> None:
        async with working(tmp_path, support=Agent(ScriptedModel(["Hello."]))) as (runs, _, _):
            first = await runs.submit("support", "Now.")
            await until(lambda: finished(runs, first))  # so the worker is the one who writes the file
            run_id = await asyncio.to_thread(submit)
            info = (await runs.list()).runs[0]
            assert (info.run_id, info.status, info.prompt) == (run_id, "suspended", "Later.")
            assert info.waiting_for is not None
            assert info.waiting_for.kind == "worker"
            assert await asyncio.to_thread(submit) == run_id
            await runs.cancel(run_id, "no longer needed")
            await until(lambda: finished(runs, run_id))
            assert (await runs.get(run_id)).info.ending == "cancelled"

    asyncio.run(scenario())


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_without_the_secret_of_the_runs_does_not_start_and_says_why(begun: bool, tmp_path: Path) -> None:
    file, agent = tmp_path / "runs.db", Agent(ScriptedModel(["Hello."]))
    wrong, right = (Keyring(secret).current.key_id for secret in (OTHER_SECRET, SECRET))

    async def scenario() -> None:
        waker = open_waker(file)
        async with open_store(file) as store:
            run_id = await Runs(store, secret=SECRET, waker=waker).submit("support", "Say hello.")
            if begun:
                mine = agent.with_config(with_host(agent.config, Host(store=store, secret=SECRET)))
                run = mine.run("Say hello.", run_id=run_id, tags=["agent:support"])
                await run.load()
                await advance(run)
                await hand_over(run)
            with pytest.raises(ConfigurationError) as refused:
                await Worker({"support": agent}, store, waker, secret=OTHER_SECRET).run()
            assert all(each in str(refused.value) for each in (wrong, right, "AGENTFSM_SECRET", "AGENTFSM_OLD_SECRETS"))
            assert (await waker.list_set_aside(), await waker.unfinished(0)) == ([], [])
        await waker.aclose()
        async with working(tmp_path, support=agent) as (runs, _, _):
            await until(lambda: finished(runs, run_id))

    asyncio.run(scenario())


def test_runs_that_come_under_another_secret_are_left_to_workers_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_watcher, "WAITING_EVERY_S", 0.05)

    async def scenario() -> None:
        agent = Agent(ScriptedModel(["Hello."]))
        async with working(tmp_path, OTHER_SECRET, support=agent) as (runs, worker, waker):
            await until(lambda: asyncio.sleep(0, worker.ready))
            run_id = await runs.submit("support", "Say hello.")
            said = f"runs such as {run_id} (1 in all) were written under another secret"
            await until(lambda: asyncio.sleep(0, said in caplog.text))
            assert (await waker.list_set_aside(), worker.counts.handled) == ([], {})
        assert caplog.text.count(said) == 1
        async with working(tmp_path, support=agent) as (runs, _, _):
            await until(lambda: finished(runs, run_id))

    asyncio.run(scenario())


@pytest.mark.parametrize(("until", "waited_s"), [(None, 0), (9e9, 10)], ids=["for good", "for a while"])
def test_a_run_that_is_set_aside_for_good_is_waited_for_no_longer(
    until: float | None, waited_s: int, tmp_path: Path
) -> None:
    set_aside(tmp_path, "r", until=until)

    async def scenario() -> None:
        waker, clock = open_waker(tmp_path / "runs.db"), FakeClock()
        async with open_store(tmp_path / "runs.db") as store:
            runs = Runs(store, secret=SECRET, waker=waker)
            runs._host = replace(runs._host, clock=clock)  # pyright: ignore[reportPrivateUsage]
            aside = (await runs.get("r", wait_s=10)).set_aside
            assert aside is not None
            assert (aside.reason, aside.until, sum(clock.slept)) == ("it kills its workers", until, waited_s)
        await waker.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["deps_factory", "instructions"])
def test_the_reason_for_which_a_run_is_set_aside_and_its_log_have_no_secret_that_is_known(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOP_URL", "postgresql://shop:hunter2-hunter2@db/shop")

    of_host = "correct-horse-battery"

    def failing(_: object) -> Any:
        raise LookupError(f"{os.environ['SHOP_URL']} with {of_host} cannot be reached")

    host = Host(secrets=[SecretStr(of_host)])
    agent: Agent[Any, Any] = Agent(ScriptedModel(["Hello."]), host=host, **{kind: failing})  # type: ignore[arg-type]

    async def scenario() -> str:
        async with working(tmp_path, support=agent) as (runs, _, waker):
            await runs.submit("support", "Say hello.")
            (aside,) = await until(waker.list_set_aside)
            return str(aside.reason)

    reason = asyncio.run(scenario())
    assert "LookupError: postgresql://shop:[withheld]@db/shop with [withheld] cannot be reached" in reason
    assert reason in caplog.text
    assert "hunter2" not in caplog.text
    assert of_host not in caplog.text


def test_a_run_that_cannot_begin_is_set_aside_with_its_reason_and_begins_once_it_is_put_back(tmp_path: Path) -> None:
    broken = [True]

    def deps(context: RunContext) -> dict[str, Any]:
        if broken:
            raise OSError("the directory is away")
        return dict(context.metadata)

    agent = Agent(ScriptedModel(["Hello."]), deps_type=dict, deps_factory=deps)

    async def scenario() -> None:
        async with working(tmp_path, support=agent) as (runs, _, waker):
            run_id = await runs.submit("support", "Say hello.", metadata={"order": 7})
            (aside,) = await until(waker.list_set_aside)
            assert aside.activation.run_id == run_id
            assert aside.reason
            assert not await waker.wake(aside.activation)  # it stays aside, whoever asks
            broken.clear()
            assert await waker.put_back(run_id)

            async def is_finished() -> bool:
                return (await runs.get(run_id)).info.status == "finished"

            await until(is_finished)
            assert await waker.list_set_aside() == []
            assert not await waker.put_back(run_id)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_ends_a_run_that_is_in_no_queue_when_it_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path, support=Agent(ScriptedModel([]))) as (runs, _, waker):
            run_id = await runs.submit("support", "Say hello.", delay_s=3600)
            await waker.drop(Activation(run_id, 0, ""))
            async with open_store(tmp_path / "runs.db") as store:
                await Runs(store, secret=SECRET).cancel(run_id)

            async def is_finished() -> bool:
                return (await runs.get(run_id)).info.ending == "cancelled"

            await until(is_finished)
            assert (await runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_activation_is_queued_once_brought_forward_and_forgotten_when_it_was_handled(tmp_path: Path) -> None:
    async def scenario() -> None:
        waker = open_waker(tmp_path / "runs.db")
        handled: list[str] = []
        later = Activation("r", 3, "support@1", tenant="acme")
        timer = Activation("r", 3, "support@1", is_timer=True)

        async def deliver(activation: Activation) -> str:
            handled.append(activation.key)
            return "done"

        try:
            assert await waker.wake(later, delay_s=3600)
            assert not await waker.wake(later, delay_s=3600)
            assert await waker.wake(timer, delay_s=3600)
            assert set(await waker.due(prefix="r:")) == {later.key, timer.key}
            assert (set(await waker.due([timer.key, "s:3"])), await waker.due([])) == ({timer.key}, {})
            await waker.serve(["support@1"], deliver)
            await waker.bring_forward(later.key)

            async def is_handled() -> bool:
                return handled == ["r:3"] and not await waker.unfinished(0)

            await until(is_handled)
            assert await waker.wake(later)  # what was handled can be queued again
            await until(lambda: asyncio.sleep(0, len(handled) == 2 or None))
            await waker.forget(0)
            assert handled == ["r:3", "r:3"]
        finally:
            await waker.aclose()

    asyncio.run(scenario())


def test_an_activation_of_a_run_that_was_purged_is_outdated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with working(tmp_path, support=Agent(ScriptedModel([]))) as (_, worker, waker):
            await waker.wake(Activation("purged", 3, worker.queues[-1], is_timer=True))
            await until(lambda: asyncio.sleep(0, worker.counts.handled))
            assert (worker.counts.handled, await waker.list_set_aside()) == ({"outdated": 1}, [])
        assert "purged" not in caplog.text

    asyncio.run(scenario())


@pytest.mark.slow
def test_new_runs_over_the_rate_wait_and_those_that_have_begun_do_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        waker = open_waker(tmp_path / "runs.db", rate=StartRate(2, 3600))
        handled: list[str] = []

        async def deliver(activation: Activation) -> str:
            handled.append(activation.queue)
            return "done"

        try:
            for number in range(4):
                assert await waker.wake(Activation(f"new{number}", 0, "support"))
            await waker.serve(["support", "support@1"], deliver)
            await until(lambda: asyncio.sleep(0, handled.count("support") >= 2))
            for number in range(4):  # each is found by another poll of the queues
                assert await waker.wake(Activation(f"begun{number}", 1, "support@1"))

                async def is_handled(number: int = number) -> bool:
                    return handled.count("support@1") > number

                await until(is_handled)
            assert handled.count("support") == 2
            assert list((await waker.due(prefix="new")).values()) == [0.0, 0.0]  # they still wait
        finally:
            await waker.aclose()

    asyncio.run(scenario())


def test_a_process_polls_queues_less_often_the_more_processes_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.workers.dbos_waker.SHARE_EVERY_S", 0.02)

    async def scenario() -> None:
        waker = open_waker(tmp_path / "runs.db", poll_s=0.25)
        may_end = asyncio.Event()

        async def deliver(activation: Activation) -> str:
            await may_end.wait()
            return "done"

        async def polls() -> list[tuple[str, float]]:
            with closing(sqlite3.connect(tmp_path / "runs.db.queue")) as queues:
                return queues.execute("SELECT name, polling_interval_sec FROM queues ORDER BY name").fetchall()

        try:
            for number in range(6):
                await waker.wake(Activation(f"r{number}", 0, "support"))
            await waker.serve(["other", "support"], deliver)
            assert await polls() == [("other", 0.25), ("support", 0.25)]

            async def are_delivered() -> bool:
                return len(await waker.unfinished(0)) == 6

            await until(are_delivered)
            with closing(sqlite3.connect(tmp_path / "runs.db.queue")) as queues:
                others = "WHERE workflow_uuid != 'r0:0'"
                with queues:  # as if five other processes handled these
                    queues.execute(f"UPDATE workflow_status SET executor_id = workflow_uuid {others}")
                await until(lambda: _is(polls, [("other", 0.75), ("support", 0.75)]))  # six poll as often as two
                with queues:
                    queues.execute(f"UPDATE workflow_status SET status = 'SUCCESS' {others}")
                await until(lambda: _is(polls, [("other", 0.25), ("support", 0.25)]))
        finally:
            may_end.set()
            await waker.aclose()

    asyncio.run(scenario())


async def _is(found: Callable[[], Awaitable[object]], expected: object) -> bool:
    return await found() == expected


@pytest.mark.parametrize(
    ("processes", "shared_s"), [(0, 0.2), (1, 0.2), (2, 0.2), (3, 0.3), (8, 0.8), (16, 1.5), (100, 1.5)]
)
def test_more_than_two_processes_poll_as_often_as_two_but_each_every_one_and_a_half_seconds(
    processes: int, shared_s: float
) -> None:
    assert QueueSettings(poll_s=0.2).shared_poll_s(processes) == pytest.approx(shared_s)
    assert QueueSettings(poll_s=3.0).shared_poll_s(processes) == 3


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"tenant_concurrency": 0}, {"poll_s": 0}, {"poll_s": math.inf}])
def test_a_queue_that_could_not_be_served_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        open_waker(tmp_path / "runs.db", **wrong)
    assert not list(tmp_path.iterdir())


def test_a_second_worker_in_a_process_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    def support(*replies: str) -> Agent[Any, Any]:
        return Agent(ScriptedModel(list(replies)))

    async def scenario() -> None:
        (tmp_path / "other").mkdir()
        other = open_waker(tmp_path / "other" / "runs.db")
        async with (
            working(tmp_path, support=support("one", "two")) as (runs, _, _),
            open_store(tmp_path / "other" / "runs.db") as store,
        ):
            for answer in ("one", "two"):
                run_id = await runs.submit("support", "Go.")
                assert (await runs.get(run_id, wait_s=60)).ledger.answer == answer
                with pytest.raises(ConfigurationError, match="serves in this process already"):
                    await Worker({"support": support("wrong")}, store, other, secret=SECRET).run()
                await other.aclose()

    asyncio.run(scenario())


def test_runs_with_lower_numbers_are_started_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        waker = open_waker(tmp_path / "runs.db", concurrency=1)
        begun: list[int] = []

        async def deliver(activation: Activation) -> str:
            begun.append(activation.priority)
            return "done"

        try:
            for priority in (0, 1000, -1000, 7, -7):
                assert await waker.wake(Activation(f"run{priority}", 0, "support", priority=priority))
            await waker.serve(["support"], deliver)
            await until(lambda: asyncio.sleep(0, len(begun) == 5))
        finally:
            await waker.aclose()
        assert begun == [-1000, -7, 0, 7, 1000]

    asyncio.run(scenario())


def test_a_tenant_has_no_more_runs_at_a_time_than_its_limit_and_others_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        waker = open_waker(tmp_path / "runs.db", tenant_concurrency=1)
        begun, go = list[str](), asyncio.Event()

        async def deliver(activation: Activation) -> str:
            begun.append(activation.run_id)
            if activation.tenant:
                await go.wait()
            return "done"

        try:
            for run_id in ("acme1", "acme2", "other1"):
                assert await waker.wake(Activation(run_id, 0, "support", tenant=run_id[:-1]))
            await waker.serve(["support"], deliver)
            await until(lambda: asyncio.sleep(0, len(begun) >= 2))
            assert await waker.wake(Activation("nobodys", 0, "support"))
            await until(lambda: asyncio.sleep(0, "nobodys" in begun))  # the queue was looked at since
            assert sorted(begun) == ["acme1", "nobodys", "other1"]
            go.set()
            await until(lambda: asyncio.sleep(0, "acme2" in begun))
        finally:
            go.set()
            await waker.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("rate", ["", "5", "5/", "/60", "0/60", "5/0", "-1/60", "5/-1", "x/60", "5/inf", "5/nan"])
def test_a_rate_is_of_runs_in_seconds(rate: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_app(["worker", "shop:support", "--rate", rate, "--store", str(tmp_path / "runs.db")]) == 2
    assert "as in 100/60" in capsys.readouterr().err


def test_a_worker_serves_its_queues_as_its_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text("from agentfsm import Agent\nsupport = Agent('ollama:llama3.2')\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}

    def note(url: str, **settings: Any) -> Waker:
        given.update(settings)
        raise ConfigurationError("that is all that is asked here")

    monkeypatch.setattr("agentfsm.cli.worker_command.open_waker", note)
    options = ["--concurrency", "20", "--tenant-concurrency", "3", "--rate", "100/60", "--poll", "1.5"]
    assert run_app(["worker", "shop:support", *options, "--store", str(tmp_path / "runs.db")]) == 2
    assert given == {"concurrency": 20, "tenant_concurrency": 3, "rate": StartRate(100, 60), "poll_s": 1.5}


def test_a_run_over_a_spend_limit_is_not_started_until_the_limit_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.workers.run_watcher.LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("agentfsm.workers.worker.SPENT_AGAIN_S", 0.1)
    reached = ["tenant:acme cost too much"]

    async def spent(_: SpendLimits, tags: Iterable[str]) -> str:
        return "".join(reached) if "tenant:acme" in tags else ""

    monkeypatch.setattr(SpendLimits, "reached", spent)

    async def scenario() -> None:
        async with working(tmp_path, support=Agent(ScriptedModel(["Hello."] * 2))) as (runs, worker, waker):
            blocked = await runs.submit("support", "Say hello.", tags=["tenant:acme"])

            async def is_aside() -> bool:
                return "set aside" in worker.counts.handled

            await until(is_aside)
            other = await runs.submit("support", "Say hello.", tags=["tenant:other"])
            for run_id in (other, blocked):

                async def is_finished(run_id: str = run_id) -> bool:
                    return (await runs.get(run_id)).info.status == "finished"

                await until(is_finished)
                reached.clear()
            assert await waker.list_set_aside() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["it cannot begin", "it was cut off 6 times in a row at the same point"])
def test_a_run_that_is_set_aside_is_listed_and_shown_as_such_until_it_is_put_back(why: str, tmp_path: Path) -> None:
    def deps(context: RunContext) -> dict[str, Any]:
        raise OSError(why)

    async def scenario() -> str:
        agent = Agent(ScriptedModel([call("look"), "Hello."]), tools=[tool(lambda: "seen", name="look")])
        if "cut off" in why:
            await cut_off_often(tmp_path, agent, "r")
        else:
            agent = Agent(ScriptedModel(["Hello."]), deps_type=dict, deps_factory=deps)
        async with working(tmp_path, support=agent) as (runs, _, waker):
            run_id = "r" if "cut off" in why else await runs.submit("support", "Say hello.")
            await until(waker.list_set_aside)
            return run_id

    run_id = asyncio.run(scenario())
    for words in (["runs"], ["show", run_id]):
        doing, _, aside = command(tmp_path, *words).stdout.partition("\n")[0].partition("  set aside: ")
        assert doing.endswith("interrupted" if "cut off" in why else "waits for a worker")
        assert why in aside
        assert aside.endswith(f"; to try it again: agentfsm worker --put-back {run_id}")

    async def stored() -> Any:
        waker = open_waker(tmp_path / "runs.db")
        async with open_store(tmp_path / "runs.db") as store:
            assert (await Runs(store).get(run_id)).set_aside is None  # nobody can be asked
            found = (await Runs(store, waker=waker).get(run_id)).set_aside
        await waker.aclose()
        return found

    found = asyncio.run(stored())
    assert (found.activation.run_id, why in found.reason, found.until) == (run_id, True, None)
    as_json = json.loads(command(tmp_path, "runs", "--json").stdout)["set_aside"]
    assert (why in as_json["reason"], as_json["until"]) == (True, None)
    command(tmp_path, "worker", "--put-back", run_id)
    assert json.loads(command(tmp_path, "runs", "--json").stdout)["set_aside"] is None
    assert asyncio.run(stored()) is None


@pytest.mark.parametrize("words", [["purge"], ["erase", "--actor", "ann", "--text", "ann@example.org"]])
def test_a_run_that_is_purged_is_no_longer_set_aside_and_its_reason_is_gone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    file = tmp_path / "runs.db"

    async def set_aside_two() -> list[str]:
        waker = open_waker(file)
        async with open_store(file) as store:
            runs = Runs(store, secret=SECRET, waker=waker)
            ids = [await runs.submit("support", "Hello.", actor=Actor(name)) for name in ("ann", "bob")]
            for run_id in ids:
                await waker.set_aside(Activation(run_id, 0, ""), "LookupError: no account of ann@example.org")
        await waker.aclose()
        return ids

    ann, bob = asyncio.run(set_aside_two())
    given = [*words, ann] if words == ["purge"] else words
    done = CliRunner().invoke(app, ["store", *given, "--yes", "--store", str(file)])
    assert f"{ann}  purged" in done.output, done.output
    left = f"remains: {bob} LookupError: no account of ann@example.org (the reason for which it is set aside,"
    assert (left in done.output) == ("erase" in words)
    assert [line.split()[0] for line in command(tmp_path, "worker", "--set-aside").stdout.splitlines()] == [bob]


@pytest.mark.parametrize("words", [["--set-aside"], ["--put-back", "r"]])
def test_looking_for_what_is_set_aside_makes_no_queue(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    missing = CliRunner().invoke(app, ["worker", *words, "--store", str(file)])
    assert (missing.exit_code, "there is no store" in missing.output) == (2, True), missing.output
    command(tmp_path, "store", "init")
    found = CliRunner().invoke(app, ["worker", *words, "--store", str(file)])
    assert (found.exit_code, found.stdout) == (2 if "r" in words else 0, "")
    assert list(tmp_path.glob("*.queue")) == []


@pytest.mark.parametrize("words", [["submit", "support", "Go."], ["worker", "tests.helpers.scale_app:scale"]])
def test_no_queue_is_made_for_a_file_that_is_no_store(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    monkeypatch.setenv("SCALE_FOLDER", str(tmp_path))
    file = tmp_path / "notes.txt"
    file.write_text("These are notes, and no store.")
    assert run_app([*words, "--store", str(file)]) == 2
    assert list(tmp_path.iterdir()) == [file]


def test_an_address_for_health_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["worker", "tests.helpers.worker_app:support", "--store", str(tmp_path / "runs.db")]
        refused = CliRunner().invoke(app, [*words, "--health-port", str(port)])
    assert (refused.exit_code, f"--health-port {port} of 127.0.0.1 cannot be used" in refused.output) == (2, True)


@pytest.mark.parametrize("words", [[], ["shop:support", "--set-aside"], ["--set-aside", "--put-back", "r"]])
def test_the_command_does_one_thing_at_a_time(words: list[str]) -> None:
    refused = CliRunner().invoke(app, ["worker", *words, "--store", "runs.db"])
    assert (refused.exit_code, "give agents to serve" in refused.output) == (2, True), refused.output


def test_a_run_that_is_set_aside_for_a_while_is_listed_with_the_time(tmp_path: Path) -> None:
    set_aside(tmp_path, "r", until=START_OF_2100)
    listed = command(tmp_path, "runs").stdout
    assert listed.endswith("interrupted  set aside until 2100-01-01 00:00:00: it kills its workers\n")


def command(folder: Path, *words: str) -> Result:
    """What a command has printed about the store in a folder."""
    result = CliRunner().invoke(app, [*words, "--store", str(folder / "runs.db")])
    assert result.exit_code == 0, result.output
    return result


def test_only_the_runs_that_are_listed_are_looked_up_in_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentfsm.workers.dbos_waker import DbosWaker

    asked: list[list[str]] = []
    list_set_aside = DbosWaker.list_set_aside

    async def listening(self: DbosWaker, keys: Any = None) -> Any:
        asked.append(keys)
        return await list_set_aside(self, keys)

    monkeypatch.setattr(DbosWaker, "list_set_aside", listening)
    monkeypatch.setattr(agentfsm.workers, "KEYS_AT_ONCE", 2)  # those of one run
    set_aside(tmp_path, "first", "second", "third")
    assert command(tmp_path, "runs", "--limit", "2").stdout.count("set aside: it kills its workers") == 2
    assert asked == [["third:6", "third:6:due"], ["second:6", "second:6:due"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see its last line
def test_runs_are_listed_without_the_extra_of_workers_and_with_queues_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aside(tmp_path, "r")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "dbos", None)
        without.delitem(sys.modules, "agentfsm.workers.dbos_waker")
        listed = command(tmp_path, "runs")
    assert (listed.stdout.rstrip().endswith("interrupted"), listed.stderr) == (True, "")
    (tmp_path / "runs.db.queue").write_bytes(b"not a database" * 1000)
    listed = command(tmp_path, "runs")
    assert listed.stdout.rstrip().endswith("interrupted")
    said, _, more = listed.stderr.partition(": the queues of DBOS cannot be used: ")
    assert (said, more.count("\n")) == ("agentfsm: it is not known which runs are set aside", 1)
    gc.collect()  # SQLAlchemy leaves a connection open to what is no database


def test_listing_runs_makes_no_queue_and_loads_no_engine_for_runs_that_no_worker_has_to_act_on(tmp_path: Path) -> None:
    asyncio.run(cut_off_often(tmp_path, Agent(ScriptedModel(["Hello."])), "cut off"))
    command(tmp_path, "runs")
    assert not (tmp_path / "runs.db.queue").exists()
    (tmp_path / "other").mkdir()
    asyncio.run(with_runs_that_wait_and_ended(tmp_path / "other"))
    words = ["runs", "--store", str(tmp_path / "other" / "runs.db")]
    check = f"import sys; from agentfsm.cli.app import run_app; run_app({words!r}); assert 'dbos' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in listed.splitlines()] == ["suspended", "finished"]


async def with_runs_that_wait_and_ended(folder: Path) -> None:
    """Leave a run that waits for somebody and one that has ended, beside queues."""
    async with open_store(folder / "runs.db") as store:
        agent = Agent(
            ScriptedModel(["Hello.", call("pay", amount=5)]), tools=[pay], host=Host(store=store, secret=SECRET)
        )
        await agent.run("Say hello.")
        assert isinstance((await agent.run("Pay.")).outcome, UserInputRequested)
    waker = open_waker(folder / "runs.db")
    await waker.wake(Activation("other", 0, "support"))
    await waker.aclose()


@pytest.mark.parametrize("why", ["over a spend limit", "cut off too often"])
def test_a_run_that_is_set_aside_ends_when_it_is_cancelled(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reached(_: SpendLimits, tags: Iterable[str]) -> str:
        return "it cost too much"

    monkeypatch.setattr(SpendLimits, "reached", reached)
    agent = Agent(ScriptedModel([call("look"), "Hello."]), tools=[tool(lambda: "seen", name="look")])

    async def scenario() -> None:
        if why == "cut off too often":
            await cut_off_often(tmp_path, agent, "r")
        async with working(tmp_path, support=agent) as (runs, _, waker):
            run_id = "r" if why == "cut off too often" else await runs.submit("support", "Say hello.")
            await until(waker.list_set_aside)
            await runs.cancel(run_id, "no longer needed")

            async def ending() -> str:
                return (await runs.get(run_id)).info.ending

            assert await until(ending) == "cancelled"
            assert await waker.list_set_aside() == []

    asyncio.run(scenario())


@tool(requires_approval=True)
def refund(order: int) -> str:
    """Refund an order."""
    return "refunded"


@tool
def look(place: int) -> str:
    """Look at a place."""
    return "seen"


def test_a_worker_reads_no_more_than_the_first_record_of_a_run_before_it_acts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, read = 200, list[int]()
    looks = [call("look", place=number) for number in range(steps)]
    agent = Agent(
        ScriptedModel([*looks, call("refund", order=7)]),
        tools=[refund, look],
        guardrails=AgentGuardrails(max_iterations=2 * steps),
    )

    async def records(self: SqliteStore, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        found = await all_records(self, run_id, after, limit)
        read.append(len(found))
        return found

    async def scenario() -> None:
        async with open_store(tmp_path / "runs.db") as store:
            mine = agent.with_config(with_host(agent.config, Host(store=store, secret=SECRET)))
            waiting = await mine.run("Refund order 7.")
            assert isinstance(waiting.outcome, UserInputRequested)
        monkeypatch.setattr(SqliteStore, "records", records)
        async with working(tmp_path, support=agent) as (runs, worker, _):
            await runs.cancel(waiting.run_id, "no longer needed")
            await until(lambda: asyncio.sleep(0, worker.counts.handled))

    all_records = SqliteStore.records
    asyncio.run(scenario())
    assert sorted(read)[:-1] == [1] * (len(read) - 1)
    assert max(read) > steps  # the run that is cancelled is verified, once


def test_a_run_that_was_cut_off_and_came_under_another_secret_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(ScriptedModel([call("look", place=1), call("look", place=1), "Done."]), tools=[look])

    async def scenario() -> None:
        async with open_store(tmp_path / "runs.db") as store:
            for run_id, secret in (("own", SECRET), ("foreign", OTHER_SECRET)):  # with one of its own, a worker starts
                run = agent.with_config(with_host(agent.config, Host(store=store, secret=secret))).run(
                    "Look.", run_id=run_id
                )
                await run.step()
                await hand_over(run)
        async with working(tmp_path, support=agent):
            said = "runs such as foreign (1 in all) were written under another secret"
            await until(lambda: asyncio.sleep(0, said in caplog.text))

    asyncio.run(scenario())


def test_a_run_that_began_under_a_secret_that_a_worker_lacks_is_left_to_workers_that_have_it(tmp_path: Path) -> None:
    script = [call("refund", order=7), call("look", place=1), call("look", place=2), "Done."]
    agent = Agent(ScriptedModel(script), tools=[refund, look])

    async def scenario() -> None:
        async with open_store(tmp_path / "runs.db") as store:
            before = Host(store=store, secret=OTHER_SECRET)
            await agent.with_config(with_host(agent.config, before)).run("Refund order 7.", run_id="r")
            after = Host(store=store, secret=SECRET, old_secrets=(OTHER_SECRET,))
            run = agent.with_config(with_host(agent.config, after)).resume("r", Allow())
            await run.step()
            await hand_over(run)
        async with working(tmp_path, support=agent) as (_, worker, waker):
            await until(lambda: asyncio.sleep(0, worker.counts.handled))
            assert worker.counts.handled == {"outdated": 1}
            assert await waker.list_set_aside() == []
        async with working(tmp_path, old_secrets=(OTHER_SECRET,), support=agent) as (runs, _, _):
            await until(lambda: finished(runs, "r"))

    asyncio.run(scenario())


def test_a_request_of_another_program_that_expired_is_found(tmp_path: Path) -> None:
    @tool(requires_approval=Approval(validity_s=0.01))
    def refund(order: int) -> str:
        """Refund an order."""
        return "refunded"

    agent = Agent(ScriptedModel([call("refund", order=7)]), tools=[refund])

    async def scenario() -> None:
        async with open_store(tmp_path / "runs.db") as store:
            mine = agent.with_config(with_host(agent.config, Host(store=store, secret=SECRET)))
            waiting = await mine.run("Refund order 7.")
            assert isinstance(waiting.outcome, UserInputRequested)
        async with working(tmp_path, support=agent) as (runs, _, _):

            async def is_finished() -> bool:
                return (await runs.get(waiting.run_id)).info.status == "finished"

            await until(is_finished)
            assert (await runs.get(waiting.run_id)).info.ending == "cancelled"

    asyncio.run(scenario())


def test_a_worker_tells_opentelemetry_what_it_handles() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    metrics = WorkerMetrics(sdk.MeterProvider([reader]))
    metrics.began("support")
    metrics.began("support")
    metrics.handled("support", "finished", 0.5)
    metrics.found_cut_off("support@1")
    (resource,) = reader.get_metrics_data().resource_metrics
    points = {each.name: each.data.data_points[0] for each in resource.scope_metrics[0].metrics}
    assert points["agentfsm.worker.active"].value == 1
    assert points["agentfsm.worker.activations"].value == 1
    assert points["agentfsm.worker.activations"].attributes == {"queue": "support", "outcome": "finished"}
    assert points["agentfsm.worker.activation.duration"].sum == 0.5
    assert points["agentfsm.worker.cut_off"].attributes == {"queue": "support@1"}


@pytest.mark.parametrize("wrong", [{"sweep_s": 0}, {"settle_s": -1}, {"max_attempts": 0}, {"grace_s": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        WorkerSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [[], [""], ["a:b"], ["a@b"]])
def test_a_worker_needs_agents_with_names_that_queues_can_have(names: list[str], tmp_path: Path) -> None:
    agents = {name: Agent(ScriptedModel([])) for name in names}
    with pytest.raises(ConfigurationError):
        Worker(agents, MemoryStore(), open_waker(tmp_path / "runs.db"), secret=SECRET)
