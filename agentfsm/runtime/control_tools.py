"""The control tools, by which a model asks the user, finishes, or gives up: ask_user, return_done and return_unable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field

from agentfsm.runtime.tools import Tool, as_tool


def _not_blank(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be blank")
    return value


_Text = Annotated[str, AfterValidator(_not_blank)]
"""A text that says something."""

_OUTPUT_NAMES = AliasChoices("output", "summary")
"""What a model may call the argument of ``return_done``; it is told the first."""


def _control(kind: str) -> Callable[[Callable[..., Any]], Tool]:
    """Decorator: make a function the control tool of a kind."""

    def decorate(function: Callable[..., Any]) -> Tool:
        return as_tool(function, control=kind)

    return decorate


@_control("ask")
def ask_user(question: _Text, context: str = "", choices: list[str] | None = None) -> dict[str, Any]:
    """Ask the user something that you need to know in order to go on. The answer is this call's result.

    Args:
        question: One clear question.
        context: Why you ask.
        choices: Answers to choose from, if there are only a few.
    """
    return {"question": question, "context": context, "choices": choices or []}


@_control("done")
def return_done(output: Annotated[_Text, Field(validation_alias=_OUTPUT_NAMES)]) -> Any:
    """Finish: the task is done.

    Args:
        output: The result, as the user should see it.
    """
    return output


@_control("unable")
def return_unable(
    rationale: _Text, blockers: list[str] | None = None, suggested_next_steps: list[str] | None = None
) -> dict[str, Any]:
    """Give up: the task cannot be done here. This is a good answer when it is true.

    Args:
        rationale: Why it cannot be done.
        blockers: What concretely prevents it.
        suggested_next_steps: What a person could do about it.
    """
    return {
        "rationale": rationale,
        "blockers": blockers or [],
        "suggested_next_steps": suggested_next_steps or [],
    }


CONTROL_TOOLS: Mapping[str, Tool] = MappingProxyType(
    {each.name: each for each in (ask_user, return_done, return_unable)}
)
"""The control tools by name."""


def control_tools(output_type: Any = None) -> Mapping[str, Tool]:
    """The three control tools by name.

    Args:
        output_type: The type of ``return_done``'s argument; None for text.
    """
    if output_type in (None, str):
        return CONTROL_TOOLS

    def typed_done(output: Any) -> Any:
        return output

    typed_done.__doc__ = return_done.function.__doc__
    typed_done.__annotations__["output"] = Annotated[output_type, Field(validation_alias=_OUTPUT_NAMES)]
    return {**CONTROL_TOOLS, "return_done": as_tool(typed_done, name="return_done", control="done")}
