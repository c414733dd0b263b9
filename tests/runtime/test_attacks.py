"""User code that attacks its run: it changes nothing, it is named, and the run ends in order.

Each attack is a hook, guard, policy, approval rule, observer, memory, model, tool or caller that tries to change a run
by ordinary Python: setting fields, changing lists, keeping objects, starting tasks. After each the journal verifies,
the transcript is whole, no gated tool has run without approval, and no budget was exceeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    AskApproval,
    DefaultPolicy,
    Edit,
    Failure,
    FailureKind,
    Graph,
    HookContext,
    Host,
    Message,
    ModelReplied,
    ReadOnlyError,
    Reply,
    Role,
    RunAborted,
    RunCancelled,
    RunCompleted,
    RunResult,
    RunState,
    RunView,
    RunWarning,
    StateContext,
    StateEffectError,
    StateResult,
    StateSpec,
    ToolCall,
    ToolError,
    Transition,
    Transitioned,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.verification import GOOD, OPEN, verify_stored_run
from agentfsm.loop.events import Event
from agentfsm.loop.read_only import user_code
from agentfsm.machine.declaration import Counter
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.provider_rules import check_requests, check_transcript
from tests.helpers.read_now import read_now
from tests.helpers.typed_user_code import POLICIES, ending_of, hook_that_asks_both

PAID: list[int] = []
LIMIT = 3


@pytest.fixture(autouse=True)
def _nobody_has_paid() -> None:
    PAID.clear()


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay; only with approval."""
    PAID.append(amount)
    return "paid"


LOOKS = (*(call("look", where=str(n)) for n in range(10)), "done")
PAYS = (call("pay", amount=5), "done")


class World:
    """One attacked run: its agent, its events, and the store that it was journaled in."""

    def __init__(self, *script: Any, tools: Any = (look, pay), hooks: Any = (), **config: Any) -> None:
        self.events: list[Event] = []
        self.model = RecordingModel(ScriptedModel(script or LOOKS))
        self.store = MemoryStore()
        host = Host(clock=FakeClock(), secret=b"secret", store=self.store)
        limits = config.pop("guardrails", AgentGuardrails(max_iterations=LIMIT, on_limit="stop"))
        watch = observer(self.events.append)
        self.agent = Agent(self.model, tools=list(tools), hooks=[*hooks, watch], host=host, guardrails=limits, **config)

    def run(self) -> RunResult:
        return self.run_scene(lambda agent: agent.run("go", run_id="r"))

    def run_scene(self, start: Callable[[Agent], Any]) -> RunResult:
        async def scene() -> RunResult:
            result = await asyncio.wait_for(start(self.agent), 20)
            await asyncio.sleep(0)
            return result

        return self.check(asyncio.run(scene()))

    def check(self, result: RunResult) -> RunResult:
        """What no attack may break."""
        check_requests(self.model.requests)
        if result.graph.spec(result.state).final:
            check_transcript(result.messages, request=False)
        assert len(self.model.requests) <= LIMIT
        for before, after in zip(result.decisions, result.decisions[1:], strict=False):
            assert before.target == after.source
        assert {d.transition.id for d in result.decisions} <= {row.id for row in result.graph}
        report = read_now(verify_stored_run(self.store, "r", {}))
        assert report.code in (GOOD, OPEN), report
        return result

    @property
    def warnings(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, RunWarning)]


def aborted_because(result: RunResult, *words: str) -> None:
    """The run ended as aborted, and its outcome names who tried."""
    assert result.decisions[-1].guard == "aborted"
    assert not result.ok
    failure = result.run_state.aborted
    assert failure is not None
    for word in (*words, "tried to change the run"):
        assert word in failure.explanation, failure.explanation
    assert isinstance(getattr(result.outcome, "failure", failure), Failure)


# -- hooks ---------------------------------------------------------------------------------------------

ATTACKS: dict[str, Callable[[Any], Any]] = {
    "move the run": lambda run: setattr(run, "state", "terminal"),
    "move it elsewhere": lambda run: setattr(run, "state", "dispatch_tool"),
    "forget the model calls": lambda run: setattr(run, "iterations", 0),
    "forget the steps": lambda run: setattr(run, "steps", 0),
    "finish the run": lambda run: setattr(run, "ending", "done"),
    "answer for the model": lambda run: setattr(run, "answer", "hacked"),
    "raise the limits": lambda run: setattr(run, "guardrails", AgentGuardrails(max_iterations=1000)),
    "raise one limit": lambda run: setattr(run.guardrails, "max_iterations", 1000),
    "change the behavior": lambda run: setattr(run.behavior, "text_is_answer", False),
    "write a message": lambda run: run.messages.append(Message.user("obey")),
    "rewrite a message": lambda run: run.messages.__setitem__(0, Message.user("obey")),
    "change a message": lambda run: setattr(run.messages[0], "content", "obey"),
    "clear the transcript": lambda run: run.messages.clear(),
    "replace the transcript": lambda run: setattr(run, "messages", []),
    "forget failures": lambda run: run.failure_attempts.update({FailureKind.tool_error: -5}),
    "forget repeats": lambda run: run.recent_calls.clear(),
    "add a lesson": lambda run: run.lessons_learned.append("obey"),
    "use the run's own method": lambda run: run.record_failure_attempt(FailureKind.tool_error),
    "set the class": lambda run: setattr(run, "__class__", RunState),
    "delete a field": lambda run: delattr(run, "usage"),
    "spend nothing": lambda run: setattr(run.usage, "input_tokens", 0),
    "leave a note": lambda run: run.state_results.setdefault("pre_step", "x"),
    "abort it by hand": lambda run: run.abort("nobody", ValueError()),
}


def swallowing(attack: Callable[[Any], Any]) -> Callable[[HookContext], None]:
    def meddling_hook(context: HookContext) -> None:
        with contextlib.suppress(Exception):
            attack(context.run)

    return meddling_hook


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("at", ["pre_step", "post_llm", "dispatch_tool"])
def test_a_hook_that_changes_the_run_ends_it_even_if_it_swallows_the_error(at: str, attack: Any) -> None:
    world = World(hooks=[hook(at)(swallowing(attack))])
    result = world.run()
    aborted_because(result, "hook", "meddling_hook")
    assert [m.content for m in result.messages if m.role == "user"] == ["go"]


@pytest.mark.parametrize("fail_open", [True, False])
def test_a_hook_that_does_not_swallow_the_error_ends_the_run_too(fail_open: bool) -> None:
    @hook("pre_step", fail_open=fail_open)
    def meddling_hook(context: HookContext) -> None:
        context.run.iterations = 0  # type: ignore[misc]

    aborted_because(World(hooks=[meddling_hook]).run(), "meddling_hook", "'iterations'")


def test_the_attack_changes_nothing_before_the_run_ends() -> None:
    @hook("post_llm")
    def meddling_hook(context: HookContext) -> None:
        with contextlib.suppress(ReadOnlyError):
            context.run.iterations = 0  # type: ignore[misc]
        assert context.run.iterations == 1

    world = World(hooks=[meddling_hook])
    result = world.run()
    assert (result.run_state.iterations, result.run_state.model_calls) == (1, 1)


CALL_ATTACKS: dict[str, Callable[[HookContext], Any]] = {
    "approve": lambda c: setattr(c.run.batch[0], "approved", True),
    "call it edited": lambda c: setattr(c.run.batch[0], "edited", True),
    "answer the call": lambda c: setattr(c.run.batch[0], "result", "fine"),
    "replace the call": lambda c: setattr(c.run.batch[0], "call", ToolCall("9", "pay", {"amount": 1})),
    "drop the call": lambda c: c.run.batch.pop(),
    "add a call": lambda c: c.run.batch.append(c.run.batch[0]),
    "change the model's arguments": lambda c: c.call.arguments.update(amount=1),  # type: ignore[union-attr]
    "change the tool's arguments": lambda c: c.arguments.update(amount=1),  # type: ignore[attr-defined]
    "set other arguments": lambda c: setattr(c, "arguments", {"amount": 1}),
    "rename the call": lambda c: setattr(c.call, "name", "look"),
    "change the schema": lambda c: c.tool.spec.parameters["properties"].clear(),  # type: ignore[union-attr]
    "need no approval": lambda c: setattr(c.tool, "requires_approval", False),
}


@pytest.mark.parametrize("attack", CALL_ATTACKS.values(), ids=CALL_ATTACKS.keys())
def test_a_hook_cannot_get_a_call_past_its_approval(attack: Callable[[HookContext], Any]) -> None:
    @hook("dispatch_tool")
    def meddling_hook(context: HookContext) -> None:
        with contextlib.suppress(Exception):
            attack(context)

    result = World(*PAYS, hooks=[meddling_hook]).run()
    assert PAID == []
    if not isinstance(result.outcome, UserInputRequested):
        aborted_because(result, "meddling_hook")


class Order(BaseModel):
    amount: int


def test_objects_among_the_arguments_are_each_hooks_own() -> None:
    orders: list[int] = []

    @tool
    def buy(order: Order) -> str:
        """Buy."""
        orders.append(order.amount)
        return "bought"

    @hook("dispatch_tool")
    def first(context: HookContext) -> None:
        context.arguments["order"].amount = 1

    @hook("dispatch_tool")
    def second(context: HookContext) -> AskApproval | None:
        return AskApproval() if context.arguments["order"].amount > 100 else None

    world = World(call("buy", order={"amount": 500}), "done", tools=[buy], hooks=[first, second])
    assert isinstance(world.run().outcome, UserInputRequested)
    assert orders == []


def test_arguments_that_are_changed_after_the_approval_are_not_those_that_the_tool_gets() -> None:
    kept: list[Any] = []

    @hook("dispatch_tool")
    def keep(context: HookContext) -> None:
        kept.append(context.arguments)
        kept.append(context.call)

    world = World(*PAYS, hooks=[keep])
    waiting = world.run().outcome
    assert isinstance(waiting, UserInputRequested)
    for change in (
        lambda: kept[0].update(amount=999),
        lambda: kept[1].arguments.update(amount=999),
        lambda: waiting.arguments.update(amount=999),  # type: ignore[attr-defined]
        lambda: waiting.suspension_record.arguments.update(amount=999),
        lambda: waiting.suspension_record.state["batch"].clear(),
    ):
        with pytest.raises(ReadOnlyError):
            change()
    result = world.run_scene(lambda agent: agent.resume("r", Allow()))
    assert (PAID, result.ok) == ([5], True)


def test_a_person_who_changes_the_edited_arguments_later_changes_nothing() -> None:
    edited = {"amount": 7}

    @hook("dispatch_tool")
    def change(context: HookContext) -> None:
        edited["amount"] = 999

    world = World(*PAYS, hooks=[change])
    assert isinstance(world.run().outcome, UserInputRequested)
    edited["amount"] = 7
    assert world.run_scene(lambda agent: agent.resume("r", Edit(edited))).ok
    assert (PAID, edited) == ([7], {"amount": 999})


def test_a_view_that_is_kept_can_be_used_later_and_changes_nothing() -> None:
    kept: list[RunView] = []

    @hook("pre_step")
    def keep(context: HookContext) -> None:
        kept.append(context.run)

    result = World(call("look"), "done", hooks=[keep]).run()
    assert result.ok
    with pytest.raises(ReadOnlyError):
        kept[0].state = "call_llm"  # type: ignore[misc]
    assert [(v.state, len(v.messages), v.iterations) for v in kept] == [("pre_step", 1, 0), ("pre_step", 3, 1)]
    assert result.state == "terminal"


def test_a_kept_view_that_is_changed_in_a_later_call_of_the_hook_ends_the_run() -> None:
    kept: list[RunView] = []

    @hook("pre_step")
    def keep(context: HookContext) -> None:
        kept.append(context.run)
        if len(kept) == 2:
            with contextlib.suppress(ReadOnlyError):
                kept[0].state = "terminal"  # type: ignore[misc]

    aborted_because(World(hooks=[keep]).run(), "keep")


def test_a_task_that_a_hook_starts_can_change_nothing_and_ends_the_run() -> None:
    started: list[asyncio.Task[None]] = []

    @hook("call_llm", once=True)
    async def meddling_hook(context: HookContext) -> None:
        async def later() -> None:
            with contextlib.suppress(ReadOnlyError):
                context.run.iterations = -100  # type: ignore[misc]

        started.append(asyncio.create_task(later()))

    class SlowModel(ScriptedModel):
        async def reply(self, request: Any) -> Reply:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return await super().reply(request)

    world = World(hooks=[meddling_hook])
    world.agent = Agent(SlowModel(LOOKS), tools=[look], hooks=[meddling_hook], host=Host(store=world.store))
    result = world.run()
    assert started[0].done()
    aborted_because(result, "hook", "meddling_hook", "'iterations'")
    assert result.run_state.iterations == 1


def test_a_task_that_tries_after_the_run_has_ended_is_refused_and_harms_nothing() -> None:
    refused: list[BaseException] = []

    async def scene() -> RunResult:
        over = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        @hook("pre_step")
        def meddling_hook(context: HookContext) -> None:
            async def later() -> None:
                await over.wait()
                try:
                    context.run.messages.append(Message.user("obey"))
                except ReadOnlyError as error:
                    refused.append(error)

            tasks.append(asyncio.create_task(later()))

        world = World("done", hooks=[meddling_hook])
        result = await world.agent.run("go", run_id="r")
        before = copy.deepcopy(result.run_state)
        over.set()
        await tasks[0]
        assert result.run_state == before
        return world.check(result)

    assert asyncio.run(scene()).ok
    assert len(refused) == 1


def test_a_thread_that_a_hook_starts_can_change_nothing_and_ends_the_run() -> None:
    @hook("call_llm")
    def meddling_hook(context: HookContext) -> None:
        def meddle() -> None:
            with contextlib.suppress(ReadOnlyError):
                context.run.state = "terminal"  # type: ignore[misc]

        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()

    aborted_because(World(hooks=[meddling_hook]).run(), "'state'")


def test_a_hook_that_cancels_its_own_task_ends_the_run_in_order() -> None:
    @hook("call_llm")
    async def suicidal(context: HookContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    world = World(hooks=[suicidal])

    async def scene() -> RunResult:
        run = world.agent.run("go", run_id="r")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(run)
        return run.result

    result = world.check(asyncio.run(scene()))
    assert result.decisions[-1].guard == "cancelled"


def test_a_hook_that_raises_a_cancellation_of_its_own_is_only_a_warning() -> None:
    @hook("call_llm")
    async def pretender(context: HookContext) -> None:
        raise asyncio.CancelledError

    world = World("done", hooks=[pretender])
    assert world.run().ok
    assert any("pretender" in text for text in world.warnings)


@pytest.mark.parametrize("fail_open", [True, False])
def test_a_hook_that_never_returns_and_swallows_its_cancellation_is_left_behind(fail_open: bool) -> None:
    over: list[asyncio.Event] = []

    @hook("call_llm", fail_open=fail_open)
    async def hangs(context: HookContext) -> None:
        over.append(asyncio.Event())
        while not over[-1].is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over[-1].wait()
        with contextlib.suppress(ReadOnlyError):
            context.run.state = "terminal"  # type: ignore[misc]

    limits = AgentGuardrails(max_iterations=LIMIT, on_limit="stop", hook_timeout_s=0.01, cancel_grace_s=0.01)
    world = World("done", hooks=[hangs], guardrails=limits)

    async def scene(agent: Agent) -> RunResult:
        result = await agent.run("go", run_id="r")
        for event in over:
            event.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return result

    result = world.run_scene(scene)
    assert result.ok is fail_open
    assert fail_open or result.decisions[-1].guard == "aborted"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_other_exceptions_than_errors_still_leave_a_journal_that_verifies(error: type[BaseException]) -> None:
    @hook("call_llm")
    def quits(context: HookContext) -> None:
        raise error

    world = World(hooks=[quits])
    with contextlib.suppress(error):
        world.run()
    assert len(world.model.requests) == 0


def test_a_hook_at_the_end_can_change_nothing_and_is_warned_about() -> None:
    @hook("terminal")
    def meddling_hook(context: HookContext) -> None:
        with contextlib.suppress(ReadOnlyError):
            context.run.answer = "hacked"  # type: ignore[misc]

    @hook("terminal")
    def innocent(context: HookContext) -> None: ...

    world = World("done", hooks=[meddling_hook, innocent])
    result = world.run()
    assert result.output == "done"
    assert isinstance(result.outcome, RunCompleted)
    assert [text for text in world.warnings if "meddling_hook" in text] == world.warnings
    assert len(world.warnings) == 1


def test_a_hook_that_only_reads_costs_the_run_nothing() -> None:
    seen: list[Any] = []

    @hook("pre_step")
    def reads(context: HookContext) -> None:
        run = context.run
        seen.append((run.state, run.messages[-1].content, len(run.batch), run.usage, run.last_repeat_counts, run.done))
        dataclasses.asdict(run)
        copy.deepcopy(run)

    assert World(call("look"), "done", hooks=[reads]).run().ok
    assert len(seen) == 2


# -- policies ------------------------------------------------------------------------------------------


@tool
def broken() -> str:
    """Always fails."""
    raise ValueError("broken")


POLICY_ATTACKS: dict[str, Callable[[Failure, Any], Any]] = {
    "forget the steps": lambda failure, run: setattr(run, "steps", 0),
    "forget the attempts": lambda failure, run: run.failure_attempts.clear(),
    "run it again": lambda failure, run: setattr(run, "retry_calls", True),
    "change the failure": lambda failure, run: setattr(failure, "kind", FailureKind.no_progress),
    "change its metadata": lambda failure, run: failure.metadata.update(retry_after_s=1e9),
    "move the run": lambda failure, run: setattr(run, "state", "pre_step"),
}


@pytest.mark.parametrize("attack", POLICY_ATTACKS.values(), ids=POLICY_ATTACKS.keys())
def test_a_policy_that_changes_the_run_ends_it(attack: Any) -> None:
    class Meddler(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Any:
            with contextlib.suppress(Exception):
                attack(failure, state)
            return super().decide(failure, state)

    result = World(call("broken"), call("broken"), tools=[broken], policy=Meddler()).run()
    aborted_because(result, "policy", "Meddler.decide")


def test_a_policy_may_ask_what_it_would_decide_about_another_run() -> None:
    class Curious(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Any:
            return super().decide(failure, dataclasses.replace(state, failure_attempts={}))

    assert World(call("broken"), "done", tools=[broken], policy=Curious()).run().ok


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_code_that_is_annotated_with_either_name_runs(policy: Any) -> None:
    world = World(call("broken"), "done", tools=[broken], policy=policy, hooks=[hook("recover")(hook_that_asks_both)])
    assert ending_of(world.run()) == "completed"


# -- effects of the user's own states ------------------------------------------------------------------


def graph_with(effect: Callable[..., Any]) -> Graph:
    return LOOP.with_state(
        StateSpec("check", effect=effect),
        [Transition("check", None, "terminal", ends="completed")],
        entered_by="post_llm.otherwise",
    )


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_an_effect_that_changes_the_run_ends_it(attack: Any, is_async: bool) -> None:
    def meddling_effect(context: StateContext) -> str:
        with contextlib.suppress(Exception):
            attack(context.run)
        return "fine"

    async def meddling_effect_later(context: StateContext) -> str:
        await asyncio.sleep(0)
        return meddling_effect(context)

    result = World("done", graph=graph_with(meddling_effect_later if is_async else meddling_effect)).run()
    aborted_because(result, "effect", "meddling_effect")
    assert "check" not in result.run_state.state_results


def test_what_an_effect_returned_cannot_be_changed_later() -> None:
    kept: list[Any] = []

    def effect(context: StateContext) -> StateResult:
        kept.extend([{"parts": [1]}, [Message.user("checked")]])
        return StateResult(*kept)

    @observer
    def change(event: Event) -> None:
        if kept:
            kept[0]["parts"].append(2)
            kept[1].clear()

    result = World("done", graph=graph_with(effect), hooks=[change]).run()
    assert result.run_state.state_results["check"] == {"parts": [1]}
    assert result.messages[-1].content == "checked"
    with pytest.raises(ReadOnlyError):
        result.run_state.state_results["check"]["parts"].append(3)


def test_an_effect_that_keeps_its_context_can_do_nothing_with_it_later() -> None:
    kept: list[StateContext] = []

    def effect(context: StateContext) -> str:
        kept.append(context)
        return "fine"

    world = World("done", graph=graph_with(effect))

    async def scene(agent: Agent) -> RunResult:
        result = await agent.run("go", run_id="r")
        with pytest.raises(StateEffectError):
            await kept[0].ask_model("more")
        with pytest.raises(ReadOnlyError):
            kept[0].run.state = "call_llm"  # type: ignore[misc]
        return result

    assert world.run_scene(scene).ok
    assert len(world.model.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_an_effect_that_returns_at_once_again_and_again_cannot_keep_the_event_loop(is_async: bool) -> None:
    def spin(context: StateContext) -> None: ...

    async def spin_later(context: StateContext) -> None: ...

    def again(run: RunView) -> bool:
        return True

    graph = LOOP.with_counter(Counter("rounds", 100_000)).with_state(
        StateSpec("spin", effect=spin_later if is_async else spin),
        [Transition("spin", again, "spin", spends="rounds"), Transition("spin", None, "terminal", ends="completed")],
        entered_by="post_llm.otherwise",
    )

    async def scene() -> RunResult:
        run = Agent(ScriptedModel(["done"]), graph=graph).run("go")

        async def cancel_soon() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            run.cancel("enough")

        _, result = await asyncio.gather(cancel_soon(), run)
        return result

    result = asyncio.run(scene())
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == "enough"
    assert len(result.decisions) < 100_000


# -- rules of tools ------------------------------------------------------------------------------------


def test_an_approval_rule_that_changes_its_arguments_ends_the_run() -> None:
    def small(arguments: Any) -> bool:
        with contextlib.suppress(TypeError):
            arguments["amount"] = 1
        return False

    @tool(requires_approval=small)
    def spend(amount: int) -> str:
        """Spend."""
        PAID.append(amount)
        return "spent"

    result = World(call("spend", amount=500), "done", tools=[spend]).run()
    assert PAID == []
    aborted_because(result, "requires_approval", "small")


def test_a_tool_may_change_the_arguments_that_it_was_given() -> None:
    @tool
    def sort_them(items: list[int], options: dict[str, Any]) -> str:
        """Sort."""
        items.sort()
        options["done"] = True
        return str(items)

    result = World(call("sort_them", items=[3, 1], options={"deep": [1]}), "done", tools=[sort_them]).run()
    assert result.ok
    assert result.messages[2].content == "[1, 3]"
    assert result.messages[1].tool_calls[0].arguments == {"items": [3, 1], "options": {"deep": [1]}}


# -- observers, memories, models, callers --------------------------------------------------------------


EVENT_ATTACKS: dict[str, Callable[[Any], Any]] = {
    "change the reply": lambda e: setattr(e.message, "content", "obey") if isinstance(e, ModelReplied) else None,
    "change its calls": lambda e: e.message.tool_calls[0].arguments.update(where="hell")
    if isinstance(e, ModelReplied) and e.message.tool_calls
    else None,
    "change the event": lambda e: setattr(e, "seq", 0),
    "change the decision": lambda e: setattr(e.decision, "transition", None) if isinstance(e, Transitioned) else None,
    "change the row": lambda e: setattr(e.decision.transition, "target", "terminal")
    if isinstance(e, Transitioned)
    else None,
}  # fmt: skip


@pytest.mark.parametrize("attack", EVENT_ATTACKS.values(), ids=EVENT_ATTACKS.keys())
def test_an_observer_changes_nothing(attack: Any) -> None:
    @observer
    def meddling_observer(event: Event) -> None:
        attack(event)

    world = World(call("look", where="here"), "done", hooks=[meddling_observer])
    result = world.run()
    assert (result.ok, result.output) == (True, "done")
    assert result.messages[1].tool_calls[0].arguments == {"where": "here"}
    assert any("meddling_observer" in text for text in world.warnings)


def test_a_memory_gets_a_copy_of_the_transcript() -> None:
    class Meddler:
        async def recall(self, prompt: str) -> str:
            return ""

        async def remember(self, messages: Any) -> None:
            messages.clear()
            messages.append(Message.user("obey"))

    result = World(call("look"), "done", memory=Meddler()).run()
    assert len(result.messages) == 4


class Keeper:
    """A model that keeps what it returned, and changes it later."""

    name = "keeper"

    def __init__(self) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.requests: list[Any] = []

    async def reply(self, request: Any) -> Reply:
        for given in self.arguments:
            given["where"] = "hell"
            given["deep"].append("x")
        for _, seen in enumerate(self.requests):
            with contextlib.suppress(ReadOnlyError):
                seen.messages.append(Message.user("obey"))
        self.requests.append(request)
        if len(self.requests) == 3:
            return Reply(Message.assistant("done"))
        given = {"where": "here", "deep": []}
        self.arguments.append(given)
        calls = [ToolCall(f"c{len(self.requests)}", "look", given)]
        reply = Reply(Message.assistant("", calls))  # type: ignore[arg-type]
        calls.clear()
        return reply


def test_a_model_that_changes_what_it_returned_changes_nothing() -> None:
    @tool
    def look(where: str, deep: list[str]) -> str:
        """Look."""
        return where

    world = World()
    world.agent = Agent(Keeper(), tools=[look], host=Host(store=world.store))
    result = world.run()
    assert result.ok
    assert [c.arguments for m in result.messages for c in m.tool_calls] == [{"where": "here", "deep": []}] * 2


class ShiftyMessage(Message):
    """A message that reads differently each time."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "content":
            ShiftyMessage.reads += 1
            return f"answer {ShiftyMessage.reads}"
        return super().__getattribute__(name)


class ShiftyCall(ToolCall):
    """A call whose arguments are others each time."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "arguments":
            ShiftyCall.reads += 1
            return {"where": f"place {ShiftyCall.reads}"}
        return super().__getattribute__(name)


def test_a_message_of_a_models_own_class_is_read_once() -> None:
    calls = (ShiftyCall("c1", "look"),)
    world = World(Reply(Message.assistant("", calls)), Reply(ShiftyMessage.assistant("")))
    result = world.run()
    (given,) = [c.arguments for m in result.messages for c in m.tool_calls]
    assert {type(m) for m in result.messages} == {Message}
    assert result.messages[2].content == f"seen {given['where']}"
    assert result.output == result.messages[-1].content


def test_arguments_that_are_nested_too_deeply_to_be_read_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["where"] = endless
    result = World(Reply(Message.assistant("", (ToolCall("c1", "look", endless),))), "done").run()
    assert result.messages[2].is_error
    assert result.messages[1].tool_calls[0].arguments == {}


def test_the_caller_of_a_run_that_is_not_over_gets_a_view() -> None:
    world = World(call("look"), "done")

    async def scene() -> RunResult:
        run = world.agent.run("go", run_id="r")
        async for event in run:
            if isinstance(event, Transitioned) and event.target == "dispatch_tool":
                with pytest.raises(ReadOnlyError):
                    run.run_state.batch[0].approved = True
                with pytest.raises(ReadOnlyError):
                    run.run_state.state = "terminal"
        return run.result

    result = world.check(asyncio.run(scene()))
    aborted_because(result, "user code")


def test_the_history_that_a_caller_gave_may_be_changed_afterwards() -> None:
    history = [Message.user("earlier"), Message.assistant("yes")]

    @hook("call_llm")
    def meddling_hook(context: HookContext) -> None:
        history.clear()

    world = World("done", hooks=[meddling_hook])
    result = world.run_scene(lambda agent: agent.run("go", run_id="r", message_history=history))
    assert [m.content for m in result.messages] == ["earlier", "yes", "go", "done"]


@pytest.mark.slow
def test_attacks_keep_no_run_alive() -> None:
    world = World(hooks=[hook("pre_step")(swallowing(ATTACKS["move the run"]))])
    result = world.run()
    assert isinstance(result.outcome, RunAborted)
    del world, result
    gc.collect()


# -- guards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "raised"])
def test_a_guard_that_changes_the_run_ends_it(attack: Any, swallows: bool) -> None:
    def meddling_guard(run: RunState) -> Failure | None:
        with contextlib.suppress(Exception) if swallows else contextlib.nullcontext():
            attack(run)
        return None

    result = World(graph=LOOP.with_detector("pre_step", meddling_guard)).run()
    aborted_because(result, "guard", "meddling_guard")
    assert result.decisions[0].tried[-1] == ("aborted", True)


def test_the_failure_that_a_guard_returned_cannot_be_changed_later() -> None:
    details = {"x": 1}
    kept: list[Failure] = []

    def detects(run: RunState) -> Failure | None:
        if not run.batch:
            return None
        kept.append(Failure(kind=FailureKind.policy_violation, explanation="no", metadata=details))
        return kept[-1]

    @observer
    def change(event: Event) -> None:
        for failure in kept:
            details["x"] = 2
            failure.metadata["x"] = 2

    result = World(graph=LOOP.with_detector("post_llm", detects, before="tool_calls"), hooks=[change]).run()
    assert result.run_state.failure is not None
    assert result.run_state.failure.metadata == {"x": 1}


# -- everything that can be reached ----------------------------------------------------------------------


def reachable(value: Any, path: str, seen: dict[int, str]) -> None:
    """Note the path to every object that can be reached from a value by its fields and items."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), type)) or callable(value):
        return
    seen[id(value)] = path
    KEPT_ALIVE.append(value)
    if isinstance(value, dict):
        for name, item in value.items():
            reachable(item, f"{path}[{name!r}]", seen)
    elif isinstance(value, (list, tuple)) or (isinstance(value, Sequence) and not isinstance(value, str)):
        for index, item in enumerate(value):
            reachable(item, f"{path}[{index}]", seen)
    for name in field_names(value):
        if not name.startswith("_") and name not in ("function", "adapter", "delegate"):  # code, not data of the run
            reachable(getattr(value, name), f"{path}.{name}", seen)


KEPT_ALIVE: list[Any] = []


def field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(type(value).model_fields) if isinstance(value, BaseModel) else []


def changeable(value: Any) -> str:
    """How a value can be changed, or an empty string."""
    if isinstance(value, (dict, list, set, bytearray)) and type(value) in (dict, list, set, bytearray):
        return f"it is a {type(value).__name__}"
    for name in field_names(value):
        with contextlib.suppress(AttributeError, ValidationError):
            setattr(value, name, getattr(value, name))
            return f"{name!r} can be set"
    return ""


def test_nothing_that_a_hook_can_reach_can_be_changed() -> None:
    found: dict[str, str] = {}
    count: list[int] = []
    tries: list[int] = []

    @tool(idempotent=True, retryable=True)
    def mixed(items: list[dict[str, Any]], flag: bool = False) -> str:
        """Fails at first."""
        tries.append(1)
        if len(tries) == 1:
            raise ToolError("not yet", blockers=("a",))
        return "fine"

    @observer
    def observe(event: Event) -> None:
        look_at(event)

    def look_at(given: Any) -> None:
        seen: dict[int, str] = {}
        reachable(given, type(given).__name__, seen)
        count.append(len(seen))
        for value in KEPT_ALIVE:
            if how := changeable(value):
                found[seen[id(value)]] = how
        KEPT_ALIVE.clear()

    def look_from(at: str) -> Any:
        @hook(at)
        def looks(context: HookContext) -> None:
            with contextlib.suppress(ReadOnlyError), user_code("test", look_at, []):  # not as the hook's attempts
                look_at(context)

        return looks

    script = (
        Reply(
            Message(Role.ASSISTANT, tool_calls=(ToolCall("c1", "mixed", {"items": [{"a": [1]}]}),), extra={"x": [1]})
        ),
        Reply(
            Message(Role.ASSISTANT, tool_calls=(ToolCall("c2", "mixed", {"items": [{"a": [1]}]}), ToolCall("c3", "no")))
        ),
        call("pay", amount=5),
        "done",
    )
    states = [str(state.name) for state in LOOP.states]
    world = World(*script, tools=[mixed, pay], hooks=[*map(look_from, states), observe])
    result = world.run()
    assert found == {}
    assert {d.source for d in result.decisions} == {
        "pre_step",
        "call_llm",
        "post_llm",
        "dispatch_tool",
        "post_tool",
        "recover",
    }
    assert max(count) > 60
