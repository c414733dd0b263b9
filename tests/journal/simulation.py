"""A whole small world by seed: several runs, a store with latency, crashes, a full disk, clocks that jump.

No thread and no real time: the same seed gives the same history. A *life* is an event loop that is dropped in
the middle of whatever it does, as a killed process would be; what its store had not made durable by then is
lost, or, as with a commit whose answer never came, is not. The model of what must come of each run is its
uninterrupted life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentfsm import Agent, AgentGuardrails, Host, MemoryStore, RunError, StoreFullError, UserInputRequested
from agentfsm.core.presets import PRESETS
from agentfsm.journal.replay import replay
from agentfsm.journal.restore import restore
from agentfsm.journal.verify import GOOD, verify
from agentfsm.testing import FakeClock
from tests.journal import crashes

SCENARIOS = [name for name in crashes.SCENARIOS if name not in ("question", "limit", "race", "fork")]


GRAVE: list[Any] = []
"""Tasks of processes that died: were they collected, their ``finally`` would run, as it does in no dead process."""


class Crash(Exception):
    """The process dies here."""


async def dying(doing: Any) -> Any:
    """Await something; where the process dies in it, nothing comes behind, ever."""
    try:
        return await doing
    except Crash:
        loop = asyncio.get_running_loop()
        loop.stop()
        await loop.create_future()


class Mortal:
    """A model in whose calls the process may die."""

    def __init__(self, model: Any) -> None:
        self.model, self.name = model, model.name

    async def reply(self, request: Any) -> Any:
        return await dying(self.model.reply(request))


class SlowStore(MemoryStore):
    """A store whose appends take a while, may find no room, and are lost or not when the process dies."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(0)
        self.no_room = 0.0
        self.queue: list[tuple[Any, ...]] = []

    def append(self, lease: Any, rows: Sequence[Any], status: Any) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.queue.append((lease, tuple(rows), status, done))
        self._later(loop, self.draw.randrange(3))
        return done

    def _later(self, loop: asyncio.AbstractEventLoop, ticks: int) -> None:
        loop.call_soon(self._later, loop, ticks - 1) if ticks else loop.call_soon(self._first)

    def _first(self) -> None:
        lease, rows, status, done = self.queue.pop(0)
        try:
            if self.draw.random() < self.no_room:
                raise StoreFullError("there is no room")
            self._append(lease, rows, status)
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    def die(self) -> None:
        """The process is gone: a part of what was on its way, in order, is there all the same."""
        for lease, rows, status, _ in self.queue[: self.draw.randrange(len(self.queue) + 1)]:
            self._append(lease, rows, status)
        self.queue = []
        for kept in self._runs.values():
            kept.lease = None


class World(crashes.World):
    """The world of one run, in memory."""

    def __init__(self, draw: random.Random, deadly: float) -> None:
        self.draw, self.deadly = draw, deadly
        self.files: dict[str, list[str]] = {}

    def passing(self, where: str) -> None:
        if self.draw.random() < self.deadly:
            raise Crash(where)

    def write(self, name: str, line: str) -> None:
        self.files.setdefault(name, []).append(line)

    def lines(self, name: str) -> list[str]:
        return self.files.get(name, [])


def an_agent(world: World, scenario: str, store: Any, clock: FakeClock) -> Agent:
    preset, script = crashes.SCENARIOS[scenario]
    limits = AgentGuardrails(loop_soft_threshold=19, max_execution_time_s=10**9, stall_threshold_s=10**9)
    tools = [_without_threads(t) for t in crashes.tools(world)]
    host = Host(clock=clock, store=store, secret=b"of the tests")
    return Agent(Mortal(crashes.ByTranscript(world, script)), tools=tools, preset=preset, guardrails=limits, host=host)


def _without_threads(each: Any) -> Any:
    async def call(context: Any, arguments: Any) -> Any:
        await asyncio.sleep(0)
        came = each.function(context, **arguments)
        return await came if each.is_async else came

    async def function(context: Any, **arguments: Any) -> Any:
        return await dying(call(context, arguments))

    return dataclasses.replace(each, function=function, is_async=True)


async def go_on(world: World, scenario: str, store: SlowStore, clock: FakeClock, run_id: str) -> None:
    """Begin a run or take it up, and go on to its end, as often as there is no room."""
    for _ in range(50):
        try:
            await _once(world, scenario, store, clock, run_id)
        except StoreFullError:
            await asyncio.sleep(0)
            continue
        return


async def _once(world: World, scenario: str, store: SlowStore, clock: FakeClock, run_id: str) -> None:
    agent = an_agent(world, scenario, store, clock)
    while True:
        head = store.head(run_id)
        if head is None or not head.seq:
            result = await agent.run("go", run_id=run_id)
        elif head.status == "running":
            result = await agent.resume(run_id)
        elif head.status == "suspended":
            waits = restore(store.rows(run_id)).run.waiting
            asked: Any = dataclasses.make_dataclass("Asked", ["kind", "tool", "arguments"])
            waiting = asked(waits.kind, waits.tool, waits.arguments)
            result = await agent.resume(run_id, crashes.answer(world, run_id, waiting))
        else:
            return
        if not isinstance(result.outcome, UserInputRequested):
            return


def end_of(rows: Sequence[Any], scenario: str, run_id: str, store: MemoryStore) -> tuple[Any, ...]:
    past = restore(rows)
    told = verify(run_id, rows, store.head(run_id))
    assert told.code == GOOD, told
    assert replay(rows, PRESETS[crashes.SCENARIOS[scenario][0]].graph).same
    return [str(m) for m in past.run.messages], past.run.answer or past.run.ending_value, past.finished


def expected(scenario: str) -> tuple[Any, ...]:
    """The end of the uninterrupted life."""
    if scenario not in _EXPECTED:
        store, world = SlowStore(), World(random.Random(0), 0.0)
        asyncio.run(go_on(world, scenario, store, FakeClock(), "r"))
        _EXPECTED[scenario] = end_of(store.rows("r"), scenario, "r", store)
    return _EXPECTED[scenario]


_EXPECTED: dict[str, tuple[Any, ...]] = {}


def simulate(seed: int) -> Counter[str]:
    """One history; what happened in it.

    Raises:
        AssertionError: A promise was broken; the message begins with the seed.
    """
    draw = random.Random(seed)
    store, told = SlowStore(), Counter[str]()
    store.draw, store.no_room = draw, draw.choice((0.0, 0.0, 0.05))
    deadly = draw.choice((0.0, 0.02, 0.1))
    runs = {f"run{n}": (draw.choice(SCENARIOS), World(draw, deadly)) for n in range(draw.randint(1, 3))}
    clock = FakeClock()
    for life in range(40):
        clock.jump(draw.choice((0, 0, 7200, -7200)))
        if life == 39:
            for _, world in runs.values():
                world.deadly = 0.0
            store.no_room = 0.0
        if _live(runs, store, clock):
            break
        told["crashes"] += 1
        store.die()
    for run_id, (scenario, world) in runs.items():
        try:
            assert end_of(store.rows(run_id), scenario, run_id, store) == expected(scenario)
            done = Counter(tuple(line.split('", "')[:2]) for line in world.lines("effects"))
            for (name, key), times in done.items():
                idempotent = name[2:] in crashes.IDEMPOTENT
                assert times == 1 or idempotent, f"{name} {key} ran {times} times"
        except (AssertionError, RunError) as error:
            raise AssertionError(f"seed {seed}: {run_id} ({scenario}): {error}") from error
        told["runs"] += 1
        told["doubts"] += sum('"dispatch_tool.in_doubt"' in r.body for r in store.rows(run_id))
    return told


def _live(runs: dict[str, tuple[str, World]], store: SlowStore, clock: FakeClock) -> bool:
    """One life of the process; whether it came to its end."""
    loop = asyncio.new_event_loop()
    try:
        tasks = [loop.create_task(go_on(world, what, store, clock, name)) for name, (what, world) in runs.items()]
        try:
            loop.run_until_complete(asyncio.wait(tasks))
        except RuntimeError as error:
            if "stopped" not in str(error):
                raise
            for task in asyncio.all_tasks(loop) | set(tasks):
                task._log_destroy_pending = False  # they are dropped on purpose
                task.done() and not task.cancelled() and task.exception()
                GRAVE.append(task)
            return False
        for task in tasks:
            task.result()
        return True
    finally:
        loop.close()
