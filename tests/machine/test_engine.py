"""The engine does what the plain table says: a six-line reference decides the same on every row of the truth table."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentfsm.errors import NoTransitionError, RunError
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph, State, StateSpec, Transition


def decide(graph: Graph, state: str, answers: Mapping[str, bool]) -> tuple[Transition, tuple[tuple[str, bool], ...]]:
    """The reference: the first row whose guard holds, and what was asked on the way."""
    tried: list[tuple[str, bool]] = []
    for row in (t for t in graph.transitions if t.source == state):
        tried.append((row.name, row.guard is None or answers[row.name]))
        if tried[-1][1]:
            return row, tuple(tried)
    raise LookupError(state)


@dataclass
class Puppet:
    """A run that is nothing but its state and the guards' answers; an exception as an answer is raised."""

    state: str
    answers: dict[str, Any]
    aborts: list[tuple[str, BaseException]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def abort(self, by: str, error: BaseException) -> None:
        self.aborts.append((by, error))
        if not isinstance(self.answers.get("aborted"), Exception):
            self.answers["aborted"] = True


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
    rows = tuple(Transition(t.source, guards.get(t.name), t.target, t.spends) for t in graph)
    return Graph(graph.states, rows, graph.name)


def valuations(names: list[str]) -> Iterator[dict[str, bool]]:
    """Every row of the truth table of some guards."""
    for bits in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, bits, strict=True))


TABLES = {"loop": LOOP, "strict": PRESETS["strict"].graph}
TABLES["extended"] = LOOP.with_detector("post_llm", stand_in("mine"), before="loop_detected").with_state(
    StateSpec("review"),
    [Transition("review", stand_in("good"), "terminal"), Transition("review", None, "pre_step")],
    entered_by="post_llm.otherwise",
)


ROWS = {
    # the sum over the states of 2 ** guards, but for the terminal state, and those of the waiting one that say no
    "loop": 2**8 + 2**5 + 2**8 + 2**4 + 2**16 + 2**6 + (2**5 - 1),
    "strict": 2**8 + 2**5 + 2**8 + 2**4 + 2**10 + 2**6 + (2**5 - 1),
    "extended": 2**8 + 2**5 + 2**9 + 2**4 + 2**16 + 2**6 + (2**5 - 1) + 2**3,
}


def test_the_tables_of_all_presets_are_among_those_compared():
    assert all(preset.graph in TABLES.values() for preset in PRESETS.values())


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
    """A plain function that returns a coroutine slips past the checks; it must not read as true for ever."""

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
    error = ValueError("no")
    run = Puppet("call_llm", {**FINE, name: error})
    decision = Machine(puppets(LOOP)).step(run)
    assert (decision.guard, decision.guard_result, run.state) == ("aborted", None, "terminal")
    assert decision.tried == (("cancelled", False), ("aborted", True))
    assert run.aborts == [(f"call_llm.{name}", error)]


def test_a_cancelled_run_in_which_a_guard_raises_is_still_cancelled():
    run = Puppet("call_llm", {**FINE, "cancelled": True, "transient_provider": ValueError()})
    assert Machine(puppets(LOOP)).step(run).guard == "cancelled"
    assert not run.aborts


def test_guards_after_the_taken_row_are_not_evaluated():
    run = Puppet("call_llm", {**FINE, "transient_provider": True, "provider_error": ValueError()})
    assert Machine(puppets(LOOP)).step(run).guard == "transient_provider"
    assert not run.aborts


def test_two_guards_that_raise_are_both_recorded_and_evaluated_once():
    first, second = ValueError("first"), KeyError("second")
    graph = puppets(LOOP.without("call_llm.aborted"))
    run = Puppet("call_llm", {**FINE, "transient_provider": first, "context_overflow": second})
    decision = Machine(graph).step(run)
    assert decision.guard == "otherwise"
    assert run.aborts == [("call_llm.transient_provider", first), ("call_llm.context_overflow", second)]
    assert run.asked.count("transient_provider") == run.asked.count("context_overflow") == 1


def test_a_graph_whose_rows_hold_again_without_the_one_that_raised_takes_the_first_of_them():
    run = Puppet("call_llm", {**FINE, "transient_provider": ValueError(), "context_overflow": FAILURE})
    decision = Machine(puppets(LOOP.without("call_llm.aborted"))).step(run)
    assert (decision.guard, decision.guard_result) == ("context_overflow", FAILURE)


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


WAITING = dict.fromkeys(("cancelled", "expired", "approval_decided", "doubt_settled", "replied"), False)


def test_in_a_waiting_state_the_other_guards_still_decide_when_one_raises():
    run = Puppet("suspended", {**WAITING, "expired": ValueError(), "replied": True})
    assert Machine(puppets(LOOP)).step(run).guard == "replied"
    assert run.state == "pre_step"
    assert [by for by, _ in run.aborts] == ["suspended.expired"]


def test_in_a_waiting_state_where_nothing_else_holds_the_run_stays():
    run = Puppet("suspended", {**WAITING, "replied": ValueError()})
    with pytest.raises(NoTransitionError):
        Machine(puppets(LOOP)).step(run)
    assert run.state == "suspended"


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
    assert sum(len(rows) for rows in table.events["step"].transitions.values()) == 58


def test_the_event_of_transitions_moves_a_run_by_the_same_table():
    step = Machine(puppets(LOOP)).to_transitions().events["step"]
    run = Puppet("call_llm", {**FINE, "provider_error": True})
    assert step.trigger(run) is True
    assert run.state == "recover"
    resting = Puppet("suspended", dict(WAITING))
    assert step.trigger(resting) is False
    assert resting.state == "suspended"


def test_a_step_writes_no_log(caplog):
    with caplog.at_level(logging.DEBUG):
        Machine(puppets(LOOP)).step(Puppet("call_llm", dict(FINE)))
    assert caplog.records == []


def test_decisions_are_made_once_and_shared():
    machine = Machine(puppets(LOOP))
    first, second = (machine.step(Puppet("call_llm", dict(FINE))) for _ in range(2))
    assert first is second
    assert isinstance(first, Decision)


def test_looking_ahead_says_whether_a_step_would_move_the_run():
    machine = Machine(puppets(LOOP))
    names = [t.name for t in LOOP.rows("suspended")]
    assert machine.would_move(Puppet("suspended", dict.fromkeys(names, False) | {"replied": True}))
    assert not machine.would_move(Puppet("suspended", dict.fromkeys(names, False)))
    assert not machine.would_move(Puppet("terminal", {}))


class Says:
    """A guard that is an object; two of one kind are equal, and none can be hashed."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.__name__ = "says"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Says)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, run: Puppet) -> bool:
        return self.answer


def two_ways(guard: Callable[[Any], Any]) -> Graph:
    states = (StateSpec("start"), StateSpec("yes", final=True), StateSpec("no", final=True))
    rows = (Transition("start", guard, "yes"), Transition("start", None, "no"))
    return Graph(states, rows)


def test_machines_of_graphs_that_look_alike_ask_their_own_guards():
    """Machines of one graph are put together once; a guard that cannot be hashed must be no other's."""
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
