"""A run while it runs: a line for what happens, and what is being awaited, with its time, where that can move."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from agentfsm.cli.screen import Screen, short
from agentfsm.core.events import (
    AgentError,
    Event,
    ModelReplied,
    ReasoningDelta,
    ReplyRestarted,
    RunWarning,
    TextDelta,
    ToolFinished,
    ToolStarted,
    Transitioned,
)
from agentfsm.core.messages import Message, ToolCall, ToolResult
from agentfsm.machine.graph import Graph, State

__all__ = ["Watcher"]


_HEARD = 500
"""How many characters of what a model says are kept to show their end."""


class _Elapsed(ProgressColumn):
    """Seconds since the wait began."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:.1f} s", "dim")


class Watcher:
    """Shows a run's events as they come. Use it as a context manager around the run.

    Args:
        screen: Where it is shown: a terminal gets a spinner, anything else a plain line for each wait.
        graph: The graph that runs.
        model: The model's name.
    """

    def __init__(self, screen: Screen, graph: Graph, model: str) -> None:
        self._console = screen.err
        self._live = screen.live
        self._model = model
        self._column = max(len(s.name) for s in graph.states)
        self._backoff_s = 0.0
        self._running: dict[str, str] = {}
        self._lead = self._heard = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Elapsed(),
            console=screen.err,
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
        self._calm()
        if self._live:
            self._progress.stop()

    def see(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Transitioned():
                self._entered(str(event.target))
            case TextDelta(text=text):
                self._hear("", text)
            case ReasoningDelta(text=text):
                self._hear("thinking: ", text)
            case ReplyRestarted():
                self._heard = ""
            case ModelReplied(message=message):
                self._line(State.CALL_LLM, _said(message))
            case ToolStarted(call=call):
                self._running[call.id] = short(call.name, 64)
                names = self._running.values() if self._live else [call.name]
                self._await(State.DISPATCH_TOOL, f"running {', '.join(names)}")
            case ToolFinished(result=result):
                self._running.pop(result.call_id, None)
                if result.ending is None:  # what ends or asks is shown as what it brings
                    self._line(State.DISPATCH_TOOL, _result(result), "" if result.status == "done" else "yellow")
            case AgentError():
                self._backoff_s = event.backoff_s
                self._line(State.RECOVER, _recovery(event), "yellow")
            case RunWarning(text=text):
                self._line("warning", short(text), "red")
            case _:
                pass

    def _entered(self, state: str) -> None:
        self._running.clear()
        self._calm()
        if state == State.CALL_LLM:
            self._await(state, f"waiting for {self._model}")
        elif state == State.PRE_STEP and self._backoff_s:
            self._await(state, f"backing off for {self._backoff_s:g} s")
            self._backoff_s = 0.0
        elif state not in State.__members__.values():
            self._await(state, "at work")

    def _await(self, state: str, text: str) -> None:
        """Say what is awaited; in plain lines a batch is one wait for each call."""
        if not self._live:
            self._line(state, f"{text} ...", "dim")
            return
        self._calm()
        self._task = self._progress.add_task(f"{state:<{self._column}}  {text}", total=None)

    def _hear(self, lead: str, text: str) -> None:
        """Show the end of what the model has thought or said so far, while it does."""
        if self._task is None:
            return
        if lead != self._lead:
            self._lead, self._heard = lead, ""
        self._heard = (self._heard + text)[-_HEARD:]
        room = max(20, self._console.width - self._column - len(lead) - 16)  # beside spinner, state and seconds
        line = short(self._heard, _HEARD)
        shown = line if len(line) <= room else f"…{line[-room + 1 :]}"
        self._progress.update(self._task, description=f"{State.CALL_LLM:<{self._column}}  {lead}{shown}")

    def _calm(self) -> None:
        self._heard = ""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _line(self, state: str, text: str, style: str = "") -> None:
        line = Text.assemble((f"{state:<{self._column}}  ", "dim"), (text, style))
        if self._live:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)


def _said(message: Message) -> str:
    calls = ", ".join(_call(c) for c in message.tool_calls)
    text = short(message.content)
    return f"{text}  {calls}".strip() or "(an empty reply)"


def _call(call: ToolCall) -> str:
    arguments = ", ".join(f"{short(k, 40)}={short(repr(v), 60)}" for k, v in call.arguments.items())
    return f"{short(call.name, 64)}({arguments})"


def _recovery(event: AgentError) -> str:
    failure = event.failure
    wait = f" after {event.backoff_s:g} s" if event.backoff_s else ""
    why = "" if "tool" in failure.metadata else f" ({short(failure.explanation, 200)})"  # its result said so
    return f"{failure.kind.value}{why}: {event.action.value.replace('_', ' ')}{wait}"


def _result(result: ToolResult) -> str:
    status = "" if result.status == "done" else f" {result.status}"
    return f"{short(result.name, 64)}{status}: {short(result.content)}"
