"""Workers on a real Restate server: what is delivered once, delayed, set aside, and taken over from the dead."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfsm import Allow, Runs, StoreError, open_store
from agentfsm.journal.verification import GOOD
from agentfsm.workers.waker import Activation
from tests.helpers.child_process import child_environment
from tests.helpers.ports import own_port
from tests.helpers.postgres import new_database, shared_server
from tests.helpers.restate_server import RestateServer, running_restate

pytest.importorskip("restate", reason="restate-sdk is not installed")

from agentfsm.workers.restate_waker import RestateWaker  # needs restate-sdk

pytestmark = pytest.mark.servers

SECRET = b"the secret of all of these processes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestateServer]:
    with running_restate(tmp_path_factory.mktemp("restate")) as started:
        yield started


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with shared_server() as postgres:
        yield new_database(postgres)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What a condition returns as soon as that is true."""
    async with asyncio.timeout(60):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found


class Handled:
    """What was delivered, each of which waits until it may end.

    Attributes:
        aside: Why what was not put back is set aside; empty to set nothing aside.
    """

    def __init__(self, waker: RestateWaker) -> None:
        self._waker = waker
        self.keys: list[str] = []
        self.may_end = asyncio.Event()
        self.aside = ""

    async def deliver(self, activation: Activation) -> str:
        self.keys.append(activation.key)
        if self.aside and not await self._waker.was_put_back(activation):
            await self._waker.set_aside(activation, self.aside, 7.0)
        await self.may_end.wait()
        return "done"

    async def until(self, count: int) -> None:
        await until(lambda: asyncio.sleep(0, len(self.keys) >= count))


@asynccontextmanager
async def serving(server: RestateServer, *queues: str, **options: Any) -> AsyncIterator[tuple[RestateWaker, Handled]]:
    """A waker that serves some queues."""
    waker = RestateWaker(server.ingress, server.admin, endpoint=f"http://127.0.0.1:{own_port()}", **options)
    handled = Handled(waker)
    try:
        await waker.serve(queues, handled.deliver)
        yield waker, handled
        handled.may_end.set()

        async def is_idle() -> bool:  # what the server has just delivered does not count as begun for a moment
            return all(due > time.time() for due in (await waker.due(prefix="")).values())

        await until(is_idle)  # what the server has not heard the end of, it delivers to whoever serves next
    finally:
        handled.may_end.set()
        await waker.stop(1)
        await waker.aclose()


def test_an_activation_is_queued_once_until_it_was_handled(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "once") as (waker, handled):
            activation = Activation("it's 100%", 0, "once", request="sealed", tenant="acme")
            assert await waker.wake(activation)
            await handled.until(1)
            assert not await waker.wake(activation)  # it is being handled
            assert await waker.due(prefix="it's 100%:") == {activation.key: 0}
            (delivered,) = await waker.unfinished(0)
            assert (delivered.activation, delivered.deliveries) == (activation, 1)
            assert await waker.unfinished(3600) == []
            handled.may_end.set()

            async def is_finished() -> bool:
                return not await waker.due([activation.key])

            await until(is_finished)
            assert await waker.wake(activation)  # it was handled
            await handled.until(2)
            assert handled.keys == ["it's 100%:0"] * 2

    asyncio.run(scenario())


def test_a_delayed_activation_waits_and_is_brought_forward(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "clerk@1", "clerk@2") as (waker, handled):
            later, timer = Activation("r", 3, "clerk@1"), Activation("r", 3, "clerk@1", is_timer=True)
            assert await waker.wake(timer, delay_s=7200)
            assert await waker.wake(later, delay_s=7200)
            hours = (await waker.due(["r:3"]))["r:3"]
            assert set(await waker.due(prefix="r:3")) == {"r:3", "r:3:due"}
            assert not await waker.wake(later, delay_s=9000)  # which is later still
            assert await waker.due(["r:3", "nobody:3"]) == {"r:3": hours}
            assert not await waker.wake(later, delay_s=3600)
            assert (await waker.due(["r:3"]))["r:3"] < hours - 3000
            assert await waker.wake(Activation("r", 3, "clerk@2"), delay_s=3600)  # moved to another version's queue
            assert handled.keys == []
            assert await waker.unfinished(0) == []
            await waker.bring_forward("r:3")
            await waker.bring_forward("nobody:3")
            await handled.until(1)
            (delivered,) = await waker.unfinished(0)
            assert delivered.activation == Activation("r", 3, "clerk@2")
            assert (await waker.due([timer.key]))[timer.key] > hours - 60
            await waker.drop(timer)
            assert await waker.due([timer.key]) == {}

    asyncio.run(scenario())


def test_what_is_set_aside_is_not_delivered_until_it_is_put_back(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "aside") as (waker, handled):
            activation, handled.aside = Activation("poor", 1, "aside"), "it kills its workers"
            handled.may_end.set()
            assert await waker.wake(activation)
            (aside,) = await until(waker.list_set_aside)
            assert await waker.list_set_aside([aside.activation.key]) == [aside]
            assert await waker.list_set_aside([f"{aside.activation.key}:due"]) == []
            assert (aside.activation, aside.reason, aside.until) == (activation, "it kills its workers", 7.0)
            assert not await waker.wake(activation)
            assert await waker.due(prefix="poor:") == {}
            assert await waker.unfinished(0) == []
            await waker.drop(activation)  # which is for the unfinished
            assert await waker.put_back("poor")
            await handled.until(2)

            async def is_gone() -> bool:
                return await waker.list_set_aside() == []

            await until(is_gone)
            assert not await waker.put_back("poor")

    asyncio.run(scenario())


def test_what_another_process_holds_is_set_aside_or_delivered_again(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "held") as (waker, handled):
            other = RestateWaker(server.ingress, server.admin)
            held, poor = Activation("held", 1, "held"), Activation("poor", 1, "held")
            assert await waker.wake(held)
            assert await other.wake(poor)
            await handled.until(2)
            await other.redeliver(held, 3600)  # not that old
            await other.redeliver(held, 0)
            await other.set_aside(poor, "nobody can handle it")
            await handled.until(3)
            assert handled.keys.count("held:1") == 2
            (aside,) = await until(other.list_set_aside)
            assert (aside.activation, aside.reason, aside.until) == (poor, "nobody can handle it", None)
            assert [each.activation for each in await other.unfinished(0)] == [held]
            handled.may_end.set()
            assert await other.put_back("poor")
            await handled.until(4)
            await other.aclose()

    asyncio.run(scenario())


def test_a_worker_handles_so_many_activations_at_a_time(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "busy", concurrency=2) as (waker, handled):
            for number in range(4):
                assert await waker.wake(Activation(f"busy{number}", 0, "busy"))
            await handled.until(2)

            async def are_there() -> bool:
                return len([each for each in await waker._restate.find("busy") if each.status == "running"]) == 4

            await until(are_there)
            assert len(handled.keys) == 2
            assert len(await waker.unfinished(0)) == 2  # the others wait for their turn
            handled.may_end.set()
            await handled.until(4)

    asyncio.run(scenario())


class SentTwice(httpx.AsyncHTTPTransport):
    """Sends each activation twice, as whatever lies between does that has not heard the first answer."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/activate/send"):
            first = await super().handle_async_request(request)
            assert json.loads(await first.aread())["status"] == "Accepted"
            await first.aclose()
        return await super().handle_async_request(request)


def test_an_activation_whose_request_was_sent_twice_was_queued_by_it(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "twice") as (waker, handled):
            await waker._restate.client.aclose()
            waker._restate.client = httpx.AsyncClient(transport=SentTwice())
            activation = Activation("r", 0, "twice")
            assert await waker.wake(activation)
            assert not await waker.wake(activation)
            await handled.until(1)
            handled.may_end.set()
        assert handled.keys == ["r:0"]

    asyncio.run(scenario())


def test_of_two_processes_that_queue_an_activation_at_once_one_has_queued_it(server: RestateServer) -> None:
    async def scenario() -> None:
        async with serving(server, "both") as (waker, handled):
            other = RestateWaker(server.ingress, server.admin)
            for number in range(20):
                activation = Activation(f"r{number}", 0, "both")
                assert sorted(await asyncio.gather(waker.wake(activation), other.wake(activation))) == [False, True]
            handled.may_end.set()
            await handled.until(20)
            await other.aclose()
        assert len(set(handled.keys)) == len(handled.keys) == 20

    asyncio.run(scenario())


def test_a_server_or_a_queue_that_does_not_exist_is_a_clear_error(server: RestateServer) -> None:
    async def scenario() -> None:
        waker = RestateWaker(server.ingress, server.admin)
        with pytest.raises(StoreError, match=r"404.*agentfsm.nobody.40x1.*not found"):
            await waker.wake(Activation("r", 0, "nobody@x1"))
        await waker.aclose()
        waker = RestateWaker("http://127.0.0.1:1", "http://127.0.0.1:1")
        with pytest.raises(StoreError, match=r"cannot be reached at http://127.0.0.1:1/query: ConnectError"):
            await waker.due(["r"])
        await waker.aclose()

    asyncio.run(scenario())


class Workers:
    """Worker processes that share a store and an address."""

    def __init__(self, url: str, server: RestateServer, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.calls, self.hold = folder / "calls", folder / "hold"
        self.calls.touch()
        self._where = (url, server.ingress, server.admin, f"http://127.0.0.1:{own_port()}")
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, *names: str) -> subprocess.Popen[bytes]:
        """A worker that serves agents of the app."""
        env = child_environment() | {"AGENTFSM_SECRET": SECRET.decode(), "WORKER_FOLDER": str(self.folder)}
        command = [sys.executable, "-m", "tests.helpers.restate_worker", *self._where, *names]
        self._children.append(subprocess.Popen(command, env=env))
        return self._children[-1]

    def inside(self) -> list[int]:
        """The processes that called the tool, in the order of the calls."""
        return [int(line) for line in self.calls.read_text().split()]

    def close(self) -> None:
        """Kill those that are left."""
        self.hold.unlink(missing_ok=True)
        for child in self._children:
            child.kill()
            child.wait()


@pytest.fixture
def workers(url: str, server: RestateServer, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(url, server, tmp_path)
    yield started
    started.close()


@asynccontextmanager
async def opened(url: str, server: RestateServer) -> AsyncIterator[tuple[Runs, RestateWaker]]:
    """The runs of a store, for a process that only submits and looks."""
    waker = RestateWaker(server.ingress, server.admin)
    async with open_store(url) as store:
        yield Runs(store, secret=SECRET, waker=waker), waker
    await waker.aclose()


async def submit(runs: Runs, agent: str, prompt: str) -> str:
    """Submit a run, as soon as a worker has served its agent."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await runs.submit(agent, prompt, idempotency_key=prompt)
            except StoreError:
                await asyncio.sleep(0.1)


async def finished(runs: Runs, run_id: str) -> None:
    """Wait until a run has completed, and verify it."""

    async def has_finished() -> bool:
        return (await runs.get(run_id)).info.status == "finished"

    await until(has_finished)
    assert (await runs.get(run_id)).info.ending == "completed"
    assert (await runs.verify(run_id)).code == GOOD


def test_a_run_whose_worker_is_killed_is_finished_by_another_one(workers: Workers, server: RestateServer) -> None:
    async def scenario() -> None:
        async with opened(workers.url, server) as (runs, waker):
            workers.hold.touch()
            children = {child.pid: child for child in (workers.start("support") for _ in range(2))}
            run_id = await submit(runs, "support", "Ship three orders.")
            (first,) = await until(lambda: asyncio.sleep(0, workers.inside()))
            workers.hold.unlink()
            children.pop(first).kill()
            await finished(runs, run_id)
            assert workers.inside() == [first, *[*children] * 3]  # the call that was cut off is idempotent

            async def is_settled() -> bool:
                return await waker.unfinished(0) == []

            await until(is_settled)  # the activation of the dead worker, too

    asyncio.run(scenario())


def test_runs_are_answered_handed_over_and_finished_without_a_repeated_call(
    workers: Workers, server: RestateServer
) -> None:
    async def scenario() -> None:
        async with opened(workers.url, server) as (runs, _):
            workers.hold.touch()
            first = workers.start("support", "cashier")
            run_id = await submit(runs, "support", "Ship three others.")
            await until(lambda: asyncio.sleep(0, workers.inside()))
            first.send_signal(signal.SIGTERM)
            second = workers.start("support", "cashier")
            workers.hold.unlink()
            assert await asyncio.to_thread(first.wait, 30) == 0
            await finished(runs, run_id)
            assert workers.inside() in ([first.pid, *[second.pid] * 2], [first.pid] * 3)
            asked = await submit(runs, "cashier", "Refund order 0.")

            async def request() -> Any:
                return (await runs.get(asked)).request

            await runs.answer(asked, Allow(), by="Ann", to=(await until(request)).digest)
            await finished(runs, asked)

    asyncio.run(scenario())


def test_a_run_that_kills_its_workers_is_set_aside(workers: Workers, server: RestateServer) -> None:
    async def scenario() -> None:
        async with opened(workers.url, server) as (runs, waker):
            child = workers.start("crasher")
            run_id = await submit(runs, "crasher", "Crash.")
            assert await asyncio.to_thread(child.wait, 60) == 9
            assert await asyncio.to_thread(workers.start("crasher").wait, 60) == 9
            workers.start("crasher")
            (aside,) = await until(waker.list_set_aside)
            assert (aside.activation.run_id, len(workers.inside())) == (run_id, 2)
            assert "cut off 2 times" in aside.reason

    asyncio.run(scenario())
