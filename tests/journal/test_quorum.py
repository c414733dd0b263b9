"""Who may answer: actors, roles and votes on stored runs, and on signed records."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Actor,
    ActorIsRequesterError,
    ActorRoleError,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    AuthenticationError,
    BlankHumanReplyError,
    ConfigurationError,
    Counter,
    Deny,
    Edit,
    FileReplayGuard,
    GiveUp,
    GraphError,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    RepeatedVoteError,
    RunAborted,
    RunCompleted,
    RunResult,
    Runs,
    RunState,
    SqliteStore,
    StateContext,
    StateSpec,
    SuspensionExpiredError,
    SuspensionUsedError,
    ToolDefinitionError,
    Transition,
    UserInputRequested,
    tool,
    with_votes,
)
from agentfsm.journal.hash_chain import InvalidRecordError
from agentfsm.journal.history_verifier import HistoryVerifier
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.guards import approval_decided, approval_required, doubt_settled, escalated, in_doubt, vote_recorded
from agentfsm.testing import FakeClock, ScriptedModel, call

ANN, BOB, CY = (Actor(name, ("manager",)) for name in ("ann", "bob", "cy"))
CLERK, DIRECTOR = Actor("dan", ("clerk",)), Actor("eve", ("director",))
FOUR_EYES = Approval(n=2, roles=("manager",), not_requester=True)


class Desk:
    """Runs that pay, under one rule; each reply comes with a new agent, as from another process."""

    def __init__(self, rule: Any, *, stored: bool = True, **host: Any) -> None:
        self.paid: list[int] = []
        self.clock = FakeClock()
        self.host = Host(clock=self.clock, store=MemoryStore() if stored else None, **host)
        self.waiting: Any = "r"

        @tool(requires_approval=rule)
        def pay(amount: int) -> str:
            """Pay."""
            self.paid.append(amount)
            return "paid"

        self.pay = pay

    def agent(self, *script: Any) -> Agent:
        return Agent(ScriptedModel(script or ["Done."]), tools=[self.pay], host=self.host)

    def ask(self, actor: Any = ANN, amount: int = 5) -> UserInputRequested:
        agent = self.agent(call("pay", amount=amount))
        return self.keep(agent.run_sync("Pay.", actor=actor) if not self.host.store else self._run(agent, actor))

    def _run(self, agent: Agent, actor: Any) -> RunResult:
        async def run() -> RunResult:
            return await agent.run("Pay.", run_id="r", actor=actor)

        return asyncio.run(run())

    def reply(self, reply: Any, by: Any = None) -> Any:
        async def resume() -> RunResult:
            return await self.agent().resume(self.waiting, reply, by=by)

        result = asyncio.run(resume())
        return self.keep(result) if isinstance(result.outcome, UserInputRequested) else result.outcome

    def keep(self, result: RunResult) -> Any:
        outcome = result.outcome
        if self.host.store is None and isinstance(outcome, UserInputRequested):
            self.waiting = outcome.suspension_record.to_json()
        return outcome


@pytest.fixture(params=[True, False], ids=["stored", "record"])
def desk(request: pytest.FixtureRequest) -> Callable[..., Desk]:
    return partial(Desk, stored=request.param)


def test_a_call_runs_once_two_distinct_permitted_actors_have_approved_it(desk: Callable[..., Desk]) -> None:
    d = desk(FOUR_EYES)
    d.ask()
    for by, error in ((ANN, ActorIsRequesterError), (CLERK, ActorRoleError), (None, AuthenticationError)):
        with pytest.raises(error):
            d.reply(Allow(), by)
    first = d.reply(Allow(), BOB)
    assert [v.id for v in first.quorum.votes] == ["bob"]
    assert d.paid == []
    with pytest.raises(RepeatedVoteError):
        d.reply(Allow(), BOB)
    d.reply(Allow(), CY)
    assert d.paid == [5]


def test_one_denial_denies_whoever_approved_before(desk: Callable[..., Desk]) -> None:
    d = desk(FOUR_EYES)
    d.ask()
    d.reply(Allow(), BOB)
    with pytest.raises(ActorRoleError):
        d.reply(Deny(), CLERK)
    outcome = d.reply(Deny("no"), CY)
    assert type(outcome).__name__ == "RunCompleted"
    assert d.paid == []


def test_several_people_cannot_approve_an_edit(desk: Callable[..., Desk]) -> None:
    d = desk(FOUR_EYES)
    d.ask()
    with pytest.raises(HumanReplyError, match="edit"):
        d.reply(Edit({"amount": 500}), BOB)
    assert d.paid == []


def test_one_person_of_a_role_may_edit(desk: Callable[..., Desk]) -> None:
    d = desk(Approval(roles=("manager",)))
    d.ask()
    with pytest.raises(ActorRoleError):
        d.reply(Edit({"amount": 6}), CLERK)
    d.reply(Edit({"amount": 6}), BOB)
    assert d.paid == [6]


def test_an_edit_that_makes_the_rule_stricter_is_put_to_more_people() -> None:
    def rule(arguments: Any) -> Approval:
        return Approval(n=2 if arguments["amount"] > 100 else 1)

    d = Desk(rule)
    d.ask()
    again = d.reply(Edit({"amount": 500}), BOB)
    assert "by those who must approve it now" in again.question
    assert d.paid == []
    d.reply(Allow(), BOB)
    d.reply(Allow(), CY)
    assert d.paid == [500]


def test_a_rule_may_be_a_function_of_the_arguments_and_the_context() -> None:
    def rule(arguments: Any, context: Any) -> Approval | bool:
        assert context.run.requester == Actor("ann", ("manager",))
        return Approval(roles=("manager",)) if arguments["amount"] > 100 else False

    d = Desk(rule)
    assert type(d.ask(amount=5)).__name__ != "UserInputRequested"
    assert d.paid == [5]
    d = Desk(rule)
    d.ask(amount=500)
    with pytest.raises(ActorRoleError):
        d.reply(Allow(), CLERK)


def test_where_nobody_is_recorded_as_the_requester_nobody_passes_for_another(desk: Callable[..., Desk]) -> None:
    d = desk(Approval(not_requester=True))
    d.ask(actor=None)
    with pytest.raises(ActorIsRequesterError, match="nobody is recorded"):
        d.reply(Allow(), BOB)


def test_the_host_vouches_for_the_requester_and_for_each_answer(desk: Callable[..., Desk]) -> None:
    async def authenticate(token: Any) -> Actor | None:
        return {"t-ann": ANN, "t-bob": BOB}[token]

    d = desk(Approval(roles=("manager",), not_requester=True), authenticate=authenticate)
    d.ask(actor="t-ann")
    for by in (None, BOB, "ann", Actor("bob", ("manager",), verified=True)):
        with pytest.raises(AuthenticationError):
            d.reply(Allow(), by)
    with pytest.raises(ActorIsRequesterError):
        d.reply(Allow(), "t-ann")
    d.reply(Allow(), "t-bob")
    assert d.paid == [5]


def refuse(token: Any) -> None:
    """Vouch for nobody."""


def test_a_refused_requester_starts_nothing() -> None:
    d = Desk(True, authenticate=refuse)
    with pytest.raises(AuthenticationError, match="refused"):
        d.ask(actor="t")
    assert d.host.store is not None
    assert asyncio.run(d.host.store.heads()) == []


def test_what_a_caller_says_about_verification_is_not_believed() -> None:
    d = Desk(FOUR_EYES)
    d.ask(actor=Actor("ann", verified=True))
    votes = d.reply(Allow(), Actor("bob", ("manager",), verified=True)).quorum
    assert not votes.requester.verified
    assert not votes.votes[0].verified
    assert "claimed, not verified" in str(votes.votes[0])


def test_a_token_stands_in_no_error_and_no_repr() -> None:
    def authenticate(token: str) -> Actor:
        raise ValueError(f"bad token {token}")

    d = Desk(True, authenticate=authenticate)
    with pytest.raises(AuthenticationError) as caught:
        d.ask(actor="s3cr3t-token")
    assert "s3cr3t" not in str(caught.value)


def test_votes_and_escalation_extend_no_deadline(desk: Callable[..., Desk]) -> None:
    d = desk(Approval(n=2, validity_s=100))
    asked = d.ask().suspension_record.expires_at
    d.clock.advance(60)
    assert d.reply(Allow(), BOB).suspension_record.expires_at == asked
    d.clock.advance(41)
    with pytest.raises(SuspensionExpiredError):
        d.reply(Allow(), CY)
    assert d.paid == []


def test_a_request_escalates_to_other_roles_once_its_time_has_come(desk: Callable[..., Desk]) -> None:
    rule = Approval(n=2, roles=("manager",), escalate_to=("director",), escalate_after_s=60)
    d = desk(rule)
    d.ask()
    with pytest.raises(ActorRoleError):
        d.reply(Allow(), DIRECTOR)
    d.reply(Allow(), BOB)
    d.clock.advance(60)
    escalated = d.reply(None)
    assert escalated.quorum.escalated
    assert [v.id for v in escalated.quorum.votes] == ["bob"]
    with pytest.raises(ActorRoleError):
        d.reply(Allow(), CLERK)
    d.reply(Allow(), DIRECTOR)
    assert d.paid == [5]


def test_an_answer_escalates_a_request_that_is_due(desk: Callable[..., Desk]) -> None:
    d = desk(Approval(roles=("manager",), escalate_to=("director",), escalate_after_s=60))
    d.ask()
    d.clock.advance(61)
    d.reply(Allow(), DIRECTOR)
    assert d.paid == [5]


def test_an_agent_whose_graph_counts_no_votes_is_refused_when_it_is_created() -> None:
    d = Desk(FOUR_EYES)
    with pytest.raises(GraphError, match="with_votes"):
        Agent(ScriptedModel(["x"]), tools=[d.pay], graph=LOOP)
    graph = with_votes(LOOP)
    assert Agent(ScriptedModel(["x"]), tools=[d.pay], graph=graph).graph == d.agent().graph == graph
    assert with_votes(graph) == graph


def test_a_rule_that_the_graph_cannot_count_ends_the_run_and_not_in_a_payment() -> None:
    def rule(arguments: Any) -> object:
        return Approval(n=2)

    d = Desk(rule)
    assert isinstance(d.ask(), RunAborted)
    assert d.paid == []


def test_runs_stored_before_a_rule_needed_votes_continue(tmp_path: Any) -> None:
    d = Desk(True)
    d.ask()
    new = Desk(FOUR_EYES)
    agent = Agent(ScriptedModel(["Done."]), tools=[new.pay], host=d.host)

    async def resume() -> Any:
        return (await agent.resume("r", Allow(), by=BOB)).outcome

    asked_again = asyncio.run(resume())
    assert asked_again.quorum.missing == 2
    assert new.paid == []


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": 17},
        {"n": True},
        {"roles": "manager"},
        {"roles": ("",)},
        {"validity_s": 0},
        {"roles": ("a",), "escalate_to": ("b",)},
        {"roles": ("a",), "escalate_after_s": 5},
        {"escalate_to": ("b",), "escalate_after_s": 5},
        {"roles": ("a",), "escalate_to": ("b",), "escalate_after_s": 9, "validity_s": 9},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Approval(**bad)


def test_several_people_cannot_approve_a_call_with_secret_arguments() -> None:
    with pytest.raises(ToolDefinitionError, match="secret"):

        @tool(requires_approval=Approval(n=2), secret=["card"])
        def pay(card: str) -> str:
            """Pay."""
            return card


def test_records_of_several_processes_are_used_once_for_each_vote(tmp_path: Any) -> None:
    d = Desk(FOUR_EYES, stored=False, replay_guard=FileReplayGuard(tmp_path))
    d.ask()
    used = d.waiting
    d.reply(Allow(), BOB)
    d.waiting = used
    with pytest.raises(SuspensionUsedError, match="already resumed"):
        d.reply(Allow(), CY)
    assert d.paid == []


class DeskBelow(Desk):
    """The same, where a sub-agent of the agent pays."""

    graph: Any = None

    def agent(self, *script: Any) -> Agent:
        helper = Agent(ScriptedModel([call("pay", amount=7), "Paid."] if script else ["Paid."]), tools=[self.pay])
        delegates = [call("worker", task="Pay.")] if script else ["Done."]
        return Agent(
            ScriptedModel(delegates), tools=[helper.as_tool("worker", "Pays.")], graph=self.graph, host=self.host
        )


@pytest.fixture(params=[True, False], ids=["stored", "record"])
def desk_below(request: pytest.FixtureRequest) -> Callable[..., DeskBelow]:
    return partial(DeskBelow, stored=request.param)


def test_a_sub_agents_call_gets_its_votes_through_the_calling_run(desk_below: Callable[..., DeskBelow]) -> None:
    d = desk_below(FOUR_EYES)
    d.ask()
    for by, error in ((ANN, ActorIsRequesterError), (CLERK, ActorRoleError)):
        with pytest.raises(error):
            d.reply(Allow(), by)
    assert [v.id for v in d.reply(Allow(), BOB).quorum.votes] == ["bob"]
    with pytest.raises(RepeatedVoteError):
        d.reply(Allow(), BOB)
    d.reply(Allow(), CY)
    assert d.paid == [7]


def test_a_sub_agents_request_escalates_through_the_calling_run(desk_below: Callable[..., DeskBelow]) -> None:
    d = desk_below(Approval(n=2, roles=("manager",), escalate_to=("director",), escalate_after_s=60))
    d.ask()
    with pytest.raises(ActorRoleError):
        d.reply(Allow(), DIRECTOR)
    d.clock.advance(60)
    assert d.reply(None).quorum.roles == ("manager", "director")
    with pytest.raises(ActorRoleError):
        d.reply(Allow(), CLERK)
    assert [v.id for v in d.reply(Allow(), BOB).quorum.votes] == ["bob"]
    d.reply(Allow(), DIRECTOR)
    assert d.paid == [7]


def test_a_sub_agents_request_that_is_due_is_escalated_by_the_next_answer_where_the_callers_graph_counts_no_votes(
    desk_below: Callable[..., DeskBelow],
) -> None:
    d = desk_below(Approval(roles=("manager",), escalate_to=("director",), escalate_after_s=60))
    d.graph = LOOP
    d.ask()
    d.clock.advance(60)
    with pytest.raises(BlankHumanReplyError):
        d.reply(None)
    d.reply(Allow(), DIRECTOR)
    assert d.paid == [7]


# -- offline: what verify finds -----------------------------------------------------------------------


def test_verify_checks_the_votes_against_the_rule_in_the_journal() -> None:
    d = Desk(Approval(n=2, roles=("manager",), not_requester=True, escalate_to=("director",), escalate_after_s=60))
    d.ask()
    d.reply(Allow(), BOB)
    d.clock.advance(60)
    d.reply(Allow(), DIRECTOR)
    store = d.host.store
    assert store is not None
    records = asyncio.run(store.records("r"))
    assert verify("r", records).code == GOOD

    def found(change: Callable[[Any], None]) -> str:
        """What a verifier of the history says of a journal with a change in each record, hashed again."""
        history = HistoryVerifier("r")
        try:
            for record in records:
                body = json.loads(record.body)
                change(body)
                history.verify_record(body, record.hash)
        except InvalidRecordError as error:
            return str(error)
        return ""

    def voter(**changes: Any) -> Callable[[Any], None]:
        def change(body: Any) -> None:
            reply = body.get("out", {}).get("answered", {}).get("reply", {})
            if reply.get("actor", {}).get("id") == "eve":
                reply["actor"].update(changes)

        return change

    def rule(**changes: Any) -> Callable[[Any], None]:
        def change(body: Any) -> None:
            waiting: Any = body.get("waiting") or body.get("out", {}).get("parked", {}).get("waiting") or {}
            waiting.get("quorum", {}).get("rule", {}).update(changes)

        return change

    def drop_vote(body: Any) -> None:
        if body.get("kind") == "run.suspended" and body["waiting"]["quorum"].get("votes"):
            body["waiting"]["quorum"]["votes"][0]["id"] = "forged"

    def early(body: Any) -> None:
        if "escalated" in body.get("out", {}):
            body["ts"] -= 2

    assert found(lambda body: None) == ""
    assert "has approved this call already" in found(voter(id="bob"))
    assert "may answer" in found(voter(roles=["clerk"]))
    assert "requested it" in found(voter(id="ann"))
    assert "with 2 of the 3 approvals" in found(rule(n=3))
    assert "other votes" in found(drop_vote)
    assert "not due yet" in found(early)


def with_announcement(skip: Any) -> Any:
    """A graph with a state whose effect pays, and a row past the wait for its approval."""

    async def announce(context: StateContext) -> str:
        return (await context.call_tool("pay", {"amount": 5})).content

    waiting_rows = [
        Transition("asking", approval_decided, "announce"),
        Transition("asking", doubt_settled, "announce"),
        Transition("asking", vote_recorded, "asking", spends="votes"),
        Transition("asking", escalated, "asking", spends="escalations"),
    ]
    graph = with_votes(LOOP).with_state(
        StateSpec("announce", effect=announce),
        [Transition("announce", None, "terminal", ends="completed")],
        entered_by="post_llm.otherwise",
    )
    graph = graph.with_state(
        StateSpec("asking", waits=True), waiting_rows, entered_by=Transition("announce", approval_required, "asking")
    )
    graph = graph.with_transition(Transition("announce", in_doubt, "asking"))
    return graph.with_transition(Transition("announce", skip, "pre_step"), before="approval_required")


def in_a_hurry(run: RunState) -> bool:
    return run.model_calls < 2


def past_dispatch() -> Any:
    """A table in which a batch goes on, once, where a call of it needs an approval."""
    graph = with_votes(LOOP).with_counter(Counter("hurries", 1))
    hurry = Transition("dispatch_tool", in_a_hurry, "recover", spends="hurries")
    return graph.with_transition(hurry, before="approval_required")


def past_the_vote() -> Any:
    """A table in which the model is asked again as soon as somebody has voted."""
    graph = with_votes(LOOP).with_counter(Counter("hurries", 1))
    hurry = Transition("suspended", in_a_hurry, "pre_step", spends="hurries")
    return graph.with_transition(hurry, before="vote_recorded")


@pytest.mark.parametrize(
    ("graph", "script"),
    [
        (with_announcement(in_a_hurry), ["Soon.", "Now."]),
        (past_dispatch(), [call("pay", amount=5), call("pay", amount=5), "Paid."]),
        (past_the_vote(), [call("pay", amount=5), call("pay", amount=5), "Paid."]),
    ],
    ids=["past a call of a state", "past a call of a batch", "past a vote"],
)
@pytest.mark.parametrize("limit", [1, 9])
def test_a_run_whose_table_leads_past_the_wait_for_an_approval_verifies_and_goes_on(
    graph: Any, script: list[Any], limit: int
) -> None:
    paid: list[int] = []

    @tool(requires_approval=Approval(2))
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    async def main() -> None:
        host = Host(store=MemoryStore(), secret=b"of the tests")
        limits = AgentGuardrails(max_iterations=limit)
        agent = Agent(ScriptedModel(script), tools=[pay], graph=graph, guardrails=limits, host=host)
        outcome = (await agent.run("Pay.", run_id="r")).outcome
        asked = []
        while isinstance(outcome, UserInputRequested):
            asked.append(outcome.kind)
            report = await Runs(host.store, secret=b"of the tests").verify("r")  # type: ignore[arg-type]
            assert (report.code, report.reason) == (OPEN, "")
            reply: Any = Allow() if outcome.kind == "approval" else "Go on."
            outcome = (await agent.resume("r", reply, by=(BOB, CY)[len(asked) % 2])).outcome
        assert isinstance(outcome, RunCompleted)
        assert asked.count("limit") == (limit == 1) * (len(script) - 1)
        assert asked.count("approval") >= 2
        assert paid == [5]
        assert verify("r", await host.store.records("r")).code == GOOD  # type: ignore[union-attr]

    asyncio.run(main())


def test_verify_finds_a_call_that_starts_while_its_votes_are_missing() -> None:
    d = Desk(FOUR_EYES)
    d.ask()
    d.reply(Allow(), BOB)
    store = d.host.store
    assert store is not None
    history = HistoryVerifier("r")
    for record in asyncio.run(store.records("r")):
        history.verify_record(json.loads(record.body), record.hash)
    history.verify_record({"kind": "run.resumed", "epoch": 9, "from": "approval"}, "")
    intent = {"kind": "effect.intent", "epoch": 9, "eid": "1.0", "name": "pay", "policy": "once"}
    with pytest.raises(InvalidRecordError, match="while the run waits"):
        history.verify_record(intent, "")


@pytest.mark.parametrize("reply", [ItDidNotRun(), ItRan("paid"), GiveUp()], ids=repr)
def test_whether_an_approved_call_ran_is_said_by_one_of_those_who_may_approve_it(reply: Any, tmp_path: Path) -> None:
    paid: list[int] = []

    @tool(requires_approval=FOUR_EYES)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        if not (tmp_path / "found").exists():  # what is found of a machine that died at this moment
            shutil.copytree(tmp_path / "live", tmp_path / "found")
        return "paid"

    def agent(store: SqliteStore, *script: Any) -> Agent:
        return Agent(ScriptedModel(script), tools=[pay], host=Host(store=store, secret=b"of the tests"))

    async def main() -> None:
        (tmp_path / "live").mkdir()
        async with SqliteStore(tmp_path / "live" / "runs.db") as store:
            await agent(store, call("pay", amount=5)).run("Pay.", run_id="r", actor=ANN)
            await agent(store).resume("r", Allow(), by=BOB)
            await agent(store, "Paid.").resume("r", Allow(), by=CY)
        assert paid == [5]
        async with SqliteStore(tmp_path / "found" / "runs.db") as store:
            runs = Runs(store, secret=b"of the tests")
            asked = (await agent(store).resume("r")).outcome
            assert isinstance(asked, UserInputRequested)
            assert asked.kind == "in_doubt"
            for by, error in ((ANN, ActorIsRequesterError), (CLERK, ActorRoleError), (None, AuthenticationError)):
                with pytest.raises(error):
                    await agent(store).resume("r", reply, by=by)
                with pytest.raises(error):
                    await runs.answer("r", reply, by=by)
            assert paid == [5]
            result = await agent(store, "Done.").resume("r", reply, by=BOB)
            assert result.output == "Done."
            assert paid == ([5, 5] if isinstance(reply, ItDidNotRun) else [5])
            assert (await runs.verify("r")).code == GOOD
            history, settled = HistoryVerifier("r"), 0
            with pytest.raises(InvalidRecordError, match="one of \\(manager\\) may answer"):  # noqa: PT012
                for record in await store.records("r"):
                    body = json.loads(record.body)
                    said = body.get("out", {}).get("answered", {}).get("reply", {})
                    settled += said.get("kind") in ("ran", "did_not_run", "give_up")
                    if settled and "actor" in said:
                        said["actor"]["roles"] = ["clerk"]
                    history.verify_record(body, record.hash)
            assert settled == 1

    asyncio.run(main())


def test_a_vote_that_another_process_only_claims_does_not_count_for_a_host_that_authenticates() -> None:
    d = Desk(Approval(n=2, roles=("manager",)))
    d.ask()
    d.reply(Allow(), replace(BOB, verified=True))  # as agentfsm resume --by bob --role manager does
    d.host = replace(d.host, authenticate={"ann": ANN, "bob": BOB, "cy": CY}.get)
    asked_again = d.reply(Allow(), "cy")
    assert asked_again.quorum.votes == ()
    assert "not by those who must approve it now" in asked_again.question
    d.reply(Allow(), "cy")
    assert d.paid == []
    d.reply(Allow(), "bob")
    assert d.paid == [5]
    store = d.host.store
    assert store is not None
    assert verify("r", asyncio.run(store.records("r")), asyncio.run(store.head("r"))).code == GOOD


DIRECTORY = {"ann": ANN, "bob": BOB, "cy": CY}


@pytest.mark.parametrize("rule", [Approval(not_requester=True), FOUR_EYES], ids=["one", "two"])
def test_who_only_claims_to_be_another_requester_cannot_have_a_call_approved_where_the_host_authenticates(
    desk: Callable[..., Desk], rule: Approval
) -> None:
    d = desk(rule)
    d.ask(actor=replace(ANN, verified=True))  # as bob does with agentfsm run --actor ann, to approve it himself
    d.host = replace(d.host, authenticate=DIRECTORY.get)
    for by in ("ann", "bob", "cy"):
        with pytest.raises(
            ActorIsRequesterError, match="requested it" if by == "ann" else "nobody vouched for its req"
        ):
            d.reply(Allow(), by)
    if rule.n == 1:
        with pytest.raises(ActorIsRequesterError, match="the run still waits"):
            d.reply(Edit({"amount": 1}), "bob")
    assert type(d.reply(Deny("no"), "bob")).__name__ == "RunCompleted"
    assert d.paid == []


def test_a_host_that_does_not_authenticate_takes_its_requester_as_claimed(desk: Callable[..., Desk]) -> None:
    d = desk(Approval(not_requester=True))
    d.ask()
    d.reply(Allow(), BOB)
    assert d.paid == [5]


def test_an_approval_under_a_rule_that_has_become_four_eyes_does_not_count_if_the_requester_is_only_claimed() -> None:
    d = Desk(Approval(roles=("manager",)))
    d.ask()
    stricter = Desk(Approval(roles=("manager",), not_requester=True))
    stricter.host = replace(d.host, authenticate=DIRECTORY.get)
    asked_again = stricter.reply(Allow(), "bob")
    assert "not by those who must approve it now" in asked_again.question
    with pytest.raises(ActorIsRequesterError, match="nobody vouched"):
        stricter.reply(Allow(), "cy")
    assert stricter.paid == []


def test_nobody_approves_a_sub_agents_call_for_a_requester_who_is_only_claimed() -> None:
    d = Desk(Approval(not_requester=True))
    worker = Agent(ScriptedModel([call("pay", amount=7), "Paid."]), tools=[d.pay])

    async def main() -> None:
        sub = worker.as_tool("worker", "Pays.")
        asking = Agent(ScriptedModel([call("worker", task="Pay 7.")]), tools=[sub], host=d.host)
        await asking.run("Pay.", run_id="r", actor=ANN)
        answering = Agent(ScriptedModel(["Done."]), tools=[sub], host=replace(d.host, authenticate=DIRECTORY.get))
        with pytest.raises(ActorIsRequesterError, match="nobody vouched"):
            await answering.resume("r", Allow(), by="bob")
        assert (await answering.resume("r", Deny("no"), by="bob")).output == "Done."

    asyncio.run(main())
    assert d.paid == []


@pytest.mark.parametrize("at", ["its beginning", "its end"])
def test_a_fork_keeps_a_requester_who_is_only_claimed(at: str) -> None:
    d = Desk(Approval(not_requester=True))
    d.ask()
    store, d.waiting = d.host.store, "fork"
    assert store is not None
    d.host = replace(d.host, authenticate=DIRECTORY.get)

    async def main() -> None:
        last = 1 if at == "its beginning" else len(await store.records("r"))
        await Runs(store, secret=d.host.secret).fork("r", last, "fork")
        if last == 1:
            asked = (await d.agent(call("pay", amount=5)).resume("fork")).outcome
            assert isinstance(asked, UserInputRequested)

    asyncio.run(main())
    with pytest.raises(ActorIsRequesterError, match="nobody vouched"):
        d.reply(Allow(), "bob")
    assert d.paid == []
