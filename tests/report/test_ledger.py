"""The ledger of a run says what its journal says, also where somebody changed it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from agentfsm import Actor, Agent, Allow, Approval, Deny, Edit, Failure, Host, RunState, tool
from agentfsm.journal.fork import fork
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.loop.transition_table import LOOP
from agentfsm.report.fragments import summary_html
from agentfsm.report.ledger import CostLine, RunLedger, TriedGuard, read_ledger
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import finished_run, waiting_run

ANN, BOB, CY = (Actor(name, ("manager",)) for name in ("ann", "bob", "cy"))


@tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
def transfer(amount: int) -> str:
    """Transfer."""
    return f"sent {amount}"


def ledger_of(run_id: str, store: MemoryStore) -> RunLedger:
    return read_ledger(run_id, asyncio.run(store.records(run_id)))


def transferred(*answers: tuple[Actor, Allow | Deny]) -> RunLedger:
    """Ann asks for a transfer of 5, and others answer."""
    store = MemoryStore()

    async def scene() -> None:
        host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
        await Agent(ScriptedModel([call("transfer", amount=5)]), tools=[transfer], host=host).run(
            "Pay.", run_id="it", actor=ANN
        )
        for who, answer in answers:
            agent = Agent(ScriptedModel(["It is done."]), tools=[transfer], host=host)
            await agent.resume("it", answer, by=who)

    asyncio.run(scene())
    return ledger_of("it", store)


def test_a_move_has_the_guards_that_were_evaluated_in_order_and_the_one_that_held() -> None:
    store, _ = finished_run(MemoryStore(), "whole")
    ledger = ledger_of("whole", store)
    assert (ledger.status, ledger.state, ledger.ending, ledger.answer) == (
        "finished",
        "terminal",
        "completed",
        "all done",
    )
    assert ledger.asked == "Do it all."
    names = {str(s.name): [row.name for row in LOOP.rows(s.name)] for s in LOOP.states}
    for row in ledger.moves:
        place = names[row.source].index(row.guard)
        assert row.did_not_hold == tuple(names[row.source][:place])
        assert row.tried[-1] == TriedGuard(row.guard, "held")
    busy = ledger.moves[6]
    assert (busy.transition, busy.target, busy.did_not_hold) == (
        "call_llm.transient_provider",
        "recover",
        ("cancelled", "aborted"),
    )
    assert busy.failure == "transient_provider: busy"
    assert ledger.moves[7].action == "retry, after 2 s"
    assert ledger.moves[7].seconds == 2.0
    overloaded = next(each for each in ledger.failures if each.kind == "transient_provider")
    assert overloaded.action == "retry, after 2 s: to pre_step"
    assert [row.target for row in ledger.moves[:-1]] == [row.source for row in ledger.moves[1:]]
    assert ledger.moves[-1].ends == "completed"


def faulty(run: RunState) -> Failure | None:
    raise OSError("no disk")


def test_a_guard_that_raised_is_followed_by_the_row_that_aborted_the_run() -> None:
    store, graph = MemoryStore(), LOOP.with_detector("post_llm", faulty, before="no_progress")
    agent = Agent(ScriptedModel(["done"]), graph=graph, host=Host(clock=FakeClock(), store=store))
    agent.run_sync("Go.", run_id="it")
    move = ledger_of("it", store).moves[-1]
    before = [row.name for row in graph.rows("post_llm")]
    assert move.tried == (
        *(TriedGuard(name, "no") for name in before[: before.index("faulty")]),
        TriedGuard("faulty", "raised"),
        TriedGuard("aborted", "held"),
    )


def test_budgets_are_what_is_left() -> None:
    store, _ = finished_run(MemoryStore(), "whole")
    left: dict[str, int | None] = {}
    for row in ledger_of("whole", store).moves:
        left |= dict(row.budgets)
    assert left["iterations"] == 50 - 5  # four replies and a failed call, of 50
    assert ("pending_calls", 63) in ledger_of("whole", store).moves[2].budgets


def test_two_votes_are_two_decisions_by_the_people_who_cast_them() -> None:
    ledger = transferred((BOB, Allow()), (CY, Allow()))
    assert [(d.by, d.answer, d.verified, d.tool, d.arguments) for d in ledger.decisions] == [
        ("bob (manager)", "allow", False, "transfer", '{"amount": 5}'),
        ("cy (manager)", "allow", False, "transfer", '{"amount": 5}'),
    ]
    assert ledger.decisions[0].rule == "2 approvals by manager, not by the requester"
    assert [d.came_to for d in ledger.decisions] == [
        "vote 1 of 2; the run waited for more",
        "vote 2 of 2; done: sent 5",
    ]
    assert ledger.requester == "ann (manager)"
    requests = [each for each in ledger.records if each.kind == "run.suspended"]
    assert [d.requested_hash for d in ledger.decisions] == [each.hash for each in requests]


def test_a_denied_call_did_not_run_and_a_waiting_one_has_not() -> None:
    denied = transferred((BOB, Deny("too much")))
    assert [(d.answer, d.text) for d in denied.decisions] == [("deny", "too much")]
    assert not any(entry.text == "sent 5" for entry in denied.transcript)
    waiting = transferred()
    assert (waiting.status, waiting.decisions) == ("suspended", ())
    assert waiting.waiting_for == "May 'transfer' run with these arguments? transfer {\"amount\": 5}"


def test_an_edit_has_the_arguments_before_and_after() -> None:
    store, _ = finished_run(MemoryStore(), "whole")
    (decision,) = ledger_of("whole", store).decisions
    assert json.loads(decision.arguments) == {"to": "Ann", "amount": 1.0}
    assert json.loads(decision.text) == {"to": "Bob", "amount": 2.0}
    assert decision.result == "done: paid 2.0 to Bob"
    assert Edit({"to": "Bob", "amount": 2.0}).arguments == json.loads(decision.text)


def test_the_transcript_has_every_message_in_order() -> None:
    store, result = finished_run(MemoryStore(), "whole")
    entries = ledger_of("whole", store).transcript
    assert [e.text for e in entries if e.role == "user"] == ["Do it all."]
    replies = [m.content for m in result.messages if m.role == "assistant"]
    assert [e.text for e in entries if e.role == "assistant"] == replies
    assert [e.name for e in entries if e.failed] == ["look", "look"]


def test_a_record_that_cannot_be_read_is_named_and_the_rest_is_there() -> None:
    store, _ = waiting_run(MemoryStore(), "it")
    rows = asyncio.run(store.records("it"))
    for body in ("{", '{"kind": "transition"}', rows[3].body.replace("call_llm.otherwise", "nowhere.otherwise")):
        broken = [*rows[:3], rows[3]._replace(body=body), *rows[4:]]
        ledger = read_ledger("it", broken)
        assert ledger.problems == ("record 4 is not a valid record",)
        assert len(ledger.moves) == len(ledger_of("it", store).moves) - 1
        assert ledger.last_seq == rows[-1].seq
    for start in range(1, len(rows)):
        assert read_ledger("it", rows[start:]).last_hash == rows[-1].hash
    assert read_ledger("it", []).moves == ()


def test_the_result_of_a_sub_agent_names_its_run() -> None:
    store = MemoryStore()
    helper = Agent(ScriptedModel(["The capital is Paris."])).as_tool("look_up", "Look something up.")
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    agent = Agent(ScriptedModel([call("look_up", task="capital?"), "Paris."]), tools=[helper], host=host)
    agent.run_sync("Which capital?", run_id="it")
    (entry,) = (e for e in ledger_of("it", store).transcript if e.role == "tool")
    assert entry.run_id in {head.run_id for head in asyncio.run(store.heads())} - {"it"}


def test_a_run_says_who_called_it_and_what_it_was_forked_from() -> None:
    store = MemoryStore()
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    helper = Agent(ScriptedModel(["Paris."])).as_tool("look_up", "Look something up.")
    agent = Agent(ScriptedModel([call("look_up", task="capital?"), "Paris."]), tools=[helper], host=host)
    agent.run_sync("Which capital?", run_id="it")
    (child,) = {head.run_id for head in asyncio.run(store.heads())} - {"it"}
    asyncio.run(fork(store, "it", 3, "other", host.keyring))
    said = {run_id: ledger_of(run_id, store) for run_id in ("it", child, "other")}
    assert {name: (ledger.caller, ledger.forked_from) for name, ledger in said.items()} == {
        "it": ("", ""),
        child: ("it", ""),
        "other": ("", "it at record 3"),
    }
    pages = {name: summary_html(ledger, "intact") for name, ledger in said.items()}
    assert [words in pages[child] for words in ("Called by", "Forked from")] == [True, False]
    assert [words in pages["other"] for words in ("Called by", "Forked from")] == [False, True]


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ((CostLine("m", 2, 1_000, 20, 0.01), CostLine("tool", 1, 5, 5, 0.002)), "0.0120 USD, 1,030 tokens"),
        ((CostLine("m", 1, 1_000, 30),), "1,030 tokens without a price"),
        ((CostLine("m", 1),), ""),
        ((), ""),
    ],
)
def test_what_a_run_cost_in_words(costs: tuple[CostLine, ...], words: str) -> None:
    assert replace(read_ledger("empty", ()), costs=costs).cost == words
