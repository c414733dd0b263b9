"""Live progress of a run on the terminal: a spinner, or plain lines where the output is not a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from agentfsm.cli.console import CliConsole, shorten
from agentfsm.loop.events import (
    Event,
    ModelReplied,
    ReasoningDelta,
    RecoveryStarted,
    ReplyRestarted,
    RunWarning,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    Transitioned,
)
from agentfsm.loop.outcomes import CALL_MODEL, CHOOSE_RECOVERY, RUN_CALLS
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph

_MAX_STREAMED_CHARS = 500
"""How many characters of a streamed reply are kept; the display shows their end."""


class _ElapsedColumn(ProgressColumn):
    """Seconds since the wait started."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:.1f} s", "dim")


class ProgressDisplay:
    """Shows a run's events as they arrive. Use it as a context manager around the run."""

    def __init__(self, console: CliConsole, graph: Graph, model: str) -> None:
        self._console = console.err
        self._live = console.live
        self._model = model
        self._graph = graph
        self._state = str(graph.initial)
        self._column = max(len(s.name) for s in graph.states)
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
            case TextDelta():
                self._show_delta("", event.to_dict()["text"])
            case ReasoningDelta():
                self._show_delta("thinking: ", event.to_dict()["text"])
            case ReplyRestarted():
                self._streamed = ""
            case ModelReplied():
                self._print_line(self._state_with(CALL_MODEL), _describe_reply(event.to_dict()["message"]))
            case ToolStarted(call=call):
                self._running[call.id] = shorten(call.name, 64)
                names = self._running.values() if self._live else [call.name]
                self._show_waiting(self._state_with(RUN_CALLS), f"running {', '.join(names)}")
            case ToolProgress(name=name, message=message, fraction=fraction):
                done = "" if fraction is None else f" ({fraction:.0%})"
                text = f"{shorten(name, 64)}: {shorten(event.mask(message))}{done}"
                if self._live:
                    self._show_waiting(self._state_with(RUN_CALLS), text)
                else:
                    self._print_line(self._state_with(RUN_CALLS), text, "dim")
            case ToolFinished(result=result):
                self._running.pop(result.call_id, None)
                if result.ending is None:  # one that ends or suspends the run is shown as the outcome
                    style = "" if result.status == "done" else "yellow"
                    self._print_line(self._state_with(RUN_CALLS), _describe_result(event.to_dict()["result"]), style)
            case RecoveryStarted():
                self._print_line(self._state_with(CHOOSE_RECOVERY), _describe_recovery(event), "yellow")
                if event.backoff_s:
                    self._show_waiting(self._state_with(CHOOSE_RECOVERY), f"backing off for {event.backoff_s:g} s")
            case RunWarning(text=text):
                self._print_line("warning", shorten(event.mask(text)), "red")
            case _:
                pass

    def _on_state(self, state: str) -> None:
        self._running.clear()
        self._clear_waiting()
        self._state = state
        effect = self._graph.spec(state).effect
        if effect is CALL_MODEL:
            self._show_waiting(state, f"waiting for {self._model}")
        elif callable(effect):
            self._show_waiting(state, "running")

    def _state_with(self, effect: EffectSpec) -> str:
        """The state in which an effect, or a state's own one that does the same, has just reported something."""
        here = self._graph.spec(self._state)
        if here.effect is effect or callable(here.effect):
            return here.name
        return next((spec.name for spec in self._graph.states if spec.effect is effect), here.name)

    def _show_waiting(self, state: str, text: str) -> None:
        """Show what the run waits for; in plain lines, each call of a batch is one wait."""
        if not self._live:
            self._print_line(state, f"{text} ...", "dim")
            return
        self._clear_waiting()
        self._task = self._progress.add_task(f"{state:<{self._column}}  {text}", total=None)

    def _show_delta(self, prefix: str, text: str) -> None:
        """Show the end of the reasoning or reply streamed so far."""
        if self._task is None:
            return
        if prefix != self._prefix:
            self._prefix, self._streamed = prefix, ""
        self._streamed = (self._streamed + text)[-_MAX_STREAMED_CHARS:]
        room = max(20, self._console.width - self._column - len(prefix) - 16)  # beside spinner, state and seconds
        line = shorten(self._streamed, _MAX_STREAMED_CHARS)
        visible = line if len(line) <= room else f"…{line[-room + 1 :]}"
        self._progress.update(
            self._task, description=f"{self._state_with(CALL_MODEL):<{self._column}}  {prefix}{visible}"
        )

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


def _describe_reply(message: Mapping[str, Any]) -> str:
    calls = ", ".join(_describe_call(c) for c in message["tool_calls"])
    text = shorten(message["content"])
    return f"{text}  {calls}".strip() or "(an empty reply)"


def _describe_call(call: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{shorten(k, 40)}={shorten(repr(v), 60)}" for k, v in call["arguments"].items())
    return f"{shorten(call['name'], 64)}({arguments})"


def _describe_recovery(event: RecoveryStarted) -> str:
    failure = event.failure
    delay = f" after {event.backoff_s:g} s" if event.backoff_s else ""
    said = "tool" in failure.metadata  # by the tool's result
    why = "" if said else f" ({shorten(event.mask(failure.explanation), 200)})"
    return f"{failure.kind.value}{why}: {event.action.value.replace('_', ' ')}{delay}"


def _describe_result(result: Mapping[str, Any]) -> str:
    status = "" if result["status"] == "done" else f" {result['status']}"
    return f"{shorten(result['name'], 64)}{status}: {shorten(result['content'])}"
