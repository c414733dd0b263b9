"""Migrations: a run of an earlier graph continues if a replay makes the same transitions or it is vouched for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfsm import (
    LOOP,
    Actor,
    Agent,
    Allow,
    Approval,
    ConfigurationError,
    Failure,
    FailureKind,
    Graph,
    GraphError,
    Host,
    JournalGraphError,
    MemoryStore,
    Message,
    Migration,
    ModelRequest,
    Reply,
    Role,
    RunCancelled,
    RunEndedError,
    RunResult,
    Runs,
    RunState,
    StateSpec,
    SuspensionGraphError,
    ToolCall,
    Transition,
    UserInputRequested,
    tool,
    with_votes,
)
from agentfsm.journal.fork import fork
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, verify
from agentfsm.loop.approval_rows import counts_votes
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests import test_properties as drawn
from tests.helpers.journal_scenarios import (
    SAMPLE_SCRIPT,
    finished_run,
    long_answer,
    reseal,
    sample_agent,
    too_long,
    waiting_run,
    with_own_macs,
)
from tests.helpers.taped_store import TapedStore, restore

STRICTER = "its path would have been different"


def no_adding(run: RunState) -> Failure | None:
    """Something that the sample run does."""
    adds = any(c.call.name == "add" for c in run.batch)
    return Failure(kind=FailureKind.capability_gap, explanation="no adding") if adds else None


LONGER = LOOP.with_detector("post_llm", too_long, before="no_progress")
RENAMED = LOOP.with_detector("post_llm", long_answer, before="no_progress")
NO_ADDING = LOOP.with_detector("post_llm", no_adding, before="no_progress")


def reviewing(name: str) -> Graph:
    return LOOP.with_state(
        StateSpec(name, effect=lambda context: len(context.run.messages)),
        [Transition(name, None, "dispatch_tool")],
        entered_by="post_llm.tool_calls",
    )


KEYRING = Keyring(b"of the tests")


def stored(rows: Sequence[SealedRecord], run_id: str = "sample") -> MemoryStore:
    """A store that holds a run as far as some rows tell it, as after a crash."""
    store = MemoryStore()
    waits = '"kind":"run.suspended"' in rows[-1].body

    async def put() -> None:
        lease = await store.acquire(run_id, "a process that is gone", new=True, keyring=KEYRING)
        while lease.epoch < json.loads(rows[-1].body)["epoch"]:
            await store.release(lease)
            lease = await store.acquire(run_id, "another that is gone", keyring=KEYRING)
        await store.append(lease, with_own_macs(rows), "suspended" if waits else "running")
        if not waits:
            await store.release(lease)

    asyncio.run(put())
    return store


def go_on(store: Any, graph: Graph, migrations: Any = (), reply: Any = None, script: Any = ("all done",)) -> RunResult:
    async def live() -> RunResult:
        return await sample_agent(store, script, graph=graph, migrations=migrations).resume("sample", reply)

    return asyncio.run(live())


def change_of(store: Any) -> dict[str, Any]:
    (found,) = [json.loads(r.body) for r in asyncio.run(store.records("sample")) if '"kind":"run.migrated"' in r.body]
    return found


def good(store: Any, graph: Graph, result: RunResult) -> list[SealedRecord]:
    rows = asyncio.run(store.records("sample"))
    report = verify("sample", rows, asyncio.run(store.head("sample")))
    assert report.code == GOOD, report
    assert dump_state(rehydrate(rows).run) == dump_state(result.run_state)
    assert replay(rows, graph).same
    return rows


# -- a path that is the same --------------------------------------------------------------------------


def test_a_run_with_the_same_path_continues_under_the_new_graph():
    store, _ = waiting_run()
    before = asyncio.run(store.records("sample"))
    result = go_on(store, LONGER, [Migration(LOOP)], Allow(), ["all done"])
    rows = good(store, LONGER, result)
    assert result.output == "all done"
    assert rows[: len(before)] == before
    migrated = change_of(store)
    assert (migrated["from"], migrated["graph"]["fingerprint"]) == (LOOP.fingerprint, LONGER.fingerprint)
    assert (migrated["judged"], migrated["to"]) == ("replayed", "suspended")
    assert migrated["moves"] == sum('"kind":"transition"' in r.body for r in before)
    assert [json.loads(r.body)["kind"] for r in rows[len(before) : len(before) + 2]] == ["run.migrated", "run.resumed"]
    asked = [json.loads(r.body) for r in rows[len(before) :] if '"transition":"post_llm.otherwise"' in r.body]
    assert [len(r["tried"]) for r in asked] == [len(LOOP.rows("post_llm")) + 1]  # the new guard was asked


@pytest.mark.slow
def test_a_run_interrupted_anywhere_continues_as_if_it_had_started_there():
    _, whole = finished_run()
    first, _ = waiting_run()
    rows = asyncio.run(first.records("sample"))
    for length in range(1, len(rows)):
        replies = sum('"transition":"call_llm.' in r.body for r in rows[:length])
        store = stored(rows[:length])
        if rows[length - 1].body.count('"kind":"effect.intent"') and '"policy":"once"' in rows[length - 1].body:
            continue  # in doubt, under every graph
        go_on(store, LONGER, [Migration(LOOP.fingerprint[:12])], None, SAMPLE_SCRIPT[replies:])
        result = go_on(store, LONGER, (), _edit(), ["all done"])
        good(store, LONGER, result)
        assert [m.content for m in result.messages] == [m.content for m in whole.messages]


def _edit() -> Any:
    from agentfsm import Edit

    return Edit({"to": "Bob", "amount": 2.0})


@pytest.mark.parametrize("migrations", [[], [Migration("0" * 64)]])
def test_without_a_migration_the_error_says_which_one_would_admit_the_run(migrations):
    store, _ = waiting_run()
    before = list(asyncio.run(store.records("sample")))
    with pytest.raises(JournalGraphError) as caught:
        go_on(store, LONGER, migrations, Allow())
    assert LOOP.fingerprint[:12] in str(caught.value)
    assert LONGER.fingerprint[:12] in str(caught.value)
    assert f"migrations=[Migration('{LOOP.fingerprint[:12]}')]" in str(caught.value)
    assert caught.value.differences == ("+ post_llm.too_long -> recover",)
    with pytest.raises(JournalGraphError, match=STRICTER):
        go_on(store, NO_ADDING, migrations, Allow())
    assert asyncio.run(store.records("sample")) == before
    assert asyncio.run(store.head("sample")).status == "suspended"


def test_a_migration_may_match_any_graph_and_the_first_match_is_used():
    store, _ = waiting_run()
    never = Migration(LOOP, states={"pre_step": "call_llm"})
    go_on(store, LONGER, [Migration("0" * 12), Migration(), never], Allow())
    assert change_of(store)["judged"] == "replayed"


# -- a path that would have been another --------------------------------------------------------------


def test_a_run_with_a_different_path_is_refused_and_the_record_named():
    store, _ = waiting_run()
    before = list(asyncio.run(store.records("sample")))
    with pytest.raises(JournalGraphError, match=STRICTER) as caught:
        go_on(store, NO_ADDING, [Migration(LOOP)], Allow())
    first = next(r.seq for r in before if '"transition":"post_llm.tool_calls"' in r.body)
    assert f"record {first} is post_llm.tool_calls -> dispatch_tool, and would be post_llm.no_adding" in str(
        caught.value
    )
    assert asyncio.run(store.records("sample")) == before


def test_a_vouched_run_continues_and_the_journal_says_so():
    store, _ = waiting_run()
    before = asyncio.run(store.records("sample"))
    result = go_on(store, NO_ADDING, [Migration(LOOP, vouched=True)], Allow())
    rows = good(store, NO_ADDING, result)
    migrated = change_of(store)
    assert migrated["judged"] == "vouched"
    assert "moves" not in migrated
    report = replay(rows, NO_ADDING)
    assert report.since == len(before) + 1  # guards in front are those of a graph that is gone
    assert report.moves == sum('"kind":"transition"' in r.body for r in rows[len(before) :])
    assert replay(rows, LOOP).since == report.since


def test_a_graph_that_lacks_the_state_or_cannot_wait_there_refuses_even_a_vouched_run():
    names = {"suspended": "parked"}
    other = replace(
        LOOP,
        states=[replace(s, name=names.get(s.name, s.name)) for s in LOOP.states],
        transitions=[
            replace(t, source=names.get(t.source, t.source), target=names.get(t.target, t.target)) for t in LOOP
        ],
    )
    store, _ = waiting_run()
    before = list(asyncio.run(store.records("sample")))
    with pytest.raises(JournalGraphError, match="in 'suspended', and the new graph has no such state"):
        go_on(store, other, [Migration(LOOP, vouched=True)], Allow())
    with pytest.raises(JournalGraphError, match="'pre_step' of the new graph waits or ends"):
        go_on(store, other, [Migration(LOOP, states={"suspended": "pre_step"}, vouched=True)], Allow())
    with pytest.raises(JournalGraphError, match="renames 'nowhere', and the run's graph"):
        go_on(store, other, [Migration(LOOP.fingerprint, states={"nowhere": "pre_step"})], Allow())
    assert asyncio.run(store.records("sample")) == before


# -- other names --------------------------------------------------------------------------------------


def test_states_and_guards_may_be_renamed():
    old, new = reviewing("review"), reviewing("check")
    old = old.with_detector("post_llm", too_long, before="no_progress")
    new = new.with_detector("post_llm", long_answer, before="no_progress")
    store = MemoryStore()

    async def begin() -> RunResult:
        return await sample_agent(store, graph=old).run("Do it all.", run_id="sample")

    first = asyncio.run(begin())
    assert first.run_state.state_results.keys() == {"review"}
    names = {"states": {"review": "check"}, "transitions": {"post_llm.too_long": "post_llm.long_answer"}}
    with pytest.raises(JournalGraphError, match=STRICTER):
        go_on(store, new, [Migration(old)], Allow())
    result = go_on(store, new, [Migration(old, **names)], Allow())
    rows = good(store, new, result)
    migrated = change_of(store)
    assert migrated["states"] == [["review", "check"]]
    assert migrated["transitions"] == [["post_llm.too_long", "post_llm.long_answer"]]
    assert result.run_state.state_results == {"check": first.run_state.state_results["review"]}
    assert replay(rows, new).moves == sum('"kind":"transition"' in r.body for r in rows)


def test_a_run_in_a_renamed_state_continues_in_it():
    old, new = reviewing("review"), reviewing("check")
    store = MemoryStore()

    async def begin() -> RunResult:
        return await sample_agent(store, graph=old).run("Do it all.", run_id="sample")

    asyncio.run(begin())
    rows = asyncio.run(store.records("sample"))
    at = next(n for n, r in enumerate(rows) if '"to":"review"' in r.body)
    cut = stored(rows[: at + 1])
    replies = sum('"transition":"call_llm.' in r.body for r in rows[:at])
    result = go_on(cut, new, [Migration(old, states={"review": "check"})], None, SAMPLE_SCRIPT[replies:])
    assert change_of(cut)["to"] == "check"
    assert result.decisions[0].source == "check"
    report = verify("sample", asyncio.run(cut.records("sample")), asyncio.run(cut.head("sample")))
    assert report.code == OPEN, report


def test_a_run_may_be_migrated_repeatedly():
    store, _ = waiting_run()
    script = [call("pay", to="Ann", amount=1.0), call("pay", to="Ann", amount=1.0), "all done"]
    graphs = [LONGER, RENAMED, LOOP]
    moves = {"transitions": {"post_llm.too_long": "post_llm.long_answer"}}
    migrations = [Migration(LOOP), Migration(LONGER, **moves), Migration(RENAMED)]
    result = None
    for n, (graph, migration) in enumerate(zip(graphs, migrations, strict=True)):
        result = go_on(store, graph, [migration], Allow(), script[n:])
    assert result is not None
    assert result.output == "all done"
    rows = good(store, LOOP, result)
    assert sum('"kind":"run.migrated"' in r.body for r in rows) == 3


def test_a_fork_of_a_migrated_run_is_on_the_graph_of_its_record():
    store, _ = waiting_run()
    before = len(asyncio.run(store.records("sample")))
    go_on(store, LONGER, [Migration(LOOP)], Allow())
    asyncio.run(fork(store, "sample", before, "old", KEYRING))
    asyncio.run(fork(store, "sample", before + 4, "new", KEYRING))
    pinned = {
        name: json.loads(asyncio.run(store.records(name))[0].body)["graph"]["fingerprint"] for name in ("old", "new")
    }
    assert pinned == {"old": LOOP.fingerprint, "new": LONGER.fingerprint}


# -- everywhere that a run is taken up ----------------------------------------------------------------


def test_a_run_may_be_dismissed_and_recovered_under_a_new_graph():
    store, _ = waiting_run()

    async def dismiss() -> RunResult:
        return await sample_agent(store, graph=LONGER, migrations=[Migration(LOOP)]).dismiss("sample", "enough")

    result = asyncio.run(dismiss())
    assert isinstance(result.outcome, RunCancelled)
    good(store, LONGER, result)

    first, _ = waiting_run()
    cut = stored(asyncio.run(first.records("sample"))[:4])

    async def recover(**more: Any) -> list[RunResult]:
        agent = sample_agent(cut, ["all done"], graph=LONGER, **more)
        return [await run for run in await agent.unfinished_runs()]

    assert asyncio.run(recover()) == []
    (recovered,) = asyncio.run(recover(migrations=[Migration(LOOP)]))
    assert recovered.output == "all done"


def test_a_run_that_cannot_continue_does_not_block_the_others(caplog):
    first, _ = waiting_run()
    rows = with_own_macs(asyncio.run(first.records("sample"))[:4])
    store = stored([*rows[:2], rows[2]._replace(body=rows[2].body.replace("scripted", "another")), rows[3]], "bad")

    async def more() -> list[RunResult]:
        lease = await store.acquire("sample", "gone", new=True, keyring=KEYRING)
        await store.append(lease, rows, "running")
        await store.release(lease)
        return [await run for run in await sample_agent(store, ["all done"]).unfinished_runs()]

    (recovered,) = asyncio.run(more())
    assert recovered.output == "all done"
    assert "run 'bad' cannot be resumed: record " in caplog.text
    assert asyncio.run(store.head("bad")).status == "running"


def test_a_sub_agents_run_uses_the_migrations_of_the_sub_agent():
    @tool(requires_approval=True)
    def act() -> str:
        """Act."""
        return "acted"

    store = MemoryStore()

    def above(graph: Graph, script: Any, below: Any, migrations: Any) -> Agent:
        host = Host(clock=FakeClock(), store=store)
        sub = Agent(ScriptedModel(below), tools=[act], graph=graph, migrations=migrations)
        return Agent(ScriptedModel(script), tools=[sub.as_tool("helper", "Helps.")], host=host)

    async def scene() -> RunResult:
        first = above(LOOP, [call("helper", task="act")], [call("act")], ())
        await first.run("go", run_id="above")
        return await above(LONGER, ["done"], ["did it"], [Migration(LOOP)]).resume("above", Allow())

    result = asyncio.run(scene())
    assert result.output == "done"
    changed = {
        h.run_id
        for h in asyncio.run(store.heads())
        if any('"run.migrated"' in r.body for r in asyncio.run(store.records(h.run_id)))
    }
    assert changed == {h.run_id for h in asyncio.run(store.heads())} - {"above"}


@pytest.mark.slow
def test_a_run_interrupted_during_or_after_its_migration_continues():
    store, _ = waiting_run()
    before = len(asyncio.run(store.records("sample")))
    whole = go_on(store, LONGER, [Migration(LOOP)], Allow())
    rows = asyncio.run(store.records("sample"))
    for length in range(before, len(rows)):
        if '"kind":"effect.intent"' in rows[length - 1].body and '"policy":"once"' in rows[length - 1].body:
            continue  # in doubt, under every graph
        cut = stored(rows[:length])
        asks = length <= before + 1  # the answer was not durable: a person is asked again
        reply = Allow() if asks else None
        result = go_on(cut, LONGER, [Migration(LOOP)], reply)
        if not result.run_state.done:  # cut off in front of the move that the answer makes
            result = go_on(cut, LONGER, (), Allow())
        good(cut, LONGER, result)
        assert sum('"kind":"run.migrated"' in r.body for r in asyncio.run(cut.records("sample"))) == 1
        assert result.messages == whole.messages


def test_a_suspension_record_is_migrated_if_the_store_has_its_run():
    store, first = waiting_run()
    record = first.outcome.suspension_record

    async def answered(store: Any, *migrations: Migration) -> RunResult:
        return await sample_agent(store, ["all done"], graph=LONGER, migrations=migrations).resume(record, Allow())

    before = list(asyncio.run(store.records("sample")))
    for nowhere in (None, MemoryStore()):  # what a record alone tells is too little to judge by
        with pytest.raises(SuspensionGraphError):
            asyncio.run(answered(nowhere, Migration(LOOP)))
    with pytest.raises(SuspensionGraphError):
        asyncio.run(answered(store, Migration("0" * 12)))
    with pytest.raises(JournalGraphError, match=STRICTER):
        asyncio.run(_awaited(sample_agent(store, graph=NO_ADDING, migrations=[Migration(LOOP)]), record))
    assert asyncio.run(store.records("sample")) == before
    good(store, LONGER, asyncio.run(answered(store, Migration(LOOP))))
    with pytest.raises(RunEndedError, match="has ended"):
        asyncio.run(answered(store, Migration(LOOP)))


async def _awaited(agent: Agent, record: Any) -> RunResult:
    return await agent.resume(record, Allow())


def never(run: RunState) -> bool:
    """A guard that never holds, at any place, changes nothing."""
    return False


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    replies=st.lists(drawn.replies, min_size=1, max_size=5),
    outcomes=st.lists(st.sampled_from(["ok", "raise", "os", "report"]), min_size=1, max_size=4),
    people=st.lists(drawn.answers.filter(lambda answer: answer is not None), min_size=1, max_size=drawn.MAX_ANSWERS),
    doors=st.lists(st.sampled_from([s.name for s in LOOP.states if not s.final]), min_size=1, max_size=4),
    limits=drawn.limits,
)
def test_a_run_that_is_migrated_at_every_stop_is_like_one_that_is_not(
    replies: Any, outcomes: Any, people: Any, doors: Any, limits: Any
) -> None:
    graphs = [
        LOOP,
        *(LOOP.with_transition(Transition(door, never, "terminal", ends="completed")) for door in dict.fromkeys(doors)),
    ]

    async def life(changing: bool) -> tuple[MemoryStore, RunResult]:
        world, store = drawn.World(replies, outcomes, [0.0]), MemoryStore()

        def agent(stop: int) -> Agent:
            graph = graphs[stop % len(graphs)] if changing else LOOP
            host = Host(clock=world.clock, store=store, secret=b"the same")
            return Agent(
                world, tools=world.tools(), graph=graph, guardrails=limits, host=host, migrations=[Migration()]
            )

        result = await agent(0).run("go", run_id="sample")
        for stop, answer in enumerate(people, 1):
            outcome = result.outcome
            if not isinstance(outcome, UserInputRequested):
                break
            fits = drawn.fits(answer, outcome.kind)
            use = answer if fits else Allow() if outcome.kind == "approval" else "go"
            result = await agent(stop).resume("sample", use)
        return store, result

    _, still = asyncio.run(life(False))
    store, moved = asyncio.run(life(True))
    assert dump_state(moved.run_state) == dump_state(still.run_state)
    assert [str(d) for d in moved.decisions] == [str(d) for d in still.decisions]
    rows = asyncio.run(store.records("sample"))
    report = verify("sample", rows, asyncio.run(store.head("sample")))
    assert report.code == (GOOD if moved.run_state.done else OPEN), report
    assert dump_state(rehydrate(rows).run) == dump_state(moved.run_state)
    assert replay(rows, moved.graph).same


# -- what is declared ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"old": "main"}, ConfigurationError, "not the fingerprint"),
        ({"old": "abc"}, ConfigurationError, "12 to 64 hex digits"),
        ({"vouched": True}, ConfigurationError, "needs the graph"),
        ({"states": {"a": "pre_step", "b": "pre_step"}}, ConfigurationError, "the same name"),
        ({"states": {"review": "nowhere"}}, GraphError, "nowhere: there is no such state"),
        ({"old": LOOP, "states": {"nowhere": "pre_step"}}, GraphError, "nowhere: there is no such state"),
        ({"transitions": {"a.b": "post_llm.nobody"}}, GraphError, "no such transition"),
        ({"old": LOOP, "transitions": {"a.b": "post_llm.otherwise"}}, GraphError, "no such transition"),
    ],
)
def test_an_invalid_migration_is_refused_by_the_agent(fields, error, words):
    with pytest.raises(error, match=words):
        Agent(ScriptedModel([]), graph=LONGER, migrations=[Migration(**fields)])


@pytest.mark.parametrize("given", [Migration(LOOP), [LOOP], [LOOP.fingerprint], LOOP.fingerprint, Migration, 1])
def test_migrations_must_be_a_list_of_migrations(given):
    with pytest.raises(ConfigurationError, match=r"migrations must be"):
        Agent(ScriptedModel([]), graph=LONGER, migrations=given)


# -- what an auditor finds ----------------------------------------------------------------------------


def forged(rows: list[SealedRecord], old: str, new: str) -> tuple[list[SealedRecord], int]:
    place = next(n for n, r in enumerate(rows) if '"kind":"run.migrated"' in r.body)
    assert old in rows[place].body
    edited = rows[place]._replace(body=rows[place].body.replace(old, new))
    return reseal([*rows[:place], edited, *rows[place + 1 :]], place), place + 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (f'"from":"{LOOP.fingerprint}"', f'"from":"{"0" * 64}"', "which is not the run's"),
        ('"too_long"', '"so_long"', "does not match its fingerprint"),
        ('"judged":"replayed"', '"judged":"guessed"', "not a valid basis"),
        ('"to":"suspended"', '"to":"pre_step"', "not the new name of 'suspended'"),
        ('"judged":"replayed"', '"judged":"replayed","states":[["suspended","pre_step"]]', "not the new name"),
        ('"judged":"replayed"', '"judged":"replayed","states":[["pre_step","recover"]]', "which has no row"),
    ],
)
def test_verify_finds_an_invalid_migration_despite_valid_hashes(old, new, words):
    store, _ = waiting_run()
    go_on(store, LONGER, [Migration(LOOP)], Allow())
    rows, at = forged(asyncio.run(store.records("sample")), old, new)
    report = verify("sample", rows)
    assert (report.code, report.seq) == (TAMPERED, at), report
    assert words in report.reason


def test_a_transition_after_a_migration_is_verified_with_the_new_graph():
    store, _ = waiting_run()
    go_on(store, replace(LONGER, name="mine"), [Migration(LOOP)], Allow())
    rows = asyncio.run(store.records("sample"))
    last = max(n for n, r in enumerate(rows) if '"transition":"post_llm.otherwise"' in r.body)
    tried = json.loads(rows[last].body)["tried"]
    edited = rows[last]._replace(body=rows[last].body.replace(f'"tried":"{tried}"', f'"tried":"{tried[1:]}"'))
    report = verify("sample", reseal([*rows[:last], edited, *rows[last + 1 :]], last))
    assert (report.code, report.seq) == (TAMPERED, last + 1)


def test_the_error_names_a_preset_with_a_graph_of_its_own():
    store = MemoryStore()

    async def begin() -> RunResult:
        script = [call("pay", to="Ann", amount=1.0)]
        return await sample_agent(store, script, preset="strict").run("Pay.", run_id="sample")

    asyncio.run(begin())
    with pytest.raises(JournalGraphError, match="under graph 'strict' of preset 'strict'"):
        go_on(store, LOOP, (), Allow())


# -- rows for the votes of sub-agents ---------------------------------------------------------------------

RULE = Approval(2, roles=("clerk",), escalate_to=("boss",), escalate_after_s=60)
CLERKS = [Actor(name, ("clerk",)) for name in ("bob", "cy")]
BOSSES = [Actor(name, ("boss",)) for name in ("liz", "max")]
SECRET = b"of these tests"


def calling(store: MemoryStore, clock: FakeClock, paid: list[int], depth: int, graph: Graph | None = None) -> Agent:
    """An agent whose sub-agent, or the sub-agent of that, pays if two clerks approve."""

    @tool(requires_approval=RULE)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    host = Host(store=store, secret=SECRET, clock=clock)
    agent = Agent(AnswersOnce(call("pay", "p", amount=5)), tools=[pay])
    for _ in range(depth):
        tools = [agent.as_tool("helper", "Helps.")]
        agent = Agent(AnswersOnce(call("helper", "h", task="Pay 5.")), tools=tools, host=host, graph=graph)
    return agent


class AnswersOnce:
    """A model that makes a call, and answers once it has the result."""

    name = "answers once"

    def __init__(self, first: ToolCall) -> None:
        self.first = first

    async def reply(self, request: ModelRequest) -> Reply:
        return Reply(Message.assistant("Done.", () if request.messages[-1].role is Role.TOOL else (self.first,)))


@pytest.mark.parametrize("escalates", [False, True])
@pytest.mark.parametrize("voted", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_whose_sub_agent_asks_several_goes_on_with_rows_that_its_caller_did_not_have(
    depth: int, lost: int, voted: bool, escalates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited, or was cut off up to three commits before, in a version that gave its sub-agent alone these rows."""

    async def scenario() -> None:
        clock, paid, before, store = FakeClock(), list[int](), TapedStore(), MemoryStore()
        with monkeypatch.context() as former:
            former.setattr("agentfsm.agent.config.with_subagents", lambda tools: tools.values())
            earlier = calling(before, clock, paid, depth)
        assert not counts_votes(earlier.graph)
        await earlier.run("go", run_id="r")
        if voted:
            await earlier.resume("r", Allow(), by=CLERKS[0])
        await restore(before.tape[: len(before.tape) - lost], store, Keyring(SECRET))
        agent = calling(store, clock, paid, depth)
        assert counts_votes(agent.graph)
        result = await agent.resume("r") if await store.heads("running") else None
        if escalates:
            clock.advance(61)
            result = await agent.resume("r")
            assert isinstance(result.outcome, UserInputRequested)
        while result is None or isinstance(result.outcome, UserInputRequested):
            request = (await Runs(store, secret=SECRET).get("r")).request
            assert request is not None
            assert request.quorum is not None
            assert request.quorum.escalated == escalates
            voters = [vote.id for vote in request.quorum.votes]
            by = next(each for each in (BOSSES if escalates else CLERKS) if each.id not in voters)
            result = await agent.resume("r", Allow(), by=by)
        assert (result.output, paid) == ("Done.", [5])
        for head in await store.heads():
            records = await store.records(head.run_id)
            assert (head.status, verify(head.run_id, records, head, keyring=Keyring(SECRET)).code) == ("finished", GOOD)

    asyncio.run(scenario())


def test_a_run_whose_caller_has_a_graph_of_its_own_says_which_migration_gives_it_rows_for_the_votes() -> None:
    async def scenario() -> None:
        clock, paid, store = FakeClock(), list[int](), MemoryStore()
        await calling(store, clock, paid, 1, LOOP).run("go", run_id="r")
        with pytest.raises(JournalGraphError, match=r"allow it to continue with Agent\(\.\.\., migrations="):
            await calling(store, clock, paid, 1, with_votes(LOOP)).resume("r", Allow(), by=CLERKS[0])
        assert (await store.heads("suspended")) == await store.heads()
        counting = calling(store, clock, paid, 1, with_votes(LOOP))
        agent = counting.with_config(replace(counting.config, migrations=(Migration(LOOP),)))
        for clerk in CLERKS:
            result = await agent.resume("r", Allow(), by=clerk)
        assert (result.output, paid) == ("Done.", [5])

    asyncio.run(scenario())
