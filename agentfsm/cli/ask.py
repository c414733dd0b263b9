"""Questions, approvals and doubts, put to the person at the terminal. Nobody is asked where nobody sits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentfsm.cli.screen import safe
from agentfsm.errors import ReplyError
from agentfsm.runtime.replies import Allow, Answer, Deny, Edit, GiveUp, ItDidNotRun, ItRan

with contextlib.suppress(ImportError):
    import readline as readline  # its import alone lets people move and paste in the line that they type

__all__ = ["FORMS", "Asked", "Person", "parse_reply"]

FORMS = {
    "approval": 'allow, deny, "deny REASON", or the new arguments as a JSON object',
    "in_doubt": 'ran, "ran RESULT", did-not-run, or give-up',
}
"""The replies that fit, by what a run waits for; to anything else, any text does."""


class Asked(Protocol):
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


def parse_reply(kind: str, text: str) -> Answer:
    """What a typed reply means for what a run waits for.

    Args:
        kind: ``question``, ``limit``, ``approval`` or ``in_doubt``.
        text: What was typed.

    Raises:
        ReplyError: It is none of the replies that fit; the error lists them.
    """
    if kind not in FORMS:
        return text
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    match kind, word.lower().rstrip(":"):
        case "approval", "allow" | "a" | "yes" | "y" if not rest:
            return Allow()
        case "approval", "deny" | "d" | "no" | "n":
            return Deny(rest)
        case "approval", _ if text.lstrip().startswith("{"):
            return Edit(_object(text))
        case "in_doubt", "ran":
            return ItRan(rest or "done")
        case "in_doubt", "did-not-run" if not rest:
            return ItDidNotRun()
        case "in_doubt", "give-up" if not rest:
            return GiveUp()
        case _:
            raise ReplyError(f"{text.strip()!r} is no reply to this; reply with {FORMS[kind]}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ReplyError(f"the new arguments are not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ReplyError("the new arguments must be a JSON object")
    return cast("dict[str, Any]", value)


def _read(prompt: str) -> str:
    return str(click.prompt(prompt, prompt_suffix=" ", err=True, default="", show_default=False))


@dataclass(frozen=True)
class Person:
    """Somebody at the terminal.

    Attributes:
        console: Where questions are shown.
        read: Shows a prompt and gives back what was typed.
        edit: Opens a text in an editor and gives it back, or None where it was not saved.
    """

    console: Console
    read: Callable[[str], str] = _read
    edit: Callable[[str], str | None] = lambda text: click.edit(text, extension=".json")

    def answer(self, asked: Asked) -> Answer:
        """Ask until there is a reply that fits."""
        self.show(asked)
        while True:
            try:
                reply = self._reply(asked)
                if reply is not None:
                    return reply
            except ReplyError as error:
                self.console.print(Text(f"  {error}", "red"))

    def show(self, asked: Asked) -> None:
        """Show what is asked, in full."""
        self.console.print()
        self.console.print(Text(safe(asked.question), "bold cyan"))
        if asked.context:
            self.console.print(Text(safe(asked.context)))
        if asked.tool and asked.kind != "question":
            self.console.print(_call(asked))
        for number, choice in enumerate(asked.choices, 1):
            self.console.print(Text(f"  {number}) {safe(choice)}"))

    def _reply(self, asked: Asked) -> Answer | None:
        match asked.kind:
            case "approval":
                typed = self.read("[a]llow, [d]eny or [e]dit?").strip()
                return self._decision(typed, asked)
            case "in_doubt":
                return _some(asked.kind, self.read(f"Reply ({FORMS[asked.kind]}):"))
            case _:
                typed = self.read("Your answer:").strip()
                return _chosen(typed, asked.choices) or None

    def _decision(self, typed: str, asked: Asked) -> Answer | None:
        if typed.lower() in ("e", "edit"):
            text = self.read("New arguments as JSON (empty: open them in your editor):").strip()
            return Edit(_object(text or self._edited(asked)))
        reply = _some(asked.kind, typed)
        if isinstance(reply, Deny) and not reply.reason:
            return Deny(self.read("Why not? (the model is told; may be empty)").strip())
        return reply

    def _edited(self, asked: Asked) -> str:
        text = json.dumps(dict(asked.arguments), indent=2, ensure_ascii=False)
        edited = self.edit(text)
        if edited is None:
            raise ReplyError("nothing was changed")
        return edited


def _some(kind: str, typed: str) -> Answer | None:
    return parse_reply(kind, typed) if typed.strip() else None


def _chosen(typed: str, choices: tuple[str, ...]) -> str:
    """The choice whose number was typed, or what was typed."""
    if typed in choices or not typed.isascii() or not typed.isdigit():
        return typed
    return choices[int(typed) - 1] if 0 < int(typed) <= len(choices) else typed


def _call(asked: Asked) -> Table:
    """The call in full: whoever allows it must have seen all of it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("tool", Text(safe(asked.tool), "bold"))
    for name, value in asked.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        table.add_row(safe(name), Text(safe(text)))
    return table
