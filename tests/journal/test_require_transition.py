"""An outcome without a transition is refused before anything is done: no record is used or written."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Allow,
    Failure,
    FailureKind,
    GraphError,
    NoTransitionError,
    RunCancelled,
    RunResult,
    RunState,
    Transition,
)
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.guards import approval_decided
from tests.helpers.journal_scenarios import sample_agent, waiting_run
from tests.journal.test_migration import stored


def waiting(graph: Any) -> tuple[Any, RunResult]:
    from agentfsm import MemoryStore

    store = MemoryStore()

    async def begin() -> RunResult:
        return await sample_agent(store, graph=graph).run("Do it all.", run_id="sample")

    return store, asyncio.run(begin())


async def done(run: Any) -> RunResult:
    return await run


def test_a_reply_without_a_transition_leaves_the_run_unchanged():
    def denied(run: RunState) -> bool:
        return run.human_reply is not None and run.human_reply.kind == "deny"

    rows = (replace(each, guard=denied) if each.guard is approval_decided else each for each in LOOP)
    graph = replace(LOOP, transitions=tuple(rows))
    store, first = waiting(graph)
    before = list(asyncio.run(store.records("sample")))
    agent = sample_agent(store, graph=graph)
    for held in ("sample", first.outcome.suspension_record):
        with pytest.raises(
            NoTransitionError, match=r"no row of that state accepts 'allow' \(rows: cancelled, aborted, expired, denied"
        ):
            asyncio.run(done(agent.resume(held, Allow())))
    assert asyncio.run(store.records("sample")) == before
    assert (asyncio.run(store.head("sample")).status, asyncio.run(store.head("sample")).owner) == ("suspended", None)
    ended = asyncio.run(done(agent.dismiss(first.outcome.suspension_record)))
    assert isinstance(ended.outcome, RunCancelled)


def test_a_guard_that_raises_leaves_a_waiting_run_unchanged():
    def broken(run: RunState) -> bool:
        raise ValueError("a bug of the user's")

    graph = LOOP.without("suspended.approval_decided").with_transition(
        Transition("suspended", broken, "dispatch_tool"), before="doubt_settled"
    )
    store, _ = waiting(graph)
    before = list(asyncio.run(store.records("sample")))
    with pytest.raises(NoTransitionError, match=r"suspended\.broken raised ValueError: a bug of the"):
        asyncio.run(done(sample_agent(store, graph=graph).resume("sample", Allow())))
    assert asyncio.run(store.records("sample")) == before


@pytest.mark.parametrize("by_id", [True, False])
def test_an_expired_run_of_a_graph_without_expiry_ends_as_cancelled(by_id):
    graph = LOOP.without("suspended.expired")
    store, first = waiting(graph)
    agent = sample_agent(store, graph=graph)
    agent.config.host.clock.advance(25 * 3600)
    held = "sample" if by_id else first.outcome.suspension_record
    ended = asyncio.run(done(agent.dismiss(held, "too late")))
    assert (type(ended.outcome), ended.outcome.reason) == (RunCancelled, "too late")
    assert verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample"))).code == GOOD


def test_a_wait_without_a_cancel_row_is_refused_when_it_is_built():
    with pytest.raises(GraphError, match="'cancelled' must be row 1 of every state that is not final"):
        LOOP.without("suspended.cancelled", "suspended.expired")


def test_an_interrupted_run_that_is_dismissed_does_nothing_more():
    first, _ = waiting_run()
    rows = asyncio.run(first.records("sample"))
    for at in (1, 2, 3, 9):
        store = stored(rows[:at])
        agent = sample_agent(store)
        ended = asyncio.run(done(agent.dismiss("sample", "enough")))
        assert (type(ended.outcome), ended.outcome.reason) == (RunCancelled, "enough")
        assert agent.model.calls == 0
        assert verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample"))).code == GOOD


def test_the_check_does_not_change_the_run():
    seen: list[int] = []

    def counted(run: RunState) -> Failure | None:
        seen.append(len(run.messages))
        return Failure(kind=FailureKind.no_progress, explanation="never") if False else None

    graph = LOOP.with_detector("suspended", counted, before="approval_decided")
    store, _ = waiting(graph)
    result = asyncio.run(done(sample_agent(store, ["all done"], graph=graph).resume("sample", Allow())))
    assert result.output == "all done"
    assert len(set(seen)) == 1  # asked before and asked then, of the same run
