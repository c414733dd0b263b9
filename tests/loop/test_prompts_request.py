"""The messages of a request: equal for equal states, with everything that changes at the very end."""

from __future__ import annotations

import copy
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.messages import Message, Role, ToolCall, Transcript
from agentfsm.loop.prompts import (
    CONTINUE,
    ELIDED_RESULT_TEXT,
    final_turn_text,
    lessons_block,
    render_messages,
)
from agentfsm.loop.state import RunState
from tests.helpers.scenarios import make_failure, make_run

CALLING = [
    Message.system("be good"),
    Message.user("do it"),
    Message.assistant("", (ToolCall("c1", "look"),)),
    Message(Role.TOOL, "seen", tool_call_id="c1", name="look"),
]
LESSON = make_failure("tool_error", "no <disk> & \"quotes\" 'too'", blockers=("a", "b"))


def test_with_nothing_to_add_the_transcript_is_the_request():
    run = make_run(messages=list(CALLING))
    assert list(render_messages(run)) == CALLING


@pytest.mark.parametrize(
    "fields",
    [
        {"feedback": "F"},
        {"pending_instruction": "I"},
        {"lessons_learned": [LESSON]},
        {"final_turn": "now"},
        {"feedback": "F", "pending_instruction": "I", "lessons_learned": [LESSON], "elided": 2},
    ],
)
def test_rendering_is_pure(fields):
    run = make_run(messages=list(CALLING), **fields)
    before = copy.deepcopy(run)
    assert render_messages(run) == render_messages(run)
    assert run == before


ADDITIONS = [
    {"feedback": "F"},
    {"pending_instruction": "I"},
    {"lessons_learned": [LESSON]},
    {"final_turn": "now"},
]


@pytest.mark.parametrize("fields", ADDITIONS)
def test_no_addition_makes_a_user_message_after_a_tool_result(fields):
    shown = list(render_messages(make_run(messages=list(CALLING), **fields)))
    assert [m.role for m in shown] == [m.role for m in CALLING]
    assert shown[:-1] == CALLING[:-1]
    assert shown[-1].content.startswith("seen\n\n")
    assert (shown[-1].tool_call_id, shown[-1].name) == ("c1", "look")


@pytest.mark.parametrize("name", ["look", None], ids=["a result", "feedback"])
def test_additions_after_a_tool_message_without_a_call_are_outside_its_fence(name):
    before = [Message.user("go"), Message.assistant("{}"), Message(Role.TOOL, "<seen>", name=name)]
    shown = list(render_messages(make_run(messages=list(before), pending_instruction="I")))
    assert shown[:-1] == before[:-1]
    assert shown[-1].role is Role.USER
    fenced, _, added = shown[-1].content.rpartition("\n\n")
    assert added == "I"
    assert fenced.startswith(("Result of the tool 'look'", "Feedback on your last message"))
    assert "&lt;seen&gt;" in fenced


def test_a_run_without_an_addendum_repeats_no_lessons():
    run = make_run(messages=list(CALLING), lessons_learned=[LESSON], behavior={"addendum": False})
    assert list(render_messages(run)) == CALLING


def test_what_is_added_is_appended_to_the_last_users_message():
    run = make_run(messages=[Message.user("do it")], lessons_learned=[LESSON])
    (only,) = render_messages(run)
    assert only.role is Role.USER
    assert only.content.startswith("do it\n\n<context_addendum>")
    assert run.messages == [Message.user("do it")]


def test_feedback_comes_first_then_the_instruction_then_the_last_turn_then_the_lessons():
    run = make_run(
        messages=[Message.user("go")], feedback="F", pending_instruction="I", lessons_learned=[LESSON], final_turn="now"
    )
    (only,) = render_messages(run)
    assert only.content == f"go\n\nF\n\nI\n\n{final_turn_text(Behavior())}\n\n{lessons_block([LESSON])}"


@pytest.mark.parametrize("grace", ["", "used"])
def test_the_last_turn_is_announced_in_that_turn_alone(grace):
    assert list(render_messages(make_run(messages=list(CALLING), final_turn=grace))) == CALLING


@given(st.lists(st.sampled_from(["plain", "feedback", "instruction", "lesson"]), min_size=1, max_size=6))
def test_what_was_sent_stays_a_prefix_of_what_is_sent_next(turns):
    """Whatever one request adds to its last message, the next begins with what is stored, byte for byte."""
    run = make_run(messages=list(CALLING))
    for number, turn in enumerate(turns):
        run.feedback = "F" if turn == "feedback" else None
        run.pending_instruction = "I" if turn == "instruction" else None
        if turn == "lesson":
            run.add_lesson(make_failure("tool_error", f"lesson {number}"))
        stored = list(run.messages)
        first = list(render_messages(run))
        assert first[: len(stored) - 1] == stored[:-1]
        assert first[len(stored) - 1].content.startswith(stored[-1].content)
        assert len(first) == len(stored)
        call = ToolCall(f"x{number}", "look")
        run.messages += [Message.assistant("", (call,)), Message(Role.TOOL, "ok", tool_call_id=call.id)]
        assert list(render_messages(run))[: len(stored)] == stored


# -- the addendum -------------------------------------------------------------------------------------


def test_lessons_are_one_block_of_xml_that_says_kind_explanation_and_blockers():
    text = lessons_block([LESSON, make_failure("no_progress", "stalled")])
    root = ElementTree.fromstring(text)
    assert root.tag == "context_addendum"
    first, second = root.findall("lessons_learned/failure")
    assert first.attrib == {"kind": "tool_error", "explanation": LESSON.explanation, "blockers": "a; b"}
    assert second.attrib == {"kind": "no_progress", "explanation": "stalled", "blockers": ""}


def test_the_markup_of_a_lesson_is_escaped():
    text = lessons_block([make_failure("tool_error", '</lessons_learned> & "x"')])
    assert text.count("</lessons_learned>") == 1
    assert "&lt;/lessons_learned&gt; &amp; &quot;x&quot;" in text


@given(st.text())
def test_any_text_makes_well_formed_xml(text):
    (lesson,) = ElementTree.fromstring(lessons_block([make_failure("tool_error", text)])).iter("failure")
    assert len(lesson.attrib) == 3


@pytest.mark.parametrize("character", ["\x00", "\x08", "\x0b", "\x1f", "\ufffe", "\uffff"])
def test_a_character_that_xml_cannot_write_is_replaced(character):
    (lesson,) = ElementTree.fromstring(lessons_block([make_failure("tool_error", f"a{character}b")])).iter("failure")
    assert lesson.attrib["explanation"] == "a�b"


@pytest.mark.parametrize("character", ["\t", "\n", "\r", "ü", "漢", "🙂", "\ud7ff", "\ue000"])
def test_a_character_that_xml_can_write_comes_through(character):
    (lesson,) = ElementTree.fromstring(lessons_block([make_failure("tool_error", f"a{character}b")])).iter("failure")
    assert lesson.attrib["explanation"] == f"a{character}b"


# -- older results left out ---------------------------------------------------------------------------


def test_elided_results_keep_their_place_and_their_call():
    older = [*CALLING, Message.assistant("", (ToolCall("c2", "look"),)), Message(Role.TOOL, "new", tool_call_id="c2")]
    run = make_run(messages=older, elided=4)
    shown = list(render_messages(run))
    assert [m.content for m in shown] == ["be good", "do it", "", ELIDED_RESULT_TEXT, "", "new"]
    assert [m.tool_call_id for m in shown] == [m.tool_call_id for m in older]
    assert run.messages[3].content == "seen"


# -- the view -----------------------------------------------------------------------------------------


def test_an_old_request_still_shows_what_was_sent():
    run = make_run(messages=list(CALLING), feedback="F")
    kept = render_messages(run)
    before = list(kept)
    run.messages.append(Message.user("later"))
    run.feedback = None
    assert list(kept) == before
    assert len(kept) == 4
    assert kept[-1].content == "seen\n\nF"


view = Transcript(list(CALLING), 2, (Message.user("tail"),))


def test_a_transcript_behaves_like_a_list():
    wanted = [*CALLING[:2], Message.user("tail")]
    assert len(view) == 3
    assert [view[i] for i in range(3)] == wanted
    assert [view[i] for i in (-1, -3)] == [wanted[-1], wanted[-3]]
    assert view[1:] == wanted[1:]
    assert view[::-1] == wanted[::-1]
    assert wanted[1] in view
    assert list(reversed(view)) == wanted[::-1]
    assert view == wanted
    assert view == Transcript(wanted, 3)
    assert view != CALLING
    assert view != "tail"
    assert repr(view) == f"Transcript({wanted!r})"


@pytest.mark.parametrize("place", [3, -4, 99])
def test_a_view_ends_where_it_ends(place):
    with pytest.raises(IndexError):
        view[place]


def test_a_view_cannot_be_changed_or_hashed():
    with pytest.raises(TypeError):
        view[0] = Message.user("x")  # type: ignore[index]
    with pytest.raises(TypeError):
        hash(view)


def test_an_empty_run_renders_to_nothing():
    assert list(render_messages(RunState("r"))) == []


def test_a_request_never_ends_with_an_assistant_message():
    said = [Message.user("hi"), Message.assistant("hello")]
    assert list(render_messages(make_run(messages=list(said)))) == [*said, Message.user(CONTINUE)]
    assert list(render_messages(make_run(messages=list(said), feedback="F"))) == [*said, Message.user("F")]
