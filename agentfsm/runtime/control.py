"""The loop's own tools, with which a model asks, finishes or gives up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from agentfsm.runtime.tools import Tool, as_tool

__all__ = ["control_tools"]


def ask_user(question: str, context: str = "", choices: list[str] | None = None) -> dict[str, Any]:
    """Ask the user something that you need to know in order to go on. The answer is this call's result.

    Args:
        question: One clear question.
        context: Why you ask.
        choices: Answers to choose from, if there are only a few.
    """
    return {"question": question, "context": context, "choices": choices or []}


def return_done(output: str) -> Any:
    """Finish: the task is done.

    Args:
        output: The result, as the user should see it.
    """
    return output


def return_unable(
    rationale: str, blockers: list[str] | None = None, suggested_next_steps: list[str] | None = None
) -> dict[str, Any]:
    """Give up: the task cannot be done here. This is a good answer when it is true.

    Args:
        rationale: Why it cannot be done.
        blockers: What concretely stands in the way.
        suggested_next_steps: What a person could do about it.
    """
    return {
        "rationale": rationale,
        "blockers": blockers or [],
        "suggested_next_steps": suggested_next_steps or [],
    }


def control_tools(output_type: Any = None) -> Mapping[str, Tool]:
    """The three control tools by name; with an output type, ``return_done`` takes a value of it."""
    if output_type is None:
        return _plain()

    def typed_done(output: Any) -> Any:
        return output

    typed_done.__doc__ = return_done.__doc__
    typed_done.__annotations__["output"] = output_type
    return {**_plain(), "return_done": as_tool(typed_done, name="return_done", control="done")}


@cache
def _plain() -> Mapping[str, Tool]:
    """Made once: a schema takes milliseconds, and an agent may be made for each request of a server."""
    tools = (
        as_tool(ask_user, control="ask"),
        as_tool(return_done, control="done"),
        as_tool(return_unable, control="unable"),
    )
    return MappingProxyType({t.name: t for t in tools})
