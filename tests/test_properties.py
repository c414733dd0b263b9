"""Promises about every run, tried on random ones: it ends within its bound, in order, with a valid transcript.

Replies, tool outcomes, clock jumps and people's answers are drawn by hypothesis; the loop, the policies and
the presets are the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfsm import (
    AbortRun,
    Action,
    Agent,
    AgentGuardrails,
    Allow,
    AskApproval,
    ContextOverflowError,
    Deny,
    DenyCall,
    Edit,
    Event,
    Failure,
    FailureKind,
    FinishReason,
    HookContext,
    Host,
    Message,
    ModelRequest,
    ProviderError,
    Reply,
    Role,
    RunResult,
    RunState,
    SkipCall,
    State,
    ToolCall,
    ToolError,
    TransientProviderError,
    Usage,
    UserInputRequested,
    tool,
)
from agentfsm.loop.events import Ending
from agentfsm.loop.presets import PRESETS
from agentfsm.runtime.hooks import Hook
from agentfsm.testing import FakeClock
from tests.helpers.provider_rules import check_transcript

MAX_CALLS = 4
MAX_ANSWERS = 6


class World:
    """A random world: what the model says, what the tools do, how time passes; repeated forever."""

    name = "world"

    def __init__(self, replies: Sequence[Any], outcomes: Sequence[str], jumps: Sequence[float]) -> None:
        self.replies, self.outcomes, self.jumps = replies, outcomes, jumps
        self.clock = FakeClock()
        self.requests: list[ModelRequest] = []
        self.acted = 0

    def pass_time(self) -> None:
        self.clock.advance(self.jumps[len(self.requests) % len(self.jumps)])

    async def reply(self, request: ModelRequest) -> Reply:
        entry = self.replies[len(self.requests) % len(self.replies)]
        self.requests.append(request)
        self.pass_time()
        if isinstance(entry, Exception):
            raise entry
        return entry

    def act(self) -> str:
        self.acted += 1
        match self.outcomes[self.acted % len(self.outcomes)]:
            case "raise":
                raise ValueError("the tool raised")
            case "os":
                raise FileNotFoundError("no such file")
            case "report":
                raise ToolError("say which one", kind="ambiguous_input", blockers=("two candidates",))
            case _:
                return "ok"

    def tools(self) -> list[Any]:
        @tool
        async def act(n: int) -> str:
            """Act."""
            return self.act()

        @tool(idempotent=True, retryable=True, parallel=True)
        async def again(n: int) -> str:
            """Act, and again where that fails."""
            return self.act()

        @tool(requires_approval=True)
        async def careful(n: int) -> str:
            """Act, if allowed."""
            return self.act()

        @tool(ends_run=True)
        async def finish(n: int) -> str:
            """Act, and be done."""
            return self.act()

        return [act, again, careful, finish]


def call(name: str, arguments: dict[str, Any], place: int) -> ToolCall:
    return ToolCall(f"c{place}", name, arguments, "not JSON" if arguments == {"broken": True} else None)


arguments = st.sampled_from([{"n": 1}, {"n": 2}, {"n": 3}, {"n": "x"}, {}, {"broken": True}])
control = st.sampled_from(
    [
        ("ask_user", {"question": "which?"}),
        ("return_done", {"output": "done"}),
        ("return_unable", {"rationale": "no"}),
    ]
)
calls = st.lists(
    st.tuples(st.sampled_from(["act", "again", "careful", "finish", "nobody"]), arguments) | control,
    min_size=1,
    max_size=MAX_CALLS,
).map(lambda drawn: tuple(call(n, a, i) for i, (n, a) in enumerate(drawn)))
texts = st.sampled_from(
    [
        "",
        "hello",
        '{"kind":"final","content":"x"}',
        '{"kind":"tool_call","tool_name":"act","arguments":{"n":1}}',
        '{"kind":"tool_call","tool_name":"careful","arguments":{"n":2}}',
        '{"kind":"tool_call","tool_name":"nobody"}',
        "\ud800 is no text",
    ]
)
replies = st.one_of(
    st.builds(
        lambda text, made, reason: Reply(Message(Role.ASSISTANT, text, made), reason, Usage(3, 4)),
        texts,
        st.just(()) | calls,
        st.sampled_from([*[FinishReason.STOP] * 4, FinishReason.LENGTH, FinishReason.CONTENT_FILTER]),
    ),
    st.sampled_from(
        [
            TransientProviderError("busy", retry_after_s=1.5),
            ProviderError("bad key"),
            ContextOverflowError("too long"),
            RuntimeError("a bug in the model"),
        ]
    ),
)
answers = st.sampled_from(["yes", "no", Allow(), Deny("not now"), Edit({"n": 9}), None])
limits = st.builds(
    AgentGuardrails,
    max_iterations=st.integers(1, 6),
    max_execution_time_s=st.sampled_from([5.0, 500.0]),
    max_tokens=st.sampled_from([None, 20]),
    max_continues=st.integers(0, 2),
    on_limit=st.sampled_from(["ask_user", "stop", "handoff"]),
    finalize_grace_s=st.sampled_from([0.0, 2.0]),
)


def bound(limits: AgentGuardrails) -> int:
    """How many moves a run can make at the most, waits included: from the table and the guardrails alone.

    ``pre_step`` is entered at most ``step_limit`` times and once more for the runaway. Between two visits
    lie the way to the batch (3), for each call and each of its retries two moves and one wait of two, and
    one recovery (with its wait) for each round of retries.
    """
    rounds = 1 + limits.max_tool_retries
    between = 3 + MAX_CALLS * rounds * 4 + rounds * 2 + 2
    return (limits.step_limit + 1) * between


async def events_of(run: Any) -> tuple[list[Event], RunResult]:
    events = [event async for event in run]
    return events, await run


def fits(answer: Any, kind: str) -> bool:
    return isinstance(answer, str) != (kind == "approval")


async def live(agent: Agent, people: Sequence[Any]) -> tuple[list[list[Event]], RunResult]:
    """A whole life: run, and answer (through JSON) as the drawn people do, until it ends or they leave."""
    events, result = await events_of(agent.run("go"))
    lives = [events]
    for answer in people:
        outcome = result.outcome
        if not isinstance(outcome, UserInputRequested):
            break
        record = outcome.suspension_record.to_json()
        use = (
            answer if answer is None or fits(answer, outcome.kind) else Allow() if outcome.kind == "approval" else "go"
        )
        run = agent.dismiss(record) if use is None else agent.resume(record, use)
        events, result = await events_of(run)
        lives.append(events)
    return lives, result


def check_promises(
    agent: Agent, world: World, lives: Sequence[Sequence[Event]], result: RunResult, extensions: int
) -> None:
    """What holds of every life, whoever plays the model, the tools, the policy and the people."""
    limits = agent.guardrails
    for events in lives:  # the last event is the only ending
        assert [isinstance(e, Ending) for e in events] == [False] * (len(events) - 1) + [True]
    numbers = [e.seq for events in lives for e in events]
    assert numbers == list(range(1, len(numbers) + 1))  # across all suspensions

    moves = [e.decision for events in lives for e in events if hasattr(e, "decision")]
    assert len(moves) <= bound(limits)  # it ends, or waits, within its bound
    table = {(t.source, t.name, t.target) for t in agent.graph}
    assert all((m.source, m.guard, m.target) in table for m in moves)  # every move is a row of the graph
    assert all(a.target == b.source for a, b in pairwise(moves))
    entered = [m.target for m in moves].count(State.TERMINAL)
    assert entered == (1 if result.state == State.TERMINAL else 0)  # the end comes once
    assert result.state in (State.TERMINAL, State.SUSPENDED)

    for request in world.requests:  # no request carries an unanswered call
        check_transcript(request.messages)
        assert request.messages[-1].role is not Role.ASSISTANT
    assert len(world.requests) <= (1 + extensions) * (limits.max_iterations or 0)  # N means N
    if result.state == State.TERMINAL:
        check_transcript(result.messages, request=False)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    replies=st.lists(replies, min_size=1, max_size=6),
    outcomes=st.lists(st.sampled_from(["ok", "raise", "os", "report"]), min_size=1, max_size=5),
    jumps=st.lists(st.sampled_from([0.0, 0.5, 3.0, 40.0]), min_size=1, max_size=4),
    people=st.lists(answers, max_size=MAX_ANSWERS),
    limits=limits,
)
def test_every_run_keeps_its_promises(
    preset: str, replies: Any, outcomes: Any, jumps: Any, people: Any, limits: AgentGuardrails
) -> None:
    world = World(replies, outcomes, jumps)
    agent = Agent(world, tools=world.tools(), preset=preset, guardrails=limits, host=Host(clock=world.clock))
    lives, result = asyncio.run(live(agent, people))

    check_promises(agent, world, lives, result, limits.max_continues if limits.on_limit == "ask_user" else 0)


class Whim:
    """A policy of the user's that does as it likes, and sometimes breaks."""

    def __init__(self, whims: Sequence[str]) -> None:
        self.whims = itertools.cycle(whims)

    def retry_budget(self, kind: FailureKind) -> int:
        return 0

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 0.25

    def decide(self, failure: Failure, state: RunState) -> Action:
        whim = next(self.whims)
        if whim == "raise":
            raise ValueError("the policy raised")
        return Action(whim)  # one of them is no action


def meddling(at: str, whims: Sequence[str], fail_open: bool) -> Hook:
    """A hook of the user's that does as it likes."""
    verdicts = {
        "skip": SkipCall("skipped"),
        "deny": DenyCall("denied"),
        "ask": AskApproval(),
        "abort": AbortRun("enough"),
    }
    turns = itertools.cycle(whims)

    def meddle(seen: HookContext) -> Any:
        whim = next(turns)
        if whim == "raise":
            raise ValueError("the hook raised")
        return verdicts.get(whim)

    return Hook(at, meddle, fail_open=fail_open, name="meddle")


def moody(whims: Sequence[str]) -> Callable[[RunState], Any]:
    """A detector of the user's that finds what it likes."""
    turns = itertools.cycle(whims)

    def mood(run: RunState) -> Any:
        whim = next(turns)
        if whim == "raise":
            raise ValueError("the detector raised")
        return None if whim == "nothing" else Failure(kind=FailureKind(whim), explanation="a mood")

    return mood


hooks = st.lists(
    st.builds(
        meddling,
        st.sampled_from(sorted(State)),
        st.lists(st.sampled_from([*["none"] * 4, "skip", "deny", "ask", "abort", "raise"]), min_size=1, max_size=4),
        st.booleans(),
    ),
    max_size=2,
)
moods = st.none() | st.tuples(
    st.sampled_from(["pre_step", "call_llm", "post_llm", "post_tool"]),
    st.lists(st.sampled_from([*["nothing"] * 5, "raise", *sorted(FailureKind)]), min_size=1, max_size=6),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    replies=st.lists(replies, min_size=1, max_size=6),
    outcomes=st.lists(st.sampled_from(["ok", "raise", "os", "report"]), min_size=1, max_size=5),
    people=st.lists(answers, max_size=MAX_ANSWERS),
    limits=limits,
    whims=st.lists(st.sampled_from([*sorted(Action), "raise", "shrug"]), min_size=1, max_size=6),
    hooks=hooks,
    mood=moods,
    preset=st.sampled_from(sorted(PRESETS)),
)
def test_whatever_code_of_the_users_does_a_run_keeps_its_promises(
    replies: Any, outcomes: Any, people: Any, limits: AgentGuardrails, whims: Any, hooks: Any, mood: Any, preset: str
) -> None:
    world = World(replies, outcomes, [0.0])
    graph = PRESETS[preset].graph
    if mood is not None:
        graph = graph.with_detector(mood[0], moody(mood[1]), before="otherwise")
    agent = Agent(
        world, tools=world.tools(), preset=preset, graph=graph, guardrails=limits,
        policy=Whim(whims), hooks=hooks, host=Host(clock=world.clock),
    )  # fmt: skip
    lives, result = asyncio.run(live(agent, people))
    check_promises(agent, world, lives, result, limits.max_continues)


class Stopping(World):
    """A random world in which, at its n-th doing, somebody stops the run: politely, or by its task."""

    def __init__(self, replies: Any, outcomes: Any, at: int, how: str) -> None:
        super().__init__(replies, outcomes, [0.0])
        self.at, self.how = at, how
        self.doings = 0
        self.stop: Any = None

    async def doing(self) -> None:
        self.doings += 1
        if self.doings == self.at:
            self.stop(self.how)
            await asyncio.sleep(0)

    async def reply(self, request: ModelRequest) -> Reply:
        await self.doing()
        return await super().reply(request)

    def tools(self) -> list[Any]:
        @tool(parallel=True)
        async def act(n: int) -> str:
            """Act."""
            await self.doing()
            return self.act()

        @tool(parallel=True)
        async def again(n: int) -> str:
            """Act."""
            await asyncio.sleep(0)
            return self.act()

        return [act, again]


async def stopped(world: Stopping, agent: Agent) -> tuple[Any, bool]:
    run = agent.run("go")
    task = asyncio.ensure_future(_result_of(run))
    world.stop = lambda how: run.cancel("enough") if how == "politely" else task.cancel()
    try:
        await task
        passed_through = False
    except asyncio.CancelledError:
        passed_through = True
    return run, passed_through


async def _result_of(run: Any) -> RunResult:
    result: RunResult = await run
    return result


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(
    replies=st.lists(replies, min_size=1, max_size=4),
    outcomes=st.lists(st.sampled_from(["ok", "raise"]), min_size=1, max_size=3),
    at=st.integers(1, 6),
    how=st.sampled_from(["politely", "by its task"]),
)
def test_stopping_anywhere_leaves_a_run_that_has_ended(replies: Any, outcomes: Any, at: int, how: str) -> None:
    world = Stopping(replies, outcomes, at, how)
    limits = AgentGuardrails(max_iterations=4, on_limit="stop")
    agent = Agent(world, tools=world.tools(), guardrails=limits, host=Host(clock=world.clock))
    run, passed_through = asyncio.run(stopped(world, agent))
    if run.finished and run.run_state.state == State.SUSPENDED:
        return  # a loop was seen, and a person is asked
    assert run.finished
    assert run.run_state.state == State.TERMINAL
    assert passed_through == (how == "by its task" and world.doings >= at)
    if world.doings >= at:
        assert type(run.result.outcome).__name__ == "RunCancelled"
    check_transcript(run.run_state.messages, request=False)
