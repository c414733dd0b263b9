"""Reviewed paths: generated paths in a committed file, so that a changed table fails tests instead of changing them.

``agentfsm paths MODULE:AGENT --output paths.json`` writes the file, one path a line, with the rows of the table in
their order and, for each approval rule, calls on both sides of it and who must approve them. With
``@pytest.mark.fsm(graph=AGENT, paths="paths.json")`` tests take their paths from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path as FilePath
from typing import Any, cast

from pydantic import TypeAdapter

from agentfsm.agent import Agent
from agentfsm.errors import ConfigurationError
from agentfsm.loop.presets import Preset
from agentfsm.loop.quorum import Approval
from agentfsm.machine.graph import Graph, Transition
from agentfsm.runtime.tools import Tool
from agentfsm.testing.path_generation import (
    CRITERIA,
    Path,
    Requirement,
    graph_of,
    paths,
    requirement_ids,
    requirements,
    small_guardrails,
    state_space_for,
    traits_of,
)
from agentfsm.testing.tool_calls import ApprovalCase, approval_cases, requires_approval

Source = Graph | Preset | Agent[Any, Any]


@dataclass(frozen=True, slots=True)
class BrokenPath:
    """In place of a path: what differs between a file of reviewed paths and the graph.

    Attributes:
        id: A name for tests.
        problem: What differs, and what to do.
    """

    id: str
    problem: str


@dataclass(frozen=True)
class ReviewedPaths:
    """What a file of reviewed paths holds.

    Attributes:
        graph: The graph's name.
        cover: The coverage criterion.
        table: The rows, in the order in which they are evaluated.
        approvals: Calls, and whether they need approval.
        paths: The paths, as the ids of their rows and the final state.
    """

    graph: str
    cover: str
    table: tuple[str, ...]
    approvals: tuple[ApprovalCase, ...]
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def generate(cls, source: Source, cover: str = "pairs", keep: ReviewedPaths | None = None) -> ReviewedPaths:
        """The paths of a graph, a preset or an agent.

        Args:
            source: The graph, preset or agent.
            cover: The coverage criterion, as for ``paths``.
            keep: Reviewed paths to keep as far as they can still happen; only those that are missing are added.

        Raises:
            ConfigurationError: The criterion is unknown, or the source is none of these.
        """
        graph = graph_of(source)[0]
        reader = _Reader(source, cover)
        kept = [each for each in keep.paths if not reader.problem_of(each)] if keep is not None else []
        missing = reader.required - {r for each in kept for r in reader.covered_by(each)}
        for path in reader.generated:
            ids = (*path.ids, str(path.rows[-1].target))
            covered = reader.covered_by(ids)
            if missing & covered:
                missing -= covered
                kept.append(ids)
        rows = tuple(describe_row(row) for spec in graph.states for row in graph.rows(spec.name))
        return cls(graph.name, cover, rows, tuple(_telling_cases(source)), tuple(kept))

    @classmethod
    def read(cls, file: FilePath) -> ReviewedPaths:
        """What a file holds.

        Raises:
            ConfigurationError: The file does not exist, or is not such a file.
        """
        try:
            data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if data["cover"] not in CRITERIA:
                raise ValueError(data["cover"])
            return cls(
                str(data["graph"]),
                str(data["cover"]),
                tuple(map(str, data["table"])),
                tuple(map(_read_case, data["approvals"])),
                tuple(tuple(str(line).split(" > ")) for line in data["paths"]),
            )
        except FileNotFoundError:
            advice = f"write it with: agentfsm paths MODULE:NAME --output {file.name}"
            raise ConfigurationError(f"there is no file {str(file)!r}; {advice}") from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{file} does not hold reviewed paths: {error!r}") from error

    def to_json(self) -> str:
        """The text of the file: each row, each approval and each path has a line of its own."""
        approvals = list(map(_case_to_json, self.approvals))
        parts: list[tuple[str, Sequence[object]]] = [
            ("table", self.table),
            ("approvals", approvals),
            ("paths", [" > ".join(each) for each in self.paths]),
        ]
        lines = [f' "graph": {json.dumps(self.graph)}', f' "cover": {json.dumps(self.cover)}']
        for name, items in parts:
            body = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)
            lines.append(f' "{name}": [\n{body}\n ]' if items else f' "{name}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def differences(self, source: Source) -> list[str]:
        """What has changed since the review: rows, their order, approvals, paths, and what no path covers.

        Args:
            source: The graph, preset or agent today.
        """
        reader = _Reader(source, self.cover)
        covered = {r for each in self.paths for r in reader.covered_by(each)}
        uncovered = [r for r in reader.required_in_order if r not in covered]
        return [
            *_row_differences(self.table, graph_of(source)[0]),
            *_approval_differences(self.approvals, source),
            *(
                f"path {number}, which ends with {each[-2:][0]}: {problem}"
                for number, each in enumerate(self.paths, 1)
                if (problem := reader.problem_of(each))
            ),
            *(f"no reviewed path covers {' > '.join(requirement_ids(reader.graph, r))}" for r in uncovered),
        ]

    def resolve(self, source: Source, file: str) -> list[Path | BrokenPath]:
        """The paths, to run as tests; and a ``BrokenPath`` for each one that cannot happen, and one for other changes.

        Args:
            source: The graph, preset or agent today.
            file: The name of the file, for ids and messages.
        """
        reader = _Reader(source, self.cover)
        advice = f"if this change is right, update the file and review it: agentfsm paths ... --output {file}"
        found: list[Path | BrokenPath] = []
        for number, each in enumerate(self.paths, 1):
            problem = reader.problem_of(each)
            path = None if problem else reader.path(number, each)
            found.append(path or BrokenPath(f"{number:03d}-broken", f"path {number} of {file}: {problem}; {advice}"))
        changes = self.differences(source)
        if changes:
            found.append(BrokenPath(file, "\n".join([f"{file} and the graph differ:", *changes, advice])))
        return found


class _Reader:
    """The graph of today, as paths by row ids are read against it."""

    def __init__(self, source: Source, cover: str) -> None:
        self.generated = paths(source, cover)
        self.graph, self._behavior, _ = graph_of(source)
        infeasible = {each.rows for each in self.generated.infeasible}
        self.required_in_order = [
            each for each in requirements(self.graph, cover) if requirement_ids(self.graph, each) not in infeasible
        ]
        self.required = set(self.required_in_order)
        self._labels = {row: label for each in self.required for label in each for row in label}
        self._lengths = sorted({len(each) for each in self.required})
        self._numbers = {row.id: number for number, row in enumerate(self.graph.transitions)}
        self._guardrails = small_guardrails(self._behavior)
        self._space = state_space_for(self.graph, self._guardrails, traits_of(source))

    def covered_by(self, path: Sequence[str]) -> set[Requirement]:
        """The requirements that a path meets; rows that the graph does not have meet none."""
        numbers = [self._numbers.get(each, -1) for each in path[:-1]]
        labels = [self._labels.get(number, ()) for number in numbers]
        windows = (tuple(labels[i : i + length]) for length in self._lengths for i in range(len(labels) - length + 1))
        return {window for window in windows if window in self.required}

    def problem_of(self, path: Sequence[str]) -> str:
        """Why a path cannot happen; empty if it can."""
        reached = {self._space.initial}
        for index, each in enumerate(path[:-1]):
            if each not in self._numbers:
                return f"the graph has no row {each}"
            row = self.graph.transitions[self._numbers[each]]
            then = path[index + 1].partition(".")[0]
            if row.target != then:
                return f"{each} now leads to {row.target}, not to {then}"
            taken = self._numbers[each]
            reached = {after for config in reached for number, after in self._space.moves(config) if number == taken}
            if not reached:
                before = f" after {path[index - 1]}" if index else ""
                return f"no run can take {each}{before} any more"
        return "" if len(path) > 1 and self.graph.spec(path[-1]).final else "it does not lead to an end"

    def path(self, number: int, path: Sequence[str]) -> Path:
        """A path that can happen, to run as a test."""
        rows = tuple(self.graph.transition(each) for each in path[:-1])
        return Path(number, rows, self._guardrails, self._behavior)


def describe_row(row: Transition) -> str:
    """A row as a line: its id, its target, and whatever else it declares."""
    extras = [
        f", {each.name}={_as_text(getattr(row, each.name))}"
        for each in fields(row)
        if each.name not in ("source", "guard", "target")
        and getattr(row, each.name) != (None if each.default is MISSING else each.default)
    ]
    return f"{row.id} -> {row.target}{''.join(extras)}"


def _as_text(value: object) -> str:
    return "+".join(map(str, cast("Iterable[object]", value))) if isinstance(value, (tuple, list)) else str(value)


def _row_differences(reviewed: Sequence[str], graph: Graph) -> Iterator[str]:
    before = {line.partition(" -> ")[0]: line.partition(" -> ")[2] for line in reviewed}
    lines = [describe_row(row) for spec in graph.states for row in graph.rows(spec.name)]
    after = {line.partition(" -> ")[0]: line.partition(" -> ")[2] for line in lines}
    for row_id, rest in before.items():
        if row_id not in after:
            yield f"the row {row_id} -> {rest} is gone"
        elif after[row_id] != rest:
            yield f"the row {row_id} -> {rest} is now {row_id} -> {after[row_id]}"
    yield from (f"the row {row_id} -> {rest} is new" for row_id, rest in after.items() if row_id not in before)
    old, new = [each for each in before if each in after], [each for each in after if each in before]
    for spec in graph.states:
        order, today = ([r for r in rows if r.partition(".")[0] == spec.name] for rows in (old, new))
        moved = next(((was, now) for was, now in zip(order, today, strict=True) if was != now), None)
        if moved is not None:
            yield f"{moved[1]} is now evaluated before {moved[0]}"


def _tools_of(source: Source) -> Mapping[str, Tool]:
    if not isinstance(source, Agent):
        return {}
    return {name: tool for name, tool in source.config.tools.items() if tool.control is None}


def _approval_differences(reviewed: Sequence[ApprovalCase], source: Source) -> Iterator[str]:
    if reviewed and not isinstance(source, Agent):
        what = "preset" if isinstance(source, Preset) else "graph"
        tools_named = ", ".join(sorted({case.tool for case in reviewed}))
        yield f"the file holds the approvals of an agent's tools ({tools_named}), and a {what} has none: name the agent"
        return
    tools = _tools_of(source)
    for case in reviewed:
        tool = tools.get(case.tool)
        required = None if tool is None else requires_approval(tool, case.arguments)
        if tool is None:
            yield f"{case}: the agent has no tool {case.tool!r} any more"
        elif required is None:
            yield f"{case}: these arguments are not valid any more, or the approval rule raises"
        elif bool(required) is not case.required:
            yield f"{case} {'needs approval now' if required else 'needs no approval any more'}"
        elif (now := required if isinstance(required, Approval) else Approval()) != (case.rule or Approval()):
            yield f"{case} needs {_rule_text(now)} now, and needed {_rule_text(case.rule or Approval())}"
    known = {case.tool for case in reviewed}
    ruled = [name for name, tool in tools.items() if tool.requires_approval is not False]
    yield from (f"the approval rule of {name!r} is not in the file" for name in ruled if name not in known)


_RULE: TypeAdapter[Approval] = TypeAdapter(Approval)


def _rule_fields(rule: Approval) -> dict[str, Any]:
    """What a rule says that ``Approval()`` does not."""
    fields: dict[str, Any] = _RULE.dump_python(rule, mode="json", exclude_defaults=True)
    return fields


def _rule_text(rule: Approval) -> str:
    return f"Approval({', '.join(f'{name}={value!r}' for name, value in _rule_fields(rule).items())})"


def _case_to_json(case: ApprovalCase) -> dict[str, Any]:
    data = {"tool": case.tool, "arguments": dict(case.arguments), "required": case.required}
    rule = {} if case.rule is None else _rule_fields(case.rule)
    return {**data, "rule": rule} if rule else data


def _read_case(data: Mapping[str, Any]) -> ApprovalCase:
    rule = _RULE.validate_python(data["rule"]) if "rule" in data else None
    return ApprovalCase(str(data["tool"]), data["arguments"], bool(data["required"]), rule)


def _telling_cases(source: Source) -> Iterator[ApprovalCase]:
    """For each tool with an approval rule, calls on both sides of the rule that differ as little as possible."""
    for tool in _tools_of(source).values():
        cases = approval_cases(tool, graph_of(source)[0]) if tool.requires_approval is not False else []
        sides = [[case for case in cases if case.required is required] for required in (False, True)]
        if not all(sides):
            yield from (side[0] for side in sides if side)
            continue
        pairs = [(_distance(a, b), i, a, b) for i, (a, b) in enumerate((a, b) for a in sides[0] for b in sides[1])]
        names = {name: None for case in cases for name in case.arguments}
        best = [min((p for p in pairs if p[0][0] == (name,)), default=None, key=lambda p: p[:2]) for name in names]
        chosen = [p for p in best if p is not None] or [min(pairs, key=lambda p: p[:2])]
        unique = {str(case): case for _, _, a, b in chosen for case in (a, b)}
        yield from unique.values()


def _distance(a: ApprovalCase, b: ApprovalCase) -> tuple[tuple[str, ...], float]:
    """The arguments in which two calls differ, and by how much, if those are numbers."""
    names = dict.fromkeys([*a.arguments, *b.arguments])
    differing = tuple(name for name in names if a.arguments.get(name) != b.arguments.get(name))
    apart = 0.0
    for name in differing:
        x, y = a.arguments.get(name), b.arguments.get(name)
        apart += abs(x - y) if isinstance(x, (int, float)) and isinstance(y, (int, float)) else 1.0
    return differing, apart
