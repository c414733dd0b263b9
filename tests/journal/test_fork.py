"""A fork has its parent's state and repeats none of its effects; an invalid fork or resume changes nothing."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from agentfsm import (
    LOOP,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    RunExistsError,
    RunQuery,
    Runs,
    SuspensionExpiredError,
    ToolContext,
    UnknownRunError,
    UserInputRequested,
    tool,
)
from agentfsm.errors import (
    ActorRoleError,
    AuthenticationError,
    HumanReplyError,
    JournalError,
    JournalGraphError,
    RunEndedError,
)
from agentfsm.journal.fork import fork
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, verify, verify_stored_run
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import MAX_APPROVALS
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import finished_run, sample_agent, seq_of, waiting_run
from tests.helpers.scenarios import await_run
from tests.helpers.taped_store import Commit, TapedStore, restore

KEYRING = Keyring(b"of the tests")


def go_on(store, run_id, script, **more):
    async def live():
        agent = sample_agent(store, script, **more)
        return await agent.resume(run_id)

    return asyncio.run(live())


def test_a_fork_starts_from_any_record_with_its_parents_state():
    store, _ = finished_run()
    rows = asyncio.run(store.records("sample"))
    forked = 0
    for at in range(1, len(rows) + 1):
        past = rehydrate(rows[:at])
        if past.run.state == "terminal":
            with pytest.raises(JournalError, match="had ended"):
                asyncio.run(fork(store, "sample", at, f"f{at}", KEYRING))
            continue
        asyncio.run(fork(store, "sample", at, f"f{at}", KEYRING))
        forked += 1
        made = asyncio.run(store.records(f"f{at}"))
        first = json.loads(made[0].body)
        assert first["parent"] == {"run": "sample", "seq": at, "hash": rows[at - 1].hash}
        state = rehydrate(made).run
        assert state.run_id == f"f{at}"
        assert (state.messages, state.state, state.usage) == (past.run.messages, past.run.state, past.run.usage)
        assert verify(f"f{at}", made, asyncio.run(store.head(f"f{at}"))).code == OPEN
    assert forked > 20
    assert asyncio.run(store.records("sample")) == rows  # the parent is as it was


def test_a_fork_ends_on_its_own_and_repeats_no_effect():
    store, whole = finished_run()
    rows = asyncio.run(store.records("sample"))
    at = seq_of(rows, "post_tool.otherwise")  # behind the first tool
    asyncio.run(fork(store, "sample", at, "other", KEYRING))
    result = go_on(store, "other", ["another end"])
    assert result.output == "another end"
    assert [m.content for m in result.messages][:4] == [m.content for m in whole.messages][:4]
    made = asyncio.run(store.records("other"))
    assert not any('"name":"add"' in r.body for r in made)
    assert verify("other", made, asyncio.run(store.head("other"))).code == GOOD
    assert replay(made, LOOP).same


def test_a_fork_of_a_waiting_run_waits_too():
    store, _ = waiting_run()
    rows = asyncio.run(store.records("sample"))
    asyncio.run(fork(store, "sample", len(rows), "other", KEYRING))
    agent = sample_agent(store, ["paid it"])

    async def live():
        return await agent.resume("other", Allow())

    result = asyncio.run(live())
    assert result.output == "paid it"
    assert asyncio.run(store.head("sample")).status == "suspended"


def test_a_fork_has_its_own_idempotency_keys():
    keys = []

    @tool(requires_approval=True)
    def act(context: ToolContext) -> str:
        """Act."""
        keys.append(context.idempotency_key)
        return "done"

    store = MemoryStore()

    async def live():
        agent = Agent(ScriptedModel([call("act")]), tools=[act], host=Host(clock=FakeClock(), store=store))
        await agent.run("go", run_id="parent")
        await fork(store, "parent", len(await store.records("parent")), "child", Host().keyring)
        again = Agent(ScriptedModel(["a", "b"]), tools=[act], host=Host(clock=FakeClock(), store=store))
        await again.resume("child", Allow())
        await again.resume("parent", Allow())

    asyncio.run(live())
    assert keys == ["child:1.0", "parent:1.0"]


def test_an_approval_holds_in_the_run_in_which_it_was_given_and_not_in_its_forks():
    paid, (ann, bob) = [], (Actor(name, ("manager",)) for name in ("ann", "bob"))

    @tool(requires_approval=Approval(n=2, roles=("manager",)))
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    host = Host(store=MemoryStore())

    def agent(*script):
        return Agent(ScriptedModel(script), tools=[pay], host=host)

    async def votes(run_id):
        head = await host.store.head(run_id)
        if head.status == "running":  # it has no request yet
            await agent().resume(run_id)
        return str((await Runs(host.store).get(run_id)).request.quorum)

    async def live():
        await agent(call("pay", amount=5)).run("Pay 5.", run_id="parent")
        await agent().resume("parent", Allow(), by=ann)
        await agent("Paid.").resume("parent", Allow(), by=bob)
        assert paid == [5]
        rows = await host.store.records("parent")
        asked, began = seq_of(rows, "post_llm.tool_calls"), next(r.seq for r in rows if '"eid":"1.0"' in r.body)
        for at in range(asked, began):  # also between the second vote and the call
            child = f"child-{at}"
            await fork(host.store, "parent", at, child, host.keyring)
            assert (await votes(child)).startswith("0 of 2 approvals")
            await agent().resume(child, Allow(), by=ann)
            assert paid == [5]
            assert (await verify_stored_run(host.store, child, keyring=host.keyring)).code == OPEN
        await agent("Paid.").resume(child, Allow(), by=bob)
        assert paid == [5, 5]
        await fork(host.store, "parent", began, "doubtful", host.keyring)
        assert (await agent().resume("doubtful")).outcome.kind == "in_doubt"
        for nobody, error in ((None, AuthenticationError), (Actor("eve"), ActorRoleError)):
            with pytest.raises(error):
                await agent().resume("doubtful", ItRan("paid"), by=nobody)
        assert (await agent().resume("doubtful", ItDidNotRun(), by=ann)).outcome.kind == "approval"
        assert paid == [5, 5]

    asyncio.run(live())


LATER_S = 1_000_000


@pytest.mark.parametrize(
    ("approval", "guardrails"),
    [
        (True, AgentGuardrails(validity_s=100)),
        (Approval(roles=("manager",), validity_s=100), AgentGuardrails(validity_s=9)),
        (Approval(n=2, roles=("manager",), validity_s=100), AgentGuardrails()),
    ],
)
@pytest.mark.parametrize("has_asked", [True, False], ids=["after the request", "before it was recorded"])
def test_a_fork_of_a_run_that_waits_has_as_much_time_as_the_run_had(approval: Any, guardrails: Any, has_asked: bool):
    """Whether the time of the run itself is up or not."""
    clock, ann = FakeClock(), Actor("ann", ("manager",))

    @tool(requires_approval=approval)
    def pay() -> str:
        """Pay."""
        return "paid"

    host = Host(store=MemoryStore(), clock=clock, secret=b"of the tests")

    def agent(*script):
        return Agent(ScriptedModel(script), tools=[pay], guardrails=guardrails, host=host)

    async def live():
        with mock.patch("agentfsm.journal.fork.time", clock):
            await agent(call("pay")).run("Pay.", run_id="0")
            for number in range(2):
                clock.advance(LATER_S)
                origin, forked = str(number), str(number + 1)
                records = await host.store.records(origin)
                asked = next(each.seq for each in records if '"kind":"run.suspended"' in each.body)
                await fork(host.store, origin, asked if has_asked or number else asked - 1, forked, KEYRING)
                if not has_asked and not number:
                    await agent().resume(forked)
                request = (await Runs(host.store).get(forked)).request
                assert (request.asked_at, request.expires_at) == (clock.time(), clock.time() + 100)
                listed = (await Runs(host.store).list(RunQuery(status="suspended"))).runs
                assert next(each.expires for each in listed if each.run_id == forked) == clock.time() + 100
                assert (await verify_stored_run(host.store, forked, keyring=host.keyring)).code == OPEN
            clock.advance(100)
            await agent("Paid.").resume("2", Allow(), by=ann)
            clock.advance(0.001)
            with pytest.raises(SuspensionExpiredError):
                await agent().resume("1", Allow(), by=ann)

    asyncio.run(live())


def test_a_fork_asks_those_who_were_asked_first_and_counts_all_votes_of_its_own():
    clock, rule = FakeClock(), Approval(MAX_APPROVALS, roles=("a",), escalate_to=("b",), escalate_after_s=60)
    paid = list[str]()

    @tool(requires_approval=rule)
    def pay() -> str:
        """Pay."""
        paid.append("paid")
        return "paid"

    host = Host(store=MemoryStore(), clock=clock, secret=b"of the tests")

    def agent(*script):
        return Agent(ScriptedModel(script), tools=[pay], host=host)

    async def live():
        await agent(call("pay")).run("Pay.", run_id="parent")
        clock.advance(60)
        await agent().resume("parent")
        for number in range(MAX_APPROVALS - 1):
            await agent().resume("parent", Allow(), by=Actor(f"p{number}", ("b",)))
        clock.advance(LATER_S)
        with mock.patch("agentfsm.journal.fork.time", clock):
            await fork(host.store, "parent", (await host.store.head("parent")).seq, "child", KEYRING)
        with pytest.raises(ActorRoleError):
            await agent().resume("child", Allow(), by=Actor("p", ("b",)))
        await agent().resume("child", Allow(), by=Actor("first", ("a",)))
        clock.advance(60)
        assert (await agent().resume("child")).outcome.quorum.escalated
        for number in range(MAX_APPROVALS - 2):
            await agent().resume("child", Allow(), by=Actor(f"p{number}", ("b",)))
        assert not paid
        assert (await agent("Paid.").resume("child", Allow(), by=Actor("last", ("b",)))).output == "Paid."
        assert (await verify_stored_run(host.store, "child", keyring=host.keyring)).code == GOOD

    asyncio.run(live())
    assert paid == ["paid"]


def test_a_fork_shares_no_run_of_a_sub_agent_with_its_parent():
    """An answer to the fork would be one to the parent, too."""
    store, paid = MemoryStore(), list[int]()

    @tool(requires_approval=True)
    def spend(amount: int) -> str:
        """Spend."""
        paid.append(amount)
        return "spent"

    def agent(*script: Any, below: Any = ()) -> Agent:
        helper = Agent(ScriptedModel(below), tools=[spend])
        host = Host(store=store, secret=b"of the tests")
        return Agent(ScriptedModel(script), tools=[helper.as_tool("helper", "Spends.")], host=host)

    async def live() -> None:
        await agent(call("helper", task="Spend 5."), below=[call("spend", amount=5)]).run("Spend 5.", run_id="parent")
        asked = len(await store.records("parent"))
        with pytest.raises(JournalError, match=r"run 'parent-1\.0' of a sub-agent was waiting"):
            await fork(store, "parent", asked, "child", KEYRING)
        assert await store.head("child") is None
        await agent("Done.", below=["Spent."]).resume("parent", Allow())
        records = await store.records("parent")
        refused = list[int]()
        for record in records[:-2]:  # with the one before it, it had ended
            try:
                await fork(store, "parent", record.seq, f"at {record.seq}", KEYRING)
            except JournalError:
                refused.append(record.seq)
        answered = next(record.seq for record in records if '"out":{"answered"' in record.body)
        assert {asked, answered} <= set(refused)
        assert refused == list(range(refused[0], refused[-1] + 1))  # from the wait to the call's result
        assert '"kind":"effect.result"' in records[refused[-1]].body
        assert '"to":"suspended"' in records[refused[0] - 1].body

    asyncio.run(live())
    assert paid == [5]


@pytest.mark.slow
def test_a_fork_whose_first_state_was_deleted_can_be_dismissed_however_far_it_has_come():
    whole, _ = finished_run(TapedStore())
    before, secret = tuple(whole.tape), b"of the tests"

    async def go_on(fork_id: str) -> None:
        agent, head = sample_agent(whole, ["Done."]), await whole.head(fork_id)
        asked = (await Runs(whole).get(fork_id)).request if head.status == "suspended" else None
        while True:
            replies = {"approval": [Allow()], "in_doubt": [ItDidNotRun()]}.get("" if asked is None else asked.kind, [])
            asked = (await agent.resume(fork_id, *replies)).outcome
            if not isinstance(asked, UserInputRequested):
                return

    async def end(fork_id: str, tape: Sequence[Commit]) -> bool:
        store = MemoryStore()
        await restore((*before, *tape), store, KEYRING)
        runs = Runs(store, secret=secret)
        await runs.redact(fork_id, "1")
        if (is_open := (await store.head(fork_id)).status != "finished") is True:
            await sample_agent(store, []).dismiss(fork_id)
        assert (await runs.verify(fork_id)).code == GOOD
        info = (await runs.get(fork_id)).info
        assert info.status == "finished"
        assert min(info.tokens, info.cost_usd) >= 0
        return is_open

    async def live() -> int:
        dismissed = 0
        for at in range(1, len(await whole.records("sample")) - 1):
            fork_id = f"f{at}"
            await fork(whole, "sample", at, fork_id, KEYRING)
            await go_on(fork_id)
            tape = [each for each in whole.tape if each.run_id == fork_id]
            dismissed += await end(fork_id, tape[: 1 + at % len(tape)])
        return dismissed

    assert asyncio.run(live()) > 20


def test_an_invalid_fork_changes_nothing():
    store, _ = waiting_run()
    rows = list(asyncio.run(store.records("sample")))
    for at in (0, -1, len(rows) + 1):
        with pytest.raises(UnknownRunError):
            asyncio.run(fork(store, "sample", at, "other", KEYRING))
    with pytest.raises(UnknownRunError):
        asyncio.run(fork(store, "nobody", 1, "other", KEYRING))
    with pytest.raises(RunExistsError):
        asyncio.run(fork(store, "sample", 1, "sample", KEYRING))
    assert [h.run_id for h in asyncio.run(store.heads())] == ["sample"]
    assert asyncio.run(store.records("sample")) == rows


# -- going on from the store --------------------------------------------------------------------------


def test_each_invalid_resume_has_its_own_error_and_changes_nothing():
    store, _ = waiting_run()
    rows = list(asyncio.run(store.records("sample")))
    agent = sample_agent(store)
    with pytest.raises(UnknownRunError):
        asyncio.run(agent.resume("nobody", "x").load())
    with pytest.raises(HumanReplyError, match="Allow"):
        asyncio.run(agent.resume("sample", "x").load())
    with pytest.raises(HumanReplyError):
        asyncio.run(agent.resume("sample").load())
    whole, _ = finished_run()
    with pytest.raises(RunEndedError, match="has ended"):
        asyncio.run(sample_agent(whole).resume("sample", "x").load())
    other = sample_agent(store, graph=replace(LOOP.without("pre_step.no_progress"), name="mine"))
    with pytest.raises(JournalGraphError, match=r"pre_step\.no_progress") as caught:
        asyncio.run(other.resume("sample", Allow()).load())
    assert caught.value.differences == ("- pre_step.no_progress -> recover",)
    assert LOOP.fingerprint[:12] in str(caught.value)
    assert other.graph.fingerprint[:12] in str(caught.value)
    assert asyncio.run(store.records("sample")) == rows
    assert asyncio.run(store.head("sample")).status == "suspended"


def test_one_of_two_concurrent_resumes_is_refused():
    store, _ = waiting_run()

    async def both():
        agent = sample_agent(store, ["one"])
        return await asyncio.gather(
            *(await_run(agent.resume("sample", Allow())) for _ in range(4)), return_exceptions=True
        )

    done = asyncio.run(both())
    names = sorted(type(d).__name__ for d in done)
    assert names == ["RunResult", "StaleLease", "StaleLease", "StaleLease"]
