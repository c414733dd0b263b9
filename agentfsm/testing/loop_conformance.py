"""Conformance checks for the loop: its limits, model calls, replies, recoveries and cancellations.

Each check takes a graph made from ``LOOP``, runs agents of its own on it, with a scripted model and a clock that only
they advance, and compares what happened with what the rules say. ``graph_conformance`` has all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from agentfsm.agent import Agent
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.journal.store import consistent_read
from agentfsm.journal.verification import verify
from agentfsm.loop.events import (
    Handoff,
    PartialRunSummary,
    RunAborted,
    RunCancelled,
    RunCompleted,
    UserInputRequested,
)
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import Extend, HumanInput
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.recovery_policy import DefaultPolicy, Recovery
from agentfsm.loop.state import RunView
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.declaration import OTHERWISE
from agentfsm.machine.graph import Graph
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import tool
from agentfsm.testing.fakes import FakeClock, RecordingModel, ScriptedModel, call

LoopCheck = Callable[[Graph], Coroutine[Any, Any, None]]

_USUAL = (OTHERWISE, "tool_calls", "calls_pending")
"""The names of rows that a run without any incident takes."""

SECRET = b"of a conformance check"

_NO_ROWS: list[str] = []
"""The other rows that such a run takes."""


def expect(found: object, expected: object) -> None:
    """Like ``assert found == expected``, also under ``python -O``.

    Raises:
        AssertionError: They differ.
    """
    if found != expected:
        raise AssertionError(f"expected {expected!r}, and found {found!r}")


def expect_in(part: str, text: str) -> None:
    """Like ``assert part in text``, also under ``python -O``.

    Raises:
        AssertionError: It is not.
    """
    if part not in text:
        raise AssertionError(f"expected {part!r} in {text!r}")


def expect_refusal(expected: type[Exception], function: Callable[[], object], text: str = "") -> None:
    """Call a function that must raise an error with a text.

    Raises:
        AssertionError: It does not, or the error does not contain the text.
    """
    try:
        function()
    except expected as error:
        expect_in(text, str(error))
        return
    raise AssertionError(f"{expected.__name__} was not raised")


async def expect_error(expected: type[BaseException], awaitable: Awaitable[object], text: str = "") -> None:
    """Await something that must raise an error with a text.

    Raises:
        AssertionError: It does not, or the error does not contain the text.
    """
    try:
        await awaitable
    except expected as error:
        expect_in(text, str(error))
        return
    raise AssertionError(f"{expected.__name__} was not raised")


def record_of(result: RunResult[Any]) -> SuspensionRecord:
    """The record of a run that waits for a person.

    Raises:
        AssertionError: It does not.
    """
    if isinstance(result.outcome, UserInputRequested):
        return result.outcome.suspension_record
    raise AssertionError(f"expected a run that waits, and found {result.outcome!r}")


def tool_results(messages: Iterable[Message]) -> list[str]:
    """The results of the tool calls in a transcript, as the model gets them."""
    return [message.content for message in messages if message.role is Role.TOOL]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What one run did.

    Attributes:
        result: Its result.
        waits: What each suspension asked: its kind and its question.
        requests: The requests to the model.
        clock: Its clock.
    """

    result: RunResult[Any]
    waits: list[tuple[str, str]]
    requests: list[ModelRequest]
    clock: FakeClock
    rows: list[str]

    @property
    def results(self) -> list[str]:
        """The results of its tool calls, as the model gets them."""
        return tool_results(self.result.messages)

    @property
    def ending(self) -> tuple[str, str]:
        """How it ended: the class of its last event, and what that says of the reason."""
        match self.result.outcome:
            case RunCompleted() as end:
                return "RunCompleted", str(end.output)
            case Handoff() as end:
                return "Handoff", end.rationale
            case PartialRunSummary() as end:
                return "PartialRunSummary", end.missing
            case RunCancelled() | RunAborted() as end:
                return type(end).__name__, end.reason
            case other:
                return type(other).__name__, ""

    def asked_last(self, request: int) -> str:
        """The last message of a request to the model.

        Raises:
            AssertionError: There is no such request.
        """
        if request >= len(self.requests):
            raise AssertionError(f"expected more than {request} requests to the model, and found {len(self.requests)}")
        return self.requests[request].messages[-1].content


@dataclass(frozen=True, slots=True)
class Trial:
    """An agent on a graph and what the world does about it.

    Attributes:
        graph: The graph.
        script: What the model replies, as for ``ScriptedModel``.
        tools: Its tools.
        answers: What a person answers, one for each suspension.
        limits: Its guardrails, where they are not the usual ones.
        policy: Its recovery policy.
        hooks: Its hooks.
        preset: Its preset.
        clock: The clock, for tools that advance it.
        store: Its store; by default none, or one for ``play`` that is compared with the run.
        host: Another host, which has a clock and a store of its own.
    """

    graph: Graph
    script: Sequence[Any]
    tools: Any = ()
    answers: Sequence[HumanInput] = ()
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    policy: Any = None
    hooks: Iterable[Any] = ()
    preset: str = "standard"
    clock: FakeClock = field(default_factory=FakeClock)
    store: MemoryStore | None = None
    host: Host | None = None

    def agent(self) -> Agent[Any, Any]:
        """The agent."""
        return Agent(
            RecordingModel(ScriptedModel(self.script)),
            graph=self.graph,
            tools=self.tools,
            guardrails=AgentGuardrails.model_validate(self.limits) if self.limits else None,
            policy=self.policy,
            hooks=self.hooks,
            preset=self.preset,
            host=self.host or Host(clock=self.clock, secret=SECRET, seed=1, store=self.store),
        )

    async def play(self, agent: Agent[Any, Any] | None = None) -> TrialRun:
        """Run it to its end, or until nobody answers any more."""
        store = self.store or MemoryStore()
        if agent is None:
            agent = replace(self, store=store).agent()
        model: Any = agent.model
        result = await agent.run("Begin.", run_id="trial")
        taken, waits = list(result.decisions), list[tuple[str, str]]()
        answers = iter(self.answers)
        while isinstance(result.outcome, UserInputRequested):
            waits.append((result.outcome.kind, result.outcome.question))
            answer = next(answers, None)
            if answer is None:
                break
            result = await agent.resume("trial" if agent.config.host.store else record_of(result), answer)
            taken += result.decisions
        if self.store is None and agent.config.host.store is store:
            await require_same_in_journal(store, result)
        rows = [each.transition.id for each in taken if each.transition.name not in _USUAL]
        return TrialRun(result, waits, model.requests, self.clock, rows)


_UNFINISHED = 4
"""The code of the verification of a run that has not ended."""


async def require_same_in_journal(store: MemoryStore, result: RunResult[Any]) -> None:
    """Require that the journal of a run is whole, and tells everything that the run knows."""
    records, head = await consistent_read(store, result.run_id)
    verification = verify(result.run_id, records, head)
    suspended = isinstance(result.outcome, UserInputRequested)
    expect((verification.code, verification.reason), (_UNFINISHED if suspended else 0, ""))
    stored = RehydratedRun()
    for record in records:
        stored.add(record)
    for name in dict.fromkeys(each.name for each in fields(stored.run)):
        found, expected = getattr(stored.run, name), getattr(result.run_state, name)
        if found != expected:
            raise AssertionError(f"{name} is {expected!r}, and {found!r} in the journal")


def _sleeper(clock: FakeClock) -> Callable[[float], str]:
    def work(seconds: float) -> str:
        """Take so many seconds."""
        clock.advance(seconds)
        return f"worked {seconds:g} s"

    return work


def _fine(n: int = 0) -> str:
    """Always succeed."""
    return f"fine {n}"


FINE = tool(name="fine")(_fine)


def _calls(count: int) -> list[Any]:
    return [call("fine", n=n) for n in range(count)]


# -- limits -----------------------------------------------------------------------------------------------


async def model_calls_are_limited(graph: Graph) -> None:
    """N iterations are N model calls; an answer restarts the count, as often as ``max_continues`` says."""
    limits = {"max_iterations": 2, "max_continues": 1}
    for on_limit, row, ending in (("stop", "stop", "PartialRunSummary"), ("handoff", "handoff", "Handoff")):
        run = await Trial(graph, _calls(9), [FINE], limits={**limits, "on_limit": on_limit}).play()
        expect((len(run.requests), run.rows), (2, ["pre_step.iteration_limit", f"recover.{row}"]))
        expect(run.ending[0], ending)
    run = await Trial(graph, _calls(9), [FINE], ["Go on."] * 9, limits).play()
    asked = ["pre_step.iteration_limit", "recover.ask_user"]
    expect(run.rows, [*asked, "suspended.replied", "pre_step.iteration_limit", "recover.stop"])
    expect((len(run.requests), run.ending[0]), (4, "PartialRunSummary"))
    question = "The run has used up its model calls (2 of 2 model calls are used up). How should it continue?"
    expect(run.waits, [("limit", question)])
    expect(run.result.messages[-1].role, Role.TOOL)
    expect([m.content for m in run.result.messages if m.role is Role.USER], ["Begin.", "Go on."])
    run = await Trial(graph, _calls(9), [FINE], [Extend(model_calls=1)], limits).play()
    expect(len(run.requests), 3)


async def time_is_limited(graph: Graph) -> None:
    """Active time counts, waiting for a person does not, and the rest of a batch is not run when it is up."""
    clock = FakeClock()
    work, limits = _sleeper(clock), {"max_execution_time_s": 10.0, "on_limit": "stop"}
    run = await Trial(graph, [call("work", seconds=6)] * 9, [work], limits=limits, clock=clock).play()
    expect((len(run.requests), run.rows), (2, ["pre_step.time_limit", "recover.stop"]))
    expect(run.ending, ("PartialRunSummary", "a final answer: 12 s of 10 s are used up"))
    batch = [call("work", seconds=s) for s in (4, 6, 1)]
    run = await Trial(graph, [batch], [work], limits=limits, clock=clock).play()
    expect(run.results, ["worked 4 s", "worked 6 s", "Not run: time_limit (10 s of 10 s are used up)."])
    run = await Trial(graph, [[*batch[:1], *batch[2:]], "Done."], [work], limits=limits, clock=clock).play()
    expect((run.results, run.ending), (["worked 4 s", "worked 1 s"], ("RunCompleted", "Done.")))
    limits["on_limit"] = "ask_user"
    trial = Trial(graph, [call("work", seconds=10), call("work", seconds=9), "Done."], [work], clock=clock)
    agent = replace(trial, limits=limits).agent()
    waiting = await agent.run("Begin.")
    clock.advance(1_000)
    ended = await agent.resume(record_of(waiting), "Go on.")
    expect((ended.output, round(ended.run_state.elapsed_s)), ("Done.", 9))


async def a_last_turn_is_granted(graph: Graph) -> None:
    """With ``finalize_grace_s`` there is one last turn, in which the model is told how to answer."""
    clock = FakeClock()
    work, late = _sleeper(clock), call("work", seconds=10)
    limits = {"max_execution_time_s": 10.0, "finalize_grace_s": 5.0, "on_limit": "stop"}
    told = (
        "worked 10 s\n\nThe time for this task is over. This is your last turn: give your best answer now, and do not "
        "call any more tools."
    )
    run = await Trial(graph, [late, "My best."], [work], limits=limits, clock=clock).play()
    expect((run.asked_last(1), run.rows, run.ending), (told, _NO_ROWS, ("RunCompleted", "My best.")))
    run = await Trial(graph, [late, late, late], [work], limits=limits, clock=clock).play()
    expect((len(run.requests), run.rows), (2, ["pre_step.time_limit", "recover.stop"]))
    run = await Trial(graph, [call("work", seconds=9), "Done."], [work], limits=limits, clock=clock).play()
    expect(run.asked_last(1), "worked 9 s")


async def tokens_and_cost_are_limited(graph: Graph) -> None:
    """What all model calls use together is limited; an answer grants as much again, or the amount that it names."""

    def turn(tokens: int, usd: float) -> Reply:
        return Reply(Message.assistant("", (call("fine", "c"),)), usage=Usage(tokens - 1, 1, cost_usd=usd))

    for limits, used, amount in (
        ({"max_tokens": 100}, "100 of 100 tokens are used up", Extend(tokens=50)),
        ({"max_cost_usd": 1.0}, "1 of 1 USD are used up", Extend(usd=0.5)),
    ):
        limit = f"pre_step.{'token' if 'max_tokens' in limits else 'cost'}_limit"
        script = [_with_id(turn(50, 0.5), str(n)) for n in range(9)]
        run = await Trial(graph, script, [FINE], limits={**limits, "on_limit": "stop"}).play()
        expect((len(run.requests), run.rows), (2, [limit, "recover.stop"]))
        expect(run.ending, ("PartialRunSummary", f"a final answer: {used}"))
        once = {**limits, "max_continues": 1}
        run = await Trial(graph, script, [FINE], ["Go on."], once).play()
        expect((len(run.requests), run.rows[-1]), (4, "recover.stop"))
        run = await Trial(graph, script, [FINE], [amount], once).play()
        expect((len(run.requests), run.rows[-1]), (3, "recover.stop"))
        two = replace(script[0], message=Message.assistant("", (call("fine", "a"), call("fine", "b"))))
        big = replace(two, usage=Usage(199, 1, cost_usd=2.0))
        run = await Trial(graph, [big], [FINE], limits={**limits, "on_limit": "stop"}).play()
        expect(run.results[1].startswith("Not run: "), True)
        expect(run.result.usage, Usage(199, 1, cost_usd=2.0))


def _with_id(reply: Reply, id_: str) -> Reply:
    calls = tuple(replace(each, id=id_) for each in reply.message.tool_calls)
    return replace(reply, message=replace(reply.message, tool_calls=calls))


class Stubborn(DefaultPolicy):
    """A policy that always tries again."""

    def decide(self, failure: Failure, state: Any) -> Action:
        """Retry, whatever has failed."""
        return Action.retry


async def no_run_spins(graph: Graph) -> None:
    """Whatever a policy or a graph does, ``max_steps`` and ``max_moves`` end the run."""
    limits = {"max_iterations": 1, "max_steps": 3}
    run = await Trial(graph, ["", "", ""], policy=Stubborn(), limits=limits).play()
    expect((run.rows[-1], run.ending[0]), ("pre_step.runaway", "PartialRunSummary"))
    expect(run.rows.count("pre_step.iteration_limit"), 2)
    expect(run.result.run_state.steps, 4)
    for moves in (1, 7, 8, 9, 10, 20):
        run = await Trial(graph, _calls(9), [FINE], limits={"max_moves": moves}).play()
        made, text = len(run.result.decisions), f"the run has made {moves} moves without an end or a wait"
        expect((made, run.ending[0], text in run.ending[1]), (moves + 1, "RunAborted", True))
    run = await Trial(graph, [*_calls(3), "Done."], [FINE], limits={"max_moves": 30}).play()
    expect(run.ending, ("RunCompleted", "Done."))


async def too_many_calls_are_not_run(graph: Graph) -> None:
    """``max_calls_per_reply`` calls of a reply are run; the others get a result that says why not."""
    run = await Trial(graph, [_calls(3), "Done."], [FINE], limits={"max_calls_per_reply": 2}).play()
    text = "Not run: only the first 2 calls of a message are run. Make this call again in your next message."
    expect(run.results, ["fine 0", "fine 1", text])
    run = await Trial(graph, [_calls(2), "Done."], [FINE], limits={"max_calls_per_reply": 2}).play()
    expect(run.results, ["fine 0", "fine 1"])


# -- the model --------------------------------------------------------------------------------------------


async def provider_failures_are_retried(graph: Graph) -> None:
    """Transient failures are repeated after 2, 4 and 8 seconds, then handed off; others are handed off at once."""
    busy = TransientProviderError("busy")
    run = await Trial(graph, [busy] * 9).play()
    expect((run.clock.slept, run.rows[-1]), ([2.0, 4.0, 8.0], "recover.handoff"))
    expect((run.rows.count("call_llm.transient_provider"), run.ending[0]), (4, "Handoff"))
    run = await Trial(graph, [busy, call("fine"), busy, "Done."], [FINE]).play()
    expect((run.clock.slept, run.ending), ([2.0, 2.0], ("RunCompleted", "Done.")))
    run = await Trial(graph, [TransientProviderError("busy", retry_after_s=20), "Done."]).play()
    expect((run.clock.slept, run.ending[0]), ([20.0], "RunCompleted"))
    run = await Trial(graph, [TransientProviderError("busy", retry_after_s=1), "Done."]).play()
    expect(run.clock.slept, [2.0])
    limits = {"max_execution_time_s": 10.0}
    for wait, ending in ((10.0, "Handoff"), (9.5, "RunCompleted")):
        run = await Trial(graph, [TransientProviderError("busy", retry_after_s=wait), "Done."], limits=limits).play()
        expect((run.clock.slept, run.ending[0]), ([9.5] if ending == "RunCompleted" else [], ending))
    run = await Trial(graph, [ProviderError("no such model")]).play()
    expect((run.rows, run.ending[0]), (["call_llm.provider_error", "recover.handoff"], "Handoff"))
    patient = DefaultPolicy(budgets={FailureKind.transient_provider: 7})
    run = await Trial(graph, [busy] * 9, policy=patient).play()
    expect(run.clock.slept, [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0])


async def jitter_is_repeatable(graph: Graph) -> None:
    """Jitter adds at most its share to a wait, and the same share each time."""
    waits: list[list[float]] = []
    for _ in range(2):
        run = await Trial(
            graph, [TransientProviderError("busy")] * 2 + ["Done."], policy=DefaultPolicy(jitter=0.5)
        ).play()
        waits.append(run.clock.slept)
    expect([len(each) for each in waits], [2, 2])
    first, second = waits[0]
    expect((2 < first <= 3, 4 < second <= 6, second == 2 * first), (True, True, False))
    expect(waits[1], waits[0])


async def long_prompts_are_shortened(graph: Graph) -> None:
    """After ``context_overflow`` older tool results are left out once; a second one in a row is handed off."""
    full = ContextOverflowError("too long")
    script = [*_calls(4), full, "Done."]
    run = await Trial(graph, script, [FINE]).play()
    expect(len(run.requests), 6)
    left_out = "[An older tool result, left out because the conversation had grown too long.]"
    sent = tool_results(run.requests[-1].messages)
    expect((sent[:2], sent[2]), ([left_out, left_out], "fine 2"))
    expect_in("The conversation had grown too long", sent[3])
    expect(run.results, ["fine 0", "fine 1", "fine 2", "fine 3"])
    run = await Trial(graph, [full, full], [FINE]).play()
    expect(run.rows, ["call_llm.context_overflow", "call_llm.context_overflow", "recover.handoff"])


async def a_policy_decides(graph: Graph) -> None:
    """What a policy decides is done, in its own words; what is not a decision ends the run and names it."""

    class Own:
        def __init__(self, decided: Any, wait: float = 0.0) -> None:
            self.decided, self.wait = decided, wait

        def retry_budget(self, kind: FailureKind) -> int:
            return 0

        def backoff(self, kind: FailureKind, attempt: int) -> float:
            return self.wait

        def decide(self, failure: Failure, state: Any) -> Any:
            return self.decided(state) if callable(self.decided) else self.decided

    def broken() -> str:
        """Always fail."""
        raise ValueError("no luck")

    script = [call("broken"), "Done."]
    run = await Trial(graph, script, [broken], policy=Own(Recovery(Action.retry, instruction="Mind the gap."))).play()
    expect_in("\n\nMind the gap.\n\n<context_addendum>", run.asked_last(1))
    question = Recovery(Action.ask_user, instruction="Mind the gap.", question="What now?")
    run = await Trial(graph, script, [broken], ["Try."], policy=Own(question)).play()
    expect((run.waits, "Mind the gap." in run.asked_last(1)), ([("question", "What now?")], True))
    run = await Trial(graph, ["", "Done."], policy=Own(Recovery(Action.retry, instruction="Speak up."))).play()
    expect(run.asked_last(1).startswith("Speak up.\n\n"), True)
    run = await Trial(graph, ["", "Done."], policy=Own(Recovery(Action.narrow_scope, instruction="Go slow."))).play()
    expect(run.asked_last(1).startswith("Go slow.\n\n"), True)

    def meddle(state: Any) -> Action:
        state.iterations = 0
        return Action.retry

    def fail(state: Any) -> Action:
        raise LookupError("nobody knows")

    for decided, text in (
        ("whatever", "policy Own raised ValueError"),
        (fail, "policy Own raised LookupError: nobody knows"),
        (meddle, "tried to change the run: set 'iterations' of the run"),
    ):
        run = await Trial(graph, script, [broken], policy=Own(decided)).play()
        expect((run.ending[0], run.rows[-1]), ("RunAborted", "recover.aborted"))
        expect_in(text, run.ending[1])
    run = await Trial(graph, script, [broken], policy=Own(Action.retry, float("nan"))).play()
    expect_in("a backoff must be a finite number of seconds", run.ending[1])
    run = await Trial(graph, script, [broken], policy=Own(Action.retry, 3.5)).play()
    expect((run.clock.slept, run.ending), ([3.5], ("RunCompleted", "Done.")))
    number: Any = 3
    expect_refusal(TypeError, lambda: Recovery(Action.retry, instruction=number))
    expect_refusal(TypeError, lambda: Recovery(Action.retry, question=number))


async def models_may_misbehave(graph: Graph) -> None:
    """A model that returns no reply is not a provider that a retry could help; one that is slow is tried again."""

    class Wrong:
        name = "wrong"

        async def reply(self, request: ModelRequest) -> Any:
            return 3

    run = await Agent(cast("Any", Wrong()), graph=graph, host=Host(clock=FakeClock())).run("Begin.")
    expect([d.transition.id for d in run.decisions[1:]], ["call_llm.provider_error", "recover.handoff"])

    async def dawdle(messages: Any) -> str:
        await asyncio.Event().wait()
        return ""

    slow = await Trial(graph, [dawdle, "Done."], limits={"llm_timeout_s": 0.02, "cancel_grace_s": 0.02}).play()
    expect((slow.rows, slow.result.output), (["call_llm.transient_provider"], "Done."))


# -- replies ----------------------------------------------------------------------------------------------


async def truncated_replies_are_continued(graph: Graph) -> None:
    """A truncated reply is repeated under a limit twice as high, or else continued; its calls are not run."""

    def cut(text: str, *calls: ToolCall) -> Reply:
        return Reply(Message.assistant(text, calls), FinishReason.LENGTH)

    begun = "Your last message was truncated by its token limit, and none of its calls was run. "
    run = await Trial(graph, [cut("The be"), "The beginning."], limits={"max_output_tokens": 100}).play()
    expect([request.max_output_tokens for request in run.requests], [100, 200])
    expect((run.asked_last(1).startswith(begun), run.ending[1]), (True, "The beginning."))
    at_most = {"max_output_tokens": 100, "max_output_tokens_limit": 150}
    two = DefaultPolicy(budgets={FailureKind.output_truncated: 2})
    run = await Trial(graph, [cut("The be"), cut("The be"), "ginning."], limits=at_most, policy=two).play()
    expect([request.max_output_tokens for request in run.requests], [100, 150, 150])
    expect((begun + "Continue exactly where it stopped" in run.asked_last(2), run.ending[1]), (True, "The beginning."))
    run = await Trial(graph, [cut("The be"), "ginning."]).play()
    expect((run.rows, run.ending), (["post_llm.output_truncated"], ("RunCompleted", "The beginning.")))
    run = await Trial(graph, [cut("Now: ", call("fine", "c")), "Done."], [FINE]).play()
    expect(run.results, ["Not run: the message was truncated before this call was complete."])
    expect_in("Make the call again, with shorter arguments.", run.asked_last(1))
    narrow = DefaultPolicy(actions={FailureKind.output_truncated: Action.narrow_scope})
    run = await Trial(graph, [cut("The be"), "Anew."], policy=narrow).play()
    expect((run.rows, run.ending[1]), (["post_llm.output_truncated"], "Anew."))
    run = await Trial(graph, [cut("The be"), "", "Anew."]).play()
    expect((run.rows, run.ending[1]), (["post_llm.output_truncated", "post_llm.no_progress"], "Anew."))
    run = await Trial(graph, [cut("The be"), cut("ginn")]).play()
    expect((run.rows[-1], run.ending[0]), ("recover.handoff", "Handoff"))


async def refusals_and_silence(graph: Graph) -> None:
    """A refusal is handed off with its text; an empty reply narrows the scope once, then is handed off."""
    for reply in (
        Reply(Message.assistant("I must not."), FinishReason.REFUSAL),
        Reply(Message.assistant("I must not."), FinishReason.CONTENT_FILTER),
        Reply(Message.assistant(""), refusal=" I must not. "),
    ):
        run = await Trial(graph, [reply]).play()
        expect(run.rows, ["post_llm.output_refused", "recover.handoff"])
        outcome: Any = run.result.outcome
        expect((run.ending[0], outcome.blockers), ("Handoff", ("I must not.",)))
    bare = graph.without("post_llm.output_truncated", "post_llm.output_refused")
    cut_off = Reply(Message.assistant("I mu"), FinishReason.LENGTH)
    for reply in (cut_off, Reply(Message.assistant(""), refusal="I must not.")):
        run = await Trial(bare, [reply, "Done."]).play()
        expect((run.rows, run.ending[1]), (["post_llm.output_malformed"], "Done."))
    run = await Trial(graph, [" \n", "Done."]).play()
    expect((run.rows, run.ending[1]), (["post_llm.no_progress"], "Done."))
    expect_in("The last turn made no progress on the task.", run.asked_last(1))
    run = await Trial(graph, ["", ""]).play()
    expect(run.rows[-1], "recover.handoff")
    run = await Trial(graph, ["", call("fine"), "", "Done."], [FINE]).play()
    expect((run.rows, run.ending[1]), (["post_llm.no_progress"] * 2, "Done."))


async def a_refused_text_is_explained(graph: Graph) -> None:
    """A text that a detector of one's own finds fault with is given again, and the model is told why."""

    def rude(run: RunView) -> Failure | None:
        text = "" if run.reply is None else run.reply.message.content
        return Failure(kind=FailureKind.tool_error, explanation="it is rude") if text == "No." else None

    own = graph.with_detector("post_llm", rude)
    run = await Trial(own, ["No.", "Yes."]).play()
    expect((run.rows, run.result.output), (["post_llm.rude"], "Yes."))
    expect_in("The last step failed: ", run.asked_last(1))
    expect_in("it is rude", run.asked_last(1))
    run = await Trial(own, [call("fine"), "No.", "Yes."], [FINE]).play()
    expect(("The last step failed: " in run.asked_last(2), run.result.output), (True, "Yes."))


async def answers_have_their_type(graph: Graph) -> None:
    """An answer that does not have the output type, or that a validator refuses, is given again, twice at most."""

    def positive(context: Any, answer: int) -> int:
        if answer < 0:
            raise ValueError("it must not be negative")
        return answer * 10

    def agent(*script: Any) -> Agent[Any, Any]:
        model = RecordingModel(ScriptedModel(script))
        return Agent(model, graph=graph, output_type=int, output_validators=[positive], host=Host(clock=FakeClock()))

    run = await Trial(graph, ()).play(agent("many", "-3", "4"))
    expect((run.rows, run.result.output), (["post_llm.output_malformed"] * 2, 40))
    expect_in("Your last message could not be read: ", run.asked_last(1))
    text = "Your last answer was checked and refused: it must not be negative. Correct it, and give the whole answer"
    expect((text in run.asked_last(2), run.asked_last(2).count("could not be read")), (True, 0))
    run = await Trial(graph, ()).play(agent("many", "many", "many"))
    expect((run.rows[-1], run.ending[0]), ("recover.handoff", "Handoff"))


NOT_REACHED = "Not run: the message was discarded before this call was reached."


async def repeated_calls_are_noticed(graph: Graph) -> None:
    """Equal calls with equal results: noted from the second on, and not run a sixth time."""
    same = call("fine", n=1)
    run = await Trial(graph, [same] * 6, [FINE]).play()
    expect(run.rows, ["post_llm.loop_detected", "recover.ask_user"])
    notes = [f"fine 1\n[Note: this exact call has now been made {n} times with this same result.]" for n in range(2, 6)]
    expect(run.results, ["fine 1", *notes])
    question = (
        "The agent repeats itself: the same call of 'fine' came 6 times among the last 20 calls. What should it do "
        "instead?"
    )
    expect(run.waits, [("question", question)])
    found: Any = next(d.guard_result for d in run.result.decisions if d.guard == "loop_detected")
    expect((found.metadata["count"], found.metadata["signature"].partition(":")[0]), (6, "fine"))
    run = await Trial(graph, [*[same] * 6, *[same] * 5, "Done."], [FINE], ["Try again."]).play()
    expect((run.rows, run.ending[1]), (["post_llm.loop_detected", "recover.ask_user", "suspended.replied"], "Done."))
    counted = iter(range(99))

    def count(n: int) -> int:
        """Return another number each time."""
        return next(counted)

    run = await Trial(graph, [*[call("count", n=1)] * 9, "Done."], [count]).play()
    expect((run.rows, run.results), (_NO_ROWS, [str(n) for n in range(9)]))
    spread = [each for n in range(6) for each in (same, *[call("fine", n=10 * n + i) for i in range(2, 6)])]
    run = await Trial(graph, [*spread, "Done."], [FINE]).play()
    expect(run.rows, [])  # the first of them are out of the window of 20
    run = await Trial(graph, [[same] * 6, "Done."], [FINE], ["Stop."]).play()
    expect((run.rows[0], set(run.results)), ("post_llm.loop_detected", {NOT_REACHED}))
    mixed = [[same, call("fine", n=2)]] * 5
    run = await Trial(graph, [*mixed, [call("fine", n=3), same]], [FINE]).play()
    expect(run.rows[0], "post_llm.loop_detected")
    limits = {"loop_hard_threshold": 3, "loop_window": 3}
    run = await Trial(graph, [same, same, same], [FINE], limits=limits).play()
    expect((run.rows[0], len(run.results)), ("post_llm.loop_detected", 2))


# -- failures of tools -------------------------------------------------------------------------------------


async def each_failure_has_its_action(graph: Graph) -> None:
    """What a tool reports decides what is done: it is retried, narrowed, asked about or handed off."""

    def report(kind: str, as_value: bool = False) -> Any:
        """Fail with a kind."""
        if as_value:
            return Failure(kind=FailureKind(kind), explanation="it broke", blockers=("a wall",), metadata={"a": 1})
        raise ToolError("it broke", kind=kind, blockers=("a wall",))

    for as_value in (False, True):
        said = "it broke" if as_value else "report: it broke"
        for kind, row in (
            ("tool_error", ""),
            ("environment_error", ""),
            ("scope_too_large", ""),
            ("kernel_invalidated", ""),
            ("ambiguous_input", "recover.ask_user"),
            ("capability_gap", "recover.handoff"),
            ("policy_violation", "recover.handoff"),
        ):
            run = await Trial(graph, [call("report", kind=kind, as_value=as_value), "Done."], [report]).play()
            expect(run.rows, [f"post_tool.{kind}", *([row] if row else [])])
            if row != "recover.ask_user":
                expect(run.results, ["it broke"])
            if row == "recover.handoff":
                outcome: Any = run.result.outcome
                expect((said in outcome.rationale, outcome.blockers), (True, ("a wall",)))
            if row == "recover.ask_user":
                expect(run.waits, [("question", f"The request is not clear enough: {said}. What is meant?")])
        run = await Trial(graph, [call("report", kind="loop_detected", as_value=as_value), "Done."], [report]).play()
        expect(run.rows[0], "post_tool.tool_error")  # no tool may report that kind
    narrowed = call("report", kind="scope_too_large")
    run = await Trial(graph, [narrowed, narrowed], [report]).play()
    expect(run.rows, ["post_tool.scope_too_large"] * 2 + ["recover.handoff"])
    expect_in("Pick the smallest next step that helps", run.asked_last(1))
    batch = [call("report", kind="tool_error"), call("report", kind="capability_gap"), call("fine")]
    run = await Trial(graph, [batch], [report, FINE]).play()
    expect(run.rows, ["post_tool.capability_gap", "recover.handoff"])
    found: Any = next(d.guard_result for d in run.result.decisions if d.transition.name == "capability_gap")
    expect(found.metadata["others"], {"tool_error": "report: it broke"})


async def equal_errors_open_the_breaker(graph: Graph) -> None:
    """Five batches in a row with the same error are handed off; a success, or another error, starts over."""
    salts = iter(range(99))  # equal calls with equal results would be a loop

    def broken(n: int, salt: int) -> str:
        """Fail, with a number in the error."""
        raise ValueError(f"no  luck {n}")

    patient = DefaultPolicy(budgets={FailureKind.tool_error: 99})

    def fails(times: int, n: int = 0) -> list[Any]:
        return [call("broken", n=n, salt=next(salts)) for _ in range(times)]

    async def rows(*script: Any) -> list[str]:
        return (await Trial(graph, [*script, "Done."], [broken, FINE], policy=patient).play()).rows

    expect(await rows(*fails(4)), ["post_tool.tool_error"] * 4)
    run = await Trial(graph, fails(9), [broken], policy=patient).play()
    expect(run.rows, [*["post_tool.tool_error"] * 4, "post_tool.repeated_error", "recover.handoff"])
    outcome: Any = run.result.outcome
    text = "ValueError: no luck 0"
    expect(
        (outcome.rationale, outcome.blockers), (f"'broken' failed 5 times in a row in the same way: {text}", (text,))
    )
    expect(len(await rows(*fails(4), call("fine"), *fails(4))), 8)
    expect(len(await rows(*fails(4), *fails(1, n=1), *fails(4))), 9)
    expect(len(await rows(*[fails(2) for _ in range(4)])), 4)  # equal errors of one batch are one
    expect((await rows(*[fails(2) for _ in range(5)]))[-1], "recover.handoff")
    expect(len(await rows(*fails(4), "", *fails(1))), 6)
    run = await Trial(graph, [*fails(9), "Done."], [broken], policy=Stubborn()).play()
    expect([row.partition(".")[2] for row in run.rows], [*["tool_error"] * 4, "repeated_error", *["tool_error"] * 4])


async def retryable_tools_are_run_again(graph: Graph) -> None:
    """Idempotent, retryable tools are run again unchanged, once; nothing else is run twice."""
    starts: list[str] = []

    def make(name: str, *, retryable: bool, failures: int) -> Any:
        left = [failures]

        def function() -> str:
            """Fail so many times."""
            starts.append(name)
            left[0] -= 1
            if left[0] >= 0:
                raise ValueError("no luck")
            return f"{name} is done"

        return tool(name=name, idempotent=retryable, retryable=retryable)(function)

    async def play(*tools: Any, limits: Mapping[str, Any] | None = None) -> TrialRun:
        starts.clear()
        batch = [call(each.name) for each in tools]
        return await Trial(graph, [batch, "Done."], tools, limits=limits or {}).play()

    run = await play(make("again", retryable=True, failures=1), FINE)
    expect((run.rows, starts), (["post_tool.tool_error", "recover.retry_tool"], ["again", "again"]))
    expect((run.results, len(run.requests)), (["again is done", "fine 0"], 2))
    expect(run.asked_last(1), "fine 0")  # what succeeded in the end is not a lesson
    run = await play(make("again", retryable=True, failures=9))
    expect(run.rows, ["post_tool.tool_error", "recover.retry_tool", "post_tool.tool_error"])
    expect((len(starts), run.results), (2, ["ValueError: no luck"]))
    run = await play(make("again", retryable=True, failures=9), limits={"max_tool_retries": 2})
    expect(len(starts), 3)
    run = await play(make("once", retryable=False, failures=1))
    expect((run.rows, starts), (["post_tool.tool_error"], ["once"]))
    run = await play(make("again", retryable=True, failures=1), make("once", retryable=False, failures=1))
    expect((run.rows, starts), (["post_tool.tool_error"], ["again", "once"]))


async def lessons_last_until_success(graph: Graph) -> None:
    """Each later request mentions the newest failure of each kind, until what failed has succeeded."""

    def report(kind: str, text: str) -> str:
        """Fail."""
        raise ToolError(text, kind=kind)

    def other(fails: bool) -> str:
        """Fail or not."""
        if fails:
            raise ValueError("no luck")
        return "fine"

    def lessons(run: TrialRun, request: int) -> list[tuple[str, str]]:
        lines = [line.split('"') for line in run.asked_last(request).split("\n") if line.startswith("  <failure")]
        return [(parts[1], parts[3]) for parts in lines]

    one, two = call("report", kind="tool_error", text="<one>"), call("report", kind="tool_error", text="two")
    run = await Trial(graph, [one, two, "Done."], [report]).play()
    expect(lessons(run, 1), [("tool_error", "report: &lt;one&gt;")])
    expect(lessons(run, 2), [("tool_error", "report: two")])
    run = await Trial(
        graph, [call("other", fails=True), call("fine"), call("other", fails=False), "Done."], [other, FINE]
    ).play()
    luck = ("tool_error", "other: ValueError: no luck")
    expect([lessons(run, n) for n in (1, 2, 3)], [[luck], [luck], []])
    run = await Trial(graph, [[call("other", fails=True), call("fine")], "Done."], [other, FINE]).play()
    expect(lessons(run, 1), [luck])
    run = await Trial(graph, [call("nothing"), call("fine"), "Done."], [FINE]).play()
    told = "There is no tool named 'nothing'. Call one of the registered tools: fine."
    expect((run.results[0], lessons(run, 1)), (told, [("unknown_tool", f"nothing: {told}")]))
    expect(lessons(run, 2), [])
    run = await Trial(
        graph, [TransientProviderError("busy"), ContextOverflowError("full"), call("fine"), "Done."], [FINE]
    ).play()
    expect(lessons(run, 2), [("context_overflow", "full")])
    expect(lessons(run, 3), [])
    kinds = ("tool_error", "environment_error", "scope_too_large", "kernel_invalidated", "tool_error")
    script = ["", *[call("report", kind=kind, text=str(n)) for n, kind in enumerate(kinds)], call("nothing"), "Done."]
    run = await Trial(
        graph,
        script,
        [report],
        policy=DefaultPolicy(
            budgets={FailureKind.tool_error: 9, FailureKind.environment_error: 9, FailureKind.unknown_tool: 9}
        ),
    ).play()
    last = [kind for kind, _ in lessons(run, 7)]
    expect(last, ["environment_error", "scope_too_large", "kernel_invalidated", "tool_error", "unknown_tool"])


# -- cancellation -----------------------------------------------------------------------------------------


async def a_run_can_be_cancelled(graph: Graph) -> None:
    """Before it begins, in each of its awaits, and by whoever awaits it; every call keeps a result."""

    async def waits() -> str:
        """Wait for ever."""
        return await hang(started)

    async def answer(messages: Any) -> str:
        return await hang(started)

    run = Trial(graph, ["Done."]).agent().run("Begin.")
    run.cancel("not today")
    expect([d.transition.id for d in (await run).decisions], ["pre_step.cancelled"])
    expect(run.result.outcome, _with_reason(run.result, "not today"))
    run.cancel("too late")
    cut_off = "Interrupted: the run was cancelled before this call had a result."
    for script, row, results in (
        ([answer], "call_llm.cancelled", []),
        ([[call("fine"), call("waits"), call("fine")]], "dispatch_tool.cancelled", ["fine 0", cut_off, cut_off]),
    ):
        for outside in (False, True):
            started = asyncio.Event()
            run = Trial(graph, script, [FINE, waits]).agent().run("Begin.")
            task = asyncio.ensure_future(result_of(run))
            await begun(started, task)
            if outside:
                task.cancel()
                await expect_error(asyncio.CancelledError, task)
            else:
                run.cancel("not today")
                run.cancel("twice")
                await task
            expect(run.decisions[-1].transition.id, row)
            reason = "the task was cancelled" if outside else "not today"
            expect(run.result.outcome, _with_reason(run.result, reason))
            expect(tool_results(run.result.messages), results)
    started = asyncio.Event()
    run = Trial(graph, [[call("waits", "a"), call("fine", "b")], "Done."], [FINE, waits]).agent().run("Begin.")
    task = asyncio.ensure_future(result_of(run))
    expect(run.cancel_call("a"), False)
    await begun(started, task)
    expect((run.cancel_call("b"), run.cancel_call("a", "too slow")), (False, True))
    ended = await task
    expect(ended.output, "Done.")
    text = "Cancelled while it ran: too slow. Nobody knows what it had done by then."
    expect(tool_results(ended.messages), [text, "fine 0"])


def _with_reason(result: RunResult[Any], reason: str) -> Any:
    """The outcome of a cancelled run with a reason."""
    if not isinstance(result.outcome, RunCancelled):
        raise AssertionError(f"expected RunCancelled, and found {result.outcome!r}")
    return replace(result.outcome, reason=reason)


async def result_of(run: Run[Any, Any]) -> RunResult[Any]:
    """The result of a run, as a coroutine for a task."""
    return await run


async def hang(started: asyncio.Event) -> str:
    """Say that something has begun, and never return."""
    started.set()
    await asyncio.Event().wait()
    return ""


async def begun(started: asyncio.Event, task: asyncio.Future[RunResult[Any]]) -> None:
    """Wait until something in a run has begun.

    Raises:
        AssertionError: The run ends before that.
    """
    starting = asyncio.ensure_future(started.wait())
    await asyncio.wait((starting, task), return_when=asyncio.FIRST_COMPLETED)
    if not started.is_set():
        starting.cancel()
        raise AssertionError(f"the run ended before that: {(await task).outcome!r}")


CHECKS: Sequence[LoopCheck] = (
    model_calls_are_limited,
    time_is_limited,
    a_last_turn_is_granted,
    tokens_and_cost_are_limited,
    no_run_spins,
    too_many_calls_are_not_run,
    provider_failures_are_retried,
    jitter_is_repeatable,
    long_prompts_are_shortened,
    a_policy_decides,
    models_may_misbehave,
    truncated_replies_are_continued,
    refusals_and_silence,
    a_refused_text_is_explained,
    answers_have_their_type,
    repeated_calls_are_noticed,
    each_failure_has_its_action,
    equal_errors_open_the_breaker,
    retryable_tools_are_run_again,
    lessons_last_until_success,
    a_run_can_be_cancelled,
)
