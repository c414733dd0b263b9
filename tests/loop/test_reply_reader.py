"""A reply is read by the run's behavior: calls, an answer, or why it is neither."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentfsm import Agent, Host
from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.messages import Message, Reply, ToolCall
from agentfsm.loop.outcomes import ReplyParsed
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.reply_reader import continue_answer, read_reply
from agentfsm.loop.state import RunState
from agentfsm.testing import RecordingModel, ScriptedModel

CALL = ToolCall("c1", "add", {"a": 1})
FINAL = '{"kind": "final", "content": "x"}'


def run_with(text: str, *calls: ToolCall, partial_answer: str = "", **behavior: object) -> RunState:
    run = RunState("one", behavior=Behavior.model_validate(behavior), partial_answer=partial_answer)
    run.reply = Reply(Message.assistant(text, calls))
    return run


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RunState("one"), ReplyParsed()),
        (run_with("hello"), ReplyParsed(answer="hello")),
        (run_with("calling", CALL), ReplyParsed(calls=(CALL,))),
        (run_with("hello", text_is_answer=False), ReplyParsed()),
        (
            run_with("hello", text_is_answer=False, missing_call="malformed"),
            ReplyParsed(malformed="it contains no tool call"),
        ),
        (run_with(FINAL, envelope=True), ReplyParsed(answer="x")),
        (run_with(FINAL, envelope=True, text_is_answer=False), ReplyParsed()),
        (
            run_with(FINAL, envelope=True, text_is_answer=False, missing_call="malformed"),
            ReplyParsed(malformed="it contains no tool call"),
        ),
        (run_with("fox jumps", partial_answer="The quick brown "), ReplyParsed(answer="The quick brown fox jumps")),
    ],
)
def test_a_reply_is_read_by_the_behavior(run: RunState, expected: ReplyParsed) -> None:
    assert read_reply(run, None) == expected


def test_answers_are_parsed_and_calls_and_empty_replies_are_not() -> None:
    def parse(text: str) -> ReplyParsed:
        return ReplyParsed(answer=len(text))

    assert read_reply(run_with("hello"), parse) == ReplyParsed(answer=5)
    assert read_reply(run_with("hello", CALL), parse) == ReplyParsed(calls=(CALL,))
    assert read_reply(run_with(" "), parse) == ReplyParsed(answer=" ")


@pytest.mark.parametrize("name", ["funnel", "breaker"])
def test_in_an_envelope_too_text_ends_no_run_where_it_is_no_answer(name: str) -> None:
    preset = replace(PRESETS[name], behavior=PRESETS[name].behavior.model_copy(update={"envelope": True}))
    done = '{"kind": "tool_call", "tool_name": "return_done", "arguments": {"output": "done"}}'
    model = RecordingModel(ScriptedModel([FINAL, done]))
    assert Agent(model, preset=preset, host=Host(monitor="raise")).run_sync("go").output == "done"
    assert "final" not in model.requests[0].messages[0].content
    assert "tool call" in model.requests[1].messages[-1].content


def test_a_joined_answer_that_is_malformed_gives_way_to_the_reply_alone() -> None:
    def parse(text: str) -> ReplyParsed:
        return ReplyParsed(answer=text) if text == "42" else ReplyParsed(malformed=text)

    assert read_reply(run_with("42", partial_answer="It is 4"), parse) == ReplyParsed(answer="42")


LONG = "There was a language in which everybody wrote, and nobody knew why. " * 5


@pytest.mark.parametrize(
    ("beginning", "reply", "answer"),
    [
        ("The answer is fo", "rty-two.", "The answer is forty-two."),
        ("Once upon a time there", " was a fox.", "Once upon a time there was a fox."),
        ("One. ", "Two.", "One. Two."),
        ("One.\n", "Two.", "One.\nTwo."),
        ("1, 2, ", "3", "1, 2, 3"),
        ("NA", "SA", "NASA"),
        ("a", "b", "ab"),
        ("aaa", "a", "aaaa"),
        ("Use the SDK of Open", "AI for it.", "Use the SDK of OpenAI for it."),
        ("All of it is in Read", "Me.md, I think.", "All of it is in ReadMe.md, I think."),
        ("        self.assert", "Equal(a, b)\n", "        self.assertEqual(a, b)\n"),
        ("I like Java", "Script.", "I like JavaScript."),
        (f"{LONG}Then they wrote Java", "Script for it.", f"{LONG}Then they wrote JavaScript for it."),
    ],
)
def test_what_continues_is_joined(beginning, reply, answer):
    assert continue_answer(beginning, reply) == answer


@pytest.mark.parametrize(
    ("beginning", "reply"),
    [
        ("The answer is fo", "Sorry. It is 42."),
        ("The answer is fo", "The answer is forty-two."),
        ("The answer is fo", "The answer is: 42."),
        ("It has three parts.\n1. A", "I apologize for the interruption. It has three parts: A, B and C."),
        ("One. ", "  Sorry! One. Two."),
        ("It is fo", "It is 42."),
        ("The answer is fo", "It is 42."),
        ("", "All of it."),
        ("The answer is fo", "Certainly! The answer is forty-two."),
        (f"{LONG}It is fo", f"{LONG}It is 42."),
    ],
)
def test_what_starts_again_counts_alone(beginning, reply):
    assert continue_answer(beginning, reply) == reply


def test_words_that_are_repeated_before_going_on_are_there_once():
    assert continue_answer("Once upon a time there", "a time there was a fox.") == "Once upon a time there was a fox."
