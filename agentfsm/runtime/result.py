"""What a run came to: ``RunResult``, and the event with which it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from agentfsm.journal.records import Record

from agentfsm.core.events import Ending, Handoff, PartialRunSummary, RunCancelled, RunCompleted
from agentfsm.core.failures import Action, Failure
from agentfsm.core.messages import Message, Usage
from agentfsm.core.state import RunState
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph

__all__ = ["RunResult", "ending_of"]


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        output: The answer: a text, or a value of the agent's ``output_type``; None where there is none.
        outcome: The last event: which of the five endings it was, and with what.
        decisions: Every move in order, with the guards that were asked.
        run: Everything that the run knows.
        graph: The table that it ran on.
    """

    output: Any
    outcome: Ending
    decisions: tuple[Decision, ...] = field(repr=False)
    run: RunState = field(repr=False)
    graph: Graph = field(repr=False)
    _journal: Callable[[], list[Record]] | None = field(default=None, repr=False, compare=False)

    @property
    def journal(self) -> list[Record]:
        """What happened, as sealed records; written and hashed now, or read from the host's store.

        Raises:
            agentfsm.errors.JournalError: A record cannot be read.
        """
        return [] if self._journal is None else self._journal()

    @property
    def ok(self) -> bool:
        """Whether the run finished with an answer, recoveries or not."""
        return isinstance(self.outcome, RunCompleted)

    @property
    def state(self) -> str:
        """The declared state that the run is in: ``terminal`` or ``suspended``."""
        return self.run.state

    @property
    def messages(self) -> list[Message]:
        """The transcript, good as the ``message_history`` of a next run."""
        return list(self.run.messages)

    @property
    def usage(self) -> Usage:
        """Tokens and USD of all model calls."""
        return self.run.usage

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the word that everybody expects
        """The graph with this run's path on it: how often each row was taken, and where the run is.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such form, or it shows no path.
        """
        from agentfsm.diagrams import RunPath, diagram  # a reader of graphs, loaded when one is drawn

        path = RunPath.of((d.transition.id for d in self.decisions), self.run.state)
        return diagram(self.graph, format, overlay=path)


def ending_of(run: RunState) -> tuple[type[Ending], dict[str, Any]]:
    """With which event a run that is in ``terminal`` ends, and what it says."""
    if run.cancelled is not None:
        return RunCancelled, {"reason": run.cancelled}
    if run.expired:
        return RunCancelled, {"reason": "nobody answered in time"}
    if run.aborted is not None:
        return PartialRunSummary, _partial(run, run.aborted)
    if run.ending == "done":
        return RunCompleted, {"output": run.ending_value}
    if run.ending == "unable":
        return Handoff, _unable(run)
    if run.failure is not None:
        if run.action is Action.handoff:
            return Handoff, _handoff(run.failure)
        return PartialRunSummary, _partial(run, run.failure)
    return RunCompleted, {"output": run.answer}


def _unable(run: RunState) -> dict[str, Any]:
    value = cast("Mapping[str, Any]", run.ending_value or {})
    return {
        "rationale": str(value.get("rationale", "")),
        "blockers": tuple(value.get("blockers", ())),
        "suggested_next_steps": tuple(value.get("suggested_next_steps", ())),
    }


def _handoff(failure: Failure) -> dict[str, Any]:
    return {
        "rationale": failure.explanation,
        "blockers": failure.blockers or (failure.explanation,),
        "failure": failure,
    }


def _partial(run: RunState, failure: Failure) -> dict[str, Any]:
    return {
        "missing": f"a final answer: {failure.explanation}",
        "learned_facts": tuple(f"{x.kind.value}: {x.explanation}" for x in run.lessons_learned),
        "next_step_plan": "start again with a larger budget or a smaller task" if run.aborted is None else "",
        "failure": failure,
    }
