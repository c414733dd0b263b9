"""Sample journals, and the agents, tools and scenarios of the crash tests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    ContextOverflowError,
    Edit,
    Failure,
    FailureKind,
    Graph,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    Message,
    Migration,
    Reply,
    Role,
    RunState,
    StateSpec,
    ToolContext,
    TransientProviderError,
    Transition,
    tool,
)
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.records import SealedRecord
from agentfsm.loop.messages import FinishReason
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import FakeClock, ScriptedModel, call


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool(requires_approval=True)
def pay(to: str, amount: float) -> str:
    """Pay."""
    return f"paid {amount} to {to}"


@tool(idempotent=True, retryable=True, parallel=True)
async def look(path: str) -> str:
    """Look."""
    if path == "none":
        raise FileNotFoundError("no such file")
    return f"contents of {path}"


SAMPLE_SCRIPT = [
    call("add", a=1, b=2),
    TransientProviderError("busy", retry_after_s=1.5),
    [call("look", path="a"), call("look", path="none")],
    [call("pay", to="Ann", amount=1.0), call("add", a=2, b=2)],
    "all done",
]


def sample_agent(store: Any, script: Any = SAMPLE_SCRIPT, **more: Any) -> Agent:
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    return Agent(ScriptedModel(script), tools=[add, pay, look], instructions="Be brief.", host=host, **more)


def finished_run(store: Any = None, run_id: str = "sample") -> tuple[Any, Any]:
    """A store with one finished run in it, and its result."""
    store = MemoryStore() if store is None else store

    async def live() -> Any:
        agent = sample_agent(store)
        await agent.run("Do it all.", run_id=run_id)
        return await agent.resume(run_id, Edit({"to": "Bob", "amount": 2.0}))

    return store, asyncio.run(live())


def waiting_run(store: Any = None, run_id: str = "sample") -> tuple[Any, Any]:
    """A store with one run in it that waits for an approval, and its result."""
    store = MemoryStore() if store is None else store
    return store, asyncio.run(_await_run(sample_agent(store).run("Do it all.", run_id=run_id)))


async def _await_run(run: Any) -> Any:
    return await run


def reseal(rows: list[SealedRecord], first: int = 0) -> list[SealedRecord]:
    """Rows with every hash from one on made to fit, as somebody would who writes a journal anew."""
    head = rows[first - 1].hash if first else GENESIS_HASH
    made = rows[:first]
    for row in rows[first:]:
        head = record_hash(head, row.body)
        made.append(row._replace(hash=head))
    return made


BUSY, LONG = TransientProviderError("busy"), ContextOverflowError("too long")
SCENARIOS: dict[str, tuple[str, list[Any]]] = {
    "linear": ("standard", [call("once", n=1), call("again", n=2), "done"]),
    "several": ("standard", [[call("once", n=1), call("again", n=2), call("once", n=3)], "done"]),
    "parallel": ("standard", [[call("beside", n=1), call("beside_once", n=2), call("beside", n=3)], "done"]),
    "approval": ("standard", [call("careful", n=1), [call("careful", n=2), call("again", n=3)], "done"]),
    "question": ("funnel", [call("ask_user", question="which?"), call("once", n=1), call("return_done", output="x")]),
    "backoff": ("standard", [(BUSY, LONG, call("once", n=1)), "done"]),
    "failing": ("standard", [call("flaky", n=1), call("nobody", n=2), call("flaky", n=2), "done"]),
    "limit": ("standard", [call("again", n=1), call("again", n=2), call("once", n=3), "done"]),
    "fork": ("standard", [call("once", n=1), call("again", n=2), call("once", n=3), "done"]),
    "renamed": ("standard", [call("once", n=1), [call("careful", n=1), call("again", n=2)], call("once", n=3), "done"]),
    "stricter": ("standard", [call("once", n=1), call("careful", n=1), call("again", n=2), "done"]),
    "vouched": ("standard", [call("once", n=1), call("careful", n=2), call("again", n=3), "done"]),
}


def too_long(run: RunState) -> Failure | None:
    """Nothing that is said in these runs is."""
    text = "" if run.reply is None else run.reply.message.content
    return Failure(kind=FailureKind.scope_too_large, explanation="too long") if len(text) > 160 else None


def long_answer(run: RunState) -> Failure | None:
    """The same under another name."""
    return too_long(run)


def no_once(run: RunState) -> Failure | None:
    """Forbids what a run has done before it is taken over."""
    calls = any(c.call.name == "once" for c in run.batch)
    return Failure(kind=FailureKind.capability_gap, explanation="not once") if calls else None


def _loop_with_reviewer(state: str, guard: Any) -> Graph:
    """The loop with a state of its own in front of all tools, and a guard of its own."""
    spec, leaves = StateSpec(state, effect=lambda run: len(run.messages)), [Transition(state, None, "dispatch_tool")]
    graph = LOOP.with_state(spec, leaves, entered_by="post_llm.tool_calls")
    return graph.with_detector("post_llm", guard, before="no_progress")


class GraphChange(NamedTuple):
    """The graph of a scenario whose run begins under one and goes on under another.

    Attributes:
        old: The graph under which it begins. Whoever takes it up later, has the new one.
        new: That one.
        migration: What lets it in.
        waiting: Whether it is taken over only where it waits for a person, and not where it was cut off.
    """

    old: Graph
    new: Graph
    migration: Migration
    waiting: bool = False


_REVIEW, _CHECK = _loop_with_reviewer("review", too_long), _loop_with_reviewer("check", long_answer)
_NAMES = {"post_llm.too_long": "post_llm.long_answer"}
_NO_ONCE = LOOP.with_detector("post_llm", no_once, before="no_progress")
CHANGES = {
    "renamed": GraphChange(_REVIEW, _CHECK, Migration(_REVIEW, states={"review": "check"}, transitions=_NAMES)),
    "stricter": GraphChange(LOOP, LOOP.with_detector("post_llm", too_long, before="no_progress"), Migration()),
    "vouched": GraphChange(LOOP, _NO_ONCE, Migration(LOOP, vouched=True), waiting=True),
}
IDEMPOTENT_TOOLS = {"again", "beside", "flaky"}
CLOCK_JUMPS_S = (0, -10_800, 21_600, 3600, -36_000, 7200)
"""Where the wall clock of each life stands, next to that of the first one."""
COMMIT_DELAY_S = 0.003
"""How long a thread that is not the run's own waits at its end, while the run goes on as far as it can."""


class CrashWorld:
    """What outlives a process: files in a folder.

    Args:
        folder: Where they are.
        kill_at: The point at which the process ends: the so-manieth of all, or, since threads may pass theirs in
            another order each time, the so-manieth of its name (``after once 2``); 0 for none.
        outside: A pipe into which the point is written; whoever reads it kills the process. Without one, the
            process kills itself.
    """

    def __init__(self, folder: Path, kill_at: int | str = 0, outside: int | None = None) -> None:
        self.folder, self.kill_at, self.outside, self.passed = folder, kill_at, outside, 0
        self.names = Counter[str]()

    def passing(self, where: str) -> None:
        """A point."""
        self.passed += 1
        self.names[where] += 1
        if self.kill_at not in (self.passed, f"{where} {self.names[where]}"):
            return
        self.write("killed", where)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(COMMIT_DELAY_S)
        if self.outside is None:
            os.kill(os.getpid(), signal.SIGKILL)
            return
        os.write(self.outside, b"x")
        time.sleep(60)  # the other threads go on until they are killed too
        sys.exit("nobody killed it")

    def write(self, name: str, line: str) -> None:
        """Add a line to a file."""
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")

    def lines(self, name: str) -> list[str]:
        """What stands in a file, which need not be there."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def effect(self, name: str, key: str, result: str) -> str:
        """What a tool does to the outside."""
        self.passing(f"before {name}")
        self.write("effects", json.dumps([name, key, result]))
        self.passing(f"after {name}")
        return result

    def effects(self) -> list[tuple[str, str, str]]:
        """Name, idempotency key and result of everything that tools did."""
        return [tuple(json.loads(line)) for line in self.lines("effects")]


class TranscriptModel:
    """A model whose reply depends on nothing but the transcript, so asking again gives the same."""

    name = "by-transcript"

    def __init__(self, world: CrashWorld, script: list[Any]) -> None:
        self.world, self.script = world, script

    async def reply(self, request: Any) -> Reply:
        self.world.passing("before the model")
        said = sum(m.role is Role.ASSISTANT for m in request.messages)
        entry = self.script[said]
        if isinstance(entry, tuple):  # fails until the run has learned from each failure
            *errors, entry = entry
            for error in errors:
                if error.kind not in request.messages[-1].content:
                    raise error
        self.world.passing("after the model")
        if isinstance(entry, str):
            return Reply(Message.assistant(entry))
        calls = tuple(
            type(c)(f"call{said}_{n}", c.name, c.arguments)
            for n, c in enumerate(entry if isinstance(entry, list) else [entry])
        )
        return Reply(Message.assistant("", calls), FinishReason.TOOL_CALLS)


def tool_functions(world: CrashWorld) -> list[Any]:
    """The tools' functions, in this world."""

    def once(context: ToolContext, n: int) -> str:
        """Runs at most once."""
        return world.effect("once", context.idempotency_key, f"once {n}")

    async def again(context: ToolContext, n: int) -> str:
        """May run again."""
        return world.effect("again", context.idempotency_key, f"again {n}")

    async def beside(context: ToolContext, n: int) -> str:
        """May run beside others, and again."""
        await asyncio.sleep(0)
        return world.effect("beside", context.idempotency_key, f"beside {n}")

    async def beside_once(context: ToolContext, n: int) -> str:
        """May run beside others, once."""
        await asyncio.sleep(0)
        return world.effect("beside_once", context.idempotency_key, f"beside_once {n}")

    def careful(context: ToolContext, n: int) -> str:
        """Must be allowed."""
        return world.effect("careful", context.idempotency_key, f"careful {n}")

    def flaky(context: ToolContext, n: int) -> str:
        """Fails where it is asked for 1."""
        result = world.effect("flaky", context.idempotency_key, f"flaky {n}")
        if n == 1:
            raise ValueError("not with 1")
        return result

    return [once, again, beside, beside_once, careful, flaky]


TOOL_DECLARATIONS = [
    tool(**options)(function)
    for function, options in zip(
        tool_functions(CrashWorld(Path())),
        [
            {},
            {"idempotent": True},
            {"idempotent": True, "parallel": True},
            {"parallel": True},
            {"requires_approval": True},
            {"idempotent": True, "retryable": True},
        ],
        strict=True,
    )
]
"""The tools in no world: making them out of functions takes longer than a life with them."""


def make_tools(world: CrashWorld) -> list[Any]:
    """The tools, in this world."""
    return [dataclasses.replace(d, function=f) for d, f in zip(TOOL_DECLARATIONS, tool_functions(world), strict=True)]


def final_graph(scenario: str) -> Graph:
    """The graph under which a scenario's run comes to its end."""
    return CHANGES[scenario].new if scenario in CHANGES else PRESETS[SCENARIOS[scenario][0]].graph


def make_agent(world: CrashWorld, scenario: str, store: Any) -> Agent:
    """The agent of a scenario that has one, on the clock of this life."""
    began, goes_on = agent_pair(world, scenario, store)
    assert began is goes_on
    return goes_on


def agent_pair(world: CrashWorld, scenario: str, store: Any) -> tuple[Agent, Agent]:
    """The scenario's agent that begins a run, and the one that goes on with it, both on the clock of this life."""
    preset, script = SCENARIOS[scenario]
    limits = AgentGuardrails(max_iterations=2 if scenario == "limit" else 50, loop_soft_threshold=19)
    clock = FakeClock()
    clock.jump(CLOCK_JUMPS_S[len(world.lines("killed")) % len(CLOCK_JUMPS_S)])
    host, has = Host(clock=clock, store=store, secret=b"of the tests"), make_tools(world)
    model = TranscriptModel(world, script)
    if scenario not in CHANGES:
        one = Agent(model, tools=has, preset=preset, guardrails=limits, host=host)
        return one, one
    old, new, migration, _ = CHANGES[scenario]
    return (
        Agent(model, tools=has, graph=old, guardrails=limits, host=host),
        Agent(model, tools=has, graph=new, guardrails=limits, host=host, migrations=[migration]),
    )


def human_reply(world: CrashWorld, run_id: str, kind: str, name: str | None, arguments: Any) -> Any:
    """What the person says who is asked."""
    match kind:
        case "approval":
            return Edit({"n": 9}) if arguments == {"n": 2} else Allow()
        case "in_doubt":  # the person looks
            result = f"{name} {arguments['n']}"
            done = [key for _, key, r in world.effects() if r == result and key.startswith(f"{run_id}:")]
            if not done:
                return ItDidNotRun()
            world.write("settled", done[0])
            return ItRan(result)
        case _:
            return "go on"
