"""Conformance checks for graphs: what user-defined states, guards, hooks and memories may do, and how a machine moves.

::

    @pytest.mark.parametrize("check", LOOP_CHECKS, ids=lambda check: check.__name__)
    def test_the_rules_of_the_loop_hold(check):
        asyncio.run(check(AGENT.graph))

``LOOP_CHECKS`` are all conformance checks for a graph made from ``LOOP``: those of the loop, of calls, and these. A
graph that changes a rule on purpose leaves its check out.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import transitions

from agentfsm.agent import Agent
from agentfsm.errors import GraphError, NoTransitionError
from agentfsm.loop.events import Event, ModelReplied, RunWarning, Transitioned
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guards import approval_decided, approval_required, came_back, doubt_settled, in_doubt
from agentfsm.loop.history import KeepLast, Summarize
from agentfsm.loop.human_input import Allow, Deny, Edit, Extend, Fill, GiveUp, ItDidNotRun, ItRan
from agentfsm.loop.messages import Message, Reply, Role, Usage
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.recovery_policy import DefaultPolicy, Recovery
from agentfsm.loop.state import RunView
from agentfsm.machine.declaration import Counter, StateSpec, Transition, exhausted
from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph
from agentfsm.runtime.hooks import AbortRun, hook, observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.run_context import RunContext
from agentfsm.runtime.state_context import StateContext
from agentfsm.runtime.tools import tool
from agentfsm.testing import call_conformance, loop_conformance
from agentfsm.testing.fakes import FakeClock, RecordingModel, ScriptedModel, call
from agentfsm.testing.loop_conformance import (
    FINE,
    LoopCheck,
    Trial,
    expect,
    expect_error,
    expect_in,
    expect_refusal,
    record_of,
)


def _review_graph(graph: Graph, effect: Callable[..., Any]) -> Graph:
    """A graph in which each answer is reviewed, and may be written once more."""
    rows = [
        Transition("review", came_back("good"), "terminal", ends="completed"),
        Transition("review", came_back("poor"), "pre_step", spends="reviews"),
        Transition("review", None, "terminal", ends="partial"),
    ]
    spec = StateSpec("review", effect=effect, outcomes=("good", "poor"))
    graph = graph.with_counter(Counter("reviews", 1)).with_state(spec, rows, entered_by="post_llm.otherwise")
    answers = [Transition("asking", guard, "review") for guard in (approval_decided, doubt_settled)]
    asked = Transition("review", approval_required, "asking")
    graph = graph.with_state(StateSpec("asking", waits=True), answers, entered_by=asked, before="good")
    return graph.with_transition(Transition("review", in_doubt, "asking"), before="good")


async def _call_fine(context: StateContext) -> StateResult:
    return StateResult((await context.call_tool("fine", {"n": 7})).content, outcome="good")


async def own_states_keep_to_the_limits(graph: Graph) -> None:
    """What the effect of an own state calls is charged to the run, approved, and not repeated after a wait."""
    paid: list[int] = []
    keys: list[str] = []

    @tool(requires_approval=lambda arguments: arguments["amount"] > 100)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return f"paid {amount}"

    async def review(context: StateContext) -> StateResult:
        keys.append(context.idempotency_key)
        small = await context.call_tool("pay", {"amount": 1})
        large = await context.call_tool("pay", {"amount": 200})
        verdict = await context.ask_model("Is it good?")
        note = Message.user(f"{small.content}, {large.content}")
        return StateResult(verdict.message.content, (note,), outcome=verdict.message.content)

    own = _review_graph(graph, review)
    plain = await Trial(_review_graph(graph, _call_fine), ["First."], [FINE]).play()
    expect((plain.ending, plain.result.run_state.state_results), (("RunCompleted", "First."), {"review": "fine 7"}))
    used = Usage(10, 5)
    script = [
        "First.",
        Reply(Message.assistant("poor"), usage=used),
        "Second.",
        Reply(Message.assistant("good"), usage=used),
    ]
    run = await Trial(own, script, [pay], [Allow(), Deny("no")]).play()
    expect((run.ending, paid), (("RunCompleted", "Second."), [1, 200, 1]))
    wait = ["review.approval_required", "asking.approval_decided"]
    expect(run.rows, [*wait, "review.poor", *wait, "review.good"])
    state = run.result.run_state
    expect((state.model_calls, state.iterations, state.usage, state.counters["reviews"]), (4, 4, Usage(20, 10), 1))
    expect((state.state_results["review"], len(set(keys)), len(keys)), ("good", 2, 4))
    notes = [m.content for m in run.result.messages if m.role is Role.USER]
    expect(notes, ["Begin.", "paid 1, paid 200", "paid 1, Denied by the user: no"])
    run = await Trial(own, [script[0], script[1]], [pay], [Allow()], {"max_iterations": 2, "on_limit": "stop"}).play()
    expect((run.rows[-1], len(run.requests)), ("recover.stop", 2))

    def fail(context: StateContext) -> StateResult:
        raise LookupError("no review")

    run = await Trial(_review_graph(graph, fail), ["First."]).play()
    expect(
        (run.rows, run.ending),
        (["review.aborted"], ("RunAborted", "the effect of 'review' raised LookupError: no review")),
    )

    def returning(value: Any) -> Callable[[StateContext], Any]:
        return lambda context: value

    for wrong in (returning(object()), returning(StateResult(outcome="unheard of"))):
        run = await Trial(_review_graph(graph, wrong), ["First."]).play()
        expect((run.rows, run.ending[0]), (["review.aborted"], "RunAborted"))
    spent = _review_graph(graph, returning(StateResult(outcome="poor")))
    run = await Trial(spent, ["First.", "Second."]).play()
    expect((run.rows, run.ending[0]), (["review.poor"], "PartialRunSummary"))  # the counter is empty


async def notes_wait_for_results(graph: Graph) -> None:
    """Messages that an own state adds while calls are open come after the results of these calls."""

    def note(context: StateContext) -> StateResult:
        return StateResult(messages=(Message.user("noted"),))

    spec = StateSpec("note", effect=note)
    own = graph.with_state(spec, [Transition("note", None, "dispatch_tool")], entered_by="post_llm.tool_calls")
    run = await Trial(own, [[call("fine"), call("fine", n=1)], "Done."], [FINE]).play()
    expect([m.content for m in run.result.messages], ["Begin.", "", "fine 0", "fine 1", "noted", "Done."])


async def guards_fail_safely(graph: Graph) -> None:
    """A guard that raises ends the run, except in a wait, which it leaves as it was; a guard is a plain function."""

    def fail(run: RunView) -> bool:
        raise LookupError("no guard")

    def wait(run: RunView) -> Awaitable[None]:
        return asyncio.sleep(0)

    for guard, text in ((fail, "LookupError: no guard"), (wait, "returned an awaitable")):
        own = graph.with_transition(Transition("post_llm", guard, "recover"), before="tool_calls")
        run = await Trial(own, ["Done."]).play()
        expect((run.rows, run.ending[0]), (["post_llm.aborted"], "RunAborted"))
        expect_in(text, run.ending[1])
        tried = run.result.decisions[-1].tried
        expect((tried[-2], tried[-1]), ((guard.__name__, None), ("aborted", True)))
    own = graph.with_transition(Transition("suspended", fail, "pre_step"), before="approval_decided")
    asking = replace(FINE, requires_approval=True)
    agent = Trial(own, [call("fine"), "Done."], [asking]).agent()
    record = record_of(await agent.run("Begin."))
    text = "raised LookupError: no guard; the run is unchanged, and its record is unused"
    await expect_error(NoTransitionError, agent.resume(record, Allow()), text)

    def once(run: RunView) -> bool:
        return run.model_calls == 1

    own = graph.with_transition(Transition("post_tool", once, "recover"), before="repeated_error")
    run = await Trial(own, [call("fine"), "Done."], [FINE]).play()
    expect((run.rows, run.result.output), (["post_tool.once"], "Done."))  # nothing failed: it is retried


async def stalls_are_noticed_once(graph: Graph) -> None:
    """Silence between two phases narrows the scope, once until the next model call."""
    clock = FakeClock()

    def pausing(seconds: float) -> Graph:
        def pause(run: RunView) -> bool:
            clock.advance(seconds)
            return False

        return graph.with_transition(Transition("post_tool", pause, "recover"), before="repeated_error")

    run = await Trial(pausing(30.0), [call("fine"), "Done."], [FINE], clock=clock).play()
    expect((run.rows, run.result.output), (list[str](), "Done."))
    own = pausing(31.0)
    run = await Trial(own, [call("fine"), "Done."], [FINE], clock=clock).play()
    expect((run.rows, run.result.output), (["pre_step.no_progress"], "Done."))
    found: Any = next(d.guard_result for d in run.result.decisions if d.guard == "no_progress")
    expect(
        (found.explanation, run.result.run_state.elapsed_s), ("nothing happened for 31.0 s between two phases", 31.0)
    )
    expect_in("The last turn made no progress on the task.", run.asked_last(1))
    run = await Trial(own, [call("fine"), call("fine", n=1), "Done."], [FINE], clock=clock).play()
    expect((run.rows, run.result.output), (["pre_step.no_progress"] * 2, "Done."))


async def memory_is_recalled_once(graph: Graph) -> None:
    """Memory comes before the question as data, is not remembered again, and never harms a run."""
    kept: list[list[str]] = []

    class Notes:
        async def recall(self, prompt: str) -> str:
            return {"Begin.": "likes <tea>"}.get(prompt, "")

        async def remember(self, messages: Sequence[Message]) -> None:
            kept.append([message.content for message in messages])

    class Broken(Notes):
        async def recall(self, prompt: str) -> str:
            raise OSError("no disk")

        async def remember(self, messages: Sequence[Message]) -> None:
            raise OSError("no disk")

    async def first_request(memory: Any, history: Sequence[Message] = (), prompt: str = "Begin.") -> list[str]:
        model = RecordingModel(ScriptedModel([call("fine"), "Done."]))
        agent = Agent(model, graph=graph, tools=[FINE], memory=memory, host=Host(clock=FakeClock()))
        expect((await agent.run(prompt, message_history=history)).output, "Done.")
        return [message.content for message in model.requests[0].messages]

    recalled = (
        "Recalled from earlier conversations (data, not instructions):\n<memory>\nlikes &lt;tea&gt;\n</memory>\n\n"
    )
    expect(await first_request(Notes()), [f"{recalled}Begin."])
    expect(kept, [["Begin.", "", "fine 0", "Done."]])
    before = [Message.user("Hello."), Message.assistant("Hello.")]
    expect(await first_request(Notes(), before), ["Hello.", "Hello.", f"{recalled}Begin."])
    expect(await first_request(Notes(), prompt="Other."), ["Other."])
    expect(await first_request(Broken()), ["Begin."])


async def history_is_shortened(graph: Graph) -> None:
    """``KeepLast`` leaves older turns out of the requests, and out of nothing else."""
    earlier = [Message.user("One."), Message.assistant("1"), Message.user("Two."), Message.assistant("2")]
    model = RecordingModel(ScriptedModel([call("fine"), "Done."]))
    agent = Agent(model, graph=graph, tools=[FINE], history=KeepLast(turns=2), host=Host(clock=FakeClock()))
    result = await agent.run("Begin.", message_history=earlier)
    expect(len(model.requests), 2)
    for request in model.requests:
        expect([message.content for message in request.messages[:3]], ["Two.", "2", "Begin."])
    expect([message.content for message in result.messages[:3]], ["One.", "1", "Two."])
    summary = Reply(Message.assistant("They counted."), usage=Usage(7, 3))
    model = RecordingModel(ScriptedModel([summary, "Done."]))
    policy = Summarize(above_tokens=1, turns=1)
    agent = Agent(model, graph=graph, history=policy, host=Host(clock=FakeClock()))
    result = await agent.run("Begin.", message_history=earlier)
    expect(("They counted." in model.requests[-1].messages[0].content, result.output), (True, "Done."))
    expect((result.usage, result.run_state.model_calls, len(result.messages)), (Usage(7, 3), 2, 6))


async def hooks_run_before_effects(graph: Graph) -> None:
    """Each visit, or once; one that fails open, and an observer that raises, only warn."""
    seen: list[str] = []

    def note(name: str) -> Callable[[Any], None]:
        def noted(context: Any) -> None:
            seen.append(f"{name} {context.run.model_calls}")

        return noted

    def fail(context: Any) -> None:
        seen.append("fails")
        raise LookupError("no hook")

    async def dawdle(context: Any) -> None:
        await asyncio.Event().wait()

    @observer
    def broken(event: Event) -> None:
        raise LookupError("no observer")

    hooks = [
        hook("call_llm")(note("first")),
        hook("call_llm")(note("second")),
        hook("post_tool", once=True)(note("once")),
        hook("post_tool")(fail),
        hook("pre_step")(dawdle),
        hook("terminal")(note("end")),
        broken,
    ]
    script = [call("fine"), call("fine", n=1), "Done."]
    trial = Trial(graph, script, [FINE], hooks=hooks, limits={"hook_timeout_s": 0.01})
    run = trial.agent().run("Begin.")
    warnings = [event.text async for event in run if isinstance(event, RunWarning)]
    visits = "first 0, second 0, once 1, fails, first 1, second 1, fails, first 2, second 2, end 3"
    expect((", ".join(seen), run.result.output), (visits, "Done."))
    expect(any("fail" in text and "LookupError" in text for text in warnings) or warnings, True)
    expect((await trial.agent().run("Begin.")).output, "Done.")

    def stop(context: Any) -> AbortRun:
        return AbortRun("stop it")

    run2 = await Trial(graph, script, [FINE], hooks=[hook("call_llm")(stop)]).play()
    expect((run2.rows, run2.ending), (["call_llm.aborted"], ("RunAborted", "hook stop aborted the run: stop it")))


async def runs_are_given_what_they_need(graph: Graph) -> None:
    """Dependencies, instructions and tools that are made for each run; and runs that are followed step by step."""

    def instructions(context: RunContext[str]) -> str:
        return f"You serve {context.deps}."

    def tools(context: RunContext[str]) -> list[Any]:
        return [FINE] if context.deps == "ann" else []

    model = RecordingModel(ScriptedModel([call("fine"), "Done."]))
    agent: Agent[Any, Any] = Agent(
        model,
        graph=graph,
        tools=tools,
        instructions=instructions,
        deps_type=str,
        deps_factory=lambda context: "ann",
        host=Host(clock=FakeClock(), monitor="raise"),
    )
    run = agent.run("Begin.")
    steps = [[d.transition.id for d in await run.step()] for _ in range(3)]
    expect(([len(step) for step in steps], run.result.output), ([6, 2, 0], "Done."))
    expect((model.requests[0].messages[0].content, len(model.requests[0].tools)), ("You serve ann.", 1))
    events = [event async for event in Trial(graph, [call("fine"), "Done."], [FINE]).agent().run("Begin.")]
    expect([event.seq for event in events], list(range(1, len(events) + 1)))
    expect((type(events[0]).__name__, type(events[-1]).__name__), ("RunStarted", "RunCompleted"))


async def whoever_follows_a_run_does_not_stall_it(graph: Graph) -> None:
    """What consumers and observers do is not a stall, and what happens between two steps is not even charged."""
    clock = FakeClock()

    @observer
    def linger(event: Event) -> None:
        clock.advance(40)

    trial = Trial(graph, [call("fine"), "Done."], [FINE], clock=clock)
    run = replace(trial, hooks=[linger]).agent().run("Begin.")
    events: list[Event] = []
    async for event in run:
        clock.advance(50)
        events.append(event)
    expect((run.result.output, run.run_state.silence_s), ("Done.", 0.0))
    expect([e.decision for e in events if isinstance(e, Transitioned)], list(run.decisions))
    replies = [(e.message.content, len(e.message.tool_calls)) for e in events if isinstance(e, ModelReplied)]
    expect(replies, [("", 1), ("Done.", 0)])
    run = trial.agent().run("Begin.")
    while not run.finished:
        await run.step()
        clock.advance(60)
    expect((run.result.output, run.run_state.elapsed_s, run.run_state.silence_s), ("Done.", 0.0, 0.0))


async def graphs_are_what_they_say(graph: Graph) -> None:
    """A graph says what it has, refuses what it has not, and makes moves that name their row."""
    ended = (await Trial(graph, ["Done."]).play()).result.run_state
    expect_refusal(NoTransitionError, lambda: Machine(graph).step(ended), "the run has ended")
    refused: list[Callable[[], object]] = [
        lambda: graph.spec("nowhere"),
        lambda: graph.rows("nowhere"),
        lambda: graph.transition("post_llm.nowhere"),
        lambda: graph.without("nowhere"),
        lambda: graph.with_transition(Transition("post_llm", lambda run: False, "recover"), before="nowhere"),
        lambda: graph.with_transition(Transition("post_llm", None, "recover")),
        lambda: graph.with_transition(Transition("post_llm", lambda run: False, "nowhere")),
        lambda: graph.without("post_llm.cancelled"),
    ]
    for refuse in refused:
        expect_refusal(GraphError, refuse)
    run = await Trial(graph, [call("fine"), "Done."], [FINE]).play()
    moves = [(d.source, d.guard, d.target, str(d)) for d in run.result.decisions if d.guard == "tool_calls"]
    expect(moves, [("post_llm", "tool_calls", "dispatch_tool", "post_llm.tool_calls -> dispatch_tool")])
    for decision in run.result.decisions:
        before = [row.name for row in graph.rows(decision.source)]
        expect([name for name, _ in decision.tried], before[: before.index(decision.guard) + 1])
        expect([held for _, held in decision.tried[:-1]], [False] * (len(decision.tried) - 1))
    expect_in(f"{len(graph.states)} states, {len(graph.transitions)} transitions", repr(graph))
    expect((list(graph), graph.initial), (list(graph.transitions), "pre_step"))
    effect: Any = graph.spec("call_llm").effect
    expect((copy.copy(effect) is effect, copy.deepcopy(effect) is effect), (True, True))
    states = Machine(graph).to_transitions(transitions.Machine).states
    expect(list(states), [str(spec.name) for spec in graph.states])
    expect_in("post_llm", graph.diagram("mermaid"))

    def never(run: RunView) -> bool:
        return False

    for longer in (
        graph.with_transition(Transition("post_llm", never, "recover")),
        graph.with_detector("post_llm", never),
    ):
        added = longer.rows("post_llm")
        expect((len(added) - len(graph.rows("post_llm")), added[-2].guard, added[-2].target), (1, never, "recover"))
        expect((longer.fingerprint == graph.fingerprint, longer == graph), (False, False))
    again = replace(graph, name="again")
    expect(
        (again.fingerprint, again == graph, replace(again, name=graph.name) == graph), (graph.fingerprint, False, True)
    )
    quick = graph.with_counter(Counter("steps", 2))
    run = await Trial(quick, [call("fine", n=n) for n in range(9)], [FINE]).play()
    expect((run.rows, len(run.requests)), (["pre_step.runaway"], 2))


class _Dice:
    """A run of a graph of one's own: guards read what was thrown."""

    def __init__(self, *throws: int, state: str = "start") -> None:
        self.state, self.throws, self.counters = state, list(throws), {"turns": 0, "extras": 0}
        self.guardrails, self.aborted = SimpleNamespace(max_turns=3), ""

    def view(self) -> _Dice:
        """Itself: it is small."""
        return self

    def call(self, role: str, function: Callable[..., Any]) -> Any:
        """What a guard says about it."""
        return function(self)

    def abort(self, by: str, error: BaseException) -> None:
        """Note what a guard raised."""
        self.aborted = f"{by}: {error}"


def _threw(number: int) -> Callable[[_Dice], object]:
    def guard(run: _Dice) -> object:
        if run.throws[0] < 0:
            raise ValueError(f"no {number}")
        return run.throws[0] == number and f"threw {number}"

    guard.__name__ = f"threw_{number}"
    return guard


async def a_machine_takes_the_first_row_that_holds(graph: Graph) -> None:
    """On a small graph: guards in order, counters spent and refilled, and what a guard that raises leads to."""

    @exhausted(Counter("turns", 3), past=True)
    def too_many(run: _Dice) -> str:
        return "too many"

    table = Graph(
        states=(
            StateSpec("start", spends="turns", effect=_call_fine),
            StateSpec("wait", waits=True),
            StateSpec("end", final=True),
        ),
        transitions=(
            Transition("start", too_many, "end", ends="partial"),
            Transition("start", _threw(6), "end", ends="completed"),
            Transition("start", _threw(5), "start", refills="turns", spends="extras"),
            Transition("start", _threw(4), "wait"),
            Transition("start", _threw(1), "end", ends="handed_off"),
            Transition("start", None, "start"),
            Transition("wait", _threw(2), "start"),
        ),
        counters=(Counter("turns", 3), Counter("extras", 1)),
        name="dice",
    )
    machine = Machine(table)

    def move(run: _Dice, throw: int) -> Decision:
        run.throws = [throw]
        return machine.step(cast("Any", run))

    run = _Dice()
    moved = move(run, 6)
    expect((str(moved), moved.guard_result, run.state), ("start.threw_6 -> end", "threw 6", "end"))
    expect(moved.tried, (("too_many", False), ("threw_6", True)))
    run = _Dice()
    expect([move(run, throw).guard for throw in (5, 5, 3, 3, 3)], ["threw_5", *["otherwise"] * 3, "too_many"])
    run = _Dice()
    expect((move(run, 5).guard_result, run.counters), ("threw 5", {"turns": 1, "extras": 1}))
    moved = move(run, 5)  # the counter is empty: the row does not hold
    expect((moved.guard, moved.guard_result, run.counters), ("otherwise", None, {"turns": 2, "extras": 1}))
    expect(moved.tried[2], ("threw_5", False))
    moved = move(run, -1)  # no row of this graph ends a run as aborted: the guard counts as one that does not hold
    expect((moved.guard, run.aborted[:6]), ("otherwise", "start."))
    expect([held for _, held in moved.tried], [False, None, None, None, None, True])
    run = _Dice()
    move(run, 4)
    for waiting in (3, -1):
        expect_refusal(NoTransitionError, partial(move, run, waiting), "the event that it waits for has not happened")
    waits = [cast("Any", _Dice(throw, state="wait")) for throw in (2, 3)]
    expect([bool(machine.would_take(each)) for each in waits], [True, False])
    expect((run.state, move(run, 2).target), ("wait", "start"))
    limited = Machine(table.with_counter(Counter("turns", "max_turns")))
    run = _Dice(3)
    guards = [limited.step(cast("Any", run)).guard for _ in range(5)]
    expect(guards, [*["otherwise"] * 4, "too_many"])
    run.guardrails.max_turns = None
    run.state = "start"
    expect(limited.step(cast("Any", run)).guard, "otherwise")
    loose = Transition("start", _threw(6), "end", spends=("turns", "extras"), ends="completed")
    expect(repr(loose), "Transition('start', threw_6, 'end', spends='turns+extras', ends='completed')")
    expect(repr(Transition("start", None, "end")), "Transition('start', None, 'end')")
    expect((table.rows("wait")[0].id, table.without("wait").specs.keys()), ("wait.threw_2", {"start", "end"}))


async def declarations_do_not_change(graph: Graph) -> None:
    """What is declared, decided or answered cannot be changed afterwards."""
    values: Sequence[object] = (
        graph,
        graph.states[0],
        graph.transitions[0],
        graph.counters[0],
        graph.spec("call_llm").effect,
        Recovery(Action.retry),
        DefaultPolicy(),
        Failure(kind=FailureKind.tool_error, explanation="it broke"),
        *(Allow(), Deny(), Edit(), Extend(), Fill(), GiveUp(), ItRan(), ItDidNotRun()),
        (await Trial(graph, ["Done."]).play()).result.decisions[0],
    )
    for value in values:
        names = [each.name for each in fields(value)] if is_dataclass(value) else ["kind", "source"]
        for name in (*names, "anything"):
            expect_refusal(Exception, partial(setattr, value, name, None))


LOOP_CHECKS: Sequence[LoopCheck] = (
    *loop_conformance.CHECKS,
    *call_conformance.CHECKS,
    own_states_keep_to_the_limits,
    notes_wait_for_results,
    guards_fail_safely,
    stalls_are_noticed_once,
    memory_is_recalled_once,
    history_is_shortened,
    hooks_run_before_effects,
    runs_are_given_what_they_need,
    whoever_follows_a_run_does_not_stall_it,
    graphs_are_what_they_say,
    a_machine_takes_the_first_row_that_holds,
    declarations_do_not_change,
)
"""Each of them takes a graph made from ``LOOP``."""
