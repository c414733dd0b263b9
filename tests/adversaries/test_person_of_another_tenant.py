"""A person of another tenant: whatever he asks of ``Runs(store, tenant=...)``, others' runs are not read or changed.

Written from SECURITY.md: he knows the ids, sessions, actors, tags and texts of the other tenant's runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agentfsm import Agent, AgentfsmError, Allow, Deny, Edit, Host, MemoryStore, RunQuery, Runs, tool
from agentfsm.journal.erasure import ErasureQuery
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import RetentionRule, end_hold, hold_run
from agentfsm.journal.redact import redact
from agentfsm.journal.store import Store
from agentfsm.journal.tenant_store import TenantStore, tenant_tag
from agentfsm.journal.text_search import RunFilter
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call

SECRET = b"the secret of this host, long enough"
KEYRING = Keyring(SECRET)
OTHER, DONE, CHILD = "evil-1", "evil-2", "evil-3-1.0"
CANARY = "kq8Zt3wv5"
"""In each prompt, argument and answer of the other tenant."""


@tool(requires_approval=True)
def pay(note: str) -> str:
    """Pay."""
    return f"paid {note}"


async def fill(store: Store) -> None:
    """A run of each tenant that waits and one that has ended; of the other one also one with a sub-agent."""

    def agent(*script: Any, tools: Any = (pay,)) -> Agent[Any, Any]:
        return Agent(ScriptedModel(list(script)), tools=list(tools), host=Host(store=store, secret=SECRET))

    for tenant, text in (("acme", "own"), ("evil", CANARY)):
        common: Any = {"session_id": f"talk {text}", "actor": f"ann of {tenant}"}
        tags = [tenant_tag(tenant), "billing"]
        await agent(call("pay", note=text)).run(f"Pay {text}.", run_id=f"{tenant}-1", tags=tags, **common)
        await agent(f"Done, {text}.").run(f"Say {text}.", run_id=f"{tenant}-2", tags=tags, **common)
    helper = Agent(ScriptedModel([f"It is {CANARY}."])).as_tool("helper", "Helps.")
    asks = agent(call("helper", task=f"Look for {CANARY}."), "Done.", tools=[helper])
    await asks.run(f"Ask {CANARY}.", run_id="evil-3", tags=[tenant_tag("evil")])


async def everything(found: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in found]


Attack = Callable[[Runs], Awaitable[Any]]


def each_run(what: Callable[[Runs, str], Awaitable[Any]]) -> list[Attack]:
    """An attack on each of the other tenant's runs."""
    return [lambda own, of=run_id: what(own, of) for run_id in (OTHER, DONE, CHILD)]  # type: ignore[misc]


def query(**wanted: Any) -> list[Attack]:
    """A question whose answer would name the other tenant's runs, to the list and to the count."""
    return [
        lambda own: everything(own.iterate(RunQuery(**wanted))),
        lambda own: _must_be_none(own.count(RunQuery(**wanted))),
    ]


async def _must_be_none(count: Awaitable[int]) -> str:
    return CANARY if await count else ""


def view(own: Runs) -> Any:
    return own._store


def as_tenant(name: str) -> Attack:
    return lambda own: everything(Runs(view(own)._store, tenant=name, secret=SECRET).iterate())


def agent_of(own: Runs) -> Agent[Any, Any]:
    return Agent(ScriptedModel(["x"]), tools=[pay], host=Host(store=view(own), secret=SECRET))


NAMES = (
    "EVIL", " evil", "evil ", "evil\n", "*", "%", "acme,evil", "", "tenant:evil", "\u0435vil", "acme\x00evil",
)  # fmt: skip

ATTACKS: dict[str, list[Attack]] = {
    "open it": each_run(lambda own, of: own.get(of)),
    "open it by the beginning of its id": [lambda own: own.get("evil"), lambda own: own.get("e")],
    "see what it waits for": each_run(lambda own, of: own.request(of)),
    "export it": each_run(lambda own, of: own.export(of)),
    "verify it": each_run(lambda own, of: own.verify(of)),
    "draw it": each_run(lambda own, of: own.diagram(of)),
    "replay it": each_run(lambda own, of: own.replay(of, "standard")),
    "fork it": each_run(lambda own, of: own.fork(of, 1)),
    "answer it": [lambda own, a=answer: own.answer(OTHER, a) for answer in (Allow(), Deny("no"), Edit({}), "text")],
    "cancel it": each_run(lambda own, of: own.cancel(of)),
    "redact it": [
        lambda own: own.redact_text(CANARY),
        lambda own: own.redact_text("pay"),
        lambda own: own.redact_text(CANARY, runs=RunFilter(run_id=OTHER)),
        *each_run(lambda own, of: own.redact(of, "1")),
        *each_run(lambda own, of: redact(view(own), of, "1", KEYRING)),
    ],
    "find its text": [
        lambda own: own.redact_text(CANARY, dry_run=True),
        lambda own: own.redact_text(CANARY, runs=RunFilter(run_id=DONE), dry_run=True),
        lambda own: own.redact_text(CANARY, runs=RunFilter(session_id=f"talk {CANARY}"), dry_run=True),
        lambda own: own.redact_text(CANARY, runs=RunFilter(tag="tenant:evil"), dry_run=True),
        lambda own: own.redact_text("ann of evil", dry_run=True),
    ],
    "purge it": [
        *each_run(lambda own, of: own.purge([of])),
        lambda own: own.purge(RetentionRule(days=0, tag="tenant:evil")),
        lambda own: own.purge(RetentionRule(days=0, session_id=f"talk {CANARY}")),
    ],
    "erase it": [
        lambda own: own.erase(ErasureQuery(actor="ann of evil")),
        lambda own: own.erase(ErasureQuery(session_id=f"talk {CANARY}")),
        lambda own: own.erase(ErasureQuery(tag="tenant:evil")),
        lambda own: own.erase(ErasureQuery(text=CANARY)),
    ],
    "list it": [
        *query(run_id=OTHER),
        *query(tag="tenant:evil"),
        *query(tag="%evil"),
        *query(any_tag=("tenant:evil", "tenant:%")),
        *query(text=CANARY),
        *query(session_id=f"talk {CANARY}"),
        *query(actor="ann of evil"),
        *query(parent="evil-3"),
        *query(run_id="evil%"),
        lambda own: everything(own.iterate(RunQuery(limit=1))),
        lambda own: own.list(RunQuery(after="9" * 18)),
        lambda own: own.list(RunQuery(after="5", limit=500)),
    ],
    "hold it, or end its hold": [
        *each_run(lambda own, of: hold_run(view(own), of, Hold("mine"), KEYRING)),
        *each_run(lambda own, of: end_hold(view(own), of, KEYRING)),
        lambda own: view(own).maintenance.set_hold(DONE, None),
        lambda own: view(own).maintenance.holds(),
    ],
    "read its records": [
        *each_run(lambda own, of: view(own).records(of)),
        *each_run(lambda own, of: view(own).head(of)),
        lambda own: view(own).heads(),
        lambda own: view(own).heads("suspended"),
        lambda own: view(own).signals.pending(OTHER),
        lambda own: view(own).signals.pending(),
        lambda own: view(own).maintenance.tombstones(),
    ],
    "write it": [
        *each_run(lambda own, of: view(own).acquire(of, "me", keyring=KEYRING)),
        *each_run(lambda own, of: view(own).acquire(of, "me", new=True, keyring=KEYRING)),
    ],
    "go on with it": [
        lambda own: agent_of(own).resume(OTHER, Allow()),
        lambda own: agent_of(own).unfinished_runs(),
        lambda own: agent_of(own).session(f"talk {CANARY}").run("Say it again."),
    ],
    "have another name": [as_tenant(name) for name in NAMES],
}  # fmt: skip


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [run_id for run_id, export in before.items() if after.get(run_id) != export]


async def outcome(attack: Attack) -> str:
    """What an attack shows him, and what it does to the other tenant's runs; empty if it does not succeed."""
    async with MemoryStore() as store:
        await fill(store)
        every = Runs(store, secret=SECRET)
        await hold_run(store, DONE, Hold("theirs", "ann", 1000.0), KEYRING)
        before = {head.run_id: await every.export(head.run_id) for head in await store.heads() if "evil" in head.run_id}
        holds, wanted = await store.maintenance.holds(), TenantStore(store, ["acme"])
        try:
            seen = await attack(Runs(wanted, secret=SECRET))
        except AgentfsmError as error:
            seen = error
        shown = f"{seen!r} {seen}"
        after = {head.run_id: await every.export(head.run_id) for head in await store.heads() if head.run_id in before}
        damage = changed(before, after)
        signals = [each for each in await store.signals.pending() if each.run_id in before]
        kept = {run_id: hold for run_id, hold in (await store.maintenance.holds()).items() if run_id in before}
        read = shown if CANARY in shown else ""
        return f"{read}{damage or ''}{signals or ''}{'' if kept == holds else kept}"


CASES = [(name, number) for name, attacks in ATTACKS.items() for number in range(len(attacks))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_no_attack_of_another_tenant_succeeds(name: str, number: int) -> None:
    assert asyncio.run(outcome(ATTACKS[name][number])) == ""


def test_an_attack_that_succeeds_is_noticed() -> None:
    assert CANARY in asyncio.run(outcome(lambda own: Runs(view(own)._store, secret=SECRET).get(DONE)))
    assert "evil-1" in asyncio.run(outcome(lambda own: Runs(view(own)._store, secret=SECRET).cancel(OTHER)))


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    assert len(CASES) >= 40
    counted(f"a person of another tenant: {len(CASES)} attacks, 0 succeeded")
