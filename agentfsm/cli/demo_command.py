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
from agentfsm.cli.console import CliConsole, TerminalPrompter, open_console
from agentfsm.cli.diagram_command import write_run_diagram
from agentfsm.cli.run_command import drive
from agentfsm.cli.run_report import ProgressDisplay, exit_code, print_json, print_outcome, transition_table
from agentfsm.errors import TransientProviderError
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall
from agentfsm.loop.model import Model, ModelRequest
from agentfsm.loop.presets import FUNNEL
from agentfsm.models import resolve
from agentfsm.runtime.approval import Allow, HumanInput
from agentfsm.runtime.host import Host, SystemClock
from agentfsm.runtime.tools import Tool, tool

__all__ = ["MISTAKES", "TASK", "DemoModel", "demo", "demo_tools"]


_MAX_MATCHES = 50
"""How many places a search gives back."""


def demo_tools(folder: Path, out: Path) -> list[Tool]:
    """Tools that read in one folder and write in another, and nowhere else.

    Args:
        folder: What may be read.
        out: Where ``write_report`` writes; it is made when that runs.
    """

    def inside(root: Path, path: str) -> Path:
        found = (root / path).resolve()
        if not found.is_relative_to(root.resolve()):
            raise PermissionError(f"{path} lies outside the folder")
        return found

    def lines_of(path: str) -> list[str]:
        return inside(folder, path).read_text(encoding="utf-8", errors="replace").splitlines()

    @tool(idempotent=True, parallel=True)
    def list_files(pattern: str) -> list[str]:
        """The files whose path fits a pattern, sorted.

        Args:
            pattern: Such as "**/*.py".
        """
        root = folder.resolve()
        return sorted(
            found.relative_to(root).as_posix()
            for found in root.glob(pattern)
            if found.is_file() and not any(part.startswith(".") for part in found.relative_to(root).parts)
        )

    @tool(idempotent=True, parallel=True)
    def count_lines(paths: list[str]) -> dict[str, int]:
        """How many lines each file has.

        Args:
            paths: Files, as list_files gives them.
        """
        return {path: len(lines_of(path)) for path in paths}

    @tool(idempotent=True, parallel=True)
    def search_text(text: str, pattern: str) -> list[str]:
        """Where a text stands, as "path:line"; the first 50 places.

        Args:
            text: What to look for.
            pattern: In which files, such as "**/*.py".
        """
        places = [
            f"{path}:{number}"
            for path in list_files(pattern)
            for number, line in enumerate(lines_of(path), 1)
            if text in line
        ]
        return places[:_MAX_MATCHES]

    @tool(idempotent=True, parallel=True)
    def read_file(path: str, first: int = 1, last: int = 40) -> str:
        """Some lines of a file.

        Args:
            path: The file, as list_files gives it.
            first: The first line, from 1.
            last: The last line.
        """
        return "\n".join(lines_of(path)[max(first, 1) - 1 : last])

    @tool(requires_approval=True)
    def write_report(name: str, text: str) -> str:
        """Write the report; a person is asked first.

        Args:
            name: Its file name, such as "report.md".
            text: All of it, Markdown.
        """
        target = inside(out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return f"wrote {len(text.splitlines())} lines to {target}"

    return [list_files, count_lines, search_text, read_file, write_report]


TASK = "Which Python modules of this folder are too long? Ask me how long one may be, and write a report."

MISTAKES = ("busy", "unknown tool", "wrong argument", "only talks", "no such file")
"""What goes wrong on purpose, in this order: the provider's 429, then four mistakes of the model."""

_PATTERN = "**/*.py"
_MISSING_FILE = "docs/STYLE_GUIDE.md"
_RETRY_AFTER_S = 2.0
_DEFAULT_LIMIT = 300
_MAX_INSPECTED = 5

_ReplyContent = str | list[ToolCall]


@dataclass
class _ToolHistory:
    """What stands in a request, sorted for the rules: the calls made and their results, by tool."""

    results: dict[str, list[tuple[ToolCall, str]]] = field(default_factory=dict[str, list[tuple[ToolCall, str]]])
    errors: dict[str, str] = field(default_factory=dict[str, str])
    last: str = ""

    @classmethod
    def of(cls, request: ModelRequest) -> _ToolHistory:
        seen = cls()
        calls = {c.id: c for m in request.messages for c in m.tool_calls}
        for message in request.messages:
            seen.last = message.content
            call = calls.get(message.tool_call_id or "")
            if message.role is Role.TOOL and call is not None:
                text = message.content.partition("\n[Note:")[0]
                if message.is_error:
                    seen.errors[call.name] = text
                else:
                    seen.results.setdefault(call.name, []).append((call, text))
        return seen

    def data(self, tool: str) -> Any:
        """The newest good result of a tool, read as JSON; None where there is none."""
        return json.loads(self.results[tool][-1][1]) if tool in self.results else None


class DemoModel:
    """A model made of rules. The first rule that applies decides, as in the loop itself.

    Args:
        reply_delay_s: Seconds that each reply takes, so that a person can follow.
        mistakes: Which of ``MISTAKES`` it makes.
    """

    name = "stand-in"

    def __init__(self, reply_delay_s: float = 0.0, mistakes: tuple[str, ...] = MISTAKES) -> None:
        self._reply_delay_s = reply_delay_s
        self._mistakes = list(mistakes)
        self._calls = 0

    async def reply(self, request: ModelRequest) -> Reply:
        """Decide what to do next from what stands in the request.

        Raises:
            TransientProviderError: Once, on purpose: what a busy provider's 429 becomes.
        """
        await asyncio.sleep(self._reply_delay_s)
        if self._takes_mistake("busy"):
            raise TransientProviderError("429: too many requests", retry_after_s=_RETRY_AFTER_S, status=429)
        said = self._decide(_ToolHistory.of(request))
        if isinstance(said, str):
            return Reply(Message.assistant(said))
        return Reply(Message.assistant("", tuple(said)), FinishReason.TOOL_CALLS)

    def _takes_mistake(self, mistake: str) -> bool:
        """Whether a mistake is still to be made; it then is made."""
        if mistake not in self._mistakes:
            return False
        self._mistakes.remove(mistake)
        return True

    def _call(self, tool: str, **arguments: Any) -> ToolCall:
        self._calls += 1
        return ToolCall(f"call_{self._calls}", tool, arguments)

    # -- the rules ------------------------------------------------------------------------------------

    def _decide(self, seen: _ToolHistory) -> _ReplyContent:
        for rule in (
            self._list_files,
            self._count_lines,
            self._announce,
            self._ask_limit,
            self._inspect_longest,
            self._write_report,
        ):
            said = rule(seen)
            if said:
                return said
        return [self._finish(seen)]

    def _list_files(self, seen: _ToolHistory) -> _ReplyContent | None:
        """List the files; a name that is no tool is mended with the names that the loop answers with."""
        if seen.data("list_files") is None:
            if self._takes_mistake("unknown tool"):
                return [self._call("list", pattern=_PATTERN)]
            offered = re.search(r"\blist\w+", seen.errors.get("list", ""))
            return [self._call(offered[0] if offered else "list_files", pattern=_PATTERN)]
        if not seen.data("list_files"):
            reason = f"no file here fits {_PATTERN}"
            steps = ["name a folder that holds Python modules: agentfsm demo FOLDER"]
            return [self._call("return_unable", rationale=reason, blockers=[reason], suggested_next_steps=steps)]
        return None

    def _count_lines(self, seen: _ToolHistory) -> _ReplyContent | None:
        """Count the lines; a wrong argument is mended with the name that the loop asks for."""
        if seen.data("count_lines") is not None:
            return None
        wanted = re.search(r"(\w+): (?:field required|missing)", seen.errors.get("count_lines", ""))
        name = "files" if self._takes_mistake("wrong argument") else wanted[1] if wanted else "paths"
        return [self._call("count_lines", **{name: seen.data("list_files")})]

    def _announce(self, seen: _ToolHistory) -> _ReplyContent | None:
        """Say what comes next in place of doing it."""
        if not self._takes_mistake("only talks"):
            return None
        return f"I have counted the lines of {len(seen.data('count_lines'))} modules and will look at the longest next."

    def _ask_limit(self, seen: _ToolHistory) -> _ReplyContent | None:
        """Ask how long a module may be; once more where the answer holds no number."""
        answers = seen.results.get("ask_user", [])
        if _answered_limit(seen) is not None or len(answers) > 1:
            return None
        lines = list(seen.data("count_lines").values())
        about = f"The longest of {len(lines)} modules has {max(lines)} lines, the middle one {median(lines):g}."
        if answers:
            about = f"I need a number; {answers[-1][1]!r} holds none."
        return [self._call("ask_user", question="How many lines may a module have?", context=about)]

    def _inspect_longest(self, seen: _ToolHistory) -> _ReplyContent | None:
        """Look into the longest modules, all at once, and where the longest one is imported."""
        worst = _long_modules(seen)[:_MAX_INSPECTED]
        if not worst or "read_file" in seen.results:
            return None
        if self._takes_mistake("no such file"):
            return [self._call("read_file", path=_MISSING_FILE)]
        stem = worst[0].rpartition("/")[2].removesuffix(".py")
        reads = [self._call("read_file", path=path, last=1) for path in worst]
        return [*reads, self._call("search_text", text=f"{stem} import", pattern=_PATTERN)]

    def _write_report(self, seen: _ToolHistory) -> _ReplyContent | None:
        if "write_report" in seen.results or "write_report" in seen.errors:
            return None
        return [self._call("write_report", name="report.md", text=_report_text(seen))]

    def _finish(self, seen: _ToolHistory) -> ToolCall:
        written = seen.results.get("write_report")
        where = f"The report: {written[-1][1]}." if written else f"There is no report: {seen.errors['write_report']}"
        return self._call("return_done", output=f"{_conclusion(seen)}\n{where}")


# -- what follows from the results ------------------------------------------------------------------------


def _answered_limit(seen: _ToolHistory) -> int | None:
    for _, text in seen.results.get("ask_user", []):
        if found := re.search(r"\d+", text):
            return int(found[0])
    return None


def _line_limit(seen: _ToolHistory) -> int:
    number = _answered_limit(seen)
    return _DEFAULT_LIMIT if number is None else number


def _long_modules(seen: _ToolHistory) -> list[str]:
    """The modules with too many lines, the longest first."""
    counts: dict[str, int] = seen.data("count_lines")
    too_long = [path for path, lines in counts.items() if lines > _line_limit(seen)]
    return sorted(too_long, key=lambda path: (-counts[path], path))


def _conclusion(seen: _ToolHistory) -> str:
    counts: dict[str, int] = seen.data("count_lines")
    found = _long_modules(seen)
    if not found:
        return f"None of {len(counts)} modules has more than {_line_limit(seen)} lines."
    longest = f"{found[0]} with {counts[found[0]]}"
    return f"{len(found)} of {len(counts)} modules have more than {_line_limit(seen)} lines; the longest is {longest}."


def _report_text(seen: _ToolHistory) -> str:
    counts: dict[str, int] = seen.data("count_lines")
    heads = {str(call.arguments["path"]): text for call, text in seen.results.get("read_file", [])}
    too_long = _long_modules(seen)
    rows = [f"| {path} | {counts[path]} | {_first_line(heads[path])} |" for path in too_long if path in heads]
    lines = ["# Modules that are too long", "", _conclusion(seen)]
    if rows:
        lines += ["", "| module | lines | its first line |", "| --- | ---: | --- |", *rows]
        lines += ["", f"{len(too_long) - len(rows)} more are not shown."] if len(too_long) > len(rows) else []
        used = {place.rpartition(":")[0] for place in seen.data("search_text") or ()} - {too_long[0]}
        lines += ["", f"Other files that import the longest by its name: {len(used)}."]
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    return text.strip().strip("\"#' ").replace("|", "\\|")


_MAX_SLEEP_S = 0.3
_REPLY_DELAY_S = 0.15
_INTRODUCTION = (
    "An agent works on real files with real tools. In the model's seat sits a stand-in made of rules: no key, no "
    "network. It reads what the tools give back and decides. On purpose it also makes mistakes that models make, "
    "and its provider is busy once, so that you see the loop recover, ask you, and wait for your leave.\n"
)
_INSTRUCTIONS = "You look after a code base. Use the tools; never guess what a file holds. Ask the user what you must."


class _FastClock(SystemClock):
    """The machine's clock, except that a long back-off is cut short."""

    async def sleep(self, seconds: float) -> None:
        """Wait, but not for long."""
        await asyncio.sleep(min(seconds, _MAX_SLEEP_S))


@dataclass(frozen=True)
class _AutoAnswerer:
    """Answers in the place of a person who is not there, and says so."""

    console: CliConsole

    def answer(self, request: UserInputRequested) -> HumanInput:
        reply, words = (Allow(), "allow") if request.kind == "approval" else ("300", "300")
        TerminalPrompter(self.console.err).show_request(request)
        self.console.err.print(Text(f"(the demo answers itself: {words})\n", "cyan"))
        return reply


_EXAMPLES = """\b
Examples:
  agentfsm demo
  agentfsm demo src --out /tmp/demo
  agentfsm demo --model ollama:llama3.2    the same task for a real model
"""


@click.command(epilog=_EXAMPLES, short_help="See a whole run, with no key and no network.")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Where the report and the picture are written.",
)
@click.option("-y", "--yes", is_flag=True, help="Answer the questions with what the demo would.")
@click.option("-m", "--model", metavar="NAME", help="A real model in place of the stand-in.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome and every transition as JSON.")
@click.pass_context
def demo(ctx: click.Context, folder: Path | None, out: Path, yes: bool, model: str | None, as_json: bool) -> None:
    """See a whole run: which modules of FOLDER are too long? It needs no key and no network.

    FOLDER is that of agentfsm's own modules unless you name one. A question and an approval come up on the
    way; without a terminal they answer themselves. At the end stand the table of all transitions, the answer,
    and the path of a picture of the run.
    """
    screen = open_console(stdout_only=not as_json)
    root = (folder or Path(agentfsm.__file__).parent).resolve()
    agent = _build_agent(
        root, out, resolve(model) if model else DemoModel(_REPLY_DELAY_S if screen.live else 0.0), real=bool(model)
    )
    screen.err.print(Text(_introduction(root, model)))
    ask = TerminalPrompter(screen.err).answer if screen.interactive and not yes else _AutoAnswerer(screen).answer
    story = drive(agent, agent.run(TASK), ProgressDisplay(screen, agent.graph, agent.model.name), ask)
    story.files["picture"] = str(write_run_diagram(story, out / "run.svg"))
    if as_json:
        print_json(screen, story)
        ctx.exit(exit_code(story))
    screen.err.print()
    screen.err.print(transition_table(story.decisions, agent.graph))
    print_outcome(screen, story)
    ctx.exit(exit_code(story))


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
    cut = f"(A back-off is cut short here: it waits {_MAX_SLEEP_S} s where the loop says 2.)\n"
    return f"{_INTRODUCTION}\n{folder}{cut}"
