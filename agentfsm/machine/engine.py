"""The engine: a graph compiled onto one shared ``transitions.Machine``; ``step`` moves a run and says why.

``transitions`` 0.9.3 is driven through its documented class attributes. Its own ``Event.trigger`` builds an
``EventData`` and walks eight callback lists per trigger (10 to 20 microseconds), and does not say which guard decided;
the subclass below evaluates the same ``Transition`` objects in the same order and records the results. There are no
callbacks, auto-transitions or registered models, so only a row of the table can move a run.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import transitions

from agentfsm.errors import NoTransitionError
from agentfsm.machine.graph import Graph, Guard, Transition

__all__ = ["ABORTED", "Decision", "Machine", "Steppable"]

ABORTED = "aborted"
"""The name of the row that is taken when a guard raises."""


class Steppable(Protocol):
    """What the engine needs from a run: its state, and a method that records an exception raised by a guard."""

    state: str

    def abort(self, by: str, error: BaseException) -> None:
        """Record that a guard raised; the run's ``aborted`` guard holds from then on."""
        ...


class Decision(NamedTuple):
    """Why a run moved: the transition taken, and each guard that was evaluated with its result.

    Attributes:
        transition: The row that was taken.
        tried: Pairs of guard name and result, in the order of evaluation; the last one decided. A guard that
            raised counts as False.
        guard_result: What the deciding guard returned, if that is more than True (a ``Failure``); else None.
    """

    transition: Transition
    tried: tuple[tuple[str, bool], ...]
    guard_result: Any = None

    @property
    def source(self) -> str:
        """The state that was left."""
        return self.transition.source

    @property
    def target(self) -> str:
        """The state that was entered."""
        return self.transition.target

    @property
    def guard(self) -> str:
        """The name of the guard that decided, or ``otherwise``."""
        return self.transition.name

    def __str__(self) -> str:
        return str(self.transition)


class _CompiledTransition(transitions.Transition):
    """A ``transitions`` row with the ``Decision`` that taking it amounts to."""

    def __init__(self, source: str, dest: str, *callbacks: Any, decision: Decision) -> None:
        super().__init__(source, dest, *callbacks)
        self.decision = decision


class _StepEvent(transitions.Event):
    """The machine's only event: evaluate the rows of the run's state in order, and take the first that holds."""

    def __init__(self, name: str, machine: transitions.Machine) -> None:
        super().__init__(name, machine)
        self._rows_by_state: dict[str, list[tuple[Guard | None, Decision]]] = {}

    def add_transition(self, transition: transitions.Transition) -> None:
        """As in ``transitions``; also lists the guard with its decision."""
        super().add_transition(transition)
        if isinstance(transition, _CompiledTransition):
            decision = transition.decision
            self._rows_by_state.setdefault(decision.source, []).append((decision.transition.guard, decision))

    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """As in ``transitions``: move the model, and return whether it moved."""
        return self.decide(model) is not None

    def decide(self, run: Steppable) -> Decision | None:
        """Move a run by the first row whose guard holds; None if there is none.

        A guard that raises counts as not holding. The exception is recorded on the run, and the other rows are
        evaluated again from the first, so that the ``aborted`` row is taken (even if its own guard raised).
        """
        rows = self._rows_by_state.get(run.state, ())
        decision: Decision | None = None
        try:
            for guard, decision in rows:
                if guard is None:
                    run.state = decision.transition.target
                    return decision
                result = guard(run)
                if result:
                    decided = decision if result is True else _with_guard_result(decision, result)
                    run.state = decision.transition.target
                    return decided
        except Exception as error:  # guards may be user code: any exception ends the run in an orderly way
            if decision is None:
                raise
            return self._decide_skipping(run, {decision.transition.id: error})
        return None

    def _decide_skipping(self, run: Steppable, failed_guards: dict[str, Exception]) -> Decision | None:
        """Decide again, without the guards that raised."""
        by, error = next(reversed(failed_guards.items()))
        run.abort(by, error)
        for guard, decision in self._rows_by_state[run.state]:
            row = decision.transition
            if row.id in failed_guards and row.name != ABORTED:
                continue
            try:
                result = guard is None or row.id in failed_guards or guard(run)
                decided = decision if result is True else _with_guard_result(decision, result) if result else None
            except Exception as another:
                return self._decide_skipping(run, {**failed_guards, row.id: another})
            if decided is not None:
                run.state = row.target
                return decided
        return None


def _with_guard_result(decision: Decision, guard_result: object) -> Decision:
    """A decision with what its guard returned. An awaitable is refused: it would always be truthy."""
    if hasattr(type(guard_result), "__await__"):
        if isinstance(guard_result, Coroutine):
            guard_result.close()
        raise TypeError(f"the guard {decision.guard!r} returned an awaitable: a guard must be a plain function")
    return decision._replace(guard_result=guard_result)


class _TransitionsMachine(transitions.Machine):
    event_cls = _StepEvent
    transition_cls = _CompiledTransition


class Machine:
    """A graph compiled to run. One machine serves any number of runs and stores nothing about them.

    Args:
        graph: The checked graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        try:
            step = _cached_step_event(graph)
        except TypeError:  # a guard that cannot be hashed
            step = _build_machine(graph).events["step"]
        assert isinstance(step, _StepEvent)  # noqa: S101  # ``_TransitionsMachine.event_cls``
        self._step_event = step

    def step(self, run: Steppable) -> Decision:
        """Move a run by the first row whose guard holds, and return why. Changes nothing but the run; never awaits.

        Args:
            run: Any object with a ``state`` and what the guards read.

        Raises:
            NoTransitionError: The run is in a final state, or waits for an event that has not happened. The run
                is unchanged.
        """
        decision = self._step_event.decide(run)
        if decision is None:
            spec = self.graph.spec(run.state)
            why = "the run has ended" if spec.final else "the event that it waits for has not happened"
            raise NoTransitionError(f"no transition can leave {str(run.state)!r} now: {why}")
        return decision

    def would_move(self, trial: Steppable) -> bool:
        """Whether ``step`` would move the run.

        Args:
            trial: A copy of the run; it is moved.
        """
        return self._step_event.decide(trial) is not None

    def to_transitions(self) -> transitions.Machine:
        """A new ``transitions.Machine`` for the same graph, for that library's tools (``GraphMachine``...)."""
        return _build_machine(self.graph)


def _build_machine(graph: Graph) -> _TransitionsMachine:
    table = _TransitionsMachine(
        model=None,
        states=[transitions.State(str(spec.name), final=spec.final) for spec in graph.states],
        initial=str(graph.initial),
        auto_transitions=False,
    )
    for decision in _compile_decisions(graph):
        row = decision.transition
        table.add_transition(
            "step", str(row.source), str(row.target), conditions=cast("Any", row.guard), decision=decision
        )
    return table


@lru_cache(maxsize=16)
def _cached_step_event(graph: Graph) -> transitions.Event:
    """The compiled step event of a graph; cached, since a program has few graphs and many agents."""
    return _build_machine(graph).events["step"]


def _compile_decisions(graph: Graph) -> Iterator[Decision]:
    """The decision of each row. The first row that holds wins, so every guard before it was False."""
    for spec in graph.states:
        rows = graph.rows(spec.name)
        for index, row in enumerate(rows):
            yield Decision(row, (*((r.name, False) for r in rows[:index]), (row.name, True)))
