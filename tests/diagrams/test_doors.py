"""Hooks in a picture: at the door of their state, in their order, and in every form that is looked at."""

from __future__ import annotations

import pytest

from agentfsm import Agent, GraphError, HookContext, State, hook, permissions
from agentfsm.diagrams import FORMATS, HooksOverlay, diagram
from agentfsm.loop.table import LOOP
from agentfsm.testing import ScriptedModel


@hook(at=State.CALL_LLM)
def gapminder(seen: HookContext) -> None:
    """Do nothing."""


TEXT_FORMATS = [name for name, form in FORMATS.items() if not form.image]
WITH_OVERLAYS = [name for name in TEXT_FORMATS if FORMATS[name].overlays]


@pytest.mark.parametrize("form", WITH_OVERLAYS)
def test_every_form_that_is_looked_at_shows_them(form: str) -> None:
    agent = Agent(ScriptedModel([]), hooks=[permissions(), gapminder])
    picture = agent.diagram(form)
    assert picture.count("gapminder") >= 1
    assert "permissions" in picture
    assert "gapminder" not in LOOP.diagram(form)


def test_they_stand_in_the_box_of_their_state_in_order() -> None:
    text = diagram(LOOP, "text", overlay=HooksOverlay({"dispatch_tool": ["first", "second"]}))
    (line,) = [line for line in text.splitlines() if "first" in line]
    assert "dispatch_tool" in line
    assert line.index("first") < line.index("second") < line.index("run the next call")
    assert "2 hooks" in text


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_an_agent_without_hooks_is_drawn_as_its_graph(form: str) -> None:
    assert Agent(ScriptedModel([])).diagram(form) == LOOP.diagram(form)


def test_a_state_that_the_graph_does_not_have_is_refused() -> None:
    with pytest.raises(GraphError, match="no such state"):
        diagram(LOOP, "text", overlay=HooksOverlay({"nowhere": ["x"]}))
