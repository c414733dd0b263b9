"""Kills a run with SIGKILL at every point that it passes, resumes it in another process, and compares.

A *point* is a place that the run passes by: in front of, in the middle of and behind every commit, and around
every model call and every tool's effect. A first, uninterrupted life counts them; then each of them is where a
life ends. Every life is a process of its own, forked from one that has opened nothing.

The world is files: ``effects`` has a line for everything that tools did, ``acked`` one for every record that
the run was told is durable. A person who is asked about a call in doubt looks there.

Run as ``python -m tests.journal.crashes matrix``, ``histories SEED COUNT``, ``race ROUNDS``, ``frozen`` or
``full-disk``; prints what it did as JSON.
"""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    ContextOverflowError,
    Edit,
    Host,
    ItDidNotRun,
    ItRan,
    Message,
    Reply,
    Role,
    SqliteStore,
    StoreError,
    StoreLockedError,
    ToolContext,
    TransientProviderError,
    UserInputRequested,
    tool,
)
from agentfsm.core.messages import FinishReason
from agentfsm.core.presets import PRESETS
from agentfsm.journal import keeper, sqlite
from agentfsm.journal.forks import fork
from agentfsm.journal.replay import replay
from agentfsm.journal.restore import records, restore
from agentfsm.journal.verify import GOOD, OPEN, verify
from agentfsm.testing import FakeClock, call

RUN, PAST = "run", "past"


class World:
    """What outlives a process: files in a folder. ``passing`` is where a process may end."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at, self.passed = folder, kill_at, 0

    def passing(self, where: str) -> None:
        self.passed += 1
        if self.passed == self.kill_at:
            self.write("killed", where)
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def effect(self, name: str, key: str, result: str) -> str:
        self.passing(f"before {name}")
        self.write("effects", json.dumps([name, key, result]))
        self.passing(f"after {name}")
        return result


class ByTranscript:
    """A model whose reply depends on nothing but the transcript, so asking again gives the same."""

    name = "by-transcript"

    def __init__(self, world: World, script: list) -> None:
        self.world, self.script = world, script

    async def reply(self, request):
        self.world.passing("before the model")
        said = sum(m.role is Role.ASSISTANT for m in request.messages)
        entry = self.script[said]
        if isinstance(entry, tuple):  # fails until the run has learned from each failure
            *errors, entry = entry
            for error in errors:
                if error.kind not in request.messages[-1].content:
                    raise error
        self.world.passing("after the model")
        if isinstance(entry, str):
            return Reply(Message.assistant(entry))
        calls = tuple(
            type(c)(f"call{said}_{n}", c.name, c.arguments)
            for n, c in enumerate(entry if isinstance(entry, list) else [entry])
        )
        return Reply(Message.assistant("", calls), FinishReason.TOOL_CALLS)


def tools(world: World):
    @tool
    def once(context: ToolContext, n: int) -> str:
        """Runs at most once."""
        return world.effect("once", context.idempotency_key, f"once {n}")

    @tool(idempotent=True)
    async def again(context: ToolContext, n: int) -> str:
        """May run again."""
        return world.effect("again", context.idempotency_key, f"again {n}")

    @tool(idempotent=True, parallel=True)
    async def beside(context: ToolContext, n: int) -> str:
        """May run beside others, and again."""
        await asyncio.sleep(0)
        return world.effect("beside", context.idempotency_key, f"beside {n}")

    @tool(parallel=True)
    async def beside_once(context: ToolContext, n: int) -> str:
        """May run beside others, once."""
        await asyncio.sleep(0)
        return world.effect("beside_once", context.idempotency_key, f"beside_once {n}")

    @tool(requires_approval=True)
    def careful(context: ToolContext, n: int) -> str:
        """Must be allowed."""
        return world.effect("careful", context.idempotency_key, f"careful {n}")

    @tool(idempotent=True, retryable=True)
    def flaky(context: ToolContext, n: int) -> str:
        """Fails where it is asked for 1."""
        result = world.effect("flaky", context.idempotency_key, f"flaky {n}")
        if n == 1:
            raise ValueError("not with 1")
        return result

    return [once, again, beside, beside_once, careful, flaky]


BUSY, LONG = TransientProviderError("busy"), ContextOverflowError("too long")
SCENARIOS = {
    "linear": ("standard", [call("once", n=1), call("again", n=2), "done"]),
    "several": ("standard", [[call("once", n=1), call("again", n=2), call("once", n=3)], "done"]),
    "parallel": ("standard", [[call("beside", n=1), call("beside_once", n=2), call("beside", n=3)], "done"]),
    "approval": ("standard", [call("careful", n=1), [call("careful", n=2), call("again", n=3)], "done"]),
    "question": ("funnel", [call("ask_user", question="which?"), call("once", n=1), call("return_done", output="x")]),
    "backoff": ("standard", [(BUSY, LONG, call("once", n=1)), "done"]),
    "failing": ("standard", [call("flaky", n=1), call("nobody", n=2), call("flaky", n=2), "done"]),
    "limit": ("standard", [call("again", n=1), call("again", n=2), call("once", n=3), "done"]),
    "fork": ("standard", [call("once", n=1), call("again", n=2), call("once", n=3), "done"]),
}
IDEMPOTENT = {"again", "beside", "flaky"}


def agent(world: World, scenario: str, store) -> Agent:
    preset, script = SCENARIOS[scenario]
    limits = AgentGuardrails(max_iterations=2 if scenario == "limit" else 50, loop_soft_threshold=19)
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    return Agent(ByTranscript(world, script), tools=tools(world), preset=preset, guardrails=limits, host=host)


def answer(world: World, run_id: str, asked: UserInputRequested):
    match asked.kind:
        case "approval":
            return Edit({"n": 9}) if asked.arguments == {"n": 2} else Allow()
        case "in_doubt":  # the person looks
            key = asked.arguments["n"]
            effects = [r for _, by, r in map(json.loads, world.lines("effects")) if by.startswith(f"{run_id}:")]
            done = [r for r in effects if r == f"{asked.tool} {key}"]
            return ItRan(done[0]) if done else ItDidNotRun()
        case _:
            return "go on"


async def life(world: World, scenario: str) -> None:
    """One process: begin the run, or take it up, and go on to its end."""
    store = SqliteStore(world.folder / "runs.db")
    one = agent(world, scenario, store)
    if scenario == "fork":
        await to_its_end(world, one, store, PAST)
        head = store.head(RUN)
        if head is None or not head.seq:
            world.passing("before the fork")
            await fork(store, PAST, turning_point(store), RUN)
            world.write("acked", "1")
            world.passing("after the fork")
    await to_its_end(world, one, store, RUN)
    store.close()


def turning_point(store) -> int:
    """The record behind which the fork leaves its parent: the first that goes back to ask the model again."""
    moves = [r for r in records(store.rows(PAST), PAST) if r.kind == "transition"]
    return next(r.seq for r in moves if r.data["transition"].startswith("post_tool.") and r.data["to"] == "pre_step")


async def to_its_end(world: World, one: Agent, store, run_id: str) -> None:
    head = store.head(run_id)
    if head is None or not head.seq:
        result = await one.run("go", run_id=run_id)
    elif head.status == "suspended":
        waits = restore(store.rows(run_id)).run.waiting
        assert waits is not None
        asked = UserInputRequested(
            run_id=run_id,
            seq=0,
            time=0.0,
            kind=waits.kind,
            question="",
            tool=waits.tool,
            arguments=waits.arguments,
            suspension_record=None,  # type: ignore[arg-type]
        )
        result = await one.resume(run_id, answer(world, run_id, asked))
    elif head.status == "running":
        (run,) = one.recover()
        assert run.state.run_id == run_id
        result = await run
    else:
        return
    while isinstance(result.outcome, UserInputRequested):
        result = await one.resume(run_id, answer(world, run_id, result.outcome))


def instrument(world: World) -> None:
    commit, append, settle = sqlite.SqliteStore._commit, sqlite._append, keeper.StoreKeeper.settle

    def committing(self, *rest):
        world.passing("before a commit")
        told = commit(self, *rest)
        world.passing("after a commit")
        return told

    def appending(db, *rest):
        append(db, *rest)
        world.passing("in a transaction")

    async def settling(self):
        handed = self._scribe.seq if self._lease is not None and self._lease.run_id == RUN else 0
        await settle(self)
        world.write("acked", str(handed))
        world.passing("acknowledged")

    sqlite.SqliteStore._commit, sqlite._append, keeper.StoreKeeper.settle = committing, appending, settling


def process(folder: Path, scenario: str, kill_at: int) -> bool:
    """One life in a process of its own; whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            world = World(folder, kill_at)
            instrument(world)
            asyncio.run(life(world, scenario))
            world.write("points", str(world.passed))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"{scenario}, killed at {kill_at}: the process failed, in {folder}"
    return False


def outcome(folder: Path, scenario: str) -> dict:
    store = SqliteStore(folder / "runs.db")
    rows = store.rows(RUN)
    past = restore(rows)
    told = verify(RUN, rows, store.head(RUN))
    before = store.head(PAST)
    assert before is None or verify(PAST, store.rows(PAST), before).code == GOOD, f"the parent, in {folder}"
    store.close()
    assert told.code in (GOOD, OPEN), f"{told}, in {folder}"
    assert told.code == GOOD or not past.finished, told
    again = replay(rows, PRESETS[SCENARIOS[scenario][0]].graph)
    assert again.same, f"{again}, in {folder}"
    moves = [r.data["transition"] for r in records(rows, RUN) if r.kind == "transition"]
    return {
        "finished": past.finished,
        "messages": [str(m) for m in past.run.messages],
        "answer": past.run.answer or past.run.ending_value,
        "moves": [m for m in moves if m not in ("dispatch_tool.in_doubt", "suspended.doubt_settled")],
        "effects": sorted({(name, key) for name, key, _ in map(json.loads, World(folder, 0).lines("effects"))}),
        "records": len(rows),
        "doubts": moves.count("dispatch_tool.in_doubt"),
    }


def visits(moves: list[str]) -> list[str]:
    """Moves with every batch's visits to dispatch_tool put together."""
    text = " ".join(moves)
    return text.replace("dispatch_tool.otherwise post_tool.calls_pending ", "").split()


def check(folder: Path, kills: int, expected: dict, scenario: str) -> dict:
    got = outcome(folder, scenario)
    if got["doubts"]:  # a person gave the call's result, so it took no visit of its own to dispatch_tool
        got["moves"], expected = visits(got["moves"]), {**expected, "moves": visits(expected["moves"])}
    for what in ("finished", "messages", "answer", "moves", "effects"):
        assert got[what] == expected[what], f"{scenario}: {what}: {got[what]} != {expected[what]}, in {folder}"
    world = World(folder, 0)
    acked = [int(x) for x in world.lines("acked")]
    assert got["records"] >= max(acked, default=0)
    done = Counter((name, key) for name, key, _ in map(json.loads, world.lines("effects")))
    for (name, key), times in done.items():
        most = 1 + kills if name in IDEMPOTENT else 1
        assert times <= most + (name == "flaky"), f"{scenario}: {name} {key} ran {times} times, in {folder}"
    return got


def lives(scenario: str, kills: list[int], expected: dict | None) -> dict:
    """A history: killed at each of these points in turn, then left in peace."""
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    killed = sum(process(folder, scenario, at) for at in kills)
    process(folder, scenario, 0)
    points = int(World(folder, 0).lines("points")[0]) if not kills else 0
    got = check(folder, killed, expected, scenario) if expected else outcome(folder, scenario)
    where = World(folder, 0).lines("killed")
    shutil.rmtree(folder)
    return {**got, "killed": killed, "points": points, "where": where}


def matrix(scenarios: list[str], step: int = 1) -> dict:
    """Every point (or every so-many-th) of every scenario."""
    kills, where, doubts = {}, Counter(), 0
    for scenario in scenarios:
        whole = lives(scenario, [], None)
        assert whole["finished"]
        assert not whole["doubts"]
        done = [lives(scenario, [at], whole) for at in range(1, whole["points"] + 1, step)]
        kills[scenario] = sum(d["killed"] for d in done)
        doubts += sum(d["doubts"] for d in done)
        where.update(w for d in done for w in d["where"])
    return {"kills": kills, "points": sum(kills.values()), "doubts": doubts, "where": dict(where)}


def histories(seed: int, count: int) -> dict:
    """Random histories of up to five kills."""
    draw = random.Random(seed)
    wholes = {scenario: lives(scenario, [], None) for scenario in SCENARIOS}
    kills, doubts = 0, 0
    for _ in range(count):
        scenario = draw.choice(list(SCENARIOS))
        points = [draw.randint(1, wholes[scenario]["points"]) for _ in range(draw.randint(1, 5))]
        try:
            done = lives(scenario, points, wholes[scenario])
        except AssertionError as error:
            raise AssertionError(f"{scenario} killed at {points}: {error}") from None
        kills += done["killed"]
        doubts += done["doubts"]
    return {"histories": count, "kills": kills, "doubts": doubts, "seed": seed}


def warm_up() -> None:
    """Import and build once what every life would else import and build anew."""
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    asyncio.run(life(World(folder, 0), "approval"))
    outcome(folder, "approval")
    shutil.rmtree(folder)


def race(rounds: int, racers: int = 4) -> dict:
    """Several processes resume one run at the same moment: one of them does."""
    told: Counter = Counter()
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="crash-"))
        asyncio.run(_suspended(folder))
        begin, go = os.pipe()
        children = [_racer(folder, begin, go) for _ in range(racers)]
        os.close(begin)
        os.close(go)  # they all see the end of the pipe at once
        for child in children:
            os.waitpid(child, 0)
        world = World(folder, 0)
        lines = [line.split(" ", 1) for line in world.lines("raced")]
        assert [name for name, _ in lines].count("RunResult") == 1, (lines, folder)
        assert len(world.lines("effects")) == 1, (world.lines("effects"), folder)
        for name, words in lines:
            told[name] += 1
            assert name != "StoreLockedError" or "process" in words, words
        shutil.rmtree(folder)
    return {"rounds": rounds, **told}


async def _suspended(folder: Path) -> None:
    store = SqliteStore(folder / "runs.db")
    SCENARIOS["race"] = ("standard", [call("careful", n=1), "done"])
    await agent(World(folder, 0), "race", store).run("go", run_id=RUN)
    store.close()


def _racer(folder: Path, begin: int, go: int) -> int:
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(begin, 1)
        world = World(folder, 0)

        async def resume() -> object:
            return await agent(world, "race", SqliteStore(folder / "runs.db")).resume(RUN, Allow())

        try:
            came: object = asyncio.run(resume())
        except Exception as error:
            came = error
        world.write("raced", f"{type(came).__name__} {' '.join(str(came).split())}")
        os._exit(0)
    return child


def frozen() -> dict:
    """An owner that is frozen in the middle of a call: nobody else writes, and it goes on when it thaws."""
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    child = os.fork()
    if child == 0:
        world = World(folder, 0)
        freeze = world.passing
        world.passing = lambda where: os.kill(os.getpid(), signal.SIGSTOP) if where == "after once" else freeze(where)
        asyncio.run(life(world, "linear"))
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    store = SqliteStore(folder / "runs.db")
    head = store.head(RUN)
    assert head is not None
    try:
        asyncio.run(store.take(RUN, "somebody else"))
    except StoreLockedError as error:
        refused = str(error)
    left = agent(World(folder, 0), "linear", store).recover()
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    got = outcome(folder, "linear")
    shutil.rmtree(folder)
    return {"owner": head.owner, "child": child, "refused": refused, "left": len(left), "code": status, **got}


def full_disk() -> dict:
    """No room in the middle of a run (a limit on the size of files), and then there is room again."""
    whole = lives("linear", [], None)
    refused: Counter = Counter()
    for size in range(28_672, 200_000, 4096):
        folder = Path(tempfile.mkdtemp(prefix="crash-"))
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            world = World(folder, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            code = 0
            try:
                asyncio.run(life(world, "linear"))
            except StoreError as error:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                world.write("refused", f"{type(error).__name__} {error}")
            except BaseException as error:
                code = 1
                world.write("refused", f"{type(error).__name__} {error}")
            os._exit(code)
        _, status = os.waitpid(child, 0)
        told = World(folder, 0).lines("refused")
        assert status == 0, (told, size, folder)
        refused.update(line.split()[0] for line in told)
        for line in told:
            assert "runs.db" in line, line
        assert not process(folder, "linear", 0)
        got = check(folder, 1, whole, "linear")
        assert got["finished"]
        shutil.rmtree(folder)
        if not told:
            break
    return dict(refused)


if __name__ == "__main__":
    warm_up()
    match sys.argv[1:]:
        case ["matrix", *step]:
            print(json.dumps(matrix(list(SCENARIOS), *map(int, step))))
        case ["histories", seed, count]:
            print(json.dumps(histories(int(seed), int(count))))
        case ["race", rounds]:
            print(json.dumps(race(int(rounds))))
        case ["frozen"]:
            print(json.dumps(frozen()))
        case ["full-disk"]:
            print(json.dumps(full_disk()))
