"""Hypothesis strategies for scenarios, and ``AgentStateMachine``, which drives a simulated run move by move.

Paths test control flow; strategies test data: replies, arguments, results, times and human answers. A failure shrinks
to the shortest failing run. Needs ``agentfsm[testing]``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
except ImportError as error:  # pragma: no cover  # the extra is there where this is tested
    from agentfsm.errors import MissingExtraError

    raise MissingExtraError("agentfsm.testing.strategies", "testing") from error

from agentfsm.agent import Agent
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.loop.failures import TOOL_REPORTABLE_KINDS
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import State
from agentfsm.runtime.approval import Allow, Deny, GiveUp, ItDidNotRun, ItRan
from agentfsm.testing.invariants import approved_before_run, journal_verifies, one_result_per_call, within_budgets
from agentfsm.testing.simulation import DISMISSED, EXPIRED, ModelTurn, Scenario, SideEvent, Simulation, Simulator

__all__ = ["AgentStateMachine", "arguments", "human_replies", "model_turns", "scenarios", "side_events", "tool_results"]

_EXTERNAL_STATES: tuple[str, ...] = (State.PRE_STEP, State.CALL_LLM, State.DISPATCH_TOOL)
MAX_SIDE_EVENT_MOVE = 40
"""Mishaps happen within so many moves."""


def arguments(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a JSON schema of the kind that a tool's parameters have.

    Args:
        schema: The schema; ``$ref`` is looked up in its ``$defs``.
    """
    return _matching(schema, cast("Mapping[str, Any]", schema.get("$defs", {})))


def _matching(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return st.deferred(lambda: _matching(defs[str(schema["$ref"]).rpartition("/")[2]], defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(*(_matching(each, defs) for each in schema[several]))
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


def model_turns(agent: Agent) -> st.SearchStrategy[ModelTurn]:
    """What a model may say to an agent: a text, calls of its tools, a broken reply, or a failure."""
    texts = st.sampled_from(["done", "", "{", "1"]) | st.text(max_size=20)
    flawed = st.sampled_from([FinishReason.LENGTH, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL])
    tools = agent.config.tools
    known = st.sampled_from(sorted(tools)) if tools else st.just("nothing")
    fitting = known.flatmap(
        lambda name: arguments(tools[name].spec.parameters if name in tools else {"type": "object"}).map(
            lambda given: ToolCall("", name, given)
        )
    )
    unfit = st.builds(ToolCall, st.just(""), known | st.just("no_such_tool"), st.just({"no_such_field": 1}))
    batch = st.lists(fitting | unfit, min_size=1, max_size=3)
    failures = st.sampled_from([TransientProviderError("503"), ProviderError("401"), ContextOverflowError("too long")])
    entries = st.one_of(
        texts,
        batch,
        st.builds(Reply, texts.map(Message.assistant), flawed),
        failures,
    )
    return st.builds(ModelTurn, entries, st.integers(0, 2_000), st.just(0.0))


def tool_results() -> st.SearchStrategy[Any]:
    """What a tool may bring: a value, or a failure of any kind."""
    errors = [ToolError(kind, kind=kind) for kind in TOOL_REPORTABLE_KINDS]
    return st.one_of(
        st.text(max_size=12),
        st.sampled_from([RuntimeError("broke"), OSError("full"), TimeoutError("slow"), *errors]),
        st.none() | st.integers() | st.lists(st.integers(), max_size=2),
    )


def human_replies() -> st.SearchStrategy[Any]:
    """What a person may answer, for each kind of wait; or that nobody does."""
    words = st.sampled_from(["go on", "the first one", "no"])
    return st.one_of(
        st.fixed_dictionaries(
            {
                "question": words,
                "limit": words,
                "approval": st.sampled_from([Allow(), Deny("not now")]),
                "in_doubt": st.sampled_from([ItDidNotRun(), ItRan("it ran"), GiveUp()]),
            }
        ),
        st.sampled_from([DISMISSED, EXPIRED]),
    )


def side_events() -> st.SearchStrategy[SideEvent]:
    """What may happen beside a visit to a state: time, silence, a cancellation, a power cut."""
    seconds = st.sampled_from([0.0, 1.0, 31.0, 400.0])
    mishaps = [
        SideEvent(),
        SideEvent(cancel=True),
        SideEvent(abort=True),
        SideEvent(needs_approval=True),
        SideEvent(crash=True),
    ]
    return st.tuples(seconds, seconds, st.sampled_from(mishaps)).map(_with_times)


def _with_times(drawn: tuple[float, float, SideEvent]) -> SideEvent:
    took_s, silent_s, mishap = drawn
    return replace(mishap, duration_s=took_s, idle_s=silent_s)


def scenarios(agent: Agent, *, max_turns: int = 8) -> st.SearchStrategy[Scenario]:
    """Whole scripts for an agent: what the model, the tools, people, the clock and chance do in one run.

    ::

        @given(scripts(my_agent))
        def test_budgets_hold(script):
            played = Stage(my_agent).play(script)
            invariants.within_budgets(played.result.run)

    Args:
        agent: The agent; its tools' schemas say what calls look like.
        max_turns: How many replies, and how many results, at most; behind them all goes well.
    """
    return st.builds(
        Scenario,
        st.lists(model_turns(agent), max_size=max_turns),
        st.lists(tool_results(), max_size=max_turns),
        st.just(()),
        st.lists(human_replies(), max_size=4),
        st.dictionaries(st.integers(0, MAX_SIDE_EVENT_MOVE), side_events(), max_size=3),
        st.none(),
    )


class AgentStateMachine(RuleBasedStateMachine):
    """The outside as rules: in each state, whatever may happen there happens. Derive from it and set ``agent``.

    ::

        class MyRules(AgentRules):
            agent = my_agent

        TestMyRules = MyRules.TestCase

    After every move the checks of ``check`` hold; override it to choose others.

    Attributes:
        agent: The agent; it is left as it is.
    """

    agent: Agent

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._model_turns: list[ModelTurn] = []
        self._tool_results: list[Any] = []
        self._human_replies: list[Any] = []
        self._side_events: dict[int, SideEvent] = {}
        script = Scenario(self._model_turns, self._tool_results, (), self._human_replies, self._side_events)
        self._simulator = Simulator(self.agent)
        self.simulation: Simulation = self._simulator.start(script)
        self._finished = False

    def teardown(self) -> None:
        """Let go of the event loop; a run that has ended has a journal that verifies."""
        try:
            if self._finished:
                journal_verifies(self.simulation.result)
        finally:
            self._runner.close()

    @property
    def state(self) -> RunState:
        """What the run knows at this moment."""
        return self.simulation.state

    def check(self) -> None:
        """What must hold after every move."""
        one_result_per_call(self.state)
        within_budgets(self.state)
        approved_before_run(self.agent, self.simulation.result)

    @invariant()
    def invariants_hold(self) -> None:
        """Check after every move."""
        self.check()

    def _in_state(self, *states: str) -> bool:
        return not self._finished and self.state.state in states

    def _step(self, answer: Any, moment: SideEvent | None = None) -> None:
        """Make one move; should the run come to a wait with it, that is answered."""
        played = self.simulation.result
        del self._human_replies[len(played.run_results) :]
        self._human_replies.append(answer)
        if moment is not None:
            self._side_events[len(played.decisions)] = moment
        self._finished = not self._runner.run(self.simulation.step())

    @rule(moment=side_events(), answer=human_replies())
    @precondition(lambda self: self._in_state(State.PRE_STEP))
    def step(self, moment: SideEvent, answer: Any) -> None:
        """Time passes, and the budgets are checked."""
        self._step(answer, moment)

    @rule(data=st.data(), answer=human_replies())
    @precondition(lambda self: self._in_state(State.CALL_LLM))
    def model(self, data: st.DataObject, answer: Any) -> None:
        """The model says something."""
        self._model_turns.append(data.draw(model_turns(self.agent), label="reply"))
        self._step(answer)

    @rule(brought=st.lists(tool_results(), min_size=1, max_size=3), moment=side_events(), answer=human_replies())
    @precondition(lambda self: self._in_state(State.DISPATCH_TOOL))
    def tools(self, brought: Sequence[Any], moment: SideEvent, answer: Any) -> None:
        """The calls that are due run, wait, or are cut off."""
        self._tool_results += brought
        self._step(answer, moment)

    @rule(answer=human_replies())
    @precondition(lambda self: not self._finished and self.state.state not in _EXTERNAL_STATES)
    def internal_step(self, answer: Any) -> None:
        """The reply is read, the batch judged, the policy asked, a person answers."""
        self._step(answer)

    @rule()
    @precondition(lambda self: self._finished)
    def stay_finished(self) -> None:
        """The run is over; a machine that could do nothing more would count as stuck."""
