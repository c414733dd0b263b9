"""Live progress: plain lines without a terminal, a spinner on one."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console

from agentfsm import LOOP, Agent, Event, Message, ModelRequest, Reply, RunResult, ToolContext, ToolError, tool
from agentfsm.cli.console import CliConsole
from agentfsm.cli.progress import ProgressDisplay
from agentfsm.errors import TransientProviderError
from agentfsm.loop.model import ReasoningChunk, StreamChunk, StreamRestart, TextChunk
from agentfsm.machine.graph import StateSpec, Transition
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.graphs import renamed


@tool(parallel=True)
async def add(a: int, b: int) -> int:
    """Add; the later, the more the first number is."""
    for _ in range(10 * a):
        await asyncio.sleep(0)
    return a + b


@tool
def fail(how: str) -> str:
    """Fail."""
    raise ToolError(how)


@tool
async def copy(context: ToolContext) -> str:
    """Copy."""
    context.progress("file 3 of 4\x1b[2J", 0.75)
    return "copied"


def progress_lines(script: list[Any], *, live: bool = False, **agent: Any) -> tuple[list[str], RunResult]:
    """The lines printed for a run, and its result."""
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=live, markup=False, highlight=False, color_system=None)
    agent_under_test = Agent(ScriptedModel(script), tools=[add, fail, copy], host=Host(clock=FakeClock()), **agent)
    progress = ProgressDisplay(
        CliConsole(console, console, interactive=False, live=live), agent_under_test.graph, "a-model"
    )

    async def run_agent() -> RunResult:
        run = agent_under_test.run("go")
        with progress:
            async for event in run:
                progress.on_event(event)
        return await run

    result = asyncio.run(run_agent())
    return [line.rstrip() for line in out.getvalue().splitlines()], result


def test_a_renamed_loop_shows_the_same_lines_with_its_own_names() -> None:
    script = [TransientProviderError("503"), [call("add", a=1, b=2), call("fail", how="no")], "7"]
    expected, _ = progress_lines(list(script))
    lines, _ = progress_lines(list(script), graph=renamed(LOOP, "my_"))
    assert [line.removeprefix("my_").split() for line in lines] == [line.split() for line in expected]
    assert {line.split()[0] for line in lines} == {"my_call_llm", "my_dispatch_tool", "my_recover"}


def test_every_wait_and_its_result_is_a_plain_line() -> None:
    lines, _ = progress_lines([[call("add", a=1, b=2), call("add", a=3, b=4)], "7"])
    assert lines == [
        "call_llm       waiting for a-model ...",
        "call_llm       add(a=1, b=2), add(a=3, b=4)",
        "dispatch_tool  running add ...",
        "dispatch_tool  running add ...",
        "dispatch_tool  add: 3",
        "dispatch_tool  add: 7",
        "call_llm       waiting for a-model ...",
        "call_llm       7",
    ]


def test_a_recovery_shows_failure_and_action() -> None:
    busy = TransientProviderError("429: busy", retry_after_s=7, status=429)
    lines, _ = progress_lines([busy, [call("fail", how="broken")], "", "done"])
    assert "recover        transient_provider (429: busy): retry after 7 s" in lines
    assert "recover        backing off for 7 s ..." in lines
    assert "dispatch_tool  fail failed: broken" in lines
    assert "recover        tool_error: retry" in lines
    assert "call_llm       (an empty reply)" in lines
    assert "recover        no_progress (the reply says nothing and calls nothing): narrow scope" in lines


def test_a_user_defined_state_is_shown() -> None:
    spec = StateSpec("review_answer", "look again", effect=lambda context: None)
    graph = LOOP.with_state(
        spec, [Transition("review_answer", None, "terminal", ends="completed")], entered_by="post_llm.otherwise"
    )
    lines, _ = progress_lines(["hello"], graph=graph)
    assert "review_answer  running ..." in lines


def test_a_warning_is_shown() -> None:
    class Forgetful:
        async def recall(self, prompt: str) -> str:
            raise OSError("lost")

        async def remember(self, messages: object) -> None:
            """Nothing."""

    lines, _ = progress_lines(["hello"], memory=Forgetful())
    assert any(line.startswith("warning        memory is unavailable (OSError: lost)") for line in lines)


def test_on_a_terminal_a_wait_is_a_spinner_that_disappears() -> None:
    lines, _ = progress_lines(["hello " * 50], live=True)
    shown = "\n".join(lines)
    assert "waiting for a-model" in shown
    assert "waiting for a-model ..." not in shown
    last = next(line for line in reversed(lines) if "hello" in line)
    assert "…" in last  # truncated to one line of the terminal


def test_model_text_cannot_send_control_characters_to_the_terminal() -> None:
    lines, _ = progress_lines(["\x1b[2Jgone [bold]not markup[/bold]"])
    assert r"call_llm       \x1b[2Jgone [bold]not markup[/bold]" in lines


class StreamingModel:
    """A model that streams its reply letter by letter, and restarts once."""

    name = "speaking"

    async def reply(self, request: ModelRequest) -> Reply:
        return Reply(Message.assistant("not streamed"))

    async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        yield ReasoningChunk("Hm. ")
        yield TextChunk("Wrong [bold]")
        yield StreamRestart("another took over")
        for letter in "It is a long way to Tipperary. " * 8 + "The end":
            yield TextChunk(letter)
        yield Reply(Message.assistant("It is."))


def test_on_a_terminal_a_streamed_reply_is_shown_live() -> None:
    shown: list[str] = []

    class RecordingDisplay(ProgressDisplay):
        def record(self, event: Event) -> None:
            super().on_event(event)
            shown.extend(task.description for task in self._progress.tasks)

    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, markup=False, highlight=False, color_system=None)
    agent = Agent(StreamingModel())

    async def run_agent() -> None:
        run = agent.run("go")
        with RecordingDisplay(
            CliConsole(console, console, interactive=False, live=True), agent.graph, "speaking"
        ) as progress:
            async for event in run:
                progress.record(event)

    asyncio.run(run_agent())
    assert "call_llm       thinking: Hm." in shown
    assert "call_llm       Wrong [bold]" in shown  # reasoning and text are not mixed
    assert "call_llm       I" in shown  # after the restart
    assert max(map(len, shown)) <= 100
    assert any(line.startswith("call_llm       …") and line.endswith("The end") for line in shown)


def test_plain_lines_show_only_the_complete_reply() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, markup=False, highlight=False)
    agent = Agent(StreamingModel())

    async def run_agent() -> None:
        run = agent.run("go")
        with ProgressDisplay(
            CliConsole(console, console, interactive=False, live=False), agent.graph, "speaking"
        ) as progress:
            async for event in run:
                progress.on_event(event)

    asyncio.run(run_agent())
    assert out.getvalue().splitlines() == [
        "call_llm       waiting for speaking ...",
        "call_llm       It is.",
    ]


def test_what_a_tool_says_about_its_progress_is_shown() -> None:
    lines, _ = progress_lines([call("copy"), "Done."])
    assert r"dispatch_tool  copy: file 3 of 4\x1b[2J (75%)" in lines
    live, _ = progress_lines([call("copy"), "Done."], live=True)
    assert "\x1b[2J" not in "\n".join(live)
