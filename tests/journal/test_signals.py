"""Answers and cancellations that wait in a store: sent from anywhere, acted on once, and only if they still fit."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, SecretStr

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Deny,
    Edit,
    Extend,
    Host,
    ItRan,
    MemoryStore,
    MissingExtraError,
    ModelReplied,
    RunCancelled,
    RunCompleted,
    RunQuery,
    Runs,
    SqliteStore,
    UserInputRequested,
    ask_user,
    tool,
)
from agentfsm.errors import (
    ActorIsRequesterError,
    AuthenticationError,
    BlankHumanReplyError,
    ConfigurationError,
    HumanReplyError,
    JournalError,
    RepeatedVoteError,
    RunEndedError,
    RunError,
    StaleHumanReplyError,
    UnknownRunError,
)
from agentfsm.journal.adoption import adopt
from agentfsm.journal.signals import SealedSignal, open_signal, read_signals, seal_signal
from agentfsm.journal.verification import GOOD
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import Keyring
from agentfsm.runs import runs_for
from agentfsm.runtime.run import advance, hand_over
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call

SECRET = b"the secret of the tests"
ANN, BOB, CY = (Actor(name, ("manager",)) for name in ("ann", "bob", "cy"))


@tool
def look() -> str:
    """Look."""
    return "seen"


class Shop:
    """An app with a store: its agent, and what it has paid."""

    def __init__(self, store: Any, **host: Any) -> None:
        self.store, self.paid = store, list[int]()
        self.host = Host(store=store, secret=SECRET, **host)
        self.runs = Runs(store, secret=SECRET)
        self.inside, self.go_on = asyncio.Event(), asyncio.Event()

    def agent(self, *script: Any, rule: Approval | bool = True) -> Agent:
        return self.agent_of(ScriptedModel(list(script)), rule)

    def agent_of(self, model: Any, rule: Approval | bool = True) -> Agent:
        @tool(requires_approval=rule)
        def pay(amount: int) -> str:
            """Pay."""
            self.paid.append(amount)
            return "paid"

        @tool
        async def wait() -> str:
            """Wait."""
            self.inside.set()
            await self.go_on.wait()
            return "waited"

        return Agent(model, tools=[pay, wait, look], host=self.host)

    async def asks(self, run_id: str = "one", **options: Any) -> UserInputRequested:
        result = await self.agent(call("pay", amount=5), **options).run("Pay 5.", run_id=run_id, actor="eve")
        assert isinstance(result.outcome, UserInputRequested)
        return result.outcome

    async def outcomes(self, *script: Any, **options: Any) -> list[Any]:
        """What the runs come to that have something to do."""
        return [(await run).outcome for run in await self.agent(*script, **options).unfinished_runs()]

    async def pending(self) -> int:
        return len(await self.store.signals.pending())


@pytest.fixture(params=["memory", "sqlite"])
def with_shop(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    def play(scenario: Callable[[Shop], Awaitable[None]], **host: Any) -> None:
        async def main() -> None:
            async with MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db") as store:
                await scenario(Shop(store, **host))

        asyncio.run(main())

    return play


def test_an_answer_is_acted_on_once_by_whoever_has_the_agent(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        sent = await shop.runs.answer("on", Allow(), by="ann")
        assert (sent.run_id, sent.kind, sent.owner) == ("one", "answer", None)
        assert shop.paid == []
        (outcome,) = await shop.outcomes("Paid.")
        assert isinstance(outcome, RunCompleted)
        assert (shop.paid, await shop.pending()) == ([5], 0)
        assert await shop.outcomes() == []
        run = await shop.runs.get("one")
        assert [decision.by for decision in run.ledger.decisions] == ["ann"]
        assert (await shop.runs.verify("one")).code == GOOD

    with_shop(scenario)


@pytest.mark.parametrize(
    ("reply", "paid"), [(Deny("too much"), []), (Edit({"amount": 3}), [3]), (Allow(), [5])], ids=repr
)
def test_every_reply_to_an_approval_can_be_sent(with_shop: Any, reply: Any, paid: list[int]) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", reply)
        await shop.outcomes("Done.")
        assert shop.paid == paid

    with_shop(scenario)


def test_an_answer_that_quotes_a_sealed_secret_from_a_journal_is_acted_on_and_opens_nothing(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.agent("It is kq8Zt3wv5-secret.").run("What is it?", run_id="other")
        found = re.search(r"\[sealed \w+ [\w-]+\]", str(await shop.store.records("other")))
        assert found is not None
        await shop.asks()
        await shop.runs.answer("one", Deny(f"not with {found[0]}"))
        model = RecordingModel(ScriptedModel(["No."]))
        (run,) = await shop.agent_of(model).unfinished_runs()
        assert (await run).output == "No."
        assert shop.paid == []
        assert "kq8Zt3wv5-secret" not in str(model.requests)
        assert "Denied by the user: not with " in str(model.requests)
        assert await shop.pending() == 0

    with_shop(scenario, secrets=[SecretStr("kq8Zt3wv5-secret")])


def test_a_second_answer_to_a_request_is_refused_and_so_is_one_to_another_request(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        request = await shop.asks()
        with pytest.raises(StaleHumanReplyError, match="now waits for a reply to record"):
            await shop.runs.answer("one", Allow(), to="0" * 64)
        with pytest.raises(StaleHumanReplyError, match="at least its first 12 digits"):
            await shop.runs.answer("one", Allow(), to=request.digest[:5])
        sent = await asyncio.gather(
            shop.runs.answer("one", Allow(), by="ann", to=request.digest),
            shop.runs.answer("one", Deny("no"), by="bob"),
            return_exceptions=True,
        )
        (refused,) = (each for each in sent if isinstance(each, Exception))
        assert isinstance(refused, StaleHumanReplyError)
        assert "was answered already by" in str(refused)
        assert await shop.pending() == 1

    with_shop(scenario)


@pytest.mark.parametrize(
    ("reply", "error"), [("yes", HumanReplyError), (" ", BlankHumanReplyError), (ItRan(), HumanReplyError)]
)
def test_a_reply_of_another_kind_is_refused_when_it_is_sent(with_shop: Any, reply: Any, error: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        with pytest.raises(error):
            await shop.runs.answer("one", reply)
        assert await shop.pending() == 0

    with_shop(scenario)


def test_to_resume_without_a_reply_says_who_acts_on_one_that_was_sent(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", Allow())
        with pytest.raises(BlankHumanReplyError, match=r"approval.*none is given.*agent\.next_run"):
            await shop.agent().resume("one")
        run = await shop.agent("paid").next_run("one")
        assert run is not None
        assert (await run).output == "paid"
        assert shop.paid == [5]

    with_shop(scenario)


def test_an_answer_that_was_overtaken_is_dropped(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", Allow())
        asked_again = await shop.agent(call("pay", amount=7)).resume("one", Deny("not 5"))
        assert isinstance(asked_again.outcome, UserInputRequested)
        assert await shop.outcomes() == []
        assert (shop.paid, await shop.pending()) == ([], 0)
        await shop.runs.answer("one", Allow())
        await shop.outcomes("Paid.")
        assert shop.paid == [7]

    with_shop(scenario)


def test_a_reply_that_the_tool_refuses_is_dropped_and_the_run_waits_on(
    with_shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", Edit({"amount": "much"}))
        with caplog.at_level(logging.WARNING, "agentfsm"):
            assert await shop.outcomes() == []
        assert "not valid for 'pay'" in caplog.text
        await shop.runs.answer("one", Allow())
        await shop.outcomes("Paid.")
        assert shop.paid == [5]

    with_shop(scenario)


def test_whoever_gave_an_answer_that_was_refused_can_read_why_until_there_is_a_new_one(
    with_shop: Any,
) -> None:
    async def scenario(shop: Shop) -> None:
        request = await shop.asks()
        await shop.runs.answer("one", Edit({"amount": "much"}), by="ann")
        assert (await shop.runs.get("one")).refused == ""
        assert await shop.outcomes() == []
        said = (await shop.runs.get("one")).refused
        assert said.startswith("the last answer (edit) by ann, claimed, not verified was refused: ")
        assert "not valid for 'pay', and the run still waits" in said
        (refusal,) = await read_signals(shop.store.signals, Keyring(SECRET))
        assert (refusal.kind, refusal.to[1], refusal.reply) == ("refusal", request.digest, HumanReply("edit"))
        assert (await Runs(shop.store).get("one")).refused == ""  # nobody without the secret can read it
        assert await shop.outcomes() == []  # a refusal gives a process nothing to do
        await shop.runs.answer("one", Edit({"amount": "more"}), by="bob")
        assert (await shop.runs.get("one")).refused == ""
        assert await shop.outcomes() == []
        assert "by bob" in (await shop.runs.get("one")).refused
        await shop.runs.answer("one", Allow())
        await shop.outcomes("Paid.")
        assert (shop.paid, await shop.pending()) == ([5], 0)

    with_shop(scenario)


def check_pin(pin: str) -> str:
    if pin.startswith("canary"):
        raise ValueError(f"{pin} is too old")
    return pin


def test_why_an_answer_was_refused_is_told_without_the_secrets_in_it() -> None:
    pytest.importorskip("cryptography")

    @tool(requires_approval=True, secret=["pin"])
    def unlock(door: int, pin: Annotated[str, AfterValidator(check_pin)]) -> str:
        """Unlock a door."""
        return "unlocked"

    async def scenario() -> None:
        async with MemoryStore() as store:
            host = Host(store=store, secret=SECRET)
            agent = Agent(ScriptedModel([call("unlock", door=1, pin="1234")]), tools=[unlock], host=host)
            runs = Runs(store, secret=SECRET)
            await agent.run("Unlock it.", run_id="one")
            await runs.answer("one", Edit({"door": 2, "pin": "canary 4711"}))
            assert await agent.unfinished_runs() == []
            said = (await runs.get("one")).refused
            assert said.endswith(
                "not valid for 'unlock', and the run still waits: pin: value error, [withheld] is too old"
            )

    asyncio.run(scenario())


def test_why_an_answer_was_refused_is_told_also_where_the_run_was_adopted_since_it_asked() -> None:
    @tool(requires_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    async def scenario() -> None:
        async with MemoryStore() as store:
            hosts = [Host(store=store, secret=secret) for secret in (SECRET, b"another secret of the tests")]
            before, after = (Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay], host=host) for host in hosts)
            await before.run("Pay 5.", run_id="one")
            assert await adopt(store, "one", hosts[1].keyring)
            runs = Runs(store, secret=b"another secret of the tests")
            await runs.answer("one", Edit({"amount": "much"}))
            for _ in range(2):
                assert await after.unfinished_runs() == []
                assert "not valid for 'pay'" in (await runs.get("one")).refused

    asyncio.run(scenario())


def test_the_refusal_of_an_answer_does_not_outlast_its_request(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", Edit({"amount": "much"}))
        assert await shop.outcomes() == []
        asked_again = await shop.agent(call("pay", amount=7)).resume("one", Deny("not 5"))
        assert isinstance(asked_again.outcome, UserInputRequested)
        assert (await shop.runs.get("one")).refused == ""
        assert (await shop.outcomes(), await shop.pending()) == ([], 0)

    with_shop(scenario)


class ChangedShop(Shop):
    """The same app after its tool was changed."""

    def agent(self, *script: Any, rule: Approval | bool = True) -> Agent:
        @tool(requires_approval=rule)
        def pay(amount: int) -> str:
            """Pay, in another currency."""
            self.paid.append(amount)
            return "paid"

        return Agent(ScriptedModel(list(script)), tools=[pay, look], host=self.host)


@pytest.mark.parametrize("rule", [True, Approval(n=2)], ids=["one", "two"])
def test_an_approval_that_waits_for_a_tool_as_it_was_shown_can_be_overridden_by_a_denial(
    rule: Approval | bool, with_shop: Any
) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=rule)
        changed, voters = ChangedShop(shop.store), ["ann"] if rule is True else ["deny", "bob"]
        for voter in voters:
            await shop.runs.answer("one", Allow(), by=voter)
        with pytest.raises(StaleHumanReplyError, match="answered already"):
            await shop.runs.deny("one", by="cy")  # a process may act on what was sent before
        assert await changed.outcomes(rule=rule) == []
        said = (await shop.runs.get("one", wait_s=float("inf"))).refused
        assert f"(allow) by {voters[-1]}" in said
        assert "reply with Deny(reason)" in said
        with pytest.raises(HumanReplyError):
            await shop.runs.approve("one", by="ann")
        assert (await shop.runs.get("one")).refused == said
        await shop.runs.deny("one", "not in that currency", by="cy")
        with pytest.raises(StaleHumanReplyError, match="answered already"):
            await shop.runs.deny("one", by="cy")
        (outcome,) = await changed.outcomes("As you like.", rule=rule)
        assert isinstance(outcome, RunCompleted)
        assert (await changed.outcomes(), await shop.pending(), shop.paid + changed.paid) == ([], 0, [])
        assert (await shop.runs.verify("one")).code == GOOD

    with_shop(scenario)


def test_an_approval_that_one_process_could_not_act_on_is_acted_on_by_one_that_has_the_tool(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        changed = ChangedShop(shop.store)
        await shop.runs.approve("one", by="ann")
        for _ in range(2):
            assert await changed.outcomes() == []
        (outcome,) = await shop.outcomes("Paid.")
        assert isinstance(outcome, RunCompleted)
        assert (await shop.outcomes(), await shop.pending(), shop.paid) == ([], 0, [5])

    with_shop(scenario)


def test_each_of_several_refused_votes_has_its_refusal_until_the_same_voter_votes_again(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=RULE)
        for voter in (ANN, BOB):  # nobody vouches for them
            await shop.runs.answer("one", Allow(), by=voter)
        assert await shop.outcomes(rule=RULE) == []
        refusals = await read_signals(shop.store.signals, Keyring(SECRET))
        assert [(each.kind, each.actor) for each in refusals] == [("refusal", ANN), ("refusal", BOB)]
        assert "by bob" in (await shop.runs.get("one")).refused  # the last one
        desk = Runs(shop.store, secret=SECRET, authenticate={"token of bob": BOB}.get)
        await desk.answer("one", Allow(), by="token of bob")
        assert "by ann" in (await shop.runs.get("one")).refused
        (waiting,) = await shop.outcomes(rule=RULE)
        assert [vote.id for vote in waiting.quorum.votes] == ["bob"]
        assert (await shop.runs.get("one")).refused == ""
        assert (await shop.outcomes(rule=RULE), await shop.pending()) == ([], 0)

    with_shop(scenario, authenticate={"eve": Actor("eve")}.get)


def test_what_nobody_with_the_secret_sent_is_not_acted_on(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        request = await shop.asks()
        with pytest.raises(ConfigurationError, match="give the secret"):
            await Runs(shop.store).answer("one", Allow())
        with pytest.raises(JournalError, match="not sealed under this secret"):
            await Runs(shop.store, secret=b"another one").answer("one", Allow())
        await shop.runs.answer("one", Allow(), to=request.digest)
        (sealed,) = await shop.store.signals.pending()
        await shop.store.signals.remove(sealed.id)
        signal = open_signal(sealed, Keyring(SECRET))
        assert signal is not None
        for forged in (
            seal_signal(signal, Keyring(b"another one")),
            sealed._replace(mac="00" * 20),
            sealed._replace(body=sealed.body.replace('"answer"', '"cancel"')),
        ):
            assert await shop.store.signals.send(forged)
            assert await read_signals(shop.store.signals, Keyring(SECRET)) == []
            assert await shop.outcomes() == []
            await shop.store.signals.remove(sealed.id)
        assert shop.paid == []

    with_shop(scenario)


def test_an_answer_to_one_run_does_not_answer_another(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks("one")
        await shop.asks("two")
        await shop.runs.answer("one", Allow())
        (sealed,) = await shop.store.signals.pending()
        await shop.store.signals.remove(sealed.id)
        await shop.store.signals.send(sealed._replace(run_id="two"))
        assert await shop.outcomes() == []
        assert shop.paid == []

    with_shop(scenario)


RULE = Approval(n=2, roles=("manager",))


def test_votes_that_are_sent_while_nobody_acts_count_once_each(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=RULE)
        with pytest.raises(HumanReplyError, match="one of"):
            await shop.runs.answer("one", Allow(), by=Actor("dan", ("clerk",)))
        await shop.runs.answer("one", Allow(), by=ANN)
        with pytest.raises(RepeatedVoteError):
            await shop.runs.answer("one", Allow(), by=Actor("ANN", ("manager",)))
        await shop.runs.answer("one", Allow(), by=BOB)
        with pytest.raises(StaleHumanReplyError, match="answered already"):
            await shop.runs.answer("one", Allow(), by=CY)
        (waiting,) = await shop.outcomes(rule=RULE)
        assert isinstance(waiting, UserInputRequested)
        assert waiting.quorum is not None
        assert [vote.id for vote in waiting.quorum.votes] == ["ann"]
        assert shop.paid == []
        (outcome,) = await shop.outcomes("Paid.", rule=RULE)
        assert isinstance(outcome, RunCompleted)
        assert (shop.paid, await shop.pending()) == ([5], 0)

    with_shop(scenario)


def test_a_vote_that_was_acted_on_and_not_removed_does_not_count_again(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=RULE)
        await shop.runs.answer("one", Allow(), by=ANN)
        (sealed,) = await shop.store.signals.pending()
        await shop.outcomes(rule=RULE)
        await shop.store.signals.send(sealed)  # as after a crash between acting and removing
        assert await shop.outcomes(rule=RULE) == []
        assert (shop.paid, await shop.pending()) == ([], 0)

    with_shop(scenario)


def test_a_host_that_authenticates_believes_only_who_was_authenticated(
    with_shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = {"token of ann": ANN, "eve": Actor("eve")}

    async def scenario(shop: Shop) -> None:
        await shop.asks()
        desk = Runs(shop.store, secret=SECRET, authenticate=tokens.get)
        with pytest.raises(AuthenticationError):
            await desk.answer("one", Allow(), by="token of mallory")
        await shop.runs.answer("one", Allow(), by=ANN)  # nobody vouches for her
        with caplog.at_level(logging.WARNING, "agentfsm"):
            assert await shop.outcomes() == []
        assert "nobody vouched" in caplog.text
        await desk.answer("one", Allow(), by="token of ann")
        await shop.outcomes("Paid.")
        assert shop.paid == [5]
        run = await shop.runs.get("one")
        assert [decision.by for decision in run.ledger.decisions] == ["ann (manager)"]

    with_shop(scenario, authenticate=tokens.get)


def test_nobody_approves_from_elsewhere_for_a_requester_who_is_only_claimed(
    with_shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rule = Approval(not_requester=True)

    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=rule)
        shop.host = replace(shop.host, authenticate={"token of ann": ANN}.get)
        desk = Runs(shop.store, secret=SECRET, authenticate=shop.host.authenticate)
        with pytest.raises(ActorIsRequesterError, match="nobody vouched for its requester"):
            await desk.approve("one", by="token of ann")
        viewer = runs_for(desk, host_authenticates=False)  # it cannot know, without the agent
        await viewer.approve("one", by="token of ann")
        with caplog.at_level(logging.WARNING, "agentfsm"):
            assert await shop.outcomes(rule=rule) == []
        assert "nobody vouched for its requester" in caplog.text
        assert (await shop.runs.get("one")).request is not None
        await desk.deny("one", "no", by="token of ann")
        assert [type(outcome) for outcome in await shop.outcomes("Not paid.", rule=rule)] == [RunCompleted]
        assert shop.paid == []

    with_shop(scenario)


# -- cancellations ------------------------------------------------------------------------------------


def test_a_run_that_works_is_cancelled_at_once(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        running = asyncio.ensure_future(shop.agent(call("wait")).run("Wait.", run_id="one"))
        await shop.inside.wait()
        sent = await shop.runs.cancel("one", "not needed", by="ann")
        assert sent.owner is not None
        outcome = (await running).outcome
        assert isinstance(outcome, RunCancelled)
        assert outcome.reason == "not needed (by ann, claimed, not verified)"
        assert await shop.pending() == 0
        assert (await shop.runs.verify("one")).code == GOOD
        with pytest.raises(RunEndedError, match="has ended"):
            await shop.runs.cancel("one")

    with_shop(scenario)


def test_a_run_that_waits_is_cancelled_by_whoever_takes_it_up(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        await shop.asks()
        await shop.runs.answer("one", Allow())
        for _ in range(2):
            assert (await shop.runs.cancel("one", "not needed")).owner is None
        (outcome,) = await shop.outcomes()
        assert isinstance(outcome, RunCancelled)
        assert shop.paid == []
        assert await shop.outcomes() == []
        assert await shop.pending() == 0  # the answer fits no more

    with_shop(scenario)


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_cancelled_and_its_effect_is_not_repeated(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        run = shop.agent(call("look"), call("wait"), "Done.").run("Wait.", run_id="one")
        replies = 0
        while replies < 2:
            replies += isinstance(await anext(run), ModelReplied)
        del run
        gc.collect()  # its lease is free again
        await shop.runs.cancel("one", "not needed")
        (outcome,) = await shop.outcomes()
        assert isinstance(outcome, RunCancelled)
        assert not shop.inside.is_set()

    with_shop(scenario)


def test_what_is_sent_to_no_run_is_refused(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        with pytest.raises(UnknownRunError):
            await shop.runs.cancel("one")
        await shop.agent("Done.").run("Go.", run_id="one")
        for late in (
            shop.runs.answer("one", Allow()),
            shop.runs.cancel("one"),
            shop.agent().resume("one", Allow()).load(),
            shop.agent().dismiss("one").load(),
        ):
            with pytest.raises(RunEndedError, match="has ended"):
                await late

    with_shop(scenario)


def test_an_answer_wakes_whoever_listens(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        async def worker() -> None:
            async for run_id in shop.store.signals.listen():
                if run := await shop.agent("Paid.").next_run(run_id):
                    await run
                    return

        await shop.asks()
        working = asyncio.ensure_future(worker())
        await shop.runs.answer("one", Allow())
        await working
        assert shop.paid == [5]

    with_shop(scenario)


# -- every kind of request, secrets, sub-agents, deadlines ------------------------------------------------


def test_questions_and_limits_are_answered_too(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        asking = Agent(ScriptedModel([call("ask_user", question="Which?")]), tools=[ask_user], host=shop.host)
        answered = Agent(ScriptedModel(["The red one."]), tools=[ask_user], host=shop.host)
        await asking.run("Pick one.", run_id="question")
        await shop.runs.answer("question", "the red one")
        run = await answered.next_run("question")
        assert run is not None
        assert (await run).output == "The red one."
        assert any("the red one" in message.content for message in run.run_state.messages)
        limits = AgentGuardrails(max_iterations=1)
        few = Agent(ScriptedModel([call("look")]), tools=[look], guardrails=limits, host=shop.host)
        more = Agent(ScriptedModel(["Seen."]), tools=[look], guardrails=limits, host=shop.host)
        await few.run("Look.", run_id="limit")
        with pytest.raises(HumanReplyError):
            await shop.runs.answer("limit", Allow())
        await shop.runs.answer("limit", Extend(model_calls=1, message="Go on."))
        run = await more.next_run("limit")
        assert run is not None
        assert (await run).output == "Seen."

    with_shop(scenario)


def test_an_answer_to_a_sub_agent_goes_to_the_run_that_called_it(with_shop: Any) -> None:
    async def scenario(shop: Shop) -> None:
        def caller(*script: Any, inner: Sequence[Any] = ()) -> Agent:
            helper = shop.agent(*inner).as_tool("helper", "Pays.")
            return Agent(ScriptedModel(list(script)), tools=[helper], host=shop.host)

        outcome = (
            await caller(call("helper", task="Pay."), inner=[call("pay", amount=5)]).run("Go.", run_id="one")
        ).outcome
        assert isinstance(outcome, UserInputRequested)
        children = [info.run_id async for info in shop.runs.iterate(RunQuery(parent="one"))]
        with pytest.raises(RunError, match="sub-agent's run"):
            await shop.runs.answer(children[0], Allow())
        await shop.runs.answer("one", Allow())
        run = await caller("All done.", inner=["Paid."]).next_run("one")
        assert run is not None
        assert (await run).output == "All done."
        assert shop.paid == [5]

    with_shop(scenario)


def test_what_is_sent_can_be_read_with_the_secret_only_and_is_erased_when_it_was_acted_on(tmp_path: Path) -> None:
    def stored() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.glob("runs.db*"))

    async def scenario() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            shop = Shop(store)
            await shop.asks()
            await shop.runs.answer("one", Deny("because of canary-4711"))
            assert b"canary-4711" not in stored()
            await shop.store.signals.send(SealedSignal("plain", "one", '"canary-0815"', "00"))
            assert b"canary-0815" in stored()  # the search would find it
            await shop.store.signals.remove("plain")
            assert b"canary-0815" not in stored()

    asyncio.run(scenario())


def test_without_the_package_that_encrypts_an_edit_of_secret_arguments_is_not_stored(
    with_shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.loop.withholding._cipher", lambda keys: None)

    @tool(requires_approval=True, secret=["token"])
    def sign_in(token: str) -> str:
        """Sign in."""
        return "in"

    async def scenario(shop: Shop) -> None:
        agent = Agent(ScriptedModel([call("sign_in", token="t0ken-of-ann")]), tools=[sign_in], host=shop.host)
        await agent.run("Sign in.", run_id="one")
        with pytest.raises(MissingExtraError, match="sealing"):
            await shop.runs.answer("one", Edit({"token": "t0ken-of-bob"}))
        assert await shop.pending() == 0
        await shop.runs.answer("one", Deny("no"))

    with_shop(scenario)


@pytest.mark.parametrize("kind", ["deny", "text", "cancel"])
@pytest.mark.parametrize("form", [str, lambda key: base64.b64encode(key.encode()).decode()], ids=["plain", "base64"])
def test_without_that_package_what_has_a_secret_of_the_environment_is_not_stored(
    with_shop: Any, monkeypatch: pytest.MonkeyPatch, kind: str, form: Callable[[str], str]
) -> None:
    monkeypatch.setattr("agentfsm.loop.withholding._cipher", lambda keys: None)
    monkeypatch.setenv("LEDGER_API_KEY", key := "lk-9f8A7c6B5d4E3f2A1")

    async def scenario(shop: Shop) -> None:
        if kind == "text":
            await Agent(ScriptedModel([call("ask_user", question="Which?")]), host=shop.host, preset="funnel").run(
                "go", run_id="one"
            )
        else:
            await shop.asks()

        async def say(text: str) -> None:
            if kind == "cancel":
                await shop.runs.cancel("one", text)
            else:
                await shop.runs.answer("one", Deny(text) if kind == "deny" else text)

        with pytest.raises(MissingExtraError, match="sealing"):
            await say(f"use {form(key)}")
        assert await shop.pending() == 0
        await say("use another key")
        (waiting,) = await shop.store.signals.pending()
        assert "use another key" in waiting.body
        assert key not in waiting.body

    with_shop(scenario)


@pytest.mark.parametrize("kind", ["deny", "cancel"])
def test_without_that_package_what_has_a_secret_of_the_host_is_not_stored(
    with_shop: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("agentfsm.loop.withholding._cipher", lambda keys: None)

    async def scenario(shop: Shop) -> None:
        await shop.asks()
        runs = Runs(shop.store, secret=shop.host.secret, secrets=[SecretStr("the code is 4711")])

        async def say(text: str) -> None:
            await (runs.cancel("one", text) if kind == "cancel" else runs.deny("one", text))

        with pytest.raises(MissingExtraError, match="sealing"):
            await say("no: the code is 4711")
        assert await shop.pending() == 0
        await say("no")

    with_shop(scenario)


def test_an_answer_that_was_sent_in_time_counts_also_if_it_is_acted_on_later(with_shop: Any) -> None:
    clock = FakeClock(time.time())

    async def scenario(shop: Shop) -> None:
        await shop.asks(rule=Approval(validity_s=1000))
        await shop.runs.answer("one", Allow())
        clock.advance(2000)
        await shop.outcomes("Paid.", rule=Approval(validity_s=1000))
        assert shop.paid == [5]

    with_shop(scenario, clock=clock)


@pytest.mark.parametrize("way", ["resume", "session", "next_run"])
def test_an_interrupted_run_that_was_cancelled_does_nothing_more_however_slow_its_store_is(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> tuple[Any, list[int], int]:
        shop = Shop(MemoryStore())
        begun = shop.agent(call("pay", amount=5), rule=False).session("s").run("Pay 5.")
        await begun.load()
        while begun.run_state.state != "dispatch_tool":
            await advance(begun)
        await hand_over(begun)
        await shop.runs.cancel(begun.run_id, "by mistake")
        pending = shop.store.signals.pending

        async def from_afar(run_id: str | None = None) -> list[SealedSignal]:
            for _ in range(100):  # the round trip to a server
                await asyncio.sleep(0)
            return await pending(run_id)

        monkeypatch.setattr(shop.store.signals, "pending", from_afar)
        agent = shop.agent("Done.", rule=False)
        if way == "next_run":
            run = await agent.next_run(begun.run_id)
            assert run is not None
        else:
            run = agent.resume(begun.run_id) if way == "resume" else agent.session("s").run()
        return (await run).outcome, shop.paid, await shop.pending()

    outcome, paid, left = asyncio.run(scenario())
    assert (type(outcome), outcome.reason, paid, left) == (RunCancelled, "by mistake", [], 0)
