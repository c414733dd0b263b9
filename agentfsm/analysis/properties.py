"""Temporal properties that users declare: ``must_pass`` and ``never_after``, as automata over the rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

__all__ = ["VIOLATED", "Property", "PropertyAutomaton", "must_pass", "never_after", "never_taken"]

VIOLATED = 2
"""The state of a watcher that has seen its property broken; 0 and 1 are its others."""

PropertyAutomaton = Callable[[int, int], int]
"""From its state and the place of a row that is taken, the watcher's next state."""


@dataclass(frozen=True, slots=True)
class Property:
    """Something that no run of a table may do. Made by ``must_pass`` or ``never_after``.

    A name in it is a state (the event is that it is entered), a guard (a row with it is taken, wherever)
    or the id of a row.

    Attributes:
        text: What it says, for people.
        forbidden: What must not happen while it is armed.
        armed_by: What arms it; empty where it is armed from the start and again after each ``forbidden``.
        disarmed_by: What disarms it; empty for nothing.
        arm_late: Whether a row that both arms it and is forbidden may pass.
    """

    text: str
    forbidden: str
    armed_by: str = ""
    disarmed_by: str = ""
    arm_late: bool = False

    def automaton(self, graph: Graph) -> tuple[int, PropertyAutomaton]:
        """The watcher of a graph's rows and the state in which it starts.

        Raises:
            ConfigurationError: A name means nothing in the graph.
        """
        arms, disarms, nevers = (
            _matching_rows(graph, name) for name in (self.armed_by, self.disarmed_by, self.forbidden)
        )
        always = 0 if self.armed_by else 1

        def watch(state: int, row: int) -> int:
            if row in arms and not self.arm_late:
                state = 1
            if row in disarms:
                state = 0
            if row in nevers:
                if state:
                    return VIOLATED
                state = always
            return 1 if row in arms and self.arm_late else state

        start = 1 if self.armed_by == graph.initial else always
        return (0 if self.disarmed_by == graph.initial else start), watch


def _matching_rows(graph: Graph, name: str) -> frozenset[int]:
    found = frozenset(i for i, t in enumerate(graph.transitions) if name in (t.target, t.name, t.id))
    if name and not found and name not in {s.name for s in graph.states}:
        raise ConfigurationError(f"{name!r} is no state, guard or row of graph {graph.name!r}")
    return found


def must_pass(target: str, *, through: str, when: str = "") -> Property:
    """No run comes to ``target`` without having passed ``through`` since it last was there.

    ::

        assert LOOP.analyse(must_pass("dispatch_tool", through="approval_decided", when="approval_required")).ok

    Args:
        target: A state, a guard or the id of a row.
        through: What must come in between.
        when: With it, that is only owed once this has happened (and is paid when ``through`` comes).
    """
    owed = f" once {when} has come" if when else ""
    return Property(f"{target} only after {through}{owed}", forbidden=target, armed_by=when, disarmed_by=through)


def never_after(event: str, after: str, *, until: str = "") -> Property:
    """Once ``after`` has happened, ``event`` never does.

    ::

        assert LOOP.analyse(never_after("dispatch_tool", "output_truncated", until="pre_step")).ok

    Args:
        event: A state, a guard or the id of a row.
        after: What forbids it from then on.
        until: What allows it again.
    """
    freed = f" until {until}" if until else ""
    return Property(
        f"never {event} after {after}{freed}", forbidden=event, armed_by=after, disarmed_by=until, arm_late=True
    )


def never_taken(row: str) -> Property:
    """A row is never taken."""
    return Property(f"{row} is never taken", forbidden=row)
