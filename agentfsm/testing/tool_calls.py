"""Calls of an agent's own tools, for paths that are run with them: which wait for approval, and which run at once.

A tool's arguments are chosen from the examples of the graph's guards that call it, the numbers and texts in the code of
its approval rule (and their neighbours), and its schema. The rule and the validation decide what becomes of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.detectors import Example
from agentfsm.loop.messages import ToolCall
from agentfsm.loop.quorum import Approval
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.graph import Graph
from agentfsm.runtime.tools import Tool

__all__ = ["ApprovalCase", "OwnCalls", "Votes", "approval_cases", "call_key", "requires_approval"]

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

    Args:
        tool: The tool.
        arguments: The arguments, as a model would give them.
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
    """Calls of a tool, and what its rule decides about each.

    Args:
        tool: The tool.
        graph: The graph; the examples of its guards are tried first.
        examples: More examples.
    """
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
        for value in (*code.co_consts, *cells, *named):
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
