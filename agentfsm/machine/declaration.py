"""What a graph is declared with: states, transitions, counters, and what is declared about effects and guards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import update_wrapper
from operator import attrgetter
from typing import Any, Protocol, TypeVar


class GraphVerdict(Protocol):
    """What was proved of one property; see ``agentfsm.analysis.Verdict``."""

    @property
    def text(self) -> str:
        """The property."""
        ...

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None if that is open."""
        ...

    @property
    def path(self) -> tuple[str, ...]:
        """If it does not hold, the ids of the rows of the shortest run that violates it."""
        ...

    @property
    def loop(self) -> tuple[str, ...]:
        """The ids of rows that can then repeat forever."""
        ...

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it depends on beyond the table."""
        ...


class GraphBounds(Protocol):
    """How long a run can get; None means unbounded. See ``agentfsm.analysis.Bounds``."""

    @property
    def moves(self) -> int | None:
        """Moves between two waits."""
        ...

    @property
    def model_calls(self) -> int | None:
        """Model calls between two waits."""
        ...

    @property
    def tool_calls(self) -> int | None:
        """Tool calls between two waits."""
        ...

    @property
    def model_calls_in_all(self) -> int | None:
        """Model calls of a whole run."""
        ...

    @property
    def tool_calls_in_all(self) -> int | None:
        """Tool calls of a whole run."""
        ...


class GraphAnalysis(Protocol):
    """What is proved about a graph; see ``agentfsm.analysis.Analysis``, which ``Graph.analyse`` returns."""

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        ...

    @property
    def verdicts(self) -> Sequence[GraphVerdict]:
        """One for each property, the built-in ones first."""
        ...

    @property
    def bounds(self) -> GraphBounds:
        """How long a run can get."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a run of that length is possible under all assumptions."""
        ...

    @property
    def dead(self) -> Sequence[object]:
        """The rows that no run takes."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The analysis as JSON-compatible data."""
        ...


Guard = Callable[[Any], object]
"""A pure, synchronous function of a run; its return value is tested for truth."""

OTHERWISE = "otherwise"
"""The name of a transition that has no guard."""


def guard_name(guard: Guard) -> str:
    """The name of a guard: that of its function, or its text if it is an object without a name."""
    return str(getattr(guard, "__name__", guard))


WAITING_OUTCOMES = frozenset({"approval_required", "in_doubt"})
"""What an effect of the user's may come back with besides the outcomes that its state declares: a call must wait for a
person."""

ENDINGS = ("completed", "handed_off", "partial", "cancelled", "aborted")
"""How a run can end. Each row into a final state names one; ``completed`` alone is a success."""


class State(StrEnum):
    """The eight declared phases of an agent's loop."""

    PRE_STEP = "pre_step"
    CALL_LLM = "call_llm"
    POST_LLM = "post_llm"
    DISPATCH_TOOL = "dispatch_tool"
    POST_TOOL = "post_tool"
    RECOVER = "recover"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


@dataclass(frozen=True, slots=True)
class Counter:
    """A budget of a run. Only the engine changes it, by what states and rows declare that they spend and refill.

    Attributes:
        name: Its name, which ``spends`` and ``refills`` refer to.
        limit: How often it can be spent before it is empty: a number, or the name of a field or property of the
            run's ``AgentGuardrails`` (which may be None: no limit).
    """

    name: str
    limit: int | str

    def limit_in(self, run: Any) -> int | None:
        """Its limit in a run, whose guardrails may set it; None for no limit."""
        limit = self.limit
        if isinstance(limit, int):
            return limit
        value: int | None = getattr(run.guardrails, limit)
        return value

    def is_empty(self, run: Any) -> bool:
        """Whether a run has spent it as often as its limit allows."""
        limit = self.limit_in(run)
        return limit is not None and run.counters.get(self.name, 0) >= limit


@dataclass(frozen=True, eq=False, slots=True)
class EffectSpec:
    """What is declared about an effect: the outcomes that it may come back with and that need a row of their own.

    What else it comes back with, any row of the state may take, also the one without a guard.

    Attributes:
        name: Its name, which the journal stores for each state.
        exceptional: Outcomes that need a row whose guard takes them (``takes``); a graph without one is refused.
        on_request: Outcomes that come only where a row takes them. An agent whose tools may lead to one is refused if
            its graph has no such row.
        charges: The counters that each time it runs may spend, through its outcome.
    """

    name: str
    exceptional: tuple[str, ...] = ()
    on_request: tuple[str, ...] = ()
    charges: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"EffectSpec({self.name!r})"

    def __copy__(self) -> EffectSpec:
        return self  # there is one object for each effect

    def __deepcopy__(self, memo: object) -> EffectSpec:
        return self


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One declared state.

    Attributes:
        name: Its name; a ``State`` or any identifier.
        note: Its effect in a few words, shown in diagrams.
        spends: The counters that each visit spends, or the name of the only one. A state that spends a counter has a
            row for the counter's end, made with ``exhausted``.
        waits: Whether it waits for an external event; such a state needs no transition without a guard.
        final: Whether a run ends in it.
        lane: Its column in diagrams: ``main``, ``left`` (recovery) or ``right`` (waiting).
        effect: What the state does: one of the loop's own effects (``agentfsm.loop.outcomes``), or for a state of your
            own an async or plain function that takes a ``StateContext`` (``agentfsm.runtime.state_context``).
        outcomes: For a function of your own, the outcomes that it may come back with
            (``StateResult(outcome="approved")``). Each needs a row whose guard is ``came_back("approved")``.
    """

    name: str
    note: str = ""
    spends: Sequence[str] = ()
    waits: bool = False
    final: bool = False
    lane: str = "main"
    effect: EffectSpec | Callable[..., Any] | None = None
    outcomes: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spends", _names(self.spends))
        object.__setattr__(self, "outcomes", _names(self.outcomes))

    @property
    def effect_name(self) -> str:
        """The name of its effect, as the journal stores it; empty for a state that waits or ends."""
        if self.effect is None:
            return ""
        return self.effect.name if isinstance(self.effect, EffectSpec) else "custom"


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return ((names,) if names else ()) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: from ``source``, if ``guard`` holds, to ``target``.

    Attributes:
        source: The state that it leaves.
        guard: The guard, or None for the last row of a state, which always holds.
        target: The state that it enters.
        spends: The counters that taking it spends, or the name of the only one. The row does not hold while one of
            them is empty.
        refills: The counters that taking it fills up again, before it spends.
        ends: For a row into a final state, how the run ends: one of ``ENDINGS``.
    """

    source: str
    guard: Guard | None
    target: str
    spends: Sequence[str] = ()
    refills: Sequence[str] = ()
    ends: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spends", _names(self.spends))
        object.__setattr__(self, "refills", _names(self.refills))

    @property
    def name(self) -> str:
        """The guard's name, or ``otherwise``."""
        return OTHERWISE if self.guard is None else guard_name(self.guard)

    @property
    def extends(self) -> bool:
        """Whether it extends the limit that a person was asked about, at the cost of one ``continues``."""
        return bool(getattr(self.guard, "extends_limit", False))

    @property
    def id(self) -> str:
        """Its identifier in journals, errors and tests: ``source.guard``."""
        return f"{self.source}.{self.name}"

    def __str__(self) -> str:
        return f"{self.id} -> {self.target}"

    def __repr__(self) -> str:
        guard = None if self.guard is None else self.name
        spends = f", spends={'+'.join(self.spends)!r}" if self.spends else ""
        ends = f", ends={self.ends!r}" if self.ends else ""
        return f"Transition({str(self.source)!r}, {guard}, {str(self.target)!r}{spends}{ends})"


class Exhausted:
    """A guard that is made from a counter: it holds exactly when the counter is empty.

    Attributes:
        counter: The counter.
        past: Whether it holds only once the counter was spent more often than its limit.
    """

    __slots__ = ("__dict__", "_describe", "_limit", "_name", "counter", "past")

    def __init__(self, counter: Counter, describe: Callable[[Any], object], past: bool = False) -> None:
        update_wrapper(self, describe)
        self.__name__: str = describe.__name__
        self.counter = counter
        self.past = past
        self._describe = describe
        limit = counter.limit
        self._limit: Callable[[Any], int | None] = (
            attrgetter(f"guardrails.{limit}") if isinstance(limit, str) else counter.limit_in
        )
        self._name = counter.name

    def of(self, counter: Counter) -> Exhausted:
        """The same guard, made from another counter."""
        return Exhausted(counter, self._describe, self.past)

    def __call__(self, run: Any) -> Any:
        """What the decorated function says if the counter is empty (or True); else None."""
        limit_in = self._limit
        limit = limit_in(run)
        if limit is None or run.counters.get(self._name, 0) < limit + self.past:
            return None
        return self._describe(run) or True


def exhausted(counter: Counter, *, past: bool = False) -> Callable[[Callable[[Any], object]], Exhausted]:
    """Make a guard from a counter; the decorated function says what the guard returns when the counter is empty.

    ::

        REVIEWS = Counter("reviews", 3)

        @exhausted(REVIEWS, past=True)
        def reviewed_too_often(run):
            return Failure(kind=FailureKind.iteration_limit, explanation="reviewed too often")

    Args:
        counter: The counter.
        past: Whether the guard holds only once the counter was spent more often than its limit: for a counter that
            the state itself spends when it is entered.
    """
    return lambda describe: Exhausted(counter, describe, past)


G = TypeVar("G", bound=Callable[..., object])


def takes(*outcomes: str) -> Callable[[G], G]:
    """Declare the outcomes that a guard takes; see ``EffectSpec``. The function itself is unchanged."""

    def declare(guard: G) -> G:
        guard.takes = frozenset(outcomes)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return guard

    return declare


def extends_limit(guard: G) -> G:
    """Declare that a row with this guard extends the limit that a person was asked about; the guard is unchanged."""
    guard.extends_limit = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return guard


def silent_while(field: str, value: object) -> Callable[[G], G]:
    """Declare that a guard does not hold while a field of the run has a value; the function itself is unchanged.

    Declared of several fields, it does not hold while all of them have these values. The engine compares the fields of
    a state's built-in guards at once, and evaluates the guards only if some value differs.

    Args:
        field: The field's name; with a dot, that of a field of what the run has in this field, such as
            ``guardrails.max_tokens``. A guard is evaluated if the run has nothing there.
        value: The value.
    """

    def declare(guard: G) -> G:
        declared = getattr(guard, "silent_while", ())
        guard.silent_while = ((field, value), *declared)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return guard

    return declare


def outcomes_taken(rows: Iterable[Transition]) -> frozenset[str]:
    """The outcomes that the guards of some rows take."""
    return frozenset[str]().union(*(getattr(row.guard, "takes", frozenset[str]()) for row in rows))
