"""Calls of an agent's own tools, for paths and random scenarios: which wait for approval, and which run at once.

A tool's arguments are chosen from the examples of the graph's guards that call it, the numbers and texts in the code of
its approval rule (and their neighbours), and its schema. The rule and the validation decide what becomes of each call.
"""

from __future__ import annotations

import dis
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from agentfsm.agent import Agent
from agentfsm.errors import ContextOverflowError, ProviderError, ToolError, TransientProviderError
from agentfsm.loop.approval_rows import counts_votes
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.detectors import DEFAULT_RESULT, Example
from agentfsm.loop.failures import Action
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import Allow, Deny, Edit, Extend, GiveUp, ItDidNotRun, ItRan
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall, Usage
from agentfsm.loop.quorum import Approval
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.graph import Graph
from agentfsm.runtime.tools import Tool
from agentfsm.testing.path_assumptions import merged_start
from agentfsm.testing.simulation import (
    DISMISSED,
    ESCALATED,
    EXPIRED,
    NO_SIDE_EVENT,
    ModelTurn,
    Scenario,
    SideEvent,
)

MAX_CANDIDATES = 200
"""Arguments that are tried for one tool."""

MAX_CALLS = 8
"""Calls of one tool that a path chooses from."""

NUMBERS = (1, 0, 2, 10, 99, 100, 101, 1_000, 10_000, 1_000_000, -1)
TEXTS = ("a", "", "b", "some text", "2026-01-01", "a@example.org", "https://example.org")


@dataclass(frozen=True, slots=True)
class ApprovalCase:
    """A call of a tool, and whether the tool's rule requires approval of it.

    Attributes:
        tool: The tool's name.
        arguments: The arguments.
        required: Whether approval is required.
        rule: Who must approve, if the rule says so.
    """

    tool: str
    arguments: Mapping[str, Any]
    required: bool
    rule: Approval | None = None

    @property
    def call(self) -> ToolCall:
        """The call."""
        return ToolCall("", self.tool, self.arguments)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.tool}({arguments})"


@dataclass(frozen=True, slots=True)
class Votes:
    """What a path does while a call waits for approval.

    Attributes:
        count: How many approvals are recorded after which others must approve, too.
        escalated: Whether the request is escalated.
    """

    count: int = 0
    escalated: bool = False

    @property
    def rule(self) -> Approval:
        """A rule that needs one approval more."""
        if not self.escalated:
            return Approval(self.count + 1)
        return Approval(self.count + 1, roles=("first",), escalate_to=("second",), escalate_after_s=60)

    def fit(self, rule: bool | Approval | None) -> bool:
        """Whether a rule needs exactly one approval more, and escalates if the path does."""
        needed, escalates = (rule.n, bool(rule.escalate_to)) if isinstance(rule, Approval) else (1, False)
        return needed == self.count + 1 and escalates >= self.escalated


def requires_approval(tool: Tool, arguments: Mapping[str, Any]) -> bool | Approval | None:
    """What a tool's own rule requires for a call; None if that cannot be said of the arguments alone.

    They may be invalid, the rule may raise, or it may be a function of the context, too.
    """
    rule = tool.requires_approval
    try:
        validated = tool.arguments(arguments)
        if isinstance(rule, (bool, Approval)):
            return rule
        by_arguments = cast("Callable[[dict[str, Any]], bool | Approval]", rule)
        if tool.approval_takes_context:
            return None
        required = by_arguments(validated)
        return required if isinstance(required, Approval) else bool(required)
    except Exception:  # of a validator or of the rule: such a call shows neither
        return None


def approval_cases(tool: Tool, graph: Graph, examples: Iterable[Example] = ()) -> list[ApprovalCase]:
    """Calls of a tool, and what its rule decides about each."""
    found: list[ApprovalCase] = []
    for arguments in _candidates(tool, [*examples, *_examples_of(graph)]):
        required = requires_approval(tool, arguments)
        if required is not None:
            rule = required if isinstance(required, Approval) else None
            found.append(ApprovalCase(tool.name, arguments, bool(required), rule))
    return found


class OwnCalls:
    """Calls of an agent's own tools.

    Args:
        tools: The agent's tools by name.
        graph: Its graph. A call that one of its guards objects to (a guard that is not the library's) is left out.
        examples: Examples that were passed in.
    """

    def __init__(self, tools: Mapping[str, Tool], graph: Graph, examples: Iterable[Example] = ()) -> None:
        own = [tool for tool in tools.values() if tool.control is None and tool.delegate is None]
        given = list(examples)
        guards = [row.guard for row in graph if row.guard is not None and row.guard not in BUILT_IN_GUARDS]
        self._tools = {tool.name: tool for tool in own}
        self._ending = [tool.name for tool in own if tool.ends_run and not tool.idempotent]
        self._invalid = [
            ToolCall("", tool.name, {})
            for tool in own
            if tool.spec.parameters.get("required") and not _objected_to(ToolCall("", tool.name, {}), guards)
        ]
        self._cases = {
            tool.name: [case for case in approval_cases(tool, graph, given) if not _objected_to(case.call, guards)]
            for tool in own
        }

    @property
    def any_waits(self) -> bool:
        """Whether there is a call that waits for approval."""
        return any(case.required for cases in self._cases.values() for case in cases)

    def pick(
        self, number: int, fits: Callable[[Tool], bool], used: Mapping[str, int], limit: int, *, votes: Votes | None
    ) -> ToolCall | None:
        """A call; None if there is none.

        Args:
            number: Which one: calls with consecutive numbers are of different tools.
            fits: Whether a tool may be called.
            used: How often each call has been made on this path, by ``call_key``.
            limit: How often a call may be made.
            votes: What happens while it waits for approval; None if it must not wait.
        """

        def waits_as_wanted(case: ApprovalCase) -> bool:
            return not case.required if votes is None else case.required and votes.fit(case.rule)

        by_tool = [
            [case.call for case in cases if waits_as_wanted(case)][:MAX_CALLS]
            for name, cases in self._cases.items()
            if fits(self._tools[name]) and not self._tools[name].ends_run
        ]
        by_tool = [calls for calls in by_tool if calls]
        for turn in range(len(by_tool)):
            calls = by_tool[(number + turn) % len(by_tool)]
            call = min(calls, key=lambda each: used.get(call_key(each), 0))
            if used.get(call_key(call), 0) < limit:
                return call
        return None

    def cases(self, each: int) -> Iterator[ApprovalCase]:
        """For every tool, so many calls that need approval and so many that need none, where there are any."""
        for cases in self._cases.values():
            for required in (False, True):
                yield from [case for case in cases if case.required is required][:each]

    def invalid_call(self, number: int) -> ToolCall | None:
        """A call without the arguments that its tool requires; None if no tool requires any."""
        return self._invalid[number % len(self._invalid)] if self._invalid else None

    def last_call(self, number: int) -> ToolCall | None:
        """A call that ends the run and needs no approval; None if there is none."""
        found = [case.call for name in self._ending for case in self._cases[name][:MAX_CALLS] if not case.required]
        return found[number % len(found)] if found else None


def call_key(call: ToolCall) -> str:
    """The same text for equal calls."""
    return f"{call.name}:{canonical_json(dict(call.arguments))}"


def _objected_to(call: ToolCall, guards: Sequence[Callable[[Any], object]]) -> bool:
    """Whether one of the guards holds for a reply that makes only this call."""
    run = RunState("own-calls", batch=[CallState(replace(call, id="1"), call_key(call))]).view()
    for guard in guards:
        try:
            if guard(run):
                return True
        except Exception:  # noqa: S112  # a guard of another state, which reads what this run does not have
            continue
    return False


def _examples_of(graph: Graph) -> Iterator[Example]:
    for row in graph:
        yield from getattr(row.guard, "silent_on", ())
        yield from getattr(row.guard, "fires_on", ())


def _candidates(tool: Tool, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Arguments to try, each once: from examples, then from the schema and the rule's code."""
    found: dict[str, dict[str, Any]] = {}
    rule = tool.requires_approval
    constants = [] if isinstance(rule, (bool, Approval)) else list(_constants(rule))
    schema = tool.spec.parameters
    named = [dict(e.call.arguments) for e in examples if e.call is not None and e.call.name == tool.name]
    for arguments in [*named, *_objects(schema, schema.get("$defs", {}), constants)]:
        found.setdefault(canonical_json(arguments), arguments)
        if len(found) >= MAX_CANDIDATES:
            break
    return list(found.values())


def _constants(rule: object) -> Iterator[Any]:
    """The numbers and texts that a rule compares with: in its code, its closure and the globals that it names."""
    function: Any = rule.func if isinstance(rule, partial) else rule
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        named = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        small = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_SMALL_INT"]  # Python 3.14
        for value in (*code.co_consts, *small, *cells, *named):
            yield from _plain_values(value)


def _plain_values(value: object) -> Iterator[Any]:
    if isinstance(value, (set, frozenset, list, tuple)):
        for each in cast("Iterable[object]", value):
            yield from _plain_values(each)
    elif isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        yield value


def _objects(schema: Mapping[str, Any], defs: Mapping[str, Any], constants: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Objects of a schema: the required fields with their first values, then each field with each of its values."""
    fields = {
        name: _values(each, defs, constants)
        for name, each in cast("Mapping[str, Mapping[str, Any]]", schema.get("properties", {})).items()
    }
    base = {name: values[0] for name, values in fields.items() if name in schema.get("required", ()) and values}
    yield base
    for name, values in fields.items():
        for value in values:
            yield {**base, name: value}


def _values(schema: Mapping[str, Any], defs: Mapping[str, Any], constants: Sequence[Any], depth: int = 0) -> list[Any]:
    """A few values of a schema; the plainest first, then those around a rule's constants."""
    if depth > 5:
        return []
    if "$ref" in schema:
        return _values(defs.get(str(schema["$ref"]).rpartition("/")[2], {}), defs, constants, depth + 1)
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return [value for each in schema[union] for value in _values(each, defs, constants, depth + 1)]
    numbers = [each for each in constants if not isinstance(each, str)]
    match schema.get("type"):
        case "integer" | "number":
            around = [number + step for number in numbers for step in (1, 0, -1)]
            low, high = schema.get("minimum"), schema.get("maximum")
            return _numbers([*NUMBERS[:1], *around, *NUMBERS[1:], *(n for n in (low, high) if n is not None)], schema)
        case "string":
            texts = [each for each in constants if isinstance(each, str)]
            return [t for t in (*TEXTS[:1], *texts, *TEXTS[1:]) if len(t) >= schema.get("minLength", 0)] or [
                "a" * schema["minLength"]
            ]
        case "boolean":
            return [False, True]
        case "null":
            return [None]
        case "array":
            items = _values(schema.get("items", {}), defs, constants, depth + 1)
            return [[], *([each] for each in items)] if not schema.get("minItems") else [[each] for each in items]
        case "object":
            return list(_objects(schema, defs, constants)) if depth < 3 else [{}]
        case _:
            return [*TEXTS[:1], *NUMBERS[:1]]


def _numbers(values: Iterable[float], schema: Mapping[str, Any]) -> list[float]:
    """Those within the schema's bounds that may be given to an integer, if it is one."""
    low, high = schema.get("minimum"), schema.get("maximum")
    whole = schema.get("type") == "integer"
    return [
        int(value) if whole else value
        for value in values
        if (not whole or float(value).is_integer())
        and (low is None or value >= low)
        and (high is None or value <= high)
    ]


# -- random scenarios -------------------------------------------------------------------------------------

CALLS_PER_TOOL = 4
"""Calls with and without approval of each tool that replies are drawn from."""

MAX_TURNS = 12
"""Replies of one scenario; after them, the model gives its final answer."""

MAX_SIDE_EVENT_MOVE = 40
"""Side events happen before this transition."""

DISTURBANCES = ("limits", "provider", "replies", "calls", "moves")
"""What may disturb a scenario: small limits, a provider that fails, flawed replies, calls that cannot be run, and side
events at single transitions."""

REPLIES = ("done", "1", "An answer in two parts. ", "", "  ", "{", "42")
CONTROL_CALLS = (
    ToolCall("", "ask_user", {"question": "Which one?"}),
    ToolCall("", "ask_user", {"question": " "}),
    ToolCall("", "return_done", {"output": "done"}),
    ToolCall("", "return_unable", {"rationale": "it cannot be done"}),
)
PROVIDER_ERRORS = (
    TransientProviderError("503"),
    TransientProviderError("503"),
    TransientProviderError("429", retry_after_s=7),
    ProviderError("401"),
    ContextOverflowError("too long"),
    ZeroDivisionError("a fault of the adapter"),
)
FLAWS = (*[FinishReason.LENGTH] * 4, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL)
TOOL_FAULTS = (
    RuntimeError("broke"),
    RuntimeError("broke"),
    RuntimeError("broke again"),
    OSError("full"),
    TimeoutError("slow"),
    ToolError("which one?", kind="ambiguous_input"),
    ToolError("too much", kind="scope_too_large"),
    ToolError("not that", kind="capability_gap"),
    ToolError("begin anew", kind="kernel_invalidated"),
)
TOOL_VALUES = (DEFAULT_RESULT, DEFAULT_RESULT, "other", None, 7, [1, 2])


def random_scenarios(agent: Agent[Any, Any], count: int = 100, *, seed: int = 0) -> list[Scenario]:
    """Scenarios for an agent, drawn by seed: the same ones each time, in every version of Python.

    ::

        @pytest.mark.parametrize("number", range(100))
        def test_anything_may_happen(number, fsm_record):
            fsm_record(Simulator(my_agent).run_sync(random_scenarios(my_agent)[number]))

    Args:
        agent: The agent. Replies call its tools, with arguments that fit and others, and tools that it does not have.
        count: How many scenarios.
        seed: Another seed gives other scenarios.
    """
    drawn = _Draw(agent)
    dice = [random.Random(f"{seed}/{number}") for number in range(count)]  # noqa: S311  # repeatable, not secret
    return [drawn.scenario(each) for each in dice]


class _Draw:
    """What the scenarios of one agent are drawn from."""

    _dice: random.Random
    _drawn: list[ToolCall]
    _disturbed: set[str]

    def __init__(self, agent: Agent[Any, Any]) -> None:
        config = agent.config
        self._limits = config.guardrails
        self._envelope = config.behavior.envelope
        self._votes = counts_votes(agent.graph)
        cases = OwnCalls(config.tools, agent.graph).cases(CALLS_PER_TOOL)
        self._calls = [case.call for case in cases]
        self._control = [each for each in CONTROL_CALLS if each.name in config.tools]
        self._starts = [each for each in _examples_of(agent.graph) if each.metadata or each.tags or each.actor]

    def scenario(self, dice: random.Random) -> Scenario:
        """One scenario. Each disturbance is left out of half of them: with all at once, few runs get far."""
        self._dice = dice
        self._disturbed = {each for each in DISTURBANCES if dice.random() < 0.5}
        rule = self._approval()
        usual = dice.choice((None, None, None, SideEvent(crash=True), SideEvent(needs_approval=True)))
        refused = dice.choice((0.1, 0.1, 0.9))
        policy = [None] if dice.random() < 0.7 else [None, None, *Action]
        return Scenario(
            self._turns(),
            self._results(),
            dice.choices(policy, k=MAX_TURNS),
            [self._human_reply(refused, rule is not None and bool(rule.escalate_to)) for _ in range(2 * MAX_TURNS)],
            {move: replace(self._side_event(usual), approval=rule) for move in range(MAX_SIDE_EVENT_MOVE)},
            self._guardrails(),
            **self._start(),
        )

    def _start(self) -> dict[str, Any]:
        """How the run is started: as some of the graph's examples need it, unless they exclude each other."""
        if not self._starts:
            return {}
        return merged_start(self._dice.sample(self._starts, self._dice.randint(0, len(self._starts)))) or {}

    def _guardrails(self) -> AgentGuardrails:
        """The agent's own limits, or some so small that a short run reaches them."""
        dice = self._dice
        small = {
            "max_iterations": dice.choice((2, 4, 10)),
            "max_execution_time_s": dice.choice((60, 300)),
            "finalize_grace_s": dice.choice((0, 0, 20)),
            "max_tokens": 300,
            "max_cost_usd": 0.5,
            "max_continues": dice.choice((0, 1, 3)),
            "on_limit": dice.choice(("ask_user", "ask_user", "stop", "handoff")),
            "max_calls_per_reply": dice.choice((1, 2)),
            "max_tool_retries": dice.choice((0, 1, 2)),
            "max_output_tokens": dice.choice((100, 1_000)),
            "max_output_tokens_limit": dice.choice((1_500, 32_768)),
        }
        thresholds = {
            "loop_hard_threshold": dice.choice((3, 4, 6)),
            "loop_window": dice.choice((6, 20)),
            "repeated_error_threshold": dice.choice((2, 2, 3)),
            "max_denials": dice.choice((1, 2, 3)),
        }
        share = 0.5 if "limits" in self._disturbed else 0.1
        small = {name: limit for name, limit in small.items() if dice.random() < share}
        return self._limits.model_copy(update=small | thresholds if dice.random() < 0.75 else small)

    def _turns(self) -> list[ModelTurn]:
        """Replies that make a few different calls; some are repeated, or one of their calls, as stubborn models do."""
        dice = self._dice
        entries: list[Any] = []
        stubborn = dice.choice((0.1, 0.4, 0.9))
        self._drawn = dice.choices(self._calls, k=dice.choice((2, 3, 8))) if self._calls else []
        for _ in range(dice.randint(1, MAX_TURNS)):
            again = entries and dice.random() < stubborn
            entries.append(self._again(dice.choice(entries[-2:])) if again else self._entry())
        return [ModelTurn(each, dice.choice((0, 10, 150)), dice.choice((0.0, 0.0, 0.3))) for each in entries]

    def _again(self, entry: Any) -> Any:
        dice = self._dice
        if not isinstance(entry, Reply) or len(entry.message.tool_calls) < 2 or dice.random() < 0.6:
            return entry
        return replace(entry, message=replace(entry.message, tool_calls=(dice.choice(entry.message.tool_calls),)))

    def _entry(self) -> Any:
        dice = self._dice
        if "provider" in self._disturbed and dice.random() < 0.15:
            return dice.choice(PROVIDER_ERRORS)
        calls = self._batch() if dice.random() < 0.92 else []
        text = dice.choice(REPLIES) if not calls or dice.random() < 0.3 else ""
        if calls and self._envelope and dice.random() < 0.8:
            text, calls = enveloped_call(calls[0]), []
        elif self._envelope and not calls and dice.random() < 0.5:
            text = '{"kind": "final", "content": "done"}'
        flawed = "replies" in self._disturbed and dice.random() < 0.4
        finish = dice.choice(FLAWS) if flawed else FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        usage = Usage(input_tokens=dice.choice((0, 20)), output_tokens=5)
        return Reply(Message.assistant(text, tuple(calls)), finish, usage=usage)

    def _batch(self) -> list[ToolCall]:
        """Calls of one reply: all equal, two that take turns, or each drawn by itself."""
        dice = self._dice
        number = dice.choice((1, 1, 2, 2, 3, 3, 4))
        calls = [self._call() for _ in range(dice.choice((1, 2, number)))]
        return [_numbered(calls[index % len(calls)], index) for index in range(number)]

    def _call(self) -> ToolCall:
        dice = self._dice
        kind = dice.random()
        if self._control and kind < 0.1:
            return dice.choice(self._control)
        faulty = "calls" in self._disturbed
        if not self._calls or (faulty and kind > 0.88):
            return ToolCall("", "no_such_tool", {"n": 1})
        call = dice.choice(self._drawn)
        return ToolCall("", call.name, {"no_such_field": 1}) if faulty and kind > 0.76 else call

    def _results(self) -> list[Any]:
        """Results; in one of two scenarios all executions fail: alike, in two ways by turns, or in many."""
        dice = self._dice
        faulty = dice.choice((0.1, 0.4, 1, 1))
        faults = dice.sample(TOOL_FAULTS, dice.choice((1, 1, 2, len(TOOL_FAULTS))))
        return [
            faults[index % len(faults)] if dice.random() < faulty else dice.choice(TOOL_VALUES)
            for index in range(3 * MAX_TURNS)
        ]

    def _human_reply(self, refused: float, escalates: bool) -> Any:
        dice = self._dice
        if dice.random() < 0.03:
            return dice.choice((DISMISSED, EXPIRED))
        if escalates and dice.random() < 0.3:
            return ESCALATED
        edit = Edit(dict(dice.choice(self._calls).arguments)) if self._calls and not self._votes else Allow()
        return {
            "question": dice.choice(("go on", "the first one")),
            "limit": dice.choice(("go on", Extend(), Extend(message="hurry"))),
            "approval": Deny("not now") if dice.random() < refused else edit if dice.random() < 0.1 else Allow(),
            "in_doubt": dice.choice((ItDidNotRun(), ItRan("it ran"), GiveUp())),
        }

    def _side_event(self, usual: SideEvent | None) -> SideEvent:
        """What happens at one transition: mostly nothing, or in every second one what is usual in this scenario."""
        dice = self._dice
        if usual is not None and dice.random() < 0.95:
            return dice.choice((usual, NO_SIDE_EVENT))
        if "moves" not in self._disturbed or dice.random() > 0.15:
            return NO_SIDE_EVENT
        seconds = (0.0, 0.0, 1.0, 31.0, 200.0)
        incident = dice.choice(("", "", "", "cancel", "interrupt", "abort", "approval", "approval"))
        return SideEvent(
            dice.choice(seconds),
            dice.choice(seconds),
            cancel=incident == "cancel",
            interrupt=incident == "interrupt",
            abort=incident == "abort",
            needs_approval=incident == "approval",
        )

    def _approval(self) -> Approval | None:
        """What all calls need, on a graph that counts votes; None for what their rules say."""
        escalated = Approval(2, roles=("first",), escalate_to=("second",), escalate_after_s=60)
        return self._dice.choice((*[None] * 6, Approval(2), escalated)) if self._votes else None


def enveloped_call(call: ToolCall) -> str:
    """A call as the text of a reply in a JSON envelope."""
    return canonical_json({"kind": "tool_call", "tool_name": call.name, "arguments": dict(call.arguments)})


def _numbered(call: ToolCall, index: int) -> ToolCall:
    return ToolCall(f"{call.name}_{index}", call.name, call.arguments)
