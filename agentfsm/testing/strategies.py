"""Hypothesis strategies for runs, and ``AgentRules``: a state machine that plays the outside, move by move.

Paths are for control flow; these are for data: replies, arguments, results, times and answers that nobody
thought of. What fails shrinks to the shortest run that fails. Needs ``agentfsm[testing]``.
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
from agentfsm.core.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.core.state import RunState
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.machine.graph import State
from agentfsm.runtime.replies import Allow, Deny, GiveUp, ItDidNotRun, ItRan
from agentfsm.testing.invariants import answered_once, approved_first, journal_verifies, within_budgets
from agentfsm.testing.playing import Playing
from agentfsm.testing.scripts import DISMISSED, EXPIRED, Moment, Said, Script
from agentfsm.testing.stage import Stage

__all__ = ["AgentRules", "answers", "arguments", "moments", "replies", "results", "scripts"]

_OUTSIDE: tuple[str, ...] = (State.PRE_STEP, State.CALL_LLM, State.DISPATCH_TOOL)
MOST_MOVES_MET = 40
"""Mishaps happen within so many moves."""


def arguments(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a JSON schema of the kind that a tool's parameters have.

    Args:
        schema: The schema; ``$ref`` is looked up in its ``$defs``.
    """
    return _fitting(schema, cast("Mapping[str, Any]", schema.get("$defs", {})))


def _fitting(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return st.deferred(lambda: _fitting(defs[str(schema["$ref"]).rpartition("/")[2]], defs))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(*(_fitting(each, defs) for each in schema[several]))
    match schema.get("type"):
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 12))
        case "integer":
            return st.integers(_bound(schema, "inimum", 1), _bound(schema, "aximum", -1))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(_fitting(schema.get("items", {}), defs), max_size=3)
        case "object":
            return _object(schema, defs)
        case _:
            return st.none() | st.booleans() | st.integers() | st.text(max_size=12)


def _bound(schema: Mapping[str, Any], which: str, inward: int) -> int | None:
    end = "m" + which
    if end in schema:
        return int(schema[end])
    exclusive = "exclusiveM" + which
    return int(schema[exclusive]) + inward if exclusive in schema else None


def _object(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    fields = {name: _fitting(each, defs) for name, each in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    return st.fixed_dictionaries(
        {n: s for n, s in fields.items() if n in required},
        optional={n: s for n, s in fields.items() if n not in required},
    )


def replies(agent: Agent) -> st.SearchStrategy[Said]:
    """What a model may say to an agent: a text, calls of its tools, a broken reply, or a failure."""
    texts = st.sampled_from(["done", "", "{", "1"]) | st.text(max_size=20)
    flawed = st.sampled_from([FinishReason.LENGTH, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL])
    tools = agent.parts.tools
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
    return st.builds(Said, entries, st.integers(0, 2_000), st.just(0.0))


def results() -> st.SearchStrategy[Any]:
    """What a tool may bring: a value, or a failure of any kind."""
    kinds = ("tool_error", "ambiguous_input", "scope_too_large", "capability_gap", "kernel_invalidated")
    errors = [ToolError(kind, kind=kind) for kind in (*kinds, "policy_violation")]
    return st.one_of(
        st.text(max_size=12),
        st.sampled_from([RuntimeError("broke"), OSError("full"), TimeoutError("slow"), *errors]),
        st.none() | st.integers() | st.lists(st.integers(), max_size=2),
    )


def answers() -> st.SearchStrategy[Any]:
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


def moments() -> st.SearchStrategy[Moment]:
    """What may happen beside a visit to a state: time, silence, a cancellation, a power cut."""
    seconds = st.sampled_from([0.0, 1.0, 31.0, 400.0])
    mishaps = [Moment(), Moment(cancel=True), Moment(abort=True), Moment(asks=True), Moment(cut=True)]
    return st.tuples(seconds, seconds, st.sampled_from(mishaps)).map(_beside)


def _beside(drawn: tuple[float, float, Moment]) -> Moment:
    took_s, silent_s, mishap = drawn
    return replace(mishap, took_s=took_s, silent_s=silent_s)


def scripts(agent: Agent, *, longest: int = 8) -> st.SearchStrategy[Script]:
    """Whole scripts for an agent: what the model, the tools, people, the clock and chance do in one run.

    ::

        @given(scripts(my_agent))
        def test_budgets_hold(script):
            played = Stage(my_agent).play(script)
            invariants.within_budgets(played.result.run)

    Args:
        agent: The agent; its tools' schemas say what calls look like.
        longest: How many replies, and how many results, at most; behind them all goes well.
    """
    return st.builds(
        Script,
        st.lists(replies(agent), max_size=longest),
        st.lists(results(), max_size=longest),
        st.just(()),
        st.lists(answers(), max_size=4),
        st.dictionaries(st.integers(0, MOST_MOVES_MET), moments(), max_size=3),
        st.none(),
    )


class AgentRules(RuleBasedStateMachine):
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
        self._replies: list[Said] = []
        self._results: list[Any] = []
        self._people: list[Any] = []
        self._moments: dict[int, Moment] = {}
        script = Script(self._replies, self._results, (), self._people, self._moments)
        self._stage = Stage(self.agent)
        self.playing: Playing = self._stage.open(script)
        self._over = False

    def teardown(self) -> None:
        """Let go of the event loop; a run that has ended has a journal that verifies."""
        try:
            if self._over:
                journal_verifies(self.playing.played)
        finally:
            self._runner.close()

    @property
    def state(self) -> RunState:
        """What the run knows at this moment."""
        return self.playing.state

    def check(self) -> None:
        """What must hold after every move."""
        answered_once(self.state)
        within_budgets(self.state)
        approved_first(self.agent, self.playing.played)

    @invariant()
    def holds(self) -> None:
        """Check after every move."""
        self.check()

    def _at(self, *states: str) -> bool:
        return not self._over and self.state.state in states

    def _move(self, answer: Any, moment: Moment | None = None) -> None:
        """Make one move; should the run come to a wait with it, that is answered."""
        played = self.playing.played
        del self._people[len(played.results) :]
        self._people.append(answer)
        if moment is not None:
            self._moments[len(played.decisions)] = moment
        self._over = not self._runner.run(self.playing.move())

    @rule(moment=moments(), answer=answers())
    @precondition(lambda self: self._at(State.PRE_STEP))
    def step(self, moment: Moment, answer: Any) -> None:
        """Time passes, and the budgets are checked."""
        self._move(answer, moment)

    @rule(data=st.data(), answer=answers())
    @precondition(lambda self: self._at(State.CALL_LLM))
    def model(self, data: st.DataObject, answer: Any) -> None:
        """The model says something."""
        self._replies.append(data.draw(replies(self.agent), label="reply"))
        self._move(answer)

    @rule(brought=st.lists(results(), min_size=1, max_size=3), moment=moments(), answer=answers())
    @precondition(lambda self: self._at(State.DISPATCH_TOOL))
    def tools(self, brought: Sequence[Any], moment: Moment, answer: Any) -> None:
        """The calls that are due run, wait, or are cut off."""
        self._results += brought
        self._move(answer, moment)

    @rule(answer=answers())
    @precondition(lambda self: not self._over and self.state.state not in _OUTSIDE)
    def go_on(self, answer: Any) -> None:
        """The reply is read, the batch judged, the policy asked, a person answers."""
        self._move(answer)

    @rule()
    @precondition(lambda self: self._over)
    def rest(self) -> None:
        """The run is over; a machine that could do nothing more would count as stuck."""
