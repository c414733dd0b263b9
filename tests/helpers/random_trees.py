"""Random trees of agents, and what their runs say, by rules that know nothing of agentfsm.

An agent calls tools, some of which wait for people or leave a doubt after a crash, and sub-agents, one after the other
or side by side. What a model replies follows from its task and from how much of it is done, and what a person says
from the call, so that a run that was cut off meets the same models and people again. Some models and tools hang, below
a call with a timeout. ``told`` is what a transcript is, by what docs/tools.md and docs/approvals.md say alone.
"""

from __future__ import annotations

import asyncio
import copy
import random
import zlib
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agentfsm import (
    LOOP,
    Actor,
    ActorIsRequesterError,
    ActorRoleError,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Deny,
    Edit,
    Failure,
    Graph,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    JournalError,
    JournalGraphError,
    Message,
    Migration,
    ProviderError,
    RepeatedVoteError,
    Reply,
    Runs,
    RunState,
    StateContext,
    StateSpec,
    SuspensionApprovalError,
    SuspensionGuardrailsError,
    SuspensionToolError,
    Tool,
    ToolCall,
    ToolContext,
    Transition,
    Usage,
    tool,
    with_votes,
)
from agentfsm.loop.guards import (
    aborted,
    approval_decided,
    approval_required,
    cancelled,
    doubt_settled,
    expired,
    in_doubt,
)
from agentfsm.loop.human_input import HumanInput, PendingRequest
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import FinishReason
from agentfsm.loop.quorum import Quorum
from tests.helpers.random_states import APPROVALS, SECRET, VALIDITY_S, StateWorld, done, tools_of
from tests.helpers.stepped_clock import SkippingLoop

KEYRING = Keyring(SECRET)
CLERKS, BOSSES, EDITABLE = ("bob", "cy", "dan", "kim"), ("liz", "max", "ned"), ("pay", "book")
ESCALATES_AFTER_S = 60
FOUR_EYES = Approval(
    2,
    roles=("clerk",),
    not_requester=True,
    validity_s=VALIDITY_S,
    escalate_to=("boss",),
    escalate_after_s=ESCALATES_AFTER_S,
)
REQUESTER = Actor("ann", ("clerk",))
MOST_TOKENS, COST_USD = 100, 0.25
"""What a reply costs at most."""
TURNS = 2
"""How many replies a model gives at most to one task."""


FOR_EVER_S, LOOK_TIMEOUT_S = 1e8, 1.0
HANGS = "~"
"""The end of a task at which a model hangs, its own or one below."""


LIMITS = AgentGuardrails(
    max_iterations=500,
    max_execution_time_s=None,
    llm_timeout_s=FOR_EVER_S,
    tool_timeout_s=FOR_EVER_S,
    max_denials=64,
    repeated_error_threshold=64,
    validity_s=VALIDITY_S,
)
"""Limits that no run reaches."""


# -- agents ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """An agent of a tree.

    Attributes:
        name: Its name, also as a tool.
        tools: Its tools.
        below: Its sub-agents.
        parallel: Whether calls of it may run beside others.
        checks: Whether a state of its own pays before its tools are called.
        gated: Whether calls of it need an approval.
        timeout_s: The timeout of calls of it; None for none. It is longer than all those below it together.
    """

    name: str
    tools: tuple[str, ...]
    below: tuple[Node, ...] = ()
    parallel: bool = False
    checks: bool = False
    gated: bool = False
    timeout_s: float | None = None

    def __iter__(self) -> Iterator[Node]:
        yield self
        for node in self.below:
            yield from node


def draw_node(dice: random.Random, name: str, depth: int) -> Node:
    names = ("look", "send", "ask", "sign", *APPROVALS)
    tools = tuple(each for each in names if dice.random() < 0.5)
    below = [draw_node(dice, f"{name}_{n}", depth - 1) for n in range(dice.choice((1, 1, 2)) if depth else 0)]
    checks = dice.random() < 0.25
    return Node(
        name,
        (*tools, *(["book"] * (checks and "book" not in tools))),
        tuple(below),
        dice.random() < 0.6,
        checks,
        dice.random() < 0.2,
        1_000.0 * 30**depth if dice.random() < 0.5 else None,
    )


class Said(NamedTuple):
    """What a model replies: calls of tools, by their names, or its last word."""

    calls: tuple[tuple[str, str], ...]
    text: str = ""
    end: str = "answers"


class Step(NamedTuple):
    """What a person does about a run that waits.

    Attributes:
        reply: The answer; None if the run is dismissed.
        by: Who answers.
        refused: The error with which the answer is refused.
        waits: Whether nothing is answered, because time passes.
        escalates: Whether somebody then sees to it that the request is escalated; else the next answer does.
        acted_on_late: Whether the answer is sent in time, and acted on when the request has expired.
    """

    reply: HumanInput | None
    by: Actor
    refused: type[Exception] | None = None
    waits: bool = False
    escalates: bool = False
    acted_on_late: bool = False

    def decides(self, request: PendingRequest) -> bool:
        """Whether the request is over after it."""
        if self.waits or self.refused is not None:
            return False
        votes = request.kind == "approval" and isinstance(self.reply, Allow) and request.quorum is not None
        return not votes or request.quorum is None or len(request.quorum.votes) + 1 >= request.quorum.rule.n


@dataclass
class TreeWorld(StateWorld):
    """The people, tools and models of a tree of agents."""

    hangs: bool = False
    hung: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    refusals: Tally[str] = field(default_factory=Tally[str])

    def reply(self, node: Node, task: str, turn: int) -> Said:
        dice, below = self.dice("reply", task, turn), {each.name: each for each in node.below}
        if task.endswith(HANGS) and turn == self.dice("hangs", task).randrange(2):
            name = dice.choice([*below, ""])
            return Said(((name, f"{task}/{turn}.0{HANGS}"),)) if name else Said((), "", "hangs")
        names = [*node.tools, *(each.name for each in node.below)]
        names += [each.name for each in node.below] * 2
        if turn == TURNS or not names or dice.random() < 0.25 * turn:
            end = dice.choices(("answers", "refuses", "fails"), (8, 1, 1))[0]
            return Said((), f"{task}: {end}", end)
        number = dice.choice((1, 1, 2, 3))
        chosen = (
            [dice.choice(node.below).name] * number
            if node.below and dice.random() < 0.3
            else dice.choices(names, k=number)
        )
        texts = [f"{task}/{turn}.{index}" for index in range(len(chosen))]
        for index, name in enumerate(chosen):
            ends_alone = "_" in node.name and node.timeout_s is not None and len(chosen) == 1
            ends = name in below and (below[name].timeout_s is not None or ends_alone)
            texts[index] += HANGS * (self.hangs and ends and dice.random() < 0.5)
        return Said(tuple(zip(chosen, texts, strict=True)))

    async def work(self, name: str, text: str) -> None:
        if self.look_hangs(name, text):
            await self.hang()
        await super().work(name, text)

    def look_hangs(self, name: str, text: str) -> bool:
        return self.hangs and name == "look" and self.dice("look hangs", text).random() < 0.1

    async def hang(self) -> None:
        """Take all the time that there is."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkippingLoop)
        loop.clock, self.hung = self.clock, self.hung + 1
        await asyncio.sleep(FOR_EVER_S)
        raise AssertionError("nothing has ended a call that hangs")

    def usage(self, task: str, turn: int) -> Usage:
        return Usage(input_tokens=self.dice("usage", task, turn).randrange(1, MOST_TOKENS), cost_usd=COST_USD)

    def person(self, name: str, text: str) -> str:
        """What people say of a call that waits for approval."""
        if name == "look":  # under the rule of a later version
            return "allow"
        said = self.dice("person", name, text).choices(
            ("allow", "deny", "edit", "expire", "dismiss"), (50, 6, 6, 1, 1)
        )[0]
        return "allow" if text.endswith("!") or (said == "edit" and name not in EDITABLE) else said

    def next_step(self, request: PendingRequest, number: int) -> Step:
        """What happens next while a run waits; what is refused changes nothing."""
        quorum, dice = request.quorum, self.dice("step", number, request.question)
        if quorum is not None and quorum.rule.roles:
            return self._step_of_quorum(request, quorum, dice)
        by = Actor(f"person {number}")
        if request.kind in ("question", "limit"):
            return Step(f"about {request.question}", by)
        about = request.tool, text_of(request.arguments)
        if request.kind == "in_doubt":
            return Step(self._whether_it_ran(*about), by)
        if request.tool == "sign":  # its secret was encrypted under a secret that is lost
            return Step(Edit({"text": about[1], "pin": pin_for(about[1])}), by)
        said = self.person(*about)
        if said == "edit":
            edited = f"{about[1]}!"
            self._approve(about[0], edited, by)
            return Step(Edit({"text": edited}), by)
        return self._decide(said, about, by)

    def _step_of_quorum(self, request: PendingRequest, quorum: Quorum, dice: random.Random) -> Step:
        about = request.tool, text_of(request.arguments)
        voters = [each.id for each in quorum.votes]
        clerk = Actor(dice.choice([name for name in CLERKS if name not in voters]), ("clerk",))
        boss = Actor(dice.choice([name for name in BOSSES if name not in voters]), ("boss",))
        due = quorum.is_due(self.clock.time())
        was_escalated = quorum.escalated or due or "boss" in quorum.rule.roles  # whoever may approve, says if it ran
        may_answer = [clerk, *([boss] if was_escalated else [])]
        wrong: list[tuple[HumanInput, Actor, type[Exception]]] = [(Allow(), Actor("eve", ("guest",)), ActorRoleError)]
        if not was_escalated:
            wrong.append((Allow(), boss, ActorRoleError))
        if request.kind == "approval":
            wrong.append((Allow(), Actor("ANN ", ("clerk",)), ActorIsRequesterError))
            wrong.append((Edit({"text": "mine"}), clerk, HumanReplyError))
            wrong += [(Allow(), each, RepeatedVoteError) for each in quorum.votes]
        if request.kind == "in_doubt":
            wrong = [(ItDidNotRun(), by, error) for _, by, error in wrong]
        if dice.random() < 0.4:
            reply, by, error = dice.choice(wrong)
            self.refusals[error.__name__] += 1
            return Step(reply, by, refused=error)
        if quorum.escalates_at is not None and not due and dice.random() < 0.3:
            self.clock.advance(ESCALATES_AFTER_S + 1)
            return Step(None, clerk, escalates=dice.random() < 0.5, waits=True)
        by = dice.choice(may_answer)
        if request.kind == "in_doubt":
            return Step(self._whether_it_ran(*about), by)
        said = self.person(*about)
        if said != "allow" and not voters and self.dice("late", *about).random() < 0.5:
            said = "allow"  # at first
        return self._decide(said, about, by)

    def _whether_it_ran(self, name: str, text: str) -> HumanInput:
        """What a person finds out about a call that nobody repeats by itself."""
        assert name in ("send", "pay", "wire", "ask"), f"{name!r} is idempotent, or goes on where its journal ends"
        return ItRan(done(name, text)) if self.ran[name, text] else ItDidNotRun()

    def _decide(self, said: str, about: tuple[str, str], by: Actor) -> Step:
        match said:
            case "deny":
                self.denied.add(about)
                return Step(Deny("no"), by)
            case "allow":
                self._approve(*about, by)
                return Step(Allow(), by)
            case "expire":
                self.clock.advance(VALIDITY_S + 1)
                return Step(None, by)
            case _:
                return Step(None, by)

    def _approve(self, name: str, text: str, by: Actor) -> None:
        voters = self.approvals.setdefault((name, text), [])
        if by.id not in voters:
            voters.append(by.id)


def pin_for(text: str) -> str:
    """The secret argument of a call."""
    return f"pin-{zlib.crc32(text.encode()):08x}"


def arguments_of(name: str, text: str) -> dict[str, Any]:
    """The arguments of a call of a tool."""
    return {"text": text, "pin": pin_for(text)} if name == "sign" else {"text": text}


def text_of(arguments: Mapping[str, Any]) -> str:
    """What a call is about."""
    return str(arguments.get("text", arguments.get("task")))


class TreeModel:
    """The model of one agent."""

    def __init__(self, world: TreeWorld, node: Node, name: str) -> None:
        self.world, self.node, self.name = world, node, name

    async def reply(self, request: Any) -> Reply:
        task = next(message.content for message in request.messages if message.role == "user").split("\n")[0]
        turn = sum(message.role == "assistant" for message in request.messages)
        self.world.asked.append((task, turn))
        said, usage = self.world.reply(self.node, task, turn), self.world.usage(task, turn)
        if said.end == "hangs":
            await self.world.hang()
        if said.end == "fails":
            raise ProviderError("no")
        if said.end == "refuses":
            return Reply(Message.assistant(said.text), FinishReason.CONTENT_FILTER, usage=usage)
        below = {each.name for each in self.node.below}
        calls = [
            ToolCall(f"c{turn}.{n}", name, {"task": text} if name in below else arguments_of(name, text))
            for n, (name, text) in enumerate(said.calls)
        ]
        return Reply(Message.assistant(said.text, tuple(calls)), usage=usage)


def checking(graph: Graph) -> Graph:
    """The loop with a state before its calls that makes one of its own, and waits for people itself."""

    async def check(context: StateContext) -> None:
        task = next(each.content for each in context.run.messages if each.role == "user")
        await context.call_tool("book", {"text": f"{task}/check {context.run.turns}"})

    stops = [
        Transition(state, guard, "terminal", ends=ends)
        for state in ("check", "asks")
        for guard, ends in ((cancelled, "cancelled"), (aborted, "aborted"))
    ]
    rows = [
        *stops,
        Transition("check", approval_required, "asks"),
        Transition("check", in_doubt, "asks"),
        Transition("check", None, "dispatch_tool"),
        Transition("asks", expired, "terminal", ends="cancelled"),
        Transition("asks", approval_decided, "check"),
        Transition("asks", doubt_settled, "check"),
    ]
    own = [replace(row, target="check") if row.id == "post_llm.tool_calls" else row for row in graph.transitions]
    return replace(
        graph,
        states=(*graph.states, StateSpec("check", effect=check), StateSpec("asks", waits=True)),
        transitions=(*own, *rows),
    )


def tools_for(world: TreeWorld, names: Sequence[str]) -> list[Tool]:
    @tool(asks=True, parallel=True)
    async def ask(context: ToolContext, text: str) -> str:
        """Ask a person."""
        return await context.ask(text)

    @tool(idempotent=True, parallel=True, secret=["pin"])
    async def sign(text: str, pin: str) -> str:
        """Sign."""
        assert pin == pin_for(text)
        world.ran["sign", text] += 1
        return done("sign", text)

    own = {"ask": ask, "sign": sign}
    made = tools_of(world, [name for name in names if name not in own])
    made = [replace(each, parallel=each.name in ("look", "pay")) for each in made]
    made = [replace(each, timeout=LOOK_TIMEOUT_S) if each.name == "look" else each for each in made]
    made = [replace(each, requires_approval=FOUR_EYES) if each.name == "wire" else each for each in made]
    return made + [each for name, each in own.items() if name in names]


def never(run: RunState) -> Failure | None:
    """A detector that a later version of the program has."""
    return None


NEW_SECRET = b"another secret"


@dataclass(frozen=True)
class Change:
    """What another version of the program has.

    Attributes:
        kind: What is different.
        at: The agent that is different; empty for the host.
        tool: The tool that is, if it is a tool.
    """

    kind: str = ""
    at: str = ""
    tool: str = ""


CHANGES: Mapping[str, tuple[type[Exception], ...]] = {
    "a tool more": (),
    "another model": (),
    "another graph": (),
    "other names of states": (),
    "a rule more": (),
    "a new secret": (),
    "another graph, not admitted": (JournalGraphError,),
    "a rule less": (SuspensionApprovalError,),
    "another tool": (SuspensionToolError,),
    "other limits": (SuspensionGuardrailsError,),
    "a lost secret": (JournalError,),
}
"""The changes, and with which errors a run may be refused then."""


def asking(root: Node, request: PendingRequest) -> list[str]:
    """The names of the agents that ask, from the first to the one whose request it is."""
    names = {each.name for each in root}
    return [root.name, *(name for name in request.asker.split("/") if name in names)]


UNSHOWN = ("another model", "a new secret", "a lost secret", "other limits", "a rule more", "a rule less")
"""Changes that leave an agent what it was for whoever approves a call of it."""


def draw_change(dice: random.Random, root: Node, request: PendingRequest | None) -> Change:
    """A change, such as one of the tool that a run waits to call."""
    kind, node = dice.choice(list(CHANGES)), dice.choice(list(root))
    guarded = [name for name in node.tools if name in APPROVALS]
    lacks = {"a rule less": not guarded, "another tool": not guarded, "other names of states": not node.checks}
    change = Change("another graph" if lacks.get(kind) else kind, node.name, dice.choice(guarded) if guarded else "")
    if kind == "another tool" and request is not None and request.kind == "approval" and request.tool in APPROVALS:
        change = Change(kind, asking(root, request)[-1], request.tool)
    gated = [each for each in root if each.gated and change.at in {below.name for below in each}]
    if gated and change.kind not in UNSHOWN:  # people may have been shown the agent as it was
        return replace(change, kind="another model")
    return change


@dataclass
class DrawnTree:
    """A tree of agents in a world, one version of the program that has it, and the run that people act on."""

    seed: int
    root: Node
    world: TreeWorld
    limits: AgentGuardrails = LIMITS
    change: Change = Change()
    run_id: str = "r"
    _agents: dict[Any, Agent] = field(default_factory=dict[Any, Agent])

    def agent(self, store: Any) -> Agent:
        """The agent on a store, which is made once: to describe its tools takes longer than to run it."""
        if store not in self._agents:
            host = Host(store=store, clock=self.world.clock, monitor="raise", **self.secrets)
            self._agents[store] = self._made(self.root, host)
        return self._agents[store]

    @property
    def secrets(self) -> dict[str, Any]:
        """The secrets of its host."""
        match self.change.kind:
            case "a new secret":
                return {"secret": NEW_SECRET, "old_secrets": [SECRET]}
            case "a lost secret":
                return {"secret": NEW_SECRET}
            case _:
                return {"secret": SECRET}

    def runs(self, store: Any) -> Runs:
        """The runs of a store, without an agent."""
        return Runs(store, **self.secrets)

    def changed(self, change: Change) -> DrawnTree:
        """The same tree in another version of the program."""
        return replace(self, change=change, _agents={})

    def forked(self, run_id: str) -> DrawnTree:
        """The same tree in a world in which its calls have not run, nor been decided, for a fork of its run."""
        world = copy.deepcopy(self.world)
        world.ran, world.approvals, world.denied = Tally(), {}, set()
        return replace(self, world=world, run_id=run_id, _agents={})

    def _made(self, node: Node, host: Host | None = None) -> Agent:
        kind = self.change.kind if self.change.at == node.name else ""
        tools = tools_for(self.world, node.tools)
        if self.change.tool:
            changed = next(each for each in tools if each.name == self.change.tool) if kind else None
            if changed is not None and kind == "another tool":
                tools[tools.index(changed)] = replace(changed, definition="another server's")
            if changed is not None and kind == "a rule less":
                tools[tools.index(changed)] = replace(changed, requires_approval=False)
        if kind == "a rule more":
            tools = [replace(each, requires_approval=True) if each.name == "look" else each for each in tools]
        if kind == "a tool more":
            tools += tools_for(self.world, [name for name in ("look", "wire") if name not in node.tools][:1])
        graph, migrations = with_votes(checking(LOOP) if node.checks else LOOP), []
        if kind.startswith("another graph"):
            migrations = [Migration(graph)] if kind == "another graph" else []
            graph = graph.with_detector("post_llm", never, before="no_progress")
        if kind == "other names of states":
            names = {"check": "review", "asks": "pends"}
            migrations = [Migration(graph, states=names)]
            graph = renamed(graph, names)
        subs = [
            self._made(each).as_tool(
                each.name, "Helps.", timeout=each.timeout_s, parallel=each.parallel, requires_approval=each.gated
            )
            for each in node.below
        ]
        return Agent(
            TreeModel(self.world, node, f"{node.name} {kind}"),
            tools=[*tools, *subs],
            graph=graph,
            guardrails=self.limits.model_copy(update={"max_denials": 65} if kind == "other limits" else {}),
            migrations=migrations,
            host=host,
        )

    def may_refuse(self, request: PendingRequest | None, reply: HumanInput | None) -> bool | None:
        """Whether a version of the program refuses to go on with a run; None if it depends on more than is known here.

        Args:
            request: What the run waits for; None if it was cut off.
            reply: The answer; None if it is dismissed, or was cut off.
        """
        kind, at = self.change.kind, self.change.at
        if not CHANGES[kind]:
            return False
        if request is not None and reply is None:
            return None
        if kind in ("a rule less", "a lost secret") or (at == self.root.name and kind == "another graph, not admitted"):
            return True
        if kind == "other limits" and at != self.root.name:
            return False  # they follow from the caller's
        if request is None:
            return None
        path = asking(self.root, request)
        if kind == "other limits":
            return True
        if kind == "another tool":
            runs = isinstance(reply, Allow | Edit)
            return True if runs and (path[-1], request.tool) == (at, self.change.tool) else None
        return True if at in path else None


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    def new(name: Any) -> Any:
        return names.get(name, name)

    states = tuple(replace(each, name=new(each.name)) for each in graph.states)
    rows = tuple(replace(each, source=new(each.source), target=new(each.target)) for each in graph.transitions)
    return replace(graph, states=states, transitions=rows)


def draw_limits(dice: random.Random) -> AgentGuardrails:
    """Limits that runs do reach, alone or together with those that they call."""
    return LIMITS.model_copy(
        update={
            "max_iterations": dice.choice((3, 5, 8)),
            "max_tokens": dice.choice((None, 150, 400)),
            "max_cost_usd": dice.choice((None, 1.0)),
            "max_execution_time_s": dice.choice((None, 500.0, 40_000.0)),
            "max_continues": dice.choice((0, 1, 2)),
            "on_limit": dice.choice(("ask_user", "ask_user", "handoff", "stop")),
        }
    )


def draw_tree(seed: int, world: TreeWorld) -> DrawnTree:
    dice = random.Random(seed)
    limits = LIMITS if dice.random() < 0.7 else draw_limits(dice)
    return DrawnTree(seed, draw_node(dice, "a", dice.choice((1, 1, 1, 2, 2, 3))), world, limits)


# -- what a transcript is, by the rules ---------------------------------------------------------------------


class DismissedError(Exception):
    """Somebody dismissed the run, or its request expired."""


class HangsError(Exception):
    """The run hangs until the timeout of a call above it."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage


@dataclass
class Told:
    """What one run says.

    Attributes:
        messages: Its transcript: role and content; of a failed call how that begins, or may begin after a crash.
        end: The name of its ending event.
        result: What a caller is told, or how that begins.
        calls: The names and tasks of the sub-agents' runs below it, at every depth, its own included.
    """

    messages: list[tuple[str, str | tuple[str, ...]]]
    end: str
    result: str
    usage: Usage


def told(world: TreeWorld, node: Node, task: str) -> Told:
    """What a run of an agent is, where no limit is reached and nobody dismisses it.

    Raises:
        DismissedError: Somebody does.
        HangsError: It hangs.
    """
    usage = Usage()
    messages: list[tuple[str, str | tuple[str, ...]]] = [("user", task)]
    below = {each.name: each for each in node.below}
    for turn in range(TURNS + 1):
        said = world.reply(node, task, turn)
        if said.end == "hangs":
            raise HangsError(usage)
        if said.end == "fails":
            return Told(messages, "Handoff", "the sub-agent hands the task back", usage)
        usage += world.usage(task, turn)
        messages.append(("assistant", said.text))
        if not said.calls:
            end = "RunCompleted" if said.end == "answers" else "Handoff"
            return Told(
                messages, end, said.text if said.end == "answers" else "the sub-agent hands the task back", usage
            )
        if node.checks:
            _result(world, "book", f"{task}/check {turn + 1}")
        for name, text in said.calls:
            if name in below:
                if below[name].gated and (denied := _result(world, name, text)) != done(name, text):
                    messages.append(("tool", denied))
                    continue
                try:
                    answer = told(world, below[name], text)
                except HangsError as hung:
                    usage += hung.usage
                    if (timeout_s := below[name].timeout_s) is None:
                        raise HangsError(usage) from hung
                    messages.append(("tool", (f"timed out after {timeout_s:g} s", "the sub-agent was cancelled: ")))
                    continue
                usage += answer.usage
                messages.append(("tool", answer.result))
            else:
                messages.append(("tool", _result(world, name, text)))
    raise AssertionError("a model gives its last word after so many turns")


def _result(world: TreeWorld, name: str, text: str) -> str:
    if name == "ask":
        return f"about {text}"
    if world.look_hangs(name, text):
        return f"timed out after {LOOK_TIMEOUT_S:g} s"
    if name == "look" and world.dice("breaks", text).random() < 0.15:
        return "ValueError: broken"
    if name in ("look", "send", "sign"):
        return done(name, text)
    match world.person(name, text):
        case "allow":
            return done(name, text)
        case "edit":
            return done(name, f"{text}!")
        case "deny":
            return "Denied by the user: no"
        case _:
            raise DismissedError
