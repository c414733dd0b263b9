"""The engine does what the plain table says: a six-line reference decides the same on every row of the truth table."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import transitions

from agentfsm.errors import NoTransitionError, RunError
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS, LOOP
from agentfsm.machine import engine
from agentfsm.machine.declaration import Counter, Exhausted, exhausted, silent_while
from agentfsm.machine.engine import Machine, spend_counters
from agentfsm.machine.graph import Graph, State, StateSpec, Transition
from tests.helpers.graphs import exhausted_guard, unchecked_graph


def decide(
    graph: Graph, state: str, answers: Mapping[str, bool]
) -> tuple[Transition, tuple[tuple[str, bool | None], ...]]:
    """The reference: the first row whose guard holds, and what was asked on the way."""
    tried: list[tuple[str, bool | None]] = []
    for row in (t for t in graph.transitions if t.source == state):
        tried.append((row.name, row.guard is None or answers[row.name]))
        if tried[-1][1]:
            return row, tuple(tried)
    raise LookupError(state)


@dataclass
class Limits:
    """The guardrails of a puppet, whose counters are never empty unless a test says so."""

    step_limit: int | None = None
    max_iterations: int | None = None
    max_calls_per_reply: int | None = None
    max_tool_retries: int | None = None
    max_continues: int | None = None


@dataclass
class Puppet:
    """A run that is nothing but its state and the guards' answers; an exception as an answer is raised."""

    state: str
    answers: dict[str, Any]
    aborts: list[tuple[str, BaseException]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    guardrails: Limits = field(default_factory=Limits)
    views: int = 0

    def call(self, role: str, function: Callable[..., Any]) -> Any:
        return function(self)

    def view(self) -> Puppet:
        self.views += 1
        return self

    def abort(self, by: str, error: BaseException) -> None:
        self.aborts.append((by, error))


def stand_in(name: str) -> Callable[[Puppet], Any]:
    def guard(run: Puppet) -> Any:
        run.asked.append(name)
        answer = run.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    guard.__name__ = name
    return guard


def puppets(graph: Graph) -> Graph:
    """The same table with guards that read a puppet's answers."""
    guards = {t.name: stand_in(t.name) for t in graph if t.guard is not None}
    rows = tuple(replace(t, guard=guards.get(t.name)) for t in graph)
    first = tuple(guards[str(getattr(guard, "__name__", guard))] for guard in graph.first)
    # Its budgets are answers like any others, so nothing but the puppet's limits ends its cycles.
    return unchecked_graph(graph.states, rows, graph.name, graph.counters, first)


def valuations(names: list[str]) -> Iterator[dict[str, bool]]:
    """Every row of the truth table of some guards."""
    for bits in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, bits, strict=True))


TABLES = {name: preset.graph for name, preset in PRESETS.items()}
TABLES["extended"] = LOOP.with_detector("post_llm", stand_in("mine"), before="loop_detected").with_state(
    StateSpec("review"),
    [
        Transition("review", stand_in("good"), "terminal", ends="completed"),
        Transition("review", None, "pre_step"),
    ],
    entered_by="post_llm.otherwise",
)


ROWS = {
    # the sum over the states of 2 ** guards, but for the terminal state, and those of the waiting one that say no
    "standard": 2**8 + 2**5 + 2**8 + 2**4 + 2**16 + 2**6 + (2**6 - 1),
    "funnel": 2**8 + 2**5 + 2**8 + 2**4 + 2**15 + 2**6 + (2**6 - 1),
    "feedback": 2**7 + 2**5 + 2**4 + 2**4 + 2**15 + 2**6 + (2**6 - 1),
    "breaker": 2**7 + 2**5 + 2**4 + 2**4 + 2**16 + 2**6 + (2**6 - 1),
    "strict": 2**7 + 2**5 + 2**7 + 2**4 + 2**6 + 2**6 + (2**6 - 1),
    "extended": 2**8 + 2**5 + 2**9 + 2**4 + 2**16 + 2**6 + (2**6 - 1) + 2**3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_engine_and_the_reference_agree_on_every_row_of_the_truth_table(name):
    graph = puppets(TABLES[name])
    machine = Machine(graph)
    compared = 0
    for spec in graph.states:
        names = [t.name for t in graph.rows(spec.name) if t.guard is not None]
        for answers in valuations(names):
            run = Puppet(spec.name, dict(answers))
            try:
                row, tried = decide(graph, spec.name, answers)
            except LookupError:
                with pytest.raises(NoTransitionError):
                    machine.step(run)
                assert run.state == spec.name
                continue
            decision = machine.step(run)
            assert (decision.transition, decision.tried, decision.guard_result) == (row, tried, None)
            assert run.state == row.target
            assert run.asked == [n for n, _ in tried if n != "otherwise"]
            assert not run.aborts
            compared += 1
    assert compared == ROWS[name]


def test_a_decision_says_where_from_where_to_and_why():
    run = Puppet("recover", {"cancelled": False, "aborted": False, "ask_user": False, "handoff": True})
    decision = Machine(puppets(LOOP)).step(run)
    assert (decision.source, decision.guard, decision.target) == ("recover", "handoff", "terminal")
    assert str(decision) == "recover.handoff -> terminal"
    assert decision.tried == (("cancelled", False), ("aborted", False), ("ask_user", False), ("handoff", True))


# -- what a guard may return --------------------------------------------------------------------------


class Nothing:
    def __bool__(self) -> bool:
        return False


FAILURE = Failure(kind=FailureKind.tool_error, explanation="x")


@pytest.mark.parametrize("answer", [1, "yes", [0], FAILURE, object()])
def test_a_truthy_guard_result_holds_and_is_recorded(answer):
    run = Puppet("dispatch_tool", {"cancelled": False, "aborted": False, "approval_required": answer})
    decision = Machine(puppets(LOOP)).step(run)
    assert decision.guard == "approval_required"
    assert decision.guard_result is answer
    assert decision.tried[-1] == ("approval_required", True)


@pytest.mark.parametrize("answer", [None, 0, "", (), Nothing(), False])
def test_a_falsy_guard_result_does_not_hold(answer):
    names = ("cancelled", "aborted", "approval_required", "in_doubt")
    decision = Machine(puppets(LOOP)).step(Puppet("dispatch_tool", dict.fromkeys(names, answer)))
    assert decision.guard == "otherwise"
    assert decision.tried == (*((n, False) for n in names), ("otherwise", True))


def test_an_awaitable_is_no_answer():
    """A plain function that returns a coroutine slips past the checks; it must not read as true forever."""

    async def later() -> bool:
        return False

    run = Puppet("dispatch_tool", {"cancelled": False, "aborted": False, "approval_required": later()})
    assert Machine(puppets(LOOP)).step(run).guard == "aborted"
    assert [by for by, _ in run.aborts] == ["dispatch_tool.approval_required"]
    assert isinstance(run.aborts[0][1], TypeError)


# -- guards that raise --------------------------------------------------------------------------------

FINE = dict.fromkeys(("cancelled", "aborted", "transient_provider", "provider_error", "context_overflow"), False)


@pytest.mark.parametrize("name", ["cancelled", "transient_provider", "provider_error", "context_overflow"])
def test_a_guard_that_raises_takes_the_aborted_row(name):
    """What was asked before it is recorded, then that it raised, and then the row that is taken; nothing is asked."""
    error = ValueError("no")
    run = Puppet("call_llm", {**FINE, name: error})
    decision = Machine(puppets(LOOP)).step(run)
    assert (decision.guard, decision.guard_result, run.state) == ("aborted", None, "terminal")
    before = list(FINE)[: list(FINE).index(name)]
    assert decision.tried == (*((each, False) for each in before), (name, None), ("aborted", True))
    assert run.asked == [*before, name]
    assert run.aborts == [(f"call_llm.{name}", error)]


def test_a_cancelled_run_in_which_a_guard_raises_is_still_cancelled():
    run = Puppet("call_llm", {**FINE, "cancelled": True, "transient_provider": ValueError()})
    assert Machine(puppets(LOOP)).step(run).guard == "cancelled"
    assert not run.aborts


def test_guards_after_the_taken_row_are_not_evaluated():
    run = Puppet("call_llm", {**FINE, "transient_provider": True, "provider_error": ValueError()})
    assert Machine(puppets(LOOP)).step(run).guard == "transient_provider"
    assert not run.aborts


def test_where_no_row_ends_the_run_as_aborted_the_next_guards_decide():
    first, second = ValueError("first"), KeyError("second")
    graph = replace_rows(puppets(LOOP), [t for t in puppets(LOOP) if t.id != "call_llm.aborted"])
    run = Puppet("call_llm", {**FINE, "transient_provider": first, "context_overflow": second})
    decision = Machine(graph).step(run)
    assert decision.guard == "otherwise"
    assert decision.tried == (
        ("cancelled", False), ("transient_provider", None), ("provider_error", False), ("context_overflow", None),
        ("otherwise", True),
    )  # fmt: skip
    assert run.aborts == [("call_llm.transient_provider", first), ("call_llm.context_overflow", second)]
    assert run.asked.count("transient_provider") == run.asked.count("context_overflow") == 1


def replace_rows(graph: Graph, rows: list[Transition]) -> Graph:
    return unchecked_graph(graph.states, rows, graph.name, graph.counters)


def test_the_aborted_row_is_taken_even_if_its_own_guard_raises():
    run = Puppet("call_llm", {**FINE, "aborted": ValueError()})
    assert Machine(puppets(LOOP)).step(run).guard == "aborted"
    assert run.state == "terminal"
    assert [by for by, _ in run.aborts] == ["call_llm.aborted"]


def test_an_answer_that_cannot_be_read_counts_as_raising():
    class Unreadable:
        def __bool__(self) -> bool:
            raise ValueError("neither true nor false")

    run = Puppet("call_llm", {**FINE, "provider_error": Unreadable()})
    assert Machine(puppets(LOOP)).step(run).guard == "aborted"


WAITING = dict.fromkeys(("cancelled", "aborted", "expired", "approval_decided", "doubt_settled", "replied"), False)


def test_a_run_that_waits_is_aborted_too_when_a_guard_raises():
    run = Puppet("suspended", {**WAITING, "expired": ValueError(), "replied": True})
    decision = Machine(puppets(LOOP)).step(run)
    assert (decision.guard, run.state) == ("aborted", "terminal")
    assert decision.tried == (("cancelled", False), ("aborted", False), ("expired", None), ("aborted", True))
    assert [by for by, _ in run.aborts] == ["suspended.expired"]


def test_a_graph_without_a_row_for_it_keeps_waiting_when_a_guard_raises():
    run = Puppet("rest", {"ready": ValueError()})
    rows = (Transition("rest", stand_in("ready"), "end", ends="completed"),)
    machine = Machine(Graph((StateSpec("rest", waits=True), StateSpec("end", final=True)), rows))
    with pytest.raises(NoTransitionError):
        machine.step(run)
    assert run.state == "rest"


def test_what_ends_the_program_is_not_caught():
    class Interrupting:
        def __bool__(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Machine(puppets(LOOP)).step(Puppet("call_llm", {**FINE, "provider_error": Interrupting()}))


def test_a_real_run_notes_the_first_guard_that_raised():
    def failing(run: RunState) -> bool:
        raise RuntimeError("out of order")

    def failing_too(run: RunState) -> bool:
        raise RuntimeError("never asked")

    graph = LOOP.with_detector("post_llm", failing, before="output_truncated").with_detector("post_llm", failing_too)
    run = RunState("r", state=State.POST_LLM)
    assert Machine(graph).step(run).guard == "aborted"
    assert run.aborted is not None
    assert run.aborted.kind is FailureKind.aborted
    assert run.aborted.explanation == "post_llm.failing raised RuntimeError: out of order"
    assert run.aborted.metadata == {"by": "post_llm.failing", "error_class": "RuntimeError"}


# -- where no row applies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "why"), [("terminal", "the run has ended"), ("suspended", "the event that it waits for has not happened")]
)
def test_where_no_row_applies_nothing_changes(state, why):
    run = RunState("r", state=state)
    before = repr(run)
    with pytest.raises(NoTransitionError, match=why) as caught:
        Machine(LOOP).step(run)
    assert isinstance(caught.value, RunError)
    assert repr(run) == before


# -- one machine, any number of runs ------------------------------------------------------------------


def test_a_machine_keeps_nothing_of_its_runs():
    machine = Machine(puppets(LOOP))
    first, second = Puppet("call_llm", dict(FINE)), Puppet("call_llm", {**FINE, "context_overflow": True})
    assert [machine.step(r).target for r in (first, second, Puppet("call_llm", dict(FINE)))] == [
        "post_llm", "recover", "post_llm",
    ]  # fmt: skip
    assert machine.to_transitions().models == []


def test_a_state_read_back_from_json_is_as_good_as_the_enum():
    assert Machine(LOOP).step(RunState("r", state="call_llm")).target is State.POST_LLM


def test_equal_graphs_of_equal_runs_decide_alike_in_any_process():
    code = (
        "from agentfsm.loop.transition_table import LOOP\n"
        "from agentfsm.loop.state import RunState\n"
        "from agentfsm.machine.engine import Machine\n"
        "machine, run = Machine(LOOP), RunState('r')\n"
        "print(LOOP.fingerprint)\n"
        "for _ in range(3): print(machine.step(run))\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2", "31337")
    }  # fmt: skip
    assert seen == {
        f"{LOOP.fingerprint}\npre_step.otherwise -> call_llm\ncall_llm.otherwise -> post_llm\n"
        "post_llm.otherwise -> terminal\n"
    }


# -- as transitions sees it ---------------------------------------------------------------------------


def test_transitions_has_the_same_states_and_rows_and_nothing_more():
    table = Machine(LOOP).to_transitions()
    assert list(table.states) == [s.name for s in LOOP.states]
    assert list(table.events) == ["step"]
    found = {(t.source, t.dest) for rows in table.events["step"].transitions.values() for t in rows}
    assert found == {(t.source, t.target) for t in LOOP}
    assert sum(len(rows) for rows in table.events["step"].transitions.values()) == 59


class Model:
    """A model of the library: it manages the state, and the guards read their answers here."""

    def __init__(self, **answers: bool) -> None:
        self.answers: dict[str, Any] = answers
        self.asked: list[str] = []


def test_the_machine_of_transitions_moves_its_model_by_the_same_table():
    """The library's own classes, its own trigger, and nothing of ours."""
    model: Any = Model(**{**FINE, "provider_error": True})
    table = Machine(puppets(LOOP)).to_transitions(model=model)
    assert type(table) is transitions.Machine
    assert all(type(t) is transitions.Transition for t in table.get_transitions("step"))
    table.set_state("call_llm", model)
    assert model.step() is True
    assert model.state == "recover"
    assert model.asked == ["cancelled", "aborted", "transient_provider", "provider_error"]


def test_a_guard_that_returns_a_failure_is_true_for_transitions_too():
    model: Any = Model(asked=FAILURE)
    Machine(two_ways(stand_in("asked"))).to_transitions(model=model)
    assert model.step() is True
    assert model.state == "yes"


def test_transitions_draws_the_table():
    """A picture by the library needs a model; each row is an edge with its guard."""
    from transitions.extensions import GraphMachine

    model: Any = Model()
    table = Machine(LOOP).to_transitions(partial(GraphMachine, graph_engine="mermaid", show_conditions=True), model)
    assert isinstance(table, GraphMachine)
    text = str(model.get_graph().source)
    assert all(spec.name in text for spec in LOOP.states)
    assert all(row.name in text for row in LOOP if row.guard is not None)


def test_transitions_takes_no_option_that_the_table_decides():
    with pytest.raises(TypeError):
        Machine(LOOP).to_transitions(initial="recover")  # type: ignore[call-arg]


def test_a_step_writes_no_log(caplog):
    with caplog.at_level(logging.DEBUG):
        Machine(puppets(LOOP)).step(Puppet("call_llm", dict(FINE)))
    assert caplog.records == []


def test_looking_ahead_names_the_row_that_a_step_would_take():
    machine = Machine(puppets(LOOP))
    names = [t.name for t in LOOP.rows("suspended")]
    row = machine.would_take(Puppet("suspended", dict.fromkeys(names, False) | {"replied": True}))
    assert row is not None
    assert row.id == "suspended.replied"
    assert not machine.would_take(Puppet("suspended", dict.fromkeys(names, False)))
    assert not machine.would_take(Puppet("terminal", {}))


class Says:
    """A guard that is an object; all have the same name."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.__name__ = "says"

    def __call__(self, run: Puppet) -> bool:
        return self.answer


def two_ways(guard: Callable[[Any], Any]) -> Graph:
    states = (StateSpec("start"), StateSpec("yes", final=True), StateSpec("no", final=True))
    rows = (
        Transition("start", guard, "yes", ends="completed"),
        Transition("start", None, "no", ends="completed"),
    )
    return Graph(states, rows)


def test_machines_of_graphs_that_look_alike_ask_their_own_guards():
    """Machines of one graph are put together once; guards of one name are not one guard."""
    for answer in (True, False, True):
        for guard in (Says(answer), stand_in("asked")):
            run = Puppet("start", {"asked": answer})
            Machine(two_ways(guard)).step(run)
            assert run.state == ("yes" if answer else "no")


def test_what_is_done_to_the_machine_of_transitions_changes_no_machine_of_ours():
    machine = Machine(two_ways(stand_in("asked")))
    machine.to_transitions().remove_transition("step")
    for each in (machine, Machine(machine.graph)):
        run = Puppet("start", {"asked": False})
        each.step(run)
        assert run.state == "no"


# -- counters -----------------------------------------------------------------------------------------

COINS = Counter("coins", 2)


@exhausted(COINS, past=True)
def broke(run: Puppet) -> str:
    return "no coins"


def arcade(*, limit: int | str = 2) -> Graph:
    """Each game spends a coin and each entry a ticket; a gift fills the coins up again."""
    coins = Counter("coins", limit)
    tickets = Counter("tickets", 3)
    return unchecked_graph(
        (StateSpec("hall", spends="tickets"), StateSpec("game"), StateSpec("end", final=True)),
        (
            Transition("hall", exhausted_guard("turned_away", tickets), "end", ends="partial"),
            Transition("hall", stand_in("gift"), "game", refills="coins"),
            Transition("hall", stand_in("renewal"), "game", spends="coins", refills="coins"),
            Transition("hall", stand_in("play"), "game", spends=("coins", "tickets")),
            Transition("hall", None, "end", ends="completed"),
            Transition("game", None, "hall"),
        ),
        counters=(coins, tickets),
    )


ASKED_FOR = {"gift": False, "renewal": False, "play": False}


def test_what_a_row_and_the_state_that_it_enters_spend_is_counted():
    machine = Machine(arcade())
    run = Puppet("hall", {**ASKED_FOR, "play": True}, counters={"tickets": 1})
    assert machine.step(run).target == "game"
    assert run.counters == {"tickets": 2, "coins": 1}
    machine.step(run)
    assert (run.state, run.counters) == ("hall", {"tickets": 3, "coins": 1})


def test_what_a_row_refills_is_filled_up_before_it_spends():
    machine = Machine(arcade())
    gift = Puppet("hall", {**ASKED_FOR, "gift": True}, counters={"coins": 2})
    machine.step(gift)
    assert gift.counters == {"coins": 0}
    renewal = Puppet("hall", {**ASKED_FOR, "renewal": True}, counters={"coins": 2})
    assert machine.step(renewal).guard == "renewal"  # it is not empty once it was refilled
    assert renewal.counters == {"coins": 1}


def test_a_row_whose_counter_is_empty_does_not_hold_whatever_its_guard_says():
    run = Puppet("hall", {**ASKED_FOR, "play": True}, counters={"coins": 2})
    decision = Machine(arcade()).step(run)
    assert decision.tried == (
        ("turned_away", False), ("gift", False), ("renewal", False), ("play", False), ("otherwise", True),
    )  # fmt: skip
    assert run.counters == {"coins": 2}
    with_one_left = Puppet("hall", {**ASKED_FOR, "play": True}, counters={"coins": 1})
    assert Machine(arcade()).step(with_one_left).guard == "play"


@pytest.mark.parametrize(("limit", "guard"), [(0, "otherwise"), (1, "play"), (None, "play")])
def test_the_limit_of_a_counter_is_a_number_or_is_in_the_guardrails(limit, guard):
    run = Puppet("hall", {**ASKED_FOR, "play": True}, guardrails=Limits(max_continues=limit))
    assert Machine(arcade(limit="max_continues")).step(run).guard == guard


@pytest.mark.parametrize(
    ("spent", "holds", "holds_past"), [(0, False, False), (1, False, False), (2, True, False), (3, True, True)]
)
def test_a_guard_made_from_a_counter_holds_exactly_when_it_is_empty(spent, holds, holds_past):
    run = Puppet("hall", {}, counters={"coins": spent})
    at = exhausted(COINS)(broke)
    assert (bool(at(run)), bool(broke(run))) == (holds, holds_past)
    assert (at.__name__, at.counter, isinstance(at, Exhausted)) == ("broke", COINS, True)
    if holds_past:
        assert broke(run) == "no coins"


def test_spending_is_a_function_of_the_table_alone():
    counters = {"coins": 2}
    row = Transition("hall", None, "game", spends=("coins", "tickets"), refills="coins")
    spend_counters(counters, row, StateSpec("game", spends="tickets"))
    assert counters == {"coins": 1, "tickets": 2}


# -- guards that are silent while fields have their usual values -----------------------------------------------


@pytest.mark.parametrize(("trusted", "asked"), [(True, []), (False, ["quiet"])], ids=["built in", "of a user"])
def test_only_a_built_in_guard_is_known_to_be_silent_without_being_asked(trusted, asked):
    quiet = silent_while("views", 0)(stand_in("quiet"))
    graph = two_ways(quiet)
    machine = Machine(graph, [quiet] if trusted else ())
    run = Puppet("start", {"quiet": False}, views=0)
    decision = machine.step(run)
    assert (run.asked, decision.tried) == (asked, (("quiet", False), ("otherwise", True)))
    run = Puppet("start", {"quiet": True}, views=7)
    assert machine.step(run).tried == (("quiet", True),)
    assert run.asked == ["quiet"]


# -- transitions makes the moves ----------------------------------------------------------------------


class Sabotaged(Exception):
    pass


def sabotage(*args: object, **kwargs: object) -> Any:
    raise Sabotaged


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (transitions.Machine, "set_state"),
        (engine._Row, "execute"),
        (engine._StepEvent, "decide"),
    ],
    ids=lambda each: getattr(each, "__qualname__", each),
)
def test_no_run_moves_without_the_classes_of_transitions(monkeypatch, owner, method):
    """Each part of the library's machine that a move goes through; without it nothing else moves the run."""
    graph = two_ways(stand_in("asked"))
    machine = Machine(graph)
    monkeypatch.setattr(owner, method, sabotage)
    for asked in (True, False):
        run = Puppet("start", {"asked": asked})
        with pytest.raises(Sabotaged):
            machine.step(run)
        assert run.state == "start"


def test_no_guard_holds_without_the_condition_of_transitions(monkeypatch):
    machine = Machine(puppets(LOOP))
    monkeypatch.setattr(engine._GuardCondition, "check", sabotage)
    run = Puppet("call_llm", {**FINE, "provider_error": True})
    with pytest.raises(Sabotaged):
        machine.step(run)
    assert (run.state, run.asked) == ("call_llm", [])


def test_the_parts_of_the_machine_are_those_of_transitions():
    assert issubclass(engine._GuardCondition, transitions.core.Condition)
    assert issubclass(engine._Row, transitions.Transition)
    assert issubclass(engine._StepEvent, transitions.Event)
    assert "set_state" not in vars(engine._TransitionsMachine)


# -- what a guard gets --------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """The view of a puppet."""

    answers: dict[str, Any]
    asked: list[str]

    def call(self, role: str, function: Callable[..., Any]) -> Any:
        assert role == "guard"
        return function(self)


class Viewed(Puppet):
    def view(self) -> Any:
        self.views += 1
        return Snapshot(self.answers, self.asked)


def recording(name: str, seen: list[object]) -> Callable[[Any], bool]:
    def guard(run: Any) -> bool:
        seen.append(run)
        return False

    guard.__name__ = name
    return guard


def test_a_guard_that_is_not_built_in_gets_a_view_built_once_in_a_move():
    seen: list[object] = []
    ours, first, second = (recording(name, seen) for name in ("ours", "first", "second"))
    graph = Graph(
        (StateSpec("start"), StateSpec("end", final=True)),
        (*(Transition("start", g, "end", ends="completed") for g in (ours, first, second)),
         Transition("start", None, "end", ends="completed")),
    )  # fmt: skip
    run = Viewed("start", {})
    Machine(graph, {ours}).step(run)
    assert seen[0] is run
    assert isinstance(seen[1], Snapshot)
    assert seen[1] is seen[2]
    assert run.views == 1


def test_no_view_is_built_for_guards_that_are_built_in():
    graph = puppets(LOOP)
    run = Viewed("call_llm", dict(FINE))
    Machine(graph, {row.guard for row in graph if row.guard is not None}).step(run)
    assert run.views == 0


def test_a_guard_is_built_in_by_what_it_is_and_not_by_its_name():
    seen: list[object] = []
    theirs = recording("cancelled", seen)
    graph = Graph(
        (StateSpec("start"), StateSpec("end", final=True)),
        (Transition("start", theirs, "end", ends="completed"), Transition("start", None, "end", ends="completed")),
    )
    Machine(graph, BUILT_IN_GUARDS).step(Viewed("start", {}))
    assert isinstance(seen[0], Snapshot)
