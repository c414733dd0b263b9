"""What a run came to, for people and as JSON, and the exit code that says it to scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python
from rich.text import Text

from agentfsm.cli.screen import Screen, safe, short
from agentfsm.core.events import Handoff, PartialRunSummary, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import State
from agentfsm.runtime.result import RunResult

__all__ = ["INTERRUPTED", "NOT_COMPLETED", "SUSPENDED", "Story", "exit_code", "show_json", "show_outcome", "story_json"]

NOT_COMPLETED, SUSPENDED, INTERRUPTED = 1, 3, 130
"""Exit codes; 0 is a run that completed, 2 is wrong usage."""


@dataclass
class Story:
    """A run as the command line saw it, through all its suspensions.

    Attributes:
        result: What it came to.
        decisions: Every move of every part.
        seconds: How long it took, people included.
        signal: The signal that interrupted it, or None.
        files: What was written, by what it is (``picture``, ``record``).
        kept: Whether a store has it.
    """

    result: RunResult
    decisions: tuple[Decision, ...]
    seconds: float
    signal: int | None = None
    files: dict[str, str] = field(default_factory=dict[str, str])
    kept: bool = False

    @property
    def recoveries(self) -> int:
        """How often the run recovered and went on."""
        return sum(
            d.source == State.RECOVER and d.target not in (State.TERMINAL, State.SUSPENDED) for d in self.decisions
        )


def exit_code(story: Story) -> int:
    """The exit code of a run."""
    if story.signal is not None:
        return 128 + story.signal
    if isinstance(story.result.outcome, UserInputRequested):
        return SUSPENDED
    return 0 if story.result.ok else NOT_COMPLETED


def show_outcome(screen: Screen, story: Story) -> None:
    """Say what a run came to; the answer alone goes to stdout."""
    head, style, lines = _told(story)
    screen.err.print()
    screen.err.print(Text.assemble((head, f"bold {style}"), (f"  {_summary(story)}", "dim")))
    for line in lines:
        screen.err.print(Text(f"  {short(line, 2000)}"))
    for what, where in story.files.items():
        screen.err.print(f"  {what}: {where}", soft_wrap=True)
    if story.kept:
        screen.err.print(f"  run: {story.result.run.run_id}", soft_wrap=True)
    if isinstance(story.result.outcome, RunCompleted):
        screen.err.print()
        _show_answer(screen, story.result.output)


def _show_answer(screen: Screen, output: Any) -> None:
    text = output if isinstance(output, str) else json.dumps(to_jsonable_python(output), indent=2, ensure_ascii=False)
    stream = screen.out.file
    stream.write((safe(text) if stream.isatty() else text).rstrip("\n") + "\n")
    stream.flush()


def _summary(story: Story) -> str:
    run = story.result.run
    counts = [(run.model_calls, "model call"), (story.recoveries, "recovery"), (len(story.decisions), "transition")]
    parts = [_count(*c) for c in counts if c[0]]
    if run.usage.total_tokens:
        parts.append(f"{run.usage.total_tokens:,} tokens")
    return ", ".join([*parts, f"{story.seconds:.1f} s"])


def _count(number: int, word: str) -> str:
    return f"{number} {word if number == 1 else word[:-1] + 'ies' if word.endswith('y') else word + 's'}"


def _told(story: Story) -> tuple[str, str, list[str]]:
    """The headline, its colour, and the lines below it."""
    match story.result.outcome:
        case RunCompleted():
            return "completed", "green", []
        case Handoff() as end:
            blockers = [f"blocked by: {b}" for b in end.blockers if b != end.rationale]
            return "handed off", "red", [end.rationale, *blockers, *(f"next: {s}" for s in end.suggested_next_steps)]
        case PartialRunSummary() as end:
            learned = [f"learned: {fact}" for fact in end.learned_facts]
            return "stopped", "red", [f"missing {end.missing}", *learned, *_next(end.next_step_plan)]
        case RunCancelled() as end:
            return "cancelled", "red", [end.reason, f"it stood in {_stood(story)}"]
        case UserInputRequested() as end:
            return "suspended", "cyan", [f"{end.kind}: {end.question}", *_asked_about(end)]
        case other:  # an ending that this release of the command line does not know
            return type(other).__name__, "red", []


def _next(plan: str) -> Iterator[str]:
    if plan:
        yield f"next: {plan}"


def _asked_about(end: UserInputRequested) -> Iterator[str]:
    if end.context:
        yield end.context
    if end.tool and end.arguments:
        yield f"{end.tool} {json.dumps(to_jsonable_python(dict(end.arguments)), ensure_ascii=False)}"
    if end.choices:
        yield f"choices: {', '.join(end.choices)}"


def _stood(story: Story) -> str:
    return str(story.decisions[-1].source) if story.decisions else str(story.result.graph.initial)


def show_json(screen: Screen, story: Story) -> None:
    """Print a run as JSON; at a terminal in ASCII, which steers nothing."""
    stream = screen.out.file
    stream.write(json.dumps(story_json(story), indent=2, ensure_ascii=stream.isatty()) + "\n")
    stream.flush()


def story_json(story: Story) -> dict[str, Any]:
    """A run as JSON data: what it came to, and every transition with the guards that were asked."""
    result, end = story.result, story.result.outcome
    told = {k: v for k, v in vars(end).items() if k not in ("run_id", "seq", "time", "output", "suspension_record")}
    data: dict[str, Any] = {
        "run_id": result.run.run_id,
        "outcome": type(end).__name__,
        "ok": result.ok,
        "output": to_jsonable_python(result.output, serialize_unknown=True),
        "details": to_jsonable_python(told, serialize_unknown=True),
        "state": str(result.state),
        "model_calls": result.run.model_calls,
        "recoveries": story.recoveries,
        "usage": {**to_jsonable_python(result.usage), "total_tokens": result.usage.total_tokens},
        "seconds": round(story.seconds, 3),
        "transitions": [_move(d) for d in story.decisions],
        "files": story.files,
    }
    if isinstance(end, UserInputRequested) and "record" not in story.files:
        data["suspension_record"] = end.suspension_record.model_dump(mode="json")
    return data


def _move(decision: Decision) -> dict[str, Any]:
    move: dict[str, Any] = {
        "from": str(decision.source),
        "to": str(decision.target),
        "guard": decision.guard,
        "asked": [{"guard": name, "answer": answer} for name, answer in decision.tried],
    }
    if decision.found is not None:
        move["found"] = to_jsonable_python(decision.found, serialize_unknown=True)
    return move
