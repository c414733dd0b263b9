"""Answers and cancellations that wait in a store: forged, replayed, moved, repeated, or sent by somebody who may not.

Each attack begins with a run that waits for two managers, and with signals that were honestly sent to other requests.
Afterwards a host acts on whatever it finds: nothing may be paid, and the run waits on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Actor, Agent, Allow, Approval, Deny, Host, Runs, SqliteStore, UserInputRequested, tool
from agentfsm.errors import AgentfsmError
from agentfsm.journal.signals import Signal, seal_signal, signal_id
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call

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


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    counted(f"answers and cancellations in a store: {len(ATTACKS) + 1} attacks, 0 succeeded")
