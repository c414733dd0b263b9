"""A replay reports every transition that would have been another one, says how the run would have ended, and never
invents what a model, a tool or a person would have said."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    DefaultPolicy,
    Failure,
    Host,
    MemoryStore,
    RunState,
    StateSpec,
    TransientProviderError,
    Transition,
    tool,
)
from agentfsm.errors import JournalError
from agentfsm.journal.fork import fork
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import Replay, ReplayTotals, replay
from agentfsm.journal.replay_settings import ReplaySettings
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import Message, Reply, Role
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.machine.graph import Graph
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import finished_run, seq_of, waiting_run

BUSY = TransientProviderError("busy")


@tool
def work(n: int) -> str:
    """Work; every third number fails."""
    if n % 3 == 0:
        raise ValueError(f"{n} is bad")
    return f"did {n}"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def record(script: Sequence[Any], *replies: Any, **settings: Any) -> list[Any]:
    """The journal of a run that made these model calls, and was resumed with these replies."""
    store = MemoryStore()

    async def live() -> None:
        agent = Agent(ScriptedModel(script), tools=[work, pay], host=Host(clock=FakeClock(), store=store), **settings)
        await agent.run("Do it.", run_id="one")
        for reply in replies:
            await agent.resume("one", reply)

    asyncio.run(live())
    return asyncio.run(store.records("one"))


def under(preset: Preset, rows: Sequence[Any], graph: Graph | None = None) -> Replay:
    return replay(
        rows,
        graph or preset.graph,
        policy=preset.policy,
        guardrails=preset.guardrails,
        behavior=preset.behavior,
    )


def described(found: Replay) -> list[tuple[str, str, bool]]:
    return [(d.recorded, d.instead, d.resumed is not None) for d in found.divergences]


def my_failure(run: RunState) -> Failure | None:
    """The same failure by another row."""
    return run.call_failures.get(FailureKind.tool_error)


RENAMED = LOOP.with_transition(Transition("post_tool", my_failure, "recover"), before="unknown_tool")

FAILS_TWICE = [call("work", n=3), call("work", n=6), "done"]


@pytest.fixture(scope="module")
def rows() -> list[SealedRecord]:
    store, _ = finished_run()
    return asyncio.run(store.records("sample"))


def test_a_replay_makes_the_same_transitions(rows: list[SealedRecord]) -> None:
    replayed = replay(rows, LOOP)
    assert replayed.same
    assert replayed.moves == sum('"kind":"transition"' in r.body for r in rows)


def test_of_a_long_result_the_journal_has_what_the_model_got_so_that_later_limits_change_nothing() -> None:
    @tool
    def read() -> str:
        return "0123456789" * 10

    host = Host(clock=FakeClock(), store=(store := MemoryStore()), secret=b"secret")

    def agent(script: Sequence[Any], limit: int) -> Agent[None, str]:
        guardrails = AgentGuardrails(max_tool_result_chars=limit)
        return Agent(ScriptedModel(script), tools=[read, pay], host=host, guardrails=guardrails)

    async def live() -> tuple[list[SealedRecord], list[SealedRecord]]:
        await agent([call("read"), call("pay", amount=3)], 10).run("Do it.", run_id="one")
        await fork(store, "one", len(await store.records("one")), "two", Keyring(b"secret"))
        for run_id in ("one", "two"):
            await agent(["Paid."], 10).resume(run_id, Allow())
        return list(await store.records("one")), list(await store.records("two"))

    run, forked = asyncio.run(live())
    assert "0123456789" not in "".join(record.body + record.hidden for record in (*run, *forked))
    for records in (run, forked):
        texts = [m.content for m in rehydrate(records).run.messages if m.role is Role.TOOL]
        assert (texts[0][:5], texts[0][-5:], texts[1:]) == ("01234", "56789", ["paid 3"])
        assert replay(records, LOOP).same
        assert replay(records, LOOP, guardrails=AgentGuardrails(max_tool_result_chars=None)).same


def test_a_replay_under_another_graph_names_the_first_divergent_record(rows: list[SealedRecord]) -> None:
    replayed = replay(rows, LOOP.without("dispatch_tool.approval_required"))
    assert replayed.divergences[0].seq == seq_of(rows, "dispatch_tool.approval_required")
    assert replayed.divergences[0].recorded == "dispatch_tool.approval_required -> suspended"
    assert replayed.divergences[0].instead == "dispatch_tool.otherwise -> post_tool"


def test_a_replay_under_another_policy_names_the_first_divergent_record(rows: list[SealedRecord]) -> None:
    replayed = replay(rows, LOOP, policy=DefaultPolicy(budgets={FailureKind.environment_error: 2}))
    assert replayed.divergences[0].seq == seq_of(rows, "recover.otherwise")
    assert replayed.divergences[0].instead == "recover.handoff -> terminal"
    assert replay(rows, LOOP, policy=DefaultPolicy()).same


def test_a_replay_under_other_limits_names_the_first_divergent_record(rows: list[SealedRecord]) -> None:
    replayed = replay(rows, LOOP, guardrails=AgentGuardrails(max_iterations=1))
    assert replayed.divergences[0].instead == "pre_step.iteration_limit -> recover"
    assert replayed.divergences[0].seq is not None
    assert json.loads(rows[replayed.divergences[0].seq - 1].body)["transition"] == "pre_step.otherwise"


def test_every_divergence_of_a_run_is_reported_and_its_ending_is_known() -> None:
    found = replay(record(FAILS_TWICE), RENAMED)
    other = ("post_tool.tool_error -> recover", "post_tool.my_failure -> recover", False)
    assert described(found) == [other, other]
    assert (found.recorded_ending, found.ending, found.ends_differently) == ("RunCompleted", "RunCompleted", False)


def test_a_replay_under_the_recorded_settings_ends_as_recorded() -> None:
    for store, ending in ((finished_run()[0], "RunCompleted"), (waiting_run()[0], "UserInputRequested")):
        found = replay(asyncio.run(store.records("sample")), LOOP)
        assert found.same
        assert (found.recorded_ending, found.ending, found.ends_differently) == (ending, ending, False)
        assert (found.computed, found.unknown) == (0, "")


def test_a_preset_gives_graph_policy_limits_and_behavior() -> None:
    rows = record([BUSY, "done"])
    strict = under(PRESETS["strict"], rows)
    assert described(strict) == [("recover.otherwise -> pre_step", "recover.handoff -> terminal", False)]
    assert (strict.ending, strict.recorded_ending, strict.ends_differently) == ("Handoff", "RunCompleted", True)
    funnel = under(PRESETS["funnel"], record(["the answer"]))
    assert described(funnel)[0][:2] == ("post_llm.otherwise -> terminal", "post_llm.no_progress -> recover")
    assert funnel.ending == ""
    assert funnel.unknown == "it would send the model a request to which no reply was recorded"
    assert funnel.ends_differently is None


def test_other_limits_change_how_a_run_ends() -> None:
    rows = record([call("work", n=1), call("work", n=2), "done"])
    stop = replay(rows, LOOP, guardrails=AgentGuardrails(max_iterations=2, on_limit="stop"))
    assert (stop.ending, stop.moves) == ("PartialRunSummary", 10)
    ask = replay(rows, LOOP, guardrails=AgentGuardrails(max_iterations=2))
    assert (ask.ending, ask.ends_differently) == ("UserInputRequested", True)
    assert replay(rows, LOOP, guardrails=AgentGuardrails(max_iterations=3)).same


def test_a_row_that_ends_the_run_in_another_way_changes_the_ending_and_no_transition() -> None:
    strict = PRESETS["strict"]
    rows = record([BUSY, "done"], preset="strict")
    milder = replace(
        strict.graph,
        transitions=tuple(replace(t, ends="partial") if t.id == "recover.handoff" else t for t in strict.graph),
    )
    found = replay(rows, milder)
    assert found.same
    assert (found.ending, found.recorded_ending, found.ends_differently) == ("PartialRunSummary", "Handoff", True)
    assert ReplayTotals.of([found]).end_differently == 1


def test_recorded_outcomes_are_used_again_where_the_run_asks_for_the_same() -> None:
    def note(run: RunState) -> str:
        return "noted"

    audited = LOOP.with_state(
        StateSpec("audit", effect=note), [Transition("audit", None, "post_tool")], entered_by="dispatch_tool.otherwise"
    )
    rows = record([call("work", n=1), call("work", n=2), "done"], graph=audited)
    found = replay(rows, LOOP)
    went = ("dispatch_tool.otherwise -> audit", "dispatch_tool.otherwise -> post_tool", True)
    assert described(found) == [went, went]
    for divergence in found.divergences:
        assert divergence.resumed is not None
        assert '"transition":"call_llm.otherwise"' in rows[divergence.resumed - 1].body
    assert (found.computed, found.ending) == (4, "RunCompleted")


def test_what_was_not_recorded_is_not_invented() -> None:
    rows = record([call("pay", amount=1), "done"], Allow())
    found = replay(rows, LOOP.without("dispatch_tool.approval_required"))
    assert described(found) == [
        ("dispatch_tool.approval_required -> suspended", "dispatch_tool.otherwise -> post_tool", False)
    ]
    assert found.ending == ""
    assert found.unknown == "it would run tool calls whose results were not recorded"


def test_a_state_of_your_own_that_was_not_recorded_ends_the_replay() -> None:
    audited = LOOP.with_state(
        StateSpec("audit", effect=lambda run: None),
        [Transition("audit", None, "terminal", ends="completed")],
        entered_by="post_llm.otherwise",
    )
    found = replay(record(["done"]), audited)
    assert found.unknown == "it would run the effect of 'audit', whose outcome was not recorded"


class Stubborn:
    """A policy of the user's: always retry, whose code no journal holds."""

    def retry_budget(self, kind: FailureKind) -> int:
        return 9

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 0.0

    def decide(self, failure: Failure, state: RunState) -> Action:
        return Action.retry


class Broken(Stubborn):
    def decide(self, failure: Failure, state: RunState) -> Action:
        raise RuntimeError("no idea")


def test_a_policy_whose_code_is_not_known_is_not_replaced_by_a_guess() -> None:
    def other_failure(run: RunState) -> Failure | None:
        return Failure(kind=FailureKind.capability_gap, explanation="x") if run.call_failures else None

    graph = LOOP.with_transition(Transition("post_tool", other_failure, "recover"), before="unknown_tool")
    rows = record(FAILS_TWICE, policy=Stubborn())
    assert replay(rows, LOOP).same
    assert "a journal does not hold the code of a policy" in replay(rows, graph).unknown
    assert replay(rows, graph, policy=Stubborn()).unknown != replay(rows, graph).unknown


def test_a_policy_that_raises_ends_the_replayed_run_as_it_would_a_real_one() -> None:
    found = replay(record(FAILS_TWICE), LOOP, policy=Broken())
    assert [d.instead for d in found.divergences] == ["recover.aborted -> terminal"]
    assert found.ends_differently is True


def test_a_graph_that_starts_elsewhere_diverges_at_the_first_record() -> None:
    small = Graph(
        (StateSpec("call_llm"), StateSpec("post_llm"), StateSpec("terminal", final=True)),
        tuple(row for row in LOOP if row.source in ("call_llm", "post_llm") and row.target in ("post_llm", "terminal")),
    )
    found = replay(record(["done"]), small)
    assert described(found) == [("starts in pre_step", "starts in call_llm", True)]
    assert (found.moves, found.ending) == (2, "RunCompleted")


def test_a_control_tool_that_only_one_of_the_two_runs_has_is_not_guessed_at() -> None:
    rows = record([call("return_done", output="x"), "done"])
    assert "return_done, a tool that the recorded run did not have" in under(PRESETS["funnel"], rows).unknown
    rows = record([call("return_done", output="x")], preset="funnel")
    assert "return_done, a tool that the recorded run had" in under(PRESETS["standard"], rows).unknown


def test_totals_say_how_many_runs_would_end_differently_and_how() -> None:
    strict, limits = PRESETS["strict"], AgentGuardrails(max_iterations=1)
    journals = [record([BUSY, "done"]), record([BUSY, BUSY, "done"]), record(["done"]), record([""] * 3 + ["x"])]
    found = [*(under(strict, rows) for rows in journals), replay(journals[0], LOOP, guardrails=limits), None]
    totals = ReplayTotals.of([*found, replay(record(FAILS_TWICE), RENAMED)])
    assert totals.endings == (
        ("Handoff", "RunCompleted", 2),
        ("RunCompleted", "Handoff", 1),  # an empty reply is an answer in strict
        ("UserInputRequested", "RunCompleted", 1),
    )
    assert (totals.runs, totals.end_differently, totals.failed, totals.alike) == (7, 4, 1, 1)
    assert totals.runs == totals.same + totals.alike + totals.end_differently + totals.unknown + totals.failed
    assert str(totals).startswith(
        "4 of 7 runs would end differently: 2 Handoff instead of RunCompleted, "
        "1 RunCompleted instead of Handoff, 1 UserInputRequested instead of RunCompleted; "
    )
    assert str(ReplayTotals.of([])) == "0 of 0 runs would end differently"


def test_an_empty_journal_is_an_error() -> None:
    with pytest.raises(JournalError, match="empty"):
        replay([], LOOP)


# -- an oracle: a real run under the other settings, with a model that says the same to the same transcript ----------


class DeterministicModel:
    """Replies by what has been said so far, and by how often it was asked the same."""

    name = "deterministic"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[str] = Counter()

    async def reply(self, request: ModelRequest) -> Reply:
        said = repr([(m.content, m.tool_calls) for m in request.messages if m.role is Role.ASSISTANT])
        self._asked[said] += 1
        dice = random.Random(f"{self._seed}:{said}:{self._asked[said]}")
        match dice.choices(("text", "work", "unknown", "busy", "empty"), (2, 8, 1, 2, 1))[0]:
            case "text":
                return Reply(Message.assistant("done"))
            case "busy":
                raise BUSY
            case "empty":
                return Reply(Message.assistant(""))
            case what:
                one = call("work" if what == "work" else "nobody", f"c{dice.random()}", n=dice.randint(1, 9))
                return Reply(Message.assistant("", (one,)))


def live(preset: Preset, seed: int) -> tuple[MemoryStore, str]:
    """The store with the journal of a real run under a preset, and the class of its last event."""
    store = MemoryStore()

    async def run() -> str:
        host = Host(clock=FakeClock(), store=store)
        result = await Agent(DeterministicModel(seed), tools=[work], preset=preset, host=host).run("Go.", run_id="one")
        return type(result.outcome).__name__

    return store, asyncio.run(run())


@pytest.mark.slow
def test_a_known_ending_is_that_of_a_real_run() -> None:
    """For 25 recorded runs of each of three presets, replayed under each other preset that speaks the same wire."""
    known = 0
    for recorded, other in product(("standard", "strict", "breaker"), PRESETS):
        if "feedback" in (recorded, other):  # its model answers in envelopes
            continue
        for seed in range(25):
            store, ending = live(PRESETS[recorded], seed)
            found = under(PRESETS[other], asyncio.run(store.records("one")))
            assert found.recorded_ending == ending
            if found.ending:
                known += 1
                assert found.ending == live(PRESETS[other], seed)[1], (recorded, other, seed, described(found))
    assert known > 100


def test_a_run_that_counts_votes_is_replayed_on_a_graph_that_counts_them() -> None:
    @tool(requires_approval=Approval(n=2))
    def send(to: str) -> str:
        """Send it."""
        return f"sent to {to}"

    store = MemoryStore()

    async def live() -> None:
        agent = Agent(ScriptedModel([call("send", to="Bob"), "done"]), tools=[send], host=Host(store=store))
        await agent.run("Do it.", run_id="one")
        for name in ("ann", "bob"):
            await agent.resume("one", Allow(), by=name)

    asyncio.run(live())
    rows = asyncio.run(store.records("one"))
    for settings in (
        ReplaySettings.of_preset("standard"),
        ReplaySettings.of_preset(None, limits={"max_tokens": 9_999}),
    ):
        found = settings.replay(rows)
        assert (found.same, found.ending) == (True, "RunCompleted")


def test_a_graph_that_no_preset_has_must_be_known() -> None:
    store = MemoryStore()
    agent = Agent(ScriptedModel(["done"]), graph=RENAMED, host=Host(store=store))
    asyncio.run(_result(agent))
    rows = asyncio.run(store.records("one"))
    settings = ReplaySettings.of_preset(None, limits={"max_iterations": 3})
    with pytest.raises(JournalError, match="its graph is not known"):
        settings.replay(rows)
    assert replace(settings, known_graphs=(LOOP, RENAMED)).replay(rows).same


async def _result(agent: Agent) -> Any:
    return await agent.run("Do it.", run_id="one")
