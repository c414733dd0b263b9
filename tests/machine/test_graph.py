"""Graphs are immutable; each way of extending one returns a new, checked graph."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from agentfsm.errors import GraphError
from agentfsm.loop import guards
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter, Exhausted, exhausted, extends_limit
from agentfsm.machine.graph import Graph, State, StateSpec, Transition


def ready(run: object) -> bool:
    return True


def broken(run: object) -> bool:
    return False


def door(run: object) -> bool:
    return False


STEPS = Counter("steps", 3)


@exhausted(STEPS, past=True)
def too_long(run: object) -> bool:
    return True


SMALL = Graph(
    name="small",
    states=(StateSpec("work", spends="steps"), StateSpec("rest", waits=True), StateSpec("end", final=True)),
    counters=(STEPS,),
    transitions=(
        Transition("work", too_long, "end", ends="partial"),
        Transition("work", ready, "end", ends="completed"),
        Transition("work", broken, "rest"),
        Transition("work", None, "work"),
        Transition("rest", ready, "work"),
    ),
)


def rows(graph: Graph, state: str) -> list[str]:
    return [str(t) for t in graph.rows(state)]


# -- what a graph says of itself ----------------------------------------------------------------------


def test_a_graph_and_its_rows_say_in_a_line_what_they_are():
    assert repr(LOOP) == "Graph('loop', 8 states, 59 transitions)"
    assert repr(SMALL.transition("work.ready")) == "Transition('work', ready, 'end', ends='completed')"
    assert repr(Transition("work", None, "rest", spends=["a", "b"])) == "Transition('work', None, 'rest', spends='a+b')"


def test_a_run_starts_in_the_first_declared_state():
    assert SMALL.initial == "work"
    assert LOOP.initial == State.PRE_STEP


def test_rows_are_in_evaluation_order():
    assert rows(SMALL, "work") == [
        "work.too_long -> end", "work.ready -> end", "work.broken -> rest", "work.otherwise -> work",
    ]  # fmt: skip
    assert SMALL.rows("end") == ()


def test_the_order_within_a_state_counts_and_the_grouping_does_not():
    mixed = Graph(SMALL.states, (SMALL.transitions[4], *SMALL.transitions[:4]), "small", SMALL.counters)
    assert rows(mixed, "work") == rows(SMALL, "work")
    assert mixed.fingerprint == SMALL.fingerprint


def test_a_transition_is_found_by_its_id():
    assert SMALL.transition("work.broken").target == "rest"
    assert SMALL.transition("work.otherwise").guard is None
    assert list(SMALL) == list(SMALL.transitions)


@pytest.mark.parametrize(
    ("look", "edge"),
    [
        (lambda: SMALL.rows("nowhere"), "nowhere"),
        (lambda: SMALL.spec("nowhere"), "nowhere"),
        (lambda: SMALL.transition("work.nobody"), "work.nobody"),
    ],
)
def test_looking_up_what_is_not_there_names_it(look, edge):
    with pytest.raises(GraphError) as caught:
        look()
    assert caught.value.edge == edge


def test_a_graph_cannot_be_changed_and_takes_lists():
    graph = Graph(list(SMALL.states), list(SMALL.transitions), "small", list(SMALL.counters))
    assert graph == SMALL
    assert hash(graph) == hash(SMALL)
    with pytest.raises(FrozenInstanceError):
        graph.states = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        graph.transitions[0].target = "rest"  # type: ignore[misc]


def test_the_states_of_the_loop_are_the_eight_declared_phases():
    assert [s.name for s in LOOP.states] == [
        "pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover", "suspended", "terminal",
    ]  # fmt: skip
    assert [s.name for s in LOOP.states if s.waits] == ["suspended"]
    assert [s.name for s in LOOP.states if s.final] == ["terminal"]


# -- the fingerprint ----------------------------------------------------------------------------------


def other(
    transitions: tuple[Transition, ...] = SMALL.transitions,
    states: tuple[StateSpec, ...] = SMALL.states,
    counters: tuple[Counter, ...] = SMALL.counters,
) -> str:
    return Graph(states, transitions, "another name", counters).fingerprint


def test_the_fingerprint_says_what_the_table_is_and_not_what_it_is_called():
    assert other() == SMALL.fingerprint
    assert len(SMALL.fingerprint) == 64


def test_the_fingerprint_is_another_one_when_anything_that_matters_is():
    stop, first, second, *rest = SMALL.transitions
    working, resting, end = SMALL.states
    coins = Counter("coins", 1)

    @extends_limit
    def granting(run: object) -> bool:
        return True

    granting.__name__ = rest[1].name
    changed = {
        "order": other((stop, second, first, *rest)),
        "target": other((stop, first, second, rest[0], Transition("rest", ready, "end", ends="completed"))),
        "guard": other((stop, Transition("work", door, "end", ends="completed"), second, *rest)),
        "row": other((stop, first, second, *rest, Transition("rest", door, "work"))),
        "row spends": other((stop, replace(first, spends="steps"), second, *rest)),
        "row refills": other((stop, replace(first, refills="steps"), second, *rest)),
        "row ends the run otherwise": other((stop, replace(first, ends="handed_off"), second, *rest)),
        "row extends the limit": other((stop, first, second, rest[0], replace(rest[1], guard=granting))),
        "state spends": other(states=(working, replace(resting, spends="steps"), end)),
        "effect": other(states=(replace(working, effect=print), resting, end)),
        "limit": other(
            (Transition("work", exhausted(Counter("steps", 4), past=True)(too_long), "end", ends="partial"),
             *SMALL.transitions[1:]),
            counters=(Counter("steps", 4),),
        ),
        "counter": other(counters=(*SMALL.counters, coins)),
        "state": other(
            (*SMALL.transitions, Transition("rest", door, "attic"), Transition("attic", None, "end", ends="completed")),
            (*SMALL.states, StateSpec("attic")),
        ),
    }  # fmt: skip
    assert len({SMALL.fingerprint, *changed.values()}) == len(changed) + 1


def test_the_fingerprint_leaves_out_what_only_pictures_show():
    working, *others = SMALL.states
    shown = replace(working, note="something else", lane="left")
    assert other(states=(shown, *others)) == SMALL.fingerprint


@pytest.mark.slow
def test_the_fingerprint_of_the_loop_is_the_same_in_every_process():
    code = "from agentfsm.loop.presets import PRESETS; print(*(p.graph.fingerprint for p in PRESETS.values()))"

    def under(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    seen = {under(seed) for seed in ("0", "1", "4242")}
    assert len(seen) == 1
    assert seen.pop().split()[0] == LOOP.fingerprint


# -- with_transition ----------------------------------------------------------------------------------


def test_a_new_row_is_evaluated_last_before_the_row_without_a_guard():
    more = SMALL.with_transition(Transition("work", door, "rest"))
    assert rows(more, "work") == [
        "work.too_long -> end", "work.ready -> end", "work.broken -> rest", "work.door -> rest",
        "work.otherwise -> work",
    ]  # fmt: skip


def test_a_new_row_for_a_call_that_waits_is_the_first_that_its_state_has_for_its_effect():
    """Behind those that stop the run and for the end of a counter; in the order in which such rows are added."""

    def effect(context: object) -> None: ...

    @exhausted(STEPS)
    def used_up(run: object) -> bool:
        return True

    own = [
        Transition("desk", used_up, "terminal", ends="partial"),
        Transition("desk", door, "pre_step"),
        Transition("desk", guards.came_back("good"), "pre_step"),
        Transition("desk", None, "terminal", ends="completed"),
    ]
    graph = LOOP.with_counter(STEPS).with_state(
        StateSpec("desk", effect=effect, outcomes=("good",)), own, entered_by="post_llm.otherwise"
    )
    asks = Transition("desk", guards.approval_required, "suspended")
    graph = graph.with_transition(asks).with_transition(Transition("desk", guards.in_doubt, "suspended"))
    graph = graph.with_transition(Transition("desk", ready, "terminal", ends="completed"))
    names = [row.name for row in graph.rows("desk")]
    assert names[2:] == ["used_up", "approval_required", "in_doubt", "door", "good", "ready", "otherwise"]
    moved = graph.without("desk.approval_required").with_transition(asks, before="good")
    assert [row.name for row in moved.rows("desk")][3:6] == ["in_doubt", "door", "approval_required"]


def test_a_new_row_for_a_call_that_waits_is_evaluated_last_in_a_state_of_the_loop():
    row = LOOP.transition("dispatch_tool.approval_required")
    moved = LOOP.without(row.id).with_transition(row)
    assert [each.name for each in moved.rows("dispatch_tool")][2:] == ["in_doubt", "approval_required", "otherwise"]


def test_a_new_row_can_be_inserted_before_a_named_row():
    more = SMALL.with_transition(Transition("work", door, "rest"), before="ready")
    assert rows(more, "work")[1:3] == ["work.door -> rest", "work.ready -> end"]
    assert rows(more, "rest") == rows(SMALL, "rest")


def test_in_a_waiting_state_a_new_row_comes_last():
    more = SMALL.with_transition(Transition("rest", door, "end", ends="completed"))
    assert rows(more, "rest") == ["rest.ready -> work", "rest.door -> end"]


def test_the_old_graph_never_changes():
    before = (rows(SMALL, "work"), SMALL.fingerprint)
    more = SMALL.with_transition(Transition("work", door, "rest"))
    less = SMALL.without("work.broken", "rest")
    assert (rows(SMALL, "work"), SMALL.fingerprint) == before
    assert len({SMALL.fingerprint, more.fingerprint, less.fingerprint}) == 3


def test_a_row_to_stand_in_front_of_must_be_there():
    with pytest.raises(GraphError) as caught:
        SMALL.with_transition(Transition("work", door, "rest"), before="nobody")
    assert caught.value.edge == "work.door"
    assert "too_long, ready, broken, otherwise" in str(caught.value)


def test_a_second_row_without_a_guard_is_refused():
    with pytest.raises(GraphError) as caught:
        SMALL.with_transition(Transition("work", None, "end", ends="completed"))
    assert caught.value.edge == "work.otherwise"


def test_a_first_row_may_leave_a_state_that_had_none_of_its_own():
    with pytest.raises(GraphError) as caught:
        SMALL.with_transition(Transition("end", door, "work"))
    assert "final" in caught.value.rule


# -- with_detector ------------------------------------------------------------------------------------


def test_a_detector_is_a_row_that_leads_to_recover():
    more = LOOP.with_detector(State.POST_LLM, door, before="loop_detected")
    names = [t.name for t in more.rows("post_llm")]
    assert names[names.index("door") + 1] == "loop_detected"
    assert more.transition("post_llm.door").target == "recover"
    assert "door" not in [t.name for t in LOOP.rows("post_llm")]


def test_a_detector_may_lead_elsewhere():
    more = LOOP.with_detector("post_tool", door, target="terminal", ends="partial")
    row = more.transition("post_tool.door")
    assert (row.target, row.ends) == ("terminal", "partial")


def test_a_detector_that_leads_to_the_end_says_how_the_run_ends():
    with pytest.raises(GraphError) as caught:
        LOOP.with_detector("post_tool", door, target="terminal")
    assert caught.value.edge == "post_tool.door"
    assert "how the run ends" in caught.value.rule


# -- with_counter -------------------------------------------------------------------------------------


def test_a_counter_can_be_added_and_given_another_limit():
    coins = SMALL.with_counter(Counter("coins", 2))
    assert coins.counters == (STEPS, Counter("coins", 2))
    paid = coins.with_transition(Transition("work", door, "rest", spends="coins"))
    assert paid.transition("work.door").spends == ("coins",)
    assert coins.with_counter(Counter("coins", 9)).counters == (STEPS, Counter("coins", 9))
    assert SMALL.counters == (STEPS,)


def test_a_counter_with_another_limit_has_its_guards_too():
    graph = SMALL.with_counter(Counter("steps", 4))
    guard = graph.transition("work.too_long").guard
    assert isinstance(guard, Exhausted)
    assert (guard.counter, guard.__name__) == (Counter("steps", 4), "too_long")
    assert SMALL.transition("work.too_long").guard is not guard


def test_a_guard_made_from_another_counter_of_the_same_name_is_refused():
    with pytest.raises(GraphError) as caught:
        replace(SMALL, counters=(Counter("steps", 4),))
    assert caught.value.edge == "work.too_long"


# -- with_state ---------------------------------------------------------------------------------------

TO_THE_END = Transition("review", None, "terminal", ends="completed")


def test_a_new_state_entered_by_a_row_that_was_there():
    more = LOOP.with_state(StateSpec("review"), [TO_THE_END], entered_by="post_llm.otherwise")
    assert (more.transition("post_llm.otherwise").target, more.transition("post_llm.otherwise").ends) == ("review", "")
    assert rows(more, "review") == [
        "review.cancelled -> terminal", "review.aborted -> terminal", "review.otherwise -> terminal",
    ]  # fmt: skip
    assert [t.ends for t in more.rows("review")] == ["cancelled", "aborted", "completed"]
    assert [t.id for t in more.rows("post_llm")] == [t.id for t in LOOP.rows("post_llm")]
    assert LOOP.transition("post_llm.otherwise").target == "terminal"


def test_a_new_final_state_ends_runs_as_the_row_that_enters_it_did():
    more = LOOP.with_state(StateSpec("done", final=True), [], entered_by="post_llm.otherwise")
    assert (more.transition("post_llm.otherwise").target, more.transition("post_llm.otherwise").ends) == (
        "done", "completed",
    )  # fmt: skip


def test_a_new_state_entered_by_a_new_row():
    more = LOOP.with_state(
        StateSpec("review"),
        [Transition("review", None, "post_tool")],
        entered_by=Transition("dispatch_tool", door, "review"),
        before="in_doubt",
    )
    assert [t.name for t in more.rows("dispatch_tool")] == [
        "cancelled", "aborted", "approval_required", "door", "in_doubt", "otherwise",
    ]  # fmt: skip


def test_a_new_state_entered_by_no_row_is_where_runs_start():
    more = LOOP.with_state(StateSpec("plan"), [Transition("plan", None, "pre_step")], entered_by=None)
    assert more.initial == "plan"
    assert rows(more, "plan") == [
        "plan.cancelled -> terminal", "plan.aborted -> terminal", "plan.otherwise -> pre_step",
    ]  # fmt: skip
    assert [rows(more, spec.name) for spec in LOOP.states] == [rows(LOOP, spec.name) for spec in LOOP.states]


def test_a_new_state_that_is_entered_by_no_row_and_does_not_lead_to_the_loop_is_refused():
    with pytest.raises(GraphError, match="cannot be reached"):
        LOOP.with_state(StateSpec("review"), [TO_THE_END], entered_by=None)


def test_a_new_state_keeps_the_stops_that_it_brings_itself():
    more = LOOP.with_state(
        StateSpec("review"),
        [
            Transition("review", guards.cancelled, "terminal", ends="partial"),
            Transition("review", guards.aborted, "terminal", ends="handed_off"),
            TO_THE_END,
        ],
        entered_by="post_llm.otherwise",
    )
    assert [(t.name, t.ends) for t in more.rows("review")] == [
        ("cancelled", "partial"), ("aborted", "handed_off"), ("otherwise", "completed"),
    ]  # fmt: skip


def test_a_new_state_has_its_stops_first_in_whatever_order_they_are_given():
    more = LOOP.with_state(
        StateSpec("review"),
        [TO_THE_END, Transition("review", guards.aborted, "terminal", ends="aborted")][::-1],
        entered_by="post_llm.otherwise",
    )
    assert [t.name for t in more.rows("review")] == ["cancelled", "aborted", "otherwise"]


def test_a_state_that_waits_can_be_stopped_too():
    own = Transition("attic", door, "terminal", ends="completed")
    more = LOOP.with_state(StateSpec("attic", waits=True), [own], entered_by=Transition("recover", door, "attic"))
    assert [t.name for t in more.rows("attic")] == ["cancelled", "aborted", "door"]


def test_a_state_that_ends_gets_no_stops():
    entering = Transition("recover", door, "attic", ends="partial")
    more = LOOP.with_state(StateSpec("attic", final=True), [], entered_by=entering)
    assert rows(more, "attic") == []


def test_a_new_state_that_nothing_enters_is_refused():
    with pytest.raises(GraphError) as caught:
        LOOP.with_state(
            StateSpec("attic"),
            [Transition("attic", None, "terminal", ends="completed")],
            entered_by=Transition("recover", door, "terminal", ends="partial"),
        )
    assert caught.value.edge == "attic"


def test_a_new_state_with_an_unknown_entrance_is_refused():
    with pytest.raises(GraphError) as caught:
        LOOP.with_state(StateSpec("attic"), [], entered_by="post_llm.nobody")
    assert caught.value.edge == "post_llm.nobody"


# -- without ------------------------------------------------------------------------------------------


def test_a_row_is_removed_by_its_id():
    less = LOOP.without("post_tool.repeated_error", "post_tool.tool_error")
    kept = [t.name for t in LOOP.rows("post_tool") if t.name not in ("repeated_error", "tool_error")]
    assert [t.name for t in less.rows("post_tool")] == kept


def test_a_state_goes_with_every_row_that_touches_it():
    less = SMALL.without("rest")
    assert [spec.name for spec in less.states] == ["work", "end"]
    assert [t.id for t in SMALL if t.id not in {x.id for x in less}] == ["work.broken", "rest.ready"]


def test_a_loop_that_could_not_ask_a_person_is_refused():
    """In doubt and asking a person are what its effects may come back with."""
    with pytest.raises(GraphError) as caught:
        LOOP.without("suspended")
    assert (caught.value.edge, "'in_doubt'" in caught.value.rule) == ("dispatch_tool", True)


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("post_tool.nobody", "post_tool.nobody"),
        ("nowhere", "nowhere"),
        ("post_llm.otherwise", "post_llm.tool_calls"),
        ("pre_step", "post_tool.tool_error"),
        ("dispatch_tool.in_doubt", "dispatch_tool"),
        ("suspended.aborted", "suspended"),
    ],
)
def test_what_cannot_be_removed_is_named(name, edge):
    with pytest.raises(GraphError) as caught:
        LOOP.without(name)
    assert caught.value.edge == edge


def test_without_nothing_is_the_same_table():
    assert LOOP.without() == LOOP


def test_an_extra_row_of_a_waiting_state_is_evaluated_last():
    graph = SMALL.with_transition(Transition("rest", door, "work"))
    assert rows(graph, "rest") == ["rest.ready -> work", "rest.door -> work"]
