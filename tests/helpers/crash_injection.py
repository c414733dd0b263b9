"""Kills a run with SIGKILL at every point that it passes, resumes it in another process, and compares.

The points are before, within and after every commit, after every acknowledgement, and around every model call and
every tool's side effect. A first, uninterrupted process counts them; then a process is killed at each of them.

Each process works on a real file. Starting an interpreter takes longer than a whole run, so processes are forked from
one that has imported everything and has no thread, no event loop and no connection; ``fresh`` starts interpreters, to
show that forking hides nothing. With the URL of a PostgreSQL server, each run has a database there in place of a file.

Run as ``python -m tests.helpers.crash_injection matrix [STEP]``, ``histories SEED COUNT`` or ``fresh STEP``, each with
a URL ``postgresql://...`` after it for a server; prints what it did as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from agentfsm import SqliteStore, UserInputRequested, open_store
from agentfsm.agent import resume
from agentfsm.journal import snapshot
from agentfsm.journal.fork import fork
from agentfsm.journal.load import LoadedRun
from agentfsm.journal.records import Record, SealedRecord, read_records
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Lease, SealedSnapshot, Status
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.keys import Keyring
from tests.helpers.journal_scenarios import (
    CHANGES,
    IDEMPOTENT_TOOLS,
    SCENARIOS,
    CrashWorld,
    agent_pair,
    final_graph,
    human_reply,
)
from tests.helpers.postgres import drop_database, new_database

RUN, PAST = "run", "past"
DETOUR = ("dispatch_tool.in_doubt", "suspended.doubt_settled")


# -- one life ---------------------------------------------------------------------------------------------


def announce_appends(store: Any, world: CrashWorld) -> None:
    """Have a store log each acknowledged record, and pass a point then."""
    append = store.append

    def announced(
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.ensure_future(append(lease, records, status, info, snapshot))

        def told(of: asyncio.Future[None]) -> None:
            if not of.cancelled() and of.exception() is None:
                if records and lease.run_id == RUN:
                    world.write("acked", f"{records[-1].seq} {records[-1].hash}")
                world.passing("acknowledged")

        done.add_done_callback(told)
        return done

    store.append = announced


def use_snapshots(note: Callable[[str], object]) -> None:
    """Have runs get a snapshot wherever they may, and begin at it when they are loaded, in the rest of this process.

    The hook, the effect and the tools here read no messages, so their runs need not be loaded whole.

    Args:
        note: Called with the id of each run that is loaded from a snapshot.
    """
    mock.patch.multiple(snapshot, EVERY_RECORDS=1, WAITING_RECORDS=1).start()
    mock.patch.object(resume, "may_read_messages", return_value=False).start()
    load = resume.load_run

    async def logged(config: Any, run_id: str, *, lazily: bool = False) -> LoadedRun:
        loaded = await load(config, run_id, lazily=lazily)
        if loaded.resume_point.base is not None and loaded.resume_point.base.unread:
            note(run_id)
        return loaded

    mock.patch.object(resume, "load_run", logged).start()


class AnnouncingConnection(sqlite3.Connection):
    """A connection that passes a point before and after every commit, and after every write."""

    world: CrashWorld

    def execute(self, text: str, *rest: Any) -> sqlite3.Cursor:
        commits = text.lstrip().upper().startswith("COMMIT")
        if commits:
            self.world.passing("before a commit")
        came = super().execute(text, *rest)
        if commits:
            self.world.passing("after a commit")
        elif self.in_transaction and text.lstrip().upper().startswith(("INSERT", "UPDATE")):
            self.world.passing("in a transaction")
        return came

    def executemany(self, *rest: Any) -> sqlite3.Cursor:
        came = super().executemany(*rest)
        self.world.passing("in a transaction")
        return came

    def commit(self) -> None:
        self.world.passing("before a commit")
        super().commit()
        self.world.passing("after a commit")


def announce_commits(world: CrashWorld) -> None:
    """Have all connections to a server pass a point before and after each commit, and after each write before that."""
    from psycopg import AsyncConnection

    from agentfsm.journal.postgres import postgres_session

    class Announcing(AsyncConnection[Any]):
        def passing(self, query: Any, where: str) -> None:
            if str(query).lstrip().upper().startswith(("INSERT", "UPDATE", "DELETE", "WITH")):
                world.passing(where)

        async def execute(self, query: Any, *rest: Any, **options: Any) -> Any:
            commits = self.info.transaction_status.name == "IDLE"
            if commits:
                self.passing(query, "before a commit")
            came = await super().execute(query, *rest, **options)
            self.passing(query, "after a commit" if commits else "in a transaction")
            return came

        @contextlib.asynccontextmanager
        async def transaction(self, *rest: Any, **options: Any) -> AsyncGenerator[Any]:
            async with super().transaction(*rest, **options) as transaction:
                yield transaction
                world.passing("before a commit")
            world.passing("after a commit")

    mock.patch.object(postgres_session, "AsyncConnection", Announcing).start()


def store_in(folder: Path) -> Any:
    """The store of a run: a file, or the database of which the folder has the URL."""
    url = folder / "url"
    return open_store(url.read_text()) if url.exists() else SqliteStore(folder / "runs.db")


def new_folder(server: str) -> Path:
    """A folder for a run, with a database if there is a server."""
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    if server:
        (folder / "url").write_text(new_database(server))
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder with its database."""
    if (folder / "url").exists():
        drop_database((folder / "url").read_text())
    shutil.rmtree(folder)


async def run_life(world: CrashWorld, scenario: str) -> None:
    """Start or resume the run, and run it to its end."""
    store = store_in(world.folder)
    announce_appends(store, world)
    for run_id in (RUN, PAST):
        while (head := await store.head(run_id)) is not None and head.owner is not None:
            await asyncio.sleep(0.002)  # the server has not noticed yet that the process was killed
    both = agent_pair(world, scenario, store)
    if scenario == "fork":
        await run_to_end(world, scenario, both, store, PAST)
        head = await store.head(RUN)
        if head is None or not head.seq:
            world.passing("before the fork")
            await fork(store, PAST, migration_point(await store.records(PAST)), RUN, Keyring(b"of the tests"))
            world.passing("after the fork")
    await run_to_end(world, scenario, both, store, RUN)
    await store.aclose()


def migration_point(rows: Any) -> int:
    """The record after which the fork branches off: the first that returns to the model."""
    moves = [r for r in read_records(rows, PAST) if r.kind == "transition"]
    return next(r.seq for r in moves if r.data["transition"].startswith("post_tool.") and r.data["to"] == "pre_step")


async def run_to_end(world: CrashWorld, scenario: str, both: tuple[Any, Any], store: Any, run_id: str) -> None:
    """Start or resume a run, depending on its status in the store, and run it to its end."""
    head, (begins, goes_on) = await store.head(run_id), both
    if head is None or not head.seq:
        result = await begins.run("go", run_id=run_id)
    elif head.status == "suspended":
        waits = rehydrate(await store.records(run_id)).run.pending_request
        assert waits is not None
        result = await goes_on.resume(run_id, human_reply(world, run_id, waits.kind, waits.tool, waits.arguments))
    elif head.status == "running":
        old = (
            scenario in CHANGES
            and CHANGES[scenario].waiting
            and not recorded_changes(read_records(await store.records(run_id), run_id))
        )
        (run,) = await (begins if old else goes_on).unfinished_runs()
        assert run.run_id == run_id
        result = await run
    else:
        return
    while isinstance(asked := result.outcome, UserInputRequested):
        result = await goes_on.resume(run_id, human_reply(world, run_id, asked.kind, asked.tool, asked.arguments))


def recorded_changes(kept: Iterable[Record]) -> list[Record]:
    """The records of graph migrations."""
    return [r for r in kept if r.kind == "run.migrated"]


def run_in_process(folder: Path, scenario: str, kill_at: int | str, outside: int | None = None) -> None:
    """One process's share of a run, in this process, which cannot be used for anything else afterwards."""
    world = CrashWorld(folder, kill_at, outside)
    use_snapshots(partial(world.write, "from snapshots"))
    if (folder / "url").exists():
        announce_commits(world)
    else:
        AnnouncingConnection.world = world
        mock.patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=AnnouncingConnection)).start()
    asyncio.run(run_life(world, scenario))
    world.write("points", json.dumps(world.names))


# -- processes --------------------------------------------------------------------------------------------


def warm_up(scenarios: Iterable[str] = tuple(SCENARIOS), server: str = "") -> None:
    """Import and build everything once that these scenarios need, so that forked processes need not."""
    for scenario in scenarios:
        folder = new_folder(server)
        asyncio.run(run_life(CrashWorld(folder), scenario))
        outcome(folder, scenario)
        remove_folder(folder)
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(10)  # one that has run a tool waits a moment for another one
    gc.collect()
    gc.freeze()  # otherwise the first collection in each child copies the whole memory


def run_forked(work: Any) -> int:
    """Fork a child that does some work and exits; returns its process id."""
    assert threading.active_count() == 1, "a thread would be missing in the child"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def exited_cleanly(status: int) -> bool:
    """Whether a process was killed (True) or finished; fails if it exited with an error."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the process failed"
    return False


def run_in_fork(folder: Path, scenario: str, kill_at: int | str = 0, *, outside: bool = False) -> bool:
    """One forked process; returns whether it was killed, by itself or from outside."""
    reading, writing = os.pipe() if outside else (None, None)
    child = run_forked(lambda: run_in_process(folder, scenario, kill_at, writing))
    if reading is not None and writing is not None:
        os.close(writing)
        if os.read(reading, 1):
            os.kill(child, signal.SIGKILL)
        os.close(reading)
    return exited_cleanly(os.waitpid(child, 0)[1])


def run_in_interpreter(folder: Path, scenario: str, kill_at: int = 0) -> bool:
    """One process with a new interpreter, killed from outside; returns whether it was killed."""
    command = [sys.executable, "-m", "tests.helpers.crash_injection", "life", str(folder), scenario, str(kill_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        if child.stdout.read(1):
            child.kill()
        code = child.wait()
    assert code in (0, -signal.SIGKILL), f"the process failed, in {folder}"
    return code != 0


# -- what must come of it ---------------------------------------------------------------------------------


def outcome(folder: Path, scenario: str) -> dict[str, Any]:
    """The state of the run according to its journal, which must verify and replay."""

    async def load() -> Any:
        async with store_in(folder) as store:
            before = await store.head(PAST)
            parent: list[SealedRecord] = [] if before is None else await store.records(PAST)
            return await store.records(RUN), await store.head(RUN), parent, before

    rows, head, parent, before = asyncio.run(load())
    assert before is None or verify(PAST, parent, before).code == GOOD, "the parent"
    told, past = verify(RUN, rows, head), rehydrate(rows)
    assert told.code in (GOOD, OPEN), told
    assert told.code == GOOD or not past.finished, told
    again = replay(rows, final_graph(scenario))
    assert again.same, again
    kept = read_records(rows, RUN)
    moves = [r.data["transition"] for r in kept if r.kind == "transition"]
    if scenario in CHANGES:  # by whatever name its graph of then had for it
        moves = [CHANGES[scenario].migration.rename_map.transition(move) for move in moves]
    said = recorded_changes(kept)
    times = [r.data["ts"] for r in kept]
    return {
        "finished": past.finished,
        "messages": [str(m) for m in past.run.messages],
        "answer": past.run.answer or past.run.ending_value,
        "notes": past.run.state_results,
        "moves": without_detours(moves),
        "changes": [(c.data["judged"], c.data["from"], c.data["graph"]["fingerprint"]) for c in said],
        "changed behind": [kept[c.seq - 2].kind for c in said],
        "effects": sorted({(name, key) for name, key, _ in CrashWorld(folder).effects()}),
        "seals": [row.hash for row in rows],
        "doubts": moves.count(DETOUR[0]),
        "backwards": sum(b < a for a, b in itertools.pairwise(times)),
    }


def without_detours(moves: list[str]) -> list[str]:
    """The transitions without the detour to a human for each call in doubt."""
    left: list[str] = []
    for move in moves:
        if move == DETOUR[1]:
            assert left.pop() == DETOUR[0]
        else:
            left.append(move)
    return left


def with_resolved_doubts(moves: list[str], settled: set[str]) -> list[str]:
    """The moves of an uninterrupted run, as they must be where a person gave the results of some calls.

    Such a call takes no visit to ``dispatch_tool`` of its own: the visit behind the person's answer goes on with the
    next call of the batch, if there is one. All else is as it was.

    Args:
        moves: The moves.
        settled: The calls, each as the number of its model call and its place in the batch (``1.0``).
    """
    left: list[str] = []
    asked = place = skip = 0
    for move, after in zip(moves, [*moves[1:], ""], strict=True):
        asked += move.startswith("call_llm.")
        place = 0 if move == "post_llm.tool_calls" else place
        if move == "dispatch_tool.otherwise":
            skip = 2 if f"{asked}.{place}" in settled and after == "post_tool.calls_pending" else 0
            place += 1
        if skip:
            skip -= 1
        else:
            left.append(move)
    return left


def check_against_uninterrupted(folder: Path, kills: int, whole: dict[str, Any], scenario: str) -> dict[str, Any]:
    """Compare an interrupted run with the uninterrupted one; returns its outcome."""
    world, got = CrashWorld(folder), outcome(folder, scenario)
    settled = {key.partition(":")[2] for key in world.lines("settled") if key.startswith(f"{RUN}:")}
    assert len(settled) <= got["doubts"] or scenario == "fork"
    expected = {**whole, "moves": with_resolved_doubts(whole["moves"], settled)}
    for what in ("finished", "messages", "answer", "notes", "moves", "changes", "effects"):
        assert got[what] == expected[what], f"{what}: {got[what]} != {expected[what]}"
    for line in world.lines("acked"):
        seq, _, seal = line.partition(" ")
        assert got["seals"][int(seq) - 1 : int(seq)] == [seal], f"record {seq} was acknowledged, and is lost"
    assert got["doubts"] <= kills
    done = Counter((name, key) for name, key, _ in world.effects())
    for (name, key), times in done.items():
        most = 1 + kills if name in IDEMPOTENT_TOOLS else 1
        assert times <= most + (name == "flaky"), f"{name} {key} ran {times} times"
    return got


def run_all_lives(
    scenario: str,
    kills: Sequence[int | str],
    whole: dict[str, Any] | None,
    *,
    by: Any = run_in_fork,
    outside: bool = False,
    server: str = "",
) -> dict[str, Any]:
    """A run that is killed at each of these points in turn, and then runs to its end.

    Raises:
        AssertionError: The run differs from the uninterrupted one; the message names the folder.
    """
    folder = new_folder(server)
    more = {"outside": True} if outside else {}
    try:
        killed = sum(by(folder, scenario, at, **more) for at in kills)
        assert not by(folder, scenario)
        got = check_against_uninterrupted(folder, killed, whole, scenario) if whole else outcome(folder, scenario)
    except AssertionError as error:
        raise AssertionError(f"{scenario} killed at {kills}, in {folder}: {error}") from error
    lines = CrashWorld(folder).lines
    points, where, from_snapshots = lines("points"), lines("killed"), len(lines("from snapshots"))
    remove_folder(folder)
    return {
        **got,
        "killed": killed,
        "points": json.loads(points[-1]),
        "where": where,
        "from snapshots": from_snapshots,
    }


def uninterrupted_runs(server: str = "") -> dict[str, dict[str, Any]]:
    """The uninterrupted run of each scenario."""
    whole = {scenario: run_all_lives(scenario, [], None, server=server) for scenario in SCENARIOS}
    for scenario, one in whole.items():
        check_uninterrupted(scenario, one)
    return whole


def check_uninterrupted(scenario: str, one: dict[str, Any]) -> None:
    """Check that an uninterrupted run has ended, without a call in doubt, and under the expected graph."""
    assert one["finished"]
    assert not one["doubts"]
    if scenario not in CHANGES:
        assert not one["changes"]
        return
    old, new, migration, _ = CHANGES[scenario]
    judged = "vouched" if migration.vouched else "replayed"
    assert one["changes"] == [(judged, old.fingerprint, new.fingerprint)]
    assert one["changed behind"] == ["run.suspended"]


# -- the trials -------------------------------------------------------------------------------------------


def crash_matrix(step: int = 1, scenarios: tuple[str, ...] = tuple(SCENARIOS), server: str = "") -> dict[str, Any]:
    """Kill at every point of these scenarios; or at the first of each kind, and every ``step``-th behind it."""
    kills: dict[str, int] = {}
    where, doubted, changed, from_snapshots = Counter[str](), Counter[str](), Counter[str](), 0
    for scenario in scenarios:
        whole = run_all_lives(scenario, [], None, server=server)
        check_uninterrupted(scenario, whole)
        points = [f"{name} {n}" for name, passed in whole["points"].items() for n in range(1, passed + 1, step)]
        done = [run_all_lives(scenario, [at], whole, server=server) for at in points]
        kills[scenario] = sum(d["killed"] for d in done)
        where.update(w for d in done for w in d["where"])
        doubted.update(w for d in done for w in d["where"] if d["doubts"])
        changed.update(kind for d in done for kind in d["changed behind"])
        from_snapshots += sum(d["from snapshots"] for d in done)
    return {
        "kills": kills,
        "points": sum(kills.values()),
        "where": where,
        "doubts": doubted,
        "changed": changed,
        "from snapshots": from_snapshots,
    }


def random_histories(seed: int, count: int, server: str = "") -> dict[str, Any]:
    """Random runs with up to five kills, by the process itself or from outside."""
    draw, whole, told = random.Random(seed), uninterrupted_runs(server), Counter[str]()
    for _ in range(count):
        scenario = draw.choice(list(SCENARIOS))
        last = sum(whole[scenario]["points"].values())
        kills = draw.randint(1, 5)
        points = [draw.randint(1, last // kills) for _ in range(kills)]  # else few processes would come so far
        outside = draw.random() < 0.5
        done = run_all_lives(scenario, points, whole[scenario], outside=outside, server=server)
        told.update({"kills": done["killed"], "doubts": done["doubts"], "backwards": done["backwards"]})
        told["outside"] += done["killed"] if outside else 0
        told["from snapshots"] += done["from snapshots"]
        told["most"] = max(told["most"], done["killed"])
    return {"seed": seed, "histories": count, **told}


def fresh_interpreters(step: int = 1, server: str = "") -> dict[str, Any]:
    """Kill at one point of each scenario (or every ``step``-th), with new interpreters instead of forks."""
    kills = 0
    for n, (scenario, whole) in list(enumerate(uninterrupted_runs(server).items(), 1))[::step]:
        middle = sum(whole["points"].values()) * n // (len(SCENARIOS) + 1)
        kills += run_all_lives(scenario, [middle], whole, by=run_in_interpreter, server=server)["killed"]
    return {"kills": kills}


def main(arguments: list[str]) -> None:
    """Run one of the trials."""
    if arguments[0] == "life":
        _, folder, scenario, kill_at = arguments
        run_in_process(Path(folder), scenario, int(kill_at), sys.stdout.fileno())
        return
    server = arguments.pop() if arguments[-1].startswith("postgresql:") else ""
    warm_up(server=server)
    match arguments:
        case ["matrix"]:
            told = crash_matrix(server=server)
        case ["matrix", step]:
            told = crash_matrix(int(step), server=server)
        case ["histories", seed, count]:
            told = random_histories(int(seed), int(count), server)
        case ["fresh", step]:
            told = fresh_interpreters(int(step), server)
        case _:
            sys.exit(__doc__)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
