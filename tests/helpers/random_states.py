"""Random graphs whose own states mix what is mostly tested apart, and a world in which each run can be repeated.

The effect of such a state asks the model and calls tools, some of which wait for one approval, or for two, or leave a
doubt after a crash. Its rows, in any order, are those for its waits, its outcomes, guards that read results of
states, and counters. ``Rules`` says which of them a run takes, by what docs/graphs.md says alone.

What the world does follows from its seed and from what it is asked, so that a run that is forked or cut off meets the
same people, tools and models again.
"""

from __future__ import annotations

import random
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Counter,
    Deny,
    Edit,
    Graph,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    Message,
    Reply,
    RunResult,
    RunState,
    StateContext,
    StateResult,
    StateSpec,
    Tool,
    ToolCall,
    TransientProviderError,
    Transition,
    UserInputRequested,
    came_back,
    tool,
    with_votes,
)
from agentfsm.errors import AgentfsmError
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.loop.guards import (
    aborted,
    approval_decided,
    approval_required,
    cancelled,
    doubt_settled,
    expired,
    in_doubt,
    replied,
)
from agentfsm.loop.human_input import HumanInput, PendingRequest
from agentfsm.machine.declaration import exhausted
from agentfsm.testing import FakeClock

SECRET = b"of the tests"
OUTCOMES = ("good", "poor")
VALUES = ("red", "blue")
APPROVALS = {"pay": 1, "book": 1, "wire": 2}
"""How many people must approve a call of each tool that waits."""
VALIDITY_S = 600
MAX_WAITS = 30
"""How often a run is answered, at most."""


# -- guards ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadsResult:
    """What a guard of the user's asks: whether a state's result is a value, or whether it is not."""

    state: str
    value: str
    negated: bool

    def holds(self, results: Mapping[str, Any]) -> bool:
        return (results.get(self.state) == self.value) != self.negated

    def guard(self) -> Callable[[RunState], bool]:
        def guard(run: RunState) -> bool:
            return self.holds(run.state_results)

        guard.__name__ = f"{self.state}_is_{'not_' if self.negated else ''}{self.value}"
        return guard


# -- the world ------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One time that the effect of an own state has run.

    Attributes:
        state: The state.
        visit: The number of its visit; an effect that is run again is in the same visit.
        asked: The text of the call that it was in when it was left; empty if it was left in none.
        tool: The tool of that call.
        result: What it came back with; None if it was left, or raised.
        raised: Whether it raised.
    """

    state: str
    visit: int
    asked: str = ""
    tool: str = ""
    result: StateResult | None = None
    raised: bool = False


@dataclass
class StateWorld:
    """The people, tools and models outside, and what they have seen.

    Attributes:
        seed: What decides.
        clock: The clock of its runs.
        transient: How often a model is busy when an effect asks it something for the first time.
        attempts: How often effects have run, in order.
        ran: How often a tool has run with a text.
        approvals: Who has approved a call of a tool with a text.
        denied: Which calls were denied.
        answers: What people said, in order: a kind of answer, ``expire`` or ``dismiss``.
        failed: For which requests a model was busy.
    """

    seed: int
    clock: FakeClock = field(default_factory=FakeClock)
    transient: float = 0.0
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    ran: Tally[tuple[str, str]] = field(default_factory=Tally[tuple[str, str]])
    approvals: dict[tuple[str, str], list[str]] = field(default_factory=dict[tuple[str, str], list[str]])
    denied: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    answers: list[str] = field(default_factory=list[str])
    failed: set[str] = field(default_factory=set[str])

    def dice(self, *about: object) -> random.Random:
        return random.Random(repr((self.seed, *about)))

    async def work(self, name: str, text: str) -> None:
        """What a tool does; some fail."""
        if name == "look" and self.dice("breaks", text).random() < 0.15:
            raise ValueError("broken")

    def answer(self, request: PendingRequest, by: str) -> HumanInput | None:
        """What a person says; None if the request expires or is dismissed. It depends on the call alone."""
        if request.kind not in ("approval", "in_doubt"):
            self.answers.append("go on")
            return "go on"
        about = (request.tool, str(request.arguments["text"]))
        dice = self.dice("person", *about)
        said = "doubt"
        if request.kind == "approval":
            said = dice.choices(("allow", "deny", "edit", "expire", "dismiss"), (12, 3, 2, 2, 1))[0]
            if about[1].endswith("!") or (said, request.tool) == ("edit", "wire"):
                said = "allow"  # a fork asks again about what was edited
        self.answers.append(said)
        match said:
            case "doubt":
                return dice.choice((ItRan(done(*about)), ItDidNotRun()))
            case "deny":
                self.denied.add(about)
                return Deny("no")
            case "edit":
                edited = f"{about[1]}!"
                self.approvals.setdefault((request.tool, edited), []).append(by)
                return Edit({"text": edited})
            case "allow":
                self.approvals.setdefault(about, []).append(by)
                return Allow()
            case "expire":
                self.clock.advance(VALIDITY_S + 1)
                return None
            case _:
                return None


def done(name: str, text: str) -> str:
    """The result of a tool."""
    return f"{name} {text}"


class StateModel:
    """A model whose reply to the transcript depends on how many it has given, and to an effect on what that asks."""

    name = "by seed"

    def __init__(self, world: StateWorld, tools: Sequence[str]) -> None:
        self.world, self.tools = world, tools

    async def reply(self, request: Any) -> Reply:
        last = request.messages[-1].content
        if not request.tools:
            if last not in self.world.failed and self.world.dice("fails", last).random() < self.world.transient:
                self.world.failed.add(last)
                raise TransientProviderError("busy")
            return Reply(Message.assistant(f"on {last}"))
        turn = sum(message.role == "assistant" for message in request.messages)
        dice = self.world.dice("turn", turn)
        if not self.tools or turn > 3 or dice.random() < 0.4:
            return Reply(Message.assistant(f"draft {turn}"))
        names = dice.choices(self.tools, k=dice.choice((1, 1, 2)))
        calls = (ToolCall(f"c{turn}.{i}", name, {"text": f"turn {turn}.{i}"}) for i, name in enumerate(names))
        return Reply(Message.assistant("", tuple(calls)))


def tools_of(world: StateWorld, names: Sequence[str]) -> list[Tool]:
    def made(name: str, **options: Any) -> Tool:
        async def run(text: str) -> str:
            """Do it."""
            world.ran[name, text] += 1
            await world.work(name, text)
            return done(name, text)

        return tool(name=name, **options)(run)

    every = {
        "look": made("look", idempotent=True, retryable=True),
        "send": made("send"),
        "pay": made("pay", requires_approval=Approval(validity_s=VALIDITY_S)),
        "book": made("book", requires_approval=Approval(validity_s=VALIDITY_S), idempotent=True),
        "wire": made("wire", requires_approval=Approval(2, validity_s=VALIDITY_S)),
    }
    return [every[name] for name in names]


def effect_of(world: StateWorld, name: str, kinds: Sequence[str]) -> Callable[[StateContext], Any]:
    """An effect that makes calls; which depend on its visit and on the result of its last one."""

    async def effect(context: StateContext) -> StateResult:
        visit = int(context.idempotency_key.rpartition(":")[2])
        before = context.run.state_results.get(name)
        dice = world.dice("effect", name, visit, before)
        attempt = Attempt(name, visit)
        world.attempts.append(attempt)
        try:
            for number in range(dice.choice((0, 1, 1, 2, 3))):
                kind, text = dice.choice(kinds), f"{name} {visit}.{number} after {before}"
                if kind == "model":
                    assert (await context.ask_model(text)).message.content == f"on {text}"
                    continue
                attempt.asked, attempt.tool = text, kind
                result = await context.call_tool(kind, {"text": text})
                attempt.asked = ""
                if (kind, text) in world.denied:
                    assert (result.status, world.ran[kind, text]) == ("denied", 0)
                elif result.status == "done":
                    assert result.content in (done(kind, text), done(kind, text + "!"))
        except AgentfsmError:
            attempt.raised = True
            raise
        value = dice.choice((*VALUES, *VALUES, None))
        messages = (Message.user(f"a note of {name}"),) if dice.random() < 0.2 else ()
        attempt.result = StateResult(value, messages, dice.choice((*OUTCOMES, *OUTCOMES, "")))
        return attempt.result

    return effect


# -- graphs ---------------------------------------------------------------------------------------------


@dataclass
class DrawnStates:
    """A graph with own states, and how to make its agent.

    Attributes:
        seed: Its seed.
        graph: The graph.
        world: The world in which its effects are.
        own: Its own states that have effects.
        asks: By the id of its row, what each guard of the user's asks.
        tools: The agent's tools.
        limits: Its limits.
        called: Which of the tools its model calls.
        spends: Whether some state spends a counter, so that a wait more may bring another end.
    """

    seed: int
    graph: Graph
    world: StateWorld
    own: tuple[str, ...]
    asks: dict[str, ReadsResult]
    tools: list[Tool]
    limits: AgentGuardrails
    called: list[str]
    spends: bool = False

    def agent(self, store: MemoryStore) -> Agent:
        host = Host(store=store, secret=SECRET, clock=self.world.clock, monitor="raise")
        model = StateModel(self.world, self.called)
        return Agent(model, tools=self.tools, graph=self.graph, guardrails=self.limits, host=host)


def draw_states(seed: int, world: StateWorld) -> DrawnStates:
    """The graph of a seed, in a world.

    Raises:
        GraphError: The graph is refused.
    """
    dice = random.Random(seed)
    names = tuple(f"own{number}" for number in range(dice.choice((1, 1, 2, 3))))
    tool_names = ["look", *(name for name in ("send", *APPROVALS) if dice.random() < 0.7)]
    called = tool_names if dice.random() < 0.5 else []
    limits = AgentGuardrails(
        max_iterations=dice.choice((4, 20)), max_execution_time_s=None, max_continues=2, max_tool_retries=1
    )
    drawn = DrawnStates(seed, LOOP, world, names, {}, tools_of(world, tool_names), limits, called)
    if limits.max_iterations == 20:  # so that a call that is repeated after a crash uses up no limit
        world.transient = dice.choice((0.0, 0.4))
    states, rows, counters = list(LOOP.states), list(LOOP.transitions), list(LOOP.counters)
    counters.append(Counter("rounds", dice.choice((1, 2, 3))))
    for number, name in enumerate(names):
        _enter(rows, name, dice, first=number == 0)
        spec = StateSpec(name, effect=effect_of(world, name, ["model", *tool_names]), outcomes=OUTCOMES)
        own = _rows_of(drawn, name, dice)
        if dice.random() < 0.3:
            counter = Counter(f"visits_{name}", dice.choice((1, 2, 3)))
            counters.append(counter)
            own.insert(0, Transition(name, _too_often(counter), "terminal", ends="partial"))
            spec, drawn.spends = replace(spec, spends=(counter.name,)), True
        states += [spec, StateSpec(f"asks_{name}", waits=True), StateSpec(f"holds_{name}", waits=True)]
        rows += [*_stops(name), *own, *_waits_of(drawn, name, dice)]
    reached = {row.target for row in rows}
    states = [spec for spec in states if spec.name in reached or spec.name == LOOP.initial]
    kept = {spec.name for spec in states}
    rows = [row for row in rows if row.source in kept]
    graph = replace(LOOP, states=tuple(states), transitions=tuple(rows), counters=tuple(counters))
    drawn.graph = with_votes(graph)
    return drawn


def _stops(name: str) -> list[Transition]:
    return [
        Transition(name, cancelled, "terminal", ends="cancelled"),
        Transition(name, aborted, "terminal", ends="aborted"),
    ]


def _too_often(counter: Counter) -> Any:
    def describe(run: RunState) -> bool:
        return True

    describe.__name__ = f"past_{counter.name}"
    return exhausted(counter, past=True)(describe)


def _enter(rows: list[Transition], name: str, dice: random.Random, first: bool) -> None:
    """Let a row of the loop, or the last one of another own state, lead to a state."""
    ids = ["post_llm.otherwise"] if first else ["post_tool.otherwise", "post_llm.tool_calls", "recover.otherwise"]
    ids += [row.id for row in rows if row.source.startswith("own") and row.guard is None]
    entered = dice.choice(ids)
    rows[:] = [replace(row, target=name, ends="") if row.id == entered else row for row in rows]


def _rows_of(drawn: DrawnStates, name: str, dice: random.Random) -> list[Transition]:
    """The rows of an own state, in any order, but for the last."""
    targets = ("pre_step", "terminal", "terminal", "dispatch_tool", name, *drawn.own)
    rows: list[Transition] = []
    for outcome in OUTCOMES:
        held = Transition(name, came_back(outcome), f"holds_{name}")
        rows.append(held if dice.random() < 0.15 else _row(name, came_back(outcome), targets, dice))
    for _ in range(dice.choice((0, 1, 1, 2))):
        rows += _reading_row(drawn, name, name, targets, dice)
    if dice.random() < 0.9:
        rows.append(Transition(name, approval_required, f"asks_{name}"))
    if dice.random() < 0.9:
        rows.append(Transition(name, in_doubt, f"asks_{name}"))
    dice.shuffle(rows)
    last = Transition(name, None, dice.choice(("pre_step", "terminal")))
    return [*rows, replace(last, ends="completed") if last.target == "terminal" else last]


def _row(source: str, guard: Any, targets: Sequence[str], dice: random.Random) -> Transition:
    target = dice.choice(targets)
    spends = "rounds" if target.startswith(("own", "dispatch")) or dice.random() < 0.3 else ""
    ends = dice.choice(("completed", "completed", "handed_off")) if target == "terminal" else ""
    return Transition(source, guard, target, ends=ends, spends=spends)


def _reading_row(
    drawn: DrawnStates, source: str, state: str, targets: Sequence[str], dice: random.Random
) -> list[Transition]:
    """A row whose guard reads a result, mostly that of a state, unless there is one that reads the same."""
    asks = ReadsResult(dice.choice((state, state, *drawn.own)), dice.choice(VALUES), dice.random() < 0.4)
    row = _row(source, asks.guard(), targets, dice)
    if row.id in drawn.asks:
        return []
    drawn.asks[row.id] = asks
    return [row]


def _waits_of(drawn: DrawnStates, name: str, dice: random.Random) -> list[Transition]:
    asks, holds = f"asks_{name}", f"holds_{name}"
    drops = Transition(asks, expired, "pre_step")
    rows = [
        drops if dice.random() < 0.5 else replace(drops, target="terminal", ends="cancelled"),
        Transition(asks, approval_decided, name),
        Transition(asks, doubt_settled, name),
    ]
    if dice.random() < 0.7:
        rows += _reading_row(drawn, asks, name, ("pre_step", "pre_step", "terminal", name), dice)
        dice.shuffle(rows)
    return [
        *_stops(asks),
        *rows,
        *_stops(holds),
        Transition(holds, expired, "terminal", ends="cancelled"),
        Transition(holds, replied, dice.choice((name, "pre_step"))),
    ]


# -- runs -----------------------------------------------------------------------------------------------


@dataclass
class Followed:
    """A run of a drawn graph, up to its end, or up to so many waits.

    Attributes:
        results: Its results, one for each stretch between two waits.
    """

    results: list[RunResult]

    @property
    def rows(self) -> list[Transition]:
        return [decision.transition for result in self.results for decision in result.decisions]

    @property
    def ended(self) -> bool:
        return not isinstance(self.results[-1].outcome, UserInputRequested)

    @property
    def end(self) -> tuple[object, ...]:
        """What does not depend on how often the run was interrupted."""
        run = self.results[-1].run_state
        told = [(each.role, each.content, each.tool_call_id) for each in run.messages]
        return type(self.results[-1].outcome).__name__, run.ended, dict(run.state_results), told


async def follow(drawn: DrawnStates, store: MemoryStore, run_id: str) -> Followed:
    """Begin a run, or go on with one, and answer whatever it asks, until it ends."""
    results: list[RunResult] = []
    if await store.head(run_id) is None:
        results.append(await drawn.agent(store).run("go", run_id=run_id))
    while not results or (isinstance(results[-1].outcome, UserInputRequested) and len(results) < MAX_WAITS):
        agent, records = drawn.agent(store), await store.records(run_id)
        past, person = rehydrate(records), f"person {len(records)}"
        if past.suspension is None or past.run.pending_request is None:
            results.append(await agent.resume(run_id))
        elif (answer := drawn.world.answer(past.run.pending_request, person)) is None:
            results.append(await agent.dismiss(run_id))
        else:
            results.append(await agent.resume(run_id, answer, by=person))
    return Followed(results)


@dataclass
class Rules:
    """What a run has done so far, and which rows it takes then, by the rules.

    Attributes:
        drawn: The graph.
        results: What the effects of own states returned last, by state.
        spent: How often each counter was spent.
        votes: How many people have approved the call that waits.
    """

    drawn: DrawnStates
    results: dict[str, Any] = field(default_factory=dict[str, Any])
    spent: Tally[str] = field(default_factory=Tally[str])
    votes: int = 0

    def take(self, row: Transition) -> None:
        """Count what a row spends."""
        self.spent.update(row.spends)
        self.spent.update(self.drawn.graph.spec(row.target).spends)
        if row.name == "approval_required":
            self.votes = 0

    def row_after(self, attempt: Attempt) -> Transition:
        """The row out of an own state after its effect."""
        if attempt.result is not None and attempt.result.value is not None:
            self.results[attempt.state] = attempt.result.value
        holding = {"aborted"} if attempt.raised else {"approval_required"} if attempt.asked else set[str]()
        if attempt.result is not None:
            holding.add(attempt.result.outcome)
        row = self._first(attempt.state, holding, attempt.state if attempt.asked else "")
        assert row is not None
        return row

    def row_after_answer(self, state: str, answer: str, tool: str) -> Transition:
        """The row out of the wait for a call of a tool: a run waits until somebody answers, whatever its rows are."""
        self.votes += answer == "allow"
        decided = "vote_recorded" if answer == "allow" and self.votes < APPROVALS[tool] else "approval_decided"
        holding = {"dismiss": "cancelled", "expire": "expired"}.get(answer, decided)
        row = self._first(state, {holding}, state.removeprefix("asks_"))
        assert row is not None
        return row

    def _first(self, state: str, holding: set[str], waiting: str) -> Transition | None:
        """The first row of a state whose guard holds, while the call of an own state waits, or of none."""
        limits = {each.name: each.limit for each in self.drawn.graph.counters if isinstance(each.limit, int)}
        results = {name: value for name, value in self.results.items() if name != waiting}
        for row in self.drawn.graph.rows(state):
            counter = row.name.removeprefix("past_")
            if any(name == "rounds" and self.spent[name] >= limits[name] for name in row.spends):
                continue
            if row.id in self.drawn.asks:
                holds = self.drawn.asks[row.id].holds(results)
            elif counter != row.name:
                holds = self.spent[counter] > limits[counter]
            else:
                holds = row.guard is None or row.name in holding
            if holds:
                return row
        return None
