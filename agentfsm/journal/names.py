"""What a graph's states and transitions are called in another graph, as records of a change of graph say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.state import RunState

__all__ = ["JUDGED", "Names"]

JUDGED = frozenset({"replayed", "vouched"})
"""How a change of graph is judged: the run's path was replayed on the new one, or somebody vouches for it."""


@dataclass(frozen=True, slots=True)
class Names:
    """New names by old ones; what is not among them keeps its name.

    Attributes:
        states: New names of states.
        transitions: New ids of transitions; one that is not among them moves with its state.
    """

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    transitions: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Names:
        """The names that a record of a change of graph holds."""
        return cls(dict(body.get("states", ())), dict(body.get("transitions", ())))

    def written(self) -> dict[str, list[list[str]]]:
        """The names as a record holds them: pairs, since a journal's keys are ASCII and names need not be."""
        pairs = {"states": self.states, "transitions": self.transitions}
        return {what: [[str(old), str(new)] for old, new in sorted(of.items())] for what, of in pairs.items() if of}

    def state(self, name: str) -> str:
        """What a state is called."""
        return str(self.states.get(name, name))

    def transition(self, transition_id: str) -> str:
        """What a transition is called."""
        if transition_id in self.transitions:
            return self.transitions[transition_id]
        source, _, guard = transition_id.rpartition(".")
        return f"{self.state(source)}.{guard}"

    def rename(self, run: RunState) -> None:
        """Use the new names in what a run knows: the state that it is in, and the notes of its states."""
        run.state = self.state(run.state)
        run.notes = {self.state(name): value for name, value in run.notes.items()}
