"""Graphs are immutable; each way of extending one returns a new, checked graph."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from agentfsm.errors import GraphError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, State, StateSpec, Transition


def ready(run: object) -> bool:
    return True


def broken(run: object) -> bool:
    return False


def door(run: object) -> bool:
    return False


def cancelled(run: object) -> bool:
    return False


def aborted(run: object) -> bool:
    return False


SMALL = Graph(
    name="small",
    states=(StateSpec("work", spends="a step"), StateSpec("rest", waits=True), StateSpec("end", final=True)),
    transitions=(
        Transition("work", ready, "end"),
        Transition("work", broken, "rest"),
        Transition("work", None, "work"),
        Transition("rest", ready, "work"),
    ),
)


def rows(graph: Graph, state: str) -> list[str]:
    return [str(t) for t in graph.rows(state)]


# -- what a graph says of itself ----------------------------------------------------------------------


def test_a_graph_and_its_rows_say_in_a_line_what_they_are():
    assert repr(LOOP) == "Graph('loop', 8 states, 58 transitions)"
    assert repr(SMALL.transition("work.ready")) == "Transition('work', ready, 'end')"
    assert (
        repr(Transition("work", None, "rest", spends="a coin")) == "Transition('work', None, 'rest', spends='a coin')"
    )


def test_a_run_starts_in_the_first_declared_state():
    assert SMALL.initial == "work"
    assert LOOP.initial == State.PRE_STEP


def test_rows_are_in_evaluation_order():
    assert rows(SMALL, "work") == ["work.ready -> end", "work.broken -> rest", "work.otherwise -> work"]
    assert SMALL.rows("end") == ()


def test_the_order_within_a_state_counts_and_the_grouping_does_not():
    mixed = Graph(SMALL.states, (SMALL.transitions[3], *SMALL.transitions[:3]), name="small")
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
    graph = Graph(list(SMALL.states), list(SMALL.transitions), name="small")
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


def other(transitions: tuple[Transition, ...] = SMALL.transitions, states: tuple[StateSpec, ...] = SMALL.states) -> str:
    return Graph(states, transitions, name="another name").fingerprint


def test_the_fingerprint_says_what_the_table_is_and_not_what_it_is_called():
    assert other() == SMALL.fingerprint
    assert len(SMALL.fingerprint) == 64


def test_the_fingerprint_is_another_one_when_anything_that_matters_is():
    first, second, *rest = SMALL.transitions
    _, resting, end = SMALL.states
    changed = {
        "order": other((second, first, *rest)),
        "target": other((first, second, rest[0], Transition("rest", ready, "end"))),
        "guard": other((Transition("work", door, "end"), second, *rest)),
        "row": other((first, second, *rest, Transition("rest", door, "work"))),
        "row spends": other((Transition("work", ready, "end", spends="x"), second, *rest)),
        "state spends": other(states=(StateSpec("work", spends="more"), resting, end)),
        "state": other(
            (*SMALL.transitions, Transition("rest", door, "attic"), Transition("attic", None, "end")),
            (*SMALL.states, StateSpec("attic")),
        ),
    }
    assert len({SMALL.fingerprint, *changed.values()}) == len(changed) + 1


def test_the_fingerprint_leaves_out_what_only_pictures_show():
    _, *others = SMALL.states
    shown = StateSpec("work", note="something else", spends="a step", lane="left", effect=print)
    assert other(states=(shown, *others)) == SMALL.fingerprint


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
        "work.ready -> end", "work.broken -> rest", "work.door -> rest", "work.otherwise -> work",
    ]  # fmt: skip


def test_a_new_row_can_be_inserted_before_a_named_row():
    more = SMALL.with_transition(Transition("work", door, "rest"), before="ready")
    assert rows(more, "work")[:2] == ["work.door -> rest", "work.ready -> end"]
    assert rows(more, "rest") == rows(SMALL, "rest")


def test_in_a_waiting_state_a_new_row_comes_last():
    more = SMALL.with_transition(Transition("rest", door, "end"))
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
    assert "ready, broken, otherwise" in str(caught.value)


def test_a_second_row_without_a_guard_is_refused():
    with pytest.raises(GraphError) as caught:
        SMALL.with_transition(Transition("work", None, "end"))
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
    assert LOOP.with_detector("post_tool", door, target="terminal").transition("post_tool.door").target == "terminal"


# -- with_state ---------------------------------------------------------------------------------------


def test_a_new_state_entered_by_a_row_that_was_there():
    more = LOOP.with_state(
        StateSpec("review"), [Transition("review", None, "terminal")], entered_by="post_llm.otherwise"
    )
    assert more.transition("post_llm.otherwise").target == "review"
    assert rows(more, "review") == [
        "review.cancelled -> terminal", "review.aborted -> terminal", "review.otherwise -> terminal",
    ]  # fmt: skip
    assert [t.id for t in more.rows("post_llm")] == [t.id for t in LOOP.rows("post_llm")]
    assert LOOP.transition("post_llm.otherwise").target == "terminal"


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


def test_a_new_state_keeps_the_stops_that_it_brings_itself():
    more = LOOP.with_state(
        StateSpec("review"),
        [
            Transition("review", aborted, "recover"),
            Transition("review", cancelled, "terminal"),
            Transition("review", None, "terminal"),
        ],
        entered_by="post_llm.otherwise",
    )
    assert rows(more, "review") == [
        "review.aborted -> recover", "review.cancelled -> terminal", "review.otherwise -> terminal",
    ]  # fmt: skip


@pytest.mark.parametrize("spec", [StateSpec("attic", waits=True), StateSpec("attic", final=True)])
def test_a_state_that_waits_or_ends_gets_no_stops(spec):
    own = [] if spec.final else [Transition("attic", door, "terminal")]
    more = LOOP.with_state(spec, own, entered_by=Transition("recover", door, "attic"))
    assert rows(more, "attic") == [str(t) for t in own]


def test_a_new_state_that_nothing_enters_is_refused():
    with pytest.raises(GraphError) as caught:
        LOOP.with_state(
            StateSpec("attic"),
            [Transition("attic", None, "terminal")],
            entered_by=Transition("recover", door, "terminal"),
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
    less = LOOP.without("suspended")
    assert "suspended" not in [s.name for s in less.states]
    assert [t.id for t in LOOP if t.id not in {x.id for x in less}] == [
        "dispatch_tool.approval_required",
        "dispatch_tool.in_doubt",
        "post_tool.question_asked",
        "recover.ask_user",
        "suspended.cancelled",
        "suspended.expired",
        "suspended.approval_decided",
        "suspended.doubt_settled",
        "suspended.replied",
    ]


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("post_tool.nobody", "post_tool.nobody"),
        ("nowhere", "nowhere"),
        ("post_llm.otherwise", "post_llm.tool_calls"),
        ("pre_step", "post_tool.tool_error"),
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
