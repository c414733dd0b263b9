"""Answers and cancellations that wait in a store: forged, replayed, moved, repeated, or sent by somebody who may not.

Each attack begins with a run that waits for two managers, and with signals that were honestly sent to other requests.
Afterwards a host acts on whatever it finds: nothing may be paid, and the run waits on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Actor, Agent, Allow, Approval, Deny, Host, Runs, SqliteStore, UserInputRequested, open_store, tool
from agentfsm.errors import AgentfsmError
from agentfsm.journal.load import StoredRequest
from agentfsm.journal.signals import Signal, seal_signal, signal_id
from agentfsm.journal.store import Store
from agentfsm.journal.verification import GOOD, OPEN
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import is_same_id
from agentfsm.testing import ScriptedModel, call
from tests.helpers import rival_answers
from tests.helpers.child_process import child_environment

SECRET, OTHER = b"the secret of this host", b"the secret of another tenant"
ANN, BOB, CLERK, EVE = (
    Actor("ann", ("manager",)),
    Actor("bob", ("manager",)),
    Actor("cy", ("clerk",)),
    Actor("eve", ("manager",)),
)
RULE = Approval(2, ("manager",), not_requester=True)
Rows = list[tuple[str, str, str, bytes]]
"""Id, run, body and MAC."""


class World:
    """A store with the run ``one`` that waits, and what it has paid."""

    def __init__(self, path: Path, secret: bytes = SECRET) -> None:
        self.path, self.secret, self.paid = path, secret, list[int]()

    def agent(self, store: SqliteStore, *script: Any, **host: Any) -> Agent:
        @tool(requires_approval=RULE)
        def pay(amount: int) -> str:
            """Pay."""
            self.paid.append(amount)
            return "paid"

        return Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=store, secret=self.secret, **host))

    async def ask(self, *run_ids: str) -> None:
        async with SqliteStore(self.path) as store:
            for run_id in run_ids:
                result = await self.agent(store, call("pay", amount=5)).run("Pay.", run_id=run_id, actor=EVE)
                assert isinstance(result.outcome, UserInputRequested)
            await Runs(store, secret=self.secret).cancel(run_ids[-1], "so that the file has the table")
            for signal in await store.signals.pending():
                await store.signals.remove(signal.id)

    async def send(self, run_id: str, *votes: tuple[Any, Actor], secret: bytes = b"") -> None:
        async with SqliteStore(self.path) as store:
            for reply, actor in votes:
                await Runs(store, secret=secret or self.secret).answer(run_id, reply, by=actor)

    async def cancel(self, run_id: str, actor: Actor) -> None:
        async with SqliteStore(self.path) as store:
            await Runs(store, secret=self.secret).cancel(run_id, "no", by=actor)

    async def act(self, **host: Any) -> None:
        """Act on every signal that can be acted on, as a worker would."""
        async with SqliteStore(self.path) as store:
            agent = self.agent(store, "Done.", "Done.", "Done.", "Done.", **host)
            for _ in range(4):
                for run in await agent.unfinished_runs():
                    with contextlib.suppress(AgentfsmError):
                        await run

    def rows(self) -> Rows:
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            return db.execute("SELECT id, run_id, body, mac FROM signal").fetchall()

    def write(self, rows: Rows) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.execute("DELETE FROM signal")
            db.executemany("INSERT INTO signal (id, run_id, body, mac) VALUES (?, ?, ?, ?)", rows)
            db.commit()

    async def request(self, run_id: str = "one") -> tuple[int, str]:
        async with SqliteStore(self.path) as store:
            record = (await store.records(run_id))[-1]
            return record.seq, record.hash

    async def waits(self) -> bool:
        async with SqliteStore(self.path) as store:
            head = await store.head("one")
            return head is not None and head.status == "suspended"


async def sealed_by(world: World, secret: bytes, *actors: Actor, kind: Any = "answer") -> Rows:
    """Votes for what the run asks, sealed under a secret."""
    to = await world.request()
    reply = None if kind == "cancel" else HumanReply("allow")
    made = [Signal(signal_id("one", kind, to[1], a.id), "one", kind, to, 1e9, a, reply, "no") for a in actors]
    return [
        (each.id, each.run_id, each.body, bytes.fromhex(each.mac))
        for each in (seal_signal(m, Keyring(secret)) for m in made)
    ]


async def sealed_by_another_tenant(world: World) -> None:
    world.write(await sealed_by(world, OTHER, ANN, BOB))


async def cancelled_by_another_tenant(world: World) -> None:
    world.write(await sealed_by(world, OTHER, ANN, kind="cancel"))


async def without_a_mac(world: World) -> None:
    world.write([(i, r, body, b"") for i, r, body, _ in await sealed_by(world, OTHER, ANN, BOB)])


async def mac_of_another_row(world: World) -> None:
    await world.send("two", (Allow(), ANN))
    ((*_, mac),) = world.rows()
    world.write([(i, r, body, mac) for i, r, body, _ in await sealed_by(world, OTHER, ANN, BOB)])


async def moved_from_another_run(world: World) -> None:
    await world.send("two", (Allow(), ANN), (Allow(), BOB))
    world.write([(i, "one", body, mac) for i, _, body, mac in world.rows()])


async def moved_with_the_run_in_the_body(world: World) -> None:
    await world.send("two", (Allow(), ANN), (Allow(), BOB))
    world.write([(i, "one", body.replace('"two"', '"one"'), mac) for i, _, body, mac in world.rows()])


async def moved_with_request_and_run(world: World) -> None:
    await world.send("two", (Allow(), ANN), (Allow(), BOB))
    seq, digest = await world.request()
    changed = [{**json.loads(body), "run": "one", "to": [seq, digest]} for _, _, body, _ in world.rows()]
    macs = [mac for *_, mac in world.rows()]
    world.write([(str(body["id"]), "one", json.dumps(body), mac) for body, mac in zip(changed, macs, strict=True)])


async def one_vote_twice(world: World) -> None:
    await world.send("one", (Allow(), ANN))
    ((i, run, body, mac),) = world.rows()
    world.write([(i, run, body, mac), ("f" * 32, run, body, mac)])


async def one_vote_replayed_after_it_counted(world: World) -> None:
    await world.send("one", (Allow(), ANN))
    kept = world.rows()
    await world.act()
    world.write(kept)


async def one_vote_under_other_spellings(world: World) -> None:
    for name in ("ann", "ANN", " ann ", "a\u200bnn", "\uff41nn"):
        with contextlib.suppress(AgentfsmError):
            await world.send("one", (Allow(), Actor(name, ("manager",))))


async def roles_raised_in_the_row(world: World) -> None:
    await world.send("one", (Allow(), ANN))
    world.write([(i, r, body.replace('"ann"', '"bob"'), mac) for i, r, body, mac in world.rows()])


async def somebody_without_the_role(world: World) -> None:
    for actor in (CLERK, Actor("dan"), EVE):  # Eve asked for the payment herself
        with contextlib.suppress(AgentfsmError):
            await world.send("one", (Allow(), actor))
    world.write([*world.rows(), *await sealed_by(world, SECRET, CLERK, Actor("dan"), EVE)])  # past the checks of Runs


async def cancelled_by_somebody_without_the_role(world: World) -> None:
    with contextlib.suppress(AgentfsmError):
        await world.cancel("one", CLERK)
    world.write([*world.rows(), *await sealed_by(world, SECRET, CLERK, kind="cancel")])


async def for_an_earlier_request(world: World) -> None:
    """Two approvals of the first payment, kept until the run asks for a second one."""
    await world.send("one", (Allow(), ANN), (Allow(), BOB))
    kept = world.rows()
    world.write([])
    await world.send("one", (Deny("not this one"), ANN))
    async with SqliteStore(world.path) as store:
        agent = world.agent(store, call("pay", amount=7))
        for run in await agent.unfinished_runs():
            if run.run_id == "one":
                assert isinstance((await run).outcome, UserInputRequested)
    world.write(kept)


async def nonsense(world: World) -> None:
    world.write(
        [("a", "one", "{}", b"0"), ("b", "one", "", b""), ("c", "one", "[]", b"x" * 64), ("d", "none", "null", b"0")]
    )


ATTACKS = (
    sealed_by_another_tenant,
    cancelled_by_another_tenant,
    without_a_mac,
    mac_of_another_row,
    moved_from_another_run,
    moved_with_the_run_in_the_body,
    moved_with_request_and_run,
    one_vote_twice,
    one_vote_replayed_after_it_counted,
    one_vote_under_other_spellings,
    roles_raised_in_the_row,
    somebody_without_the_role,
    cancelled_by_somebody_without_the_role,
    for_an_earlier_request,
    nonsense,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__ for attack in ATTACKS])
def test_no_attack_with_signals_succeeds(attack: Callable[[World], Any], tmp_path: Path) -> None:
    world = World(tmp_path / "runs.db")
    asyncio.run(world.ask("one", "two"))
    asyncio.run(attack(world))
    asyncio.run(world.act())
    assert world.paid == []
    assert asyncio.run(world.waits())


def test_what_is_honestly_sent_is_acted_on(tmp_path: Path) -> None:
    """Without this, a host that acts on nothing would pass."""
    world = World(tmp_path / "runs.db")
    asyncio.run(world.ask("one", "two"))
    asyncio.run(world.send("one", (Allow(), ANN), (Allow(), BOB)))
    asyncio.run(world.act())
    assert world.paid == [5]
    asyncio.run(world.cancel("two", ANN))
    asyncio.run(world.act())
    assert world.paid == [5]
    assert world.rows() == []


def test_claimed_votes_do_not_count_for_a_host_that_authenticates(tmp_path: Path) -> None:
    def authenticate(token: Any) -> Actor:
        return Actor(str(token), ("manager",))

    world = World(tmp_path / "runs.db")
    asyncio.run(world.ask("one"))
    asyncio.run(world.send("one", (Allow(), ANN), (Allow(), BOB)))
    asyncio.run(world.act(authenticate=authenticate))
    assert world.paid == []
    assert asyncio.run(world.waits())


# -- two processes at once --------------------------------------------------------------------------------


class Rival:
    """Another process that answers; it stops before it writes until it is told to go on."""

    def __init__(self, url: str, paid: Path) -> None:
        command = [sys.executable, "-m", "tests.helpers.rival_answers", url, str(paid)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    async def begins(self, **command: Any) -> str:
        """Begin a command: "checked" if it is about to write, else what refused it."""
        self.write(json.dumps(command))
        return await asyncio.to_thread(self.read)

    async def goes_on(self) -> str:
        """Write, and return "done", or what refused it."""
        self.write("go")
        return await asyncio.to_thread(self.read)

    def stop(self) -> None:
        with self.process:
            self.process.kill()


class Duel:
    """A store that two rivals answer while this process owns it, if it is a file."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.paid_file = url, folder / "paid"
        self.paid_file.touch()
        self.rivals = Rival(url, self.paid_file), Rival(url, self.paid_file)

    def paid(self, run_id: str) -> list[int]:
        lines = [line.split() for line in self.paid_file.read_text().splitlines()]
        return [int(amount) for run, amount in lines if run == run_id]

    async def both(self, *commands: dict[str, Any]) -> list[str]:
        """What comes of two commands of which each is checked before the other one writes."""
        pairs = list(zip(self.rivals, commands, strict=True))
        begun = [await rival.begins(**command) for rival, command in pairs]  # at different times
        ended = [
            rival.goes_on() if said == "checked" else asyncio.sleep(0, said)
            for rival, said in zip(self.rivals, begun, strict=True)
        ]
        return list(await asyncio.gather(*ended))

    async def play(self, scene: Callable[[Scene], Awaitable[None]], people: int) -> None:
        async with open_store(self.url) as store:
            scene_of = Scene(self, store, f"{scene.__name__}-{uuid.uuid4().hex[:8]}")
            await scene_of.agent(call("pay", amount=5, people=people)).run("Pay.", run_id=scene_of.run_id, actor=EVE)
            await scene(scene_of)
            assert (await Runs(store, secret=rival_answers.SECRET).verify(scene_of.run_id)).code in (GOOD, OPEN)


class Scene:
    """A run that waits, and the process that acts on what is sent to it."""

    def __init__(self, duel: Duel, store: Store, run_id: str) -> None:
        self.duel, self.store, self.run_id = duel, store, run_id

    def agent(self, *script: Any) -> Agent:
        return rival_answers.payer(self.store, self.duel.paid_file, *script)

    def command(self, what: str, reply: str, by: str, **more: Any) -> dict[str, Any]:
        return {"what": what, "run": self.run_id, "reply": reply, "by": by, **more}

    async def both(self, what: str, *replies: tuple[str, str]) -> list[str]:
        return await self.duel.both(*(self.command(what, *each) for each in replies))

    async def acts(self, *script: Any) -> None:
        """Go on with the run for as long as there is something to do."""
        while run := await self.agent(*(script or ("Done.",))).next_run(self.run_id):
            await run

    async def request(self) -> StoredRequest:
        found = (await Runs(self.store).get(self.run_id)).request
        assert found is not None
        return found

    async def votes(self) -> list[str]:
        quorum = (await self.request()).quorum
        return [] if quorum is None else [vote.id for vote in quorum.votes]

    async def denials(self) -> int:
        ledger = (await Runs(self.store).get(self.run_id)).ledger
        return sum(each.answer == "deny" for each in ledger.decisions)

    @property
    def paid(self) -> list[int]:
        return self.duel.paid(self.run_id)


async def the_same_person_votes_in_both(scene: Scene) -> None:
    assert sorted(await scene.both("send", ("allow", "bob"), ("allow", "bob"))) == ["StaleHumanReplyError", "done"]
    await scene.acts()
    assert (scene.paid, await scene.votes()) == ([], ["bob"])


async def the_same_person_votes_under_two_spellings(scene: Scene) -> None:
    await scene.both("send", ("allow", "bob"), ("allow", " B\u200bOB"))
    await scene.acts()
    votes = await scene.votes()
    assert (scene.paid, len(votes), is_same_id(votes[0], "bob")) == ([], 1, True)


async def the_last_vote_and_a_denial(scene: Scene) -> None:
    await scene.agent().resume(scene.run_id, Allow(), by=ANN)
    for rival, reply, by in zip(scene.duel.rivals, ("allow", "deny"), ("bob", "cy"), strict=True):
        assert await rival.begins(**scene.command("send", reply, by)) == "checked"
    assert [await rival.goes_on() for rival in scene.duel.rivals] == ["done", "done"]
    await scene.acts()
    assert (scene.paid, await scene.denials()) == ([], 1)


async def the_last_vote_and_a_cancellation(scene: Scene) -> None:
    await scene.agent().resume(scene.run_id, Allow(), by=ANN)
    commands = scene.command("send", "allow", "bob"), scene.command("cancel", "", "cy")
    assert await scene.duel.both(*commands) == ["done", "done"]
    await scene.acts()
    assert (scene.paid, (await Runs(scene.store).get(scene.run_id)).info.ending) == ([], "cancelled")


async def two_votes_of_which_one_is_the_requesters(scene: Scene) -> None:
    assert await scene.both("send", ("allow", "bob"), ("allow", "eve")) == ["done", "ActorIsRequesterError"]
    await scene.acts()
    assert (scene.paid, await scene.votes()) == ([], ["bob"])


async def a_vote_that_was_checked_before_the_same_one_counted(scene: Scene) -> None:
    late, rival = scene.duel.rivals
    assert await late.begins(**scene.command("send", "allow", "bob")) == "checked"
    assert await rival.begins(**scene.command("send", "allow", "bob")) == "checked"
    assert await rival.goes_on() == "done"
    await scene.acts()
    await late.goes_on()
    await scene.acts()
    assert (scene.paid, await scene.votes()) == ([], ["bob"])


async def _replaced_meanwhile(scene: Scene, **to: str) -> None:
    """An approval is checked, the call is denied, the model asks for another one, and then the approval is written."""
    late, rival = scene.duel.rivals
    assert await late.begins(**scene.command("send", "allow", "bob", **to)) == "checked"
    assert await rival.begins(**scene.command("send", "deny", "cy")) == "checked"
    assert await rival.goes_on() == "done"
    people = 1 if (await scene.request()).quorum is None else 2
    await scene.acts(call("pay", amount=700, people=people))
    assert (await scene.request()).arguments["amount"] == 700
    await late.goes_on()
    await scene.acts()
    assert (scene.paid, await scene.denials(), (await scene.request()).arguments["amount"]) == ([], 1, 700)


async def an_approval_of_a_request_that_is_replaced(scene: Scene) -> None:
    await _replaced_meanwhile(scene)


async def a_bound_approval_of_a_request_that_is_replaced(scene: Scene) -> None:
    await _replaced_meanwhile(scene, to=(await scene.request()).digest)


async def an_approval_and_a_denial(scene: Scene) -> None:
    said = await scene.both("send", ("allow", "bob"), ("deny", "cy"))
    assert sorted(said) == ["StaleHumanReplyError", "done"]
    await scene.acts()
    assert (scene.paid, await scene.denials()) == (([5], 0) if said[0] == "done" else ([], 1))


async def two_approvals_of_one_call(scene: Scene) -> None:
    said = await scene.both("send", ("allow", "bob"), ("allow", "cy"))
    assert sorted(said) == ["StaleHumanReplyError", "done"]
    await scene.acts()
    assert scene.paid == [5]


async def an_approval_and_an_edit(scene: Scene) -> None:
    said = await scene.both("send", ("allow", "bob"), ("edit", "cy"))
    assert sorted(said) == ["StaleHumanReplyError", "done"]
    await scene.acts()
    assert scene.paid == ([5] if said[0] == "done" else [500])


OF_TWO = (
    the_same_person_votes_in_both,
    the_same_person_votes_under_two_spellings,
    the_last_vote_and_a_denial,
    the_last_vote_and_a_cancellation,
    two_votes_of_which_one_is_the_requesters,
    a_vote_that_was_checked_before_the_same_one_counted,
    an_approval_of_a_request_that_is_replaced,
    a_bound_approval_of_a_request_that_is_replaced,
)
OF_ONE = (
    an_approval_of_a_request_that_is_replaced,
    a_bound_approval_of_a_request_that_is_replaced,
    an_approval_and_a_denial,
    two_approvals_of_one_call,
    an_approval_and_an_edit,
)


async def two_processes_approve_and_go_on(scene: Scene) -> None:
    said = await scene.both("resume", ("allow", "bob"), ("allow", "cy"))
    assert sum(each == "done" for each in said) == 1
    assert scene.paid == [5]


async def two_processes_have_the_same_vote(scene: Scene) -> None:
    said = await scene.both("resume", ("allow", "bob"), ("allow", "bob"))
    assert sum(each == "done" for each in said) == 1
    assert (scene.paid, await scene.votes()) == ([], ["bob"])


async def two_processes_have_a_vote_and_a_denial(scene: Scene) -> None:
    await scene.agent().resume(scene.run_id, Allow(), by=ANN)
    said = await scene.both("resume", ("allow", "bob"), ("deny", "cy"))
    assert sum(each == "done" for each in said) == 1
    assert (scene.paid, await scene.denials()) == (([5], 0) if said[0] == "done" else ([], 1))


async def two_processes_act_on_the_same_votes(scene: Scene) -> None:
    for actor in (ANN, BOB):
        await Runs(scene.store, secret=rival_answers.SECRET).answer(scene.run_id, Allow(), by=actor)
    await scene.both("act", ("", ""), ("", ""))
    await scene.acts()
    assert scene.paid == [5]


ON_A_SERVER = (
    (two_processes_approve_and_go_on, 1),
    (two_processes_have_the_same_vote, 2),
    (two_processes_have_a_vote_and_a_denial, 2),
    (two_processes_act_on_the_same_votes, 2),
)
DUELS = [(scene, people) for people, scenes in ((2, OF_TWO), (1, OF_ONE)) for scene in scenes]


@pytest.fixture(scope="module")
def file_duel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duel]:
    folder = tmp_path_factory.mktemp("duel")
    asyncio.run(create_file(folder / "runs.db"))
    yield from _duel(str(folder / "runs.db"), folder)


async def create_file(path: Path) -> None:
    async with SqliteStore(path) as store:
        await store.maintenance.prepare()


@pytest.fixture(scope="module")
def server_duel(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duel]:
    yield from _duel(database, tmp_path_factory.mktemp("duel"))


def _duel(url: str, folder: Path) -> Iterator[Duel]:
    duel = Duel(url, folder)
    yield duel
    for rival in duel.rivals:
        rival.stop()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="there are no Unix sockets")
@pytest.mark.parametrize(("scene", "people"), DUELS)
def test_no_two_processes_at_once_have_a_call_made_through_the_owner_of_a_file(
    file_duel: Duel, scene: Any, people: int
) -> None:
    asyncio.run(file_duel.play(scene, people))


@pytest.mark.parametrize(("scene", "people"), [*DUELS, *ON_A_SERVER])
def test_no_two_processes_at_once_have_a_call_made_on_a_server(server_duel: Duel, scene: Any, people: int) -> None:
    asyncio.run(server_duel.play(scene, people))


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    counted(f"answers and cancellations in a store: {len(ATTACKS) + 1} attacks, 0 succeeded")
    counted(f"answers of two processes at once: {2 * len(DUELS) + len(ON_A_SERVER)} attacks, 0 succeeded")
