"""Safety properties: what no run of a graph may do, as automata over the rows of a run.

``must_pass`` and ``never_after`` are about events that they name. ``needs_approvals`` is about what the rows do, and
bound to the loop's own guards and effects: a row counts as a vote, as a decision or as a request only if its guard is
the loop's function and it lies where ``with_votes`` puts it. Any other way from a request back to where calls run
violates the property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentfsm.errors import ConfigurationError
from agentfsm.loop import guards
from agentfsm.loop.outcomes import CLOSES_BATCH, RUN_CALLS
from agentfsm.loop.quorum import MAX_APPROVALS
from agentfsm.machine.declaration import Transition
from agentfsm.machine.graph import Graph

VIOLATED = 2
"""The state of an automaton whose property is violated; its other states are 0 (disarmed) and 1 (armed)."""

PropertyAutomaton = Callable[[int, int], int]
"""The next state of an automaton, from its state and the place of the row taken."""


class SafetyProperty(Protocol):
    """Something that no run of a graph may do, as an automaton over the rows of a run."""

    @property
    def text(self) -> str:
        """The property in words."""
        ...

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it depends on beyond the rows and the model of the loop's own functions."""
        ...

    def automaton(self, graph: Graph) -> tuple[int, PropertyAutomaton]:
        """The initial state and the transition function of the automaton that checks the property on a graph."""
        ...


@dataclass(frozen=True, slots=True)
class Property:
    """A safety property: something that no run of a graph may do. Made by ``must_pass`` or ``never_after``.

    Each name in it is an event: a state (it is entered), a guard (a row with it is taken, in any state) or the id
    of a row.

    Attributes:
        text: The property in words.
        forbidden: The event that must not happen while the property is armed.
        armed_by: The event that arms it; if empty, it is armed from the start and again after each ``forbidden``.
        disarmed_by: The event that disarms it, if any.
        arm_late: Whether a row that both arms it and is forbidden is allowed.
    """

    text: str
    forbidden: str
    armed_by: str = ""
    disarmed_by: str = ""
    arm_late: bool = False

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it depends on beyond the rows and the model: nothing."""
        return ()

    def automaton(self, graph: Graph) -> tuple[int, PropertyAutomaton]:
        """The initial state and the transition function of the automaton that checks the property on a graph.

        Raises:
            ConfigurationError: A name is not a state, guard or row of the graph.
        """
        arming, disarming, forbidden = (
            _matching_rows(graph, name) for name in (self.armed_by, self.disarmed_by, self.forbidden)
        )
        resting_state = 0 if self.armed_by else 1

        def step(state: int, row: int) -> int:
            if row in arming and not self.arm_late:
                state = 1
            if row in disarming:
                state = 0
            if row in forbidden:
                if state:
                    return VIOLATED
                state = resting_state
            return 1 if row in arming and self.arm_late else state

        start = 1 if self.armed_by == graph.initial else resting_state
        return (0 if self.disarmed_by == graph.initial else start), step


def _matching_rows(graph: Graph, name: str) -> frozenset[int]:
    rows = frozenset(i for i, t in enumerate(graph.transitions) if name in (t.target, t.name, t.id))
    if name and not rows and name not in {s.name for s in graph.states}:
        raise ConfigurationError(f"{name!r} is not a state, guard or row of graph {graph.name!r}")
    return rows


def must_pass(target: str, *, through: str, when: str = "") -> Property:
    """No run reaches ``target`` without having passed ``through`` since it was last there.

    ::

        assert LOOP.analyse(must_pass("dispatch_tool", through="approval_decided", when="approval_required")).ok

    Args:
        target: A state, a guard or the id of a row.
        through: The event that must happen in between.
        when: If given, the obligation starts with this event, and ends when ``through`` happens.
    """
    condition = f" once {when} has happened" if when else ""
    return Property(f"{target} only after {through}{condition}", forbidden=target, armed_by=when, disarmed_by=through)


def never_after(event: str, after: str, *, until: str = "") -> Property:
    """Once ``after`` has happened, ``event`` never happens.

    ::

        assert LOOP.analyse(never_after("dispatch_tool", "output_truncated", until="pre_step")).ok

    Args:
        event: A state, a guard or the id of a row.
        after: The event that forbids it from then on.
        until: The event that allows it again.
    """
    release = f" until {until}" if until else ""
    return Property(
        f"never {event} after {after}{release}", forbidden=event, armed_by=after, disarmed_by=until, arm_late=True
    )


_NOT_ASKED, _ASKED = 0, 1
"""The states of the automaton: whether a call was asked for and nothing was decided since."""


@dataclass(frozen=True, slots=True)
class ApprovalProperty:
    """A safety property: a call that was asked for runs only after so many approvals. Made by ``needs_approvals``.

    Attributes:
        text: The property in words.
        tool: The tool.
        approvals: How many approvals each call of it needs.
        certain: Whether the tool of an agent was seen to need them; otherwise that is an assumption.
    """

    text: str
    tool: str
    approvals: int
    certain: bool = False

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it depends on beyond the rows and the model of the loop's own functions."""
        asks = () if self.certain else (f"{self.tool}: each call of it requires {self.approvals} approval(s)",)
        return (*asks, "approval_decided: while approvals are missing, it holds only for a denial, which runs nothing")

    def automaton(self, graph: Graph) -> tuple[int, PropertyAutomaton]:
        """The initial state and the transition function of the automaton that checks the property on a graph."""
        rows = graph.transitions
        counting = {row.source for row in rows if _records_vote(graph, row)}
        deciding = {
            place
            for place, row in enumerate(rows)
            if row.guard is guards.approval_decided
            and graph.spec(row.source).waits
            and (self.approvals == 1 or row.source in counting)
        }

        def step(state: int, place: int) -> int:
            row = rows[place]
            if _asks(graph, row):
                return _ASKED
            if state == _NOT_ASKED:
                return state
            if place in deciding:
                return _NOT_ASKED
            if _runs_calls(graph, row.target):
                return VIOLATED
            closes = graph.spec(row.target).effect in CLOSES_BATCH or graph.spec(row.target).final
            return _NOT_ASKED if closes else state

        return _NOT_ASKED, step


def needs_approvals(tool: str, approvals: int) -> ApprovalProperty:
    """No call of a tool has an effect before so many people have approved it.

    A request for approval leads back to where calls run only by the decision of a wait that counts votes. A wait
    counts votes if it has the rows of ``with_votes``.

    ::

        assert with_votes(LOOP).analyse(needs_approvals("pay", 2)).ok

    Args:
        tool: The tool, each call of which requires so many approvals.
        approvals: How many: 1 to ``MAX_APPROVALS``.

    Raises:
        ConfigurationError: ``approvals`` is out of range.
    """
    if not 1 <= approvals <= MAX_APPROVALS:
        raise ConfigurationError(f"a call may need from 1 to {MAX_APPROVALS} approvals, not {approvals}")
    people = "1 approval" if approvals == 1 else f"{approvals} approvals"
    return ApprovalProperty(f"no effect of {tool} before {people}", tool, approvals)


def _asks(graph: Graph, row: Transition) -> bool:
    return row.guard is guards.approval_required and _runs_calls(graph, row.source)


def _runs_calls(graph: Graph, state: str) -> bool:
    """Whether the effect of a state runs calls: the loop's, or one of a user's state, which may."""
    spec = graph.spec(state)
    return not spec.final and (spec.effect is RUN_CALLS or callable(spec.effect))


def _records_vote(graph: Graph, row: Transition) -> bool:
    return row.guard is guards.vote_recorded and row.source == row.target and graph.spec(row.source).waits
