"""``Runs(store, tenant=...)``: the runs of others do not exist, whatever is called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    ConfigurationError,
    Host,
    MemoryStore,
    RunError,
    RunExistsError,
    RunQuery,
    Runs,
    SqliteStore,
    UnknownRunError,
    open_store,
    tool,
)
from agentfsm.cli.app import run_app
from agentfsm.journal.erasure import ErasureQuery
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import RetentionRule
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.signals import read_signals
from agentfsm.journal.store import Store
from agentfsm.journal.tenant_store import TenantStore
from agentfsm.loop.keys import Keyring
from agentfsm.testing import RecordingModel, ScriptedModel, call

SECRET = b"the secret of this host, long enough"
OWN, OTHER, NOBODYS = "acme-1", "evil-1", "none-1"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


async def fill(store: Store) -> None:
    """A run of each of two tenants that waits, one of nobody, and one of each tenant that has ended."""
    for run_id, tags in ((OWN, ["tenant:acme", "x"]), (OTHER, ["tenant:evil", "x"]), (NOBODYS, ["x"])):
        host = Host(store=store, secret=SECRET)
        waits = Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay], host=host)
        await waits.run("Pay the canary.", run_id=run_id, tags=tags, session_id="talk")
        ends = Agent(ScriptedModel(["Done, canary."]), host=host)
        await ends.run("Pay the canary.", run_id=f"{run_id}-done", tags=tags, actor="ann")


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")


def with_runs(store: Store, work: Callable[[Runs, Runs], Awaitable[None]]) -> None:
    """Some work with the runs of one tenant, and with all runs."""

    async def scenario() -> None:
        async with store:
            await fill(store)
            await work(Runs(store, secret=SECRET, tenant="acme"), Runs(store, secret=SECRET))

    asyncio.run(scenario())


def test_only_own_runs_are_listed_and_counted(store: Store) -> None:
    async def work(own: Runs, every: Runs) -> None:
        for query in (None, RunQuery(tag="x"), RunQuery(session_id="talk"), RunQuery(text="canary"), RunQuery(limit=1)):
            found = [info.run_id async for info in own.iterate(query)]
            assert {*found} <= {OWN, f"{OWN}-done"}
            assert await own.count(query) == len(found) > 0
        others = [
            RunQuery(tag="tenant:evil"),
            RunQuery(run_id=OTHER),
            RunQuery(exact_id=OTHER),
            RunQuery(run_id="none"),
        ]
        for query in others:
            assert (await own.list(query)).runs == ()
            assert await own.count(query) == 0
        assert await every.count() == 6

    with_runs(store, work)


@pytest.mark.parametrize("run_id", [OTHER, OTHER[:4], NOBODYS, f"{OTHER}-done"])
def test_whatever_is_done_with_the_run_of_another_is_done_with_no_run(store: Store, run_id: str) -> None:
    async def work(own: Runs, every: Runs) -> None:
        calls: list[Callable[[str], Awaitable[Any]]] = [
            own.request,
            own.get,
            own.verify,
            own.diagram,
            own.export,
            own.cancel,
            lambda of: own.replay(of, "standard"),
            lambda of: own.answer(of, Allow()),
            lambda of: own.fork(of, 1),
        ]
        for each in calls:
            told: list[str] = []
            for wanted in (run_id, "x" * len(run_id)):
                with pytest.raises(UnknownRunError) as raised:
                    await each(wanted)
                told.append(str(raised.value).replace(wanted, "RUN"))
            assert told[0] == told[1]
        view = own._store
        with pytest.raises(UnknownRunError):
            await view.acquire(run_id, "me")
        with pytest.raises(UnknownRunError):
            await view.maintenance.set_hold(run_id, Hold("mine"))
        assert await view.head(run_id) is None
        assert await every._store.maintenance.holds() == {}
        assert await read_signals(every._store.signals, Keyring(SECRET)) == []

    with_runs(store, work)


def test_who_chooses_an_id_that_another_tenant_uses_or_used_learns_that_alone(store: Store) -> None:
    async def work(own: Runs, every: Runs) -> None:
        everything, view = every._store, own._store
        for run_id, tags in (("queued", ["tenant:evil"]), ("gone", [])):
            lease = await everything.acquire(run_id, "a process that submits it", new=True)
            await everything.append(lease, (), "suspended", RunInfo(run_id, "suspended", tags=tuple(tags)))
            await everything.release(lease)
        assert set((await every.purge([f"{NOBODYS}-done", "gone"])).purged) == {f"{NOBODYS}-done", "gone"}
        before = {head.run_id: head for head in await everything.heads()}
        told: set[str] = set()
        for run_id in (OTHER, f"{OTHER}-done", NOBODYS, f"{NOBODYS}-done", "queued"):
            for new in (partial(view.acquire, run_id, "me", new=True), partial(own.fork, f"{OWN}-done", 1, run_id)):
                with pytest.raises(RunExistsError) as raised:
                    await new()
                told.add(str(raised.value).replace(run_id, "RUN"))
            assert await view.maintenance.was_purged(run_id)
            assert await view.maintenance.tombstones(run_id) == []
        assert told == {"the id 'RUN' cannot be used: another run has it or had it"}
        assert {head.run_id: head for head in await everything.heads()} == before
        await everything.release(await everything.acquire("claimed", "a process that died", new=True))
        assert not any([await view.maintenance.was_purged(each) for each in (OWN, "gone", "unknown", "claimed")])
        await view.release(await view.acquire("claimed", "me", new=True))

    with_runs(store, work)


def test_own_runs_are_read_answered_cancelled_and_forked(store: Store) -> None:
    async def work(own: Runs, every: Runs) -> None:
        assert (await own.get(OWN[:4] + "-1-d")).info.ending == "completed"
        fork = await own.fork(OWN, 1)
        assert (await own.get(fork)).info.run_id == fork
        foreign_fork = await every.fork(OTHER, 1)
        assert [head.run_id for head in await own._store.heads("cut off")] == [fork]
        assert [head.run_id for head in await every._store.heads("cut off")] == [fork, foreign_fork]
        await own.answer(OWN, Allow())
        await every.cancel(OTHER)
        assert [each.run_id for each in await own._store.signals.pending()] == [OWN]
        (foreign,) = await every._store.signals.pending(OTHER)
        await own._store.signals.remove(foreign.id)
        assert len(await every._store.signals.pending()) == 2
        assert [head.run_id for head in await own._store.heads("finished")] == [f"{OWN}-done"]

    with_runs(store, work)


def test_texts_are_found_redacted_and_erased_and_runs_purged_in_own_runs_only(store: Store) -> None:
    async def work(own: Runs, every: Runs) -> None:
        before = {run_id: await every.export(run_id) for run_id in (OTHER, f"{OTHER}-done", NOBODYS)}
        would = await own.redact_text("canary", dry_run=True)
        assert {each.run_id for each in would.deleted} == {OWN, f"{OWN}-done"}
        await every._store.maintenance.set_hold(OTHER, Hold("theirs"))
        assert await own._store.maintenance.holds() == {}
        await own.redact_text("canary")
        assert (await own.purge([f"{OTHER}-done", f"{NOBODYS}-done"])).purged == ()
        report = await own.erase(ErasureQuery(actor="ann", text="ann@example.org"))
        assert report.purged == (f"{OWN}-done",)
        assert (await own.purge(RetentionRule(days=0))).purged == ()
        assert {run_id: await every.export(run_id) for run_id in before} == before
        for runs in (own, every):
            assert [each.run_id for each in await runs._store.maintenance.tombstones()] == [f"{OWN}-done"]
        assert await Runs(store, tenant="evil")._store.maintenance.tombstones() == []

    with_runs(store, work)


def test_a_run_that_is_listed_under_a_tenant_and_is_not_theirs_cannot_be_opened(tmp_path: Path) -> None:
    """Whoever can change the columns by which runs are listed cannot have one tenant read what another one wrote."""
    import sqlite3

    async def scenario() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            await fill(store)
        db = sqlite3.connect(tmp_path / "runs.db")
        db.execute("UPDATE run_tag SET tag = 'tenant:acme' WHERE tag = 'tenant:evil'")
        db.execute("UPDATE run_info SET tags = replace(tags, 'evil', 'acme')")
        db.commit()
        db.close()
        async with SqliteStore(tmp_path / "runs.db") as store:
            own = Runs(store, tenant="acme")
            assert OTHER in {info.run_id for info in (await own.list()).runs}
            for each in (own.get, own.export, own.verify):
                with pytest.raises(UnknownRunError):
                    await each(OTHER)

    asyncio.run(scenario())


def test_a_run_of_two_tenants_is_seen_by_both_and_by_a_view_of_several(store: Store) -> None:
    async def work(own: Runs, every: Runs) -> None:
        agent = Agent(ScriptedModel(["Done."]), host=Host(store=store, secret=SECRET))
        await agent.run("Go.", run_id="shared", tags=["tenant:acme", "tenant:evil"])
        for tenant in ("acme", "evil"):
            assert (await Runs(store, tenant=tenant).get("shared")).info.run_id == "shared"
        view = Runs(TenantStore(store, ["acme", "evil"]))
        assert await view.count() == 5
        assert await view.count(RunQuery(tag="tenant:evil")) == 3
        assert await Runs(TenantStore(store, [])).count() == 0

    with_runs(store, work)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "*", "x" * 101])
def test_a_tenant_has_a_name_that_no_other_tag_is_listed_as(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a tenant"):
        Runs(MemoryStore(), tenant=name)


def test_a_run_of_one_tenant_does_not_continue_the_session_of_another(store: Store) -> None:
    def session(said: str) -> Any:
        return Agent(ScriptedModel([said]), host=Host(store=store, secret=SECRET)).session("talk-1")

    async def main() -> None:
        await session("The canary.").run("Hello.", tags=["tenant:evil"])
        with pytest.raises(RunError, match="has a run of another tenant"):
            await session("Sorry.").run("What was said?", tags=["tenant:acme", "x"])
        assert (await session("Yes.").run("Still there?", tags=["x", "tenant:evil"])).output == "Yes."

    asyncio.run(main())


def test_a_run_without_a_tenant_belongs_to_the_tenant_whose_session_it_continues(store: Store) -> None:
    def session(said: str) -> Any:
        return Agent(ScriptedModel([said]), host=Host(store=store, secret=SECRET)).session("talk-1")

    async def main() -> None:
        await session("The canary.").run("Hello.", tags=["tenant:evil"])
        result = await session("Yes.").run("Still there?", tags=["x"])  # such as agentfsm run --session talk-1
        own = Runs(store, secret=SECRET, tenant="evil")
        assert (await own.get(result.run_id)).info.tags == ("x", "tenant:evil")
        with pytest.raises(RunError, match="has a run of another tenant"):
            await session("Sorry.").run("What was said?", tags=["tenant:acme"])
        assert (await session("Yes.").run(None)).output == "Yes."
        with pytest.raises(RunError, match="has a run of another tenant"):
            await session("Sorry.").run(None, tags=["tenant:acme"])

    asyncio.run(main())


@pytest.mark.parametrize("action", ["resume", "dismiss"])
def test_the_session_of_another_tenant_is_continued_by_its_id_unless_the_agent_has_a_store_of_its_tenant(
    store: Store, action: str
) -> None:
    def session(own: Store, *script: Any) -> Any:
        agent = Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=own, secret=SECRET))
        return agent.session("talk-1")

    async def main() -> None:
        await session(store, call("pay", amount=1)).run("Pay.", tags=["tenant:evil"])
        own, given = TenantStore(store, ["acme"]), (Allow(),) if action == "resume" else ("no",)
        with pytest.raises(RunError, match="has no run yet"):
            await getattr(session(own, "Paid."), action)(*given)
        assert (await session(store).last_run()).status == "suspended"
        await getattr(session(store, "Paid."), action)(*given)
        assert (await session(store).last_run()).status == "finished"

    asyncio.run(main())


def test_two_tenants_with_stores_of_their_own_may_have_sessions_with_the_same_id(store: Store) -> None:
    async def main() -> None:
        for tenant in ("evil", "acme", "evil", "acme"):
            host = Host(store=TenantStore(store, [tenant]), secret=SECRET)
            model = RecordingModel(ScriptedModel([f"Hello, {tenant}."]))
            await Agent(model, host=host).session("talk").run(f"I am {tenant}.", tags=[f"tenant:{tenant}"])
            others = {"evil", "acme"} - {tenant}
            assert not any(each in str(model.requests) for each in others)
        for tenant in ("evil", "acme"):
            found = await TenantStore(store, [tenant]).find_runs(RunQuery(session_id="talk"))
            assert [info.prompt for info in found.runs] == [f"I am {tenant}."] * 2

    asyncio.run(main())


def test_what_a_tenant_submits_is_theirs_and_shares_no_key_with_others(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="requests are encrypted")
    activations: list[Any] = []

    class Queue:
        async def wake(self, activation: Any, *, delay_s: float = 0.0) -> bool:
            activations.append(activation)
            return True

        async def due(self, keys: Any) -> dict[str, float]:
            return {}

        async def list_set_aside(self, keys: Any = None) -> list[Any]:
            return []

    async def scenario() -> None:
        store = MemoryStore()
        acme, evil = (Runs(store, secret=SECRET, tenant=name, waker=Queue()) for name in ("acme", "evil"))  # type: ignore[arg-type]
        first = await acme.submit("clerk", "Go.", idempotency_key="order-7")
        assert first == await acme.submit("clerk", "Go.", idempotency_key="order-7")
        second = await evil.submit("clerk", "Go.", idempotency_key="order-7")
        assert first != second
        assert [each.tenant for each in activations] == ["acme", "acme", "evil"]
        assert (await acme.get(first)).info.tags == ("tenant:acme", "agent:clerk")
        with pytest.raises(UnknownRunError):
            await acme.get(second)
        with pytest.raises(RunError, match="cannot belong to another tenant"):
            await acme.submit("clerk", "Go.", tags=["tenant:evil"])

    asyncio.run(scenario())


COMMANDS = [
    ["show"],
    ["answer", "allow"],
    ["cancel"],
    ["link", "--as", "eve"],
    ["replay"],
    ["report"],
    ["export"],
    ["fork", "--at", "1"],
    ["verify"],
    ["store hold"],
    ["diff", "standard"],
    ["resume", "-m", "some-model", "--base-url", "http://127.0.0.1:9"],
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "runs.db"

    async def scenario() -> None:
        async with open_store(path) as store:
            await fill(store)

    asyncio.run(scenario())
    return path


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it says."""
    code = run_app(list(arguments))
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_for_a_tenant_knows_no_run_of_another(
    command: list[str], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    told: list[tuple[int, str]] = []
    for run_id in (OTHER, "x" * len(OTHER)):
        given = [*command[0].split(), run_id, *command[1:], "--store", str(file), "--tenant", "acme"]
        code, said = run_command(capsys, *given)
        assert (code, "there is no run" in said) == (2, True)
        told.append((code, said.replace(run_id, "RUN")))
    assert told[0] == told[1]


@pytest.mark.parametrize("command", [["unhold"], ["purge", "--yes"]], ids=lambda command: command[0])
def test_a_command_for_a_tenant_does_nothing_to_the_run_of_another(
    command: list[str], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET.decode())
    store = ("--store", str(file))
    assert run_command(capsys, "store", "hold", OTHER, *store)[0] == 0
    told: list[tuple[int, str]] = []
    for run_id in (OTHER, "x" * len(OTHER)):
        code, said = run_command(capsys, "store", command[0], run_id, *command[1:], *store, "--tenant", "acme")
        told.append((code, said.replace(run_id, "RUN")))
    assert told[0] == told[1]
    assert OTHER not in run_command(capsys, "store", "holds", *store, "--tenant", "acme")[1]
    assert OTHER in run_command(capsys, "store", "holds", *store)[1]
    assert run_command(capsys, "store", "unhold", OTHER, *store)[0] == 0


def test_the_runs_of_a_tenant_are_listed_on_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_command(capsys, "runs", "--store", str(file), "--tenant", "acme")
    assert (code, OWN in said, OTHER in said, NOBODYS in said) == (0, True, False, False)
    for name in ("acme", "evil"):
        assert run_command(capsys, "show", OWN, "--store", str(file), "--tenant", name)[0] == (
            0 if name == "acme" else 2
        )
    code, said = run_command(capsys, "runs", "--store", str(file), "--tenant", "a b")
    assert (code, "is not the name of a tenant" in said) == (2, True)
