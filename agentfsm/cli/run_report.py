"""The report of a finished or suspended run: its transitions, its outcome as text or JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from pydantic_core import to_jsonable_python
from rich.table import Table
from rich.text import Text

from agentfsm.cli.console import CliConsole, plural, sanitize, shorten, single_line
from agentfsm.loop.events import Handoff, PartialRunSummary, RunAborted, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.loop.outcomes import CHOOSE_RECOVERY
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import OTHERWISE, Graph
from agentfsm.runtime.result import RunResult

NOT_COMPLETED, SUSPENDED = 1, 3
"""Exit codes of a run; a completed one has 0, and 2 is wrong usage."""


@dataclass
class RunReport:
    """A run from the first transition to the last, across all its suspensions.

    Attributes:
        result: The final result.
        decisions: Every transition, in order.
        seconds: How long it took, including the time people took to reply.
        signal: The signal that interrupted it, or None.
        files: The files written, by what they are (``picture``, ``record``).
        stored: Whether the run is in a store.
    """

    result: RunResult
    decisions: tuple[Decision, ...]
    seconds: float
    signal: int | None = None
    files: dict[str, str] = field(default_factory=dict[str, str])
    stored: bool = False

    @property
    def recoveries(self) -> int:
        """How often the run recovered from a failure and continued."""
        specs = self.result.graph.specs
        went_on = {name for name, spec in specs.items() if not (spec.final or spec.waits)}
        return sum(specs[d.source].effect is CHOOSE_RECOVERY and d.target in went_on for d in self.decisions)


def exit_code(report: RunReport) -> int:
    """The exit code of a run."""
    if report.signal is not None:
        return 128 + report.signal
    if isinstance(report.result.outcome, UserInputRequested):
        return SUSPENDED
    return 0 if report.result.ok else NOT_COMPLETED


def print_report(console: CliConsole, report: RunReport, graph: Graph) -> None:
    """Print the table of transitions and the outcome of a run."""
    console.err.print()
    console.err.print(transition_table(report.decisions, graph))
    print_outcome(console, report)


def state_style(graph: Graph, state: str) -> str:
    """The text style of a state: the diagrams' colors for recovery and waiting, and bold for a final state."""
    spec = graph.spec(state)
    if spec.final:
        return "bold"
    return "cyan" if spec.waits else "yellow" if spec.lane == "left" else ""


def transition_table(decisions: Iterable[Decision], graph: Graph) -> Table:
    """A run's transitions as a table."""
    moves = list(decisions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("#", justify="right", style="dim", min_width=len(str(len(moves))))
    for name, words in (
        ("from", [d.source for d in moves]),
        ("to", [d.target for d in moves]),
        ("guard that held", [d.guard for d in moves]),
    ):
        table.add_column(name, no_wrap=True, min_width=max(map(len, [name, *words])))
    table.add_column("evaluated before it, all false", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for number, decision in enumerate(moves, 1):
        target_style = state_style(graph, decision.target)
        guard = Text(decision.guard, "dim italic" if decision.guard == OTHERWISE else target_style or "bold")
        before = [name for name, _ in decision.tried[:-1]]
        table.add_row(
            str(number),
            Text(str(decision.source), state_style(graph, decision.source)),
            Text(str(decision.target), target_style),
            guard,
            f"{len(before)}: {', '.join(before)}" if before else "",
        )
    return table


def print_outcome(console: CliConsole, report: RunReport) -> None:
    """Print the outcome of a run; only the answer goes to stdout."""
    headline, color, lines = _headline(report)
    console.err.print()
    console.err.print(Text.assemble((headline, f"bold {color}"), (f"  {_summary(report)}", "dim")))
    for line in lines:
        console.err.print(Text(f"  {shorten(line, 2000)}"))
    for what, file in report.files.items():
        console.err.print(f"  {what}: {file}", soft_wrap=True)
    if report.stored:
        console.err.print(f"  run: {report.result.run_state.run_id}", soft_wrap=True)
    if isinstance(report.result.outcome, RunCompleted):
        console.err.print()
        _print_answer(console, report.result.output)


def print_failure(report: RunReport) -> None:
    """Print on stderr, in one line, why there is no answer; for a console that is quiet."""
    headline, _, lines = _headline(report)
    click.echo(single_line(f"agentfsm: {headline}: {shorten('; '.join(lines), 2000)}"), err=True)


def _print_answer(console: CliConsole, output: Any) -> None:
    text = output if isinstance(output, str) else json.dumps(to_jsonable_python(output), indent=2, ensure_ascii=False)
    stream = console.out.file
    stream.write((sanitize(text) if stream.isatty() else text).rstrip("\n") + "\n")
    stream.flush()


def _summary(report: RunReport) -> str:
    run = report.result.run_state
    counts = [(run.model_calls, "model call"), (report.recoveries, "recovery"), (len(report.decisions), "transition")]
    phrases = [plural(*c) for c in counts if c[0]]
    if run.usage.total_tokens:
        phrases.append(f"{run.usage.total_tokens:,} tokens")
    return ", ".join([*phrases, f"{report.seconds:.1f} s"])


def _headline(report: RunReport) -> tuple[str, str, list[str]]:
    """The headline, its color, and the lines below it, without secrets."""
    headline, color, lines = _describe_outcome(report)
    return headline, color, [report.result.outcome.mask(line) for line in lines]


def _describe_outcome(report: RunReport) -> tuple[str, str, list[str]]:
    match report.result.outcome:
        case RunCompleted():
            return "completed", "green", []
        case Handoff() as end:
            blockers = [f"blocked by: {b}" for b in end.blockers if b != end.rationale]
            return "handed off", "red", [end.rationale, *blockers, *(f"next: {s}" for s in end.suggested_next_steps)]
        case PartialRunSummary() as end:
            learned = [f"learned: {fact}" for fact in end.learned_facts]
            plan = [f"next: {end.next_step_plan}"] if end.next_step_plan else []
            return "stopped", "red", [f"missing {end.missing}", *learned, *plan]
        case RunCancelled() as end:
            return "cancelled", "red", [end.reason, f"it was in state {_last_state(report)}"]
        case RunAborted() as end:
            return "aborted", "red", [end.reason, f"it was in state {_last_state(report)}"]
        case UserInputRequested() as end:
            return "suspended", "cyan", [f"{end.kind}: {end.question}", *_request_details(end)]


def _request_details(end: UserInputRequested) -> Iterator[str]:
    if end.limit is not None:
        yield str(end.limit)
    if end.quorum is not None:
        yield str(end.quorum)
    if end.context:
        yield end.context
    if end.tool and end.arguments:
        yield f"{end.tool} {json.dumps(to_jsonable_python(dict(end.arguments)), ensure_ascii=False)}"
    if end.choices:
        yield f"choices: {', '.join(end.choices)}"


def _last_state(report: RunReport) -> str:
    return str(report.decisions[-1].source) if report.decisions else str(report.result.graph.initial)


def print_json(console: CliConsole, report: RunReport) -> None:
    """Print a run as JSON; as ASCII on a terminal, so that no character can control it."""
    stream = console.out.file
    stream.write(json.dumps(report_json(report), indent=2, ensure_ascii=stream.isatty()) + "\n")
    stream.flush()


def report_json(report: RunReport) -> dict[str, Any]:
    """A run as JSON data: its outcome, and every transition with the guards evaluated for it."""
    result, end = report.result, report.result.outcome
    not_details = ("run_id", "seq", "time", "secrets", "output", "suspension_record")
    shown: dict[str, Any] = {
        "details": {k: v for k, v in vars(end).items() if k not in not_details},
        "transitions": [_decision_json(d) for d in report.decisions],
    }
    shown = to_jsonable_python(shown, serialize_unknown=True)
    if end.secrets is not None:
        shown = {name: end.secrets.clean({name: value})[name] for name, value in shown.items()}
    data: dict[str, Any] = {
        "run_id": result.run_state.run_id,
        "outcome": type(end).__name__,
        "ok": result.ok,
        "output": to_jsonable_python(result.output, serialize_unknown=True),
        "details": shown["details"],
        "state": str(result.state),
        "model_calls": result.run_state.model_calls,
        "recoveries": report.recoveries,
        "usage": {**to_jsonable_python(result.usage), "total_tokens": result.usage.total_tokens},
        "seconds": round(report.seconds, 3),
        "transitions": shown["transitions"],
        "files": report.files,
    }
    if isinstance(end, UserInputRequested) and "record" not in report.files:
        data["suspension_record"] = end.suspension_record.model_dump(mode="json")
    return data


def _decision_json(decision: Decision) -> dict[str, Any]:
    move: dict[str, Any] = {
        "from": str(decision.source),
        "to": str(decision.target),
        "guard": decision.guard,
        "tried": [{"guard": name, "answer": answer} for name, answer in decision.tried],
    }
    if decision.guard_result is not None:
        move["found"] = to_jsonable_python(decision.guard_result, serialize_unknown=True)
    return move
