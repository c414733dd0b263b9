"""Speed, as ratios within one process: run it with ``make bench``.

Absolute times say more about the machine than about the code, so each figure stands next to what it is
compared with. Every measurement is the best of several runs.

The loop is compared with two hand-written ones that do the same work with the same scripted model, the
same envelope and the same arguments, validated with pydantic: ``bare_loop`` has no time limits at all, which
nobody should deploy; ``careful_loop`` puts ``asyncio.timeout`` around the model and the tool, as agentfsm does.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Decision,
    Host,
    Machine,
    Message,
    ModelRequest,
    Reply,
    Role,
    RunState,
    ToolCall,
    tool,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.loop.presets import FEEDBACK
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.testing import paths
from agentfsm.testing.path_generation import CRITERIA

SIZES = (10, 50, 200, 1000)
REPEATS = 9


class FinalEnvelope(BaseModel):
    kind: Literal["final"]
    content: str


class CallEnvelope(BaseModel):
    kind: Literal["tool_call"]
    tool_name: str
    arguments: dict[str, Any]


ENVELOPE: TypeAdapter[FinalEnvelope | CallEnvelope] = TypeAdapter(
    Annotated[FinalEnvelope | CallEnvelope, Field(discriminator="kind")]
)


class AddArguments(BaseModel):
    a: int
    b: int


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class CountingModel:
    """A scripted model: ``steps`` tool calls in envelopes, all different, then an answer."""

    name = "counting"

    def __init__(self, steps: int) -> None:
        self.left = steps

    async def reply(self, request: ModelRequest) -> Reply:
        if not self.left:
            return Reply(Message(Role.ASSISTANT, '{"kind":"final","content":"done"}'))
        self.left -= 1
        text = f'{{"kind":"tool_call","tool_name":"add","arguments":{{"a":{self.left},"b":2}}}}'
        return Reply(Message(Role.ASSISTANT, text))


async def bare_loop(steps: int) -> None:
    """The simplest hand-written loop."""
    model = CountingModel(steps)
    tools = {"add": (AddArguments, add)}
    messages = [Message(Role.USER, "go")]
    for _ in range(steps + 1):
        reply = await model.reply(ModelRequest(messages))
        messages.append(reply.message)
        envelope = ENVELOPE.validate_json(reply.message.content)
        if isinstance(envelope, FinalEnvelope):
            return
        arguments, function = tools[envelope.tool_name]
        checked = arguments.model_validate(envelope.arguments)
        result = await function(**vars(checked))
        messages.append(Message(Role.TOOL, str(result), name=envelope.tool_name))


async def careful_loop(steps: int) -> None:
    """The same loop with time limits, and with errors fed back to the model."""
    model = CountingModel(steps)
    tools = {"add": (AddArguments, add)}
    messages = [Message(Role.USER, "go")]
    for _ in range(steps + 1):
        async with asyncio.timeout(60):
            reply = await model.reply(ModelRequest(messages))
        messages.append(reply.message)
        try:
            envelope = ENVELOPE.validate_json(reply.message.content)
        except ValueError as error:
            messages.append(Message(Role.TOOL, f"not a valid envelope: {error}"))
            continue
        if isinstance(envelope, FinalEnvelope):
            return
        try:
            arguments, function = tools[envelope.tool_name]
            checked = arguments.model_validate(envelope.arguments)
            async with asyncio.timeout(600):
                result = str(await function(**vars(checked)))
        except Exception as error:
            result = f"failed: {error}"
        messages.append(Message(Role.TOOL, result, name=envelope.tool_name))


LIMITS = AgentGuardrails(max_iterations=1_000_000, max_execution_time_s=3600)
MODEL = CountingModel(0)
AGENT = Agent(MODEL, tools=[tool(add)], preset=FEEDBACK, guardrails=LIMITS)


async def declared_loop(steps: int) -> None:
    """An agent with the same tools, decisions recorded; it is created once, like the classes above."""
    MODEL.left = steps
    result = await AGENT.run("go")
    assert result.ok
    assert len(result.decisions) == 5 * steps + 3


class BatchModel:
    """A scripted model: one reply with ``calls`` calls, all different, then an answer."""

    name = "batch"

    def __init__(self, tool_name: str, calls: int) -> None:
        self.reply_with_calls = Reply(
            Message(
                Role.ASSISTANT,
                tool_calls=tuple(ToolCall(f"c{n}", tool_name, {"a": n, "b": 2}) for n in range(calls)),
            )
        )

    async def reply(self, request: ModelRequest) -> Reply:
        done = request.messages[-1].role is Role.TOOL
        return Reply(Message(Role.ASSISTANT, "done")) if done else self.reply_with_calls


BATCHES = (100, 1_000, 10_000)


def per_call(calls: int, *, parallel: bool, stored: bool) -> float:
    """Microseconds of processor time per call of one reply with that many calls."""
    adder = tool(parallel=parallel)(add)
    limits = AgentGuardrails(max_calls_per_reply=calls, max_execution_time_s=3600)
    host = Host(store=MemoryStore() if stored else None)
    agent = Agent(BatchModel("add", calls), tools=[adder], guardrails=limits, host=host)

    async def timed() -> float:
        times: list[float] = []
        for _ in range(max(3, 3_000 // calls)):
            start = time.process_time()
            result = await agent.run("go")
            times.append(time.process_time() - start)
            assert result.ok
        return min(times) / calls * 1e6

    return asyncio.run(timed())


def bench_batch() -> None:
    """What one call of a reply costs, when the reply has more and more of them."""
    print("A reply of N calls, microseconds a call")
    print(f"{'':>24} {''.join(f'{n:>9,}' for n in BATCHES)}  {BATCHES[-1]:,} against {BATCHES[0]}")
    for parallel in (False, True):
        for stored in (False, True):
            cost = [per_call(n, parallel=parallel, stored=stored) for n in BATCHES]
            what = ("parallel" if parallel else "one after the other") + (", stored" if stored else "")
            print(f"{what:>24} {''.join(f'{c:>9.1f}' for c in cost)}  {cost[-1] / cost[0]:.2f}x (bound 1.3x)")
    print()


def best(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The least duration of a call, in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def per_step(loop: Callable[[int], Awaitable[None]], steps: int) -> float:
    """Microseconds per tool step, for a run of ``steps`` steps."""

    async def timed() -> float:
        times: list[float] = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            await loop(steps)
            times.append(time.perf_counter() - start)
        return min(times) / steps * 1e6

    return asyncio.run(timed())


def bench_loop() -> None:
    """A run of N tool steps, relative to the hand-written loops."""
    print("A run of N tool steps, microseconds a step (best of", REPEATS, "runs)")
    print(f"{'N':>6} {'bare':>8} {'careful':>8} {'agentfsm':>9} {'/ bare':>7} {'/ careful':>10}")
    cost: dict[int, float] = {}
    for steps in SIZES:
        first, second, ours = (per_step(loop, steps) for loop in (bare_loop, careful_loop, declared_loop))
        cost[steps] = ours
        print(f"{steps:>6} {first:>8.1f} {second:>8.1f} {ours:>9.1f} {ours / first:>7.1f} {ours / second:>10.1f}")
    print(f"per step at N = 1000 against N = 50: {cost[1000] / cost[50]:.2f}\n")


def reference(graph_rows: dict[str, Any], run: RunState) -> Decision:
    """A plain reference implementation of one engine step."""
    tried: list[tuple[str, bool]] = []
    for row in graph_rows[run.state]:
        found = True if row.guard is None else row.guard(run)
        tried.append((row.name, bool(found)))
        if found:
            run.state = row.target
            return Decision(row, tuple(tried), None if found is True else found)
    raise AssertionError("a state without a last row")


def bench_step() -> None:
    """One step of the machine, relative to the plain reference that records the same."""
    machine, rows = Machine(LOOP, BUILT_IN_GUARDS), {s.name: LOOP.rows(s.name) for s in LOOP.states}
    print("One step, microseconds")
    print(f"{'state':>14} {'reference':>10} {'machine':>8} {'ratio':>6}")
    for state in ("pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover"):
        run = RunState("bench")
        figures: list[float] = []
        for step in (partial(reference, rows), machine.step):
            figures.append(best(partial(_repeat_step, step, run, state), 5) / 5_000 * 1e6)
        print(f"{state:>14} {figures[0]:>10.2f} {figures[1]:>8.2f} {figures[1] / figures[0]:>6.2f}")
    print()


def _repeat_step(step: Callable[[RunState], Any], run: RunState, state: str) -> None:
    for _ in range(5_000):
        run.state = state
        step(run)


def _start_up(before: str, code: str) -> float:
    """The CPU time of some code in a new interpreter, after other code, in seconds: the best of nine."""
    script = f"import time\n{before}\nstarted = time.process_time()\n{code}\nprint(time.process_time() - started)"
    runs = [
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True) for _ in range(9)
    ]
    return min(float(each.stdout) for each in runs)


def bench_import() -> None:
    """What importing agentfsm and creating the first agent add, in fresh interpreters, as a share of what is compared.

    The comparison is what any async program with one pydantic model imports. Names load when they are first used, and
    the run loop loads with the first agent.
    """
    program = "import pydantic, asyncio; pydantic.create_model('M', n=(int, pydantic.Field(gt=0)))"
    agent = "from agentfsm import Agent; Agent(type('M', (), {'name': 'm', 'reply': print})())"
    base = _start_up("", program)
    print(f"Start-up in a fresh interpreter, beside pydantic and asyncio with one model ({base * 1e3:.0f} ms)")
    for what, code in (
        ("import agentfsm", "import agentfsm"),
        ("from agentfsm import Agent", "from agentfsm import Agent"),
        ("the first agent", agent),
    ):
        added = _start_up(program, code)
        print(f"{what:>32} {added * 1e3:>+5.0f} ms {added / base:>6.0%}")
    print()


def bench_picture() -> None:
    """The time to render LOOP as SVG, relative to the time to write as much text as JSON."""
    svg = LOOP.diagram()
    drawn, dumped = best(LOOP.diagram), best(partial(json.dumps, svg.split()))
    size, ratio = len(svg) // 1000, drawn / dumped
    print(f"The SVG of the loop: {drawn * 1e3:.1f} ms for {size} kB, {ratio:.0f}x its json.dumps\n")


def bench_testing() -> None:
    """Proofs about the loop under its default guardrails, and its lists of paths."""
    print("Proofs and paths of the loop, seconds")
    timed: dict[str, Callable[[], object]] = {
        "agentfsm check": LOOP.analyse,
        **{f"paths(LOOP, {cover!r})": partial(paths, LOOP, cover) for cover in CRITERIA},
    }
    for what, function in timed.items():
        print(f"{what:>28} {best(function, 3):>6.2f}")
    print()


if __name__ == "__main__":
    bench_loop()
    bench_batch()
    bench_picture()
    bench_testing()
    bench_step()
    bench_import()
