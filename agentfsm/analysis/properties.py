"""Temporal properties that users declare: ``must_pass`` and ``never_after``, as automata over the rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

__all__ = ["VIOLATED", "Property", "PropertyAutomaton", "must_pass", "never_after", "never_taken"]

VIOLATED = 2
"""The state of an automaton whose property is violated; its other states are 0 (disarmed) and 1 (armed)."""

PropertyAutomaton = Callable[[int, int], int]
"""The next state of an automaton, from its state and the place of the row taken."""


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

    def automaton(self, graph: Graph) -> tuple[int, PropertyAutomaton]:
        """The initial state and the transition function of the automaton that checks the property on a graph.

        Raises:
            ConfigurationError: A name is no state, guard or row of the graph.
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


def never_taken(row: str) -> Property:
    """A row is never taken; for tests."""
    return Property(f"{row} is never taken", forbidden=row)
