"""Prompts at the terminal: what can be typed, and what reply it becomes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agentfsm import (
    Agent,
    Allow,
    Deny,
    Edit,
    Extend,
    GiveUp,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    ReachedLimit,
    UserInputRequested,
    tool,
)
from agentfsm.cli.terminal_prompt import TerminalPrompter, parse_reply
from agentfsm.loop.human_input import HumanInput
from agentfsm.testing import ScriptedModel, call


def make_request(kind: str = "approval", **fields: Any) -> UserInputRequested:
    """The approval request of a real run, with some fields changed."""

    @tool(requires_approval=True)
    def send(to: str, text: str) -> str:
        """Send a message."""
        return "sent"

    agent = Agent(ScriptedModel([call("send", to="Ann", text="one\ntwo")]), tools=[send])
    outcome = agent.run_sync("go").outcome
    assert isinstance(outcome, UserInputRequested)
    return UserInputRequested(**{**vars(outcome), "kind": kind, **fields})


def prompt_for(question: UserInputRequested, *typed: str, editor: str | None = None) -> tuple[HumanInput, str]:
    """The reply to the typed lines, and everything printed."""
    shown = io.StringIO()
    lines = iter(typed)

    def read(prompt: str) -> str:
        shown.write(f"{prompt}\n")
        return next(lines)

    prompter = TerminalPrompter(Console(file=shown, width=100, markup=False, highlight=False), read, lambda _: editor)
    return prompter.answer(question), shown.getvalue()


@pytest.mark.parametrize(
    ("kind", "typed", "reply"),
    [
        ("form", '{"day": "2027-01-02"}', '{"day": "2027-01-02"}'),
        ("form", "decline not now", Deny("not now")),
        ("form", "cancel", GiveUp()),
        ("form", "Ann", "Ann"),
        ("approval", "allow", Allow()),
        ("approval", "Y", Allow()),
        ("approval", "deny", Deny()),
        ("approval", "deny: not on a Friday", Deny("not on a Friday")),
        ("approval", "no  way", Deny("way")),
        ("approval", ' {"a": [1]} ', Edit({"a": [1]})),
        ("in_doubt", "ran", ItRan()),
        ("in_doubt", "ran it said 3", ItRan("it said 3")),
        ("in_doubt", "did-not-run", ItDidNotRun()),
        ("in_doubt", "give-up", GiveUp()),
        ("question", "allow", "allow"),
        ("limit", " ten more ", " ten more "),
        ("limit", "tokens=5000", Extend(tokens=5000)),
        ("limit", " usd=0.5 ", Extend(usd=0.5)),
        ("limit", "seconds=90", Extend(seconds=90.0)),
        ("limit", "model_calls=3", Extend(model_calls=3)),
        ("limit", "use tokens=5000", "use tokens=5000"),
        ("question", "tokens=5000", "tokens=5000"),
    ],
)
def test_a_typed_reply_is_parsed_by_kind_of_request(kind: str, typed: str, reply: HumanInput) -> None:
    assert parse_reply(kind, typed) == reply


@pytest.mark.parametrize(
    ("kind", "typed", "message"),
    [
        ("approval", "perhaps", "reply with allow, deny"),
        ("approval", "allow me", "reply with allow, deny"),
        ("approval", "{broken", "not valid JSON"),
        ("approval", "", "reply with allow, deny"),
        ("in_doubt", "allow", "reply with ran"),
        ("in_doubt", "give-up now", "reply with ran"),
        ("limit", "tokens=many", "write model_calls=N, seconds=N, tokens=N, usd=N"),
        ("limit", "tokens=1.5", "a whole number of tokens"),
    ],
)
def test_an_invalid_reply_is_refused_with_the_valid_ones(kind: str, typed: str, message: str) -> None:
    with pytest.raises(HumanReplyError, match=message):
        parse_reply(kind, typed)


def test_a_limit_shows_what_is_used_up_and_what_a_reply_grants() -> None:
    request = make_request("limit", limit=ReachedLimit("tokens", 5120, 5000, 5000), tool="")
    reply, shown = prompt_for(request, "", "tokens=many", "tokens=800")
    assert reply == Extend(tokens=800)
    assert "5120 of 5000 tokens are used up, and a reply grants 5000 by default" in shown
    assert "tokens=5000 (usd=, seconds=, model_calls=)" in shown


def test_an_approval_shows_the_whole_call() -> None:
    reply, shown = prompt_for(make_request(arguments={"to": "Ann", "text": "x" * 3000, "n": {"deep": [1]}}), "a")
    assert reply == Allow()
    assert "May 'send' run with these arguments?" in shown
    assert shown.count("x") >= 3000
    assert '{"deep": [1]}' in shown


def test_a_request_cannot_send_control_characters_to_the_terminal() -> None:
    _, shown = prompt_for(make_request(arguments={"to": "\x1b[2JAnn\u202e", "text": "[red]no markup[/red]"}), "a")
    assert "\x1b" not in shown
    assert r"\x1b[2JAnn\u202e" in shown
    assert "[red]no markup[/red]" in shown


def test_an_empty_line_asks_again() -> None:
    assert prompt_for(make_request(), "", "  ", "a")[0] == Allow()
    assert prompt_for(make_request("question"), "", "blue")[0] == "blue"
    assert prompt_for(make_request("in_doubt"), "", "ran")[0] == ItRan()


def test_a_denial_asks_for_a_reason_once() -> None:
    assert prompt_for(make_request(), "d", "too dear")[0] == Deny("too dear")
    assert prompt_for(make_request(), "d", "")[0] == Deny("")
    assert prompt_for(make_request(), "deny too dear")[0] == Deny("too dear")


def test_arguments_are_edited_inline_or_in_an_editor() -> None:
    assert prompt_for(make_request(), "e", '{"to": "Bob"}')[0] == Edit({"to": "Bob"})
    assert prompt_for(make_request(), "edit", "", editor='{"to": "Eve"}')[0] == Edit({"to": "Eve"})
    reply, shown = prompt_for(make_request(), "e", "", "a", editor=None)
    assert reply == Allow()
    assert "nothing was changed" in shown


@pytest.mark.parametrize(
    ("typed", "reply"),
    [("1", "red"), ("2", "30"), ("30", "30"), ("3", "3"), ("0", "0"), ("²", "²"), ("green", "green")],
)
def test_a_choice_is_selected_by_number_or_text(typed: str, reply: str) -> None:
    got, shown = prompt_for(make_request("question", choices=("red", "30"), tool="ask_user"), typed)
    assert got == reply
    assert "1) red" in shown
    assert "tool" not in shown


def test_a_form_shows_its_fields_and_takes_them_as_json() -> None:
    request = make_request("form", question="When?", context="day (date; required)", form={"type": "object"})
    reply, shown = prompt_for(request, "", '{"day": "2027-01-02"}')
    assert reply == '{"day": "2027-01-02"}'
    assert "day (date; required)" in shown
    assert "send" not in shown  # the call is not what the person decides about
