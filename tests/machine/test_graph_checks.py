"""``check_graph``: each rule broken alone; and the rows of the default loop against a table written by hand."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator

import pytest

from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, State, StateSpec, Transition


def ready(run: object) -> bool:
    return True


def broken(run: object) -> bool:
    return False


async def awaits(run: object) -> bool:
    return False


def yields(run: object) -> Iterator[bool]:
    yield False


async def yields_later(run: object) -> AsyncIterator[bool]:
    yield False


class AwaitingCall:
    __name__ = "awaiting_call"

    async def __call__(self, run: object) -> bool:
        return False


class PlainCall:
    __name__ = "plain_call"

    def __call__(self, run: object) -> bool:
        return False


WORK = StateSpec("work", spends="a step")
END = StateSpec("end", final=True)
GO = Transition("work", None, "end")


def refused(states: tuple[StateSpec, ...], *transitions: Transition) -> GraphError:
    with pytest.raises(GraphError) as caught:
        Graph(states, transitions, name="g")
    assert isinstance(caught.value, ConfigurationError)
    assert str(caught.value).startswith(f"{caught.value.edge}: {caught.value.rule}")
    return caught.value


def test_the_smallest_graph_is_one_final_state():
    assert Graph((END,), ()).initial == "end"


# -- 1 names ------------------------------------------------------------------------------------------


def test_a_graph_has_a_state():
    error = refused(())
    assert (error.rule, error.edge) == ("a graph needs at least one state", "g")


def test_no_state_is_declared_twice():
    error = refused((WORK, END, WORK), GO)
    assert (error.rule, error.edge) == ("the state is declared twice", "work")


@pytest.mark.parametrize("name", ["two words", "", "1st", "a.b", "a-b"])
def test_a_states_name_is_an_identifier(name):
    error = refused((StateSpec(name), END), Transition(name, None, "end"))
    assert (error.rule, error.edge) == ("a state's name must be an identifier", repr(name))


def test_a_guard_has_a_name():
    error = refused((WORK, END), Transition("work", lambda run: True, "end"), GO)
    assert (error.rule, error.edge) == ("a guard's name must be an identifier", "work.<lambda>")
    assert "a lambda has no name" in str(error)


def test_a_partial_has_no_name():
    error = refused((WORK, END), Transition("work", functools.partial(ready), "end"), GO)
    assert error.rule == "a guard's name must be an identifier"


def test_no_guard_is_used_twice_in_one_state():
    error = refused((WORK, END), Transition("work", ready, "end"), Transition("work", ready, "work"), GO)
    assert (error.rule, error.edge) == ("the guard is used twice in one state", "work.ready")


def test_two_guards_of_one_name_are_one_too_many():
    def other(run: object) -> bool:
        return False

    other.__name__ = "ready"
    error = refused((WORK, END), Transition("work", ready, "end"), Transition("work", other, "end"), GO)
    assert error.edge == "work.ready"


def test_a_guard_may_be_used_in_two_states():
    other = StateSpec("other", spends="a step")
    Graph(
        (WORK, other, END),
        (
            Transition("work", ready, "end"),
            Transition("work", None, "other"),
            Transition("other", ready, "end"),
            Transition("other", None, "work"),
        ),
    )


# -- 2 ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [Transition("attic", None, "end"), Transition("work", ready, "attic")])
def test_a_transition_joins_declared_states(row):
    error = refused((WORK, END), row, GO)
    assert (error.rule, error.edge) == ("'attic' is not a declared state", row.id)
    assert "declared: work, end" in str(error)


def test_nothing_leaves_a_final_state():
    error = refused((WORK, END), GO, Transition("end", ready, "work"))
    assert (error.rule, error.edge) == ("no transition may leave a final state", "end.ready")


# -- 3 guards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [awaits, yields, yields_later, AwaitingCall()])
def test_a_guard_that_would_always_read_as_true_is_refused(guard):
    error = refused((WORK, END), Transition("work", guard, "end"), GO)
    assert error.rule.startswith("a guard must be a plain function")
    assert error.edge == f"work.{guard.__name__}"


def test_a_guard_is_a_function():
    error = refused((WORK, END), Transition("work", "ready", "end"), GO)  # type: ignore[arg-type]
    assert (error.rule, error.edge) == ("a guard must be a function of the run", "work.ready")


def test_an_object_with_a_name_may_be_a_guard():
    graph = Graph((WORK, END), (Transition("work", PlainCall(), "end"), GO))
    assert graph.rows("work")[0].id == "work.plain_call"


# -- 4 last rows --------------------------------------------------------------------------------------


def test_something_leaves_every_state_that_is_not_final():
    error = refused((WORK, StateSpec("stuck"), END), Transition("work", ready, "stuck"), GO)
    assert (error.rule, error.edge) == ("no transition leaves the state", "stuck")


def test_the_last_row_of_a_state_has_no_guard():
    error = refused((WORK, END), Transition("work", ready, "end"))
    assert error.rule == "the last transition of a state that does not wait must have no guard"
    assert error.edge == "work.ready"
    assert "Transition('work', None, ...)" in str(error)


def test_no_row_follows_a_row_without_a_guard():
    error = refused((WORK, END), GO, Transition("work", ready, "end"))
    assert error.rule == "can never be evaluated: work.otherwise comes before it and has no guard"
    assert error.edge == "work.ready"


def test_a_state_that_waits_needs_no_last_row():
    Graph((StateSpec("rest", waits=True), END), (Transition("rest", ready, "end"),))


# -- 5 reach ------------------------------------------------------------------------------------------


def test_every_state_can_be_reached():
    error = refused((WORK, StateSpec("island"), END), GO, Transition("island", None, "end"))
    assert (error.rule, error.edge) == ("the state cannot be reached from 'work'", "island")


def test_an_end_can_be_reached_from_every_state():
    trap = StateSpec("trap", spends="time")
    error = refused((WORK, trap, END), Transition("work", ready, "trap"), GO, Transition("trap", None, "trap"))
    assert (error.rule, error.edge) == ("no final state can be reached from the state", "trap")


def test_a_graph_has_an_end():
    error = refused((WORK,), Transition("work", None, "work"))
    assert (error.rule, error.edge) == ("a graph needs a final state", "g")


# -- 6 cycles -----------------------------------------------------------------------------------------

A, B = StateSpec("a"), StateSpec("b")


def circle(*, spends: str = "", first: StateSpec = A) -> Graph:
    return Graph(
        (first, B, END),
        (Transition("a", None, "b", spends=spends), Transition("b", ready, "end"), Transition("b", None, "a")),
        name="g",
    )


def test_a_cycle_that_spends_nothing_is_refused_with_its_way():
    with pytest.raises(GraphError) as caught:
        circle()
    assert caught.value.rule == "closes a cycle that spends nothing and never waits: a -> b -> a"
    assert caught.value.edge == "b.otherwise"


def test_a_state_that_leads_to_itself_is_a_cycle():
    error = refused((A, END), Transition("a", ready, "end"), Transition("a", None, "a"))
    assert "a -> a" in error.rule
    assert error.edge == "a.otherwise"


@pytest.mark.parametrize(
    "graph",
    [
        lambda: circle(spends="fuel"),
        lambda: circle(first=StateSpec("a", spends="fuel")),
        lambda: circle(first=StateSpec("a", waits=True)),
    ],
)
def test_a_cycle_may_spend_on_its_way_in_its_state_or_wait(graph):
    assert graph().initial == "a"


def test_a_cycle_is_found_after_an_acyclic_branch():
    """A state that two ways lead to is walked once, and what follows from it is still seen."""
    c = StateSpec("c")
    error = refused(
        (A, B, c, END),
        Transition("a", ready, "c"),
        Transition("a", None, "b"),
        Transition("b", None, "c"),
        Transition("c", ready, "end"),
        Transition("c", None, "b"),
    )
    assert "c -> b -> c" in error.rule or "b -> c -> b" in error.rule


# -- the default loop ---------------------------------------------------------------------------------

BY_HAND = """
pre_step       cancelled           terminal
pre_step       aborted             terminal
pre_step       runaway             terminal
pre_step       iteration_limit     recover
pre_step       time_limit          recover
pre_step       token_limit         recover
pre_step       cost_limit          recover
pre_step       no_progress         recover
pre_step       otherwise           call_llm
call_llm       cancelled           terminal
call_llm       aborted             terminal
call_llm       transient_provider  recover
call_llm       provider_error      recover
call_llm       context_overflow    recover
call_llm       otherwise           post_llm
post_llm       cancelled           terminal
post_llm       aborted             terminal
post_llm       output_truncated    recover
post_llm       output_refused      recover
post_llm       output_malformed    recover
post_llm       loop_detected       recover
post_llm       no_progress         recover
post_llm       tool_calls          dispatch_tool
post_llm       otherwise           terminal
dispatch_tool  cancelled           terminal
dispatch_tool  aborted             terminal
dispatch_tool  approval_required   suspended
dispatch_tool  in_doubt            suspended
dispatch_tool  otherwise           post_tool
post_tool      cancelled           terminal
post_tool      aborted             terminal
post_tool      declared_done       terminal
post_tool      declared_unable     terminal
post_tool      question_asked      suspended
post_tool      policy_violation    recover
post_tool      calls_pending       dispatch_tool
post_tool      repeated_error      recover
post_tool      ambiguous_input     recover
post_tool      scope_too_large     recover
post_tool      capability_gap      recover
post_tool      kernel_invalidated  recover
post_tool      unknown_tool        recover
post_tool      invalid_arguments   recover
post_tool      environment_error   recover
post_tool      tool_error          recover
post_tool      otherwise           pre_step
recover        cancelled           terminal
recover        aborted             terminal
recover        ask_user            suspended
recover        handoff             terminal
recover        stop                terminal
recover        retry_tool          dispatch_tool
recover        otherwise           pre_step
suspended      cancelled           terminal
suspended      expired             terminal
suspended      approval_decided    dispatch_tool
suspended      doubt_settled       dispatch_tool
suspended      replied             pre_step
"""


def test_the_default_loop_is_the_table_of_the_rules():
    wanted = [tuple(line.split()) for line in BY_HAND.split("\n") if line]
    assert len(wanted) == 58
    assert [(t.source, t.name, t.target) for t in LOOP] == wanted


def test_every_row_of_the_loop_has_the_guard_of_its_name():
    from agentfsm.loop import detectors, guards

    for row in LOOP:
        home = guards if hasattr(guards, row.name) else detectors
        assert row.guard is (None if row.name == "otherwise" else getattr(home, row.name))


def test_what_the_cycles_of_the_loop_spend():
    assert [s.name for s in LOOP.states if s.spends] == [State.PRE_STEP]
    assert [t.id for t in LOOP if t.spends] == ["post_tool.calls_pending", "recover.retry_tool"]
