"""``Runs``: stored runs are listed, searched, read, verified, drawn, replayed, exported and forked without an agent."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    ConfigurationError,
    Edit,
    Host,
    JournalError,
    MemoryStore,
    MissingExtraError,
    RunQuery,
    Runs,
    SqliteStore,
    StaleHumanReplyError,
    TransientProviderError,
    UnknownRunError,
    tool,
)
from agentfsm.journal.checkpoint import SignedHeads, verify_store
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import hold_run
from agentfsm.journal.records import SealedRecord, read_lines
from agentfsm.journal.redact import TextRedaction
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, UNVERIFIABLE, verify
from agentfsm.loop.keys import Keyring
from agentfsm.report.ledger import REDACTED_TEXT
from agentfsm.testing import FakeClock, ScriptedModel, call

SECRET = b"the secret of this shop"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def shop(store: Any, *script: Any) -> Agent:
    return Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=store, secret=SECRET, clock=FakeClock()))


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")


def with_runs(store: Any, work: Callable[[Runs], Awaitable[Any]], **options: Any) -> Any:
    """What some work returns on a store with three runs: one paid, one waits, one had a failure."""

    async def scenario() -> Any:
        await shop(store, "Tea is 4.50.").run(
            "What is tea?", run_id="tea-1", tags=["info"], actor="ann", metadata={"order": 7}
        )
        await shop(store, call("pay", amount=5)).run("Pay 5.", run_id="pay-1", tags=["billing"], session_id="s")
        await shop(store, TransientProviderError("busy"), "Done.").run("Go.", run_id="tea-2")
        try:
            return await work(Runs(store, **options))
        finally:
            await store.aclose()

    return asyncio.run(scenario())


def ids(page: Any) -> list[str]:
    return [info.run_id for info in page.runs]


def test_a_request_of_a_sub_agent_is_listed_once_for_the_run_to_answer(store: Any) -> None:
    async def scenario() -> None:
        clerk = shop(None, call("pay", amount=5), "Paid.")
        tools, host = [clerk.as_tool("clerk", "Pays.")], Host(store=store, secret=SECRET)
        agent = Agent(ScriptedModel([call("clerk", task="Pay 5."), "Done."]), tools=tools, host=host)
        await agent.run("Pay 5.", run_id="caller")
        runs = Runs(store, secret=SECRET)
        assert len(ids(await runs.list(RunQuery(status="suspended")))) == 2
        (listed,) = ids(await runs.list(RunQuery(status="suspended", parent="")))
        request = (await runs.get(listed)).request
        assert request is not None
        assert (request.run_id, request.tool, dict(request.arguments)) == ("caller", "pay", {"amount": 5})
        await runs.approve(listed, to=request.digest)
        await store.aclose()

    asyncio.run(scenario())


def test_the_newest_run_is_listed_first_a_page_at_a_time(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert ids(await runs.list()) == ["tea-2", "pay-1", "tea-1"]
        first = await runs.list(RunQuery(limit=2))
        assert ids(first) == ["tea-2", "pay-1"]
        assert ids(await runs.list(RunQuery(limit=2, after=first.next))) == ["tea-1"]
        assert [info.run_id async for info in runs.iterate(RunQuery(limit=1))] == ["tea-2", "pay-1", "tea-1"]

    with_runs(store, work)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (RunQuery(tag="billing"), ["pay-1"]),
        (RunQuery(metadata={"order": 7}), ["tea-1"]),
        (RunQuery(metadata={"order": "8"}), []),
        (RunQuery(actor="ann"), ["tea-1"]),
        (RunQuery(session_id="s"), ["pay-1"]),
        (RunQuery(status="suspended"), ["pay-1"]),
        (RunQuery(ending="completed"), ["tea-2", "tea-1"]),
        (RunQuery(text="TEA"), ["tea-1"]),
        (RunQuery(run_id="tea"), ["tea-2", "tea-1"]),
        (RunQuery(exact_id="tea"), []),
        (RunQuery(exact_id="tea-1"), ["tea-1"]),
        (RunQuery(exact_id="pay-1", tag="billing"), ["pay-1"]),
        (RunQuery(exact_id="tea-1", tag="billing"), []),
        (RunQuery(exact_id="tea-1", metadata={"order": 7}), ["tea-1"]),
        (RunQuery(exact_id="tea-2", metadata={"order": 7}), []),
        (RunQuery(model="nobody"), []),
    ],
)
def test_runs_are_searched(store: Any, query: RunQuery, found: list[str]) -> None:
    async def work(runs: Runs) -> None:
        assert ids(await runs.list(query)) == found
        assert await runs.count(query) == len(found)

    with_runs(store, work)


def test_a_run_is_read_with_what_was_asked_decided_and_is_waited_for(store: Any) -> None:
    async def work(runs: Runs) -> None:
        run = await runs.get("pay")
        assert (run.info.run_id, run.info.tags, run.info.status) == ("pay-1", ("billing",), "suspended")
        assert run.request is not None
        assert (run.request.tool, run.request.arguments) == ("pay", {"amount": 5})
        assert run.ledger.asked == "Pay 5."
        assert [move.guard for move in run.ledger.moves][-1] == "approval_required"
        await shop(store, "Paid.").resume("pay-1", Allow(), to=run.request.digest, by="Bob")
        done = await runs.get("pay-1")
        assert (done.request, done.info.ending, done.ledger.answer) == (None, "completed", "Paid.")
        assert [decision.by for decision in done.ledger.decisions] == ["Bob"]

    with_runs(store, work)


def test_what_a_run_waits_for_is_read_without_the_rest_of_the_run(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, records = list[int](), store.records

    async def count(run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        found: list[SealedRecord] = await records(run_id, after, limit)
        read.append(len(found))
        return found

    async def work(runs: Runs) -> None:
        monkeypatch.setattr(store, "records", count)
        request = await runs.request("pay")
        assert request is not None
        assert (request.run_id, request.tool, request.arguments) == ("pay-1", "pay", {"amount": 5})
        assert read == [1]
        assert request == (await runs.get("pay-1")).request
        assert await runs.request("tea-1") is None
        with pytest.raises(UnknownRunError, match="there is no run 'coffee'"):
            await runs.request("coffee")

    with_runs(store, work)


def test_a_call_is_approved_or_denied_by_whoever_saw_it(store: Any) -> None:
    async def work(runs: Runs) -> None:
        request = (await runs.get("pay")).request
        assert request is not None
        for unbound in ("0" * 64, "", " ", request.digest[:11]):
            with pytest.raises(StaleHumanReplyError):
                await runs.approve("pay", by="Ann", to=unbound)
        sent = await runs.approve("pay", by="Ann", to=request.digest)
        assert sent.run_id == "pay-1"
        with pytest.raises(StaleHumanReplyError):  # it was answered
            await runs.deny("pay", "too late", by="Bob", to=request.digest)

    with_runs(store, work, secret=SECRET)


def test_an_approved_call_runs_and_of_a_denied_one_the_model_is_told_why(tmp_path: Path) -> None:
    async def end(name: str, decide: Callable[[Runs], Awaitable[Any]]) -> str:
        store = SqliteStore(tmp_path / name)
        try:
            agent = shop(store, call("pay", amount=3), "Done.")
            await agent.run("Pay.", run_id="p")
            await decide(Runs(store, secret=SECRET))
            run = await agent.next_run("p")
            assert run is not None
            result = await run
            return "\n".join(m.content for m in result.messages if m.role == "tool")
        finally:
            await store.aclose()

    assert "paid" in asyncio.run(end("one.db", lambda runs: runs.approve("p", by="Ann")))
    assert "not today" in asyncio.run(end("other.db", lambda runs: runs.deny("p", "not today")))


def test_an_id_may_be_shortened_unless_it_is_that_of_several(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert (await runs.get("pay")).info.run_id == "pay-1"
        with pytest.raises(UnknownRunError, match=r"several runs begin with 'tea': tea-2, tea-1"):
            await runs.get("tea")
        for unknown in ("coffee", ""):
            with pytest.raises(UnknownRunError, match="there is no run"):
                await runs.get(unknown)

    with_runs(store, work)


def test_a_run_is_verified_with_and_without_the_secret(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert (await runs.verify("tea-1")).code == GOOD
        assert (await runs.verify("pay")).code == OPEN
        stranger = await Runs(store, secret=b"the secret of another shop").verify("tea-1")
        assert (stranger.code, "sealed" in stranger.reason) == (UNVERIFIABLE, True)
        assert (await Runs(store).verify("tea-1")).code == GOOD
        head = await store.head("tea-1")
        signed = {"tea-1": {head.seq: head.hash}, "pay-1": {1: "0" * 64}}
        assert (await runs.verify("tea-1", checkpoint=signed)).code == GOOD
        assert (await runs.verify("pay-1", checkpoint=signed)).code == TAMPERED

    with_runs(store, work, secret=SECRET)


def test_what_is_wrong_with_the_store_itself_is_told(store: Any) -> None:
    keyring = Keyring(SECRET)

    async def work(runs: Runs) -> None:
        heads = {head.run_id: {head.seq: head.hash} for head in await store.heads()}
        await hold_run(store, "tea-1", Hold("case 7", "ann", 1000.0), keyring)
        await runs.purge(["tea-2"], by="ann")
        signed = SignedHeads(datetime(2026, 10, 5, tzinfo=UTC), heads)
        assert await verify_store(store, keyring, signed) == []  # a purge by the host is no theft
        stolen = SignedHeads(signed.date, {**heads, "stolen": {3: "0" * 64}})
        (gone,) = await verify_store(store, keyring, stolen)
        assert (gone.run_id, gone.code, gone.reason) == (
            "stolen",
            TAMPERED,
            "the checkpoint has it, and the store does not",
        )
        await store.signals.send(SealedSignal("s1", "pay-1", "{}", "0" * 40))
        stranger = Keyring(b"the secret of another shop")
        assert {each.run_id for each in await verify_store(store, keyring)} == {"pay-1"}
        assert {each.run_id for each in await verify_store(store, stranger)} == {"tea-1", "tea-2", "pay-1"}
        assert {each.run_id for each in await verify_store(store, stranger, run_ids=["tea-1"])} == {"tea-1"}
        assert await verify_store(store) == []  # without the secret, nothing shows who wrote them

    with_runs(store, work, secret=SECRET)


def test_a_secret_is_what_a_host_takes_and_a_store_is_a_store() -> None:
    store, text = MemoryStore(), "a secret that stands in a variable"

    async def work() -> None:
        host: Any = Host(store=store, secret=text)  # type: ignore[arg-type]  # for untyped callers
        await Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay], host=host).run("Pay 5.", run_id="pay-1")
        sent = await Runs(store, secret=text).approve("pay-1")  # type: ignore[arg-type]
        assert sent.run_id == "pay-1"

    asyncio.run(work())
    with pytest.raises(ValueError, match="a secret is empty"):
        Runs(store, secret=b"")
    with pytest.raises(ConfigurationError, match=r"a store is needed, as in Runs\(open_store\('runs.db'\)\), not str"):
        Runs("runs.db")  # type: ignore[arg-type]


def test_an_exported_run_is_what_the_store_has(store: Any) -> None:
    async def work(runs: Runs) -> None:
        records = read_lines((await runs.export("tea-1")).splitlines())
        assert records == await store.records("tea-1")
        assert verify("tea-1", records).code == GOOD

    with_runs(store, work)


def test_a_run_is_drawn_and_replayed_under_another_preset(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert (await runs.diagram("tea-2")).startswith("<svg")
        assert "transient_provider" in await runs.diagram("tea-2", "text")
        assert (await runs.replay("tea-2", "standard")).divergences == ()
        assert len((await runs.replay("tea-2", "strict")).divergences) == 1
        with pytest.raises(ConfigurationError, match="there is no preset 'strikt'; there are: standard"):
            await runs.replay("tea-2", "strikt")

    with_runs(store, work)


def test_a_run_is_forked_with_the_secret_only(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert await runs.fork("pay-1", 1, "again") == "again"
        assert (await runs.get("again")).ledger.forked_from == "pay-1 at record 1"
        with pytest.raises(ConfigurationError, match="give the secret"):
            await Runs(store).fork("pay-1", 1)

    with_runs(store, work, secret=SECRET)


def test_a_field_of_a_record_is_deleted_with_the_secret_only(store: Any) -> None:
    async def work(runs: Runs) -> None:
        assert await runs.redact("tea-1", "1.messages", by="the officer") == 1
        assert (await runs.get("tea-1")).ledger.asked == REDACTED_TEXT
        assert (await runs.verify("tea-1")).code == GOOD
        with pytest.raises(JournalError, match="has no hidden value"):
            await runs.redact("tea-1", "1.messages")
        with pytest.raises(UnknownRunError, match="does not begin with the number of a record of run 'tea-1'"):
            await runs.redact("tea-1", "99")
        with pytest.raises(ConfigurationError, match="give the secret"):
            await Runs(store).redact("tea-1", "1")

    with_runs(store, work, secret=SECRET)


def test_a_text_is_found_and_deleted_wherever_it_stands(store: Any) -> None:
    async def work(runs: Runs) -> None:
        would = await Runs(store).redact_text("what is TEA", dry_run=True)
        assert ({each.run_id for each in would.deleted}, would.remaining) == ({"tea-1"}, ())
        done = await runs.redact_text("What is tea?", by="the officer")
        assert ({each.run_id for each in done.deleted}, done.remaining) == ({"tea-1"}, ())
        assert await runs.redact_text("what is tea", dry_run=True) == TextRedaction((), ())
        assert (await runs.get("tea-1")).ledger.redactions
        assert (await runs.verify("tea-1")).code == GOOD
        with pytest.raises(ConfigurationError, match="give the secret"):
            await Runs(store).redact_text("What is tea?")

    with_runs(store, work, secret=SECRET)


def test_without_its_packages_the_store_on_postgresql_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("agentfsm.journal.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    from agentfsm.journal.postgres import PostgresStore

    try:
        with pytest.raises(MissingExtraError, match=r"agentfsm\[postgres\]"):
            PostgresStore("postgresql://localhost/shop")
    finally:  # the tests after this one get the store itself
        for name in [name for name in sys.modules if name.startswith("agentfsm.journal.postgres")]:
            del sys.modules[name]


# -- waiting ------------------------------------------------------------------------------------------


def patient(store: Any, clock: FakeClock, secret: bytes | None = SECRET) -> Runs:
    """``Runs`` that wait on a clock of their own."""
    runs = Runs(store, secret=secret)
    runs._host = replace(runs._host, clock=clock)  # pyright: ignore[reportPrivateUsage]
    return runs


async def looked(clock: FakeClock, times: int) -> None:
    while len(clock.slept) < times:
        await asyncio.sleep(0)


def test_a_run_that_has_ended_or_waits_for_a_person_is_not_waited_for(store: Any) -> None:
    clock = FakeClock()

    async def work(_: Runs) -> None:
        runs = patient(store, clock)
        assert (await runs.get("tea-1", wait_s=math.inf)).info.ending == "completed"
        request = (await runs.get("pay", wait_s=math.inf)).request
        assert request is not None
        assert request.tool == "pay"
        with pytest.raises(UnknownRunError):
            await runs.get("coffee", wait_s=math.inf)

    with_runs(store, work)
    assert clock.slept == []


def test_a_run_that_is_worked_on_is_waited_for_until_it_ends_or_the_time_is_over(store: Any) -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        @tool
        async def bake() -> str:
            """Bake."""
            begun.set()
            await go_on.wait()
            return "baked"

        agent = Agent(ScriptedModel([call("bake"), "Done."]), tools=[bake], host=Host(store=store, secret=SECRET))
        running = asyncio.ensure_future(agent.run("Bake.", run_id="cake"))
        await begun.wait()
        short, clock = FakeClock(), FakeClock()
        assert (await patient(store, short).get("cake", wait_s=2.5)).info.status == "running"
        assert sum(short.slept) == pytest.approx(2.5)
        waiting = asyncio.ensure_future(patient(store, clock).get("cake", wait_s=math.inf))
        await looked(clock, 20)
        assert not waiting.done()
        go_on.set()
        assert (await waiting).ledger.answer == "Done."
        assert clock.slept == sorted(clock.slept)
        assert (clock.slept[0], clock.slept[-1]) == (0.05, 1.0)  # it looks ever more seldom, but once a second
        await running
        await store.aclose()

    asyncio.run(scenario())


def test_a_run_that_was_answered_is_waited_for_until_somebody_has_acted_on_the_answer(store: Any) -> None:
    async def work(_: Runs) -> None:
        clock = FakeClock()
        runs = patient(store, clock)
        await runs.answer("pay-1", Edit({"amount": "a lot"}))
        assert (await patient(store, clock, None).get("pay-1", wait_s=math.inf)).request is not None  # it cannot know
        assert clock.slept == []
        waiting = asyncio.ensure_future(runs.get("pay-1", wait_s=math.inf))
        await looked(clock, 3)
        assert not waiting.done()
        assert await shop(store).next_run("pay-1") is None
        assert "was refused" in (await waiting).refused
        await runs.approve("pay-1")
        waiting = asyncio.ensure_future(runs.get("pay-1", wait_s=math.inf))
        await looked(clock, len(clock.slept) + 3)
        assert not waiting.done()
        run = await shop(store, "Paid.").next_run("pay-1")
        assert run is not None
        await run
        assert (await waiting).ledger.answer == "Paid."

    with_runs(store, work)
