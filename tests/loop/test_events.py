"""Events are immutable and have a run id, a number and a time; six of them end or suspend a run."""

from __future__ import annotations

import dataclasses

import pytest

from agentfsm.loop import events as e
from agentfsm.loop.failures import Action
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision
from tests.helpers.scenarios import make_failure

BASE = {"run_id": "r", "seq": 1, "time": 2.0}


def test_six_events_end_a_run_or_its_part():
    endings = {
        value for value in vars(e).values()
        if isinstance(value, type) and issubclass(value, e.Ending) and value is not e.Ending
    }  # fmt: skip
    assert endings == {
        e.RunCompleted,
        e.Handoff,
        e.PartialRunSummary,
        e.RunAborted,
        e.RunCancelled,
        e.UserInputRequested,
    }


def test_every_event_has_run_number_and_time_and_cannot_be_changed():
    event = e.RunStarted(**BASE, prompt="hi")
    assert (event.run_id, event.seq, event.time, event.prompt) == ("r", 1, 2.0, "hi")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.seq = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        e.RunStarted("r", 1, 2.0, prompt="hi")  # type: ignore[misc]


def test_recovery_started_is_recoverable():
    assert e.RecoveryStarted(**BASE, failure=make_failure(), action=Action.retry, attempt=1).recoverable is True


def test_a_move_names_the_state_left_and_the_state_entered():
    event = e.Transitioned(**BASE, decision=Decision(LOOP.transition("post_llm.tool_calls"), ()))
    assert (event.source, event.target) == ("post_llm", "dispatch_tool")
