"""How a run is shown: live progress, the table of its transitions, its outcome as text or JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_jsonable_python
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from agentfsm.cli.console import CliConsole, sanitize, shorten
from agentfsm.loop.events import (
    Event,
    Handoff,
    ModelReplied,
    PartialRunSummary,
    ReasoningDelta,
    RecoveryStarted,
    ReplyRestarted,
    RunCancelled,
    RunCompleted,
    RunWarning,
    TextDelta,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.loop.messages import Message, ToolCall, ToolResult
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import OTHERWISE, Graph, State
from agentfsm.runtime.result import RunResult

__all__ = [
    "INTERRUPTED",
    "NOT_COMPLETED",
    "SUSPENDED",
    "ProgressDisplay",
    "RunReport",
    "exit_code",
    "print_json",
    "print_outcome",
    "report_json",
    "state_style",
    "transition_table",
]


_MAX_STREAMED_CHARS = 500
"""How many characters of what a model says are kept to show their end."""


class _ElapsedColumn(ProgressColumn):
    """Seconds since the wait began."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:.1f} s", "dim")


class ProgressDisplay:
    """Shows a run's events as they come. Use it as a context manager around the run.

    Args:
        console: Where it is shown: a terminal gets a spinner, anything else a plain line for each wait.
        graph: The graph that runs.
        model: The model's name.
    """

    def __init__(self, console: CliConsole, graph: Graph, model: str) -> None:
        self._console = console.err
        self._live = console.live
        self._model = model
        self._column = max(len(s.name) for s in graph.states)
        self._backoff_s = 0.0
        self._running: dict[str, str] = {}
        self._prefix = self._streamed = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _ElapsedColumn(),
            console=console.err,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear_waiting()
        if self._live:
            self._progress.stop()

    def on_event(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Transitioned():
                self._on_state(str(event.target))
            case TextDelta(text=text):
                self._show_delta("", text)
            case ReasoningDelta(text=text):
                self._show_delta("thinking: ", text)
            case ReplyRestarted():
                self._streamed = ""
            case ModelReplied(message=message):
                self._print_line(State.CALL_LLM, _describe_reply(message))
            case ToolStarted(call=call):
                self._running[call.id] = shorten(call.name, 64)
                names = self._running.values() if self._live else [call.name]
                self._show_waiting(State.DISPATCH_TOOL, f"running {', '.join(names)}")
            case ToolFinished(result=result):
                self._running.pop(result.call_id, None)
                if result.ending is None:  # what ends or asks is shown as what it brings
                    self._print_line(
                        State.DISPATCH_TOOL, _describe_result(result), "" if result.status == "done" else "yellow"
                    )
            case RecoveryStarted():
                self._backoff_s = event.backoff_s
                self._print_line(State.RECOVER, _describe_recovery(event), "yellow")
            case RunWarning(text=text):
                self._print_line("warning", shorten(text), "red")
            case _:
                pass

    def _on_state(self, state: str) -> None:
        self._running.clear()
        self._clear_waiting()
        if state == State.CALL_LLM:
            self._show_waiting(state, f"waiting for {self._model}")
        elif state == State.PRE_STEP and self._backoff_s:
            self._show_waiting(state, f"backing off for {self._backoff_s:g} s")
            self._backoff_s = 0.0
        elif state not in State.__members__.values():
            self._show_waiting(state, "at work")

    def _show_waiting(self, state: str, text: str) -> None:
        """Say what is awaited; in plain lines a batch is one wait for each call."""
        if not self._live:
            self._print_line(state, f"{text} ...", "dim")
            return
        self._clear_waiting()
        self._task = self._progress.add_task(f"{state:<{self._column}}  {text}", total=None)

    def _show_delta(self, prefix: str, text: str) -> None:
        """Show the end of what the model has thought or said so far, while it does."""
        if self._task is None:
            return
        if prefix != self._prefix:
            self._prefix, self._streamed = prefix, ""
        self._streamed = (self._streamed + text)[-_MAX_STREAMED_CHARS:]
        room = max(20, self._console.width - self._column - len(prefix) - 16)  # beside spinner, state and seconds
        line = shorten(self._streamed, _MAX_STREAMED_CHARS)
        shown = line if len(line) <= room else f"…{line[-room + 1 :]}"
        self._progress.update(self._task, description=f"{State.CALL_LLM:<{self._column}}  {prefix}{shown}")

    def _clear_waiting(self) -> None:
        self._streamed = ""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _print_line(self, state: str, text: str, style: str = "") -> None:
        line = Text.assemble((f"{state:<{self._column}}  ", "dim"), (text, style))
        if self._live:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)


def _describe_reply(message: Message) -> str:
    calls = ", ".join(_describe_call(c) for c in message.tool_calls)
    text = shorten(message.content)
    return f"{text}  {calls}".strip() or "(an empty reply)"


def _describe_call(call: ToolCall) -> str:
    arguments = ", ".join(f"{shorten(k, 40)}={shorten(repr(v), 60)}" for k, v in call.arguments.items())
    return f"{shorten(call.name, 64)}({arguments})"


def _describe_recovery(event: RecoveryStarted) -> str:
    failure = event.failure
    wait = f" after {event.backoff_s:g} s" if event.backoff_s else ""
    why = "" if "tool" in failure.metadata else f" ({shorten(failure.explanation, 200)})"  # its result said so
    return f"{failure.kind.value}{why}: {event.action.value.replace('_', ' ')}{wait}"


def _describe_result(result: ToolResult) -> str:
    status = "" if result.status == "done" else f" {result.status}"
    return f"{shorten(result.name, 64)}{status}: {shorten(result.content)}"


def state_style(graph: Graph, state: str) -> str:
    """The style of a state: what pictures use for recovery and waiting, and bold for the end."""
    spec = graph.spec(state)
    if spec.final:
        return "bold"
    return "cyan" if spec.waits else "yellow" if spec.lane == "left" else ""


def transition_table(decisions: Iterable[Decision], graph: Graph) -> Table:
    """A run's moves as a table.

    Args:
        decisions: Every move, in order.
        graph: The graph that it ran on.
    """
    moves = list(decisions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("#", justify="right", style="dim", min_width=len(str(len(moves))))
    for name, words in (
        ("from", [d.source for d in moves]),
        ("to", [d.target for d in moves]),
        ("guard that held", [d.guard for d in moves]),
    ):
        table.add_column(name, no_wrap=True, min_width=max(map(len, [name, *words])))
    table.add_column("asked before it, all said no", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for number, decision in enumerate(moves, 1):
        marked = state_style(graph, decision.target)
        guard = Text(decision.guard, "dim italic" if decision.guard == OTHERWISE else marked or "bold")
        before = [name for name, _ in decision.tried[:-1]]
        asked = f"{len(before)}: {', '.join(before)}" if before else ""
        table.add_row(
            str(number),
            Text(str(decision.source), state_style(graph, decision.source)),
            Text(str(decision.target), marked),
            guard,
            asked,
        )
    return table


NOT_COMPLETED, SUSPENDED, INTERRUPTED = 1, 3, 130
"""Exit codes; 0 is a run that completed, 2 is wrong usage."""


@dataclass
class RunReport:
    """A run as the command line saw it, through all its suspensions.

    Attributes:
        result: What it came to.
        decisions: Every move of every part.
        seconds: How long it took, people included.
        signal: The signal that interrupted it, or None.
        files: What was written, by what it is (``picture``, ``record``).
        stored: Whether a store has it.
    """

    result: RunResult
    decisions: tuple[Decision, ...]
    seconds: float
    signal: int | None = None
    files: dict[str, str] = field(default_factory=dict[str, str])
    stored: bool = False

    @property
    def recoveries(self) -> int:
        """How often the run recovered and went on."""
        return sum(
            d.source == State.RECOVER and d.target not in (State.TERMINAL, State.SUSPENDED) for d in self.decisions
        )


def exit_code(report: RunReport) -> int:
    """The exit code of a run."""
    if report.signal is not None:
        return 128 + report.signal
    if isinstance(report.result.outcome, UserInputRequested):
        return SUSPENDED
    return 0 if report.result.ok else NOT_COMPLETED


def print_outcome(console: CliConsole, report: RunReport) -> None:
    """Say what a run came to; the answer alone goes to stdout."""
    head, style, lines = _headline(report)
    console.err.print()
    console.err.print(Text.assemble((head, f"bold {style}"), (f"  {_summary(report)}", "dim")))
    for line in lines:
        console.err.print(Text(f"  {shorten(line, 2000)}"))
    for what, where in report.files.items():
        console.err.print(f"  {what}: {where}", soft_wrap=True)
    if report.stored:
        console.err.print(f"  run: {report.result.run_state.run_id}", soft_wrap=True)
    if isinstance(report.result.outcome, RunCompleted):
        console.err.print()
        _print_answer(console, report.result.output)


def _print_answer(console: CliConsole, output: Any) -> None:
    text = output if isinstance(output, str) else json.dumps(to_jsonable_python(output), indent=2, ensure_ascii=False)
    stream = console.out.file
    stream.write((sanitize(text) if stream.isatty() else text).rstrip("\n") + "\n")
    stream.flush()


def _summary(report: RunReport) -> str:
    run = report.result.run_state
    counts = [(run.model_calls, "model call"), (report.recoveries, "recovery"), (len(report.decisions), "transition")]
    parts = [_pluralize(*c) for c in counts if c[0]]
    if run.usage.total_tokens:
        parts.append(f"{run.usage.total_tokens:,} tokens")
    return ", ".join([*parts, f"{report.seconds:.1f} s"])


def _pluralize(number: int, word: str) -> str:
    return f"{number} {word if number == 1 else word[:-1] + 'ies' if word.endswith('y') else word + 's'}"


def _headline(report: RunReport) -> tuple[str, str, list[str]]:
    """The headline, its colour, and the lines below it."""
    match report.result.outcome:
        case RunCompleted():
            return "completed", "green", []
        case Handoff() as end:
            blockers = [f"blocked by: {b}" for b in end.blockers if b != end.rationale]
            return "handed off", "red", [end.rationale, *blockers, *(f"next: {s}" for s in end.suggested_next_steps)]
        case PartialRunSummary() as end:
            learned = [f"learned: {fact}" for fact in end.learned_facts]
            return "stopped", "red", [f"missing {end.missing}", *learned, *_next_step(end.next_step_plan)]
        case RunCancelled() as end:
            return "cancelled", "red", [end.reason, f"it stood in {_last_state(report)}"]
        case UserInputRequested() as end:
            return "suspended", "cyan", [f"{end.kind}: {end.question}", *_request_details(end)]
        case other:  # an ending that this release of the command line does not know
            return type(other).__name__, "red", []


def _next_step(plan: str) -> Iterator[str]:
    if plan:
        yield f"next: {plan}"


def _request_details(end: UserInputRequested) -> Iterator[str]:
    if end.context:
        yield end.context
    if end.tool and end.arguments:
        yield f"{end.tool} {json.dumps(to_jsonable_python(dict(end.arguments)), ensure_ascii=False)}"
    if end.choices:
        yield f"choices: {', '.join(end.choices)}"


def _last_state(report: RunReport) -> str:
    return str(report.decisions[-1].source) if report.decisions else str(report.result.graph.initial)


def print_json(console: CliConsole, report: RunReport) -> None:
    """Print a run as JSON; at a terminal in ASCII, which steers nothing."""
    stream = console.out.file
    stream.write(json.dumps(report_json(report), indent=2, ensure_ascii=stream.isatty()) + "\n")
    stream.flush()


def report_json(report: RunReport) -> dict[str, Any]:
    """A run as JSON data: what it came to, and every transition with the guards that were asked."""
    result, end = report.result, report.result.outcome
    told = {k: v for k, v in vars(end).items() if k not in ("run_id", "seq", "time", "output", "suspension_record")}
    data: dict[str, Any] = {
        "run_id": result.run_state.run_id,
        "outcome": type(end).__name__,
        "ok": result.ok,
        "output": to_jsonable_python(result.output, serialize_unknown=True),
        "details": to_jsonable_python(told, serialize_unknown=True),
        "state": str(result.state),
        "model_calls": result.run_state.model_calls,
        "recoveries": report.recoveries,
        "usage": {**to_jsonable_python(result.usage), "total_tokens": result.usage.total_tokens},
        "seconds": round(report.seconds, 3),
        "transitions": [_decision_json(d) for d in report.decisions],
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
        "asked": [{"guard": name, "answer": answer} for name, answer in decision.tried],
    }
    if decision.guard_result is not None:
        move["found"] = to_jsonable_python(decision.guard_result, serialize_unknown=True)
    return move
