"""Histories of real ``agentfsm worker`` processes that are stopped, killed and frozen while people act on their runs.

python -m tests.helpers.worker_histories KIND FIRST COUNT MOMENTS, where KIND is ``postgres`` or ``sqlite``; prints
counts as JSON. In each history, MOMENTS things happen. A broken rule ends it, with the seed. See ``planned_app`` for
what the runs do.

A history starts some runs and workers. Then it draws what happens: a worker gets SIGTERM, with calls that are shorter
or longer than its grace period, or SIGKILL, or is frozen for a while; the server is killed; a run is cancelled or
forked; and people answer what runs ask. In the end, all is left to run out. The rules are in ``check``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentfsm import Allow, Deny, Host, ItDidNotRun, ItRan, Runs, open_store
from agentfsm.agent.config import with_host
from agentfsm.errors import AgentfsmError
from agentfsm.journal.purge import purge_runs
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import Head, Store
from agentfsm.journal.verification import GOOD
from agentfsm.loop.human_input import HumanInput, PendingRequest
from agentfsm.loop.keys import Keyring
from agentfsm.workers import Waker, open_waker
from tests.helpers.child_process import child_environment
from tests.helpers.planned_app import APPROVALS, ONCE, planned
from tests.helpers.postgres import kill_server, new_database, start_server

SECRET = b"the secret of the workers of these histories"
RUNS, PATIENCE_S = 6, 120.0
GRACE_S = 0.5
PEOPLE = ("ann", "bob", "cy")
SECONDS = (0.0, 0.0, 0.05, 0.3, 1.5)
"""How long a call takes; the longest outlasts the grace period."""


def draw_plan(dice: random.Random, name: str, depth: int) -> list[Any]:
    """What a run does."""
    batches: list[Any] = []
    for turn in range(dice.choice((1, 2, 3))):
        text = f"{name}/{turn}"
        if depth and dice.random() < 0.35:
            number = dice.choice((1, 1, 2))
            batches.append([["helper", draw_plan(dice, f"{text}.{n}", depth - 1)] for n in range(number)])
        else:
            tools = dice.choice((("look",), ("pay",), ("refund",), ("wire",), ("look", "pay"), ("pay", "refund")))
            batches.append([[tool, f"{text}.{n}", dice.choice(SECONDS)] for n, tool in enumerate(tools)])
    return batches


def is_denied(name: str, text: str) -> bool:
    """Whether people deny a call."""
    return name in APPROVALS and random.Random(f"{name} {text}").random() < 0.15


def expected_results(batches: list[Any]) -> list[str]:
    """The results in the transcript of a run that nobody cancels."""
    return [
        f"finished {len(given[0])}"
        if name == "helper"
        else "Denied by the user: no"
        if is_denied(name, given[0])
        else f"{name} {given[0]}"
        for batch in batches
        for name, *given in batch
    ]


class History:
    """One history.

    Args:
        seed: What is drawn.
        url: An empty store.
        folder: For what the workers write.
        server: The server of the store; None for a file.
    """

    def __init__(self, seed: int, url: str, folder: Path, server: Any) -> None:
        self.seed, self.url, self.folder, self.server = seed, url, folder, server
        self.dice = random.Random(seed)
        self.counts = Counter[str]()
        self.alive: list[subprocess.Popen[bytes]] = []
        self.logs: dict[subprocess.Popen[bytes], Path] = {}
        self.frozen = 0
        self.plans: dict[str, list[Any]] = {}
        self.origins: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.busy: list[asyncio.Task[Any]] = []

    # -- processes ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a worker."""
        command = [sys.executable, "-m", "agentfsm", "worker", "tests.helpers.planned_app:planned", "--store", self.url]
        command += ["--grace", f"{GRACE_S}", "--max-attempts", "60"]
        env = child_environment() | {"AGENTFSM_SECRET": SECRET.decode(), "PYTHONFAULTHANDLER": "1"}
        path = self.folder / f"worker-{len(self.logs)}.log"
        with path.open("ab") as log:
            self.alive.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        self.logs[self.alive[-1]] = path

    def effects(self) -> Counter[tuple[str, str, str]]:
        """How often each tool has run in each run with each text."""
        file = self.folder / "effects"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter((name, run_id, text) for name, run_id, text in (line.split(" ") for line in lines))

    async def freeze(self, child: subprocess.Popen[bytes], seconds: float) -> None:
        """Stop a worker for a while, as a machine does that has no time for it."""
        self.frozen += 1
        child.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        child.send_signal(signal.SIGCONT)
        self.frozen -= 1
        self.counts["frozen"] += 1

    async def ended(self, child: subprocess.Popen[bytes]) -> int:
        """The exit code of a worker; one that does not end is aborted, and its log says what each thread was doing."""
        try:
            return await asyncio.to_thread(child.wait, 60)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)
            return await asyncio.to_thread(child.wait, 60)

    async def replace(self, with_signal: int) -> None:
        """Stop or kill a worker, and start another one."""
        child = self.dice.choice(self.at_work())
        self.alive.remove(child)
        child.send_signal(with_signal)
        if self.server is None or self.dice.random() < 0.5:  # a file has one worker
            await self.after(child, with_signal)
        else:
            self.busy.append(asyncio.create_task(self.after(child, with_signal)))
        self.start()

    async def after(self, child: subprocess.Popen[bytes], with_signal: int) -> None:
        code = await self.ended(child)
        assert code in ((0, 1) if with_signal == signal.SIGTERM else (-signal.SIGKILL,)), (code, self.log(child))
        self.counts[{0: "stopped", 1: "stopped during calls"}.get(code, "killed")] += 1

    def log(self, child: subprocess.Popen[bytes]) -> str:
        """What a worker has logged."""
        return self.logs[child].read_text()

    def at_work(self) -> list[subprocess.Popen[bytes]]:
        """The workers that have started, and are not to stop."""
        return [each for each in self.alive if "serving" in self.log(each)]

    def supervise(self) -> None:
        """Start another worker for each that ended because the server was away when it started."""
        for child in [each for each in self.alive if each.poll() is not None]:
            is_away = (
                self.counts["servers killed"] > 0 and child not in self.at_work() and "connection" in self.log(child)
            )
            assert (child.returncode, is_away) == (2, True), self.log(child)
            self.alive.remove(child)
            self.start()

    async def restart_server(self) -> None:
        """Kill the server, as a loss of power does, and start it again."""
        self.counts["servers killed"] += 1
        kill_server(self.server)
        await asyncio.to_thread(self.server.ensure_postgres_running)

    # -- people ---------------------------------------------------------------------------------------

    async def attempt(self, action: Awaitable[Any]) -> Any:
        """What an action of a person comes to; None if the run has moved on, or cannot be reached now."""
        try:
            return await asyncio.wait_for(action, 30)
        except (AgentfsmError, TimeoutError) as error:
            self.counts[f"refused with {type(error).__name__}"] += 1
            return None

    async def answer_some(self, runs: Runs, chance: float) -> None:
        """Answer what some of the runs ask."""
        for run_id in list(self.plans):
            if self.dice.random() > chance:
                continue
            stored = await self.attempt(runs.get(run_id))
            request = None if stored is None else stored.request
            if request is None or (reply := self.reply_to(run_id, request)) is None:
                continue
            voters = [] if request.quorum is None else [vote.id for vote in request.quorum.votes]
            by = self.dice.choice([each for each in PEOPLE if each not in voters])
            if await self.attempt(runs.answer(run_id, reply, by=by, to=request.digest)):
                self.counts[f"answered {type(reply).__name__}"] += 1

    def reply_to(self, run_id: str, request: PendingRequest) -> HumanInput | None:
        """What people say, as they know it; None if they cannot know it yet."""
        name, text = request.tool, str(request.arguments["text"])
        if request.kind == "approval":
            return Deny("no") if is_denied(name, text) else Allow()
        assert request.kind == "in_doubt", request
        assert name in ONCE, request
        family = {run_id, *self.origins_of(run_id)}
        if any((each, what) == (name, text) and run.split("-")[0] in family for each, run, what in self.effects()):
            return ItRan(f"{name} {text}")
        return None if self.frozen else ItDidNotRun()  # a process that is frozen may still do it

    def origins_of(self, run_id: str) -> list[str]:
        """The runs that a run was forked from."""
        origin = self.origins.get(run_id)
        return [] if origin is None else [origin, *self.origins_of(origin)]

    async def cancel(self, runs: Runs) -> None:
        """Cancel a run."""
        run_id = self.dice.choice(list(self.plans))
        self.cancelled.add(run_id)
        if await self.attempt(runs.cancel(run_id, "no longer needed")):
            self.counts["cancelled"] += 1

    async def fork(self, runs: Runs, store: Store) -> None:
        """Fork a run at one of its records."""
        run_id, new_id = self.dice.choice(list(self.plans)), f"f{len(self.plans)}"
        head = await self.attempt(store.head(run_id))
        if head is None or head.seq < 2:
            return
        at = self.dice.randrange(1, head.seq)
        self.plans[new_id], self.origins[new_id] = self.plans[run_id], run_id
        if await self.attempt(runs.fork(run_id, at, new_id)) is None and await store.head(new_id) is None:
            del self.plans[new_id], self.origins[new_id]
        else:
            self.counts["forked"] += 1

    # -- what happens ---------------------------------------------------------------------------------

    async def live(self, moments: int) -> Counter[str]:
        """The history from its beginning to its end."""
        waker = open_waker(self.url)
        try:
            async with open_store(self.url) as store:
                runs = Runs(store, secret=SECRET, waker=waker)
                for number in range(RUNS):
                    plan = draw_plan(self.dice, f"r{number}", 2)
                    run_id = await runs.submit("planned", json.dumps(plan), idempotency_key=f"r{number}")
                    self.plans[run_id] = plan
                for _ in range(1 if self.server is None else 2):
                    self.start()
                for _ in range(moments):
                    await self.until_something_happens(runs)
                    await self.act(runs, store)
                await self.run_out(runs, store, waker)
                await self.check(runs, store)
        finally:
            await waker.aclose()
        return self.counts

    async def until_something_happens(self, runs: Runs) -> None:
        """Let the runs go on until a worker is at work and they have done something more, or for a while."""
        wanted, end = self.effects().total() + self.dice.randrange(3), time.monotonic() + 1 + self.dice.random() * 2
        while not self.at_work() or (self.effects().total() < wanted and time.monotonic() < end):
            assert time.monotonic() < end + PATIENCE_S, "no worker starts"
            self.supervise()
            await self.answer_some(runs, 0.3)
            await asyncio.sleep(0.02)

    async def act(self, runs: Runs, store: Store) -> None:
        """One thing that happens."""
        names = ["term"] * 4 + ["kill"] * 2 + ["freeze"] * 2 + ["cancel", "fork", "fork"]
        match self.dice.choice(names + ["restart"] * (self.server is not None)):
            case "term":
                await self.replace(signal.SIGTERM)
            case "kill":
                await self.replace(signal.SIGKILL)
            case "freeze":
                freezing = self.freeze(self.dice.choice(self.at_work()), 3 * self.dice.random())
                self.busy.append(asyncio.create_task(freezing))
            case "cancel":
                await self.cancel(runs)
            case "fork":
                await self.fork(runs, store)
            case _:
                await self.restart_server()

    async def run_out(self, runs: Runs, store: Store, waker: Waker) -> None:
        """Let everything come to its end."""
        await asyncio.gather(*self.busy)
        end = time.monotonic() + PATIENCE_S
        while left := [head for head in await self.open_runs(store) if head.run_id.split("-")[0] not in self.origins]:
            assert time.monotonic() < end, f"these do not end: {left}, set aside: {await waker.list_set_aside()}"
            self.supervise()
            await self.answer_some(runs, 1)
            await asyncio.sleep(0.1)
        while any(behind := (await waker.unfinished(0), await waker.list_set_aside())):
            assert time.monotonic() < end, f"left behind: {behind}"
            await asyncio.sleep(0.1)
        while self.at_work() != self.alive:
            assert time.monotonic() < end, "no worker starts"
            self.supervise()
            await asyncio.sleep(0.1)
        for child in self.alive:
            child.send_signal(signal.SIGTERM)
        assert [await self.ended(child) for child in self.alive] == [0] * len(self.alive)
        agent = planned.with_config(with_host(planned.config, Host(store=store, secret=SECRET)))
        while left := await self.open_runs(store):  # whoever forked a run goes on with it
            assert time.monotonic() < end, f"these forks do not end: {left}"
            await self.answer_some(runs, 1)
            for run_id in self.origins:
                if (run := await agent.next_run(run_id)) is not None:
                    await run
        for run_id in self.plans:
            await agent.next_run(run_id)  # removes what was sent to it too late
        assert await store.signals.pending() == []

    async def open_runs(self, store: Store) -> list[Head]:
        """The runs that have not ended, or are still held; not what a process had claimed when it died, and no more."""
        heads = [head for head in await store.heads() if head.seq or head.run_id in self.plans]
        return [head for head in heads if head.status != "finished" or head.owner is not None]

    # -- the rules ------------------------------------------------------------------------------------

    async def check(self, runs: Runs, store: Store) -> None:
        """Whether each run came to the end that it should have, and did what it should have done."""
        effects = self.effects()
        for head in [head for head in await store.heads() if head.seq]:
            assert (await runs.verify(head.run_id)).code == GOOD, head.run_id
            top, ending = head.run_id.split("-")[0], (await runs.get(head.run_id)).info.ending
            assert ending == "completed" or (ending == "cancelled" and top in self.cancelled), (head.run_id, ending)
            self.counts[f"runs {ending}"] += 1
            if ending == "completed":
                run = rehydrate(await store.records(head.run_id)).run
                plan = json.loads(next(each.content for each in run.messages if each.role == "user"))
                results = [each.content for each in run.messages if each.role == "tool"]
                assert results == expected_results(plan), (head.run_id, results)
                self.check_effects(head.run_id, plan, effects)
        assert set(self.plans) <= {head.run_id for head in await store.heads()}
        for (name, run_id, text), times in effects.items():
            assert times == 1 or name not in ONCE, f"{name} ran {times} times in {run_id!r} with {text!r}"
            assert not is_denied(name, text), f"{name} ran in {run_id!r} with {text!r}, which was denied"
        kept = (await purge_runs(store, list(self.plans), Keyring(SECRET))).kept
        assert (kept, [head for head in await store.heads() if head.seq]) == ((), [])

    def check_effects(self, run_id: str, plan: list[Any], effects: Counter[tuple[str, str, str]]) -> None:
        """Whether the calls of a run that completed were made in it, or in a run that it was forked from."""
        below = run_id.partition("-")[2]
        tops = [run_id.split("-")[0], *self.origins_of(run_id.split("-")[0])]
        family = [f"{top}-{below}" if below else top for top in tops]
        for name, text in ((name, given[0]) for batch in plan for name, *given in batch if name != "helper"):
            if not is_denied(name, text):
                assert any(effects[name, each, text] for each in family), (name, run_id, text)

    def close(self) -> None:
        """Kill what is left."""
        for child in self.alive:
            child.kill()
            child.wait(30)


def histories(kind: str, first: int, count: int, moments: int) -> Counter[str]:
    """So many histories; returns what happened in them."""
    counts = Counter[str]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            server = start_server(folder / "data") if kind == "postgres" else None
            url = f"sqlite:///{folder}/runs.db" if server is None else new_database(server.get_uri())
            os.environ["WORKER_FOLDER"] = name
            history = History(seed, url, folder, server)
            try:
                counts += asyncio.run(history.live(moments))
            except BaseException:
                print(f"seed {seed}: {dict(history.counts)}", file=sys.stderr)
                for log in history.logs.values():
                    print(log.name, log.read_text()[-3000:], sep="\n", file=sys.stderr)
                raise
            finally:
                with suppress(OSError):
                    history.close()
                if server is not None:
                    server.cleanup()
        counts["histories"] += 1
    return counts


if __name__ == "__main__":
    print(json.dumps(histories(sys.argv[1], *map(int, sys.argv[2:]))))
