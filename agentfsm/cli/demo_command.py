"""``agentfsm demo``: a complete run on real files with real tools and a rule-based model, so it needs no API key."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.text import Text

import agentfsm
from agentfsm.agent import Agent
from agentfsm.cli.console import CliConsole, open_console
from agentfsm.cli.diagram_command import write_run_diagram
from agentfsm.cli.local_store import command_runner
from agentfsm.cli.progress import ProgressDisplay
from agentfsm.cli.run_command import drive
from agentfsm.cli.run_report import exit_code, print_json, print_report
from agentfsm.cli.terminal_prompt import TerminalPrompter
from agentfsm.errors import TransientProviderError
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.human_input import Allow, HumanInput
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall
from agentfsm.loop.model import Model, ModelRequest
from agentfsm.loop.presets import FUNNEL
from agentfsm.models import resolve
from agentfsm.runtime.host import Host, SystemClock
from agentfsm.runtime.tools import Tool, tool

_MAX_MATCHES = 50
"""How many matches a search returns."""


def demo_tools(folder: Path, out: Path) -> list[Tool]:
    """Tools that read in one folder and write in another, and nowhere else.

    Args:
        folder: The folder to read.
        out: Where ``write_report`` writes; it is created by the first write.
    """
    return [*_read_tools(folder), _report_tool(out)]


def _resolve_inside(root: Path, path: str) -> Path:
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise PermissionError(f"{path} lies outside the folder")
    return resolved


def _read_tools(folder: Path) -> list[Tool]:
    def read_lines(path: str) -> list[str]:
        return _resolve_inside(folder, path).read_text(encoding="utf-8", errors="replace").splitlines()

    @tool(idempotent=True, parallel=True)
    def list_files(pattern: str) -> list[str]:
        """The files whose path matches a pattern, sorted.

        Args:
            pattern: Such as "**/*.py".
        """
        root = folder.resolve()
        return sorted(
            file.relative_to(root).as_posix()
            for file in root.glob(pattern)
            if file.is_file() and not any(name.startswith(".") for name in file.relative_to(root).parts)
        )

    @tool(idempotent=True, parallel=True)
    def count_lines(paths: list[str]) -> dict[str, int]:
        """The number of lines of each file.

        Args:
            paths: Files, as list_files returns them.
        """
        return {path: len(read_lines(path)) for path in paths}

    @tool(idempotent=True, parallel=True)
    def search_text(text: str, pattern: str) -> list[str]:
        """Where a string occurs, as "path:line"; the first 50 matches.

        Args:
            text: The text to look for.
            pattern: The files to search, such as "**/*.py".
        """
        matches = [
            f"{path}:{number}"
            for path in list_files(pattern)
            for number, line in enumerate(read_lines(path), 1)
            if text in line
        ]
        return matches[:_MAX_MATCHES]

    @tool(idempotent=True, parallel=True)
    def read_file(path: str, first: int = 1, last: int = 40) -> str:
        """Some lines of a file.

        Args:
            path: The file, as list_files returns it.
            first: The first line, from 1.
            last: The last line.
        """
        return "\n".join(read_lines(path)[max(first, 1) - 1 : last])

    return [list_files, count_lines, search_text, read_file]


def _report_tool(out: Path) -> Tool:
    @tool(requires_approval=True)
    def write_report(name: str, text: str) -> str:
        """Write the report; needs a person's approval.

        Args:
            name: Its file name, such as "report.md".
            text: The whole report, as Markdown.
        """
        target = _resolve_inside(out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return f"wrote {len(text.splitlines())} lines to {target}"

    return write_report


TASK = "Which Python modules of this folder are too long? Ask me how long one may be, and write a report."

MISTAKES = ("busy", "unknown tool", "wrong argument", "only talks", "no such file")
"""The deliberate failures, in this order: a 429 of the provider, then four mistakes of the model."""

_PATTERN = "**/*.py"
_MISSING_FILE = "docs/STYLE_GUIDE.md"
_RETRY_AFTER_S = 2.0
_DEFAULT_LIMIT = 300
_MAX_INSPECTED = 5

_ReplyContent = str | list[ToolCall]


@dataclass
class _ToolHistory:
    """The tool calls of a request and their results, by tool."""

    results: dict[str, list[tuple[ToolCall, str]]] = field(default_factory=dict[str, list[tuple[ToolCall, str]]])
    errors: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def from_request(cls, request: ModelRequest) -> _ToolHistory:
        history = cls()
        calls = {c.id: c for m in request.messages for c in m.tool_calls}
        for message in request.messages:
            call = calls.get(message.tool_call_id or "")
            if message.role is Role.TOOL and call is not None:
                text = message.content.partition("\n[Note:")[0]
                if message.is_error:
                    history.errors[call.name] = text
                else:
                    history.results.setdefault(call.name, []).append((call, text))
        return history

    def data(self, tool: str) -> Any:
        """The last successful result of a tool, parsed as JSON; None if there is none."""
        return json.loads(self.results[tool][-1][1]) if tool in self.results else None


class DemoModel:
    """A rule-based model. The first rule that applies decides, as in the loop itself.

    Args:
        reply_delay_s: Seconds per reply, so that a person can follow.
        mistakes: The failures it produces, from ``MISTAKES``.
    """

    name = "stand-in"

    def __init__(self, reply_delay_s: float = 0.0, mistakes: tuple[str, ...] = MISTAKES) -> None:
        self._reply_delay_s = reply_delay_s
        self._mistakes = list(mistakes)
        self._calls = 0

    async def reply(self, request: ModelRequest) -> Reply:
        """The next reply, decided by the tool results in the request.

        Raises:
            TransientProviderError: Once, deliberately, like the 429 of a busy provider.
        """
        await asyncio.sleep(self._reply_delay_s)
        if self._takes_mistake("busy"):
            raise TransientProviderError("429: too many requests", retry_after_s=_RETRY_AFTER_S, status=429)
        content = self._decide(_ToolHistory.from_request(request))
        if isinstance(content, str):
            return Reply(Message.assistant(content))
        return Reply(Message.assistant("", tuple(content)), FinishReason.TOOL_CALLS)

    def _takes_mistake(self, mistake: str) -> bool:
        """Whether a mistake is due; if so, it is not due again."""
        if mistake not in self._mistakes:
            return False
        self._mistakes.remove(mistake)
        return True

    def _call(self, tool: str, **arguments: Any) -> ToolCall:
        self._calls += 1
        return ToolCall(f"call_{self._calls}", tool, arguments)

    # -- the rules ------------------------------------------------------------------------------------

    def _decide(self, history: _ToolHistory) -> _ReplyContent:
        for rule in (
            self._list_files,
            self._count_lines,
            self._announce,
            self._ask_limit,
            self._inspect_longest,
            self._write_report,
        ):
            content = rule(history)
            if content:
                return content
        return [self._finish(history)]

    def _list_files(self, history: _ToolHistory) -> _ReplyContent | None:
        """List the files; after a call of an unknown tool, with the right name from the error message."""
        if history.data("list_files") is None:
            if self._takes_mistake("unknown tool"):
                return [self._call("list", pattern=_PATTERN)]
            correct_name = re.search(r"\blist\w+", history.errors.get("list", ""))
            return [self._call(correct_name[0] if correct_name else "list_files", pattern=_PATTERN)]
        if not history.data("list_files"):
            reason = f"no file here fits {_PATTERN}"
            steps = ["name a folder that holds Python modules: agentfsm demo FOLDER"]
            return [self._call("return_unable", rationale=reason, blockers=[reason], suggested_next_steps=steps)]
        return None

    def _count_lines(self, history: _ToolHistory) -> _ReplyContent | None:
        """Count the lines; after a wrong argument, with the right name from the error message."""
        if history.data("count_lines") is not None:
            return None
        correct_name = re.search(r"(\w+): (?:field required|missing)", history.errors.get("count_lines", ""))
        name = "files" if self._takes_mistake("wrong argument") else correct_name[1] if correct_name else "paths"
        return [self._call("count_lines", **{name: history.data("list_files")})]

    def _announce(self, history: _ToolHistory) -> _ReplyContent | None:
        """Announce the next step instead of calling a tool."""
        if not self._takes_mistake("only talks"):
            return None
        return (
            f"I have counted the lines of {len(history.data('count_lines'))} modules and will look at the longest next."
        )

    def _ask_limit(self, history: _ToolHistory) -> _ReplyContent | None:
        """Ask how long a module may be; again if the answer contains no number."""
        answers = history.results.get("ask_user", [])
        if _answered_limit(history) is not None or len(answers) > 1:
            return None
        lines = list(history.data("count_lines").values())
        about = f"The longest of {len(lines)} modules has {max(lines)} lines, the middle one {median(lines):g}."
        if answers:
            about = f"I need a number; {answers[-1][1]!r} holds none."
        return [self._call("ask_user", question="How many lines may a module have?", context=about)]

    def _inspect_longest(self, history: _ToolHistory) -> _ReplyContent | None:
        """Read the first lines of the longest modules, and search for imports of the longest one, in one batch."""
        worst = _long_modules(history)[:_MAX_INSPECTED]
        if not worst or "read_file" in history.results:
            return None
        if self._takes_mistake("no such file"):
            return [self._call("read_file", path=_MISSING_FILE)]
        stem = worst[0].rpartition("/")[2].removesuffix(".py")
        reads = [self._call("read_file", path=path, last=1) for path in worst]
        return [*reads, self._call("search_text", text=f"{stem} import", pattern=_PATTERN)]

    def _write_report(self, history: _ToolHistory) -> _ReplyContent | None:
        if "write_report" in history.results or "write_report" in history.errors:
            return None
        return [self._call("write_report", name="report.md", text=_report_text(history))]

    def _finish(self, history: _ToolHistory) -> ToolCall:
        written = history.results.get("write_report")
        where = f"The report: {written[-1][1]}." if written else f"There is no report: {history.errors['write_report']}"
        return self._call("return_done", output=f"{_conclusion(history)}\n{where}")


# -- conclusions from the results ------------------------------------------------------------------------


def _answered_limit(history: _ToolHistory) -> int | None:
    for _, text in history.results.get("ask_user", []):
        if number := re.search(r"\d+", text):
            return int(number[0])
    return None


def _line_limit(history: _ToolHistory) -> int:
    number = _answered_limit(history)
    return _DEFAULT_LIMIT if number is None else number


def _long_modules(history: _ToolHistory) -> list[str]:
    """The modules with too many lines, longest first."""
    counts: dict[str, int] = history.data("count_lines")
    too_long = [path for path, lines in counts.items() if lines > _line_limit(history)]
    return sorted(too_long, key=lambda path: (-counts[path], path))


def _conclusion(history: _ToolHistory) -> str:
    counts: dict[str, int] = history.data("count_lines")
    too_long = _long_modules(history)
    if not too_long:
        return f"None of {len(counts)} modules has more than {_line_limit(history)} lines."
    numbers = f"{len(too_long)} of {len(counts)} modules have more than {_line_limit(history)} lines"
    return f"{numbers}; the longest is {too_long[0]} with {counts[too_long[0]]}."


def _report_text(history: _ToolHistory) -> str:
    counts: dict[str, int] = history.data("count_lines")
    heads = {str(call.arguments["path"]): text for call, text in history.results.get("read_file", [])}
    too_long = _long_modules(history)
    rows = [f"| {path} | {counts[path]} | {_first_line(heads[path])} |" for path in too_long if path in heads]
    lines = ["# Modules that are too long", "", _conclusion(history)]
    if rows:
        lines += ["", "| module | lines | its first line |", "| --- | ---: | --- |", *rows]
        lines += ["", f"{len(too_long) - len(rows)} more are not shown."] if len(too_long) > len(rows) else []
        used = {place.rpartition(":")[0] for place in history.data("search_text") or ()} - {too_long[0]}
        lines += ["", f"Other files that import the longest by its name: {len(used)}."]
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    return text.strip().strip("\"#' ").replace("|", "\\|")


_MAX_SLEEP_S = 0.3
_REPLY_DELAY_S = 0.15
_INTRODUCTION = (
    "An agent works on real files with real tools. The model is a rule-based stand-in, so no API key and no "
    "network are needed. It deliberately makes mistakes that real models make, and its provider is busy once, so "
    "that you can watch the loop recover from them, ask you a question, and wait for your approval.\n"
)
_INSTRUCTIONS = (
    "You maintain a code base. Use the tools; never guess what a file contains. Ask the user if you need to."
)


class _FastClock(SystemClock):
    """The system clock, except that long backoffs are shortened."""

    async def sleep(self, seconds: float) -> None:
        """Wait, but not longer than ``_MAX_SLEEP_S``."""
        await asyncio.sleep(min(seconds, _MAX_SLEEP_S))


@dataclass(frozen=True)
class _AutoAnswerer:
    """Answers in place of the user, and says so."""

    console: CliConsole

    def answer(self, request: UserInputRequested) -> HumanInput:
        limit = str(_DEFAULT_LIMIT)
        reply, text = (Allow(), "allow") if request.kind == "approval" else (limit, limit)
        TerminalPrompter(self.console.err).show_request(request)
        self.console.err.print(Text(f"(the demo answers itself: {text})\n", "cyan"))
        return reply


_EXAMPLES = """\b
Examples:
  agentfsm demo
  agentfsm demo src --out /tmp/demo
  agentfsm demo --model ollama:llama3.2    the same task with a real model
"""


@click.command(epilog=_EXAMPLES)
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="The folder for the report and the diagram.",
)
@click.option("-y", "--yes", is_flag=True, help="Let the demo answer the questions itself.")
@click.option("-m", "--model", metavar="NAME", help="A real model instead of the stand-in.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome and every transition as JSON.")
@click.pass_context
def demo(ctx: click.Context, folder: Path | None, out: Path, yes: bool, model: str | None, as_json: bool) -> None:
    """Watch a complete run: which modules of FOLDER are too long? It needs no API key and no network.

    FOLDER defaults to the source code of agentfsm. The run asks you a question and requests an approval; without a
    terminal, the demo answers itself. At the end it prints the table of all transitions, the answer, and the path
    of a diagram of the run.
    """
    console = open_console(stdout_only=not as_json)
    root = (folder or Path(agentfsm.__file__).parent).resolve()
    agent = _build_agent(
        root, out, resolve(model) if model else DemoModel(_REPLY_DELAY_S if console.live else 0.0), real=bool(model)
    )
    console.err.print(Text(_introduction(root, model)))
    prompter = TerminalPrompter(console.err) if console.interactive and not yes else _AutoAnswerer(console)
    progress = ProgressDisplay(console, agent.graph, agent.model.name)
    report = drive(agent, agent.run(TASK), progress, prompter.answer, command_runner())
    report.files["picture"] = str(write_run_diagram(report, out / "run.svg"))
    if as_json:
        print_json(console, report)
    else:
        print_report(console, report, agent.graph)
    ctx.exit(exit_code(report))


def _build_agent(root: Path, out: Path, model: Model, *, real: bool) -> Agent:
    return Agent(
        model,
        tools=demo_tools(root, out),
        instructions=_INSTRUCTIONS,
        preset=FUNNEL,
        host=Host() if real else Host(clock=_FastClock()),
    )


def _introduction(root: Path, model: str | None) -> str:
    folder = f"Folder: {root}\nTask:   {TASK}\n"
    if model:
        return f"An agent works on real files with real tools; the model is {model}.\n\n{folder}"
    note = (
        f"(Back-offs are shortened: the demo waits {_MAX_SLEEP_S} s where the loop would wait {_RETRY_AFTER_S:g} s.)\n"
    )
    return f"{_INTRODUCTION}\n{folder}{note}"
