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
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, cast

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
    HookContext,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    Message,
    Migration,
    Reply,
    Role,
    RunState,
    StateContext,
    StateSpec,
    ToolCall,
    ToolContext,
    TransientProviderError,
    Transition,
    hook,
    tool,
)
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.records import SealedRecord
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.messages import FinishReason
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.scenarios import await_run


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


def sample_agent(store: Any, script: Any = SAMPLE_SCRIPT, secret: bytes = b"of the tests", **more: Any) -> Agent:
    host = Host(clock=FakeClock(), store=store, secret=secret)
    return Agent(ScriptedModel(script), tools=[add, pay, look], instructions="Be brief.", host=host, **more)


def finished_run(store: Any = None, run_id: str = "sample", secret: bytes = b"of the tests") -> tuple[Any, Any]:
    """A store with one finished run in it, and its result."""
    store = MemoryStore() if store is None else store

    async def live() -> Any:
        agent = sample_agent(store, secret=secret)
        await agent.run("Do it all.", run_id=run_id)
        return await agent.resume(run_id, Edit({"to": "Bob", "amount": 2.0}))

    return store, asyncio.run(live())


def waiting_run(store: Any = None, run_id: str = "sample") -> tuple[Any, Any]:
    """A store with one run in it that waits for an approval, and its result."""
    store = MemoryStore() if store is None else store
    return store, asyncio.run(await_run(sample_agent(store).run("Do it all.", run_id=run_id)))


def reseal(rows: list[SealedRecord], first: int = 0) -> list[SealedRecord]:
    """Records with all hashes from one on recomputed, as an attacker who rewrites a journal would."""
    head = rows[first - 1].hash if first else GENESIS_HASH
    made = rows[:first]
    for row in rows[first:]:
        head = record_hash(head, row.body)
        made.append(row._replace(hash=head))
    return made


KEYRING = Keyring(b"of the tests")


def with_own_macs(rows: Sequence[SealedRecord], keyring: Keyring = KEYRING) -> list[SealedRecord]:
    """Records as if each had been committed alone, so that a run may be cut off after any of them."""
    return [row._replace(mac=keyring.current.seal(KeyPurpose.record, bytes.fromhex(row.hash))) for row in rows]


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
    """A guard that is never true in these runs."""
    text = "" if run.reply is None else run.reply.message.content
    return Failure(kind=FailureKind.scope_too_large, explanation="too long") if len(text) > 160 else None


def long_answer(run: RunState) -> Failure | None:
    """``too_long`` under another name."""
    return too_long(run)


def no_once(run: RunState) -> Failure | None:
    """A guard that would have been true before the migration."""
    calls = any(c.call.name == "once" for c in run.batch)
    return Failure(kind=FailureKind.capability_gap, explanation="not once") if calls else None


def _count_messages(context: StateContext) -> int:
    return len(context.run.messages)


def _loop_with_reviewer(state: str, guard: Any) -> Graph:
    """The loop with a custom state before all tools, and a custom guard."""
    spec, leaves = StateSpec(state, effect=_count_messages), [Transition(state, None, "dispatch_tool")]
    graph = LOOP.with_state(spec, leaves, entered_by="post_llm.tool_calls")
    return graph.with_detector("post_llm", guard, before="no_progress")


class GraphChange(NamedTuple):
    """The graphs of a scenario whose run starts under one graph and is resumed under another.

    Attributes:
        old: The graph under which it starts.
        new: The graph under which it is resumed.
        migration: The migration that allows this.
        waiting: Whether it is migrated only while it waits for a human, not after it was interrupted.
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
"""The offset of the wall clock of each process from that of the first one, in seconds."""
COMMIT_DELAY_S = 0.003
"""How long a thread other than the run's waits before it is killed, while the run continues as far as it can."""


class CrashWorld:
    """What survives a crash: files in a folder.

    Args:
        folder: Where they are.
        kill_at: The point at which the process is killed: its number among all points, or, because threads may pass
            theirs in any order, its name and number among those of that name (``after once 2``); 0 for none.
        outside: A pipe to which a byte is written at that point; its reader kills the process. Without one, the
            process kills itself.

    Attributes:
        chatter: What models say with each call.
    """

    chatter = ""

    def __init__(self, folder: Path, kill_at: int | str = 0, outside: int | None = None) -> None:
        self.folder, self.kill_at, self.outside, self.passed = folder, kill_at, outside, 0
        self.names = Counter[str]()

    def passing(self, where: str) -> None:
        """Pass a point."""
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
        time.sleep(60)  # the other threads continue until the process is killed
        sys.exit("the process was not killed")

    def write(self, name: str, line: str) -> None:
        """Add a line to a file."""
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")

    def lines(self, name: str) -> list[str]:
        """The lines of a file, which may not exist."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def effect(self, name: str, key: str, result: str) -> str:
        """The side effect of a tool."""
        self.passing(f"before {name}")
        self.write("effects", json.dumps([name, key, result]))
        self.passing(f"after {name}")
        return result

    def effects(self) -> list[tuple[str, str, str]]:
        """The name, idempotency key and result of every side effect."""
        return [tuple(json.loads(line)) for line in self.lines("effects")]


_failed: ContextVar[frozenset[str]] = ContextVar("failed", default=frozenset())


@hook("call_llm", fail_open=False)
def note_failures(context: HookContext) -> None:
    """Tell ``TranscriptModel`` how calls have failed since the last reply, as the run's journal knows it."""
    _failed.set(frozenset(kind.value for kind in context.run.failure_attempts))


class TranscriptModel:
    """A model whose reply depends on the run's journal alone, so that a repeated call gives the same reply.

    Its agent needs the hook ``note_failures``.
    """

    name = "by-transcript"

    def __init__(self, world: CrashWorld, script: list[Any]) -> None:
        self.world, self.script = world, script

    async def reply(self, request: Any) -> Reply:
        self.world.passing("before the model")
        said = sum(m.role is Role.ASSISTANT for m in request.messages)
        entry: tuple[Any, ...] | list[ToolCall] | ToolCall | str = self.script[said]
        if isinstance(entry, tuple):  # fails until the journal has each failure
            *errors, entry = entry
            for error in errors:
                if error.kind not in _failed.get():
                    raise error
        self.world.passing("after the model")
        if isinstance(entry, str):
            return Reply(Message.assistant(entry))
        wanted = cast("list[ToolCall]", entry if isinstance(entry, list) else [entry])
        calls = tuple(ToolCall(f"call{said}_{n}", c.name, c.arguments) for n, c in enumerate(wanted))
        return Reply(Message.assistant(self.world.chatter, calls), FinishReason.TOOL_CALLS)


def tool_functions(world: CrashWorld) -> list[Any]:
    """The functions of the tools, in this world."""

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


_TOOL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"idempotent": True},
    {"idempotent": True, "parallel": True},
    {"parallel": True},
    {"requires_approval": True},
    {"idempotent": True, "retryable": True},
]
TOOL_DECLARATIONS = [
    tool(**options)(function)
    for function, options in zip(tool_functions(CrashWorld(Path())), _TOOL_OPTIONS, strict=True)
]
"""The tools, without a world: building them from functions takes longer than a whole run."""


def make_tools(world: CrashWorld) -> list[Any]:
    """The tools, in this world."""
    return [dataclasses.replace(d, function=f) for d, f in zip(TOOL_DECLARATIONS, tool_functions(world), strict=True)]


def final_graph(scenario: str) -> Graph:
    """The graph under which a scenario's run ends."""
    return CHANGES[scenario].new if scenario in CHANGES else PRESETS[SCENARIOS[scenario][0]].graph


def make_agent(world: CrashWorld, scenario: str, store: Any) -> Agent:
    """The agent of a scenario that has only one, with the clock of this process."""
    began, goes_on = agent_pair(world, scenario, store)
    assert began is goes_on
    return goes_on


def agent_pair(world: CrashWorld, scenario: str, store: Any) -> tuple[Agent, Agent]:
    """The agent that starts a scenario's run and the one that resumes it, with the clock of this process."""
    preset, script = SCENARIOS[scenario]
    limits = AgentGuardrails(max_iterations=2 if scenario == "limit" else 50, loop_soft_threshold=19)
    clock = FakeClock()
    clock.jump(CLOCK_JUMPS_S[len(world.lines("killed")) % len(CLOCK_JUMPS_S)])
    host = Host(clock=clock, store=store, secret=b"of the tests", watchdog_s=None)  # a fork would lose its thread
    has = make_tools(world)
    model = TranscriptModel(world, script)
    if scenario not in CHANGES:
        one = Agent(model, tools=has, preset=preset, guardrails=limits, host=host, hooks=[note_failures])
        return one, one
    old, new, migration, _ = CHANGES[scenario]
    return (
        Agent(model, tools=has, graph=old, guardrails=limits, host=host, hooks=[note_failures]),
        Agent(model, tools=has, graph=new, guardrails=limits, host=host, hooks=[note_failures], migrations=[migration]),
    )


def seq_of(rows: Sequence[SealedRecord], transition: str) -> int:
    """The sequence number of the first record of a transition."""
    return next(row.seq for row in rows if f'"transition":"{transition}"' in row.body)


def human_reply(world: CrashWorld, run_id: str, kind: str, name: str | None, arguments: Any) -> Any:
    """The human reply to a request."""
    match kind:
        case "approval":
            return Edit({"n": 9}) if arguments == {"n": 2} else Allow()
        case "in_doubt":  # the human checks what has happened
            result = f"{name} {arguments['n']}"
            done = [key for _, key, r in world.effects() if r == result and key.startswith(f"{run_id}:")]
            if not done:
                return ItDidNotRun()
            world.write("settled", done[0])
            return ItRan(result)
        case _:
            return "go on"
