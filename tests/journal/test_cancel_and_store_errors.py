"""A cancelled run records its cancellation; a run whose store fails stops, and can be resumed."""

import asyncio

import pytest

from agentfsm import (
    Agent,
    Host,
    MemoryStore,
    RunCancelled,
    SqliteStore,
    StaleLease,
    StoreError,
    StoreFullError,
    hand_over,
    tool,
)
from agentfsm.journal.fork import fork
from agentfsm.journal.redact import redact
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import sample_agent
from tests.helpers.scenarios import await_run

OURS = Keyring(b"of the tests")


class Failing(MemoryStore):
    """A store that has no room for its n-th append, and then for none."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def append(self, lease, records, status, info=None, snapshot=None):
        self.left -= 1
        if self.left < 0:
            done = asyncio.get_running_loop().create_future()
            done.set_exception(StoreFullError("there is no room"))
            return done
        return super().append(lease, records, status, info, snapshot)


@pytest.mark.parametrize("at", range(4))
def test_a_store_error_stops_a_run_before_its_next_effect_and_it_can_be_resumed(at):
    store, done = Failing(at), []

    @tool
    async def act() -> str:
        """Act."""
        done.append(1)
        return "acted"

    def agent(script):
        return Agent(ScriptedModel(script), tools=[act], host=Host(clock=FakeClock(), store=store))

    async def live():
        run = agent([call("act"), "done"]).run("go", run_id="r")
        with pytest.raises(StoreFullError):
            await run
        assert not run.finished  # nobody was told of an end that is not kept
        with pytest.raises(StoreFullError):
            await run
        assert len(done) == (1 if at > 1 else 0)
        store.left = 99
        if not await store.records("r"):
            return await agent([call("act"), "done"]).run("go", run_id="r")
        (again,) = await agent(
            [call("act"), "done"][min(len(rehydrate(await store.records("r")).run.messages), 2) // 2 :]
        ).unfinished_runs()
        return await again

    if at == 2:  # the call has run, and nobody could write down that it had: a person is asked
        result = asyncio.run(live())
        assert result.outcome.kind == "in_doubt"
        return
    result = asyncio.run(live())
    if at == 3:
        assert result.output in ("done", None)
    assert len(done) <= 1
    assert rehydrate(asyncio.run(store.records("r"))).run.messages == result.messages


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancellation_at_any_point_is_in_the_journal(waits):
    store = MemoryStore()
    running = []

    @tool
    async def stop_it() -> str:
        """Stop the run."""
        running[0].cancel("enough")
        if waits:
            await asyncio.sleep(5)
        return "stopped"

    async def live():
        agent = Agent(ScriptedModel([call("stop_it"), "x"]), tools=[stop_it], host=Host(store=store))
        running.append(agent.run("go", run_id="r"))
        return await running[0]

    result = asyncio.run(live())
    assert isinstance(result.outcome, RunCancelled)
    rows = asyncio.run(store.records("r"))
    assert dump_state(rehydrate(rows).run) == dump_state(result.run_state)
    assert verify("r", rows, asyncio.run(store.head("r"))).code == GOOD
    assert ('"cancel":{' in rows[-2].body) == (not waits)


def test_a_run_whose_task_is_cancelled_is_recorded_to_its_end():
    store = MemoryStore()

    async def live():
        inside = asyncio.Event()

        @tool
        async def wait() -> str:
            """Wait."""
            inside.set()
            await asyncio.Event().wait()
            return ""

        agent = Agent(ScriptedModel([call("wait")]), tools=[wait], host=Host(store=store))
        task = asyncio.ensure_future(await_run(agent.run("go", run_id="r")))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(live())
    head = asyncio.run(store.head("r"))
    assert (head.status, head.owner) == ("finished", None)
    assert verify("r", asyncio.run(store.records("r")), head).code == GOOD


def test_a_run_that_another_owner_acquired_writes_nothing_more():
    store = MemoryStore()

    async def live():
        @tool
        async def lose() -> str:
            """Lose the run to somebody else, as after a long sleep of the machine."""
            kept = store._runs["r"]
            kept.lease = None
            running.append(await store.acquire("r", "somebody else"))
            return "lost"

        running: list = []
        agent = Agent(ScriptedModel([call("lose"), "x"]), tools=[lose], host=Host(store=store))
        with pytest.raises(StaleLease, match="somebody else"):
            await agent.run("go", run_id="r")
        return len(await store.records("r"))

    assert asyncio.run(live()) == 6  # up to the intent of the call


@pytest.mark.parametrize("parallel", [False, True])
def test_a_run_that_was_handed_over_during_a_call_makes_no_other_call_and_another_process_continues_it(
    parallel, tmp_path
):
    def agent(store, calls, done):
        @tool(idempotent=True, parallel=parallel)
        async def look() -> str:
            """Look."""
            done.append("look")
            await held.wait()
            return "seen"

        @tool
        async def pay() -> str:
            """Pay."""
            done.append("pay")
            return "paid"

        return Agent(ScriptedModel(calls), tools=[look, pay], host=Host(store=store, secret=b"of the tests"))

    async def live():
        async with SqliteStore(tmp_path / "runs.db") as store:
            here, there = [], []
            run = agent(store, [call("look"), call("pay"), "done"], here).run("go", run_id="r")
            awaiting = asyncio.create_task(await_run(run))
            while not here:
                await asyncio.sleep(0)
            await hand_over(run)
            await hand_over(run)  # once more changes nothing
            held.set()
            with pytest.raises(StaleLease, match="run 'r' was handed over"):
                await awaiting
            with pytest.raises(StaleLease, match="run 'r' was handed over"):
                await run
            assert (here, run.finished) == (["look"], False)
            (again,) = await agent(store, [call("pay"), "done"], there).unfinished_runs()
            assert (await again).output == "done"
            assert there == ["look", "pay"]
            assert verify("r", await store.records("r"), await store.head("r")).code == GOOD

    held = asyncio.Event()
    asyncio.run(live())


def test_a_task_that_is_cancelled_after_its_run_was_handed_over_ends_as_cancelled_and_the_run_does_not():
    async def live():
        @tool(idempotent=True)
        async def look() -> str:
            """Look."""
            begun.set()
            await asyncio.Event().wait()

        begun, store = asyncio.Event(), MemoryStore()
        run = Agent(ScriptedModel([call("look")]), tools=[look], host=Host(store=store)).run("go", run_id="r")
        awaiting = asyncio.create_task(await_run(run))
        await begun.wait()
        await hand_over(run)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        head = await store.head("r")
        assert (run.finished, head.status, head.owner) == (False, "running", None)

    asyncio.run(live())


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_handed_over_before_it_has_begun_does_nothing(begun):
    class Slow(MemoryStore):
        async def acquire(self, *arguments, **options):
            acquiring.set()
            await go_on.wait()
            return await super().acquire(*arguments, **options)

    async def live():
        store = Slow()
        model = ScriptedModel(["done"])
        run = Agent(model, host=Host(store=store)).run("go", run_id="r")
        awaiting = asyncio.create_task(await_run(run))
        while begun and not acquiring.is_set():
            await asyncio.sleep(0)
        await hand_over(run)
        go_on.set()
        with pytest.raises(StaleLease, match="run 'r' was handed over"):
            await awaiting
        assert (model.calls, [(head.owner, head.seq) for head in await store.heads()]) == (0, [(None, 0)] * begun)
        assert (await Agent(model, host=Host(store=store)).run("go", run_id="r")).output == "done"

    acquiring, go_on = asyncio.Event(), asyncio.Event()
    asyncio.run(live())


def test_a_run_that_has_ended_is_not_changed_by_handing_it_over():
    async def live():
        store = MemoryStore()
        run = Agent(ScriptedModel(["done"]), host=Host(store=store)).run("go", run_id="r")
        assert (await run).output == "done"
        await hand_over(run)
        assert (await run).output == "done"

    asyncio.run(live())


def test_a_second_run_with_the_same_id_is_refused():
    store = MemoryStore()

    async def live():
        await sample_agent(store, ["a"]).run("go", run_id="r")
        with pytest.raises(StoreError, match="'r' exists already"):
            await sample_agent(store, ["a"]).run("go", run_id="r")

    asyncio.run(live())


def test_a_fork_that_failed_for_lack_of_space_can_be_repeated():
    store = Failing(99)

    async def live():
        await sample_agent(store, ["a"]).run("go", run_id="r")
        store.left = 0
        with pytest.raises(StoreFullError) as failed:
            await fork(store, "r", 2, "other", OURS)
        store.left = 99
        await fork(store, "r", 2, "other", OURS)  # though somebody still holds the error, and so all that it came from
        return failed

    asyncio.run(live())
    head = asyncio.run(store.head("other"))
    assert (head.status, head.owner, head.seq) == ("running", None, 1)


def test_a_redaction_that_failed_for_lack_of_space_can_be_repeated():
    store = Failing(99)

    async def live():
        await sample_agent(store, ["a"]).run("go", run_id="r")
        store.left = 0
        with pytest.raises(StoreFullError) as failed:
            await redact(store, "r", "1", OURS)
        store.left = 99
        assert await redact(store, "r", "1", OURS) > 0  # though somebody still holds the error
        return failed

    asyncio.run(live())
    head = asyncio.run(store.head("r"))
    assert (head.status, head.owner) == ("finished", None)
