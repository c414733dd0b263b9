"""What is proved about an agent is true of its runs, whatever its graph, its preset and its tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Failure,
    FailureKind,
    Host,
    RunState,
    StateSpec,
    Transition,
    UserInputRequested,
    tool,
)
from agentfsm.analysis import never_after
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import ScriptedModel, call, paths
from tests.analysis.test_random_graphs import analyse_agent, check_run
from tests.helpers.random_agents import Stretch

HOST = Host(secret=b"of the tests", monitor="raise")
SMALL = AgentGuardrails(max_iterations=2, max_calls_per_reply=3, max_continues=1, max_tool_retries=1)


@tool
def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


@tool(idempotent=True, retryable=True)
def ask(at: str = "") -> str:
    """Ask a server."""
    return f"asked {at}"


def of_look(*places: str) -> list[Any]:
    return [call("look", at=place) for place in places]


def doubtful(run: RunState) -> Failure | None:
    """What was found is not good enough."""
    if any(each.result is not None and each.result.status == "done" for each in run.batch):
        return Failure(kind=FailureKind.tool_error, explanation="not good enough")
    return None


def any_result(run: RunState) -> bool:
    """There is some result."""
    return any(each.result is not None for each in run.batch)


def is_boss(run: RunState) -> bool:
    """Somebody has answered."""
    return run.human_reply is not None


def with_a_wait_of_ones_own() -> Agent:
    """Limits are put to the boss, whose answer extends nothing and leads on as often as it is given."""
    rows = [replace(row, target="boss") if row.id == "recover.ask_user" else row for row in LOOP]
    rows += [replace(row, source="boss") for row in LOOP.rows("suspended")[:2]]
    rows += [Transition("boss", is_boss, "pre_step")]
    graph = replace(LOOP, states=(*LOOP.states, StateSpec("boss", waits=True)), transitions=tuple(rows))
    script = [of_look(str(n)) for n in range(40)]
    return Agent(ScriptedModel(script), tools=[look], graph=graph, guardrails=SMALL, host=HOST)


def with_a_detector_of_ones_own() -> Agent:
    graph = LOOP.with_detector("post_tool", doubtful, before="tool_error")
    script = [call("ask", at="a"), call("ask", at="b"), "done"]
    return Agent(ScriptedModel(script), tools=[ask], graph=graph, guardrails=SMALL, host=HOST)


def with_a_row_past_the_calls_that_are_left() -> Agent:
    graph = LOOP.with_transition(Transition("dispatch_tool", any_result, "post_tool"))
    script = [of_look("a", "b", "c"), of_look("d", "e", "f"), "done"]
    return Agent(ScriptedModel(script), tools=[look], graph=graph, guardrails=SMALL, host=HOST)


def with_feedback_and_native_calls() -> Agent:
    script = [of_look("a", "b", "c"), of_look("d", "e", "f"), '{"answer": "done"}']
    return Agent(ScriptedModel(script), tools=[look], preset="feedback", guardrails=SMALL, host=HOST)


def with_a_sub_agent() -> Agent:
    inner = Agent(ScriptedModel([call("pay", amount=1), call("pay", amount=2), "paid"]), tools=[pay], host=HOST)
    script = [call("helper", task="Pay."), "done"]
    tools = [inner.as_tool("helper", "Pays.")]
    return Agent(ScriptedModel(script), tools=tools, guardrails=SMALL, host=HOST)


def with_text_as_an_answer_in_funnel() -> Agent:
    graph = PRESETS["funnel"].graph.without("post_llm.no_progress")
    return Agent(ScriptedModel(["done"]), tools=[look], preset="funnel", graph=graph, guardrails=SMALL, host=HOST)


@dataclass
class Case:
    """An agent, and rows of its run that a proof about it once ruled out."""

    make: Callable[[], Agent]
    rows: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = field(default=())


CASES = {
    "feedback with native calls": Case(with_feedback_and_native_calls, ("post_tool.calls_pending",)),
    "a sub-agent that waits": Case(
        with_a_sub_agent,
        ("dispatch_tool.approval_required", "post_tool.question_asked"),
        (("suspended.approval_decided", "dispatch_tool.otherwise"),),
    ),
    "a wait of one's own": Case(with_a_wait_of_ones_own, ("recover.ask_user", "boss.is_boss")),
    "a detector of one's own": Case(with_a_detector_of_ones_own, ("post_tool.doubtful", "recover.otherwise")),
    "a row past the calls that are left": Case(with_a_row_past_the_calls_that_are_left, ("dispatch_tool.any_result",)),
    "funnel that takes text": Case(with_text_as_an_answer_in_funnel, ("post_llm.otherwise",)),
}
MOST_WAITS = 6


async def stretches_of(agent: Agent) -> list[Stretch]:
    """A run whose every question is answered, in stretches between two waits."""
    result = await agent.run("go")
    stretches = [Stretch([each.transition for each in result.decisions])]
    while isinstance(result.outcome, UserInputRequested) and len(stretches) < MOST_WAITS:
        record = result.outcome.suspension_record
        result = await agent.resume(record, Allow() if record.kind == "approval" else "go on")
        stretches.append(Stretch([each.transition for each in result.decisions]))
    return stretches


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_run_does_what_is_proved_never_to_happen(name: str) -> None:
    """The run itself says what cannot be true: that it never takes one of its rows after another."""
    case = CASES[name]
    stretches = asyncio.run(stretches_of(case.make()))
    taken = [row.id for each in stretches for row in each.rows]
    assert set(case.rows) <= set(taken)
    assert set(case.pairs) <= set(pairwise(taken))
    agent = case.make()
    untrue = [never_after(later, row) for row, later in dict.fromkeys(pairwise(taken))]
    analysis = analyse_agent(agent, untrue)
    verdicts = {verdict.text: verdict.holds for verdict in analysis.verdicts}
    assert [each.text for each in untrue if verdicts[each.text] is not False] == []
    check_run(analysis, untrue, stretches)


@pytest.mark.slow
def test_a_row_past_the_calls_that_are_left_is_in_the_paths_with_what_comes_after_it() -> None:
    """The last call of a reply has run, so none is left, whichever row of ``dispatch_tool`` is taken."""
    after = ("dispatch_tool.any_result", "post_tool.otherwise")
    listed = paths(with_a_row_past_the_calls_that_are_left())
    assert after in {pair for path in listed for pair in pairwise(path.ids)}
