"""Human in the loop at the terminal: show what a run asks, read the reply, and parse typed replies."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentfsm.cli.console import parse_json_object, sanitize
from agentfsm.errors import HumanReplyError
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.human_input import (
    GUARDRAIL_OF_UNIT,
    Allow,
    Deny,
    Edit,
    Extend,
    GiveUp,
    HumanInput,
    ItDidNotRun,
    ItRan,
    PendingRequest,
)
from agentfsm.loop.quorum import Actor, Quorum
from agentfsm.loop.suspension import SuspensionRecord

with contextlib.suppress(ImportError):
    import readline as readline  # importing it is enough to give the prompt line editing


REPLY_FORMATS = {
    "approval": 'allow, deny, "deny REASON", or the new arguments as a JSON object',
    "limit": "how to continue, or tokens=5000 (usd=, seconds=, model_calls=) for another amount than the default",
    "form": 'the fields as a JSON object (or the value, if there is one field), "decline REASON", or cancel',
    "in_doubt": 'ran, "ran RESULT", did-not-run, or give-up',
}
"""The valid replies by kind of request; any text is a valid reply to a question."""

_EXTENSION = re.compile(rf"({'|'.join(GUARDRAIL_OF_UNIT)})=(\S+)")


HumanRequest = UserInputRequested | SuspensionRecord | PendingRequest
"""What a run asks a person: an event, a suspension record, or the pending request of a stored run."""


def must_say_who(quorum: Quorum | None) -> bool:
    """Whether a reply to a request with these votes counts only if it says who gives it."""
    return quorum is not None and quorum.rule.asks_who


def require_name(quorum: Quorum | None, by: str) -> None:
    """Check that a reply says who gives it, if that matters."""
    if must_say_who(quorum) and not by.strip():
        raise click.UsageError(f"the approval has a rule about who may answer ({quorum}): say who you are with --by")


def valid_replies(kind: str, quorum: Quorum | None) -> str:
    """The valid replies to a request, in words; empty if any text is one."""
    return 'allow, deny, or "deny REASON"' if _needs_several(quorum) else REPLY_FORMATS.get(kind, "")


def _needs_several(quorum: Quorum | None) -> bool:
    """Whether several people have to approve the same arguments, so that none can edit them."""
    return quorum is not None and quorum.rule.n > 1


def claimed_actor(by: str, roles: tuple[str, ...]) -> Actor | str:
    """Who replies, as ``--by`` and ``--role`` claim."""
    if roles and not by.strip():
        raise click.UsageError("--role is the role of the person that --by names: give both")
    return Actor(by, roles) if roles else by


def parse_reply(kind: str, text: str) -> HumanInput:
    """The reply that a typed text means.

    Args:
        kind: The kind of request: ``question``, ``form``, ``limit``, ``approval`` or ``in_doubt``.
        text: What was typed.

    Raises:
        HumanReplyError: The text is not a valid reply; the error lists the valid ones.
    """
    if kind not in REPLY_FORMATS:
        return text
    if kind == "limit":
        return parse_extension(text) if _EXTENSION.fullmatch(text.strip()) else text
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    match kind, word.lower().rstrip(":"):
        case "approval", "allow" | "a" | "yes" | "y" if not rest:
            return Allow()
        case "approval", "deny" | "d" | "no" | "n":
            return Deny(rest)
        case "approval", _ if text.lstrip().startswith("{"):
            return Edit(_parse_arguments(text))
        case "form", "decline":
            return Deny(rest)
        case "form", "cancel" if not rest:
            return GiveUp()
        case "form", _:
            return text
        case "in_doubt", "ran":
            return ItRan(rest or "done")
        case "in_doubt", "did-not-run" if not rest:
            return ItDidNotRun()
        case "in_doubt", "give-up" if not rest:
            return GiveUp()
        case _:
            raise HumanReplyError(f"{text.strip()!r} is not a valid reply; reply with {REPLY_FORMATS[kind]}")


def parse_extension(text: str, message: str = "") -> Extend:
    """The extension that a text such as ``tokens=5000`` means.

    Raises:
        HumanReplyError: The text does not name an amount.
    """
    match = _EXTENSION.fullmatch(text.strip())
    try:
        unit, number = ("", "") if match is None else match.groups()
        amount: Any = int(number) if unit in ("tokens", "model_calls") else float(number)
    except ValueError:
        raise HumanReplyError(
            f"{text.strip()!r} is not an amount: write {', '.join(f'{unit}=N' for unit in GUARDRAIL_OF_UNIT)}, with a "
            "whole number of tokens or model calls"
        ) from None
    return Extend(**{unit: amount}, message=message)


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise HumanReplyError(f"the new arguments are {error}") from None


def _read_line(prompt: str) -> str:
    return str(click.prompt(prompt, prompt_suffix=" ", err=True, default="", show_default=False))


@dataclass(frozen=True)
class TerminalPrompter:
    """Asks the user at the terminal.

    Attributes:
        console: Where questions are shown.
        read_line: Shows a prompt and returns the typed line.
        edit_text: Opens a text in an editor and returns the edited text, or None if it was not saved.
    """

    console: Console
    read_line: Callable[[str], str] = _read_line
    edit_text: Callable[[str], str | None] = lambda text: click.edit(text, extension=".json")

    def answer(self, request: HumanRequest) -> HumanInput:
        """Ask until the reply is valid, and return it."""
        self.show_request(request)
        while True:
            try:
                reply = self._prompt_once(request)
                if reply is not None:
                    return reply
            except HumanReplyError as error:
                self.console.print(Text(f"  {error}", "red"))

    def show_request(self, request: HumanRequest) -> None:
        """Show the request in full."""
        self.console.print()
        self.console.print(Text(sanitize(request.question), "bold cyan"))
        if request.limit is not None:
            self.console.print(Text(str(request.limit)))
        if request.quorum is not None:
            self.console.print(Text(sanitize(str(request.quorum))))
        if request.context:
            self.console.print(Text(sanitize(request.context)))
        if request.tool and request.kind not in ("question", "form"):
            self.console.print(_call_table(request))
        for number, choice in enumerate(request.choices, 1):
            self.console.print(Text(f"  {number}) {sanitize(choice)}"))

    def _prompt_once(self, request: HumanRequest) -> HumanInput | None:
        match request.kind:
            case "approval":
                choices = "[a]llow or [d]eny?" if _needs_several(request.quorum) else "[a]llow, [d]eny or [e]dit?"
                typed = self.read_line(choices).strip()
                return self._parse_approval(typed, request)
            case "form" | "in_doubt" | "limit":
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
            return Deny(self.read_line("Why not? (sent to the model; may be empty)").strip())
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
    """The call in full: the person who approves it must have seen all of it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("tool", Text(sanitize(request.tool), "bold"))
    for name, value in request.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        table.add_row(sanitize(name), Text(sanitize(text)))
    return table
