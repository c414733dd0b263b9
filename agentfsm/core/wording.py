"""What the model and people are told, in one place: feedback, instructions, questions, tool results."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from agentfsm.core.failures import Failure, FailureKind

__all__ = [
    "GO_ON",
    "NOT_RUN",
    "WRAP_UP",
    "cut_off",
    "feedback",
    "instruction",
    "invalid_arguments",
    "question",
    "raised",
    "repeat_warning",
    "unknown_tool",
]

GO_ON = "Go on."
"""What a request says that would end with the model's own words: a server takes those for a beginning to finish."""

WRAP_UP = "The time for this task is over. This is your last turn: give your best answer now, and call no more tools."

_FEEDBACK = MappingProxyType(
    {
        FailureKind.output_malformed: (
            "Your last message could not be read: {explanation}. Send it again in the required form, as valid "
            "JSON and nothing else."
        ),
        FailureKind.no_progress: (
            "Your last message called no tool. Look at what is missing, and answer with a tool call."
        ),
        FailureKind.output_refused: "Your last message refused: {explanation}. Try another way.",
        FailureKind.loop_detected: "{explanation}. Repeating it brings nothing new: change your approach.",
    }
)

_CUT_OFF = MappingProxyType(
    {
        "answer": "Go on exactly where it stopped, without repeating anything.",
        "call": "Make the call again, with less in it.",
        "more_room": "There is more room now: send it again, whole.",
    }
)

_INSTRUCTIONS = MappingProxyType(
    {
        FailureKind.no_progress: (
            "The last turn brought the task no further. Choose one: make the next tool call; call ask_user if you "
            "need something from the user; call return_done if the task is finished; call return_unable if it "
            "cannot be done. All four are equally good."
        ),
        FailureKind.scope_too_large: (
            "The last step was too large ({explanation}). Pick the smallest next step that helps, and do only that."
        ),
        FailureKind.kernel_invalidated: (
            "The working state of the last step is lost ({explanation}). Rebuild what you need, beginning with the "
            "smallest next step."
        ),
        FailureKind.context_overflow: (
            "The conversation had grown too long, so older tool results were left out. Work with what is here, and "
            "ask for less at a time."
        ),
    }
)

_QUESTIONS = MappingProxyType(
    {
        FailureKind.iteration_limit: "The run has used up its model calls ({explanation}). How should it go on?",
        FailureKind.time_limit: "The run has used up its time ({explanation}). How should it go on?",
        FailureKind.token_limit: (
            "The run has used up its tokens ({explanation}). No reply can extend it: end it here, and begin anew with "
            "a larger max_tokens."
        ),
        FailureKind.cost_limit: (
            "The run has used up its budget ({explanation}). No reply can extend it: end it here, and begin anew with "
            "a larger max_cost_usd."
        ),
        FailureKind.loop_detected: "The agent repeats itself: {explanation}. What should it do instead?",
        FailureKind.ambiguous_input: "The request is not clear enough: {explanation}. What is meant?",
    }
)

NOT_RUN = MappingProxyType(
    {
        "ask": "Not run: the user was asked a question first.",
        "done": "Not run: an earlier call of the same message ended the run.",
        "unable": "Not run: an earlier call of the same message ended the run.",
        "cancelled": "Cut off: the run was cancelled before this call had a result.",
        "aborted": "Cut off: the run was aborted before this call had a result.",
        "truncated": "Not run: the message was cut off before this call was complete.",
        "": "Not run: the message was set aside before this call was reached.",
    }
)
"""Why a call of a batch has no result of its own."""


def raised(error: BaseException) -> str:
    """An exception in words: its class, and what it says where it can say it."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # user code too
        return kind
    return f"{kind}: {text}" if text else kind


def feedback(failure: Failure) -> str:
    """What the next request says about a reply that no tool result answers."""
    text = _FEEDBACK.get(failure.kind, "The last step failed: {explanation}. Try a different approach.")
    return text.format(explanation=failure.explanation)


def cut_off(what: str) -> str:
    """What the next request says about a message that was cut off by its length.

    Args:
        what: ``answer`` to go on with one, ``call`` to make one again, ``more_room`` to say all of it again.
    """
    return f"Your last message was cut off by its length limit and no call in it was run. {_CUT_OFF[what]}"


def instruction(failure: Failure) -> str:
    """What the next request says after ``narrow_scope``, worded for the failure's kind."""
    text = _INSTRUCTIONS.get(
        failure.kind, "The last step failed ({explanation}). Pick the smallest next step that avoids this."
    )
    return text.format(explanation=failure.explanation)


def question(failure: Failure) -> str:
    """What a person is asked about a failure."""
    text = _QUESTIONS.get(failure.kind, "The run cannot go on by itself: {explanation}. What should it do?")
    return text.format(explanation=failure.explanation)


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """The result of a call to a tool that is not registered; the registered ones stand sorted."""
    names = ", ".join(sorted(known))
    others = f"Call one of the registered tools: {names}." if names else "No tool is registered: answer in words."
    return f"There is no tool named {name!r}. {others}"


def invalid_arguments(tool: str, problems: Iterable[str]) -> str:
    """The result of a call whose arguments do not fit, naming each bad field."""
    return f"The arguments of {tool!r} are not valid: {'; '.join(problems)}. Correct them and call again."


def repeat_warning(count: int) -> str:
    """What is added to the result of a call that was made before."""
    return f"[Note: this exact call has now been made {count} times. Its result will not change by repeating it.]"
