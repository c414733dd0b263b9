"""Random agents by seed: graphs that users might write, right or wrong, and random worlds in which they run.

A graph is a preset's with changes: rows dropped, added, reordered or retargeted; own states, waits, counters and
detectors; guards and effects that raise. A world is a model, tools, a policy, hooks and people that do anything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Deny,
    Edit,
    Extend,
    GiveUp,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    SuspensionRecord,
    UserInputRequested,
    hook,
    tool,
)
from agentfsm.errors import (
    ConfigurationError,
    ContextOverflowError,
    GraphError,
    NoTransitionError,
    ProviderError,
    ToolError,
    TransientProviderError,
)
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guards import approval_decided, came_back, expired, replied
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import DefaultPolicy
from agentfsm.machine.declaration import Counter, StateSpec, Transition, exhausted
from agentfsm.machine.graph import Graph
from agentfsm.runtime.hooks import AskApproval, DenyCall, HookContext
from agentfsm.testing import FakeClock

FEATURES = (
    "row dropped",
    "row added",
    "rows reordered",
    "row retargeted",
    "own state",
    "own wait",
    "own counter",
    "own detector",
    "sub-agent",
    "guard that raises",
    "effect that raises",
    "native calls",
    "envelope calls",
    *(f"preset {name}" for name in PRESETS),
)

ENDINGS = ("completed", "handed_off", "partial")


@dataclass
class RandomAgent:
    """What was drawn for one seed.

    Attributes:
        seed: The seed.
        features: What it has, of ``FEATURES``.
        agent: The agent; None if its graph was refused.
        refusal: Why it was refused.
    """

    seed: int
    features: set[str] = field(default_factory=set[str])
    agent: Agent | None = None
    refusal: str = ""


class World:
    """Everything outside the loop, drawn by seed; the agent's guards, tools, effects and policy ask it what to do."""

    def __init__(self, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        self.envelopes = 0.0

    def start(self, seed: int) -> None:
        self.dice.seed(seed)
        self.clock = FakeClock()

    def happens(self, chance: float) -> bool:
        return self.dice.random() < chance

    def pass_time(self) -> None:
        if self.happens(0.1):
            self.clock.advance(self.dice.choice((0.5, 31, 70)))


class WorldClock:
    """The clock of the world's current run."""

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.world.clock.monotonic()

    def time(self) -> float:
        return self.world.clock.time()

    async def sleep(self, seconds: float) -> None:
        await self.world.clock.sleep(seconds)


class WorldModel:
    """A model that says anything."""

    name = "anything"

    def __init__(self, world: World, tools: list[str]) -> None:
        self.world, self.tools, self.made = world, tools, 0

    async def reply(self, request: Any) -> Reply:
        dice = self.world.dice
        self.world.pass_time()
        kind = dice.random()
        if kind < 0.12:
            raise dice.choice((TransientProviderError, ProviderError, ContextOverflowError))("no")
        finish = FinishReason.STOP
        if kind < 0.17:
            finish = FinishReason.LENGTH
        elif kind < 0.2:
            finish = FinishReason.CONTENT_FILTER
        calls = self._calls() if kind < 0.75 and not self.world.happens(self.world.envelopes) else ()
        text = "" if calls or kind > 0.97 else self._text()
        if calls and finish is FinishReason.STOP:
            finish = FinishReason.TOOL_CALLS
        return Reply(Message.assistant(text, calls), finish, usage=_usage(dice))

    def _calls(self) -> tuple[ToolCall, ...]:
        dice = self.world.dice
        number = dice.choice((1, 1, 1, 2, 3, 5))
        same = dice.choice(self.tools) if dice.random() < 0.4 else None
        return tuple(self._call(same or dice.choice(self.tools)) for _ in range(number))

    def _call(self, name: str) -> ToolCall:
        self.made += 1
        dice = self.world.dice
        arguments: dict[str, Any] = {"text": str(dice.randrange(3))}
        if name == "ask_user":
            arguments = {"question": "which?"}
        elif name == "return_done":
            arguments = {"output": "done"}
        elif name == "return_unable":
            arguments = {"rationale": "no"}
        if dice.random() < 0.08:
            arguments = {"wrong": 1}
        return ToolCall(f"c{self.made}", "nobody" if dice.random() < 0.06 else name, arguments)

    def _text(self) -> str:
        if self.world.envelopes:
            tool_name = self.world.dice.choice(self.tools)
            call = f'{{"kind": "tool_call", "tool_name": "{tool_name}", "arguments": {{"text": "1"}}}}'
            return self.world.dice.choice((call, call, '{"kind": "final", "content": "done"}', "not an envelope"))
        return "an answer"


def _usage(dice: random.Random) -> Any:
    from agentfsm.loop.messages import Usage

    return Usage(input_tokens=dice.choice((0, 5, 60)), output_tokens=5, cost_usd=dice.choice((0.0, 0.01)))


class WorldPolicy(DefaultPolicy):
    """A policy that mostly does as the default, and sometimes anything."""

    world: World

    def __init__(self, world: World) -> None:
        super().__init__()
        object.__setattr__(self, "world", world)

    def decide(self, failure: Failure, state: Any) -> Any:
        world = self.world
        if world.happens(0.03):
            raise RuntimeError("the policy raises")
        return world.dice.choice(list(Action)) if world.happens(0.5) else super().decide(failure, state)


def draw_agent(seed: int, world: World) -> RandomAgent:
    """The agent of a seed, or why its graph is refused."""
    dice = random.Random(seed)
    preset = dice.choice(list(PRESETS))
    drawn = RandomAgent(seed, {f"preset {preset}"})
    behavior = PRESETS[preset].behavior
    world.envelopes = dice.choice((0.5, 0.9)) if behavior.envelope else 0.0
    drawn.features.add("envelope calls" if behavior.envelope else "native calls")
    if behavior.envelope and world.envelopes < 0.9:
        drawn.features.add("native calls")
    try:
        graph = draw_graph(PRESETS[preset].graph, dice, world, drawn.features)
        tools = _tools(dice, world, drawn.features)
        control = ["ask_user", "return_done", "return_unable"] if behavior.control_tools else []
        drawn.agent = Agent(
            WorldModel(world, [t.name for t in tools] + control * 2),
            tools=tools,
            preset=preset,
            graph=graph,
            guardrails=_limits(dice),
            policy=WorldPolicy(world) if dice.random() < 0.7 else None,
            hooks=_hooks(dice, world),
            host=Host(clock=WorldClock(world), secret=b"of the tests", monitor="raise"),
        )
    except (GraphError, ConfigurationError) as error:
        drawn.refusal = f"{type(error).__name__}: {error}"
    return drawn


def _limits(dice: random.Random) -> AgentGuardrails:
    return AgentGuardrails(
        max_iterations=dice.choice((2, 3, 4)),
        max_steps=dice.choice((4, 6, 9)),
        max_execution_time_s=dice.choice((300, 60, None)),
        max_tokens=dice.choice((None, 100)),
        max_cost_usd=dice.choice((None, 0.02)),
        max_continues=dice.choice((0, 1, 2)),
        max_tool_retries=dice.choice((0, 1, 2)),
        max_calls_per_reply=dice.choice((1, 2, 3, 4)),
        max_denials=2,
        repeated_error_threshold=2,
        loop_hard_threshold=3,
        loop_window=6,
    )


def _hooks(dice: random.Random, world: World) -> list[Any]:
    @hook("dispatch_tool")
    def gate(context: HookContext) -> Any:
        if world.happens(0.05):
            raise RuntimeError("the hook raises")
        return AskApproval("may it?") if world.happens(0.1) else DenyCall("no") if world.happens(0.1) else None

    return [gate] if dice.random() < 0.4 else []


def _tools(dice: random.Random, world: World, features: set[str]) -> list[Any]:
    def misbehave() -> None:
        world.pass_time()
        kind = world.dice.random()
        if kind < 0.25:
            raise ValueError(world.dice.choice(("broken", "broken too")))
        if kind < 0.32:
            raise OSError("no disk")
        if kind < 0.4:
            raise ToolError(
                "it says so", kind=world.dice.choice(("ambiguous_input", "capability_gap", "scope_too_large"))
            )

    def is_one(text: str) -> bool:
        return text == "1"

    async def plain(text: str) -> str:
        """Do it."""
        misbehave()
        return text

    chosen = [tool(name="plain")(plain)]
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("again", {"idempotent": True, "retryable": True}),
        ("gated", {"requires_approval": True}),
        ("beside", {"parallel": True}),
        ("beside_gated", {"parallel": True, "requires_approval": is_one}),
        ("beside_again", {"parallel": True, "idempotent": True, "retryable": True}),
        ("last", {"ends_run": True}),
        ("hidden", {"secret": ["text"]}),
    )
    for name, options in kinds:
        if dice.random() < (0.1 if name == "hidden" else 0.4):
            chosen.append(tool(name=name, **options)(plain))
    if dice.random() < 0.25:
        features.add("sub-agent")
        chosen.append(_sub_agent(dice, world))
    return chosen


def _sub_agent(dice: random.Random, world: World) -> Any:
    async def inner(text: str) -> str:
        """Do it inside."""
        if world.happens(0.3):
            raise ValueError("broken inside")
        return text

    child = Agent(
        WorldModel(world, ["inner", "ask_user", "return_done"]),
        tools=[tool(name="inner", requires_approval=dice.random() < 0.3)(inner)],
        preset="funnel",
        guardrails=AgentGuardrails(max_iterations=3),
        host=Host(clock=WorldClock(world), secret=b"of the tests", monitor="raise"),
    )
    return replace(
        child.as_tool("child", "Do it", parallel=dice.random() < 0.4),
        spec=replace(child.as_tool("child", "Do it").spec),
    )


# -- graphs -------------------------------------------------------------------------------------------


def draw_graph(graph: Graph, dice: random.Random, world: World, features: set[str]) -> Graph:
    """A graph with some changes. One that is refused is mostly left out; the rest is for the agent to refuse."""
    changes: list[tuple[str, Callable[[Graph, random.Random, World, int], Graph]]] = [
        ("row dropped", _drop_row),
        ("row added", _add_row),
        ("rows reordered", _reorder),
        ("row retargeted", _retarget),
        ("own state", _add_state),
        ("own wait", _add_wait),
        ("own counter", _add_counter),
        ("own detector", _add_detector),
        ("guard that raises", _add_raising_guard),
        ("effect that raises", _add_raising_state),
    ]
    for number in range(dice.choice((1, 2, 3, 4, 5))):
        feature, change = dice.choice(changes)
        for attempt in range(3):
            try:
                graph = change(graph, dice, world, 10 * number + attempt)
            except GraphError:
                if dice.random() < 0.08:
                    raise
                continue
            features.add(feature)
            break
    return graph


def _inner(graph: Graph) -> list[str]:
    return [s.name for s in graph.states if not s.final]


def _movable(graph: Graph, state: str) -> list[Transition]:
    return [t for t in graph.rows(state) if t.guard is not None and t.guard not in graph.first]


def _drop_row(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return graph.without(dice.choice([t.id for s in _inner(graph) for t in _movable(graph, s)]))


def _row(graph: Graph, source: str, guard: Any, target: str, dice: random.Random) -> Transition:
    ends = dice.choice(ENDINGS) if graph.spec(target).final else ""
    spends = [c.name for c in graph.counters]
    return Transition(source, guard, target, ends=ends, spends=dice.choice(["", "", *spends]))


def _add_row(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    source = dice.choice(_inner(graph))
    row = _row(
        graph, source, _guard(f"chance_{number}", world, 0.15), dice.choice([s.name for s in graph.states]), dice
    )
    before = dice.choice([t.name for t in _movable(graph, source)] or [None])
    return graph.with_transition(row, before=before)


def _guard(name: str, world: World, chance: float) -> Callable[[Any], bool]:
    def guard(run: Any) -> bool:
        return world.happens(chance)

    guard.__name__ = name
    return guard


def _reorder(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    state = dice.choice(_inner(graph))
    rows = list(graph.rows(state))
    moved = _movable(graph, state)
    if dice.random() < 0.5:
        dice.shuffle(moved)
    elif len(moved) > 1:
        i = dice.randrange(len(moved) - 1)
        moved[i], moved[i + 1] = moved[i + 1], moved[i]
    fixed_first = [t for t in rows if t.guard in graph.first]
    last = [t for t in rows if t.guard is None]
    others = [t for t in graph.transitions if t.source != state]
    return replace(graph, transitions=(*others, *fixed_first, *moved, *last))


def _retarget(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    row = dice.choice([t for t in graph.transitions if t.guard not in graph.first])
    target = dice.choice([s.name for s in graph.states])
    ends = dice.choice(ENDINGS) if graph.spec(target).final else ""
    new = replace(row, target=target, ends=ends)
    return replace(graph, transitions=tuple(new if t is row else t for t in graph.transitions))


def _effect(world: World, outcomes: tuple[str, ...], raises: float) -> Callable[[Any], Any]:
    async def effect(run: Any) -> Any:
        world.pass_time()
        await asyncio.sleep(0)
        if world.happens(raises):
            raise RuntimeError("the effect raises")
        text = (Message.user("a note"),) if world.happens(0.3) else ()
        return StateResult("value", text, world.dice.choice(("", *outcomes)))

    return effect


def _counter(graph: Graph, name: str, dice: random.Random) -> tuple[Graph, Counter]:
    counter = Counter(name, dice.choice((1, 2, 3)))
    return graph.with_counter(counter), counter


def _add_state(graph: Graph, dice: random.Random, world: World, number: int, raises: float = 0.0) -> Graph:
    graph, counter = _counter(graph, f"visits_{number}", dice)
    name = f"own_{number}"

    def describe(run: Any) -> Failure:
        return Failure(kind=dice.choice(list(FailureKind)), explanation="visited too often")

    describe.__name__ = f"visited_{number}"
    end = exhausted(counter, past=True)(describe)
    rows = [Transition(name, end, "terminal", ends="partial")]
    outcomes = ("approved", "rejected") if dice.random() < 0.5 else ()
    for outcome in outcomes:
        rows.append(_row(graph, name, came_back(outcome), dice.choice(_inner(graph)), dice))
    target = dice.choice(_inner(graph))
    rows.append(Transition(name, None, target))
    spec = StateSpec(name, effect=_effect(world, outcomes, raises), spends=counter.name, outcomes=outcomes)
    entered = dice.choice([t.id for t in graph.transitions if t.guard not in graph.first])
    if dice.random() < 0.5:
        source = dice.choice(_inner(graph))
        return graph.with_state(spec, rows, entered_by=Transition(source, _guard(f"enter_{number}", world, 0.3), name))
    return graph.with_state(spec, [replace(t, ends=t.ends) for t in rows], entered_by=entered)


def _add_raising_state(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return _add_state(graph, dice, world, number, raises=0.4)


def _add_wait(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    name = f"wait_{number}"
    rows = [Transition(name, expired, "terminal", ends="cancelled")]
    if dice.random() < 0.7:
        rows.append(Transition(name, approval_decided, dice.choice(("dispatch_tool", "pre_step"))))
    rows.append(Transition(name, replied, dice.choice(_inner(graph)), extends=dice.random() < 0.5))
    waits = [t.id for t in graph.transitions if graph.spec(t.target).waits]
    entered: Any = (
        dice.choice(waits)
        if waits and dice.random() < 0.7
        else Transition(dice.choice(_inner(graph)), _guard(f"hold_{number}", world, 0.1), name)
    )
    return graph.with_state(StateSpec(name, waits=True), rows, entered_by=entered)


def _add_counter(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    graph, counter = _counter(graph, f"budget_{number}", dice)
    source = dice.choice(_inner(graph))
    target = dice.choice([s.name for s in graph.states])
    ends = dice.choice(ENDINGS) if graph.spec(target).final else ""
    row = Transition(source, _guard(f"paid_{number}", world, 0.4), target, spends=counter.name, ends=ends)
    graph = graph.with_transition(row, before=dice.choice([t.name for t in _movable(graph, source)] or [None]))
    if dice.random() < 0.5:
        refilling = dice.choice([t for t in graph.transitions if t.guard not in graph.first])
        new = replace(refilling, refills=(*refilling.refills, counter.name))
        graph = replace(graph, transitions=tuple(new if t is refilling else t for t in graph.transitions))
    return graph


def _add_detector(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    kind = dice.choice(list(FailureKind))

    def detect(run: Any) -> Failure | None:
        return Failure(kind=kind, explanation="own") if world.happens(0.25) else None

    detect.__name__ = f"own_{kind}_{number}" if dice.random() < 0.5 or number else str(kind)
    state = dice.choice([s for s in _inner(graph) if s != "recover"])
    before = dice.choice([None, *(t.name for t in _movable(graph, state))])
    return graph.with_detector(state, detect, before=before)


def _add_raising_guard(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    def explode(run: Any) -> bool:
        if world.happens(0.2):
            raise RuntimeError("the guard raises")
        return world.happens(0.05)

    explode.__name__ = f"explode_{number}"
    source = dice.choice(_inner(graph))
    row = _row(graph, source, explode, dice.choice([s.name for s in graph.states]), dice)
    return graph.with_transition(row, before=dice.choice([t.name for t in _movable(graph, source)] or [None]))


# -- runs ---------------------------------------------------------------------------------------------


MAX_WAITS = 6


async def run_in_world(agent: Agent, world: World, seed: int) -> list[list[Any]]:
    """The rows of a run in one world, in one list for each stretch between two waits."""
    world.start(seed)
    dice = world.dice
    stretches: list[list[Any]] = []
    async with asyncio.timeout(60):
        result = await agent.run("go")
        while True:
            stretches.append([d.transition for d in result.decisions])
            if not isinstance(result.outcome, UserInputRequested) or len(stretches) > MAX_WAITS:
                return stretches
            record = result.outcome.suspension_record
            try:
                if dice.random() < 0.1:
                    result = await agent.dismiss(record)
                else:
                    try:
                        result = await agent.resume(record, _reply(dice, record))
                    except HumanReplyError:  # the tool does not take the edit, or it is too little: the run waits on
                        result = await agent.resume(record, "go on" if record.kind == "limit" else Allow())
            except NoTransitionError:  # no row takes this reply: the run waits on
                return stretches


def _reply(dice: random.Random, record: SuspensionRecord) -> Any:
    kind, limit = record.kind, record.limit
    if limit is not None and dice.random() < 0.5:
        amount: dict[str, Any] = {limit.unit: dice.choice((1, 2, 3, 10))}
        return Extend(**amount)
    if kind == "approval":
        return dice.choice((Allow(), Allow(), Deny("no"), Edit({"text": "2"})))
    if kind == "in_doubt":
        return dice.choice((ItRan("it ran"), ItDidNotRun(), GiveUp()))
    return "go on"
