"""Conformance checks for calls of tools: their results, their order, who must approve them, and what survives a crash.

They take what those of ``loop_conformance`` do.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from agentfsm.agent import Agent
from agentfsm.errors import (
    ActorIsRequesterError,
    ActorRoleError,
    AuthenticationError,
    BlankHumanReplyError,
    HumanReplyError,
    RepeatedVoteError,
    StoreError,
    StoreFullError,
    SuspensionExpiredError,
    SuspensionUsedError,
    ToolError,
    TransientProviderError,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Lease, SealedSnapshot, Status, consistent_read
from agentfsm.loop.approval_rows import counts_votes, with_votes
from agentfsm.loop.events import RunCompleted, RunResumed, ToolFinished, ToolProgress, ToolStarted, UserInputRequested
from agentfsm.loop.human_input import Allow, Deny, Edit, Extend, Fill, GiveUp, ItDidNotRun, ItRan, to_human_reply
from agentfsm.loop.messages import Image, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.quorum import Actor, Approval
from agentfsm.machine.graph import Graph
from agentfsm.runtime.hooks import AbortRun, AskApproval, DenyCall, HookContext, SkipCall, hook
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.tools import tool
from agentfsm.testing.fakes import FakeClock, RecordingModel, ScriptedModel, call
from agentfsm.testing.loop_conformance import (
    FINE,
    SECRET,
    LoopCheck,
    Stubborn,
    Trial,
    TrialRun,
    begun,
    expect,
    expect_error,
    expect_in,
    expect_refusal,
    hang,
    record_of,
    require_same_in_journal,
    result_of,
    tool_results,
)

# -- results ----------------------------------------------------------------------------------------------

PIXEL = Image("image/png", base64.b64encode(b"\x89PNG\r\n\x1a\n").decode())


class Point(BaseModel):
    """A value that is not a text."""

    x: int


@dataclass
class Account:
    """A value with a secret in it."""

    owner: str
    key: SecretStr


class Vault(BaseModel):
    """A model with a secret in it."""

    code: SecretBytes


class Opaque:
    """A value that is not JSON."""

    def __repr__(self) -> str:
        return "an opaque thing"


async def _slow_text() -> str:
    return "later"


def _numbers() -> Iterator[int]:
    yield from (1, 2)


async def _letters() -> AsyncIterator[str]:
    for letter in "ab":
        yield letter


async def results_become_text(graph: Graph) -> None:
    """A text stays as it is, nothing is ``done``, and anything else is JSON; images are sent as images."""
    values: Mapping[str, tuple[Any, str]] = {
        "text": ("<b>", "<b>"),
        "nothing": (None, "done"),
        "number": (1.5, "1.5"),
        "model": (Point(x=1), '{"x":1}'),
        "list": ([1, None, "ä"], '[1,null,"ä"]'),
        "opaque": ([Opaque()], "[an opaque thing]"),
        "half": (["\ud800"], "['\\ud800']"),
        "image": (PIXEL, PIXEL.text_placeholder),
        "images": (["Look:", None, PIXEL, 3], f"Look:\n{PIXEL.text_placeholder}\n3"),
        "tuple": ((PIXEL,), PIXEL.text_placeholder),
    }

    def give(name: str) -> Any:
        """Give a value."""
        return values[name][0]

    run = await Trial(graph, [[call("give", name=name) for name in values], "Done."], [give]).play()
    expect(run.results, [text for _, text in values.values()])
    images = [len(message.images) for message in run.result.messages if message.role is Role.TOOL]
    expect(images, [0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    made = [
        tool(name="generated")(_numbers),
        tool(name="streamed")(_letters),
        tool(name="later")(lambda: _slow_text()),  # a plain function that returns an awaitable
        tool(name="streamed_later")(lambda: _letters()),
    ]
    run = await Trial(graph, [[call(each.name) for each in made], "Done."], made).play()
    expect(run.results, ["[1,2]", '["a","b"]', "later", '["a","b"]'])


async def errors_become_results(graph: Graph) -> None:
    """Whatever a tool raises is the result of its call, and says of which kind the failure is."""

    def fail(name: str) -> str:
        """Raise."""
        raise errors[name]

    async def fail_later(name: str) -> str:
        """Raise in the event loop."""
        raise errors[name]

    errors: Mapping[str, BaseException] = {
        "value": ValueError("no luck"),
        "file": FileNotFoundError("no file"),
        "time": TimeoutError("too slow"),
        "exit": SystemExit(3),
        "stop": StopIteration("no more"),
        "cancel": asyncio.CancelledError("mine"),
        "tool": ToolError("it broke", kind="whatever"),
    }
    kinds = {"file": "environment_error"}
    for function in (fail, fail_later):
        for name in errors:
            if function is fail_later and name == "stop":
                continue  # a coroutine cannot raise it
            run = await Trial(graph, [call(function.__name__, name=name), "Done."], [function]).play()
            expect((name, run.rows), (name, [f"post_tool.{kinds.get(name, 'tool_error')}"]))
            expect((run.result.messages[2].is_error, run.result.output), (True, "Done."))
    run = await Trial(graph, [call("fail", name="value"), "Done."], [fail]).play()
    expect(run.results, ["ValueError: no luck"])
    deep: Any = []
    for _ in range(2_000):
        deep = [deep]
    calls = [
        call("fail", wrong=1),
        ToolCall("", "fail", {}, "it is not JSON"),
        call("fail", name=deep),
        call("elsewhere"),
    ]
    run = await Trial(graph, [calls, "Done."], [fail, FINE]).play()
    wrong, malformed, nested, unknown = run.results
    expect(wrong.startswith("The arguments of 'fail' are not valid: ") and "name" in wrong and "wrong" in wrong, True)
    expect(malformed, "The arguments of 'fail' are not valid: it is not JSON. Correct them and call again.")
    expect_in("nested", nested)
    expect(unknown, "There is no tool named 'elsewhere'. Call one of the registered tools: fail, fine.")
    expect(run.rows, ["post_tool.unknown_tool"])


async def tools_have_a_time_limit(graph: Graph) -> None:
    """A tool that is too slow is a failed one, even if it does not stop, and the run continues."""
    release = asyncio.Event()

    async def sleep() -> str:
        """Never return."""
        await asyncio.Event().wait()
        return ""

    async def insist() -> str:
        """Go on when it is cancelled."""
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return "at last"

    limits = {"tool_timeout_s": 0.02, "cancel_grace_s": 0.02}
    for slow in (sleep, insist):
        run = await Trial(graph, [call(slow.__name__), "Done."], [slow], limits=limits).play()
        expect((run.rows, run.result.output), (["post_tool.tool_error"], "Done."))
        expect_in("0.02 s", run.results[0])
    release.set()
    freed = threading.Event()

    def block() -> str:
        """Block a thread."""
        freed.wait()
        return "too late"

    run = await Trial(graph, [call("block"), "Done."], [block], limits=limits).play()
    expect((run.rows, run.result.output), (["post_tool.tool_error"], "Done."))
    freed.set()
    quick = tool(timeout=0.01)(sleep)
    run = await Trial(graph, [call("sleep"), "Done."], [quick]).play()
    expect_in("0.01 s", run.results[0])


async def parallel_calls_run_together(graph: Graph) -> None:
    """The calls of a batch run together only from where all that are left may; results stand in the order of calls."""
    running: list[str] = []
    most: list[int] = []

    async def work(name: str) -> str:
        """Work a little."""
        running.append(name)
        most.append(len(running))
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(name)
        return name

    both = [tool(name="together", parallel=True)(work), tool(name="alone")(work)]

    async def widths(kinds: str) -> list[int]:
        most.clear()
        names = {"p": "together", "s": "alone"}
        calls = [call(names[kind], name=str(n)) for n, kind in enumerate(kinds)]
        run = await Trial(graph, [calls, "Done."], both).play()
        expect(run.results, [str(n) for n in range(len(kinds))])
        return list(most)

    expect(await widths("ss"), [1, 1])
    expect(await widths("ppp"), [1, 2, 3])
    expect(await widths("pps"), [1, 1, 1])
    expect(await widths("spp"), [1, 1, 2])
    expect(await widths("pspp"), [1, 1, 1, 2])
    expect(max(await widths("p" * 40)), 40)

    async def fail(name: str) -> str:
        """Fail at once, or work."""
        if name == "1":
            raise ValueError("no luck")
        return await work(name)

    failing = tool(name="together", parallel=True)(fail)
    calls = [call("together", name=str(n)) for n in range(3)] + [call("nothing")]
    run = await Trial(graph, [calls[:3], "Done."], [failing]).play()
    expect((run.results, run.rows), (["0", "ValueError: no luck", "2"], ["post_tool.tool_error"]))
    run = await Trial(graph, [calls, "Done."], [failing]).play()
    expect((run.results[0], run.rows), ("0", ["post_tool.unknown_tool"]))


async def tools_learn_about_their_call(graph: Graph) -> None:
    """The context has the ids, who asked, and a key that is the same for each attempt at one call, and no other."""
    seen: list[ToolContext[Any]] = []

    @tool(idempotent=True, retryable=True)
    async def look(context: ToolContext[Any], n: int) -> str:
        """Note the context."""
        seen.append(context)
        context.progress("half", 0.5)
        if len(seen) == 1:
            raise ValueError("no luck")
        return "seen"

    script = [[call("look", "c1", n=1), call("look", "c2", n=2)], call("look", "c3", n=3), "Done."]
    store = MemoryStore()
    agent = Trial(graph, script, [look], store=store).agent()
    run = agent.run("Begin.", run_id="r", session_id="s", actor="ann", tags=["t"], metadata={"a": 1}, deps="d")
    events = [event async for event in run]
    expect([each.call_id for each in seen], ["c1", "c2", "c1", "c3"])
    keys = [each.idempotency_key for each in seen]
    expect((keys[0] == keys[2], len(set(keys))), (True, 3))
    expect([each.attempt for each in seen], [1, 1, 2, 1])
    one = seen[0]
    actor: Any = one.actor
    expect((one.run_id, one.session_id, actor.id, actor.verified), ("r", "s", "ann", False))
    expect((tuple(one.tags), dict(one.metadata), one.deps), (("t",), {"a": 1}, "d"))
    expect(next((e.message, e.fraction) for e in events if isinstance(e, ToolProgress)), ("half", 0.5))
    kinds = [type(each).__name__ for each in events if isinstance(each, ToolStarted | ToolProgress | ToolFinished)]
    expect((kinds[0], kinds.count("ToolStarted"), kinds.count("ToolFinished")), ("ToolStarted", 4, 4))
    expect(isinstance(events[-1], RunCompleted), True)
    await require_same_in_journal(store, run.result)


async def secrets_are_withheld(graph: Graph) -> None:
    """What a tool is given or gives as a secret is readable in no record of the run."""
    keys = ["sk-argument-1", "sk-result-2", "sk-default-3", "sk-deep-4", "sk-bytes-5"]
    default = SecretStr(keys[2])

    def login(user: str, key: SecretStr, other: SecretStr = default) -> dict[str, Any]:
        """Log in, and tell more than one should."""
        more = [{"deep": SecretStr(keys[3])}, Vault(code=SecretBytes(keys[4].encode()))]
        return {"account": Account(user, SecretStr(keys[1])), "more": more}

    def repeat() -> str:
        """Tell everything that is known."""
        return " ".join(keys)

    store = MemoryStore()
    script = [call("login", user="ann", key=keys[0]), call("repeat"), "Done."]
    run = await Trial(graph, script, [login, repeat], store=store).play()
    records, _ = await consistent_read(store, "trial")
    written = "".join(record.body + record.hidden for record in records)
    expect([key for key in keys if key in written], [])
    expect_in("ann", written)
    expect((keys[1] in run.results[0], keys[3] in run.results[0]), (False, False))


async def control_tools_end_the_run(graph: Graph) -> None:
    """``return_done``, ``return_unable`` and ``ask_user``; what comes after them in a batch is not run."""
    run = await Trial(graph, [[call("return_done", output="All."), call("fine")]], [FINE], preset="funnel").play()
    expect((run.rows, run.ending), (["post_tool.declared_done"], ("RunCompleted", "All.")))
    expect(run.results[1], "Not run: an earlier call of the same message ended the run.")
    run = await Trial(graph, [call("return_unable", rationale="no key")], preset="funnel").play()
    expect((run.rows, run.ending[0]), (["post_tool.declared_unable"], "Handoff"))
    expect(run.ending[1], "no key")
    ask = call("ask_user", question="Which?", context="Two fit.", choices=["a", "b"])
    script = [[ask, call("fine")], call("return_done", output="Done.")]
    trial = Trial(graph, script, [FINE], preset="funnel")
    waiting: Any = (await trial.agent().run("Begin.")).outcome
    expect((waiting.kind, waiting.question, waiting.context), ("question", "Which?", "Two fit."))
    expect(tuple(waiting.choices), ("a", "b"))
    run = await replace(trial, answers=["b"]).play()
    expect(
        (run.results[:2], run.rows[:2]),
        (["b", "Not run: the user was asked a question first."], ["post_tool.question_asked", "suspended.replied"]),
    )
    run = await Trial(graph, ["Just text.", call("return_done", output="Done.")], preset="funnel").play()
    expect(
        (run.rows[0], "call return_done if the task is finished" in run.asked_last(1)), ("post_llm.no_progress", True)
    )

    @tool(ends_run=True)
    def finish(x: int) -> Point:
        """Finish."""
        return Point(x=x)

    def agent(*script: Any) -> Agent[Any, Any]:
        def even(context: Any, answer: Point) -> Point | None:
            if answer.x % 2:
                raise ValueError("it must be even")
            return Point(x=100) if answer.x == 4 else None

        model = RecordingModel(ScriptedModel(script))
        host = Host(clock=FakeClock())
        return Agent(model, graph=graph, tools=[finish, FINE], output_type=Point, output_validators=[even], host=host)

    trial = Trial(graph, ())
    run = await trial.play(agent([call("finish", x=2), call("fine")]))
    expect((run.result.output, run.rows), (Point(x=2), ["post_tool.declared_done"]))
    expect(run.results, ['{"x":2}', "Not run: an earlier call of the same message ended the run."])
    run = await trial.play(agent(call("finish", x=1), call("finish", x=4)))
    expect((run.result.output, run.rows), (Point(x=100), ["post_tool.tool_error", "post_tool.declared_done"]))
    expect(run.results[0], "the answer was checked and refused: it must be even")
    plain = tool(ends_run=True, name="finish")(lambda: {"y": [1.0, Opaque()]})
    run = await Trial(graph, [call("finish")], [plain]).play()
    expect(run.result.output, {"y": [1.0, "an opaque thing"]})
    typed = Agent(
        RecordingModel(ScriptedModel([call("finish"), '{"x": 3}'])),
        graph=graph,
        tools=[plain],
        output_type=Point,
        host=Host(clock=FakeClock()),
    )
    run = await trial.play(typed)
    expect((run.rows, run.result.output), (["post_tool.tool_error"], Point(x=3)))
    expect(run.results[0].startswith("its result does not have the required format ("), True)


# -- people -----------------------------------------------------------------------------------------------


def _pay(done: list[int]) -> Any:
    @tool(requires_approval=lambda arguments: arguments["amount"] > 100)
    def pay(amount: int) -> str:
        """Make a payment."""
        done.append(amount)
        return f"paid {amount}"

    return pay


async def approvals_are_asked_for(graph: Graph) -> None:
    """A call that needs approval runs only as a person allows it; a denial, which the model sees, is not a failure."""
    done: list[int] = []
    pay, large, small = _pay(done), call("pay", amount=200), call("pay", amount=100)
    approved = ["dispatch_tool.approval_required", "suspended.approval_decided"]
    for answer, results, paid in (
        (Allow(), ["paid 200"], [200]),
        (Deny("too much"), ["Denied by the user: too much"], []),
        (Deny(), ["Denied by the user."], []),
        (Edit({"amount": 150}), ["paid 150\n[Note: a person changed the arguments of this call.]"], [150]),
    ):
        done.clear()
        run = await Trial(graph, [large, "Done."], [pay], [answer]).play()
        expect((run.results, done, run.rows), (results, paid, approved))
        expect(run.waits, [("approval", "May 'pay' run with these arguments?")])
    done.clear()
    run = await Trial(graph, [[small, large, small], "Done."], [pay], [Allow()]).play()
    expect((done, run.rows), ([100, 200, 100], approved))
    run = await Trial(graph, [*[large] * 4, "Done."], [pay], [Deny("no")] * 4, policy=Stubborn()).play()
    expect((run.rows.count("post_tool.policy_violation"), run.result.output), (1, "Done."))
    run = await Trial(graph, [large] * 4, [pay], [Deny("no")] * 4).play()
    expect((run.rows[-2:], len(run.waits)), (["post_tool.policy_violation", "recover.handoff"], 3))
    outcome: Any = run.result.outcome
    expect((outcome.rationale, outcome.blockers), ("3 tool calls in a row were denied", ("3 denials in a row",)))
    for between in (small, call("nothing")):
        run = await Trial(graph, [large, large, between, large, large, "Done."], [pay], [Deny("no")] * 4).play()
        expect(run.result.output, "Done.")
    agent = Trial(graph, [large, "Done."], [pay]).agent()
    record = record_of(await agent.run("Begin."))
    for wrong in (Edit({"amount": "much"}), Edit({}), ItRan("yes"), Extend(tokens=1), Fill({"a": 1}), "yes"):
        await expect_error(HumanReplyError, agent.resume(record, wrong))
    ended = await agent.resume(record, Allow())
    expect(ended.output, "Done.")
    await expect_error(SuspensionUsedError, agent.resume(record, Allow()))
    agent = Trial(graph, [large, "Done.", "Done."], [pay]).agent()
    record = record_of(await agent.run("Begin."))
    both = [result_of(agent.resume(record, Allow())) for _ in range(2)]
    one, other = await asyncio.gather(*both, return_exceptions=True)
    expect({type(one), type(other)}, {RunResult, SuspensionUsedError})


_ABORTED = "dispatch_tool.aborted"


async def hooks_decide_about_calls(graph: Graph) -> None:
    """A hook before a call may skip it, deny it, ask for approval, or abort the run, also by failing closed."""
    decisions: dict[str, Any] = {
        "skip": SkipCall("not now"),
        "deny": DenyCall("not you"),
        "ask": AskApproval("Really?"),
        "ask_plainly": AskApproval(),
        "abort": AbortRun("stop it"),
        "wrong": "whatever",
        "none": None,
        "often": Approval(2),
    }
    seen: list[HookContext[Any]] = []

    def check(context: HookContext[Any]) -> Any:
        seen.append(context)
        return decisions[context.arguments["how"]]

    def work(how: str, n: int = 5) -> str:
        """Work."""
        return "worked"

    async def play(how: str, *answers: Any, fail_open: bool = True) -> TrialRun:
        at_calls = hook("dispatch_tool", fail_open=fail_open)(check)
        return await Trial(graph, [call("work", how=how), "Done."], [work], answers, hooks=[at_calls]).play()

    expect((await play("skip")).results, ["Not run: not now"])
    expect((await play("deny")).results, ["Denied: not you"])
    expect((await play("none")).results, ["worked"])
    shown: Any = seen[-1]
    expect((dict(shown.arguments), shown.call.name, shown.tool.name), ({"how": "none", "n": 5}, "work", "work"))
    run = await play("ask", Allow())
    expect((run.waits, run.results), ([("approval", "Really?")], ["worked"]))
    run = await play("ask_plainly", Deny())
    expect(run.waits, [("approval", "May 'work' run with these arguments?")])
    run = await play("abort")
    expect(run.ending, ("RunAborted", "hook check aborted the run: stop it"))
    expect(run.results, ["Interrupted: the run was aborted before this call had a result."])
    expect((await play("wrong")).results, ["worked"])
    run = await play("wrong", fail_open=False)
    text = "hook check raised TypeError: 'whatever' is not a valid hook decision for a call"
    expect(run.ending, ("RunAborted", text))
    unattended = graph.without("dispatch_tool.approval_required", "suspended.approval_decided")
    asking = Trial(unattended, [call("work", how="ask")], [work], hooks=[hook("dispatch_tool")(check)])
    run = await asking.play()
    expect((run.rows[-1], "no row of the state takes 'approval_required'" in run.ending[1]), (_ABORTED, True))
    often = tool(name="work", requires_approval=lambda arguments: decisions["often"])(work)
    run = await Trial(graph, [call("work", how="none")], [often]).play()
    if not counts_votes(graph):
        expect((run.rows[-1], "the graph counts no votes" in run.ending[1]), (_ABORTED, True))
    denied = [call("work", how="deny")] * 4
    run = await Trial(graph, denied, [work], hooks=[hook("dispatch_tool")(check)]).play()
    expect((run.rows[-1], len(run.requests)), ("recover.handoff", 3))


async def approval_rules_fail_closed(graph: Graph) -> None:
    """A rule that raises, or tries to change the run, ends it; one that takes a context sees the run."""
    done: list[int] = []

    def fail(arguments: Any) -> bool:
        raise LookupError("no rule")

    def meddle(arguments: Any, context: HookContext[Any]) -> bool:
        run: Any = context.run
        run.iterations = 0
        return False

    def ask(arguments: Any, context: HookContext[Any]) -> bool:
        return context.run.model_calls == 1 and context.call is not None

    for rule, text in ((fail, "requires_approval of 'work' raised LookupError: no rule"), (meddle, "tried to change")):

        @tool(requires_approval=rule)
        def work(n: int) -> str:
            """Work."""
            done.append(n)
            return "worked"

        run = await Trial(graph, [call("work", n=1), "Done."], [work]).play()
        expect((run.ending[0], done), ("RunAborted", list[int]()))
        expect_in(text, run.ending[1])
        expect(run.rows[-1], "dispatch_tool.aborted")
    rules: list[Any] = [True, Approval(roles=("boss",)), Approval(roles=("boss",))]

    def next_rule(arguments: Any) -> Any:
        return rules.pop(0)

    strict = replace(work, requires_approval=next_rule)
    agent = Trial(graph, [call("work", n=0), "Done."], [strict]).agent()
    waiting = await agent.resume(record_of(await agent.run("Begin.")), Allow())
    question = "May 'work' run with these arguments? It was approved, but not by those who must approve it now."
    outcome: Any = waiting.outcome
    expect((outcome.question, done), (question, list[int]()))
    asking = replace(work, requires_approval=ask)
    run = await Trial(graph, [call("work", n=1), call("work", n=2), "Done."], [asking], [Allow()]).play()
    expect((len(run.waits), done), (1, [1, 2]))


async def votes_are_counted(graph: Graph) -> None:
    """So many people, with one of the roles, but not the requester; the first denial decides."""
    graph = with_votes(graph)
    done: list[int] = []
    ann, bob, eve = (Actor(name, ("boss",)) for name in ("ann", "bob", "eve"))

    def agent(rule: Approval, clock: FakeClock, host: Host | None = None) -> Agent[Any, Any]:
        @tool(requires_approval=rule)
        def close(n: int) -> str:
            """Close."""
            done.append(n)
            return "closed"

        return Trial(graph, [call("close", n=1), "Done."], [close], clock=clock, host=host).agent()

    rule = Approval(2, roles=("boss",), not_requester=True)
    one = agent(rule, FakeClock())
    first = record_of(await one.run("Begin.", actor=eve))
    await expect_error(ActorRoleError, one.resume(first, Allow(), by=Actor("tom")))
    await expect_error(ActorRoleError, one.dismiss(first, by=Actor("tom")))
    await expect_error(ActorIsRequesterError, one.resume(first, Allow(), by=eve))
    waiting = await one.resume(first, Allow(), by=ann)
    expect((type(waiting.outcome), waiting.decisions[0].transition.id), (UserInputRequested, "suspended.vote_recorded"))
    second: Any = record_of(waiting)
    await expect_error(RepeatedVoteError, one.resume(second, Allow(), by=Actor("ANN", ("boss",))))
    expect(done, [])
    ended = await one.resume(second, Allow(), by=bob)
    expect((ended.output, done), ("Done.", [1]))
    two = agent(rule, FakeClock())
    waiting = await two.run("Begin.", actor=eve)
    waiting = await two.resume(record_of(waiting), Allow(), by=ann)
    ended = await two.resume(record_of(waiting), Deny("no"), by=bob)
    expect((ended.messages[2].content, done), ("Denied by the user: no", [1]))
    clock = FakeClock()
    late = agent(Approval(roles=("boss",), escalate_to=("chief",), escalate_after_s=60), clock)
    record = record_of(await late.run("Begin."))
    await expect_error(ActorRoleError, late.resume(record, Allow(), by=Actor("cleo", ("chief",))))
    clock.advance(61)
    ended = await late.resume(record, Allow(), by=Actor("cleo", ("chief",)))
    expect((ended.output, done), ("Done.", [1, 1]))
    vouching = Host(
        clock=FakeClock(),
        secret=SECRET,
        authenticate=lambda token: Actor(token, ("boss",)) if token in ("ann", "bob") else None,
    )
    strict = agent(rule, FakeClock(), vouching)
    record = record_of(await strict.run("Begin.", actor="ann"))
    await expect_error(AuthenticationError, strict.resume(record, Allow(), by="tom"))
    await expect_error(AuthenticationError, strict.resume(record, Allow()))
    waiting = await strict.resume(record, Allow(), by="bob")
    ended = await strict.dismiss(record_of(waiting), "enough", by="bob")
    outcome: Any = ended.outcome
    expect((outcome.reason, done), ("enough (by bob (boss))", [1, 1]))
    strict = agent(Approval(2), FakeClock(), vouching)
    waiting = await strict.resume(record_of(await strict.run("Begin.", actor="ann")), Allow(), by="bob")
    ended = await strict.resume(record_of(waiting), Allow(), by="ann")
    expect((ended.output, done), ("Done.", [1, 1, 1]))
    believing, strict = agent(Approval(2), FakeClock()), agent(Approval(2), FakeClock(), vouching)
    waiting = await believing.resume(record_of(await believing.run("Begin.")), Allow(), by=ann)
    waiting = await strict.resume(record_of(waiting), Allow(), by="bob")  # what others only claim does not count
    expect((type(waiting.outcome), done), (UserInputRequested, [1, 1, 1]))


async def answers_are_bound_to_what_was_asked(graph: Graph) -> None:
    """An answer counts once, in time and for the question; what is not an answer leaves the run as it was."""
    clock = FakeClock()
    ask = ToolError("two fit", kind="ambiguous_input")

    def pick() -> str:
        """Find too much."""
        raise ask

    agent = Trial(graph, [call("pick"), "Done.", "Done."], [pick], clock=clock).agent()
    record = record_of(await agent.run("Begin."))
    await expect_error(BlankHumanReplyError, agent.resume(record, "  "))
    for wrong in (Allow(), GiveUp(), Edit({"a": 1})):
        await expect_error(HumanReplyError, agent.resume(record, wrong))
    ended = await agent.resume(record, "The first.")
    expect((ended.output, ended.messages[-2].content), ("Done.", "The first."))
    agent = Trial(graph, [call("pick"), "Done."], [pick], clock=clock).agent()
    before = [event async for event in agent.run("Begin.")]
    waiting: Any = before[-1]
    after = [event async for event in agent.resume(waiting.suspension_record, "The first.")]
    expect([event.seq for event in (*before, *after)], list(range(1, len(before) + len(after) + 1)))
    expect([event.kind for event in after if isinstance(event, RunResumed)], ["question"])
    agent = Trial(graph, [call("pick"), "Done."], [pick], clock=clock, limits={"validity_s": 60.0}).agent()
    record = record_of(await agent.run("Begin."))
    clock.advance(61)
    await expect_error(SuspensionExpiredError, agent.resume(record, "The first."))
    ended = await agent.dismiss(record)
    expect(ended.decisions[-1].transition.id, "suspended.expired")
    agent = Trial(graph, [call("pick"), "Done."], [pick], clock=clock).agent()
    record = record_of(await agent.run("Begin."))
    ended = await agent.dismiss(record, "not today")
    outcome: Any = ended.outcome
    expect((outcome.reason, ended.decisions[-1].transition.id), ("not today", "suspended.cancelled"))


async def amounts_are_checked(graph: Graph) -> None:
    """``Extend`` takes one amount, of the right type, above 0; replies are JSON."""
    half: Any = 1.5
    replies: Sequence[Any] = (
        Extend(tokens=1, usd=1.0),
        Extend(tokens=0),
        Extend(tokens=-1),
        Extend(tokens=True),
        Extend(tokens=half),
        Extend(model_calls=half),
        Extend(usd=float("nan")),
        Extend(seconds=float("inf")),
        Extend(usd=10.0**13),
        Extend(message=half),
        Edit({"a": Opaque()}),
        Edit({"a": float("nan")}),
        Fill({"a": Opaque()}),
        half,
    )
    for wrong in replies:
        expect_refusal(HumanReplyError, partial(to_human_reply, wrong))
    for right in (Extend(tokens=1), Extend(usd=0.5), Extend(usd=1), Extend(seconds=1e12), Extend(model_calls=2)):
        reply = to_human_reply(right)
        expect((reply.kind, (reply.unit, reply.amount)), ("extend", _amount(right)))
    expect(to_human_reply(Extend(message="hi")).text, "hi")
    expect(to_human_reply(Fill({"a": 1})).arguments, {"a": 1})


def _amount(extend: Extend) -> tuple[str, float]:
    amounts = {u: getattr(extend, u) for u in ("tokens", "usd", "seconds", "model_calls")}
    ((unit, amount),) = ((u, a) for u, a in amounts.items() if a is not None)
    return unit, float(amount)


# -- crashes ----------------------------------------------------------------------------------------------


class _Crash(BaseException):
    """The process dies."""


async def _crash(agent: Agent[Any, Any]) -> None:
    """Run an agent until its process dies, as far as the run can tell."""
    try:
        await agent.run("Begin.", run_id="r")
    except _Crash as crash:
        crash.__traceback__ = crash.__context__ = None  # which would keep the run alive, and with it its lease
        gc.collect()
        return
    raise AssertionError("nothing crashed")


async def crashes_leave_calls_in_doubt(graph: Graph) -> None:
    """A call that had started is asked about, unless it may be repeated; results that were there are kept."""
    starts: list[str] = []

    def crashing(name: str, crashes: int, *, idempotent: bool = False, parallel: bool = False) -> Any:
        left = [crashes]

        async def work() -> str:
            """Crash so many times."""
            starts.append(name)
            left[0] -= 1
            if left[0] >= 0:
                for _ in range(20 if parallel else 0):  # the other calls end first
                    await asyncio.sleep(0)
                raise _Crash
            return f"{name} is done"

        return tool(name=name, idempotent=idempotent, parallel=parallel)(work)

    async def play(script: Sequence[Any], *tools: Any, answer: Any = None) -> Any:
        starts.clear()
        agent = Trial(graph, script, tools, store=MemoryStore()).agent()
        await _crash(agent)
        result = await agent.resume("r")
        if answer is not None:
            expect(result.decisions[-1].transition.id, "dispatch_tool.in_doubt")
            result = await agent.resume("r", answer)
        return result

    script = [[call("before"), call("work"), call("after")], "Done."]
    calm = [crashing("before", 0), crashing("after", 0)]
    given_up = "It is not known whether this call ran, and it was given up. Do not repeat it."
    for answer, text, started in (
        (ItRan("it ran"), "it ran", 1),
        (ItDidNotRun(), "work is done", 2),
        (GiveUp(), given_up, 1),
    ):
        result = await play(script, *calm, crashing("work", 1), answer=answer)
        expect((result.output, tool_results(result.messages)), ("Done.", ["before is done", text, "after is done"]))
        expect((starts.count("before"), starts.count("work"), starts.count("after")), (1, started, 1))
    result = await play(script, *calm, crashing("work", 1, idempotent=True))
    expect((tool_results(result.messages)[1], starts), ("work is done", ["before", "work", "work", "after"]))
    beside = [crashing("before", 0, parallel=True), crashing("after", 0, parallel=True)]
    result = await play(script, *beside, crashing("work", 1, parallel=True), answer=ItRan("it ran"))
    expect((sorted(starts), tool_results(result.messages)[1]), (["after", "before", "work"], "it ran"))

    async def dies(messages: Any) -> str:
        raise _Crash

    result = await play([call("before"), dies, "Done."], *calm)
    expect((result.output, starts), ("Done.", ["before"]))
    agent = Trial(graph, [dies], store=MemoryStore()).agent()
    await _crash(agent)
    ended = await agent.dismiss("r", "not today")
    expect((ended.decisions[-1].transition.id, ended.run_state.model_calls), ("call_llm.cancelled", 0))


async def a_wait_goes_on_after_a_crash(graph: Graph) -> None:
    """A run that dies while it is to back off waits for the rest when it is resumed, and no longer."""
    for passed_s, rest in ((1.5, [0.5]), (5.0, list[float]())):
        clock, deaths = FakeClock(), [passed_s]

        def die(context: Any, clock: FakeClock = clock, deaths: list[float] = deaths) -> None:
            if deaths:
                clock.advance(deaths.pop())
                raise _Crash

        script = [TransientProviderError, "Done."]  # an error kept here would keep the run alive
        agent = Trial(graph, script, hooks=[hook("recover")(die)], clock=clock, store=MemoryStore()).agent()
        await _crash(agent)
        ended = await agent.resume("r")
        expect((ended.output, [each for each in clock.slept if each]), ("Done.", rest))


class _FullStore(MemoryStore):
    """A store that takes so many records."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records while there is room."""
        self.room -= len(records)
        if self.room < 0:
            raise StoreFullError("there is no room")
        return super().append(lease, records, status, info, snapshot)


async def nothing_runs_without_a_record(graph: Graph) -> None:
    """A run whose journal cannot be written stops before its next effect."""
    done: list[int] = []

    def work(n: int) -> str:
        """Work."""
        done.append(n)
        return "worked"

    for room in range(14):
        done.clear()
        script = [call("work", n=1), call("work", n=2), "Done."]
        agent = Trial(graph, script, [work], store=_FullStore(room)).agent()
        await expect_error(StoreError, agent.run("Begin."))
        expect((room, len(done)), (room, int(room >= 6)))  # the sixth record says that the tool is about to run


async def sub_agents_ask_one_after_the_other(graph: Graph) -> None:
    """Sub-agents that run together and wait are answered in the order of their calls; nobody is asked twice."""
    done: list[int] = []

    def helper(amount: int) -> Agent[Any, Any]:
        return Agent(ScriptedModel([call("pay", amount=amount), f"Paid {amount}."]), tools=[_pay(done)], graph=graph)

    for stored in (False, True):
        done.clear()
        named = {"one": helper(200), "two": helper(300)}
        helpers = [each.as_tool(name, "Pays.", parallel=True) for name, each in named.items()]
        script = [[call("one", task="Pay."), call("two", task="Pay.")], "Done."]
        host = Host(clock=FakeClock(), secret=SECRET, store=MemoryStore() if stored else None)
        run = await Trial(graph, script, helpers, [Allow(), Allow()], host=host).play()
        expect((run.results, sorted(done), len(run.waits)), (["Paid 200.", "Paid 300."], [200, 300], 2))


# -- sub-agents -------------------------------------------------------------------------------------------


async def sub_agents_are_charged(graph: Graph) -> None:
    """What a sub-agent uses is its caller's; its questions and cancellations are, too."""

    def said(text: str) -> Reply:
        return Reply(Message.assistant(text), usage=Usage(20, 5))

    done: list[int] = []

    def helper(*script: Any, tools: Sequence[Any] = ()) -> Agent[Any, Any]:
        return Agent(ScriptedModel(script), tools=tools, graph=graph)

    def caller(*helpers: Agent[Any, Any], limits: Mapping[str, Any] | None = None, parallel: bool = False) -> Trial:
        tools = [each.as_tool(f"help{n}", "Helps.", parallel=parallel) for n, each in enumerate(helpers)]
        batch = [call(each.name, task="Do it.") for each in tools]
        return Trial(graph, [batch, said("Done.")], tools, limits=limits or {})

    run = await caller(helper(said("I did."))).play()
    expect((run.results, run.result.usage), (["I did."], Usage(40, 10)))
    expect((run.result.run_state.model_calls, run.result.run_state.iterations), (3, 3))
    trial = caller(helper(call("pay", amount=200), said("I paid."), tools=[_pay(done)]))
    run = await replace(trial, answers=[Allow()]).play()
    expect((run.results, done, run.waits[0][0]), (["I paid."], [200], "approval"))
    expect(run.rows, ["dispatch_tool.approval_required", "suspended.approval_decided"])
    limited = caller(helper(*[call("fine", n=n) for n in range(9)], tools=[FINE]), limits={"max_iterations": 4})
    run = await limited.play()
    expect(run.result.run_state.model_calls <= 4, True)
    run = await caller(helper(said("one")), helper(said("two")), parallel=True).play()
    expect((run.results, run.result.usage), (["one", "two"], Usage(60, 15)))
    failing = caller(helper(ValueError("no luck")))
    run = await failing.play()
    expect((run.rows, run.result.output), (["post_tool.tool_error"], "Done."))
    started = asyncio.Event()

    async def waits(messages: Any) -> str:
        return await hang(started)

    cancelled = caller(helper(waits)).agent().run("Begin.")
    task = asyncio.ensure_future(result_of(cancelled))
    await begun(started, task)
    cancelled.cancel("not today")
    result = await task
    cut_off = "Interrupted: the run was cancelled before this call had a result."
    expect(tool_results(result.messages), [cut_off])
    slow = helper(waits).as_tool("help0", "Helps.", timeout=0.02)
    run = await Trial(graph, [call("help0", task="Do it."), "Done."], [slow]).play()
    expect((run.rows, run.result.output), (["post_tool.tool_error"], "Done."))


async def tools_may_ask(graph: Graph) -> None:
    """A tool that asks a person is called again with the answers so far, and its question is the run's."""
    heard: list[str] = []

    @tool(asks=True)
    async def book(context: ToolContext[Any]) -> str:
        """Book a table."""
        day = await context.ask("Which day?", context="Two are free.", choices=["Mon", "Tue"])
        heard.append(day)
        return f"{day} for {await context.ask('How many?')}"

    trial = Trial(graph, [[call("fine"), call("book"), call("fine", n=2)], "Done."], [book, FINE])
    waiting: Any = (await trial.agent().run("Begin.")).outcome
    expect(isinstance(waiting, UserInputRequested) or waiting, True)
    expect((waiting.kind, waiting.question, tuple(waiting.choices)), ("question", "Which day?", ("Mon", "Tue")))
    run = await replace(trial, answers=["Tue", "four"]).play()
    expect((run.results, heard), (["fine 0", "Tue for four", "fine 2"], ["Tue", "Tue"]))
    expect(run.waits, [("question", "Which day?"), ("question", "How many?")])


CHECKS: Sequence[LoopCheck] = (
    results_become_text,
    errors_become_results,
    tools_have_a_time_limit,
    parallel_calls_run_together,
    tools_learn_about_their_call,
    secrets_are_withheld,
    control_tools_end_the_run,
    approvals_are_asked_for,
    hooks_decide_about_calls,
    approval_rules_fail_closed,
    votes_are_counted,
    answers_are_bound_to_what_was_asked,
    amounts_are_checked,
    crashes_leave_calls_in_doubt,
    a_wait_goes_on_after_a_crash,
    nothing_runs_without_a_record,
    sub_agents_are_charged,
    sub_agents_ask_one_after_the_other,
    tools_may_ask,
)
"""Each of them takes a graph made from ``LOOP``."""
