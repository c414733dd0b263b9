"""Speed, as ratios within one process: run it with ``make bench``.

Absolute times say more about the machine than about the code, so each figure stands next to what it is
compared with. Every measurement is the best of several runs, and what is compared takes turns. Bounds are printed with
the figures; with ``--check``, the exit code is 1 if one is missed.

The loop is compared with two hand-written ones that do the same work with the same scripted model, the
same envelope and the same arguments, validated with pydantic: ``bare_loop`` has no time limits at all, which
nobody should deploy; ``careful_loop`` puts ``asyncio.timeout`` around the model and the tool, as agentfsm does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
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
from tests.benchmarks.analysis_benchmark import bench_proofs

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
BATCH_REPEATS = 5
WAITING_RUNS = 10_000


class Bounds:
    """The bounds that were checked, and how many were missed."""

    def __init__(self) -> None:
        self.missed = 0

    def check(self, what: str, value: float, most: float, unit: str = "x") -> None:
        """Print a value with its bound, and whether it is met."""
        met = value <= most
        self.missed += not met
        print(f"  {what}: {value:.2f}{unit} (bound {most:g}{unit}): {'met' if met else 'MISSED'}")


BOUNDS = Bounds()


def batch_agent(calls: int, *, parallel: bool, stored: bool) -> Agent:
    """An agent whose model makes that many calls in one reply."""
    adder = tool(parallel=parallel)(add)
    limits = AgentGuardrails(max_calls_per_reply=calls, max_execution_time_s=3600)
    host = Host(store=MemoryStore() if stored else None)
    return Agent(BatchModel("add", calls), tools=[adder], guardrails=limits, host=host)


def per_call(*, parallel: bool, stored: bool) -> list[float]:
    """Microseconds of processor time per call of one reply, for each size; the sizes take turns."""
    least = [float("inf")] * len(BATCHES)

    async def timed() -> None:
        agents = [batch_agent(calls, parallel=parallel, stored=stored) for calls in BATCHES]
        for _ in range(BATCH_REPEATS):
            for place, (agent, calls) in enumerate(zip(agents, BATCHES, strict=True)):
                for _ in range(max(1, 1_000 // calls)):
                    start = time.process_time()
                    result = await agent.run("go")
                    least[place] = min(least[place], (time.process_time() - start) / calls * 1e6)
                    assert result.ok

    asyncio.run(timed())
    return least


def bench_batch() -> None:
    """What one call of a reply costs, when the reply has more and more of them."""
    print("A reply of N calls, microseconds a call")
    print(f"{'':>24} {''.join(f'{n:>9,}' for n in BATCHES)}")
    for parallel in (False, True):
        for stored in (False, True):
            cost = per_call(parallel=parallel, stored=stored)
            what = ("parallel" if parallel else "one after the other") + (", stored" if stored else "")
            print(f"{what:>24} {''.join(f'{c:>9.1f}' for c in cost)}")
            BOUNDS.check(f"a call of {BATCHES[-1]:,} to one of {BATCHES[0]}, {what}", cost[-1] / cost[0], 1.3)
    print()


class WaitingModel:
    """A model that answers when it is told to."""

    name = "waiting"

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.waiting = 0

    async def reply(self, request: ModelRequest) -> Reply:
        self.waiting += 1
        await self.answer.wait()
        return Reply(Message(Role.ASSISTANT, "done"))


async def memory_per_waiting_run(count: int) -> float:
    """Bytes of memory of one of many concurrent runs, each of which waits for its model."""
    model = WaitingModel()
    agent = Agent(model, tools=[tool(add)])
    model.answer.set()
    await agent.run("go")  # what is created once is not counted
    model.answer.clear()
    model.waiting = 0
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    runs = [asyncio.ensure_future(_finished(agent)) for _ in range(count)]
    while model.waiting < count:
        await asyncio.sleep(0)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    model.answer.set()
    assert all(await asyncio.gather(*runs))
    return (after - before) / count


async def _finished(agent: Agent) -> bool:
    return (await agent.run("go")).ok


def bench_memory() -> None:
    """What a waiting run keeps in memory."""
    print(f"{WAITING_RUNS:,} concurrent runs on one loop")
    BOUNDS.check("each waiting one", asyncio.run(memory_per_waiting_run(WAITING_RUNS)) / 1000, 12, " KB")
    print()


def best(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The least duration of a call, in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def per_step(loops: Sequence[Callable[[int], Awaitable[None]]]) -> dict[int, list[float]]:
    """Microseconds of processor time per tool step, for each size and loop; all take turns."""
    least = {steps: [float("inf")] * len(loops) for steps in SIZES}

    async def timed() -> None:
        for _ in range(REPEATS):
            for steps in SIZES:
                for place, loop in enumerate(loops):
                    for _ in range(max(1, 200 // steps)):
                        start = time.process_time()
                        await loop(steps)
                        least[steps][place] = min(least[steps][place], (time.process_time() - start) / steps * 1e6)

    asyncio.run(timed())
    return least


def bench_loop() -> None:
    """A run of N tool steps, relative to the hand-written loops."""
    print("A run of N tool steps, microseconds a step (best of", REPEATS, "rounds)")
    print(f"{'N':>6} {'bare':>8} {'careful':>8} {'agentfsm':>9} {'/ bare':>7} {'/ careful':>10}")
    cost = per_step((bare_loop, careful_loop, declared_loop))
    for steps, (bare, careful, ours) in cost.items():
        print(f"{steps:>6} {bare:>8.1f} {careful:>8.1f} {ours:>9.1f} {ours / bare:>7.1f} {ours / careful:>10.1f}")
    bare, careful, ours = cost[SIZES[-1]]
    BOUNDS.check(f"a step to one of the bare loop, N = {SIZES[-1]:,}", ours / bare, 7)
    BOUNDS.check(f"a step to one of the careful loop, N = {SIZES[-1]:,}", ours / careful, 3.5)
    BOUNDS.check(f"a step at N = {SIZES[-1]:,} to one at N = {SIZES[0]}", ours / cost[SIZES[0]][2], 1.2)
    print()


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
    bench_memory()
    BOUNDS.missed += bench_proofs()
    bench_picture()
    bench_testing()
    bench_step()
    bench_import()
    sys.exit(1 if BOUNDS.missed and "--check" in sys.argv else 0)
