"""``check_graph``: each rule broken alone; and the rows of the default loop against a table written by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest

from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.guards import came_back
from agentfsm.loop.outcomes import BUILT_IN_EFFECTS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import ENDINGS, Counter, EffectSpec, Exhausted, exhausted, takes
from agentfsm.machine.graph import Graph, Guard, State, StateSpec, Transition


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


WORK = StateSpec("work")
END = StateSpec("end", final=True)
GO = Transition("work", None, "end", ends="completed")


def to_end(source: str, guard: Guard | None, ends: str = "completed") -> Transition:
    return Transition(source, guard, "end", ends=ends)


def named(name: str) -> Guard:
    def guard(run: object) -> bool:
        return False

    guard.__name__ = name
    return guard


def spent(counter: Counter, *, past: bool = True) -> Guard:
    """A guard that is made from a counter and named after it."""
    return exhausted(counter, past=past)(named(f"out_of_{counter.name}"))


def refused(
    states: tuple[StateSpec, ...],
    *transitions: Transition,
    counters: tuple[Counter, ...] = (),
    first: tuple[Guard, ...] = (),
) -> GraphError:
    with pytest.raises(GraphError) as caught:
        Graph(states, transitions, "g", counters, first)
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
    error = refused((StateSpec(name), END), to_end(name, None))
    assert (error.rule, error.edge) == ("a state's name must be an identifier", repr(name))


def test_a_guard_has_a_name():
    error = refused((WORK, END), to_end("work", lambda run: True), GO)
    assert (error.rule, error.edge) == ("a guard's name must be an identifier", "work.<lambda>")
    assert "a lambda has no name" in str(error)


@pytest.mark.parametrize("outcome", ["two words", "", "1st"])
def test_an_outcome_names_a_guard(outcome):
    with pytest.raises(GraphError, match="must be an identifier") as caught:
        came_back(outcome)
    assert caught.value.edge == f"came_back({outcome!r})"
    assert str(caught.value).endswith("write it like 'needs_work', here and where the state and its effect name it")


def test_a_partial_has_no_name():
    error = refused((WORK, END), to_end("work", functools.partial(ready)), GO)
    assert str(error).endswith("a guard's name must be an identifier; give the guard such a __name__")


def test_no_guard_is_used_twice_in_one_state():
    error = refused((WORK, END), to_end("work", ready), Transition("work", ready, "work"), GO)
    assert (error.rule, error.edge) == ("the guard is used twice in one state", "work.ready")


def test_two_guards_of_one_name_are_one_too_many():
    def other(run: object) -> bool:
        return False

    other.__name__ = "ready"
    error = refused((WORK, END), to_end("work", ready), to_end("work", other), GO)
    assert error.edge == "work.ready"


def test_a_guard_may_be_used_in_two_states():
    Graph(
        (WORK, StateSpec("other"), END),
        (
            to_end("work", ready),
            Transition("work", None, "other"),
            to_end("other", ready),
            to_end("other", None),
        ),
    )


# -- 2 ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [to_end("attic", None), Transition("work", ready, "attic")])
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
    error = refused((WORK, END), to_end("work", guard), GO)
    assert error.rule.startswith("a guard must be a plain function")
    assert error.edge == f"work.{guard.__name__}"


def test_a_guard_is_a_function():
    error = refused((WORK, END), to_end("work", "ready"), GO)  # type: ignore[arg-type]
    assert (error.rule, error.edge) == ("a guard must be a function of the run", "work.ready")


def test_an_object_with_a_name_may_be_a_guard():
    graph = Graph((WORK, END), (to_end("work", PlainCall()), GO))
    assert graph.rows("work")[0].id == "work.plain_call"


# -- 4 last rows --------------------------------------------------------------------------------------


def test_something_leaves_every_state_that_is_not_final():
    error = refused((WORK, StateSpec("stuck"), END), Transition("work", ready, "stuck"), GO)
    assert (error.rule, error.edge) == ("no transition leaves the state", "stuck")


def test_the_last_row_of_a_state_has_no_guard():
    error = refused((WORK, END), to_end("work", ready))
    assert error.rule == "the last transition of a state that does not wait must have no guard"
    assert error.edge == "work.ready"
    assert "Transition('work', None, ...)" in str(error)


def test_no_row_follows_a_row_without_a_guard():
    error = refused((WORK, END), GO, to_end("work", ready))
    assert error.rule == "can never be evaluated: work.otherwise comes before it and has no guard"
    assert error.edge == "work.ready"


def test_a_state_that_waits_needs_no_last_row():
    Graph((StateSpec("rest", waits=True), END), (to_end("rest", ready),))


# -- 5 reach ------------------------------------------------------------------------------------------


def test_every_state_can_be_reached():
    error = refused((WORK, StateSpec("island"), END), GO, to_end("island", None))
    assert (error.rule, error.edge) == ("the state cannot be reached from 'work'", "island")


def test_an_end_can_be_reached_from_every_state():
    trap = StateSpec("trap")
    error = refused((WORK, trap, END), Transition("work", ready, "trap"), GO, Transition("trap", None, "trap"))
    assert (error.rule, error.edge) == ("no final state can be reached from the state", "trap")


def test_a_graph_has_an_end():
    error = refused((WORK,), Transition("work", None, "work"))
    assert (error.rule, error.edge) == ("a graph needs a final state", "g")


# -- 6 what comes first -------------------------------------------------------------------------------


def test_the_first_guards_come_first_in_every_state():
    Graph((WORK, END), (to_end("work", ready), GO), first=(ready,))
    Graph((WORK, END), (to_end("work", ready), to_end("work", broken), GO), first=(ready, broken))


@pytest.mark.parametrize(
    ("rows", "edge"),
    [
        ((to_end("work", broken), to_end("work", ready), GO), "work.ready"),  # another row in front of it
        ((to_end("work", broken), GO), "work"),  # none
        ((to_end("work", named("ready")), GO), "work"),  # another function of its name
    ],
)
def test_a_state_whose_first_row_is_another_one_is_refused(rows, edge):
    error = refused((WORK, END), *rows, first=(ready,))
    assert (error.rule, error.edge) == ("'ready' must be row 1 of every state that is not final", edge)


def test_the_order_of_the_first_guards_counts():
    error = refused((WORK, END), to_end("work", broken), to_end("work", ready), GO, first=(ready, broken))
    assert (error.rule, error.edge) == ("'ready' must be row 1 of every state that is not final", "work.ready")


def test_a_state_that_waits_has_them_too():
    rest = StateSpec("rest", waits=True)
    error = refused((rest, END), to_end("rest", broken), first=(ready,))
    assert error.edge == "rest"


# -- 7 how a run ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDINGS)
def test_a_row_into_a_final_state_says_how_the_run_ends(ends):
    assert Graph((WORK, END), (to_end("work", None, ends),)).transition("work.otherwise").ends == ends


@pytest.mark.parametrize("ends", ["", "stopped"])
def test_a_row_into_a_final_state_that_does_not_say_it_is_refused(ends):
    error = refused((WORK, END), to_end("work", None, ends))
    assert (error.rule, error.edge) == ("a row into a final state must say how the run ends", "work.otherwise")
    assert "completed, handed_off, partial, cancelled, aborted" in str(error)


def test_a_row_that_leads_on_does_not_end_the_run():
    error = refused((WORK, B, END), Transition("work", None, "b", ends="completed"), to_end("b", None))
    assert (error.rule, error.edge) == (
        "it ends the run (completed) and leads to 'b', which is not final",
        "work.otherwise",
    )


# -- 8 what an effect comes back with ------------------------------------------------------------------

SHAKY = EffectSpec("shaky", exceptional=("late", "lost"), on_request=("asked",))


@takes("late")
def is_late(run: object) -> bool:
    return False


@takes("late", "lost")
def went_wrong(run: object) -> bool:
    return False


def test_each_exceptional_outcome_of_an_effect_needs_a_row():
    shaky = StateSpec("work", effect=SHAKY)
    Graph((shaky, END), (to_end("work", went_wrong), GO))
    error = refused((shaky, END), to_end("work", is_late), GO)
    assert (error.rule, error.edge) == (
        "its effect may come back with 'lost', and no row of the state takes that",
        "work",
    )


def test_a_row_of_another_state_does_not_take_it():
    shaky = StateSpec("work", effect=SHAKY)
    error = refused((shaky, B, END), Transition("work", None, "b"), to_end("b", went_wrong), to_end("b", None))
    assert error.edge == "work"


async def review(run: object) -> None: ...


def test_each_outcome_that_a_state_of_ones_own_declares_needs_a_row():
    spec = StateSpec("work", effect=review, outcomes=("approved", "rejected"))
    approved, rejected = (to_end("work", came_back(outcome)) for outcome in spec.outcomes)
    graph = Graph((spec, END), (approved, rejected, GO))
    assert [t.name for t in graph.rows("work")] == ["approved", "rejected", "otherwise"]
    assert graph.takes("work", "rejected")
    error = refused((spec, END), approved, GO)
    assert (error.rule, error.edge) == (
        "its effect may come back with 'rejected', and no row of the state takes that",
        "work",
    )
    assert str(error).endswith("such as came_back('rejected'); a row without a guard takes no outcome")
    assert not Graph((WORK, END), (approved, GO)).takes("work", "rejected")


# -- 9 counters ---------------------------------------------------------------------------------------

FUEL = Counter("fuel", 2)


@pytest.mark.parametrize("name", ["a coin", "", "1st"])
def test_a_counters_name_is_an_identifier(name):
    error = refused((WORK, END), GO, counters=(Counter(name, 1),))
    assert (error.rule, error.edge) == ("a counter's name must be an identifier", repr(name))


def test_a_counters_limit_is_not_negative():
    error = refused((WORK, END), GO, counters=(Counter("fuel", -1),))
    assert (error.rule, error.edge) == ("the counter's limit is -1; it must be 0 or more", "fuel")


@pytest.mark.parametrize("limit", [2.5, True, None])
def test_a_counters_limit_is_a_whole_number_or_a_name(limit):
    error = refused((WORK, END), GO, counters=(Counter("fuel", limit),))
    assert error.rule == f"the counter's limit is {limit!r}; it must be a whole number or the name of a guardrail"


def test_no_counter_is_declared_twice():
    error = refused((WORK, END), GO, counters=(FUEL, Counter("fuel", 3)))
    assert (error.rule, error.edge) == ("the counter is declared twice", "fuel")


@pytest.mark.parametrize(
    ("states", "rows", "edge"),
    [
        ((StateSpec("work", spends="coins"), END), (GO,), "work"),
        ((WORK, END), (replace(to_end("work", ready), spends="coins"), GO), "work.ready"),
        ((WORK, END), (replace(to_end("work", ready), refills=("fuel", "coins")), GO), "work.ready"),
    ],
)
def test_what_is_spent_or_refilled_is_declared(states, rows, edge):
    error = refused(states, *rows, counters=(FUEL,))
    assert (error.rule, error.edge) == ("it spends or refills 'coins', which is not a declared counter", edge)
    assert "Counter('coins', limit)" in str(error)


def test_a_guard_is_made_from_a_declared_counter():
    error = refused((WORK, END), to_end("work", spent(FUEL)), GO, counters=(Counter("fuel", 99),))
    assert error.edge == "work.out_of_fuel"
    assert "not a declared counter" in error.rule


def test_a_row_without_a_guard_spends_nothing():
    """It must hold whatever was spent: a run would be stuck in the state."""
    error = refused((WORK, END), replace(GO, spends="fuel"), counters=(FUEL,))
    assert error.edge == "work.otherwise"
    assert error.rule.startswith("a transition without a guard must not spend")
    Graph((WORK, END), (replace(GO, refills="fuel"),), counters=(FUEL,))


def test_a_guard_that_cannot_be_hashed_is_refused():
    class Ready:
        __name__ = "ready"

        def __eq__(self, other: object) -> bool:
            return self is other

        def __call__(self, run: object) -> bool:
            return True

    error = refused((WORK, END), to_end("work", Ready()), GO)
    assert (error.rule, error.edge) == (
        "a guard must be hashable, because proofs look up what is known about it", "work.ready"
    )  # fmt: skip


def test_a_state_that_spends_has_a_row_for_the_end_of_the_counter():
    work = StateSpec("work", spends="fuel")
    error = refused((work, END), to_end("work", ready), GO, counters=(FUEL,))
    assert (error.rule, error.edge) == ("it spends 'fuel' and has no row for the counter's end", "work")
    Graph((work, END), (to_end("work", spent(FUEL), "partial"), GO), counters=(FUEL,))


# -- 10 cycles ----------------------------------------------------------------------------------------

A, B = StateSpec("a"), StateSpec("b")
SPENDING = StateSpec("a", spends="fuel")


def circle(*, spends: str = "", refills: str = "", start: StateSpec = A, at_end: str = "end") -> Graph:
    """a -> b -> a, and from b to the end; a state that spends goes to ``at_end`` once nothing is left."""
    ends = "partial" if at_end == "end" else ""
    out = (Transition("a", spent(FUEL), at_end, ends=ends),) if start.spends else ()
    return Graph(
        (start, B, END),
        (
            *out,
            Transition("a", None, "b", refills=refills),
            to_end("b", ready),
            Transition("b", broken, "a", spends=spends),
            to_end("b", None),
        ),
        name="g",
        counters=(FUEL,),
    )


def test_a_cycle_that_spends_nothing_is_refused_with_its_way():
    with pytest.raises(GraphError) as caught:
        circle()
    assert caught.value.rule == "closes a cycle that spends no counter and never waits: a -> b -> a"
    assert caught.value.edge == "b.broken"


def test_a_state_that_leads_to_itself_is_a_cycle():
    error = refused((A, END), to_end("a", ready), Transition("a", None, "a"))
    assert "a -> a" in error.rule
    assert error.edge == "a.otherwise"


@pytest.mark.parametrize(
    "graph",
    [
        lambda: circle(spends="fuel"),
        lambda: circle(start=SPENDING),
        lambda: circle(start=StateSpec("a", waits=True)),
    ],
)
def test_a_cycle_may_spend_in_a_row_or_in_a_state_or_wait(graph):
    assert graph().initial == "a"


@pytest.mark.parametrize("how", [{"spends": "fuel"}, {"start": SPENDING}])
def test_a_cycle_that_refills_what_it_spends_is_refused(how):
    with pytest.raises(GraphError) as caught:
        circle(refills="fuel", **how)
    assert "a -> b -> a" in caught.value.rule
    if "spends" in how:
        assert caught.value.rule.startswith("closes a cycle that spends fuel, which it also refills, and never waits")


def test_a_state_that_goes_round_again_when_its_counter_is_empty_does_not_end_the_cycle():
    with pytest.raises(GraphError) as caught:
        circle(start=SPENDING, at_end="b")
    assert "never waits: a -> b -> a" in caught.value.rule


def test_a_row_for_the_counters_end_that_spends_another_counter_does_not_end_the_cycle():
    """Once that other counter is empty the row does not hold, and the run goes round again."""
    error = refused(
        (SPENDING, B, END),
        replace(to_end("a", spent(FUEL), "partial"), spends="tries"),
        Transition("a", None, "b"),
        Transition("b", broken, "a"),
        to_end("b", None),
        counters=(FUEL, Counter("tries", 1)),
    )
    assert "never waits: a -> b -> a" in error.rule


def test_a_row_within_the_cycle_in_front_of_the_one_that_leaves_it_does_not_end_the_cycle():
    """The row in front could hold forever, so the counter's end would never be asked."""
    error = refused(
        (SPENDING, B, END),
        Transition("a", ready, "b"),
        to_end("a", spent(FUEL), "partial"),
        to_end("a", None),
        Transition("b", broken, "a"),
        to_end("b", None),
        counters=(FUEL,),
    )
    assert "never waits" in error.rule


def test_a_counter_that_another_cycle_refills_bounds_its_own():
    """Each try may be made twice in each round, and there are two rounds."""
    rounds, tries = Counter("rounds", 2), Counter("tries", 2)
    graph = Graph(
        (A, B, END),
        (
            Transition("a", None, "b", refills="tries"),
            Transition("b", ready, "b", spends="tries"),
            Transition("b", broken, "a", spends="rounds"),
            to_end("b", None),
        ),
        counters=(rounds, tries),
    )
    longest = 3 * (1 + 2) + 2 + 1  # three times a -> b and two tries, two rows back, and the end
    assert longest_run(graph, {"rounds": 2, "tries": 2}) == longest
    assert longest <= graph.max_moves(lambda counter: 2) <= 2 * longest


def test_a_cycle_is_found_after_an_acyclic_branch():
    """A state that two ways lead to is walked once, and what follows from it is still seen."""
    c = StateSpec("c")
    error = refused(
        (A, B, c, END),
        Transition("a", ready, "c"),
        Transition("a", None, "b"),
        Transition("b", None, "c"),
        to_end("c", ready),
        Transition("c", None, "b"),
    )
    assert "c -> b -> c" in error.rule or "b -> c -> b" in error.rule


# -- the bound on the number of moves ---------------------------------------------------------------------


def longest_run(graph: Graph, limits: dict[str, int | None]) -> int:
    """The longest run, by trying every row that can hold at every point; guards made from a counter do as they say."""

    def moves(state: str, left: tuple[tuple[str, int], ...]) -> int:
        if (state, left) in known:
            found = known[state, left]
            if found is None:
                raise RecursionError("a run that never ends")
            return found
        known[state, left] = None
        best = 0
        for row in graph.rows(state):
            counters = dict(left)
            if isinstance(row.guard, Exhausted):
                limit = limits[row.guard.counter.name]
                if limit is None or counters[row.guard.counter.name] < limit + row.guard.past:
                    continue
            for name in row.refills:
                counters[name] = 0
            if any(limits[n] is not None and counters[n] >= limits[n] for n in row.spends):  # type: ignore[operator]
                continue
            target = graph.spec(row.target)
            for name in (*row.spends, *target.spends):
                counters[name] += limits[name] is not None
            further = 0 if target.final or target.waits else moves(row.target, tuple(sorted(counters.items())))
            best = max(best, 1 + further)
            if isinstance(row.guard, Exhausted):
                break  # it certainly holds: no later row is asked
        known[state, left] = best
        return best

    known: dict[tuple[str, tuple[tuple[str, int], ...]], int | None] = {}
    start = tuple(sorted((c.name, int(c.name in graph.states[0].spends)) for c in graph.counters))
    return moves(graph.initial, start)


def test_the_longest_runs_by_hand():
    straight = Graph((WORK, END), (GO,))
    assert (longest_run(straight, {}), straight.max_moves(lambda counter: 0)) == (1, 2)
    spending = circle(spends="fuel")  # a b, twice more a b, and the end
    assert longest_run(spending, {"fuel": 2}) == 6
    assert 6 <= spending.max_moves(lambda counter: 2) <= 12
    entered = circle(start=SPENDING)  # the third visit to a finds nothing left: a b a b a end
    assert longest_run(entered, {"fuel": 2}) == 5
    assert 5 <= entered.max_moves(lambda counter: 2) <= 12


def test_a_counter_without_a_limit_bounds_nothing():
    with pytest.raises(GraphError, match="never waits"):
        circle(spends="fuel").max_moves(lambda counter: None)


def random_counted_graph(seed: int) -> Graph | None:
    """A graph of up to four states, with rows that spend and refill as it happens; None if it is refused."""
    dice = random.Random(seed)
    counters = (Counter("x", 1), Counter("y", 1))
    names = [f"s{i}" for i in range(dice.randint(1, 4))]
    states: list[StateSpec] = []
    rows: list[Transition] = []
    for name in names:
        spends = dice.choice(["", "", "x", "y"])
        states.append(StateSpec(name, spends=spends, waits=dice.random() < 0.1))
        own = [c for c in counters if c.name == spends]
        for i in range(dice.randint(0, 3)):
            target = dice.choice([*names, "end"])
            rows.append(
                Transition(
                    name,
                    named(f"g{i}"),
                    target,
                    spends=dice.choice([(), ("x",), ("y",), ("x", "y")]),
                    refills=dice.choice([(), (), (), (), ("x",), ("y",)]),
                    ends="partial" if target == "end" else "",
                )
            )
        place = (
            dice.choice([0, len(rows)])
            if dice.random() < 0.3
            else next((i for i, t in enumerate(rows) if t.source == name), len(rows))
        )
        rows[place:place] = [to_end(name, spent(c), "partial") for c in own]
        last = dice.choice([*names, "end"])
        rows.append(Transition(name, None, last, ends="completed" if last == "end" else ""))
    try:
        return Graph((*states, END), tuple(rows), f"random {seed}", counters)
    except GraphError:
        return None


def test_the_bound_is_never_exceeded_whatever_the_graph():
    """Of 4000 random graphs, those that pass: no run of theirs is longer, and none goes on forever."""
    compared = cyclic = 0
    for seed in range(4000):
        graph = random_counted_graph(seed)
        if graph is None:
            continue
        for x, y in ((0, 0), (1, 1), (2, 1), (1, 3)):
            limits: dict[str, int | None] = {"x": x, "y": y}
            bound = graph.max_moves(lambda counter, limits=limits: limits[counter.name])  # type: ignore[misc]
            longest = longest_run(graph, limits)
            assert longest <= bound, (seed, x, y)
            compared += 1
            cyclic += longest > len(graph.states)
    assert compared > 1000
    assert cyclic > 100


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
suspended      aborted             terminal
suspended      expired             terminal
suspended      approval_decided    dispatch_tool
suspended      doubt_settled       dispatch_tool
suspended      replied             pre_step
"""


def test_the_default_loop_is_the_table_of_the_rules():
    wanted = [tuple(line.split()) for line in BY_HAND.split("\n") if line]
    assert len(wanted) == 59
    assert [(t.source, t.name, t.target) for t in LOOP] == wanted


def test_every_row_of_the_loop_has_the_guard_of_its_name():
    from agentfsm.loop import detectors, guards

    for row in LOOP:
        home = guards if hasattr(guards, row.name) else detectors
        assert row.guard is (None if row.name == "otherwise" else getattr(home, row.name))


def test_what_the_loop_spends_and_refills():
    """A step for each model call and its recovery, a call of the batch, a retry of its tools."""
    assert {s.name: s.spends for s in LOOP.states if s.spends} == {State.PRE_STEP: ("steps",)}
    assert {t.id: (t.spends, t.refills) for t in LOOP if t.spends or t.refills} == {
        "post_llm.tool_calls": (("pending_calls",), ("pending_calls", "tool_retries")),
        "post_tool.calls_pending": (("pending_calls",), ()),
        "recover.retry_tool": (("tool_retries", "pending_calls"), ("pending_calls",)),
    }
    assert [c.name for c in LOOP.counters] == ["steps", "iterations", "pending_calls", "tool_retries", "continues"]
    assert [t.id for t in LOOP if t.extends] == ["suspended.replied"]


def test_how_the_rows_of_the_loop_end_a_run():
    ends = {t.id: t.ends for t in LOOP if t.ends and t.name not in ("cancelled", "aborted")}
    assert ends == {
        "pre_step.runaway": "partial",
        "post_llm.otherwise": "completed",
        "post_tool.declared_done": "completed",
        "post_tool.declared_unable": "handed_off",
        "recover.handoff": "handed_off",
        "recover.stop": "partial",
        "suspended.expired": "cancelled",
    }
    assert all(t.ends == t.name for t in LOOP if t.name in ("cancelled", "aborted"))


def limits_of(guardrails: AgentGuardrails) -> Callable[[Counter], int | None]:
    return lambda counter: counter.limit if isinstance(counter.limit, int) else getattr(guardrails, counter.limit)


def test_a_run_of_the_loop_makes_a_limited_number_of_moves_even_if_its_other_limits_are_off():
    small = AgentGuardrails(max_iterations=1, max_calls_per_reply=1, max_steps=1, max_tool_retries=0)
    # By hand: two steps, the second of which ends the run. The first: pre_step, call_llm, post_llm, dispatch_tool,
    # post_tool, recover, pre_step, terminal.
    assert 7 <= LOOP.max_moves(limits_of(small)) < 100
    assert LOOP.max_moves(limits_of(small)) < LOOP.max_moves(limits_of(AgentGuardrails(max_iterations=None)))


@pytest.mark.parametrize("effect", [e for e in BUILT_IN_EFFECTS.values() if e.exceptional], ids=lambda e: e.name)
def test_what_may_go_wrong_in_an_effect_of_the_loop_needs_its_row(effect):
    state = next(s.name for s in LOOP.states if s.effect is effect)
    for outcome in effect.exceptional:
        rows = [t.id for t in LOOP.rows(state) if outcome in getattr(t.guard, "takes", ())]
        with pytest.raises(GraphError) as caught:
            LOOP.without(*rows)
        assert caught.value.edge == state
        # a row may take several outcomes: the first of them that nothing takes is named
        assert any(repr(each) in caught.value.rule for each in effect.exceptional)


def test_a_row_in_front_of_the_stops_of_the_loop_is_refused():
    for before in ("cancelled", "aborted"):
        with pytest.raises(GraphError) as caught:
            LOOP.with_detector(State.POST_LLM, broken, before=before)
        assert caught.value.edge == f"post_llm.{before}"
    for state in (s.name for s in LOOP.states if not s.final):
        with pytest.raises(GraphError) as caught:
            LOOP.without(f"{state}.cancelled")
        assert caught.value.edge == state


def test_the_cycle_that_goes_past_the_step_budget_is_refused_with_its_way():
    rows = [replace(t, target="call_llm") if t.id == "recover.otherwise" else t for t in LOOP]
    with pytest.raises(GraphError) as caught:
        replace(LOOP, transitions=tuple(rows))
    assert caught.value.rule == (
        "closes a cycle that spends no counter and never waits: call_llm -> recover -> call_llm"
    )
