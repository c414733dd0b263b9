"""Hypothesis strategies for scenarios, and ``AgentStateMachine``, which drives a simulated run move by move.

Paths test control flow; strategies test data: replies, arguments, results, times and human answers. A failure shrinks
to the shortest failing run. Needs ``agentfsm[testing]``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
except ImportError as error:  # pragma: no cover  # the tests run with the extra installed
    from agentfsm.errors import MissingExtraError

    raise MissingExtraError("agentfsm.testing.strategies", "testing") from error

from agentfsm.agent import Agent
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.loop.detectors import DEFAULT_RESULT
from agentfsm.loop.failures import TOOL_REPORTABLE_KINDS
from agentfsm.loop.human_input import Allow, Deny, Extend, GiveUp, ItDidNotRun, ItRan
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.outcomes import CALL_MODEL, CHECK_BUDGETS, RUN_CALLS
from agentfsm.loop.state import RunState
from agentfsm.machine.declaration import EffectSpec
from agentfsm.runtime.tools import Tool
from agentfsm.testing.guard_examples import DEFAULT_TOOLS
from agentfsm.testing.invariants import approved_before_run, journal_verifies, one_result_per_call, within_budgets
from agentfsm.testing.path_runner import scenarios_along_paths, scenarios_through_rows
from agentfsm.testing.simulation import DISMISSED, EXPIRED, ModelTurn, Scenario, SideEvent, Simulation, Simulator
from agentfsm.testing.tool_calls import MAX_SIDE_EVENT_MOVE, call_key

__all__ = ["AgentStateMachine", "arguments", "human_replies", "model_turns", "scenarios", "side_events", "tool_results"]

T = TypeVar("T")

_WITH_RULES = (CHECK_BUDGETS, CALL_MODEL, RUN_CALLS)
"""The effects for which there is a rule of their own."""


def arguments(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that match a JSON schema, as a tool's parameters have one.

    Args:
        schema: The schema. ``$ref`` refers to its ``$defs``.
    """
    return _matching(schema, cast("Mapping[str, Any]", schema.get("$defs", {})))


def _matching(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return st.deferred(lambda: _matching(defs[str(schema["$ref"]).rpartition("/")[2]], defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return st.one_of(*(_matching(each, defs) for each in schema[union]))
    match schema.get("type"):
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 12))
        case "integer":
            return st.integers(_integer_bound(schema, "inimum", 1), _integer_bound(schema, "aximum", -1))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(_matching(schema.get("items", {}), defs), max_size=3)
        case "object":
            return _matching_object(schema, defs)
        case _:
            return st.none() | st.booleans() | st.integers() | st.text(max_size=12)


def _integer_bound(schema: Mapping[str, Any], which: str, inward: int) -> int | None:
    end = "m" + which
    if end in schema:
        return int(schema[end])
    exclusive = "exclusiveM" + which
    return int(schema[exclusive]) + inward if exclusive in schema else None


def _matching_object(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    fields = {name: _matching(each, defs) for name, each in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    return st.fixed_dictionaries(
        {n: s for n, s in fields.items() if n in required},
        optional={n: s for n, s in fields.items() if n not in required},
    )


def model_turns(agent: Agent[Any, Any]) -> st.SearchStrategy[ModelTurn]:
    """Model turns for an agent: a text, calls of its tools, a flawed reply, or a failure."""
    texts = st.sampled_from(["done", "", "{", "1"]) | st.text(max_size=20)
    flawed = st.sampled_from([FinishReason.LENGTH, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL])
    batch = st.lists(_calls(agent), min_size=1, max_size=3)
    failures = st.sampled_from([TransientProviderError("503"), ProviderError("401"), ContextOverflowError("too long")])
    entries = st.one_of(
        texts,
        batch,
        st.builds(Reply, texts.map(Message.assistant), flawed),
        failures,
    )
    return st.builds(ModelTurn, entries, st.integers(0, 2_000), st.just(0.0))


def _calls(agent: Agent[Any, Any]) -> st.SearchStrategy[ToolCall]:
    """Calls of an agent's tools, with arguments that fit or do not, and calls of a tool that it does not have."""
    tools = agent.config.tools
    known = st.sampled_from(sorted(tools)) if tools else st.just("nothing")
    fitting = known.flatmap(
        lambda name: _fitting_calls(tools[name]) if name in tools else st.just(ToolCall("", name, {}))
    )
    unfit = st.builds(ToolCall, st.just(""), known | st.just("no_such_tool"), st.just({"no_such_field": 1}))
    return fitting | unfit


def _fitting_calls(tool: Tool) -> st.SearchStrategy[ToolCall]:
    return arguments(tool.spec.parameters).map(lambda given: ToolCall("", tool.name, given))


def tool_results() -> st.SearchStrategy[Any]:
    """Tool results: values, and exceptions of every failure kind."""
    reported = [ToolError(kind, kind=kind) for kind in TOOL_REPORTABLE_KINDS]
    return st.one_of(
        st.text(max_size=12),
        st.sampled_from([RuntimeError("broke"), OSError("full"), TimeoutError("slow")]),
        st.sampled_from(reported),
        st.none() | st.integers() | st.lists(st.integers(), max_size=2),
    )


def human_replies() -> st.SearchStrategy[Any]:
    """Human replies, one for each kind of suspension; or ``DISMISSED`` or ``EXPIRED``."""
    texts = st.sampled_from(["go on", "the first one", "no"])
    return st.one_of(
        st.fixed_dictionaries(
            {
                "question": texts,
                "limit": st.one_of(texts, st.just(Extend())),
                "approval": st.sampled_from([Allow(), Deny("not now")]),
                "in_doubt": st.sampled_from([ItDidNotRun(), ItRan("it ran"), GiveUp()]),
            }
        ),
        st.sampled_from([DISMISSED, EXPIRED]),
    )


def side_events() -> st.SearchStrategy[SideEvent]:
    """Side events: durations, idle times, a cancellation, an abort, an approval, a crash."""
    seconds = st.sampled_from([0.0, 1.0, 31.0, 400.0])
    incidents = [
        SideEvent(),
        SideEvent(cancel=True),
        SideEvent(abort=True),
        SideEvent(needs_approval=True),
        SideEvent(crash=True),
    ]
    return st.tuples(seconds, seconds, st.sampled_from(incidents)).map(_with_times)


def _with_times(drawn: tuple[float, float, SideEvent]) -> SideEvent:
    duration_s, idle_s, incident = drawn
    return replace(incident, duration_s=duration_s, idle_s=idle_s)


def scenarios(agent: Agent[Any, Any], *, max_turns: int = 8) -> st.SearchStrategy[Scenario]:
    """Scenarios for an agent: model replies, tool results, human replies and side events of one run.

    Four of five follow a path through the graph that can happen, with data drawn along it, so that a few hundred reach
    every row that a run of this agent can take; with small limits, where the path leads to a limit. The others are
    drawn freely. A warning names the rows that no path leads to, because a guard has no example.

    ::

        @given(scenarios(my_agent))
        def test_budgets_hold(scenario):
            result = Simulator(my_agent).run_sync(scenario)
            invariants.within_budgets(result.run_result.run_state)

    Args:
        agent: The agent. Tool calls are drawn from the schemas of its tools.
        max_turns: The largest number of model turns, and of tool results; after that, everything succeeds.
    """
    free = st.builds(
        Scenario,
        st.lists(model_turns(agent), max_size=max_turns),
        st.lists(tool_results(), max_size=max_turns),
        st.just(()),
        st.lists(human_replies(), max_size=4),
        st.dictionaries(st.integers(0, MAX_SIDE_EVENT_MOVE), side_events(), max_size=3),
        st.none(),
    )
    along_paths = st.deferred(lambda: _along_paths(agent, max_turns, free))
    return st.integers(0, 4).flatmap(lambda drawn: along_paths if drawn else free)


def _along_paths(
    agent: Agent[Any, Any], max_turns: int, other: st.SearchStrategy[Scenario]
) -> st.SearchStrategy[Scenario]:
    """Scenarios that follow paths; other ones if the graph has no path whose guards all have examples."""
    short, long = list(scenarios_through_rows(agent)), list(scenarios_along_paths(agent))
    plans = [each for each in (short, long, long, long) if each]  # the long ones take many rows each

    @st.composite
    def along_path(draw: st.DrawFn) -> Scenario:
        chosen = draw(st.sampled_from(plans))
        return _vary(draw, draw(st.sampled_from(chosen)), agent, max_turns)

    return along_path() if plans else other


def _vary(draw: st.DrawFn, plan: Scenario, agent: Agent[Any, Any], max_turns: int) -> Scenario:
    """A scenario with other data, and sometimes without one of its parts: what is left out shrinks it."""
    tools = agent.config.tools

    exact = draw(st.integers(0, 7)) > 0  # only the arguments and the results of its calls are drawn
    none: list[ToolCall] = []
    more_calls = st.just(none) if exact else st.just(none) | st.lists(_calls(agent), max_size=1)

    def some_of(entries: Sequence[T]) -> list[T]:
        return [entry for entry in entries if exact or draw(st.integers(0, 63))]

    varied: dict[str, ToolCall] = {}  # equal calls stay equal

    def vary_call(planned: ToolCall) -> ToolCall:
        return varied.setdefault(call_key(planned), vary(planned))

    def vary(planned: ToolCall) -> ToolCall:
        tool = tools.get(planned.name) or _tool_like(planned.name, tools)
        if tool is None or tool.control is not None:
            return planned
        if any(isinstance(value, str) for value in planned.arguments.values()) and planned.name not in tools:
            return ToolCall("", tool.name, {"no_such_field": 1})  # in the plan its arguments are invalid, too
        if planned.name in tools and draw(st.booleans()):
            return planned
        return draw(_fitting_calls(tool))

    def vary_turn(turn: ModelTurn) -> ModelTurn:
        entry = turn.entry
        if isinstance(entry, list):
            calls = [vary_call(planned) for planned in cast("list[ToolCall]", entry)]
            return replace(turn, entry=calls + draw(more_calls))
        return turn

    turns = [vary_turn(turn) for turn in some_of(plan.model_turns[:max_turns])]
    results = [
        draw(st.just(result) | st.text(max_size=12)) if result == DEFAULT_RESULT else result
        for result in some_of(plan.tool_results[:max_turns])
    ]
    return replace(
        plan,
        model_turns=turns,
        tool_results=results,
        recovery_actions=some_of(plan.recovery_actions),
        human_replies=some_of(plan.human_replies),
        side_events=dict(some_of(list(plan.side_events.items()))),
    )


def _tool_like(name: str, tools: Mapping[str, Tool]) -> Tool | None:
    """One of the tools for a call that a plan makes of a default one: with the same options, if there is one."""
    wanted = next((tool for tool in DEFAULT_TOOLS if tool.name == name), None)
    own = [tool for tool in tools.values() if tool.control is None]
    if wanted is None or not own:
        return None
    return max(
        own,
        key=lambda tool: (
            tool.ends_run == wanted.ends_run,
            tool.retryable == wanted.retryable,
            tool.parallel == wanted.parallel,
        ),
    )


class AgentStateMachine(RuleBasedStateMachine):
    """A Hypothesis state machine that simulates a run: in each state, one rule for everything that may happen there.

    Derive from it and set ``agent``::

        class MyAgent(AgentStateMachine):
            agent = my_agent

        TestMyAgent = MyAgent.TestCase

    ``check`` is called after every transition; override it to choose other invariants.

    Attributes:
        agent: The agent; it is not changed.
        simulation: The simulated run.
    """

    agent: Agent[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._model_turns: list[ModelTurn] = []
        self._tool_results: list[Any] = []
        self._human_replies: list[Any] = []
        self._side_events: dict[int, SideEvent] = {}
        scenario = Scenario(self._model_turns, self._tool_results, (), self._human_replies, self._side_events)
        self._simulator = Simulator(self.agent)
        self.simulation: Simulation = self._simulator.start(scenario)
        self._finished = False

    def teardown(self) -> None:
        """Close the event loop; the journal of a finished run must verify."""
        try:
            if self._finished:
                journal_verifies(self.simulation.result)
        finally:
            self._runner.close()

    @property
    def state(self) -> RunState:
        """The current state of the run."""
        return self.simulation.state

    def check(self) -> None:
        """Assert what must be true after every transition."""
        one_result_per_call(self.state)
        within_budgets(self.state)
        approved_before_run(self.agent, self.simulation.result)

    @invariant()
    def invariants_hold(self) -> None:
        """Call ``check`` after every transition."""
        self.check()

    def _is_at(self, *effects: EffectSpec) -> bool:
        """Whether the run is in a state with one of some effects."""
        return not self._finished and self.agent.graph.spec(self.state.state).effect in effects

    def _step(self, answer: Any, side_event: SideEvent | None = None) -> None:
        """Take one transition; if it suspends the run, resume it with the reply."""
        result = self.simulation.result
        del self._human_replies[len(result.run_results) :]
        self._human_replies.append(answer)
        if side_event is not None:
            self._side_events[len(result.decisions)] = side_event
        self._finished = not self._runner.run(self.simulation.step())

    @rule(side_event=side_events(), answer=human_replies())
    @precondition(lambda self: self._is_at(CHECK_BUDGETS))
    def step(self, side_event: SideEvent, answer: Any) -> None:
        """Time passes, and the budgets are checked."""
        self._step(answer, side_event)

    @rule(data=st.data(), answer=human_replies())
    @precondition(lambda self: self._is_at(CALL_MODEL))
    def model(self, data: st.DataObject, answer: Any) -> None:
        """The model replies or fails."""
        self._model_turns.append(data.draw(model_turns(self.agent), label="reply"))
        self._step(answer)

    @rule(results=st.lists(tool_results(), min_size=1, max_size=3), side_event=side_events(), answer=human_replies())
    @precondition(lambda self: self._is_at(RUN_CALLS))
    def tools(self, results: Sequence[Any], side_event: SideEvent, answer: Any) -> None:
        """The pending tool calls are executed, wait for approval, or are interrupted."""
        self._tool_results += results
        self._step(answer, side_event)

    @rule(answer=human_replies())
    @precondition(lambda self: not self._finished and not self._is_at(*_WITH_RULES))
    def internal_step(self, answer: Any) -> None:
        """The run takes a transition that needs no model and no tool: it parses, evaluates, recovers or resumes."""
        self._step(answer)

    @rule()
    @precondition(lambda self: self._finished)
    def stay_finished(self) -> None:
        """Do nothing: Hypothesis reports a state machine without an applicable rule as stuck."""
