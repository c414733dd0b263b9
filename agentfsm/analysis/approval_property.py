"""``needs_approvals``: no run calls a tool before enough people have approved the call, whatever rows a graph has.

It is about what the rows do, and bound to the loop's own guards and effects: a row counts as a vote, as a decision or
as a request only if its guard is the loop's function and it lies where ``with_votes`` puts it. Any other way from a
request back to where calls run violates the property.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentfsm.analysis.model_checker import VIOLATED, PropertyAutomaton
from agentfsm.errors import ConfigurationError
from agentfsm.loop import guards
from agentfsm.loop.outcomes import CLOSES_BATCH, RUN_CALLS
from agentfsm.loop.quorum import MAX_APPROVALS
from agentfsm.machine.declaration import Transition
from agentfsm.machine.graph import Graph

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
