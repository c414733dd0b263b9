"""A run goes on only with an agent that asks people at least as often as the one that it began with."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agentfsm import Agent, Allow, Approval, Host, MemoryStore, Migration, Runs, hook, tool
from agentfsm.analysis import code_comparison
from agentfsm.analysis.code_comparison import code_digest
from agentfsm.errors import ConfigurationError, JournalError, SuspensionApprovalError
from agentfsm.journal.fork import fork
from agentfsm.journal.records import open_record
from agentfsm.journal.redact import redact
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.transition_table import LOOP
from agentfsm.runtime.hooks import AskApproval, DenyCall
from agentfsm.runtime.permissions import allow, ask, deny, permissions
from agentfsm.runtime.run import hand_over
from agentfsm.runtime.tools import Tool
from agentfsm.testing import ModelTurn, Scenario, ScriptedModel, Simulator, call
from agentfsm.viewer.agent_runner import AgentRunner
from agentfsm.workers.served_agents import ServedAgents

SECRET = b"the secret of these tests, long enough"
PAID: list[int] = []


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    PAID.clear()


@tool
def pay(amount: int) -> str:
    """Pay an amount."""
    PAID.append(amount)
    return f"paid {amount}"


@tool(requires_approval=True)
def look() -> str:
    """Look at the accounts."""
    return "seen"


def paying(rule: Any) -> Tool:
    return replace(pay, requires_approval=rule)


def large(arguments: dict[str, Any]) -> bool:
    return arguments["amount"] > 5


def also_large(arguments: dict[str, Any]) -> bool:
    """The same rule: its name and its documentation are no code."""
    return arguments["amount"] > 5  # nor is this


def larger(arguments: dict[str, Any]) -> bool:
    return arguments["amount"] > 500


def over(limit: int, arguments: dict[str, Any]) -> bool:
    return arguments["amount"] > limit


def by_managers(arguments: dict[str, Any]) -> Approval:
    return Approval(roles=("manager",))


def lambda_rule(limit: int) -> Callable[[dict[str, Any]], bool]:
    return lambda arguments: arguments["amount"] > limit


def an_agent(store: Any, *script: Any, tools: Any = (), **more: Any) -> Agent[Any, Any]:
    host = Host(store=store, secret=SECRET)
    return Agent(ScriptedModel(list(script)), tools=[look, *tools], host=host, graph=with_votes(LOOP), **more)


class EqualLimit:
    """A rule that is equal to any other of its kind, whatever its limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, arguments: dict[str, Any]) -> bool:
        return arguments["amount"] > self.limit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualLimit)

    def __hash__(self) -> int:
        return 1


CASES: list[tuple[Any, Any, bool]] = [
    (EqualLimit(5), EqualLimit(5), True), (EqualLimit(5), EqualLimit(500), False),
    (False, False, True), (False, True, True), (False, larger, True),
    (True, True, True), (True, False, False), (True, Approval(), True), (True, Approval(n=2), True),
    (True, large, False), (Approval(), True, True), (Approval(validity_s=60), True, True),
    (Approval(n=2), True, False), (Approval(n=2), Approval(), False), (Approval(n=2), Approval(n=3), True),
    (Approval(roles=("a", "b")), Approval(roles=("a",)), True),
    (Approval(roles=("a", "b")), Approval(roles=("a", "c")), False),
    (Approval(roles=("a",)), Approval(), False), (Approval(roles=("a",)), Approval(n=2), False),
    (Approval(not_requester=True), Approval(), False), (Approval(), Approval(not_requester=True), True),
    (Approval(roles=("a",)), Approval(roles=("a",), escalate_to=("b",), escalate_after_s=9), False),
    (Approval(roles=("a",), escalate_to=("b",), escalate_after_s=9), Approval(roles=("a",)), True),
    (
        Approval(roles=("a",), escalate_to=("b",), escalate_after_s=9),
        Approval(roles=("a",), escalate_to=("b",), escalate_after_s=3), False,
    ),
    (
        Approval(roles=("a",), escalate_to=("b",), escalate_after_s=9),
        Approval(roles=("a",), escalate_to=("b",), escalate_after_s=99), True,
    ),
    (Approval(roles=("a",), escalate_to=("b",), escalate_after_s=9), Approval(roles=("b",)), False),
    (large, large, True), (large, also_large, True), (large, larger, False), (large, True, True), (large, False, False),
    (large, Approval(n=2), True), (by_managers, by_managers, True), (by_managers, True, False),
    (partial(over, 5), partial(over, 5), True), (partial(over, 5), partial(over, 500), False),
    (lambda_rule(5), lambda_rule(5), True), (lambda_rule(5), lambda_rule(500), False), (lambda_rule(5), True, False),
]  # fmt: skip
"""The rule that the run began with, that of the agent which goes on with it, and whether that one may."""


@pytest.mark.parametrize(("began", "now", "fine"), CASES)
def test_an_agent_that_requires_less_approval_than_the_run_began_with_is_refused(began: Any, now: Any, fine: bool):
    store = MemoryStore()

    async def scenario() -> None:
        await an_agent(store, call("look"), tools=[paying(began)]).run("go", run_id="r")
        other = an_agent(store, call("pay", amount=1), "done", tools=[paying(now)])
        if fine:
            await other.resume("r", Allow())
            return
        with pytest.raises(SuspensionApprovalError, match=r"the tool 'pay' needs .* there, and .* here"):
            await other.resume("r", Allow())
        assert (await an_agent(store, "done", tools=[paying(began)]).resume("r", Allow())).ok

    asyncio.run(scenario())
    asks = now is by_managers or (now is not False and isinstance(now, (bool, Approval)))
    assert ([1] if fine and not asks else []) == PAID


async def suspended(store: Any, *, session: str = "") -> Any:
    """A run ``r`` that waits for the approval of ``look``, and its record."""
    agent = an_agent(store, call("look"), tools=[paying(True)])
    return await (agent.session(session).run("go") if session else agent.run("go", run_id="r"))


async def interrupted(store: Any) -> None:
    run = an_agent(store, call("look"), tools=[paying(True)]).run("go", run_id="r")
    await run.step()
    await hand_over(run)


def weak(store: Any, **more: Any) -> Agent[Any, Any]:
    return an_agent(store, call("pay", amount=666), "done", tools=[paying(False)], **more)


async def with_a_record(store: Any) -> None:
    record = (await suspended(None)).outcome.suspension_record
    await weak(None).resume(record.to_json(), Allow())


async def from_the_store(store: Any) -> None:
    await suspended(store)
    await weak(store).resume("r", Allow())


async def with_the_record_of_a_stored_run(store: Any) -> None:
    await weak(store).resume((await suspended(store)).outcome.suspension_record, Allow())


async def after_a_crash(store: Any) -> None:
    await interrupted(store)
    await weak(store).resume("r")


async def in_a_session(store: Any) -> None:
    await suspended(store, session="s")
    await weak(store).session("s").resume(Allow())


async def as_a_fork(store: Any) -> None:
    await suspended(store)
    await fork(store, "r", 1, "f", Host(secret=SECRET).keyring)
    await weak(store).resume("f")


@pytest.mark.parametrize(
    "way", [with_a_record, from_the_store, with_the_record_of_a_stored_run, after_a_crash, in_a_session, as_a_fork]
)
def test_no_way_to_go_on_with_a_run_leads_around_the_approval_that_it_began_with(way: Callable[..., Any]):
    with pytest.raises(SuspensionApprovalError, match=r"Migration\('[0-9a-f]{12}', approvals=\('pay',\)\)"):
        asyncio.run(way(MemoryStore()))
    assert PAID == []


def test_recovery_a_worker_and_the_viewer_leave_the_run_to_an_agent_that_is_as_strict(
    caplog: pytest.LogCaptureFixture,
):
    async def scenario() -> None:
        store = MemoryStore()
        await suspended(store)
        await Runs(store, secret=SECRET).answer("r", Allow(), by="ann")
        assert await weak(store).unfinished_runs() == []
        assert "'pay' needs an approval there, and none here" in caplog.text
        await AgentRunner(store, [weak(store)])._run_pending("r")
        head, (begun,) = await store.head("r"), await store.records("r", limit=1)
        assert head is not None
        assert ServedAgents({"shop": weak(store)}).for_run(head, begun) is None
        strict = an_agent(store, "done", tools=[paying(True)])
        found = ServedAgents({"weak": weak(store), "strict": strict}).for_run(head, begun)
        assert found is not None
        assert found.name == "strict"
        assert [run.run_id for run in await strict.unfinished_runs()] == ["r"]

    asyncio.run(scenario())
    assert PAID == []


def test_a_submitted_run_waits_for_a_worker_whose_agent_of_that_name_is_as_strict():
    async def scenario() -> list[str]:
        store = MemoryStore()
        agent = an_agent(store, call("look"), tools=[paying(True)])
        await agent.run("go", run_id="r", tags=["agent:shop"])
        head, (begun,) = await store.head("r"), await store.records("r", limit=1)
        assert head is not None
        served = [ServedAgents({"shop": an_agent(store, tools=[paying(rule)])}) for rule in (False, True)]
        assert served[0].queues[1] != served[1].queues[1]
        return ["" if (found := each.for_run(head, begun)) is None else found.name for each in served]

    assert asyncio.run(scenario()) == ["", "shop"]


def test_a_weaker_agent_may_end_the_run():
    async def scenario() -> str:
        store = MemoryStore()
        await suspended(store)
        return type((await weak(store).dismiss("r")).outcome).__name__

    assert asyncio.run(scenario()) == "RunCancelled"


def test_a_migration_admits_less_approval_and_the_journal_says_so():
    async def scenario() -> list[Any]:
        store = MemoryStore()
        await suspended(store)
        fingerprint = weak(store).graph.fingerprint
        for admits in (("look",), ()):
            with pytest.raises(SuspensionApprovalError):
                await weak(store, migrations=[Migration(fingerprint[:12], approvals=admits)]).resume("r", Allow())
        agent = weak(store, migrations=[Migration(fingerprint[:12], approvals=("pay",))])
        await agent.resume("r", Allow())
        bodies = [open_record(record) for record in await store.records("r")]
        return [body.get("approvals") for body in bodies if body["kind"] == "run.resumed"]

    assert asyncio.run(scenario()) == [["pay"]]
    assert PAID == [666]
    with pytest.raises(ConfigurationError, match="tuple of names"):
        Migration("0123456789ab", approvals="pay")  # type: ignore[arg-type]


def test_a_run_of_an_earlier_release_goes_on_as_its_agent_says():
    async def scenario() -> None:
        store = MemoryStore()
        agent = an_agent(store, call("look"), tools=[paying(True)])
        former = agent.with_config(replace(agent.config, pin_approvals=lambda _: {}))
        await former.run("go", run_id="r")
        assert "approvals" not in open_record((await store.records("r"))[0])
        await weak(store).resume("r", Allow())

    asyncio.run(scenario())
    assert PAID == [666]


# -- hooks, permission policies and sub-agents ------------------------------------------------------------


@hook("dispatch_tool", fail_open=False)
def four_eyes(context: Any) -> Any:
    return AskApproval("really?") if context.call.name == "pay" else None


@hook("dispatch_tool", fail_open=False)
def other_eyes(context: Any) -> Any:
    return DenyCall("no") if context.call.name == "transfer" else None


@hook("dispatch_tool")
def notes(context: Any) -> None:
    """Fails open, so it is no check."""


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ([four_eyes, notes], ""),
        ([four_eyes], ""),
        ([other_eyes, four_eyes], ""),
        ([], "the hook 'four_eyes' is missing here"),
        ([replace(other_eyes, name="four_eyes")], "the hook 'four_eyes' has other code here"),
    ],
)
def test_a_hook_that_fails_closed_must_be_there_with_its_code(now: list[Any], says: str):
    async def scenario() -> None:
        store = MemoryStore()
        await an_agent(store, call("look"), hooks=[four_eyes, notes], tools=[pay]).run("go", run_id="r")
        agent = an_agent(store, call("pay", amount=1), "done", hooks=now, tools=[pay])
        if says:
            with pytest.raises(SuspensionApprovalError, match=says):
                await agent.resume("r", Allow())
        else:
            assert (await agent.resume("r", Allow())).outcome.tool == "pay"

    asyncio.run(scenario())
    assert PAID == []


POLICY = permissions(
    deny("pay", where={"amount": 13}, reason="unlucky"), ask("pay", where={"amount": 7}), otherwise="allow"
)


@pytest.mark.parametrize(
    ("hooks", "amount", "expected"),
    [
        ([], 13, "Denied: unlucky"),
        ([], 7, "asked"),
        ([], 1, "paid 1"),
        ([permissions(otherwise="allow")], 13, "Denied: unlucky"),
        ([permissions(allow("look"), ask("pay"), otherwise="allow")], 1, "asked"),
        ([permissions(allow("look"), deny("*", reason="closed"))], 7, "Denied: closed"),
        ([POLICY], 13, "Denied: unlucky"),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_the_permission_rules_of_the_run_apply_beside_those_of_the_agent(
    hooks: list[Any], amount: int, expected: str, stored: bool
):
    async def scenario() -> str:
        store = MemoryStore() if stored else None
        begun = await an_agent(store, call("look"), tools=[pay], hooks=[POLICY]).run("go", run_id="r")
        agent = an_agent(store, call("pay", amount=amount), "done", tools=[pay], hooks=hooks)
        result = await agent.resume("r" if stored else begun.outcome.suspension_record, Allow())
        results = [m.content for m in result.messages if m.role == "tool"]
        return results[-1] if result.ok else "asked"

    assert asyncio.run(scenario()) == expected


@pytest.mark.parametrize("weaker", ["tool", "policy"])
def test_what_a_sub_agent_asks_is_pinned_with_the_run_that_calls_it(weaker: str):
    def caller(store: Any, rule: Any, hooks: list[Any], *script: Any) -> Agent[Any, Any]:
        payer = Agent(ScriptedModel([call("pay", amount=666), "done"]), tools=[paying(rule)], hooks=hooks)
        return an_agent(store, *script, tools=[payer.as_tool("payer", "Pays.")])

    async def scenario() -> None:
        store = MemoryStore()
        rules = permissions(ask("pay"), otherwise="allow")
        await caller(store, True, [rules], call("look")).run("go", run_id="r")
        script = call("payer", task="Pay 666."), "done"
        now = caller(store, weaker != "tool", [] if weaker == "policy" else [rules], *script)
        says = "tool 'payer/pay' needs an approval" if weaker == "tool" else "sub-agent 'payer' has other permission"
        with pytest.raises(SuspensionApprovalError, match=says):
            await now.resume("r", Allow())
        outcome = (await caller(store, True, [rules], *script).resume("r", Allow())).outcome
        assert (outcome.kind, outcome.tool) == ("approval", "pay")

    asyncio.run(scenario())
    assert PAID == []


def test_a_tool_in_place_of_a_sub_agent_that_asks_is_refused():
    async def scenario() -> None:
        store = MemoryStore()
        payer = Agent(ScriptedModel(), tools=[paying(True)])
        await an_agent(store, call("look"), tools=[payer.as_tool("payer", "Pays.")]).run("go", run_id="r")
        plain = replace(pay, spec=replace(pay.spec, name="payer"))
        with pytest.raises(SuspensionApprovalError, match="'payer' is not a sub-agent here"):
            await an_agent(store, call("payer", amount=666), "done", tools=[plain]).resume("r", Allow())

    asyncio.run(scenario())
    assert PAID == []


def test_a_run_whose_pin_was_redacted_does_not_run_pending():
    async def scenario() -> None:
        store = MemoryStore()
        await suspended(store)
        assert await redact(store, "r", "1.approvals", Host(secret=SECRET).keyring) == 1
        with pytest.raises(JournalError, match="a value in it was redacted"):
            await weak(store).resume("r", Allow())

    asyncio.run(scenario())
    assert PAID == []


def test_an_agent_that_asks_nobody_pins_nothing():
    async def scenario() -> Any:
        store = MemoryStore()
        await Agent(ScriptedModel(["hi"]), tools=[pay], host=Host(store=store, secret=SECRET)).run("go", run_id="r")
        return open_record((await store.records("r"))[0])

    assert "approvals" not in asyncio.run(scenario())


class Accountant:
    """A service of the user's, made anew for each request."""

    def checked(self, arguments: dict[str, Any]) -> bool:
        return arguments["amount"] > 5


def test_the_code_of_a_rule_is_described_once_and_its_owner_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []

    def counting(function: Any) -> str:
        described.append(function.__qualname__)
        return code_digest(function)

    monkeypatch.setattr("agentfsm.analysis.code_comparison.code_digest", counting)
    accountant = Accountant()
    agent = Agent(ScriptedModel(["done"] * 3), tools=[paying(accountant.checked)])
    for _ in range(3):
        assert agent.run_sync("Pay.").ok
    assert described == ["Accountant.checked"]
    forgotten = weakref.ref(accountant)
    del accountant, agent
    gc.collect()
    assert forgotten() is None


def test_a_simulation_does_not_describe_the_agent_that_it_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counting(code_comparison._Description):
        def of(self, value: object) -> object:
            described = super().of(value)
            sizes.append(len(repr(described)))
            return described

    monkeypatch.setattr(code_comparison, "_Description", Counting)
    agent = Agent(ScriptedModel(), tools=[pay])
    assert Simulator(agent).run_sync(Scenario(model_turns=[ModelTurn("done")])).run_result.ok
    assert len(sizes) == 1  # of the hook through which side events happen
    assert sizes[0] < 1_000
