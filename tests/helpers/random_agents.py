"""Random agents by seed, and random worlds in which they run.

An agent has a random graph, and tools that fail, ask, need approval of one person or two, or are sub-agents. A world is
a model, tools, a policy, hooks and people that do anything.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Deny,
    Edit,
    Extend,
    GiveUp,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    KeepLast,
    Summarize,
    SuspensionRecord,
    ToolContext,
    UserInputRequested,
    hook,
    tool,
    with_votes,
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
from agentfsm.loop.failures import Action, Failure
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import DefaultPolicy
from agentfsm.machine.declaration import Transition
from agentfsm.runtime.hooks import AskApproval, DenyCall, HookContext
from tests.helpers.random_graphs import CHANGES, World, draw_graph

FEATURES = (
    *CHANGES,
    "sub-agent",
    "tool that asks",
    "approvals of two people",
    "history policy",
    "native calls",
    "envelope calls",
    *(f"preset {name}" for name in PRESETS),
)


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
        if "approvals of two people" in drawn.features:
            graph = with_votes(graph)
        control = ["ask_user", "return_done", "return_unable"] if behavior.control_tools else []
        drawn.agent = Agent(
            WorldModel(world, [t.name for t in tools] + control * 2),
            tools=tools,
            preset=preset,
            graph=graph,
            guardrails=_limits(dice),
            policy=WorldPolicy(world) if dice.random() < 0.7 else None,
            hooks=_hooks(dice, world),
            history=_history(dice, drawn.features),
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


def _history(dice: random.Random, features: set[str]) -> Any:
    if dice.random() < 0.7:
        return None
    features.add("history policy")
    if dice.random() < 0.5:
        return KeepLast(turns=1, replies=1, max_compactions=2)
    return Summarize(above_tokens=10, turns=1, replies=1, max_compactions=2)


def _hooks(dice: random.Random, world: World) -> list[Any]:
    @hook("dispatch_tool")
    def gate(context: HookContext) -> Any:
        if world.happens(0.05):
            raise RuntimeError("the hook raises")
        return AskApproval("may it?") if world.happens(0.1) else DenyCall("no") if world.happens(0.1) else None

    return [gate] if dice.random() < 0.4 else []


def _tools(dice: random.Random, world: World, features: set[str]) -> list[Any]:
    def misbehave() -> None:
        world.tool_calls += 1
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
    if dice.random() < 0.2:
        features.add("approvals of two people")
        chosen.append(tool(name="paid", requires_approval=Approval(n=2))(plain))
    if dice.random() < 0.25:
        features.add("tool that asks")
        chosen.append(_asking_tool(dice, world))
    if dice.random() < 0.25:
        features.add("sub-agent")
        chosen.append(_sub_agent(dice, world))
    return chosen


def _asking_tool(dice: random.Random, world: World) -> Any:
    async def asking(context: ToolContext, text: str) -> str:
        """Ask a person before it is done."""
        world.pass_time()
        if world.happens(0.2):
            return text  # it need not ask
        said = await context.ask("Sure?")
        world.tool_calls += 1
        return said

    return tool(asks=True, parallel=dice.random() < 0.3)(asking)


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


# -- runs ---------------------------------------------------------------------------------------------


MAX_WAITS = 6


@dataclass
class Stretch:
    """What a run did between two waits: the rows that it took, and how many of its tool calls are known to have run."""

    rows: list[Transition]
    tool_calls: int = 0


async def run_in_world(agent: Agent, world: World, seed: int) -> list[Stretch]:
    """A run in one world, in stretches between two waits."""
    world.start(seed)
    dice = world.dice
    stretches: list[Stretch] = []
    people = map("person {}".format, count())
    async with asyncio.timeout(60):
        result = await agent.run("go")
        while True:
            before = sum(each.tool_calls for each in stretches)
            rows = [each.transition for each in result.decisions]
            stretches.append(Stretch(rows, world.tool_calls - before))
            if not isinstance(result.outcome, UserInputRequested) or len(stretches) > MAX_WAITS:
                return stretches
            asked = result.outcome
            record = asked.suspension_record
            try:
                if dice.random() < 0.1:
                    result = await agent.dismiss(record)
                else:
                    try:
                        result = await agent.resume(record, _reply(dice, record), by=next(people))
                    except HumanReplyError:  # the tool does not take the edit, or it is too little: the run waits on
                        reply = "go on" if record.kind == "limit" else Allow()
                        result = await agent.resume(record, reply, by=next(people))
                    assert_kept(asked, result.decisions[0].transition, agent)
            except NoTransitionError:  # no row takes this reply: the run waits on
                return stretches


def assert_kept(asked: UserInputRequested, row: Transition, agent: Agent) -> None:
    """Check that a row extends the limit, or ends the run, if the request said that a reply to it grants something."""
    target = agent.graph.spec(row.target)
    if asked.limit is not None and asked.limit.default and not asked.asker:
        assert target.final or (row.extends and not target.waits), f"{row} grants nothing: {asked.limit}"


def _reply(dice: random.Random, record: SuspensionRecord) -> Any:
    kind, limit = record.kind, record.limit
    if limit is not None and dice.random() < 0.5:
        amount: dict[str, Any] = {limit.unit: dice.choice((1, 2, 3, 10, 1000))}
        return Extend(**amount)
    if kind == "approval":
        return dice.choice((Allow(), Allow(), Deny("no"), Edit({"text": "2"})))
    if kind == "in_doubt":
        return dice.choice((ItRan("it ran"), ItDidNotRun(), GiveUp()))
    return "go on"
