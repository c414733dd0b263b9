"""A truncated answer is joined with the next reply only where the model really continued."""

from __future__ import annotations

import pytest

from agentfsm.loop.truncation import continue_answer


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
    ],
)
def test_what_starts_again_counts_alone(beginning, reply):
    assert continue_answer(beginning, reply) == reply


def test_words_that_are_repeated_before_going_on_are_there_once():
    assert continue_answer("Once upon a time there", "a time there was a fox.") == "Once upon a time there was a fox."
