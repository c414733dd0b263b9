"""The engine: a graph compiled onto one shared ``transitions.Machine``, which makes every move of a run.

The rows are ``transitions.Transition`` objects with ``Condition`` objects, and the machine's own ``set_state`` changes
the state. Of the library's documented extension points four are used: ``condition_cls`` evaluates a guard and records
its result, ``transition_cls`` spends what the row declares, ``event_cls`` tries the rows in order, and ``state_cls``
looks up the value that a model gets once, and not in each move. The methods that the first three replace walk eight
lists of callbacks in each move (10 to 20 microseconds) and do not tell which guard decided. There are no callbacks,
auto-transitions or registered models, so only a row of the table can move a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import transitions
from transitions.core import Condition, EventData

from agentfsm.errors import NoTransitionError
from agentfsm.machine.declaration import Exhausted, Guard, StateSpec, Transition, guard_name
from agentfsm.machine.graph import Graph

M = TypeVar("M", bound=transitions.Machine)


class RunSnapshot(Protocol):
    """What guards that are not built in may see of a run."""

    def call(self, role: str, function: Callable[..., Any]) -> Any:
        """What a function returns for this view; an attempt to change the run raises, and names the function."""
        ...


class Steppable(Protocol):
    """What the engine needs from a run."""

    state: str
    counters: dict[str, int]
    guardrails: Any

    def view(self) -> RunSnapshot:
        """An immutable view of the run, for guards that are not built in."""
        ...

    def abort(self, by: str, error: BaseException) -> None:
        """Record that a guard raised; the run's ``aborted`` guard holds from then on."""
        ...


class Decision(NamedTuple):
    """Why a run moved: the transition taken, and each guard that was evaluated, with its result.

    Attributes:
        transition: The row that was taken.
        tried: Pairs of guard name and result, in the order of evaluation; the last one decided. The result is None for
            a guard that raised, and False for a row whose counter is empty.
        guard_result: What the deciding guard returned, if that is more than True (a ``Failure``); else None.
    """

    transition: Transition
    tried: tuple[tuple[str, bool | None], ...]
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


def spend_counters(counters: dict[str, int], row: Transition, target: StateSpec) -> None:
    """Apply what a row and the state that it enters declare to a run's counters: refill, then spend.

    Args:
        counters: How often each counter was spent; changed in place.
        row: The row that is taken.
        target: The state that it enters.
    """
    for name in row.refills:
        counters[name] = 0
    for name in row.spends:
        counters[name] = counters.get(name, 0) + 1
    for name in target.spends:
        counters[name] = counters.get(name, 0) + 1


class _Step:
    """One move, in the part of the library's ``EventData``: the run, its view, and what the last guard returned."""

    __slots__ = ("guard_result", "model", "view")
    model: Steppable
    view: RunSnapshot | None
    guard_result: object

    def evaluate(self, guard: Guard) -> object:
        """What a guard that is not built in returns for an immutable view of the run."""
        if self.view is None:
            self.view = self.model.view()
        return self.view.call("guard", guard)


class _GuardRaisedError(Exception):
    """A guard raised ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _GuardCondition(Condition):
    """A guard: it gets the run itself if it is built in, and an immutable view of it if it is not."""

    def __init__(self, func: Any, target: bool = True) -> None:
        super().__init__(func, target)
        self.guard: Guard = func
        self.built_in = False
        self._function: Callable[[Any], object] = func.__call__ if isinstance(func, Exhausted) else func

    def check(self, event_data: Any) -> bool:
        """As in ``transitions``; also keeps what the guard returned, if that is more than True."""
        try:
            if self.built_in:
                function = self._function  # calling an attribute that is not a method is slower than calling a variable
                result = function(event_data.model)
            else:
                result = event_data.evaluate(self.guard)
            if not result:
                return False
            if result is not True:
                event_data.guard_result = _require_plain(self.guard, result)
        except Exception as error:  # guards may be user code: any exception ends the run in an orderly way
            raise _GuardRaisedError(error) from error
        return True


class _Row(transitions.Transition):
    """A row of the table. It holds if its counters are not empty and its guard holds."""

    __slots__ = (
        "charged",
        "condition",
        "counts",
        "decision",
        "dest_state",
        "machine",
        "refused",
        "row",
        "silent_while",
        "target",
    )
    condition_cls = _GuardCondition

    def __init__(self, source: str, dest: str, *callbacks: Any, row: Transition, graph: Graph) -> None:
        super().__init__(source, dest, *callbacks)
        self.row = row
        self.target = graph.spec(row.target)
        self.condition = cast("_GuardCondition | None", self.conditions[0] if self.conditions else None)
        self.counts = bool(row.spends or row.refills or self.target.spends)
        self.charged = tuple(c for c in graph.counters if c.name in row.spends and c.name not in row.refills)
        self.silent_while: Sequence[tuple[str, object]] = ()
        before = graph.rows(row.source)
        self.refused = tuple((other.name, False) for other in before[: before.index(row)])
        self.decision = Decision(row, (*self.refused, (row.name, True)))
        self.machine: transitions.Machine
        self.dest_state: transitions.State

    def execute(self, event_data: Any) -> bool:
        """As in ``transitions``, after its condition was checked: move the run unless a counter is empty."""
        run = event_data.model
        if self.counts:
            for counter in self.charged:
                if counter.is_empty(run):
                    event_data.guard_result = None
                    return False
            spend_counters(run.counters, self.row, self.target)
        # In a list, since the library would ask whether it is one; through the class, since instances have __getattr__.
        transitions.Machine.set_state(self.machine, self.dest_state, [run])
        return True


class _StateRows:
    """The rows of a state, and those of them that may be taken in the usual case.

    Usually, fields of the run have the values with which most of the state's built-in guards do not hold. These guards
    are known to be silent then without a call of each: 36,000 of the 500,000 instructions of a tool step.

    Attributes:
        rows: All rows.
        fields: Reads the fields of a run; None if no guard depends on any.
        values: Their values in the usual case.
        usual: The rows that may be taken then.
    """

    __slots__ = ("fields", "rows", "usual", "values")

    def __init__(self, rows: Sequence[_Row]) -> None:
        self.rows: Sequence[_Row] = rows
        expected = {field: value for row in rows for field, value in row.silent_while}
        silent = [row for row in rows if row.silent_while and all(expected[f] == v for f, v in row.silent_while)]
        self.usual = tuple(row for row in rows if row not in silent)
        self.fields: Callable[[Any], Any] | None = attrgetter(*expected) if expected else None
        self.values = next(iter(expected.values())) if len(expected) == 1 else tuple(expected.values())


class _StepEvent(transitions.Event):
    """The machine's only event: try the rows of the run's state in order, and take the first that holds."""

    def __init__(self, name: str, machine: transitions.Machine) -> None:
        super().__init__(name, machine)
        self.rows = cast("Mapping[str, list[_Row]]", self.transitions)
        self.by_state: Mapping[str, _StateRows] = {}

    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """As in ``transitions``: move the model, and return whether it moved."""
        return self.decide(model) is not None

    def decide(self, run: Steppable) -> Decision | None:
        """Move a run by the first row that holds; None if there is none."""
        state = self.by_state.get(run.state)
        if state is None:
            return None
        step = _Step()
        step.model, step.view, step.guard_result = run, None, None
        row: _Row | None = None
        rows, fields = state.rows, state.fields
        if fields is not None:
            try:
                if fields(run) == state.values:
                    rows = state.usual
            except AttributeError:  # the run has no reply, whose fields are among them
                pass
        try:
            for row in rows:
                condition = row.condition
                if (condition is None or condition.check(step)) and row.execute(step):
                    found = step.guard_result
                    return row.decision if found is None else row.decision._replace(guard_result=found)
        except _GuardRaisedError as raised:
            if row is None:
                raise
            return self._decide_after(row, raised.error, step, [*row.refused, (row.row.name, None)])
        return None

    def _decide_after(
        self, raised: _Row, error: Exception, step: _Step, tried: list[tuple[str, bool | None]]
    ) -> Decision | None:
        """Move a run after a guard raised.

        The run takes the row of its state that ends it as aborted, and no other guard is evaluated. In a graph without
        such a row, the guard counts as not holding.
        """
        run = step.model
        run.abort(raised.row.id, error)
        rows = self.rows[run.state]
        stop = next((row for row in rows if row.row.ends == "aborted"), None)
        if stop is not None:
            stop.execute(step)
            return Decision(stop.row, (*tried, (stop.row.name, True)))
        for row in rows[rows.index(raised) + 1 :]:
            try:
                held = (row.condition is None or row.condition.check(step)) and row.execute(step)
            except _GuardRaisedError as another:
                return self._decide_after(row, another.error, step, [*tried, (row.row.name, None)])
            tried.append((row.row.name, held))
            if held:
                return Decision(row.row, tuple(tried), step.guard_result)
        return None


def _require_plain(guard: Guard, guard_result: object) -> object:
    """What a guard returned. An awaitable is refused: it would always be truthy."""
    if hasattr(type(guard_result), "__await__"):
        if isinstance(guard_result, Coroutine):
            guard_result.close()
        raise TypeError(f"the guard {guard_name(guard)!r} returned an awaitable: a guard must be a plain function")
    return guard_result


class _TableState(transitions.State):
    """A state of the table, whose name is a string."""

    value: Any = None  # what the library looks up in a property, although it is the name that it has been given

    def __init__(self, name: str, final: bool = False) -> None:
        super().__init__(name, final=final)
        self.value = name


class _TransitionsMachine(transitions.Machine):
    state_cls = _TableState
    event_cls = _StepEvent
    transition_cls = _Row


class Machine:
    """A graph compiled to run. One machine serves any number of runs and stores nothing about them.

    Args:
        graph: The checked graph.
        built_in: The guards that get the run itself; all others get an immutable view of it (``Steppable.view``).

    Attributes:
        graph: The graph.
        specs: Its states by name.
    """

    def __init__(self, graph: Graph, built_in: Collection[Guard] = ()) -> None:
        self.graph = graph
        self.specs = dict(graph.specs)
        used = {id(row.guard) for row in graph.transitions}
        trusted = frozenset(guard for guard in built_in if id(guard) in used)
        step = _cached_step_event(graph, trusted)
        assert isinstance(step, _StepEvent)  # noqa: S101  # ``_TransitionsMachine.event_cls``
        self._step_event = step

    def step(self, run: Steppable) -> Decision:
        """Move a run by the first row whose guard holds, and return why. Changes nothing but the run; never awaits.

        Args:
            run: Any object with a ``state``, counters, and what the guards read.

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

    def would_take(self, trial: Steppable) -> Transition | None:
        """The row that ``step`` would take; None if it would not move the run.

        Args:
            trial: A copy of the run; it is moved.
        """
        decision = self._step_event.decide(trial)
        return None if decision is None else decision.transition

    def to_transitions(self, machine_class: Callable[..., M] | None = None, model: object = None) -> M:
        """The graph as a machine of the library's own classes, for its tools.

        A model's trigger is ``step``; its guards get the model, and are evaluated in the order of the table. What rows
        spend is not part of it. For a picture by that library::

            from functools import partial
            from transitions.extensions import GraphMachine

            model = Model()  # any object
            mermaid = partial(GraphMachine, graph_engine="mermaid", show_conditions=True)
            Machine(LOOP).to_transitions(mermaid, model)
            print(model.get_graph().source)

        Args:
            machine_class: What makes the machine, such as ``GraphMachine`` or a ``partial`` of it with options of
                its own; by default ``transitions.Machine``.
            model: The object whose state the machine manages, if any.
        """
        make: Any = machine_class or transitions.Machine
        return cast(
            "M",
            make(
                model=model,
                states=[{"name": str(spec.name), "final": spec.final} for spec in self.graph.states],
                initial=str(self.graph.initial),
                auto_transitions=False,
                send_event=True,
                transitions=[
                    {
                        "trigger": "step",
                        "source": str(row.source),
                        "dest": str(row.target),
                        "conditions": None if row.guard is None else _as_condition(row.guard),
                    }
                    for spec in self.graph.states
                    for row in self.graph.rows(spec.name)
                ],
            ),
        )


def _as_condition(guard: Guard) -> Callable[[EventData], bool]:
    """A guard as a condition of the library, which counts a result as true only if it equals True."""

    def condition(event_data: EventData) -> bool:
        return bool(guard(event_data.model))

    condition.__name__ = guard_name(guard)
    condition.__doc__ = guard.__doc__
    return condition


def _build_machine(graph: Graph, built_in: Collection[Guard]) -> _TransitionsMachine:
    table = _TransitionsMachine(
        model=None,
        states=[_TableState(str(spec.name), final=spec.final) for spec in graph.states],
        initial=str(graph.initial),
        auto_transitions=False,
    )
    for spec in graph.states:
        for row in graph.rows(spec.name):
            table.add_transition(
                "step",
                str(row.source),
                str(row.target),
                conditions=cast("Any", row.guard),
                row=row,
                graph=graph,
            )
    event = cast("_StepEvent", table.events["step"])
    for each in (row for rows in event.rows.values() for row in rows):
        each.machine, each.dest_state = table, table.get_state(str(each.row.target))
        if each.condition is not None:
            guard = each.condition.guard
            each.condition.built_in = any(guard is other for other in built_in)
            if each.condition.built_in:
                each.silent_while = getattr(guard, "silent_while", ())
    event.by_state = {state: _StateRows(rows) for state, rows in event.rows.items()}
    return table


@lru_cache(maxsize=16)
def _cached_step_event(graph: Graph, built_in: frozenset[Guard]) -> transitions.Event:
    """The compiled step event of a graph; cached, since a program has few graphs and many agents."""
    return _build_machine(graph, built_in).events["step"]
