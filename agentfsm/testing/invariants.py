"""What must hold of every run, whatever happens outside. Each is a function that asserts; choose from them."""

from __future__ import annotations

from agentfsm.agent import Agent
from agentfsm.core.messages import Role
from agentfsm.core.state import RunState
from agentfsm.journal.verify import verify
from agentfsm.runtime.tools import Tool
from agentfsm.testing.playing import RUN_ID, Played
from agentfsm.testing.scripts import Moment, Script
from agentfsm.testing.stage import Stage

__all__ = ["answered_once", "approved_first", "ended", "journal_verifies", "resumes_alike", "within_budgets"]


def answered_once(run: RunState) -> None:
    """Every call of the transcript has one result, but for those of the batch at hand, which have none yet."""
    open_ids = {c.call.id for c in run.batch}
    calls = [c.id for m in run.messages for c in m.tool_calls]
    results = [m.tool_call_id for m in run.messages if m.role is Role.TOOL and m.tool_call_id is not None]
    assert len(set(calls)) == len(calls), f"two calls share an id: {calls}"  # noqa: S101
    assert sorted(results) == sorted(set(calls) - open_ids), f"calls {calls} have results {results}"  # noqa: S101


def within_budgets(run: RunState) -> None:
    """No budget is overdrawn: steps, model calls, extensions, and reruns of a call."""
    limits = run.guardrails
    assert run.steps <= limits.step_limit + 1, f"{run.steps} steps, {limits.step_limit} allowed"  # noqa: S101
    if limits.max_iterations is not None:
        assert run.iterations <= limits.max_iterations, f"{run.iterations} model calls"  # noqa: S101
    assert run.continues <= limits.max_continues, f"extended {run.continues} times"  # noqa: S101
    assert all(c.retries <= limits.max_tool_retries for c in run.batch), "a call was run again too often"  # noqa: S101


def approved_first(agent: Agent, played: Played) -> None:
    """No tool that must be allowed by a person ran before it was."""
    tools = agent.parts.tools
    for started in played.started:
        tool = tools.get(started.tool)
        if tool is not None and _must_ask(tool, started.arguments):
            assert started.approved, f"{started.tool} ran unapproved with {started.arguments}"  # noqa: S101


def _must_ask(tool: Tool, arguments: object) -> bool:
    rule = tool.requires_approval
    if isinstance(rule, bool):
        return rule
    return bool(rule(tool.arguments(arguments)))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def ended(played: Played) -> None:
    """The run has come to an end, with exactly one move into it."""
    finals = {s.name for s in played.result.graph.states if s.final}
    into = [d for d in played.decisions if d.target in finals]
    assert len(into) == 1, f"it came to an end {len(into)} times"  # noqa: S101
    assert played.decisions[-1] is into[0], "it went on behind its end"  # noqa: S101


def journal_verifies(played: Played) -> None:
    """The run's journal is whole, and every move in it legal."""
    store = played.store
    told = verify(RUN_ID, store.rows(RUN_ID), store.head(RUN_ID))
    assert told.code == 0, f"record {told.seq}: {told.reason}"  # noqa: S101


def resumes_alike(agent: Agent, script: Script) -> None:
    """A run taken up from its store at every wait is the run that is taken up from its suspension records."""
    calm = {i: Moment(m.took_s, m.silent_s, m.cancel, m.abort, m.asks) for i, m in script.moments.items()}
    same = Script(script.replies, script.results, script.actions, script.people, calm, script.guardrails)
    stored, recorded = Stage(agent).play(same), Stage(agent, from_records=True).play(same)
    assert stored.ids == recorded.ids, f"{stored.ids} against {recorded.ids}"  # noqa: S101
    assert stored.result.messages == recorded.result.messages, "they say different things"  # noqa: S101
