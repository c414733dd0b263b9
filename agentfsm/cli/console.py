"""The terminal: stdout for results, stderr for everything else, sanitized text, and the prompts for questions and approvals."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentfsm.errors import HumanReplyError
from agentfsm.runtime.approval import Allow, Deny, Edit, GiveUp, HumanInput, ItDidNotRun, ItRan

__all__ = [
    "DEFAULT_WIDTH",
    "REPLY_FORMATS",
    "CliConsole",
    "HumanRequest",
    "TerminalPrompter",
    "open_console",
    "parse_reply",
    "sanitize",
    "shorten",
    "single_line",
]


DEFAULT_WIDTH = 120
"""Columns where the output is no terminal and ``COLUMNS`` says nothing."""

_ALLOWED_CONTROLS = "\n\t"
_BIDI_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def sanitize(text: str) -> str:
    """A text of a model or a tool as a terminal may show it.

    What would steer the terminal (escape sequences) or turn the order of what is read (bidirectional marks)
    is shown as its code; a lone surrogate, which no encoding takes, too.
    """
    return "".join(c if _is_safe(c) else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _is_safe(c: str) -> bool:
    return c in _ALLOWED_CONTROLS or (c not in _BIDI_MARKS and unicodedata.category(c) not in ("Cc", "Cs"))


def single_line(text: str) -> str:
    """A text safe to show, on one line, and otherwise as it is."""
    return sanitize(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(value: object, limit: int = 400) -> str:
    """A text on one line, safe to show, at most so many characters."""
    line = " ".join(sanitize(str(value)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


@dataclass(frozen=True)
class CliConsole:
    """Where one command writes, and whether a person sits there.

    Attributes:
        out: Results.
        err: What is said about them: progress, tables, questions.
        interactive: Whether somebody can be asked: stdin and what ``err`` writes to are a terminal.
        live: Whether ``err`` can show something that moves.
    """

    out: Console
    err: Console
    interactive: bool
    live: bool


def open_console(*, quiet: bool = False, stdout_only: bool = False) -> CliConsole:
    """The screen of this process.

    Args:
        quiet: Whether nothing is said beside results.
        stdout_only: Whether all of it goes to stdout, where what is said is the result.
    """
    out = _make_console(sys.stdout)
    err = out if stdout_only else _make_console(sys.stderr, quiet=quiet)
    tty = err.file.isatty()
    return CliConsole(
        out=out,
        err=err,
        interactive=sys.stdin.isatty() and tty,
        live=tty and not quiet and not err.is_dumb_terminal,
    )


def _make_console(stream: IO[str], *, quiet: bool = False) -> Console:
    reconfigure: Any = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that cannot show an arrow shows a question mark
    wide = None if stream.isatty() or "COLUMNS" in os.environ else DEFAULT_WIDTH
    return Console(file=stream, quiet=quiet, width=wide, markup=False, highlight=False, emoji=False)


with contextlib.suppress(ImportError):
    import readline as readline  # its import alone lets people move and paste in the line that they type


REPLY_FORMATS = {
    "approval": 'allow, deny, "deny REASON", or the new arguments as a JSON object',
    "in_doubt": 'ran, "ran RESULT", did-not-run, or give-up',
}
"""The replies that fit, by what a run waits for; to anything else, any text does."""


class HumanRequest(Protocol):
    """What a run asks: an event, a record, or what a store knows."""

    @property
    def kind(self) -> str:
        """``question``, ``limit``, ``approval`` or ``in_doubt``."""
        ...

    @property
    def question(self) -> str:
        """What the person is asked."""
        ...

    @property
    def context(self) -> str:
        """More about it."""
        ...

    @property
    def choices(self) -> tuple[str, ...]:
        """Answers to choose from, or empty."""
        ...

    @property
    def tool(self) -> str:
        """The tool that it is about, or an empty string."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of that call."""
        ...


def parse_reply(kind: str, text: str) -> HumanInput:
    """What a typed reply means for what a run waits for.

    Args:
        kind: ``question``, ``limit``, ``approval`` or ``in_doubt``.
        text: What was typed.

    Raises:
        HumanReplyError: It is none of the replies that fit; the error lists them.
    """
    if kind not in REPLY_FORMATS:
        return text
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    match kind, word.lower().rstrip(":"):
        case "approval", "allow" | "a" | "yes" | "y" if not rest:
            return Allow()
        case "approval", "deny" | "d" | "no" | "n":
            return Deny(rest)
        case "approval", _ if text.lstrip().startswith("{"):
            return Edit(_parse_arguments(text))
        case "in_doubt", "ran":
            return ItRan(rest or "done")
        case "in_doubt", "did-not-run" if not rest:
            return ItDidNotRun()
        case "in_doubt", "give-up" if not rest:
            return GiveUp()
        case _:
            raise HumanReplyError(f"{text.strip()!r} is no reply to this; reply with {REPLY_FORMATS[kind]}")


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise HumanReplyError(f"the new arguments are not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise HumanReplyError("the new arguments must be a JSON object")
    return cast("dict[str, Any]", value)


def _read_line(prompt: str) -> str:
    return str(click.prompt(prompt, prompt_suffix=" ", err=True, default="", show_default=False))


@dataclass(frozen=True)
class TerminalPrompter:
    """Somebody at the terminal.

    Attributes:
        console: Where questions are shown.
        read_line: Shows a prompt and gives back what was typed.
        edit_text: Opens a text in an editor and gives it back, or None where it was not saved.
    """

    console: Console
    read_line: Callable[[str], str] = _read_line
    edit_text: Callable[[str], str | None] = lambda text: click.edit(text, extension=".json")

    def answer(self, request: HumanRequest) -> HumanInput:
        """Ask until there is a reply that fits."""
        self.show_request(request)
        while True:
            try:
                reply = self._prompt_once(request)
                if reply is not None:
                    return reply
            except HumanReplyError as error:
                self.console.print(Text(f"  {error}", "red"))

    def show_request(self, request: HumanRequest) -> None:
        """Show what is asked, in full."""
        self.console.print()
        self.console.print(Text(sanitize(request.question), "bold cyan"))
        if request.context:
            self.console.print(Text(sanitize(request.context)))
        if request.tool and request.kind != "question":
            self.console.print(_call_table(request))
        for number, choice in enumerate(request.choices, 1):
            self.console.print(Text(f"  {number}) {sanitize(choice)}"))

    def _prompt_once(self, request: HumanRequest) -> HumanInput | None:
        match request.kind:
            case "approval":
                typed = self.read_line("[a]llow, [d]eny or [e]dit?").strip()
                return self._parse_approval(typed, request)
            case "in_doubt":
                return _parse_if_given(request.kind, self.read_line(f"Reply ({REPLY_FORMATS[request.kind]}):"))
            case _:
                typed = self.read_line("Your answer:").strip()
                return _resolve_choice(typed, request.choices) or None

    def _parse_approval(self, typed: str, request: HumanRequest) -> HumanInput | None:
        if typed.lower() in ("e", "edit"):
            text = self.read_line("New arguments as JSON (empty: open them in your editor):").strip()
            return Edit(_parse_arguments(text or self._edit_arguments(request)))
        reply = _parse_if_given(request.kind, typed)
        if isinstance(reply, Deny) and not reply.reason:
            return Deny(self.read_line("Why not? (the model is told; may be empty)").strip())
        return reply

    def _edit_arguments(self, request: HumanRequest) -> str:
        text = json.dumps(dict(request.arguments), indent=2, ensure_ascii=False)
        edited = self.edit_text(text)
        if edited is None:
            raise HumanReplyError("nothing was changed")
        return edited


def _parse_if_given(kind: str, typed: str) -> HumanInput | None:
    return parse_reply(kind, typed) if typed.strip() else None


def _resolve_choice(typed: str, choices: tuple[str, ...]) -> str:
    """The choice whose number was typed, or what was typed."""
    if typed in choices or not typed.isascii() or not typed.isdigit():
        return typed
    return choices[int(typed) - 1] if 0 < int(typed) <= len(choices) else typed


def _call_table(request: HumanRequest) -> Table:
    """The call in full: whoever allows it must have seen all of it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("tool", Text(sanitize(request.tool), "bold"))
    for name, value in request.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        table.add_row(sanitize(name), Text(sanitize(text)))
    return table
