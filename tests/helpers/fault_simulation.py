"""Deterministic fault simulation by seed: runs, forks, a slow store, crashes, a full disk, clock jumps, graph changes.

Runs get a snapshot wherever they may, and those whose graph stays the same are loaded from it.

Runs are in memory, in a real SQLite file or on a real PostgreSQL server. There is no real time, and nothing that a run
waits for but other runs (``simulated_stores``): the same seed gives the same history in each store. A simulated process
is an event loop that is abandoned at an arbitrary point, like a killed process; what its store had not made durable by
then is lost or, like a commit whose acknowledgement was lost, is not. The expected result of each run is that of the
uninterrupted run, whose side effects are written down by hand in ``SIDE_EFFECTS``.

Run as ``python -m tests.helpers.fault_simulation STORE FIRST COUNT``, where STORE is ``memory``, ``sqlite``, or the URL
of a database on a PostgreSQL server, which loses what it has; prints counts as JSON. A violated invariant ends it, with
the seed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentfsm import (
    Agent,
    AgentGuardrails,
    Graph,
    Host,
    Migration,
    RunError,
    StoreFullError,
    Transition,
    UserInputRequested,
)
from agentfsm.journal.fork import fork
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.store import Head, consistent_read
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.withholding import SecretOpener
from agentfsm.testing import FakeClock
from tests.helpers import journal_scenarios
from tests.helpers.crash_injection import migration_point, use_snapshots
from tests.helpers.read_now import read_at_once
from tests.helpers.simulated_stores import SlowMemoryStore, SlowStore, do_at_once, simulated_store

SECRET = b"of the tests"
KEYRING = Keyring(SECRET)


@dataclasses.dataclass
class Setting:
    """What is the same for all runs.

    Attributes:
        declared: What their hosts declare as secret.
        chatter: A text in their prompt and in each call of a model.
    """

    declared: Sequence[str] = ()
    chatter: str = ""


SETTING = Setting()

SIDE_EFFECTS = {
    "linear": ["once 1", "again 2"],
    "several": ["once 1", "again 2", "once 3"],
    "parallel": ["beside 1", "beside_once 2", "beside 3"],
    "approval": ["careful 1", "careful 9", "again 3"],
    "question": ["once 1"],
    "backoff": ["once 1"],
    "failing": ["flaky 1", "flaky 2"],
    "limit": ["again 1", "again 2", "once 3"],
    "fork": ["once 1", "again 2", "once 3", "again 2", "once 3"],
}
"""The side effects of each finished run. A fork and its parent share the first ones; each has the rest itself."""

ABANDONED: list[Any] = []
"""Tasks of crashed processes: if collected, they would run their ``finally`` blocks, unlike a killed process."""


class Crash(Exception):
    """The simulated process crashes here."""


async def run_until_crash(work: Any) -> Any:
    """Await something; if the process crashes in it, this never returns."""
    try:
        return await work
    except Crash:
        loop = asyncio.get_running_loop()
        loop.stop()
        await loop.create_future()


class SimulatedWorld(journal_scenarios.CrashWorld):
    """The world of one run, in memory; it checks that an intent is durable before each side effect."""

    def __init__(self, store: SlowStore, deadly: float) -> None:
        super().__init__(Path())
        self.store, self.draw, self.deadly = store, store.draw, deadly
        self.files: dict[str, list[str]] = {}
        self.begun: Counter[str] = Counter()
        self.broken: list[str] = []
        self.chatter = SETTING.chatter
        self.graphs = self.draw.choice((1, 3, 3, 3, 3))  # how many its agents have

    def passing(self, where: str) -> None:
        if self.draw.random() < self.deadly:
            raise Crash(where)

    def write(self, name: str, line: str) -> None:
        self.files.setdefault(name, []).append(line)

    def lines(self, name: str) -> list[str]:
        return self.files.get(name, [])

    def effect(self, name: str, key: str, result: str) -> str:
        run_id, _, eid = key.partition(":")
        self.begun[key] += 1
        records = read_at_once(self.store.records(run_id))
        intents = sum(f'"eid":"{eid}"' in r.body and '"effect.intent"' in r.body for r in records)
        if intents < self.begun[key]:
            self.broken.append(f"{name} {key} began for the {self.begun[key]}. time, and {intents} intents are durable")
        return super().effect(name, key, result)


class CrashingTransport:
    """A model whose calls may crash the process."""

    def __init__(self, world: SimulatedWorld, script: list[Any]) -> None:
        self.world, self.model = world, journal_scenarios.TranscriptModel(world, script)
        self.name = self.model.name

    async def reply(self, request: Any) -> Any:
        return await run_until_crash(self.model.reply(request))


def never(run: Any) -> bool:
    """A guard that is never true: it changes a graph, but no path through it."""
    return False


GRAPHS: dict[str, tuple[Graph, ...]] = {
    name: (
        base,
        *(base.with_transition(Transition(at, never, "terminal", ends="completed")) for at in ("pre_step", "post_llm")),
    )
    for name, base in (
        (name, PRESETS[name].graph) for name in sorted({journal_scenarios.SCENARIOS[each][0] for each in SIDE_EFFECTS})
    )
}
"""By preset, the graphs that an agent may have when it resumes a run. All lead to the same end."""


def simulated_agent(world: SimulatedWorld, scenario: str, store: Any, clock: FakeClock) -> Agent:
    """An agent with a random one of these graphs."""
    preset, script = journal_scenarios.SCENARIOS[scenario]
    most = 2 if scenario == "limit" else 50
    limits = AgentGuardrails(
        max_iterations=most, loop_soft_threshold=19, max_execution_time_s=10**9, stall_threshold_s=10**9
    )
    tools = [_without_threads(t) for t in journal_scenarios.make_tools(world)]
    secrets = [SecretStr(each) for each in SETTING.declared]
    host = Host(clock=clock, store=store, secret=SECRET, secrets=secrets, watchdog_s=None)  # a thread has its own times
    return Agent(
        CrashingTransport(world, script),
        tools=tools,
        preset=preset,
        graph=world.draw.choice(GRAPHS[preset][: world.graphs]),
        guardrails=limits,
        host=host,
        hooks=[journal_scenarios.note_failures],
        migrations=[Migration()],
    )


def _without_threads(each: Any) -> Any:
    async def call(context: Any, arguments: Any) -> Any:
        await asyncio.sleep(0)
        came = each.function(context, **arguments)
        return await came if each.is_async else came

    async def function(context: Any, **arguments: Any) -> Any:
        return await run_until_crash(call(context, arguments))

    return dataclasses.replace(each, function=function, is_async=True)


async def continue_run(world: SimulatedWorld, scenario: str, store: SlowStore, clock: FakeClock, run_id: str) -> None:
    """Start or resume a run until its end; retry when there is no space."""
    agent = simulated_agent(world, scenario, store, clock)
    for _ in range(50):
        try:
            if scenario == "fork":
                await _fork_run(agent, world, store, run_id)
            await _run_once(agent, world, store, run_id)
        except StoreFullError:
            await asyncio.sleep(0)
            continue
        return


async def _fork_run(agent: Agent, world: SimulatedWorld, store: SlowStore, run_id: str) -> None:
    """Run the parent to its end, and fork it."""
    past = f"{run_id}-past"
    await _run_once(agent, world, store, past)
    head = await store.head(run_id)
    if head is None or not head.seq:
        await fork(store, past, migration_point(await store.records(past)), run_id, KEYRING)


async def _run_once(agent: Agent, world: SimulatedWorld, store: SlowStore, run_id: str) -> None:
    while True:
        head = await store.head(run_id)
        if head is None or not head.seq:
            result = await agent.run(SETTING.chatter or "go", run_id=run_id)
        elif head.status == "running":
            result = await agent.resume(run_id)
        elif head.status == "suspended":
            waits: Any = rehydrate(await store.records(run_id), SecretOpener(KEYRING)).run.pending_request
            said = journal_scenarios.human_reply(world, run_id, waits.kind, waits.tool, waits.arguments)
            result = await agent.resume(run_id, said)
        else:
            return
        if not isinstance(result.outcome, UserInputRequested):
            return


def final_state(rows: Sequence[SealedRecord], head: Head | None, scenario: str, run_id: str) -> tuple[Any, ...]:
    """The final messages and result of a run, whose journal must verify and replay."""
    past = rehydrate(rows, SecretOpener(KEYRING))
    told = verify(run_id, rows, head)
    assert told.code == GOOD, told
    graphs = {graph.fingerprint: graph for graph in GRAPHS[journal_scenarios.SCENARIOS[scenario][0]]}
    assert replay(rows, graphs[past.graph["fingerprint"]]).same
    return [str(m) for m in past.run.messages], past.run.answer or past.run.ending_value, past.finished


def expected_final_state(scenario: str) -> tuple[Any, ...]:
    """The final state of the uninterrupted run."""
    if scenario not in _EXPECTED:
        store = SlowMemoryStore().set_up(random.Random(0), 0.0, 0.0)
        asyncio.run(continue_run(SimulatedWorld(store, 0.0), scenario, store, FakeClock(), "r"))
        _EXPECTED[scenario] = final_state(*asyncio.run(consistent_read(store, "r")), scenario, "r")
    return _EXPECTED[scenario]


_EXPECTED: dict[str, tuple[Any, ...]] = {}


def simulate(seed: int, kind: str = "memory") -> tuple[Counter[str], str]:
    """Simulate one seed; returns counts of what happened, and a digest of the history.

    Args:
        seed: The seed.
        kind: Where the runs are: ``memory``, ``sqlite``, or the URL of a database.

    Raises:
        AssertionError: An invariant is violated; the message begins with the seed.
    """
    draw = random.Random(seed)
    no_room, deadly = draw.choice((0.0, 0.0, 0.05)), draw.choice((0.0, 0.02, 0.1))
    with simulated_store(kind) as store:
        return _simulate(seed, draw, store.set_up(draw, no_room, deadly / 5), deadly)


def _simulate(seed: int, draw: random.Random, store: SlowStore, deadly: float) -> tuple[Counter[str], str]:
    told = Counter[str]()
    runs = {
        f"run{n}": (draw.choice(list(SIDE_EFFECTS)), SimulatedWorld(store, deadly)) for n in range(draw.randint(1, 3))
    }
    clock = FakeClock()
    for life in range(40):
        clock.jump(draw.choice((0, 0, 7200, -7200)))
        if life == 39:
            for _, world in runs.values():
                world.deadly = 0.0
            store.no_room = store.deadly = 0.0
        if _run_life(runs, store, clock):
            break
        told["crashes"] += 1
        asyncio.run(store.die())
    digest = hashlib.sha256()
    for run_id, (scenario, world) in runs.items():
        rows, head = asyncio.run(consistent_read(store, run_id))
        try:
            _check_effects(scenario, world)
            assert final_state(rows, head, scenario, run_id) == expected_final_state(scenario)
        except (AssertionError, RunError) as error:
            raise AssertionError(f"seed {seed}: {run_id} ({scenario}): {error}") from error
        told.update({"runs": 1, "forks": scenario == "fork"})
        for row in rows:
            told["doubts"] += '"dispatch_tool.in_doubt"' in row.body
            told["withheld"] += row.hidden.count("[sealed ")
            told["changes"] += '"kind":"run.migrated"' in row.body
            body = json.loads(row.body)
            digest.update(
                repr((run_id, row.seq, [body.get(n) for n in ("kind", "transition", "eid", "epoch")])).encode()
            )
    return told, digest.hexdigest()


def _check_effects(scenario: str, world: SimulatedWorld) -> None:
    assert not world.broken, world.broken[0]
    effects = world.effects()
    once_each = {key: result for _, key, result in effects}
    assert sorted(once_each.values()) == sorted(SIDE_EFFECTS[scenario])
    for (name, key), times in Counter((name, key) for name, key, _ in effects).items():
        assert times == 1 or name in journal_scenarios.IDEMPOTENT_TOOLS, f"{name} {key} ran {times} times"


def _ignore(*_: object) -> None:
    """An exception handler of an event loop that does nothing."""


def _run_life(runs: dict[str, tuple[str, SimulatedWorld]], store: SlowStore, clock: FakeClock) -> bool:
    """One simulated process; returns whether it finished."""
    loop = asyncio.new_event_loop()
    try:
        tasks = [
            loop.create_task(continue_run(world, what, store, clock, name)) for name, (what, world) in runs.items()
        ]
        try:
            loop.run_until_complete(asyncio.wait(tasks))
        except RuntimeError as error:
            if "stopped" not in str(error):
                raise
            loop.set_exception_handler(_ignore)  # abandoned tasks are not reported
            abandoned: set[Any] = asyncio.all_tasks(loop) | set(tasks)
            for dropped in abandoned:
                dropped._log_destroy_pending = False  # they are dropped on purpose
                if dropped.done() and not dropped.cancelled():
                    dropped.exception()
                ABANDONED.append(dropped)
            return False
        for task in tasks:
            task.result()
        return True
    finally:
        loop.close()


def main(kind: str, first: int, count: int) -> None:
    """Simulate these seeds, and exit without cleaning up the abandoned tasks."""
    told, digest, code = Counter[str](), hashlib.sha256(), 1
    do_at_once()
    gc.disable()  # each collection would traverse all abandoned tasks
    try:
        use_snapshots(lambda _: told.update(["from snapshots"]))
        for seed in range(first, first + count):
            more, history = simulate(seed, kind)
            told += more
            digest.update(history.encode())
        sys.stdout.write(json.dumps({"histories": count, **told, "digest": digest.hexdigest()}))
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
